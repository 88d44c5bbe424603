//! Local operations: what is done in send-queue order and never travels. Windows live in [`Memory`].

use ferroce_mem::{Bind, Memory};
use ferroce_verbs::{SendOp, WcStatus};

use crate::qp::Base;

/// Does a local operation; the status it fails with, if it does. Nothing is changed then.
pub(crate) fn execute(base: &Base, op: &SendOp, memory: &Memory) -> Result<(), WcStatus> {
    match *op {
        SendOp::LocalInv { rkey } => {
            memory.invalidate(base.qpn, base.attr.pd, rkey).map_err(|_| WcStatus::LocQpOpErr)
        }
        SendOp::BindMw { rkey, mr, addr, len, access } => {
            let bind = Bind { rkey, lkey: mr, addr, len, access };
            memory.bind_window(base.qpn, base.attr.pd, &bind).map_err(|_| WcStatus::MwBindErr)
        }
        SendOp::Send
        | SendOp::SendImm(_)
        | SendOp::SendInv { .. }
        | SendOp::Write { .. }
        | SendOp::WriteImm { .. }
        | SendOp::Read { .. }
        | SendOp::CmpSwap { .. }
        | SendOp::FetchAdd { .. } => Err(WcStatus::LocQpOpErr),
    }
}

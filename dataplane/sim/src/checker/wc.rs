//! What a completion must say of the request that it is for. Called by [`super`]; knows nothing else of a run.

use ferroce_verbs::{Wc, WcFlags, WcOpcode, WcStatus};

use super::{OpKind, SendRecord, Violation, ViolationKind, broken};
use crate::world::QpRef;

pub(super) fn check_send_wc(at: QpRef, record: &SendRecord, wc: Option<&Wc>) -> Result<(), Violation> {
    let Some(wc) = wc else {
        if record.signaled {
            let what = format!("{at:?}: wr_id {} is signalled and got no completion", record.wr_id);
            return broken(ViolationKind::NotOnce, what);
        }
        return Ok(());
    };
    if wc.wr_id != record.wr_id {
        let what = format!("{at:?}: wr_id {} completed, the oldest is {}", wc.wr_id, record.wr_id);
        return broken(ViolationKind::OutOfOrder, what);
    }
    if wc.status != WcStatus::Success {
        return Ok(());
    }
    if !record.signaled {
        let what = format!("{at:?}: wr_id {} is not signalled and got a completion", record.wr_id);
        return broken(ViolationKind::NotOnce, what);
    }
    let (opcode, len) = match record.kind {
        OpKind::Send => (WcOpcode::Send, None),
        OpKind::Write => (WcOpcode::RdmaWrite, None),
        OpKind::Read => (WcOpcode::RdmaRead, Some(record.data.len() as u32)),
        OpKind::CmpSwap => (WcOpcode::CompSwap, Some(8)),
        OpKind::FetchAdd => (WcOpcode::FetchAdd, Some(8)),
        OpKind::BindMw => (WcOpcode::BindMw, None),
        OpKind::LocalInv => (WcOpcode::LocalInv, None),
    };
    if wc.opcode != opcode || len.is_some_and(|len| len != wc.byte_len) {
        return broken(ViolationKind::WrongCompletion, format!("{at:?}: {wc:?}, must be {opcode:?} {len:?}"));
    }
    Ok(())
}

pub(super) fn check_recv_wc(at: QpRef, record: &SendRecord, wc: &Wc) -> Result<(), Violation> {
    let opcode = if record.kind == OpKind::Send { WcOpcode::Recv } else { WcOpcode::RecvRdmaWithImm };
    let imm = wc.flags.contains(WcFlags::WITH_IMM).then_some(wc.imm.0);
    let inv = wc.flags.contains(WcFlags::WITH_INV).then_some(wc.invalidated);
    let right = wc.opcode == opcode
        && (inv == record.window || record.kind == OpKind::Write && inv.is_none())
        && wc.byte_len as usize == record.data.len()
        && imm == record.imm
        && wc.solicited == record.solicited;
    if right {
        return Ok(());
    }
    let what = format!(
        "{at:?}: {wc:?}, must be {opcode:?}, {} bytes, immediate {:?}, solicited {} (sender's wr_id {})",
        record.data.len(),
        record.imm,
        record.solicited,
        record.wr_id
    );
    broken(ViolationKind::WrongCompletion, what)
}

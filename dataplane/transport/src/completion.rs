//! Reads finished work out of the queues, in order. Pulled, never pushed: one ACK may finish many requests.

use ferroce_verbs::{QpState, SendFlags, SendOp, Wc, WcFlags, WcOpcode, WcStatus};
use ferroce_wire::{Imm, Qpn, Rkey};

use crate::qp::{Base, Completion};
use crate::wq::RecvEntry;

/// Next finished send, then next finished receive. In state ERR what is not finished is flushed, in SQE what is not
/// sent.
#[inline]
pub(crate) fn next(base: &mut Base) -> Option<Completion> {
    next_send(base).or_else(|| next_recv(base))
}

fn next_send(base: &mut Base) -> Option<Completion> {
    let flushing = matches!(base.state, QpState::Err | QpState::Sqe);
    let queue = &mut base.sq.queue;
    let index = queue.reported;
    let finished = index != queue.done;
    let flushed = flushing && index != queue.tail;
    if !finished && !flushed {
        return None;
    }
    let entry = queue.get(index)?;
    let status = if finished { entry.outcome.unwrap_or(WcStatus::Success) } else { WcStatus::WrFlushErr };
    let completion = if status == WcStatus::Success && !entry.flags.contains(SendFlags::SIGNALED) {
        Completion::Retired
    } else {
        Completion::Wc(Wc {
            wr_id: entry.wr_id,
            status,
            opcode: send_opcode(&entry.op),
            byte_len: entry.len,
            imm: Imm::default(),
            invalidated: Rkey::default(),
            qpn: base.qpn,
            src_qpn: Qpn::default(),
            flags: WcFlags::empty(),
            vendor_err: 0,
            is_recv: false,
            solicited: status != WcStatus::Success,
        })
    };
    queue.reported = index.wrapping_add(1);
    if !finished {
        queue.done = queue.reported;
    }
    Some(completion)
}

fn next_recv(base: &mut Base) -> Option<Completion> {
    let flushing = base.state == QpState::Err;
    let queue = &mut base.rq.queue;
    let index = queue.reported;
    let finished = index != queue.done;
    let flushed = flushing && index != queue.tail;
    if !finished && !flushed {
        return None;
    }
    let entry = queue.get(index)?;
    let status = if finished { entry.status } else { WcStatus::WrFlushErr };
    let wc = Wc {
        wr_id: entry.wr_id,
        status,
        opcode: if entry.by_write { WcOpcode::RecvRdmaWithImm } else { WcOpcode::Recv },
        byte_len: entry.byte_len,
        imm: entry.imm.unwrap_or_default(),
        invalidated: entry.invalidated.unwrap_or_default(),
        qpn: base.qpn,
        src_qpn: entry.src_qpn.or(base.rtr.map(|rtr| rtr.dest_qpn)).unwrap_or_default(),
        flags: recv_flags(entry),
        vendor_err: 0,
        is_recv: true,
        solicited: entry.solicited || status != WcStatus::Success,
    };
    queue.reported = index.wrapping_add(1);
    if !finished {
        queue.done = queue.reported;
    }
    Some(Completion::Wc(wc))
}

fn recv_flags(entry: &RecvEntry) -> WcFlags {
    let mut flags = WcFlags::empty();
    flags.set(WcFlags::WITH_IMM, entry.imm.is_some());
    flags.set(WcFlags::WITH_INV, entry.invalidated.is_some());
    flags.set(WcFlags::GRH, entry.src_qpn.is_some());
    flags
}

const fn send_opcode(op: &SendOp) -> WcOpcode {
    match op {
        SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv { .. } => WcOpcode::Send,
        SendOp::Write { .. } | SendOp::WriteImm { .. } => WcOpcode::RdmaWrite,
        SendOp::Read { .. } => WcOpcode::RdmaRead,
        SendOp::CmpSwap { .. } => WcOpcode::CompSwap,
        SendOp::FetchAdd { .. } => WcOpcode::FetchAdd,
        SendOp::BindMw { .. } => WcOpcode::BindMw,
        SendOp::LocalInv { .. } => WcOpcode::LocalInv,
    }
}

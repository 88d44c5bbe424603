//! Taking work requests: everything that can be refused is refused here, before anything is posted.

use ferroce_mem::{Access, Memory, PdId};
use ferroce_verbs::{PostError, QpState, QpType, RecvWr, SendFlags, SendOp, SendWr, Sge, UdDest};
use ferroce_wire::{DmaLen, Psn, Qpn};

use super::Base;
use super::attr::check_av;
use super::state::{may_post_recv, may_post_send};
use crate::wq::{Kind, RecvEntry, SendEntry, kind_of};

/// Posts a send, or says why not.
#[inline]
pub(crate) fn send(base: &mut Base, wr: &SendWr<'_>, memory: &Memory) -> Result<(), PostError> {
    if !may_post_send(base.state) {
        return Err(PostError::BadState);
    }
    check_op(base, wr)?;
    let dest = dest(base, wr)?;
    if base.sq.queue.free() == 0 {
        return Err(PostError::Full);
    }
    let inline = wr.flags.contains(SendFlags::INLINE);
    let (len, sges) = if inline {
        (inline_len(base, wr)?, [].as_slice())
    } else {
        if wr.sg_list.len() > base.attr.cap.max_send_sge as usize {
            return Err(PostError::TooManySge);
        }
        let want = match kind_of(&wr.op) {
            Kind::Read | Kind::Atomic => Access::LOCAL_WRITE,
            Kind::Data | Kind::Local => Access::empty(),
        };
        (message_len(base, wr.sg_list, want, memory)?, wr.sg_list)
    };
    check_len(&wr.op, len)?;
    let mut flags = wr.flags;
    flags.set(SendFlags::SIGNALED, flags.contains(SendFlags::SIGNALED) || base.attr.sq_sig_all);
    base.sq.queue.release(memory);
    if inline {
        base.sq.stage_inline(wr.inline);
    }
    if let Some(dest) = dest {
        base.sq.stage_dest(dest);
    }
    let entry = SendEntry {
        wr_id: wr.wr_id,
        op: wr.op,
        len,
        first: Psn::default(),
        packets: 0,
        sges: u32::try_from(sges.len()).map_err(|_| PostError::TooManySge)?,
        flags,
        receive: 0,
        held: false,
        outcome: None,
    };
    let index = base.sq.queue.tail;
    base.sq.queue.push(entry, sges);
    if !base.sq.queue.hold(index, memory) {
        base.sq.queue.unpush();
        return Err(PostError::BadKey);
    }
    Ok(())
}

/// Posts a receive, or says why not. With a shared receive queue there is none of its own to post to.
#[inline]
pub(crate) fn recv(base: &mut Base, wr: &RecvWr<'_>, memory: &Memory) -> Result<(), PostError> {
    if base.attr.srq.is_some() {
        return Err(PostError::NoSuchQueue);
    }
    if !may_post_recv(base.state) {
        return Err(PostError::BadState);
    }
    if base.rq.queue.free() == 0 {
        return Err(PostError::Full);
    }
    if wr.sg_list.len() > base.attr.cap.max_recv_sge as usize {
        return Err(PostError::TooManySge);
    }
    let bytes = checked_sum(base.attr.pd, wr.sg_list, Access::LOCAL_WRITE, memory)?;
    base.rq.queue.release(memory);
    let index = base.rq.queue.tail;
    base.rq.queue.push(RecvEntry::posted(wr, bytes)?, wr.sg_list);
    if !base.rq.queue.hold(index, memory) {
        base.rq.queue.unpush();
        return Err(PostError::BadKey);
    }
    Ok(())
}

/// Whether the queue pair has the operation. READs and atomics are refused where `max_rd_atomic` is 0: they could never
/// start.
fn check_op(base: &Base, wr: &SendWr<'_>) -> Result<(), PostError> {
    let inline = wr.flags.contains(SendFlags::INLINE);
    let ready = match kind_of(&wr.op) {
        Kind::Data => true,
        Kind::Read | Kind::Atomic => {
            let never = base.state != QpState::Err && base.rts.is_some_and(|rts| rts.max_rd_atomic == 0);
            !never && !inline
        }
        Kind::Local => !inline,
    };
    if has_op(base.attr.qp_type, &wr.op) && ready { Ok(()) } else { Err(PostError::BadOp) }
}

/// Whether a service has an operation.
pub(crate) const fn has_op(qp_type: QpType, op: &SendOp) -> bool {
    match op {
        SendOp::Send | SendOp::SendImm(_) => true,
        SendOp::Write { .. } | SendOp::WriteImm { .. } | SendOp::BindMw { .. } | SendOp::LocalInv { .. } => {
            matches!(qp_type, QpType::Rc | QpType::Uc)
        }
        SendOp::SendInv { .. } | SendOp::Read { .. } | SendOp::CmpSwap { .. } | SendOp::FetchAdd { .. } => {
            matches!(qp_type, QpType::Rc)
        }
    }
}

/// Where a datagram goes: nowhere without an address handle of this protection domain.
fn dest<'a>(base: &Base, wr: &SendWr<'a>) -> Result<Option<&'a UdDest>, PostError> {
    if base.attr.qp_type != QpType::Ud {
        return Ok(None);
    }
    match wr.ud {
        Some(dest)
            if dest.ah.pd == base.attr.pd
                && dest.remote_qpn != Qpn::default()
                && check_av(&dest.ah.av).is_ok() =>
        {
            Ok(Some(dest))
        }
        Some(_) | None => Err(PostError::BadAh),
    }
}

/// Operations of a fixed length.
fn check_len(op: &SendOp, len: u32) -> Result<(), PostError> {
    match kind_of(op) {
        Kind::Data | Kind::Read => Ok(()),
        Kind::Atomic if len == 8 => Ok(()),
        Kind::Local if len == 0 => Ok(()),
        Kind::Atomic | Kind::Local => Err(PostError::BadLength),
    }
}

fn inline_len(base: &Base, wr: &SendWr<'_>) -> Result<u32, PostError> {
    match u32::try_from(wr.inline.len()) {
        Ok(len) if len <= base.attr.cap.max_inline_data => Ok(len),
        Ok(_) | Err(_) => Err(PostError::TooLong),
    }
}

fn message_len(base: &Base, list: &[Sge], want: Access, memory: &Memory) -> Result<u32, PostError> {
    let bytes = checked_sum(base.attr.pd, list, want, memory)?;
    match u32::try_from(bytes) {
        Ok(len) if len <= DmaLen::MAX.0 => Ok(len),
        Ok(_) | Err(_) => Err(PostError::TooLong),
    }
}

/// Bytes of a scatter/gather list, each entry's key checked. Entries of length 0 are not looked at.
#[inline]
pub(crate) fn checked_sum(pd: PdId, list: &[Sge], want: Access, memory: &Memory) -> Result<u64, PostError> {
    let mut bytes: u64 = 0;
    for sge in list.iter().filter(|sge| sge.length > 0) {
        memory.check_local(pd, sge.lkey, sge.addr, sge.length, want).map_err(|_| PostError::BadKey)?;
        bytes = bytes.saturating_add(u64::from(sge.length));
    }
    Ok(bytes)
}

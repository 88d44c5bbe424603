//! Work queues in the image: what is posted and not reported, oldest first.

use alloc::vec::Vec;

use ferroce_verbs::{QpType, SendFlags, Sge, UdDest, WcStatus};
use ferroce_wire::DmaLen;

use super::{Image, ImportError, Reader, ensure};
use crate::notice::Notices;
use crate::qp::Base;
use crate::qp::attr::check_av;
use crate::wq::{Kind, Queue, RecvEntry, RecvQueue, SendEntry, SendQueue, Source};

super::image_of!(Notices { comm_est, drained, last_wqe, fatal });

impl<A: Image, B: Image, C: Image> Image for (A, B, C) {
    fn save(&self, out: &mut Vec<u8>) {
        self.0.save(out);
        self.1.save(out);
        self.2.save(out);
    }
    fn load(from: &mut Reader<'_>) -> Result<Self, ImportError> {
        Ok((A::load(from)?, B::load(from)?, C::load(from)?))
    }
}

/// Where a queue stands.
fn save_indices<T: Copy + Default>(queue: &Queue<T>, out: &mut Vec<u8>) {
    (queue.reported, queue.done, queue.tail).save(out);
}

/// Where a queue stands; how many requests follow.
fn load_indices<T: Copy + Default>(queue: &mut Queue<T>, from: &mut Reader<'_>) -> Result<u32, ImportError> {
    let (reported, done, tail) = <(u32, u32, u32)>::load(from)?;
    let len = tail.wrapping_sub(reported);
    ensure(len <= queue.depth() && done.wrapping_sub(reported) <= len, "a queue's indices")?;
    queue.start_at(reported);
    Ok(len)
}

fn save_sges(list: &[Sge], out: &mut Vec<u8>) {
    for sge in list {
        sge.save(out);
    }
}

fn load_sges(count: u32, max: u32, from: &mut Reader<'_>) -> Result<(Vec<Sge>, u64), ImportError> {
    ensure(count <= max, "num_sge")?;
    let mut list = Vec::new();
    for _ in 0..count {
        list.push(Sge::load(from)?);
    }
    let bytes = list.iter().fold(0u64, |sum, sge| sum.saturating_add(u64::from(sge.length)));
    Ok((list, bytes))
}

pub(crate) fn save_send_queue(sq: &SendQueue, out: &mut Vec<u8>) {
    save_indices(&sq.queue, out);
    for back in 0..sq.queue.len() {
        let index = sq.queue.reported.wrapping_add(back);
        let Some(entry) = sq.queue.get(index) else { return };
        save_send(entry, out);
        match sq.source(index, entry) {
            Source::Inline(bytes) => out.extend_from_slice(bytes),
            Source::Sges(list) => save_sges(list, out),
        }
        if let Some(dest) = sq.dest(index) {
            dest.save(out);
        }
    }
}

fn save_send(entry: &SendEntry, out: &mut Vec<u8>) {
    let SendEntry { wr_id, op, len, first, packets, receive, sges, held: _, flags, outcome } = entry;
    wr_id.save(out);
    op.save(out);
    len.save(out);
    first.save(out);
    packets.save(out);
    receive.save(out);
    sges.save(out);
    flags.save(out);
    outcome.save(out);
}

fn load_send(from: &mut Reader<'_>) -> Result<SendEntry, ImportError> {
    Ok(SendEntry {
        wr_id: Image::load(from)?,
        op: Image::load(from)?,
        len: Image::load(from)?,
        first: Image::load(from)?,
        packets: Image::load(from)?,
        receive: Image::load(from)?,
        sges: Image::load(from)?,
        held: false,
        flags: Image::load(from)?,
        outcome: Image::load(from)?,
    })
}

pub(crate) fn load_send_queue(base: &mut Base, from: &mut Reader<'_>) -> Result<(), ImportError> {
    let mut at = Reader { rest: from.rest };
    let (_, done, _) = <(u32, u32, u32)>::load(&mut at)?;
    let len = load_indices(&mut base.sq.queue, from)?;
    for _ in 0..len {
        let entry = load_send(from)?;
        check_send(base, &entry)?;
        let finished = base.sq.queue.tail.wrapping_sub(base.sq.queue.reported)
            < done.wrapping_sub(base.sq.queue.reported);
        ensure(finished || entry.outcome.is_none(), "a send's outcome")?;
        ensure(entry.outcome != Some(WcStatus::Success), "a send's outcome")?;
        if entry.flags.contains(SendFlags::INLINE) {
            ensure(entry.len <= base.attr.cap.max_inline_data && entry.sges == 0, "inline data")?;
            base.sq.stage_inline(from.bytes(entry.len as usize)?);
            load_dest(base, from)?;
            base.sq.queue.push(entry, &[]);
        } else {
            let (list, bytes) = load_sges(entry.sges, base.attr.cap.max_send_sge, from)?;
            ensure(bytes == u64::from(entry.len), "a send's length")?;
            load_dest(base, from)?;
            base.sq.queue.push(entry, &list);
        }
    }
    base.sq.queue.done = done;
    Ok(())
}

/// What a post would have refused.
fn check_send(base: &Base, entry: &SendEntry) -> Result<(), ImportError> {
    ensure(crate::qp::post::has_op(base.attr.qp_type, &entry.op), "opcode")?;
    let inline = entry.flags.contains(SendFlags::INLINE);
    let right = match entry.kind() {
        Kind::Data => entry.len <= DmaLen::MAX.0,
        Kind::Read => entry.len <= DmaLen::MAX.0 && !inline,
        Kind::Atomic => entry.len == 8 && !inline,
        Kind::Local => entry.len == 0 && !inline,
    };
    ensure(right, "a send's length")
}

fn load_dest(base: &mut Base, from: &mut Reader<'_>) -> Result<(), ImportError> {
    if base.attr.qp_type != QpType::Ud {
        return Ok(());
    }
    let dest = UdDest::load(from)?;
    ensure(dest.ah.pd == base.attr.pd && check_av(&dest.ah.av).is_ok(), "a datagram's address")?;
    ensure(dest.remote_qpn.get() != 0, "a datagram's address")?;
    base.sq.stage_dest(&dest);
    Ok(())
}

pub(crate) fn save_recv_queue(rq: &RecvQueue, out: &mut Vec<u8>) {
    save_indices(&rq.queue, out);
    for back in 0..rq.queue.len() {
        let index = rq.queue.reported.wrapping_add(back);
        let Some(entry) = rq.queue.get(index) else { return };
        save_recv(entry, out);
        save_sges(rq.queue.sges(index, entry.sges), out);
    }
}

fn save_recv(entry: &RecvEntry, out: &mut Vec<u8>) {
    let RecvEntry {
        wr_id,
        room,
        sges,
        held: _,
        status,
        byte_len,
        imm,
        invalidated,
        src_qpn,
        solicited,
        by_write,
    } = entry;
    wr_id.save(out);
    room.save(out);
    sges.save(out);
    status.save(out);
    byte_len.save(out);
    imm.save(out);
    invalidated.save(out);
    src_qpn.save(out);
    solicited.save(out);
    by_write.save(out);
}

fn load_recv(from: &mut Reader<'_>) -> Result<RecvEntry, ImportError> {
    Ok(RecvEntry {
        wr_id: Image::load(from)?,
        room: Image::load(from)?,
        sges: Image::load(from)?,
        held: false,
        status: Image::load(from)?,
        byte_len: Image::load(from)?,
        imm: Image::load(from)?,
        invalidated: Image::load(from)?,
        src_qpn: Image::load(from)?,
        solicited: Image::load(from)?,
        by_write: Image::load(from)?,
    })
}

pub(crate) fn load_recv_queue(base: &mut Base, from: &mut Reader<'_>) -> Result<(), ImportError> {
    let mut at = Reader { rest: from.rest };
    let (_, done, _) = <(u32, u32, u32)>::load(&mut at)?;
    let queue = &mut base.rq.queue;
    let len = load_indices(queue, from)?;
    for _ in 0..len {
        let entry = load_recv(from)?;
        let (list, bytes) = load_sges(entry.sges, queue.max_sge(), from)?;
        let room = u32::try_from(bytes).unwrap_or(u32::MAX);
        ensure(entry.room == room, "a receive's room")?;
        queue.push(entry, &list);
    }
    queue.done = done;
    Ok(())
}

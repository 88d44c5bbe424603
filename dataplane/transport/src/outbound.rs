//! Packets of SENDs and WRITEs as they go out, on any service: headers, and the bytes from scatter list or inline data.
//!
//! Owns nothing. Keys are checked again for every packet, since they may have gone bad after the post.

use ferroce_mem::{Access, Memory, PdId};
use ferroce_verbs::{PathMtu, SendFlags, SendOp, WcStatus};
use ferroce_wire::{Bth, Deth, DmaLen, Ext, Part, Psn, Reth, Service};

use crate::qp::Base;
use crate::segment;
use crate::sink::FrameSink;
use crate::wq::{SendEntry, SgeCursor, Source};

/// What came of handing a packet to the sink.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Handed {
    /// It is the sink's now; with its payload bytes.
    Done(u32),
    NoRoom,
    /// It can't be sent: a local key, its bounds or its rights are not right any more, or there is no way there.
    Fault(WcStatus),
}

/// Which packet of which request.
pub(crate) struct Place {
    pub(crate) service: Service,
    pub(crate) mtu: PathMtu,
    /// Send-queue index of the request.
    pub(crate) index: u32,
    /// Packet of it.
    pub(crate) packet: u32,
    /// Packets of it.
    pub(crate) packets: u32,
    pub(crate) psn: Psn,
    pub(crate) ack_req: bool,
}

/// Hands one packet of a SEND or WRITE to the sink.
#[inline]
pub(crate) fn data<S: FrameSink>(
    base: &Base,
    place: &Place,
    gather: &mut SgeCursor,
    memory: &Memory,
    sink: &mut S,
) -> Handed {
    let Some(entry) = base.sq.queue.get(place.index) else {
        return Handed::Fault(WcStatus::LocQpOpErr);
    };
    let part = segment::part(0, place.packet, place.packets);
    let last = matches!(part, Part::Last | Part::Only);
    let Some(opcode) = segment::request_opcode(place.service, &entry.op, part) else {
        return Handed::Fault(WcStatus::LocQpOpErr);
    };
    let mut bth = base.bth(opcode, place.psn);
    bth.ack_req = place.ack_req;
    bth.solicited = last && entry.flags.contains(SendFlags::SOLICITED) && entry.takes_receive();
    let mut ext = data_ext(entry, part);
    if let Some(dest) = base.sq.dest(place.index) {
        bth.dest_qpn = dest.remote_qpn;
        ext.deth = Some(Deth { qkey: base.qkey_for(dest.remote_qkey), resv: 0, src_qpn: base.qpn });
        if !sink.address(&dest.ah.av) {
            return Handed::Fault(WcStatus::LocQpOpErr);
        }
    }
    let offset = segment::offset(place.packet, place.mtu);
    let bytes = segment::chunk(entry.len, place.packet, place.mtu);
    let packet = Outgoing { bth: &bth, ext: &ext, offset, bytes };
    let source = base.sq.source(place.index, entry);
    hand_over(&packet, &source, gather, base.attr.pd, memory, sink)
}

/// Extension headers of a SEND or WRITE packet: RETH at the start, immediate data or key at the end.
#[inline]
fn data_ext(entry: &SendEntry, part: Part) -> Ext {
    let (first, last) = match part {
        Part::First => (true, false),
        Part::Middle => (false, false),
        Part::Last => (false, true),
        Part::Only => (true, true),
    };
    let mut ext = Ext::NONE;
    let (target, imm) = match entry.op {
        SendOp::SendImm(imm) => (None, Some(imm)),
        SendOp::SendInv { rkey } => {
            ext.invalidate = last.then_some(rkey);
            (None, None)
        }
        SendOp::Write { remote_addr, rkey } => (Some((remote_addr, rkey)), None),
        SendOp::WriteImm { remote_addr, rkey, imm } => (Some((remote_addr, rkey)), Some(imm)),
        SendOp::Send
        | SendOp::Read { .. }
        | SendOp::CmpSwap { .. }
        | SendOp::FetchAdd { .. }
        | SendOp::BindMw { .. }
        | SendOp::LocalInv { .. } => (None, None),
    };
    ext.reth = target.filter(|_| first).map(|(addr, rkey)| Reth { addr, rkey, len: DmaLen(entry.len) });
    ext.imm = imm.filter(|_| last);
    ext
}

/// A packet to hand over: its headers, and which bytes of the message it carries.
struct Outgoing<'p> {
    bth: &'p Bth,
    ext: &'p Ext,
    offset: u32,
    bytes: u32,
}

/// Checks the local keys again, then gives the packet to the sink. Nothing reached the sink unless `Done`.
#[inline]
fn hand_over<S: FrameSink>(
    packet: &Outgoing<'_>,
    source: &Source<'_>,
    gather: &mut SgeCursor,
    pd: PdId,
    memory: &Memory,
    sink: &mut S,
) -> Handed {
    let len = packet.bytes as usize;
    let list = match *source {
        Source::Inline(data) => {
            let start = packet.offset as usize;
            let Some(chunk) = data.get(start..start.wrapping_add(len)) else {
                return Handed::Fault(WcStatus::LocQpOpErr);
            };
            if !sink.begin(packet.bth, packet.ext, len) {
                return Handed::NoRoom;
            }
            if !chunk.is_empty() {
                sink.inline(chunk);
            }
            return Handed::Done(packet.bytes);
        }
        Source::Sges(list) => list,
    };
    gather.seek(list, packet.offset);
    let mut pieces = gather.pieces(list, packet.bytes);
    let all = pieces.clone();
    let Some(piece) = pieces.next() else {
        // An empty message has no pieces.
        return if sink.begin(packet.bth, packet.ext, len) { Handed::Done(0) } else { Handed::NoRoom };
    };
    let first = match memory.check_local(pd, piece.lkey, piece.addr, piece.length, Access::empty()) {
        Ok(slice) => slice,
        Err(_) => return Handed::Fault(WcStatus::LocProtErr),
    };
    if piece.length == packet.bytes {
        if !sink.begin(packet.bth, packet.ext, len) {
            return Handed::NoRoom;
        }
        sink.payload(first);
        return Handed::Done(packet.bytes);
    }
    // Several pieces: check them all before the sink hears of the packet.
    for piece in pieces {
        if memory.check_local(pd, piece.lkey, piece.addr, piece.length, Access::empty()).is_err() {
            return Handed::Fault(WcStatus::LocProtErr);
        }
    }
    if !sink.begin(packet.bth, packet.ext, len) {
        return Handed::NoRoom;
    }
    // The table is borrowed all the while, so each check answers as it did above.
    for slice in all.filter_map(|p| memory.check_local(pd, p.lkey, p.addr, p.length, Access::empty()).ok()) {
        sink.payload(slice);
    }
    Handed::Done(packet.bytes)
}

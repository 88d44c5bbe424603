//! Requester: emits requests in send-queue order, each PSN once or, after going back, again.
//!
//! Owns the send side's PSNs, its cursor in the send queue and its timers. Invariants: `una` lies in the request at
//! the queue's `done` index once that was started, else `una == next`; the cursor never lies before `una`; requests
//! before `fresh` have their PSNs. Called by `rc`; never looks at the receive queue.

use ferroce_mem::{Access, Memory, PdId};
use ferroce_verbs::{PathMtu, QpState, RtsAttrs, SendFlags, SendOp, WcStatus};
use ferroce_wire::{Bth, DmaLen, Ext, Opcode, Part, Psn, Reth};

use crate::counters::QpCounter;
use crate::qp::Base;
use crate::segment::{self, PSN_WINDOW, distance};
use crate::sink::{FrameSink, Transmit};
use crate::time::{Instant, ack_timeout_ns};
use crate::wq::{SendEntry, SgeCursor, Source};

/// Request packets that may be unacknowledged. Large enough to keep a wire busy over a host's round trip at the
/// smallest path MTU, small enough not to overrun a default-sized queue on the way. READ responses do not count.
pub(super) const WINDOW_PACKETS: u32 = 256;

/// At least every this many packets one asks for an ACK (roce-wire 5.4).
pub(super) const ASK_EVERY: u32 = 64;

/// Send side of a reliable connection.
pub(crate) struct Requester {
    pub(super) mtu: PathMtu,
    pub(super) rts: RtsAttrs,
    pub(super) timeout_ns: Option<u64>,
    /// Oldest PSN not acknowledged.
    pub(super) una: Psn,
    /// First PSN never used.
    pub(super) next: Psn,
    /// Furthest PSN that a packet carried.
    pub(super) last_sent: Psn,
    /// Send-queue index of the request to send from next, and the packet in it, and that packet's PSN.
    pub(super) cursor: u32,
    pub(super) cursor_packet: u32,
    pub(super) cursor_psn: Psn,
    /// Send-queue index of the first request that was never started.
    pub(super) fresh: u32,
    /// The peer owes an answer for everything before this PSN; equal to `una` when it owes none.
    pub(super) asked: Psn,
    /// Packets since the last that asked for an ACK.
    pub(super) since_ask: u32,
    /// READs sent since the cursor last went back, and not complete.
    pub(super) reads_out: u32,
    /// Response PSNs still due of READs that were started: they do not fill the window.
    pub(super) read_psns: u32,
    pub(super) retries_left: u8,
    pub(super) rnr_left: u8,
    /// `una` at which a NAK, spoken or implied, already made us go back; it does so once.
    pub(super) went_back_at: Option<Psn>,
    /// Receiver not ready: nothing is sent before this time.
    pub(super) rnr_until: Option<Instant>,
    /// When the answer that is owed is overdue.
    pub(super) deadline: Option<Instant>,
    /// Where sending stands in the scatter list of the request at the cursor.
    pub(super) gather: SgeCursor,
    /// Where READ data goes in the scatter list of the oldest request.
    pub(super) scatter: SgeCursor,
}

impl Default for Requester {
    fn default() -> Self {
        Requester {
            mtu: PathMtu::Mtu256,
            rts: RtsAttrs {
                sq_psn: Psn::default(),
                timeout: 0,
                retry_cnt: 0,
                rnr_retry: 0,
                max_rd_atomic: 0,
            },
            timeout_ns: None,
            una: Psn::default(),
            next: Psn::default(),
            last_sent: Psn::default(),
            cursor: 0,
            cursor_packet: 0,
            cursor_psn: Psn::default(),
            fresh: 0,
            asked: Psn::default(),
            since_ask: 0,
            reads_out: 0,
            read_psns: 0,
            retries_left: 0,
            rnr_left: 0,
            went_back_at: None,
            rnr_until: None,
            deadline: None,
            gather: SgeCursor::default(),
            scatter: SgeCursor::default(),
        }
    }
}

/// What came of handing a packet to the sink.
enum Handed {
    Done,
    NoRoom,
    /// A local key, its bounds or its rights are not right any more.
    Fault,
}

impl Requester {
    pub(crate) fn start(base: &Base, rts: &RtsAttrs) -> Requester {
        let head = base.sq.queue.done;
        Requester {
            mtu: base.rtr.map_or(PathMtu::Mtu256, |rtr| rtr.path_mtu),
            rts: *rts,
            timeout_ns: ack_timeout_ns(rts.timeout),
            una: rts.sq_psn,
            next: rts.sq_psn,
            last_sent: rts.sq_psn,
            cursor: head,
            cursor_psn: rts.sq_psn,
            fresh: head,
            asked: rts.sq_psn,
            retries_left: rts.retry_cnt,
            rnr_left: rts.rnr_retry,
            ..Requester::default()
        }
    }

    /// Attributes changed. Counters that ran keep what they have left, as far as it is allowed now.
    pub(crate) fn change(&mut self, rts: &RtsAttrs) {
        self.rts = *rts;
        self.timeout_ns = ack_timeout_ns(rts.timeout);
        self.retries_left = self.retries_left.min(rts.retry_cnt);
        self.rnr_left = self.rnr_left.min(rts.rnr_retry);
        if self.una == self.next {
            self.retries_left = rts.retry_cnt;
            self.rnr_left = rts.rnr_retry;
        }
    }

    /// Sends the packet at the cursor, if anything allows it.
    #[inline]
    pub(crate) fn poll_request<S: FrameSink>(
        &mut self,
        base: &mut Base,
        now: Instant,
        memory: &Memory,
        sink: &mut S,
    ) -> Transmit {
        if let Some(until) = self.rnr_until {
            if now < until {
                return Transmit::Later(until);
            }
            self.rnr_until = None;
        }
        let Some(entry) = base.sq.queue.get(self.cursor) else { return Transmit::Idle };
        let (read, fenced, len) = (entry.is_read(), entry.flags.contains(SendFlags::FENCE), entry.len);
        let starting = self.cursor == self.fresh;
        if starting && base.state == QpState::Sqd {
            return Transmit::Idle;
        }
        let packets = segment::packets(len, self.mtu);
        if self.cursor_psn == self.next && !self.window_open(read, packets) {
            return Transmit::Idle;
        }
        if self.cursor_packet == 0 && fenced && self.reads_out > 0 {
            return Transmit::Idle;
        }
        if read && self.reads_out >= u32::from(self.rts.max_rd_atomic) {
            return Transmit::Idle;
        }
        if starting {
            // Written before the packet is really sent: if the sink has no room the same values are written again.
            let first = self.cursor_psn;
            if let Some(entry) = base.sq.queue.get_mut(self.cursor) {
                entry.first = first;
                entry.packets = packets;
            }
        }
        if read { self.send_read(base, now, sink) } else { self.send_data(base, now, memory, sink) }
    }

    /// Whether a packet that was never sent may be. READs occupy all their response PSNs at once.
    #[inline]
    fn window_open(&self, read: bool, packets: u32) -> bool {
        let outstanding = distance(self.next, self.una);
        if read {
            outstanding.saturating_add(packets) <= PSN_WINDOW
        } else {
            outstanding < PSN_WINDOW && outstanding.saturating_sub(self.read_psns) < WINDOW_PACKETS
        }
    }

    /// READ request, or what is left of it: from the first response packet that is missing (roce-wire 5.7).
    fn send_read<S: FrameSink>(&mut self, base: &mut Base, now: Instant, sink: &mut S) -> Transmit {
        let Some(entry) = base.sq.queue.get(self.cursor) else { return Transmit::Idle };
        let SendOp::Read { remote_addr, rkey } = entry.op else { return Transmit::Idle };
        let packets = entry.packets;
        let offset = segment::offset(self.cursor_packet, self.mtu);
        let mut bth = base.bth(Opcode::RcReadRequest, self.cursor_psn);
        bth.ack_req = true;
        let len = DmaLen(entry.len.saturating_sub(offset));
        let reth = Reth { addr: remote_addr.advance(u64::from(offset)), rkey, len };
        if !sink.begin(&bth, &Ext { reth: Some(reth), ..Ext::NONE }, 0) {
            return Transmit::NoRoom;
        }
        let rest = packets.saturating_sub(self.cursor_packet);
        if self.cursor == self.fresh {
            self.read_psns = self.read_psns.saturating_add(packets);
        }
        self.reads_out = self.reads_out.saturating_add(1);
        self.sent(base, now, rest, 0, true);
        self.next_request();
        Transmit::Sent
    }

    /// One packet of a SEND or WRITE.
    fn send_data<S: FrameSink>(
        &mut self,
        base: &mut Base,
        now: Instant,
        memory: &Memory,
        sink: &mut S,
    ) -> Transmit {
        let Some(entry) = base.sq.queue.get(self.cursor) else { return Transmit::Idle };
        let index = self.cursor_packet;
        let part = segment::part(0, index, entry.packets);
        let last = matches!(part, Part::Last | Part::Only);
        let Some(opcode) = segment::request_opcode(&entry.op, part) else { return Transmit::Idle };
        let mut bth = base.bth(opcode, self.cursor_psn);
        bth.ack_req = last || self.since_ask.saturating_add(1) >= ASK_EVERY;
        bth.solicited =
            last && entry.flags.contains(SendFlags::SOLICITED) && !matches!(entry.op, SendOp::Write { .. });
        let ext = data_ext(entry, part);
        let (offset, bytes) = (segment::offset(index, self.mtu), segment::chunk(entry.len, index, self.mtu));
        let packet = Outgoing { bth: &bth, ext: &ext, offset, bytes };
        let source = base.sq.source(self.cursor, entry);
        match hand_over(&packet, &source, &mut self.gather, base.attr.pd, memory, sink) {
            Handed::Done => {}
            Handed::NoRoom => return Transmit::NoRoom,
            Handed::Fault => {
                // The key went bad after the post. Earlier requests finish first: completions are in order.
                if self.cursor == base.sq.queue.done {
                    base.fail_send(WcStatus::LocProtErr, self.cursor_psn);
                }
                return Transmit::Idle;
            }
        }
        let ask = bth.ack_req;
        self.sent(base, now, 1, bytes, ask);
        if last {
            self.next_request();
        } else {
            self.cursor_packet = index.wrapping_add(1);
        }
        Transmit::Sent
    }

    /// Books a packet that occupies `psns` PSNs; `ask`: the peer owes an answer to it.
    #[inline]
    fn sent(&mut self, base: &mut Base, now: Instant, psns: u32, bytes: u32, ask: bool) {
        let psn = self.cursor_psn;
        self.cursor_psn = psn.advance(psns);
        if psn == self.next {
            self.next = self.cursor_psn;
        } else {
            base.counters.add(QpCounter::Retransmits, 1);
        }
        // A READ that is resumed carries a PSN that no packet carried before.
        if psn.offset_from(self.last_sent) > 0 {
            self.last_sent = psn;
        }
        if self.cursor == self.fresh {
            self.fresh = self.fresh.wrapping_add(1);
        }
        base.count_sent(bytes);
        if ask {
            self.since_ask = 0;
            self.asked = self.cursor_psn;
            if self.deadline.is_none() {
                self.deadline = self.timeout_ns.map(|ns| now.after(ns));
            }
        } else {
            self.since_ask = self.since_ask.saturating_add(1);
        }
    }

    #[inline]
    fn next_request(&mut self) {
        self.cursor = self.cursor.wrapping_add(1);
        self.cursor_packet = 0;
        self.gather = SgeCursor::default();
    }

    /// Tells, in SQD, when everything that was started is finished.
    #[inline]
    pub(super) fn check_drained(&self, base: &mut Base) {
        if base.state == QpState::Sqd && base.sq.queue.done == self.fresh {
            base.notices.drained();
        }
    }
}

/// Extension headers of a SEND or WRITE packet: RETH at the start, immediate data at the end.
#[inline]
fn data_ext(entry: &SendEntry, part: Part) -> Ext {
    let (first, last) = match part {
        Part::First => (true, false),
        Part::Middle => (false, false),
        Part::Last => (false, true),
        Part::Only => (true, true),
    };
    let (target, imm) = match entry.op {
        SendOp::Send => (None, None),
        SendOp::SendImm(imm) => (None, Some(imm)),
        SendOp::Write { remote_addr, rkey } => (Some((remote_addr, rkey)), None),
        SendOp::WriteImm { remote_addr, rkey, imm } => (Some((remote_addr, rkey)), Some(imm)),
        SendOp::Read { .. }
        | SendOp::SendInv { .. }
        | SendOp::CmpSwap { .. }
        | SendOp::FetchAdd { .. }
        | SendOp::BindMw { .. }
        | SendOp::LocalInv { .. } => (None, None),
    };
    let reth = target.filter(|_| first).map(|(addr, rkey)| Reth { addr, rkey, len: DmaLen(entry.len) });
    Ext { reth, imm: imm.filter(|_| last), ..Ext::NONE }
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
                return Handed::Fault;
            };
            if !sink.begin(packet.bth, packet.ext, len) {
                return Handed::NoRoom;
            }
            if !chunk.is_empty() {
                sink.inline(chunk);
            }
            return Handed::Done;
        }
        Source::Sges(list) => list,
    };
    gather.seek(list, packet.offset);
    let mut pieces = gather.pieces(list, packet.bytes);
    let all = pieces.clone();
    let Some(piece) = pieces.next() else {
        // An empty message has no pieces.
        return if sink.begin(packet.bth, packet.ext, len) { Handed::Done } else { Handed::NoRoom };
    };
    let first = match memory.check_local(pd, piece.lkey, piece.addr, piece.length, Access::empty()) {
        Ok(slice) => slice,
        Err(_) => return Handed::Fault,
    };
    if piece.length == packet.bytes {
        if !sink.begin(packet.bth, packet.ext, len) {
            return Handed::NoRoom;
        }
        sink.payload(first);
        return Handed::Done;
    }
    // Several pieces: check them all before the sink hears of the packet.
    for piece in pieces {
        if memory.check_local(pd, piece.lkey, piece.addr, piece.length, Access::empty()).is_err() {
            return Handed::Fault;
        }
    }
    if !sink.begin(packet.bth, packet.ext, len) {
        return Handed::NoRoom;
    }
    // The table is borrowed all the while, so each check answers as it did above.
    for slice in all.filter_map(|p| memory.check_local(pd, p.lkey, p.addr, p.length, Access::empty()).ok()) {
        sink.payload(slice);
    }
    Handed::Done
}

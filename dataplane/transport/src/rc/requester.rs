//! Requester: emits requests in send-queue order, each PSN once or, after going back, again.
//!
//! Owns the send side's PSNs, its cursor in the send queue and its timers. Invariants: `una` lies in the request at
//! the queue's `done` index once that was started, else `una == next`; that request is never a local operation which is
//! done; the cursor never lies before `una`; requests before `fresh` have their PSNs. Called by `rc`; never looks at the receive queue.

use ferroce_mem::Memory;
use ferroce_verbs::{PathMtu, QpState, RtsAttrs, SendFlags, SendOp};
use ferroce_wire::ext::credits_of_code;
use ferroce_wire::{AtomicEth, DmaLen, Ext, Part, Psn, Reth, Service};

use crate::counters::QpCounter;
use crate::local;
use crate::outbound::{self, Handed, Place};
use crate::qp::Base;
use crate::segment::{self, PSN_WINDOW, distance};
use crate::sink::{FrameSink, Transmit};
use crate::time::{Instant, ack_timeout_ns};
use crate::wq::{Kind, SgeCursor};

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
    /// READs and atomics sent since the cursor last went back, and not complete.
    pub(super) queries_out: u32,
    /// Response PSNs still due of READs and atomics that were started: they do not fill the window.
    pub(super) query_psns: u32,
    /// Messages that take a receive at the peer: started, and acknowledged.
    pub(super) receives_started: u32,
    pub(super) receives_done: u32,
    /// The last of them for which the peer is known to have a receive; `None` while it tells nothing of the kind.
    pub(super) credit: Option<u32>,
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
            queries_out: 0,
            query_psns: 0,
            receives_started: 0,
            receives_done: 0,
            credit: None,
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

    /// Sends the packet at the cursor, if anything allows it, and does the local operations on the way.
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
        // Ends: each local operation moves the cursor, and there are no more than the queue holds.
        loop {
            let Some(entry) = base.sq.queue.get(self.cursor) else { return Transmit::Idle };
            let kind = entry.kind();
            let starting = self.cursor == self.fresh;
            if starting && base.state == QpState::Sqd {
                return Transmit::Idle;
            }
            if self.cursor_packet == 0 && entry.flags.contains(SendFlags::FENCE) && self.queries_out > 0 {
                return Transmit::Idle;
            }
            if kind == Kind::Local {
                if !self.local(base, memory) {
                    return Transmit::Idle;
                }
                continue;
            }
            let query = kind != Kind::Data;
            let packets = match kind {
                Kind::Data | Kind::Read => segment::packets(entry.len, self.mtu),
                Kind::Atomic | Kind::Local => 1,
            };
            if self.cursor_psn == self.next && !self.window_open(query, packets) {
                return Transmit::Idle;
            }
            if query && self.queries_out >= u32::from(self.rts.max_rd_atomic) {
                return Transmit::Idle;
            }
            let receive = if starting { self.receives_started.wrapping_add(1) } else { entry.receive };
            if self.cursor_packet == 0 && entry.takes_receive() && !self.has_credit(receive) {
                return Transmit::Idle;
            }
            if starting {
                // Written before the packet is really sent: if the sink has no room the same is written again.
                let first = self.cursor_psn;
                if let Some(entry) = base.sq.queue.get_mut(self.cursor) {
                    entry.first = first;
                    entry.packets = packets;
                    entry.receive = receive;
                }
            }
            return if query { self.query(base, now, sink) } else { self.data(base, now, memory, sink) };
        }
    }

    /// A local operation at the cursor: done when its turn comes in the send queue, once. False if it has to wait or
    /// has failed.
    fn local(&mut self, base: &mut Base, memory: &Memory) -> bool {
        if self.cursor != self.fresh {
            // Done before the cursor went back.
            self.next_request();
            return true;
        }
        let Some(entry) = base.sq.queue.get(self.cursor) else { return false };
        let oldest = self.cursor == base.sq.queue.done;
        if matches!(entry.op, SendOp::LocalInv { .. }) && !oldest {
            return false;
        }
        if let Err(status) = local::execute(base, &entry.op, memory) {
            // Earlier requests finish first: completions are in order.
            if oldest {
                base.fail_send(status, self.cursor_psn);
            }
            return false;
        }
        let first = self.cursor_psn;
        if let Some(entry) = base.sq.queue.get_mut(self.cursor) {
            entry.first = first;
            entry.packets = 0;
        }
        self.fresh = self.fresh.wrapping_add(1);
        self.next_request();
        self.retire_local(base);
        self.check_drained(base);
        true
    }

    /// Local operations that are done finish when everything before them has.
    #[inline]
    pub(super) fn retire_local(&self, base: &mut Base) {
        while base.sq.queue.done != self.fresh
            && base.sq.queue.get(base.sq.queue.done).is_some_and(|entry| entry.packets == 0)
        {
            base.sq.queue.done = base.sq.queue.done.wrapping_add(1);
        }
    }

    /// Whether a packet that was never sent may be. READs occupy all their response PSNs at once.
    #[inline]
    fn window_open(&self, query: bool, packets: u32) -> bool {
        let outstanding = distance(self.next, self.una);
        if query {
            outstanding.saturating_add(packets) <= PSN_WINDOW
        } else {
            outstanding < PSN_WINDOW && outstanding.saturating_sub(self.query_psns) < WINDOW_PACKETS
        }
    }

    /// Whether the message that takes the peer's receive number `receive` may start (roce-wire 5.10): if the peer has
    /// that receive, or all but that; or if nothing else is outstanding whose answer could tell.
    #[inline]
    fn has_credit(&self, receive: u32) -> bool {
        let Some(credit) = self.credit else { return true };
        let beyond = receive.wrapping_sub(credit);
        beyond <= 1 || beyond > u32::MAX / 2 || self.cursor_psn == self.una
    }

    /// The peer told how many receives it has left. Those in later answers only grow.
    #[inline]
    pub(super) fn take_credits(&mut self, code: u8) {
        let Some(receives) = credits_of_code(code) else {
            self.credit = None;
            return;
        };
        let told = self.receives_done.wrapping_add(u32::from(receives));
        match self.credit {
            Some(credit) if told.wrapping_sub(credit) > u32::MAX / 2 => {}
            Some(_) | None => self.credit = Some(told),
        }
    }

    /// Atomic or READ request. Of a READ what is left: from the first response packet that is missing (roce-wire 5.7).
    fn query<S: FrameSink>(&mut self, base: &mut Base, now: Instant, sink: &mut S) -> Transmit {
        let Some(entry) = base.sq.queue.get(self.cursor) else { return Transmit::Idle };
        let packets = entry.packets;
        let Some(opcode) = segment::request_opcode(Service::Rc, &entry.op, Part::Only) else {
            return Transmit::Idle;
        };
        let offset = segment::offset(self.cursor_packet, self.mtu);
        let mut bth = base.bth(opcode, self.cursor_psn);
        bth.ack_req = true;
        let ext = match entry.op {
            SendOp::Read { remote_addr, rkey } => {
                let len = DmaLen(entry.len.saturating_sub(offset));
                let addr = remote_addr.advance(u64::from(offset));
                Ext { reth: Some(Reth { addr, rkey, len }), ..Ext::NONE }
            }
            SendOp::CmpSwap { remote_addr, rkey, compare, swap } => {
                let eth = AtomicEth { addr: remote_addr, rkey, swap_or_add: swap, compare };
                Ext { atomic: Some(eth), ..Ext::NONE }
            }
            SendOp::FetchAdd { remote_addr, rkey, add } => {
                let eth = AtomicEth { addr: remote_addr, rkey, swap_or_add: add, compare: 0 };
                Ext { atomic: Some(eth), ..Ext::NONE }
            }
            SendOp::Send
            | SendOp::SendImm(_)
            | SendOp::SendInv { .. }
            | SendOp::Write { .. }
            | SendOp::WriteImm { .. }
            | SendOp::BindMw { .. }
            | SendOp::LocalInv { .. } => return Transmit::Idle,
        };
        if !sink.begin(&bth, &ext, 0) {
            return Transmit::NoRoom;
        }
        let rest = packets.saturating_sub(self.cursor_packet);
        if self.cursor == self.fresh {
            self.query_psns = self.query_psns.saturating_add(packets);
        }
        self.queries_out = self.queries_out.saturating_add(1);
        self.sent(base, now, rest, 0, true);
        self.next_request();
        Transmit::Sent
    }

    /// One packet of a SEND or WRITE.
    fn data<S: FrameSink>(
        &mut self,
        base: &mut Base,
        now: Instant,
        memory: &Memory,
        sink: &mut S,
    ) -> Transmit {
        let Some(entry) = base.sq.queue.get(self.cursor) else { return Transmit::Idle };
        let last = self.cursor_packet.wrapping_add(1) >= entry.packets;
        let takes_receive = entry.takes_receive();
        let ask = last || self.since_ask.saturating_add(1) >= ASK_EVERY;
        let place = Place {
            service: Service::Rc,
            mtu: self.mtu,
            index: self.cursor,
            packet: self.cursor_packet,
            packets: entry.packets,
            psn: self.cursor_psn,
            ack_req: ask,
        };
        let bytes = match outbound::data(base, &place, &mut self.gather, memory, sink) {
            Handed::Done(bytes) => bytes,
            Handed::NoRoom => return Transmit::NoRoom,
            Handed::Fault(status) => {
                // The key went bad after the post. Earlier requests finish first: completions are in order.
                if self.cursor == base.sq.queue.done {
                    base.fail_send(status, self.cursor_psn);
                }
                return Transmit::Idle;
            }
        };
        if self.cursor == self.fresh && takes_receive {
            self.receives_started = self.receives_started.wrapping_add(1);
        }
        self.sent(base, now, 1, bytes, ask);
        if last {
            self.next_request();
        } else {
            self.cursor_packet = self.cursor_packet.wrapping_add(1);
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

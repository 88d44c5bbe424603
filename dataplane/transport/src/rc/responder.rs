//! Responder: the PSN rules of a reliable connection around [`crate::inbound`], the READs and atomics, and what is
//! owed in answer.
//!
//! Owns the receive side's PSN, the message in progress and the answers that are owed, in fixed small state.
//! Invariant: nothing is acknowledged before its payload is placed and its receive is finished. Called by `rc`; sends
//! nothing itself (see `answer`).

use ferroce_mem::Access;
use ferroce_verbs::{RtrAttrs, WcStatus};
use ferroce_wire::{AtomicEth, DmaLen, Msn, NakCode, Op, Packet, Psn, Syndrome};

use crate::arrival::Arrival;
use crate::counters::QpCounter;
use crate::inbound::{Inbound, Refusal, ends};
use crate::qp::{Base, DropReason};
use crate::segment;

use super::replay::{AtomicOp, Repeat, Replay, Resources, Work};

/// A NAK that is owed.
#[derive(Clone, Copy)]
pub(super) struct Nak {
    pub(super) psn: Psn,
    pub(super) syndrome: Syndrome,
}

/// Receive side of a reliable connection.
pub(crate) struct Responder {
    pub(super) min_rnr_timer: u8,
    /// Next PSN expected.
    pub(crate) expected: Psn,
    /// Messages completed.
    pub(super) msn: Msn,
    pub(super) inbound: Inbound,
    /// A NAK for `expected` went out or is owed: the gap gets no other until `expected` arrives. (Not a state of its
    /// own: it holds in any state of `inbound`.)
    pub(super) nak_given: bool,
    /// PSN after the last READ or atomic.
    pub(super) after_read: Psn,
    /// An ACK of everything before `expected` is owed.
    pub(super) ack_due: bool,
    /// An ACK of duplicates is owed, with the PSN of the latest of them: never with a later one, which might stand for
    /// READ data, or for what the peer has not sent again yet (WIRE-1).
    pub(super) duplicate_ack: Option<Psn>,
    pub(super) nak: Option<Nak>,
    pub(super) resources: Resources,
    /// The queue pair is in error by a request that gets no NAK: what is owed for those before it still leaves.
    pub(super) closing: bool,
}

impl Responder {
    pub(crate) fn new() -> Responder {
        Responder {
            min_rnr_timer: 0,
            expected: Psn::default(),
            msn: Msn::default(),
            inbound: Inbound::new(),
            nak_given: false,
            after_read: Psn::default(),
            ack_due: false,
            duplicate_ack: None,
            nak: None,
            resources: Resources::default(),
            closing: false,
        }
    }

    pub(crate) fn start(&mut self, rtr: &RtrAttrs) {
        self.inbound.mtu = rtr.path_mtu;
        self.min_rnr_timer = rtr.min_rnr_timer;
        self.expected = rtr.rq_psn;
        self.after_read = rtr.rq_psn;
        self.resources = Resources::new(rtr.max_dest_rd_atomic);
    }

    /// Attributes changed.
    pub(crate) fn change(&mut self, rtr: &RtrAttrs) {
        self.min_rnr_timer = rtr.min_rnr_timer;
        self.resources.limit(rtr.max_dest_rd_atomic);
    }

    pub(crate) fn reset(&mut self) {
        *self = Responder::new();
    }

    /// In error: a refusal, or what comes before it, is still to be told to the peer.
    #[inline]
    pub(crate) fn has_last_words(&self) -> bool {
        if self.closing {
            return self.ack_due || self.duplicate_ack.is_some() || self.resources.owed() > 0;
        }
        self.nak.is_some_and(|nak| match nak.syndrome {
            Syndrome::Nak(code) => code != NakCode::SequenceError,
            Syndrome::Ack { .. } | Syndrome::RnrNak { .. } | Syndrome::Reserved(_) => false,
        })
    }

    #[inline]
    pub(crate) fn on_request(
        &mut self,
        base: &mut Base,
        arrival: &mut Arrival<'_>,
    ) -> Result<(), DropReason> {
        base.established();
        let ahead = arrival.packet.headers.bth.psn.offset_from(self.expected);
        if ahead < 0 {
            base.counters.add(QpCounter::DuplicateRequest, 1);
            return Err(self.on_duplicate(arrival.packet));
        }
        if ahead > 0 {
            base.counters.add(QpCounter::OutOfSequence, 1);
            self.on_gap();
            return Err(DropReason::OutOfSequence);
        }
        match self.execute(base, arrival) {
            Ok(()) => Ok(()),
            Err(refusal) => Err(self.refuse(base, refusal)),
        }
    }

    /// A request ahead of the expected PSN: one NAK per gap.
    fn on_gap(&mut self) {
        if !self.nak_given {
            self.nak_given = true;
            self.nak = Some(Nak { psn: self.expected, syndrome: Syndrome::Nak(NakCode::SequenceError) });
        }
    }

    /// A request that was executed before: answered again, nothing else changes.
    fn on_duplicate(&mut self, packet: &Packet) -> DropReason {
        let psn = packet.headers.bth.psn;
        match packet.headers.bth.opcode.op() {
            Op::ReadRequest | Op::CmpSwap | Op::FetchAdd => {
                let Some(again) = replay_of(packet) else { return DropReason::StaleDuplicate };
                match self.resources.repeat(psn, &again, self.inbound.mtu) {
                    Repeat::Queued => {
                        // The response acknowledges what comes before it.
                        self.duplicate_ack = None;
                        DropReason::Duplicate
                    }
                    Repeat::Owed => DropReason::Duplicate,
                    Repeat::Stale => DropReason::StaleDuplicate,
                }
            }
            // Answered only where the peer asks for it, as a packet that is not a duplicate is.
            Op::Send | Op::Write if !packet.headers.bth.ack_req => DropReason::Duplicate,
            Op::Send | Op::Write => {
                self.acknowledge_again(psn);
                DropReason::Duplicate
            }
            Op::ReadResponse | Op::Ack | Op::AtomicAck | Op::Cnp => DropReason::StaleDuplicate,
        }
    }

    /// The peer went back, and what it sends again is acknowledged as far as it has sent it: by the PSN of the duplicate,
    /// not by the newest. An ACK of more completes messages under the feet of Linux' rdma_rxe, which then neither sends
    /// the rest nor waits for an answer to it, so that the connection hangs when one more packet is lost (seen with 6.12).
    fn acknowledge_again(&mut self, psn: Psn) {
        if self.resources.owed() > 0 && psn.offset_from(self.after_read) < 0 {
            // The response of a later READ is still to come and acknowledges this one.
            return;
        }
        if self.duplicate_ack.is_none_or(|before| psn.offset_from(before) > 0) {
            self.duplicate_ack = Some(psn);
        }
    }

    fn refuse(&mut self, base: &mut Base, refusal: Refusal) -> DropReason {
        let psn = self.expected;
        match refusal {
            Refusal::NotReady => {
                base.counters.add(QpCounter::SendRnr, 1);
                self.nak_given = true;
                self.nak = Some(Nak { psn, syndrome: Syndrome::RnrNak { timer: self.min_rnr_timer } });
                DropReason::NotReady
            }
            Refusal::Fatal(code, recv) => {
                self.nak = Some(Nak { psn, syndrome: Syndrome::Nak(code) });
                base.fail_request(psn, Some(code), recv);
                DropReason::Refused
            }
            // Class J: the message is not acknowledged, and nothing says why.
            Refusal::Invalidate => {
                self.nak = None;
                self.closing = true;
                base.fail_request(psn, None, Some(WcStatus::RemInvReqErr));
                DropReason::Refused
            }
        }
    }

    /// The check chain for the expected PSN, in the order of roce-wire 6.2.
    #[inline]
    fn execute(&mut self, base: &mut Base, arrival: &mut Arrival<'_>) -> Result<(), Refusal> {
        let bth = &arrival.packet.headers.bth;
        let info = bth.opcode.info();
        self.inbound.in_order(&info)?;
        match info.op {
            Op::Send => self.inbound.send(base, &info, arrival)?,
            Op::Write => self.inbound.write(base, &info, arrival)?,
            Op::ReadRequest => return self.on_read(base, arrival),
            Op::CmpSwap | Op::FetchAdd => return self.on_atomic(base, arrival),
            Op::ReadResponse | Op::Ack | Op::AtomicAck | Op::Cnp => return Err(Refusal::INVALID),
        }
        if ends(info.part) {
            self.msn = self.msn.next();
        }
        self.advance(1);
        self.ack_due |= bth.ack_req;
        Ok(())
    }

    /// A new READ: checked as a whole now, and again packet by packet when its data leaves.
    fn on_read(&mut self, base: &mut Base, arrival: &Arrival<'_>) -> Result<(), Refusal> {
        self.may_query(base, Access::REMOTE_READ)?;
        let Some(reth) = &arrival.packet.headers.ext.reth else { return Err(Refusal::INVALID) };
        if reth.len > DmaLen::MAX || arrival.packet.payload_len != 0 {
            return Err(Refusal::INVALID);
        }
        arrival
            .memory
            .check_remote_for(base.qpn, base.attr.pd, reth.rkey, reth.addr, reth.len, Access::REMOTE_READ)
            .map_err(|_| Refusal::ACCESS)?;
        self.accept(Work::Read { addr: reth.addr, rkey: reth.rkey, len: reth.len.0 });
        Ok(())
    }

    /// A new atomic: checked now, executed when its answer leaves. It sees the memory behind every READ before it,
    /// whose data is copied when that leaves (IBTA 10.8.3.3 orders the two).
    fn on_atomic(&mut self, base: &mut Base, arrival: &Arrival<'_>) -> Result<(), Refusal> {
        self.may_query(base, Access::REMOTE_ATOMIC)?;
        let (op, eth) = atomic_of(arrival.packet).ok_or(Refusal::INVALID)?;
        if eth.addr.0 & 7 != 0 || arrival.packet.payload_len != 0 {
            return Err(Refusal::INVALID);
        }
        arrival
            .memory
            .check_remote_for(base.qpn, base.attr.pd, eth.rkey, eth.addr, ATOMIC_LEN, Access::REMOTE_ATOMIC)
            .map_err(|_| Refusal::ACCESS)?;
        self.accept(Work::Atomic { addr: eth.addr, rkey: eth.rkey, op, result: None });
        Ok(())
    }

    /// Whether the queue pair grants the right, and another READ or atomic was agreed upon.
    fn may_query(&self, base: &Base, right: Access) -> Result<(), Refusal> {
        let granted = base.init.is_some_and(|init| init.access.contains(right));
        if granted && self.resources.room() { Ok(()) } else { Err(Refusal::INVALID) }
    }

    /// Takes a READ or atomic on.
    fn accept(&mut self, work: Work) {
        let packets = match work {
            Work::Read { len, .. } => segment::packets(len, self.inbound.mtu),
            Work::Atomic { .. } => 1,
        };
        self.resources.push(self.expected, packets, work);
        self.msn = self.msn.next();
        self.advance(packets);
        self.after_read = self.expected;
        // The response acknowledges everything before it.
        self.ack_due = false;
        self.duplicate_ack = None;
    }

    /// The expected PSN moves on: a NAK that named it is void.
    #[inline]
    fn advance(&mut self, psns: u32) {
        self.expected = self.expected.advance(psns);
        self.nak_given = false;
        self.nak = None;
    }
}

/// Bytes of an atomic's operand.
pub(super) const ATOMIC_LEN: DmaLen = DmaLen(8);

/// Operation and header of an atomic request.
fn atomic_of(packet: &Packet) -> Option<(AtomicOp, AtomicEth)> {
    let eth = packet.headers.ext.atomic?;
    let op = match packet.headers.bth.opcode.op() {
        Op::CmpSwap => AtomicOp::CmpSwap { compare: eth.compare, swap: eth.swap_or_add },
        Op::FetchAdd => AtomicOp::FetchAdd { add: eth.swap_or_add },
        Op::Send | Op::Write | Op::ReadRequest | Op::ReadResponse | Op::Ack | Op::AtomicAck | Op::Cnp => {
            return None;
        }
    };
    Some((op, eth))
}

/// What a READ or atomic request asks for again.
fn replay_of(packet: &Packet) -> Option<Replay> {
    if let Some(reth) = &packet.headers.ext.reth {
        return Some(Replay::Read { addr: reth.addr, rkey: reth.rkey, len: reth.len.0 });
    }
    let (op, eth) = atomic_of(packet)?;
    Some(Replay::Atomic { addr: eth.addr, rkey: eth.rkey, op })
}

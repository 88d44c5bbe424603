//! Responder: the check chain of incoming requests, then *place* (payload to memory), then *commit* (PSN, message and
//! acknowledge state), as separate steps.
//!
//! Owns the receive side's PSN, the message in progress and the answers that are owed, in fixed small state.
//! Invariant: nothing is acknowledged before its payload is placed and its receive is finished. Called by `rc`; sends
//! nothing itself (see `answer`).

use ferroce_mem::{Access, Memory, Payload};
use ferroce_verbs::{PathMtu, QpState, RtrAttrs, WcStatus};
use ferroce_wire::emit::pad_of;
use ferroce_wire::opcode::{OpcodeInfo, PayloadRule};
use ferroce_wire::{DmaLen, Msn, NakCode, Op, Packet, Part, Psn, RemoteAddr, Rkey, Syndrome};

use crate::counters::QpCounter;
use crate::qp::{Base, DropReason};
use crate::segment;
use crate::sequence;
use crate::wq::{SgeCursor, scatter};

use super::replay::{Reads, Repeat};

/// A request message of which some packets are in.
#[derive(Clone, Copy)]
struct Open {
    op: Op,
    /// Bytes placed.
    received: u32,
    /// Where the next bytes go in the scatter list of the receive (SEND).
    cursor: SgeCursor,
    /// Where the next bytes go (WRITE), and how many are still to come.
    addr: RemoteAddr,
    rkey: Rkey,
    left: u32,
}

/// A NAK that is owed.
#[derive(Clone, Copy)]
pub(super) struct Nak {
    pub(super) psn: Psn,
    pub(super) syndrome: Syndrome,
}

/// Why a request is not executed.
enum Refusal {
    /// No receive is posted.
    NotReady,
    /// The queue pair is done for; with the status of the receive in use, if that failed.
    Fatal(NakCode, Option<WcStatus>),
}

impl Refusal {
    const INVALID: Refusal = Refusal::Fatal(NakCode::InvalidRequest, None);
    const ACCESS: Refusal = Refusal::Fatal(NakCode::RemoteAccess, None);
}

/// Receive side of a reliable connection.
pub(crate) struct Responder {
    pub(super) mtu: PathMtu,
    min_rnr_timer: u8,
    max_dest: u8,
    /// Next PSN expected.
    pub(crate) expected: Psn,
    /// Messages completed.
    pub(super) msn: Msn,
    open: Option<Open>,
    /// A NAK for `expected` went out or is owed: the gap gets no other until `expected` arrives. (Not a state of its
    /// own: it holds in any state of `open`.)
    nak_given: bool,
    /// PSN after the last READ. Duplicates from here on may be acknowledged with the newest PSN; an older one only
    /// with its own, since a later PSN would stand for READ data (WIRE-1).
    after_read: Psn,
    /// An ACK of everything before `expected` is owed.
    pub(super) ack_due: bool,
    /// An ACK of a duplicate is owed, with this PSN.
    pub(super) duplicate_ack: Option<Psn>,
    pub(super) nak: Option<Nak>,
    pub(super) reads: Reads,
    /// COMM_EST was told.
    established: bool,
}

impl Responder {
    pub(crate) fn new() -> Responder {
        Responder {
            mtu: PathMtu::Mtu256,
            min_rnr_timer: 0,
            max_dest: 0,
            expected: Psn::default(),
            msn: Msn::default(),
            open: None,
            nak_given: false,
            after_read: Psn::default(),
            ack_due: false,
            duplicate_ack: None,
            nak: None,
            reads: Reads::new(),
            established: false,
        }
    }

    pub(crate) fn start(&mut self, rtr: &RtrAttrs) {
        self.mtu = rtr.path_mtu;
        self.min_rnr_timer = rtr.min_rnr_timer;
        self.max_dest = rtr.max_dest_rd_atomic;
        self.expected = rtr.rq_psn;
        self.after_read = rtr.rq_psn;
        self.reads.start(rtr.max_dest_rd_atomic);
    }

    /// Attributes changed.
    pub(crate) fn change(&mut self, rtr: &RtrAttrs) {
        self.min_rnr_timer = rtr.min_rnr_timer;
        if self.max_dest != rtr.max_dest_rd_atomic {
            self.max_dest = rtr.max_dest_rd_atomic;
            self.reads.limit(rtr.max_dest_rd_atomic);
        }
    }

    pub(crate) fn reset(&mut self) {
        self.expected = Psn::default();
        self.msn = Msn::default();
        self.open = None;
        self.nak_given = false;
        self.ack_due = false;
        self.duplicate_ack = None;
        self.nak = None;
        self.reads.start(0);
        self.established = false;
    }

    /// A refusal is still to be told to the peer.
    #[inline]
    pub(crate) fn has_last_words(&self) -> bool {
        self.nak.is_some_and(|nak| match nak.syndrome {
            Syndrome::Nak(code) => code != NakCode::SequenceError,
            Syndrome::Ack { .. } | Syndrome::RnrNak { .. } | Syndrome::Reserved(_) => false,
        })
    }

    #[inline]
    pub(crate) fn on_request(
        &mut self,
        base: &mut Base,
        packet: &Packet,
        payload: &Payload<'_>,
        memory: &Memory,
    ) -> Result<(), DropReason> {
        if base.state == QpState::Rtr && !self.established {
            self.established = true;
            base.notices.comm_est();
        }
        let ahead = packet.headers.bth.psn.offset_from(self.expected);
        if ahead < 0 {
            base.counters.add(QpCounter::DuplicateRequest, 1);
            return Err(self.on_duplicate(packet));
        }
        if ahead > 0 {
            base.counters.add(QpCounter::OutOfSequence, 1);
            self.on_gap();
            return Err(DropReason::OutOfSequence);
        }
        match self.execute(base, packet, payload, memory) {
            Ok(()) => Ok(()),
            Err(refusal) => Err(self.refuse(base, &refusal)),
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
            Op::ReadRequest => {
                let Some(reth) = &packet.headers.ext.reth else { return DropReason::StaleDuplicate };
                match self.reads.repeat(psn, reth, self.mtu) {
                    Repeat::Queued => {
                        // The response acknowledges what comes before it.
                        self.duplicate_ack = None;
                        DropReason::Duplicate
                    }
                    Repeat::Owed => DropReason::Duplicate,
                    Repeat::Stale => DropReason::StaleDuplicate,
                }
            }
            // Answered only where the peer asks for it, as a packet that is not a duplicate is. A peer that goes back
            // asks with the end of each message. An answer before that, to a message which it has half sent again,
            // completes the message under the feet of Linux' rdma_rxe: its next PSN stays behind what is
            // acknowledged, it neither sends nor times out any more, and the connection hangs (seen with 6.12).
            Op::Send | Op::Write if !packet.headers.bth.ack_req => DropReason::Duplicate,
            Op::Send | Op::Write => {
                if psn.offset_from(self.after_read) >= 0 {
                    self.ack_due = true;
                } else if self.reads.owed() == 0 {
                    self.duplicate_ack = Some(psn);
                }
                // Else the response of a later READ is still to come and acknowledges this one.
                DropReason::Duplicate
            }
            Op::CmpSwap | Op::FetchAdd | Op::ReadResponse | Op::Ack | Op::AtomicAck | Op::Cnp => {
                DropReason::StaleDuplicate
            }
        }
    }

    fn refuse(&mut self, base: &mut Base, refusal: &Refusal) -> DropReason {
        let psn = self.expected;
        match *refusal {
            Refusal::NotReady => {
                base.counters.add(QpCounter::SendRnr, 1);
                self.nak_given = true;
                self.nak = Some(Nak { psn, syndrome: Syndrome::RnrNak { timer: self.min_rnr_timer } });
                DropReason::NotReady
            }
            Refusal::Fatal(code, recv) => {
                self.nak = Some(Nak { psn, syndrome: Syndrome::Nak(code) });
                base.fail_request(psn, code, recv);
                DropReason::Refused
            }
        }
    }

    /// The check chain for the expected PSN, in the order of roce-wire 6.2.
    #[inline]
    fn execute(
        &mut self,
        base: &mut Base,
        packet: &Packet,
        payload: &Payload<'_>,
        memory: &Memory,
    ) -> Result<(), Refusal> {
        let info = packet.headers.bth.opcode.info();
        sequence::follows(self.open.map(|open| open.op), info.op, info.part).map_err(|_| Refusal::INVALID)?;
        match info.op {
            Op::Send if !info.inv => self.on_send(base, &info, packet, payload, memory),
            Op::Write => self.on_write(base, &info, packet, payload, memory),
            Op::ReadRequest => self.on_read(base, packet, memory),
            // Operations that this queue pair does not have.
            Op::Send | Op::CmpSwap | Op::FetchAdd => Err(Refusal::INVALID),
            Op::ReadResponse | Op::Ack | Op::AtomicAck | Op::Cnp => Err(Refusal::INVALID),
        }
    }

    #[inline]
    fn on_send(
        &mut self,
        base: &mut Base,
        info: &OpcodeInfo,
        packet: &Packet,
        payload: &Payload<'_>,
        memory: &Memory,
    ) -> Result<(), Refusal> {
        let room = base.rq.current().ok_or(Refusal::NotReady)?.room;
        let bytes = self.payload_bytes(info, packet, payload)?;
        let mut open = self.open.unwrap_or(Open::new(Op::Send));
        let received = open.received.saturating_add(bytes);
        if received > room {
            return Err(Refusal::Fatal(NakCode::InvalidRequest, Some(WcStatus::LocLenErr)));
        }
        // Place.
        let list = base.rq.current_sges();
        open.cursor.seek(list, open.received);
        scatter(memory, base.attr.pd, list, &open.cursor, payload)
            .map_err(|_| Refusal::Fatal(NakCode::RemoteOperational, Some(WcStatus::LocProtErr)))?;
        // Commit.
        open.received = received;
        base.counters.add(QpCounter::RcvdBytes, u64::from(bytes));
        self.commit(open, info.part, packet.headers.bth.ack_req);
        if ends(info.part) {
            base.rq.finish(|entry| {
                entry.byte_len = received;
                entry.imm = packet.headers.ext.imm;
                entry.solicited = packet.headers.bth.solicited;
            });
        }
        Ok(())
    }

    #[inline]
    fn on_write(
        &mut self,
        base: &mut Base,
        info: &OpcodeInfo,
        packet: &Packet,
        payload: &Payload<'_>,
        memory: &Memory,
    ) -> Result<(), Refusal> {
        if !base.init.is_some_and(|init| init.access.contains(Access::REMOTE_WRITE)) {
            return Err(Refusal::INVALID);
        }
        let with_imm = packet.headers.ext.imm;
        if with_imm.is_some() && base.rq.current().is_none() {
            return Err(Refusal::NotReady);
        }
        let bytes = self.payload_bytes(info, packet, payload)?;
        let mut open = match (self.open, &packet.headers.ext.reth) {
            (Some(open), _) => open,
            (None, Some(reth)) if reth.len <= DmaLen::MAX => {
                Open { addr: reth.addr, rkey: reth.rkey, left: reth.len.0, ..Open::new(Op::Write) }
            }
            (None, Some(_) | None) => return Err(Refusal::INVALID),
        };
        // The last packet brings exactly what is left; every other leaves something.
        let exact = if ends(info.part) { bytes == open.left } else { bytes < open.left };
        if !exact {
            return Err(Refusal::INVALID);
        }
        // Place. The first packet asks for the whole range, later ones for their own: the key may have gone since.
        let span = if self.open.is_none() { open.left } else { bytes };
        let target = memory
            .check_remote(base.attr.pd, open.rkey, open.addr, DmaLen(span), Access::REMOTE_WRITE)
            .map_err(|_| Refusal::ACCESS)?;
        if bytes > 0 && !target.place(0, payload) {
            return Err(Refusal::ACCESS);
        }
        // Commit.
        open.addr = open.addr.advance(u64::from(bytes));
        open.left = open.left.saturating_sub(bytes);
        open.received = open.received.saturating_add(bytes);
        base.counters.add(QpCounter::RcvdBytes, u64::from(bytes));
        self.commit(open, info.part, packet.headers.bth.ack_req);
        if ends(info.part) && with_imm.is_some() {
            base.rq.finish(|entry| {
                entry.byte_len = open.received;
                entry.imm = with_imm;
                entry.by_write = true;
                entry.solicited = packet.headers.bth.solicited;
            });
        }
        Ok(())
    }

    /// A new READ: checked as a whole now, and again packet by packet when its data leaves.
    fn on_read(&mut self, base: &mut Base, packet: &Packet, memory: &Memory) -> Result<(), Refusal> {
        if !base.init.is_some_and(|init| init.access.contains(Access::REMOTE_READ)) {
            return Err(Refusal::INVALID);
        }
        // More at once than was agreed, or none agreed at all.
        if self.max_dest == 0 || !self.reads.room() {
            return Err(Refusal::INVALID);
        }
        let Some(reth) = &packet.headers.ext.reth else { return Err(Refusal::INVALID) };
        if reth.len > DmaLen::MAX || packet.payload_len != 0 {
            return Err(Refusal::INVALID);
        }
        memory
            .check_remote(base.attr.pd, reth.rkey, reth.addr, reth.len, Access::REMOTE_READ)
            .map_err(|_| Refusal::ACCESS)?;
        let packets = segment::packets(reth.len.0, self.mtu);
        self.reads.push(self.expected, packets, reth);
        self.msn = self.msn.next();
        self.advance(packets);
        self.after_read = self.expected;
        // The response acknowledges everything before it.
        self.ack_due = false;
        self.duplicate_ack = None;
        Ok(())
    }

    /// Payload bytes, if the opcode's rule and the pad allow them (roce-wire 2.4, 3.2).
    #[inline]
    fn payload_bytes(
        &self,
        info: &OpcodeInfo,
        packet: &Packet,
        payload: &Payload<'_>,
    ) -> Result<u32, Refusal> {
        let bytes = u32::try_from(payload.len()).map_err(|_| Refusal::INVALID)?;
        let full = self.mtu.bytes();
        let fits = match info.payload {
            PayloadRule::None => bytes == 0,
            PayloadRule::Full => bytes == full,
            PayloadRule::OneToMtu => bytes >= 1 && bytes <= full,
            PayloadRule::ZeroToMtu => bytes <= full,
        };
        let whole = payload.len() == usize::from(packet.payload_len);
        if fits && whole && pad_of(payload.len()) == usize::from(packet.pad) {
            Ok(bytes)
        } else {
            Err(Refusal::INVALID)
        }
    }

    /// One packet of a SEND or WRITE is placed.
    #[inline]
    fn commit(&mut self, open: Open, part: Part, ack_req: bool) {
        if ends(part) {
            self.open = None;
            self.msn = self.msn.next();
        } else {
            self.open = Some(open);
        }
        self.advance(1);
        self.ack_due |= ack_req;
    }

    /// The expected PSN moves on: a NAK that named it is void.
    #[inline]
    fn advance(&mut self, psns: u32) {
        self.expected = self.expected.advance(psns);
        self.nak_given = false;
        self.nak = None;
    }
}

impl Open {
    #[inline]
    fn new(op: Op) -> Open {
        Open {
            op,
            received: 0,
            cursor: SgeCursor::default(),
            addr: RemoteAddr::default(),
            rkey: Rkey::default(),
            left: 0,
        }
    }
}

#[inline]
const fn ends(part: Part) -> bool {
    matches!(part, Part::Last | Part::Only)
}

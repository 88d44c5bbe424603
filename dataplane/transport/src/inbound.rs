//! SENDs and WRITEs as they come in, on any connected service: the check chain of a request in the expected place, then
//! *place* (payload to memory), then *commit* (the message in progress moves on), as separate steps.
//!
//! Owns the message in progress. Never looks at PSNs and answers nothing: what a refusal means is up to the service.

use ferroce_mem::Access;
use ferroce_verbs::{PathMtu, WcStatus};
use ferroce_wire::emit::pad_of;
use ferroce_wire::opcode::{OpcodeInfo, PayloadRule};
use ferroce_wire::{DmaLen, NakCode, Op, Part, RemoteAddr, Rkey};

use crate::arrival::Arrival;
use crate::counters::QpCounter;
use crate::qp::Base;
use crate::sequence;
use crate::wq::{SgeCursor, scatter};

/// A request message of which some packets are in.
#[derive(Clone, Copy)]
pub(crate) struct Open {
    pub(crate) op: Op,
    /// Bytes placed.
    pub(crate) received: u32,
    /// Where the next bytes go in the scatter list of the receive (SEND).
    pub(crate) cursor: SgeCursor,
    /// Where the next bytes go (WRITE), and how many are still to come.
    pub(crate) addr: RemoteAddr,
    pub(crate) rkey: Rkey,
    pub(crate) left: u32,
}

impl Open {
    #[inline]
    pub(crate) fn new(op: Op) -> Open {
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

/// Why a request is not executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// No receive is posted.
    NotReady,
    /// The request is at fault, or our own buffers are; with the status of the receive in use, if that failed.
    Fatal(NakCode, Option<WcStatus>),
    /// The message is in, but the key that it wanted to end is none that it may.
    Invalidate,
}

impl Refusal {
    pub(crate) const INVALID: Refusal = Refusal::Fatal(NakCode::InvalidRequest, None);
    pub(crate) const ACCESS: Refusal = Refusal::Fatal(NakCode::RemoteAccess, None);
}

/// The message in progress.
pub(crate) struct Inbound {
    pub(crate) mtu: PathMtu,
    pub(crate) open: Option<Open>,
}

impl Inbound {
    pub(crate) const fn new() -> Inbound {
        Inbound { mtu: PathMtu::Mtu256, open: None }
    }

    /// Whether a packet of this kind may come now.
    #[inline]
    pub(crate) fn in_order(&self, info: &OpcodeInfo) -> Result<(), Refusal> {
        sequence::follows(self.open.map(|open| open.op), info.op, info.part).map_err(|_| Refusal::INVALID)
    }

    /// One packet of a SEND, which the caller found in order.
    #[inline]
    pub(crate) fn send(
        &mut self,
        base: &mut Base,
        info: &OpcodeInfo,
        arrival: &mut Arrival<'_>,
    ) -> Result<(), Refusal> {
        let headers = &arrival.packet.headers;
        if !base.take_receive(arrival.srq.as_deref_mut(), arrival.memory) {
            return Err(Refusal::NotReady);
        }
        let room = base.rq.current().map_or(0, |entry| entry.room);
        let bytes = self.payload_bytes(info, arrival)?;
        let mut open = self.open.unwrap_or(Open::new(Op::Send));
        let received = open.received.saturating_add(bytes);
        if received > room {
            return Err(Refusal::Fatal(NakCode::InvalidRequest, Some(WcStatus::LocLenErr)));
        }
        // Place.
        let list = base.rq.current_sges();
        open.cursor.seek(list, open.received);
        scatter(arrival.memory, base.attr.pd, list, &open.cursor, arrival.payload)
            .map_err(|_| Refusal::Fatal(NakCode::RemoteOperational, Some(WcStatus::LocProtErr)))?;
        if let Some(rkey) = headers.ext.invalidate {
            arrival.memory.invalidate(base.qpn, base.attr.pd, rkey).map_err(|_| Refusal::Invalidate)?;
        }
        // Commit.
        open.received = received;
        base.counters.add(QpCounter::RcvdBytes, u64::from(bytes));
        self.commit(open, info.part);
        if ends(info.part) {
            base.rq.finish(|entry| {
                entry.byte_len = received;
                entry.imm = headers.ext.imm;
                entry.invalidated = headers.ext.invalidate;
                entry.solicited = headers.bth.solicited;
            });
        }
        Ok(())
    }

    /// One packet of a WRITE, which the caller found in order.
    #[inline]
    pub(crate) fn write(
        &mut self,
        base: &mut Base,
        info: &OpcodeInfo,
        arrival: &mut Arrival<'_>,
    ) -> Result<(), Refusal> {
        let headers = &arrival.packet.headers;
        if !base.init.is_some_and(|init| init.access.contains(Access::REMOTE_WRITE)) {
            return Err(Refusal::INVALID);
        }
        let with_imm = headers.ext.imm;
        if with_imm.is_some() && base.room_of_next(arrival.srq.as_deref()).is_none() {
            return Err(Refusal::NotReady);
        }
        let bytes = self.payload_bytes(info, arrival)?;
        let mut open = match (self.open, &headers.ext.reth) {
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
        let span = DmaLen(if self.open.is_none() { open.left } else { bytes });
        let target = arrival
            .memory
            .check_remote_for(base.qpn, base.attr.pd, open.rkey, open.addr, span, Access::REMOTE_WRITE)
            .map_err(|_| Refusal::ACCESS)?;
        if with_imm.is_some() && !base.take_receive(arrival.srq.as_deref_mut(), arrival.memory) {
            return Err(Refusal::NotReady);
        }
        if bytes > 0 && !target.place(0, arrival.payload) {
            return Err(Refusal::ACCESS);
        }
        // Commit.
        open.addr = open.addr.advance(u64::from(bytes));
        open.left = open.left.saturating_sub(bytes);
        open.received = open.received.saturating_add(bytes);
        base.counters.add(QpCounter::RcvdBytes, u64::from(bytes));
        self.commit(open, info.part);
        if ends(info.part) && with_imm.is_some() {
            base.rq.finish(|entry| {
                entry.byte_len = open.received;
                entry.imm = with_imm;
                entry.by_write = true;
                entry.solicited = headers.bth.solicited;
            });
        }
        Ok(())
    }

    /// Payload bytes, if the opcode's rule and the pad allow them (roce-wire 2.4, 3.2).
    #[inline]
    fn payload_bytes(&self, info: &OpcodeInfo, arrival: &Arrival<'_>) -> Result<u32, Refusal> {
        let (packet, payload) = (arrival.packet, arrival.payload);
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
    fn commit(&mut self, open: Open, part: Part) {
        self.open = if ends(part) { None } else { Some(open) };
    }
}

/// The packet completes its message.
#[inline]
pub(crate) const fn ends(part: Part) -> bool {
    matches!(part, Part::Last | Part::Only)
}

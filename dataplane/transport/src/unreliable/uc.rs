//! Receive side of an unreliable connection (roce-wire 6.11): messages whole or not at all.
//!
//! A gap drops the message in progress, and so does whatever a reliable connection would answer with a NAK; the next
//! first or only packet is taken, wherever its PSN lies. A receive that was begun serves the next message.

use ferroce_verbs::{PathMtu, WcStatus};
use ferroce_wire::opcode::OpcodeInfo;
use ferroce_wire::{NakCode, Op, Part, Psn};

use crate::arrival::Arrival;
use crate::counters::QpCounter;
use crate::inbound::{Inbound, Refusal};
use crate::qp::{Base, DropReason};

/// Receive side.
pub(crate) struct UcReceiver {
    pub(crate) inbound: Inbound,
    /// PSN after the last packet that was taken.
    pub(crate) expected: Psn,
}

impl UcReceiver {
    pub(crate) fn new() -> UcReceiver {
        UcReceiver { inbound: Inbound::new(), expected: Psn::default() }
    }

    pub(crate) fn start(&mut self, mtu: PathMtu, psn: Psn) {
        self.inbound = Inbound { mtu, open: None };
        self.expected = psn;
    }

    #[inline]
    pub(crate) fn on_packet(&mut self, base: &mut Base, arrival: &mut Arrival<'_>) -> Result<(), DropReason> {
        base.established();
        let bth = &arrival.packet.headers.bth;
        let info = bth.opcode.info();
        let in_place = bth.psn == self.expected;
        if !in_place {
            base.counters.add(QpCounter::OutOfSequence, 1);
        }
        if matches!(info.part, Part::First | Part::Only) {
            // Whatever was in progress will not go on.
            self.inbound.open = None;
        } else if !in_place || self.inbound.open.is_none() {
            self.inbound.open = None;
            return Err(DropReason::OutOfSequence);
        }
        self.expected = bth.psn.advance(1);
        let psn = bth.psn;
        self.execute(base, &info, arrival).map_err(|refusal| {
            self.inbound.open = None;
            match refusal {
                Refusal::NotReady => DropReason::NotReady,
                // Our own buffers are at fault.
                Refusal::Fatal(NakCode::RemoteOperational, status) => {
                    base.fail_request(psn, None, status.or(Some(WcStatus::LocProtErr)));
                    DropReason::Refused
                }
                Refusal::Fatal(..) | Refusal::Invalidate => DropReason::Refused,
            }
        })
    }

    #[inline]
    fn execute(
        &mut self,
        base: &mut Base,
        info: &OpcodeInfo,
        arrival: &mut Arrival<'_>,
    ) -> Result<(), Refusal> {
        self.inbound.in_order(info)?;
        match info.op {
            Op::Send => self.inbound.send(base, info, arrival),
            Op::Write => self.inbound.write(base, info, arrival),
            Op::ReadRequest
            | Op::ReadResponse
            | Op::Ack
            | Op::AtomicAck
            | Op::CmpSwap
            | Op::FetchAdd
            | Op::Cnp => Err(Refusal::INVALID),
        }
    }
}

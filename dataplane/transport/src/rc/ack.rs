//! Requester: takes ACKs, NAKs and READ responses (roce-wire 5.9).

use ferroce_mem::{Memory, Payload};
use ferroce_verbs::WcStatus;
use ferroce_wire::{Aeth, NakCode, Op, Packet, Part, Psn, Syndrome};

use crate::counters::QpCounter;
use crate::qp::{Base, DropReason};
use crate::segment::{self, distance};
use crate::time::Instant;
use crate::wq::scatter;

use super::requester::Requester;
use super::retry::Cause;

impl Requester {
    #[inline]
    pub(crate) fn on_response(
        &mut self,
        base: &mut Base,
        now: Instant,
        packet: &Packet,
        payload: &Payload<'_>,
        memory: &Memory,
    ) -> Result<(), DropReason> {
        let psn = packet.headers.bth.psn;
        // Answers to PSNs that are not outstanding: late duplicates, or nothing of ours.
        if distance(psn, self.una) >= distance(self.next, self.una) {
            return Err(DropReason::UnexpectedResponse);
        }
        match packet.headers.bth.opcode.op() {
            Op::Ack => match packet.headers.ext.aeth {
                Some(aeth) => self.on_ack(base, now, psn, aeth),
                None => Err(DropReason::UnexpectedResponse),
            },
            Op::ReadResponse => self.on_read_response(base, now, packet, payload, memory),
            Op::AtomicAck => {
                // No atomic is outstanding, so this answers nothing.
                if self.acknowledge(base, now, psn) {
                    base.fail_send(WcStatus::BadRespErr, psn);
                }
                Err(DropReason::UnexpectedResponse)
            }
            Op::Send | Op::Write | Op::ReadRequest | Op::CmpSwap | Op::FetchAdd | Op::Cnp => {
                Err(DropReason::UnexpectedResponse)
            }
        }
    }

    fn on_ack(&mut self, base: &mut Base, now: Instant, psn: Psn, aeth: Aeth) -> Result<(), DropReason> {
        match aeth.syndrome {
            // Every credit code is an ACK; credits are not used (roce-wire 5.10).
            Syndrome::Ack { credits: _ } => {
                if !self.acknowledge(base, now, psn.advance(1)) {
                    self.go_back(base, Cause::Implied);
                }
            }
            Syndrome::RnrNak { timer } => {
                if self.acknowledge(base, now, psn) {
                    self.not_ready(base, now, timer);
                } else {
                    self.go_back(base, Cause::Implied);
                }
            }
            Syndrome::Nak(code) => {
                // Any NAK acknowledges what comes before its PSN.
                if !self.acknowledge(base, now, psn) {
                    self.go_back(base, Cause::Implied);
                    return Ok(());
                }
                match code {
                    NakCode::SequenceError => self.go_back(base, Cause::Sequence),
                    NakCode::InvalidRequest => base.fail_send(WcStatus::RemInvReqErr, psn),
                    NakCode::RemoteAccess => base.fail_send(WcStatus::RemAccessErr, psn),
                    NakCode::RemoteOperational | NakCode::InvalidRdRequest | NakCode::Reserved(_) => {
                        base.fail_send(WcStatus::RemOpErr, psn);
                    }
                }
            }
            Syndrome::Reserved(_) => {
                if self.acknowledge(base, now, psn) {
                    base.fail_send(WcStatus::BadRespErr, psn);
                }
                return Err(DropReason::UnexpectedResponse);
            }
        }
        Ok(())
    }

    fn on_read_response(
        &mut self,
        base: &mut Base,
        now: Instant,
        packet: &Packet,
        payload: &Payload<'_>,
        memory: &Memory,
    ) -> Result<(), DropReason> {
        let psn = packet.headers.bth.psn;
        if !self.acknowledge(base, now, psn) {
            // An earlier response is missing.
            self.go_back(base, Cause::Implied);
            return Err(DropReason::UnexpectedResponse);
        }
        match self.take_read_data(base, packet, payload, memory) {
            Ok(bytes) => {
                base.counters.add(QpCounter::RcvdBytes, u64::from(bytes));
                self.read_advanced(base, now);
                Ok(())
            }
            Err(status) => {
                base.fail_send(status, psn);
                Err(DropReason::Refused)
            }
        }
    }

    /// Checks that the packet is the next one of the READ that is oldest, and places its data. Any part is good that
    /// agrees with what is left: a responder may answer a resumed READ as a new one or as the rest of the old one.
    fn take_read_data(
        &mut self,
        base: &Base,
        packet: &Packet,
        payload: &Payload<'_>,
        memory: &Memory,
    ) -> Result<u32, WcStatus> {
        let index = base.sq.queue.done;
        let entry = base.sq.queue.get(index).filter(|entry| entry.is_read()).ok_or(WcStatus::BadRespErr)?;
        let number = distance(self.una, entry.first);
        let offset = segment::offset(number, self.mtu);
        let left = entry.len.saturating_sub(offset);
        let due = segment::chunk(entry.len, number, self.mtu);
        let bytes = u32::try_from(payload.len()).map_err(|_| WcStatus::BadRespErr)?;
        let ends = match packet.headers.bth.opcode.part() {
            Part::First | Part::Middle => false,
            Part::Last | Part::Only => true,
        };
        let acked = packet.headers.ext.aeth.is_none_or(|aeth| matches!(aeth.syndrome, Syndrome::Ack { .. }));
        if bytes > left {
            return Err(WcStatus::LocLenErr);
        }
        if bytes != due || ends != (number.wrapping_add(1) == entry.packets) || !acked {
            return Err(WcStatus::BadRespErr);
        }
        let list = base.sq.queue.sges(index, entry.sges);
        self.scatter.seek(list, offset);
        scatter(memory, base.attr.pd, list, &self.scatter, payload).map_err(|_| WcStatus::LocProtErr)?;
        Ok(bytes)
    }

    /// One response packet of the oldest READ is in.
    fn read_advanced(&mut self, base: &mut Base, now: Instant) {
        let before = self.una;
        self.una = before.advance(1);
        self.read_psns = self.read_psns.saturating_sub(1);
        let complete = base
            .sq
            .queue
            .get(base.sq.queue.done)
            .is_some_and(|entry| entry.first.advance(entry.packets) == self.una);
        if complete {
            // If the cursor went back and this READ was not sent again, none is counted, and 0 stays 0.
            self.reads_out = self.reads_out.saturating_sub(1);
            self.finish_oldest(base);
        }
        self.progress(base, now, before);
    }
}

//! Requester: takes ACKs, NAKs, READ responses and results of atomics (roce-wire 5.9).

use ferroce_mem::Payload;
use ferroce_verbs::WcStatus;
use ferroce_wire::{Aeth, NakCode, Op, Packet, Part, Psn, Syndrome};

use crate::arrival::Arrival;
use crate::counters::QpCounter;
use crate::qp::{Base, DropReason};
use crate::segment::{self, distance};
use crate::time::Instant;
use crate::wq::{Kind, SendEntry, SgeCursor, scatter};

use super::requester::Requester;
use super::retry::Cause;

impl Requester {
    #[inline]
    pub(crate) fn on_response(
        &mut self,
        base: &mut Base,
        now: Instant,
        arrival: &Arrival<'_>,
    ) -> Result<(), DropReason> {
        let packet = arrival.packet;
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
            Op::ReadResponse | Op::AtomicAck => self.on_result(base, now, arrival),
            Op::Send | Op::Write | Op::ReadRequest | Op::CmpSwap | Op::FetchAdd | Op::Cnp => {
                Err(DropReason::UnexpectedResponse)
            }
        }
    }

    fn on_ack(&mut self, base: &mut Base, now: Instant, psn: Psn, aeth: Aeth) -> Result<(), DropReason> {
        match aeth.syndrome {
            // Every credit code is an ACK.
            Syndrome::Ack { credits } => {
                let arrived = self.acknowledge(base, now, psn.advance(1));
                self.take_credits(credits);
                if !arrived {
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

    /// What a READ or atomic brings.
    fn on_result(&mut self, base: &mut Base, now: Instant, arrival: &Arrival<'_>) -> Result<(), DropReason> {
        let psn = arrival.packet.headers.bth.psn;
        if !self.acknowledge(base, now, psn) {
            // An earlier response is missing.
            self.go_back(base, Cause::Implied);
            return Err(DropReason::UnexpectedResponse);
        }
        let taken = match arrival.packet.headers.ext.atomic_ack {
            Some(was) => take_atomic(base, arrival, was),
            None => self.take_read_data(base, arrival),
        };
        match taken {
            Ok(bytes) => {
                if let Some(Aeth { syndrome: Syndrome::Ack { credits }, .. }) =
                    arrival.packet.headers.ext.aeth
                {
                    self.take_credits(credits);
                }
                base.counters.add(QpCounter::RcvdBytes, u64::from(bytes));
                self.result_advanced(base, now);
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
    fn take_read_data(&mut self, base: &Base, arrival: &Arrival<'_>) -> Result<u32, WcStatus> {
        let (packet, payload) = (arrival.packet, arrival.payload);
        let index = base.sq.queue.done;
        let entry = oldest(base, Kind::Read)?;
        let number = distance(self.una, entry.first);
        let offset = segment::offset(number, self.mtu);
        let left = entry.len.saturating_sub(offset);
        let due = segment::chunk(entry.len, number, self.mtu);
        let bytes = u32::try_from(payload.len()).map_err(|_| WcStatus::BadRespErr)?;
        let ends = match packet.headers.bth.opcode.part() {
            Part::First | Part::Middle => false,
            Part::Last | Part::Only => true,
        };
        if bytes > left {
            return Err(WcStatus::LocLenErr);
        }
        if bytes != due || ends != (number.wrapping_add(1) == entry.packets) || !acked(packet) {
            return Err(WcStatus::BadRespErr);
        }
        let list = base.sq.queue.sges(index, entry.sges);
        self.scatter.seek(list, offset);
        scatter(arrival.memory, base.attr.pd, list, &self.scatter, payload)
            .map_err(|_| WcStatus::LocProtErr)?;
        Ok(bytes)
    }

    /// One response packet of the oldest READ or atomic is in.
    fn result_advanced(&mut self, base: &mut Base, now: Instant) {
        let before = self.una;
        self.una = before.advance(1);
        self.query_psns = self.query_psns.saturating_sub(1);
        let complete = base
            .sq
            .queue
            .get(base.sq.queue.done)
            .is_some_and(|entry| entry.first.advance(entry.packets) == self.una);
        if complete {
            // If the cursor went back and this one was not sent again, none is counted, and 0 stays 0.
            self.queries_out = self.queries_out.saturating_sub(1);
            self.finish_oldest(base);
        }
        self.progress(base, now, before);
    }
}

/// The oldest request, if it is what a response answers.
fn oldest(base: &Base, kind: Kind) -> Result<&SendEntry, WcStatus> {
    base.sq.queue.get(base.sq.queue.done).filter(|entry| entry.kind() == kind).ok_or(WcStatus::BadRespErr)
}

/// The AETH, where there is one, is that of an ACK.
fn acked(packet: &Packet) -> bool {
    packet.headers.ext.aeth.is_none_or(|aeth| matches!(aeth.syndrome, Syndrome::Ack { .. }))
}

/// Result of the oldest request, an atomic: a number, put down in this machine's byte order.
fn take_atomic(base: &Base, arrival: &Arrival<'_>, was: u64) -> Result<u32, WcStatus> {
    let entry = oldest(base, Kind::Atomic)?;
    if !acked(arrival.packet) || !arrival.payload.is_empty() {
        return Err(WcStatus::BadRespErr);
    }
    let bytes = was.to_ne_bytes();
    let list = base.sq.queue.sges(base.sq.queue.done, entry.sges);
    scatter(arrival.memory, base.attr.pd, list, &SgeCursor::default(), &Payload::from_slice(&bytes))
        .map_err(|_| WcStatus::LocProtErr)?;
    Ok(entry.len)
}

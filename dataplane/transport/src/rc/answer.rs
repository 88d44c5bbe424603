//! Responder: sends what is owed, in PSN order: READs and atomics answered again, responses of new ones (which are
//! executed here), then the NAK or ACK that comes after them.

use ferroce_mem::{Access, Memory, MrSlice};
use ferroce_wire::ext::code_of_credits;
use ferroce_wire::{Aeth, DmaLen, Ext, NakCode, Opcode, Part, Psn, Syndrome};

use crate::qp::Base;
use crate::segment;
use crate::sink::FrameSink;

use super::replay::{AtomicOp, Due, DueWhat};
use super::responder::{ATOMIC_LEN, Nak, Responder};

/// What a call of `poll_answer` did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Answered {
    ReadResponse,
    Acknowledge,
    NoRoom,
    Nothing,
}

impl Responder {
    #[inline]
    pub(super) fn poll_answer<S: FrameSink>(
        &mut self,
        base: &mut Base,
        memory: &Memory,
        sink: &mut S,
    ) -> Answered {
        let mtu = self.inbound.mtu;
        if self.resources.repeating()
            && let Some(due) = self.resources.next_repeat(mtu)
        {
            return self.send_again(base, memory, sink, &due);
        }
        if let Some(due) = self.resources.next_owed(mtu) {
            let answered = self.send_due(base, memory, sink, &due);
            if answered == Answered::ReadResponse {
                self.resources.owed_sent();
            }
            return answered;
        }
        self.send_last(base, sink)
    }

    /// One response packet of a READ or atomic that is answered again. A READ whose key is gone by now was answered while
    /// the key was good, and a peer that has that answer may have ended the key itself, with its duplicate still under
    /// way: the refusal concerns nobody but a peer that still waits for the data, and the connection goes on.
    fn send_again<S: FrameSink>(
        &mut self,
        base: &mut Base,
        memory: &Memory,
        sink: &mut S,
        due: &Due,
    ) -> Answered {
        if let DueWhat::Read { addr, rkey, len, .. } = due.what {
            let (qpn, pd) = (base.qpn, base.attr.pd);
            let key = memory.check_remote_for(qpn, pd, rkey, addr, DmaLen(len), Access::REMOTE_READ);
            if key.is_err() {
                let syndrome = Syndrome::Nak(NakCode::RemoteAccess);
                let answered = self.send_ack(base, sink, due.psn, syndrome);
                if answered == Answered::Acknowledge {
                    self.resources.repeat_dropped();
                }
                return answered;
            }
        }
        let answered = self.send_due(base, memory, sink, due);
        if answered == Answered::ReadResponse {
            self.resources.repeat_sent();
        }
        answered
    }

    /// The NAK that is owed, else the ACK, else that of duplicates: each acknowledges what the next one would.
    #[inline]
    fn send_last<S: FrameSink>(&mut self, base: &mut Base, sink: &mut S) -> Answered {
        let (psn, syndrome) = match (self.nak, self.ack_due, self.duplicate_ack) {
            (Some(nak), _, _) => (nak.psn, nak.syndrome),
            (None, true, _) => (self.expected.retreat(1), ack(base)),
            (None, false, Some(psn)) => (psn, ack(base)),
            (None, false, None) => return Answered::Nothing,
        };
        let answered = self.send_ack(base, sink, psn, syndrome);
        if answered == Answered::Acknowledge {
            self.nak = None;
            self.ack_due = false;
            self.duplicate_ack = None;
        }
        answered
    }

    fn send_ack<S: FrameSink>(
        &self,
        base: &mut Base,
        sink: &mut S,
        psn: Psn,
        syndrome: Syndrome,
    ) -> Answered {
        let bth = base.bth(Opcode::RcAck, psn);
        let ext = Ext { aeth: Some(Aeth { syndrome, msn: self.msn }), ..Ext::NONE };
        if !sink.begin(&bth, &ext, 0) {
            return Answered::NoRoom;
        }
        base.count_sent(0);
        Answered::Acknowledge
    }

    /// One response packet of a READ or atomic.
    fn send_due<S: FrameSink>(
        &mut self,
        base: &mut Base,
        memory: &Memory,
        sink: &mut S,
        due: &Due,
    ) -> Answered {
        match due.what {
            DueWhat::Read { part, addr, rkey, len } => {
                // The key is checked for each packet again and the data is copied now.
                let source = memory.check_remote_for(
                    base.qpn,
                    base.attr.pd,
                    rkey,
                    addr,
                    DmaLen(len),
                    Access::REMOTE_READ,
                );
                match source {
                    Ok(source) => self.send_read(base, sink, due.psn, part, source),
                    Err(_) => self.refused_late(base, sink, due.psn, NakCode::RemoteAccess),
                }
            }
            DueWhat::Atomic { result: Some(was), .. } => self.send_result(base, sink, due.psn, was),
            DueWhat::Atomic { addr, rkey, op, result: None } => {
                let operand = memory.check_remote_for(
                    base.qpn,
                    base.attr.pd,
                    rkey,
                    addr,
                    ATOMIC_LEN,
                    Access::REMOTE_ATOMIC,
                );
                let Ok(operand) = operand else {
                    return self.refused_late(base, sink, due.psn, NakCode::RemoteAccess);
                };
                let was = match op {
                    AtomicOp::CmpSwap { compare, swap } => operand.cmp_swap_u64(0, compare, swap),
                    AtomicOp::FetchAdd { add } => operand.fetch_add_u64(0, add),
                };
                // Aligned in the region's address space but not where it is mapped.
                let Some(was) = was else {
                    return self.refused_late(base, sink, due.psn, NakCode::InvalidRequest);
                };
                self.resources.executed(was);
                self.send_result(base, sink, due.psn, was)
            }
        }
    }

    fn send_read<S: FrameSink>(
        &self,
        base: &mut Base,
        sink: &mut S,
        psn: Psn,
        part: Part,
        source: MrSlice<'_>,
    ) -> Answered {
        let aeth = match part {
            Part::First | Part::Last | Part::Only => Some(self.aeth(base)),
            Part::Middle => None,
        };
        let bth = base.bth(segment::response_opcode(part), psn);
        if !sink.begin(&bth, &Ext { aeth, ..Ext::NONE }, source.len()) {
            return Answered::NoRoom;
        }
        if !source.is_empty() {
            sink.payload(source);
        }
        base.count_sent(u32::try_from(source.len()).unwrap_or(u32::MAX));
        Answered::ReadResponse
    }

    fn send_result<S: FrameSink>(&self, base: &mut Base, sink: &mut S, psn: Psn, was: u64) -> Answered {
        let bth = base.bth(Opcode::RcAtomicAck, psn);
        let ext = Ext { aeth: Some(self.aeth(base)), atomic_ack: Some(was), ..Ext::NONE };
        if !sink.begin(&bth, &ext, 0) {
            return Answered::NoRoom;
        }
        base.count_sent(0);
        Answered::ReadResponse
    }

    fn aeth(&self, base: &Base) -> Aeth {
        Aeth { syndrome: ack(base), msn: self.msn }
    }

    /// What was accepted can't be done any more: nothing after it can be answered either.
    fn refused_late<S: FrameSink>(
        &mut self,
        base: &mut Base,
        sink: &mut S,
        psn: Psn,
        code: NakCode,
    ) -> Answered {
        self.give_up(base, psn, code);
        self.send_last(base, sink)
    }

    /// A response was too long for the interface: the peer is told that the fault is here.
    pub(super) fn cannot_answer(&mut self, base: &mut Base, psn: Psn) {
        self.give_up(base, psn, NakCode::RemoteOperational);
    }

    fn give_up(&mut self, base: &mut Base, psn: Psn, code: NakCode) {
        self.resources.abandon();
        self.duplicate_ack = None;
        self.nak = Some(Nak { psn, syndrome: Syndrome::Nak(code) });
        base.fail_request(psn, Some(code), None);
    }
}

/// An ACK with the receives that are left, that of the message in progress included; none are told of a shared queue,
/// which others empty too (roce-wire 5.10).
#[inline]
fn ack(base: &Base) -> Syndrome {
    if base.attr.srq.is_some() {
        Syndrome::ACK_NO_CREDITS
    } else {
        Syndrome::Ack { credits: code_of_credits(base.rq.queue.unfinished()) }
    }
}

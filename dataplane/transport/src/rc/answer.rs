//! Responder: sends what is owed, in PSN order: READs answered again, the ACK of a duplicate, READ responses, then
//! the NAK or ACK that comes after them.

use ferroce_mem::{Access, Memory};
use ferroce_wire::{Aeth, DmaLen, Ext, NakCode, Opcode, Part, Psn, Syndrome};

use crate::qp::Base;
use crate::segment;
use crate::sink::FrameSink;

use super::replay::ReadPacket;
use super::responder::{Nak, Responder};

/// "No credit information" (roce-wire 5.10).
const ACK: Syndrome = Syndrome::Ack { credits: 31 };

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
        if self.reads.repeating()
            && let Some(read) = self.reads.next_repeat(self.mtu)
        {
            let answered = self.send_read(base, memory, sink, &read);
            if answered == Answered::ReadResponse {
                self.reads.repeat_sent();
            }
            return answered;
        }
        if let Some(psn) = self.duplicate_ack {
            let answered = self.send_ack(base, sink, psn, ACK);
            if answered == Answered::Acknowledge {
                self.duplicate_ack = None;
            }
            return answered;
        }
        if let Some(read) = self.reads.next_owed(self.mtu) {
            let answered = self.send_read(base, memory, sink, &read);
            if answered == Answered::ReadResponse {
                self.reads.owed_sent();
            }
            return answered;
        }
        self.send_last(base, sink)
    }

    /// The NAK that is owed, else the ACK: a NAK acknowledges everything before it.
    #[inline]
    fn send_last<S: FrameSink>(&mut self, base: &mut Base, sink: &mut S) -> Answered {
        if let Some(nak) = self.nak {
            let answered = self.send_ack(base, sink, nak.psn, nak.syndrome);
            if answered == Answered::Acknowledge {
                self.nak = None;
                self.ack_due = false;
            }
            return answered;
        }
        if self.ack_due {
            let answered = self.send_ack(base, sink, self.expected.retreat(1), ACK);
            if answered == Answered::Acknowledge {
                self.ack_due = false;
            }
            return answered;
        }
        Answered::Nothing
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

    /// One READ response packet. The key is checked for it again and the data is copied now.
    fn send_read<S: FrameSink>(
        &mut self,
        base: &mut Base,
        memory: &Memory,
        sink: &mut S,
        read: &ReadPacket,
    ) -> Answered {
        let Ok(source) =
            memory.check_remote(base.attr.pd, read.rkey, read.addr, DmaLen(read.len), Access::REMOTE_READ)
        else {
            return self.read_refused(base, sink, read.psn);
        };
        let aeth = match read.part {
            Part::First | Part::Last | Part::Only => Some(Aeth { syndrome: ACK, msn: self.msn }),
            Part::Middle => None,
        };
        let bth = base.bth(segment::response_opcode(read.part), read.psn);
        if !sink.begin(&bth, &Ext { aeth, ..Ext::NONE }, read.len as usize) {
            return Answered::NoRoom;
        }
        if read.len > 0 {
            sink.payload(source);
        }
        base.count_sent(read.len);
        Answered::ReadResponse
    }

    /// The key went while its READ was being answered: nothing after it can be answered either.
    fn read_refused<S: FrameSink>(&mut self, base: &mut Base, sink: &mut S, psn: Psn) -> Answered {
        let code = NakCode::RemoteAccess;
        self.reads.abandon();
        self.duplicate_ack = None;
        self.nak = Some(Nak { psn, syndrome: Syndrome::Nak(code) });
        base.fail_request(psn, code, None);
        self.send_last(base, sink)
    }
}

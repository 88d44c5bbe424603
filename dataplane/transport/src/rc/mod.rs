//! Reliable connection: a requester and a responder that share nothing but the queue pair's base.
//!
//! Called by [`crate::Qp`] only. Decides whose turn it is to send and carries errors of one side to the whole queue
//! pair. The answers of a responder are noted in it, in fixed small state, and leave by `poll_transmit`.

mod ack;
mod answer;
mod image;
mod replay;
mod requester;
mod responder;
mod retry;

use ferroce_mem::Memory;
use ferroce_verbs::{QpState, RtrAttrs, RtsAttrs};
use ferroce_wire::Psn;

use crate::arrival::Arrival;
use crate::qp::state::may_request;
use crate::qp::{Base, DropReason};
use crate::sink::{FrameSink, Transmit};
use crate::time::Instant;

use requester::Requester;
use responder::Responder;

/// PSNs for `Qp::info`.
#[derive(Clone, Copy, Default)]
pub(crate) struct Psns {
    pub(crate) next: Psn,
    pub(crate) una: Psn,
    pub(crate) expected: Psn,
}

/// Reliable connection state of a queue pair.
pub(crate) struct Rc {
    requester: Requester,
    responder: Responder,
    /// The last packet was a READ response: requests have the next turn. Not a state of the protocol, only fairness.
    requests_first: bool,
}

impl Rc {
    pub(crate) fn new() -> Rc {
        Rc { requester: Requester::default(), responder: Responder::new(), requests_first: false }
    }

    pub(crate) fn start_responder(&mut self, rtr: &RtrAttrs) {
        self.responder.start(rtr);
    }

    pub(crate) fn start_requester(&mut self, base: &Base, rts: &RtsAttrs) {
        self.requester = Requester::start(base, rts);
    }

    /// A response can't be sent, whatever happens.
    pub(crate) fn cannot_answer(&mut self, base: &mut Base, psn: Psn) {
        self.responder.cannot_answer(base, psn);
    }

    /// Attributes changed while the state stayed.
    pub(crate) fn change(&mut self, base: &Base) {
        if let Some(rtr) = &base.rtr {
            self.responder.change(rtr);
        }
        if let Some(rts) = &base.rts {
            self.requester.change(rts);
        }
    }

    pub(crate) fn reset(&mut self) {
        self.requester = Requester::default();
        self.responder.reset();
        self.requests_first = false;
    }

    pub(crate) fn psns(&self) -> Psns {
        Psns { next: self.requester.next, una: self.requester.una, expected: self.responder.expected }
    }

    /// Says, in SQD, if nothing that was started is unfinished.
    pub(crate) fn check_drained(&self, base: &mut Base) {
        self.requester.check_drained(base);
    }

    #[inline]
    pub(crate) fn handle_packet(
        &mut self,
        base: &mut Base,
        now: Instant,
        arrival: &mut Arrival<'_>,
    ) -> Result<(), DropReason> {
        if arrival.packet.headers.bth.opcode.is_response() {
            self.requester.on_response(base, now, arrival)
        } else {
            self.responder.on_request(base, arrival)
        }
    }

    pub(crate) fn handle_timeout(&mut self, base: &mut Base, now: Instant) {
        if may_request(base.state) {
            self.requester.on_timeout(base, now);
        }
    }

    #[inline]
    pub(crate) fn poll_timeout(&self, base: &Base) -> Option<Instant> {
        if may_request(base.state) { self.requester.next_timeout() } else { None }
    }

    #[inline]
    pub(crate) fn poll_transmit<S: FrameSink>(
        &mut self,
        base: &mut Base,
        now: Instant,
        memory: &Memory,
        sink: &mut S,
    ) -> Transmit {
        match base.state {
            QpState::Reset | QpState::Init | QpState::Sqe => return Transmit::Idle,
            // A queue pair that refused a request still says so, after the READ responses that come before it.
            QpState::Err if !self.responder.has_last_words() => return Transmit::Idle,
            QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Err => {}
        }
        if self.requests_first {
            self.requests_first = false;
            match self.poll_request(base, now, memory, sink) {
                sent @ (Transmit::Sent | Transmit::NoRoom) => return sent,
                Transmit::Idle | Transmit::Later(_) => {}
            }
        }
        match self.responder.poll_answer(base, memory, sink) {
            answer::Answered::ReadResponse => {
                self.requests_first = true;
                Transmit::Sent
            }
            answer::Answered::Acknowledge => Transmit::Sent,
            answer::Answered::NoRoom => Transmit::NoRoom,
            answer::Answered::Nothing => self.poll_request(base, now, memory, sink),
        }
    }

    #[inline]
    fn poll_request<S: FrameSink>(
        &mut self,
        base: &mut Base,
        now: Instant,
        memory: &Memory,
        sink: &mut S,
    ) -> Transmit {
        if may_request(base.state) {
            self.requester.poll_request(base, now, memory, sink)
        } else {
            Transmit::Idle
        }
    }
}

//! [`Qp`]: the queue pair that engine and simulator drive. Dispatches only.

use ferroce_mem::{Memory, Payload};
use ferroce_verbs::{PostError, QpInfo, QpInitAttr, QpModify, QpState, RecvWr, SendWr, Wc};
use ferroce_wire::{Packet, Psn, Qpn};

use crate::counters::QpCounters;
use crate::sink::{FrameSink, Transmit};
use crate::time::Instant;

/// Why a packet that parsed was dropped by its queue pair. Each has a counter in the engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum DropReason {
    /// Service of the opcode is not the queue pair's.
    WrongService,
    /// State does not allow receiving.
    WrongState,
    /// Source or destination address is not the queue pair's.
    WrongAddress,
    /// Partition key does not match.
    WrongPkey,
    /// Response that nothing waits for.
    UnexpectedResponse,
    /// Request ahead of the expected PSN (a NAK went out, or had gone out before).
    OutOfSequence,
    /// Duplicate that can't be replayed.
    StaleDuplicate,
    /// Duplicate that was answered again and not executed again.
    Duplicate,
    /// Refused with a NAK; the queue pair may be in error now.
    Refused,
    /// No receive posted: RNR NAK.
    NotReady,
}

/// A finished work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Completion {
    /// Goes to the completion queue.
    Wc(Wc),
    /// An unsignalled send succeeded: its queue slot (and reserved completion entry) is free again.
    Retired,
}

/// News for control.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notice {
    /// First packet arrived in RTR.
    CommEst,
    /// The queue pair went to error by itself: what happened, and the PSN it concerns (the last one sent, for
    /// exhausted retries).
    Fatal {
        /// Status of the work request that failed, if one did.
        status: ferroce_verbs::WcStatus,
        /// PSN.
        psn: Psn,
        /// NAK that we sent, if we refused a request.
        nak: Option<ferroce_wire::NakCode>,
    },
    /// The send queue is drained (SQD).
    Drained,
}

/// Why a transition was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ModifyError {
    /// Not a transition of this queue pair type from this state.
    BadTransition {
        /// State it is in.
        from: QpState,
    },
    /// `max_rd_atomic` or `max_dest_rd_atomic` above what the queue pair can hold.
    TooManyRdAtomic {
        /// Largest allowed.
        allowed: u8,
    },
    /// A field is out of its range; its libibverbs name.
    BadAttr(&'static str),
}

/// A queue pair.
pub struct Qp {
    // Owner of this crate.
    qpn: Qpn,
}

impl Qp {
    /// A queue pair in RESET. All its memory is allocated here.
    pub fn new(qpn: Qpn, attr: &QpInitAttr) -> Qp {
        let _ = attr;
        Qp { qpn }
    }
    /// Its number.
    pub const fn qpn(&self) -> Qpn {
        self.qpn
    }
    /// Attributes and PSNs (field `worker` is 0; the engine fills it in).
    pub fn info(&self) -> QpInfo {
        unimplemented!()
    }
    /// Counters.
    pub fn counters(&self) -> &QpCounters {
        unimplemented!()
    }
    /// Makes a transition. To ERR flushes (completions follow), to RESET discards.
    pub fn modify(&mut self, now: Instant, modify: &QpModify) -> Result<(), ModifyError> {
        let _ = (now, modify);
        unimplemented!()
    }
    /// Posts a send: state, operation, sizes and local keys are checked; nothing is posted on error.
    pub fn post_send(&mut self, wr: &SendWr<'_>, memory: &Memory) -> Result<(), PostError> {
        let _ = (wr, memory);
        unimplemented!()
    }
    /// Posts a receive.
    pub fn post_recv(&mut self, wr: &RecvWr<'_>, memory: &Memory) -> Result<(), PostError> {
        let _ = (wr, memory);
        unimplemented!()
    }
    /// Takes a packet whose ICRC is right. Places its payload, notes what to answer.
    pub fn handle_packet(&mut self, now: Instant, packet: &Packet, payload: &Payload<'_>, memory: &Memory) -> Result<(), DropReason> {
        let _ = (now, packet, payload, memory);
        unimplemented!()
    }
    /// Tells that the time of [`Qp::poll_timeout`] has come. Harmless when it has not.
    pub fn handle_timeout(&mut self, now: Instant) {
        let _ = now;
    }
    /// Next packet to send: answers first (ACKs, NAKs, READ responses), then requests.
    pub fn poll_transmit<S: FrameSink>(&mut self, now: Instant, memory: &Memory, sink: &mut S) -> Transmit {
        let _ = (now, memory, sink);
        Transmit::Idle
    }
    /// Next finished work request, in order of each queue.
    #[must_use]
    pub fn poll_completion(&mut self) -> Option<Completion> {
        None
    }
    /// Next notice.
    #[must_use]
    pub fn poll_notice(&mut self) -> Option<Notice> {
        None
    }
    /// When [`Qp::handle_timeout`] wants to be called next.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        None
    }
}


//! [`Qp`]: the queue pair that engine and simulator drive. Dispatches only.

mod attr;
mod post;
pub mod state;

use ferroce_mem::{Memory, Payload};
use ferroce_verbs::{
    AddressVector, ClassId, InitAttrs, PathMtu, PostError, QpCap, QpChange, QpInfo, QpInitAttr, QpModify,
    QpState, QpType, RecvWr, RtrAttrs, RtsAttrs, SendWr, Wc, WcStatus,
};
use ferroce_wire::{Bth, NakCode, Opcode, Packet, Pkey, Psn, Qkey, Qpn, Service};

use crate::arrival::Arrival;
use crate::completion;
use crate::counters::{QpCounter, QpCounters};
use crate::notice::Notices;
use crate::rc::Rc;
use crate::sink::{FrameSink, Transmit};
use crate::time::Instant;
use crate::wq::{RecvQueue, SendQueue};

/// READs and atomics that one queue pair can have outstanding, or serve, at once.
pub const MAX_RD_ATOMIC: u8 = 128;

/// Work requests that one queue of a queue pair can hold.
pub const MAX_WR: u32 = 1 << 15;

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
        /// Status of the work request that failed; `FatalErr` if none did.
        status: WcStatus,
        /// PSN.
        psn: Psn,
        /// NAK that we sent, if we refused a request.
        nak: Option<NakCode>,
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

/// What every service needs: identity, attributes, state, queues, counters, notices.
pub(crate) struct Base {
    pub(crate) qpn: Qpn,
    pub(crate) attr: QpInitAttr,
    pub(crate) state: QpState,
    pub(crate) init: Option<InitAttrs>,
    pub(crate) rtr: Option<RtrAttrs>,
    pub(crate) rts: Option<RtsAttrs>,
    pub(crate) sq: SendQueue,
    pub(crate) rq: RecvQueue,
    pub(crate) counters: QpCounters,
    pub(crate) notices: Notices,
}

impl Base {
    fn new(qpn: Qpn, attr: &QpInitAttr) -> Base {
        let cap = QpCap {
            max_send_wr: attr.cap.max_send_wr.min(MAX_WR),
            max_recv_wr: attr.cap.max_recv_wr.min(MAX_WR),
            ..attr.cap
        };
        Base {
            qpn,
            attr: QpInitAttr { cap, ..*attr },
            state: QpState::Reset,
            init: None,
            rtr: None,
            rts: None,
            sq: SendQueue::new(
                cap.max_send_wr,
                cap.max_send_sge,
                cap.max_inline_data,
                attr.qp_type == QpType::Ud,
            ),
            rq: RecvQueue::new(cap.max_recv_wr, cap.max_recv_sge),
            counters: QpCounters::default(),
            notices: Notices::default(),
        }
    }

    fn reset(&mut self) {
        self.init = None;
        self.rtr = None;
        self.rts = None;
        self.sq.queue.clear();
        self.rq.queue.clear();
        self.notices = Notices::default();
    }

    /// Takes over attributes that `attr::check` allowed.
    fn change(&mut self, change: &QpChange) {
        fn set<T: Copy>(place: Option<&mut T>, value: Option<T>) {
            if let (Some(place), Some(value)) = (place, value) {
                *place = value;
            }
        }
        set(self.init.as_mut().map(|init| &mut init.pkey), change.pkey);
        set(self.init.as_mut().map(|init| &mut init.access), change.access);
        set(self.init.as_mut().map(|init| &mut init.qkey), change.qkey);
        set(self.rtr.as_mut().map(|rtr| &mut rtr.av), change.av);
        set(self.rtr.as_mut().map(|rtr| &mut rtr.max_dest_rd_atomic), change.max_dest_rd_atomic);
        set(self.rtr.as_mut().map(|rtr| &mut rtr.min_rnr_timer), change.min_rnr_timer);
        set(self.rts.as_mut().map(|rts| &mut rts.timeout), change.timeout);
        set(self.rts.as_mut().map(|rts| &mut rts.retry_cnt), change.retry_cnt);
        set(self.rts.as_mut().map(|rts| &mut rts.rnr_retry), change.rnr_retry);
        set(self.rts.as_mut().map(|rts| &mut rts.max_rd_atomic), change.max_rd_atomic);
    }

    /// Base header of a packet to the peer.
    #[inline]
    pub(crate) fn bth(&self, opcode: Opcode, psn: Psn) -> Bth {
        let dest = self.rtr.as_ref().map_or(Qpn::default(), |rtr| rtr.dest_qpn);
        let pkey = self.init.as_ref().map_or(Pkey::DEFAULT, |init| init.pkey);
        Bth { pkey, ..Bth::new(opcode, dest, psn) }
    }

    /// The queue key that a datagram carries: with bit 31 set in what was posted, our own.
    #[inline]
    pub(crate) fn qkey_for(&self, posted: Qkey) -> Qkey {
        match &self.init {
            Some(init) if posted.0 >> 31 == 1 => init.qkey,
            Some(_) | None => posted,
        }
    }

    /// The oldest unfinished send fails with `status`, and with it the queue pair.
    pub(crate) fn fail_send(&mut self, status: WcStatus, psn: Psn) {
        let index = self.sq.queue.done;
        if let Some(entry) = self.sq.queue.get_mut(index) {
            entry.outcome = Some(status);
            self.sq.queue.done = index.wrapping_add(1);
        }
        self.state = QpState::Err;
        self.notices.fatal(status, psn, None);
    }

    /// A request of the peer was refused for good; `recv` is the status of the receive it used, if that failed.
    pub(crate) fn fail_request(&mut self, psn: Psn, nak: Option<NakCode>, recv: Option<WcStatus>) {
        if let Some(status) = recv {
            self.rq.finish(|entry| entry.status = status);
        }
        self.state = QpState::Err;
        self.notices.fatal(recv.unwrap_or(WcStatus::FatalErr), psn, nak);
    }

    /// Counts a packet that went to the sink.
    #[inline]
    pub(crate) fn count_sent(&mut self, payload_bytes: u32) {
        self.counters.add(QpCounter::SentPkts, 1);
        self.counters.add(QpCounter::SentBytes, u64::from(payload_bytes));
    }
}

/// Per service state.
#[expect(clippy::large_enum_variant, reason = "read for every packet: no indirection")]
enum Machine {
    Rc(Rc),
    /// UC and UD are not built: such a queue pair stays in RESET and takes nothing.
    Unbuilt,
}

/// A queue pair.
pub struct Qp {
    base: Base,
    machine: Machine,
}

impl Qp {
    /// A queue pair in RESET. All its memory is allocated here. Queues of more than [`MAX_WR`] requests are cut to
    /// that; [`Qp::info`] tells the sizes in force.
    pub fn new(qpn: Qpn, attr: &QpInitAttr) -> Qp {
        let machine = match attr.qp_type {
            QpType::Rc => Machine::Rc(Rc::new()),
            QpType::Uc | QpType::Ud => Machine::Unbuilt,
        };
        Qp { base: Base::new(qpn, attr), machine }
    }

    /// Its number.
    #[inline]
    pub const fn qpn(&self) -> Qpn {
        self.base.qpn
    }

    /// Its state.
    #[inline]
    pub const fn state(&self) -> QpState {
        self.base.state
    }

    /// Path to the peer, from RTR on.
    #[inline]
    pub fn av(&self) -> Option<&AddressVector> {
        self.base.rtr.as_ref().map(|rtr| &rtr.av)
    }

    /// Traffic class; the default class before RTR.
    #[inline]
    pub fn class(&self) -> ClassId {
        self.base.rtr.as_ref().map_or(ClassId(0), |rtr| rtr.class)
    }

    /// Path MTU, from RTR on.
    #[inline]
    pub fn path_mtu(&self) -> Option<PathMtu> {
        self.base.rtr.as_ref().map(|rtr| rtr.path_mtu)
    }

    /// Sends that may still be posted. A slot is free again once its completion was polled.
    #[inline]
    pub fn send_queue_free(&self) -> u32 {
        self.base.sq.queue.free()
    }

    /// Receives that may still be posted.
    #[inline]
    pub fn recv_queue_free(&self) -> u32 {
        self.base.rq.queue.free()
    }

    /// Attributes and PSNs (field `worker` is 0; the engine fills it in).
    pub fn info(&self) -> QpInfo {
        let base = &self.base;
        let psns = match &self.machine {
            Machine::Rc(rc) => rc.psns(),
            Machine::Unbuilt => crate::rc::Psns::default(),
        };
        QpInfo {
            qpn: base.qpn,
            qp_type: base.attr.qp_type,
            state: base.state,
            pd: base.attr.pd,
            send_cq: base.attr.send_cq,
            recv_cq: base.attr.recv_cq,
            cap: base.attr.cap,
            sq_sig_all: base.attr.sq_sig_all,
            srq: base.attr.srq,
            init: base.init,
            rtr: base.rtr,
            rts: base.rts,
            sq_psn: psns.next,
            rq_psn: psns.expected,
            una_psn: psns.una,
            worker: 0,
        }
    }

    /// Counters.
    pub const fn counters(&self) -> &QpCounters {
        &self.base.counters
    }

    /// Makes a transition. To ERR flushes (completions follow), to RESET discards.
    pub fn modify(&mut self, now: Instant, modify: &QpModify) -> Result<(), ModifyError> {
        let from = self.base.state;
        let to = state::step(from, state::QpEvent::of(modify)).ok_or(ModifyError::BadTransition { from })?;
        let Machine::Rc(rc) = &mut self.machine else {
            return Err(ModifyError::BadTransition { from });
        };
        attr::check(&self.base, modify)?;
        match modify {
            QpModify::ToInit(init) => self.base.init = Some(*init),
            QpModify::ToRtr(rtr) => {
                self.base.rtr = Some(*rtr);
                rc.start_responder(rtr);
            }
            QpModify::ToRts(rts) => {
                self.base.rts = Some(*rts);
                rc.start_requester(&self.base, rts);
            }
            QpModify::ToReset => {
                self.base.reset();
                rc.reset();
            }
            QpModify::Change(change) => {
                self.base.change(change);
                rc.change(&self.base);
            }
            QpModify::ToSqd | QpModify::SqdToRts | QpModify::SqeToRts | QpModify::ToErr => {}
        }
        self.base.state = to;
        if to == QpState::Sqd {
            rc.drain(now, &mut self.base);
        }
        Ok(())
    }

    /// Posts a send: state, operation, sizes and local keys are checked; nothing is posted on error.
    #[inline]
    pub fn post_send(&mut self, wr: &SendWr<'_>, memory: &Memory) -> Result<(), PostError> {
        post::send(&mut self.base, wr, memory)
    }

    /// Posts a receive.
    #[inline]
    pub fn post_recv(&mut self, wr: &RecvWr<'_>, memory: &Memory) -> Result<(), PostError> {
        post::recv(&mut self.base, wr, memory)
    }

    /// Takes a packet whose ICRC is right. Places its payload, notes what to answer.
    #[inline]
    pub fn handle_packet(
        &mut self,
        now: Instant,
        packet: &Packet,
        payload: &Payload<'_>,
        memory: &Memory,
    ) -> Result<(), DropReason> {
        let Machine::Rc(rc) = &mut self.machine else {
            return Err(DropReason::WrongService);
        };
        let headers = &packet.headers;
        if headers.bth.opcode.service() != Service::Rc {
            return Err(DropReason::WrongService);
        }
        if !state::may_receive(self.base.state) {
            return Err(DropReason::WrongState);
        }
        let (Some(init), Some(rtr)) = (&self.base.init, &self.base.rtr) else {
            return Err(DropReason::WrongState);
        };
        if headers.ip.src_gid() != rtr.av.dgid || headers.ip.dst_gid() != rtr.av.sgid {
            return Err(DropReason::WrongAddress);
        }
        if !init.pkey.matches(headers.bth.pkey) {
            return Err(DropReason::WrongPkey);
        }
        self.base.counters.add(QpCounter::RcvdPkts, 1);
        rc.handle_packet(&mut self.base, now, &mut Arrival { packet, payload, memory })
    }

    /// Tells that the time of [`Qp::poll_timeout`] has come. Harmless when it has not.
    pub fn handle_timeout(&mut self, now: Instant) {
        match &mut self.machine {
            Machine::Rc(rc) => rc.handle_timeout(&mut self.base, now),
            Machine::Unbuilt => {}
        }
    }

    /// Next packet to send: answers first (ACKs, NAKs, READ responses), then requests. While both READ responses and
    /// requests wait they take turns, so that a long READ by the peer can't hold up our own requests.
    #[inline]
    pub fn poll_transmit<S: FrameSink>(&mut self, now: Instant, memory: &Memory, sink: &mut S) -> Transmit {
        match &mut self.machine {
            Machine::Rc(rc) => rc.poll_transmit(&mut self.base, now, memory, sink),
            Machine::Unbuilt => Transmit::Idle,
        }
    }

    /// Next finished work request, in order of each queue.
    #[inline]
    #[must_use]
    pub fn poll_completion(&mut self) -> Option<Completion> {
        completion::next(&mut self.base)
    }

    /// Next notice.
    #[inline]
    #[must_use]
    pub fn poll_notice(&mut self) -> Option<Notice> {
        self.base.notices.take()
    }

    /// When [`Qp::handle_timeout`] wants to be called next.
    #[inline]
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        match &self.machine {
            Machine::Rc(rc) => rc.poll_timeout(&self.base),
            Machine::Unbuilt => None,
        }
    }
}

//! [`Base`]: what every service of a queue pair has in common.
//!
//! Owns identity, attributes, state, work queues, counters and notices. Invariant: a change to SQE or ERR by the queue
//! pair itself goes through here, with what has to be told. Called by the services; never sends and never looks at
//! packets.

use ferroce_mem::Memory;
use ferroce_verbs::{InitAttrs, QpCap, QpChange, QpInitAttr, QpState, QpType, RtrAttrs, RtsAttrs, WcStatus};
use ferroce_wire::{Bth, NakCode, Opcode, Pkey, Psn, Qkey, Qpn};

use super::MAX_WR;
use crate::counters::{QpCounter, QpCounters};
use crate::notice::Notices;
use crate::srq::Srq;
use crate::wq::{RecvQueue, SendQueue};

/// Receives that a queue pair may have taken from a shared receive queue and not yet reported.
const SRQ_TAKEN: u32 = 8;

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
    /// COMM_EST was told.
    pub(crate) comm_est: bool,
}

impl Base {
    pub(crate) fn new(qpn: Qpn, attr: &QpInitAttr) -> Base {
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
            rq: RecvQueue::new(
                if attr.srq.is_some() { SRQ_TAKEN } else { cap.max_recv_wr },
                cap.max_recv_sge,
            ),
            counters: QpCounters::default(),
            notices: Notices::default(),
            comm_est: false,
        }
    }

    pub(crate) fn reset(&mut self) {
        self.init = None;
        self.rtr = None;
        self.rts = None;
        self.sq.queue.clear();
        self.rq.queue.clear();
        self.notices = Notices::default();
        self.comm_est = false;
    }

    /// A packet of the peer's is here: tells of the first in RTR.
    #[inline]
    pub(crate) fn established(&mut self) {
        if self.state == QpState::Rtr && !self.comm_est {
            self.comm_est = true;
            self.notices.comm_est();
        }
    }

    /// Room of the receive that the next message would get; `None` if there is none.
    #[inline]
    pub(crate) fn room_of_next(&self, srq: Option<&Srq>) -> Option<u32> {
        match (self.rq.current(), srq) {
            (Some(entry), _) => Some(entry.room),
            (None, Some(srq)) if self.attr.srq.is_some() => srq.oldest().map(|(entry, _)| entry.room),
            (None, _) => None,
        }
    }

    /// Makes sure that there is a current receive, if need be one of the shared queue. False if there is none.
    #[inline]
    pub(crate) fn take_receive(&mut self, srq: Option<&mut Srq>, memory: &Memory) -> bool {
        if self.rq.current().is_some() {
            return true;
        }
        match srq {
            Some(srq) if self.attr.srq.is_some() => self.rq.take_from(srq, memory),
            Some(_) | None => false,
        }
    }

    /// Nothing is executed any more.
    pub(crate) fn enter_error(&mut self) {
        if self.state != QpState::Err && self.attr.srq.is_some() {
            self.notices.last_wqe();
        }
        self.state = QpState::Err;
    }

    /// The request being sent fails with `status` on a service without answers: the send queue stops.
    pub(crate) fn stop_sending(&mut self, status: WcStatus) {
        let index = self.sq.queue.done;
        if let Some(entry) = self.sq.queue.get_mut(index) {
            entry.outcome = Some(status);
            self.sq.queue.done = index.wrapping_add(1);
        }
        self.state = QpState::Sqe;
    }

    /// Takes over attributes that `attr::check` allowed.
    pub(crate) fn change(&mut self, change: &QpChange) {
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
        self.break_off(status, psn, None);
    }

    /// A request of the peer was refused for good; `recv` is the status of the receive it used, if that failed.
    pub(crate) fn fail_request(&mut self, psn: Psn, nak: Option<NakCode>, recv: Option<WcStatus>) {
        if let Some(status) = recv {
            self.rq.finish(|entry| entry.status = status);
        }
        self.break_off(recv.unwrap_or(WcStatus::FatalErr), psn, nak);
    }

    /// To error by itself. Told once: what can't be done any more of the answers that an error still owes is no news.
    fn break_off(&mut self, status: WcStatus, psn: Psn, nak: Option<NakCode>) {
        if self.state != QpState::Err {
            self.notices.fatal(status, psn, nak);
        }
        self.enter_error();
    }

    /// Counts a packet that went to the sink.
    #[inline]
    pub(crate) fn count_sent(&mut self, payload_bytes: u32) {
        self.counters.add(QpCounter::SentPkts, 1);
        self.counters.add(QpCounter::SentBytes, u64::from(payload_bytes));
    }
}

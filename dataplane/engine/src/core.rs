//! [`WorkerCore`]: everything of a worker but its port queue and its services.
//!
//! Owns queue pairs, completion queues, key table, timers and schedule. Invariant: after every input to a queue pair
//! [`WorkerCore::settle`] runs, so completions are in their queues, notices are with control, the timing wheel holds
//! the queue pair's next timeout, and the queue pair is on the schedule. Called by the worker's stages and, through
//! [`ferroce_verbs::Queues`], by services on it. Never touches the port.

use std::sync::Arc;

use crossbeam_queue::ArrayQueue;
use ferroce_mem::{DeregisterError, Memory};
use ferroce_transport::{Completion, Instant, Notice};
use ferroce_verbs::{AsyncEvent, CqId, QpInitAttr, QpModify, Qpn};
use ferroce_wire::{MacAddr, NakCode, Service};

use crate::app::AppPort;
use crate::command::{Answer, Command, SrqCommand};
use crate::config::IcrcMode;
use crate::cq::Cq;
use crate::demux::{PathHeaders, QpSlot, QpTable};
use crate::device::Netdev;
use crate::event::{EngineEvent, EngineEventKind, FaultDetail};
use crate::mcast::Groups;
use crate::number::QpnLayout;
use crate::sched::Sched;
use crate::srq::{self, SrqTable};
use crate::stats::{Counter, WorkerBlock};
use crate::timer::Wheel;

/// Application handles of one worker.
pub(crate) const MAX_APPS: usize = 64;

/// What a worker's core is made from.
pub(crate) struct CoreInit {
    pub id: u8,
    pub workers: u8,
    pub layout: QpnLayout,
    pub max_qp: u32,
    pub max_cq: u32,
    pub max_mr: u32,
    pub secret: u64,
    pub icrc: IcrcMode,
    pub netdev: Arc<Netdev>,
    pub events: Arc<ArrayQueue<EngineEvent>>,
    pub block: Arc<WorkerBlock>,
}

/// What services get as their queues: a worker's queue pairs and completion queues.
pub struct WorkerCore {
    pub(crate) id: u8,
    pub(crate) now: Instant,
    pub(crate) memory: Memory,
    pub(crate) qps: QpTable,
    pub(crate) cqs: CqTable,
    pub(crate) srqs: SrqTable,
    pub(crate) groups: Groups,
    pub(crate) sched: Sched,
    pub(crate) wheel: Wheel,
    pub(crate) icrc: IcrcMode,
    pub(crate) netdev: Arc<Netdev>,
    pub(crate) block: Arc<WorkerBlock>,
    events: Arc<ArrayQueue<EngineEvent>>,
    /// Rings of application threads; taken out while they are polled.
    #[expect(
        clippy::vec_box,
        reason = "a box comes from control and goes back to it: nothing is allocated or freed here"
    )]
    apps: Vec<Box<AppPort>>,
}

/// A worker's completion queues.
pub(crate) struct CqTable(Vec<Option<Box<Cq>>>);

impl CqTable {
    /// The queue at an index that a queue pair holds.
    #[inline]
    pub fn at(&mut self, index: u32) -> Option<&mut Cq> {
        self.0.get_mut(index as usize)?.as_deref_mut()
    }

    /// The queue of a handle, if it is one of this worker's.
    #[inline]
    pub fn by_id(&mut self, id: CqId) -> Option<&mut Cq> {
        self.at(id.0 & 0xffff).filter(|cq| cq.id() == id)
    }
}

/// The timer of a queue pair's timeout in the wheel.
#[inline]
pub(crate) const fn timeout_node(index: u32) -> u32 {
    index * 2
}

/// The timer of a queue pair that the schedule parked.
#[inline]
pub(crate) const fn parked_node(index: u32) -> u32 {
    index * 2 + 1
}

impl WorkerCore {
    pub(crate) fn new(init: CoreInit, now: Instant) -> Self {
        let slots = init.max_qp as usize;
        WorkerCore {
            id: init.id,
            now,
            memory: Memory::new(init.max_mr, init.secret),
            qps: QpTable::new(init.layout, init.id, init.workers, init.max_qp),
            cqs: CqTable((0..init.max_cq).map(|_| None).collect()),
            srqs: SrqTable::new(),
            groups: Groups::new(),
            sched: Sched::new(slots),
            wheel: Wheel::new(slots * 2, now),
            icrc: init.icrc,
            netdev: init.netdev,
            block: init.block,
            events: init.events,
            apps: Vec::with_capacity(MAX_APPS),
        }
    }

    /// Number of the worker.
    pub fn worker(&self) -> u8 {
        self.id
    }

    /// Time of this pass, ns of the worker's clock.
    pub fn now_ns(&self) -> u64 {
        self.now.0
    }

    /// Queue pairs on this worker.
    pub fn queue_pairs(&self) -> usize {
        self.qps.live()
    }

    pub(crate) fn event(&self, kind: EngineEventKind, detail: Option<FaultDetail>) {
        if self.events.push(EngineEvent { worker: Some(self.id), kind, detail }).is_err() {
            self.block.add(Counter::EventsLost, 1);
        }
    }

    /// Moves what a queue pair has to say to where it belongs. Bounded by the sizes of its queues.
    #[inline]
    pub(crate) fn settle(&mut self, index: u32) {
        self.collect(index);
        if let Some(slot) = self.qps.get_mut(index) {
            self.sched.ready(index, slot.class);
        }
    }

    /// As [`WorkerCore::settle`], for a queue pair that the schedule knows already.
    pub(crate) fn collect(&mut self, index: u32) {
        while let Some(done) = self.qps.get_mut(index).and_then(|slot| slot.qp.poll_completion()) {
            self.complete(index, done);
        }
        while let Some(notice) = self.qps.get_mut(index).and_then(|slot| slot.qp.poll_notice()) {
            self.notice(index, notice);
        }
        let Some(slot) = self.qps.get_mut(index) else { return };
        slot.qp.release(&self.memory);
        let timeout = slot.qp.poll_timeout();
        if timeout != slot.armed {
            slot.armed = timeout;
            match timeout {
                Some(at) => self.wheel.arm(timeout_node(index), at),
                None => self.wheel.cancel(timeout_node(index)),
            }
        }
    }

    #[inline]
    fn complete(&mut self, index: u32, done: Completion) {
        let Some(slot) = self.qps.get_mut(index) else { return };
        let (cq, due) = match done {
            Completion::Retired => {
                slot.reserved = slot.reserved.saturating_sub(1);
                if let Some(cq) = self.cqs.at(slot.send_cq) {
                    cq.release(1);
                }
                return;
            }
            Completion::Wc(wc) if wc.is_recv => {
                let at = slot.recv_cq;
                let Some(cq) = self.cqs.at(at) else { return };
                match cq.push(wc) {
                    Ok(due) => (cq, due),
                    Err(_) => return self.overflow(index, at),
                }
            }
            Completion::Wc(wc) => {
                slot.reserved = slot.reserved.saturating_sub(1);
                let Some(cq) = self.cqs.at(slot.send_cq) else { return };
                let due = cq.push_reserved(wc);
                (cq, due)
            }
        };
        if due && !cq.publish() {
            let cq = cq.id();
            self.event(EngineEventKind::Completion(cq), None);
        }
    }

    /// A receive's completion found no room: the completion is lost, the queue pair goes to error, once, and control
    /// hears of the queue (libibverbs' rule for an overrun).
    #[cold]
    fn overflow(&mut self, index: u32, cq: u32) {
        self.block.add(Counter::CompletionsLost, 1);
        let Some(slot) = self.qps.get_mut(index) else { return };
        if std::mem::replace(&mut slot.overflowed, true) {
            return;
        }
        // Refused only if it is in error or reset already.
        let _ = slot.qp.modify(self.now, &QpModify::ToErr);
        self.block.add(Counter::CqOverflows, 1);
        if let Some(id) = self.cqs.at(cq).map(|cq| cq.id()) {
            self.event(EngineEventKind::Async(AsyncEvent::CqErr(id)), None);
        }
    }

    fn notice(&mut self, index: u32, notice: Notice) {
        let Some(slot) = self.qps.get_mut(index) else { return };
        let qpn = slot.qp.qpn();
        let peer = slot.peer;
        let mtu = slot.mtu_fault;
        match notice {
            Notice::CommEst => self.event(EngineEventKind::Async(AsyncEvent::CommEst(qpn)), None),
            Notice::Drained => self.event(EngineEventKind::Async(AsyncEvent::SqDrained(qpn)), None),
            Notice::LastWqeReached => {
                self.event(EngineEventKind::Async(AsyncEvent::QpLastWqeReached(qpn)), None);
            }
            Notice::Fatal { status, psn, nak } => {
                let event = match nak {
                    Some(NakCode::InvalidRequest) => AsyncEvent::QpReqErr(qpn),
                    Some(NakCode::RemoteAccess) => AsyncEvent::QpAccessErr(qpn),
                    _ => AsyncEvent::QpFatal(qpn),
                };
                let detail = FaultDetail {
                    peer: peer.map(|(gid, _)| gid),
                    peer_qpn: peer.map_or(Qpn::new(0), |(_, qpn)| qpn),
                    psn,
                    status,
                    nak,
                    mtu,
                };
                self.event(EngineEventKind::Async(event), Some(detail));
            }
        }
    }

    /// Serves application threads.
    #[inline]
    pub(crate) fn serve_apps(&mut self) -> usize {
        if self.apps.is_empty() {
            return 0;
        }
        // The list leaves the core for the while, since the rings' requests are posted to the core.
        let mut apps = std::mem::take(&mut self.apps);
        let work = apps.iter_mut().map(|app| app.poll(self)).sum();
        self.apps = apps;
        work
    }

    /// True if an application thread handed over something.
    pub(crate) fn app_waits(&self) -> bool {
        self.apps.iter().any(|app| app.news())
    }

    /// True if something of an application is left that no wake-up tells of.
    pub(crate) fn app_left(&self) -> bool {
        self.apps.iter().any(|app| app.left())
    }

    /// A timer of the wheel fired.
    pub(crate) fn timer_fired(&mut self, node: u32) {
        let index = node / 2;
        let now = self.now;
        let Some(slot) = self.qps.get_mut(index) else { return };
        if node == timeout_node(index) {
            slot.armed = None;
            slot.qp.handle_timeout(now);
        }
        self.settle(index);
    }

    /// Carries out a command of control.
    pub(crate) fn execute(&mut self, command: Command) -> Answer {
        self.block.add(Counter::Commands, 1);
        match command {
            Command::Register(mr) => match mr.apply(&mut self.memory) {
                Ok(()) => Answer::Done,
                Err(why) => Answer::Key(why),
            },
            Command::CloseMr(lkey) => released(self.memory.close(lkey)),
            Command::ReopenMr(lkey) => {
                self.memory.reopen(lkey);
                Answer::Done
            }
            Command::Deregister(lkey) => released(self.memory.deregister(lkey).map(|_| ())),
            Command::AllocMw { rkey, pd } => match self.memory.replicate_window(rkey, pd) {
                Ok(()) => Answer::Done,
                Err(why) => Answer::Key(why),
            },
            Command::DeallocMw(rkey) => match self.memory.dealloc_window(rkey) {
                Ok(_) => Answer::Done,
                Err(_) => Answer::NotFound,
            },
            Command::JoinGroup(member) if self.groups.add(member) => Answer::Done,
            Command::JoinGroup(_) => Answer::Full,
            Command::LeaveGroup(member) => {
                self.groups.remove(&member);
                Answer::Done
            }
            Command::CreateCq { index, cq } => match self.cqs.0.get_mut(index as usize) {
                Some(place @ None) => {
                    *place = Some(cq);
                    Answer::Done
                }
                _ => Answer::Cq(cq),
            },
            Command::DestroyCq { index, id } => match self.cqs.0.get_mut(index as usize) {
                Some(place) if place.as_ref().is_some_and(|cq| cq.id() == id) => {
                    place.take().map_or(Answer::NotFound, Answer::Cq)
                }
                _ => Answer::NotFound,
            },
            Command::Srq(command) => self.execute_srq(command),
            Command::CreateQp { index, slot } => match self.qps.insert(index, slot) {
                Ok(()) => Answer::Done,
                Err(slot) => Answer::Qp(slot),
            },
            Command::ModifyQp { qpn, modify } => self.modify_qp(qpn, &modify),
            Command::Repath { qpn, smac, dmac } => self.repath(qpn, smac, dmac),
            Command::QueryQp { qpn, mut report } => {
                let worker = self.id;
                *report = self.qps.by_number(qpn).map(|(_, slot)| {
                    let mut info = slot.qp.info();
                    info.worker = worker;
                    (info, *slot.qp.counters())
                });
                Answer::Info(report)
            }
            Command::SetShare { class, share } => {
                self.sched.set_share(class, share);
                Answer::Done
            }
            Command::DestroyQp { qpn } => self.destroy_qp(qpn),
            Command::Attach(app) if self.apps.len() == MAX_APPS => Answer::App(app),
            Command::Attach(app) => {
                self.apps.push(app);
                Answer::Done
            }
            Command::Detach { id } => match self.apps.iter().position(|app| app.id == id) {
                Some(at) => Answer::App(self.apps.swap_remove(at)),
                None => Answer::NotFound,
            },
            Command::Netdev(news) => Answer::Netdev(std::mem::replace(&mut self.netdev, news)),
        }
    }

    /// Carries out a command about a shared receive queue.
    fn execute_srq(&mut self, command: SrqCommand) -> Answer {
        match command {
            SrqCommand::Create { id, srq } => match self.srqs.insert(id, srq) {
                Ok(()) => Answer::Done,
                Err(srq) => Answer::SrqRefused(srq),
            },
            SrqCommand::Limit { id, limit } => match self.srqs.by_id(id) {
                Some(srq) => {
                    srq.set_limit(limit);
                    Answer::Done
                }
                None => Answer::NotFound,
            },
            SrqCommand::Resize { id, mut room } => {
                if self.srqs.by_id(id).is_some_and(|srq| srq.resize_into(&mut room)) {
                    Answer::Srq(room)
                } else {
                    Answer::SrqRefused(room)
                }
            }
            SrqCommand::Query(id) => {
                self.srqs.by_id(id).map_or(Answer::NotFound, |srq| Answer::SrqInfo(srq.info()))
            }
            SrqCommand::Destroy(id) => match self.srqs.remove(id) {
                Some(mut srq) => {
                    srq.clear(&self.memory);
                    Answer::Srq(srq)
                }
                None => Answer::NotFound,
            },
        }
    }

    fn modify_qp(&mut self, qpn: Qpn, modify: &QpModify) -> Answer {
        let now = self.now;
        let Some((index, slot)) = self.qps.by_number(qpn) else { return Answer::NotFound };
        if let Err(why) = slot.qp.modify(now, modify) {
            return Answer::Modify(why);
        }
        match modify {
            QpModify::ToRtr(rtr) => {
                // A datagram has a way of its own.
                if slot.qp.service() != Service::Ud {
                    slot.path = PathHeaders::new(&rtr.av);
                    slot.peer = Some((rtr.av.dgid, rtr.dest_qpn));
                }
                slot.class = rtr.class;
            }
            QpModify::Change(change) if change.av.is_some() => {
                slot.path = slot.qp.av().and_then(PathHeaders::new);
            }
            QpModify::ToReset => {
                (slot.path, slot.peer, slot.overflowed) = (None, None, false);
                slot.mtu_fault = None;
                self.forget_work(index);
            }
            _ => {}
        }
        self.settle(index);
        Answer::Done
    }

    /// The next hop of a queue pair, or the port, has another Ethernet address.
    fn repath(&mut self, qpn: Qpn, smac: MacAddr, dmac: MacAddr) -> Answer {
        let Some((_, slot)) = self.qps.by_number(qpn) else { return Answer::NotFound };
        slot.qp.set_link(smac, dmac);
        if let Some(path) = &mut slot.path {
            (path.eth.src, path.eth.dst) = (smac, dmac);
        }
        self.block.add(Counter::PathsMoved, 1);
        Answer::Done
    }

    fn destroy_qp(&mut self, qpn: Qpn) -> Answer {
        let Some((index, _)) = self.qps.by_number(qpn) else { return Answer::NotFound };
        self.forget_work(index);
        self.qps.remove(index).map_or(Answer::NotFound, Answer::Qp)
    }

    /// Takes a queue pair out of wheel, schedule and reservations, and unbinds its windows.
    fn forget_work(&mut self, index: u32) {
        self.wheel.cancel(timeout_node(index));
        self.wheel.cancel(parked_node(index));
        self.sched.remove(index);
        if let Some(slot) = self.qps.get_mut(index) {
            self.memory.unbind_all(slot.qp.qpn());
            slot.qp.release_all(&self.memory);
            slot.armed = None;
            if let Some(cq) = self.cqs.at(slot.send_cq) {
                cq.release(std::mem::take(&mut slot.reserved));
            }
        }
    }
}

fn released(outcome: Result<(), DeregisterError>) -> Answer {
    match outcome {
        Ok(()) => Answer::Done,
        Err(DeregisterError::Unknown) => Answer::NotFound,
        Err(why @ DeregisterError::Busy { .. }) => Answer::Busy(why),
    }
}

impl QpSlot {
    /// What `create_qp` hands to the worker.
    pub(crate) fn new(qp: ferroce_transport::Qp, attr: &QpInitAttr) -> Self {
        QpSlot {
            qp,
            send_cq: attr.send_cq.0 & 0xffff,
            recv_cq: attr.recv_cq.0 & 0xffff,
            srq: attr.srq.map(srq::index_of),
            class: Default::default(),
            path: None,
            peer: None,
            reserved: 0,
            armed: None,
            overflowed: false,
            mtu_fault: None,
        }
    }
}

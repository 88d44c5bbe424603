//! [`SoftDevice`]: verbs' control side in software.
//!
//! Owns, behind one lock, the records of what exists: protection domains, regions, completion queues, queue pairs and
//! free numbers. Invariant: a record is there before its worker knows the object and until no worker does, so a region's
//! memory outlives every key to it. Called by control threads; may block, at most a few deadlines of [`crate::mailbox`].
//! Never called on a worker, never touches the data path.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use ferroce_mem::memory::RegisterError;
use ferroce_mem::os::Block;
use ferroce_mem::{Access, Lkey, MrInfo, PdId};
use ferroce_transport::{Qp, QpCounters};
use ferroce_verbs::error::VerbsErrorKind;
use ferroce_verbs::{
    AddressVector, Ah, AsyncEvent, ChannelId, ClassId, CqId, Device, DeviceAttr, Gid, MrKeys, PathMtu,
    PortAttr, QpInfo, QpInitAttr, QpModify, Qpn, Rkey, SrqId, SrqInfo, SrqInitAttr, SrqModify, VerbsError,
};

use crate::check::{self, refuse};
use crate::command::{Answer, Command, CommandBox};
use crate::config::{IcrcMode, NetdevInfo};
use crate::control::Control;
use crate::cq::{Cq, MAX_CQE};
use crate::demux::QpSlot;
use crate::event::{EngineEvent, EngineEventKind};
use crate::idle::Doorbell;
use crate::mailbox::{CallError, DEADLINE, Registration};
use crate::mcast::{MAX_ATTACHED, MAX_GROUPS};
use crate::objects::MAX_AH;
use crate::sched::{MAX_CLASSES, Share};
use crate::srq::MAX_SRQ;
use crate::stats::{EngineStats, WorkerBlock};

/// Work requests of one queue.
const MAX_QP_WR: u32 = 1 << 14;
/// Scatter/gather entries of a work request.
const MAX_SGE: u32 = 16;
/// Inline bytes of a work request.
const MAX_INLINE: u32 = 1024;
/// READs and atomics of a queue pair, each way.
const MAX_RD_ATOM: u8 = 128;
/// Protection domains.
pub(crate) const MAX_PD: u32 = 1 << 16;

/// An immutable snapshot of the network device: what housekeeping last told.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Netdev {
    pub info: NetdevInfo,
    pub gids: Vec<Gid>,
}

/// What control threads know of a worker.
pub(crate) struct Seat {
    pub commands: CommandBox,
    pub bell: Arc<Doorbell>,
    pub block: Arc<WorkerBlock>,
    pub core: Option<usize>,
    /// The worker's thread has left its loop.
    pub exited: AtomicBool,
}

/// What the engine, its device handles and its workers share.
pub(crate) struct Shared {
    pub name: String,
    pub icrc: IcrcMode,
    pub clock: &'static str,
    pub limits: DeviceAttr,
    pub workers: Vec<Seat>,
    pub events: Arc<ArrayQueue<EngineEvent>>,
    pub stop: AtomicBool,
    pub netdev: Mutex<Arc<Netdev>>,
    pub control: Mutex<Control>,
}

/// A lock whose holder panicked guards records that are still whole: each is changed in one step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Limits of a device.
pub(crate) fn limits(node_guid: u64, workers: u8, max_qp: u32, max_cq: u32, max_mr: u32) -> DeviceAttr {
    DeviceAttr {
        node_guid,
        workers,
        max_qp,
        max_qp_wr: MAX_QP_WR,
        max_sge: MAX_SGE,
        max_inline: MAX_INLINE,
        max_cq,
        max_cqe: MAX_CQE,
        max_mr,
        max_mr_size: 1 << 46,
        max_pd: MAX_PD,
        max_qp_rd_atom: MAX_RD_ATOM,
        max_qp_init_rd_atom: MAX_RD_ATOM,
        max_srq: MAX_SRQ,
        max_srq_wr: MAX_QP_WR,
        max_srq_sge: MAX_SGE,
        max_ah: MAX_AH,
        max_mw: max_mr.min(1 << 16),
        max_mcast_grp: MAX_GROUPS,
        max_mcast_qp_attach: MAX_ATTACHED as u32,
    }
}

impl Shared {
    /// Gives `worker` a command and waits for its answer.
    fn call(&self, worker: u8, command: Command) -> Result<Answer, CallError> {
        let seat = self.workers.get(worker as usize).ok_or(CallError::Gone)?;
        if self.stop.load(Ordering::Acquire) {
            return Err(CallError::Gone);
        }
        seat.commands.call(&seat.bell, command, DEADLINE)
    }

    /// Why `worker` gave no answer, in words.
    pub(crate) fn no_answer(&self, worker: u8, why: CallError) -> VerbsError {
        let stage = self.workers.get(worker as usize).map_or("outside", |seat| seat.block.stage().name());
        match why {
            CallError::Gone => {
                refuse(VerbsErrorKind::Gone, "device", "an operation", "none: the engine has stopped", "")
            }
            CallError::Withdrawn | CallError::Hung => refuse(
                VerbsErrorKind::Timeout,
                "worker",
                format!("an answer of worker {worker}"),
                format!("{} s; it was last seen in stage {stage}", DEADLINE.as_secs()),
                "the loop watchdog's counters tell what held it",
            ),
        }
    }

    pub(crate) fn ask(&self, worker: u8, command: Command) -> Result<Answer, VerbsError> {
        self.call(worker, command).map_err(|why| self.no_answer(worker, why))
    }

    /// As [`Shared::ask`], where the only good answer is "done".
    pub(crate) fn tell(&self, worker: u8, command: Command, what: &str) -> Result<(), VerbsError> {
        match self.ask(worker, command)? {
            Answer::Done
            | Answer::Qp(_)
            | Answer::Cq(_)
            | Answer::Srq(_)
            | Answer::Netdev(_)
            | Answer::App(_) => Ok(()),
            Answer::Full => Err(refuse(
                VerbsErrorKind::Exhausted,
                what,
                format!("one more on worker {worker}"),
                "what its table takes",
                "",
            )),
            Answer::Info(_)
            | Answer::SrqInfo(_)
            | Answer::SrqRefused(_)
            | Answer::NotFound
            | Answer::Key(_)
            | Answer::Busy(_)
            | Answer::Modify(_) => Err(refuse(
                VerbsErrorKind::NotFound,
                what,
                format!("on worker {worker}"),
                "an object that exists",
                "",
            )),
        }
    }

    pub(crate) fn snapshot(&self) -> Arc<Netdev> {
        lock(&self.netdev).clone()
    }

    fn event(&self, event: AsyncEvent) {
        self.tell_control(EngineEventKind::Async(event));
    }

    fn tell_control(&self, kind: EngineEventKind) {
        let event = EngineEvent { worker: None, kind, detail: None };
        // A full queue loses the newest event; workers count theirs, and port news is also in `query_port`.
        let _ = self.events.push(event);
    }

    pub(crate) fn stats(&self) -> EngineStats {
        EngineStats {
            name: self.name.clone(),
            icrc: self.icrc,
            clock: self.clock,
            workers: self
                .workers
                .iter()
                .enumerate()
                .map(|(i, seat)| seat.block.snapshot(i as u8, seat.core))
                .collect(),
        }
    }
}

/// A device in software; clones are handles to the same one.
#[derive(Clone)]
pub struct SoftDevice {
    pub(crate) shared: Arc<Shared>,
}

impl SoftDevice {
    /// Housekeeping's news of the network device: kept as an immutable snapshot and sent to every worker. Changes of the
    /// link and of addresses become events.
    pub fn set_netdev(&self, info: NetdevInfo, gids: Vec<Gid>) -> Result<(), VerbsError> {
        let news = Arc::new(Netdev { info, gids });
        let old = std::mem::replace(&mut *lock(&self.shared.netdev), news.clone());
        if *old == *news {
            return Ok(());
        }
        if old.info.link_up != info.link_up {
            self.shared.event(if info.link_up { AsyncEvent::PortActive } else { AsyncEvent::PortErr });
        }
        if old.gids != news.gids {
            self.shared.event(AsyncEvent::GidChange);
        }
        if old.info.mtu != news.info.mtu {
            let netdev_mtu = news.info.mtu;
            let largest = PathMtu::largest_for_netdev(netdev_mtu);
            let too_long = lock(&self.shared.control).longer_paths(largest);
            self.shared.tell_control(EngineEventKind::Mtu { netdev_mtu, too_long });
        }
        for worker in 0..self.shared.workers.len() {
            self.shared.tell(worker as u8, Command::Netdev(news.clone()), "netdev")?;
        }
        Ok(())
    }

    /// Takes the oldest event.
    pub fn next_event(&self) -> Option<EngineEvent> {
        self.shared.events.pop()
    }

    /// Counters of all workers.
    pub fn stats(&self) -> EngineStats {
        self.shared.stats()
    }

    /// State and counters of a queue pair.
    pub fn query_qp_counters(&self, qpn: Qpn) -> Result<(QpInfo, QpCounters), VerbsError> {
        let worker = lock(&self.shared.control).qp(qpn)?.worker;
        match self.shared.ask(worker, Command::QueryQp { qpn, report: Box::new(None) })? {
            Answer::Info(report) => report.ok_or_else(|| not_found("qp_num", format!("{qpn:?}"))),
            _ => Err(not_found("qp_num", format!("{qpn:?}"))),
        }
    }

    /// Gives a class its share of every worker's port queue. Without it, every class has weight 1.
    pub fn set_class_share(&self, class: ClassId, share: Share) -> Result<(), VerbsError> {
        if class.0 as usize >= MAX_CLASSES {
            return Err(refuse(
                VerbsErrorKind::Invalid,
                "class",
                class.0,
                format!("0 to {}", MAX_CLASSES - 1),
                "",
            ));
        }
        for worker in 0..self.shared.workers.len() {
            self.shared.tell(worker as u8, Command::SetShare { class, share }, "class")?;
        }
        Ok(())
    }

    /// Queue pairs that exist, in no order.
    pub fn list_qps(&self) -> Vec<Qpn> {
        lock(&self.shared.control).qps.keys().copied().collect()
    }

    /// The worker of a completion queue that exists.
    pub fn cq_worker(&self, cq: CqId) -> Result<u8, VerbsError> {
        lock(&self.shared.control).cq(cq).map(|cq| cq.worker)
    }
}

pub(crate) fn not_found(attribute: &str, asked: impl ToString) -> VerbsError {
    refuse(VerbsErrorKind::NotFound, attribute, asked, "one that exists", "")
}

impl Device for SoftDevice {
    type Memory = Arc<Block>;

    fn query_device(&self) -> Result<DeviceAttr, VerbsError> {
        Ok(self.shared.limits)
    }

    fn query_port(&self, port: u8) -> Result<PortAttr, VerbsError> {
        port_1(port)?;
        let netdev = self.shared.snapshot();
        let largest = PathMtu::largest_for_netdev(netdev.info.mtu);
        Ok(PortAttr {
            active: netdev.info.link_up && largest.is_some(),
            max_mtu: PathMtu::Mtu4096,
            active_mtu: largest.unwrap_or(PathMtu::Mtu256),
            netdev_mtu: netdev.info.mtu,
            mac: netdev.info.mac,
            gid_tbl_len: netdev.gids.len() as u32,
        })
    }

    fn query_gids(&self, port: u8) -> Result<Vec<Gid>, VerbsError> {
        port_1(port)?;
        Ok(self.shared.snapshot().gids.clone())
    }

    fn alloc_pd(&self) -> Result<PdId, VerbsError> {
        lock(&self.shared.control).alloc_pd()
    }

    fn dealloc_pd(&self, pd: PdId) -> Result<(), VerbsError> {
        lock(&self.shared.control).dealloc_pd(pd)
    }

    fn reg_mr(&self, pd: PdId, memory: Arc<Block>, access: Access) -> Result<MrKeys, VerbsError> {
        let mut control = lock(&self.shared.control);
        let registration = control.register(pd, memory, access)?;
        let info = registration.info;
        for worker in 0..self.shared.workers.len() as u8 {
            let (why, has_key) = match self.shared.call(worker, Command::Register(registration.clone())) {
                Ok(Answer::Done) => continue,
                Ok(Answer::Key(why)) => (key_refused(worker, &info, why), false),
                Ok(_) => (not_found("worker", worker), false),
                Err(why) => (self.shared.no_answer(worker, why), why == CallError::Hung),
            };
            // Undo: the record, and with it the memory, goes only when no worker can hold the key any more.
            if !has_key && self.forget_mr(info.lkey, worker).is_ok() {
                control.deregistered(info.lkey);
            }
            return Err(why);
        }
        Ok(MrKeys { lkey: info.lkey, rkey: info.rkey, iova: info.iova, len: info.len })
    }

    fn dereg_mr(&self, lkey: Lkey) -> Result<(), VerbsError> {
        self.drop_mr(lkey)
    }

    fn create_cq(&self, worker: u8, cqe: u32) -> Result<CqId, VerbsError> {
        self.new_cq(worker, cqe, None)
    }

    fn destroy_cq(&self, cq: CqId) -> Result<(), VerbsError> {
        let mut control = lock(&self.shared.control);
        let record = control.cq(cq)?;
        let (worker, users, unacked) = (record.worker, record.users, record.unacked);
        if users != 0 || unacked != 0 {
            return Err(refuse(
                VerbsErrorKind::Busy,
                "cq",
                format!("to destroy cq {:#010x}", cq.0),
                format!(
                    "when no queue pair uses it and all its events are acknowledged; {users} do and {unacked} are not"
                ),
                "destroy those first, acknowledge these",
            ));
        }
        self.shared.tell(worker, Command::DestroyCq { index: cq.0 & 0xffff, id: cq }, "cq")?;
        control.cq_gone(cq);
        Ok(())
    }

    fn create_qp(&self, attr: &QpInitAttr) -> Result<Qpn, VerbsError> {
        check::qp_init(attr, &self.shared.limits)?;
        let mut control = lock(&self.shared.control);
        let worker = control.worker_for(attr)?;
        let attr = &control.with_srq(worker, attr)?;
        let (qpn, index) = control.new_qp(worker, attr, Instant::now())?;
        let slot = Box::new(QpSlot::new(Qp::new(qpn, attr), attr));
        let told = self.shared.tell(worker, Command::CreateQp { index, slot }, "qp");
        if told.is_err() {
            control.qp_gone(qpn);
        }
        told.map(|()| qpn)
    }

    fn modify_qp(&self, qpn: Qpn, modify: &QpModify) -> Result<(), VerbsError> {
        let (worker, qp_type) = lock(&self.shared.control).qp(qpn).map(|qp| (qp.worker, qp.qp_type))?;
        check::modify(modify, qp_type, &self.shared.snapshot())?;
        match self.shared.ask(worker, Command::ModifyQp { qpn, modify: *modify })? {
            Answer::Done => {
                lock(&self.shared.control).qp_modified(qpn, modify);
                Ok(())
            }
            Answer::Modify(why) => Err(check::modify_refused(modify, why)),
            _ => Err(not_found("qp_num", format!("{qpn:?}"))),
        }
    }

    fn query_qp(&self, qpn: Qpn) -> Result<QpInfo, VerbsError> {
        self.query_qp_counters(qpn).map(|(info, _)| info)
    }

    fn destroy_qp(&self, qpn: Qpn) -> Result<(), VerbsError> {
        let mut control = lock(&self.shared.control);
        let worker = control.qp(qpn)?.worker;
        let groups = control.groups_of(qpn);
        if groups != 0 {
            return Err(refuse(
                VerbsErrorKind::Busy,
                "qp_num",
                format!("to destroy {qpn:?}"),
                format!("when it is in no multicast group; it is in {groups}"),
                "detach it first",
            ));
        }
        self.shared.tell(worker, Command::DestroyQp { qpn }, "qp_num")?;
        control.qp_gone(qpn);
        Ok(())
    }

    fn create_srq(&self, worker: u8, attr: &SrqInitAttr) -> Result<SrqId, VerbsError> {
        self.new_srq(worker, attr)
    }

    fn modify_srq(&self, srq: SrqId, modify: &SrqModify) -> Result<(), VerbsError> {
        self.change_srq(srq, modify)
    }

    fn query_srq(&self, srq: SrqId) -> Result<SrqInfo, VerbsError> {
        self.srq_info(srq)
    }

    fn destroy_srq(&self, srq: SrqId) -> Result<(), VerbsError> {
        self.drop_srq(srq)
    }

    fn create_ah(&self, pd: PdId, av: &AddressVector) -> Result<Ah, VerbsError> {
        self.new_ah(pd, av)
    }

    fn destroy_ah(&self, ah: &Ah) -> Result<(), VerbsError> {
        self.drop_ah(ah)
    }

    fn alloc_mw(&self, worker: u8, pd: PdId) -> Result<Rkey, VerbsError> {
        self.new_window(worker, pd)
    }

    fn dealloc_mw(&self, worker: u8, rkey: Rkey) -> Result<(), VerbsError> {
        self.drop_window(worker, rkey)
    }

    fn attach_mcast(&self, qpn: Qpn, group: Gid) -> Result<(), VerbsError> {
        self.attach_group(qpn, group)
    }

    fn detach_mcast(&self, qpn: Qpn, group: Gid) -> Result<(), VerbsError> {
        self.detach_group(qpn, group)
    }

    fn create_comp_channel(&self) -> Result<ChannelId, VerbsError> {
        self.new_channel()
    }

    fn destroy_comp_channel(&self, channel: ChannelId) -> Result<(), VerbsError> {
        self.drop_channel(channel)
    }

    fn create_cq_on(&self, worker: u8, cqe: u32, channel: ChannelId) -> Result<CqId, VerbsError> {
        self.new_cq(worker, cqe, Some(channel))
    }

    fn get_cq_event(&self, channel: ChannelId, timeout: Duration) -> Result<Option<CqId>, VerbsError> {
        self.wait_channel(channel, timeout)
    }

    fn ack_cq_events(&self, cq: CqId, events: u32) -> Result<(), VerbsError> {
        self.ack_events(cq, events)
    }
}

impl SoftDevice {
    pub(crate) fn worker_exists(&self, worker: u8) -> Result<(), VerbsError> {
        if (worker as usize) < self.shared.workers.len() {
            return Ok(());
        }
        let last = self.shared.workers.len() - 1;
        Err(refuse(VerbsErrorKind::Invalid, "worker", worker, format!("0 to {last}"), ""))
    }

    fn new_cq(&self, worker: u8, cqe: u32, channel: Option<ChannelId>) -> Result<CqId, VerbsError> {
        self.worker_exists(worker)?;
        if cqe == 0 || cqe > MAX_CQE {
            return Err(refuse(VerbsErrorKind::Invalid, "cqe", cqe, format!("1 to {MAX_CQE}"), ""));
        }
        let mut control = lock(&self.shared.control);
        let (id, index, events) = control.new_cq(worker, channel)?;
        let cq = Box::new(Cq::new(id, cqe, events));
        let told = self.shared.tell(worker, Command::CreateCq { index, cq }, "cq");
        if told.is_err() {
            control.cq_gone(id);
        }
        told.map(|()| id)
    }

    /// Takes a key out of the tables of the first `workers` workers. Fails if one of them did not answer: it may hold the
    /// key still.
    pub(crate) fn forget_mr(&self, lkey: Lkey, workers: u8) -> Result<(), VerbsError> {
        // All are asked, whatever one answers; a worker that does not know the key is as good.
        let forget = |worker| match self.shared.ask(worker, Command::Deregister(lkey))? {
            Answer::Done | Answer::NotFound => Ok(()),
            _ => Err(refuse(
                VerbsErrorKind::Busy,
                "lkey",
                format!("to deregister {lkey:?}"),
                format!("when worker {worker} has no use for it"),
                "",
            )),
        };
        (0..workers).map(forget).fold(Ok(()), Result::and)
    }
}

fn key_refused(worker: u8, info: &MrInfo, why: RegisterError) -> VerbsError {
    refuse(
        VerbsErrorKind::Invalid,
        "mr",
        format!("{} bytes at {:#x}", info.len, info.iova),
        format!("what worker {worker}'s key table takes: {why:?}"),
        "",
    )
}

fn port_1(port: u8) -> Result<(), VerbsError> {
    match port {
        1 => Ok(()),
        other => Err(refuse(VerbsErrorKind::Invalid, "port_num", other, "1", "")),
    }
}

// Handed to worker threads and kept by any number of control threads.
const _: fn() = || {
    fn shareable<T: Clone + Send + Sync>() {}
    shareable::<SoftDevice>();
    fn sendable<T: Send>() {}
    sendable::<Registration>();
};

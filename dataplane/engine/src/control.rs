//! Records of what exists on a device. Pure bookkeeping behind [`crate::device`]'s lock: no worker is spoken to here.
//!
//! Invariant: counts of users are right, so nothing is destroyed while something depends on it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use ferroce_mem::memory::RegisterError;
use ferroce_mem::os::Block;
use ferroce_mem::{Access, Lkey, Memory, PdId};
use ferroce_verbs::error::VerbsErrorKind;
use ferroce_verbs::{
    AddressVector, AhId, ChannelId, CqId, Gid, PathMtu, QpInitAttr, QpModify, QpType, Qpn, SrqId, VerbsError,
};

use crate::channel::{Channels, CqEvents};
use crate::check::refuse;
use crate::device::{MAX_PD, not_found};
use crate::mailbox::Registration;
use crate::number::{NoNumber, QpnAllocator, QpnLayout};
use crate::objects::MwRecord;
use crate::srq::Srqs;

/// A completion queue.
pub(crate) struct CqRecord {
    pub worker: u8,
    /// Queue pairs that use it, counted once per direction.
    pub users: u32,
    /// Where its events go.
    pub channel: Option<(ChannelId, Arc<CqEvents>)>,
    /// Events taken from the channel and not acknowledged.
    pub unacked: u32,
}

/// A queue pair.
pub(crate) struct QpRecord {
    pub worker: u8,
    pub qp_type: QpType,
    pd: PdId,
    send_cq: CqId,
    recv_cq: CqId,
    srq: Option<SrqId>,
    /// From RTR on.
    pub path: Option<QpPath>,
}

/// Where a queue pair's packets go, and how long they may be.
#[derive(Clone, Copy)]
pub(crate) struct QpPath {
    pub av: AddressVector,
    pub path_mtu: PathMtu,
}

/// A region. Holds its memory.
pub(crate) struct MrRecord {
    pub pd: PdId,
    _block: Arc<Block>,
}

/// Free completion queue indices of one worker, and how often each was used.
struct CqNumbers {
    free: VecDeque<u16>,
    generations: Vec<u8>,
}

/// All records.
pub(crate) struct Control {
    /// Protection domains and what belongs to each.
    pds: HashMap<PdId, u32>,
    next_pd: u32,
    mrs: HashMap<Lkey, MrRecord>,
    pub cqs: HashMap<CqId, CqRecord>,
    pub qps: HashMap<Qpn, QpRecord>,
    /// The device's own key table: it chooses keys, the workers' tables take them over.
    pub keys: Memory,
    /// Windows, by the upper bits of their keys.
    pub mws: HashMap<u32, MwRecord>,
    pub ahs: HashMap<AhId, PdId>,
    pub next_ah: u64,
    pub channels: Channels,
    pub srqs: Srqs,
    /// Multicast groups and their members.
    pub groups: HashMap<Gid, Vec<Qpn>>,
    cq_numbers: Vec<CqNumbers>,
    qpns: Vec<QpnAllocator>,
    /// Attachments of application threads, and what each has.
    apps: HashMap<u32, (Vec<Qpn>, Vec<CqId>)>,
    next_app: u32,
    max_qp: u32,
    max_cq: u32,
    max_mr: u32,
}

impl Control {
    pub fn new(layout: QpnLayout, workers: u8, max: (u32, u32, u32), secret: u64) -> Self {
        let (max_qp, max_cq, max_mr) = max;
        let cqs = u16::try_from(max_cq - 1).unwrap_or(u16::MAX);
        Control {
            pds: HashMap::new(),
            next_pd: 1,
            mrs: HashMap::new(),
            cqs: HashMap::new(),
            qps: HashMap::new(),
            keys: Memory::new(max_mr, secret),
            mws: HashMap::new(),
            ahs: HashMap::new(),
            next_ah: 0,
            channels: Channels::default(),
            srqs: Srqs::new(workers),
            groups: HashMap::new(),
            cq_numbers: (0..workers)
                .map(|_| CqNumbers { free: (0..=cqs).collect(), generations: vec![0; cqs as usize + 1] })
                .collect(),
            qpns: (0..workers).map(|w| QpnAllocator::new(layout, w, max_qp)).collect(),
            apps: HashMap::new(),
            next_app: 0,
            max_qp,
            max_cq,
            max_mr,
        }
    }

    /// Records an attachment: a queue has one owner.
    pub fn attach(
        &mut self,
        worker: u8,
        qps: impl Iterator<Item = Qpn>,
        cqs: &[CqId],
    ) -> Result<u32, VerbsError> {
        let qps: Vec<Qpn> = qps.collect();
        let taken = |asked: String| {
            let allowed = "a queue that no other handle has";
            refuse(VerbsErrorKind::Busy, "attach", asked, allowed, "drop the other handle first")
        };
        for (their_qps, their_cqs) in self.apps.values() {
            if let Some(qpn) = qps.iter().find(|qpn| their_qps.contains(qpn)) {
                return Err(taken(format!("{qpn:?} on worker {worker}")));
            }
            if let Some(cq) = cqs.iter().find(|cq| their_cqs.contains(cq)) {
                return Err(taken(format!("cq {:#010x} on worker {worker}", cq.0)));
            }
        }
        self.next_app = self.next_app.wrapping_add(1);
        self.apps.insert(self.next_app, (qps, cqs.to_vec()));
        Ok(self.next_app)
    }

    /// Ends it.
    pub fn detach(&mut self, id: u32) {
        self.apps.remove(&id);
    }

    pub fn alloc_pd(&mut self) -> Result<PdId, VerbsError> {
        if self.pds.len() >= MAX_PD as usize {
            return Err(exhausted("pd", MAX_PD));
        }
        while self.pds.contains_key(&PdId(self.next_pd)) || self.next_pd == 0 {
            self.next_pd = self.next_pd.wrapping_add(1);
        }
        let pd = PdId(self.next_pd);
        self.next_pd = self.next_pd.wrapping_add(1);
        self.pds.insert(pd, 0);
        Ok(pd)
    }

    pub fn dealloc_pd(&mut self, pd: PdId) -> Result<(), VerbsError> {
        match self.pds.get(&pd) {
            None => Err(not_found("pd", pd.0)),
            Some(0) => {
                self.pds.remove(&pd);
                Ok(())
            }
            Some(users) => Err(refuse(
                VerbsErrorKind::Busy,
                "pd",
                format!("to free pd {}", pd.0),
                format!(
                    "when nothing belongs to it; {users} regions, windows, address handles, shared receive queues and queue pairs do"
                ),
                "destroy those first",
            )),
        }
    }

    pub fn use_pd(&mut self, pd: PdId) -> Result<(), VerbsError> {
        *self.pds.get_mut(&pd).ok_or_else(|| not_found("pd", pd.0))? += 1;
        Ok(())
    }

    pub fn leave_pd(&mut self, pd: PdId) {
        if let Some(users) = self.pds.get_mut(&pd) {
            *users = users.saturating_sub(1);
        }
    }

    /// Chooses keys for a block and records it. Peers address it by its address here.
    pub fn register(
        &mut self,
        pd: PdId,
        block: Arc<Block>,
        access: Access,
    ) -> Result<Registration, VerbsError> {
        if !self.pds.contains_key(&pd) {
            return Err(not_found("pd", pd.0));
        }
        let iova = block.base().as_ptr() as u64;
        let info = Registration::choose(&mut self.keys, block.mr_init(pd, access, iova), &block);
        let info = info.map_err(|why| match why {
            RegisterError::Full => exhausted("mr", self.max_mr),
            RegisterError::BadAccess => refuse(
                VerbsErrorKind::Invalid,
                "access",
                format!("{access:?}"),
                "REMOTE_WRITE and REMOTE_ATOMIC only with LOCAL_WRITE",
                "add LOCAL_WRITE",
            ),
            _ => refuse(
                VerbsErrorKind::Invalid,
                "mr",
                format!("{} bytes at {iova:#x}", block.len()),
                "a range of at least one byte that does not wrap",
                "",
            ),
        })?;
        self.use_pd(pd)?;
        self.mrs.insert(info.lkey, MrRecord { pd, _block: block.clone() });
        Ok(Registration { info, block })
    }

    pub fn mr(&self, lkey: Lkey) -> Result<&MrRecord, VerbsError> {
        self.mrs.get(&lkey).ok_or_else(|| not_found("lkey", format!("{lkey:?}")))
    }

    /// No worker holds the key any more.
    pub fn deregistered(&mut self, lkey: Lkey) {
        // The device's own table knows every key that it chose.
        let _ = self.keys.deregister(lkey);
        if let Some(record) = self.mrs.remove(&lkey) {
            self.leave_pd(record.pd);
        }
    }

    pub fn cq(&self, cq: CqId) -> Result<&CqRecord, VerbsError> {
        self.cqs.get(&cq).ok_or_else(|| not_found("cq", format!("{:#010x}", cq.0)))
    }

    /// A handle and its index on `worker`; its events go to `channel`.
    pub fn new_cq(
        &mut self,
        worker: u8,
        channel: Option<ChannelId>,
    ) -> Result<(CqId, u32, Option<Arc<CqEvents>>), VerbsError> {
        let numbers = self.cq_numbers.get_mut(worker as usize).ok_or_else(|| not_found("worker", worker))?;
        if self.cqs.len() >= self.max_cq as usize {
            return Err(exhausted("cq", self.max_cq));
        }
        let index = numbers.free.pop_front().ok_or_else(|| exhausted("cq", self.max_cq))?;
        let generation = numbers.generations.get(index as usize).copied().unwrap_or(0);
        let id = CqId((u32::from(worker) << 24) | (u32::from(generation) << 16) | u32::from(index));
        let channel =
            match channel.map(|channel| self.channels.join(channel, id).map(|events| (channel, events))) {
                Some(Ok(channel)) => Some(channel),
                None => None,
                Some(Err(why)) => {
                    numbers.free.push_front(index);
                    return Err(why);
                }
            };
        let events = channel.as_ref().map(|(_, events)| events.clone());
        self.cqs.insert(id, CqRecord { worker, users: 0, channel, unacked: 0 });
        Ok((id, u32::from(index), events))
    }

    pub fn cq_gone(&mut self, cq: CqId) {
        let Some(record) = self.cqs.remove(&cq) else { return };
        if let Some((channel, events)) = record.channel {
            events.retire();
            self.channels.leave(channel);
        }
        if let Some(numbers) = self.cq_numbers.get_mut(record.worker as usize) {
            let index = (cq.0 & 0xffff) as u16;
            if let Some(generation) = numbers.generations.get_mut(index as usize) {
                *generation = generation.wrapping_add(1);
            }
            numbers.free.push_back(index);
        }
    }

    /// The worker of a new queue pair: that of its completion queues, which must be one.
    pub fn worker_for(&self, attr: &QpInitAttr) -> Result<u8, VerbsError> {
        let (send, recv) = (self.cq(attr.send_cq)?, self.cq(attr.recv_cq)?);
        if send.worker == recv.worker {
            return Ok(send.worker);
        }
        Err(refuse(
            VerbsErrorKind::Invalid,
            "send_cq, recv_cq",
            format!(
                "send_cq {:#010x} on worker {} and recv_cq {:#010x} on worker {}",
                attr.send_cq.0, send.worker, attr.recv_cq.0, recv.worker
            ),
            "both on one worker",
            "create the two completion queues on the same worker",
        ))
    }

    pub fn qp(&self, qpn: Qpn) -> Result<&QpRecord, VerbsError> {
        self.qps.get(&qpn).ok_or_else(|| not_found("qp_num", format!("{qpn:?}")))
    }

    /// A queue pair made a transition.
    pub fn qp_modified(&mut self, qpn: Qpn, modify: &QpModify) {
        let Some(record) = self.qps.get_mut(&qpn) else { return };
        match modify {
            QpModify::ToRtr(rtr) => record.path = Some(QpPath { av: rtr.av, path_mtu: rtr.path_mtu }),
            QpModify::Change(change) => {
                if let (Some(path), Some(av)) = (&mut record.path, change.av) {
                    path.av = av;
                }
            }
            QpModify::ToErr | QpModify::ToReset => record.path = None,
            QpModify::ToInit(_)
            | QpModify::ToRts(_)
            | QpModify::ToSqd
            | QpModify::SqdToRts
            | QpModify::SqeToRts => {}
        }
    }

    /// Queue pairs whose packets may be longer than `largest`.
    pub fn longer_paths(&self, largest: Option<PathMtu>) -> u32 {
        let longer = |qp: &&QpRecord| qp.path.is_some_and(|path| largest.is_none_or(|l| path.path_mtu > l));
        u32::try_from(self.qps.values().filter(longer).count()).unwrap_or(u32::MAX)
    }

    /// A number and its index on `worker`.
    pub fn new_qp(&mut self, worker: u8, attr: &QpInitAttr, now: Instant) -> Result<(Qpn, u32), VerbsError> {
        if self.qps.len() >= self.max_qp as usize {
            return Err(exhausted("qp", self.max_qp));
        }
        if !self.pds.contains_key(&attr.pd) {
            return Err(not_found("pd", attr.pd.0));
        }
        let numbers = self.qpns.get_mut(worker as usize).ok_or_else(|| not_found("worker", worker))?;
        let (qpn, parts) = numbers.allocate(now).map_err(|why| match why {
            NoNumber::AllInUse => exhausted("qp", self.max_qp),
            NoNumber::Quarantined => refuse(
                VerbsErrorKind::Exhausted,
                "qp",
                "a number",
                "numbers that were not in use in the last 5 s",
                "wait, or start the engine with a larger max_qp",
            ),
        })?;
        self.use_pd(attr.pd)?;
        for cq in [attr.send_cq, attr.recv_cq] {
            if let Some(cq) = self.cqs.get_mut(&cq) {
                cq.users += 1;
            }
        }
        let (send_cq, recv_cq) = (attr.send_cq, attr.recv_cq);
        let record = QpRecord {
            worker,
            qp_type: attr.qp_type,
            pd: attr.pd,
            send_cq,
            recv_cq,
            srq: attr.srq,
            path: None,
        };
        self.srqs.join(attr.srq);
        self.qps.insert(qpn, record);
        Ok((qpn, parts.index))
    }

    pub fn qp_gone(&mut self, qpn: Qpn) {
        let Some(record) = self.qps.remove(&qpn) else { return };
        self.leave_pd(record.pd);
        self.srqs.leave(record.srq);
        for cq in [record.send_cq, record.recv_cq] {
            if let Some(cq) = self.cqs.get_mut(&cq) {
                cq.users = cq.users.saturating_sub(1);
            }
        }
        if let Some(numbers) = self.qpns.get_mut(record.worker as usize) {
            numbers.release(qpn);
        }
    }
}

pub(crate) fn exhausted(attribute: &str, max: u32) -> VerbsError {
    refuse(
        VerbsErrorKind::Exhausted,
        attribute,
        "one more",
        format!("at most {max}"),
        "destroy what is not needed, or start the engine with a larger limit",
    )
}

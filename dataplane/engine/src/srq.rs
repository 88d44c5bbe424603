//! Shared receive queues: the worker's table, and the control side.
//!
//! Owns a worker's [`SrqTable`]; records are [`crate::control`]'s. Invariant: a shared receive queue, the queue pairs that
//! take from it and their completion queues are on one worker, so it is lent, never locked; its memory is made and
//! dropped by control. Called by the worker's stages and by [`crate::device`].

use std::collections::VecDeque;

use ferroce_transport::Srq;
use ferroce_verbs::error::VerbsErrorKind;
use ferroce_verbs::{PdId, QpInitAttr, SrqId, SrqInfo, SrqInitAttr, SrqModify, VerbsError};

use crate::check::{self, refuse};
use crate::command::{Answer, Command, SrqCommand};
use crate::control::{Control, exhausted};
use crate::device::{SoftDevice, lock, not_found};

/// Shared receive queues of a device.
pub(crate) const MAX_SRQ: u32 = 4096;

/// A worker's shared receive queues.
pub(crate) struct SrqTable(Vec<Option<Box<Srq>>>);

impl SrqTable {
    pub fn new() -> Self {
        SrqTable((0..MAX_SRQ).map(|_| None).collect())
    }

    /// The queue at an index that a queue pair holds.
    #[inline]
    pub fn at(&mut self, index: u32) -> Option<&mut Srq> {
        self.0.get_mut(index as usize)?.as_deref_mut()
    }

    /// The queue of a handle, if it is one of this worker's.
    #[inline]
    pub fn by_id(&mut self, id: SrqId) -> Option<&mut Srq> {
        self.at(index_of(id)).filter(|srq| srq.info().srq == id)
    }

    /// Takes a queue over; gives it back if its place is taken.
    pub fn insert(&mut self, id: SrqId, srq: Box<Srq>) -> Result<(), Box<Srq>> {
        match self.0.get_mut(index_of(id) as usize) {
            Some(place @ None) => {
                *place = Some(srq);
                Ok(())
            }
            _ => Err(srq),
        }
    }

    /// Gives a queue back.
    pub fn remove(&mut self, id: SrqId) -> Option<Box<Srq>> {
        self.by_id(id)?;
        self.0.get_mut(index_of(id) as usize)?.take()
    }
}

/// Place in the worker's table.
pub(crate) const fn index_of(id: SrqId) -> u32 {
    id.0 & 0xffff
}

/// A shared receive queue.
pub(crate) struct SrqRecord {
    worker: u8,
    pd: PdId,
    attr: SrqInitAttr,
    /// Queue pairs that take from it.
    users: u32,
}

/// Records and free numbers.
pub(crate) struct Srqs {
    all: std::collections::HashMap<SrqId, SrqRecord>,
    free: Vec<VecDeque<u16>>,
    generation: u8,
}

impl Srqs {
    pub fn new(workers: u8) -> Self {
        let free = (0..workers).map(|_| (0..MAX_SRQ as u16).collect()).collect();
        Srqs { all: Default::default(), free, generation: 0 }
    }

    fn get(&mut self, srq: SrqId) -> Result<&mut SrqRecord, VerbsError> {
        self.all.get_mut(&srq).ok_or_else(|| not_found("srq", format!("{:#010x}", srq.0)))
    }

    /// One more queue pair takes from `srq`, if it names one.
    pub fn join(&mut self, srq: Option<SrqId>) {
        if let Some(record) = srq.and_then(|srq| self.all.get_mut(&srq)) {
            record.users += 1;
        }
    }

    /// One fewer does.
    pub fn leave(&mut self, srq: Option<SrqId>) {
        if let Some(record) = srq.and_then(|srq| self.all.get_mut(&srq)) {
            record.users = record.users.saturating_sub(1);
        }
    }
}

impl Control {
    /// Checks the shared receive queue of a new queue pair on `worker`; gives the attributes that it is made with.
    pub fn with_srq(&mut self, worker: u8, attr: &QpInitAttr) -> Result<QpInitAttr, VerbsError> {
        let Some(srq) = attr.srq else { return Ok(*attr) };
        let record = self.srqs.get(srq)?;
        if record.worker != worker {
            return Err(refuse(
                VerbsErrorKind::Invalid,
                "srq, recv_cq",
                format!(
                    "srq {:#010x} on worker {} and recv_cq {:#010x} on worker {worker}",
                    srq.0, record.worker, attr.recv_cq.0
                ),
                "both on one worker",
                "create the completion queues and the shared receive queue on the same worker",
            ));
        }
        if record.pd != attr.pd {
            return Err(refuse(
                VerbsErrorKind::Invalid,
                "srq",
                format!("srq {:#010x} of pd {} for a queue pair of pd {}", srq.0, record.pd.0, attr.pd.0),
                "one of the same protection domain",
                "",
            ));
        }
        let mut attr = *attr;
        attr.cap.max_recv_wr = 0;
        attr.cap.max_recv_sge = record.attr.max_sge;
        Ok(attr)
    }

    fn new_srq(&mut self, worker: u8, attr: &SrqInitAttr) -> Result<SrqId, VerbsError> {
        if self.srqs.all.len() >= MAX_SRQ as usize {
            return Err(exhausted("srq", MAX_SRQ));
        }
        self.use_pd(attr.pd)?;
        let index = self.srqs.free.get_mut(worker as usize).and_then(VecDeque::pop_front);
        let Some(index) = index else {
            self.leave_pd(attr.pd);
            return Err(exhausted("srq", MAX_SRQ));
        };
        self.srqs.generation = self.srqs.generation.wrapping_add(1);
        let id = (u32::from(worker) << 24) | (u32::from(self.srqs.generation) << 16) | u32::from(index);
        self.srqs.all.insert(SrqId(id), SrqRecord { worker, pd: attr.pd, attr: *attr, users: 0 });
        Ok(SrqId(id))
    }

    fn srq_gone(&mut self, srq: SrqId) {
        let Some(record) = self.srqs.all.remove(&srq) else { return };
        self.leave_pd(record.pd);
        if let Some(free) = self.srqs.free.get_mut(record.worker as usize) {
            free.push_back(index_of(srq) as u16);
        }
    }
}

impl SoftDevice {
    pub(crate) fn new_srq(&self, worker: u8, attr: &SrqInitAttr) -> Result<SrqId, VerbsError> {
        self.worker_exists(worker)?;
        check::srq(attr, &self.shared.limits)?;
        let mut control = lock(&self.shared.control);
        let id = control.new_srq(worker, attr)?;
        let srq = Box::new(Srq::new(id, attr));
        let told = self.shared.tell(worker, Command::Srq(SrqCommand::Create { id, srq }), "srq");
        if told.is_err() {
            control.srq_gone(id);
        }
        told.map(|()| id)
    }

    pub(crate) fn change_srq(&self, srq: SrqId, modify: &SrqModify) -> Result<(), VerbsError> {
        let mut control = lock(&self.shared.control);
        let record = control.srqs.get(srq)?;
        let (worker, attr) = (record.worker, record.attr);
        match *modify {
            SrqModify::Limit(limit) => {
                check::srq(&SrqInitAttr { limit, ..attr }, &self.shared.limits)?;
                self.shared.tell(worker, Command::Srq(SrqCommand::Limit { id: srq, limit }), "srq")
            }
            SrqModify::MaxWr(max_wr) => {
                let attr = SrqInitAttr { max_wr, limit: attr.limit.min(max_wr), ..attr };
                check::srq(&attr, &self.shared.limits)?;
                let room = Box::new(Srq::new(srq, &attr));
                match self.shared.ask(worker, Command::Srq(SrqCommand::Resize { id: srq, room }))? {
                    Answer::Srq(_) => {
                        record.attr = attr;
                        Ok(())
                    }
                    _ => Err(refuse(
                        VerbsErrorKind::Invalid,
                        "max_wr",
                        max_wr,
                        "at least as many as are posted",
                        "query_srq tells how many are",
                    )),
                }
            }
        }
    }

    pub(crate) fn srq_info(&self, srq: SrqId) -> Result<SrqInfo, VerbsError> {
        let worker = lock(&self.shared.control).srqs.get(srq)?.worker;
        match self.shared.ask(worker, Command::Srq(SrqCommand::Query(srq)))? {
            Answer::SrqInfo(info) => Ok(info),
            _ => Err(not_found("srq", format!("{:#010x}", srq.0))),
        }
    }

    pub(crate) fn drop_srq(&self, srq: SrqId) -> Result<(), VerbsError> {
        let mut control = lock(&self.shared.control);
        let record = control.srqs.get(srq)?;
        let (worker, users) = (record.worker, record.users);
        if users != 0 {
            return Err(refuse(
                VerbsErrorKind::Busy,
                "srq",
                format!("to destroy srq {:#010x}", srq.0),
                format!("when no queue pair takes from it; {users} do"),
                "destroy those first",
            ));
        }
        self.shared.tell(worker, Command::Srq(SrqCommand::Destroy(srq)), "srq")?;
        control.srq_gone(srq);
        Ok(())
    }
}

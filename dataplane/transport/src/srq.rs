//! Shared receive queue: receives that any of its queue pairs takes when a message begins.
//!
//! Owns posted receives until one is taken; from then on it is the queue pair's, which finishes, reports or flushes it.
//! Lent to [`crate::Qp::handle_packet_srq`] by whoever owns both, on one worker. Invariant: a receive is taken only by a
//! request that passed every check which comes before it.

use ferroce_mem::{Access, Memory, PdId};
use ferroce_verbs::{PostError, RecvWr, Sge, SrqId, SrqInfo, SrqInitAttr};

use crate::qp::MAX_WR;
use crate::qp::post::checked_sum;
use crate::wq::{Queue, RecvEntry};

/// A shared receive queue.
pub struct Srq {
    id: SrqId,
    pd: PdId,
    max_sge: u32,
    queue: Queue<RecvEntry>,
    /// 0 when disarmed.
    limit: u32,
    /// The event of the limit waits to be told.
    reached: bool,
}

impl Srq {
    /// An empty queue. All its memory is allocated here. A queue of more than [`MAX_WR`] receives is cut to that;
    /// [`Srq::info`] tells the sizes in force.
    pub fn new(id: SrqId, attr: &SrqInitAttr) -> Srq {
        Srq {
            id,
            pd: attr.pd,
            max_sge: attr.max_sge,
            queue: Queue::new(attr.max_wr.min(MAX_WR), attr.max_sge),
            limit: attr.limit,
            reached: false,
        }
    }

    /// Attributes and how many receives are posted.
    pub fn info(&self) -> SrqInfo {
        SrqInfo {
            srq: self.id,
            pd: self.pd,
            max_wr: self.queue.depth(),
            max_sge: self.max_sge,
            limit: self.limit,
            posted: self.queue.len(),
        }
    }

    /// Posts a receive: sizes and local keys are checked; nothing is posted on error.
    #[inline]
    pub fn post_recv(&mut self, wr: &RecvWr<'_>, memory: &Memory) -> Result<(), PostError> {
        if self.queue.free() == 0 {
            return Err(PostError::Full);
        }
        if wr.sg_list.len() > self.max_sge as usize {
            return Err(PostError::TooManySge);
        }
        let bytes = checked_sum(self.pd, wr.sg_list, Access::LOCAL_WRITE, memory)?;
        let index = self.queue.tail;
        self.queue.push(RecvEntry::posted(wr, bytes)?, wr.sg_list);
        if !self.queue.hold(index, memory) {
            self.queue.unpush();
            return Err(PostError::BadKey);
        }
        Ok(())
    }

    /// Arms the event for the next time that fewer receives than `limit` are left; 0 disarms it.
    pub fn set_limit(&mut self, limit: u32) {
        self.limit = limit;
    }

    /// Room for `max_wr` receives (as for [`Srq::new`]). False, and nothing changes, if more are posted. Allocates.
    pub fn resize(&mut self, max_wr: u32) -> bool {
        let max_wr = max_wr.min(MAX_WR);
        if max_wr < self.queue.len() {
            return false;
        }
        let mut queue = Queue::new(max_wr, self.max_sge);
        while let Some((entry, sges)) = self.oldest() {
            queue.push(*entry, sges);
            self.drop_oldest();
        }
        self.queue = queue;
        true
    }

    /// Discards what is posted and releases its keys: before the queue is dropped.
    pub fn clear(&mut self, memory: &Memory) {
        self.queue.release_all(memory);
        self.queue.clear();
    }

    /// As [`Srq::resize`], into the memory of `room`, a new queue of that size, which gets the old memory: for those who
    /// may not allocate. False, and nothing changes, if more are posted than it holds.
    pub fn resize_into(&mut self, room: &mut Srq) -> bool {
        if room.queue.depth() < self.queue.len() || room.max_sge != self.max_sge {
            return false;
        }
        while let Some((entry, sges)) = self.oldest() {
            room.queue.push(*entry, sges);
            self.drop_oldest();
        }
        core::mem::swap(&mut self.queue, &mut room.queue);
        true
    }

    /// True once after fewer receives than the limit were left; the limit is disarmed by that.
    #[must_use]
    pub fn poll_limit(&mut self) -> bool {
        core::mem::take(&mut self.reached)
    }

    /// The receive that would be taken next.
    #[inline]
    pub(crate) fn oldest(&self) -> Option<(&RecvEntry, &[Sge])> {
        let index = self.queue.done;
        let entry = self.queue.get(index)?;
        Some((entry, self.queue.sges(index, entry.sges)))
    }

    /// The oldest receive belongs to a queue pair now.
    #[inline]
    pub(crate) fn taken(&mut self) {
        self.drop_oldest();
        if self.queue.len() < self.limit {
            self.limit = 0;
            self.reached = true;
        }
    }

    fn drop_oldest(&mut self) {
        self.queue.forget_oldest();
    }
}

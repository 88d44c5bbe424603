//! [`Queues`] for what lives on a worker: posting and polling, inline.
//!
//! Called by services in their stage. A send reserves the entry of its completion first, so a completion queue never
//! overflows by sends.

use ferroce_verbs::{CqId, PostError, QpHandle, Queues, RecvWr, SendWr, SrqId, Wc};

use crate::core::WorkerCore;

impl Queues for WorkerCore {
    #[inline]
    fn post_send(&mut self, qp: QpHandle, wr: &SendWr<'_>) -> Result<(), PostError> {
        let (index, slot) = self.qps.by_number(qp).ok_or(PostError::NoSuchQueue)?;
        let cq = self.cqs.at(slot.send_cq).ok_or(PostError::NoSuchQueue)?;
        if !cq.reserve() {
            return Err(PostError::Full);
        }
        if let Err(why) = slot.qp.post_send(wr, &self.memory) {
            cq.release(1);
            return Err(why);
        }
        slot.reserved += 1;
        self.settle(index);
        Ok(())
    }

    #[inline]
    fn post_recv(&mut self, qp: QpHandle, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let (index, slot) = self.qps.by_number(qp).ok_or(PostError::NoSuchQueue)?;
        slot.qp.post_recv(wr, &self.memory)?;
        // In the error state it is flushed at once.
        self.collect(index);
        Ok(())
    }

    #[inline]
    fn post_srq_recv(&mut self, srq: SrqId, wr: &RecvWr<'_>) -> Result<(), PostError> {
        self.srqs.by_id(srq).ok_or(PostError::NoSuchQueue)?.post_recv(wr, &self.memory)
    }

    #[inline]
    fn poll_cq(&mut self, cq: CqId, out: &mut [Wc]) -> Result<usize, PostError> {
        Ok(self.cqs.by_id(cq).ok_or(PostError::NoSuchQueue)?.poll(out))
    }

    #[inline]
    fn req_notify(&mut self, cq: CqId, solicited_only: bool) -> Result<(), PostError> {
        self.cqs.by_id(cq).ok_or(PostError::NoSuchQueue)?.arm(solicited_only);
        Ok(())
    }
}

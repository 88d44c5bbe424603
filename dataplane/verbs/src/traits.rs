//! The two traits. [`Device`] may block and is never called on a worker; [`Queues`] never blocks.

use alloc::vec::Vec;
use core::time::Duration;

use ferroce_mem::{Access, Lkey, PdId};
use ferroce_wire::{Gid, Qpn, Rkey};

use crate::attr::{
    AddressVector, Ah, ChannelId, CqId, DeviceAttr, PortAttr, QpHandle, QpInfo, QpInitAttr, QpModify, SrqId,
    SrqInfo, SrqInitAttr, SrqModify,
};
use crate::error::{PostError, VerbsError};
use crate::wc::Wc;
use crate::wr::{RecvWr, SendWr};

/// Keys of a registered region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MrKeys {
    /// For the owner's scatter lists.
    pub lkey: Lkey,
    /// For peers.
    pub rkey: Rkey,
    /// First byte in the region's address space.
    pub iova: u64,
    /// Bytes.
    pub len: u64,
}

/// Control side of a device: open, query, allocate, register, create, modify, destroy. Every call has a deadline. What
/// has a body here is optional: a device without it answers `Unsupported`.
pub trait Device {
    /// What can be registered: a block of an arena, for the software device.
    type Memory;

    /// Limits.
    fn query_device(&self) -> Result<DeviceAttr, VerbsError>;
    /// Port state; `port` counts from 1.
    fn query_port(&self, port: u8) -> Result<PortAttr, VerbsError>;
    /// The port's addresses.
    fn query_gids(&self, port: u8) -> Result<Vec<Gid>, VerbsError>;
    /// New protection domain.
    fn alloc_pd(&self) -> Result<PdId, VerbsError>;
    /// Frees one; busy while something belongs to it.
    fn dealloc_pd(&self, pd: PdId) -> Result<(), VerbsError>;
    /// Registers memory on every worker.
    fn reg_mr(&self, pd: PdId, memory: Self::Memory, access: Access) -> Result<MrKeys, VerbsError>;
    /// Ends a registration on every worker.
    fn dereg_mr(&self, lkey: Lkey) -> Result<(), VerbsError>;
    /// New completion queue of at least `cqe` entries on `worker`.
    fn create_cq(&self, worker: u8, cqe: u32) -> Result<CqId, VerbsError>;
    /// Destroys one; busy while a queue pair uses it.
    fn destroy_cq(&self, cq: CqId) -> Result<(), VerbsError>;
    /// New queue pair in RESET, on the worker of its completion queues (both must be on one).
    fn create_qp(&self, attr: &QpInitAttr) -> Result<Qpn, VerbsError>;
    /// Makes a transition.
    fn modify_qp(&self, qpn: Qpn, modify: &QpModify) -> Result<(), VerbsError>;
    /// What is known of one.
    fn query_qp(&self, qpn: Qpn) -> Result<QpInfo, VerbsError>;
    /// Destroys one. Its completions already in a queue stay there.
    fn destroy_qp(&self, qpn: Qpn) -> Result<(), VerbsError>;

    /// New shared receive queue on `worker`, for queue pairs there.
    fn create_srq(&self, worker: u8, attr: &SrqInitAttr) -> Result<SrqId, VerbsError> {
        let _ = (worker, attr);
        Err(VerbsError::unsupported("create_srq"))
    }
    /// Changes one.
    fn modify_srq(&self, srq: SrqId, modify: &SrqModify) -> Result<(), VerbsError> {
        let _ = (srq, modify);
        Err(VerbsError::unsupported("modify_srq"))
    }
    /// What is known of one.
    fn query_srq(&self, srq: SrqId) -> Result<SrqInfo, VerbsError> {
        let _ = srq;
        Err(VerbsError::unsupported("query_srq"))
    }
    /// Destroys one; busy while a queue pair uses it. Its receives are discarded without completions.
    fn destroy_srq(&self, srq: SrqId) -> Result<(), VerbsError> {
        let _ = srq;
        Err(VerbsError::unsupported("destroy_srq"))
    }
    /// New address handle for a path that is resolved already.
    fn create_ah(&self, pd: PdId, av: &AddressVector) -> Result<Ah, VerbsError> {
        let _ = (pd, av);
        Err(VerbsError::unsupported("create_ah"))
    }
    /// Destroys one. What was posted with it still leaves.
    fn destroy_ah(&self, ah: &Ah) -> Result<(), VerbsError> {
        let _ = ah;
        Err(VerbsError::unsupported("destroy_ah"))
    }
    /// New type 2 window on `worker`, not bound; returns its first key, whose lowest 8 bits are 0 and which opens
    /// nothing. Queue pairs there bind it by [`crate::SendOp::BindMw`].
    fn alloc_mw(&self, worker: u8, pd: PdId) -> Result<Rkey, VerbsError> {
        let _ = (worker, pd);
        Err(VerbsError::unsupported("alloc_mw"))
    }
    /// Frees a window, named by any key that it had; if it is bound its key ends.
    fn dealloc_mw(&self, worker: u8, rkey: Rkey) -> Result<(), VerbsError> {
        let _ = (worker, rkey);
        Err(VerbsError::unsupported("dealloc_mw"))
    }
    /// Lets a UD queue pair receive what is sent to a multicast group.
    fn attach_mcast(&self, qpn: Qpn, group: Gid) -> Result<(), VerbsError> {
        let _ = (qpn, group);
        Err(VerbsError::unsupported("attach_mcast"))
    }
    /// Ends that.
    fn detach_mcast(&self, qpn: Qpn, group: Gid) -> Result<(), VerbsError> {
        let _ = (qpn, group);
        Err(VerbsError::unsupported("detach_mcast"))
    }
    /// New completion channel: where the events that [`Queues::req_notify`] asks for arrive.
    fn create_comp_channel(&self) -> Result<ChannelId, VerbsError> {
        Err(VerbsError::unsupported("create_comp_channel"))
    }
    /// Destroys one; busy while a completion queue uses it.
    fn destroy_comp_channel(&self, channel: ChannelId) -> Result<(), VerbsError> {
        let _ = channel;
        Err(VerbsError::unsupported("destroy_comp_channel"))
    }
    /// As [`Device::create_cq`]; events of the queue go to `channel`.
    fn create_cq_on(&self, worker: u8, cqe: u32, channel: ChannelId) -> Result<CqId, VerbsError> {
        let _ = (worker, cqe, channel);
        Err(VerbsError::unsupported("create_cq_on"))
    }
    /// Waits for the next event of a channel at most `timeout`; `None` if none came.
    fn get_cq_event(&self, channel: ChannelId, timeout: Duration) -> Result<Option<CqId>, VerbsError> {
        let _ = (channel, timeout);
        Err(VerbsError::unsupported("get_cq_event"))
    }
    /// Acknowledges `events` events of a queue: [`Device::destroy_cq`] is busy until all are.
    fn ack_cq_events(&self, cq: CqId, events: u32) -> Result<(), VerbsError> {
        let _ = (cq, events);
        Err(VerbsError::unsupported("ack_cq_events"))
    }
}

/// Data side: never blocks, allocates or locks.
pub trait Queues {
    /// Posts a send. On error nothing was posted.
    fn post_send(&mut self, qp: QpHandle, wr: &SendWr<'_>) -> Result<(), PostError>;
    /// Posts a receive. On error nothing was posted.
    fn post_recv(&mut self, qp: QpHandle, wr: &RecvWr<'_>) -> Result<(), PostError>;
    /// Posts a receive to a shared receive queue. On error nothing was posted.
    fn post_srq_recv(&mut self, srq: SrqId, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let _ = (srq, wr);
        Err(PostError::NoSuchQueue)
    }
    /// Takes up to `out.len()` completions; returns how many.
    fn poll_cq(&mut self, cq: CqId, out: &mut [Wc]) -> Result<usize, PostError>;
    /// Asks for one event when the next completion arrives, or the next that is solicited or an error.
    ///
    /// Good for one event; asking again before it comes changes nothing, except that asking for any completion outdoes
    /// asking for solicited ones. Completions that are in the queue already give no event: poll once more after asking.
    fn req_notify(&mut self, cq: CqId, solicited_only: bool) -> Result<(), PostError>;
}

/// Something that lives on a worker and is polled by it in every pass.
pub trait Service<Q: Queues> {
    /// Does a bounded amount of work; returns how much was done (0: idle). `now_ns` is the worker's clock.
    fn poll(&mut self, queues: &mut Q, now_ns: u64) -> usize;
    /// True when the worker may drop it.
    fn finished(&self) -> bool {
        false
    }
}

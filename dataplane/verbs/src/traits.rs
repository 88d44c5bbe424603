//! The two traits. [`Device`] may block and is never called on a worker; [`Queues`] never blocks.

use alloc::vec::Vec;

use ferroce_mem::{Access, Lkey, PdId};
use ferroce_wire::{Gid, Qpn, Rkey};

use crate::attr::{CqId, DeviceAttr, PortAttr, QpHandle, QpInfo, QpInitAttr, QpModify};
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

/// Control side of a device: open, query, allocate, register, create, modify, destroy. Every call has a deadline.
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
}

/// Data side: never blocks, allocates or locks.
pub trait Queues {
    /// Posts a send. On error nothing was posted.
    fn post_send(&mut self, qp: QpHandle, wr: &SendWr<'_>) -> Result<(), PostError>;
    /// Posts a receive. On error nothing was posted.
    fn post_recv(&mut self, qp: QpHandle, wr: &RecvWr<'_>) -> Result<(), PostError>;
    /// Takes up to `out.len()` completions; returns how many.
    fn poll_cq(&mut self, cq: CqId, out: &mut [Wc]) -> Result<usize, PostError>;
    /// Asks for one event when the next (solicited) completion arrives.
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

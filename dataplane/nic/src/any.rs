//! [`AnyPort`] and [`AnyQueue`]: a port of any kind, with or without wrappers, as one type.
//!
//! Owns the choice; each call is one `match`, so nothing on the data path is `dyn`. Invariant: a queue is of the kind
//! of its port. Called by whoever assembles an appliance. Never adds behaviour of its own.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::frame::{RxFrame, TxFrame};
use crate::port::{Caps, Fallback, Port, PortError, PortQueue};
use crate::shm::{ShmPort, ShmQueue};
use crate::wrap::fault::{Fault, FaultConfig, Tallies};
use crate::wrap::pcap::{CaptureFile, Pcap};
use crate::xdp::{XdpPort, XdpQueue};

/// Bytes by which a frame may be longer than the MTU: Ethernet header and a tag.
const LINK_BYTES: usize = 18;

/// Wrappers around a port.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Options {
    /// Makes the wire a bad one.
    pub fault: Option<FaultConfig>,
    /// Captures all frames to this file, as the engine sees them: received ones after the faults, sent ones before.
    pub pcap: Option<PathBuf>,
}

/// Calls the same method on whatever is inside.
macro_rules! each {
    ($value:expr, $kind:ident, $inner:ident => $call:expr) => {
        match $value {
            $kind::Shm($inner) => $call,
            $kind::Xdp($inner) => $call,
        }
    };
    ($value:expr, wrapped $kind:ident, $inner:ident => $call:expr) => {
        match $value {
            $kind::Shm($inner) => $call,
            $kind::Xdp($inner) => $call,
            $kind::Wrapped($inner) => $call,
        }
    };
}

/// A queue of a plain port.
#[allow(clippy::large_enum_variant)]
pub enum BaseQueue {
    /// Of a `shm` port.
    Shm(ShmQueue),
    /// Of an `xdp` port.
    Xdp(XdpQueue),
}

/// A port without wrappers.
pub enum BasePort {
    /// Shared memory.
    Shm(Box<ShmPort>),
    /// AF_XDP.
    Xdp(Box<XdpPort>),
}

impl From<ShmPort> for BasePort {
    fn from(port: ShmPort) -> Self {
        BasePort::Shm(Box::new(port))
    }
}

impl From<XdpPort> for BasePort {
    fn from(port: XdpPort) -> Self {
        BasePort::Xdp(Box::new(port))
    }
}

/// A queue of any port.
// The plain kinds lie inline: no pointer to follow on the data path.
#[allow(clippy::large_enum_variant)]
pub enum AnyQueue {
    /// Of a `shm` port.
    Shm(ShmQueue),
    /// Of an `xdp` port.
    Xdp(XdpQueue),
    /// Of either, with wrappers.
    Wrapped(Box<Pcap<Fault<BaseQueue>>>),
}

/// A port of any kind.
pub enum AnyPort {
    /// Shared memory.
    Shm(Box<ShmPort>),
    /// AF_XDP.
    Xdp(Box<XdpPort>),
    /// Either, with wrappers.
    Wrapped(Box<WrappedPort>),
}

/// A port with wrappers around its queues.
pub struct WrappedPort {
    base: BasePort,
    fault: FaultConfig,
    faulty: bool,
    file: Option<CaptureFile>,
    tallies: Vec<Arc<Tallies>>,
}

impl AnyPort {
    /// Puts the wrappers that `options` names around a port.
    ///
    /// # Errors
    /// [`PortError`] naming a rate that is no share, or why the capture file can't be made.
    pub fn wrap(base: impl Into<BasePort>, options: &Options) -> Result<AnyPort, PortError> {
        let base = base.into();
        if *options == Options::default() {
            return Ok(match base {
                BasePort::Shm(port) => AnyPort::Shm(port),
                BasePort::Xdp(port) => AnyPort::Xdp(port),
            });
        }
        let fault = options.fault.unwrap_or_default();
        fault.check()?;
        let file = options.pcap.as_deref().map(CaptureFile::create).transpose()?;
        let faulty = options.fault.is_some();
        Ok(AnyPort::Wrapped(Box::new(WrappedPort { base, fault, faulty, file, tallies: Vec::new() })))
    }
}

impl WrappedPort {
    fn wrap_queues(&mut self, queues: Vec<BaseQueue>) -> Vec<AnyQueue> {
        let longest = each!(&self.base, BasePort, port => port.caps()).mtu as usize + LINK_BYTES;
        let mut wrapped = Vec::with_capacity(queues.len());
        for (index, queue) in (0u16..).zip(queues) {
            let tallies = Arc::new(Tallies::default());
            self.tallies.push(tallies.clone());
            let queue = Fault::new(queue, &self.fault, index, longest, tallies);
            let queue = match &mut self.file {
                Some(file) => Pcap::new(queue, longest, file),
                None => Pcap::off(queue),
            };
            wrapped.push(AnyQueue::Wrapped(Box::new(queue)));
        }
        wrapped
    }

    fn own_counters(&self) -> Vec<(&'static str, u64)> {
        let sum = |counter: fn(&Tallies) -> &AtomicU64| {
            self.tallies.iter().map(|tallies| counter(tallies).load(Ordering::Relaxed)).sum()
        };
        let mut counters: Vec<(&'static str, u64)> = Vec::new();
        if self.faulty {
            counters.extend([
                ("fault_rx_lost", sum(|t| &t.rx.lost)),
                ("fault_rx_duplicated", sum(|t| &t.rx.duplicated)),
                ("fault_rx_reordered", sum(|t| &t.rx.reordered)),
                ("fault_rx_corrupted", sum(|t| &t.rx.corrupted)),
                ("fault_rx_ce_marked", sum(|t| &t.rx.marked)),
                ("fault_rx_delayed", sum(|t| &t.rx.delayed)),
                ("fault_rx_spared", sum(|t| &t.rx.spared)),
                ("fault_tx_lost", sum(|t| &t.tx.lost)),
                ("fault_tx_duplicated", sum(|t| &t.tx.duplicated)),
                ("fault_tx_reordered", sum(|t| &t.tx.reordered)),
                ("fault_tx_corrupted", sum(|t| &t.tx.corrupted)),
                ("fault_tx_ce_marked", sum(|t| &t.tx.marked)),
                ("fault_tx_delayed", sum(|t| &t.tx.delayed)),
                ("fault_tx_spared", sum(|t| &t.tx.spared)),
            ]);
        }
        if let Some(file) = &self.file {
            let (frames, missed) = file.counts();
            counters.extend([("pcap_frames", frames), ("pcap_missed", missed)]);
        }
        counters
    }
}

impl Port for WrappedPort {
    type Queue = AnyQueue;

    fn caps(&self) -> Caps {
        let mut caps = each!(&self.base, BasePort, port => port.caps());
        if self.faulty {
            caps.mode.push_str(", with faults");
        }
        if self.file.is_some() {
            caps.mode.push_str(", captured");
        }
        caps
    }
    fn fallbacks(&self) -> Vec<Fallback> {
        each!(&self.base, BasePort, port => port.fallbacks())
    }
    fn take_queues(&mut self) -> Vec<AnyQueue> {
        let queues = match &mut self.base {
            BasePort::Shm(port) => port.take_queues().into_iter().map(BaseQueue::Shm).collect(),
            BasePort::Xdp(port) => port.take_queues().into_iter().map(BaseQueue::Xdp).collect(),
        };
        self.wrap_queues(queues)
    }
    fn link_up(&self) -> bool {
        each!(&self.base, BasePort, port => port.link_up())
    }
    fn housekeep(&mut self) {
        each!(&mut self.base, BasePort, port => port.housekeep());
        if let Some(file) = &mut self.file {
            file.drain();
        }
    }
    fn problem(&self) -> Option<PortError> {
        let base = each!(&self.base, BasePort, port => port.problem());
        base.or_else(|| self.file.as_ref()?.problem().cloned())
    }
    fn housekeep_fds(&self) -> Vec<BorrowedFd<'_>> {
        each!(&self.base, BasePort, port => port.housekeep_fds())
    }
    fn addresses(&self) -> Vec<(IpAddr, u8)> {
        each!(&self.base, BasePort, port => port.addresses())
    }
    fn resolve(&mut self, src: IpAddr, dst: IpAddr, deadline: Instant) -> Result<[u8; 6], PortError> {
        each!(&mut self.base, BasePort, port => port.resolve(src, dst, deadline))
    }
    fn next_hop(&mut self, src: IpAddr, dst: IpAddr) -> Option<[u8; 6]> {
        each!(&mut self.base, BasePort, port => port.next_hop(src, dst))
    }
    fn paths_changed(&mut self) -> bool {
        each!(&mut self.base, BasePort, port => port.paths_changed())
    }
    fn set_groups(&mut self, groups: &[IpAddr]) {
        each!(&mut self.base, BasePort, port => port.set_groups(groups));
    }
    fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut counters = each!(&self.base, BasePort, port => port.counters());
        counters.extend(self.own_counters());
        counters
    }
}

impl Port for AnyPort {
    type Queue = AnyQueue;

    fn caps(&self) -> Caps {
        each!(self, wrapped AnyPort, port => port.caps())
    }
    fn fallbacks(&self) -> Vec<Fallback> {
        each!(self, wrapped AnyPort, port => port.fallbacks())
    }
    fn take_queues(&mut self) -> Vec<AnyQueue> {
        match self {
            AnyPort::Shm(port) => port.take_queues().into_iter().map(AnyQueue::Shm).collect(),
            AnyPort::Xdp(port) => port.take_queues().into_iter().map(AnyQueue::Xdp).collect(),
            AnyPort::Wrapped(port) => port.take_queues(),
        }
    }
    fn link_up(&self) -> bool {
        each!(self, wrapped AnyPort, port => port.link_up())
    }
    fn housekeep(&mut self) {
        each!(self, wrapped AnyPort, port => port.housekeep());
    }
    fn problem(&self) -> Option<PortError> {
        each!(self, wrapped AnyPort, port => port.problem())
    }
    fn housekeep_fds(&self) -> Vec<BorrowedFd<'_>> {
        each!(self, wrapped AnyPort, port => port.housekeep_fds())
    }
    fn addresses(&self) -> Vec<(IpAddr, u8)> {
        each!(self, wrapped AnyPort, port => port.addresses())
    }
    fn resolve(&mut self, src: IpAddr, dst: IpAddr, deadline: Instant) -> Result<[u8; 6], PortError> {
        each!(self, wrapped AnyPort, port => port.resolve(src, dst, deadline))
    }
    fn next_hop(&mut self, src: IpAddr, dst: IpAddr) -> Option<[u8; 6]> {
        each!(self, wrapped AnyPort, port => port.next_hop(src, dst))
    }
    fn paths_changed(&mut self) -> bool {
        each!(self, wrapped AnyPort, port => port.paths_changed())
    }
    fn set_groups(&mut self, groups: &[IpAddr]) {
        each!(self, wrapped AnyPort, port => port.set_groups(groups));
    }
    fn counters(&self) -> Vec<(&'static str, u64)> {
        each!(self, wrapped AnyPort, port => port.counters())
    }
}

impl PortQueue for BaseQueue {
    #[inline]
    fn rx_burst<F: FnMut(RxFrame<'_>)>(&mut self, max: usize, f: F) -> usize {
        each!(self, BaseQueue, queue => queue.rx_burst(max, f))
    }
    #[inline]
    fn tx_reserve(&mut self, len: usize) -> Option<TxFrame<'_>> {
        each!(self, BaseQueue, queue => queue.tx_reserve(len))
    }
    #[inline]
    fn tx_commit(&mut self, len: usize) {
        each!(self, BaseQueue, queue => queue.tx_commit(len));
    }
    #[inline]
    fn tx_flush(&mut self) {
        each!(self, BaseQueue, queue => queue.tx_flush());
    }
    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        each!(self, BaseQueue, queue => queue.wait_fds())
    }
    fn arm_wakeup(&mut self) -> bool {
        each!(self, BaseQueue, queue => queue.arm_wakeup())
    }
    fn disarm_wakeup(&mut self) {
        each!(self, BaseQueue, queue => queue.disarm_wakeup());
    }
}

impl PortQueue for AnyQueue {
    #[inline]
    fn rx_burst<F: FnMut(RxFrame<'_>)>(&mut self, max: usize, f: F) -> usize {
        each!(self, wrapped AnyQueue, queue => queue.rx_burst(max, f))
    }
    #[inline]
    fn tx_reserve(&mut self, len: usize) -> Option<TxFrame<'_>> {
        each!(self, wrapped AnyQueue, queue => queue.tx_reserve(len))
    }
    #[inline]
    fn tx_commit(&mut self, len: usize) {
        each!(self, wrapped AnyQueue, queue => queue.tx_commit(len));
    }
    #[inline]
    fn tx_flush(&mut self) {
        each!(self, wrapped AnyQueue, queue => queue.tx_flush());
    }
    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        each!(self, wrapped AnyQueue, queue => queue.wait_fds())
    }
    fn arm_wakeup(&mut self) -> bool {
        each!(self, wrapped AnyQueue, queue => queue.arm_wakeup())
    }
    fn disarm_wakeup(&mut self) {
        each!(self, wrapped AnyQueue, queue => queue.disarm_wakeup());
    }
}

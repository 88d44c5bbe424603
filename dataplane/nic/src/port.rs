//! The contract of a port: [`Port`] for set-up and housekeeping, [`PortQueue`] for one worker.

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use crate::frame::{RxFrame, TxFrame};

/// What a port can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Kind: `shm`, `xdp`, `dpdk`.
    pub kind: &'static str,
    /// Queue pairs of receive and transmit rings.
    pub queues: u16,
    /// Receive queues of the wire.
    pub rx_queues: RxQueues,
    /// MTU in bytes: longest frame less the 14 bytes of the Ethernet header.
    pub mtu: u32,
    /// Ethernet address.
    pub mac: [u8; 6],
    /// Frames longer than one buffer arrive in pieces.
    pub scatter_rx: bool,
    /// The receive queue of a frame follows from its UDP source port (RSS or a flow rule); else any queue may get it.
    pub steering: bool,
    /// Frames carry a receive time.
    pub timestamps: bool,
    /// A worker can sleep on the port's descriptors.
    pub can_sleep: bool,
    /// Memory of another process: lengths and indices are checked at every use.
    pub untrusted_peer: bool,
    /// Mode in words: `shared memory`, `native, copy`, `generic, copy`.
    pub mode: String,
}

/// Receive queues of a wire: frames come in on any of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RxQueues {
    /// Those that the port listens to.
    pub owned: u32,
    /// Those that are there now.
    pub present: u32,
}

/// A fallback in use, for `ferroce status`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallback {
    /// What was wanted.
    pub wanted: String,
    /// What is in use.
    pub got: String,
    /// Why.
    pub reason: String,
    /// How to change it.
    pub hint: String,
}

/// A port as the housekeeping thread sees it.
pub trait Port {
    /// One worker's share.
    type Queue: PortQueue;
    /// What it can do.
    fn caps(&self) -> Caps;
    /// The fallbacks in use.
    fn fallbacks(&self) -> Vec<Fallback>;
    /// Takes the queues, once: queue `i` for worker `i`.
    fn take_queues(&mut self) -> Vec<Self::Queue>;
    /// True while the link is up (for `shm`: a peer is attached).
    fn link_up(&self) -> bool;
    /// Called a few times a second by the housekeeping thread: attach a peer, notice a link change.
    fn housekeep(&mut self);
    /// Why the link is down, or what else is wrong with the port, where it knows.
    fn problem(&self) -> Option<PortError> {
        None
    }
    /// Descriptors that become readable when [`Port::housekeep`] has something to do, for a housekeeping thread that
    /// sleeps on them. They may change with each call of it.
    fn housekeep_fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }
    /// Addresses of the port with their prefix lengths: from the configuration (`shm`), from the kernel (`xdp`).
    fn addresses(&self) -> Vec<(IpAddr, u8)>;
    /// Ethernet address of the next hop towards `dst`, resolved by the kernel's routes and neighbours (`xdp`) or known
    /// (`shm`). Blocks until `deadline`; never called on a worker.
    fn resolve(&mut self, src: IpAddr, dst: IpAddr, deadline: Instant) -> Result<[u8; 6], PortError>;
    /// The Ethernet address of the next hop towards `dst` as far as it is known now: never waits. What is only believed is
    /// confirmed in the background. `None`: not known, or it can't change.
    fn next_hop(&mut self, src: IpAddr, dst: IpAddr) -> Option<[u8; 6]> {
        let _ = (src, dst);
        None
    }
    /// True when a route or a neighbour changed since the last call, so that [`Port::next_hop`] may have another answer.
    fn paths_changed(&mut self) -> bool {
        false
    }
    /// The multicast groups that somebody wants, all of them: a port with a filter lets in these and no others. Called
    /// by housekeeping each round.
    fn set_groups(&mut self, groups: &[IpAddr]) {
        let _ = groups;
    }
    /// Port counters: name and value, names of DPDK's xstats where they exist.
    fn counters(&self) -> Vec<(&'static str, u64)>;
}

/// One worker's receive and transmit queue.
pub trait PortQueue {
    /// Hands at most `max` received frames to `f`, one after the other; returns how many.
    fn rx_burst<F: FnMut(RxFrame<'_>)>(&mut self, max: usize, f: F) -> usize;
    /// Room for a frame of `len` bytes, or `None` if there is none now (`len` is checked against the MTU by the caller;
    /// a longer one gets `None` and is counted).
    fn tx_reserve(&mut self, len: usize) -> Option<TxFrame<'_>>;
    /// Commits the frame last reserved: it leaves with the next flush. The first `len` bytes are sent.
    fn tx_commit(&mut self, len: usize);
    /// Makes committed frames visible to the other side: once per pass.
    fn tx_flush(&mut self);
    /// Descriptors that become readable when frames arrive; empty if the port can't sleep.
    fn wait_fds(&self) -> Vec<BorrowedFd<'_>>;
    /// Before sleeping: asks for a wake-up. Contains the full fence; the caller looks for frames once more after it.
    /// Returns false when frames are waiting already.
    fn arm_wakeup(&mut self) -> bool;
    /// After sleeping: wake-ups are no longer wanted; drains the descriptors.
    fn disarm_wakeup(&mut self);
}

/// Why a port could not be opened: names the attribute, what was asked, what is allowed and how to change it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{attribute}: asked {asked}, allowed {allowed}{}{hint}", if hint.is_empty() { "" } else { "; " })]
pub struct PortError {
    /// Attribute or object: `interface`, `queues`, `mode`, `link`.
    pub attribute: String,
    /// What was asked for.
    pub asked: String,
    /// What is allowed, or what was found.
    pub allowed: String,
    /// How to change it.
    pub hint: String,
}

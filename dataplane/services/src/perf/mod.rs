//! Latency and bandwidth of SEND, WRITE, READ and atomics with perftest's meanings.
//!
//! | test | client | server |
//! |---|---|---|
//! | send latency | sends, waits for the answer | receives, answers |
//! | write latency | writes, watches the last byte of its own buffer | watches, writes back |
//! | read, atomic latency | asks, waits for the completion | passive |
//! | send bandwidth | keeps `tx_depth` sends outstanding | receives and posts again |
//! | write, read, atomic bandwidth | keeps `tx_depth` requests outstanding | passive |
//! | bidirectional | both | both; for send the server begins when the first message is there |
//!
//! Every test ends with exactly `warmup + iters` messages per queue pair, of which the last `iters` are measured; with a
//! duration it ends when the time is over and all that was posted is complete. A passive server, and any server of a test
//! with a duration, ends by [`crate::Handle::stop`]. Round trips are reported whole: perftest prints the half of them for
//! send and write.
//!
//! The order of a set-up: [`PerfMemory::prepare`] on both sides, then exchange addresses and keys, then connect, then
//! [`PerfService::new`]; where receives are posted, the peer may start when [`crate::Handle::is_ready`] says so. A peer
//! may write into prepared memory before the service exists, never before the preparation.
//!
//! A sweep over sizes is one service after the other on the same queue pairs and the same memory, with `largest` in each
//! specification: [`PerfMemory::refill`] between them, while neither side has a test running. It works as long as
//! [`PerfReport::is_clean`].

mod arrive;
mod check;
mod lanes;
mod layout;
mod measure;
mod memory;
mod pace;
mod post;
mod report;
mod service;
mod spec;
mod verify;

use ferroce_mem::Lkey;
use ferroce_verbs::{CqId, Qpn, RemoteAddr, Rkey, UdDest};

pub use layout::PerfLayout;
pub use memory::PerfMemory;
pub use report::{PerfReport, PerfTotals};
pub use service::PerfService;
pub use spec::{PerfMode, PerfOp, PerfRate, PerfSpec, Role, SpecError};

/// Watches a [`PerfService`].
pub type PerfHandle = crate::Handle<PerfReport>;
/// State of a [`PerfService`].
pub type PerfState<'h> = crate::State<'h, PerfReport>;
/// Why a [`PerfService`] failed.
pub type PerfError = crate::ServiceError;

/// What a perf service is connected to. Both sides are given the same [`PerfSpec`] but for the role.
#[derive(Clone)]
pub struct PerfEndpoints {
    /// As many queue pairs as the specification says, in the order in which both sides number them.
    pub qps: Vec<PerfQp>,
    /// Where all their sends complete: at least [`PerfSpec::send_cq_depth`] entries.
    pub send_cq: CqId,
    /// Where all their receives complete: at least [`PerfSpec::recv_cq_depth`] entries (the sum if both are one queue).
    pub recv_cq: CqId,
    /// Prepared memory.
    pub local: PerfMemory,
    /// Local key of all of it, with LOCAL_WRITE.
    pub local_lkey: Lkey,
    /// Its first byte in the region's address space.
    pub local_iova: u64,
}

/// One queue pair of a test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PerfQp {
    /// The local queue pair, in RTS; at least [`PerfSpec::send_queue_depth`] and [`PerfSpec::recv_queue_depth`] deep.
    /// READs and atomics outstanding on the wire are its `max_rd_atomic`.
    pub qpn: Qpn,
    /// What the peer tells of it: its memory at [`PerfSpec::announced_offset`], in its region's address space. Unused for
    /// SEND.
    pub remote_addr: RemoteAddr,
    /// The peer's key of it. Unused for SEND.
    pub remote_rkey: Rkey,
    /// Where datagrams go: over UD, and only there.
    pub datagram: Option<UdDest>,
}

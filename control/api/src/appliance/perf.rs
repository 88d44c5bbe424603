//! Performance tests that run inside appliances, on queue pairs that control connected.

use ferroce_wire::{Qpn, Rkey};
use serde::{Deserialize, Serialize};

use super::object::Lkey;
use crate::error::ApiError;
use crate::ids;

/// Number of a performance test within its appliance.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PerfId(pub u64);

/// What moves the data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PerfOp {
    /// SEND.
    Send,
    /// RDMA WRITE.
    Write,
    /// RDMA READ.
    Read,
}

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PerfKind {
    /// Round trips, one at a time: send and write bounce between the two sides, a read is one by nature.
    Lat,
    /// Bandwidth with `depth` requests outstanding.
    Bw,
}

/// Which side this appliance is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PerfRole {
    /// Measures. Start it second.
    Client,
    /// Answers: posts receives, bounces. Ends by itself when all iterations arrived, except where it is passive (read,
    /// and bandwidth of write): there it ends by `PerfStop`. Start it first.
    Server,
}

/// The peer's region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoteBuffer {
    /// First byte.
    pub addr: u64,
    /// Its key.
    #[serde(with = "ids::rkey")]
    pub rkey: Rkey,
    /// Bytes.
    pub bytes: u64,
}

/// A performance test, with perftest's meanings. Both sides are given the same but for role, queue pair and memory.
///
/// The region must hold [`PerfSpec::region_bytes`]; `PerfStart` fills it, so start the server before the client. The
/// queue pair must hold `depth` sends (latency: 2) and, for SEND, `rx_depth` receives; its completion queues as many.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PerfSpec {
    /// What moves the data.
    pub op: PerfOp,
    /// What is measured.
    pub kind: PerfKind,
    /// Which side this is.
    pub role: PerfRole,
    /// Queue pair in RTS.
    #[serde(with = "ids::qpn")]
    pub qpn: Qpn,
    /// Region of ours, with `local_write` (and the remote right that the peer's operation needs).
    pub lkey: Lkey,
    /// The peer's region: needed for write and read.
    #[serde(default)]
    pub remote: Option<RemoteBuffer>,
    /// Bytes of a message.
    pub size_bytes: u32,
    /// Messages measured, 1 and up; ignored with a duration.
    #[serde(default = "default_iterations")]
    pub iterations: u64,
    /// Messages before those, not measured.
    #[serde(default)]
    pub warmup: u64,
    /// Measure for so long instead of a count. The server then ends by `PerfStop`.
    #[serde(default)]
    pub duration_ms: Option<u32>,
    /// Sends outstanding in a bandwidth test.
    #[serde(default = "default_depth")]
    pub depth: u32,
    /// Receives kept posted (SEND).
    #[serde(default = "default_rx_depth")]
    pub rx_depth: u32,
    /// One completion asked for in so many messages: at most 100, and 1 for messages above 8192 bytes.
    #[serde(default = "default_cq_mod")]
    pub cq_mod: u32,
    /// Messages of at most so many bytes are posted inline (SEND, WRITE): at most the queue pair's `max_inline_data`.
    #[serde(default)]
    pub inline_bytes: u32,
    /// Every message differs from the one before and is compared where it arrives. Slower.
    #[serde(default)]
    pub check_data: bool,
    /// Fails when nothing happens for so long, 1 ..= 600 000. A server that only lets the client read or write is
    /// exempt: it ends by `PerfStop`.
    #[serde(default = "default_deadline_ms")]
    pub deadline_ms: u32,
}

fn default_iterations() -> u64 {
    1000
}
fn default_depth() -> u32 {
    128
}
fn default_rx_depth() -> u32 {
    512
}
fn default_cq_mod() -> u32 {
    100
}
fn default_deadline_ms() -> u32 {
    30_000
}

impl PerfSpec {
    /// A test with perftest's defaults.
    pub fn new(op: PerfOp, kind: PerfKind, role: PerfRole, qpn: Qpn, lkey: Lkey, size_bytes: u32) -> Self {
        PerfSpec {
            op,
            kind,
            role,
            qpn,
            lkey,
            remote: None,
            size_bytes,
            iterations: default_iterations(),
            warmup: 0,
            duration_ms: None,
            depth: default_depth(),
            rx_depth: default_rx_depth(),
            cq_mod: default_cq_mod(),
            inline_bytes: 0,
            check_data: false,
            deadline_ms: default_deadline_ms(),
        }
    }

    /// Bytes that each side's region must hold at least: one message sent and one received, or with `check_data` as
    /// many as may be outstanding, at most about 4 MiB each way.
    pub fn region_bytes(&self) -> u64 {
        let stride = u64::from(self.size_bytes).next_multiple_of(64).max(64);
        match self.check_data {
            false => 2 * stride,
            true => 2 * (2 * stride).max(CHECKED_BYTES),
        }
    }
}

/// Bytes each way that a test with `check_data` spreads its messages over.
const CHECKED_BYTES: u64 = 4 << 20;

/// How far a test is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PerfState {
    /// It runs.
    Running,
    /// It ended well.
    Done,
    /// It failed: see `error`.
    Failed,
    /// It was stopped.
    Stopped,
}

/// Distribution of a time in ns. All samples count, none is dropped.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Percentiles {
    /// Samples.
    pub samples: u64,
    /// Smallest.
    pub min_ns: u64,
    /// Median.
    pub p50_ns: u64,
    /// 90th percentile.
    pub p90_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// 99.9th percentile.
    pub p999_ns: u64,
    /// 99.99th percentile.
    pub p9999_ns: u64,
    /// Largest.
    pub max_ns: u64,
    /// Mean.
    pub mean_ns: f64,
    /// Standard deviation.
    pub stdev_ns: f64,
}

/// Result of a test, also while it runs.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PerfReport {
    /// Which.
    pub id: PerfId,
    /// How far.
    pub state: PerfState,
    /// Why it failed.
    pub error: Option<ApiError>,
    /// Messages done: measured ones when it has ended, all of them while it runs. 0 on a passive server.
    pub iterations: u64,
    /// Payload bytes of those.
    pub bytes: u64,
    /// From the first measured message to the last.
    pub elapsed_ns: u64,
    /// Whole round trips (latency tests, client).
    pub rtt: Option<Percentiles>,
    /// Payload, 10^9 bytes a second (bandwidth tests).
    pub gbytes_per_s: f64,
    /// Best window of a bandwidth test long enough to have one.
    pub peak_gbytes_per_s: Option<f64>,
    /// Messages a second.
    pub msgs_per_s: f64,
}

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
    /// Answers: posts receives, bounces. Ends by itself when all iterations arrived, or at its deadline. Start it
    /// first.
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

/// A performance test. The region must hold at least two messages (sending half and receiving half), on both sides.
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
    /// Region of ours.
    pub lkey: Lkey,
    /// The peer's region: needed for write and read.
    pub remote: Option<RemoteBuffer>,
    /// Bytes of a message, 1 and up.
    pub size_bytes: u32,
    /// Messages measured, 1 and up.
    pub iterations: u64,
    /// Messages before those, not measured.
    pub warmup: u64,
    /// Requests outstanding in a bandwidth test.
    pub depth: u32,
    /// Fails after this time: at most 600 000.
    pub deadline_ms: u32,
}

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
    /// Messages done, warm-up not counted.
    pub iterations: u64,
    /// Payload bytes of those.
    pub bytes: u64,
    /// From the first measured message to the last.
    pub elapsed_ns: u64,
    /// Whole round trips (latency tests, client).
    pub rtt: Option<Percentiles>,
    /// Payload, 10^9 bytes a second (bandwidth tests).
    pub gbytes_per_s: f64,
    /// Messages a second.
    pub msgs_per_s: f64,
}

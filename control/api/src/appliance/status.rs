//! Status, counters and events.

use ferroce_wire::{Gid, MacAddr, Qpn};
use serde::{Deserialize, Serialize};

use super::object::CqHandle;
use super::perf::PerfId;
use crate::ids;

/// A fallback in use.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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

/// Whether received ICRCs are checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IcrcMode {
    /// Checked, and right in every frame sent.
    On,
    /// Diagnosis mode: not checked. Every output must show it.
    Off,
}

/// A counter.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Counter {
    /// Name.
    pub name: String,
    /// Value since the start.
    pub value: u64,
}

/// The port.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortStatus {
    /// Number, from 1.
    pub port: u8,
    /// `shm` or `xdp`.
    pub kind: String,
    /// Name of the link (`shm`) or of the interface (`xdp`).
    pub attached_to: String,
    /// Mode in words: `shared memory`, `native, copy`.
    pub mode: String,
    /// Link is up.
    pub link_up: bool,
    /// Why it is down, or what else is wrong, where the port knows.
    #[serde(default)]
    pub problem: Option<String>,
    /// Ethernet address.
    #[serde(with = "ids::mac")]
    pub mac: MacAddr,
    /// MTU in bytes.
    pub mtu: u32,
    /// Queues.
    pub queues: u16,
    /// Receive queues of the interface that the port listens to.
    #[serde(default)]
    pub rx_queues_owned: u32,
    /// Receive queues that the interface has now.
    #[serde(default)]
    pub rx_queues_present: u32,
    /// Capabilities in force: `scatter_rx`, `steering`, `timestamps`, `can_sleep`, `untrusted_peer`.
    pub caps: Vec<String>,
    /// Addresses with prefix lengths, as text.
    pub addresses: Vec<String>,
    /// Fallbacks in use.
    pub fallbacks: Vec<Fallback>,
    /// Port counters.
    pub counters: Vec<Counter>,
}

/// The arena.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryStatus {
    /// Bytes of the arena.
    pub bytes: u64,
    /// Bytes in use by regions.
    pub used_bytes: u64,
    /// Pages in words: `2 MiB hugepages`.
    pub pages: String,
    /// Why it is not what was asked for.
    pub fallback: Option<Fallback>,
}

/// A worker.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerStatus {
    /// Number.
    pub worker: u8,
    /// Core it is pinned to; none: not pinned.
    pub core: Option<u32>,
    /// `adaptive` or `spin`.
    pub idle: String,
    /// Passes of its loop.
    pub passes: u64,
    /// Time in passes that found work.
    pub busy_ns: u64,
    /// Time in passes that found none, sleep included.
    pub idle_ns: u64,
    /// Times that it slept.
    pub sleeps: u64,
    /// Stages of its loop that took longer than 100 us.
    pub stalls: u64,
    /// Frames handed over to another worker.
    pub forwards: u64,
}

/// What `ferroce status` shows of an appliance.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Status {
    /// Name of the device.
    pub dev: String,
    /// Version of the program.
    pub program: String,
    /// Process.
    pub pid: u32,
    /// Random number of this run.
    pub instance: u64,
    /// Time since the start.
    pub uptime_ms: u64,
    /// EUI-64 of the node.
    pub node_guid: u64,
    /// Whether ICRCs are checked.
    pub icrc: IcrcMode,
    /// Ports.
    pub ports: Vec<PortStatus>,
    /// Memory.
    pub memory: MemoryStatus,
    /// Workers.
    pub workers: Vec<WorkerStatus>,
    /// Fallbacks of the appliance itself (a worker that could not be pinned).
    pub fallbacks: Vec<Fallback>,
    /// Dropped frames by reason, without zeroes.
    pub drops: Vec<Counter>,
    /// Protection domains, regions, completion queues, queue pairs: `pd`, `mr`, `cq`, `qp`.
    pub objects: Vec<Counter>,
    /// Performance tests that run.
    pub perf_running: u32,
    /// Connected clients, the asking one included.
    pub clients: u32,
}

/// All counters.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stats {
    /// Transport counters, summed over workers.
    pub transport: Vec<Counter>,
    /// Dropped frames by reason.
    pub drops: Vec<Counter>,
    /// Port counters.
    pub port: Vec<Counter>,
    /// Counters of the control socket.
    pub control: Vec<Counter>,
}

/// An event with its number.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Event {
    /// Counts from 1 per connection, without gaps.
    pub seq: u64,
    /// What happened.
    pub event: EventBody,
}

/// What happened.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum EventBody {
    /// A queue pair went to error because of a fault of its own.
    QpFatal {
        /// Which.
        #[serde(with = "ids::qpn")]
        qpn: Qpn,
        /// Its cookie.
        cookie: u64,
        /// What is known of the fault, in words: status, peer, PSN, sizes that do not go together.
        #[serde(default)]
        detail: String,
    },
    /// A request was refused with NAK invalid request; the queue pair is in error.
    QpReqErr {
        /// Which.
        #[serde(with = "ids::qpn")]
        qpn: Qpn,
        /// Its cookie.
        cookie: u64,
        /// What is known of the fault, in words.
        #[serde(default)]
        detail: String,
    },
    /// A request was refused with NAK remote access error; the queue pair is in error.
    QpAccessErr {
        /// Which.
        #[serde(with = "ids::qpn")]
        qpn: Qpn,
        /// Its cookie.
        cookie: u64,
        /// What is known of the fault, in words.
        #[serde(default)]
        detail: String,
    },
    /// The first packet arrived in RTR.
    CommEst {
        /// Which.
        #[serde(with = "ids::qpn")]
        qpn: Qpn,
        /// Its cookie.
        cookie: u64,
    },
    /// The send queue is drained.
    SqDrained {
        /// Which.
        #[serde(with = "ids::qpn")]
        qpn: Qpn,
        /// Its cookie.
        cookie: u64,
    },
    /// A completion queue overflowed.
    CqErr {
        /// Which.
        cq: CqHandle,
    },
    /// The port came up.
    PortActive {
        /// Number, from 1.
        port: u8,
    },
    /// The port went down.
    PortErr {
        /// Number, from 1.
        port: u8,
    },
    /// The MTU of the interface changed.
    PortMtu {
        /// Number, from 1.
        port: u8,
        /// Its MTU now, in bytes.
        mtu: u32,
        /// Queue pairs whose path MTU does not fit it: each fails at its first packet that is too long.
        qps_too_long: u32,
    },
    /// An address came.
    GidAdded {
        /// The address.
        #[serde(with = "ids::gid")]
        gid: Gid,
    },
    /// An address went.
    GidRemoved {
        /// The address.
        #[serde(with = "ids::gid")]
        gid: Gid,
    },
    /// A performance test ended.
    PerfEnded {
        /// Which.
        id: PerfId,
    },
    /// The appliance stops.
    Stopping,
    /// The client read too slowly: this many events were dropped here.
    Lost {
        /// How many.
        count: u64,
    },
}

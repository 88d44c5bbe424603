//! Commands and their answers. Names and meanings are libibverbs'.

use ferroce_wire::{Gid, MacAddr, PathMtu, Psn, Qpn, Rkey};
use serde::{Deserialize, Serialize};

use super::object::{
    CqEntry, CqHandle, DeviceInfo, GidEntry, Lkey, MrEntry, Page, PdEntry, PdHandle, PortInfo, QpEntry,
};
use super::perf::{PerfId, PerfReport, PerfSpec};
use super::status::{Stats, Status};
use crate::ids::{self, Owner};

/// Queue pair type.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum QpType {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
}

/// Rights of a region or a queue pair. Local read is always granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Access {
    /// The owner may receive into it.
    pub local_write: bool,
    /// A peer may WRITE.
    pub remote_write: bool,
    /// A peer may READ.
    pub remote_read: bool,
    /// A peer may do atomics.
    pub remote_atomic: bool,
    /// Windows may be bound to it.
    pub mw_bind: bool,
}

impl Access {
    /// Receive into it, and a peer's WRITE and READ: what a performance test needs.
    pub const ALL_RW: Access = Access {
        local_write: true,
        remote_write: true,
        remote_read: true,
        remote_atomic: false,
        mw_bind: false,
    };
    /// libibverbs' bits (`ibv_access_flags`).
    pub const fn bits(self) -> u32 {
        self.local_write as u32
            | (self.remote_write as u32) << 1
            | (self.remote_read as u32) << 2
            | (self.remote_atomic as u32) << 3
            | (self.mw_bind as u32) << 4
    }
    /// From libibverbs' bits; others are ignored.
    pub const fn from_bits(bits: u32) -> Self {
        Access {
            local_write: bits & 1 != 0,
            remote_write: bits & 2 != 0,
            remote_read: bits & 4 != 0,
            remote_atomic: bits & 8 != 0,
            mw_bind: bits & 16 != 0,
        }
    }
}

/// Sizes of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QpCap {
    /// Send work requests outstanding.
    pub max_send_wr: u32,
    /// Receive work requests outstanding.
    pub max_recv_wr: u32,
    /// Scatter/gather entries of a send.
    pub max_send_sge: u32,
    /// Scatter/gather entries of a receive.
    pub max_recv_sge: u32,
    /// Bytes that may be posted inline.
    pub max_inline_data: u32,
}

impl Default for QpCap {
    fn default() -> Self {
        QpCap { max_send_wr: 128, max_recv_wr: 128, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 }
    }
}

/// What a queue pair is made with.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QpSpec {
    /// Type.
    pub qp_type: QpType,
    /// Protection domain.
    pub pd: PdHandle,
    /// Where completions of sends go. Both queues must be on one worker: the queue pair lives there.
    pub send_cq: CqHandle,
    /// Where completions of receives go.
    pub recv_cq: CqHandle,
    /// Sizes.
    pub cap: QpCap,
    /// Every send produces a completion.
    pub sq_sig_all: bool,
    /// Opaque, comes back in listings. The appliance never looks inside.
    pub owner: Owner,
    /// Opaque, comes back in listings and events.
    pub cookie: u64,
}

/// 802.1Q tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vlan {
    /// Priority code point, 0 ..= 7.
    pub pcp: u8,
    /// Drop eligible.
    pub dei: bool,
    /// VLAN identifier, 0 ..= 4095; 0 is a priority tag.
    pub vid: u16,
}

/// Full address vector of a path, resolved. [`Command::ResolvePath`] makes one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddressVector {
    /// Our address.
    #[serde(with = "ids::gid")]
    pub sgid: Gid,
    /// The peer's address. Same family as `sgid`.
    #[serde(with = "ids::gid")]
    pub dgid: Gid,
    /// Our Ethernet address.
    #[serde(with = "ids::mac")]
    pub smac: MacAddr,
    /// The next hop's Ethernet address.
    #[serde(with = "ids::mac")]
    pub dmac: MacAddr,
    /// 802.1Q tag, if the path wants one.
    pub vlan: Option<Vlan>,
    /// DSCP x 4 + ECN.
    pub traffic_class: u8,
    /// IPv6 flow label, 20 bits.
    pub flow_label: u32,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// Service level, 0 ..= 7.
    pub sl: u8,
    /// UDP source port, 0xc000 ..= 0xffff; 0: the appliance chooses one that suits the queue pair.
    pub udp_src: u16,
}

/// Attributes of RESET -> INIT.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InitSpec {
    /// Partition key; 0xffff is the default partition.
    pub pkey: u16,
    /// Remote rights of the queue pair itself.
    pub access: Access,
    /// Queue key (UD), else 0.
    pub qkey: u32,
}

/// Attributes of INIT -> RTR.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RtrSpec {
    /// Path.
    pub av: AddressVector,
    /// Traffic class of the appliance's table; 0 is the default class.
    pub class: u8,
    /// Payload bytes of a full packet.
    #[serde(with = "ids::path_mtu")]
    pub path_mtu: PathMtu,
    /// The peer's queue pair.
    #[serde(with = "ids::qpn")]
    pub dest_qpn: Qpn,
    /// First PSN that we expect.
    #[serde(with = "ids::psn")]
    pub rq_psn: Psn,
    /// READs and atomics of the peer that we serve at once, 0 ..= 128.
    pub max_dest_rd_atomic: u8,
    /// RNR timer index that we ask for, 0 ..= 31; the field's usual choice is 12 (0.64 ms).
    pub min_rnr_timer: u8,
}

/// Attributes of RTR -> RTS.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RtsSpec {
    /// First PSN that we send.
    #[serde(with = "ids::psn")]
    pub sq_psn: Psn,
    /// ACK timeout: 4.096 us x 2^timeout, 0 ..= 31; 0 is infinite.
    pub timeout: u8,
    /// Transport retries, 0 ..= 7.
    pub retry_cnt: u8,
    /// RNR retries, 0 ..= 7; 7 is for ever.
    pub rnr_retry: u8,
    /// READs and atomics of ours outstanding at once, 0 ..= 128.
    pub max_rd_atomic: u8,
}

/// A transition of a queue pair, with the attributes that it needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Modify {
    /// RESET -> INIT.
    Init(InitSpec),
    /// INIT -> RTR.
    Rtr(RtrSpec),
    /// RTR -> RTS.
    Rts(RtsSpec),
    /// RTS -> SQD.
    Sqd,
    /// SQD -> RTS.
    SqdToRts,
    /// Any state but RESET -> ERR.
    Err,
    /// Any state -> RESET.
    Reset,
}

/// What to resolve.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PathQuery {
    /// The peer's address.
    #[serde(with = "ids::gid")]
    pub dgid: Gid,
    /// Our address; without it the first of the peer's family and, if there is one, of its network.
    #[serde(with = "ids::opt_gid", default)]
    pub sgid: Option<Gid>,
    /// DSCP x 4 + ECN of the vector.
    #[serde(default)]
    pub traffic_class: u8,
}

/// What a listing lists.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ListKind {
    /// Protection domains.
    Pd,
    /// Memory regions.
    Mr,
    /// Completion queues.
    Cq,
    /// Queue pairs.
    Qp,
}

/// A command. Answers are named with each.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Command {
    /// Limits: [`Response::Device`].
    QueryDevice,
    /// Port state: [`Response::Port`].
    QueryPort,
    /// The port's addresses: [`Response::Gids`].
    ListGids,
    /// New protection domain: [`Response::Pd`].
    AllocPd {
        /// Opaque, comes back in listings.
        cookie: u64,
    },
    /// Frees one; busy while something belongs to it: [`Response::Done`].
    DeallocPd {
        /// Which.
        pd: PdHandle,
    },
    /// Takes memory from the appliance's arena (zeroed) and registers it: [`Response::Mr`].
    AllocMr {
        /// Its protection domain.
        pd: PdHandle,
        /// How much, 1 and up.
        bytes: u64,
        /// Rights.
        access: Access,
        /// Opaque, comes back in listings.
        cookie: u64,
    },
    /// Ends a registration; busy while a performance test uses it: [`Response::Done`].
    DeregMr {
        /// Which.
        lkey: Lkey,
    },
    /// New completion queue: [`Response::Cq`].
    CreateCq {
        /// On which worker.
        worker: u8,
        /// Entries at least.
        cqe: u32,
        /// Opaque, comes back in listings.
        cookie: u64,
    },
    /// Destroys one; busy while a queue pair uses it: [`Response::Done`].
    DestroyCq {
        /// Which.
        cq: CqHandle,
    },
    /// New queue pair in RESET: [`Response::Qp`].
    CreateQp(Box<QpSpec>),
    /// Makes a transition: [`Response::Done`].
    ModifyQp {
        /// Which.
        #[serde(with = "ids::qpn")]
        qpn: Qpn,
        /// What.
        modify: Modify,
    },
    /// What is known of one: [`Response::QpInfo`].
    QueryQp {
        /// Which.
        #[serde(with = "ids::qpn")]
        qpn: Qpn,
    },
    /// Destroys one; busy while a performance test uses it: [`Response::Done`].
    DestroyQp {
        /// Which.
        #[serde(with = "ids::qpn")]
        qpn: Qpn,
    },
    /// One page of a listing, in the order of the numbers: [`Response::Pds`], `Mrs`, `Cqs` or `Qps`.
    List {
        /// Of what.
        kind: ListKind,
        /// From the last page; 0 to begin.
        cursor: u64,
        /// Entries at most, up to [`super::MAX_PAGE`]; 0: as many as fit.
        limit: u32,
        /// Only what carries this cookie. The others cost nothing, so finding one connection among many is cheap.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cookie: Option<u64>,
    },
    /// Resolves a path: [`Response::Path`]. May take up to a second.
    ResolvePath(PathQuery),
    /// Starts a performance test on a connected queue pair: [`Response::PerfStarted`].
    PerfStart(Box<PerfSpec>),
    /// How far it is: [`Response::Perf`].
    PerfStatus {
        /// Which.
        id: PerfId,
    },
    /// Stops one and forgets its result: [`Response::Perf`] with what was measured until now. What a test that is
    /// stopped half-way has in flight stays with its queue pair: reset that before the next one.
    PerfStop {
        /// Which.
        id: PerfId,
    },
    /// Stops and forgets every test that uses a region: [`Response::Done`], also if there is none. For what a control
    /// process that died left running.
    PerfStopOn {
        /// Which.
        lkey: Lkey,
    },
    /// Everything that `ferroce status` shows of an appliance: [`Response::Status`].
    Status,
    /// Counters: [`Response::Stats`].
    Stats,
    /// Events from now on: [`Response::Done`].
    Subscribe,
    /// Clean stop, all queue pairs first to error, within the deadline: [`Response::Done`] is sent before it begins.
    Shutdown {
        /// At most 60 000.
        deadline_ms: u32,
    },
}

impl Command {
    /// True for commands that change nothing: all that an observer may send.
    pub const fn reads_only(&self) -> bool {
        match self {
            Command::QueryDevice
            | Command::QueryPort
            | Command::ListGids
            | Command::QueryQp { .. }
            | Command::List { .. }
            | Command::ResolvePath(_)
            | Command::PerfStatus { .. }
            | Command::Status
            | Command::Stats
            | Command::Subscribe => true,
            Command::AllocPd { .. }
            | Command::DeallocPd { .. }
            | Command::AllocMr { .. }
            | Command::DeregMr { .. }
            | Command::CreateCq { .. }
            | Command::DestroyCq { .. }
            | Command::CreateQp(_)
            | Command::ModifyQp { .. }
            | Command::DestroyQp { .. }
            | Command::PerfStart(_)
            | Command::PerfStop { .. }
            | Command::PerfStopOn { .. }
            | Command::Shutdown { .. } => false,
        }
    }
}

/// The answer to a command that was done.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Response {
    /// Nothing more to say.
    Done,
    /// Limits.
    Device(DeviceInfo),
    /// Port state.
    Port(PortInfo),
    /// Addresses.
    Gids(Vec<GidEntry>),
    /// A new protection domain.
    Pd {
        /// Its handle.
        pd: PdHandle,
    },
    /// A new region.
    Mr {
        /// For the owner's scatter lists.
        lkey: Lkey,
        /// For peers.
        #[serde(with = "ids::rkey")]
        rkey: Rkey,
        /// First byte in the region's address space.
        iova: u64,
        /// Bytes.
        bytes: u64,
    },
    /// A new completion queue.
    Cq {
        /// Its handle.
        cq: CqHandle,
    },
    /// A new queue pair.
    Qp {
        /// Its number.
        #[serde(with = "ids::qpn")]
        qpn: Qpn,
        /// Where it lives.
        worker: u8,
    },
    /// A queue pair.
    QpInfo(Box<QpEntry>),
    /// A page of protection domains.
    Pds(Page<PdEntry>),
    /// A page of regions.
    Mrs(Page<MrEntry>),
    /// A page of completion queues.
    Cqs(Page<CqEntry>),
    /// A page of queue pairs.
    Qps(Page<QpEntry>),
    /// A path.
    Path(AddressVector),
    /// A performance test runs.
    PerfStarted {
        /// Its number.
        id: PerfId,
    },
    /// A performance test.
    Perf(Box<PerfReport>),
    /// Status.
    Status(Box<Status>),
    /// Counters.
    Stats(Box<Stats>),
}

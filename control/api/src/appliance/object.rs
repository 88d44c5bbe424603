//! Objects as queries and listings show them.

use ferroce_wire::{Gid, MacAddr, PathMtu, Psn, Qpn, Rkey};
use serde::{Deserialize, Serialize};

use super::command::{Access, InitSpec, QpCap, QpType, RtrSpec, RtsSpec};
use crate::ids::{self, Owner};

/// Protection domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PdHandle(pub u32);

/// Completion queue: worker in the high byte, index below.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CqHandle(pub u32);

/// Local key of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Lkey(pub u32);

/// One page of a listing.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Page<T> {
    /// The entries, in the order of their numbers. May be fewer than asked although more follow.
    pub entries: Vec<T>,
    /// Where the next page begins; none: this was the last one.
    pub next: Option<u64>,
}

/// State of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum QpState {
    /// Just made, or reset.
    Reset,
    /// Receives may be posted.
    Init,
    /// Ready to receive.
    Rtr,
    /// Ready to send.
    Rts,
    /// Send queue drained or draining.
    Sqd,
    /// Send queue error (UC, UD).
    Sqe,
    /// Error: everything flushes.
    Err,
}

impl QpState {
    /// As iproute2's `rdma` prints it.
    pub const fn as_str(self) -> &'static str {
        match self {
            QpState::Reset => "RESET",
            QpState::Init => "INIT",
            QpState::Rtr => "RTR",
            QpState::Rts => "RTS",
            QpState::Sqd => "SQD",
            QpState::Sqe => "SQE",
            QpState::Err => "ERR",
        }
    }
}

/// Limits of the device (`ibv_query_device`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceInfo {
    /// EUI-64 of the node, stable over restarts.
    pub node_guid: u64,
    /// Workers.
    pub workers: u8,
    /// Queue pairs.
    pub max_qp: u32,
    /// Work requests of one queue.
    pub max_qp_wr: u32,
    /// Scatter/gather entries.
    pub max_sge: u32,
    /// Inline bytes.
    pub max_inline: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries of one.
    pub max_cqe: u32,
    /// Memory regions.
    pub max_mr: u32,
    /// Bytes of one.
    pub max_mr_size: u64,
    /// Protection domains.
    pub max_pd: u32,
    /// READs and atomics served at once by one queue pair.
    pub max_qp_rd_atom: u8,
    /// READs and atomics outstanding of one queue pair.
    pub max_qp_init_rd_atom: u8,
}

/// State of the port (`ibv_query_port`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortInfo {
    /// Link is up.
    pub active: bool,
    /// Largest path MTU of the device.
    #[serde(with = "ids::path_mtu")]
    pub max_mtu: PathMtu,
    /// Largest path MTU that the interface carries now.
    #[serde(with = "ids::path_mtu")]
    pub active_mtu: PathMtu,
    /// MTU of the interface in bytes.
    pub netdev_mtu: u32,
    /// Ethernet address.
    #[serde(with = "ids::mac")]
    pub mac: MacAddr,
    /// Number of GIDs.
    pub gid_tbl_len: u32,
}

/// An address of the port.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GidEntry {
    /// Index in the table, stable while the address exists.
    pub index: u32,
    /// The address.
    #[serde(with = "ids::gid")]
    pub gid: Gid,
}

/// A protection domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PdEntry {
    /// Its handle.
    pub pd: PdHandle,
    /// Regions and queue pairs that belong to it.
    pub users: u32,
    /// As given.
    pub cookie: u64,
}

/// A memory region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MrEntry {
    /// For the owner's scatter lists.
    pub lkey: Lkey,
    /// For peers.
    #[serde(with = "ids::rkey")]
    pub rkey: Rkey,
    /// Protection domain.
    pub pd: PdHandle,
    /// First byte in the region's address space.
    pub iova: u64,
    /// Bytes.
    pub bytes: u64,
    /// Rights.
    pub access: Access,
    /// As given.
    pub cookie: u64,
}

/// A completion queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CqEntry {
    /// Its handle.
    pub cq: CqHandle,
    /// Where it lives.
    pub worker: u8,
    /// Entries as asked for.
    pub cqe: u32,
    /// Uses by queue pairs: one whose sends and receives both go here counts twice, as in Linux.
    pub users: u32,
    /// As given.
    pub cookie: u64,
}

/// A queue pair.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QpEntry {
    /// Its number.
    #[serde(with = "ids::qpn")]
    pub qpn: Qpn,
    /// Type.
    pub qp_type: QpType,
    /// State.
    pub state: QpState,
    /// Protection domain.
    pub pd: PdHandle,
    /// Where completions of sends go.
    pub send_cq: CqHandle,
    /// Where completions of receives go.
    pub recv_cq: CqHandle,
    /// Sizes in force.
    pub cap: QpCap,
    /// Every send produces a completion.
    pub sq_sig_all: bool,
    /// Attributes of the last RESET -> INIT.
    pub init: Option<InitSpec>,
    /// Attributes of the last INIT -> RTR.
    pub rtr: Option<RtrSpec>,
    /// Attributes of the last RTR -> RTS.
    pub rts: Option<RtsSpec>,
    /// Next PSN to send.
    #[serde(with = "ids::psn")]
    pub sq_psn: Psn,
    /// Next PSN expected.
    #[serde(with = "ids::psn")]
    pub rq_psn: Psn,
    /// Oldest PSN not acknowledged.
    #[serde(with = "ids::psn")]
    pub una_psn: Psn,
    /// Where it lives.
    pub worker: u8,
    /// As given.
    pub owner: Owner,
    /// As given.
    pub cookie: u64,
}

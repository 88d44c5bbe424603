//! Events for control: what happened without a work request, and the detail that an operator needs.
//!
//! Workers push into one bounded queue of the device; a full queue loses the newest event, which is counted
//! (`events_lost`).

use ferroce_verbs::{AsyncEvent, CqId, Gid, PathMtu, Psn, Qpn, WcStatus};
use ferroce_wire::NakCode;

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EngineEventKind {
    /// An asynchronous event in verbs' words.
    Async(AsyncEvent),
    /// The MTU of the interface changed.
    Mtu {
        /// Its MTU now, in bytes.
        netdev_mtu: u32,
        /// Queue pairs whose path MTU does not fit it: each fails at its first packet that is too long.
        too_long: u32,
    },
    /// A completion arrived in a queue for which `req_notify` was called.
    Completion(CqId),
}

/// Why a queue pair went to error: names the peer and the PSN.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FaultDetail {
    /// The peer's address; `None` if the queue pair was never connected.
    pub peer: Option<Gid>,
    /// The peer's queue pair.
    pub peer_qpn: Qpn,
    /// The PSN it concerns: the last one sent, when a peer stopped answering.
    pub psn: Psn,
    /// Status of the work request that failed, if one did.
    pub status: WcStatus,
    /// The NAK that we sent, if we refused a request.
    pub nak: Option<NakCode>,
    /// The two sizes that do not go together, if that is what is wrong.
    pub mtu: Option<MtuFault>,
}

/// Two sizes that do not go together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MtuFault {
    /// A packet that this side had to send is longer than the interface carries now.
    Interface {
        /// Path MTU of the queue pair.
        path_mtu: PathMtu,
        /// MTU of the interface in bytes.
        netdev_mtu: u32,
    },
    /// The peer's packets have another size than the path MTU of this side: the two sides were given different ones.
    Peer {
        /// Payload bytes of the peer's packet.
        bytes: u16,
        /// Path MTU of the queue pair.
        path_mtu: PathMtu,
    },
}

impl std::fmt::Display for MtuFault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            MtuFault::Interface { path_mtu, netdev_mtu } => {
                let path_mtu = path_mtu.bytes();
                write!(f, "path MTU {path_mtu} does not fit the interface, whose MTU is now {netdev_mtu}")?;
                match PathMtu::largest_for_netdev(*netdev_mtu) {
                    Some(largest) => write!(f, " (largest {})", largest.bytes()),
                    None => f.write_str(" (too small for any)"),
                }
            }
            MtuFault::Peer { bytes, path_mtu } => {
                let path_mtu = path_mtu.bytes();
                write!(
                    f,
                    "the peer sends packets of {bytes} bytes, the path MTU of this side is {path_mtu}"
                )?;
                f.write_str(": give both sides the same")
            }
        }
    }
}

/// An event of the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EngineEvent {
    /// The worker it happened on; `None` for what housekeeping saw.
    pub worker: Option<u8>,
    /// What happened.
    pub kind: EngineEventKind,
    /// Detail of a fault.
    pub detail: Option<FaultDetail>,
}

impl std::fmt::Display for EngineEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.kind {
            EngineEventKind::Async(event) => write!(f, "{event:?}")?,
            EngineEventKind::Mtu { netdev_mtu, too_long } => {
                write!(f, "MTU of the interface is now {netdev_mtu}")?;
                if too_long != 0 {
                    write!(f, ", too small for the path MTU of {too_long} queue pairs")?;
                }
            }
            EngineEventKind::Completion(cq) => write!(f, "completion in cq {:#010x}", cq.0)?,
        }
        match &self.detail {
            Some(detail) => write!(f, ": {detail}"),
            None => Ok(()),
        }
    }
}

impl std::fmt::Display for FaultDetail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.status)?;
        if let Some(nak) = self.nak {
            write!(f, ", refused with NAK {nak:?}")?;
        }
        if let Some(mtu) = self.mtu {
            write!(f, ", {mtu}")?;
        }
        match self.peer {
            Some(peer) => write!(f, ", peer {} {:?}, {:?}", peer.to_ip(), self.peer_qpn, self.psn),
            None => write!(f, ", no peer, {:?}", self.psn),
        }
    }
}

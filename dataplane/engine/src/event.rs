//! Events for control: what happened without a work request, and the detail that an operator needs.
//!
//! Workers push into one bounded queue of the device; a full queue loses the newest event, which is counted
//! (`events_lost`).

use ferroce_verbs::{AsyncEvent, CqId, Gid, Psn, Qpn, WcStatus};
use ferroce_wire::NakCode;

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EngineEventKind {
    /// An asynchronous event in verbs' words.
    Async(AsyncEvent),
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
            EngineEventKind::Completion(cq) => write!(f, "completion in cq {:#010x}", cq.0)?,
        }
        if let Some(d) = &self.detail {
            write!(f, ": {:?}", d.status)?;
            if let Some(nak) = d.nak {
                write!(f, ", refused with NAK {nak:?}")?;
            }
            match d.peer {
                Some(peer) => write!(f, ", peer {} {:?}, {:?}", peer.to_ip(), d.peer_qpn, d.psn)?,
                None => write!(f, ", no peer, {:?}", d.psn)?,
            }
        }
        Ok(())
    }
}

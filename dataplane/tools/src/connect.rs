//! Connecting a queue pair, and telling why one failed.

use ferroce_engine::{EngineEvent, EngineEventKind, PathRequest};
use ferroce_services::{Fault, ServiceError};
use ferroce_verbs::{
    Access, AddressVector, AsyncEvent, ClassId, Device, Gid, InitAttrs, PathMtu, Pkey, Psn, Qkey, QpModify,
    Qpn, RtrAttrs, RtsAttrs, VerbsError, WcStatus,
};

use crate::fail::{Fail, Outcome};
use crate::plane::Plane;

/// RNR timer that we ask for: 0.64 ms.
const MIN_RNR_TIMER: u8 = 12;

/// Both ends and the path between them.
#[derive(Clone, Copy, Debug)]
pub struct Connection {
    /// Our queue pair.
    pub qpn: Qpn,
    /// First PSN that we send.
    pub psn: Psn,
    /// Our address.
    pub gid: Gid,
    /// The peer's queue pair.
    pub remote_qpn: Qpn,
    /// First PSN that it sends.
    pub remote_psn: Psn,
    /// Its address.
    pub remote_gid: Gid,
    /// Path MTU.
    pub mtu: PathMtu,
    /// Marking of the path.
    pub marks: Marks,
    /// ACK timeout: 4.096 us x 2^timeout.
    pub timeout: u8,
    /// Transport retries.
    pub retries: u8,
    /// READs and atomics that we have outstanding.
    pub reads: u8,
    /// Those that we serve at once.
    pub serves: u8,
    /// What the peer may do with our memory.
    pub access: Access,
}

/// How packets are marked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Marks {
    /// Service level.
    pub sl: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Flow label.
    pub flow_label: u32,
    /// TTL or hop limit; `None` takes the engine's.
    pub hop_limit: Option<u8>,
}

/// RESET to RTS.
pub fn connect(plane: &Plane, c: &Connection) -> Outcome<()> {
    connect_as(plane, c, Qkey(0)).map(drop)
}

/// RESET to RTS for a queue pair of any type; the queue key is UD's. Returns the path, which UD needs for each datagram.
pub fn connect_as(plane: &Plane, c: &Connection, qkey: Qkey) -> Outcome<AddressVector> {
    let told = |error: VerbsError| Fail::failed(format!("queue pair: {error}"));
    if c.gid.is_ipv4() != c.remote_gid.is_ipv4() {
        return Err(Fail::failed(format!(
            "our GID {} and the peer's {} are not of one family: choose another GID index on one side",
            c.gid, c.remote_gid
        )));
    }
    let request = PathRequest {
        traffic_class: c.marks.traffic_class,
        flow_label: c.marks.flow_label,
        sl: c.marks.sl,
        ..PathRequest::new(c.gid, c.remote_gid, c.qpn, c.remote_qpn)
    };
    let mut av = plane.path(&request)?;
    if let Some(hop_limit) = c.marks.hop_limit {
        av.hop_limit = hop_limit;
    }
    let init = InitAttrs { pkey: Pkey::DEFAULT, access: c.access, qkey };
    let rtr = RtrAttrs {
        av,
        class: ClassId(0),
        path_mtu: c.mtu,
        dest_qpn: c.remote_qpn,
        rq_psn: c.remote_psn,
        max_dest_rd_atomic: c.serves,
        min_rnr_timer: MIN_RNR_TIMER,
    };
    let rts = RtsAttrs {
        sq_psn: c.psn,
        timeout: c.timeout,
        retry_cnt: c.retries,
        rnr_retry: 7,
        max_rd_atomic: c.reads,
    };
    let device = plane.device();
    for step in [QpModify::ToInit(init), QpModify::ToRtr(rtr), QpModify::ToRts(rts)] {
        device.modify_qp(c.qpn, &step).map_err(told)?;
    }
    Ok(av)
}

/// Why a test on a queue pair failed: names the peer and the last PSN.
pub fn explain(plane: &Plane, c: &Connection, error: &ServiceError) -> String {
    let mut text = match error.fault {
        Fault::Completion { status: WcStatus::RetryExcErr, .. } => format!(
            "peer {} QP {:#08x} stopped answering after {} messages ({} retries, timeout {})",
            c.remote_gid,
            c.remote_qpn.get(),
            error.done,
            c.retries,
            timeout_text(c.timeout)
        ),
        _ => format!("peer {} QP {:#08x}: {error}", c.remote_gid, c.remote_qpn.get()),
    };
    text.push_str(&position(plane, c));
    for event in plane.events().iter().filter(|e| concerns(e, c.qpn)) {
        text.push_str(&format!("; {event}"));
    }
    text
}

/// Where the queue pair stands: the last PSN and what is open.
pub fn position(plane: &Plane, c: &Connection) -> String {
    match plane.device().query_qp(c.qpn) {
        Ok(info) => format!(
            "; last PSN sent {:#08x}, oldest not acknowledged {:#08x}, expected from the peer {:#08x}",
            info.sq_psn.retreat(1).get(),
            info.una_psn.get(),
            info.rq_psn.get()
        ),
        // Without it the message is still right.
        Err(_) => String::new(),
    }
}

fn concerns(event: &EngineEvent, qpn: Qpn) -> bool {
    match event.kind {
        EngineEventKind::Async(
            AsyncEvent::QpFatal(q) | AsyncEvent::QpReqErr(q) | AsyncEvent::QpAccessErr(q),
        ) => q == qpn,
        _ => false,
    }
}

/// A timeout index in milliseconds.
fn timeout_text(timeout: u8) -> String {
    match timeout {
        0 => "infinite".into(),
        _ => format!("{:.1} ms", 4.096e-3 * f64::from(1u32 << timeout.min(31))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_in_words() {
        assert_eq!(timeout_text(14), "67.1 ms");
        assert_eq!(timeout_text(0), "infinite");
        assert_eq!(timeout_text(31), "8796093.0 ms");
    }
}

//! The capabilities that this port needs, and the error where one lacks.
//!
//! Owns the list: CAP_NET_RAW for the AF_XDP sockets, CAP_BPF for maps and program, CAP_NET_ADMIN for attaching it and
//! for probing neighbours. Called at set-up. Never raises or drops any.

use rustix::thread::CapabilitySet;

use super::error;
use crate::port::PortError;

const NEEDED: [(CapabilitySet, &str); 3] = [
    (CapabilitySet::NET_RAW, "CAP_NET_RAW"),
    (CapabilitySet::BPF, "CAP_BPF"),
    (CapabilitySet::NET_ADMIN, "CAP_NET_ADMIN"),
];

/// Refuses before anything was changed, naming what lacks.
pub(super) fn require_capabilities(interface: &str) -> Result<(), PortError> {
    let Ok(sets) = rustix::thread::capabilities(None) else { return Ok(()) };
    if NEEDED.iter().all(|(bit, _)| sets.effective.contains(*bit)) {
        return Ok(());
    }
    Err(missing_capability(interface, "AF_XDP"))
}

/// The error of a step that the kernel did not permit.
pub(super) fn missing_capability(interface: &str, step: &str) -> PortError {
    let effective = rustix::thread::capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective);
    let missing: Vec<&str> =
        NEEDED.iter().filter(|(bit, _)| !effective.contains(*bit)).map(|(_, name)| *name).collect();
    let missing = if missing.is_empty() {
        "all three are there: not in the initial user namespace, or a security module forbids it".to_string()
    } else {
        format!("missing {}", missing.join(", "))
    };
    let program =
        std::env::current_exe().map_or_else(|_| "PROGRAM".to_string(), |path| path.display().to_string());
    error(
        "capabilities",
        format!("{step} on {interface}"),
        format!("with CAP_NET_RAW, CAP_BPF and CAP_NET_ADMIN ({missing})"),
        &format!(
            "run as root, or give them: setcap cap_net_raw,cap_bpf,cap_net_admin+ep {program}, or \
             AmbientCapabilities=CAP_NET_RAW CAP_BPF CAP_NET_ADMIN in the unit; shm needs none"
        ),
    )
}

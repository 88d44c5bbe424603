//! What the configuration names, looked up on the machine and checked, before anything is made.
//!
//! Owns no state. Called at set-up. Never changes the interface.

use super::{XdpConfig, error, netlink_error, sys};
use crate::netlink::{Link, Netlink};
use crate::port::PortError;

/// What the configuration names, as found on the machine and found good.
pub(super) struct Found {
    /// The interface.
    pub link: Link,
    /// Its receive queues in use.
    pub rx_queues: u32,
}

impl Found {
    /// Looks and checks.
    ///
    /// # Errors
    /// [`PortError`] naming the ring, interface, queue count or worker count at fault.
    pub fn look(config: &XdpConfig) -> Result<Self, PortError> {
        let name = &config.interface;
        for (ring, entries) in [("rx-ring", config.rx_ring), ("tx-ring", config.tx_ring)] {
            if !entries.is_power_of_two() || !(64..=16384).contains(&entries) {
                return Err(error(
                    ring,
                    entries.to_string(),
                    "a power of two from 64 to 16384".to_string(),
                    "",
                ));
            }
        }
        let mut netlink = Netlink::open().map_err(|e| netlink_error(name, &e))?;
        let Some(link) = netlink.link_by_name(name).map_err(|e| netlink_error(name, &e))? else {
            let mut names: Vec<String> =
                netlink.links().unwrap_or_default().into_iter().map(|l| l.name).collect();
            names.truncate(16);
            let allowed = format!("an interface of this network namespace: {}", names.join(", "));
            return Err(error("interface", name.clone(), allowed, "ip link shows them"));
        };
        if !link.ethernet {
            return Err(error("interface", name.clone(), "an Ethernet interface".to_string(), ""));
        }
        if !link.up {
            let allowed = "an interface that is up: this one is down".to_string();
            return Err(error("interface", name.clone(), allowed, &format!("ip link set {name} up")));
        }
        let rx_queues = receive_queues(&netlink, &link);
        let owned = config.queues.unwrap_or(rx_queues);
        if owned != rx_queues {
            return Err(error(
                "queues",
                format!("{owned} receive queues of {name}"),
                format!("all of them: {rx_queues} queues, {owned} owned"),
                &format!(
                    "leave queues out, or set the interface's number: ethtool -L {name} combined {owned}"
                ),
            ));
        }
        if config.workers == 0 || u32::from(config.workers) > rx_queues {
            return Err(error(
                "workers",
                format!("{} on {name}", config.workers),
                format!("1 to {rx_queues}: {name} has {rx_queues} receive queues"),
                &format!("fewer workers, or more queues: ethtool -L {name} combined {}", config.workers),
            ));
        }
        Ok(Found { link, rx_queues })
    }
}

/// Receive queues in use: from the driver where it says, else from sysfs where that shows this namespace, else as many
/// as were allocated.
fn receive_queues(netlink: &Netlink, link: &Link) -> u32 {
    if let Some(active) = active_queues(netlink, link) {
        return active;
    }
    let folder = std::path::Path::new("/sys/class/net").join(&link.name);
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap_or_default().trim().to_string();
    let mac = link.mac.map(|byte| format!("{byte:02x}")).join(":");
    if read("ifindex") == link.index.to_string() && read("address") == mac {
        let queues = std::fs::read_dir(folder.join("queues")).into_iter().flatten().flatten();
        let count = queues.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"rx-")).count();
        if count > 0 {
            return u32::try_from(count).unwrap_or(u32::MAX);
        }
    }
    link.rx_queues.max(1)
}

/// As many as the driver says that it uses now, where it says.
pub(super) fn active_queues(netlink: &Netlink, link: &Link) -> Option<u32> {
    sys::active_rx_queues(netlink.fd(), &link.name).ok().filter(|n| *n > 0)
}

//! From an address to the Ethernet address of the next hop: route, then neighbour.
//!
//! Owns no state. Invariant: returns by its deadline, and every failure says what was tried. Called by the
//! housekeeping thread through `Port::resolve`; never by a worker.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::{Link, Neighbour, Netlink, NetlinkError, RouteKind};

/// Between two looks at a neighbour that is being resolved.
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// Between two probes: the kernel itself repeats its requests every second.
const PROBE_AGAIN: Duration = Duration::from_millis(500);

/// Why an address has no Ethernet address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// The kernel has no route by this interface.
    #[error("no route to {dst} from {src} by {interface}: {reason}")]
    NoRoute {
        /// Destination.
        dst: IpAddr,
        /// Source.
        src: IpAddr,
        /// Interface.
        interface: String,
        /// The kernel's reason.
        reason: String,
    },
    /// The destination is this host itself.
    #[error("{dst} is an address of this host: frames to it do not leave by {interface}")]
    Local {
        /// Destination.
        dst: IpAddr,
        /// Interface.
        interface: String,
    },
    /// The next hop did not answer.
    #[error(
        "{dst}: next hop {next_hop} on {interface} did not answer within {waited_ms} ms ({probes} {protocol} probes, \
         neighbour state {state})"
    )]
    NoNeighbour {
        /// Destination.
        dst: IpAddr,
        /// Next hop.
        next_hop: IpAddr,
        /// Interface.
        interface: String,
        /// How long it was waited for.
        waited_ms: u128,
        /// How often the kernel was asked to probe.
        probes: u32,
        /// `ARP` or `ND`.
        protocol: &'static str,
        /// Last state of the neighbour entry.
        state: &'static str,
    },
    /// The kernel could not be asked.
    #[error("{dst} on {interface}: {error}")]
    Netlink {
        /// Destination.
        dst: IpAddr,
        /// Interface.
        interface: String,
        /// What it said.
        error: NetlinkError,
    },
}

/// The Ethernet address of the next hop from `src` on `link` towards `dst`. Blocks until `deadline`.
pub fn resolve(
    netlink: &mut Netlink,
    link: &Link,
    src: IpAddr,
    dst: IpAddr,
    deadline: Instant,
) -> Result<[u8; 6], ResolveError> {
    if dst.is_multicast() {
        return Ok(multicast_mac(dst));
    }
    let next_hop = next_hop(netlink, link, src, dst)?;
    let failed = |error| ResolveError::Netlink { dst, interface: link.name.clone(), error };
    let started = Instant::now();
    let (mut probes, mut state, mut last_probe) = (0, "NONE", None::<Instant>);
    loop {
        let entry = netlink.neighbour(link.index, next_hop).map_err(failed)?;
        state = entry.as_ref().map_or(state, Neighbour::state_name);
        // An entry that is only believed is confirmed in the background: the kernel sees none of our own frames and
        // would never notice by itself that the neighbour moved.
        let confirmed = entry.is_some_and(|n| n.confirmed());
        if !confirmed && last_probe.is_none_or(|t| t.elapsed() >= PROBE_AGAIN) {
            match netlink.probe_neighbour(link.index, next_hop) {
                Ok(()) => (probes, last_probe) = (probes + 1, Some(Instant::now())),
                // Without the right to probe, an entry that is there is still good.
                Err(_) if entry.is_some_and(|n| n.usable().is_some()) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        if let Some(mac) = entry.and_then(|n| n.usable()) {
            return Ok(mac);
        }
        let now = Instant::now();
        if now >= deadline {
            return Err(ResolveError::NoNeighbour {
                dst,
                next_hop,
                interface: link.name.clone(),
                waited_ms: started.elapsed().as_millis(),
                probes,
                protocol: if next_hop.is_ipv4() { "ARP" } else { "ND" },
                state,
            });
        }
        std::thread::sleep(LOOK_AGAIN.min(deadline - now));
    }
}

/// The Ethernet address of the next hop as the kernel knows it now, without waiting. An entry that is not confirmed is
/// probed in the background.
pub fn known(netlink: &mut Netlink, link: &Link, src: IpAddr, dst: IpAddr) -> Option<[u8; 6]> {
    if dst.is_multicast() {
        return Some(multicast_mac(dst));
    }
    let next_hop = next_hop(netlink, link, src, dst).ok()?;
    let entry = netlink.neighbour(link.index, next_hop).ok()?;
    if !entry.is_some_and(|n| n.confirmed()) {
        // Refused without the right to probe: then the kernel's own traffic has to confirm it.
        let _ = netlink.probe_neighbour(link.index, next_hop);
    }
    entry.and_then(|n| n.usable())
}

/// Who gets the frame: the gateway of the route by `link`, or `dst` itself.
fn next_hop(netlink: &mut Netlink, link: &Link, src: IpAddr, dst: IpAddr) -> Result<IpAddr, ResolveError> {
    let interface = || link.name.clone();
    let no_route = |reason: String| ResolveError::NoRoute { dst, src, interface: interface(), reason };
    // The interface is part of the question, as it is for the kernel's own RoCE: with two interfaces in one subnet,
    // the port's own is meant.
    let source = (!src.is_unspecified()).then_some(src);
    let route = match netlink.route(dst, source, Some(link.index)) {
        Ok(route) => route,
        Err(NetlinkError::Refused { errno, .. }) => {
            return Err(no_route(match errno {
                Errno::INVAL => format!("{src} is not an address of this host"),
                Errno::NETUNREACH | Errno::HOSTUNREACH => "network unreachable".to_string(),
                other => other.to_string(),
            }));
        }
        Err(error) => return Err(ResolveError::Netlink { dst, interface: interface(), error }),
    };
    match route.kind {
        RouteKind::Local => Err(ResolveError::Local { dst, interface: interface() }),
        RouteKind::Unicast | RouteKind::Multicast if route.oif == link.index => {
            Ok(route.gateway.unwrap_or(dst))
        }
        RouteKind::Unicast | RouteKind::Multicast => {
            Err(no_route(format!("it leaves by interface {}", route.oif)))
        }
        RouteKind::Other(7) => Err(no_route("the route says unreachable".to_string())),
        RouteKind::Other(other) => {
            Err(no_route(format!("the route is of type {other} (blackhole, prohibit, ...)")))
        }
    }
}

fn multicast_mac(dst: IpAddr) -> [u8; 6] {
    match dst {
        IpAddr::V4(ip) => {
            let [_, b, c, d] = ip.octets();
            [0x01, 0x00, 0x5e, b & 0x7f, c, d]
        }
        IpAddr::V6(ip) => {
            let [.., a, b, c, d] = ip.octets();
            [0x33, 0x33, a, b, c, d]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multicast_addresses_follow_from_the_group() {
        assert_eq!(multicast_mac("239.129.2.3".parse().unwrap()), [0x01, 0x00, 0x5e, 0x01, 2, 3]);
        assert_eq!(multicast_mac("ff02::1:ff00:7".parse().unwrap()), [0x33, 0x33, 0xff, 0, 0, 7]);
    }

    #[test]
    fn loopback_addresses_are_local() {
        let mut nl = Netlink::open().unwrap();
        let lo = nl.link_by_name("lo").unwrap().unwrap();
        let ip: IpAddr = "127.0.0.1".parse().unwrap();
        let got = resolve(&mut nl, &lo, ip, ip, Instant::now());
        assert!(matches!(got, Err(ResolveError::Local { .. })), "{got:?}");
    }
}

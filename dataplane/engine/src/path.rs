//! From two addresses to a full address vector: what a queue pair needs before INIT -> RTR.
//!
//! Called by control threads; blocks for the next hop's Ethernet address. Never called on a worker.

use std::time::Instant;

use ferroce_nic::{Port, PortError};
use ferroce_verbs::{AddressVector, Gid, MacAddr, Qpn, VlanTag};

/// Hop limit of our frames.
pub const HOP_LIMIT: u8 = 64;

/// A path to be resolved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathRequest {
    /// Our address.
    pub sgid: Gid,
    /// The peer's address, of the same family.
    pub dgid: Gid,
    /// DSCP x 4 + ECN.
    pub traffic_class: u8,
    /// IPv6 flow label, 20 bits; also decides the UDP source port. 0: worked out from the two queue pair numbers.
    pub flow_label: u32,
    /// Service level, 0 ..= 7.
    pub sl: u8,
    /// 802.1Q tag.
    pub vlan: Option<VlanTag>,
    /// Our queue pair.
    pub qpn: Qpn,
    /// The peer's queue pair.
    pub dest_qpn: Qpn,
}

impl PathRequest {
    /// A path of the default class, without tag.
    pub const fn new(sgid: Gid, dgid: Gid, qpn: Qpn, dest_qpn: Qpn) -> Self {
        PathRequest { sgid, dgid, traffic_class: 0, flow_label: 0, sl: 0, vlan: None, qpn, dest_qpn }
    }
}

/// UDP source port of a path (roce-wire 1.3): folded from the flow label, or from both queue pair numbers, the same on
/// both sides, where there is none. 0xc000 ..= 0xffff.
pub const fn udp_source_port(flow_label: u32, qpn: Qpn, dest_qpn: Qpn) -> u16 {
    let label = if flow_label & 0xf_ffff != 0 {
        flow_label
    } else {
        let mut v = qpn.get() as u64 * dest_qpn.get() as u64;
        v ^= v >> 20;
        v ^= v >> 40;
        v as u32
    };
    (((label & 0x3fff) ^ ((label & 0xf_c000) >> 14)) | 0xc000) as u16
}

/// Resolves a path through the port: the next hop's Ethernet address, the port's own, and the UDP source port.
///
/// # Errors
/// Addresses of two families, or a next hop that does not answer until `deadline`; names both addresses.
pub fn address_vector(
    port: &mut impl Port,
    request: &PathRequest,
    deadline: Instant,
) -> Result<AddressVector, PortError> {
    let (src, dst) = (request.sgid.to_ip(), request.dgid.to_ip());
    if src.is_ipv4() != dst.is_ipv4() {
        return Err(PortError {
            attribute: "dgid".into(),
            asked: format!("{dst} from {src}"),
            allowed: "two addresses of one family".into(),
            hint: "choose another source address".into(),
        });
    }
    let dmac = match request.dgid.multicast_mac() {
        Some(group) => group,
        None => MacAddr(port.resolve(src, dst, deadline)?),
    };
    Ok(AddressVector {
        sgid: request.sgid,
        dgid: request.dgid,
        smac: MacAddr(port.caps().mac),
        dmac,
        vlan: request.vlan,
        traffic_class: request.traffic_class,
        flow_label: request.flow_label & 0xf_ffff,
        hop_limit: HOP_LIMIT,
        sl: request.sl,
        udp_src: udp_source_port(request.flow_label, request.qpn, request.dest_qpn),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_ports_agree_with_the_reference() {
        // Examples of roce-wire 1.3.
        let q = Qpn::new;
        assert_eq!(udp_source_port(0x1, q(0), q(0)), 0xc001);
        assert_eq!(udp_source_port(0x12345, q(0), q(0)), 0xe341);
        assert_eq!(udp_source_port(0xf_ffff, q(0), q(0)), 0xffc0);
        assert_eq!(udp_source_port(0, q(0x11), q(0x12)), 0xc132);
        assert_eq!(udp_source_port(0, q(0x12), q(0x11)), 0xc132);
    }
}

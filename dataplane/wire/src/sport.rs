//! UDP source ports and flow labels, by which switches and NIC queues spread flows (roce-wire 1.3).
//!
//! Each side uses its own port for all that it sends on a queue pair; receivers accept any value.

use crate::ids::Qpn;

/// Lowest source port that RoCEv2 recommends.
pub const FIRST_PORT: u16 = 0xc000;

/// The port that Linux' soft-RoCE gives a queue pair: 0xc000 and 14 bits of a multiplicative hash of its number.
pub const fn rxe_port(local: Qpn) -> u16 {
    let hash = local.get().wrapping_mul(0x61c8_8647) >> 18;
    FIRST_PORT | low_14(hash)
}

/// The port that hardware derives from a flow label: its low 14 bits xor its high 6.
pub const fn port_of_flow_label(flow_label: u32) -> u16 {
    FIRST_PORT | low_14(flow_label ^ ((flow_label & 0x000f_c000) >> 14))
}

/// The flow label that hardware drivers use where none is given: the same seen from either side. 20 bits.
pub const fn flow_label_of_qpns(local: Qpn, remote: Qpn) -> u32 {
    // Two numbers of 24 bits: the product fits.
    let product = (local.get() as u64).wrapping_mul(remote.get() as u64);
    let folded = product ^ (product >> 20);
    let [a, b, c, ..] = (folded ^ (folded >> 40)).to_le_bytes();
    u32::from_le_bytes([a, b, c & 0x0f, 0])
}

/// The flow label that rdma_cm gives a connection between two of its ports. 20 bits.
pub const fn flow_label_of_cm_ports(src_port: u16, dst_port: u16) -> u32 {
    (src_port as u32).wrapping_mul(31).wrapping_add(dst_port as u32) & 0x000f_ffff
}

const fn low_14(value: u32) -> u16 {
    let [_, _, hi, lo] = value.to_be_bytes();
    u16::from_be_bytes([hi & 0x3f, lo])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_those_of_linux() {
        let rxe = [(0x1, 0xd872), (0x10, 0xc722), (0x11, 0xdf94), (0x12, 0xf806)];
        for (qpn, port) in rxe {
            assert_eq!(rxe_port(Qpn::new(qpn)), port);
        }
        for (label, port) in [(0x1, 0xc001), (0x12345, 0xe341), (0xfffff, 0xffc0)] {
            assert_eq!(port_of_flow_label(label), port);
        }
        let (a, b) = (Qpn::new(0x11), Qpn::new(0x12));
        assert_eq!(flow_label_of_qpns(a, b), 0x132);
        assert_eq!(port_of_flow_label(flow_label_of_qpns(b, a)), 0xc132);
        // The vector of roce-wire 9.12: ports 40000 and 7471.
        assert_eq!(flow_label_of_cm_ports(40000, 7471), 0x308ef);
    }
}

//! The GRH area: the first 40 bytes of the buffer of a datagram, as hardware fills it in (roce-wire 8).

use ferroce_wire::emit::pad_of;
use ferroce_wire::{ICRC_BYTES, Ip, Packet};

/// Bytes of the area.
pub(crate) const GRH_BYTES: u32 = 40;

/// The area for a packet: its IPv6 header; or 20 zero bytes and its IPv4 header.
pub(super) fn area(packet: &Packet) -> [u8; GRH_BYTES as usize] {
    // UDP header, BTH, extension headers, payload, pad, ICRC.
    let udp = [
        8,
        12,
        packet.headers.bth.opcode.info().ext_bytes(),
        usize::from(packet.payload_len),
        pad_of(usize::from(packet.payload_len)),
        ICRC_BYTES,
    ]
    .into_iter()
    .fold(0usize, usize::saturating_add);
    // A packet that parsed has a length that fits.
    let udp = u16::try_from(udp).unwrap_or(u16::MAX);
    let mut area = [0; GRH_BYTES as usize];
    match packet.headers.ip {
        Ip::V4 { src, dst, tos, ttl, id, frag } => {
            let [l0, l1] = udp.saturating_add(20).to_be_bytes();
            let ([i0, i1], [f0, f1]) = (id.to_be_bytes(), frag.to_be_bytes());
            let ([s0, s1, s2, s3], [d0, d1, d2, d3]) = (src.octets(), dst.octets());
            let mut header =
                [0x45, tos, l0, l1, i0, i1, f0, f1, ttl, 17, 0, 0, s0, s1, s2, s3, d0, d1, d2, d3];
            let [c0, c1] = checksum(&header).to_be_bytes();
            header[10] = c0;
            header[11] = c1;
            area[20..].copy_from_slice(&header);
        }
        Ip::V6 { src, dst, traffic_class, flow_label, hop_limit } => {
            let first = 6 << 28 | u32::from(traffic_class) << 20 | flow_label & 0x000f_ffff;
            let [v0, v1, v2, v3] = first.to_be_bytes();
            let [l0, l1] = udp.to_be_bytes();
            area[..8].copy_from_slice(&[v0, v1, v2, v3, l0, l1, 17, hop_limit]);
            area[8..24].copy_from_slice(&src.octets());
            area[24..].copy_from_slice(&dst.octets());
        }
    }
    area
}

/// IPv4 header checksum over a header whose checksum field is 0 (RFC 1071).
fn checksum(header: &[u8; 20]) -> u16 {
    let (words, _) = header.as_chunks::<2>();
    let sum = words.iter().fold(0u32, |sum, word| sum.wrapping_add(u32::from(u16::from_be_bytes(*word))));
    let sum = (sum & 0xffff).wrapping_add(sum >> 16);
    let [_, _, high, low] = (sum & 0xffff).wrapping_add(sum >> 16).to_be_bytes();
    !u16::from_be_bytes([high, low])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums that carry, once and again.
    #[test]
    fn checksums_carry() {
        let header =
            [0x45, 0, 0, 0x73, 0, 0, 0x40, 0, 0x40, 0x11, 0, 0, 0xc0, 0xa8, 0, 1, 0xc0, 0xa8, 0, 0xc7];
        assert_eq!(checksum(&header), 0xb861);
        let mut high = [0xff; 20];
        (high[10], high[11]) = (0, 0);
        assert_eq!(checksum(&high), 0);
        (high[18], high[19]) = (0, 8);
        assert_eq!(checksum(&high), 0xfff7);
    }
}

//! What several tests of this crate need.
#![allow(dead_code)]

use ferroce_wire::{Packet, emit};

/// A frame with a fixed Ethernet header around `ip_packet`.
pub fn ethernet(ip_packet: &[u8]) -> Vec<u8> {
    let ethertype = match ip_packet.first().map(|b| b >> 4) {
        Some(6) => [0x86, 0xdd],
        _ => [0x08, 0x00],
    };
    let mut frame = vec![0x02, 0, 0, 0, 0, 2, 0x02, 0, 0, 0, 0, 1];
    frame.extend(ethertype);
    frame.extend(ip_packet);
    frame
}

/// The frames of `testdata/vectors.hex`, by name, with an Ethernet header before them.
pub fn vectors() -> Vec<(String, Vec<u8>)> {
    let mut found: Vec<(String, String)> = Vec::new();
    for line in include_str!("../../testdata/vectors.hex").lines() {
        if line.starts_with('#') {
            continue;
        }
        match line.strip_suffix(':') {
            Some(name) => found.push((name.to_owned(), String::new())),
            None => {
                if let Some((_, hex)) = found.last_mut() {
                    hex.extend(line.chars().filter(|c| !c.is_whitespace()));
                }
            }
        }
    }
    found.into_iter().map(|(name, hex)| (name, ethernet(&unhex(&hex)))).collect()
}

fn unhex(hex: &str) -> Vec<u8> {
    assert_eq!(hex.len() % 2, 0);
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// Emits what was parsed from `frame`, into a buffer that holds other bytes before.
pub fn reemit(packet: &Packet, frame: &[u8]) -> Vec<u8> {
    let start = usize::from(packet.payload_offset);
    let payload = &frame[start..start + usize::from(packet.payload_len)];
    let mut out = vec![0xa5u8; packet.frame_end()];
    let len = emit::seal(&packet.headers, payload, &mut out).unwrap();
    assert_eq!(len, out.len());
    out
}

//! Properties over generated headers and over arbitrary bytes. The bodies are those of the fuzz targets.

#[path = "../../fuzz/src/frames.rs"]
mod harness;

mod common;

use std::collections::BTreeSet;
use std::path::PathBuf;

use ferroce_wire::{Ip, Opcode, ParseError, check_frame, emit, packet};
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn generated_headers_survive_the_round_trip(data in prop::collection::vec(any::<u8>(), 0..200)) {
        harness::roundtrip(&data);
    }

    #[test]
    fn arbitrary_bytes_never_panic(data in prop::collection::vec(any::<u8>(), 0..300)) {
        harness::parse(&data);
    }

    #[test]
    fn damaged_frames_never_panic(
        which in 0usize..7,
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0u8..8), 0..6),
        cut in any::<prop::sample::Index>(),
        grow in 0usize..80,
    ) {
        let (_, mut frame) = common::vectors().swap_remove(which);
        for (at, bit) in flips {
            let at = at.index(frame.len());
            frame[at] ^= 1 << bit;
        }
        harness::parse(&frame);
        frame.resize(frame.len() + grow, 0x5a);
        harness::parse(&frame);
        frame.truncate(cut.index(frame.len()));
        harness::parse(&frame);
    }

    /// A claimed length that the head does not reach, as when a frame comes in segments.
    #[test]
    fn a_frame_length_beyond_the_head_never_panics(
        data in prop::collection::vec(any::<u8>(), 0..140),
        frame_len in 0usize..70_000,
    ) {
        let _ = packet::parse(&data, frame_len);
    }

    /// Another parser finds the same lengths and a right checksum in what we emit.
    #[test]
    fn another_parser_agrees(data in prop::collection::vec(any::<u8>(), 0..200)) {
        let (headers, payload_len) = harness::generate(&mut harness::Bytes::new(&data));
        let payload = vec![0x5a; payload_len];
        let mut frame = vec![0xa5; emit::header_bytes(&headers) + payload_len + emit::pad_of(payload_len) + 4];
        emit::seal(&headers, &payload, &mut frame).unwrap();
        let sliced = etherparse::SlicedPacket::from_ethernet(&frame).unwrap();
        let Some(etherparse::TransportSlice::Udp(udp)) = &sliced.transport else { panic!("not UDP: {headers:?}") };
        let before_udp = frame.len() - udp.slice().len();
        prop_assert_eq!(udp.destination_port(), 4791);
        prop_assert_eq!(udp.source_port(), headers.udp_src);
        prop_assert_eq!(udp.checksum(), headers.udp_checksum);
        prop_assert_eq!(usize::from(udp.length()), frame.len() - before_udp);
        match (headers.ip, sliced.net.as_ref()) {
            (Ip::V4 { src, dst, tos, ttl, id, frag }, Some(etherparse::NetSlice::Ipv4(v4))) => {
                let header = v4.header();
                // It leaves the reserved flag out of its sum.
                if frag & 0x8000 == 0 {
                    prop_assert_eq!(header.to_header().calc_header_checksum(), header.header_checksum());
                }
                prop_assert_eq!((header.source_addr(), header.destination_addr()), (src, dst));
                prop_assert_eq!(usize::from(header.total_len()), frame.len() - before_udp + 20);
                prop_assert_eq!((header.dcp().value() << 2 | header.ecn().value(), header.ttl()), (tos, ttl));
                prop_assert_eq!(header.identification(), id);
            }
            (Ip::V6 { src, dst, traffic_class, flow_label, hop_limit }, Some(etherparse::NetSlice::Ipv6(v6))) => {
                let header = v6.header();
                prop_assert_eq!((header.source_addr(), header.destination_addr()), (src, dst));
                prop_assert_eq!(usize::from(header.payload_length()), frame.len() - before_udp);
                prop_assert_eq!((header.traffic_class(), header.hop_limit()), (traffic_class, hop_limit));
                prop_assert_eq!(header.flow_label().value(), flow_label);
            }
            (ip, net) => panic!("{ip:?} became {net:?}"),
        }
    }
}

/// The generator reaches every opcode, both IP versions, and tagged and untagged frames.
#[test]
fn the_generator_reaches_everything() {
    let mut seen = BTreeSet::new();
    for opcode in 0..Opcode::ALL.len() as u8 {
        for shape in 0..4 {
            let (headers, _) = harness::generate(&mut harness::Bytes::new(&[opcode, shape]));
            let is_v6 = matches!(headers.ip, Ip::V6 { .. });
            seen.insert((headers.bth.opcode.to_u8(), is_v6, headers.eth.vlan.is_some()));
            harness::roundtrip(&[opcode, shape]);
        }
    }
    assert_eq!(seen.len(), Opcode::ALL.len() * 4);
}

fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    entries
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.clone(), std::fs::read(path).unwrap()))
        .collect()
}

/// What the fuzzer once found interesting is tried on every run.
#[test]
fn the_kept_corpus_passes() {
    let parse = corpus("parse");
    let mut accepted = BTreeSet::new();
    for (path, data) in &parse {
        harness::parse(data);
        if let Ok(packet) = check_frame(data) {
            accepted.insert(packet.headers.bth.opcode.to_u8());
        }
        assert!(path.metadata().unwrap().len() <= 8192, "{}: too big to keep", path.display());
    }
    assert!(accepted.len() >= 20, "the corpus holds right frames of {} opcodes only", accepted.len());
    let roundtrip = corpus("roundtrip");
    assert!(roundtrip.len() >= 20, "{} inputs kept for roundtrip", roundtrip.len());
    for (_, data) in &roundtrip {
        harness::roundtrip(data);
    }
}

/// Every prefix of a right frame: refused, and never with a panic.
#[test]
fn every_truncation_is_refused() {
    for (name, frame) in common::vectors() {
        for len in 0..frame.len() {
            let result = check_frame(&frame[..len]);
            assert!(
                matches!(result, Err(ParseError::Truncated | ParseError::BadLength)),
                "{name} cut to {len}: {result:?}"
            );
        }
    }
}

//! Frames made by others, both ways: they parse, their ICRC is right, and emitting what was parsed gives the same bytes.

mod common;

use std::path::PathBuf;

use common::{ethernet, reemit, vectors};
use ferroce_wire::{Icrc, Op, Opcode, Packet, ParseError, Part, Qpn, Syndrome, check_frame, emit, packet};
use pcap_file::pcap::PcapReader;

/// File and number of frames in it. All of them are RoCE: the captures were filtered when they were made.
const CAPTURES: [(&str, usize); 15] = [
    ("cm_rping", 41),
    ("cm_ucmatose", 17),
    ("nvme_connect_read_write_flush_disconnect", 243),
    ("nvme_discover", 73),
    ("rc_cmp_swap", 10),
    ("rc_fetch_add", 10),
    ("rc_odd_lengths", 18),
    ("rc_read_10000B", 20),
    ("rc_read_2B", 10),
    ("rc_send_2B", 20),
    ("rc_send_9001B", 20),
    ("rc_write_10000B", 20),
    ("rc_write_2B", 20),
    ("uc_write_2B", 10),
    ("ud_send_2B", 10),
];

fn captures() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("testdata/captures")
}

fn frames(name: &str) -> Vec<Vec<u8>> {
    let path = captures().join(format!("{name}.pcap"));
    let file = std::fs::File::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut reader = PcapReader::new(std::io::BufReader::new(file)).unwrap();
    let mut frames = Vec::new();
    while let Some(record) = reader.next_packet() {
        let record = record.unwrap();
        assert_eq!(record.orig_len as usize, record.data.len(), "{name}: cut by the capture");
        frames.push(record.data.into_owned());
    }
    frames
}

/// What another parser says of the frame: UDP payload length, if the destination port is RoCE's.
fn foreign_view(frame: &[u8]) -> Option<usize> {
    let sliced = etherparse::SlicedPacket::from_ethernet(frame).unwrap();
    match sliced.transport {
        Some(etherparse::TransportSlice::Udp(udp)) if udp.destination_port() == 4791 => {
            Some(udp.payload().len())
        }
        _ => None,
    }
}

#[test]
fn every_capture_is_listed() {
    let mut found: Vec<_> = std::fs::read_dir(captures())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "pcap"))
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    found.sort();
    assert_eq!(found, CAPTURES.map(|(name, _)| name.to_owned()));
}

#[test]
fn captured_frames_parse_and_are_emitted_again_byte_for_byte() {
    for (name, expected) in CAPTURES {
        let frames = frames(name);
        let mut roce = 0;
        for (number, frame) in frames.iter().enumerate() {
            let Some(udp_payload) = foreign_view(frame) else { continue };
            let packet = check_frame(frame).unwrap_or_else(|e| panic!("{name} frame {number}: {e:?}"));
            assert_eq!(
                packet.frame_end() - usize::from(packet.ip_offset) - 28,
                udp_payload,
                "{name} frame {number}"
            );
            assert_eq!(
                reemit(&packet, frame),
                frame[..packet.frame_end()],
                "{name} frame {number}: {packet}"
            );
            roce += 1;
        }
        assert_eq!((frames.len(), roce), (expected, expected), "{name}");
    }
}

/// WIRE-3: SENDs and WRITEs of rdma_rxe whose lengths need padding. The payload is exactly as long as the message, the pad
/// count makes up the four bytes, the ICRC lies behind it (that it is right, and that we emit the same bytes, is what
/// all captures are checked for).
#[test]
fn wire_3_lengths_that_need_padding() {
    let mut frames = frames("rc_odd_lengths").into_iter();
    for (i, len) in [0usize, 1, 2, 3, 5, 1021, 1023, 1025].into_iter().enumerate() {
        for write in [false, true] {
            let mut message = Vec::new();
            loop {
                let frame = frames.next().expect("a frame");
                let packet = check_frame(&frame).expect("well-formed");
                let info = packet.headers.bth.opcode.info();
                let start = usize::from(packet.payload_offset);
                let end = start + usize::from(packet.payload_len);
                message.extend_from_slice(&frame[start..end]);
                assert_eq!(info.op, if write { Op::Write } else { Op::Send });
                assert_eq!(usize::from(packet.pad), (4 - (end - start) % 4) % 4, "{len} bytes");
                assert_eq!(packet.icrc_offset(), end + usize::from(packet.pad), "{len} bytes");
                if let Some(reth) = packet.headers.ext.reth {
                    assert_eq!(reth.len.0 as usize, len);
                }
                if matches!(info.part, Part::Last | Part::Only) {
                    break;
                }
            }
            let sent = |at: usize| (at * 31 + i * 7 + usize::from(write) + 1) as u8;
            assert_eq!(message, (0..len).map(sent).collect::<Vec<_>>(), "{len} bytes");
        }
    }
    assert_eq!(frames.next(), None);
}

#[test]
fn a_head_of_128_bytes_gives_the_same_packet() {
    for (name, _) in CAPTURES {
        for frame in frames(name) {
            let head = &frame[..frame.len().min(ferroce_wire::MAX_HEAD_BYTES)];
            assert_eq!(packet::parse(head, frame.len()), packet::parse(&frame, frame.len()), "{name}");
        }
    }
}

#[test]
fn an_icrc_over_scattered_payload_is_the_same() {
    for frame in frames("rc_write_10000B") {
        let packet = check_frame(&frame).unwrap();
        let (head, body) = frame[..packet.icrc_offset()].split_at(usize::from(packet.payload_offset));
        let start = Icrc::over_headers(head, usize::from(packet.ip_offset));
        let scattered = body.chunks(37).fold(start, Icrc::update);
        assert_eq!(scattered.to_wire(), frame[packet.icrc_offset()..packet.frame_end()]);
    }
}

/// The mask covers just what routers change and the one byte of the BTH that they mark.
#[test]
fn the_icrc_ignores_what_routers_change_and_nothing_else() {
    for (name, frame) in vectors() {
        let packet = check_frame(&frame).unwrap();
        let ip = usize::from(packet.ip_offset);
        let masked: Vec<usize> = match packet.headers.ip {
            ferroce_wire::Ip::V4 { .. } => [1, 8, 10, 11, 26, 27, 32].map(|o| ip + o).to_vec(),
            ferroce_wire::Ip::V6 { .. } => [1, 2, 3, 7, 46, 47, 52].map(|o| ip + o).to_vec(),
        };
        let head = usize::from(packet.payload_offset);
        let right = Icrc::over_headers(&frame[..head], ip);
        // The first byte of IPv6 is half masked, and its version nibble chooses the mask: left out.
        for at in (0..head).filter(|at| *at != ip) {
            let mut changed = frame.clone();
            changed[at] ^= 0xff;
            let same = Icrc::over_headers(&changed[..head], ip) == right;
            assert_eq!(same, at < ip || masked.contains(&at), "{name}: byte {at}");
        }
    }
}

fn vector(prefix: &str) -> (Packet, Vec<u8>) {
    let (_, frame) = vectors().into_iter().find(|(name, _)| name.starts_with(prefix)).unwrap();
    (check_frame(&frame).unwrap(), frame)
}

#[test]
fn vectors_parse_and_are_emitted_again_byte_for_byte() {
    let vectors = vectors();
    assert_eq!(vectors.len(), 7);
    for (name, frame) in vectors {
        let packet = check_frame(&frame).unwrap_or_else(|e| panic!("{name}: {e:?}"));
        assert_eq!(packet.frame_end(), frame.len(), "{name}");
        assert_eq!(reemit(&packet, &frame), frame, "{name}");
    }
}

#[test]
fn vectors_mean_what_they_should() {
    let (cnp, frame) = vector("V1");
    assert_eq!(cnp.headers.bth, ferroce_wire::Bth::cnp(Qpn::new(0x118)));
    assert_eq!(cnp.headers.ext, ferroce_wire::Ext::CNP);
    assert!(cnp.headers.bth.becn());
    assert_eq!((cnp.headers.udp_src, cnp.payload_len, frame.len()), (0, 0, 74));

    let (uc, frame) = vector("V2");
    assert_eq!((uc.payload_len, uc.pad, uc.headers.udp_checksum), (18, 2, 0xaca2));
    assert_eq!(frame[usize::from(uc.payload_offset)], 0x46);

    let (send, frame) = vector("V3");
    assert_eq!(&frame[54..59], b"hello");
    assert_eq!((send.headers.bth.ack_req, send.pad, send.headers.ip.traffic_class()), (true, 3, 0x6a));

    let (ack, _) = vector("V4");
    let aeth = ack.headers.ext.aeth.unwrap();
    assert_eq!((aeth.syndrome, aeth.msn.get()), (Syndrome::ACK_NO_CREDITS, 1));

    let (write, _) = vector("V5");
    let reth = write.headers.ext.reth.unwrap();
    assert_eq!((reth.addr.0, reth.rkey.0, reth.len.0), (0x7f00_1122_3344, 0x12345, 8));
    assert_eq!((write.headers.bth.dest_qpn.get(), write.headers.bth.psn.get()), (0xab_cdef, 0xff_ffff));
    assert!(matches!(
        write.headers.ip,
        ferroce_wire::Ip::V6 { traffic_class: 2, flow_label: 0x12345, hop_limit: 0x40, .. }
    ));

    let (read, _) = vector("V6");
    assert_eq!(read.headers.bth.opcode.op(), Op::ReadRequest);

    let (cm, _) = vector("V7");
    assert_eq!((cm.headers.bth.opcode, cm.headers.bth.dest_qpn), (Opcode::UdSendOnly, Qpn::GSI));
    assert_eq!(cm.payload_len, 256);
}

#[test]
fn printing_names_what_matters() {
    let lines: Vec<String> =
        vectors().iter().map(|(_, frame)| check_frame(frame).unwrap().to_string()).collect();
    let expected = include_str!("../testdata/vectors.txt");
    assert_eq!(lines.join("\n") + "\n", expected);
}

/// The shortest packet fits into 58 bytes, so Ethernet pads it: the UDP length decides where it ends.
#[test]
fn ethernet_padding_is_not_payload() {
    let (_, mut frame) = vectors().into_iter().find(|(name, _)| name.starts_with("V4")).unwrap();
    let unpadded = check_frame(&frame).unwrap();
    frame.resize(frame.len() + 40, 0xee);
    assert_eq!(check_frame(&frame), Ok(unpadded));
}

#[test]
fn a_vlan_tag_moves_everything_by_four() {
    for (name, frame) in vectors() {
        let plain = check_frame(&frame).unwrap();
        let mut tagged = frame.clone();
        // PCP 5, DEI, VID 0xabc.
        tagged.splice(12..12, [0x81, 0x00, 0xba, 0xbc]);
        let packet = check_frame(&tagged).unwrap_or_else(|e| panic!("{name}: {e:?}"));
        assert_eq!(packet.ip_offset, 18);
        assert_eq!(packet.headers.eth.vlan, Some(ferroce_wire::VlanTag { pcp: 5, dei: true, vid: 0xabc }));
        assert_eq!((packet.headers.bth, packet.headers.ext), (plain.headers.bth, plain.headers.ext));
        assert_eq!(reemit(&packet, &tagged), tagged, "{name}");
    }
}

#[test]
fn one_wrong_payload_bit_is_found() {
    let frame = ethernet(&[0x45]);
    assert_eq!(check_frame(&frame), Err(ParseError::Truncated));
    for (name, frame) in vectors() {
        let packet = check_frame(&frame).unwrap();
        for at in usize::from(packet.payload_offset)..packet.frame_end() {
            for bit in 0..8 {
                let mut wrong = frame.clone();
                wrong[at] ^= 1 << bit;
                assert_eq!(check_frame(&wrong), Err(ParseError::BadIcrc), "{name}: byte {at} bit {bit}");
            }
        }
    }
}

#[test]
fn sealing_needs_the_whole_frame_and_emitting_the_headers() {
    let (packet, frame) = vector("V3");
    let payload = b"hello";
    let mut out = [0xa5u8; 256];
    for room in 0..frame.len() {
        assert_eq!(emit::seal(&packet.headers, payload, &mut out[..room]), Err(emit::EmitError::NoRoom));
    }
    assert!(out.iter().all(|b| *b == 0xa5), "a refused frame left traces");
    assert_eq!(emit::seal(&packet.headers, payload, &mut out), Ok(frame.len()));
    assert_eq!(&out[..frame.len()], frame);
    assert!(out[frame.len()..].iter().all(|b| *b == 0xa5));
    assert_eq!(emit::emit(&packet.headers, 5, &mut out[..53]), Err(emit::EmitError::NoRoom));
    assert_eq!(emit::emit(&packet.headers, 5, &mut out[..54]), Ok(54));
}

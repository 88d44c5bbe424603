//! Each reason for refusing a frame, produced from a right frame by one change.

mod common;

use std::collections::BTreeMap;

use ferroce_wire::{
    Bth, EmitError, Eth, Ext, Headers, Imm, Ip, MacAddr, Opcode, ParseError, Psn, Qpn, VlanTag, check_frame,
    emit,
};

const IP: usize = 14;
const UDP: usize = IP + 20;
const BTH: usize = UDP + 8;

/// IPv4, RC SEND only with five bytes and three pad bytes (vector V3).
fn v4() -> Vec<u8> {
    common::vectors().swap_remove(2).1
}

/// IPv6, RC WRITE only with eight bytes (vector V5).
fn v6() -> Vec<u8> {
    common::vectors().swap_remove(4).1
}

/// Puts the IPv4 checksum right again after a change.
fn fix_checksum(frame: &mut [u8]) {
    let mut header = etherparse::Ipv4Header::from_slice(&frame[IP..]).unwrap().0;
    header.header_checksum = header.calc_header_checksum();
    frame[IP + 10..IP + 12].copy_from_slice(&header.header_checksum.to_be_bytes());
}

fn changed(mut frame: Vec<u8>, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    change(&mut frame);
    frame
}

fn v4_with(change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    changed(v4(), |frame| {
        change(frame);
        fix_checksum(frame);
    })
}

fn set_lengths(frame: &mut [u8], udp_len: u16) {
    frame[IP + 2..IP + 4].copy_from_slice(&(udp_len + 20).to_be_bytes());
    frame[UDP + 4..UDP + 6].copy_from_slice(&udp_len.to_be_bytes());
}

/// (what is wrong, the frame, why it is refused)
fn cases() -> Vec<(&'static str, Vec<u8>, ParseError)> {
    let mut cases = outer_cases();
    cases.extend(address_cases());
    cases.extend(transport_cases());
    cases
}

fn outer_cases() -> Vec<(&'static str, Vec<u8>, ParseError)> {
    use ParseError::*;
    vec![
        ("nothing", vec![], Truncated),
        ("half an Ethernet header", v4()[..13].to_vec(), Truncated),
        ("half an IPv4 header", v4()[..30].to_vec(), Truncated),
        ("half an IPv6 header", v6()[..50].to_vec(), Truncated),
        ("ARP", changed(v4(), |f| f[12..14].copy_from_slice(&[8, 6])), NotIp),
        ("RoCE v1", changed(v4(), |f| f[12..14].copy_from_slice(&[0x89, 0x15])), NotIp),
        ("two tags", changed(v4(), |f| drop(f.splice(12..12, [0x81, 0, 0, 1, 0x81, 0, 0, 2]))), NotIp),
        ("a service tag", changed(v4(), |f| drop(f.splice(12..12, [0x88, 0xa8, 0, 1]))), NotIp),
        ("IPv6 under IPv4's EtherType", changed(v6(), |f| f[12..14].copy_from_slice(&[8, 0])), BadIpHeader),
        (
            "IPv4 under IPv6's EtherType",
            changed(v4(), |f| f[12..14].copy_from_slice(&[0x86, 0xdd])),
            BadIpHeader,
        ),
        ("IPv4 options", changed(v4(), |f| f[IP] = 0x46), BadIpHeader),
        ("TTL changed, checksum not", changed(v4(), |f| f[IP + 8] ^= 1), BadIpChecksum),
        ("more fragments", v4_with(|f| f[IP + 6] |= 0x20), Fragment),
        ("a fragment offset", v4_with(|f| f[IP + 7] = 1), Fragment),
        ("an IPv6 fragment header", changed(v6(), |f| f[IP + 6] = 44), Fragment),
        ("TCP", v4_with(|f| f[IP + 9] = 6), NotUdp),
        ("IPv6 hop-by-hop options", changed(v6(), |f| f[IP + 6] = 0), NotUdp),
        ("DNS", changed(v4(), |f| f[UDP + 2..UDP + 4].copy_from_slice(&[0, 53])), NotRoce),
        (
            "total length below the header",
            v4_with(|f| f[IP + 2..IP + 4].copy_from_slice(&[0, 19])),
            BadLength,
        ),
        ("total length beyond the frame", v4_with(|f| f[IP + 3] += 4), BadLength),
        ("IPv6 length beyond the frame", changed(v6(), |f| f[IP + 5] += 4), BadLength),
        ("UDP shorter than IP says", changed(v4(), |f| f[UDP + 5] -= 4), BadLength),
        ("UDP longer than IP says", changed(v4(), |f| f[UDP + 5] += 4), BadLength),
        ("no room for BTH and ICRC", v4_with(|f| set_lengths(f, 20)), BadLength),
        (
            "no room for the extension headers",
            v4_with(|f| {
                f[BTH] = Opcode::RcReadRequest.to_u8();
                set_lengths(f, 36);
                f.truncate(IP + 20 + 36);
            }),
            BadLength,
        ),
    ]
}

fn address_cases() -> Vec<(&'static str, Vec<u8>, ParseError)> {
    use ParseError::*;
    let src4 = |a: [u8; 4]| v4_with(|f| f[IP + 12..IP + 16].copy_from_slice(&a));
    let dst4 = |a: [u8; 4]| v4_with(|f| f[IP + 16..IP + 20].copy_from_slice(&a));
    let octets = |text: &str| text.parse::<std::net::Ipv6Addr>().unwrap().octets();
    let src6 = |text| changed(v6(), |f| f[IP + 8..IP + 24].copy_from_slice(&octets(text)));
    let dst6 = |text| changed(v6(), |f| f[IP + 24..IP + 40].copy_from_slice(&octets(text)));
    vec![
        ("from 0.0.0.0", src4([0; 4]), BadSource),
        ("from a group", src4([224, 0, 0, 1]), BadSource),
        ("from broadcast", src4([255; 4]), BadSource),
        ("from loopback to elsewhere", src4([127, 0, 0, 1]), BadSource),
        ("from elsewhere to loopback", dst4([127, 0, 0, 1]), BadSource),
        ("from ::", src6("::"), BadSource),
        ("from an IPv6 group", src6("ff02::1"), BadSource),
        ("from a mapped address", src6("::ffff:10.0.0.1"), BadSource),
        ("from ::1 to elsewhere", src6("::1"), BadSource),
        ("to 0.0.0.0", dst4([0; 4]), BadDestination),
        ("to broadcast", dst4([255; 4]), BadDestination),
        ("to ::", dst6("::"), BadDestination),
        ("to a mapped address", dst6("::ffff:10.0.0.1"), BadDestination),
    ]
}

fn transport_cases() -> Vec<(&'static str, Vec<u8>, ParseError)> {
    use ParseError::*;
    let with = |at: usize, value: u8| changed(v4(), |f| f[at] = value);
    let ack = || common::vectors().swap_remove(3).1;
    vec![
        ("transport version 1", with(BTH + 1, 0x71), BadVersion),
        ("reserved opcode", with(BTH, 0x15), UnknownOpcode),
        ("a vendor's opcode", with(BTH, 0xc0), UnknownOpcode),
        (
            "pad beyond the payload",
            changed(ack(), |f| {
                f[BTH] = Opcode::RcSendLastImm.to_u8();
                f[BTH + 1] |= 0x30;
            }),
            BadPad,
        ),
        ("pad of an ACK", changed(ack(), |f| f[BTH + 1] |= 0x10), BadPad),
        (
            "payload and pad no multiple of 4",
            v4_with(|f| {
                f.truncate(f.len() - 1);
                set_lengths(f, 31);
            }),
            BadPad,
        ),
        (
            "an ACK with payload",
            v4_with(|f| {
                f[BTH] = Opcode::RcAck.to_u8();
                f[BTH + 1] = 0x40;
            }),
            UnexpectedPayload,
        ),
        ("QPN 0", changed(v4(), |f| f[BTH + 5..BTH + 8].fill(0)), BadDestQpn),
        ("multicast to RC", changed(v4(), |f| f[BTH + 5..BTH + 8].fill(0xff)), BadDestQpn),
        ("a payload bit", with(54, b'j'), BadIcrc),
        ("an ICRC bit", changed(v4(), |f| *f.last_mut().unwrap() ^= 0x80), BadIcrc),
        (
            "4100 bytes of payload",
            v4_with(|f| {
                f[BTH + 1] = 0x40;
                f.resize(BTH + 12 + 4100 + 4, 0);
                set_lengths(f, 8 + 12 + 4100 + 4);
            }),
            Oversized,
        ),
    ]
}

#[test]
fn each_wrong_frame_is_refused_for_its_reason() {
    for (what, frame, reason) in cases() {
        assert_eq!(check_frame(&frame), Err(reason), "{what}");
    }
}

#[test]
fn every_reason_has_a_frame_that_produces_it() {
    let mut seen: BTreeMap<&str, usize> = ParseError::ALL.iter().map(|reason| (reason.name(), 0)).collect();
    for (_, _, reason) in cases() {
        *seen.get_mut(reason.name()).unwrap() += 1;
    }
    let never: Vec<_> = seen.iter().filter(|(_, times)| **times == 0).map(|(name, _)| *name).collect();
    assert_eq!(never, [""; 0]);
}

#[test]
fn reasons_index_their_counters() {
    assert_eq!(ParseError::ALL.len(), ParseError::COUNT);
    for (index, reason) in ParseError::ALL.iter().enumerate() {
        assert_eq!(reason.index(), index);
        assert!(reason.name().bytes().all(|b| b.is_ascii_lowercase() || b == b'_'));
        assert!(!reason.to_string().is_empty());
    }
    let names: std::collections::BTreeSet<_> = ParseError::ALL.iter().map(|reason| reason.name()).collect();
    assert_eq!(names.len(), ParseError::COUNT);
}

/// Right frames that stand at the edge of a rule.
#[test]
fn frames_at_the_edge_are_accepted() {
    let loopback = |f: &mut Vec<u8>| {
        f[IP + 12..IP + 16].copy_from_slice(&[127, 0, 0, 1]);
        f[IP + 16..IP + 20].copy_from_slice(&[127, 0, 0, 2]);
    };
    let frame = v4_with(loopback);
    assert_eq!(
        check_frame(&frame),
        Err(ParseError::BadIcrc),
        "loopback to loopback passes the address check"
    );
    // A UDP checksum is not looked at, whatever it is.
    assert!(check_frame(&changed(v4(), |f| f[UDP + 6..UDP + 8].fill(0x77))).is_ok());
    // Not "don't fragment": taken, though we never send it.
    assert_eq!(check_frame(&v4_with(|f| f[IP + 6] = 0)), Err(ParseError::BadIcrc));
    // Multicast datagram.
    let multicast = headers(Opcode::UdSendOnly, Qpn::MULTICAST);
    let mut out = [0u8; 128];
    let len = emit::seal(&multicast, b"abcd", &mut out).unwrap();
    assert_eq!(check_frame(&out[..len]).unwrap().headers, multicast);
}

fn headers(opcode: Opcode, dest_qpn: Qpn) -> Headers {
    let deth = ferroce_wire::Deth { qkey: ferroce_wire::Qkey::GSI, resv: 0, src_qpn: Qpn::GSI };
    Headers {
        eth: Eth { dst: MacAddr([2; 6]), src: MacAddr([4; 6]), vlan: None },
        ip: Ip::V4 {
            src: [10, 0, 0, 1].into(),
            dst: [239, 0, 0, 1].into(),
            tos: 0,
            ttl: 64,
            id: 0,
            frag: 0x4000,
        },
        udp_src: 0xc000,
        udp_checksum: 0,
        bth: Bth::new(opcode, dest_qpn, Psn::new(7)),
        ext: Ext { deth: (opcode.info().deth).then_some(deth), ..Ext::NONE },
    }
}

#[test]
fn header_values_that_no_frame_can_carry_are_refused() {
    let good = headers(Opcode::UdSendOnly, Qpn::GSI);
    let v6 = |flow_label| Ip::V6 {
        src: "fd00::1".parse().unwrap(),
        dst: "fd00::2".parse().unwrap(),
        traffic_class: 0,
        flow_label,
        hop_limit: 64,
    };
    let tag = |pcp, vid| Eth { vlan: Some(VlanTag { pcp, dei: false, vid }), ..good.eth };
    let v4 =
        |frag| Ip::V4 { src: [10, 0, 0, 1].into(), dst: [10, 0, 0, 2].into(), tos: 0, ttl: 64, id: 0, frag };
    let cases: [(&str, Headers, usize, EmitError); 10] = [
        ("PCP 8", Headers { eth: tag(8, 1), ..good }, 4, EmitError::BadField),
        ("VID 4096", Headers { eth: tag(0, 4096), ..good }, 4, EmitError::BadField),
        ("flow label of 21 bits", Headers { ip: v6(1 << 20), ..good }, 4, EmitError::BadField),
        ("a fragment", Headers { ip: v4(0x2000), ..good }, 4, EmitError::BadField),
        ("an offset", Headers { ip: v4(0x4001), ..good }, 4, EmitError::BadField),
        ("reserved bits", Headers { bth: Bth { resv7: 0x80, ..good.bth }, ..good }, 4, EmitError::BadField),
        ("DETH missing", Headers { ext: Ext::NONE, ..good }, 4, EmitError::ExtMismatch),
        (
            "immediate too much",
            Headers { ext: Ext { imm: Some(Imm([0; 4])), ..good.ext }, ..good },
            4,
            EmitError::ExtMismatch,
        ),
        ("4097 bytes", good, 4097, EmitError::Oversized),
        (
            "CNP with payload",
            Headers { bth: Bth::cnp(Qpn::GSI), ext: Ext::CNP, ..good },
            4,
            EmitError::UnexpectedPayload,
        ),
    ];
    for (what, headers, payload_len, reason) in cases {
        let mut out = [0xa5u8; 128];
        assert_eq!(emit::emit(&headers, payload_len, &mut out), Err(reason), "{what}");
        assert!(out.iter().all(|b| *b == 0xa5), "{what}: a refused frame left traces");
    }
}

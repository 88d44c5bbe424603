//! Frames as bytes and as headers: the targets `parse` and `roundtrip`.
//!
//! `cargo test -p ferroce-wire` replays the kept corpus through them on every run, and uses the generator for its
//! property tests.

use std::net::{Ipv4Addr, Ipv6Addr};

use ferroce_wire::{
    Aeth, AtomicEth, Bth, Deth, DmaLen, Eth, Ext, Headers, Icrc, Imm, Ip, MacAddr, Msn, Opcode, Packet,
    ParseError, Pkey, Psn, Qkey, Qpn, RemoteAddr, Reth, Rkey, Service, Syndrome, VlanTag, check_frame, emit,
    opcode::PayloadRule, packet,
};

/// Any bytes as a frame: parsing never panics, and what it accepts keeps its promises. The bytes are tried as they
/// are and with lengths, checksum and ICRC put right, so that the search reaches what lies behind those checks.
pub fn parse(data: &[u8]) {
    accept(data);
    let mut repaired = data.to_vec();
    repair(&mut repaired);
    accept(&repaired);
}

fn accept(frame: &[u8]) {
    let whole = packet::parse(frame, frame.len());
    // A head of 128 bytes decides as the whole frame does.
    let head = &frame[..frame.len().min(ferroce_wire::MAX_HEAD_BYTES)];
    assert_eq!(packet::parse(head, frame.len()), whole);
    // A head that ends early is refused or, if it holds all headers, gives the same.
    for cut in [0, 13, 14, 33, 34, 53, 54, 61, 62, 73, 81, 101] {
        let Some(short) = frame.get(..cut) else { break };
        let parsed = packet::parse(short, frame.len());
        assert!(parsed == whole || parsed == Err(ParseError::Truncated), "{parsed:?} and {whole:?}");
    }
    let Ok(packet) = whole else {
        assert_eq!(check_frame(frame).map(|_| ()), whole.map(|_| ()));
        return;
    };
    assert!(packet.frame_end() <= frame.len());
    assert!(usize::from(packet.payload_offset) <= head.len());
    assert_eq!(usize::from(packet.pad), emit::pad_of(usize::from(packet.payload_len)));
    let _ = packet.to_string();
    let again = reemit(&packet, frame);
    assert_eq!(check_frame(&again), Ok(packet));
    let is_right = check_frame(frame).is_ok();
    let covered = &frame[..packet.icrc_offset()];
    if packet.headers.ext == Ext::CNP
        || covered[covered.len() - usize::from(packet.pad)..].iter().any(|b| *b != 0)
    {
        // Reserved bytes of a CNP and pad bytes are not kept, so the frame may differ in them.
        return;
    }
    assert_eq!(again[..packet.icrc_offset()], *covered);
    assert_eq!(again[packet.icrc_offset()..] == frame[packet.icrc_offset()..packet.frame_end()], is_right);
}

fn reemit(packet: &Packet, frame: &[u8]) -> Vec<u8> {
    let start = usize::from(packet.payload_offset);
    let payload = &frame[start..start + usize::from(packet.payload_len)];
    let mut out = vec![0xa5; packet.frame_end()];
    assert_eq!(emit::seal(&packet.headers, payload, &mut out), Ok(out.len()));
    out
}

/// Makes an untagged or tagged frame consistent: IP version, lengths, IPv4 checksum, UDP port and ICRC.
pub fn repair(frame: &mut [u8]) {
    let tagged = frame.get(12..14) == Some(&[0x81, 0x00]);
    let ip = if tagged { 18 } else { 14 };
    let Some(rest) = frame.len().checked_sub(ip).and_then(|n| u16::try_from(n).ok()) else { return };
    let is_v6 = frame.get(ip - 2..ip) == Some(&[0x86, 0xdd]);
    let udp = ip + if is_v6 { 40 } else { 20 };
    if frame.len() < udp + 24 {
        return;
    }
    if is_v6 {
        frame[ip] = 0x60 | (frame[ip] & 0x0f);
        frame[ip + 4..ip + 6].copy_from_slice(&(rest - 40).to_be_bytes());
        frame[ip + 6] = 17;
    } else {
        frame[ip - 2..ip].copy_from_slice(&[0x08, 0x00]);
        frame[ip] = 0x45;
        frame[ip + 2..ip + 4].copy_from_slice(&rest.to_be_bytes());
        frame[ip + 6] &= 0xc0;
        frame[ip + 7] = 0;
        frame[ip + 9] = 17;
        frame[ip + 10..ip + 12].fill(0);
        let mut sum: u32 = frame[ip..ip + 20].chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(w[1])).sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        frame[ip + 10..ip + 12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    }
    frame[udp + 2..udp + 4].copy_from_slice(&4791u16.to_be_bytes());
    let udp_len = u16::try_from(frame.len() - udp).unwrap_or(u16::MAX);
    frame[udp + 4..udp + 6].copy_from_slice(&udp_len.to_be_bytes());
    frame[udp + 9] &= 0xf0;
    if let Ok(packet) = packet::parse(frame, frame.len()) {
        let (head, body) = frame[..packet.icrc_offset()].split_at(usize::from(packet.payload_offset));
        let icrc = Icrc::over_headers(head, ip).update(body).to_wire();
        frame[packet.icrc_offset()..packet.frame_end()].copy_from_slice(&icrc);
    }
}

/// Any header values that [`generate`] makes of the bytes: `parse(emit(x)) == x`, and one changed bit is noticed
/// unless it lies where the ICRC does not look.
pub fn roundtrip(data: &[u8]) {
    let mut bytes = Bytes::new(data);
    let (headers, payload_len) = generate(&mut bytes);
    let payload: Vec<u8> = (0..payload_len).map(|_| bytes.u8()).collect();
    let head = emit::header_bytes(&headers);
    let mut frame = vec![0xa5; head + payload_len + emit::pad_of(payload_len) + 4];
    assert_eq!(emit::seal(&headers, &payload, &mut frame), Ok(frame.len()));
    let packet = check_frame(&frame).unwrap_or_else(|e| panic!("{e:?}: {headers:?}"));
    assert_eq!(packet.headers, headers);
    assert_eq!(frame[head..head + payload_len], payload);
    assert_eq!(packet.frame_end(), frame.len());
    assert_eq!(usize::from(packet.payload_offset), head);
    assert_eq!(usize::from(packet.ip_offset), emit::ip_offset(&headers));

    let at = usize::from(bytes.u16()) % frame.len();
    frame[at] ^= 1 << (bytes.u8() & 7);
    if let Ok(changed) = check_frame(&frame) {
        // Ethernet, and what routers change: the transport sees the same packet.
        assert!(at < emit::ip_offset(&headers) + 40 + 8 + 12);
        let mut bth = changed.headers.bth;
        bth.resv8a = headers.bth.resv8a;
        assert_eq!((bth, changed.headers.ext), (headers.bth, headers.ext));
    }
}

/// A source of values that never runs dry: zeros follow the bytes.
pub struct Bytes<'a> {
    rest: &'a [u8],
}

impl<'a> Bytes<'a> {
    /// Over `data`.
    pub fn new(data: &'a [u8]) -> Self {
        Bytes { rest: data }
    }
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let n = N.min(self.rest.len());
        out[..n].copy_from_slice(&self.rest[..n]);
        self.rest = &self.rest[n..];
        out
    }
    fn u8(&mut self) -> u8 {
        self.take::<1>()[0]
    }
    fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.take())
    }
    fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.take())
    }
    fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.take())
    }
}

/// Headers that emit accepts and parse accepts again, and a payload length that fits them. Covers every opcode, both
/// IP versions, tagged and untagged.
pub fn generate(bytes: &mut Bytes<'_>) -> (Headers, usize) {
    let opcode = Opcode::ALL[usize::from(bytes.u8()) % Opcode::ALL.len()];
    let shape = bytes.u8();
    let vlan = (shape & 1 != 0).then(|| VlanTag::from_tci(bytes.u16()));
    let eth = Eth { dst: MacAddr(bytes.take()), src: MacAddr(bytes.take()), vlan };
    let ip = if shape & 2 != 0 {
        // 2000::/3 is unicast, and neither loopback nor mapped.
        let mut address =
            || Ipv6Addr::from_bits((bytes.u64() as u128) << 64 | bytes.u64() as u128 | 1 << 125);
        let (src, dst) = (address(), address());
        let [traffic_class, hop_limit] = bytes.take();
        let clear = !(0b110u128 << 125);
        Ip::V6 {
            src: Ipv6Addr::from_bits(src.to_bits() & clear),
            dst: Ipv6Addr::from_bits(dst.to_bits() & clear),
            traffic_class,
            flow_label: bytes.u32() & 0xf_ffff,
            hop_limit,
        }
    } else {
        let [a, b, c, d, e, f] = bytes.take();
        let [tos, ttl] = bytes.take();
        Ip::V4 {
            src: Ipv4Addr::new(10, a, b, c),
            dst: Ipv4Addr::new(192, d, e, f),
            tos,
            ttl,
            id: bytes.u16(),
            frag: u16::from(shape & 0x0c) << 12,
        }
    };
    let bth = generate_bth(opcode, bytes);
    let headers = Headers {
        eth,
        ip,
        udp_src: bytes.u16(),
        udp_checksum: bytes.u16(),
        bth,
        ext: generate_ext(opcode, bytes),
    };
    let payload_len = match opcode.info().payload {
        PayloadRule::None => 0,
        PayloadRule::Full | PayloadRule::OneToMtu | PayloadRule::ZeroToMtu => usize::from(bytes.u16()) % 4097,
    };
    (headers, payload_len)
}

fn generate_bth(opcode: Opcode, bytes: &mut Bytes<'_>) -> Bth {
    let flags = bytes.u8();
    let qpn = bytes.u32() & 0xff_ffff;
    let is_allowed = qpn != 0 && (qpn != Qpn::MULTICAST.get() || opcode.service() == Service::Ud);
    Bth {
        opcode,
        solicited: flags & 1 != 0,
        mig_req: flags & 2 != 0,
        pkey: Pkey(bytes.u16()),
        resv8a: bytes.u8(),
        dest_qpn: Qpn::new(if is_allowed { qpn } else { 1 }),
        ack_req: flags & 4 != 0,
        resv7: bytes.u8() & 0x7f,
        psn: Psn::new(bytes.u32()),
    }
}

fn generate_ext(opcode: Opcode, bytes: &mut Bytes<'_>) -> Ext {
    let info = opcode.info();
    Ext {
        deth: info.deth.then(|| Deth {
            qkey: Qkey(bytes.u32()),
            resv: bytes.u8(),
            src_qpn: Qpn::new(bytes.u32()),
        }),
        reth: info.reth.then(|| Reth {
            addr: RemoteAddr(bytes.u64()),
            rkey: Rkey(bytes.u32()),
            len: DmaLen(bytes.u32()),
        }),
        atomic: info.atomic.then(|| AtomicEth {
            addr: RemoteAddr(bytes.u64()),
            rkey: Rkey(bytes.u32()),
            swap_or_add: bytes.u64(),
            compare: bytes.u64(),
        }),
        imm: info.imm.then(|| Imm(bytes.take())),
        invalidate: info.inv.then(|| Rkey(bytes.u32())),
        aeth: info.aeth.then(|| Aeth { syndrome: Syndrome::from_u8(bytes.u8()), msn: Msn::new(bytes.u32()) }),
        atomic_ack: info.atomic_ack.then(|| bytes.u64()),
        cnp: info.service == Service::Cnp,
    }
}

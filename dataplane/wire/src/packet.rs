//! The only way in: a frame's head to a [`Packet`].
//!
//! Every check of roce-wire 1 and 2 that needs no queue pair is made here, in the order in which the bytes lie, and
//! each failure is a [`ParseError`] of its own. What depends on a queue pair (service, state, addresses, path MTU,
//! "last packets carry at least one byte") is the transport's.

use core::net::{Ipv4Addr, Ipv6Addr};

use crate::error::ParseError;
use crate::ext::{Aeth, AtomicEth, Bth, Deth, Ext, Reth, Syndrome};
use crate::flow::{Eth, Headers, Ip, VlanTag};
use crate::ids::{DmaLen, Imm, MacAddr, Msn, Pkey, Psn, Qkey, Qpn, RemoteAddr, Rkey};
use crate::opcode::{Opcode, OpcodeInfo, PayloadRule, Service};
use crate::{ICRC_BYTES, MAX_PAYLOAD_BYTES, ROCE_PORT};

/// A parsed frame: its headers as values and where its payload and ICRC lie. Borrows nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet {
    /// All headers.
    pub headers: Headers,
    /// Offset of the IP header in the frame.
    pub ip_offset: u16,
    /// Offset of the payload in the frame: everything before it is in the head.
    pub payload_offset: u16,
    /// Payload bytes without pad.
    pub payload_len: u16,
    /// Pad bytes after the payload, 0 ..= 3.
    pub pad: u8,
}

impl Packet {
    /// Offset of the four ICRC bytes in the frame.
    #[inline]
    pub const fn icrc_offset(&self) -> usize {
        (self.payload_offset as usize).wrapping_add(self.payload_len as usize).wrapping_add(self.pad as usize)
    }

    /// Where the RoCE packet ends in the frame: behind its ICRC. What follows is Ethernet padding.
    #[inline]
    pub const fn frame_end(&self) -> usize {
        self.icrc_offset().wrapping_add(ICRC_BYTES)
    }
}

const TPID_8021Q: u16 = 0x8100;
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
pub(crate) const PROTO_UDP: u8 = 17;
const PROTO_IPV6_FRAGMENT: u8 = 44;
const MORE_FRAGMENTS_OR_OFFSET: u16 = 0x3fff;

/// What lies between a UDP header's start and the extension headers, and the ICRC: the least a RoCE datagram holds.
const UDP_BTH_ICRC_BYTES: u16 = 8 + 12 + 4;

/// Takes fixed pieces off the front of the head.
struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    #[inline]
    fn take<const N: usize>(&mut self) -> Result<&'a [u8; N], ParseError> {
        let (piece, rest) = self.rest.split_first_chunk::<N>().ok_or(ParseError::Truncated)?;
        self.rest = rest;
        Ok(piece)
    }
    #[inline]
    fn u16(&mut self) -> Result<u16, ParseError> {
        self.take::<2>().map(|b| u16::from_be_bytes(*b))
    }
    #[inline]
    fn u32(&mut self) -> Result<u32, ParseError> {
        self.take::<4>().map(|b| u32::from_be_bytes(*b))
    }
    #[inline]
    fn u64(&mut self) -> Result<u64, ParseError> {
        self.take::<8>().map(|b| u64::from_be_bytes(*b))
    }
}

/// Parses the first bytes of a frame.
///
/// `head` is private memory and holds the whole frame or at least its first [`crate::MAX_HEAD_BYTES`] bytes;
/// `frame_len` is the length of the whole frame in bytes, Ethernet padding included. The ICRC is not checked
/// here, since the payload may lie elsewhere: see [`crate::icrc`].
///
/// The end of the packet is what the UDP length says, not the end of the frame: short frames are padded to 60 bytes.
/// A UDP checksum other than 0 is taken as it is and not verified: it would need the whole payload, the ICRC covers
/// the same bytes with a better code, and the checksum field itself is outside the ICRC.
pub fn parse(head: &[u8], frame_len: usize) -> Result<Packet, ParseError> {
    let head = head.get(..frame_len).unwrap_or(head);
    let mut r = Reader { rest: head };
    let (eth, ethertype) = parse_eth(&mut r)?;
    let ip_offset = if eth.vlan.is_some() { 18u16 } else { 14 };
    let ip_room = frame_len.saturating_sub(usize::from(ip_offset));
    let (ip, udp_len, ip_bytes) = match ethertype {
        ETHERTYPE_IPV4 => parse_ipv4(&mut r, ip_room)?,
        ETHERTYPE_IPV6 => parse_ipv6(&mut r, ip_room)?,
        _ => return Err(ParseError::NotIp),
    };
    check_addresses(&ip)?;

    let udp_src = r.u16()?;
    if r.u16()? != ROCE_PORT {
        return Err(ParseError::NotRoce);
    }
    let datagram_len = r.u16()?;
    let udp_checksum = r.u16()?;
    if datagram_len != udp_len || datagram_len < UDP_BTH_ICRC_BYTES {
        return Err(ParseError::BadLength);
    }

    let (bth, pad) = parse_bth(&mut r)?;
    let info = bth.opcode.info();
    check_dest_qpn(&bth, &info)?;
    // At most 28 (AtomicETH), so it always fits.
    let ext_bytes = u16::try_from(info.ext_bytes()).map_err(|_| ParseError::BadLength)?;
    let body = datagram_len
        .checked_sub(UDP_BTH_ICRC_BYTES)
        .and_then(|rest| rest.checked_sub(ext_bytes))
        .ok_or(ParseError::BadLength)?;
    let payload_len = payload_len(body, pad, info.payload)?;
    let ext = parse_ext(&mut r, &info)?;
    let payload_offset =
        [ip_bytes, 8, 12, ext_bytes].iter().fold(ip_offset, |sum, part| sum.saturating_add(*part));
    Ok(Packet {
        headers: Headers { eth, ip, udp_src, udp_checksum, bth, ext },
        ip_offset,
        payload_offset,
        payload_len,
        pad,
    })
}

#[inline]
fn parse_eth(r: &mut Reader<'_>) -> Result<(Eth, u16), ParseError> {
    let dst = MacAddr(*r.take::<6>()?);
    let src = MacAddr(*r.take::<6>()?);
    let first = r.u16()?;
    if first != TPID_8021Q {
        return Ok((Eth { dst, src, vlan: None }, first));
    }
    let vlan = Some(VlanTag::from_tci(r.u16()?));
    Ok((Eth { dst, src, vlan }, r.u16()?))
}

/// The header, the length of what follows it, and its own length. `room` is what the frame holds from the IP header on.
#[inline]
fn parse_ipv4(r: &mut Reader<'_>, room: usize) -> Result<(Ip, u16, u16), ParseError> {
    let bytes = r.take::<20>()?;
    let [version_ihl, tos, l0, l1, i0, i1, f0, f1, ttl, protocol, _, _, s0, s1, s2, s3, d0, d1, d2, d3] =
        *bytes;
    if version_ihl != 0x45 {
        return Err(ParseError::BadIpHeader);
    }
    if ones_complement_sum(bytes) != 0xffff {
        return Err(ParseError::BadIpChecksum);
    }
    let frag = u16::from_be_bytes([f0, f1]);
    if frag & MORE_FRAGMENTS_OR_OFFSET != 0 {
        return Err(ParseError::Fragment);
    }
    if protocol != PROTO_UDP {
        return Err(ParseError::NotUdp);
    }
    let total = u16::from_be_bytes([l0, l1]);
    let rest = total.checked_sub(20).ok_or(ParseError::BadLength)?;
    if usize::from(total) > room {
        return Err(ParseError::BadLength);
    }
    let ip = Ip::V4 {
        src: Ipv4Addr::new(s0, s1, s2, s3),
        dst: Ipv4Addr::new(d0, d1, d2, d3),
        tos,
        ttl,
        id: u16::from_be_bytes([i0, i1]),
        frag,
    };
    Ok((ip, rest, 20))
}

#[inline]
fn parse_ipv6(r: &mut Reader<'_>, room: usize) -> Result<(Ip, u16, u16), ParseError> {
    let first = r.u32()?;
    let rest = r.u16()?;
    let [next_header, hop_limit] = *r.take::<2>()?;
    let src = Ipv6Addr::from_octets(*r.take::<16>()?);
    let dst = Ipv6Addr::from_octets(*r.take::<16>()?);
    if first >> 28 != 6 {
        return Err(ParseError::BadIpHeader);
    }
    match next_header {
        PROTO_UDP => {}
        PROTO_IPV6_FRAGMENT => return Err(ParseError::Fragment),
        _ => return Err(ParseError::NotUdp),
    }
    if usize::from(rest) > room.saturating_sub(40) {
        return Err(ParseError::BadLength);
    }
    let [_, _, _, traffic_class] = (first >> 20).to_be_bytes();
    Ok((Ip::V6 { src, dst, traffic_class, flow_label: first & 0x000f_ffff, hop_limit }, rest, 40))
}

/// Sum of the ten 16-bit words with end-around carry; 0xffff for a header whose checksum is right (RFC 1071).
#[inline]
pub(crate) fn ones_complement_sum(header: &[u8; 20]) -> u16 {
    let (words, _) = header.as_chunks::<2>();
    // Ten words of 16 bits: the sum needs 20 bits, and two folds bring it back to 16.
    let sum = words.iter().fold(0u32, |sum, word| sum.wrapping_add(u32::from(u16::from_be_bytes(*word))));
    let sum = (sum & 0xffff).wrapping_add(sum >> 16);
    let [_, _, hi, lo] = (sum & 0xffff).wrapping_add(sum >> 16).to_be_bytes();
    u16::from_be_bytes([hi, lo])
}

/// An IPv4-mapped IPv6 address on the wire would have the same GID as the IPv4 address, so it is refused at both ends
/// (RFC 4291 2.5.5.2 never puts one on the wire).
#[inline]
fn check_addresses(ip: &Ip) -> Result<(), ParseError> {
    let (bad_source, bad_destination, mixed) = match ip {
        Ip::V4 { src, dst, .. } => (
            src.is_unspecified() || src.is_multicast() || src.is_broadcast(),
            dst.is_unspecified() || dst.is_broadcast(),
            src.is_loopback() != dst.is_loopback(),
        ),
        Ip::V6 { src, dst, .. } => (
            src.is_unspecified() || src.is_multicast() || src.to_ipv4_mapped().is_some(),
            dst.is_unspecified() || dst.to_ipv4_mapped().is_some(),
            src.is_loopback() != dst.is_loopback(),
        ),
    };
    if bad_source {
        return Err(ParseError::BadSource);
    }
    if bad_destination {
        return Err(ParseError::BadDestination);
    }
    if mixed {
        return Err(ParseError::BadSource);
    }
    Ok(())
}

/// The header and its pad count.
#[inline]
fn parse_bth(r: &mut Reader<'_>) -> Result<(Bth, u8), ParseError> {
    let [opcode, flags, p0, p1, resv8a, q0, q1, q2, ack, n0, n1, n2] = *r.take::<12>()?;
    if flags & 0x0f != 0 {
        return Err(ParseError::BadVersion);
    }
    let bth = Bth {
        opcode: Opcode::from_u8(opcode).ok_or(ParseError::UnknownOpcode)?,
        solicited: flags & 0x80 != 0,
        mig_req: flags & 0x40 != 0,
        pkey: Pkey(u16::from_be_bytes([p0, p1])),
        resv8a,
        dest_qpn: Qpn::new(u32::from_be_bytes([0, q0, q1, q2])),
        ack_req: ack & 0x80 != 0,
        resv7: ack & 0x7f,
        psn: Psn::new(u32::from_be_bytes([0, n0, n1, n2])),
    };
    Ok((bth, (flags >> 4) & 3))
}

/// QPN 0 is the subnet management interface, which RoCE does not have; multicast exists for datagrams only.
#[inline]
fn check_dest_qpn(bth: &Bth, info: &OpcodeInfo) -> Result<(), ParseError> {
    match bth.dest_qpn.get() {
        0 => Err(ParseError::BadDestQpn),
        n if n == Qpn::MULTICAST.get() && info.service != Service::Ud => Err(ParseError::BadDestQpn),
        _ => Ok(()),
    }
}

/// `body` is payload and pad together. All headers are multiples of 4, so a body that is not one can only come from a
/// wrong pad count or length; past this check `pad == -payload_len mod 4` holds.
#[inline]
fn payload_len(body: u16, pad: u8, rule: PayloadRule) -> Result<u16, ParseError> {
    let payload_len = body.checked_sub(u16::from(pad)).ok_or(ParseError::BadPad)?;
    if body & 3 != 0 {
        return Err(ParseError::BadPad);
    }
    match rule {
        PayloadRule::None if pad != 0 => return Err(ParseError::BadPad),
        PayloadRule::None if body != 0 => return Err(ParseError::UnexpectedPayload),
        PayloadRule::None | PayloadRule::Full | PayloadRule::OneToMtu | PayloadRule::ZeroToMtu => {}
    }
    if usize::from(payload_len) > MAX_PAYLOAD_BYTES {
        return Err(ParseError::Oversized);
    }
    Ok(payload_len)
}

/// The extension headers that the opcode's row names, in the order of roce-wire 2.2.
#[inline]
fn parse_ext(r: &mut Reader<'_>, info: &OpcodeInfo) -> Result<Ext, ParseError> {
    let mut ext = Ext::NONE;
    if info.deth {
        let qkey = Qkey(r.u32()?);
        let [resv, q0, q1, q2] = *r.take::<4>()?;
        ext.deth = Some(Deth { qkey, resv, src_qpn: Qpn::new(u32::from_be_bytes([0, q0, q1, q2])) });
    }
    if info.reth {
        let (addr, rkey, len) = (RemoteAddr(r.u64()?), Rkey(r.u32()?), DmaLen(r.u32()?));
        ext.reth = Some(Reth { addr, rkey, len });
    }
    if info.atomic {
        let (addr, rkey) = (RemoteAddr(r.u64()?), Rkey(r.u32()?));
        let (swap_or_add, compare) = (r.u64()?, r.u64()?);
        ext.atomic = Some(AtomicEth { addr, rkey, swap_or_add, compare });
    }
    if info.imm {
        ext.imm = Some(Imm(*r.take::<4>()?));
    }
    if info.inv {
        ext.invalidate = Some(Rkey(r.u32()?));
    }
    if info.aeth {
        let [syndrome, m0, m1, m2] = *r.take::<4>()?;
        let msn = Msn::new(u32::from_be_bytes([0, m0, m1, m2]));
        ext.aeth = Some(Aeth { syndrome: Syndrome::from_u8(syndrome), msn });
    }
    if info.atomic_ack {
        ext.atomic_ack = Some(r.u64()?);
    }
    if info.service == Service::Cnp {
        // Reserved; receivers ignore the content.
        r.take::<16>()?;
        ext.cnp = true;
    }
    Ok(ext)
}

//! The only way out: [`Headers`] to bytes.
//!
//! [`emit()`] writes the header stack, and [`seal`] a whole frame for callers that hold the payload as a slice
//! (simulator, tools, connection manager, tests). The engine calls [`emit()`] and adds payload, pad and ICRC where they
//! lie. Nothing is written when an error is returned.

use crate::ext::{Aeth, AtomicEth, Bth, Deth, Ext, Reth};
use crate::flow::{Headers, Ip};
use crate::icrc::Icrc;
use crate::opcode::{OpcodeInfo, PayloadRule, Service};
use crate::packet::{PROTO_UDP, ones_complement_sum};
use crate::{ICRC_BYTES, MAX_PAYLOAD_BYTES, ROCE_PORT};

/// Why headers could not be emitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EmitError {
    /// `out` is shorter than the header stack (or, for [`seal`], than the frame).
    NoRoom,
    /// An extension header that the opcode demands is missing, or one that it forbids is there.
    ExtMismatch,
    /// Payload longer than 4096 bytes.
    Oversized,
    /// Payload where the opcode allows none.
    UnexpectedPayload,
    /// A value does not fit its field: PCP above 7, VID above 4095, flow label above 20 bits, reserved bits above 7
    /// bits, or an IPv4 fragment (more-fragments flag or an offset).
    BadField,
}

impl core::fmt::Display for EmitError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            EmitError::NoRoom => "the buffer is shorter than the frame",
            EmitError::ExtMismatch => "the extension headers are not those that the opcode demands",
            EmitError::Oversized => "payload longer than 4096 bytes",
            EmitError::UnexpectedPayload => "payload where the opcode allows none",
            EmitError::BadField => "a header value does not fit its field",
        })
    }
}

impl core::error::Error for EmitError {}

/// Puts fixed pieces at the front of what is left of the buffer.
struct Writer<'a> {
    rest: &'a mut [u8],
}

impl Writer<'_> {
    #[inline]
    fn put<const N: usize>(&mut self, bytes: [u8; N]) -> Result<(), EmitError> {
        let rest = core::mem::take(&mut self.rest);
        let (piece, rest) = rest.split_first_chunk_mut::<N>().ok_or(EmitError::NoRoom)?;
        *piece = bytes;
        self.rest = rest;
        Ok(())
    }
}

/// Bytes of the header stack of `headers`, which is also the payload's offset in the frame.
#[inline]
pub const fn header_bytes(headers: &Headers) -> usize {
    let eth: usize = if headers.eth.vlan.is_some() { 18 } else { 14 };
    eth.wrapping_add(ip_bytes(&headers.ip))
        .wrapping_add(8 + 12)
        .wrapping_add(headers.bth.opcode.info().ext_bytes())
}

const fn ip_bytes(ip: &Ip) -> usize {
    match ip {
        Ip::V4 { .. } => 20,
        Ip::V6 { .. } => 40,
    }
}

/// Writes all headers of a frame that carries `payload_len` payload bytes into `out` and returns their length,
/// which is also the payload's offset. Lengths, IPv4 checksum and the BTH pad count are worked out; every byte of
/// `out[..returned]` is written. The frame's total length is
/// `returned + payload_len + pad_of(payload_len) + 4`.
pub fn emit(headers: &Headers, payload_len: usize, out: &mut [u8]) -> Result<usize, EmitError> {
    let info = headers.bth.opcode.info();
    check(headers, &info, payload_len)?;
    let total = header_bytes(headers);
    let mut w = Writer { rest: out.get_mut(..total).ok_or(EmitError::NoRoom)? };
    // At most 8 + 12 + 28 + 4096 + 4: both lengths fit.
    let udp_len = [8, 12, info.ext_bytes(), payload_len, pad_of(payload_len), ICRC_BYTES]
        .iter()
        .try_fold(0u16, |sum, part| sum.checked_add(u16::try_from(*part).ok()?))
        .ok_or(EmitError::Oversized)?;
    put_eth(&mut w, headers)?;
    put_ip(&mut w, &headers.ip, udp_len)?;
    put_udp(&mut w, headers, udp_len)?;
    put_bth(&mut w, &headers.bth, payload_len)?;
    put_ext(&mut w, &headers.ext)?;
    Ok(total)
}

/// Writes a whole frame: headers, payload, zero pad, ICRC. Returns its length. The frame is not padded to 60 bytes:
/// that is the port's business.
pub fn seal(headers: &Headers, payload: &[u8], out: &mut [u8]) -> Result<usize, EmitError> {
    let head = header_bytes(headers);
    let pad = pad_of(payload.len());
    let body = payload.len().saturating_add(pad);
    let total = head.saturating_add(body).saturating_add(ICRC_BYTES);
    let out = out.get_mut(..total).ok_or(EmitError::NoRoom)?;
    emit(headers, payload.len(), out)?;
    let (head_bytes, rest) = out.split_at_mut_checked(head).ok_or(EmitError::NoRoom)?;
    let (body_bytes, icrc_bytes) = rest.split_at_mut_checked(body).ok_or(EmitError::NoRoom)?;
    let (payload_bytes, pad_bytes) =
        body_bytes.split_at_mut_checked(payload.len()).ok_or(EmitError::NoRoom)?;
    payload_bytes.copy_from_slice(payload);
    pad_bytes.fill(0);
    let icrc = Icrc::over_headers(head_bytes, ip_offset(headers)).update(body_bytes);
    icrc_bytes.copy_from_slice(&icrc.to_wire());
    Ok(total)
}

/// Pad bytes for a payload length: 0 ..= 3.
#[inline]
pub const fn pad_of(payload_len: usize) -> usize {
    payload_len.wrapping_neg() & 3
}

/// Offset of the IP header in the frame of `headers`.
#[inline]
pub const fn ip_offset(headers: &Headers) -> usize {
    if headers.eth.vlan.is_some() { 18 } else { 14 }
}

fn check(headers: &Headers, info: &OpcodeInfo, payload_len: usize) -> Result<(), EmitError> {
    if payload_len > MAX_PAYLOAD_BYTES {
        return Err(EmitError::Oversized);
    }
    if payload_len != 0 && info.payload == PayloadRule::None {
        return Err(EmitError::UnexpectedPayload);
    }
    if !ext_fits(&headers.ext, info) {
        return Err(EmitError::ExtMismatch);
    }
    let vlan_fits = headers.eth.vlan.is_none_or(|tag| tag.pcp <= 7 && tag.vid <= 0x0fff);
    let ip_fits = match headers.ip {
        Ip::V4 { frag, .. } => frag & 0x3fff == 0,
        Ip::V6 { flow_label, .. } => flow_label <= 0x000f_ffff,
    };
    if vlan_fits && ip_fits && headers.bth.resv7 <= 0x7f { Ok(()) } else { Err(EmitError::BadField) }
}

/// True if `ext` holds exactly the headers of the opcode's row.
fn ext_fits(ext: &Ext, info: &OpcodeInfo) -> bool {
    ext.deth.is_some() == info.deth
        && ext.reth.is_some() == info.reth
        && ext.atomic.is_some() == info.atomic
        && ext.imm.is_some() == info.imm
        && ext.invalidate.is_some() == info.inv
        && ext.aeth.is_some() == info.aeth
        && ext.atomic_ack.is_some() == info.atomic_ack
        && ext.cnp == (info.service == Service::Cnp)
}

#[inline]
fn put_eth(w: &mut Writer<'_>, headers: &Headers) -> Result<(), EmitError> {
    w.put(headers.eth.dst.0)?;
    w.put(headers.eth.src.0)?;
    if let Some(tag) = headers.eth.vlan {
        w.put([0x81, 0x00])?;
        w.put(tag.to_tci().to_be_bytes())?;
    }
    match headers.ip {
        Ip::V4 { .. } => w.put([0x08, 0x00]),
        Ip::V6 { .. } => w.put([0x86, 0xdd]),
    }
}

#[inline]
fn put_ip(w: &mut Writer<'_>, ip: &Ip, udp_len: u16) -> Result<(), EmitError> {
    match *ip {
        Ip::V4 { src, dst, tos, ttl, id, frag } => {
            let [l0, l1] = udp_len.saturating_add(20).to_be_bytes();
            let [i0, i1] = id.to_be_bytes();
            let [f0, f1] = frag.to_be_bytes();
            let [s0, s1, s2, s3] = src.octets();
            let [d0, d1, d2, d3] = dst.octets();
            let mut header =
                [0x45, tos, l0, l1, i0, i1, f0, f1, ttl, PROTO_UDP, 0, 0, s0, s1, s2, s3, d0, d1, d2, d3];
            let [c0, c1] = (!ones_complement_sum(&header)).to_be_bytes();
            header[10] = c0;
            header[11] = c1;
            w.put(header)
        }
        Ip::V6 { src, dst, traffic_class, flow_label, hop_limit } => {
            let first = 0x6000_0000 | (u32::from(traffic_class) << 20) | flow_label;
            w.put(first.to_be_bytes())?;
            w.put(udp_len.to_be_bytes())?;
            w.put([PROTO_UDP, hop_limit])?;
            w.put(src.octets())?;
            w.put(dst.octets())
        }
    }
}

#[inline]
fn put_udp(w: &mut Writer<'_>, headers: &Headers, udp_len: u16) -> Result<(), EmitError> {
    w.put(headers.udp_src.to_be_bytes())?;
    w.put(ROCE_PORT.to_be_bytes())?;
    w.put(udp_len.to_be_bytes())?;
    w.put(headers.udp_checksum.to_be_bytes())
}

#[inline]
fn put_bth(w: &mut Writer<'_>, bth: &Bth, payload_len: usize) -> Result<(), EmitError> {
    // Two bits by construction, so the conversion can't fail.
    let pad = u8::try_from(pad_of(payload_len)).map_err(|_| EmitError::BadField)?;
    let flags = (u8::from(bth.solicited) << 7) | (u8::from(bth.mig_req) << 6) | (pad << 4);
    let [p0, p1] = bth.pkey.0.to_be_bytes();
    let [_, q0, q1, q2] = bth.dest_qpn.get().to_be_bytes();
    let [_, n0, n1, n2] = bth.psn.get().to_be_bytes();
    let ack = (u8::from(bth.ack_req) << 7) | bth.resv7;
    w.put([bth.opcode.to_u8(), flags, p0, p1, bth.resv8a, q0, q1, q2, ack, n0, n1, n2])
}

#[inline]
fn put_ext(w: &mut Writer<'_>, ext: &Ext) -> Result<(), EmitError> {
    if let Some(Deth { qkey, resv, src_qpn }) = ext.deth {
        let [_, q0, q1, q2] = src_qpn.get().to_be_bytes();
        w.put(qkey.0.to_be_bytes())?;
        w.put([resv, q0, q1, q2])?;
    }
    if let Some(Reth { addr, rkey, len }) = ext.reth {
        w.put(addr.0.to_be_bytes())?;
        w.put(rkey.0.to_be_bytes())?;
        w.put(len.0.to_be_bytes())?;
    }
    if let Some(AtomicEth { addr, rkey, swap_or_add, compare }) = ext.atomic {
        w.put(addr.0.to_be_bytes())?;
        w.put(rkey.0.to_be_bytes())?;
        w.put(swap_or_add.to_be_bytes())?;
        w.put(compare.to_be_bytes())?;
    }
    if let Some(imm) = ext.imm {
        w.put(imm.0)?;
    }
    if let Some(rkey) = ext.invalidate {
        w.put(rkey.0.to_be_bytes())?;
    }
    if let Some(Aeth { syndrome, msn }) = ext.aeth {
        let [_, m0, m1, m2] = msn.get().to_be_bytes();
        w.put([syndrome.to_u8(), m0, m1, m2])?;
    }
    if let Some(original) = ext.atomic_ack {
        w.put(original.to_be_bytes())?;
    }
    if ext.cnp {
        w.put([0; 16])?;
    }
    Ok(())
}

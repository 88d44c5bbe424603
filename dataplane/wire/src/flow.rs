//! The outer headers: Ethernet, 802.1Q, IPv4, IPv6, and the header stack of a whole frame as values.

use core::net::{Ipv4Addr, Ipv6Addr};

use crate::ext::{Bth, Ext};
use crate::ids::{Gid, MacAddr};

/// 802.1Q tag control information.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct VlanTag {
    /// Priority code point, 0 ..= 7.
    pub pcp: u8,
    /// Drop eligible.
    pub dei: bool,
    /// VLAN identifier, 0 ..= 4095; 0 is a priority tag.
    pub vid: u16,
}

impl VlanTag {
    /// From the two bytes behind the TPID: PCP(3) DEI(1) VID(12).
    pub const fn from_tci(tci: u16) -> Self {
        let [high, _] = tci.to_be_bytes();
        VlanTag { pcp: high >> 5, dei: tci & 0x1000 != 0, vid: tci & 0x0fff }
    }
    /// The two bytes behind the TPID. Bits that don't fit their field are cut off; [`crate::emit::emit`] refuses them.
    pub const fn to_tci(self) -> u16 {
        let pcp = (self.pcp & 7) as u16;
        (pcp << 13) | ((self.dei as u16) << 12) | (self.vid & 0x0fff)
    }
}

/// Ethernet header, with at most one 802.1Q tag. The EtherType follows from [`Ip`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Eth {
    /// Destination.
    pub dst: MacAddr,
    /// Source.
    pub src: MacAddr,
    /// The tag, if there is one.
    pub vlan: Option<VlanTag>,
}

/// Explicit congestion notification bits of the IP header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Ecn {
    /// 00: not capable.
    NotEct = 0,
    /// 01.
    Ect1 = 1,
    /// 10.
    Ect0 = 2,
    /// 11: congestion experienced.
    Ce = 3,
}

/// IP header fields that vary. Lengths, protocol and the IPv4 checksum are worked out by [`crate::emit`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ip {
    /// IPv4 without options.
    V4 {
        /// Source address.
        src: Ipv4Addr,
        /// Destination address.
        dst: Ipv4Addr,
        /// The whole TOS byte: DSCP x 4 + ECN.
        tos: u8,
        /// Time to live.
        ttl: u8,
        /// Identification. Covered by the ICRC; we send 0.
        id: u16,
        /// Flags and fragment offset. Covered by the ICRC; we send 0x4000 (DF).
        frag: u16,
    },
    /// IPv6 without extension headers.
    V6 {
        /// Source address.
        src: Ipv6Addr,
        /// Destination address.
        dst: Ipv6Addr,
        /// Traffic class: DSCP x 4 + ECN.
        traffic_class: u8,
        /// Flow label, 20 bits.
        flow_label: u32,
        /// Hop limit.
        hop_limit: u8,
    },
}

impl Ip {
    /// Source address as a GID.
    pub const fn src_gid(&self) -> Gid {
        match self {
            Ip::V4 { src, .. } => Gid(src.to_ipv6_mapped().octets()),
            Ip::V6 { src, .. } => Gid(src.octets()),
        }
    }
    /// Destination address as a GID.
    pub const fn dst_gid(&self) -> Gid {
        match self {
            Ip::V4 { dst, .. } => Gid(dst.to_ipv6_mapped().octets()),
            Ip::V6 { dst, .. } => Gid(dst.octets()),
        }
    }
    /// TOS byte or traffic class.
    pub const fn traffic_class(&self) -> u8 {
        match self {
            Ip::V4 { tos, .. } => *tos,
            Ip::V6 { traffic_class, .. } => *traffic_class,
        }
    }
    /// The ECN bits.
    pub const fn ecn(&self) -> Ecn {
        match self.traffic_class() & 3 {
            0 => Ecn::NotEct,
            1 => Ecn::Ect1,
            2 => Ecn::Ect0,
            _ => Ecn::Ce,
        }
    }
}

/// Every header of a RoCEv2 frame as a value. `emit(parse(frame)) == frame`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Headers {
    /// Ethernet and VLAN.
    pub eth: Eth,
    /// IPv4 or IPv6.
    pub ip: Ip,
    /// UDP source port. The destination is always 4791.
    pub udp_src: u16,
    /// UDP checksum as received (it is not covered by the ICRC); we send 0.
    pub udp_checksum: u16,
    /// Base transport header. Its pad count is worked out from the payload when emitted.
    pub bth: Bth,
    /// Extension headers, those that the opcode demands.
    pub ext: Ext,
}

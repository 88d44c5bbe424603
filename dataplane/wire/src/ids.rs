//! Numbers that travel on the wire, each a type of its own so that two of them can never be mixed.
//!
//! Circular numbers ([`Psn`], [`Msn`]) have no ordering: callers ask how far one lies after another.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const MASK_24: u32 = 0x00ff_ffff;

/// Packet sequence number, modulo 2^24 (IBTA 9.2). Invariant: the top 8 bits are zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Psn(u32);

impl Psn {
    /// Keeps the low 24 bits of `value`.
    pub const fn new(value: u32) -> Self {
        Psn(value & MASK_24)
    }
    /// The number, 0 ..= 2^24 - 1.
    pub const fn get(self) -> u32 {
        self.0
    }
    /// `packets` further on, modulo 2^24.
    #[must_use]
    pub const fn advance(self, packets: u32) -> Self {
        Psn(self.0.wrapping_add(packets) & MASK_24)
    }
    /// `packets` back, modulo 2^24.
    #[must_use]
    pub const fn retreat(self, packets: u32) -> Self {
        Psn(self.0.wrapping_sub(packets) & MASK_24)
    }
    /// How far `self` lies after `base`: -2^23 ..= 2^23 - 1. Never panics.
    pub const fn offset_from(self, base: Psn) -> i32 {
        ((self.0.wrapping_sub(base.0) << 8) as i32) >> 8
    }
    /// Where this PSN lies relative to the `expected` one (roce-wire 6.4).
    pub const fn arrival(self, expected: Psn) -> Arrival {
        match self.offset_from(expected) {
            0 => Arrival::Expected,
            d if d < 0 => Arrival::Duplicate,
            _ => Arrival::Ahead,
        }
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "psn {:#08x}", self.0)
    }
}

/// What callers match on instead of comparing PSNs with `<`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrival {
    /// In `[expected - 2^23, expected - 1]`.
    Duplicate,
    /// The expected one.
    Expected,
    /// Anything else: a gap.
    Ahead,
}

/// Message sequence number, modulo 2^24: completed request messages at the responder.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct Msn(u32);

impl Msn {
    /// Keeps the low 24 bits of `value`.
    pub const fn new(value: u32) -> Self {
        Msn(value & MASK_24)
    }
    /// The number, 0 ..= 2^24 - 1.
    pub const fn get(self) -> u32 {
        self.0
    }
    /// The next one, modulo 2^24.
    #[must_use]
    pub const fn next(self) -> Self {
        Msn(self.0.wrapping_add(1) & MASK_24)
    }
}

/// Queue pair number, 24 bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Qpn(u32);

impl Qpn {
    /// The general service interface (connection management), QP 1 of every port.
    pub const GSI: Qpn = Qpn(1);
    /// Destination of multicast packets.
    pub const MULTICAST: Qpn = Qpn(MASK_24);
    /// Keeps the low 24 bits of `value`.
    pub const fn new(value: u32) -> Self {
        Qpn(value & MASK_24)
    }
    /// The number, 0 ..= 2^24 - 1.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Debug for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "qpn {:#08x}", self.0)
    }
}

/// Partition key. RoCE uses the default partition, full member.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Pkey(pub u16);

impl Pkey {
    /// Default partition, full member.
    pub const DEFAULT: Pkey = Pkey(0xffff);
    /// Same partition, and at least one side a full member (IBTA 10.9.1.2; roce-wire 2.1).
    pub const fn matches(self, other: Pkey) -> bool {
        let base = self.0 & 0x7fff;
        base != 0 && base == other.0 & 0x7fff && (self.0 | other.0) & 0x8000 != 0
    }
}

/// Queue key of unreliable datagrams.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct Qkey(pub u32);

impl Qkey {
    /// The well-known key of QP 1.
    pub const GSI: Qkey = Qkey(0x8001_0000);
}

/// Remote key: names a memory region or window to a peer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Rkey(pub u32);

impl fmt::Debug for Rkey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rkey {:#010x}", self.0)
    }
}

/// Address in the responder's address space. Deliberately without a method that yields a pointer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct RemoteAddr(pub u64);

impl RemoteAddr {
    /// `bytes` further on, modulo 2^64; bounds are the key check's matter.
    #[must_use]
    pub const fn advance(self, bytes: u64) -> Self {
        RemoteAddr(self.0.wrapping_add(bytes))
    }
}

/// Length of an RDMA operation in bytes, as in RETH: 0 ..= 2^31 are legal, more is refused by the responder.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default, PartialOrd, Ord)]
pub struct DmaLen(pub u32);

impl DmaLen {
    /// Longest legal message (IBTA 9.7.1: 2^31 bytes).
    pub const MAX: DmaLen = DmaLen(1 << 31);
}

/// Immediate data: four opaque bytes, delivered as sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct Imm(pub [u8; 4]);

/// Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct MacAddr(pub [u8; 6]);

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// 128-bit global identifier. RoCEv2: the IPv6 address, or `::ffff:a.b.c.d` for IPv4 (roce-wire 1.4).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The GID of an IP address.
    pub const fn from_ip(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(v4) => Gid(v4.to_ipv6_mapped().octets()),
            IpAddr::V6(v6) => Gid(v6.octets()),
        }
    }
    /// The IP address this GID stands for: IPv4 where it is a mapped one.
    pub const fn to_ip(self) -> IpAddr {
        let v6 = Ipv6Addr::from_octets(self.0);
        match v6.to_ipv4_mapped() {
            Some(v4) => IpAddr::V4(v4),
            None => IpAddr::V6(v6),
        }
    }
    /// The default GID of an interface: fe80::/64 and the modified EUI-64 of its MAC address (roce-wire 1.4).
    pub const fn link_local_of(mac: MacAddr) -> Self {
        let [a, b, c, d, e, f] = mac.0;
        Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 0x02, b, c, 0xff, 0xfe, d, e, f])
    }
    /// True for a multicast group of either family.
    pub const fn is_multicast(self) -> bool {
        self.to_ip().is_multicast()
    }
    /// Ethernet address of a RoCEv2 multicast group: 01:00:5e and the low 23 bits of an IPv4 group, 33:33 and the low
    /// 32 bits of an IPv6 group. `None` for a unicast address, whose MAC comes from the neighbour table.
    pub const fn multicast_mac(self) -> Option<MacAddr> {
        let [.., b, c, d] = self.0;
        match self.to_ip() {
            IpAddr::V4(group) if group.is_multicast() => Some(MacAddr([0x01, 0x00, 0x5e, b & 0x7f, c, d])),
            IpAddr::V6(group) if group.is_multicast() => {
                let [.., a, b, c, d] = group.octets();
                Some(MacAddr([0x33, 0x33, a, b, c, d]))
            }
            IpAddr::V4(_) | IpAddr::V6(_) => None,
        }
    }
    /// True for a mapped IPv4 address.
    pub const fn is_ipv4(self) -> bool {
        matches!(self.to_ip(), IpAddr::V4(_))
    }
    /// The IPv4 address, if this is a mapped one.
    pub const fn ipv4(self) -> Option<Ipv4Addr> {
        match self.to_ip() {
            IpAddr::V4(a) => Some(a),
            IpAddr::V6(_) => None,
        }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Ipv6Addr::from_octets(self.0), f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Path MTU: payload bytes of a full packet. The discriminants are the wire and verbs numbers (`ibv_mtu`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum PathMtu {
    /// 256 bytes.
    Mtu256 = 1,
    /// 512 bytes.
    Mtu512 = 2,
    /// 1024 bytes.
    Mtu1024 = 3,
    /// 2048 bytes.
    Mtu2048 = 4,
    /// 4096 bytes.
    Mtu4096 = 5,
}

impl PathMtu {
    /// All of them, ascending.
    pub const ALL: [PathMtu; 5] =
        [PathMtu::Mtu256, PathMtu::Mtu512, PathMtu::Mtu1024, PathMtu::Mtu2048, PathMtu::Mtu4096];
    /// Payload bytes of a full packet.
    pub const fn bytes(self) -> u32 {
        128 << (self as u32)
    }
    /// From the number of bytes; `None` unless it is exactly one of the five.
    pub const fn from_bytes(bytes: u32) -> Option<Self> {
        match bytes {
            256 => Some(PathMtu::Mtu256),
            512 => Some(PathMtu::Mtu512),
            1024 => Some(PathMtu::Mtu1024),
            2048 => Some(PathMtu::Mtu2048),
            4096 => Some(PathMtu::Mtu4096),
            _ => None,
        }
    }
    /// From the enum value used on the wire and in verbs (1 ..= 5).
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(PathMtu::Mtu256),
            2 => Some(PathMtu::Mtu512),
            3 => Some(PathMtu::Mtu1024),
            4 => Some(PathMtu::Mtu2048),
            5 => Some(PathMtu::Mtu4096),
            _ => None,
        }
    }
    /// Largest path MTU that an interface of `netdev_mtu` bytes carries: the interface must hold the payload and
    /// 96 bytes of headers (roce-wire 7.3, the rule of Linux' ib core). `None` below 352.
    pub const fn largest_for_netdev(netdev_mtu: u32) -> Option<Self> {
        match netdev_mtu {
            4192.. => Some(PathMtu::Mtu4096),
            2144.. => Some(PathMtu::Mtu2048),
            1120.. => Some(PathMtu::Mtu1024),
            608.. => Some(PathMtu::Mtu512),
            352.. => Some(PathMtu::Mtu256),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(text: &str) -> Gid {
        Gid::from_ip(text.parse().unwrap())
    }

    #[test]
    fn psn_distances_wrap() {
        let (low, high) = (Psn::new(2), Psn::new(0xff_fffe));
        assert_eq!(low.offset_from(high), 4);
        assert_eq!(high.offset_from(low), -4);
        assert_eq!(high.advance(4), low);
        assert_eq!(low.retreat(4), high);
        assert_eq!(low.arrival(low), Arrival::Expected);
        assert_eq!(low.arrival(high), Arrival::Ahead);
        assert_eq!(high.arrival(low), Arrival::Duplicate);
        assert_eq!(Psn::new(0x80_0000).offset_from(Psn::new(0)), -(1 << 23));
        assert_eq!(Psn::new(0x7f_ffff).offset_from(Psn::new(0)), (1 << 23) - 1);
    }

    #[test]
    fn pkeys_match_when_one_side_is_a_full_member() {
        assert!(Pkey(0xffff).matches(Pkey(0x7fff)));
        assert!(!Pkey(0x7fff).matches(Pkey(0x7fff)));
        assert!(!Pkey(0x8000).matches(Pkey(0x8000)));
        assert!(!Pkey(0xffff).matches(Pkey(0x8001)));
    }

    #[test]
    fn gids_and_their_addresses() {
        let v4 = gid("10.1.2.3");
        assert_eq!(v4.0, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 2, 3]);
        assert!(v4.is_ipv4());
        assert_eq!(v4.ipv4(), Some(Ipv4Addr::new(10, 1, 2, 3)));
        assert_eq!(gid("fd00::1").ipv4(), None);
        assert_eq!(
            Gid::link_local_of(MacAddr([0x52, 0x54, 0, 0x12, 0x34, 0x56])),
            gid("fe80::5054:ff:fe12:3456")
        );
    }

    #[test]
    fn multicast_groups_have_their_own_macs() {
        assert_eq!(gid("239.129.2.3").multicast_mac(), Some(MacAddr([1, 0, 0x5e, 1, 2, 3])));
        assert_eq!(
            gid("ff0e::1:abcd:ef01").multicast_mac(),
            Some(MacAddr([0x33, 0x33, 0xab, 0xcd, 0xef, 1]))
        );
        assert_eq!(gid("10.0.0.1").multicast_mac(), None);
        assert_eq!(gid("fd00::1").multicast_mac(), None);
    }

    #[test]
    fn path_mtus_and_the_interfaces_that_carry_them() {
        for mtu in PathMtu::ALL {
            assert_eq!(PathMtu::from_bytes(mtu.bytes()), Some(mtu));
            assert_eq!(PathMtu::from_code(mtu as u8), Some(mtu));
            assert_eq!(PathMtu::largest_for_netdev(mtu.bytes() + 96), Some(mtu));
            assert_ne!(PathMtu::largest_for_netdev(mtu.bytes() + 95), Some(mtu));
        }
        assert_eq!(PathMtu::largest_for_netdev(1500), Some(PathMtu::Mtu1024));
        assert_eq!(PathMtu::largest_for_netdev(351), None);
    }
}

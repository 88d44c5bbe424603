//! Why a frame was not accepted: one variant per reason, each mapped to a counter by the engine.

/// Reason for which [`crate::packet::parse`] or the ICRC check refuses a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum ParseError {
    /// Shorter than the headers that it claims.
    Truncated,
    /// EtherType neither IPv4 nor IPv6 (after at most one 802.1Q tag).
    NotIp,
    /// IPv4 header length other than 20 bytes, or version mismatch.
    BadIpHeader,
    /// IPv4 header checksum wrong.
    BadIpChecksum,
    /// An IPv4 fragment.
    Fragment,
    /// Not UDP.
    NotUdp,
    /// UDP destination port other than 4791.
    NotRoce,
    /// IP or UDP length disagrees with the frame or with each other.
    BadLength,
    /// BTH transport version other than 0.
    BadVersion,
    /// Unknown or reserved opcode.
    UnknownOpcode,
    /// Payload shorter than its pad count, or a pad count where the opcode allows no payload.
    BadPad,
    /// Source address is multicast, broadcast, loopback-mismatched or unspecified.
    BadSource,
    /// Destination QPN 0, or a multicast QPN with another service than UD.
    BadDestQpn,
    /// The invariant CRC is wrong.
    BadIcrc,
    /// Payload longer than any path MTU (4096 bytes).
    Oversized,
}

impl ParseError {
    /// All of them, in the order of their counters.
    pub const ALL: [ParseError; 15] = [
        ParseError::Truncated,
        ParseError::NotIp,
        ParseError::BadIpHeader,
        ParseError::BadIpChecksum,
        ParseError::Fragment,
        ParseError::NotUdp,
        ParseError::NotRoce,
        ParseError::BadLength,
        ParseError::BadVersion,
        ParseError::UnknownOpcode,
        ParseError::BadPad,
        ParseError::BadSource,
        ParseError::BadDestQpn,
        ParseError::BadIcrc,
        ParseError::Oversized,
    ];
}

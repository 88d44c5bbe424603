//! Why a frame was not accepted: one variant per reason, each mapped to a counter by the engine.

use core::fmt;

macro_rules! parse_errors {
    ($($(#[$doc:meta])* $name:ident = $label:literal, $text:literal;)*) => {
        /// Reason for which [`crate::packet::parse`] or the ICRC check refuses a frame.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        #[repr(u8)]
        pub enum ParseError { $($(#[$doc])* $name,)* }

        impl ParseError {
            /// Number of reasons, hence of counters.
            pub const COUNT: usize = [$($label),*].len();

            /// All of them, in the order of their counters: `ALL[e.index()] == e`.
            pub const ALL: [ParseError; Self::COUNT] = [$(ParseError::$name),*];

            /// Name of the counter, snake_case; stable, since it appears in statistics.
            pub const fn name(self) -> &'static str {
                match self { $(ParseError::$name => $label,)* }
            }

            /// One clause for a person, without full stop.
            pub const fn describe(self) -> &'static str {
                match self { $(ParseError::$name => $text,)* }
            }
        }
    };
}

parse_errors! {
    /// Shorter than the headers that it claims.
    Truncated = "truncated", "shorter than its headers";
    /// EtherType neither IPv4 nor IPv6 (after at most one 802.1Q tag).
    NotIp = "not_ip", "EtherType is neither IPv4 nor IPv6";
    /// IPv4 header length other than 20 bytes, or version mismatch.
    BadIpHeader = "bad_ip_header", "IP version mismatch, or IPv4 options";
    /// IPv4 header checksum wrong.
    BadIpChecksum = "bad_ip_checksum", "IPv4 header checksum is wrong";
    /// An IPv4 or IPv6 fragment.
    Fragment = "fragment", "an IP fragment";
    /// Not UDP.
    NotUdp = "not_udp", "not UDP";
    /// UDP destination port other than 4791.
    NotRoce = "not_roce", "UDP destination port is not 4791";
    /// IP or UDP length disagrees with the frame, with each other, or is too small for the headers.
    BadLength = "bad_length", "IP or UDP length disagrees with the frame or its headers";
    /// BTH transport version other than 0.
    BadVersion = "bad_version", "BTH transport version is not 0";
    /// Unknown or reserved opcode.
    UnknownOpcode = "unknown_opcode", "unknown or reserved opcode";
    /// Payload shorter than its pad count, payload and pad together not a multiple of 4, or a pad count where the
    /// opcode allows no payload.
    BadPad = "bad_pad", "pad count does not fit the payload";
    /// Payload in a packet whose opcode allows none.
    UnexpectedPayload = "unexpected_payload", "payload where the opcode allows none";
    /// Source address is multicast, broadcast, unspecified or IPv4-mapped IPv6, or just one of the two addresses is
    /// a loopback one.
    BadSource = "bad_source", "source address is not a unicast one, or loopback mixed with another";
    /// Destination address is unspecified, limited broadcast or IPv4-mapped IPv6.
    BadDestination = "bad_destination", "destination address is unspecified, broadcast or IPv4-mapped";
    /// Destination QPN 0, or a multicast QPN with another service than UD.
    BadDestQpn = "bad_dest_qpn", "destination QPN 0, or the multicast QPN without UD";
    /// The invariant CRC is wrong.
    BadIcrc = "bad_icrc", "the invariant CRC is wrong";
    /// Payload longer than any path MTU (4096 bytes).
    Oversized = "oversized", "payload longer than 4096 bytes";
}

impl ParseError {
    /// Index of its counter: 0 .. [`ParseError::COUNT`].
    #[inline]
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.describe())
    }
}

impl core::error::Error for ParseError {}

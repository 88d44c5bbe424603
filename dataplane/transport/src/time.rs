//! Time as the caller gives it: nanoseconds of a monotonic clock.

/// A point in time, ns.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord, Hash, Default)]
pub struct Instant(pub u64);

impl Instant {
    /// `ns` later, saturating.
    #[must_use]
    pub const fn after(self, ns: u64) -> Self {
        Instant(self.0.saturating_add(ns))
    }
    /// Nanoseconds since `earlier`, 0 if it lies later.
    pub const fn since(self, earlier: Instant) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// ACK timeout of attribute `timeout`: 4.096 us x 2^timeout; `None` for 0 (infinite).
pub const fn ack_timeout_ns(timeout: u8) -> Option<u64> {
    match timeout & 31 {
        0 => None,
        t => Some(4096 << t),
    }
}

/// RNR NAK timer index to nanoseconds (roce-wire 5.8).
pub const RNR_TIMER_NS: [u64; 32] = [
    655_360_000,
    10_000,
    20_000,
    30_000,
    40_000,
    60_000,
    80_000,
    120_000,
    160_000,
    240_000,
    320_000,
    480_000,
    640_000,
    960_000,
    1_280_000,
    1_920_000,
    2_560_000,
    3_840_000,
    5_120_000,
    7_680_000,
    10_240_000,
    15_360_000,
    20_480_000,
    30_720_000,
    40_960_000,
    61_440_000,
    81_920_000,
    122_880_000,
    163_840_000,
    245_760_000,
    327_680_000,
    491_520_000,
];

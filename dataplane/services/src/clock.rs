//! The clock of latency samples.
//!
//! The worker's `now_ns` is read once per pass: exact enough for bandwidth and deadlines, too coarse for the time of
//! one message, of which a pass handles several parts. A latency sample therefore reads the monotonic clock itself,
//! once when the message is posted and once when its end is seen. On Linux that read is a vDSO call without a system
//! call where the kernel's clock source allows it (`tsc`, `kvm-clock`); about 25 ns, inside every sample alike.

use std::sync::OnceLock;
use std::time::Instant;

/// Monotonic nanoseconds since the first call in this process.
#[must_use]
pub fn now_ns() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let start = *START.get_or_init(Instant::now);
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

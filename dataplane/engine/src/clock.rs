//! The worker's clock: nanoseconds that never go back, read once per pass.
//!
//! On x86-64 with an invariant time stamp counter it is that counter, calibrated once against CLOCK_MONOTONIC_RAW; else
//! CLOCK_MONOTONIC itself. All workers of an engine share one calibration, so their times compare. Never used across
//! machines. Invariant of the unsafe blocks: they run only where the architecture has the instruction, which has no other
//! precondition.
#![allow(unsafe_code)]

use std::time::Duration;

use ferroce_transport::Instant;
use rustix::time::{ClockId, clock_gettime};

/// How long the calibration watches both clocks: an error of 100 ns in either reading is then 10 ppm.
const CALIBRATION: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, Debug)]
enum Source {
    /// ns = (tsc - base) * mult >> 32
    Tsc { base: u64, mult: u64 },
    /// CLOCK_MONOTONIC less this base.
    Monotonic { base: u64 },
}

/// A clock; copies agree.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    source: Source,
}

fn clock_ns(id: ClockId) -> u64 {
    let t = clock_gettime(id);
    (t.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(t.tv_nsec as u64)
}

impl Clock {
    /// Calibrates; takes about 10 ms. The clock starts at one second, so that no time is ever 0.
    pub fn calibrate() -> Clock {
        Clock {
            source: Self::tsc_source()
                .unwrap_or_else(|| Source::Monotonic { base: clock_ns(ClockId::Monotonic) }),
        }
    }

    fn tsc_source() -> Option<Source> {
        if !tsc_is_invariant() {
            return None;
        }
        let (ns0, tsc0) = (clock_ns(ClockId::MonotonicRaw), tsc()?);
        std::thread::sleep(CALIBRATION);
        let (ns1, tsc1) = (clock_ns(ClockId::MonotonicRaw), tsc()?);
        let (ns, ticks) = (ns1.checked_sub(ns0)?, tsc1.checked_sub(tsc0)?);
        if ns == 0 || ticks == 0 {
            return None;
        }
        let mult = u64::try_from((u128::from(ns) << 32) / u128::from(ticks)).ok()?;
        Some(Source::Tsc { base: tsc0, mult })
    }

    /// Now.
    #[inline]
    pub fn now(&self) -> Instant {
        const START: u64 = 1_000_000_000;
        let ns = match self.source {
            Source::Tsc { base, mult } => {
                let ticks = tsc().unwrap_or(base).saturating_sub(base);
                ((u128::from(ticks) * u128::from(mult)) >> 32) as u64
            }
            Source::Monotonic { base } => clock_ns(ClockId::Monotonic).saturating_sub(base),
        };
        Instant(START.saturating_add(ns))
    }

    /// Which clock it is, for status outputs.
    pub fn name(&self) -> &'static str {
        match self.source {
            Source::Tsc { .. } => "tsc",
            Source::Monotonic { .. } => "CLOCK_MONOTONIC",
        }
    }
}

/// Time stamp counter of this core; `None` where the architecture has none.
#[inline]
fn tsc() -> Option<u64> {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: RDTSC has no memory operands and is part of every x86-64.
        Some(unsafe { core::arch::x86_64::_rdtsc() })
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        None
    }
}

/// True if the counter runs at one rate in all power states, on all cores (CPUID 0x80000007, EDX bit 8).
fn tsc_is_invariant() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let cpuid = core::arch::x86_64::__cpuid;
        #[allow(unused_unsafe)]
        // SAFETY: CPUID is part of every x86-64; leaf 0x80000000 tells whether the other one exists.
        unsafe {
            cpuid(0x8000_0000).eax >= 0x8000_0007 && cpuid(0x8000_0007).edx & (1 << 8) != 0
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_pace_with_the_system_clock() {
        let clock = Clock::calibrate();
        let (a, std_a) = (clock.now(), std::time::Instant::now());
        let mut last = a;
        while std_a.elapsed() < Duration::from_millis(50) {
            let now = clock.now();
            assert!(now >= last, "went back");
            last = now;
        }
        let (ours, theirs) = (clock.now().since(a) as f64, std_a.elapsed().as_nanos() as f64);
        // A ratio, not an absolute time; wide because the thread may be preempted between the two readings.
        assert!((0.8..1.25).contains(&(ours / theirs)), "{} ran at {}", clock.name(), ours / theirs);
    }
}

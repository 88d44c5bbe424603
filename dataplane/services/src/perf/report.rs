//! What a perf test found.

use super::spec::PerfSpec;
use crate::latency::{LatencyRecorder, LatencySummary};

/// Result of a test. Rates are of one direction; counts are 64 bits wide and saturate.
#[derive(Clone, Debug)]
pub struct PerfReport {
    /// What was asked.
    pub spec: PerfSpec,
    /// Messages measured, of all queue pairs, without warm-up: those that this side asked for, or, of a side that only
    /// receives, those received. 0 on a passive server.
    pub messages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Messages measured that came in by receives: a bidirectional side has these beside its own.
    pub received: u64,
    /// Messages that should have come by the count and did not; UC and UD only.
    pub lost: u64,
    /// Messages posted that were not complete at the end: those of a stopped test, and the last ones of a latency test
    /// whose peer left as soon as it had all it waited for.
    pub unfinished: u64,
    /// Receives still posted.
    pub receives_left: u64,
    /// From the first post to the last completion, in ns; with a margin, the time between the margins.
    pub elapsed_ns: u64,
    /// Time that the worker's thread ran meanwhile, in ns; `None` where nobody measured it.
    pub cpu_ns: Option<u64>,
    /// Messages per second; 0 if no time passed.
    pub msgs_per_s: f64,
    /// 10^9 bytes per second.
    pub gbytes_per_s: f64,
    /// Best window, in 10^9 bytes per second; bandwidth tests long enough to have one.
    pub peak_gbytes_per_s: Option<f64>,
    /// Whole round trips; clients of latency tests.
    pub rtt: Option<LatencySummary>,
    /// The samples behind `rtt`.
    pub samples: Option<LatencyRecorder>,
    /// Ended by [`crate::Handle::stop`] rather than by count or time.
    pub stopped: bool,
}

/// What a test counted.
#[derive(Clone, Copy, Default, Debug)]
pub struct PerfTotals {
    /// As [`PerfReport::messages`].
    pub messages: u64,
    /// As [`PerfReport::received`].
    pub received: u64,
    /// As [`PerfReport::lost`].
    pub lost: u64,
    /// As [`PerfReport::unfinished`].
    pub unfinished: u64,
    /// As [`PerfReport::receives_left`].
    pub receives_left: u64,
    /// As [`PerfReport::elapsed_ns`].
    pub elapsed_ns: u64,
    /// As [`PerfReport::cpu_ns`].
    pub cpu_ns: Option<u64>,
    /// Best window.
    pub peak_msgs_per_s: Option<f64>,
    /// Ended on request rather than by count or time.
    pub stopped: bool,
}

impl PerfReport {
    /// Works out the rates. Also for whoever runs the same test over another transport.
    #[must_use]
    pub fn new(spec: PerfSpec, totals: PerfTotals, samples: Option<LatencyRecorder>) -> Self {
        let bytes = totals.messages.saturating_mul(u64::from(spec.size));
        let per_second = |count: f64| {
            if totals.elapsed_ns == 0 { 0.0 } else { count / (totals.elapsed_ns as f64 / 1e9) }
        };
        PerfReport {
            spec,
            messages: totals.messages,
            bytes,
            received: totals.received,
            lost: totals.lost,
            unfinished: totals.unfinished,
            receives_left: totals.receives_left,
            elapsed_ns: totals.elapsed_ns,
            cpu_ns: totals.cpu_ns,
            msgs_per_s: per_second(totals.messages as f64),
            gbytes_per_s: per_second(bytes as f64) / 1e9,
            peak_gbytes_per_s: totals.peak_msgs_per_s.map(|rate| rate * f64::from(spec.size) / 1e9),
            rtt: samples.as_ref().and_then(LatencyRecorder::summary),
            samples,
            stopped: totals.stopped,
        }
    }

    /// Both directions as one, the way perftest counts a bidirectional SEND test by time: this side's messages and those
    /// that it received. The peak stays that of its own.
    #[must_use]
    pub fn both_directions(&self) -> PerfReport {
        let messages = self.messages.saturating_add(self.received);
        let own = PerfTotals { messages, elapsed_ns: self.elapsed_ns, ..PerfTotals::default() };
        let rates = PerfReport::new(self.spec, own, None);
        PerfReport {
            messages,
            bytes: rates.bytes,
            msgs_per_s: rates.msgs_per_s,
            gbytes_per_s: rates.gbytes_per_s,
            ..self.clone()
        }
    }

    /// True if nothing of the test is left on its queue pairs: the next one may use them.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.unfinished == 0 && self.receives_left == 0
    }

    /// Seconds of CPU per second.
    #[must_use]
    pub fn cpus(&self) -> Option<f64> {
        let cpu_ns = self.cpu_ns?;
        (self.elapsed_ns > 0).then(|| cpu_ns as f64 / self.elapsed_ns as f64)
    }

    /// Cycles of CPU per byte, both directions counted, of a CPU of `hz` cycles per second.
    #[must_use]
    pub fn cycles_per_byte(&self, hz: f64) -> Option<f64> {
        let own = if self.spec.requests() { self.messages } else { 0 };
        let bytes = own.saturating_add(self.received).saturating_mul(u64::from(self.spec.size));
        (bytes > 0).then_some(self.cpu_ns? as f64 / 1e9 * hz / bytes as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::{PerfMode, PerfOp, Role};

    /// PERF-1: 60 hours, 10^12 messages, 10^17 bytes.
    #[test]
    fn sixty_hours_stay_positive_and_exact() {
        let spec = PerfSpec::new(PerfOp::Write, PerfMode::Bw, Role::Client, 100_000);
        let elapsed_ns = 60 * 3600 * 1_000_000_000;
        let totals = PerfTotals {
            messages: 1_000_000_000_000,
            elapsed_ns,
            peak_msgs_per_s: Some(5e6),
            ..PerfTotals::default()
        };
        let report = PerfReport::new(spec, totals, None);
        assert_eq!(report.bytes, 100_000_000_000_000_000);
        let close =
            |got: f64, want: f64| assert!((got - want).abs() <= want * 0.001, "{got} is not near {want}");
        close(report.msgs_per_s, 1e12 / 216_000.0);
        close(report.gbytes_per_s, 1e17 / 216_000.0 / 1e9);
        close(report.peak_gbytes_per_s.unwrap(), 500.0);
    }

    #[test]
    fn both_directions_add_up() {
        let spec = PerfSpec::new(PerfOp::Send, PerfMode::Bw, Role::Client, 1_000);
        let totals = PerfTotals {
            messages: 300,
            received: 700,
            elapsed_ns: 1_000_000,
            cpu_ns: Some(500_000),
            ..PerfTotals::default()
        };
        let one = PerfReport::new(spec, totals, None);
        let both = one.both_directions();
        assert_eq!((both.messages, both.bytes, both.received), (1_000, 1_000_000, 700));
        assert!((both.gbytes_per_s - 1.0).abs() < 1e-9 && (both.msgs_per_s - 1e6).abs() < 1e-3);
        // Half a CPU of 2 GHz for a millisecond: 10^6 cycles for 10^6 bytes.
        assert!((one.cycles_per_byte(2e9).unwrap() - 1.0).abs() < 1e-9);
        assert_eq!(one.cpus(), Some(0.5));
    }

    #[test]
    fn no_time_gives_no_rate_and_no_overflow() {
        let spec = PerfSpec::new(PerfOp::Send, PerfMode::Bw, Role::Server, u32::MAX);
        let totals = PerfTotals { messages: u64::MAX, stopped: true, ..PerfTotals::default() };
        let report = PerfReport::new(spec, totals, None);
        assert_eq!(report.bytes, u64::MAX);
        assert_eq!((report.msgs_per_s, report.gbytes_per_s), (0.0, 0.0));
    }
}

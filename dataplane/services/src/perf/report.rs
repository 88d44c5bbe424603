//! What a perf test found.

use super::spec::PerfSpec;
use crate::latency::{LatencyRecorder, LatencySummary};

/// Result of a test. Rates are of one direction; counts are 64 bits wide and saturate.
#[derive(Clone, Debug)]
pub struct PerfReport {
    /// What was asked.
    pub spec: PerfSpec,
    /// Messages measured (without warm-up). 0 on a passive server.
    pub messages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// From the first post to the last completion, in ns.
    pub elapsed_ns: u64,
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
#[derive(Clone, Copy, Debug)]
pub struct PerfTotals {
    /// Messages measured.
    pub messages: u64,
    /// From the first post to the last completion, in ns.
    pub elapsed_ns: u64,
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
            elapsed_ns: totals.elapsed_ns,
            msgs_per_s: per_second(totals.messages as f64),
            gbytes_per_s: per_second(bytes as f64) / 1e9,
            peak_gbytes_per_s: totals.peak_msgs_per_s.map(|rate| rate * f64::from(spec.size) / 1e9),
            rtt: samples.as_ref().and_then(LatencyRecorder::summary),
            samples,
            stopped: totals.stopped,
        }
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
            stopped: false,
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
    fn no_time_gives_no_rate_and_no_overflow() {
        let spec = PerfSpec::new(PerfOp::Send, PerfMode::Bw, Role::Server, u32::MAX);
        let totals = PerfTotals { messages: u64::MAX, elapsed_ns: 0, peak_msgs_per_s: None, stopped: true };
        let report = PerfReport::new(spec, totals, None);
        assert_eq!(report.bytes, u64::MAX);
        assert_eq!((report.msgs_per_s, report.gbytes_per_s), (0.0, 0.0));
    }
}

//! perftest's units: 2^20 bytes or 10^9 bits a second, microseconds of half or whole round trips.

use ferroce_services::{PerfOp, PerfReport, PerfSpec};

use crate::perf::perftest::codec;
use crate::perf::talk::Measured;

/// True where latency is told as half the round trip.
pub fn is_halved(op: PerfOp) -> bool {
    matches!(op, PerfOp::Send | PerfOp::Write)
}

/// Trips of a round trip that are told as one.
pub fn trips(op: PerfOp) -> f64 {
    if is_halved(op) { 2.0 } else { 1.0 }
}

/// 10^9 bytes a second in the unit of the report.
pub fn bandwidth(gbytes_per_s: f64, gbits: bool) -> f64 {
    if gbits { gbytes_per_s * 8.0 } else { gbytes_per_s * 1e9 / 1_048_576.0 }
}

fn gbytes(bandwidth: f64, gbits: bool) -> f64 {
    if gbits { bandwidth / 8.0 } else { bandwidth * 1_048_576.0 / 1e9 }
}

/// The unit's name.
pub fn bandwidth_unit(gbits: bool) -> &'static str {
    if gbits { "Gb/sec" } else { "MiB/sec" }
}

/// What we measured, as perftest tells it.
pub fn as_original(report: &PerfReport, gbits: bool) -> codec::Report {
    codec::Report {
        size: report.spec.size.into(),
        iters: report.messages,
        peak: report.peak_gbytes_per_s.map_or(0.0, |peak| bandwidth(peak, gbits)),
        average: bandwidth(report.gbytes_per_s, gbits),
        mpps: report.msgs_per_s / 1e6,
    }
}

/// What a program of perftest measured. It was told the same unit, or its numbers are off by a factor that nobody sees.
pub fn measured(report: &codec::Report, gbits: bool) -> Measured {
    let msgs_per_s = report.mpps * 1e6;
    let elapsed = if msgs_per_s > 0.0 { report.iters as f64 / msgs_per_s * 1e9 } else { 0.0 };
    Measured {
        messages: report.iters,
        elapsed_ns: elapsed as u64,
        gbytes_per_s: gbytes(report.average, gbits),
        gbytes_per_s_peak: (report.peak > 0.0).then(|| gbytes(report.peak, gbits)),
        msgs_per_s,
    }
}

/// Both directions together, where both are known.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sum {
    /// Messages of our direction, as perftest shows them.
    pub messages: u64,
    /// 10^9 bytes per second.
    pub gbytes_per_s: f64,
    /// Best window.
    pub peak: Option<f64>,
    /// Messages per second.
    pub msgs_per_s: f64,
}

impl Sum {
    /// The numbers of a row: ours, the peer's where this side only serves, or both added.
    pub fn of(report: &PerfReport, theirs: Option<&Measured>, spec: &PerfSpec) -> Sum {
        let own = Sum {
            messages: report.messages,
            gbytes_per_s: report.gbytes_per_s,
            peak: report.peak_gbytes_per_s,
            msgs_per_s: report.msgs_per_s,
        };
        let Some(theirs) = theirs else { return own };
        let told = Sum {
            messages: theirs.messages,
            gbytes_per_s: theirs.gbytes_per_s,
            peak: theirs.gbytes_per_s_peak,
            msgs_per_s: theirs.msgs_per_s,
        };
        if spec.is_passive() {
            return told;
        }
        if !spec.bidirectional {
            return own;
        }
        Sum {
            messages: own.messages,
            gbytes_per_s: own.gbytes_per_s + told.gbytes_per_s,
            peak: own.peak.zip(told.peak).map(|(a, b)| a + b),
            msgs_per_s: own.msgs_per_s + told.msgs_per_s,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferroce_services::{PerfMode, PerfTotals, Role};

    fn report(bidirectional: bool, role: Role) -> PerfReport {
        let spec = PerfSpec { bidirectional, ..PerfSpec::new(PerfOp::Write, PerfMode::Bw, role, 1 << 20) };
        let totals = PerfTotals {
            messages: 1000,
            elapsed_ns: 1_000_000_000,
            peak_msgs_per_s: Some(2000.0),
            ..PerfTotals::default()
        };
        PerfReport::new(spec, totals, None)
    }

    #[test]
    fn units_go_there_and_back() {
        for gbits in [false, true] {
            let told = as_original(&report(false, Role::Client), gbits);
            assert!((told.average - if gbits { 8.388_608 } else { 1000.0 }).abs() < 1e-6);
            let back = measured(&told, gbits);
            assert!((back.gbytes_per_s - 1.048_576).abs() < 1e-9);
            assert!((back.gbytes_per_s_peak.unwrap() - 2.097_152).abs() < 1e-9);
            assert_eq!((back.messages, back.elapsed_ns), (1000, 1_000_000_000));
        }
        assert_eq!(measured(&codec::Report::default(), false).elapsed_ns, 0);
    }

    #[test]
    fn rows_are_of_one_side_or_of_both() {
        let theirs = measured(&as_original(&report(true, Role::Server), false), false);
        let both = report(true, Role::Client);
        let sum = Sum::of(&both, Some(&theirs), &both.spec);
        assert!((sum.msgs_per_s - 2000.0).abs() < 1e-6);
        assert_eq!(sum.messages, 1000);
        let one = report(false, Role::Client);
        assert!((Sum::of(&one, Some(&theirs), &one.spec).msgs_per_s - 1000.0).abs() < 1e-6);
        let mut served = report(false, Role::Server);
        served.msgs_per_s = 0.0;
        assert!((Sum::of(&served, Some(&theirs), &served.spec).msgs_per_s - 1000.0).abs() < 1e-6);
    }
}

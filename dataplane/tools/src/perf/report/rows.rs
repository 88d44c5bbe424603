//! Column heads and rows, with perftest's widths and tabs, and the lists of latencies.

use std::fmt::Write;

use ferroce_services::{LatencySummary, PerfMode, PerfSpec};

use super::units::{self, Sum};
use super::{Facts, Finding};
use crate::perf::options::{Only, PerfArgs};

/// What turns nanoseconds of a round trip into the number that is told.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    per_ns: f64,
    unit: &'static str,
}

impl Scale {
    /// Microseconds, or cycles of a clock of `hz`; of half or whole round trips.
    pub fn of(spec: &PerfSpec, cycles_hz: Option<f64>) -> Scale {
        let trips = units::trips(spec.op);
        match cycles_hz {
            Some(hz) => Scale { per_ns: hz / 1e9 / trips, unit: "cycles" },
            None => Scale { per_ns: 1e-3 / trips, unit: "usec" },
        }
    }

    fn told(self, ns: f64) -> f64 {
        ns * self.per_ns
    }
}

/// The column heads.
pub fn heads(spec: &PerfSpec, args: &PerfArgs, scale: Scale) -> String {
    let unit = scale.unit;
    let mut text = match (spec.mode, spec.duration_ns) {
        (PerfMode::Bw, _) => {
            let unit = units::bandwidth_unit(args.report.gbits);
            format!(" #bytes     #iterations    BW peak[{unit}]    BW average[{unit}]   MsgRate[Mpps]")
        }
        (PerfMode::Lat, None) => format!(
            " #bytes #iterations    t_min[{unit}]    t_max[{unit}]  t_typical[{unit}]    t_avg[{unit}]    \
             t_stdev[{unit}]   99% percentile[{unit}]   99.9% percentile[{unit}] "
        ),
        (PerfMode::Lat, Some(_)) => format!(" #bytes        #iterations       t_avg[{unit}]    tps average"),
    };
    if args.report.cpu_util {
        text.push_str("    CPU_Util[%]");
    }
    text
}

/// One row; `None` where this side has nothing to tell.
pub fn row(finding: &Finding, facts: &Facts<'_>, scale: Scale, cpu_percent: Option<f64>) -> Option<String> {
    let (report, spec) = (&finding.report, &facts.item.spec);
    let mut text = match (spec.mode, &report.rtt) {
        (PerfMode::Lat, Some(rtt)) => latency(spec, report.messages, report.msgs_per_s, rtt, scale),
        (PerfMode::Lat, None) => return None,
        (PerfMode::Bw, _) => {
            if spec.is_passive() && finding.theirs.is_none() {
                return None;
            }
            bandwidth(spec, &Sum::of(report, finding.theirs.as_ref(), spec), facts.args)
        }
    };
    if let Some(percent) = cpu_percent {
        let _ = write!(text, "\t    {percent:<3.2}");
    }
    Some(text)
}

/// A row of one direction alone.
pub fn one_direction(spec: &PerfSpec, sum: &Sum, args: &PerfArgs) -> String {
    bandwidth(spec, sum, args)
}

fn bandwidth(spec: &PerfSpec, sum: &Sum, args: &PerfArgs) -> String {
    let gbits = args.report.gbits;
    let unit = |gbytes: f64| units::bandwidth(gbytes, gbits);
    // As perftest prints a peak that it was told not to measure, or could not.
    let has_peak = !args.report.no_peak && spec.duration_ns.is_none();
    let peak = if has_peak { sum.peak.map_or(0.0, unit) } else { 0.0 };
    let (average, rate) = (unit(sum.gbytes_per_s), sum.msgs_per_s / 1e6);
    let (size, messages) = (spec.size, sum.messages);
    if gbits && average < 0.1 {
        return format!(
            " {size:<7}    {messages}           {peak:<7.6}            {average:<7.6}            {rate:<7.6}"
        );
    }
    format!(" {size:<7}    {messages:<10}       {peak:<7.2}            {average:<7.2}\t\t   {rate:<7.6}")
}

fn latency(spec: &PerfSpec, messages: u64, per_second: f64, rtt: &LatencySummary, scale: Scale) -> String {
    let told = |ns: f64| scale.told(ns);
    let size = spec.size;
    if spec.duration_ns.is_some() {
        // perftest counts both directions of a ping-pong as transactions of their own.
        let tps = per_second * units::trips(spec.op);
        let average = told(rtt.mean_ns);
        return format!(" {size:<7}       {messages}            {average:<7.2}        {tps:<7.2}");
    }
    format!(
        " {size:<7} {messages}          {:<7.2}        {:<7.2}      {:<7.2}  \t       {:<7.2}     \t{:<7.2}\t\t{:<7.2} \t\t{:<7.2}",
        told(rtt.min_ns as f64),
        told(rtt.max_ns as f64),
        told(rtt.p50_ns as f64),
        told(rtt.mean_ns),
        told(rtt.stdev_ns),
        told(rtt.p99_ns as f64),
        told(rtt.p999_ns as f64)
    )
}

/// The one number of `--output`.
pub fn only(finding: &Finding, facts: &Facts<'_>, what: Only, scale: Scale) -> Option<String> {
    let (report, spec) = (&finding.report, &facts.item.spec);
    let sum = Sum::of(report, finding.theirs.as_ref(), spec);
    match (what, spec.mode) {
        (Only::Latency, PerfMode::Lat) => report.rtt.map(|rtt| format!("{:.6}", scale.told(rtt.mean_ns))),
        (Only::Bandwidth, PerfMode::Bw) => {
            Some(format!("{:.6}", units::bandwidth(sum.gbytes_per_s, facts.args.report.gbits)))
        }
        (Only::MessageRate, PerfMode::Bw) => Some(format!("{:.6}", sum.msgs_per_s / 1e6)),
        _ => None,
    }
}

/// Lines of `-H`: each sample, shortest first. The histogram knows values to three digits.
pub fn histogram(finding: &Finding, scale: Scale) -> Option<String> {
    let samples = finding.report.samples.as_ref()?;
    let mut text = format!("#, {}", scale.unit);
    let mut number = 0u64;
    for step in samples.histogram().iter_recorded() {
        for _ in 0..step.count_since_last_iteration() {
            number += 1;
            let ns = step.value_iterated_to().clamp(finding.report.rtt?.min_ns, finding.report.rtt?.max_ns);
            let _ = write!(text, "\n{number}, {}", plain(scale.told(ns as f64)));
        }
    }
    Some(text)
}

/// Lines of `-U`: each sample, in order.
pub fn unsorted(finding: &Finding, scale: Scale) -> Option<String> {
    let samples = finding.report.samples.as_ref()?;
    let mut text = format!("#, {}", scale.unit);
    for (index, ns) in samples.in_order().iter().enumerate() {
        let _ = write!(text, "\n{}, {}", index + 1, plain(scale.told(*ns as f64)));
    }
    Some(text)
}

/// A number of six significant digits, as C's `%g` has it for the sizes that occur here.
fn plain(value: f64) -> String {
    let digits = if value > 0.0 { 5 - value.log10().floor().clamp(-6.0, 5.0) as i32 } else { 0 };
    let text = format!("{value:.*}", usize::try_from(digits).unwrap_or(0));
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_string(),
        false => text,
    }
}

/// Percentiles and CPU of a run, for people: `--percentiles`.
pub fn percentiles(finding: &Finding, scale: Scale, hz: Option<f64>) -> String {
    let report = &finding.report;
    let mut text = String::new();
    if let Some(samples) = &report.samples {
        text.push_str(&format!(" percentiles[{}]:", scale.unit));
        for (name, quantile) in [
            ("50%", 0.5),
            ("75%", 0.75),
            ("90%", 0.9),
            ("95%", 0.95),
            ("99%", 0.99),
            ("99.9%", 0.999),
            ("99.99%", 0.9999),
            ("100%", 1.0),
        ] {
            // Four a line, so that they fit a screen.
            if matches!(name, "50%" | "99%") {
                text.push_str("\n ");
            }
            let _ = write!(text, " {name:>7} {:<10.2}", scale.told(samples.quantile(quantile) as f64));
        }
        text.push('\n');
    }
    match report.cpus() {
        Some(cpus) => {
            let _ = write!(text, " CPU: {:.1} % of a core", cpus * 100.0);
            if let Some(cycles) = hz.and_then(|hz| report.cycles_per_byte(hz)) {
                let _ = write!(text, ", {cycles:.3} cycles/byte");
            }
        }
        None => text.push_str(" CPU: not measured"),
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferroce_services::{PerfOp, Role};

    fn summary() -> LatencySummary {
        LatencySummary {
            samples: 200,
            min_ns: 188_980,
            max_ns: 5_181_860,
            mean_ns: 369_060.0,
            stdev_ns: 535_180.0,
            p50_ns: 221_860,
            p90_ns: 400_000,
            p99_ns: 3_998_880,
            p999_ns: 5_181_860,
            p9999_ns: 5_181_860,
        }
    }

    /// Recorded rows of the originals, byte for byte.
    #[test]
    fn rows_are_the_originals() {
        let spec = PerfSpec::new(PerfOp::Write, PerfMode::Lat, Role::Client, 64);
        let row = latency(&spec, 200, 1.0, &summary(), Scale::of(&spec, None));
        assert_eq!(
            row,
            " 64      200          94.49          2590.93      110.93   \t       184.53      \t267.59 \t\t1999.44 \t\t2590.93"
        );
        let whole = PerfSpec { op: PerfOp::Read, ..spec };
        let row = latency(&whole, 200, 1.0, &summary(), Scale::of(&whole, None));
        assert_eq!(row.split_whitespace().nth(2), Some("188.98"));
        let cycles = latency(&spec, 200, 1.0, &summary(), Scale::of(&spec, Some(2e9)));
        assert_eq!(cycles.split_whitespace().nth(2), Some("188980.00"));
        let timed = PerfSpec { duration_ns: Some(3_000_000_000), op: PerfOp::Send, size: 2, ..spec };
        let mean = LatencySummary { mean_ns: 297_840.0, ..summary() };
        let row = latency(&timed, 10074, 3357.43 / 2.0, &mean, Scale::of(&timed, None));
        assert_eq!(row, " 2             10074            148.92         3357.43");
    }

    #[test]
    fn numbers_of_lists_have_six_digits() {
        for (value, text) in [
            (0.0, "0"),
            (1.5, "1.5"),
            (12.345_678, "12.3457"),
            (0.123_456_78, "0.123457"),
            (123_456.7, "123457"),
            (100.0, "100"),
            (1_234_567.0, "1234567"),
        ] {
            assert_eq!(plain(value), text);
        }
    }
}

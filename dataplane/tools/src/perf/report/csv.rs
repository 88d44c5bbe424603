//! `--csv`: a head, then a line per test. Columns are only added at the end.

use super::units::{self, Sum};
use super::{Facts, Finding};
use crate::perf::options::connection_name;

/// The head.
pub const HEAD: &str = "test,transport,connection,qps,size_bytes,iterations,elapsed_ns,gbytes_per_s,gbytes_per_s_peak,\
msgs_per_s,t_min_usec,t_max_usec,t_typical_usec,t_avg_usec,t_stdev_usec,percentile_99_usec,percentile_99.9_usec,\
cpus,lost,sweep";

/// A line. Latencies are half round trips where perftest's are.
pub fn line(finding: &Finding, facts: &Facts<'_>) -> String {
    let (report, spec) = (&finding.report, &facts.item.spec);
    let sum = Sum::of(report, finding.theirs.as_ref(), spec);
    let number = |value: Option<f64>| value.map_or(String::new(), |v| format!("{v:.6}"));
    let usec = |ns: f64| Some(ns / 1e3 / units::trips(spec.op));
    let rtt = report.rtt.as_ref();
    let latencies = [
        rtt.and_then(|r| usec(r.min_ns as f64)),
        rtt.and_then(|r| usec(r.max_ns as f64)),
        rtt.and_then(|r| usec(r.p50_ns as f64)),
        rtt.and_then(|r| usec(r.mean_ns)),
        rtt.and_then(|r| usec(r.stdev_ns)),
        rtt.and_then(|r| usec(r.p99_ns as f64)),
        rtt.and_then(|r| usec(r.p999_ns as f64)),
    ];
    let mut fields = vec![
        facts.item.test().to_string(),
        facts.transport().name().to_string(),
        connection_name(spec.connection).to_string(),
        spec.qps.to_string(),
        spec.size.to_string(),
        sum.messages.to_string(),
        report.elapsed_ns.to_string(),
        format!("{:.6}", sum.gbytes_per_s),
        number(sum.peak),
        format!("{:.3}", sum.msgs_per_s),
    ];
    fields.extend(latencies.map(number));
    fields.push(number(report.cpus()));
    fields.push(report.lost.to_string());
    fields.push(facts.item.label.clone().unwrap_or_default());
    fields.join(",")
}

#[cfg(test)]
mod tests {
    use super::HEAD;

    #[test]
    fn the_head_has_no_blank_and_every_column_a_unit() {
        assert!(!HEAD.contains(' '));
        assert_eq!(HEAD.split(',').count(), 20);
    }
}

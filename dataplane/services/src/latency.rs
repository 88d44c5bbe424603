//! Latency samples: recorded without allocation, summed up without loss.
//!
//! All samples are kept; none is dropped as an outlier. Minimum, maximum, mean and deviation come from exact sums,
//! percentiles from a histogram of three significant digits (relative error below 0.1 %).

use hdrhistogram::Histogram;

/// Longest sample that the histogram tells apart: 60 s. Longer ones count as 60 s in percentiles; the maximum and the
/// mean stay exact.
pub const LONGEST_NS: u64 = 60_000_000_000;

/// Records samples in ns.
#[derive(Clone, Debug)]
pub struct LatencyRecorder {
    histogram: Histogram<u64>,
    count: u64,
    sum: u128,
    sum_of_squares: u128,
    min: u64,
    max: u64,
    /// The first samples in order, as many as there is room for.
    order: Vec<u64>,
}

impl Default for LatencyRecorder {
    fn default() -> Self {
        Self::new()
    }
}

impl LatencyRecorder {
    /// An empty recorder; about 220 KiB, allocated here and never again.
    ///
    /// # Panics
    /// Never: the bounds are constants that the histogram accepts.
    #[must_use]
    pub fn new() -> Self {
        let histogram =
            Histogram::new_with_bounds(1, LONGEST_NS, 3).expect("1 ns to 60 s with 3 digits is valid");
        LatencyRecorder {
            histogram,
            count: 0,
            sum: 0,
            sum_of_squares: 0,
            min: u64::MAX,
            max: 0,
            order: Vec::new(),
        }
    }

    /// Also keeps the first `room` samples in the order in which they come: 8 bytes each, allocated here.
    #[must_use]
    pub fn keeping(mut self, room: usize) -> Self {
        self.order = Vec::with_capacity(room);
        self
    }

    /// The samples that [`LatencyRecorder::keeping`] kept, in order, in ns.
    #[must_use]
    pub fn in_order(&self) -> &[u64] {
        &self.order
    }

    /// Adds one sample.
    pub fn record(&mut self, ns: u64) {
        self.record_n(ns, 1);
    }

    /// Adds `count` equal samples.
    pub fn record_n(&mut self, ns: u64, count: u64) {
        if count == 0 {
            return;
        }
        self.histogram.saturating_record_n(ns.clamp(1, LONGEST_NS), count);
        let (value, times) = (u128::from(ns), u128::from(count));
        self.count = self.count.saturating_add(count);
        self.sum = self.sum.saturating_add(value.saturating_mul(times));
        self.sum_of_squares =
            self.sum_of_squares.saturating_add(value.saturating_mul(value).saturating_mul(times));
        self.min = self.min.min(ns);
        self.max = self.max.max(ns);
        let room = self.order.capacity() - self.order.len();
        let kept = usize::try_from(count).unwrap_or(usize::MAX).min(room);
        self.order.extend(std::iter::repeat_n(ns, kept));
    }

    /// Samples recorded.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Value at a quantile of 0.0 ..= 1.0, in ns; 0 without samples. Never outside minimum and maximum.
    #[must_use]
    pub fn quantile(&self, quantile: f64) -> u64 {
        if self.count == 0 {
            return 0;
        }
        self.histogram.value_at_quantile(quantile).clamp(self.min, self.max)
    }

    /// The histogram itself, for those who want every bucket.
    #[must_use]
    pub fn histogram(&self) -> &Histogram<u64> {
        &self.histogram
    }

    /// The numbers that reports print; `None` without samples.
    #[must_use]
    pub fn summary(&self) -> Option<LatencySummary> {
        if self.count == 0 {
            return None;
        }
        let count = self.count as f64;
        let mean = self.sum as f64 / count;
        let variance = (self.sum_of_squares as f64 / count - mean * mean).max(0.0);
        Some(LatencySummary {
            samples: self.count,
            min_ns: self.min,
            max_ns: self.max,
            mean_ns: mean,
            stdev_ns: variance.sqrt(),
            p50_ns: self.quantile(0.5),
            p90_ns: self.quantile(0.9),
            p99_ns: self.quantile(0.99),
            p999_ns: self.quantile(0.999),
            p9999_ns: self.quantile(0.9999),
        })
    }
}

/// Summary of latency samples, in ns.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LatencySummary {
    /// Samples, all of them.
    pub samples: u64,
    /// Shortest.
    pub min_ns: u64,
    /// Longest.
    pub max_ns: u64,
    /// Mean.
    pub mean_ns: f64,
    /// Standard deviation of the population.
    pub stdev_ns: f64,
    /// Median.
    pub p50_ns: u64,
    /// 90th percentile.
    pub p90_ns: u64,
    /// 99th percentile.
    pub p99_ns: u64,
    /// 99.9th percentile.
    pub p999_ns: u64,
    /// 99.99th percentile.
    pub p9999_ns: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_sample_gives_no_summary() {
        assert_eq!(LatencyRecorder::new().summary(), None);
        assert_eq!(LatencyRecorder::new().quantile(0.5), 0);
    }

    #[test]
    fn all_samples_count_and_extremes_are_exact() {
        let mut recorder = LatencyRecorder::new();
        for ns in [1_003, 2_001, 3_000, 1_000_000_007] {
            recorder.record(ns);
        }
        let summary = recorder.summary().unwrap();
        assert_eq!((summary.samples, summary.min_ns, summary.max_ns), (4, 1_003, 1_000_000_007));
        assert!((summary.mean_ns - 250_001_502.75).abs() < 1.0);
    }

    /// PERF-1: 10^10 entries with latencies up to 10 s stay positive, exact to 0.1 % and ordered.
    #[test]
    fn ten_billion_samples_up_to_ten_seconds() {
        let mut recorder = LatencyRecorder::new();
        let (short, middle, long) = (1_500_u64, 20_000_u64, 10_000_000_000_u64);
        recorder.record_n(short, 8_000_000_000);
        recorder.record_n(middle, 1_980_000_000);
        recorder.record_n(long, 20_000_000);
        let summary = recorder.summary().unwrap();
        assert_eq!(summary.samples, 10_000_000_000);
        let close =
            |got: f64, want: f64| assert!((got - want).abs() <= want * 0.001, "{got} is not near {want}");
        close(summary.mean_ns, 0.8 * 1_500.0 + 0.198 * 20_000.0 + 0.002 * 1e10);
        close(summary.p50_ns as f64, short as f64);
        close(summary.p90_ns as f64, middle as f64);
        close(summary.p999_ns as f64, long as f64);
        assert_eq!(summary.max_ns, long);
        assert!(summary.stdev_ns > 0.0);
        let ranks = [
            summary.min_ns,
            summary.p50_ns,
            summary.p90_ns,
            summary.p99_ns,
            summary.p999_ns,
            summary.p9999_ns,
        ];
        assert!(ranks.is_sorted(), "{ranks:?}");
    }

    #[test]
    fn the_first_samples_are_kept_in_order_and_no_more() {
        let mut recorder = LatencyRecorder::new().keeping(4);
        let room = recorder.order.capacity();
        for ns in [30, 10, 20] {
            recorder.record(ns);
        }
        recorder.record_n(5, 1_000_000);
        assert_eq!(&recorder.in_order()[..4], [30, 10, 20, 5]);
        assert_eq!((recorder.in_order().len(), recorder.order.capacity()), (room, room), "it never grows");
        assert_eq!(recorder.count(), 1_000_003);
        assert!(LatencyRecorder::new().in_order().is_empty());
    }

    #[test]
    fn sub_microsecond_spread_is_not_lost() {
        let mut recorder = LatencyRecorder::new();
        recorder.record_n(900, 500);
        recorder.record_n(1_100, 500);
        let summary = recorder.summary().unwrap();
        assert!((summary.stdev_ns - 100.0).abs() < 0.5, "{}", summary.stdev_ns);
    }

    #[test]
    fn a_sample_beyond_the_histogram_keeps_its_maximum() {
        let mut recorder = LatencyRecorder::new();
        recorder.record(LONGEST_NS * 3);
        let summary = recorder.summary().unwrap();
        assert_eq!(summary.max_ns, LONGEST_NS * 3);
        assert!(summary.p50_ns >= LONGEST_NS);
    }
}

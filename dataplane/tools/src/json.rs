//! Parts of the machine-readable output that the tools share. Text may change; these keys only grow.

use ferroce_nic::Fallback;
use ferroce_services::LatencySummary;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::plane::Plane;

/// A fallback in force.
#[derive(Serialize, Debug)]
pub struct FallbackJson {
    wanted: String,
    got: String,
    reason: String,
    hint: String,
}

/// Fallbacks in force.
pub fn fallbacks(all: &[Fallback]) -> Vec<FallbackJson> {
    all.iter()
        .map(|f| FallbackJson {
            wanted: f.wanted.clone(),
            got: f.got.clone(),
            reason: f.reason.clone(),
            hint: f.hint.clone(),
        })
        .collect()
}

/// One line for people.
pub fn fallback_line(f: &Fallback) -> String {
    let hint = if f.hint.is_empty() { String::new() } else { format!("; {}", f.hint) };
    format!("fallback: {} instead of {}: {}{hint}", f.got, f.wanted, f.reason)
}

/// Whole round trips in ns.
#[derive(Serialize, Debug, Default)]
pub struct RttJson {
    /// Samples, all of them.
    pub rtt_samples: Option<u64>,
    rtt_ns_min: Option<u64>,
    rtt_ns_mean: Option<f64>,
    rtt_ns_stdev: Option<f64>,
    rtt_ns_p50: Option<u64>,
    rtt_ns_p90: Option<u64>,
    rtt_ns_p99: Option<u64>,
    rtt_ns_p999: Option<u64>,
    rtt_ns_p9999: Option<u64>,
    rtt_ns_max: Option<u64>,
}

impl From<Option<LatencySummary>> for RttJson {
    fn from(summary: Option<LatencySummary>) -> Self {
        let Some(s) = summary else { return RttJson::default() };
        RttJson {
            rtt_samples: Some(s.samples),
            rtt_ns_min: Some(s.min_ns),
            rtt_ns_mean: Some(s.mean_ns),
            rtt_ns_stdev: Some(s.stdev_ns),
            rtt_ns_p50: Some(s.p50_ns),
            rtt_ns_p90: Some(s.p90_ns),
            rtt_ns_p99: Some(s.p99_ns),
            rtt_ns_p999: Some(s.p999_ns),
            rtt_ns_p9999: Some(s.p9999_ns),
            rtt_ns_max: Some(s.max_ns),
        }
    }
}

/// The data plane: what it is and what it counted.
#[derive(Serialize, Debug)]
pub struct PlaneJson {
    /// Device.
    pub dev: String,
    /// Mode of its port, in words.
    pub dev_mode: String,
    /// Core of the worker.
    pub core: Option<usize>,
    /// Idle policy.
    pub idle: &'static str,
    /// Clock of the worker.
    pub clock: &'static str,
    /// Fallbacks in force.
    pub fallbacks: Vec<FallbackJson>,
    /// Faults on purpose.
    pub faults: Option<String>,
    /// The port's counters.
    pub port: Map<String, Value>,
    /// The engine's counters that are not 0.
    pub engine: Map<String, Value>,
}

impl PlaneJson {
    /// Reads everything once.
    pub fn of(plane: &Plane) -> Self {
        PlaneJson {
            dev: plane.dev().to_string(),
            dev_mode: plane.mode(),
            core: plane.core(),
            idle: plane.idle().name(),
            clock: plane.clock(),
            fallbacks: fallbacks(&plane.fallbacks()),
            faults: plane.faults().map(str::to_string),
            port: plane
                .port_counters()
                .into_iter()
                .map(|(name, value)| (name.to_string(), value.into()))
                .collect(),
            engine: plane.engine_counters().into_iter().map(|(name, value)| (name, value.into())).collect(),
        }
    }
}

/// Prints one object on one line.
pub fn print(value: &impl Serialize) {
    match serde_json::to_string(value) {
        Ok(text) => crate::out::say!("{text}"),
        Err(error) => eprintln!("JSON: {error}"),
    }
}

/// Prints the counters for people, on standard error so that standard output stays what the original prints.
pub fn print_counters(plane: &Plane) {
    let line = |name: &str, counters: Vec<String>| eprintln!("{name}: {}", counters.join(", "));
    line("port", plane.port_counters().iter().map(|(name, value)| format!("{name} {value}")).collect());
    line("engine", plane.engine_counters().iter().map(|(name, value)| format!("{name} {value}")).collect());
}

//! One test as data: our own JSON. Keys only grow; what changes its meaning or goes changes [`SCHEMA`].

use ferroce_services::{PerfReport, Role};
use serde::Serialize;

use super::host::Host;
use super::{Facts, Finding, units};
use crate::json::{PlaneJson, RttJson};
use crate::perf::options::{atomic_name, connection_name};
use crate::perf::talk::{Measured, RdmaEnd};

/// Version of the form.
pub const SCHEMA: u32 = 2;

/// One test.
#[derive(Serialize)]
pub struct Row<'r> {
    schema: u32,
    tool: &'static str,
    version: &'static str,
    transport: &'static str,
    op: &'static str,
    mode: &'static str,
    atomic: Option<&'static str>,
    connection: &'static str,
    qps: u32,
    bidirectional: bool,
    role: &'static str,
    peer: String,
    peer_kind: String,
    sweep: Option<String>,
    size_bytes: u32,
    /// Messages measured, of all queue pairs.
    iterations: u64,
    warmup: u64,
    duration_ns: Option<u64>,
    margin_ns: u64,
    bytes: u64,
    elapsed_ns: u64,
    msgs_per_s: f64,
    gbytes_per_s: f64,
    gbytes_per_s_peak: Option<f64>,
    received: u64,
    lost: u64,
    unfinished: u64,
    /// What the other side measured.
    peer_measured: Option<Measured>,
    #[serde(flatten)]
    rtt: RttJson,
    /// `t_…` of perftest are these over so many.
    rtt_trips: f64,
    /// Buckets of the histogram: value in ns, count.
    rtt_ns_histogram: Option<Vec<(u64, u64)>>,
    #[serde(flatten)]
    cpu: CpuJson,
    tx_depth: u32,
    rx_depth: u32,
    cq_mod: u32,
    post_list: u32,
    inline_bytes: u32,
    events: bool,
    rate_msgs_per_s: Option<u64>,
    rate_burst: Option<u32>,
    open_loop: bool,
    data_checked: bool,
    seed: u64,
    path_mtu: Option<u32>,
    reads_outstanding: Option<u8>,
    sl: u8,
    traffic_class: u8,
    timeout: u8,
    retries: u8,
    local: Option<RdmaEnd>,
    remote: Option<RdmaEnd>,
    #[serde(flatten)]
    place: Place,
    host: &'r Host,
}

/// CPU of the worker's thread.
#[derive(Serialize)]
struct CpuJson {
    cpu_ns: Option<u64>,
    cpus: Option<f64>,
    cycles_per_byte: Option<f64>,
}

/// Where the test ran.
#[derive(Serialize)]
#[serde(untagged)]
enum Place {
    Plane(Box<PlaneJson>),
    Socket { core: Option<usize>, idle: &'static str, fallbacks: [(); 0] },
}

fn histogram(report: &PerfReport) -> Option<Vec<(u64, u64)>> {
    let recorded = report.samples.as_ref()?.histogram().iter_recorded();
    Some(recorded.map(|step| (step.value_iterated_to(), step.count_since_last_iteration())).collect())
}

impl<'r> Row<'r> {
    /// The finding as data.
    pub fn of(finding: &Finding, facts: &Facts<'_>, host: &'r Host) -> Row<'r> {
        let (report, item) = (&finding.report, facts.item);
        let (spec, path) = (&item.spec, &item.path);
        Row {
            schema: SCHEMA,
            tool: "perf",
            version: env!("CARGO_PKG_VERSION"),
            transport: facts.transport().name(),
            op: spec.op.name(),
            mode: spec.mode.name(),
            atomic: spec.op.is_atomic().then(|| atomic_name(spec.op)),
            connection: connection_name(spec.connection),
            qps: spec.qps,
            bidirectional: spec.bidirectional,
            role: if facts.role == Role::Client { "client" } else { "server" },
            peer: facts.peer.to_string(),
            peer_kind: facts.kind.clone(),
            sweep: item.label.clone(),
            size_bytes: spec.size,
            iterations: report.messages,
            warmup: spec.warmup,
            duration_ns: spec.duration_ns,
            margin_ns: spec.margin_ns,
            bytes: report.bytes,
            elapsed_ns: report.elapsed_ns,
            msgs_per_s: report.msgs_per_s,
            gbytes_per_s: report.gbytes_per_s,
            gbytes_per_s_peak: report.peak_gbytes_per_s,
            received: report.received,
            lost: report.lost,
            unfinished: report.unfinished,
            peer_measured: finding.theirs,
            rtt: report.rtt.into(),
            rtt_trips: units::trips(spec.op),
            rtt_ns_histogram: histogram(report),
            cpu: CpuJson {
                cpu_ns: report.cpu_ns,
                cpus: report.cpus(),
                cycles_per_byte: host.hz().and_then(|hz| report.cycles_per_byte(hz)),
            },
            tx_depth: spec.tx_depth,
            rx_depth: spec.rx_depth,
            cq_mod: spec.signal_every(),
            post_list: spec.post_list,
            inline_bytes: spec.inline_bytes,
            events: spec.events,
            rate_msgs_per_s: spec.rate.map(|r| r.msgs_per_s),
            rate_burst: spec.rate.map(|r| r.burst),
            open_loop: spec.open_loop,
            data_checked: spec.check_data,
            seed: spec.seed,
            path_mtu: facts.ends.as_ref().map(|e| e.mtu),
            reads_outstanding: facts.ends.as_ref().map(|e| e.reads),
            sl: path.marks.sl,
            traffic_class: path.marks.traffic_class,
            timeout: path.timeout,
            retries: path.retries,
            local: facts.ends.as_ref().map(|e| e.own.clone()),
            remote: facts.ends.as_ref().map(|e| e.remote.clone()),
            place: match facts.plane {
                Some(plane) => Place::Plane(Box::new(PlaneJson::of(plane))),
                None => Place::Socket { core: facts.core, idle: "blocking", fallbacks: [] },
            },
            host,
        }
    }
}

//! What `perf` prints: perftest's header and columns, and our JSON.

use std::fmt::Write;

use ferroce_services::{LatencySummary, PerfMode, PerfOp, PerfReport, PerfSpec, Role};
use serde::Serialize;

use super::options::{PerfArgs, Transport};
use super::rdma::Ends;
use super::talk::RdmaEnd;
use crate::json::{PlaneJson, RttJson};
use crate::plane::Plane;

/// perftest's rule.
pub const RULE: &str =
    "---------------------------------------------------------------------------------------";

/// What is known besides the report.
pub struct Facts<'f> {
    /// Options.
    pub args: &'f PerfArgs,
    /// Side.
    pub role: Role,
    /// The peer's TCP address.
    pub peer: &'f str,
    /// The data plane, with RDMA.
    pub plane: Option<&'f Plane>,
    /// Core of the worker or of the socket's thread.
    pub core: Option<usize>,
    /// Queue pairs, with RDMA.
    pub ends: Option<Ends>,
}

fn operation(op: PerfOp, transport: Transport) -> &'static str {
    match (op, transport) {
        (PerfOp::Send, _) => "Send",
        (PerfOp::Write, Transport::Rdma) => "RDMA_Write",
        (PerfOp::Read, Transport::Rdma) => "RDMA_Read",
        (PerfOp::Write, _) => "Write",
        (PerfOp::Read, _) => "Read",
        (PerfOp::FetchAdd | PerfOp::CmpSwap, _) => "Atomic",
    }
}

/// A test's title.
fn title(spec: &PerfSpec, transport: Transport) -> String {
    let kernel = match transport {
        Transport::Rdma => "",
        Transport::Tcp => "TCP ",
        Transport::Udp => "UDP ",
    };
    let what = if spec.mode == PerfMode::Lat { "Latency" } else { "BW" };
    format!("                    {kernel}{} {what} Test", operation(spec.op, transport))
}

/// True where latency is told as half the round trip.
fn is_halved(op: PerfOp) -> bool {
    op != PerfOp::Read
}

fn pair(left: (&str, &str), right: (&str, &str)) -> String {
    format!(" {:<16}: {:<11}\t{:<15}: {}", left.0, left.1, right.0, right.1)
}

fn single(name: &str, value: impl std::fmt::Display) -> String {
    format!(" {name:<16}: {value}")
}

/// GID bytes in decimal, as perftest prints them.
fn decimal_gid(gid: &str) -> String {
    match gid.parse::<std::net::Ipv6Addr>() {
        Ok(v6) => v6.octets().map(|b| format!("{b:02}")).join(":"),
        Err(_) => gid.to_string(),
    }
}

fn side(name: &str, end: &RdmaEnd, op: PerfOp) -> String {
    let mut text = format!(" {name} address: LID 0000 QPN {:#06x} PSN {:#08x}", end.qpn, end.psn);
    if op == PerfOp::Read {
        let _ = write!(text, " OUT {:#04x}", end.reads);
    }
    if op != PerfOp::Send {
        let _ = write!(text, " RKey {:#08x} VAddr {:#016x}", end.rkey, end.addr);
    }
    format!("{text}\n GID: {}", decimal_gid(&end.gid))
}

/// Header text, from the title to the column heads.
pub fn header(spec: &PerfSpec, facts: &Facts<'_>) {
    crate::out::say!("{}", header_text(spec, facts));
}

fn header_text(spec: &PerfSpec, facts: &Facts<'_>) -> String {
    let args = facts.args;
    let transport = args.transport();
    let mut lines = vec![RULE.to_string(), title(spec, transport)];
    if let (Some(plane), Some(ends)) = (facts.plane, &facts.ends) {
        lines.push(pair(("Dual-port", "OFF"), ("Device", plane.dev())));
        lines.push(pair(("Number of qps", "1"), ("Transport type", "IB")));
        lines.push(pair(("Connection type", "RC"), ("Using SRQ", "OFF")));
        lines.push(single("PCIe relax order", "OFF"));
        lines.push(single("ibv_wr* API", "OFF"));
        if facts.role == Role::Client {
            lines.push(single("TX depth", spec.tx_depth));
        } else if spec.op == PerfOp::Send {
            lines.push(single("RX depth", spec.rx_depth));
        }
        if spec.mode == PerfMode::Bw {
            lines.push(single("CQ Moderation", spec.signal_every()));
        }
        lines.push(single("Mtu", format_args!("{}[B]", ends.mtu)));
        lines.push(single("Link type", "Ethernet"));
        let index = args.gid_index.map_or("by family".to_string(), |i| i.to_string());
        lines.push(single("GID index", index));
        match spec.op {
            PerfOp::Read | PerfOp::FetchAdd | PerfOp::CmpSwap => {
                lines.push(single("Outstand reads", ends.own.reads.min(ends.remote.reads)))
            }
            PerfOp::Send | PerfOp::Write => {
                lines.push(single("Max inline data", format_args!("{}[B]", spec.inline_bytes)));
            }
        }
        lines.push(single("rdma_cm QPs", "OFF"));
        lines.push(single("Data ex. method", "Ethernet"));
        lines.push(single("Port", plane.mode()));
        lines.extend(plane.faults().map(|faults| single("Faults", faults)));
        lines.push(pair(("Idle policy", plane.idle().name()), ("Core", &core_text(facts.core))));
    } else {
        lines.push(pair(("Transport type", transport.name()), ("Core", &core_text(facts.core))));
        lines.push(pair(("Peer", facts.peer), ("TX depth", &spec.tx_depth.to_string())));
    }
    if spec.mode == PerfMode::Lat {
        let what = if is_halved(spec.op) { "half the round trip" } else { "the whole round trip" };
        lines.push(single("Latency", what));
    }
    lines.push(RULE.to_string());
    if let Some(ends) = &facts.ends {
        lines.push(side("local", &ends.own, spec.op));
        lines.push(side("remote", &ends.remote, spec.op));
        lines.push(RULE.to_string());
    }
    if facts.role == Role::Client {
        lines.push(heads(spec, args));
    }
    lines.join("\n")
}

fn core_text(core: Option<usize>) -> String {
    core.map_or("not pinned".into(), |c| c.to_string())
}

fn heads(spec: &PerfSpec, args: &PerfArgs) -> String {
    match (spec.mode, spec.duration_ns) {
        (PerfMode::Bw, _) => {
            let unit = if args.report_gbits { "Gb/sec" } else { "MiB/sec" };
            format!(" #bytes     #iterations    BW peak[{unit}]    BW average[{unit}]   MsgRate[Mpps]")
        }
        (PerfMode::Lat, None) => {
            " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    \
             t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] "
                .into()
        }
        (PerfMode::Lat, Some(_)) => " #bytes        #iterations       t_avg[usec]    tps average".into(),
    }
}

/// One row.
pub fn line(report: &PerfReport, args: &PerfArgs) -> String {
    let spec = &report.spec;
    let Some(rtt) = &report.rtt else {
        let unit = |gbytes: f64| if args.report_gbits { gbytes * 8.0 } else { gbytes * 1e9 / 1_048_576.0 };
        // As perftest prints a peak that it was told not to measure, or could not.
        let peak = if args.no_peak { 0.0 } else { report.peak_gbytes_per_s.map_or(0.0, unit) };
        let (average, rate) = (unit(report.gbytes_per_s), report.msgs_per_s / 1e6);
        return format!(" {:<10} {:<14} {peak:<18.2} {average:<20.2} {rate:.6}", spec.size, report.messages);
    };
    latency_line(spec, report.messages, report.msgs_per_s, rtt)
}

fn latency_line(spec: &PerfSpec, messages: u64, per_second: f64, rtt: &LatencySummary) -> String {
    let trips = if is_halved(spec.op) { 2.0 } else { 1.0 };
    let usec = |ns: f64| ns / 1e3 / trips;
    if spec.duration_ns.is_some() {
        let average = usec(rtt.mean_ns);
        // perftest counts both directions of a ping-pong as transactions of their own.
        return format!(" {:<13} {messages:<17} {average:<14.2} {:.2}", spec.size, per_second * trips);
    }
    format!(
        " {:<6} {messages:<14} {:<14.2} {:<12.2} {:<18.2} {:<14.2} {:<15.2} {:<22.2} {:.2}",
        spec.size,
        usec(rtt.min_ns as f64),
        usec(rtt.max_ns as f64),
        usec(rtt.p50_ns as f64),
        usec(rtt.mean_ns),
        usec(rtt.stdev_ns),
        usec(rtt.p99_ns as f64),
        usec(rtt.p999_ns as f64)
    )
}

/// One test as data.
#[derive(Serialize)]
pub struct Row {
    tool: &'static str,
    version: &'static str,
    transport: &'static str,
    op: &'static str,
    mode: &'static str,
    role: &'static str,
    peer: String,
    size_bytes: u32,
    /// Messages measured.
    iterations: u64,
    warmup: u64,
    duration_ns: Option<u64>,
    bytes: u64,
    elapsed_ns: u64,
    msgs_per_s: f64,
    gbytes_per_s: f64,
    gbytes_per_s_peak: Option<f64>,
    #[serde(flatten)]
    rtt: RttJson,
    tx_depth: u32,
    rx_depth: u32,
    cq_mod: u32,
    inline_bytes: u32,
    data_checked: bool,
    path_mtu: Option<u32>,
    local: Option<RdmaEnd>,
    remote: Option<RdmaEnd>,
    #[serde(flatten)]
    place: Place,
}

/// Where the test ran.
#[derive(Serialize)]
#[serde(untagged)]
enum Place {
    Plane(Box<PlaneJson>),
    Socket { core: Option<usize>, idle: &'static str, fallbacks: [(); 0] },
}

/// The report as data.
pub fn row(report: &PerfReport, facts: &Facts<'_>) -> Row {
    let spec = &report.spec;
    Row {
        tool: "perf",
        version: env!("CARGO_PKG_VERSION"),
        transport: facts.args.transport().name(),
        op: spec.op.name(),
        mode: spec.mode.name(),
        role: if facts.role == Role::Client { "client" } else { "server" },
        peer: facts.peer.to_string(),
        size_bytes: spec.size,
        iterations: report.messages,
        warmup: spec.warmup,
        duration_ns: spec.duration_ns,
        bytes: report.bytes,
        elapsed_ns: report.elapsed_ns,
        msgs_per_s: report.msgs_per_s,
        gbytes_per_s: report.gbytes_per_s,
        gbytes_per_s_peak: report.peak_gbytes_per_s,
        rtt: report.rtt.into(),
        tx_depth: spec.tx_depth,
        rx_depth: spec.rx_depth,
        cq_mod: spec.signal_every(),
        inline_bytes: spec.inline_bytes,
        data_checked: spec.check_data,
        path_mtu: facts.ends.as_ref().map(|e| e.mtu),
        local: facts.ends.as_ref().map(|e| e.own.clone()),
        remote: facts.ends.as_ref().map(|e| e.remote.clone()),
        place: match facts.plane {
            Some(plane) => Place::Plane(Box::new(PlaneJson::of(plane))),
            None => Place::Socket { core: facts.core, idle: "blocking", fallbacks: [] },
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary() -> LatencySummary {
        LatencySummary {
            samples: 200,
            min_ns: 188_980,
            max_ns: 5_181_800,
            mean_ns: 369_060.0,
            stdev_ns: 535_180.0,
            p50_ns: 221_860,
            p90_ns: 400_000,
            p99_ns: 3_998_880,
            p999_ns: 5_181_800,
            p9999_ns: 5_181_800,
        }
    }

    /// The numbers of a recorded run of the original, whose layout this must parse like.
    #[test]
    fn latency_is_halved_for_write_and_whole_for_read() {
        let fields = |op| {
            let spec = PerfSpec::new(op, PerfMode::Lat, Role::Client, 64);
            let line = latency_line(&spec, 200, 1.0, &summary());
            line.split_whitespace().map(str::to_string).collect::<Vec<_>>()
        };
        assert_eq!(
            fields(PerfOp::Write),
            ["64", "200", "94.49", "2590.90", "110.93", "184.53", "267.59", "1999.44", "2590.90"]
        );
        assert_eq!(fields(PerfOp::Read)[2], "188.98");
    }

    #[test]
    fn gids_are_decimal() {
        assert_eq!(decimal_gid("::ffff:10.9.0.1"), "00:00:00:00:00:00:00:00:00:00:255:255:10:09:00:01");
    }

    #[test]
    fn addresses_as_the_original_prints_them() {
        let end = RdmaEnd {
            qpn: 0x11,
            psn: 0x94_fb34,
            gid: "::ffff:10.9.0.1".into(),
            rkey: 0x288,
            addr: 0x5588_02ac_7000,
            mtu: 1024,
            reads: 128,
        };
        let text = side("local", &end, PerfOp::Write);
        assert!(
            text.starts_with(
                " local address: LID 0000 QPN 0x0011 PSN 0x94fb34 RKey 0x000288 VAddr 0x00558802ac7000"
            ),
            "{text}"
        );
        assert!(side("local", &end, PerfOp::Read).contains("PSN 0x94fb34 OUT 0x80 RKey"));
        assert!(!side("local", &end, PerfOp::Send).contains("RKey"));
    }
}

//! From options to tests: perftest's defaults and dependencies between options, sizes, sweeps.
//!
//! Owns [`Item`], one test with all that both sides must know, and [`Ask`], the same as it travels between two of ours.

use ferroce_services::{PerfLayout, PerfMode, PerfOp, PerfRate, PerfSpec, Role};
use ferroce_verbs::{PathMtu, QpType};
use serde::{Deserialize, Serialize};

use super::options::{PerfArgs, RateUnit, Test, Transport, atomic_name, connection_name};
use crate::connect::Marks;
use crate::fail::{Fail, Outcome};

/// The largest size of `-a`.
const LARGEST_OF_ALL: u32 = 1 << 23;
/// perftest's default and limit of receives, where losing one would lose a message.
const RX_DEPTH: u32 = 512;
const MOST_UNRELIABLE_RECEIVES: u64 = 16_000;
/// Above, messages complete one by one unless asked otherwise.
const LARGE: u32 = 8192;
/// Samples kept in order: 32 MiB.
const MOST_KEPT: u64 = 1 << 22;
/// A test without end.
const FOREVER_NS: u64 = 100 * 365 * 24 * 3600 * 1_000_000_000;

/// How queue pairs are connected.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PathSpec {
    /// Path MTU asked for.
    pub mtu: Option<PathMtu>,
    /// READs and atomics outstanding asked for.
    pub reads: Option<u8>,
    /// Marking.
    pub marks: Marks,
    /// ACK timeout: 4.096 us x 2^timeout.
    pub timeout: u8,
    /// Retries.
    pub retries: u8,
}

/// One test.
#[derive(Clone, PartialEq, Debug)]
pub struct Item {
    /// What is done; the role is ours.
    pub spec: PerfSpec,
    /// How it is connected.
    pub path: PathSpec,
    /// The value of a sweep, such as `tx-depth=16`; none for sizes, which every row has.
    pub label: Option<String>,
}

/// [`Item`] as two of ours tell each other. Keys only grow within a version of the conversation.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Ask {
    /// `send-lat` and so on.
    pub test: String,
    /// `FETCH_AND_ADD` or `CMP_AND_SWAP`, for atomics.
    pub atomic: Option<String>,
    /// `RC`, `UC` or `UD`.
    pub connection: String,
    /// Queue pairs.
    pub qps: u32,
    /// Bytes of a message.
    pub size: u32,
    /// Both sides send.
    pub bidirectional: bool,
    /// Messages measured, and before.
    pub iters: u64,
    /// As above.
    pub warmup: u64,
    /// Instead of a count.
    pub duration_ns: Option<u64>,
    /// Not measured at both ends.
    pub margin_ns: u64,
    /// Depths, moderation, lists, inline limit.
    pub tx_depth: u32,
    /// As above.
    pub rx_depth: u32,
    /// As above.
    pub cq_mod: u32,
    /// As above.
    pub post_list: u32,
    /// As above.
    pub inline_bytes: u32,
    /// Sleep on events.
    pub events: bool,
    /// Messages per second and burst.
    pub rate: Option<(u64, u32)>,
    /// Latency at that rate.
    pub open_loop: bool,
    /// Seed of the data.
    pub seed: u64,
    /// Compare data.
    pub check_data: bool,
    /// Path MTU in bytes.
    pub mtu: Option<u32>,
    /// READs outstanding.
    pub reads: Option<u8>,
    /// Service level, traffic class, flow label, hop limit.
    pub sl: u8,
    /// As above.
    pub traffic_class: u8,
    /// As above.
    pub flow_label: u32,
    /// As above.
    pub hop_limit: u8,
    /// ACK timeout and retries.
    pub timeout: u8,
    /// As above.
    pub retries: u8,
}

impl Item {
    /// The test's name.
    pub fn test(&self) -> Test {
        Test { op: self.spec.op, mode: self.spec.mode }
    }

    /// True for a test that goes on until somebody interrupts it.
    pub fn is_endless(&self) -> bool {
        self.spec.duration_ns == Some(FOREVER_NS)
    }

    /// As it travels.
    pub fn ask(&self) -> Ask {
        let (spec, path) = (&self.spec, &self.path);
        Ask {
            test: self.test().to_string(),
            atomic: spec.op.is_atomic().then(|| atomic_name(spec.op).to_string()),
            connection: connection_name(spec.connection).into(),
            qps: spec.qps,
            size: spec.size,
            bidirectional: spec.bidirectional,
            iters: spec.iters,
            warmup: spec.warmup,
            duration_ns: spec.duration_ns,
            margin_ns: spec.margin_ns,
            tx_depth: spec.tx_depth,
            rx_depth: spec.rx_depth,
            cq_mod: spec.cq_mod,
            post_list: spec.post_list,
            inline_bytes: spec.inline_bytes,
            events: spec.events,
            rate: spec.rate.map(|r| (r.msgs_per_s, r.burst)),
            open_loop: spec.open_loop,
            seed: spec.seed,
            check_data: spec.check_data,
            mtu: path.mtu.map(PathMtu::bytes),
            reads: path.reads,
            sl: path.marks.sl,
            traffic_class: path.marks.traffic_class,
            flow_label: path.marks.flow_label,
            hop_limit: path.marks.hop_limit.unwrap_or(64),
            timeout: path.timeout,
            retries: path.retries,
        }
    }
}

impl Ask {
    /// The test that this asks of the side in `role`. Everything in it came from the network and is checked.
    pub fn item(&self, role: Role) -> Outcome<Item> {
        let bad = |what: &str, got: &str| Fail::failed(format!("the client asks for {what} {got:?}"));
        let mut test = Test::from_text(&self.test).ok_or_else(|| bad("test", &self.test))?;
        if test.op.is_atomic() {
            test.op = match self.atomic.as_deref() {
                Some("CMP_AND_SWAP") => PerfOp::CmpSwap,
                Some("FETCH_AND_ADD") | None => PerfOp::FetchAdd,
                Some(other) => return Err(bad("atomic", other)),
            };
        }
        let connection = match self.connection.as_str() {
            "RC" => QpType::Rc,
            "UC" => QpType::Uc,
            "UD" => QpType::Ud,
            other => return Err(bad("connection", other)),
        };
        let mtu = match self.mtu {
            None => None,
            Some(bytes) => {
                Some(PathMtu::from_bytes(bytes).ok_or_else(|| bad("path MTU", &bytes.to_string()))?)
            }
        };
        for (name, value, most) in [
            ("service level", u32::from(self.sl), 7),
            ("flow label", self.flow_label, 0xf_ffff),
            ("timeout", self.timeout.into(), 31),
            ("retries", self.retries.into(), 7),
        ] {
            if value > most {
                return Err(Fail::failed(format!("{name}: asked {value}, allowed 0 to {most}")));
            }
        }
        let spec = PerfSpec {
            connection,
            qps: self.qps,
            bidirectional: self.bidirectional,
            iters: self.iters,
            warmup: self.warmup,
            duration_ns: self.duration_ns,
            margin_ns: self.margin_ns,
            tx_depth: self.tx_depth,
            rx_depth: self.rx_depth,
            cq_mod: self.cq_mod,
            post_list: self.post_list,
            inline_bytes: self.inline_bytes,
            events: self.events,
            rate: self.rate.map(|(msgs_per_s, burst)| PerfRate { msgs_per_s, burst }),
            open_loop: self.open_loop,
            seed: self.seed,
            check_data: self.check_data,
            ..PerfSpec::new(test.op, test.mode, role, self.size)
        };
        spec.check().map_err(|e| Fail::failed(e.to_string()))?;
        let marks = Marks {
            sl: self.sl,
            traffic_class: self.traffic_class,
            flow_label: self.flow_label,
            hop_limit: Some(self.hop_limit),
        };
        let path = PathSpec { mtu, reads: self.reads, marks, timeout: self.timeout, retries: self.retries };
        Ok(Item { spec, path, label: None })
    }
}

/// All tests of a run, in order. `carries` is the path MTU that our port has, where there is one.
///
/// # Errors
/// Names the first value that is not allowed, or does not go with another one.
pub fn items(args: &PerfArgs, test: Test, role: Role, carries: Option<PathMtu>) -> Outcome<Vec<Item>> {
    let list = match &args.load.sweep {
        None if args.load.all => all_sizes(args, test, role, carries)?,
        None => vec![item(args, test, role, carries)?],
        Some(sweep) => {
            let one = |&value: &u64| {
                let args = sweep.apply(args, value).map_err(Fail::usage)?;
                let mut item = item(&args, test, role, carries)?;
                let name = sweep.name();
                item.label = (name != "size").then(|| format!("{name}={value}"));
                Ok(item)
            };
            sweep.values.iter().map(one).collect::<Outcome<_>>()?
        }
    };
    for item in &list {
        check(args, item)?;
    }
    Ok(list)
}

fn all_sizes(args: &PerfArgs, test: Test, role: Role, carries: Option<PathMtu>) -> Outcome<Vec<Item>> {
    if test.op.is_atomic() {
        return Err(Fail::usage("-a: the message size of atomics cannot be changed: it is 8"));
    }
    let connection = args.load.connection.unwrap_or(QpType::Rc);
    let most = match (connection, carries) {
        (QpType::Ud, carries) => args.path.mtu.or(carries).map_or(PerfSpec::LARGEST_UD, PathMtu::bytes),
        _ => LARGEST_OF_ALL,
    };
    let sizes = std::iter::successors(Some(2u32), |s| Some(s * 2)).take_while(|&size| size <= most);
    sizes
        .map(|size| {
            let mut one = args.clone();
            one.load.size = Some(size);
            // perftest keeps the moderation over a sweep, also for big messages.
            one.load.cq_mod = Some(args.load.cq_mod.unwrap_or(100));
            let mut item = item(&one, test, role, carries)?;
            item.spec.largest = most;
            Ok(item)
        })
        .collect()
}

fn item(args: &PerfArgs, test: Test, role: Role, carries: Option<PathMtu>) -> Outcome<Item> {
    let load = &args.load;
    let op = if test.op.is_atomic() { load.atomic.unwrap_or(test.op) } else { test.op };
    let connection = load.connection.unwrap_or(QpType::Rc);
    let size = load.size.unwrap_or_else(|| default_size(args, op, test.mode, connection, carries));
    let base = PerfSpec::new(op, test.mode, role, size);
    let duration_ns = match (load.run_infinitely, load.duration) {
        (true, _) => Some(FOREVER_NS),
        (false, duration) => duration.map(nanoseconds),
    };
    let iters = load.iters.unwrap_or(base.iters);
    let fits = |depth: u32| {
        // A deeper queue than there are messages is never filled.
        if duration_ns.is_some() { depth } else { depth.min(u32::try_from(iters).unwrap_or(u32::MAX)).max(1) }
    };
    let tx_depth = load.tx_depth.map_or_else(|| fits(base.tx_depth), fits);
    let post_list = load.post_list.unwrap_or(1);
    if post_list > 1 && duration_ns.is_none() && !iters.is_multiple_of(post_list.into()) {
        return Err(Fail::usage(format!(
            "iters: asked {iters}, allowed a multiple of post_list {post_list}"
        )));
    }
    let warmup = load.warmup.unwrap_or(0);
    let spec = PerfSpec {
        connection,
        qps: args.path.qps.unwrap_or(1),
        bidirectional: load.bidirectional,
        iters,
        warmup,
        duration_ns,
        margin_ns: margin(args),
        tx_depth,
        rx_depth: rx_depth(args, connection, iters, fits),
        cq_mod: cq_mod(args, connection, size, post_list).min(tx_depth),
        post_list,
        inline_bytes: load.inline_size.unwrap_or(0),
        events: load.events,
        rate: rate(args, test.mode, size, tx_depth)?,
        open_loop: args.pace.open_loop,
        keep_samples: kept(args, iters.saturating_mul(args.path.qps.unwrap_or(1).into()), duration_ns),
        seed: load.seed.unwrap_or(base.seed),
        check_data: load.check,
        ..base
    };
    let path = &args.path;
    let marks = Marks {
        sl: path.sl.unwrap_or(0),
        traffic_class: path.tos.unwrap_or(0),
        flow_label: path.flow_label.unwrap_or(0),
        hop_limit: Some(path.hop_limit.unwrap_or(64)),
    };
    let path = PathSpec {
        mtu: path.mtu,
        reads: path.outs,
        marks,
        timeout: path.qp_timeout.unwrap_or(14),
        retries: path.retry_count.unwrap_or(7),
    };
    Ok(Item { spec, path, label: None })
}

fn default_size(
    args: &PerfArgs,
    op: PerfOp,
    mode: PerfMode,
    connection: QpType,
    carries: Option<PathMtu>,
) -> u32 {
    let size = match (op, mode) {
        (PerfOp::FetchAdd | PerfOp::CmpSwap, _) => 8,
        (_, PerfMode::Lat) => 2,
        (_, PerfMode::Bw) => 65536,
    };
    match connection {
        // perftest takes the path MTU then, unless a size was asked for.
        QpType::Ud => size.min(args.path.mtu.or(carries).map_or(PerfSpec::LARGEST_UD, PathMtu::bytes)),
        QpType::Rc | QpType::Uc => size,
    }
}

fn nanoseconds(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(FOREVER_NS).min(FOREVER_NS)
}

/// A quarter of the duration in whole seconds, unless asked for.
fn margin(args: &PerfArgs) -> u64 {
    match (args.load.duration, args.load.margin) {
        (Some(_), Some(margin)) => nanoseconds(margin),
        (Some(duration), None) if !args.load.run_infinitely => duration.as_secs() / 4 * 1_000_000_000,
        _ => 0,
    }
}

/// Samples that `-U` keeps.
fn kept(args: &PerfArgs, all: u64, duration_ns: Option<u64>) -> u32 {
    let most = MOST_KEPT.min(if duration_ns.is_some() { u64::MAX } else { all });
    if args.report.unsorted { u32::try_from(most).unwrap_or(u32::MAX) } else { 0 }
}

fn rx_depth(args: &PerfArgs, connection: QpType, iters: u64, fits: impl Fn(u32) -> u32) -> u32 {
    let asked = args.load.rx_depth.unwrap_or(RX_DEPTH);
    if connection != QpType::Rc && asked == RX_DEPTH && args.load.duration.is_none() {
        return u32::try_from(iters.clamp(1, MOST_UNRELIABLE_RECEIVES)).unwrap_or(RX_DEPTH);
    }
    fits(asked)
}

fn cq_mod(args: &PerfArgs, connection: QpType, size: u32, post_list: u32) -> u32 {
    match args.load.cq_mod {
        Some(asked) => asked,
        None if post_list > 1 => post_list,
        None if size > LARGE && connection != QpType::Ud && !args.load.events => 1,
        None => 100,
    }
}

fn rate(args: &PerfArgs, mode: PerfMode, size: u32, tx_depth: u32) -> Outcome<Option<PerfRate>> {
    let pace = &args.pace;
    let Some(limit) = pace.limit else {
        return match (pace.units, pace.burst) {
            (None, None) => Ok(None),
            _ => Err(Fail::usage("--rate_units and --burst_size need --rate_limit")),
        };
    };
    let bytes_per_s = match pace.units.unwrap_or(RateUnit::Gigabits) {
        RateUnit::Mebibytes => limit * 1_048_576.0,
        RateUnit::Gigabits => limit * 1e9 / 8.0,
        RateUnit::Messages => limit * f64::from(size.max(1)),
    };
    let msgs_per_s = bytes_per_s / f64::from(size.max(1));
    if !(1.0..1e12).contains(&msgs_per_s) {
        return Err(Fail::usage(format!(
            "rate_limit: asked {msgs_per_s} messages/sec, allowed 1 to 10^12 (of {size} bytes)"
        )));
    }
    let burst = pace.burst.unwrap_or(if mode == PerfMode::Lat { 1 } else { tx_depth });
    Ok(Some(PerfRate { msgs_per_s: msgs_per_s.round() as u64, burst }))
}

fn check(args: &PerfArgs, item: &Item) -> Outcome<()> {
    let spec = &item.spec;
    spec.check().map_err(|e| Fail::usage(e.to_string()))?;
    if spec.largest > spec.size {
        let largest = PerfSpec { size: spec.largest, ..*spec };
        largest.check().map_err(|e| Fail::usage(e.to_string()))?;
    }
    if args.load.run_infinitely && spec.mode == PerfMode::Lat {
        return Err(Fail::usage("--run_infinitely is for bandwidth tests"));
    }
    if args.transport() == Transport::Rdma {
        return Ok(());
    }
    let refuse = |what: &str, asked: &dyn std::fmt::Display, allowed: &str| {
        Err(Fail::usage(format!("{what}: asked {asked}, allowed {allowed} over kernel sockets")))
    };
    match spec {
        PerfSpec { op, .. } if op.is_atomic() => refuse("test", &item.test(), "send, write and read"),
        PerfSpec { size: 0, .. } => refuse("size", &0, "1 or more"),
        PerfSpec { qps, .. } if *qps != 1 => refuse("qp", qps, "1"),
        PerfSpec { bidirectional: true, .. } => refuse("bidirectional", &"yes", "no"),
        PerfSpec { events: true, .. } => refuse("events", &"yes", "no: sockets sleep anyhow"),
        PerfSpec { rate: Some(_), .. } => refuse("rate_limit", &"a cap", "none"),
        PerfSpec { connection, .. } if *connection != QpType::Rc => {
            refuse("connection", &connection_name(*connection), "RC")
        }
        _ => Ok(()),
    }
}

/// The same test with the memory of perftest's programs.
pub fn for_perftest(mut item: Item) -> Item {
    item.spec.layout = PerfLayout::Perftest;
    item
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;

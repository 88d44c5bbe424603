//! `measure`: latency or bandwidth between two devices, on a pair that control makes for it.
//!
//! Columns are perftest's; unlike there, latency is the whole round trip for every operation, and no sample is left out.

use std::process::ExitCode;
use std::time::Duration;

use ferroce_api::appliance::{PerfKind, PerfOp};
use ferroce_api::rpc::{self, PerfRunParams, PerfRunResult};

use crate::args::{Global, MeasureArgs, ModeArg, OpArg};
use crate::client::Client;
use crate::fail::Fail;
use crate::print::Printer;
use crate::row::Row;

/// `measure DEV PEER …`.
pub fn measure(global: &Global, printer: &Printer, args: &MeasureArgs) -> Result<ExitCode, Fail> {
    let mut client = Client::open(global)?;
    client.allow(global, Duration::from_secs(args.deadline.into()))?;
    let mut results = Vec::new();
    for size in &args.size {
        let result: PerfRunResult = client.call(rpc::PERF_RUN, &params(args, *size))?;
        if !printer.json {
            if results.is_empty() {
                printer.text(&head(args, &result))?;
            }
            printer.text(&line(&result))?;
        }
        results.push(result);
    }
    if printer.json {
        let rows: Vec<Row> = results.iter().map(|result| row(args, result)).collect();
        printer.rows(&rows)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn params(args: &MeasureArgs, size_bytes: u32) -> PerfRunParams {
    PerfRunParams {
        client: args.dev.clone(),
        server: args.peer.clone(),
        op: match args.op {
            OpArg::Send => PerfOp::Send,
            OpArg::Write => PerfOp::Write,
            OpArg::Read => PerfOp::Read,
        },
        kind: match args.mode {
            ModeArg::Lat => PerfKind::Lat,
            ModeArg::Bw => PerfKind::Bw,
        },
        size_bytes,
        iterations: args.iters,
        warmup: args.warmup,
        depth: match args.mode {
            ModeArg::Lat => 1,
            ModeArg::Bw => args.depth,
        },
        path_mtu: args.path_mtu,
        deadline_ms: args.deadline.saturating_mul(1000),
        check_data: args.check,
        inline_bytes: args.inline_size,
        timeout: args.timeout_exponent,
        qpn: args.lqpn,
        worker: args.worker,
    }
}

fn op_word(op: PerfOp) -> &'static str {
    match op {
        PerfOp::Send => "send",
        PerfOp::Write => "write",
        PerfOp::Read => "read",
    }
}

fn kind_word(kind: PerfKind) -> &'static str {
    match kind {
        PerfKind::Lat => "lat",
        PerfKind::Bw => "bw",
    }
}

fn head(args: &MeasureArgs, result: &PerfRunResult) -> String {
    let what = format!(
        "{} {}: {} -> {}, RC, path MTU {} bytes",
        op_word(result.op),
        kind_word(result.kind),
        args.dev,
        args.peer,
        result.path_mtu
    );
    match result.kind {
        PerfKind::Lat => format!(
            "{what}; whole round trips\n{:>9} {:>11} {:>12} {:>12} {:>15} {:>12} {:>13} {:>10} {:>12}\n",
            "#bytes",
            "#iterations",
            "t_min[usec]",
            "t_max[usec]",
            "t_typical[usec]",
            "t_avg[usec]",
            "t_stdev[usec]",
            "99%[usec]",
            "99.9%[usec]"
        ),
        PerfKind::Bw => format!(
            "{what}; GB is 10^9 bytes\n{:>9} {:>11} {:>19} {:>13}\n",
            "#bytes", "#iterations", "BW average[GB/sec]", "MsgRate[Mpps]"
        ),
    }
}

fn line(result: &PerfRunResult) -> String {
    let usec = |ns: u64| ns as f64 / 1000.0;
    match &result.rtt {
        Some(rtt) => format!(
            "{:>9} {:>11} {:>12.2} {:>12.2} {:>15.2} {:>12.2} {:>13.2} {:>10.2} {:>12.2}\n",
            result.size_bytes,
            result.iterations,
            usec(rtt.min_ns),
            usec(rtt.max_ns),
            usec(rtt.p50_ns),
            rtt.mean_ns / 1000.0,
            rtt.stdev_ns / 1000.0,
            usec(rtt.p99_ns),
            usec(rtt.p999_ns)
        ),
        None => format!(
            "{:>9} {:>11} {:>19.3} {:>13.6}\n",
            result.size_bytes,
            result.iterations,
            result.gbytes_per_s,
            result.msgs_per_s / 1e6
        ),
    }
}

fn row(args: &MeasureArgs, result: &PerfRunResult) -> Row {
    let mut row = Row::new("")
        .cell("ifname", args.dev.as_str())
        .cell("peer_ifname", args.peer.as_str())
        .cell("op", op_word(result.op))
        .cell("mode", kind_word(result.kind))
        .cell("size_bytes", result.size_bytes)
        .cell("iterations", result.iterations)
        .cell("path_mtu_bytes", result.path_mtu);
    if let Some(rtt) = &result.rtt {
        for (key, value) in [
            ("rtt_ns_min", rtt.min_ns),
            ("rtt_ns_p50", rtt.p50_ns),
            ("rtt_ns_p90", rtt.p90_ns),
            ("rtt_ns_p99", rtt.p99_ns),
            ("rtt_ns_p999", rtt.p999_ns),
            ("rtt_ns_p9999", rtt.p9999_ns),
            ("rtt_ns_max", rtt.max_ns),
        ] {
            row = row.cell(key, value);
        }
        row = row
            .cell("rtt_ns_mean", rtt.mean_ns)
            .cell("rtt_ns_stdev", rtt.stdev_ns)
            .cell("rtt_samples", rtt.samples);
    }
    row.cell("gbytes_per_s", result.gbytes_per_s).cell("msgs_per_s", result.msgs_per_s)
}

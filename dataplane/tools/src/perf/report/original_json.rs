//! perftest's JSON (`--out_json`): the keys of its 2026 version, always valid. One result as an object, several as a list.

use std::path::Path;

use ferroce_services::{PerfMode, PerfOp, Role};
use serde_json::{Map, Value, json};

use super::units::{self, Sum};
use super::{Facts, Finding};
use crate::fail::{Fail, Outcome};
use crate::perf::options::{atomic_name, connection_name};

/// perftest's own name.
pub const DEFAULT_FILE: &str = "perftest_out.json";

/// `test_info`.
pub fn info(facts: &Facts<'_>) -> Map<String, Value> {
    let spec = &facts.item.spec;
    let mut map = Map::new();
    let mut put = |key: &str, value: Value| {
        map.insert(key.into(), value);
    };
    put("test", title(facts).into());
    put("Dual_port", "OFF".into());
    put(
        "Device",
        facts.plane.map_or_else(|| facts.transport().name().to_string(), |p| p.dev().into()).into(),
    );
    put("Number_of_qps", spec.qps.into());
    put("Transport_type", "IB".into());
    put("Connection_type", connection_name(spec.connection).into());
    put("Using_SRQ", "OFF".into());
    put("PCIe_relax_order", "OFF".into());
    put("ibv_wr_API", "OFF".into());
    if facts.role == Role::Client || spec.bidirectional {
        put("TX_depth", spec.tx_depth.into());
    }
    if spec.op == PerfOp::Send && (facts.role == Role::Server || spec.bidirectional) {
        put("RX_depth", spec.rx_depth.into());
    }
    if spec.mode == PerfMode::Bw {
        put("CQ_Moderation", spec.signal_every().into());
    }
    if let Some(ends) = &facts.ends {
        put("Mtu", ends.mtu.into());
    }
    put("Link_type", "Ethernet".into());
    if let Some(index) = facts.args.path.gid_index {
        put("GID_index", index.into());
    }
    match (spec.op, &facts.ends) {
        (PerfOp::Send | PerfOp::Write, _) => put("Max_inline_data", spec.inline_bytes.into()),
        (_, Some(ends)) => put("Outstand_reads", ends.reads.into()),
        (_, None) => {}
    }
    put("rdma_cm_QPs", "OFF".into());
    put("Data_ex_method", "Ethernet".into());
    map
}

fn title(facts: &Facts<'_>) -> String {
    let spec = &facts.item.spec;
    let operation = match spec.op {
        PerfOp::Send => "Send".to_string(),
        PerfOp::Write => "RDMA_Write".into(),
        PerfOp::Read => "RDMA_Read".into(),
        PerfOp::FetchAdd | PerfOp::CmpSwap => format!("Atomic_{}", atomic_name(spec.op)),
    };
    let both = if spec.bidirectional { "_Bidirectional" } else { "" };
    let list = if spec.post_list > 1 { "_Post_List" } else { "" };
    format!("{operation}{both}{list}_{}_Test", if spec.mode == PerfMode::Lat { "Latency" } else { "BW" })
}

/// One of `results`; `None` where this side has none.
pub fn result(finding: &Finding, facts: &Facts<'_>, cpu_percent: Option<f64>) -> Option<Value> {
    let (report, spec) = (&finding.report, &facts.item.spec);
    let mut value = match (spec.mode, &report.rtt) {
        (PerfMode::Lat, None) => return None,
        (PerfMode::Lat, Some(rtt)) => {
            let told = |ns: f64| ns / 1e3 / units::trips(spec.op);
            let average = told(rtt.mean_ns);
            let head = json!({"MsgSize": spec.size, "n_iterations": report.messages});
            let rest = if spec.duration_ns.is_some() {
                json!({"t_avg": average, "tps_average": report.msgs_per_s * units::trips(spec.op)})
            } else {
                json!({
                    "t_min": told(rtt.min_ns as f64), "t_max": told(rtt.max_ns as f64),
                    "t_typical": told(rtt.p50_ns as f64), "t_avg": average, "t_stdev": told(rtt.stdev_ns),
                    "percentile_99": told(rtt.p99_ns as f64), "percentile_99.9": told(rtt.p999_ns as f64),
                })
            };
            joined(head, rest)
        }
        (PerfMode::Bw, _) => {
            let sum = Sum::of(report, finding.theirs.as_ref(), spec);
            let unit = |gbytes: f64| units::bandwidth(gbytes, facts.args.report.gbits);
            json!({
                "MsgSize": spec.size, "n_iterations": sum.messages, "BW_peak": sum.peak.map_or(0.0, unit),
                "BW_average": unit(sum.gbytes_per_s), "MsgRate": sum.msgs_per_s / 1e6,
            })
        }
    };
    if let (Some(percent), Some(map)) = (cpu_percent, value.as_object_mut()) {
        map.insert("CPU_util".into(), percent.into());
    }
    Some(value)
}

fn joined(mut head: Value, rest: Value) -> Value {
    if let (Some(map), Value::Object(more)) = (head.as_object_mut(), rest) {
        map.extend(more);
    }
    head
}

/// Writes the file.
pub fn write(path: &Path, info: Map<String, Value>, mut results: Vec<Value>) -> Outcome<()> {
    let results = if results.len() == 1 { results.swap_remove(0) } else { Value::Array(results) };
    let text = serde_json::to_string_pretty(&json!({"test_info": info, "results": results}));
    let text = text.map_err(|e| Fail::failed(format!("JSON: {e}")))?;
    std::fs::write(path, text + "\n").map_err(|e| Fail::failed(format!("{}: {e}", path.display())))
}

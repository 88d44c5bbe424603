//! `demo-report`: puts what `scripts/demo` measured into one table, or into data.
//!
//! Owns the form of the demo's output. Every figure is read from a measurement's own file; one that is missing or makes
//! no sense is an error that names the file, never a gap or a guess. Files in the folder: `TRANSPORT.OP.MODE.SIZE.json`
//! (an output of `ferroce measure -j` for rdma, of `ferroce-tools perf --json` for tcp and udp), `status.json` (of
//! `ferroce status -j`) and `facts` (lines `key=value` of what the script chose).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use comfy_table::{CellAlignment, Table};
use ferroce_api::appliance::Fallback;
use ferroce_api::rpc::StatusResult;
use serde::Serialize;
use serde_json::Value;

use crate::args::Global;
use crate::fail::Fail;
use crate::print::Printer;
use crate::verbs::status::{fallback_text, fallbacks};

/// Version of the data; it only grows within one.
const SCHEMA: u32 = 1;

#[derive(Serialize, Debug, PartialEq)]
struct Report {
    schema: u32,
    host: BTreeMap<String, Value>,
    fallbacks: Vec<DevFallback>,
    rows: Vec<Row>,
}

#[derive(Serialize, Debug, PartialEq)]
struct DevFallback {
    dev: String,
    #[serde(flatten)]
    fallback: Fallback,
}

/// One transport, operation and size. Ratios are ours divided by theirs.
#[derive(Serialize, Debug, PartialEq, Clone)]
struct Row {
    transport: String,
    op: String,
    size_bytes: u64,
    rtt_ns_p50: u64,
    rtt_ns_p99: u64,
    rtt_ns_p999: u64,
    rtt_samples: u64,
    gbytes_per_s: f64,
    bw_messages: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    rtt_p50_ratio_to_tcp: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rtt_p50_ratio_to_udp: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gbytes_per_s_ratio_to_tcp: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gbytes_per_s_ratio_to_udp: Option<f64>,
}

const TRANSPORTS: [&str; 3] = ["rdma", "tcp", "udp"];
const OPS: [&str; 3] = ["send", "write", "read"];

/// `demo-report DIR`.
pub fn report(global: &Global, dir: &Path) -> Result<ExitCode, Fail> {
    let printer = Printer::new(global);
    let report = build(dir)?;
    if printer.json {
        printer.value(&report)?
    } else {
        printer.text(&text(&report))?
    }
    Ok(ExitCode::SUCCESS)
}

fn read(path: &Path) -> Result<String, Fail> {
    fs::read_to_string(path).map_err(|e| Fail::Refused(format!("{}: {e}", path.display())))
}

fn build(dir: &Path) -> Result<Report, Fail> {
    let status: StatusResult = serde_json::from_str(&read(&dir.join("status.json"))?)
        .map_err(|e| Fail::Refused(format!("status.json: {e}")))?;
    let mut host = BTreeMap::new();
    for line in read(&dir.join("facts"))?.lines() {
        if let Some((key, value)) = line.split_once('=') {
            let value = value.parse::<u64>().map_or_else(|_| Value::from(value), Value::from);
            host.insert(key.to_owned(), value);
        }
    }
    let mut list = Vec::new();
    for dev in &status.devs {
        for fallback in dev.status.iter().flat_map(|status| fallbacks(status)) {
            list.push(DevFallback { dev: dev.dev.clone(), fallback: fallback.clone() });
        }
    }
    Ok(Report { schema: SCHEMA, host, fallbacks: list, rows: rows(dir)? })
}

fn rows(dir: &Path) -> Result<Vec<Row>, Fail> {
    let mut sizes: Vec<u64> = Vec::new();
    for entry in fs::read_dir(dir).map_err(|e| Fail::Refused(format!("{}: {e}", dir.display())))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let parts: Vec<&str> = name.split('.').collect();
        if let [transport, _, _, size, "json"] = parts.as_slice()
            && TRANSPORTS.contains(transport)
            && let Ok(size) = size.parse()
            && !sizes.contains(&size)
        {
            sizes.push(size);
        }
    }
    sizes.sort_unstable();
    let mut rows: Vec<Row> = Vec::new();
    for op in OPS {
        for size in &sizes {
            for transport in TRANSPORTS {
                rows.push(row(dir, transport, op, *size)?);
            }
        }
    }
    if rows.is_empty() {
        return Err(Fail::Refused(format!("{}: no measurements", dir.display())));
    }
    ratios(&mut rows);
    Ok(rows)
}

fn ratios(rows: &mut [Row]) {
    let all = rows.to_vec();
    for row in rows.iter_mut().filter(|row| row.transport == "rdma") {
        let other = |transport: &str| {
            all.iter().find(|o| o.transport == transport && o.op == row.op && o.size_bytes == row.size_bytes)
        };
        let rtt = |o: &Row| row.rtt_ns_p50 as f64 / o.rtt_ns_p50 as f64;
        let rate = |o: &Row| row.gbytes_per_s / o.gbytes_per_s;
        let (tcp, udp) = (other("tcp"), other("udp"));
        let values = (tcp.map(rtt), udp.map(rtt), tcp.map(rate), udp.map(rate));
        (
            row.rtt_p50_ratio_to_tcp,
            row.rtt_p50_ratio_to_udp,
            row.gbytes_per_s_ratio_to_tcp,
            row.gbytes_per_s_ratio_to_udp,
        ) = values;
    }
}

/// A measurement's own file.
struct Measured {
    name: String,
    value: Value,
}

impl Measured {
    fn load(dir: &Path, name: String) -> Result<Self, Fail> {
        let value: Value = serde_json::from_str(&read(&dir.join(&name))?)
            .map_err(|e| Fail::Refused(format!("{name}: {e}")))?;
        // A listing of one measurement, as `measure` has it.
        let value = match value {
            Value::Array(mut list) if list.len() == 1 => list.remove(0),
            other => other,
        };
        Ok(Measured { name, value })
    }

    fn field(&self, key: &str) -> Result<f64, Fail> {
        match self.value.get(key).and_then(Value::as_f64) {
            Some(value) if value.is_finite() && value > 0.0 => Ok(value),
            other => {
                Err(Fail::Refused(format!("{}: {key} is {other:?}, wanted a number above 0", self.name)))
            }
        }
    }

    fn whole(&self, key: &str) -> Result<u64, Fail> {
        // A time in ns or a count: far below 2^53.
        Ok(self.field(key)?.round() as u64)
    }
}

fn row(dir: &Path, transport: &str, op: &str, size_bytes: u64) -> Result<Row, Fail> {
    let lat = Measured::load(dir, format!("{transport}.{op}.lat.{size_bytes}.json"))?;
    let bw = Measured::load(dir, format!("{transport}.{op}.bw.{size_bytes}.json"))?;
    Ok(Row {
        transport: transport.to_owned(),
        op: op.to_owned(),
        size_bytes,
        rtt_ns_p50: lat.whole("rtt_ns_p50")?,
        rtt_ns_p99: lat.whole("rtt_ns_p99")?,
        rtt_ns_p999: lat.whole("rtt_ns_p999")?,
        rtt_samples: lat.whole("rtt_samples")?,
        gbytes_per_s: bw.field("gbytes_per_s")?,
        bw_messages: bw.whole("iterations")?,
        rtt_p50_ratio_to_tcp: None,
        rtt_p50_ratio_to_udp: None,
        gbytes_per_s_ratio_to_tcp: None,
        gbytes_per_s_ratio_to_udp: None,
    })
}

fn text(report: &Report) -> String {
    let mut table = Table::new();
    table.load_style(comfy_table::presets::NOTHING);
    table.set_header([
        "op", "bytes", "over", "p50 us", "p99 us", "p99.9 us", "GB/s", "p50/tcp", "p50/udp", "bw/tcp",
        "bw/udp",
    ]);
    let ratio = |value: Option<f64>| value.map_or(String::new(), |v| format!("{v:.2}"));
    let usec = |ns: u64| format!("{:.2}", ns as f64 / 1000.0);
    for row in &report.rows {
        table.add_row([
            row.op.clone(),
            row.size_bytes.to_string(),
            row.transport.clone(),
            usec(row.rtt_ns_p50),
            usec(row.rtt_ns_p99),
            usec(row.rtt_ns_p999),
            format!("{:.3}", row.gbytes_per_s),
            ratio(row.rtt_p50_ratio_to_tcp),
            ratio(row.rtt_p50_ratio_to_udp),
            ratio(row.gbytes_per_s_ratio_to_tcp),
            ratio(row.gbytes_per_s_ratio_to_udp),
        ]);
    }
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 1));
        if index != 0 && index != 2 {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    let mut out =
        String::from("Whole round trips; GB is 10^9 bytes; ratios are rdma divided by the other.\n");
    for (key, value) in &report.host {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        out.push_str(&format!("{key}: {value}\n"));
    }
    for entry in &report.fallbacks {
        out.push_str(&format!("FALLBACK {}: {}\n", entry.dev, fallback_text(&entry.fallback)));
    }
    out.push('\n');
    for line in table.to_string().lines() {
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> std::path::PathBuf {
        let dir = std::env::temp_dir().join(format!("ferroce-report-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("folder");
        let status = r#"{"control":{"version":"0","protocol":1,"pid":1},"devs":[]}"#;
        fs::write(dir.join("status.json"), status).expect("status");
        fs::write(dir.join("facts"), "cores=2\nidle=spin\n").expect("facts");
        for (transport, p50) in [("rdma", 1000), ("tcp", 10_000), ("udp", 8000)] {
            for op in OPS {
                let lat = format!(
                    r#"[{{"rtt_ns_p50":{p50},"rtt_ns_p99":{},"rtt_ns_p999":{},"rtt_samples":9}}]"#,
                    p50 * 2,
                    p50 * 3
                );
                fs::write(dir.join(format!("{transport}.{op}.lat.64.json")), lat).expect("lat");
                let bw = format!(r#"[{{"gbytes_per_s":{},"iterations":7}}]"#, 20_000.0 / f64::from(p50));
                fs::write(dir.join(format!("{transport}.{op}.bw.64.json")), bw).expect("bw");
            }
        }
        dir
    }

    #[test]
    fn rows_and_ratios_come_from_the_files() {
        let dir = folder("fine");
        let report = build(&dir).expect("complete");
        assert_eq!(report.rows.len(), 9);
        let row = &report.rows[0];
        assert_eq!((row.transport.as_str(), row.op.as_str(), row.rtt_ns_p999), ("rdma", "send", 3000));
        assert_eq!(row.rtt_p50_ratio_to_tcp, Some(0.1));
        assert_eq!(row.gbytes_per_s_ratio_to_udp, Some(8.0));
        assert_eq!(report.rows[1].rtt_p50_ratio_to_tcp, None);
        assert_eq!(report.host["cores"], 2);
        for line in text(&report).lines() {
            assert!(line.len() <= 80, "{line}");
        }
        fs::remove_dir_all(dir).expect("clean");
    }

    #[test]
    fn a_missing_or_senseless_measurement_is_named() {
        let dir = folder("gap");
        fs::remove_file(dir.join("tcp.write.bw.64.json")).expect("gap");
        assert!(build(&dir).expect_err("a gap").to_string().contains("tcp.write.bw.64.json"));
        fs::write(dir.join("tcp.write.bw.64.json"), r#"[{"gbytes_per_s":0,"iterations":7}]"#).expect("zero");
        assert!(build(&dir).expect_err("zero").to_string().contains("gbytes_per_s"));
        fs::remove_dir_all(dir).expect("clean");
    }
}

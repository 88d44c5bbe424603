//! `status`: control and appliances at one glance. Every fallback in use is named, with its reason and its way out.

use std::fmt::Write as _;
use std::process::ExitCode;

use ferroce_api::appliance::{Fallback, IcrcMode, PortStatus, Status};
use ferroce_api::rpc::{self, DevParams, StatusResult};

use super::ending;
use crate::args::Global;
use crate::client::Client;
use crate::fail::Fail;
use crate::print::Printer;

/// `status [DEV]`.
pub fn show(global: &Global, printer: &Printer, dev: Option<String>) -> Result<ExitCode, Fail> {
    let result: StatusResult = Client::open_reading(global)?.call(rpc::STATUS, &DevParams { dev })?;
    if printer.json {
        printer.value(&result)?;
    } else {
        printer.text(&text(&result, printer.details))?;
    }
    let away: Vec<_> = result.devs.iter().filter_map(|d| Some((d.dev.clone(), d.error.clone()?))).collect();
    Ok(ending(&away))
}

fn text(result: &StatusResult, details: bool) -> String {
    let mut out = String::new();
    let control = &result.control;
    // Writing to a String can't fail, so results are dropped here and below.
    let _ =
        writeln!(out, "ferroce-ctld {}: pid {}, protocol {}", control.version, control.pid, control.protocol);
    if details {
        for counter in &result.counters {
            let _ = writeln!(out, "    {} {}", counter.name, counter.value);
        }
    }
    if result.devs.is_empty() {
        let _ = writeln!(out, "no appliance is configured; see ferroce-ctld --help");
    }
    for dev in &result.devs {
        match (&dev.status, &dev.error) {
            (Some(status), _) => appliance(&mut out, status, details),
            (None, Some(error)) => {
                let _ = writeln!(out, "{}: AWAY: {error}", dev.dev);
            }
            (None, None) => {
                let _ = writeln!(out, "{}: AWAY", dev.dev);
            }
        }
    }
    out
}

fn appliance(out: &mut String, status: &Status, details: bool) {
    let _ = writeln!(
        out,
        "{}: ferroced {}: pid {}, up {:.1} s",
        status.dev,
        status.program,
        status.pid,
        status.uptime_ms as f64 / 1000.0
    );
    for port in &status.ports {
        let link = if port.link_up { "ACTIVE" } else { "DOWN" };
        let _ = writeln!(
            out,
            "    port {}: {link}, {} {} ({}), mac {}, mtu {}, queues {}",
            port.port, port.kind, port.attached_to, port.mode, port.mac, port.mtu, port.queues
        );
        let _ = writeln!(out, "        addresses {}", port.addresses.join(", "));
        wire(out, port);
        if let Some(problem) = &port.problem {
            let _ = writeln!(out, "        PROBLEM: {problem}");
        }
        if details {
            let _ = writeln!(out, "        caps {}", port.caps.join(", "));
            for counter in &port.counters {
                let _ = writeln!(out, "        {} {}", counter.name, counter.value);
            }
        }
    }
    let memory = &status.memory;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let _ = writeln!(
        out,
        "    memory: {:.1} of {:.1} MiB in use, {}",
        mib(memory.used_bytes),
        mib(memory.bytes),
        memory.pages
    );
    for worker in &status.workers {
        let core = worker.core.map_or("not pinned".to_owned(), |core| format!("core {core}"));
        let total = worker.busy_ns.saturating_add(worker.idle_ns).max(1);
        let _ = writeln!(
            out,
            "    worker {}: {core}, {}, busy {:.1}%, sleeps {}, stalls {}",
            worker.worker,
            worker.idle,
            worker.busy_ns as f64 * 100.0 / total as f64,
            worker.sleeps,
            worker.stalls
        );
    }
    let list = |counters: &[ferroce_api::appliance::Counter]| {
        counters.iter().map(|c| format!("{} {}", c.name, c.value)).collect::<Vec<_>>().join(", ")
    };
    let _ =
        writeln!(out, "    objects: {}; measurements running {}", list(&status.objects), status.perf_running);
    if !status.drops.is_empty() {
        let _ = writeln!(out, "    drops: {}", list(&status.drops));
    }
    if status.icrc == IcrcMode::Off {
        let _ = writeln!(out, "    ICRC NOT CHECKED: diagnosis mode, not for real data");
    }
    for fallback in fallbacks(status) {
        let _ = writeln!(out, "    FALLBACK: {}", fallback_text(fallback));
    }
}

/// What an interface that is shared with the kernel shows besides.
fn wire(out: &mut String, port: &PortStatus) {
    let value = |name: &str| port.counters.iter().find(|c| c.name == name).map(|c| c.value);
    if let (Some(not_ours), Some(unowned)) = (value("xdp_rx_not_ours"), value("xdp_rx_unowned_queue")) {
        let _ = writeln!(
            out,
            "        receive queues {} of {} owned, frames on others {unowned}, frames not ours {not_ours}",
            port.rx_queues_owned, port.rx_queues_present
        );
    }
}

/// A fallback in one line.
pub fn fallback_text(fallback: &Fallback) -> String {
    let Fallback { wanted, got, reason, hint } = fallback;
    let mut text = format!("wanted {wanted}, got {got}: {reason}");
    let way_out = if hint.is_empty() { "" } else { "; " };
    text.push_str(way_out);
    text.push_str(hint);
    text.truncate(text.trim_end_matches([';', ' ']).len());
    text
}

/// Every fallback of an appliance: its own, its memory's, its ports'.
pub fn fallbacks(status: &Status) -> impl Iterator<Item = &Fallback> {
    status
        .fallbacks
        .iter()
        .chain(status.memory.fallback.iter())
        .chain(status.ports.iter().flat_map(|port| port.fallbacks.iter()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recorded_status_reads_as_it_should() {
        let result: StatusResult =
            serde_json::from_str(include_str!("../../testdata/status.json")).expect("a recorded answer");
        assert_eq!(text(&result, false), include_str!("../../testdata/status.txt"));
    }

    /// A capture whose disk is full leaves the link up: the problem must be seen all the same.
    #[test]
    fn a_port_s_problem_is_shown_while_its_link_is_up() {
        let mut result: StatusResult =
            serde_json::from_str(include_str!("../../testdata/status.json")).expect("a recorded answer");
        let port = result.devs.iter_mut().flat_map(|d| &mut d.status).flat_map(|s| &mut s.ports).next();
        let port = port.expect("a port");
        (port.link_up, port.problem) = (true, Some("pcap: no space".to_owned()));
        let text = text(&result, false);
        assert!(text.contains("ACTIVE") && text.contains("PROBLEM: pcap: no space"), "{text}");
    }
}

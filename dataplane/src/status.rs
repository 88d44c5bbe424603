//! Status and counters, as queries show them: reads, sums, and puts names on.
//!
//! Called by the command handlers. Never changes anything and never waits for a worker.

use ferroce_api::appliance::{
    Counter, Fallback, IcrcMode, MemoryStatus, PortStatus, Stats, Status, WorkerStatus,
};
use ferroce_api::config::IdlePolicy;
use ferroce_engine::EngineStats;
use ferroce_mem::os::PageKind;
use ferroce_nic::Port;
use ferroce_verbs::MacAddr;

use crate::ctl::{Context, PORT};
use crate::node::Node;

/// Everything that `ferroce status` shows.
pub fn status(node: &Node, context: &Context) -> Status {
    let stats = node.device().stats();
    let identity = &node.identity;
    Status {
        dev: identity.name.clone(),
        program: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        instance: identity.instance,
        uptime_ms: u64::try_from(identity.started.elapsed().as_millis()).unwrap_or(u64::MAX),
        node_guid: identity.node_guid,
        icrc: match stats.icrc {
            ferroce_engine::IcrcMode::On => IcrcMode::On,
            ferroce_engine::IcrcMode::Off => IcrcMode::Off,
        },
        ports: vec![port(node)],
        memory: memory(node),
        workers: workers(node, &stats),
        fallbacks: identity.fallbacks.clone(),
        drops: drops(&stats).into_iter().filter(|counter| counter.value > 0).collect(),
        objects: node.objects.counts(),
        perf_running: u32::try_from(node.tests.running()).unwrap_or(u32::MAX),
        clients: u32::try_from(context.clients).unwrap_or(u32::MAX),
    }
}

/// All counters.
pub fn stats(node: &Node, context: &Context) -> Stats {
    let stats = node.device().stats();
    Stats {
        transport: summed(&stats, |worker| &worker.counters),
        drops: drops(&stats),
        port: counters(node.port.counters()),
        control: counters(context.counters.list()),
    }
}

fn counters(list: impl IntoIterator<Item = (&'static str, u64)>) -> Vec<Counter> {
    list.into_iter().map(|(name, value)| Counter { name: name.to_owned(), value }).collect()
}

/// Sums a table over the workers. All have the same names in the same order.
fn summed(
    stats: &EngineStats,
    table: impl Fn(&ferroce_engine::WorkerStats) -> &Vec<(&'static str, u64)>,
) -> Vec<Counter> {
    let mut out: Vec<Counter> = Vec::new();
    for worker in &stats.workers {
        for (at, (name, value)) in table(worker).iter().enumerate() {
            match out.get_mut(at) {
                Some(counter) => counter.value = counter.value.saturating_add(*value),
                None => out.push(Counter { name: (*name).to_owned(), value: *value }),
            }
        }
    }
    out
}

fn drops(stats: &EngineStats) -> Vec<Counter> {
    summed(stats, |worker| &worker.drops)
}

fn port(node: &Node) -> PortStatus {
    let caps = node.port.caps();
    let flags = [
        ("scatter_rx", caps.scatter_rx),
        ("steering", caps.steering),
        ("timestamps", caps.timestamps),
        ("can_sleep", caps.can_sleep),
        ("untrusted_peer", caps.untrusted_peer),
    ];
    PortStatus {
        port: PORT,
        kind: caps.kind.to_owned(),
        attached_to: node.identity.attached_to.clone(),
        mode: caps.mode,
        link_up: node.port.link_up(),
        problem: node.port.problem().map(|problem| problem.to_string()),
        mac: MacAddr(caps.mac),
        mtu: caps.mtu,
        queues: caps.queues,
        rx_queues_owned: caps.rx_queues.owned,
        rx_queues_present: caps.rx_queues.present,
        caps: flags.into_iter().filter(|(_, on)| *on).map(|(name, _)| name.to_owned()).collect(),
        addresses: node.port.addresses().into_iter().map(|(ip, prefix)| format!("{ip}/{prefix}")).collect(),
        fallbacks: node.port.fallbacks().into_iter().map(fallback).collect(),
        counters: counters(node.port.counters()),
    }
}

/// A fallback of a port.
pub fn fallback(fallback: ferroce_nic::Fallback) -> Fallback {
    let ferroce_nic::Fallback { wanted, got, reason, hint } = fallback;
    Fallback { wanted, got, reason, hint }
}

fn memory(node: &Node) -> MemoryStatus {
    let report = &node.arena_report;
    MemoryStatus {
        bytes: report.bytes,
        used_bytes: (node.arena.len() as u64).saturating_sub(node.arena.free_bytes() as u64),
        pages: match (&report.fallback, report.page_kind) {
            (None, PageKind::Normal) => {
                format!("{} (as asked; performance figures do not count)", report.page_kind)
            }
            (_, kind) => kind.to_string(),
        },
        fallback: report.fallback.as_ref().map(|reason| Fallback {
            wanted: "hugepages".to_owned(),
            got: report.page_kind.to_string(),
            reason: reason.clone(),
            hint: String::new(),
        }),
    }
}

fn workers(node: &Node, stats: &EngineStats) -> Vec<WorkerStatus> {
    let idle = node.identity.idle.iter().map(|policy| match policy {
        IdlePolicy::Adaptive { .. } => "adaptive",
        IdlePolicy::Spin => "spin",
    });
    let rows = stats.workers.iter().zip(idle).map(|(worker, idle)| WorkerStatus {
        worker: worker.worker,
        core: worker.core.and_then(|core| u32::try_from(core).ok()),
        idle: idle.to_owned(),
        passes: worker.passes(),
        busy_ns: worker.counter("busy_ns"),
        idle_ns: worker.counter("idle_ns"),
        sleeps: worker.counter("sleeps"),
        stalls: worker.counter("stalls"),
        forwards: worker.counter("forwards_out"),
    });
    rows.collect()
}

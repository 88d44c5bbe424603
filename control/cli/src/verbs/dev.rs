//! `dev`, `link` and `statistic`: devices, their ports and their counters, as `rdma` lists them.

use std::process::ExitCode;

use ferroce_api::appliance::{PortStatus, Status};
use ferroce_api::rpc::{
    self, DevEntry, DevListResult, DevParams, DevStatistic, StatisticResult, StatusResult,
};

use super::ending;
use crate::args::{DevVerb, Global, LinkVerb, StatisticVerb};
use crate::client::Client;
use crate::fail::Fail;
use crate::print::Printer;
use crate::row::Row;
use crate::words::{self, Selector};

/// `dev show [DEV]`.
pub fn dev(global: &Global, printer: &Printer, verb: Option<DevVerb>) -> Result<ExitCode, Fail> {
    let wanted = verb.and_then(|DevVerb::Show { dev }| dev);
    let list: DevListResult = Client::open_reading(global)?.call(rpc::DEV_LIST, &serde_json::json!({}))?;
    let entries: Vec<&DevEntry> =
        list.devs.iter().filter(|e| wanted.as_ref().is_none_or(|name| *name == e.ifname)).collect();
    if let (Some(name), true) = (wanted, entries.is_empty()) {
        let known: Vec<&str> = list.devs.iter().map(|e| e.ifname.as_str()).collect();
        return Err(Fail::Refused(format!("dev: asked {name}, allowed {}", known.join(", "))));
    }
    let rows: Vec<Row> = entries.iter().map(|entry| dev_row(entry)).collect();
    printer.rows(&rows)?;
    let away: Vec<_> = entries.iter().filter_map(|e| Some((e.ifname.clone(), e.error.clone()?))).collect();
    Ok(ending(&away))
}

fn dev_row(entry: &DevEntry) -> Row {
    Row::new(format!("{}: {}:", entry.ifindex, entry.ifname))
        .json("ifindex", entry.ifindex)
        .json("ifname", entry.ifname.as_str())
        .cell("node_type", "ca")
        .maybe("node_guid", entry.node_guid.as_deref())
        .maybe("sys_image_guid", entry.node_guid.as_deref())
        .cell("state", if entry.connected { "CONNECTED" } else { "AWAY" })
        .maybe("pid", entry.pid)
        .detail("socket", entry.socket.as_str())
}

/// `link show [DEV/PORT]`.
pub fn link(global: &Global, printer: &Printer, verb: Option<LinkVerb>) -> Result<ExitCode, Fail> {
    let wanted = verb.and_then(|LinkVerb::Show { link }| link);
    let selector = wanted.as_deref().map(Selector::parse).transpose()?.unwrap_or_default();
    let params = DevParams { dev: selector.dev.clone() };
    let mut client = Client::open_reading(global)?;
    let result: StatusResult = client.call(rpc::STATUS, &params)?;
    // The order of the configuration is the index; with one device named, all are listed once to find its place.
    let list: DevListResult = client.call(rpc::DEV_LIST, &serde_json::json!({}))?;
    let index = |dev: &str| list.devs.iter().find(|e| e.ifname == dev).map_or(0, |e| e.ifindex);
    let mut rows = Vec::new();
    let mut away = Vec::new();
    for dev in &result.devs {
        if let Some(status) = &dev.status {
            for port in status.ports.iter().filter(|port| selector.wants_port(port.port.into())) {
                rows.push(link_row(index(&dev.dev), status, port));
            }
        }
        away.extend(dev.error.clone().map(|error| (dev.dev.clone(), error)));
    }
    printer.rows(&rows)?;
    Ok(ending(&away))
}

fn link_row(ifindex: u32, status: &Status, port: &PortStatus) -> Row {
    let (state, physical) = if port.link_up { ("ACTIVE", "LINK_UP") } else { ("DOWN", "POLLING") };
    Row::new(format!("link {}/{}", status.dev, port.port))
        .json("ifindex", ifindex)
        .json("ifname", status.dev.as_str())
        .json("port", port.port)
        .cell("state", state)
        .cell("physical_state", physical)
        .cell("netdev", port.attached_to.as_str())
        .cell("backend", port.kind.as_str())
        .detail("mode", port.mode.as_str())
        .detail("mac", port.mac.to_string())
        .detail("mtu_bytes", port.mtu)
        .detail("queues", port.queues)
        .detail("addresses", port.addresses.clone())
        .detail("caps", port.caps.clone())
}

/// `statistic show [link DEV/PORT]`.
pub fn statistic(global: &Global, printer: &Printer, verb: Option<StatisticVerb>) -> Result<ExitCode, Fail> {
    let words = verb.map(|StatisticVerb::Show { words }| words).unwrap_or_default();
    let (selector, _) = words::parse(&words, &[])?;
    let params = DevParams { dev: selector.dev.clone() };
    let result: StatisticResult = Client::open_reading(global)?.call(rpc::STATISTIC, &params)?;
    let mut rows = Vec::new();
    let mut away = Vec::new();
    for dev in &result.devs {
        if selector.wants_port(1) {
            rows.extend(statistic_row(dev));
        }
        away.extend(dev.error.clone().map(|error| (dev.dev.clone(), error)));
    }
    printer.rows(&rows)?;
    Ok(ending(&away))
}

fn statistic_row(dev: &DevStatistic) -> Option<Row> {
    let stats = dev.stats.as_ref()?;
    let mut row = Row::new(format!("link {}/1", dev.dev))
        .json("ifindex", dev.ifindex)
        .json("ifname", dev.dev.as_str())
        .json("port", 1);
    for counter in &stats.transport {
        row = row.cell(counter.name.as_str(), counter.value);
    }
    for (group, counters) in [("drop", &stats.drops), ("port", &stats.port), ("control", &stats.control)] {
        for counter in counters {
            row = row.detail(&format!("{group}_{}", counter.name), counter.value);
        }
    }
    Some(row)
}

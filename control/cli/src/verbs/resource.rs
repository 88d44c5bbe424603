//! `resource show`: counts, or the listing of one kind with selector and filters.
//!
//! Keys and their order are those of iproute2's `rdma`; what has no counterpart there has keys of its own.

use std::process::ExitCode;

use ferroce_api::ApiError;
use ferroce_api::appliance::{CqEntry, ListKind, MrEntry, PdEntry, QpEntry, QpType};
use ferroce_api::rpc::{
    self, DevListResult, DevParams, DevResources, OwnerBlob, ResourceParams, ResourceResult, StatusResult,
};

use super::ending;
use crate::args::{Global, ResourceVerb};
use crate::client::Client;
use crate::fail::Fail;
use crate::print::Printer;
use crate::row::Row;
use crate::words;

const QP_KEYS: [&str; 9] = ["lqpn", "rqpn", "type", "state", "rq-psn", "sq-psn", "pdn", "comm", "worker"];
const CQ_KEYS: [&str; 4] = ["cqn", "cqe", "users", "worker"];
const MR_KEYS: [&str; 5] = ["rkey", "lkey", "iova", "mrlen", "pdn"];
const PD_KEYS: [&str; 2] = ["pdn", "users"];

/// `resource [show …]`.
pub fn resource(global: &Global, printer: &Printer, verb: Option<ResourceVerb>) -> Result<ExitCode, Fail> {
    let words = verb.map(|ResourceVerb::Show { words }| words).unwrap_or_default();
    let kind = words.first().and_then(|word| kind(word));
    match (kind, words.split_first()) {
        (Some(kind), Some((_, rest))) => list(global, printer, kind, rest),
        (_, None) => summary(global, printer, None),
        (None, Some((dev, []))) => summary(global, printer, Some(dev)),
        (None, Some((word, _))) => Err(Fail::Usage(format!(
            "resource show: asked {word}, allowed a device, or one of qp, cq, mr, pd"
        ))),
    }
}

fn kind(word: &str) -> Option<ListKind> {
    match word {
        "qp" => Some(ListKind::Qp),
        "cq" => Some(ListKind::Cq),
        "mr" => Some(ListKind::Mr),
        "pd" => Some(ListKind::Pd),
        _ => None,
    }
}

fn summary(global: &Global, printer: &Printer, dev: Option<&String>) -> Result<ExitCode, Fail> {
    let mut client = Client::open_reading(global)?;
    let result: StatusResult = client.call(rpc::STATUS, &DevParams { dev: dev.cloned() })?;
    let list: DevListResult = client.call(rpc::DEV_LIST, &serde_json::json!({}))?;
    let mut rows = Vec::new();
    let mut away = Vec::new();
    for dev in &result.devs {
        if let Some(status) = &dev.status {
            let index = list.devs.iter().find(|e| e.ifname == dev.dev).map_or(0, |e| e.ifindex);
            let mut row = Row::new(format!("{index}: {}:", dev.dev))
                .json("ifindex", index)
                .json("ifname", dev.dev.as_str());
            for name in ["pd", "cq", "qp", "mr"] {
                let count = status.objects.iter().find(|c| c.name == name).map_or(0, |c| c.value);
                row = row.cell(name, count);
            }
            rows.push(row);
        }
        away.extend(dev.error.clone().map(|error| (dev.dev.clone(), error)));
    }
    printer.rows(&rows)?;
    Ok(ending(&away))
}

/// A listing of one kind: `words` are selector and filters.
pub fn list(global: &Global, printer: &Printer, kind: ListKind, words: &[String]) -> Result<ExitCode, Fail> {
    let keys: &[&'static str] = match kind {
        ListKind::Qp => &QP_KEYS,
        ListKind::Cq => &CQ_KEYS,
        ListKind::Mr => &MR_KEYS,
        ListKind::Pd => &PD_KEYS,
    };
    let (selector, filters) = words::parse(words, keys)?;
    let mut client = Client::open_reading(global)?;
    let mut params = ResourceParams { dev: selector.dev.clone(), kind, cursor: None };
    let mut rows = Vec::new();
    let mut away: Vec<(String, ApiError)> = Vec::new();
    loop {
        let page: ResourceResult = client.call(rpc::RESOURCE_SHOW, &params)?;
        for dev in page.devs {
            if selector.wants_port(1) {
                rows.extend(dev_rows(&dev));
            }
            away.extend(dev.error.map(|error| (dev.dev, error)));
        }
        match page.next {
            // A cursor that stands still would never end.
            next @ Some(_) if next != params.cursor => params.cursor = next,
            _ => break,
        }
    }
    printer.rows(&words::apply(rows, &filters)?)?;
    Ok(ending(&away))
}

fn dev_rows(dev: &DevResources) -> Vec<Row> {
    let qps = dev.qp.iter().map(|entry| qp_row(dev, entry));
    let cqs = dev.cq.iter().map(|entry| cq_row(dev, entry));
    let mrs = dev.mr.iter().map(|entry| mr_row(dev, entry));
    let pds = dev.pd.iter().map(|entry| pd_row(dev, entry));
    qps.chain(cqs).chain(mrs).chain(pds).collect()
}

fn dev_head(dev: &DevResources) -> Row {
    Row::new(format!("dev {}", dev.dev)).json("ifindex", dev.ifindex).json("ifname", dev.dev.as_str())
}

fn link_head(dev: &DevResources) -> Row {
    Row::new(format!("link {}/1", dev.dev))
        .json("ifindex", dev.ifindex)
        .json("ifname", dev.dev.as_str())
        .json("port", 1)
}

fn qp_row(dev: &DevResources, entry: &QpEntry) -> Row {
    qp_cells(link_head(dev), entry)
}

/// The cells of a queue pair after `row`.
pub fn qp_cells(row: Row, entry: &QpEntry) -> Row {
    let kind = match entry.qp_type {
        QpType::Rc => "RC",
        QpType::Uc => "UC",
        QpType::Ud => "UD",
    };
    let blob = OwnerBlob::decode(&entry.owner);
    let rtr = entry.rtr.as_ref();
    let rts = entry.rts.as_ref();
    row.cell("lqpn", entry.qpn.get())
        .maybe("rqpn", rtr.map(|rtr| rtr.dest_qpn.get()))
        .cell("type", kind)
        .cell("state", entry.state.as_str())
        .maybe("rq-psn", rtr.map(|_| entry.rq_psn.get()))
        .cell("sq-psn", entry.sq_psn.get())
        .cell("pdn", entry.pd.0)
        .maybe("comm", blob.as_ref().map(|blob| blob.comm.as_str()))
        .detail("worker", entry.worker)
        .maybe_detail("path_mtu_bytes", rtr.map(|rtr| rtr.path_mtu.bytes()))
        .maybe_detail("src-addr", rtr.map(|rtr| rtr.av.sgid.to_ip().to_string()))
        .maybe_detail("dst-addr", rtr.map(|rtr| rtr.av.dgid.to_ip().to_string()))
        .maybe_detail("udp_src_port", rtr.map(|rtr| rtr.av.udp_src))
        .maybe_detail("timeout_exponent", rts.map(|rts| rts.timeout))
        .maybe_detail("retry_cnt", rts.map(|rts| rts.retry_cnt))
        .maybe_detail("rnr_retry", rts.map(|rts| rts.rnr_retry))
        .detail("una-psn", entry.una_psn.get())
        .detail("send_cqn", entry.send_cq.0)
        .detail("recv_cqn", entry.recv_cq.0)
        .detail("max_send_wr", entry.cap.max_send_wr)
        .detail("max_recv_wr", entry.cap.max_recv_wr)
        .maybe_detail("verb", blob.as_ref().map(|blob| blob.verb.as_str()))
        .maybe_detail("peer_ifname", blob.as_ref().and_then(|blob| blob.peer.as_deref()))
        .maybe_detail("uid", blob.as_ref().map(|blob| blob.uid))
        .detail("cookie", entry.cookie)
}

fn cq_row(dev: &DevResources, entry: &CqEntry) -> Row {
    dev_head(dev)
        .cell("cqn", entry.cq.0)
        .cell("cqe", entry.cqe)
        .cell("users", entry.users)
        .detail("worker", entry.worker)
        .detail("cookie", entry.cookie)
}

fn mr_row(dev: &DevResources, entry: &MrEntry) -> Row {
    // The read-only socket blanks the keys; 0 is no key of ours.
    let shown = entry.lkey.0 != 0;
    dev_head(dev)
        .maybe("rkey", shown.then_some(entry.rkey.0))
        .maybe("lkey", shown.then_some(entry.lkey.0))
        .maybe("iova", shown.then_some(entry.iova))
        .cell("mrlen", entry.bytes)
        .cell("pdn", entry.pd.0)
        .detail("access", access(entry))
        .detail("cookie", entry.cookie)
}

fn access(entry: &MrEntry) -> Vec<&'static str> {
    let rights = [
        (true, "local-read"),
        (entry.access.local_write, "local-write"),
        (entry.access.remote_write, "remote-write"),
        (entry.access.remote_read, "remote-read"),
        (entry.access.remote_atomic, "remote-atomic"),
        (entry.access.mw_bind, "mw-bind"),
    ];
    rights.into_iter().filter_map(|(has, name)| has.then_some(name)).collect()
}

fn pd_row(dev: &DevResources, entry: &PdEntry) -> Row {
    dev_head(dev).cell("pdn", entry.pd.0).cell("users", entry.users).detail("cookie", entry.cookie)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An answer of a running control process, recorded.
    const REPLY: &str = include_str!("../../testdata/resource_qp.json");

    fn rows() -> Vec<Row> {
        let reply: ResourceResult = serde_json::from_str(REPLY).expect("a recorded answer");
        reply.devs.iter().flat_map(dev_rows).collect()
    }

    #[test]
    fn queue_pairs_look_as_rdma_lists_them() {
        let text: Vec<String> = rows().iter().map(|row| row.text(false)).collect();
        assert_eq!(text.join("\n") + "\n", include_str!("../../testdata/resource_qp.txt"));
    }

    #[test]
    fn their_json_has_iproute2s_keys_in_a_flat_array() {
        let json = serde_json::to_string_pretty(&rows()).expect("encodes");
        assert_eq!(json + "\n", include_str!("../../testdata/resource_qp_rows.json"));
    }
}

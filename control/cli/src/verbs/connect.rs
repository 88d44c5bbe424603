//! `connect` and `disconnect`.

use std::process::ExitCode;

use ferroce_api::rpc::{self, ConnectParams, ConnectResult, DisconnectResult, EndPoint, QpParams};
use ferroce_wire::Qpn;

use super::qp::gid;
use crate::args::{ConnectArgs, Global};
use crate::client::Client;
use crate::fail::Fail;
use crate::print::Printer;
use crate::row::Row;

/// `connect DEV PEER`.
pub fn connect(global: &Global, printer: &Printer, args: ConnectArgs) -> Result<ExitCode, Fail> {
    let params = ConnectParams {
        mr_bytes: args.size,
        max_wr: args.max_wr,
        path_mtu: args.path_mtu,
        sgid: gid("--sgid", args.sgid.as_ref())?,
        dgid: gid("--dgid", args.dgid.as_ref())?,
        traffic_class: args.traffic_class,
        worker: args.worker,
        timeout: args.timeout_exponent,
        retry_cnt: args.retry_cnt,
        rnr_retry: args.rnr_retry,
        ..ConnectParams::new(args.dev, args.peer)
    };
    let made: ConnectResult = Client::open(global)?.call(rpc::CONNECT, &params)?;
    printer.rows(&rows(&made))?;
    Ok(ExitCode::SUCCESS)
}

/// One row for each side.
fn rows(made: &ConnectResult) -> [Row; 2] {
    [row(made, &made.dev, &made.local, &made.remote), row(made, &made.peer, &made.remote, &made.local)]
}

fn row(made: &ConnectResult, dev: &str, own: &EndPoint, peer: &EndPoint) -> Row {
    Row::new(format!("link {dev}/1"))
        .json("ifname", dev)
        .json("port", 1)
        .cell("lqpn", own.qpn.get())
        .cell("rqpn", peer.qpn.get())
        .cell("type", "RC")
        .cell("state", "RTS")
        .cell("rq-psn", peer.psn.get())
        .cell("sq-psn", own.psn.get())
        .cell("path_mtu_bytes", made.path_mtu.bytes())
        .cell("src-addr", own.gid.to_ip().to_string())
        .cell("dst-addr", peer.gid.to_ip().to_string())
        .detail("worker", own.worker)
        .detail("pdn", own.pd.0)
        .detail("cqn", own.cq.0)
        .maybe_detail("rkey", own.mr.map(|mr| mr.rkey.0))
        .maybe_detail("lkey", own.mr.map(|mr| mr.lkey.0))
        .maybe_detail("iova", own.mr.map(|mr| mr.iova))
        .maybe_detail("mrlen", own.mr.map(|mr| mr.bytes))
        .detail("cookie", made.cookie)
}

/// `disconnect DEV LQPN`.
pub fn disconnect(global: &Global, printer: &Printer, dev: String, lqpn: u32) -> Result<ExitCode, Fail> {
    let params = QpParams { dev, qpn: Qpn::new(lqpn) };
    let result: DisconnectResult = Client::open(global)?.call(rpc::DISCONNECT, &params)?;
    let row = Row::new(format!("link {}/1", params.dev))
        .json("ifname", params.dev.as_str())
        .cell("lqpn", lqpn)
        .cell("destroyed", result.destroyed);
    printer.rows(&[row])?;
    Ok(ExitCode::SUCCESS)
}

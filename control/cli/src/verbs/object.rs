//! `pd`, `mr` and `cq`: list, create, destroy.

use std::process::ExitCode;

use ferroce_api::appliance::{Access, CqHandle, ListKind, Lkey, PdHandle};
use ferroce_api::rpc::{
    self, CqCreateParams, CqParams, CqResult, MrCreateParams, MrParams, MrResult, PdCreateParams, PdParams,
    PdResult,
};
use serde::Serialize;

use super::resource::list;
use crate::args::{CqVerb, Filter, Global, MrVerb, PdVerb, Right};
use crate::client::Client;
use crate::fail::Fail;
use crate::print::Printer;
use crate::row::Row;

/// Calls a method that answers only that it is done.
pub(super) fn done(global: &Global, method: &str, params: &impl Serialize) -> Result<ExitCode, Fail> {
    let _: bool = Client::open(global)?.call(method, params)?;
    Ok(ExitCode::SUCCESS)
}

/// The head of a row of `dev`.
pub(super) fn head(dev: &str) -> Row {
    Row::new(format!("dev {dev}")).json("ifname", dev)
}

/// `pd …`.
pub fn pd(global: &Global, printer: &Printer, verb: Option<PdVerb>) -> Result<ExitCode, Fail> {
    match verb.unwrap_or(PdVerb::Show(Filter::default())) {
        PdVerb::Show(filter) => list(global, printer, ListKind::Pd, &filter.words),
        PdVerb::Create { dev } => {
            let made: PdResult =
                Client::open(global)?.call(rpc::PD_CREATE, &PdCreateParams { dev: dev.clone() })?;
            printer.rows(&[head(&dev).cell("pdn", made.pd.0)])?;
            Ok(ExitCode::SUCCESS)
        }
        PdVerb::Destroy { dev, pdn } => done(global, rpc::PD_DESTROY, &PdParams { dev, pd: PdHandle(pdn) }),
    }
}

/// `mr …`.
pub fn mr(global: &Global, printer: &Printer, verb: Option<MrVerb>) -> Result<ExitCode, Fail> {
    match verb.unwrap_or(MrVerb::Show(Filter::default())) {
        MrVerb::Show(filter) => list(global, printer, ListKind::Mr, &filter.words),
        MrVerb::Create { dev, pdn, size, access } => {
            let access = Access {
                local_write: access.contains(&Right::LocalWrite),
                remote_write: access.contains(&Right::RemoteWrite),
                remote_read: access.contains(&Right::RemoteRead),
                remote_atomic: access.contains(&Right::RemoteAtomic),
                mw_bind: false,
            };
            let params = MrCreateParams { dev: dev.clone(), pd: PdHandle(pdn), bytes: size, access };
            let made: MrResult = Client::open(global)?.call(rpc::MR_CREATE, &params)?;
            let row = head(&dev)
                .cell("rkey", made.rkey.0)
                .cell("lkey", made.lkey.0)
                .cell("iova", made.iova)
                .cell("mrlen", made.bytes)
                .cell("pdn", pdn);
            printer.rows(&[row])?;
            Ok(ExitCode::SUCCESS)
        }
        MrVerb::Destroy { dev, lkey } => done(global, rpc::MR_DESTROY, &MrParams { dev, lkey: Lkey(lkey) }),
    }
}

/// `cq …`.
pub fn cq(global: &Global, printer: &Printer, verb: Option<CqVerb>) -> Result<ExitCode, Fail> {
    match verb.unwrap_or(CqVerb::Show(Filter::default())) {
        CqVerb::Show(filter) => list(global, printer, ListKind::Cq, &filter.words),
        CqVerb::Create { dev, cqe, worker } => {
            let params = CqCreateParams { dev: dev.clone(), worker, cqe };
            let made: CqResult = Client::open(global)?.call(rpc::CQ_CREATE, &params)?;
            printer.rows(&[head(&dev).cell("cqn", made.cq.0)])?;
            Ok(ExitCode::SUCCESS)
        }
        CqVerb::Destroy { dev, cqn } => done(global, rpc::CQ_DESTROY, &CqParams { dev, cq: CqHandle(cqn) }),
    }
}

//! Single objects: create, query, modify and destroy, each one command to one appliance.
//!
//! Owns nothing. Objects made here carry no cookie of a connection, so `disconnect` never takes them away.

use ferroce_api::ApiError;
use ferroce_api::Code;
use ferroce_api::appliance::{AddressVector, Command, QpEntry, QpSpec, Response};
use ferroce_api::rpc::{
    CqCreateParams, CqParams, CqResult, MrCreateParams, MrParams, MrResult, OwnerBlob, PathResolveParams,
    PdCreateParams, PdParams, PdResult, QpCreateParams, QpModifyParams, QpParams, QpResult,
};

use crate::control::{Caller, Control};
use crate::dp_link::Link;

/// Cookie of objects that belong to no connection.
const NO_COOKIE: u64 = 0;

async fn done(link: &Link, command: Command) -> Result<bool, ApiError> {
    match link.one(command).await? {
        Response::Done => Ok(true),
        other => Err(link.unexpected(&other)),
    }
}

pub(super) async fn pd_create(control: &Control, params: &PdCreateParams) -> Result<PdResult, ApiError> {
    let link = control.link(&params.dev)?;
    match link.one(Command::AllocPd { cookie: NO_COOKIE }).await? {
        Response::Pd { pd } => Ok(PdResult { pd }),
        other => Err(link.unexpected(&other)),
    }
}

pub(super) async fn pd_destroy(control: &Control, params: &PdParams) -> Result<bool, ApiError> {
    done(control.link(&params.dev)?, Command::DeallocPd { pd: params.pd }).await
}

pub(super) async fn mr_create(control: &Control, params: &MrCreateParams) -> Result<MrResult, ApiError> {
    let link = control.link(&params.dev)?;
    let command =
        Command::AllocMr { pd: params.pd, bytes: params.bytes, access: params.access, cookie: NO_COOKIE };
    match link.one(command).await? {
        Response::Mr { lkey, rkey, iova, bytes } => Ok(MrResult { lkey, rkey, iova, bytes }),
        other => Err(link.unexpected(&other)),
    }
}

pub(super) async fn mr_destroy(control: &Control, params: &MrParams) -> Result<bool, ApiError> {
    done(control.link(&params.dev)?, Command::DeregMr { lkey: params.lkey }).await
}

pub(super) async fn cq_create(control: &Control, params: &CqCreateParams) -> Result<CqResult, ApiError> {
    let link = control.link(&params.dev)?;
    let command = Command::CreateCq { worker: params.worker, cqe: params.cqe, cookie: NO_COOKIE };
    match link.one(command).await? {
        Response::Cq { cq } => Ok(CqResult { cq }),
        other => Err(link.unexpected(&other)),
    }
}

pub(super) async fn cq_destroy(control: &Control, params: &CqParams) -> Result<bool, ApiError> {
    done(control.link(&params.dev)?, Command::DestroyCq { cq: params.cq }).await
}

/// The owner blob of a queue pair that `verb` makes.
pub(super) fn owner(
    verb: &str,
    peer: Option<&str>,
    caller: &Caller,
) -> Result<ferroce_api::ids::Owner, ApiError> {
    let blob = OwnerBlob {
        comm: "ferroce-ctld".to_owned(),
        verb: verb.to_owned(),
        peer: peer.map(str::to_owned),
        uid: caller.uid,
    };
    blob.encode().ok_or_else(|| ApiError::new(Code::Internal, "owner", "", "the blob does not encode"))
}

pub(super) async fn qp_create(
    control: &Control,
    caller: &Caller,
    params: QpCreateParams,
) -> Result<QpResult, ApiError> {
    let link = control.link(&params.dev)?;
    let spec = QpSpec {
        qp_type: params.qp_type,
        pd: params.pd,
        send_cq: params.send_cq,
        recv_cq: params.recv_cq,
        cap: params.cap,
        sq_sig_all: params.sq_sig_all,
        owner: owner("qp_create", None, caller)?,
        cookie: NO_COOKIE,
    };
    match link.one(Command::CreateQp(Box::new(spec))).await? {
        Response::Qp { qpn, worker } => Ok(QpResult { qpn, worker }),
        other => Err(link.unexpected(&other)),
    }
}

pub(super) async fn qp_query(control: &Control, params: &QpParams) -> Result<Box<QpEntry>, ApiError> {
    let link = control.link(&params.dev)?;
    query(link, params.qpn).await
}

/// What `link` knows of a queue pair.
pub(super) async fn query(link: &Link, qpn: ferroce_wire::Qpn) -> Result<Box<QpEntry>, ApiError> {
    match link.one(Command::QueryQp { qpn }).await? {
        Response::QpInfo(entry) => Ok(entry),
        other => Err(link.unexpected(&other)),
    }
}

pub(super) async fn path_resolve(
    control: &Control,
    params: PathResolveParams,
) -> Result<AddressVector, ApiError> {
    let link = control.link(&params.dev)?;
    match link.one(Command::ResolvePath(params.path)).await? {
        Response::Path(av) => Ok(av),
        other => Err(link.unexpected(&other)),
    }
}

pub(super) async fn qp_modify(control: &Control, params: QpModifyParams) -> Result<Box<QpEntry>, ApiError> {
    let link = control.link(&params.dev)?;
    done(link, Command::ModifyQp { qpn: params.qpn, modify: params.modify }).await?;
    query(link, params.qpn).await
}

pub(super) async fn qp_destroy(control: &Control, params: &QpParams) -> Result<bool, ApiError> {
    done(control.link(&params.dev)?, Command::DestroyQp { qpn: params.qpn }).await
}

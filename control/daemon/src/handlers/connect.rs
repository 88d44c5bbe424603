//! `connect` and `disconnect`: a pair of reliable queue pairs between two appliances.
//!
//! Owns nothing that outlives a call. The invariant: a connection exists whole, both queue pairs in RTS, or nothing of
//! it is left. Everything made for one carries the same cookie on both sides, which is how `disconnect` finds it, also
//! after a restart of control.

use std::time::Duration;

use ferroce_api::appliance::{
    Access, AddressVector, Command, CqHandle, DeviceInfo, GidEntry, InitSpec, Modify, PathQuery, PdHandle,
    PortInfo, QpCap, QpSpec, QpType, Response, RtrSpec, RtsSpec,
};
use ferroce_api::rpc::{
    ConnectParams, ConnectResult, DisconnectResult, EndPoint, MrResult, OwnerBlob, QpParams, RpcError,
};
use ferroce_api::{ApiError, Code};
use ferroce_wire::{Gid, PathMtu, Psn, Qpn};

use super::ledger::{Ledger, StepError, random_psn, sweep};
use super::object::{owner, query};
use crate::control::{Caller, Control};
use crate::dp_link::{CALL_DEADLINE, Link};

/// READs and atomics outstanding that a connection asks for, where both devices allow it.
const RD_ATOMIC: u8 = 16;
/// 0.64 ms: what the field uses.
const MIN_RNR_TIMER: u8 = 12;

/// What a connection is made with.
pub(super) struct Plan<'a> {
    /// Addresses, MTU, retries.
    pub params: &'a ConnectParams,
    /// Sizes of both queue pairs.
    pub cap: QpCap,
    /// Verb for the owner blob.
    pub verb: &'static str,
}

pub(super) async fn connect(
    control: &Control,
    caller: &Caller,
    params: ConnectParams,
) -> Result<ConnectResult, RpcError> {
    check(&params)?;
    let cap = QpCap { max_send_wr: params.max_wr, max_recv_wr: params.max_wr, ..QpCap::default() };
    let plan = Plan { params: &params, cap, verb: "connect" };
    let mut ledger = Ledger::new(control)?;
    match build(control, caller, &plan, &mut ledger).await {
        Ok(result) => Ok(result),
        Err(Failure::Refused(error)) => Err(error.into()),
        Err(Failure::Step(error)) => {
            let left = ledger.undo().await;
            Err(error.into_rpc("connect", left.as_deref()))
        }
    }
}

/// Why a connection was not made.
pub(super) enum Failure {
    /// Nothing was begun.
    Refused(ApiError),
    /// A step failed; the ledger has to be undone.
    Step(StepError),
}

impl From<StepError> for Failure {
    fn from(error: StepError) -> Self {
        Failure::Step(error)
    }
}

fn check(params: &ConnectParams) -> Result<(), ApiError> {
    let refuse = |attribute: &str, asked: String, allowed: &str| {
        Err(ApiError::new(Code::Invalid, attribute, asked, allowed))
    };
    if params.dev == params.peer {
        return refuse("peer", params.peer.clone(), "another device than dev");
    }
    if params.max_wr == 0 {
        return refuse("max_wr", "0".to_owned(), "1 and up");
    }
    if !(1..=31).contains(&params.timeout) {
        return refuse("timeout", params.timeout.to_string(), "1 to 31; 0 would wait for ever");
    }
    if params.retry_cnt > 7 || params.rnr_retry > 7 {
        return refuse(
            "retry_cnt, rnr_retry",
            format!("{}, {}", params.retry_cnt, params.rnr_retry),
            "0 to 7",
        );
    }
    Ok(())
}

/// What a device says before anything is made.
struct Facts {
    device: DeviceInfo,
    port: PortInfo,
    gids: Vec<GidEntry>,
}

/// Makes the connection; on failure the caller undoes the ledger.
pub(super) async fn build<'c>(
    control: &'c Control,
    caller: &Caller,
    plan: &Plan<'_>,
    ledger: &mut Ledger<'c>,
) -> Result<ConnectResult, Failure> {
    let params = plan.params;
    let a = control.link(&params.dev).map_err(Failure::Refused)?;
    let b = control.link(&params.peer).map_err(Failure::Refused)?;
    let facts_a = facts(ledger, a).await?;
    let facts_b = facts(ledger, b).await?;
    let mtu = path_mtu(params.path_mtu, (a, &facts_a.port), (b, &facts_b.port)).map_err(Failure::Refused)?;
    let (av_a, av_b) = paths(params, (a, &facts_a), (b, &facts_b), ledger).await?;
    let (psn_a, psn_b) = (random_psn().map_err(Failure::Refused)?, random_psn().map_err(Failure::Refused)?);
    let local = end_point(ledger, a, plan, caller, (av_a.sgid, psn_a)).await?;
    let remote = end_point(ledger, b, plan, caller, (av_b.sgid, psn_b)).await?;
    let to_rts = |av, peer: &EndPoint, own: &EndPoint, own_facts: &Facts, peer_facts: &Facts| Transition {
        av,
        mtu,
        dest_qpn: peer.qpn,
        rq_psn: peer.psn,
        sq_psn: own.psn,
        // What one side sends at once is what the other serves at once.
        serve: RD_ATOMIC.min(own_facts.device.max_qp_rd_atom).min(peer_facts.device.max_qp_init_rd_atom),
        outstanding: RD_ATOMIC
            .min(own_facts.device.max_qp_init_rd_atom)
            .min(peer_facts.device.max_qp_rd_atom),
    };
    to_rts(av_a, &remote, &local, &facts_a, &facts_b).make(ledger, a, local.qpn, params).await?;
    to_rts(av_b, &local, &remote, &facts_b, &facts_a).make(ledger, b, remote.qpn, params).await?;
    Ok(ConnectResult {
        dev: params.dev.clone(),
        peer: params.peer.clone(),
        path_mtu: mtu,
        cookie: ledger.cookie(),
        local,
        remote,
    })
}

async fn facts<'c>(ledger: &mut Ledger<'c>, link: &'c Link) -> Result<Facts, StepError> {
    let steps = vec![
        ("query device", Command::QueryDevice),
        ("query port", Command::QueryPort),
        ("list addresses", Command::ListGids),
    ];
    let mut answers = ledger.steps(link, steps, CALL_DEADLINE).await?.into_iter();
    match (answers.next(), answers.next(), answers.next()) {
        (Some(Response::Device(device)), Some(Response::Port(port)), Some(Response::Gids(gids))) => {
            Ok(Facts { device, port, gids })
        }
        (Some(other), ..) => Err(StepError::new("query device", link, link.unexpected(&other))),
        (None, ..) => Err(StepError::new("query device", link, link.unexpected(&Response::Done))),
    }
}

/// The smaller of both sides, or what was asked for if both carry it.
fn path_mtu(asked: Option<u32>, a: (&Link, &PortInfo), b: (&Link, &PortInfo)) -> Result<PathMtu, ApiError> {
    let (limit, at) = if a.1.active_mtu <= b.1.active_mtu { a } else { b };
    let largest = limit;
    pick_mtu(asked, (at.active_mtu, at.netdev_mtu, largest.name()))
}

fn pick_mtu(
    asked: Option<u32>,
    (largest, netdev_mtu, dev): (PathMtu, u32, &str),
) -> Result<PathMtu, ApiError> {
    let Some(bytes) = asked else { return Ok(largest) };
    match PathMtu::from_bytes(bytes) {
        Some(mtu) if mtu <= largest => Ok(mtu),
        Some(_) => Err(ApiError::new(
            Code::Invalid,
            "path_mtu",
            bytes.to_string(),
            format!("largest {} (port of {dev}, whose MTU is {netdev_mtu})", largest.bytes()),
        )
        .hint(format!("raise the MTU of that port to {} or more", bytes.saturating_add(96)))),
        None => {
            Err(ApiError::new(Code::Invalid, "path_mtu", bytes.to_string(), "256, 512, 1024, 2048 or 4096"))
        }
    }
}

/// Resolves the path both ways. Without a given address the first one of the peer that `a` has a path to is taken.
async fn paths<'c>(
    params: &ConnectParams,
    a: (&'c Link, &Facts),
    b: (&'c Link, &Facts),
    ledger: &mut Ledger<'c>,
) -> Result<(AddressVector, AddressVector), StepError> {
    let candidates: Vec<Gid> = match params.dgid {
        Some(gid) => vec![gid],
        None => b.1.gids.iter().map(|entry| entry.gid).collect(),
    };
    let mut last = StepError::new(
        "resolve path",
        a.0,
        ApiError::new(Code::NotFound, "gid", "", format!("{} has no address", b.0.name()))
            .hint("give it one in the configuration of its appliance"),
    );
    for dgid in candidates {
        match resolve(ledger, a.0, dgid, params.sgid, params.traffic_class).await {
            Ok(av_a) => {
                let av_b = resolve(ledger, b.0, av_a.sgid, Some(dgid), params.traffic_class).await?;
                return Ok((av_a, av_b));
            }
            Err(error) => last = error,
        }
    }
    Err(last)
}

async fn resolve<'c>(
    ledger: &mut Ledger<'c>,
    link: &'c Link,
    dgid: Gid,
    sgid: Option<Gid>,
    traffic_class: u8,
) -> Result<AddressVector, StepError> {
    let command = Command::ResolvePath(PathQuery { dgid, sgid, traffic_class });
    match ledger.make("resolve path", link, command).await? {
        Response::Path(av) => Ok(av),
        other => Err(StepError::new("resolve path", link, link.unexpected(&other))),
    }
}

/// Makes what one side needs: protection domain, completion queue, region, queue pair.
async fn end_point<'c>(
    ledger: &mut Ledger<'c>,
    link: &'c Link,
    plan: &Plan<'_>,
    caller: &Caller,
    (gid, psn): (Gid, Psn),
) -> Result<EndPoint, StepError> {
    let cookie = ledger.cookie();
    let worker = plan.params.worker.unwrap_or_else(|| link.next_worker());
    let cqe = plan.cap.max_send_wr.saturating_add(plan.cap.max_recv_wr);
    let peer = if link.name() == plan.params.dev { &plan.params.peer } else { &plan.params.dev };
    let pd = made_pd(ledger, link, cookie).await?;
    let cq = made_cq(ledger, link, Command::CreateCq { worker, cqe, cookie }).await?;
    let mr = match plan.params.mr_bytes {
        0 => None,
        bytes => Some(region(ledger, link, pd, bytes).await?),
    };
    let spec = QpSpec {
        qp_type: QpType::Rc,
        pd,
        send_cq: cq,
        recv_cq: cq,
        cap: plan.cap,
        sq_sig_all: false,
        owner: owner(plan.verb, Some(peer), caller).map_err(|e| StepError::new("create qp", link, e))?,
        cookie,
    };
    match ledger.make("create qp", link, Command::CreateQp(Box::new(spec))).await? {
        Response::Qp { qpn, worker } => Ok(EndPoint { qpn, psn, gid, worker, pd, cq, mr }),
        other => Err(StepError::new("create qp", link, link.unexpected(&other))),
    }
}

async fn made_pd<'c>(ledger: &mut Ledger<'c>, link: &'c Link, cookie: u64) -> Result<PdHandle, StepError> {
    match ledger.make("create pd", link, Command::AllocPd { cookie }).await? {
        Response::Pd { pd } => Ok(pd),
        other => Err(StepError::new("create pd", link, link.unexpected(&other))),
    }
}

async fn made_cq<'c>(
    ledger: &mut Ledger<'c>,
    link: &'c Link,
    command: Command,
) -> Result<CqHandle, StepError> {
    match ledger.make("create cq", link, command).await? {
        Response::Cq { cq } => Ok(cq),
        other => Err(StepError::new("create cq", link, link.unexpected(&other))),
    }
}

/// A region that the peer may read and write.
pub(super) async fn region<'c>(
    ledger: &mut Ledger<'c>,
    link: &'c Link,
    pd: PdHandle,
    bytes: u64,
) -> Result<MrResult, StepError> {
    let command = Command::AllocMr { pd, bytes, access: Access::ALL_RW, cookie: ledger.cookie() };
    match ledger.make("create mr", link, command).await? {
        Response::Mr { lkey, rkey, iova, bytes } => Ok(MrResult { lkey, rkey, iova, bytes }),
        other => Err(StepError::new("create mr", link, link.unexpected(&other))),
    }
}

/// From RESET to RTS.
struct Transition {
    av: AddressVector,
    mtu: PathMtu,
    dest_qpn: Qpn,
    rq_psn: Psn,
    sq_psn: Psn,
    serve: u8,
    outstanding: u8,
}

impl Transition {
    async fn make<'c>(
        &self,
        ledger: &mut Ledger<'c>,
        link: &'c Link,
        qpn: Qpn,
        params: &ConnectParams,
    ) -> Result<(), StepError> {
        let access = Access { remote_write: true, remote_read: true, ..Access::default() };
        let init = InitSpec { pkey: 0xffff, access, qkey: 0 };
        let rtr = RtrSpec {
            av: self.av,
            class: 0,
            path_mtu: self.mtu,
            dest_qpn: self.dest_qpn,
            rq_psn: self.rq_psn,
            max_dest_rd_atomic: self.serve,
            min_rnr_timer: MIN_RNR_TIMER,
        };
        let rts = RtsSpec {
            sq_psn: self.sq_psn,
            timeout: params.timeout,
            retry_cnt: params.retry_cnt,
            rnr_retry: params.rnr_retry,
            max_rd_atomic: self.outstanding,
        };
        let steps = vec![
            ("modify qp to INIT", Command::ModifyQp { qpn, modify: Modify::Init(init) }),
            ("modify qp to RTR", Command::ModifyQp { qpn, modify: Modify::Rtr(rtr) }),
            ("modify qp to RTS", Command::ModifyQp { qpn, modify: Modify::Rts(rts) }),
        ];
        ledger.steps(link, steps, Duration::from_secs(5)).await.map(|_| ())
    }
}

pub(super) async fn disconnect(control: &Control, params: &QpParams) -> Result<DisconnectResult, ApiError> {
    let link = control.link(&params.dev)?;
    let entry = query(link, params.qpn).await?;
    let peer = OwnerBlob::decode(&entry.owner).and_then(|blob| blob.peer);
    let (Some(peer), true) = (peer, entry.cookie != 0) else {
        return Err(ApiError::new(
            Code::Invalid,
            "qpn",
            params.qpn.get().to_string(),
            "a queue pair that connect made: this one has no peer in its owner blob",
        )
        .hint("destroy it with qp destroy"));
    };
    let mut destroyed = sweep(link, entry.cookie).await?;
    destroyed += sweep(control.link(&peer)?, entry.cookie).await?;
    Ok(DisconnectResult { destroyed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_mtu_is_the_smaller_one_and_a_larger_wish_says_why_not() {
        let port = (PathMtu::Mtu1024, 1500, "fe1");
        assert_eq!(pick_mtu(None, port), Ok(PathMtu::Mtu1024));
        assert_eq!(pick_mtu(Some(512), port), Ok(PathMtu::Mtu512));
        let text = pick_mtu(Some(4096), port).expect_err("too large").to_string();
        assert!(text.contains("largest 1024") && text.contains("fe1") && text.contains("4192"), "{text}");
        assert!(pick_mtu(Some(1000), port).expect_err("none of the five").to_string().contains("1024, 2048"));
        assert!(pick_mtu(Some(u32::MAX), port).is_err());
    }

    #[test]
    fn waiting_for_ever_cannot_be_asked_for() {
        let params = ConnectParams { timeout: 0, ..ConnectParams::new("a", "b") };
        assert!(check(&params).expect_err("refused").to_string().contains("for ever"));
        assert!(check(&ConnectParams::new("a", "a")).is_err());
        assert!(check(&ConnectParams::new("a", "b")).is_ok());
    }
}

//! `perf_run`: one measurement between two appliances, with everything that it needs made before and destroyed after.
//!
//! Owns nothing that outlives a call. The invariant: the measurement ends by its deadline, and whatever its end, what
//! was made for it is gone. The data moves between the appliances' workers; control only starts them and asks.

use std::time::Duration;

use ferroce_api::appliance::{
    Command, EventBody, PerfId, PerfReport, PerfRole, PerfSpec, PerfState, QpCap, QpEntry, QpState,
    RemoteBuffer, Response,
};
use ferroce_api::rpc::{ConnectParams, EndPoint, MrResult, PerfRunParams, PerfRunResult, RpcError};
use ferroce_api::{ApiError, Code};
use ferroce_wire::{PathMtu, Qpn};
use tokio::time::{Instant, sleep_until};

use super::connect::{Failure, Plan, build, region};
use super::ledger::{Ledger, StepError};
use super::object::query;
use crate::control::{Caller, Control};
use crate::dp_link::Link;

const MAX_DEADLINE_MS: u32 = 600_000;
const MAX_DEPTH: u32 = 65_536;
/// Receives kept posted in a send test, at least: a burst must not meet an empty queue.
const MIN_RX_DEPTH: u32 = 64;
/// Events can get lost; this often control asks by itself. Seldom, as asking takes time from the measured cores.
const ASK_EVERY: Duration = Duration::from_millis(250);

pub(super) async fn run(
    control: &Control,
    caller: &Caller,
    params: PerfRunParams,
) -> Result<PerfRunResult, RpcError> {
    check(&params)?;
    let mut ledger = Ledger::temporary(control)?;
    let outcome = measure(control, caller, &params, &mut ledger).await;
    let left = ledger.undo().await;
    match outcome {
        Ok(result) => match left {
            None => Ok(result),
            Some(left) => Err(ApiError::new(
                Code::Internal,
                "perf_run",
                "",
                format!("measured, but left behind: {left}"),
            )
            .into()),
        },
        Err(Failure::Refused(error)) => Err(error.into()),
        Err(Failure::Step(error)) => Err(error.into_rpc("perf_run", left.as_deref())),
    }
}

fn check(params: &PerfRunParams) -> Result<(), ApiError> {
    let refuse = |attribute: &str, asked: u64, allowed: &str| {
        Err(ApiError::new(Code::Invalid, attribute, asked.to_string(), allowed))
    };
    if params.iterations == 0 {
        return refuse("iterations", 0, "1 and up");
    }
    if params.depth == 0 || params.depth > MAX_DEPTH {
        return refuse("depth", params.depth.into(), "1 to 65536");
    }
    if params.deadline_ms == 0 || params.deadline_ms > MAX_DEADLINE_MS {
        return refuse("deadline_ms", params.deadline_ms.into(), "1 to 600000");
    }
    if !(1..=31).contains(&params.timeout) {
        return refuse("timeout", params.timeout.into(), "1 to 31; 0 would wait for ever");
    }
    if params.client == params.server {
        return Err(ApiError::new(Code::Invalid, "server", &params.server, "another device than client"));
    }
    Ok(())
}

/// The two connected sides of a measurement.
struct Pair<'c> {
    client: &'c Link,
    server: &'c Link,
    client_side: Side,
    server_side: Side,
    path_mtu: PathMtu,
    /// Receives that the queue pairs hold.
    rx_depth: u32,
}

struct Side {
    qpn: Qpn,
    mr: MrResult,
}

async fn measure<'c>(
    control: &'c Control,
    caller: &Caller,
    params: &PerfRunParams,
    ledger: &mut Ledger<'c>,
) -> Result<PerfRunResult, Failure> {
    let pair = match params.qpn {
        Some(qpn) => existing(control, params, qpn, ledger).await?,
        None => fresh(control, caller, params, ledger).await?,
    };
    // Listen before anything can end.
    let mut events = pair.client.events();
    let server = start(ledger, params, &pair, PerfRole::Server).await?;
    let client = start(ledger, params, &pair, PerfRole::Client).await?;
    let deadline = Instant::now() + Duration::from_millis(params.deadline_ms.into());
    let mut ask_at = Instant::now() + ASK_EVERY;
    loop {
        tokio::select! {
            event = events.recv() => match event {
                Ok(event) if event.event == (EventBody::PerfEnded { id: client }) => {}
                Ok(_) => continue,
                // Some were missed; asking tells.
                Err(tokio::sync::broadcast::error::RecvError::Lagged(_)) => {}
                Err(tokio::sync::broadcast::error::RecvError::Closed) => sleep_until(ask_at).await,
            },
            () = sleep_until(ask_at.min(deadline)) => {}
            () = control.stopping() => {
                let error = ApiError::new(Code::State, "perf_run", "", "stopped: the control process is stopping");
                return Err(StepError::new("run", pair.client, error).into());
            }
        }
        if caller.gone.get() {
            let error = ApiError::new(Code::State, "perf_run", "", "stopped: the caller has gone");
            return Err(StepError::new("run", pair.client, error).into());
        }
        ask_at = Instant::now() + ASK_EVERY;
        let report = ask(pair.client, client).await?;
        match report.state {
            PerfState::Done => return Ok(result(params, &pair, &report)),
            PerfState::Failed | PerfState::Stopped => {
                return Err(failed(&pair, (client, report), server).await.into());
            }
            PerfState::Running => {}
        }
        // A server that failed lets the client wait for nothing.
        let served = ask(pair.server, server).await?;
        if matches!(served.state, PerfState::Failed | PerfState::Stopped) {
            return Err(StepError::new("run", pair.server, fault(served)).into());
        }
        if Instant::now() >= deadline {
            return Err(late(params, &pair, &report).into());
        }
    }
}

/// Connects a pair for this measurement alone.
async fn fresh<'c>(
    control: &'c Control,
    caller: &Caller,
    params: &PerfRunParams,
    ledger: &mut Ledger<'c>,
) -> Result<Pair<'c>, Failure> {
    let mut connection = ConnectParams::new(&params.client, &params.server);
    connection.mr_bytes =
        spec(params, PerfRole::Client, Qpn::default(), &MrResult::default(), None).region_bytes();
    connection.path_mtu = params.path_mtu;
    connection.worker = params.worker;
    connection.timeout = params.timeout;
    let cap = QpCap {
        // A latency test needs two: the answer may come before the acknowledgement.
        max_send_wr: params.depth.max(2),
        max_recv_wr: rx_depth(params),
        max_inline_data: params.inline_bytes,
        ..QpCap::default()
    };
    let plan = Plan { params: &connection, cap, verb: "perf_run" };
    let made = build(control, caller, &plan, ledger).await?;
    let side = |end: &EndPoint| Side { qpn: end.qpn, mr: end.mr.unwrap_or_default() };
    Ok(Pair {
        client: control.link(&params.client).map_err(Failure::Refused)?,
        server: control.link(&params.server).map_err(Failure::Refused)?,
        client_side: side(&made.local),
        server_side: side(&made.remote),
        path_mtu: made.path_mtu,
        rx_depth: rx_depth(params),
    })
}

/// Uses a pair that is connected already; only regions are made.
async fn existing<'c>(
    control: &'c Control,
    params: &PerfRunParams,
    qpn: u32,
    ledger: &mut Ledger<'c>,
) -> Result<Pair<'c>, Failure> {
    let client = control.link(&params.client).map_err(Failure::Refused)?;
    let server = control.link(&params.server).map_err(Failure::Refused)?;
    let ours = query(client, Qpn::new(qpn)).await.map_err(Failure::Refused)?;
    let Some(rtr) = ours.rtr else { return Err(Failure::Refused(not_connected(client, &ours))) };
    let theirs = query(server, rtr.dest_qpn).await.map_err(Failure::Refused)?;
    let back = theirs.rtr.map(|rtr| rtr.dest_qpn);
    if back != Some(ours.qpn) || theirs.state != QpState::Rts {
        return Err(Failure::Refused(not_connected(server, &theirs)));
    }
    if ours.state != QpState::Rts {
        return Err(Failure::Refused(not_connected(client, &ours)));
    }
    let bytes = spec(params, PerfRole::Client, ours.qpn, &MrResult::default(), None).region_bytes();
    let client_mr = region(ledger, client, ours.pd, bytes).await?;
    let server_mr = region(ledger, server, theirs.pd, bytes).await?;
    Ok(Pair {
        client,
        server,
        client_side: Side { qpn: ours.qpn, mr: client_mr },
        server_side: Side { qpn: theirs.qpn, mr: server_mr },
        path_mtu: rtr.path_mtu,
        rx_depth: rx_depth(params).min(ours.cap.max_recv_wr).min(theirs.cap.max_recv_wr).max(1),
    })
}

fn not_connected(link: &Link, entry: &QpEntry) -> ApiError {
    ApiError::new(
        Code::State,
        "qpn",
        format!("{} of {}, in {}", entry.qpn.get(), link.name(), entry.state.as_str()),
        "a queue pair in RTS whose peer in the other device points back",
    )
    .hint("make one with connect, or leave out qpn")
}

fn rx_depth(params: &PerfRunParams) -> u32 {
    params.depth.saturating_mul(2).clamp(MIN_RX_DEPTH, MAX_DEPTH)
}

fn spec(
    params: &PerfRunParams,
    role: PerfRole,
    qpn: Qpn,
    own: &MrResult,
    peer: Option<&MrResult>,
) -> PerfSpec {
    let mut spec = PerfSpec::new(params.op, params.kind, role, qpn, own.lkey, params.size_bytes);
    spec.remote = peer.map(|mr| RemoteBuffer { addr: mr.iova, rkey: mr.rkey, bytes: mr.bytes });
    spec.iterations = params.iterations;
    spec.warmup = params.warmup;
    spec.depth = params.depth;
    spec.inline_bytes = params.inline_bytes;
    spec.check_data = params.check_data;
    spec.deadline_ms = params.deadline_ms;
    spec
}

async fn start<'c>(
    ledger: &mut Ledger<'c>,
    params: &PerfRunParams,
    pair: &Pair<'c>,
    role: PerfRole,
) -> Result<PerfId, StepError> {
    let (step, link, own, peer) = match role {
        PerfRole::Client => ("start client", pair.client, &pair.client_side, &pair.server_side),
        PerfRole::Server => ("start server", pair.server, &pair.server_side, &pair.client_side),
    };
    let mut spec = spec(params, role, own.qpn, &own.mr, Some(&peer.mr));
    spec.rx_depth = pair.rx_depth;
    match ledger.make(step, link, Command::PerfStart(Box::new(spec))).await? {
        Response::PerfStarted { id } => Ok(id),
        other => Err(StepError::new(step, link, link.unexpected(&other))),
    }
}

async fn ask(link: &Link, id: PerfId) -> Result<PerfReport, StepError> {
    match link.one(Command::PerfStatus { id }).await {
        Ok(Response::Perf(report)) => Ok(*report),
        Ok(other) => Err(StepError::new("ask", link, link.unexpected(&other))),
        Err(error) => Err(StepError::new("ask", link, error)),
    }
}

/// The fault of a measurement that ended badly: the server's where it has one, as the client only sees its effect.
async fn failed(pair: &Pair<'_>, (_, report): (PerfId, PerfReport), server: PerfId) -> StepError {
    match ask(pair.server, server).await {
        Ok(served) if served.state == PerfState::Failed => StepError::new("run", pair.server, fault(served)),
        _ => StepError::new("run", pair.client, fault(report)),
    }
}

fn fault(report: PerfReport) -> ApiError {
    report.error.unwrap_or_else(|| {
        ApiError::new(Code::Internal, "perf", "", format!("ended as {:?} without a reason", report.state))
    })
}

fn late(params: &PerfRunParams, pair: &Pair<'_>, report: &PerfReport) -> StepError {
    let error = ApiError::new(
        Code::Timeout,
        "deadline_ms",
        params.deadline_ms.to_string(),
        format!(
            "{} of {} messages were done, {} of those for warming up",
            report.iterations,
            params.warmup.saturating_add(params.iterations),
            params.warmup
        ),
    )
    .hint("ask for fewer iterations, or a later deadline");
    StepError::new("run", pair.client, error)
}

fn result(params: &PerfRunParams, pair: &Pair<'_>, report: &PerfReport) -> PerfRunResult {
    PerfRunResult {
        op: params.op,
        kind: params.kind,
        size_bytes: params.size_bytes,
        iterations: report.iterations,
        rtt: report.rtt,
        gbytes_per_s: report.gbytes_per_s,
        msgs_per_s: report.msgs_per_s,
        path_mtu: pair.path_mtu.bytes(),
    }
}

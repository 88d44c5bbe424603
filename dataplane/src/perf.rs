//! Performance tests inside the appliance: puts services on workers and watches them.
//!
//! Owns the running and ended tests until control takes them away. Invariant: a running test's queue pair and region
//! stay (destroying them says busy), and no queue pair has two tests. Called by the command handlers and by
//! housekeeping. Never polls a queue itself.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use ferroce_api::appliance::{
    Lkey, Percentiles, PerfId, PerfKind, PerfOp, PerfReport, PerfRole, PerfSpec, PerfState,
};
use ferroce_api::{ApiError, Code};
use ferroce_engine::{Engine, ServiceId, SoftDevice};
use ferroce_services::perf::{self as service, PerfEndpoints, PerfHandle, PerfMemory, PerfQp, PerfService};
use ferroce_services::{AnyService, LatencySummary, Role, State};
use ferroce_verbs::{CqId, Device, QpInfo, QpState, Qpn, RemoteAddr, Rkey};

use crate::ctl::convert;
use crate::objects::{Mr, Objects};

/// Tests that an appliance keeps, running and ended.
const MAX_TESTS: usize = 64;
/// Longest deadline.
const MAX_DEADLINE_MS: u32 = 600_000;
/// Longest measured time.
const MAX_DURATION_MS: u32 = 3_600_000;
/// How long a stop waits for the last acknowledgement.
const LAST_WAIT: Duration = Duration::from_millis(200);
/// How long a stop waits for the worker.
const STOP_WAIT: Duration = Duration::from_millis(500);

/// A test.
struct Test {
    handle: PerfHandle,
    /// The service on its worker, until it was taken off.
    service: Option<ServiceId>,
    qpn: Qpn,
    lkey: Lkey,
    started: Instant,
    /// Messages in all, where the test ends by itself after them.
    total: Option<u64>,
    stopped: bool,
}

/// All tests of the appliance.
#[derive(Default)]
pub struct Tests {
    last: u64,
    tests: BTreeMap<PerfId, Test>,
    /// Ended ones that nobody was told of yet.
    untold: Vec<PerfId>,
}

impl Tests {
    /// Starts one.
    ///
    /// # Errors
    /// A value out of its range, an object that does not exist or does not suit, no place.
    pub fn start(
        &mut self,
        spec: &PerfSpec,
        objects: &Objects,
        device: &SoftDevice,
        engine: &Engine<AnyService>,
    ) -> Result<PerfId, ApiError> {
        if self.tests.len() >= MAX_TESTS {
            let error = ApiError::new(Code::Exhausted, "perf tests", "one more", format!("{MAX_TESTS}"));
            return Err(error.hint("stop ended ones"));
        }
        let local = to_service(spec)?;
        local.check().map_err(spec_error)?;
        let qp = objects
            .qps
            .get(&spec.qpn)
            .ok_or_else(|| missing("qpn", &ferroce_api::ids::qpn_text(spec.qpn)))?;
        let mr =
            objects.mrs.get(&spec.lkey).ok_or_else(|| missing("lkey", &format!("{:#010x}", spec.lkey.0)))?;
        if let Some(id) = self.user_of_qp(spec.qpn) {
            return Err(busy("qpn", &ferroce_api::ids::qpn_text(spec.qpn), id));
        }
        let info = device.query_qp(spec.qpn).map_err(convert::error)?;
        check_queue_pair(&local, &info)?;
        check_region(&local, mr, qp.pd)?;
        check_completion_queues(&local, objects, qp)?;
        let (remote_addr, remote_rkey) = check_remote(spec, &local)?;
        let passive = local.is_passive();
        let memory = PerfMemory::prepare(&local, mr.block.clone()).map_err(spec_error)?;
        let endpoints = PerfEndpoints {
            qps: vec![PerfQp { qpn: spec.qpn, remote_addr, remote_rkey, datagram: None }],
            send_cq: CqId(qp.send_cq.0),
            recv_cq: CqId(qp.recv_cq.0),
            local: memory,
            local_lkey: ferroce_verbs::Lkey(spec.lkey.0),
            local_iova: mr.iova,
        };
        let (service, handle) = PerfService::new(local, endpoints).map_err(spec_error)?;
        let service = engine.add_service(info.worker, service.into()).map_err(convert::error)?;
        self.last += 1;
        let id = PerfId(self.last);
        let test = Test {
            handle,
            service: Some(service),
            qpn: spec.qpn,
            lkey: spec.lkey,
            started: Instant::now(),
            total: (spec.duration_ms.is_none() && !passive)
                .then(|| spec.iterations.saturating_add(spec.warmup)),
            stopped: false,
        };
        self.tests.insert(id, test);
        Ok(id)
    }

    /// How far one is.
    pub fn status(&self, id: PerfId, device: &SoftDevice) -> Result<PerfReport, ApiError> {
        let test = self.tests.get(&id).ok_or_else(|| missing("perf test", &id.0.to_string()))?;
        Ok(report(id, test, device))
    }

    /// Stops one, takes it off its worker and forgets it.
    ///
    /// # Errors
    /// [`Code::Timeout`] when the worker does not come round in time; the test is then kept.
    pub fn stop(
        &mut self,
        id: PerfId,
        device: &SoftDevice,
        engine: &Engine<AnyService>,
    ) -> Result<PerfReport, ApiError> {
        let test = self.tests.get_mut(&id).ok_or_else(|| missing("perf test", &id.0.to_string()))?;
        await_last_completions(test, device);
        if test.handle.state().is_running() {
            test.stopped = true;
            test.handle.stop();
            await_end(test, device)?;
        }
        if remove_service(test, engine) {
            self.untold.push(id);
        }
        let report = report(id, test, device);
        self.tests.remove(&id);
        Ok(report)
    }

    /// Asks all of them to end: the appliance stops.
    pub fn stop_all(&mut self) {
        self.tests.values_mut().for_each(|test| test.handle.stop());
    }

    /// Takes ended ones off their workers; tells which have ended since the last call.
    pub fn sweep(&mut self, engine: &Engine<AnyService>) -> Vec<PerfId> {
        for (id, test) in &mut self.tests {
            if !test.handle.state().is_running() && remove_service(test, engine) {
                self.untold.push(*id);
            }
        }
        std::mem::take(&mut self.untold)
    }

    /// How many run.
    pub fn running(&self) -> usize {
        self.tests.values().filter(|test| test.handle.state().is_running()).count()
    }

    /// The running test of a queue pair.
    pub fn user_of_qp(&self, qpn: Qpn) -> Option<PerfId> {
        self.user(|test| test.qpn == qpn)
    }

    /// All tests of a region, running and ended.
    pub fn all_on(&self, lkey: Lkey) -> Vec<PerfId> {
        self.tests.iter().filter(|(_, test)| test.lkey == lkey).map(|(id, _)| *id).collect()
    }

    /// The running test of a region.
    pub fn user_of_mr(&self, lkey: Lkey) -> Option<PerfId> {
        self.user(|test| test.lkey == lkey)
    }

    fn user(&self, uses: impl Fn(&Test) -> bool) -> Option<PerfId> {
        let mut running = self.tests.iter().filter(|(_, test)| test.handle.state().is_running());
        running.find(|(_, test)| uses(test)).map(|(id, _)| *id)
    }
}

/// A refusal because a running test needs the object.
pub fn busy(attribute: &str, asked: &str, id: PerfId) -> ApiError {
    ApiError::new(Code::Busy, attribute, asked, format!("one without a running test; test {} uses it", id.0))
        .hint("stop the test first")
}

fn missing(attribute: &str, asked: &str) -> ApiError {
    ApiError::new(Code::NotFound, attribute, asked, "one that exists")
}

fn spec_error(error: service::SpecError) -> ApiError {
    ApiError::new(Code::Invalid, error.attribute, error.asked.to_string(), error.allowed)
}

/// A test that has moved its last message only waits for the acknowledgement of it: gives it the time to end by
/// itself, so that nothing of it stays in flight and spoils the queue pair for the next one.
fn await_last_completions(test: &Test, device: &SoftDevice) {
    let until = Instant::now() + LAST_WAIT;
    while let State::Running { done } = test.handle.state()
        && test.total.is_some_and(|total| done >= total)
        && Instant::now() < until
        && device.query_qp(test.qpn).is_ok()
    {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until the worker has seen the stop.
fn await_end(test: &Test, device: &SoftDevice) -> Result<(), ApiError> {
    let until = Instant::now() + STOP_WAIT;
    while test.handle.state().is_running() {
        // A question wakes a worker that sleeps, and it polls its services in the same pass.
        let asked = device.query_qp(test.qpn);
        if !test.handle.state().is_running() {
            break;
        }
        asked.map_err(convert::error)?;
        if Instant::now() >= until {
            let allowed = format!("{} ms for its worker to end it", STOP_WAIT.as_millis());
            return Err(ApiError::new(Code::Timeout, "perf test", "to stop", allowed).hint("ask again"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Takes an ended service off its worker; false if that was done before.
fn remove_service(test: &mut Test, engine: &Engine<AnyService>) -> bool {
    let Some(service) = test.service.take() else { return false };
    if let Err(error) = engine.remove_service(service) {
        tracing::warn!(%error, "an ended test stays on its worker");
    }
    true
}

fn to_service(spec: &PerfSpec) -> Result<service::PerfSpec, ApiError> {
    if spec.deadline_ms == 0 || spec.deadline_ms > MAX_DEADLINE_MS {
        let (asked, allowed) = (spec.deadline_ms.to_string(), format!("1 to {MAX_DEADLINE_MS}"));
        return Err(ApiError::new(Code::Invalid, "deadline_ms", asked, allowed));
    }
    if let Some(duration_ms) = spec.duration_ms
        && (duration_ms == 0 || duration_ms > MAX_DURATION_MS)
    {
        let allowed = format!("1 to {MAX_DURATION_MS}");
        return Err(ApiError::new(Code::Invalid, "duration_ms", duration_ms.to_string(), allowed));
    }
    let op = match spec.op {
        PerfOp::Send => service::PerfOp::Send,
        PerfOp::Write => service::PerfOp::Write,
        PerfOp::Read => service::PerfOp::Read,
    };
    let mode = match spec.kind {
        PerfKind::Lat => service::PerfMode::Lat,
        PerfKind::Bw => service::PerfMode::Bw,
    };
    let role = match spec.role {
        PerfRole::Client => Role::Client,
        PerfRole::Server => Role::Server,
    };
    let mut out = service::PerfSpec::new(op, mode, role, spec.size_bytes);
    out.iters = spec.iterations;
    out.warmup = spec.warmup;
    out.duration_ns = spec.duration_ms.map(|ms| u64::from(ms) * 1_000_000);
    // A latency test has one message outstanding; the depth is for bandwidth.
    out.tx_depth = if spec.kind == PerfKind::Lat { out.tx_depth } else { spec.depth };
    out.rx_depth = spec.rx_depth;
    // The larger a message, the more it matters to know of each.
    out.cq_mod = spec.cq_mod.min(out.cq_mod);
    out.inline_bytes = spec.inline_bytes;
    out.check_data = spec.check_data;
    out.progress_deadline_ns = u64::from(spec.deadline_ms) * 1_000_000;
    Ok(out)
}

fn check_queue_pair(spec: &service::PerfSpec, info: &QpInfo) -> Result<(), ApiError> {
    if info.state != QpState::Rts {
        let found = convert::state(info.state).as_str();
        let error = ApiError::new(Code::State, "qp_state", found, "RTS");
        return Err(error.hint("connect the queue pair first: INIT, RTR, RTS"));
    }
    let least = |attribute: &str, have: u32, need: u32| {
        if have >= need {
            return Ok(());
        }
        Err(ApiError::new(
            Code::Invalid,
            attribute,
            format!("a queue pair with {have}"),
            format!("at least {need}"),
        )
        .hint("make the queue pair larger, or the test's depths smaller"))
    };
    least("cap.max_send_wr", info.cap.max_send_wr, spec.send_queue_depth())?;
    if spec.op == service::PerfOp::Send {
        least("cap.max_recv_wr", info.cap.max_recv_wr, spec.recv_queue_depth())?;
    }
    least("cap.max_inline_data", info.cap.max_inline_data, if spec.is_inline() { spec.size } else { 0 })
}

fn check_region(
    spec: &service::PerfSpec,
    mr: &Mr,
    pd: ferroce_api::appliance::PdHandle,
) -> Result<(), ApiError> {
    if mr.pd != pd {
        let (asked, allowed) =
            (format!("a region of pd {:#x}", mr.pd.0), format!("one of the queue pair's pd {:#x}", pd.0));
        return Err(ApiError::new(Code::Invalid, "lkey", asked, allowed));
    }
    if !mr.access.local_write {
        return Err(ApiError::new(
            Code::Invalid,
            "access",
            "a region without local_write",
            "one with local_write",
        ));
    }
    let (have, need) = (mr.block.len() as u64, spec.memory_bytes());
    if have < need {
        let asked = format!("a region of {have} bytes");
        return Err(ApiError::new(
            Code::Invalid,
            "bytes",
            asked,
            format!("at least {need} bytes for this test"),
        ));
    }
    Ok(())
}

fn check_completion_queues(
    spec: &service::PerfSpec,
    objects: &Objects,
    qp: &crate::objects::Qp,
) -> Result<(), ApiError> {
    let receives = if spec.op == service::PerfOp::Send { spec.recv_queue_depth() } else { 0 };
    let both = if qp.send_cq == qp.recv_cq { receives } else { 0 };
    let needs = [(qp.send_cq, spec.send_queue_depth().saturating_add(both)), (qp.recv_cq, receives)];
    for (cq, need) in needs {
        let have = objects.cqs.get(&cq).map_or(0, |cq| cq.cqe);
        if have < need {
            let asked = format!("cq {:#010x} with {have} entries", cq.0);
            return Err(ApiError::new(Code::Invalid, "cqe", asked, format!("at least {need}")));
        }
    }
    Ok(())
}

fn check_remote(spec: &PerfSpec, local: &service::PerfSpec) -> Result<(RemoteAddr, Rkey), ApiError> {
    // Reads and writes need the peer's memory on the side that issues them; a latency test of writes does on both.
    let issues = match (spec.op, spec.kind, spec.role) {
        (PerfOp::Send, ..) => false,
        (PerfOp::Write, PerfKind::Lat, _) | (_, _, PerfRole::Client) => true,
        (PerfOp::Write, PerfKind::Bw, PerfRole::Server) | (PerfOp::Read, _, PerfRole::Server) => false,
    };
    let Some(remote) = spec.remote else {
        if issues {
            return Err(ApiError::new(
                Code::Invalid,
                "remote",
                "none",
                "the peer's region for a write or read",
            ));
        }
        return Ok((RemoteAddr(0), Rkey(0)));
    };
    if issues && remote.bytes < local.memory_bytes() {
        let asked = format!("{} bytes", remote.bytes);
        return Err(ApiError::new(
            Code::Invalid,
            "remote.bytes",
            asked,
            format!("at least {} bytes", local.memory_bytes()),
        ));
    }
    Ok((RemoteAddr(remote.addr), remote.rkey))
}

fn report(id: PerfId, test: &Test, device: &SoftDevice) -> PerfReport {
    let mut out = PerfReport {
        id,
        state: PerfState::Running,
        error: None,
        iterations: 0,
        bytes: 0,
        elapsed_ns: 0,
        rtt: None,
        gbytes_per_s: 0.0,
        peak_gbytes_per_s: None,
        msgs_per_s: 0.0,
    };
    match test.handle.state() {
        State::Running { done } => {
            out.iterations = done;
            out.elapsed_ns = u64::try_from(test.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        }
        State::Done(result) => {
            out.state = if test.stopped && result.stopped { PerfState::Stopped } else { PerfState::Done };
            out.iterations = result.messages;
            out.bytes = result.bytes;
            out.elapsed_ns = result.elapsed_ns;
            out.rtt = result.rtt.as_ref().map(percentiles);
            out.gbytes_per_s = result.gbytes_per_s;
            out.peak_gbytes_per_s = result.peak_gbytes_per_s;
            out.msgs_per_s = result.msgs_per_s;
        }
        State::Failed(error) => {
            out.state = PerfState::Failed;
            out.iterations = error.done;
            let code = if matches!(error.fault, ferroce_services::Fault::Stalled { .. }) {
                Code::Timeout
            } else {
                Code::State
            };
            let asked = ferroce_api::ids::qpn_text(error.qpn);
            let mut told = format!("a test that goes on: after {} messages {}", error.done, error.fault);
            told.push_str(&position(error.qpn, device));
            out.error = Some(convert::bounded(ApiError::new(code, "perf test on qpn", asked, told)));
        }
    }
    out
}

/// Whom the queue pair talks to and where it stands: what is needed to find a peer that stopped answering. Empty when
/// the queue pair is gone or was never connected.
fn position(qpn: Qpn, device: &SoftDevice) -> String {
    let Ok(info) = device.query_qp(qpn) else { return String::new() };
    let Some(rtr) = info.rtr else { return String::new() };
    format!(
        "; peer {} qpn {:#08x}, last PSN sent {:#08x}, oldest not acknowledged {:#08x}, expected from the peer {:#08x}",
        rtr.av.dgid.to_ip(),
        rtr.dest_qpn.get(),
        info.sq_psn.retreat(1).get(),
        info.una_psn.get(),
        info.rq_psn.get()
    )
}

fn percentiles(summary: &LatencySummary) -> Percentiles {
    Percentiles {
        samples: summary.samples,
        min_ns: summary.min_ns,
        p50_ns: summary.p50_ns,
        p90_ns: summary.p90_ns,
        p99_ns: summary.p99_ns,
        p999_ns: summary.p999_ns,
        p9999_ns: summary.p9999_ns,
        max_ns: summary.max_ns,
        mean_ns: summary.mean_ns,
        stdev_ns: summary.stdev_ns,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rule that control sizes regions by is never smaller than what the service wants.
    #[test]
    fn regions_sized_by_the_api_are_large_enough() {
        for op in [PerfOp::Send, PerfOp::Write, PerfOp::Read] {
            for kind in [PerfKind::Lat, PerfKind::Bw] {
                for size in [0, 1, 64, 1000, 4096, 1 << 20, 3 << 20, 5 << 20, 64 << 20] {
                    for check_data in [false, true] {
                        for depth in [1, 2, 128, 4096] {
                            let mut spec =
                                PerfSpec::new(op, kind, PerfRole::Server, Qpn::new(17), Lkey(1), size);
                            (spec.check_data, spec.depth, spec.rx_depth) = (check_data, depth, depth);
                            let need = to_service(&spec).unwrap().memory_bytes();
                            assert!(spec.region_bytes() >= need, "{spec:?}: {need}");
                        }
                    }
                }
            }
        }
    }
}

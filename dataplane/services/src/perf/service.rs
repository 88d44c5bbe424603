//! The perf state machine: what happens in one pass, when a test is over, what it reports. Posting is in `post`, what
//! comes back in `arrive`, comparing in `verify`.

use ferroce_verbs::{Qpn, Queues, Service, Wc, WcStatus};

use super::lanes::Lanes;
use super::layout::{Layout, PerfLayout};
use super::measure::{Mark, Measure};
use super::pace::Pace;
use super::report::PerfTotals;
use super::verify::Verify;
use super::{PerfEndpoints, PerfHandle, PerfMode, PerfOp, PerfReport, PerfSpec, Role, SpecError};
use crate::clock;
use crate::cq::BATCH;
use crate::fault::{Fault, ServiceError};
use crate::handle::Progress;
use crate::latency::LatencyRecorder;
use crate::pattern;
use crate::rate::RateWindow;

/// How long a test whose duration is over waits for what is still under way: the peer's may be over too, and nobody
/// answers any more.
const GRACE_NS: u64 = 200_000_000;

/// Most passes that a test goes on taking what has come, once it is to stop.
const STOP_PASSES: u32 = 1000;

/// A running test. Invariants: those of [`Lanes`]; without an open loop at most one message of a latency client is
/// unanswered.
pub struct PerfService {
    pub(super) spec: PerfSpec,
    pub(super) layout: Layout,
    pub(super) ends: PerfEndpoints,
    pub(super) progress: Progress<PerfReport>,
    pub(super) batch: Box<[Wc]>,
    pub(super) inline: Box<[u8]>,
    pub(super) lanes: Lanes,
    /// Window, list and moderation of a queue pair, worked out once.
    pub(super) depth: u64,
    pub(super) list: u64,
    pub(super) every: u64,
    pub(super) recv_depth: u64,
    /// Messages of one queue pair and of all; `u64::MAX` with a duration.
    pub(super) total: u64,
    pub(super) total_all: u64,
    /// The warm-up is not over.
    pub(super) warming: bool,
    /// A duration is over: so many sends there will have been.
    pub(super) closed: Option<u64>,
    /// The first receives: the lane whose turn it is; beyond the last one, they are posted and the peer may start.
    pub(super) recv_lane: usize,
    /// When the unanswered message of a closed loop was posted.
    pub(super) asked_at_ns: Option<u64>,
    /// Events told when the completion queues were armed; polling waits for one more.
    pub(super) armed: Option<u64>,
    pub(super) pace: Option<Pace>,
    pub(super) measure: Measure,
    pub(super) samples: Option<LatencyRecorder>,
    pub(super) verify: Verify,
    /// Whose fault a failure is.
    pub(super) culprit: Option<Qpn>,
    rate: RateWindow,
    /// The last thing that happened, and the last that resets the deadline.
    ended_ns: u64,
    progress_ns: Option<u64>,
    /// Passes since a stop was asked for.
    stop_passes: u32,
    /// The test is over, on request or not; what can be compared afterwards still is.
    ending: Option<bool>,
}

impl PerfService {
    /// A service on connected endpoints, and what its host watches it with.
    ///
    /// # Errors
    /// The specification is refused, the endpoints do not suit it, or their memory was prepared for a smaller one.
    pub fn new(spec: PerfSpec, endpoints: PerfEndpoints) -> Result<(Self, PerfHandle), SpecError> {
        endpoints.local.check_size(&spec)?;
        check_queue_pairs(&spec, &endpoints)?;
        let (progress, handle) = Progress::new();
        let layout = spec.layout();
        let inline = inline_data(&spec, &layout, &endpoints)?;
        let samples =
            measures_trips(&spec).then(|| LatencyRecorder::new().keeping(spec.keep_samples as usize));
        let span = (u64::from(spec.tx_depth) * 4).max(512);
        let total = if spec.duration_ns.is_some() { u64::MAX } else { spec.warmup + spec.iters };
        let warming = spec.warmup > 0 && spec.requests() && !answers(&spec);
        let service = PerfService {
            lanes: Lanes::new(spec.qps, if warming { spec.warmup } else { total }),
            depth: spec.send_queue_depth().into(),
            list: spec.list().into(),
            every: spec.signal_every().into(),
            recv_depth: spec.recv_queue_depth().into(),
            total,
            total_all: total.saturating_mul(spec.qps.into()),
            warming,
            closed: None,
            recv_lane: if spec.receives() { 0 } else { spec.qps as usize },
            asked_at_ns: None,
            armed: None,
            pace: Pace::of(&spec),
            measure: Measure::of(&spec),
            samples,
            verify: Verify::of(&spec, &layout),
            culprit: None,
            rate: RateWindow::new(span),
            ended_ns: 0,
            progress_ns: None,
            stop_passes: 0,
            ending: None,
            batch: vec![Wc::EMPTY; BATCH].into_boxed_slice(),
            inline,
            layout,
            ends: endpoints,
            progress,
            spec,
        };
        Ok((service, handle))
    }

    /// Messages done, warm-up included.
    pub(super) fn done(&self) -> u64 {
        match (self.spec.mode, self.spec.op) {
            (PerfMode::Lat, PerfOp::Send | PerfOp::Write) => self.lanes.received,
            _ if self.spec.requests() => self.lanes.completed,
            _ => self.lanes.received,
        }
    }

    fn warmup_all(&self) -> u64 {
        self.spec.warmup.saturating_mul(self.spec.qps.into())
    }

    /// A server that begins when the first message is there.
    pub(super) fn follows(&self) -> bool {
        self.spec.role == Role::Server && (self.spec.op == PerfOp::Send || !self.spec.requests())
    }

    fn step<Q: Queues>(&mut self, queues: &mut Q, now_ns: u64) -> Result<usize, Fault> {
        let mut work = self.fill_receives(queues)?;
        work += self.take(queues)?;
        self.turn(now_ns);
        work += self.push(queues)?;
        Ok(work)
    }

    /// The measurement starts when the warm-up is over; a duration ends it.
    fn turn(&mut self, now_ns: u64) {
        if self.warming && self.done() >= self.warmup_all() {
            self.warming = false;
            self.lanes.set_end(self.total);
        }
        if !self.measure.is_started() && !self.warming {
            let first = if self.spec.requests() && !answers(&self.spec) {
                let ready = self.recv_lane > self.lanes.count();
                ready && (!self.follows() || self.lanes.received > 0)
            } else {
                self.done() > self.warmup_all()
            };
            if first {
                self.measure.start(now_ns);
            }
        }
        let over = self.measure.tick(now_ns, self.done(), self.lanes.received);
        if over && self.closed.is_none() && self.spec.requests() && !answers(&self.spec) {
            self.closed = Some(self.lanes.close());
            self.progress_ns = Some(now_ns);
            if let Some(pace) = &mut self.pace {
                pace.end();
            }
        }
    }

    /// True when nothing is left to do.
    fn is_complete(&self) -> bool {
        let answered = self.spec.mode == PerfMode::Bw || self.done() == self.lanes.posted;
        if self.spec.duration_ns.is_some() {
            return self.spec.role == Role::Client
                && self.closed.is_some_and(|goal| self.lanes.completed == goal)
                && answered;
        }
        let watches = self.spec.op == PerfOp::Write && self.spec.mode == PerfMode::Lat;
        let comes = self.spec.receives() || watches;
        let asks = self.spec.requests();
        (asks || comes)
            && (!asks || self.lanes.completed == self.total_all)
            && (!comes || self.lanes.received == self.total_all)
    }

    /// Messages that a receiver misses for good; 0 where none can be missing.
    fn lost(&self) -> u64 {
        let counted = self.spec.receives() && self.spec.may_lose() && self.spec.duration_ns.is_none();
        if counted { self.total_all - self.lanes.received } else { 0 }
    }

    /// The end of the peer, not a failure of ours: an acknowledgement that never comes when all of a latency test's messages
    /// are here, as perftest's programs leave as soon as they have what they waited for; and what is still under way when
    /// a duration is over, which they don't look at any more.
    fn is_farewell(&self, fault: &Fault) -> bool {
        let gone = matches!(
            *fault,
            Fault::Completion {
                status: WcStatus::RetryExcErr | WcStatus::RnrRetryExcErr | WcStatus::WrFlushErr,
                ..
            }
        );
        let all_here = self.spec.mode == PerfMode::Lat
            && matches!(self.spec.op, PerfOp::Send | PerfOp::Write)
            && self.lanes.received == self.total_all
            && self.lanes.posted == self.total_all;
        gone && (all_here || self.closed.is_some())
    }

    fn finish(&mut self) {
        let stopped = self.ending.unwrap_or(false);
        let last =
            Mark { ns: self.ended_ns, done: self.done(), received: self.lanes.received, ..Mark::default() };
        self.measure.end(last);
        let (from, to) = self.measure.span().unwrap_or_default();
        // Without margins all messages but those of the warm-up count, also those seen in the pass that started the clock.
        let count = |from: u64, to: u64, all: u64| {
            if self.spec.margin_ns > 0 {
                to.saturating_sub(from)
            } else {
                all.saturating_sub(self.warmup_all())
            }
        };
        let messages = count(from.done, to.done, self.done());
        let received = count(from.received, to.received, self.lanes.received);
        let totals = PerfTotals {
            messages,
            received: if self.spec.receives() { received } else { 0 },
            lost: self.lost(),
            unfinished: self.lanes.posted - self.lanes.completed,
            receives_left: self.lanes.recv_posted.saturating_sub(self.lanes.received),
            elapsed_ns: to.ns.saturating_sub(from.ns),
            cpu_ns: self.measure.cpu_ns(),
            peak_msgs_per_s: if self.spec.mode == PerfMode::Bw { self.rate.best() } else { None },
            stopped,
        };
        self.progress.set_done(self.done());
        self.progress.finish(Ok(PerfReport::new(self.spec, totals, self.samples.take())));
    }

    fn fail(&mut self, fault: Fault) {
        let first = self.ends.qps.first().map_or(Qpn::new(0), |qp| qp.qpn);
        let waiting = self.lanes.waiting().and_then(|lane| self.ends.qps.get(lane)).map(|qp| qp.qpn);
        let qpn = self.culprit.or(waiting).unwrap_or(first);
        self.progress.finish(Err(ServiceError { fault, qpn, done: self.done() }));
    }

    /// After a pass: what it did, whether that was all, whether nothing happens any more.
    fn after_step(&mut self, work: usize, now_ns: u64) {
        if work > 0 {
            self.ended_ns = now_ns;
            self.progress.set_done(self.done());
            if self.spec.mode == PerfMode::Bw && self.measure.is_open() {
                self.rate.mark(now_ns, self.done());
            }
        }
        if self.is_complete() {
            self.ending = Some(false);
            return;
        }
        let waits = self.pace.as_ref().is_some_and(Pace::waits) && self.lanes.completed == self.lanes.posted;
        if work > 0 || waits {
            self.progress_ns = Some(now_ns);
        }
        let waited_ns = now_ns.saturating_sub(*self.progress_ns.get_or_insert(now_ns));
        if self.closed.is_some() && self.spec.role == Role::Client && waited_ns > GRACE_NS {
            self.ending = Some(false);
            return;
        }
        let deadline = self.spec.progress_deadline_ns;
        if deadline == 0 || waited_ns <= deadline || self.spec.is_passive() {
            return;
        }
        let only_misses = self.lanes.completed == self.lanes.posted && self.lanes.received > 0;
        match (self.spec.may_lose(), self.spec.mode) {
            (true, PerfMode::Bw) if only_misses => self.ending = Some(false),
            (true, PerfMode::Lat) => self.fail(Fault::Unanswered { message: self.done(), waited_ns }),
            _ => self.fail(Fault::Stalled { waited_ns }),
        }
    }

    /// A stop is asked for: what has arrived by now counts; that the peer left in the meantime does not.
    fn stop<Q: Queues>(&mut self, queues: &mut Q, now_ns: u64) {
        match self.take(queues) {
            Ok(0) | Err(Fault::Completion { .. }) => self.ending = Some(true),
            Ok(_) => {
                self.ended_ns = now_ns;
                self.stop_passes += 1;
                // A peer that goes on is not waited for.
                if self.stop_passes >= STOP_PASSES {
                    self.ending = Some(true);
                }
            }
            Err(fault) => self.fail(fault),
        }
    }

    /// One pass of a test that goes on.
    fn go_on<Q: Queues>(&mut self, queues: &mut Q, now_ns: u64) -> usize {
        if self.progress.stop_asked() {
            self.stop(queues, now_ns);
            return 1;
        }
        match self.step(queues, now_ns) {
            Ok(work) => {
                self.after_step(work, now_ns);
                let awake = self.pace.as_ref().is_some_and(|pace| pace.keeps_awake(clock::now_ns()));
                work + usize::from(awake)
            }
            Err(fault) if self.is_farewell(&fault) => {
                self.ending = Some(false);
                1
            }
            Err(fault) => {
                self.fail(fault);
                1
            }
        }
    }
}

/// Who measures round trips: the client, and with perftest whoever posts, for there both sides do.
fn measures_trips(spec: &PerfSpec) -> bool {
    let both = spec.layout == PerfLayout::Perftest && spec.requests();
    spec.mode == PerfMode::Lat && (spec.role == Role::Client || both)
}

/// A latency server that answers: it posts what it received.
pub(super) fn answers(spec: &PerfSpec) -> bool {
    spec.role == Role::Server && spec.mode == PerfMode::Lat && spec.requests()
}

fn check_queue_pairs(spec: &PerfSpec, endpoints: &PerfEndpoints) -> Result<(), SpecError> {
    let have = endpoints.qps.len() as u64;
    if have != u64::from(spec.qps) {
        return Err(SpecError {
            attribute: "queue pairs",
            asked: have,
            allowed: "as many as PerfSpec::qps says",
        });
    }
    let datagrams = spec.connection == ferroce_verbs::QpType::Ud;
    let wrong = endpoints.qps.iter().filter(|qp| qp.datagram.is_some() != datagrams).count();
    if wrong > 0 {
        let allowed = "a destination for each queue pair over UD, none otherwise";
        return Err(SpecError { attribute: "datagram", asked: wrong as u64, allowed });
    }
    Ok(())
}

/// What is posted inline: the data of the first slot.
fn inline_data(spec: &PerfSpec, layout: &Layout, endpoints: &PerfEndpoints) -> Result<Box<[u8]>, SpecError> {
    let mut inline = vec![0; if spec.is_inline() { spec.size as usize } else { 0 }].into_boxed_slice();
    match spec.layout {
        PerfLayout::Ours => pattern::fill(&mut inline, spec.own_seed(), 0, 0),
        PerfLayout::Perftest => {
            endpoints.local.read(layout.outgoing.at(0, 0), &mut inline).map_err(|_| SpecError {
                attribute: "memory",
                asked: endpoints.local.block().len() as u64,
                allowed: "PerfSpec::memory_bytes or more",
            })?;
        }
    }
    Ok(inline)
}

impl<Q: Queues> Service<Q> for PerfService {
    fn poll(&mut self, queues: &mut Q, now_ns: u64) -> usize {
        if self.progress.finished() {
            return 0;
        }
        let work = if self.ending.is_none() { self.go_on(queues, now_ns) } else { 1 };
        if self.ending.is_some() && !self.progress.finished() {
            match self.compare_some() {
                Ok(true) => self.finish(),
                Ok(false) => {}
                Err(fault) => self.fail(fault),
            }
        }
        work
    }

    fn finished(&self) -> bool {
        self.progress.finished()
    }
}

//! One run: a plan, a world, work, checks, and what came of it.

mod connect;
mod drains;
mod endings;
mod probe;
mod retries;

use std::fmt;

use ferroce_transport::{Completion, Instant, Notice};
use ferroce_verbs::{QpModify, QpState, Rkey, WcStatus};
use ferroce_wire::NakCode;

use connect::connect_all;

use crate::checker::{Bytes, Checker, Finished, Violation, ViolationKind};
use crate::plan::{Plan, Scenario};
use crate::plants::Planted;
use crate::rng::Rng;
use crate::workload::{Workload, endpoint_init};
use crate::world::{Happening, QpRef, World, WorldStats};

/// Virtual time that everything may take once the faults stopped.
const PATIENCE_NS: u64 = 20_000_000_000;
/// And this for each request of a direction: a slow receiver takes its time for each.
const PATIENCE_PER_OP_NS: u64 = 10_000_000;
/// Events of one run, and more for each request: far more than any needs, so that a livelock ends too.
const MOST_STEPS: u64 = 2_000_000;
/// See [`MOST_STEPS`].
const STEPS_PER_OP: u64 = 1000;

/// Token of the wake-up at which the faults stop. All of these lie above those of the work.
const HEAL: u64 = 2 << 40;
/// Token of the wake-up at which the peer falls silent.
const SILENCE: u64 = 3 << 40;
/// Tokens of blackouts: this plus their index.
const BLACKOUT: u64 = 4 << 40;
/// Tokens of send queues that go on after a drain: this plus their direction.
const DRAIN: u64 = 5 << 40;
/// Token of the wake-up at which a key is taken away.
const KEY: u64 = 6 << 40;
/// What a token has beside its kind.
const INDEX: u64 = (1 << 40) - 1;

/// What a run that kept every promise did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// Its seed.
    pub seed: u64,
    /// Sends finished.
    pub ops: u64,
    /// The same by kind, at [`crate::checker::OpKind`] as a number.
    pub kinds: [u64; 7],
    /// Moves of queue pairs by their image.
    pub moved: u64,
    /// Queue pairs whose retries ran out.
    pub exhausted: u64,
    /// Messages that sent on what a READ before them brought, behind a fence.
    pub fenced: u64,
    /// Send queues drained.
    pub drained: u64,
    /// Messages on unreliable directions after the faults, all of which arrived.
    pub probes: u64,
    /// A key was taken away while it was in use.
    pub key_taken: bool,
    /// Datagrams to groups received.
    pub multicast: u64,
    /// Messages received by UC and UD.
    pub unreliable: u64,
    /// Bytes of their messages.
    pub bytes: u64,
    /// Virtual time, ns.
    pub virtual_ns: u64,
    /// Events.
    pub steps: u64,
    /// Counters.
    pub stats: WorldStats,
    /// Equal for equal runs.
    pub digest: u64,
}

/// A run that broke a promise.
#[derive(Debug)]
pub struct Failure {
    /// Its plan.
    pub plan: Plan,
    /// What was planted.
    pub planted: Option<Planted>,
    /// What was broken.
    pub violation: Violation,
    /// When, ns after the start.
    pub at_ns: u64,
    /// The last packets, a line each.
    pub trace: String,
    /// State of the queue pairs, a line each.
    pub qps: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "last packets:\n{}{}{:#?}\n", self.trace, self.qps, self.plan)?;
        writeln!(f, "seed {} at {} ns: {}", self.plan.seed, self.at_ns, self.violation)?;
        write!(f, "repeat with: ferroce-sim --seed {} --verbose", self.plan.seed)?;
        if let Some(planted) = self.planted {
            write!(f, " --plant {planted:?}")?;
        }
        writeln!(f, " --messages {}", self.plan.messages)
    }
}

impl std::error::Error for Failure {}

impl Bytes for World {
    fn read(&self, endpoint: usize, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory(endpoint).read(offset, &mut bytes);
        bytes
    }
    fn is_bound(&self, endpoint: usize, rkey: Rkey) -> bool {
        self.window(endpoint, rkey).is_some_and(|info| info.rkey == rkey && info.bound.is_some())
    }
}

/// The run of a seed. `verbose` prints every packet to stderr.
pub fn run(seed: u64, verbose: bool) -> Result<Report, Box<Failure>> {
    run_plan(&Plan::from_seed(seed), None, verbose)
}

/// The run of a plan, with a fault planted in the world if asked.
pub fn run_plan(plan: &Plan, planted: Option<Planted>, verbose: bool) -> Result<Report, Box<Failure>> {
    let mut run = match Run::new(plan, planted, verbose) {
        Ok(run) => run,
        Err(error) => {
            let violation =
                Violation { kind: ViolationKind::Stuck, what: format!("the world can't be made: {error:#}") };
            let (trace, qps) = (String::new(), String::new());
            return Err(Box::new(Failure { plan: plan.clone(), planted, violation, at_ns: 0, trace, qps }));
        }
    };
    match run.whole() {
        Ok(()) => Ok(Report {
            seed: plan.seed,
            ops: run.work.done,
            kinds: run.work.kinds,
            bytes: run.work.bytes,
            unreliable: run.checker.unreliable,
            multicast: run.checker.multicast,
            fenced: run.work.fenced,
            drained: run.drained,
            probes: run.probes,
            key_taken: run.work.taken_key.is_some(),
            moved: run.world.moved,
            exhausted: run.exhausted.len() as u64,
            virtual_ns: run.world.now().since(run.start),
            steps: run.steps,
            stats: run.world.stats(),
            digest: run.world.trace().digest(),
        }),
        Err(violation) => Err(Box::new(Failure {
            plan: plan.clone(),
            planted,
            violation,
            at_ns: run.world.now().since(run.start),
            trace: run.world.trace().to_string(),
            qps: run
                .qps
                .iter()
                .flatten()
                .map(|at| format!("{at:?}: {:?}\n", run.world.qp(*at).info()))
                .collect(),
        })),
    }
}

struct Run<'p> {
    plan: &'p Plan,
    world: World,
    checker: Checker,
    work: Workload,
    qps: Vec<[QpRef; 2]>,
    start: Instant,
    steps: u64,
    happened: Vec<Happening>,
    /// Fatal notices so far.
    fatal: Vec<QpRef>,
    /// Queue pairs whose retries ran out, though no peer is silent.
    exhausted: Vec<QpRef>,
    /// Queue pairs in error that were told of their last receive.
    last_told: Vec<QpRef>,
    /// Chance of drains; directions whose send queue is in SQD, and is told to be drained; drains so far.
    drains: Rng,
    draining: Vec<bool>,
    rested: Vec<bool>,
    drained: u64,
    /// Messages on unreliable directions after the faults.
    probes: u64,
    /// A key may be taken away.
    key_due: bool,
    /// When the faults stopped.
    healed: Option<Instant>,
    /// Since when the peer is silent.
    silent: Option<Instant>,
}

impl<'p> Run<'p> {
    fn new(plan: &'p Plan, planted: Option<Planted>, verbose: bool) -> anyhow::Result<Run<'p>> {
        let inits: Vec<_> = (0..plan.endpoints).map(|e| endpoint_init(plan, e)).collect();
        let faults = |a: usize, b: usize| plan.faults[a * plan.endpoints + b];
        let mut world = World::new(plan.seed, &inits, plan.cable, faults, verbose)?;
        if let Some(planted) = planted {
            world.plant(planted);
        }
        world.set_moves(plan.moves_ppm);
        let mut rng = Rng::new(plan.seed, 0x44);
        let mut memory = Vec::new();
        for (endpoint, init) in inits.iter().enumerate() {
            let bytes = rng.bytes(init.bytes);
            world.memory(endpoint).write(0, &bytes);
            memory.push(bytes);
        }
        let mut checker = Checker::new(memory);
        let qps = connect_all(plan, &mut world, &mut checker)?;
        let start = world.now();
        let work = Workload::new(plan, &qps, &mut world)?;
        Ok(Run {
            plan,
            world,
            checker,
            work,
            qps,
            start,
            steps: 0,
            happened: Vec::new(),
            fatal: Vec::new(),
            exhausted: Vec::new(),
            last_told: Vec::new(),
            drains: Rng::new(plan.seed, 0x66),
            draining: vec![false; plan.connections.len() * 2],
            rested: vec![false; plan.connections.len() * 2],
            drained: 0,
            probes: 0,
            key_due: false,
            healed: None,
            silent: None,
        })
    }

    fn whole(&mut self) -> Result<(), Violation> {
        self.work.start(&mut self.world, &mut self.checker)?;
        match self.plan.scenario {
            Scenario::Faulty => {
                self.world.wake_at(self.start.after(self.plan.heal_ns), HEAL);
                for (index, (at, _)) in self.plan.blackouts.iter().enumerate() {
                    self.world.wake_at(self.start.after(*at), BLACKOUT + index as u64);
                }
                self.until_all_done()?;
                self.until_rest()?;
                self.probe()?;
                self.flush()?;
                self.all_told()?;
            }
            Scenario::KeyTaken => {
                self.work.flows.iter_mut().for_each(|flow| flow.left = u32::MAX);
                self.world.wake_at(self.start.after(self.plan.silence_ns), KEY);
                self.until_refused()?;
                self.until_rest()?;
                self.flush()?;
                self.all_told()?;
            }
            Scenario::SilentPeer => {
                self.work.flows.iter_mut().for_each(|flow| flow.left = u32::MAX);
                self.world.wake_at(self.start.after(self.plan.silence_ns), SILENCE);
                self.until_both_failed()?;
                self.until_rest()?;
            }
        }
        self.checker.finish(&self.world)
    }

    /// One event and everything that follows from it. False at rest.
    fn step(&mut self) -> Result<bool, Violation> {
        self.steps += 1;
        let most = MOST_STEPS + u64::from(self.plan.ops) * STEPS_PER_OP;
        if self.steps > most {
            return stuck(format!("no end after {most} events"));
        }
        let more = self.world.step(&mut self.happened)?;
        let mut happened = std::mem::take(&mut self.happened);
        for happening in happened.drain(..) {
            match happening {
                Happening::Completion(at, completion) => self.completed(at, &completion)?,
                Happening::Notice(at, notice) => self.notice(at, notice)?,
                Happening::Taken(at) => self.checker.taken(at)?,
                Happening::Limit(endpoint) => {
                    self.checker.limit_told(endpoint)?;
                    self.work.limit_reached(endpoint, &mut self.world);
                }
                Happening::Wake(token) => self.wake(token)?,
            }
        }
        self.checker.limits_are_told()?;
        self.happened = happened;
        // Before the work fills the send queue again.
        self.perhaps_take_key()?;
        self.work.feed(&mut self.world, &mut self.checker)?;
        Ok(more)
    }

    fn completed(&mut self, at: QpRef, completion: &Completion) -> Result<(), Violation> {
        self.judge_retries(at, completion)?;
        self.check_drained(at, completion)?;
        let finished = self.checker.completed(&self.world, at, completion)?;
        if let Finished::Send(flow, record, status) = &finished {
            self.key_is_gone(*flow, record, *status);
            self.perhaps_drain(*flow)?;
        }
        self.work.finished(finished, &mut self.world);
        Ok(())
    }

    fn wake(&mut self, token: u64) -> Result<(), Violation> {
        let index = (token & INDEX) as usize;
        match token & !INDEX {
            HEAL => self.heal(),
            SILENCE => self.fall_silent(),
            BLACKOUT => {
                let (_, length) = self.plan.blackouts[index];
                self.world.cut(0, 1, self.world.now().after(length));
            }
            DRAIN => self.undrain(index)?,
            KEY => self.key_due = true,
            _ => self.work.wake(token, &mut self.world, &mut self.checker)?,
        }
        Ok(())
    }

    fn notice(&mut self, at: QpRef, notice: Notice) -> Result<(), Violation> {
        let wrong = |what: String| Err(Violation { kind: ViolationKind::WrongNotice, what });
        match notice {
            Notice::CommEst => Ok(()),
            Notice::Fatal { status: WcStatus::RetryExcErr, psn, nak: None }
                if self.silent.is_some() || self.exhausted.contains(&at) =>
            {
                if self.fatal.contains(&at) {
                    return wrong(format!("{at:?} failed twice"));
                }
                let last = self.world.last_sent(at);
                if Some(psn) != last {
                    return wrong(format!("{at:?} names {psn:?}, the last one sent was {last:?}"));
                }
                self.fatal.push(at);
                Ok(())
            }
            // The owner of the key that was taken away refuses; the other is told so.
            Notice::Fatal { status: WcStatus::FatalErr, nak: Some(NakCode::RemoteAccess), .. }
            | Notice::Fatal { status: WcStatus::RemAccessErr, nak: None, .. }
                if self.work.taken_key.is_some() && !self.fatal.contains(&at) =>
            {
                self.fatal.push(at);
                Ok(())
            }
            Notice::Drained => self.drained(at),
            Notice::LastWqeReached => self.last_receive(at),
            Notice::Fatal { .. } => wrong(format!("{at:?}: {notice:?}")),
        }
    }

    /// A queue pair in error has no receive of its shared queue any more.
    fn last_receive(&mut self, at: QpRef) -> Result<(), Violation> {
        let flow = self.work.flows.iter().position(|flow| flow.to == at);
        let right = flow
            .is_some_and(|flow| self.work.flows[flow].shared && self.checker.recvs_open(flow) == 0)
            && self.world.qp(at).state() == QpState::Err
            && !self.last_told.contains(&at);
        if right {
            self.last_told.push(at);
            return Ok(());
        }
        let what = format!("{at:?} was told of its last receive: {flow:?}, before {:?}", self.last_told);
        Err(Violation { kind: ViolationKind::WrongNotice, what })
    }

    /// Everybody who is in error was told what has to be told.
    fn all_told(&self) -> Result<(), Violation> {
        let untold = self.exhausted.iter().find(|at| !self.fatal.contains(at)).map(|at| (at, "its failure"));
        let shared = self.work.flows.iter().filter(|flow| flow.shared).map(|flow| &flow.to);
        let last = shared.filter(|at| !self.last_told.contains(at)).map(|at| (at, "its last receive")).next();
        match untold.or(last) {
            Some((at, of)) => {
                let what = format!("{at:?} is in error, and was not told of {of}");
                Err(Violation { kind: ViolationKind::WrongNotice, what })
            }
            None => Ok(()),
        }
    }

    /// A rest while work is open is as bad as no end. A receiver that is slow to post has a wake-up pending.
    fn until_all_done(&mut self) -> Result<(), Violation> {
        let patience = PATIENCE_NS + u64::from(self.plan.ops) * PATIENCE_PER_OP_NS;
        let deadline = self.start.after(self.plan.heal_ns + patience);
        self.work.feed(&mut self.world, &mut self.checker)?;
        while !self.work.is_posted() || (0..self.work.flows.len()).any(|f| self.checker.sends_open(f) > 0) {
            if !self.step()? {
                return stuck(format!("at rest with {}", self.open()));
            }
            if self.world.now() > deadline {
                return stuck(format!(
                    "{} s after the faults stopped: {}",
                    patience / 1_000_000_000,
                    self.open()
                ));
            }
        }
        Ok(())
    }

    /// Nothing to do: timers must stop, and nothing may complete any more.
    fn until_rest(&mut self) -> Result<(), Violation> {
        self.work.stop();
        self.heal();
        let deadline =
            self.world.now().after(PATIENCE_NS).max(self.start.after(self.plan.heal_ns + PATIENCE_NS));
        while self.step()? {
            if self.world.now() > deadline {
                return stuck("all work is done, but there is no rest".to_owned());
            }
        }
        Ok(())
    }

    /// To ERR: receives that nobody filled come back, once and in order.
    fn flush(&mut self) -> Result<(), Violation> {
        for flow in 0..self.work.flows.len() {
            self.checker.may_flush(flow);
            let at = self.work.flows[flow].to;
            if let Err(error) = self.world.modify(at, &QpModify::ToErr) {
                return stuck(error.to_string());
            }
        }
        self.until_rest()
    }

    fn heal(&mut self) {
        self.healed.get_or_insert(self.world.now());
        self.world.heal();
    }

    fn open(&self) -> String {
        let flows = self.work.flows.iter().enumerate();
        let each = flows.map(|(i, work)| {
            let (sends, recvs) = (self.checker.sends_open(i), self.checker.recvs_open(i));
            format!(
                "{:?} to {:?}: {} to post, {sends} sends and {recvs} receives open",
                work.from, work.to, work.left
            )
        });
        each.collect::<Vec<_>>().join("; ")
    }
}

fn stuck<T>(what: String) -> Result<T, Violation> {
    Err(Violation { kind: ViolationKind::Stuck, what })
}

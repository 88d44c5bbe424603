//! One run: a plan, a world, work, checks, and what came of it.

mod retries;

use std::fmt;

use ferroce_mem::Access;
use ferroce_transport::time::{RNR_TIMER_NS, ack_timeout_ns};
use ferroce_transport::{Instant, Notice};
use ferroce_verbs::{
    ClassId, CqId, InitAttrs, Pkey, QpCap, QpInitAttr, QpModify, QpState, QpType, Rkey, RtrAttrs, RtsAttrs,
    WcStatus,
};

use crate::checker::{Bytes, Checker, Mode, Violation, ViolationKind};
use crate::plan::{Connection, Plan, Scenario};
use crate::plants::Planted;
use crate::rng::Rng;
use crate::workload::{QKEY, Workload, endpoint_init};
use crate::world::{Happening, QpRef, World, WorldStats};

/// Virtual time that everything may take once the faults stopped.
const PATIENCE_NS: u64 = 20_000_000_000;
/// And this for each request of a direction: a slow receiver takes its time for each.
const PATIENCE_PER_OP_NS: u64 = 10_000_000;
/// Events of one run, and more for each request: far more than any needs, so that a livelock ends too.
const MOST_STEPS: u64 = 2_000_000;
/// See [`MOST_STEPS`].
const STEPS_PER_OP: u64 = 1000;

/// Token of the wake-up at which the faults stop.
const HEAL: u64 = 2 << 40;
/// Token of the wake-up at which the peer falls silent.
const SILENCE: u64 = 3 << 40;
/// Tokens of blackouts: this plus their index.
const BLACKOUT: u64 = 4 << 40;

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
        let mut qps = Vec::new();
        for connection in &plan.connections {
            let ends = connect(&mut world, connection)?;
            for (from, to) in [(0, 1), (1, 0)] {
                let mode = mode_of(plan, &world, connection, from);
                checker.add_flow(ends[from], ends[to], mode);
            }
            qps.push(ends);
        }
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
                self.flush()?;
                if let Some(at) = self.exhausted.iter().find(|at| !self.fatal.contains(at)) {
                    let what = format!("{at:?}: its retries ran out, and no notice told it");
                    return Err(Violation { kind: ViolationKind::WrongNotice, what });
                }
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
                Happening::Completion(at, completion) => {
                    self.judge_retries(at, &completion)?;
                    let finished = self.checker.completed(&self.world, at, &completion)?;
                    self.work.finished(finished, &mut self.world);
                }
                Happening::Notice(at, notice) => self.notice(at, notice)?,
                Happening::Wake(HEAL) => self.heal(),
                Happening::Wake(SILENCE) => self.fall_silent(),
                Happening::Wake(token) if token >= BLACKOUT => {
                    let (_, length) = self.plan.blackouts[(token - BLACKOUT) as usize];
                    self.world.cut(0, 1, self.world.now().after(length));
                }
                Happening::Wake(token) => self.work.wake(token, &mut self.world, &mut self.checker)?,
            }
        }
        self.happened = happened;
        self.work.feed(&mut self.world, &mut self.checker)?;
        Ok(more)
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
            Notice::Fatal { .. } | Notice::Drained | Notice::LastWqeReached => {
                wrong(format!("{at:?}: {notice:?}"))
            }
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

    fn fall_silent(&mut self) {
        self.silent = Some(self.world.now());
        self.world.cut(0, 1, Instant(u64::MAX));
        for flow in 0..self.work.flows.len() {
            self.checker.may_fail(flow, WcStatus::RetryExcErr);
            self.checker.may_flush(flow);
        }
    }

    fn until_both_failed(&mut self) -> Result<(), Violation> {
        let connection = &self.plan.connections[0];
        let timeout = ack_timeout_ns(connection.timeout).unwrap_or(0);
        // A timeout may be noticed up to four times late (IBTA 9.9.2.1.1), and an RNR wait may come first.
        let rnr = RNR_TIMER_NS[usize::from(connection.rnr_timer)];
        let bound = (u64::from(connection.retry_cnt) + 1) * 4 * timeout + 2 * rnr + 10_000_000;
        self.work.feed(&mut self.world, &mut self.checker)?;
        while self.fatal.len() < 2
            || (0..2).any(|f| self.checker.sends_open(f) + self.checker.recvs_open(f) > 0)
        {
            if !self.step()? {
                return stuck(format!("at rest with {}", self.open()));
            }
            if self.silent.is_some_and(|since| self.world.now().since(since) > bound) {
                return stuck(format!("{bound} ns after the peer fell silent: {}", self.open()));
            }
        }
        // Retries may have been spent before the silence, but hardly half of them.
        let early = u64::from(connection.retry_cnt) * timeout / 2;
        let took = self.silent.map_or(0, |since| self.world.now().since(since));
        if took < early {
            return stuck(format!("gave up after {took} ns, half of the retries take {early} ns"));
        }
        match self.qps[0].iter().find(|at| self.world.qp(**at).state() != QpState::Err) {
            Some(at) => stuck(format!("{at:?} is in {:?}", self.world.qp(*at).state())),
            None => Ok(()),
        }
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

/// What the direction from this end of a connection promises.
fn mode_of(plan: &Plan, world: &World, connection: &Connection, from: usize) -> Mode {
    let [a, b] = [connection.ends[from], connection.ends[1 - from]];
    let faults = plan.faults[a * plan.endpoints + b];
    match connection.service {
        QpType::Rc => Mode::Reliable,
        QpType::Uc => Mode::Whole { ordered: faults.duplicate_ppm == 0 && faults.reorder_ppm == 0 },
        QpType::Ud => {
            let path = world.path(a, b, connection.v6);
            let (gids, from) = ([path.sgid, path.dgid], connection.qpns[from]);
            Mode::Datagrams { once: faults.duplicate_ppm == 0, gids, from }
        }
    }
}

/// Makes a connection's two queue pairs and brings them to RTS.
fn connect(world: &mut World, connection: &Connection) -> anyhow::Result<[QpRef; 2]> {
    let attr = QpInitAttr {
        qp_type: connection.service,
        pd: World::PD,
        send_cq: CqId(0),
        recv_cq: CqId(1),
        cap: QpCap {
            max_send_wr: connection.send_wr,
            max_recv_wr: connection.recv_wr,
            max_send_sge: connection.sges,
            max_recv_sge: connection.sges,
            max_inline_data: connection.inline,
        },
        sq_sig_all: connection.sig_all,
        srq: None,
    };
    let [a, b] = [0, 1].map(|end| world.add_qp(connection.ends[end], connection.qpns[end], &attr));
    for (at, end) in [(a, 0), (b, 1)] {
        let peer = 1 - end;
        let mut av = world.path(connection.ends[end], connection.ends[peer], connection.v6);
        av.vlan = connection.vlan;
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        world.modify(at, &QpModify::ToInit(InitAttrs { pkey: Pkey::DEFAULT, access, qkey: QKEY }))?;
        world.modify(
            at,
            &QpModify::ToRtr(RtrAttrs {
                av,
                class: ClassId(0),
                path_mtu: connection.mtu,
                dest_qpn: connection.qpns[peer],
                rq_psn: connection.psns[peer],
                max_dest_rd_atomic: connection.dest_rd_atomic,
                min_rnr_timer: connection.rnr_timer,
            }),
        )?;
        world.modify(
            at,
            &QpModify::ToRts(RtsAttrs {
                sq_psn: connection.psns[end],
                timeout: connection.timeout,
                retry_cnt: connection.retry_cnt,
                rnr_retry: 7,
                max_rd_atomic: connection.rd_atomic,
            }),
        )?;
    }
    Ok([a, b])
}

//! A session with a program of perftest: the steps of [`super::script`] over one TCP connection, in either role.
//!
//! Owns the exchange of messages and what both sides told each other. Every wait has a deadline and names the step.
//! perftest says little about what it was told: what can be seen to differ is named, and every failure of the exchange
//! tells what this side was told, so that the two command lines can be compared.

use std::fmt;
use std::net::Ipv6Addr;
use std::time::{Duration, Instant};

use ferroce_services::{PerfMode, PerfOp, PerfReport, PerfSpec, Role};
use ferroce_verbs::{Gid, PathMtu, Psn, QpType, Qpn, RemoteAddr, Rkey};

use super::codec::{self, DONE, KEYS_BYTES, Keys, Refused, Report};
use super::script::{Shape, Step};
use crate::fail::{Fail, Outcome};
use crate::net::{Look, Peer, STEP_LIMIT};
use crate::perf::options::{PerfArgs, Test, connection_name};
use crate::perf::plan::{self, Item};
use crate::perf::rdma::{Rdma, ReadsRule};
use crate::perf::report::{Facts, Finding, Teller, units};
use crate::perf::talk::{QpEnd, RdmaEnd};
use crate::perf::wait::Patience;
use crate::watch::Pace;

/// Our cache line, as perftest finds its own.
const LINE_BYTES: u32 = 64;
/// How long a peer that is done may take to leave.
const LEAVE_LIMIT: Duration = Duration::from_secs(2);
/// How long our side may take to end after the peer's.
const END_LIMIT: Duration = Duration::from_secs(2);
/// How long messages may still be under way where none is repeated.
const LAST_ARRIVALS: Duration = Duration::from_millis(300);
/// How long perftest waits for messages that were lost.
const LOST_LIMIT: Duration = Duration::from_secs(75);

/// A session after the versions.
pub struct Session<'s, 'a> {
    args: &'a PerfArgs,
    test: Test,
    role: Role,
    peer: &'s mut Peer,
    rdma: &'s mut Rdma,
    teller: &'s mut Teller<'a>,
    /// One per size.
    items: Vec<Item>,
    own: Vec<Keys>,
    theirs: Vec<Keys>,
    is_serving: bool,
    started: Option<usize>,
    report: Option<PerfReport>,
}

/// What a session stands on.
pub struct Ground<'s, 'a> {
    /// Our options.
    pub args: &'a PerfArgs,
    /// The test, which both sides must be told.
    pub test: Test,
    /// Our side.
    pub role: Role,
    /// The connection.
    pub peer: &'s mut Peer,
    /// What runs the tests.
    pub rdma: &'s mut Rdma,
    /// What prints.
    pub teller: &'s mut Teller<'a>,
}

/// Runs all of it.
pub fn run(ground: Ground<'_, '_>) -> Outcome<()> {
    let Ground { args, test, role, peer, rdma, teller } = ground;
    let mut session = Session {
        args,
        test,
        role,
        peer,
        rdma,
        teller,
        items: Vec::new(),
        own: Vec::new(),
        theirs: Vec::new(),
        is_serving: false,
        started: None,
        report: None,
    };
    let outcome = session.whole();
    let closed = session.rdma.close();
    outcome.and(closed)
}

impl Session<'_, '_> {
    fn whole(&mut self) -> Outcome<()> {
        self.machines()?;
        let first = self.items.first().cloned().ok_or_else(|| Fail::failed("no test"))?;
        let end = self.rdma.open(&first)?;
        self.own = keys_of(&first.spec, &end)?;
        let spec = first.spec;
        let shape = Shape {
            op: spec.op,
            mode: spec.mode,
            role: self.role,
            bidirectional: spec.bidirectional,
            timed: spec.duration_ns.is_some(),
            all: self.args.load.all,
            qps: self.own.len(),
            sizes: self.items.len(),
        };
        for step in shape.script() {
            self.step(step)?;
        }
        Ok(())
    }

    /// Page sizes, cache lines, path MTU; then the tests are known.
    fn machines(&mut self) -> Outcome<()> {
        let page = u32::try_from(rustix::param::page_size()).unwrap_or(4096);
        let theirs = self.exchange(&page.to_be_bytes(), "its page size", STEP_LIMIT)?;
        let cycle = self.understood(codec::cycle_buffer(theirs))?.max(page);
        let theirs = self.exchange(&LINE_BYTES.to_be_bytes(), "its cache line", STEP_LIMIT)?;
        self.understood(codec::cache_line(theirs))?;
        let carries = self.rdma.plane().path_mtu(self.args.path.mtu)?;
        let theirs = self.exchange(&codec::encode_mtu(carries), "its path MTU", STEP_LIMIT)?;
        let mtu = self.understood(codec::decode_mtu(theirs))?.min(carries);
        self.items = self.tests(mtu, cycle)?;
        Ok(())
    }

    fn tests(&self, mtu: PathMtu, cycle: u32) -> Outcome<Vec<Item>> {
        if self.args.load.sweep.is_some() {
            return Err(Fail::usage("--sweep: a program of perftest runs one test, or -a"));
        }
        if self.args.load.warmup.is_some_and(|warmup| warmup > 0) {
            return Err(Fail::usage("--warmup: perftest's programs count every message"));
        }
        let items = plan::items(self.args, self.test, self.role, Some(mtu))?;
        let largest = items.iter().map(|item| item.spec.size).max().unwrap_or(0);
        // Where its pages are larger than ours, it walks over more of our memory.
        let is_written = items.iter().all(|item| item.spec.op != PerfOp::Send);
        let largest = if is_written { largest.max(cycle) } else { largest };
        Ok(items
            .into_iter()
            .map(|item| {
                let mut item = plan::for_perftest(item);
                // In this one test the server writes first.
                if item.spec.op == PerfOp::Write && item.spec.mode == PerfMode::Lat {
                    item.spec.role = match item.spec.role {
                        Role::Client => Role::Server,
                        Role::Server => Role::Client,
                    };
                }
                item.spec.largest = largest;
                item.path.mtu = Some(mtu);
                item
            })
            .collect())
    }

    fn step(&mut self, step: Step) -> Outcome<()> {
        match step {
            Step::Introduce(index) => self.introduce(index),
            Step::Again(index) => self.again(index),
            Step::Connect => self.connect(),
            Step::Prepare(index) => self.prepare(index),
            Step::Run(index) => self.measure(index),
            Step::Serve => self.serve(),
            Step::Report => self.reports(),
            Step::Done => {
                self.peer.send(DONE)?;
                self.peer.wait_for_close(LEAVE_LIMIT);
                Ok(())
            }
            Step::Leave => {
                self.peer.wait_for_close(LEAVE_LIMIT);
                Ok(())
            }
        }
    }

    fn introduce(&mut self, index: usize) -> Outcome<()> {
        let keys = self.swap(index, "its queue pair", STEP_LIMIT)?;
        if let Some(before) = self.theirs.get(index) {
            return if *before == keys { Ok(()) } else { Err(self.another(&keys)) };
        }
        if self.theirs.iter().any(|k| k.qpn == keys.qpn) {
            let (have, told) = (self.theirs.len(), self.own.len());
            return Err(self.hinted(format!("it has {have} queue pairs, this side was told -q {told}")));
        }
        if self.theirs.first().is_some_and(|k| k.gid != keys.gid) {
            return Err(self.hinted(format!("its queue pairs have several GIDs, {} among them", keys.gid)));
        }
        self.theirs.push(keys);
        Ok(())
    }

    fn again(&mut self, index: usize) -> Outcome<()> {
        let limit = match self.items.first() {
            Some(item) if item.spec.may_lose() && self.started.is_some() => LOST_LIMIT,
            _ => STEP_LIMIT,
        };
        let keys = self.swap(index, "its signal", limit)?;
        match self.theirs.get(index) {
            // The PSN and the rest are what counts; the number of READs may be shown differently.
            Some(before) if before.qpn == keys.qpn && before.gid == keys.gid => Ok(()),
            _ => Err(self.another(&keys)),
        }
    }

    fn another(&self, keys: &Keys) -> Fail {
        self.hinted(format!(
            "it told of another queue pair, {:#08x}, where it should repeat one",
            keys.qpn.get()
        ))
    }

    fn connect(&mut self) -> Outcome<()> {
        let first = self.theirs.first().ok_or_else(|| Fail::failed("the peer told of no queue pair"))?;
        let mtu = self.items.first().and_then(|item| item.path.mtu).map_or(1024, PathMtu::bytes);
        let remote = RdmaEnd {
            qps: self
                .theirs
                .iter()
                .map(|k| QpEnd { qpn: k.qpn.get(), psn: k.psn.get(), rkey: k.rkey.0, addr: k.addr.0 })
                .collect(),
            gid: first.gid.to_string(),
            mtu,
            reads: first.out_reads,
        };
        self.rdma.connect(&remote, ReadsRule::TheirsStand)?;
        if let Some(item) = self.items.first().filter(|item| item.spec.is_passive()) {
            self.rdma.start(item.spec)?;
            self.is_serving = true;
        }
        Ok(())
    }

    /// Ready for what the peer sends from the next exchange on.
    fn prepare(&mut self, index: usize) -> Outcome<()> {
        let Some(item) = self.items.get(index).cloned() else { return Ok(()) };
        if index == 0 {
            self.teller.begin(&item);
            let facts = Facts::of_rdma(self.args, &item, self.role, self.peer.name(), self.rdma);
            self.teller.header(&facts);
        }
        if item.spec.is_passive() {
            return Ok(());
        }
        self.rdma.refill(&item.spec)?;
        if item.spec.op == PerfOp::Send && self.role == Role::Server {
            self.rdma.start(item.spec)?;
            self.started = Some(index);
        }
        Ok(())
    }

    fn measure(&mut self, index: usize) -> Outcome<()> {
        let Some(item) = self.items.get(index).cloned() else { return Ok(()) };
        if self.started != Some(index) {
            self.rdma.start(item.spec)?;
            self.started = Some(index);
        }
        let report = self.watch(&item)?;
        self.rdma.finish()?;
        self.report = Some(report.clone());
        // With both directions the row is told when the peer has told its part.
        let waits_for_report = item.spec.bidirectional && !self.is_apart(&item.spec);
        if waits_for_report {
            return Ok(());
        }
        let report = if item.spec.bidirectional { report.both_directions() } else { report };
        let facts = Facts::of_rdma(self.args, &item, self.role, self.peer.name(), self.rdma);
        self.teller.result(&Finding { report, theirs: None }, &facts)
    }

    /// A SEND test by time in both directions has no reports.
    fn is_apart(&self, spec: &PerfSpec) -> bool {
        spec.op == PerfOp::Send && spec.duration_ns.is_some()
    }

    /// Waits for the end of our test.
    fn watch(&mut self, item: &Item) -> Outcome<PerfReport> {
        let (mut pace, mut told, started) = (Pace::new(), None, Instant::now());
        // A side that answers goes on until it is told, by the peer or by its own clock.
        let own_end = match item.spec.duration_ns {
            Some(ns) if self.role == Role::Client && item.spec.role == Role::Server => {
                Some(Duration::from_nanos(ns))
            }
            _ => None,
        };
        let ends_by_peer =
            self.role == Role::Server && (item.spec.duration_ns.is_some() || item.spec.may_lose());
        loop {
            if let Some(result) = self.rdma.poll() {
                return result;
            }
            match (self.peer.look(), told) {
                (Look::Closed, None) => told = Some(Instant::now()),
                (Look::Data, None) if ends_by_peer => told = Some(Instant::now()),
                _ => {}
            }
            if own_end.is_some_and(|end| started.elapsed() >= end) {
                self.rdma.ask_stop();
            }
            if let Some(since) = told {
                self.ending(item, since)?;
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            pace.sleep();
            self.teller.progress(item, self.rdma.done());
        }
    }

    /// The peer is done, or gone: what is under way arrives within a moment or never.
    fn ending(&mut self, item: &Item, since: Instant) -> Outcome<()> {
        let is_gone = self.peer.look() == Look::Closed;
        let waited = since.elapsed();
        let grace = if item.spec.may_lose() { LAST_ARRIVALS } else { Duration::ZERO };
        let is_timed = item.spec.duration_ns.is_some();
        if (!is_gone && waited >= grace) || (is_gone && is_timed) {
            self.rdma.ask_stop();
        }
        if waited < END_LIMIT {
            return Ok(());
        }
        let position = self.rdma.position().map(|p| format!("; {p}")).unwrap_or_default();
        let what =
            if is_gone { "closed the connection during the test" } else { "has finished, this side has not" };
        Err(self.hinted(format!("{what}{position}")))
    }

    /// Lets the peer read and write until it says something.
    fn serve(&mut self) -> Outcome<()> {
        let (mut pace, mut patience) = (Pace::new(), Patience::new());
        loop {
            if let Some(Err(error)) = self.rdma.poll() {
                return Err(error);
            }
            match self.peer.look() {
                Look::Quiet => pace.sleep(),
                Look::Data => break,
                Look::Closed => {
                    let position = self.rdma.position().map(|p| format!("; {p}")).unwrap_or_default();
                    return Err(self.hinted(format!("closed the connection during the test{position}")));
                }
            }
            if let Some(silent) = patience.is_over(self.rdma.frames()) {
                return Err(
                    self.hinted(format!("sent neither a frame nor a word for {} s", silent.as_secs()))
                );
            }
        }
        if std::mem::take(&mut self.is_serving) {
            self.rdma.ask_stop();
            let deadline = Instant::now() + END_LIMIT;
            self.report = loop {
                match self.rdma.poll() {
                    Some(result) => break Some(result?),
                    None if Instant::now() >= deadline => {
                        return Err(Fail::failed("our side of the test did not end in time"));
                    }
                    None => std::thread::sleep(Duration::from_micros(200)),
                }
            };
            self.rdma.finish()?;
            self.tell_silent_end()?;
        }
        Ok(())
    }

    /// In a latency test nobody reports to the side that only served: what it has to tell is told at the end.
    fn tell_silent_end(&mut self) -> Outcome<()> {
        let (Some(item), Some(report)) = (self.items.last().cloned(), self.report.clone()) else {
            return Ok(());
        };
        if item.spec.mode != PerfMode::Lat {
            return Ok(());
        }
        let facts = Facts::of_rdma(self.args, &item, self.role, self.peer.name(), self.rdma);
        self.teller.result(&Finding { report, theirs: None }, &facts)
    }

    /// Five values each way; then the row of a test that both sides measure, or that the other one does.
    fn reports(&mut self) -> Outcome<()> {
        let index = self.started.unwrap_or(self.items.len().saturating_sub(1));
        let Some(item) = self.items.get(index).cloned() else { return Ok(()) };
        let own = match &self.report {
            Some(report) if !item.spec.is_passive() => units::as_original(report, self.args.report.gbits),
            _ => Report::default(),
        };
        let mut theirs = [[0; 8]; 5];
        for (value, into) in own.encode().iter().zip(&mut theirs) {
            *into = self.exchange(value, "its report", STEP_LIMIT)?;
        }
        // A program that only served sends whatever its memory holds.
        let wants_row = item.spec.bidirectional || item.spec.is_passive();
        if !wants_row {
            return Ok(());
        }
        let theirs = self.understood(Report::decode(theirs))?;
        let told = units::measured(&theirs, self.args.report.gbits);
        match &self.report {
            Some(report) => {
                let finding = Finding { report: report.clone(), theirs: Some(told) };
                let facts = Facts::of_rdma(self.args, &item, self.role, self.peer.name(), self.rdma);
                self.teller.result(&finding, &facts)
            }
            None => Ok(()),
        }
    }

    fn swap(&mut self, index: usize, what: &str, limit: Duration) -> Outcome<Keys> {
        let own = self.own.get(index).map(Keys::encode).ok_or_else(|| Fail::failed("no such queue pair"))?;
        let theirs: [u8; KEYS_BYTES] = self.exchange(&own, &format!("{what} {index}"), limit)?;
        self.understood(Keys::decode(&theirs))
    }

    /// The client speaks first.
    fn exchange<const N: usize>(&mut self, own: &[u8; N], what: &str, limit: Duration) -> Outcome<[u8; N]> {
        let mut theirs = [0; N];
        if self.role == Role::Client {
            self.peer.send(own)?;
        }
        if let Err(error) = self.peer.receive_exact(&mut theirs, limit, what) {
            return Err(Fail::failed(format!("{error}{}", self.hint())));
        }
        if self.role == Role::Server {
            self.peer.send(own)?;
        }
        Ok(theirs)
    }

    fn understood<T>(&self, decoded: Result<T, Refused>) -> Outcome<T> {
        decoded.map_err(|refused| self.hinted(format!("sent what this side cannot use: {refused}")))
    }

    fn hinted(&self, what: impl fmt::Display) -> Fail {
        Fail::failed(format!("peer {}: {what}{}", self.peer.name(), self.hint()))
    }

    /// What this side was told, to compare with the peer's command line.
    fn hint(&self) -> String {
        let Some(Item { spec, .. }) = self.items.first() else { return String::new() };
        let count = match spec.duration_ns {
            Some(ns) => format!("-D {}", ns / 1_000_000_000),
            None => format!("-n {}", spec.iters),
        };
        let size = if self.args.load.all { "-a".into() } else { format!("-s {}", spec.size) };
        let both = if spec.bidirectional { " -b" } else { "" };
        format!(
            "; perftest wants the same options on both sides, this one runs ib_{} -c {} -q {} {size} {count}{both}",
            self.test.to_string().replace('-', "_"),
            connection_name(spec.connection),
            spec.qps
        )
    }
}

/// Our queue pairs as perftest tells of them.
fn keys_of(spec: &PerfSpec, end: &RdmaEnd) -> Outcome<Vec<Keys>> {
    let gid: Ipv6Addr =
        end.gid.parse().map_err(|_| Fail::failed(format!("our GID {} is no address", end.gid)))?;
    let asks = spec.op == PerfOp::Read || spec.op.is_atomic();
    let keys = |qp: &QpEnd| Keys {
        lid: 0,
        out_reads: if asks && spec.connection == QpType::Rc { end.reads } else { 1 },
        qpn: Qpn::new(qp.qpn),
        psn: Psn::new(qp.psn),
        rkey: Rkey(qp.rkey),
        addr: RemoteAddr(qp.addr),
        gid: Gid(gid.octets()),
        srqn: 0,
    };
    Ok(end.qps.iter().map(keys).collect())
}

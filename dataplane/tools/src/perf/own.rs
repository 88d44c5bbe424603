//! One session between two of ours: hello, then for each test endpoints, `ready`, the test, `finished` from both.

use std::time::{Duration, Instant};

use ferroce_services::{PerfReport, PerfSpec, Role};

use super::backend::Backend;
use super::options::PerfArgs;
use super::plan::{Ask, Item};
use super::report::{Facts, Finding, Teller};
use super::talk::{self, Endpoint, Hello, Measured, Message};
use super::wait::Patience;
use crate::fail::{Fail, Outcome};
use crate::net::{Look, Peer, STEP_LIMIT};
use crate::watch::Pace;

/// How long a server's test may take to end after the client's.
const END_LIMIT: Duration = Duration::from_secs(2);
/// How long messages may still be under way where none is repeated.
const LAST_ARRIVALS: Duration = Duration::from_millis(200);

/// What the client asks for.
pub fn hello(transport: &str, items: &[Item]) -> Hello {
    Hello {
        ferroce_perf: talk::VERSION,
        version: env!("CARGO_PKG_VERSION").into(),
        transport: transport.into(),
        tests: items.iter().map(Item::ask).collect(),
    }
}

/// Why a server with these options does not serve `hello`; names both sides. `test` is the one that it was told, if any.
pub fn disagreement(
    args: &PerfArgs,
    test: Option<String>,
    sizes: Option<Vec<u32>>,
    hello: &Hello,
) -> Option<String> {
    if hello.tests.is_empty() || hello.tests.len() > talk::MOST_TESTS {
        let (asked, most) = (hello.tests.len(), talk::MOST_TESTS);
        return Some(format!("tests: asked {asked}, allowed 1 to {most}"));
    }
    if args.transport().name() != hello.transport && (test.is_some() || args.load.transport.is_some()) {
        let (told, asked) = (args.transport().name(), &hello.transport);
        return Some(format!("transport: the server was told {told:?}, the client {asked:?}"));
    }
    if !["rdma", "tcp", "udp"].contains(&hello.transport.as_str()) {
        return Some(format!("transport: asked {:?}, allowed rdma, tcp, udp", hello.transport));
    }
    let asked: Vec<u32> = hello.tests.iter().map(|ask| ask.size).collect();
    let of_tests = hello.tests.iter().find_map(|ask| ask_differs(args, test.as_deref(), ask));
    of_tests.or_else(|| differ("size", sizes, asked))
}

fn differ<T: PartialEq + std::fmt::Debug>(name: &str, told: Option<T>, asked: T) -> Option<String> {
    let told = told?;
    (told != asked).then(|| format!("{name}: the server was told {told:?}, the client {asked:?}"))
}

fn ask_differs(args: &PerfArgs, test: Option<&str>, ask: &Ask) -> Option<String> {
    let (load, path) = (&args.load, &args.path);
    let duration = load.duration.map(|d| u64::try_from(d.as_nanos()).ok());
    let connection = load.connection.map(super::options::connection_name);
    differ("test", test, ask.test.as_str())
        .or_else(|| differ("connection", connection, ask.connection.as_str()))
        .or_else(|| differ("qp", path.qps, ask.qps))
        .or_else(|| differ("iters", load.iters, ask.iters))
        .or_else(|| differ("duration", duration, ask.duration_ns))
        .or_else(|| differ("warmup", load.warmup, ask.warmup))
        .or_else(|| differ("bidirectional", load.bidirectional.then_some(true), ask.bidirectional))
        .or_else(|| differ("tx-depth", load.tx_depth, ask.tx_depth))
        .or_else(|| differ("rx-depth", load.rx_depth, ask.rx_depth))
        .or_else(|| differ("cq-mod", load.cq_mod, ask.cq_mod))
        .or_else(|| differ("post_list", load.post_list, ask.post_list))
        .or_else(|| differ("inline_size", load.inline_size, ask.inline_bytes))
        .or_else(|| differ("events", load.events.then_some(true), ask.events))
        .or_else(|| differ("seed", load.seed, ask.seed))
        .or_else(|| differ("data_validation", load.check.then_some(true), ask.check_data))
}

/// A session after its hellos.
pub struct Session<'s, 'a> {
    /// Our options.
    pub args: &'a PerfArgs,
    /// Our side.
    pub role: Role,
    /// The connection.
    pub peer: &'s mut Peer,
    /// What runs the tests.
    pub backend: &'s mut Backend,
    /// What prints.
    pub teller: &'s mut Teller<'a>,
}

impl Session<'_, '_> {
    /// All tests. A failure is told to the peer, which may wait for something else.
    pub fn run(&mut self, items: &[Item]) -> Outcome<()> {
        for (index, item) in items.iter().enumerate() {
            if let Err(error) = self.one(index, item) {
                let _ = talk::say(self.peer, &Message::Failed { error: error.to_string() });
                return Err(error);
            }
        }
        Ok(())
    }

    fn one(&mut self, index: usize, item: &Item) -> Outcome<()> {
        let result = self.test(index, item);
        let closed = self.backend.close();
        result.and(closed)
    }

    fn test(&mut self, index: usize, item: &Item) -> Outcome<()> {
        match self.role {
            Role::Client => {
                let endpoint = self.backend.open(item)?;
                talk::say(self.peer, &Message::Endpoint { test: index, endpoint })?;
                let remote = self.hear_endpoint(index)?;
                match talk::listen(self.peer, STEP_LIMIT, "its ready")? {
                    Message::Ready => {}
                    other => return Err(self.strange(&other, "its ready")),
                }
                self.teller.begin(item);
                self.backend.start(item.spec, &remote)?;
            }
            Role::Server => {
                let remote = self.hear_endpoint(index)?;
                let endpoint = self.backend.open(item)?;
                talk::say(self.peer, &Message::Endpoint { test: index, endpoint })?;
                self.teller.begin(item);
                self.backend.start(item.spec, &remote)?;
                talk::say(self.peer, &Message::Ready)?;
            }
        }
        self.teller.header(&Facts::of(self.args, item, self.role, self.peer.name(), self.backend));
        let (report, theirs) = match self.role {
            Role::Client => self.lead(item)?,
            Role::Server => self.follow(&item.spec)?,
        };
        let facts = Facts::of(self.args, item, self.role, self.peer.name(), self.backend);
        self.teller.result(&Finding { report, theirs }, &facts)
    }

    fn strange(&self, message: &Message, what: &str) -> Fail {
        Fail::failed(format!("peer {} said {message:?} instead of {what}", self.peer.name()))
    }

    fn hear_endpoint(&mut self, index: usize) -> Outcome<Endpoint> {
        match talk::listen(self.peer, STEP_LIMIT, "its endpoint")? {
            Message::Endpoint { test, endpoint } if test == index => Ok(endpoint),
            other => Err(self.strange(&other, "its endpoint")),
        }
    }

    /// Client: waits for the own end, then for the server's.
    fn lead(&mut self, item: &Item) -> Outcome<(PerfReport, Option<Measured>)> {
        let mut pulse = Pace::new();
        let report = loop {
            if let Some(result) = self.backend.poll() {
                break result?;
            }
            match self.peer.look() {
                Look::Quiet => pulse.sleep(),
                Look::Closed => return Err(self.deserted()),
                Look::Data => {
                    let message = talk::listen(self.peer, STEP_LIMIT, "the end")?;
                    return Err(self.strange(&message, "nothing: the test still runs"));
                }
            }
            self.teller.progress(item, self.backend.done());
        };
        talk::say(self.peer, &Message::Finished { measured: Some(Measured::of(&report)) })?;
        match talk::listen(self.peer, STEP_LIMIT, "its finish")? {
            Message::Finished { measured } => Ok((report, measured)),
            other => Err(self.strange(&other, "its finish")),
        }
    }

    /// The peer's process is gone. The transport tells in its own time what it thinks of that; this is sooner.
    fn deserted(&mut self) -> Fail {
        // A queue pair that failed at the same moment knows more: the last PSN.
        let deadline = Instant::now() + Duration::from_secs(2);
        while Instant::now() < deadline {
            if let Some(Err(error)) = self.backend.poll() {
                return Fail::failed(format!(
                    "peer {} closed the connection during the test; {error}",
                    self.peer.name()
                ));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let position = self.backend.position();
        Fail::failed(format!("peer {} closed the connection during the test{position}", self.peer.name()))
    }

    /// Server: the client says when it has finished.
    fn follow(&mut self, spec: &PerfSpec) -> Outcome<(PerfReport, Option<Measured>)> {
        let (mut pulse, mut patience) = (Pace::new(), Patience::new());
        let mut report = None;
        loop {
            if report.is_none() {
                report = self.backend.poll().transpose()?;
            }
            match self.peer.look() {
                Look::Quiet => pulse.sleep(),
                Look::Closed => return Err(self.deserted()),
                Look::Data => break,
            }
            if let Some(silent) = self.backend.life().and_then(|life| patience.is_over(life)) {
                let peer = self.peer.name();
                let position = self.backend.position();
                return Err(Fail::failed(format!(
                    "peer {peer} sent neither a frame nor a word for {} s{position}",
                    silent.as_secs()
                )));
            }
        }
        let theirs = match talk::listen(self.peer, STEP_LIMIT, "its finish")? {
            Message::Finished { measured } => measured,
            other => return Err(self.strange(&other, "its finish")),
        };
        let report = self.end(spec, report)?;
        let measured = (!spec.is_passive()).then(|| Measured::of(&report));
        talk::say(self.peer, &Message::Finished { measured })?;
        Ok((report, theirs))
    }

    /// Ends the server's test, which goes on until it is told.
    fn end(&mut self, spec: &PerfSpec, mut report: Option<PerfReport>) -> Outcome<PerfReport> {
        let is_rdma = self.backend.plane().is_some();
        let endless = spec.is_passive() || spec.duration_ns.is_some();
        if endless && is_rdma {
            self.backend.ask_stop();
        }
        let told = Instant::now();
        loop {
            if let Some(report) = report {
                self.backend.ask_stop();
                return Ok(report);
            }
            report = self.backend.poll().transpose()?;
            if told.elapsed() >= LAST_ARRIVALS && spec.may_lose() && is_rdma {
                self.backend.ask_stop();
            }
            if told.elapsed() >= END_LIMIT {
                return Err(Fail::failed("the client has finished, but its messages did not all arrive"));
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

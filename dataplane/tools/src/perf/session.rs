//! One session: hello, then a test per size, each with endpoints, `ready`, the test, `finished` from both.

use std::time::{Duration, Instant};

use ferroce_services::{PerfReport, PerfSpec, Role};

use super::options::Transport;
use super::print::{self, Facts};
use super::talk::{self, Endpoint, Hello, Message};
use super::{Backend, PerfArgs, Socket, rdma};
use crate::fail::{Fail, Outcome};
use crate::json;
use crate::net::{self, Look, Peer, STEP_LIMIT};
use crate::plane::Plane;
use crate::sock::Kernel;
use crate::watch::Pace;

/// How long a server's test may take to end after the client's.
const END_LIMIT: Duration = Duration::from_secs(2);

/// Runs a session; gives back the data plane, if there was one, for its counters.
pub fn run(args: &PerfArgs, role: Role) -> Outcome<Option<Plane>> {
    match (&args.host, role) {
        (Some(host), Role::Client) => client(args, host),
        _ => server(args),
    }
}

fn open_plane(args: &PerfArgs, transport: Transport, role: Role) -> Outcome<Option<Plane>> {
    match transport {
        Transport::Rdma => Ok(Some(Plane::open(&args.plane, role)?)),
        Transport::Tcp | Transport::Udp => Ok(None),
    }
}

/// What runs the tests. Where it cannot, the peer, which waits for an endpoint, is told why.
fn backend(args: &PerfArgs, role: Role, plane: Option<Plane>, peer: &mut Peer) -> Outcome<Backend> {
    let made = make_backend(args, role, plane, peer);
    if let Err(error) = &made {
        // If the peer is gone as well, our own reason is the one that counts.
        let _ = talk::say(peer, &Message::Failed { error: error.to_string() });
    }
    made
}

fn make_backend(args: &PerfArgs, role: Role, plane: Option<Plane>, peer: &Peer) -> Outcome<Backend> {
    let kernel = match (args.transport(), plane) {
        (Transport::Rdma, Some(plane)) => {
            return Ok(Backend::Rdma(Box::new(rdma::Rdma::new(plane, args, peer.remote_ip()?)?)));
        }
        (Transport::Rdma, None) => return Err(Fail::failed("no data plane was opened")),
        (Transport::Tcp, _) => Kernel::Tcp,
        (Transport::Udp, _) => Kernel::Udp,
    };
    let (local, remote) = (peer.local_ip()?, peer.remote_ip()?);
    let core = args.plane.core_for(role)?;
    Ok(Backend::Socket(Box::new(Socket { kernel, local, remote, core, test: None })))
}

fn hello(args: &PerfArgs) -> Hello {
    let sizes = args.sizes();
    let spec = args.spec(Role::Client, sizes.first().copied().unwrap_or(0));
    Hello {
        ferroce_perf: talk::VERSION,
        version: env!("CARGO_PKG_VERSION").into(),
        test: args.test.name(),
        transport: args.transport().name().into(),
        cq_mods: sizes.iter().map(|&size| args.spec(Role::Client, size).cq_mod).collect(),
        sizes,
        iters: spec.iters,
        warmup: spec.warmup,
        duration_ns: spec.duration_ns,
        tx_depth: spec.tx_depth,
        rx_depth: spec.rx_depth,
        inline_bytes: spec.inline_bytes,
        seed: spec.seed,
        check_data: spec.check_data,
    }
}

/// The test that a hello asks of the side in `role`.
fn spec_of(hello: &Hello, args: &PerfArgs, role: Role, index: usize) -> Outcome<PerfSpec> {
    let (Some(&size), Some(&cq_mod)) = (hello.sizes.get(index), hello.cq_mods.get(index)) else {
        return Err(Fail::failed("the client's hello has fewer moderations than sizes"));
    };
    let spec = PerfSpec {
        iters: hello.iters,
        warmup: hello.warmup,
        duration_ns: hello.duration_ns,
        tx_depth: hello.tx_depth,
        rx_depth: hello.rx_depth,
        cq_mod,
        inline_bytes: hello.inline_bytes,
        seed: hello.seed,
        check_data: hello.check_data,
        ..PerfSpec::new(args.test.op, args.test.mode, role, size)
    };
    spec.check().map_err(|e| Fail::failed(e.to_string()))?;
    Ok(spec)
}

/// Most sizes of one session.
const MOST_SIZES: usize = 64;

/// Why a server told `args` does not serve `hello`; names both sides.
fn disagreement(args: &PerfArgs, hello: &Hello) -> Option<String> {
    fn differ<T: PartialEq + std::fmt::Debug>(name: &str, told: Option<T>, asked: T) -> Option<String> {
        let told = told?;
        (told != asked).then(|| format!("{name}: the server was told {told:?}, the client {asked:?}"))
    }
    if hello.sizes.is_empty() || hello.sizes.len() > MOST_SIZES {
        return Some(format!("sizes: asked {}, allowed 1 to {MOST_SIZES}", hello.sizes.len()));
    }
    let sizes = (args.size.is_some() || args.all).then(|| args.sizes());
    let duration = args.duration.map(|d| u64::try_from(d.as_nanos()).ok());
    let (test, transport) = (args.test.name(), args.transport().name().to_string());
    differ("test", Some(test), hello.test.clone())
        .or_else(|| differ("transport", Some(transport), hello.transport.clone()))
        .or_else(|| differ("size", sizes, hello.sizes.clone()))
        .or_else(|| differ("iters", args.iters, hello.iters))
        .or_else(|| differ("duration", duration, hello.duration_ns))
        .or_else(|| differ("warmup", args.warmup, hello.warmup))
        .or_else(|| differ("tx-depth", args.tx_depth, hello.tx_depth))
        .or_else(|| differ("rx-depth", args.rx_depth, hello.rx_depth))
        .or_else(|| differ("cq-mod", args.cq_mod, hello.cq_mods.first().copied().unwrap_or(0)))
        .or_else(|| differ("inline_size", args.inline_size, hello.inline_bytes))
        .or_else(|| differ("seed", args.seed, hello.seed))
        .or_else(|| differ("data_validation", args.check.then_some(true), hello.check_data))
}

fn server(args: &PerfArgs) -> Outcome<Option<Plane>> {
    let wait = args.wait.unwrap_or(Duration::from_secs(60));
    let listener = net::listen(args.port)?;
    let plane = open_plane(args, args.transport(), Role::Server)?;
    if !args.json {
        crate::out::say!(
            "\n************************************\n* Waiting for client to connect... *\n************************************"
        );
    }
    let mut peer = Peer::new(net::accept(&listener, (!wait.is_zero()).then_some(wait))?)?;
    drop(listener);
    let heard = talk::hear(&mut peer, STEP_LIMIT);
    let error = match &heard {
        Ok(hello) => disagreement(args, hello),
        Err(error) => Some(error.to_string()),
    };
    let answered = talk::answer(&mut peer, error.clone());
    let hello = heard?;
    if let Some(error) = error {
        return Err(Fail::failed(format!("client {}: {error}", peer.name())));
    }
    answered?;
    let backend = backend(args, Role::Server, plane, &mut peer)?;
    Session { args, hello, role: Role::Server, peer, backend, titled: false }.whole()
}

fn client(args: &PerfArgs, host: &str) -> Outcome<Option<Plane>> {
    let wait = args.wait.unwrap_or(Duration::from_secs(2));
    let plane = open_plane(args, args.transport(), Role::Client)?;
    let mut peer = Peer::new(net::connect(host, args.port, wait)?)?;
    let hello = hello(args);
    talk::ask(&mut peer, &hello, STEP_LIMIT)?;
    let backend = backend(args, Role::Client, plane, &mut peer)?;
    Session { args, hello, role: Role::Client, peer, backend, titled: false }.whole()
}

struct Session<'s> {
    args: &'s PerfArgs,
    hello: Hello,
    role: Role,
    peer: Peer,
    backend: Backend,
    titled: bool,
}

impl Session<'_> {
    /// All sizes. A failure is told to the peer, which may wait for something else.
    fn whole(mut self) -> Outcome<Option<Plane>> {
        for index in 0..self.hello.sizes.len() {
            if let Err(error) = self.one(index) {
                let _ = talk::say(&mut self.peer, &Message::Failed { error: error.to_string() });
                return Err(error);
            }
        }
        if !self.args.json {
            crate::out::say!("{}", print::RULE);
        }
        Ok(match self.backend {
            Backend::Rdma(rdma) => Some(rdma.into_plane()),
            Backend::Socket(_) => None,
        })
    }

    fn one(&mut self, index: usize) -> Outcome<()> {
        let spec = spec_of(&self.hello, self.args, self.role, index)?;
        let result = self.test(spec);
        let closed = self.backend.close();
        result.and(closed)
    }

    fn test(&mut self, spec: PerfSpec) -> Outcome<()> {
        let remote = match self.role {
            Role::Client => {
                let endpoint = self.backend.open(spec)?;
                talk::say(&mut self.peer, &Message::Endpoint { size: spec.size, endpoint })?;
                let remote = self.hear_endpoint(spec.size)?;
                match talk::listen(&mut self.peer, STEP_LIMIT, "its ready")? {
                    Message::Ready => {}
                    other => return Err(self.strange(&other, "its ready")),
                }
                self.backend.start(&remote)?;
                remote
            }
            Role::Server => {
                let remote = self.hear_endpoint(spec.size)?;
                let endpoint = self.backend.open(spec)?;
                talk::say(&mut self.peer, &Message::Endpoint { size: spec.size, endpoint })?;
                self.backend.start(&remote)?;
                talk::say(&mut self.peer, &Message::Ready)?;
                remote
            }
        };
        self.tell_start(&spec, &remote);
        let report = match self.role {
            Role::Client => self.lead()?,
            Role::Server => self.follow(&spec)?,
        };
        self.tell(&report, &remote);
        Ok(())
    }

    fn strange(&self, message: &Message, what: &str) -> Fail {
        Fail::failed(format!("peer {} said {message:?} instead of {what}", self.peer.name()))
    }

    fn hear_endpoint(&mut self, size: u32) -> Outcome<Endpoint> {
        match talk::listen(&mut self.peer, STEP_LIMIT, "its endpoint")? {
            Message::Endpoint { size: theirs, endpoint } if theirs == size => Ok(endpoint),
            other => Err(self.strange(&other, "its endpoint")),
        }
    }

    /// Client: waits for the own end, then for the server's.
    fn lead(&mut self) -> Outcome<PerfReport> {
        let mut pace = Pace::new();
        let report = loop {
            if let Some(result) = self.backend.poll() {
                break result?;
            }
            match self.peer.look() {
                Look::Quiet => pace.sleep(),
                Look::Closed => return Err(self.deserted()),
                Look::Data => {
                    let message = talk::listen(&mut self.peer, STEP_LIMIT, "the end")?;
                    return Err(self.strange(&message, "nothing: the test still runs"));
                }
            }
        };
        talk::say(&mut self.peer, &Message::Finished)?;
        match talk::listen(&mut self.peer, STEP_LIMIT, "its finish")? {
            Message::Finished => Ok(report),
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
        let position = match &self.backend {
            Backend::Rdma(rdma) => rdma.position().map(|p| format!("; {p}")),
            Backend::Socket(_) => None,
        };
        let position = position.unwrap_or_default();
        Fail::failed(format!("peer {} closed the connection during the test{position}", self.peer.name()))
    }

    /// Server: the client says when it has finished.
    fn follow(&mut self, spec: &PerfSpec) -> Outcome<PerfReport> {
        let mut pace = Pace::new();
        let mut report = None;
        loop {
            if report.is_none() {
                report = self.backend.poll().transpose()?;
            }
            match self.peer.look() {
                Look::Quiet => pace.sleep(),
                Look::Closed => return Err(self.deserted()),
                Look::Data => break,
            }
        }
        match talk::listen(&mut self.peer, STEP_LIMIT, "its finish")? {
            Message::Finished => {}
            other => return Err(self.strange(&other, "its finish")),
        }
        let endless = spec.is_passive() || spec.duration_ns.is_some();
        if endless && matches!(self.backend, Backend::Rdma(_)) {
            self.backend.ask_stop();
        }
        let deadline = Instant::now() + END_LIMIT;
        let report = loop {
            if let Some(report) = report {
                break report;
            }
            report = self.backend.poll().transpose()?;
            if Instant::now() >= deadline {
                return Err(Fail::failed("the client has finished, but its messages did not all arrive"));
            }
            std::thread::sleep(Duration::from_micros(200));
        };
        self.backend.ask_stop();
        talk::say(&mut self.peer, &Message::Finished)?;
        Ok(report)
    }

    fn facts<'f>(&'f self, remote: &Endpoint) -> Facts<'f> {
        let ends = match (&self.backend, remote) {
            (Backend::Rdma(rdma), Endpoint::Rdma(remote)) => rdma.ends(remote),
            _ => None,
        };
        Facts {
            args: self.args,
            role: self.role,
            peer: self.peer.name(),
            plane: self.backend.plane(),
            core: self.backend.core(),
            ends,
        }
    }

    fn tell_start(&mut self, spec: &PerfSpec, remote: &Endpoint) {
        if self.args.json || self.titled {
            return;
        }
        self.titled = true;
        if let Some(plane) = self.backend.plane() {
            plane.fallbacks().iter().for_each(|f| eprintln!("{}", json::fallback_line(f)));
        }
        print::header(spec, &self.facts(remote));
    }

    fn tell(&self, report: &PerfReport, remote: &Endpoint) {
        if self.args.json {
            json::print(&print::row(report, &self.facts(remote)));
        } else if self.role == Role::Client {
            crate::out::say!("{}", print::line(report, self.args));
        }
    }
}

//! The control socket: decodes requests, has them carried out, answers, and sends events.
//!
//! Owns the connections. Runs on the one unpinned housekeeping thread, which it never leaves for longer than one
//! command takes (device calls are bounded): batches of several clients are done in turn, a slice at a time, and
//! between slices the port is looked after. Everything is bounded: clients, batches, messages, events that wait. A
//! client that is slow, silent or talks nonsense is cut off with a reason; the others and the data plane do not notice.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ferroce_api::appliance::{
    Command, EventBody, FromAppliance, Hello, HelloReply, Outcome, Response, Role, VERSION, version_error,
};
use ferroce_api::{ApiError, Code};
use ferroce_nic::Port;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;

mod client;
pub mod convert;
mod handle;
pub mod socket;

pub use handle::{Context, PORT};

use client::{Client, Input};
use socket::Claim;

use crate::node::Node;

/// Least time between two rounds of housekeeping, however often the port asks.
const LEAST_TICK: Duration = Duration::from_millis(5);
/// Time after which a client's batch waits for the next round.
const SLICE: Duration = Duration::from_millis(10);
/// Pause of accepting after the system had no descriptor for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);
/// Longest deadline that a client may give for the stop.
const MAX_SHUTDOWN: Duration = Duration::from_secs(60);

/// Why the server returned.
#[derive(Clone, Copy, Debug)]
pub enum Stop {
    /// A signal.
    Signal,
    /// A client asked for it, with this deadline.
    Asked(Duration),
}

/// Counters of the control socket.
#[derive(Clone, Copy, Debug, Default)]
pub struct ControlCounters {
    /// Connections accepted.
    pub accepted: u64,
    /// Connections refused: too many, or no right.
    pub refused: u64,
    /// Connections cut off: nonsense, too slow.
    pub cut_off: u64,
    /// Commands done or refused.
    pub commands: u64,
}

impl ControlCounters {
    /// Name and value of each.
    pub fn list(&self) -> [(&'static str, u64); 4] {
        [
            ("control_accepted", self.accepted),
            ("control_refused", self.refused),
            ("control_cut_off", self.cut_off),
            ("control_commands", self.commands),
        ]
    }
}

/// The server.
pub struct Server<'c> {
    claim: &'c Claim,
    clients: Vec<Client>,
    max_clients: usize,
    next_number: u64,
    counters: ControlCounters,
    buffer: Vec<u8>,
    accept_after: Option<Instant>,
    asked_to_stop: Option<Duration>,
    /// The port has something to do; not looked at again before it was looked after.
    port_asks: bool,
}

impl<'c> Server<'c> {
    /// A server on a claimed socket, for at most `max_clients` at once.
    pub fn new(claim: &'c Claim, max_clients: usize) -> Self {
        Server {
            claim,
            clients: Vec::new(),
            max_clients,
            next_number: 1,
            counters: ControlCounters::default(),
            buffer: vec![0; ferroce_api::appliance::MAX_MESSAGE_BYTES],
            accept_after: None,
            asked_to_stop: None,
            port_asks: false,
        }
    }

    /// Serves until a byte arrives at `signals` or a client asks for the stop.
    ///
    /// # Errors
    /// When the system refuses to wait; then nothing works any more.
    pub fn run(&mut self, node: &mut Node, signals: BorrowedFd<'_>) -> Result<Stop, ApiError> {
        let mut last_tick = Instant::now();
        loop {
            let now = Instant::now();
            let early = self.port_asks && now.duration_since(last_tick) >= LEAST_TICK;
            if early || now >= last_tick + node.tick() {
                last_tick = now;
                self.port_asks = false;
                for event in node.housekeep() {
                    self.broadcast(&event);
                }
                self.clients.iter_mut().for_each(|client| client.check_deadlines(now));
            }
            if self.wait(node, signals, last_tick)? {
                self.farewell("a signal");
                return Ok(Stop::Signal);
            }
            self.accept();
            self.serve(node);
            self.sweep();
            if let Some(deadline) = self.asked_to_stop {
                self.farewell("a client's request");
                return Ok(Stop::Asked(deadline));
            }
        }
    }

    /// Waits for something to do; true when a signal came.
    fn wait(&mut self, node: &Node, signals: BorrowedFd<'_>, last_tick: Instant) -> Result<bool, ApiError> {
        let now = Instant::now();
        let until = last_tick + if self.port_asks { LEAST_TICK } else { node.tick() };
        let accepting = self.accept_after.is_none_or(|after| now >= after);
        let busy = self.clients.iter().any(Client::busy);
        let timeout = if busy { Duration::ZERO } else { until.saturating_duration_since(now) };
        let mut fds = Vec::with_capacity(self.clients.len() + 2);
        fds.push(PollFd::from_borrowed_fd(signals, PollFlags::IN));
        let listen = if accepting { PollFlags::IN } else { PollFlags::empty() };
        fds.push(PollFd::from_borrowed_fd(self.claim.as_fd(), listen));
        for client in &self.clients {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, client.wants_input());
            flags.set(PollFlags::OUT, client.wants_output());
            fds.push(PollFd::from_borrowed_fd(client.as_fd(), flags));
        }
        let port_from = fds.len();
        if !self.port_asks {
            fds.extend(
                node.port.housekeep_fds().into_iter().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)),
            );
        }
        let timeout = Timespec {
            tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(ApiError::new(Code::Internal, "poll", "", errno.to_string())),
        }
        self.port_asks |= fds.iter().skip(port_from).any(|fd| !fd.revents().is_empty());
        Ok(fds.first().is_some_and(|fd| !fd.revents().is_empty()))
    }

    fn accept(&mut self) {
        if self.accept_after.is_some_and(|after| Instant::now() < after) {
            return;
        }
        self.accept_after = None;
        // As many as the backlog holds, so that a storm of connections does not keep us here.
        for _ in 0..16 {
            match self.claim.accept() {
                Ok(Some(fd)) => self.admit(fd),
                Ok(None) => return,
                Err(errno) => {
                    tracing::warn!(%errno, pause_ms = ACCEPT_PAUSE.as_millis(), "no connection can be accepted now");
                    self.accept_after = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    fn admit(&mut self, fd: OwnedFd) {
        // A longer buffer only spares retries; the default one holds a message too.
        let _ = sockopt::set_socket_send_buffer_size(&fd, 4 * ferroce_api::appliance::MAX_MESSAGE_BYTES);
        let credentials = sockopt::socket_peercred(&fd);
        let number = self.next_number;
        self.next_number += 1;
        let pid = credentials.as_ref().ok().map(|c| c.pid.as_raw_nonzero().get());
        let mut client = Client::new(fd, number, pid);
        let own = rustix::process::geteuid();
        let allowed = credentials.is_ok_and(|c| c.uid == own || c.uid.is_root());
        if !allowed {
            self.counters.refused += 1;
            let error =
                ApiError::new(Code::Denied, "user", "another user", format!("user {} or root", own.as_raw()));
            return client.end(error.hint("use the control process's socket instead"));
        }
        if self.clients.len() >= self.max_clients {
            self.counters.refused += 1;
            let (asked, allowed) = ("one more".to_owned(), format!("{} at once", self.max_clients));
            let error = ApiError::new(Code::Exhausted, "clients", asked, allowed);
            return client.end(error.hint("raise limits.max_clients in the configuration"));
        }
        self.counters.accepted += 1;
        self.clients.push(client);
    }

    /// One message and one slice of each client's batch.
    fn serve(&mut self, node: &mut Node) {
        let count = self.clients.len();
        for index in 0..count {
            let clients = self.clients.len();
            let counters = self.counters;
            let Some(client) = self.clients.get_mut(index) else { return };
            if client.wants_input()
                && let Input::Hello(hello) = client.read(&mut self.buffer)
            {
                greet(client, &hello, node);
            }
            let end = Instant::now() + SLICE;
            while let Some((command, room)) = client.next_command() {
                self.counters.commands += 1;
                let outcome = authorize(client.role(), &command).and_then(|()| match command {
                    Command::Subscribe => {
                        client.subscribe();
                        Ok(Response::Done)
                    }
                    Command::Shutdown { deadline_ms } => {
                        let deadline = Duration::from_millis(deadline_ms.into()).min(MAX_SHUTDOWN);
                        self.asked_to_stop = Some(deadline);
                        Ok(Response::Done)
                    }
                    other => handle::execute(node, other, room, &Context { clients, counters }),
                });
                client.answer(Outcome::from(outcome));
                if Instant::now() >= end {
                    break;
                }
            }
            client.flush();
        }
    }

    /// Drops the connections that have ended.
    fn sweep(&mut self) {
        for client in self.clients.iter().filter(|client| client.ended()) {
            self.counters.cut_off += u64::from(client.was_cut_off());
        }
        self.clients.retain(|client| !client.ended());
    }

    fn broadcast(&mut self, event: &EventBody) {
        for client in &mut self.clients {
            client.event(event);
            client.flush();
        }
    }

    /// Tells everybody that this is the end.
    fn farewell(&mut self, why: &str) {
        self.broadcast(&EventBody::Stopping);
        for client in &mut self.clients {
            client.bye(ApiError::new(Code::Gone, "appliance", "", format!("stops because of {why}")));
        }
        self.clients.clear();
    }
}

fn greet(client: &mut Client, hello: &Hello, node: &Node) {
    if hello.version != VERSION {
        client.end(version_error(hello.version));
        return;
    }
    let answer = FromAppliance::Hello(HelloReply {
        version: VERSION,
        program: env!("CARGO_PKG_VERSION").to_owned(),
        dev: node.name().to_owned(),
        pid: std::process::id(),
        instance: node.instance(),
        workers: node.workers(),
        max_message_bytes: u32::try_from(ferroce_api::appliance::MAX_MESSAGE_BYTES).unwrap_or(u32::MAX),
    });
    client.welcome(hello, &answer);
    tracing::info!(client = client.describe(), role = ?hello.role, "connected");
}

fn authorize(role: Option<Role>, command: &Command) -> Result<(), ApiError> {
    let allowed = match role {
        Some(Role::Control) => true,
        Some(Role::Client) => !matches!(command, Command::Shutdown { .. }),
        Some(Role::Observer) => command.reads_only(),
        None => false,
    };
    if allowed {
        return Ok(());
    }
    let role = match role {
        Some(Role::Client) => "a client may do everything but stop the appliance",
        _ => "an observer may only read",
    };
    Err(ApiError::new(Code::Denied, "role", "a command that changes something", role)
        .hint("connect as control"))
}

//! The connection to one appliance: a Unix SEQPACKET socket that is opened again whenever it breaks.
//!
//! Owns the socket and the requests on their way. The invariants: every call ends by its deadline, with an error that
//! names the appliance; a call is never sent twice; a connection is used only after a hello of our own protocol
//! version. Handlers call [`Link::batch`] and [`Link::one`]; nothing here knows what a command means.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use ferroce_api::appliance::{
    Bye, Command, Event, EventBody, FromAppliance, FromClient, Hello, HelloReply, MAX_BATCH,
    MAX_MESSAGE_BYTES, Outcome, Request, Response, Role, VERSION, decode, encode,
};
use ferroce_api::{ApiError, Code};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use tokio::io::Interest;
use tokio::net::UnixDatagram;
use tokio::sync::{broadcast, mpsc, oneshot};
use tokio::time::{Instant, sleep, timeout_at};

/// Deadline of a call that names none.
pub const CALL_DEADLINE: Duration = Duration::from_secs(5);
const HELLO_DEADLINE: Duration = Duration::from_secs(2);
const BACKOFF_FIRST: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// Calls waiting for their turn; more are refused as busy.
const QUEUE: usize = 256;
/// Events kept for a listener that is slow.
const EVENTS: usize = 256;

struct Call {
    commands: Vec<Command>,
    deadline: Instant,
    answer: oneshot::Sender<Result<Vec<Outcome>, ApiError>>,
}

struct State {
    hello: Option<HelloReply>,
    last_error: ApiError,
    counters: LinkCounters,
    next_worker: u8,
}

/// What a link counted since the start.
#[derive(Clone, Copy, Default, Debug)]
pub struct LinkCounters {
    /// Connections made.
    pub connects: u64,
    /// Connections that broke, or could not be made.
    pub failures: u64,
    /// Requests sent.
    pub requests: u64,
    /// Calls that had no answer within their deadline.
    pub timeouts: u64,
    /// Events received.
    pub events: u64,
    /// Events that the appliance dropped because we were too slow.
    pub events_lost: u64,
    /// Replies that nobody waited for any more.
    pub late_replies: u64,
}

/// A handle to the connection with one appliance; clones share it.
#[derive(Clone)]
pub struct Link {
    name: Rc<str>,
    socket: Rc<Path>,
    state: Rc<RefCell<State>>,
    calls: mpsc::Sender<Call>,
    events: broadcast::Sender<Event>,
}

impl Link {
    /// A link and the task that keeps it open; the task ends when the last handle is gone.
    pub fn new(name: &str, socket: PathBuf) -> (Self, impl Future<Output = ()> + 'static) {
        let (calls, queue) = mpsc::channel(QUEUE);
        let (events, _) = broadcast::channel(EVENTS);
        let state = State {
            hello: None,
            last_error: ApiError::new(Code::Gone, format!("appliance {name}"), "", "not tried yet"),
            counters: LinkCounters::default(),
            next_worker: 0,
        };
        let state = Rc::new(RefCell::new(state));
        let link = Link {
            name: name.into(),
            socket: socket.clone().into(),
            state: state.clone(),
            calls,
            events: events.clone(),
        };
        let keeper = Keeper { name: name.into(), socket, state, queue, events, next_id: 0, subscription: 0 };
        (link, keeper.run())
    }

    /// Name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }
    /// Socket of the appliance.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
    /// What the appliance said of itself, while connected.
    pub fn hello(&self) -> Option<HelloReply> {
        self.state.borrow().hello.clone()
    }
    /// Counters.
    pub fn counters(&self) -> LinkCounters {
        self.state.borrow().counters
    }
    /// Events from now on.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }
    /// The next worker in turn, so that connections spread over all of them.
    pub fn next_worker(&self) -> u8 {
        let mut state = self.state.borrow_mut();
        let workers = state.hello.as_ref().map_or(1, |h| h.workers.max(1));
        let worker = state.next_worker % workers;
        state.next_worker = (worker + 1) % workers;
        worker
    }

    /// Sends commands in order; gives one outcome for each.
    ///
    /// # Errors
    /// The appliance is not there, breaks off, or does not answer by the deadline. What it then did is unknown.
    pub async fn batch(&self, commands: Vec<Command>, within: Duration) -> Result<Vec<Outcome>, ApiError> {
        if commands.len() > MAX_BATCH {
            return Err(self.error(
                Code::TooBig,
                format!("{} commands", commands.len()),
                format!("{MAX_BATCH}"),
            ));
        }
        let count = commands.len();
        let deadline = Instant::now() + within;
        let (answer, wait) = oneshot::channel();
        let call = Call { commands, deadline, answer };
        self.calls.try_send(call).map_err(|_| {
            self.error(Code::Busy, "", format!("{QUEUE} calls are waiting for it already"))
                .hint("try again later")
        })?;
        let outcomes = match timeout_at(deadline, wait).await {
            Ok(Ok(result)) => result?,
            Ok(Err(_)) => return Err(self.error(Code::Gone, "", "the connection ended")),
            Err(_) => {
                self.state.borrow_mut().counters.timeouts += 1;
                return Err(self
                    .error(Code::Timeout, "", format!("no answer within {} ms", within.as_millis()))
                    .hint("the process lives but does not answer: see its log"));
            }
        };
        if outcomes.len() != count {
            let text = format!("{} answers to {count} commands", outcomes.len());
            return Err(self.error(Code::Malformed, "", text));
        }
        Ok(outcomes)
    }

    /// Sends one command within [`CALL_DEADLINE`].
    ///
    /// # Errors
    /// As [`Link::batch`], or the appliance refused it.
    pub async fn one(&self, command: Command) -> Result<Response, ApiError> {
        let outcomes = self.batch(vec![command], CALL_DEADLINE).await?;
        match outcomes.into_iter().next() {
            Some(outcome) => outcome.into_result(),
            None => Err(self.error(Code::Malformed, "", "no answer in the reply")),
        }
    }

    /// An answer of a kind that does not fit the command.
    pub fn unexpected(&self, response: &Response) -> ApiError {
        let mut text = format!("{response:?}");
        text.truncate(text.floor_char_boundary(60));
        self.error(Code::Malformed, "", format!("an answer that does not fit: {text}"))
    }

    fn error(&self, code: Code, asked: impl Into<String>, found: impl Into<String>) -> ApiError {
        ApiError::new(code, format!("appliance {}", self.name), asked, found)
    }
}

/// The task behind a [`Link`].
struct Keeper {
    name: String,
    socket: PathBuf,
    state: Rc<RefCell<State>>,
    queue: mpsc::Receiver<Call>,
    events: broadcast::Sender<Event>,
    next_id: u64,
    /// The request that asked for events; no call waits for its answer.
    subscription: u64,
}

impl Keeper {
    async fn run(mut self) {
        let mut backoff = BACKOFF_FIRST;
        let mut stash: Option<Call> = None;
        loop {
            match self.open().await {
                Ok((socket, hello)) => {
                    tracing::info!(
                        dev = self.name,
                        pid = hello.pid,
                        instance = hello.instance,
                        "appliance connected"
                    );
                    self.state.borrow_mut().counters.connects += 1;
                    self.state.borrow_mut().hello = Some(hello);
                    backoff = BACKOFF_FIRST;
                    let end = self.serve(&socket, stash.take()).await;
                    self.state.borrow_mut().hello = None;
                    let Some(error) = end else { return };
                    tracing::warn!(dev = self.name, %error, "appliance disconnected");
                    self.failed(error);
                }
                Err(error) => {
                    let known = self.state.borrow().last_error == error;
                    if !known {
                        tracing::warn!(dev = self.name, %error, "appliance not connected");
                    }
                    self.failed(error.clone());
                    if let Some(call) = stash.take() {
                        let _ = call.answer.send(Err(error));
                    }
                }
            }
            // A call cuts the wait short: after a restart of the appliance the first command already works.
            tokio::select! {
                () = sleep(backoff) => backoff = (backoff * 2).min(BACKOFF_MAX),
                call = self.queue.recv() => match call {
                    Some(call) => stash = Some(call),
                    None => return,
                },
            }
        }
    }

    fn failed(&self, error: ApiError) {
        let mut state = self.state.borrow_mut();
        state.counters.failures += 1;
        state.last_error = error;
    }

    fn error(&self, code: Code, found: impl Into<String>) -> ApiError {
        link_error(&self.name, code, found)
    }

    /// Connects and exchanges hellos.
    async fn open(&self) -> Result<(Seqpacket, HelloReply), ApiError> {
        let path = self.socket.display();
        let socket =
            Seqpacket::connect(&self.socket).map_err(|e| {
                match rustix::io::Errno::from_io_error(&e).unwrap_or(rustix::io::Errno::IO) {
                    rustix::io::Errno::NOENT | rustix::io::Errno::CONNREFUSED => self
                        .error(Code::Gone, format!("ferroced is not running (looked at {path})"))
                        .hint("start it, or correct its socket in the configuration of ferroce-ctld"),
                    rustix::io::Errno::ACCESS | rustix::io::Errno::PERM => self
                        .error(Code::Denied, format!("socket {path}: {e}"))
                        .hint("run ferroce-ctld as the user that runs ferroced"),
                    rustix::io::Errno::PROTOTYPE => self.error(
                        Code::Malformed,
                        format!("socket {path} is not an appliance's: another program listens there"),
                    ),
                    _ => self.error(Code::Gone, format!("socket {path}: {e}")),
                }
            })?;
        let deadline = Instant::now() + HELLO_DEADLINE;
        let hello = FromClient::Hello(Hello::new(Role::Control, "ferroce-ctld"));
        let exchange = async {
            socket.send(&encode(&hello)?).await.map_err(|e| self.error(Code::Gone, format!("hello: {e}")))?;
            match receive(&self.name, &socket).await? {
                FromAppliance::Hello(reply) if reply.version == VERSION => Ok(reply),
                FromAppliance::Hello(reply) => Err(self.version(reply.version)),
                FromAppliance::Bye(Bye { error }) => Err(self.error(error.code, error.to_string())),
                FromAppliance::Reply(_) | FromAppliance::Event(_) => {
                    Err(self.error(Code::Malformed, "the first message was no hello"))
                }
            }
        };
        let reply = timeout_at(deadline, exchange).await.unwrap_or_else(|_| {
            let text = format!("no hello within {} ms on {path}", HELLO_DEADLINE.as_millis());
            Err(self.error(Code::Timeout, text))
        })?;
        if reply.dev != self.name {
            return Err(self
                .error(Code::Invalid, format!("the appliance on {path} calls itself {}", reply.dev))
                .hint("give both the same name"));
        }
        Ok((socket, reply))
    }

    fn version(&self, theirs: u32) -> ApiError {
        let older = if theirs < VERSION { "ferroced" } else { "ferroce-ctld" };
        self.error(Code::Version, format!("it speaks protocol {theirs}, ferroce-ctld speaks {VERSION}"))
            .hint(format!("upgrade {older}"))
    }

    /// Carries requests and replies until the connection breaks (the reason) or no handle is left (`None`).
    async fn serve(&mut self, socket: &Seqpacket, stash: Option<Call>) -> Option<ApiError> {
        let mut waiting: HashMap<u64, Call> = HashMap::new();
        let end = self.serve_inner(socket, stash, &mut waiting).await;
        let error = end.clone().unwrap_or_else(|| self.error(Code::Gone, "control is stopping"));
        for (_, call) in waiting {
            let _ = call.answer.send(Err(error.clone()));
        }
        end
    }

    async fn serve_inner(
        &mut self,
        socket: &Seqpacket,
        stash: Option<Call>,
        waiting: &mut HashMap<u64, Call>,
    ) -> Option<ApiError> {
        if let Err(error) = self.subscribe(socket).await {
            if let Some(call) = stash {
                let _ = call.answer.send(Err(error.clone()));
            }
            return Some(error);
        }
        if let Some(call) = stash
            && let Err(error) = self.send(socket, call, waiting).await
        {
            return Some(error);
        }
        loop {
            // Receiving takes a packet and returns in one step, so the branch that is dropped has taken nothing.
            let step = tokio::select! {
                call = self.queue.recv() => match call {
                    Some(call) => self.send(socket, call, waiting).await,
                    None => return None,
                },
                message = receive(&self.name, socket) => message.and_then(|message| self.take(message, waiting)),
            };
            if let Err(error) = step {
                return Some(error);
            }
            // Callers that gave up at their deadline left entries behind.
            waiting.retain(|_, call| !call.answer.is_closed());
        }
    }

    async fn subscribe(&mut self, socket: &Seqpacket) -> Result<(), ApiError> {
        let (answer, _ignored) = oneshot::channel();
        let deadline = Instant::now() + CALL_DEADLINE;
        let mut nobody = HashMap::new();
        self.send(socket, Call { commands: vec![Command::Subscribe], deadline, answer }, &mut nobody).await?;
        self.subscription = self.next_id;
        Ok(())
    }

    async fn send(
        &mut self,
        socket: &Seqpacket,
        call: Call,
        waiting: &mut HashMap<u64, Call>,
    ) -> Result<(), ApiError> {
        self.next_id += 1;
        let request = FromClient::Request(Request { id: self.next_id, batch: call.commands.clone() });
        let bytes = match encode(&request) {
            Ok(bytes) => bytes,
            Err(error) => {
                let _ = call.answer.send(Err(error));
                return Ok(());
            }
        };
        // An appliance that does not read for so long is stuck; the connection is of no use then.
        match timeout_at(call.deadline, socket.send(&bytes)).await {
            Ok(Ok(())) => {
                self.state.borrow_mut().counters.requests += 1;
                waiting.insert(self.next_id, call);
                Ok(())
            }
            Ok(Err(e)) => {
                let error = self.error(Code::Gone, format!("send: {e}"));
                let _ = call.answer.send(Err(error.clone()));
                Err(error)
            }
            Err(_) => {
                let error = self.error(Code::Timeout, "does not read its socket");
                let _ = call.answer.send(Err(error.clone()));
                Err(error)
            }
        }
    }

    fn take(&self, message: FromAppliance, waiting: &mut HashMap<u64, Call>) -> Result<(), ApiError> {
        match message {
            FromAppliance::Reply(reply) if reply.id == self.subscription => {
                for outcome in reply.results {
                    // Without events a measurement's end is still found by asking, so this is no reason to part.
                    if let Err(error) = outcome.into_result() {
                        tracing::warn!(dev = self.name, %error, "no events from this appliance");
                    }
                }
            }
            FromAppliance::Reply(reply) => match waiting.remove(&reply.id) {
                Some(call) => {
                    let _ = call.answer.send(Ok(reply.results));
                }
                None => self.state.borrow_mut().counters.late_replies += 1,
            },
            FromAppliance::Event(event) => self.event(event),
            FromAppliance::Bye(Bye { error }) => return Err(self.error(error.code, error.to_string())),
            FromAppliance::Hello(_) => return Err(self.error(Code::Malformed, "a second hello")),
        }
        Ok(())
    }

    fn event(&self, event: Event) {
        {
            let mut state = self.state.borrow_mut();
            state.counters.events += 1;
            if let EventBody::Lost { count } = event.event {
                state.counters.events_lost += count;
            }
        }
        match event.event {
            EventBody::PerfEnded { .. } => tracing::debug!(dev = self.name, ?event, "event"),
            _ => tracing::info!(dev = self.name, ?event, "event"),
        }
        // No listener is no error.
        let _ = self.events.send(event);
    }
}

fn link_error(name: &str, code: Code, found: impl Into<String>) -> ApiError {
    ApiError::new(code, format!("appliance {name}"), "", found)
}

async fn receive(name: &str, socket: &Seqpacket) -> Result<FromAppliance, ApiError> {
    let bytes = socket.receive().await.map_err(|e| link_error(name, Code::Gone, format!("receive: {e}")))?;
    if bytes.is_empty() {
        return Err(
            link_error(name, Code::Gone, "it closed the connection").hint("ferroced stopped: see its log")
        );
    }
    decode(&bytes).map_err(|e| link_error(name, Code::Malformed, e.to_string()))
}

/// A connected, non-blocking SEQPACKET socket. Tokio's datagram type only lends its readiness: it is the one that owns a
/// descriptor soundly and never looks at what kind of socket that is.
struct Seqpacket(UnixDatagram);

impl Seqpacket {
    fn connect(path: &Path) -> std::io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        // A Unix connect does not wait: it is done, refused, or the listener's queue is full (EAGAIN).
        rustix::net::connect(&fd, &address)?;
        UnixDatagram::from_std(fd.into()).map(Seqpacket)
    }

    async fn send(&self, bytes: &[u8]) -> std::io::Result<()> {
        let write = || Ok(rustix::net::send(&self.0, bytes, SendFlags::NOSIGNAL)?);
        self.0.async_io(Interest::WRITABLE, write).await.map(|_| ())
    }

    /// One packet; empty when the peer closed. A packet over the limit is an error.
    async fn receive(&self) -> std::io::Result<Vec<u8>> {
        let read = || {
            let mut buf = vec![0u8; MAX_MESSAGE_BYTES + 1];
            let (_, whole) = rustix::net::recv(&self.0, &mut buf[..], RecvFlags::TRUNC)?;
            buf.truncate(whole);
            Ok((buf, whole))
        };
        let (buf, whole) = self.0.async_io(Interest::READABLE, read).await?;
        if whole > MAX_MESSAGE_BYTES {
            return Err(std::io::Error::other(format!(
                "a message of {whole} bytes, at most {MAX_MESSAGE_BYTES}"
            )));
        }
        Ok(buf)
    }
}

//! One connection of the control socket.
//!
//! Owns the descriptor, what waits to be sent and the batch in progress. Invariant: everything is bounded: at most one
//! batch is in progress and nothing more is read until its reply has left; at most [`MAX_EVENTS`] events wait, later
//! ones are counted and reported as lost. Called by the server on the housekeeping thread. Never blocks.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use ferroce_api::appliance::{
    Bye, Command, Event, EventBody, FromAppliance, FromClient, Hello, MAX_MESSAGE_BYTES, Outcome,
    RESULT_RESERVE_BYTES, Reply, Request, Role, decode_client, encode,
};
use ferroce_api::{ApiError, Code};
use rustix::io::Errno;

use super::socket::{self, Received};

/// Time for the hello.
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for a client to take what waits for it.
pub const SEND_TIMEOUT: Duration = Duration::from_secs(10);
/// Events that wait for a slow reader.
pub const MAX_EVENTS: usize = 256;
/// Bytes of a reply around its results.
const ENVELOPE_BYTES: usize = 128;
/// Most unread messages that are thrown away at the end: an unread one would turn our last words into a reset.
const MAX_DISCARD: usize = 64;

/// A batch in progress.
#[derive(Debug)]
struct Job {
    id: u64,
    commands: std::vec::IntoIter<Command>,
    results: Vec<Outcome>,
    used_bytes: usize,
}

/// A message that waits to be sent.
#[derive(Debug)]
struct Waiting {
    bytes: Vec<u8>,
    is_event: bool,
}

/// A connection.
#[derive(Debug)]
pub struct Client {
    fd: OwnedFd,
    /// Counts connections, for logs.
    number: u64,
    pid: Option<i32>,
    name: String,
    role: Option<Role>,
    since: Instant,
    out: VecDeque<Waiting>,
    events_waiting: usize,
    blocked_since: Option<Instant>,
    subscribed: bool,
    event_seq: u64,
    lost: u64,
    job: Option<Job>,
    ended: bool,
    cut_off: bool,
}

/// What a message asks of the server.
#[derive(Debug)]
pub enum Input {
    /// Nothing to do.
    Nothing,
    /// The first message.
    Hello(Hello),
}

impl Client {
    /// A new connection.
    pub fn new(fd: OwnedFd, number: u64, pid: Option<i32>) -> Self {
        Client {
            fd,
            number,
            pid,
            name: String::new(),
            role: None,
            since: Instant::now(),
            out: VecDeque::new(),
            events_waiting: 0,
            blocked_since: None,
            subscribed: false,
            event_seq: 0,
            lost: 0,
            job: None,
            ended: false,
            cut_off: false,
        }
    }

    /// What it may do; `None` before its hello.
    pub const fn role(&self) -> Option<Role> {
        self.role
    }
    /// True when it is to be dropped.
    pub const fn ended(&self) -> bool {
        self.ended
    }
    /// True when it ended because of what it did or left undone.
    pub const fn was_cut_off(&self) -> bool {
        self.cut_off
    }
    /// True while a batch is in progress.
    pub const fn busy(&self) -> bool {
        self.job.is_some()
    }
    /// True when a message may be read: none is in progress and the last reply has left.
    pub fn wants_input(&self) -> bool {
        !self.ended && self.job.is_none() && self.out.len() == self.events_waiting
    }
    /// True when something waits to be sent.
    pub fn wants_output(&self) -> bool {
        !self.ended && !self.out.is_empty()
    }
    /// For logs.
    pub fn describe(&self) -> String {
        let pid = self.pid.map_or_else(|| "?".into(), |pid| pid.to_string());
        format!("client {} `{}` (process {pid})", self.number, self.name)
    }

    /// Accepts a hello of the right version: sends `answer`.
    pub fn welcome(&mut self, hello: &Hello, answer: &FromAppliance) {
        self.role = Some(hello.role);
        self.name = hello.name.chars().filter(|c| !c.is_control()).take(64).collect();
        self.push(answer, false);
    }

    /// Reads one message. Anything wrong ends the connection with the reason.
    pub fn read(&mut self, buffer: &mut [u8]) -> Input {
        let message = match socket::recv(self.fd.as_fd(), buffer) {
            Ok(Received::Nothing) => return Input::Nothing,
            Ok(Received::Closed) => {
                self.ended = true;
                return Input::Nothing;
            }
            Ok(Received::TooLong(length)) => {
                let allowed = format!("at most {MAX_MESSAGE_BYTES} bytes");
                self.end(ApiError::new(Code::TooBig, "message", format!("{length} bytes"), allowed));
                return Input::Nothing;
            }
            Ok(Received::Message(message)) => message,
            Err(errno) => {
                self.broken(errno);
                return Input::Nothing;
            }
        };
        match (decode_client(message), self.role) {
            (Ok(FromClient::Hello(hello)), None) => Input::Hello(hello),
            (Ok(FromClient::Request(request)), Some(_)) => {
                self.start(request);
                Input::Nothing
            }
            (Ok(FromClient::Hello(_)), Some(_)) => self.refuse("a second hello", "one hello, then requests"),
            (Ok(FromClient::Request(_)), None) => self.refuse("a request", "a hello first"),
            (Err(error), _) => {
                self.end(error);
                Input::Nothing
            }
        }
    }

    fn refuse(&mut self, asked: &str, allowed: &str) -> Input {
        self.end(ApiError::new(Code::Malformed, "message", asked, allowed));
        Input::Nothing
    }

    fn start(&mut self, request: Request) {
        let results = Vec::with_capacity(request.batch.len());
        let commands = request.batch.into_iter();
        self.job = Some(Job { id: request.id, commands, results, used_bytes: ENVELOPE_BYTES });
        self.finish_job();
    }

    /// The next command of the batch, with the bytes that its answer may take: what is left when every later command
    /// keeps its reserve.
    pub fn next_command(&mut self) -> Option<(Command, usize)> {
        let job = self.job.as_mut()?;
        let command = job.commands.next()?;
        let reserved = job.commands.len().saturating_mul(RESULT_RESERVE_BYTES);
        let room = MAX_MESSAGE_BYTES.saturating_sub(job.used_bytes).saturating_sub(reserved);
        Some((command, room))
    }

    /// Adds the answer of the command last taken.
    pub fn answer(&mut self, outcome: Outcome) {
        let Some(job) = self.job.as_mut() else { return };
        let bytes = serde_json::to_vec(&outcome).map_or(0, |text| text.len());
        job.used_bytes = job.used_bytes.saturating_add(bytes + 1);
        job.results.push(outcome);
        self.finish_job();
    }

    fn finish_job(&mut self) {
        if self.job.as_ref().is_none_or(|job| job.commands.len() > 0) {
            return;
        }
        let Some(job) = self.job.take() else { return };
        self.push(&FromAppliance::Reply(Reply { id: job.id, results: job.results }), false);
    }

    /// Wants events from now on.
    pub fn subscribe(&mut self) {
        self.subscribed = true;
    }

    /// Sends an event if it wants them; counts it as lost when too many wait.
    pub fn event(&mut self, event: &EventBody) {
        if !self.subscribed || self.ended {
            return;
        }
        if self.events_waiting >= MAX_EVENTS {
            self.lost += 1;
            return;
        }
        if self.lost > 0 {
            let count = std::mem::take(&mut self.lost);
            self.push_event(EventBody::Lost { count });
        }
        self.push_event(event.clone());
    }

    fn push_event(&mut self, event: EventBody) {
        self.event_seq += 1;
        self.push(&FromAppliance::Event(Event { seq: self.event_seq, event }), true);
    }

    fn push(&mut self, message: &FromAppliance, is_event: bool) {
        match encode(message) {
            Ok(bytes) => {
                self.events_waiting += usize::from(is_event);
                self.out.push_back(Waiting { bytes, is_event });
            }
            Err(error) => {
                tracing::error!(client = self.describe(), %error, "a message of our own does not encode");
                self.end(error);
            }
        }
    }

    /// Sends what the socket takes.
    pub fn flush(&mut self) {
        while let Some(message) = self.out.front() {
            match socket::send(self.fd.as_fd(), &message.bytes) {
                Ok(true) => {
                    self.events_waiting -= usize::from(message.is_event);
                    self.out.pop_front();
                    self.blocked_since = None;
                }
                Ok(false) => {
                    self.blocked_since.get_or_insert_with(Instant::now);
                    return;
                }
                Err(errno) => return self.broken(errno),
            }
        }
    }

    /// Ends the connection if the client lets us wait for too long.
    pub fn check_deadlines(&mut self, now: Instant) {
        if self.role.is_none() && now.duration_since(self.since) > HELLO_TIMEOUT {
            let allowed = format!("{} s", HELLO_TIMEOUT.as_secs());
            self.end(ApiError::new(Code::Timeout, "hello", "no hello yet", allowed));
        }
        if self.blocked_since.is_some_and(|since| now.duration_since(since) > SEND_TIMEOUT) {
            let allowed = format!("{} s", SEND_TIMEOUT.as_secs());
            self.end(ApiError::new(Code::Timeout, "reader", "no message taken", allowed));
        }
    }

    /// Ends the connection and says why, as far as the client still listens.
    pub fn end(&mut self, error: ApiError) {
        if self.ended {
            return;
        }
        tracing::warn!(client = self.describe(), %error, "connection ended");
        self.cut_off = true;
        self.bye(error);
    }

    /// Ends the connection without a warning in the log.
    pub fn bye(&mut self, error: ApiError) {
        self.ended = true;
        self.job = None;
        while let Some(message) = self.out.pop_front() {
            if !matches!(socket::send(self.fd.as_fd(), &message.bytes), Ok(true)) {
                return;
            }
        }
        if let Ok(bytes) = encode(&FromAppliance::Bye(Bye { error })) {
            let _ = socket::send(self.fd.as_fd(), &bytes);
        }
        let mut byte = [0u8; 1];
        for _ in 0..MAX_DISCARD {
            if matches!(
                socket::recv(self.fd.as_fd(), &mut byte),
                Ok(Received::Nothing | Received::Closed) | Err(_)
            ) {
                break;
            }
        }
    }

    fn broken(&mut self, errno: Errno) {
        tracing::info!(client = self.describe(), %errno, "connection lost");
        self.ended = true;
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

//! The tests themselves, over any [`Channel`].

use std::sync::atomic::AtomicBool;
use std::sync::mpsc::Sender;

use ferroce_services::clock::now_ns;
use ferroce_services::pattern;
use ferroce_services::rate::RateWindow;
use ferroce_services::{Fault, LatencyRecorder, PerfMode, PerfOp, PerfReport, PerfSpec, PerfTotals, Role};

use super::{Channel, SockError, shape};

/// A read's requests outstanding: so few bytes that they always fit into a socket's buffer, whatever the depth asked.
const MOST_REQUESTS: u64 = 1024;

/// Runs the test, tells its result, then helps the peer until it is stopped.
pub(super) fn whole<C: Channel>(
    spec: &PerfSpec,
    channel: Result<C, SockError>,
    stop: &AtomicBool,
    result: &Sender<Result<PerfReport, SockError>>,
) {
    let mut channel = match channel {
        Ok(channel) => channel,
        Err(error) => {
            let _ = result.send(Err(error));
            return;
        }
    };
    let outcome = run(spec, &mut channel);
    let worked = outcome.is_ok();
    // Nobody listens any more if the host gave up: then there is nothing to tell.
    let _ = result.send(outcome);
    if worked {
        channel.serve(stop);
    }
}

pub(super) fn run<C: Channel>(spec: &PerfSpec, channel: &mut C) -> Result<PerfReport, SockError> {
    let mut test = Test { spec, channel, data_at: shape(spec).data_at, rate: RateWindow::new(span(spec)) };
    test.first_message();
    match (spec.role, spec.mode) {
        (Role::Client, PerfMode::Lat) => test.ask(),
        (Role::Client, PerfMode::Bw) => test.push(),
        (Role::Server, _) => test.serve(),
    }
}

fn span(spec: &PerfSpec) -> u64 {
    (u64::from(spec.tx_depth) * 4).max(512)
}

struct Test<'t, C> {
    spec: &'t PerfSpec,
    channel: &'t mut C,
    data_at: usize,
    rate: RateWindow,
}

impl<C: Channel> Test<'_, C> {
    fn total(&self) -> u64 {
        if self.spec.duration_ns.is_some() { u64::MAX } else { self.spec.warmup + self.spec.iters }
    }

    fn own_seed(&self) -> u64 {
        match self.spec.role {
            Role::Client => self.spec.seed,
            Role::Server => !self.spec.seed,
        }
    }

    /// True if this side's messages carry the data under test.
    fn sends_data(&self) -> bool {
        match (self.spec.op, self.spec.mode, self.spec.role) {
            (PerfOp::Send, PerfMode::Lat, _) => true,
            (PerfOp::Send | PerfOp::Write, _, role) => role == Role::Client,
            (PerfOp::Read | PerfOp::FetchAdd | PerfOp::CmpSwap, _, role) => role == Role::Server,
        }
    }

    fn receives_data(&self) -> bool {
        !self.sends_data() || (self.spec.op == PerfOp::Send && self.spec.mode == PerfMode::Lat)
    }

    fn first_message(&mut self) {
        let seed = self.own_seed();
        let at = if self.sends_data() { self.data_at } else { 0 };
        if let Some(data) = self.channel.outgoing().get_mut(at..) {
            pattern::fill(data, seed, 0, 0);
        }
    }

    /// Sends message `number`; with checked data it differs from all others.
    fn send(&mut self, number: u64) -> Result<(), SockError> {
        if self.spec.check_data && self.sends_data() {
            let (seed, at) = (self.own_seed(), self.data_at);
            if let Some(data) = self.channel.outgoing().get_mut(at..) {
                pattern::fill(data, seed, number, 0);
            }
        }
        self.channel.send()
    }

    /// Receives message `number`; false if no more will come.
    fn recv(&mut self, number: u64) -> Result<bool, SockError> {
        if !self.channel.recv()? {
            return Ok(false);
        }
        if self.spec.check_data && self.receives_data() {
            let at = if self.sends_data() { 0 } else { self.data_at };
            let data = self.channel.incoming().get(at..).unwrap_or_default();
            pattern::check(data, !self.own_seed(), number, 0).map_err(|m| {
                let (offset, expected, got) = (m.offset, m.expected, m.got);
                SockError::Data(Fault::Data { message: number, offset, expected, got })
            })?;
        }
        Ok(true)
    }

    fn report(&self, messages: u64, elapsed_ns: u64, samples: Option<LatencyRecorder>) -> PerfReport {
        let peak_msgs_per_s = if self.spec.mode == PerfMode::Bw { self.rate.best() } else { None };
        let totals = PerfTotals { messages, elapsed_ns, peak_msgs_per_s, ..PerfTotals::default() };
        PerfReport::new(*self.spec, totals, samples)
    }

    fn is_over(&self, number: u64, started: u64) -> bool {
        number >= self.total()
            || self.spec.duration_ns.is_some_and(|d| number > self.spec.warmup && now_ns() - started >= d)
    }

    /// Latency client.
    fn ask(&mut self) -> Result<PerfReport, SockError> {
        let mut samples = LatencyRecorder::new();
        let (mut number, mut started) = (0, now_ns());
        while !self.is_over(number, started) {
            if number == self.spec.warmup {
                started = now_ns();
            }
            let asked_at = now_ns();
            self.send(number)?;
            if !self.recv(number)? {
                return Err(SockError::Ended { done: number });
            }
            if number >= self.spec.warmup {
                samples.record(now_ns() - asked_at);
            }
            number += 1;
        }
        let elapsed = now_ns() - started;
        self.channel.end()?;
        Ok(self.report(number - self.spec.warmup, elapsed, Some(samples)))
    }

    /// Bandwidth client.
    fn push(&mut self) -> Result<PerfReport, SockError> {
        let window = match self.spec.op {
            PerfOp::Send => u64::MAX,
            PerfOp::Write => u64::from(self.spec.tx_depth),
            PerfOp::Read | PerfOp::FetchAdd | PerfOp::CmpSwap => {
                u64::from(self.spec.tx_depth).min(MOST_REQUESTS)
            }
        };
        let (mut sent, mut done, mut started) = (0, 0, now_ns());
        while !self.is_over(sent, started) {
            if sent == self.spec.warmup {
                while done < sent {
                    done = self.completion(done)?;
                }
                started = now_ns();
            }
            self.send(sent)?;
            sent += 1;
            while sent - done >= window {
                done = self.completion(done)?;
            }
            if self.spec.op == PerfOp::Send && sent % 64 == 0 {
                self.rate.mark(now_ns(), sent);
            }
        }
        self.channel.end()?;
        while done < sent {
            done = self.completion(done)?;
        }
        let elapsed = now_ns() - started;
        Ok(self.report(sent - self.spec.warmup, elapsed, None))
    }

    /// Waits for the next answer; returns how many messages are done by it.
    fn completion(&mut self, done: u64) -> Result<u64, SockError> {
        if !self.recv(done)? {
            return Err(SockError::Ended { done });
        }
        let now_done = if !matches!(self.spec.op, PerfOp::Send | PerfOp::Write) {
            done + 1
        } else {
            let bytes = self.channel.incoming().try_into().unwrap_or([0; 8]);
            u64::from_le_bytes(bytes)
        };
        self.rate.mark(now_ns(), now_done);
        Ok(now_done)
    }

    /// Server of every test: answers until the client says that no more will come.
    fn serve(&mut self) -> Result<PerfReport, SockError> {
        let every = u64::from(self.spec.signal_every());
        let warmup = self.spec.warmup;
        let (mut number, mut acknowledged, mut started, mut ended) = (0, 0, now_ns(), 0);
        while self.recv(number)? {
            ended = now_ns();
            if number == warmup {
                started = ended;
            }
            number += 1;
            match (self.spec.op, self.spec.mode) {
                (PerfOp::Send | PerfOp::Write, PerfMode::Lat)
                | (PerfOp::Read | PerfOp::FetchAdd | PerfOp::CmpSwap, _) => self.send(number - 1)?,
                (PerfOp::Write, PerfMode::Bw) if number.is_multiple_of(every) || number == warmup => {
                    acknowledged = self.acknowledge(number)?;
                }
                (PerfOp::Send, PerfMode::Bw) if number == warmup => {
                    acknowledged = self.acknowledge(number)?
                }
                (PerfOp::Send | PerfOp::Write, PerfMode::Bw) => {}
            }
        }
        if self.spec.mode == PerfMode::Bw
            && matches!(self.spec.op, PerfOp::Send | PerfOp::Write)
            && acknowledged < number
        {
            self.acknowledge(number)?;
        }
        if self.spec.duration_ns.is_none() && number != self.total() {
            return Err(SockError::Count { expected: self.total(), got: number });
        }
        Ok(self.report(number.saturating_sub(warmup), ended.saturating_sub(started), None))
    }

    fn acknowledge(&mut self, number: u64) -> Result<u64, SockError> {
        self.channel.outgoing().copy_from_slice(&number.to_le_bytes());
        self.channel.send()?;
        Ok(number)
    }
}

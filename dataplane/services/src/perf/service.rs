//! The perf state machine. One exchange or one bounded burst per poll.

use ferroce_verbs::{
    PostError, QpType, Queues, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Service, Sge, Wc,
};

use super::layout::Layout;
use super::report::PerfTotals;
use super::{PerfEndpoints, PerfHandle, PerfLayout, PerfMode, PerfOp, PerfReport, PerfSpec, Role, SpecError};
use crate::clock;
use crate::cq::{self, BATCH, RECV_MARK};
use crate::fault::{Fault, ServiceError};
use crate::handle::Progress;
use crate::latency::LatencyRecorder;
use crate::pattern;
use crate::rate::RateWindow;

/// Most work requests posted to a queue in one poll.
const POST_BURST: usize = 64;

/// A running test. Invariants: `completed <= posted <= total`; `received <= recv_posted`; at most one message of a
/// latency client is unanswered.
pub struct PerfService {
    spec: PerfSpec,
    layout: Layout,
    ends: PerfEndpoints,
    progress: Progress<PerfReport>,
    batch: Box<[Wc]>,
    inline: Box<[u8]>,
    /// Messages to post in all; `u64::MAX` until a duration is over.
    total: u64,
    /// Sends posted, sends known to be complete, and whether the last one posted asked for a completion.
    posted: u64,
    completed: u64,
    tail_signalled: bool,
    /// Receives posted; messages received (write latency: seen in the buffer).
    recv_posted: u64,
    received: u64,
    /// When the unanswered message of a latency client was posted.
    asked_at_ns: Option<u64>,
    started_ns: Option<u64>,
    ended_ns: u64,
    progress_ns: Option<u64>,
    /// Next slot that a stopped passive server compares.
    verified: u64,
    samples: Option<LatencyRecorder>,
    rate: RateWindow,
}

impl PerfService {
    /// A service on connected endpoints, and what its host watches it with.
    ///
    /// # Errors
    /// The specification is refused, or the endpoints' memory was prepared for a smaller one.
    pub fn new(spec: PerfSpec, endpoints: PerfEndpoints) -> Result<(Self, PerfHandle), SpecError> {
        endpoints.local.check_size(&spec)?;
        not_there_yet(&spec)?;
        let (progress, handle) = Progress::new();
        let mut inline = vec![0; if spec.is_inline() { spec.size as usize } else { 0 }].into_boxed_slice();
        pattern::fill(&mut inline, spec.own_seed(), 0, 0);
        let samples = (spec.mode == PerfMode::Lat && spec.role == Role::Client).then(LatencyRecorder::new);
        let span = (u64::from(spec.tx_depth) * 4).max(512);
        let total = if spec.duration_ns.is_some() { u64::MAX } else { spec.warmup + spec.iters };
        let service = PerfService {
            layout: spec.layout(),
            ends: endpoints,
            progress,
            batch: vec![Wc::EMPTY; BATCH].into_boxed_slice(),
            inline,
            total,
            posted: 0,
            completed: 0,
            tail_signalled: true,
            recv_posted: 0,
            received: 0,
            asked_at_ns: None,
            started_ns: None,
            ended_ns: 0,
            progress_ns: None,
            verified: 0,
            samples,
            rate: RateWindow::new(span),
            spec,
        };
        Ok((service, handle))
    }

    /// Messages done, warm-up included.
    fn done(&self) -> u64 {
        match (self.spec.role, self.spec.mode, self.spec.op) {
            (Role::Client, PerfMode::Bw, _)
            | (Role::Client, PerfMode::Lat, PerfOp::Read | PerfOp::FetchAdd | PerfOp::CmpSwap) => {
                self.completed
            }
            (Role::Client, PerfMode::Lat, _) | (Role::Server, ..) => self.received,
        }
    }

    /// Messages to post before a pause: the warm-up drains before the measurement starts.
    fn phase_end(&self) -> u64 {
        if self.done() < self.spec.warmup { self.spec.warmup } else { self.total }
    }

    fn step<Q: Queues>(&mut self, queues: &mut Q, now_ns: u64) -> Result<usize, Fault> {
        let mut work = self.post_receives(queues)?;
        work += self.drain(queues)?;
        self.start_clock(now_ns);
        work += match (self.spec.role, self.spec.mode, self.spec.op) {
            (Role::Client, PerfMode::Bw, _) => self.fill_window(queues)?,
            (Role::Client, PerfMode::Lat, PerfOp::Write) => self.watch()? + self.ask(queues)?,
            (Role::Client, PerfMode::Lat, _) => self.ask(queues)?,
            (Role::Server, PerfMode::Lat, PerfOp::Send) => self.answer(queues)?,
            (Role::Server, PerfMode::Lat, PerfOp::Write) => self.watch()? + self.answer(queues)?,
            (Role::Server, ..) => 0,
        };
        Ok(work)
    }

    /// The measurement starts when the warm-up is over; a duration ends it.
    fn start_clock(&mut self, now_ns: u64) {
        let may_start = match self.spec.role {
            Role::Client => self.done() >= self.spec.warmup,
            Role::Server => self.done() > self.spec.warmup || (self.spec.warmup == 0 && self.done() > 0),
        };
        if self.started_ns.is_none() && may_start {
            self.started_ns = Some(now_ns);
        }
        if let (Some(started), Some(duration), Role::Client) =
            (self.started_ns, self.spec.duration_ns, self.spec.role)
            && self.total == u64::MAX
            && now_ns.saturating_sub(started) >= duration
        {
            // A tail without a completion could never be known as done: one more message then asks for one.
            self.total = if self.tail_signalled { self.posted } else { self.posted + 1 };
        }
    }

    fn post_receives<Q: Queues>(&mut self, queues: &mut Q) -> Result<usize, Fault> {
        let wanted = self.spec.op == PerfOp::Send
            && (self.spec.role == Role::Server || self.spec.mode == PerfMode::Lat);
        if !wanted {
            return Ok(0);
        }
        let depth = u64::from(self.spec.recv_queue_depth());
        let mut count = 0;
        while count < POST_BURST && self.recv_posted < self.total && self.recv_posted - self.received < depth
        {
            let sge = [self.local_sge(self.layout.place(&self.layout.receive, self.recv_posted))];
            let sg_list = if self.spec.size == 0 { &sge[..0] } else { &sge[..] };
            match queues
                .post_recv(self.ends.qps[0].qpn, &RecvWr { wr_id: RECV_MARK | self.recv_posted, sg_list })
            {
                Ok(()) => self.recv_posted += 1,
                Err(PostError::Full) => break,
                Err(error) => return Err(Fault::Post(error)),
            }
            count += 1;
        }
        Ok(count)
    }

    fn local_sge(&self, offset: u64) -> Sge {
        let addr = self.ends.local_iova.wrapping_add(offset);
        Sge { addr, length: self.spec.size, lkey: self.ends.local_lkey }
    }

    /// Takes the completions of both queues.
    fn drain<Q: Queues>(&mut self, queues: &mut Q) -> Result<usize, Fault> {
        // Taken out and put back: an empty box costs nothing, and the completions can be handled with `&mut self`.
        let mut batch = std::mem::take(&mut self.batch);
        let result = self.drain_into(queues, &mut batch);
        self.batch = batch;
        result
    }

    fn drain_into<Q: Queues>(&mut self, queues: &mut Q, batch: &mut [Wc]) -> Result<usize, Fault> {
        let queues_of = (self.ends.send_cq, self.ends.recv_cq);
        cq::drain(queues, queues_of, batch, |wc| self.completion(wc))
    }

    fn completion(&mut self, wc: &Wc) -> Result<(), Fault> {
        let unexpected = Fault::UnexpectedCompletion { wr_id: wc.wr_id };
        if wc.wr_id & RECV_MARK != 0 {
            if wc.wr_id & !RECV_MARK != self.received || self.received >= self.recv_posted {
                return Err(unexpected);
            }
            return self.receive(wc);
        }
        if wc.wr_id < self.completed || wc.wr_id >= self.posted {
            return Err(unexpected);
        }
        let from = self.completed;
        self.completed = wc.wr_id + 1;
        if self.spec.op == PerfOp::Read {
            if self.spec.mode == PerfMode::Lat {
                self.sample(from);
            }
            self.check_reads(from, self.completed)?;
        }
        Ok(())
    }

    fn receive(&mut self, wc: &Wc) -> Result<(), Fault> {
        let message = self.received;
        if wc.byte_len != self.spec.size {
            return Err(Fault::Length { message, expected: self.spec.size, got: wc.byte_len });
        }
        self.sample(message);
        self.received += 1;
        if self.spec.check_data {
            let at = self.layout.place(&self.layout.receive, message);
            let (size, seed) = (self.spec.size.into(), self.spec.peer_seed());
            self.ends.local.check(at, size, seed, message, message)?;
        }
        Ok(())
    }

    /// A READ's data is compared and then spoilt, so that stale data cannot pass the next time.
    fn check_reads(&mut self, from: u64, to: u64) -> Result<(), Fault> {
        if !self.spec.check_data {
            return Ok(());
        }
        let (size, seed) = (u64::from(self.spec.size), self.spec.peer_seed());
        for message in from..to {
            let at = self.layout.place(&self.layout.receive, message);
            self.ends.local.check(at, size, seed, message % self.layout.outgoing.slots, message)?;
            self.ends.local.set(at, size, 0xee)?;
        }
        Ok(())
    }

    /// Ends the round trip of `message`.
    fn sample(&mut self, message: u64) {
        if let (Some(asked_at), Some(samples)) = (self.asked_at_ns.take(), self.samples.as_mut())
            && message >= self.spec.warmup
        {
            samples.record(clock::now_ns().saturating_sub(asked_at));
        }
    }

    /// Write latency: the next message is there when the last byte of the buffer carries its number.
    fn watch(&mut self) -> Result<usize, Fault> {
        if self.received >= self.total {
            return Ok(0);
        }
        let at = self.layout.place(&self.layout.receive, 0);
        let size = u64::from(self.spec.size);
        if self.ends.local.byte(at + size - 1)? != write_mark(self.received) {
            return Ok(0);
        }
        // An answer to what was not asked is the peer's mistake; it must not be counted as a round trip.
        if self.spec.role == Role::Client && self.received >= self.posted {
            return Ok(0);
        }
        let message = self.received;
        self.sample(message);
        self.received += 1;
        if self.spec.check_data {
            self.ends.local.check(at, size - 1, self.spec.peer_seed(), message, message)?;
        }
        Ok(1)
    }

    /// Latency client: the next message, if the last one was answered.
    fn ask<Q: Queues>(&mut self, queues: &mut Q) -> Result<usize, Fault> {
        if self.done() < self.posted || self.posted >= self.phase_end() {
            return Ok(0);
        }
        let asked_at = clock::now_ns();
        if !self.post(queues)? {
            return Ok(0);
        }
        self.asked_at_ns = Some(asked_at);
        Ok(1)
    }

    /// Latency server: an answer to each message received.
    fn answer<Q: Queues>(&mut self, queues: &mut Q) -> Result<usize, Fault> {
        let mut count = 0;
        while count < POST_BURST && self.posted < self.received && self.post(queues)? {
            count += 1;
        }
        Ok(count)
    }

    fn fill_window<Q: Queues>(&mut self, queues: &mut Q) -> Result<usize, Fault> {
        let mut count = 0;
        while count < POST_BURST && self.posted < self.phase_end() && self.post(queues)? {
            count += 1;
        }
        Ok(count)
    }

    /// Posts the next message; false if there is no room now.
    fn post<Q: Queues>(&mut self, queues: &mut Q) -> Result<bool, Fault> {
        if self.posted - self.completed >= u64::from(self.spec.send_queue_depth()) {
            return Ok(false);
        }
        let message = self.posted;
        let every = u64::from(self.spec.signal_every());
        let always = self.spec.mode == PerfMode::Lat && self.spec.op == PerfOp::Read;
        let signalled =
            always || (message + 1).is_multiple_of(every) || message + 1 == self.phase_end_of(message);
        self.write_message(message)?;
        let mut flags = if signalled { SendFlags::SIGNALED } else { SendFlags::empty() };
        let inline: &[u8] = if self.spec.is_inline() {
            flags |= SendFlags::INLINE;
            &self.inline
        } else {
            &[]
        };
        let local = match self.spec.op {
            PerfOp::Read => self.layout.place(&self.layout.receive, message),
            _ => self.layout.place(&self.layout.outgoing, message),
        };
        let sge = [self.local_sge(local)];
        let sg_list = if self.spec.size == 0 || self.spec.is_inline() { &sge[..0] } else { &sge[..] };
        let wr = SendWr { wr_id: message, op: self.operation(message), sg_list, inline, flags, ud: None };
        match queues.post_send(self.ends.qps[0].qpn, &wr) {
            Ok(()) => {
                self.posted += 1;
                self.tail_signalled = signalled;
                Ok(true)
            }
            Err(PostError::Full) => Ok(false),
            Err(error) => Err(Fault::Post(error)),
        }
    }

    /// The phase that `message` belongs to ends there, whatever is done by now (a server's answers lag behind).
    fn phase_end_of(&self, message: u64) -> u64 {
        if message < self.spec.warmup { self.spec.warmup } else { self.total }
    }

    fn operation(&self, message: u64) -> SendOp {
        let at = |offset: u64| RemoteAddr(self.ends.qps[0].remote_addr.0.wrapping_add(offset));
        let rkey = self.ends.qps[0].remote_rkey;
        match self.spec.op {
            PerfOp::Send => SendOp::Send,
            PerfOp::Write => {
                SendOp::Write { remote_addr: at(self.layout.place(&self.layout.receive, message)), rkey }
            }
            PerfOp::Read | PerfOp::FetchAdd | PerfOp::CmpSwap => {
                SendOp::Read { remote_addr: at(self.layout.place(&self.layout.outgoing, message)), rkey }
            }
        }
    }

    /// What changes from message to message: everything when data is checked, the last byte of a write for latency.
    fn write_message(&mut self, message: u64) -> Result<(), Fault> {
        let at = self.layout.place(&self.layout.outgoing, message);
        let (size, seed) = (u64::from(self.spec.size), self.spec.own_seed());
        let write_latency = self.spec.op == PerfOp::Write && self.spec.mode == PerfMode::Lat;
        let changes = self.spec.check_data && (self.spec.op == PerfOp::Send || write_latency);
        if self.spec.is_inline() {
            // Static data is that of the slot, as prepared in memory.
            let number = if changes { message } else { message % self.layout.outgoing.slots };
            if self.spec.check_data {
                pattern::fill(&mut self.inline, seed, number, 0);
            }
            if let (true, Some(last)) = (write_latency, self.inline.last_mut()) {
                *last = write_mark(message);
            }
            return Ok(());
        }
        if changes {
            self.ends.local.fill(at, size, seed, message)?;
        }
        if write_latency {
            self.ends.local.write(at + size - 1, &[write_mark(message)])?;
        }
        Ok(())
    }

    /// True when nothing is left to do.
    fn is_complete(&self) -> bool {
        let all = |count: u64| count == self.total;
        match (self.spec.role, self.spec.mode, self.spec.op) {
            (Role::Client, PerfMode::Bw, _) => all(self.completed),
            (Role::Client, PerfMode::Lat, PerfOp::Read | PerfOp::FetchAdd | PerfOp::CmpSwap) => {
                all(self.completed)
            }
            (Role::Client, PerfMode::Lat, PerfOp::Send | PerfOp::Write)
            | (Role::Server, PerfMode::Lat, PerfOp::Send | PerfOp::Write) => {
                all(self.completed) && all(self.received)
            }
            (Role::Server, PerfMode::Bw, PerfOp::Send) => all(self.received),
            (Role::Server, ..) => false,
        }
    }

    /// A stopped server of a checked write test compares one slot per poll; true when it has seen them all.
    fn verify_written(&mut self) -> Result<bool, Fault> {
        let written = self.spec.check_data
            && self.spec.is_passive()
            && self.spec.op == PerfOp::Write
            && self.verified < self.layout.receive.slots.min(self.total);
        if !written {
            return Ok(true);
        }
        let (slot, size) = (self.verified, u64::from(self.spec.size));
        let at = self.layout.place(&self.layout.receive, slot);
        self.verified += 1;
        // With a duration nobody knows here how many slots the client came to use; the first one at least.
        if self.spec.duration_ns.is_some() && slot > 0 && self.ends.local.is_untouched(at, size)? {
            return Ok(false);
        }
        self.ends.local.check(at, size, self.spec.peer_seed(), slot, slot)?;
        Ok(false)
    }

    fn finish(&mut self, stopped: bool) {
        let totals = PerfTotals {
            messages: self.done().saturating_sub(self.spec.warmup),
            elapsed_ns: self.started_ns.map_or(0, |started| self.ended_ns.saturating_sub(started)),
            peak_msgs_per_s: if self.spec.mode == PerfMode::Bw { self.rate.best() } else { None },
            stopped,
            ..PerfTotals::default()
        };
        self.progress.set_done(self.done());
        self.progress.finish(Ok(PerfReport::new(self.spec, totals, self.samples.take())));
    }

    fn fail(&mut self, fault: Fault) {
        self.progress.finish(Err(ServiceError { fault, qpn: self.ends.qps[0].qpn, done: self.done() }));
    }

    fn after_step(&mut self, work: usize, now_ns: u64) {
        if work > 0 {
            self.progress_ns = Some(now_ns);
            self.ended_ns = now_ns;
            self.progress.set_done(self.done());
            if self.spec.mode == PerfMode::Bw && self.started_ns.is_some() {
                self.rate.mark(now_ns, self.done());
            }
        }
        if self.is_complete() {
            return self.finish(false);
        }
        let waited_ns = now_ns.saturating_sub(*self.progress_ns.get_or_insert(now_ns));
        let deadline = self.spec.progress_deadline_ns;
        if deadline > 0 && waited_ns > deadline && !self.spec.is_passive() {
            self.fail(Fault::Stalled { waited_ns });
        }
    }
}

/// What is still to come.
fn not_there_yet(spec: &PerfSpec) -> Result<(), SpecError> {
    let missing = [
        ("connection", spec.connection != QpType::Rc),
        ("qps", spec.qps > 1),
        ("layout", spec.layout != PerfLayout::Ours),
        ("atomics", spec.op.is_atomic()),
        ("bidirectional", spec.bidirectional),
        ("events", spec.events),
        ("rate", spec.rate.is_some()),
        ("margin", spec.margin_ns > 0),
        ("post_list", spec.post_list > 1),
    ];
    match missing.iter().find(|(_, asked)| *asked) {
        Some((attribute, _)) => Err(SpecError { attribute, asked: 1, allowed: "nothing yet" }),
        None => Ok(()),
    }
}

/// Last byte of write number `message`, never that of its neighbours; the first is 1, as prepared memory is 0.
fn write_mark(message: u64) -> u8 {
    (message + 1) as u8
}

impl<Q: Queues> Service<Q> for PerfService {
    fn poll(&mut self, queues: &mut Q, now_ns: u64) -> usize {
        if self.progress.finished() {
            return 0;
        }
        if self.progress.stop_asked() {
            match self.verify_written() {
                Ok(true) => self.finish(true),
                Ok(false) => {}
                Err(fault) => self.fail(fault),
            }
            return 1;
        }
        match self.step(queues, now_ns) {
            Ok(work) => {
                self.after_step(work, now_ns);
                work
            }
            Err(fault) => {
                self.fail(fault);
                1
            }
        }
    }

    fn finished(&self) -> bool {
        self.progress.finished()
    }
}

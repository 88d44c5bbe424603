//! The exchange of `ibv_rc_pingpong`, `ibv_uc_pingpong` and `ibv_ud_pingpong`: SENDs to and fro, one at a time.
//!
//! The client sends first; each side sends its next message when the last one was received and its own last send is
//! complete. The server sends back what it received.
//!
//! **Data check.** The original fills its buffer with 0x7b, with `-c` puts 0 at the start of each page of a client's
//! buffer, and lets the server look at those bytes at the end. We keep that contract, so that either end may be the
//! original, and check more:
//! - our client writes a pattern that depends on message and offset between the page starts, and compares every answer
//!   with what it sent: whoever the server is, each byte makes the whole way to and fro;
//! - our server compares every message with that pattern, or with 0x7b if the first message shows that the client is
//!   the original;
//! - over UC and UD the original has no `-c`: it sends 0x7b first and after that what it received last. Our server then
//!   answers with the pattern instead of an echo, and expects each answer back with the next message.
//!
//! UC and UD repeat nothing: a message that is lost ends the exchange at the progress deadline.

mod data;
mod shared;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use ferroce_mem::Lkey;
use ferroce_mem::os::Block;
use ferroce_verbs::{
    CqId, PostError, QpType, Qpn, Queues, RecvWr, SendFlags, SendOp, SendWr, Service, Sge, UdDest, Wc,
    WcStatus,
};

use crate::clock;
use crate::cq::{self, BATCH, RECV_MARK};
use crate::fault::{Fault, ServiceError};
use crate::handle::{Handle, Progress};
use crate::latency::{LatencyRecorder, LatencySummary};
use crate::perf::{Role, SpecError};
use data::Filling;
pub use shared::{MOST_QUEUE_PAIRS, SharedEndpoints, SharedPingPongService};

/// Bytes before the data of a received datagram.
const GRH_BYTES: u32 = 40;
/// Most receives posted in one poll.
const POST_BURST: u32 = 64;

/// One exchange.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PingPongSpec {
    /// Side.
    pub role: Role,
    /// Type of the queue pair.
    pub qp_type: QpType,
    /// Bytes of a message; over UD at most the path MTU.
    pub size: u32,
    /// Messages each way.
    pub iters: u64,
    /// Receives kept posted.
    pub rx_depth: u32,
    /// Compare data as the module says.
    pub check_data: bool,
    /// The service fails when nothing happens for so many ns; 0 waits for ever.
    pub progress_deadline_ns: u64,
}

impl PingPongSpec {
    /// `ibv_rc_pingpong`'s defaults: 4096 bytes, 1000 messages, 1000 receives; progress deadline 30 s.
    #[must_use]
    pub const fn new(role: Role) -> Self {
        PingPongSpec {
            role,
            qp_type: QpType::Rc,
            size: 4096,
            iters: 1000,
            rx_depth: 1000,
            check_data: false,
            progress_deadline_ns: 30_000_000_000,
        }
    }

    /// Checks every value.
    ///
    /// # Errors
    /// Names the first one that is out of range.
    pub fn check(&self) -> Result<(), SpecError> {
        let refuse = |attribute, asked, allowed| Err(SpecError { attribute, asked, allowed });
        if self.size > crate::perf::PerfSpec::LARGEST {
            return refuse("size", self.size.into(), "0 to 1073741824 bytes");
        }
        if self.qp_type == QpType::Ud && self.size > 4096 {
            return refuse("size", self.size.into(), "0 to 4096 bytes over UD: one datagram");
        }
        if self.iters == 0 || self.iters >= 1 << 62 {
            return refuse("iters", self.iters, "1 to 2^62");
        }
        if self.rx_depth == 0 || self.rx_depth > crate::perf::PerfSpec::DEEPEST {
            return refuse("rx_depth", self.rx_depth.into(), "1 to 65536");
        }
        Ok(())
    }

    /// Bytes of memory that the service needs: a buffer to send from and one to receive into.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.stride() * 2
    }

    fn stride(&self) -> u64 {
        (u64::from(self.size) + self.header()).next_multiple_of(64).max(64)
    }

    /// Bytes in front of the data of each buffer: the GRH area of a datagram.
    fn header(&self) -> u64 {
        if self.qp_type == QpType::Ud { GRH_BYTES.into() } else { 0 }
    }
}

/// What a pingpong service is connected to.
pub struct PingPongEndpoints {
    /// The local queue pair, in RTS.
    pub qpn: Qpn,
    /// Where its sends complete: at least 1 entry.
    pub send_cq: CqId,
    /// Where its receives complete: at least `rx_depth` entries (one more if both are one queue).
    pub recv_cq: CqId,
    /// At least [`PingPongSpec::memory_bytes`].
    pub local: Arc<Block>,
    /// Local key of all of it, with LOCAL_WRITE.
    pub local_lkey: Lkey,
    /// Its first byte in the region's address space.
    pub local_iova: u64,
    /// Where datagrams go: for UD, and only for it.
    pub ud: Option<UdDest>,
}

/// Watches a [`PingPongService`].
pub type PingPongHandle = Handle<PingPongReport>;

/// Result of an exchange.
#[derive(Clone, Copy, Debug)]
pub struct PingPongReport {
    /// What was asked.
    pub spec: PingPongSpec,
    /// Messages received.
    pub messages: u64,
    /// Bytes of both directions, as the original counts them.
    pub bytes: u64,
    /// From the first message to the last completion, in ns.
    pub elapsed_ns: u64,
    /// Whole round trips; on the client.
    pub rtt: Option<LatencySummary>,
    /// Messages whose data was compared.
    pub checked: u64,
    /// False when our last message was never acknowledged though all of the peer's came: the peer may have left as soon
    /// as it had all it waited for, and its acknowledgement may be lost.
    pub last_acknowledged: bool,
    /// Ended by [`Handle::stop`] rather than by count.
    pub stopped: bool,
}

/// A running exchange. Invariant: at most one send is outstanding.
pub struct PingPongService {
    spec: PingPongSpec,
    ends: PingPongEndpoints,
    progress: Progress<PingPongReport>,
    batch: Box<[Wc]>,
    filling: Option<Filling>,
    posted: u64,
    completed: u64,
    recv_posted: u64,
    received: u64,
    checked: u64,
    sent_at_ns: u64,
    started_ns: Option<u64>,
    progress_ns: Option<u64>,
    samples: LatencyRecorder,
}

impl PingPongService {
    /// A service on connected endpoints, and what its host watches it with. Writes the send buffer.
    ///
    /// # Errors
    /// The specification is refused, or the memory is too small.
    pub fn new(
        spec: PingPongSpec,
        endpoints: PingPongEndpoints,
    ) -> Result<(Self, PingPongHandle), SpecError> {
        spec.check()?;
        let have = endpoints.local.len() as u64;
        let too_small =
            SpecError { attribute: "memory", asked: have, allowed: "PingPongSpec::memory_bytes or more" };
        if have < spec.memory_bytes() {
            return Err(too_small);
        }
        if endpoints.ud.is_some() != (spec.qp_type == QpType::Ud) {
            let asked = u64::from(endpoints.ud.is_some());
            return Err(SpecError {
                attribute: "ud",
                asked,
                allowed: "a destination over UD, none otherwise",
            });
        }
        data::fill_classic(&endpoints.local, spec.header(), spec.size.into()).map_err(|_| too_small)?;
        let (progress, handle) = Progress::new();
        let filling = (spec.role == Role::Client).then_some(Filling::Pattern);
        let service = PingPongService {
            spec,
            ends: endpoints,
            progress,
            batch: vec![Wc::EMPTY; BATCH].into_boxed_slice(),
            filling,
            posted: 0,
            completed: 0,
            recv_posted: 0,
            received: 0,
            checked: 0,
            sent_at_ns: 0,
            started_ns: None,
            progress_ns: None,
            samples: LatencyRecorder::new(),
        };
        Ok((service, handle))
    }

    /// The buffer into which messages arrive. The server of RC receives into the one that it sends from: an echo. So does
    /// a client of UC and UD that compares nothing, as the original.
    fn recv_offset(&self) -> u64 {
        match (self.spec.role, self.spec.qp_type) {
            (Role::Server, QpType::Rc) => 0,
            (Role::Client, QpType::Uc | QpType::Ud) if !self.spec.check_data => 0,
            _ => self.spec.stride(),
        }
    }

    /// The buffer that is sent from.
    fn send_offset(&self) -> u64 {
        match self.spec.role {
            Role::Server if !self.answers_pattern() => self.recv_offset(),
            _ => 0,
        }
    }

    /// Whether this is a server that answers with the pattern: the module says when.
    fn answers_pattern(&self) -> bool {
        self.spec.role == Role::Server && self.filling == Some(Filling::Plain)
    }

    fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge { addr: self.ends.local_iova.wrapping_add(offset), length, lkey: self.ends.local_lkey }
    }

    fn step<Q: Queues>(&mut self, queues: &mut Q) -> Result<usize, Fault> {
        let mut work = self.post_receives(queues)?;
        let mut batch = std::mem::take(&mut self.batch);
        let drained = self.drain(queues, &mut batch);
        self.batch = batch;
        work += drained?;
        let turn = match self.spec.role {
            Role::Client => self.posted == self.received && self.posted < self.spec.iters,
            Role::Server => self.posted < self.received,
        };
        if turn && self.completed == self.posted && self.post_send(queues)? {
            work += 1;
        }
        Ok(work)
    }

    /// As the original: when one receive or none is left, posts up to the depth again.
    fn post_receives<Q: Queues>(&mut self, queues: &mut Q) -> Result<usize, Fault> {
        let depth = u64::from(self.spec.rx_depth);
        let left = self.recv_posted - self.received;
        // Below the depth but above one: only the first posting, cut into bursts, is still under way.
        if left > 1 && self.recv_posted >= depth {
            return Ok(0);
        }
        let mut count = 0;
        while count < POST_BURST
            && self.recv_posted - self.received < depth
            && self.recv_posted < self.spec.iters
        {
            // Both fit: the data of a datagram is at most 4096 bytes.
            let length = self.spec.size + self.spec.header() as u32;
            let sge = [self.sge(self.recv_offset(), length)];
            let sg_list = if length == 0 { &sge[..0] } else { &sge[..] };
            match queues.post_recv(self.ends.qpn, &RecvWr { wr_id: RECV_MARK | self.recv_posted, sg_list }) {
                Ok(()) => self.recv_posted += 1,
                Err(PostError::Full) => break,
                Err(error) => return Err(Fault::Post(error)),
            }
            count += 1;
        }
        if count > 0 && self.received == 0 {
            self.progress.set_ready();
        }
        Ok(count as usize)
    }

    fn drain<Q: Queues>(&mut self, queues: &mut Q, batch: &mut [Wc]) -> Result<usize, Fault> {
        let queues_of = (self.ends.send_cq, self.ends.recv_cq);
        cq::drain(queues, queues_of, batch, |wc| self.completion(wc))
    }

    fn completion(&mut self, wc: &Wc) -> Result<(), Fault> {
        let unexpected = Fault::UnexpectedCompletion { wr_id: wc.wr_id };
        if wc.wr_id & RECV_MARK == 0 {
            if wc.wr_id != self.completed || wc.wr_id >= self.posted {
                return Err(unexpected);
            }
            self.completed += 1;
            return Ok(());
        }
        let message = self.received;
        if wc.wr_id & !RECV_MARK != message || message >= self.recv_posted {
            return Err(unexpected);
        }
        let expected = self.spec.size + self.spec.header() as u32;
        if wc.byte_len != expected {
            return Err(Fault::Length { message, expected, got: wc.byte_len });
        }
        if self.spec.role == Role::Client {
            // An answer without a question would upset the turns.
            if message >= self.posted {
                return Err(unexpected);
            }
            self.samples.record(clock::now_ns().saturating_sub(self.sent_at_ns));
        }
        self.received += 1;
        self.check(message)
    }

    fn check(&mut self, message: u64) -> Result<(), Fault> {
        if !self.spec.check_data {
            return Ok(());
        }
        let (at, size) = (self.recv_offset() + self.spec.header(), u64::from(self.spec.size));
        let filling = match (self.filling, self.spec.qp_type) {
            (Some(filling), _) => filling,
            (None, QpType::Rc) => *self.filling.insert(data::recognise(&self.ends.local, at, size)?),
            (None, _) => *self.filling.insert(data::recognise_plain(&self.ends.local, at, size)?),
        };
        match (filling, message.checked_sub(1)) {
            (Filling::Plain, Some(answer)) => {
                data::check(&self.ends.local, at, size, Filling::Pattern, answer)?;
            }
            _ => data::check(&self.ends.local, at, size, filling, message)?,
        }
        self.checked += 1;
        Ok(())
    }

    fn post_send<Q: Queues>(&mut self, queues: &mut Q) -> Result<bool, Fault> {
        let (message, size) = (self.posted, u64::from(self.spec.size));
        let header = self.spec.header();
        if self.spec.check_data && (self.spec.role == Role::Client || self.answers_pattern()) {
            data::fill(&self.ends.local, header, size, message)?;
            data::spoil(&self.ends.local, self.recv_offset() + header, size)?;
        }
        let sge = [self.sge(self.send_offset() + header, self.spec.size)];
        let sg_list = if self.spec.size == 0 { &sge[..0] } else { &sge[..] };
        let wr = SendWr {
            wr_id: message,
            op: SendOp::Send,
            sg_list,
            inline: &[],
            flags: SendFlags::SIGNALED,
            ud: self.ends.ud.as_ref(),
        };
        let sent_at = clock::now_ns();
        match queues.post_send(self.ends.qpn, &wr) {
            Ok(()) => {
                self.posted += 1;
                self.sent_at_ns = sent_at;
                Ok(true)
            }
            Err(PostError::Full) => Ok(false),
            Err(error) => Err(Fault::Post(error)),
        }
    }

    fn finish(&self, now_ns: u64, stopped: bool) {
        let report = PingPongReport {
            spec: self.spec,
            messages: self.received,
            bytes: self.received.saturating_mul(u64::from(self.spec.size)).saturating_mul(2),
            elapsed_ns: self.started_ns.map_or(0, |started| now_ns.saturating_sub(started)),
            rtt: self.samples.summary(),
            checked: self.checked,
            last_acknowledged: self.completed == self.posted,
            stopped,
        };
        self.progress.set_done(self.received);
        self.progress.finish(Ok(report));
    }

    /// The last message without an acknowledgement is no failure when all of the peer's are here: see
    /// [`PingPongReport::last_acknowledged`].
    fn is_lost_farewell(&self, fault: &Fault) -> bool {
        let last = self.spec.iters - 1;
        self.received == self.spec.iters
            && self.completed == last
            && matches!(*fault, Fault::Completion { status: WcStatus::RetryExcErr, wr_id, .. } if wr_id == last)
    }

    fn fail(&self, fault: Fault) {
        self.progress.finish(Err(ServiceError { fault, qpn: self.ends.qpn, done: self.received }));
    }
}

impl<Q: Queues> Service<Q> for PingPongService {
    fn poll(&mut self, queues: &mut Q, now_ns: u64) -> usize {
        if self.progress.finished() {
            return 0;
        }
        if self.progress.stop_asked() {
            self.finish(now_ns, true);
            return 1;
        }
        let work = match self.step(queues) {
            Ok(work) => work,
            Err(fault) if self.is_lost_farewell(&fault) => {
                self.finish(now_ns, false);
                return 1;
            }
            Err(fault) => {
                self.fail(fault);
                return 1;
            }
        };
        if self.started_ns.is_none() && (self.posted > 0 || self.received > 0) {
            self.started_ns = Some(now_ns);
        }
        if self.received == self.spec.iters && self.completed == self.spec.iters {
            self.finish(now_ns, false);
            return work.max(1);
        }
        if work > 0 {
            self.progress_ns = Some(now_ns);
            self.progress.set_done(self.received);
        }
        let waited_ns = now_ns.saturating_sub(*self.progress_ns.get_or_insert(now_ns));
        if self.spec.progress_deadline_ns > 0 && waited_ns > self.spec.progress_deadline_ns {
            self.fail(Fault::Stalled { waited_ns });
        }
        work
    }

    fn finished(&self) -> bool {
        self.progress.finished()
    }
}

//! The exchange of `ibv_srq_pingpong`: several queue pairs that take their receives from one shared queue.
//!
//! Each queue pair plays ping-pong by itself; the numbers of messages are those of all together, as in the original. It
//! ends when that many were received and that many sends are complete, wherever the queue pairs stand then.
//!
//! **Data check.** Every receive has a buffer of its own, spoilt before it is posted. The server sends a message back
//! from the buffer that it came into. The original has one buffer for all queue pairs, so messages of several meet there:
//! our client sends one pattern in all messages, which they survive, and compares every answer with it. Our server
//! compares with that pattern, or with 0, which the original's client sends.

use std::sync::Arc;

use ferroce_mem::Lkey;
use ferroce_mem::os::Block;
use ferroce_verbs::{
    CqId, PostError, Qpn, Queues, RecvWr, SendFlags, SendOp, SendWr, Service, Sge, SrqId, Wc,
};

use super::data::{self, Filling};
use super::{POST_BURST, PingPongHandle, PingPongReport, PingPongSpec};
use crate::cq::{self, BATCH, RECV_MARK};
use crate::fault::{Fault, ServiceError};
use crate::handle::Progress;
use crate::perf::{Role, SpecError};

/// Most queue pairs: what the original's handshake has room for.
pub const MOST_QUEUE_PAIRS: usize = 256;

/// What the service is connected to.
pub struct SharedEndpoints {
    /// The local queue pairs, in RTS; 1 to [`MOST_QUEUE_PAIRS`], and no more than `rx_depth`.
    pub qpns: Vec<Qpn>,
    /// Where they take receives: room for `rx_depth`.
    pub srq: SrqId,
    /// Where sends complete: at least 1 entry for each queue pair.
    pub send_cq: CqId,
    /// Where receives complete: at least `rx_depth` entries.
    pub recv_cq: CqId,
    /// At least [`SharedPingPongService::memory_bytes`].
    pub local: Arc<Block>,
    /// Local key of all of it, with LOCAL_WRITE.
    pub local_lkey: Lkey,
    /// Its first byte in the region's address space.
    pub local_iova: u64,
}

/// One queue pair's turn.
#[derive(Clone, Copy, Default)]
struct Turn {
    /// A send is not complete yet.
    sending: bool,
    /// Nothing received since the last send.
    waiting: bool,
    /// Buffer that the outstanding send is made from (server).
    sent_from: Option<u32>,
    /// Buffer with what was received and is not sent back yet (server).
    received: Option<u32>,
}

/// A running exchange over a shared receive queue. Invariant: a buffer is free, posted, or held by one queue pair.
pub struct SharedPingPongService {
    spec: PingPongSpec,
    ends: SharedEndpoints,
    progress: Progress<PingPongReport>,
    batch: Box<[Wc]>,
    turns: Box<[Turn]>,
    /// Buffers that may be posted; never longer than `rx_depth`.
    free: Vec<u32>,
    filling: Option<Filling>,
    posted: u64,
    completed: u64,
    received: u64,
    checked: u64,
    started_ns: Option<u64>,
    progress_ns: Option<u64>,
}

impl SharedPingPongService {
    /// Bytes of memory that the service needs: a buffer to send from and one for each receive.
    #[must_use]
    pub fn memory_bytes(spec: &PingPongSpec) -> u64 {
        spec.stride() * (u64::from(spec.rx_depth) + 1)
    }

    /// A service on connected endpoints, and what its host watches it with.
    ///
    /// # Errors
    /// The specification is refused, there are too few or too many queue pairs, or the memory is too small.
    pub fn new(spec: PingPongSpec, ends: SharedEndpoints) -> Result<(Self, PingPongHandle), SpecError> {
        spec.check()?;
        let refuse = |attribute, asked, allowed| Err(SpecError { attribute, asked, allowed });
        let count = ends.qpns.len();
        if count == 0 || count > MOST_QUEUE_PAIRS {
            return refuse("queue pairs", count as u64, "1 to 256");
        }
        if (spec.rx_depth as usize) < count {
            return refuse("rx_depth", spec.rx_depth.into(), "at least one receive for each queue pair");
        }
        let have = ends.local.len() as u64;
        if have < Self::memory_bytes(&spec) {
            return refuse("memory", have, "SharedPingPongService::memory_bytes or more");
        }
        if spec.role == Role::Client && spec.check_data {
            let allowed = "SharedPingPongService::memory_bytes or more";
            data::fill(&ends.local, 0, spec.size.into(), 0).map_err(|_| SpecError {
                attribute: "memory",
                asked: have,
                allowed,
            })?;
        }
        let turn = Turn { waiting: spec.role == Role::Server, ..Turn::default() };
        let (progress, handle) = Progress::new();
        let service = SharedPingPongService {
            spec,
            progress,
            batch: vec![Wc::EMPTY; BATCH].into_boxed_slice(),
            turns: vec![turn; count].into_boxed_slice(),
            free: (0..spec.rx_depth).collect(),
            filling: (spec.role == Role::Client).then_some(Filling::Pattern),
            ends,
            posted: 0,
            completed: 0,
            received: 0,
            checked: 0,
            started_ns: None,
            progress_ns: None,
        };
        Ok((service, handle))
    }

    /// Where a buffer begins.
    fn offset(&self, buffer: u32) -> u64 {
        self.spec.stride() * (u64::from(buffer) + 1)
    }

    fn sge(&self, offset: u64) -> Sge {
        let addr = self.ends.local_iova.wrapping_add(offset);
        Sge { addr, length: self.spec.size, lkey: self.ends.local_lkey }
    }

    fn step<Q: Queues>(&mut self, queues: &mut Q) -> Result<usize, Fault> {
        let mut work = self.post_receives(queues)?;
        let mut batch = std::mem::take(&mut self.batch);
        let drained = self.drain(queues, &mut batch);
        self.batch = batch;
        work += drained?;
        for index in 0..self.turns.len() {
            let turn = self.turns[index];
            // As the original: queue pairs go on until enough sends are complete, not until enough are posted.
            if !turn.sending && !turn.waiting && self.completed < self.spec.iters {
                work += usize::from(self.post_send(queues, index)?);
            }
        }
        Ok(work)
    }

    fn post_receives<Q: Queues>(&mut self, queues: &mut Q) -> Result<usize, Fault> {
        let mut count = 0;
        while count < POST_BURST as usize {
            let Some(buffer) = self.free.pop() else { break };
            let at = self.offset(buffer);
            if self.spec.check_data {
                data::spoil_all(&self.ends.local, at, self.spec.size.into())?;
            }
            let sge = [self.sge(at)];
            let sg_list = if self.spec.size == 0 { &sge[..0] } else { &sge[..] };
            let wr = RecvWr { wr_id: RECV_MARK | u64::from(buffer), sg_list };
            match queues.post_srq_recv(self.ends.srq, &wr) {
                Ok(()) => count += 1,
                Err(PostError::Full) => {
                    self.free.push(buffer);
                    break;
                }
                Err(error) => return Err(Fault::Post(error)),
            }
        }
        if count > 0 {
            self.progress.set_ready();
        }
        Ok(count)
    }

    fn drain<Q: Queues>(&mut self, queues: &mut Q, batch: &mut [Wc]) -> Result<usize, Fault> {
        let queues_of = (self.ends.send_cq, self.ends.recv_cq);
        cq::drain(queues, queues_of, batch, |wc| self.completion(wc))
    }

    fn completion(&mut self, wc: &Wc) -> Result<(), Fault> {
        let unexpected = Fault::UnexpectedCompletion { wr_id: wc.wr_id };
        let index = self.ends.qpns.iter().position(|&qpn| qpn == wc.qpn).ok_or(unexpected)?;
        let turn = self.turns.get_mut(index).ok_or(unexpected)?;
        if wc.wr_id & RECV_MARK == 0 {
            if wc.wr_id != index as u64 || !turn.sending {
                return Err(unexpected);
            }
            turn.sending = false;
            self.completed += 1;
            self.free.extend(turn.sent_from.take());
            return Ok(());
        }
        let buffer = u32::try_from(wc.wr_id & !RECV_MARK).map_err(|_| unexpected)?;
        // A message out of turn would upset all that follows.
        if buffer >= self.spec.rx_depth || !turn.waiting {
            return Err(unexpected);
        }
        turn.waiting = false;
        match self.spec.role {
            Role::Client => self.free.push(buffer),
            Role::Server => turn.received = Some(buffer),
        }
        let message = self.received;
        if wc.byte_len != self.spec.size {
            return Err(Fault::Length { message, expected: self.spec.size, got: wc.byte_len });
        }
        self.received += 1;
        self.check(message, buffer)
    }

    fn check(&mut self, message: u64, buffer: u32) -> Result<(), Fault> {
        if !self.spec.check_data {
            return Ok(());
        }
        let (at, size) = (self.offset(buffer), u64::from(self.spec.size));
        let filling = match self.filling {
            Some(filling) => filling,
            None => *self.filling.insert(data::recognise_zero(&self.ends.local, at, size)?),
        };
        // All messages are the same; a fault names the one that it was found in.
        data::check(&self.ends.local, at, size, filling, 0).map_err(|fault| match fault {
            Fault::Data { offset, expected, got, .. } => Fault::Data { message, offset, expected, got },
            other => other,
        })?;
        self.checked += 1;
        Ok(())
    }

    fn post_send<Q: Queues>(&mut self, queues: &mut Q, index: usize) -> Result<bool, Fault> {
        let (Some(turn), Some(&qpn)) = (self.turns.get(index).copied(), self.ends.qpns.get(index)) else {
            return Ok(false);
        };
        let sge = [self.sge(turn.received.map_or(0, |buffer| self.offset(buffer)))];
        let sg_list = if self.spec.size == 0 { &sge[..0] } else { &sge[..] };
        let wr = SendWr {
            wr_id: index as u64,
            op: SendOp::Send,
            sg_list,
            inline: &[],
            flags: SendFlags::SIGNALED,
            ud: None,
        };
        match queues.post_send(qpn, &wr) {
            Ok(()) => {
                self.posted += 1;
                if let Some(slot) = self.turns.get_mut(index) {
                    *slot = Turn { sending: true, waiting: true, sent_from: turn.received, received: None };
                }
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
            rtt: None,
            checked: self.checked,
            last_acknowledged: self.completed == self.posted,
            stopped,
        };
        self.progress.set_done(self.received);
        self.progress.finish(Ok(report));
    }

    fn fail(&self, fault: Fault) {
        let qpn = self.ends.qpns.first().copied().unwrap_or(Qpn::new(0));
        self.progress.finish(Err(ServiceError { fault, qpn, done: self.received }));
    }
}

impl<Q: Queues> Service<Q> for SharedPingPongService {
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
            Err(fault) => {
                self.fail(fault);
                return 1;
            }
        };
        if self.started_ns.is_none() && (self.posted > 0 || self.received > 0) {
            self.started_ns = Some(now_ns);
        }
        if self.received >= self.spec.iters && self.completed >= self.spec.iters {
            self.finish(now_ns, false);
            return work;
        }
        if work > 0 {
            self.progress_ns = Some(now_ns);
            self.progress.set_done(self.received);
            return work;
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

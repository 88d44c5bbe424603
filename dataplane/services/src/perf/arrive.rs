//! What comes to a perf test: completions of its own messages, messages of the peer, bytes in memory, events.

use ferroce_verbs::{PostError, Queues, RecvWr, Sge, Wc};

use super::lanes;
use super::service::{PerfService, answers};
use super::{PerfMode, PerfOp, Role};
use crate::clock;
use crate::cq::{self, RECV_MARK};
use crate::fault::Fault;

/// Most receives posted in one pass before the test begins.
const RECV_BURST: usize = 256;

impl PerfService {
    /// Posts the first receives, lane by lane; says that the peer may start when all are there. Later, each message is
    /// followed by a new receive at once.
    pub(super) fn fill_receives<Q: Queues>(&mut self, queues: &mut Q) -> Result<usize, Fault> {
        let mut count = 0;
        while self.recv_lane < self.lanes.count() && count < RECV_BURST {
            if self.post_receive(queues, self.recv_lane)? {
                count += 1;
            } else {
                self.recv_lane += 1;
            }
        }
        if self.recv_lane == self.lanes.count() {
            self.recv_lane += 1;
            self.progress.set_ready();
        }
        Ok(count)
    }

    /// Posts one more receive of a lane; false if it has all that it needs, or no room.
    fn post_receive<Q: Queues>(&mut self, queues: &mut Q, lane: usize) -> Result<bool, Fault> {
        let at = self.lanes.lane(lane);
        let number = at.recv_posted;
        if number >= self.total || number - at.received >= self.recv_depth {
            return Ok(false);
        }
        let offset = self.layout.message(&self.layout.receive, lane, number);
        let length = self.spec.recv_bytes();
        let sge = [self.sge(offset, length)];
        let sg_list = if length == 0 { &sge[..0] } else { &sge[..] };
        let wr = RecvWr { wr_id: RECV_MARK | lanes::wr_id(lane, number), sg_list };
        match queues.post_recv(self.ends.qps[lane].qpn, &wr) {
            Ok(()) => {
                self.lanes.count_recv_posted(lane);
                Ok(true)
            }
            Err(PostError::Full) => Ok(false),
            Err(error) => {
                self.culprit = Some(self.ends.qps[lane].qpn);
                Err(Fault::Post(error))
            }
        }
    }

    pub(super) fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge { addr: self.ends.local_iova.wrapping_add(offset), length, lkey: self.ends.local_lkey }
    }

    /// Takes what has come: completions, with events only after one, and the bytes that write latency watches.
    pub(super) fn take<Q: Queues>(&mut self, queues: &mut Q) -> Result<usize, Fault> {
        let work = if self.spec.events { self.drain_after_event(queues)? } else { self.drain(queues)? };
        if self.spec.op == PerfOp::Write && self.spec.mode == PerfMode::Lat {
            return Ok(work + self.watch()?);
        }
        Ok(work)
    }

    fn drain_after_event<Q: Queues>(&mut self, queues: &mut Q) -> Result<usize, Fault> {
        let told = self.progress.events();
        if self.armed == Some(told) && !self.progress.stop_asked() {
            return Ok(0);
        }
        self.armed = None;
        let work = self.drain(queues)?;
        if work > 0 {
            return Ok(work);
        }
        for cq in cq::both(self.ends.send_cq, self.ends.recv_cq) {
            queues.req_notify(cq, false).map_err(Fault::Poll)?;
        }
        // What came before the arming gives no event.
        let work = self.drain(queues)?;
        if work == 0 {
            self.armed = Some(told);
        }
        Ok(work)
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
        let (mut fault, mut work) = (None, 0);
        for cq in cq::both(self.ends.send_cq, self.ends.recv_cq) {
            for wc in cq::poll(queues, cq, batch)? {
                work += 1;
                let worse = cq::worse(fault, cq::fault_of(wc));
                if worse != fault {
                    self.culprit = Some(wc.qpn);
                }
                fault = worse;
                if fault.is_none() {
                    self.completion(queues, wc)?;
                }
            }
        }
        fault.map_or(Ok(work), Err)
    }

    fn completion<Q: Queues>(&mut self, queues: &mut Q, wc: &Wc) -> Result<(), Fault> {
        let unexpected = Fault::UnexpectedCompletion { wr_id: wc.wr_id };
        let (lane, message) = lanes::split(wc.wr_id & !RECV_MARK);
        let Some(&at) = self.lanes.get(lane) else { return Err(unexpected) };
        if wc.wr_id & RECV_MARK != 0 {
            // An answer without a question would upset the turns.
            let unasked = self.asks() && message >= at.posted;
            if message != at.received || message >= at.recv_posted || unasked {
                return Err(unexpected);
            }
            self.receive(wc, lane, message)?;
            return self.post_receive(queues, lane).map(drop);
        }
        if message < at.completed || message >= at.posted {
            return Err(unexpected);
        }
        self.lanes.count_completed(lane, message + 1);
        self.lanes.offer(lane);
        if matches!(self.spec.op, PerfOp::Read | PerfOp::FetchAdd | PerfOp::CmpSwap) {
            self.sample(lane, message);
            self.check_landed(lane, at.completed, message + 1)?;
        }
        Ok(())
    }

    /// A latency client.
    pub(super) fn asks(&self) -> bool {
        self.spec.mode == PerfMode::Lat && self.spec.role == Role::Client
    }

    /// Number of a message among those of all queue pairs of a latency test.
    pub(super) fn number(&self, lane: usize, message: u64) -> u64 {
        message.saturating_mul(self.spec.qps.into()).saturating_add(lane as u64)
    }

    fn receive(&mut self, wc: &Wc, lane: usize, message: u64) -> Result<(), Fault> {
        if wc.byte_len != self.spec.recv_bytes() {
            let header = self.spec.recv_bytes() - self.spec.size;
            let got = wc.byte_len.saturating_sub(header);
            self.culprit = Some(wc.qpn);
            return Err(Fault::Length { message, expected: self.spec.size, got });
        }
        self.sample(lane, message);
        self.lanes.count_received(lane);
        if answers(&self.spec) {
            self.lanes.offer(lane);
        }
        self.check_received(lane, message)
    }

    /// Ends the round trip of a message.
    fn sample(&mut self, lane: usize, message: u64) {
        let number = self.number(lane, message);
        let warmup = self.spec.warmup.saturating_mul(self.spec.qps.into());
        let open = self.measure.is_open();
        let Some(samples) = self.samples.as_mut() else { return };
        let asked_at = match (&self.pace, number.checked_sub(warmup)) {
            (Some(pace), Some(measured)) if self.spec.open_loop => Some(pace.intended_ns(measured)),
            _ => self.asked_at_ns.take(),
        };
        if let (Some(asked_at), true) = (asked_at, open && number >= warmup) {
            samples.record(clock::now_ns().saturating_sub(asked_at));
        }
    }

    /// Write latency: the next message is there when the last byte of the buffer carries its number.
    fn watch(&mut self) -> Result<usize, Fault> {
        if self.lanes.received >= self.total_all {
            return Ok(0);
        }
        let lane = (self.lanes.received % u64::from(self.spec.qps)) as usize;
        let at = *self.lanes.lane(lane);
        let place = self.layout.message(&self.layout.written, lane, at.received);
        if self.ends.local.byte(place + u64::from(self.spec.size) - 1)? != write_mark(at.received) {
            return Ok(0);
        }
        // An answer to what was not asked is the peer's mistake; it must not be counted as a round trip.
        if self.asks() && at.received >= at.posted {
            return Ok(0);
        }
        self.sample(lane, at.received);
        self.lanes.count_received(lane);
        if answers(&self.spec) {
            self.lanes.offer(lane);
        }
        self.check_watched(lane, at.received)?;
        Ok(1)
    }
}

/// Last byte of write number `message`, never that of its neighbours; the first is 1, as prepared memory is 0.
pub(super) fn write_mark(message: u64) -> u8 {
    (message + 1) as u8
}

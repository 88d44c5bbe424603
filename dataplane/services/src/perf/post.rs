//! What a perf test posts: windows, questions, answers.

use ferroce_verbs::{PostError, Queues, RemoteAddr, SendFlags, SendOp, SendWr};

use super::arrive::write_mark;
use super::lanes;
use super::layout::{Area, PerfLayout};
use super::service::{PerfService, answers};
use super::{PerfMode, PerfOp};
use crate::clock;
use crate::fault::Fault;

/// Most work requests posted in one pass; a list is not cut.
const POST_BURST: usize = 64;

impl PerfService {
    /// Posts what may be posted now.
    pub(super) fn push<Q: Queues>(&mut self, queues: &mut Q) -> Result<usize, Fault> {
        // The peer answers on any queue pair, at once: not before all have their receives.
        if self.recv_lane < self.lanes.count() {
            return Ok(0);
        }
        if self.asks() {
            return self.ask(queues);
        }
        let waits = self.follows() && self.lanes.received == 0;
        if !self.spec.requests() || waits {
            return Ok(0);
        }
        let mut count = 0;
        while count < POST_BURST {
            let posted = self.post_list(queues)?;
            if posted == 0 {
                break;
            }
            count += posted;
        }
        Ok(count)
    }

    /// The next list of the lane whose turn it is; 0 if none can start now.
    fn post_list<Q: Queues>(&mut self, queues: &mut Q) -> Result<usize, Fault> {
        while let Some(lane) = self.lanes.front() {
            let at = *self.lanes.lane(lane);
            let end = if answers(&self.spec) { at.received.min(at.end) } else { at.end };
            // A list that was cut for want of room goes on where it was cut.
            let rest = self.list - (at.posted - at.phase_from) % self.list;
            let list = rest.min(end.saturating_sub(at.posted));
            if list == 0 || at.posted - at.completed + list > self.depth {
                self.lanes.pop();
                continue;
            }
            if let Some(pace) = &mut self.pace
                && !self.warming
            {
                if !pace.may_start(clock::now_ns()) {
                    return Ok(0);
                }
                pace.started(list);
            }
            let mut count = 0;
            while (count as u64) < list && self.post(queues, lane)? {
                count += 1;
            }
            // The trip of an answer ends with the next question.
            if count > 0 && self.samples.is_some() {
                self.asked_at_ns = Some(clock::now_ns());
            }
            return Ok(count);
        }
        Ok(0)
    }

    /// Latency client: the next message if the last one was answered, or if its time has come.
    fn ask<Q: Queues>(&mut self, queues: &mut Q) -> Result<usize, Fault> {
        let open = self.spec.open_loop && !self.warming;
        let window = match self.spec.op {
            _ if !open => 1,
            PerfOp::Write => 1,
            _ => u64::from(self.spec.tx_depth),
        };
        let mut count = 0;
        while count < POST_BURST && self.lanes.posted - self.done() < window {
            let number = self.lanes.posted;
            let lane = (number % u64::from(self.spec.qps)) as usize;
            let at = self.lanes.lane(lane);
            if at.posted >= at.end {
                break;
            }
            let now_ns = clock::now_ns();
            if !self.is_time(number, now_ns) || !self.post(queues, lane)? {
                break;
            }
            if !open {
                self.asked_at_ns = Some(now_ns);
            }
            count += 1;
        }
        Ok(count)
    }

    fn is_time(&mut self, number: u64, now_ns: u64) -> bool {
        if self.warming || self.closed.is_some() {
            return true;
        }
        let warmup = self.spec.warmup.saturating_mul(self.spec.qps.into());
        match &mut self.pace {
            None => true,
            Some(pace) if self.spec.open_loop => pace.is_due(number.saturating_sub(warmup), now_ns),
            Some(pace) => {
                let may = pace.may_start(now_ns);
                if may {
                    pace.started(1);
                }
                may
            }
        }
    }

    /// Posts the next message of a lane; false if there is no room now.
    fn post<Q: Queues>(&mut self, queues: &mut Q, lane: usize) -> Result<bool, Fault> {
        let at = *self.lanes.lane(lane);
        if at.posted - at.completed >= self.depth {
            return Ok(false);
        }
        let message = at.posted;
        let asks_and_sees = self.asks() && !matches!(self.spec.op, PerfOp::Send | PerfOp::Write);
        let last = message + 1 == at.end || message + 1 == self.total;
        let signalled = asks_and_sees || last || (message - at.phase_from + 1).is_multiple_of(self.every);
        self.write_message(lane, message)?;
        let mut flags = if signalled { SendFlags::SIGNALED } else { SendFlags::empty() };
        let is_inline = self.spec.is_inline();
        if is_inline {
            flags |= SendFlags::INLINE;
        }
        let inline: &[u8] = if is_inline { &self.inline } else { &[] };
        let area = match self.spec.op {
            PerfOp::Send | PerfOp::Write => &self.layout.outgoing,
            PerfOp::Read | PerfOp::FetchAdd | PerfOp::CmpSwap => &self.layout.landing,
        };
        let sge = [self.sge(self.layout.message(area, lane, message), self.spec.size)];
        let sg_list = if self.spec.size == 0 || is_inline { &sge[..0] } else { &sge[..] };
        let qp = &self.ends.qps[lane];
        let wr = SendWr {
            wr_id: lanes::wr_id(lane, message),
            op: self.operation(lane, message),
            sg_list,
            inline,
            flags,
            ud: qp.datagram.as_ref(),
        };
        match queues.post_send(qp.qpn, &wr) {
            Ok(()) => {
                self.lanes.count_posted(lane, signalled);
                Ok(true)
            }
            Err(PostError::Full) => Ok(false),
            Err(error) => {
                self.culprit = Some(qp.qpn);
                Err(Fault::Post(error))
            }
        }
    }

    fn operation(&self, lane: usize, message: u64) -> SendOp {
        let qp = &self.ends.qps[lane];
        let at = |area: &Area| {
            let offset = self.layout.message(area, lane, message) - self.layout.told(lane);
            RemoteAddr(qp.remote_addr.0.wrapping_add(offset))
        };
        let ours = self.spec.layout == PerfLayout::Ours;
        match self.spec.op {
            PerfOp::Send => SendOp::Send,
            PerfOp::Write => SendOp::Write { remote_addr: at(&self.layout.written), rkey: qp.remote_rkey },
            PerfOp::Read => SendOp::Read { remote_addr: at(&self.layout.read), rkey: qp.remote_rkey },
            PerfOp::FetchAdd if ours => {
                // One counter for all queue pairs.
                let first = &self.ends.qps[0];
                SendOp::FetchAdd { remote_addr: first.remote_addr, rkey: first.remote_rkey, add: 1 }
            }
            PerfOp::FetchAdd => {
                SendOp::FetchAdd { remote_addr: at(&self.layout.read), rkey: qp.remote_rkey, add: 1 }
            }
            PerfOp::CmpSwap => {
                // Ours counts up, a word for each queue pair; perftest swaps 0 for 0.
                let (compare, swap) = if ours { (message, message + 1) } else { (0, 0) };
                let remote_addr = at(&self.layout.read);
                SendOp::CmpSwap { remote_addr, rkey: qp.remote_rkey, compare, swap }
            }
        }
    }

    /// What changes from message to message: everything when data is checked, the last byte of a write for latency.
    fn write_message(&mut self, lane: usize, message: u64) -> Result<(), Fault> {
        let write_latency = self.spec.op == PerfOp::Write && self.spec.mode == PerfMode::Lat;
        let checked = self.spec.check_data && self.spec.layout == PerfLayout::Ours;
        if self.spec.is_inline() {
            if checked {
                self.fill_inline(lane, message);
            }
            if let (true, Some(last)) = (write_latency, self.inline.last_mut()) {
                *last = write_mark(message);
            }
            return Ok(());
        }
        let at = self.layout.message(&self.layout.outgoing, lane, message);
        if checked && (self.spec.op == PerfOp::Send || write_latency) {
            self.fill_outgoing(at, lane, message)?;
        }
        if write_latency {
            self.ends.local.write(at + u64::from(self.spec.size) - 1, &[write_mark(message)])?;
        }
        Ok(())
    }
}

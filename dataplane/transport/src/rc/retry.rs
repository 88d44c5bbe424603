//! Going back: acknowledged ground, timeouts, NAKs and RNR waits (roce-wire 5.7, 5.8).
//!
//! Every way to send again ends in `rewind`, which is O(1): the oldest unacknowledged PSN always lies in the oldest
//! unfinished request.

use ferroce_verbs::WcStatus;
use ferroce_wire::Psn;

use crate::counters::QpCounter;
use crate::qp::Base;
use crate::segment::distance;
use crate::time::{Instant, RNR_TIMER_NS};
use crate::wq::{Kind, SendEntry, SgeCursor};

use super::requester::Requester;

/// Attribute value of `rnr_retry` that means for ever.
const RNR_FOR_EVER: u8 = 7;

/// Why the requester goes back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Cause {
    /// No answer in time.
    Timeout,
    /// NAK sequence error.
    Sequence,
    /// A later answer shows that READ responses were lost.
    Implied,
}

impl Requester {
    /// Takes everything before `to` as acknowledged, as far as no READ's or atomic's responses are missing. Returns whether it
    /// got there. `to` lies in `una ..= next`.
    #[inline]
    pub(super) fn acknowledge(&mut self, base: &mut Base, now: Instant, to: Psn) -> bool {
        let before = self.una;
        let goal = distance(to, before);
        if goal == 0 {
            return true;
        }
        let mut arrived = true;
        while self.una != self.next {
            let Some(entry) = base.sq.queue.get(base.sq.queue.done) else { break };
            if entry.kind() != Kind::Data {
                arrived = self.una == to;
                break;
            }
            let end = entry.first.advance(entry.packets);
            if distance(end, before) > goal {
                self.una = to;
                break;
            }
            self.una = end;
            self.finish_oldest(base);
            if self.una == to {
                break;
            }
        }
        if self.una != before {
            self.progress(base, now, before);
        }
        arrived
    }

    /// The request at `done` succeeded.
    #[inline]
    pub(super) fn finish_oldest(&mut self, base: &mut Base) {
        let index = base.sq.queue.done;
        if base.sq.queue.get(index).is_some_and(SendEntry::takes_receive) {
            self.receives_done = self.receives_done.wrapping_add(1);
        }
        base.sq.queue.done = index.wrapping_add(1);
        self.retire_local(base);
        self.scatter = SgeCursor::default();
        self.check_drained(base);
    }

    /// `una` moved on from `before`: counters are reloaded, and what was to be sent again but is acknowledged is not.
    #[inline]
    pub(super) fn progress(&mut self, base: &Base, now: Instant, before: Psn) {
        let moved = distance(self.una, before);
        self.retries_left = self.rts.retry_cnt;
        self.rnr_left = self.rts.rnr_retry;
        self.went_back_at = None;
        self.rnr_until = None;
        // A local operation at the cursor has no PSN and is retired with what is before it.
        let retired = (1..=u32::MAX / 2).contains(&base.sq.queue.done.wrapping_sub(self.cursor));
        if retired || distance(self.cursor_psn, before) < moved {
            self.cursor_to_una(base);
        }
        if distance(self.asked, before) < moved {
            self.asked = self.una;
        }
        self.deadline = if self.asked == self.una { None } else { self.timeout_ns.map(|ns| now.after(ns)) };
    }

    /// Goes back to `una`, unless that was done already for this `una` or an RNR wait will do it.
    pub(super) fn go_back(&mut self, base: &mut Base, cause: Cause) {
        match cause {
            Cause::Timeout => base.counters.add(QpCounter::LocalAckTimeoutErr, 1),
            Cause::Sequence => base.counters.add(QpCounter::PacketSeqErr, 1),
            Cause::Implied => base.counters.add(QpCounter::ImpliedNakSeqErr, 1),
        }
        if cause != Cause::Timeout && (self.went_back_at == Some(self.una) || self.rnr_until.is_some()) {
            return;
        }
        let Some(left) = self.retries_left.checked_sub(1) else {
            base.fail_send(WcStatus::RetryExcErr, self.last_sent);
            return;
        };
        self.retries_left = left;
        self.rewind(base);
        // After a timeout the first NAK for the same place is news again.
        self.went_back_at = if cause == Cause::Timeout { None } else { Some(self.una) };
    }

    /// The peer has no receive for `una`: wait, then send from there.
    pub(super) fn not_ready(&mut self, base: &mut Base, now: Instant, timer: u8) {
        base.counters.add(QpCounter::RnrNakRetryErr, 1);
        if self.rnr_until.is_some() {
            return;
        }
        if self.rts.rnr_retry != RNR_FOR_EVER {
            let Some(left) = self.rnr_left.checked_sub(1) else {
                base.fail_send(WcStatus::RnrRetryExcErr, self.una);
                return;
            };
            self.rnr_left = left;
        }
        let wait = RNR_TIMER_NS.get(usize::from(timer & 31)).copied().unwrap_or(0);
        self.rewind(base);
        self.went_back_at = None;
        self.rnr_until = Some(now.after(wait));
    }

    /// Everything from `una` is to be sent again.
    fn rewind(&mut self, base: &Base) {
        self.cursor_to_una(base);
        self.queries_out = 0;
        self.since_ask = 0;
        self.asked = self.una;
        self.deadline = None;
    }

    fn cursor_to_una(&mut self, base: &Base) {
        let oldest = base.sq.queue.done;
        self.cursor = oldest;
        self.cursor_psn = self.una;
        self.cursor_packet = match base.sq.queue.get(oldest) {
            Some(entry) if oldest != self.fresh => distance(self.una, entry.first),
            Some(_) | None => 0,
        };
        self.gather = SgeCursor::default();
    }

    pub(super) fn on_timeout(&mut self, base: &mut Base, now: Instant) {
        if self.rnr_until.is_some_and(|until| now >= until) {
            self.rnr_until = None;
        }
        if self.deadline.is_some_and(|deadline| now >= deadline) {
            self.go_back(base, Cause::Timeout);
        }
    }

    #[inline]
    pub(super) fn next_timeout(&self) -> Option<Instant> {
        match (self.rnr_until, self.deadline) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }
}

//! Whether a queue pair gave up rightly.
//!
//! On wires that lose much, retries do run out. What shows that they were spent, and not lost count of, lies outside of the
//! queue pair: how often the packet was on the wire that it gave up on ([`crate::world::World::tries`]).

use ferroce_transport::Completion;
use ferroce_transport::time::{RNR_TIMER_NS, ack_timeout_ns};
use ferroce_verbs::{QpState, WcStatus};

use super::Run;
use crate::checker::{Violation, ViolationKind};
use crate::world::QpRef;

impl Run<'_> {
    /// Looks at a send that failed for want of an answer. Afterwards the direction may fail, and nothing more is posted to
    /// either end of the connection.
    pub(super) fn judge_retries(&mut self, at: QpRef, completion: &Completion) -> Result<(), Violation> {
        let Completion::Wc(wc) = completion else { return Ok(()) };
        let gave_up = !wc.is_recv && wc.status == WcStatus::RetryExcErr;
        if !gave_up || self.silent.is_some() || self.exhausted.contains(&at) {
            return Ok(());
        }
        let wrong = |what: String| Err(Violation { kind: ViolationKind::WrongRetries, what });
        let Some(flow) = self.work.flows.iter().position(|flow| flow.from == at) else {
            return wrong(format!("{at:?} has no sends"));
        };
        let peer = self.work.flows[flow].to;
        let info = self.world.qp(at).info();
        let (retries, timeout) = info.rts.map_or((0, 0), |rts| (u32::from(rts.retry_cnt), rts.timeout));
        let tries = self.world.tries(at);
        // A retry may be spent without a packet on the wire: by a NAK that was under way when the time was over.
        if tries.psn != info.una_psn || tries.sent * 2 < retries + 1 {
            return wrong(format!(
                "{at:?} gave up on {:?} of {retries} retries after {tries:?}",
                info.una_psn
            ));
        }
        // A peer in error does not answer; whatever else goes unanswered, the wires have lost, each time.
        if self.world.qp(peer).state() == QpState::Err {
            return self.gave_up(at, flow);
        }
        if tries.lost + tries.busy < tries.sent {
            return wrong(format!("{at:?} gave up, but there were answers that were not lost: {tries:?}"));
        }
        let longest =
            u64::from(retries + 1) * 4 * ack_timeout_ns(timeout).unwrap_or(0) + RNR_TIMER_NS[14] * 2;
        let long_ago = self.healed.is_some_and(|when| self.world.now().since(when) > longest);
        if long_ago {
            return wrong(format!("{at:?} gave up, but {peer:?} is there and the wires lose nothing"));
        }
        self.gave_up(at, flow)
    }

    fn gave_up(&mut self, at: QpRef, flow: usize) -> Result<(), Violation> {
        self.exhausted.push(at);
        self.checker.may_fail(flow, WcStatus::RetryExcErr);
        self.checker.may_flush(flow ^ 1);
        self.work.give_up(flow);
        Ok(())
    }
}

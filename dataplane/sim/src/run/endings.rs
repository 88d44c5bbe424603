//! Runs that end badly, as they should: a peer falls silent, a key is taken away.

use ferroce_transport::Instant;
use ferroce_transport::time::{RNR_TIMER_NS, ack_timeout_ns};
use ferroce_verbs::{QpState, WcStatus};

use super::{PATIENCE_NS, Run, stuck};
use crate::checker::{OpKind, SendRecord, Violation};

impl Run<'_> {
    pub(super) fn fall_silent(&mut self) {
        self.silent = Some(self.world.now());
        self.world.cut(0, 1, Instant(u64::MAX));
        for flow in 0..self.work.flows.len() {
            self.checker.may_fail(flow, WcStatus::RetryExcErr);
            self.checker.may_flush(flow);
        }
    }

    pub(super) fn until_both_failed(&mut self) -> Result<(), Violation> {
        let connection = &self.plan.connections[0];
        let timeout = ack_timeout_ns(connection.timeout).unwrap_or(0);
        // A timeout may be noticed up to four times late (IBTA 9.9.2.1.1), and an RNR wait may come first.
        let rnr = RNR_TIMER_NS[usize::from(connection.rnr_timer)];
        let bound = (u64::from(connection.retry_cnt) + 1) * 4 * timeout + 2 * rnr + 10_000_000;
        self.work.feed(&mut self.world, &mut self.checker)?;
        while self.fatal.len() < 2
            || (0..2).any(|f| self.checker.sends_open(f) + self.checker.recvs_open(f) > 0)
        {
            if !self.step()? {
                return stuck(format!("at rest with {}", self.open()));
            }
            if self.silent.is_some_and(|since| self.world.now().since(since) > bound) {
                return stuck(format!("{bound} ns after the peer fell silent: {}", self.open()));
            }
        }
        // Retries may have been spent before the silence, but hardly half of them.
        let early = u64::from(connection.retry_cnt) * timeout / 2;
        let took = self.silent.map_or(0, |since| self.world.now().since(since));
        if took < early {
            return stuck(format!("gave up after {took} ns, half of the retries take {early} ns"));
        }
        match self.qps[0].iter().find(|at| self.world.qp(**at).state() != QpState::Err) {
            Some(at) => stuck(format!("{at:?} is in {:?}", self.world.qp(*at).state())),
            None => Ok(()),
        }
    }

    /// After each event from the time on at which it may be: the window that the first direction goes through is ended
    /// while WRITEs are under way to it.
    pub(super) fn perhaps_take_key(&mut self) -> Result<(), Violation> {
        if self.key_due && self.exhausted.is_empty() && self.work.taken_key.is_none() {
            self.work.take_key(0, &mut self.world, &mut self.checker)?;
        }
        Ok(())
    }

    /// Its owner knows that the window is ended. What is under way through it must fail: with the answer that says so, or,
    /// where that was lost, for want of an answer. The owner's queue pair is in error by that.
    pub(super) fn key_is_gone(&mut self, flow: usize, record: &SendRecord, status: WcStatus) {
        let taken = self.work.taken_key.is_some() && record.window == self.work.taken_key;
        if flow == 1 && record.kind == OpKind::LocalInv && taken && status == WcStatus::Success {
            self.checker.key_gone(&self.world, record.window.unwrap_or_default());
            self.checker.may_fail(0, WcStatus::RemAccessErr);
            self.checker.may_fail(1, WcStatus::WrFlushErr);
            self.checker.may_flush(0);
            self.checker.may_flush(1);
        }
    }

    /// Until the sender has failed.
    pub(super) fn until_refused(&mut self) -> Result<(), Violation> {
        let deadline = self.start.after(self.plan.silence_ns + PATIENCE_NS);
        self.work.feed(&mut self.world, &mut self.checker)?;
        while !self.checker.has_failed(0) && self.exhausted.is_empty() {
            if !self.step()? {
                return stuck(format!("at rest with {}", self.open()));
            }
            if self.world.now() > deadline {
                return stuck(format!("{PATIENCE_NS} ns after a key could be taken away: {}", self.open()));
            }
        }
        Ok(())
    }
}

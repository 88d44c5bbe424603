//! Send queues are drained in the middle of traffic, their attributes changed, and go on.

use ferroce_transport::Completion;
use ferroce_verbs::{QpChange, QpModify, QpState, QpType, WcStatus};

use super::{DRAIN, Run, stuck};
use crate::checker::{Violation, ViolationKind};
use crate::world::QpRef;

impl Run<'_> {
    /// A send of `flow` finished: perhaps its send queue is drained now.
    pub(super) fn perhaps_drain(&mut self, flow: usize) -> Result<(), Violation> {
        let at = self.work.flows[flow].from;
        if self.draining[flow]
            || !self.drains.chance(self.plan.drains_ppm)
            || self.world.qp(at).state() != QpState::Rts
        {
            return Ok(());
        }
        self.draining[flow] = true;
        self.change_state(at, &QpModify::ToSqd)
    }

    /// It is told that a send queue is drained.
    pub(super) fn drained(&mut self, at: QpRef) -> Result<(), Violation> {
        let flow = self.work.flows.iter().position(|flow| flow.from == at);
        let Some(flow) = flow.filter(|flow| self.draining[*flow]) else {
            let what = format!("{at:?} was told to be drained; nobody asked for it");
            return Err(Violation { kind: ViolationKind::WrongNotice, what });
        };
        self.drained += 1;
        self.rested[flow] = true;
        if self.drains.chance(600_000) {
            let change = self.change(flow);
            self.change_state(at, &QpModify::Change(change))?;
        }
        let pause = self.drains.below(200_000);
        self.world.wake_at(self.world.now().after(pause), DRAIN + flow as u64);
        Ok(())
    }

    /// It is time to go on.
    pub(super) fn undrain(&mut self, flow: usize) -> Result<(), Violation> {
        let at = self.work.flows[flow].from;
        self.draining[flow] = false;
        self.rested[flow] = false;
        match self.world.qp(at).state() {
            QpState::Err => Ok(()),
            _ => self.change_state(at, &QpModify::SqdToRts),
        }
    }

    /// Nothing finishes that a drained send queue had not finished before.
    pub(super) fn check_drained(&self, at: QpRef, completion: &Completion) -> Result<(), Violation> {
        let sent = match completion {
            Completion::Retired => true,
            Completion::Wc(wc) => !wc.is_recv && wc.status == WcStatus::Success,
        };
        let told = self.work.flows.iter().zip(&self.rested).any(|(flow, told)| flow.from == at && *told);
        if !sent || !told {
            return Ok(());
        }
        let what = format!("{at:?} was told to be drained, and then {completion:?}");
        Err(Violation { kind: ViolationKind::NotDrained, what })
    }

    fn change_state(&mut self, at: QpRef, modify: &QpModify) -> Result<(), Violation> {
        self.world.modify(at, modify).or_else(|error| stuck(error.to_string()))
    }

    /// Attributes that may change in SQD, within what the two ends agreed upon.
    fn change(&mut self, flow: usize) -> QpChange {
        let work = &self.work.flows[flow];
        let (info, peer) = (self.world.qp(work.from).info(), self.world.qp(work.to).info());
        let mut change = QpChange::default();
        let (Some(mut rtr), Some(theirs)) = (info.rtr, peer.rtr) else { return change };
        if work.connection.service == QpType::Ud {
            return change;
        }
        let rng = &mut self.drains;
        (rtr.av.traffic_class, rtr.av.udp_src) = (rng.bits() as u8 & !3, 0xc000 | rng.bits() as u16);
        change.av = Some(rtr.av);
        if work.connection.service == QpType::Uc {
            return change;
        }
        change.timeout = Some(rng.range(10, 12) as u8);
        change.retry_cnt = Some(rng.range(6, 7) as u8);
        change.min_rnr_timer = Some(rng.range(1, 14) as u8);
        change.max_rd_atomic = Some(rng.range(1, u64::from(theirs.max_dest_rd_atomic)) as u8);
        // Never below what the peer may have outstanding.
        let needed = peer.rts.map_or(16, |rts| rts.max_rd_atomic);
        change.max_dest_rd_atomic = Some(rng.range(u64::from(needed), 16) as u8);
        change
    }
}

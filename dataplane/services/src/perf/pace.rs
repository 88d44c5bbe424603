//! When the next message may start: a cap of the rate, or a schedule.
//!
//! Times are those of [`crate::clock`], which samples are made with too.

use super::spec::{PerfRate, PerfSpec};

/// Waits shorter than this are spent polling: a sleep would end too late.
const AWAKE_NS: u64 = 2_000_000;

/// The pace of a test.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    rate: PerfRate,
    /// Message 0 of an open loop starts here; `None` before it.
    start_ns: Option<u64>,
    /// The next burst starts here; `None` before the first.
    due_ns: Option<u64>,
    /// Left of the burst under way.
    left: u64,
    /// Until when nothing may start, as of the last question.
    waits_until_ns: Option<u64>,
}

impl Pace {
    /// The pace of `spec`, if it has one.
    pub fn of(spec: &PerfSpec) -> Option<Pace> {
        let rate = spec.rate?;
        Some(Pace { rate, start_ns: None, due_ns: None, left: 0, waits_until_ns: None })
    }

    /// Whether a message may start now. Who is late catches up one burst and no more: the rate is a cap.
    pub fn may_start(&mut self, now_ns: u64) -> bool {
        self.waits_until_ns = None;
        if self.left > 0 {
            return true;
        }
        let due = *self.due_ns.get_or_insert(now_ns);
        if now_ns < due {
            self.waits_until_ns = Some(due);
            return false;
        }
        self.due_ns = Some(due.saturating_add(self.rate.gap_ns()).max(now_ns));
        self.left = self.rate.burst.into();
        true
    }

    /// So many messages started; a list that is longer than what is left of the burst ends it.
    pub fn started(&mut self, messages: u64) {
        self.left = self.left.saturating_sub(messages);
    }

    /// When message `message` of an open loop is meant to start.
    pub fn intended_ns(&self, message: u64) -> u64 {
        let after = u128::from(message) * 1_000_000_000 / u128::from(self.rate.msgs_per_s.max(1));
        self.start_ns.unwrap_or(0).saturating_add(u64::try_from(after).unwrap_or(u64::MAX))
    }

    /// Whether message `message` of an open loop is due. The first question starts the schedule.
    pub fn is_due(&mut self, message: u64, now_ns: u64) -> bool {
        self.start_ns.get_or_insert(now_ns);
        let due = self.intended_ns(message);
        self.waits_until_ns = (now_ns < due).then_some(due);
        now_ns >= due
    }

    /// Waiting is what the test does now.
    pub fn waits(&self) -> bool {
        self.waits_until_ns.is_some()
    }

    /// Waiting, and so short that the worker should not sleep.
    pub fn keeps_awake(&self, now_ns: u64) -> bool {
        self.waits_until_ns.is_some_and(|until| until.saturating_sub(now_ns) < AWAKE_NS)
    }

    /// Nothing is to start any more.
    pub fn end(&mut self) {
        self.waits_until_ns = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::{PerfMode, PerfOp, Role};

    fn pace(msgs_per_s: u64, burst: u32) -> Pace {
        let rate = Some(PerfRate { msgs_per_s, burst });
        let spec = PerfSpec { rate, ..PerfSpec::new(PerfOp::Send, PerfMode::Bw, Role::Client, 64) };
        Pace::of(&spec).unwrap()
    }

    /// Messages that start within `until_ns` when somebody asks every `step_ns`.
    fn started(pace: &mut Pace, step_ns: u64, until_ns: u64) -> u64 {
        let mut count = 0;
        for at in (1_000..1_000 + until_ns).step_by(step_ns as usize) {
            while pace.may_start(at) {
                pace.started(1);
                count += 1;
            }
        }
        count
    }

    #[test]
    fn the_rate_holds_however_often_one_asks() {
        for (burst, step) in [(1, 100), (1, 777), (10, 100), (10, 30_000)] {
            let count = started(&mut pace(100_000, burst), step, 100_000_000);
            assert!((9_900..=10_020).contains(&count), "{count} at burst {burst}, step {step}");
        }
    }

    #[test]
    fn who_was_away_catches_up_one_burst_only() {
        let mut pace = pace(1_000, 4);
        assert_eq!(started(&mut pace, 1, 10), 4);
        let late = 60_000_000_000;
        let mut count = 0;
        while pace.may_start(late) {
            pace.started(1);
            count += 1;
        }
        assert_eq!(count, 8, "what was due, and one burst that is due from now on");
    }

    #[test]
    fn a_schedule_does_not_move() {
        let mut pace = pace(3, 1);
        assert!(pace.is_due(0, 500));
        assert_eq!(pace.intended_ns(3), 500 + 1_000_000_000);
        assert!(!pace.is_due(1, 500 + 333_333_332) && pace.waits());
        assert!(pace.is_due(1, 500 + 333_333_333) && !pace.waits());
        assert!(pace.is_due(2, 10_000_000_000), "late messages are due at once");
    }
}

//! The measured time of a test: when it starts, what it leaves out, when a duration is over.
//!
//! Times are the worker's, once per pass. The thread's CPU time costs a system call and is read twice: where the
//! measurement starts and where it ends.

use rustix::time::{ClockId, clock_gettime};

use super::spec::PerfSpec;

/// What had been counted at a moment.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Mark {
    pub ns: u64,
    /// Messages done.
    pub done: u64,
    /// Messages received.
    pub received: u64,
    pub cpu_ns: u64,
}

/// The measurement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Measure {
    duration_ns: Option<u64>,
    margin_ns: u64,
    started_ns: Option<u64>,
    from: Option<Mark>,
    to: Option<Mark>,
}

impl Measure {
    pub fn of(spec: &PerfSpec) -> Measure {
        Measure {
            duration_ns: spec.duration_ns,
            margin_ns: spec.margin_ns,
            started_ns: None,
            from: None,
            to: None,
        }
    }

    pub fn is_started(&self) -> bool {
        self.started_ns.is_some()
    }

    /// Samples count: the measurement is under way.
    pub fn is_open(&self) -> bool {
        self.from.is_some() && self.to.is_none()
    }

    /// The first message.
    pub fn start(&mut self, now_ns: u64) {
        self.started_ns = Some(now_ns);
    }

    /// Once per pass: notes what was counted where the measurement begins and, with a margin, ends. True when the
    /// duration is over.
    pub fn tick(&mut self, now_ns: u64, done: u64, received: u64) -> bool {
        let Some(started) = self.started_ns else { return false };
        let ran_ns = now_ns.saturating_sub(started);
        if self.from.is_none() && ran_ns >= self.margin_ns {
            self.from = Some(mark(now_ns, done, received));
        }
        let Some(duration) = self.duration_ns else { return false };
        let measured = duration.saturating_sub(self.margin_ns);
        if self.margin_ns > 0 && self.to.is_none() && self.from.is_some() && ran_ns >= measured {
            self.to = Some(mark(now_ns, done, received));
        }
        ran_ns >= duration
    }

    /// The end of the test: `last` is the last thing that happened.
    pub fn end(&mut self, last: Mark) {
        if self.from.is_some() && self.to.is_none() {
            self.to = Some(mark(last.ns, last.done, last.received));
        }
    }

    /// From and to, if the measurement began at all.
    pub fn span(&self) -> Option<(Mark, Mark)> {
        Some((self.from?, self.to?))
    }

    /// Time that this thread ran between the two, in ns.
    pub fn cpu_ns(&self) -> Option<u64> {
        let (from, to) = self.span()?;
        Some(to.cpu_ns.saturating_sub(from.cpu_ns))
    }
}

fn mark(ns: u64, done: u64, received: u64) -> Mark {
    let cpu = clock_gettime(ClockId::ThreadCPUTime);
    let cpu_ns = u64::try_from(cpu.tv_sec).unwrap_or(0).saturating_mul(1_000_000_000)
        + u64::try_from(cpu.tv_nsec).unwrap_or(0);
    Mark { ns, done, received, cpu_ns }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::{PerfMode, PerfOp, Role};

    #[test]
    fn margins_are_left_out() {
        let spec = PerfSpec {
            duration_ns: Some(1_000),
            margin_ns: 100,
            ..PerfSpec::new(PerfOp::Write, PerfMode::Bw, Role::Client, 64)
        };
        let mut measure = Measure::of(&spec);
        assert!(!measure.tick(0, 5, 0), "nothing counts before the first message");
        measure.start(1_000);
        for now in 1_000..2_000 {
            assert!(!measure.tick(now, now, 0), "{now}");
            assert_eq!(measure.is_open(), (1_100..1_900).contains(&now), "{now}");
        }
        assert!(measure.tick(2_000, 2_000, 0));
        measure.end(Mark { ns: 2_500, done: 2_500, ..Mark::default() });
        let (from, to) = measure.span().unwrap();
        assert_eq!((to.ns - from.ns, to.done - from.done), (800, 800));
    }

    #[test]
    fn without_margin_everything_counts() {
        let spec = PerfSpec::new(PerfOp::Write, PerfMode::Bw, Role::Client, 64);
        let mut measure = Measure::of(&spec);
        measure.start(10);
        assert!(!measure.tick(10, 0, 0) && measure.is_open());
        measure.end(Mark { ns: 90, done: 7, ..Mark::default() });
        let (from, to) = measure.span().unwrap();
        assert_eq!((from.ns, to.ns, to.done), (10, 90, 7));
        assert!(measure.cpu_ns().is_some());
    }
}

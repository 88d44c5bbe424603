//! Loop watchdog: names the stage that held the loop for more than 100 us.
//!
//! Owns the time of the last stamp. The clock is read at the end of a stage that did work, so an idle pass costs one
//! reading; an idle pass that was long all the same lost its core to the kernel and is counted apart, as `preempted`. The
//! adaptive sleep does not count. Called by `poll_once`; the record is read by control through [`crate::stats`].

use ferroce_transport::Instant;

use crate::clock::Clock;
use crate::stats::{Counter, WorkerBlock};

/// A stage that takes longer than this is a stall.
pub const STALL_NS: u64 = 100_000;

/// Stages of a pass, in their order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Stage {
    /// Not in a pass.
    Outside,
    /// Commands from control.
    Mailbox,
    /// Frames from the port and from other workers.
    Receive,
    /// The timing wheel.
    Timers,
    /// Services.
    Services,
    /// Frames to the port.
    Transmit,
    /// Making them visible.
    Flush,
    /// Adaptive sleep.
    Sleep,
}

impl Stage {
    /// All of them, in the order of their numbers.
    pub const ALL: [Stage; 8] = [
        Stage::Outside,
        Stage::Mailbox,
        Stage::Receive,
        Stage::Timers,
        Stage::Services,
        Stage::Transmit,
        Stage::Flush,
        Stage::Sleep,
    ];

    /// Name for outputs.
    pub const fn name(self) -> &'static str {
        match self {
            Stage::Outside => "outside",
            Stage::Mailbox => "mailbox",
            Stage::Receive => "receive",
            Stage::Timers => "timers",
            Stage::Services => "services",
            Stage::Transmit => "transmit",
            Stage::Flush => "flush",
            Stage::Sleep => "sleep",
        }
    }

    /// From its number.
    pub fn from_u8(n: u8) -> Stage {
        Stage::ALL.get(n as usize).copied().unwrap_or(Stage::Outside)
    }
}

/// The watchdog.
#[derive(Debug)]
pub(crate) struct Watchdog {
    clock: Clock,
    stamp: Instant,
    worked: bool,
}

impl Watchdog {
    pub fn new(clock: Clock) -> Self {
        Watchdog { clock, stamp: clock.now(), worked: false }
    }

    /// Begins a pass and returns its time. A long pass in which no stage did work was preempted.
    #[inline]
    pub fn begin(&mut self, block: &WorkerBlock) -> Instant {
        let now = self.clock.now();
        if !self.worked && now.since(self.stamp) > STALL_NS {
            block.add(Counter::Preempted, 1);
        }
        self.stamp = now;
        self.worked = false;
        now
    }

    /// Ends a stage that did `work`; returns it.
    #[inline]
    pub fn end(&mut self, stage: Stage, work: usize, block: &WorkerBlock) -> usize {
        if work != 0 {
            let now = self.clock.now();
            self.judge(stage, now, block);
            self.stamp = now;
            self.worked = true;
        }
        work
    }

    /// Starts anew after a sleep and returns the time.
    pub fn after_sleep(&mut self) -> Instant {
        self.stamp = self.clock.now();
        self.worked = true;
        self.stamp
    }

    #[inline]
    fn judge(&self, stage: Stage, now: Instant, block: &WorkerBlock) {
        let took = now.since(self.stamp);
        if took > STALL_NS {
            block.add(Counter::Stalls, 1);
            block.set_stall(stage, took);
        }
    }
}

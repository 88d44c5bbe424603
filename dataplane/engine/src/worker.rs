//! The poll loop. [`Worker::poll_once`] is the table of contents of the data path.
//!
//! Owns a port queue, the services and a [`WorkerCore`], on one thread. Invariant: nothing here is shared; what control
//! wants comes through the mailbox, what other workers received for us through the forward rings. In steady state it
//! makes no system call, takes no lock and allocates nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ferroce_nic::PortQueue;
use ferroce_verbs::Service;

use crate::config::IdlePolicy;
use crate::core::WorkerCore;
use crate::device::Shared;
use crate::forward::Forward;
use crate::services::ServiceSet;
use crate::stall::{Stage, Watchdog};
use crate::stats::Counter;

/// Commands of one pass.
const MAILBOX_BUDGET: usize = 8;
/// Frames of one pass from the port, and as many from other workers.
const RX_BUDGET: usize = 32;
/// Timers of one pass.
const TIMER_BUDGET: usize = 64;
/// Longest sleep: bounds how late anything can be that no wake-up tells of.
const MAX_SLEEP_NS: u64 = 100_000_000;
/// Longest sleep while services are there: they may watch the clock.
const SERVICE_SLEEP_NS: u64 = 1_000_000;
/// Longest sleep while frames wait for room in the port, or an application's requests for room in a queue, which no
/// descriptor tells.
const NO_ROOM_SLEEP_NS: u64 = 20_000;

pub(crate) struct Worker<Q, S> {
    pub core: WorkerCore,
    pub queue: Q,
    pub services: ServiceSet<S>,
    pub forward: Forward,
    pub shared: Arc<Shared>,
    pub idle: IdlePolicy,
    pub watchdog: Watchdog,
    pub idle_passes: u32,
    pub worked: bool,
}

impl<Q: PortQueue, S: Service<WorkerCore>> Worker<Q, S> {
    /// Runs until the engine stops.
    pub fn run(&mut self) {
        while !self.shared.stop.load(Ordering::Relaxed) {
            let work = self.poll_once();
            self.idle(work);
        }
        self.queue.tx_flush();
        self.core.block.enter(Stage::Outside);
    }

    /// One pass over everything this worker owns; returns the work done.
    pub fn poll_once(&mut self) -> usize {
        self.begin_pass();
        let mut work = 0;
        work += self.stage(Stage::Mailbox, Self::mailbox);
        work += self.stage(Stage::Receive, Self::receive);
        work += self.stage(Stage::Timers, Self::timers);
        work += self.stage(Stage::Services, Self::services);
        let sent = self.stage(Stage::Transmit, Self::transmit);
        self.flush(sent);
        self.counters(work + sent)
    }

    /// Reads the clock, once, and books the time of the pass before.
    #[inline]
    fn begin_pass(&mut self) {
        // The time stamp counters of two cores may differ a little: time never goes back for a worker that was moved.
        let now = self.watchdog.begin(&self.core.block).max(self.core.now);
        let took = now.since(self.core.now);
        self.core.block.add(if self.worked { Counter::BusyNs } else { Counter::IdleNs }, took);
        self.core.now = now;
    }

    #[inline]
    fn stage(&mut self, stage: Stage, run: impl FnOnce(&mut Self) -> usize) -> usize {
        self.core.block.enter(stage);
        let work = run(self);
        self.watchdog.end(stage, work, &self.core.block)
    }

    /// Commands from control.
    fn mailbox(&mut self) -> usize {
        let mut done = self.services.commands(&mut self.core, MAILBOX_BUDGET);
        let Some(seat) = self.shared.workers.get(self.core.id as usize) else { return done };
        while done < MAILBOX_BUDGET {
            let Some((command, reply)) = seat.commands.take() else { break };
            reply.answer(self.core.execute(command));
            done += 1;
        }
        done
    }

    /// Frames from the port, then frames that other workers received for us.
    fn receive(&mut self) -> usize {
        let Self { core, queue, forward, .. } = self;
        let from_port = queue.rx_burst(RX_BUDGET, |frame| core.receive(&frame, forward));
        from_port + forward.drain(RX_BUDGET, |carried| core.receive_forwarded(carried))
    }

    /// Timeouts of queue pairs, and queue pairs that wait for their time to send.
    fn timers(&mut self) -> usize {
        let mut fired = 0;
        while fired < TIMER_BUDGET {
            let Some(node) = self.core.wheel.pop(self.core.now) else { break };
            self.core.timer_fired(node);
            fired += 1;
        }
        if fired != 0 {
            self.core.block.add(Counter::TimersFired, fired as u64);
        }
        fired
    }

    /// Services see their completions and post; application threads too, through their rings.
    fn services(&mut self) -> usize {
        self.services.poll(&mut self.core) + self.core.serve_apps()
    }

    /// Queue pairs with something to send, in the schedule's order.
    fn transmit(&mut self) -> usize {
        self.core.transmit(&mut self.queue)
    }

    /// Makes frames visible to the other side, and forwarded ones to their workers.
    #[inline]
    fn flush(&mut self, sent: usize) {
        self.core.block.enter(Stage::Flush);
        self.queue.tx_flush();
        self.forward.flush();
        self.watchdog.end(Stage::Flush, sent, &self.core.block);
    }

    #[inline]
    fn counters(&mut self, work: usize) -> usize {
        self.core.block.add(Counter::Passes, 1);
        self.worked = work != 0;
        work
    }

    /// What to do after a pass: nothing under `spin`; under `adaptive`, sleep after enough idle passes.
    #[inline]
    fn idle(&mut self, work: usize) {
        let IdlePolicy::Adaptive { spin_passes } = self.idle else { return };
        if work != 0 {
            self.idle_passes = 0;
        } else if self.idle_passes < spin_passes {
            self.idle_passes += 1;
            std::hint::spin_loop();
        } else {
            self.sleep();
        }
    }

    /// Sleeps until a frame, a command, a forwarded frame or the next timer: flag and fence, look once more, sleep.
    fn sleep(&mut self) {
        let shared = self.shared.clone();
        let Some(seat) = shared.workers.get(self.core.id as usize) else { return };
        self.core.block.enter(Stage::Sleep);
        seat.bell.arm();
        let quiet = self.queue.arm_wakeup() && !self.work_waits();
        if quiet {
            let fds = self.queue.wait_fds();
            let longest = if fds.is_empty() { NO_ROOM_SLEEP_NS } else { self.longest_sleep() };
            seat.bell.sleep(&fds, longest);
            self.core.block.add(Counter::Sleeps, 1);
        }
        self.queue.disarm_wakeup();
        seat.bell.disarm(quiet);
        let now = self.watchdog.after_sleep();
        self.core.block.add(Counter::IdleNs, now.since(self.core.now));
        self.core.now = now;
    }

    fn work_waits(&self) -> bool {
        let commands =
            self.shared.workers.get(self.core.id as usize).is_some_and(|seat| !seat.commands.is_empty());
        commands
            || self.shared.stop.load(Ordering::Relaxed)
            || self.services.command_waits()
            || self.core.app_waits()
            || self.forward.is_waiting()
    }

    fn longest_sleep(&self) -> u64 {
        let mut longest = MAX_SLEEP_NS;
        if !self.services.is_empty() {
            longest = SERVICE_SLEEP_NS;
        }
        if self.core.sched.queued() != 0 || self.core.app_left() {
            longest = NO_ROOM_SLEEP_NS;
        }
        match self.core.wheel.next_deadline() {
            Some(at) => longest.min(at.since(self.core.now).max(1)),
            None => longest,
        }
    }
}

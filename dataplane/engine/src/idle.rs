//! Sleeping without missing work.
//!
//! Owns a worker's [`Doorbell`]: a flag that says "I sleep" and an eventfd. The protocol, which a loom test walks
//! through: the worker sets the flag, fences, looks for work once more, and only then sleeps; whoever gives it work
//! publishes the work, fences, and writes the eventfd if the flag is set. One of the two sees the other. A worker that
//! never sleeps never sets the flag, so nobody ever makes a system call to wake it. Never called for a frame: ports wake
//! by their own descriptors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// The flag of the protocol.
#[derive(Debug)]
pub(crate) struct SleepFlag(AtomicBool);

impl SleepFlag {
    pub fn new() -> Self {
        SleepFlag(AtomicBool::new(false))
    }

    /// Says that the owner is about to sleep. It must look for work once more after this.
    #[inline]
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Says that the owner is awake.
    #[inline]
    pub fn clear(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// True if the owner sleeps, or is about to. The caller has published its work before this.
    #[inline]
    pub fn must_wake(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed)
    }
}

/// How others wake a worker.
#[derive(Debug)]
pub(crate) struct Doorbell {
    flag: SleepFlag,
    event: OwnedFd,
}

impl Doorbell {
    pub fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Doorbell { flag: SleepFlag::new(), event })
    }

    /// Wakes the worker if it sleeps. The work is published already.
    #[inline]
    pub fn ring(&self) {
        if self.flag.must_wake() {
            // A full counter (EAGAIN) means that it is awake, or about to be; nothing else can happen to our own eventfd.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Before sleeping; the worker looks for work once more after it.
    pub fn arm(&self) {
        self.flag.set();
    }

    /// After sleeping, or instead of it.
    pub fn disarm(&self, slept: bool) {
        self.flag.clear();
        if slept {
            let mut count = [0u8; 8];
            let _ = rustix::io::read(&self.event, &mut count);
        }
    }

    /// Sleeps on the eventfd and on `fds` for at most `timeout_ns`.
    pub fn sleep(&self, fds: &[BorrowedFd<'_>], timeout_ns: u64) {
        let mut polled: Vec<PollFd<'_>> = Vec::with_capacity(fds.len() + 1);
        polled.push(PollFd::from_borrowed_fd(self.event.as_fd(), PollFlags::IN));
        polled.extend(fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)));
        let timeout = Timespec {
            tv_sec: i64::try_from(timeout_ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: (timeout_ns % 1_000_000_000) as _,
        };
        // An interrupted sleep (EINTR) is a short sleep: the loop comes back here if there is nothing to do.
        let _ = poll(&mut polled, Some(&timeout));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering};

    use super::SleepFlag;

    /// Whatever the interleaving: work that was published before the worker slept is seen, or the worker is woken.
    #[test]
    fn no_wake_up_is_lost() {
        loom::model(|| {
            let flag = Arc::new(SleepFlag::new());
            let work = Arc::new(AtomicUsize::new(0));
            let giver = {
                let (flag, work) = (flag.clone(), work.clone());
                loom::thread::spawn(move || {
                    work.store(1, Ordering::Release);
                    flag.must_wake()
                })
            };
            flag.set();
            let saw = work.load(Ordering::Acquire) == 1;
            if saw {
                flag.clear();
            }
            let woke = giver.join().expect("no panic");
            assert!(saw || woke, "the worker sleeps, the work is there, and nobody woke it");
        });
    }

    /// Two givers: at least one wakes a worker that saw neither's work.
    #[test]
    fn two_givers_wake_once_at_least() {
        loom::model(|| {
            let flag = Arc::new(SleepFlag::new());
            let work = Arc::new(AtomicUsize::new(0));
            let give = || {
                let (flag, work) = (flag.clone(), work.clone());
                loom::thread::spawn(move || {
                    work.fetch_add(1, Ordering::AcqRel);
                    flag.must_wake()
                })
            };
            let (a, b) = (give(), give());
            flag.set();
            let seen = work.load(Ordering::Acquire);
            let woken =
                [a.join().expect("no panic"), b.join().expect("no panic")].into_iter().filter(|w| *w).count();
            assert!(seen == 2 || woken >= 1, "saw {seen}, woken by {woken}");
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_ring_ends_the_sleep_and_nobody_rings_a_worker_that_is_awake() {
        let bell = Arc::new(Doorbell::new().expect("an eventfd"));
        bell.ring();
        bell.arm();
        let ringer = {
            let bell = bell.clone();
            std::thread::spawn(move || bell.ring())
        };
        let start = Instant::now();
        bell.sleep(&[], Duration::from_secs(60).as_nanos() as u64);
        assert!(start.elapsed() < Duration::from_secs(30), "slept although rung");
        bell.disarm(true);
        ringer.join().expect("no panic");
        // The counter is drained: the next sleep lasts until its timeout.
        bell.arm();
        let start = Instant::now();
        bell.sleep(&[], 2_000_000);
        assert!(start.elapsed() >= Duration::from_millis(2));
        bell.disarm(true);
    }
}

//! The sleep and wake protocol of a ring, over one flag in shared memory.
//!
//! Owns the order of its steps: the sleeper raises the flag, fences, and looks for records once more; the waker
//! publishes a record, fences, and looks at the flag. Invariant: whatever the interleaving, either the sleeper sees
//! the record or the waker sees the flag (a loom test goes through all of them). Called by both ends of a ring. Never
//! waits and makes no system call itself.

use core::sync::atomic::{AtomicU32, Ordering, fence};

/// The operations that the protocol needs, so that the test can run the same code on loom's atomics.
pub(crate) trait SleepFlag {
    /// Relaxed load.
    fn get(&self) -> u32;
    /// Relaxed store.
    fn set(&self, value: u32);
    /// Takes the flag down; what it was.
    fn take(&self) -> u32;
    /// A full fence: no load after it is done before a store ahead of it is visible.
    fn full_fence();
}

impl SleepFlag for AtomicU32 {
    #[inline]
    fn get(&self) -> u32 {
        self.load(Ordering::Relaxed)
    }
    #[inline]
    fn set(&self, value: u32) {
        self.store(value, Ordering::Relaxed);
    }
    #[inline]
    fn take(&self) -> u32 {
        self.swap(0, Ordering::AcqRel)
    }
    #[inline]
    fn full_fence() {
        fence(Ordering::SeqCst);
    }
}

/// The waker's side, after it published a record: true if the sleeper must be woken. True once per sleep, so a burst
/// of flushes makes one system call.
#[inline]
pub(crate) fn must_wake<F: SleepFlag>(flag: &F) -> bool {
    F::full_fence();
    flag.get() != 0 && flag.take() != 0
}

/// The sleeper's side: asks for a wake-up. False, with the request taken back, if a record is waiting already.
#[inline]
pub(crate) fn may_sleep<F: SleepFlag>(flag: &F, mut waiting: impl FnMut() -> bool) -> bool {
    flag.set(1);
    F::full_fence();
    if waiting() {
        flag.set(0);
        return false;
    }
    true
}

//! Goes through all interleavings of going to sleep and publishing a record, with the code that the rings use.

#[path = "../src/shm/wake.rs"]
mod wake;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::thread;
use wake::SleepFlag;

impl SleepFlag for AtomicU32 {
    fn get(&self) -> u32 {
        self.load(Ordering::Relaxed)
    }
    fn set(&self, value: u32) {
        self.store(value, Ordering::Relaxed);
    }
    fn take(&self) -> u32 {
        self.swap(0, Ordering::AcqRel)
    }
    fn full_fence() {
        fence(Ordering::SeqCst);
    }
}

/// Word of the next record, and the sleeper's flag.
#[derive(Default)]
struct Ring {
    words: [AtomicU32; 2],
    sleeping: AtomicU32,
}

#[test]
fn no_wake_up_is_lost() {
    loom::model(|| {
        let ring = Arc::new(Ring::default());
        let producer = ring.clone();
        let rung = thread::spawn(move || {
            let mut rung = 0;
            for word in &producer.words {
                word.store(1, Ordering::Release);
                rung += u32::from(wake::must_wake(&producer.sleeping));
            }
            rung
        });
        // Awake, the consumer takes what it finds; then it goes to sleep.
        let mut next = 0;
        while next < 2 && ring.words[next].load(Ordering::Acquire) == 1 {
            next += 1;
        }
        let sleeps =
            wake::may_sleep(&ring.sleeping, || next < 2 && ring.words[next].load(Ordering::Relaxed) == 1);
        let rung = rung.join().unwrap();
        if sleeps && next < 2 {
            assert_eq!(rung, 1, "the consumer sleeps on record {next} and nobody rings, or twice");
        }
    });
}

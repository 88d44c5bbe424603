//! Steady state allocates nothing and makes no system call: a counting allocator sees a hundred thousand passes of
//! plain and wrapped queues, and the kernel would end a thread that called it.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

use ferroce_nic::conformance::commit;
use ferroce_nic::shm::pair;
use ferroce_nic::wrap::{FaultConfig, Rates};
use ferroce_nic::{AnyPort, Options, Port, PortQueue, ShmConfig};

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: all is the system allocator's; counting touches a thread-local without destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations in `passes` passes of echoing 8 frames.
fn passes(a: &mut impl PortQueue, b: &mut impl PortQueue, passes: usize) -> (u64, usize) {
    let frame = [7u8; 300];
    let before = COUNT.get();
    let mut received = 0;
    for pass in 0..passes {
        for _ in 0..8 {
            commit(a, &frame[..60 + pass % 240]);
        }
        a.tx_flush();
        received += b.rx_burst(16, |_| ());
        commit(b, &frame[..100]);
        b.tx_flush();
        received += a.rx_burst(16, |_| ());
    }
    (COUNT.get() - before, received)
}

#[test]
fn plain_queues_allocate_nothing() {
    let config = ShmConfig::new("pair");
    let (mut a, mut b) = pair(&config, &config).expect("a pair");
    let (mut aq, mut bq) = (a.take_queues(), b.take_queues());
    passes(&mut aq[0], &mut bq[0], 1000);
    let (allocations, received) = passes(&mut aq[0], &mut bq[0], 100_000);
    assert_eq!((allocations, received), (0, 900_000));
    // Nor without a peer.
    drop(b);
    a.housekeep();
    assert!(!a.link_up());
    passes(&mut aq[0], &mut bq[0], 10);
    assert_eq!(passes(&mut aq[0], &mut bq[0], 1000), (0, 0));
}

#[test]
fn wrapped_queues_allocate_nothing() {
    let path = std::env::temp_dir().join(format!("ferroce-alloc-{}.pcap", std::process::id()));
    let share = 0.05;
    let delay_time = Duration::from_micros(50);
    let rates = Rates {
        loss: share,
        duplicate: share,
        reorder: share,
        corrupt: share,
        ce_mark: share,
        delay: share,
        delay_time,
    };
    let fault = Some(FaultConfig { seed: 3, rx: rates, tx: rates });
    let config = ShmConfig::new("pair");
    let (a, mut b) = pair(&config, &config).expect("a pair");
    let mut a = AnyPort::wrap(a, &Options { fault, pcap: Some(path.clone()) }).expect("a folder");
    let (mut aq, mut bq) = (a.take_queues(), b.take_queues());
    passes(&mut aq[0], &mut bq[0], 1000);
    let (allocations, received) = passes(&mut aq[0], &mut bq[0], 20_000);
    drop(a);
    std::fs::remove_file(path).expect("the capture");
    assert_eq!(allocations, 0);
    assert!(received > 100_000, "{received}");
}

#[test]
fn plain_queues_make_no_system_call() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    let config = ShmConfig::new("pair");
    let (mut a, mut b) = pair(&config, &config).expect("a pair");
    let (mut aq, mut bq) = (a.take_queues(), b.take_queues());
    let received = Arc::new(AtomicUsize::new(0));
    let outcome = received.clone();
    // Not joined: it ends without the library's knowledge.
    std::thread::spawn(move || {
        passes(&mut aq[0], &mut bq[0], 1000);
        // SAFETY: from here on this thread may only read, write and exit; any other call ends it (seccomp(2)).
        let strict = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT) };
        let (_, received) = if strict == 0 { passes(&mut aq[0], &mut bq[0], 100_000) } else { (0, 1) };
        outcome.store(received, Ordering::Release);
        // SAFETY: ends this thread alone; what it owns is leaked on purpose.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    });
    for _ in 0..5000 {
        match received.load(Ordering::Acquire) {
            0 => std::thread::sleep(Duration::from_millis(2)),
            1 => panic!("seccomp(2) is not permitted here"),
            received => return assert_eq!(received, 900_000),
        }
    }
    panic!("the thread was ended: it made a system call");
}

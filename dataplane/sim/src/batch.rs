//! Many runs on several threads, told in the order of their seeds: how many threads there are changes only the time.
//!
//! Owns the threads. A run itself spawns none and shares nothing. Called by `ferroce-sim`; never judges a run.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;

/// Calls `run` for each of `seeds` on `threads` threads, and `each` with every result, lowest seed first, until that says
/// false. Runs of later seeds may have begun by then; nobody hears of them.
pub fn in_order<R: Send>(
    seeds: Range<u64>,
    threads: usize,
    run: impl Fn(u64) -> R + Sync,
    mut each: impl FnMut(u64, R) -> bool,
) {
    let (next, stop) = (AtomicU64::new(seeds.start), AtomicBool::new(false));
    let (tell, told) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            let tell = tell.clone();
            let (next, stop, run, end) = (&next, &stop, &run, seeds.end);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    // Nobody listens once `each` has said false.
                    if seed >= end || tell.send((seed, run(seed))).is_err() {
                        break;
                    }
                }
            });
        }
        drop(tell);
        let mut early = BTreeMap::new();
        let mut due = seeds.start;
        while let Ok((seed, result)) = told.recv() {
            early.insert(seed, result);
            while let Some(result) = early.remove(&due) {
                if !each(due, result) {
                    stop.store(true, Ordering::Relaxed);
                    return;
                }
                due += 1;
            }
        }
    });
}

/// Threads for [`in_order`]: one per core that this process may use.
pub fn threads() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_order_whatever_the_threads_do() {
        for threads in [1, 2, 7] {
            let mut seen = Vec::new();
            let slow_first = |seed: u64| {
                (0..(20 - seed) * 2000).fold(seed, |sum, n| std::hint::black_box(sum ^ n));
                seed * 3
            };
            in_order(5..20, threads, slow_first, |seed, result| {
                seen.push((seed, result));
                seed < 12
            });
            assert_eq!(seen, (5..=12).map(|seed| (seed, seed * 3)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn no_seeds_are_no_results() {
        in_order(3..3, 2, |seed| seed, |seed, _| panic!("{seed}"));
    }
}

//! Nothing depends on how many regions and windows there are: ten thousand cost each what a hundred do.
//!
//! Ratios within one run; the smallest of several rounds, since the machine does other things too. A scan would show as
//! a ratio near 100; caches that no longer hold the table as one of 2 or 3.
#![cfg(not(miri))]
#![allow(unsafe_code)]

use std::hint::black_box;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use ferroce_mem::os::{Arena, ArenaConfig, PagePolicy, Regions};
use ferroce_mem::{Access, Bind, DeregisterError, Memory, MrInfo, MrInit, PdId};
use ferroce_wire::{DmaLen, Qpn, RemoteAddr, Rkey};

const FEW: usize = 100;
const MANY: usize = 10_000;
const RATIO: f64 = 15.0;
const ACCESS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_READ).union(Access::MW_BIND);
const PD: PdId = PdId(1);

/// Smallest time of a round over `count` things, per thing.
fn each(count: usize, mut round: impl FnMut()) -> Duration {
    let one = || {
        let start = Instant::now();
        round();
        start.elapsed()
    };
    let rounds = std::iter::repeat_with(one).take(if count == FEW { 60 } else { 7 });
    rounds.min().expect("several rounds") / count as u32
}

fn assert_flat(what: &str, cost: impl Fn(usize) -> Duration) {
    let (few, many) = (cost(FEW), cost(MANY));
    let ratio = many.as_nanos() as f64 / few.as_nanos().max(1) as f64;
    println!("{what}: {few:?} each of {FEW}, {many:?} each of {MANY}, ratio {ratio:.2}");
    assert!(ratio < RATIO, "{what}: {few:?} each of {FEW}, but {many:?} each of {MANY}");
}

fn register(memory: &mut Memory, bytes: &mut [u8]) -> MrInfo {
    let len = bytes.len() as u64;
    let init = MrInit { pd: PD, access: ACCESS, iova: 0, len, base: NonNull::from(bytes).cast() };
    // SAFETY: the callers keep `bytes` for longer than the table.
    unsafe { memory.register(init) }.expect("room")
}

#[test]
fn regions_are_registered_used_and_dropped_without_a_scan() {
    let cost = |count: usize| {
        let mut bytes = vec![0u8; 64];
        let mut memory = Memory::new(count as u32, 1);
        let mut replica = Memory::new(count as u32, 1);
        each(count, || {
            let mut regions: Vec<MrInfo> = (0..count).map(|_| register(&mut memory, &mut bytes)).collect();
            let base = NonNull::from(&mut bytes[..]).cast();
            for mr in &regions {
                // SAFETY: `bytes` outlives the table.
                unsafe { replica.replicate(mr, base) }.expect("a free slot");
                let read = Access::REMOTE_READ;
                let remote =
                    memory.check_remote_for(Qpn::new(5), PD, mr.rkey, RemoteAddr(1), DmaLen(8), read);
                assert_eq!(black_box(remote).map(|s| s.len()), Ok(8));
                assert!(memory.hold(mr.lkey));
                assert_eq!(memory.deregister(mr.lkey), Err(DeregisterError::Busy { windows: 0, posted: 1 }));
                memory.release(mr.lkey);
            }
            // Not in the order they came in.
            regions.sort_unstable_by_key(|mr| mr.lkey.0);
            for mr in regions {
                assert_eq!(memory.deregister(mr.lkey), Ok(mr));
                assert_eq!(replica.deregister(mr.lkey), Ok(mr));
            }
        })
    };
    assert_flat("regions", cost);
}

#[test]
fn windows_are_bound_checked_and_invalidated_without_a_scan() {
    let cost = |count: usize| {
        let mut bytes = vec![0u8; 64];
        let mut memory = Memory::with_windows(1, count as u32, 1);
        let mr = register(&mut memory, &mut bytes);
        let mut keys: Vec<Rkey> = (0..count).map(|_| memory.alloc_window(PD).expect("room").rkey).collect();
        let qpn = |at: usize| Qpn::new(1000 + at as u32);
        each(count, || {
            for (at, key) in keys.iter_mut().enumerate() {
                *key = Rkey(key.0 & !0xff | key.0.wrapping_add(1) & 0xff);
                let bind = Bind { rkey: *key, lkey: mr.lkey, addr: 0, len: 8, access: Access::REMOTE_READ };
                assert_eq!(memory.bind_window(qpn(at), PD, &bind), Ok(()));
            }
            for (at, key) in keys.iter().enumerate() {
                let read = Access::REMOTE_READ;
                let slice = memory.check_remote_for(qpn(at), PD, *key, RemoteAddr(1), DmaLen(7), read);
                assert_eq!(black_box(slice).map(|s| s.len()), Ok(7));
            }
            for (at, key) in keys.iter().enumerate() {
                if at % 2 == 0 {
                    assert_eq!(memory.invalidate(qpn(at), PD, *key), Ok(()));
                } else {
                    // A queue pair that goes finds its own among all the others'.
                    assert_eq!(memory.unbind_all(qpn(at)), 1);
                }
            }
        })
    };
    assert_flat("windows", cost);
}

#[test]
fn owned_regions_are_registered_found_and_dropped_without_a_scan() {
    let cost = |count: usize| {
        let config = ArenaConfig { bytes: 64 * count as u64, pages: PagePolicy::Normal, numa_node: None };
        let (arena, _) = Arena::new(config).expect("memory");
        let mut regions = Regions::new(count as u32, 1);
        let free = arena.free_bytes();
        let cost = each(count, || {
            let add = |_| {
                let block = arena.alloc(64, 64).expect("room");
                regions.register(block, PD, ACCESS, 0).expect("room").lkey
            };
            let keys: Vec<_> = (0..count).map(add).collect();
            assert!(keys.iter().all(|&lkey| regions.block(lkey).is_some()));
            for lkey in keys {
                drop(regions.deregister(lkey).expect("registered"));
            }
        });
        assert_eq!(arena.free_bytes(), free);
        cost
    };
    assert_flat("owned regions", cost);
}

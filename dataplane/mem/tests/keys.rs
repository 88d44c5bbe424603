//! Keys, rights and bounds of the table.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::ptr::NonNull;

use ferroce_mem::{Access, DeregisterError, KeyFault, Lkey, Memory, MrInfo, MrInit, PdId, RegisterError};
use ferroce_wire::{DmaLen, RemoteAddr, Rkey};
use proptest::prelude::*;

const PD: PdId = PdId(3);
const SECRET: u64 = 0x5eed_0123_4567_89ab;
const ALL: Access = Access::all();

fn init(bytes: &mut [u8], iova: u64, access: Access) -> MrInit {
    MrInit { pd: PD, access, iova, len: bytes.len() as u64, base: NonNull::from(bytes).cast() }
}

/// Registers memory that the test keeps until the table is gone.
fn register(memory: &mut Memory, bytes: &mut [u8], iova: u64, access: Access) -> MrInfo {
    // SAFETY: the callers keep `bytes` for longer than the table.
    unsafe { memory.register(init(bytes, iova, access)) }.expect("registration")
}

#[test]
fn every_fault_is_told_apart() {
    let mut bytes = vec![0u8; 4096];
    let mut memory = Memory::new(16, SECRET);
    let mr = register(&mut memory, &mut bytes, 0x1000, Access::LOCAL_WRITE | Access::REMOTE_READ);
    let remote = |pd, key, addr, len, want| {
        memory.check_remote(pd, key, RemoteAddr(addr), DmaLen(len), want).map(|slice| slice.len())
    };
    let local = |pd, key, addr, len, want| memory.check_local(pd, key, addr, len, want).map(|s| s.len());
    let read = Access::REMOTE_READ;
    assert_eq!(remote(PD, mr.rkey, 0x1000, 4096, read), Ok(4096));
    assert_eq!(remote(PD, mr.rkey, 0x1fff, 1, read), Ok(1));
    assert_eq!(remote(PD, Rkey(mr.rkey.0 ^ 1), 0x1000, 1, read), Err(KeyFault::Unknown));
    assert_eq!(remote(PD, Rkey(0), 0x1000, 1, read), Err(KeyFault::Unknown));
    assert_eq!(remote(PdId(4), mr.rkey, 0x1000, 1, read), Err(KeyFault::WrongPd));
    assert_eq!(remote(PD, mr.rkey, 0x1000, 1, Access::REMOTE_WRITE), Err(KeyFault::Rights));
    assert_eq!(remote(PD, mr.rkey, 0x1000, 4097, read), Err(KeyFault::OutOfBounds));
    assert_eq!(remote(PD, mr.rkey, 0x2000, 1, read), Err(KeyFault::OutOfBounds));
    assert_eq!(remote(PD, mr.rkey, 0xfff, 1, read), Err(KeyFault::OutOfBounds));
    assert_eq!(remote(PD, mr.rkey, u64::MAX, u32::MAX, read), Err(KeyFault::OutOfBounds));
    assert_eq!(local(PD, mr.lkey, 0x1800, 2048, Access::LOCAL_WRITE), Ok(2048));
    assert_eq!(local(PD, mr.lkey, 0x1800, 2048, Access::empty()), Ok(2048));
    assert_eq!(local(PD, Lkey(!mr.lkey.0), 0x1800, 1, Access::empty()), Err(KeyFault::Unknown));
    assert_eq!(local(PdId(0), mr.lkey, 0x1800, 1, Access::empty()), Err(KeyFault::WrongPd));
    assert_eq!(local(PD, mr.lkey, 0x1801, 2048, Access::empty()), Err(KeyFault::OutOfBounds));
    // C9-88: nothing is looked at for length 0.
    assert_eq!(remote(PdId(9), Rkey(0xdead_beef), 7, 0, Access::REMOTE_WRITE), Ok(0));
    assert_eq!(local(PdId(9), Lkey(0xdead_beef), 7, 0, Access::LOCAL_WRITE), Ok(0));
    // The keys of the two kinds are not interchangeable.
    assert_eq!(remote(PD, Rkey(mr.lkey.0), 0x1000, 1, read), Err(KeyFault::Unknown));
}

#[test]
fn read_only_regions_refuse_local_writes() {
    let mut bytes = vec![0u8; 64];
    let mut memory = Memory::new(1, SECRET);
    let mr = register(&mut memory, &mut bytes, 0, Access::empty());
    assert!(memory.check_local(PD, mr.lkey, 0, 64, Access::empty()).is_ok());
    let fault = memory.check_local(PD, mr.lkey, 0, 64, Access::LOCAL_WRITE).map(|s| s.len());
    assert_eq!(fault, Err(KeyFault::Rights));
}

#[test]
fn bad_registrations_are_refused_and_change_nothing() {
    let mut bytes = vec![0u8; 64];
    let mut memory = Memory::new(1, SECRET);
    let good = init(&mut bytes, 0, ALL);
    let cases = [
        (MrInit { len: 0, ..good.clone() }, RegisterError::BadRange),
        (MrInit { len: u64::MAX, ..good.clone() }, RegisterError::BadRange),
        (MrInit { iova: u64::MAX - 63, ..good.clone() }, RegisterError::BadRange),
        (MrInit { access: Access::REMOTE_WRITE, ..good.clone() }, RegisterError::BadAccess),
        (MrInit { access: Access::REMOTE_ATOMIC, ..good.clone() }, RegisterError::BadAccess),
    ];
    for (bad, error) in cases {
        // SAFETY: refused before the memory matters; `bytes` outlives the table anyway.
        assert_eq!(unsafe { memory.register(bad) }, Err(error));
        assert_eq!(memory.len(), 0);
    }
    let mr = register(&mut memory, &mut bytes, 0, ALL);
    // SAFETY: as above.
    assert_eq!(unsafe { memory.register(good) }, Err(RegisterError::Full));
    assert_eq!(memory.deregister(Lkey(mr.lkey.0 ^ 0x10)), Err(DeregisterError::Unknown));
    assert_eq!(memory.deregister(Lkey(0)), Err(DeregisterError::Unknown));
    assert_eq!(memory.deregister(mr.lkey), Ok(mr));
    assert_eq!(memory.deregister(mr.lkey), Err(DeregisterError::Unknown));
    assert!(memory.is_empty());
}

#[test]
fn keys_never_repeat_while_slots_are_used_again() {
    const ROUNDS: usize = if cfg!(miri) { 200 } else { 10_000 };
    let mut bytes = vec![0u8; 64];
    for capacity in [1u32, 3, 64] {
        let mut memory = Memory::new(capacity, SECRET);
        let (mut lkeys, mut rkeys) = (HashSet::new(), HashSet::new());
        let mut last: Option<MrInfo> = None;
        for round in 0..ROUNDS {
            let mr = register(&mut memory, &mut bytes, 0, ALL);
            assert!(lkeys.insert(mr.lkey) && rkeys.insert(mr.rkey), "a key came back in round {round}");
            if let Some(last) = last.replace(mr) {
                let stale = memory.check_remote(PD, last.rkey, RemoteAddr(0), DmaLen(1), Access::REMOTE_READ);
                assert_eq!(stale.map(|s| s.len()), Err(KeyFault::Unknown));
                assert_eq!(memory.info(last.lkey), None);
            }
            assert_eq!(memory.deregister(mr.lkey), Ok(mr));
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "statistics over many keys")]
fn keys_show_no_order_and_no_small_steps() {
    const COUNT: usize = 1000;
    let mut bytes = vec![0u8; 64];
    // Secrets that differ in one bit must not give related keys either.
    let tables: Vec<Vec<u32>> = [SECRET, SECRET ^ 1]
        .iter()
        .map(|&secret| {
            let mut memory = Memory::new(4096, secret);
            let mut keys = Vec::new();
            for _ in 0..COUNT {
                let mr = register(&mut memory, &mut bytes, 0, ALL);
                keys.extend([mr.lkey.0, mr.rkey.0]);
            }
            keys
        })
        .collect();
    for keys in &tables {
        let mut bits = [0usize; 32];
        let (mut rising, mut small) = (0, 0);
        for pair in keys.windows(2) {
            rising += usize::from(pair[1] > pair[0]);
            small += usize::from(pair[1].abs_diff(pair[0]) < 1 << 16);
            (0..32).for_each(|bit| bits[bit] += (pair[0] >> bit & 1) as usize);
        }
        // Random keys rise in half of the steps (deviation 18 for a permutation) and make a small step in 1 of 32768.
        assert!((COUNT - 150..COUNT + 150).contains(&rising), "{rising} of {} steps rise", 2 * COUNT);
        assert!(small < 5, "{small} of {} steps are small", 2 * COUNT);
        for (bit, ones) in bits.iter().enumerate() {
            assert!((COUNT - 150..COUNT + 150).contains(ones), "bit {bit} is set in {ones} of {}", 2 * COUNT);
        }
    }
    let same = tables[0].iter().zip(&tables[1]).filter(|(a, b)| a == b).count();
    assert!(same < 3, "two secrets share {same} keys");
}

#[test]
fn copies_of_a_table_agree() {
    let mut bytes = vec![0u8; 64];
    let (mut first, mut second) = (Memory::new(8, SECRET), Memory::new(8, SECRET));
    let mut replica = Memory::new(8, SECRET);
    let mut stranger = Memory::new(8, SECRET ^ 2);
    let mut live = Vec::new();
    for round in 0..200usize {
        if round % 3 == 2 || live.len() == 8 {
            let mr: MrInfo = live.swap_remove(round % live.len());
            assert_eq!(first.deregister(mr.lkey), Ok(mr));
            assert_eq!(second.deregister(mr.lkey), Ok(mr));
            assert_eq!(replica.deregister(mr.lkey), Ok(mr));
        }
        let mr = register(&mut first, &mut bytes, round as u64, ALL);
        assert_eq!(register(&mut second, &mut bytes, round as u64, ALL), mr);
        let base = NonNull::from(&mut bytes[..]).cast();
        // SAFETY: `bytes` outlives the tables.
        unsafe {
            assert_eq!(replica.replicate(&mr, base), Ok(()));
            assert_eq!(replica.replicate(&mr, base), Err(RegisterError::BadKey));
            assert_eq!(stranger.replicate(&mr, base), Err(RegisterError::BadKey));
        }
        assert_eq!(replica.info(mr.lkey), Some(mr));
        live.push(mr);
    }
    // A replica that becomes the one that chooses gives out no slot that is taken.
    while replica.len() < 8 {
        live.push(register(&mut replica, &mut bytes, 0, ALL));
    }
    // SAFETY: refused, or `bytes` outlives the table.
    assert_eq!(unsafe { replica.register(init(&mut bytes, 0, ALL)) }, Err(RegisterError::Full));
    assert!(live.iter().all(|mr| replica.info(mr.lkey) == Some(*mr)));
}

#[test]
fn lists_are_paged() {
    let mut bytes = vec![0u8; 64];
    let mut memory = Memory::new(100, SECRET);
    let all: Vec<MrInfo> = (0..50).map(|i| register(&mut memory, &mut bytes, i, ALL)).collect();
    for mr in all.iter().step_by(2) {
        memory.deregister(mr.lkey).expect("registered above");
    }
    let (mut seen, mut cursor, mut pages) = (Vec::new(), Some(0), 0);
    while let Some(at) = cursor {
        let (page, next) = memory.list(at, 7);
        assert!(page.len() <= 7);
        seen.extend(page);
        (cursor, pages) = (next, pages + 1);
    }
    let odd: Vec<MrInfo> = all.iter().skip(1).step_by(2).copied().collect();
    assert_eq!((seen, pages), (odd, 4));
    assert_eq!(memory.list(u32::MAX, 7), (vec![], None));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 20 } else { 2000 }, failure_persistence: None,
        ..ProptestConfig::default() })]

    /// Bounds against arithmetic that cannot wrap.
    #[test]
    fn bounds_agree_with_wide_arithmetic(
        near in prop_oneof![Just(0u64), Just(1 << 32), Just(u64::MAX - 5000), any::<u64>()],
        size in 1usize..5000,
        delta in -6000i64..6000,
        len in prop_oneof![0u32..6000, any::<u32>()],
    ) {
        let mut bytes = vec![0u8; size];
        let mut memory = Memory::new(4, SECRET);
        // SAFETY: `bytes` outlives the table.
        let registered = unsafe { memory.register(init(&mut bytes, near, ALL)) };
        let fits = u128::from(near) + size as u128 <= u128::from(u64::MAX);
        prop_assert_eq!(registered.is_ok(), fits);
        let Ok(mr) = registered else { return Ok(()) };
        let addr = near.wrapping_add_signed(delta);
        let (start, end) = (u128::from(addr), u128::from(addr) + u128::from(len));
        let inside = u128::from(near) <= start && end <= u128::from(near) + size as u128;
        let want = if inside || len == 0 { Ok(len as usize) } else { Err(KeyFault::OutOfBounds) };
        let remote = memory.check_remote(PD, mr.rkey, RemoteAddr(addr), DmaLen(len), Access::REMOTE_READ);
        prop_assert_eq!(remote.map(|s| s.len()), want);
        let local = memory.check_local(PD, mr.lkey, addr, len, Access::LOCAL_WRITE);
        prop_assert_eq!(local.map(|s| s.len()), want);
    }

    /// No key but the right one opens anything.
    #[test]
    fn guessed_keys_are_unknown(key in any::<u32>(), capacity in 1u32..2000) {
        let mut bytes = vec![0u8; 64];
        let mut memory = Memory::new(capacity, SECRET);
        let mr = register(&mut memory, &mut bytes, 0, ALL);
        prop_assume!(key != mr.rkey.0 && key != mr.lkey.0);
        let got = memory.check_remote(PD, Rkey(key), RemoteAddr(0), DmaLen(1), Access::REMOTE_READ);
        prop_assert_eq!(got.map(|s| s.len()), Err(KeyFault::Unknown));
        prop_assert_eq!(memory.info(Lkey(key)), None);
        prop_assert_eq!(memory.deregister(Lkey(key)), Err(DeregisterError::Unknown));
    }
}

//! Windows, and what keeps a region from being deregistered.
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::ptr::NonNull;

use ferroce_mem::window::DEVIATIONS;
use ferroce_mem::{
    Access, Bind, BindError, BoundInfo, DeregisterError, InvalidateError, KeyFault, Lkey, Memory, MrInfo,
    MrInit, PdId, RegisterError,
};
use ferroce_wire::{DmaLen, Qpn, RemoteAddr, Rkey};
use proptest::prelude::*;

const PD: PdId = PdId(3);
const OTHER: PdId = PdId(4);
const SECRET: u64 = 0x5eed_0123_4567_89ab;
const READ: Access = Access::REMOTE_READ;
const WRITE: Access = Access::REMOTE_WRITE;

fn qpn(number: u32) -> Qpn {
    Qpn::new(number)
}

/// Registers memory that the test keeps until the table is gone.
fn register(memory: &mut Memory, pd: PdId, bytes: &mut [u8], iova: u64, access: Access) -> MrInfo {
    let len = bytes.len() as u64;
    let init = MrInit { pd, access, iova, len, base: NonNull::from(bytes).cast() };
    // SAFETY: the callers keep `bytes` for longer than the table.
    unsafe { memory.register(init) }.expect("registration")
}

/// What libibverbs' `ibv_inc_rkey` does.
fn inc_rkey(rkey: Rkey) -> Rkey {
    Rkey(rkey.0 & !0xff | rkey.0.wrapping_add(1) & 0xff)
}

fn check(
    memory: &Memory,
    qp: Qpn,
    pd: PdId,
    rkey: Rkey,
    range: (u64, u32),
    want: Access,
) -> Result<usize, KeyFault> {
    memory.check_remote_for(qp, pd, rkey, RemoteAddr(range.0), DmaLen(range.1), want).map(|slice| slice.len())
}

#[test]
fn each_rule_of_binding_refuses_in_its_turn_and_changes_nothing() {
    let mut bytes = vec![0u8; 8192];
    let (writable, rest) = bytes.split_at_mut(4096);
    let (readable, foreign) = rest.split_at_mut(2048);
    let mut memory = Memory::new(8, SECRET);
    let good = register(&mut memory, PD, writable, 0x1000, Access::LOCAL_WRITE | Access::MW_BIND);
    let read_only = register(&mut memory, PD, readable, 0x1000, Access::MW_BIND);
    let theirs = register(&mut memory, OTHER, foreign, 0x1000, Access::LOCAL_WRITE | Access::MW_BIND);
    let closed = {
        let init = MrInit {
            pd: PD,
            access: Access::LOCAL_WRITE,
            iova: 0x1000,
            len: 64,
            base: NonNull::from(&mut *writable).cast(),
        };
        // SAFETY: `bytes` outlives the table.
        unsafe { memory.register(init) }.expect("registration")
    };
    let window = memory.alloc_window(PD).expect("a free window");
    assert_eq!((window.bound, window.rkey.0 & 0xff, window.pd), (None, 0, PD));
    let key = inc_rkey(window.rkey);
    let fits = Bind { rkey: key, lkey: good.lkey, addr: 0x1800, len: 0x400, access: READ | WRITE };
    let no_window = Rkey(key.0 ^ 0x100);
    let gone = Lkey(good.lkey.0 ^ 1);
    let cases = [
        (PD, Bind { rkey: no_window, ..fits }, BindError::UnknownWindow),
        (PD, Bind { rkey: Rkey(0), ..fits }, BindError::UnknownWindow),
        (PD, Bind { rkey: good.rkey, ..fits }, BindError::UnknownWindow),
        (OTHER, fits, BindError::WrongPd),
        (PD, Bind { rkey: window.rkey, ..fits }, BindError::SameKey),
        (PD, Bind { access: READ | Access::LOCAL_WRITE, ..fits }, BindError::BadAccess),
        (PD, Bind { access: Access::MW_BIND, ..fits }, BindError::BadAccess),
        (PD, Bind { len: 0, ..fits }, BindError::ZeroLength),
        (PD, Bind { lkey: gone, ..fits }, BindError::UnknownRegion),
        (PD, Bind { lkey: Lkey(0), ..fits }, BindError::UnknownRegion),
        (PD, Bind { lkey: theirs.lkey, ..fits }, BindError::RegionPd),
        (PD, Bind { lkey: closed.lkey, ..fits }, BindError::NoBindRight),
        (PD, Bind { lkey: read_only.lkey, access: WRITE, ..fits }, BindError::NeedsLocalWrite),
        (
            PD,
            Bind { lkey: read_only.lkey, access: Access::REMOTE_ATOMIC, ..fits },
            BindError::NeedsLocalWrite,
        ),
        (PD, Bind { addr: 0xfff, ..fits }, BindError::OutOfBounds),
        (PD, Bind { addr: 0x1fff, len: 2, ..fits }, BindError::OutOfBounds),
        (PD, Bind { len: u64::MAX, ..fits }, BindError::OutOfBounds),
        (PD, Bind { addr: u64::MAX, len: 1, ..fits }, BindError::OutOfBounds),
    ];
    for (pd, bind, error) in cases {
        assert_eq!(memory.bind_window(qpn(7), pd, &bind), Err(error), "{bind:?}");
        assert_eq!(memory.window(window.rkey), Some(window), "after {error:?}");
        assert!(!error.to_string().is_empty());
    }
    assert_eq!(memory.bind_window(qpn(7), PD, &fits), Ok(()));
    let bound = BoundInfo { qpn: qpn(7), lkey: good.lkey, addr: 0x1800, len: 0x400, access: READ | WRITE };
    let info = memory.window(window.rkey).expect("lives");
    assert_eq!((info.rkey, info.bound), (key, Some(bound)));
    let again = Bind { rkey: inc_rkey(key), ..fits };
    assert_eq!(memory.bind_window(qpn(7), PD, &again), Err(BindError::StillBound));
    assert_eq!(memory.window(window.rkey), Some(info));
    // A region may be closed to writes and still be opened for reads by a window.
    let second = memory.alloc_window(PD).expect("a free window");
    let reading = Bind { rkey: inc_rkey(second.rkey), lkey: read_only.lkey, access: READ, ..fits };
    assert_eq!(memory.bind_window(qpn(7), PD, &Bind { addr: 0x1000, ..reading }), Ok(()));
}

#[test]
fn a_bound_window_opens_its_range_to_its_queue_pair_only() {
    let mut bytes = vec![0u8; 4096];
    let mut memory = Memory::new(4, SECRET);
    // No remote right of its own: open through windows only.
    let mr = register(&mut memory, PD, &mut bytes, 0x1000, Access::LOCAL_WRITE | Access::MW_BIND);
    let window = memory.alloc_window(PD).expect("a free window");
    let rkey = inc_rkey(window.rkey);
    let memory = memory;
    assert_eq!(check(&memory, qpn(7), PD, rkey, (0x1800, 1), READ), Err(KeyFault::Unknown), "not bound yet");
    let bind = Bind { rkey, lkey: mr.lkey, addr: 0x1800, len: 0x400, access: READ };
    assert_eq!(memory.bind_window(qpn(7), PD, &bind), Ok(()));
    let ask = |qp, pd, key, range, want| check(&memory, qpn(qp), pd, key, range, want);
    assert_eq!(ask(7, PD, rkey, (0x1800, 0x400), READ), Ok(0x400));
    assert_eq!(ask(7, PD, rkey, (0x1bff, 1), READ), Ok(1));
    assert_eq!(ask(7, PD, rkey, (0x17ff, 1), READ), Err(KeyFault::OutOfBounds));
    assert_eq!(ask(7, PD, rkey, (0x1800, 0x401), READ), Err(KeyFault::OutOfBounds));
    assert_eq!(ask(7, PD, rkey, (0x1c00, 1), READ), Err(KeyFault::OutOfBounds));
    assert_eq!(ask(7, PD, rkey, (u64::MAX, u32::MAX), READ), Err(KeyFault::OutOfBounds));
    assert_eq!(ask(7, PD, rkey, (0x1800, 1), WRITE), Err(KeyFault::Rights));
    assert_eq!(ask(7, PD, rkey, (0x1800, 8), Access::REMOTE_ATOMIC), Err(KeyFault::Rights));
    assert_eq!(ask(8, PD, rkey, (0x1800, 1), READ), Err(KeyFault::WrongQp));
    assert_eq!(ask(7, OTHER, rkey, (0x1800, 1), READ), Err(KeyFault::WrongPd));
    assert_eq!(ask(7, PD, window.rkey, (0x1800, 1), READ), Err(KeyFault::Unknown), "the key before the bind");
    assert_eq!(ask(7, PD, inc_rkey(rkey), (0x1800, 1), READ), Err(KeyFault::Unknown), "the key after it");
    assert_eq!(ask(7, PD, mr.rkey, (0x1800, 1), READ), Err(KeyFault::Rights), "the region's own key");
    // C9-88: nothing is looked at for length 0.
    assert_eq!(ask(9, OTHER, Rkey(0xdead_beef), (7, 0), WRITE), Ok(0));
    // The call that knows no queue pair knows no window.
    let plain = memory.check_remote(PD, rkey, RemoteAddr(0x1800), DmaLen(1), READ).map(|s| s.len());
    assert_eq!(plain, Err(KeyFault::Unknown));
}

#[test]
fn invalidation_ends_rights_and_never_memory() {
    let mut bytes = vec![0u8; 64];
    let mut memory = Memory::new(4, SECRET);
    let mr = register(&mut memory, PD, &mut bytes, 0, Access::LOCAL_WRITE | Access::MW_BIND | READ);
    let window = memory.alloc_window(PD).expect("a free window");
    let unbound = memory.alloc_window(PD).expect("a free window");
    let memory = memory;
    let mut rkey = window.rkey;
    for round in 0..600u32 {
        let last = rkey;
        rkey = inc_rkey(rkey);
        let bind = Bind { rkey, lkey: mr.lkey, addr: 8, len: 16, access: WRITE };
        assert_eq!(memory.bind_window(qpn(7), PD, &bind), Ok(()), "round {round}");
        assert_eq!(memory.invalidate(qpn(7), PD, last), Err(InvalidateError::Unknown), "last round's key");
        assert_eq!(memory.invalidate(qpn(8), PD, rkey), Err(InvalidateError::WrongQp));
        assert_eq!(memory.invalidate(qpn(7), OTHER, rkey), Err(InvalidateError::WrongPd));
        let slice =
            memory.check_remote_for(qpn(7), PD, rkey, RemoteAddr(8), DmaLen(16), WRITE).expect("bound");
        assert_eq!(memory.invalidate(qpn(7), PD, rkey), Ok(()));
        // What was checked before stays memory: the borrow of the table keeps the region.
        assert_eq!(slice.copy_in(&round.to_le_bytes()), 4);
        assert_eq!(check(&memory, qpn(7), PD, rkey, (8, 1), WRITE), Err(KeyFault::Unknown));
        assert_eq!(memory.invalidate(qpn(7), PD, rkey), Err(InvalidateError::Unknown), "twice");
    }
    let read = memory.check_local(PD, mr.lkey, 8, 4, Access::empty()).expect("registered");
    let mut got = [0; 4];
    assert_eq!(read.copy_out(&mut got), 4);
    assert_eq!(u32::from_le_bytes(got), 599);
    assert_eq!(memory.invalidate(qpn(7), PD, unbound.rkey), Err(InvalidateError::Unknown));
    assert_eq!(memory.invalidate(qpn(7), PD, Rkey(0)), Err(InvalidateError::Unknown));
    assert_eq!(memory.invalidate(qpn(7), PD, mr.rkey), Err(InvalidateError::Region));
    assert_eq!(check(&memory, qpn(7), PD, mr.rkey, (0, 64), READ), Ok(64), "the region's key still works");
    assert!(DEVIATIONS.iter().all(|(what, why)| !what.is_empty() && !why.is_empty()));
}

#[test]
fn a_region_in_use_says_busy_and_by_what() {
    let mut bytes = vec![0u8; 64];
    let mut memory = Memory::new(4, SECRET);
    let mr = register(&mut memory, PD, &mut bytes, 0, Access::LOCAL_WRITE | Access::MW_BIND | READ);
    let windows: Vec<_> = (0..3).map(|_| memory.alloc_window(PD).expect("free")).collect();
    let bind = |memory: &Memory, at: usize, qp| {
        let rkey = inc_rkey(memory.window(windows[at].rkey).expect("lives").rkey);
        memory.bind_window(qpn(qp), PD, &Bind { rkey, lkey: mr.lkey, addr: 0, len: 1, access: READ })
    };
    let busy = |windows, posted| Err(DeregisterError::Busy { windows, posted });
    (0..3).for_each(|at| assert_eq!(bind(&memory, at, 7 + at as u32 / 2), Ok(())));
    assert!(memory.hold(mr.lkey) && memory.hold(mr.lkey));
    assert_eq!(memory.deregister(mr.lkey), busy(3, 2));
    assert_eq!(memory.close(mr.lkey), busy(3, 2).map(|_: MrInfo| ()));
    let text = memory.deregister(mr.lkey).expect_err("busy").to_string();
    assert!(text.contains("3 windows and 2 entries of posted work"), "{text}");
    assert_eq!(check(&memory, qpn(7), PD, mr.rkey, (0, 64), READ), Ok(64), "a refusal changes nothing");
    memory.release(mr.lkey);
    assert_eq!(memory.unbind_all(qpn(7)), 2);
    assert_eq!(memory.unbind_all(qpn(7)), 0);
    assert_eq!(memory.deregister(mr.lkey), busy(1, 1));
    memory.release(mr.lkey);
    assert_eq!(memory.deregister(mr.lkey), busy(1, 0));
    assert!(memory.dealloc_window(windows[2].rkey).expect("lives").bound.is_some(), "freed while bound");
    assert_eq!(memory.window_count(), 2);

    // Closed: its keys work, and nothing new may lean on it.
    assert_eq!(memory.close(mr.lkey), Ok(()));
    assert_eq!(check(&memory, qpn(7), PD, mr.rkey, (0, 64), READ), Ok(64));
    assert!(!memory.hold(mr.lkey));
    assert_eq!(bind(&memory, 0, 7), Err(BindError::UnknownRegion));
    memory.reopen(mr.lkey);
    assert!(memory.hold(mr.lkey));
    assert_eq!(bind(&memory, 0, 7), Ok(()));
    memory.release(mr.lkey);
    assert_eq!(memory.unbind_all(qpn(7)), 1);
    assert_eq!(memory.close(mr.lkey), Ok(()));
    assert_eq!(memory.deregister(mr.lkey), Ok(mr));
    assert_eq!(memory.deregister(mr.lkey), Err(DeregisterError::Unknown));
    assert_eq!(memory.close(mr.lkey), Err(DeregisterError::Unknown));
    assert!(!memory.hold(mr.lkey));
    memory.release(mr.lkey);
    memory.reopen(mr.lkey);
}

#[test]
fn a_revoked_region_takes_its_windows_with_it_even_when_its_slot_is_used_again() {
    let mut bytes = vec![0u8; 64];
    let mut memory = Memory::with_windows(1, 2, SECRET);
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    let mr = register(&mut memory, PD, &mut bytes, 0, access);
    let window = memory.alloc_window(PD).expect("free");
    let rkey = inc_rkey(window.rkey);
    let bind = Bind { rkey, lkey: mr.lkey, addr: 0, len: 64, access: READ };
    assert_eq!(memory.bind_window(qpn(7), PD, &bind), Ok(()));
    assert!(memory.hold(mr.lkey));
    assert_eq!(memory.revoke(mr.lkey), Ok(mr));
    assert_eq!(memory.revoke(mr.lkey), Err(KeyFault::Unknown));
    assert_eq!(check(&memory, qpn(7), PD, rkey, (0, 1), READ), Err(KeyFault::Unknown));
    let next = register(&mut memory, PD, &mut bytes, 0, access);
    assert_eq!(check(&memory, qpn(7), PD, rkey, (0, 1), READ), Err(KeyFault::Unknown), "the same slot");
    memory.release(mr.lkey);
    let newer = inc_rkey(memory.alloc_window(PD).expect("free").rkey);
    assert_eq!(memory.bind_window(qpn(7), PD, &Bind { rkey: newer, lkey: next.lkey, ..bind }), Ok(()));
    assert_eq!(memory.invalidate(qpn(7), PD, rkey), Ok(()), "the window itself is still bound, to nothing");
    let busy = Err(DeregisterError::Busy { windows: 1, posted: 0 });
    assert_eq!(memory.deregister(next.lkey), busy, "the old window is none of the new region");
    assert_eq!(memory.invalidate(qpn(7), PD, newer), Ok(()));
    assert_eq!(memory.deregister(next.lkey), Ok(next), "uses of the old region are none of the new one");
}

#[test]
fn window_keys_are_nobody_elses_and_copies_of_a_table_agree() {
    let rounds = if cfg!(miri) { 20 } else { 3000 };
    let mut bytes = vec![0u8; 64];
    let mut first = Memory::with_windows(512, 8, SECRET);
    let mut replica = Memory::with_windows(512, 8, SECRET);
    let stranger = Memory::with_windows(512, 8, SECRET ^ 2);
    let (mut prefixes, mut windows, mut regions) = (HashSet::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        let window = first.alloc_window(PD).expect("free");
        assert!(
            prefixes.insert(window.rkey.0 >> 8) && window.rkey.0 != 0,
            "a key came back in round {round}"
        );
        assert_eq!(replica.replicate_window(window.rkey, PD), Ok(()));
        assert_eq!(replica.replicate_window(window.rkey, PD), Err(RegisterError::BadKey));
        assert_eq!(stranger.window(window.rkey), None);
        windows.push(window);
        if regions.len() == 512 {
            let mr: MrInfo = regions.remove(round % 512);
            assert_eq!(first.deregister(mr.lkey), Ok(mr));
        }
        regions.push(register(&mut first, PD, &mut bytes, 0, READ));
        // No region's key may be taken for a window's, nor the other way round.
        assert!(regions.iter().all(|mr| first.window(mr.rkey).is_none()), "round {round}");
        if windows.len() == 8 {
            assert_eq!(first.alloc_window(PD), Err(RegisterError::Full));
            let gone = windows.remove(round % 8);
            assert_eq!(first.dealloc_window(inc_rkey(gone.rkey)), Ok(gone));
            assert_eq!(first.dealloc_window(gone.rkey), Err(KeyFault::Unknown));
            assert_eq!(replica.dealloc_window(gone.rkey), Ok(gone));
        }
    }
    let (mut listed, mut cursor) = (Vec::new(), Some(0));
    while let Some(at) = cursor {
        let (page, next) = first.list_windows(at, 3);
        assert!(page.len() <= 3);
        listed.extend(page.iter().map(|info| info.rkey.0));
        cursor = next;
    }
    let mut live: Vec<u32> = windows.iter().map(|info| info.rkey.0).collect();
    listed.sort_unstable();
    live.sort_unstable();
    assert_eq!(listed, live);
    assert_eq!(replica.replicate_window(Rkey(windows[0].rkey.0 | 1), PD), Err(RegisterError::BadKey));
    assert_eq!(Memory::with_windows(4, 0, SECRET).alloc_window(PD), Err(RegisterError::Full));
}

#[test]
fn regions_and_windows_leave_out_each_others_keys() {
    // One secret, so many keys that some candidates must be taken.
    let count = if cfg!(miri) { 16 } else { 1 << 18 };
    let mut bytes = vec![0u8; 64];
    for windows_first in [true, false] {
        let mut memory = Memory::with_windows(count, count.min(1 << 12), SECRET);
        while windows_first && memory.window_count() < memory.window_capacity() {
            memory.alloc_window(PD).expect("free");
        }
        let regions: Vec<MrInfo> =
            (0..count).map(|_| register(&mut memory, PD, &mut bytes, 0, READ)).collect();
        while memory.window_count() < memory.window_capacity() {
            memory.alloc_window(PD).expect("free");
        }
        assert!(regions.iter().all(|mr| memory.window(mr.rkey).is_none()), "windows first: {windows_first}");
        assert!(regions.iter().all(|mr| check(&memory, qpn(7), PD, mr.rkey, (0, 64), READ) == Ok(64)));
    }
}

#[test]
fn what_a_queue_pair_leaves_behind_is_found_whatever_went_before() {
    let mut bytes = vec![0u8; 64];
    let mut memory = Memory::with_windows(1, 6, SECRET);
    let mr = register(&mut memory, PD, &mut bytes, 0, Access::MW_BIND);
    let mut keys: Vec<Rkey> = (0..6).map(|_| memory.alloc_window(PD).expect("free").rkey).collect();
    // Six windows of two queue pairs in one chain (the numbers differ by its eight); two are taken out one by one.
    for (first, second) in (0..36).map(|n| (n / 6, n % 6)).filter(|(first, second)| first != second) {
        let qp = |at: usize| qpn(if at.is_multiple_of(3) { 9 } else { 1 });
        for (at, key) in keys.iter_mut().enumerate() {
            *key = inc_rkey(*key);
            let bind = Bind { rkey: *key, lkey: mr.lkey, addr: 0, len: 1, access: READ };
            assert_eq!(memory.bind_window(qp(at), PD, &bind), Ok(()));
        }
        for at in [first, second] {
            assert_eq!(memory.invalidate(qp(at), PD, keys[at]), Ok(()));
        }
        let left = |of: Qpn| (0..6).filter(|&at| at != first && at != second && qp(at) == of).count() as u32;
        assert_eq!((memory.unbind_all(qpn(1)), memory.unbind_all(qpn(9))), (left(qpn(1)), left(qpn(9))));
        assert!(
            keys.iter().all(|key| memory.window(*key).expect("lives").bound.is_none()),
            "{first}, {second}"
        );
        assert_eq!(memory.unbind_all(qpn(1)), 0);
    }
    assert_eq!(memory.deregister(mr.lkey), Ok(mr));
}

/// A window as the rules have it, by nothing but lists.
#[derive(Clone, Debug)]
struct Model {
    regions: Vec<(MrInfo, u32)>,
    windows: Vec<(Rkey, PdId, Option<BoundInfo>)>,
}

#[derive(Clone, Debug)]
enum Step {
    Register(bool, u32),
    Deregister(usize),
    Hold(usize),
    Release(usize),
    Alloc(bool),
    Dealloc(usize),
    Bind { window: usize, region: usize, qp: u32, pd: bool, bump: u32, addr: u64, len: u64, access: u32 },
    Invalidate { window: usize, stale: bool, qp: u32, pd: bool },
    UnbindAll(u32),
}

fn step() -> impl Strategy<Value = Step> {
    // Two of the three share a chain of the table's eight.
    let (many, qp) = (any::<usize>(), prop::sample::select(vec![1u32, 2, 9]));
    let pd = prop::bool::weighted(0.1);
    let bind = (many, many, qp.clone(), pd, 0u32..3, 0u64..80, 0u64..70, 0u32..32);
    prop_oneof![
        2 => (pd, 0u32..32).prop_map(|(pd, access)| Step::Register(pd, access | 16)),
        1 => many.prop_map(Step::Deregister),
        1 => many.prop_map(Step::Hold),
        1 => many.prop_map(Step::Release),
        2 => pd.prop_map(Step::Alloc),
        1 => many.prop_map(Step::Dealloc),
        8 => bind.prop_map(|(window, region, qp, pd, bump, addr, len, access)| {
            // Mostly what can succeed: the property must see bound windows.
            let access = if access & 16 == 0 { access & 14 } else { access & 4 };
            Step::Bind { window, region, qp, pd, bump, addr, len, access }
        }),
        3 => (many, pd, qp.clone(), pd).prop_map(|(window, stale, qp, pd)| Step::Invalidate { window, stale, qp, pd }),
        1 => qp.prop_map(Step::UnbindAll),
    ]
}

fn domain(other: bool) -> PdId {
    if other { OTHER } else { PD }
}

impl Model {
    fn bind(&mut self, qp: Qpn, pd: PdId, bind: &Bind) -> Result<(), BindError> {
        let same = |window: &&mut (Rkey, PdId, Option<BoundInfo>)| window.0.0 >> 8 == bind.rkey.0 >> 8;
        let window = self.windows.iter_mut().find(same).ok_or(BindError::UnknownWindow)?;
        let refuse = |when: bool, error: BindError| if when { Err(error) } else { Ok(()) };
        refuse(window.1 != pd, BindError::WrongPd)?;
        refuse(window.2.is_some(), BindError::StillBound)?;
        refuse(window.0 == bind.rkey, BindError::SameKey)?;
        refuse(bind.access.bits() & !14 != 0, BindError::BadAccess)?;
        refuse(bind.len == 0, BindError::ZeroLength)?;
        let mr = self.regions.iter().find(|(mr, _)| mr.lkey == bind.lkey).ok_or(BindError::UnknownRegion)?.0;
        refuse(mr.pd != pd, BindError::RegionPd)?;
        refuse(mr.access.bits() & 16 == 0, BindError::NoBindRight)?;
        refuse(bind.access.bits() & 10 != 0 && mr.access.bits() & 1 == 0, BindError::NeedsLocalWrite)?;
        let inside = bind.addr >= mr.iova && bind.addr + bind.len <= mr.iova + mr.len;
        refuse(!inside, BindError::OutOfBounds)?;
        let Bind { rkey, lkey, addr, len, access } = *bind;
        *window = (rkey, pd, Some(BoundInfo { qpn: qp, lkey, addr, len, access }));
        Ok(())
    }

    fn invalidate(&mut self, qp: Qpn, pd: PdId, rkey: Rkey) -> Result<(), InvalidateError> {
        if self.regions.iter().any(|(mr, _)| mr.rkey == rkey) {
            return Err(InvalidateError::Region);
        }
        let window = self.windows.iter_mut().find(|w| w.0 == rkey && w.2.is_some());
        let window = window.ok_or(InvalidateError::Unknown)?;
        if window.2.is_some_and(|bound| bound.qpn != qp) {
            return Err(InvalidateError::WrongQp);
        }
        if window.1 != pd {
            return Err(InvalidateError::WrongPd);
        }
        window.2 = None;
        Ok(())
    }

    fn busy(&self, at: usize) -> (u32, u32) {
        let (mr, posted) = self.regions[at];
        let bound = self.windows.iter().filter(|w| w.2.is_some_and(|bound| bound.lkey == mr.lkey)).count();
        (bound as u32, posted)
    }

    /// Every key against every queue pair, domain, right and some ranges.
    fn agrees(&self, memory: &Memory) -> Result<(), TestCaseError> {
        for window in &self.windows {
            for (qp, pd, want) in
                [(1, PD, READ), (2, PD, WRITE), (9, PD, READ), (1, OTHER, READ), (2, PD, READ)]
            {
                for (addr, len) in [(16, 1), (16, 64), (40, 8), (79, 1), (79, 2), (15, 2)] {
                    let want_answer = match window.2 {
                        None => Err(KeyFault::Unknown),
                        Some(b) if b.qpn != qpn(qp) => Err(KeyFault::WrongQp),
                        Some(_) if window.1 != pd => Err(KeyFault::WrongPd),
                        Some(b) if !b.access.contains(want) => Err(KeyFault::Rights),
                        Some(b) if addr < b.addr || addr + u64::from(len) > b.addr + b.len => {
                            Err(KeyFault::OutOfBounds)
                        }
                        Some(_) => Ok(len as usize),
                    };
                    prop_assert_eq!(check(memory, qpn(qp), pd, window.0, (addr, len), want), want_answer);
                }
            }
            let info = memory.window(window.0).map(|info| (info.rkey, info.pd, info.bound));
            prop_assert_eq!(info, Some(*window));
        }
        prop_assert_eq!(memory.window_count() as usize, self.windows.len());
        Ok(())
    }
}

/// Carries out one step on both and compares what they say.
fn apply(step: &Step, memory: &mut Memory, model: &mut Model, bytes: &mut [u8]) -> Result<(), TestCaseError> {
    let pick = |len: usize, at: usize| (len > 0).then(|| at % len);
    match *step {
        Step::Register(pd, access) if model.regions.len() < 4 => {
            let access = Access::from_bits_truncate(access);
            let access = if access.bits() & 10 != 0 { access | Access::LOCAL_WRITE } else { access };
            model.regions.push((register(memory, domain(pd), bytes, 16, access), 0));
        }
        Step::Alloc(pd) if model.windows.len() < 5 => {
            let info = memory.alloc_window(domain(pd)).expect("fewer than capacity");
            model.windows.push((info.rkey, info.pd, None));
        }
        Step::Register(..) | Step::Alloc(_) => {}
        Step::Deregister(at) => {
            let Some(at) = pick(model.regions.len(), at) else { return Ok(()) };
            let (mr, _) = model.regions[at];
            let want = match model.busy(at) {
                (0, 0) => Ok(model.regions.swap_remove(at).0),
                (windows, posted) => Err(DeregisterError::Busy { windows, posted }),
            };
            prop_assert_eq!(memory.deregister(mr.lkey), want);
        }
        Step::Hold(at) => {
            let Some(at) = pick(model.regions.len(), at) else { return Ok(()) };
            prop_assert!(memory.hold(model.regions[at].0.lkey));
            model.regions[at].1 += 1;
        }
        Step::Release(at) => {
            let Some(at) = pick(model.regions.len(), at).filter(|&at| model.regions[at].1 > 0) else {
                return Ok(());
            };
            memory.release(model.regions[at].0.lkey);
            model.regions[at].1 -= 1;
        }
        Step::Dealloc(at) => {
            let Some(at) = pick(model.windows.len(), at) else { return Ok(()) };
            let (rkey, pd, bound) = model.windows.swap_remove(at);
            let info = memory.dealloc_window(rkey).map(|info| (info.rkey, info.pd, info.bound));
            prop_assert_eq!(info, Ok((rkey, pd, bound)));
        }
        Step::Bind { window, region, qp, pd, bump, addr, len, access } => {
            let (Some(w), Some(r)) = (pick(model.windows.len(), window), pick(model.regions.len(), region))
            else {
                return Ok(());
            };
            let old = model.windows[w].0.0;
            let rkey = Rkey(old & !0xff | old.wrapping_add(bump) & 0xff);
            let lkey = model.regions[r].0.lkey;
            let bind = Bind { rkey, lkey, addr, len, access: Access::from_bits_truncate(access) };
            let want = model.bind(qpn(qp), domain(pd), &bind);
            prop_assert_eq!(memory.bind_window(qpn(qp), domain(pd), &bind), want);
        }
        Step::Invalidate { window, stale, qp, pd } => {
            let Some(at) = pick(model.windows.len(), window) else { return Ok(()) };
            let rkey = Rkey(model.windows[at].0.0 ^ u32::from(stale));
            let want = model.invalidate(qpn(qp), domain(pd), rkey);
            prop_assert_eq!(memory.invalidate(qpn(qp), domain(pd), rkey), want);
        }
        Step::UnbindAll(qp) => {
            let mut count = 0;
            for window in &mut model.windows {
                count += u32::from(window.2.take_if(|bound| bound.qpn == qpn(qp)).is_some());
            }
            prop_assert_eq!(memory.unbind_all(qpn(qp)), count);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 5 } else { 600 }, failure_persistence: None,
        ..ProptestConfig::default() })]

    #[test]
    fn windows_agree_with_a_naive_model(steps in prop::collection::vec(step(), 1..if cfg!(miri) { 20 } else { 80 })) {
        let mut bytes = vec![0u8; 64];
        let mut memory = Memory::with_windows(4, 5, SECRET);
        let mut model = Model { regions: Vec::new(), windows: Vec::new() };
        for step in &steps {
            apply(step, &mut memory, &mut model, &mut bytes)?;
            model.agrees(&memory)?;
        }
    }
}

//! Regions, arenas and blocks on the real operating system.
#![cfg(not(miri))]

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;

use ferroce_mem::os::{Arena, ArenaConfig, Block, PageKind, PagePolicy, Region, Table, random_secret};
use ferroce_mem::{Access, Memory, PdId};
use proptest::prelude::*;

fn small() -> Arena {
    let config = ArenaConfig { bytes: 1 << 20, pages: PagePolicy::Normal, numa_node: None };
    let (arena, report) = Arena::new(config).expect("1 MiB of normal pages");
    assert_eq!((report.page_kind, report.bytes, report.fallback), (PageKind::Normal, 1 << 20, None));
    arena
}

#[test]
fn auto_gets_memory_and_says_which_and_why() {
    let config = ArenaConfig { bytes: 3 << 20, ..ArenaConfig::default() };
    let (arena, report) = Arena::new(config).expect("some pages");
    assert_eq!(arena.len() as u64, report.bytes);
    assert!(report.bytes >= 3 << 20);
    assert_eq!(report.page_kind == PageKind::Huge2M, report.fallback.is_none(), "{report}");
    if let Some(reason) = &report.fallback {
        assert!(reason.contains("2 2 MiB hugepages (4 MiB)"), "{reason}");
        assert!(reason.contains("vm.nr_hugepages=2") || reason.contains("control group"), "{reason}");
    }
}

#[test]
fn more_hugepages_than_there_are_is_an_error_that_names_the_fix() {
    // Far more than any machine that runs this has.
    for (pages, words) in
        [(PagePolicy::Huge2M, "vm.nr_hugepages="), (PagePolicy::Huge1G, "hugepages-1048576kB")]
    {
        let config = ArenaConfig { bytes: 1 << 46, pages, numa_node: None };
        let error = Arena::new(config).expect_err("no machine has 64 TiB of them");
        assert_eq!(error.attribute, "pages");
        assert!(error.asked.contains("65536 GiB"), "{error}");
        let absent = error.allowed.contains("no such pages");
        assert!(absent || error.hint.contains(words), "{error}");
    }
}

#[test]
fn nothing_is_left_behind_by_a_refusal() {
    let open = || std::fs::read_dir("/proc/self/fd").expect("proc").count();
    let before = open();
    for _ in 0..500 {
        assert!(Region::new(1 << 46, PageKind::Huge2M, None).is_err());
    }
    // Other tests of this file run at the same time and hold a few.
    assert!(open() < before + 100, "{before} descriptors before 500 refusals, {} after", open());
    assert!(Region::new(u64::MAX, PageKind::Normal, None).is_err());
    let error = Region::new(4096, PageKind::Normal, Some(1023)).expect_err("there is no node 1023");
    assert_eq!((error.attribute.as_str(), error.asked.as_str()), ("numa_node", "1023"));
    let error = Region::new(4096, PageKind::Normal, Some(5000)).expect_err("there is no node 5000");
    assert_eq!(error.allowed, "0 to 1023");
}

#[test]
fn a_region_travels_by_its_descriptor() {
    let region = Region::new(10_000, PageKind::Normal, None).expect("3 pages");
    assert_eq!(region.len(), 12_288);
    let other = |len| Region::from_fd(region.fd().try_clone_to_owned().expect("dup"), len);
    let twin = other(12_288).expect("sealed and of that size");
    assert_eq!(twin.page_kind(), PageKind::Normal);
    let (here, there) = (Arena::from_region(Arc::new(region)), Arena::from_region(Arc::new(twin)));
    let (a, b) = (here.alloc(64, 64).expect("room"), there.alloc(64, 64).expect("room"));
    assert_ne!(a.base(), b.base());
    assert_eq!(a.offset_in_region(), b.offset_in_region());
    a.write(5, b"seen through the other mapping");
    let mut got = [0u8; 30];
    b.read(5, &mut got);
    assert_eq!(&got, b"seen through the other mapping");
    b.store_u64(56, 7);
    assert_eq!(a.load_u64(56), 7);
}

#[test]
fn unsealed_or_wrong_descriptors_are_refused() {
    let region = Region::new(4096, PageKind::Normal, None).expect("a page");
    let wrong = Region::from_fd(region.fd().try_clone_to_owned().expect("dup"), 8192).expect_err("too short");
    assert_eq!((wrong.attribute.as_str(), wrong.allowed.as_str()), ("region", "one of 4096 bytes"));
    let file = tempfile();
    let refused = Region::from_fd(file.into(), 4096).expect_err("no seals");
    assert!(refused.allowed.contains("seals"), "{refused}");
    // The seals hold: the owner can't cut the mapping short under a peer.
    assert!(rustix::fs::ftruncate(region.fd().as_fd(), 0).is_err());
}

/// A memfd without seals.
fn tempfile() -> std::fs::File {
    let fd = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
    rustix::fs::ftruncate(&fd, 4096).expect("ftruncate");
    fd.into()
}

#[test]
fn impossible_wishes_name_what_is_allowed() {
    let arena = small();
    let error = arena.alloc(2 << 20, 64).expect_err("larger than the arena");
    assert_eq!(
        error.to_string(),
        "arena: asked 2 MiB, allowed 1 MiB in one piece (1 MiB free); make the arena larger or free blocks"
    );
    for align in [0, 3, 8192] {
        assert_eq!(arena.alloc(1, align).expect_err("bad alignment").attribute, "alignment");
    }
    assert!(arena.alloc(usize::MAX, 64).is_err());
    assert_eq!(arena.free_bytes(), 1 << 20);
}

#[test]
fn blocks_keep_the_region_and_come_back_zeroed() {
    let arena = small();
    let block = arena.alloc(100, 4096).expect("room");
    assert_eq!((block.len(), block.base().as_ptr() as usize % 4096), (100, 0));
    block.fill(0xee);
    drop(arena.clone());
    block.write(96, &[1, 2, 3, 4]);
    block.write_u8_volatile(99, 9);
    assert_eq!((block.load_u32(96), block.read_u8_volatile(99)), (u32::from_ne_bytes([1, 2, 3, 9]), 9));
    assert_eq!(block.to_vec()[..96], [0xee; 96]);
    drop(block);
    assert_eq!(arena.free_bytes(), 1 << 20);
    let again = arena.alloc(100, 4096).expect("room");
    assert_eq!(again.to_vec(), [0; 100], "a former owner's bytes");
    let lone = { small().alloc(8, 8).expect("room") };
    lone.store_u64(0, 1);
    assert_eq!(lone.load_u64(0), 1, "the arena is gone, the block lives");
}

#[test]
#[should_panic(expected = "5 bytes at 96 are not inside a block of 100")]
fn access_outside_a_block_panics() {
    small().alloc(100, 64).expect("room").write(96, &[0; 5]);
}

#[test]
fn a_block_can_be_registered() {
    let block = small().alloc(4096, 4096).expect("room");
    let mut memory = Memory::new(4, random_secret().expect("random"));
    // SAFETY: the block outlives the table.
    #[allow(unsafe_code)]
    let mr =
        unsafe { memory.register(block.mr_init(PdId(1), Access::LOCAL_WRITE, 0x7000)) }.expect("free slot");
    let slice = memory.check_local(PdId(1), mr.lkey, 0x7010, 4, Access::LOCAL_WRITE).expect("own key");
    assert_eq!(slice.copy_in(b"data"), 4);
    assert_eq!(&block.to_vec()[0x10..0x14], b"data");
}

#[test]
fn secrets_differ() {
    assert_ne!(random_secret().expect("random"), random_secret().expect("random"));
}

#[test]
fn tables_hold_and_drop_their_values() {
    let witness = Arc::new(());
    for len in [0usize, 1, 1000, 100_000] {
        let mut table = Table::new(len, |i| (i, witness.clone())).expect("memory");
        assert_eq!(Arc::strong_count(&witness), len + 1);
        assert!(table.iter().enumerate().all(|(i, (value, _))| i == *value));
        if let Some(first) = table.first_mut() {
            first.0 = 7;
            assert_eq!(table[0].0, 7);
        }
        drop(table);
        assert_eq!(Arc::strong_count(&witness), 1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    /// No two blocks overlap, all are aligned, and all bytes come back.
    #[test]
    fn blocks_partition_the_arena(
        steps in proptest::collection::vec((1usize..40_000, 0u32..13, any::<prop::sample::Index>(), any::<bool>()), 1..120),
    ) {
        let arena = small();
        let mut blocks: Vec<Block> = Vec::new();
        let mut held: BTreeMap<usize, usize> = BTreeMap::new();
        for (bytes, shift, index, free) in steps {
            if free && !blocks.is_empty() {
                let block = blocks.swap_remove(index.index(blocks.len()));
                held.remove(&block.offset_in_region());
            } else if let Ok(block) = arena.alloc(bytes, 1 << shift) {
                let start = block.offset_in_region();
                prop_assert_eq!(block.base().as_ptr() as usize % (1 << shift).max(64), 0);
                prop_assert!(start + bytes <= arena.len());
                let before = held.range(..=start).next_back();
                prop_assert!(before.is_none_or(|(&at, &len)| at + len <= start));
                prop_assert!(held.range(start..).next().is_none_or(|(&at, _)| start + bytes <= at));
                held.insert(start, bytes);
                blocks.push(block);
            }
            let rounded: usize = held.values().map(|len| len.next_multiple_of(64)).sum();
            prop_assert_eq!(arena.free_bytes(), arena.len() - rounded);
        }
        drop(blocks);
        prop_assert_eq!(arena.free_bytes(), arena.len());
        prop_assert!(arena.alloc(arena.len(), 4096).is_ok(), "the holes did not join");
    }
}

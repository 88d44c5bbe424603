//! Copies, CRCs and atomics against plain slices and `crc32fast`.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use ferroce_mem::copy::Target;
use ferroce_mem::payload::MAX_PIECES;
use ferroce_mem::{Access, Memory, MrInit, MrSlice, Payload, PdId};

const STEP: usize = if cfg!(miri) { 13 } else { 1 };

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(0x9e37_79b1) >> 7).wrapping_add(seed * 31) as u8).collect()
}

fn crc(bytes: &[u8], seed: u32) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(seed);
    hasher.update(bytes);
    hasher.finalize()
}

/// Registers `bytes` and lends all of them as a slice. `words` keeps them aligned to 8.
fn with_slice<R>(words: &mut [u64], f: impl FnOnce(MrSlice<'_>) -> R) -> R {
    let mut memory = Memory::new(1, 1);
    let len = size_of_val(words) as u64;
    let base = NonNull::from(words).cast();
    // SAFETY: `words` is borrowed for longer than the table lives.
    let mr = unsafe { memory.register(MrInit { pd: PdId(0), access: Access::all(), iova: 0, base, len }) }
        .expect("registration");
    f(memory.check_local(PdId(0), mr.lkey, 0, len as u32, Access::LOCAL_WRITE).expect("own key"))
}

/// Appends `bytes` as memory that a peer may write.
fn push_raw<'f>(payload: &mut Payload<'f>, bytes: &'f [u8]) -> bool {
    // SAFETY: borrowed for 'f.
    unsafe { payload.push_raw(NonNull::from(bytes).cast(), bytes.len() as u32) }
}

/// `bytes` in up to [`MAX_PIECES`] pieces, cut at multiples of `cut`, alternately private and raw.
fn pieces(bytes: &[u8], cut: usize) -> Payload<'_> {
    let mut payload = Payload::EMPTY;
    let mut rest = bytes;
    for i in 0..MAX_PIECES {
        let (piece, more) = rest.split_at(if i + 1 == MAX_PIECES { rest.len() } else { cut.min(rest.len()) });
        let pushed = if i % 2 == 0 { payload.push_slice(piece) } else { push_raw(&mut payload, piece) };
        assert!(pushed);
        rest = more;
    }
    payload
}

#[test]
fn payload_crc_equals_crc32fast_at_all_offsets_and_lengths() {
    let bytes = pattern(4096 + 200, 1);
    for offset in (0..64).step_by(STEP) {
        for len in (0..64).chain([4096, 4097, 4159]).step_by(STEP) {
            let part = &bytes[offset..offset + len];
            let seed = (offset * 64 + len) as u32;
            let want = crc(part, seed);
            assert_eq!(Payload::from_slice(part).crc(seed), want, "private, {offset} {len}");
            let mut raw = Payload::EMPTY;
            assert!(push_raw(&mut raw, part));
            assert_eq!(raw.crc(seed), want, "raw, {offset} {len}");
            for cut in [1, 5, 64] {
                assert_eq!(pieces(part, cut).crc(seed), want, "pieces of {cut}, {offset} {len}");
            }
        }
    }
}

#[test]
fn place_and_copy_out_move_the_right_bytes_only() {
    let source = pattern(200, 2);
    for offset in (0..64).step_by(STEP) {
        for len in (0..=130).step_by(STEP) {
            let mut words = [0xa5a5_a5a5_a5a5_a5a5u64; 32];
            let part = &source[offset..offset + len];
            with_slice(&mut words, |slice| {
                for cut in [7, 64] {
                    assert!(slice.place(offset, &pieces(part, cut)));
                    let mut all = [0u8; 256];
                    assert_eq!(slice.copy_out(&mut all), 256);
                    assert_eq!(&all[offset..offset + len], part, "{offset} {len}");
                    assert!(all[..offset].iter().chain(&all[offset + len..]).all(|&b| b == 0xa5));
                    assert_eq!(slice.crc(3), crc(&all, 3));
                }
            });
        }
    }
}

#[test]
fn writing_outside_is_refused() {
    let bytes = pattern(65, 3);
    with_slice(&mut [0u64; 8], |slice| {
        let payload = Payload::from_slice(&bytes);
        assert!(!slice.place(0, &payload));
        assert!(!slice.place(1, &payload.slice(0, 64).expect("inside")));
        assert!(!slice.place(65, &Payload::EMPTY));
        assert!(slice.place(64, &Payload::EMPTY));
        assert!(!slice.place(usize::MAX, &payload));
        assert!(slice.subslice(65, 0).is_none() && slice.subslice(64, 0).is_some());
        assert!(slice.subslice(1, usize::MAX).is_none());
        assert_eq!(slice.crc(0), crc(&[0; 64], 0), "nothing was written");
        assert_eq!(slice.copy_in(&bytes), 64);
        assert_eq!(slice.crc(0), crc(&bytes[..64], 0));
    });
    let mut buffer = [0u8; 64];
    let mut target = Target::from_slice(&mut buffer);
    assert!(!target.write(0, &bytes) && !target.write(1, &bytes[..64]) && !target.write(usize::MAX, &bytes));
    assert!(target.write(64, &[]) && target.write(63, &[9]));
    assert_eq!((target.len(), target.is_empty()), (64, false));
    assert_eq!(buffer[63], 9);
    assert!(buffer[..63].iter().all(|&b| b == 0));
}

#[test]
fn frames_are_written_and_crcd_in_one() {
    let mut words: Vec<u64> = pattern(9000 / 8 * 8, 4).chunks(8).map(|c| u64::from(c[0]) * 0x0101).collect();
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
    with_slice(&mut words, |slice| {
        for (offset, len) in [(0, 0), (0, 9000), (1, 1), (3, 63), (64, 4096), (5, 4097), (7, 8192)] {
            let mut frame = vec![0xa5u8; 58 + len + 4];
            let mut target = Target::from_slice(&mut frame);
            let head = &bytes[..58];
            let state = target.write_crc(0, head, 0x1234);
            let part = slice.subslice(offset, len).expect("inside");
            let state = target.write_slice_crc(58, part, state);
            assert!(target.write(58 + len, &state.to_le_bytes()));
            let body: Vec<u8> = [head, &bytes[offset..offset + len]].concat();
            assert_eq!(state, crc(&body, 0x1234));
            assert_eq!(frame, [&body[..], &state.to_le_bytes()].concat());
        }
    });
}

#[test]
fn payload_slices_equal_slices_of_the_bytes() {
    let bytes = pattern(64, 5);
    for cut in [1, 10, 30, 64] {
        let payload = pieces(&bytes, cut);
        assert_eq!((payload.len(), payload.is_empty()), (64, false));
        for offset in (0..=65usize).step_by(STEP) {
            for len in (0..=65usize).step_by(STEP) {
                let part = payload.slice(offset, len);
                assert_eq!(part.is_some(), offset + len <= 64);
                let Some(part) = part else { continue };
                let mut copy = [0u8; 70];
                assert_eq!(part.copy_to(&mut copy), len);
                assert_eq!(&copy[..len], &bytes[offset..offset + len]);
                assert_eq!(part.crc(0), crc(&copy[..len], 0));
            }
        }
        assert!(payload.slice(usize::MAX, 1).is_none());
        assert_eq!(payload.copy_to(&mut [0u8; 10]), 10);
    }
}

#[test]
fn a_payload_takes_so_many_pieces_and_no_more() {
    let bytes = pattern(8, 6);
    let mut payload = Payload::EMPTY;
    for _ in 0..MAX_PIECES {
        assert!(push_raw(&mut payload, &bytes) && payload.push_slice(&[]));
    }
    assert!(!push_raw(&mut payload, &bytes) && !payload.push_slice(&bytes));
    assert_eq!((payload.len(), payload.pieces()), (8 * MAX_PIECES, MAX_PIECES));
    let mut huge = Payload::EMPTY;
    // SAFETY: nothing reads the pieces of this payload.
    unsafe {
        assert!(huge.push_raw(NonNull::dangling(), u32::MAX));
        assert!(!huge.push_raw(NonNull::dangling(), 1));
    }
    assert_eq!(huge.len(), u32::MAX as usize);
}

#[test]
fn atomics_need_alignment_and_room() {
    with_slice(&mut [5u64, 6, u64::MAX], |slice| {
        assert_eq!(slice.fetch_add_u64(0, 2), Some(5));
        assert_eq!(slice.fetch_add_u64(0, 0), Some(7));
        assert_eq!(slice.fetch_add_u64(16, 2), Some(u64::MAX));
        assert_eq!(slice.fetch_add_u64(16, 0), Some(1), "wraps");
        assert_eq!(slice.cmp_swap_u64(8, 6, 60), Some(6));
        assert_eq!(slice.cmp_swap_u64(8, 6, 61), Some(60), "did not match");
        assert_eq!(slice.fetch_add_u64(8, 0), Some(60));
        for bad in [1, 4, 7, 17, 24, usize::MAX] {
            assert_eq!(slice.fetch_add_u64(bad, 1), None);
            assert_eq!(slice.cmp_swap_u64(bad, 0, 1), None);
        }
    });
}

#[test]
fn what_is_crcd_is_what_is_written_while_the_source_changes() {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    let words: Vec<AtomicU64> = (0..512).map(AtomicU64::new).collect();
    let base = NonNull::from(&words[..]).cast();
    let mut memory = Memory::new(1, 1);
    let init = MrInit { pd: PdId(0), access: Access::all(), iova: 0, base, len: 4096 };
    // SAFETY: `words` outlives the table.
    let mr = unsafe { memory.register(init) }.expect("registration");
    let stop = AtomicBool::new(cfg!(miri));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut value = 0u64;
            while !stop.load(Ordering::Relaxed) {
                value = value.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                words.iter().for_each(|word| word.store(value, Ordering::Relaxed));
            }
        });
        for _ in 0..if cfg!(miri) { 2 } else { 2000 } {
            let slice = memory.check_local(PdId(0), mr.lkey, 0, 4096, Access::empty()).expect("own key");
            let mut frame = [0u8; 4096];
            let state = Target::from_slice(&mut frame).write_slice_crc(0, slice, 0);
            assert_eq!(state, crc(&frame, 0));
        }
        stop.store(true, Ordering::Relaxed);
    });
}

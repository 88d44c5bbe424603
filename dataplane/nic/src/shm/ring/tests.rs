//! The ring against a plain queue, and against a peer that writes whatever it likes.

use std::collections::VecDeque;

use ferroce_mem::os::PageKind;
use proptest::prelude::*;

use super::*;

const GEOMETRY: Geometry = Geometry { queues: 2, ring_bytes: 4096 };
const MAX: usize = 700;

struct Rig {
    region: Arc<Region>,
    tx: Producer,
    rx: Consumer,
    head: Head,
}

fn rig() -> Rig {
    let region = Region::new(GEOMETRY.bytes() as u64, PageKind::Normal, None).expect("a few pages");
    let region = Arc::new(region);
    let tx = Producer::new(&region, GEOMETRY, 1, Direction::FromConnector, true).expect("fits");
    let rx = Consumer::new(&region, GEOMETRY, 1, Direction::FromConnector, MAX).expect("fits");
    Rig { region, tx, rx, head: Head::new() }
}

impl Rig {
    /// Writes a frame; false if there is no room.
    fn send(&mut self, frame: &[u8]) -> bool {
        match self.tx.reserve(frame.len()) {
            Ok(Some(mut room)) => assert!(room.write(0, frame)),
            Ok(None) => return false,
            Err(fault) => panic!("{fault:?}"),
        }
        assert!(self.tx.commit(frame.len()));
        true
    }
    fn receive(&mut self, max: usize) -> (Vec<Vec<u8>>, Burst) {
        let mut frames = Vec::new();
        let burst = self.rx.burst(max, &mut self.head, |frame| frames.push(bytes_of(&frame)));
        assert_eq!((burst.frames, burst.bytes), (frames.len(), frames.iter().map(|f| f.len() as u64).sum()));
        (frames, burst)
    }
    /// A word anywhere in the ring's control block or records, as a hostile peer sees it.
    fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset < CONTROL + GEOMETRY.ring_bytes as usize && offset.is_multiple_of(4));
        // SAFETY: inside the ring, aligned.
        unsafe { AtomicU32::from_ptr(self.tx.ring.base.add(offset).cast().as_ptr()) }
    }
}

fn bytes_of(frame: &RxFrame<'_>) -> Vec<u8> {
    let mut bytes = frame.head.to_vec();
    let mut rest = vec![0; frame.rest.len()];
    frame.rest.copy_to(&mut rest);
    bytes.extend(rest);
    bytes
}

fn frame(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + seed * 13) as u8 | 0x80).collect()
}

#[test]
fn nothing_is_seen_before_the_flush_and_all_after_it() {
    let mut rig = rig();
    for i in 0..3 {
        assert!(rig.send(&frame(100 + i, i)));
    }
    assert_eq!(rig.receive(9).0.len(), 0);
    assert!(!rig.tx.flush(), "nobody sleeps");
    assert_eq!(rig.receive(2).0, [frame(100, 0), frame(101, 1)]);
    assert_eq!(rig.receive(2).0, [frame(102, 2)]);
    assert!(!rig.tx.flush());
    assert_eq!(rig.receive(2).0.len(), 0);
}

#[test]
fn an_uncommitted_frame_leaves_no_trace() {
    let mut rig = rig();
    assert!(!rig.tx.commit(1), "nothing is reserved");
    drop(rig.tx.reserve(60));
    rig.tx.flush();
    assert_eq!(rig.receive(9).0.len(), 0);
    drop(rig.tx.reserve(60));
    assert!(!rig.tx.commit(61) && !rig.tx.commit(0), "more than was reserved, or nothing");
    assert!(rig.send(&frame(77, 1)));
    rig.tx.flush();
    assert_eq!(rig.receive(9).0, [frame(77, 1)]);
}

#[test]
fn less_than_reserved_may_be_committed() {
    let mut rig = rig();
    for round in 0..200 {
        match rig.tx.reserve(MAX) {
            Ok(Some(mut room)) => assert!(room.write(0, &frame(60 + round, round))),
            _ => panic!("there is room for one"),
        }
        assert!(rig.tx.commit(60 + round));
        rig.tx.flush();
        assert_eq!(rig.receive(1).0, [frame(60 + round, round)]);
    }
}

#[test]
fn a_sleeper_is_woken_once_per_sleep() {
    let mut rig = rig();
    assert!(rig.rx.arm());
    assert!(rig.send(&frame(60, 0)));
    assert!(rig.tx.flush());
    assert!(rig.send(&frame(60, 1)));
    assert!(!rig.tx.flush(), "woken already");
    assert!(!rig.rx.arm(), "frames are waiting");
    rig.rx.disarm();
    assert_eq!(rig.receive(9).0.len(), 2);
    assert!(rig.rx.arm());
    rig.rx.disarm();
    assert!(rig.send(&frame(60, 2)));
    assert!(!rig.tx.flush(), "awake");
}

/// Does `spoil` to a ring that holds one frame, and says what the consumer makes of it.
fn after(spoil: impl FnOnce(&mut Rig)) -> (usize, Option<RingFault>) {
    let mut rig = rig();
    assert!(rig.send(&frame(100, 0)));
    rig.tx.flush();
    assert_eq!(rig.receive(9).0.len(), 1);
    spoil(&mut rig);
    let (frames, burst) = rig.receive(9);
    assert!(frames.iter().all(|frame| (1..=MAX).contains(&frame.len())));
    (frames.len(), burst.fault)
}

#[test]
fn nonsense_words_are_told_apart() {
    // The frame of 100 bytes took two lines, so the next word is at 128.
    let at = CONTROL + 128;
    let word = |len| word_of(128, len);
    let put = |value: u32| after(|rig| rig.word(at).store(value, Ordering::Release));
    assert_eq!(put(0), (0, None));
    assert_eq!(put(word(60)), (1, None), "as a peer of ours would");
    assert_eq!(put(word(60) & !VALID), (0, Some(RingFault::BadWord)));
    assert_eq!(put(word_of(192, 60)), (0, Some(RingFault::BadWord)));
    assert_eq!(put(word(0)), (0, Some(RingFault::BadLength)));
    assert_eq!(put(word(MAX as u32)), (1, None));
    assert_eq!(put(word(MAX as u32 + 1)), (0, Some(RingFault::BadLength)));
    assert_eq!(put(word(0xfffe)), (0, Some(RingFault::BadLength)));
    assert_eq!(put(word_of(192, WRAP)), (0, Some(RingFault::BadWord)));
    // A wrap whose target is not published, or not of the next lap.
    assert_eq!(put(word(WRAP)), (0, Some(RingFault::BadWord)), "the word there is of this lap");
    let wrapped = after(|rig| {
        rig.word(CONTROL + 64).store(0, Ordering::Relaxed);
        rig.word(CONTROL).store(word_of(4096, 60), Ordering::Relaxed);
        rig.word(at).store(word_of(128, WRAP), Ordering::Release);
    });
    assert_eq!(wrapped, (1, None));
    let empty = after(|rig| {
        rig.word(CONTROL).store(0, Ordering::Relaxed);
        rig.word(at).store(word_of(128, WRAP), Ordering::Release);
    });
    assert_eq!(empty, (0, Some(RingFault::BadWord)));
}

#[test]
fn records_past_the_end_and_wraps_at_the_start_are_refused() {
    let mut rig = rig();
    for i in 0..(4096 / 64 - 1) {
        assert!(rig.send(&frame(60, i)));
        rig.tx.flush();
        assert_eq!(rig.receive(1).0.len(), 1);
    }
    let last = 4096 - 64;
    rig.word(CONTROL + last).store(word_of(last as u64, 61), Ordering::Release);
    assert_eq!(rig.receive(1).1.fault, Some(RingFault::PastEnd));
    let mut fresh = self::rig();
    fresh.word(CONTROL).store(word_of(0, WRAP), Ordering::Release);
    assert_eq!(fresh.receive(1).1.fault, Some(RingFault::BadWord));
}

#[test]
fn impossible_consumer_positions_are_refused() {
    for (position, fault) in
        [(64u64, None), (128, None), (192, Some(())), (1, Some(())), (u64::MAX, Some(()))]
    {
        let mut rig = rig();
        assert!(rig.send(&frame(100, 0)));
        rig.tx.flush();
        while rig.tx.reserve(MAX).expect("nothing wrong yet").is_some() {
            assert!(rig.tx.commit(MAX));
        }
        rig.word(0).store(position as u32, Ordering::Relaxed);
        rig.word(4).store((position >> 32) as u32, Ordering::Release);
        assert_eq!(rig.tx.reserve(MAX).err(), fault.map(|()| RingFault::BadPosition), "{position}");
    }
    // Backwards.
    let mut rig = rig();
    for _ in 0..20 {
        assert!(rig.send(&frame(MAX, 0)));
        rig.tx.flush();
        assert_eq!(rig.receive(1).0.len(), 1);
    }
    rig.word(0).store(64, Ordering::Relaxed);
    while let Ok(Some(_)) = rig.tx.reserve(MAX) {
        assert!(rig.tx.commit(MAX));
    }
    assert_eq!(rig.tx.reserve(MAX).err(), Some(RingFault::BadPosition));
}

#[test]
fn impossible_rings_are_not_made() {
    let rig = rig();
    let make =
        |geometry, queue| Consumer::new(&rig.region, geometry, queue, Direction::FromListener, MAX).is_some();
    assert!(make(GEOMETRY, 0) && !make(GEOMETRY, 2));
    assert!(!make(Geometry { queues: 200, ..GEOMETRY }, 0));
    assert!(!make(Geometry { ring_bytes: 4000, ..GEOMETRY }, 0));
    assert!(!make(Geometry { ring_bytes: 0, ..GEOMETRY }, 0));
    assert!(!make(Geometry { queues: 1, ring_bytes: 1 << 31 }, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any mix of sends, flushes and receives behaves as a queue; room for a frame of full size returns.
    #[test]
    fn behaves_as_a_queue(
        steps in proptest::collection::vec((0u8..10, 1usize..=MAX, 1usize..20), 1..400),
    ) {
        let mut rig = rig();
        let (mut committed, mut visible) = (VecDeque::new(), VecDeque::new());
        for (number, (step, len, max)) in steps.into_iter().enumerate() {
            match step {
                0..=5 => {
                    let bytes = frame(len, number);
                    if rig.send(&bytes) {
                        committed.push_back(bytes);
                    } else {
                        let held: usize = committed.iter().chain(&visible).map(|f: &Vec<u8>| f.len() + 68).sum();
                        prop_assert!(held + 2 * (MAX + 132) > 4096, "refused with {held} bytes in the ring");
                    }
                }
                6..=7 => {
                    rig.tx.flush();
                    visible.append(&mut committed);
                }
                _ => {
                    let (frames, burst) = rig.receive(max);
                    prop_assert_eq!(burst.fault, None);
                    let want: Vec<_> = visible.drain(..visible.len().min(max)).collect();
                    prop_assert_eq!(frames, want);
                }
            }
        }
        rig.tx.flush();
        visible.append(&mut committed);
        let mut rest = Vec::new();
        while rest.len() < visible.len() {
            let (frames, _) = rig.receive(7);
            prop_assert!(!frames.is_empty(), "{} of {} came", rest.len(), visible.len());
            rest.extend(frames);
        }
        prop_assert_eq!(rest, Vec::from(visible));
        prop_assert!(rig.send(&frame(MAX, 0)));
    }

    /// A peer that writes anything anywhere, between our steps, causes faults at most.
    #[test]
    fn no_writes_of_a_peer_lead_out_of_bounds(
        steps in proptest::collection::vec(
            (0usize..(CONTROL + 4096) / 4, prop_oneof![any::<u32>(), (0u64..200, 0u32..0x10000)
                .prop_map(|(at, len)| word_of(at * 64, len))], 1usize..=MAX),
            1..200,
        ),
    ) {
        let mut rig = rig();
        for (at, value, len) in steps {
            rig.word(at * 4).store(value, Ordering::Release);
            rig.word(CONTROL + at * 64 % 4096).store(value, Ordering::Release);
            let (frames, burst) = rig.receive(5);
            prop_assert!(frames.iter().all(|frame| (1..=MAX).contains(&frame.len())));
            let sent = rig.tx.reserve(len).map(|room| room.is_some());
            if sent == Ok(true) {
                prop_assert!(rig.tx.commit(len));
                rig.tx.flush();
            }
            if burst.fault.is_some() || sent.is_err() {
                // A port takes the link down here.
                rig = self::rig();
            }
        }
    }
}

//! Where messages lie in the memory of a perf test.
//!
//! Two layouts. [`PerfLayout::Ours`]: each queue pair has an area of its own, first the slots that it sends or lets read,
//! then those that are received, written or read into; with checked data every message outstanding has a slot.
//! [`PerfLayout::Perftest`]: as perftest 4.5 has it, so that its programs may be the peer. With `B` the largest message
//! or 4096 bytes (its cycle buffer: a page), whichever is more, and `n` queue pairs:
//!
//! | what | where |
//! |---|---|
//! | queue pair `i` sends, reads and gets an atomic's result | `i * B` |
//! | what it tells the peer: the peer writes, reads and changes there | `(n + i) * B` |
//! | queue pair `i` receives | `(n + i) * B'`, `B'` being `B` rounded up to 64; over UD 24 more, so that data follows the GRH at a multiple of 64 |
//!
//! A bandwidth test of messages of at most half a page walks over that page, a message every 64 bytes or its size
//! rounded up to 64, on both sides; all others stay at the first byte.

use super::spec::{PerfMode, PerfOp, PerfSpec};
use ferroce_verbs::QpType;

/// perftest's cycle buffer: a page of most machines.
pub(super) const CYCLE_BYTES: u64 = 4096;
/// perftest's step between messages: a cache line of most machines.
const LINE_BYTES: u64 = 64;
/// Bytes in front of the data of a received datagram.
pub(super) const GRH_BYTES: u64 = 40;

/// Which layout a test's memory has; both sides the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum PerfLayout {
    /// Ours. Data can be compared.
    Ours,
    /// perftest's. Compared is what can be: lengths, the byte counter of write latency, what atomics return, that
    /// messages repeat as its programs do, and that nothing was written elsewhere.
    Perftest,
}

/// Slots in a row, one row per queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Area {
    /// First byte of queue pair 0's row.
    pub base: u64,
    /// From one queue pair's row to the next.
    pub per_lane: u64,
    /// From one slot to the next.
    pub stride: u64,
    /// Slots of a row.
    pub slots: u64,
}

impl Area {
    /// First byte of a slot.
    pub fn at(&self, lane: usize, slot: u64) -> u64 {
        self.base + lane as u64 * self.per_lane + slot * self.stride
    }
}

/// Where everything lies; offsets in the block. The same on both sides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    /// What this side sends or writes from.
    pub outgoing: Area,
    /// Where its READs and atomics land.
    pub landing: Area,
    /// Where its receives are, the GRH in front included.
    pub receive: Area,
    /// What the peer writes.
    pub written: Area,
    /// What the peer reads and changes by atomics.
    pub read: Area,
    /// What this side tells the peer of queue pair 0, and the step to the next.
    pub announced: (u64, u64),
    /// Bytes of it all.
    pub bytes: u64,
    /// Messages of one list share the slots of the list.
    list: Option<u64>,
}

impl Layout {
    pub fn of(spec: &PerfSpec) -> Layout {
        match spec.layout {
            PerfLayout::Ours => ours(spec),
            PerfLayout::Perftest => perftest(spec),
        }
    }

    /// Place in the row of message `message` of a queue pair.
    pub fn slot(&self, area: &Area, message: u64) -> u64 {
        self.list.map_or(message, |list| message % list) % area.slots
    }

    /// First byte of a message of a queue pair.
    pub fn message(&self, area: &Area, lane: usize, message: u64) -> u64 {
        area.at(lane, self.slot(area, message))
    }

    /// What the peer was told of queue pair `lane`.
    pub fn told(&self, lane: usize) -> u64 {
        self.announced.0 + lane as u64 * self.announced.1
    }
}

/// Bytes in front of the data of a receive.
pub(super) fn header(spec: &PerfSpec) -> u64 {
    if spec.connection == QpType::Ud { GRH_BYTES } else { 0 }
}

fn ours(spec: &PerfSpec) -> Layout {
    let stride = spec.slot_bytes();
    let (window, receives) = (u64::from(spec.send_queue_depth()), u64::from(spec.recv_queue_depth()));
    let (send_slots, recv_slots) = match (spec.check_data, spec.op, spec.mode) {
        (false, ..) => (1, 1),
        (true, PerfOp::Send, _) => (window, receives),
        (true, PerfOp::Write, PerfMode::Lat) => (window, 1),
        (true, PerfOp::Write | PerfOp::Read, _) => (window, window),
        (true, PerfOp::FetchAdd | PerfOp::CmpSwap, _) => (1, window),
    };
    let per_lane = (send_slots + recv_slots) * stride;
    let first = Area { base: 0, per_lane, stride, slots: send_slots };
    let second = Area { base: send_slots * stride, per_lane, stride, slots: recv_slots };
    Layout {
        outgoing: first,
        landing: second,
        receive: second,
        written: second,
        read: first,
        announced: (0, per_lane),
        bytes: per_lane * u64::from(spec.qps),
        list: None,
    }
}

fn perftest(spec: &PerfSpec) -> Layout {
    let (lanes, size) = (u64::from(spec.qps), u64::from(spec.size));
    let buffer = u64::from(spec.largest).max(CYCLE_BYTES);
    let aligned = buffer.next_multiple_of(LINE_BYTES);
    let stride = size.next_multiple_of(LINE_BYTES).max(LINE_BYTES);
    let walks = spec.mode == PerfMode::Bw && size <= CYCLE_BYTES / 2;
    let slots = if walks { CYCLE_BYTES / stride } else { 1 };
    let area = |base, per_lane| Area { base, per_lane, stride, slots };
    let ud = if spec.connection == QpType::Ud { LINE_BYTES - GRH_BYTES } else { 0 };
    let local = area(0, buffer);
    let told = area(lanes * buffer, buffer);
    // A datagram's GRH lies in front of its slot's data: one slot is enough for what nobody but us looks at.
    let receive = Area { slots: if ud == 0 { slots } else { 1 }, ..area(lanes * aligned + ud, aligned) };
    let list = u64::from(spec.post_list);
    Layout {
        outgoing: local,
        landing: local,
        receive,
        written: told,
        read: told,
        announced: (told.base, buffer),
        bytes: 2 * lanes * aligned + if ud == 0 { 0 } else { LINE_BYTES },
        list: (list > 1).then_some(list),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::Role;

    fn perftest(op: PerfOp, mode: PerfMode, qps: u32, size: u32, largest: u32) -> PerfSpec {
        let layout = PerfLayout::Perftest;
        PerfSpec { layout, qps, largest, ..PerfSpec::new(op, mode, Role::Client, size) }
    }

    /// Addresses as perftest 4.5 works them out, relative to its buffer.
    #[test]
    fn perftests_addresses() {
        // One page each way is the least.
        let small = perftest(PerfOp::Write, PerfMode::Lat, 1, 2, 2);
        assert_eq!((small.announced_offset(0), small.memory_bytes()), (4096, 8192));
        // The halves of all queue pairs come first, then what the peers are told.
        let many = perftest(PerfOp::Write, PerfMode::Bw, 8, 65536, 65536);
        assert_eq!(many.announced_offset(0), 8 * 65536);
        assert_eq!(many.announced_offset(7), 15 * 65536);
        assert_eq!(many.memory_bytes(), 16 * 65536);
        // What the peer is told is not rounded up, where receives lie is.
        let odd = perftest(PerfOp::Send, PerfMode::Bw, 2, 65537, 65537);
        assert_eq!((odd.announced_offset(1), odd.layout().receive.at(1, 0)), (3 * 65537, 3 * 65600));
        assert_eq!(odd.memory_bytes(), 4 * 65600);
        // A datagram's data begins at a cache line.
        let datagram =
            PerfSpec { connection: QpType::Ud, ..perftest(PerfOp::Send, PerfMode::Bw, 1, 1024, 1024) };
        assert_eq!((datagram.layout().receive.at(0, 0) + GRH_BYTES) % 64, 0);
        assert_eq!(datagram.recv_bytes(), 1064);
        assert_eq!(datagram.memory_bytes(), 8192 + 64);
        assert!(datagram.layout().receive.at(0, 0) + 1064 <= datagram.memory_bytes());
        // A sweep keeps its places.
        let sweep = perftest(PerfOp::Read, PerfMode::Bw, 1, 2, 8 << 20);
        assert_eq!(sweep.announced_offset(0), 8 << 20);
    }

    #[test]
    fn small_messages_walk_over_a_page() {
        let places = |op, mode, size, post_list| {
            let spec = PerfSpec { post_list, ..perftest(op, mode, 2, size, size) };
            let layout = spec.layout();
            let at = |message| layout.message(&layout.written, 1, message) - layout.told(1);
            (0..70).map(at).collect::<Vec<u64>>()
        };
        let eight = places(PerfOp::FetchAdd, PerfMode::Bw, 8, 1);
        assert_eq!((eight[1], eight[63], eight[64]), (64, 63 * 64, 0));
        // 4096 / 1088 places.
        assert_eq!(places(PerfOp::Write, PerfMode::Bw, 1025, 1)[..5], [0, 1088, 2176, 0, 1088]);
        assert!(places(PerfOp::Write, PerfMode::Bw, 2049, 1).iter().all(|at| *at == 0));
        assert!(places(PerfOp::Write, PerfMode::Lat, 8, 1).iter().all(|at| *at == 0));
        // A list has its own places, and is posted again as it is.
        assert_eq!(places(PerfOp::Write, PerfMode::Bw, 8, 3)[..5], [0, 64, 128, 0, 64]);
    }

    #[test]
    fn queue_pairs_never_share_memory() {
        for op in PerfOp::ALL {
            for mode in [PerfMode::Lat, PerfMode::Bw] {
                for (check_data, qps, size) in [(false, 5, 100), (true, 5, 100), (true, 3, 70_000)] {
                    let size = if op.is_atomic() { 8 } else { size };
                    let spec = PerfSpec { check_data, qps, ..PerfSpec::new(op, mode, Role::Client, size) };
                    let layout = spec.layout();
                    for area in [layout.outgoing, layout.receive] {
                        assert!(area.slots * area.stride <= area.per_lane);
                        let last = area.at(qps as usize - 1, area.slots - 1);
                        assert!(last + u64::from(spec.recv_bytes()) <= spec.memory_bytes(), "{spec:?}");
                    }
                }
            }
        }
    }
}

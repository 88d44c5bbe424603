//! Queue pair numbers: a keyed permutation of generation, worker and index.
//!
//! Owns the layout of a queue pair number and, on the control side, which numbers are free. Invariant: 0, 1 and
//! 0xffffff are never given out; a number comes back only after all other generations of its index, and never within
//! [`QUARANTINE`]. Random to the outside, O(1) inside. Called by control (allocation) and by demux (per frame).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ferroce_verbs::Qpn;

/// A number that was given back is not given out again within this time, however few there are: longer than a frame of
/// its old life may travel.
pub const QUARANTINE: Duration = Duration::from_secs(5);

const HALF: u32 = 0xfff;

/// A keyed permutation of 24 bits: a balanced Feistel network of four rounds.
#[derive(Clone, Copy, Debug)]
struct Permutation {
    keys: [u32; 4],
    factors: [u32; 4],
}

impl Permutation {
    fn new(secret: u64) -> Self {
        let mut state = secret;
        let mut next = || {
            // splitmix64: spreads the secret over the round keys.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z ^ (z >> 31)) as u32
        };
        let keys = std::array::from_fn(|_| next());
        let factors = std::array::from_fn(|_| next() | 1);
        Permutation { keys, factors }
    }

    #[inline]
    fn round(&self, i: usize, half: u32) -> u32 {
        let x = half.wrapping_add(self.keys[i]).wrapping_mul(self.factors[i]);
        (x ^ (x >> 15)).wrapping_mul(0x85eb_ca6b) >> 20
    }

    #[inline]
    fn seal(&self, plain: u32) -> u32 {
        let (mut left, mut right) = ((plain >> 12) & HALF, plain & HALF);
        for i in 0..4 {
            (left, right) = (right, left ^ self.round(i, right));
        }
        (left << 12) | right
    }

    #[inline]
    fn open(&self, sealed: u32) -> u32 {
        let (mut left, mut right) = ((sealed >> 12) & HALF, sealed & HALF);
        for i in (0..4).rev() {
            (left, right) = (right ^ self.round(i, left), left);
        }
        (left << 12) | right
    }
}

/// What a queue pair number says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpnParts {
    /// How often the index was used before, modulo the generations.
    pub generation: u32,
    /// The worker that owns it.
    pub worker: u8,
    /// Index in that worker's table.
    pub index: u32,
}

/// The layout of a device's queue pair numbers.
#[derive(Clone, Copy, Debug)]
pub struct QpnLayout {
    permutation: Permutation,
    index_bits: u32,
    worker_bits: u32,
}

const fn bits_for(count: u32) -> u32 {
    // Bits that hold 0 ..= count - 1.
    u32::BITS - count.saturating_sub(1).leading_zeros()
}

impl QpnLayout {
    /// For `workers` workers (1 ..= 64) with tables of `max_qp` (at most 65,536) slots each.
    pub fn new(secret: u64, workers: usize, max_qp: u32) -> Self {
        let worker_bits = bits_for(workers.min(64) as u32);
        let index_bits = bits_for(max_qp).min(24 - worker_bits - 2);
        QpnLayout { permutation: Permutation::new(secret), index_bits, worker_bits }
    }

    /// Number of generations of an index.
    pub const fn generations(&self) -> u32 {
        1 << (24 - self.index_bits - self.worker_bits)
    }

    /// The number for these parts, or `None` if it is one of the reserved ones.
    fn seal(&self, parts: QpnParts) -> Option<Qpn> {
        let plain = (parts.generation << (self.index_bits + self.worker_bits))
            | (u32::from(parts.worker) << self.index_bits)
            | parts.index;
        match self.permutation.seal(plain) {
            0 | 1 | 0xff_ffff => None,
            number => Some(Qpn::new(number)),
        }
    }

    /// What a number says; the worker and index may not exist.
    #[inline]
    pub fn open(&self, qpn: Qpn) -> QpnParts {
        let plain = self.permutation.open(qpn.get());
        QpnParts {
            generation: plain >> (self.index_bits + self.worker_bits),
            worker: ((plain >> self.index_bits) & ((1 << self.worker_bits) - 1)) as u8,
            index: plain & ((1 << self.index_bits) - 1),
        }
    }
}

/// One index of a worker's table, on the control side.
#[derive(Clone, Copy, Debug, Default)]
struct IndexState {
    generation: u32,
    /// When the index last began again with generation 0.
    wrapped_at: Option<Instant>,
}

/// Which numbers of one worker are free.
#[derive(Debug)]
pub struct QpnAllocator {
    layout: QpnLayout,
    worker: u8,
    indices: Vec<IndexState>,
    free: VecDeque<u32>,
}

/// Why no number was given out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoNumber {
    /// Every index is in use.
    AllInUse,
    /// The free ones were in use within [`QUARANTINE`].
    Quarantined,
}

impl QpnAllocator {
    /// All `max_qp` indices free.
    pub fn new(layout: QpnLayout, worker: u8, max_qp: u32) -> Self {
        let max_qp = max_qp.min(1 << layout.index_bits);
        QpnAllocator {
            layout,
            worker,
            indices: vec![IndexState::default(); max_qp as usize],
            free: (0..max_qp).collect(),
        }
    }

    /// Takes the index that was free longest.
    pub fn allocate(&mut self, now: Instant) -> Result<(Qpn, QpnParts), NoNumber> {
        for _ in 0..self.free.len() {
            let Some(index) = self.free.pop_front() else { break };
            let Some(state) = self.indices.get_mut(index as usize) else { continue };
            // At most three generations of all are reserved, hence the bound.
            for _ in 0..4 {
                if state.generation >= self.layout.generations() {
                    if state.wrapped_at.is_some_and(|at| now.saturating_duration_since(at) < QUARANTINE) {
                        break;
                    }
                    state.generation = 0;
                    state.wrapped_at = Some(now);
                }
                let parts = QpnParts { generation: state.generation, worker: self.worker, index };
                state.generation += 1;
                if let Some(qpn) = self.layout.seal(parts) {
                    state.wrapped_at.get_or_insert(now);
                    return Ok((qpn, parts));
                }
            }
            self.free.push_back(index);
        }
        Err(if self.free.is_empty() { NoNumber::AllInUse } else { NoNumber::Quarantined })
    }

    /// Gives a number back.
    pub fn release(&mut self, qpn: Qpn) {
        self.free.push_back(self.layout.open(qpn).index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_permutation_is_one() {
        let p = Permutation::new(0x1234_5678_9abc_def0);
        let mut seen = vec![false; 1 << 24];
        for plain in 0..1u32 << 24 {
            let sealed = p.seal(plain);
            assert!(!std::mem::replace(&mut seen[sealed as usize], true));
            assert_eq!(p.open(sealed), plain);
        }
    }

    #[test]
    fn numbers_differ_by_secret_and_look_random() {
        let a = QpnLayout::new(1, 2, 1024);
        let b = QpnLayout::new(2, 2, 1024);
        let parts = |index| QpnParts { generation: 0, worker: 1, index };
        let equal = (0..1000).filter(|i| a.seal(parts(*i)) == b.seal(parts(*i))).count();
        assert!(equal < 10, "{equal} of 1000 numbers do not depend on the secret");
        let steps: Vec<i64> = (0..1000)
            .filter_map(|i| Some(i64::from(a.seal(parts(i))?.get()) - i64::from(a.seal(parts(i + 1))?.get())))
            .collect();
        assert!(steps.iter().filter(|s| s.abs() < 1 << 12).count() < 20, "neighbours lie near each other");
    }

    #[test]
    fn parts_come_back_for_all_sizes() {
        for (workers, max_qp) in [(1, 1), (1, 65_536), (2, 64), (3, 1000), (64, 65_536)] {
            let layout = QpnLayout::new(99, workers, max_qp);
            let mut alloc = QpnAllocator::new(layout, workers as u8 - 1, max_qp);
            let now = Instant::now();
            for _ in 0..max_qp.min(2000) {
                let (qpn, parts) = alloc.allocate(now).expect("a free number");
                assert_eq!(layout.open(qpn), parts);
                assert!(!matches!(qpn.get(), 0 | 1 | 0xff_ffff));
            }
        }
    }

    #[test]
    fn a_number_is_not_soon_used_again() {
        let layout = QpnLayout::new(7, 64, 65_536);
        assert_eq!(layout.generations(), 4);
        let mut alloc = QpnAllocator::new(layout, 0, 1);
        let start = Instant::now();
        let mut seen = Vec::new();
        for _ in 0..4 {
            let Ok((qpn, _)) = alloc.allocate(start) else { break };
            assert!(!seen.contains(&qpn));
            seen.push(qpn);
            alloc.release(qpn);
        }
        assert_eq!(alloc.allocate(start), Err(NoNumber::Quarantined));
        let (again, _) = alloc.allocate(start + QUARANTINE).expect("quarantine is over");
        assert_eq!(again, seen[0]);
        assert_eq!(alloc.allocate(start + QUARANTINE), Err(NoNumber::AllInUse));
    }
}

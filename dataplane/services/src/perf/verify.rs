//! Comparing data, with `check_data`.
//!
//! In our layout every byte that arrives is known: messages carry a pattern of seed, queue pair and number; over UC and
//! UD, where numbers go missing, a message of 16 bytes or more begins with its number. Every result of fetch and add on
//! the one counter of a test is seen once, every compare and swap finds what the one before it left. In perftest's layout
//! the peer's data is unknown (its programs send what `rand` gave them, in write latency zeros and the counter), so
//! compared is what must hold all the same: zeros, that the same place has the same data each time, that counters go
//! up, and that memory that no message goes to is as it was.

use super::lanes;
use super::layout::{Area, CYCLE_BYTES, Layout, PerfLayout};
use super::service::PerfService;
use super::{PerfMode, PerfOp, PerfSpec, Role};
use crate::area::chunks;
use crate::fault::Fault;
use crate::pattern;

/// Results of fetch and add that are told apart: 2^26 of them take 8 MiB.
const MOST_RESULTS: u64 = 1 << 26;
/// Bytes compared in one pass after the test.
const SOME_BYTES: u64 = 16 << 10;
/// Bytes at the start of a message that may be lost: its number.
const NUMBER_BYTES: u64 = 8;
/// What a READ must overwrite.
const SPOILT: u8 = 0xee;

/// What is remembered between messages.
pub(super) struct Verify {
    /// A bit per result of fetch and add.
    seen: Box<[u64]>,
    /// Per queue pair and place of perftest's layout: the last data or value that was found there.
    found: Box<[Option<u64>]>,
    slots: u64,
    /// Where comparing after the test stands: a place, a queue pair or an offset.
    cursor: u64,
}

impl Verify {
    pub fn of(spec: &PerfSpec, layout: &Layout) -> Verify {
        let ours = spec.layout == PerfLayout::Ours;
        let counts = spec.check_data && ours && spec.op == PerfOp::FetchAdd && spec.requests();
        let total = match spec.duration_ns {
            None => (spec.warmup + spec.iters).saturating_mul(spec.qps.into()),
            Some(_) => MOST_RESULTS,
        };
        let results = if counts { total.min(MOST_RESULTS) } else { 0 };
        let slots = layout.outgoing.slots;
        let remembers = spec.check_data && !ours;
        let places = if remembers { slots * u64::from(spec.qps) } else { 0 };
        Verify {
            seen: vec![0; results.div_ceil(64) as usize].into_boxed_slice(),
            found: vec![None; places as usize].into_boxed_slice(),
            slots,
            cursor: 0,
        }
    }

    fn place(&mut self, lane: usize, slot: u64) -> Option<&mut Option<u64>> {
        self.found.get_mut((lane as u64 * self.slots + slot) as usize)
    }

    /// Marks a result as seen; false if it was before.
    fn see(&mut self, result: u64) -> bool {
        let Some(word) = self.seen.get_mut((result / 64) as usize) else { return true };
        let bit = 1 << (result % 64);
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }
}

/// Number of a message's data, and whether it begins with that.
fn data_of(spec: &PerfSpec, lane: usize, message: u64) -> (u64, bool) {
    match (spec.op, spec.may_lose()) {
        (PerfOp::Send, true) if u64::from(spec.size) >= 2 * NUMBER_BYTES => (message, true),
        (PerfOp::Send, true) => (lanes::wr_id(lane, 0), false),
        _ => (lanes::wr_id(lane, message), false),
    }
}

impl PerfService {
    fn compares(&self, layout: PerfLayout) -> bool {
        self.spec.check_data && self.spec.layout == layout
    }

    /// Fills the slot of a message that differs from all others.
    pub(super) fn fill_outgoing(&self, at: u64, lane: usize, message: u64) -> Result<(), Fault> {
        let (number, begins) = data_of(&self.spec, lane, message);
        self.ends.local.fill(at, self.spec.size.into(), self.spec.own_seed(), number)?;
        if begins { self.ends.local.write(at, &number.to_le_bytes()) } else { Ok(()) }
    }

    /// As [`PerfService::fill_outgoing`], for data posted inline; a static write has the data of its slot.
    pub(super) fn fill_inline(&mut self, lane: usize, message: u64) {
        let static_data = self.spec.op == PerfOp::Write && self.spec.mode == PerfMode::Bw;
        let slot = self.layout.slot(&self.layout.outgoing, message);
        let (number, begins) = data_of(&self.spec, lane, if static_data { slot } else { message });
        pattern::fill(&mut self.inline, self.spec.own_seed(), number, 0);
        if let (true, Some(first)) = (begins, self.inline.first_chunk_mut()) {
            *first = number.to_le_bytes();
        }
    }

    /// A message that came into a receive.
    pub(super) fn check_received(&mut self, lane: usize, message: u64) -> Result<(), Fault> {
        let at = self.layout.message(&self.layout.receive, lane, message) + self.recv_header();
        let size = u64::from(self.spec.size);
        if self.compares(PerfLayout::Perftest) {
            // Numbers, and with them places, are known where nothing is lost and lists do not start anew.
            if self.spec.may_lose() || self.spec.post_list > 1 {
                return Ok(());
            }
            return self.check_same(at, lane, message, message);
        }
        if !self.spec.check_data {
            return Ok(());
        }
        let (mut number, begins) = data_of(&self.spec, lane, message);
        let mut from = 0;
        if begins {
            let mut first = [0; NUMBER_BYTES as usize];
            self.ends.local.read(at, &mut first)?;
            // A wrong number makes all that follows differ.
            (number, from) = (u64::from_le_bytes(first), NUMBER_BYTES);
        }
        self.ends.local.check_from(at, from..size, self.spec.peer_seed(), number, message)
    }

    fn recv_header(&self) -> u64 {
        u64::from(self.spec.recv_bytes() - self.spec.size)
    }

    /// A write that was seen in memory.
    pub(super) fn check_watched(&self, lane: usize, message: u64) -> Result<(), Fault> {
        if !self.spec.check_data {
            return Ok(());
        }
        let at = self.layout.message(&self.layout.written, lane, message);
        let before = u64::from(self.spec.size) - 1;
        if self.spec.layout == PerfLayout::Ours {
            let (number, _) = data_of(&self.spec, lane, message);
            return self.ends.local.check(at, before, self.spec.peer_seed(), number, message);
        }
        // Zeros, but for the counters of smaller sizes of the sweep, which end at powers of two.
        let mut chunk = [0u8; pattern::CHUNK_BYTES];
        chunks(before, |offset, count| {
            let piece = &mut chunk[..count];
            self.ends.local.read(at + offset, piece)?;
            let wrong = piece
                .iter()
                .enumerate()
                .find(|&(index, &byte)| byte != 0 && !(offset + index as u64 + 1).is_power_of_two());
            match wrong {
                None => Ok(()),
                Some((index, &got)) => {
                    Err(Fault::Data { message, offset: offset + index as u64, expected: 0, got })
                }
            }
        })
    }

    /// What READs and atomics of a lane brought, from `from` up to `to`.
    pub(super) fn check_landed(&mut self, lane: usize, from: u64, to: u64) -> Result<(), Fault> {
        if !self.spec.check_data {
            return Ok(());
        }
        for message in from..to {
            let at = self.layout.message(&self.layout.landing, lane, message);
            if self.spec.op != PerfOp::Read {
                self.check_atomic(at, lane, message)?;
            } else if self.spec.layout == PerfLayout::Perftest {
                self.check_same(at, lane, message, message)?;
            } else {
                // Compared and then spoilt, so that stale data cannot pass the next time.
                let (size, seed) = (u64::from(self.spec.size), self.spec.peer_seed());
                let slot = self.layout.slot(&self.layout.read, message);
                self.ends.local.check(at, size, seed, lanes::wr_id(lane, slot), message)?;
                self.ends.local.set(at, size, SPOILT)?;
            }
        }
        Ok(())
    }

    fn check_atomic(&mut self, at: u64, lane: usize, message: u64) -> Result<(), Fault> {
        let mut bytes = [0; 8];
        self.ends.local.read(at, &mut bytes)?;
        let got = u64::from_ne_bytes(bytes);
        let is = |expected: u64| {
            if got == expected { Ok(()) } else { Err(Fault::Atomic { message, expected, got }) }
        };
        match (self.spec.layout, self.spec.op) {
            (PerfLayout::Ours, PerfOp::CmpSwap) => is(message),
            (PerfLayout::Ours, _) if got >= self.lanes.posted => is(self.lanes.posted - 1),
            (PerfLayout::Ours, _) if self.verify.see(got) => Ok(()),
            (PerfLayout::Ours, _) => Err(Fault::AtomicAgain { message, got }),
            (PerfLayout::Perftest, PerfOp::CmpSwap) => self.check_same(at, lane, message, message),
            (PerfLayout::Perftest, _) => {
                let depth = self.depth;
                let slot = self.layout.slot(&self.layout.landing, message);
                // Later results may have landed on this one already: at most as many as are outstanding.
                let most = if depth <= self.verify.slots { 1 } else { 2 + depth / self.verify.slots };
                let least = u64::from(depth <= self.verify.slots);
                let Some(place) = self.verify.place(lane, slot) else { return Ok(()) };
                match place.replace(got) {
                    Some(last) if !(least..=most).contains(&got.wrapping_sub(last)) => {
                        Err(Fault::Atomic { message, expected: last.wrapping_add(1), got })
                    }
                    _ => Ok(()),
                }
            }
        }
    }

    /// The data at `at` is what it was when the same place was last used.
    fn check_same(&mut self, at: u64, lane: usize, message: u64, number: u64) -> Result<(), Fault> {
        let mut sum = 0u64;
        let mut chunk = [0u8; pattern::CHUNK_BYTES];
        chunks(self.spec.size.into(), |offset, count| {
            self.ends.local.read(at + offset, &mut chunk[..count])?;
            for &byte in &chunk[..count] {
                sum = (sum.rotate_left(5) ^ u64::from(byte)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            }
            Ok(())
        })?;
        let slot = self.layout.slot(&self.layout.outgoing, message);
        match self.verify.place(lane, slot).and_then(|place| place.replace(sum)) {
            Some(last) if last != sum => Err(Fault::Changed { message: number }),
            _ => Ok(()),
        }
    }

    /// Compares a part of what can be compared after the test; true when all of it was.
    pub(super) fn compare_some(&mut self) -> Result<bool, Fault> {
        if !self.spec.check_data {
            return Ok(true);
        }
        if self.spec.layout == PerfLayout::Perftest {
            return self.compare_rest();
        }
        let changes = PerfSpec { role: other(self.spec.role), ..self.spec }.requests();
        match (self.spec.op, self.spec.mode) {
            (PerfOp::Write, PerfMode::Bw) if changes => self.compare_written(),
            (PerfOp::FetchAdd | PerfOp::CmpSwap, _) if changes && self.spec.is_passive() => {
                self.compare_counter()
            }
            _ => Ok(true),
        }
    }

    /// One slot that the peer wrote.
    fn compare_written(&mut self) -> Result<bool, Fault> {
        let slots = self.layout.written.slots;
        let (lane, slot) = ((self.verify.cursor / slots) as usize, self.verify.cursor % slots);
        if lane >= self.lanes.count() {
            return Ok(true);
        }
        self.verify.cursor += 1;
        if slot >= self.total {
            return Ok(false);
        }
        let (at, size) = (self.layout.written.at(lane, slot), u64::from(self.spec.size));
        // With a duration nobody knows here how many slots the client came to use; the first one at least. A peer that goes
        // on, and a connection that loses packets, leave parts of a slot as they were.
        let counted = self.spec.duration_ns.is_none();
        let whole = self.spec.is_passive() && !self.spec.may_lose();
        if !whole || (!counted && (slot > 0 || lane > 0)) {
            let holes = !whole;
            if holes {
                self.ends.local.check_or_zero(
                    at,
                    size,
                    self.spec.peer_seed(),
                    lanes::wr_id(lane, slot),
                    slot,
                )?;
                return Ok(false);
            }
            if self.ends.local.is_untouched(at, size)? {
                return Ok(false);
            }
        }
        self.ends.local.check(at, size, self.spec.peer_seed(), lanes::wr_id(lane, slot), slot)?;
        Ok(false)
    }

    /// What the client's atomics left of one lane's word.
    fn compare_counter(&mut self) -> Result<bool, Fault> {
        let lane = self.verify.cursor as usize;
        let lanes = if self.spec.op == PerfOp::FetchAdd { 1 } else { self.lanes.count() };
        if lane >= lanes || self.spec.duration_ns.is_some() {
            return Ok(true);
        }
        self.verify.cursor += 1;
        let mut bytes = [0; 8];
        self.ends.local.read(self.layout.read.at(lane, 0), &mut bytes)?;
        let got = u64::from_ne_bytes(bytes);
        let expected =
            if lanes == 1 && self.spec.op == PerfOp::FetchAdd { self.total_all } else { self.total };
        if got == expected {
            Ok(false)
        } else {
            Err(Fault::Atomic { message: expected.saturating_sub(1), expected, got })
        }
    }

    /// The next piece of perftest's layout to which no message goes.
    fn compare_rest(&mut self) -> Result<bool, Fault> {
        let end = self.layout.bytes;
        let mut budget = SOME_BYTES;
        while budget > 0 && self.verify.cursor < end {
            let at = self.verify.cursor;
            match self.regions().into_iter().flatten().map(|region| region.at(at)).reduce(Place::join) {
                Some(Place::Inside(until)) => self.verify.cursor = until,
                outside => {
                    let until = match outside {
                        Some(Place::Outside(until)) => until.min(end),
                        _ => end,
                    };
                    let len = (until - at).min(budget);
                    let zero = self.spec.op == PerfOp::Write && self.spec.mode == PerfMode::Lat;
                    let seed = (!zero).then_some(self.spec.own_seed());
                    self.ends.local.check_kept(at, len, seed)?;
                    self.verify.cursor += len;
                    budget -= len;
                }
            }
        }
        Ok(self.verify.cursor >= end)
    }

    /// Where messages go.
    fn regions(&self) -> [Option<Region>; 4] {
        let spec = &self.spec;
        let peer_asks = PerfSpec { role: other(spec.role), ..*spec }.requests();
        let region = |wanted: bool, area: Area, size: u32| {
            // In a sweep smaller messages walked over the whole page before.
            let exact = spec.size == spec.largest;
            let size = u64::from(size);
            let area = if exact { area } else { Area { stride: area.per_lane, slots: 1, ..area } };
            let size = if exact { size } else { size.max(CYCLE_BYTES).min(area.per_lane) };
            wanted.then_some(Region { area, size, lanes: spec.qps.into() })
        };
        let lands = spec.requests() && matches!(spec.op, PerfOp::Read | PerfOp::FetchAdd | PerfOp::CmpSwap);
        let counter = spec.requests() && spec.op == PerfOp::Write && spec.mode == PerfMode::Lat;
        let changed = peer_asks && (spec.op == PerfOp::Write || spec.op.is_atomic());
        [
            region(changed, self.layout.written, spec.size),
            region(spec.receives(), self.layout.receive, spec.recv_bytes()),
            region(lands, self.layout.landing, spec.size),
            region(counter, self.layout.outgoing, spec.size),
        ]
    }
}

fn other(role: Role) -> Role {
    match role {
        Role::Client => Role::Server,
        Role::Server => Role::Client,
    }
}

/// Slots that messages of `size` bytes go to.
#[derive(Clone, Copy)]
struct Region {
    area: Area,
    size: u64,
    lanes: u64,
}

/// Where a byte lies, and up to which one that holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Inside(u64),
    Outside(u64),
}

impl Place {
    /// Of two regions: inside if in one of them.
    fn join(self, other: Place) -> Place {
        match (self, other) {
            (Place::Inside(a), Place::Inside(b)) => Place::Inside(a.max(b)),
            (Place::Inside(a), _) | (_, Place::Inside(a)) => Place::Inside(a),
            (Place::Outside(a), Place::Outside(b)) => Place::Outside(a.min(b)),
        }
    }
}

impl Region {
    fn at(&self, at: u64) -> Place {
        let Area { base, per_lane, stride, slots } = self.area;
        let Some(from) = at.checked_sub(base) else { return Place::Outside(base) };
        let lane = from / per_lane;
        if lane >= self.lanes {
            return Place::Outside(u64::MAX);
        }
        let row = base + lane * per_lane;
        let slot = (at - row) / stride;
        let start = row + slot * stride;
        if slot < slots && at < start + self.size {
            return Place::Inside(start + self.size);
        }
        let next_row = if lane + 1 < self.lanes { row + per_lane } else { u64::MAX };
        Place::Outside(if slot + 1 < slots { start + stride } else { next_row })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_between_slots_and_rows_are_outside() {
        let area = Area { base: 100, per_lane: 1000, stride: 64, slots: 3 };
        let region = Region { area, size: 10, lanes: 2 };
        let mut at = 0;
        let mut inside = Vec::new();
        while at < 3000 {
            match region.at(at) {
                Place::Inside(until) => {
                    inside.push(at..until);
                    at = until;
                }
                Place::Outside(until) => at = until,
            }
        }
        let slots = [100, 164, 228, 1100, 1164, 1228].map(|start: u64| start..start + 10);
        assert_eq!(inside, slots);
    }

    #[test]
    fn each_result_is_new_once() {
        let spec = PerfSpec {
            check_data: true,
            iters: 100,
            qps: 3,
            ..PerfSpec::new(PerfOp::FetchAdd, PerfMode::Bw, Role::Client, 8)
        };
        let mut verify = Verify::of(&spec, &spec.layout());
        for result in (0..300).rev() {
            assert!(verify.see(result));
        }
        assert!((0..300).all(|result| !verify.see(result)));
    }
}

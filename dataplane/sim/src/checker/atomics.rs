//! Atomics: each was executed once, in order, and told what it found.
//!
//! Owns nothing: the steps that the results tell are in [`Checker`]. Called by [`super`].

use std::collections::{BTreeMap, VecDeque};

use super::{Bytes, Checker, OpKind, Operands, SendRecord, Violation, ViolationKind, broken};

/// An atomic as its result tells it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    flow: usize,
    number: u64,
    old: u64,
    new: u64,
}

impl Checker {
    /// The result is the only place where its value can be known: it is judged with all others of its cell at the end.
    pub(super) fn note_atomic(&mut self, bytes: &impl Bytes, index: usize, record: &SendRecord) {
        let flow = &self.flows[index];
        let (from, to, number) = (flow.from.endpoint, flow.to.endpoint, flow.done);
        let mut found = Vec::new();
        for (offset, len) in &record.local {
            let part = bytes.read(from, *offset, *len);
            self.shadow[from][*offset..offset + len].copy_from_slice(&part);
            found.extend(part);
        }
        let old = number_of(&found);
        let Operands { compare, value } = record.operands;
        let new = match record.kind {
            OpKind::FetchAdd => old.wrapping_add(value),
            _ if old == compare => value,
            _ => old,
        };
        self.cells.entry((to, record.remote)).or_default().push(Step { flow: index, number, old, new });
    }

    /// Each atomic was executed once, in the order of its queue, and told what it found: from the first value of a cell
    /// the results make one chain through all of them, which ends in the value that is there.
    pub(super) fn finish_cells(&mut self, bytes: &impl Bytes) -> Result<(), Violation> {
        for ((endpoint, offset), steps) in std::mem::take(&mut self.cells) {
            if self.spoilt.contains(&(endpoint, offset)) {
                continue;
            }
            let (first, count) = (number_of(&self.shadow[endpoint][offset..offset + 8]), steps.len());
            let mut by_old: BTreeMap<u64, VecDeque<Step>> = BTreeMap::new();
            // Those that changed nothing come before the one that went on from the same value.
            let (idle, moving): (Vec<_>, Vec<_>) = steps.into_iter().partition(|step| step.old == step.new);
            for step in idle.into_iter().chain(moving) {
                by_old.entry(step.old).or_default().push_back(step);
            }
            let mut value = first;
            let mut last: BTreeMap<usize, u64> = BTreeMap::new();
            for done in 0..count {
                let Some(step) = by_old.get_mut(&value).and_then(VecDeque::pop_front) else {
                    let what = format!(
                        "endpoint {endpoint}, cell {offset:#x}: no atomic found {value:#x}, after {done} of {count}"
                    );
                    return broken(ViolationKind::AtomicNotOnce, what);
                };
                if last.insert(step.flow, step.number).is_some_and(|before| before > step.number) {
                    let what = format!("endpoint {endpoint}, cell {offset:#x}: out of order: {step:?}");
                    return broken(ViolationKind::AtomicNotOnce, what);
                }
                value = step.new;
            }
            let real = bytes.read(endpoint, offset, 8);
            if number_of(&real) != value {
                let what = format!(
                    "endpoint {endpoint}, cell {offset:#x}: is {:#x}, after all {count} atomics it must be {value:#x}",
                    number_of(&real)
                );
                return broken(ViolationKind::AtomicNotOnce, what);
            }
            self.shadow[endpoint][offset..offset + 8].copy_from_slice(&real);
        }
        let spoilt = std::mem::take(&mut self.spoilt);
        self.unknown.extend(spoilt.into_iter().map(|(endpoint, offset)| (endpoint, (offset, 8))));
        Ok(())
    }
}

/// The number in a cell, in the byte order of this machine; 0 if there are not 8 bytes.
fn number_of(bytes: &[u8]) -> u64 {
    bytes.try_into().map_or(0, u64::from_ne_bytes)
}

//! Memory of a perf test: what it holds before the test, and how it is compared.

use std::ops::Range;
use std::sync::Arc;

use ferroce_mem::os::Block;

use super::lanes;
use super::layout::PerfLayout;
use super::spec::{PerfMode, PerfOp, PerfSpec, SpecError};
use crate::area::{self, chunks};
use crate::fault::Fault;
use crate::pattern;

/// Memory of a perf service, filled with what a peer may read and emptied where it may write.
#[derive(Clone)]
pub struct PerfMemory {
    block: Arc<Block>,
}

impl PerfMemory {
    /// Prepares the first [`PerfSpec::memory_bytes`] bytes of `block`. Call it before the peer learns the key.
    ///
    /// # Errors
    /// The specification is refused, or the block is too small.
    pub fn prepare(spec: &PerfSpec, block: Arc<Block>) -> Result<Self, SpecError> {
        let memory = PerfMemory { block };
        memory.fill_for(spec)?;
        Ok(memory)
    }

    /// Prepares the same memory for the next size of a sweep. Call it while neither side has a test running. perftest's
    /// layout stays as it is: its programs prepare their memory once.
    ///
    /// # Errors
    /// As [`PerfMemory::prepare`].
    pub fn refill(&self, spec: &PerfSpec) -> Result<(), SpecError> {
        if spec.layout == PerfLayout::Perftest {
            return self.check_size(spec);
        }
        self.fill_for(spec)
    }

    /// Refuses memory that is too small for `spec`.
    pub(super) fn check_size(&self, spec: &PerfSpec) -> Result<(), SpecError> {
        spec.check()?;
        let have = self.block.len() as u64;
        if have < spec.memory_bytes() {
            return Err(SpecError {
                attribute: "memory",
                asked: have,
                allowed: "PerfSpec::memory_bytes or more",
            });
        }
        Ok(())
    }

    fn fill_for(&self, spec: &PerfSpec) -> Result<(), SpecError> {
        self.check_size(spec)?;
        let have = self.block.len() as u64;
        let failed = SpecError { attribute: "memory", asked: have, allowed: "a block that can be written" };
        self.fill_layout(spec).map_err(|_| failed)
    }

    fn fill_layout(&self, spec: &PerfSpec) -> Result<(), Fault> {
        let layout = spec.layout();
        if spec.layout == PerfLayout::Perftest {
            let zero = spec.op == PerfOp::Write && spec.mode == PerfMode::Lat;
            if zero {
                return self.set(0, layout.bytes, 0);
            }
            return self.fill(0, layout.bytes, spec.own_seed(), 0);
        }
        for lane in 0..spec.qps as usize {
            for slot in 0..layout.outgoing.slots {
                let at = layout.outgoing.at(lane, slot);
                if spec.op.is_atomic() {
                    self.set(at, spec.size.into(), 0)?;
                } else {
                    self.fill(at, spec.size.into(), spec.own_seed(), lanes::wr_id(lane, slot))?;
                }
            }
            for slot in 0..layout.receive.slots {
                self.set(layout.receive.at(lane, slot), layout.receive.stride, 0)?;
            }
        }
        Ok(())
    }

    /// The block.
    #[must_use]
    pub fn block(&self) -> &Arc<Block> {
        &self.block
    }

    pub(super) fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Fault> {
        area::write(&self.block, at, bytes)
    }

    pub(super) fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        area::read(&self.block, at, bytes)
    }

    pub(super) fn byte(&self, at: u64) -> Result<u8, Fault> {
        area::byte(&self.block, at)
    }

    /// Writes `len` bytes of the pattern at `at`.
    pub(super) fn fill(&self, at: u64, len: u64, seed: u64, message: u64) -> Result<(), Fault> {
        let mut chunk = [0u8; pattern::CHUNK_BYTES];
        chunks(len, |offset, count| {
            let piece = &mut chunk[..count];
            pattern::fill(piece, seed, message, offset);
            self.write(at + offset, piece)
        })
    }

    /// Writes `len` equal bytes at `at`.
    pub(super) fn set(&self, at: u64, len: u64, value: u8) -> Result<(), Fault> {
        let chunk = [value; pattern::CHUNK_BYTES];
        chunks(len, |offset, count| self.write(at + offset, &chunk[..count]))
    }

    /// Compares `len` bytes at `at` with the pattern; `number` is the message's number for the fault.
    pub(super) fn check(&self, at: u64, len: u64, seed: u64, message: u64, number: u64) -> Result<(), Fault> {
        self.check_from(at, 0..len, seed, message, number)
    }

    /// As [`PerfMemory::check`], of a part of the message; `part` begins at a multiple of 8.
    pub(super) fn check_from(
        &self,
        at: u64,
        part: Range<u64>,
        seed: u64,
        message: u64,
        number: u64,
    ) -> Result<(), Fault> {
        let mut chunk = [0u8; pattern::CHUNK_BYTES];
        chunks(part.end.saturating_sub(part.start), |offset, count| {
            let (piece, offset) = (&mut chunk[..count], part.start + offset);
            self.read(at + offset, piece)?;
            pattern::check(piece, seed, message, offset).map_err(|m| Fault::Data {
                message: number,
                offset: m.offset,
                expected: m.expected,
                got: m.got,
            })
        })
    }

    /// As [`PerfMemory::check`], but a byte may also be 0: it was never written.
    pub(super) fn check_or_zero(
        &self,
        at: u64,
        len: u64,
        seed: u64,
        message: u64,
        number: u64,
    ) -> Result<(), Fault> {
        let (mut got, mut want) = ([0u8; pattern::CHUNK_BYTES], [0u8; pattern::CHUNK_BYTES]);
        chunks(len, |offset, count| {
            let (got, want) = (&mut got[..count], &mut want[..count]);
            self.read(at + offset, got)?;
            pattern::fill(want, seed, message, offset);
            match got.iter().zip(want.iter()).position(|(got, want)| got != want && *got != 0) {
                None => Ok(()),
                Some(index) => Err(Fault::Data {
                    message: number,
                    offset: offset + index as u64,
                    expected: want[index],
                    got: got[index],
                }),
            }
        })
    }

    /// Compares `len` bytes at `at` with what [`PerfMemory::prepare`] put there in perftest's layout: the pattern of
    /// `seed`, or zeros.
    pub(super) fn check_kept(&self, at: u64, len: u64, seed: Option<u64>) -> Result<(), Fault> {
        let (mut got, mut want) = ([0u8; pattern::CHUNK_BYTES], [0u8; pattern::CHUNK_BYTES]);
        // The pattern is made of words.
        let from = at & !7;
        chunks(at + len - from, |offset, count| {
            let (got, want) = (&mut got[..count], &mut want[..count]);
            self.read(from + offset, got)?;
            if let Some(seed) = seed {
                pattern::fill(want, seed, 0, from + offset);
            }
            let skip = at.saturating_sub(from + offset) as usize;
            match got.iter().zip(want.iter()).skip(skip).position(|(got, want)| got != want) {
                None => Ok(()),
                Some(index) => Err(Fault::Outside {
                    offset: from + offset + (skip + index) as u64,
                    expected: want[skip + index],
                    got: got[skip + index],
                }),
            }
        })
    }

    /// True if all of `len` bytes at `at` are 0: nothing was ever written there.
    pub(super) fn is_untouched(&self, at: u64, len: u64) -> Result<bool, Fault> {
        let mut chunk = [0u8; pattern::CHUNK_BYTES];
        let mut untouched = true;
        chunks(len, |offset, count| {
            let piece = &mut chunk[..count];
            self.read(at + offset, piece)?;
            untouched &= piece.iter().all(|&b| b == 0);
            Ok(())
        })?;
        Ok(untouched)
    }
}

//! Latency and bandwidth of SEND, WRITE and READ with perftest's meanings.
//!
//! | test | client | server |
//! |---|---|---|
//! | send latency | sends, waits for the answer | receives, answers |
//! | write latency | writes, watches the last byte of its own buffer | watches, writes back |
//! | read latency | reads, waits for the completion | passive |
//! | send bandwidth | keeps `tx_depth` sends outstanding | receives and posts again |
//! | write, read bandwidth | keeps `tx_depth` requests outstanding | passive |
//!
//! Every test ends with exactly `warmup + iters` messages, of which the last `iters` are measured; with a duration it
//! ends when the time is over and all that was posted is complete. A passive server, and any server of a test with a
//! duration, ends by [`crate::Handle::stop`]. Round trips are reported whole: perftest prints the half of them for send
//! and write.
//!
//! The order of a set-up: [`PerfMemory::prepare`] on both sides, then exchange addresses and keys, then connect, then
//! [`PerfService::new`]. A peer may write into prepared memory before the service exists, never before the
//! preparation.

mod report;
mod service;
mod spec;

use std::sync::Arc;

use ferroce_mem::Lkey;
use ferroce_mem::os::Block;
use ferroce_verbs::{CqId, Qpn, RemoteAddr, Rkey};

pub use report::{PerfReport, PerfTotals};
pub use service::PerfService;
pub use spec::{PerfMode, PerfOp, PerfSpec, Role, SpecError};

use crate::area::{self, chunks};
use crate::fault::Fault;
use crate::pattern;

/// Watches a [`PerfService`].
pub type PerfHandle = crate::Handle<PerfReport>;
/// State of a [`PerfService`].
pub type PerfState<'h> = crate::State<'h, PerfReport>;
/// Why a [`PerfService`] failed.
pub type PerfError = crate::ServiceError;

/// What a perf service is connected to. Both sides are given the same [`PerfSpec`] but for the role.
pub struct PerfEndpoints {
    /// The local queue pair, in RTS.
    pub qpn: Qpn,
    /// Where its sends complete: at least [`PerfSpec::send_queue_depth`] entries.
    pub send_cq: CqId,
    /// Where its receives complete: at least [`PerfSpec::recv_queue_depth`] entries (the sum if both are one queue).
    pub recv_cq: CqId,
    /// Prepared memory.
    pub local: PerfMemory,
    /// Local key of all of it, with LOCAL_WRITE.
    pub local_lkey: Lkey,
    /// Its first byte in the region's address space.
    pub local_iova: u64,
    /// First byte of the peer's prepared memory, in its region's address space. Unused for SEND.
    pub remote_addr: RemoteAddr,
    /// The peer's key of it. Unused for SEND.
    pub remote_rkey: Rkey,
}

/// Memory of a perf service, filled with what a peer may read and emptied where it may write.
pub struct PerfMemory {
    block: Arc<Block>,
}

impl PerfMemory {
    /// Prepares the first [`PerfSpec::memory_bytes`] bytes of `block`. Call it before the peer learns the key.
    ///
    /// # Errors
    /// The specification is refused, or the block is too small.
    pub fn prepare(spec: &PerfSpec, block: Arc<Block>) -> Result<Self, SpecError> {
        spec.check()?;
        let have = block.len() as u64;
        if have < spec.memory_bytes() {
            return Err(SpecError {
                attribute: "memory",
                asked: have,
                allowed: "PerfSpec::memory_bytes or more",
            });
        }
        let memory = PerfMemory { block };
        let layout = spec.layout();
        let clear = SpecError { attribute: "memory", asked: have, allowed: "a block that can be written" };
        for slot in 0..layout.send_slots {
            let at = layout.send_offset(slot);
            memory.fill(at, spec.size.into(), spec.own_seed(), slot).map_err(|_| clear)?;
        }
        for slot in 0..layout.recv_slots {
            memory.set(layout.recv_offset(slot), layout.stride, 0).map_err(|_| clear)?;
        }
        Ok(memory)
    }

    /// The block.
    #[must_use]
    pub fn block(&self) -> &Arc<Block> {
        &self.block
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Fault> {
        area::write(&self.block, at, bytes)
    }

    fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), Fault> {
        area::read(&self.block, at, bytes)
    }

    fn byte(&self, at: u64) -> Result<u8, Fault> {
        area::byte(&self.block, at)
    }

    /// Writes `len` bytes of the pattern at `at`.
    fn fill(&self, at: u64, len: u64, seed: u64, message: u64) -> Result<(), Fault> {
        let mut chunk = [0u8; pattern::CHUNK_BYTES];
        chunks(len, |offset, count| {
            let piece = &mut chunk[..count];
            pattern::fill(piece, seed, message, offset);
            self.write(at + offset, piece)
        })
    }

    /// Writes `len` equal bytes at `at`.
    fn set(&self, at: u64, len: u64, value: u8) -> Result<(), Fault> {
        let chunk = [value; pattern::CHUNK_BYTES];
        chunks(len, |offset, count| self.write(at + offset, &chunk[..count]))
    }

    /// Compares `len` bytes at `at` with the pattern; `number` is the message's number for the fault.
    fn check(&self, at: u64, len: u64, seed: u64, message: u64, number: u64) -> Result<(), Fault> {
        let mut chunk = [0u8; pattern::CHUNK_BYTES];
        chunks(len, |offset, count| {
            let piece = &mut chunk[..count];
            self.read(at + offset, piece)?;
            pattern::check(piece, seed, message, offset).map_err(|m| Fault::Data {
                message: number,
                offset: m.offset,
                expected: m.expected,
                got: m.got,
            })
        })
    }

    /// True if all of `len` bytes at `at` are 0: nothing was ever written there.
    fn is_untouched(&self, at: u64, len: u64) -> Result<bool, Fault> {
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

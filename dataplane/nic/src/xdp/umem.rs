//! UMEM: the memory that one AF_XDP socket and the kernel pass back and forth, in chunks of one page.
//!
//! Invariant: a [`Chunk`] is the right to the bytes of one chunk. It is made once per chunk at the start and again
//! only when the kernel hands the chunk back through a ring (`ring.rs`); pushing it into a ring gives the right away.
//! So a slice of a chunk never aliases what the kernel writes. The block is registered with nobody else: no peer can
//! write it. Called by the queue; never makes a system call.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use ferroce_mem::copy::Target;
use ferroce_mem::os::Block;

/// Bytes of a chunk: a page, which every kernel and driver takes.
pub(super) const CHUNK_BYTES: u32 = 4096;

/// Bytes that the kernel keeps free before a received frame (`XDP_PACKET_HEADROOM`).
pub(super) const KERNEL_HEADROOM: u32 = 256;

/// Longest frame that a chunk can receive.
pub(super) const FRAME_BYTES: u32 = CHUNK_BYTES - KERNEL_HEADROOM;

/// The right to the bytes of one chunk of one [`Umem`].
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// Offset of the chunk's first byte in the UMEM.
    start: u64,
}

impl Chunk {
    /// The right to the chunk that `address` lies in.
    ///
    /// # Safety
    /// The kernel just handed `address` back through a ring of the UMEM it belongs to, so nobody else holds the right.
    pub unsafe fn from_kernel(address: u64) -> Self {
        Chunk { start: address - address % u64::from(CHUNK_BYTES) }
    }

    /// Its address, for a ring of the same UMEM.
    pub fn into_address(self) -> u64 {
        self.start
    }
}

/// The memory of one socket.
pub(super) struct Umem {
    block: ManuallyDrop<Block>,
    chunks: u32,
    /// Set when a driver fills the memory itself: it may go on for a while after the socket was closed.
    zero_copy: AtomicBool,
}

impl Umem {
    /// Bytes needed for `chunks` chunks.
    pub fn bytes_for(chunks: u32) -> usize {
        chunks as usize * CHUNK_BYTES as usize
    }

    /// Takes over a block, aligned to [`CHUNK_BYTES`], and makes the right to each of its chunks.
    pub fn new(block: Block) -> (Self, Vec<Chunk>) {
        assert!(
            block.base().addr().get().is_multiple_of(CHUNK_BYTES as usize),
            "a UMEM is aligned to its chunks"
        );
        let chunks = u32::try_from(block.len() / CHUNK_BYTES as usize).unwrap_or(u32::MAX);
        let rights =
            (0..chunks).rev().map(|i| Chunk { start: u64::from(i) * u64::from(CHUNK_BYTES) }).collect();
        (Umem { block: ManuallyDrop::new(block), chunks, zero_copy: AtomicBool::new(false) }, rights)
    }

    /// Bytes in all.
    pub fn len(&self) -> u64 {
        u64::from(self.chunks) * u64::from(CHUNK_BYTES)
    }

    /// Address of the first byte, for the registration.
    pub fn address(&self) -> u64 {
        self.block.base().as_ptr().expose_provenance() as u64
    }

    /// Notes that a driver uses the memory without copying.
    pub fn set_zero_copy(&self) {
        self.zero_copy.store(true, Ordering::Relaxed);
    }

    /// The `len` bytes at offset `offset` of a chunk; `None` if they are not all inside it.
    pub fn bytes<'c>(&'c self, chunk: &'c Chunk, offset: u32, len: u32) -> Option<&'c [u8]> {
        let base = self.at(chunk, offset, len)?;
        // SAFETY: the bytes are inside the block, which lives as long as `self`. `chunk` is the right to them: the
        // kernel gave it back and writes no more, and nobody else holds it while it is borrowed.
        Some(unsafe { std::slice::from_raw_parts(base.as_ptr(), len as usize) })
    }

    /// Room for `len` bytes at the start of a chunk; `None` if it is too small.
    pub fn target<'c>(&'c self, chunk: &'c mut Chunk, len: u32) -> Option<Target<'c>> {
        let base = self.at(chunk, 0, len)?;
        // SAFETY: the bytes are inside the block, which lives as long as `self`; `chunk` is the right to them and is
        // borrowed mutably, so no slice of it exists.
        Some(unsafe { Target::from_raw(base, len as usize) })
    }

    fn at(&self, chunk: &Chunk, offset: u32, len: u32) -> Option<NonNull<u8>> {
        let inside = offset.checked_add(len)? <= CHUNK_BYTES && chunk.start < self.len();
        if !inside {
            return None;
        }
        let offset = usize::try_from(chunk.start + u64::from(offset)).ok()?;
        // SAFETY: `chunk.start + offset + len <= self.len()`, as chunks are whole, which is at most the block's length.
        Some(unsafe { self.block.base().add(offset) })
    }
}

impl Drop for Umem {
    fn drop(&mut self) {
        // In copy mode the kernel is done with the memory when close() returns. A driver that works without copies is
        // stopped later, from a work queue: its memory is never given to anyone else.
        if !self.zero_copy.load(Ordering::Relaxed) {
            // SAFETY: dropped once, here; `block` is not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.block) };
        }
    }
}

//! UMEM: the memory that one AF_XDP socket and the kernel pass back and forth, in chunks of one page.
//!
//! Frames to send lie in slots, at the start of the block: as many adjacent chunks as the longest frame needs, so that
//! a frame is written in one piece and sent as one descriptor per chunk. The chunks after them receive, one by one.
//! Invariant: a [`Chunk`] is the right to the bytes of one chunk, a [`Slot`] to those of one slot. Each is made once at
//! the start and again only when the kernel hands all of it back through a ring (`ring.rs`); pushing it into a ring
//! gives the right away. So a slice of a chunk never aliases what the kernel writes. The block is registered with
//! nobody else: no peer can write it. Called by the queue; never makes a system call.
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

/// Bytes of a frame that a chunk can receive.
pub(super) const FRAME_BYTES: u32 = CHUNK_BYTES - KERNEL_HEADROOM;

/// Most chunks of one frame: a received frame is a head and at most three pieces.
pub(super) const MAX_PARTS: u32 = 3;

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

/// The right to the bytes of one slot of one [`Umem`].
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Slot {
    index: u32,
}

impl Slot {
    /// The right to slot `index`.
    ///
    /// # Safety
    /// The kernel has handed back every chunk of it that it was given, so nobody else holds the right.
    pub unsafe fn from_kernel(index: u32) -> Self {
        Slot { index }
    }

    /// Its number, counted from the start of the memory.
    pub fn into_index(self) -> u32 {
        self.index
    }
}

/// How a socket's memory is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Division {
    /// Chunks to receive into.
    pub receive: u32,
    /// Slots to send from.
    pub slots: u32,
    /// Chunks of a slot, 1 ..= [`MAX_PARTS`].
    pub slot_chunks: u32,
}

impl Division {
    /// Bytes of a slot.
    pub const fn slot_bytes(&self) -> u32 {
        self.slot_chunks * CHUNK_BYTES
    }

    /// Chunks in all.
    const fn chunks(&self) -> u32 {
        self.receive.saturating_add(self.slots.saturating_mul(self.slot_chunks))
    }

    /// Bytes in all.
    pub const fn bytes(&self) -> usize {
        self.chunks() as usize * CHUNK_BYTES as usize
    }
}

/// The memory of one socket.
pub(super) struct Umem {
    block: ManuallyDrop<Block>,
    division: Division,
    /// Set when a driver fills the memory itself: it may go on for a while after the socket was closed.
    zero_copy: AtomicBool,
}

impl Umem {
    /// Takes over a block of [`Division::bytes`] bytes, aligned to [`CHUNK_BYTES`], and makes the right to each of its
    /// chunks and slots.
    pub fn new(block: Block, division: Division) -> (Self, Vec<Chunk>, Vec<Slot>) {
        assert!(
            block.base().addr().get().is_multiple_of(CHUNK_BYTES as usize) && block.len() >= division.bytes(),
            "a UMEM is aligned to its chunks and holds them all"
        );
        let first = division.slots * division.slot_chunks;
        let chunk = |i: u32| Chunk { start: u64::from(i) * u64::from(CHUNK_BYTES) };
        let chunks = (first..division.chunks()).rev().map(chunk).collect();
        let slots = (0..division.slots).rev().map(|index| Slot { index }).collect();
        (Umem { block: ManuallyDrop::new(block), division, zero_copy: AtomicBool::new(false) }, chunks, slots)
    }

    /// Bytes in all.
    pub fn len(&self) -> u64 {
        self.division.bytes() as u64
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
        if offset.checked_add(len)? > CHUNK_BYTES {
            return None;
        }
        let base = self.at(chunk.start + u64::from(offset), len)?;
        // SAFETY: the bytes are inside the block, which lives as long as `self`. `chunk` is the right to them: the
        // kernel gave it back and writes no more, and nobody else holds it while it is borrowed.
        Some(unsafe { std::slice::from_raw_parts(base.as_ptr(), len as usize) })
    }

    /// Bytes of a slot.
    pub fn slot_bytes(&self) -> u32 {
        self.division.slot_bytes()
    }

    /// Room for `len` bytes at the start of a slot; `None` if it is too small.
    pub fn target<'c>(&'c self, slot: &'c mut Slot, len: u32) -> Option<Target<'c>> {
        if len > self.slot_bytes() {
            return None;
        }
        let base = self.at(u64::from(slot.index) * u64::from(self.slot_bytes()), len)?;
        // SAFETY: the bytes are inside the block, which lives as long as `self`; `slot` is the right to them and is
        // borrowed mutably, so no slice of it exists.
        Some(unsafe { Target::from_raw(base, len as usize) })
    }

    fn at(&self, offset: u64, len: u32) -> Option<NonNull<u8>> {
        if offset.checked_add(u64::from(len))? > self.len() {
            return None;
        }
        let offset = usize::try_from(offset).ok()?;
        // SAFETY: `offset + len <= self.len()`, which is at most the block's length.
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

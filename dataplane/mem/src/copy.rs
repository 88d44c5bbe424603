//! Copy, CRC and atomics on memory that a peer may write at the same time.
#![allow(unsafe_code)]

use core::marker::PhantomData;
use core::ptr::NonNull;

/// A write-only target of `len` bytes that may be shared with a peer: the buffer of a frame to send.
#[derive(Debug)]
pub struct Target<'t> {
    pub(crate) base: NonNull<u8>,
    pub(crate) len: usize,
    pub(crate) buffer: PhantomData<&'t mut u8>,
}

impl Target<'_> {
    /// Bytes of room.
    pub const fn len(&self) -> usize {
        self.len
    }
    /// True when there is no room.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
    // Owner of this crate:
    //   unsafe from_raw(NonNull<u8>, len) -> Target<'t>;  from_slice(&'t mut [u8]) -> Target<'t>
    //   write(&mut self, offset, &[u8]) -> bool
    //   write_crc(&mut self, offset, &[u8], crc: u32) -> u32
    //   write_slice_crc(&mut self, offset, MrSlice<'_>, crc: u32) -> u32     copies from registered memory and CRCs what
    //                                                                        was really written, in one pass over it
}

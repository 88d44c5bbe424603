//! [`MrSlice`]: proof that a key check passed.

use core::marker::PhantomData;
use core::ptr::NonNull;

/// Bytes of registered memory that the holder may use as the check allowed. Lives as long as the borrow of
/// [`crate::Memory`] that made it. Others may read and write the same bytes at any time.
#[derive(Clone, Copy, Debug)]
pub struct MrSlice<'m> {
    pub(crate) base: NonNull<u8>,
    pub(crate) len: usize,
    pub(crate) memory: PhantomData<&'m crate::Memory>,
}

impl<'m> MrSlice<'m> {
    /// No bytes at all: what a zero-length operation gets without any key check (C9-88).
    pub const EMPTY: MrSlice<'static> = MrSlice { base: NonNull::dangling(), len: 0, memory: PhantomData };

    /// Bytes.
    pub const fn len(&self) -> usize {
        self.len
    }
    /// True when there are no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
    // Owner of this crate: subslice(offset, len) -> Option<MrSlice<'m>>, and in copy.rs:
    //   copy_out(&self, dst: &mut [u8])            dst.len() <= len
    //   copy_in(&self, src: &[u8])
    //   place(&self, offset, payload: &Payload<'_>) -> bool
    //   fetch_add_u64 / cmp_swap_u64 (8-byte aligned)
    //   copy_crc_to(&self, dst: RawTarget, crc: u32) -> u32
}

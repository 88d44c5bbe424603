//! [`MrSlice`]: proof that a key check passed.
//!
//! Invariant: `base .. base + len` lies in a region that is registered for as long as `'m`. Made by
//! [`crate::Memory`] only; read and written by the primitives in [`crate::copy`]. Never becomes a reference.
#![allow(unsafe_code)]

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
    #[inline]
    pub const fn len(&self) -> usize {
        self.len
    }
    /// True when there are no bytes.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// `len` bytes from `offset` on; `None` if they are not all inside.
    #[inline]
    pub fn subslice(&self, offset: usize, len: usize) -> Option<MrSlice<'m>> {
        let room = self.len.checked_sub(offset)?;
        if len > room {
            return None;
        }
        // SAFETY: `offset <= self.len`, and the slice is mapped throughout (module invariant).
        let base = unsafe { self.base.add(offset) };
        Some(MrSlice { base, len, memory: PhantomData })
    }
}

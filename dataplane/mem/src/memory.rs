//! [`Memory`]: a worker's copy of the key table.
//!
//! Lent as `&` on the data path; registering and deregistering need `&mut`, so no key can vanish between check and
//! copy. Keys and indices are a keyed permutation: random to the outside, O(1) inside.

use core::ptr::NonNull;

use ferroce_wire::{DmaLen, RemoteAddr, Rkey};

use crate::key::{Access, KeyFault, Lkey, PdId};
use crate::slice::MrSlice;

/// What a region is registered with. The mapping must outlive the registration; with feature `os` that is
/// guaranteed by `os::Block`, which holds its region.
#[derive(Debug, Clone)]
pub struct MrInit {
    /// Protection domain.
    pub pd: PdId,
    /// Rights.
    pub access: Access,
    /// First byte in the region's own address space.
    pub iova: u64,
    /// Where it is mapped here.
    pub base: NonNull<u8>,
    /// Bytes.
    pub len: u64,
}

/// What is known of a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MrInfo {
    /// Local key.
    pub lkey: Lkey,
    /// Remote key.
    pub rkey: Rkey,
    /// Protection domain.
    pub pd: PdId,
    /// Rights.
    pub access: Access,
    /// First byte.
    pub iova: u64,
    /// Bytes.
    pub len: u64,
}

/// Why a registration was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegisterError {
    /// The table has no free entry.
    Full,
    /// `iova + len` wraps, or the length is 0.
    BadRange,
    /// REMOTE_WRITE or REMOTE_ATOMIC without LOCAL_WRITE (libibverbs' rule).
    BadAccess,
}

/// A worker's copy of the key table.
pub struct Memory {
    // Owner of this crate: entries, free list, permutation secret.
    _todo: (),
}

impl Memory {
    /// A table for at most `capacity` regions; `secret` keys the permutation (the same on all workers of a device).
    pub fn new(capacity: u32, secret: u64) -> Self {
        let _ = (capacity, secret);
        Memory { _todo: () }
    }
    /// Registers a region. All workers of a device are given the same calls in the same order, hence agree on keys.
    ///
    /// # Safety
    /// `init.base .. + len` stays mapped, readable and writable until the region is deregistered.
    #[allow(unsafe_code)]
    pub unsafe fn register(&mut self, init: MrInit) -> Result<MrInfo, RegisterError> {
        let _ = init;
        Err(RegisterError::Full)
    }
    /// Ends a registration.
    pub fn deregister(&mut self, lkey: Lkey) -> Result<MrInfo, KeyFault> {
        let _ = lkey;
        Err(KeyFault::Unknown)
    }
    /// Local check: `len` bytes at `addr` under `lkey`.
    pub fn check_local(&self, pd: PdId, lkey: Lkey, addr: u64, len: u32, want: Access) -> Result<MrSlice<'_>, KeyFault> {
        let _ = (pd, lkey, addr, len, want);
        Err(KeyFault::Unknown)
    }
    /// Remote check. A length of 0 passes without looking at key or address (C9-88).
    pub fn check_remote(&self, pd: PdId, rkey: Rkey, addr: RemoteAddr, len: DmaLen, want: Access) -> Result<MrSlice<'_>, KeyFault> {
        let _ = (pd, rkey, addr, len, want);
        Err(KeyFault::Unknown)
    }
}

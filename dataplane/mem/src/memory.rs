//! [`Memory`]: a worker's copy of the key table.
//!
//! Lent as `&` on the data path; registering and deregistering need `&mut`, so no key can vanish between check and
//! copy. Keys are a keyed permutation of generation and slot: random to the outside, O(1) inside.
//! Invariant: a live entry's `base .. base + len` is mapped (the promise of who registered it), `len > 0`, and its
//! keys unscramble to its own slot. Called by the engine (changes) and the transport (checks). Never touches the
//! memory itself.
#![allow(unsafe_code)]

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::cell::Cell;
use core::fmt;
use core::ptr::NonNull;

use ferroce_wire::{DmaLen, Qpn, RemoteAddr, Rkey};

use crate::key::{Access, KeyFault, Lkey, PdId, Permutation};
use crate::slice::MrSlice;
use crate::window::Windows;

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

// SAFETY: `base` is only an address here; nothing is read or written through an `MrInit`. Whoever registers it vouches
// for the mapping (`Memory::register` is unsafe), on whatever thread that is.
unsafe impl Send for MrInit {}

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
    /// [`Memory::replicate`]: the keys were not made by a table of this secret and capacity, or name a slot that is
    /// in use here.
    BadKey,
}

impl fmt::Display for RegisterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RegisterError::Full => "all region entries are in use",
            RegisterError::BadRange => "the length is 0 or address + length passes 2^64",
            RegisterError::BadAccess => "remote write and remote atomic need local write",
            RegisterError::BadKey => "the keys belong to another table or to a slot in use",
        })
    }
}

impl core::error::Error for RegisterError {}

/// Why a deregistration was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DeregisterError {
    /// There is no such key.
    Unknown,
    /// The region is in use: windows are bound to it, or posted work names it.
    Busy {
        /// Windows bound to it.
        windows: u32,
        /// Scatter/gather entries of posted work that name it.
        posted: u32,
    },
}

impl fmt::Display for DeregisterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeregisterError::Unknown => f.write_str("there is no region of this key"),
            DeregisterError::Busy { windows, posted } => write!(
                f,
                "the region is in use by {windows} windows and {posted} entries of posted work; invalidate those and \
                 wait for these, or move the queue pair to error"
            ),
        }
    }
}

impl core::error::Error for DeregisterError {}

/// One slot; a cache line, since a check reads most of it.
#[derive(Clone)]
#[repr(align(64))]
pub(crate) struct Entry {
    /// 0 when free.
    lkey: u32,
    /// 0 when free.
    rkey: u32,
    pd: PdId,
    access: Access,
    iova: u64,
    len: u64,
    base: NonNull<u8>,
    /// Of the next registration while free.
    generation: u32,
    /// The slot stands in the free list.
    queued: bool,
    /// About to be deregistered: takes no new windows and no new work.
    closing: bool,
    /// Entries of posted work that name it.
    posted: Cell<u32>,
    /// Windows bound to it.
    pub(crate) windows: Cell<u32>,
}

const _: () = assert!(size_of::<Entry>() == 64);

impl Entry {
    const fn free(generation: u32) -> Entry {
        Entry {
            lkey: 0,
            rkey: 0,
            pd: PdId(0),
            access: Access::empty(),
            iova: 0,
            len: 0,
            base: NonNull::dangling(),
            generation,
            queued: true,
            closing: false,
            posted: Cell::new(0),
            windows: Cell::new(0),
        }
    }

    pub(crate) const fn info(&self) -> MrInfo {
        MrInfo {
            lkey: Lkey(self.lkey),
            rkey: Rkey(self.rkey),
            pd: self.pd,
            access: self.access,
            iova: self.iova,
            len: self.len,
        }
    }

    /// The check after the key was found. Rights before bounds, as soft-RoCE does it.
    #[inline]
    pub(crate) fn check(&self, pd: PdId, addr: u64, len: u64, want: Access) -> Result<MrSlice<'_>, KeyFault> {
        if self.pd != pd {
            return Err(KeyFault::WrongPd);
        }
        if !self.access.contains(want) {
            return Err(KeyFault::Rights);
        }
        let offset = addr.checked_sub(self.iova).ok_or(KeyFault::OutOfBounds)?;
        let room = self.len.checked_sub(offset).ok_or(KeyFault::OutOfBounds)?;
        if len > room {
            return Err(KeyFault::OutOfBounds);
        }
        // SAFETY: `offset <= self.len` and the whole region is mapped, as `register` was promised.
        let base = unsafe { self.base.add(offset as usize) };
        Ok(MrSlice { base, len: len as usize, memory: core::marker::PhantomData })
    }
}

/// A worker's copy of the key table.
///
/// How the copies of a device agree on keys: either each table is given the same calls of [`Memory::register`] and
/// [`Memory::deregister`] in the same order (with one secret and capacity), or, more robust, one table of the device
/// chooses the keys by `register` and the workers' tables take them over by [`Memory::replicate`], in any order.
pub struct Memory {
    entries: Vec<Entry>,
    /// Slots that can be used again, longest free first, so that a key comes back as late as possible. May hold slots
    /// that `replicate` took meanwhile; they are skipped.
    free: VecDeque<u32>,
    live: u32,
    slot_bits: u32,
    lkeys: Permutation,
    rkeys: Permutation,
    pub(crate) windows: Windows,
}

// SAFETY: the addresses inside may be used from any thread: `register` was promised that they stay mapped, whoever
// holds the table, and all access goes through raw copies that allow for others' writes.
unsafe impl Send for Memory {}

impl Memory {
    /// A table for at most `capacity` regions (1 ..= 2^24, else clamped) and as many windows, but at most 65,536;
    /// `secret` keys the permutation (the same on all workers of a device).
    pub fn new(capacity: u32, secret: u64) -> Self {
        Memory::with_windows(capacity, capacity.min(1 << 16), secret)
    }

    /// The same with a number of windows of its own (0 ..= 2^20, else clamped). A slot of the window table gives
    /// `2^24 / windows` keys before one comes back, hence fewer windows mean longer-lived keys.
    pub fn with_windows(capacity: u32, windows: u32, secret: u64) -> Self {
        let capacity = capacity.clamp(1, 1 << 24);
        Memory {
            entries: alloc::vec![Entry::free(0); capacity as usize],
            free: (0..capacity).collect(),
            live: 0,
            slot_bits: capacity.next_power_of_two().trailing_zeros(),
            lkeys: Permutation::new(secret, 1),
            rkeys: Permutation::new(secret, 2),
            windows: Windows::new(windows, secret),
        }
    }
    /// Most regions it can hold.
    pub fn capacity(&self) -> u32 {
        self.entries.len() as u32
    }
    /// Regions it holds.
    pub const fn len(&self) -> u32 {
        self.live
    }
    /// True when it holds none.
    pub const fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// Registers a region and chooses its keys. Keys are never 0; a slot used again gets others.
    ///
    /// # Safety
    /// `init.base .. + len` stays mapped, readable and writable until the region is deregistered.
    ///
    /// # Errors
    /// [`RegisterError`]; nothing is changed then.
    pub unsafe fn register(&mut self, init: MrInit) -> Result<MrInfo, RegisterError> {
        check_init(init.access, init.iova, init.len)?;
        let slot = loop {
            let slot = self.free.pop_front().ok_or(RegisterError::Full)?;
            let Some(entry) = self.entries.get_mut(slot as usize) else { continue };
            entry.queued = false;
            if entry.lkey == 0 {
                break slot;
            }
        };
        let mut generation = self.entries[slot as usize].generation;
        let (lkey, rkey) = loop {
            let keys = self.keys(slot, generation);
            if keys.0 != 0 && keys.1 != 0 && !self.windows.covers(Rkey(keys.1)) {
                break keys;
            }
            // Key 0 means "no key" to some programs, and a window's keys are the window's: such generations are
            // skipped.
            generation = generation.wrapping_add(1);
        };
        Ok(self.fill(slot, generation, (lkey, rkey), init))
    }

    /// Registers a region under the keys that another table of the same secret and capacity gave it (`info`), here
    /// mapped at `base`.
    ///
    /// # Safety
    /// As for [`Memory::register`]: `base .. + info.len` stays mapped until the region is deregistered.
    ///
    /// # Errors
    /// [`RegisterError::BadKey`] if the keys are not such keys or their slot is in use; nothing is changed then.
    pub unsafe fn replicate(&mut self, info: &MrInfo, base: NonNull<u8>) -> Result<(), RegisterError> {
        check_init(info.access, info.iova, info.len)?;
        let plain = self.lkeys.unscramble(info.lkey.0);
        let (slot, generation) = (plain & self.slot_mask(), self.generation_of(plain));
        let keys = (info.lkey.0, info.rkey.0);
        let free = self.entries.get(slot as usize).is_some_and(|entry| entry.lkey == 0);
        let nobodys = keys.0 != 0 && keys.1 != 0 && !self.windows.covers(info.rkey);
        if !free || !nobodys || self.keys(slot, generation) != keys {
            return Err(RegisterError::BadKey);
        }
        let init = MrInit { pd: info.pd, access: info.access, iova: info.iova, base, len: info.len };
        self.fill(slot, generation, keys, init);
        Ok(())
    }

    /// Ends a registration: both keys are unknown from now on.
    ///
    /// # Errors
    /// [`DeregisterError::Busy`] while windows are bound to the region or posted work names it ([`Memory::hold`]);
    /// nothing is changed then.
    pub fn deregister(&mut self, lkey: Lkey) -> Result<MrInfo, DeregisterError> {
        self.idle(lkey)?;
        self.revoke(lkey).map_err(|_| DeregisterError::Unknown)
    }

    /// First half of a deregistration on several tables: the region takes no new windows and no new work from now on,
    /// while its keys go on working. When every table has agreed, [`Memory::deregister`] cannot be refused any more;
    /// when one is busy, [`Memory::reopen`] takes the others back.
    ///
    /// # Errors
    /// As [`Memory::deregister`]; nothing is changed then.
    pub fn close(&mut self, lkey: Lkey) -> Result<(), DeregisterError> {
        let slot = self.idle(lkey)?;
        self.entries[slot].closing = true;
        Ok(())
    }

    /// Undoes [`Memory::close`]. Does nothing to a region that is not closing, or to no region.
    pub fn reopen(&mut self, lkey: Lkey) {
        if let Some(slot) = self.slot_of(lkey) {
            self.entries[slot].closing = false;
        }
    }

    /// Ends a registration although it may be in use: for a region whose owner is gone. Windows bound to it die with
    /// it, and posted work that names it fails when its turn comes.
    ///
    /// # Errors
    /// [`KeyFault::Unknown`] if there is no such key.
    pub fn revoke(&mut self, lkey: Lkey) -> Result<MrInfo, KeyFault> {
        let slot = self.slot_of(lkey).ok_or(KeyFault::Unknown)?;
        let entry = &mut self.entries[slot];
        let (info, queued) = (entry.info(), entry.queued);
        *entry = Entry::free(entry.generation.wrapping_add(1));
        if !queued {
            self.free.push_back(slot as u32);
        }
        self.live -= 1;
        Ok(info)
    }

    /// Counts one entry of posted work that names a region, so that deregistering says busy. The transport calls it for
    /// each entry that it accepts at a post (not for inline data, whose keys are not used), and [`Memory::release`] for
    /// each when the work request retires, completes in error, is flushed or is discarded by RESET or destruction. A
    /// queue pair that moves to another worker is released in the old table and held in the new one.
    ///
    /// A count per region was chosen over asking the queue pairs at deregistration, since that would scan every queue
    /// of the worker within one pass.
    ///
    /// False, and nothing is counted, if the key is unknown or the region is about to go: the post must be refused.
    #[inline]
    #[must_use]
    pub fn hold(&self, lkey: Lkey) -> bool {
        match self.region(lkey) {
            Some(entry) if !entry.closing => {
                entry.posted.set(entry.posted.get().saturating_add(1));
                true
            }
            _ => false,
        }
    }

    /// Undoes one [`Memory::hold`]. Does nothing if the region was revoked meanwhile.
    #[inline]
    pub fn release(&self, lkey: Lkey) {
        if let Some(entry) = self.region(lkey) {
            debug_assert!(entry.posted.get() > 0, "{lkey:?} released more often than held");
            entry.posted.set(entry.posted.get().saturating_sub(1));
        }
    }

    /// Local check: `len` bytes at `addr` under `lkey`. A length of 0 passes without looking at key or address, as
    /// scatter elements of length 0 do in libibverbs.
    ///
    /// # Errors
    /// [`KeyFault`], the first that applies of: unknown key, protection domain, rights, bounds.
    #[inline]
    pub fn check_local(
        &self,
        pd: PdId,
        lkey: Lkey,
        addr: u64,
        len: u32,
        want: Access,
    ) -> Result<MrSlice<'_>, KeyFault> {
        if len == 0 {
            return Ok(MrSlice::EMPTY);
        }
        self.region(lkey).ok_or(KeyFault::Unknown)?.check(pd, addr, u64::from(len), want)
    }

    /// Remote check, of keys of regions and of windows bound by the queue pair `qpn` that was asked. A length of 0
    /// passes without looking at key or address (C9-88).
    ///
    /// # Errors
    /// [`KeyFault`], the first that applies of: unknown key, queue pair, protection domain, rights, bounds.
    #[inline]
    pub fn check_remote_for(
        &self,
        qpn: Qpn,
        pd: PdId,
        rkey: Rkey,
        addr: RemoteAddr,
        len: DmaLen,
        want: Access,
    ) -> Result<MrSlice<'_>, KeyFault> {
        match self.check_remote(pd, rkey, addr, len, want) {
            // No key is both a region's and a window's.
            Err(KeyFault::Unknown) => self.check_window(qpn, pd, rkey, addr, len, want),
            other => other,
        }
    }

    /// Remote check of a region's key: a window's is unknown here. A length of 0 passes without looking at key or address (C9-88).
    ///
    /// # Errors
    /// [`KeyFault`], the first that applies of: unknown key, protection domain, rights, bounds.
    #[inline]
    pub fn check_remote(
        &self,
        pd: PdId,
        rkey: Rkey,
        addr: RemoteAddr,
        len: DmaLen,
        want: Access,
    ) -> Result<MrSlice<'_>, KeyFault> {
        if len.0 == 0 {
            return Ok(MrSlice::EMPTY);
        }
        match self.entry(&self.rkeys, rkey.0) {
            Some(entry) if entry.rkey == rkey.0 && rkey.0 != 0 => {
                entry.check(pd, addr.0, u64::from(len.0), want)
            }
            _ => Err(KeyFault::Unknown),
        }
    }

    /// What is known of the region of a local key.
    pub fn info(&self, lkey: Lkey) -> Option<MrInfo> {
        self.region(lkey).map(Entry::info)
    }

    /// A page of the regions in order of their slots: at most `limit` from `cursor` on (0 at first), and the cursor of
    /// the next page, `None` at the end. Regions that come or go between two pages may be missed; none comes twice
    /// unless it was registered anew.
    pub fn list(&self, cursor: u32, limit: usize) -> (Vec<MrInfo>, Option<u32>) {
        let mut page = Vec::new();
        for (slot, entry) in self.entries.iter().enumerate().skip(cursor as usize) {
            if entry.lkey == 0 {
                continue;
            }
            if page.len() >= limit.max(1) {
                return (page, Some(slot as u32));
            }
            page.push(entry.info());
        }
        (page, None)
    }

    /// Slot of a live local key.
    #[inline]
    pub(crate) fn slot_of(&self, lkey: Lkey) -> Option<usize> {
        let slot = (self.lkeys.unscramble(lkey.0) & self.slot_mask()) as usize;
        (lkey.0 != 0 && self.entries.get(slot)?.lkey == lkey.0).then_some(slot)
    }

    /// The region of a live local key.
    #[inline]
    pub(crate) fn region(&self, lkey: Lkey) -> Option<&Entry> {
        let entry = self.entry(&self.lkeys, lkey.0)?;
        (entry.lkey == lkey.0 && lkey.0 != 0).then_some(entry)
    }

    /// The region of a live local key that is not about to go, and its slot.
    #[inline]
    pub(crate) fn region_of(&self, lkey: Lkey) -> Option<(u32, &Entry)> {
        let slot = self.slot_of(lkey)?;
        let entry = self.entries.get(slot).filter(|entry| !entry.closing)?;
        Some((slot as u32, entry))
    }

    /// The region in a slot.
    #[inline]
    pub(crate) fn region_at(&self, slot: u32) -> Option<&Entry> {
        self.entries.get(slot as usize)
    }

    /// True for the remote key of a live region.
    pub(crate) fn is_region(&self, rkey: Rkey) -> bool {
        rkey.0 != 0 && self.entry(&self.rkeys, rkey.0).is_some_and(|entry| entry.rkey == rkey.0)
    }

    /// Slot of a region that is not in use.
    fn idle(&self, lkey: Lkey) -> Result<usize, DeregisterError> {
        let slot = self.slot_of(lkey).ok_or(DeregisterError::Unknown)?;
        match (self.entries[slot].windows.get(), self.entries[slot].posted.get()) {
            (0, 0) => Ok(slot),
            (windows, posted) => Err(DeregisterError::Busy { windows, posted }),
        }
    }

    #[inline]
    fn entry(&self, keys: &Permutation, key: u32) -> Option<&Entry> {
        self.entries.get((keys.unscramble(key) & self.slot_mask()) as usize)
    }

    #[inline]
    const fn slot_mask(&self) -> u32 {
        (1 << self.slot_bits) - 1
    }

    const fn generation_of(&self, plain: u32) -> u32 {
        // A table of one slot has no slot bits; all 32 are generation.
        plain >> self.slot_bits
    }

    /// Keys of a slot's generation. Generations count modulo 2^(32 - slot bits).
    fn keys(&self, slot: u32, generation: u32) -> (u32, u32) {
        let plain = generation << self.slot_bits | slot;
        (self.lkeys.scramble(plain), self.rkeys.scramble(plain))
    }

    fn fill(&mut self, slot: u32, generation: u32, keys: (u32, u32), init: MrInit) -> MrInfo {
        let entry = &mut self.entries[slot as usize];
        let MrInit { pd, access, iova, base, len } = init;
        *entry = Entry {
            lkey: keys.0,
            rkey: keys.1,
            pd,
            access,
            iova,
            len,
            base,
            queued: entry.queued,
            ..Entry::free(generation)
        };
        self.live += 1;
        entry.info()
    }
}

impl fmt::Debug for Memory {
    /// Keys and secret stay unprinted.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("capacity", &self.capacity()).field("live", &self.live).finish()
    }
}

/// The rules that do not depend on the table.
fn check_init(access: Access, iova: u64, len: u64) -> Result<(), RegisterError> {
    if len == 0 || len > isize::MAX as u64 || iova.checked_add(len).is_none() {
        return Err(RegisterError::BadRange);
    }
    if access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
        && !access.contains(Access::LOCAL_WRITE)
    {
        return Err(RegisterError::BadAccess);
    }
    Ok(())
}

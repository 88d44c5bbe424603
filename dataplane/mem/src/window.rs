//! Type 2 memory windows: keys that their user gives out and takes back on the data path.
//!
//! Owns the window table. A window is allocated and freed by control (`&mut Memory`), on the worker of the queue pair
//! that is to bind it; that queue pair binds and invalidates it from its send queue through `&Memory`, by cells.
//!
//! The key is as libibverbs has it, since one program must run on this and on an RNIC: the upper 24 bits name the window
//! (a keyed permutation of generation and slot, unguessable as region keys are), the lowest 8 are its user's, who bumps
//! them at each bind (`ibv_inc_rkey`) and knows the new key before the bind is done. A peer that guesses needs the
//! right one of 2^24 on the one queue pair that bound it, and loses the connection at the first wrong guess. A key that
//! is given again after 256 binds is the user's doing.
//!
//! Invariant: a window grants only what its region grants, since every check ends in the region's own
//! ([`crate::memory`]); ending a key, by whatever way, ends rights only, never a mapping. No key is a region's and a
//! window's at once. Called by the engine (changes) and the transport (binds, checks). Never touches the memory itself.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::cell::Cell;
use core::fmt;

use ferroce_wire::{DmaLen, Qpn, RemoteAddr, Rkey};

use crate::key::{Access, KeyFault, Lkey, PdId, Permutation24};
use crate::memory::{Memory, RegisterError};
use crate::slice::MrSlice;

/// What differs from libibverbs: what, and why. For the list of the conformance suite.
pub const DEVIATIONS: &[(&str, &str)] = &[
    (
        "windows of type 1 do not exist",
        "ibv_bind_mw needs a path of its own past the work queues; type 2 does all of it",
    ),
    (
        "windows are never zero-based",
        "IBV_ACCESS_ZERO_BASED is refused: an address means the same in region and window",
    ),
    (
        "a window is bound on one worker",
        "its key lives where its queue pair lives; only queue pairs there can bind it",
    ),
    ("a window is bound with its queue pair and protection domain", "type 2B; type 2A is not offered"),
    ("window rights beyond the remote ones are refused", "some providers ignore them"),
];

/// Bits of a key that belong to the window's user.
const USER_BITS: u32 = 8;
const USER_MASK: u32 = (1 << USER_BITS) - 1;
/// Bits of the part above.
const PREFIX_BITS: u32 = 24;
const PREFIX_MASK: u32 = (1 << PREFIX_BITS) - 1;
/// Most windows: leaves 16 generations.
const MAX_WINDOWS: u32 = 1 << 20;
/// End of a chain.
const NONE: u32 = u32::MAX;
/// What binds may grant.
const REMOTE: Access = Access::REMOTE_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);

/// A request to bind a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bind {
    /// The key to give it: the upper 24 bits are those of its key at allocation, the lowest 8 differ from its last key.
    pub rkey: Rkey,
    /// The region.
    pub lkey: Lkey,
    /// First byte, in the region's address space.
    pub addr: u64,
    /// Bytes, at least 1.
    pub len: u64,
    /// REMOTE_READ, REMOTE_WRITE, REMOTE_ATOMIC, or none of them.
    pub access: Access,
}

/// What is known of a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MwInfo {
    /// Its last key. Opens nothing unless `bound`.
    pub rkey: Rkey,
    /// Protection domain.
    pub pd: PdId,
    /// To what it is bound.
    pub bound: Option<BoundInfo>,
}

/// To what a window is bound.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BoundInfo {
    /// The queue pair that bound it: only requests to it may use the key.
    pub qpn: Qpn,
    /// The region.
    pub lkey: Lkey,
    /// First byte, in the region's address space.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// Rights.
    pub access: Access,
}

/// Why a bind was refused (`IBV_WC_MW_BIND_ERR`); nothing is changed then. The first that applies, in this order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum BindError {
    /// No window has these upper 24 bits of a key.
    UnknownWindow,
    /// The window belongs to another protection domain than the queue pair.
    WrongPd,
    /// It is bound: invalidate it first.
    StillBound,
    /// The lowest 8 bits are those of its last key: a peer could not tell the two binds apart.
    SameKey,
    /// Other rights than the remote ones were asked for.
    BadAccess,
    /// A length of 0. Type 2 windows are unbound by invalidation, not so.
    ZeroLength,
    /// No region has this local key, or it is being deregistered.
    UnknownRegion,
    /// The region belongs to another protection domain.
    RegionPd,
    /// The region was registered without MW_BIND.
    NoBindRight,
    /// REMOTE_WRITE or REMOTE_ATOMIC needs LOCAL_WRITE on the region.
    NeedsLocalWrite,
    /// Not wholly inside the region.
    OutOfBounds,
}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BindError::UnknownWindow => "rkey: no window has these upper 24 bits",
            BindError::WrongPd => "the window is of another protection domain than the queue pair",
            BindError::StillBound => "the window is bound; invalidate it first",
            BindError::SameKey => "rkey: the lowest 8 bits must differ from those of the window's last key",
            BindError::BadAccess => {
                "access: a window grants REMOTE_READ, REMOTE_WRITE and REMOTE_ATOMIC only"
            }
            BindError::ZeroLength => "length: at least 1; invalidate a window to unbind it",
            BindError::UnknownRegion => "lkey: no such region, or it is being deregistered",
            BindError::RegionPd => "lkey: the region is of another protection domain",
            BindError::NoBindRight => "lkey: the region was registered without MW_BIND",
            BindError::NeedsLocalWrite => {
                "access: REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE on the region"
            }
            BindError::OutOfBounds => "address and length are not wholly inside the region",
        })
    }
}

impl core::error::Error for BindError {}

/// Why an invalidation was refused; nothing is changed then.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum InvalidateError {
    /// No bound window has this key now.
    Unknown,
    /// The key is a region's: those that control registers are ended by deregistering.
    Region,
    /// The window is bound by another queue pair.
    WrongQp,
    /// The window belongs to another protection domain.
    WrongPd,
}

impl fmt::Display for InvalidateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            InvalidateError::Unknown => "rkey: no bound window has this key",
            InvalidateError::Region => "rkey: this is a region's key; regions end by being deregistered",
            InvalidateError::WrongQp => "rkey: the window is bound by another queue pair",
            InvalidateError::WrongPd => "rkey: the window is of another protection domain",
        })
    }
}

impl core::error::Error for InvalidateError {}

/// The state of a bind. `len == 0`: not bound.
#[derive(Clone, Copy)]
struct Bound {
    addr: u64,
    len: u64,
    qpn: Qpn,
    /// Slot of the region, and its key then: the slot may have got another owner by a revocation.
    mr: u32,
    lkey: Lkey,
    access: Access,
}

impl Bound {
    const NOT: Bound =
        Bound { addr: 0, len: 0, qpn: Qpn::MULTICAST, mr: 0, lkey: Lkey(0), access: Access::empty() };
}

/// One window; a cache line.
#[derive(Clone)]
#[repr(align(64))]
struct Slot {
    /// The last key; 0 when the slot is free.
    key: Cell<u32>,
    pd: PdId,
    /// Of the next window while free.
    generation: u32,
    /// The slot stands in the free list.
    queued: bool,
    bound: Cell<Bound>,
    /// Neighbours in the chain of its queue pair while bound.
    next: Cell<u32>,
    before: Cell<u32>,
}

const _: () = assert!(size_of::<Slot>() == 64);

impl Slot {
    const fn free(generation: u32) -> Slot {
        Slot {
            key: Cell::new(0),
            pd: PdId(0),
            generation,
            queued: true,
            bound: Cell::new(Bound::NOT),
            next: Cell::new(NONE),
            before: Cell::new(NONE),
        }
    }

    fn info(&self) -> MwInfo {
        let Bound { addr, len, qpn, lkey, access, .. } = self.bound.get();
        let bound = (len > 0).then_some(BoundInfo { qpn, lkey, addr, len, access });
        MwInfo { rkey: Rkey(self.key.get()), pd: self.pd, bound }
    }
}

/// The window table of a [`Memory`].
pub(crate) struct Windows {
    slots: Vec<Slot>,
    /// As in [`Memory`].
    free: VecDeque<u32>,
    live: u32,
    slot_bits: u32,
    prefixes: Permutation24,
    /// Heads of the chains of bound windows, by queue pair number: what a queue pair leaves behind is found at once.
    chains: Vec<Cell<u32>>,
}

impl Windows {
    pub(crate) fn new(capacity: u32, secret: u64) -> Self {
        let capacity = capacity.min(MAX_WINDOWS);
        Windows {
            slots: alloc::vec![Slot::free(0); capacity as usize],
            free: (0..capacity).collect(),
            live: 0,
            slot_bits: capacity.max(1).next_power_of_two().trailing_zeros(),
            prefixes: Permutation24::new(secret, 3),
            chains: alloc::vec![Cell::new(NONE); capacity.max(1).next_power_of_two() as usize],
        }
    }

    /// True if the key could be one of a window that exists.
    pub(crate) fn covers(&self, rkey: Rkey) -> bool {
        self.find(rkey).is_some()
    }

    /// Slot number and generation that a key's upper bits stand for.
    #[inline]
    fn split(&self, rkey: Rkey) -> (u32, u32) {
        let plain = self.prefixes.unscramble(rkey.0 >> USER_BITS);
        (plain & ((1 << self.slot_bits) - 1), plain >> self.slot_bits)
    }

    /// The upper bits of a key, in their place; 0 for the one generation that must be skipped.
    fn prefix(&self, slot: u32, generation: u32) -> u32 {
        self.prefixes.scramble((generation << self.slot_bits | slot) & PREFIX_MASK) << USER_BITS
    }

    /// The window that these upper bits name.
    #[inline]
    fn find(&self, rkey: Rkey) -> Option<(u32, &Slot)> {
        let (index, _) = self.split(rkey);
        let slot = self.slots.get(index as usize)?;
        let key = slot.key.get();
        (key != 0 && key >> USER_BITS == rkey.0 >> USER_BITS).then_some((index, slot))
    }

    #[inline]
    fn chain(&self, qpn: Qpn) -> Option<&Cell<u32>> {
        // Numbers of queue pairs are scrambled already.
        self.chains.get(qpn.get() as usize & (self.chains.len() - 1))
    }

    fn link(&self, index: u32, slot: &Slot, qpn: Qpn) {
        let Some(head) = self.chain(qpn) else { return };
        let second = head.replace(index);
        if let Some(second) = self.slots.get(second as usize) {
            second.before.set(index);
        }
        slot.next.set(second);
        slot.before.set(NONE);
    }

    fn unlink(&self, slot: &Slot, qpn: Qpn) {
        let (before, next) = (slot.before.replace(NONE), slot.next.replace(NONE));
        match self.slots.get(before as usize) {
            Some(before) => before.next.set(next),
            None => self.chain(qpn).into_iter().for_each(|head| head.set(next)),
        }
        if let Some(next) = self.slots.get(next as usize) {
            next.before.set(before);
        }
    }
}

/// Windows.
impl Memory {
    /// Most windows it can hold.
    pub fn window_capacity(&self) -> u32 {
        self.windows.slots.len() as u32
    }
    /// Windows it holds.
    pub const fn window_count(&self) -> u32 {
        self.windows.live
    }

    /// Makes a window, not bound to anything, and chooses its key. Not on the data path.
    ///
    /// # Errors
    /// [`RegisterError::Full`].
    pub fn alloc_window(&mut self, pd: PdId) -> Result<MwInfo, RegisterError> {
        let index = loop {
            let index = self.windows.free.pop_front().ok_or(RegisterError::Full)?;
            let Some(slot) = self.windows.slots.get_mut(index as usize) else { continue };
            slot.queued = false;
            if slot.key.get() == 0 {
                break index;
            }
        };
        let first = self.windows.slots[index as usize].generation;
        let found = (0..1u32 << (PREFIX_BITS - self.windows.slot_bits)).find_map(|step| {
            let generation = first.wrapping_add(step);
            let prefix = self.windows.prefix(index, generation);
            (prefix != 0 && !self.has_region_under(prefix)).then_some((generation, prefix))
        });
        let Some((generation, prefix)) = found else {
            // Millions of regions have a key under each of the slot's few prefixes.
            self.windows.slots[index as usize].queued = true;
            self.windows.free.push_back(index);
            return Err(RegisterError::Full);
        };
        Ok(self.fill_window(index, generation, prefix, pd))
    }

    /// Makes the window that another table of the same secret and capacities made with the key `rkey`.
    ///
    /// # Errors
    /// [`RegisterError::BadKey`] if it is no such key or its slot is in use; nothing is changed then.
    pub fn replicate_window(&mut self, rkey: Rkey, pd: PdId) -> Result<(), RegisterError> {
        let (index, generation) = self.windows.split(rkey);
        let free = self.windows.slots.get(index as usize).is_some_and(|slot| slot.key.get() == 0);
        if !free || rkey.0 == 0 || rkey.0 & USER_MASK != 0 || self.has_region_under(rkey.0) {
            return Err(RegisterError::BadKey);
        }
        self.fill_window(index, generation, rkey.0, pd);
        Ok(())
    }

    /// Frees a window, named by any key that it had; a bound one is unbound by that. Not on the data path.
    ///
    /// # Errors
    /// [`KeyFault::Unknown`] if there is no such window.
    pub fn dealloc_window(&mut self, rkey: Rkey) -> Result<MwInfo, KeyFault> {
        let (index, slot) = self.windows.find(rkey).ok_or(KeyFault::Unknown)?;
        let info = slot.info();
        self.unbind(slot);
        let slot = &mut self.windows.slots[index as usize];
        let queued = slot.queued;
        *slot = Slot::free(slot.generation.wrapping_add(1));
        if !queued {
            self.windows.free.push_back(index);
        }
        self.windows.live -= 1;
        Ok(info)
    }

    /// Binds a window for the queue pair `qpn` of protection domain `pd`: BIND_MW, when its turn comes in the send
    /// queue. The key works at once, for requests to that queue pair.
    ///
    /// # Errors
    /// [`BindError`], the first that applies in the order of its variants; nothing is changed then.
    #[inline]
    pub fn bind_window(&self, qpn: Qpn, pd: PdId, bind: &Bind) -> Result<(), BindError> {
        let (index, slot) = self.windows.find(bind.rkey).ok_or(BindError::UnknownWindow)?;
        if slot.pd != pd {
            return Err(BindError::WrongPd);
        }
        if slot.bound.get().len > 0 {
            return Err(BindError::StillBound);
        }
        if slot.key.get() == bind.rkey.0 {
            return Err(BindError::SameKey);
        }
        if !REMOTE.contains(bind.access) {
            return Err(BindError::BadAccess);
        }
        if bind.len == 0 {
            return Err(BindError::ZeroLength);
        }
        let (mr, region) = self.region_of(bind.lkey).ok_or(BindError::UnknownRegion)?;
        let have = region.info().access;
        if region.info().pd != pd {
            return Err(BindError::RegionPd);
        }
        if !have.contains(Access::MW_BIND) {
            return Err(BindError::NoBindRight);
        }
        let writes = bind.access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        if writes && !have.contains(Access::LOCAL_WRITE) {
            return Err(BindError::NeedsLocalWrite);
        }
        region.check(pd, bind.addr, bind.len, Access::empty()).map_err(|_| BindError::OutOfBounds)?;
        let Bind { rkey, lkey, addr, len, access } = *bind;
        region.windows.set(region.windows.get() + 1);
        slot.key.set(rkey.0);
        slot.bound.set(Bound { addr, len, qpn, mr, lkey, access });
        self.windows.link(index, slot, qpn);
        Ok(())
    }

    /// Ends the key of a window that the queue pair `qpn` of protection domain `pd` bound: LOCAL_INV, or SEND with
    /// invalidate from its peer. Data that a peer has not yet read or written under the key stays so; the memory itself
    /// is untouched. The window can be bound again.
    ///
    /// # Errors
    /// [`InvalidateError`]; nothing is changed then.
    #[inline]
    pub fn invalidate(&self, qpn: Qpn, pd: PdId, rkey: Rkey) -> Result<(), InvalidateError> {
        let slot = match self.windows.find(rkey) {
            Some((_, slot)) if slot.key.get() == rkey.0 && slot.bound.get().len > 0 => slot,
            Some(_) => return Err(InvalidateError::Unknown),
            None if self.is_region(rkey) => return Err(InvalidateError::Region),
            None => return Err(InvalidateError::Unknown),
        };
        if slot.bound.get().qpn != qpn {
            return Err(InvalidateError::WrongQp);
        }
        if slot.pd != pd {
            return Err(InvalidateError::WrongPd);
        }
        self.unbind(slot);
        Ok(())
    }

    /// Unbinds all windows of a queue pair that is destroyed or reset, so that no later one of the same number has them.
    /// Work in proportion to their number. Returns how many there were.
    pub fn unbind_all(&self, qpn: Qpn) -> u32 {
        let (mut count, mut at) = (0, self.windows.chain(qpn).map_or(NONE, Cell::get));
        while let Some(slot) = self.windows.slots.get(at as usize) {
            at = slot.next.get();
            if slot.bound.get().qpn == qpn {
                self.unbind(slot);
                count += 1;
            }
        }
        count
    }

    /// What is known of a window, named by any key that it had.
    pub fn window(&self, rkey: Rkey) -> Option<MwInfo> {
        self.windows.find(rkey).map(|(_, slot)| slot.info())
    }

    /// A page of the windows, as [`Memory::list`] has the regions.
    pub fn list_windows(&self, cursor: u32, limit: usize) -> (Vec<MwInfo>, Option<u32>) {
        let mut page = Vec::new();
        for (index, slot) in self.windows.slots.iter().enumerate().skip(cursor as usize) {
            if slot.key.get() == 0 {
                continue;
            }
            if page.len() >= limit.max(1) {
                return (page, Some(index as u32));
            }
            page.push(slot.info());
        }
        (page, None)
    }

    /// The remote check of a window's key.
    #[inline]
    pub(crate) fn check_window(
        &self,
        qpn: Qpn,
        pd: PdId,
        rkey: Rkey,
        addr: RemoteAddr,
        len: DmaLen,
        want: Access,
    ) -> Result<MrSlice<'_>, KeyFault> {
        let (_, slot) = self.windows.find(rkey).ok_or(KeyFault::Unknown)?;
        let bound = slot.bound.get();
        if slot.key.get() != rkey.0 || bound.len == 0 {
            return Err(KeyFault::Unknown);
        }
        let region = self.region_at(bound.mr).filter(|region| region.info().lkey == bound.lkey);
        let region = region.ok_or(KeyFault::Unknown)?;
        if bound.qpn != qpn {
            return Err(KeyFault::WrongQp);
        }
        if slot.pd != pd {
            return Err(KeyFault::WrongPd);
        }
        if !bound.access.contains(want) {
            return Err(KeyFault::Rights);
        }
        let offset = addr.0.checked_sub(bound.addr).ok_or(KeyFault::OutOfBounds)?;
        let room = bound.len.checked_sub(offset).ok_or(KeyFault::OutOfBounds)?;
        if u64::from(len.0) > room {
            return Err(KeyFault::OutOfBounds);
        }
        // The region's own check makes the slice: whatever this table says, it ends at the region. The window's
        // rights count, not the region's remote ones (a region may be open to windows only).
        region.check(pd, addr.0, u64::from(len.0), Access::empty())
    }

    /// Ends a bind, if there is one.
    fn unbind(&self, slot: &Slot) {
        let bound = slot.bound.replace(Bound::NOT);
        if bound.len == 0 {
            return;
        }
        self.windows.unlink(slot, bound.qpn);
        if let Some(region) = self.region_at(bound.mr).filter(|region| region.info().lkey == bound.lkey) {
            region.windows.set(region.windows.get().saturating_sub(1));
        }
    }

    /// A region has a key with these upper bits.
    fn has_region_under(&self, prefix: u32) -> bool {
        (0..=USER_MASK).any(|low| self.is_region(Rkey(prefix | low)))
    }

    fn fill_window(&mut self, index: u32, generation: u32, prefix: u32, pd: PdId) -> MwInfo {
        let slot = &mut self.windows.slots[index as usize];
        *slot = Slot { key: Cell::new(prefix), pd, queued: slot.queued, ..Slot::free(generation) };
        self.windows.live += 1;
        slot.info()
    }
}

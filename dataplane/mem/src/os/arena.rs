//! [`Arena`]: a region that is handed out in blocks, and [`Block`], the owner of such bytes.
//!
//! Invariant: the free list and the living blocks partition the region; a block's bytes belong to it until it is
//! dropped, and it keeps the region mapped. Called at set-up (`alloc`) and, for [`Block`]'s reads and writes, by
//! whoever owns it. Never makes a reference to the bytes: once registered, a peer may write them.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::copy::copy_raw;
use crate::key::{Access, PdId};
use crate::memory::MrInit;

use super::pages::{ArenaError, PageKind, PagePolicy, human};
use super::region::Region;

/// Smallest alignment and unit of allocation: a cache line, so that no two blocks share one.
const UNIT: usize = 64;

/// Default size of an arena in bytes.
const DEFAULT_BYTES: u64 = 64 << 20;

/// What an arena is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArenaConfig {
    /// Bytes, rounded up to whole pages.
    pub bytes: u64,
    /// Pages to use.
    pub pages: PagePolicy,
    /// NUMA node the memory must be on; `None` leaves it to the kernel (the node of the thread that makes it).
    pub numa_node: Option<u32>,
}

impl Default for ArenaConfig {
    fn default() -> Self {
        ArenaConfig { bytes: DEFAULT_BYTES, pages: PagePolicy::Auto, numa_node: None }
    }
}

/// What an arena got, for `ferroce status`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ArenaReport {
    /// Pages in use.
    pub page_kind: PageKind,
    /// Bytes in use.
    pub bytes: u64,
    /// Why these are not the best pages, and how to get better ones; one line. `None` when they are what was asked.
    pub fallback: Option<String>,
}

impl fmt::Display for ArenaReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", human(self.bytes), self.page_kind)?;
        match &self.fallback {
            Some(reason) => write!(f, " ({reason})"),
            None if self.page_kind == PageKind::Normal => {
                f.write_str(" (as asked; performance figures do not count)")
            }
            None => Ok(()),
        }
    }
}

struct Shared {
    region: Arc<Region>,
    free: Mutex<FreeList>,
}

struct FreeList {
    /// Offset to length; neighbours are always joined.
    holes: BTreeMap<usize, usize>,
    /// Bytes from here on were never handed out, hence are still zero.
    untouched: usize,
}

/// A region handed out in blocks. Cheap to clone; clones share the region.
#[derive(Clone)]
pub struct Arena {
    shared: Arc<Shared>,
}

impl Arena {
    /// Maps and touches the memory.
    ///
    /// # Errors
    /// [`ArenaError`] if an explicit policy can't be met, or not even normal pages can be had.
    pub fn new(config: ArenaConfig) -> Result<(Arena, ArenaReport), ArenaError> {
        let mut refusals = Vec::new();
        let kinds: &[PageKind] = match config.pages {
            // A 1 GiB page for less than that would waste the rest of it.
            PagePolicy::Auto if config.bytes >= 1 << 30 => {
                &[PageKind::Huge2M, PageKind::Huge1G, PageKind::Thp, PageKind::Normal]
            }
            PagePolicy::Auto => &[PageKind::Huge2M, PageKind::Thp, PageKind::Normal],
            PagePolicy::Huge2M => &[PageKind::Huge2M],
            PagePolicy::Huge1G => &[PageKind::Huge1G],
            PagePolicy::Thp => &[PageKind::Thp],
            PagePolicy::Normal => &[PageKind::Normal],
        };
        for &kind in kinds {
            match Region::new(config.bytes, kind, config.numa_node) {
                Ok(region) => {
                    let reasons: Vec<String> = refusals.iter().map(ArenaError::to_string).collect();
                    let report = ArenaReport {
                        page_kind: kind,
                        bytes: region.len() as u64,
                        fallback: (!reasons.is_empty()).then(|| reasons.join("; then ")),
                    };
                    return Ok((Arena::from_region(Arc::new(region)), report));
                }
                Err(error) => refusals.push(error),
            }
        }
        // The last refusal is about the most modest wish.
        Err(refusals.pop().unwrap_or_else(|| ArenaError::new("pages", "none", "some", "")))
    }

    /// Hands out a region that is already mapped, and zero throughout.
    pub fn from_region(region: Arc<Region>) -> Arena {
        let holes = BTreeMap::from([(0, region.len())]);
        Arena { shared: Arc::new(Shared { region, free: Mutex::new(FreeList { holes, untouched: 0 }) }) }
    }

    /// A block of at least `bytes` zeroed bytes (rounded up to 64), aligned to `align`: a power of two up to the page
    /// size, raised to 64.
    ///
    /// # Errors
    /// [`ArenaError`] naming what is left, or the alignment allowed.
    pub fn alloc(&self, bytes: usize, align: usize) -> Result<Block, ArenaError> {
        let page = self.shared.region.page_kind().bytes();
        if !align.is_power_of_two() || align > page {
            let allowed = format!("a power of two up to the page size, {page}");
            return Err(ArenaError::new("alignment", align, allowed, ""));
        }
        let mut free = self.shared.lock();
        let found = bytes.max(1).checked_next_multiple_of(UNIT).and_then(|size| {
            // First fit. The base is aligned to a page, so offsets are aligned as addresses are.
            let align = align.max(UNIT);
            free.holes.iter().find_map(|(&hole, &len)| {
                let at = hole.checked_next_multiple_of(align)?;
                let room = len.checked_sub(at - hole)?;
                (size <= room).then_some((hole, len, at, size))
            })
        });
        let Some((hole, len, at, size)) = found else {
            let largest = free.holes.values().max().copied().unwrap_or(0);
            let sum: usize = free.holes.values().sum();
            let allowed = format!("{} in one piece ({} free)", human(largest as u64), human(sum as u64));
            return Err(ArenaError::new(
                "arena",
                human(bytes as u64),
                allowed,
                "make the arena larger or free blocks",
            ));
        };
        free.holes.remove(&hole);
        if at > hole {
            free.holes.insert(hole, at - hole);
        }
        if hole + len > at + size {
            free.holes.insert(at + size, hole + len - at - size);
        }
        let dirty = free.untouched.saturating_sub(at).min(size);
        free.untouched = free.untouched.max(at + size);
        drop(free);
        // SAFETY: `at + size <= region.len()`, as the holes lie inside the region.
        let base = unsafe { self.shared.region.base().add(at) };
        let block = Block { base, offset: at, len: bytes, size, arena: self.shared.clone() };
        // What a former owner left must not reach the next one.
        // SAFETY: `dirty <= size` bytes of a block that nobody else has yet.
        unsafe { base.as_ptr().write_bytes(0, dirty) };
        Ok(block)
    }

    /// Bytes that are free.
    pub fn free_bytes(&self) -> usize {
        self.shared.lock().holes.values().sum()
    }
    /// Bytes in all.
    pub fn len(&self) -> usize {
        self.shared.region.len()
    }
    /// Never true: an arena has at least a page.
    pub fn is_empty(&self) -> bool {
        self.shared.region.is_empty()
    }
    /// The region behind it.
    pub fn region(&self) -> &Arc<Region> {
        &self.shared.region
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("bytes", &self.len()).field("free", &self.free_bytes()).finish()
    }
}

impl Shared {
    /// A panic elsewhere leaves the list whole: no step between its changes can panic.
    fn lock(&self) -> MutexGuard<'_, FreeList> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_back(&self, offset: usize, size: usize) {
        let mut free = self.lock();
        let (mut start, mut end) = (offset, offset + size);
        if let Some((&before, &len)) = free.holes.range(..start).next_back()
            && before + len == start
        {
            free.holes.remove(&before);
            start = before;
        }
        if let Some(len) = free.holes.remove(&end) {
            end += len;
        }
        free.holes.insert(start, end - start);
    }
}

/// Bytes of an arena. Gives them back when dropped and keeps the mapping until then. Others may write the bytes once
/// they are registered, so there is no way to borrow them as a slice.
pub struct Block {
    base: NonNull<u8>,
    /// In the region.
    offset: usize,
    /// As asked.
    len: usize,
    /// As taken from the arena.
    size: usize,
    arena: Arc<Shared>,
}

// SAFETY: the bytes belong to the block and the mapping to the process; see `Sync`.
unsafe impl Send for Block {}
// SAFETY: all access is by raw copies and atomics, which allow for concurrent writers (the contents may then mix).
unsafe impl Sync for Block {}

impl Block {
    /// Bytes, as asked for.
    pub const fn len(&self) -> usize {
        self.len
    }
    /// True when none were asked for.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// First byte. Valid as long as the block lives; not to be made a reference of.
    pub const fn base(&self) -> NonNull<u8> {
        self.base
    }
    /// Where it begins in its region, for a process that maps the region too.
    pub const fn offset_in_region(&self) -> usize {
        self.offset
    }
    /// The region it lies in.
    pub fn region(&self) -> &Arc<Region> {
        &self.arena.region
    }

    /// Copies out `dst.len()` bytes at `offset`.
    ///
    /// # Panics
    /// If they are not all inside, as slice indexing does. So do all accesses below.
    #[inline]
    pub fn read(&self, offset: usize, dst: &mut [u8]) {
        let at = self.at(offset, dst.len());
        // SAFETY: `at` has as many bytes.
        unsafe { copy_raw(at.as_ptr(), dst.as_mut_ptr(), dst.len()) };
    }
    /// Copies `src` in at `offset`. Panics if it is not all inside.
    #[inline]
    pub fn write(&self, offset: usize, src: &[u8]) {
        let at = self.at(offset, src.len());
        // SAFETY: `at` has room for as many bytes.
        unsafe { copy_raw(src.as_ptr(), at.as_ptr(), src.len()) };
    }
    /// Sets all bytes.
    pub fn fill(&self, byte: u8) {
        // SAFETY: the block has `len` bytes.
        unsafe { self.base.as_ptr().write_bytes(byte, self.len) };
    }
    /// A copy of all bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.read(0, &mut bytes);
        bytes
    }
    /// The byte at `offset`, read anew at each call: to poll for a WRITE. What a WRITE placed before it is visible
    /// after it. Panics if it is not inside.
    #[inline]
    pub fn read_u8_volatile(&self, offset: usize) -> u8 {
        // SAFETY: one byte inside; an atomic may be shared with anyone.
        unsafe { AtomicU8::from_ptr(self.at(offset, 1).as_ptr()) }.load(Ordering::Acquire)
    }
    /// Sets the byte at `offset`, after all earlier writes. Panics if it is not inside.
    #[inline]
    pub fn write_u8_volatile(&self, offset: usize, value: u8) {
        // SAFETY: as for reading.
        unsafe { AtomicU8::from_ptr(self.at(offset, 1).as_ptr()) }.store(value, Ordering::Release);
    }
    /// The 4 bytes at `offset`, in this machine's order. Panics unless inside and aligned.
    #[inline]
    pub fn load_u32(&self, offset: usize) -> u32 {
        let at = self.aligned(offset, 4).cast();
        // SAFETY: 4 bytes inside, aligned; an atomic may be shared with anyone.
        unsafe { AtomicU32::from_ptr(at.as_ptr()) }.load(Ordering::Acquire)
    }
    /// Sets the 4 bytes at `offset`. Panics unless inside and aligned.
    #[inline]
    pub fn store_u32(&self, offset: usize, value: u32) {
        let at = self.aligned(offset, 4).cast();
        // SAFETY: as for loading.
        unsafe { AtomicU32::from_ptr(at.as_ptr()) }.store(value, Ordering::Release);
    }
    /// The 8 bytes at `offset`, in this machine's order. Panics unless inside and aligned.
    #[inline]
    pub fn load_u64(&self, offset: usize) -> u64 {
        let at = self.aligned(offset, 8).cast();
        // SAFETY: 8 bytes inside, aligned; an atomic may be shared with anyone.
        unsafe { AtomicU64::from_ptr(at.as_ptr()) }.load(Ordering::Acquire)
    }
    /// Sets the 8 bytes at `offset`. Panics unless inside and aligned.
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64) {
        let at = self.aligned(offset, 8).cast();
        // SAFETY: as for loading.
        unsafe { AtomicU64::from_ptr(at.as_ptr()) }.store(value, Ordering::Release);
    }

    /// What to register the whole block with; `iova` is the address peers will use for its first byte. The block must
    /// live until the region is deregistered.
    pub const fn mr_init(&self, pd: PdId, access: Access, iova: u64) -> MrInit {
        MrInit { pd, access, iova, base: self.base, len: self.len as u64 }
    }

    #[inline]
    fn at(&self, offset: usize, len: usize) -> NonNull<u8> {
        let inside = offset <= self.len && len <= self.len - offset;
        assert!(inside, "{len} bytes at {offset} are not inside a block of {}", self.len);
        // SAFETY: `offset <= self.len`.
        unsafe { self.base.add(offset) }
    }

    #[inline]
    fn aligned(&self, offset: usize, len: usize) -> NonNull<u8> {
        // The base is aligned to 64.
        assert!(offset.is_multiple_of(len), "offset {offset} is not a multiple of {len}");
        self.at(offset, len)
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block {{ offset: {:#x}, len: {:#x} }}", self.offset, self.len)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.arena.give_back(self.offset, self.size);
    }
}

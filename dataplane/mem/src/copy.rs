//! Copy, CRC and atomics on memory that a peer may write at the same time.
//!
//! Invariant: no `&[u8]` or `&mut [u8]` to such memory ever exists; a CRC over it is taken from a private copy, and
//! where bytes are copied on, it is that private copy which is passed on, so what was CRC'd is what was written.
//! Bytes that somebody writes during a copy come out as any mixture of old and new, nothing worse. Called by
//! transport, engine and ports. Never allocates.
//!
//! A CRC here is a plain finalised CRC-32 (what `crc32fast::hash` returns), in and out.
#![allow(unsafe_code)]

use core::marker::PhantomData;
use core::mem::MaybeUninit;
use core::ptr::{self, NonNull};
use core::slice;
use core::sync::atomic::{AtomicU8, AtomicU64, Ordering, compiler_fence};

use crate::payload::Payload;
use crate::slice::MrSlice;

/// Bytes of the private copy that a CRC over shared memory is taken from. Stays in the first-level cache.
const CHUNK: usize = 4096;

/// The private copy.
type Chunk = MaybeUninit<[u8; CHUNK]>;

/// A write-only target of `len` bytes that may be shared with a peer: the buffer of a frame to send.
#[derive(Debug)]
pub struct Target<'t> {
    pub(crate) base: NonNull<u8>,
    pub(crate) len: usize,
    pub(crate) buffer: PhantomData<&'t mut u8>,
}

impl<'t> Target<'t> {
    /// A target that a peer may read or write.
    ///
    /// # Safety
    /// `base .. base + len` stays writable for `'t`, and nothing in this process holds a reference into it.
    #[inline]
    pub unsafe fn from_raw(base: NonNull<u8>, len: usize) -> Target<'t> {
        Target { base, len, buffer: PhantomData }
    }
    /// A target in private memory.
    #[inline]
    pub fn from_slice(bytes: &'t mut [u8]) -> Target<'t> {
        Target { len: bytes.len(), base: NonNull::from(bytes).cast(), buffer: PhantomData }
    }
    /// Bytes of room.
    #[inline]
    pub const fn len(&self) -> usize {
        self.len
    }
    /// True when there is no room.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Writes `bytes` at `offset`. False, and nothing written, if they are not all inside.
    #[inline]
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> bool {
        let Some(at) = self.at(offset, bytes.len()) else { return false };
        // SAFETY: `at` has room for as many bytes; a private source.
        unsafe { copy_raw(bytes.as_ptr(), at.as_ptr(), bytes.len()) };
        true
    }

    /// Writes `bytes` at `offset` and continues `crc` over them. The caller reserved room for them: if they are not
    /// all inside, nothing is written (an assertion in debug builds) and the CRC comes back as it was.
    #[inline]
    pub fn write_crc(&mut self, offset: usize, bytes: &[u8], crc: u32) -> u32 {
        let inside = self.write(offset, bytes);
        debug_assert!(inside, "{} bytes at {offset} do not fit in a frame of {}", bytes.len(), self.len);
        if inside { crc_of(bytes, crc) } else { crc }
    }

    /// Writes registered memory at `offset` and continues `crc` over what was really written, in one pass: the owner
    /// may change the memory at the same time. The caller reserved room, as for [`Target::write_crc`].
    #[inline]
    pub fn write_slice_crc(&mut self, offset: usize, from: MrSlice<'_>, crc: u32) -> u32 {
        let at = self.at(offset, from.len);
        debug_assert!(at.is_some(), "{} bytes at {offset} do not fit in a frame of {}", from.len, self.len);
        let Some(at) = at else { return crc };
        let mut crc = crc;
        let mut chunk = Chunk::uninit();
        let mut done = 0;
        while done < from.len {
            let take = (from.len - done).min(CHUNK);
            // SAFETY: `done + take <= from.len`, which is readable there and writable at `at`; the two may not
            // overlap `chunk`, which is ours.
            unsafe {
                let private = copy_private(from.base.add(done), take, &mut chunk);
                crc = crc_of(private, crc);
                copy_raw(private.as_ptr(), at.as_ptr().add(done), take);
            }
            done += take;
        }
        crc
    }

    /// Where `len` bytes at `offset` go, if they are all inside.
    #[inline]
    fn at(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let room = self.len.checked_sub(offset)?;
        // SAFETY: `offset <= self.len`.
        (len <= room).then(|| unsafe { self.base.add(offset) })
    }
}

impl MrSlice<'_> {
    /// Copies the first bytes to private memory; returns how many: the shorter of both lengths.
    #[inline]
    pub fn copy_out(&self, dst: &mut [u8]) -> usize {
        let take = self.len.min(dst.len());
        // SAFETY: both have `take` bytes.
        unsafe { copy_raw(self.base.as_ptr(), dst.as_mut_ptr(), take) };
        take
    }

    /// Copies private memory to the first bytes; returns how many: the shorter of both lengths.
    #[inline]
    pub fn copy_in(&self, src: &[u8]) -> usize {
        let take = self.len.min(src.len());
        // SAFETY: both have `take` bytes; a check granted the access.
        unsafe { copy_raw(src.as_ptr(), self.base.as_ptr(), take) };
        take
    }

    /// Places a whole payload at `offset`. False, and nothing placed, if it is not all inside.
    ///
    /// The last byte becomes visible after all others: programs that poll the last byte of a buffer to learn of a
    /// WRITE exist in numbers.
    #[inline]
    pub fn place(&self, offset: usize, payload: &Payload<'_>) -> bool {
        let Some(part) = self.subslice(offset, payload.len()) else { return false };
        let Some(body) = payload.len().checked_sub(1) else { return true };
        let mut done = 0;
        for (base, len, _) in payload.iter() {
            let take = (len as usize).min(body - done);
            // SAFETY: the pieces add up to `part.len`, so `done + take` stays inside it.
            unsafe { copy_raw(base.as_ptr(), part.base.as_ptr().add(done), take) };
            done += take;
            if take < len as usize {
                // SAFETY: the one byte that is left is the last of its piece and of `part`. An atomic byte may be
                // shared with anyone.
                unsafe {
                    let last = base.add(take).as_ptr().read_volatile();
                    AtomicU8::from_ptr(part.base.as_ptr().add(done)).store(last, Ordering::Release);
                }
                break;
            }
        }
        true
    }

    /// CRC-32 over all bytes, continued from `seed`, taken from a private copy.
    #[inline]
    pub fn crc(&self, seed: u32) -> u32 {
        // SAFETY: the slice is readable.
        unsafe { crc_shared(self.base, self.len, seed) }
    }

    /// Adds to the 8 bytes at `offset` (in this machine's byte order, wrapping) and returns what they were. `None`,
    /// and nothing done, unless they are inside and the address is a multiple of 8.
    #[inline]
    pub fn fetch_add_u64(&self, offset: usize, add: u64) -> Option<u64> {
        Some(self.atomic(offset)?.fetch_add(add, Ordering::AcqRel))
    }

    /// Replaces the 8 bytes at `offset` by `swap` if they equal `compare`; returns what they were. `None`, and nothing
    /// done, unless they are inside and the address is a multiple of 8.
    #[inline]
    pub fn cmp_swap_u64(&self, offset: usize, compare: u64, swap: u64) -> Option<u64> {
        let result =
            self.atomic(offset)?.compare_exchange(compare, swap, Ordering::AcqRel, Ordering::Acquire);
        Some(result.unwrap_or_else(|found| found))
    }

    /// The 8 bytes at `offset`.
    #[inline]
    fn atomic(&self, offset: usize) -> Option<&AtomicU64> {
        let at = self.subslice(offset, 8)?.base.cast::<u64>();
        // SAFETY: 8 mapped bytes, aligned, and an atomic may be shared with anyone who can write there.
        at.is_aligned().then(|| unsafe { AtomicU64::from_ptr(at.as_ptr()) })
    }
}

/// CRC over private bytes.
#[inline]
pub(crate) fn crc_of(bytes: &[u8], seed: u32) -> u32 {
    let mut hasher = crc32fast::Hasher::new_with_initial(seed);
    hasher.update(bytes);
    hasher.finalize()
}

/// CRC over bytes that may change meanwhile.
///
/// # Safety
/// `base .. base + len` is readable.
#[inline]
pub(crate) unsafe fn crc_shared(base: NonNull<u8>, len: usize, seed: u32) -> u32 {
    let mut crc = seed;
    let mut chunk = Chunk::uninit();
    let mut done = 0;
    while done < len {
        let take = (len - done).min(CHUNK);
        // SAFETY: `done + take <= len`, readable by the caller's promise.
        crc = crc_of(unsafe { copy_private(base.add(done), take, &mut chunk) }, crc);
        done += take;
    }
    crc
}

/// Copies `len` bytes that may change meanwhile to `chunk`, and lends the copy.
///
/// # Safety
/// `base .. base + len` is readable and `len <= CHUNK`.
#[inline]
unsafe fn copy_private(base: NonNull<u8>, len: usize, chunk: &mut Chunk) -> &[u8] {
    debug_assert!(len <= CHUNK);
    let private = chunk.as_mut_ptr().cast::<u8>();
    // SAFETY: `base` by the caller's promise; `chunk` is ours and long enough.
    unsafe { ptr::copy_nonoverlapping(base.as_ptr(), private, len) };
    // The compiler must not look at the source again in place of the copy, as it may when it forwards one copy into
    // the next: the source may have changed.
    compiler_fence(Ordering::SeqCst);
    // SAFETY: `len` bytes of it were just written, and it is borrowed for as long as the result.
    unsafe { slice::from_raw_parts(private, len) }
}

/// Copies bytes of which either side may be shared with a peer, and which may overlap.
///
/// # Safety
/// `len` bytes are readable at `src` and writable at `dst`.
#[inline]
pub(crate) unsafe fn copy_raw(src: *const u8, dst: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { ptr::copy(src, dst, len) };
}

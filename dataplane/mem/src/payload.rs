//! [`Payload`]: the bytes of a received packet, wherever they lie.
//!
//! Invariant: every piece is readable for `'f`; a piece whose bit is set in `private` is written by nobody during
//! `'f`, any other may change under the reader. Made by ports, used by the transport. Never becomes a `&[u8]` where a
//! peer can write.
#![allow(unsafe_code)]

use core::marker::PhantomData;
use core::ptr::NonNull;
use core::slice;

use crate::copy;

/// At most this many pieces make up one payload (head remainder, then segments).
pub const MAX_PIECES: usize = 4;

/// A source for copy and CRC only: the pieces may be memory that the sender can still write (`shm`).
#[derive(Clone, Copy, Debug)]
pub struct Payload<'f> {
    pub(crate) pieces: [(NonNull<u8>, u32); MAX_PIECES],
    pub(crate) count: u8,
    /// Bit `i` is set when piece `i` is private.
    pub(crate) private: u8,
    pub(crate) len: u32,
    pub(crate) frame: PhantomData<&'f u8>,
}

impl<'f> Payload<'f> {
    /// No bytes.
    pub const EMPTY: Payload<'static> = Payload {
        pieces: [(NonNull::dangling(), 0); MAX_PIECES],
        count: 0,
        private: 0,
        len: 0,
        frame: PhantomData,
    };
    /// Bytes.
    #[inline]
    pub const fn len(&self) -> usize {
        self.len as usize
    }
    /// True when there are none.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Number of pieces, for statistics.
    pub const fn pieces(&self) -> usize {
        self.count as usize
    }

    /// Private bytes. More than 2^32 - 1 are no packet: the result is then empty.
    #[inline]
    pub fn from_slice(bytes: &'f [u8]) -> Payload<'f> {
        let mut payload = Payload::EMPTY;
        payload.push_slice(bytes);
        payload
    }

    /// Appends private bytes. False (and nothing appended) if there is no room for another piece.
    #[inline]
    pub fn push_slice(&mut self, bytes: &'f [u8]) -> bool {
        let Ok(len) = u32::try_from(bytes.len()) else { return false };
        self.push(NonNull::from(bytes).cast(), len, true)
    }

    /// Appends a piece that a peer may still write. False (and nothing appended) if there is no room for another piece
    /// or the payload would pass 2^32 - 1 bytes.
    ///
    /// # Safety
    /// `base .. base + len` stays readable for `'f`.
    #[inline]
    pub unsafe fn push_raw(&mut self, base: NonNull<u8>, len: u32) -> bool {
        self.push(base, len, false)
    }

    /// Appends all pieces of `other`. False, and `self` is then not to be used further, if there is no room for them: a
    /// port gives a head and at most [`MAX_PIECES`] - 1 pieces, so that head and rest always fit.
    #[inline]
    #[must_use]
    pub fn append(&mut self, other: &Payload<'f>) -> bool {
        other.iter().all(|(base, len, private)| self.push(base, len, private))
    }

    #[inline]
    fn push(&mut self, base: NonNull<u8>, len: u32, private: bool) -> bool {
        if len == 0 {
            return true;
        }
        let (Some(piece), Some(total)) =
            (self.pieces.get_mut(usize::from(self.count)), self.len.checked_add(len))
        else {
            return false;
        };
        *piece = (base, len);
        self.private |= u8::from(private) << self.count;
        self.count += 1;
        self.len = total;
        true
    }

    /// `len` bytes from `offset` on; `None` if they are not all inside.
    #[inline]
    pub fn slice(&self, offset: usize, len: usize) -> Option<Payload<'f>> {
        let room = self.len().checked_sub(offset)?;
        if len > room {
            return None;
        }
        // Both fit in 32 bits, since the whole payload does.
        let (mut skip, mut want) = (offset as u32, len as u32);
        let mut part = Payload::EMPTY;
        for (base, size, private) in self.iter() {
            let first = skip.min(size);
            skip -= first;
            let take = want.min(size - first);
            want -= take;
            // SAFETY: `first <= size`, and the piece is readable throughout.
            part.push(unsafe { base.add(first as usize) }, take, private);
        }
        Some(part)
    }

    /// CRC-32 continued from a finalised CRC (`wire::icrc`), over all bytes. What is private is read in place, what a
    /// peer may write by way of a private copy.
    #[inline]
    pub fn crc(&self, seed: u32) -> u32 {
        let mut crc = seed;
        for (base, len, private) in self.iter() {
            crc = if private {
                // SAFETY: readable for 'f and written by nobody (module invariant).
                copy::crc_of(unsafe { slice::from_raw_parts(base.as_ptr(), len as usize) }, crc)
            } else {
                // SAFETY: readable for 'f.
                unsafe { copy::crc_shared(base, len as usize, crc) }
            };
        }
        crc
    }

    /// Copies the first bytes to private memory, for UD heads, MADs and tests; returns how many: the shorter of both
    /// lengths.
    #[inline]
    pub fn copy_to(&self, dst: &mut [u8]) -> usize {
        let mut done = 0;
        for (base, len, _) in self.iter() {
            let Some(room) = dst.get_mut(done..) else { break };
            let take = room.len().min(len as usize);
            // SAFETY: the piece has `take` readable bytes, `room` as many writable ones.
            unsafe { copy::copy_raw(base.as_ptr(), room.as_mut_ptr(), take) };
            done += take;
        }
        done
    }

    #[inline]
    pub(crate) fn iter(&self) -> impl Iterator<Item = (NonNull<u8>, u32, bool)> + '_ {
        let private = self.private;
        self.pieces
            .iter()
            .take(usize::from(self.count))
            .enumerate()
            .map(move |(i, &(base, len))| (base, len, private >> i & 1 == 1))
    }
}

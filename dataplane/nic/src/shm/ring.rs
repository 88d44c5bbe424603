//! One direction of one queue: a ring of packed records in memory that the peer can write.
//!
//! A record is a 4-byte word and the frame right after it, padded to 64 bytes. The word holds a valid bit, 15 bits of
//! the record's position (so that nonsense is noticed) and the length; 0 means "not yet". The producer writes the
//! records of a batch, then a 0 where the next one will be, then the word of the first record: one store publishes the
//! batch, and a consumer that polls that word gets word and start of the frame with one cache line. No index of the
//! producer is shared at all; the consumer publishes how far it has come once per burst.
//!
//! Invariant: positions are private to their owner and multiples of 64; every access is at `position & mask` with its
//! length checked against the ring's end; a word is read once, and only the value read is checked and used. So a
//! hostile peer can spoil its own frames and have the link taken down ([`RingFault`]), nothing else. Frame bytes are
//! only copied, never referenced. Called by a queue; set up by the port. Never blocks.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence};

use ferroce_mem::Payload;
use ferroce_mem::copy::Target;
use ferroce_mem::os::Region;

use super::wake;
use crate::frame::{HEAD_BYTES, RxFrame};

/// Records begin at multiples of this: a cache line.
const LINE: u64 = 64;
/// Bytes of the word ahead of each frame.
const WORD: usize = 4;
/// Set in every word but 0.
const VALID: u32 = 0x8000_0000;
/// Length that means: the ring's end is unused, go on at its start.
const WRAP: u32 = 0xffff;
/// Longest frame that a word can tell of.
pub(crate) const MAX_FRAME: usize = 0xfffe;
/// Ahead of the records: two words in cache lines (and their prefetched neighbours) of their own.
const CONTROL: usize = 256;
/// Where in it the consumer says that it sleeps.
const SLEEPING: usize = 128;
/// Behind the records: room for a head copy of fixed length from the last one.
const SLACK: usize = 128;

/// Sizes of a link's rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Geometry {
    /// Pairs of rings.
    pub queues: u16,
    /// Bytes of records per ring: a power of two.
    pub ring_bytes: u32,
}

/// Which of a queue's two rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    /// Written by the side that listened.
    FromListener,
    /// Written by the side that connected.
    FromConnector,
}

impl Geometry {
    const fn stride(self) -> usize {
        CONTROL + self.ring_bytes as usize + SLACK
    }
    /// Bytes of the whole link, less rounding to pages.
    pub const fn bytes(self) -> usize {
        self.stride() * 2 * self.queues as usize
    }
    const fn offset(self, queue: u16, direction: Direction) -> usize {
        self.stride() * (2 * queue as usize + direction as usize)
    }
}

/// What a peer did to its ring that no peer of ours does. The link is taken down.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum RingFault {
    /// A word without valid bit, or of another position.
    BadWord = 1,
    /// A length of 0 or above the MTU.
    BadLength = 2,
    /// A record that passes the ring's end.
    PastEnd = 3,
    /// The consumer's position is none it can have.
    BadPosition = 4,
}

/// A ring in a region, which it keeps mapped.
struct Ring {
    /// First byte of the control block; the records follow it.
    base: NonNull<u8>,
    ring_bytes: u64,
    /// Keeps the mapping.
    _region: Arc<Region>,
}

// SAFETY: the mapping is the process's; all shared words are accessed atomically.
unsafe impl Send for Ring {}

impl Ring {
    /// `None` if the region is too short or the sizes are impossible.
    fn new(region: &Arc<Region>, geometry: Geometry, queue: u16, direction: Direction) -> Option<Ring> {
        let power = geometry.ring_bytes.is_power_of_two() && geometry.ring_bytes >= 4 * LINE as u32;
        if !power || queue >= geometry.queues || region.len() < geometry.bytes() {
            return None;
        }
        // SAFETY: the offset lies inside the region, whose length was just checked.
        let base = unsafe { region.base().add(geometry.offset(queue, direction)) };
        Some(Ring { base, ring_bytes: u64::from(geometry.ring_bytes), _region: region.clone() })
    }
    #[inline]
    const fn mask(&self) -> u64 {
        self.ring_bytes - 1
    }
    /// The record memory at a position.
    #[inline]
    fn at(&self, position: u64) -> NonNull<u8> {
        // SAFETY: masked, so less than `ring_bytes`, all of which follow the control block.
        unsafe { self.base.add(CONTROL + (position & self.mask()) as usize) }
    }
    /// The word at a position, a multiple of 64.
    #[inline]
    fn word(&self, position: u64) -> &AtomicU32 {
        debug_assert!(position.is_multiple_of(LINE));
        // SAFETY: inside the ring, aligned (the region begins at a page and all parts are multiples of 64), and
        // accessed atomically by both sides.
        unsafe { AtomicU32::from_ptr(self.at(position).cast().as_ptr()) }
    }
    /// How far the consumer has come.
    #[inline]
    fn consumed(&self) -> &AtomicU64 {
        // SAFETY: first word of the control block.
        unsafe { AtomicU64::from_ptr(self.base.cast().as_ptr()) }
    }
    /// Set while the consumer sleeps.
    #[inline]
    fn sleeping(&self) -> &AtomicU32 {
        // SAFETY: inside the control block, aligned.
        unsafe { AtomicU32::from_ptr(self.base.add(SLEEPING).cast().as_ptr()) }
    }
}

/// Bytes that a frame of `len` takes in a ring.
#[inline]
const fn record_bytes(len: usize) -> u64 {
    (WORD + len).next_multiple_of(LINE as usize) as u64
}

/// The word of a record.
#[inline]
const fn word_of(position: u64, len: u32) -> u32 {
    VALID | stamp_of(position) << 16 | len
}

/// 15 bits of a position.
#[inline]
const fn stamp_of(position: u64) -> u32 {
    (position / LINE) as u32 & 0x7fff
}

/// The side that writes records.
pub(crate) struct Producer {
    ring: Ring,
    /// Where the next record goes.
    tail: u64,
    /// As of the last flush.
    published: u64,
    /// Last known position of the consumer.
    consumed: u64,
    /// Word of the first record since the last flush, held back; 0 if there is none.
    first_word: u32,
    first_at: u64,
    /// Where the reserved record begins, and the bytes reserved for its frame.
    reserved: u64,
    reserved_len: usize,
    /// The consumer may ever sleep: flushes look for that.
    consumer_sleeps: bool,
}

impl Producer {
    /// The writing end of a ring that is new, hence zero.
    pub fn new(
        region: &Arc<Region>,
        geometry: Geometry,
        queue: u16,
        direction: Direction,
        consumer_sleeps: bool,
    ) -> Option<Producer> {
        Some(Producer {
            ring: Ring::new(region, geometry, queue, direction)?,
            tail: 0,
            published: 0,
            consumed: 0,
            first_word: 0,
            first_at: 0,
            reserved: 0,
            reserved_len: 0,
            consumer_sleeps,
        })
    }

    /// Room for a frame of `len` bytes (1 ..= [`MAX_FRAME`]): `Ok(None)` if there is none now.
    #[inline]
    pub fn reserve(&mut self, len: usize) -> Result<Option<Target<'_>>, RingFault> {
        debug_assert!(0 < len && len <= MAX_FRAME);
        let need = record_bytes(len);
        let to_end = self.ring.ring_bytes - (self.tail & self.ring.mask());
        let skip = if need > to_end { to_end } else { 0 };
        // One line more for the 0 behind the record.
        let end = self.tail + skip + need + LINE;
        if end - self.consumed > self.ring.ring_bytes {
            self.look_for_room()?;
            if end - self.consumed > self.ring.ring_bytes {
                return Ok(None);
            }
        }
        self.reserved = self.tail + skip;
        self.reserved_len = len;
        // SAFETY: the record lies inside the ring: it does not pass the end (`skip`), and the consumer has left this
        // part, so nobody of ours reads it; a peer that does harms itself.
        unsafe {
            let frame = self.ring.at(self.reserved).add(WORD);
            Ok(Some(Target::from_raw(frame, len)))
        }
    }

    /// Reads the consumer's position: the only load of the peer's memory on this side.
    #[cold]
    fn look_for_room(&mut self) -> Result<(), RingFault> {
        // Acquire: what the consumer read of the records is done before they are written again.
        let consumed = self.ring.consumed().load(Ordering::Acquire);
        if consumed < self.consumed || consumed > self.published || !consumed.is_multiple_of(LINE) {
            return Err(RingFault::BadPosition);
        }
        self.consumed = consumed;
        Ok(())
    }

    /// Commits the reserved frame, of which the first `len` bytes count. False, and nothing done, if nothing is
    /// reserved or `len` is 0 or more than was reserved.
    #[inline]
    pub fn commit(&mut self, len: usize) -> bool {
        if len == 0 || len > self.reserved_len {
            return false;
        }
        if self.reserved != self.tail {
            self.put(self.tail, WRAP);
        }
        self.put(self.reserved, len as u32);
        self.tail = self.reserved + record_bytes(len);
        self.reserved_len = 0;
        true
    }

    #[inline]
    fn put(&mut self, position: u64, len: u32) {
        let word = word_of(position, len);
        if self.first_word == 0 {
            // The word in the ring is 0 here, from the last flush or from the start.
            self.first_word = word;
            self.first_at = position;
        } else {
            self.ring.word(position).store(word, Ordering::Relaxed);
        }
    }

    /// Publishes all committed frames. True if the consumer sleeps and must be woken.
    #[inline]
    pub fn flush(&mut self) -> bool {
        if self.first_word == 0 {
            return false;
        }
        self.ring.word(self.tail).store(0, Ordering::Relaxed);
        // Release: the frames, the later words and the 0 behind them are visible before the first word is.
        self.ring.word(self.first_at).store(self.first_word, Ordering::Release);
        self.first_word = 0;
        self.published = self.tail;
        self.consumer_sleeps && wake::must_wake(self.ring.sleeping())
    }
}

/// A record that was found: where its frame lies and how long it is. Stays valid until [`Consumer::release`].
#[derive(Clone, Copy)]
struct Record {
    /// First byte of the frame.
    frame: NonNull<u8>,
    /// Bytes, 1 up to the longest frame of the link.
    len: usize,
}

/// What a burst brought.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Burst {
    /// Frames handed on.
    pub frames: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Nonsense was found after them.
    pub fault: Option<RingFault>,
}

/// The side that reads records.
pub(crate) struct Consumer {
    ring: Ring,
    /// Where the next record is awaited.
    head: u64,
    /// As last told to the producer.
    released: u64,
    max_frame: usize,
}

impl Consumer {
    /// The reading end of a ring that is new. Longer frames than `max_frame` are a fault.
    pub fn new(
        region: &Arc<Region>,
        geometry: Geometry,
        queue: u16,
        direction: Direction,
        max_frame: usize,
    ) -> Option<Consumer> {
        let ring = Ring::new(region, geometry, queue, direction)?;
        Some(Consumer { ring, head: 0, released: 0, max_frame: max_frame.min(MAX_FRAME) })
    }

    /// Hands at most `max` frames to `f` and gives their records back. `head` takes the private copies.
    #[inline]
    pub fn burst<F: FnMut(RxFrame<'_>)>(&mut self, max: usize, head: &mut Head, mut f: F) -> Burst {
        let mut burst = Burst { frames: 0, bytes: 0, fault: None };
        while burst.frames < max {
            match self.next_record() {
                Ok(Some(record)) => {
                    let mut rest = Payload::EMPTY;
                    if let Some(len @ 1..) = record.len.checked_sub(HEAD_BYTES) {
                        // SAFETY: inside the record, which is released after the frame was lent.
                        unsafe { rest.push_raw(record.frame.add(HEAD_BYTES), len as u32) };
                    }
                    f(RxFrame { head: head.copy_from(record), rest, timestamp_ns: 0 });
                    burst.frames += 1;
                    burst.bytes += record.len as u64;
                }
                Ok(None) => break,
                Err(fault) => {
                    burst.fault = Some(fault);
                    break;
                }
            }
        }
        self.release();
        burst
    }

    /// The next record, if it is published.
    #[inline]
    fn next_record(&mut self) -> Result<Option<Record>, RingFault> {
        // Acquire: the frame is read after the word. The first load of the peer's memory; only its value counts.
        let word = self.ring.word(self.head).load(Ordering::Acquire);
        if word == 0 {
            return Ok(None);
        }
        self.take(word)
    }

    #[inline]
    fn take(&mut self, mut word: u32) -> Result<Option<Record>, RingFault> {
        let mut offset = self.head & self.ring.mask();
        if word & 0xffff == WRAP {
            if word != word_of(self.head, WRAP) || offset == 0 {
                return Err(RingFault::BadWord);
            }
            self.head += self.ring.ring_bytes - offset;
            offset = 0;
            word = self.ring.word(self.head).load(Ordering::Acquire);
            if word == 0 {
                // The word at the start was published with or before the one at the end.
                return Err(RingFault::BadWord);
            }
        }
        if word >> 16 != word_of(self.head, 0) >> 16 {
            return Err(RingFault::BadWord);
        }
        let len = (word & 0xffff) as usize;
        if len == 0 || len > self.max_frame {
            return Err(RingFault::BadLength);
        }
        let need = record_bytes(len);
        if offset + need > self.ring.ring_bytes {
            return Err(RingFault::PastEnd);
        }
        // SAFETY: the whole record lies inside the ring, as just checked.
        let frame = unsafe { self.ring.at(self.head).add(WORD) };
        self.head += need;
        Ok(Some(Record { frame, len }))
    }

    /// Gives the records read so far back to the producer.
    #[inline]
    fn release(&mut self) {
        if self.head != self.released {
            // Release: the frames are read before the producer may write there again.
            self.ring.consumed().store(self.head, Ordering::Release);
            self.released = self.head;
        }
    }

    /// Asks for a wake-up; false if a record (or nonsense) is waiting already.
    pub fn arm(&self) -> bool {
        wake::may_sleep(self.ring.sleeping(), || self.ring.word(self.head).load(Ordering::Relaxed) != 0)
    }

    /// Wake-ups are no longer wanted.
    pub fn disarm(&self) {
        self.ring.sleeping().store(0, Ordering::Relaxed);
    }
}

/// A private copy of a frame's head.
#[repr(align(64))]
pub(crate) struct Head([u8; HEAD_BYTES]);

impl Head {
    pub const fn new() -> Head {
        Head([0; HEAD_BYTES])
    }

    /// Copies the first bytes of a record's frame: all of it, or [`HEAD_BYTES`].
    ///
    /// In fixed steps that end where a cache line does (the frame begins [`WORD`] bytes into one), which is a few
    /// vector moves, and touches no line that the frame does not reach.
    #[inline]
    fn copy_from(&mut self, record: Record) -> &[u8] {
        const ONE: usize = 64 - WORD;
        const TWO: usize = 128 - WORD;
        let (from, to) = (record.frame.as_ptr().cast_const(), self.0.as_mut_ptr());
        // SAFETY: the ring is followed by `SLACK` bytes, so `HEAD_BYTES` are readable from any record on; `to` has as
        // many. A peer may write them meanwhile: the copy then has some mixture.
        unsafe {
            if record.len <= ONE {
                from.copy_to_nonoverlapping(to, ONE);
            } else if record.len <= TWO {
                from.copy_to_nonoverlapping(to, TWO);
            } else {
                from.copy_to_nonoverlapping(to, HEAD_BYTES);
            }
        }
        // The compiler must not look at the source again in place of the copy.
        compiler_fence(Ordering::SeqCst);
        self.0.get(..record.len).unwrap_or(&self.0)
    }
}

#[cfg(test)]
mod tests;

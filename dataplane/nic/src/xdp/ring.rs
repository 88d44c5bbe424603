//! The four rings that a socket shares with the kernel.
//!
//! Invariant: one thread on our side; slots between the two indices belong to the consumer, the others to the
//! producer. An index is published with Release after its slots were written (or read), and the other side's is read
//! with Acquire before. The kernel's index is clamped to the size and slots are masked, so whatever it holds, no
//! access leaves the mapping. Called by the queue; never makes a system call after the mapping was made.
#![allow(unsafe_code)]

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::xdp::{XdpDesc, XdpDescOptions, XdpRingOffset};

use super::umem::{CHUNK_BYTES, Chunk, Slot};

/// Flag of a ring: the kernel sleeps and wants a system call.
const NEED_WAKEUP: u32 = 1;

/// A mapping that ends with its owner.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `Shared::map` with this length; the ring that points into it is dropped with it.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Both indices, the flags and the slots of a ring.
struct Shared<T> {
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    flags: Option<NonNull<AtomicU32>>,
    slots: NonNull<T>,
    entries: u32,
    _mapping: Option<Mapping>,
}

// SAFETY: the pointers are into a mapping that the ring owns; one thread at a time uses it, through `&mut`.
unsafe impl<T: Send> Send for Shared<T> {}

impl<T: Copy> Shared<T> {
    /// Maps the ring of `entries` entries at `page_offset` of the socket.
    fn map(fd: BorrowedFd<'_>, page_offset: u64, at: &XdpRingOffset, entries: u32) -> Result<Self, Errno> {
        assert!(entries.is_power_of_two(), "rings have a power of two of entries");
        let slots_at = usize::try_from(at.desc).map_err(|_| Errno::OVERFLOW)?;
        let len = slots_at + entries as usize * size_of::<T>();
        let index = |offset: u64| -> Result<usize, Errno> {
            let offset = usize::try_from(offset).map_err(|_| Errno::OVERFLOW)?;
            let fits =
                offset + size_of::<AtomicU32>() <= len && offset.is_multiple_of(align_of::<AtomicU32>());
            if fits { Ok(offset) } else { Err(Errno::INVAL) }
        };
        let (producer, consumer) = (index(at.producer)?, index(at.consumer)?);
        let flags = at.flags.map(index).transpose()?;
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                fd,
                page_offset,
            )?
        };
        let base = NonNull::new(base.cast::<u8>()).ok_or(Errno::NOMEM)?;
        let mapping = Mapping { base, len };
        // SAFETY: all offsets were checked against `len`; the slots begin at a multiple of 64 in every kernel.
        unsafe {
            Ok(Shared {
                producer: base.add(producer).cast(),
                consumer: base.add(consumer).cast(),
                flags: flags.map(|offset| base.add(offset).cast()),
                slots: base.add(slots_at).cast(),
                entries,
                _mapping: Some(mapping),
            })
        }
    }

    fn producer(&self) -> &AtomicU32 {
        // SAFETY: inside the mapping, aligned; shared memory is only read and written atomically.
        unsafe { self.producer.as_ref() }
    }

    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { self.consumer.as_ref() }
    }

    fn slot(&self, index: u32) -> NonNull<T> {
        // SAFETY: the masked index is below `entries`, which is what the mapping holds.
        unsafe { self.slots.add((index & (self.entries - 1)) as usize) }
    }

    fn needs_wakeup(&self) -> bool {
        // The flag must not be read before our index is visible, or both sides could wait for each other.
        fence(Ordering::SeqCst);
        // SAFETY: inside the mapping, aligned.
        self.flags.is_some_and(|flags| unsafe { flags.as_ref() }.load(Ordering::Relaxed) & NEED_WAKEUP != 0)
    }
}

/// Our end of a ring into which we produce.
struct Producer<T> {
    shared: Shared<T>,
    /// Next slot to write; published by [`Producer::publish`].
    head: u32,
    /// What the kernel had taken when we last looked.
    tail: u32,
}

impl<T: Copy> Producer<T> {
    fn new(shared: Shared<T>) -> Self {
        let head = shared.producer().load(Ordering::Relaxed);
        let tail = shared.consumer().load(Ordering::Acquire);
        Producer { shared, head, tail }
    }

    fn used(&self) -> u32 {
        self.head.wrapping_sub(self.tail).min(self.shared.entries)
    }

    /// Writes an entry; false when the ring is full.
    fn push(&mut self, value: T) -> bool {
        if self.used() == self.shared.entries {
            self.tail = self.shared.consumer().load(Ordering::Acquire);
            if self.used() == self.shared.entries {
                return false;
            }
        }
        // SAFETY: the slot is inside the mapping; the consumer has taken its old entry (Acquire above) and does not
        // read it again before `publish`.
        unsafe { self.shared.slot(self.head).write(value) };
        self.head = self.head.wrapping_add(1);
        true
    }

    /// True when `count` more entries can be written.
    fn has_room(&mut self, count: u32) -> bool {
        if self.shared.entries - self.used() < count {
            self.tail = self.shared.consumer().load(Ordering::Acquire);
        }
        self.shared.entries - self.used() >= count
    }

    /// Hands all written entries to the kernel.
    fn publish(&mut self) {
        self.shared.producer().store(self.head, Ordering::Release);
    }

    /// Entries that the kernel has not taken yet.
    fn pending(&mut self) -> u32 {
        self.tail = self.shared.consumer().load(Ordering::Acquire);
        self.used()
    }
}

/// Our end of a ring from which we consume.
struct Consumer<T> {
    shared: Shared<T>,
    /// What the kernel had produced when we last looked.
    head: u32,
    /// Next slot to read; published by [`Consumer::release`].
    tail: u32,
}

impl<T: Copy> Consumer<T> {
    fn new(shared: Shared<T>) -> Self {
        let tail = shared.consumer().load(Ordering::Relaxed);
        let head = shared.producer().load(Ordering::Acquire);
        Consumer { shared, head, tail }
    }

    /// Entries to read.
    fn available(&mut self) -> u32 {
        self.head = self.shared.producer().load(Ordering::Acquire);
        self.head.wrapping_sub(self.tail).min(self.shared.entries)
    }

    fn pop(&mut self) -> Option<T> {
        if self.head == self.tail && self.available() == 0 {
            return None;
        }
        // SAFETY: the slot is inside the mapping; the kernel wrote it before it published the index (Acquire) and
        // does not write it again before `release`.
        let value = unsafe { self.shared.slot(self.tail).read() };
        self.tail = self.tail.wrapping_add(1);
        Some(value)
    }

    /// The entry `ahead` places after the next one, without taking it.
    fn peek(&mut self, ahead: u32) -> Option<T> {
        if ahead >= self.head.wrapping_sub(self.tail).min(self.shared.entries) && ahead >= self.available() {
            return None;
        }
        // SAFETY: as for `pop`; the entry stays unread.
        Some(unsafe { self.shared.slot(self.tail.wrapping_add(ahead)).read() })
    }

    /// Gives the slots that were read back to the kernel.
    fn release(&mut self) {
        self.shared.consumer().store(self.tail, Ordering::Release);
    }
}

/// Empty chunks, to the kernel.
pub(super) struct FillRing(Producer<u64>);

impl FillRing {
    /// Maps it.
    pub fn map(fd: BorrowedFd<'_>, at: &XdpRingOffset, entries: u32) -> Result<Self, Errno> {
        let shared = Shared::map(fd, rustix::net::xdp::XDP_UMEM_PGOFF_FILL_RING, at, entries)?;
        Ok(FillRing(Producer::new(shared)))
    }

    /// Gives a chunk away; a full ring gives it back.
    pub fn push(&mut self, chunk: Chunk) -> Result<(), Chunk> {
        let address = chunk.into_address();
        // SAFETY: on a full ring the address is still ours alone.
        if self.0.push(address) { Ok(()) } else { Err(unsafe { Chunk::from_kernel(address) }) }
    }

    /// Makes what was pushed visible.
    pub fn publish(&mut self) {
        self.0.publish();
    }

    /// True when the kernel waits for a system call before it takes more.
    pub fn needs_wakeup(&self) -> bool {
        self.0.shared.needs_wakeup()
    }
}

/// Received frames, from the kernel.
pub(super) struct RxRing(Consumer<XdpDesc>);

impl RxRing {
    /// Maps it.
    pub fn map(fd: BorrowedFd<'_>, at: &XdpRingOffset, entries: u32) -> Result<Self, Errno> {
        let shared = Shared::map(fd, rustix::net::xdp::XDP_PGOFF_RX_RING, at, entries)?;
        Ok(RxRing(Consumer::new(shared)))
    }

    /// True when something waits.
    pub fn waits(&mut self) -> bool {
        self.0.available() != 0
    }

    /// Descriptors of the next frame; `None` if there is none, or not all of it yet.
    pub fn next_frame(&mut self) -> Option<u32> {
        let mut ahead = 0;
        while self.0.peek(ahead)?.options.contains(XdpDescOptions::XDP_PKT_CONTD) {
            ahead += 1;
        }
        Some(ahead + 1)
    }

    /// The next descriptor: its chunk, where in the chunk its bytes begin, and how many they are.
    pub fn pop(&mut self) -> Option<(Chunk, u32, u32)> {
        let desc = self.0.pop()?;
        let offset = (desc.addr % u64::from(CHUNK_BYTES)) as u32;
        // SAFETY: the kernel hands the chunk back with this descriptor.
        Some((unsafe { Chunk::from_kernel(desc.addr) }, offset, desc.len))
    }

    /// Gives the slots back.
    pub fn release(&mut self) {
        self.0.release();
    }
}

/// Frames to send, to the kernel, and what it hands back when they are sent.
pub(super) struct TxRings {
    frames: Producer<XdpDesc>,
    completions: CompletionRing,
    slot_bytes: u32,
    /// For each slot, its chunks that the kernel has.
    away: Box<[u8]>,
}

impl TxRings {
    /// Maps the ring of frames beside the ring of completions, for `slots` slots of `slot_bytes` bytes.
    pub fn map(
        fd: BorrowedFd<'_>,
        at: &XdpRingOffset,
        entries: u32,
        completions: CompletionRing,
        (slots, slot_bytes): (u32, u32),
    ) -> Result<Self, Errno> {
        let shared = Shared::map(fd, rustix::net::xdp::XDP_PGOFF_TX_RING, at, entries)?;
        let away = vec![0; slots as usize].into_boxed_slice();
        Ok(TxRings { frames: Producer::new(shared), completions, slot_bytes, away })
    }

    /// Gives a slot away whose first `len` bytes are a frame; without room for all its descriptors, gives it back.
    pub fn push(&mut self, slot: Slot, len: u32) -> Result<(), Slot> {
        let parts = len.div_ceil(CHUNK_BYTES);
        if len == 0 || len > self.slot_bytes || !self.frames.has_room(parts) {
            return Err(slot);
        }
        let index = slot.into_index();
        if let Some(away) = self.away.get_mut(index as usize) {
            *away = parts as u8;
        }
        let start = u64::from(index) * u64::from(self.slot_bytes);
        for part in 0..parts {
            let (at, last) = (part * CHUNK_BYTES, part + 1 == parts);
            let options = if last { XdpDescOptions::empty() } else { XdpDescOptions::XDP_PKT_CONTD };
            let len = if last { len - at } else { CHUNK_BYTES };
            // There is room: see above.
            self.frames.push(XdpDesc { addr: start + u64::from(at), len, options });
        }
        Ok(())
    }

    /// Makes what was pushed visible.
    pub fn publish(&mut self) {
        self.frames.publish();
    }

    /// Descriptors that the kernel has not taken yet.
    pub fn pending(&mut self) -> u32 {
        self.frames.pending()
    }

    /// True when the kernel waits for a system call before it sends.
    pub fn needs_wakeup(&self) -> bool {
        self.frames.shared.needs_wakeup()
    }

    /// Moves all slots that came back whole to `free`.
    pub fn reclaim(&mut self, free: &mut Vec<Slot>) {
        let ring = &mut self.completions.0;
        let before = ring.tail;
        while let Some(address) = ring.pop() {
            let index = (address / u64::from(self.slot_bytes)) as u32;
            let Some(away) = self.away.get_mut(index as usize).filter(|away| **away != 0) else { continue };
            *away -= 1;
            if *away == 0 {
                // SAFETY: the last chunk that the kernel had of the slot came back with this entry.
                free.push(unsafe { Slot::from_kernel(index) });
            }
        }
        if ring.tail != before {
            ring.release();
        }
    }
}

/// Chunks of frames that were sent, from the kernel.
pub(super) struct CompletionRing(Consumer<u64>);

impl CompletionRing {
    /// Maps it.
    pub fn map(fd: BorrowedFd<'_>, at: &XdpRingOffset, entries: u32) -> Result<Self, Errno> {
        let shared = Shared::map(fd, rustix::net::xdp::XDP_UMEM_PGOFF_COMPLETION_RING, at, entries)?;
        Ok(CompletionRing(Consumer::new(shared)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// The memory of a ring, and both ends of it.
    struct Loop<T> {
        indices: Box<[AtomicU32; 2]>,
        _slots: Vec<T>,
        producer: Producer<T>,
        consumer: Consumer<T>,
    }

    impl<T: Copy> Loop<T> {
        fn of(entries: u32, start: u32, blank: T) -> Self {
            let indices = Box::new([AtomicU32::new(start), AtomicU32::new(start)]);
            let mut slots = vec![blank; entries as usize];
            let slots_at = NonNull::new(slots.as_mut_ptr()).unwrap();
            let end = || view(&indices, slots_at, entries);
            let (producer, consumer) = (Producer::new(end()), Consumer::new(end()));
            Loop { indices, _slots: slots, producer, consumer }
        }

        /// The same ring once more, for the side under test.
        fn end(&self) -> Shared<T> {
            view(&self.indices, self.producer.shared.slots, self.producer.shared.entries)
        }
    }

    impl Loop<u64> {
        fn new(entries: u32, start: u32) -> Self {
            Loop::of(entries, start, 0)
        }
    }

    fn view<T>(indices: &[AtomicU32; 2], slots: NonNull<T>, entries: u32) -> Shared<T> {
        let [producer, consumer] = indices;
        let (producer, consumer) = (NonNull::from(producer), NonNull::from(consumer));
        Shared { producer, consumer, flags: None, slots, entries, _mapping: None }
    }

    proptest! {
        /// Random steps of both ends agree with a queue, also where the indices wrap.
        #[test]
        fn a_ring_is_a_queue(log in 0u32..6, start in prop_oneof![Just(0u32), Just(u32::MAX - 5), any::<u32>()],
                             steps in proptest::collection::vec(0u8..4, 1..400)) {
            let entries = 1 << log;
            let mut ring = Loop::new(entries, start);
            let (mut written, mut visible, mut reading) = (VecDeque::new(), VecDeque::new(), 0usize);
            for (value, step) in steps.into_iter().enumerate() {
                let value = value as u64;
                match step {
                    0 => {
                        let room = written.len() + visible.len() + reading < entries as usize;
                        prop_assert_eq!(ring.producer.push(value), room);
                        if room { written.push_back(value); }
                    }
                    1 => { ring.producer.publish(); visible.append(&mut written); }
                    2 => {
                        let expected: Option<u64> = visible.pop_front();
                        reading += usize::from(expected.is_some());
                        prop_assert_eq!(ring.consumer.pop(), expected);
                    }
                    _ => { ring.consumer.release(); reading = 0; }
                }
                prop_assert_eq!(ring.consumer.available() as usize, visible.len());
                for ahead in 0..=entries {
                    prop_assert_eq!(ring.consumer.peek(ahead), visible.get(ahead as usize).copied());
                    let room = entries as usize - written.len() - visible.len() - reading;
                    prop_assert_eq!(ring.producer.has_room(ahead), ahead as usize <= room);
                }
                prop_assert_eq!(ring.producer.pending() as usize, written.len() + visible.len() + reading);
            }
        }

        /// The kernel shows frames in the receive ring before it publishes that it took their chunks from the fill ring
        /// (`xsk_flush`): all chunks can come back while the ring still looks full of them.
        #[test]
        fn the_fill_ring_takes_back_what_the_kernel_has_not_said_it_took(log in 0u32..8, start in any::<u32>(),
                                                                         rounds in 1usize..4) {
            let chunks = 1u32 << log;
            let mut ring = Loop::new(super::super::socket::SocketPlan::fill_entries(chunks), start);
            for chunk in 0..chunks { prop_assert!(ring.producer.push(chunk.into())); }
            ring.producer.publish();
            for _ in 0..rounds {
                let taken: Vec<u64> = std::iter::from_fn(|| ring.consumer.pop()).collect();
                prop_assert_eq!(taken.len(), chunks as usize);
                for chunk in taken { prop_assert!(ring.producer.push(chunk), "chunk {} is lost", chunk); }
                ring.consumer.release();
                ring.producer.publish();
            }
        }

        /// Frames of several chunks: a slot comes back once, when the last of its chunks did, in whatever order.
        #[test]
        fn a_slot_is_free_when_all_of_it_came_back(lens in proptest::collection::vec(1u32..=3 * CHUNK_BYTES, 1..20),
                                                   shuffle in any::<u64>()) {
            let slots = 4u32;
            let blank = XdpDesc { addr: 0, len: 0, options: XdpDescOptions::empty() };
            let mut frames = Loop::of(16, 0, blank);
            let mut done = Loop::new(16, 0);
            let (slot_bytes, away) = (3 * CHUNK_BYTES, vec![0; slots as usize].into_boxed_slice());
            let mut tx = TxRings {
                frames: Producer::new(frames.end()),
                completions: CompletionRing(Consumer::new(done.end())),
                slot_bytes,
                away,
            };
            // SAFETY: the rights to the slots of this memory, made once; there is no memory behind them.
            let mut free: Vec<Slot> = (0..slots).map(|index| unsafe { Slot::from_kernel(index) }).collect();
            for (round, len) in lens.into_iter().enumerate() {
                let slot = free.remove(0);
                prop_assert_eq!(tx.push(slot, len), Ok(()));
                tx.publish();
                let mut taken: Vec<XdpDesc> = std::iter::from_fn(|| frames.consumer.pop()).collect();
                frames.consumer.release();
                prop_assert_eq!(taken.iter().map(|d| d.len).sum::<u32>(), len);
                prop_assert_eq!(taken.len() as u32, len.div_ceil(CHUNK_BYTES));
                let contd = |d: &XdpDesc| d.options.contains(XdpDescOptions::XDP_PKT_CONTD);
                prop_assert_eq!(taken.iter().filter(|d| contd(d)).count(), taken.len() - 1);
                for d in &taken {
                    prop_assert!(d.addr % u64::from(CHUNK_BYTES) + u64::from(d.len) <= u64::from(CHUNK_BYTES));
                }
                let turn = (shuffle >> (round % 60)) as usize % taken.len();
                taken.rotate_left(turn);
                while let Some(desc) = taken.pop() {
                    prop_assert_eq!(free.len(), slots as usize - 1);
                    prop_assert!(done.producer.push(desc.addr));
                    done.producer.publish();
                    tx.reclaim(&mut free);
                }
                prop_assert_eq!(free.len(), slots as usize);
            }
        }

        /// Whatever the other side writes into its index, no access leaves the slots.
        #[test]
        fn a_wild_index_stays_inside(wild in any::<u32>()) {
            let mut ring = Loop::new(8, 0);
            ring.consumer.shared.producer().store(wild, Ordering::Release);
            prop_assert!(ring.consumer.available() <= 8);
            let _ = ring.consumer.pop();
            let mut ring = Loop::new(8, 0);
            ring.producer.shared.consumer().store(wild, Ordering::Release);
            prop_assert!(ring.producer.pending() <= 8);
            let _ = ring.producer.push(1);
        }
    }
}

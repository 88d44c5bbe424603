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

use super::umem::{CHUNK_BYTES, Chunk};

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

    /// Frames that wait.
    pub fn available(&mut self) -> u32 {
        self.0.available()
    }

    /// The next frame: its chunk, where in the chunk it begins, and its length.
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

/// Frames to send, to the kernel.
pub(super) struct TxRing(Producer<XdpDesc>);

impl TxRing {
    /// Maps it.
    pub fn map(fd: BorrowedFd<'_>, at: &XdpRingOffset, entries: u32) -> Result<Self, Errno> {
        let shared = Shared::map(fd, rustix::net::xdp::XDP_PGOFF_TX_RING, at, entries)?;
        Ok(TxRing(Producer::new(shared)))
    }

    /// Gives a chunk away whose first `len` bytes are a frame; a full ring gives it back.
    pub fn push(&mut self, chunk: Chunk, len: u32) -> Result<(), Chunk> {
        let addr = chunk.into_address();
        let sent = self.0.push(XdpDesc { addr, len, options: XdpDescOptions::empty() });
        // SAFETY: on a full ring the address is still ours alone.
        if sent { Ok(()) } else { Err(unsafe { Chunk::from_kernel(addr) }) }
    }

    /// Makes what was pushed visible.
    pub fn publish(&mut self) {
        self.0.publish();
    }

    /// Frames that the kernel has not taken yet.
    pub fn pending(&mut self) -> u32 {
        self.0.pending()
    }

    /// True when the kernel waits for a system call before it sends.
    pub fn needs_wakeup(&self) -> bool {
        self.0.shared.needs_wakeup()
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

    /// Moves all chunks that came back to `free`.
    pub fn reclaim(&mut self, free: &mut Vec<Chunk>) {
        let before = self.0.tail;
        while let Some(address) = self.0.pop() {
            // SAFETY: the kernel hands the chunk back with this entry.
            free.push(unsafe { Chunk::from_kernel(address) });
        }
        if self.0.tail != before {
            self.0.release();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    /// The memory of a ring, and both ends of it.
    struct Loop {
        _indices: Box<[AtomicU32; 2]>,
        _slots: Vec<u64>,
        producer: Producer<u64>,
        consumer: Consumer<u64>,
    }

    impl Loop {
        fn new(entries: u32, start: u32) -> Self {
            let indices = Box::new([AtomicU32::new(start), AtomicU32::new(start)]);
            let mut slots = vec![0u64; entries as usize];
            let slots_at = NonNull::new(slots.as_mut_ptr()).unwrap();
            let shared = || Shared {
                producer: NonNull::from(&indices[0]),
                consumer: NonNull::from(&indices[1]),
                flags: None,
                slots: slots_at,
                entries,
                _mapping: None,
            };
            let (producer, consumer) = (Producer::new(shared()), Consumer::new(shared()));
            Loop { _indices: indices, _slots: slots, producer, consumer }
        }
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

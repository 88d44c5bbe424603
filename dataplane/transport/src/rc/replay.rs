//! Responder resources: the READs that were accepted last, what of them is still to be sent, and what is to be sent
//! again (roce-wire 6.4 - 6.6).
//!
//! Owns a ring of the last `max_dest_rd_atomic` READs. Those from `emit` on still owe their responses, in PSN order;
//! older ones are remembered so that a duplicate request can be answered again. A duplicate never touches anything
//! but this ring: the stream in progress does not notice it. Data is read from memory when a response leaves.

use alloc::boxed::Box;
use alloc::vec;

use ferroce_wire::{Part, PathMtu, Psn, RemoteAddr, Reth, Rkey};

use crate::qp::MAX_RD_ATOMIC;
use crate::segment::{self, distance};

const SLOTS: u32 = MAX_RD_ATOMIC as u32;
const _: () = assert!(SLOTS.is_power_of_two(), "indices run free and are masked");

/// A READ that was accepted.
#[derive(Clone, Copy, Default)]
struct Read {
    first: Psn,
    /// PSNs of its responses.
    packets: u32,
    addr: RemoteAddr,
    rkey: Rkey,
    len: u32,
    /// The response in progress: its first packet, the next to send, and the end.
    start: u32,
    next: u32,
    end: u32,
    /// Waits in the ring of repeats.
    queued: bool,
}

/// One response packet to send.
pub(super) struct ReadPacket {
    pub(super) psn: Psn,
    pub(super) part: Part,
    pub(super) addr: RemoteAddr,
    pub(super) rkey: Rkey,
    pub(super) len: u32,
}

/// What came of a duplicate READ request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Repeat {
    /// Will be answered again.
    Queued,
    /// Its answer has not left yet.
    Owed,
    /// Not remembered, or not what was asked for then.
    Stale,
}

/// Responder resources of a queue pair.
pub(super) struct Reads {
    slots: Box<[Read]>,
    /// Free-running indices of READs to answer again, first asked first.
    repeats: Box<[u32]>,
    repeat_head: u32,
    repeat_tail: u32,
    /// `max_dest_rd_atomic`.
    limit: u32,
    /// READs accepted since reset, up to `limit`.
    held: u32,
    /// Free-running: oldest READ whose response is not complete, and the next to be accepted.
    emit: u32,
    tail: u32,
}

impl Reads {
    pub(super) fn new() -> Reads {
        Reads {
            slots: vec![Read::default(); SLOTS as usize].into_boxed_slice(),
            repeats: vec![0; SLOTS as usize].into_boxed_slice(),
            repeat_head: 0,
            repeat_tail: 0,
            limit: 0,
            held: 0,
            emit: 0,
            tail: 0,
        }
    }

    pub(super) fn start(&mut self, limit: u8) {
        self.abandon();
        self.limit = u32::from(limit).min(SLOTS);
        self.held = 0;
    }

    /// Holds at most `limit` from now on: the newest of what it holds stay. What is owed is still answered.
    pub(super) fn limit(&mut self, limit: u8) {
        self.limit = u32::from(limit).min(SLOTS);
        self.held = self.held.min(self.limit.max(self.owed()));
    }

    /// Forgets what is to be sent; what is remembered stays.
    pub(super) fn abandon(&mut self) {
        self.emit = self.tail;
        self.repeat_head = self.repeat_tail;
        for read in &mut self.slots {
            read.queued = false;
        }
    }

    /// READs whose response is not complete.
    #[inline]
    pub(super) fn owed(&self) -> u32 {
        self.tail.wrapping_sub(self.emit)
    }

    /// Whether another READ may be accepted.
    #[inline]
    pub(super) fn room(&self) -> bool {
        self.owed() < self.limit
    }

    /// Whether something is to be answered again.
    #[inline]
    pub(super) fn repeating(&self) -> bool {
        self.repeat_head != self.repeat_tail
    }

    /// Accepts a READ. The caller has asked for room.
    pub(super) fn push(&mut self, first: Psn, packets: u32, reth: &Reth) {
        let read = Read {
            first,
            packets,
            addr: reth.addr,
            rkey: reth.rkey,
            len: reth.len.0,
            start: 0,
            next: 0,
            end: packets,
            queued: false,
        };
        if let Some(slot) = self.slots.get_mut(slot(self.tail)) {
            *slot = read;
        }
        self.tail = self.tail.wrapping_add(1);
        self.held = self.held.saturating_add(1).min(self.limit);
    }

    /// A READ request that was accepted before came again, perhaps for its rest only.
    pub(super) fn repeat(&mut self, psn: Psn, reth: &Reth, mtu: PathMtu) -> Repeat {
        let Some(index) = self.find(psn) else { return Repeat::Stale };
        let pending = index.wrapping_sub(self.emit) < self.owed();
        let full = self.repeat_tail.wrapping_sub(self.repeat_head) >= SLOTS;
        let Some(read) = self.slots.get_mut(slot(index)) else { return Repeat::Stale };
        let number = distance(psn, read.first);
        let offset = segment::offset(number, mtu);
        // The same key, the address of this packet, and nothing beyond the end. A READ of 0 bytes names no address.
        let same = if read.len == 0 {
            reth.len.0 == 0
        } else {
            reth.rkey == read.rkey
                && reth.addr == read.addr.advance(u64::from(offset))
                && (1..=read.len.saturating_sub(offset)).contains(&reth.len.0)
        };
        if !same {
            return Repeat::Stale;
        }
        if pending {
            // Its turn is still to come. Where it has begun, it goes back to what was asked for.
            if number < read.next {
                read.start = number;
                read.next = number;
            }
            return Repeat::Owed;
        }
        read.start = number;
        read.next = number;
        read.end = number.saturating_add(segment::packets(reth.len.0, mtu)).min(read.packets);
        if !read.queued {
            if full {
                return Repeat::Stale;
            }
            read.queued = true;
            if let Some(place) = self.repeats.get_mut(slot(self.repeat_tail)) {
                *place = index;
            }
            self.repeat_tail = self.repeat_tail.wrapping_add(1);
        }
        Repeat::Queued
    }

    /// The response packet to send of READs that are answered again.
    pub(super) fn next_repeat(&mut self, mtu: PathMtu) -> Option<ReadPacket> {
        while self.repeating() {
            let index = self.repeats.get(slot(self.repeat_head)).copied()?;
            // Forgotten meanwhile: the peer sent new READs, so it has what it wanted of this one.
            if self.tail.wrapping_sub(index) <= self.held {
                return self.slots.get(slot(index)).map(|read| read.packet(mtu));
            }
            self.repeat_head = self.repeat_head.wrapping_add(1);
        }
        None
    }

    /// The response packet to send of the oldest READ that is owed one.
    #[inline]
    pub(super) fn next_owed(&self, mtu: PathMtu) -> Option<ReadPacket> {
        if self.owed() == 0 {
            return None;
        }
        self.slots.get(slot(self.emit)).map(|read| read.packet(mtu))
    }

    /// The packet of [`Reads::next_repeat`] was sent.
    pub(super) fn repeat_sent(&mut self) {
        let Some(index) = self.repeats.get(slot(self.repeat_head)).copied() else { return };
        let Some(read) = self.slots.get_mut(slot(index)) else { return };
        read.next = read.next.saturating_add(1);
        if read.next >= read.end {
            read.queued = false;
            self.repeat_head = self.repeat_head.wrapping_add(1);
        }
    }

    /// The packet of [`Reads::next_owed`] was sent.
    #[inline]
    pub(super) fn owed_sent(&mut self) {
        let Some(read) = self.slots.get_mut(slot(self.emit)) else { return };
        read.next = read.next.saturating_add(1);
        if read.next >= read.end {
            self.emit = self.emit.wrapping_add(1);
        }
    }

    /// The remembered READ that has `psn` among its responses; newest first. Only for duplicates.
    fn find(&self, psn: Psn) -> Option<u32> {
        (1..=self.held).map(|back| self.tail.wrapping_sub(back)).find(|index| {
            self.slots.get(slot(*index)).is_some_and(|read| distance(psn, read.first) < read.packets)
        })
    }
}

impl Read {
    #[inline]
    fn packet(&self, mtu: PathMtu) -> ReadPacket {
        let offset = segment::offset(self.next, mtu);
        ReadPacket {
            psn: self.first.advance(self.next),
            part: segment::part(self.start, self.next, self.end),
            addr: self.addr.advance(u64::from(offset)),
            rkey: self.rkey,
            len: segment::chunk(self.len, self.next, mtu),
        }
    }
}

#[inline]
const fn slot(index: u32) -> usize {
    (index & SLOTS.wrapping_sub(1)) as usize
}

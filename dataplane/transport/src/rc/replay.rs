//! Responder resources: the READs and atomics that were accepted last, what of them is still to be answered, and what
//! is to be answered again (roce-wire 6.4 - 6.6).
//!
//! Owns a ring of the last `max_dest_rd_atomic` of them. Those from `emit` on still owe their responses, in PSN order;
//! older ones are remembered so that a duplicate request can be answered again. A duplicate never touches anything
//! but this ring: the stream in progress does not notice it. Data of a READ is read from memory when a response
//! leaves; an atomic is executed when its answer leaves for the first time, and its result kept.

use alloc::boxed::Box;
use alloc::vec;

use ferroce_wire::{Part, PathMtu, Psn, RemoteAddr, Rkey};

use crate::qp::MAX_RD_ATOMIC;
use crate::segment::{self, distance};

/// Operation of an atomic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AtomicOp {
    CmpSwap { compare: u64, swap: u64 },
    FetchAdd { add: u64 },
}

/// What was accepted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Work {
    Read {
        addr: RemoteAddr,
        rkey: Rkey,
        len: u32,
    },
    Atomic {
        addr: RemoteAddr,
        rkey: Rkey,
        op: AtomicOp,
        /// What was there before; `None` until it is executed.
        result: Option<u64>,
    },
}

/// What a duplicate request asks for.
pub(super) enum Replay {
    Read { addr: RemoteAddr, rkey: Rkey, len: u32 },
    Atomic { addr: RemoteAddr, rkey: Rkey, op: AtomicOp },
}

/// A READ or atomic that was accepted.
#[derive(Clone, Copy)]
pub(super) struct Slot {
    pub(super) first: Psn,
    /// PSNs of its responses.
    pub(super) packets: u32,
    pub(super) work: Work,
    /// The response in progress: its first packet, the next to send, and the end.
    pub(super) start: u32,
    pub(super) next: u32,
    pub(super) end: u32,
    /// Where its last packet ends in a READ, in bytes: a duplicate may ask for less than there is.
    pub(super) stop: u32,
    /// Waits in the ring of repeats.
    pub(super) queued: bool,
}

impl Slot {
    const EMPTY: Slot = Slot {
        first: Psn::new(0),
        packets: 0,
        work: Work::Read { addr: RemoteAddr(0), rkey: Rkey(0), len: 0 },
        start: 0,
        next: 0,
        end: 0,
        stop: 0,
        queued: false,
    };
}

/// One response packet to send.
pub(super) struct Due {
    pub(super) psn: Psn,
    pub(super) what: DueWhat,
}

/// What it carries.
pub(super) enum DueWhat {
    Read {
        part: Part,
        addr: RemoteAddr,
        rkey: Rkey,
        len: u32,
    },
    /// To be executed first if there is no result.
    Atomic {
        addr: RemoteAddr,
        rkey: Rkey,
        op: AtomicOp,
        result: Option<u64>,
    },
}

/// What came of a duplicate request.
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
#[derive(Default)]
pub(super) struct Resources {
    /// As many as `limit`, rounded up to a power of two: indices run free and are masked.
    pub(super) slots: Box<[Slot]>,
    /// Free-running indices of what is to be answered again, first asked first. As many places as slots.
    pub(super) repeats: Box<[u32]>,
    pub(super) repeat_head: u32,
    pub(super) repeat_tail: u32,
    /// `max_dest_rd_atomic`.
    pub(super) limit: u32,
    /// Accepted since reset, up to `limit`.
    pub(super) held: u32,
    /// Free-running: the oldest whose response is not complete, and the next to be accepted.
    pub(super) emit: u32,
    pub(super) tail: u32,
}

impl Resources {
    /// Room for `limit` of them.
    pub(super) fn new(limit: u8) -> Resources {
        let mut resources = Resources::default();
        resources.limit(limit);
        resources
    }

    /// Holds at most `limit` from now on: the newest of what it holds stay. What is owed is still answered.
    pub(super) fn limit(&mut self, limit: u8) {
        let limit = u32::from(limit.min(MAX_RD_ATOMIC));
        if limit == self.limit {
            return;
        }
        self.limit = limit;
        self.held = self.held.min(limit.max(self.owed()));
        let places = match limit.max(self.held) {
            0 => 0,
            n => n.next_power_of_two(),
        };
        let mut slots = vec![Slot::EMPTY; places as usize].into_boxed_slice();
        let mut repeats = vec![0; places as usize].into_boxed_slice();
        for back in 1..=self.held {
            let index = self.tail.wrapping_sub(back);
            if let (Some(old), Some(new)) = (self.slot(index), slots.get_mut(place(index, places))) {
                *new = *old;
            }
        }
        // Repeats of what was just forgotten fall away.
        let mut tail = self.repeat_head;
        for at in 0..self.repeat_tail.wrapping_sub(self.repeat_head) {
            let from = place(self.repeat_head.wrapping_add(at), self.places());
            let Some(index) = self.repeats.get(from).copied() else { break };
            if self.tail.wrapping_sub(index) <= self.held
                && let Some(new) = repeats.get_mut(place(tail, places))
            {
                *new = index;
                tail = tail.wrapping_add(1);
            }
        }
        self.repeat_tail = tail;
        self.slots = slots;
        self.repeats = repeats;
    }

    /// Forgets everything: the queue pair is in error, and no duplicate will be looked at.
    pub(super) fn abandon(&mut self) {
        self.emit = self.tail;
        self.held = 0;
        self.repeat_head = self.repeat_tail;
    }

    /// READs and atomics whose response is not complete.
    #[inline]
    pub(super) fn owed(&self) -> u32 {
        self.tail.wrapping_sub(self.emit)
    }

    /// Whether another may be accepted.
    #[inline]
    pub(super) fn room(&self) -> bool {
        self.owed() < self.limit
    }

    /// Whether something is to be answered again.
    #[inline]
    pub(super) fn repeating(&self) -> bool {
        self.repeat_head != self.repeat_tail
    }

    /// Accepts one. The caller has asked for room.
    pub(super) fn push(&mut self, first: Psn, packets: u32, work: Work) {
        let at = self.tail;
        let stop = match work {
            Work::Read { len, .. } => len,
            Work::Atomic { .. } => 0,
        };
        if let Some(slot) = self.slot_mut(at) {
            *slot = Slot { first, packets, work, start: 0, next: 0, end: packets, stop, queued: false };
        }
        self.tail = at.wrapping_add(1);
        self.held = self.held.saturating_add(1).min(self.limit);
    }

    /// A request that was accepted before came again, a READ perhaps for its rest only.
    pub(super) fn repeat(&mut self, psn: Psn, again: &Replay, mtu: PathMtu) -> Repeat {
        let Some(index) = self.find(psn) else { return Repeat::Stale };
        let pending = index.wrapping_sub(self.emit) < self.owed();
        let full = self.repeat_tail.wrapping_sub(self.repeat_head) >= self.places();
        let Some(slot) = self.slot_mut(index) else { return Repeat::Stale };
        let number = distance(psn, slot.first);
        let offset = segment::offset(number, mtu);
        let Some(bytes) = same(&slot.work, again, offset) else { return Repeat::Stale };
        if pending {
            // Its turn is still to come. Where it has begun, it goes back to what was asked for.
            if number < slot.next {
                slot.start = number;
                slot.next = number;
            }
            return Repeat::Owed;
        }
        slot.start = number;
        slot.next = number;
        slot.end = number.saturating_add(segment::packets(bytes, mtu)).min(slot.packets);
        slot.stop = offset.saturating_add(bytes);
        if !slot.queued {
            if full {
                return Repeat::Stale;
            }
            slot.queued = true;
            let at = place(self.repeat_tail, self.places());
            if let Some(place) = self.repeats.get_mut(at) {
                *place = index;
            }
            self.repeat_tail = self.repeat_tail.wrapping_add(1);
        }
        Repeat::Queued
    }

    /// The response packet to send of what is answered again.
    pub(super) fn next_repeat(&mut self, mtu: PathMtu) -> Option<Due> {
        while self.repeating() {
            let index = self.repeats.get(place(self.repeat_head, self.places())).copied()?;
            // Forgotten meanwhile: the peer sent new ones, so it has what it wanted of this.
            if self.tail.wrapping_sub(index) <= self.held {
                return self.slot(index).map(|slot| slot.due(mtu));
            }
            self.repeat_head = self.repeat_head.wrapping_add(1);
        }
        None
    }

    /// The response packet to send of the oldest that is owed one.
    #[inline]
    pub(super) fn next_owed(&self, mtu: PathMtu) -> Option<Due> {
        if self.owed() == 0 {
            return None;
        }
        self.slot(self.emit).map(|slot| slot.due(mtu))
    }

    /// The packet of [`Resources::next_repeat`] was sent.
    pub(super) fn repeat_sent(&mut self) {
        let Some(index) = self.repeats.get(place(self.repeat_head, self.places())).copied() else { return };
        let Some(slot) = self.slot_mut(index) else { return };
        slot.next = slot.next.saturating_add(1);
        if slot.next >= slot.end {
            slot.queued = false;
            self.repeat_head = self.repeat_head.wrapping_add(1);
        }
    }

    /// What [`Resources::next_repeat`] belongs to is not answered again after all.
    pub(super) fn repeat_dropped(&mut self) {
        let Some(index) = self.repeats.get(place(self.repeat_head, self.places())).copied() else { return };
        if let Some(slot) = self.slot_mut(index) {
            slot.queued = false;
        }
        self.repeat_head = self.repeat_head.wrapping_add(1);
    }

    /// The packet of [`Resources::next_owed`] was sent.
    #[inline]
    pub(super) fn owed_sent(&mut self) {
        let at = self.emit;
        let Some(slot) = self.slot_mut(at) else { return };
        slot.next = slot.next.saturating_add(1);
        if slot.next >= slot.end {
            self.emit = at.wrapping_add(1);
        }
    }

    /// The atomic of [`Resources::next_owed`] was executed: it never will be again.
    pub(super) fn executed(&mut self, was: u64) {
        if let Some(Slot { work: Work::Atomic { result, .. }, .. }) = self.slot_mut(self.emit) {
            *result = Some(was);
        }
    }

    /// What is remembered that has `psn` among its responses; newest first. Only for duplicates.
    fn find(&self, psn: Psn) -> Option<u32> {
        (1..=self.held)
            .map(|back| self.tail.wrapping_sub(back))
            .find(|index| self.slot(*index).is_some_and(|slot| distance(psn, slot.first) < slot.packets))
    }

    #[inline]
    fn places(&self) -> u32 {
        // At most 128.
        u32::try_from(self.slots.len()).unwrap_or(0)
    }

    /// Room for `held` of another place, whose slots are still to be [`Resources::put`].
    pub(super) fn moved(limit: u8, held: u32, emit: u32, tail: u32) -> Resources {
        let limit = u32::from(limit.min(MAX_RD_ATOMIC));
        let places = match limit.max(held) {
            0 => 0,
            n => n.next_power_of_two(),
        };
        Resources {
            slots: vec![Slot::EMPTY; places as usize].into_boxed_slice(),
            repeats: vec![0; places as usize].into_boxed_slice(),
            repeat_head: 0,
            repeat_tail: 0,
            limit,
            held,
            emit,
            tail,
        }
    }

    /// Puts one that is held in its place.
    pub(super) fn put(&mut self, index: u32, slot: Slot) {
        if let Some(place) = self.slot_mut(index) {
            *place = slot;
        }
    }

    /// One that is held is to be answered again, after those that already are. False if it does not say so itself, or
    /// was asked for already.
    pub(super) fn ask_again(&mut self, index: u32) -> bool {
        let twice = (self.repeat_head..self.repeat_tail).any(|at| self.repeat_at(at) == Some(index));
        let at = place(self.repeat_tail, self.places());
        let Some(place) = self.repeats.get_mut(at) else { return false };
        *place = index;
        self.repeat_tail = self.repeat_tail.wrapping_add(1);
        !twice && self.slot(index).is_some_and(|slot| slot.queued)
    }

    /// What stands in the ring of repeats.
    pub(super) fn repeat_at(&self, at: u32) -> Option<u32> {
        self.repeats.get(place(at, self.places())).copied()
    }

    #[inline]
    pub(super) fn slot(&self, index: u32) -> Option<&Slot> {
        self.slots.get(place(index, self.places()))
    }

    #[inline]
    fn slot_mut(&mut self, index: u32) -> Option<&mut Slot> {
        let at = place(index, self.places());
        self.slots.get_mut(at)
    }
}

/// Bytes that a duplicate asks for, if it asks for what was accepted then: `offset` is where its PSN lies in it. An
/// atomic has none.
fn same(work: &Work, again: &Replay, offset: u32) -> Option<u32> {
    match (work, again) {
        // The same key, the address of this packet, and nothing beyond the end. A READ of 0 bytes names no address.
        (Work::Read { len: 0, .. }, Replay::Read { len: 0, .. }) => Some(0),
        (Work::Read { addr, rkey, len }, Replay::Read { addr: at, rkey: key, len: want }) => {
            let fits = key == rkey
                && *at == addr.advance(u64::from(offset))
                && (1..=len.saturating_sub(offset)).contains(want);
            fits.then_some(*want)
        }
        (Work::Atomic { addr, rkey, op, .. }, Replay::Atomic { addr: at, rkey: key, op: same }) => {
            (addr == at && rkey == key && op == same).then_some(0)
        }
        (Work::Read { .. }, Replay::Atomic { .. }) | (Work::Atomic { .. }, Replay::Read { .. }) => None,
    }
}

impl Slot {
    #[inline]
    fn due(&self, mtu: PathMtu) -> Due {
        let what = match self.work {
            Work::Read { addr, rkey, len: _ } => DueWhat::Read {
                part: segment::part(self.start, self.next, self.end),
                addr: addr.advance(u64::from(segment::offset(self.next, mtu))),
                rkey,
                len: segment::chunk(self.stop, self.next, mtu),
            },
            Work::Atomic { addr, rkey, op, result } => DueWhat::Atomic { addr, rkey, op, result },
        };
        Due { psn: self.first.advance(self.next), what }
    }
}

/// Place of a free-running index among `places`, a power of two; past every place if there are none.
#[inline]
const fn place(index: u32, places: u32) -> usize {
    (index & places.wrapping_sub(1)) as usize
}

//! Work queues: fixed rings, allocated when the queue pair is made.
//!
//! Owns posted work requests from post until their completion is read. Three free-running indices, in this order:
//! `reported` (next completion to hand out), `done` (oldest request not finished), `tail` (next to post). A send stays
//! in its slot until it is reported, so that sending it again needs no second copy; scatter/gather entries and inline
//! data lie in flat arrays beside the slots. Never looks at keys or packets.

use alloc::boxed::Box;
use alloc::vec;

use ferroce_mem::{Access, KeyFault, Memory, Payload, PdId};
use ferroce_verbs::{PostError, RecvWr, SendFlags, SendOp, Sge, UdDest, WcStatus};
use ferroce_wire::{Imm, Psn, Qpn, Rkey};

use crate::srq::Srq;

/// A ring of work requests with their scatter/gather entries.
pub(crate) struct Queue<T> {
    slots: Box<[T]>,
    sges: Box<[Sge]>,
    max_sge: u32,
    depth: u32,
    mask: u32,
    /// Oldest request whose keys may still be held: never beyond `reported`.
    released: u32,
    /// Next completion to hand out.
    pub(crate) reported: u32,
    /// Oldest request that is not finished.
    pub(crate) done: u32,
    /// Where the next request goes.
    pub(crate) tail: u32,
}

/// A request with scatter/gather entries whose keys are held while it is posted.
pub(crate) trait Holds {
    /// Number of its entries.
    fn sges(&self) -> u32;
    /// Whether their keys are held.
    fn held(&mut self) -> &mut bool;
}

impl<T: Copy + Default + Holds> Queue<T> {
    /// Holds the keys of the request at `index`; false, and none is held, if one can't be.
    #[inline]
    pub(crate) fn hold(&mut self, index: u32, memory: &Memory) -> bool {
        let Some(entry) = self.get(index) else { return false };
        let list = self.sges(index, entry.sges());
        if !hold_all(list, memory) {
            return false;
        }
        if let Some(entry) = self.get_mut(index) {
            *entry.held() = true;
        }
        true
    }

    /// Releases the keys of what was reported.
    #[inline]
    pub(crate) fn release(&mut self, memory: &Memory) {
        while self.released != self.reported {
            self.release_at(self.released, memory);
            self.released = self.released.wrapping_add(1);
        }
    }

    /// Releases the keys of everything that is posted.
    pub(crate) fn release_all(&mut self, memory: &Memory) {
        self.release(memory);
        for back in 0..self.len() {
            self.release_at(self.reported.wrapping_add(back), memory);
        }
    }

    /// Holds the keys of everything that is posted, as far as they can be: after an import.
    pub(crate) fn hold_posted(&mut self, memory: &Memory) {
        for back in 0..self.len() {
            self.hold(self.reported.wrapping_add(back), memory);
        }
    }

    fn release_at(&mut self, index: u32, memory: &Memory) {
        let Some(slot) = self.slots.get_mut((index & self.mask) as usize) else { return };
        if core::mem::take(slot.held()) {
            let count = slot.sges();
            for sge in self.sges(index, count).iter().filter(|sge| sge.length > 0) {
                memory.release(sge.lkey);
            }
        }
    }
}

/// Holds the key of each entry that has bytes; false, and none is held, if one can't be.
fn hold_all(list: &[Sge], memory: &Memory) -> bool {
    let used = || list.iter().filter(|sge| sge.length > 0);
    for (done, sge) in used().enumerate() {
        if !memory.hold(sge.lkey) {
            used().take(done).for_each(|sge| memory.release(sge.lkey));
            return false;
        }
    }
    true
}

impl<T: Copy + Default> Queue<T> {
    pub(crate) fn new(depth: u32, max_sge: u32) -> Self {
        let slots = depth.max(1).next_power_of_two();
        Queue {
            slots: vec![T::default(); slots as usize].into_boxed_slice(),
            sges: vec![Sge::default(); slots.saturating_mul(max_sge) as usize].into_boxed_slice(),
            max_sge,
            depth,
            mask: slots.wrapping_sub(1),
            released: 0,
            reported: 0,
            done: 0,
            tail: 0,
        }
    }

    /// Requests that it can hold.
    pub(crate) const fn depth(&self) -> u32 {
        self.depth
    }

    /// Scatter/gather entries that a request of it can have.
    pub(crate) const fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// Requests that are posted and not reported.
    #[inline]
    pub(crate) fn len(&self) -> u32 {
        self.tail.wrapping_sub(self.reported)
    }

    /// Requests that are posted and not finished.
    #[inline]
    pub(crate) fn unfinished(&self) -> u32 {
        self.tail.wrapping_sub(self.done)
    }

    /// Requests that may still be posted.
    #[inline]
    pub(crate) fn free(&self) -> u32 {
        self.depth.saturating_sub(self.len())
    }

    /// The request at `index`, if it is posted and not yet reported.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        if !self.holds(index) {
            return None;
        }
        self.slots.get((index & self.mask) as usize)
    }

    /// As [`Queue::get`].
    #[inline]
    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        if !self.holds(index) {
            return None;
        }
        self.slots.get_mut((index & self.mask) as usize)
    }

    /// The first `count` scatter/gather entries of the request at `index`.
    #[inline]
    pub(crate) fn sges(&self, index: u32, count: u32) -> &[Sge] {
        let start = (index & self.mask).wrapping_mul(self.max_sge) as usize;
        self.sges.get(start..start.wrapping_add(count as usize)).unwrap_or(&[])
    }

    /// Takes the newest request back.
    pub(crate) fn unpush(&mut self) {
        self.tail = self.tail.wrapping_sub(1);
    }

    /// Appends a request. The caller has checked room and number of entries, and has released what was reported.
    #[inline]
    pub(crate) fn push(&mut self, entry: T, sges: &[Sge]) {
        let slot = self.tail & self.mask;
        if let Some(place) = self.slots.get_mut(slot as usize) {
            *place = entry;
        }
        let start = slot.wrapping_mul(self.max_sge) as usize;
        if let Some(place) = self.sges.get_mut(start..start.wrapping_add(sges.len())) {
            place.copy_from_slice(sges);
        }
        self.tail = self.tail.wrapping_add(1);
    }

    /// The oldest request is somebody else's now, with the hold on its keys.
    pub(crate) fn forget_oldest(&mut self) {
        self.done = self.done.wrapping_add(1);
        self.reported = self.done;
        self.released = self.done;
    }

    /// Stands empty at `index`.
    pub(crate) fn start_at(&mut self, index: u32) {
        self.released = index;
        self.reported = index;
        self.done = index;
        self.tail = index;
    }

    /// What is not finished is finished with `fill`.
    pub(crate) fn finish_all(&mut self, fill: impl Fn(&mut T)) {
        while self.done != self.tail {
            let index = self.done;
            if let Some(entry) = self.get_mut(index) {
                fill(entry);
            }
            self.done = index.wrapping_add(1);
        }
    }

    /// Forgets everything that is posted; its keys are still to be released.
    pub(crate) fn clear(&mut self) {
        self.reported = self.tail;
        self.done = self.tail;
    }

    #[inline]
    fn holds(&self, index: u32) -> bool {
        index.wrapping_sub(self.reported) < self.len()
    }
}

/// A send work request in its slot.
#[derive(Clone, Copy)]
pub(crate) struct SendEntry {
    pub(crate) wr_id: u64,
    pub(crate) op: SendOp,
    /// Message bytes.
    pub(crate) len: u32,
    /// First PSN; valid once started.
    pub(crate) first: Psn,
    /// PSNs it occupies; valid once started.
    pub(crate) packets: u32,
    /// Number among the messages that take a receive at the peer; valid once started, for those.
    pub(crate) receive: u32,
    /// Scatter/gather entries in use.
    pub(crate) sges: u32,
    /// They are held ([`Memory::hold`]).
    pub(crate) held: bool,
    /// As posted; SIGNALED also where the queue pair signals everything.
    pub(crate) flags: SendFlags,
    /// Why it failed, once it has.
    pub(crate) outcome: Option<WcStatus>,
}

/// Kinds of send requests, by how they are sent and answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// SEND or WRITE: acknowledged, by later answers too.
    Data,
    /// Answered by its data only.
    Read,
    /// Answered by its result only.
    Atomic,
    /// Does not travel.
    Local,
}

impl Holds for SendEntry {
    fn sges(&self) -> u32 {
        self.sges
    }
    fn held(&mut self) -> &mut bool {
        &mut self.held
    }
}

impl SendEntry {
    #[inline]
    pub(crate) const fn kind(&self) -> Kind {
        kind_of(&self.op)
    }

    /// Takes a receive at the peer.
    #[inline]
    pub(crate) const fn takes_receive(&self) -> bool {
        matches!(
            self.op,
            SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv { .. } | SendOp::WriteImm { .. }
        )
    }
}

/// Kind of an operation.
#[inline]
pub(crate) const fn kind_of(op: &SendOp) -> Kind {
    match op {
        SendOp::Send
        | SendOp::SendImm(_)
        | SendOp::SendInv { .. }
        | SendOp::Write { .. }
        | SendOp::WriteImm { .. } => Kind::Data,
        SendOp::Read { .. } => Kind::Read,
        SendOp::CmpSwap { .. } | SendOp::FetchAdd { .. } => Kind::Atomic,
        SendOp::BindMw { .. } | SendOp::LocalInv { .. } => Kind::Local,
    }
}

impl Default for SendEntry {
    fn default() -> Self {
        SendEntry {
            wr_id: 0,
            op: SendOp::Send,
            len: 0,
            first: Psn::default(),
            packets: 0,
            receive: 0,
            sges: 0,
            held: false,
            flags: SendFlags::empty(),
            outcome: None,
        }
    }
}

/// A receive work request in its slot, and what arrived in it.
#[derive(Clone, Copy)]
pub(crate) struct RecvEntry {
    pub(crate) wr_id: u64,
    /// Bytes of room.
    pub(crate) room: u32,
    /// Scatter/gather entries in use.
    pub(crate) sges: u32,
    /// They are held ([`Memory::hold`]).
    pub(crate) held: bool,
    pub(crate) status: WcStatus,
    /// Bytes that arrived.
    pub(crate) byte_len: u32,
    pub(crate) imm: Option<Imm>,
    /// Key that the message ended.
    pub(crate) invalidated: Option<Rkey>,
    /// Who sent it (UD); its room began with the GRH area.
    pub(crate) src_qpn: Option<Qpn>,
    pub(crate) solicited: bool,
    /// Consumed by a WRITE with immediate, not by a SEND.
    pub(crate) by_write: bool,
}

impl Holds for RecvEntry {
    fn sges(&self) -> u32 {
        self.sges
    }
    fn held(&mut self) -> &mut bool {
        &mut self.held
    }
}

impl RecvEntry {
    /// A receive as posted, with room for `bytes`.
    pub(crate) fn posted(wr: &RecvWr<'_>, bytes: u64) -> Result<RecvEntry, PostError> {
        Ok(RecvEntry {
            wr_id: wr.wr_id,
            // More room than any message can need is no fault.
            room: u32::try_from(bytes).unwrap_or(u32::MAX),
            sges: u32::try_from(wr.sg_list.len()).map_err(|_| PostError::TooManySge)?,
            ..RecvEntry::default()
        })
    }
}

impl Default for RecvEntry {
    fn default() -> Self {
        RecvEntry {
            wr_id: 0,
            room: 0,
            sges: 0,
            held: false,
            status: WcStatus::Success,
            byte_len: 0,
            imm: None,
            invalidated: None,
            src_qpn: None,
            solicited: false,
            by_write: false,
        }
    }
}

/// Where the bytes of a message to send come from.
pub(crate) enum Source<'q> {
    Sges(&'q [Sge]),
    Inline(&'q [u8]),
}

/// Sends, with inline data, and where datagrams go.
pub(crate) struct SendQueue {
    pub(crate) queue: Queue<SendEntry>,
    inline: Box<[u8]>,
    max_inline: u32,
    /// One per slot for UD, none otherwise.
    dests: Box<[Option<UdDest>]>,
}

impl SendQueue {
    pub(crate) fn new(depth: u32, max_sge: u32, max_inline: u32, datagrams: bool) -> Self {
        let queue = Queue::new(depth, max_sge);
        let slots = depth.max(1).next_power_of_two();
        let inline = vec![0; (slots as usize).saturating_mul(max_inline as usize)].into_boxed_slice();
        let dests = vec![None; if datagrams { slots as usize } else { 0 }].into_boxed_slice();
        SendQueue { queue, inline, max_inline, dests }
    }

    /// Keeps the inline data of the request that is pushed next.
    pub(crate) fn stage_inline(&mut self, bytes: &[u8]) {
        let start = self.inline_start(self.queue.tail);
        if let Some(place) = self.inline.get_mut(start..start.wrapping_add(bytes.len())) {
            place.copy_from_slice(bytes);
        }
    }

    /// Keeps where the datagram that is pushed next goes.
    pub(crate) fn stage_dest(&mut self, dest: &UdDest) {
        let slot = (self.queue.tail & self.queue.mask) as usize;
        if let Some(place) = self.dests.get_mut(slot) {
            *place = Some(*dest);
        }
    }

    /// Where the datagram at `index` goes; `None` for every other service.
    #[inline]
    pub(crate) fn dest(&self, index: u32) -> Option<&UdDest> {
        self.dests.get((index & self.queue.mask) as usize)?.as_ref()
    }

    /// Where the message of the request at `index` comes from.
    #[inline]
    pub(crate) fn source(&self, index: u32, entry: &SendEntry) -> Source<'_> {
        if entry.flags.contains(SendFlags::INLINE) {
            let start = self.inline_start(index);
            Source::Inline(self.inline.get(start..start.wrapping_add(entry.len as usize)).unwrap_or(&[]))
        } else {
            Source::Sges(self.queue.sges(index, entry.sges))
        }
    }

    #[inline]
    fn inline_start(&self, index: u32) -> usize {
        ((index & self.queue.mask) as usize).wrapping_mul(self.max_inline as usize)
    }
}

/// Receives. The one at `done` is the next, or the current, to be filled.
pub(crate) struct RecvQueue {
    pub(crate) queue: Queue<RecvEntry>,
}

impl RecvQueue {
    pub(crate) fn new(depth: u32, max_sge: u32) -> Self {
        RecvQueue { queue: Queue::new(depth, max_sge) }
    }

    /// The receive that the message in progress, or the next one, goes to.
    #[inline]
    pub(crate) fn current(&self) -> Option<&RecvEntry> {
        self.queue.get(self.queue.done)
    }

    /// Scatter list of [`RecvQueue::current`].
    #[inline]
    pub(crate) fn current_sges(&self) -> &[Sge] {
        match self.current() {
            Some(entry) => self.queue.sges(self.queue.done, entry.sges),
            None => &[],
        }
    }

    /// Takes the oldest receive of a shared queue, and the hold on its keys, if there is room for it here.
    #[inline]
    pub(crate) fn take_from(&mut self, srq: &mut Srq, memory: &Memory) -> bool {
        self.queue.release(memory);
        let Some((entry, sges)) = srq.oldest() else { return false };
        if self.queue.free() == 0 || entry.sges > self.queue.max_sge() {
            return false;
        }
        self.queue.push(*entry, sges);
        srq.taken();
        true
    }

    /// Finishes the current receive.
    #[inline]
    pub(crate) fn finish(&mut self, fill: impl FnOnce(&mut RecvEntry)) {
        let index = self.queue.done;
        if let Some(entry) = self.queue.get_mut(index) {
            fill(entry);
            self.queue.done = index.wrapping_add(1);
        }
    }
}

/// Where an offset of a message lies in its scatter/gather list. Moving forward costs one step per entry passed, so
/// a message that is walked in order is never searched from its start.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct SgeCursor {
    offset: u32,
    index: u32,
    used: u32,
}

impl SgeCursor {
    /// Moves to `offset`.
    #[inline]
    pub(crate) fn seek(&mut self, list: &[Sge], offset: u32) {
        if offset < self.offset {
            *self = SgeCursor::default();
        }
        let mut skip = offset.wrapping_sub(self.offset);
        self.offset = offset;
        while let Some(sge) = list.get(self.index as usize) {
            let room = sge.length.saturating_sub(self.used);
            if skip < room {
                self.used = self.used.wrapping_add(skip);
                return;
            }
            skip = skip.wrapping_sub(room);
            self.index = self.index.wrapping_add(1);
            self.used = 0;
        }
    }

    /// The pieces of the next `len` bytes.
    #[inline]
    pub(crate) fn pieces<'s>(&self, list: &'s [Sge], len: u32) -> Pieces<'s> {
        Pieces { list: list.get(self.index as usize..).unwrap_or(&[]), used: self.used, left: len }
    }
}

/// Contiguous pieces of a scatter/gather list; stops when the list ends.
#[derive(Clone)]
pub(crate) struct Pieces<'s> {
    list: &'s [Sge],
    used: u32,
    left: u32,
}

impl Iterator for Pieces<'_> {
    type Item = Sge;

    #[inline]
    fn next(&mut self) -> Option<Sge> {
        while self.left > 0 {
            let (sge, rest) = self.list.split_first()?;
            let length = sge.length.saturating_sub(self.used).min(self.left);
            let addr = sge.addr.wrapping_add(u64::from(self.used));
            if length == self.left {
                // The next piece, if one is asked for, lies behind this one in the same entry.
                self.used = self.used.wrapping_add(length);
            } else {
                self.list = rest;
                self.used = 0;
            }
            self.left = self.left.wrapping_sub(length);
            if length > 0 {
                return Some(Sge { addr, length, lkey: sge.lkey });
            }
        }
        None
    }
}

/// Copies `payload` to `offset` of a message whose scatter list is `list`. The caller has checked that it fits; the
/// keys are checked here again, since they may have gone bad after the post.
pub(crate) fn scatter(
    memory: &Memory,
    pd: PdId,
    list: &[Sge],
    cursor: &SgeCursor,
    payload: &Payload<'_>,
) -> Result<(), KeyFault> {
    let len = u32::try_from(payload.len()).map_err(|_| KeyFault::OutOfBounds)?;
    let mut placed: usize = 0;
    for piece in cursor.pieces(list, len) {
        let target = memory.check_local(pd, piece.lkey, piece.addr, piece.length, Access::LOCAL_WRITE)?;
        let done = if piece.length == len {
            target.place(0, payload)
        } else {
            payload.slice(placed, piece.length as usize).is_some_and(|part| target.place(0, &part))
        };
        if !done {
            return Err(KeyFault::OutOfBounds);
        }
        placed = placed.saturating_add(piece.length as usize);
    }
    if placed == payload.len() { Ok(()) } else { Err(KeyFault::OutOfBounds) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use ferroce_mem::Lkey;

    fn list() -> [Sge; 4] {
        let sge = |addr, length| Sge { addr, length, lkey: Lkey(1) };
        [sge(1000, 10), sge(2000, 0), sge(3000, 5), sge(4000, 100)]
    }

    fn walk(offset: u32, len: u32) -> Vec<(u64, u32)> {
        let mut cursor = SgeCursor::default();
        cursor.seek(&list(), offset);
        cursor.pieces(&list(), len).map(|p| (p.addr, p.length)).collect()
    }

    #[test]
    fn pieces_cross_entries() {
        assert_eq!(walk(0, 10), [(1000, 10)]);
        assert_eq!(walk(0, 12), [(1000, 10), (3000, 2)]);
        assert_eq!(walk(8, 10), [(1008, 2), (3000, 5), (4000, 3)]);
        assert_eq!(walk(15, 4), [(4000, 4)]);
        assert_eq!(walk(0, 0), []);
        assert_eq!(walk(110, 100), [(4095, 5)], "stops where the list ends");
    }

    #[test]
    fn seeking_in_steps_equals_seeking_at_once() {
        for first in 0..=115 {
            for second in 0..=115 {
                let mut cursor = SgeCursor::default();
                cursor.seek(&list(), first);
                cursor.seek(&list(), second);
                let stepped: Vec<_> = cursor.pieces(&list(), 9).map(|p| (p.addr, p.length)).collect();
                assert_eq!(stepped, walk(second, 9), "{first} then {second}");
            }
        }
    }

    #[test]
    fn indices_wrap() {
        let mut queue: Queue<SendEntry> = Queue::new(3, 1);
        queue.tail = u32::MAX;
        queue.clear();
        for id in 0..3 {
            queue.push(SendEntry { wr_id: id, ..SendEntry::default() }, &[]);
        }
        assert_eq!(queue.free(), 0);
        assert_eq!(queue.get(u32::MAX).map(|e| e.wr_id), Some(0));
        assert_eq!(queue.get(1).map(|e| e.wr_id), Some(2));
        assert!(queue.get(2).is_none());
        queue.reported = queue.reported.wrapping_add(1);
        assert_eq!(queue.free(), 1);
    }
}

//! Completion queues: fixed rings.
//!
//! Owns the completions between their arrival and `poll_cq`. Invariant: `len + reserved <= capacity`; a send reserves
//! its entry when it is posted, so that its completion always finds room. A receive does not: when its completion finds
//! no room the queue has overflowed, and the worker moves the queue pair to error (libibverbs' rule). Called by the
//! worker only.

use std::sync::Arc;

use ferroce_verbs::{CqId, Wc, WcStatus};

use crate::channel::CqEvents;

/// Most entries of one queue.
pub const MAX_CQE: u32 = 1 << 16;

/// The queue had no room for a completion that had no entry reserved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Overflow;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Armed {
    No,
    Any,
    Solicited,
}

/// One completion queue.
#[derive(Debug)]
pub struct Cq {
    id: CqId,
    entries: Box<[Wc]>,
    head: usize,
    len: usize,
    reserved: usize,
    armed: Armed,
    /// Where its events go, if not to the device's queue of events.
    events: Option<Arc<CqEvents>>,
}

impl Cq {
    /// An empty queue of `cqe` entries (at least 1); its events go to `events`, if there are any.
    pub fn new(id: CqId, cqe: u32, events: Option<Arc<CqEvents>>) -> Self {
        let entries = vec![Wc::EMPTY; cqe.clamp(1, MAX_CQE) as usize].into_boxed_slice();
        Cq { id, entries, head: 0, len: 0, reserved: 0, armed: Armed::No, events }
    }

    /// Its handle.
    pub fn id(&self) -> CqId {
        self.id
    }

    /// Tells its channel of an event. False if it has none: then the event is the device's.
    pub fn publish(&self) -> bool {
        self.events.as_ref().inspect(|events| events.publish()).is_some()
    }

    /// True when there is nothing to poll.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reserves the entry of a send; false when there is none.
    #[inline]
    pub fn reserve(&mut self) -> bool {
        let room = self.len + self.reserved < self.entries.len();
        self.reserved += usize::from(room);
        room
    }

    /// Gives reserved entries back: sends that will not complete.
    #[inline]
    pub fn release(&mut self, entries: u32) {
        self.reserved = self.reserved.saturating_sub(entries as usize);
    }

    /// Adds the completion of a send, into its reserved entry. True when an event is due.
    #[inline]
    pub fn push_reserved(&mut self, wc: Wc) -> bool {
        self.reserved = self.reserved.saturating_sub(1);
        self.push(wc).unwrap_or(false)
    }

    /// Adds a completion without a reserved entry. True when an event is due.
    #[inline]
    pub fn push(&mut self, wc: Wc) -> Result<bool, Overflow> {
        if self.len + self.reserved >= self.entries.len() {
            return Err(Overflow);
        }
        let mut at = self.head + self.len;
        if at >= self.entries.len() {
            at -= self.entries.len();
        }
        if let Some(slot) = self.entries.get_mut(at) {
            *slot = wc;
            self.len += 1;
        }
        let due = match self.armed {
            Armed::No => false,
            Armed::Any => true,
            Armed::Solicited => wc.solicited || wc.status != WcStatus::Success,
        };
        if due {
            self.armed = Armed::No;
        }
        Ok(due)
    }

    /// Moves completions to `out`; returns how many.
    #[inline]
    pub fn poll(&mut self, out: &mut [Wc]) -> usize {
        let mut taken = 0;
        for wc in out.iter_mut().take(self.len) {
            let Some(entry) = self.entries.get(self.head) else { break };
            *wc = *entry;
            self.head += 1;
            if self.head == self.entries.len() {
                self.head = 0;
            }
            taken += 1;
        }
        self.len -= taken;
        taken
    }

    /// Asks for one event at the next (solicited) completion. As in libibverbs, completions that are already there cause
    /// none: poll once more after arming. `Any` is not weakened by a later `Solicited`.
    pub fn arm(&mut self, solicited_only: bool) {
        if !solicited_only {
            self.armed = Armed::Any;
        } else if self.armed == Armed::No {
            self.armed = Armed::Solicited;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    fn wc(wr_id: u64) -> Wc {
        Wc { wr_id, status: WcStatus::Success, ..Wc::EMPTY }
    }

    #[test]
    fn a_reserved_entry_is_not_lost_to_receives() {
        let mut cq = Cq::new(CqId(1), 3, None);
        assert!(cq.reserve());
        assert_eq!(cq.push(wc(1)), Ok(false));
        assert_eq!(cq.push(wc(2)), Ok(false));
        assert_eq!(cq.push(wc(3)), Err(Overflow));
        assert!(!cq.reserve());
        cq.push_reserved(wc(4));
        let mut out = [Wc::EMPTY; 8];
        assert_eq!(cq.poll(&mut out), 3);
        assert_eq!(out[..3].iter().map(|w| w.wr_id).collect::<Vec<_>>(), [1, 2, 4]);
        assert!(cq.reserve());
    }

    #[test]
    fn events_are_due_once() {
        let mut cq = Cq::new(CqId(1), 8, None);
        cq.arm(true);
        assert_eq!(cq.push(wc(1)), Ok(false));
        assert_eq!(cq.push(Wc { solicited: true, ..wc(2) }), Ok(true));
        assert_eq!(cq.push(Wc { solicited: true, ..wc(3) }), Ok(false));
        cq.arm(false);
        cq.arm(true);
        assert_eq!(cq.push(wc(4)), Ok(true));
    }

    proptest! {
        #[test]
        fn agrees_with_a_deque(cap in 1..9u32, steps in prop::collection::vec((0..5u8, 0..4usize), 0..300)) {
            let mut cq = Cq::new(CqId(0), cap, None);
            let (mut model, mut reserved, mut n) = (VecDeque::new(), 0usize, 0u64);
            for (what, count) in steps {
                n += 1;
                let room = model.len() + reserved < cap as usize;
                match what {
                    0 => {
                        prop_assert_eq!(cq.reserve(), room);
                        reserved += usize::from(room);
                    }
                    1 if reserved > 0 => {
                        cq.push_reserved(wc(n));
                        reserved -= 1;
                        model.push_back(n);
                    }
                    2 => {
                        prop_assert_eq!(cq.push(wc(n)).is_ok(), room);
                        if room {
                            model.push_back(n);
                        }
                    }
                    3 if reserved > 0 => {
                        cq.release(1);
                        reserved -= 1;
                    }
                    _ => {
                        let mut out = [Wc::EMPTY; 4];
                        let got = cq.poll(&mut out[..count]);
                        let want: Vec<u64> = model.drain(..count.min(model.len())).collect();
                        prop_assert_eq!(out[..got].iter().map(|w| w.wr_id).collect::<Vec<_>>(), want);
                    }
                }
            }
        }
    }
}

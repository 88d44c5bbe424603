//! Egress scheduler of one port queue: whose turn it is to send.
//!
//! Owns one list of queue pairs with work per class. Strict classes go first, by number; the others share by deficit
//! round robin over bytes. Within a class each queue pair sends up to [`TURN_BYTES`] and goes to the tail. Everything is
//! O(1) in the number of queue pairs; one without work is on no list and costs nothing. Called by the worker. Never
//! looks at a packet.

use ferroce_verbs::ClassId;

/// Number of classes.
pub const MAX_CLASSES: usize = 8;
/// Bytes that a queue pair sends in one turn: several full packets, few enough that 64 queue pairs share a 100 Gbit/s
/// link within 100 us.
pub const TURN_BYTES: u32 = 16 * 1024;
/// What a class of weight 1 may send in one round; longer than any frame, so that each round moves on.
const ROUND_BYTES: i64 = 16 * 1024;
const NIL: u32 = u32::MAX;

/// How a class takes its share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Share {
    /// Before all weighted classes, and before strict classes with a higher number.
    Strict,
    /// A share in proportion to the weight, 1 ..= 255.
    Weighted(u8),
}

#[derive(Clone, Copy, Debug)]
struct Class {
    share: Share,
    head: u32,
    tail: u32,
    deficit: i64,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    next: u32,
    prev: u32,
    /// Bytes sent in this turn.
    spent: u32,
    /// Class it is queued in; [`MAX_CLASSES`] when it is on no list.
    class: u8,
}

/// The scheduler.
#[derive(Debug)]
pub struct Sched {
    links: Box<[Link]>,
    classes: [Class; MAX_CLASSES],
    /// The weighted class whose turn it is.
    turn: usize,
    queued: usize,
}

impl Sched {
    /// A scheduler for the slots `0 .. slots`; every class weighted alike.
    pub fn new(slots: usize) -> Self {
        let class = Class { share: Share::Weighted(1), head: NIL, tail: NIL, deficit: 0 };
        let idle = Link { next: NIL, prev: NIL, spent: 0, class: MAX_CLASSES as u8 };
        Sched {
            links: vec![idle; slots].into_boxed_slice(),
            classes: [class; MAX_CLASSES],
            turn: 0,
            queued: 0,
        }
    }

    /// Changes how a class takes its share; unknown classes are ignored.
    pub fn set_share(&mut self, class: ClassId, share: Share) {
        if let Some(c) = self.classes.get_mut(class.0 as usize) {
            c.share = share;
            c.deficit = 0;
        }
    }

    /// Queue pairs on the lists.
    pub fn queued(&self) -> usize {
        self.queued
    }

    /// Says that `slot` has something to send. Nothing changes if it is on a list already.
    #[inline]
    pub fn ready(&mut self, slot: u32, class: ClassId) {
        let Some(link) = self.links.get_mut(slot as usize) else { return };
        if (link.class as usize) < MAX_CLASSES {
            return;
        }
        link.spent = 0;
        self.append(slot, class.0 as usize % MAX_CLASSES);
        self.queued += 1;
    }

    /// Takes `slot` off its list, if it is on one.
    #[inline]
    pub fn remove(&mut self, slot: u32) {
        if self.links.get(slot as usize).is_some_and(|l| (l.class as usize) < MAX_CLASSES) {
            self.unlink(slot);
            self.queued -= 1;
        }
    }

    /// The slot that sends next; it stays at the head until [`Sched::sent`] or [`Sched::remove`] moves it.
    #[inline]
    pub fn next(&mut self) -> Option<u32> {
        if self.queued == 0 {
            return None;
        }
        if let Some(strict) = self.classes.iter().find(|c| c.share == Share::Strict && c.head != NIL) {
            return Some(strict.head);
        }
        // One round gives every class with work a positive deficit, hence two rounds always find one.
        for _ in 0..=2 * MAX_CLASSES {
            let class = &mut self.classes[self.turn];
            if class.head != NIL && class.share != Share::Strict && class.deficit > 0 {
                return Some(class.head);
            }
            if class.head == NIL {
                class.deficit = 0;
            }
            self.turn = (self.turn + 1) % MAX_CLASSES;
            let next = &mut self.classes[self.turn];
            if let (Share::Weighted(weight), true) = (next.share, next.head != NIL) {
                next.deficit += ROUND_BYTES * i64::from(weight.max(1));
            }
        }
        None
    }

    /// Books a frame of `bytes` that `slot` sent; at the end of its turn it goes to the tail.
    #[inline]
    pub fn sent(&mut self, slot: u32, bytes: usize) {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let Some(link) = self.links.get_mut(slot as usize) else { return };
        let class = link.class as usize;
        if class >= MAX_CLASSES {
            return;
        }
        link.spent = link.spent.saturating_add(bytes);
        self.classes[class].deficit -= i64::from(bytes);
        if link.spent >= TURN_BYTES {
            link.spent = 0;
            self.unlink(slot);
            self.append(slot, class);
        }
    }

    fn append(&mut self, slot: u32, class: usize) {
        let tail = self.classes[class].tail;
        let link = &mut self.links[slot as usize];
        (link.prev, link.next, link.class) = (tail, NIL, class as u8);
        match tail {
            NIL => self.classes[class].head = slot,
            t => self.links[t as usize].next = slot,
        }
        self.classes[class].tail = slot;
    }

    fn unlink(&mut self, slot: u32) {
        let Link { next, prev, class, .. } = self.links[slot as usize];
        match prev {
            NIL => self.classes[class as usize].head = next,
            p => self.links[p as usize].next = next,
        }
        match next {
            NIL => self.classes[class as usize].tail = prev,
            n => self.links[n as usize].prev = prev,
        }
        self.links[slot as usize].class = MAX_CLASSES as u8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(sched: &mut Sched, frames: usize, bytes: usize, slots: usize) -> Vec<usize> {
        let mut sent = vec![0; slots];
        for _ in 0..frames {
            let slot = sched.next().expect("work is queued");
            sent[slot as usize] += bytes;
            sched.sent(slot, bytes);
        }
        sent
    }

    #[test]
    fn queue_pairs_of_a_class_share_alike() {
        let mut s = Sched::new(8);
        (0..8).for_each(|slot| s.ready(slot, ClassId(0)));
        let sent = run(&mut s, 8 * 400, 4150, 8);
        assert!(sent.iter().all(|b| *b == sent[0]), "{sent:?}");
    }

    #[test]
    fn classes_share_by_weight() {
        let mut s = Sched::new(3);
        s.set_share(ClassId(1), Share::Weighted(3));
        s.ready(0, ClassId(0));
        s.ready(1, ClassId(1));
        s.ready(2, ClassId(1));
        let sent = run(&mut s, 40_000, 1100, 3);
        let share = (sent[1] + sent[2]) as f64 / sent[0] as f64;
        assert!((2.9..3.1).contains(&share), "{share}");
        assert!((sent[1] as f64 / sent[2] as f64 - 1.0).abs() < 0.01);
    }

    #[test]
    fn strict_goes_first_and_starves_no_one_when_idle() {
        let mut s = Sched::new(2);
        s.set_share(ClassId(5), Share::Strict);
        s.ready(0, ClassId(0));
        s.ready(1, ClassId(5));
        assert_eq!(run(&mut s, 100, 100, 2), [0, 10_000]);
        s.remove(1);
        assert_eq!(s.next(), Some(0));
        s.remove(0);
        assert_eq!((s.next(), s.queued()), (None, 0));
    }

    #[test]
    fn the_head_stays_until_it_is_moved() {
        let mut s = Sched::new(4);
        (0..4).for_each(|slot| s.ready(slot, ClassId(0)));
        assert_eq!(s.next(), Some(0));
        assert_eq!(s.next(), Some(0), "no room: it stays");
        s.remove(0);
        s.ready(0, ClassId(0));
        assert_eq!(s.next(), Some(1));
        s.remove(2);
        s.remove(2);
        s.remove(1);
        assert_eq!(s.next(), Some(3));
        assert_eq!(s.queued(), 2);
    }
}

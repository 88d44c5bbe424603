//! Timing wheel: one per worker.
//!
//! Owns when each of a fixed set of nodes fires. Eleven levels of 64 slots cover every 64-bit time; a node sits in the
//! level of the highest digit in which its time differs from now, so arming and cancelling are a few stores and a node
//! moves down at most ten times. Invariant: no armed node lies before `elapsed`, and all nodes of a level share the
//! digits above it with `elapsed`. Called by the worker; nodes are indices (two per queue pair). Never fires early,
//! never allocates after [`Wheel::new`].

use ferroce_transport::Instant;

/// A tick is 2^10 ns: finer than the shortest RNR timer (10 us) by ten times.
const TICK_SHIFT: u32 = 10;
const DIGIT_BITS: u32 = 6;
const SLOTS: usize = 1 << DIGIT_BITS;
const LEVELS: usize = 11;
const NIL: u32 = u32::MAX;
const NOWHERE: u16 = u16::MAX;

#[derive(Clone, Copy, Debug)]
struct Node {
    when: u64,
    next: u32,
    prev: u32,
    /// `level * 64 + slot`, or [`NOWHERE`].
    place: u16,
}

/// The wheel.
#[derive(Debug)]
pub struct Wheel {
    nodes: Box<[Node]>,
    heads: Box<[u32]>,
    occupied: [u64; LEVELS],
    elapsed: u64,
    armed: usize,
}

impl Wheel {
    /// A wheel for nodes `0 .. nodes`, none armed.
    pub fn new(nodes: usize, now: Instant) -> Self {
        Wheel {
            nodes: vec![Node { when: 0, next: NIL, prev: NIL, place: NOWHERE }; nodes].into_boxed_slice(),
            heads: vec![NIL; LEVELS * SLOTS].into_boxed_slice(),
            occupied: [0; LEVELS],
            elapsed: now.0 >> TICK_SHIFT,
            armed: 0,
        }
    }

    /// Nodes armed now.
    #[cfg(test)]
    pub fn armed(&self) -> usize {
        self.armed
    }

    /// Arms `node` for `at`, or moves it there. A time that has passed fires at the next tick.
    pub fn arm(&mut self, node: u32, at: Instant) {
        self.cancel(node);
        let when = at.0.div_ceil(1 << TICK_SHIFT).max(self.elapsed + 1);
        let Some(n) = self.nodes.get_mut(node as usize) else { return };
        n.when = when;
        self.armed += 1;
        self.link(node);
    }

    /// Disarms `node`; nothing happens if it is not armed.
    pub fn cancel(&mut self, node: u32) {
        if self.nodes.get(node as usize).is_some_and(|n| n.place != NOWHERE) {
            self.unlink(node);
            self.armed -= 1;
        }
    }

    /// Takes one node whose time has come. Ask again until `None`, or until the budget is spent.
    pub fn pop(&mut self, now: Instant) -> Option<u32> {
        let target = (now.0 >> TICK_SHIFT).max(self.elapsed);
        loop {
            let Some((place, deadline)) = self.next_place() else {
                self.elapsed = target;
                return None;
            };
            if deadline > target {
                self.elapsed = target;
                return None;
            }
            self.elapsed = deadline;
            let head = self.heads[place as usize];
            if (place as usize) < SLOTS {
                self.unlink(head);
                self.armed -= 1;
                return Some(head);
            }
            // The digit above has been reached: its nodes move to finer levels.
            let mut node = head;
            while node != NIL {
                let next = self.nodes[node as usize].next;
                self.unlink(node);
                self.link(node);
                node = next;
            }
        }
    }

    /// No node fires before this time; `None` when none is armed.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.next_place().map(|(_, deadline)| Instant(deadline << TICK_SHIFT))
    }

    fn next_place(&self) -> Option<(u16, u64)> {
        let level = self.occupied.iter().position(|bits| *bits != 0)?;
        let slot = self.occupied[level].trailing_zeros();
        let shift = DIGIT_BITS * level as u32;
        let above = match shift + DIGIT_BITS {
            s if s >= u64::BITS => 0,
            s => (self.elapsed >> s) << s,
        };
        Some(((level as u32 * SLOTS as u32 + slot) as u16, above | (u64::from(slot) << shift)))
    }

    fn link(&mut self, node: u32) {
        let when = self.nodes[node as usize].when;
        let level = ((when ^ self.elapsed) | 1).ilog2() / DIGIT_BITS;
        let slot = (when >> (level * DIGIT_BITS)) as usize & (SLOTS - 1);
        let place = level as usize * SLOTS + slot;
        let head = self.heads[place];
        let n = &mut self.nodes[node as usize];
        (n.next, n.prev, n.place) = (head, NIL, place as u16);
        if head != NIL {
            self.nodes[head as usize].prev = node;
        }
        self.heads[place] = node;
        self.occupied[level as usize] |= 1 << slot;
    }

    fn unlink(&mut self, node: u32) {
        let Node { next, prev, place, .. } = self.nodes[node as usize];
        if prev == NIL {
            self.heads[place as usize] = next;
            if next == NIL {
                self.occupied[place as usize / SLOTS] &= !(1 << (place as usize % SLOTS));
            }
        } else {
            self.nodes[prev as usize].next = next;
        }
        if next != NIL {
            self.nodes[next as usize].prev = prev;
        }
        self.nodes[node as usize].place = NOWHERE;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const NODES: u32 = 24;

    #[derive(Clone, Debug)]
    enum Step {
        Arm(u32, u64),
        Cancel(u32),
        Advance(u64),
        AdvanceWithBudget(u64, usize),
    }

    fn delay() -> impl Strategy<Value = u64> {
        prop_oneof![0..5_000u64, 0..2_000_000u64, 0..10_000_000_000u64, (0..64u32).prop_map(|b| 1 << b)]
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..NODES, delay()).prop_map(|(n, d)| Step::Arm(n, d)),
            2 => (0..NODES).prop_map(Step::Cancel),
            3 => delay().prop_map(|d| Step::Advance(d / 2)),
            1 => (delay(), 1..4usize).prop_map(|(d, b)| Step::AdvanceWithBudget(d / 2, b)),
        ]
    }

    fn ticks(at: u64) -> u64 {
        at.div_ceil(1 << TICK_SHIFT)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
        #[test]
        fn agrees_with_a_sorted_map(start in 0..u64::MAX / 4, steps in prop::collection::vec(step(), 1..200)) {
            let mut now = start;
            let mut wheel = Wheel::new(NODES as usize, Instant(now));
            // Model: node -> tick at which it must fire, never before the tick after it was armed.
            let mut model: BTreeMap<u32, u64> = BTreeMap::new();
            // The wheel's own idea of now only moves when it is polled.
            let mut polled = now >> TICK_SHIFT;
            for step in steps {
                match step {
                    Step::Arm(node, delay) => {
                        let at = now.saturating_add(delay);
                        wheel.arm(node, Instant(at));
                        model.insert(node, ticks(at).max(polled + 1));
                    }
                    Step::Cancel(node) => {
                        wheel.cancel(node);
                        model.remove(&node);
                    }
                    Step::Advance(by) => {
                        now = now.saturating_add(by).min(u64::MAX - 1);
                        let mut fired = Vec::new();
                        while let Some(node) = wheel.pop(Instant(now)) {
                            let when = model.remove(&node);
                            prop_assert!(when.is_some(), "node {node} fired but is not armed");
                            fired.push(when.unwrap_or(0));
                        }
                        prop_assert!(fired.is_sorted(), "out of order: {fired:?}");
                        prop_assert!(fired.iter().all(|when| *when <= now >> TICK_SHIFT), "fired early");
                        prop_assert!(model.values().all(|when| *when > now >> TICK_SHIFT), "missed one");
                        polled = now >> TICK_SHIFT;
                    }
                    Step::AdvanceWithBudget(by, budget) => {
                        now = now.saturating_add(by).min(u64::MAX - 1);
                        let mut all = true;
                        for _ in 0..budget {
                            let Some(node) = wheel.pop(Instant(now)) else { all = false; break };
                            let when = model.remove(&node);
                            prop_assert!(when.is_some_and(|when| when <= now >> TICK_SHIFT));
                            polled = polled.max(when.unwrap_or(0));
                        }
                        if !all {
                            polled = now >> TICK_SHIFT;
                        }
                    }
                }
                prop_assert_eq!(wheel.armed(), model.len());
                match (wheel.next_deadline(), model.values().min()) {
                    (None, None) => {}
                    (Some(deadline), Some(first)) => prop_assert!(deadline.0 >> TICK_SHIFT <= *first),
                    other => prop_assert!(false, "deadline and model disagree: {:?}", other),
                }
            }
        }
    }

    #[test]
    fn a_node_may_be_armed_while_others_fire() {
        let mut wheel = Wheel::new(2, Instant(0));
        wheel.arm(0, Instant(5_000));
        assert_eq!(wheel.pop(Instant(4_000)), None);
        assert_eq!(wheel.pop(Instant(6_000)), Some(0));
        wheel.arm(0, Instant(1));
        assert_eq!(
            wheel.pop(Instant(6_000)),
            None,
            "a past time fires at the next tick, not in the same poll"
        );
        assert_eq!(wheel.pop(Instant(8_000)), Some(0));
    }
}

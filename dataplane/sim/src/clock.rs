//! The virtual clock: events in order of time, and of their making where times are equal.
//!
//! Time passes only by [`Clock::pop`]. Nothing here or elsewhere in a run reads a real clock.

use std::collections::BTreeMap;

use ferroce_transport::Instant;

/// Pending events and the time.
#[derive(Debug)]
pub struct Clock<E> {
    now: Instant,
    made: u64,
    events: BTreeMap<(Instant, u64), E>,
}

impl<E> Default for Clock<E> {
    fn default() -> Self {
        // Not 0, so that a deadline computed from a forgotten time stands out.
        Clock { now: Instant(1_000_000_000), made: 0, events: BTreeMap::new() }
    }
}

impl<E> Clock<E> {
    /// The time.
    pub fn now(&self) -> Instant {
        self.now
    }
    /// Plans an event; one in the past happens now.
    pub fn at(&mut self, when: Instant, event: E) {
        self.events.insert((when.max(self.now), self.made), event);
        self.made += 1;
    }
    /// The next event, and its time becomes now.
    pub fn pop(&mut self) -> Option<E> {
        let ((when, _), event) = self.events.pop_first()?;
        self.now = when;
        Some(event)
    }
    /// When the next event happens.
    pub fn peek(&self) -> Option<Instant> {
        self.events.first_key_value().map(|((when, _), _)| *when)
    }
    /// Pending events.
    pub fn len(&self) -> usize {
        self.events.len()
    }
    /// True when nothing is pending.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }
}

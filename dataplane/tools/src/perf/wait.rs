//! How long a peer may be silent while its test runs on our memory.

use std::time::{Duration, Instant};

/// How long a peer may send neither a frame nor a word while its test runs on our memory.
const QUIET_LIMIT: Duration = Duration::from_secs(60);

/// Watches for signs of life.
pub struct Patience {
    seen: Option<u64>,
    since: Instant,
    limit: Duration,
}

impl Patience {
    /// From now on, with the usual limit.
    pub fn new() -> Self {
        Patience { seen: None, since: Instant::now(), limit: QUIET_LIMIT }
    }

    /// How long nothing moved, once that is too long. `life` changes with every sign of life.
    pub fn is_over(&mut self, life: u64) -> Option<Duration> {
        if self.seen != Some(life) {
            self.seen = Some(life);
            self.since = Instant::now();
        }
        let quiet = self.since.elapsed();
        (quiet >= self.limit).then_some(quiet)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patience_ends_without_life_and_not_with_it() {
        let mut patience = Patience { limit: Duration::ZERO, ..Patience::new() };
        assert!(patience.is_over(1).is_some());
        let mut patience = Patience { limit: Duration::from_secs(3600), ..Patience::new() };
        assert!((0..100).all(|life| patience.is_over(life).is_none()));
        patience.since = patience.since.checked_sub(Duration::from_secs(4000)).unwrap_or(patience.since);
        let before = patience.since;
        assert_eq!(patience.is_over(100), None, "a new sign of life");
        assert!(patience.since > before);
    }
}

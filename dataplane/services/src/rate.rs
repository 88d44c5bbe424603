//! Peak rate: the best window of a sliding span of messages, in constant time and memory.
//!
//! perftest takes the best of all pairs of a post and a completion, which costs the square of the iterations. Here a
//! window is at least [`RateWindow::span`] messages long and the times are those of passes of the worker.

/// Tracks the best rate over any window of at least `span` messages.
#[derive(Clone, Debug)]
pub struct RateWindow {
    span: u64,
    marks: Box<[(u64, u64)]>,
    oldest: usize,
    used: usize,
    best: f64,
}

const MARKS: usize = 1024;

impl RateWindow {
    /// Windows of at least `span` messages.
    #[must_use]
    pub fn new(span: u64) -> Self {
        RateWindow {
            span: span.max(1),
            marks: vec![(0, 0); MARKS].into_boxed_slice(),
            oldest: 0,
            used: 0,
            best: 0.0,
        }
    }

    /// Messages in the shortest window.
    #[must_use]
    pub fn span(&self) -> u64 {
        self.span
    }

    /// Tells that `done` messages were complete at `now_ns`. Both never fall.
    pub fn mark(&mut self, now_ns: u64, done: u64) {
        let newest = (self.oldest + self.used).wrapping_sub(1) % MARKS;
        if self.used > 0 && self.marks[newest].0 == now_ns {
            return;
        }
        // Keep one mark per fraction of the span, so that the ring always reaches back over a whole window.
        let step = self.span / (MARKS as u64 / 2);
        if self.used > 0 && done.saturating_sub(self.marks[newest].1) <= step && step > 0 {
            return;
        }
        while self.used > 1 && done.saturating_sub(self.marks[(self.oldest + 1) % MARKS].1) >= self.span {
            self.oldest = (self.oldest + 1) % MARKS;
            self.used -= 1;
        }
        if self.used > 0 {
            let (then, had) = self.marks[self.oldest];
            let messages = done.saturating_sub(had);
            if messages >= self.span && now_ns > then {
                self.best = self.best.max(messages as f64 / (now_ns - then) as f64 * 1e9);
            }
        }
        if self.used == MARKS {
            self.oldest = (self.oldest + 1) % MARKS;
            self.used -= 1;
        }
        self.marks[(self.oldest + self.used) % MARKS] = (now_ns, done);
        self.used += 1;
    }

    /// Best rate seen in messages per second; `None` if no window was complete.
    #[must_use]
    pub fn best(&self) -> Option<f64> {
        (self.best > 0.0).then_some(self.best)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_fast_stretch() {
        let mut window = RateWindow::new(100);
        let (mut now, mut done) = (0u64, 0u64);
        for pass in 0..400u64 {
            window.mark(now, done);
            done += 1;
            now += if (100..250).contains(&pass) { 1_000 } else { 10_000 };
        }
        let best = window.best().unwrap();
        assert!((best - 1e6).abs() < 1e6 * 0.02, "{best}");
    }

    #[test]
    fn too_few_messages_give_no_peak() {
        let mut window = RateWindow::new(100);
        for at in 0..99 {
            window.mark(at, at);
        }
        assert_eq!(window.best(), None);
    }

    #[test]
    fn spans_longer_than_the_ring_still_have_windows() {
        let mut window = RateWindow::new(1_000_000);
        for done in 0..5_000_000u64 {
            if done % 3 == 0 {
                window.mark(done * 100, done);
            }
        }
        let best = window.best().unwrap();
        assert!((best - 1e7).abs() < 1e5, "{best}");
    }
}

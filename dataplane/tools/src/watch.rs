//! Waiting for a test on the main thread without disturbing it.

use std::time::Duration;

/// Sleeps between looks: short at first, so that a short test ends soon, then long, so that a long one is left alone.
pub struct Pace(Duration);

impl Pace {
    /// From the beginning.
    pub fn new() -> Self {
        Pace(Duration::from_micros(500))
    }
    /// Sleeps once.
    pub fn sleep(&mut self) {
        std::thread::sleep(self.0);
        self.0 = (self.0 * 3 / 2).min(Duration::from_millis(20));
    }
}

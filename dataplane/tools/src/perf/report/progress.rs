//! Progress of long tests, on standard error: only where that is a terminal, or `--progress` asks for it.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::perf::plan::Item;

/// Tests that are shorter say nothing.
const FIRST: Duration = Duration::from_secs(2);
/// Between two lines.
const EVERY: Duration = Duration::from_secs(1);

/// What was said of the running test.
pub struct Progress {
    is_terminal: bool,
    wanted: bool,
    started: Instant,
    said: Option<Instant>,
}

impl Progress {
    /// As the options say.
    pub fn new(asked: bool) -> Self {
        let is_terminal = std::io::stderr().is_terminal();
        Progress { is_terminal, wanted: asked || is_terminal, started: Instant::now(), said: None }
    }

    /// A test begins.
    pub fn begin(&mut self) {
        self.clear();
        self.started = Instant::now();
    }

    /// Says how far it is, if it is time to.
    pub fn tell(&mut self, item: &Item, done: u64) {
        let ran = self.started.elapsed();
        let is_time = self.said.map_or(ran >= FIRST, |said| said.elapsed() >= EVERY);
        if !self.wanted || !is_time {
            return;
        }
        self.said = Some(Instant::now());
        let spec = &item.spec;
        let part = match spec.duration_ns {
            Some(ns) => format!("{:.0} of {:.0} s", ran.as_secs_f64(), ns as f64 / 1e9),
            None => {
                let total = (spec.iters + spec.warmup).saturating_mul(u64::from(spec.qps));
                let percent = done as f64 / total.max(1) as f64 * 100.0;
                format!("{percent:.0} %, {done} of {total} messages after {:.0} s", ran.as_secs_f64())
            }
        };
        let label = item.label.as_deref().map(|l| format!(", {l}")).unwrap_or_default();
        let text = format!("{}, {} bytes{label}: {part}", item.test(), spec.size);
        let mut out = std::io::stderr().lock();
        // A reader that has left does not end a measurement.
        let _ = if self.is_terminal { write!(out, "\r\x1b[K{text}") } else { writeln!(out, "{text}") };
        let _ = out.flush();
    }

    /// Takes the line away, before anything else is printed.
    pub fn clear(&mut self) {
        if self.said.take().is_some() && self.is_terminal {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

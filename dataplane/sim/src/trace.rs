//! The last packets of a run, kept as values and printed only when something failed or someone watches.

use std::collections::VecDeque;
use std::fmt;

use ferroce_transport::{DropReason, Instant};
use ferroce_wire::{Packet, ParseError};

use crate::link::Fate;

/// Packets kept.
const KEPT: usize = 60;

/// What happened to a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    /// Handed to the wire, which did this.
    Sent(Fate),
    /// Arrived and taken by its queue pair.
    Taken,
    /// Arrived and dropped by its queue pair.
    Dropped(DropReason),
    /// Arrived for a queue pair that is not there.
    NoSuchQp,
}

/// One line.
#[expect(
    clippy::large_enum_variant,
    reason = "nearly every line is about a packet, and a box for each costs more"
)]
#[derive(Clone, Copy, Debug)]
pub enum Line {
    /// About a packet.
    Packet(Packet, What),
    /// A frame that was refused as bytes.
    Refused(ParseError),
}

/// The last lines.
#[derive(Debug, Default)]
pub struct Trace {
    lines: VecDeque<(Instant, usize, Line)>,
    verbose: bool,
    /// Of all packets so far: equal for equal runs.
    digest: u64,
}

impl Trace {
    /// `verbose` prints each line to stderr as it comes.
    pub fn new(verbose: bool) -> Self {
        Trace { verbose, ..Trace::default() }
    }

    /// Adds a line about endpoint `at`.
    pub fn add(&mut self, now: Instant, at: usize, line: Line) {
        let code = match line {
            Line::Packet(packet, what) => {
                let kind = match what {
                    What::Sent(fate) => fate as u64,
                    What::Taken => 16,
                    What::Dropped(_) => 17,
                    What::NoSuchQp => 18,
                };
                kind | u64::from(packet.headers.bth.psn.get()) << 8
                    | u64::from(packet.headers.bth.opcode.to_u8()) << 32
                    | u64::from(packet.payload_len) << 40
            }
            Line::Refused(error) => 32 + error.index() as u64,
        };
        for word in [now.0, at as u64, code] {
            self.digest = (self.digest ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
        }
        if self.verbose {
            eprintln!("{}", Shown(now, at, line));
        }
        if self.lines.len() == KEPT {
            self.lines.pop_front();
        }
        self.lines.push_back((now, at, line));
    }

    /// A number that is equal for equal runs.
    pub fn digest(&self) -> u64 {
        self.digest
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (now, at, line) in &self.lines {
            writeln!(f, "{}", Shown(*now, *at, *line))?;
        }
        Ok(())
    }
}

struct Shown(Instant, usize, Line);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>13} ns  endpoint {}  ", self.0.0 - 1_000_000_000, self.1)?;
        match self.2 {
            Line::Packet(packet, What::Sent(fate)) => write!(f, "out {fate:?}: {packet}"),
            Line::Packet(packet, What::Taken) => write!(f, "in: {packet}"),
            Line::Packet(packet, What::Dropped(reason)) => write!(f, "in, dropped {reason:?}: {packet}"),
            Line::Packet(packet, What::NoSuchQp) => write!(f, "in, no such QP: {packet}"),
            Line::Refused(error) => write!(f, "in, refused: {error}"),
        }
    }
}

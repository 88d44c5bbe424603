//! One direction of a wire, with its faults.
//!
//! Owns what may happen to a frame between two endpoints: serialisation, delay, loss, duplication, reordering,
//! corruption, blackout. Never looks inside a frame. Called by [`crate::world`].

use ferroce_transport::Instant;

use crate::rng::Rng;

/// Probabilities (in a million) and times (ns) of one direction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Faults {
    /// A frame vanishes.
    pub loss_ppm: u32,
    /// A frame arrives twice, the copy at any time within `late_ns`.
    pub duplicate_ppm: u32,
    /// A frame is held back by up to `late_ns`, so that later ones overtake it.
    pub reorder_ppm: u32,
    /// One to three bits of a frame change.
    pub corrupt_ppm: u32,
    /// Longest time that a held back frame is late.
    pub late_ns: u64,
}

/// Speed and length of a wire.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cable {
    /// Propagation, ns.
    pub delay_ns: u64,
    /// Picoseconds per byte: 80 is 100 Gbit/s.
    pub ps_per_byte: u64,
}

/// A frame under way.
#[derive(Clone, Debug)]
pub struct Frame {
    /// As it arrives.
    pub bytes: Vec<u8>,
    /// As it was sent, where that differs.
    pub original: Option<Vec<u8>>,
}

/// What became of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// On its way.
    Sent,
    /// On its way, but late.
    Late,
    /// On its way twice.
    Doubled,
    /// On its way with other bits.
    Damaged,
    /// Gone.
    Lost,
    /// Gone because the wire is cut.
    Cut,
}

/// What happened on a wire.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LinkStats {
    /// Frames handed to it.
    pub frames: u64,
    /// Lost, by chance or blackout.
    pub lost: u64,
    /// Doubled.
    pub doubled: u64,
    /// Held back.
    pub late: u64,
    /// Damaged.
    pub damaged: u64,
}

/// One direction of a wire.
#[derive(Debug)]
pub struct Link {
    cable: Cable,
    faults: Faults,
    rng: Rng,
    free_at: Instant,
    /// No frame that is not late arrives before this.
    in_order: Instant,
    cut_until: Instant,
    stats: LinkStats,
}

impl Link {
    /// A wire with its own stream of chance.
    pub fn new(cable: Cable, faults: Faults, rng: Rng) -> Self {
        let zero = Instant(0);
        Link {
            cable,
            faults,
            rng,
            free_at: zero,
            in_order: zero,
            cut_until: zero,
            stats: LinkStats::default(),
        }
    }
    /// What happened so far.
    pub fn stats(&self) -> LinkStats {
        self.stats
    }
    /// When it has sent what it was given.
    pub fn free_at(&self) -> Instant {
        self.free_at
    }
    /// From now on nothing goes wrong by chance, and a blackout is over.
    pub fn heal(&mut self) {
        self.faults = Faults::default();
        self.cut_until = Instant(0);
    }
    /// Everything sent before `until` is lost.
    pub fn cut(&mut self, until: Instant) {
        self.cut_until = self.cut_until.max(until);
    }

    /// Takes a frame. `arrivals` gets it, once or twice, with the time at which it arrives.
    pub fn submit(&mut self, now: Instant, bytes: Vec<u8>, arrivals: &mut Vec<(Instant, Frame)>) -> Fate {
        self.stats.frames += 1;
        let wire_ns = (bytes.len() as u64 * self.cable.ps_per_byte).div_ceil(1000);
        self.free_at = self.free_at.max(now).after(wire_ns);
        if now < self.cut_until {
            self.stats.lost += 1;
            return Fate::Cut;
        }
        if self.rng.chance(self.faults.loss_ppm) {
            self.stats.lost += 1;
            return Fate::Lost;
        }
        let mut fate = Fate::Sent;
        let frame = if self.rng.chance(self.faults.corrupt_ppm) {
            self.stats.damaged += 1;
            fate = Fate::Damaged;
            self.damage(bytes)
        } else {
            Frame { bytes, original: None }
        };
        let arrival = self.free_at.after(self.cable.delay_ns);
        if self.rng.chance(self.faults.duplicate_ppm) {
            self.stats.doubled += 1;
            fate = Fate::Doubled;
            let late = self.rng.below(self.faults.late_ns);
            arrivals.push((arrival.after(late), frame.clone()));
        }
        if self.rng.chance(self.faults.reorder_ppm) {
            self.stats.late += 1;
            fate = Fate::Late;
            let late = self.rng.below(self.faults.late_ns);
            arrivals.push((arrival.after(late), frame));
        } else {
            self.in_order = self.in_order.max(arrival);
            arrivals.push((self.in_order, frame));
        }
        fate
    }

    /// Up to three bits: the ICRC finds all of those at these lengths, so one that passes is a fault of ours.
    fn damage(&mut self, original: Vec<u8>) -> Frame {
        let mut bytes = original.clone();
        for _ in 0..self.rng.range(1, 3) {
            let at = self.rng.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << self.rng.below(8);
        }
        // Two flips may cancel each other.
        let original = (bytes != original).then_some(original);
        Frame { bytes, original }
    }
}

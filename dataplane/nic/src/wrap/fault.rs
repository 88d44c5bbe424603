//! [`Fault`]: seeded loss, duplication, reordering, corruption, delay and CE marks, in both directions.
//!
//! Owns the frames that it holds back. Invariant: the fate of the n-th frame of a direction follows from seed, queue
//! and rates alone, and a frame that was to be neither lost nor held passes at once. All memory is allocated when the
//! queue is made; when all places for held frames are taken, a received frame passes unharmed (counted) and a frame to
//! send is refused as by a full ring. Called by a worker. Looks into a frame only to mark it.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferroce_mem::Payload;
use ferroce_mem::copy::Target;

use crate::frame::{HEAD_BYTES, RxFrame, TxFrame};
use crate::port::{PortError, PortQueue};

/// Frames that a direction can hold back.
const PLACES: usize = 256;
/// A frame that is to be overtaken is held until so many others passed, at most.
const OVERTAKERS: u64 = 3;
/// Or until this time is over: the last frame of a burst must come too.
const LONGEST_HOLD: Duration = Duration::from_millis(1);
/// Longest delay that makes sense: transports give up long before.
const LONGEST_DELAY: Duration = Duration::from_secs(60);

/// What happens to the frames of one direction: each a share from 0 (never) to 1 (always).
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Rates {
    /// Frames that vanish.
    pub loss: f64,
    /// Frames that come twice.
    pub duplicate: f64,
    /// Frames that 1 to 3 later ones overtake.
    pub reorder: f64,
    /// Frames of which one bit is flipped.
    pub corrupt: f64,
    /// Frames of which the ECN field is set to CE, if it says that the sender understands (ECT).
    pub ce_mark: f64,
    /// Frames that come `delay_time` later.
    pub delay: f64,
    /// How much later.
    pub delay_time: Duration,
}

/// What a port's wire is like.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct FaultConfig {
    /// The same seed gives the same fates.
    pub seed: u64,
    /// Received frames.
    pub rx: Rates,
    /// Sent frames.
    pub tx: Rates,
}

impl FaultConfig {
    /// Checks the rates.
    ///
    /// # Errors
    /// [`PortError`] naming the rate that is no share.
    pub fn check(&self) -> Result<(), PortError> {
        for (direction, rates) in [("rx", &self.rx), ("tx", &self.tx)] {
            let refuse = |name: &str, asked: String, allowed: String| {
                let attribute = format!("fault.{direction}.{name}");
                Err(PortError { attribute, asked, allowed, hint: String::new() })
            };
            for (name, rate) in rates.named() {
                if !(0.0..=1.0).contains(&rate) {
                    return refuse(name, rate.to_string(), "a share from 0 to 1".into());
                }
            }
            if rates.delay_time > LONGEST_DELAY {
                let (asked, allowed) =
                    (format!("{:?}", rates.delay_time), format!("up to {LONGEST_DELAY:?}"));
                return refuse("delay_time", asked, allowed);
            }
        }
        Ok(())
    }
}

impl Rates {
    const fn named(&self) -> [(&'static str, f64); 6] {
        [
            ("loss", self.loss),
            ("duplicate", self.duplicate),
            ("reorder", self.reorder),
            ("corrupt", self.corrupt),
            ("ce_mark", self.ce_mark),
            ("delay", self.delay),
        ]
    }
    fn is_none(&self) -> bool {
        self.named().iter().all(|(_, rate)| *rate == 0.0)
    }
}

/// What was done to one direction of one queue.
#[derive(Default, Debug)]
pub(crate) struct Tally {
    pub lost: AtomicU64,
    pub duplicated: AtomicU64,
    pub reordered: AtomicU64,
    pub corrupted: AtomicU64,
    pub marked: AtomicU64,
    pub delayed: AtomicU64,
    /// Should have been held or doubled, but there was no place.
    pub spared: AtomicU64,
}

/// Both directions of one queue.
#[derive(Default, Debug)]
pub(crate) struct Tallies {
    pub rx: Tally,
    pub tx: Tally,
}

#[inline]
fn count(counter: &AtomicU64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}

/// SplitMix64.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// True in `rate` of all cases. Always uses one roll, so that rates do not shift each other's luck.
    fn chance(&mut self, rate: f64) -> bool {
        (self.roll() >> 11) as f64 * (1.0 / (1u64 << 53) as f64) < rate
    }
}

/// The fate of one frame.
#[derive(Clone, Copy, Debug)]
struct Fate {
    lost: bool,
    duplicate: bool,
    /// Overtaken by so many.
    overtakers: Option<u64>,
    /// Which bit to flip, from a number to be reduced by the length.
    flip: Option<u64>,
    mark: bool,
    late: bool,
}

/// A frame held back.
struct Held {
    place: usize,
    len: usize,
    /// Passes when so many frames passed in all,
    after: u64,
    /// or when this time has come. `None`: at once.
    due: Option<Instant>,
}

impl Held {
    fn is_due(&self, passed: u64, now: Instant) -> bool {
        passed >= self.after || self.due.is_none_or(|due| now >= due)
    }
}

/// One direction.
struct Lane {
    rates: Rates,
    dice: Dice,
    longest: usize,
    bytes: Box<[u8]>,
    free: Vec<usize>,
    held: VecDeque<Held>,
    passed: u64,
}

impl Lane {
    fn new(rates: Rates, seed: u64, longest: usize) -> Lane {
        let places = if rates.is_none() { 0 } else { PLACES };
        Lane {
            rates,
            dice: Dice(seed),
            longest,
            bytes: vec![0; places * longest].into_boxed_slice(),
            free: (0..places).collect(),
            held: VecDeque::with_capacity(places),
            passed: 0,
        }
    }
    fn is_idle(&self) -> bool {
        self.bytes.is_empty()
    }
    fn place(&self, place: usize, len: usize) -> &[u8] {
        self.bytes.get(place * self.longest..).and_then(|from| from.get(..len)).unwrap_or_default()
    }
    fn place_mut(&mut self, place: usize, len: usize) -> &mut [u8] {
        self.bytes.get_mut(place * self.longest..).and_then(|from| from.get_mut(..len)).unwrap_or_default()
    }

    fn fate(&mut self) -> Fate {
        let Rates { loss, duplicate, reorder, corrupt, ce_mark, delay, .. } = self.rates;
        let (lost, duplicate) = (self.dice.chance(loss), self.dice.chance(duplicate));
        let (reorder, corrupt) = (self.dice.chance(reorder), self.dice.chance(corrupt));
        let (mark, late) = (self.dice.chance(ce_mark), self.dice.chance(delay));
        let detail = self.dice.roll();
        Fate {
            lost,
            duplicate,
            overtakers: reorder.then_some(1 + detail % OVERTAKERS),
            flip: corrupt.then_some(detail >> 8),
            mark,
            late,
        }
    }

    /// Puts a frame that lies at `place` into the queue of held ones, as its fate says.
    fn hold(&mut self, place: usize, len: usize, fate: &Fate, tally: &Tally) {
        let bytes = self.place_mut(place, len);
        if let Some(flip) = fate.flip {
            let bit = flip % (bytes.len().max(1) as u64 * 8);
            if let Some(byte) = bytes.get_mut((bit / 8) as usize) {
                *byte ^= 1 << (bit % 8);
                count(&tally.corrupted);
            }
        }
        if fate.mark && mark_ce(bytes) {
            count(&tally.marked);
        }
        let (mut after, mut due) = (u64::MAX, None);
        if fate.late {
            due = Some(Instant::now() + self.rates.delay_time);
            count(&tally.delayed);
        } else if let Some(overtakers) = fate.overtakers {
            after = self.passed + overtakers;
            due = Some(Instant::now() + LONGEST_HOLD);
            count(&tally.reordered);
        }
        self.held.push_back(Held { place, len, after, due });
        if fate.duplicate {
            match self.free.pop() {
                Some(twin) => {
                    let from = place * self.longest;
                    self.bytes.copy_within(from..from + len, twin * self.longest);
                    self.held.push_back(Held { place: twin, len, after, due });
                    count(&tally.duplicated);
                }
                None => count(&tally.spared),
            }
        }
    }

    /// Takes a received frame in; false if it passes untouched.
    fn take_in(&mut self, frame: &RxFrame<'_>, tally: &Tally) -> bool {
        let fate = self.fate();
        if fate.lost {
            count(&tally.lost);
            return true;
        }
        let touched =
            fate.duplicate || fate.overtakers.is_some() || fate.flip.is_some() || fate.mark || fate.late;
        if !touched {
            return false;
        }
        let len = frame.len();
        let Some(place) = (if len <= self.longest { self.free.pop() } else { None }) else {
            count(&tally.spared);
            return false;
        };
        let (head, rest) = self.place_mut(place, len).split_at_mut(frame.head.len());
        head.copy_from_slice(frame.head);
        frame.rest.copy_to(rest);
        self.hold(place, len, &fate, tally);
        true
    }

    /// Hands the due frames to `pass`, in order, until that says no.
    fn release(&mut self, mut pass: impl FnMut(&[u8]) -> bool) {
        if self.held.is_empty() {
            return;
        }
        let now = Instant::now();
        let mut index = 0;
        while let Some(held) = self.held.get(index) {
            if !held.is_due(self.passed, now) {
                index += 1;
                continue;
            }
            let (place, len) = (held.place, held.len);
            if !pass(self.place(place, len)) {
                return;
            }
            self.held.remove(index);
            self.free.push(place);
            self.passed += 1;
        }
    }
}

/// Sets the ECN field to CE where it is ECT, as a congested router does. The ICRC does not cover it.
fn mark_ce(frame: &mut [u8]) -> bool {
    let tagged = frame.get(12..14) == Some(&[0x81, 0x00]);
    let at = if tagged { 18 } else { 14 };
    match (frame.get(at - 2..at), frame.get(at), frame.get(at + 1)) {
        (Some([0x08, 0x00]), Some(&version), Some(&tos)) if tos & 3 == 1 || tos & 3 == 2 => {
            let Some(Ok(sum)) = frame.get(at + 10..at + 12).map(<[u8; 2]>::try_from) else { return false };
            // RFC 1624: the checksum follows the one changed word.
            let (old, new) = (u16::from_be_bytes([version, tos]), u16::from_be_bytes([version, tos | 3]));
            let wide = u32::from(!u16::from_be_bytes(sum)) + u32::from(!old) + u32::from(new);
            let folded = (wide & 0xffff) + (wide >> 16);
            let sum = !((folded & 0xffff) + (folded >> 16)) as u16;
            if let Some(place) = frame.get_mut(at + 10..at + 12) {
                place.copy_from_slice(&sum.to_be_bytes());
            }
            if let Some(place) = frame.get_mut(at + 1) {
                *place = tos | 3;
            }
            true
        }
        (Some([0x86, 0xdd]), _, Some(&class)) if class >> 4 & 3 == 1 || class >> 4 & 3 == 2 => {
            if let Some(place) = frame.get_mut(at + 1) {
                *place = class | 0x30;
            }
            true
        }
        _ => false,
    }
}

/// A queue on a bad wire.
pub struct Fault<Q> {
    inner: Q,
    rx: Lane,
    tx: Lane,
    /// Place and length of the frame being written.
    writing: Option<(usize, usize)>,
    tallies: Arc<Tallies>,
}

impl<Q: PortQueue> Fault<Q> {
    /// Wraps queue number `index`, whose frames are at most `longest` bytes. Without rates it only passes on.
    pub(crate) fn new(
        inner: Q,
        config: &FaultConfig,
        index: u16,
        longest: usize,
        tallies: Arc<Tallies>,
    ) -> Self {
        let seed = |direction: u64| Dice(config.seed ^ u64::from(index) << 32 ^ direction << 48).roll();
        Fault {
            inner,
            rx: Lane::new(config.rx, seed(1), longest),
            tx: Lane::new(config.tx, seed(2), longest),
            writing: None,
            tallies,
        }
    }

    /// Passes the due frames to send on, as far as there is room.
    fn push(&mut self) {
        let inner = &mut self.inner;
        self.tx.release(|bytes| {
            let Some(mut frame) = inner.tx_reserve(bytes.len()) else { return false };
            frame.buf.write(0, bytes);
            inner.tx_commit(bytes.len());
            true
        });
    }
}

impl<Q: PortQueue> PortQueue for Fault<Q> {
    #[inline]
    fn rx_burst<F: FnMut(RxFrame<'_>)>(&mut self, max: usize, mut f: F) -> usize {
        if self.rx.is_idle() {
            return self.inner.rx_burst(max, f);
        }
        let mut handed = 0;
        self.rx.release(|bytes| {
            if handed == max {
                return false;
            }
            let (head, rest) = bytes.split_at(bytes.len().min(HEAD_BYTES));
            f(RxFrame { head, rest: Payload::from_slice(rest), timestamp_ns: 0 });
            handed += 1;
            true
        });
        let (lane, tally) = (&mut self.rx, &self.tallies.rx);
        self.inner.rx_burst(max - handed, |frame| {
            if !lane.take_in(&frame, tally) {
                lane.passed += 1;
                handed += 1;
                f(frame);
            }
        });
        handed
    }

    #[inline]
    fn tx_reserve(&mut self, len: usize) -> Option<TxFrame<'_>> {
        if self.tx.is_idle() || len > self.tx.longest || len == 0 {
            return self.inner.tx_reserve(len);
        }
        // Refuses what is too long, and what finds no room now.
        self.inner.tx_reserve(len)?;
        let place = match self.writing.take() {
            Some((place, _)) => place,
            None => {
                if self.tx.free.is_empty() {
                    self.push();
                }
                self.tx.free.pop()?
            }
        };
        self.writing = Some((place, len));
        Some(TxFrame { buf: Target::from_slice(self.tx.place_mut(place, len)) })
    }

    #[inline]
    fn tx_commit(&mut self, len: usize) {
        let Some((place, reserved)) = self.writing.take() else { return self.inner.tx_commit(len) };
        if len == 0 || len > reserved {
            self.tx.free.push(place);
            // Counts a length that is none.
            return self.inner.tx_commit(0);
        }
        let fate = self.tx.fate();
        if fate.lost {
            count(&self.tallies.tx.lost);
            self.tx.free.push(place);
            return;
        }
        self.tx.hold(place, len, &fate, &self.tallies.tx);
    }

    #[inline]
    fn tx_flush(&mut self) {
        self.push();
        self.inner.tx_flush();
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.inner.wait_fds()
    }

    fn arm_wakeup(&mut self) -> bool {
        // Held frames come by time, and no descriptor tells.
        self.rx.held.is_empty() && self.tx.held.is_empty() && self.inner.arm_wakeup()
    }

    fn disarm_wakeup(&mut self) {
        self.inner.disarm_wakeup();
    }
}

#[cfg(test)]
mod tests;

//! Keys, protection domains, rights, and why a key was refused.
//!
//! Owns the keyed permutation that makes keys out of slot numbers. Invariant: while its secret stays secret, a key
//! tells nothing about its slot, its generation or any other key. Called by [`crate::Memory`]; the engine may use
//! [`Permutation`] for its own numbers. Never stores anything.

use core::fmt;

bitflags::bitflags! {
    /// Rights of a region, with libibverbs' numbers (`ibv_access_flags`). Local read is always granted.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct Access: u32 {
        /// The owner may receive into it.
        const LOCAL_WRITE = 1;
        /// A peer may WRITE.
        const REMOTE_WRITE = 2;
        /// A peer may READ.
        const REMOTE_READ = 4;
        /// A peer may do atomics.
        const REMOTE_ATOMIC = 8;
        /// Windows may be bound to it.
        const MW_BIND = 16;
    }
}

/// Protection domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct PdId(pub u32);

/// Local key: names a region to its owner. Cannot be put on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Lkey(pub u32);

impl fmt::Debug for Lkey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lkey {:#010x}", self.0)
    }
}

/// Why a key check failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum KeyFault {
    /// No such key now.
    Unknown,
    /// The region belongs to another protection domain.
    WrongPd,
    /// Not wholly inside the region (also where address + length wraps).
    OutOfBounds,
    /// The region does not grant the right.
    Rights,
}

/// Bits of one half of a key.
const HALF_BITS: u32 = 16;
/// Rounds of the network.
const ROUNDS: usize = 4;

/// A keyed permutation of the 32-bit numbers: a balanced Feistel network of four rounds.
///
/// It hides counters from a peer (keys are neither in order nor in small steps); it is no cipher for secrets. Both
/// directions cost four multiplications.
#[derive(Clone)]
pub struct Permutation {
    rounds: [(u64, u64); ROUNDS],
}

impl Permutation {
    /// The permutation of `secret`; `purpose` makes independent ones from one secret.
    pub fn new(secret: u64, purpose: u64) -> Self {
        // The purpose goes through the mixer, so that neighbouring purposes share no round key.
        let mut state = secret ^ mix(purpose.wrapping_add(0x9e37_79b9_7f4a_7c15));
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mix(state)
        };
        let rounds = core::array::from_fn(|_| (next(), next() | 1));
        Permutation { rounds }
    }

    /// From the inside number to the outside one.
    #[inline]
    pub fn scramble(&self, plain: u32) -> u32 {
        let (mut left, mut right) = (plain >> HALF_BITS, plain & 0xffff);
        for &round in &self.rounds {
            (left, right) = (right, left ^ half_of(round, right));
        }
        left << HALF_BITS | right
    }

    /// From the outside number to the inside one: `unscramble(scramble(x)) == x` and the other way round.
    #[inline]
    pub fn unscramble(&self, outside: u32) -> u32 {
        let (mut left, mut right) = (outside >> HALF_BITS, outside & 0xffff);
        for &round in self.rounds.iter().rev() {
            (left, right) = (right ^ half_of(round, left), left);
        }
        left << HALF_BITS | right
    }
}

impl fmt::Debug for Permutation {
    /// The round keys stay secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Permutation")
    }
}

/// The round function: 16 of the best mixed bits of a multiplication.
#[inline]
fn half_of((add, factor): (u64, u64), half: u32) -> u32 {
    let product = (u64::from(half) ^ add).wrapping_mul(factor);
    ((product ^ (product >> 29)) >> 40) as u32 & 0xffff
}

/// The finaliser of SplitMix64.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutation_is_undone_and_depends_on_secret_and_purpose() {
        let a = Permutation::new(1, 0);
        let b = Permutation::new(1, 1);
        let c = Permutation::new(2, 0);
        let (mut same_b, mut same_c) = (0, 0);
        for plain in (0..4096).chain([u32::MAX, u32::MAX - 1, 1 << 31]) {
            let outside = a.scramble(plain);
            assert_eq!(a.unscramble(outside), plain);
            assert_eq!(a.scramble(a.unscramble(plain)), plain);
            same_b += u32::from(b.scramble(plain) == outside);
            same_c += u32::from(c.scramble(plain) == outside);
        }
        assert!(
            same_b < 3 && same_c < 3,
            "independent permutations agree {same_b} and {same_c} times in 4099"
        );
    }

    #[test]
    fn one_changed_bit_changes_about_half_of_the_key() {
        let p = Permutation::new(0x0123_4567_89ab_cdef, 7);
        let mut flipped = 0;
        for plain in 0..1000u32 {
            for bit in 0..32 {
                flipped += (p.scramble(plain) ^ p.scramble(plain ^ 1 << bit)).count_ones();
            }
        }
        let mean = f64::from(flipped) / 32_000.0;
        assert!((15.0..17.0).contains(&mean), "mean number of changed bits is {mean}");
    }
}

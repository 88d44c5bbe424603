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
    /// The region or window belongs to another protection domain.
    WrongPd,
    /// Not wholly inside the region or window (also where address + length wraps).
    OutOfBounds,
    /// The region or window does not grant the right.
    Rights,
    /// The window belongs to another queue pair.
    WrongQp,
}

/// Rounds of the network.
const ROUNDS: usize = 4;

/// A keyed permutation of the numbers of `2 * HALF` bits: a balanced Feistel network of four rounds.
///
/// It hides counters from a peer (keys are neither in order nor in small steps); it is no cipher for secrets. Both
/// directions cost four multiplications.
#[derive(Clone)]
pub struct Feistel<const HALF: u32> {
    rounds: [(u64, u64); ROUNDS],
}

/// Of whole keys: 32 bits.
pub type Permutation = Feistel<16>;
/// Of the part of a window's key that its user does not choose: 24 bits.
pub type Permutation24 = Feistel<12>;

impl<const HALF: u32> Feistel<HALF> {
    const HALF_MASK: u32 = (1 << HALF) - 1;

    /// The permutation of `secret`; `purpose` makes independent ones from one secret.
    pub fn new(secret: u64, purpose: u64) -> Self {
        const { assert!(HALF >= 1 && HALF <= 16) };
        // The purpose goes through the mixer, so that neighbouring purposes share no round key.
        let mut state = secret ^ mix(purpose.wrapping_add(0x9e37_79b9_7f4a_7c15));
        let mut next = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mix(state)
        };
        let rounds = core::array::from_fn(|_| (next(), next() | 1));
        Feistel { rounds }
    }

    /// From the inside number to the outside one. Bits above `2 * HALF` are ignored.
    #[inline]
    pub fn scramble(&self, plain: u32) -> u32 {
        let (mut left, mut right) = (plain >> HALF & Self::HALF_MASK, plain & Self::HALF_MASK);
        for &round in &self.rounds {
            (left, right) = (right, left ^ Self::half_of(round, right));
        }
        left << HALF | right
    }

    /// From the outside number to the inside one: `unscramble(scramble(x)) == x` and the other way round.
    #[inline]
    pub fn unscramble(&self, outside: u32) -> u32 {
        let (mut left, mut right) = (outside >> HALF & Self::HALF_MASK, outside & Self::HALF_MASK);
        for &round in self.rounds.iter().rev() {
            (left, right) = (right ^ Self::half_of(round, left), left);
        }
        left << HALF | right
    }

    /// The round function: as many of the best mixed bits of a multiplication.
    #[inline]
    fn half_of((add, factor): (u64, u64), half: u32) -> u32 {
        let product = (u64::from(half) ^ add).wrapping_mul(factor);
        ((product ^ (product >> 29)) >> 40) as u32 & Self::HALF_MASK
    }
}

impl<const HALF: u32> fmt::Debug for Feistel<HALF> {
    /// The round keys stay secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Feistel")
    }
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
        for plain in (0..if cfg!(miri) { 128 } else { 4096 }).chain([u32::MAX, u32::MAX - 1, 1 << 31]) {
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
    fn the_permutation_of_24_bits_stays_inside_them_and_repeats_nothing() {
        let p = Permutation24::new(3, 4);
        let mut seen = alloc::vec![false; 1 << 24];
        let step = if cfg!(miri) { 65_537 } else { 1 };
        for plain in (0..1u32 << 24).step_by(step) {
            let outside = p.scramble(plain);
            assert_eq!(p.unscramble(outside), plain);
            assert!(!core::mem::replace(&mut seen[outside as usize], true));
        }
    }

    #[test]
    fn one_changed_bit_changes_about_half_of_the_key() {
        let p = Permutation::new(0x0123_4567_89ab_cdef, 7);
        let count: u32 = if cfg!(miri) { 20 } else { 1000 };
        let mut flipped = 0;
        for plain in 0..count {
            for bit in 0..32 {
                flipped += (p.scramble(plain) ^ p.scramble(plain ^ 1 << bit)).count_ones();
            }
        }
        let mean = f64::from(flipped) / f64::from(32 * count);
        assert!((15.0..17.0).contains(&mean), "mean number of changed bits is {mean}");
    }
}

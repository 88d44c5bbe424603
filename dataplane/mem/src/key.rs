//! Keys, protection domains, rights, and why a key was refused.

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

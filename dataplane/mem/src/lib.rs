//! Registered memory, protection and keys.
//!
//! Owns: protection domains, memory regions and their keys, the copy and CRC primitives on memory that a peer may
//! write, and (feature `os`) mappings, hugepages and arenas. Invariant: an [`MrSlice`] exists only after
//! [`Memory`] checked key, protection domain, bounds and rights, and cannot outlive the borrow of the table; memory
//! that a peer can write is never a `&[u8]` or `&mut [u8]`, only a raw source or target behind [`MrSlice`],
//! [`Payload`] or [`os::Block`]. Called by transport, engine, ports and services. Never looks at what the bytes mean.
#![cfg_attr(not(feature = "os"), no_std)]
#![deny(unsafe_code)]

extern crate alloc;

pub mod copy;
pub mod key;
pub mod memory;
#[cfg(feature = "os")]
pub mod os;
pub mod payload;
pub mod slice;
pub mod window;

pub use key::{Access, KeyFault, Lkey, PdId, Permutation, Permutation24};
pub use memory::{DeregisterError, Memory, MrInfo, MrInit, RegisterError};
pub use payload::Payload;
pub use slice::MrSlice;
pub use window::{Bind, BindError, BoundInfo, InvalidateError, MwInfo};

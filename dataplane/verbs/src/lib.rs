//! Verbs: data types with libibverbs' names and meanings, and the two traits [`Device`] and [`Queues`].
//!
//! Owns nothing at run time. Used by transport (types), engine (the software implementation), services and tools.
//! Deviations from libibverbs are listed by the conformance suite.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod attr;
pub mod conformance;
pub mod error;
pub mod traits;
pub mod wc;
pub mod wr;

pub use attr::*;
pub use error::{PostError, VerbsError};
pub use ferroce_mem::{Access, Lkey, PdId};
pub use ferroce_wire::{Gid, Imm, MacAddr, PathMtu, Pkey, Psn, Qkey, Qpn, RemoteAddr, Rkey, VlanTag};
pub use traits::{Device, MrKeys, Queues, Service};
pub use wc::{Wc, WcFlags, WcOpcode, WcStatus};
pub use wr::{RecvWr, SendFlags, SendOp, SendWr, Sge, UdDest};

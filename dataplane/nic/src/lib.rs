//! Ports: frames in, frames out. Never looks inside a frame.
//!
//! Owns the rings and buffers of the wires `shm` and `xdp` and the wrappers `wrap::pcap` and `wrap::fault` around any
//! port. Invariant: every received frame is lent for one call and goes back to its ring afterwards; every frame to
//! send is either committed whole or not at all. Called by a worker (one [`PortQueue`] each) and, for
//! [`Port`], by the housekeeping thread. Never resolves addresses, never parses.
#![deny(unsafe_code)]

pub mod any;
pub mod conformance;
pub mod frame;
pub mod netlink;
pub mod port;
pub mod shm;
pub mod wrap;
pub mod xdp;

pub use any::{AnyPort, AnyQueue, Options};
pub use frame::{RxFrame, TxFrame};
pub use port::{Caps, Fallback, Port, PortError, PortQueue, RxQueues};
pub use shm::{ShmConfig, ShmPort, ShmQueue};

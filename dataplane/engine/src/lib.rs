//! The poll loop and the software implementation of verbs.
//!
//! Owns workers, queue pairs, completion queues, timers and mailboxes. Invariant: everything on the data path
//! belongs to one worker and is lent as `&mut`. Called by the daemon and by tools. Never opens a port, never
//! resolves an address on a worker, never names a backend or a service.
//!
//! Where to look: [`worker`]'s `poll_once` is the table of contents of the data path (mailbox, receive, timers, services,
//! transmit, flush, counters); `rx` and `tx` are the paths of one frame; `core` is what a worker owns; [`device`] is the
//! control side; [`engine`] starts and stops.
#![deny(unsafe_code)]

mod app;
mod attach;
mod channel;
mod check;
mod clock;
mod command;
mod control;
mod core;
mod cq;
mod demux;
mod device;
mod engine;
mod forward;
mod idle;
mod mailbox;
mod mcast;
mod number;
mod objects;
mod rx;
mod sched;
mod services;
mod srq;
mod timer;
mod tx;
mod verbs;
mod worker;

pub mod config;
pub mod event;
pub mod follow;
pub mod housekeeping;
pub mod path;
pub mod pin;
pub mod stall;
pub mod stats;

pub use crate::core::WorkerCore;
pub use app::{AppQueues, REFUSED};
pub use config::{EngineConfig, EngineError, IcrcMode, IdlePolicy, NetdevInfo, WorkerConfig};
pub use device::SoftDevice;
pub use engine::Engine;
pub use event::{EngineEvent, EngineEventKind, FaultDetail};
pub use housekeeping::Housekeeper;
pub use number::{QUARANTINE, QpnParts};
pub use path::{PathRequest, address_vector};
pub use sched::Share;
pub use services::{MAX_SERVICES, ServiceId};
pub use stats::{Counter, EngineStats, Stall, WorkerStats};

//! Sans-IO RDMA transport: queue pairs as state machines over packets and time.
//!
//! The convention: `handle_*` takes input; `post_*` takes application work; `poll_*` gives output and is
//! `#[must_use]`; getters take `&self`. After any `handle_*` or `post_*`: `poll_completion` and `poll_notice` until
//! `None`, then `poll_transmit` until it is not `Sent`, then `poll_timeout`. Time is an argument. No callbacks up, no
//! clock, no allocation after a queue pair is made, no logging.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod counters;
pub mod qp;
pub mod sink;
pub mod time;

pub use counters::{QpCounter, QpCounters};
pub use qp::{Completion, DropReason, ModifyError, Notice, Qp};
pub use sink::{FrameSink, Transmit};
pub use time::Instant;

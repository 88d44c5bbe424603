//! Sans-IO RDMA transport: queue pairs as state machines over packets and time.
//!
//! The convention: `handle_*` takes input; `post_*` takes application work; `poll_*` gives output and is
//! `#[must_use]`; getters take `&self`. After any `handle_*` or `post_*`: `poll_completion` and `poll_notice` until
//! `None`, then `poll_transmit` until it is not `Sent`, then `poll_timeout`. Time is an argument. No callbacks up, no
//! clock, no logging; no allocation but where a queue pair is made, imported, or its responder resources sized (INIT -> RTR).
//!
//! Where things are: `qp` dispatches, `wq` holds posted work until it is reported, `segment` cuts messages into
//! packets, `sequence` says which packet may follow which, `inbound` and `outbound` are SENDs and WRITEs packet by
//! packet on any service, `local` is what does not travel, `rc` is the reliable connection (requester: `requester`
//! sends, `ack` takes answers, `retry` goes back; responder: `responder` takes requests, `replay` remembers READs and
//! atomics, `answer` sends what is owed), `unreliable` is UC and UD, `srq` is the shared receive queue, `image` makes bytes of a
//! queue pair and a queue pair of bytes.
#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::indexing_slicing,
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation,
        clippy::wildcard_enum_match_arm
    )
)]

extern crate alloc;

mod arrival;
mod completion;
pub mod counters;
mod image;
mod inbound;
mod local;
mod notice;
mod outbound;
pub mod qp;
mod rc;
mod segment;
mod sequence;
pub mod sink;
pub mod srq;
pub mod time;
mod unreliable;
mod wq;

pub use counters::{QpCounter, QpCounters};
pub use image::ImportError;
pub use qp::state::{QP_TABLE, QpEvent};
pub use qp::{Completion, DropReason, MAX_RD_ATOMIC, MAX_WR, ModifyError, Notice, Qp};
pub use sink::{FrameSink, Transmit};
pub use srq::Srq;
pub use time::Instant;

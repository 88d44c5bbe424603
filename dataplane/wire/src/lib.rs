//! Bytes to values and values to bytes for RoCEv2 frames.
//!
//! Owns the layout of every header on the wire and the invariant CRC. [`packet::parse`] is the only way in,
//! [`emit::emit`] the only way out; both are total: no byte string and no header value makes them panic.
//! Called by the engine (per frame), the simulator, tools and the connection manager. Never allocates, never
//! touches memory that a peer can write (the caller copies a frame's head to private memory first), never
//! decides what a packet means for a queue pair.
#![no_std]
#![forbid(unsafe_code)]
// Every byte here comes from outside: nothing may panic, wrap or truncate by accident.
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

pub mod emit;
pub mod error;
pub mod ext;
pub mod flow;
pub mod icrc;
pub mod ids;
pub mod opcode;
pub mod packet;
mod print;
pub mod sport;

pub use emit::EmitError;
pub use error::ParseError;
pub use ext::{Aeth, AtomicEth, Bth, Deth, Ext, NakCode, Reth, Syndrome};
pub use flow::{Ecn, Eth, Headers, Ip, VlanTag};
pub use icrc::{Icrc, check_frame};
pub use ids::{DmaLen, Gid, Imm, MacAddr, Msn, PathMtu, Pkey, Psn, Qkey, Qpn, RemoteAddr, Rkey};
pub use opcode::{Op, Opcode, Part, Service};
pub use packet::Packet;

/// UDP destination port of RoCEv2 (IANA `roce`).
pub const ROCE_PORT: u16 = 4791;

/// Longest header stack we parse or emit: Ethernet 14, one 802.1Q tag 4, IPv6 40, UDP 8, BTH 12, AtomicETH 28.
/// A received frame's head must carry at least this much of the frame (or all of it, if shorter).
pub const MAX_HEAD_BYTES: usize = 128;

/// Bytes of the invariant CRC at the end of the UDP payload.
pub const ICRC_BYTES: usize = 4;

/// Largest payload of a packet: the largest path MTU.
pub const MAX_PAYLOAD_BYTES: usize = 4096;

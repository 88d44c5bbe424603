//! The contract between appliance, control process and command line: data only.
//!
//! Owns: the messages of the appliance's socket ([`appliance`]), the JSON-RPC types of the control process's socket
//! ([`rpc`]), the one error type that both carry ([`error`]), the appliance's configuration file ([`config`]) and the
//! text forms of wire numbers ([`ids`]). Invariant: a value that was decoded is within its limits (24-bit numbers,
//! owner blobs, batch and page sizes); nobody needs to check again. Used by `ferroced`, `ferroce-ctld`, `ferroce` and
//! programs that attach to an appliance. Never does I/O.
#![forbid(unsafe_code)]

pub mod appliance;
pub mod config;
pub mod error;
pub mod ids;
pub mod rpc;

pub use error::{ApiError, Code};

//! Wrappers around any port: [`pcap`] writes what passes to a file, [`fault`] makes the wire a bad one.
//!
//! Both are ports themselves and pass the conformance suite. Invariant: a wrapper keeps the contract of the port
//! below, back-pressure and sleeping included. Called as any port.

pub mod fault;
pub mod pcap;

pub use fault::{FaultConfig, Rates};

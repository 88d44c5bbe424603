//! perftest's programs as the peer: their TCP handshake, version 4.5 of Debian 12.
//!
//! [`codec`] has the messages, [`script`] their order for each test, [`session`] runs a test by both, [`meet`] tells a
//! program of perftest from one of ours. The facts are those of recorded conversations (`testdata/perftest`).

pub mod codec;
pub mod meet;
pub mod script;
pub mod session;

#[cfg(test)]
mod tests;

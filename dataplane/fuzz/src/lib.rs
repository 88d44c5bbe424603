//! Bodies of the fuzz targets, as ordinary functions.
//!
//! Each takes arbitrary bytes and panics if the code under test breaks a promise. They stand apart from libFuzzer so
//! that the tests of the crates replay the kept corpus through them on every run. Never read the clock, a file or a
//! random source: the bytes decide everything.

pub mod frames;
pub mod messages;
pub mod qp;

//! Engine tests over `shm` (and `xdp`, where the interface matters), two engines (or an engine and a hand-made peer) in
//! one process. Every test runs with one and with two workers, adaptive idle policy, bounded waits, no absolute times.

mod apps;
mod conformance;
mod control;
mod datagrams;
mod faults;
mod field_cases;
mod harness;
#[allow(dead_code)]
#[path = "../../../nic/tests/xdp/netns.rs"]
mod netns;
mod objects;
mod rc;
mod scale;
mod xdp;

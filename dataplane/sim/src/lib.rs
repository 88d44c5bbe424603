//! A deterministic world for the real transport.
//!
//! Frames are real bytes: `ferroce-wire` emits and parses them, and the real ICRC check decides about damaged ones.
//! Queue pairs are real (`ferroce_transport::Qp`), their memory is registered in a real key table. Only time and the
//! wires are simulated: [`clock`] and [`link`]. [`world`] joins them, [`workload`] makes work by a seed, [`checker`]
//! holds the results against what was asked; fabric, workload and checkers know nothing of each other's insides.
//! A run is decided by its plan alone, and that by its seed: it reads no clock, no other source of chance, and spawns no
//! thread. [`batch`] makes many of them at once.

pub mod batch;
pub mod checker;
pub mod clock;
pub mod endpoint;
pub mod link;
pub mod plan;
pub mod plants;
pub mod record;
pub mod rng;
pub mod run;
mod sink;
pub mod trace;
pub mod workload;
pub mod world;

pub use checker::{Violation, ViolationKind};
pub use plan::{Plan, Scenario};
pub use plants::Planted;
pub use run::{Failure, Report, run, run_plan};

//! What an engine is started with, and why it could not start or stop.
//!
//! Data only. Owned by [`crate::Engine`]; made by the daemon and by tools.

use std::time::Duration;

use ferroce_verbs::{Gid, MacAddr};

/// What a worker does when there is nothing to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IdlePolicy {
    /// Polls for ever: lowest latency, one core at 100 %.
    Spin,
    /// Polls `spin_passes` idle passes, then sleeps on the port's descriptors and its mailbox until the next timer.
    Adaptive {
        /// Idle passes before the first sleep.
        spin_passes: u32,
    },
}

impl Default for IdlePolicy {
    fn default() -> Self {
        IdlePolicy::Adaptive { spin_passes: 2_000 }
    }
}

/// One worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct WorkerConfig {
    /// Core to pin to (see [`crate::pin::auto_cores`]); `None` leaves the thread to the kernel's scheduler.
    pub core: Option<usize>,
    /// What to do when idle.
    pub idle: IdlePolicy,
}

/// Invariant CRC: on, or off for diagnosis.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum IcrcMode {
    /// Made for every frame sent, checked on every frame received.
    #[default]
    On,
    /// Diagnosis only: sent as zero and not checked. Every status output says so.
    Off,
}

/// The network device under the port, as housekeeping last saw it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NetdevInfo {
    /// Ethernet address.
    pub mac: MacAddr,
    /// MTU in bytes, without the Ethernet header.
    pub mtu: u32,
    /// Link state.
    pub link_up: bool,
}

/// What an engine is started with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EngineConfig {
    /// Name of the device; threads are called `NAME/wN`.
    pub name: String,
    /// EUI-64 of the node, stable over restarts.
    pub node_guid: u64,
    /// The workers, 1 ..= 64: worker `i` owns port queue `i`.
    pub workers: Vec<WorkerConfig>,
    /// Queue pairs of the device, 1 ..= 65,536.
    pub max_qp: u32,
    /// Completion queues of the device, 1 ..= 65,536.
    pub max_cq: u32,
    /// Memory regions of the device, 1 ..= 1,048,576.
    pub max_mr: u32,
    /// The network device.
    pub netdev: NetdevInfo,
    /// Addresses.
    pub gids: Vec<Gid>,
    /// Invariant CRC.
    pub icrc: IcrcMode,
}

/// Most workers of one engine.
pub const MAX_WORKERS: usize = 64;
/// Most queue pairs of one engine: leaves enough of the 24-bit number for worker and generation.
pub const MAX_QP: u32 = 1 << 16;
/// Most completion queues of one engine.
pub const MAX_CQ: u32 = 1 << 16;
/// Most memory regions of one engine.
pub const MAX_MR: u32 = 1 << 20;

/// Why an engine could not start or stop.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A configuration value is out of its range.
    #[error("{attribute}: asked {asked}, allowed {allowed}{}{hint}", if hint.is_empty() { "" } else { "; " })]
    Config {
        /// Name of the field.
        attribute: &'static str,
        /// What was asked for.
        asked: String,
        /// What is allowed.
        allowed: String,
        /// How to change it; may be empty.
        hint: String,
    },
    /// A worker could not be pinned to its core.
    #[error("worker {worker}: core {core} could not be pinned: {reason}")]
    Pin {
        /// The worker.
        worker: u8,
        /// The core.
        core: usize,
        /// Why.
        reason: String,
    },
    /// The system refused something.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A worker did not start or stop within the deadline.
    #[error("worker {worker} did not {action} within {deadline:?}; last seen in stage {stage}")]
    Hung {
        /// The worker.
        worker: u8,
        /// `start` or `stop`.
        action: &'static str,
        /// The stage of the poll loop it was last seen in.
        stage: &'static str,
        /// How long was waited.
        deadline: Duration,
    },
    /// A worker thread panicked.
    #[error("worker {worker} panicked in stage {stage}")]
    Panicked {
        /// The worker.
        worker: u8,
        /// The stage of the poll loop it was last seen in.
        stage: &'static str,
    },
}

impl EngineConfig {
    /// Checks every range; `queues` is the number of port queues handed over.
    pub(crate) fn check(&self, queues: usize) -> Result<(), EngineError> {
        let range = |attribute, asked: u32, max: u32| match asked {
            0 => Err(bad(attribute, "0".into(), format!("1 to {max}"))),
            n if n > max => Err(bad(attribute, n.to_string(), format!("1 to {max}"))),
            _ => Ok(()),
        };
        if self.workers.is_empty() || self.workers.len() > MAX_WORKERS {
            return Err(bad("workers", self.workers.len().to_string(), format!("1 to {MAX_WORKERS}")));
        }
        if queues != self.workers.len() {
            return Err(EngineError::Config {
                attribute: "queues",
                asked: format!("{} workers", self.workers.len()),
                allowed: format!("one port queue for each worker; the port gave {queues}"),
                hint: "open the port with as many queues as there are workers".into(),
            });
        }
        range("max_qp", self.max_qp, MAX_QP)?;
        range("max_cq", self.max_cq, MAX_CQ)?;
        range("max_mr", self.max_mr, MAX_MR)?;
        for (i, a) in self.workers.iter().enumerate() {
            if a.core.is_some() && self.workers.iter().skip(i + 1).any(|b| b.core == a.core) {
                return Err(bad(
                    "workers.core",
                    format!("core {} twice", a.core.unwrap_or(0)),
                    "a core of its own for each worker".into(),
                ));
            }
        }
        Ok(())
    }
}

fn bad(attribute: &'static str, asked: String, allowed: String) -> EngineError {
    EngineError::Config { attribute, asked, allowed, hint: String::new() }
}

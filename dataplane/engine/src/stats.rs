//! Counters: one table, single-writer blocks, and the snapshot that control prints.
//!
//! Owns the names. Each worker writes its own [`WorkerBlock`] with relaxed stores (it is the only writer, so nothing is
//! lost and nothing is locked); anyone may read. Printers walk the table. Every reason for a drop has a counter of its
//! own.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use crossbeam_utils::CachePadded;
use ferroce_transport::DropReason;
use ferroce_wire::ParseError;

use crate::config::IcrcMode;
use crate::stall::Stage;

macro_rules! counters {
    ($($(#[$doc:meta])* $variant:ident = $name:literal;)*) => {
        /// What a worker counts.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr(usize)]
        pub enum Counter { $($(#[$doc])* $variant,)* }
        /// Names, in the order of [`Counter`].
        pub const COUNTER_NAMES: &[&str] = &[$($name,)*];
    };
}

counters! {
    /// Passes of the poll loop.
    Passes = "passes";
    /// Nanoseconds of passes that did work.
    BusyNs = "busy_ns";
    /// Nanoseconds of passes that did none, sleep included.
    IdleNs = "idle_ns";
    /// Adaptive sleeps.
    Sleeps = "sleeps";
    /// Frames taken from the port.
    RxFrames = "rx_frames";
    /// Their bytes.
    RxBytes = "rx_bytes";
    /// Frames given to the port.
    TxFrames = "tx_frames";
    /// Their bytes.
    TxBytes = "tx_bytes";
    /// Passes that ended transmit because the port had no room.
    TxNoRoom = "tx_no_room";
    /// Frames not sent because the interface's MTU shrank below the path MTU.
    TxOversize = "tx_oversize";
    /// Frames not sent because their headers could not be written.
    TxUnsendable = "tx_unsendable";
    /// Frames handed to the worker that owns their queue pair.
    ForwardsOut = "forwards_out";
    /// Frames taken from other workers.
    ForwardsIn = "forwards_in";
    /// Queue pairs whose next hop got another Ethernet address.
    PathsMoved = "paths_moved";
    /// Timers that fired.
    TimersFired = "timers_fired";
    /// Commands from control carried out.
    Commands = "commands";
    /// Events lost because the device's event queue was full.
    EventsLost = "events_lost";
    /// Completion queue overflows.
    CqOverflows = "cq_overflows";
    /// Completions lost to them.
    CompletionsLost = "completions_lost";
    /// Stages that did work and took longer than 100 us.
    Stalls = "stalls";
    /// Passes without work longer than 100 us: the kernel took the core away.
    Preempted = "preempted";
}

/// Why a frame was dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrameDrop {
    /// It is not a frame of ours, or a broken one.
    Parse(ParseError),
    /// No such queue pair.
    UnknownQp,
    /// No queue pair is in its multicast group.
    UnknownGroup,
    /// The owner's worker has no room for forwarded frames.
    ForwardFull,
    /// Its queue pair refused it.
    Qp(DropReason),
}

/// Reasons that are the engine's own, then those of a queue pair, after the parser's.
const OWN_DROPS: [&str; 14] = [
    "unknown_qp",
    "unknown_group",
    "forward_full",
    "wrong_service",
    "wrong_state",
    "wrong_address",
    "wrong_pkey",
    "unexpected_response",
    "out_of_sequence",
    "stale_duplicate",
    "duplicate",
    "refused",
    "not_ready",
    "wrong_qkey",
];

/// Names of the reasons, in the order of [`FrameDrop::index`].
pub const DROP_NAMES: &[&str] = &{
    let mut names = [""; ParseError::COUNT + OWN_DROPS.len()];
    let mut i = 0;
    while i < names.len() {
        names[i] =
            if i < ParseError::COUNT { ParseError::ALL[i].name() } else { OWN_DROPS[i - ParseError::COUNT] };
        i += 1;
    }
    names
};

impl FrameDrop {
    const PARSE: usize = ParseError::COUNT;

    /// Place in [`DROP_NAMES`].
    #[inline]
    pub const fn index(self) -> usize {
        match self {
            FrameDrop::Parse(reason) => reason.index(),
            FrameDrop::UnknownQp => Self::PARSE,
            FrameDrop::UnknownGroup => Self::PARSE + 1,
            FrameDrop::ForwardFull => Self::PARSE + 2,
            FrameDrop::Qp(reason) => {
                Self::PARSE
                    + 3
                    + match reason {
                        DropReason::WrongService => 0,
                        DropReason::WrongState => 1,
                        DropReason::WrongAddress => 2,
                        DropReason::WrongPkey => 3,
                        DropReason::UnexpectedResponse => 4,
                        DropReason::OutOfSequence => 5,
                        DropReason::StaleDuplicate => 6,
                        DropReason::Duplicate => 7,
                        DropReason::Refused => 8,
                        DropReason::NotReady => 9,
                        DropReason::WrongQkey => 10,
                    }
            }
        }
    }

    /// Name for outputs.
    pub fn name(self) -> &'static str {
        DROP_NAMES.get(self.index()).copied().unwrap_or("unknown")
    }
}

const COUNTERS: usize = COUNTER_NAMES.len();
const DROPS: usize = DROP_NAMES.len();

/// The counters of one worker. One writer.
#[derive(Debug)]
pub struct WorkerBlock {
    counters: CachePadded<[AtomicU64; COUNTERS]>,
    drops: CachePadded<[AtomicU64; DROPS]>,
    stage: AtomicU8,
    stall_stage: AtomicU8,
    stall_ns: AtomicU64,
}

impl Default for WorkerBlock {
    fn default() -> Self {
        WorkerBlock {
            counters: CachePadded::new([const { AtomicU64::new(0) }; COUNTERS]),
            drops: CachePadded::new([const { AtomicU64::new(0) }; DROPS]),
            stage: AtomicU8::new(0),
            stall_stage: AtomicU8::new(0),
            stall_ns: AtomicU64::new(0),
        }
    }
}

#[inline]
fn bump(cell: Option<&AtomicU64>, by: u64) {
    if let Some(cell) = cell {
        // One writer: a load and a store, no locked instruction.
        cell.store(cell.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
    }
}

impl WorkerBlock {
    /// Adds to a counter. The owning worker only.
    #[inline]
    pub fn add(&self, counter: Counter, by: u64) {
        bump(self.counters.get(counter as usize), by);
    }

    /// Counts a drop. The owning worker only.
    #[inline]
    pub fn drop_frame(&self, reason: FrameDrop) {
        bump(self.drops.get(reason.index()), 1);
    }

    /// Says which stage the worker is in, for those who find it hanging.
    #[inline]
    pub fn enter(&self, stage: Stage) {
        self.stage.store(stage as u8, Ordering::Relaxed);
    }

    /// The stage the worker was last seen in.
    pub fn stage(&self) -> Stage {
        Stage::from_u8(self.stage.load(Ordering::Relaxed))
    }

    pub(crate) fn set_stall(&self, stage: Stage, ns: u64) {
        self.stall_stage.store(stage as u8, Ordering::Relaxed);
        self.stall_ns.store(ns, Ordering::Relaxed);
    }

    /// A counter's value.
    pub fn get(&self, counter: Counter) -> u64 {
        self.counters.get(counter as usize).map_or(0, |c| c.load(Ordering::Relaxed))
    }

    /// Reads all of it.
    pub fn snapshot(&self, worker: u8, core: Option<usize>) -> WorkerStats {
        let read = |names: &'static [&'static str], cells: &[AtomicU64]| {
            names
                .iter()
                .zip(cells)
                .map(|(name, cell)| (*name, cell.load(Ordering::Relaxed)))
                .collect::<Vec<_>>()
        };
        let stalls = self.get(Counter::Stalls);
        WorkerStats {
            worker,
            core,
            counters: read(COUNTER_NAMES, &self.counters[..]),
            drops: read(DROP_NAMES, &self.drops[..]),
            last_stall: (stalls != 0).then(|| Stall {
                stage: Stage::from_u8(self.stall_stage.load(Ordering::Relaxed)).name(),
                ns: self.stall_ns.load(Ordering::Relaxed),
            }),
        }
    }
}

/// A stage that held the loop too long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stall {
    /// Which one.
    pub stage: &'static str,
    /// For how long.
    pub ns: u64,
}

/// The counters of one worker as read once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerStats {
    /// The worker.
    pub worker: u8,
    /// The core it is pinned to.
    pub core: Option<usize>,
    /// Name and value of every [`Counter`].
    pub counters: Vec<(&'static str, u64)>,
    /// Name and value of every [`FrameDrop`].
    pub drops: Vec<(&'static str, u64)>,
    /// The last stage that took over 100 us.
    pub last_stall: Option<Stall>,
}

fn find(list: &[(&'static str, u64)], name: &str) -> u64 {
    list.iter().find(|(n, _)| *n == name).map_or(0, |(_, v)| *v)
}

impl WorkerStats {
    /// A counter by name; 0 for an unknown one.
    pub fn counter(&self, name: &str) -> u64 {
        find(&self.counters, name)
    }
    /// A drop counter by name; 0 for an unknown one.
    pub fn drop(&self, name: &str) -> u64 {
        find(&self.drops, name)
    }
    /// Passes of the poll loop.
    pub fn passes(&self) -> u64 {
        self.counter("passes")
    }
}

/// The counters of an engine as read once.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EngineStats {
    /// Name of the device.
    pub name: String,
    /// Invariant CRC: outputs show it when it is off.
    pub icrc: IcrcMode,
    /// Which clock the workers read.
    pub clock: &'static str,
    /// One entry per worker.
    pub workers: Vec<WorkerStats>,
}

impl EngineStats {
    /// A counter summed over the workers.
    pub fn counter(&self, name: &str) -> u64 {
        self.workers.iter().map(|w| w.counter(name)).sum()
    }
    /// A drop counter summed over the workers.
    pub fn drop(&self, name: &str) -> u64 {
        self.workers.iter().map(|w| w.drop(name)).sum()
    }
    /// All drops of all workers.
    pub fn drops(&self) -> u64 {
        self.workers.iter().flat_map(|w| &w.drops).map(|(_, v)| v).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_a_counter_of_its_own() {
        let qp = [
            DropReason::WrongService,
            DropReason::WrongState,
            DropReason::WrongAddress,
            DropReason::WrongPkey,
            DropReason::UnexpectedResponse,
            DropReason::OutOfSequence,
            DropReason::StaleDuplicate,
            DropReason::Duplicate,
            DropReason::Refused,
            DropReason::NotReady,
            DropReason::WrongQkey,
        ];
        let mut seen: Vec<usize> = ParseError::ALL.into_iter().map(|e| FrameDrop::Parse(e).index()).collect();
        seen.extend(
            [FrameDrop::UnknownQp, FrameDrop::UnknownGroup, FrameDrop::ForwardFull].map(FrameDrop::index),
        );
        seen.extend(qp.map(|reason| FrameDrop::Qp(reason).index()));
        assert_eq!(seen, (0..DROP_NAMES.len()).collect::<Vec<_>>());
        assert_eq!(FrameDrop::Parse(ParseError::BadIcrc).name(), "bad_icrc");
        assert_eq!(FrameDrop::Parse(ParseError::Oversized).name(), "oversized");
        assert_eq!(FrameDrop::Qp(DropReason::NotReady).name(), "not_ready");
        assert_eq!(COUNTER_NAMES[Counter::Preempted as usize], "preempted");
    }
}

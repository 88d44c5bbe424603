//! One suite for all implementations of verbs: what the two traits promise, tried on two joined devices.
//!
//! Owns the cases. An implementation supplies a [`Harness`] and calls [`run`] from a test. Each case names what it needs
//! ([`Need`]); where the implementation lacks that, the case is skipped by name with the reason, and a lack that is none
//! any more is a failure. Where a check depends on a known difference from libibverbs ([`Deviation`]), the harness
//! declares it: a difference that is not declared fails, and so does a declared one that is not there. The same holds for
//! each status that a completion can have and that no case brought about. [`Report`]'s text lists all of it. Every wait is bounded by the harness's clock. Called by tests only; names no implementation, makes
//! no assumption about threads, and never looks at the clock to judge speed.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;
use core::panic::Location;
use core::time::Duration;

use crate::{AddressVector, AsyncEvent, Device, Gid, PostError, QpType, Qpn, Queues, VerbsError, WcStatus};

mod atomics;
mod bench;
mod datagram;
mod errors;
mod messages;
mod parts;
mod queues;
mod shared;
mod states;
mod unreliable;
mod windows;

pub use bench::{Bench, Side};
pub use parts::{Buffer, Params};

/// No wait is longer.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Which of the two devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The one that mostly requests.
    A,
    /// The one that mostly responds.
    B,
}

impl End {
    /// The other one.
    pub const fn peer(self) -> End {
        match self {
            End::A => End::B,
            End::B => End::A,
        }
    }
}

/// Memory that a device can register, as its owner sees it.
pub trait Block {
    /// What [`Device::reg_mr`] takes.
    type Memory;
    /// It, for registering; any number of times.
    fn memory(&self) -> Self::Memory;
    /// Writes bytes from `at` on.
    fn write(&self, at: usize, bytes: &[u8]);
    /// Reads bytes from `at` on.
    fn read(&self, at: usize, bytes: &mut [u8]);
}

/// One device, with what a program has around it.
pub trait Node {
    /// Control side.
    type Device: Device;
    /// Data side of the worker [`Node::worker`].
    type Queues: Queues;
    /// Memory.
    type Block: Block<Memory = <Self::Device as Device>::Memory>;

    /// Control side.
    fn device(&self) -> &Self::Device;
    /// Data side. Refusals of a post come from the call itself.
    fn queues(&mut self) -> &mut Self::Queues;
    /// The worker on which the suite makes its queues.
    fn worker(&self) -> u8;
    /// The device's address.
    fn gid(&self) -> Gid;
    /// Zeroed memory.
    fn block(&mut self, bytes: usize) -> Self::Block;
    /// The resolved way to `dgid`, for packets from `qpn` to `dest`.
    fn path(&mut self, dgid: Gid, qpn: Qpn, dest: Qpn) -> AddressVector;
    /// The device's oldest asynchronous event.
    fn async_event(&mut self) -> Option<AsyncEvent>;
}

/// Two devices that reach each other, and time.
pub trait Harness {
    /// Their kind.
    type Node: Node;

    /// Name for the report.
    fn name(&self) -> String;
    /// One of the two.
    fn node(&mut self, end: End) -> &mut Self::Node;
    /// A clock that only goes forward.
    fn now(&self) -> Duration;
    /// Lets others work for a short while.
    fn pause(&mut self);
    /// Why there is no `need`; `None` if there is.
    fn lacks(&self, need: Need) -> Option<String>;
    /// Why it deviates from libibverbs; `None` if it does not.
    fn deviates(&self, deviation: Deviation) -> Option<&'static str>;
    /// Why no case brings a completion of this status about; `None` if one does.
    fn never(&self, status: WcStatus) -> Option<&'static str>;
    /// Deviations that no case tries: what differs, and why.
    fn other_deviations(&self) -> Vec<(&'static str, &'static str)> {
        Vec::new()
    }
}

macro_rules! table {
    ($(#[$doc:meta])* $name:ident { $($(#[doc = $text:literal])+ $variant:ident,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        pub enum $name { $($(#[doc = $text])+ $variant,)* }
        impl $name {
            /// All of them.
            pub const ALL: &[$name] = &[$($name::$variant,)*];
            /// What it is, in words.
            pub const fn text(self) -> &'static str {
                match self { $($name::$variant => concat!($($text),+),)* }
            }
        }
    };
}

table! {
    /// What a case needs beyond reliable connections with SEND, WRITE and READ.
    Need {
        /// unreliable connections
        Uc,
        /// unreliable datagrams with address handles
        Ud,
        /// multicast groups
        Multicast,
        /// shared receive queues
        Srq,
        /// type 2 memory windows, local invalidation and SEND with invalidation
        Windows,
        /// compare-and-swap, fetch-and-add
        Atomics,
        /// completion channels
        Channels,
        /// a second worker
        TwoWorkers,
    }
}

table! {
    /// A known difference from libibverbs that a case meets.
    Deviation {
        /// a wrong local key is refused at the post, and not by a completion with LOC_PROT_ERR
        KeysCheckedAtPost,
        /// a send whose completion would find no room is refused at the post, and does not overflow the queue later
        EntryReservedAtPost,
        /// deregistering a region that posted work names is refused as busy
        DeregisterBusyByWork,
        /// deregistering a region that a window is bound to is refused as busy
        DeregisterBusyByWindow,
        /// a queue pair that fails by a request of its own gives the event QP_FATAL beside the completion
        FatalEventWithCompletion,
        /// a datagram to a group does not reach the sender's own device
        NoMulticastLoopback,
        /// unsignalled sends give their places back when they are done, and not only with a later completion
        UnsignalledGiveBack,
    }
}

/// What a case found wrong, and where.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure(String);

impl Failure {
    /// A failure at the caller's place.
    #[track_caller]
    pub fn new(what: impl fmt::Display) -> Failure {
        let at = Location::caller();
        let file = at.file().rsplit('/').next().unwrap_or("");
        Failure(format!("{file}:{}: {what}", at.line()))
    }
}

impl From<VerbsError> for Failure {
    #[track_caller]
    fn from(why: VerbsError) -> Failure {
        Failure::new(why)
    }
}

impl From<PostError> for Failure {
    #[track_caller]
    fn from(why: PostError) -> Failure {
        Failure::new(format!("a post was refused: {why:?}"))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a case, or a step of one, comes to.
pub type Outcome<T = ()> = Result<T, Failure>;

/// Fails unless the two are equal.
#[track_caller]
fn same<T: PartialEq + fmt::Debug>(what: &str, found: T, wanted: T) -> Outcome {
    if found == wanted {
        return Ok(());
    }
    Err(Failure::new(format!("{what}: {found:?}, not {wanted:?}")))
}

/// Fails unless it holds.
#[track_caller]
fn holds(what: &str, holds: bool) -> Outcome {
    if holds { Ok(()) } else { Err(Failure::new(format!("not so: {what}"))) }
}

/// A case.
pub struct Case<H: Harness> {
    /// Its name.
    pub name: &'static str,
    /// What it needs.
    pub needs: &'static [Need],
    /// What it does.
    pub run: fn(&mut Bench<'_, H>) -> Outcome,
}

/// The table rows of a module: name, needs, function.
macro_rules! cases {
    ($($(#[$doc:meta])* $name:ident [$($need:ident),*];)*) => {
        pub(super) fn cases<H: super::Harness>() -> alloc::vec::Vec<super::Case<H>> {
            alloc::vec![$(super::Case {
                name: stringify!($name),
                needs: &[$(super::Need::$need),*],
                run: $name::<H>,
            }),*]
        }
    };
}
use cases;

/// All cases.
pub fn all<H: Harness>() -> Vec<Case<H>> {
    [
        messages::cases(),
        errors::cases(),
        states::cases(),
        queues::cases(),
        shared::cases(),
        windows::cases(),
        atomics::cases(),
        unreliable::cases(),
        datagram::cases(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// What ran and what did not.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Name of the harness.
    pub harness: String,
    /// Cases that passed.
    pub passed: Vec<&'static str>,
    /// Cases that failed, and how.
    pub failed: Vec<(&'static str, String)>,
    /// Cases that were skipped, and why.
    pub skipped: Vec<(&'static str, String)>,
    /// Deviations that cases met, and why they are.
    pub deviations: Vec<(Deviation, &'static str)>,
    /// Deviations by the implementation's own word.
    pub other_deviations: Vec<(&'static str, &'static str)>,
    /// Statuses that completions had.
    pub statuses: Vec<WcStatus>,
    /// Statuses that none had, and why.
    pub never: Vec<(WcStatus, &'static str)>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { passed, failed, skipped, .. } = self;
        let (ok, bad, not) = (passed.len(), failed.len(), skipped.len());
        writeln!(f, "verbs conformance of {}: {ok} passed, {bad} failed, {not} skipped", self.harness)?;
        for (case, why) in failed {
            writeln!(f, "  FAILED  {case}: {why}")?;
        }
        for (case, why) in skipped {
            writeln!(f, "  skipped {case}: {why}")?;
        }
        writeln!(f, "  deviations from libibverbs:")?;
        for (what, why) in &self.deviations {
            writeln!(f, "  -{}: {why}", what.text())?;
        }
        for (what, why) in &self.other_deviations {
            writeln!(f, "  - {what}: {why} (not tried)")?;
        }
        for (status, why) in &self.never {
            writeln!(f, "  - no completion has the status {status:?}: {why}")?;
        }
        Ok(())
    }
}

/// Runs the cases whose names `wanted` accepts. Only a run of all of them judges lacks and deviations.
pub fn run_some<H: Harness>(harness: &mut H, wanted: impl Fn(&str) -> bool) -> Report {
    let mut report = Report { harness: harness.name(), ..Report::default() };
    for case in all::<H>() {
        if !wanted(case.name) {
            continue;
        }
        let lack = case.needs.iter().find_map(|need| harness.lacks(*need).map(|why| (*need, why)));
        if let Some((need, why)) = lack {
            report.skipped.push((case.name, format!("needs{}: {why}", need.text())));
            continue;
        }
        let mut bench = Bench::new(harness);
        let ran = (case.run)(&mut bench);
        let (swept, met, statuses) = bench.sweep();
        match ran.and(swept) {
            Ok(()) => report.passed.push(case.name),
            Err(why) => report.failed.push((case.name, why.to_string())),
        }
        for status in statuses {
            if !report.statuses.contains(&status) {
                report.statuses.push(status);
            }
        }
        for deviation in met {
            if !report.deviations.iter().any(|(known, _)| *known == deviation) {
                report.deviations.push((deviation, harness.deviates(deviation).unwrap_or("not declared")));
            }
        }
    }
    report.other_deviations = harness.other_deviations();
    report.never =
        WcStatus::ALL.iter().filter_map(|status| Some((*status, harness.never(*status)?))).collect();
    report
}

/// Runs all cases.
pub fn run<H: Harness>(harness: &mut H) -> Report {
    let mut report = run_some(harness, |_| true);
    for need in Need::ALL.iter().copied() {
        if harness.lacks(need).is_some() && has(harness, need) {
            let why = format!("the device has{}, but the harness says that it lacks it", need.text());
            report.failed.push(("lacks", why));
        }
    }
    let skipped = !report.skipped.is_empty();
    for deviation in Deviation::ALL {
        let met = report.deviations.iter().any(|(known, _)| known == deviation);
        // A case that would meet it may be among the skipped.
        if harness.deviates(*deviation).is_some() && !met && !skipped {
            report.failed.push(("deviations", format!("declared, but not met:{}", deviation.text())));
        }
    }
    for status in WcStatus::ALL {
        let why = match (report.statuses.contains(&status), harness.never(status)) {
            (true, Some(_)) => "declared as never brought about, but a completion had it",
            (false, None) if !skipped => "no completion had it",
            _ => continue,
        };
        report.failed.push(("statuses", format!("{status:?}: {why}")));
    }
    report
}

/// Whether the devices have something, by trying the first step of it.
pub fn has<H: Harness>(harness: &mut H, need: Need) -> bool {
    let mut bench = Bench::new(harness);
    let there = probe(&mut bench, need).unwrap_or(false);
    let _ = bench.sweep();
    there
}

fn probe<H: Harness>(bench: &mut Bench<'_, H>, need: Need) -> Outcome<bool> {
    let attr = bench.device(End::A).query_device()?;
    Ok(match need {
        Need::Uc => bench.try_qp(End::A, QpType::Uc)?.is_ok(),
        Need::Ud => bench.try_qp(End::A, QpType::Ud)?.is_ok(),
        Need::Multicast => attr.max_mcast_grp > 0 && bench.try_qp(End::A, QpType::Ud)?.is_ok(),
        Need::Srq => attr.max_srq > 0,
        Need::Windows => windows::there(bench)?,
        Need::Atomics => atomics::there(bench)?,
        Need::Channels => bench.device(End::A).create_comp_channel().is_ok(),
        Need::TwoWorkers => attr.workers > 1,
    })
}

//! What control may ask a worker to do.
//!
//! Everything that allocates or frees is made, or dropped, by control: commands carry boxes in, answers carry them out.
//! Carried out by [`crate::core::WorkerCore`] in the mailbox stage.

use std::sync::Arc;

use ferroce_mem::memory::RegisterError;
use ferroce_mem::{DeregisterError, Lkey, PdId};
use ferroce_transport::{ModifyError, QpCounters, Srq};
use ferroce_verbs::{ClassId, CqId, MacAddr, QpInfo, QpModify, Qpn, Rkey, SrqId, SrqInfo};

use crate::app::AppPort;
use crate::cq::Cq;
use crate::demux::QpSlot;
use crate::device::Netdev;
use crate::mailbox::{Mailbox, Registration};
use crate::mcast::Member;
use crate::sched::Share;

/// A command.
pub(crate) enum Command {
    /// Enter a region into the key table.
    Register(Registration),
    /// Let no new window and no new work name it, if nothing does now.
    CloseMr(Lkey),
    /// Undo that.
    ReopenMr(Lkey),
    /// Take it out again.
    Deregister(Lkey),
    /// Take over a window.
    AllocMw { rkey: Rkey, pd: PdId },
    /// Free it.
    DeallocMw(Rkey),
    /// A queue pair, here or on another worker, receives what is sent to a group.
    JoinGroup(Member),
    /// No longer.
    LeaveGroup(Member),
    /// Take over a completion queue.
    CreateCq { index: u32, cq: Box<Cq> },
    /// Give it back.
    DestroyCq { index: u32, id: CqId },
    /// About a shared receive queue.
    Srq(SrqCommand),
    /// Take over a queue pair in RESET.
    CreateQp { index: u32, slot: Box<QpSlot> },
    /// Make a transition.
    ModifyQp { qpn: Qpn, modify: QpModify },
    /// The peer's next hop, or the port, has another Ethernet address.
    Repath { qpn: Qpn, smac: MacAddr, dmac: MacAddr },
    /// Tell what is known of it.
    QueryQp { qpn: Qpn, report: Box<QpReport> },
    /// Give it back.
    DestroyQp { qpn: Qpn },
    /// Give a class its share of the port.
    SetShare { class: ClassId, share: Share },
    /// Serve an application's rings.
    Attach(Box<AppPort>),
    /// Give them back.
    Detach { id: u32 },
    /// News of the network device.
    Netdev(Arc<Netdev>),
}

/// What control may ask about a shared receive queue.
pub(crate) enum SrqCommand {
    /// Take over a shared receive queue.
    Create { id: SrqId, srq: Box<Srq> },
    /// Set its limit.
    Limit { id: SrqId, limit: u32 },
    /// Move it into other memory, and give the old back.
    Resize { id: SrqId, room: Box<Srq> },
    /// Tell what is known of it.
    Query(SrqId),
    /// Give it back.
    Destroy(SrqId),
}

/// An answer.
pub(crate) enum Answer {
    /// Done.
    Done,
    /// What the command brought in and the worker did not keep, or gave back: for control to drop.
    Qp(#[allow(dead_code)] Box<QpSlot>),
    /// As above.
    Cq(#[allow(dead_code)] Box<Cq>),
    /// As above.
    Srq(#[allow(dead_code)] Box<Srq>),
    /// As above, but it was not kept.
    SrqRefused(#[allow(dead_code)] Box<Srq>),
    /// What is known of a shared receive queue.
    SrqInfo(SrqInfo),
    /// As above.
    App(#[allow(dead_code)] Box<AppPort>),
    /// As above.
    Netdev(#[allow(dead_code)] Arc<Netdev>),
    /// What is known of a queue pair: the report that the command brought, filled in.
    Info(Box<QpReport>),
    /// No such object on this worker.
    NotFound,
    /// The key table refused.
    Key(RegisterError),
    /// The region is in use.
    Busy(DeregisterError),
    /// There is no room.
    Full,
    /// The transition was refused.
    Modify(ModifyError),
}

/// State and counters of a queue pair, filled in by its worker.
pub(crate) type QpReport = Option<(QpInfo, QpCounters)>;

/// A worker's mailbox.
pub(crate) type CommandBox = Mailbox<Command, Answer>;

//! Faults planted between the transport and the fabric: each makes the transport look as if it were wrong.
//!
//! Owns what the planted faults of the simulator do to headers on their way out, to packets on their way in and to
//! completions. The transport has no part in it, and nothing in it knows of a plant: what lies inside of a queue pair is
//! brought about by its image, or by the order of what it is told. Called by [`crate::world`] and its sink; judges nothing.

use std::collections::{BTreeMap, BTreeSet};

use ferroce_mem::Memory;
use ferroce_transport::{Completion, Notice, Qp, Srq};
use ferroce_verbs::{PostError, QpType, RecvWr, Rkey, Sge, WcFlags, WcStatus};
use ferroce_wire::opcode::{Op, Part};
use ferroce_wire::{Bth, Ext, Imm, Packet, RemoteAddr, Service, Syndrome};

use crate::checker::ViolationKind;
use crate::endpoint::QpSlot;
use crate::workload::QKEY;

/// A fault planted on purpose, to show that the checkers find it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Planted {
    /// Frames are taken without a look at their ICRC.
    SkipIcrc,
    /// A byte of every 40th received payload changes after the ICRC check.
    FlipPayload,
    /// Every 20th completion vanishes.
    LoseCompletion,
    /// Every 20th completion comes twice.
    DoubleCompletion,
    /// Of two completions polled together the second comes first.
    SwapCompletions,
    /// A byte of registered memory outside all targets changes.
    StrayWrite,
    /// Timers never fire.
    LoseTimers,
    /// Every 20th request that asks for it is acknowledged before it has arrived.
    EarlyAck,
    /// ACKs acknowledge one packet more than arrived.
    AckTooFar,
    /// Answers to READs and atomics are not given a second time.
    ReplayLost,
    /// A duplicate atomic is executed again.
    DuplicateExecuted,
    /// A request is sent although the RNR time is not over.
    RnrWaitSkipped,
    /// PSNs of answers are compared without the wrap.
    PsnWrap,
    /// PSNs have 23 bits.
    PsnShort,
    /// A READ that is resumed begins one path MTU too early.
    ResumedReadOff,
    /// A request ahead of the expected one is taken as that.
    GapIgnored,
    /// A READ response ahead of the expected one is taken as that.
    ResponseGapIgnored,
    /// A UC packet after a gap goes on with the message.
    UcGapIgnored,
    /// The queue key of a datagram is not looked at.
    QkeyIgnored,
    /// A datagram's completion does not count the 40 bytes before it.
    GrhNotCounted,
    /// The sender's number of a datagram is wrong.
    SourceQpn,
    /// Immediate data comes in the other byte order.
    ImmSwapped,
    /// No event is solicited.
    SolicitedLost,
    /// WRITEs go one byte too far.
    WriteOff,
    /// The result of an atomic comes in the other byte order.
    AtomicResultSwapped,
    /// A compare and swap swaps only by chance.
    CompareWrong,
    /// A completion does not tell of the key that a SEND ended.
    InvalidateUntold,
    /// A request that failed is reported as done.
    FailureHidden,
    /// What is flushed in error is not reported.
    FlushLost,
    /// The notice of a failure does not come.
    NoticeLost,
    /// The retry counter is not reloaded when the peer acknowledges something.
    RetriesNotReloaded,
    /// UC serves nothing any more after the first gap.
    UcDeaf,
    /// The key of a WRITE is checked at its first packet only.
    KeyCheckedOnce,
    /// Of two receives in a shared queue the second is taken first.
    SharedOrder,
    /// The limit event of a shared queue does not come.
    LimitLost,
    /// It comes twice.
    LimitTwice,
    /// The event after the last receive of a queue pair with a shared queue does not come.
    LastWqeLost,
    /// A member of a group gets each datagram twice.
    GroupTwice,
    /// Datagrams to a group go to everybody.
    GroupIgnored,
    /// Of the members at one place only the first gets what is sent to the group.
    GroupFirstOnly,
    /// A send queue goes on while it is drained.
    DrainIgnored,
    /// A send queue is told to be drained before it is.
    DrainedEarly,
    /// Nobody is told that a send queue is drained.
    DrainedLost,
    /// An atomic that is answered again is answered with another result.
    ReplayResult,
    /// A request behind a fence does not wait.
    FenceIgnored,
}

impl Planted {
    /// All of them.
    pub const ALL: [Planted; 45] = [
        Planted::SkipIcrc,
        Planted::FlipPayload,
        Planted::LoseCompletion,
        Planted::DoubleCompletion,
        Planted::SwapCompletions,
        Planted::StrayWrite,
        Planted::LoseTimers,
        Planted::EarlyAck,
        Planted::AckTooFar,
        Planted::ReplayLost,
        Planted::DuplicateExecuted,
        Planted::RnrWaitSkipped,
        Planted::PsnWrap,
        Planted::PsnShort,
        Planted::ResumedReadOff,
        Planted::GapIgnored,
        Planted::ResponseGapIgnored,
        Planted::UcGapIgnored,
        Planted::QkeyIgnored,
        Planted::GrhNotCounted,
        Planted::SourceQpn,
        Planted::ImmSwapped,
        Planted::SolicitedLost,
        Planted::WriteOff,
        Planted::AtomicResultSwapped,
        Planted::CompareWrong,
        Planted::InvalidateUntold,
        Planted::FailureHidden,
        Planted::FlushLost,
        Planted::NoticeLost,
        Planted::RetriesNotReloaded,
        Planted::UcDeaf,
        Planted::KeyCheckedOnce,
        Planted::SharedOrder,
        Planted::LimitLost,
        Planted::LimitTwice,
        Planted::LastWqeLost,
        Planted::GroupTwice,
        Planted::GroupIgnored,
        Planted::GroupFirstOnly,
        Planted::DrainIgnored,
        Planted::DrainedEarly,
        Planted::DrainedLost,
        Planted::ReplayResult,
        Planted::FenceIgnored,
    ];

    /// What the checkers that are meant for it report.
    pub const fn meant(self) -> &'static [ViolationKind] {
        use ViolationKind::*;
        match self {
            Planted::SkipIcrc => &[DamageAccepted],
            Planted::FlipPayload | Planted::WriteOff | Planted::FenceIgnored => &[BytesDiffer, NotWhole],
            Planted::LoseCompletion | Planted::DoubleCompletion | Planted::FlushLost => {
                &[OutOfOrder, NotOnce]
            }
            Planted::SwapCompletions | Planted::SharedOrder => &[OutOfOrder],
            Planted::StrayWrite => &[StrayWrite],
            Planted::LoseTimers | Planted::DrainedLost => &[Stuck],
            // The sender is told that a message is in which is not.
            Planted::EarlyAck | Planted::AckTooFar => &[NotOnce, BytesDiffer],
            // Answers that come to nothing, though no wire lost them, or the work of others taken for one's own.
            Planted::ReplayLost | Planted::PsnWrap | Planted::PsnShort => &[WrongRetries, Stuck],
            Planted::ResumedReadOff => &[BytesDiffer, WrongRetries],
            Planted::DuplicateExecuted
            | Planted::AtomicResultSwapped
            | Planted::CompareWrong
            | Planted::ReplayResult => &[AtomicNotOnce],
            Planted::RnrWaitSkipped => &[BadFrame],
            Planted::GapIgnored | Planted::ResponseGapIgnored => &[BytesDiffer, WrongStatus, WrongCompletion],
            Planted::UcGapIgnored | Planted::QkeyIgnored | Planted::GroupTwice | Planted::GroupIgnored => {
                &[NotWhole]
            }
            Planted::GrhNotCounted => &[NotWhole, WrongCompletion],
            Planted::SourceQpn | Planted::ImmSwapped | Planted::SolicitedLost | Planted::InvalidateUntold => {
                &[WrongCompletion]
            }
            Planted::FailureHidden => &[NotOnce, WrongStatus],
            Planted::NoticeLost | Planted::LimitLost | Planted::LimitTwice | Planted::LastWqeLost => {
                &[WrongNotice]
            }
            Planted::RetriesNotReloaded => &[WrongRetries],
            Planted::UcDeaf | Planted::GroupFirstOnly => &[NotServed],
            Planted::KeyCheckedOnce => &[KeyOutlived],
            Planted::DrainIgnored | Planted::DrainedEarly => &[NotDrained],
        }
    }
}

/// What a plant remembers of a queue pair.
#[derive(Default, Debug)]
pub(crate) struct Memo {
    /// First address of READs by the address behind their end.
    reads: BTreeMap<u64, u64>,
    /// PSNs of answers that were given, by number.
    answered: BTreeSet<u32>,
    /// Key of the last WRITE that began.
    pub(crate) write_key: Rkey,
    /// UC has seen a gap.
    deaf: bool,
}

/// The shared queue that swaps receives: every second one is held back until the next is posted.
#[derive(Default)]
pub(crate) struct Swapped {
    held: Option<(u64, Vec<Sge>)>,
    count: u64,
}

impl Swapped {
    pub(crate) fn post(&mut self, srq: &mut Srq, wr: &RecvWr<'_>, memory: &Memory) -> Result<(), PostError> {
        self.count += 1;
        if self.count.is_multiple_of(20) {
            self.held = Some((wr.wr_id, wr.sg_list.to_vec()));
            return Ok(());
        }
        srq.post_recv(wr, memory)?;
        match self.held.take() {
            Some((wr_id, list)) => srq.post_recv(&RecvWr { wr_id, sg_list: &list }, memory),
            None => Ok(()),
        }
    }
}

/// Who gets a datagram to a group, by index at an endpoint.
pub(crate) fn members(planted: Planted, mut members: Vec<usize>, qps: &[QpSlot]) -> Vec<usize> {
    match planted {
        Planted::GroupTwice => members.iter().flat_map(|index| [*index, *index]).collect(),
        Planted::GroupIgnored => {
            (0..qps.len()).filter(|index| qps[*index].qp.service() == Service::Ud).collect()
        }
        Planted::GroupFirstOnly => {
            members.truncate(1);
            members
        }
        _ => members,
    }
}

/// True if a notice must not be told.
pub(crate) fn hides(planted: Planted, notice: &Notice) -> bool {
    match planted {
        Planted::NoticeLost => matches!(notice, Notice::Fatal { .. }),
        Planted::LastWqeLost => *notice == Notice::LastWqeReached,
        Planted::DrainedLost | Planted::DrainedEarly => *notice == Notice::Drained,
        _ => false,
    }
}

/// Changes headers on their way out.
pub(crate) fn outgoing(planted: Planted, memo: &mut Memo, mtu: u32, bth: &mut Bth, ext: &mut Ext) {
    let op = bth.opcode.op();
    match planted {
        Planted::AckTooFar
            if op == Op::Ack
                && ext.aeth.is_some_and(|aeth| matches!(aeth.syndrome, Syndrome::Ack { .. })) =>
        {
            bth.psn = bth.psn.advance(1);
        }
        Planted::PsnShort => bth.psn = ferroce_wire::Psn::new(bth.psn.get() & 0x7f_ffff),
        Planted::ResumedReadOff if op == Op::ReadRequest => {
            if let Some(reth) = &mut ext.reth {
                let end = reth.addr.0.wrapping_add(u64::from(reth.len.0));
                let first = *memo.reads.entry(end).or_insert(reth.addr.0);
                if reth.addr.0 >= first.saturating_add(u64::from(mtu)) {
                    reth.addr = RemoteAddr(reth.addr.0 - u64::from(mtu));
                }
            }
        }
        Planted::QkeyIgnored => {
            if let Some(deth) = &mut ext.deth {
                deth.qkey = QKEY;
            }
        }
        Planted::ImmSwapped => ext.imm = ext.imm.map(|Imm([a, b, c, d])| Imm([d, c, b, a])),
        Planted::SolicitedLost => bth.solicited = false,
        Planted::WriteOff if op == Op::Write => {
            if let Some(reth) = &mut ext.reth {
                reth.addr = RemoteAddr(reth.addr.0.wrapping_add(1));
            }
        }
        Planted::ReplayResult if op == Op::AtomicAck && !memo.answered.insert(bth.psn.get()) => {
            ext.atomic_ack = ext.atomic_ack.map(|was| was.wrapping_add(1));
        }
        Planted::AtomicResultSwapped => ext.atomic_ack = ext.atomic_ack.map(u64::swap_bytes),
        Planted::CompareWrong if op == Op::CmpSwap => {
            if let Some(atomic) = &mut ext.atomic {
                atomic.compare = !atomic.compare;
            }
        }
        _ => {}
    }
}

/// True if this answer must not be sent.
pub(crate) fn silences(planted: Planted, memo: &mut Memo, bth: &Bth) -> bool {
    planted == Planted::ReplayLost
        && matches!(bth.opcode.op(), Op::ReadResponse | Op::AtomicAck)
        && !memo.answered.insert(bth.psn.get())
}

/// Changes a packet on its way in; false if it must not come in at all.
pub(crate) fn incoming(planted: Planted, qp: &Qp, memo: &mut Memo, packet: &mut Packet) -> bool {
    let info = qp.info();
    let bth = &mut packet.headers.bth;
    let (op, part) = (bth.opcode.op(), bth.opcode.part());
    let request = !bth.opcode.is_response();
    match planted {
        Planted::PsnWrap if !request => return bth.psn.get() >= info.una_psn.get(),
        Planted::GapIgnored
            if info.qp_type == QpType::Rc && request && bth.psn.offset_from(info.rq_psn) > 0 =>
        {
            bth.psn = info.rq_psn;
        }
        Planted::UcGapIgnored if info.qp_type == QpType::Uc && matches!(part, Part::Middle | Part::Last) => {
            bth.psn = info.rq_psn;
        }
        Planted::UcDeaf if info.qp_type == QpType::Uc => {
            memo.deaf |= bth.psn != info.rq_psn;
            return !memo.deaf;
        }
        Planted::ResponseGapIgnored if op == Op::ReadResponse && bth.psn.offset_from(info.una_psn) > 0 => {
            bth.psn = info.una_psn;
        }
        _ => {}
    }
    true
}

/// Changes a completion; false if it must not be reported.
pub(crate) fn completion(planted: Planted, completion: &mut Completion) -> bool {
    let Completion::Wc(wc) = completion else { return true };
    match planted {
        Planted::GrhNotCounted if wc.flags.contains(WcFlags::GRH) => wc.byte_len -= 40,
        Planted::SourceQpn if wc.flags.contains(WcFlags::GRH) => wc.src_qpn = wc.qpn,
        Planted::InvalidateUntold => wc.flags.remove(WcFlags::WITH_INV),
        Planted::FailureHidden => wc.status = WcStatus::Success,
        Planted::FlushLost => return wc.status != WcStatus::WrFlushErr,
        _ => {}
    }
    true
}

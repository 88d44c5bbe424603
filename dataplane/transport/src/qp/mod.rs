//! [`Qp`]: the queue pair that engine and simulator drive. Dispatches only.

pub(crate) mod attr;
mod base;
pub(crate) mod post;
pub mod state;

use alloc::vec::Vec;

use ferroce_mem::{Memory, Payload};
use ferroce_verbs::{
    AddressVector, ClassId, PathMtu, PostError, QpInfo, QpInitAttr, QpModify, QpState, QpType, RecvWr,
    RtrAttrs, RtsAttrs, SendWr, Wc, WcStatus,
};
use ferroce_wire::{MacAddr, NakCode, Packet, Psn, Qpn, Service};

pub(crate) use base::Base;

use crate::arrival::Arrival;
use crate::completion;
use crate::counters::{QpCounter, QpCounters};
use crate::image::ImportError;
use crate::rc::{Psns, Rc};
use crate::sink::{FrameSink, Transmit};
use crate::srq::Srq;
use crate::time::Instant;
use crate::unreliable::{Sender, Uc, UcReceiver, Ud, UdReceiver};

/// READs and atomics that one queue pair can have outstanding, or serve, at once.
pub const MAX_RD_ATOMIC: u8 = 128;

/// Work requests that one queue of a queue pair can hold.
pub const MAX_WR: u32 = 1 << 15;

/// Why a packet that parsed was dropped by its queue pair. Each has a counter in the engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum DropReason {
    /// Service of the opcode is not the queue pair's.
    WrongService,
    /// State does not allow receiving.
    WrongState,
    /// Source or destination address is not the queue pair's.
    WrongAddress,
    /// Partition key does not match.
    WrongPkey,
    /// Response that nothing waits for.
    UnexpectedResponse,
    /// Request ahead of the expected PSN (a NAK went out, or had gone out before).
    OutOfSequence,
    /// Duplicate that can't be replayed.
    StaleDuplicate,
    /// Duplicate that was answered again and not executed again.
    Duplicate,
    /// Refused: with a NAK on a reliable connection, which may be in error now; the message is dropped elsewhere.
    Refused,
    /// No receive posted: RNR NAK on a reliable connection, dropped elsewhere.
    NotReady,
    /// Queue key is not the queue pair's (UD).
    WrongQkey,
}

/// A finished work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Completion {
    /// Goes to the completion queue.
    Wc(Wc),
    /// An unsignalled send succeeded: its queue slot (and reserved completion entry) is free again.
    Retired,
}

/// News for control.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notice {
    /// First packet arrived in RTR.
    CommEst,
    /// The queue pair went to error by itself: what happened, and the PSN it concerns (the last one sent, for
    /// exhausted retries).
    Fatal {
        /// Status of the work request that failed; `FatalErr` if none did.
        status: WcStatus,
        /// PSN.
        psn: Psn,
        /// NAK that we sent, if we refused a request.
        nak: Option<NakCode>,
    },
    /// The send queue is drained (SQD).
    Drained,
    /// In error, and the last receive that it had from its shared receive queue is reported.
    LastWqeReached,
}

/// Why a transition was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ModifyError {
    /// Not a transition of this queue pair type from this state.
    BadTransition {
        /// State it is in.
        from: QpState,
    },
    /// `max_rd_atomic` or `max_dest_rd_atomic` above what the queue pair can hold.
    TooManyRdAtomic {
        /// Largest allowed.
        allowed: u8,
    },
    /// A field is out of its range; its libibverbs name.
    BadAttr(&'static str),
}

/// Per service state.
#[expect(clippy::large_enum_variant, reason = "read for every packet: no indirection")]
pub(crate) enum Machine {
    Rc(Rc),
    Uc(Uc),
    Ud(Ud),
}

/// A queue pair.
pub struct Qp {
    pub(crate) base: Base,
    pub(crate) machine: Machine,
}

impl Qp {
    /// A queue pair in RESET. Its memory is allocated here, but for the responder's resources, which INIT -> RTR sizes.
    /// Queues of more than [`MAX_WR`] requests are cut to that; [`Qp::info`] tells the sizes in force. With a shared
    /// receive queue `cap.max_recv_wr` is not looked at, and `cap.max_recv_sge` must be at least the shared queue's.
    pub fn new(qpn: Qpn, attr: &QpInitAttr) -> Qp {
        let machine = match attr.qp_type {
            QpType::Rc => Machine::Rc(Rc::new()),
            QpType::Uc => Machine::Uc(Uc { sender: Sender::new(Service::Uc), receiver: UcReceiver::new() }),
            QpType::Ud => {
                let receiver = UdReceiver { mtu: PathMtu::Mtu256 };
                Machine::Ud(Ud { sender: Sender::new(Service::Ud), receiver })
            }
        };
        Qp { base: Base::new(qpn, attr), machine }
    }

    /// The peer's next hop, or our own port, has other Ethernet addresses now; nothing else of the path changes.
    pub fn set_link(&mut self, smac: MacAddr, dmac: MacAddr) {
        if let Some(rtr) = &mut self.base.rtr {
            (rtr.av.smac, rtr.av.dmac) = (smac, dmac);
        }
    }

    /// The packet with this PSN, which the sink took last, is longer than the interface carries and did not leave: the
    /// queue pair goes to error. The oldest unfinished send fails with `LocLenErr`; a response (to a READ) is refused to the
    /// peer instead, with a NAK that says that the fault is here.
    pub fn cannot_carry(&mut self, psn: Psn, is_response: bool) {
        if self.base.state == QpState::Err {
            return;
        }
        match &mut self.machine {
            Machine::Rc(rc) if is_response => rc.cannot_answer(&mut self.base, psn),
            Machine::Rc(_) | Machine::Uc(_) | Machine::Ud(_) => {
                self.base.fail_send(WcStatus::LocLenErr, psn);
            }
        }
    }

    /// Appends the image of the queue pair: all that it is. Whoever moves it exports it, gives the bytes to
    /// [`Qp::import`] elsewhere, and ends this one by [`Qp::release_all`]; what happens to it in between is lost. A shared
    /// receive queue is not part of it, windows are not either: they live in [`Memory`].
    pub fn export(&self, image: &mut Vec<u8>) {
        crate::image::export(self, image);
    }

    /// The queue pair of an image, at the same point: the peer can't tell, nor can the application. It holds no keys yet
    /// ([`Qp::hold_posted`]). Never panics, whatever the bytes are; keys are checked when they are used.
    pub fn import(image: &[u8]) -> Result<Qp, ImportError> {
        crate::image::import(image)
    }

    /// Holds the keys of posted work ([`Memory::hold`]) after an import, as far as they are known here.
    pub fn hold_posted(&mut self, memory: &Memory) {
        self.base.sq.queue.hold_posted(memory);
        self.base.rq.queue.hold_posted(memory);
    }

    /// Its number.
    #[inline]
    pub const fn qpn(&self) -> Qpn {
        self.base.qpn
    }

    /// Its service.
    #[inline]
    pub const fn service(&self) -> Service {
        self.machine.service()
    }

    /// Its state.
    #[inline]
    pub const fn state(&self) -> QpState {
        self.base.state
    }

    /// Path to the peer, from RTR on.
    #[inline]
    pub fn av(&self) -> Option<&AddressVector> {
        self.base.rtr.as_ref().map(|rtr| &rtr.av)
    }

    /// Traffic class; the default class before RTR.
    #[inline]
    pub fn class(&self) -> ClassId {
        self.base.rtr.as_ref().map_or(ClassId(0), |rtr| rtr.class)
    }

    /// Path MTU, from RTR on.
    #[inline]
    pub fn path_mtu(&self) -> Option<PathMtu> {
        self.base.rtr.as_ref().map(|rtr| rtr.path_mtu)
    }

    /// Sends that may still be posted. A slot is free again once its completion was polled.
    #[inline]
    pub fn send_queue_free(&self) -> u32 {
        self.base.sq.queue.free()
    }

    /// Receives that may still be posted.
    #[inline]
    pub fn recv_queue_free(&self) -> u32 {
        self.base.rq.queue.free()
    }

    /// Attributes and PSNs (field `worker` is 0; the engine fills it in).
    pub fn info(&self) -> QpInfo {
        let base = &self.base;
        let psns = match &self.machine {
            Machine::Rc(rc) => rc.psns(),
            Machine::Uc(uc) => {
                Psns { next: uc.sender.psn, una: uc.sender.psn, expected: uc.receiver.expected }
            }
            Machine::Ud(ud) => Psns { next: ud.sender.psn, una: ud.sender.psn, expected: Psn::default() },
        };
        QpInfo {
            qpn: base.qpn,
            qp_type: base.attr.qp_type,
            state: base.state,
            pd: base.attr.pd,
            send_cq: base.attr.send_cq,
            recv_cq: base.attr.recv_cq,
            cap: base.attr.cap,
            sq_sig_all: base.attr.sq_sig_all,
            srq: base.attr.srq,
            init: base.init,
            rtr: base.rtr,
            rts: base.rts,
            sq_psn: psns.next,
            rq_psn: psns.expected,
            una_psn: psns.una,
            worker: 0,
        }
    }

    /// Counters.
    pub const fn counters(&self) -> &QpCounters {
        &self.base.counters
    }

    /// Makes a transition, or changes attributes. To ERR flushes (completions follow), to RESET discards.
    pub fn modify(&mut self, now: Instant, modify: &QpModify) -> Result<(), ModifyError> {
        let _ = now;
        let from = self.base.state;
        let event = state::QpEvent::of(modify);
        let to = state::step(from, event).ok_or(ModifyError::BadTransition { from })?;
        attr::check(&self.base, modify)?;
        match modify {
            QpModify::ToInit(init) => self.base.init = Some(*init),
            QpModify::ToRtr(rtr) => {
                self.base.rtr = Some(*rtr);
                self.machine.start_receiving(rtr);
            }
            QpModify::ToRts(rts) => {
                self.base.rts = Some(*rts);
                self.machine.start_sending(&self.base, rts);
            }
            QpModify::Change(change) => {
                self.base.change(change);
                if let Machine::Rc(rc) = &mut self.machine {
                    rc.change(&self.base);
                }
            }
            QpModify::SqeToRts => {
                self.base.sq.queue.finish_all(|entry| entry.outcome = Some(WcStatus::WrFlushErr));
                self.machine.resume_sending();
            }
            QpModify::ToErr => self.base.enter_error(),
            QpModify::ToReset => {
                self.base.reset();
                self.machine.reset();
            }
            QpModify::ToSqd | QpModify::SqdToRts => {}
        }
        self.base.state = to;
        if to == QpState::Sqd && event == state::QpEvent::ToSqd {
            self.machine.check_drained(&mut self.base);
        }
        Ok(())
    }

    /// Posts a send: state, operation, sizes and local keys are checked; nothing is posted on error.
    #[inline]
    pub fn post_send(&mut self, wr: &SendWr<'_>, memory: &Memory) -> Result<(), PostError> {
        post::send(&mut self.base, wr, memory)
    }

    /// Posts a receive.
    #[inline]
    pub fn post_recv(&mut self, wr: &RecvWr<'_>, memory: &Memory) -> Result<(), PostError> {
        post::recv(&mut self.base, wr, memory)
    }

    /// Takes a packet whose ICRC is right. Places its payload, notes what to answer. For a queue pair with a shared
    /// receive queue see [`Qp::handle_packet_srq`]: here it has no receives.
    #[inline]
    pub fn handle_packet(
        &mut self,
        now: Instant,
        packet: &Packet,
        payload: &Payload<'_>,
        memory: &Memory,
    ) -> Result<(), DropReason> {
        self.handle_packet_srq(now, packet, payload, memory, None)
    }

    /// As [`Qp::handle_packet`], with the shared receive queue of the queue pair. Ask it by [`Srq::poll_limit`]
    /// afterwards.
    #[inline]
    pub fn handle_packet_srq(
        &mut self,
        now: Instant,
        packet: &Packet,
        payload: &Payload<'_>,
        memory: &Memory,
        srq: Option<&mut Srq>,
    ) -> Result<(), DropReason> {
        let headers = &packet.headers;
        if headers.bth.opcode.service() != self.machine.service() {
            return Err(DropReason::WrongService);
        }
        if !state::may_receive(self.base.state) {
            return Err(DropReason::WrongState);
        }
        let (Some(init), Some(rtr)) = (&self.base.init, &self.base.rtr) else {
            return Err(DropReason::WrongState);
        };
        let connected = self.base.attr.qp_type != QpType::Ud;
        if connected && (headers.ip.src_gid() != rtr.av.dgid || headers.ip.dst_gid() != rtr.av.sgid) {
            return Err(DropReason::WrongAddress);
        }
        if !init.pkey.matches(headers.bth.pkey) {
            return Err(DropReason::WrongPkey);
        }
        self.base.counters.add(QpCounter::RcvdPkts, 1);
        let mut arrival = Arrival { packet, payload, memory, srq };
        match &mut self.machine {
            Machine::Rc(rc) => rc.handle_packet(&mut self.base, now, &mut arrival),
            Machine::Uc(uc) => uc.receiver.on_packet(&mut self.base, &mut arrival),
            Machine::Ud(ud) => ud.receiver.on_packet(&mut self.base, &mut arrival),
        }
    }

    /// Tells that the time of [`Qp::poll_timeout`] has come. Harmless when it has not.
    pub fn handle_timeout(&mut self, now: Instant) {
        match &mut self.machine {
            Machine::Rc(rc) => rc.handle_timeout(&mut self.base, now),
            Machine::Uc(_) | Machine::Ud(_) => {}
        }
    }

    /// Next packet to send: answers first (ACKs, NAKs, READ responses), then requests. While both READ responses and
    /// requests wait they take turns, so that a long READ by the peer can't hold up our own requests. Local operations
    /// are done here too, and sends may fail: poll completions again afterwards.
    #[inline]
    pub fn poll_transmit<S: FrameSink>(&mut self, now: Instant, memory: &Memory, sink: &mut S) -> Transmit {
        match &mut self.machine {
            Machine::Rc(rc) => rc.poll_transmit(&mut self.base, now, memory, sink),
            Machine::Uc(uc) => uc.sender.poll(&mut self.base, memory, sink),
            Machine::Ud(ud) => ud.sender.poll(&mut self.base, memory, sink),
        }
    }

    /// Next finished work request, in order of each queue.
    #[inline]
    #[must_use]
    pub fn poll_completion(&mut self) -> Option<Completion> {
        completion::next(&mut self.base)
    }

    /// Next notice.
    #[inline]
    #[must_use]
    pub fn poll_notice(&mut self) -> Option<Notice> {
        let receives_out = self.base.rq.queue.len() > 0;
        self.base.notices.take(receives_out)
    }

    /// Releases the keys of work that was reported ([`Memory::hold`]). Done by every post too; whoever reads completions
    /// calls this afterwards, so that a region can be deregistered as soon as nothing posted names it.
    #[inline]
    pub fn release(&mut self, memory: &Memory) {
        self.base.sq.queue.release(memory);
        self.base.rq.queue.release(memory);
    }

    /// Releases the keys of all posted work: before a queue pair is dropped, or when its image has moved on.
    pub fn release_all(&mut self, memory: &Memory) {
        self.base.sq.queue.release_all(memory);
        self.base.rq.queue.release_all(memory);
    }

    /// When [`Qp::handle_timeout`] wants to be called next.
    #[inline]
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        match &self.machine {
            Machine::Rc(rc) => rc.poll_timeout(&self.base),
            Machine::Uc(_) | Machine::Ud(_) => None,
        }
    }
}

impl Machine {
    #[inline]
    const fn service(&self) -> Service {
        match self {
            Machine::Rc(_) => Service::Rc,
            Machine::Uc(_) => Service::Uc,
            Machine::Ud(_) => Service::Ud,
        }
    }

    fn start_receiving(&mut self, rtr: &RtrAttrs) {
        match self {
            Machine::Rc(rc) => rc.start_responder(rtr),
            Machine::Uc(uc) => uc.receiver.start(rtr.path_mtu, rtr.rq_psn),
            Machine::Ud(ud) => ud.receiver.mtu = rtr.path_mtu,
        }
    }

    fn start_sending(&mut self, base: &Base, rts: &RtsAttrs) {
        let mtu = base.rtr.map_or(PathMtu::Mtu256, |rtr| rtr.path_mtu);
        match self {
            Machine::Rc(rc) => rc.start_requester(base, rts),
            Machine::Uc(Uc { sender, .. }) | Machine::Ud(Ud { sender, .. }) => sender.start(mtu, rts.sq_psn),
        }
    }

    fn resume_sending(&mut self) {
        match self {
            Machine::Rc(_) => {}
            Machine::Uc(Uc { sender, .. }) | Machine::Ud(Ud { sender, .. }) => sender.resume(),
        }
    }

    fn check_drained(&self, base: &mut Base) {
        match self {
            Machine::Rc(rc) => rc.check_drained(base),
            Machine::Uc(Uc { sender, .. }) | Machine::Ud(Ud { sender, .. }) => sender.check_drained(base),
        }
    }

    fn reset(&mut self) {
        match self {
            Machine::Rc(rc) => rc.reset(),
            Machine::Uc(uc) => {
                uc.sender = Sender::new(Service::Uc);
                uc.receiver = UcReceiver::new();
            }
            Machine::Ud(ud) => ud.sender = Sender::new(Service::Ud),
        }
    }
}

//! [`Host`]: one real queue pair over real memory, and everything that it must never do.
//!
//! Owns the queue pair, its shared receive queue, the key table, the bytes and the [`Model`]. Every call into the queue
//! pair goes through here and is followed by its checks.

use std::ops::Range;

use ferroce_mem::{Access, DeregisterError, Memory, MrInfo, Payload, PdId};
use ferroce_transport::{Completion, DropReason, Instant, Notice, Qp, Srq, Transmit};
use ferroce_verbs::{
    PostError, QpInfo, QpModify, QpState, RecvWr, SendFlags, SendOp, SendWr, Sge, SrqInitAttr, UdDest,
};
use ferroce_wire::{Ip, Op, Packet, Service, check_frame};

use super::buffer::{BYTES, Buffer, PD, PLANS, Plan};
use super::frame::Frame;
use super::model::{Model, Recv, Send};
use super::setup::{Setup, av};

/// One side.
pub struct Host {
    /// The queue pair.
    pub qp: Qp,
    /// Its shared receive queue.
    pub srq: Option<Srq>,
    /// The key table.
    pub memory: Memory,
    /// What is planned, and what is registered of it.
    pub regions: Vec<(Plan, Option<MrInfo>)>,
    /// How it was made.
    pub setup: Setup,
    /// What is known of it.
    pub model: Model,
    /// The clock.
    pub now: Instant,
    /// Counts of held keys are as the model has them.
    pub counted: bool,
    buffer: Buffer,
    bytes: Vec<u8>,
    next_id: u64,
}

/// A send to post.
pub struct Post<'a> {
    /// Operation.
    pub op: SendOp,
    /// Entries.
    pub sges: &'a [Sge],
    /// Inline data.
    pub inline: &'a [u8],
    /// Flags.
    pub flags: SendFlags,
    /// Where a datagram goes.
    pub dest: Option<UdDest>,
}

impl Host {
    /// In RESET.
    pub fn new(setup: Setup) -> Host {
        let mut memory = Memory::with_windows(16, 8, 42);
        let buffer = Buffer::new();
        let regions = PLANS.map(|plan| (plan, Some(buffer.register(&mut memory, &plan)))).to_vec();
        for _ in 0..2 {
            memory.alloc_window(PD).expect("a window");
        }
        let srq = setup.attr.srq.map(|id| {
            let attr = SrqInitAttr { pd: PD, max_wr: setup.srq_wr, max_sge: 3, limit: 2 };
            Srq::new(id, &attr)
        });
        let bytes = buffer.to_vec();
        let qp = Qp::new(setup.qpn, &setup.attr);
        let (model, now) = (Model::default(), Instant(1_000_000));
        Host { qp, srq, memory, regions, setup, model, now, counted: true, buffer, bytes, next_id: 1 }
    }

    /// As far as `state` on the usual way.
    pub fn bring_up(&mut self, state: QpState) {
        let Setup { init, rtr, rts, .. } = self.setup;
        let steps = match state {
            QpState::Reset => 0,
            QpState::Init => 1,
            QpState::Rtr => 2,
            QpState::Rts | QpState::Sqe => 3,
            QpState::Sqd | QpState::Err => 4,
        };
        let last = if state == QpState::Sqd { QpModify::ToSqd } else { QpModify::ToErr };
        let way = [QpModify::ToInit(init), QpModify::ToRtr(rtr), QpModify::ToRts(rts), last];
        for step in &way[..steps] {
            let from = self.qp.state();
            assert!(self.modify(step), "{step:?} from {from:?}");
        }
    }

    /// Makes a transition; true if it was taken.
    pub fn modify(&mut self, modify: &QpModify) -> bool {
        let before = self.qp.info();
        let taken = self.qp.modify(self.now, modify).is_ok();
        if !taken {
            assert_eq!(self.qp.info(), before, "a refused transition changes nothing");
        } else {
            match modify {
                QpModify::ToReset => self.model.reset(),
                QpModify::ToRts(rts) => self.model.start(rts.sq_psn, rts.timeout),
                QpModify::ToSqd => self.model.drained = false,
                QpModify::Change(change) => {
                    self.model.timed &= change.timeout.is_none() && change.max_rd_atomic.is_none();
                }
                _ => {}
            }
        }
        self.settled(&[], "a transition");
        taken
    }

    /// Bytes outside `allowed` are as they were. Returns how many changed.
    fn settled(&mut self, allowed: &[Range<usize>], what: &str) -> usize {
        let cap = self.qp.info().cap;
        self.model.agrees(&self.qp.info(), cap.max_send_wr - self.qp.send_queue_free());
        if self.setup.attr.srq.is_none() {
            let posted = cap.max_recv_wr - self.qp.recv_queue_free();
            assert_eq!(posted as usize, self.model.recvs.len(), "receives posted and not completed");
        }
        if self.buffer.is(&self.bytes) {
            return 0;
        }
        let now = self.buffer.to_vec();
        let mut changed = 0;
        // In pieces: an instrumented loop over every byte is slow.
        for start in (0..BYTES).step_by(64) {
            let piece = start..(start + 64).min(BYTES);
            if now[piece.clone()] == self.bytes[piece.clone()] {
                continue;
            }
            for at in piece.filter(|at| now[*at] != self.bytes[*at]) {
                assert!(allowed.iter().any(|range| range.contains(&at)), "{what} changed byte {at:#x}");
                changed += 1;
            }
        }
        self.bytes = now;
        changed
    }

    /// Where entries that were posted lie, as far as they can be written.
    fn places(&self, sges: &[Sge]) -> Vec<Range<usize>> {
        let written = |sge: &Sge| {
            self.regions.iter().find_map(|(plan, info)| {
                let info = info.filter(|info| info.lkey == sge.lkey)?;
                if info.pd != self.pd() || !info.access.contains(Access::LOCAL_WRITE) {
                    return None;
                }
                let start = plan.offset + usize::try_from(sge.addr.checked_sub(plan.iova)?).ok()?;
                Some(start..(start + sge.length as usize).min(plan.offset + plan.len))
            })
        };
        sges.iter().filter_map(written).collect()
    }

    /// Everything that the owner may write: what an image of unknown origin may name.
    fn owned(&self) -> Vec<Range<usize>> {
        let of = |(plan, info): &(Plan, Option<MrInfo>)| {
            info.filter(|info| info.pd == self.pd() && info.access.contains(Access::LOCAL_WRITE))
                .map(|_| plan.offset..plan.offset + plan.len)
        };
        self.regions.iter().filter_map(of).collect()
    }

    fn pd(&self) -> PdId {
        self.setup.attr.pd
    }

    fn receives(&self) -> Vec<Range<usize>> {
        if self.model.imported {
            return self.owned();
        }
        self.model.recvs.iter().chain(&self.model.srq).flat_map(|recv| self.places(&recv.sges)).collect()
    }

    fn fetches(&self) -> Vec<Range<usize>> {
        if self.model.imported {
            return self.owned();
        }
        let fetches = self.model.sends.iter().filter(|send| send.fetches);
        fetches.flat_map(|send| self.places(&send.sges)).collect()
    }

    /// What a peer is granted `right` to by keys: `addr .. addr + len` of `rkey` only, if given.
    fn granted(&self, right: Access, only: Option<(u32, u64, u64)>) -> Vec<Range<usize>> {
        let mut out = Vec::new();
        let mut grant = |rkey: u32, plan: &Plan, addr: u64, len: u64| {
            let (from, to) = match only {
                Some((key, ..)) if key != rkey => return,
                Some((_, at, bytes)) => (at.max(addr), at.saturating_add(bytes).min(addr + len)),
                None => (addr, addr + len),
            };
            if from < to {
                let start = plan.offset + (from - plan.iova) as usize;
                out.push(start..start + (to - from) as usize);
            }
        };
        for (plan, info) in &self.regions {
            if let Some(info) = info.filter(|info| info.pd == self.pd() && info.access.contains(right)) {
                grant(info.rkey.0, plan, info.iova, info.len);
            }
        }
        for window in self.memory.list_windows(0, 16).0 {
            let Some(bound) = window.bound else { continue };
            let ours = bound.qpn == self.qp.qpn() && bound.access.contains(right) && window.pd == self.pd();
            let region = self.regions.iter().find(|(_, info)| info.is_some_and(|i| i.lkey == bound.lkey));
            if let (Some((plan, _)), true) = (region, ours) {
                grant(window.rkey.0, plan, bound.addr, bound.len);
            }
        }
        out
    }

    /// What a packet may change.
    fn may_change(&self, packet: &Packet) -> Vec<Range<usize>> {
        match packet.headers.bth.opcode.op() {
            Op::Send => self.receives(),
            Op::Write => {
                if !self.qp.info().init.is_some_and(|init| init.access.contains(Access::REMOTE_WRITE)) {
                    return Vec::new();
                }
                let reth = packet.headers.ext.reth;
                self.granted(Access::REMOTE_WRITE, reth.map(|r| (r.rkey.0, r.addr.0, r.len.0.into())))
            }
            Op::ReadResponse | Op::AtomicAck => self.fetches(),
            Op::ReadRequest | Op::Ack | Op::CmpSwap | Op::FetchAdd | Op::Cnp => Vec::new(),
        }
    }

    /// A frame arrives; its payload in one piece, or in two.
    pub fn deliver(&mut self, frame: &[u8], cut: usize) {
        let Ok(packet) = check_frame(frame) else { return };
        let start = usize::from(packet.payload_offset);
        let bytes = &frame[start..start + usize::from(packet.payload_len)];
        if self.qp.service() == Service::Ud {
            // What is in the queue then is what the datagram will be in.
            self.complete(1000);
        }
        let (first, second) = bytes.split_at(cut.min(bytes.len()));
        let mut payload = Payload::from_slice(first);
        assert!(payload.push_slice(second));
        let before = self.qp.info();
        let allowed = self.may_change(&packet);
        let held = self.srq.as_ref().map_or(0, |srq| srq.info().posted);
        let taken = self.qp.handle_packet_srq(self.now, &packet, &payload, &self.memory, self.srq.as_mut());
        let left = self.srq.as_mut().map_or(0, |srq| {
            let _ = srq.poll_limit();
            srq.info().posted
        });
        assert!(held - left <= 1, "one message takes one receive");
        if left < held {
            let recv = self.model.srq.pop_front().expect("a receive of the shared queue");
            self.model.recvs.push_back(recv);
        }
        let receives = matches!(before.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe);
        assert!(receives || taken.is_err(), "taken in {:?}: {packet}", before.state);
        self.moved_by_itself(&before, QpState::Err);
        let changed = self.settled(&allowed, "a packet");
        let most = match packet.headers.bth.opcode.service() {
            Service::Ud => bytes.len() + 40,
            _ => bytes.len().max(8),
        };
        assert!(changed <= most, "{changed} bytes changed by {packet}");
        assert!(receives || changed == 0, "memory changed in {:?}", before.state);
        if taken == Err(DropReason::Duplicate) || taken == Err(DropReason::StaleDuplicate) {
            assert_eq!((changed, left), (0, held), "a duplicate was executed: {packet}");
        }
        if taken.is_ok() && !packet.headers.bth.opcode.is_response() {
            self.model.last_taken = Some(packet.headers.bth.psn);
            self.check_placed(&packet, frame, bytes);
        }
    }

    /// The bytes of a datagram, or of a WRITE in one packet, are where they belong.
    fn check_placed(&self, packet: &Packet, frame: &[u8], payload: &[u8]) {
        let opcode = packet.headers.bth.opcode;
        if opcode.service() == Service::Ud {
            let Some(Recv { sges, .. }) = self.model.recvs.front().filter(|recv| recv.sges.len() == 1) else {
                return;
            };
            let Some(place) = self.places(sges).pop() else { return };
            let ip = usize::from(packet.ip_offset);
            let header = match packet.headers.ip {
                Ip::V4 { .. } => [&[0; 20], &frame[ip..ip + 20]].concat(),
                Ip::V6 { .. } => frame[ip..ip + 40].to_vec(),
            };
            assert_eq!(self.bytes[place.clone()][..40], header, "the GRH area of {packet}");
            assert_eq!(self.bytes[place][40..40 + payload.len()], *payload, "{packet}");
        }
        let reth = packet.headers.ext.reth.filter(|reth| reth.len.0 as usize == payload.len());
        if let (Some(reth), Op::Write) = (reth, opcode.op()) {
            let of = |(_, info): &&(Plan, Option<MrInfo>)| info.is_some_and(|info| info.rkey == reth.rkey);
            if let (Some((plan, _)), false) = (self.regions.iter().find(of), payload.is_empty()) {
                let start = plan.offset + (reth.addr.0 - plan.iova) as usize;
                assert_eq!(self.bytes[start..start + payload.len()], *payload, "{packet}");
            }
        }
    }

    /// A queue pair leaves its state without being told only for `to`.
    fn moved_by_itself(&mut self, before: &QpInfo, to: QpState) {
        let state = self.qp.state();
        if state == before.state {
            return;
        }
        assert!(state == to || state == QpState::Err, "{:?} became {state:?}", before.state);
        self.model.broke |= state == QpState::Err;
    }

    /// One frame, if the queue pair has one; with or without room, with or without a way for datagrams.
    pub fn transmit(&mut self, room: bool, way: bool) -> (Transmit, Option<Vec<u8>>) {
        let before = self.qp.info();
        let path = self.qp.av().copied();
        let mut sink = Frame::new(path.unwrap_or(av(false, 1, 2)), room, way);
        // Whether the queue pair allows atomics was asked when this one was accepted.
        let mut allowed = self.granted(Access::REMOTE_ATOMIC, None);
        let answer = self.qp.poll_transmit(self.now, &self.memory, &mut sink);
        assert_eq!(answer == Transmit::Sent, sink.begun(), "Sent if and only if a packet was begun");
        // A window may have been bound on the way.
        allowed.extend(self.granted(Access::REMOTE_ATOMIC, None));
        self.moved_by_itself(&before, QpState::Sqe);
        let mut frame = None;
        if sink.begun() {
            let bytes = sink.seal();
            let packet = check_frame(&bytes).expect("what a queue pair sends is well-formed");
            self.model.on_sent(&before, self.qp.service(), &packet);
            self.check_answer(&packet);
            frame = Some(bytes);
        }
        assert!(self.settled(&allowed, "an atomic") <= 8, "more than an atomic changed");
        self.check_waiting(answer);
        (answer, frame)
    }

    /// An answer concerns what was expected, or comes before that.
    fn check_answer(&self, packet: &Packet) {
        let bth = &packet.headers.bth;
        if !bth.opcode.is_response() || self.model.imported {
            return;
        }
        let ahead = bth.psn.offset_from(self.qp.info().rq_psn);
        let nak = packet.headers.ext.aeth.is_some_and(|aeth| aeth.syndrome.to_u8() & 0x60 != 0);
        assert!(ahead < i32::from(nak), "{packet} answers what did not arrive");
    }

    /// Whoever has nothing to send and waits for an answer has set a time to look again.
    fn check_waiting(&mut self, answer: Transmit) {
        let (info, timer) = (self.qp.info(), self.qp.poll_timeout());
        match answer {
            Transmit::Idle
                if matches!(info.state, QpState::Rts | QpState::Sqd)
                    && info.una_psn != info.sq_psn
                    && self.qp.service() == Service::Rc
                    && self.model.timed =>
            {
                assert!(timer.is_some(), "waits for ever: {info:?}");
            }
            Transmit::Idle if info.state == QpState::Rts && self.qp.service() != Service::Rc => {
                self.complete(1000);
                assert!(self.model.sends.is_empty(), "not sent: {:?}", self.model.sends);
            }
            Transmit::Later(until) => {
                assert!(until > self.now && timer.is_some(), "later is now, or never: {until:?} {timer:?}");
            }
            Transmit::Idle | Transmit::Sent | Transmit::NoRoom => {}
        }
    }

    /// Time passes.
    pub fn wait(&mut self, ns: u64) {
        self.now = self.now.after(ns);
        let before = self.qp.info();
        self.qp.handle_timeout(self.now);
        self.moved_by_itself(&before, QpState::Err);
        let timer = self.qp.poll_timeout();
        assert!(timer.is_none_or(|at| at > self.now), "{timer:?} is over at {:?}", self.now);
        self.settled(&[], "time");
    }

    /// Reads up to `most` completions and all notices. Returns how many it read.
    pub fn complete(&mut self, most: usize) -> usize {
        let mut read = 0;
        while read < most {
            let Some(completion) = self.qp.poll_completion() else {
                let state = self.qp.state();
                if state == QpState::Err {
                    assert!(self.model.recvs.is_empty(), "receives not flushed: {:?}", self.model.recvs);
                }
                if matches!(state, QpState::Err | QpState::Sqe) {
                    assert!(self.model.sends.is_empty(), "sends not flushed: {:?}", self.model.sends);
                }
                break;
            };
            if let Completion::Wc(wc) = &completion {
                assert_eq!(wc.qpn, self.qp.qpn());
            }
            self.model.on_completion(&completion);
            read += 1;
        }
        for notice in 0.. {
            assert!(notice < 5, "a kind of notice came twice");
            match self.qp.poll_notice() {
                Some(Notice::Fatal { .. }) => self.model.on_fatal(),
                Some(Notice::LastWqeReached) => {
                    assert!(self.model.recvs.is_empty() && self.setup.attr.srq.is_some());
                }
                Some(Notice::Drained) => self.model.drained = true,
                Some(Notice::CommEst) => {}
                None => break,
            }
        }
        let info = self.qp.info();
        let idle = match self.qp.service() {
            Service::Rc => info.una_psn == info.sq_psn,
            Service::Ud => true,
            Service::Uc | Service::Cnp => false,
        };
        if info.state == QpState::Sqd && idle && !self.model.imported {
            assert!(self.model.drained, "drained, and nobody was told");
        }
        self.settled(&[], "a completion");
        read
    }

    /// Posts a send.
    pub fn post_send(&mut self, post: &Post<'_>) -> Result<(), PostError> {
        let Post { op, sges, inline, flags, dest } = *post;
        let wr = SendWr { wr_id: self.next_id, op, sg_list: sges, inline, flags, ud: dest.as_ref() };
        let posted = self.qp.post_send(&wr, &self.memory);
        if posted.is_ok() {
            let is_inline = flags.contains(SendFlags::INLINE);
            let bytes = if is_inline {
                inline.len() as u64
            } else {
                sges.iter().map(|sge| u64::from(sge.length)).sum()
            };
            self.model.sends.push_back(Send {
                id: Some(self.next_id),
                signaled: Some(flags.contains(SendFlags::SIGNALED) || self.setup.attr.sq_sig_all),
                len: Some(bytes as u32),
                fetches: matches!(op, SendOp::Read { .. } | SendOp::CmpSwap { .. } | SendOp::FetchAdd { .. }),
                sges: if is_inline { Vec::new() } else { sges.to_vec() },
            });
            self.next_id += 1;
        }
        self.settled(&[], "a post");
        posted
    }

    /// Posts a receive, to the shared queue if there is one.
    pub fn post_recv(&mut self, sges: &[Sge]) -> Result<(), PostError> {
        let wr = RecvWr { wr_id: self.next_id, sg_list: sges };
        let posted = match &mut self.srq {
            Some(srq) => srq.post_recv(&wr, &self.memory),
            None => self.qp.post_recv(&wr, &self.memory),
        };
        if posted.is_ok() {
            let room = sges.iter().map(|sge| u64::from(sge.length)).sum();
            let recv = Recv { id: Some(self.next_id), room: Some(room), sges: sges.to_vec() };
            let queue = if self.srq.is_some() { &mut self.model.srq } else { &mut self.model.recvs };
            queue.push_back(recv);
            self.next_id += 1;
        }
        self.settled(&[], "a post");
        posted
    }

    /// Exported, imported and exported again; the successor takes over.
    pub fn relocate(&mut self) {
        let mut image = Vec::new();
        self.qp.export(&mut image);
        let moved = Qp::import(&image).unwrap_or_else(|why| panic!("{why}\n{:?}", self.qp.info()));
        let mut again = Vec::new();
        moved.export(&mut again);
        assert!(image == again, "an image of an image is the image");
        assert_eq!(moved.info(), self.qp.info());
        self.replace(moved);
        self.settled(&[], "a move");
    }

    /// `qp` takes over.
    pub fn replace(&mut self, mut qp: Qp) {
        self.qp.release_all(&self.memory);
        qp.hold_posted(&self.memory);
        self.qp = qp;
    }

    /// Ends a registration, the hard way or if nobody uses it; or makes it again.
    pub fn toggle_region(&mut self, which: usize, hard: bool) {
        let which = which % self.regions.len();
        let (plan, info) = self.regions[which];
        let Some(info) = info else {
            self.regions[which].1 = Some(self.buffer.register(&mut self.memory, &plan));
            return;
        };
        self.qp.release(&self.memory);
        let held = self.model.holds(info.lkey);
        match self.memory.deregister(info.lkey) {
            Ok(_) => assert!(held == 0 || !self.counted, "{held} entries are posted"),
            Err(DeregisterError::Busy { windows, posted }) => {
                assert!(posted == held || !self.counted, "{posted} entries held, {held} posted");
                assert!(windows > 0 || posted > 0, "busy with nothing");
                if !hard {
                    return;
                }
                self.counted &= held == 0;
                self.memory.revoke(info.lkey).expect("a region");
            }
            Err(DeregisterError::Unknown) => panic!("unknown: {info:?}"),
        }
        self.regions[which].1 = None;
    }

    /// To ERR; then everything completes, at most once each, and no key stays held.
    pub fn finish(mut self) {
        self.modify(&QpModify::ToErr);
        // Answers that are still owed are bounded by the regions that they read.
        let mut frames = 0;
        while self.transmit(true, true).0 == Transmit::Sent {
            frames += 1;
            assert!(frames < 20_000, "never stops sending");
        }
        self.complete(1000);
        if self.qp.state() == QpState::Err {
            self.model.finished();
        }
        assert_eq!(self.qp.poll_timeout(), None, "a timer in {:?}", self.qp.state());
        self.qp.release_all(&self.memory);
        if let Some(srq) = &mut self.srq {
            srq.clear(&self.memory);
        }
        for window in self.memory.list_windows(0, 16).0 {
            self.memory.dealloc_window(window.rkey).expect("a window");
        }
        for (_, info) in &self.regions {
            if let Some(info) = info {
                assert!(self.memory.deregister(info.lkey).is_ok(), "a key stays held: {info:?}");
            }
        }
    }
}

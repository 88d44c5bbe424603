//! Endpoints, wires and time: everything that is between a work request and its completion.
//!
//! Owns the queue pairs, their memory and the wires. Drives each queue pair by the transport's calling convention, as
//! the engine does. The caller posts work and calls [`World::step`]; it gets completions and notices back. Checks only
//! what needs no knowledge of the work: frames are well-formed, undamaged ones are accepted, damaged ones are not, no
//! packet carries more than the path MTU. Called by [`crate::run`]; never decides what work there is.

use std::collections::BTreeMap;

use ferroce_mem::os::Block;
use ferroce_mem::{MrInfo, MwInfo, Payload, PdId};
use ferroce_transport::{Completion, DropReason, FrameSink, Instant, Notice, Qp, QpCounter, Transmit};
use ferroce_verbs::{AddressVector, PostError, QpInitAttr, QpModify, RecvWr, Rkey, SendWr};
use ferroce_wire::{
    Aeth, Bth, Ext, Headers, Icrc, Msn, Opcode, Packet, ParseError, Psn, Qpn, Service, Syndrome, check_frame,
    emit, packet,
};

use crate::checker::{Violation, ViolationKind};
use crate::clock::Clock;
pub use crate::endpoint::EndpointInit;
use crate::endpoint::{Endpoint, QpSlot};
use crate::link::{Cable, Fate, Faults, Frame, Link, LinkStats};
use crate::plants::{self, Memo, Planted};
use crate::rng::Rng;
use crate::sink::Sink;
use crate::trace::{Line, Trace, What};

/// A queue pair of the world.
#[derive(Clone, Copy, PartialEq, Eq, Debug, PartialOrd, Ord)]
pub struct QpRef {
    /// Endpoint.
    pub endpoint: usize,
    /// Index at the endpoint.
    pub index: usize,
}

/// What [`World::step`] tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Happening {
    /// A work request finished.
    Completion(QpRef, Completion),
    /// News for control.
    Notice(QpRef, Notice),
    /// The time of [`World::wake_at`] has come.
    Wake(u64),
}

enum Event {
    Arrive(usize, Frame),
    Timer(QpRef),
    Poll(usize),
    Wake(u64),
}

/// Counters of a whole world.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorldStats {
    /// Of all wires.
    pub links: LinkStats,
    /// Frames refused, by [`ParseError::index`].
    pub refused: [u64; ParseError::COUNT],
    /// Packets that queue pairs dropped, by reason.
    pub dropped: BTreeMap<String, u64>,
    /// Packets sent again.
    pub retransmits: u64,
    /// RNR NAKs sent.
    pub rnr: u64,
    /// ACK timeouts.
    pub timeouts: u64,
    /// Duplicate requests seen.
    pub duplicates: u64,
    /// Requests ahead of the expected PSN.
    pub out_of_sequence: u64,
}

/// Endpoints, wires and time.
pub struct World {
    clock: Clock<Event>,
    endpoints: Vec<Endpoint>,
    links: Vec<Link>,
    rng: Rng,
    /// A stream of its own: that queue pairs move must change nothing.
    moves: Rng,
    moves_ppm: u32,
    /// Moves so far.
    pub moved: u64,
    trace: Trace,
    refused: [u64; ParseError::COUNT],
    dropped: BTreeMap<String, u64>,
    violation: Option<Violation>,
    planted: Option<Planted>,
    plant_count: u64,
    scratch: Vec<(Instant, Frame)>,
}

impl World {
    /// A world of `endpoints`, all joined to all by wires of the same kind; `faults` gives those of a direction.
    pub fn new(
        seed: u64,
        endpoints: &[EndpointInit],
        cable: Cable,
        mut faults: impl FnMut(usize, usize) -> Faults,
        verbose: bool,
    ) -> anyhow::Result<World> {
        let count = endpoints.len();
        let mut links = Vec::new();
        for from in 0..count {
            for to in 0..count {
                let rng = Rng::new(seed, 0x11_0000 + (from * count + to) as u64);
                links.push(Link::new(cable, faults(from, to), rng));
            }
        }
        let endpoints = endpoints
            .iter()
            .enumerate()
            .map(|(i, init)| Endpoint::new(seed, i, init))
            .collect::<Result<_, _>>()?;
        Ok(World {
            clock: Clock::default(),
            endpoints,
            links,
            rng: Rng::new(seed, 0x22),
            moves: Rng::new(seed, 0x55),
            moves_ppm: 0,
            moved: 0,
            trace: Trace::new(verbose),
            refused: [0; ParseError::COUNT],
            dropped: BTreeMap::new(),
            violation: None,
            planted: None,
            plant_count: 0,
            scratch: Vec::new(),
        })
    }

    /// From now on queue pairs move so often.
    pub fn set_moves(&mut self, ppm: u32) {
        self.moves_ppm = ppm;
    }
    /// Plants a fault.
    pub fn plant(&mut self, planted: Planted) {
        self.planted = Some(planted);
    }
    /// The time.
    pub fn now(&self) -> Instant {
        self.clock.now()
    }
    /// When the next event happens; `None` when the world is at rest.
    pub fn next_event(&self) -> Option<Instant> {
        self.clock.peek()
    }
    /// The last packets.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }
    /// The region of an endpoint.
    pub fn mr(&self, endpoint: usize) -> MrInfo {
        self.endpoints[endpoint].mr
    }
    /// Its memory.
    pub fn memory(&self, endpoint: usize) -> &Block {
        self.endpoints[endpoint].block()
    }
    /// Makes a window at an endpoint.
    pub fn add_window(&mut self, endpoint: usize) -> anyhow::Result<Rkey> {
        Ok(self.endpoints[endpoint].regions.alloc_window(Self::PD)?.rkey)
    }
    /// The window with the upper bits of this key.
    pub fn window(&self, endpoint: usize, rkey: Rkey) -> Option<MwInfo> {
        self.endpoints[endpoint].regions.memory().window(rkey)
    }
    /// A queue pair.
    pub fn qp(&self, at: QpRef) -> &Qp {
        &self.endpoints[at.endpoint].qps[at.index].qp
    }
    /// Furthest PSN that a request packet of a queue pair carried.
    pub fn last_sent(&self, at: QpRef) -> Option<Psn> {
        self.endpoints[at.endpoint].qps[at.index].last_sent
    }
    /// Protection domain of an endpoint's queue pairs and region.
    pub const PD: PdId = PdId(7);

    /// Adds a queue pair in RESET.
    pub fn add_qp(&mut self, endpoint: usize, qpn: Qpn, attr: &QpInitAttr) -> QpRef {
        let owner = &mut self.endpoints[endpoint];
        owner.by_qpn.insert(qpn.get(), owner.qps.len());
        owner.qps.push(QpSlot {
            qp: Qp::new(qpn, attr),
            armed: None,
            last_sent: None,
            quiet: None,
            memo: Memo::default(),
        });
        QpRef { endpoint, index: owner.qps.len() - 1 }
    }

    /// The address vector from one endpoint to another.
    pub fn path(&self, from: usize, to: usize, v6: bool) -> AddressVector {
        let (sgid, dgid) =
            (self.endpoints[from].gids[usize::from(v6)], self.endpoints[to].gids[usize::from(v6)]);
        AddressVector {
            sgid,
            dgid,
            smac: mac(from),
            dmac: mac(to),
            vlan: None,
            traffic_class: 0x6a,
            flow_label: if v6 { 0x12345 } else { 0 },
            hop_limit: 64,
            sl: 3,
            udp_src: 0xc000,
        }
    }

    /// Makes a transition.
    pub fn modify(&mut self, at: QpRef, modify: &QpModify) -> anyhow::Result<()> {
        let now = self.now();
        let qp = &mut self.endpoints[at.endpoint].qps[at.index].qp;
        qp.modify(now, modify).map_err(|e| anyhow::anyhow!("{modify:?} of {at:?}: {e:?}"))?;
        self.poll_soon(at.endpoint, now);
        Ok(())
    }

    /// Posts a send.
    pub fn post_send(&mut self, at: QpRef, wr: &SendWr<'_>) -> Result<(), PostError> {
        let owner = &mut self.endpoints[at.endpoint];
        owner.qps[at.index].qp.post_send(wr, owner.regions.memory())?;
        self.poll_soon(at.endpoint, self.now());
        Ok(())
    }

    /// Posts a receive.
    pub fn post_recv(&mut self, at: QpRef, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let owner = &mut self.endpoints[at.endpoint];
        owner.qps[at.index].qp.post_recv(wr, owner.regions.memory())?;
        self.poll_soon(at.endpoint, self.now());
        Ok(())
    }

    /// Makes [`Happening::Wake`] with `token` happen.
    pub fn wake_at(&mut self, when: Instant, token: u64) {
        self.clock.at(when, Event::Wake(token));
    }
    /// From now on no wire does anything wrong.
    pub fn heal(&mut self) {
        self.links.iter_mut().for_each(Link::heal);
    }
    /// Loses everything between two endpoints until then.
    pub fn cut(&mut self, a: usize, b: usize, until: Instant) {
        let count = self.endpoints.len();
        self.links[a * count + b].cut(until);
        self.links[b * count + a].cut(until);
    }

    /// Lets the next event happen and collects what came of it. False when the world is at rest.
    pub fn step(&mut self, out: &mut Vec<Happening>) -> Result<bool, Violation> {
        let Some(event) = self.clock.pop() else { return Ok(false) };
        match event {
            Event::Arrive(to, frame) => self.arrive(to, &frame),
            Event::Timer(at) => self.timer(at),
            // An earlier pass was planned after this one: it took its place.
            Event::Poll(endpoint) if self.endpoints[endpoint].poll_at != Some(self.now()) => {}
            Event::Poll(endpoint) => {
                self.endpoints[endpoint].poll_at = None;
                self.poll(endpoint, out);
            }
            Event::Wake(token) => out.push(Happening::Wake(token)),
        }
        match self.violation.take() {
            Some(violation) => Err(violation),
            None => Ok(true),
        }
    }

    /// Counters so far.
    pub fn stats(&self) -> WorldStats {
        let mut stats =
            WorldStats { refused: self.refused, dropped: self.dropped.clone(), ..WorldStats::default() };
        for link in &self.links {
            let one = link.stats();
            stats.links.frames += one.frames;
            stats.links.lost += one.lost;
            stats.links.doubled += one.doubled;
            stats.links.late += one.late;
            stats.links.damaged += one.damaged;
        }
        for slot in self.endpoints.iter().flat_map(|endpoint| &endpoint.qps) {
            let count = |counter: QpCounter| slot.qp.counters().0[counter as usize];
            stats.retransmits += count(QpCounter::Retransmits);
            stats.rnr += count(QpCounter::SendRnr);
            stats.timeouts += count(QpCounter::LocalAckTimeoutErr);
            stats.duplicates += count(QpCounter::DuplicateRequest);
            stats.out_of_sequence += count(QpCounter::OutOfSequence);
        }
        stats
    }

    fn violate(&mut self, kind: ViolationKind, what: String) {
        self.violation.get_or_insert(Violation { kind, what });
    }

    /// True every `every`th time while this fault is planted.
    fn planted(&mut self, fault: Planted, every: u64) -> bool {
        if self.planted != Some(fault) {
            return false;
        }
        self.plant_count += 1;
        self.plant_count.is_multiple_of(every)
    }

    /// A pass comes a little later, so that packets and posts gather as they do between two passes of a worker.
    fn poll_soon(&mut self, endpoint: usize, not_before: Instant) {
        let when = not_before.max(self.now()).after(self.rng.below(1500));
        let owner = &mut self.endpoints[endpoint];
        if owner.poll_at.is_none_or(|planned| when < planned) {
            owner.poll_at = Some(when);
            self.clock.at(when, Event::Poll(endpoint));
        }
    }

    fn arrive(&mut self, to: usize, frame: &Frame) {
        let now = self.now();
        let parsed = if self.planted == Some(Planted::SkipIcrc) {
            packet::parse(&frame.bytes, frame.bytes.len())
        } else {
            check_frame(&frame.bytes)
        };
        let mut packet = match parsed {
            Ok(packet) => packet,
            Err(error) => {
                self.refused[error.index()] += 1;
                self.trace.add(now, to, Line::Refused(error));
                if frame.original.is_none() {
                    self.violate(
                        ViolationKind::FrameRefused,
                        format!("an undamaged frame was refused: {error}"),
                    );
                }
                return;
            }
        };
        if let Some(original) = &frame.original
            && !same_for_transport(&packet, &frame.bytes, original)
        {
            self.violate(ViolationKind::DamageAccepted, format!("a damaged frame was accepted: {packet}"));
            return;
        }
        let Some(&index) = self.endpoints[to].by_qpn.get(&packet.headers.bth.dest_qpn.get()) else {
            self.trace.add(now, to, Line::Packet(packet, What::NoSuchQp));
            return;
        };
        let start = usize::from(packet.payload_offset);
        let mut bytes = frame.bytes[start..start + usize::from(packet.payload_len)].to_vec();
        if !bytes.is_empty() && self.planted(Planted::FlipPayload, 40) {
            bytes[0] ^= 1;
        }
        let payload = self.in_pieces(&bytes);
        if self.planted == Some(Planted::DuplicateExecuted) {
            self.execute_again(to, index, &packet);
        }
        let owner = &mut self.endpoints[to];
        if let Some(planted) = self.planted
            && !plants::incoming(planted, &owner.qps[index].qp, &mut packet)
        {
            return;
        }
        let taken = owner.qps[index].qp.handle_packet(now, &packet, &payload, owner.regions.memory());
        match taken {
            Ok(()) => {
                owner.qps[index].heard(now, &packet);
                self.trace.add(now, to, Line::Packet(packet, What::Taken));
            }
            Err(reason) => {
                *self.dropped.entry(format!("{reason:?}")).or_default() += 1;
                self.trace.add(now, to, Line::Packet(packet, What::Dropped(reason)));
                if matches!(
                    reason,
                    DropReason::WrongService | DropReason::WrongAddress | DropReason::WrongPkey
                ) {
                    self.violate(ViolationKind::FrameRefused, format!("dropped {reason:?}: {packet}"));
                }
            }
        }
        self.poll_soon(to, now);
        self.perhaps_move(QpRef { endpoint: to, index });
    }

    /// The plant of a responder that takes a duplicate fetch and add for a new one.
    fn execute_again(&mut self, to: usize, index: usize, packet: &Packet) {
        let owner = &self.endpoints[to];
        let (bth, expected) = (&packet.headers.bth, owner.qps[index].qp.info().rq_psn);
        let Some(atomic) = packet.headers.ext.atomic else { return };
        if bth.opcode != Opcode::RcFetchAdd || bth.psn.offset_from(expected) >= 0 {
            return;
        }
        let offset = atomic.addr.0.wrapping_sub(owner.mr.iova) as usize;
        let mut cell = [0; 8];
        owner.block().read(offset, &mut cell);
        let sum = u64::from_ne_bytes(cell).wrapping_add(atomic.swap_or_add);
        owner.block().write(offset, &sum.to_ne_bytes());
    }

    /// The plant of a responder that acknowledges too early: the answer is there before the request is.
    fn acknowledge_early(&mut self, at: QpRef, headers: &Headers) {
        let slot = &self.endpoints[at.endpoint].qps[at.index];
        let bth = &headers.bth;
        let owed = bth.opcode.service() == Service::Rc && !bth.opcode.is_response() && bth.ack_req;
        let data = headers.ext.atomic.is_none() && bth.opcode != Opcode::RcReadRequest;
        let Some(av) = slot.qp.av().copied().filter(|_| owed && data) else { return };
        if !self.planted(Planted::EarlyAck, 20) {
            return;
        }
        let back = AddressVector { sgid: av.dgid, dgid: av.sgid, smac: av.dmac, dmac: av.smac, ..av };
        let answer = Bth::new(Opcode::RcAck, self.endpoints[at.endpoint].qps[at.index].qp.qpn(), bth.psn);
        let aeth = Aeth { syndrome: Syndrome::Ack { credits: 31 }, msn: Msn::default() };
        let mut sink = Sink { av: Some(back), ..Sink::default() };
        if sink.begin(&answer, &Ext { aeth: Some(aeth), ..Ext::NONE }, 0)
            && let Some((headers, _)) = sink.headers
        {
            let offset = emit::header_bytes(&headers);
            let (head, body) = sink.frame.split_at(offset);
            let icrc = Icrc::over_headers(head, emit::ip_offset(&headers)).update(body).to_wire();
            sink.frame.extend(icrc);
            let frame = Frame { bytes: sink.frame, original: None };
            self.clock.at(self.now(), Event::Arrive(at.endpoint, frame));
        }
    }

    /// The payload in up to three pieces, as head and segments of a port have it.
    fn in_pieces<'f>(&mut self, bytes: &'f [u8]) -> Payload<'f> {
        let mut cuts = [self.rng.below(bytes.len() as u64 + 1), self.rng.below(bytes.len() as u64 + 1)];
        cuts.sort_unstable();
        let (first, rest) = bytes.split_at(cuts[0] as usize);
        let (second, third) = rest.split_at((cuts[1] - cuts[0]) as usize);
        let mut payload = Payload::EMPTY;
        for piece in [first, second, third] {
            assert!(payload.push_slice(piece), "three pieces fit");
        }
        payload
    }

    fn timer(&mut self, at: QpRef) {
        let now = self.now();
        let slot = &mut self.endpoints[at.endpoint].qps[at.index];
        if slot.armed != Some(now) {
            // An earlier one was planned after this one.
            return;
        }
        slot.armed = None;
        if self.planted != Some(Planted::LoseTimers) {
            slot.qp.handle_timeout(now);
        }
        if self.planted == Some(Planted::RetriesNotReloaded)
            && slot.qp.counters().get(QpCounter::LocalAckTimeoutErr) > 7
        {
            // Refused if it is in error already, which is as good.
            let _ = slot.qp.modify(now, &QpModify::ToErr);
        }
        self.poll_soon(at.endpoint, now);
    }

    /// One pass over the queue pairs of an endpoint: completions, notices, packets, timers.
    fn poll(&mut self, endpoint: usize, out: &mut Vec<Happening>) {
        let count = self.endpoints[endpoint].qps.len();
        let turn = self.endpoints[endpoint].turn;
        self.endpoints[endpoint].turn = turn.wrapping_add(1);
        for step in 0..count {
            let at = QpRef { endpoint, index: (turn + step) % count };
            self.collect(at, out);
            self.transmit(at);
            // Sending can finish work too (a failed check of a local key, for one).
            self.collect(at, out);
            self.arm(at);
            self.perhaps_move(at);
        }
    }

    /// Another queue pair takes the place of this one, made of nothing but its image.
    fn perhaps_move(&mut self, at: QpRef) {
        if !self.moves.chance(self.moves_ppm) {
            return;
        }
        let owner = &mut self.endpoints[at.endpoint];
        let qp = &mut owner.qps[at.index].qp;
        let mut image = Vec::new();
        qp.export(&mut image);
        match Qp::import(&image) {
            Ok(mut moved) => {
                qp.release_all(owner.regions.memory());
                moved.hold_posted(owner.regions.memory());
                *qp = moved;
                self.moved += 1;
            }
            Err(error) => {
                self.violate(ViolationKind::ImageRefused, format!("{at:?}: its own image: {error}"));
            }
        }
    }

    fn collect(&mut self, at: QpRef, out: &mut Vec<Happening>) {
        let start = out.len();
        while let Some(mut completion) = self.endpoints[at.endpoint].qps[at.index].qp.poll_completion() {
            if self.planted(Planted::LoseCompletion, 20) {
                continue;
            }
            if self.planted.is_some_and(|planted| !plants::completion(planted, &mut completion)) {
                continue;
            }
            out.push(Happening::Completion(at, completion));
            if self.planted(Planted::DoubleCompletion, 20) {
                out.push(Happening::Completion(at, completion));
            }
        }
        if self.planted == Some(Planted::SwapCompletions) && out.len() >= start + 2 {
            out.swap(start, start + 1);
        }
        if out.len() > start && self.planted(Planted::StrayWrite, 20) {
            self.endpoints[at.endpoint].block().write(1, &[0x77]);
        }
        while let Some(notice) = self.endpoints[at.endpoint].qps[at.index].qp.poll_notice() {
            if self.planted != Some(Planted::NoticeLost) {
                out.push(Happening::Notice(at, notice));
            }
        }
    }

    fn transmit(&mut self, at: QpRef) {
        let now = self.now();
        let mut budget = self.rng.range(1, 12);
        let again = loop {
            if budget == 0 {
                break Some(now);
            }
            budget -= 1;
            let refuse = self.rng.chance(30_000);
            let owner = &mut self.endpoints[at.endpoint];
            let slot = &mut owner.qps[at.index];
            let mtu = slot.qp.path_mtu().map_or(0, |mtu| mtu.bytes());
            let twist = self.planted.map(|planted| (planted, mtu, std::mem::take(&mut slot.memo)));
            let mut sink = Sink { av: slot.qp.av().copied(), refuse, twist, ..Sink::default() };
            // The plant of a requester that does not wait: it is a timer's length ahead.
            let when = match (self.planted, slot.quiet) {
                (Some(Planted::RnrWaitSkipped), Some((until, _))) => now.max(until),
                _ => now,
            };
            let done = slot.qp.poll_transmit(when, owner.regions.memory(), &mut sink);
            if let Some((_, _, memo)) = sink.twist.take() {
                slot.memo = memo;
            }
            match done {
                Transmit::Sent if sink.silent => {}
                Transmit::Sent => self.launch(at, sink),
                Transmit::Idle => break None,
                Transmit::Later(when) if when <= now => {
                    self.violate(
                        ViolationKind::Stuck,
                        format!("{at:?} asks to send later, at a time that is past"),
                    );
                    break None;
                }
                Transmit::Later(when) => break Some(when),
                Transmit::NoRoom if refuse => break Some(now),
                Transmit::NoRoom => {
                    self.violate(ViolationKind::Stuck, format!("{at:?} found no room where there was some"));
                    break None;
                }
            }
        };
        if let Some(when) = again {
            self.poll_soon(at.endpoint, when);
        }
    }

    /// Puts pad and ICRC to what the sink got, and gives it to the wire.
    fn launch(&mut self, at: QpRef, mut sink: Sink) {
        let now = self.now();
        let Some((headers, payload_len)) = sink.headers else {
            self.violate(ViolationKind::BadFrame, format!("{at:?} sent without a begin that was accepted"));
            return;
        };
        if sink.filled != payload_len {
            let got = sink.filled;
            self.violate(
                ViolationKind::BadFrame,
                format!("{at:?} gave {got} of {payload_len} payload bytes"),
            );
            return;
        }
        let offset = emit::header_bytes(&headers);
        let (head, body) = sink.frame.split_at(offset);
        let icrc = Icrc::over_headers(head, emit::ip_offset(&headers)).update(body).to_wire();
        sink.frame.extend(icrc);
        let packet = match check_frame(&sink.frame) {
            Ok(packet) => packet,
            Err(error) => {
                self.violate(
                    ViolationKind::BadFrame,
                    format!("{at:?} sent a frame that is wrong: {error}: {headers}"),
                );
                return;
            }
        };
        self.acknowledge_early(at, &headers);
        let slot = &mut self.endpoints[at.endpoint].qps[at.index];
        let mtu = slot.qp.path_mtu().map_or(0, |mtu| mtu.bytes());
        let mut hasty = false;
        if !headers.bth.opcode.is_response() {
            // A queue pair that went back may stop short of where it was, for want of credits.
            let psn = headers.bth.psn;
            if slot.last_sent.is_none_or(|last| psn.offset_from(last) > 0) {
                slot.last_sent = Some(psn);
            }
            let una = slot.qp.info().una_psn;
            hasty = slot.quiet.is_some_and(|(until, psn)| psn == una && now < until);
        }
        if hasty {
            self.violate(ViolationKind::BadFrame, format!("sent before the RNR time was over: {packet}"));
            return;
        }
        if u32::from(packet.payload_len) > mtu {
            self.violate(ViolationKind::BadFrame, format!("more than the path MTU of {mtu}: {packet}"));
            return;
        }
        let Some(to) = self.endpoints.iter().position(|e| e.gids.contains(&headers.ip.dst_gid())) else {
            self.violate(ViolationKind::BadFrame, format!("to nobody: {packet}"));
            return;
        };
        let count = self.endpoints.len();
        let mut arrivals = std::mem::take(&mut self.scratch);
        let fate: Fate = self.links[at.endpoint * count + to].submit(now, sink.frame, &mut arrivals);
        self.trace.add(now, at.endpoint, Line::Packet(packet, What::Sent(fate)));
        for (when, frame) in arrivals.drain(..) {
            self.clock.at(when, Event::Arrive(to, frame));
        }
        self.scratch = arrivals;
    }

    fn arm(&mut self, at: QpRef) {
        let now = self.now();
        let slot = &mut self.endpoints[at.endpoint].qps[at.index];
        let Some(when) = slot.qp.poll_timeout() else { return };
        // Never at once: a timer that is due already comes a little later, as from a timing wheel.
        let when = when.max(now.after(1));
        if slot.armed.is_none_or(|armed| when < armed) {
            slot.armed = Some(when);
            self.clock.at(when, Event::Timer(at));
        }
    }
}

fn mac(endpoint: usize) -> ferroce_wire::MacAddr {
    ferroce_wire::MacAddr([0x02, 0, 0, 0, 0, endpoint as u8 + 1])
}

/// True if a damaged frame says the same to a queue pair: only what routers change was hit.
fn same_for_transport(packet: &Packet, damaged: &[u8], original: &[u8]) -> bool {
    let Ok(sent) = packet::parse(original, original.len()) else { return false };
    let body = |packet: &Packet, frame: &[u8]| -> Option<Vec<u8>> {
        let start = usize::from(packet.payload_offset);
        frame.get(start..start + usize::from(packet.payload_len)).map(<[u8]>::to_vec)
    };
    let unmarked = |bth: Bth| Bth { resv8a: 0, ..bth };
    unmarked(packet.headers.bth) == unmarked(sent.headers.bth)
        && packet.headers.ext == sent.headers.ext
        && packet.headers.ip.src_gid() == sent.headers.ip.src_gid()
        && packet.headers.ip.dst_gid() == sent.headers.ip.dst_gid()
        && body(packet, damaged) == body(&sent, original)
}

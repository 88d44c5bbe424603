//! Endpoints, wires and time: everything that is between a work request and its completion.
//!
//! Owns the queue pairs, their memory and the wires. Drives each queue pair by the transport's calling convention, as
//! the engine does. The caller posts work and calls [`World::step`]; it gets completions and notices back. Checks only
//! what needs no knowledge of the work: frames are well-formed, undamaged ones are accepted, damaged ones are not, no
//! packet carries more than the path MTU. Called by [`crate::run`]; never decides what work there is.

mod arrive;
mod planted;
mod transmit;

use std::collections::BTreeMap;

use ferroce_mem::os::Block;
use ferroce_mem::{MrInfo, MwInfo, PdId};
use ferroce_transport::{Completion, Instant, Notice, Qp, QpCounter, Srq};
use ferroce_verbs::{
    AddressVector, PostError, QpInitAttr, QpModify, RecvWr, Rkey, SendFlags, SendWr, SrqId, SrqInitAttr,
};
use ferroce_wire::{Gid, ParseError, Psn, Qpn};

use crate::checker::{Violation, ViolationKind};
use crate::clock::Clock;
pub use crate::endpoint::EndpointInit;
pub use crate::endpoint::Tries;
use crate::endpoint::{Drain, Endpoint, QpSlot};
use crate::link::{Cable, Faults, Frame, Link, LinkStats};
use crate::plants::{self, Memo, Planted};
use crate::rng::Rng;
use crate::trace::Trace;
use planted::forget_reload;

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
    /// A queue pair took the oldest receive of its endpoint's shared queue.
    Taken(QpRef),
    /// The limit event of an endpoint's shared receive queue.
    Limit(usize),
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
    /// Duplicates of READs, compare and swaps, fetch and adds that were answered again.
    pub replayed: [u64; 3],
    /// Receives taken from shared queues.
    pub taken: u64,
    /// Limit events.
    pub limits: u64,
    /// Datagrams that members of groups got.
    pub multicast: u64,
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
    /// Groups: address and members.
    groups: Vec<(Gid, Vec<QpRef>)>,
    /// What only the world counts.
    counted: WorldStats,
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
            groups: Vec::new(),
            counted: WorldStats::default(),
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
    /// Attempts at the oldest unacknowledged PSN of a queue pair.
    pub fn tries(&self, at: QpRef) -> Tries {
        self.endpoints[at.endpoint].qps[at.index].tries
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
            drain: None,
            tries: Tries::default(),
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
        let slot = &mut self.endpoints[at.endpoint].qps[at.index];
        slot.qp.modify(now, modify).map_err(|e| anyhow::anyhow!("{modify:?} of {at:?}: {e:?}"))?;
        match modify {
            QpModify::ToSqd => slot.drain = Some(Drain { next: slot.qp.info().sq_psn, told: false }),
            QpModify::Change(_) => {}
            _ => slot.drain = None,
        }
        self.poll_soon(at.endpoint, now);
        Ok(())
    }

    /// Posts a send.
    pub fn post_send(&mut self, at: QpRef, wr: &SendWr<'_>) -> Result<(), PostError> {
        let mut flags = wr.flags;
        if self.planted == Some(Planted::FenceIgnored) {
            flags.remove(SendFlags::FENCE);
        }
        let owner = &mut self.endpoints[at.endpoint];
        owner.qps[at.index].qp.post_send(&SendWr { flags, ..*wr }, owner.regions.memory())?;
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

    /// Makes the shared receive queue of an endpoint: queue pairs whose attributes name it take their receives from it.
    pub fn add_srq(&mut self, endpoint: usize, attr: &SrqInitAttr) {
        self.endpoints[endpoint].srq = Some(Srq::new(SrqId(endpoint as u32), attr));
    }

    /// Posts a receive to the shared queue of an endpoint.
    pub fn post_shared_recv(&mut self, endpoint: usize, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let owner = &mut self.endpoints[endpoint];
        let Some(srq) = &mut owner.srq else { return Err(PostError::NoSuchQueue) };
        if self.planted == Some(Planted::SharedOrder) {
            return owner.swapped.post(srq, wr, owner.regions.memory());
        }
        srq.post_recv(wr, owner.regions.memory())
    }

    /// Arms the limit event of a shared queue.
    pub fn set_limit(&mut self, endpoint: usize, limit: u32) {
        if let Some(srq) = &mut self.endpoints[endpoint].srq {
            srq.set_limit(limit);
        }
    }

    /// Receives in the shared queue of an endpoint.
    pub fn shared_posted(&self, endpoint: usize) -> u32 {
        self.endpoints[endpoint].srq.as_ref().map_or(0, |srq| srq.info().posted)
    }

    /// Makes a multicast group.
    pub fn add_group(&mut self, gid: Gid, members: Vec<QpRef>) {
        self.groups.push((gid, members));
    }

    /// An address of an endpoint.
    pub fn gid(&self, endpoint: usize, v6: bool) -> Gid {
        self.endpoints[endpoint].gids[usize::from(v6)]
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
            Event::Arrive(to, frame) => self.arrive(to, &frame, out),
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
            WorldStats { refused: self.refused, dropped: self.dropped.clone(), ..self.counted.clone() };
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

    fn timer(&mut self, at: QpRef) {
        let now = self.now();
        let slot = &mut self.endpoints[at.endpoint].qps[at.index];
        if slot.armed != Some(now) {
            // An earlier one was planned after this one.
            return;
        }
        slot.armed = None;
        match self.planted {
            Some(Planted::LoseTimers) => {}
            Some(Planted::RetriesNotReloaded) => {
                forget_reload(&mut slot.qp, now);
                slot.qp.handle_timeout(now);
            }
            _ => slot.qp.handle_timeout(now),
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
        if self.planted == Some(Planted::DrainedEarly)
            && let Some(drain) = &mut self.endpoints[at.endpoint].qps[at.index].drain
            && !std::mem::replace(&mut drain.told, true)
        {
            out.push(Happening::Notice(at, Notice::Drained));
        }
        while let Some(notice) = self.endpoints[at.endpoint].qps[at.index].qp.poll_notice() {
            if notice == Notice::Drained
                && let Some(drain) = &mut self.endpoints[at.endpoint].qps[at.index].drain
            {
                drain.told = true;
            }
            if !self.planted.is_some_and(|planted| plants::hides(planted, &notice)) {
                out.push(Happening::Notice(at, notice));
            }
        }
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

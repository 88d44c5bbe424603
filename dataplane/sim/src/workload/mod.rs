//! Random work on random queue pairs: what a careless but correct program would post.
//!
//! Owns the layout of each endpoint's memory (slots with guards between them) and which slot is in use. Every target
//! belongs to one request from post to completion, so that its content is decided. Tells the checker of everything it
//! posts; judges nothing itself.

use std::rc::Rc;

use ferroce_transport::Instant;
use ferroce_verbs::{
    Access, Ah, AhId, PostError, Qkey, QpType, RecvWr, Rkey, SendFlags, SendOp, SendWr, Sge, UdDest, WcStatus,
};
use ferroce_wire::{Imm, RemoteAddr};

use crate::checker::{
    Checker, Finished, OpKind, Operands, Piece, RecvRecord, SendRecord, Violation, ViolationKind,
};
use crate::plan::{Connection, Plan};
use crate::rng::Rng;
use crate::world::{EndpointInit, QpRef, World};

/// Bytes before the first slot.
const GUARD: usize = 256;
/// Room in a slot beyond the longest message: start, gaps between pieces, and a guard.
const SLACK: usize = 40 + 32 + 4 * 16 + 64;
/// Address of the first byte of endpoint 0's region; the others follow at a distance.
const IOVA: u64 = 0x0000_7f00_0000_0000;

/// Queue key of every UD queue pair.
pub const QKEY: Qkey = Qkey(0x0111_2222);
/// WRITEs of each UC direction: each has a target of its own for ever, as nobody knows when the last packet comes.
const UC_WRITES: u32 = 12;
/// Cells for atomics at each endpoint: few, so that queue pairs meet at them.
const CELLS: usize = 4;
/// Distance of cells: what is between them shows a write beside one.
const CELL_STRIDE: usize = 24;

/// What may be done with a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WindowState {
    /// Opens nothing; may be bound.
    Free,
    /// A bind, an end, or a SEND that ends it is under way.
    Changing,
    /// The peer may use it.
    Bound,
}

/// A window of the receiving queue pair of a direction.
struct Window {
    rkey: Rkey,
    state: WindowState,
    /// WRITEs of the peer that go through it and are not finished.
    uses: u32,
}

/// One direction of a connection.
pub struct FlowWork {
    /// Sends.
    pub from: QpRef,
    /// Receives.
    pub to: QpRef,
    /// Attributes.
    pub connection: Connection,
    /// Work requests still to post.
    pub left: u32,
    /// WRITEs still to post on UC.
    uc_writes: u32,
    /// One of its queue pairs gave up.
    broken: bool,
    paused_until: Instant,
    next_wr_id: u64,
    /// Of the receiver.
    window: Window,
}

/// The work of a run.
pub struct Workload {
    /// Directions, as the checker numbers them.
    pub flows: Vec<FlowWork>,
    rng: Rng,
    slot_bytes: usize,
    free: Vec<Vec<usize>>,
    /// What each cell of each endpoint holds if requests are executed in the order of their posting.
    guesses: Vec<[u64; CELLS]>,
    /// Offset of the first cell, per endpoint.
    cells: Vec<usize>,
    /// No receive is posted any more.
    stopped: bool,
    /// Bytes of finished messages.
    pub bytes: u64,
    /// Finished sends.
    pub done: u64,
    /// Finished sends by kind, see [`OpKind`].
    pub kinds: [u64; 7],
}

/// Slots of an endpoint: enough that queues fill up, few enough that slots are used again.
fn slots(plan: &Plan, endpoint: usize) -> usize {
    let of = |c: &Connection| {
        if c.ends.contains(&endpoint) { c.send_wr * 2 + c.recv_wr + 2 + uc_writes(c) } else { 0 }
    };
    plan.connections.iter().map(|c| of(c) as usize).sum::<usize>().max(4)
}

fn uc_writes(connection: &Connection) -> u32 {
    if connection.service == QpType::Uc { UC_WRITES } else { 0 }
}

fn slot_bytes(plan: &Plan) -> usize {
    (plan.max_len() + SLACK).next_multiple_of(64)
}

/// After the slots; a multiple of 64, as guard and slots are.
fn cells_offset(plan: &Plan, endpoint: usize) -> usize {
    GUARD + slots(plan, endpoint) * slot_bytes(plan)
}

/// What endpoint `endpoint` of a plan is made of.
pub fn endpoint_init(plan: &Plan, endpoint: usize) -> EndpointInit {
    let bytes = (cells_offset(plan, endpoint) + CELLS * CELL_STRIDE + GUARD).next_multiple_of(4096);
    EndpointInit { bytes, iova: IOVA + ((endpoint as u64) << 32) }
}

impl Workload {
    /// The work of a plan. Directions come as `checker.add_flow` is to number them: two per connection, so that the
    /// direction against `flow` is `flow ^ 1`. The memory of `world` holds what it begins with.
    pub fn new(plan: &Plan, qps: &[[QpRef; 2]], world: &mut World) -> anyhow::Result<Workload> {
        let mut flows = Vec::new();
        for (connection, ends) in plan.connections.iter().zip(qps) {
            for (from, to) in [(ends[0], ends[1]), (ends[1], ends[0])] {
                flows.push(FlowWork {
                    from,
                    to,
                    connection: *connection,
                    left: plan.ops,
                    uc_writes: uc_writes(connection),
                    broken: false,
                    paused_until: Instant(0),
                    next_wr_id: 1,
                    window: Window {
                        rkey: world.add_window(to.endpoint)?,
                        state: WindowState::Free,
                        uses: 0,
                    },
                });
            }
        }
        // Taken from the end: the lowest slot first.
        let free = (0..plan.endpoints).map(|e| (0..slots(plan, e)).rev().collect()).collect();
        let cells: Vec<usize> = (0..plan.endpoints).map(|e| cells_offset(plan, e)).collect();
        let mut guesses = Vec::new();
        for (endpoint, offset) in cells.iter().enumerate() {
            guesses.push(std::array::from_fn(|cell| {
                let mut bytes = [0; 8];
                world.memory(endpoint).read(offset + cell * CELL_STRIDE, &mut bytes);
                u64::from_ne_bytes(bytes)
            }));
        }
        Ok(Workload {
            flows,
            rng: Rng::new(plan.seed, 0x33),
            slot_bytes: slot_bytes(plan),
            free,
            stopped: false,
            guesses,
            cells,
            bytes: 0,
            done: 0,
            kinds: [0; 7],
        })
    }

    /// Posts the first receives; some queues begin empty.
    pub fn start(&mut self, world: &mut World, checker: &mut Checker) -> Result<(), Violation> {
        for flow in 0..self.flows.len() {
            let depth = self.flows[flow].connection.recv_wr;
            let first = self.rng.below(u64::from(depth) + 1) as u32;
            for number in 0..depth {
                if number < first {
                    self.post_recv(flow, world, checker)?;
                } else {
                    let late = self.rng.below(2_000_000);
                    world.wake_at(world.now().after(late), flow as u64);
                }
            }
        }
        Ok(())
    }

    /// The wake-up of a receive that is to be posted.
    pub fn wake(&mut self, token: u64, world: &mut World, checker: &mut Checker) -> Result<(), Violation> {
        match usize::try_from(token) {
            Ok(flow) if flow < self.flows.len() && !self.stopped => self.post_recv(flow, world, checker),
            _ => Ok(()),
        }
    }

    /// Token of a wake-up that only makes [`Workload::feed`] look again.
    pub const LOOK: u64 = 1 << 40;

    /// No more work: neither sends nor receives.
    pub fn stop(&mut self) {
        self.stopped = true;
        self.flows.iter_mut().for_each(|flow| flow.left = 0);
    }

    /// A connection is broken, in the direction `flow`: what it had still to post is posted elsewhere, if anything else
    /// is left.
    pub fn give_up(&mut self, flow: usize) {
        let mut left = 0;
        for end in [flow, flow ^ 1] {
            left += std::mem::take(&mut self.flows[end].left);
            self.flows[end].broken = true;
        }
        let mut others: Vec<_> = self.flows.iter_mut().filter(|flow| !flow.broken).collect();
        let count = others.len() as u32;
        for (place, other) in others.iter_mut().enumerate() {
            other.left = other.left.saturating_add(left / count + u32::from((place as u32) < left % count));
        }
    }

    /// Posts sends where there is room.
    pub fn feed(&mut self, world: &mut World, checker: &mut Checker) -> Result<(), Violation> {
        for flow in 0..self.flows.len() {
            while self.may_post(flow, world, checker) {
                if self.rng.chance(80_000) {
                    let pause = self.rng.below(400_000);
                    self.flows[flow].paused_until = world.now().after(pause);
                    world.wake_at(world.now().after(pause), Self::LOOK);
                    break;
                }
                if !self.post_send(flow, world, checker)? {
                    break;
                }
            }
        }
        Ok(())
    }

    /// True when every send is posted.
    pub fn is_posted(&self) -> bool {
        self.flows.iter().all(|flow| flow.left == 0)
    }

    /// A request finished: its memory is free, and a receive is replaced.
    pub fn finished(&mut self, finished: Finished, world: &mut World) {
        match finished {
            Finished::Send(index, record, status) => {
                self.done += 1;
                self.kinds[record.kind as usize] += 1;
                if let (Some(rkey), WcStatus::Success) = (record.window, status) {
                    self.window_changed(index, record.kind, rkey);
                }
                self.bytes += record.data.len() as u64;
                let (from, to) = (self.flows[index].from.endpoint, self.flows[index].to.endpoint);
                self.release(from, record.local.first());
                // Packets of what failed may still be under way, and go where they were to go.
                let settled =
                    self.flows[index].connection.service == QpType::Rc && status == WcStatus::Success;
                if record.kind.has_remote_slot() && settled {
                    self.release(to, Some(&(record.remote, 0)));
                }
            }
            Finished::Recv(index, record, status) => {
                let flow = &self.flows[index];
                let (to, slow) = (flow.to.endpoint, flow.connection.slow_ns);
                self.release(to, record.pieces.first());
                // A queue pair in error would flush each new receive at once.
                if !self.stopped && status == WcStatus::Success {
                    let late = self.rng.below(slow + 1);
                    world.wake_at(world.now().after(late), index as u64);
                }
            }
        }
    }

    fn may_post(&self, flow: usize, world: &World, checker: &Checker) -> bool {
        let work = &self.flows[flow];
        work.left > 0
            && !checker.has_failed(flow)
            && work.paused_until <= world.now()
            && world.qp(work.from).send_queue_free() > 0
    }

    fn post_recv(&mut self, flow: usize, world: &mut World, checker: &mut Checker) -> Result<(), Violation> {
        let work = &self.flows[flow];
        let (to, sges, room) = (work.to, work.connection.sges, receive_room(&work.connection));
        let Some(slot) = self.free[to.endpoint].pop() else {
            // All slots are in use: later.
            world.wake_at(world.now().after(50_000), flow as u64);
            return Ok(());
        };
        let pieces = self.scatter(slot, room, sges);
        let wr_id = self.wr_id(flow);
        let list = sges_of(world, to.endpoint, &pieces);
        match world.post_recv(to, &RecvWr { wr_id, sg_list: &list }) {
            Ok(()) => {
                checker.posted_recv(flow, RecvRecord { wr_id, pieces });
                Ok(())
            }
            Err(error) => refused(to, "receive", error),
        }
    }

    /// False if memory is short.
    fn post_send(
        &mut self,
        flow: usize,
        world: &mut World,
        checker: &mut Checker,
    ) -> Result<bool, Violation> {
        let work = &self.flows[flow];
        let (from, to, connection) = (work.from, work.to, work.connection);
        let kind = self.kind(flow);
        let moves = matches!(kind, OpKind::Send | OpKind::Write);
        let window = self.window_for(flow, kind);
        let ends_window = kind == OpKind::Send && window.is_some();
        let has_imm = moves && !ends_window && self.rng.chance(400_000);
        let len = match kind {
            OpKind::CmpSwap | OpKind::FetchAdd => 8,
            OpKind::BindMw | OpKind::LocalInv => 0,
            OpKind::Send | OpKind::Write | OpKind::Read => self.length(&connection),
        };
        let inline = moves && len <= connection.inline as usize && self.rng.chance(500_000);
        let data: Rc<[u8]> = self.rng.bytes(len).into();
        let local = if inline || matches!(kind, OpKind::BindMw | OpKind::LocalInv) {
            Vec::new()
        } else {
            let Some(slot) = self.free[from.endpoint].pop() else { return Ok(false) };
            self.scatter(slot, len, connection.sges)
        };
        let (mut remote, mut operands) = (0, Operands::default());
        if kind.has_remote_slot() {
            let Some(slot) = self.free[to.endpoint].pop() else {
                self.release(from.endpoint, local.first());
                return Ok(false);
            };
            remote = slot_offset(slot, self.slot_bytes) + self.rng.below(32) as usize;
        } else if kind.is_atomic() {
            (remote, operands) = self.operands(to.endpoint, kind);
        }
        let consumes = kind == OpKind::Send || has_imm;
        let record = SendRecord {
            wr_id: self.wr_id(flow),
            kind,
            imm: has_imm.then(|| (self.rng.bits() as u32).to_be_bytes()),
            signaled: connection.sig_all || self.rng.chance(700_000),
            solicited: consumes && self.rng.chance(200_000),
            data,
            local,
            remote,
            window,
            operands,
            unwelcome: connection.service == QpType::Ud && self.rng.chance(50_000),
        };
        let ud = self.dest(&record, &connection, from, to, world);
        self.write_source(&record, from, to, world, checker);
        let list = sges_of(world, from.endpoint, &record.local);
        let wr = SendWr {
            wr_id: record.wr_id,
            op: op_of(&record, world, from.endpoint, to.endpoint),
            sg_list: &list,
            inline: if inline { &record.data } else { &[] },
            flags: self.flags(&record, inline, connection.sig_all),
            ud: ud.as_ref(),
        };
        world.post_send(from, &wr).or_else(|error| refused(from, "send", error))?;
        self.flows[flow].left -= 1;
        self.window_posted(flow, &record);
        checker.posted_send(flow, record);
        Ok(true)
    }

    /// What comes next: mostly messages, atomics where the connection serves them, windows now and then.
    fn kind(&mut self, flow: usize) -> OpKind {
        match self.flows[flow].connection.service {
            QpType::Rc => {}
            QpType::Uc if self.flows[flow].uc_writes > 0 && self.rng.chance(300_000) => {
                self.flows[flow].uc_writes -= 1;
                return OpKind::Write;
            }
            QpType::Uc | QpType::Ud => return OpKind::Send,
        }
        let own = &self.flows[flow ^ 1].window;
        let (state, uses) = (own.state, own.uses);
        match state {
            WindowState::Free if self.rng.chance(80_000) => return OpKind::BindMw,
            WindowState::Bound if uses == 0 && self.rng.chance(20_000) => return OpKind::LocalInv,
            WindowState::Free | WindowState::Bound | WindowState::Changing => {}
        }
        self.rng.pick(&[
            OpKind::Send,
            OpKind::Send,
            OpKind::Send,
            OpKind::Write,
            OpKind::Write,
            OpKind::Write,
            OpKind::Read,
            OpKind::Read,
            OpKind::FetchAdd,
            OpKind::CmpSwap,
        ])
    }

    /// The key that a request uses, ends or makes.
    fn window_for(&mut self, flow: usize, kind: OpKind) -> Option<Rkey> {
        let peers = &self.flows[flow].window;
        let (rkey, usable) = (peers.rkey, peers.state == WindowState::Bound);
        let own = self.flows[flow ^ 1].window.rkey;
        match kind {
            OpKind::Send => (usable && self.rng.chance(200_000)).then_some(rkey),
            OpKind::Write => (usable && self.rng.chance(500_000)).then_some(rkey),
            // The next key of a window: the owner chooses the lowest 8 bits.
            OpKind::BindMw => Some(Rkey(own.0 & !0xff | (own.0 as u8).wrapping_add(1) as u32)),
            OpKind::LocalInv => Some(own),
            OpKind::Read | OpKind::CmpSwap | OpKind::FetchAdd => None,
        }
    }

    fn window_posted(&mut self, flow: usize, record: &SendRecord) {
        let Some(rkey) = record.window else { return };
        match record.kind {
            OpKind::Send => self.flows[flow].window.state = WindowState::Changing,
            OpKind::Write => self.flows[flow].window.uses += 1,
            _ => {
                let own = &mut self.flows[flow ^ 1].window;
                (own.rkey, own.state) = (rkey, WindowState::Changing);
            }
        }
    }

    fn window_changed(&mut self, flow: usize, kind: OpKind, rkey: Rkey) {
        let (peers, own) = (flow, flow ^ 1);
        match kind {
            OpKind::Send => self.flows[peers].window.state = WindowState::Free,
            OpKind::Write => self.flows[peers].window.uses -= 1,
            OpKind::BindMw if self.flows[own].window.rkey == rkey => {
                self.flows[own].window.state = WindowState::Bound;
            }
            _ => self.flows[own].window.state = WindowState::Free,
        }
    }

    /// Where a datagram goes. Some carry a wrong queue key; bit 31 asks for that of the sender, which is right.
    fn dest(
        &mut self,
        record: &SendRecord,
        connection: &Connection,
        from: QpRef,
        to: QpRef,
        world: &World,
    ) -> Option<UdDest> {
        if connection.service != QpType::Ud {
            return None;
        }
        let mut av = world.path(from.endpoint, to.endpoint, connection.v6);
        av.vlan = connection.vlan;
        let own = Qkey(1 << 31 | self.rng.bits() as u32);
        let remote_qkey = match record.unwelcome {
            true => Qkey(QKEY.0 ^ 1 << self.rng.below(31)),
            false => self.rng.pick(&[QKEY, own]),
        };
        let ah = Ah { id: AhId(1), pd: World::PD, av };
        Some(UdDest { ah, remote_qpn: world.qp(to).qpn(), remote_qkey })
    }

    /// A cell, and operands that a compare and swap often succeeds with.
    fn operands(&mut self, endpoint: usize, kind: OpKind) -> (usize, Operands) {
        let cell = self.rng.below(CELLS as u64) as usize;
        let guess = self.guesses[endpoint][cell];
        let compare = if self.rng.chance(800_000) { guess } else { self.rng.bits() };
        let value = self.rng.bits();
        self.guesses[endpoint][cell] = match kind {
            OpKind::FetchAdd => guess.wrapping_add(value),
            _ if compare == guess => value,
            _ => guess,
        };
        (self.cells[endpoint] + cell * CELL_STRIDE, Operands { compare, value })
    }

    fn flags(&mut self, record: &SendRecord, inline: bool, sig_all: bool) -> SendFlags {
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, record.signaled && !(sig_all && self.rng.chance(500_000)));
        flags.set(SendFlags::SOLICITED, record.solicited);
        flags.set(SendFlags::INLINE, inline);
        flags.set(SendFlags::FENCE, self.rng.chance(100_000));
        flags
    }

    /// Puts the bytes where the request takes them from: the sender's slot, or the peer's for a READ.
    fn write_source(
        &self,
        record: &SendRecord,
        from: QpRef,
        to: QpRef,
        world: &World,
        checker: &mut Checker,
    ) {
        let pieces = match record.kind {
            OpKind::Read => vec![(record.remote, record.data.len())],
            OpKind::Send | OpKind::Write => record.local.clone(),
            OpKind::CmpSwap | OpKind::FetchAdd | OpKind::BindMw | OpKind::LocalInv => return,
        };
        let endpoint = if record.kind == OpKind::Read { to.endpoint } else { from.endpoint };
        let mut done = 0;
        for (offset, len) in pieces {
            let bytes = &record.data[done..done + len];
            world.memory(endpoint).write(offset, bytes);
            checker.wrote(endpoint, offset, bytes);
            done += len;
        }
    }

    /// Short, around the path MTU, or anything.
    fn length(&mut self, connection: &Connection) -> usize {
        let (mtu, most) = (connection.mtu.bytes() as usize, connection.max_len);
        let len = match self.rng.below(6) {
            0 => self.rng.below(9) as usize,
            1 => self.rng.below(200) as usize,
            2 => mtu * self.rng.range(1, 4) as usize,
            3 => (mtu * self.rng.range(1, 3) as usize + self.rng.below(5) as usize).saturating_sub(2),
            _ => self.rng.below(most as u64 + 1) as usize,
        };
        len.min(most)
    }

    /// Cuts `len` bytes of a slot into pieces with gaps between them.
    fn scatter(&mut self, slot: usize, len: usize, sges: u32) -> Vec<Piece> {
        let count = self.rng.range(1, u64::from(sges)) as usize;
        let mut at = slot_offset(slot, self.slot_bytes) + self.rng.below(32) as usize;
        let mut left = len;
        let mut pieces = Vec::new();
        for number in 0..count {
            let part = if number + 1 == count { left } else { self.rng.below(left as u64 + 1) as usize };
            pieces.push((at, part));
            left -= part;
            at += part + self.rng.below(16) as usize;
        }
        pieces
    }

    fn release(&mut self, endpoint: usize, piece: Option<&Piece>) {
        if let Some((offset, _)) = piece {
            self.free[endpoint].push((offset - GUARD) / self.slot_bytes);
        }
    }

    fn wr_id(&mut self, flow: usize) -> u64 {
        let work = &mut self.flows[flow];
        let id = (flow as u64) << 32 | work.next_wr_id;
        work.next_wr_id += 1;
        id
    }
}

/// Every message fits: on UD the 40 bytes before it too.
fn receive_room(connection: &Connection) -> usize {
    connection.max_len + if connection.service == QpType::Ud { 40 } else { 0 }
}

fn slot_offset(slot: usize, slot_bytes: usize) -> usize {
    GUARD + slot * slot_bytes
}

fn refused<T>(at: QpRef, what: &str, error: PostError) -> Result<T, Violation> {
    Err(Violation { kind: ViolationKind::PostRefused, what: format!("{at:?}: {what} refused: {error:?}") })
}

fn sges_of(world: &World, endpoint: usize, pieces: &[Piece]) -> Vec<Sge> {
    let mr = world.mr(endpoint);
    pieces
        .iter()
        .map(|(offset, len)| Sge { addr: mr.iova + *offset as u64, length: *len as u32, lkey: mr.lkey })
        .collect()
}

fn op_of(record: &SendRecord, world: &World, own: usize, peer: usize) -> SendOp {
    let mr = world.mr(peer);
    let remote_addr = RemoteAddr(mr.iova + record.remote as u64);
    let rkey = record.window.unwrap_or(mr.rkey);
    let Operands { compare, value } = record.operands;
    match (record.kind, record.imm.map(Imm)) {
        (OpKind::Send, None) => record.window.map_or(SendOp::Send, |rkey| SendOp::SendInv { rkey }),
        (OpKind::Send, Some(imm)) => SendOp::SendImm(imm),
        (OpKind::Write, None) => SendOp::Write { remote_addr, rkey },
        (OpKind::Write, Some(imm)) => SendOp::WriteImm { remote_addr, rkey, imm },
        (OpKind::Read, _) => SendOp::Read { remote_addr, rkey },
        (OpKind::CmpSwap, _) => SendOp::CmpSwap { remote_addr, rkey, compare, swap: value },
        (OpKind::FetchAdd, _) => SendOp::FetchAdd { remote_addr, rkey, add: value },
        (OpKind::BindMw, _) => {
            let own = world.mr(own);
            let access = Access::REMOTE_WRITE;
            SendOp::BindMw { rkey, mr: own.lkey, addr: own.iova, len: own.len, access }
        }
        (OpKind::LocalInv, _) => SendOp::LocalInv { rkey },
    }
}

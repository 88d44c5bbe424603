//! Random work on random queue pairs: what a careless but correct program would post.
//!
//! Owns the layout of each endpoint's memory (slots with guards between them) and which slot is in use. Every target
//! belongs to one request from post to completion, so that its content is decided. Tells the checker of everything it
//! posts; judges nothing itself.

mod choose;
mod post;
mod windows;

use std::collections::BTreeMap;
use std::rc::Rc;

use ferroce_transport::Instant;
use ferroce_verbs::{Qkey, QpType, Rkey, WcStatus};

use crate::checker::{Checker, Finished, OpKind, Piece, Violation};
use crate::plan::{Connection, Group, Plan, SharedQueue};
use crate::rng::Rng;
use crate::world::{EndpointInit, QpRef, World};
use windows::{Window, WindowState};

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
    /// The receiver takes its receives from the queue that its endpoint shares.
    pub shared: bool,
    paused_until: Instant,
    next_wr_id: u64,
    /// Of the receiver.
    window: Window,
    /// The request posted last, if it is a READ.
    last_read: Option<Lent>,
}

/// What a READ brings, and where.
#[derive(Clone)]
struct Lent {
    data: Rc<[u8]>,
    local: Vec<Piece>,
}

/// A send that is not left to chance.
#[derive(Clone, Copy, Default)]
struct Ask {
    /// What; chosen if it is `None`.
    kind: Option<OpKind>,
    /// The group that a datagram goes to, if the kind is given.
    group: Option<usize>,
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
    /// Slots that other requests use too, by endpoint and offset of their first piece, and how many do.
    lent: BTreeMap<(usize, usize), u32>,
    /// Messages that sent on what a READ before them brought.
    pub fenced: u64,
    /// Shared receive queues by endpoint.
    shared: Vec<Option<SharedQueue>>,
    shared_wr_id: u64,
    bind_ppm: u32,
    unbind_ppm: u32,
    /// Groups.
    groups: Vec<Group>,
    /// The key that was taken away under the feet of the peer.
    pub taken_key: Option<Rkey>,
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
    let shared = plan.shared[endpoint].map_or(0, |queue| queue.max_wr as usize + 2);
    plan.connections.iter().map(|c| of(c) as usize).sum::<usize>().max(4) + shared
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
            for (from, to, shared) in
                [(ends[0], ends[1], connection.shared[1]), (ends[1], ends[0], connection.shared[0])]
            {
                flows.push(FlowWork {
                    from,
                    to,
                    shared,
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
                        queries: 0,
                    },
                    last_read: None,
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
            lent: BTreeMap::new(),
            fenced: 0,
            shared: plan.shared.clone(),
            shared_wr_id: 0,
            bind_ppm: plan.bind_ppm,
            unbind_ppm: plan.unbind_ppm,
            groups: plan.groups.clone(),
            taken_key: None,
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
        let own = (0..self.flows.len()).filter(|flow| !self.flows[*flow].shared);
        let own = own.map(|flow| (flow as u64, self.flows[flow].connection.recv_wr));
        let shared = self.shared.iter().enumerate();
        let shared = shared.filter_map(|(e, queue)| Some((Self::SHARED + e as u64, (*queue)?.max_wr)));
        let queues: Vec<_> = own.chain(shared).collect();
        for (token, depth) in queues {
            let first = self.rng.below(u64::from(depth) + 1) as u32;
            for number in 0..depth {
                if number < first {
                    self.wake(token, world, checker)?;
                } else {
                    let late = self.rng.below(2_000_000);
                    world.wake_at(world.now().after(late), token);
                }
            }
        }
        Ok(())
    }

    /// Wake-ups from here on, by endpoint, are of receives for the shared queue.
    const SHARED: u64 = 1 << 32;
    /// Wake-ups from here on, by endpoint, arm the limit of the shared queue.
    const LIMIT: u64 = 2 << 32;

    /// The wake-up of a receive that is to be posted, or of a limit to be armed.
    pub fn wake(&mut self, token: u64, world: &mut World, checker: &mut Checker) -> Result<(), Violation> {
        let place = (token & (Self::SHARED - 1)) as usize;
        match token & !(Self::SHARED - 1) {
            _ if self.stopped => Ok(()),
            0 => self.post_recv(place, world, checker),
            Self::SHARED => self.post_shared(place, world, checker),
            Self::LIMIT => {
                let most = self.shared[place].map_or(0, |queue| queue.max_wr);
                let limit = self.rng.below(u64::from(most) + 1) as u32;
                world.set_limit(place, limit);
                checker.armed(place, limit);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The limit event of a shared queue came: it is armed again later.
    pub fn limit_reached(&mut self, endpoint: usize, world: &mut World) {
        let late = self.rng.below(300_000);
        world.wake_at(world.now().after(late), Self::LIMIT + endpoint as u64);
    }

    /// Sends one message on a direction that promises nothing, to the peer or to a group, to receivers that have a receive.
    /// False if there is nothing to send to, or no memory left.
    pub fn probe(
        &mut self,
        flow: usize,
        group: Option<usize>,
        world: &mut World,
        checker: &mut Checker,
    ) -> Result<bool, Violation> {
        let receivers = match group {
            Some(group) => {
                let members = self.groups[group].members.iter();
                // Received by the direction towards that end.
                members.map(|(connection, end)| connection * 2 + 1 - end).collect()
            }
            None => vec![flow],
        };
        // A queue pair may keep a receive that it has begun, but not more than that one.
        for receiver in receivers {
            let work = &self.flows[receiver];
            let (endpoint, shared) = (work.to.endpoint, work.shared);
            let users = self.flows.iter().filter(|flow| flow.shared && flow.to.endpoint == endpoint).count();
            let open = if shared { checker.shared_open(endpoint) } else { checker.recvs_open(receiver) };
            for _ in open..if shared { users } else { 1 } {
                self.post_recv(receiver, world, checker)?;
            }
        }
        if group.is_some_and(|group| !self.reaches(self.flows[flow].from.endpoint, group)) {
            return Ok(false);
        }
        self.post_send(flow, Ask { kind: Some(OpKind::Send), group }, world, checker)
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
        let mut left = 0u32;
        for end in [flow, flow ^ 1] {
            left = std::mem::take(&mut self.flows[end].left).saturating_add(left);
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
                if !self.post_send(flow, Ask::default(), world, checker)? {
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
                // What it brought is not lent from now on.
                let last_read = &mut self.flows[index].last_read;
                if last_read.as_ref().is_some_and(|lent| lent.local == record.local) {
                    *last_read = None;
                }
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
                let (to, queue) = (flow.to.endpoint, self.shared[flow.to.endpoint].filter(|_| flow.shared));
                let slow = queue.map_or(flow.connection.slow_ns, |queue| queue.slow_ns);
                let token = if flow.shared { Self::SHARED + to as u64 } else { index as u64 };
                self.release(to, record.pieces.first());
                // A queue pair in error would flush each new receive at once; others go on with what they share.
                if !self.stopped && (status == WcStatus::Success || queue.is_some()) {
                    let late = self.rng.below(slow + 1);
                    world.wake_at(world.now().after(late), token);
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

    fn release(&mut self, endpoint: usize, piece: Option<&Piece>) {
        let Some((offset, _)) = piece else { return };
        if let Some(count) = self.lent.get_mut(&(endpoint, *offset)) {
            *count -= 1;
            if *count == 0 {
                self.lent.remove(&(endpoint, *offset));
            }
        } else {
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

fn slot_offset(slot: usize, slot_bytes: usize) -> usize {
    GUARD + slot * slot_bytes
}

//! Posts: a receive, a send, each told to the checker.
//!
//! Part of [`super::Workload`].

use ferroce_mem::Access;
use ferroce_verbs::{PostError, QpType, RecvWr, SendOp, SendWr, Sge};
use ferroce_wire::{Imm, RemoteAddr};

use super::{Ask, Lent, Workload, slot_offset};
use crate::checker::{Checker, OpKind, Operands, Piece, RecvRecord, SendRecord, Violation, ViolationKind};
use crate::plan::receive_room;
use crate::world::{QpRef, World};

impl Workload {
    pub(super) fn post_recv(
        &mut self,
        flow: usize,
        world: &mut World,
        checker: &mut Checker,
    ) -> Result<(), Violation> {
        let work = &self.flows[flow];
        if work.shared {
            return self.post_shared(work.to.endpoint, world, checker);
        }
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

    /// A receive for whichever queue pair of the endpoint takes it.
    pub(super) fn post_shared(
        &mut self,
        endpoint: usize,
        world: &mut World,
        checker: &mut Checker,
    ) -> Result<(), Violation> {
        let Some(queue) = self.shared[endpoint] else { return Ok(()) };
        let Some(slot) = self.free[endpoint].pop() else {
            world.wake_at(world.now().after(50_000), Self::SHARED + endpoint as u64);
            return Ok(());
        };
        let pieces = self.scatter(slot, queue.room, queue.sges);
        self.shared_wr_id += 1;
        let wr_id = 1 << 63 | self.shared_wr_id;
        let list = sges_of(world, endpoint, &pieces);
        match world.post_shared_recv(endpoint, &RecvWr { wr_id, sg_list: &list }) {
            Ok(()) => {
                checker.posted_shared(endpoint, RecvRecord { wr_id, pieces });
                Ok(())
            }
            Err(error) => Err(Violation {
                kind: ViolationKind::PostRefused,
                what: format!("endpoint {endpoint}: shared receive refused: {error:?}"),
            }),
        }
    }

    /// False if memory is short.
    pub(super) fn post_send(
        &mut self,
        flow: usize,
        ask: Ask,
        world: &mut World,
        checker: &mut Checker,
    ) -> Result<bool, Violation> {
        let work = &self.flows[flow];
        let (from, to, connection) = (work.from, work.to, work.connection);
        let kind = ask.kind.unwrap_or_else(|| self.kind(flow));
        let group = if ask.kind.is_none() { self.group(flow) } else { ask.group };
        let moves = matches!(kind, OpKind::Send | OpKind::Write);
        let window = self.window_for(flow, kind);
        let ends_window = kind == OpKind::Send && window.is_some();
        let has_imm = moves && !ends_window && self.rng.chance(400_000);
        let lent = if moves && ask.kind.is_none() { self.borrow(flow) } else { None };
        let len = match kind {
            _ if lent.is_some() => lent.as_ref().map_or(0, |lent| lent.data.len()),
            OpKind::CmpSwap | OpKind::FetchAdd => 8,
            OpKind::BindMw | OpKind::LocalInv => 0,
            OpKind::Send | OpKind::Write | OpKind::Read => {
                let most = group.map_or(usize::MAX, |group| self.groups[group].max_len);
                self.length(&connection).min(most)
            }
        };
        let inline = moves && lent.is_none() && len <= connection.inline as usize && self.rng.chance(500_000);
        let own_source = !inline && lent.is_none();
        let places = self.places(flow, kind, len, own_source);
        let Some((mut local, remote, operands)) = places else { return Ok(false) };
        if let Some(lent) = &lent {
            local.clone_from(&lent.local);
            *self.lent.entry((from.endpoint, local[0].0)).or_default() += 1;
        }
        let consumes = kind == OpKind::Send || has_imm;
        let ud = connection.service == QpType::Ud;
        let record = SendRecord {
            wr_id: self.wr_id(flow),
            kind,
            imm: has_imm.then(|| (self.rng.bits() as u32).to_be_bytes()),
            signaled: connection.sig_all || self.rng.chance(700_000),
            solicited: consumes && self.rng.chance(200_000),
            data: lent.as_ref().map_or_else(|| self.rng.bytes(len).into(), |lent| lent.data.clone()),
            local,
            remote,
            window,
            operands,
            unwelcome: ud && self.rng.chance(50_000) && ask.kind.is_none(),
            group: group.map(|group| self.to_group(group, from, world)),
        };
        let ud = self.dest(&record, &connection, from, to, world);
        if lent.is_none() {
            self.write_source(&record, from, to, world, checker);
        }
        let list = sges_of(world, from.endpoint, &record.local);
        let wr = SendWr {
            wr_id: record.wr_id,
            op: op_of(&record, world, from.endpoint, to.endpoint),
            sg_list: &list,
            inline: if inline { &record.data } else { &[] },
            flags: self.flags(&record, inline, connection.sig_all, lent.is_some()),
            ud: ud.as_ref(),
        };
        world.post_send(from, &wr).or_else(|error| refused(from, "send", error))?;
        self.flows[flow].left = self.flows[flow].left.saturating_sub(1);
        self.window_posted(flow, &record);
        self.remember(flow, &record, lent.is_some());
        checker.posted_send(world, flow, record);
        Ok(true)
    }

    /// Some messages send on what a READ before them is still to bring: only the fence makes that right.
    fn borrow(&mut self, flow: usize) -> Option<Lent> {
        let work = &self.flows[flow];
        let lent = work.last_read.as_ref().filter(|lent| !lent.data.is_empty())?;
        let fits = work.connection.service == QpType::Rc && self.rng.chance(300_000);
        fits.then(|| lent.clone())
    }

    /// The READ whose bytes the next message may send on: the newest, until another request comes in between.
    fn remember(&mut self, flow: usize, record: &SendRecord, borrowed: bool) {
        let read = record.kind == OpKind::Read;
        self.flows[flow].last_read =
            read.then(|| Lent { data: record.data.clone(), local: record.local.clone() });
        self.fenced += u64::from(borrowed);
    }

    /// Where a request takes its bytes from or puts them here, where at the peer, and what it does there. `None` if memory
    /// is short.
    fn places(
        &mut self,
        flow: usize,
        kind: OpKind,
        len: usize,
        own_source: bool,
    ) -> Option<(Vec<Piece>, usize, Operands)> {
        let work = &self.flows[flow];
        let (from, to, sges) = (work.from.endpoint, work.to.endpoint, work.connection.sges);
        let local = if !own_source || matches!(kind, OpKind::BindMw | OpKind::LocalInv) {
            Vec::new()
        } else {
            let slot = self.free[from].pop()?;
            self.scatter(slot, len, sges)
        };
        if kind.is_atomic() {
            let (remote, operands) = self.operands(to, kind);
            return Some((local, remote, operands));
        }
        let mut remote = 0;
        if kind.has_remote_slot() {
            let Some(slot) = self.free[to].pop() else {
                self.release(from, local.first());
                return None;
            };
            remote = slot_offset(slot, self.slot_bytes) + self.rng.below(32) as usize;
        }
        Some((local, remote, Operands::default()))
    }

    /// Puts the bytes where the request takes them from: the sender's slot, or the peer's for a READ.
    pub(super) fn write_source(
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
            let access = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
            SendOp::BindMw { rkey, mr: own.lkey, addr: own.iova, len: own.len, access }
        }
        (OpKind::LocalInv, _) => SendOp::LocalInv { rkey },
    }
}

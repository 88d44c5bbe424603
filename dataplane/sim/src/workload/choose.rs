//! What comes next, and of what size and shape.
//!
//! Part of [`super::Workload`].

use ferroce_verbs::{Ah, AhId, Qkey, QpType, SendFlags, UdDest};
use ferroce_wire::Qpn;

use super::windows::WindowState;
use super::{CELL_STRIDE, CELLS, QKEY, Workload, slot_offset};
use crate::checker::{OpKind, Operands, Piece, SendRecord};
use crate::plan::Connection;
use crate::record::ToGroup;
use crate::world::{QpRef, World};

impl Workload {
    /// What comes next: mostly messages, atomics where the connection serves them, windows now and then.
    pub(super) fn kind(&mut self, flow: usize) -> OpKind {
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
            WindowState::Free if self.rng.chance(self.bind_ppm) => return OpKind::BindMw,
            WindowState::Bound if uses == 0 && self.rng.chance(self.unbind_ppm) => return OpKind::LocalInv,
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

    /// Some datagrams go to a group that has members elsewhere.
    pub(super) fn group(&mut self, flow: usize) -> Option<usize> {
        let work = &self.flows[flow];
        if work.connection.service != QpType::Ud || self.groups.is_empty() || !self.rng.chance(300_000) {
            return None;
        }
        let group = self.rng.below(self.groups.len() as u64) as usize;
        self.reaches(self.flows[flow].from.endpoint, group).then_some(group)
    }

    /// Whether a group has members elsewhere than here.
    pub(super) fn reaches(&self, endpoint: usize, group: usize) -> bool {
        let ends = |(connection, end): &(usize, usize)| self.flows[connection * 2].connection.ends[*end];
        self.groups[group].members.iter().any(|member| ends(member) != endpoint)
    }

    pub(super) fn to_group(&self, group: usize, from: QpRef, world: &World) -> ToGroup {
        let v6 = !self.groups[group].gid.is_ipv4();
        ToGroup { group, sgid: world.gid(from.endpoint, v6), from: world.qp(from).qpn() }
    }

    /// Where a datagram goes. Some carry a wrong queue key; bit 31 asks for that of the sender, which is right.
    pub(super) fn dest(
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
        let mut remote_qpn = world.qp(to).qpn();
        if let Some(to) = record.group {
            let gid = self.groups[to.group].gid;
            (av.sgid, av.dgid, remote_qpn) = (to.sgid, gid, Qpn::MULTICAST);
            av.dmac = gid.multicast_mac().unwrap_or(av.dmac);
            av.flow_label = if gid.is_ipv4() { 0 } else { 0x54321 };
        }
        av.vlan = connection.vlan;
        let own = Qkey(1 << 31 | self.rng.bits() as u32);
        let remote_qkey = match record.unwelcome {
            true => Qkey(QKEY.0 ^ 1 << self.rng.below(31)),
            false => self.rng.pick(&[QKEY, own]),
        };
        let ah = Ah { id: AhId(1), pd: World::PD, av };
        Some(UdDest { ah, remote_qpn, remote_qkey })
    }

    /// A cell, and operands that a compare and swap often succeeds with.
    pub(super) fn operands(&mut self, endpoint: usize, kind: OpKind) -> (usize, Operands) {
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

    pub(super) fn flags(
        &mut self,
        record: &SendRecord,
        inline: bool,
        sig_all: bool,
        fence: bool,
    ) -> SendFlags {
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, record.signaled && !(sig_all && self.rng.chance(500_000)));
        flags.set(SendFlags::SOLICITED, record.solicited);
        flags.set(SendFlags::INLINE, inline);
        flags.set(SendFlags::FENCE, self.rng.chance(100_000) || fence);
        flags
    }

    /// Short, around the path MTU, or anything.
    pub(super) fn length(&mut self, connection: &Connection) -> usize {
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
    pub(super) fn scatter(&mut self, slot: usize, len: usize, sges: u32) -> Vec<Piece> {
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
}

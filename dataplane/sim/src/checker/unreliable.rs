//! Messages of the unreliable services: whole and unchanged, or not at all.
//!
//! Owns nothing: what is on its way is in [`Checker`]. Called by [`super`].

use std::collections::VecDeque;

use ferroce_verbs::{Gid, Wc, WcFlags, WcOpcode};

use super::{Bytes, Checker, Mode, OpKind, RecvRecord, SendRecord, Violation, ViolationKind, broken};
use crate::record::{GRH, ToGroup};
use crate::world::QpRef;

/// What was sent to a group and one member has not got yet.
pub(super) struct Inbox {
    group: usize,
    gid: Gid,
    at: QpRef,
    /// Whether the wire from each endpoint does not double.
    once: Vec<bool>,
    arriving: VecDeque<(usize, SendRecord)>,
}

impl Checker {
    /// A queue pair is in a group; `once` says for each endpoint that the wire from there does not double.
    pub fn add_member(&mut self, group: usize, gid: Gid, at: QpRef, once: Vec<bool>) {
        self.inboxes.push(Inbox { group, gid, at, once, arriving: VecDeque::new() });
    }

    pub(super) fn posted_to_group(&mut self, from: QpRef, to: ToGroup, record: &SendRecord) {
        let theirs = |inbox: &&mut Inbox| inbox.group == to.group && inbox.at.endpoint != from.endpoint;
        for inbox in self.inboxes.iter_mut().filter(theirs) {
            inbox.arriving.push_back((from.endpoint, record.clone()));
        }
    }

    /// The wires lose, double and hold back nothing any more, and nothing is under way: from now on what is sent arrives,
    /// once and in order.
    pub fn wires_are_good(&mut self) {
        for flow in &mut self.flows {
            match &mut flow.mode {
                Mode::Reliable => continue,
                Mode::Whole { ordered } => *ordered = true,
                Mode::Datagrams { once, .. } => *once = true,
            }
            flow.arriving.clear();
        }
        for inbox in &mut self.inboxes {
            inbox.once.fill(true);
            inbox.arriving.clear();
        }
    }

    /// After [`Checker::wires_are_good`], at rest: everything arrived.
    pub fn all_arrived(&self) -> Result<(), Violation> {
        let late = self.flows.iter().find(|flow| flow.mode != Mode::Reliable && !flow.arriving.is_empty());
        let missed = self.inboxes.iter().find(|inbox| !inbox.arriving.is_empty());
        let what = match (late, missed) {
            (Some(flow), _) => format!("{:?} to {:?}", flow.from, flow.to),
            (None, Some(inbox)) => format!("group {} to {:?}", inbox.gid, inbox.at),
            (None, None) => return Ok(()),
        };
        broken(ViolationKind::NotServed, format!("{what}: a message was lost, though not by the wires"))
    }

    /// A message of an unreliable direction: one that was sent, whole.
    pub(super) fn unreliable_arrival(
        &mut self,
        bytes: &impl Bytes,
        index: usize,
        recv: &RecvRecord,
        wc: &Wc,
    ) -> Result<(), Violation> {
        self.unreliable += 1;
        let flow = &self.flows[index];
        let (at, endpoint, mode) = (flow.to, flow.to.endpoint, flow.mode);
        let mut found = Vec::new();
        for (offset, len) in &recv.pieces {
            found.extend(bytes.read(endpoint, *offset, *len));
        }
        match mode {
            Mode::Datagrams { .. } if dest_of(&found).is_multicast() => self.group_arrival(at, &found, wc)?,
            _ => self.peers_arrival(bytes, index, &found, wc)?,
        }
        // On UC messages that broke off may have left bytes behind the end; a datagram leaves none.
        let mut left = if matches!(mode, Mode::Datagrams { .. }) { wc.byte_len as usize } else { usize::MAX };
        for (offset, len) in &recv.pieces {
            let part = left.min(*len);
            let real = bytes.read(endpoint, *offset, part);
            self.shadow[endpoint][*offset..offset + part].copy_from_slice(&real);
            left -= part;
        }
        Ok(())
    }

    /// A message of the peer.
    fn peers_arrival(
        &mut self,
        bytes: &impl Bytes,
        index: usize,
        found: &[u8],
        wc: &Wc,
    ) -> Result<(), Violation> {
        let flow = &mut self.flows[index];
        let (at, endpoint, mode) = (flow.to, flow.to.endpoint, flow.mode);
        let mut head = 0;
        if let Mode::Datagrams { gids, from, .. } = mode {
            head = GRH;
            check_grh(at, found, gids, wc)?;
            if wc.src_qpn != from {
                let what = format!("{at:?}: {wc:?}, must be from {from:?}");
                return broken(ViolationKind::WrongCompletion, what);
            }
        }
        let is_it = |record: &SendRecord| match record.kind {
            OpKind::Send => {
                is_message(record, WcOpcode::Recv, found.get(head..).unwrap_or_default(), head, wc)
            }
            _ => {
                let written = bytes.read(endpoint, record.remote, record.data.len());
                is_message(record, WcOpcode::RecvRdmaWithImm, &written, 0, wc)
            }
        };
        let Some(which) = flow.arriving.iter().position(|(_, record)| is_it(record)) else {
            let what = format!("{at:?}: {wc:?}: no message that was sent is like this");
            return broken(ViolationKind::NotWhole, what);
        };
        let record = flow.arriving[which].1.clone();
        match mode {
            Mode::Whole { ordered: true } => drop(flow.arriving.drain(..=which)),
            Mode::Datagrams { once: true, .. } => drop(flow.arriving.remove(which)),
            Mode::Reliable | Mode::Whole { ordered: false } | Mode::Datagrams { once: false, .. } => {}
        }
        if record.kind == OpKind::Write {
            self.settle(bytes, endpoint, &[(record.remote, record.data.len())], &record)?;
        }
        Ok(())
    }

    /// A datagram to a group that this queue pair must be in.
    fn group_arrival(&mut self, at: QpRef, found: &[u8], wc: &Wc) -> Result<(), Violation> {
        self.multicast += 1;
        let gid = dest_of(found);
        let Some(inbox) = self.inboxes.iter_mut().find(|inbox| inbox.gid == gid && inbox.at == at) else {
            return broken(ViolationKind::NotWhole, format!("{at:?}: {wc:?}: it is not in group {gid}"));
        };
        let body = found.get(GRH..).unwrap_or_default();
        let is_it = |record: &SendRecord| {
            record
                .group
                .is_some_and(|to| to.from == wc.src_qpn && check_grh(at, found, [to.sgid, gid], wc).is_ok())
                && is_message(record, WcOpcode::Recv, body, GRH, wc)
        };
        let Some(which) = inbox.arriving.iter().position(|(_, record)| is_it(record)) else {
            let what = format!("{at:?}: {wc:?}: nothing like this was sent to group {gid}");
            return broken(ViolationKind::NotWhole, what);
        };
        if inbox.once[inbox.arriving[which].0] {
            inbox.arriving.remove(which);
        }
        Ok(())
    }
}

/// Whether a completion is about this message, which is `body` at the receiver, behind `head` bytes.
fn is_message(record: &SendRecord, opcode: WcOpcode, body: &[u8], head: usize, wc: &Wc) -> bool {
    let len = record.data.len();
    record.consumes()
        && !record.unwelcome
        && body.get(..len) == Some(&*record.data)
        && wc.opcode == opcode
        && wc.byte_len as usize == head + len
        && wc.flags.contains(WcFlags::WITH_IMM).then_some(wc.imm.0) == record.imm
        && wc.solicited == record.solicited
}

/// Destination in the 40 bytes before a datagram; an unspecified address if there is none.
fn dest_of(found: &[u8]) -> Gid {
    let v6 = found.first().is_some_and(|byte| byte >> 4 == 6);
    let mut gid = [0; 16];
    match (v6, found.get(24..40)) {
        (true, Some(area)) => gid.copy_from_slice(area),
        (false, Some(area)) => {
            gid[10..12].fill(0xff);
            gid[12..].copy_from_slice(&area[12..]);
        }
        (_, None) => {}
    }
    Gid(gid)
}

/// The 40 bytes before a datagram: IPv4 in the latter half, or IPv6.
fn check_grh(at: QpRef, found: &[u8], gids: [Gid; 2], wc: &Wc) -> Result<(), Violation> {
    let area = found.get(..GRH).unwrap_or_default();
    let right = match gids.map(|gid| gid.to_ip()) {
        [std::net::IpAddr::V4(src), std::net::IpAddr::V4(dst)] => {
            area.get(20) == Some(&0x45)
                && area.get(32..36) == Some(&src.octets())
                && area.get(36..40) == Some(&dst.octets())
        }
        [src, dst] => {
            let is = |range, ip| matches!(ip, std::net::IpAddr::V6(ip) if area.get(range) == Some(&ip.octets()[..]));
            area.first().is_some_and(|byte| byte >> 4 == 6) && is(8..24, src) && is(24..40, dst)
        }
    };
    if right && wc.flags.contains(WcFlags::GRH) {
        return Ok(());
    }
    broken(ViolationKind::WrongCompletion, format!("{at:?}: {wc:?} with the IP header {area:02x?}"))
}

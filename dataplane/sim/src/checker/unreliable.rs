//! Messages of the unreliable services: whole and unchanged, or not at all.
//!
//! Owns nothing: what is on its way is in [`Checker`]. Called by [`super`].

use ferroce_verbs::{Gid, Wc, WcFlags, WcOpcode};

use super::{Bytes, Checker, Mode, OpKind, RecvRecord, SendRecord, Violation, ViolationKind, broken};
use crate::record::GRH;
use crate::world::QpRef;

impl Checker {
    /// A message of an unreliable direction: one that was sent, whole.
    pub(super) fn unreliable_arrival(
        &mut self,
        bytes: &impl Bytes,
        index: usize,
        recv: &RecvRecord,
        wc: &Wc,
    ) -> Result<(), Violation> {
        self.unreliable += 1;
        let flow = &mut self.flows[index];
        let (at, endpoint, mode) = (flow.to, flow.to.endpoint, flow.mode);
        let mut found = Vec::new();
        for (offset, len) in &recv.pieces {
            found.extend(bytes.read(endpoint, *offset, *len));
        }
        if let Mode::Datagrams { gids, from, .. } = mode {
            check_grh(at, &found, gids, wc)?;
            if wc.src_qpn != from {
                return broken(
                    ViolationKind::WrongCompletion,
                    format!("{at:?}: {wc:?}, must be from {from:?}"),
                );
            }
        }
        let head = if matches!(mode, Mode::Datagrams { .. }) { GRH } else { 0 };
        let is_it = |record: &SendRecord| {
            let len = record.data.len();
            let (opcode, whole) = if record.kind == OpKind::Send {
                (WcOpcode::Recv, found.get(head..head + len) == Some(&*record.data))
            } else {
                (WcOpcode::RecvRdmaWithImm, *bytes.read(endpoint, record.remote, len) == *record.data)
            };
            record.consumes()
                && !record.unwelcome
                && whole
                && wc.opcode == opcode
                && wc.byte_len as usize == head + len
                && wc.flags.contains(WcFlags::WITH_IMM).then_some(wc.imm.0) == record.imm
                && wc.solicited == record.solicited
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

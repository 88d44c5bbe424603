//! Messages to packets: how many, which part, how long, which opcode (roce-wire 5.2, 5.3), and PSN distances.

use ferroce_verbs::SendOp;
use ferroce_wire::{Opcode, Part, PathMtu, Psn, Service};

/// Largest number of PSNs that may be outstanding: beyond it a duplicate could not be told from a future packet.
pub(crate) const PSN_WINDOW: u32 = 1 << 23;

/// How far `psn` lies after `base`, going round: 0 ..= 2^24 - 1.
#[inline]
pub(crate) const fn distance(psn: Psn, base: Psn) -> u32 {
    psn.get().wrapping_sub(base.get()) & 0x00ff_ffff
}

/// Packets (and PSNs) of a message of `len` bytes: at least one.
#[inline]
pub(crate) fn packets(len: u32, mtu: PathMtu) -> u32 {
    let bytes = mtu.bytes();
    len.saturating_add(bytes.wrapping_sub(1)).wrapping_shr(bytes.trailing_zeros()).max(1)
}

/// Where packet number `index` of a message starts in it.
#[inline]
pub(crate) fn offset(index: u32, mtu: PathMtu) -> u32 {
    index.wrapping_mul(mtu.bytes())
}

/// Payload bytes of packet number `index` of a message of `len` bytes.
#[inline]
pub(crate) fn chunk(len: u32, index: u32, mtu: PathMtu) -> u32 {
    mtu.bytes().min(len.saturating_sub(offset(index, mtu)))
}

/// Part of packet number `index` of a message that starts with packet `start` and ends before packet `end`.
#[inline]
pub(crate) fn part(start: u32, index: u32, end: u32) -> Part {
    match (index == start, index.wrapping_add(1) == end) {
        (true, true) => Part::Only,
        (true, false) => Part::First,
        (false, true) => Part::Last,
        (false, false) => Part::Middle,
    }
}

/// Opcode of a request packet; `None` for what does not travel, or not on this service.
#[inline]
pub(crate) fn request_opcode(service: Service, op: &SendOp, part: Part) -> Option<Opcode> {
    match service {
        Service::Rc => reliable_opcode(op, part),
        Service::Uc => unreliable_opcode(op, part),
        Service::Ud => match (op, part) {
            (SendOp::Send, Part::Only) => Some(Opcode::UdSendOnly),
            (SendOp::SendImm(_), Part::Only) => Some(Opcode::UdSendOnlyImm),
            _ => None,
        },
        Service::Cnp => None,
    }
}

#[inline]
fn unreliable_opcode(op: &SendOp, part: Part) -> Option<Opcode> {
    Some(match (op, part) {
        (SendOp::Send | SendOp::SendImm(_), Part::First) => Opcode::UcSendFirst,
        (SendOp::Send | SendOp::SendImm(_), Part::Middle) => Opcode::UcSendMiddle,
        (SendOp::Send, Part::Last) => Opcode::UcSendLast,
        (SendOp::Send, Part::Only) => Opcode::UcSendOnly,
        (SendOp::SendImm(_), Part::Last) => Opcode::UcSendLastImm,
        (SendOp::SendImm(_), Part::Only) => Opcode::UcSendOnlyImm,
        (SendOp::Write { .. } | SendOp::WriteImm { .. }, Part::First) => Opcode::UcWriteFirst,
        (SendOp::Write { .. } | SendOp::WriteImm { .. }, Part::Middle) => Opcode::UcWriteMiddle,
        (SendOp::Write { .. }, Part::Last) => Opcode::UcWriteLast,
        (SendOp::Write { .. }, Part::Only) => Opcode::UcWriteOnly,
        (SendOp::WriteImm { .. }, Part::Last) => Opcode::UcWriteLastImm,
        (SendOp::WriteImm { .. }, Part::Only) => Opcode::UcWriteOnlyImm,
        (
            SendOp::SendInv { .. }
            | SendOp::Read { .. }
            | SendOp::CmpSwap { .. }
            | SendOp::FetchAdd { .. }
            | SendOp::BindMw { .. }
            | SendOp::LocalInv { .. },
            Part::First | Part::Middle | Part::Last | Part::Only,
        ) => return None,
    })
}

#[inline]
fn reliable_opcode(op: &SendOp, part: Part) -> Option<Opcode> {
    Some(match (op, part) {
        (SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv { .. }, Part::First) => Opcode::RcSendFirst,
        (SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv { .. }, Part::Middle) => Opcode::RcSendMiddle,
        (SendOp::SendInv { .. }, Part::Last) => Opcode::RcSendLastInv,
        (SendOp::SendInv { .. }, Part::Only) => Opcode::RcSendOnlyInv,
        (SendOp::Send, Part::Last) => Opcode::RcSendLast,
        (SendOp::Send, Part::Only) => Opcode::RcSendOnly,
        (SendOp::SendImm(_), Part::Last) => Opcode::RcSendLastImm,
        (SendOp::SendImm(_), Part::Only) => Opcode::RcSendOnlyImm,
        (SendOp::Write { .. } | SendOp::WriteImm { .. }, Part::First) => Opcode::RcWriteFirst,
        (SendOp::Write { .. } | SendOp::WriteImm { .. }, Part::Middle) => Opcode::RcWriteMiddle,
        (SendOp::Write { .. }, Part::Last) => Opcode::RcWriteLast,
        (SendOp::Write { .. }, Part::Only) => Opcode::RcWriteOnly,
        (SendOp::WriteImm { .. }, Part::Last) => Opcode::RcWriteLastImm,
        (SendOp::WriteImm { .. }, Part::Only) => Opcode::RcWriteOnlyImm,
        (SendOp::Read { .. }, Part::First | Part::Middle | Part::Last | Part::Only) => Opcode::RcReadRequest,
        (SendOp::CmpSwap { .. }, Part::First | Part::Middle | Part::Last | Part::Only) => Opcode::RcCmpSwap,
        (SendOp::FetchAdd { .. }, Part::First | Part::Middle | Part::Last | Part::Only) => Opcode::RcFetchAdd,
        (
            SendOp::BindMw { .. } | SendOp::LocalInv { .. },
            Part::First | Part::Middle | Part::Last | Part::Only,
        ) => return None,
    })
}

/// Opcode of a READ response packet.
#[inline]
pub(crate) const fn response_opcode(part: Part) -> Opcode {
    match part {
        Part::First => Opcode::RcReadResponseFirst,
        Part::Middle => Opcode::RcReadResponseMiddle,
        Part::Last => Opcode::RcReadResponseLast,
        Part::Only => Opcode::RcReadResponseOnly,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_chunks_at_every_mtu() {
        for mtu in PathMtu::ALL {
            let p = mtu.bytes();
            for (len, want) in [(0, 1), (1, 1), (p - 1, 1), (p, 1), (p + 1, 2), (2 * p, 2), (2 * p + 1, 3)] {
                assert_eq!(packets(len, mtu), want, "{len} bytes at {p}");
                let total: u32 = (0..want).map(|i| chunk(len, i, mtu)).sum();
                assert_eq!(total, len);
                for i in 0..want.saturating_sub(1) {
                    assert_eq!(chunk(len, i, mtu), p, "all but the last are full");
                }
            }
            assert_eq!(packets(1 << 31, mtu), (1 << 31) / p);
        }
    }

    #[test]
    fn distance_goes_round() {
        assert_eq!(distance(Psn::new(2), Psn::new(0xff_fffe)), 4);
        assert_eq!(distance(Psn::new(5), Psn::new(5)), 0);
        assert_eq!(distance(Psn::new(4), Psn::new(5)), 0xff_ffff);
    }
}

//! A frame arrives: the checks that every frame needs, then its queue pair.
//!
//! Part of [`super::World`].

use ferroce_mem::Payload;
use ferroce_transport::{DropReason, Srq};
use ferroce_wire::{Bth, Gid, Op, Packet, Qpn, check_frame, packet};

use super::{Happening, QpRef, World};
use crate::checker::ViolationKind;
use crate::link::Frame;
use crate::plants::{self, Planted};
use crate::trace::{Line, What};

impl World {
    pub(super) fn arrive(&mut self, to: usize, frame: &Frame, out: &mut Vec<Happening>) {
        let now = self.now();
        let parsed = if self.planted == Some(Planted::SkipIcrc) {
            packet::parse(&frame.bytes, frame.bytes.len())
        } else {
            check_frame(&frame.bytes)
        };
        let packet = match parsed {
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
        let start = usize::from(packet.payload_offset);
        let mut bytes = frame.bytes[start..start + usize::from(packet.payload_len)].to_vec();
        if !bytes.is_empty() && self.planted(Planted::FlipPayload, 40) {
            bytes[0] ^= 1;
        }
        let dest = packet.headers.bth.dest_qpn;
        if dest == Qpn::MULTICAST {
            for index in self.members(to, &packet) {
                self.counted.multicast += 1;
                self.deliver(QpRef { endpoint: to, index }, packet, &bytes, out);
            }
        } else if let Some(&index) = self.endpoints[to].by_qpn.get(&dest.get()) {
            self.deliver(QpRef { endpoint: to, index }, packet, &bytes, out);
        } else {
            self.trace.add(now, to, Line::Packet(packet, What::NoSuchQp));
        }
    }

    /// Queue pairs of an endpoint that are in the group of a packet.
    fn members(&self, to: usize, packet: &Packet) -> Vec<usize> {
        let gid = packet.headers.ip.dst_gid();
        let here = |planned: &(Gid, Vec<QpRef>)| {
            planned.1.iter().filter(|at| at.endpoint == to).map(|at| at.index).collect::<Vec<_>>()
        };
        let members = self.groups.iter().find(|group| group.0 == gid).map(here).unwrap_or_default();
        match self.planted {
            Some(planted) => plants::members(planted, members, &self.endpoints[to].qps),
            None => members,
        }
    }

    /// A packet for a queue pair.
    fn deliver(&mut self, at: QpRef, mut packet: Packet, bytes: &[u8], out: &mut Vec<Happening>) {
        let (now, to, index) = (self.now(), at.endpoint, at.index);
        let payload = self.in_pieces(bytes);
        self.disturb(at, &packet);
        let owner = &mut self.endpoints[to];
        let slot = &mut owner.qps[index];
        if let Some(planted) = self.planted
            && !plants::incoming(planted, &slot.qp, &mut slot.memo, &mut packet)
        {
            return;
        }
        let srq = owner.srq.as_mut().filter(|_| slot.qp.info().srq.is_some());
        let before = srq.as_ref().map_or(0, |srq| srq.info().posted);
        let taken = slot.qp.handle_packet_srq(now, &packet, &payload, owner.regions.memory(), srq);
        match taken {
            Ok(()) => {
                slot.heard(now, &packet);
                self.trace.add(now, to, Line::Packet(packet, What::Taken));
            }
            Err(reason) => {
                self.count_drop(&packet, reason);
                self.trace.add(now, to, Line::Packet(packet, What::Dropped(reason)));
            }
        }
        if self.shared_posted(to) < before {
            self.counted.taken += 1;
            out.push(Happening::Taken(at));
        }
        self.tell_limit(to, out);
        self.poll_soon(to, now);
        self.perhaps_move(at);
    }

    fn count_drop(&mut self, packet: &Packet, reason: DropReason) {
        *self.dropped.entry(format!("{reason:?}")).or_default() += 1;
        if matches!(reason, DropReason::WrongService | DropReason::WrongAddress | DropReason::WrongPkey) {
            self.violate(ViolationKind::FrameRefused, format!("dropped {reason:?}: {packet}"));
        }
        let place = match packet.headers.bth.opcode.op() {
            Op::ReadRequest => 0,
            Op::CmpSwap => 1,
            Op::FetchAdd => 2,
            _ => return,
        };
        self.counted.replayed[place] += u64::from(reason == DropReason::Duplicate);
    }

    fn tell_limit(&mut self, to: usize, out: &mut Vec<Happening>) {
        if self.endpoints[to].srq.as_mut().is_some_and(Srq::poll_limit) {
            self.counted.limits += 1;
            let times = match self.planted {
                Some(Planted::LimitLost) => 0,
                Some(Planted::LimitTwice) => 2,
                _ => 1,
            };
            out.extend(std::iter::repeat_n(Happening::Limit(to), times));
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

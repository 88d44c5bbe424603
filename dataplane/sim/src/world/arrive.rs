//! A frame arrives: the checks that every frame needs, then its queue pair.
//!
//! Part of [`super::World`].

use ferroce_mem::Payload;
use ferroce_transport::DropReason;
use ferroce_wire::{Bth, Packet, check_frame, packet};

use super::{QpRef, World};
use crate::checker::ViolationKind;
use crate::link::Frame;
use crate::plants::{self, Planted};
use crate::trace::{Line, What};

impl World {
    pub(super) fn arrive(&mut self, to: usize, frame: &Frame) {
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

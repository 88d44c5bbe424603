//! The receive path of one frame: parse, ICRC, demux, queue pair (or another worker).
//!
//! Outside input: every refusal is a reason with a counter, and nothing is placed before the ICRC was found right. The
//! headers are parsed from the private head; the payload may be memory that the sender still writes, and is only ever
//! copied or summed.

use ferroce_mem::Payload;
use ferroce_nic::RxFrame;
use ferroce_transport::DropReason;
use ferroce_verbs::AsyncEvent;
use ferroce_wire::icrc::Icrc;
use ferroce_wire::{ICRC_BYTES, Packet, ParseError, Part, Qpn, Service, packet};

use crate::config::IcrcMode;
use crate::core::WorkerCore;
use crate::demux::{Found, QpSlot};
use crate::event::{EngineEventKind, MtuFault};
use crate::forward::{Carried, Forward};
use crate::stats::{Counter, FrameDrop};

impl WorkerCore {
    /// Takes one frame from the port.
    #[inline]
    pub(crate) fn receive(&mut self, frame: &RxFrame<'_>, forward: &mut Forward) {
        self.block.add(Counter::RxFrames, 1);
        self.block.add(Counter::RxBytes, frame.len() as u64);
        if let Err(reason) = self.accept(frame, forward) {
            self.block.drop_frame(reason);
        }
    }

    /// Takes one packet that another worker received for us.
    pub(crate) fn receive_forwarded(&mut self, carried: &Carried) {
        self.block.add(Counter::ForwardsIn, 1);
        let dest = carried.packet.headers.bth.dest_qpn;
        if dest == Qpn::MULTICAST {
            // Whoever passed it on told the others too.
            self.deliver_to_members(&carried.packet, &carried.payload());
            return;
        }
        let taken = match self.qps.find(dest) {
            Found::Here(index) => self.deliver_unicast(index, &carried.packet, &carried.payload()),
            Found::Other(_) | Found::Unknown => Err(FrameDrop::UnknownQp),
        };
        if let Err(reason) = taken {
            self.block.drop_frame(reason);
        }
    }

    fn accept(&mut self, frame: &RxFrame<'_>, forward: &mut Forward) -> Result<(), FrameDrop> {
        let packet = packet::parse(frame.head, frame.len()).map_err(FrameDrop::Parse)?;
        let payload = match self.icrc {
            IcrcMode::On => checked_payload(frame, &packet)?,
            IcrcMode::Off => body(frame, &packet)?.0,
        };
        let dest = packet.headers.bth.dest_qpn;
        if dest == Qpn::MULTICAST {
            return self.multicast(&packet, &payload, forward);
        }
        match self.qps.find(dest) {
            Found::Here(index) => self.deliver_unicast(index, &packet, &payload),
            Found::Other(worker) => {
                if !forward.push(worker, &packet, &payload) {
                    return Err(FrameDrop::ForwardFull);
                }
                self.block.add(Counter::ForwardsOut, 1);
                Ok(())
            }
            Found::Unknown => Err(FrameDrop::UnknownQp),
        }
    }

    /// A datagram to a group: a copy to each of its queue pairs here, and one to each other worker that has some.
    fn multicast(
        &mut self,
        packet: &Packet,
        payload: &Payload<'_>,
        forward: &mut Forward,
    ) -> Result<(), FrameDrop> {
        let places = self.groups.find(&packet.headers.ip.dst_gid());
        if places.is_empty() {
            return Err(FrameDrop::UnknownGroup);
        }
        // Members are sorted by worker.
        let mut told = self.id;
        for member in places.filter_map(|place| self.groups.at(place)) {
            if member.worker == self.id || member.worker == told {
                continue;
            }
            told = member.worker;
            if forward.push(told, packet, payload) {
                self.block.add(Counter::ForwardsOut, 1);
            } else {
                self.block.drop_frame(FrameDrop::ForwardFull);
            }
        }
        self.deliver_to_members(packet, payload);
        Ok(())
    }

    /// A copy to each queue pair of this worker that is in the packet's group; a refusal is counted for each.
    fn deliver_to_members(&mut self, packet: &Packet, payload: &Payload<'_>) {
        for place in self.groups.find(&packet.headers.ip.dst_gid()) {
            let Some(member) = self.groups.at(place) else { break };
            if member.worker != self.id {
                continue;
            }
            // Control detaches a queue pair before it destroys it.
            let Found::Here(index) = self.qps.find(Qpn::new(member.qpn)) else { continue };
            if let Err(reason) = self.deliver(index, packet, payload) {
                self.block.drop_frame(reason);
            }
        }
    }

    /// A packet by its queue pair's own number. A connected queue pair knows its addresses; a datagram is ours if the
    /// device has its address.
    #[inline]
    fn deliver_unicast(
        &mut self,
        index: u32,
        packet: &Packet,
        payload: &Payload<'_>,
    ) -> Result<(), FrameDrop> {
        let headers = &packet.headers;
        if headers.bth.opcode.service() == Service::Ud && !self.netdev.gids.contains(&headers.ip.dst_gid()) {
            return Err(FrameDrop::Qp(DropReason::WrongAddress));
        }
        self.deliver(index, packet, payload)
    }

    #[inline]
    fn deliver(&mut self, index: u32, packet: &Packet, payload: &Payload<'_>) -> Result<(), FrameDrop> {
        let slot = self.qps.get_mut(index).ok_or(FrameDrop::UnknownQp)?;
        let mut srq = slot.srq.and_then(|index| self.srqs.at(index));
        let taken = slot.qp.handle_packet_srq(self.now, packet, payload, &self.memory, srq.as_deref_mut());
        if taken.is_err() {
            slot.note_size(packet);
        }
        if let Some(srq) = srq
            && srq.poll_limit()
        {
            let reached = AsyncEvent::SrqLimitReached(srq.info().srq);
            self.event(EngineEventKind::Async(reached), None);
        }
        // Also after a refusal: it may have left a NAK to send.
        self.settle(index);
        taken.map_err(FrameDrop::Qp)
    }
}

impl QpSlot {
    /// After a refusal: whether the two sides have different path MTUs, which only the sizes of packets show.
    #[cold]
    fn note_size(&mut self, packet: &Packet) {
        let Some(path_mtu) = self.qp.path_mtu() else { return };
        let bytes = packet.payload_len;
        let whole = matches!(packet.headers.bth.opcode.info().part, Part::First | Part::Middle);
        if u32::from(bytes) > path_mtu.bytes() || (whole && u32::from(bytes) != path_mtu.bytes()) {
            self.mtu_fault = Some(MtuFault::Peer { bytes, path_mtu });
        }
    }
}

/// Payload, and everything that the ICRC covers after the headers plus the ICRC itself.
#[inline]
fn body<'f>(frame: &RxFrame<'f>, packet: &Packet) -> Result<(Payload<'f>, Payload<'f>), FrameDrop> {
    const SHORT: FrameDrop = FrameDrop::Parse(ParseError::Truncated);
    let mut body = Payload::from_slice(frame.head.get(packet.payload_offset as usize..).ok_or(SHORT)?);
    if !body.append(&frame.rest) {
        return Err(SHORT);
    }
    let payload = body.slice(0, packet.payload_len as usize).ok_or(SHORT)?;
    Ok((payload, body))
}

/// The payload of a frame whose ICRC is right.
#[inline]
fn checked_payload<'f>(frame: &RxFrame<'f>, packet: &Packet) -> Result<Payload<'f>, FrameDrop> {
    const SHORT: FrameDrop = FrameDrop::Parse(ParseError::Truncated);
    let (payload, body) = body(frame, packet)?;
    let covered = packet.payload_len as usize + packet.pad as usize;
    let headers = frame.head.get(..packet.payload_offset as usize).ok_or(SHORT)?;
    let state = Icrc::over_headers(headers, packet.ip_offset as usize);
    let icrc = Icrc(body.slice(0, covered).ok_or(SHORT)?.crc(state.0));
    let mut found = [0u8; ICRC_BYTES];
    if body.slice(covered, ICRC_BYTES).ok_or(SHORT)?.copy_to(&mut found) != ICRC_BYTES {
        return Err(SHORT);
    }
    if icrc.to_wire() != found {
        return Err(FrameDrop::Parse(ParseError::BadIcrc));
    }
    Ok(payload)
}

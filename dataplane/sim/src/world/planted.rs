//! The planted faults that need the whole world.
//!
//! Part of [`super::World`].

use ferroce_transport::{FrameSink, Instant, Qp, QpCounter};
use ferroce_verbs::{AddressVector, QpChange, QpModify, QpState};
use ferroce_wire::{Aeth, Bth, Ext, Headers, Icrc, Msn, Op, Opcode, Packet, Service, Syndrome, emit};

use super::{Event, QpRef, World};
use crate::link::Frame;
use crate::plants::Planted;
use crate::sink::Sink;

impl World {
    /// What a packet is to find that a faulty queue pair would have done.
    pub(super) fn disturb(&mut self, at: QpRef, packet: &Packet) {
        match self.planted {
            Some(Planted::DuplicateExecuted) => self.execute_again(at.endpoint, at.index, packet),
            Some(Planted::KeyCheckedOnce) => self.keep_key(at, packet),
            _ => {}
        }
    }

    /// The plant of a responder that checks a key at the first packet of a message only: once the key of the message in
    /// progress is gone, the message goes on with another that grants the same. The image is the way in.
    fn keep_key(&mut self, at: QpRef, packet: &Packet) {
        let owner = &mut self.endpoints[at.endpoint];
        let slot = &mut owner.qps[at.index];
        if let Some(reth) = packet.headers.ext.reth {
            slot.memo.write_key = reth.rkey;
            return;
        }
        let key = slot.memo.write_key;
        let gone = owner.regions.memory().window(key).is_some_and(|mw| mw.rkey != key || mw.bound.is_none());
        if packet.headers.bth.opcode.op() != Op::Write || !gone {
            return;
        }
        let mut image = Vec::new();
        slot.qp.export(&mut image);
        // The message in progress comes after everything else that could have this key.
        let key = key.0.to_le_bytes();
        let Some(place) = image.windows(4).rposition(|bytes| bytes == key) else { return };
        image[place..place + 4].copy_from_slice(&owner.mr.rkey.0.to_le_bytes());
        if let Ok(mut moved) = Qp::import(&image) {
            slot.qp.release_all(owner.regions.memory());
            moved.hold_posted(owner.regions.memory());
            slot.qp = moved;
        }
    }

    /// The plant of a responder that takes a duplicate fetch and add for a new one.
    fn execute_again(&mut self, to: usize, index: usize, packet: &Packet) {
        let owner = &self.endpoints[to];
        let (bth, expected) = (&packet.headers.bth, owner.qps[index].qp.info().rq_psn);
        let Some(atomic) = packet.headers.ext.atomic else { return };
        if bth.opcode != Opcode::RcFetchAdd || bth.psn.offset_from(expected) >= 0 {
            return;
        }
        let offset = atomic.addr.0.wrapping_sub(owner.mr.iova) as usize;
        let mut cell = [0; 8];
        owner.block().read(offset, &mut cell);
        let sum = u64::from_ne_bytes(cell).wrapping_add(atomic.swap_or_add);
        owner.block().write(offset, &sum.to_ne_bytes());
    }

    /// The plant of a responder that acknowledges too early: the answer is there before the request is.
    pub(super) fn acknowledge_early(&mut self, at: QpRef, headers: &Headers) {
        let slot = &self.endpoints[at.endpoint].qps[at.index];
        let bth = &headers.bth;
        let owed = bth.opcode.service() == Service::Rc && !bth.opcode.is_response() && bth.ack_req;
        let data = headers.ext.atomic.is_none() && bth.opcode != Opcode::RcReadRequest;
        let Some(av) = slot.qp.av().copied().filter(|_| owed && data) else { return };
        if !self.planted(Planted::EarlyAck, 20) {
            return;
        }
        let back = AddressVector { sgid: av.dgid, dgid: av.sgid, smac: av.dmac, dmac: av.smac, ..av };
        let answer = Bth::new(Opcode::RcAck, self.endpoints[at.endpoint].qps[at.index].qp.qpn(), bth.psn);
        let aeth = Aeth { syndrome: Syndrome::Ack { credits: 31 }, msn: Msn::default() };
        let mut sink = Sink { av: Some(back), ..Sink::default() };
        if sink.begin(&answer, &Ext { aeth: Some(aeth), ..Ext::NONE }, 0)
            && let Some((headers, _)) = sink.headers
        {
            let offset = emit::header_bytes(&headers);
            let (head, body) = sink.frame.split_at(offset);
            let icrc = Icrc::over_headers(head, emit::ip_offset(&headers)).update(body).to_wire();
            sink.frame.extend(icrc);
            let frame = Frame { bytes: sink.frame, original: None };
            self.clock.at(self.now(), Event::Arrive(at.endpoint, frame));
        }
    }
}

/// The plant of a requester that never reloads its retry counter: what earlier timeouts took stays taken. Its counter only
/// sinks by itself; lowering the attribute and raising it again is the way in.
pub(super) fn forget_reload(qp: &mut Qp, now: Instant) {
    let info = qp.info();
    let (Some(rts), QpState::Rts) = (info.rts, info.state) else { return };
    if info.una_psn == info.sq_psn {
        return;
    }
    let spent = qp.counters().get(QpCounter::LocalAckTimeoutErr);
    let left = u64::from(rts.retry_cnt).saturating_sub(spent) as u8;
    let set = |retry_cnt| QpModify::Change(QpChange { retry_cnt: Some(retry_cnt), ..QpChange::default() });
    for modify in [QpModify::ToSqd, set(left), set(rts.retry_cnt), QpModify::SqdToRts] {
        // All are allowed from RTS.
        let _ = qp.modify(now, &modify);
    }
}

//! The planted faults that need the whole world.
//!
//! Part of [`super::World`].

use ferroce_transport::FrameSink;
use ferroce_verbs::AddressVector;
use ferroce_wire::{Aeth, Bth, Ext, Headers, Icrc, Msn, Opcode, Packet, Service, Syndrome, emit};

use super::{Event, QpRef, World};
use crate::link::Frame;
use crate::plants::Planted;
use crate::sink::Sink;

impl World {
    /// The plant of a responder that takes a duplicate fetch and add for a new one.
    pub(super) fn execute_again(&mut self, to: usize, index: usize, packet: &Packet) {
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

//! Sends in send-queue order, each packet once.
//!
//! Invariant: the request in progress is the one at the queue's `done` index.

use ferroce_mem::Memory;
use ferroce_verbs::{PathMtu, QpState, WcStatus};
use ferroce_wire::{Psn, Service};

use crate::local;
use crate::outbound::{self, Handed, Place};
use crate::qp::Base;
use crate::segment;
use crate::sink::{FrameSink, Transmit};
use crate::wq::{Kind, SgeCursor};

/// Send side.
pub(crate) struct Sender {
    pub(crate) service: Service,
    pub(crate) mtu: PathMtu,
    /// PSN of the next packet.
    pub(crate) psn: Psn,
    /// Packet of the request in progress that is next.
    pub(crate) packet: u32,
    pub(crate) gather: SgeCursor,
}

impl Sender {
    pub(crate) fn new(service: Service) -> Sender {
        Sender { service, mtu: PathMtu::Mtu256, psn: Psn::default(), packet: 0, gather: SgeCursor::default() }
    }

    pub(crate) fn start(&mut self, mtu: PathMtu, psn: Psn) {
        *self = Sender { mtu, psn, ..Sender::new(self.service) };
    }

    /// SQE was left: what was in progress is flushed.
    pub(crate) fn resume(&mut self) {
        self.packet = 0;
        self.gather = SgeCursor::default();
    }

    /// The next packet, and local operations on the way.
    #[inline]
    pub(crate) fn poll<S: FrameSink>(&mut self, base: &mut Base, memory: &Memory, sink: &mut S) -> Transmit {
        // Ends: each local operation moves on, and there are no more than the queue holds.
        loop {
            match base.state {
                QpState::Rts => {}
                QpState::Sqd if self.packet > 0 => {}
                QpState::Sqd
                | QpState::Reset
                | QpState::Init
                | QpState::Rtr
                | QpState::Sqe
                | QpState::Err => {
                    return Transmit::Idle;
                }
            }
            let Some(entry) = base.sq.queue.get(base.sq.queue.done) else { return Transmit::Idle };
            if entry.kind() == Kind::Local {
                match local::execute(base, &entry.op, memory) {
                    Ok(()) => self.finish(base),
                    Err(status) => base.stop_sending(status),
                }
                continue;
            }
            let packets = segment::packets(entry.len, self.mtu);
            if self.service == Service::Ud && packets > 1 {
                base.stop_sending(WcStatus::LocLenErr);
                continue;
            }
            return self.data(base, packets, memory, sink);
        }
    }

    #[inline]
    fn data<S: FrameSink>(
        &mut self,
        base: &mut Base,
        packets: u32,
        memory: &Memory,
        sink: &mut S,
    ) -> Transmit {
        let place = Place {
            service: self.service,
            mtu: self.mtu,
            index: base.sq.queue.done,
            packet: self.packet,
            packets,
            psn: self.psn,
            ack_req: false,
        };
        match outbound::data(base, &place, &mut self.gather, memory, sink) {
            Handed::Done(bytes) => {
                base.count_sent(bytes);
                self.psn = self.psn.advance(1);
                self.packet = self.packet.wrapping_add(1);
                if self.packet >= packets {
                    self.finish(base);
                }
                Transmit::Sent
            }
            Handed::NoRoom => Transmit::NoRoom,
            Handed::Fault(status) => {
                base.stop_sending(status);
                Transmit::Idle
            }
        }
    }

    /// The request in progress is done.
    #[inline]
    fn finish(&mut self, base: &mut Base) {
        base.sq.queue.done = base.sq.queue.done.wrapping_add(1);
        self.resume();
        self.check_drained(base);
    }

    /// Tells, in SQD, when no request is half sent.
    pub(crate) fn check_drained(&self, base: &mut Base) {
        if base.state == QpState::Sqd && self.packet == 0 {
            base.notices.drained();
        }
    }
}

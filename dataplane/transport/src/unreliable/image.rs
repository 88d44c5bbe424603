//! The unreliable services in the image of a queue pair ([`crate::image`]).

use alloc::vec::Vec;

use ferroce_verbs::QpState;
use ferroce_wire::Service;

use crate::image::{Image, ImportError, Reader, ensure, mtu_of};
use crate::inbound::Inbound;
use crate::qp::Base;
use crate::segment;
use crate::wq::{Kind, SgeCursor};

use super::{Sender, UcReceiver};

impl Sender {
    pub(crate) fn save(&self, out: &mut Vec<u8>) {
        let Sender { service: _, mtu: _, psn, packet, gather: _ } = self;
        psn.save(out);
        packet.save(out);
    }

    pub(crate) fn load(service: Service, base: &Base, from: &mut Reader<'_>) -> Result<Sender, ImportError> {
        let (psn, packet) = Image::load(from)?;
        let sender = Sender { service, mtu: mtu_of(base), psn, packet, gather: SgeCursor::default() };
        // In SQE and ERR it is never asked, and SQE is left with a new start.
        if matches!(base.state, QpState::Rts | QpState::Sqd) && packet > 0 {
            let inside = base.sq.queue.get(base.sq.queue.done).is_some_and(|entry| {
                entry.kind() == Kind::Data && packet < segment::packets(entry.len, sender.mtu)
            });
            ensure(inside, "the message being sent")?;
        }
        Ok(sender)
    }
}

impl UcReceiver {
    pub(crate) fn save(&self, out: &mut Vec<u8>) {
        let UcReceiver { inbound, expected } = self;
        expected.save(out);
        inbound.save(out);
    }

    pub(crate) fn load(base: &Base, from: &mut Reader<'_>) -> Result<UcReceiver, ImportError> {
        let expected = Image::load(from)?;
        Ok(UcReceiver { expected, inbound: Inbound::load(base, from)? })
    }
}

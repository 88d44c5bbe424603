//! Receive side of unreliable datagrams (roce-wire 8): each packet is a message, its PSN means nothing.
//!
//! A datagram that does not fit, or for which there is no receive, is dropped and uses up nothing.

use ferroce_mem::Payload;
use ferroce_verbs::{PathMtu, WcStatus};
use ferroce_wire::emit::pad_of;

use crate::arrival::Arrival;
use crate::counters::QpCounter;
use crate::qp::{Base, DropReason};
use crate::wq::{SgeCursor, scatter};

use super::grh::{self, GRH_BYTES};

/// Receive side.
pub(crate) struct UdReceiver {
    pub(crate) mtu: PathMtu,
}

impl UdReceiver {
    #[inline]
    pub(crate) fn on_packet(&mut self, base: &mut Base, arrival: &mut Arrival<'_>) -> Result<(), DropReason> {
        let packet = arrival.packet;
        let headers = &packet.headers;
        let Some(deth) = &headers.ext.deth else { return Err(DropReason::WrongService) };
        if base.init.is_none_or(|init| init.qkey != deth.qkey) {
            return Err(DropReason::WrongQkey);
        }
        let bytes = u32::from(packet.payload_len);
        let well_formed = bytes <= self.mtu.bytes()
            && arrival.payload.len() == usize::from(packet.payload_len)
            && pad_of(arrival.payload.len()) == usize::from(packet.pad);
        if !well_formed {
            return Err(DropReason::Refused);
        }
        let total = bytes.saturating_add(GRH_BYTES);
        match base.room_of_next(arrival.srq.as_deref()) {
            None => return Err(DropReason::NotReady),
            Some(room) if room < total => return Err(DropReason::Refused),
            Some(_) => {}
        }
        if !base.take_receive(arrival.srq.as_deref_mut(), arrival.memory) {
            return Err(DropReason::NotReady);
        }
        if let Err(status) = place(base, arrival) {
            base.fail_request(headers.bth.psn, None, Some(status));
            return Err(DropReason::Refused);
        }
        base.counters.add(QpCounter::RcvdBytes, u64::from(bytes));
        base.rq.finish(|entry| {
            entry.byte_len = total;
            entry.imm = headers.ext.imm;
            entry.src_qpn = Some(deth.src_qpn);
            entry.solicited = headers.bth.solicited;
        });
        Ok(())
    }
}

/// GRH area and payload to the current receive.
fn place(base: &Base, arrival: &Arrival<'_>) -> Result<(), WcStatus> {
    let list = base.rq.current_sges();
    let mut cursor = SgeCursor::default();
    let area = grh::area(arrival.packet);
    let pd = base.attr.pd;
    scatter(arrival.memory, pd, list, &cursor, &Payload::from_slice(&area))
        .map_err(|_| WcStatus::LocProtErr)?;
    cursor.seek(list, GRH_BYTES);
    scatter(arrival.memory, pd, list, &cursor, arrival.payload).map_err(|_| WcStatus::LocProtErr)
}

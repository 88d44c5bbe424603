//! From queue pair number to queue pair: O(1), no hash.
//!
//! Owns a worker's table of queue pairs. Invariant: slot `i` holds a queue pair whose number opens to this worker, index
//! `i` and the slot's generation; a number of an earlier life finds nothing. Called per frame and per post.

use ferroce_transport::{Instant, Qp};
use ferroce_verbs::{AddressVector, ClassId, Gid, Qpn};
use ferroce_wire::{Eth, Ip};

use crate::event::MtuFault;
use crate::number::QpnLayout;

/// The headers of a queue pair's path: all that does not change from packet to packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PathHeaders {
    pub eth: Eth,
    pub ip: Ip,
    pub udp_src: u16,
}

impl PathHeaders {
    /// `None` if the two addresses are of different families.
    pub fn new(av: &AddressVector) -> Option<Self> {
        let eth = Eth { dst: av.dmac, src: av.smac, vlan: av.vlan };
        let ip = match (av.sgid.to_ip(), av.dgid.to_ip()) {
            (std::net::IpAddr::V4(src), std::net::IpAddr::V4(dst)) => {
                Ip::V4 { src, dst, tos: av.traffic_class, ttl: av.hop_limit, id: 0, frag: 0x4000 }
            }
            (std::net::IpAddr::V6(src), std::net::IpAddr::V6(dst)) => Ip::V6 {
                src,
                dst,
                traffic_class: av.traffic_class,
                flow_label: av.flow_label,
                hop_limit: av.hop_limit,
            },
            _ => return None,
        };
        Some(PathHeaders { eth, ip, udp_src: av.udp_src })
    }
}

/// A queue pair and what the engine keeps beside it.
pub(crate) struct QpSlot {
    pub qp: Qp,
    /// Index of the completion queue of sends.
    pub send_cq: u32,
    /// Index of the completion queue of receives.
    pub recv_cq: u32,
    /// Index of the shared receive queue that it takes from.
    pub srq: Option<u32>,
    /// Class that decides when it sends.
    pub class: ClassId,
    /// Set by INIT -> RTR.
    pub path: Option<PathHeaders>,
    /// The peer, for events.
    pub peer: Option<(Gid, Qpn)>,
    /// Entries of the send completion queue that posted sends hold.
    pub reserved: u32,
    /// What the timing wheel was last armed for.
    pub armed: Option<Instant>,
    /// A completion queue of it overflowed.
    pub overflowed: bool,
    /// The packet that was too long, or not as long as our path MTU wants it: for the event of the fault that follows.
    pub mtu_fault: Option<MtuFault>,
}

/// Where a number leads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    /// A queue pair of this worker, at this index.
    Here(u32),
    /// A number of that worker.
    Other(u8),
    /// Nothing.
    Unknown,
}

/// The table.
pub(crate) struct QpTable {
    slots: Vec<Option<Box<QpSlot>>>,
    layout: QpnLayout,
    worker: u8,
    workers: u8,
    live: usize,
}

impl QpTable {
    pub fn new(layout: QpnLayout, worker: u8, workers: u8, capacity: u32) -> Self {
        let slots = (0..capacity).map(|_| None).collect();
        QpTable { slots, layout, worker, workers, live: 0 }
    }

    pub fn live(&self) -> usize {
        self.live
    }

    /// Finds a number.
    #[inline]
    pub fn find(&self, qpn: Qpn) -> Found {
        let parts = self.layout.open(qpn);
        if parts.worker != self.worker {
            return if parts.worker < self.workers { Found::Other(parts.worker) } else { Found::Unknown };
        }
        match self.slots.get(parts.index as usize) {
            // The whole number is compared: it holds the generation.
            Some(Some(slot)) if slot.qp.qpn() == qpn => Found::Here(parts.index),
            _ => Found::Unknown,
        }
    }

    #[inline]
    pub fn get_mut(&mut self, index: u32) -> Option<&mut QpSlot> {
        self.slots.get_mut(index as usize)?.as_deref_mut()
    }

    /// The queue pair of a number, if it is one of this worker's.
    #[inline]
    pub fn by_number(&mut self, qpn: Qpn) -> Option<(u32, &mut QpSlot)> {
        match self.find(qpn) {
            Found::Here(index) => self.get_mut(index).map(|slot| (index, slot)),
            Found::Other(_) | Found::Unknown => None,
        }
    }

    /// Puts a queue pair into its slot; gives it back if the slot is taken or does not exist.
    pub fn insert(&mut self, index: u32, slot: Box<QpSlot>) -> Result<(), Box<QpSlot>> {
        match self.slots.get_mut(index as usize) {
            Some(place @ None) => {
                *place = Some(slot);
                self.live += 1;
                Ok(())
            }
            _ => Err(slot),
        }
    }

    /// Takes a queue pair out.
    pub fn remove(&mut self, index: u32) -> Option<Box<QpSlot>> {
        let slot = self.slots.get_mut(index as usize)?.take();
        self.live -= usize::from(slot.is_some());
        slot
    }
}

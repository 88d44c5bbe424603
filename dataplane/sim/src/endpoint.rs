//! An endpoint of the world: its addresses, its one region, its queue pairs and what they share.
//!
//! Owns what belongs to one side of the wires. Called by [`crate::world`] alone; knows neither wires nor time.

use std::collections::BTreeMap;

use ferroce_mem::os::{Arena, ArenaConfig, Block, PagePolicy, Regions};
use ferroce_mem::{Access, Lkey, MrInfo};
use ferroce_transport::time::RNR_TIMER_NS;
use ferroce_transport::{Instant, Qp, Srq};
use ferroce_wire::{Gid, Packet, Psn, Syndrome};

use crate::plants::{Memo, Swapped};
use crate::world::World;

pub(crate) struct QpSlot {
    pub(crate) qp: Qp,
    /// For when the timer is planned.
    pub(crate) armed: Option<Instant>,
    /// Furthest PSN that a request carried.
    pub(crate) last_sent: Option<Psn>,
    /// The peer asked by an RNR NAK for patience until then, as long as this PSN stays the oldest unacknowledged one.
    pub(crate) quiet: Option<(Instant, Psn)>,
    /// In SQD: what no request may go beyond.
    pub(crate) drain: Option<Drain>,
    /// What became of the oldest unacknowledged PSN so far.
    pub(crate) tries: Tries,
    /// For planted faults.
    pub(crate) memo: Memo,
}

/// A send queue in SQD.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Drain {
    /// First PSN that no request had when it began: none starts there.
    pub(crate) next: Psn,
    /// It was told that what was started is finished: no request is sent at all.
    pub(crate) told: bool,
}

/// Attempts at one PSN: each but the first is a retry, or follows an RNR NAK.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Tries {
    /// The PSN.
    pub psn: Psn,
    /// Times it was sent.
    pub sent: u32,
    /// RNR NAKs for it that were taken.
    pub busy: u32,
    /// Requests and answers of the queue pair that the wires lost, damaged or held back meanwhile.
    pub lost: u32,
}

impl Tries {
    /// Those at `psn`: others are forgotten.
    pub(crate) fn at(&mut self, psn: Psn) -> &mut Tries {
        if self.psn != psn {
            *self = Tries { psn, ..Tries::default() };
        }
        self
    }
}

/// An endpoint: addresses, memory, queue pairs.
pub struct Endpoint {
    pub(crate) gids: [Gid; 2],
    pub(crate) regions: Regions,
    pub(crate) mr: MrInfo,
    pub(crate) srq: Option<Srq>,
    /// For a planted fault.
    pub(crate) swapped: Swapped,
    pub(crate) qps: Vec<QpSlot>,
    pub(crate) by_qpn: BTreeMap<u32, usize>,
    pub(crate) poll_at: Option<Instant>,
    pub(crate) turn: usize,
}

/// What an endpoint is made of.
#[derive(Clone, Copy, Debug)]
pub struct EndpointInit {
    /// Bytes of its one region.
    pub bytes: usize,
    /// Address of the first one.
    pub iova: u64,
}

impl QpSlot {
    /// Notes an RNR NAK that was taken. One about an older packet, or one that only shows that READ data was lost, asks
    /// for nothing.
    pub(crate) fn heard(&mut self, now: Instant, packet: &Packet) {
        let psn = packet.headers.bth.psn;
        let Some(Syndrome::RnrNak { timer }) = packet.headers.ext.aeth.map(|aeth| aeth.syndrome) else {
            return;
        };
        if self.qp.info().una_psn != psn {
            return;
        }
        self.tries.at(psn).busy += 1;
        // Another for the same packet, as duplicates bring, need not make the wait longer.
        if self.quiet.is_none_or(|(until, of)| of != psn || until <= now) {
            self.quiet = Some((now.after(RNR_TIMER_NS[usize::from(timer)]), psn));
        }
    }
}

impl Endpoint {
    pub(crate) fn new(seed: u64, index: usize, init: &EndpointInit) -> anyhow::Result<Endpoint> {
        let config = ArenaConfig { bytes: init.bytes as u64, pages: PagePolicy::Normal, numa_node: None };
        let (arena, _) = Arena::new(config)?;
        let block = arena.alloc(init.bytes, 4096)?;
        let mut regions = Regions::new(32, seed ^ index as u64);
        let rights = Access::LOCAL_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_WRITE
            | Access::REMOTE_ATOMIC
            | Access::MW_BIND;
        let mr = regions.register(block, World::PD, rights, init.iova)?;
        let last = index as u8 + 1;
        let v4 = Gid::from_ip(std::net::IpAddr::from([10, 0, 0, last]));
        let v6 = Gid::from_ip(std::net::IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, u16::from(last)]));
        Ok(Endpoint {
            gids: [v4, v6],
            regions,
            mr,
            srq: None,
            swapped: Swapped::default(),
            qps: Vec::new(),
            by_qpn: BTreeMap::new(),
            poll_at: None,
            turn: 0,
        })
    }

    pub(crate) fn block(&self) -> &Block {
        let lkey: Lkey = self.mr.lkey;
        self.regions.block(lkey).expect("registered in Endpoint::new and never taken out")
    }
}

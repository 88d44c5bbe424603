//! Paths of queue pairs follow the kernel: its routes and neighbours change while queue pairs live.
//!
//! Owns the time of the next full round. Each connected queue pair was given the Ethernet address of its next hop when
//! it was connected. When the port tells of changed routes or neighbours, and now and then anyway, the next hop of each
//! pair of addresses in use is looked up again without waiting, and queue pairs whose next hop has another Ethernet
//! address are moved to it. Looking also makes the kernel confirm the neighbour: it sees none of our frames and would
//! never notice by itself that it moved. Address handles belong to the application and are not followed. Called by
//! housekeeping; never by a worker.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use ferroce_nic::Port;
use ferroce_verbs::{AddressVector, Gid, MacAddr, QpType, Qpn};

use crate::command::Command;
use crate::device::{SoftDevice, lock};

/// Between two rounds without news.
const CONFIRM: Duration = Duration::from_secs(10);
/// Pairs of addresses that one round looks up: a round stays short whatever the number of peers.
const LOOKUPS: usize = 256;

/// Follows the paths of one device.
#[derive(Debug)]
pub struct Follower {
    due: Instant,
    /// Pairs of addresses that were passed over for the limit.
    skip: usize,
}

impl Default for Follower {
    fn default() -> Self {
        Follower { due: Instant::now() + CONFIRM, skip: 0 }
    }
}

impl Follower {
    /// One round if it is due; returns how many queue pairs were moved.
    pub fn round(&mut self, port: &mut impl Port, device: &SoftDevice) -> usize {
        let now = Instant::now();
        if !port.paths_changed() && now < self.due {
            return 0;
        }
        self.due = now + CONFIRM;
        let smac = MacAddr(port.caps().mac);
        let paths = device.paths();
        let mut pairs: Vec<(Gid, Gid)> = paths.iter().map(|(_, av)| (av.sgid, av.dgid)).collect();
        pairs.sort_unstable_by_key(|(sgid, dgid)| (sgid.0, dgid.0));
        pairs.dedup();
        self.skip = if self.skip < pairs.len() { self.skip } else { 0 };
        let mut hops = HashMap::new();
        for (sgid, dgid) in pairs.iter().skip(self.skip).take(LOOKUPS) {
            if let Some(mac) = port.next_hop(sgid.to_ip(), dgid.to_ip()) {
                hops.insert((*sgid, *dgid), MacAddr(mac));
            }
        }
        self.skip += LOOKUPS;
        if self.skip < pairs.len() {
            self.due = now;
        } else {
            self.skip = 0;
        }
        let moved = paths.into_iter().filter(|(qpn, av)| {
            let dmac = hops.get(&(av.sgid, av.dgid)).copied().unwrap_or(av.dmac);
            (dmac, smac) != (av.dmac, av.smac) && device.repath(*qpn, AddressVector { dmac, smac, ..*av })
        });
        moved.count()
    }
}

impl SoftDevice {
    /// The paths of connected queue pairs.
    fn paths(&self) -> Vec<(Qpn, AddressVector)> {
        let control = lock(&self.shared.control);
        let connected = control.qps.iter().filter(|(_, qp)| qp.qp_type != QpType::Ud);
        connected.filter_map(|(qpn, qp)| Some((*qpn, qp.path?.av))).collect()
    }

    /// Gives a queue pair's path other Ethernet addresses. False if there is no such queue pair any more, or its worker did
    /// not answer; the next round tries again.
    fn repath(&self, qpn: Qpn, av: AddressVector) -> bool {
        let Ok(worker) = lock(&self.shared.control).qp(qpn).map(|qp| qp.worker) else { return false };
        let (smac, dmac) = (av.smac, av.dmac);
        if self.shared.tell(worker, Command::Repath { qpn, smac, dmac }, "qp_num").is_err() {
            return false;
        }
        if let Some(path) = lock(&self.shared.control).qps.get_mut(&qpn).and_then(|qp| qp.path.as_mut()) {
            path.av = av;
        }
        true
    }
}

//! [`ShmPort`]: a link as the housekeeping thread sees it.
//!
//! Owns the state of the link: alone, meeting a peer, joined. Invariant: the queues have rings exactly while the link
//! is up, and they lead to the peer that `resolve` names. Called by housekeeping. Never touches a frame.

use std::net::IpAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::ShmConfig;
use super::hello::{Hello, mac_text};
use super::queue::{Counters, Ends, Shared, ShmQueue};
use super::rendezvous::{self, Connection, Joined, Listener, Place, Step};
use super::ring::{Consumer, Direction, Producer};
use super::sys;
use crate::port::{Caps, Fallback, Port, PortError, RxQueues};

/// After a refusal the next try waits so long.
const RETRY: Duration = Duration::from_millis(500);
/// `resolve` looks so often for a peer that is not there yet.
const LOOK_AGAIN: Duration = Duration::from_millis(2);
/// Most connections looked at in one call.
const ACCEPTS: usize = 8;

/// One side of a link between two processes.
pub struct ShmPort {
    /// Where peers meet.
    link: PathBuf,
    /// False for a port of [`pair`], which can't find another peer.
    findable: bool,
    ours: Hello,
    max_frame: usize,
    shared: Vec<Arc<Shared>>,
    taken: bool,
    listener: Option<Listener>,
    connection: Option<Connection>,
    /// Who is joined.
    peer: Option<Hello>,
    problem: Option<PortError>,
    fallback: Option<Fallback>,
    next_try: Option<Instant>,
    link_ups: u64,
    link_downs: u64,
    handshake_errors: u64,
    /// Links taken down because of nonsense in a ring, by kind (see `RingFault`).
    ring_faults: [u64; 5],
}

impl ShmPort {
    /// Opens one side of a link; the other one may come at any time.
    ///
    /// # Errors
    /// [`PortError`] naming a value that is not allowed, or why the path can't be used.
    pub fn open(config: &ShmConfig) -> Result<ShmPort, PortError> {
        let mut port = ShmPort::new(config, true)?;
        port.look_for_peer(Instant::now())?;
        port.housekeep();
        Ok(port)
    }

    fn new(config: &ShmConfig, findable: bool) -> Result<ShmPort, PortError> {
        let (geometry, max_frame) = config.check()?;
        let os = |what: &str, found: String| PortError {
            attribute: what.into(),
            asked: geometry.queues.to_string(),
            allowed: found,
            hint: "raise the limit of open files (ulimit -n)".into(),
        };
        let mac = match config.mac {
            Some(mac) => mac,
            None => random_mac().map_err(|found| os("mac", found))?,
        };
        let mut shared = Vec::new();
        for _ in 0..config.queues {
            shared.push(Arc::new(Shared::new().map_err(|errno| os("queues", errno.to_string()))?));
        }
        Ok(ShmPort {
            link: config.link.clone(),
            findable,
            ours: Hello {
                mac,
                mtu: config.mtu,
                geometry,
                sleeps: config.can_sleep,
                addresses: config.addresses.clone(),
            },
            max_frame,
            shared,
            taken: false,
            listener: None,
            connection: None,
            peer: None,
            problem: None,
            fallback: None,
            next_try: None,
            link_ups: 0,
            link_downs: 0,
            handshake_errors: 0,
            ring_faults: [0; 5],
        })
    }

    /// Listens, or connects to the side that does.
    fn look_for_peer(&mut self, now: Instant) -> Result<(), PortError> {
        match rendezvous::find_place(&self.link)? {
            Place::Listening(listener) => self.listener = Some(listener),
            Place::Connected(socket) => self.connection = Some(Connection::new(socket, false, now)),
            Place::NotYet(problem) => self.problem = Some(problem),
        }
        Ok(())
    }

    /// Takes those who connected; one peer is enough.
    fn accept(&mut self, now: Instant) {
        for _ in 0..ACCEPTS {
            let Some(socket) = self.listener.as_ref().and_then(Listener::accept) else { return };
            match &self.connection {
                None => self.connection = Some(Connection::new(socket, true, now)),
                Some(present) => {
                    let why = format!(
                        "the link joins two sides, and pid {} has {} already",
                        std::process::id(),
                        present.peer()
                    );
                    rendezvous::turn_away(&socket, &why);
                }
            }
        }
    }

    /// Carries the exchange on.
    fn meet(&mut self, now: Instant) {
        let Some(connection) = &mut self.connection else { return };
        let bells: Vec<_> = self.shared.iter().map(|shared| &shared.doorbell).collect();
        match connection.advance(&self.link, &self.ours, &bells, now) {
            Step::Waiting => {}
            Step::Joined(joined) => self.join(*joined),
            Step::Failed(problem) => {
                self.handshake_errors += 1;
                self.connection = None;
                self.problem = Some(problem);
                self.next_try = Some(now + RETRY);
            }
        }
    }

    /// Gives every queue its rings.
    fn join(&mut self, joined: Joined) {
        let Joined { peer, region, ringers, listened, fallback } = joined;
        // The listener's sizes hold.
        let geometry = if listened { self.ours.geometry } else { peer.geometry };
        let (out, back) = match listened {
            true => (Direction::FromListener, Direction::FromConnector),
            false => (Direction::FromConnector, Direction::FromListener),
        };
        let mut ends = Vec::new();
        for (queue, ringer) in (0..geometry.queues).zip(ringers) {
            let tx = Producer::new(&region, geometry, queue, out, peer.sleeps);
            let rx = Consumer::new(&region, geometry, queue, back, self.max_frame);
            ends.extend(tx.zip(rx).map(|(tx, rx)| Box::new(Ends { rx, tx, ringer })));
        }
        if ends.len() != self.shared.len() {
            // Both were checked when the memory was made or mapped.
            debug_assert!(false, "{} of {} queues have rings", ends.len(), self.shared.len());
            self.disconnect("the memory does not fit the rings".into());
            return;
        }
        for (shared, ends) in self.shared.iter().zip(ends) {
            shared.deliver(Some(ends));
        }
        self.link_ups += 1;
        self.peer = Some(peer);
        self.problem = None;
        self.fallback = fallback;
    }

    /// Takes the link down.
    fn disconnect(&mut self, why: String) {
        if self.peer.take().is_some() {
            self.link_downs += 1;
            for shared in &self.shared {
                shared.deliver(None);
            }
        }
        self.connection = None;
        self.problem = Some(PortError {
            attribute: "link".into(),
            asked: self.link.display().to_string(),
            allowed: why,
            hint: "start the other side".into(),
        });
    }

    /// Looks whether the peer is gone or broke the rules.
    fn watch(&mut self, now: Instant) {
        let Some(connection) = &self.connection else { return };
        let who = connection.peer();
        if let Some(fault) = self.shared.iter().find_map(|shared| shared.fault()) {
            if let Some(count) = self.ring_faults.get_mut(usize::from(fault)) {
                *count += 1;
            }
            self.disconnect(format!("{who} wrote nonsense into a ring (kind {fault})"));
            self.next_try = Some(now + RETRY);
        } else if !connection.alive() {
            self.disconnect(format!("{who} is gone"));
        }
    }

    fn sum(&self, counter: impl Fn(&Counters) -> &AtomicU64) -> u64 {
        self.shared.iter().map(|shared| counter(&shared.counters).load(Ordering::Relaxed)).sum()
    }

    /// Why `dst` can't be reached, or its Ethernet address.
    fn find(&self, dst: IpAddr) -> Result<[u8; 6], PortError> {
        let refuse = |allowed: String, hint: &str| {
            let asked = format!("the Ethernet address of {dst}");
            Err(PortError { attribute: "link".into(), asked, allowed, hint: hint.into() })
        };
        let list = |addresses: &[(IpAddr, u8)]| {
            let texts: Vec<String> = addresses.iter().map(|(ip, _)| ip.to_string()).collect();
            if texts.is_empty() { "no address".into() } else { texts.join(", ") }
        };
        match &self.peer {
            Some(peer) if peer.addresses.iter().any(|(ip, _)| *ip == dst) => Ok(peer.mac),
            _ if self.ours.addresses.iter().any(|(ip, _)| *ip == dst) => {
                refuse("a peer's address; this one is our own".into(), "")
            }
            Some(peer) => {
                let found = format!("{} (the peer {})", list(&peer.addresses), mac_text(peer.mac));
                refuse(found, "a shm link leads to its peer only: add the address there")
            }
            None => {
                let why = self.problem.as_ref().map(|problem| format!(": {}", problem.allowed));
                let link = self.link.display();
                refuse(format!("none: no peer at {link}{}", why.unwrap_or_default()), "start the other side")
            }
        }
    }
}

impl Port for ShmPort {
    type Queue = ShmQueue;

    fn caps(&self) -> Caps {
        Caps {
            kind: "shm",
            queues: self.ours.geometry.queues,
            rx_queues: RxQueues {
                owned: self.ours.geometry.queues.into(),
                present: self.ours.geometry.queues.into(),
            },
            mtu: self.ours.mtu,
            mac: self.ours.mac,
            scatter_rx: false,
            steering: false,
            timestamps: false,
            can_sleep: self.ours.sleeps,
            untrusted_peer: true,
            mode: "shared memory".into(),
        }
    }

    fn fallbacks(&self) -> Vec<Fallback> {
        self.fallback.iter().cloned().collect()
    }

    fn take_queues(&mut self) -> Vec<ShmQueue> {
        if std::mem::replace(&mut self.taken, true) {
            return Vec::new();
        }
        let queue = |shared: &Arc<Shared>| ShmQueue::new(shared.clone(), self.max_frame, self.ours.sleeps);
        self.shared.iter().map(queue).collect()
    }

    fn link_up(&self) -> bool {
        self.peer.is_some()
    }

    fn housekeep(&mut self) {
        let now = Instant::now();
        self.shared.iter().for_each(|shared| shared.reap());
        if self.peer.is_some() {
            self.watch(now);
        }
        self.accept(now);
        let may_try = self.next_try.is_none_or(|at| at <= now);
        if self.connection.is_none() && self.listener.is_none() && self.findable && may_try {
            self.next_try = None;
            if let Err(problem) = self.look_for_peer(now) {
                self.problem = Some(problem);
                self.next_try = Some(now + RETRY);
            }
            // Others may have been waiting for us to listen.
            self.accept(now);
        }
        if self.peer.is_none() {
            self.meet(now);
        }
    }

    fn problem(&self) -> Option<PortError> {
        self.problem.clone()
    }

    fn housekeep_fds(&self) -> Vec<BorrowedFd<'_>> {
        let listener = self.listener.iter().map(Listener::fd);
        listener.chain(self.connection.iter().map(Connection::fd)).collect()
    }

    fn addresses(&self) -> Vec<(IpAddr, u8)> {
        self.ours.addresses.clone()
    }

    fn resolve(&mut self, _src: IpAddr, dst: IpAddr, deadline: Instant) -> Result<[u8; 6], PortError> {
        loop {
            let found = self.find(dst);
            let now = Instant::now();
            if found.is_ok() || self.peer.is_some() || now >= deadline {
                return found;
            }
            std::thread::sleep(LOOK_AGAIN.min(deadline - now));
            self.housekeep();
        }
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("rx_good_packets", self.sum(|c| &c.rx_packets)),
            ("rx_good_bytes", self.sum(|c| &c.rx_bytes)),
            ("tx_good_packets", self.sum(|c| &c.tx_packets)),
            ("tx_good_bytes", self.sum(|c| &c.tx_bytes)),
            ("tx_errors", self.sum(|c| &c.tx_errors)),
            ("tx_no_peer_dropped", self.sum(|c| &c.tx_no_peer)),
            ("tx_ring_full", self.sum(|c| &c.tx_full)),
            ("tx_wakeups", self.sum(|c| &c.tx_wakeups)),
            ("tx_wakeup_errors", self.sum(|c| &c.tx_wakeup_errors)),
            ("link_ups", self.link_ups),
            ("link_downs", self.link_downs),
            ("link_handshake_errors", self.handshake_errors),
            ("rx_ring_bad_words", self.ring_faults[1]),
            ("rx_ring_bad_lengths", self.ring_faults[2]),
            ("rx_ring_past_ends", self.ring_faults[3]),
            ("tx_ring_bad_positions", self.ring_faults[4]),
        ]
    }
}

impl Drop for ShmPort {
    fn drop(&mut self) {
        // Queues that outlive the port must not write to a peer that is told of our end.
        self.disconnect("closed".into());
    }
}

/// A random address: unicast, locally administered.
fn random_mac() -> Result<[u8; 6], String> {
    let secret = ferroce_mem::os::random_secret().map_err(|error| error.to_string())?;
    let [_, _, a, b, c, d, e, f] = secret.to_be_bytes();
    Ok([(a & 0xfc) | 2, b, c, d, e, f])
}

/// Two joined ports in this process, for tests and tools. Their `link` paths are names only.
///
/// # Errors
/// [`PortError`] as for [`ShmPort::open`], or naming what the two do not agree on.
pub fn pair(a: &ShmConfig, b: &ShmConfig) -> Result<(ShmPort, ShmPort), PortError> {
    let (mut a, mut b) = (ShmPort::new(a, false)?, ShmPort::new(b, false)?);
    let sockets: Result<(OwnedFd, OwnedFd), _> = sys::pair();
    let (listens, connects) = sockets.map_err(|errno| PortError {
        attribute: "link".into(),
        asked: "a pair of sockets".into(),
        allowed: errno.to_string(),
        hint: "raise the limit of open files (ulimit -n)".into(),
    })?;
    let now = Instant::now();
    a.connection = Some(Connection::new(listens, true, now));
    b.connection = Some(Connection::new(connects, false, now));
    // Hello, hello with memory, ready: each side acts twice.
    for _ in 0..2 {
        b.housekeep();
        a.housekeep();
    }
    match (a.link_up(), b.link_up()) {
        (true, true) => Ok((a, b)),
        _ => Err(a.problem.take().or(b.problem.take()).unwrap_or_else(|| PortError {
            attribute: "link".into(),
            asked: "a pair".into(),
            allowed: "no answer".into(),
            hint: String::new(),
        })),
    }
}

#[cfg(test)]
mod tests;

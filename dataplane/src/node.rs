//! [`Node`]: a running appliance as its housekeeping thread sees it.
//!
//! Owns the engine, the port, the arena, the objects of control and the tests. Invariant: everything here belongs to
//! the one housekeeping thread; workers share nothing with it but the engine's mailboxes and counters. Made by
//! [`crate::assemble`], used by the control server, taken apart by `main`.

use std::time::{Duration, Instant};

use ferroce_api::ApiError;
use ferroce_api::appliance::{CqHandle, EventBody, Fallback, Lkey, PerfId, PerfReport, PerfSpec};
use ferroce_api::config::{IdlePolicy, LimitsConfig};
use ferroce_engine::follow::Follower;
use ferroce_engine::housekeeping::{self, netdev_of};
use ferroce_engine::{Engine, EngineError, EngineEvent, EngineEventKind, SoftDevice};
use ferroce_mem::os::{Arena, ArenaReport};
use ferroce_nic::{AnyPort, Port};
use ferroce_services::AnyService;
use ferroce_verbs::{AsyncEvent, Gid, Qpn};

use crate::ctl::socket::Lock;
use crate::objects::Objects;
use crate::perf::Tests;

/// Events taken from the engine in one round.
const EVENTS_PER_ROUND: usize = 1024;
/// Time between two rounds of housekeeping.
const TICK: Duration = Duration::from_millis(100);
/// The same while tests run, whose end somebody waits for.
const BUSY_TICK: Duration = Duration::from_millis(20);

/// What is known of the appliance from its start.
#[derive(Debug)]
pub struct Identity {
    /// Name of the device.
    pub name: String,
    /// EUI-64 of the node.
    pub node_guid: u64,
    /// Random number of this run.
    pub instance: u64,
    /// When it started.
    pub started: Instant,
    /// What the port is attached to: a link's or an interface's name.
    pub attached_to: String,
    /// Idle policies of the workers.
    pub idle: Vec<IdlePolicy>,
    /// Fallbacks of the appliance itself.
    pub fallbacks: Vec<Fallback>,
}

/// A running appliance.
pub struct Node {
    /// What is known from the start.
    pub identity: Identity,
    /// Limits that the daemon enforces.
    pub limits: LimitsConfig,
    /// The port. Shared with nobody: workers have its queues.
    pub port: AnyPort,
    /// Memory for regions.
    pub arena: Arena,
    /// What the arena got.
    pub arena_report: ArenaReport,
    /// Objects of control.
    pub objects: Objects,
    /// Tests.
    pub tests: Tests,
    engine: Engine<AnyService>,
    device: SoftDevice,
    follower: Follower,
    gids: Vec<Gid>,
    /// What was last said to be wrong with the port.
    problem: Option<String>,
    // Link, addresses and cores: given back last.
    _claims: Vec<Lock>,
}

impl Node {
    /// Puts the parts together.
    pub fn new(
        identity: Identity,
        limits: LimitsConfig,
        port: AnyPort,
        (arena, arena_report): (Arena, ArenaReport),
        engine: Engine<AnyService>,
        claims: Vec<Lock>,
    ) -> Self {
        let device = engine.device();
        let gids = netdev_of(&port).1;
        let (objects, tests) = (Objects::default(), Tests::default());
        Node {
            identity,
            limits,
            port,
            arena,
            arena_report,
            objects,
            tests,
            engine,
            device,
            follower: Follower::default(),
            gids,
            problem: None,
            _claims: claims,
        }
    }

    /// Name of the device.
    pub fn name(&self) -> &str {
        &self.identity.name
    }
    /// Random number of this run.
    pub const fn instance(&self) -> u64 {
        self.identity.instance
    }
    /// Number of workers.
    pub fn workers(&self) -> u8 {
        u8::try_from(self.identity.idle.len()).unwrap_or(u8::MAX)
    }
    /// The device: a handle, cheap to make.
    pub fn device(&self) -> SoftDevice {
        self.device.clone()
    }
    /// When housekeeping should come round again.
    pub fn tick(&self) -> Duration {
        if self.tests.running() > 0 { BUSY_TICK } else { TICK }
    }

    /// Starts a test.
    pub fn start_test(&mut self, spec: &PerfSpec) -> Result<PerfId, ApiError> {
        self.tests.start(spec, &self.objects, &self.device, &self.engine)
    }

    /// Stops a test.
    pub fn stop_test(&mut self, id: PerfId) -> Result<PerfReport, ApiError> {
        self.tests.stop(id, &self.device, &self.engine)
    }

    /// Stops and forgets the tests that use a region.
    pub fn stop_tests_on(&mut self, lkey: Lkey) -> Result<(), ApiError> {
        for id in self.tests.all_on(lkey) {
            self.tests.stop(id, &self.device, &self.engine)?;
        }
        Ok(())
    }

    /// Our address for a peer: the first one of a network that the peer is in, else the first of its family.
    pub fn source_for(&self, dgid: Gid, gids: &[Gid]) -> Option<Gid> {
        let peer = dgid.to_ip();
        let near = self.port.addresses().into_iter().find(|(ip, prefix)| same_network(*ip, peer, *prefix));
        let near = near.map(|(ip, _)| Gid::from_ip(ip)).filter(|gid| gids.contains(gid));
        near.or_else(|| gids.iter().copied().find(|gid| gid.is_ipv4() == dgid.is_ipv4()))
    }

    /// Looks after port, tests and events; returns what subscribers should know.
    pub fn housekeep(&mut self) -> Vec<EventBody> {
        if let Err(error) = housekeeping::round(&mut self.port, &self.device, &mut self.follower) {
            tracing::warn!(%error, "a worker did not take the news of the network device");
        }
        self.log_problem();
        let (_, gids) = netdev_of(&self.port);
        let mut out = Vec::new();
        for _ in 0..EVENTS_PER_ROUND {
            let Some(event) = self.engine.next_event() else { break };
            out.extend(self.translate(&event));
        }
        if gids != self.gids {
            let added = gids
                .iter()
                .filter(|gid| !self.gids.contains(gid))
                .map(|gid| EventBody::GidAdded { gid: *gid });
            let gone = self
                .gids
                .iter()
                .filter(|gid| !gids.contains(gid))
                .map(|gid| EventBody::GidRemoved { gid: *gid });
            out.extend(added.chain(gone));
            self.gids = gids;
        }
        out.extend(self.tests.sweep(&self.engine).into_iter().map(|id| EventBody::PerfEnded { id }));
        out
    }

    /// Says what is wrong with the port, once each time it changes.
    fn log_problem(&mut self) {
        let problem = self.port.problem().map(|problem| problem.to_string());
        if problem != self.problem {
            if let Some(problem) = &problem {
                tracing::warn!(problem, "port");
            }
            self.problem = problem;
        }
    }

    fn translate(&self, event: &EngineEvent) -> Option<EventBody> {
        let kind = match event.kind {
            EngineEventKind::Async(kind) => kind,
            EngineEventKind::Mtu { netdev_mtu, too_long } => {
                tracing::warn!(%event, "port");
                let port = crate::ctl::PORT;
                return Some(EventBody::PortMtu { port, mtu: netdev_mtu, qps_too_long: too_long });
            }
            EngineEventKind::Completion(_) => return None,
        };
        let detail = || event.detail.map_or_else(String::new, |detail| detail.to_string());
        let cookie = |qpn: Qpn| self.objects.qps.get(&qpn).map_or(0, |qp| qp.cookie);
        let port = crate::ctl::PORT;
        let body = match kind {
            AsyncEvent::QpFatal(qpn) => EventBody::QpFatal { qpn, cookie: cookie(qpn), detail: detail() },
            AsyncEvent::QpReqErr(qpn) => EventBody::QpReqErr { qpn, cookie: cookie(qpn), detail: detail() },
            AsyncEvent::QpAccessErr(qpn) => {
                EventBody::QpAccessErr { qpn, cookie: cookie(qpn), detail: detail() }
            }
            AsyncEvent::CommEst(qpn) => EventBody::CommEst { qpn, cookie: cookie(qpn) },
            AsyncEvent::SqDrained(qpn) => EventBody::SqDrained { qpn, cookie: cookie(qpn) },
            AsyncEvent::CqErr(cq) => EventBody::CqErr { cq: CqHandle(cq.0) },
            AsyncEvent::PortActive => EventBody::PortActive { port },
            AsyncEvent::PortErr => EventBody::PortErr { port },
            // Told one by one, with the addresses, by whoever compares the tables.
            AsyncEvent::GidChange => return None,
            // The control interface makes nothing that could raise these.
            AsyncEvent::SrqErr(_)
            | AsyncEvent::SrqLimitReached(_)
            | AsyncEvent::QpLastWqeReached(_)
            | AsyncEvent::DeviceFatal => return None,
        };
        match kind {
            AsyncEvent::QpFatal(_)
            | AsyncEvent::QpReqErr(_)
            | AsyncEvent::QpAccessErr(_)
            | AsyncEvent::CqErr(_) => {
                tracing::warn!(%event, "a queue went to error");
            }
            AsyncEvent::PortActive | AsyncEvent::PortErr => tracing::info!(%event, "link"),
            AsyncEvent::CommEst(_)
            | AsyncEvent::SqDrained(_)
            | AsyncEvent::GidChange
            | AsyncEvent::SrqErr(_)
            | AsyncEvent::SrqLimitReached(_)
            | AsyncEvent::QpLastWqeReached(_)
            | AsyncEvent::DeviceFatal => {
                tracing::debug!(%event)
            }
        }
        Some(body)
    }

    /// Stops the tests and the workers, then gives the port back.
    ///
    /// # Errors
    /// A worker that does not stop in time, by name.
    pub fn stop(mut self, deadline: Duration) -> Result<(), EngineError> {
        self.tests.stop_all();
        let outcome = self.engine.stop(deadline);
        // What the workers captured last goes to the file.
        self.port.housekeep();
        outcome
    }
}

fn same_network(ours: std::net::IpAddr, peer: std::net::IpAddr, prefix: u8) -> bool {
    let (Gid(a), Gid(b)) = (Gid::from_ip(ours), Gid::from_ip(peer));
    if ours.is_ipv4() != peer.is_ipv4() {
        return false;
    }
    let bits = u32::from(prefix) + if ours.is_ipv4() { 96 } else { 0 };
    let differ = u128::from_be_bytes(a) ^ u128::from_be_bytes(b);
    differ.leading_zeros() >= bits.min(128)
}

#[cfg(test)]
mod tests {
    use super::same_network;

    #[test]
    fn networks() {
        let cases = [
            ("192.0.2.1", "192.0.2.200", 24, true),
            ("192.0.2.1", "192.0.3.1", 24, false),
            ("192.0.2.1", "192.0.3.1", 23, true),
            ("192.0.2.1", "192.0.2.1", 32, true),
            ("fd00::1", "fd00::2", 64, true),
            ("fd00::1", "fd00:0:0:1::2", 64, false),
            ("192.0.2.1", "fd00::2", 1, false),
        ];
        for (a, b, prefix, expected) in cases {
            assert_eq!(
                same_network(a.parse().unwrap(), b.parse().unwrap(), prefix),
                expected,
                "{a} {b}/{prefix}"
            );
        }
    }
}

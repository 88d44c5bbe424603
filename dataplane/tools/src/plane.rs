//! The data plane inside a tool: a port, an engine with one worker, housekeeping.
//!
//! Owns them for the time of one run and stops them in order. Called from the tool's main thread only. Never touches a
//! frame.

mod fault;
mod open;
mod options;
mod set;

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ferroce_engine::housekeeping::{Housekeeper, netdev_of};
use ferroce_engine::{Engine, EngineConfig, IcrcMode, PathRequest, SoftDevice, WorkerConfig, address_vector};
use ferroce_mem::os::{Arena, ArenaConfig, ArenaReport, Block, PagePolicy};
use ferroce_nic::{AnyPort, Fallback, Port, PortError, RxQueues};
use ferroce_services::{AnyService, Role};
use ferroce_verbs::{
    Access, AddressVector, CqId, Device, Gid, MrKeys, PathMtu, PdId, QpCap, QpInitAttr, QpType, Qpn,
    VerbsError,
};

use crate::fail::{Fail, Outcome};
pub use options::{Idle, PlaneArgs};
pub use set::{QpSet, SetSizes};

/// How often housekeeping looks: often enough that a link comes up at once.
const HOUSEKEEPING: Duration = Duration::from_millis(20);
/// How long the other side of a link may take to appear.
const LINK_LIMIT: Duration = Duration::from_secs(10);
/// How long the next hop may take to be resolved.
const RESOLVE_LIMIT: Duration = Duration::from_secs(5);
/// How long workers may take to stop.
const STOP_LIMIT: Duration = Duration::from_secs(5);
/// Smallest arena.
const LEAST_ARENA: u64 = 2 << 20;
/// Queue pairs that a tool may make.
const MOST_QPS: u32 = 4096;

/// A running data plane.
pub struct Plane {
    engine: Option<Engine<AnyService>>,
    device: SoftDevice,
    housekeeper: Option<Housekeeper>,
    port: Arc<Mutex<AnyPort>>,
    pages: PagePolicy,
    core: Option<usize>,
    idle: Idle,
    dev: String,
    fallbacks: Vec<Fallback>,
    faults: Option<String>,
}

/// One queue pair with all it needs, made and destroyed together.
pub struct Pair {
    /// Protection domain.
    pub pd: PdId,
    /// Completions of sends.
    pub send_cq: CqId,
    /// Completions of receives.
    pub recv_cq: CqId,
    /// The queue pair.
    pub qpn: Qpn,
    /// Memory and its keys.
    pub memory: Arc<Block>,
    /// As above.
    pub keys: MrKeys,
}

/// Sizes of a [`Pair`].
#[derive(Clone, Copy, Debug)]
pub struct PairSizes {
    /// Send work requests outstanding.
    pub sends: u32,
    /// Receives outstanding.
    pub receives: u32,
    /// Inline bytes.
    pub inline: u32,
    /// Memory.
    pub bytes: u64,
}

pub(super) fn refused(error: PortError) -> Fail {
    Fail::failed(error.to_string())
}

fn verbs(what: &str) -> impl Fn(VerbsError) -> Fail + '_ {
    move |error| Fail::failed(format!("{what}: {error}"))
}

impl Plane {
    /// Opens the port and starts the worker.
    pub fn open(args: &PlaneArgs, role: Role) -> Outcome<Plane> {
        open::open(args, role)
    }

    /// Starts an engine on an opened port.
    fn assemble(mut port: AnyPort, args: &PlaneArgs, role: Role, dev: String) -> Outcome<Plane> {
        let core = args.core_for(role)?;
        let queues = port.take_queues();
        let (netdev, gids) = netdev_of(&port);
        let config = EngineConfig {
            name: "ferroce".into(),
            node_guid: node_guid(netdev.mac.0),
            workers: vec![WorkerConfig { core, idle: args.idle.policy() }],
            max_qp: MOST_QPS,
            max_cq: 128,
            max_mr: 64,
            netdev,
            gids,
            icrc: IcrcMode::On,
        };
        let engine = Engine::start(config, queues).map_err(|e| Fail::failed(e.to_string()))?;
        let device = engine.device();
        let port = Arc::new(Mutex::new(port));
        let housekeeper = Housekeeper::start(port.clone(), device.clone(), HOUSEKEEPING)
            .map_err(|e| Fail::failed(format!("housekeeping thread: {e}")))?;
        Ok(Plane {
            engine: Some(engine),
            device,
            housekeeper: Some(housekeeper),
            port,
            pages: args.pages,
            core,
            idle: args.idle,
            dev,
            fallbacks: Vec::new(),
            faults: args.fault.as_ref().map(|f| f.text.clone()),
        })
    }

    fn port(&self) -> MutexGuard<'_, AnyPort> {
        self.port.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Verbs' control side.
    pub fn device(&self) -> &SoftDevice {
        &self.device
    }

    /// The device in words: `shm:/tmp/...`.
    pub fn dev(&self) -> &str {
        &self.dev
    }

    /// The worker's core, if it is pinned.
    pub fn core(&self) -> Option<usize> {
        self.core
    }

    /// True if the port goes on when the peer's process ends; a link of two processes does not.
    pub fn outlives_peers(&self) -> bool {
        !self.dev.starts_with("shm:")
    }

    /// The idle policy.
    pub fn idle(&self) -> Idle {
        self.idle
    }

    /// The port in words: its mode, and of an interface its receive queues and the MTU in force.
    pub fn mode(&self) -> String {
        let caps = self.port().caps();
        if caps.kind != "xdp" {
            return caps.mode;
        }
        let RxQueues { owned, present } = caps.rx_queues;
        format!("{}, {owned} of {present} receive queues, MTU {}", caps.mode, caps.mtu)
    }

    /// Faults on purpose, as asked for.
    pub fn faults(&self) -> Option<&str> {
        self.faults.as_deref()
    }

    /// Name of the clock that the worker reads.
    pub fn clock(&self) -> &'static str {
        self.device.stats().clock
    }

    /// Every fallback in force: of the port and of memory.
    pub fn fallbacks(&self) -> Vec<Fallback> {
        let mut all = self.port().fallbacks();
        all.extend(self.fallbacks.iter().cloned());
        all
    }

    /// The port's counters.
    pub fn port_counters(&self) -> Vec<(&'static str, u64)> {
        self.port().counters()
    }

    /// The engine's counters that are not 0, drops with `drop_` before their names.
    pub fn engine_counters(&self) -> Vec<(String, u64)> {
        let stats = self.device.stats();
        let mut all: Vec<(String, u64)> = Vec::new();
        for worker in &stats.workers {
            let counters = worker.counters.iter().map(|(name, value)| ((*name).to_string(), *value));
            let drops = worker.drops.iter().map(|(name, value)| (format!("drop_{name}"), *value));
            all.extend(counters.chain(drops).filter(|(_, value)| *value > 0));
        }
        all
    }

    /// Waits until the link is up.
    pub fn wait_for_link(&self) -> Outcome<()> {
        let deadline = Instant::now() + LINK_LIMIT;
        while !self.port().link_up() {
            if Instant::now() >= deadline {
                let seconds = LINK_LIMIT.as_secs();
                let why = match self.port().problem() {
                    Some(problem) => problem.to_string(),
                    None => {
                        "for shm give both sides the same --dev shm:PATH; for xdp look at `ip link`".into()
                    }
                };
                return Err(Fail::failed(format!("{}: no link within {seconds} s: {why}", self.dev)));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Our GID: by index, or the first routable address of the family that `like` has.
    pub fn gid(&self, index: Option<usize>, like: Option<IpAddr>) -> Outcome<Gid> {
        let gids = self.device.query_gids(1).map_err(verbs("gid"))?;
        let list =
            || gids.iter().enumerate().map(|(i, g)| format!("{i}: {g}")).collect::<Vec<_>>().join(", ");
        if let Some(index) = index {
            return gids.get(index).copied().ok_or_else(|| {
                Fail::usage(format!(
                    "gid index: asked {index}, allowed {}",
                    if gids.is_empty() { "none".into() } else { list() }
                ))
            });
        }
        let family = |gid: &&Gid| like.is_none_or(|ip| ip.is_ipv4() == gid.is_ipv4());
        let routable = |gid: &&Gid| match gid.to_ip() {
            IpAddr::V4(v4) => !v4.is_link_local(),
            IpAddr::V6(v6) => v6.segments()[0] & 0xffc0 != 0xfe80,
        };
        let mut fitting = gids.iter().filter(family);
        fitting.clone().find(routable).or_else(|| fitting.next()).copied().ok_or_else(|| {
            Fail::failed(format!(
                "{}: no fitting address (it has: {}); give it one, or choose with the GID index",
                self.dev,
                list()
            ))
        })
    }

    /// Index of one of our GIDs, given as text.
    pub fn index_of(&self, gid: &str) -> Option<usize> {
        self.device.query_gids(1).ok()?.iter().position(|own| own.to_string() == gid)
    }

    /// The path MTU to use: the one asked for if the interface carries it, else the largest.
    pub fn path_mtu(&self, asked: Option<PathMtu>) -> Outcome<PathMtu> {
        let port = self.device.query_port(1).map_err(verbs("port"))?;
        match asked {
            None => Ok(port.active_mtu),
            Some(mtu) if mtu <= port.active_mtu => Ok(mtu),
            Some(mtu) => Err(Fail::usage(format!(
                "path MTU: asked {}, but {} has an MTU of {} bytes: largest {}",
                mtu.bytes(),
                self.dev,
                port.netdev_mtu,
                port.active_mtu.bytes()
            ))),
        }
    }

    /// Memory of its own for a test. States a fallback of its pages once.
    pub fn block(&mut self, bytes: u64) -> Outcome<Arc<Block>> {
        let config = ArenaConfig { bytes: bytes.max(LEAST_ARENA), pages: self.pages, numa_node: None };
        let (arena, report) = Arena::new(config).map_err(|e| Fail::failed(e.to_string()))?;
        self.note_pages(&report);
        let bytes = usize::try_from(bytes).map_err(|_| Fail::failed("memory: too large for this machine"))?;
        Ok(Arc::new(arena.alloc(bytes, 4096).map_err(|e| Fail::failed(e.to_string()))?))
    }

    fn note_pages(&mut self, report: &ArenaReport) {
        if let Some(reason) = &report.fallback {
            let fallback = Fallback {
                wanted: "hugepages".into(),
                got: report.page_kind.to_string(),
                reason: reason.clone(),
                hint: String::new(),
            };
            if !self.fallbacks.contains(&fallback) {
                self.fallbacks.push(fallback);
            }
        }
    }

    /// Makes a queue pair in RESET with two completion queues and registered memory.
    pub fn make_pair_of(&mut self, qp_type: QpType, sizes: PairSizes) -> Outcome<Pair> {
        let memory = self.block(sizes.bytes)?;
        let device = &self.device;
        let pd = device.alloc_pd().map_err(verbs("protection domain"))?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let keys = device.reg_mr(pd, Arc::clone(&memory), access).map_err(verbs("memory"))?;
        let send_cq = device.create_cq(0, sizes.sends).map_err(verbs("completion queue"))?;
        let recv_cq = device.create_cq(0, sizes.receives).map_err(verbs("completion queue"))?;
        let cap = QpCap {
            max_send_wr: sizes.sends,
            max_recv_wr: sizes.receives,
            max_inline_data: sizes.inline,
            ..QpCap::default()
        };
        let attr = QpInitAttr { qp_type, pd, send_cq, recv_cq, cap, sq_sig_all: false, srq: None };
        let qpn = device.create_qp(&attr).map_err(verbs("queue pair"))?;
        Ok(Pair { pd, send_cq, recv_cq, qpn, memory, keys })
    }

    /// Destroys a pair.
    pub fn destroy_pair(&self, pair: &Pair) -> Outcome<()> {
        let device = &self.device;
        device.destroy_qp(pair.qpn).map_err(verbs("queue pair"))?;
        device.destroy_cq(pair.send_cq).map_err(verbs("completion queue"))?;
        device.destroy_cq(pair.recv_cq).map_err(verbs("completion queue"))?;
        device.dereg_mr(pair.keys.lkey).map_err(verbs("memory"))?;
        device.dealloc_pd(pair.pd).map_err(verbs("protection domain"))
    }

    /// Resolves a path.
    pub fn path(&self, request: &PathRequest) -> Outcome<AddressVector> {
        address_vector(&mut *self.port(), request, Instant::now() + RESOLVE_LIMIT).map_err(refused)
    }

    /// Puts a service on the worker.
    pub fn add_service(&self, service: impl Into<AnyService>) -> Outcome<ferroce_engine::ServiceId> {
        let engine = self.engine.as_ref().ok_or_else(|| Fail::failed("the data plane is stopped"))?;
        engine.add_service(0, service.into()).map_err(verbs("service"))
    }

    /// Takes a service off the worker.
    pub fn remove_service(&self, id: ferroce_engine::ServiceId) -> Outcome<()> {
        let engine = self.engine.as_ref().ok_or_else(|| Fail::failed("the data plane is stopped"))?;
        engine.remove_service(id).map(drop).map_err(verbs("service"))
    }

    /// What the device told since the last look, newest last.
    pub fn events(&self) -> Vec<ferroce_engine::EngineEvent> {
        std::iter::from_fn(|| self.device.next_event()).take(64).collect()
    }

    /// Stops worker and housekeeping.
    pub fn stop(&mut self) -> Outcome<()> {
        let told = |e: ferroce_engine::EngineError| Fail::failed(e.to_string());
        if let Some(housekeeper) = self.housekeeper.take() {
            housekeeper.stop(STOP_LIMIT).map_err(told)?;
        }
        if let Some(engine) = self.engine.take() {
            engine.stop(STOP_LIMIT).map_err(told)?;
            // What the worker captured last.
            self.port().housekeep();
        }
        let missed = self.port_counters().into_iter().find(|(name, _)| *name == "pcap_missed");
        match (self.port().problem(), missed) {
            (Some(problem), _) if problem.attribute == "capture" => Err(refused(problem)),
            (_, Some((_, missed))) if missed > 0 => Err(Fail::failed(format!(
                "capture: {missed} frames are missing, the file could not be written so fast"
            ))),
            _ => Ok(()),
        }
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        // Stopped already in the good case; a failure on the way out was told already.
        let _ = self.stop();
    }
}

/// EUI-64 of an Ethernet address.
fn node_guid(mac: [u8; 6]) -> u64 {
    let [a, b, c, d, e, f] = mac;
    u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

/// A random first PSN.
pub fn random_psn() -> Outcome<ferroce_verbs::Psn> {
    let secret = ferroce_mem::os::random_secret().map_err(|e| Fail::failed(e.to_string()))?;
    Ok(ferroce_verbs::Psn::new(secret as u32))
}

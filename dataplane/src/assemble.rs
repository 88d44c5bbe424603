//! From a configuration to a running appliance: claims, arena, port, workers.
//!
//! The only place that names backends. Invariant: what is refused is refused before any worker runs, and leaves nothing
//! behind. Every fallback that is taken is logged here once, in a line that says how to change it, and kept for
//! `ferroce status`. Called once by `main`.

use std::path::Path;
use std::time::{Duration, Instant};

use ferroce_api::appliance::Fallback;
use ferroce_api::config::{
    ApplianceConfig, CoreChoice, FaultConfig, FaultDirection, IcrcSetting, IdlePolicy, MemoryConfig,
    PagePolicy, PortConfig, WireConfig, XdpMode, ZeroCopy,
};
use ferroce_api::{ApiError, Code};
use ferroce_engine::housekeeping::netdev_of;
use ferroce_engine::{Engine, EngineConfig, EngineError, IcrcMode, WorkerConfig, pin};
use ferroce_mem::os::{self, Arena, ArenaConfig, ArenaReport};
use ferroce_nic::shm::{ShmConfig, ShmPort};
use ferroce_nic::wrap::fault;
use ferroce_nic::xdp::{self, XdpConfig, XdpPort};
use ferroce_nic::{AnyPort, Options, Port, PortError};

use crate::ctl::socket::{Lock, io_error};
use crate::node::{Identity, Node};

/// Builds everything and starts the workers.
///
/// # Errors
/// Names what could not be had: memory, link, address, interface, core.
pub fn assemble(config: &ApplianceConfig, started: Instant) -> Result<Node, ApiError> {
    let mut claims = Vec::new();
    require_pinnable(config)?;
    let (arena, report) = make_arena(config.memory)?;
    let (mut port, attached_to) = open_port(config, &arena, &mut claims)?;
    let mut fallbacks = Vec::new();
    let workers = choose_cores(config, &mut claims, &mut fallbacks)?;
    fallbacks.iter().for_each(warn_of);
    port.fallbacks().into_iter().map(crate::status::fallback).for_each(|fallback| warn_of(&fallback));

    let (netdev, gids) = netdev_of(&port);
    let node_guid = config.node_guid.unwrap_or_else(|| eui64(netdev.mac.0));
    let engine = EngineConfig {
        name: config.name.to_string(),
        node_guid,
        workers,
        max_qp: config.limits.max_qp,
        max_cq: config.limits.max_cq,
        max_mr: config.limits.max_mr,
        netdev,
        gids,
        icrc: match config.icrc {
            IcrcSetting::On => IcrcMode::On,
            IcrcSetting::Off => IcrcMode::Off,
        },
    };
    if config.icrc == IcrcSetting::Off {
        tracing::warn!("diagnosis.icrc is off: frames are not protected; every status says so");
    }
    let engine = Engine::start(engine, port.take_queues()).map_err(engine_error)?;
    let caps = port.caps();
    tracing::info!(
        kind = caps.kind,
        on = attached_to,
        mode = caps.mode,
        mtu = caps.mtu,
        queues = caps.queues,
        "port"
    );
    let identity = Identity {
        name: config.name.to_string(),
        node_guid,
        instance: os::random_secret().map_err(arena_error)?,
        started,
        attached_to,
        idle: config.workers.iter().map(|worker| worker.idle).collect(),
        fallbacks,
    };
    Ok(Node::new(identity, config.limits, port, (arena, report), engine, claims))
}

fn warn_of(fallback: &Fallback) {
    let Fallback { wanted, got, reason, hint } = fallback;
    tracing::warn!(wanted, got, reason, hint, "fallback");
}

fn make_arena(memory: MemoryConfig) -> Result<(Arena, ArenaReport), ApiError> {
    let pages = match memory.pages {
        PagePolicy::Auto => os::PagePolicy::Auto,
        PagePolicy::Huge2M => os::PagePolicy::Huge2M,
        PagePolicy::Huge1G => os::PagePolicy::Huge1G,
        PagePolicy::Thp => os::PagePolicy::Thp,
        PagePolicy::Normal => os::PagePolicy::Normal,
    };
    let (arena, report) =
        Arena::new(ArenaConfig { bytes: memory.bytes, pages, numa_node: None }).map_err(arena_error)?;
    tracing::info!(bytes = report.bytes, pages = %report.page_kind, "memory");
    if let Some(reason) = &report.fallback {
        tracing::warn!(wanted = "hugepages", got = %report.page_kind, reason, "fallback");
    }
    Ok((arena, report))
}

/// Opens the port; what it is attached to comes back in words.
fn open_port(
    config: &ApplianceConfig,
    arena: &Arena,
    claims: &mut Vec<Lock>,
) -> Result<(AnyPort, String), ApiError> {
    let options =
        Options { fault: config.port.fault.as_ref().map(to_fault), pcap: config.port.capture.clone() };
    match &config.port.wire {
        WireConfig::Shm { link, mac } => {
            claim_addresses(&config.run_dir, link.as_str(), &config.port, claims)?;
            claim_link(&config.run_dir, link.as_str(), claims)?;
            let mut shm = ShmConfig::new(config.run_dir.join(format!("{link}.link")));
            shm.mac = mac.or_else(|| config.port.addresses.first().map(|address| mac_of(address.ip())));
            shm.addresses =
                config.port.addresses.iter().map(|address| (address.ip(), address.prefix())).collect();
            shm.mtu = config.port.mtu.unwrap_or(shm.mtu);
            shm.queues = u16::try_from(config.workers.len()).unwrap_or(u16::MAX);
            shm.can_sleep = config.workers.iter().any(|worker| worker.idle != IdlePolicy::Spin);
            let port = ShmPort::open(&shm).map_err(port_error)?;
            Ok((AnyPort::wrap(port, &options).map_err(port_error)?, link.to_string()))
        }
        WireConfig::Xdp { interface, mode, zero_copy, queues } => {
            let xdp = xdp_config(config, (interface.as_str(), *mode, *zero_copy, *queues));
            check_umem(&xdp, arena)?;
            let port = XdpPort::open_in(xdp, arena).map_err(port_error)?;
            Ok((AnyPort::wrap(port, &options).map_err(port_error)?, interface.as_str().to_owned()))
        }
    }
}

fn xdp_config(
    config: &ApplianceConfig,
    (interface, mode, zero_copy, queues): (&str, XdpMode, ZeroCopy, Option<u16>),
) -> XdpConfig {
    let mut xdp = XdpConfig::new(interface);
    xdp.workers = u16::try_from(config.workers.len()).unwrap_or(u16::MAX);
    xdp.queues = queues.map(u32::from);
    xdp.addresses = config.port.addresses.iter().map(|address| address.ip()).collect();
    xdp.mode = match mode {
        XdpMode::Auto => xdp::XdpMode::Auto,
        XdpMode::Native => xdp::XdpMode::Native,
        XdpMode::Generic => xdp::XdpMode::Generic,
    };
    xdp.zero_copy = match zero_copy {
        ZeroCopy::Auto => xdp::ZeroCopy::Auto,
        ZeroCopy::On => xdp::ZeroCopy::Must,
        ZeroCopy::Off => xdp::ZeroCopy::Off,
    };
    xdp
}

/// Says whether the port may pin what it will, before memory is taken and anything is attached. Only `xdp` pins: its
/// buffers, out of the arena.
fn require_pinnable(config: &ApplianceConfig) -> Result<(), ApiError> {
    match &config.port.wire {
        WireConfig::Shm { .. } => Ok(()),
        WireConfig::Xdp { interface, mode, zero_copy, queues } => {
            let xdp = xdp_config(config, (interface.as_str(), *mode, *zero_copy, *queues));
            let bytes = XdpPort::umem_bytes(&xdp).map_err(port_error)?;
            os::require_memlock(bytes as u64).map_err(arena_error)
        }
    }
}

/// The wrapper's rates for the directions that the file names.
fn to_fault(fault: &FaultConfig) -> fault::FaultConfig {
    let rates = fault::Rates {
        loss: fault.loss.get(),
        duplicate: fault.duplicate.get(),
        reorder: fault.reorder.get(),
        corrupt: fault.corrupt.get(),
        ce_mark: fault.mark_ce.get(),
        delay: fault.delay.get(),
        delay_time: Duration::from_micros(fault.delay_us.into()),
    };
    let (rx, tx) = match fault.direction {
        FaultDirection::Both => (rates, rates),
        FaultDirection::Rx => (rates, fault::Rates::default()),
        FaultDirection::Tx => (fault::Rates::default(), rates),
    };
    fault::FaultConfig { seed: fault.seed, rx, tx }
}

/// The port's buffers come out of the arena: says how large it must be before anything is attached.
fn check_umem(config: &XdpConfig, arena: &Arena) -> Result<(), ApiError> {
    let need = XdpPort::umem_bytes(config).map_err(port_error)?;
    if need <= arena.free_bytes() {
        return Ok(());
    }
    let (asked, allowed) =
        (format!("{} bytes", arena.len()), format!("more than {need} bytes, which the port's buffers take"));
    Err(ApiError::new(Code::Exhausted, "memory.bytes", asked, allowed)
        .hint("raise memory.bytes in the configuration"))
}

/// A link has two sides: takes one of them.
fn claim_link(run_dir: &Path, link: &str, claims: &mut Vec<Lock>) -> Result<(), ApiError> {
    let mut holders = Vec::new();
    for side in ["a", "b"] {
        match take(run_dir, &format!("{link}.{side}.lock"))? {
            Ok(lock) => {
                claims.push(lock);
                return Ok(());
            }
            Err(holder) => holders.push(holder),
        }
    }
    let found = format!("two appliances on a link; processes {} have it", holders.join(" and "));
    Err(ApiError::new(Code::Busy, "port.link", link, found)
        .hint("stop one of them, or give the link another name"))
}

/// An address of a link belongs to one side.
fn claim_addresses(
    run_dir: &Path,
    link: &str,
    port: &PortConfig,
    claims: &mut Vec<Lock>,
) -> Result<(), ApiError> {
    for address in &port.addresses {
        let ip = address.ip();
        match take(run_dir, &format!("{link}.{ip}.lock"))? {
            Ok(lock) => claims.push(lock),
            Err(holder) => {
                let found = format!("an address that is free on link {link}; process {holder} has it");
                return Err(ApiError::new(Code::Busy, "port.addresses", ip.to_string(), found)
                    .hint("give this side another address"));
            }
        }
    }
    Ok(())
}

fn take(run_dir: &Path, name: &str) -> Result<Result<Lock, String>, ApiError> {
    let path = run_dir.join(name);
    Lock::take(&path).map_err(|error| io_error("lock", &path, &error))
}

/// A core for each worker. `auto` takes those that no other appliance of the run folder has; when there is none left
/// the worker runs where the scheduler puts it, which is said.
fn choose_cores(
    config: &ApplianceConfig,
    claims: &mut Vec<Lock>,
    fallbacks: &mut Vec<Fallback>,
) -> Result<Vec<WorkerConfig>, ApiError> {
    let asked = |core: usize| {
        let core = u32::try_from(core).unwrap_or(u32::MAX);
        config.workers.iter().any(|worker| worker.core == CoreChoice::Core(core))
    };
    let allowed = pin::allowed_cores();
    let ordered = pin::auto_cores(allowed.len());
    let mut free = ordered.into_iter().flatten().filter(|core| !asked(*core));
    let mut out = Vec::with_capacity(config.workers.len());
    for (number, worker) in config.workers.iter().enumerate() {
        let core = match worker.core {
            CoreChoice::Core(core) => Some(core as usize),
            CoreChoice::Unpinned => None,
            CoreChoice::Auto => claim_core(&config.run_dir, &mut free, claims)?,
        };
        if core.is_none() && worker.core == CoreChoice::Auto {
            fallbacks.push(Fallback {
                wanted: format!("a core of its own for worker {number}"),
                got: "the scheduler's choice".into(),
                reason: format!(
                    "no free core: {} allowed to this process, others of this run-dir have them",
                    allowed.len()
                ),
                hint: "allow more cores (taskset, cpuset), start fewer workers, or say core = \"none\""
                    .into(),
            });
        }
        let idle = match worker.idle {
            IdlePolicy::Spin => ferroce_engine::IdlePolicy::Spin,
            IdlePolicy::Adaptive { spin_passes } => ferroce_engine::IdlePolicy::Adaptive { spin_passes },
        };
        out.push(WorkerConfig { core, idle });
    }
    Ok(out)
}

fn claim_core(
    run_dir: &Path,
    free: &mut impl Iterator<Item = usize>,
    claims: &mut Vec<Lock>,
) -> Result<Option<usize>, ApiError> {
    for core in free {
        if let Ok(lock) = take(run_dir, &format!("core-{core}.lock"))? {
            claims.push(lock);
            return Ok(Some(core));
        }
    }
    Ok(None)
}

/// An Ethernet address made from an IP address: locally administered, the same after a restart, and different on the
/// two sides of a link because their addresses are.
fn mac_of(ip: std::net::IpAddr) -> [u8; 6] {
    match ip {
        std::net::IpAddr::V4(v4) => {
            let [a, b, c, d] = v4.octets();
            [0x02, 0x00, a, b, c, d]
        }
        std::net::IpAddr::V6(v6) => {
            // FNV-1a, folded to 40 bits.
            let hash = v6.octets().into_iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
                (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
            });
            let [_, _, _, a, b, c, d, e] = (hash ^ (hash >> 40)).to_be_bytes();
            [0x06, a, b, c, d, e]
        }
    }
}

/// EUI-64 of an Ethernet address, as Linux makes it for RoCE devices.
fn eui64([a, b, c, d, e, f]: [u8; 6]) -> u64 {
    u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

fn port_error(error: PortError) -> ApiError {
    ApiError::new(Code::Invalid, format!("port: {}", error.attribute), error.asked, error.allowed)
        .hint(error.hint)
}

fn arena_error(error: os::ArenaError) -> ApiError {
    ApiError::new(Code::Exhausted, format!("memory: {}", error.attribute), error.asked, error.allowed)
        .hint(error.hint)
}

fn engine_error(error: EngineError) -> ApiError {
    let code = match &error {
        EngineError::Config { .. } | EngineError::Pin { .. } => Code::Invalid,
        EngineError::Os { .. } => Code::Exhausted,
        EngineError::Hung { .. } => Code::Timeout,
        EngineError::Panicked { .. } => Code::Internal,
    };
    ApiError::new(code, "workers", "", error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_addresses_are_unicast_stable_and_distinct() {
        let ips = ["192.0.2.1", "192.0.2.2", "10.0.2.1", "fd00::1", "fd00::2", "fd00:0:0:1::1"];
        let macs: Vec<_> = ips.iter().map(|ip| mac_of(ip.parse().unwrap())).collect();
        assert_eq!(macs[0], [0x02, 0x00, 192, 0, 2, 1]);
        for (i, mac) in macs.iter().enumerate() {
            assert_eq!(mac[0] & 3, 2, "unicast, locally administered");
            assert!(!macs[..i].contains(mac));
        }
        assert_eq!(eui64([0x02, 0, 0, 0, 0, 1]), 0x0000_00ff_fe00_0001);
    }

    #[test]
    fn a_link_has_two_sides() {
        let dir = std::env::temp_dir().join(format!("ferroced-claims-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let (mut a, mut b, mut c) = (Vec::new(), Vec::new(), Vec::new());
        claim_link(&dir, "lab", &mut a).unwrap();
        claim_link(&dir, "lab", &mut b).unwrap();
        let error = claim_link(&dir, "lab", &mut c).unwrap_err();
        assert_eq!((error.code, error.attribute.as_str()), (Code::Busy, "port.link"));
        claim_link(&dir, "other", &mut c).unwrap();
        drop(a);
        claim_link(&dir, "lab", &mut c).unwrap();
        drop((b, c));
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
        std::fs::remove_dir(&dir).unwrap();
    }
}

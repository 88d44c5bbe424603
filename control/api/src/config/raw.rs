//! The file as written, and the checks that span several keys.

use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

use super::value::{
    ByteSize, CoreChoice, DevName, FaultDirection, IcrcSetting, IdlePolicy, InterfaceName, NetAddress,
    PagePolicy, Probability, XdpMode, ZeroCopy,
};
use super::{
    ApplianceConfig, ConfigError, DEFAULT_MEMORY_BYTES, DEFAULT_RUN_DIR, FaultConfig, LimitsConfig,
    MAX_WORKERS, MEMORY_BYTES, MemoryConfig, PortConfig, Source, WireConfig, WorkerConfig,
};

/// Idle passes before a worker sleeps, when the file does not say: a few tens of microseconds.
const DEFAULT_SPIN_PASSES: u32 = 2000;

/// `NAME.sock` of these belongs to `ferroce-ctld`.
const RESERVED_NAMES: [&str; 2] = ["ctl", "ro"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    appliance: Appliance,
    #[serde(default)]
    memory: Memory,
    #[serde(default)]
    worker: Vec<Worker>,
    port: Port,
    #[serde(default)]
    limits: Limits,
    #[serde(default)]
    diagnosis: Diagnosis,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Appliance {
    name: Spanned<DevName>,
    run_dir: Option<Spanned<PathBuf>>,
    node_guid: Option<Spanned<String>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Memory {
    bytes: Option<Spanned<ByteSize>>,
    pages: PagePolicy,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Worker {
    core: Option<Spanned<CoreChoice>>,
    idle: Idle,
    spin_passes: Option<Spanned<u32>>,
}

#[derive(Deserialize, Default, Clone, Copy)]
#[serde(rename_all = "snake_case")]
enum Idle {
    #[default]
    Adaptive,
    Spin,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Shm,
    Xdp,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Port {
    kind: Spanned<Kind>,
    link: Option<Spanned<DevName>>,
    mac: Option<Spanned<String>>,
    interface: Option<Spanned<InterfaceName>>,
    mode: Option<Spanned<XdpMode>>,
    zero_copy: Option<Spanned<ZeroCopy>>,
    #[serde(default)]
    addresses: Vec<Spanned<NetAddress>>,
    mtu: Option<Spanned<u32>>,
    queues: Option<Spanned<u16>>,
    fault: Option<Fault>,
    capture: Option<Capture>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fault {
    seed: u64,
    #[serde(default)]
    direction: FaultDirection,
    #[serde(default)]
    loss: Probability,
    #[serde(default)]
    duplicate: Probability,
    #[serde(default)]
    reorder: Probability,
    #[serde(default)]
    corrupt: Probability,
    #[serde(default)]
    mark_ce: Probability,
    #[serde(default)]
    delay: Probability,
    delay_us: Option<Spanned<u32>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Capture {
    file: Spanned<PathBuf>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Limits {
    max_qp: Option<Spanned<u32>>,
    max_cq: Option<Spanned<u32>>,
    max_mr: Option<Spanned<u32>>,
    max_pd: Option<Spanned<u32>>,
    max_clients: Option<Spanned<u32>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct Diagnosis {
    icrc: IcrcSetting,
}

impl File {
    pub(super) fn check(self, source: &Source<'_>) -> Result<ApplianceConfig, ConfigError> {
        let workers = check_workers(&self.worker, source)?;
        let port = self.port.check(workers.len(), source)?;
        let name = &self.appliance.name;
        if RESERVED_NAMES.contains(&name.get_ref().as_str()) {
            let message = format!("asked `{}`, which names a socket of the control process", name.get_ref());
            return Err(source.error_at(name, "appliance.name", message));
        }
        let run_dir = match &self.appliance.run_dir {
            None => PathBuf::from(DEFAULT_RUN_DIR),
            Some(path) if path.get_ref().is_absolute() => path.get_ref().clone(),
            Some(path) => {
                let asked = path.get_ref().display();
                let message =
                    format!("asked `{asked}`, allowed an absolute path; --run-dir takes a relative one");
                return Err(source.error_at(path, "appliance.run_dir", message));
            }
        };
        Ok(ApplianceConfig {
            name: self.appliance.name.get_ref().clone(),
            run_dir,
            node_guid: check_guid(self.appliance.node_guid.as_ref(), source)?,
            memory: MemoryConfig {
                bytes: match &self.memory.bytes {
                    None => DEFAULT_MEMORY_BYTES,
                    Some(size) => {
                        let bytes = size.get_ref().0;
                        range(source, size, "memory.bytes", bytes, MEMORY_BYTES)?;
                        bytes
                    }
                },
                pages: self.memory.pages,
            },
            workers,
            port,
            limits: self.limits.check(source)?,
            icrc: self.diagnosis.icrc,
        })
    }
}

fn check_workers(raw: &[Worker], source: &Source<'_>) -> Result<Vec<WorkerConfig>, ConfigError> {
    if raw.len() > MAX_WORKERS {
        return Err(
            source.error("worker", format!("asked {} workers, allowed at most {MAX_WORKERS}", raw.len()))
        );
    }
    if raw.is_empty() {
        return Ok(vec![WorkerConfig {
            core: CoreChoice::Auto,
            idle: IdlePolicy::Adaptive { spin_passes: DEFAULT_SPIN_PASSES },
        }]);
    }
    let mut out: Vec<WorkerConfig> = Vec::with_capacity(raw.len());
    for worker in raw {
        let core = worker.core.as_ref().map_or(CoreChoice::Auto, |core| *core.get_ref());
        if let (CoreChoice::Core(number), Some(at)) = (core, &worker.core)
            && out.iter().any(|other| other.core == core)
        {
            return Err(source.error_at(
                at,
                "worker.core",
                format!("core {number} has a worker already; give each its own"),
            ));
        }
        let idle = match (worker.idle, &worker.spin_passes) {
            (Idle::Spin, None) => IdlePolicy::Spin,
            (Idle::Spin, Some(at)) => {
                let message = "only with idle = \"adaptive\": a spinning worker never sleeps";
                return Err(source.error_at(at, "worker.spin_passes", message));
            }
            (Idle::Adaptive, None) => IdlePolicy::Adaptive { spin_passes: DEFAULT_SPIN_PASSES },
            (Idle::Adaptive, Some(at)) => {
                let passes = *at.get_ref();
                range(source, at, "worker.spin_passes", u64::from(passes), (0, 1_000_000_000))?;
                IdlePolicy::Adaptive { spin_passes: passes }
            }
        };
        out.push(WorkerConfig { core, idle });
    }
    Ok(out)
}

fn check_guid(raw: Option<&Spanned<String>>, source: &Source<'_>) -> Result<Option<u64>, ConfigError> {
    let Some(at) = raw else { return Ok(None) };
    let text = at.get_ref();
    let digits: String = text.chars().filter(|c| *c != ':').collect();
    let hex = digits.len() == 16 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    match u64::from_str_radix(&digits, 16) {
        Ok(guid) if hex && guid != 0 => Ok(Some(guid)),
        _ => {
            let message = format!("asked `{text}`, allowed 16 hex digits such as \"0200:00ff:fe00:0001\"");
            Err(source.error_at(at, "appliance.node_guid", message))
        }
    }
}

impl Port {
    fn check(self, workers: usize, source: &Source<'_>) -> Result<PortConfig, ConfigError> {
        let wire = match self.kind.get_ref() {
            Kind::Shm => self.check_shm(workers, source)?,
            Kind::Xdp => self.check_xdp(workers, source)?,
        };
        if let Some(at) = &self.mtu {
            // 352: the smallest path MTU needs it. 65,520: the length of a frame in a ring has 16 bits.
            range(source, at, "port.mtu", u64::from(*at.get_ref()), (352, 65_520))?;
        }
        let mut addresses: Vec<NetAddress> = Vec::with_capacity(self.addresses.len());
        for at in &self.addresses {
            if addresses.iter().any(|known| known.ip() == at.get_ref().ip()) {
                return Err(source.error_at(
                    at,
                    "port.addresses",
                    format!("{} is listed twice", at.get_ref().ip()),
                ));
            }
            addresses.push(*at.get_ref());
        }
        Ok(PortConfig {
            wire,
            addresses,
            mtu: self.mtu.as_ref().map(|mtu| *mtu.get_ref()),
            fault: self.fault.map(|fault| fault.check(source)).transpose()?,
            capture: self.capture.map(|capture| capture.file.into_inner()),
        })
    }

    fn check_shm(&self, workers: usize, source: &Source<'_>) -> Result<WireConfig, ConfigError> {
        if let Some(at) = &self.queues
            && usize::from(*at.get_ref()) != workers
        {
            let asked = at.get_ref();
            let message = format!(
                "asked {asked}, allowed {workers}: each worker owns one; add or remove [[worker]] sections"
            );
            return Err(source.error_at(at, "port.queues", message));
        }
        refuse(source, self.interface.as_ref(), "port.interface", "xdp")?;
        refuse(source, self.mode.as_ref(), "port.mode", "xdp")?;
        refuse(source, self.zero_copy.as_ref(), "port.zero_copy", "xdp")?;
        let Some(link) = &self.link else {
            let message = "kind = \"shm\" needs link = \"NAME\": both sides of the link give the same name";
            return Err(source.error_at(&self.kind, "port.link", message));
        };
        if self.addresses.is_empty() {
            let message = "kind = \"shm\" needs at least one, such as addresses = [\"192.0.2.1/24\"]";
            return Err(source.error_at(&self.kind, "port.addresses", message));
        }
        let mac = match &self.mac {
            None => None,
            Some(at) => {
                let unicast =
                    crate::ids::parse_mac(at.get_ref()).filter(|mac| mac.0[0] & 1 == 0 && mac.0 != [0; 6]);
                let Some(mac) = unicast else {
                    let message =
                        format!("asked `{}`, allowed a unicast address aa:bb:cc:dd:ee:ff", at.get_ref());
                    return Err(source.error_at(at, "port.mac", message));
                };
                Some(mac.0)
            }
        };
        Ok(WireConfig::Shm { link: link.get_ref().clone(), mac })
    }

    fn check_xdp(&self, workers: usize, source: &Source<'_>) -> Result<WireConfig, ConfigError> {
        refuse(source, self.mtu.as_ref(), "port.mtu", "shm")?;
        if let Some(at) = &self.queues
            && usize::from(*at.get_ref()) < workers
        {
            let message =
                format!("asked {}, allowed {workers} and more: each worker owns at least one", at.get_ref());
            return Err(source.error_at(at, "port.queues", message));
        }
        refuse(source, self.link.as_ref(), "port.link", "shm")?;
        refuse(source, self.mac.as_ref(), "port.mac", "shm")?;
        let Some(interface) = &self.interface else {
            return Err(source.error_at(
                &self.kind,
                "port.interface",
                "kind = \"xdp\" needs interface = \"NAME\"",
            ));
        };
        let mode = self.mode.as_ref().map_or(XdpMode::Auto, |mode| *mode.get_ref());
        let zero_copy = self.zero_copy.as_ref().map_or(ZeroCopy::Auto, |zero_copy| *zero_copy.get_ref());
        if let (XdpMode::Generic, ZeroCopy::On, Some(at)) = (mode, zero_copy, &self.zero_copy) {
            let message = "asked on, allowed off or auto with mode = \"generic\": only a driver can do it";
            return Err(source.error_at(at, "port.zero_copy", message));
        }
        let queues = self.queues.as_ref().map(|queues| *queues.get_ref());
        Ok(WireConfig::Xdp { interface: interface.get_ref().clone(), mode, zero_copy, queues })
    }
}

impl Fault {
    fn check(self, source: &Source<'_>) -> Result<FaultConfig, ConfigError> {
        let delay_us = match &self.delay_us {
            None => 0,
            Some(at) => {
                range(source, at, "port.fault.delay_us", u64::from(*at.get_ref()), (0, 1_000_000))?;
                *at.get_ref()
            }
        };
        Ok(FaultConfig {
            seed: self.seed,
            direction: self.direction,
            loss: self.loss,
            duplicate: self.duplicate,
            reorder: self.reorder,
            corrupt: self.corrupt,
            mark_ce: self.mark_ce,
            delay: self.delay,
            delay_us,
        })
    }
}

impl Limits {
    fn check(&self, source: &Source<'_>) -> Result<LimitsConfig, ConfigError> {
        let fallback = LimitsConfig::default();
        let take = |at: &Option<Spanned<u32>>, key: &str, most: u64, or: u32| match at {
            None => Ok(or),
            Some(at) => range(source, at, key, u64::from(*at.get_ref()), (1, most)).map(|()| *at.get_ref()),
        };
        Ok(LimitsConfig {
            max_qp: take(&self.max_qp, "limits.max_qp", 65_536, fallback.max_qp)?,
            max_cq: take(&self.max_cq, "limits.max_cq", 65_536, fallback.max_cq)?,
            max_mr: take(&self.max_mr, "limits.max_mr", 65_536, fallback.max_mr)?,
            max_pd: take(&self.max_pd, "limits.max_pd", 65_536, fallback.max_pd)?,
            max_clients: take(&self.max_clients, "limits.max_clients", 256, fallback.max_clients)?,
        })
    }
}

fn range<T>(
    source: &Source<'_>,
    at: &Spanned<T>,
    key: &str,
    value: u64,
    (least, most): (u64, u64),
) -> Result<(), ConfigError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(source.error_at(at, key, format!("asked {value}, allowed {least} to {most}")))
}

fn refuse<T>(source: &Source<'_>, at: Option<&Spanned<T>>, key: &str, kind: &str) -> Result<(), ConfigError> {
    match at {
        None => Ok(()),
        Some(at) => Err(source.error_at(at, key, format!("only with kind = \"{kind}\""))),
    }
}

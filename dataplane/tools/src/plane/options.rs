//! Options of the data plane that every tool shares.

use std::net::IpAddr;
use std::path::PathBuf;

use ferroce_engine::{IdlePolicy, pin};
use ferroce_mem::os::PagePolicy;
use ferroce_nic::wrap::FaultConfig;
use ferroce_nic::xdp::{XdpMode, ZeroCopy};
use ferroce_services::Role;

use crate::fail::{Fail, Outcome};

/// What a worker does when there is nothing to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Idle {
    /// Poll for ever.
    Spin,
    /// Poll for a while, then sleep until a frame comes.
    Adaptive,
}

impl Idle {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Idle::Spin => "spin",
            Idle::Adaptive => "adaptive",
        }
    }

    pub(super) fn policy(self) -> IdlePolicy {
        match self {
            Idle::Spin => IdlePolicy::Spin,
            Idle::Adaptive => IdlePolicy::default(),
        }
    }
}

/// Where frames go.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Dev {
    /// Shared memory with another process, found by this path; `None` is the user's default link.
    Shm(Option<PathBuf>),
    /// An interface, by AF_XDP.
    Xdp(String),
}

fn dev(text: &str) -> Result<Dev, String> {
    match text.split_once(':') {
        None if text == "shm" => Ok(Dev::Shm(None)),
        Some(("shm", path)) if !path.is_empty() => Ok(Dev::Shm(Some(PathBuf::from(path)))),
        Some(("xdp", interface)) if !interface.is_empty() => Ok(Dev::Xdp(interface.to_string())),
        _ => Err(format!("{text:?} is not a device: allowed are shm, shm:PATH and xdp:INTERFACE")),
    }
}

fn pages(text: &str) -> Result<PagePolicy, String> {
    match text {
        "auto" => Ok(PagePolicy::Auto),
        "1G" | "1g" => Ok(PagePolicy::Huge1G),
        "2M" | "2m" => Ok(PagePolicy::Huge2M),
        "thp" => Ok(PagePolicy::Thp),
        "normal" => Ok(PagePolicy::Normal),
        _ => Err(format!("{text:?} is not a kind of pages: allowed are auto, 1G, 2M, thp and normal")),
    }
}

fn core(text: &str) -> Result<Core, String> {
    match text {
        "auto" => Ok(Core::Auto),
        "none" => Ok(Core::None),
        _ => text
            .parse()
            .map(Core::Number)
            .map_err(|_| format!("{text:?} is not a core: allowed are a number, auto and none")),
    }
}

fn zero_copy(text: &str) -> Result<ZeroCopy, String> {
    match text {
        "auto" => Ok(ZeroCopy::Auto),
        "on" => Ok(ZeroCopy::Must),
        "off" => Ok(ZeroCopy::Off),
        _ => Err(format!("{text:?} is not one of auto, on and off")),
    }
}

fn xdp_mode(text: &str) -> Result<XdpMode, String> {
    match text {
        "auto" => Ok(XdpMode::Auto),
        "native" => Ok(XdpMode::Native),
        "generic" => Ok(XdpMode::Generic),
        _ => Err(format!("{text:?} is not one of auto, native and generic")),
    }
}

/// Which core a worker is pinned to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Core {
    /// The client takes the first good core, the server the second one.
    Auto,
    /// Not pinned.
    None,
    /// This one.
    Number(usize),
}

/// Faults on purpose, with the text that asked for them.
#[derive(Clone, PartialEq, Debug)]
pub struct Faults {
    /// As given.
    pub text: String,
    /// As understood.
    pub config: FaultConfig,
}

fn faults(text: &str) -> Result<Faults, String> {
    Ok(Faults { text: text.to_string(), config: super::fault::parse(text)? })
}

/// Options of the data plane inside the tool.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Data plane", next_line_help = true)]
pub struct PlaneArgs {
    /// shm[:PATH], a link of two processes, or xdp:INTERFACE
    #[arg(short = 'd', long = "dev", alias = "ib-dev", value_name = "DEV", default_value = "shm", value_parser = dev)]
    pub dev: Dev,
    /// Port of the device: 1
    #[arg(short = 'i', long = "ib-port", value_name = "PORT", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=1))]
    pub ib_port: u8,
    /// Own address on shm, repeatable [10.99.0.N fd99::N; server 1, client 2]
    #[arg(long, value_name = "IP")]
    pub addr: Vec<IpAddr>,
    /// MTU of the shm link in bytes, the same on both sides
    #[arg(long, value_name = "BYTES", default_value_t = 9000)]
    pub netdev_mtu: u32,
    /// Zero-copy on xdp: auto, on (or not at all), off
    #[arg(long, value_name = "WHEN", default_value = "auto", value_parser = zero_copy)]
    pub zero_copy: ZeroCopy,
    /// Where the program of xdp runs: auto, native, generic
    #[arg(long, value_name = "MODE", default_value = "auto", value_parser = xdp_mode)]
    pub xdp_mode: XdpMode,
    /// What an idle worker does: spin, adaptive
    #[arg(long, value_enum, hide_possible_values = true, default_value_t = Idle::Adaptive)]
    pub idle: Idle,
    /// The worker's core: number, none, auto (one per side)
    #[arg(long, value_name = "CORE", default_value = "auto", value_parser = core)]
    pub core: Core,
    /// Memory pages: auto, 1G, 2M, thp, normal
    #[arg(long, value_name = "KIND", default_value = "auto", value_parser = pages)]
    pub pages: PagePolicy,
    /// Faults on this side's wire, such as loss=0.01,seed=7
    #[arg(long, value_name = "LIST", value_parser = faults)]
    pub fault: Option<Faults>,
    /// Write all frames to this pcap file
    #[arg(long, value_name = "FILE")]
    pub capture: Option<PathBuf>,
}

impl PlaneArgs {
    /// The core that the role gets.
    pub fn core_for(&self, role: Role) -> Outcome<Option<usize>> {
        match self.core {
            Core::None => Ok(None),
            Core::Number(core) if pin::allowed_cores().contains(&core) => Ok(Some(core)),
            Core::Number(core) => {
                Err(Fail::usage(format!("core: asked {core}, allowed {:?}", pin::allowed_cores())))
            }
            // With one core for both, pinning would only get in the scheduler's way.
            Core::Auto => {
                let cores = pin::auto_cores(2);
                let index = usize::from(role == Role::Server);
                Ok(if cores.iter().all(Option::is_some) { cores.get(index).copied().flatten() } else { None })
            }
        }
    }

    /// Own addresses with their prefix lengths, on shm.
    pub fn addresses(&self, role: Role) -> Vec<(IpAddr, u8)> {
        let prefix = |ip: IpAddr| (ip, if ip.is_ipv4() { 24 } else { 64 });
        if !self.addr.is_empty() {
            return self.addr.iter().copied().map(prefix).collect();
        }
        let last = if role == Role::Server { 1 } else { 2 };
        vec![
            prefix(IpAddr::from([10, 99, 0, last])),
            prefix(IpAddr::from([0xfd99, 0, 0, 0, 0, 0, 0, u16::from(last)])),
        ]
    }
}

/// The user's own link: in the runtime directory that systemd keeps for a login, else in /tmp.
pub fn default_link() -> PathBuf {
    let uid = rustix::process::getuid().as_raw();
    let runtime = PathBuf::from(format!("/run/user/{uid}"));
    if runtime.is_dir() {
        runtime.join("ferroce.link")
    } else {
        PathBuf::from(format!("/tmp/ferroce-{uid}.link"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices() {
        assert_eq!(dev("shm"), Ok(Dev::Shm(None)));
        assert_eq!(dev("shm:/tmp/x"), Ok(Dev::Shm(Some("/tmp/x".into()))));
        assert_eq!(dev("xdp:eth0"), Ok(Dev::Xdp("eth0".into())));
        for bad in ["", "shm:", "xdp:", "xdp", "mlx5_0", "dpdk:0"] {
            assert!(dev(bad).unwrap_err().contains("shm:PATH"), "{bad}");
        }
    }

    #[test]
    fn cores_and_pages() {
        assert_eq!(core("3"), Ok(Core::Number(3)));
        assert_eq!(core("none"), Ok(Core::None));
        assert!(core("-1").is_err());
        assert_eq!(pages("thp"), Ok(PagePolicy::Thp));
        assert!(pages("huge").unwrap_err().contains("auto, 1G, 2M, thp and normal"));
    }
}

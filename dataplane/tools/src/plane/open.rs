//! From a device's name to a port.

use ferroce_mem::os::require_memlock;
use ferroce_nic::any::BasePort;
use ferroce_nic::shm::{ShmConfig, ShmPort};
use ferroce_nic::xdp::{XdpConfig, XdpPort};
use ferroce_nic::{AnyPort, Options};
use ferroce_services::Role;

use super::options::{Dev, Idle, PlaneArgs, default_link};
use super::{Plane, refused};
use crate::fail::{Fail, Outcome};

/// Opens the port that `args` names and starts the data plane on it.
pub(super) fn open(args: &PlaneArgs, role: Role) -> Outcome<Plane> {
    match &args.dev {
        Dev::Shm(path) => {
            let link = path.clone().unwrap_or_else(default_link);
            let config = ShmConfig {
                addresses: args.addresses(role),
                mtu: args.netdev_mtu,
                can_sleep: args.idle == Idle::Adaptive,
                ..ShmConfig::new(&link)
            };
            let name = format!("shm:{}", link.display());
            wrap(ShmPort::open(&config).map_err(refused)?.into(), args, role, name)
        }
        Dev::Xdp(interface) => {
            if !args.addr.is_empty() {
                return Err(Fail::usage(
                    "addr: xdp uses the interface's own addresses; set them with `ip address`",
                ));
            }
            let config = XdpConfig {
                pages: args.pages,
                mode: args.xdp_mode,
                zero_copy: args.zero_copy,
                ..XdpConfig::new(interface)
            };
            // Told before anything is attached: the port pins its buffers.
            let pinned = XdpPort::umem_bytes(&config).map_err(refused)?;
            require_memlock(pinned as u64).map_err(|e| Fail::failed(e.to_string()))?;
            wrap(XdpPort::open(config).map_err(refused)?.into(), args, role, format!("xdp:{interface}"))
        }
    }
}

fn wrap(base: BasePort, args: &PlaneArgs, role: Role, name: String) -> Outcome<Plane> {
    let options = Options { fault: args.fault.as_ref().map(|f| f.config), pcap: args.capture.clone() };
    let port = AnyPort::wrap(base, &options).map_err(refused)?;
    Plane::assemble(port, args, role, name)
}

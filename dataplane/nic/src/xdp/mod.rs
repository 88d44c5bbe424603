//! `xdp`: any Linux network interface, by AF_XDP.
//!
//! Owns one AF_XDP socket with its own UMEM per receive queue, the XDP program that feeds them, and a view of the
//! interface's link and addresses. Invariant: frames that are not RoCE for our addresses (or MAC control) reach the
//! kernel untouched, and the program is attached by a link that ends with this process, however it ends. All receive
//! queues are covered, or opening is refused with both numbers. Called at set-up and by the housekeeping thread
//! ([`XdpPort`]) and by workers ([`XdpQueue`]). Never changes the interface's settings.
//!
//! Needs CAP_NET_RAW (the sockets), CAP_BPF (the program) and CAP_NET_ADMIN (attaching it, probing neighbours), and a
//! kernel of 5.10 or later.

mod attach;
mod bpf;
mod found;
mod groups;
mod program;
mod queue;
mod rights;
mod ring;
mod room;
mod socket;
mod sys;
mod umem;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ferroce_mem::os::{Arena, ArenaConfig, PagePolicy};

use crate::netlink::{Address, Link, Monitor, Netlink, NetlinkError, known, resolve};
use crate::port::{Caps, Fallback, Port, PortError, RxQueues};

use attach::Attachment;
use found::{Found, active_queues};
use groups::Groups;
use queue::QueueShared;
use rights::require_capabilities;
use room::{ETHERNET_BYTES, Room};
use socket::{Socket, SocketCore, SocketPlan};
use umem::Division;

pub use queue::XdpQueue;
pub use room::{MAX_JUMBO_MTU, MAX_MTU};

/// Attribute of an error that says that this kernel or driver has no frames over several buffers.
const MULTI_BUFFER: &str = "multi-buffer";

/// Where the XDP program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum XdpMode {
    /// Native where the driver can, else generic; [`Caps::mode`] says which.
    #[default]
    Auto,
    /// In the driver, or not at all.
    Native,
    /// In the network stack: slower, works with every driver.
    Generic,
}

/// Whether the driver works on the UMEM without copying.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ZeroCopy {
    /// Where the driver can; else copy mode, stated as a fallback.
    #[default]
    Auto,
    /// Or not at all.
    Must,
    /// Never.
    Off,
}

/// What to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdpConfig {
    /// Interface name.
    pub interface: String,
    /// Workers: queues that [`Port::take_queues`] yields. At most one per receive queue; with fewer, a worker owns
    /// several receive queues.
    pub workers: u16,
    /// Receive queues to own, from 0 on; `None` for all. Fewer than the interface has is refused.
    pub queues: Option<u32>,
    /// Where the program runs.
    pub mode: XdpMode,
    /// Whether the driver copies.
    pub zero_copy: ZeroCopy,
    /// Addresses whose RoCE frames are taken; empty for all addresses of the interface, as they come and go.
    pub addresses: Vec<IpAddr>,
    /// Entries of each receive ring, a power of two from 64 to 16384: a page of memory each.
    pub rx_ring: u32,
    /// Entries of each worker's transmit ring, likewise.
    pub tx_ring: u32,
    /// Pages of the UMEM (for [`XdpPort::open`]).
    pub pages: PagePolicy,
}

impl XdpConfig {
    /// One worker on all queues of `interface`, everything else automatic.
    pub fn new(interface: &str) -> Self {
        XdpConfig {
            interface: interface.to_string(),
            workers: 1,
            queues: None,
            mode: XdpMode::Auto,
            zero_copy: ZeroCopy::Auto,
            addresses: Vec::new(),
            rx_ring: 1024,
            tx_ring: 512,
            pages: PagePolicy::Auto,
        }
    }
}

/// An interface opened by AF_XDP.
pub struct XdpPort {
    // First, so that the program is detached before the sockets it feeds close.
    attachment: Attachment,
    config: XdpConfig,
    link: Link,
    room: Room,
    rx_queues: u32,
    netlink: Netlink,
    monitor: Monitor,
    addresses: Vec<Address>,
    groups: Groups,
    /// Receive queues that the interface has now.
    queues_present: u32,
    paths_changed: bool,
    queues: Vec<XdpQueue>,
    cores: Vec<Arc<SocketCore>>,
    shared: Vec<Arc<QueueShared>>,
    zero_copy_queues: u32,
    fallbacks: Vec<Fallback>,
    link_changes: u64,
    /// Updates of the address map that the kernel refused.
    address_errors: u64,
}

impl XdpPort {
    /// Opens an interface with an arena of its own for the UMEM.
    ///
    /// # Errors
    /// [`PortError`] naming the interface, queue count, mode, capability or limit at fault.
    pub fn open(config: XdpConfig) -> Result<Self, PortError> {
        let found = Found::look(&config)?;
        let bytes = umem_bytes(&config, &found) as u64;
        let arena = ArenaConfig { bytes, pages: config.pages, numa_node: None };
        let (arena, report) =
            Arena::new(arena).map_err(|e| error("memory", format!("{bytes} bytes"), e.to_string(), ""))?;
        let mut port = Self::assemble(config, found, &arena)?;
        if let Some(reason) = report.fallback {
            port.fallbacks.push(Fallback {
                wanted: "hugepages for the UMEM".to_string(),
                got: report.page_kind.to_string(),
                reason,
                hint: String::new(),
            });
        }
        Ok(port)
    }

    /// Opens an interface with its UMEM in `arena`, which needs [`XdpPort::umem_bytes`] free bytes.
    ///
    /// # Errors
    /// As for [`XdpPort::open`].
    pub fn open_in(config: XdpConfig, arena: &Arena) -> Result<Self, PortError> {
        let found = Found::look(&config)?;
        Self::assemble(config, found, arena)
    }

    /// Bytes of UMEM that `config` needs on this machine.
    ///
    /// # Errors
    /// [`PortError`] if the interface or its queues are not as the configuration says.
    pub fn umem_bytes(config: &XdpConfig) -> Result<usize, PortError> {
        Ok(umem_bytes(config, &Found::look(config)?))
    }

    /// With frames over several buffers where the MTU wants them, else, and where the kernel has none, of one.
    fn assemble(config: XdpConfig, found: Found, arena: &Arena) -> Result<Self, PortError> {
        require_capabilities(&config.interface)?;
        match Self::assemble_with(&config, &found, Room::for_mtu(found.link.mtu), arena) {
            Err(refused) if refused.attribute == MULTI_BUFFER && config.zero_copy != ZeroCopy::Must => {
                Self::assemble_with(&config, &found, Room::single(refused.allowed), arena)
            }
            other => other,
        }
    }

    fn assemble_with(
        config: &XdpConfig,
        found: &Found,
        room: Room,
        arena: &Arena,
    ) -> Result<Self, PortError> {
        let interface = &config.interface;
        let Found { link, rx_queues } = found;
        let netlink = Netlink::open().map_err(|e| netlink_error(interface, &e))?;
        let monitor = Monitor::open(link.index).map_err(|e| netlink_error(interface, &e))?;
        let attachment = Attachment::new(link, *rx_queues, config.mode, room.parts > 1)?;
        let mut port = XdpPort {
            fallbacks: attachment.fallback.clone().into_iter().collect(),
            attachment,
            config: config.clone(),
            link: link.clone(),
            room,
            rx_queues: *rx_queues,
            netlink,
            monitor,
            addresses: Vec::new(),
            groups: Groups::default(),
            queues_present: *rx_queues,
            paths_changed: false,
            queues: Vec::new(),
            cores: Vec::new(),
            shared: Vec::new(),
            zero_copy_queues: 0,
            link_changes: 0,
            address_errors: 0,
        };
        port.open_sockets(arena)?;
        port.read_addresses().map_err(|e| netlink_error(interface, &e))?;
        port.sync_addresses().map_err(|errno| {
            error("addresses", interface.clone(), format!("the kernel answered {errno}"), "")
        })?;
        Ok(port)
    }

    /// A socket per receive queue; receive queue `i` belongs to worker `i mod workers`.
    fn open_sockets(&mut self, arena: &Arena) -> Result<(), PortError> {
        let workers = u32::from(self.config.workers);
        let mut shares: Vec<Vec<Socket>> = (0..workers).map(|_| Vec::new()).collect();
        let mut why_copy = None;
        for queue in 0..self.rx_queues {
            let plan = SocketPlan {
                interface: &self.config.interface,
                index: self.link.index,
                queue,
                rx_ring: self.config.rx_ring,
                tx_ring: if queue < workers { self.config.tx_ring } else { 0 },
                parts: self.room.parts,
                zero_copy: self.config.zero_copy,
                may_zero_copy: self.attachment.native,
            };
            let mut socket = Socket::open(&plan, arena)?;
            self.zero_copy_queues += u32::from(socket.zero_copy);
            why_copy = why_copy.or(socket.why_copy.take());
            self.attachment.add_socket(queue, socket.core.fd()).map_err(|errno| {
                error("interface", self.config.interface.clone(), format!("XSKMAP: {errno}"), "")
            })?;
            self.cores.push(socket.core.clone());
            if let Some(share) = shares.get_mut((queue % workers) as usize) {
                share.push(socket);
            }
        }
        for sockets in shares {
            let shared = Arc::new(QueueShared::default());
            self.shared.push(shared.clone());
            self.queues.push(XdpQueue::new(sockets, shared));
        }
        self.tell_queues();
        self.attachment.start_counting();
        if let Some(reason) = why_copy {
            self.fallbacks.push(Fallback {
                wanted: "zero-copy".to_string(),
                got: "copy".to_string(),
                reason: format!("copy: {reason}"),
                hint: "zero-copy = \"off\" asks for copy mode".to_string(),
            });
        }
        Ok(())
    }

    /// Tells the workers what the link is like now.
    fn tell_queues(&self) {
        for shared in &self.shared {
            shared.longest.store(self.mtu() + ETHERNET_BYTES, Ordering::Relaxed);
            shared.no_carrier.store(!self.link.running(), Ordering::Relaxed);
        }
    }

    /// The MTU in force: the interface's, or as much of it as the port can carry.
    fn mtu(&self) -> u32 {
        self.link.mtu.min(self.room.max_mtu())
    }

    fn read_addresses(&mut self) -> Result<(), NetlinkError> {
        let all = self.netlink.addresses(self.link.index)?;
        let wanted = &self.config.addresses;
        self.addresses = all.into_iter().filter(|a| wanted.is_empty() || wanted.contains(&a.ip)).collect();
        Ok(())
    }

    /// Makes the program take frames for exactly our addresses and groups. Configured addresses count even while the kernel
    /// lacks them.
    fn sync_addresses(&mut self) -> Result<(), rustix::io::Errno> {
        let mut wanted: BTreeSet<IpAddr> = self.config.addresses.iter().copied().collect();
        if wanted.is_empty() {
            wanted = self.addresses.iter().map(|a| a.ip).collect();
        }
        wanted.extend(self.groups.wanted());
        self.attachment.set_addresses(&wanted)
    }

    fn mode(&self) -> String {
        let place = if self.attachment.native { "native" } else { "generic" };
        match self.zero_copy_queues {
            0 => format!("{place}, copy"),
            n if n == self.rx_queues => format!("{place}, zero-copy"),
            n => format!("{place}, zero-copy on {n} of {} queues", self.rx_queues),
        }
    }
}

impl Port for XdpPort {
    type Queue = XdpQueue;

    fn caps(&self) -> Caps {
        Caps {
            kind: "xdp",
            queues: self.config.workers,
            rx_queues: RxQueues { owned: self.rx_queues, present: self.queues_present },
            mtu: self.mtu(),
            mac: self.link.mac,
            scatter_rx: self.room.parts > 1,
            // Whether the hash of a real NIC covers the UDP port is not known here; with one queue it does not matter.
            steering: self.rx_queues == 1,
            timestamps: false,
            can_sleep: true,
            untrusted_peer: false,
            mode: self.mode(),
        }
    }

    fn fallbacks(&self) -> Vec<Fallback> {
        let mut all = self.fallbacks.clone();
        all.extend(self.room.fallback(&self.link));
        all
    }

    fn take_queues(&mut self) -> Vec<XdpQueue> {
        std::mem::take(&mut self.queues)
    }

    fn link_up(&self) -> bool {
        self.link.running()
    }

    fn housekeep(&mut self) {
        // No notice tells of it.
        self.queues_present = active_queues(&self.netlink, &self.link).unwrap_or(self.queues_present);
        let changes = self.monitor.changes();
        self.paths_changed |= changes.paths || changes.link;
        if !changes.link {
            return;
        }
        match self.netlink.link_by_index(self.link.index) {
            Ok(Some(link)) => {
                self.link_changes += u64::from(link.running() != self.link.running());
                self.link = link;
            }
            // The interface is gone: the kernel has detached everything; frames stop, nothing else breaks.
            Ok(None) => self.link.up = false,
            Err(_) => {}
        }
        self.tell_queues();
        if self.read_addresses().is_err() || self.sync_addresses().is_err() {
            self.address_errors += 1;
        }
    }

    fn problem(&self) -> Option<PortError> {
        if self.queues_present > self.rx_queues {
            let (present, owned) = (self.queues_present, self.rx_queues);
            return Some(error(
                "queues",
                format!("{present} receive queues of {}", self.link.name),
                format!("{owned}, as many as there were at the start: {present} queues, {owned} owned"),
                &format!(
                    "frames on the others are lost to us ({} so far): ethtool -L {} combined {owned}, or start again",
                    self.attachment.unowned(),
                    self.link.name
                ),
            ));
        }
        self.groups.problem(&self.link)
    }

    fn housekeep_fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.monitor.fd()]
    }

    fn addresses(&self) -> Vec<(IpAddr, u8)> {
        // One that is not known to be ours alone is nobody's yet.
        self.addresses.iter().filter(|a| !a.tentative).map(|a| (a.ip, a.prefix)).collect()
    }

    fn next_hop(&mut self, src: IpAddr, dst: IpAddr) -> Option<[u8; 6]> {
        known(&mut self.netlink, &self.link, src, dst)
    }

    fn paths_changed(&mut self) -> bool {
        std::mem::take(&mut self.paths_changed)
    }

    fn set_groups(&mut self, groups: &[IpAddr]) {
        if self.groups.set(&self.link, groups) && self.sync_addresses().is_err() {
            self.address_errors += 1;
        }
    }

    fn resolve(&mut self, src: IpAddr, dst: IpAddr, deadline: Instant) -> Result<[u8; 6], PortError> {
        resolve(&mut self.netlink, &self.link, src, dst, deadline).map_err(|e| {
            let hint = format!("ip route get {dst} oif {0}; ip neigh show dev {0}", self.link.name);
            error("neighbour", dst.to_string(), e.to_string(), &hint)
        })
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let sum = |field: fn(&QueueShared) -> &queue::Counter| -> u64 {
            self.shared.iter().map(|c| field(c).get()).sum()
        };
        let (mut dropped, mut rx_invalid, mut tx_invalid) = (0, 0, 0);
        let (mut ring_full, mut fill_empty, mut tx_empty) = (0, 0, 0);
        for s in self.cores.iter().filter_map(|core| core.statistics()) {
            dropped += s.rx_dropped;
            rx_invalid += s.rx_invalid_descs;
            tx_invalid += s.tx_invalid_descs;
            ring_full += s.rx_ring_full.unwrap_or(0);
            fill_empty += s.rx_fill_ring_empty_descs.unwrap_or(0);
            tx_empty += s.tx_ring_empty_descs.unwrap_or(0);
        }
        vec![
            ("rx_good_packets", sum(|c| &c.rx_frames)),
            ("tx_good_packets", sum(|c| &c.tx_frames)),
            ("rx_good_bytes", sum(|c| &c.rx_bytes)),
            ("tx_good_bytes", sum(|c| &c.tx_bytes)),
            ("rx_missed_errors", dropped + ring_full),
            ("rx_errors", sum(|c| &c.rx_bad)),
            (
                "tx_errors",
                sum(|c| &c.tx_device_drops)
                    + sum(|c| &c.tx_oversize)
                    + sum(|c| &c.tx_no_carrier)
                    + tx_invalid,
            ),
            ("xdp_rx_segmented", sum(|c| &c.rx_segmented)),
            ("xdp_rx_dropped", dropped),
            ("xdp_rx_ring_full", ring_full),
            ("xdp_rx_fill_ring_empty", fill_empty),
            ("xdp_rx_invalid_descs", rx_invalid),
            ("xdp_rx_not_ours", self.attachment.not_ours()),
            ("xdp_rx_unowned_queue", self.attachment.unowned()),
            ("xdp_rx_kicks", sum(|c| &c.rx_kicks)),
            ("xdp_tx_kicks", sum(|c| &c.tx_kicks)),
            ("xdp_tx_kick_errors", sum(|c| &c.tx_kick_errors)),
            ("xdp_tx_device_drops", sum(|c| &c.tx_device_drops)),
            ("xdp_tx_invalid_descs", tx_invalid),
            ("xdp_tx_ring_empty", tx_empty),
            ("xdp_tx_oversize", sum(|c| &c.tx_oversize)),
            ("xdp_tx_no_room", sum(|c| &c.tx_no_room)),
            ("xdp_tx_no_carrier", sum(|c| &c.tx_no_carrier)),
            ("groups_joined", self.groups.joined() as u64),
            ("link_changes", self.link_changes),
            ("address_errors", self.address_errors),
        ]
    }
}

fn umem_bytes(config: &XdpConfig, found: &Found) -> usize {
    let slot_chunks = Room::for_mtu(found.link.mtu).parts;
    let bytes = |receive, slots| Division { receive, slots, slot_chunks }.bytes();
    let workers = usize::from(config.workers);
    bytes(config.rx_ring, 0) * found.rx_queues as usize + bytes(0, config.tx_ring) * workers
}

fn error(attribute: &str, asked: String, allowed: String, hint: &str) -> PortError {
    PortError { attribute: attribute.to_string(), asked, allowed, hint: hint.to_string() }
}

fn netlink_error(interface: &str, e: &NetlinkError) -> PortError {
    error("interface", interface.to_string(), format!("an answer of the kernel: {e}"), "")
}

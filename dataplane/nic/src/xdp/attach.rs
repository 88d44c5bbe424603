//! The XDP program on the interface, and the maps that steer it.
//!
//! Owns maps, program and link. Invariant: the map of addresses holds exactly what [`Attachment::set_addresses`] was
//! last given. The program's name carries our process number, so that a second appliance can say who has the
//! interface. Called at set-up and by housekeeping.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::bpf::{ATTACH_GENERIC, ATTACH_NATIVE, Link as BpfLink, Map, MapKind, Program, program_name};
use super::program::{COUNTED_QUEUES, COUNTERS, LINE, NOT_OURS, UNOWNED, address_key, assemble};
use super::rights::missing_capability;
use super::{AsRawFd, MULTI_BUFFER, XdpMode, error};
use crate::netlink::{Link, Netlink};
use crate::port::{Fallback, PortError};

/// What our programs' names begin with.
const NAME_PREFIX: &str = "ferroce_";
/// How long attaching may wait for a program that is on its way out.
const LEFTOVER_LIMIT: Duration = Duration::from_secs(2);
const LEFTOVER_RETRY: Duration = Duration::from_millis(20);
/// Most addresses of an interface.
const MAX_ADDRESSES: u32 = 1024;

/// The program at work.
pub(super) struct Attachment {
    /// Detaches the program when dropped.
    _link: BpfLink,
    _program: Program,
    sockets: Map,
    addresses: Map,
    counters: Map,
    /// Frames of ours without a socket when all sockets were in place.
    unowned_before: u64,
    current: BTreeSet<IpAddr>,
    /// True in the driver, false in the network stack.
    pub native: bool,
    /// Set when native was wanted and generic was got.
    pub fallback: Option<Fallback>,
}

impl Attachment {
    /// Loads the program and attaches it to `link`. Until sockets and addresses are added, it passes everything.
    /// With `frags`, frames may come in several buffers.
    pub fn new(link: &Link, rx_queues: u32, mode: XdpMode, frags: bool) -> Result<Self, PortError> {
        let step = |step: &'static str| move |errno: Errno| load_error(&link.name, step, errno, "");
        let sockets =
            Map::new(MapKind::Xsk, "ferroce_xsks", 4, 4, rx_queues).map_err(step("BPF map of sockets"))?;
        let addresses = Map::new(MapKind::Hash, "ferroce_addrs", 16, 1, MAX_ADDRESSES)
            .map_err(step("BPF map of addresses"))?;
        let counters = Map::new(MapKind::Array, "ferroce_counts", 4, 8, COUNTERS)
            .map_err(step("BPF map of counters"))?;
        let code = assemble(sockets.fd(), addresses.fd(), counters.fd());
        let program = Program::load(&own_name(), &code, frags).map_err(|(errno, log)| {
            let mut error = load_error(&link.name, "BPF program", errno, &log);
            if frags && errno == Errno::INVAL {
                error.attribute = MULTI_BUFFER.to_string();
            }
            error
        })?;
        let (bpf_link, native, fallback) = attach(&program, link, mode)?;
        Ok(Attachment {
            _link: bpf_link,
            _program: program,
            sockets,
            addresses,
            counters,
            unowned_before: 0,
            current: BTreeSet::new(),
            native,
            fallback,
        })
    }

    /// Frames of receive queue `queue` go to `socket` from now on.
    pub fn add_socket(&self, queue: u32, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        self.sockets.update(&queue.to_ne_bytes(), &socket.as_raw_fd().to_ne_bytes())
    }

    /// From now on a frame on a queue without a socket is a fault, not a start-up effect.
    pub fn start_counting(&mut self) {
        self.unowned_before = self.unowned_total();
    }

    /// Frames of ours that arrived on a queue that nobody owns.
    pub fn unowned(&self) -> u64 {
        self.unowned_total().saturating_sub(self.unowned_before)
    }

    /// Frames that were not ours and stayed with the kernel.
    pub fn not_ours(&self) -> u64 {
        self.total(NOT_OURS)
    }

    fn unowned_total(&self) -> u64 {
        self.total(UNOWNED)
    }

    fn total(&self, place: u32) -> u64 {
        let one = |queue: u32| self.counters.lookup_u64(&(queue * LINE + place).to_ne_bytes()).unwrap_or(0);
        (0..COUNTED_QUEUES).map(one).sum()
    }

    /// Takes frames for these addresses and no others.
    pub fn set_addresses(&mut self, wanted: &BTreeSet<IpAddr>) -> Result<(), Errno> {
        for gone in self.current.difference(wanted).copied().collect::<Vec<_>>() {
            match self.addresses.delete(&address_key(gone)) {
                Ok(()) | Err(Errno::NOENT) => self.current.remove(&gone),
                Err(errno) => return Err(errno),
            };
        }
        for new in wanted.difference(&self.current).copied().collect::<Vec<_>>() {
            self.addresses.update(&address_key(new), &[1])?;
            self.current.insert(new);
        }
        Ok(())
    }
}

/// Name of our program: at most 15 bytes in the kernel, and process numbers have at most 7 digits.
fn own_name() -> String {
    format!("{NAME_PREFIX}{}", std::process::id())
}

fn attach(
    program: &Program,
    link: &Link,
    mode: XdpMode,
) -> Result<(BpfLink, bool, Option<Fallback>), PortError> {
    let native = match mode {
        XdpMode::Generic => None,
        XdpMode::Native | XdpMode::Auto => match attach_patiently(program, link, ATTACH_NATIVE) {
            Ok(bpf_link) => return Ok((bpf_link, true, None)),
            Err(errno @ (Errno::BUSY | Errno::EXIST | Errno::PERM | Errno::NODEV)) => {
                return Err(attach_error(link, "native", errno));
            }
            Err(errno) if mode == XdpMode::Native => return Err(attach_error(link, "native", errno)),
            Err(errno) => Some(errno),
        },
    };
    let bpf_link = attach_patiently(program, link, ATTACH_GENERIC)
        .map_err(|errno| attach_error(link, "generic", errno))?;
    let fallback = native.map(|errno| Fallback {
        wanted: "native XDP".to_string(),
        got: "generic XDP".to_string(),
        reason: native_refusal(link, errno),
        hint: "mode = \"generic\" asks for it".to_string(),
    });
    Ok((bpf_link, false, fallback))
}

/// Attaches, and waits a while for a program that nobody needs any more: of this process, or of one that has ended. The
/// kernel detaches it with its last descriptor, of which a child process may hold a copy until it runs its own program.
fn attach_patiently(program: &Program, link: &Link, flags: u32) -> Result<BpfLink, Errno> {
    let deadline = Instant::now() + LEFTOVER_LIMIT;
    loop {
        match program.attach(link.index, flags) {
            Err(Errno::BUSY | Errno::EXIST) if Instant::now() < deadline && is_leftover(link) => {
                std::thread::sleep(LEFTOVER_RETRY);
            }
            other => return other,
        }
    }
}

/// True when the interface is free by now, or has a program of this process or of one that is gone.
fn is_leftover(link: &Link) -> bool {
    let Some(name) = attached_program(link).and_then(program_name) else { return true };
    let Some(process) = name.strip_prefix(NAME_PREFIX) else { return false };
    process == std::process::id().to_string() || !std::path::Path::new("/proc").join(process).exists()
}

/// Number of the program on the interface.
fn attached_program(link: &Link) -> Option<u32> {
    let attached = Netlink::open().ok().and_then(|mut nl| nl.link_by_index(link.index).ok()).flatten();
    attached.and_then(|l| l.xdp).map(|xdp| xdp.program_id).filter(|id| *id != 0)
}

fn native_refusal(link: &Link, errno: Errno) -> String {
    match errno {
        Errno::OPNOTSUPP => format!("the driver of {} has no native XDP", link.name),
        other => format!("the driver of {} refused native XDP at MTU {}: {other}", link.name, link.mtu),
    }
}

fn attach_error(link: &Link, mode: &str, errno: Errno) -> PortError {
    match errno {
        Errno::PERM => missing_capability(&link.name, "attaching the XDP program"),
        Errno::BUSY | Errno::EXIST => error(
            "interface",
            link.name.clone(),
            format!("an interface that is free: this one is in use by {}", holder(link)),
            "one appliance per interface; stop the other, or give this one another interface",
        ),
        Errno::NODEV => error("interface", link.name.clone(), "an interface that is there".to_string(), ""),
        other => error(
            "mode",
            format!("{mode} on {}", link.name),
            native_refusal(link, other),
            "mode = \"auto\" takes generic where it has to and says so; native XDP may need an MTU below a page",
        ),
    }
}

/// Who has the interface, in words.
fn holder(link: &Link) -> String {
    let Some(id) = attached_program(link) else { return "another XDP program".to_string() };
    match program_name(id) {
        Some(name) => match name.strip_prefix(NAME_PREFIX) {
            Some(process) => format!("another ferroce, process {process} (XDP program {name}, id {id})"),
            None => format!("XDP program {name:?}, id {id}"),
        },
        None => format!("XDP program id {id}"),
    }
}

fn load_error(interface: &str, step: &'static str, errno: Errno, log: &str) -> PortError {
    if errno == Errno::PERM {
        return missing_capability(interface, step);
    }
    let last = log.lines().rev().find(|line| !line.starts_with("processed")).unwrap_or_default();
    error("kernel", format!("{step} for {interface}"), format!("the kernel answered {errno} {last}"), "")
}

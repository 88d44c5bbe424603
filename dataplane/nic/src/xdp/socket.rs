//! One AF_XDP socket: its memory, its rings, and binding it to a receive queue.
//!
//! Owns the order in which these are made and end: the rings are unmapped and the descriptor is closed before the
//! memory goes back to its arena. Called at set-up; the queue then works on the parts.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::xdp::{
    SocketAddrXdp, SocketAddrXdpFlags, XdpOptionsFlags, XdpStatistics, XdpUmemReg, XdpUmemRegFlags,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use ferroce_mem::os::Arena;

use super::ring::{CompletionRing, FillRing, RxRing, TxRings};
use super::umem::{CHUNK_BYTES, Division, Slot, Umem};
use super::{MULTI_BUFFER, ZeroCopy, error};
use crate::port::PortError;

/// How long binding may wait for the queue of a socket that was just closed: the kernel frees it from a work queue.
const BUSY_LIMIT: Duration = Duration::from_secs(2);
const BUSY_RETRY: Duration = Duration::from_millis(20);
/// Completion entries of a socket that never sends; the kernel wants a ring all the same.
const IDLE_COMPLETIONS: u32 = 16;

/// What a socket is made of.
pub(super) struct SocketPlan<'p> {
    /// Interface name, for errors.
    pub interface: &'p str,
    /// Interface index.
    pub index: u32,
    /// Receive queue.
    pub queue: u32,
    /// Entries of the receive ring, and chunks to receive into.
    pub rx_ring: u32,
    /// Frames to send that may be on their way; 0 for a socket that never sends.
    pub tx_ring: u32,
    /// Chunks of the longest frame; more than 1 asks the kernel for frames over several buffers.
    pub parts: u32,
    /// What is wanted.
    pub zero_copy: ZeroCopy,
    /// False where there can be none (generic mode).
    pub may_zero_copy: bool,
}

impl SocketPlan<'_> {
    /// Division of the UMEM.
    pub const fn division(&self) -> Division {
        Division { receive: self.rx_ring, slots: self.tx_ring, slot_chunks: self.parts }
    }

    /// Entries of the transmit and completion rings: each frame takes one for each of its chunks.
    const fn tx_entries(&self) -> u32 {
        (self.tx_ring * self.parts).next_power_of_two()
    }

    /// Entries of the fill ring: two for each receive chunk. The kernel shows a burst in the receive ring before it
    /// says that it took the burst's chunks from the fill ring, so for a moment a chunk that comes back needs another
    /// entry than the one that it left by. A chunk that finds none would be lost for good.
    pub const fn fill_entries(rx_ring: u32) -> u32 {
        rx_ring.saturating_mul(2)
    }
}

/// Descriptor and memory: shared by the queue, which works on it, and the port, which reads the statistics.
pub(super) struct SocketCore {
    // In this order: closed, then given back.
    fd: OwnedFd,
    pub umem: Umem,
}

impl SocketCore {
    /// The descriptor.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The kernel's statistics of this socket.
    pub fn statistics(&self) -> Option<XdpStatistics> {
        sockopt::xdp_statistics(&self.fd).ok()
    }
}

/// The sending half.
pub(super) struct Sender {
    pub rings: TxRings,
    /// Slots to write the next frames into.
    pub free: Vec<Slot>,
    /// The frame being written.
    pub reserved: Option<Slot>,
}

/// A bound socket.
pub(super) struct Socket {
    pub rx: RxRing,
    pub fill: FillRing,
    pub sender: Option<Sender>,
    /// Keeps the completion ring of a socket that never sends mapped; never read.
    _completions: Option<CompletionRing>,
    pub core: Arc<SocketCore>,
    /// True when the driver works without copies.
    pub zero_copy: bool,
    /// Why it does not, if that was wanted.
    pub why_copy: Option<String>,
}

impl Socket {
    /// Makes a socket with its memory from `arena` and binds it.
    pub fn open(plan: &SocketPlan<'_>, arena: &Arena) -> Result<Self, PortError> {
        let what = |step: &'static str| move |errno| set_up(plan, step, errno);
        let fd = rustix::net::socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None)
            .map_err(what("AF_XDP socket"))?;
        let division = plan.division();
        let bytes = division.bytes();
        let block = arena.alloc(bytes, CHUNK_BYTES as usize).map_err(|e| {
            error(
                "memory",
                format!("{bytes} bytes for queue {} of {}", plan.queue, plan.interface),
                e.to_string(),
                "",
            )
        })?;
        let (umem, mut chunks, slots) = Umem::new(block, division);
        let registration = XdpUmemReg {
            addr: umem.address(),
            len: umem.len(),
            chunk_size: CHUNK_BYTES,
            headroom: 0,
            flags: XdpUmemRegFlags::empty(),
            tx_metadata_len: 0,
        };
        sockopt::set_xdp_umem_reg(&fd, registration).map_err(what("UMEM registration"))?;
        let completions = if plan.tx_ring == 0 { IDLE_COMPLETIONS } else { plan.tx_entries() };
        let fill_entries = SocketPlan::fill_entries(plan.rx_ring);
        sockopt::set_xdp_umem_fill_ring_size(&fd, fill_entries).map_err(what("fill ring"))?;
        sockopt::set_xdp_umem_completion_ring_size(&fd, completions).map_err(what("completion ring"))?;
        sockopt::set_xdp_rx_ring_size(&fd, plan.rx_ring).map_err(what("receive ring"))?;
        if plan.tx_ring != 0 {
            sockopt::set_xdp_tx_ring_size(&fd, plan.tx_entries()).map_err(what("transmit ring"))?;
            // In copy mode the frames in flight count against the send buffer; all of the ring may be in flight.
            let in_flight = plan.tx_entries() as usize * 2 * CHUNK_BYTES as usize;
            sockopt::set_socket_send_buffer_size_force(&fd, in_flight).map_err(what("send buffer"))?;
        }
        let offsets = sockopt::xdp_mmap_offsets(&fd).map_err(what("ring offsets"))?;
        let mut fill =
            FillRing::map(fd.as_fd(), &offsets.fr, fill_entries).map_err(what("mapping the fill ring"))?;
        let rx =
            RxRing::map(fd.as_fd(), &offsets.rx, plan.rx_ring).map_err(what("mapping the receive ring"))?;
        let completions = CompletionRing::map(fd.as_fd(), &offsets.cr, completions)
            .map_err(what("mapping the completion ring"))?;
        let (rings, idle) = if plan.tx_ring == 0 {
            (None, Some(completions))
        } else {
            let slots = (plan.tx_ring, division.slot_bytes());
            let rings = TxRings::map(fd.as_fd(), &offsets.tx, plan.tx_entries(), completions, slots);
            (Some(rings.map_err(what("mapping the transmit ring"))?), None)
        };

        for _ in 0..plan.rx_ring {
            if let Some(Err(chunk)) = chunks.pop().map(|chunk| fill.push(chunk)) {
                chunks.push(chunk);
                break;
            }
        }
        fill.publish();
        let core = SocketCore { fd, umem };
        let (zero_copy, why_copy) = bind(plan, core.fd())?;
        if zero_copy {
            core.umem.set_zero_copy();
        }
        let sender = rings.map(|rings| Sender { rings, free: slots, reserved: None });
        Ok(Socket { rx, fill, sender, _completions: idle, core: Arc::new(core), zero_copy, why_copy })
    }
}

/// Binds as the plan wants; returns whether without copies, and why not if that was wanted.
fn bind(plan: &SocketPlan<'_>, fd: BorrowedFd<'_>) -> Result<(bool, Option<String>), PortError> {
    let mut why = None;
    if plan.zero_copy != ZeroCopy::Off {
        let refusal = if plan.may_zero_copy {
            match bind_patiently(plan, fd, SocketAddrXdpFlags::XDP_ZEROCOPY) {
                Ok(()) => None,
                Err(Errno::OPNOTSUPP) if plan.parts > 1 => {
                    Some("driver has no zero-copy for frames over several buffers".to_string())
                }
                Err(Errno::OPNOTSUPP) => Some("driver has no zero-copy".to_string()),
                Err(errno @ (Errno::BUSY | Errno::PERM | Errno::NODEV)) => {
                    return Err(set_up(plan, "bind", errno));
                }
                Err(errno) => Some(format!("driver refused zero-copy on queue {}: {errno}", plan.queue)),
            }
        } else {
            Some("generic mode has no zero-copy".to_string())
        };
        match refusal {
            None => {
                let options = sockopt::xdp_options(fd).unwrap_or(XdpOptionsFlags::XDP_OPTIONS_ZEROCOPY);
                return Ok((options.contains(XdpOptionsFlags::XDP_OPTIONS_ZEROCOPY), None));
            }
            Some(reason) if plan.zero_copy == ZeroCopy::Must => {
                return Err(error(
                    "zero-copy",
                    format!("must, on {}", plan.interface),
                    format!("copy: {reason}"),
                    "zero-copy = \"auto\" takes copy mode where it has to and says so",
                ));
            }
            Some(reason) => why = Some(reason),
        }
    }
    bind_patiently(plan, fd, SocketAddrXdpFlags::XDP_COPY).map_err(|errno| set_up(plan, "bind", errno))?;
    Ok((false, why))
}

/// Binds, and tries again for a while if the queue is busy.
fn bind_patiently(plan: &SocketPlan<'_>, fd: BorrowedFd<'_>, flags: SocketAddrXdpFlags) -> Result<(), Errno> {
    let mut flags = flags | SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP;
    flags.set(SocketAddrXdpFlags::XDP_USE_SG, plan.parts > 1);
    let address = SocketAddrXdp::new(flags, plan.index, plan.queue);
    let deadline = Instant::now() + BUSY_LIMIT;
    loop {
        match rustix::net::bind(fd, &address) {
            Err(Errno::BUSY) if Instant::now() < deadline => std::thread::sleep(BUSY_RETRY),
            other => return other,
        }
    }
}

/// The error of a step, in the words of the one who has to mend it.
fn set_up(plan: &SocketPlan<'_>, step: &str, errno: Errno) -> PortError {
    let queue = format!("queue {} of {}", plan.queue, plan.interface);
    match errno {
        Errno::PERM => super::rights::missing_capability(plan.interface, step),
        Errno::BUSY => error(
            "interface",
            queue,
            format!(
                "a queue that is free: this one is in use by another AF_XDP socket (tried for {} s)",
                BUSY_LIMIT.as_secs()
            ),
            "stop the program that has it: ss --xdp shows it",
        ),
        Errno::NOBUFS => {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
            let limit = limit.map_or("unlimited".to_string(), |bytes| format!("{bytes} bytes"));
            let bytes = plan.division().bytes();
            error(
                "memlock",
                format!("{bytes} pinned bytes for {queue}"),
                format!("{limit} for all processes of this user"),
                "raise RLIMIT_MEMLOCK (LimitMEMLOCK= in the unit) or give CAP_IPC_LOCK",
            )
        }
        Errno::INVAL | Errno::OPNOTSUPP if step == "bind" && plan.parts > 1 => error(
            MULTI_BUFFER,
            queue,
            format!("frames of one buffer: the kernel answered {errno}"),
            "Linux 6.6 and later have frames over several buffers",
        ),
        Errno::INVAL if step == "bind" => error(
            "queues",
            queue,
            "a receive queue that the interface has now".to_string(),
            "the number of queues changed: ethtool -l shows it; start again",
        ),
        Errno::NETDOWN => {
            error("interface", queue, "an interface that is up".to_string(), "ip link set ... up")
        }
        Errno::AFNOSUPPORT => {
            error("kernel", "AF_XDP".to_string(), "a kernel built with CONFIG_XDP_SOCKETS".to_string(), "")
        }
        other => error("interface", format!("{queue}: {step}"), format!("the kernel answered {other}"), ""),
    }
}

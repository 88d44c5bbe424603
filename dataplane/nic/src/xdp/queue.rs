//! A worker's share of the port: one or more AF_XDP sockets, the first of which also sends.
//!
//! Owns the sockets' rings. Invariant: chunks of received frames go back to the fill ring of the socket that they came
//! from, in the same call; a frame is either pushed whole into the transmit ring or not at all. A frame of several
//! chunks is lent as a head and the pieces that the chunks hold. Called by one worker,
//! every pass. Makes a system call only where the kernel asks for one by its need-wakeup flag, and counts it.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use ferroce_mem::Payload;

use super::socket::Socket;
use super::umem::{Chunk, MAX_PARTS, Umem};
use crate::frame::{HEAD_BYTES, RxFrame, TxFrame};
use crate::port::PortQueue;

/// Most kicks in one flush: a kick in copy mode sends up to 32 frames.
const MAX_KICKS: u32 = 64;

/// What one queue and housekeeping tell each other: the counters are written by the worker, the rest by housekeeping.
#[derive(Default)]
pub(super) struct QueueShared {
    /// Longest frame that may be sent: Ethernet header and MTU.
    pub longest: AtomicU32,
    /// The link is down: what is committed is lost at once instead of filling the ring with what will be stale.
    pub no_carrier: AtomicBool,
    pub rx_frames: Counter,
    pub rx_bytes: Counter,
    /// Frames that came in several chunks.
    pub rx_segmented: Counter,
    pub rx_bad: Counter,
    pub rx_kicks: Counter,
    pub tx_frames: Counter,
    pub tx_bytes: Counter,
    pub tx_kicks: Counter,
    pub tx_kick_errors: Counter,
    pub tx_device_drops: Counter,
    pub tx_oversize: Counter,
    pub tx_no_room: Counter,
    pub tx_no_carrier: Counter,
}

/// A number with one writer.
#[derive(Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    fn add(&self, n: u64) {
        // One writer: no read-modify-write needed.
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// The number.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// One worker's receive and transmit queue.
pub struct XdpQueue {
    sockets: Vec<Socket>,
    /// The socket that is served first in the next burst, so that none starves.
    next: usize,
    shared: Arc<QueueShared>,
    /// Frames were committed that the kernel has not taken yet.
    unsent: bool,
    /// The last kick found the interface down: pending frames wait without keeping the worker awake.
    interface_down: bool,
}

impl XdpQueue {
    /// A queue over `sockets`, the first of which sends.
    pub(super) fn new(sockets: Vec<Socket>, shared: Arc<QueueShared>) -> Self {
        assert!(sockets.first().is_some_and(|s| s.sender.is_some()), "the first socket of a queue sends");
        XdpQueue { sockets, next: 0, shared, unsent: false, interface_down: false }
    }

    fn longest(&self) -> u32 {
        self.shared.longest.load(Ordering::Relaxed)
    }

    /// Makes the kernel send; returns the frames it left.
    fn kick(&mut self) -> u32 {
        let Some((socket, counters)) = self.sockets.first_mut().map(|s| (s, &self.shared)) else {
            return 0;
        };
        let Some(sender) = socket.sender.as_mut() else { return 0 };
        self.interface_down = false;
        let mut pending = sender.rings.pending();
        for _ in 0..MAX_KICKS {
            if pending == 0 || !sender.rings.needs_wakeup() {
                break;
            }
            counters.tx_kicks.add(1);
            match rustix::net::send(socket.core.fd(), &[], SendFlags::DONTWAIT) {
                Ok(_) | Err(Errno::AGAIN) => {}
                // The device dropped the frame that was its turn; the frames behind it go on.
                Err(Errno::BUSY) => counters.tx_device_drops.add(1),
                Err(Errno::NOBUFS) => sender.rings.reclaim(&mut sender.free),
                Err(errno) => {
                    counters.tx_kick_errors.add(1);
                    self.interface_down = matches!(errno, Errno::NETDOWN | Errno::NXIO);
                    break;
                }
            }
            let left = sender.rings.pending();
            if left == pending {
                break;
            }
            pending = left;
        }
        pending
    }
}

/// Takes at most `max` frames of one socket.
fn receive<F: FnMut(RxFrame<'_>)>(
    socket: &mut Socket,
    counters: &QueueShared,
    max: usize,
    f: &mut F,
) -> usize {
    let mut bytes = 0u64;
    let mut count = 0;
    while count < max {
        let Some(parts) = socket.rx.next_frame() else { break };
        count += 1;
        if parts > 1 {
            bytes += gather(socket, counters, parts, f);
            continue;
        }
        let Some((chunk, offset, len)) = socket.rx.pop() else { break };
        match socket.core.umem.bytes(&chunk, offset, len) {
            Some(frame) => {
                let (head, rest) = frame.split_at(frame.len().min(HEAD_BYTES));
                bytes += u64::from(len);
                f(RxFrame { head, rest: Payload::from_slice(rest), timestamp_ns: 0 });
            }
            None => counters.rx_bad.add(1),
        }
        give_back(socket, chunk);
    }
    if count != 0 {
        socket.fill.publish();
        socket.rx.release();
        counters.rx_frames.add(count as u64);
        counters.rx_bytes.add(bytes);
    } else if socket.zero_copy && socket.fill.needs_wakeup() {
        counters.rx_kicks.add(1);
        let _ = rustix::net::recv(socket.core.fd(), &mut [0u8; 0][..], RecvFlags::DONTWAIT);
    }
    count
}

fn give_back(socket: &mut Socket, chunk: Chunk) {
    // The ring has two entries for each receive chunk (`SocketPlan::fill_entries`), so it takes this one back.
    let returned = socket.fill.push(chunk);
    debug_assert!(returned.is_ok(), "the fill ring has room for all its chunks");
}

/// A chunk of a frame, with the place of its bytes.
type Part = (Chunk, u32, u32);

/// Takes one frame of `parts` descriptors; returns its bytes.
#[cold]
fn gather<F: FnMut(RxFrame<'_>)>(socket: &mut Socket, counters: &QueueShared, parts: u32, f: &mut F) -> u64 {
    let mut held: [Option<Part>; MAX_PARTS as usize] = [const { None }; MAX_PARTS as usize];
    for at in 0..parts as usize {
        let Some(part) = socket.rx.pop() else { break };
        match held.get_mut(at) {
            Some(place) => *place = Some(part),
            None => give_back(socket, part.0),
        }
    }
    let whole = if parts <= MAX_PARTS { frame_of(&socket.core.umem, &held) } else { None };
    let bytes = whole.as_ref().map_or(0, |frame| frame.len() as u64);
    match whole {
        Some(frame) => {
            counters.rx_segmented.add(1);
            f(frame);
        }
        None => counters.rx_bad.add(1),
    }
    for (chunk, ..) in held.into_iter().flatten() {
        give_back(socket, chunk);
    }
    bytes
}

/// The frame that the parts make: the head lies in the first one. `None` if a part is not inside its chunk or the first
/// one is shorter than a head.
fn frame_of<'c>(umem: &'c Umem, parts: &'c [Option<Part>]) -> Option<RxFrame<'c>> {
    let mut parts = parts.iter().flatten();
    let (chunk, offset, len) = parts.next()?;
    let (head, first) = umem.bytes(chunk, *offset, *len)?.split_at_checked(HEAD_BYTES)?;
    let mut rest = Payload::from_slice(first);
    for (chunk, offset, len) in parts {
        if !rest.push_slice(umem.bytes(chunk, *offset, *len)?) {
            return None;
        }
    }
    Some(RxFrame { head, rest, timestamp_ns: 0 })
}

impl PortQueue for XdpQueue {
    fn rx_burst<F: FnMut(RxFrame<'_>)>(&mut self, max: usize, mut f: F) -> usize {
        let sockets = self.sockets.len();
        let mut done = 0;
        for turn in 0..sockets {
            let at = (self.next + turn) % sockets;
            if let Some(socket) = self.sockets.get_mut(at) {
                done += receive(socket, &self.shared, max - done, &mut f);
            }
            if done == max {
                break;
            }
        }
        self.next = (self.next + 1) % sockets;
        done
    }

    fn tx_reserve(&mut self, len: usize) -> Option<TxFrame<'_>> {
        let Some(bytes) = u32::try_from(len).ok().filter(|bytes| *bytes <= self.longest()) else {
            self.shared.tx_oversize.add(1);
            return None;
        };
        let socket = self.sockets.first_mut()?;
        let sender = socket.sender.as_mut()?;
        if sender.reserved.is_none() {
            if sender.free.is_empty() {
                sender.rings.reclaim(&mut sender.free);
            }
            sender.reserved = sender.free.pop();
        }
        let Some(slot) = sender.reserved.as_mut() else {
            self.shared.tx_no_room.add(1);
            return None;
        };
        let buf = socket.core.umem.target(slot, bytes)?;
        Some(TxFrame { buf })
    }

    fn tx_commit(&mut self, len: usize) {
        let Some(socket) = self.sockets.first_mut() else { return };
        let longest = socket.core.umem.slot_bytes();
        let Some(sender) = socket.sender.as_mut() else { return };
        let Some(slot) = sender.reserved.take() else { return };
        let Some(bytes) = u32::try_from(len).ok().filter(|bytes| (1..=longest).contains(bytes)) else {
            self.shared.tx_oversize.add(1);
            sender.reserved = Some(slot);
            return;
        };
        if self.shared.no_carrier.load(Ordering::Relaxed) {
            self.shared.tx_no_carrier.add(1);
            sender.reserved = Some(slot);
            return;
        }
        match sender.rings.push(slot, bytes) {
            Ok(()) => {
                self.shared.tx_frames.add(1);
                self.shared.tx_bytes.add(len as u64);
                self.unsent = true;
            }
            // Only if the kernel gave a slot back before it said that it took its entries: the frame is lost, counted.
            Err(slot) => {
                self.shared.tx_no_room.add(1);
                sender.free.push(slot);
            }
        }
    }

    fn tx_flush(&mut self) {
        if !self.unsent {
            return;
        }
        if let Some(sender) = self.sockets.first_mut().and_then(|s| s.sender.as_mut()) {
            sender.rings.publish();
        }
        self.unsent = self.kick() != 0;
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.sockets.iter().map(|s| s.core.fd()).collect()
    }

    fn arm_wakeup(&mut self) -> bool {
        // The descriptors are readable whenever the receive ring is not empty, so there is nothing to ask for; the
        // fence is the contract's.
        std::sync::atomic::fence(Ordering::SeqCst);
        let waiting = self.sockets.iter_mut().any(|s| s.rx.waits());
        if self.unsent {
            self.tx_flush();
        }
        // Frames that the kernel would not take yet need another kick soon, unless the interface is down.
        !waiting && (!self.unsent || self.interface_down)
    }

    fn disarm_wakeup(&mut self) {}
}

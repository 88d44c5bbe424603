//! `shm`: frames between two processes on one host, over shared memory, without any privilege.
//!
//! Both sides are configured alike with the path of a link. Whoever gets the lock beside it listens there, the other
//! one connects; they exchange who they are, share one sealed memfd with two rings per queue, and watch the socket for
//! each other's death. Queue `i` of one side is joined to queue `i` of the other. Without a peer the link is down, as
//! a cable without one: frames to send are dropped and counted, and the port takes whoever comes next.
//! Invariant: no step on a worker waits, locks or makes a system call, except to ring or answer a doorbell around a
//! sleep; nothing that the peer writes is trusted. Called by a worker ([`ShmQueue`]) and by housekeeping
//! ([`ShmPort`]). Never looks inside a frame.

mod hello;
mod port;
mod queue;
mod rendezvous;
mod ring;
mod sys;
mod wake;

use std::net::IpAddr;
use std::path::PathBuf;

pub use port::{ShmPort, pair};
pub use queue::ShmQueue;

use crate::port::PortError;
use ring::{Geometry, MAX_FRAME};

/// Any bytes as a message of a peer, for the fuzz targets: false if what was taken does not come out of encoding and
/// decoding unchanged, or is checked differently then.
#[doc(hidden)]
pub fn try_message(bytes: &[u8]) -> bool {
    let Ok(hello::Message::Hello(theirs)) = hello::Message::decode(bytes) else { return true };
    let again = hello::Message::Hello(theirs.clone()).encode();
    let ours = hello::Hello { mac: [2, 0, 0, 0, 0, 1], addresses: Vec::new(), ..theirs.clone() };
    let fits = ours.check(&theirs, "a peer").is_ok();
    hello::Message::decode(&again) == Ok(hello::Message::Hello(theirs.clone()))
        && fits == (theirs.mac != ours.mac)
}

/// Most queues of a link.
pub const MAX_QUEUES: u16 = 64;
/// Bytes of an Ethernet header: a frame is as much longer than the MTU.
pub(crate) const ETHERNET_BYTES: usize = 14;
/// Smallest and largest ring in bytes.
const RING_BYTES: std::ops::RangeInclusive<u32> = (64 << 10)..=(64 << 20);
/// Largest MTU.
const MAX_MTU: u32 = (MAX_FRAME - ETHERNET_BYTES) as u32;
/// Smallest MTU: the least that IPv6 asks of a link is 1280, but RoCE runs with 352.
const MIN_MTU: u32 = 352;
/// A ring must hold so many of the longest frames, or it would stop and go.
const MIN_FRAMES: u64 = 4;
/// Longest path of a Unix socket, less the final zero.
const MAX_PATH: usize = 107;

/// What a port is made of.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShmConfig {
    /// Path of the link's socket, the same on both sides; the lock is beside it (`.lock`).
    pub link: PathBuf,
    /// Ethernet address; `None` takes a random one.
    pub mac: Option<[u8; 6]>,
    /// IP addresses with their prefix lengths.
    pub addresses: Vec<(IpAddr, u8)>,
    /// MTU in bytes, the same on both sides.
    pub mtu: u32,
    /// Queue pairs, the same on both sides: one per worker.
    pub queues: u16,
    /// Bytes of each ring: a power of two, 64 KiB to 64 MiB. The side that listens decides.
    pub ring_bytes: u32,
    /// Workers may sleep (idle policy `adaptive`). Where they never do, the peer's flushes are cheaper.
    pub can_sleep: bool,
}

impl ShmConfig {
    /// One queue, MTU 9000, rings of 1 MiB, no addresses.
    pub fn new(link: impl Into<PathBuf>) -> ShmConfig {
        ShmConfig {
            link: link.into(),
            mac: None,
            addresses: Vec::new(),
            mtu: 9000,
            queues: 1,
            ring_bytes: 1 << 20,
            can_sleep: true,
        }
    }

    /// Checks all values, and gives the geometry and the longest frame.
    fn check(&self) -> Result<(Geometry, usize), PortError> {
        let refuse = |attribute: &str, asked: String, allowed: String, hint: &str| {
            Err(PortError { attribute: attribute.into(), asked, allowed, hint: hint.into() })
        };
        let path = self.link.as_os_str().len() + ".lock".len();
        if path > MAX_PATH {
            let allowed = format!("{} bytes", MAX_PATH - ".lock".len());
            let asked = format!("a path of {} bytes", self.link.as_os_str().len());
            return refuse("link", asked, allowed, "choose a shorter path, for example below /run or /tmp");
        }
        if self.link.file_name().is_none() {
            return refuse("link", self.link.display().to_string(), "the path of a socket".into(), "");
        }
        if !(1..=MAX_QUEUES).contains(&self.queues) {
            return refuse("queues", self.queues.to_string(), format!("1 to {MAX_QUEUES}"), "");
        }
        if !(MIN_MTU..=MAX_MTU).contains(&self.mtu) {
            return refuse("mtu", self.mtu.to_string(), format!("{MIN_MTU} to {MAX_MTU}"), "");
        }
        if self.mac.is_some_and(|mac| mac[0] & 1 == 1 || mac == [0; 6]) {
            let mac = hello::mac_text(self.mac.unwrap_or_default());
            return refuse("mac", mac, "a unicast address".into(), "leave mac out for a random one");
        }
        if self.addresses.len() > hello::MAX_ADDRESSES {
            let allowed = format!("up to {}", hello::MAX_ADDRESSES);
            return refuse("addresses", self.addresses.len().to_string(), allowed, "");
        }
        let too_long = |(ip, prefix): &&(IpAddr, u8)| *prefix > if ip.is_ipv4() { 32 } else { 128 };
        if let Some((ip, prefix)) = self.addresses.iter().find(too_long) {
            return refuse("addresses", format!("{ip}/{prefix}"), "prefixes up to 32 or 128".into(), "");
        }
        let max_frame = self.mtu as usize + ETHERNET_BYTES;
        check_ring(self.ring_bytes, max_frame)?;
        Ok((Geometry { queues: self.queues, ring_bytes: self.ring_bytes }, max_frame))
    }
}

/// Checks the size of a ring, ours or a peer's.
fn check_ring(ring_bytes: u32, max_frame: usize) -> Result<(), PortError> {
    let least =
        (MIN_FRAMES * (max_frame as u64 + 64)).next_power_of_two().max(u64::from(*RING_BYTES.start()));
    if ring_bytes.is_power_of_two() && RING_BYTES.contains(&ring_bytes) && u64::from(ring_bytes) >= least {
        return Ok(());
    }
    Err(PortError {
        attribute: "ring_bytes".into(),
        asked: ring_bytes.to_string(),
        allowed: format!("a power of two from {least} (for this mtu) to {}", RING_BYTES.end()),
        hint: String::new(),
    })
}

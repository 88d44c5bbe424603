//! The housekeeping thread: unpinned, a few times a second, all that workers must not do.
//!
//! Owns a thread that lets the port attach peers and notice link changes, and passes what it sees to the device as a
//! snapshot. Invariant: it ends within one period after [`Housekeeper::stop`]. Started by the daemon and by tools. Never
//! touches a frame.

use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferroce_nic::Port;
use ferroce_verbs::{Gid, MacAddr, VerbsError};

use crate::config::{EngineError, NetdevInfo};
use crate::device::{SoftDevice, lock};
use crate::follow::Follower;

/// How often housekeeping looks, unless told otherwise.
pub const PERIOD: Duration = Duration::from_millis(100);

/// What a port says of itself, as the engine wants it.
pub fn netdev_of(port: &impl Port) -> (NetdevInfo, Vec<Gid>) {
    let caps = port.caps();
    let info = NetdevInfo { mac: MacAddr(caps.mac), mtu: caps.mtu, link_up: port.link_up() };
    let gids = port.addresses().into_iter().map(|(ip, _): (IpAddr, u8)| Gid::from_ip(ip)).collect();
    (info, gids)
}

/// One round of housekeeping: the port is looked after and told which groups are wanted, the device hears of what
/// changed, and paths follow.
///
/// # Errors
/// A worker did not take the news in time.
pub fn round(port: &mut impl Port, device: &SoftDevice, follower: &mut Follower) -> Result<(), VerbsError> {
    port.housekeep();
    let groups: Vec<IpAddr> = device.multicast_groups().into_iter().map(Gid::to_ip).collect();
    port.set_groups(&groups);
    let (info, gids) = netdev_of(port);
    let told = device.set_netdev(info, gids);
    follower.round(port, device);
    told
}

/// A housekeeping thread.
pub struct Housekeeper {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Housekeeper {
    /// Starts it for one port and one device. The port is shared with those who resolve addresses.
    pub fn start<P: Port + Send + 'static>(
        port: Arc<Mutex<P>>,
        device: SoftDevice,
        period: Duration,
    ) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let thread = std::thread::Builder::new().name("housekeeping".into()).spawn(move || {
            let mut follower = Follower::default();
            while !seen.load(Ordering::Acquire) {
                // A worker that does not answer is the watchdog's and control's matter; the next round tells it again only
                // if something changed, and `query_port` has the news in any case.
                let _ = round(&mut *lock(&port), &device, &mut follower);
                std::thread::park_timeout(period);
            }
        })?;
        Ok(Housekeeper { stop, thread: Some(thread) })
    }

    /// Ends the thread.
    ///
    /// # Errors
    /// [`EngineError::Os`] if it did not end within `deadline`: the port's `housekeep` hangs.
    pub fn stop(mut self, deadline: Duration) -> Result<(), EngineError> {
        self.halt(deadline)
    }

    fn halt(&mut self, deadline: Duration) -> Result<(), EngineError> {
        self.stop.store(true, Ordering::Release);
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let until = Instant::now() + deadline;
        while !thread.is_finished() {
            if Instant::now() >= until {
                let source =
                    io::Error::new(io::ErrorKind::TimedOut, "the port's housekeeping does not return");
                return Err(EngineError::Os { what: "housekeeping thread", source });
            }
            thread.thread().unpark();
            std::thread::sleep(Duration::from_micros(500));
        }
        thread.join().map_err(|_| EngineError::Os {
            what: "housekeeping thread",
            source: io::Error::other("it panicked"),
        })
    }
}

impl Drop for Housekeeper {
    fn drop(&mut self) {
        // Stopped already, in the usual case.
        let _ = self.halt(Duration::from_secs(5));
    }
}

//! What the control process knows: its appliances, and whether it is stopping.
//!
//! Owns the links. The invariant: the set of appliances is fixed at start; all else that must outlive this process is
//! in the appliances themselves (owner blobs and cookies). Handlers get it by reference; one thread uses it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Instant;

use ferroce_api::appliance::Counter;
use ferroce_api::rpc::VersionResult;
use ferroce_api::{ApiError, Code, appliance};
use tokio::sync::watch;

use crate::dp_link::Link;

/// Counters of the RPC sockets, since the start.
#[derive(Default)]
pub struct RpcCounters {
    /// Clients taken.
    pub clients: Cell<u64>,
    /// Clients turned away: not admitted, or too many.
    pub clients_refused: Cell<u64>,
    /// Clients cut off: too slow, too long a request, or not our protocol.
    pub clients_cut: Cell<u64>,
    /// Requests answered with a result.
    pub requests_done: Cell<u64>,
    /// Requests answered with an error.
    pub requests_refused: Cell<u64>,
}

/// Adds one.
pub fn count(counter: &Cell<u64>) {
    counter.set(counter.get().wrapping_add(1));
}

/// The state of the control process.
pub struct Control {
    links: Vec<Link>,
    started: Instant,
    stopping: watch::Receiver<bool>,
    /// Counters of the sockets.
    pub counters: RpcCounters,
    /// Cookies of operations that are under way.
    pub under_way: RefCell<BTreeSet<u64>>,
    /// What could not be taken back: appliance and cookie. The janitor tries again.
    pub left_behind: RefCell<BTreeSet<(String, u64)>>,
}

impl Control {
    /// With these links; `stopping` turns true when the process is asked to end.
    pub fn new(links: Vec<Link>, stopping: watch::Receiver<bool>) -> Self {
        Control {
            links,
            started: Instant::now(),
            stopping,
            counters: RpcCounters::default(),
            under_way: RefCell::default(),
            left_behind: RefCell::default(),
        }
    }

    /// All appliances, in the order of the configuration.
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// Place of a link in the configuration: its `ifindex`.
    pub fn index(&self, link: &Link) -> u32 {
        let at = self.links.iter().position(|l| l.name() == link.name());
        at.and_then(|at| u32::try_from(at).ok()).unwrap_or(u32::MAX)
    }

    /// The appliance called `name`.
    ///
    /// # Errors
    /// There is none; the text lists those that there are.
    pub fn link(&self, name: &str) -> Result<&Link, ApiError> {
        self.links.iter().find(|link| link.name() == name).ok_or_else(|| {
            let names: Vec<&str> = self.links.iter().map(Link::name).collect();
            let known = if names.is_empty() {
                "none: no appliance is configured".to_owned()
            } else {
                names.join(", ")
            };
            ApiError::new(Code::NotFound, "dev", name, known)
                .hint("add it to the configuration of ferroce-ctld, or with --appliance")
        })
    }

    /// The one called `name`, or all of them.
    ///
    /// # Errors
    /// As [`Control::link`].
    pub fn select(&self, name: Option<&str>) -> Result<Vec<&Link>, ApiError> {
        match name {
            Some(name) => Ok(vec![self.link(name)?]),
            None => Ok(self.links.iter().collect()),
        }
    }

    /// Ends when the process is asked to end.
    pub async fn stopping(&self) {
        let mut stopping = self.stopping.clone();
        // An error means that the sender is gone, and with it the process.
        let _ = stopping.wait_for(|stop| *stop).await;
    }

    /// True when the process is asked to end.
    pub fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    /// Versions and process.
    pub fn version(&self) -> VersionResult {
        VersionResult {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol: appliance::VERSION,
            pid: std::process::id(),
        }
    }

    /// All counters, links' by device.
    pub fn counter_list(&self) -> Vec<Counter> {
        let c = &self.counters;
        let mut list = vec![
            counter("uptime_ms", u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)),
            counter("clients", c.clients.get()),
            counter("clients_refused", c.clients_refused.get()),
            counter("clients_cut", c.clients_cut.get()),
            counter("requests_done", c.requests_done.get()),
            counter("requests_refused", c.requests_refused.get()),
        ];
        for link in &self.links {
            let (name, l) = (link.name(), link.counters());
            list.extend([
                counter(&format!("{name}.connects"), l.connects),
                counter(&format!("{name}.failures"), l.failures),
                counter(&format!("{name}.requests"), l.requests),
                counter(&format!("{name}.timeouts"), l.timeouts),
                counter(&format!("{name}.late_replies"), l.late_replies),
                counter(&format!("{name}.events"), l.events),
                counter(&format!("{name}.events_lost"), l.events_lost),
            ]);
        }
        list
    }
}

fn counter(name: &str, value: u64) -> Counter {
    Counter { name: name.to_owned(), value }
}

/// Who asks.
#[derive(Clone, Debug)]
pub struct Caller {
    /// User.
    pub uid: u32,
    /// Process, if the kernel knows it.
    pub pid: Option<i32>,
    /// True on the control socket, false on the read-only one.
    pub writable: bool,
    /// Turns true when it has closed its connection: nobody waits for the answer any more.
    pub gone: Rc<Cell<bool>>,
}

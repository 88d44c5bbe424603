//! `perf`: SEND, WRITE and READ latency and bandwidth between two of ours, in perftest's form; the same over kernel TCP
//! and UDP.
//!
//! The client decides the test; what the server was told explicitly must agree. A session is one TCP connection with
//! lines of JSON ([`talk`]); each size is a test of its own with queue pairs of its own ([`session`]).

mod options;
mod print;
mod rdma;
mod session;
mod talk;

use ferroce_services::{PerfReport, PerfSpec, Role};

use crate::fail::{Fail, Outcome};
use crate::json;
use crate::plane::Plane;
use crate::sock::{Kernel, SockTest, UdpEnd};
pub use options::PerfArgs;
use talk::Endpoint;

/// One way to run tests: over RDMA or over kernel sockets.
enum Backend {
    Rdma(Box<rdma::Rdma>),
    Socket(Box<Socket>),
}

struct Socket {
    kernel: Kernel,
    local: std::net::IpAddr,
    remote: std::net::IpAddr,
    core: Option<usize>,
    test: Option<SockTest>,
}

impl Backend {
    /// Prepares a test; the peer needs the answer.
    fn open(&mut self, spec: PerfSpec) -> Outcome<Endpoint> {
        match self {
            Backend::Rdma(rdma) => rdma.open(spec),
            Backend::Socket(socket) => {
                let (test, port, end) = SockTest::open(socket.kernel, spec, socket.local, socket.core)?;
                socket.test = Some(test);
                Ok(match end {
                    None => Endpoint::Tcp { port },
                    Some(end) => {
                        Endpoint::Udp { port: end.port, cookie: end.cookie, window_bytes: end.window_bytes }
                    }
                })
            }
        }
    }

    /// Connects and starts it.
    fn start(&mut self, remote: &Endpoint) -> Outcome<()> {
        match (self, remote) {
            (Backend::Rdma(rdma), Endpoint::Rdma(remote)) => rdma.start(remote),
            (Backend::Socket(socket), &Endpoint::Tcp { port }) => socket.start(port, None),
            (Backend::Socket(socket), &Endpoint::Udp { port, cookie, window_bytes }) => {
                socket.start(port, Some(UdpEnd { port, cookie, window_bytes }))
            }
            _ => Err(Fail::failed("the peer answered with the endpoint of another transport")),
        }
    }

    /// The result, if there is one by now.
    fn poll(&mut self) -> Option<Outcome<PerfReport>> {
        match self {
            Backend::Rdma(rdma) => rdma.poll(),
            Backend::Socket(socket) => {
                let remote = socket.remote;
                let result = socket.test.as_mut()?.poll()?;
                Some(result.map_err(|e| Fail::failed(format!("peer {remote}: {e}"))))
            }
        }
    }

    /// Asks a server's test to end.
    fn ask_stop(&mut self) {
        match self {
            Backend::Rdma(rdma) => rdma.ask_stop(),
            Backend::Socket(socket) => {
                if let Some(test) = &mut socket.test {
                    test.stop();
                }
            }
        }
    }

    /// Ends the test and frees what it had.
    fn close(&mut self) -> Outcome<()> {
        match self {
            Backend::Rdma(rdma) => rdma.close(),
            Backend::Socket(socket) => {
                socket.test = None;
                Ok(())
            }
        }
    }

    fn plane(&self) -> Option<&Plane> {
        match self {
            Backend::Rdma(rdma) => Some(rdma.plane()),
            Backend::Socket(_) => None,
        }
    }

    fn core(&self) -> Option<usize> {
        match self {
            Backend::Rdma(rdma) => rdma.plane().core(),
            Backend::Socket(socket) => socket.core,
        }
    }
}

impl Socket {
    fn start(&mut self, port: u16, end: Option<UdpEnd>) -> Outcome<()> {
        let remote = std::net::SocketAddr::new(self.remote, port);
        match &mut self.test {
            Some(test) => test.start(remote, end),
            None => Err(Fail::failed("the test was not opened")),
        }
    }
}

/// Runs the tool.
pub fn run(args: &PerfArgs) -> Outcome<()> {
    let role = if args.host.is_some() { Role::Client } else { Role::Server };
    args.check()?;
    let outcome = session::run(args, role);
    if let Ok(Some(plane)) = &outcome
        && args.stats
        && !args.json
    {
        json::print_counters(plane);
    }
    match outcome? {
        Some(mut plane) => plane.stop(),
        None => Ok(()),
    }
}

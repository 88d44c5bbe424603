//! What runs a test: our data plane, or the kernel's sockets. One at a time, from open to close.

use std::net::{IpAddr, SocketAddr};

use ferroce_services::{PerfReport, PerfSpec, Role};

use super::options::{PerfArgs, Transport};
use super::plan::Item;
use super::rdma::{Ends, Rdma, ReadsRule};
use super::talk::Endpoint;
use crate::fail::{Fail, Outcome};
use crate::net::Peer;
use crate::plane::Plane;
use crate::sock::{Kernel, SockTest, UdpEnd};

/// One way to run tests.
pub enum Backend {
    /// Over RDMA.
    Rdma(Box<Rdma>),
    /// Over kernel sockets.
    Socket(Box<Socket>),
}

/// Tests over kernel sockets.
pub struct Socket {
    kernel: Kernel,
    local: IpAddr,
    remote: IpAddr,
    core: Option<usize>,
    test: Option<SockTest>,
}

/// Opens what the transport needs before anybody is there.
pub fn open_plane(args: &PerfArgs, transport: Transport, role: Role) -> Outcome<Option<Plane>> {
    match transport {
        Transport::Rdma => Ok(Some(Plane::open(&args.plane, role)?)),
        Transport::Tcp | Transport::Udp => Ok(None),
    }
}

impl Backend {
    /// Makes it. Where it cannot, the data plane is given back.
    pub fn make(
        args: &PerfArgs,
        transport: Transport,
        role: Role,
        plane: &mut Option<Plane>,
        peer: &Peer,
    ) -> Outcome<Backend> {
        let kernel = match transport {
            Transport::Rdma => {
                let like = peer.remote_ip()?;
                let Some(taken) = plane.take() else { return Err(Fail::failed("no data plane was opened")) };
                return match Rdma::new(taken, args.path.gid_index, like) {
                    Ok(rdma) => Ok(Backend::Rdma(Box::new(rdma))),
                    Err((error, back)) => {
                        *plane = Some(*back);
                        Err(error)
                    }
                };
            }
            Transport::Tcp => Kernel::Tcp,
            Transport::Udp => Kernel::Udp,
        };
        let (local, remote) = (peer.local_ip()?, peer.remote_ip()?);
        let core = args.plane.core_for(role)?;
        Ok(Backend::Socket(Box::new(Socket { kernel, local, remote, core, test: None })))
    }

    /// Prepares a test; the peer needs the answer.
    pub fn open(&mut self, item: &Item) -> Outcome<Endpoint> {
        match self {
            Backend::Rdma(rdma) => rdma.open(item).map(Endpoint::Rdma),
            Backend::Socket(socket) => socket.open(item.spec),
        }
    }

    /// Connects and starts it.
    pub fn start(&mut self, spec: PerfSpec, remote: &Endpoint) -> Outcome<()> {
        match (self, remote) {
            (Backend::Rdma(rdma), Endpoint::Rdma(remote)) => {
                rdma.connect(remote, ReadsRule::Smaller)?;
                rdma.start(spec)
            }
            (Backend::Socket(socket), &Endpoint::Tcp { port }) => socket.start(port, None),
            (Backend::Socket(socket), &Endpoint::Udp { port, cookie, window_bytes }) => {
                socket.start(port, Some(UdpEnd { port, cookie, window_bytes }))
            }
            _ => Err(Fail::failed("the peer answered with the endpoint of another transport")),
        }
    }

    /// The result, if there is one by now.
    pub fn poll(&mut self) -> Option<Outcome<PerfReport>> {
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
    pub fn ask_stop(&mut self) {
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
    pub fn close(&mut self) -> Outcome<()> {
        match self {
            Backend::Rdma(rdma) => rdma.close(),
            Backend::Socket(socket) => {
                socket.test = None;
                Ok(())
            }
        }
    }

    /// The data plane, with RDMA.
    pub fn plane(&self) -> Option<&Plane> {
        match self {
            Backend::Rdma(rdma) => Some(rdma.plane()),
            Backend::Socket(_) => None,
        }
    }

    /// Gives the data plane back.
    pub fn into_plane(self) -> Option<Plane> {
        match self {
            Backend::Rdma(rdma) => Some(rdma.into_plane()),
            Backend::Socket(_) => None,
        }
    }

    /// What carries the tests.
    pub fn transport(&self) -> Transport {
        match self {
            Backend::Rdma(_) => Transport::Rdma,
            Backend::Socket(socket) if socket.kernel == Kernel::Tcp => Transport::Tcp,
            Backend::Socket(_) => Transport::Udp,
        }
    }

    /// Core of the worker or of the socket's thread.
    pub fn core(&self) -> Option<usize> {
        match self {
            Backend::Rdma(rdma) => rdma.plane().core(),
            Backend::Socket(socket) => socket.core,
        }
    }

    /// Both ends, with RDMA, once connected.
    pub fn ends(&self) -> Option<Ends> {
        match self {
            Backend::Rdma(rdma) => rdma.ends(),
            Backend::Socket(_) => None,
        }
    }

    /// Where our queue pair stands, for messages.
    pub fn position(&self) -> String {
        match self {
            Backend::Rdma(rdma) => rdma.position().map(|p| format!("; {p}")).unwrap_or_default(),
            Backend::Socket(_) => String::new(),
        }
    }

    /// Messages done so far.
    pub fn done(&self) -> u64 {
        match self {
            Backend::Rdma(rdma) => rdma.done(),
            Backend::Socket(_) => 0,
        }
    }

    /// Something that moves as long as the peer lives; `None` where nothing tells.
    pub fn life(&self) -> Option<u64> {
        match self {
            Backend::Rdma(rdma) => Some(rdma.frames()),
            Backend::Socket(_) => None,
        }
    }
}

impl Socket {
    fn open(&mut self, spec: PerfSpec) -> Outcome<Endpoint> {
        let (test, port, end) = SockTest::open(self.kernel, spec, self.local, self.core)?;
        self.test = Some(test);
        Ok(match end {
            None => Endpoint::Tcp { port },
            Some(end) => Endpoint::Udp { port: end.port, cookie: end.cookie, window_bytes: end.window_bytes },
        })
    }

    fn start(&mut self, port: u16, end: Option<UdpEnd>) -> Outcome<()> {
        let remote = SocketAddr::new(self.remote, port);
        match &mut self.test {
            Some(test) => test.start(remote, end),
            None => Err(Fail::failed("the test was not opened")),
        }
    }
}

//! The same tests over kernel sockets: the baselines.
//!
//! Owns a blocking socket and one thread, pinned as our workers are; nothing of RDMA is in the way. What travels:
//!
//! | test | client to server | server to client |
//! |---|---|---|
//! | send latency | the message | a message of the same size |
//! | write latency | a 16-byte header and the message ("push") | an acknowledgement of 8 bytes, by the application |
//! | read latency | a request of 16 bytes | the message |
//! | send bandwidth | messages, one after the other | one acknowledgement at the end (and after the warm-up) |
//! | write bandwidth | pushes, at most `tx_depth` not acknowledged | an acknowledgement per `cq_mod` messages |
//! | read bandwidth | requests, at most `tx_depth` not answered | the messages |
//!
//! Compared with RDMA this favours the kernel: a write is answered by 8 bytes and not by a message of full size, and an
//! acknowledgement says that the data was received, which a kernel send alone does not. TCP runs with TCP_NODELAY; what
//! UDP lacks is in [`udp`].

mod measure;
mod tcp;
#[cfg(test)]
mod tests;
mod udp;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ferroce_services::{Fault, PerfMode, PerfOp, PerfReport, PerfSpec, Role};

use crate::fail::{Fail, Outcome};

/// Why a socket test failed.
#[derive(Debug)]
pub enum SockError {
    /// The socket.
    Io(&'static str, io::Error),
    /// The peer answered nothing for so long.
    Silent(Duration),
    /// The peer ended the connection too early.
    Ended {
        /// Messages done.
        done: u64,
    },
    /// Wrong data, told as the services do.
    Data(Fault),
    /// More messages than asked.
    Count {
        /// Asked.
        expected: u64,
        /// Received.
        got: u64,
    },
    /// The host asked to stop.
    Stopped,
}

impl fmt::Display for SockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SockError::Io(what, error) => write!(f, "{what}: {error}"),
            SockError::Silent(waited) => write!(f, "no answer for {} s", waited.as_secs_f64()),
            SockError::Ended { done } => write!(f, "ended after {done} messages"),
            SockError::Data(fault) => write!(f, "{fault}"),
            SockError::Count { expected, got } => write!(f, "{got} messages received instead of {expected}"),
            SockError::Stopped => write!(f, "stopped"),
        }
    }
}

/// Whole messages, one kind out and one kind in, over some socket.
trait Channel {
    /// The message that [`Channel::send`] sends. Changed only between sends, and only if `Shape::changes` says so.
    fn outgoing(&mut self) -> &mut [u8];
    /// The message last received.
    fn incoming(&self) -> &[u8];
    /// Sends the message; waits only while there is no room.
    fn send(&mut self) -> Result<(), SockError>;
    /// Receives one message; false if the peer said that no more will come.
    fn recv(&mut self) -> Result<bool, SockError>;
    /// Says that no more will be sent.
    fn end(&mut self) -> Result<(), SockError>;
    /// Helps the peer to finish until `stop` is set: answers what it repeats.
    fn serve(&mut self, stop: &AtomicBool);
}

/// Bytes of a push's header and of a read request.
const HEADER_BYTES: usize = 16;
/// Bytes of an acknowledgement by the application.
const ACK_BYTES: usize = 8;

/// The two kinds of messages of a test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Shape {
    outgoing: usize,
    incoming: usize,
    /// Where the data starts in the one that carries it.
    data_at: usize,
    /// The outgoing message differs from time to time.
    changes: bool,
}

fn shape(spec: &PerfSpec) -> Shape {
    let size = spec.size as usize;
    let (client, server, data_at) = match (spec.op, spec.mode) {
        (PerfOp::Send, PerfMode::Lat) => (size, size, 0),
        (PerfOp::Send, PerfMode::Bw) => (size, ACK_BYTES, 0),
        (PerfOp::Write, _) => (HEADER_BYTES + size, ACK_BYTES, HEADER_BYTES),
        (PerfOp::Read | PerfOp::FetchAdd | PerfOp::CmpSwap, _) => (HEADER_BYTES, size, 0),
    };
    let (outgoing, incoming) = match spec.role {
        Role::Client => (client, server),
        Role::Server => (server, client),
    };
    Shape { outgoing, incoming, data_at, changes: spec.check_data || outgoing == ACK_BYTES }
}

/// Which kernel transport.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kernel {
    /// TCP.
    Tcp,
    /// UDP with a window on top.
    Udp,
}

/// What the peer must know of a UDP end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct UdpEnd {
    /// Port.
    pub port: u16,
    /// Random; datagrams without it are not of this test.
    pub cookie: u32,
    /// Bytes that may be under way to it.
    pub window_bytes: u32,
}

enum Socket {
    TcpServer(TcpListener),
    TcpClient,
    Udp(UdpSocket, UdpEnd),
}

/// One test over a kernel socket.
pub struct SockTest {
    spec: PerfSpec,
    core: Option<usize>,
    socket: Option<Socket>,
    running: Option<Running>,
}

struct Running {
    stop: Arc<AtomicBool>,
    wake: Wake,
    result: Receiver<Result<PerfReport, SockError>>,
    thread: JoinHandle<()>,
}

impl SockTest {
    /// Opens the socket on `local`. Returns with it the TCP port (0 on a client) or the UDP end.
    pub fn open(
        kernel: Kernel,
        spec: PerfSpec,
        local: IpAddr,
        core: Option<usize>,
    ) -> Outcome<(SockTest, u16, Option<UdpEnd>)> {
        spec.check().map_err(|e| Fail::usage(e.to_string()))?;
        if spec.size == 0 {
            return Err(Fail::usage("size: asked 0, allowed 1 or more over kernel sockets"));
        }
        let broken = |error: io::Error| Fail::failed(format!("cannot open a socket on {local}: {error}"));
        let (socket, port, end) = match (kernel, spec.role) {
            (Kernel::Tcp, Role::Client) => (Socket::TcpClient, 0, None),
            (Kernel::Tcp, Role::Server) => {
                let listener = TcpListener::bind((local, 0)).map_err(broken)?;
                let port = listener.local_addr().map_err(broken)?.port();
                (Socket::TcpServer(listener), port, None)
            }
            (Kernel::Udp, _) => {
                let socket = UdpSocket::bind((local, 0)).map_err(broken)?;
                let end = udp::prepare(&socket).map_err(broken)?;
                (Socket::Udp(socket, end), end.port, Some(end))
            }
        };
        Ok((SockTest { spec, core, socket: Some(socket), running: None }, port, end))
    }

    /// Connects to the peer and starts the test on its thread.
    pub fn start(&mut self, remote: SocketAddr, remote_end: Option<UdpEnd>) -> Outcome<()> {
        let broken = |error: io::Error| Fail::failed(format!("cannot connect to {remote}: {error}"));
        let (spec, core) = (self.spec, self.core);
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, result) = channel();
        let limit = deadline(&spec);
        let Some(socket) = self.socket.take() else {
            return Err(Fail::failed("the test was started twice"));
        };
        let wake = Wake::default();
        let (flag, waker) = (Arc::clone(&stop), wake.clone());
        let work: Box<dyn FnOnce() + Send> = match (socket, remote_end) {
            (Socket::TcpClient, _) => {
                let stream = TcpStream::connect_timeout(&remote, Duration::from_secs(5)).map_err(broken)?;
                Box::new(move || {
                    let channel =
                        waker.keep(stream).and_then(|s| tcp::TcpChannel::new(s, shape(&spec), limit));
                    measure::whole(&spec, channel, &flag, &sender);
                })
            }
            // The client connects only when this side says that it is ready, so the thread accepts.
            (Socket::TcpServer(listener), _) => Box::new(move || {
                let stream = tcp::accept(&listener, limit, &flag).and_then(|stream| waker.keep(stream));
                let channel = stream.and_then(|stream| tcp::TcpChannel::new(stream, shape(&spec), limit));
                measure::whole(&spec, channel, &flag, &sender);
            }),
            (Socket::Udp(socket, own), Some(peer)) => {
                socket.connect(remote).map_err(broken)?;
                let parts = udp::Parts { socket, own, peer, stop: Arc::clone(&stop), limit };
                let channel = udp::UdpChannel::new(parts, shape(&spec));
                Box::new(move || measure::whole(&spec, channel, &flag, &sender))
            }
            (Socket::Udp(..), None) => return Err(Fail::failed("the peer did not tell its UDP end")),
        };
        let (told, pinned) = channel();
        let thread = std::thread::Builder::new()
            .name("ferroce/sock".into())
            .spawn(move || {
                let pin = core.map_or(Ok(()), ferroce_engine::pin::pin_to);
                let go = pin.is_ok();
                let _ = told.send(pin);
                if go {
                    work();
                }
            })
            .map_err(broken)?;
        self.running = Some(Running { stop, wake, result, thread });
        match pinned.recv() {
            Ok(Ok(())) => Ok(()),
            Ok(Err(reason)) => Err(Fail::failed(format!("core {}: {reason}", core.unwrap_or(0)))),
            Err(_) => Err(Fail::failed("the socket thread did not start")),
        }
    }

    /// The result, if there is one by now.
    pub fn poll(&mut self) -> Option<Result<PerfReport, SockError>> {
        let running = self.running.as_ref()?;
        match running.result.try_recv() {
            Ok(result) => Some(result),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => Some(Err(SockError::Stopped)),
        }
    }

    /// Ends the thread.
    pub fn stop(&mut self) {
        if let Some(running) = self.running.take() {
            running.stop.store(true, Ordering::Relaxed);
            running.wake.wake();
            let _ = running.thread.join();
        }
    }
}

/// Ends a thread's blocking reads and writes by closing its connection under it.
#[derive(Clone, Default)]
struct Wake(Arc<Mutex<Option<TcpStream>>>);

impl Wake {
    fn lock(&self) -> MutexGuard<'_, Option<TcpStream>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&self, stream: TcpStream) -> Result<TcpStream, SockError> {
        *self.lock() = Some(stream.try_clone().map_err(|e| SockError::Io("TCP socket", e))?);
        Ok(stream)
    }

    fn wake(&self) {
        if let Some(stream) = self.lock().as_ref() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

impl Drop for SockTest {
    fn drop(&mut self) {
        self.stop();
    }
}

/// How long a peer may be silent.
fn deadline(spec: &PerfSpec) -> Duration {
    match spec.progress_deadline_ns {
        0 => Duration::from_secs(3600),
        ns => Duration::from_nanos(ns).max(Duration::from_millis(10)),
    }
}

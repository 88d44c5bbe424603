//! The tools' own TCP connection: set-up data goes over it, never the data under test.
//!
//! Every wait has a deadline and names whom it waited for.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::fail::{Fail, Outcome};

/// How long a peer may take to answer one step of a set-up.
pub const STEP_LIMIT: Duration = Duration::from_secs(20);

/// Listens on `port`: on all addresses of both families, or IPv4 alone where there is no IPv6.
pub fn listen(port: u16) -> Outcome<TcpListener> {
    let any6 = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
    let any4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
    let listener = match TcpListener::bind(any6) {
        Err(error) if error.kind() != ErrorKind::AddrInUse => TcpListener::bind(any4),
        other => other,
    };
    listener.map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => Fail::failed(format!(
            "TCP port {port} is in use: end the other server, or choose another one with -p"
        )),
        _ => Fail::failed(format!("cannot listen on TCP port {port}: {error}")),
    })
}

fn readable(fd: &impl std::os::fd::AsFd, limit: Duration) -> io::Result<bool> {
    let timeout = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    match poll(&mut fds, Some(&timeout)) {
        Ok(n) => Ok(n > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Accepts one client within `wait` (`None`: waits for ever).
pub fn accept(listener: &TcpListener, wait: Option<Duration>) -> Outcome<TcpStream> {
    let deadline = wait.map(|w| Instant::now() + w);
    let broken = |error: io::Error| Fail::failed(format!("cannot accept a client: {error}"));
    listener.set_nonblocking(true).map_err(broken)?;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).map_err(broken)?;
                return Ok(stream);
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            // The client was gone before it was accepted: no fault of this side.
            Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
            Err(error) => return Err(broken(error)),
        }
        let left =
            deadline.map_or(Duration::from_secs(3600), |d| d.saturating_duration_since(Instant::now()));
        if left.is_zero() {
            let seconds = wait.unwrap_or_default().as_secs_f64();
            return Err(Fail::failed(format!("no client came within {seconds} s (change with --wait)")));
        }
        readable(listener, left).map_err(broken)?;
    }
}

/// Connects to `host`, trying again for `wait` while nobody listens there.
pub fn connect(host: &str, port: u16, wait: Duration) -> Outcome<TcpStream> {
    let addresses: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(|error| Fail::failed(format!("{host}: no such host: {error}")))?
        .collect();
    let deadline = Instant::now() + wait;
    loop {
        let mut last = None;
        for address in &addresses {
            match TcpStream::connect_timeout(address, Duration::from_secs(5)) {
                Ok(stream) => return Ok(stream),
                Err(error) => last = Some((*address, error)),
            }
        }
        if Instant::now() >= deadline {
            return Err(Fail::failed(match last {
                Some((address, error)) if error.kind() == ErrorKind::ConnectionRefused => {
                    format!("{address} does not listen: start the server there first, with the same -p")
                }
                Some((address, error)) => format!("cannot connect to {address}: {error}"),
                None => format!("{host} has no address"),
            }));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The address of a socket without the disguise of an IPv4 one on an IPv6 listener.
pub fn plain(address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V6(v6) => match v6.to_ipv4_mapped() {
            Some(v4) => SocketAddr::new(v4.into(), address.port()),
            None => address,
        },
        IpAddr::V4(_) => address,
    }
}

/// A connected peer.
pub struct Peer {
    stream: TcpStream,
    name: String,
    unread: Vec<u8>,
}

/// What a look at the connection showed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Look {
    /// Nothing new.
    Quiet,
    /// Bytes wait.
    Data,
    /// The peer closed it.
    Closed,
}

impl Peer {
    /// Wraps a connection.
    pub fn new(stream: TcpStream) -> Outcome<Self> {
        let broken = |error: io::Error| Fail::failed(format!("control connection: {error}"));
        let name = plain(stream.peer_addr().map_err(broken)?).to_string();
        stream.set_nodelay(true).map_err(broken)?;
        stream.set_write_timeout(Some(STEP_LIMIT)).map_err(broken)?;
        Ok(Peer { stream, name, unread: Vec::new() })
    }

    /// The peer's address, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The peer's address.
    pub fn remote_ip(&self) -> Outcome<IpAddr> {
        let address =
            self.stream.peer_addr().map_err(|e| Fail::failed(format!("control connection: {e}")))?;
        Ok(plain(address).ip())
    }

    /// Our address towards the peer.
    pub fn local_ip(&self) -> Outcome<IpAddr> {
        let address =
            self.stream.local_addr().map_err(|e| Fail::failed(format!("control connection: {e}")))?;
        Ok(plain(address).ip())
    }

    /// Sends all bytes.
    pub fn send(&mut self, bytes: &[u8]) -> Outcome<()> {
        self.stream
            .write_all(bytes)
            .map_err(|error| Fail::failed(format!("peer {} is gone: {error}", self.name)))
    }

    fn receive(&mut self, into: &mut [u8], deadline: Instant, what: &str) -> Outcome<usize> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Fail::failed(format!("peer {} did not send {what} in time", self.name)));
            }
            let broken =
                |error: io::Error| Fail::failed(format!("peer {}: waiting for {what}: {error}", self.name));
            self.stream.set_read_timeout(Some(left)).map_err(broken)?;
            match self.stream.read(into) {
                Ok(count) => return Ok(count),
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(broken(error)),
            }
        }
    }

    /// Receives exactly `bytes.len()` bytes. `what` names them in messages.
    pub fn receive_exact(&mut self, bytes: &mut [u8], limit: Duration, what: &str) -> Outcome<()> {
        let deadline = Instant::now() + limit;
        let mut filled = 0;
        while filled < bytes.len() {
            let count = self.receive(&mut bytes[filled..], deadline, what)?;
            if count == 0 {
                return Err(Fail::failed(format!(
                    "peer {} closed the connection after {filled} of {} bytes of {what}",
                    self.name,
                    bytes.len()
                )));
            }
            filled += count;
        }
        Ok(())
    }

    /// What has come by now, at most `longest` bytes: for a message about it.
    pub fn rest(&mut self, longest: usize) -> Vec<u8> {
        let mut bytes = vec![0; longest];
        let got = match readable(&self.stream, Duration::ZERO) {
            Ok(true) => self.stream.read(&mut bytes).unwrap_or(0),
            Ok(false) | Err(_) => 0,
        };
        bytes.truncate(got);
        bytes
    }

    /// Receives one line without its end, of at most `longest` bytes.
    pub fn receive_line(&mut self, longest: usize, limit: Duration, what: &str) -> Outcome<Vec<u8>> {
        let deadline = Instant::now() + limit;
        let mut chunk = [0u8; 4096];
        loop {
            if let Some(at) = self.unread.iter().position(|&b| b == b'\n') {
                let mut line: Vec<u8> = self.unread.drain(..=at).collect();
                line.pop();
                return Ok(line);
            }
            if self.unread.len() > longest {
                return Err(Fail::failed(format!(
                    "peer {} sent more than {longest} bytes instead of {what}: {}",
                    self.name,
                    excerpt(&self.unread)
                )));
            }
            let count = self.receive(&mut chunk, deadline, what)?;
            if count == 0 {
                let got = if self.unread.is_empty() {
                    String::new()
                } else {
                    format!(": {}", excerpt(&self.unread))
                };
                return Err(Fail::failed(format!(
                    "peer {} closed the connection instead of sending {what}{got}",
                    self.name
                )));
            }
            self.unread.extend_from_slice(&chunk[..count]);
        }
    }

    /// The next byte, which stays there.
    pub fn peek_byte(&mut self, limit: Duration, what: &str) -> Outcome<u8> {
        let deadline = Instant::now() + limit;
        let late = || Fail::failed(format!("peer {} did not send {what} in time", self.name));
        let broken =
            |error: io::Error| Fail::failed(format!("peer {}: waiting for {what}: {error}", self.name));
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(late());
            }
            if !readable(&self.stream, left).map_err(broken)? {
                continue;
            }
            let mut first = [0];
            match self.stream.peek(&mut first) {
                Ok(0) => {
                    return Err(Fail::failed(format!(
                        "peer {} closed the connection instead of sending {what}",
                        self.name
                    )));
                }
                Ok(_) => return Ok(first[0]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(broken(error)),
            }
        }
    }

    /// Looks at the connection without waiting or taking anything.
    pub fn look(&self) -> Look {
        if !self.unread.is_empty() {
            return Look::Data;
        }
        match readable(&self.stream, Duration::ZERO) {
            Ok(false) => Look::Quiet,
            Ok(true) => match self.stream.peek(&mut [0]) {
                Ok(0) => Look::Closed,
                Ok(_) => Look::Data,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                    Look::Quiet
                }
                Err(_) => Look::Closed,
            },
            Err(_) => Look::Closed,
        }
    }

    /// Waits until the peer closes the connection, at most `limit`; true if it did. What it sends is thrown away.
    pub fn wait_for_close(&mut self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut chunk = [0u8; 256];
        loop {
            match self.receive(&mut chunk, deadline, "the end") {
                Ok(0) => return true,
                Ok(_) => {}
                Err(_) => return self.look() == Look::Closed,
            }
        }
    }
}

/// The beginning of some bytes, fit for a message.
pub fn excerpt(bytes: &[u8]) -> String {
    let shown: String = bytes.iter().take(60).map(|&b| std::ascii::escape_default(b).to_string()).collect();
    if bytes.len() > 60 { format!("\"{shown}\"...") } else { format!("\"{shown}\"") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Peer, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (Peer::new(accept(&listener, Some(Duration::from_secs(10))).unwrap()).unwrap(), there)
    }

    #[test]
    fn nobody_listens() {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let error = connect("127.0.0.1", port, Duration::ZERO).unwrap_err();
        assert!(error.to_string().contains("does not listen"), "{error}");
        assert_eq!(error.status(), 1);
    }

    #[test]
    fn a_server_does_not_wait_for_ever() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let error = accept(&listener, Some(Duration::from_millis(20))).unwrap_err();
        assert!(error.to_string().contains("no client came within 0.02 s"), "{error}");
    }

    #[test]
    fn a_port_in_use_is_named() {
        let taken = listen(0).unwrap();
        let port = taken.local_addr().unwrap().port();
        assert!(listen(port).unwrap_err().to_string().contains("is in use"));
    }

    #[test]
    fn lines_and_their_faults() {
        let (mut peer, mut there) = pair();
        there.write_all(b"one\ntwo\nthr").unwrap();
        let limit = Duration::from_secs(10);
        assert_eq!(peer.receive_line(100, limit, "a line").unwrap(), b"one");
        assert_eq!(peer.look(), Look::Data);
        assert_eq!(peer.receive_line(100, limit, "a line").unwrap(), b"two");
        let late = peer.receive_line(100, Duration::from_millis(20), "a line").unwrap_err();
        assert!(late.to_string().contains("did not send a line in time"), "{late}");
        there.write_all(&[b'x'; 200]).unwrap();
        let long = peer.receive_line(100, limit, "a line").unwrap_err();
        assert!(long.to_string().contains("more than 100 bytes"), "{long}");
        drop(there);
        peer.unread.clear();
        let gone = peer.receive_line(100, limit, "a line").unwrap_err();
        assert!(gone.to_string().contains("closed the connection"), "{gone}");
        assert_eq!(peer.look(), Look::Closed);
        assert!(peer.wait_for_close(limit));
    }

    #[test]
    fn a_short_message_is_told() {
        let (mut peer, mut there) = pair();
        there.write_all(b"abc").unwrap();
        drop(there);
        let error = peer.receive_exact(&mut [0; 8], Duration::from_secs(10), "an address").unwrap_err();
        assert!(error.to_string().contains("after 3 of 8 bytes of an address"), "{error}");
    }
}

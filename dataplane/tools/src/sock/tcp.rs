//! TCP: a byte stream, TCP_NODELAY, blocking with a time limit.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{Channel, Shape, SockError};

/// Waits for the client, at most `limit` and until `stop`.
pub(super) fn accept(
    listener: &TcpListener,
    limit: Duration,
    stop: &AtomicBool,
) -> Result<TcpStream, SockError> {
    let broken = |error| SockError::Io("TCP accept", error);
    let deadline = Instant::now() + limit;
    listener.set_nonblocking(true).map_err(broken)?;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).map_err(broken)?;
                return Ok(stream);
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(broken(error)),
        }
        if stop.load(Ordering::Relaxed) {
            return Err(SockError::Stopped);
        }
        if Instant::now() >= deadline {
            return Err(SockError::Silent(limit));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A connection that carries messages of fixed lengths.
pub(super) struct TcpChannel {
    stream: TcpStream,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    received: u64,
    limit: Duration,
}

impl TcpChannel {
    pub fn new(stream: TcpStream, shape: Shape, limit: Duration) -> Result<Self, SockError> {
        let set = |what: io::Result<()>| what.map_err(|e| SockError::Io("TCP socket", e));
        set(stream.set_nodelay(true))?;
        set(stream.set_read_timeout(Some(limit)))?;
        set(stream.set_write_timeout(Some(limit)))?;
        Ok(TcpChannel {
            stream,
            outgoing: vec![0; shape.outgoing],
            incoming: vec![0; shape.incoming],
            received: 0,
            limit,
        })
    }

    fn broken(&self, error: io::Error) -> SockError {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => SockError::Silent(self.limit),
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => SockError::Ended { done: self.received },
            _ => SockError::Io("TCP", error),
        }
    }
}

impl Channel for TcpChannel {
    fn outgoing(&mut self) -> &mut [u8] {
        &mut self.outgoing
    }

    fn incoming(&self) -> &[u8] {
        &self.incoming
    }

    fn send(&mut self) -> Result<(), SockError> {
        self.stream.write_all(&self.outgoing).map_err(|e| self.broken(e))
    }

    fn recv(&mut self) -> Result<bool, SockError> {
        let mut filled = 0;
        while filled < self.incoming.len() {
            match self.stream.read(&mut self.incoming[filled..]) {
                Ok(0) if filled == 0 => return Ok(false),
                Ok(0) => return Err(SockError::Ended { done: self.received }),
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.broken(error)),
            }
        }
        self.received += 1;
        Ok(true)
    }

    fn end(&mut self) -> Result<(), SockError> {
        self.stream.shutdown(Shutdown::Write).map_err(|e| self.broken(e))
    }

    fn serve(&mut self, _stop: &AtomicBool) {
        // The kernel repeats what was lost; the connection stays open until the host drops it.
    }
}

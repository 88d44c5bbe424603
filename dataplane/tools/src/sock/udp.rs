//! UDP with what a test needs on top: messages of any size, in order, none lost.
//!
//! - **Segments.** A message is cut into datagrams that fit the path MTU of the connected socket (the loopback
//!   interface's 65,536 bytes count like any other), so that IP never fragments. A datagram never holds two messages.
//! - **Header**, 24 bytes, little endian: cookie of the receiver (u32), flags (u8), 3 zero bytes, sequence number (u64),
//!   acknowledgement (u64: all lower numbers have arrived).
//! - **Window.** Each side tells how many bytes its socket buffer holds; a datagram counts with 1,024 bytes more than its
//!   payload, about what the kernel charges. A sender without room waits for acknowledgements.
//! - **Acknowledgements** ride on datagrams that go the other way anyway: a ping-pong is one datagram each way, as with
//!   plain UDP. One of its own is sent when the sender asks (every half window, and on each repetition), and when
//!   something is missing or came twice.
//! - **Loss.** Go-back-N: the receiver takes datagrams only in order and says once per gap what is missing; the sender
//!   then repeats all that is not acknowledged, and does so as well when nothing moved for 10 ms, 20 ms, up to 160 ms.
//!
//! In flight, the common message is not copied: it is repeated from the message itself. Messages that change
//! (`Shape::changes`) are copied.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, recvmsg, sendmsg, sockopt,
};

use super::{Channel, Shape, SockError, UdpEnd};

const HEADER: usize = 24;
/// What a datagram costs beyond its payload in the receiver's buffer.
const COST: usize = 1024;
/// Longest UDP payload over IPv4 (IPv6 could take 20 bytes more).
const LARGEST_DATAGRAM: usize = 65_507;
/// The unit of waiting.
const TICK: Duration = Duration::from_millis(10);
/// Most ticks before a repetition.
const LONGEST_BACKOFF: u32 = 16;
/// Buffer asked for; the kernel may give less.
const BUFFER_BYTES: usize = 4 << 20;

const DATA: u8 = 1;
const ASK: u8 = 2;
const GAP: u8 = 4;
const FIN: u8 = 8;

/// Sets the buffers and chooses the cookie.
pub(super) fn prepare(socket: &UdpSocket) -> io::Result<UdpEnd> {
    sockopt::set_socket_recv_buffer_size(socket, BUFFER_BYTES)?;
    sockopt::set_socket_send_buffer_size(socket, BUFFER_BYTES)?;
    // The kernel reports twice what it gave, for its own overhead; the half is for payload.
    let buffer = sockopt::socket_recv_buffer_size(socket)? / 2;
    socket.set_read_timeout(Some(TICK))?;
    let cookie = ferroce_mem::os::random_secret().map_err(|e| io::Error::other(e.to_string()))? as u32;
    let window_bytes = u32::try_from(buffer / 2).unwrap_or(u32::MAX);
    Ok(UdpEnd { port: socket.local_addr()?.port(), cookie, window_bytes })
}

/// What a channel is made of. The socket is connected.
pub(super) struct Parts {
    pub socket: UdpSocket,
    pub own: UdpEnd,
    pub peer: UdpEnd,
    pub stop: Arc<AtomicBool>,
    pub limit: Duration,
}

/// A datagram that is not acknowledged yet.
struct Sent {
    offset: usize,
    len: usize,
    fin: bool,
    /// The payload, where the message has changed since or may change.
    copy: Option<Vec<u8>>,
}

/// Counters, for tests and messages.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(super) struct Counts {
    pub repeated: u64,
    pub out_of_order: u64,
    pub twice: u64,
    pub foreign: u64,
}

/// Both directions of a connected socket.
pub(super) struct UdpChannel {
    parts: Parts,
    segment: usize,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
    changes: bool,
    sent: VecDeque<Sent>,
    sent_cost: usize,
    since_ask: usize,
    spare: Vec<Vec<u8>>,
    next: u64,
    unacked: u64,
    expected: u64,
    gap_told: bool,
    peer_ended: bool,
    /// Payload that arrived while this side was sending.
    early: VecDeque<u8>,
    scratch: Vec<u8>,
    quiet_ticks: u32,
    backoff: u32,
    pub counts: Counts,
}

/// What one attempt to receive brought.
enum Got {
    /// So many bytes of payload in order.
    Payload(usize),
    /// Something else, or the end.
    Other,
}

impl UdpChannel {
    pub fn new(parts: Parts, shape: Shape) -> Result<Self, SockError> {
        let segment = segment_bytes(&parts.socket).map_err(|e| SockError::Io("path MTU", e))?;
        Ok(UdpChannel {
            segment,
            outgoing: vec![0; shape.outgoing],
            incoming: vec![0; shape.incoming],
            changes: shape.changes,
            sent: VecDeque::with_capacity(1024),
            sent_cost: 0,
            since_ask: 0,
            spare: Vec::new(),
            next: 0,
            unacked: 0,
            expected: 0,
            gap_told: false,
            peer_ended: false,
            early: VecDeque::new(),
            scratch: vec![0; LARGEST_DATAGRAM],
            quiet_ticks: 0,
            backoff: 1,
            counts: Counts::default(),
            parts,
        })
    }

    fn window(&self) -> usize {
        self.parts.peer.window_bytes as usize
    }

    fn has_room(&self, len: usize) -> bool {
        self.sent.is_empty() || self.sent_cost + len + COST <= self.window()
    }

    /// Sends a datagram; a full or refusing socket counts as a lost one.
    fn transmit(&self, seq: u64, flags: u8, payload: &[u8]) -> Result<(), SockError> {
        let mut header = [0u8; HEADER];
        header[..4].copy_from_slice(&self.parts.peer.cookie.to_le_bytes());
        header[4] = flags;
        header[8..16].copy_from_slice(&seq.to_le_bytes());
        header[16..].copy_from_slice(&self.expected.to_le_bytes());
        let pieces = [IoSlice::new(&header), IoSlice::new(payload)];
        let mut control = SendAncillaryBuffer::default();
        match sendmsg(&self.parts.socket, &pieces, &mut control, SendFlags::empty()) {
            Ok(_) => Ok(()),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionRefused => Ok(()),
                _ if error == rustix::io::Errno::NOBUFS => Ok(()),
                _ => Err(SockError::Io("UDP", error.into())),
            },
        }
    }

    /// Sends bytes of the outgoing message as the next datagram. There is room.
    fn send_next(&mut self, offset: usize, len: usize, fin: bool) -> Result<(), SockError> {
        let copy = (self.changes && len > 0).then(|| {
            let mut copy = self.spare.pop().unwrap_or_default();
            copy.clear();
            copy.extend_from_slice(&self.outgoing[offset..offset + len]);
            copy
        });
        self.since_ask += len + COST;
        let mut flags = DATA;
        if fin {
            flags |= FIN | ASK;
        }
        if self.since_ask * 2 >= self.window() {
            flags |= ASK;
            self.since_ask = 0;
        }
        self.transmit(self.next, flags, &self.outgoing[offset..offset + len])?;
        self.sent.push_back(Sent { offset, len, fin, copy });
        self.sent_cost += len + COST;
        self.next += 1;
        Ok(())
    }

    /// Go-back-N: repeats what is not acknowledged, the last datagram asking for an answer.
    fn repeat(&mut self) -> Result<(), SockError> {
        let last = self.sent.len().saturating_sub(1);
        for (index, sent) in self.sent.iter().enumerate() {
            let mut flags = DATA | if sent.fin { FIN } else { 0 };
            if index == last {
                flags |= ASK;
            }
            let payload = match &sent.copy {
                Some(copy) => &copy[..],
                None => &self.outgoing[sent.offset..sent.offset + sent.len],
            };
            self.transmit(self.unacked + index as u64, flags, payload)?;
        }
        self.counts.repeated += self.sent.len() as u64;
        Ok(())
    }

    fn acknowledge(&mut self, ack: u64) {
        if ack <= self.unacked || ack > self.next {
            return;
        }
        for sent in self.sent.drain(..(ack - self.unacked) as usize) {
            self.sent_cost -= sent.len + COST;
            if let Some(copy) = sent.copy
                && self.spare.len() < 64
            {
                self.spare.push(copy);
            }
        }
        self.unacked = ack;
        self.quiet_ticks = 0;
        self.backoff = 1;
    }

    /// Nothing came for a tick: repeats, or gives up.
    fn tick(&mut self) -> Result<(), SockError> {
        if self.parts.stop.load(Ordering::Relaxed) {
            return Err(SockError::Stopped);
        }
        self.quiet_ticks += 1;
        if TICK * self.quiet_ticks > self.parts.limit {
            return Err(SockError::Silent(self.parts.limit));
        }
        if !self.sent.is_empty() && self.quiet_ticks.is_multiple_of(self.backoff) {
            self.backoff = (self.backoff * 2).min(LONGEST_BACKOFF);
            self.repeat()?;
        }
        Ok(())
    }

    /// Waits for one datagram, at most a tick. Payload in order lands in `into`, or in `early` if that is `None`.
    fn receive(&mut self, into: Option<std::ops::Range<usize>>) -> Result<Got, SockError> {
        let mut header = [0u8; HEADER];
        let direct = into.is_some();
        let mut control = RecvAncillaryBuffer::default();
        let target = match into {
            Some(range) => &mut self.incoming[range],
            None => &mut self.scratch[..],
        };
        let room = target.len();
        let mut pieces = [IoSliceMut::new(&mut header), IoSliceMut::new(target)];
        let answer = recvmsg(&self.parts.socket, &mut pieces, &mut control, RecvFlags::TRUNC);
        let bytes = match answer {
            Ok(message) => message.bytes,
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::ConnectionRefused => {
                    self.tick()?;
                    return Ok(Got::Other);
                }
                ErrorKind::Interrupted => return Ok(Got::Other),
                _ => return Err(SockError::Io("UDP", error.into())),
            },
        };
        let own = self.parts.own.cookie.to_le_bytes();
        if bytes < HEADER || header[..4] != own || bytes - HEADER > room {
            self.counts.foreign += 1;
            return Ok(Got::Other);
        }
        self.take(&header, bytes - HEADER, direct)
    }

    /// Handles a datagram of ours; its payload lies where [`Self::receive`] put it.
    fn take(&mut self, header: &[u8; HEADER], len: usize, direct: bool) -> Result<Got, SockError> {
        let word = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&header[at..at + 8]);
            u64::from_le_bytes(bytes)
        };
        let (flags, seq, ack) = (header[4], word(8), word(16));
        self.acknowledge(ack);
        if flags & GAP != 0 && ack == self.unacked && !self.sent.is_empty() {
            self.repeat()?;
        }
        let mut got = Got::Other;
        let mut answer = flags & ASK != 0;
        let mut answer_flags = 0;
        if flags & DATA != 0 {
            if seq == self.expected {
                self.expected += 1;
                self.gap_told = false;
                self.quiet_ticks = 0;
                self.peer_ended |= flags & FIN != 0;
                if direct {
                    got = Got::Payload(len);
                } else {
                    self.early.extend(&self.scratch[..len]);
                }
            } else if seq < self.expected {
                self.counts.twice += 1;
                answer = true;
            } else {
                self.counts.out_of_order += 1;
                answer |= !self.gap_told;
                self.gap_told = true;
                answer_flags = GAP;
            }
        }
        if answer {
            self.transmit(0, answer_flags, &[])?;
        }
        Ok(got)
    }
}

/// Payload bytes of a datagram that fits the path.
fn segment_bytes(socket: &UdpSocket) -> io::Result<usize> {
    let (mtu, headers) = match crate::net::plain(socket.peer_addr()?).ip() {
        std::net::IpAddr::V4(_) => (sockopt::ip_mtu(socket)?, 28),
        std::net::IpAddr::V6(_) => (sockopt::ipv6_mtu(socket)?, 48),
    };
    let datagram = (mtu as usize).saturating_sub(headers).min(LARGEST_DATAGRAM);
    datagram
        .checked_sub(HEADER)
        .filter(|&bytes| bytes > 0)
        .ok_or_else(|| io::Error::other(format!("{mtu} bytes are too few for a datagram")))
}

impl Channel for UdpChannel {
    fn outgoing(&mut self) -> &mut [u8] {
        &mut self.outgoing
    }

    fn incoming(&self) -> &[u8] {
        &self.incoming
    }

    fn send(&mut self) -> Result<(), SockError> {
        let mut offset = 0;
        while offset < self.outgoing.len() {
            let len = (self.outgoing.len() - offset).min(self.segment);
            while !self.has_room(len) {
                self.receive(None)?;
            }
            self.send_next(offset, len, false)?;
            offset += len;
        }
        Ok(())
    }

    fn recv(&mut self) -> Result<bool, SockError> {
        let mut filled = 0;
        while filled < self.incoming.len() {
            if !self.early.is_empty() {
                let count = self.early.len().min(self.incoming.len() - filled);
                for (to, from) in self.incoming[filled..].iter_mut().zip(self.early.drain(..count)) {
                    *to = from;
                }
                filled += count;
            } else if self.peer_ended {
                return if filled == 0 { Ok(false) } else { Err(SockError::Ended { done: self.expected }) };
            } else if let Got::Payload(len) = self.receive(Some(filled..self.incoming.len()))? {
                filled += len;
            }
        }
        Ok(true)
    }

    fn end(&mut self) -> Result<(), SockError> {
        while !self.has_room(0) {
            self.receive(None)?;
        }
        self.send_next(0, 0, true)
    }

    fn serve(&mut self, stop: &AtomicBool) {
        // Errors are the peer's leaving, which is what this waits for.
        while !stop.load(Ordering::Relaxed) && self.receive(None).is_ok() {
            self.early.clear();
        }
    }
}

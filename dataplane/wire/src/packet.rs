//! The only way in: a frame's head to a [`Packet`].

use crate::error::ParseError;
use crate::flow::Headers;

/// A parsed frame: its headers as values and where its payload and ICRC lie. Borrows nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet {
    /// All headers.
    pub headers: Headers,
    /// Offset of the IP header in the frame.
    pub ip_offset: u16,
    /// Offset of the payload in the frame: everything before it is in the head.
    pub payload_offset: u16,
    /// Payload bytes without pad.
    pub payload_len: u16,
    /// Pad bytes after the payload, 0 ..= 3.
    pub pad: u8,
}

impl Packet {
    /// Offset of the four ICRC bytes in the frame.
    pub const fn icrc_offset(&self) -> usize {
        self.payload_offset as usize + self.payload_len as usize + self.pad as usize
    }
}

/// Parses the first bytes of a frame.
///
/// `head` is private memory and holds the whole frame or at least its first [`crate::MAX_HEAD_BYTES`] bytes;
/// `frame_len` is the length of the whole frame in bytes, Ethernet padding included. The ICRC is not checked
/// here, since the payload may lie elsewhere: see [`crate::icrc`].
pub fn parse(head: &[u8], frame_len: usize) -> Result<Packet, ParseError> {
    let _ = (head, frame_len);
    Err(ParseError::Truncated)
}

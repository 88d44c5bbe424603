//! A received frame, and a frame to send.

use ferroce_mem::Payload;

/// Shortest head of a received frame that is longer than that: enough for every header stack.
pub const HEAD_BYTES: usize = 128;

/// A received frame, lent for the duration of one call.
///
/// The head (the first [`HEAD_BYTES`] bytes, or the whole frame if shorter) is private memory; the rest may be memory
/// that the sender can still write, in up to three pieces.
pub struct RxFrame<'f> {
    /// First bytes of the frame, private.
    pub head: &'f [u8],
    /// What follows the head, a source for copy and CRC only.
    pub rest: Payload<'f>,
    /// Receive time in ns of the port's own clock, 0 if it has none.
    pub timestamp_ns: u64,
}

impl RxFrame<'_> {
    /// Bytes of the whole frame.
    pub fn len(&self) -> usize {
        self.head.len() + self.rest.len()
    }
    /// True for a frame without bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A frame being written: room for `len` bytes in the port's own buffer. Bytes are appended in order; dropped without
/// [`crate::PortQueue::tx_commit`], it is not sent. The buffer may be shared with a peer: write-only.
pub struct TxFrame<'t> {
    /// The buffer, write-only (a raw target of `ferroce_mem`).
    pub buf: ferroce_mem::copy::Target<'t>,
}

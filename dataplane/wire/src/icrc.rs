//! The invariant CRC (roce-wire 4): zlib's CRC-32 over eight 0xff bytes, the masked headers, payload and pad.
//!
//! The state is an ordinary finalised CRC-32 (what `crc32fast::hash` returns), so payload that lies elsewhere is
//! added by `ferroce_mem` (`crc` functions take and return the same `u32`).

use crate::error::ParseError;
use crate::packet::{Packet, parse};
use crate::{ICRC_BYTES, MAX_HEAD_BYTES};

/// `crc32fast::hash(&[0xff; 8])`: the state after the stand-in for InfiniBand's local route header.
const SEED: u32 = 0x2144_df1c;

/// A running ICRC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Icrc(pub u32);

impl Icrc {
    /// The state after the headers: `head` is the frame from its first byte to the end of its extension headers
    /// (at most 128 bytes), `ip_offset` where the IP header starts. Masks the variant fields.
    ///
    /// Total: bytes past the 128th are taken as they are, and an `ip_offset` behind the end leaves nothing to hash.
    #[inline]
    pub fn over_headers(head: &[u8], ip_offset: usize) -> Icrc {
        let covered = head.get(ip_offset..).unwrap_or(&[]);
        let (headers, rest) = covered.split_at_checked(MAX_HEAD_BYTES).unwrap_or((covered, &[]));
        let mut masked = [0u8; MAX_HEAD_BYTES];
        let Some(used) = masked.get_mut(..headers.len()) else {
            return Icrc(SEED);
        };
        used.copy_from_slice(headers);
        if masked[0] >> 4 == 4 {
            // TOS, TTL, header checksum; UDP checksum; BTH byte 4.
            for at in [1, 8, 10, 11, 26, 27, 32] {
                set(&mut masked, at);
            }
        } else {
            // Traffic class and flow label, hop limit; UDP checksum; BTH byte 4.
            masked[0] |= 0x0f;
            for at in [1, 2, 3, 7, 46, 47, 52] {
                set(&mut masked, at);
            }
        }
        let icrc = Icrc(SEED).update(masked.get(..headers.len()).unwrap_or(&[]));
        if rest.is_empty() { icrc } else { icrc.update(rest) }
    }

    /// Adds payload or pad bytes.
    #[inline]
    #[must_use]
    pub fn update(self, bytes: &[u8]) -> Icrc {
        let mut hasher = crc32fast::Hasher::new_with_initial(self.0);
        hasher.update(bytes);
        Icrc(hasher.finalize())
    }

    /// The four bytes as they stand on the wire (least significant first).
    pub const fn to_wire(self) -> [u8; 4] {
        self.0.to_le_bytes()
    }

    /// From the four bytes on the wire.
    pub const fn from_wire(bytes: [u8; ICRC_BYTES]) -> Icrc {
        Icrc(u32::from_le_bytes(bytes))
    }
}

#[inline]
fn set(bytes: &mut [u8; MAX_HEAD_BYTES], at: usize) {
    if let Some(byte) = bytes.get_mut(at) {
        *byte = 0xff;
    }
}

/// Parses a whole frame that lies in private memory and checks its ICRC. For the simulator, tools and tests; the
/// engine, whose payload may lie in segments or in memory that a peer writes, does the two steps itself.
pub fn check_frame(frame: &[u8]) -> Result<Packet, ParseError> {
    let packet = parse(frame, frame.len())?;
    // `parse` has checked that the frame reaches to the end of the ICRC.
    let (covered, rest) = frame.split_at_checked(packet.icrc_offset()).ok_or(ParseError::Truncated)?;
    let received = rest.first_chunk::<ICRC_BYTES>().ok_or(ParseError::Truncated)?;
    let (head, body) =
        covered.split_at_checked(usize::from(packet.payload_offset)).ok_or(ParseError::Truncated)?;
    let computed = Icrc::over_headers(head, usize::from(packet.ip_offset)).update(body);
    if computed == Icrc::from_wire(*received) { Ok(packet) } else { Err(ParseError::BadIcrc) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_is_the_crc_of_eight_ff_bytes() {
        assert_eq!(SEED, crc32fast::hash(&[0xff; 8]));
    }

    #[test]
    fn any_split_of_the_payload_gives_the_same_icrc() {
        let bytes: [u8; 300] = core::array::from_fn(|i| (i * 7) as u8);
        let whole = Icrc(SEED).update(&bytes);
        for split in [0, 1, 3, 64, 299, 300] {
            assert_eq!(Icrc(SEED).update(&bytes[..split]).update(&bytes[split..]), whole);
        }
    }

    #[test]
    fn offsets_outside_the_head_do_not_panic() {
        for len in [0usize, 1, 20, 33, 128, 200] {
            for offset in [0usize, 1, 14, 127, 128, 201, usize::MAX] {
                let head = [0x45u8; 200];
                let _ = Icrc::over_headers(&head[..len], offset);
            }
        }
    }
}

//! Test data: a byte that depends on seed, message number and offset.
//!
//! A message that is late, stale, shifted or cut differs from the pattern; a constant fill would hide all four.

/// Where a message differs from the pattern.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mismatch {
    /// Offset in the message.
    pub offset: u64,
    /// The byte of the pattern.
    pub expected: u8,
    /// The byte found.
    pub got: u8,
}

/// Bytes handled at a time, on the stack.
pub const CHUNK_BYTES: usize = 512;

fn word(seed: u64, message: u64, index: u64) -> u64 {
    let mut z = seed
        .wrapping_add(message.wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .wrapping_add(index.wrapping_mul(0xd1b5_4a32_d192_ed03));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Writes the pattern's bytes from `offset` on; `offset` is a multiple of 8.
pub fn fill(out: &mut [u8], seed: u64, message: u64, offset: u64) {
    for (index, piece) in out.chunks_mut(8).enumerate() {
        let bytes = word(seed, message, (offset / 8).wrapping_add(index as u64)).to_le_bytes();
        let len = piece.len();
        piece.copy_from_slice(&bytes[..len]);
    }
}

/// Compares bytes with the pattern from `offset` on; `offset` is a multiple of 8.
///
/// # Errors
/// The first byte that differs.
pub fn check(bytes: &[u8], seed: u64, message: u64, offset: u64) -> Result<(), Mismatch> {
    for (index, piece) in bytes.chunks(8).enumerate() {
        let expected = word(seed, message, (offset / 8).wrapping_add(index as u64)).to_le_bytes();
        for (at, (&got, &expected)) in piece.iter().zip(&expected).enumerate() {
            if got != expected {
                return Err(Mismatch { offset: offset + (index * 8 + at) as u64, expected, got });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_agree_with_the_whole() {
        let mut whole = [0u8; 100];
        fill(&mut whole, 7, 3, 0);
        let mut part = [0u8; 52];
        fill(&mut part, 7, 3, 48);
        assert_eq!(whole[48..], part);
        assert_eq!(check(&whole, 7, 3, 0), Ok(()));
        assert_eq!(check(&part, 7, 3, 48), Ok(()));
    }

    #[test]
    fn stale_shifted_and_corrupt_data_is_seen() {
        let mut bytes = [0u8; 64];
        fill(&mut bytes, 7, 3, 0);
        assert!(check(&bytes, 7, 4, 0).is_err());
        assert!(check(&bytes, 8, 3, 0).is_err());
        assert!(check(&bytes[1..], 7, 3, 0).is_err());
        bytes[41] ^= 1;
        let got = bytes[41];
        assert_eq!(check(&bytes, 7, 3, 0), Err(Mismatch { offset: 41, expected: got ^ 1, got }));
    }
}

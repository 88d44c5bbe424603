//! Buffers of the exchange: the original's filling and ours.

use ferroce_mem::os::Block;

use crate::area::{self, chunks};
use crate::fault::Fault;
use crate::pattern;

/// What lies between the page starts of a checked message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Filling {
    /// The original's constant, 0 at page starts.
    Classic,
    /// The original's constant everywhere: what it sends where it knows no `-c`.
    Plain,
    /// 0 everywhere: what the original sends over a shared receive queue.
    Zero,
    /// Ours, by message and offset.
    Pattern,
}

/// The original's constant.
const CLASSIC: u8 = 0x7b;
/// Page starts hold 0. Larger pages start at multiples of this.
const PAGE: u64 = 4096;
/// Seed of our pattern: both ends know it.
const SEED: u64 = 0x6665_7272_6f63_6521;
/// What a receive must overwrite.
const SPOILT: u8 = 0xee;

/// The bytes expected from `offset` on.
fn expected(out: &mut [u8], filling: Filling, message: u64, offset: u64) {
    match filling {
        Filling::Zero => return out.fill(0),
        Filling::Plain => return out.fill(CLASSIC),
        Filling::Classic => out.fill(CLASSIC),
        Filling::Pattern => pattern::fill(out, SEED, message, offset),
    }
    // Chunks divide pages, so a page can only start at a chunk's first byte.
    if let (true, Some(first)) = (offset.is_multiple_of(PAGE), out.first_mut()) {
        *first = 0;
    }
}

/// Fills a buffer with the original's constant, page starts included: what it sends without `-c`.
pub(super) fn fill_classic(block: &Block, at: u64, len: u64) -> Result<(), Fault> {
    chunks(len, |offset, count| area::write(block, at + offset, &[CLASSIC; pattern::CHUNK_BYTES][..count]))
}

/// Fills a buffer with checked message `message` of ours.
pub(super) fn fill(block: &Block, at: u64, len: u64, message: u64) -> Result<(), Fault> {
    let mut chunk = [0; pattern::CHUNK_BYTES];
    chunks(len, |offset, count| {
        expected(&mut chunk[..count], Filling::Pattern, message, offset);
        area::write(block, at + offset, &chunk[..count])
    })
}

/// Spoils the page starts of a buffer: the rest changes from message to message anyway.
pub(super) fn spoil(block: &Block, at: u64, len: u64) -> Result<(), Fault> {
    let mut offset = 0;
    while offset < len {
        area::write(block, at + offset, &[SPOILT])?;
        offset += PAGE;
    }
    Ok(())
}

/// Spoils a whole buffer: for messages that are all the same.
pub(super) fn spoil_all(block: &Block, at: u64, len: u64) -> Result<(), Fault> {
    chunks(len, |offset, count| area::write(block, at + offset, &[SPOILT; pattern::CHUNK_BYTES][..count]))
}

/// As [`recognise`], for the exchange over a shared receive queue.
pub(super) fn recognise_zero(block: &Block, at: u64, len: u64) -> Result<Filling, Fault> {
    // The second byte of our pattern's message 0 is not 0.
    if len > 1 && area::byte(block, at + 1)? == 0 { Ok(Filling::Zero) } else { Ok(Filling::Pattern) }
}

/// As [`recognise`], for a transport whose original knows no `-c`.
pub(super) fn recognise_plain(block: &Block, at: u64, len: u64) -> Result<Filling, Fault> {
    // The first byte of our pattern is 0.
    if len > 0 && area::byte(block, at)? == CLASSIC { Ok(Filling::Plain) } else { Ok(Filling::Pattern) }
}

/// Which filling the first message of a client has. One byte tells: our pattern's second byte is not 0x7b there.
pub(super) fn recognise(block: &Block, at: u64, len: u64) -> Result<Filling, Fault> {
    if len > 1 && area::byte(block, at + 1)? == CLASSIC { Ok(Filling::Classic) } else { Ok(Filling::Pattern) }
}

/// Compares a buffer with checked message `message`.
pub(super) fn check(block: &Block, at: u64, len: u64, filling: Filling, message: u64) -> Result<(), Fault> {
    let (mut got, mut want) = ([0; pattern::CHUNK_BYTES], [0; pattern::CHUNK_BYTES]);
    chunks(len, |offset, count| {
        let (got, want) = (&mut got[..count], &mut want[..count]);
        area::read(block, at + offset, got)?;
        expected(want, filling, message, offset);
        match got.iter().zip(want.iter()).position(|(got, want)| got != want) {
            None => Ok(()),
            Some(index) => Err(Fault::Data {
                message,
                offset: offset + index as u64,
                expected: want[index],
                got: got[index],
            }),
        }
    })
}

/// The bytes of our first checked message, for tests.
#[cfg(test)]
pub(super) fn sample(len: usize, filling: Filling, message: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for (index, piece) in bytes.chunks_mut(pattern::CHUNK_BYTES).enumerate() {
        expected(piece, filling, message, (index * pattern::CHUNK_BYTES) as u64);
    }
    bytes
}

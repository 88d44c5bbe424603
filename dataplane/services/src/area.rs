//! Bounds-checked access to a service's block, in chunks.

use ferroce_mem::os::Block;

use crate::fault::Fault;
use crate::pattern::CHUNK_BYTES;

fn offset(block: &Block, at: u64, len: usize) -> Result<usize, Fault> {
    let at = usize::try_from(at).map_err(|_| Fault::Memory)?;
    match at.checked_add(len) {
        Some(end) if end <= block.len() => Ok(at),
        _ => Err(Fault::Memory),
    }
}

/// Writes `bytes` at `at`.
pub(crate) fn write(block: &Block, at: u64, bytes: &[u8]) -> Result<(), Fault> {
    block.write(offset(block, at, bytes.len())?, bytes);
    Ok(())
}

/// Reads `bytes` from `at`.
pub(crate) fn read(block: &Block, at: u64, bytes: &mut [u8]) -> Result<(), Fault> {
    block.read(offset(block, at, bytes.len())?, bytes);
    Ok(())
}

/// One byte, read afresh.
pub(crate) fn byte(block: &Block, at: u64) -> Result<u8, Fault> {
    Ok(block.read_u8_volatile(offset(block, at, 1)?))
}

/// Calls `f` with offset and length of each chunk of `len` bytes.
pub(crate) fn chunks(len: u64, mut f: impl FnMut(u64, usize) -> Result<(), Fault>) -> Result<(), Fault> {
    let mut offset = 0;
    while offset < len {
        let count = (len - offset).min(CHUNK_BYTES as u64);
        f(offset, count as usize)?;
        offset += count;
    }
    Ok(())
}

//! [`Regions`]: a key table that owns what is registered in it, so that registering is safe.
//!
//! Invariant: every live entry of `memory` describes a block in `blocks`, which is dropped no earlier than its entry.
//! For programs that hold the only table of a device: the simulator, tools, tests. Appliances keep one block for the
//! tables of several workers and use [`Memory`] itself. Never lends the table mutably.
#![allow(unsafe_code)]

use crate::key::{Access, KeyFault, Lkey, PdId};
use crate::memory::{Memory, MrInfo, RegisterError};

use super::arena::Block;

/// A key table and the blocks registered in it.
pub struct Regions {
    memory: Memory,
    blocks: Vec<(Lkey, Block)>,
}

impl Regions {
    /// An empty table; see [`Memory::new`].
    pub fn new(capacity: u32, secret: u64) -> Self {
        Regions { memory: Memory::new(capacity, secret), blocks: Vec::new() }
    }

    /// Registers a whole block; its first byte has the address `iova`. The table keeps the block.
    ///
    /// # Errors
    /// [`RegisterError`]; the block is dropped then.
    pub fn register(
        &mut self,
        block: Block,
        pd: PdId,
        access: Access,
        iova: u64,
    ) -> Result<MrInfo, RegisterError> {
        // SAFETY: the block keeps its bytes mapped and is held until `deregister` removed the entry, or until the
        // table itself is gone.
        let info = unsafe { self.memory.register(block.mr_init(pd, access, iova)) }?;
        self.blocks.push((info.lkey, block));
        Ok(info)
    }

    /// Ends a registration and gives the block back.
    ///
    /// # Errors
    /// [`KeyFault::Unknown`] if there is no such key.
    pub fn deregister(&mut self, lkey: Lkey) -> Result<Block, KeyFault> {
        let at = self.blocks.iter().position(|(key, _)| *key == lkey).ok_or(KeyFault::Unknown)?;
        self.memory.deregister(lkey)?;
        Ok(self.blocks.swap_remove(at).1)
    }

    /// The table, for checks.
    #[inline]
    pub const fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The block of a key.
    pub fn block(&self, lkey: Lkey) -> Option<&Block> {
        self.blocks.iter().find(|(key, _)| *key == lkey).map(|(_, block)| block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::{Arena, ArenaConfig, PagePolicy};

    #[test]
    fn blocks_live_as_long_as_their_keys() {
        let config = ArenaConfig { bytes: 1 << 16, pages: PagePolicy::Normal, numa_node: None };
        let (arena, _) = Arena::new(config).expect("64 KiB");
        let free = arena.free_bytes();
        let mut regions = Regions::new(4, 1);
        let block = arena.alloc(100, 64).expect("100 bytes");
        let info = regions.register(block, PdId(1), Access::LOCAL_WRITE, 0x1000).expect("a free slot");
        assert!(arena.free_bytes() < free);
        let slice = regions.memory().check_local(PdId(1), info.lkey, 0x1010, 4, Access::LOCAL_WRITE);
        assert_eq!(slice.expect("inside").copy_in(b"abcd"), 4);
        let mut bytes = [0; 4];
        regions.block(info.lkey).expect("registered").read(16, &mut bytes);
        assert_eq!(&bytes, b"abcd");
        let block = regions.deregister(info.lkey).expect("registered");
        assert_eq!(regions.memory().info(info.lkey), None);
        assert_eq!(regions.deregister(info.lkey).err(), Some(KeyFault::Unknown));
        drop(block);
        assert_eq!(arena.free_bytes(), free);
    }
}

//! [`Regions`]: a key table that owns what is registered in it, so that registering is safe.
//!
//! Invariant: every live entry of `memory` describes a block in `blocks`, which is dropped no earlier than its entry.
//! For programs that hold the only table of a device: the simulator, tools, tests. Appliances keep one block for the
//! tables of several workers and use [`Memory`] itself. Never lends the table mutably.
#![allow(unsafe_code)]

use ferroce_wire::Rkey;

use crate::key::{Access, KeyFault, Lkey, PdId};
use crate::memory::{DeregisterError, Memory, MrInfo, RegisterError};
use crate::window::MwInfo;

use super::arena::Block;

/// A key table and the blocks registered in it.
pub struct Regions {
    memory: Memory,
    /// By slot of the region.
    blocks: Vec<Option<Block>>,
}

impl Regions {
    /// An empty table; see [`Memory::new`].
    pub fn new(capacity: u32, secret: u64) -> Self {
        let memory = Memory::new(capacity, secret);
        let blocks = (0..memory.capacity()).map(|_| None).collect();
        Regions { memory, blocks }
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
        let place = self.memory.slot_of(info.lkey).and_then(|slot| self.blocks.get_mut(slot));
        // A live key has a slot, and every slot has a place: never forgotten, and never unmapped too early, even so.
        match place {
            Some(place) => *place = Some(block),
            None => unreachable!("{:?} has no slot", info.lkey),
        }
        Ok(info)
    }

    /// Ends a registration and gives the block back.
    ///
    /// # Errors
    /// [`DeregisterError`] if there is no such key or the region is in use; nothing is changed then.
    pub fn deregister(&mut self, lkey: Lkey) -> Result<Block, DeregisterError> {
        let slot = self.memory.slot_of(lkey).ok_or(DeregisterError::Unknown)?;
        self.memory.deregister(lkey)?;
        self.blocks.get_mut(slot).and_then(Option::take).ok_or(DeregisterError::Unknown)
    }

    /// Makes a window; see [`Memory::alloc_window`].
    ///
    /// # Errors
    /// [`RegisterError::Full`].
    pub fn alloc_window(&mut self, pd: PdId) -> Result<MwInfo, RegisterError> {
        self.memory.alloc_window(pd)
    }

    /// Frees one; see [`Memory::dealloc_window`].
    ///
    /// # Errors
    /// [`KeyFault::Unknown`] if there is no such window.
    pub fn dealloc_window(&mut self, rkey: Rkey) -> Result<MwInfo, KeyFault> {
        self.memory.dealloc_window(rkey)
    }

    /// The table, for checks.
    #[inline]
    pub const fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The block of a key.
    pub fn block(&self, lkey: Lkey) -> Option<&Block> {
        self.blocks.get(self.memory.slot_of(lkey)?)?.as_ref()
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
        assert_eq!(regions.deregister(info.lkey).err(), Some(DeregisterError::Unknown));
        drop(block);
        assert_eq!(arena.free_bytes(), free);
    }
}

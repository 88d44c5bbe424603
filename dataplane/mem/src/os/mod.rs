//! Mappings, hugepages and arenas.
//!
//! Owner of this crate provides:
//! - `Region`: an owned shared mapping of a sealed memfd (2 MiB or 1 GiB hugetlb, transparent hugepages, or normal
//!   pages), with `fd()`, `len()`, `page_kind()`; `Region::from_fd` for a peer's memfd.
//! - `Arena::new(ArenaConfig{ bytes, pages: PagePolicy, numa_node }) -> Result<(Arena, ArenaReport), ArenaError>`:
//!   probes before use, falls back stating why (`ArenaReport{ page_kind, fallback: Option<String> }`).
//! - `Arena::alloc(bytes, align) -> Result<Block, ArenaError>`: `Block` is Clone-free, Send, holds an `Arc<Region>`,
//!   returns its bytes to the arena on drop; `Block::read(off, &mut [u8])`, `write(off, &[u8])`, `fill`, `len()`,
//!   `base()`, `read_u8_volatile(off)`, and `Block::mr_init(pd, access, iova)`.

//! Mappings, hugepages and arenas.
//!
//! Owns everything of this crate that talks to the operating system: [`Region`] (a sealed memfd, mapped), [`Arena`]
//! and [`Block`] (what programs register), [`Table`] (process-private memory). Pages are touched by the kernel on our
//! behalf before anyone else may touch them, so a limit yields an error at start, never a signal later. Invariant: a
//! mapping lives as long as any block of it, and is never a reference. Called at
//! set-up only, except for [`Block`]'s reads and writes. Never falls back without saying so in an [`ArenaReport`].

mod arena;
mod limits;
mod pages;
mod region;
mod regions;
mod table;

pub use arena::{Arena, ArenaConfig, ArenaReport, Block};
pub use limits::require_memlock;
pub use pages::{ArenaError, PageKind, PagePolicy};
pub use region::Region;
pub use regions::Regions;
pub use table::Table;

/// A secret for [`crate::Memory::new`] from the kernel's random numbers.
///
/// # Errors
/// [`ArenaError`] if the kernel gives none (it does so on every Linux this runs on).
#[allow(unsafe_code)]
pub fn random_secret() -> Result<u64, ArenaError> {
    let mut bytes = [0u8; 8];
    // SAFETY: the buffer is ours and as long as said. Up to 256 bytes are never cut short.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got != bytes.len() as isize {
        let error = std::io::Error::last_os_error();
        return Err(ArenaError::new("secret", "8 random bytes", error, "getrandom(2) must be permitted"));
    }
    Ok(u64::from_ne_bytes(bytes))
}

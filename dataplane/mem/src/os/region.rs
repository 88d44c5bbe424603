//! [`Region`]: an owned shared mapping of a sealed memfd.
//!
//! Invariant: `base .. base + len` is mapped readable and writable for the life of the region; the memfd can neither
//! shrink nor grow (its seals are checked for a peer's), so no touch runs past its end. Called at set-up. Never
//! makes a reference to the mapping: a peer may write it.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::limits::hugetlb_limit;
use super::pages::{ArenaError, PageKind, human};

/// `f_type` of hugetlbfs (`linux/magic.h`).
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// An owned shared mapping of a sealed memfd.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    kind: PageKind,
    fd: OwnedFd,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is only used through raw copies and atomics.
unsafe impl Send for Region {}
// SAFETY: as above; shared access to the bytes is the users' matter and never by reference.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `bytes` (rounded up to whole pages) of zeroed memory of exactly this kind, on `numa_node` if one is named,
    /// and touches all of it.
    ///
    /// # Errors
    /// [`ArenaError`] naming the limit that was met, without a signal and with nothing left behind.
    pub fn new(bytes: u64, kind: PageKind, numa_node: Option<u32>) -> Result<Region, ArenaError> {
        let page = kind.bytes() as u64;
        let len = bytes
            .max(1)
            .checked_next_multiple_of(page)
            .filter(|&len| len <= isize::MAX as u64)
            .ok_or_else(|| ArenaError::new("bytes", bytes, "2^63 bytes less a page", ""))?;
        if kind == PageKind::Thp {
            thp_enabled(len)?;
        }
        let fail = |what: &str, errno: Errno| refusal(kind, len, what, errno);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let flags = match kind {
            PageKind::Huge2M => flags | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
            PageKind::Huge1G => flags | MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
            PageKind::Thp | PageKind::Normal => flags,
        };
        let fd = rustix::fs::memfd_create("ferroce", flags).map_err(|e| fail("memfd_create", e))?;
        rustix::fs::ftruncate(&fd, len).map_err(|e| fail("ftruncate", e))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals).map_err(|e| fail("F_ADD_SEALS", e))?;
        let region = Region::map(fd, len as usize, kind).map_err(|e| fail("mmap", e))?;
        if let Some(node) = numa_node {
            region.bind(node)?;
        }
        if kind == PageKind::Thp {
            // SAFETY: our own mapping; the advice changes no contents.
            unsafe { rustix::mm::madvise(region.base.as_ptr().cast(), region.len, Advice::LinuxHugepage) }
                .map_err(|e| fail("MADV_HUGEPAGE", e))?;
        }
        if let Err(errno) = region.populate() {
            // Given back first: the refusal counts what is free, and this had promises on some.
            drop(region);
            return Err(fail("MADV_POPULATE_WRITE", errno));
        }
        if kind == PageKind::Thp && region.joined_bytes() == Some(0) {
            return Err(ArenaError::new(
                "pages",
                format!("{kind} for {}", human(len)),
                "none: memory is too fragmented, or a control group forbids them",
                "echo 1 > /proc/sys/vm/compact_memory",
            ));
        }
        Ok(region)
    }

    /// Maps a peer's memfd of exactly `len` bytes.
    ///
    /// A peer can still punch holes into it: normal pages then read as zero; do not accept hugetlb memfds from a peer
    /// that is not trusted, since refilling a hole in those can fail with a signal ([`Region::page_kind`] tells).
    ///
    /// # Errors
    /// [`ArenaError`] if it is no memfd, is not sealed against shrinking and growing, or has another size.
    pub fn from_fd(fd: OwnedFd, len: u64) -> Result<Region, ArenaError> {
        let asked = || format!("a sealed memfd of {len} bytes");
        let refuse = |found: String| ArenaError::new("region", asked(), found, "");
        let seals = rustix::fs::fcntl_get_seals(&fd)
            .map_err(|e| refuse(format!("a descriptor that has no seals ({e})")))?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(refuse(format!("a memfd with seals {seals:?}")));
        }
        let stat = rustix::fs::fstat(&fd).map_err(|e| refuse(e.to_string()))?;
        if len == 0 || u64::try_from(stat.st_size) != Ok(len) || len > isize::MAX as u64 {
            return Err(refuse(format!("one of {} bytes", stat.st_size)));
        }
        let fs = rustix::fs::fstatfs(&fd).map_err(|e| refuse(e.to_string()))?;
        let kind = match (fs.f_type as u64, fs.f_bsize as u64) {
            (HUGETLBFS_MAGIC, 0x4000_0000) => PageKind::Huge1G,
            (HUGETLBFS_MAGIC, _) => PageKind::Huge2M,
            _ => PageKind::Normal,
        };
        Region::map(fd, len as usize, kind).map_err(|e| refuse(format!("mmap: {e}")))
    }

    fn map(fd: OwnedFd, len: usize, kind: PageKind) -> Result<Region, Errno> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address that the kernel chooses touches nothing that exists.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, &fd, 0) }?;
        let base = NonNull::new(base.cast()).ok_or(Errno::NOMEM)?;
        Ok(Region { base, len, kind, fd })
    }

    /// Has the kernel touch every page: a missing page is an error here, where a touch of ours would be a signal.
    fn populate(&self) -> Result<(), Errno> {
        loop {
            // SAFETY: our own mapping; populating changes no contents.
            let done = unsafe {
                rustix::mm::madvise(self.base.as_ptr().cast(), self.len, Advice::LinuxPopulateWrite)
            };
            if done != Err(Errno::INTR) {
                return done;
            }
        }
    }

    /// Binds the pages, not yet touched, to a NUMA node.
    fn bind(&self, node: u32) -> Result<(), ArenaError> {
        let refuse = |found: String| ArenaError::new("numa_node", node, found, "lscpu lists the nodes");
        let mut mask = [0u64; 16];
        let Some(word) = mask.get_mut(node as usize / 64) else {
            return Err(refuse("0 to 1023".into()));
        };
        *word = 1 << (node % 64);
        // SAFETY: the range is our own mapping; the mask is as long as said and only read.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.base.as_ptr(),
                self.len,
                libc::MPOL_BIND,
                mask.as_ptr(),
                mask.len() * 64 + 1,
                0,
            )
        };
        if rc == 0 { Ok(()) } else { Err(refuse(format!("mbind: {}", std::io::Error::last_os_error()))) }
    }

    /// Bytes of the mapping that the kernel mapped by 2 MiB entries; `None` if it does not say.
    fn joined_bytes(&self) -> Option<u64> {
        let smaps = std::fs::read_to_string("/proc/self/smaps").ok()?;
        let start = format!("{:x}-", self.base.as_ptr() as usize);
        let mut lines = smaps.lines().skip_while(|line| !line.starts_with(&start));
        let line = lines.find(|line| line.starts_with("ShmemPmdMapped:"))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10)
    }

    /// The memfd, to be passed to another process.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
    /// Bytes.
    pub const fn len(&self) -> usize {
        self.len
    }
    /// Never true: a region has at least a page.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// First byte. Valid as long as the region lives; not to be made a reference of.
    pub const fn base(&self) -> NonNull<u8> {
        self.base
    }
    /// Pages.
    pub const fn page_kind(&self) -> PageKind {
        self.kind
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and whoever uses it holds the region.
        let done = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(done.is_ok(), "munmap of memfd {}: {done:?}", self.fd.as_raw_fd());
    }
}

/// Transparent hugepages for memfds must be permitted, else the advice is taken and nothing happens.
fn thp_enabled(len: u64) -> Result<(), ArenaError> {
    let path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let asked = format!("{} for {}", PageKind::Thp, human(len));
    match std::fs::read_to_string(path) {
        Ok(text) if ["[never]", "[deny]"].iter().any(|off| text.contains(off)) => {
            let found = format!("none: {path} is {}", text.trim());
            Err(ArenaError::new("pages", asked, found, PageKind::Thp.hint(0)))
        }
        Ok(_) => Ok(()),
        Err(e) => Err(ArenaError::new("pages", asked, format!("none: {path}: {e}"), "")),
    }
}

/// Says which limit a failed step met.
fn refusal(kind: PageKind, len: u64, what: &str, errno: Errno) -> ArenaError {
    let pages = len / kind.bytes() as u64;
    let asked = match kind {
        PageKind::Huge2M | PageKind::Huge1G => format!("{pages} {kind} ({})", human(len)),
        PageKind::Thp | PageKind::Normal => format!("{} of {kind}", human(len)),
    };
    let free = kind.free_in_pool();
    let (allowed, hint) = match (kind, free) {
        (PageKind::Huge2M | PageKind::Huge1G, None) => {
            (format!("none: the kernel has no such pages ({what}: {errno})"), String::new())
        }
        (PageKind::Huge2M | PageKind::Huge1G, Some(free)) if free >= pages => {
            refused_though_free(kind, free, what, errno)
        }
        (PageKind::Huge2M | PageKind::Huge1G, Some(free)) => {
            (format!("{free} free ({what}: {errno})"), kind.hint(pages))
        }
        (PageKind::Thp | PageKind::Normal, _) if errno == Errno::INVAL => {
            (format!("{what}: {errno}"), "Linux 5.14 or newer is needed".into())
        }
        (PageKind::Thp | PageKind::Normal, _) => (format!("{what}: {errno}"), PageKind::Normal.hint(pages)),
    };
    ArenaError::new("pages", asked, allowed, hint)
}

/// The machine has the pages, this process did not get them: a control group's limit, which is named if it can be seen.
fn refused_though_free(kind: PageKind, free: u64, what: &str, errno: Errno) -> (String, String) {
    let rest = format!("{free} are free on the machine ({what}: {errno})");
    match hugetlb_limit(kind) {
        Some((limit, file)) => (
            format!("{} by the control group's limit {}; {rest}", human(limit), file.display()),
            "raise that limit (docker --hugetlb, Kubernetes limit hugepages-2Mi), and the group's memory limit".into(),
        ),
        None => (
            format!("fewer; {rest}"),
            "raise the control group's hugetlb limit (hugetlb.2MB.max, docker --hugetlb, Kubernetes limit \
             hugepages-2Mi), and its memory limit"
                .into(),
        ),
    }
}

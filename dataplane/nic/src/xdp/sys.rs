//! The system calls of this port that no crate wraps: bpf(2) and one ethtool ioctl.
//!
//! Invariant: every pointer handed to the kernel comes from a borrow that outlives the call, and the length beside it
//! is that of the borrow. Called by `bpf.rs` and the port's set-up; never on the data path.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

/// Commands of bpf(2) that are used here.
#[derive(Clone, Copy)]
#[repr(i32)]
pub(super) enum BpfCommand {
    /// BPF_MAP_CREATE
    MapCreate = 0,
    /// BPF_MAP_LOOKUP_ELEM
    MapLookup = 1,
    /// BPF_MAP_UPDATE_ELEM
    MapUpdate = 2,
    /// BPF_MAP_DELETE_ELEM
    MapDelete = 3,
    /// BPF_PROG_LOAD
    ProgLoad = 5,
    /// BPF_PROG_TEST_RUN
    #[cfg(test)]
    ProgTestRun = 10,
    /// BPF_PROG_GET_FD_BY_ID
    ProgFdById = 13,
    /// BPF_OBJ_GET_INFO_BY_FD
    ObjInfo = 15,
    /// BPF_LINK_CREATE
    LinkCreate = 28,
}

/// The attribute block of bpf(2): 128 zeroed bytes that the command's fields are written into. Fields that hold
/// addresses are borrowed for `'a`, so they cannot dangle while the block lives.
pub(super) struct BpfAttr<'a> {
    bytes: [u64; 16],
    borrows: std::marker::PhantomData<&'a mut [u8]>,
}

impl<'a> BpfAttr<'a> {
    /// All zero.
    pub fn new() -> Self {
        BpfAttr { bytes: [0; 16], borrows: std::marker::PhantomData }
    }

    fn put(mut self, at: usize, value: &[u8]) -> Self {
        for (i, byte) in value.iter().enumerate() {
            let (word, shift) = ((at + i) / 8, (at + i) % 8);
            let mut eight = self.bytes[word].to_ne_bytes();
            eight[shift] = *byte;
            self.bytes[word] = u64::from_ne_bytes(eight);
        }
        self
    }

    /// A 32-bit field at byte `at`.
    pub fn u32(self, at: usize, value: u32) -> Self {
        self.put(at, &value.to_ne_bytes())
    }

    /// A 64-bit field at byte `at`.
    fn u64(self, at: usize, value: u64) -> Self {
        self.put(at, &value.to_ne_bytes())
    }

    /// A file descriptor at byte `at`.
    pub fn fd(self, at: usize, fd: BorrowedFd<'a>) -> Self {
        self.u32(at, fd.as_raw_fd().cast_unsigned())
    }

    /// The name field at byte `at`: at most 15 bytes.
    pub fn name(self, at: usize, name: &str) -> Self {
        self.put(at, name.as_bytes().get(..name.len().min(15)).unwrap_or_default())
    }

    /// The address of bytes that the kernel reads.
    pub fn input<T>(self, at: usize, value: &'a [T]) -> Self {
        self.u64(at, value.as_ptr().addr() as u64)
    }

    /// The address of bytes that the kernel writes.
    pub fn output(self, at: usize, value: &'a mut [u8]) -> Self {
        self.u64(at, value.as_mut_ptr().expose_provenance() as u64)
    }

    /// A 32-bit field at the aligned byte `at`, after the call.
    #[cfg(test)]
    pub fn read_u32(&self, at: usize) -> u32 {
        let eight = self.bytes[at / 8].to_ne_bytes();
        eight[at % 8..][..4].try_into().map_or(0, u32::from_ne_bytes)
    }

    /// Calls bpf(2).
    pub fn call(&mut self, command: BpfCommand) -> Result<i64, Errno> {
        let size = size_of_val(&self.bytes);
        // SAFETY: the block is 128 writable bytes; the addresses in it are of borrows that live as long as `self`, and
        // the lengths beside them were written by the callers in `bpf.rs` from the same borrows.
        let result =
            unsafe { libc::syscall(libc::SYS_bpf, command as libc::c_long, self.bytes.as_mut_ptr(), size) };
        if result < 0 { Err(last_errno()) } else { Ok(result) }
    }

    /// Calls bpf(2) with a command that makes a file descriptor.
    pub fn call_fd(&mut self, command: BpfCommand) -> Result<OwnedFd, Errno> {
        let fd = i32::try_from(self.call(command)?).map_err(|_| Errno::BADF)?;
        // SAFETY: the kernel just made this descriptor for us; nobody else knows it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

/// `struct ethtool_channels`.
#[repr(C)]
#[derive(Default)]
struct Channels {
    command: u32,
    max: [u32; 4],
    rx: u32,
    tx: u32,
    other: u32,
    combined: u32,
}

/// The number of receive queues that the driver uses now (`ethtool -l`); an error where the driver cannot say. Asked
/// through any socket of the interface's network namespace.
pub(super) fn active_rx_queues(socket: BorrowedFd<'_>, interface: &str) -> Result<u32, Errno> {
    const ETHTOOL_GCHANNELS: u32 = 0x3c;
    let mut channels = Channels { command: ETHTOOL_GCHANNELS, ..Channels::default() };
    // SAFETY: `ifreq` is plain data, for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if interface.len() >= request.ifr_name.len() {
        return Err(Errno::NODEV);
    }
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_data = (&raw mut channels).cast();
    // SAFETY: `request` and `channels`, which it points at, live through the call; SIOCETHTOOL with ETHTOOL_GCHANNELS
    // writes exactly one `struct ethtool_channels` there.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) };
    if result < 0 { Err(last_errno()) } else { Ok(channels.rx.saturating_add(channels.combined)) }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)
}

//! BPF maps, programs and links, as owned descriptors.
//!
//! Owns what it creates: dropping a [`Map`], [`Program`] or [`Link`] closes it, and the kernel detaches the program
//! with its last link descriptor, which is why a crash leaves nothing behind. Called at set-up and by housekeeping;
//! never on the data path.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

use super::program::Instruction;
use super::sys::{BpfAttr, BpfCommand};

/// `BPF_XDP`, the attach type.
const ATTACH_XDP: u32 = 37;
/// `BPF_PROG_TYPE_XDP`.
const PROG_TYPE_XDP: u32 = 6;
/// `BPF_F_XDP_HAS_FRAGS`.
const F_XDP_HAS_FRAGS: u32 = 1 << 5;
/// Flag of an attachment: generic, in the network stack.
pub(super) const ATTACH_GENERIC: u32 = 1 << 1;
/// Flag of an attachment: native, in the driver.
pub(super) const ATTACH_NATIVE: u32 = 1 << 2;

/// Kinds of map that are used here.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(super) enum MapKind {
    /// A hash table.
    Hash = 1,
    /// An array.
    Array = 2,
    /// AF_XDP sockets by receive queue.
    Xsk = 17,
}

/// A BPF map.
pub(super) struct Map {
    fd: OwnedFd,
    key_bytes: usize,
    value_bytes: usize,
}

impl Map {
    /// A map of `entries` entries.
    pub fn new(
        kind: MapKind,
        name: &str,
        key_bytes: u32,
        value_bytes: u32,
        entries: u32,
    ) -> Result<Self, Errno> {
        let fd = BpfAttr::new()
            .u32(0, kind as u32)
            .u32(4, key_bytes)
            .u32(8, value_bytes)
            .u32(12, entries)
            .name(28, name)
            .call_fd(BpfCommand::MapCreate)?;
        Ok(Map { fd, key_bytes: key_bytes as usize, value_bytes: value_bytes as usize })
    }

    /// Sets an entry.
    pub fn update(&self, key: &[u8], value: &[u8]) -> Result<(), Errno> {
        assert_eq!((key.len(), value.len()), (self.key_bytes, self.value_bytes), "sizes of this map");
        let mut attr = BpfAttr::new().fd(0, self.fd.as_fd()).input(8, key).input(16, value);
        attr.call(BpfCommand::MapUpdate).map(|_| ())
    }

    /// Removes an entry.
    pub fn delete(&self, key: &[u8]) -> Result<(), Errno> {
        assert_eq!(key.len(), self.key_bytes, "key size of this map");
        BpfAttr::new().fd(0, self.fd.as_fd()).input(8, key).call(BpfCommand::MapDelete).map(|_| ())
    }

    /// A 64-bit value.
    pub fn lookup_u64(&self, key: &[u8]) -> Result<u64, Errno> {
        assert_eq!((key.len(), self.value_bytes), (self.key_bytes, 8), "sizes of this map");
        let mut value = [0u8; 8];
        BpfAttr::new()
            .fd(0, self.fd.as_fd())
            .input(8, key)
            .output(16, &mut value)
            .call(BpfCommand::MapLookup)?;
        Ok(u64::from_ne_bytes(value))
    }

    /// The descriptor, for the program that uses the map.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A loaded program.
pub(super) struct Program {
    fd: OwnedFd,
}

impl Program {
    /// Has the kernel verify and load an XDP program. On a refusal the verifier's last words come with the error.
    /// With `frags` it may run on frames over several buffers; it sees the first one.
    pub fn load(name: &str, code: &[Instruction], frags: bool) -> Result<Self, (Errno, String)> {
        const LOG_BYTES: usize = 64 * 1024;
        let count = u32::try_from(code.len()).map_err(|_| (Errno::TOOBIG, String::new()))?;
        let attr = || {
            BpfAttr::new()
                .u32(0, PROG_TYPE_XDP)
                .u32(4, count)
                .input(8, code)
                .input(16, b"MIT\0")
                .u32(44, if frags { F_XDP_HAS_FRAGS } else { 0 })
                .name(48, name)
                .u32(68, ATTACH_XDP)
        };
        match attr().call_fd(BpfCommand::ProgLoad) {
            Ok(fd) => Ok(Program { fd }),
            Err(errno @ (Errno::INVAL | Errno::ACCESS)) => {
                // Once more, for the verifier's log.
                let mut log = vec![0u8; LOG_BYTES];
                let _ = attr()
                    .u32(24, 1)
                    .u32(28, LOG_BYTES as u32)
                    .output(32, &mut log)
                    .call_fd(BpfCommand::ProgLoad);
                let text =
                    String::from_utf8_lossy(log.split(|b| *b == 0).next().unwrap_or_default()).into_owned();
                Err((errno, text))
            }
            Err(errno) => Err((errno, String::new())),
        }
    }

    /// Attaches the program to an interface: [`ATTACH_NATIVE`] or [`ATTACH_GENERIC`]. It stays until the link drops.
    pub fn attach(&self, interface: u32, flags: u32) -> Result<Link, Errno> {
        let fd = BpfAttr::new()
            .fd(0, self.fd.as_fd())
            .u32(4, interface)
            .u32(8, ATTACH_XDP)
            .u32(12, flags)
            .call_fd(BpfCommand::LinkCreate)?;
        Ok(Link { _fd: fd })
    }

    /// Runs the program on `frame` as if received on queue 0 of `lo`; returns what it answers.
    #[cfg(test)]
    pub fn test_run(&self, frame: &[u8]) -> Result<u32, Errno> {
        let len = u32::try_from(frame.len()).map_err(|_| Errno::TOOBIG)?;
        let mut attr = BpfAttr::new().fd(0, self.fd.as_fd()).u32(8, len).input(16, frame).u32(32, 1);
        attr.call(BpfCommand::ProgTestRun)?;
        Ok(attr.read_u32(4))
    }
}

/// The attachment of a program to an interface.
pub(super) struct Link {
    _fd: OwnedFd,
}

/// The name of the program with number `id`, if the kernel tells.
pub(super) fn program_name(id: u32) -> Option<String> {
    let fd = BpfAttr::new().u32(0, id).call_fd(BpfCommand::ProgFdById).ok()?;
    // struct bpf_prog_info: type, id, tag[8], two lengths, two addresses, load time, uid, map count, address of map
    // numbers (all zero in, so that the kernel writes none), then the name at byte 64.
    let mut info = [0u8; 80];
    BpfAttr::new()
        .fd(0, fd.as_fd())
        .u32(4, info.len() as u32)
        .output(8, &mut info)
        .call(BpfCommand::ObjInfo)
        .ok()?;
    let name = info.get(64..80)?.split(|b| *b == 0).next()?;
    Some(String::from_utf8_lossy(name).into_owned())
}

//! Sockets of a link: messages with descriptors, doorbells, the lock file.
//!
//! Owns the system calls of `shm`; all by way of `rustix`, none of them unsafe here. Invariant: nothing blocks; every
//! descriptor is close-on-exec. Called by the port at set-up and by a queue to ring or answer a doorbell, which
//! happens only around a sleep. Never looks at what a message means.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Most descriptors in one message: the memory and a doorbell per queue.
pub(crate) const MAX_FDS: usize = 1 + super::MAX_QUEUES as usize;

/// Wakes a sleeping worker: a socket pair of bytes. Not an eventfd, because the peer shares the descriptor's flags and
/// could make our write block; a send can be told per call not to.
#[derive(Debug)]
pub(crate) struct Doorbell {
    listens: OwnedFd,
    rings: OwnedFd,
}

impl Doorbell {
    pub fn new() -> Result<Doorbell, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (listens, rings) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        Ok(Doorbell { listens, rings })
    }
    /// Readable once it was rung.
    pub fn listener(&self) -> BorrowedFd<'_> {
        self.listens.as_fd()
    }
    /// What a peer rings by.
    pub fn ringer(&self) -> BorrowedFd<'_> {
        self.rings.as_fd()
    }
    /// Forgets that it was rung. Bounded, however often a hostile peer rang.
    pub fn quiet(&self) {
        let mut bytes = [0u8; 512];
        // Nothing to read is as good as something read.
        let _ = rustix::net::recv(&self.listens, &mut bytes[..], RecvFlags::DONTWAIT);
    }
}

/// Rings a doorbell. A full one is rung already; any other failure means that the peer passed something else.
pub(crate) fn ring(ringer: impl AsFd) -> bool {
    let sent = rustix::net::send(ringer, &[1], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    matches!(sent, Ok(_) | Err(Errno::AGAIN))
}

/// What a look at a connection found.
pub(crate) enum Received {
    /// A message of so many bytes, with descriptors.
    Message(usize, Vec<OwnedFd>),
    /// Nothing yet.
    Nothing,
    /// The peer closed, or the connection broke.
    Closed,
}

/// Sends a message and descriptors; it is taken whole or not at all.
pub(crate) fn send(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOBIG);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags).map(drop)
}

/// Looks for a message. One that is longer than `buffer` is cut, which its decoder notices.
pub(crate) fn receive(socket: &OwnedFd, buffer: &mut [u8]) -> Received {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut look = || rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags);
    // A peer that closes without having read all that we said resets the connection, which is told once; what it said
    // before that can still be read.
    let got = match look() {
        Err(Errno::CONNRESET) => look(),
        other => other,
    };
    match got {
        Ok(got) => {
            let mut fds = Vec::new();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights);
                }
            }
            let cut = got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
            match got.bytes {
                0 => Received::Closed,
                bytes => Received::Message(if cut { 0 } else { bytes }, fds),
            }
        }
        Err(Errno::AGAIN | Errno::INTR) => Received::Nothing,
        Err(_) => Received::Closed,
    }
}

fn socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Connects to whoever listens at `path`.
pub(crate) fn connect(path: &Path) -> Result<OwnedFd, Errno> {
    let socket = socket()?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Listens at `path`, for the same user only.
pub(crate) fn listen(path: &Path) -> Result<OwnedFd, Errno> {
    let socket = socket()?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    // Nobody can connect before `listen`.
    rustix::fs::chmod(path, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)?;
    rustix::net::listen(&socket, 4)?;
    Ok(socket)
}

/// Takes a waiting connection.
pub(crate) fn accept(listener: &OwnedFd) -> Option<OwnedFd> {
    rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK).ok()
}

/// Two connected sockets, for two ports in one process.
pub(crate) fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// The process at the other end, as the kernel knows it.
pub(crate) fn peer_pid(socket: &OwnedFd) -> Option<i32> {
    Some(rustix::net::sockopt::socket_peercred(socket).ok()?.pid.as_raw_nonzero().get())
}

/// The lock beside a link's socket: whoever holds it listens. Removed when dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    path: std::path::PathBuf,
    _file: File,
}

/// What came of trying to lock.
#[derive(Debug)]
pub(crate) enum Locked {
    Ours(Lock),
    /// Held by the process of this number, as far as it left it there.
    Theirs(String),
}

impl Lock {
    pub fn take(path: &Path) -> std::io::Result<Locked> {
        // The holder removes the file when it goes, so the one locked must be checked to be the one at the path.
        for _ in 0..8 {
            let mut options = File::options();
            options.read(true).write(true).create(true).truncate(false).mode(0o600);
            let nofollow = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
            let mut file = options.custom_flags(nofollow).open(path)?;
            match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => {
                    let holder = std::fs::read_to_string(path).unwrap_or_default();
                    return Ok(Locked::Theirs(holder.trim().chars().take(20).collect()));
                }
                Err(errno) => return Err(errno.into()),
            }
            let locked = file.metadata()?;
            let current = std::fs::metadata(path);
            if current.is_ok_and(|at| at.ino() == locked.ino() && at.dev() == locked.dev()) {
                file.set_len(0)?;
                file.rewind()?;
                writeln!(file, "{}", std::process::id())?;
                return Ok(Locked::Ours(Lock { path: path.into(), _file: file }));
            }
        }
        Err(std::io::Error::other("the lock file is replaced again and again"))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Still held here, so it is ours to remove.
        let _ = std::fs::remove_file(&self.path);
    }
}

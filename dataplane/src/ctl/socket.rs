//! The name of an appliance on the file system: its lock and its control socket.
//!
//! Owns `<run_dir>/<name>.lock` and `<run_dir>/<name>.sock` from [`Claim::new`] until it is dropped, which removes
//! both. Invariant: whoever holds the lock is the only appliance of that name; a socket that is found is probed first
//! and only replaced when nobody listens (it was left by a crash). The socket is 0600 from its first moment. Called
//! once at start by `main`; [`recv`] and [`send`] by the control server.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ferroce_api::appliance::MAX_MESSAGE_BYTES;
use ferroce_api::{ApiError, Code};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 16;

/// Longest path of a Unix socket (`sun_path` less the final zero byte).
const MAX_PATH_BYTES: usize = 107;

/// An exclusively locked file that is removed when dropped.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    // Held for its lock.
    _file: File,
}

impl Lock {
    /// Locks `path`, making the file if need be, and writes our process number into it.
    ///
    /// # Errors
    /// `Ok(Err(pid))` when another process holds it, with what it wrote; `Err` when the file can't be made.
    pub fn take(path: &Path) -> std::io::Result<Result<Lock, String>> {
        loop {
            let mut file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(path)?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let mut holder = String::new();
                    file.read_to_string(&mut holder)?;
                    return Ok(Err(holder.trim().chars().filter(char::is_ascii_digit).take(10).collect()));
                }
                Err(TryLockError::Error(error)) => return Err(error),
            }
            // A former owner may have removed the name between our open and our lock: then we hold a lock on nothing.
            let same =
                fs::metadata(path).is_ok_and(|now| file.metadata().is_ok_and(|ours| ours.ino() == now.ino()));
            if !same {
                continue;
            }
            file.set_len(0)?;
            file.seek(SeekFrom::Start(0))?;
            writeln!(file, "{}", std::process::id())?;
            return Ok(Ok(Lock { path: path.to_owned(), _file: file }));
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // While the lock is still held, so that nobody else's file is removed.
        let _ = fs::remove_file(&self.path);
    }
}

/// The name of this appliance: lock, socket and listener.
#[derive(Debug)]
pub struct Claim {
    listener: OwnedFd,
    path: PathBuf,
    // Dropped last: the socket must be gone before the name is free.
    _lock: Lock,
}

impl Claim {
    /// Makes the run folder if need be (0700), takes the name, and listens.
    ///
    /// # Errors
    /// Names the path, what was found there and what to do: a live appliance with its process, a file that is no
    /// socket, a path that is too long, a folder that cannot be written.
    pub fn new(run_dir: &Path, name: &str) -> Result<Claim, ApiError> {
        let path = run_dir.join(format!("{name}.sock"));
        let length = path.as_os_str().len();
        if length > MAX_PATH_BYTES {
            return Err(ApiError::new(
                Code::Invalid,
                "socket path",
                format!("{} ({length} bytes)", path.display()),
                format!("at most {MAX_PATH_BYTES} bytes"),
            )
            .hint("choose a shorter --run-dir"));
        }
        make_folder(run_dir)?;
        let lock_path = run_dir.join(format!("{name}.lock"));
        let lock = match Lock::take(&lock_path) {
            Ok(Ok(lock)) => lock,
            Ok(Err(holder)) => return Err(in_use(name, &holder)),
            Err(error) => return Err(io_error("lock", &lock_path, &error)),
        };
        clear_stale(&path, name)?;
        let listener = listen(&path)?;
        Ok(Claim { listener, path, _lock: lock })
    }

    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes a waiting connection; `None` if there is none.
    pub fn accept(&self) -> Result<Option<OwnedFd>, Errno> {
        match rustix::net::accept_with(&self.listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
            Ok(fd) => Ok(Some(fd)),
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}

impl AsFd for Claim {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn make_folder(run_dir: &Path) -> Result<(), ApiError> {
    if run_dir.is_dir() {
        return Ok(());
    }
    let mut builder = fs::DirBuilder::new();
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(run_dir).or_else(|error| if run_dir.is_dir() { Ok(()) } else { Err(error) }).map_err(
        |error| {
            io_error("run_dir", run_dir, &error)
                .hint("make the folder, or choose one of your own with --run-dir DIR")
        },
    )
}

/// Removes a socket that nobody listens on; refuses anything else.
fn clear_stale(path: &Path, name: &str) -> Result<(), ApiError> {
    let kind = match fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io_error("socket", path, &error)),
    };
    if !kind.is_socket() {
        let found = if kind.is_dir() { "a folder" } else { "a file that is no socket" };
        return Err(ApiError::new(
            Code::Busy,
            "socket",
            path.display().to_string(),
            format!("a path that is free; found {found}"),
        )
        .hint("remove it, or choose another --run-dir"));
    }
    let probe = seqpacket().map_err(|e| errno_error("socket", path, e))?;
    let address = SocketAddrUnix::new(path).map_err(|e| errno_error("socket", path, e))?;
    match rustix::net::connect(&probe, &address) {
        Err(Errno::CONNREFUSED) => {}
        // Someone listens without our lock: a full backlog, or a stream socket, is alive too.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => {
            let holder = sockopt::socket_peercred(&probe).map(|c| c.pid.as_raw_nonzero().to_string());
            return Err(in_use(name, &holder.unwrap_or_default()));
        }
        Err(errno) => return Err(errno_error("socket", path, errno)),
    }
    fs::remove_file(path).map_err(|error| io_error("socket", path, &error))?;
    tracing::info!(socket = %path.display(), "replaced a socket that an earlier run left behind");
    Ok(())
}

fn listen(path: &Path) -> Result<OwnedFd, ApiError> {
    let refused = |errno| errno_error("socket", path, errno);
    let socket = seqpacket().map_err(refused)?;
    // Linux gives the file the mode of the socket, so it never exists with a wider one.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(refused)?;
    let address = SocketAddrUnix::new(path).map_err(refused)?;
    rustix::net::bind(&socket, &address).map_err(refused)?;
    rustix::net::listen(&socket, BACKLOG).map_err(refused)?;
    Ok(socket)
}

fn seqpacket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

fn in_use(name: &str, holder: &str) -> ApiError {
    let mut found = String::from("one appliance of that name; it runs already");
    if !holder.is_empty() {
        // Writing to a String cannot fail.
        let _ = write!(found, ", process {holder}");
    }
    ApiError::new(Code::Busy, "appliance name", name, found)
        .hint("stop it, or choose another name or --run-dir")
}

/// An error of the operating system at a path.
pub fn io_error(attribute: &str, path: &Path, error: &std::io::Error) -> ApiError {
    let code = match error.kind() {
        std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem => Code::Denied,
        std::io::ErrorKind::NotFound => Code::NotFound,
        _ => Code::Invalid,
    };
    let hint = match code {
        Code::Denied => "choose a folder that you may write with --run-dir DIR",
        Code::NotFound => "make the folder first",
        _ => "",
    };
    ApiError::new(code, attribute, path.display().to_string(), format!("what the system permits: {error}"))
        .hint(hint)
}

fn errno_error(attribute: &str, path: &Path, errno: Errno) -> ApiError {
    io_error(attribute, path, &errno.into())
}

/// What came from a client.
#[derive(Debug)]
pub enum Received<'b> {
    /// A message.
    Message(&'b [u8]),
    /// A message longer than the limit: how long. Its bytes are gone.
    TooLong(usize),
    /// Nothing now.
    Nothing,
    /// The client closed.
    Closed,
}

/// Takes one message; `buffer` has [`MAX_MESSAGE_BYTES`] bytes.
pub fn recv<'b>(fd: BorrowedFd<'_>, buffer: &'b mut [u8]) -> Result<Received<'b>, Errno> {
    // With TRUNC the length is that of the packet, however much of it fits.
    match rustix::net::recv(fd, &mut *buffer, RecvFlags::DONTWAIT | RecvFlags::TRUNC) {
        Ok((_, 0)) => Ok(Received::Closed),
        Ok((_, length)) => match buffer.get(..length) {
            Some(message) if length <= MAX_MESSAGE_BYTES => Ok(Received::Message(message)),
            _ => Ok(Received::TooLong(length)),
        },
        Err(Errno::AGAIN | Errno::INTR) => Ok(Received::Nothing),
        Err(errno) => Err(errno),
    }
}

/// Sends one message; false if there is no room now.
pub fn send(fd: BorrowedFd<'_>, message: &[u8]) -> Result<bool, Errno> {
    match rustix::net::send(fd, message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS) => Ok(false),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("ferroced-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).unwrap();
        path
    }

    #[test]
    fn a_name_is_taken_once_and_freed_again() {
        let dir = folder("once");
        let first = Claim::new(&dir, "fe0").unwrap();
        assert_eq!(fs::metadata(first.path()).unwrap().mode() & 0o777, 0o600);
        let error = Claim::new(&dir, "fe0").unwrap_err();
        assert_eq!(error.code, Code::Busy);
        assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
        assert!(Claim::new(&dir, "fe1").is_ok());
        drop(first);
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
        assert!(Claim::new(&dir, "fe0").is_ok());
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_dead_socket_is_replaced_and_a_live_one_is_not() {
        let dir = folder("stale");
        let path = dir.join("fe0.sock");
        // A socket whose process is gone, and one that another kind of program listens on.
        drop(listen(&path).unwrap());
        drop(Claim::new(&dir, "fe0").unwrap());
        let live = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert_eq!(Claim::new(&dir, "fe0").unwrap_err().code, Code::Busy);
        assert!(path.exists());
        drop(live);
        assert!(Claim::new(&dir, "fe0").is_ok());
        fs::remove_dir_all(&dir).unwrap();
    }

    /// CTL-1: the path is a folder, a regular file, too long, in a folder that is missing or read-only.
    #[test]
    fn bad_paths_have_clear_errors() {
        let dir = folder("paths");
        fs::create_dir(dir.join("a.sock")).unwrap();
        let error = Claim::new(&dir, "a").unwrap_err().to_string();
        assert!(error.contains("a folder") && error.contains("a.sock"), "{error}");
        fs::write(dir.join("b.sock"), "x").unwrap();
        let error = Claim::new(&dir, "b").unwrap_err().to_string();
        assert!(error.contains("no socket") && error.contains("remove it"), "{error}");
        assert_eq!(fs::read_to_string(dir.join("b.sock")).unwrap(), "x");
        let error = Claim::new(&dir.join("x".repeat(200)), "c").unwrap_err().to_string();
        assert!(error.contains("107 bytes") && error.contains("--run-dir"), "{error}");
        let error = Claim::new(&dir.join("missing/deeper"), "d").unwrap_err().to_string();
        assert!(error.contains("missing/deeper") && error.contains("--run-dir"), "{error}");
        let error = Claim::new(Path::new("/proc"), "e").unwrap_err().to_string();
        assert!(error.contains("/proc/e.lock"), "{error}");
        fs::remove_dir_all(&dir).unwrap();
    }
}

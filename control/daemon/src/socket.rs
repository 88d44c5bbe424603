//! The files in the run folder: binding a Unix socket so that neither a dead predecessor nor a live one is a riddle.
//!
//! Owns the bound socket's file and removes it when dropped. The invariant: a socket file is removed only when nobody
//! listens on it, or when it is the very file that this process made. Called at start and at the end; it never serves.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use rustix::fs::{FlockOperation, Mode, OFlags};

/// Longest path that fits `sockaddr_un` with its final zero.
pub const MAX_PATH_BYTES: usize = 107;

/// A bound socket file.
pub struct BoundSocket {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        // Somebody may have replaced the file; what is not ours stays.
        if let Ok(meta) = fs::symlink_metadata(&self.path)
            && (meta.dev(), meta.ino()) == (self.device, self.inode)
        {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Makes the run folder (mode 0755, as others must reach the sockets inside) if it is not there.
///
/// # Errors
/// It can't be made, or the path is something else.
pub fn ensure_run_dir(dir: &Path) -> anyhow::Result<()> {
    match fs::metadata(dir) {
        Ok(meta) if meta.is_dir() => Ok(()),
        Ok(_) => bail!("run_dir: {} is not a folder; name a folder with --run-dir", dir.display()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => fs::create_dir_all(dir).with_context(|| {
            format!("run_dir: {} can't be made; name a folder of your own with --run-dir", dir.display())
        }),
        Err(e) => Err(e).with_context(|| format!("run_dir: {}", dir.display())),
    }
}

/// Binds and listens on `path`, mode 0660, owned by `group` where that group exists and may be given.
///
/// A socket left by a crash is replaced; one that somebody listens on is left alone.
///
/// # Errors
/// The path is too long, is not a socket, is in use (with the process that uses it), or can't be written.
pub fn bind(path: &Path, group: Option<u32>) -> anyhow::Result<(UnixListener, BoundSocket)> {
    let bytes = path.as_os_str().len();
    if bytes > MAX_PATH_BYTES {
        bail!(
            "socket path {}: asked {bytes} bytes, allowed {MAX_PATH_BYTES} (a limit of Unix sockets); choose a \
             shorter --run-dir",
            path.display()
        );
    }
    let folder = path.parent().unwrap_or(Path::new("."));
    let guard = rustix::fs::open(folder, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .with_context(|| format!("run_dir {}", folder.display()))?;
    // Two that start at once must not both find the dead socket and remove each other's new one. The lock lives
    // only for this call, so it is never left behind.
    rustix::fs::flock(&guard, FlockOperation::NonBlockingLockExclusive)
        .or_else(|_| wait_for_lock(&guard))
        .with_context(|| {
            format!("run_dir {}: another process holds its start-up lock for over 5 s", folder.display())
        })?;
    clear_dead(path)?;
    let before = rustix::process::umask(Mode::from_raw_mode(0o177));
    let bound = UnixListener::bind(path);
    rustix::process::umask(before);
    let listener = bound.with_context(|| format!("socket {}: can't be made", path.display()))?;
    let meta = fs::symlink_metadata(path).with_context(|| format!("socket {}", path.display()))?;
    let socket = BoundSocket { path: path.to_owned(), device: meta.dev(), inode: meta.ino() };
    if let Some(gid) = group
        && let Err(e) = chown(path, None, Some(gid))
    {
        tracing::info!(path = %path.display(), gid, error = %e, "socket stays in our own group");
    }
    fs::set_permissions(path, fs::Permissions::from_mode(0o660))
        .with_context(|| format!("socket {}: mode", path.display()))?;
    Ok((listener, socket))
}

fn wait_for_lock(guard: &rustix::fd::OwnedFd) -> rustix::io::Result<()> {
    for _ in 0..50 {
        std::thread::sleep(std::time::Duration::from_millis(100));
        if rustix::fs::flock(guard, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return Ok(());
        }
    }
    Err(rustix::io::Errno::TIMEDOUT)
}

fn clear_dead(path: &Path) -> anyhow::Result<()> {
    let meta = match fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e).with_context(|| format!("socket {}", path.display())),
    };
    if !meta.file_type().is_socket() {
        let what = if meta.is_dir() { "a folder" } else { "a file that is not a socket" };
        bail!(
            "socket path {}: is {what}; not removed. Move it away or choose another --run-dir",
            path.display()
        );
    }
    match UnixStream::connect(path) {
        Ok(stream) => {
            let pid = rustix::net::sockopt::socket_peercred(&stream)
                .map_or_else(|_| "unknown".to_owned(), |c| c.pid.as_raw_nonzero().to_string());
            bail!(
                "socket {}: in use by the process with pid {pid}; stop that one first, or choose another --run-dir",
                path.display()
            );
        }
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            tracing::info!(path = %path.display(), "removing a socket that nobody listens on");
            fs::remove_file(path)
                .with_context(|| format!("socket {}: dead, but can't be removed", path.display()))
        }
        Err(e) => Err(e)
            .with_context(|| format!("socket {}: in use by something that does not answer", path.display())),
    }
}

/// The number of group `name`, from `/etc/group`; `None` when it does not exist there.
pub fn group_id(name: &str) -> Option<u32> {
    parse_group(&fs::read_to_string("/etc/group").ok()?, name)
}

fn parse_group(text: &str, name: &str) -> Option<u32> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(name)).then(|| fields.nth(1)?.parse().ok()).flatten()
    })
}

/// Who may use a socket.
#[derive(Clone, Copy, Debug)]
pub struct Admission {
    /// The user that runs this process.
    pub own_uid: u32,
    /// The group of the socket's file.
    pub gid: Option<u32>,
}

impl Admission {
    /// True when a peer with these credentials may speak: root, our own user, or the socket's group.
    pub fn allows(&self, uid: u32, gid: u32, pid: Option<i32>) -> bool {
        if uid == 0 || uid == self.own_uid {
            return true;
        }
        let Some(own) = self.gid else { return false };
        // The kernel hands over the primary group only; the file's mode has already held the others back.
        gid == own || pid.is_some_and(|pid| supplementary_groups(pid).contains(&own))
    }
}

fn supplementary_groups(pid: i32) -> Vec<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status
        .lines()
        .find_map(|line| line.strip_prefix("Groups:"))
        .map(|list| list.split_whitespace().filter_map(|g| g.parse().ok()).collect())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("ferroce-sock-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("scratch folder");
        dir
    }

    #[test]
    fn a_dead_socket_is_replaced_and_a_live_one_refused_with_its_pid() {
        let dir = scratch("live");
        let path = dir.join("x.sock");
        // std leaves the file when a listener is dropped: what a crash leaves.
        drop(UnixListener::bind(&path).expect("first"));
        let (_listener, bound) = bind(&path, None).expect("replaces the dead one");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o660);
        let error = bind(&path, None).err().expect("live").to_string();
        assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
        drop(bound);
        assert!(!path.exists(), "removed at the end");
        fs::remove_dir_all(dir).expect("clean");
    }

    #[test]
    fn a_folder_a_file_and_a_long_path_are_refused_clearly() {
        let dir = scratch("bad");
        fs::create_dir(dir.join("d")).expect("folder");
        fs::write(dir.join("f"), b"precious").expect("file");
        let text = |p: PathBuf| format!("{:#}", bind(&p, None).err().expect("refused"));
        assert!(text(dir.join("d")).contains("is a folder"), "folder");
        assert!(text(dir.join("f")).contains("not a socket"), "file");
        assert_eq!(fs::read(dir.join("f")).expect("still there"), b"precious");
        let long = text(dir.join("x".repeat(200)));
        assert!(long.contains("allowed 107"), "{long}");
        assert!(text(PathBuf::from("/proc/none/x.sock")).contains("/proc/none"), "read-only");
        fs::remove_dir_all(dir).expect("clean");
    }

    #[test]
    fn a_file_that_is_not_ours_any_more_is_left() {
        let dir = scratch("theirs");
        let path = dir.join("x.sock");
        let (_listener, bound) = bind(&path, None).expect("ours");
        fs::remove_file(&path).expect("somebody removes it");
        let _other = UnixListener::bind(&path).expect("somebody else's");
        drop(bound);
        assert!(path.exists());
        fs::remove_dir_all(dir).expect("clean");
    }

    #[test]
    fn groups_are_found_by_name_only() {
        let text = "root:x:0:\nferroce-ro:x:991:a,b\nferroce:x:990:c\nbroken:x\n";
        assert_eq!(parse_group(text, "ferroce"), Some(990));
        assert_eq!(parse_group(text, "ferroce-ro"), Some(991));
        assert_eq!(parse_group(text, "broken"), None);
        assert_eq!(parse_group(text, "nobody"), None);
    }

    #[test]
    fn strangers_are_not_admitted() {
        let admission = Admission { own_uid: 1000, gid: Some(990) };
        assert!(admission.allows(0, 0, None));
        assert!(admission.allows(1000, 1000, None));
        assert!(admission.allows(1001, 990, None));
        assert!(!admission.allows(1001, 1001, None));
        assert!(!Admission { own_uid: 1000, gid: None }.allows(1001, 990, None));
    }
}

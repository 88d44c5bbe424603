//! How two sides of a link meet: who listens, and the exchange over a connection.
//!
//! Owns the order of the messages and their deadline. Invariant: rings are used only after both sides said who they
//! are and agreed; a stranger costs a connection, nothing else. Called by the port's housekeeping. Never blocks.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferroce_mem::os::{PageKind, Region};
use rustix::io::Errno;

use super::hello::{BadMessage, Hello, MAX_BYTES, Message, VERSION};
use super::sys::{self, Doorbell, Lock, Locked, Received};
use crate::port::{Fallback, PortError};

/// A peer that connected must have said everything within this time.
const PATIENCE: Duration = Duration::from_secs(2);
/// A region may be longer than its rings by the rounding to the largest page that is used for it.
const ROUNDING: u64 = 2 << 20;

/// The side that listens: it holds the lock and the socket, and removes both.
pub(crate) struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    _lock: Lock,
}

/// What came of looking for a place at a link.
pub(crate) enum Place {
    /// We listen.
    Listening(Listener),
    /// We are connected to the side that listens.
    Connected(OwnedFd),
    /// The other side holds the lock but does not listen yet.
    NotYet(PortError),
}

fn link_error(path: &Path, found: impl std::fmt::Display, hint: &str) -> PortError {
    PortError {
        attribute: "link".into(),
        asked: path.display().to_string(),
        allowed: found.to_string(),
        hint: hint.into(),
    }
}

/// Listens at the link if nobody does, else connects.
pub(crate) fn find_place(path: &Path) -> Result<Place, PortError> {
    let mut lock_path = path.as_os_str().to_owned();
    lock_path.push(".lock");
    let lock_path = PathBuf::from(lock_path);
    let locked = Lock::take(&lock_path).map_err(|error| {
        let hint = "the folder must exist and be writable for this user";
        link_error(path, format!("no lock at {}: {error}", lock_path.display()), hint)
    })?;
    match locked {
        Locked::Ours(lock) => {
            remove_stale(path)?;
            let socket = sys::listen(path).map_err(|errno| {
                link_error(path, format!("no socket: {errno}"), "the folder must be writable for this user")
            })?;
            Ok(Place::Listening(Listener { socket, path: path.into(), _lock: lock }))
        }
        Locked::Theirs(holder) => match sys::connect(path) {
            Ok(socket) => Ok(Place::Connected(socket)),
            Err(Errno::NOENT | Errno::CONNREFUSED | Errno::AGAIN) => {
                Ok(Place::NotYet(link_error(path, format!("pid {holder} does not listen there yet"), "")))
            }
            Err(errno) => {
                let found = format!("held by pid {holder}, which can't be reached: {errno}");
                Err(link_error(path, found, "both sides must run as the same user"))
            }
        },
    }
}

/// Makes way for our socket, with the lock held: what a crash left is removed, anything else refused.
fn remove_stale(path: &Path) -> Result<(), PortError> {
    use std::os::unix::fs::FileTypeExt;
    let kind = match std::fs::symlink_metadata(path) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(link_error(path, error, "")),
    };
    if !kind.is_socket() {
        let what = if kind.is_dir() { "a folder" } else { "a file that is no socket" };
        return Err(link_error(path, format!("{what} is there"), "choose another path"));
    }
    match sys::connect(path) {
        Err(Errno::CONNREFUSED | Errno::NOENT) => {}
        // Somebody listens who does not take our lock, hence none of ours. (A stream socket answers PROTOTYPE.)
        Ok(_) | Err(_) => {
            let found = "another program listens there";
            return Err(link_error(path, found, "stop it, or choose another path"));
        }
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(link_error(path, format!("a stale socket that can't be removed: {error}"), ""))
        }
        _ => Ok(()),
    }
}

impl Listener {
    pub fn accept(&self) -> Option<OwnedFd> {
        sys::accept(&self.socket)
    }
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Ahead of the lock, which goes after this.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Says no to somebody who connected.
pub(crate) fn turn_away(socket: &OwnedFd, why: &str) {
    // If it can't be told, it sees the connection close.
    let _ = sys::send(socket, &Message::Refuse(why.into()).encode(), &[]);
}

/// How far a connection is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// We connected and have said nothing.
    Silent,
    /// The peer's hello is awaited.
    AwaitHello,
    /// We listened and sent the memory.
    AwaitReady,
    /// Joined.
    Up,
}

/// Joined: what a port makes its rings of.
pub(crate) struct Joined {
    pub peer: Hello,
    pub region: Arc<Region>,
    /// By which the peer's workers are woken, one per queue.
    pub ringers: Vec<OwnedFd>,
    /// We are the side that listened.
    pub listened: bool,
    /// The rings did not get the pages we wanted.
    pub fallback: Option<Fallback>,
}

/// What a step of the exchange came to.
pub(crate) enum Step {
    /// The peer must say something first.
    Waiting,
    Joined(Box<Joined>),
    /// The connection is of no use.
    Failed(PortError),
}

/// A connection to a peer.
pub(crate) struct Connection {
    socket: OwnedFd,
    stage: Stage,
    listened: bool,
    deadline: Instant,
    /// What the peer sent, until both are joined.
    pending: Option<Joined>,
}

impl Connection {
    /// A connection that we accepted (`listened`) or made.
    pub fn new(socket: OwnedFd, listened: bool, now: Instant) -> Connection {
        let stage = if listened { Stage::AwaitHello } else { Stage::Silent };
        Connection { socket, stage, listened, deadline: now + PATIENCE, pending: None }
    }
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
    /// The peer in words.
    pub fn peer(&self) -> String {
        match sys::peer_pid(&self.socket) {
            Some(pid) => format!("the peer (pid {pid})"),
            None => "the peer".into(),
        }
    }

    /// Once joined: false when the peer is gone, or says what it has no reason to say.
    pub fn alive(&self) -> bool {
        matches!(sys::receive(&self.socket, &mut [0; MAX_BYTES]), Received::Nothing)
    }

    /// Goes as far as it can without waiting.
    pub fn advance(&mut self, path: &Path, ours: &Hello, doorbells: &[&Doorbell], now: Instant) -> Step {
        let fail = |found: String, hint: &str| Step::Failed(link_error(path, found, hint));
        let ringers: Vec<BorrowedFd<'_>> = doorbells.iter().map(|bell| bell.ringer()).collect();
        if self.stage == Stage::Silent {
            // A peer that turned us away may have closed already: what it said is read below.
            let said = sys::send(&self.socket, &Message::Hello(ours.clone()).encode(), &ringers);
            if let Err(errno) = said
                && errno != Errno::PIPE
            {
                return fail(format!("{} can't be told who we are: {errno}", self.peer()), "");
            }
            self.stage = Stage::AwaitHello;
        }
        let mut buffer = [0; MAX_BYTES];
        let (bytes, fds) = match sys::receive(&self.socket, &mut buffer) {
            Received::Message(len, fds) => (buffer.get(..len).unwrap_or_default(), fds),
            Received::Closed => return fail(format!("{} closed the connection", self.peer()), ""),
            Received::Nothing if now < self.deadline => return Step::Waiting,
            Received::Nothing => {
                let found = format!("{} said nothing for {} s", self.peer(), PATIENCE.as_secs());
                return fail(found, "is it stopped, or another program?");
            }
        };
        let message = match Message::decode(bytes) {
            Ok(message) => message,
            Err(bad) => return fail(self.describe(bad), ""),
        };
        match (self.stage, message) {
            (_, Message::Refuse(text)) => fail(format!("{} refused: {text}", self.peer()), ""),
            (Stage::AwaitHello, Message::Hello(theirs)) => match self.meet(path, ours, theirs, fds, &ringers)
            {
                Ok(step) => step,
                Err(error) => Step::Failed(error),
            },
            (Stage::AwaitReady, Message::Ready) => {
                self.stage = Stage::Up;
                self.pending.take().map_or(Step::Waiting, |joined| Step::Joined(Box::new(joined)))
            }
            (stage, _) => fail(format!("{} spoke out of turn ({stage:?})", self.peer()), ""),
        }
    }

    fn describe(&self, bad: BadMessage) -> String {
        let peer = self.peer();
        match bad {
            BadMessage::NotOurs => format!("{peer} does not speak our protocol"),
            BadMessage::Version(theirs) => {
                format!("{peer} has version {theirs} of the link, we have {VERSION}; upgrade the older one")
            }
            BadMessage::Malformed => format!("{peer} sent a damaged message"),
        }
    }

    /// The peer's hello is here: agree, and share the memory.
    fn meet(
        &mut self,
        path: &Path,
        ours: &Hello,
        theirs: Hello,
        mut fds: Vec<OwnedFd>,
        ringers: &[BorrowedFd<'_>],
    ) -> Result<Step, PortError> {
        if let Err(error) = ours.check(&theirs, &self.peer()) {
            // In the peer's own words, since it prints it. Only one of the two sees the mismatch first.
            let text = theirs.check(ours, &format!("pid {}", std::process::id())).err();
            turn_away(&self.socket, &text.as_ref().unwrap_or(&error).to_string());
            return Err(error);
        }
        let memory = if self.listened { 0 } else { 1 };
        let wanted = memory + usize::from(ours.geometry.queues);
        if fds.len() != wanted {
            let found = format!("{} passed {} descriptors where {wanted} are needed", self.peer(), fds.len());
            return Err(link_error(path, found, ""));
        }
        let peers_ringers = fds.split_off(memory);
        let listened = self.listened;
        if listened {
            let (region, fallback) = new_region(ours)?;
            let mut passed = vec![region.fd()];
            passed.extend(ringers);
            self.say(path, Message::Hello(ours.clone()), &passed)?;
            self.stage = Stage::AwaitReady;
            let region = Arc::new(region);
            self.pending = Some(Joined { peer: theirs, region, ringers: peers_ringers, listened, fallback });
            return Ok(Step::Waiting);
        }
        let Some(fd) = fds.pop() else { return Err(link_error(path, "no memory was passed", "")) };
        let region = Arc::new(peers_region(path, ours, &theirs, fd)?);
        self.say(path, Message::Ready, &[])?;
        self.stage = Stage::Up;
        let joined = Joined { peer: theirs, region, ringers: peers_ringers, listened, fallback: None };
        Ok(Step::Joined(Box::new(joined)))
    }

    fn say(&self, path: &Path, message: Message, fds: &[BorrowedFd<'_>]) -> Result<(), PortError> {
        sys::send(&self.socket, &message.encode(), fds)
            .map_err(|errno| link_error(path, format!("{} can't be answered: {errno}", self.peer()), ""))
    }
}

/// Memory for the rings. Not from the hugetlb pool: a hole that a peer punches there can't always be filled again.
fn new_region(ours: &Hello) -> Result<(Region, Option<Fallback>), PortError> {
    let bytes = ours.geometry.bytes() as u64;
    let better = match Region::new(bytes, PageKind::Thp, None) {
        Ok(region) => return Ok((region, None)),
        Err(error) => error,
    };
    let region = Region::new(bytes, PageKind::Normal, None).map_err(|error| PortError {
        attribute: "ring_bytes".into(),
        asked: error.asked,
        allowed: error.allowed,
        hint: error.hint,
    })?;
    let fallback = Fallback {
        wanted: "transparent hugepages for the rings".into(),
        got: PageKind::Normal.to_string(),
        reason: better.allowed,
        hint: better.hint,
    };
    Ok((region, Some(fallback)))
}

/// Maps the listener's memory, after checking all that can be checked.
fn peers_region(path: &Path, ours: &Hello, theirs: &Hello, fd: OwnedFd) -> Result<Region, PortError> {
    super::check_ring(theirs.geometry.ring_bytes, ours.mtu as usize + super::ETHERNET_BYTES)?;
    let refuse = |found: String| link_error(path, format!("the peer's memory: {found}"), "");
    let stat = rustix::fs::fstat(&fd).map_err(|errno| refuse(errno.to_string()))?;
    let (len, least) = (u64::try_from(stat.st_size).unwrap_or(0), theirs.geometry.bytes() as u64);
    if !(least..=least + ROUNDING).contains(&len) {
        return Err(refuse(format!("{len} bytes where the rings need {least}")));
    }
    let region = Region::from_fd(fd, len).map_err(|error| refuse(error.to_string()))?;
    match region.page_kind() {
        PageKind::Normal | PageKind::Thp => Ok(region),
        kind => Err(refuse(format!("{kind}, which a peer could take away"))),
    }
}

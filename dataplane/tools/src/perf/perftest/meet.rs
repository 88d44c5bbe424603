//! One port, two conversations: each side finds out who the other one is from its first message.
//!
//! A client of ours starts as perftest's programs do, with a version, and hides a mark behind the version's NUL, where
//! those programs do not look. A server of ours answers a marked version with a marked one, and both go on with lines of
//! JSON; any other answer is perftest's. So neither side needs an option, and `--peer` only forbids.

use super::codec::{Caller, VERSION_BYTES, Version};
use crate::fail::{Fail, Outcome};
use crate::net::{Peer, STEP_LIMIT, excerpt};
use crate::perf::options::PeerKind;
use crate::perf::talk;

/// Who the peer is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Met {
    /// One of ours: lines of JSON follow.
    Ferroce,
    /// A program of perftest, whose version was exchanged.
    Perftest(Version),
}

/// The mark of a version that we send. Ours alone must be told apart, so a number that does not fit is none.
fn mark() -> Option<u8> {
    u8::try_from(talk::VERSION).ok()
}

fn stranger(peer: &Peer, got: &[u8]) -> Fail {
    Fail::failed(format!(
        "peer {} speaks neither ferroce perf nor perftest: it sent {}",
        peer.name(),
        excerpt(got)
    ))
}

fn receive(peer: &mut Peer, what: &str) -> Outcome<Version> {
    let mut bytes = [0; VERSION_BYTES];
    peer.receive_exact(&mut bytes, STEP_LIMIT, what)?;
    Version::decode(&bytes).map_err(|refused| {
        let strange = stranger(peer, &bytes);
        Fail::failed(format!("{strange} ({refused})"))
    })
}

fn not_what_was_said(peer: &Peer, is: &str, told: &str) -> Fail {
    Fail::failed(format!("peer {} is {is}, but this side was told --peer {told}", peer.name()))
}

/// The client's first exchange.
pub fn call(peer: &mut Peer, kind: PeerKind) -> Outcome<Met> {
    let offered = if kind == PeerKind::Perftest { None } else { mark() };
    peer.send(&Version::ours(offered).encode())?;
    if peer.peek_byte(STEP_LIMIT, "its version")? == b'{' {
        // A server of another version that knows no marks, or one that refuses at once: it says why.
        return Ok(Met::Ferroce);
    }
    let version = receive(peer, "its version")?;
    match (version.mark, kind) {
        (Some(_), PeerKind::Auto | PeerKind::Ferroce) => Ok(Met::Ferroce),
        (None, PeerKind::Ferroce) => Err(not_what_was_said(peer, "a program of perftest", "ferroce")),
        (_, PeerKind::Perftest) | (None, PeerKind::Auto) => Ok(Met::Perftest(version)),
    }
}

/// The server's first exchange.
pub fn answer(peer: &mut Peer, kind: PeerKind) -> Outcome<Met> {
    let first = peer.peek_byte(STEP_LIMIT, "its first message")?;
    match Caller::of(first) {
        Some(Caller::Json) if kind == PeerKind::Perftest => {
            Err(not_what_was_said(peer, "a ferroce", "perftest"))
        }
        Some(Caller::Json) => Ok(Met::Ferroce),
        Some(Caller::Version) => {
            let version = receive(peer, "its version")?;
            let is_ours = version.mark.is_some() && kind != PeerKind::Perftest;
            peer.send(&Version::ours(if is_ours { mark() } else { None }).encode())?;
            match (is_ours, kind) {
                (true, _) => Ok(Met::Ferroce),
                (false, PeerKind::Ferroce) => {
                    Err(not_what_was_said(peer, "a program of perftest", "ferroce"))
                }
                (false, PeerKind::Auto | PeerKind::Perftest) => Ok(Met::Perftest(version)),
            }
        }
        None => {
            let mut shown = vec![0; 1];
            peer.receive_exact(&mut shown, STEP_LIMIT, "its first message")?;
            shown.extend(peer.rest(40));
            Err(stranger(peer, &shown))
        }
    }
}

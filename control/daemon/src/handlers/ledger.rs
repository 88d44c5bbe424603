//! All or nothing over several appliances: what was made is written down, and taken back when a step fails.
//!
//! Owns the list of what is to be undone. The invariants: everything that one ledger makes carries its cookie, a
//! random number; undoing goes backwards; where it is unknown whether an appliance did what it was asked, that
//! appliance is searched for the cookie, by the janitor later if it does not answer now. What ends with its call has a
//! cookie that says so, so that a control process finds what one that died left. Used by `connect` and `perf_run`.

use std::fs::File;
use std::io::Read;
use std::time::Duration;

use ferroce_api::appliance::{Command, ListKind, Response};
use ferroce_api::rpc::RpcError;
use ferroce_api::{ApiError, Code};

use crate::control::Control;
use crate::dp_link::{CALL_DEADLINE, Link};

/// In the cookie of what ends with the call that made it. Without it, a cookie has at most 52 bits.
const TEMPORARY: u64 = 1 << 52;

/// True for a cookie of what ends with the call that made it.
pub(super) const fn is_temporary(cookie: u64) -> bool {
    cookie & TEMPORARY != 0 && cookie < 2 * TEMPORARY
}

/// A refused step: which one, where, and why.
pub(super) struct StepError {
    step: &'static str,
    dev: String,
    error: ApiError,
}

impl StepError {
    pub(super) fn new(step: &'static str, link: &Link, error: ApiError) -> Self {
        StepError { step, dev: link.name().to_owned(), error }
    }

    /// The refusal of `verb`, with `rest` appended: what could not be undone.
    pub(super) fn into_rpc(self, verb: &str, rest: Option<&str>) -> RpcError {
        let mut rpc = RpcError::from(self.error);
        rpc.message = format!("{verb}: {} on {}: {}", self.step, self.dev, rpc.message);
        if let Some(rest) = rest {
            rpc.message.push_str("; left behind: ");
            rpc.message.push_str(rest);
        }
        rpc
    }
}

/// What one operation made.
pub(super) struct Ledger<'a> {
    control: &'a Control,
    cookie: u64,
    undo: Vec<(&'a Link, Command)>,
    /// Appliances that may have done more than they said.
    uncertain: Vec<&'a Link>,
}

impl<'a> Ledger<'a> {
    /// An empty one for what stays, with a fresh cookie.
    pub(super) fn new(control: &'a Control) -> Result<Self, ApiError> {
        Ok(Self::with(control, random_cookie()?))
    }

    /// An empty one for what ends with the call.
    pub(super) fn temporary(control: &'a Control) -> Result<Self, ApiError> {
        Ok(Self::with(control, random_cookie()? | TEMPORARY))
    }

    fn with(control: &'a Control, cookie: u64) -> Self {
        control.under_way.borrow_mut().insert(cookie);
        Ledger { control, cookie, undo: Vec::new(), uncertain: Vec::new() }
    }

    /// Cookie of everything that is made.
    pub(super) fn cookie(&self) -> u64 {
        self.cookie
    }

    /// Does one command; what it makes is written down.
    pub(super) async fn make(
        &mut self,
        step: &'static str,
        link: &'a Link,
        command: Command,
    ) -> Result<Response, StepError> {
        self.steps(link, vec![(step, command)], CALL_DEADLINE).await?.pop().ok_or_else(|| {
            StepError::new(step, link, ApiError::new(Code::Malformed, "reply", "", "no answer in the reply"))
        })
    }

    /// Does several commands in one message. The first refused one is the error; what the others made is written down.
    pub(super) async fn steps(
        &mut self,
        link: &'a Link,
        steps: Vec<(&'static str, Command)>,
        within: Duration,
    ) -> Result<Vec<Response>, StepError> {
        let (names, commands): (Vec<_>, Vec<_>) = steps.into_iter().unzip();
        let first = names.first().copied().unwrap_or("nothing");
        let outcomes = link.batch(commands, within).await.map_err(|error| {
            self.uncertain.push(link);
            StepError::new(first, link, error)
        })?;
        let mut responses = Vec::new();
        let mut failed = None;
        for (name, outcome) in names.into_iter().zip(outcomes) {
            match outcome.into_result() {
                Ok(response) => {
                    if let Some(command) = undo_of(&response) {
                        self.undo.push((link, command));
                    }
                    responses.push(response);
                }
                Err(error) if failed.is_none() => failed = Some(StepError::new(name, link, error)),
                Err(_) => {}
            }
        }
        match failed {
            Some(error) => Err(error),
            None => Ok(responses),
        }
    }

    /// Takes everything back, the last first. Gives what is left behind, in words.
    pub(super) async fn undo(mut self) -> Option<String> {
        let mut left = Vec::new();
        while let Some((link, command)) = self.undo.pop() {
            if self.uncertain.iter().any(|l| l.name() == link.name())
                && !matches!(command, Command::PerfStop { .. })
            {
                continue; // The search below finds it.
            }
            match link.one(command).await {
                Ok(_) => {}
                // It went away with what it stood on, or its appliance did.
                Err(error) if error.code == Code::NotFound => {}
                Err(error) => {
                    tracing::warn!(dev = link.name(), cookie = self.cookie, %error, "undo failed");
                    self.uncertain.push(link);
                }
            }
        }
        let mut searched: Vec<&str> = Vec::new();
        for link in &self.uncertain {
            if searched.contains(&link.name()) {
                continue;
            }
            searched.push(link.name());
            match sweep(link, self.cookie).await {
                Ok(_) => {}
                Err(error) if error.code == Code::Gone => {
                    tracing::warn!(dev = link.name(), cookie = self.cookie, %error, "undo: the appliance is gone");
                }
                Err(error) => {
                    self.control.left_behind.borrow_mut().insert((link.name().to_owned(), self.cookie));
                    left.push(format!(
                        "objects with cookie {} on {}, until it answers: {error}",
                        self.cookie,
                        link.name()
                    ));
                }
            }
        }
        (!left.is_empty()).then(|| left.join("; "))
    }
}

impl Drop for Ledger<'_> {
    fn drop(&mut self) {
        self.control.under_way.borrow_mut().remove(&self.cookie);
    }
}

fn undo_of(response: &Response) -> Option<Command> {
    match response {
        Response::Pd { pd } => Some(Command::DeallocPd { pd: *pd }),
        Response::Mr { lkey, .. } => Some(Command::DeregMr { lkey: *lkey }),
        Response::Cq { cq } => Some(Command::DestroyCq { cq: *cq }),
        Response::Qp { qpn, .. } => Some(Command::DestroyQp { qpn: *qpn }),
        Response::PerfStarted { id } => Some(Command::PerfStop { id: *id }),
        Response::Done
        | Response::Device(_)
        | Response::Port(_)
        | Response::Gids(_)
        | Response::QpInfo(_)
        | Response::Pds(_)
        | Response::Mrs(_)
        | Response::Cqs(_)
        | Response::Qps(_)
        | Response::Path(_)
        | Response::Perf(_)
        | Response::Status(_)
        | Response::Stats(_) => None,
    }
}

/// Destroys everything on `link` that carries `cookie`; gives how many objects that were.
pub(crate) async fn sweep(link: &Link, cookie: u64) -> Result<u64, ApiError> {
    if is_temporary(cookie) {
        stop_tests(link, Some(cookie), |c| c == cookie).await?;
    }
    sweep_where(link, Some(cookie), |c| c == cookie).await
}

/// Destroys what a control process that died has left on `link`: everything temporary that is not `under_way` here.
pub(crate) async fn sweep_stale(link: &Link, control: &Control) -> Result<u64, ApiError> {
    let stale = |cookie| is_temporary(cookie) && !control.under_way.borrow().contains(&cookie);
    stop_tests(link, None, stale).await?;
    sweep_where(link, None, stale).await
}

/// Stops the tests on the regions that `ours` says.
async fn stop_tests(link: &Link, only: Option<u64>, ours: impl Fn(u64) -> bool) -> Result<(), ApiError> {
    let mut cursor = 0;
    loop {
        let list = Command::List { kind: ListKind::Mr, cursor, limit: 0, cookie: only };
        let page = match link.one(list).await? {
            Response::Mrs(page) => page,
            other => return Err(link.unexpected(&other)),
        };
        for region in page.entries.iter().filter(|e| ours(e.cookie)) {
            link.one(Command::PerfStopOn { lkey: region.lkey }).await?;
        }
        match page.next {
            Some(next) => cursor = next,
            None => return Ok(()),
        }
    }
}

async fn sweep_where(link: &Link, only: Option<u64>, ours: impl Fn(u64) -> bool) -> Result<u64, ApiError> {
    let mut destroyed = 0;
    // What stands on others goes first.
    for kind in [ListKind::Qp, ListKind::Cq, ListKind::Mr, ListKind::Pd] {
        let mut cursor = 0;
        loop {
            let (commands, next) =
                match link.one(Command::List { kind, cursor, limit: 0, cookie: only }).await? {
                    Response::Qps(page) => {
                        let own = page.entries.iter().filter(|e| ours(e.cookie));
                        (own.map(|e| Command::DestroyQp { qpn: e.qpn }).collect::<Vec<_>>(), page.next)
                    }
                    Response::Cqs(page) => {
                        let own = page.entries.iter().filter(|e| ours(e.cookie));
                        (own.map(|e| Command::DestroyCq { cq: e.cq }).collect(), page.next)
                    }
                    Response::Mrs(page) => {
                        let own = page.entries.iter().filter(|e| ours(e.cookie));
                        (own.map(|e| Command::DeregMr { lkey: e.lkey }).collect(), page.next)
                    }
                    Response::Pds(page) => {
                        let own = page.entries.iter().filter(|e| ours(e.cookie));
                        (own.map(|e| Command::DeallocPd { pd: e.pd }).collect(), page.next)
                    }
                    other => return Err(link.unexpected(&other)),
                };
            for command in commands {
                match link.one(command).await {
                    Ok(_) => destroyed += 1,
                    Err(error) if error.code == Code::NotFound => {}
                    Err(error) => return Err(error),
                }
            }
            match next {
                Some(next) => cursor = next,
                None => break,
            }
        }
    }
    Ok(destroyed)
}

/// Random bytes of the kernel's.
fn random(bytes: &mut [u8]) -> Result<(), ApiError> {
    File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(bytes))
        .map_err(|e| ApiError::new(Code::Internal, "/dev/urandom", "", e.to_string()))
}

/// A cookie: never 0, and with [`TEMPORARY`] at most 53 bits, so that every JSON reader keeps all of it.
fn random_cookie() -> Result<u64, ApiError> {
    let mut bytes = [0; 8];
    random(&mut bytes)?;
    Ok((u64::from_ne_bytes(bytes) & (TEMPORARY - 1)).max(1))
}

/// A start PSN that nobody can guess.
pub(super) fn random_psn() -> Result<ferroce_wire::Psn, ApiError> {
    let mut bytes = [0; 4];
    random(&mut bytes)?;
    Ok(ferroce_wire::Psn::new(u32::from_ne_bytes(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cookies_and_psns_differ_and_fit() {
        let cookies: std::collections::HashSet<u64> =
            (0..1000).map(|_| random_cookie().expect("urandom")).collect();
        assert_eq!(cookies.len(), 1000);
        assert!(cookies.iter().all(|c| *c > 0 && *c < TEMPORARY && !is_temporary(*c)));
        assert!(cookies.iter().all(|c| is_temporary(*c | TEMPORARY)));
        // One that others chose is never taken for ours.
        assert!(!is_temporary(u64::MAX));
        let psns: std::collections::HashSet<u32> =
            (0..1000).map(|_| random_psn().expect("urandom").get()).collect();
        // 1000 draws of 2^24: a handful of repeats at most.
        assert!(psns.len() > 990, "{}", psns.len());
    }
}

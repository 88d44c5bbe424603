//! Shared receive queues: receives taken in order, one limit event when it is due.
//!
//! Owns the model of each queue. Called by [`crate::run`] and the work; a receive that is taken belongs to the direction
//! whose message took it.

use std::collections::VecDeque;

use super::{Checker, RecvRecord, Violation, ViolationKind, broken};
use crate::world::QpRef;

/// The shared receive queue of an endpoint.
pub(super) struct Shared {
    posted: VecDeque<RecvRecord>,
    /// 0 when disarmed.
    limit: u32,
    /// The event must come now.
    due: bool,
}

impl Checker {
    /// An endpoint has a shared receive queue.
    pub fn add_shared(&mut self, endpoint: usize, limit: u32) {
        self.shared.insert(endpoint, Shared { posted: VecDeque::new(), limit, due: false });
    }

    /// A receive was posted to it.
    pub fn posted_shared(&mut self, endpoint: usize, record: RecvRecord) {
        if let Some(shared) = self.shared.get_mut(&endpoint) {
            shared.posted.push_back(record);
        }
    }

    /// Its limit was set.
    pub fn armed(&mut self, endpoint: usize, limit: u32) {
        if let Some(shared) = self.shared.get_mut(&endpoint) {
            shared.limit = limit;
        }
    }

    /// Receives in it.
    pub fn shared_open(&self, endpoint: usize) -> usize {
        self.shared.get(&endpoint).map_or(0, |shared| shared.posted.len())
    }

    /// A message that came to this queue pair took a receive: the oldest.
    pub fn taken(&mut self, at: QpRef) -> Result<(), Violation> {
        let flow = self.flows.iter_mut().find(|flow| flow.to == at);
        let (Some(flow), Some(shared)) = (flow, self.shared.get_mut(&at.endpoint)) else {
            return broken(ViolationKind::NotOnce, format!("{at:?} has no shared queue, and took a receive"));
        };
        let Some(record) = shared.posted.pop_front() else {
            return broken(ViolationKind::NotOnce, format!("{at:?} took a receive that nobody posted"));
        };
        flow.recvs.push_back(record);
        if shared.posted.len() < shared.limit as usize {
            (shared.limit, shared.due) = (0, true);
        }
        Ok(())
    }

    /// The limit event came.
    pub fn limit_told(&mut self, endpoint: usize) -> Result<(), Violation> {
        if self.shared.get_mut(&endpoint).is_some_and(|shared| std::mem::take(&mut shared.due)) {
            return Ok(());
        }
        let what = format!("endpoint {endpoint}: the limit of the shared receive queue was not reached");
        broken(ViolationKind::WrongNotice, what)
    }

    /// After each event: no limit event is overdue.
    pub fn limits_are_told(&self) -> Result<(), Violation> {
        match self.shared.iter().find(|(_, shared)| shared.due) {
            Some((endpoint, _)) => broken(
                ViolationKind::WrongNotice,
                format!("endpoint {endpoint}: no event for the limit of the shared receive queue"),
            ),
            None => Ok(()),
        }
    }
}

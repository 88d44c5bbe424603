//! Notices waiting for control: at most one of each kind, so their room is fixed.

use ferroce_verbs::WcStatus;
use ferroce_wire::{NakCode, Psn};

use crate::qp::Notice;

/// The notices of a queue pair. Invariant: each kind waits at most once; the first fatal cause wins.
#[derive(Clone, Copy, Default)]
pub(crate) struct Notices {
    pub(crate) comm_est: bool,
    pub(crate) drained: bool,
    pub(crate) last_wqe: bool,
    pub(crate) fatal: Option<(WcStatus, Psn, Option<NakCode>)>,
}

impl Notices {
    pub(crate) fn comm_est(&mut self) {
        self.comm_est = true;
    }

    pub(crate) fn drained(&mut self) {
        self.drained = true;
    }

    /// In error: no more receives are taken from the shared queue.
    pub(crate) fn last_wqe(&mut self) {
        self.last_wqe = true;
    }

    pub(crate) fn fatal(&mut self, status: WcStatus, psn: Psn, nak: Option<NakCode>) {
        self.fatal.get_or_insert((status, psn, nak));
    }

    /// The next one. The last receive is told of when none waits for its completion any more.
    pub(crate) fn take(&mut self, receives_out: bool) -> Option<Notice> {
        if core::mem::take(&mut self.comm_est) {
            return Some(Notice::CommEst);
        }
        if core::mem::take(&mut self.drained) {
            return Some(Notice::Drained);
        }
        if let Some((status, psn, nak)) = self.fatal.take() {
            return Some(Notice::Fatal { status, psn, nak });
        }
        if self.last_wqe && !receives_out {
            self.last_wqe = false;
            return Some(Notice::LastWqeReached);
        }
        None
    }
}

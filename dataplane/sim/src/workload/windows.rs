//! Windows: which key may be used, bound or ended, and by whom.
//!
//! Part of [`super::Workload`].

use ferroce_verbs::Rkey;

use super::{Ask, Workload};
use crate::checker::{Checker, OpKind, SendRecord, Violation};
use crate::world::World;

/// What may be done with a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WindowState {
    /// Opens nothing; may be bound.
    Free,
    /// A bind, an end, or a SEND that ends it is under way.
    Changing,
    /// The peer may use it.
    Bound,
}

/// A window of the receiving queue pair of a direction.
pub(super) struct Window {
    pub(super) rkey: Rkey,
    pub(super) state: WindowState,
    /// Requests of the peer that go through it and are not finished.
    pub(super) uses: u32,
    /// READs and atomics among them: a SEND that ends the window may overtake their answers.
    pub(super) queries: u32,
}

impl Workload {
    /// The key that a request uses, ends or makes.
    pub(super) fn window_for(&mut self, flow: usize, kind: OpKind) -> Option<Rkey> {
        let peers = &self.flows[flow].window;
        let (rkey, usable, queries) = (peers.rkey, peers.state == WindowState::Bound, peers.queries);
        let own = self.flows[flow ^ 1].window.rkey;
        match kind {
            OpKind::Send => (usable && queries == 0 && self.rng.chance(200_000)).then_some(rkey),
            // One that does not know better goes on with a key that was taken away.
            OpKind::Write if self.taken_key.is_some() => self.taken_key,
            OpKind::Write | OpKind::Read | OpKind::CmpSwap | OpKind::FetchAdd => {
                (usable && self.rng.chance(500_000)).then_some(rkey)
            }
            // The next key of a window: the owner chooses the lowest 8 bits.
            OpKind::BindMw => Some(Rkey(own.0 & !0xff | (own.0 as u8).wrapping_add(1) as u32)),
            OpKind::LocalInv => Some(own),
        }
    }

    /// Ends the window that the WRITEs of `flow` go through, while some are under way. False if it is not the time yet.
    pub fn take_key(
        &mut self,
        flow: usize,
        world: &mut World,
        checker: &mut Checker,
    ) -> Result<bool, Violation> {
        let window = &self.flows[flow].window;
        let owner = self.flows[flow ^ 1].from;
        if window.state != WindowState::Bound || window.uses == 0 || world.qp(owner).send_queue_free() == 0 {
            return Ok(false);
        }
        self.taken_key = Some(window.rkey);
        self.flows[flow ^ 1].left = 0;
        self.post_send(flow ^ 1, Ask { kind: Some(OpKind::LocalInv), group: None }, world, checker)
    }

    pub(super) fn window_posted(&mut self, flow: usize, record: &SendRecord) {
        let Some(rkey) = record.window else { return };
        match record.kind {
            OpKind::Send => self.flows[flow].window.state = WindowState::Changing,
            OpKind::Write | OpKind::Read | OpKind::CmpSwap | OpKind::FetchAdd => {
                self.flows[flow].window.uses += 1;
                self.flows[flow].window.queries += u32::from(record.kind != OpKind::Write);
            }
            _ => {
                let own = &mut self.flows[flow ^ 1].window;
                (own.rkey, own.state) = (rkey, WindowState::Changing);
            }
        }
    }

    pub(super) fn window_changed(&mut self, flow: usize, kind: OpKind, rkey: Rkey) {
        let (peers, own) = (flow, flow ^ 1);
        match kind {
            OpKind::Send => self.flows[peers].window.state = WindowState::Free,
            OpKind::Write | OpKind::Read | OpKind::CmpSwap | OpKind::FetchAdd => {
                self.flows[peers].window.uses -= 1;
                self.flows[peers].window.queries -= u32::from(kind != OpKind::Write);
            }
            OpKind::BindMw if self.flows[own].window.rkey == rkey => {
                self.flows[own].window.state = WindowState::Bound;
            }
            _ => self.flows[own].window.state = WindowState::Free,
        }
    }
}

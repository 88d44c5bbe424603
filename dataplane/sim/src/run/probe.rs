//! After the faults: what promises nothing must serve too, once nothing is in its way.

use ferroce_verbs::{QpState, QpType};

use super::{Run, stuck};
use crate::checker::Violation;

/// Messages that each direction, and each group, gets.
const PROBES: usize = 2;

impl Run<'_> {
    /// Sends messages on each unreliable direction and to each group, one at a time, to receivers that are ready: each must
    /// arrive. A gap before, or a message that broke off, is no excuse.
    pub(super) fn probe(&mut self) -> Result<(), Violation> {
        self.checker.wires_are_good();
        let services = self.plan.connections.iter().flat_map(|c| [c.service; 2]);
        let probed = |service: QpType| service != QpType::Rc;
        let flows: Vec<_> = services.enumerate().filter(|(_, s)| probed(*s)).map(|(flow, _)| flow).collect();
        for flow in flows {
            let at = self.work.flows[flow].from;
            if self.world.qp(at).state() != QpState::Rts {
                return stuck(format!("{at:?} is in {:?}", self.world.qp(at).state()));
            }
            let datagrams = self.work.flows[flow].connection.service == QpType::Ud;
            let groups = if datagrams { self.plan.groups.len() } else { 0 };
            for group in std::iter::once(None).chain((0..groups).map(Some)) {
                for _ in 0..PROBES {
                    if self.work.probe(flow, group, &mut self.world, &mut self.checker)? {
                        self.probes += 1;
                        self.until_rest()?;
                        self.checker.all_arrived()?;
                    }
                }
            }
        }
        Ok(())
    }
}

//! Multicast: which UD queue pairs receive what is sent to a group.
//!
//! Owns a worker's copy of the attachments. Invariant: every worker's copy is the same and sorted by group, so that the
//! worker on whose queue a datagram lands knows its own receivers and which other workers have some; its room is taken
//! at the start. Read per multicast frame, changed by control's commands. Which frames of a group a port lets in at all
//! is the port's matter: `shm` has no filter, `xdp` delivers the groups that the interface has joined.

use ferroce_verbs::error::VerbsErrorKind;
use ferroce_verbs::{Device, Gid, QpType, Qpn, VerbsError};

use crate::check::refuse;
use crate::command::Command;
use crate::control::Control;
use crate::device::{SoftDevice, lock};

/// Groups of a device.
pub(crate) const MAX_GROUPS: u32 = 256;
/// Attachments of a device, all groups together.
pub(crate) const MAX_ATTACHED: usize = 2048;

/// One queue pair in one group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Member {
    group: [u8; 16],
    pub worker: u8,
    pub qpn: u32,
}

impl Member {
    pub fn new(group: Gid, worker: u8, qpn: Qpn) -> Self {
        Member { group: group.0, worker, qpn: qpn.get() }
    }
}

/// A worker's copy of all attachments.
#[derive(Debug)]
pub(crate) struct Groups(Vec<Member>);

impl Groups {
    pub fn new() -> Self {
        Groups(Vec::with_capacity(MAX_ATTACHED))
    }

    /// Adds a member. False if there is no room; a member that is there already stays once.
    pub fn add(&mut self, member: Member) -> bool {
        match self.0.binary_search(&member) {
            Ok(_) => true,
            Err(_) if self.0.len() >= MAX_ATTACHED => false,
            Err(at) => {
                self.0.insert(at, member);
                true
            }
        }
    }

    /// Takes a member out.
    pub fn remove(&mut self, member: &Member) {
        if let Ok(at) = self.0.binary_search(member) {
            self.0.remove(at);
        }
    }

    /// The places of a group's members, in [`Groups::at`].
    #[inline]
    pub fn find(&self, group: &Gid) -> std::ops::Range<usize> {
        let first = self.0.partition_point(|m| m.group < group.0);
        let members = self.0.get(first..).unwrap_or(&[]);
        first..first + members.partition_point(|m| m.group == group.0)
    }

    /// The member at a place.
    #[inline]
    pub fn at(&self, place: usize) -> Option<Member> {
        self.0.get(place).copied()
    }
}

impl Control {
    /// Records an attachment; false if it is there already.
    fn join(&mut self, qpn: Qpn, group: Gid) -> Result<bool, VerbsError> {
        let exhausted = |what: &str, allowed: String| {
            refuse(VerbsErrorKind::Exhausted, what, "one more", allowed, "detach what is not needed")
        };
        if self.groups.get(&group).is_some_and(|members| members.contains(&qpn)) {
            return Ok(false);
        }
        if self.groups.values().map(Vec::len).sum::<usize>() >= MAX_ATTACHED {
            return Err(exhausted("mcast_qp_attach", format!("at most {MAX_ATTACHED}")));
        }
        if !self.groups.contains_key(&group) && self.groups.len() >= MAX_GROUPS as usize {
            return Err(exhausted("mcast_grp", format!("at most {MAX_GROUPS}")));
        }
        self.groups.entry(group).or_default().push(qpn);
        Ok(true)
    }

    /// Ends the record of an attachment; false if there is none.
    fn part(&mut self, qpn: Qpn, group: Gid) -> bool {
        let Some(members) = self.groups.get_mut(&group) else { return false };
        let Some(at) = members.iter().position(|member| *member == qpn) else { return false };
        members.swap_remove(at);
        if members.is_empty() {
            self.groups.remove(&group);
        }
        true
    }

    /// Groups that a queue pair is in.
    pub fn groups_of(&self, qpn: Qpn) -> usize {
        self.groups.values().filter(|members| members.contains(&qpn)).count()
    }
}

impl SoftDevice {
    pub(crate) fn attach_group(&self, qpn: Qpn, group: Gid) -> Result<(), VerbsError> {
        if !group.is_multicast() {
            let allowed = "a multicast address (224.0.0.0/4 or ff00::/8)";
            return Err(refuse(VerbsErrorKind::Invalid, "gid", group.to_ip(), allowed, ""));
        }
        let qp_type = self.query_qp(qpn)?.qp_type;
        if qp_type != QpType::Ud {
            let asked = format!("{qp_type:?}");
            return Err(refuse(
                VerbsErrorKind::Invalid,
                "qp_type",
                asked,
                "Ud",
                "only datagrams are multicast",
            ));
        }
        let mut control = lock(&self.shared.control);
        let worker = control.qp(qpn)?.worker;
        if !control.join(qpn, group)? {
            return Ok(());
        }
        let member = Member::new(group, worker, qpn);
        for other in 0..self.shared.workers.len() as u8 {
            if let Err(why) = self.shared.tell(other, Command::JoinGroup(member), "gid") {
                // What the workers before it keep is a member that the record does not have: taken out again.
                let undone =
                    (0..=other).all(|w| self.shared.tell(w, Command::LeaveGroup(member), "gid").is_ok());
                if undone {
                    control.part(qpn, group);
                }
                return Err(why);
            }
        }
        Ok(())
    }

    pub(crate) fn detach_group(&self, qpn: Qpn, group: Gid) -> Result<(), VerbsError> {
        let mut control = lock(&self.shared.control);
        let worker = control.qp(qpn)?.worker;
        if !control.groups.get(&group).is_some_and(|members| members.contains(&qpn)) {
            let asked = format!("{qpn:?} from {}", group.to_ip());
            return Err(refuse(VerbsErrorKind::NotFound, "gid", asked, "a group that it is attached to", ""));
        }
        let member = Member::new(group, worker, qpn);
        for other in 0..self.shared.workers.len() as u8 {
            self.shared.tell(other, Command::LeaveGroup(member), "gid")?;
        }
        control.part(qpn, group);
        Ok(())
    }

    /// Groups that have members: what a port with a filter must let in.
    pub fn multicast_groups(&self) -> Vec<Gid> {
        lock(&self.shared.control).groups.keys().copied().collect()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn gid(text: &str) -> Gid {
        Gid::from_ip(text.parse().expect("an address"))
    }

    #[test]
    fn members_are_found_by_group_and_once() {
        let mut groups = Groups::new();
        let (g, h) = (gid("239.1.1.1"), gid("ff0e::1"));
        for (group, worker, qpn) in [(g, 1, 9), (h, 0, 5), (g, 0, 7), (g, 1, 9), (g, 0, 8)] {
            assert!(groups.add(Member::new(group, worker, Qpn::new(qpn))));
        }
        let members = |groups: &Groups, group| -> Vec<_> {
            groups.find(&group).filter_map(|at| groups.at(at)).map(|m| (m.worker, m.qpn)).collect()
        };
        assert_eq!(members(&groups, g), [(0, 7), (0, 8), (1, 9)]);
        assert_eq!(members(&groups, h), [(0, 5)]);
        assert_eq!(members(&groups, gid("239.1.1.2")), []);
        groups.remove(&Member::new(g, 0, Qpn::new(7)));
        groups.remove(&Member::new(g, 0, Qpn::new(77)));
        assert_eq!(members(&groups, g), [(0, 8), (1, 9)]);
        for qpn in 100..100 + MAX_ATTACHED as u32 - 3 {
            assert!(groups.add(Member::new(g, 0, Qpn::new(qpn))));
        }
        assert!(!groups.add(Member::new(g, 0, Qpn::new(99))), "no room, and no allocation");
    }
}

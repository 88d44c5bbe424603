//! Multicast groups that the interface has joined for us.
//!
//! Owns one UDP socket per group, bound to nothing, that holds the kernel's membership: the kernel sets the interface's
//! filter and tells switches by IGMP or MLD, and leaves when the socket closes, however this process ends. Invariant: a
//! group is joined or its refusal is kept. Called by the housekeeping thread, which must be in the interface's network
//! namespace. Never reads a frame: those of the groups come by AF_XDP.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::error;
use crate::netlink::Link;
use crate::port::PortError;

/// The groups.
#[derive(Default)]
pub(super) struct Groups {
    wanted: BTreeSet<IpAddr>,
    joined: BTreeMap<IpAddr, OwnedFd>,
    refused: Option<(IpAddr, Errno)>,
}

impl Groups {
    /// Joins what is new and leaves what nobody wants any more. True if something changed.
    pub fn set(&mut self, link: &Link, wanted: &[IpAddr]) -> bool {
        let wanted: BTreeSet<IpAddr> = wanted.iter().copied().filter(IpAddr::is_multicast).collect();
        if wanted == self.wanted {
            return false;
        }
        self.joined.retain(|group, _| wanted.contains(group));
        self.refused = None;
        for group in &wanted {
            if self.joined.contains_key(group) {
                continue;
            }
            match join(link.index, *group) {
                Ok(socket) => {
                    self.joined.insert(*group, socket);
                }
                Err(errno) => self.refused = Some((*group, errno)),
            }
        }
        self.wanted = wanted;
        true
    }

    /// Groups whose frames are taken, whether the kernel could join them or not: some interfaces let all in.
    pub fn wanted(&self) -> impl Iterator<Item = IpAddr> + '_ {
        self.wanted.iter().copied()
    }

    /// Groups that are joined.
    pub fn joined(&self) -> usize {
        self.joined.len()
    }

    /// Why a group could not be joined.
    pub fn problem(&self, link: &Link) -> Option<PortError> {
        let (group, errno) = self.refused?;
        Some(error(
            "group",
            format!("{group} on {}", link.name),
            format!("a group that the kernel joins; it answered {errno}"),
            "frames of the group come only if the interface lets all multicast in: ip link set allmulticast on",
        ))
    }
}

/// A socket that is in a group on an interface.
fn join(index: u32, group: IpAddr) -> Result<OwnedFd, Errno> {
    let family = if group.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let fd = rustix::net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    match group {
        IpAddr::V4(group) => {
            sockopt::set_ip_add_membership_with_ifindex(&fd, &group, &Ipv4Addr::UNSPECIFIED, index)?;
        }
        IpAddr::V6(group) => sockopt::set_ipv6_add_membership(&fd, &group, index)?,
    }
    Ok(fd)
}

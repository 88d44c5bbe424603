//! The kernel's links, addresses, routes and neighbours, over a synchronous rtnetlink socket.
//!
//! Owns one NETLINK_ROUTE socket per [`Netlink`] and one per [`Monitor`]. Invariant: every request waits at most
//! [`ANSWER_LIMIT`] and every answer is matched by its sequence number. Called by ports at set-up and by the
//! housekeeping thread; never by a worker. Reading works without any capability; only [`Netlink::probe_neighbour`]
//! needs CAP_NET_ADMIN. Sockets belong to the network namespace of the thread that opened them.

mod message;
mod resolve;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};

use message::{
    Message, NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REPLACE, NLMSG_DONE, NLMSG_ERROR,
    Request, attributes, messages, read_u16, read_u32,
};

pub use resolve::{ResolveError, known, resolve};

/// Longest wait for one answer of the kernel.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(2);

const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_GETADDR: u16 = 22;
const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTM_NEWNEIGH: u16 = 28;
const RTM_DELNEIGH: u16 = 29;
const RTM_GETNEIGH: u16 = 30;

/// Why a question to the kernel has no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NetlinkError {
    /// The socket could not be opened or used.
    #[error("netlink socket: {0}")]
    Socket(Errno),
    /// The kernel refused.
    #[error("{what}: the kernel answered {errno}")]
    Refused {
        /// What was asked.
        what: &'static str,
        /// Its answer.
        errno: Errno,
    },
    /// No answer in time.
    #[error("{what}: no answer from the kernel within {} ms", ANSWER_LIMIT.as_millis())]
    NoAnswer {
        /// What was asked.
        what: &'static str,
    },
}

impl NetlinkError {
    /// The kernel's error number, where it gave one.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            NetlinkError::Socket(errno) | NetlinkError::Refused { errno, .. } => Some(*errno),
            NetlinkError::NoAnswer { .. } => None,
        }
    }
}

/// Operational state of a link (RFC 2863, as the kernel numbers it).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperState {
    /// The driver does not say.
    Unknown,
    /// No carrier, or something below is down.
    Down,
    /// Waiting for something (802.1X, for instance).
    Dormant,
    /// Passing frames.
    Up,
}

/// An XDP program on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachedXdp {
    /// 1 native, 2 generic, 3 in the hardware, 4 several.
    pub mode: u8,
    /// Its number in the kernel; 0 if the kernel does not say.
    pub program_id: u32,
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// Index.
    pub index: u32,
    /// Name.
    pub name: String,
    /// Kind of a virtual link (`veth`, `bridge`, `vlan`), empty for hardware.
    pub kind: String,
    /// True for an Ethernet link.
    pub ethernet: bool,
    /// MTU in bytes.
    pub mtu: u32,
    /// Ethernet address.
    pub mac: [u8; 6],
    /// Administratively up.
    pub up: bool,
    /// Operational state.
    pub oper: OperState,
    /// Receive queues that the driver allocated (the active ones may be fewer).
    pub rx_queues: u32,
    /// An XDP program that is attached.
    pub xdp: Option<AttachedXdp>,
}

impl Link {
    /// True when frames can pass.
    pub fn running(&self) -> bool {
        self.up && matches!(self.oper, OperState::Up | OperState::Unknown)
    }
}

/// An address of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The address.
    pub ip: IpAddr,
    /// Prefix length in bits.
    pub prefix: u8,
    /// Not usable yet or never: duplicate address detection runs or failed.
    pub tentative: bool,
}

/// What a route does with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteKind {
    /// Sends it out of an interface.
    Unicast,
    /// Delivers it on this host.
    Local,
    /// Sends it to a group.
    Multicast,
    /// Something else: broadcast, blackhole, unreachable, prohibit (the kernel's number).
    Other(u8),
}

/// The kernel's way to a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// What it does.
    pub kind: RouteKind,
    /// Index of the interface by which it leaves; 0 if none.
    pub oif: u32,
    /// Gateway; `None` when the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// Source address that the kernel prefers.
    pub preferred_source: Option<IpAddr>,
}

/// A neighbour entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neighbour {
    /// Ethernet address, if known.
    pub mac: Option<[u8; 6]>,
    /// State bits of the kernel (`NUD_*`).
    pub state: u16,
}

impl Neighbour {
    const INCOMPLETE: u16 = 0x01;
    const REACHABLE: u16 = 0x02;
    const STALE: u16 = 0x04;
    const DELAY: u16 = 0x08;
    const PROBE: u16 = 0x10;
    const FAILED: u16 = 0x20;
    const NOARP: u16 = 0x40;
    const PERMANENT: u16 = 0x80;

    /// The Ethernet address, when the entry may be used.
    pub fn usable(&self) -> Option<[u8; 6]> {
        let valid = Self::REACHABLE | Self::STALE | Self::DELAY | Self::PROBE | Self::NOARP | Self::PERMANENT;
        self.mac.filter(|_| self.state & valid != 0)
    }

    /// True when the kernel holds the entry for confirmed and needs no probe.
    pub fn confirmed(&self) -> bool {
        self.state & (Self::REACHABLE | Self::NOARP | Self::PERMANENT) != 0
    }

    /// The state in the words of `ip neigh`.
    pub fn state_name(&self) -> &'static str {
        match self.state {
            0 => "NONE",
            Self::INCOMPLETE => "INCOMPLETE",
            Self::REACHABLE => "REACHABLE",
            Self::STALE => "STALE",
            Self::DELAY => "DELAY",
            Self::PROBE => "PROBE",
            Self::FAILED => "FAILED",
            Self::NOARP => "NOARP",
            Self::PERMANENT => "PERMANENT",
            _ => "UNKNOWN",
        }
    }
}

/// A socket for questions to the kernel.
pub struct Netlink {
    fd: OwnedFd,
    seq: u32,
    buffer: Vec<u8>,
}

fn open(groups: u32, flags: SocketFlags) -> Result<OwnedFd, NetlinkError> {
    let flags = SocketFlags::CLOEXEC | flags;
    let fd = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)
        .map_err(NetlinkError::Socket)?;
    rustix::net::bind(&fd, &SocketAddrNetlink::new(0, groups)).map_err(NetlinkError::Socket)?;
    Ok(fd)
}

impl Netlink {
    /// Opens a socket in the network namespace of the calling thread.
    pub fn open() -> Result<Self, NetlinkError> {
        let fd = open(0, SocketFlags::empty())?;
        sockopt::set_socket_timeout(&fd, sockopt::Timeout::Recv, Some(ANSWER_LIMIT))
            .map_err(NetlinkError::Socket)?;
        Ok(Netlink { fd, seq: 0, buffer: vec![0; 64 * 1024] })
    }

    /// The descriptor: any socket of the namespace will do for an ioctl about one of its interfaces.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// All links.
    pub fn links(&mut self) -> Result<Vec<Link>, NetlinkError> {
        let request = || Request::new(RTM_GETLINK, NLM_F_DUMP, &[0; 16]);
        self.dump("list of links", request, |m| (m.kind == RTM_NEWLINK).then(|| parse_link(m.body)).flatten())
    }

    /// The link called `name`, or `None`.
    pub fn link_by_name(&mut self, name: &str) -> Result<Option<Link>, NetlinkError> {
        // IFNAMSIZ: a longer name cannot exist, and the kernel would answer with a different error.
        if name.is_empty() || name.len() > 15 {
            return Ok(None);
        }
        let mut value = name.as_bytes().to_vec();
        value.push(0);
        self.link(Request::new(RTM_GETLINK, 0, &[0; 16]).attr(3, &value))
    }

    /// The link with that index, or `None`.
    pub fn link_by_index(&mut self, index: u32) -> Result<Option<Link>, NetlinkError> {
        let mut fixed = [0u8; 16];
        fixed[4..8].copy_from_slice(&index.to_ne_bytes());
        self.link(Request::new(RTM_GETLINK, 0, &fixed))
    }

    fn link(&mut self, request: Request) -> Result<Option<Link>, NetlinkError> {
        let answer =
            self.ask("link", request, |m| (m.kind == RTM_NEWLINK).then(|| parse_link(m.body)).flatten());
        match answer {
            Err(NetlinkError::Refused { errno: Errno::NODEV, .. }) => Ok(None),
            other => other,
        }
    }

    /// The addresses of the link with index `index`, IPv4 and IPv6, in the kernel's order.
    pub fn addresses(&mut self, index: u32) -> Result<Vec<Address>, NetlinkError> {
        let request = || Request::new(RTM_GETADDR, NLM_F_DUMP, &[0; 8]);
        self.dump("list of addresses", request, |m| {
            let own = m.kind == RTM_NEWADDR && read_u32(m.body, 4) == Some(index);
            own.then(|| parse_address(m.body)).flatten()
        })
    }

    /// The route to `dst`: from `src` if given, leaving by the interface with index `oif` if given.
    pub fn route(
        &mut self,
        dst: IpAddr,
        src: Option<IpAddr>,
        oif: Option<u32>,
    ) -> Result<Route, NetlinkError> {
        if oif.is_some() && dst.is_ipv4() {
            // Asked about an interface without a route, IPv4 answers that the destination is on its link. Only the
            // question for the entry of the table fails in that case.
            const RTM_F_FIB_MATCH: u32 = 0x2000;
            self.ask("route", route_request(dst, src, oif, RTM_F_FIB_MATCH), |_| Some(()))?;
        }
        let answer = self.ask("route", route_request(dst, src, oif, 0), |m| {
            (m.kind == RTM_NEWROUTE).then(|| parse_route(m.body)).flatten()
        })?;
        answer.ok_or(NetlinkError::NoAnswer { what: "route" })
    }

    /// The neighbour entry of `ip` on the link with index `index`, or `None`.
    pub fn neighbour(&mut self, index: u32, ip: IpAddr) -> Result<Option<Neighbour>, NetlinkError> {
        let request = Request::new(RTM_GETNEIGH, 0, &neighbour_fixed(index, ip, 0)).attr(1, &octets(ip));
        let answer = self.ask("neighbour", request, |m| {
            (m.kind == RTM_NEWNEIGH).then(|| parse_neighbour(m.body)).flatten()
        });
        match answer {
            Err(NetlinkError::Refused { errno: Errno::NOENT, .. }) => Ok(None),
            other => other,
        }
    }

    /// Makes the kernel resolve or confirm `ip` now, as if a packet had been sent there. Needs CAP_NET_ADMIN.
    pub fn probe_neighbour(&mut self, index: u32, ip: IpAddr) -> Result<(), NetlinkError> {
        const NTF_USE: u8 = 1;
        let fixed = neighbour_fixed(index, ip, NTF_USE);
        let request =
            Request::new(RTM_NEWNEIGH, NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE, &fixed).attr(1, &octets(ip));
        self.ask("neighbour probe", request, |_| None::<()>).map(|_| ())
    }

    /// Sends `request`; returns what `parse` makes of the one answer, or `None` when it is only an acknowledgement.
    fn ask<T>(
        &mut self,
        what: &'static str,
        request: Request,
        parse: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Result<Option<T>, NetlinkError> {
        let seq = self.send(request)?;
        let deadline = Instant::now() + ANSWER_LIMIT;
        loop {
            let len = self.receive(what, deadline)?;
            let mut found = messages(self.buffer.get(..len).unwrap_or_default());
            match found.find(|m| m.seq == seq) {
                Some(m) if m.kind == NLMSG_ERROR => return acknowledged(what, &m).map(|()| None),
                Some(m) => return Ok(parse(&m)),
                None => {}
            }
        }
    }

    /// Sends a dump and collects what `parse` makes of its messages. A dump that a change interrupted is repeated.
    fn dump<T>(
        &mut self,
        what: &'static str,
        request: impl Fn() -> Request,
        parse: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Result<Vec<T>, NetlinkError> {
        let deadline = Instant::now() + ANSWER_LIMIT;
        loop {
            let seq = self.send(request())?;
            let (mut found, mut done, mut interrupted) = (Vec::new(), false, false);
            while !done {
                let len = self.receive(what, deadline)?;
                for m in messages(self.buffer.get(..len).unwrap_or_default()).filter(|m| m.seq == seq) {
                    interrupted |= m.flags & NLM_F_DUMP_INTR != 0;
                    match m.kind {
                        NLMSG_DONE => done = true,
                        NLMSG_ERROR => acknowledged(what, &m)?,
                        _ => found.extend(parse(&m)),
                    }
                }
            }
            if !interrupted {
                return Ok(found);
            }
        }
    }

    fn send(&mut self, request: Request) -> Result<u32, NetlinkError> {
        self.seq = self.seq.wrapping_add(1);
        let bytes = request.finish(self.seq);
        rustix::net::send(&self.fd, &bytes, SendFlags::empty()).map_err(NetlinkError::Socket)?;
        Ok(self.seq)
    }

    fn receive(&mut self, what: &'static str, deadline: Instant) -> Result<usize, NetlinkError> {
        loop {
            if Instant::now() >= deadline {
                return Err(NetlinkError::NoAnswer { what });
            }
            match rustix::net::recv(&self.fd, &mut self.buffer[..], RecvFlags::empty()) {
                Ok((len, _)) => return Ok(len),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(NetlinkError::NoAnswer { what }),
                Err(errno) => return Err(NetlinkError::Socket(errno)),
            }
        }
    }
}

/// What changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Changes {
    /// The link, or one of its addresses.
    pub link: bool,
    /// A route, or a neighbour on the link.
    pub paths: bool,
}

/// A socket that hears of changes that concern one link: of it, its addresses, its neighbours, and all routes.
pub struct Monitor {
    fd: OwnedFd,
    index: u32,
    buffer: Vec<u8>,
}

impl Monitor {
    /// Opens one for the link with index `index`, in the network namespace of the calling thread.
    pub fn open(index: u32) -> Result<Self, NetlinkError> {
        const LINKS: u32 = 0x1;
        const ADDRESSES: u32 = 0x10 | 0x100;
        const ROUTES: u32 = 0x40 | 0x400;
        const NEIGHBOURS: u32 = 0x4;
        let fd = open(LINKS | ADDRESSES | ROUTES | NEIGHBOURS, SocketFlags::NONBLOCK)?;
        Ok(Monitor { fd, index, buffer: vec![0; 16 * 1024] })
    }

    /// Readable when there is news.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// What changed since the last call; reads at most 64 notices, so a storm cannot hold the caller.
    pub fn changes(&mut self) -> Changes {
        let mut changes = Changes::default();
        for _ in 0..64 {
            match rustix::net::recv(&self.fd, &mut self.buffer[..], RecvFlags::empty()) {
                Ok((len, _)) => {
                    for message in messages(self.buffer.get(..len).unwrap_or_default()) {
                        self.index_concerns(&message, &mut changes);
                    }
                }
                // Notices were lost: what changed is unknown, so everything is read again.
                Err(Errno::NOBUFS) => changes = Changes { link: true, paths: true },
                Err(_) => break,
            }
        }
        changes
    }

    fn index_concerns(&self, message: &Message<'_>, changes: &mut Changes) {
        // The index stands at byte 4 in the fixed part of all but routes.
        let ours = read_u32(message.body, 4) == Some(self.index);
        match message.kind {
            RTM_NEWLINK | RTM_DELLINK | RTM_NEWADDR | RTM_DELADDR => changes.link |= ours,
            RTM_NEWNEIGH | RTM_DELNEIGH => changes.paths |= ours,
            _ => changes.paths = true,
        }
    }
}

fn acknowledged(what: &'static str, message: &Message<'_>) -> Result<(), NetlinkError> {
    let code = read_u32(message.body, 0).unwrap_or(0).cast_signed();
    if code == 0 {
        return Ok(());
    }
    // What is no error number of the kernel's is nothing that it would say.
    let known = (-4095..0).contains(&code);
    let errno = if known { Errno::from_raw_os_error(code.saturating_neg()) } else { Errno::PROTO };
    Err(NetlinkError::Refused { what, errno })
}

/// Any bytes as an answer of the kernel, for the fuzz targets: read as every kind of object. Returns how many were found.
#[doc(hidden)]
pub fn try_answer(bytes: &[u8]) -> usize {
    let found = |message: Message<'_>| {
        let body = message.body;
        usize::from(acknowledged("an answer", &message).is_err())
            + parse_link(body).map_or(0, |_| 1)
            + parse_address(body).map_or(0, |_| 1)
            + parse_route(body).map_or(0, |_| 1)
            + parse_neighbour(body).map_or(0, |_| 1)
    };
    messages(bytes).map(found).sum()
}

fn parse_link(body: &[u8]) -> Option<Link> {
    const IFF_UP: u32 = 1;
    const ARPHRD_ETHER: u16 = 1;
    let mut link = Link {
        index: read_u32(body, 4)?,
        name: String::new(),
        kind: String::new(),
        ethernet: read_u16(body, 2)? == ARPHRD_ETHER,
        mtu: 0,
        mac: [0; 6],
        up: read_u32(body, 8)? & IFF_UP != 0,
        oper: OperState::Unknown,
        rx_queues: 1,
        xdp: None,
    };
    for (kind, value) in attributes(body, 16) {
        match kind {
            1 => link.mac = value.try_into().unwrap_or_default(),
            3 => link.name = text(value),
            4 => link.mtu = read_u32(value, 0)?,
            16 => {
                link.oper = match value.first() {
                    Some(6) => OperState::Up,
                    Some(5) => OperState::Dormant,
                    Some(1..=4) => OperState::Down,
                    _ => OperState::Unknown,
                }
            }
            18 => {
                link.kind =
                    attributes(value, 0).find(|(k, _)| *k == 1).map(|(_, v)| text(v)).unwrap_or_default()
            }
            32 => link.rx_queues = read_u32(value, 0)?,
            43 => link.xdp = parse_xdp(value),
            _ => {}
        }
    }
    Some(link)
}

fn parse_xdp(value: &[u8]) -> Option<AttachedXdp> {
    let (mut mode, mut program_id) = (0, 0);
    for (kind, value) in attributes(value, 0) {
        match kind {
            2 => mode = *value.first()?,
            4 => program_id = read_u32(value, 0)?,
            _ => {}
        }
    }
    (mode != 0).then_some(AttachedXdp { mode, program_id })
}

fn parse_address(body: &[u8]) -> Option<Address> {
    let family = *body.first()?;
    let prefix = *body.get(1)?;
    let mut flags = u32::from(*body.get(2)?);
    let (mut address, mut local) = (None, None);
    for (kind, value) in attributes(body, 8) {
        match kind {
            1 => address = parse_ip(family, value),
            2 => local = parse_ip(family, value),
            8 => flags = read_u32(value, 0)?,
            _ => {}
        }
    }
    const DADFAILED: u32 = 0x08;
    const TENTATIVE: u32 = 0x40;
    // On a point-to-point link IFA_ADDRESS is the peer's; IFA_LOCAL is always our own.
    Some(Address { ip: local.or(address)?, prefix, tentative: flags & (TENTATIVE | DADFAILED) != 0 })
}

fn parse_route(body: &[u8]) -> Option<Route> {
    let family = *body.first()?;
    let kind = match *body.get(7)? {
        1 => RouteKind::Unicast,
        2 => RouteKind::Local,
        5 => RouteKind::Multicast,
        other => RouteKind::Other(other),
    };
    let mut route = Route { kind, oif: 0, gateway: None, preferred_source: None };
    for (kind, value) in attributes(body, 12) {
        match kind {
            4 => route.oif = read_u32(value, 0)?,
            5 => route.gateway = parse_ip(family, value),
            7 => route.preferred_source = parse_ip(family, value),
            // RTA_VIA: a gateway of the other family (IPv4 over an IPv6 next hop).
            18 => route.gateway = parse_ip(u8::try_from(read_u16(value, 0)?).ok()?, value.get(2..)?),
            _ => {}
        }
    }
    Some(route)
}

fn parse_neighbour(body: &[u8]) -> Option<Neighbour> {
    let mac = attributes(body, 12).find(|(k, _)| *k == 2).and_then(|(_, v)| v.try_into().ok());
    Some(Neighbour { mac, state: read_u16(body, 8)? })
}

fn route_request(dst: IpAddr, src: Option<IpAddr>, oif: Option<u32>, flags: u32) -> Request {
    let mut fixed = [0u8; 12];
    fixed[0] = family(dst);
    fixed[1] = bits(dst);
    fixed[2] = src.map_or(0, bits);
    fixed[8..12].copy_from_slice(&flags.to_ne_bytes());
    let mut request = Request::new(RTM_GETROUTE, 0, &fixed).attr(1, &octets(dst));
    if let Some(src) = src {
        request = request.attr(2, &octets(src));
    }
    if let Some(oif) = oif {
        request = request.attr(4, &oif.to_ne_bytes());
    }
    request
}

fn neighbour_fixed(index: u32, ip: IpAddr, flags: u8) -> [u8; 12] {
    let mut fixed = [0u8; 12];
    fixed[0] = family(ip);
    fixed[4..8].copy_from_slice(&index.to_ne_bytes());
    fixed[10] = flags;
    fixed
}

fn family(ip: IpAddr) -> u8 {
    // AF_INET and AF_INET6 of Linux.
    if ip.is_ipv4() { 2 } else { 10 }
}

fn bits(ip: IpAddr) -> u8 {
    if ip.is_ipv4() { 32 } else { 128 }
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

fn parse_ip(family: u8, value: &[u8]) -> Option<IpAddr> {
    match family {
        2 => Some(Ipv4Addr::from(<[u8; 4]>::try_from(value).ok()?).into()),
        10 => Some(Ipv6Addr::from(<[u8; 16]>::try_from(value).ok()?).into()),
        _ => None,
    }
}

fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value.split(|b| *b == 0).next().unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_found_by_name_index_and_in_the_list() {
        let mut nl = Netlink::open().unwrap();
        let lo = nl.link_by_name("lo").unwrap().expect("every namespace has lo");
        assert!(!lo.ethernet);
        assert_eq!(nl.link_by_index(lo.index).unwrap().unwrap().name, "lo");
        assert!(nl.links().unwrap().iter().any(|l| l.name == "lo"));
    }

    #[test]
    fn a_link_that_is_not_there_is_none() {
        let mut nl = Netlink::open().unwrap();
        assert_eq!(nl.link_by_name("ferroce-none").unwrap(), None);
        assert_eq!(nl.link_by_name("a name that is much too long").unwrap(), None);
        assert_eq!(nl.link_by_index(0x7fff_fff0).unwrap(), None);
    }

    #[test]
    fn a_refusal_with_a_number_that_is_no_error_is_a_protocol_error() {
        let errno = |code: i32| {
            let body = code.to_ne_bytes();
            let message = Message { kind: NLMSG_ERROR, flags: 0, seq: 1, body: &body };
            acknowledged("an answer", &message).map_err(|error| error.errno())
        };
        assert_eq!(errno(0), Ok(()));
        assert_eq!(errno(-95), Err(Some(Errno::OPNOTSUPP)));
        for code in [1, -4096, i32::MIN, i32::MAX] {
            assert_eq!(errno(code), Err(Some(Errno::PROTO)), "{code}");
        }
    }

    #[test]
    fn a_neighbour_state_says_whether_its_address_may_be_used() {
        let mac = Some([2, 0, 0, 0, 0, 1]);
        assert_eq!(Neighbour { mac, state: Neighbour::STALE }.usable(), mac);
        assert_eq!(Neighbour { mac, state: Neighbour::FAILED }.usable(), None);
        assert_eq!(Neighbour { mac: None, state: Neighbour::REACHABLE }.usable(), None);
        assert!(!Neighbour { mac, state: Neighbour::STALE }.confirmed());
    }
}

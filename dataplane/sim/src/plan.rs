//! What a run is made of, chosen by its seed: shape of the world, attributes of the queue pairs, faults of the wires.

use ferroce_transport::time::ack_timeout_ns;
use ferroce_verbs::QpType;
use ferroce_wire::{Gid, PathMtu, Psn, Qpn, VlanTag};

use crate::link::{Cable, Faults};
use crate::rng::Rng;

/// What the run is to show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scenario {
    /// Everything completes, whatever the wires do.
    Faulty,
    /// A peer stops answering: bounded time, the right statuses, a notice that names the last PSN.
    SilentPeer,
    /// A peer ends the window that WRITEs are under way to: not a byte more is placed, and they fail with the right
    /// statuses.
    KeyTaken,
}

/// A connection of two queue pairs.
#[derive(Clone, Copy, Debug)]
pub struct Connection {
    /// Service of both queue pairs; UD ones talk only to each other too.
    pub service: QpType,
    /// The endpoints.
    pub ends: [usize; 2],
    /// Numbers of the queue pairs.
    pub qpns: [Qpn; 2],
    /// First PSN that each end sends.
    pub psns: [Psn; 2],
    /// IPv6.
    pub v6: bool,
    /// 802.1Q tag.
    pub vlan: Option<VlanTag>,
    /// Path MTU.
    pub mtu: PathMtu,
    /// Send queue.
    pub send_wr: u32,
    /// Receive queue.
    pub recv_wr: u32,
    /// Scatter/gather entries.
    pub sges: u32,
    /// Inline bytes.
    pub inline: u32,
    /// READs outstanding; the peer serves as many or more.
    pub rd_atomic: u8,
    /// What the peer serves.
    pub dest_rd_atomic: u8,
    /// ACK timeout attribute.
    pub timeout: u8,
    /// Transport retries.
    pub retry_cnt: u8,
    /// RNR timer index.
    pub rnr_timer: u8,
    /// Every send is signalled.
    pub sig_all: bool,
    /// Longest message.
    pub max_len: usize,
    /// A receive is posted again after up to so many ns.
    pub slow_ns: u64,
    /// Each end takes its receives from its endpoint's shared queue.
    pub shared: [bool; 2],
}

/// The shared receive queue of an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct SharedQueue {
    /// Receives outstanding: more than queue pairs, each of which may keep one that it has begun.
    pub max_wr: u32,
    /// Scatter/gather entries.
    pub sges: u32,
    /// Bytes of each receive.
    pub room: usize,
    /// Limit at first.
    pub limit: u32,
    /// A receive is posted again after up to so many ns.
    pub slow_ns: u64,
}

/// A multicast group.
#[derive(Clone, Debug)]
pub struct Group {
    /// Its address.
    pub gid: Gid,
    /// Ends that are in it: connection, and which end.
    pub members: Vec<(usize, usize)>,
    /// Longest datagram that each member takes.
    pub max_len: usize,
}

/// A run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Decides everything else.
    pub seed: u64,
    /// What it shows.
    pub scenario: Scenario,
    /// Number of endpoints.
    pub endpoints: usize,
    /// Connections.
    pub connections: Vec<Connection>,
    /// Shared receive queue of each endpoint.
    pub shared: Vec<Option<SharedQueue>>,
    /// Multicast groups.
    pub groups: Vec<Group>,
    /// All wires.
    pub cable: Cable,
    /// Faults of the direction from endpoint a to b, at `a * endpoints + b`.
    pub faults: Vec<Faults>,
    /// When the faults stop, ns after the start.
    pub heal_ns: u64,
    /// Start and length of times in which the first two endpoints hear nothing of each other, ns.
    pub blackouts: Vec<(u64, u64)>,
    /// Work requests of each direction of each connection.
    pub ops: u32,
    /// How often, in a million, a queue pair moves by its image after something happened to it.
    pub moves_ppm: u32,
    /// How often, in a million, a window that is closed is bound, and one that is open is ended by its owner, where that may
    /// be.
    pub bind_ppm: u32,
    /// See [`Plan::bind_ppm`].
    pub unbind_ppm: u32,
    /// How often, in a million, a send queue is drained after one of its sends finished.
    pub drains_ppm: u32,
    /// Asked for by [`Plan::with_messages`]; 0 if nothing was.
    pub messages: u32,
    /// When the peer falls silent ([`Scenario::SilentPeer`]) or may take the key away ([`Scenario::KeyTaken`]), ns after
    /// the start.
    pub silence_ns: u64,
}

/// Frames that a wire loses at most, in a million.
pub const MOST_LOSS_PPM: u64 = 200_000;

/// Of so many seeds one shows a silent peer, and one a key that is taken away.
const SPECIAL_EVERY: u64 = 8;

impl Plan {
    /// The plan of a seed.
    pub fn from_seed(seed: u64) -> Plan {
        let rng = &mut Rng::new(seed, 0x01);
        let scenario = match seed % SPECIAL_EVERY {
            7 => Scenario::SilentPeer,
            3 => Scenario::KeyTaken,
            _ => Scenario::Faulty,
        };
        let alone = scenario != Scenario::Faulty;
        let endpoints = if alone { 2 } else { rng.range(2, 3) as usize };
        let count = if alone { 1 } else { rng.range(1, 4) };
        let mut connections: Vec<Connection> = Vec::new();
        for number in 0..count {
            connections.push(connection(rng, endpoints, number));
        }
        // Their own stream, so that they change nothing of the reliable ones.
        let unreliable = &mut Rng::new(seed, 0x02);
        for service in [QpType::Uc, QpType::Ud] {
            let count = if alone { 0 } else { unreliable.below(3) };
            for _ in 0..count {
                let number = connections.len() as u64;
                connections.push(unreliable_connection(unreliable, endpoints, number, service));
            }
        }
        let shared = if alone { vec![None; 2] } else { shared_queues(seed, endpoints, &mut connections) };
        let groups = groups(seed, &connections);
        let faults = (0..endpoints * endpoints).map(|_| faults(rng)).collect();
        let shortest = connections.iter().filter_map(|c| ack_timeout_ns(c.timeout)).min().unwrap_or(0);
        let blackouts = (0..rng.below(3)).map(|_| (rng.below(20_000_000), rng.below(shortest * 2))).collect();
        Plan {
            seed,
            scenario,
            endpoints,
            connections,
            shared,
            groups,
            cable: Cable { delay_ns: rng.range(200, 20_000), ps_per_byte: rng.pick(&[80, 320, 800]) },
            faults,
            heal_ns: rng.range(5_000_000, 400_000_000),
            blackouts,
            ops: rng.range(20, 120) as u32,
            moves_ppm: if seed.is_multiple_of(3) { 100_000 } else { 0 },
            bind_ppm: Rng::new(seed, 0x06).pick(&[80_000, 400_000]),
            // A window that is to be taken away in use must be in use.
            unbind_ppm: if alone { 20_000 } else { Rng::new(seed, 0x07).pick(&[20_000, 400_000]) },
            drains_ppm: if alone { 0 } else { Rng::new(seed, 0x05).pick(&[0, 2_000, 20_000]) },
            messages: 0,
            silence_ns: rng.range(10_000, 3_000_000),
        }
    }

    /// The same with at least so many work requests in all, if it ends by itself and not by silence. 0 changes nothing.
    #[must_use]
    pub fn with_messages(mut self, messages: u32) -> Plan {
        let directions = self.connections.len() as u32 * 2;
        let ops = self.ops.max(messages.div_ceil(directions.max(1)));
        // More work takes longer: the wires stay bad for as large a part of it.
        self.heal_ns = self.heal_ns * u64::from(ops) / u64::from(self.ops.max(1));
        self.ops = ops;
        self.messages = messages;
        self
    }

    /// Longest message of any connection.
    pub fn max_len(&self) -> usize {
        self.connections.iter().map(|c| c.max_len).max().unwrap_or(0)
    }
}

fn unreliable_connection(rng: &mut Rng, endpoints: usize, number: u64, service: QpType) -> Connection {
    let mut connection = connection(rng, endpoints, number);
    connection.service = service;
    if service == QpType::Ud {
        connection.max_len = connection.mtu.bytes() as usize;
    }
    connection
}

fn connection(rng: &mut Rng, endpoints: usize, number: u64) -> Connection {
    let first = rng.below(endpoints as u64) as usize;
    let second = (first + rng.range(1, endpoints as u64 - 1) as usize) % endpoints;
    let psn = |rng: &mut Rng| {
        // Half of them wrap within the first few packets.
        let near = 0x100_0000 - rng.range(1, 60) as u32;
        Psn::new(if rng.chance(500_000) { near } else { rng.bits() as u32 })
    };
    // Unique by the number in the low bits; never 0, 1 or the multicast number.
    let qpn =
        |rng: &mut Rng, end: u64| Qpn::new((rng.range(1, 0x0f_fffe) as u32) << 4 | (number * 2 + end) as u32);
    let mtu = rng.pick(&PathMtu::ALL);
    let rd_atomic = rng.pick(&[1, 1, 2, 3, 4, 8, 16]);
    Connection {
        service: QpType::Rc,
        ends: [first, second],
        qpns: [qpn(rng, 0), qpn(rng, 1)],
        psns: [psn(rng), psn(rng)],
        v6: rng.chance(300_000),
        vlan: rng.chance(300_000).then_some(VlanTag { pcp: 3, dei: false, vid: 100 }),
        mtu,
        send_wr: rng.pick(&[1, 2, 3, 4, 8, 16, 31]),
        recv_wr: rng.pick(&[1, 2, 3, 4, 8, 16, 31]),
        sges: rng.range(1, 4) as u32,
        inline: rng.pick(&[0, 0, 16, 64, 220]),
        rd_atomic,
        dest_rd_atomic: rng.range(u64::from(rd_atomic), 16) as u8,
        timeout: rng.range(10, 12) as u8,
        retry_cnt: 7,
        rnr_timer: rng.range(1, 14) as u8,
        sig_all: rng.chance(300_000),
        max_len: (mtu.bytes() as usize * rng.range(1, 9) as usize) + rng.below(4) as usize,
        slow_ns: rng.pick(&[0, 0, 50_000, 500_000, 3_000_000]),
        shared: [false; 2],
    }
}

/// At some endpoints most queue pairs share their receives.
fn shared_queues(seed: u64, endpoints: usize, connections: &mut [Connection]) -> Vec<Option<SharedQueue>> {
    let rng = &mut Rng::new(seed, 0x03);
    let mut queues = Vec::new();
    for endpoint in 0..endpoints {
        let wanted = rng.chance(400_000);
        let (mut users, mut room) = (0, 0);
        for connection in connections.iter_mut() {
            let longest = receive_room(connection);
            for end in 0..2 {
                let joins = rng.chance(750_000);
                if wanted && joins && connection.ends[end] == endpoint {
                    connection.shared[end] = true;
                    (users, room) = (users + 1, longest.max(room));
                }
            }
        }
        let max_wr = users + rng.pick(&[1, 2, 3, 8, 30]);
        queues.push((users > 0).then(|| SharedQueue {
            max_wr,
            sges: rng.range(1, 4) as u32,
            room,
            limit: rng.below(u64::from(max_wr) + 1) as u32,
            slow_ns: rng.pick(&[0, 0, 50_000, 500_000]),
        }));
    }
    queues
}

/// Up to two groups of those that take datagrams.
fn groups(seed: u64, connections: &[Connection]) -> Vec<Group> {
    let rng = &mut Rng::new(seed, 0x04);
    let mut groups = Vec::new();
    for number in 0..rng.below(3) as u8 {
        let mut members = Vec::new();
        for (index, _) in connections.iter().enumerate().filter(|(_, c)| c.service == QpType::Ud) {
            members.extend([0, 1].into_iter().filter(|_| rng.chance(700_000)).map(|end| (index, end)));
        }
        let v6 = rng.chance(500_000);
        let address: std::net::IpAddr = match v6 {
            false => [239, 1, 2, number + 1].into(),
            true => [0xff0e, 0, 0, 0, 0, 0, 7, u16::from(number) + 1].into(),
        };
        let shortest = members.iter().map(|(index, _)| connections[*index].max_len).min();
        if let Some(max_len) = shortest {
            groups.push(Group { gid: Gid::from_ip(address), members, max_len });
        }
    }
    groups
}

/// Every message fits: on UD the 40 bytes before it too.
pub(crate) fn receive_room(connection: &Connection) -> usize {
    connection.max_len + if connection.service == QpType::Ud { crate::record::GRH } else { 0 }
}

fn faults(rng: &mut Rng) -> Faults {
    // Some wires are good, some have one kind of fault, most have all.
    let some = |rng: &mut Rng, most: u64| if rng.chance(700_000) { rng.range(0, most) as u32 } else { 0 };
    if rng.chance(100_000) {
        return Faults::default();
    }
    Faults {
        loss_ppm: some(rng, MOST_LOSS_PPM),
        duplicate_ppm: some(rng, 40_000),
        reorder_ppm: some(rng, 40_000),
        corrupt_ppm: some(rng, 30_000),
        late_ns: rng.pick(&[2_000, 20_000, 200_000, 6_000_000]),
    }
}

//! What a run is made of, chosen by its seed: shape of the world, attributes of the queue pairs, faults of the wires.

use ferroce_transport::time::ack_timeout_ns;
use ferroce_verbs::QpType;
use ferroce_wire::{PathMtu, Psn, Qpn, VlanTag};

use crate::link::{Cable, Faults};
use crate::rng::Rng;

/// What the run is to show.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scenario {
    /// Everything completes, whatever the wires do.
    Faulty,
    /// A peer stops answering: bounded time, the right statuses, a notice that names the last PSN.
    SilentPeer,
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
    /// Asked for by [`Plan::with_messages`]; 0 if nothing was.
    pub messages: u32,
    /// When the peer falls silent, ns after the start ([`Scenario::SilentPeer`]).
    pub silence_ns: u64,
}

/// Frames that a wire loses at most, in a million.
pub const MOST_LOSS_PPM: u64 = 200_000;

/// One seed in so many shows a silent peer.
const SILENT_EVERY: u64 = 8;

impl Plan {
    /// The plan of a seed.
    pub fn from_seed(seed: u64) -> Plan {
        let rng = &mut Rng::new(seed, 0x01);
        let scenario =
            if seed % SILENT_EVERY == SILENT_EVERY - 1 { Scenario::SilentPeer } else { Scenario::Faulty };
        let silent = scenario == Scenario::SilentPeer;
        let endpoints = if silent { 2 } else { rng.range(2, 3) as usize };
        let count = if silent { 1 } else { rng.range(1, 4) };
        let mut connections: Vec<Connection> = Vec::new();
        for number in 0..count {
            connections.push(connection(rng, endpoints, number));
        }
        // Their own stream, so that they change nothing of the reliable ones.
        let unreliable = &mut Rng::new(seed, 0x02);
        for service in [QpType::Uc, QpType::Ud] {
            let count = if silent { 0 } else { unreliable.below(3) };
            for _ in 0..count {
                let number = connections.len() as u64;
                connections.push(unreliable_connection(unreliable, endpoints, number, service));
            }
        }
        let faults = (0..endpoints * endpoints).map(|_| faults(rng)).collect();
        let shortest = connections.iter().filter_map(|c| ack_timeout_ns(c.timeout)).min().unwrap_or(0);
        let blackouts = (0..rng.below(3)).map(|_| (rng.below(20_000_000), rng.below(shortest * 2))).collect();
        Plan {
            seed,
            scenario,
            endpoints,
            connections,
            cable: Cable { delay_ns: rng.range(200, 20_000), ps_per_byte: rng.pick(&[80, 320, 800]) },
            faults,
            heal_ns: rng.range(5_000_000, 400_000_000),
            blackouts,
            ops: rng.range(20, 120) as u32,
            moves_ppm: if seed.is_multiple_of(3) { 100_000 } else { 0 },
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
    }
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

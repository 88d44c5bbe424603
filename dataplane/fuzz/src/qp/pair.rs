//! Two queue pairs and a wire that loses, repeats, reorders and damages, as the fuzzer's bytes say.
//!
//! If nothing but the wire was bad, everything that was posted ends once the wire is good.

use std::collections::VecDeque;

use ferroce_transport::Transmit;
use ferroce_verbs::QpState;
use ferroce_wire::{Aeth, DmaLen, Msn, Opcode, Psn, Rkey, Syndrome, check_frame};

use super::frame::seal;
use super::host::Host;
use super::input::Input;
use super::setup::{Setup, modify};
use super::steps;

/// Rounds in which a good wire brings everything to its end.
const ROUNDS: usize = 3000;

struct Pair {
    hosts: [Host; 2],
    /// Destination and frame, next to arrive first.
    wire: VecDeque<(usize, Vec<u8>)>,
    /// Nothing but the wire was bad.
    fair: bool,
}

/// Runs until the bytes end; then the wire is good.
pub fn run(setup: Setup, input: &mut Input<'_>) {
    let mut pair = Pair {
        hosts: [Host::new(setup), Host::new(setup.mirrored())],
        wire: VecDeque::new(),
        fair: setup.rts.timeout != 0,
    };
    for host in &mut pair.hosts {
        host.bring_up(QpState::Rts);
    }
    for _ in 0..steps::MOST {
        if input.is_empty() {
            break;
        }
        pair.step(input);
    }
    if pair.fair {
        pair.settle();
    }
    pair.hosts.into_iter().for_each(Host::finish);
}

impl Pair {
    fn step(&mut self, input: &mut Input<'_>) {
        let what = input.u8();
        let side = usize::from(what >> 7);
        match what & 31 {
            0..=3 => steps::post_send(&mut self.hosts[side], input),
            4..=6 => steps::post_recv(&mut self.hosts[side], input),
            7..=11 => self.transmit(side, 1 + input.below(32)),
            12..=16 => {
                for _ in 0..=input.below(32) {
                    self.arrive();
                }
            }
            17 => self.lose(input),
            18 => {
                if let Some((to, frame)) = self.wire.front().cloned() {
                    self.wire.push_back((to, frame));
                }
            }
            19 => {
                if let Some(first) = self.wire.pop_front() {
                    self.wire.push_back(first);
                }
            }
            20 | 21 => {
                if let Some((to, frame)) = self.wire.pop_front() {
                    self.fair = false;
                    self.wire.push_front((to, mutate(&frame, input).unwrap_or(frame)));
                }
            }
            22..=24 => steps::wait(&mut self.hosts[side], input),
            25 | 26 => {
                self.hosts[side].complete(input.below(16));
            }
            27 | 28 => self.hosts[side].relocate(),
            29 => {
                self.fair = false;
                let modify = modify(&self.hosts[side].setup, input);
                self.hosts[side].modify(&modify);
            }
            30 => {
                self.fair = false;
                self.hosts[side].toggle_region(input.below(8), input.flag());
            }
            _ => {
                self.transmit(0, 200);
                self.transmit(1, 200);
                (0..400).for_each(|_| self.arrive());
            }
        }
        // Both have one clock.
        let now = self.hosts[0].now.max(self.hosts[1].now);
        self.hosts.iter_mut().for_each(|host| host.now = now);
    }

    fn transmit(&mut self, side: usize, most: usize) {
        for _ in 0..most {
            let (Transmit::Sent, Some(frame)) = self.hosts[side].transmit(true, true) else { break };
            self.wire.push_back((1 - side, frame));
        }
    }

    fn arrive(&mut self) {
        if let Some((to, frame)) = self.wire.pop_front() {
            self.hosts[to].deliver(&frame, 100);
        }
    }

    fn lose(&mut self, input: &mut Input<'_>) {
        for _ in 0..=input.below(4) {
            let at = input.below(16);
            let _ = self.wire.remove(at);
        }
    }

    /// The wire is good, receives are posted, time passes: all sends end, or the connection has failed.
    fn settle(&mut self) {
        for _ in 0..ROUNDS {
            for side in 0..2 {
                let host = &mut self.hosts[side];
                host.complete(1000);
                while steps::post_recv_simple(host) {}
                self.transmit(side, 4000);
                // Local operations end without a frame.
                self.hosts[side].complete(1000);
            }
            let quiet = self.wire.is_empty();
            while !self.wire.is_empty() {
                self.arrive();
            }
            if self.hosts.iter().any(|host| host.qp.state() != QpState::Rts) {
                return;
            }
            if !quiet {
                continue;
            }
            if self.hosts.iter().all(|host| host.model.sends.is_empty()) {
                return;
            }
            let timers = self.hosts.iter().filter_map(|host| host.qp.poll_timeout());
            let Some(at) = timers.min() else { break };
            for host in &mut self.hosts {
                host.wait(at.since(host.now));
            }
        }
        panic!("never ends: {:?}", self.hosts.each_ref().map(|host| (host.qp.info(), &host.model.sends)));
    }
}

/// A header changed, the ICRC right.
fn mutate(frame: &[u8], input: &mut Input<'_>) -> Option<Vec<u8>> {
    let packet = check_frame(frame).ok()?;
    let start = usize::from(packet.payload_offset);
    let mut payload = frame[start..start + usize::from(packet.payload_len)].to_vec();
    let mut headers = packet.headers;
    let (bth, ext) = (&mut headers.bth, &mut headers.ext);
    let by = u32::from(input.u8()).wrapping_sub(0x80);
    match input.below(10) {
        0 | 1 => bth.psn = Psn::new(bth.psn.get().wrapping_add(by)),
        2 => bth.ack_req = !bth.ack_req,
        3 => payload.truncate(input.u8().into()),
        4 => payload.resize(usize::from(input.u16()) % 4097, 1),
        5 => {
            let same = |opcode: &&Opcode| {
                let (a, b) = (opcode.info(), bth.opcode.info());
                (a.service, a.reth, a.atomic, a.aeth, a.atomic_ack, a.imm, a.inv)
                    == (b.service, b.reth, b.atomic, b.aeth, b.atomic_ack, b.imm, b.inv)
            };
            let others: Vec<&Opcode> = Opcode::ALL.iter().filter(same).collect();
            bth.opcode = *input.pick(&others);
        }
        6 => ext.aeth = ext.aeth.map(|_| Aeth { syndrome: Syndrome::from_u8(input.u8()), msn: Msn::new(by) }),
        7 => {
            if let Some(reth) = &mut ext.reth {
                reth.len = DmaLen(reth.len.0.wrapping_add(by));
            }
        }
        8 => {
            if let Some(reth) = &mut ext.reth {
                reth.addr = reth.addr.advance(u64::from(by));
            }
        }
        _ => {
            ext.reth.iter_mut().for_each(|reth| reth.rkey = Rkey(reth.rkey.0 ^ by));
            ext.invalidate = ext.invalidate.map(|rkey| Rkey(rkey.0 ^ by));
        }
    }
    seal(&headers, &payload)
}

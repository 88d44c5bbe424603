//! Fates by seed and rate, on a real pair of ports.

use super::*;
use crate::any::{AnyPort, AnyQueue, Options};
use crate::conformance::{bytes_of, commit};
use crate::port::Port;
use crate::shm::{ShmConfig, pair};

/// Two joined ports; the first one is wrapped.
struct Rig {
    port: AnyPort,
    queue: AnyQueue,
    _peer: crate::ShmPort,
    peer: crate::ShmQueue,
}

fn rig(fault: FaultConfig) -> Rig {
    let config = ShmConfig { mtu: 1500, ..ShmConfig::new("pair") };
    let (a, mut b) = pair(&config, &config).expect("a pair");
    let options = Options { fault: Some(fault), pcap: None };
    let mut port = AnyPort::wrap(a, &options).expect("good rates");
    let (queue, peer) = (port.take_queues().remove(0), b.take_queues().remove(0));
    Rig { port, queue, _peer: b, peer }
}

fn frame(number: u32) -> Vec<u8> {
    let mut bytes = vec![0x5a; 100];
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    bytes
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

impl Rig {
    /// Sends `count` frames one by one in one direction; what came out at the other end.
    fn pass(&mut self, count: u32, out: bool) -> Vec<Vec<u8>> {
        let mut got = Vec::new();
        for n in 0..count {
            if out {
                assert!(commit(&mut self.queue, &frame(n)));
            } else {
                assert!(commit(&mut self.peer, &frame(n)));
            }
            self.turn(&mut got, out);
        }
        // What is held comes by time.
        let end = Instant::now() + Duration::from_millis(30);
        while Instant::now() < end {
            self.turn(&mut got, out);
            std::thread::sleep(Duration::from_micros(200));
        }
        got
    }
    fn turn(&mut self, got: &mut Vec<Vec<u8>>, out: bool) {
        self.queue.tx_flush();
        self.peer.tx_flush();
        if out {
            self.peer.rx_burst(64, |frame| got.push(bytes_of(&frame)));
        } else {
            self.queue.rx_burst(64, |frame| got.push(bytes_of(&frame)));
        }
    }
    fn counter(&self, out: bool, name: &str) -> u64 {
        let name = format!("fault_{}_{name}", if out { "tx" } else { "rx" });
        self.port.counters().into_iter().find(|(known, _)| *known == name).expect("a counter").1
    }
}

/// Runs 2000 frames each way with the same rates.
fn both(rates: Rates, check: impl Fn(&Rig, bool, Vec<Vec<u8>>)) {
    for out in [true, false] {
        let mut rig = rig(FaultConfig { seed: 7, rx: rates, tx: rates });
        let got = rig.pass(2000, out);
        check(&rig, out, got);
    }
}

#[test]
fn without_rates_all_passes_untouched() {
    both(Rates::default(), |_, _, got| assert!(got.iter().map(|f| number(f)).eq(0..2000)));
}

#[test]
fn losses_are_counted_and_by_rate() {
    both(Rates { loss: 0.1, ..Rates::default() }, |rig, out, got| {
        let lost = rig.counter(out, "lost");
        assert_eq!(got.len() as u64 + lost, 2000);
        // 10 % of 2000, deviation 13.
        assert!((130..270).contains(&lost), "{lost}");
        assert!(got.windows(2).all(|pair| number(&pair[0]) < number(&pair[1])));
    });
    both(Rates { loss: 1.0, ..Rates::default() }, |_, _, got| assert_eq!(got.len(), 0));
}

#[test]
fn duplicates_come_once_more() {
    both(Rates { duplicate: 0.1, ..Rates::default() }, |rig, out, got| {
        let doubled = rig.counter(out, "duplicated");
        assert!((130..270).contains(&doubled), "{doubled}");
        assert_eq!(got.len() as u64, 2000 + doubled);
        let mut numbers: Vec<u32> = got.iter().map(|frame| number(frame)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert!(numbers.into_iter().eq(0..2000));
    });
}

#[test]
fn overtaken_frames_come_a_little_later() {
    both(Rates { reorder: 0.1, ..Rates::default() }, |rig, out, got| {
        let numbers: Vec<u32> = got.iter().map(|frame| number(frame)).collect();
        let falls = numbers.windows(2).filter(|pair| pair[1] < pair[0]).count() as u64;
        let reordered = rig.counter(out, "reordered");
        assert!((130..270).contains(&reordered), "{reordered}");
        assert!(falls > reordered / 2 && falls <= reordered, "{falls} of {reordered} show");
        let mut sorted = numbers.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..2000), "none is lost, the last ones included");
    });
}

#[test]
fn corruption_flips_one_bit() {
    both(Rates { corrupt: 0.1, ..Rates::default() }, |rig, out, got| {
        assert_eq!(got.len(), 2000);
        let mut changed = 0;
        let clean = frame(0);
        for (n, got) in (0..).zip(&got) {
            let want = frame(n);
            let bits: u32 = want.iter().zip(got).map(|(a, b)| (a ^ b).count_ones()).sum();
            assert!(bits <= 1 && got.len() == clean.len());
            changed += u64::from(bits);
        }
        assert_eq!(changed, rig.counter(out, "corrupted"));
        assert!((130..270).contains(&changed), "{changed}");
    });
}

#[test]
fn delayed_frames_all_come_and_in_order() {
    let rates = Rates { delay: 1.0, delay_time: Duration::from_millis(3), ..Rates::default() };
    for out in [true, false] {
        let mut rig = rig(FaultConfig { seed: 1, rx: rates, tx: rates });
        let start = Instant::now();
        let got = rig.pass(100, out);
        assert!(got.iter().map(|frame| number(frame)).eq(0..100));
        assert!(start.elapsed() >= Duration::from_millis(3));
        assert_eq!(rig.counter(out, "delayed"), 100);
    }
}

#[test]
fn a_worker_does_not_sleep_on_held_frames() {
    let rates = Rates { delay: 1.0, delay_time: Duration::from_millis(5), ..Rates::default() };
    let mut rig = rig(FaultConfig { seed: 1, rx: rates, tx: rates });
    rig.turn(&mut Vec::new(), false);
    assert!(rig.queue.arm_wakeup(), "nothing is held");
    rig.queue.disarm_wakeup();
    assert!(commit(&mut rig.queue, &frame(0)));
    assert!(!rig.queue.arm_wakeup());
}

#[test]
fn the_seed_decides() {
    let fates = |seed| {
        let rates = Rates { loss: 0.3, ..Rates::default() };
        let mut rig = rig(FaultConfig { seed, rx: rates, tx: Rates::default() });
        rig.pass(200, false).iter().map(|frame| number(frame)).collect::<Vec<u32>>()
    };
    assert_eq!(fates(1), fates(1));
    assert_ne!(fates(1), fates(2));
}

#[test]
fn marks_are_set_where_the_sender_understands_them() {
    // Version and length, tos, ... checksum. All of it sums to 0xffff.
    let ipv4 = |tos: u8| {
        let mut frame = vec![0u8; 14];
        frame[12] = 8;
        frame.extend([0x45, tos, 0, 84, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        let sum = !fold(&frame[14..]);
        frame[24..26].copy_from_slice(&sum.to_be_bytes());
        frame
    };
    for (tos, want) in [(0x00, None), (0x01, Some(0x03)), (0x6a, Some(0x6b)), (0x03, None)] {
        let mut frame = ipv4(tos);
        assert_eq!(mark_ce(&mut frame), want.is_some());
        assert_eq!(frame[15], want.unwrap_or(tos));
        assert_eq!(fold(&frame[14..]), 0xffff, "checksum of tos {tos:#x}");
        let mut tagged = ipv4(tos);
        tagged.splice(12..12, [0x81, 0x00, 0x60, 0x00]);
        assert_eq!(mark_ce(&mut tagged), want.is_some());
        assert_eq!(tagged[19], want.unwrap_or(tos));
    }
    for (class, want) in [(0x00, None), (0x10, Some(0x30)), (0xaf, Some(0xbf)), (0x30, None)] {
        let mut frame = vec![0u8; 54];
        frame[12..16].copy_from_slice(&[0x86, 0xdd, 0x60, class]);
        assert_eq!(mark_ce(&mut frame), want.is_some());
        assert_eq!(frame[15], want.unwrap_or(class));
    }
    for len in 0..40 {
        mark_ce(&mut vec![0x81; len]);
        mark_ce(&mut ipv4(1)[..len.min(34)]);
    }
}

/// Ones' complement sum.
fn fold(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    ((sum & 0xffff) + (sum >> 16)) as u16
}

#[test]
fn rates_that_are_no_shares_are_named() {
    let config = FaultConfig { rx: Rates { loss: 1.5, ..Rates::default() }, ..FaultConfig::default() };
    let error = config.check().expect_err("150 %").to_string();
    assert_eq!(error, "fault.rx.loss: asked 1.5, allowed a share from 0 to 1");
    let config = FaultConfig { tx: Rates { delay: f64::NAN, ..Rates::default() }, ..FaultConfig::default() };
    assert_eq!(config.check().expect_err("no number").attribute, "fault.tx.delay");
}

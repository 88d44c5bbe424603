//! One suite for all ports: what the engine relies on, tried on two real ports that are joined.
//!
//! Owns the cases and the frames they send. A kind of port supplies a [`Rig`] and runs [`run`] from a test. A case
//! that a port can't do is skipped by name with a reason, which is printed. Cases fail by panicking, as tests do. Every
//! wait is bounded. Called by tests only.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::frame::{HEAD_BYTES, RxFrame};
use crate::port::{Port, PortQueue};

/// No wait is longer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes ahead of the payload: Ethernet, IPv4, UDP.
const HEADERS: usize = 42;
/// Shortest frame that Ethernet carries, less its check sequence.
const SHORTEST: usize = 60;
/// Bytes of the Ethernet header, which the MTU does not count.
const ETHERNET: usize = 14;

/// Most pieces behind a head, so that head and rest make one payload.
const REST_PIECES: usize = ferroce_mem::payload::MAX_PIECES - 1;

/// Makes joined ports of one kind.
pub trait Rig {
    /// The kind.
    type Port: Port<Queue: Send>;

    /// Name for messages.
    fn name(&self) -> String;
    /// Two joined ports of `queues` queues each whose links are up.
    ///
    /// # Errors
    /// Why this machine can't; the cases are skipped then.
    fn pair(&mut self, queues: u16) -> Result<(Self::Port, Self::Port), String>;
    /// A new port in the place of the second one of the last pair, which is gone.
    ///
    /// # Errors
    /// Why this kind can't do that.
    fn again(&mut self, queues: u16) -> Result<Self::Port, String>;
    /// A frame sent on queue `i` arrives on queue `i`, and the order between all frames of a queue holds.
    fn queues_are_joined(&self) -> bool;
    /// A committed frame is never dropped while the link is up: a full ring is seen by the sender.
    fn lossless(&self) -> bool;
}

/// What ran and what did not.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Report {
    /// Cases that passed.
    pub passed: Vec<&'static str>,
    /// Cases that were skipped, and why.
    pub skipped: Vec<(&'static str, String)>,
}

impl Report {
    fn note(&mut self, case: &'static str, rig: &str, result: Result<(), String>) {
        match result {
            Ok(()) => self.passed.push(case),
            Err(why) => {
                println!("conformance {rig}: skipped {case}: {why}");
                self.skipped.push((case, why));
            }
        }
    }
}

/// Runs all cases.
///
/// # Panics
/// If one fails.
pub fn run<R: Rig>(rig: &mut R) -> Report {
    let name = rig.name();
    let mut report = Report::default();
    report.note("every_length", &name, every_length(rig));
    report.note("all_queues", &name, all_queues(rig));
    report.note("full_ring", &name, full_ring(rig));
    report.note("oversize", &name, oversize(rig));
    report.note("uncommitted", &name, uncommitted(rig));
    report.note("short_commit", &name, short_commit(rig));
    report.note("sleep_and_wake", &name, sleep_and_wake(rig));
    report.note("peer_goes_and_comes", &name, peer_goes_and_comes(rig));
    report
}

/// Two ports and their queues.
struct Bench<P: Port> {
    a: Side<P>,
    b: Side<P>,
}

struct Side<P: Port> {
    port: P,
    queues: Vec<P::Queue>,
    mac: [u8; 6],
    ip: Ipv4Addr,
    longest: usize,
}

impl<P: Port> Side<P> {
    fn new(mut port: P, default_ip: Ipv4Addr) -> Side<P> {
        let queues = port.take_queues();
        assert!(port.take_queues().is_empty(), "queues can be taken once");
        let caps = port.caps();
        assert_eq!(queues.len(), usize::from(caps.queues));
        let ip = port.addresses().iter().find_map(|(ip, _)| match ip {
            IpAddr::V4(v4) => Some(*v4),
            IpAddr::V6(_) => None,
        });
        let longest = caps.mtu as usize + ETHERNET;
        Side { port, queues, mac: caps.mac, ip: ip.unwrap_or(default_ip), longest }
    }

    /// A RoCEv2-like frame of `len` bytes to the other side; `mark` makes its payload its own.
    fn frame_to<O: Port>(&self, other: &Side<O>, len: usize, mark: u32) -> Vec<u8> {
        frame(ends(self, other), len, mark)
    }
}

/// From and to.
#[derive(Clone, Copy)]
struct Ends {
    macs: ([u8; 6], [u8; 6]),
    ips: (Ipv4Addr, Ipv4Addr),
}

fn ends<A: Port, B: Port>(from: &Side<A>, to: &Side<B>) -> Ends {
    Ends { macs: (from.mac, to.mac), ips: (from.ip, to.ip) }
}

/// An Ethernet, IPv4 and UDP frame to port 4791.
fn frame(ends: Ends, len: usize, mark: u32) -> Vec<u8> {
    assert!(len >= HEADERS + 4);
    let mut bytes = Vec::with_capacity(len);
    bytes.extend(ends.macs.1);
    bytes.extend(ends.macs.0);
    bytes.extend([0x08, 0x00]);
    let ip_len = (len - ETHERNET) as u16;
    let mut ip = vec![0x45, 0x02];
    ip.extend(ip_len.to_be_bytes());
    ip.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    ip.extend(ends.ips.0.octets());
    ip.extend(ends.ips.1.octets());
    let sum: u32 = ip.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    bytes.extend(ip);
    bytes.extend(0xc000u16.to_be_bytes());
    bytes.extend(4791u16.to_be_bytes());
    bytes.extend((ip_len - 20).to_be_bytes());
    bytes.extend([0, 0]);
    bytes.extend(mark.to_be_bytes());
    bytes.extend((HEADERS + 4..len).map(|i| (i as u32).wrapping_mul(0x9e37).wrapping_add(mark * 77) as u8));
    bytes
}

/// The mark of a frame made by [`frame`].
fn mark_of(frame: &[u8]) -> u32 {
    frame
        .get(HEADERS..HEADERS + 4)
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(u32::MAX, u32::from_be_bytes)
}

/// All bytes of a received frame.
pub fn bytes_of(frame: &RxFrame<'_>) -> Vec<u8> {
    let shortest = HEAD_BYTES.min(frame.len());
    assert!(frame.head.len() >= shortest, "a head of {} bytes of {}", frame.head.len(), frame.len());
    assert!(frame.rest.pieces() <= REST_PIECES, "{} pieces", frame.rest.pieces());
    let mut bytes = vec![0; frame.len()];
    let (head, rest) = bytes.split_at_mut(frame.head.len());
    head.copy_from_slice(frame.head);
    assert_eq!(frame.rest.copy_to(rest), rest.len());
    bytes
}

/// Commits a frame; false if there is no room.
pub fn commit(queue: &mut impl PortQueue, bytes: &[u8]) -> bool {
    let Some(mut frame) = queue.tx_reserve(bytes.len()) else { return false };
    assert!(frame.buf.len() >= bytes.len() && frame.buf.write(0, bytes), "the reserved room is too small");
    queue.tx_commit(bytes.len());
    true
}

/// Commits and flushes a frame, waiting for room.
fn send(queue: &mut impl PortQueue, bytes: &[u8]) {
    let deadline = Instant::now() + PATIENCE;
    while !commit(queue, bytes) {
        assert!(Instant::now() < deadline, "no room for {} bytes within {PATIENCE:?}", bytes.len());
        queue.tx_flush();
        pause();
    }
    queue.tx_flush();
}

/// Receives up to `max` frames that were made by [`frame`]; a real wire carries others too.
fn take(queue: &mut impl PortQueue, max: usize, into: &mut Vec<Vec<u8>>) {
    queue.rx_burst(max, |frame| {
        let bytes = bytes_of(&frame);
        if bytes.get(36..38) == Some(&4791u16.to_be_bytes()[..]) {
            into.push(bytes);
        }
    });
}

/// Lets the other side's thread run without burning a core.
fn pause() {
    std::thread::sleep(Duration::from_micros(50));
}

/// Receives on all of `queues` until `count` frames are here; each with its queue.
fn collect(queues: &mut [impl PortQueue], count: usize) -> Vec<(usize, Vec<u8>)> {
    collect_while(queues, count, || {})
}

/// As [`collect`], with something else to do in each pass: the sender's flush, which the engine does too.
fn collect_while(
    queues: &mut [impl PortQueue],
    count: usize,
    mut pass: impl FnMut(),
) -> Vec<(usize, Vec<u8>)> {
    let deadline = Instant::now() + PATIENCE;
    let mut all = Vec::new();
    while all.len() < count {
        let before = all.len();
        pass();
        for (index, queue) in queues.iter_mut().enumerate() {
            let mut got = Vec::new();
            take(queue, 32, &mut got);
            all.extend(got.into_iter().map(|bytes| (index, bytes)));
        }
        if all.len() == before {
            assert!(Instant::now() < deadline, "{} of {count} frames came within {PATIENCE:?}", all.len());
            pause();
        }
    }
    all
}

/// Nothing is on its way.
fn assert_quiet(queues: &mut [impl PortQueue]) {
    let mut all = Vec::new();
    for _ in 0..20 {
        queues.iter_mut().for_each(|queue| take(queue, 32, &mut all));
        pause();
    }
    assert_eq!(all.len(), 0, "unexpected frame with mark {:?}", all.first().map(|frame| mark_of(frame)));
}

fn bench<R: Rig>(rig: &mut R, queues: u16) -> Result<Bench<R::Port>, String> {
    let (a, b) = rig.pair(queues)?;
    assert!(a.link_up() && b.link_up(), "the pair of {} is not joined", rig.name());
    let a = Side::new(a, Ipv4Addr::new(192, 0, 2, 1));
    let b = Side::new(b, Ipv4Addr::new(192, 0, 2, 2));
    Ok(Bench { a, b })
}

/// Sends frames of the given lengths on a queue and checks that they arrive as they left, in order.
fn exchange<P: Port>(from: &mut Side<P>, to: &mut Side<P>, queue: usize, lengths: &[usize], joined: bool) {
    for group in lengths.chunks(8) {
        let frames: Vec<Vec<u8>> =
            group.iter().map(|&len| from.frame_to(to, len, (len * 100 + queue) as u32)).collect();
        frames.iter().for_each(|bytes| send(&mut from.queues[queue], bytes));
        let got = collect_while(&mut to.queues, frames.len(), || from.queues[queue].tx_flush());
        assert!(!joined || got.iter().all(|(at, _)| *at == queue), "queue {queue} is not joined to its like");
        for ((_, got), want) in got.iter().zip(&frames) {
            assert_eq!((got.len(), mark_of(got)), (want.len(), mark_of(want)), "length and mark");
            assert!(got == want, "a frame of {} bytes was changed on its way", want.len());
        }
        assert_eq!(got.len(), frames.len(), "more frames than were sent");
    }
}

fn every_length<R: Rig>(rig: &mut R) -> Result<(), String> {
    let Bench { mut a, mut b } = bench(rig, 1)?;
    let joined = rig.queues_are_joined();
    let lengths: Vec<usize> = (SHORTEST..=a.longest.min(b.longest)).collect();
    exchange(&mut a, &mut b, 0, &lengths, joined);
    exchange(&mut b, &mut a, 0, &lengths, joined);
    Ok(())
}

fn all_queues<R: Rig>(rig: &mut R) -> Result<(), String> {
    let Bench { mut a, mut b } = bench(rig, 3)?;
    let joined = rig.queues_are_joined();
    for queue in [2, 0, 1] {
        let lengths = [60, 61, 127, 128, 129, 1000, 200, 60];
        exchange(&mut a, &mut b, queue, &lengths, joined);
        exchange(&mut b, &mut a, queue, &lengths, joined);
    }
    Ok(())
}

fn full_ring<R: Rig>(rig: &mut R) -> Result<(), String> {
    if !rig.lossless() {
        return Err("frames may be dropped on the way, the sender can't see it".into());
    }
    let Bench { mut a, mut b } = bench(rig, 1)?;
    let to_b = ends(&a, &b);
    for (round, len) in [a.longest, 60, 125, 1000].into_iter().enumerate() {
        let mut committed = 0u32;
        let first = round as u32 * 1_000_000;
        // With few flushes, then with one for each frame.
        while commit(&mut a.queues[0], &frame(to_b, len, first + committed)) {
            committed += 1;
            if round == 1 || committed.is_multiple_of(32) {
                a.queues[0].tx_flush();
            }
            assert!(committed < 1_000_000, "the ring never fills");
        }
        assert!(committed > 2, "the ring holds {committed} frames of {len} bytes only");
        a.queues[0].tx_flush();
        let got = collect_while(&mut b.queues, committed as usize, || a.queues[0].tx_flush());
        let marks: Vec<u32> = got.iter().map(|(_, bytes)| mark_of(bytes)).collect();
        assert!(marks.iter().copied().eq(first..first + committed), "lost, doubled or out of order");
        assert_quiet(&mut b.queues);
        send(&mut a.queues[0], &frame(to_b, len, 7));
        assert_eq!(mark_of(&collect(&mut b.queues, 1)[0].1), 7, "there is room again");
    }
    Ok(())
}

fn counter(port: &impl Port, name: &str) -> u64 {
    let all = port.counters();
    let found = all.iter().find(|(known, _)| *known == name);
    found.unwrap_or_else(|| panic!("no counter {name} among {all:?}")).1
}

fn oversize<R: Rig>(rig: &mut R) -> Result<(), String> {
    let Bench { mut a, mut b } = bench(rig, 1)?;
    let before = counter(&a.port, "tx_errors");
    for len in [a.longest + 1, usize::MAX, 1 << 20] {
        assert!(a.queues[0].tx_reserve(len).is_none(), "{len} bytes were taken");
    }
    assert_eq!(counter(&a.port, "tx_errors"), before + 3, "each refusal is counted");
    let bytes = a.frame_to(&b, a.longest, 1);
    let sent = counter(&a.port, "tx_good_packets");
    send(&mut a.queues[0], &bytes);
    let got = collect(&mut b.queues, 1);
    assert!(got[0].1 == bytes, "the longest frame is not refused");
    assert_eq!(counter(&a.port, "tx_good_packets"), sent + 1);
    assert_eq!(counter(&b.port, "rx_good_packets"), 1);
    assert_eq!(counter(&b.port, "rx_good_bytes"), bytes.len() as u64);
    Ok(())
}

fn uncommitted<R: Rig>(rig: &mut R) -> Result<(), String> {
    let Bench { mut a, mut b } = bench(rig, 1)?;
    let bytes = a.frame_to(&b, 100, 1);
    for _ in 0..3 {
        let mut frame = a.queues[0].tx_reserve(100).expect("an empty ring has room");
        assert!(frame.buf.write(0, &bytes));
        a.queues[0].tx_flush();
    }
    assert_quiet(&mut b.queues);
    let bytes = a.frame_to(&b, 80, 2);
    send(&mut a.queues[0], &bytes);
    assert!(collect(&mut b.queues, 1)[0].1 == bytes);
    Ok(())
}

fn short_commit<R: Rig>(rig: &mut R) -> Result<(), String> {
    let Bench { mut a, mut b } = bench(rig, 1)?;
    let longest = a.longest;
    for len in [60, 64, 200, longest] {
        let bytes = a.frame_to(&b, len, len as u32);
        let mut frame = a.queues[0].tx_reserve(longest).expect("an empty ring has room");
        assert!(frame.buf.write(0, &bytes));
        a.queues[0].tx_commit(len);
        a.queues[0].tx_flush();
        let got = collect(&mut b.queues, 1);
        assert!(got[0].1 == bytes, "{} bytes came where {len} were committed", got[0].1.len());
    }
    Ok(())
}

/// One wait on a queue's descriptors. True if it was woken, false if the time is up.
fn sleep_on(queue: &impl PortQueue, longest: Duration) -> bool {
    let waits = queue.wait_fds();
    assert!(!waits.is_empty(), "a port that can sleep has descriptors");
    let mut fds: Vec<PollFd<'_>> =
        waits.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let time = rustix::time::Timespec::try_from(longest).expect("short");
    rustix::event::poll(&mut fds, Some(&time)).is_ok_and(|ready| ready > 0)
}

fn sleep_and_wake<R: Rig>(rig: &mut R) -> Result<(), String> {
    const FRAMES: u32 = 3000;
    let Bench { mut a, mut b } = bench(rig, 1)?;
    if !b.port.caps().can_sleep {
        return Err("the port can't sleep".into());
    }
    let to_b = ends(&a, &b);
    let (sender, queue) = (&mut a.queues[0], &mut b.queues[0]);
    let (mut got, mut sleeps) = (Vec::new(), 0);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            for mark in 0..FRAMES {
                send(sender, &frame(to_b, 100, mark));
                // Now and then the receiver has the time to fall asleep, or nearly.
                match mark % 7 {
                    0 => std::thread::sleep(Duration::from_micros(u64::from(mark) % 90)),
                    3 => std::thread::yield_now(),
                    _ => {}
                }
            }
        });
        while got.len() < FRAMES as usize {
            take(queue, 4, &mut got);
            if got.len() < FRAMES as usize && queue.arm_wakeup() {
                sleeps += 1;
                let woken = sleep_on(queue, PATIENCE);
                assert!(woken, "a wake-up was lost: asleep for {PATIENCE:?} after {} frames", got.len());
            }
            queue.disarm_wakeup();
        }
    });
    let marks: Vec<u32> = got.iter().map(|bytes| mark_of(bytes)).collect();
    assert!(marks.iter().copied().eq(0..FRAMES), "lost, doubled or out of order");
    assert!(sleeps > 0, "the receiver never slept: nothing was tried");
    assert!(queue.arm_wakeup(), "nothing is waiting");
    assert!(!sleep_on(queue, Duration::from_millis(20)), "woken without a frame");
    queue.disarm_wakeup();
    Ok(())
}

fn peer_goes_and_comes<R: Rig>(rig: &mut R) -> Result<(), String> {
    let Bench { mut a, mut b } = bench(rig, 2)?;
    let joined = rig.queues_are_joined();
    exchange(&mut a, &mut b, 1, &[60, 500], joined);
    for round in 0..3 {
        // Frames are on their way when the peer goes.
        let bytes = a.frame_to(&b, 200, 1);
        (0..5).for_each(|_| assert!(commit(&mut a.queues[0], &bytes)));
        a.queues[0].tx_flush();
        drop(b);
        until(&mut a.port, "down", |port| !port.link_up());
        // Sending into nothing neither blocks nor fails; the frames are lost, and nothing comes.
        (0..20_000).for_each(|_| assert!(commit(&mut a.queues[1], &bytes), "no carrier is no back-pressure"));
        a.queues[1].tx_flush();
        assert_quiet(&mut a.queues);
        b = Side::new(rig.again(2)?, Ipv4Addr::new(192, 0, 2, 2));
        let deadline = Instant::now() + PATIENCE;
        while !(a.port.link_up() && b.port.link_up()) {
            assert!(Instant::now() < deadline, "the link did not come back in round {round}");
            a.port.housekeep();
            b.port.housekeep();
            pause();
        }
        assert_quiet(&mut b.queues);
        exchange(&mut a, &mut b, 0, &[60, 129, 1000], joined);
        exchange(&mut b, &mut a, 1, &[60, 129, 1000], joined);
    }
    Ok(())
}

/// Keeps house until a condition holds.
fn until<P: Port>(port: &mut P, what: &str, done: impl Fn(&P) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done(port) {
        assert!(Instant::now() < deadline, "the link is not {what} after {PATIENCE:?}");
        port.housekeep();
        pause();
    }
}

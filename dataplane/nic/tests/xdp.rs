//! The `xdp` port on veth pairs in network namespaces of the tests' own. Needs root; says so where it lacks.

#[path = "xdp/netns.rs"]
mod netns;

use std::net::IpAddr;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ferroce_nic::conformance::{Rig, run};
use ferroce_nic::xdp::{MAX_JUMBO_MTU, MAX_MTU, XdpConfig, XdpMode, XdpPort, XdpQueue, ZeroCopy};
use ferroce_nic::{Caps, Fallback, Port, PortError, PortQueue, RxQueues};
use netns::{Pair, VETH};

const LIMIT: Duration = Duration::from_secs(10);

fn small() -> XdpConfig {
    XdpConfig { rx_ring: 128, tx_ring: 128, ..XdpConfig::new(VETH) }
}

fn open(pair: &Pair, side: usize, config: XdpConfig) -> Result<XdpPort, PortError> {
    pair.inside(side, || XdpPort::open(config))
}

#[track_caller]
fn must_open(pair: &Pair, side: usize, config: XdpConfig) -> (XdpPort, Vec<XdpQueue>) {
    let mut port = open(pair, side, config).unwrap_or_else(|e| panic!("{e}"));
    let queues = port.take_queues();
    (port, queues)
}

fn counter(port: &XdpPort, name: &str) -> u64 {
    port.counters().into_iter().find(|(n, _)| *n == name).unwrap_or_else(|| panic!("no counter {name}")).1
}

/// An Ethernet frame with an IP and UDP header for port 4791 and a body that `seed` decides, `len` bytes in all.
fn roce(dst_mac: [u8; 6], dst: IpAddr, tagged: bool, len: usize, seed: u8) -> Vec<u8> {
    let mut f = dst_mac.to_vec();
    f.extend_from_slice(&[2, 0, 0, 0, 0, 0xee]);
    if tagged {
        f.extend_from_slice(&[0x81, 0x00, 0x60, 0x00]);
    }
    let at = f.len();
    match dst {
        IpAddr::V4(ip) => {
            let total = (len - at - 2) as u16;
            f.extend_from_slice(&[0x08, 0x00, 0x45, 0]);
            f.extend_from_slice(&total.to_be_bytes());
            f.extend_from_slice(&[0, 0, 0x40, 0, 64, 17, 0, 0, 10, 77, 0, 9]);
            f.extend_from_slice(&ip.octets());
        }
        IpAddr::V6(ip) => {
            let payload = (len - at - 2 - 40) as u16;
            f.extend_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0]);
            f.extend_from_slice(&payload.to_be_bytes());
            f.extend_from_slice(&[17, 64]);
            f.extend_from_slice(&[0xfd; 16]);
            f.extend_from_slice(&ip.octets());
        }
    }
    let udp = (len - f.len()) as u16;
    f.extend_from_slice(&[0xc0, seed, 0x12, 0xb7]);
    f.extend_from_slice(&udp.to_be_bytes());
    f.extend_from_slice(&[0xde, 0xad]);
    while f.len() < len {
        f.push(seed.wrapping_add((f.len() * 7) as u8));
    }
    f
}

/// Sends all frames; waits where the queue has no room.
#[track_caller]
fn send(queue: &mut XdpQueue, frames: &[Vec<u8>]) {
    let deadline = Instant::now() + LIMIT;
    for frame in frames {
        loop {
            if let Some(mut tx) = queue.tx_reserve(frame.len()) {
                assert!(tx.buf.write(0, frame));
                break;
            }
            assert!(Instant::now() < deadline, "no room to send");
            queue.tx_flush();
            std::thread::sleep(Duration::from_millis(1));
        }
        queue.tx_commit(frame.len());
    }
    queue.tx_flush();
}

/// Receives `count` frames from all queues, sleeping on their descriptors; fewer if no more come within the limit.
fn receive(queues: &mut [XdpQueue], count: usize) -> Vec<(usize, Vec<u8>)> {
    receive_within(queues, count, LIMIT)
}

fn receive_within(queues: &mut [XdpQueue], count: usize, limit: Duration) -> Vec<(usize, Vec<u8>)> {
    let deadline = Instant::now() + limit;
    let mut found = Vec::new();
    while found.len() < count && Instant::now() < deadline {
        let mut got = 0;
        for (i, queue) in queues.iter_mut().enumerate() {
            got += queue.rx_burst(32, |frame| {
                let mut bytes = frame.head.to_vec();
                let at = bytes.len();
                bytes.resize(at + frame.rest.len(), 0);
                frame.rest.copy_to(&mut bytes[at..]);
                found.push((i, bytes));
            });
        }
        if got == 0 && queues.iter_mut().all(|q| q.arm_wakeup()) {
            let fds: Vec<_> = queues.iter().flat_map(|q| q.wait_fds()).collect();
            let mut polls: Vec<_> =
                fds.iter().map(|fd| rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)).collect();
            let wait = rustix::event::Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
            rustix::event::poll(&mut polls, Some(&wait)).unwrap();
            queues.iter_mut().for_each(|q| q.disarm_wakeup());
        }
    }
    found
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn ping(pair: &Pair, side: usize, to: &str) {
    let out = pair.command(side, "ping").args(["-c", "2", "-i", "0.2", "-W", "5", to]).output().unwrap();
    assert!(out.status.success(), "ping {to}: {}", String::from_utf8_lossy(&out.stdout));
}

fn frames_cross(mode: XdpMode, words: &str) {
    let Some(pair) = Pair::new(1, 3400) else { return };
    let (mut a, mut a_queues) = must_open(&pair, 0, XdpConfig { mode, ..small() });
    let (b, mut b_queues) = must_open(&pair, 1, XdpConfig { mode, ..small() });
    assert_eq!(b.caps().mode, words);
    assert_eq!((b.caps().mtu, b.caps().queues), (3400, 1));
    assert!(a.link_up() && b.link_up());
    let mac = a.resolve(ip("10.77.0.1"), ip("10.77.0.2"), Instant::now() + LIMIT).unwrap();
    assert_eq!(mac, b.caps().mac);

    let longest = 3400 + 14;
    let mut sent = Vec::new();
    for (seed, len) in [60, 74, 127, 128, 129, 142, 143, 1500, 2048 + 78, longest].into_iter().enumerate() {
        sent.push(roce(mac, ip("10.77.0.2"), false, len, seed as u8));
        sent.push(roce(mac, ip("fd77::2"), false, len.max(78), seed as u8 + 100));
    }
    sent.push(roce(mac, ip("10.77.0.2"), true, 200, 7));
    // Many more than the rings hold.
    for seed in 0..=255 {
        sent.push(roce(mac, ip("10.77.0.2"), false, 300, seed));
    }
    let mut got = Vec::new();
    for part in sent.chunks(64) {
        send(&mut a_queues[0], part);
        got.extend(receive(&mut b_queues, part.len()).into_iter().map(|(_, frame)| frame));
    }
    assert_eq!(got.len(), sent.len());
    for (i, (got, sent)) in got.iter().zip(&sent).enumerate() {
        assert!(got == sent, "frame {i} of {} bytes differs ({} arrived)", sent.len(), got.len());
    }
    let bytes: usize = sent.iter().map(Vec::len).sum();
    assert_eq!(counter(&a, "tx_good_packets"), sent.len() as u64);
    assert_eq!(counter(&b, "rx_good_packets"), sent.len() as u64);
    assert_eq!(counter(&a, "tx_good_bytes"), bytes as u64);
    assert_eq!(counter(&b, "rx_good_bytes"), bytes as u64);
    assert_eq!((counter(&b, "rx_missed_errors"), counter(&b, "xdp_rx_unowned_queue")), (0, 0));
    assert!(counter(&a, "xdp_tx_kicks") >= 1);

    // Frames that are not ours still reach the kernel, in both directions, while both ends are attached.
    for to in ["10.77.0.2", "fd77::2"] {
        ping(&pair, 0, to);
    }
    for to in ["10.77.0.1", "fd77::1"] {
        ping(&pair, 1, to);
    }
    assert_eq!(counter(&b, "rx_good_packets"), sent.len() as u64);
    assert!(counter(&b, "xdp_rx_not_ours") >= 8, "requests and answers of four pings");
    // The same port at an address that is not ours stays with the kernel.
    send(&mut a_queues[0], &[roce(mac, ip("10.77.0.3"), false, 100, 1)]);
    assert!(receive_within(&mut b_queues, 1, Duration::from_millis(200)).is_empty());
}

#[test]
fn frames_cross_in_native_mode() {
    frames_cross(XdpMode::Native, "native, copy");
}

#[test]
fn frames_cross_in_generic_mode() {
    frames_cross(XdpMode::Generic, "generic, copy");
}

#[test]
fn a_frame_that_is_too_long_is_refused_and_counted() {
    let Some(pair) = Pair::new(1, 1500) else { return };
    let (port, mut queues) = must_open(&pair, 0, small());
    assert!(queues[0].tx_reserve(4000).is_none());
    assert_eq!(counter(&port, "xdp_tx_oversize"), 1);
}

#[test]
fn a_reserved_frame_that_is_not_committed_is_not_sent() {
    let Some(pair) = Pair::new(1, 1500) else { return };
    let (a, mut a_queues) = must_open(&pair, 0, small());
    let (_b, mut b_queues) = must_open(&pair, 1, small());
    let mac = [0xff; 6];
    // More often than there are chunks: none may leak.
    for _ in 0..1000 {
        assert!(a_queues[0].tx_reserve(100).is_some());
        a_queues[0].tx_flush();
    }
    let frame = roce(mac, ip("10.77.0.2"), false, 100, 3);
    send(&mut a_queues[0], std::slice::from_ref(&frame));
    assert_eq!(receive(&mut b_queues, 1), vec![(0, frame)]);
    assert_eq!(counter(&a, "tx_good_packets"), 1);
}

#[test]
fn all_four_queues_are_owned_or_opening_is_refused() {
    let Some(pair) = Pair::new(4, 1500) else { return };
    let refused = open(&pair, 1, XdpConfig { queues: Some(2), ..small() }).err().expect("refused");
    assert!(refused.to_string().contains("4 queues, 2 owned"), "{refused}");
    let refused = open(&pair, 1, XdpConfig { workers: 5, ..small() }).err().expect("refused");
    assert_eq!(refused.attribute, "workers");
    assert!(refused.to_string().contains("has 4 receive queues"), "{refused}");

    let (_a, mut a_queues) = must_open(&pair, 0, XdpConfig { workers: 4, ..small() });
    for workers in [1u16, 2, 4] {
        let (b, mut b_queues) = must_open(&pair, 1, XdpConfig { workers, ..small() });
        assert_eq!((b_queues.len(), b.caps().queues), (usize::from(workers), workers));
        // A socket sends on its own queue, and veth delivers to the queue of the same number.
        for (i, queue) in a_queues.iter_mut().enumerate() {
            let frames: Vec<_> = (0..16)
                .map(|n| roce(b.caps().mac, ip("10.77.0.2"), false, 120, (i * 16 + n) as u8))
                .collect();
            send(queue, &frames);
        }
        let got = receive(&mut b_queues, 64);
        assert_eq!(got.len(), 64, "with {workers} workers");
        for (worker, frame) in got {
            let sent_on = usize::from(frame[35]) / 16;
            assert_eq!(worker, sent_on % usize::from(workers), "queue {sent_on} with {workers} workers");
        }
        assert_eq!(counter(&b, "xdp_rx_unowned_queue"), 0);
        assert!(!b.caps().steering);
    }
}

#[test]
fn bad_interfaces_are_named() {
    let Some(pair) = Pair::new(1, 1500) else { return };
    let e = open(&pair, 0, XdpConfig::new("eth77")).err().expect("missing");
    assert_eq!(e.attribute, "interface");
    assert!(e.to_string().contains("eth77") && e.allowed.contains(VETH), "{e}");
    let e = open(&pair, 0, XdpConfig::new("lo")).err().expect("not Ethernet");
    assert!(e.to_string().contains("an Ethernet interface"), "{e}");
    pair.ip(0, &["link", "set", VETH, "down"]);
    let e = open(&pair, 0, small()).err().expect("down");
    assert!(e.to_string().contains("this one is down") && e.hint.contains("up"), "{e}");
    let e = open(&pair, 1, XdpConfig { rx_ring: 100, ..small() }).err().expect("ring");
    assert!(e.to_string().contains("rx-ring: asked 100, allowed a power of two"), "{e}");
}

#[test]
fn zero_copy_is_stated_or_demanded() {
    let Some(pair) = Pair::new(1, 1500) else { return };
    let e = open(&pair, 0, XdpConfig { zero_copy: ZeroCopy::Must, ..small() }).err().expect("veth has none");
    assert_eq!(e.attribute, "zero-copy");
    assert!(e.to_string().contains("driver has no zero-copy"), "{e}");
    let config = XdpConfig { zero_copy: ZeroCopy::Must, mode: XdpMode::Generic, ..small() };
    let e = open(&pair, 0, config).err().expect("generic has none");
    assert!(e.to_string().contains("generic mode has no zero-copy"), "{e}");
    let (port, queues) = must_open(&pair, 0, small());
    let fallbacks = port.fallbacks();
    assert!(fallbacks.iter().any(|f| f.reason == "copy: driver has no zero-copy"), "{fallbacks:?}");
    drop((port, queues));
    let (port, _queues) = must_open(&pair, 0, XdpConfig { zero_copy: ZeroCopy::Off, ..small() });
    assert!(!port.fallbacks().iter().any(|f| f.wanted == "zero-copy"));
    assert_eq!(port.caps().mode, "native, copy");
}

/// On an interface of 9000 bytes the whole MTU is there, in the driver too; beyond what a frame's chunks hold, and where
/// the MTU is raised later, the cap is said.
#[test]
fn a_large_mtu_is_carried_or_the_cap_is_said() {
    let Some(pair) = Pair::new(1, 9000) else { return };
    let (port, _queues) = must_open(&pair, 0, XdpConfig { mode: XdpMode::Native, ..small() });
    assert_eq!((port.caps().mtu, port.caps().mode.as_str()), (9000, "native, copy"));
    assert!(port.caps().scatter_rx);
    assert!(!port.fallbacks().iter().any(|f| f.wanted.contains("MTU")), "{:?}", port.fallbacks());
    drop((port, _queues));

    pair.ip(0, &["link", "set", VETH, "mtu", "12000"]);
    let (port, _queues) = must_open(&pair, 0, XdpConfig { mode: XdpMode::Generic, ..small() });
    assert_eq!(port.caps().mtu, MAX_JUMBO_MTU);
    let fallbacks = port.fallbacks();
    assert!(fallbacks.iter().any(|f| f.got == format!("MTU {MAX_JUMBO_MTU}")), "{fallbacks:?}");
    drop((port, _queues));

    pair.ip(0, &["link", "set", VETH, "mtu", "1500"]);
    let (mut port, _queues) = must_open(&pair, 0, XdpConfig { mode: XdpMode::Generic, ..small() });
    assert!(!port.caps().scatter_rx);
    pair.ip(0, &["link", "set", VETH, "mtu", "9000"]);
    housekeep_until(&mut port, "a larger MTU", |port| port.caps().mtu == MAX_MTU);
    let fallbacks = port.fallbacks();
    let capped = fallbacks.iter().find(|f| f.got == format!("MTU {MAX_MTU}")).expect("a fallback");
    assert!(capped.hint.contains("start again") && capped.hint.contains("2048"), "{capped:?}");
}

#[test]
fn missing_capabilities_are_named() {
    use rustix::thread::CapabilitySet;
    let Some(pair) = Pair::new(1, 1500) else { return };
    for (bit, name) in [
        (CapabilitySet::NET_RAW, "CAP_NET_RAW"),
        (CapabilitySet::BPF | CapabilitySet::SYS_ADMIN, "CAP_BPF"),
        (CapabilitySet::NET_ADMIN, "CAP_NET_ADMIN"),
    ] {
        let e = pair.inside(0, || {
            let mut sets = rustix::thread::capabilities(None).unwrap();
            sets.effective.remove(bit);
            rustix::thread::set_capabilities(None, sets).unwrap();
            XdpPort::open(small()).err().expect("not permitted")
        });
        assert_eq!(e.attribute, "capabilities");
        assert!(e.to_string().contains(&format!("missing {name})")), "{e}");
    }
}

/// Not a test: what [`Holder`] runs in a process of its own.
#[test]
#[ignore = "helper process of other tests"]
fn helper_holds_the_interface() {
    if let Ok(_port) = XdpPort::open(small()) {
        println!("holding");
        // Until killed; bounded, in case the test died first.
        std::thread::sleep(LIMIT * 6);
    }
}

/// Another process that has opened the port on a side.
struct Holder(Child);

impl Holder {
    fn new(pair: &Pair, side: usize) -> Holder {
        let exe = std::env::current_exe().unwrap();
        let mut child = pair
            .command(side, exe.to_str().unwrap())
            .args(["--exact", "helper_holds_the_interface", "--ignored", "--nocapture"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
        assert!(
            lines.any(|line| line.unwrap().contains("holding")),
            "the helper process holds the interface"
        );
        Holder(child)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_second_appliance_is_told_who_has_the_interface_and_a_killed_one_leaves_nothing() {
    let Some(pair) = Pair::new(1, 1500) else { return };
    let holder = Holder::new(&pair, 0);
    let shown = pair.ip(0, &["-d", "link", "show", VETH]);
    assert!(shown.contains("prog/xdp"), "{shown}");
    for mode in [XdpMode::Auto, XdpMode::Generic] {
        let e = open(&pair, 0, XdpConfig { mode, ..small() }).err().expect("in use");
        let process = format!("in use by another ferroce, process {}", holder.0.id());
        assert!(e.attribute == "interface" && e.to_string().contains(&process), "{e}");
    }
    let mut holder = holder;
    holder.0.kill().unwrap();
    holder.0.wait().unwrap();
    // The kernel detaches when the last reference goes, a moment after the process is reaped.
    let deadline = Instant::now() + LIMIT;
    while pair.ip(0, &["-d", "link", "show", VETH]).contains("prog/xdp") {
        assert!(Instant::now() < deadline, "the program of a killed process is still attached");
        std::thread::sleep(Duration::from_millis(20));
    }
    let (_port, _queues) = must_open(&pair, 0, small());
}

#[test]
fn closing_and_opening_again_at_once_works() {
    let Some(pair) = Pair::new(2, 1500) else { return };
    let (_a, mut a_queues) = must_open(&pair, 0, small());
    for seed in 0..5 {
        let (_b, mut b_queues) = must_open(&pair, 1, XdpConfig { workers: 2, ..small() });
        let frame = roce([0xff; 6], ip("10.77.0.2"), false, 90, seed);
        send(&mut a_queues[0], std::slice::from_ref(&frame));
        assert_eq!(receive(&mut b_queues, 1), vec![(0, frame)]);
    }
}

#[test]
fn next_hops_are_resolved_or_the_error_says_what_was_tried() {
    let Some(pair) = Pair::new(1, 1500) else { return };
    let (mut a, _queues) = must_open(&pair, 0, small());
    let (b, _b_queues) = must_open(&pair, 1, small());
    pair.ip(0, &["route", "add", "192.168.9.0/24", "via", "10.77.0.2"]);
    pair.ip(0, &["-6", "route", "add", "fd99::/64", "via", "fd77::2"]);
    pair.ip(0, &["route", "add", "unreachable", "10.88.0.0/16"]);
    let soon = || Instant::now() + LIMIT;
    for (src, dst) in [
        ("10.77.0.1", "10.77.0.2"),
        ("fd77::1", "fd77::2"),
        ("10.77.0.1", "192.168.9.4"),
        ("fd77::1", "fd99::4"),
        ("0.0.0.0", "10.77.0.2"),
    ] {
        assert_eq!(a.resolve(ip(src), ip(dst), soon()), Ok(b.caps().mac), "{src} to {dst}");
    }
    let started = Instant::now();
    let e = a
        .resolve(ip("10.77.0.1"), ip("10.77.0.99"), started + Duration::from_millis(300))
        .unwrap_err()
        .to_string();
    for word in ["10.77.0.99", VETH, "ARP probes", "did not answer", "INCOMPLETE"] {
        assert!(e.contains(word), "{word} in {e}");
    }
    assert!(started.elapsed() >= Duration::from_millis(300));
    let e = a.resolve(ip("fd77::1"), ip("fd77::99"), Instant::now()).unwrap_err().to_string();
    assert!(e.contains("fd77::99") && e.contains("ND probes"), "{e}");
    let e = a.resolve(ip("10.77.0.1"), ip("172.16.0.1"), soon()).unwrap_err().to_string();
    assert!(e.contains("no route to 172.16.0.1 from 10.77.0.1 by veth0"), "{e}");
    let e = a.resolve(ip("10.77.0.1"), ip("10.88.0.1"), soon()).unwrap_err().to_string();
    assert!(e.contains("no route to 10.88.0.1"), "{e}");
    let e = a.resolve(ip("10.77.0.50"), ip("10.77.0.2"), soon()).unwrap_err().to_string();
    assert!(e.contains("10.77.0.50"), "{e}");
    let e = a.resolve(ip("10.77.0.1"), ip("10.77.0.1"), soon()).unwrap_err().to_string();
    assert!(e.contains("an address of this host"), "{e}");
}

/// Calls `housekeep` until `done`, within the limit.
#[track_caller]
fn housekeep_until(port: &mut XdpPort, what: &str, done: impl Fn(&XdpPort) -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !done(port) {
        assert!(Instant::now() < deadline, "housekeeping never noticed: {what}");
        port.housekeep();
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn changes_of_link_and_addresses_are_followed() {
    let Some(pair) = Pair::new(1, 1500) else { return };
    let (_a, mut a_queues) = must_open(&pair, 0, small());
    let (mut b, mut b_queues) = must_open(&pair, 1, small());
    assert!(b.addresses().contains(&(ip("10.77.0.2"), 24)));
    assert!(b.addresses().contains(&(ip("fd77::2"), 64)));
    let frame = roce([0xff; 6], ip("10.77.5.5"), false, 90, 1);
    pair.ip(1, &["addr", "add", "10.77.5.5/24", "dev", VETH]);
    housekeep_until(&mut b, "a new address", |b| b.addresses().contains(&(ip("10.77.5.5"), 24)));
    send(&mut a_queues[0], std::slice::from_ref(&frame));
    assert_eq!(receive(&mut b_queues, 1).len(), 1);
    pair.ip(1, &["addr", "del", "10.77.5.5/24", "dev", VETH]);
    housekeep_until(&mut b, "a lost address", |b| !b.addresses().contains(&(ip("10.77.5.5"), 24)));
    send(&mut a_queues[0], std::slice::from_ref(&frame));
    assert!(receive_within(&mut b_queues, 1, Duration::from_millis(200)).is_empty());

    pair.ip(0, &["link", "set", VETH, "down"]);
    housekeep_until(&mut b, "link down", |b| !b.link_up());
    // Sending into a dead link that housekeeping has not seen yet neither hangs nor keeps the worker awake for ever.
    send(&mut a_queues[0], std::slice::from_ref(&frame));
    assert!(a_queues[0].arm_wakeup());
    pair.ip(0, &["link", "set", VETH, "up"]);
    housekeep_until(&mut b, "link up", |b| b.link_up());
    assert_eq!(counter(&b, "link_changes"), 2);
    let frame = roce([0xff; 6], ip("10.77.0.2"), false, 90, 2);
    send(&mut a_queues[0], std::slice::from_ref(&frame));
    assert!(receive(&mut b_queues, 1).iter().any(|(_, got)| *got == frame));
}

/// NIC-3: queues that come later are noticed, with both numbers.
#[test]
fn queues_that_appear_later_are_told() {
    let Some(pair) = Pair::new(4, 1500) else { return };
    // The kernel frees the queues of a socket that was closed from a work queue: it may refuse for a moment.
    let ethtool = |side: usize, count: &str| {
        let deadline = Instant::now() + LIMIT;
        loop {
            let args = ["-L", VETH, "rx", count, "tx", count];
            let out = pair.command(side, "ethtool").args(args).output().unwrap();
            if out.status.success() {
                break;
            }
            let error = String::from_utf8_lossy(&out.stderr);
            assert!(Instant::now() < deadline, "ethtool: {error}");
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    ethtool(0, "2");
    ethtool(1, "2");
    let (mut b, mut b_queues) = must_open(&pair, 1, XdpConfig { workers: 2, ..small() });
    assert_eq!(b.caps().rx_queues, RxQueues { owned: 2, present: 2 });
    assert_eq!(b.problem(), None);
    ethtool(1, "4");
    ethtool(0, "4");
    housekeep_until(&mut b, "more queues", |b| b.caps().rx_queues.present == 4);
    let problem = b.problem().expect("a problem").to_string();
    assert!(problem.contains("4 queues, 2 owned") && problem.contains("ethtool -L"), "{problem}");
    // The sender has sockets on all four, and veth delivers to the queue of the same number.
    let (a, mut a_queues) = must_open(&pair, 0, XdpConfig { workers: 4, ..small() });
    for (i, queue) in a_queues.iter_mut().enumerate() {
        send(queue, &[roce(b.caps().mac, ip("10.77.0.2"), false, 120, i as u8)]);
    }
    assert_eq!(receive(&mut b_queues, 2).len(), 2);
    // What lands on the others is counted where the driver runs the program there; veth leaves queues that come later
    // without it. The program's own tests cover the counter.
    drop((a, a_queues));
    ethtool(0, "2");
    ethtool(1, "2");
    housekeep_until(&mut b, "fewer queues", |b| b.problem().is_none());
}

/// Frames of a group come while somebody wants it: the kernel joins it for us and leaves it again.
#[test]
fn groups_are_joined_and_left() {
    let Some(pair) = Pair::new(1, 1500) else { return };
    let (_a, mut a_queues) = must_open(&pair, 0, small());
    let (mut b, mut b_queues) = must_open(&pair, 1, small());
    let (v4, v6) = (ip("239.77.1.2"), ip("ff0e::77:3"));
    // A child of another test may hold a copy of the group's socket until it runs its own program.
    let left = |group: &str| {
        let deadline = Instant::now() + LIMIT;
        while pair.ip(1, &["maddr", "show", "dev", VETH]).contains(group) {
            assert!(Instant::now() < deadline, "still in {group}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let frames = [
        roce([0x01, 0, 0x5e, 77, 1, 2], v4, false, 90, 1),
        roce([0x33, 0x33, 0, 0x77, 0, 3], v6, false, 90, 2),
    ];
    send(&mut a_queues[0], &frames);
    assert!(receive_within(&mut b_queues, 1, Duration::from_millis(200)).is_empty(), "nobody wants them");
    pair.inside(1, || b.set_groups(&[v4, v6]));
    assert_eq!((b.problem(), counter(&b, "groups_joined")), (None, 2));
    let joined = pair.ip(1, &["maddr", "show", "dev", VETH]);
    for word in ["239.77.1.2", "ff0e::77:3", "01:00:5e:4d:01:02"] {
        assert!(joined.contains(word), "{word} in {joined}");
    }
    send(&mut a_queues[0], &frames);
    let got: Vec<_> = receive(&mut b_queues, 2).into_iter().map(|(_, frame)| frame).collect();
    assert_eq!(got, frames);
    pair.inside(1, || b.set_groups(&[v6]));
    left("239.77.1.2");
    send(&mut a_queues[0], &frames);
    assert_eq!(receive(&mut b_queues, 1), vec![(0, frames[1].clone())]);
    drop((b, b_queues));
    left("ff0e::77:3");
}

/// A sender in the kernel whose interface finishes checksums in hardware hands over frames with unfinished ones.
#[test]
fn unfinished_checksums_are_taken() {
    let Some(pair) = Pair::new(1, 1500) else { return };
    let (_b, mut b_queues) = must_open(&pair, 1, small());
    for (from, to) in [("10.77.0.1:5000", "10.77.0.2:4791"), ("[fd77::1]:5000", "[fd77::2]:4791")] {
        let offload = |state: &str| {
            let out = pair.command(0, "ethtool").args(["-K", VETH, "tx", state]).output().unwrap();
            assert!(out.status.success(), "ethtool: {}", String::from_utf8_lossy(&out.stderr));
        };
        let mut sums = Vec::new();
        for state in ["on", "off"] {
            offload(state);
            pair.inside(0, || {
                let socket = std::net::UdpSocket::bind(from).unwrap();
                socket.send_to(&[0x5a; 64], to).unwrap();
            });
            let got = receive(&mut b_queues, 1);
            assert_eq!(got.len(), 1, "{to} with offload {state}");
            let udp = if to.starts_with('[') { 54 } else { 34 };
            assert_eq!(got[0].1[udp + 8..], [0x5a; 64]);
            sums.push(got[0].1[udp + 6..udp + 8].to_vec());
        }
        assert_ne!(sums[0], sums[1], "the first checksum was not unfinished: nothing was tried");
    }
}

/// An address that others may have too is not offered; when it turned out to be ours alone, it is.
#[test]
fn an_address_is_offered_when_it_is_known_to_be_ours_alone() {
    let Some(pair) = Pair::new(1, 1500) else { return };
    let (mut b, _queues) = must_open(&pair, 1, small());
    pair.ip(1, &["addr", "add", "fd77::77/64", "dev", VETH]);
    b.housekeep();
    assert!(!b.addresses().contains(&(ip("fd77::77"), 64)), "still tentative");
    housekeep_until(&mut b, "the end of the check", |b| b.addresses().contains(&(ip("fd77::77"), 64)));
}

/// A neighbour that answers from another Ethernet address, and a route that moves, are told.
#[test]
fn changes_of_neighbours_and_routes_are_told() {
    let Some(pair) = Pair::new(1, 1500) else { return };
    let (mut a, _queues) = must_open(&pair, 0, small());
    let (src, dst, far) = (ip("10.77.0.1"), ip("10.77.0.2"), ip("192.168.9.4"));
    let old = a.resolve(src, dst, Instant::now() + LIMIT).unwrap();
    assert_eq!(a.next_hop(src, dst), Some(old));
    assert_eq!(a.next_hop(src, far), None, "no route");
    pair.ip(0, &["route", "add", "192.168.9.0/24", "via", "10.77.0.2"]);
    let changed = |a: &mut XdpPort, what: &str| {
        let deadline = Instant::now() + LIMIT;
        loop {
            a.housekeep();
            if a.paths_changed() {
                break;
            }
            assert!(Instant::now() < deadline, "not told: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    changed(&mut a, "a route");
    assert_eq!(a.next_hop(src, far), Some(old));
    while a.paths_changed() {
        a.housekeep();
    }
    pair.ip(0, &["neigh", "replace", "10.77.0.2", "lladdr", "02:00:00:00:77:77", "dev", VETH]);
    changed(&mut a, "a neighbour");
    assert_eq!(a.next_hop(src, dst), Some([2, 0, 0, 0, 0x77, 0x77]));
    assert_eq!(a.next_hop(src, far), Some([2, 0, 0, 0, 0x77, 0x77]));
}

#[test]
fn only_the_configured_addresses_are_taken() {
    let Some(pair) = Pair::new(1, 1500) else { return };
    let (_a, mut a_queues) = must_open(&pair, 0, small());
    let (b, mut b_queues) = must_open(&pair, 1, XdpConfig { addresses: vec![ip("fd77::2")], ..small() });
    assert_eq!(b.addresses(), vec![(ip("fd77::2"), 64)]);
    let theirs = roce([0xff; 6], ip("10.77.0.2"), false, 90, 1);
    let ours = roce([0xff; 6], ip("fd77::2"), false, 90, 2);
    send(&mut a_queues[0], &[theirs, ours.clone()]);
    assert_eq!(receive(&mut b_queues, 1), vec![(0, ours)]);
}

/// A port whose link goes down when it is dropped, as a cable that is pulled.
struct Wired {
    port: XdpPort,
    pair: Arc<Pair>,
    side: usize,
}

impl Drop for Wired {
    fn drop(&mut self) {
        self.pair.ip(self.side, &["link", "set", VETH, "down"]);
    }
}

impl Port for Wired {
    type Queue = XdpQueue;
    fn caps(&self) -> Caps {
        self.port.caps()
    }
    fn fallbacks(&self) -> Vec<Fallback> {
        self.port.fallbacks()
    }
    fn take_queues(&mut self) -> Vec<XdpQueue> {
        self.port.take_queues()
    }
    fn link_up(&self) -> bool {
        self.port.link_up()
    }
    fn housekeep(&mut self) {
        self.port.housekeep();
    }
    fn addresses(&self) -> Vec<(IpAddr, u8)> {
        self.port.addresses()
    }
    fn resolve(&mut self, src: IpAddr, dst: IpAddr, deadline: Instant) -> Result<[u8; 6], PortError> {
        self.port.resolve(src, dst, deadline)
    }
    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.port.counters()
    }
}

struct Veth {
    mode: XdpMode,
    mtu: u32,
    pair: Option<Arc<Pair>>,
}

impl Veth {
    fn open(&self, side: usize, queues: u16) -> Wired {
        let pair = self.pair.clone().expect("made by pair()");
        // Larger rings: nothing but the receiver's speed keeps the sender from overrunning them.
        let config = XdpConfig {
            mode: self.mode,
            workers: queues,
            rx_ring: 4096,
            tx_ring: 256,
            ..XdpConfig::new(VETH)
        };
        let port = open(&pair, side, config).unwrap_or_else(|e| panic!("{e}"));
        Wired { port, pair, side }
    }
}

impl Rig for Veth {
    type Port = Wired;
    fn name(&self) -> String {
        format!("xdp {:?} on veth with MTU {}", self.mode, self.mtu)
    }
    fn pair(&mut self, queues: u16) -> Result<(Wired, Wired), String> {
        let pair = Pair::new(u32::from(queues), self.mtu).ok_or("network namespaces and AF_XDP need root")?;
        self.pair = Some(Arc::new(pair));
        Ok((self.open(0, queues), self.open(1, queues)))
    }
    fn again(&mut self, queues: u16) -> Result<Wired, String> {
        self.pair.as_ref().expect("made by pair()").ip(1, &["link", "set", VETH, "up"]);
        Ok(self.open(1, queues))
    }
    fn queues_are_joined(&self) -> bool {
        // In generic mode veth does not record the queue of a frame: all count as queue 0.
        self.mode == XdpMode::Native
    }
    fn lossless(&self) -> bool {
        false
    }
}

fn conforms(mode: XdpMode, mtu: u32) {
    let report = run(&mut Veth { mode, mtu, pair: None });
    if rustix::process::geteuid().is_root() {
        let skipped: Vec<_> = report.skipped.iter().map(|(case, _)| *case).collect();
        assert_eq!(skipped, ["full_ring"], "{report:?}");
    }
}

#[test]
fn native_mode_passes_the_suite_of_all_ports() {
    conforms(XdpMode::Native, 3400);
}

#[test]
fn generic_mode_passes_the_suite_of_all_ports() {
    conforms(XdpMode::Generic, 1500);
}

#[test]
fn native_mode_passes_the_suite_on_a_jumbo_interface() {
    conforms(XdpMode::Native, 9000);
}

#[test]
fn generic_mode_passes_the_suite_on_a_jumbo_interface() {
    conforms(XdpMode::Generic, 4200);
}

//! The link of `shm`: how sides meet, part and refuse each other.

use std::net::IpAddr;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ferroce_nic::conformance::{bytes_of, commit};
use ferroce_nic::shm::pair;
use ferroce_nic::{Port, PortQueue, ShmConfig, ShmPort, ShmQueue};

const PATIENCE: Duration = Duration::from_secs(10);

/// A folder of a test's own.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("ferroce-shm-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder for the link");
        Folder(path)
    }
    fn link(&self) -> PathBuf {
        self.0.join("link")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn side(link: &Path, last: u8) -> ShmConfig {
    let addresses = vec![(ip(&format!("192.0.2.{last}")), 24), (ip(&format!("fd00::{last}")), 64)];
    ShmConfig { addresses, ..ShmConfig::new(link) }
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// Keeps house on all ports until the condition holds.
fn until(ports: &mut [&mut ShmPort], what: &str, done: impl Fn(&[&mut ShmPort]) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done(ports) {
        let problems: Vec<_> = ports.iter().map(|port| port.problem()).collect();
        assert!(Instant::now() < deadline, "not {what} within {PATIENCE:?}: {problems:?}");
        ports.iter_mut().for_each(|port| port.housekeep());
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn join(a: &mut ShmPort, b: &mut ShmPort) {
    until(&mut [a, b], "joined", |ports| ports.iter().all(|port| port.link_up()));
}

fn counter(port: &ShmPort, name: &str) -> u64 {
    port.counters().into_iter().find(|(known, _)| *known == name).expect("a counter").1
}

/// Waits for one frame.
fn receive(queue: &mut ShmQueue) -> Vec<u8> {
    let deadline = Instant::now() + PATIENCE;
    let mut got = Vec::new();
    while got.is_empty() {
        queue.rx_burst(1, |frame| got = bytes_of(&frame));
        assert!(Instant::now() < deadline, "no frame within {PATIENCE:?}");
        std::thread::sleep(Duration::from_micros(100));
    }
    got
}

/// Sends one frame each way.
fn talk(a: &mut ShmQueue, b: &mut ShmQueue) {
    for (from, to, text) in [(0, 1, &b"from the first side"[..]), (1, 0, &b"from the second side"[..])] {
        let queues = [&mut *a, &mut *b];
        assert!(commit(queues[from], text));
        queues[from].tx_flush();
        assert_eq!(receive(queues[to]), text);
    }
}

#[test]
fn both_sides_are_alike_and_know_each_other() {
    let folder = Folder::new("alike");
    let mut a = ShmPort::open(&side(&folder.link(), 1)).expect("a");
    assert!(!a.link_up());
    assert_eq!(a.problem(), None, "waiting is no problem");
    let mode = std::fs::metadata(folder.link()).expect("a socket").permissions();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o600);
    let mut b = ShmPort::open(&side(&folder.link(), 2)).expect("b");
    join(&mut a, &mut b);
    let caps = (a.caps(), b.caps());
    assert_ne!(caps.0.mac, caps.1.mac);
    assert_eq!((caps.0.mac[0] & 3, caps.0.kind, caps.0.untrusted_peer), (2, "shm", true));
    let soon = Instant::now();
    for dst in ["192.0.2.2", "fd00::2"] {
        assert_eq!(a.resolve(ip("192.0.2.1"), ip(dst), soon), Ok(caps.1.mac));
    }
    assert_eq!(b.resolve(ip("192.0.2.2"), ip("192.0.2.1"), soon), Ok(caps.0.mac));
    let text = a.resolve(ip("192.0.2.1"), ip("192.0.2.9"), soon).expect_err("nobody's").to_string();
    assert!(text.contains("192.0.2.9") && text.contains("allowed 192.0.2.2, fd00::2 (the peer "), "{text}");
    let text = a.resolve(ip("192.0.2.1"), ip("192.0.2.1"), soon).expect_err("its own").to_string();
    assert!(text.contains("our own"), "{text}");
    let (mut aq, mut bq) = (a.take_queues(), b.take_queues());
    talk(&mut aq[0], &mut bq[0]);
    drop((a, b));
    assert_eq!(std::fs::read_dir(&folder.0).expect("the folder").count(), 0, "something was left");
}

#[test]
fn resolve_waits_for_a_peer_and_names_what_is_missing() {
    let folder = Folder::new("resolve");
    let mut a = ShmPort::open(&side(&folder.link(), 1)).expect("a");
    let text = a
        .resolve(ip("192.0.2.1"), ip("192.0.2.2"), Instant::now() + Duration::from_millis(20))
        .expect_err("no peer")
        .to_string();
    assert!(text.contains("no peer at") && text.contains("start the other side"), "{text}");
    let link = folder.link();
    let other = std::thread::spawn(move || {
        let mut b = ShmPort::open(&side(&link, 2)).expect("b");
        until(&mut [&mut b], "joined", |ports| ports[0].link_up());
        b
    });
    let mac = a.resolve(ip("192.0.2.1"), ip("192.0.2.2"), Instant::now() + PATIENCE).expect("it came");
    assert_eq!(mac, other.join().expect("no failure").caps().mac);
}

#[test]
fn what_a_crash_left_is_replaced_and_what_lives_is_refused() {
    let folder = Folder::new("stale");
    // Left by a crash: a socket without listener, and a lock without holder.
    drop(UnixListener::bind(folder.link()).expect("a socket"));
    std::fs::write(folder.0.join("link.lock"), "4711\n").expect("a lock file");
    assert!(std::fs::metadata(folder.link()).expect("there").file_type().is_socket());
    let mut a = ShmPort::open(&side(&folder.link(), 1)).expect("takes over");
    let mut b = ShmPort::open(&side(&folder.link(), 2)).expect("b");
    join(&mut a, &mut b);
    drop((a, b));
    // Another program's live socket.
    let alive = UnixListener::bind(folder.link()).expect("a socket");
    let text = ShmPort::open(&side(&folder.link(), 1)).err().expect("refused").to_string();
    assert!(text.contains("another program listens there"), "{text}");
    drop(alive);
    std::fs::remove_file(folder.link()).expect("its socket");
    std::fs::write(folder.link(), "data").expect("a file");
    let text = ShmPort::open(&side(&folder.link(), 1)).err().expect("refused").to_string();
    assert!(text.contains("a file that is no socket is there"), "{text}");
    assert_eq!(std::fs::read(folder.link()).expect("unharmed"), b"data");
    let text = ShmPort::open(&side(&folder.0, 1)).err().expect("refused").to_string();
    assert!(text.contains("a folder is there"), "{text}");
    let text = ShmPort::open(&side(&folder.0.join("no/such/link"), 1)).err().expect("refused").to_string();
    assert!(text.contains("the folder must exist"), "{text}");
    let text = ShmPort::open(&side(Path::new(&"x".repeat(200)), 1)).err().expect("refused").to_string();
    assert!(text.contains("a path of 200 bytes") && text.contains("102 bytes"), "{text}");
}

#[test]
fn bad_values_are_named_with_what_is_allowed() {
    let folder = Folder::new("values");
    let good = side(&folder.link(), 1);
    let cases = [
        (ShmConfig { queues: 0, ..good.clone() }, "queues: asked 0, allowed 1 to 64"),
        (ShmConfig { queues: 65, ..good.clone() }, "queues: asked 65, allowed 1 to 64"),
        (ShmConfig { mtu: 100, ..good.clone() }, "mtu: asked 100, allowed 352 to 65520"),
        (ShmConfig { mtu: 65521, ..good.clone() }, "mtu: asked 65521"),
        (
            ShmConfig { ring_bytes: 100_000, ..good.clone() },
            "ring_bytes: asked 100000, allowed a power of two",
        ),
        (ShmConfig { mtu: 65520, ring_bytes: 65536, ..good.clone() }, "ring_bytes: asked 65536"),
        (ShmConfig { mac: Some([1, 2, 3, 4, 5, 6]), ..good.clone() }, "mac: asked 01:02:03:04:05:06"),
        (ShmConfig { addresses: vec![(ip("10.0.0.1"), 33)], ..good.clone() }, "addresses: asked 10.0.0.1/33"),
    ];
    for (config, want) in cases {
        let text = ShmPort::open(&config).err().expect("refused").to_string();
        assert!(text.starts_with(want), "{text}");
    }
    assert!(ShmPort::open(&ShmConfig { mtu: 65520, ..good }).is_ok());
}

#[test]
fn sides_that_do_not_fit_say_so_on_both_sides() {
    let folder = Folder::new("fit");
    let mac = Some([2, 0, 0, 0, 0, 9]);
    type Case = (fn(&mut ShmConfig), &'static str, &'static str);
    let cases: [Case; 4] = [
        (|config| config.queues = 2, "queues: asked 1 here, allowed 2 at the peer", "queues: asked 2 here"),
        (|config| config.mtu = 1500, "mtu: asked 9000 here, allowed 1500 at", "mtu: asked 1500 here"),
        (|config| config.mac = Some([2, 0, 0, 0, 0, 9]), "mac: asked 02:00:00:00:00:09 here", "mac: asked"),
        (
            |config| config.addresses = side(Path::new("x"), 1).addresses,
            "addresses: asked 192.0.2.1",
            "addresses",
        ),
    ];
    for (change, at_a, at_b) in cases {
        let mut a = ShmPort::open(&ShmConfig { mac, ..side(&folder.link(), 1) }).expect("a");
        let mut config = side(&folder.link(), 2);
        change(&mut config);
        let mut b = ShmPort::open(&config).expect("b");
        until(&mut [&mut a, &mut b], "refused", |ports| ports.iter().all(|port| port.problem().is_some()));
        let texts = (a.problem().expect("a's").to_string(), b.problem().expect("b's").to_string());
        assert!(texts.0.contains(at_a), "{}", texts.0);
        assert!(texts.1.contains(at_b) && texts.1.contains("refused"), "{}", texts.1);
        assert!(counter(&a, "link_handshake_errors") > 0);
        drop(b);
        // The right one is welcome afterwards.
        let mut c = ShmPort::open(&side(&folder.link(), 2)).expect("c");
        join(&mut a, &mut c);
    }
}

#[test]
fn a_third_side_is_told_who_is_there_and_may_come_later() {
    let folder = Folder::new("third");
    let mut a = ShmPort::open(&side(&folder.link(), 1)).expect("a");
    let mut b = ShmPort::open(&side(&folder.link(), 2)).expect("b");
    join(&mut a, &mut b);
    let mut c = ShmPort::open(&side(&folder.link(), 3)).expect("c may wait");
    until(&mut [&mut a, &mut c], "told", |ports| ports[1].problem().is_some());
    let text = c.problem().expect("told").to_string();
    assert!(
        text.contains("joins two sides") && text.contains(&format!("pid {}", std::process::id())),
        "{text}"
    );
    assert!(a.link_up() && b.link_up(), "unharmed");
    drop(b);
    join(&mut a, &mut c);
}

#[test]
fn strangers_and_other_versions_cost_a_connection_only() {
    let folder = Folder::new("stranger");
    let mut a = ShmPort::open(&side(&folder.link(), 1)).expect("a");
    let mut other_version = b"FERRSHM\0".to_vec();
    other_version.extend([9, 0, 1]);
    for (bytes, want) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "does not speak our protocol"),
        (&other_version[..], "has version 9 of the link, we have 1"),
        (&b"FERRSHM\0\x01\0\x01\0"[..], "sent a damaged message"),
        (&b"FERRSHM\0\x01\0\x03"[..], "spoke out of turn"),
    ] {
        let socket = connect(&folder.link());
        rustix::net::send(&socket, bytes, rustix::net::SendFlags::empty()).expect("sent");
        until(&mut [&mut a], "refused", |ports| ports[0].problem().is_some_and(|p| p.allowed.contains(want)));
        drop(socket);
        let mut b = ShmPort::open(&side(&folder.link(), 2)).expect("b");
        join(&mut a, &mut b);
        drop(b);
        until(&mut [&mut a], "down", |ports| !ports[0].link_up());
    }
    // One that says nothing holds the place for two seconds only.
    let silent = connect(&folder.link());
    until(&mut [&mut a], "tired of waiting", |ports| {
        ports[0].problem().is_some_and(|p| p.allowed.contains("said nothing for 2 s"))
    });
    drop(silent);
}

fn connect(path: &Path) -> rustix::fd::OwnedFd {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    connect(&socket, &SocketAddrUnix::new(path).expect("short enough")).expect("somebody listens");
    socket
}

#[test]
fn the_one_that_listened_may_go_too() {
    let folder = Folder::new("listener");
    let mut a = ShmPort::open(&side(&folder.link(), 1)).expect("a");
    let mut b = ShmPort::open(&side(&folder.link(), 2)).expect("b");
    let mut bq = b.take_queues();
    join(&mut a, &mut b);
    for _ in 0..3 {
        drop(a);
        until(&mut [&mut b], "down", |ports| !ports[0].link_up());
        assert!(b.problem().expect("it says why").allowed.contains("is gone"));
        a = ShmPort::open(&side(&folder.link(), 1)).expect("a again");
        join(&mut a, &mut b);
        talk(&mut a.take_queues()[0], &mut bq[0]);
    }
    assert_eq!((counter(&b, "link_ups"), counter(&b, "link_downs")), (4, 3));
}

#[test]
fn a_sleeping_worker_wakes_when_the_peer_comes() {
    let folder = Folder::new("wakes");
    let mut a = ShmPort::open(&side(&folder.link(), 1)).expect("a");
    let mut queue = a.take_queues().remove(0);
    assert_eq!(queue.rx_burst(1, |_| ()), 0);
    assert!(queue.arm_wakeup(), "nothing to do without a peer");
    let sleeper = std::thread::spawn(move || {
        let mut frame = Vec::new();
        while frame.is_empty() {
            if queue.arm_wakeup() {
                let fds = queue.wait_fds();
                let mut polls =
                    [rustix::event::PollFd::from_borrowed_fd(fds[0], rustix::event::PollFlags::IN)];
                let time = rustix::time::Timespec::try_from(PATIENCE).expect("short");
                assert_eq!(rustix::event::poll(&mut polls, Some(&time)), Ok(1), "a wake-up was lost");
            }
            queue.disarm_wakeup();
            queue.rx_burst(1, |got| frame = bytes_of(&got));
        }
        frame
    });
    let mut b = ShmPort::open(&side(&folder.link(), 2)).expect("b");
    join(&mut a, &mut b);
    let mut bq = b.take_queues();
    // It may be asleep with the new rings now.
    std::thread::sleep(Duration::from_millis(5));
    assert!(commit(&mut bq[0], b"good morning"));
    bq[0].tx_flush();
    assert_eq!(sleeper.join().expect("it woke"), b"good morning");
}

#[test]
fn sides_that_never_sleep_ring_no_bell() {
    let config = |last| ShmConfig { can_sleep: false, ..side(Path::new("pair"), last) };
    let (mut a, mut b) = pair(&config(1), &config(2)).expect("a pair");
    let (mut aq, mut bq) = (a.take_queues(), b.take_queues());
    talk(&mut aq[0], &mut bq[0]);
    assert!(!bq[0].arm_wakeup() && bq[0].wait_fds().is_empty() && !b.caps().can_sleep);
    assert_eq!(counter(&a, "tx_wakeups"), 0);
}

#[test]
fn a_pair_that_does_not_fit_is_no_pair() {
    let (a, b) = (side(Path::new("pair"), 1), ShmConfig { mtu: 1500, ..side(Path::new("pair"), 2) });
    assert_eq!(pair(&a, &b).err().expect("refused").attribute, "mtu");
}

/// This program again, as another process that runs the ignored test `role` in the folder of the link.
fn other_process(role: &str, folder: &Folder) -> Child {
    Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", role, "--ignored", "--nocapture", "--test-threads=1"])
        .current_dir(&folder.0)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("another process")
}

/// Sends back every frame; run by [`other_process`] in the folder of the link.
#[test]
#[ignore = "the other process of other tests"]
fn role_echo() {
    let mut port = ShmPort::open(&side(Path::new("link"), 2)).expect("the other side");
    let mut queue = port.take_queues().remove(0);
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        port.housekeep();
        let mut got = Vec::new();
        if queue.rx_burst(8, |frame| got.push(bytes_of(&frame))) == 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
        got.iter().for_each(|bytes| assert!(commit(&mut queue, bytes)));
        queue.tx_flush();
    }
}

/// The other process is killed when the test ends, however it ends.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn two_processes_talk_and_one_survives_the_others_death() {
    let folder = Folder::new("processes");
    let config = ShmConfig { link: folder.link(), ..side(Path::new(""), 1) };
    let mut port = ShmPort::open(&config).expect("this side");
    let mut queue = port.take_queues().remove(0);
    for round in 0..3u8 {
        let mut child = Killed(other_process("role_echo", &folder));
        until(&mut [&mut port], "joined", |ports| ports[0].link_up());
        for len in [1usize, 60, 128, 129, 4096, 9014] {
            let bytes: Vec<u8> = (0..len).map(|i| (i as u8).wrapping_add(round)).collect();
            assert!(commit(&mut queue, &bytes));
            queue.tx_flush();
            assert_eq!(receive(&mut queue), bytes);
        }
        child.0.kill().expect("killed");
        child.0.wait().expect("gone");
        until(&mut [&mut port], "down", |ports| !ports[0].link_up());
        let text = port.problem().expect("it says why").to_string();
        assert!(text.contains("is gone"), "{text}");
    }
}

#[test]
fn a_side_that_takes_over_from_a_killed_listener_meets_the_next_one() {
    let folder = Folder::new("killed");
    let mut child = Killed(other_process("role_echo", &folder));
    let deadline = Instant::now() + PATIENCE;
    while !folder.link().exists() {
        assert!(Instant::now() < deadline, "the other process does not listen");
        std::thread::sleep(Duration::from_millis(2));
    }
    let config = ShmConfig { link: folder.link(), ..side(Path::new(""), 1) };
    let mut port = ShmPort::open(&config).expect("this side");
    until(&mut [&mut port], "joined", |ports| ports[0].link_up());
    child.0.kill().expect("killed");
    child.0.wait().expect("gone");
    assert!(folder.link().exists(), "a crash leaves its socket");
    until(&mut [&mut port], "down", |ports| !ports[0].link_up());
    let _next = Killed(other_process("role_echo", &folder));
    until(&mut [&mut port], "joined again", |ports| ports[0].link_up());
}

//! Two `ferroced` processes on a veth pair by AF_XDP, in namespaces of the test's own. Needs root; says so where it
//! lacks.

mod common;
#[allow(dead_code)]
#[path = "../nic/tests/xdp/netns.rs"]
mod netns;

use std::time::Instant;

use common::*;
use ferroce_api::appliance::*;
use ferroce_wire::PathMtu;
use netns::VETH;
use rustix::process::Signal;

fn text(name: &str) -> String {
    format!(
        "[appliance]\nname = \"{name}\"\n[memory]\nbytes = \"32M\"\npages = \"normal\"\n[[worker]]\ncore = \"none\"\n\
         spin_passes = 100\n[port]\nkind = \"xdp\"\ninterface = \"{VETH}\"\n"
    )
}

#[test]
fn appliances_on_interfaces_move_data_and_leave_nothing() {
    let Some(wire) = netns::Pair::new(1, 1500) else { return };
    let (files, run) = (Folder::new(), Folder::new());
    // Until its own addresses are known to be unique, an interface asks nobody for a neighbour.
    let until = Instant::now() + PATIENCE;
    while (0..2).any(|side| !wire.ip(side, &["-6", "addr", "show", "dev", VETH, "tentative"]).is_empty()) {
        assert!(Instant::now() < until, "addresses stay tentative");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let start = |side: usize, name: &str| {
        let enter = vec!["ip".to_owned(), "netns".into(), "exec".into(), wire.name(side).into()];
        Daemon::start_inside(&enter, &files, &run.0, name, &text(name))
    };
    let mut a = start(0, "fe0");
    let b = start(1, "fe1");
    let (mut ca, mut cb) = (a.connect(), b.connect());
    ca.await_link();
    cb.await_link();
    let port = ca.status().ports.remove(0);
    assert_eq!((port.kind.as_str(), port.attached_to.as_str()), ("xdp", VETH));
    assert!(port.addresses.contains(&"10.77.0.1/24".to_owned()), "{port:?}");

    // NIC-1 and NIC-3: the mode, why it is not a better one, and the queues are shown.
    assert_eq!(port.mode, "native, copy");
    assert!(port.fallbacks.iter().any(|f| f.reason == "copy: driver has no zero-copy"), "{port:?}");
    assert_eq!((port.rx_queues_owned, port.rx_queues_present), (1, 1));
    for name in ["xdp_rx_not_ours", "xdp_rx_unowned_queue"] {
        assert!(port.counters.iter().any(|counter| counter.name == name), "{port:?}");
    }
    // START-3: without hugepages, by wish.
    assert!(ca.status().memory.pages.contains("performance figures do not count"));

    // The interface carries no more than its MTU.
    let Response::Port(info) = ca.one(Command::QueryPort) else { panic!() };
    assert_eq!(info.active_mtu, PathMtu::Mtu1024);

    for (address_a, address_b) in [("10.77.0.1", "10.77.0.2"), ("fd77::1", "fd77::2")] {
        let (ea, eb) = (Endpoint::new(&mut ca), Endpoint::new(&mut cb));
        ea.connect(&mut ca, &eb, address_b, PathMtu::Mtu1024);
        eb.connect(&mut cb, &ea, address_a, PathMtu::Mtu1024);
        let spec = |role, own: &Endpoint, peer: &Endpoint| PerfSpec {
            remote: Some(peer.remote),
            iterations: 50,
            check_data: true,
            deadline_ms: 10_000,
            ..PerfSpec::new(PerfOp::Write, PerfKind::Lat, role, own.qpn, own.lkey, 5000)
        };
        cb.one(Command::PerfStart(Box::new(spec(PerfRole::Server, &eb, &ea))));
        let start = Command::PerfStart(Box::new(spec(PerfRole::Client, &ea, &eb)));
        let Response::PerfStarted { id } = ca.one(start) else { panic!() };
        let until = Instant::now() + PATIENCE;
        loop {
            let Response::Perf(report) = ca.one(Command::PerfStatus { id }) else { panic!() };
            if report.state != PerfState::Running {
                assert_eq!((report.state, report.iterations), (PerfState::Done, 50), "{report:?}");
                break;
            }
            assert!(Instant::now() < until, "{report:?}");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    // A second appliance on the interface, whatever its name and folder.
    let other = Folder::new();
    let file = files.write("fe9.toml", &text("fe9"));
    let mut second = std::process::Command::new("ip");
    second.args(["netns", "exec", wire.name(0), env!("CARGO_BIN_EXE_ferroced"), "--config"]).arg(&file);
    let output = finish(second.arg("--run-dir").arg(&other.0));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.lines().any(|line| line.starts_with("ferroced: ") && line.contains(VETH)), "{error}");
    assert_eq!(other.names(), Vec::<String>::new());

    // An address that comes and goes is told.
    ca.one(Command::Subscribe);
    wire.ip(0, &["addr", "add", "10.77.0.77/24", "dev", VETH]);
    let gid = ferroce_api::ids::parse_gid("10.77.0.77").unwrap();
    ca.event(|event| *event == EventBody::GidAdded { gid });
    wire.ip(0, &["addr", "del", "10.77.0.77/24", "dev", VETH]);
    ca.event(|event| *event == EventBody::GidRemoved { gid });

    // So is an MTU that changes.
    wire.ip(0, &["link", "set", VETH, "mtu", "1400"]);
    ca.event(|event| matches!(event, EventBody::PortMtu { mtu: 1400, .. }));

    a.signal(Signal::TERM);
    assert!(a.wait().success(), "{}", a.log());
    let link = wire.ip(0, &["-d", "link", "show", "dev", VETH]);
    assert!(!link.contains("xdp"), "the program is detached: {link}");
}

/// A command in front that enters the namespace of `side` with at most `kib` KiB of locked memory, and without the
/// capability that lifts the limit.
fn with_locked_memory(wire: &netns::Pair, side: usize, kib: u64) -> Vec<String> {
    let limit = format!("ulimit -l {kib} && exec \"$0\" \"$@\"");
    ["ip", "netns", "exec", wire.name(side), "setpriv", "--bounding-set=-ipc_lock", "sh", "-c", &limit]
        .map(String::from)
        .to_vec()
}

/// MR-1 of the field cases: 512 MiB of pools are configured where 64 KiB may be locked.
#[test]
fn mr_1_a_limit_on_locked_memory_is_told_before_the_interface_is_touched() {
    let Some(wire) = netns::Pair::new(1, 1500) else { return };
    let (files, run) = (Folder::new(), Folder::new());
    let file = files.write("fe0.toml", &text("fe0").replace("\"32M\"", "\"512M\""));
    let enter = with_locked_memory(&wire, 0, 64);
    let mut process = std::process::Command::new(&enter[0]);
    process.args(&enter[1..]).arg(env!("CARGO_BIN_EXE_ferroced")).arg("--config").arg(&file);
    let output = finish(process.arg("--run-dir").arg(&run.0));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{error}");
    let line = error.lines().find(|line| line.starts_with("ferroced: ")).expect("a line that says why");
    for told in ["memlock", "64 KiB (RLIMIT_MEMLOCK)", "uses 0 bytes", "ulimit -l ", "LimitMEMLOCK="] {
        assert!(line.contains(told), "{told} is missing in: {line}");
    }
    // Nothing came of it: no program on the interface, no memory taken, nothing in the folder.
    assert!(!wire.ip(0, &["-d", "link", "show", "dev", VETH]).contains("xdp"));
    assert!(!error.contains("pages="), "{error}");
    assert_eq!(run.names(), Vec::<String>::new());

    // The command that the line names is the cure.
    let (_, rest) = line.split_once("ulimit -l ").expect("the command");
    let kib: u64 = rest.split(',').next().expect("a number").parse().expect("KiB");
    assert!((65..512 << 10).contains(&kib), "{kib} KiB: the port's buffers, not the whole arena");
    let cured = Daemon::start_inside(&with_locked_memory(&wire, 0, kib), &files, &run.0, "fe0", &text("fe0"));
    assert_eq!(cured.connect().status().ports[0].kind, "xdp");
    drop(cured);

    // A link of two processes pins nothing, so nothing is asked of it.
    let enter = with_locked_memory(&wire, 0, 64);
    let shm = Daemon::start_inside(&enter, &files, &run.0, "fe1", &config("fe1", ADDRESS_A, ""));
    assert_eq!(shm.connect().status().ports[0].kind, "shm");
}

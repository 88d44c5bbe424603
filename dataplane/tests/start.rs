//! Starting: what is refused, with which words, and what is stated.

mod common;

use std::process::Command as Process;

use common::*;
use ferroce_api::appliance::*;

#[test]
fn a_second_appliance_is_refused_and_the_first_unharmed() {
    let pair = Pair::start("");
    let pid = pair.a.pid().to_string();
    // The same name.
    let error = refused(&pair.files.0.join("fe0.toml"), &pair.run.0);
    assert!(error.contains("fe0") && error.contains(&pid), "{error}");
    // The same address on the same link.
    let file = pair.files.write("fe2.toml", &config("fe2", ADDRESS_A, ""));
    let error = refused(&file, &pair.run.0);
    assert!(error.contains(ADDRESS_A) && error.contains(&pid), "{error}");
    // A third one on a link for two.
    let file = pair.files.write("fe3.toml", &config("fe3", "192.0.2.3", ""));
    let error = refused(&file, &pair.run.0);
    assert!(
        error.contains("lab") && error.contains(&pid) && error.contains(&pair.b.pid().to_string()),
        "{error}"
    );
    // Whoever was refused left nothing.
    assert!(
        pair.run.names().iter().all(|n| !n.contains("fe2") && !n.contains("fe3")),
        "{:?}",
        pair.run.names()
    );
    let mut a = pair.a.connect();
    a.await_link();
    Endpoint::new(&mut a);
}

#[test]
fn bad_files_and_bad_usage_exit_with_their_codes() {
    let files = Folder::new();
    let good = files.write("good.toml", &config("fe0", ADDRESS_A, ""));
    let bad = files.write("bad.toml", &config("fe0", ADDRESS_A, "colour = \"blue\"\n"));
    let error = refused(&bad, &files.0);
    assert!(error.contains("bad.toml:13: port.colour"), "{error}");
    let output = finish(command(&good, &files.0).arg("--check"));
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("good.toml"));
    let output = finish(command(&bad, &files.0).arg("--check"));
    assert_eq!(output.status.code(), Some(1));
    for wrong in [&["--colour"][..], &["--name", "a/b"], &["--log", "no=such=filter"]] {
        let output = finish(command(&good, &files.0).args(wrong));
        assert_eq!(output.status.code(), Some(2), "{wrong:?}");
    }
    let output = finish(command(&good, &files.0).args(["--name", "ctl"]));
    assert_eq!(output.status.code(), Some(1));
    let output = finish(Process::new(env!("CARGO_BIN_EXE_ferroced")).arg("--version"));
    assert!(String::from_utf8_lossy(&output.stdout).contains(env!("CARGO_PKG_VERSION")));
    assert_eq!(files.names(), ["bad.toml", "good.toml"]);
}

/// The interface is named when it is missing, and a port of that kind needs nothing before it looks.
#[test]
fn a_missing_interface_is_named() {
    let files = Folder::new();
    let text = "[appliance]\nname = \"fe0\"\n[memory]\npages = \"normal\"\n[[worker]]\ncore = \"none\"\n\
                [port]\nkind = \"xdp\"\ninterface = \"nosuchif0\"\n";
    let file = files.write("fe0.toml", text);
    let error = refused(&file, &files.0);
    assert!(error.contains("nosuchif0"), "{error}");
    assert_eq!(files.names(), ["fe0.toml"]);
}

/// Cores: one that is not allowed is refused with the list of those that are.
#[test]
fn a_core_that_is_not_there_is_named() {
    let files = Folder::new();
    let text = config("fe0", ADDRESS_A, "").replace("core = \"none\"", "core = 4000");
    let file = files.write("fe0.toml", &text);
    let error = refused(&file, &files.0);
    assert!(error.contains("4000") && error.contains("worker 0"), "{error}");
    assert_eq!(files.names(), ["fe0.toml"]);
}

/// Whatever pages there are: what is in use is said in the log and in the status, with the reason if it is not the
/// best.
#[test]
fn pages_in_use_are_stated() {
    let (files, run) = (Folder::new(), Folder::new());
    let text = config("fe0", ADDRESS_A, "").replace("pages = \"normal\"", "pages = \"auto\"");
    let daemon = Daemon::start(&files, &run.0, "fe0", &text);
    let memory = daemon.connect().status().memory;
    assert!(daemon.log().contains(&memory.pages), "{}", daemon.log());
    match memory.fallback {
        Some(fallback) => {
            assert_ne!(memory.pages, "2 MiB hugepages");
            assert!(!fallback.reason.is_empty());
            assert!(daemon.log().contains("fallback"), "{}", daemon.log());
        }
        None => assert_eq!(memory.pages, "2 MiB hugepages"),
    }
    assert_eq!(memory.bytes, 16 << 20);
}

/// A side without a peer says why its link is down.
#[test]
fn a_lonely_side_says_so() {
    let mut pair = Pair::start("");
    let mut a = pair.a.connect();
    a.await_link();
    assert_eq!(a.status().ports[0].problem, None);
    pair.b.kill();
    let until = std::time::Instant::now() + PATIENCE;
    let port = loop {
        let port = a.status().ports.remove(0);
        if !port.link_up {
            break port;
        }
        assert!(std::time::Instant::now() < until, "{port:?}");
    };
    assert!(port.problem.is_some_and(|problem| problem.contains("lab")), "the link is named");
    let dgid = ferroce_api::ids::parse_gid(ADDRESS_B).unwrap();
    let error = a.refuse(Command::ResolvePath(PathQuery { dgid, sgid: None, traffic_class: 0 }));
    assert!(error.to_string().contains("start the other side"), "{error}");
}

/// A device that asks for more workers than there are cores still starts: the ones without a core are stated.
#[test]
fn two_workers_run_too() {
    let (files, run) = (Folder::new(), Folder::new());
    let two = "[[worker]]\ncore = \"none\"\nspin_passes = 100\n";
    let text = |name: &str, address: &str| {
        config(name, address, "").replacen("[[worker]]", &format!("{two}[[worker]]"), 1)
    };
    let a = Daemon::start(&files, &run.0, "fe0", &text("fe0", ADDRESS_A));
    let b = Daemon::start(&files, &run.0, "fe1", &text("fe1", ADDRESS_B));
    let (mut ca, mut cb) = (a.connect(), b.connect());
    ca.await_link();
    cb.await_link();
    assert_eq!(ca.hello.as_ref().unwrap().workers, 2);
    // Queue pairs on either worker, connected across.
    for (wa, wb) in [(0, 1), (1, 0), (1, 1)] {
        let make = |client: &mut Client, worker| {
            let Response::Pd { pd } = client.one(Command::AllocPd { cookie: 0 }) else { panic!() };
            let alloc = Command::AllocMr { pd, bytes: REGION_BYTES, access: Access::ALL_RW, cookie: 0 };
            let Response::Mr { lkey, rkey, iova, bytes } = client.one(alloc) else { panic!() };
            let Response::Cq { cq } = client.one(Command::CreateCq { worker, cqe: 1024, cookie: 0 }) else {
                panic!()
            };
            let create = Command::CreateQp(Box::new(qp_spec(pd, cq, b"", 0)));
            let Response::Qp { qpn, worker: at } = client.one(create) else { panic!() };
            assert_eq!(at, worker);
            Endpoint { pd, cq, lkey, remote: RemoteBuffer { addr: iova, rkey, bytes }, qpn }
        };
        let (ea, eb) = (make(&mut ca, wa), make(&mut cb, wb));
        ea.connect(&mut ca, &eb, ADDRESS_B, ferroce_wire::PathMtu::Mtu1024);
        eb.connect(&mut cb, &ea, ADDRESS_A, ferroce_wire::PathMtu::Mtu1024);
        let spec = |role, own: &Endpoint, peer: &Endpoint| PerfSpec {
            remote: Some(peer.remote),
            iterations: 50,
            check_data: true,
            ..PerfSpec::new(PerfOp::Write, PerfKind::Lat, role, own.qpn, own.lkey, 100)
        };
        cb.one(Command::PerfStart(Box::new(spec(PerfRole::Server, &eb, &ea))));
        let Response::PerfStarted { id } =
            ca.one(Command::PerfStart(Box::new(spec(PerfRole::Client, &ea, &eb))))
        else {
            panic!()
        };
        let until = std::time::Instant::now() + PATIENCE;
        loop {
            let Response::Perf(report) = ca.one(Command::PerfStatus { id }) else { panic!() };
            if report.state != PerfState::Running {
                assert_eq!((report.state, report.iterations), (PerfState::Done, 50), "{report:?}");
                break;
            }
            assert!(std::time::Instant::now() < until, "{report:?}");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

//! Two `ferroced` processes joined by `shm`, driven through their control sockets.

mod common;

use std::time::{Duration, Instant};

use common::*;
use ferroce_api::Code;
use ferroce_api::appliance::*;
use ferroce_wire::{PathMtu, Qpn};
use rustix::process::Signal;

fn list_all(client: &mut Client, kind: ListKind, limit: u32) -> usize {
    let (mut cursor, mut seen) = (0, 0);
    loop {
        let (count, next) = match client.one(Command::List { kind, cursor, limit, cookie: None }) {
            Response::Pds(page) => (page.entries.len(), page.next),
            Response::Mrs(page) => (page.entries.len(), page.next),
            Response::Cqs(page) => (page.entries.len(), page.next),
            Response::Qps(page) => (page.entries.len(), page.next),
            other => panic!("{other:?}"),
        };
        assert!(limit == 0 || count <= limit as usize);
        seen += count;
        match next {
            Some(next) => assert!(next > cursor || seen == count),
            None => return seen,
        }
        cursor = next.unwrap();
    }
}

fn run_test(a: &mut Client, b: &mut Client, client: PerfSpec, server: PerfSpec) -> PerfReport {
    let Response::PerfStarted { id: server } = b.one(Command::PerfStart(Box::new(server))) else { panic!() };
    let Response::PerfStarted { id } = a.one(Command::PerfStart(Box::new(client))) else { panic!() };
    let until = Instant::now() + PATIENCE;
    let report = loop {
        let Response::Perf(report) = a.one(Command::PerfStatus { id }) else { panic!() };
        if report.state != PerfState::Running {
            break report;
        }
        assert!(Instant::now() < until, "{report:?}");
        std::thread::sleep(Duration::from_millis(10));
    };
    let Response::Perf(mut served) = b.one(Command::PerfStop { id: server }) else { panic!() };
    served.state = if served.state == PerfState::Stopped { PerfState::Done } else { served.state };
    assert_eq!(served.state, PerfState::Done, "{served:?}");
    let Response::Perf(last) = a.one(Command::PerfStop { id }) else { panic!() };
    assert_eq!(last, report);
    assert_eq!(a.refuse(Command::PerfStatus { id }).code, Code::NotFound);
    *report
}

/// The whole life of a connection: make, resolve, connect, list, move data of every kind, destroy.
#[test]
fn control_makes_connects_lists_uses_and_destroys() {
    let pair = Pair::start("");
    let (mut a, mut b) = (pair.a.connect(), pair.b.connect());
    assert_eq!(a.hello.as_ref().unwrap().pid, pair.a.pid());
    a.one(Command::Subscribe);
    a.await_link();
    b.await_link();
    let (ea, eb) = (Endpoint::new(&mut a), Endpoint::new(&mut b));
    ea.connect(&mut a, &eb, ADDRESS_B, PathMtu::Mtu4096);
    eb.connect(&mut b, &ea, ADDRESS_A, PathMtu::Mtu4096);

    let Response::QpInfo(qp) = a.one(Command::QueryQp { qpn: ea.qpn }) else { panic!() };
    assert_eq!((qp.state, qp.owner.bytes(), qp.cookie), (QpState::Rts, &b"owner of it"[..], 44));
    let rtr = qp.rtr.unwrap();
    assert_eq!((rtr.dest_qpn, rtr.av.dgid.to_string().as_str()), (eb.qpn, "::ffff:192.0.2.2"));
    assert!(rtr.av.udp_src >= 0xc000);
    for kind in [ListKind::Pd, ListKind::Mr, ListKind::Cq, ListKind::Qp] {
        assert_eq!(list_all(&mut a, kind, 0), 1);
    }

    for (op, kind) in [
        (PerfOp::Send, PerfKind::Lat),
        (PerfOp::Write, PerfKind::Lat),
        (PerfOp::Read, PerfKind::Lat),
        (PerfOp::Send, PerfKind::Bw),
        (PerfOp::Write, PerfKind::Bw),
        (PerfOp::Read, PerfKind::Bw),
    ] {
        let spec = |role, own: &Endpoint, peer: &Endpoint| PerfSpec {
            remote: Some(peer.remote),
            iterations: 200,
            warmup: 10,
            depth: 16,
            rx_depth: 64,
            check_data: kind == PerfKind::Lat,
            deadline_ms: 10_000,
            ..PerfSpec::new(op, kind, role, own.qpn, own.lkey, 1000)
        };
        let report =
            run_test(&mut a, &mut b, spec(PerfRole::Client, &ea, &eb), spec(PerfRole::Server, &eb, &ea));
        assert_eq!(
            (report.state, report.iterations, &report.error),
            (PerfState::Done, 200, &None),
            "{op:?} {kind:?}"
        );
        assert_eq!(report.bytes, 200_000);
        match kind {
            PerfKind::Lat => {
                assert!(report.rtt.is_some_and(|rtt| rtt.samples == 200 && rtt.p50_ns > 0), "{report:?}")
            }
            PerfKind::Bw => assert!(report.gbytes_per_s > 0.0),
        }
        a.event(|event| matches!(event, EventBody::PerfEnded { .. }));
    }

    let status = a.status();
    assert_eq!((status.perf_running, status.dev.as_str(), status.pid), (0, "fe0", pair.a.pid()));
    assert!(status.ports[0].link_up && status.ports[0].kind == "shm", "{status:?}");
    assert!(status.workers[0].passes > 0);
    let Response::Stats(stats) = a.one(Command::Stats) else { panic!() };
    assert!(stats.port.iter().any(|c| c.name == "tx_good_packets" && c.value > 1000), "{stats:?}");

    // Who is used cannot go.
    let error = a.refuse(Command::DestroyCq { cq: ea.cq });
    assert_eq!(error.code, Code::Busy, "{error}");
    assert_eq!(a.refuse(Command::DeallocPd { pd: ea.pd }).code, Code::Busy);
    ea.destroy(&mut a);
    for kind in [ListKind::Pd, ListKind::Mr, ListKind::Cq, ListKind::Qp] {
        assert_eq!(list_all(&mut a, kind, 0), 0);
    }
    assert_eq!(a.refuse(Command::QueryQp { qpn: ea.qpn }).code, Code::NotFound);
    assert_eq!(a.status().memory.used_bytes, 0);
    eb.destroy(&mut b);
}

/// Refusals name the attribute, what was asked and what is allowed.
#[test]
fn refusals_are_precise() {
    let pair = Pair::start("mtu = 1500\n");
    let (mut a, mut b) = (pair.a.connect(), pair.b.connect());
    a.await_link();
    let (ea, eb) = (Endpoint::new(&mut a), Endpoint::new(&mut b));
    let dgid = ferroce_api::ids::parse_gid(ADDRESS_B).unwrap();
    let Response::Path(av) = a.one(Command::ResolvePath(PathQuery { dgid, sgid: None, traffic_class: 8 }))
    else {
        panic!()
    };
    assert_eq!((av.traffic_class, av.udp_src), (8, 0));
    let modify = |modify| Command::ModifyQp { qpn: ea.qpn, modify };
    let rts =
        RtsSpec { sq_psn: Default::default(), timeout: 14, retry_cnt: 7, rnr_retry: 7, max_rd_atomic: 1 };
    let error = a.refuse(modify(Modify::Rts(rts)));
    assert_eq!((error.code, error.attribute.as_str()), (Code::State, "qp_state"), "{error}");
    a.one(modify(Modify::Init(InitSpec { pkey: 0xffff, access: Access::ALL_RW, qkey: 0 })));
    let rtr = RtrSpec {
        av,
        class: 0,
        path_mtu: PathMtu::Mtu4096,
        dest_qpn: eb.qpn,
        rq_psn: Default::default(),
        max_dest_rd_atomic: 1,
        min_rnr_timer: 12,
    };
    let error = a.refuse(modify(Modify::Rtr(rtr)));
    assert_eq!(
        (error.code, error.attribute.as_str(), error.asked.as_str()),
        (Code::Invalid, "path_mtu", "4096")
    );
    assert_eq!(error.allowed, "largest 1024");
    let foreign = AddressVector { sgid: dgid, ..av };
    let error = a.refuse(modify(Modify::Rtr(RtrSpec { av: foreign, path_mtu: PathMtu::Mtu1024, ..rtr })));
    assert!(error.attribute.contains("sgid") && error.allowed.contains(ADDRESS_A), "{error}");
    a.one(modify(Modify::Rtr(RtrSpec { path_mtu: PathMtu::Mtu1024, ..rtr })));

    let nobody = ferroce_api::ids::parse_gid("192.0.2.77").unwrap();
    let error = a.refuse(Command::ResolvePath(PathQuery { dgid: nobody, sgid: None, traffic_class: 0 }));
    assert!(error.to_string().contains("192.0.2.77") && error.to_string().contains(ADDRESS_B), "{error}");
    let v6 = ferroce_api::ids::parse_gid("fd00::1").unwrap();
    let error = a.refuse(Command::ResolvePath(PathQuery { dgid: v6, sgid: None, traffic_class: 0 }));
    assert!(error.to_string().contains("IPv6"), "{error}");

    let cases = [
        (
            Command::AllocMr { pd: ea.pd, bytes: 1 << 40, access: Access::ALL_RW, cookie: 0 },
            Code::Exhausted,
            "arena",
        ),
        (Command::AllocMr { pd: ea.pd, bytes: 0, access: Access::ALL_RW, cookie: 0 }, Code::Invalid, "bytes"),
        (
            Command::AllocMr { pd: PdHandle(999), bytes: 1, access: Access::ALL_RW, cookie: 0 },
            Code::NotFound,
            "pd",
        ),
        (Command::CreateCq { worker: 9, cqe: 1, cookie: 0 }, Code::Invalid, "worker"),
        (Command::CreateCq { worker: 0, cqe: 0, cookie: 0 }, Code::Invalid, "cqe"),
        (Command::DestroyQp { qpn: Qpn::new(5) }, Code::NotFound, "qpn"),
        (Command::PerfStatus { id: PerfId(5) }, Code::NotFound, "perf test"),
        (
            Command::List { kind: ListKind::Qp, cursor: 0, limit: MAX_PAGE + 1, cookie: None },
            Code::Invalid,
            "limit",
        ),
        (
            Command::PerfStart(Box::new(PerfSpec::new(
                PerfOp::Send,
                PerfKind::Lat,
                PerfRole::Client,
                ea.qpn,
                ea.lkey,
                64,
            ))),
            Code::State,
            "qp_state",
        ),
    ];
    for (command, code, attribute) in cases {
        let error = a.refuse(command);
        assert_eq!((error.code, error.attribute.as_str()), (code, attribute), "{error}");
        assert!(!error.allowed.is_empty(), "{error}");
    }
    // An error in the middle of a batch does not stop the rest.
    let batch = vec![Command::QueryDevice, Command::DestroyCq { cq: CqHandle(7) }, Command::ListGids];
    let results = a.batch(batch);
    assert!(results[0].is_ok() && results[1].is_err() && results[2].is_ok());
}

/// Hundreds of queue pairs with the largest owners: pages end early so that every message fits, whatever the limit.
#[test]
fn large_listings_are_paged() {
    let pair = Pair::start("");
    let mut a = pair.a.connect();
    let Response::Pd { pd } = a.one(Command::AllocPd { cookie: 0 }) else { panic!() };
    let Response::Cq { cq } = a.one(Command::CreateCq { worker: 0, cqe: 16, cookie: 0 }) else { panic!() };
    let mut spec = qp_spec(pd, cq, &[0xa5; 512], u64::MAX);
    spec.cap = QpCap { max_send_wr: 1, max_recv_wr: 1, ..QpCap::default() };
    for _ in 0..6 {
        let batch = vec![Command::CreateQp(Box::new(spec.clone())); 50];
        a.batch(batch).into_iter().for_each(|result| assert!(matches!(result, Ok(Response::Qp { .. }))));
    }
    assert_eq!(list_all(&mut a, ListKind::Qp, 0), 300);
    assert_eq!(list_all(&mut a, ListKind::Qp, 256), 300);
    assert_eq!(list_all(&mut a, ListKind::Qp, 7), 300);
    // Several listings in one batch share the message; the one without room is refused, not cut.
    let results = a.batch(vec![Command::List { kind: ListKind::Qp, cursor: 0, limit: 0, cookie: None }; 3]);
    assert!(results[0].is_ok());
    assert!(results.iter().any(|r| r.as_ref().is_err_and(|e| e.code == Code::TooBig)), "{results:?}");
    let Response::Cqs(page) = a.one(Command::List { kind: ListKind::Cq, cursor: 0, limit: 0, cookie: None })
    else {
        panic!()
    };
    assert_eq!(page.entries[0].users, 600);
}

/// The data plane runs on when control goes, and a new control finds its objects.
#[test]
fn objects_outlive_their_control() {
    let pair = Pair::start("");
    let (mut a, mut b) = (pair.a.connect(), pair.b.connect());
    a.await_link();
    let (ea, eb) = (Endpoint::new(&mut a), Endpoint::new(&mut b));
    ea.connect(&mut a, &eb, ADDRESS_B, PathMtu::Mtu1024);
    eb.connect(&mut b, &ea, ADDRESS_A, PathMtu::Mtu1024);
    let spec = |role, own: &Endpoint, peer: &Endpoint| PerfSpec {
        remote: Some(peer.remote),
        duration_ms: Some(600_000),
        ..PerfSpec::new(PerfOp::Write, PerfKind::Lat, role, own.qpn, own.lkey, 64)
    };
    b.one(Command::PerfStart(Box::new(spec(PerfRole::Server, &eb, &ea))));
    let Response::PerfStarted { id } = a.one(Command::PerfStart(Box::new(spec(PerfRole::Client, &ea, &eb))))
    else {
        panic!()
    };
    assert_eq!(a.refuse(Command::DestroyQp { qpn: ea.qpn }).code, Code::Busy);
    assert_eq!(a.refuse(Command::DeregMr { lkey: ea.lkey }).code, Code::Busy);
    let instance = a.hello.as_ref().unwrap().instance;
    drop((a, b));
    let mut a = pair.a.connect();
    assert_eq!(a.hello.as_ref().unwrap().instance, instance);
    let Response::Qps(page) = a.one(Command::List { kind: ListKind::Qp, cursor: 0, limit: 0, cookie: None })
    else {
        panic!()
    };
    assert_eq!((page.entries[0].qpn, page.entries[0].cookie), (ea.qpn, 44));
    let done = |client: &mut Client| {
        let Response::Perf(report) = client.one(Command::PerfStatus { id }) else { panic!() };
        assert_eq!(report.state, PerfState::Running, "{report:?}");
        report.iterations
    };
    let before = done(&mut a);
    let until = Instant::now() + PATIENCE;
    while done(&mut a) <= before {
        assert!(Instant::now() < until, "the test stands still");
        std::thread::sleep(Duration::from_millis(20));
    }
    let Response::Perf(report) = a.one(Command::PerfStop { id }) else { panic!() };
    assert_eq!(report.state, PerfState::Stopped, "{report:?}");
    ea.destroy(&mut a);
}

/// A crash leaves a socket and locks behind; the next start clears what is ours, and the peer's link comes back.
#[test]
fn after_kill_9_the_next_start_works() {
    let mut pair = Pair::start("");
    let (mut a, mut b) = (pair.a.connect(), pair.b.connect());
    a.await_link();
    b.await_link();
    b.one(Command::Subscribe);
    let eb = Endpoint::new(&mut b);
    let instance = a.hello.as_ref().unwrap().instance;
    pair.a.kill();
    assert!(pair.run.names().contains(&"fe0.sock".to_owned()), "{:?}", pair.run.names());
    b.event(|event| matches!(event, EventBody::PortErr { port: 1 }));
    pair.a = Daemon::start(&pair.files, &pair.run.0, "fe0", &config("fe0", ADDRESS_A, ""));
    let mut a = pair.a.connect();
    assert_ne!(a.hello.as_ref().unwrap().instance, instance);
    a.await_link();
    b.event(|event| matches!(event, EventBody::PortActive { port: 1 }));
    assert_eq!(list_all(&mut a, ListKind::Pd, 0), 0);
    assert_eq!(list_all(&mut b, ListKind::Qp, 0), 1);
    let ea = Endpoint::new(&mut a);
    ea.connect(&mut a, &eb, ADDRESS_B, PathMtu::Mtu1024);
}

/// A signal under full traffic ends the appliance in time, with nothing left behind, and the peer survives.
#[test]
fn sigterm_under_traffic_leaves_nothing() {
    let mut pair = Pair::start("");
    let (mut a, mut b) = (pair.a.connect(), pair.b.connect());
    a.await_link();
    let (ea, eb) = (Endpoint::new(&mut a), Endpoint::new(&mut b));
    ea.connect(&mut a, &eb, ADDRESS_B, PathMtu::Mtu4096);
    eb.connect(&mut b, &ea, ADDRESS_A, PathMtu::Mtu4096);
    let spec = |role, own: &Endpoint, peer: &Endpoint| PerfSpec {
        remote: Some(peer.remote),
        duration_ms: Some(600_000),
        depth: 64,
        ..PerfSpec::new(PerfOp::Write, PerfKind::Bw, role, own.qpn, own.lkey, 65_536)
    };
    b.one(Command::PerfStart(Box::new(spec(PerfRole::Server, &eb, &ea))));
    let Response::PerfStarted { id } = a.one(Command::PerfStart(Box::new(spec(PerfRole::Client, &ea, &eb))))
    else {
        panic!()
    };
    let until = Instant::now() + PATIENCE;
    while !matches!(a.one(Command::PerfStatus { id }), Response::Perf(report) if report.iterations > 100) {
        assert!(Instant::now() < until);
    }
    a.one(Command::Subscribe);
    pair.a.signal(Signal::TERM);
    a.event(|event| *event == EventBody::Stopping);
    assert_eq!(a.bye().code, Code::Gone);
    assert!(pair.a.wait().success(), "{}", pair.a.log());
    assert!(pair.run.names().iter().all(|name| !name.starts_with("fe0")), "{:?}", pair.run.names());
    assert_eq!(b.status().objects.iter().find(|c| c.name == "qp").unwrap().value, 1);
    pair.b.signal(Signal::INT);
    assert!(pair.b.wait().success(), "{}", pair.b.log());
    assert_eq!(pair.run.names(), Vec::<String>::new());
}

/// On a bad wire the data still arrives right, and the capture file holds what happened.
#[test]
fn faults_and_capture_come_from_the_configuration() {
    let files = Folder::new();
    let capture = files.0.join("fe0.pcap");
    let more = format!(
        "[port.fault]\nseed = 7\nloss = 0.02\nduplicate = 0.02\nreorder = 0.02\ncorrupt = 0.02\n\
         [port.capture]\nfile = \"{}\"\n",
        capture.display()
    );
    let run = Folder::new();
    let mut fe0 = Daemon::start(&files, &run.0, "fe0", &config("fe0", ADDRESS_A, &more));
    let fe1 = Daemon::start(&files, &run.0, "fe1", &config("fe1", ADDRESS_B, ""));
    let (mut a, mut b) = (fe0.connect(), fe1.connect());
    a.await_link();
    b.await_link();
    let (ea, eb) = (Endpoint::new(&mut a), Endpoint::new(&mut b));
    ea.connect(&mut a, &eb, ADDRESS_B, PathMtu::Mtu1024);
    eb.connect(&mut b, &ea, ADDRESS_A, PathMtu::Mtu1024);
    let spec = |role, own: &Endpoint, peer: &Endpoint| PerfSpec {
        remote: Some(peer.remote),
        iterations: 60,
        check_data: true,
        deadline_ms: 15_000,
        ..PerfSpec::new(PerfOp::Write, PerfKind::Lat, role, own.qpn, own.lkey, 10_000)
    };
    let report = run_test(&mut a, &mut b, spec(PerfRole::Client, &ea, &eb), spec(PerfRole::Server, &eb, &ea));
    assert_eq!((report.state, report.iterations), (PerfState::Done, 60), "{report:?}");
    let status = a.status();
    assert!(
        status.ports[0].mode.contains("with faults") && status.ports[0].mode.contains("captured"),
        "{status:?}"
    );
    let lost: u64 =
        status.ports[0].counters.iter().filter(|c| c.name.ends_with("x_lost")).map(|c| c.value).sum();
    assert!(lost > 0, "{status:?}");
    let dropped = b.status().drops.into_iter().find(|c| c.name == "bad_icrc").map_or(0, |c| c.value);
    assert!(dropped > 0, "corrupted frames were dropped for their ICRC");
    fe0.signal(Signal::TERM);
    assert!(fe0.wait().success());
    let bytes = std::fs::read(&capture).expect("a capture");
    assert_eq!(bytes[..4], 0xa1b2_3c4d_u32.to_ne_bytes(), "pcap with nanoseconds");
    assert!(bytes.len() > 60 * 10_000, "{} bytes", bytes.len());
}

/// The stop that control asks for.
#[test]
fn shutdown_is_control_s_alone() {
    let mut pair = Pair::start("");
    let stop = Command::Shutdown { deadline_ms: 2000 };
    let mut client = Client::connect(&pair.a.socket, Role::Client);
    assert_eq!(client.refuse(stop.clone()).code, Code::Denied);
    let mut observer = Client::connect(&pair.a.socket, Role::Observer);
    assert_eq!(observer.refuse(Command::AllocPd { cookie: 0 }).code, Code::Denied);
    assert_eq!(observer.refuse(stop.clone()).code, Code::Denied);
    assert_eq!(observer.status().clients, 2);
    let mut control = pair.a.connect();
    assert_eq!(control.one(stop), Response::Done);
    assert!(pair.a.wait().success());
    assert_eq!(observer.bye().code, Code::Gone);
}

//! The control side: what is refused, and how it is said.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ferroce_engine::{Engine, EngineError, EngineEventKind, WorkerCore};
use ferroce_nic::Port;
use ferroce_verbs::Service;
use ferroce_verbs::error::VerbsErrorKind;
use ferroce_verbs::{
    Access, AsyncEvent, CqId, Device, Gid, Lkey, PathMtu, PdId, QpModify, QpState, QpType, Qpn, VerbsError,
};

use crate::harness::{ALL, Jobs, Link, Node, config, ports, to_init, to_rtr, to_rts, until};

fn kind<T: std::fmt::Debug>(outcome: Result<T, VerbsError>) -> (VerbsErrorKind, String) {
    let error = outcome.expect_err("it must be refused");
    (error.kind, error.to_string())
}

/// An engine that nobody talks to; its peer is returned to be kept.
fn alone(workers: usize, mtu: u32) -> (Node, impl Port) {
    let (port, peer) = ports(workers as u16, mtu);
    (Node::start("alone", workers, port), peer)
}

#[test]
fn what_is_in_use_is_busy_and_what_is_unknown_is_not_found() {
    for workers in [1, 2] {
        let (node, _peer) = alone(workers, 4500);
        let device = &node.device;
        let cq = node.cq(0, 8);
        let qpn = node.qp(cq);
        let buffer = node.buffer(64);
        assert_eq!(kind(device.dealloc_pd(node.pd)).0, VerbsErrorKind::Busy);
        let (busy, text) = kind(device.destroy_cq(cq));
        assert_eq!(busy, VerbsErrorKind::Busy);
        assert!(text.contains("2 do"), "{text}");
        device.destroy_qp(qpn).expect("nothing depends on it");
        device.destroy_cq(cq).expect("no longer in use");
        assert_eq!(kind(device.dealloc_pd(node.pd)).0, VerbsErrorKind::Busy, "the region is left");
        device.dereg_mr(buffer.lkey()).expect("a region");
        device.dealloc_pd(node.pd).expect("nothing is left");
        for outcome in [
            device.destroy_qp(qpn),
            device.destroy_cq(cq),
            device.dereg_mr(buffer.lkey()),
            device.dealloc_pd(node.pd),
            device.modify_qp(Qpn::new(5), &QpModify::ToErr),
            device.dereg_mr(Lkey(0)),
            device.destroy_cq(CqId(77)),
            device.query_qp(qpn).map(|_| ()),
            device.reg_mr(PdId(9999), buffer.block.clone(), ALL).map(|_| ()),
        ] {
            assert_eq!(kind(outcome).0, VerbsErrorKind::NotFound);
        }
        node.stop();
    }
}

#[test]
fn limits_are_exhausted_and_come_back() {
    for workers in [1, 2] {
        let (mut port, _peer) = ports(workers as u16, 4500);
        let mut cfg = config("small", workers, &port);
        (cfg.max_qp, cfg.max_cq, cfg.max_mr) = (2, 2, 2);
        let engine = Engine::<Jobs>::start(cfg, port.take_queues()).expect("it starts");
        let device = engine.device();
        let pd = device.alloc_pd().expect("a domain");
        let cq = device.create_cq(workers as u8 - 1, 8).expect("the first");
        device.create_cq(0, 8).expect("the second");
        assert_eq!(kind(device.create_cq(0, 8)).0, VerbsErrorKind::Exhausted);
        let attr = ferroce_verbs::QpInitAttr {
            qp_type: QpType::Rc,
            pd,
            send_cq: cq,
            recv_cq: cq,
            cap: Default::default(),
            sq_sig_all: true,
            srq: None,
        };
        let first = device.create_qp(&attr).expect("the first");
        device.create_qp(&attr).expect("the second");
        let (exhausted, text) = kind(device.create_qp(&attr));
        assert_eq!(exhausted, VerbsErrorKind::Exhausted);
        assert!(text.contains("at most 2"), "{text}");
        device.destroy_qp(first).expect("it goes");
        let again = device.create_qp(&attr).expect("room again");
        assert_ne!(again, first, "a number is not soon used again");
        let arena = ferroce_mem::os::Arena::new(ferroce_mem::os::ArenaConfig {
            bytes: 1 << 20,
            pages: ferroce_mem::os::PagePolicy::Normal,
            numa_node: None,
        });
        let (arena, _) = arena.expect("an arena");
        let blocks: Vec<_> = (0..3).map(|_| Arc::new(arena.alloc(64, 64).expect("room"))).collect();
        let keys = device.reg_mr(pd, blocks[0].clone(), ALL).expect("the first");
        device.reg_mr(pd, blocks[1].clone(), ALL).expect("the second");
        assert_eq!(kind(device.reg_mr(pd, blocks[2].clone(), ALL)).0, VerbsErrorKind::Exhausted);
        device.dereg_mr(keys.lkey).expect("it goes");
        let new = device.reg_mr(pd, blocks[2].clone(), ALL).expect("room again");
        assert_ne!((new.lkey, new.rkey), (keys.lkey, keys.rkey));
        engine.stop(Duration::from_secs(20)).expect("it stops");
    }
}

#[test]
fn bad_attributes_are_named() {
    let (node, _peer) = alone(2, 1500);
    let device = &node.device;
    let (cq0, cq1) = (node.cq(0, 8), node.cq(1, 8));
    let mut attr = node.init_attr(cq0);
    attr.recv_cq = cq1;
    let (invalid, text) = kind(device.create_qp(&attr));
    assert_eq!(invalid, VerbsErrorKind::Invalid);
    assert!(
        text.contains("worker 0") && text.contains("worker 1") && text.contains("both on one worker"),
        "{text}"
    );
    attr.recv_cq = cq0;
    attr.cap.max_send_wr = 1 << 20;
    let (_, text) = kind(device.create_qp(&attr));
    assert!(text.contains("cap.max_send_wr: asked 1048576, allowed 0 to 16384"), "{text}");
    assert!(kind(device.create_cq(2, 8)).1.contains("0 to 1"));
    assert!(kind(device.create_cq(0, 0)).1.contains("cqe"));
    assert_eq!(kind(device.query_port(2)).0, VerbsErrorKind::Invalid);
    let block = Arc::new(node.arena.alloc(64, 64).expect("room"));
    let (_, text) = kind(device.reg_mr(node.pd, block, Access::REMOTE_WRITE));
    assert!(text.contains("LOCAL_WRITE"), "{text}");
    node.stop();
}

#[test]
fn transitions_are_checked() {
    for workers in [1, 2] {
        let (node, peer) = alone(workers, 1500);
        let device = &node.device;
        let qpn = node.qp(node.cq(workers as u8 - 1, 8));
        let peer_gid = Gid::from_ip(peer.addresses()[0].0);
        let av = node.path_to(peer_gid, qpn, Qpn::new(99));
        let link = Link::default();
        let (state, text) = kind(device.modify_qp(qpn, &to_rts(0, link)));
        assert_eq!(state, VerbsErrorKind::State);
        assert!(text.contains("to Rts from Reset"), "{text}");
        device.modify_qp(qpn, &to_init()).expect("to init");
        let (_, text) =
            kind(device.modify_qp(qpn, &to_rtr(av, Qpn::new(99), 0, Link { mtu: PathMtu::Mtu4096, ..link })));
        assert!(text.starts_with("path_mtu: asked 4096, allowed largest 1024"), "{text}");
        let mut foreign = av;
        foreign.sgid = Gid::from_ip("192.0.2.1".parse().expect("an address"));
        let (_, text) = kind(device.modify_qp(qpn, &to_rtr(foreign, Qpn::new(99), 0, link)));
        assert!(text.contains("192.0.2.1") && text.contains("10.77.0.1"), "{text}");
        let mut mixed = av;
        mixed.dgid = Gid::from_ip("2001:db8::1".parse().expect("an address"));
        assert!(kind(device.modify_qp(qpn, &to_rtr(mixed, Qpn::new(99), 0, link))).1.contains("family"));
        device.modify_qp(qpn, &to_rtr(av, Qpn::new(99), 0, link)).expect("to rtr");
        let (_, text) = kind(device.modify_qp(qpn, &to_rts(0, Link { timeout: 32, ..link })));
        assert!(text.contains("timeout: asked 32, allowed 0 to 31"), "{text}");
        device.modify_qp(qpn, &to_rts(0x55, link)).expect("to rts");
        let info = device.query_qp(qpn).expect("it exists");
        assert_eq!((info.state, info.worker, info.qpn), (QpState::Rts, workers as u8 - 1, qpn));
        assert_eq!(info.rtr.map(|r| r.dest_qpn), Some(Qpn::new(99)));
        assert_eq!(info.sq_psn.get(), 0x55);
        node.stop();
    }
}

#[test]
fn news_of_the_device_become_events_and_snapshots() {
    let (node, _peer) = alone(2, 4500);
    let port = node.device.query_port(1).expect("port 1");
    assert_eq!(port.active_mtu, PathMtu::Mtu4096);
    assert_eq!(node.device.query_gids(1).expect("port 1"), [node.gid]);
    node.stop();
    // Without the housekeeping thread, so that the test alone tells news.
    let (mut port, _peer) = ports(2, 4500);
    let cfg = config("news", 2, &port);
    let mut info = cfg.netdev;
    info.link_up = true;
    let mut gids = cfg.gids.clone();
    let engine = Engine::<Jobs>::start(cfg, port.take_queues()).expect("it starts");
    engine.set_netdev(info, gids.clone()).expect("workers take it");
    while engine.next_event().is_some() {}
    info.link_up = false;
    info.mtu = 1500;
    engine.set_netdev(info, gids.clone()).expect("workers take it");
    gids.push(Gid::from_ip("2001:db8::9".parse().expect("an address")));
    engine.set_netdev(info, gids.clone()).expect("workers take it");
    engine.set_netdev(info, gids).expect("nothing new");
    let events: Vec<_> = std::iter::from_fn(|| engine.next_event()).map(|e| e.kind).collect();
    assert_eq!(
        events,
        [
            EngineEventKind::Async(AsyncEvent::PortErr),
            EngineEventKind::Mtu { netdev_mtu: 1500, too_long: 0 },
            EngineEventKind::Async(AsyncEvent::GidChange)
        ]
    );
    let port = engine.device().query_port(1).expect("port 1");
    assert_eq!((port.active, port.active_mtu, port.gid_tbl_len), (false, PathMtu::Mtu1024, 2));
    info.link_up = true;
    engine.set_netdev(info, Vec::new()).expect("workers take it");
    let events: Vec<_> = std::iter::from_fn(|| engine.next_event()).map(|e| e.kind).collect();
    let (up, gids) = (AsyncEvent::PortActive, AsyncEvent::GidChange);
    assert_eq!(events, [EngineEventKind::Async(up), EngineEventKind::Async(gids)]);
    engine.stop(Duration::from_secs(20)).expect("it stops");
}

#[test]
fn housekeeping_notices_that_the_peer_has_gone() {
    for workers in [1, 2] {
        let (node, peer) = alone(workers, 4500);
        assert!(node.device.query_port(1).expect("port 1").active);
        drop(peer);
        let down = EngineEventKind::Async(AsyncEvent::PortErr);
        let event = node.event("the port to go down", |e| e.kind == down);
        assert_eq!((event.worker, event.detail), (None, None));
        assert!(!node.device.query_port(1).expect("port 1").active);
        node.stop();
    }
}

#[test]
fn a_bad_configuration_starts_nothing() {
    let start = |change: fn(&mut ferroce_engine::EngineConfig)| {
        let (mut port, _peer) = ports(1, 4500);
        let mut cfg = config("bad", 1, &port);
        change(&mut cfg);
        Engine::<Jobs>::start(cfg, port.take_queues())
            .map(|_| ())
            .expect_err("it must be refused")
            .to_string()
    };
    assert!(start(|cfg| cfg.workers.clear()).contains("workers: asked 0"));
    assert!(start(|cfg| cfg.workers.push(cfg.workers[0])).contains("one port queue for each worker"));
    assert!(start(|cfg| cfg.max_qp = 0).contains("max_qp: asked 0, allowed 1 to 65536"));
    assert!(start(|cfg| cfg.workers[0].core = Some(900)).contains("core 900 could not be pinned"));
}

/// A service that holds the loop until it is told to let go, and says when it does.
struct Holder(Arc<Hold>);

#[derive(Default)]
struct Hold {
    hold: AtomicBool,
    held: AtomicBool,
}

impl Hold {
    fn begin(&self) {
        self.held.store(false, Ordering::Release);
        self.hold.store(true, Ordering::Release);
        until("the worker to be held", || self.held.load(Ordering::Acquire).then_some(()));
    }
    fn end(&self) {
        self.hold.store(false, Ordering::Release);
    }
}

impl Service<WorkerCore> for Holder {
    fn poll(&mut self, _queues: &mut WorkerCore, _now_ns: u64) -> usize {
        while self.0.hold.load(Ordering::Acquire) {
            self.0.held.store(true, Ordering::Release);
            std::thread::sleep(Duration::from_millis(1));
        }
        1
    }
}

#[test]
fn a_worker_that_hangs_is_named_and_its_stall_is_on_record() {
    let (mut port, _peer) = ports(2, 4500);
    let cfg = config("hang", 2, &port);
    let engine = Engine::<Holder>::start(cfg, port.take_queues()).expect("it starts");
    let device = engine.device();
    let hold = Arc::new(Hold::default());
    engine.add_service(1, Holder(hold.clone())).expect("a place");
    hold.begin();
    let (timeout, text) = kind(device.create_cq(1, 8));
    assert_eq!(timeout, VerbsErrorKind::Timeout);
    assert!(text.contains("worker 1") && text.contains("stage services"), "{text}");
    device.create_cq(0, 8).expect("the other worker answers");
    hold.end();
    until("the stall to be recorded", || {
        let stats = engine.stats();
        (stats.workers[1].counter("stalls") > 0).then_some(())
    });
    // The record is withdrawn with the command: the limit was not used up.
    device.create_cq(1, 8).expect("it answers again");
    hold.begin();
    let error = engine.stop(Duration::from_millis(100)).expect_err("it hangs");
    assert!(
        matches!(error, EngineError::Hung { worker: 1, action: "stop", stage: "services", .. }),
        "{error}"
    );
    hold.end();
}

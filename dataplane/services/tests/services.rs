//! Services end to end: two engines joined by shared memory, real queue pairs, real frames.

use ferroce_services::{
    Fault, PerfEndpoints, PerfMemory, PerfMode, PerfOp, PerfQp, PerfService, PerfSpec, PingPongEndpoints,
    PingPongReport, PingPongService, PingPongSpec, Role,
};
use ferroce_verbs::{PathMtu, QpType, Qpn, RemoteAddr, WcStatus};

#[allow(dead_code)]
mod world;

use world::{ALLOCATIONS, End, Sizes, World, wait};

trait PingPong {
    fn pingpong(&self, spec: PingPongSpec, mtu: PathMtu) -> (PingPongReport, PingPongReport);
}

impl PingPong for World {
    fn pingpong(&self, spec: PingPongSpec, mtu: PathMtu) -> (PingPongReport, PingPongReport) {
        let sizes = Sizes {
            qp_type: QpType::Rc,
            qps: 1,
            sends: 1,
            receives: spec.rx_depth,
            inline: 0,
            bytes: spec.memory_bytes(),
            events: false,
        };
        let (mut a, mut b) = (self.client.end(0, sizes), self.server.end(0, sizes));
        self.client.connect(&mut a, (&b.qpns, self.server.gid), mtu, 7);
        self.server.connect(&mut b, (&a.qpns, self.client.gid), mtu, 7);
        let ends = |own: &End| PingPongEndpoints {
            qpn: own.qpns[0],
            send_cq: own.send_cq,
            recv_cq: own.recv_cq,
            local: own.block.clone(),
            local_lkey: own.keys.lkey,
            local_iova: own.keys.iova,
            ud: None,
        };
        let server = PingPongSpec { role: Role::Server, ..spec };
        let (service, serving) = PingPongService::new(server, ends(&b)).unwrap();
        let b_id = self.server.add(0, service);
        let client = PingPongSpec { role: Role::Client, ..spec };
        let (service, asking) = PingPongService::new(client, ends(&a)).unwrap();
        let a_id = self.client.add(0, service);
        let reports = (wait(&asking).unwrap(), wait(&serving).unwrap());
        self.client.remove(a_id);
        self.server.remove(b_id);
        self.client.drop_end(a);
        self.server.drop_end(b);
        reports
    }
}

/// A queue pair whose peer has no memory.
fn nowhere(qpn: Qpn) -> PerfQp {
    PerfQp { qpn, remote_addr: RemoteAddr(0), remote_rkey: ferroce_verbs::Rkey(0), datagram: None }
}

const OPS: [PerfOp; 3] = [PerfOp::Send, PerfOp::Write, PerfOp::Read];

/// PERF-3: every combination ends with exactly the asked count, or is refused at once.
#[test]
fn every_combination_ends_with_the_exact_count() {
    let world = World::new(1);
    for op in OPS {
        for mode in [PerfMode::Lat, PerfMode::Bw] {
            for (tx_depth, cq_mod, iters) in
                [(1, 1, 1), (1, 100, 7), (12, 7, 300), (83, 100, 7), (83, 41, 600)]
            {
                for size in [0, 1, 3, 4095] {
                    let spec = PerfSpec {
                        iters,
                        tx_depth,
                        cq_mod,
                        warmup: iters % 5,
                        rx_depth: 41,
                        ..PerfSpec::new(op, mode, Role::Client, size)
                    };
                    if spec.check().is_err() {
                        assert!(size == 0 && op == PerfOp::Write && mode == PerfMode::Lat);
                        continue;
                    }
                    let (client, server) = world.perf(0, spec);
                    let case = format!("{op:?} {mode:?} depth {tx_depth} moderation {cq_mod} size {size}");
                    assert_eq!(client.messages, iters, "{case}");
                    assert_eq!(server.messages, if server.stopped { 0 } else { iters }, "{case}");
                    assert_eq!(
                        client.rtt.map(|r| r.samples),
                        (mode == PerfMode::Lat).then_some(iters),
                        "{case}"
                    );
                    assert!(!client.stopped, "{case}");
                }
            }
        }
    }
}

#[test]
fn data_is_right_in_every_test_inline_and_on_both_workers() {
    let world = World::new(2);
    for worker in [0, 1] {
        for op in OPS {
            for mode in [PerfMode::Lat, PerfMode::Bw] {
                for (size, inline_bytes) in [(1, 0), (64, 0), (64, 64), (1025, 0), (70_000, 0)] {
                    let spec = PerfSpec {
                        iters: 60,
                        warmup: 5,
                        tx_depth: 7,
                        cq_mod: 3,
                        rx_depth: 16,
                        check_data: true,
                        inline_bytes,
                        ..PerfSpec::new(op, mode, Role::Client, size)
                    };
                    let (client, _) = world.perf(worker, spec);
                    assert_eq!(client.messages, 60, "{op:?} {mode:?} {size}");
                }
            }
        }
    }
}

#[test]
fn wrong_data_is_found_on_each_side() {
    let world = World::new(1);
    for (op, mode, who) in [
        (PerfOp::Send, PerfMode::Lat, Role::Server),
        (PerfOp::Send, PerfMode::Bw, Role::Server),
        (PerfOp::Write, PerfMode::Lat, Role::Server),
        (PerfOp::Write, PerfMode::Bw, Role::Server),
        (PerfOp::Read, PerfMode::Lat, Role::Client),
        (PerfOp::Read, PerfMode::Bw, Role::Client),
    ] {
        let client = PerfSpec {
            iters: 9,
            check_data: true,
            progress_deadline_ns: 200_000_000,
            ..PerfSpec::new(op, mode, Role::Client, 500)
        };
        let server = PerfSpec { seed: client.seed + 1, ..client };
        let (asked, served) = world.perf_results(0, client, server);
        let fault = match who {
            Role::Client => asked.map(|_| ()),
            Role::Server => served.map(|_| ()),
        };
        let fault = fault.unwrap_err().fault;
        assert!(matches!(fault, Fault::Data { message: 0, offset: 0, .. }), "{op:?} {mode:?}: {fault}");
    }
}

#[test]
fn a_duration_ends_the_client_and_stop_the_server() {
    let world = World::new(1);
    for op in OPS {
        for mode in [PerfMode::Lat, PerfMode::Bw] {
            let spec = PerfSpec {
                duration_ns: Some(20_000_000),
                check_data: true,
                ..PerfSpec::new(op, mode, Role::Client, 64)
            };
            let (client, server) = world.perf(0, spec);
            assert!(client.messages > 0 && client.elapsed_ns >= 20_000_000, "{op:?} {mode:?}");
            assert!(server.stopped);
            if op == PerfOp::Send {
                assert_eq!(server.messages, client.messages, "{mode:?}");
            }
        }
    }
}

#[test]
fn pingpong_at_every_size_and_path_mtu() {
    let world = World::new(1);
    for mtu in PathMtu::ALL {
        for size in [0, 1, 1023, 4096, 65536] {
            for rx_depth in [1, 2, 500] {
                let spec = PingPongSpec {
                    size,
                    iters: 40,
                    rx_depth,
                    check_data: true,
                    ..PingPongSpec::new(Role::Client)
                };
                let (client, server) = world.pingpong(spec, mtu);
                assert_eq!((client.messages, server.messages), (40, 40), "{mtu:?} {size}");
                assert_eq!((client.checked, server.checked), (40, 40));
                assert_eq!(client.bytes, u64::from(size) * 80);
                assert_eq!(client.rtt.map(|r| r.samples), Some(40));
                assert!(client.last_acknowledged && server.last_acknowledged);
            }
        }
    }
}

#[test]
fn a_peer_that_is_not_there_fails_in_bounded_time() {
    let world = World::new(1);
    let spec = PerfSpec { iters: 5, ..PerfSpec::new(PerfOp::Send, PerfMode::Lat, Role::Client, 64) };
    let mut end = world.client.end(0, Sizes::of(&spec));
    let local = PerfMemory::prepare(&spec, end.block.clone()).unwrap();
    // Nobody has this number.
    world.client.connect(&mut end, (&[Qpn::new(0x123456)], world.server.gid), PathMtu::Mtu1024, 1);
    let ends = PerfEndpoints {
        qps: vec![nowhere(end.qpns[0])],
        send_cq: end.send_cq,
        recv_cq: end.recv_cq,
        local,
        local_lkey: end.keys.lkey,
        local_iova: end.keys.iova,
    };
    let (service, handle) = PerfService::new(spec, ends).unwrap();
    let id = world.client.add(0, service);
    let error = wait(&handle).unwrap_err();
    assert_eq!(error.status(), Some(WcStatus::RetryExcErr), "{error}");
    assert_eq!((error.wr_id(), error.qpn, error.done), (Some(0), end.qpns[0], 0));
    world.client.remove(id);
    world.client.drop_end(end);
}

#[test]
fn a_server_without_a_client_stalls_out_or_stops() {
    let world = World::new(1);
    let spec = PerfSpec {
        progress_deadline_ns: 30_000_000,
        ..PerfSpec::new(PerfOp::Send, PerfMode::Bw, Role::Server, 64)
    };
    let mut end = world.server.end(0, Sizes::of(&spec));
    world.server.connect(&mut end, (&[Qpn::new(0x123456)], world.client.gid), PathMtu::Mtu1024, 1);
    for stop in [false, true] {
        let local = PerfMemory::prepare(&spec, end.block.clone()).unwrap();
        let ends = PerfEndpoints {
            qps: vec![nowhere(end.qpns[0])],
            send_cq: end.send_cq,
            recv_cq: end.recv_cq,
            local,
            local_lkey: end.keys.lkey,
            local_iova: end.keys.iova,
        };
        let (service, handle) = PerfService::new(spec, ends).unwrap();
        if stop {
            handle.stop();
        }
        let id = world.server.add(0, service);
        match wait(&handle) {
            Ok(report) => assert!(stop && report.stopped && report.messages == 0),
            Err(error) => assert!(!stop && matches!(error.fault, Fault::Stalled { .. }), "{error}"),
        }
        world.server.remove(id);
    }
    world.server.drop_end(end);
}

#[test]
fn the_allocator_counts() {
    let before = ALLOCATIONS.get();
    drop(std::hint::black_box(Box::new(7u64)));
    assert_eq!(ALLOCATIONS.get() - before, 2, "one allocation and one free");
}

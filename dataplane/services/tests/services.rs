//! Services end to end: two engines joined by shared memory, real queue pairs, real frames.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferroce_engine::housekeeping::netdev_of;
use ferroce_engine::{
    Engine, EngineConfig, IcrcMode, IdlePolicy, PathRequest, ServiceId, SoftDevice, WorkerConfig, WorkerCore,
    address_vector,
};
use ferroce_mem::os::{Arena, ArenaConfig, Block, PagePolicy};
use ferroce_nic::Port;
use ferroce_nic::shm::{self, ShmConfig, ShmPort};
use ferroce_services::{
    AnyService, Fault, Handle, PerfEndpoints, PerfMemory, PerfMode, PerfOp, PerfQp, PerfReport, PerfService,
    PerfSpec, PingPongEndpoints, PingPongReport, PingPongService, PingPongSpec, Role, ServiceError, State,
};
use ferroce_verbs::{
    Access, ClassId, CqId, Device, Gid, InitAttrs, MrKeys, PathMtu, PdId, Pkey, Psn, Qkey, QpCap, QpInitAttr,
    QpModify, QpType, Qpn, RemoteAddr, RtrAttrs, RtsAttrs, Service, WcStatus,
};

/// The system's allocator, counting per thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator unchanged; counting touches a thread-local without a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // A service that frees is as wrong as one that allocates.
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as above.
        unsafe { System.dealloc(place, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A service that knows how often it allocated or freed on its worker.
struct Watched {
    service: AnyService,
    allocations: u64,
    polls: u64,
}

impl From<AnyService> for Watched {
    fn from(service: AnyService) -> Self {
        Watched { service, allocations: 0, polls: 0 }
    }
}

impl Service<WorkerCore> for Watched {
    fn poll(&mut self, queues: &mut WorkerCore, now_ns: u64) -> usize {
        let before = ALLOCATIONS.get();
        let work = self.service.poll(queues, now_ns);
        self.allocations += ALLOCATIONS.get() - before;
        self.polls += 1;
        work
    }
    fn finished(&self) -> bool {
        <AnyService as Service<WorkerCore>>::finished(&self.service)
    }
}

/// Longest that anything here may take.
const LIMIT: Duration = Duration::from_secs(60);

struct Side {
    engine: Engine<Watched>,
    device: SoftDevice,
    port: Mutex<ShmPort>,
    gid: Gid,
}

struct World {
    client: Side,
    server: Side,
}

/// A queue pair with its memory.
struct End {
    pd: PdId,
    send_cq: CqId,
    recv_cq: CqId,
    qpn: Qpn,
    block: Arc<Block>,
    keys: MrKeys,
}

fn side(mut port: ShmPort, name: &str) -> Side {
    let queues = port.take_queues();
    let (netdev, gids) = netdev_of(&port);
    let config = EngineConfig {
        name: name.into(),
        node_guid: 1,
        workers: vec![WorkerConfig { core: None, idle: IdlePolicy::default() }; queues.len()],
        max_qp: 16,
        max_cq: 64,
        max_mr: 16,
        netdev,
        gids: gids.clone(),
        icrc: IcrcMode::On,
    };
    let engine = Engine::start(config, queues).unwrap();
    Side { device: engine.device(), engine, port: Mutex::new(port), gid: gids[0] }
}

impl World {
    fn new(workers: u16) -> World {
        let config = |last| ShmConfig {
            addresses: vec![([10, 77, 0, last].into(), 24)],
            queues: workers,
            ..ShmConfig::new("test")
        };
        let (a, b) = shm::pair(&config(2), &config(1)).unwrap();
        World { client: side(a, "client"), server: side(b, "server") }
    }
}

impl Side {
    fn add(&self, worker: u8, service: impl Into<AnyService>) -> ServiceId {
        self.engine.add_service(worker, service.into().into()).unwrap()
    }

    /// Takes a service back. From its first poll to its last one it must not have touched the allocator.
    fn remove(&self, id: ServiceId) {
        let watched = self.engine.remove_service(id).unwrap();
        assert!(watched.polls > 0);
        assert_eq!(watched.allocations, 0, "allocated or freed on the worker in {} polls", watched.polls);
    }

    fn end(&self, worker: u8, (sends, receives, inline): (u32, u32, u32), bytes: u64) -> End {
        let arena = ArenaConfig { bytes, pages: PagePolicy::Normal, numa_node: None };
        let block = Arc::new(Arena::new(arena).unwrap().0.alloc(bytes as usize, 64).unwrap());
        let pd = self.device.alloc_pd().unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let keys = self.device.reg_mr(pd, block.clone(), access).unwrap();
        let send_cq = self.device.create_cq(worker, sends).unwrap();
        let recv_cq = self.device.create_cq(worker, receives).unwrap();
        let cap =
            QpCap { max_send_wr: sends, max_recv_wr: receives, max_inline_data: inline, ..QpCap::default() };
        let attr =
            QpInitAttr { qp_type: QpType::Rc, pd, send_cq, recv_cq, cap, sq_sig_all: false, srq: None };
        let qpn = self.device.create_qp(&attr).unwrap();
        End { pd, send_cq, recv_cq, qpn, block, keys }
    }

    fn connect(&self, own: &End, peer: (Qpn, Gid), mtu: PathMtu, retries: u8) {
        let request = PathRequest::new(self.gid, peer.1, own.qpn, peer.0);
        let av = address_vector(&mut *self.port.lock().unwrap(), &request, Instant::now() + LIMIT).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        // Close to the end of the PSNs, so that long tests wrap.
        let psn = Psn::new(0xff_fff0);
        let steps = [
            QpModify::ToInit(InitAttrs { pkey: Pkey::DEFAULT, access, qkey: Qkey(0) }),
            QpModify::ToRtr(RtrAttrs {
                av,
                class: ClassId(0),
                path_mtu: mtu,
                dest_qpn: peer.0,
                rq_psn: psn,
                max_dest_rd_atomic: 16,
                min_rnr_timer: 1,
            }),
            QpModify::ToRts(RtsAttrs {
                sq_psn: psn,
                timeout: 14,
                retry_cnt: retries,
                rnr_retry: 7,
                max_rd_atomic: 16,
            }),
        ];
        for step in steps {
            self.device.modify_qp(own.qpn, &step).unwrap();
        }
    }

    fn drop_end(&self, end: End) {
        self.device.destroy_qp(end.qpn).unwrap();
        self.device.destroy_cq(end.send_cq).unwrap();
        self.device.destroy_cq(end.recv_cq).unwrap();
        self.device.dereg_mr(end.keys.lkey).unwrap();
        self.device.dealloc_pd(end.pd).unwrap();
    }
}

fn wait<R: Clone>(handle: &Handle<R>) -> Result<R, ServiceError> {
    let deadline = Instant::now() + LIMIT;
    loop {
        match handle.state() {
            State::Done(report) => return Ok(report.clone()),
            State::Failed(error) => return Err(*error),
            State::Running { done } => {
                assert!(Instant::now() < deadline, "still running after {LIMIT:?}, {done} messages done");
                std::thread::sleep(Duration::from_micros(300));
            }
        }
    }
}

impl World {
    /// Runs one perf test; stops the server when the client has finished, if it needs that.
    fn perf(&self, worker: u8, spec: PerfSpec) -> (PerfReport, PerfReport) {
        let (client, server) = self.perf_results(worker, spec, spec);
        (client.unwrap(), server.unwrap())
    }

    fn perf_results(
        &self,
        worker: u8,
        client: PerfSpec,
        server: PerfSpec,
    ) -> (Result<PerfReport, ServiceError>, Result<PerfReport, ServiceError>) {
        let client = PerfSpec { role: Role::Client, ..client };
        let server = PerfSpec { role: Role::Server, ..server };
        let make = |side: &Side, spec: &PerfSpec| {
            let depths = (spec.send_queue_depth(), spec.recv_queue_depth(), spec.inline_bytes);
            let end = side.end(worker, depths, spec.memory_bytes());
            let memory = PerfMemory::prepare(spec, end.block.clone()).unwrap();
            (end, memory)
        };
        let (a, a_memory) = make(&self.client, &client);
        let (b, b_memory) = make(&self.server, &server);
        self.client.connect(&a, (b.qpn, self.server.gid), PathMtu::Mtu1024, 7);
        self.server.connect(&b, (a.qpn, self.client.gid), PathMtu::Mtu1024, 7);
        let ends = |own: &End, peer: &End, local| PerfEndpoints {
            qps: vec![PerfQp {
                qpn: own.qpn,
                remote_addr: RemoteAddr(peer.keys.iova),
                remote_rkey: peer.keys.rkey,
                datagram: None,
            }],
            send_cq: own.send_cq,
            recv_cq: own.recv_cq,
            local,
            local_lkey: own.keys.lkey,
            local_iova: own.keys.iova,
        };
        let (service, serving) = PerfService::new(server, ends(&b, &a, b_memory)).unwrap();
        let b_id = self.server.add(worker, service);
        let (service, asking) = PerfService::new(client, ends(&a, &b, a_memory)).unwrap();
        let a_id = self.client.add(worker, service);
        let asked = wait(&asking);
        if server.is_passive() || server.duration_ns.is_some() || asked.is_err() {
            serving.stop();
        }
        let served = wait(&serving);
        self.finish((a, a_id), (b, b_id));
        (asked, served)
    }

    fn finish(&self, (a, a_id): (End, ServiceId), (b, b_id): (End, ServiceId)) {
        self.client.remove(a_id);
        self.server.remove(b_id);
        self.client.drop_end(a);
        self.server.drop_end(b);
    }

    fn pingpong(&self, spec: PingPongSpec, mtu: PathMtu) -> (PingPongReport, PingPongReport) {
        let make = |side: &Side| side.end(0, (1, spec.rx_depth, 0), spec.memory_bytes());
        let (a, b) = (make(&self.client), make(&self.server));
        self.client.connect(&a, (b.qpn, self.server.gid), mtu, 7);
        self.server.connect(&b, (a.qpn, self.client.gid), mtu, 7);
        let ends = |own: &End| PingPongEndpoints {
            qpn: own.qpn,
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
        self.finish((a, a_id), (b, b_id));
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
    let end = world.client.end(0, (spec.send_queue_depth(), spec.recv_queue_depth(), 0), spec.memory_bytes());
    let local = PerfMemory::prepare(&spec, end.block.clone()).unwrap();
    // Nobody has this number.
    world.client.connect(&end, (Qpn::new(0x123456), world.server.gid), PathMtu::Mtu1024, 1);
    let ends = PerfEndpoints {
        qps: vec![nowhere(end.qpn)],
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
    assert_eq!((error.wr_id(), error.qpn, error.done), (Some(0), end.qpn, 0));
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
    let end = world.server.end(0, (spec.send_queue_depth(), spec.recv_queue_depth(), 0), spec.memory_bytes());
    world.server.connect(&end, (Qpn::new(0x123456), world.client.gid), PathMtu::Mtu1024, 1);
    for stop in [false, true] {
        let local = PerfMemory::prepare(&spec, end.block.clone()).unwrap();
        let ends = PerfEndpoints {
            qps: vec![nowhere(end.qpn)],
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

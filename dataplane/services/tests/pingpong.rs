//! The ping-pong exchanges over the services beside RC, their data compared byte by byte: two engines joined by shared
//! memory, real queue pairs, real frames.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferroce_engine::housekeeping::netdev_of;
use ferroce_engine::{
    Engine, EngineConfig, IcrcMode, IdlePolicy, PathRequest, ServiceId, SoftDevice, WorkerConfig,
    address_vector,
};
use ferroce_mem::os::{Arena, ArenaConfig, Block, PagePolicy};
use ferroce_nic::Port;
use ferroce_nic::shm::{self, ShmConfig, ShmPort};
use ferroce_services::{
    AnyService, Fault, Handle, PingPongEndpoints, PingPongReport, PingPongService, PingPongSpec, Role,
    ServiceError, SharedEndpoints, SharedPingPongService, State,
};
use ferroce_verbs::{
    Access, AddressVector, ClassId, CqId, Device, Gid, InitAttrs, MrKeys, PathMtu, PdId, Pkey, Psn, Qkey,
    QpCap, QpInitAttr, QpModify, QpType, Qpn, RtrAttrs, RtsAttrs, SrqId, SrqInitAttr, UdDest,
};

/// Key of datagrams.
const QKEY: Qkey = Qkey(0x1111_1111);
/// Longest that anything here may take.
const LIMIT: Duration = Duration::from_secs(60);

struct Side {
    engine: Engine<AnyService>,
    device: SoftDevice,
    port: Mutex<ShmPort>,
    gid: Gid,
}

struct World {
    client: Side,
    server: Side,
}

/// Queue pairs with their queues and memory.
struct End {
    pd: PdId,
    srq: Option<SrqId>,
    send_cq: CqId,
    recv_cq: CqId,
    qpns: Vec<Qpn>,
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
        max_qp: 32,
        max_cq: 64,
        max_mr: 16,
        netdev,
        gids: gids.clone(),
        icrc: IcrcMode::On,
    };
    let engine = Engine::start(config, queues).unwrap();
    Side { device: engine.device(), engine, port: Mutex::new(port), gid: gids[0] }
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

impl Side {
    fn add(&self, service: impl Into<AnyService>) -> ServiceId {
        self.engine.add_service(0, service.into()).unwrap()
    }

    /// `pairs` queue pairs over one shared receive queue, or one with its own.
    fn end(&self, spec: &PingPongSpec, pairs: Option<usize>) -> End {
        let bytes =
            if pairs.is_some() { SharedPingPongService::memory_bytes(spec) } else { spec.memory_bytes() };
        let arena = ArenaConfig { bytes, pages: PagePolicy::Normal, numa_node: None };
        let block = Arc::new(Arena::new(arena).unwrap().0.alloc(bytes as usize, 64).unwrap());
        let device = &self.device;
        let pd = device.alloc_pd().unwrap();
        let keys = device.reg_mr(pd, block.clone(), Access::LOCAL_WRITE).unwrap();
        let attr = SrqInitAttr { pd, max_wr: spec.rx_depth, max_sge: 1, limit: 0 };
        let srq = pairs.map(|_| device.create_srq(0, &attr).unwrap());
        let count = pairs.unwrap_or(1);
        let send_cq = device.create_cq(0, count as u32).unwrap();
        let recv_cq = device.create_cq(0, spec.rx_depth).unwrap();
        let cap = QpCap { max_send_wr: 1, max_recv_wr: spec.rx_depth, ..QpCap::default() };
        let attr = QpInitAttr { qp_type: spec.qp_type, pd, send_cq, recv_cq, cap, sq_sig_all: false, srq };
        let qpns = (0..count).map(|_| device.create_qp(&attr).unwrap()).collect();
        End { pd, srq, send_cq, recv_cq, qpns, block, keys }
    }

    fn drop_end(&self, end: &End) {
        let device = &self.device;
        end.qpns.iter().for_each(|qpn| device.destroy_qp(*qpn).unwrap());
        end.srq.iter().for_each(|srq| device.destroy_srq(*srq).unwrap());
        device.destroy_cq(end.send_cq).unwrap();
        device.destroy_cq(end.recv_cq).unwrap();
        device.dereg_mr(end.keys.lkey).unwrap();
        device.dealloc_pd(end.pd).unwrap();
    }

    fn path(&self, own: Qpn, peer: (Qpn, Gid)) -> AddressVector {
        let request = PathRequest::new(self.gid, peer.1, own, peer.0);
        address_vector(&mut *self.port.lock().unwrap(), &request, Instant::now() + LIMIT).unwrap()
    }

    fn connect(&self, own: Qpn, peer: (Qpn, Gid), mtu: PathMtu) {
        // Close to the end of the PSNs, so that long tests wrap.
        let psn = Psn::new(0xff_fff0);
        let rtr = RtrAttrs {
            av: self.path(own, peer),
            class: ClassId(0),
            path_mtu: mtu,
            dest_qpn: peer.0,
            rq_psn: psn,
            max_dest_rd_atomic: 1,
            min_rnr_timer: 1,
        };
        let rts = RtsAttrs { sq_psn: psn, timeout: 14, retry_cnt: 7, rnr_retry: 7, max_rd_atomic: 1 };
        let init = InitAttrs { pkey: Pkey::DEFAULT, access: Access::empty(), qkey: QKEY };
        for step in [QpModify::ToInit(init), QpModify::ToRtr(rtr), QpModify::ToRts(rts)] {
            self.device.modify_qp(own, &step).unwrap();
        }
    }

    /// What the exchange is connected to; with the way of datagrams, if it takes one.
    fn endpoints(&self, own: &End, way: Option<(Qpn, Gid)>) -> PingPongEndpoints {
        let qpn = own.qpns[0];
        PingPongEndpoints {
            qpn,
            send_cq: own.send_cq,
            recv_cq: own.recv_cq,
            local: own.block.clone(),
            local_lkey: own.keys.lkey,
            local_iova: own.keys.iova,
            ud: way.map(|peer| {
                let ah = self.device.create_ah(own.pd, &self.path(qpn, peer)).unwrap();
                UdDest { ah, remote_qpn: peer.0, remote_qkey: QKEY }
            }),
        }
    }
}

impl World {
    fn new() -> World {
        let config =
            |last| ShmConfig { addresses: vec![([10, 77, 0, last].into(), 24)], ..ShmConfig::new("test") };
        let (a, b) = shm::pair(&config(2), &config(1)).unwrap();
        World { client: side(a, "client"), server: side(b, "server") }
    }

    /// Two ends whose queue pairs are connected one by one.
    fn ends(&self, specs: [&PingPongSpec; 2], pairs: Option<usize>, mtu: PathMtu) -> (End, End) {
        let (a, b) = (self.client.end(specs[0], pairs), self.server.end(specs[1], pairs));
        for (near, far) in a.qpns.iter().zip(&b.qpns) {
            self.client.connect(*near, (*far, self.server.gid), mtu);
            self.server.connect(*far, (*near, self.client.gid), mtu);
        }
        (a, b)
    }

    fn finish(&self, (a, a_id): (End, ServiceId), (b, b_id): (End, ServiceId)) {
        self.client.engine.remove_service(a_id).unwrap();
        self.server.engine.remove_service(b_id).unwrap();
        self.client.drop_end(&a);
        self.server.drop_end(&b);
    }

    fn pingpong(
        &self,
        client: PingPongSpec,
        server: PingPongSpec,
        mtu: PathMtu,
    ) -> [Result<PingPongReport, ServiceError>; 2] {
        let server = PingPongSpec { role: Role::Server, ..server };
        let (a, b) = self.ends([&client, &server], None, mtu);
        let datagrams = client.qp_type == QpType::Ud;
        let way = |peer: &End, at: &Side| datagrams.then(|| (peer.qpns[0], at.gid));
        let a_ends = self.client.endpoints(&a, way(&b, &self.server));
        let b_ends = self.server.endpoints(&b, way(&a, &self.client));
        let ways = [(&self.client, a_ends.ud), (&self.server, b_ends.ud)];
        let (service, serving) = PingPongService::new(server, b_ends).unwrap();
        let b_id = self.server.add(service);
        // Nothing is repeated over UC and UD: the receives are there before the first message.
        let deadline = Instant::now() + LIMIT;
        while !serving.is_ready() {
            assert!(Instant::now() < deadline, "the server posts no receives");
            std::thread::sleep(Duration::from_micros(100));
        }
        let (service, asking) = PingPongService::new(client, a_ends).unwrap();
        let a_id = self.client.add(service);
        let reports = [wait(&asking), wait(&serving)];
        for (side, way) in ways {
            way.iter().for_each(|way| side.device.destroy_ah(&way.ah).unwrap());
        }
        self.finish((a, a_id), (b, b_id));
        reports
    }
}

#[test]
fn over_the_unreliable_services() {
    let world = World::new();
    for qp_type in [QpType::Uc, QpType::Ud] {
        for mtu in PathMtu::ALL {
            // A datagram is one packet.
            let longest = if qp_type == QpType::Ud { mtu.bytes() } else { 65536 };
            for size in [0, 1, 255, 256, 1023, 4096, 65536].into_iter().filter(|size| *size <= longest) {
                for rx_depth in [2, 500] {
                    let spec = PingPongSpec {
                        qp_type,
                        size,
                        iters: 40,
                        rx_depth,
                        check_data: true,
                        ..PingPongSpec::new(Role::Client)
                    };
                    let [client, server] = world.pingpong(spec, spec, mtu).map(Result::unwrap);
                    let case = format!("{qp_type:?} {mtu:?} {size}");
                    assert_eq!((client.messages, server.messages), (40, 40), "{case}");
                    assert_eq!((client.checked, server.checked), (40, 40), "{case}");
                    assert_eq!(client.bytes, u64::from(size) * 80, "{case}");
                }
            }
        }
    }
}

/// A message that is longer than the server wants does not arrive, a shorter one is named.
#[test]
fn a_message_of_another_length_is_noticed() {
    let world = World::new();
    for (qp_type, header) in [(QpType::Uc, 0), (QpType::Ud, 40)] {
        let spec = PingPongSpec {
            qp_type,
            size: 100,
            iters: 3,
            rx_depth: 4,
            check_data: true,
            progress_deadline_ns: 200_000_000,
            ..PingPongSpec::new(Role::Client)
        };
        for wanted in [99, 101] {
            let server = PingPongSpec { size: wanted, ..spec };
            let [asked, served] = world.pingpong(spec, server, PathMtu::Mtu1024);
            let (asked, served) = (asked.unwrap_err().fault, served.unwrap_err().fault);
            assert!(matches!(asked, Fault::Stalled { .. }), "{qp_type:?}: {asked}");
            match served {
                Fault::Stalled { .. } => assert_eq!(wanted, 99),
                Fault::Length { message: 0, expected, got } => {
                    assert_eq!((expected, got), (101 + header, 100 + header), "{qp_type:?}");
                }
                other => panic!("{qp_type:?}: {other}"),
            }
        }
    }
}

#[test]
fn over_a_shared_receive_queue() {
    let world = World::new();
    for (pairs, rx_depth) in [(1, 1), (1, 16), (5, 5), (8, 64)] {
        for size in [0, 1, 1023, 4096] {
            let spec = PingPongSpec {
                size,
                iters: 100,
                rx_depth,
                check_data: true,
                ..PingPongSpec::new(Role::Client)
            };
            let (a, b) = world.ends([&spec, &spec], Some(pairs), PathMtu::Mtu1024);
            let ends = |own: &End| SharedEndpoints {
                qpns: own.qpns.clone(),
                srq: own.srq.unwrap(),
                send_cq: own.send_cq,
                recv_cq: own.recv_cq,
                local: own.block.clone(),
                local_lkey: own.keys.lkey,
                local_iova: own.keys.iova,
            };
            let server = PingPongSpec { role: Role::Server, ..spec };
            let (service, serving) = SharedPingPongService::new(server, ends(&b)).unwrap();
            let b_id = world.server.add(service);
            let (service, asking) = SharedPingPongService::new(spec, ends(&a)).unwrap();
            let a_id = world.client.add(service);
            let case = format!("{pairs} queue pairs, {rx_depth} receives, {size} bytes");
            for handle in [&asking, &serving] {
                let report = wait(handle).unwrap_or_else(|why| panic!("{case}: {why}"));
                // The count is that of all queue pairs; each may have one more under way.
                let all = 100..=100 + pairs as u64;
                assert!(all.contains(&report.messages), "{case}: {} messages", report.messages);
                assert_eq!(report.checked, report.messages, "{case}: all were compared");
            }
            world.finish((a, a_id), (b, b_id));
        }
    }
}

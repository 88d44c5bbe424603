//! Two engines joined by shared memory, real queue pairs, real frames; perf tests on them.

pub mod calls;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferroce_engine::housekeeping::netdev_of;
use ferroce_engine::{
    Engine, EngineConfig, IcrcMode, IdlePolicy, PathRequest, ServiceId, SoftDevice, WorkerConfig, WorkerCore,
    address_vector,
};
use ferroce_mem::os::{Arena, ArenaConfig, Block, PagePolicy};
use ferroce_nic::Port;
use ferroce_nic::any::{AnyPort, Options};
use ferroce_nic::shm::{self, ShmConfig, ShmPort};
use ferroce_nic::wrap::FaultConfig;
use ferroce_services::{
    AnyService, Handle, PerfEndpoints, PerfHandle, PerfMemory, PerfQp, PerfReport, PerfService, PerfSpec,
    Role, ServiceError, State,
};
use ferroce_verbs::{
    Access, ChannelId, ClassId, CqId, Device, Gid, InitAttrs, MrKeys, PathMtu, PdId, Pkey, Psn, Qkey, QpCap,
    QpInitAttr, QpModify, QpType, Qpn, RemoteAddr, RtrAttrs, RtsAttrs, Service, UdDest,
};

/// The system's allocator, counting per thread.
struct Counting;

thread_local! {
    pub static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
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
pub struct Watched {
    service: AnyService,
    allocations: u64,
    polls: u64,
    calls: Option<Arc<calls::Calls>>,
}

impl From<AnyService> for Watched {
    fn from(service: AnyService) -> Self {
        Watched { service, allocations: 0, polls: 0, calls: None }
    }
}

impl Service<WorkerCore> for Watched {
    fn poll(&mut self, queues: &mut WorkerCore, now_ns: u64) -> usize {
        let before = ALLOCATIONS.get();
        let work = match &self.calls {
            None => self.service.poll(queues, now_ns),
            Some(calls) => calls.watch(|| self.service.poll(queues, now_ns)),
        };
        self.allocations += ALLOCATIONS.get() - before;
        self.polls += 1;
        work
    }
    fn finished(&self) -> bool {
        <AnyService as Service<WorkerCore>>::finished(&self.service)
    }
}

/// Longest that anything here may take.
pub const LIMIT: Duration = Duration::from_secs(60);

/// A queue key of datagrams.
const QKEY: Qkey = Qkey(0x1111_1111);
/// Rights of everything.
const ACCESS: Access =
    Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);

pub struct Side {
    pub engine: Engine<Watched>,
    pub device: SoftDevice,
    port: Mutex<AnyPort>,
    pub gid: Gid,
    /// ACK timeout. Without faults it is long: a machine that runs all tests at once may not get round to a thread for a
    /// while, and nothing is lost.
    timeout: u8,
}

pub struct World {
    pub client: Side,
    pub server: Side,
}

/// Sizes of one end.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub qp_type: QpType,
    pub qps: u32,
    pub sends: u32,
    pub receives: u32,
    pub inline: u32,
    pub bytes: u64,
    pub events: bool,
}

impl Sizes {
    pub fn of(spec: &PerfSpec) -> Sizes {
        Sizes {
            qp_type: spec.connection,
            qps: spec.qps,
            sends: spec.send_queue_depth(),
            receives: spec.recv_queue_depth(),
            inline: spec.inline_bytes,
            bytes: spec.memory_bytes(),
            events: spec.events,
        }
    }
}

/// Queue pairs with their memory.
pub struct End {
    pub pd: PdId,
    pub qp_type: QpType,
    pub send_cq: CqId,
    pub recv_cq: CqId,
    pub channel: Option<ChannelId>,
    pub qpns: Vec<Qpn>,
    pub block: Arc<Block>,
    pub keys: MrKeys,
    pub datagrams: Vec<UdDest>,
}

fn side(port: ShmPort, name: &str, fault: Option<FaultConfig>, lossy: bool) -> Side {
    let options = Options { fault, ..Options::default() };
    let mut port = AnyPort::wrap(port, &options).unwrap();
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
    let timeout = if lossy { 14 } else { 19 };
    Side { device: engine.device(), engine, port: Mutex::new(port), gid: gids[0], timeout }
}

impl World {
    pub fn new(workers: u16) -> World {
        World::with_faults(workers, None)
    }

    /// With faults on the client's side of the wire.
    pub fn with_faults(workers: u16, fault: Option<FaultConfig>) -> World {
        let config = |last| ShmConfig {
            addresses: vec![([10, 77, 0, last].into(), 24)],
            queues: workers,
            ..ShmConfig::new("test")
        };
        let (a, b) = shm::pair(&config(2), &config(1)).unwrap();
        let lossy = fault.is_some();
        World { client: side(a, "client", fault, lossy), server: side(b, "server", None, lossy) }
    }
}

impl Side {
    pub fn add(&self, worker: u8, service: impl Into<AnyService>) -> ServiceId {
        self.engine.add_service(worker, service.into().into()).unwrap()
    }

    /// As [`Side::add`], with the system calls of the service counted.
    pub fn add_counted(
        &self,
        worker: u8,
        service: impl Into<AnyService>,
        calls: Option<Arc<calls::Calls>>,
    ) -> ServiceId {
        let watched = Watched { calls: calls.clone(), ..service.into().into() };
        let id = self.engine.add_service(worker, watched).unwrap();
        if let Some(calls) = calls {
            calls.answer();
        }
        id
    }

    /// Takes a service back. From its first poll to its last one it must not have touched the allocator.
    pub fn remove(&self, id: ServiceId) {
        let watched = self.engine.remove_service(id).unwrap();
        assert!(watched.polls > 0);
        assert_eq!(watched.allocations, 0, "allocated or freed on the worker in {} polls", watched.polls);
    }

    pub fn end(&self, worker: u8, sizes: Sizes) -> End {
        let arena = ArenaConfig { bytes: sizes.bytes, pages: PagePolicy::Normal, numa_node: None };
        let block = Arc::new(Arena::new(arena).unwrap().0.alloc(sizes.bytes as usize, 64).unwrap());
        let pd = self.device.alloc_pd().unwrap();
        let keys = self.device.reg_mr(pd, block.clone(), ACCESS).unwrap();
        let channel = sizes.events.then(|| self.device.create_comp_channel().unwrap());
        let cq = |depth: u32| match channel {
            Some(channel) => self.device.create_cq_on(worker, depth, channel).unwrap(),
            None => self.device.create_cq(worker, depth).unwrap(),
        };
        let (send_cq, recv_cq) = (cq(sizes.sends * sizes.qps), cq(sizes.receives * sizes.qps));
        let cap = QpCap {
            max_send_wr: sizes.sends,
            max_recv_wr: sizes.receives,
            max_inline_data: sizes.inline,
            ..QpCap::default()
        };
        let qp_type = sizes.qp_type;
        let attr = QpInitAttr { qp_type, pd, send_cq, recv_cq, cap, sq_sig_all: false, srq: None };
        let qpns = (0..sizes.qps).map(|_| self.device.create_qp(&attr).unwrap()).collect();
        End { pd, qp_type, send_cq, recv_cq, channel, qpns, block, keys, datagrams: Vec::new() }
    }

    pub fn connect(&self, own: &mut End, peer: (&[Qpn], Gid), mtu: PathMtu, retries: u8) {
        for (&qpn, &dest_qpn) in own.qpns.clone().iter().zip(peer.0) {
            let request = PathRequest::new(self.gid, peer.1, qpn, dest_qpn);
            let av =
                address_vector(&mut *self.port.lock().unwrap(), &request, Instant::now() + LIMIT).unwrap();
            // Close to the end of the PSNs, so that long tests wrap.
            let psn = Psn::new(0xff_fff0);
            let steps = [
                QpModify::ToInit(InitAttrs { pkey: Pkey::DEFAULT, access: ACCESS, qkey: QKEY }),
                QpModify::ToRtr(RtrAttrs {
                    av,
                    class: ClassId(0),
                    path_mtu: mtu,
                    dest_qpn,
                    rq_psn: psn,
                    max_dest_rd_atomic: 16,
                    min_rnr_timer: 1,
                }),
                QpModify::ToRts(RtsAttrs {
                    sq_psn: psn,
                    // Who counts the retries of an absent peer need not wait long for each.
                    timeout: if retries < 7 { 14 } else { self.timeout },
                    retry_cnt: retries,
                    rnr_retry: 7,
                    max_rd_atomic: 16,
                }),
            ];
            for step in steps {
                self.device.modify_qp(qpn, &step).unwrap();
            }
            if own.qp_type == QpType::Ud {
                let ah = self.device.create_ah(own.pd, &av).unwrap();
                own.datagrams.push(UdDest { ah, remote_qpn: dest_qpn, remote_qkey: QKEY });
            }
        }
    }

    pub fn drop_end(&self, end: End) {
        for destination in &end.datagrams {
            self.device.destroy_ah(&destination.ah).unwrap();
        }
        for qpn in end.qpns {
            self.device.destroy_qp(qpn).unwrap();
        }
        self.device.destroy_cq(end.send_cq).unwrap();
        self.device.destroy_cq(end.recv_cq).unwrap();
        if let Some(channel) = end.channel {
            self.device.destroy_comp_channel(channel).unwrap();
        }
        self.device.dereg_mr(end.keys.lkey).unwrap();
        self.device.dealloc_pd(end.pd).unwrap();
    }
}

pub fn wait<R: Clone>(handle: &Handle<R>) -> Result<R, ServiceError> {
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

/// What a test that runs ended with, on both sides.
pub type Results = (Result<PerfReport, ServiceError>, Result<PerfReport, ServiceError>);

/// Both ends, connected.
pub struct Pair<'w> {
    world: &'w World,
    worker: u8,
    pub a: End,
    pub b: End,
    /// Counts the system calls of client and server.
    pub calls: Option<[Arc<calls::Calls>; 2]>,
}

impl World {
    /// Connected ends for tests like `client` and `server`, prepared for them.
    pub fn pair(&self, worker: u8, client: &PerfSpec, server: &PerfSpec) -> Pair<'_> {
        let mut a = self.client.end(worker, Sizes::of(client));
        let mut b = self.server.end(worker, Sizes::of(server));
        PerfMemory::prepare(client, a.block.clone()).unwrap();
        PerfMemory::prepare(server, b.block.clone()).unwrap();
        self.client.connect(&mut a, (&b.qpns, self.server.gid), PathMtu::Mtu1024, 7);
        self.server.connect(&mut b, (&a.qpns, self.client.gid), PathMtu::Mtu1024, 7);
        Pair { world: self, worker, a, b, calls: None }
    }

    /// Runs one perf test; stops the server when the client has finished, if it needs that.
    pub fn perf(&self, worker: u8, spec: PerfSpec) -> (PerfReport, PerfReport) {
        let (client, server) = self.perf_results(worker, spec, spec);
        (client.unwrap(), server.unwrap())
    }

    pub fn perf_results(&self, worker: u8, client: PerfSpec, server: PerfSpec) -> Results {
        let client = PerfSpec { role: Role::Client, ..client };
        let server = PerfSpec { role: Role::Server, ..server };
        let pair = self.pair(worker, &client, &server);
        let results = pair.run(client, server);
        pair.close();
        results
    }
}

pub fn endpoints(spec: &PerfSpec, own: &End, peer: &End, memory: PerfMemory) -> PerfEndpoints {
    let qps = own.qpns.iter().enumerate().map(|(index, &qpn)| PerfQp {
        qpn,
        remote_addr: RemoteAddr(peer.keys.iova + spec.announced_offset(index as u32)),
        remote_rkey: peer.keys.rkey,
        datagram: own.datagrams.get(index).copied(),
    });
    PerfEndpoints {
        qps: qps.collect(),
        send_cq: own.send_cq,
        recv_cq: own.recv_cq,
        local: memory,
        local_lkey: own.keys.lkey,
        local_iova: own.keys.iova,
    }
}

impl Pair<'_> {
    /// One test on the prepared memory.
    pub fn run(&self, client: PerfSpec, server: PerfSpec) -> Results {
        let prepared = |spec: &PerfSpec, end: &End| {
            let memory = PerfMemory::prepare(spec, end.block.clone()).unwrap();
            endpoints(spec, end, if std::ptr::eq(end, &self.a) { &self.b } else { &self.a }, memory)
        };
        self.run_on(client, prepared(&client, &self.a), server, prepared(&server, &self.b))
    }

    pub fn run_on(
        &self,
        client: PerfSpec,
        client_ends: PerfEndpoints,
        server: PerfSpec,
        server_ends: PerfEndpoints,
    ) -> Results {
        let (world, worker) = (self.world, self.worker);
        let (service, serving) = PerfService::new(server, server_ends).unwrap();
        let calls = |side: usize| self.calls.as_ref().map(|calls| Arc::clone(&calls[side]));
        let b_id = world.server.add_counted(worker, service, calls(1));
        until(|| serving.is_ready() || !serving.state().is_running());
        let (service, asking) = PerfService::new(client, client_ends).unwrap();
        let a_id = world.client.add_counted(worker, service, calls(0));
        let over = AtomicBool::new(false);
        let results = std::thread::scope(|scope| {
            for (side, end, handle) in [(&world.client, &self.a, &asking), (&world.server, &self.b, &serving)]
            {
                if let Some(channel) = end.channel {
                    let over = &over;
                    scope.spawn(move || side.tell_events(channel, handle, over));
                }
            }
            let asked = wait(&asking);
            if server.is_passive() || server.duration_ns.is_some() || asked.is_err() {
                serving.stop();
            }
            let served = wait(&serving);
            over.store(true, Ordering::Relaxed);
            (asked, served)
        });
        world.client.remove(a_id);
        world.server.remove(b_id);
        results
    }

    pub fn close(self) {
        self.world.client.drop_end(self.a);
        self.world.server.drop_end(self.b);
    }
}

/// Waits until `done` says so.
pub fn until(mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !done() {
        assert!(Instant::now() < deadline, "not done after {LIMIT:?}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

impl Side {
    /// What a host does for a test by events: waits for them, and tells the service.
    fn tell_events(&self, channel: ChannelId, handle: &PerfHandle, over: &AtomicBool) {
        while !over.load(Ordering::Relaxed) {
            let event = self.device.get_cq_event(channel, Duration::from_millis(5)).unwrap();
            let Some(cq) = event else { continue };
            self.device.ack_cq_events(cq, 1).unwrap();
            handle.notify();
        }
        // What came after the test is acknowledged too: the queues can be destroyed then.
        while let Some(cq) = self.device.get_cq_event(channel, Duration::ZERO).unwrap() {
            self.device.ack_cq_events(cq, 1).unwrap();
        }
    }
}

//! Two engines joined by `shm`, and a way to run code on their workers.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use ferroce_engine::{
    Engine, EngineConfig, EngineEvent, Housekeeper, IcrcMode, IdlePolicy, PathRequest, ServiceId, SoftDevice,
    WorkerConfig, WorkerCore, address_vector, housekeeping::netdev_of,
};
use ferroce_mem::os::{Arena, ArenaConfig, Block, PagePolicy};
use ferroce_nic::shm::ShmConfig;
use ferroce_nic::{Port, PortQueue};
use ferroce_verbs::{
    Access, AddressVector, ClassId, CqId, Device, Gid, InitAttrs, Lkey, MrKeys, PathMtu, PdId, Pkey,
    PostError, Psn, Qkey, QpCap, QpInitAttr, QpModify, QpType, Qpn, Queues, RecvWr, RemoteAddr, RtrAttrs,
    RtsAttrs, SendFlags, SendOp, SendWr, Service, Sge, Wc,
};

/// Nothing here takes longer, unless it hangs.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until `done` gives something.
pub fn until<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(Instant::now() < end, "waited in vain for {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

type Job = Box<dyn FnOnce(&mut WorkerCore) + Send>;

/// A service that runs what a test hands it.
pub struct Jobs(Arc<ArrayQueue<Job>>);

impl Service<WorkerCore> for Jobs {
    fn poll(&mut self, queues: &mut WorkerCore, _now_ns: u64) -> usize {
        let mut done = 0;
        while let Some(job) = self.0.pop() {
            job(queues);
            done += 1;
        }
        done
    }
}

/// A worker from outside: runs code on it and waits for the answer.
pub struct Remote(Arc<ArrayQueue<Job>>);

impl Remote {
    pub fn run<R: Send + 'static>(&self, job: impl FnOnce(&mut WorkerCore) -> R + Send + 'static) -> R {
        let (tell, answer) = mpsc::channel();
        let job: Job = Box::new(move |core| {
            let _ = tell.send(job(core));
        });
        assert!(self.0.push(job).is_ok(), "too many jobs");
        answer.recv_timeout(PATIENCE).expect("the worker runs the job")
    }
}

/// One engine, its port and memory.
pub struct Node<P: Port = ShmPort> {
    pub engine: Engine<Jobs>,
    pub device: SoftDevice,
    pub arena: Arena,
    pub port: Arc<Mutex<P>>,
    pub gid: Gid,
    pub pd: PdId,
    housekeeper: Housekeeper,
    jobs: Vec<Arc<ArrayQueue<Job>>>,
    services: Vec<ServiceId>,
}

pub use ferroce_nic::shm::ShmPort;

/// Everything granted.
pub const ALL: Access =
    Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);

pub fn config(name: &str, workers: usize, port: &impl Port) -> EngineConfig {
    let (netdev, gids) = netdev_of(port);
    EngineConfig {
        name: name.into(),
        node_guid: 0x0200_00ff_fe00_0001,
        workers: vec![WorkerConfig { core: None, idle: IdlePolicy::Adaptive { spin_passes: 20 } }; workers],
        max_qp: 256,
        max_cq: 256,
        max_mr: 256,
        netdev,
        gids,
        icrc: IcrcMode::On,
    }
}

impl<P: Port<Queue: Send> + Send + 'static> Node<P> {
    pub fn start(name: &str, workers: usize, port: P) -> Node<P> {
        let cfg = config(name, workers, &port);
        Node::start_with(cfg, port)
    }

    pub fn start_with(cfg: EngineConfig, mut port: P) -> Node<P> {
        let (queues, workers) = (port.take_queues(), cfg.workers.len());
        let engine = Engine::<Jobs>::start(cfg, queues).expect("the engine starts");
        let device = engine.device();
        let gid = netdev_of(&port).1[0];
        let port = Arc::new(Mutex::new(port));
        let housekeeper =
            Housekeeper::start(port.clone(), device.clone(), Duration::from_millis(5)).expect("a thread");
        let (arena, _) =
            Arena::new(ArenaConfig { bytes: 8 << 20, pages: PagePolicy::Normal, numa_node: None })
                .expect("an arena");
        let pd = device.alloc_pd().expect("a protection domain");
        let jobs: Vec<_> = (0..workers).map(|_| Arc::new(ArrayQueue::new(256))).collect();
        let services = jobs
            .iter()
            .enumerate()
            .map(|(w, jobs)| engine.add_service(w as u8, Jobs(jobs.clone())).expect("a place"))
            .collect();
        Node { engine, device, arena, port, gid, pd, housekeeper, jobs, services }
    }

    /// Runs `job` on a worker and returns its answer.
    pub fn on<R: Send + 'static>(
        &self,
        worker: u8,
        job: impl FnOnce(&mut WorkerCore) -> R + Send + 'static,
    ) -> R {
        self.remote(worker).run(job)
    }

    /// A handle to a worker.
    pub fn remote(&self, worker: u8) -> Remote {
        Remote(self.jobs[worker as usize].clone())
    }

    /// A registered buffer.
    pub fn buffer(&self, bytes: usize) -> Buffer {
        let block = Arc::new(self.arena.alloc(bytes.max(1), 64).expect("room in the arena"));
        let keys = self.device.reg_mr(self.pd, block.clone(), ALL).expect("a region");
        Buffer { block, keys }
    }

    pub fn cq(&self, worker: u8, cqe: u32) -> CqId {
        self.device.create_cq(worker, cqe).expect("a completion queue")
    }

    pub fn qp(&self, cq: CqId) -> Qpn {
        self.device.create_qp(&self.init_attr(cq)).expect("a queue pair")
    }

    pub fn init_attr(&self, cq: CqId) -> QpInitAttr {
        let cap =
            QpCap { max_send_wr: 64, max_recv_wr: 64, max_send_sge: 4, max_recv_sge: 4, max_inline_data: 64 };
        QpInitAttr {
            qp_type: QpType::Rc,
            pd: self.pd,
            send_cq: cq,
            recv_cq: cq,
            cap,
            sq_sig_all: false,
            srq: None,
        }
    }

    /// The next event that `wanted` accepts; others are passed over.
    pub fn event(&self, what: &str, wanted: impl Fn(&EngineEvent) -> bool) -> EngineEvent {
        until(what, || self.engine.next_event().filter(|e| wanted(e)))
    }

    /// Takes `n` completions of a queue.
    pub fn completions(&self, worker: u8, cq: CqId, n: usize) -> Vec<Wc> {
        let mut all = Vec::new();
        until(&format!("{n} completions"), || {
            let batch = self.on(worker, move |core| {
                let mut out = [Wc::EMPTY; 32];
                let got = core.poll_cq(cq, &mut out).expect("the queue exists");
                out[..got].to_vec()
            });
            all.extend(batch);
            (all.len() >= n).then_some(())
        });
        assert_eq!(all.len(), n, "more completions than work requests: {all:?}");
        all
    }

    pub fn post_send(&self, worker: u8, qpn: Qpn, send: Post) -> Result<(), PostError> {
        self.on(worker, move |core| core.post_send(qpn, &send.wr()))
    }

    pub fn post_recv(&self, worker: u8, qpn: Qpn, wr_id: u64, sge: Sge) -> Result<(), PostError> {
        self.on(worker, move |core| core.post_recv(qpn, &RecvWr { wr_id, sg_list: &[sge] }))
    }

    pub fn stop(self) {
        self.housekeeper.stop(PATIENCE).expect("housekeeping stops");
        for service in self.services {
            self.engine.remove_service(service).expect("it is there");
        }
        self.engine.stop(PATIENCE).expect("the engine stops");
    }
}

/// A registered buffer.
pub struct Buffer {
    pub block: Arc<Block>,
    pub keys: MrKeys,
}

impl Buffer {
    pub fn sge(&self, offset: usize, length: usize) -> Sge {
        Sge { addr: self.keys.iova + offset as u64, length: length as u32, lkey: self.keys.lkey }
    }
    pub fn remote(&self, offset: usize) -> RemoteAddr {
        RemoteAddr(self.keys.iova + offset as u64)
    }
    pub fn lkey(&self) -> Lkey {
        self.keys.lkey
    }
    /// Fills `len` bytes with a pattern of `seed`.
    pub fn pattern(&self, len: usize, seed: u64) {
        self.block.write(0, &pattern(len, seed));
    }
    pub fn read(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.block.read(0, &mut bytes);
        bytes
    }
}

pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64)
        .map(|i| (i.wrapping_mul(31).wrapping_add(seed.wrapping_mul(101)) ^ (i >> 8)) as u8)
        .collect()
}

/// A send that can travel to a worker.
#[derive(Clone)]
pub struct Post {
    pub wr_id: u64,
    pub op: SendOp,
    pub sges: Vec<Sge>,
    pub flags: SendFlags,
}

impl Post {
    pub fn new(wr_id: u64, op: SendOp, sge: Sge) -> Post {
        Post { wr_id, op, sges: vec![sge], flags: SendFlags::SIGNALED }
    }
    pub fn wr(&self) -> SendWr<'_> {
        SendWr {
            wr_id: self.wr_id,
            op: self.op,
            sg_list: &self.sges,
            inline: &[],
            flags: self.flags,
            ud: None,
        }
    }
}

/// How two queue pairs are joined.
#[derive(Clone, Copy)]
pub struct Link {
    pub mtu: PathMtu,
    pub timeout: u8,
    pub retry_cnt: u8,
}

impl Default for Link {
    fn default() -> Self {
        // About a second: a loaded machine takes a core away for longer than a tight timeout.
        Link { mtu: PathMtu::Mtu1024, timeout: 18, retry_cnt: 7 }
    }
}

pub fn to_init() -> QpModify {
    QpModify::ToInit(InitAttrs { pkey: Pkey::DEFAULT, access: ALL, qkey: Qkey(0) })
}

pub fn to_rtr(av: AddressVector, dest_qpn: Qpn, rq_psn: u32, link: Link) -> QpModify {
    QpModify::ToRtr(RtrAttrs {
        av,
        class: ClassId(0),
        path_mtu: link.mtu,
        dest_qpn,
        rq_psn: Psn::new(rq_psn),
        max_dest_rd_atomic: 16,
        min_rnr_timer: 1,
    })
}

pub fn to_rts(sq_psn: u32, link: Link) -> QpModify {
    QpModify::ToRts(RtsAttrs {
        sq_psn: Psn::new(sq_psn),
        timeout: link.timeout,
        retry_cnt: link.retry_cnt,
        rnr_retry: 7,
        max_rd_atomic: 16,
    })
}

impl<P: Port<Queue: Send> + Send + 'static> Node<P> {
    pub fn path_to(&self, dgid: Gid, qpn: Qpn, dest_qpn: Qpn) -> AddressVector {
        let mut port = self.port.lock().expect("no panic");
        let request = PathRequest::new(self.gid, dgid, qpn, dest_qpn);
        address_vector(&mut *port, &request, Instant::now() + PATIENCE).expect("the peer resolves")
    }

    pub fn connect(&self, qpn: Qpn, dgid: Gid, dest_qpn: Qpn, psn: (u32, u32), link: Link) {
        let av = self.path_to(dgid, qpn, dest_qpn);
        self.device.modify_qp(qpn, &to_init()).expect("to init");
        self.device.modify_qp(qpn, &to_rtr(av, dest_qpn, psn.1, link)).expect("to rtr");
        self.device.modify_qp(qpn, &to_rts(psn.0, link)).expect("to rts");
    }
}

/// Two engines that are attached to each other.
pub struct Pair {
    pub a: Node,
    pub b: Node,
}

pub const IP_A: &str = "10.77.0.1";
pub const IP_B: &str = "10.77.0.2";

pub fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

impl Pair {
    pub fn start(workers: usize) -> Pair {
        Pair::start_at(workers, [(IP_A, 24), (IP_B, 24)])
    }

    /// With these addresses.
    pub fn start_at(workers: usize, addresses: [(&str, u8); 2]) -> Pair {
        let (a, b) = ports_at(workers as u16, 4500, addresses);
        Pair { a: Node::start("a", workers, a), b: Node::start("b", workers, b) }
    }

    /// A connected pair of queue pairs, each with one completion queue, on the given workers.
    pub fn connected(&self, workers: (u8, u8), link: Link) -> (Side, Side) {
        let (cq_a, cq_b) = (self.a.cq(workers.0, 256), self.b.cq(workers.1, 256));
        let (qp_a, qp_b) = (self.a.qp(cq_a), self.b.qp(cq_b));
        // Near the wrap of the PSN, on purpose.
        self.a.connect(qp_a, self.b.gid, qp_b, (0xff_fff0, 0x12_3456), link);
        self.b.connect(qp_b, self.a.gid, qp_a, (0x12_3456, 0xff_fff0), link);
        (Side { worker: workers.0, cq: cq_a, qpn: qp_a }, Side { worker: workers.1, cq: cq_b, qpn: qp_b })
    }

    pub fn stop(self) {
        self.a.stop();
        self.b.stop();
    }
}

/// One end of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Side {
    pub worker: u8,
    pub cq: CqId,
    pub qpn: Qpn,
}

/// Two ports that are attached to each other.
pub fn ports(queues: u16, mtu: u32) -> (ShmPort, ShmPort) {
    ports_at(queues, mtu, [(IP_A, 24), (IP_B, 24)])
}

/// The same with these addresses.
pub fn ports_at(queues: u16, mtu: u32, addresses: [(&str, u8); 2]) -> (ShmPort, ShmPort) {
    let side = |name: &str, (address, prefix): (&str, u8)| ShmConfig {
        addresses: vec![(ip(address), prefix)],
        mtu,
        queues,
        ring_bytes: 1 << 18,
        ..ShmConfig::new(name)
    };
    ferroce_nic::shm::pair(&side("a", addresses[0]), &side("b", addresses[1]))
        .expect("two sides that go together")
}

/// Sends a raw frame. A queue learns of its peer when it receives, as a worker does in every pass.
pub fn inject(queue: &mut impl PortQueue, frame: &[u8]) {
    queue.rx_burst(0, |_| {});
    until("room in the ring", || {
        let mut tx = queue.tx_reserve(frame.len())?;
        assert!(tx.buf.write(0, frame));
        Some(())
    });
    queue.tx_commit(frame.len());
    queue.tx_flush();
}

/// Receives raw frames: the next one, whole.
pub fn next_frame(queue: &mut impl PortQueue) -> Vec<u8> {
    until("a frame", || {
        let mut frame = None;
        queue.rx_burst(1, |rx| {
            let mut bytes = rx.head.to_vec();
            let at = bytes.len();
            bytes.resize(rx.len(), 0);
            rx.rest.copy_to(&mut bytes[at..]);
            frame = Some(bytes);
        });
        frame
    })
}

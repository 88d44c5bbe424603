//! Steady state allocates nothing and makes no system call.
//!
//! Two engines over `shm` exchange SENDs, WRITEs and READs under the `spin` policy for more than 100,000 passes of each
//! worker's poll loop, while a global allocator counts what any thread allocates and a seccomp filter on the two worker
//! threads reports every system call they make to this test. Both checks are then shown to be able to fail: a service
//! allocates once and makes one system call, and both are counted.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ferroce_engine::housekeeping::netdev_of;
use ferroce_engine::{
    Engine, EngineConfig, IcrcMode, IdlePolicy, PathRequest, WorkerConfig, WorkerCore, address_vector,
};
use ferroce_mem::os::{Arena, ArenaConfig, Block, PagePolicy};
use ferroce_nic::Port;
use ferroce_nic::shm::{ShmConfig, ShmPort};
use ferroce_verbs::{
    Access, ClassId, CqId, Device, InitAttrs, MrKeys, PathMtu, Pkey, Psn, Qkey, QpCap, QpInitAttr, QpModify,
    QpType, Qpn, Queues, RecvWr, RemoteAddr, RtrAttrs, RtsAttrs, SendFlags, SendOp, SendWr, Service, Sge,
    WcStatus,
};

/// Passes of each worker in the measured window.
const PASSES: u64 = 100_000;
/// Completions of each worker in it.
const COMPLETIONS: u64 = 2_000;
const PATIENCE: Duration = Duration::from_secs(120);
/// Longer than two packets.
const LEN: usize = 3000;

/// Counts what the worker threads allocate and free.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Set on the worker threads.
    static WATCHED: Cell<bool> = const { Cell::new(false) };
}

fn note() {
    if WATCHED.get() {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        note();
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        note();
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// `struct seccomp_notif` and `struct seccomp_notif_resp` of the kernel's interface.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Notification {
    id: u64,
    pid: u32,
    flags: u32,
    nr: i32,
    arch: u32,
    instruction_pointer: u64,
    args: [u64; 6],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Response {
    id: u64,
    val: i64,
    error: i32,
    flags: u32,
}

const SECCOMP_SET_MODE_FILTER: libc::c_ulong = 1;
const SECCOMP_FILTER_FLAG_NEW_LISTENER: libc::c_ulong = 1 << 3;
const SECCOMP_RET_USER_NOTIF: u32 = 0x7fc0_0000;
const SECCOMP_USER_NOTIF_FLAG_CONTINUE: u32 = 1;
const SECCOMP_IOCTL_NOTIF_RECV: libc::c_ulong = 0xc050_2100;
const SECCOMP_IOCTL_NOTIF_SEND: libc::c_ulong = 0xc018_2101;

/// From now on every system call of the calling thread waits for an answer through the returned descriptor.
fn report_system_calls() -> i32 {
    let mut ret = libc::sock_filter {
        code: (libc::BPF_RET | libc::BPF_K) as u16,
        jt: 0,
        jf: 0,
        k: SECCOMP_RET_USER_NOTIF,
    };
    let program = libc::sock_fprog { len: 1, filter: &mut ret };
    // SAFETY: plain system calls; the program outlives them. The last one is not reported: the filter acts from the next
    // system call on.
    unsafe {
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 {
            return -1;
        }
        libc::syscall(libc::SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program)
            as i32
    }
}

/// Lets every reported system call go on, and counts it; the number of the last one is kept.
#[derive(Default)]
struct Calls {
    count: AtomicU64,
    last: AtomicI32,
}

fn answer_calls(listener: OwnedFd, calls: &Calls) {
    loop {
        let mut poll = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one descriptor that lives for the call.
        let ready = unsafe { libc::poll(&mut poll, 1, PATIENCE.as_millis() as i32) };
        if ready <= 0 || poll.revents & libc::POLLIN == 0 {
            // The filtered thread has ended.
            return;
        }
        let mut notification = Notification::default();
        // SAFETY: the structure has the kernel's layout and size (the ioctl's number holds it), and is zeroed.
        if unsafe { libc::ioctl(listener.as_raw_fd(), SECCOMP_IOCTL_NOTIF_RECV, &mut notification) } != 0 {
            continue;
        }
        calls.last.store(notification.nr, Ordering::Relaxed);
        calls.count.fetch_add(1, Ordering::Relaxed);
        let mut response =
            Response { id: notification.id, flags: SECCOMP_USER_NOTIF_FLAG_CONTINUE, ..Response::default() };
        // SAFETY: as above.
        unsafe { libc::ioctl(listener.as_raw_fd(), SECCOMP_IOCTL_NOTIF_SEND, &mut response) };
    }
}

/// What test and service tell each other.
#[derive(Default)]
struct Board {
    /// The test: install the filter.
    filter: AtomicBool,
    /// The service: its descriptor plus one.
    listener: AtomicU32,
    /// The test: allocate once and make one system call.
    misbehave: AtomicBool,
    polls: AtomicU64,
    done: AtomicU64,
    errors: AtomicU64,
}

/// Keeps a SEND, a WRITE and a READ in the air, for ever.
struct Traffic {
    board: Arc<Board>,
    qpn: Qpn,
    cq: CqId,
    local: MrKeys,
    remote: MrKeys,
    in_flight: u32,
    received: u32,
    next: u64,
}

impl Traffic {
    fn sge(&self, part: usize) -> Sge {
        Sge { addr: self.local.iova + (part * LEN) as u64, length: LEN as u32, lkey: self.local.lkey }
    }

    fn post(&mut self, core: &mut WorkerCore) -> usize {
        let mut posted = 0;
        while self.received < 8 {
            let sge = [self.sge(0)];
            if core.post_recv(self.qpn, &RecvWr { wr_id: 0, sg_list: &sge }).is_err() {
                break;
            }
            self.received += 1;
            posted += 1;
        }
        while self.in_flight < 6 {
            let (remote_addr, rkey) = (RemoteAddr(self.remote.iova + LEN as u64), self.remote.rkey);
            let (op, part) = match self.next % 3 {
                0 => (SendOp::Send, 2),
                1 => (SendOp::Write { remote_addr, rkey }, 2),
                _ => (SendOp::Read { remote_addr, rkey }, 3),
            };
            let sge = [self.sge(part)];
            let wr = SendWr {
                wr_id: self.next,
                op,
                sg_list: &sge,
                inline: &[],
                flags: SendFlags::SIGNALED,
                ud: None,
            };
            if core.post_send(self.qpn, &wr).is_err() {
                break;
            }
            self.next += 1;
            self.in_flight += 1;
            posted += 1;
        }
        posted
    }
}

impl Service<WorkerCore> for Traffic {
    fn poll(&mut self, core: &mut WorkerCore, _now_ns: u64) -> usize {
        self.board.polls.fetch_add(1, Ordering::Relaxed);
        if self.board.filter.load(Ordering::Relaxed) && self.board.listener.load(Ordering::Relaxed) == 0 {
            WATCHED.set(true);
            let fd = report_system_calls();
            self.board.listener.store(fd.wrapping_add(1) as u32, Ordering::Release);
            if fd < 0 {
                self.board.errors.fetch_add(1, Ordering::Relaxed);
                self.board.filter.store(false, Ordering::Relaxed);
            }
        }
        if self.board.misbehave.swap(false, Ordering::Relaxed) {
            drop(std::hint::black_box(Box::new(1u64)));
            // SAFETY: a system call without arguments or effects.
            unsafe { libc::getppid() };
        }
        let mut out = [ferroce_verbs::Wc::EMPTY; 16];
        let got = core.poll_cq(self.cq, &mut out).unwrap_or(0);
        for wc in &out[..got] {
            if wc.status != WcStatus::Success {
                self.board.errors.fetch_add(1, Ordering::Relaxed);
            }
            let counter = if wc.is_recv { &mut self.received } else { &mut self.in_flight };
            *counter = counter.saturating_sub(1);
        }
        self.board.done.fetch_add(got as u64, Ordering::Relaxed);
        got + self.post(core)
    }
}

struct End {
    engine: Engine<Traffic>,
    port: ShmPort,
    board: Arc<Board>,
    block: Arc<Block>,
    keys: MrKeys,
    cq: CqId,
    qpn: Qpn,
}

fn end(name: &str, mut port: ShmPort) -> End {
    let (netdev, gids) = netdev_of(&port);
    let cfg = EngineConfig {
        name: name.into(),
        node_guid: 1,
        workers: vec![WorkerConfig { core: None, idle: IdlePolicy::Spin }],
        max_qp: 8,
        max_cq: 8,
        max_mr: 8,
        netdev,
        gids,
        icrc: IcrcMode::On,
    };
    let engine = Engine::start(cfg, port.take_queues()).expect("it starts");
    let device = engine.device();
    let arena = Arena::new(ArenaConfig { bytes: 1 << 20, pages: PagePolicy::Normal, numa_node: None })
        .expect("an arena")
        .0;
    let block = Arc::new(arena.alloc(4 * LEN, 64).expect("room"));
    // Touched, so that no page fault falls into the window.
    block.fill(7);
    let pd = device.alloc_pd().expect("a domain");
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let keys = device.reg_mr(pd, block.clone(), access).expect("a region");
    let cq = device.create_cq(0, 64).expect("a queue");
    let cap =
        QpCap { max_send_wr: 16, max_recv_wr: 16, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
    let attr =
        QpInitAttr { qp_type: QpType::Rc, pd, send_cq: cq, recv_cq: cq, cap, sq_sig_all: false, srq: None };
    let qpn = device.create_qp(&attr).expect("a queue pair");
    End { engine, port, board: Arc::new(Board::default()), block, keys, cq, qpn }
}

fn connect(end: &mut End, peer: &End) {
    let (gid, dgid) = (netdev_of(&end.port).1[0], netdev_of(&peer.port).1[0]);
    let request = PathRequest::new(gid, dgid, end.qpn, peer.qpn);
    let av = address_vector(&mut end.port, &request, Instant::now() + PATIENCE).expect("a path");
    let device = end.engine.device();
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let init = InitAttrs { pkey: Pkey::DEFAULT, access, qkey: Qkey(0) };
    let rtr = RtrAttrs {
        av,
        class: ClassId(0),
        path_mtu: PathMtu::Mtu1024,
        dest_qpn: peer.qpn,
        rq_psn: Psn::new(1),
        max_dest_rd_atomic: 4,
        min_rnr_timer: 1,
    };
    let rts = RtsAttrs { sq_psn: Psn::new(1), timeout: 18, retry_cnt: 7, rnr_retry: 7, max_rd_atomic: 4 };
    for modify in [QpModify::ToInit(init), QpModify::ToRtr(rtr), QpModify::ToRts(rts)] {
        device.modify_qp(end.qpn, &modify).expect("a transition");
    }
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn steady_state_allocates_nothing_and_makes_no_system_call() {
    let side = |name: &str, address: &str| ShmConfig {
        addresses: vec![(address.parse().expect("an address"), 24)],
        can_sleep: false,
        ..ShmConfig::new(name)
    };
    let (a, b) = ferroce_nic::shm::pair(&side("a", "10.78.0.1"), &side("b", "10.78.0.2")).expect("two sides");
    let (mut a, mut b) = (end("hot-a", a), end("hot-b", b));
    connect(&mut a, &b);
    connect(&mut b, &a);
    for (end, peer) in [(&a, &b), (&b, &a)] {
        let traffic = Traffic {
            board: end.board.clone(),
            qpn: end.qpn,
            cq: end.cq,
            local: end.keys,
            remote: peer.keys,
            in_flight: 0,
            received: 0,
            next: 0,
        };
        end.engine.add_service(0, traffic).expect("a place");
    }
    let boards = [a.board.clone(), b.board.clone()];
    until("traffic", || boards.iter().all(|b| b.done.load(Ordering::Relaxed) > 1000));
    let mut calls = Vec::new();
    for board in &boards {
        board.filter.store(true, Ordering::Relaxed);
        until("the filter", || board.listener.load(Ordering::Acquire) != 0);
        let fd = board.listener.load(Ordering::Acquire) as i32 - 1;
        assert!(fd >= 0, "seccomp with a listener is refused here: {}", std::io::Error::last_os_error());
        // SAFETY: the service made this descriptor and gave it away.
        let listener = unsafe { OwnedFd::from_raw_fd(fd) };
        let counted = Arc::new(Calls::default());
        calls.push(counted.clone());
        std::thread::spawn(move || answer_calls(listener, &counted));
    }
    let made = |at: usize| calls[at].count.load(Ordering::Relaxed);
    // The filter's own installation may have reported what belongs to it.
    let start: Vec<_> =
        boards.iter().map(|b| (b.polls.load(Ordering::Relaxed), b.done.load(Ordering::Relaxed))).collect();
    let before = [made(0), made(1)];
    let allocated = ALLOCATIONS.load(Ordering::SeqCst);
    // Both: on a machine with more threads than cores a worker may spin through many passes in which its peer sleeps.
    until("the passes and the work", || {
        boards.iter().zip(&start).all(|(b, (polls, done))| {
            b.polls.load(Ordering::Relaxed) > polls + PASSES
                && b.done.load(Ordering::Relaxed) > done + COMPLETIONS
        })
    });
    let after = [made(0), made(1)];
    let allocations = ALLOCATIONS.load(Ordering::SeqCst) - allocated;
    for (i, (board, (polls, done))) in boards.iter().zip(&start).enumerate() {
        let passes = board.polls.load(Ordering::Relaxed) - polls;
        let completions = board.done.load(Ordering::Relaxed) - done;
        println!(
            "worker {i}: {passes} passes, {completions} completions, {allocations} allocations, {} system calls",
            after[i] - before[i]
        );
        assert_eq!(board.errors.load(Ordering::Relaxed), 0);
    }
    assert_eq!(allocations, 0, "the data path allocated");
    let last = calls.iter().map(|c| c.last.load(Ordering::Relaxed)).collect::<Vec<_>>();
    assert_eq!(after, before, "the data path made system calls; the last ones had the numbers {last:?}");

    // Both checks see what they are there for.
    boards[0].misbehave.store(true, Ordering::Relaxed);
    until("the system call", || made(0) > before[0]);
    assert_eq!(calls[0].last.load(Ordering::Relaxed), libc::SYS_getppid as i32);
    assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - allocated, 2, "one allocation and its end");

    assert_eq!(a.block.len(), b.block.len());
    a.engine.stop(PATIENCE).expect("it stops");
    b.engine.stop(PATIENCE).expect("it stops");
}

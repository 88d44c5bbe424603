//! Steady state allocates nothing and makes no system call, whatever is sent.
//!
//! For each kind of traffic two engines over `shm` exchange it under the `spin` policy for more than 100,000 passes of
//! each worker's poll loop, while a global allocator counts what any worker allocates and a seccomp filter on the two
//! worker threads reports every system call they make to this test. Both checks are then shown to be able to fail: a
//! service allocates once and makes one system call, and both are counted.
#![allow(unsafe_code)]

mod traffic;
mod watch;

use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ferroce_engine::housekeeping::netdev_of;
use ferroce_engine::{Engine, EngineConfig, IcrcMode, IdlePolicy, PathRequest, WorkerConfig, address_vector};
use ferroce_mem::os::{Arena, ArenaConfig, Block, PagePolicy};
use ferroce_nic::Port;
use ferroce_nic::shm::{ShmConfig, ShmPort};
use ferroce_verbs::{
    Access, AddressVector, ClassId, CqId, Device, Gid, InitAttrs, MrKeys, PathMtu, PdId, Pkey, Psn, Qkey,
    QpCap, QpInitAttr, QpModify, QpType, Qpn, RtrAttrs, RtsAttrs, SrqId, SrqInitAttr, UdDest,
};
use traffic::{Board, Kind, LEN, Traffic, Window};
use watch::{ALLOCATIONS, Calls, answer_calls};

/// Passes of each worker in the measured window.
const PASSES: u64 = 100_000;
/// Completions of each worker in it.
const COMPLETIONS: u64 = 2_000;
const PATIENCE: Duration = Duration::from_secs(120);
const QKEY: Qkey = Qkey(7);
const ACCESS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::MW_BIND);

/// One at a time: the allocator counts for all of them.
static ONE: Mutex<()> = Mutex::new(());

struct End {
    engine: Engine<Traffic>,
    port: ShmPort,
    board: Arc<Board>,
    _block: Arc<Block>,
    pd: PdId,
    keys: MrKeys,
    cq: CqId,
    qpn: Qpn,
    srq: Option<SrqId>,
}

fn end(kind: Kind, name: &str, mut port: ShmPort) -> End {
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
    block.fill(0);
    let pd = device.alloc_pd().expect("a domain");
    let keys = device.reg_mr(pd, block.clone(), ACCESS).expect("a region");
    let cq = device.create_cq(0, 64).expect("a queue");
    let qp_type = match kind {
        Kind::Unreliable => QpType::Uc,
        Kind::Datagrams => QpType::Ud,
        _ => QpType::Rc,
    };
    let attr = SrqInitAttr { pd, max_wr: 16, max_sge: 1, limit: 0 };
    let srq = (kind == Kind::Shared).then(|| device.create_srq(0, &attr).expect("a shared queue"));
    let cap =
        QpCap { max_send_wr: 16, max_recv_wr: 16, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 64 };
    let attr = QpInitAttr { qp_type, pd, send_cq: cq, recv_cq: cq, cap, sq_sig_all: false, srq };
    let qpn = device.create_qp(&attr).expect("a queue pair");
    End { engine, port, board: Arc::new(Board::default()), _block: block, pd, keys, cq, qpn, srq }
}

fn path(end: &mut End, dgid: Gid, dest: Qpn) -> AddressVector {
    let gid = netdev_of(&end.port).1[0];
    let request = PathRequest::new(gid, dgid, end.qpn, dest);
    address_vector(&mut end.port, &request, Instant::now() + PATIENCE).expect("a path")
}

fn connect(end: &mut End, peer: &End) {
    let dgid = netdev_of(&peer.port).1[0];
    let av = path(end, dgid, peer.qpn);
    let device = end.engine.device();
    let init = InitAttrs { pkey: Pkey::DEFAULT, access: ACCESS.difference(Access::MW_BIND), qkey: QKEY };
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

/// Ways to the peer, and to a group that both are in.
fn dests(end: &mut End, peer: &End) -> Vec<UdDest> {
    let (dgid, group) = (netdev_of(&peer.port).1[0], Gid::from_ip([239, 7, 7, 7].into()));
    end.engine.device().attach_mcast(end.qpn, group).expect("room");
    let mut dest = |dgid, remote_qpn| {
        let av = path(end, dgid, remote_qpn);
        let ah = end.engine.device().create_ah(end.pd, &av).expect("a path");
        UdDest { ah, remote_qpn, remote_qkey: QKEY }
    };
    vec![dest(dgid, peer.qpn), dest(group, Qpn::MULTICAST)]
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Two ends with their traffic.
fn start(kind: Kind) -> [End; 2] {
    let side = |name: &str, address: &str| ShmConfig {
        addresses: vec![(address.parse().expect("an address"), 24)],
        can_sleep: false,
        ..ShmConfig::new(name)
    };
    let (a, b) = ferroce_nic::shm::pair(&side("a", "10.78.0.1"), &side("b", "10.78.0.2")).expect("two sides");
    let (mut a, mut b) = (end(kind, "hot-a", a), end(kind, "hot-b", b));
    connect(&mut a, &b);
    connect(&mut b, &a);
    let keys = [Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0))];
    let ways = match kind {
        Kind::Datagrams => [dests(&mut a, &b), dests(&mut b, &a)],
        _ => [Vec::new(), Vec::new()],
    };
    for (i, ((end, peer), dests)) in [(&a, &b), (&b, &a)].into_iter().zip(ways).enumerate() {
        let window = (kind == Kind::Windows).then(|| Window {
            key: end.engine.device().alloc_mw(0, end.pd).expect("a window"),
            own: keys[i].clone(),
            theirs: keys[1 - i].clone(),
            busy: false,
            rounds: 0,
        });
        let traffic = Traffic {
            kind,
            board: end.board.clone(),
            qpn: end.qpn,
            cq: end.cq,
            srq: end.srq,
            dests,
            window,
            local: end.keys,
            remote: peer.keys,
            in_flight: 0,
            received: 0,
            next: 0,
        };
        end.engine.add_service(0, traffic).expect("a place");
    }
    [a, b]
}

/// Puts the filter on both workers.
fn watch(boards: &[Arc<Board>; 2]) -> [Arc<Calls>; 2] {
    boards.each_ref().map(|board| {
        board.filter.store(true, Ordering::Relaxed);
        until("the filter", || board.listener.load(Ordering::Acquire) != 0);
        let fd = board.listener.load(Ordering::Acquire) as i32 - 1;
        assert!(fd >= 0, "seccomp with a listener is refused here: {}", std::io::Error::last_os_error());
        // SAFETY: the service made this descriptor and gave it away.
        let listener = unsafe { OwnedFd::from_raw_fd(fd) };
        let counted = Arc::new(Calls::default());
        let calls = counted.clone();
        std::thread::spawn(move || answer_calls(listener, &counted));
        calls
    })
}

/// The whole of it for one kind of traffic.
fn is_quiet(kind: Kind) {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let [a, b] = start(kind);
    let boards = [a.board.clone(), b.board.clone()];
    until("traffic", || boards.iter().all(|b| b.done.load(Ordering::Relaxed) > 1000));
    let calls = watch(&boards);
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
            "{kind:?}, worker {i}: {passes} passes, {completions} completions, {allocations} allocations, {} system \
             calls",
            after[i] - before[i]
        );
        assert_eq!(board.errors.load(Ordering::Relaxed), 0);
    }
    assert_eq!(allocations, 0, "the data path allocated");
    let last = calls.each_ref().map(|calls| calls.last.load(Ordering::Relaxed));
    assert_eq!(after, before, "the data path made system calls; the last ones had the numbers {last:?}");

    // Both checks see what they are there for.
    boards[0].misbehave.store(true, Ordering::Relaxed);
    until("the system call", || made(0) > before[0]);
    assert_eq!(calls[0].last.load(Ordering::Relaxed), libc::SYS_getppid as i32);
    assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - allocated, 2, "one allocation and its end");

    a.engine.stop(PATIENCE).expect("it stops");
    b.engine.stop(PATIENCE).expect("it stops");
}

#[test]
fn reliable_connections() {
    is_quiet(Kind::Reliable);
}

#[test]
fn immediate_inline_fenced_solicited_and_unsignalled() {
    is_quiet(Kind::Flags);
}

#[test]
fn unreliable_connections() {
    is_quiet(Kind::Unreliable);
}

#[test]
fn datagrams_to_one_and_to_many() {
    is_quiet(Kind::Datagrams);
}

#[test]
fn shared_receive_queues() {
    is_quiet(Kind::Shared);
}

#[test]
fn atomics() {
    is_quiet(Kind::Atomics);
}

#[test]
fn windows() {
    is_quiet(Kind::Windows);
}

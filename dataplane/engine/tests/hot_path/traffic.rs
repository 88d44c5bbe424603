//! Services that keep a kind of traffic in the air for ever.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use ferroce_engine::WorkerCore;
use ferroce_verbs::{
    Access, CqId, Imm, MrKeys, PostError, Qpn, Queues, RecvWr, RemoteAddr, Rkey, SendFlags, SendOp, SendWr,
    Service, Sge, SrqId, UdDest, Wc, WcOpcode, WcStatus,
};

use crate::watch::{WATCHED, report_system_calls};

/// Longer than two packets.
pub const LEN: usize = 3000;
/// One datagram.
const DATAGRAM: u32 = 900;
/// Receives kept posted.
const RECEIVES: u32 = 8;
/// Sends kept in the air.
const SENDS: u32 = 6;

/// What goes to and fro.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// SEND, WRITE and READ.
    Reliable,
    /// The same with immediate data, inline, fenced, solicited, and unsignalled beside it.
    Flags,
    /// SEND and WRITE on an unreliable connection.
    Unreliable,
    /// Datagrams to the peer and to a group.
    Datagrams,
    /// SEND into a shared receive queue.
    Shared,
    /// Fetch and add, compare and swap.
    Atomics,
    /// Windows bound, written through, ended by their owner and by the peer.
    Windows,
}

/// What test and service tell each other.
#[derive(Default)]
pub struct Board {
    /// The test: install the filter.
    pub filter: AtomicBool,
    /// The service: its descriptor plus one.
    pub listener: AtomicU32,
    /// The test: allocate once and make one system call.
    pub misbehave: AtomicBool,
    pub polls: AtomicU64,
    pub done: AtomicU64,
    pub errors: AtomicU64,
}

/// A window and where its key is told.
pub struct Window {
    /// Its last key.
    pub key: Rkey,
    /// A key that the peer may use and shall end; 0 for none.
    pub own: Arc<AtomicU32>,
    /// The peer's.
    pub theirs: Arc<AtomicU32>,
    /// Bound, or about to be.
    pub busy: bool,
    pub rounds: u64,
}

/// Keeps one kind of traffic in the air.
pub struct Traffic {
    pub kind: Kind,
    pub board: Arc<Board>,
    pub qpn: Qpn,
    pub cq: CqId,
    pub srq: Option<SrqId>,
    pub dests: Vec<UdDest>,
    pub window: Option<Window>,
    pub local: MrKeys,
    pub remote: MrKeys,
    pub in_flight: u32,
    pub received: u32,
    pub next: u64,
}

impl Traffic {
    fn sge(&self, part: usize, length: u32) -> Sge {
        Sge { addr: self.local.iova + (part * LEN) as u64, length, lkey: self.local.lkey }
    }

    fn post_receive(&self, core: &mut WorkerCore) -> Result<(), PostError> {
        let sge = [self.sge(0, LEN as u32)];
        let wr = RecvWr { wr_id: 0, sg_list: &sge };
        match self.srq {
            Some(srq) => core.post_srq_recv(srq, &wr),
            None => core.post_recv(self.qpn, &wr),
        }
    }

    fn post(&mut self, core: &mut WorkerCore) -> usize {
        let mut posted = 0;
        while self.received < RECEIVES && self.post_receive(core).is_ok() {
            self.received += 1;
            posted += 1;
        }
        if self.kind == Kind::Windows {
            return posted + self.post_window(core);
        }
        while self.in_flight < SENDS && self.post_next(core).is_ok() {
            self.next += 1;
            self.in_flight += 1;
            posted += 1;
        }
        posted
    }

    /// The next of the kind's operations.
    fn post_next(&mut self, core: &mut WorkerCore) -> Result<(), PostError> {
        let (remote_addr, rkey) = (RemoteAddr(self.remote.iova + LEN as u64), self.remote.rkey);
        let imm = Imm([1, 2, 3, 4]);
        let whole = LEN as u32;
        let (write, write_imm) =
            (SendOp::Write { remote_addr, rkey }, SendOp::WriteImm { remote_addr, rkey, imm });
        let (op, part, length) = match (self.kind, self.next % 3) {
            (Kind::Reliable | Kind::Unreliable, 0) | (Kind::Shared, 0 | 1) => (SendOp::Send, 2, whole),
            (Kind::Reliable, 1) | (Kind::Flags, 2) => (write, 2, whole),
            (Kind::Reliable, _) => (SendOp::Read { remote_addr, rkey }, 3, whole),
            (Kind::Unreliable, 1) | (Kind::Flags, 0) => (SendOp::SendImm(imm), 2, whole),
            (Kind::Unreliable | Kind::Shared, _) | (Kind::Flags, _) => (write_imm, 2, whole),
            (Kind::Datagrams, 0) => (SendOp::Send, 2, DATAGRAM),
            (Kind::Datagrams, _) => (SendOp::SendImm(imm), 2, DATAGRAM),
            (Kind::Atomics, 0) => (SendOp::CmpSwap { remote_addr, rkey, compare: 0, swap: 0 }, 3, 8),
            (Kind::Atomics, _) => (SendOp::FetchAdd { remote_addr, rkey, add: 1 }, 3, 8),
            (Kind::Windows, _) => return Err(PostError::BadOp),
        };
        let mut flags = SendFlags::SIGNALED;
        let sge = [self.sge(part, length)];
        let mut wr = SendWr { wr_id: self.next, op, sg_list: &sge, ..SendWr::default() };
        if self.kind == Kind::Flags {
            flags |= SendFlags::FENCE | SendFlags::SOLICITED;
            // One that nobody hears of, with its data inside.
            let quiet = SendWr { op: write, inline: &[7; 60], flags: SendFlags::INLINE, ..SendWr::default() };
            core.post_send(self.qpn, &quiet)?;
        }
        wr.flags = flags;
        wr.ud = self.dests.get((self.next % 2) as usize);
        core.post_send(self.qpn, &wr)
    }

    /// Binds the window if it is free; writes through the peer's and ends it, if there is one.
    fn post_window(&mut self, core: &mut WorkerCore) -> usize {
        let (addr, mr, qpn) = (self.local.iova, self.local.lkey, self.qpn);
        let (remote_addr, sge) = (RemoteAddr(self.remote.iova), [self.sge(2, 64)]);
        let Some(window) = &mut self.window else { return 0 };
        let mut posted = 0;
        let mut post = |op, sg_list: &[Sge]| {
            let wr = SendWr { op, sg_list, flags: SendFlags::SIGNALED, ..SendWr::default() };
            let taken = core.post_send(qpn, &wr).is_ok();
            posted += u32::from(taken);
            taken
        };
        if !window.busy {
            let rkey = Rkey((window.key.0 & !0xff) | (window.key.0.wrapping_add(1) & 0xff));
            let bind = SendOp::BindMw { rkey, mr, addr, len: LEN as u64, access: Access::REMOTE_WRITE };
            window.busy = post(bind, &[]);
            window.key = rkey;
        }
        let rkey = Rkey(window.theirs.swap(0, Ordering::AcqRel));
        if rkey.0 != 0 {
            post(SendOp::Write { remote_addr, rkey }, &sge);
            post(SendOp::SendInv { rkey }, &sge);
        }
        self.in_flight += posted;
        posted as usize
    }

    /// What a completion means for the window.
    fn window_news(&mut self, core: &mut WorkerCore, wc: &Wc) {
        let Some(window) = &mut self.window else { return };
        match wc.opcode {
            WcOpcode::BindMw => {
                window.rounds += 1;
                if window.rounds.is_multiple_of(4) {
                    let op = SendOp::LocalInv { rkey: window.key };
                    let wr = SendWr { op, flags: SendFlags::SIGNALED, ..SendWr::default() };
                    self.in_flight += u32::from(core.post_send(self.qpn, &wr).is_ok());
                } else {
                    window.own.store(window.key.0, Ordering::Release);
                }
            }
            WcOpcode::LocalInv => window.busy = false,
            WcOpcode::Recv if wc.invalidated == window.key => window.busy = false,
            _ => {}
        }
    }

    fn obey(&self) {
        let board = &self.board;
        if board.filter.load(Ordering::Relaxed) && board.listener.load(Ordering::Relaxed) == 0 {
            WATCHED.set(true);
            let fd = report_system_calls();
            board.listener.store(fd.wrapping_add(1) as u32, Ordering::Release);
            if fd < 0 {
                board.errors.fetch_add(1, Ordering::Relaxed);
                board.filter.store(false, Ordering::Relaxed);
            }
        }
        if board.misbehave.swap(false, Ordering::Relaxed) {
            drop(std::hint::black_box(Box::new(1u64)));
            // SAFETY: a system call without arguments or effects.
            unsafe { libc::getppid() };
        }
    }
}

impl Service<WorkerCore> for Traffic {
    fn poll(&mut self, core: &mut WorkerCore, _now_ns: u64) -> usize {
        self.board.polls.fetch_add(1, Ordering::Relaxed);
        self.obey();
        let mut out = [Wc::EMPTY; 16];
        let got = core.poll_cq(self.cq, &mut out).unwrap_or(0);
        for wc in &out[..got] {
            if wc.status != WcStatus::Success {
                self.board.errors.fetch_add(1, Ordering::Relaxed);
            }
            let counter = if wc.is_recv { &mut self.received } else { &mut self.in_flight };
            *counter = counter.saturating_sub(1);
            self.window_news(core, wc);
        }
        self.board.done.fetch_add(got as u64, Ordering::Relaxed);
        got + self.post(core)
    }
}

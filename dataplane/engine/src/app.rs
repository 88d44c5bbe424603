//! Queues for threads outside the workers: an application posts through single-producer rings, its worker posts inline.
//!
//! Owns, for each attached queue pair, a ring of sends and one of receives, for each shared receive queue of theirs a ring
//! of receives, and for each attached completion queue a ring of completions back. Invariant: one application thread on one side, one worker on the other; a ring that is full holds
//! its queue alone back, never another. An attachment without news costs its worker one load per pass. Called by an
//! application's thread ([`AppQueues`]) and by the worker's services stage ([`AppPort`]).
//!
//! Deviation from libibverbs: a request that only the worker can refuse (wrong state, wrong key) is accepted at post and
//! comes back as a completion with an error status; its `vendor_err` is [`REFUSED`] plus the place of the reason in
//! [`PostError`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ferroce_verbs::{
    CqId, PostError, QpHandle, QpInfo, Qpn, Queues, RecvWr, SendFlags, SendOp, SendWr, Sge, SrqId, UdDest,
    Wc, WcOpcode, WcStatus,
};

use crate::core::WorkerCore;
use crate::device::SoftDevice;
use crate::idle::Doorbell;

/// `vendor_err` of a completion that says that the worker refused a post: this plus the reason's number.
pub const REFUSED: u32 = 0x100;
/// Scatter/gather entries of a request.
pub(crate) const APP_SGE: usize = 16;
/// Inline bytes of a request.
pub(crate) const APP_INLINE: usize = 256;
/// Most requests in one ring.
const MAX_REQUESTS: u32 = 1024;
/// Completions in one ring.
const COMPLETIONS: usize = 1024;
/// Requests that one queue may post, and batches of completions that one queue may hand over, in one pass.
const BUDGET: usize = 32;

struct Request<T> {
    wr_id: u64,
    what: T,
    sges: [Sge; APP_SGE],
    used: u8,
}

struct SendPart {
    op: SendOp,
    flags: SendFlags,
    inline: [u8; APP_INLINE],
    inline_len: u16,
    ud: Option<UdDest>,
}

type SendRequest = Request<SendPart>;
type RecvRequest = Request<()>;

/// A worker's side of one queue pair.
struct QpPort {
    qpn: Qpn,
    sends: rtrb::Consumer<SendRequest>,
    recvs: rtrb::Consumer<RecvRequest>,
    /// Where a refused send, or receive, is reported.
    cqs: (usize, usize),
}

/// A worker's side of one shared receive queue.
struct SrqPort {
    id: SrqId,
    recvs: rtrb::Consumer<RecvRequest>,
    /// Where a refused receive is reported, and as whose.
    report: (usize, Qpn),
}

struct CqPort {
    id: CqId,
    out: rtrb::Producer<Wc>,
}

/// A worker's side of an attachment.
pub(crate) struct AppPort {
    pub id: u32,
    qps: Vec<QpPort>,
    srqs: Vec<SrqPort>,
    cqs: Vec<CqPort>,
    notify: rtrb::Consumer<(CqId, bool)>,
    news: Arc<AtomicU64>,
    seen: u64,
    /// Something was left in a ring in the last pass.
    left: bool,
    bell: Arc<Doorbell>,
}

/// A thread's own handle to some queue pairs and completion queues of one worker. Made by [`SoftDevice::attach`].
pub struct AppQueues {
    device: SoftDevice,
    worker: u8,
    id: u32,
    qps: Vec<AppQp>,
    srqs: Vec<AppSrq>,
    cqs: Vec<(CqId, rtrb::Consumer<Wc>)>,
    notify: rtrb::Producer<(CqId, bool)>,
    news: Arc<AtomicU64>,
    bell: Arc<Doorbell>,
    worker_bell: Arc<Doorbell>,
}

struct AppQp {
    qpn: Qpn,
    max_inline: usize,
    max_sge: (usize, usize),
    sends: rtrb::Producer<SendRequest>,
    recvs: rtrb::Producer<RecvRequest>,
}

struct AppSrq {
    id: SrqId,
    max_sge: usize,
    recvs: rtrb::Producer<RecvRequest>,
}

/// Makes both sides. `qps` are queue pairs whose completion queues are all in `cqs`.
pub(crate) fn pair(
    device: SoftDevice,
    worker: (u8, Arc<Doorbell>),
    id: u32,
    qps: &[QpInfo],
    cqs: &[CqId],
) -> std::io::Result<(Box<AppPort>, AppQueues)> {
    let bell = Arc::new(Doorbell::new()?);
    let news = Arc::new(AtomicU64::new(0));
    let place = |cq: CqId| cqs.iter().position(|c| *c == cq).unwrap_or(0);
    let (notify_in, notify) = rtrb::RingBuffer::new(cqs.len().max(1) * 2);
    let (mut inner, mut outer) = (Vec::new(), Vec::new());
    let (mut inner_srqs, mut outer_srqs) = (Vec::new(), Vec::new());
    for info in qps {
        let depth = |wr: u32| wr.clamp(1, MAX_REQUESTS) as usize;
        let (sends_in, sends) = rtrb::RingBuffer::new(depth(info.cap.max_send_wr));
        if let Some(id) = info.srq
            && !outer_srqs.iter().any(|srq: &AppSrq| srq.id == id)
        {
            let (recvs_in, recvs) = rtrb::RingBuffer::new(MAX_REQUESTS as usize);
            inner_srqs.push(SrqPort { id, recvs, report: (place(info.recv_cq), info.qpn) });
            outer_srqs.push(AppSrq { id, max_sge: info.cap.max_recv_sge as usize, recvs: recvs_in });
        }
        let (recvs_in, recvs) = rtrb::RingBuffer::new(depth(info.cap.max_recv_wr));
        inner.push(QpPort { qpn: info.qpn, sends, recvs, cqs: (place(info.send_cq), place(info.recv_cq)) });
        outer.push(AppQp {
            qpn: info.qpn,
            max_inline: info.cap.max_inline_data as usize,
            max_sge: (info.cap.max_send_sge as usize, info.cap.max_recv_sge as usize),
            sends: sends_in,
            recvs: recvs_in,
        });
    }
    let (cqs_in, cqs_out) = cqs
        .iter()
        .map(|id| {
            let (out, completions) = rtrb::RingBuffer::new(COMPLETIONS);
            (CqPort { id: *id, out }, (*id, completions))
        })
        .unzip();
    let port = Box::new(AppPort {
        id,
        qps: inner,
        srqs: inner_srqs,
        cqs: cqs_in,
        notify,
        news: news.clone(),
        seen: 0,
        left: true,
        bell: bell.clone(),
    });
    let (worker, worker_bell) = worker;
    let queues = AppQueues {
        device,
        worker,
        id,
        qps: outer,
        srqs: outer_srqs,
        cqs: cqs_out,
        notify: notify_in,
        news,
        bell,
        worker_bell,
    };
    Ok((port, queues))
}

fn copy_sges(sg_list: &[Sge], max: usize) -> Result<([Sge; APP_SGE], u8), PostError> {
    if sg_list.len() > max.min(APP_SGE) {
        return Err(PostError::TooManySge);
    }
    let mut sges = [Sge::default(); APP_SGE];
    sges.iter_mut().zip(sg_list).for_each(|(to, from)| *to = *from);
    Ok((sges, sg_list.len() as u8))
}

impl AppQueues {
    /// The worker that does the work.
    pub fn worker(&self) -> u8 {
        self.worker
    }

    fn qp(&mut self, qpn: Qpn) -> Result<&mut AppQp, PostError> {
        self.qps.iter_mut().find(|qp| qp.qpn == qpn).ok_or(PostError::NoSuchQueue)
    }

    /// Tells the worker; a system call only if it sleeps.
    fn tell(&self) {
        self.news.store(self.news.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
        self.worker_bell.ring();
    }

    fn completions_wait(&self) -> bool {
        self.cqs.iter().any(|(_, ring)| !ring.is_empty())
    }

    /// Sleeps until there is a completion to poll, at most `timeout`. True if there is one.
    pub fn wait(&self, timeout: Duration) -> bool {
        self.bell.arm();
        let quiet = !self.completions_wait();
        if quiet {
            self.bell.sleep(&[], u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        }
        self.bell.disarm(quiet);
        self.completions_wait()
    }
}

impl Queues for AppQueues {
    fn post_send(&mut self, qp: QpHandle, wr: &SendWr<'_>) -> Result<(), PostError> {
        let app = self.qp(qp)?;
        let (sges, used) = copy_sges(wr.sg_list, app.max_sge.0)?;
        let mut inline = [0; APP_INLINE];
        let len = if wr.flags.contains(SendFlags::INLINE) { wr.inline.len() } else { 0 };
        if len > app.max_inline.min(APP_INLINE) {
            return Err(PostError::TooLong);
        }
        inline.iter_mut().zip(wr.inline).take(len).for_each(|(to, from)| *to = *from);
        let what =
            SendPart { op: wr.op, flags: wr.flags, inline, inline_len: len as u16, ud: wr.ud.copied() };
        app.sends.push(Request { wr_id: wr.wr_id, what, sges, used }).map_err(|_| PostError::Full)?;
        self.tell();
        Ok(())
    }

    fn post_recv(&mut self, qp: QpHandle, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let app = self.qp(qp)?;
        let (sges, used) = copy_sges(wr.sg_list, app.max_sge.1)?;
        app.recvs.push(Request { wr_id: wr.wr_id, what: (), sges, used }).map_err(|_| PostError::Full)?;
        self.tell();
        Ok(())
    }

    fn post_srq_recv(&mut self, srq: SrqId, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let app = self.srqs.iter_mut().find(|app| app.id == srq).ok_or(PostError::NoSuchQueue)?;
        let (sges, used) = copy_sges(wr.sg_list, app.max_sge)?;
        app.recvs.push(Request { wr_id: wr.wr_id, what: (), sges, used }).map_err(|_| PostError::Full)?;
        self.tell();
        Ok(())
    }

    fn poll_cq(&mut self, cq: CqId, out: &mut [Wc]) -> Result<usize, PostError> {
        let (_, ring) = self.cqs.iter_mut().find(|(id, _)| *id == cq).ok_or(PostError::NoSuchQueue)?;
        let full = ring.slots() == ring.buffer().capacity();
        let mut got = 0;
        for wc in out.iter_mut() {
            let Ok(next) = ring.pop() else { break };
            *wc = next;
            got += 1;
        }
        if full && got != 0 {
            // The worker may hold completions back for want of room.
            self.tell();
        }
        Ok(got)
    }

    fn req_notify(&mut self, cq: CqId, solicited_only: bool) -> Result<(), PostError> {
        if !self.cqs.iter().any(|(id, _)| *id == cq) {
            return Err(PostError::NoSuchQueue);
        }
        self.notify.push((cq, solicited_only)).map_err(|_| PostError::Full)?;
        self.tell();
        Ok(())
    }
}

impl Drop for AppQueues {
    fn drop(&mut self) {
        self.device.detach(self.worker, self.id);
    }
}

/// A completion that tells of a refused post.
fn refusal(qpn: Qpn, wr_id: u64, why: PostError, opcode: WcOpcode, is_recv: bool) -> Wc {
    let (status, code) = match why {
        PostError::Full => (WcStatus::GeneralErr, 0),
        PostError::NoSuchQueue => (WcStatus::LocQpOpErr, 1),
        PostError::BadState => (WcStatus::LocQpOpErr, 2),
        PostError::TooManySge => (WcStatus::LocQpOpErr, 3),
        PostError::TooLong => (WcStatus::LocLenErr, 4),
        PostError::BadKey => (WcStatus::LocProtErr, 5),
        PostError::BadOp => (WcStatus::LocQpOpErr, 6),
        PostError::BadAh => (WcStatus::LocQpOpErr, 7),
        PostError::BadLength => (WcStatus::LocLenErr, 8),
    };
    Wc { wr_id, status, opcode, qpn, vendor_err: REFUSED + code, is_recv, solicited: true, ..Wc::EMPTY }
}

/// Posts what waits in one ring; true if something is left in it.
fn drain<T>(
    ring: &mut rtrb::Consumer<Request<T>>,
    report: Option<&mut CqPort>,
    work: &mut usize,
    mut post: impl FnMut(&Request<T>) -> Result<(), PostError>,
    refused: impl Fn(&Request<T>, PostError) -> Wc,
) -> bool {
    let Some(report) = report else { return false };
    for _ in 0..BUDGET {
        let Ok(request) = ring.peek() else { return false };
        // A refusal needs a place in the completions; without one nothing is tried.
        if report.out.is_full() {
            return true;
        }
        match post(request) {
            Ok(()) => {}
            Err(PostError::Full) => return true,
            Err(why) => {
                let _ = report.out.push(refused(request, why));
            }
        }
        let _ = ring.pop();
        *work += 1;
    }
    !ring.is_empty()
}

impl AppPort {
    /// One pass: posts what the application handed over, hands over what completed.
    #[inline]
    pub fn poll(&mut self, core: &mut WorkerCore) -> usize {
        let mut work = 0;
        let news = self.news.load(Ordering::Acquire);
        if news != self.seen || self.left {
            self.seen = news;
            self.left = self.post(core, &mut work);
        }
        let mut handed = 0;
        for cq in &mut self.cqs {
            if core.cqs.by_id(cq.id).is_none_or(|cq| cq.is_empty()) {
                continue;
            }
            let room = cq.out.slots().min(BUDGET);
            let mut batch = [Wc::EMPTY; BUDGET];
            let got = core.poll_cq(cq.id, batch.get_mut(..room).unwrap_or(&mut [])).unwrap_or(0);
            for wc in batch.iter().take(got) {
                let _ = cq.out.push(*wc);
            }
            handed += got;
        }
        if handed + work != 0 {
            self.bell.ring();
        }
        work + handed
    }

    fn post(&mut self, core: &mut WorkerCore, work: &mut usize) -> bool {
        let mut left = false;
        while let Ok((cq, solicited_only)) = self.notify.pop() {
            let _ = core.req_notify(cq, solicited_only);
            *work += 1;
        }
        for srq in &mut self.srqs {
            let (id, (cq, qpn)) = (srq.id, srq.report);
            let recvs = |request: &RecvRequest| {
                let sg_list = request.sges.get(..request.used as usize).unwrap_or(&[]);
                core.post_srq_recv(id, &RecvWr { wr_id: request.wr_id, sg_list })
            };
            left |= drain(&mut srq.recvs, self.cqs.get_mut(cq), work, recvs, |request, why| {
                refusal(qpn, request.wr_id, why, WcOpcode::Recv, true)
            });
        }
        for qp in &mut self.qps {
            let qpn = qp.qpn;
            let recvs = |request: &RecvRequest| {
                let sg_list = request.sges.get(..request.used as usize).unwrap_or(&[]);
                core.post_recv(qpn, &RecvWr { wr_id: request.wr_id, sg_list })
            };
            left |= drain(&mut qp.recvs, self.cqs.get_mut(qp.cqs.1), work, recvs, |request, why| {
                refusal(qpn, request.wr_id, why, WcOpcode::Recv, true)
            });
            let sends = |request: &SendRequest| {
                let sg_list = request.sges.get(..request.used as usize).unwrap_or(&[]);
                let inline = request.what.inline.get(..request.what.inline_len as usize).unwrap_or(&[]);
                let (op, flags) = (request.what.op, request.what.flags);
                let ud = request.what.ud.as_ref();
                core.post_send(qpn, &SendWr { wr_id: request.wr_id, op, sg_list, inline, flags, ud })
            };
            left |= drain(&mut qp.sends, self.cqs.get_mut(qp.cqs.0), work, sends, |request, why| {
                refusal(qpn, request.wr_id, why, opcode(request.what.op), false)
            });
        }
        left
    }

    /// True if the application handed over something since the last pass.
    pub fn news(&self) -> bool {
        self.news.load(Ordering::Acquire) != self.seen
    }

    /// True if something is left that only time, or a completion, can move.
    pub fn left(&self) -> bool {
        self.left
    }
}

const fn opcode(op: SendOp) -> WcOpcode {
    match op {
        SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv { .. } => WcOpcode::Send,
        SendOp::Write { .. } | SendOp::WriteImm { .. } => WcOpcode::RdmaWrite,
        SendOp::Read { .. } => WcOpcode::RdmaRead,
        SendOp::CmpSwap { .. } => WcOpcode::CompSwap,
        SendOp::FetchAdd { .. } => WcOpcode::FetchAdd,
        SendOp::BindMw { .. } => WcOpcode::BindMw,
        SendOp::LocalInv { .. } => WcOpcode::LocalInv,
    }
}

//! What the cases work with: objects that are remembered and destroyed after the case, connected queue pairs, posting,
//! and waiting.

use alloc::format;
use alloc::vec::Vec;

use super::{Block as _, Buffer, Deviation, End, Failure, Harness, Node, Outcome, PATIENCE, Params};
use crate::{
    Access, AddressVector, Ah, AsyncEvent, ChannelId, ClassId, CqId, Device, Gid, InitAttrs, Lkey, PdId,
    PostError, Psn, Qkey, QpInitAttr, QpModify, QpState, QpType, Qpn, Queues, RecvWr, Rkey, RtrAttrs,
    RtsAttrs, SendFlags, SendOp, SendWr, Sge, SrqId, SrqInitAttr, VerbsError, Wc, WcStatus,
};

type BlockOf<H> = <<H as Harness>::Node as Node>::Block;
type DeviceOf<H> = <<H as Harness>::Node as Node>::Device;

/// Every right that a peer can use, and writing oneself.
pub(super) const ALL: Access =
    Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);

/// First PSNs of the two ends; one is near the wrap.
const PSN_A: u32 = 0xff_fff0;
const PSN_B: u32 = 0x12_3456;
/// Queue key of the datagram cases.
pub(super) const QKEY: Qkey = Qkey(0x1357_9bdf);

/// A queue pair with its queues.
#[derive(Clone, Copy, Debug)]
pub struct Side {
    /// Whose it is.
    pub end: End,
    /// The queue pair.
    pub qpn: Qpn,
    /// Completions of sends.
    pub scq: CqId,
    /// Completions of receives.
    pub rcq: CqId,
    /// Protection domain.
    pub pd: PdId,
}

/// What a case made: destroyed after it, in this order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Made {
    Member(Qpn, Gid),
    Qp(Qpn),
    Ah(Ah),
    Window(u8, Rkey),
    Region(Lkey),
    Srq(SrqId),
    Cq(CqId),
    Channel(ChannelId),
    Pd(PdId),
}

impl Made {
    const fn order(&self) -> u8 {
        match self {
            Made::Member(..) => 0,
            Made::Qp(_) => 1,
            Made::Ah(_) => 2,
            Made::Window(..) => 3,
            Made::Region(_) => 4,
            Made::Srq(_) => 5,
            Made::Cq(_) => 6,
            Made::Channel(_) => 7,
            Made::Pd(_) => 8,
        }
    }
}

/// What a case works with.
pub struct Bench<'h, H: Harness> {
    /// The harness.
    pub harness: &'h mut H,
    made: Vec<(End, Made)>,
    met: Vec<Deviation>,
    /// Statuses of completions, each once.
    statuses: Vec<WcStatus>,
}

impl<'h, H: Harness> Bench<'h, H> {
    pub(super) fn new(harness: &'h mut H) -> Self {
        for end in [End::A, End::B] {
            // News of earlier cases.
            while harness.node(end).async_event().is_some() {}
        }
        Bench { harness, made: Vec::new(), met: Vec::new(), statuses: Vec::new() }
    }

    /// Destroys what the case made, which must be possible; also gives the deviations that it met and the statuses that
    /// it saw.
    pub(super) fn sweep(mut self) -> (Outcome, Vec<Deviation>, Vec<WcStatus>) {
        let mut made = core::mem::take(&mut self.made);
        made.sort_by_key(|(_, what)| what.order());
        let mut outcome = Ok(());
        for (end, what) in made {
            let device = self.device(end);
            let gone = match what {
                Made::Member(qpn, group) => device.detach_mcast(qpn, group),
                Made::Qp(qpn) => device.destroy_qp(qpn),
                Made::Ah(ah) => device.destroy_ah(&ah),
                Made::Window(worker, rkey) => device.dealloc_mw(worker, rkey),
                Made::Region(lkey) => device.dereg_mr(lkey),
                Made::Srq(srq) => device.destroy_srq(srq),
                Made::Cq(cq) => device.destroy_cq(cq),
                Made::Channel(channel) => device.destroy_comp_channel(channel),
                Made::Pd(pd) => device.dealloc_pd(pd),
            };
            outcome = outcome
                .and(gone.map_err(|why| Failure::new(format!("after the case, {what:?} of {end:?}: {why}"))));
        }
        (outcome, self.met, self.statuses)
    }

    /// Says whether a deviation was met here. Fails if the harness says otherwise.
    #[track_caller]
    pub fn deviation(&mut self, which: Deviation, met: bool) -> Outcome {
        match (met, self.harness.deviates(which)) {
            (true, Some(_)) => self.met.push(which),
            (false, None) => {}
            (true, None) => return Err(Failure::new(format!("a deviation:{}", which.text()))),
            (false, Some(_)) => {
                return Err(Failure::new(format!("declared as a deviation, but is none:{}", which.text())));
            }
        }
        Ok(())
    }

    /// A device.
    pub fn device(&mut self, end: End) -> &DeviceOf<H> {
        self.harness.node(end).device()
    }

    fn keep(&mut self, end: End, what: Made) {
        self.made.push((end, what));
    }

    /// The case destroyed it itself.
    fn forget(&mut self, end: End, what: Made) {
        self.made.retain(|made| *made != (end, what));
    }

    /// A protection domain.
    pub fn pd(&mut self, end: End) -> Outcome<PdId> {
        let pd = self.device(end).alloc_pd()?;
        self.keep(end, Made::Pd(pd));
        Ok(pd)
    }

    /// A completion queue.
    pub fn cq(&mut self, end: End, cqe: u32) -> Outcome<CqId> {
        let worker = self.harness.node(end).worker();
        let cq = self.device(end).create_cq(worker, cqe)?;
        self.keep(end, Made::Cq(cq));
        Ok(cq)
    }

    /// A completion queue with a channel.
    pub fn cq_on(&mut self, end: End, cqe: u32) -> Outcome<(CqId, ChannelId)> {
        let worker = self.harness.node(end).worker();
        let channel = self.device(end).create_comp_channel()?;
        self.keep(end, Made::Channel(channel));
        let cq = self.device(end).create_cq_on(worker, cqe, channel)?;
        self.keep(end, Made::Cq(cq));
        Ok((cq, channel))
    }

    /// A shared receive queue.
    pub fn srq(&mut self, end: End, attr: &SrqInitAttr) -> Outcome<SrqId> {
        let worker = self.harness.node(end).worker();
        let srq = self.device(end).create_srq(worker, attr)?;
        self.keep(end, Made::Srq(srq));
        Ok(srq)
    }

    /// A window.
    pub fn window(&mut self, side: Side) -> Outcome<Rkey> {
        let worker = self.harness.node(side.end).worker();
        let rkey = self.device(side.end).alloc_mw(worker, side.pd)?;
        self.keep(side.end, Made::Window(worker, rkey));
        Ok(rkey)
    }

    /// Frees a window.
    pub fn free_window(&mut self, end: End, rkey: Rkey) -> Outcome {
        let worker = self.harness.node(end).worker();
        self.device(end).dealloc_mw(worker, rkey)?;
        self.made.retain(|(_, made)| !matches!(made, Made::Window(_, key) if key.0 >> 8 == rkey.0 >> 8));
        Ok(())
    }

    /// A queue pair in RESET with queues of its own, in a new protection domain.
    pub fn qp(&mut self, end: End, params: Params) -> Outcome<Side> {
        let pd = self.pd(end)?;
        self.qp_in(end, pd, params)
    }

    /// The same in a given protection domain.
    pub fn qp_in(&mut self, end: End, pd: PdId, params: Params) -> Outcome<Side> {
        let (scq, rcq) = (self.cq(end, params.cqe)?, self.cq(end, params.cqe)?);
        self.qp_with(end, pd, scq, rcq, params)
    }

    /// The same with given completion queues.
    pub fn qp_with(&mut self, end: End, pd: PdId, scq: CqId, rcq: CqId, params: Params) -> Outcome<Side> {
        let attr = init_attr(pd, scq, rcq, params);
        let qpn = self.device(end).create_qp(&attr)?;
        self.keep(end, Made::Qp(qpn));
        Ok(Side { end, qpn, scq, rcq, pd })
    }

    /// Whether a type of queue pair can be made.
    pub fn try_qp(&mut self, end: End, qp_type: QpType) -> Outcome<Result<Qpn, VerbsError>> {
        let pd = self.pd(end)?;
        let cq = self.cq(end, 16)?;
        let attr = init_attr(pd, cq, cq, Params { qp_type, ..Params::default() });
        let made = self.device(end).create_qp(&attr);
        if let Ok(qpn) = made {
            self.keep(end, Made::Qp(qpn));
        }
        Ok(made)
    }

    /// Destroys a queue pair within the case.
    pub fn destroy(&mut self, side: Side) -> Outcome {
        self.device(side.end).destroy_qp(side.qpn)?;
        self.forget(side.end, Made::Qp(side.qpn));
        Ok(())
    }

    /// Makes a transition.
    #[track_caller]
    pub fn modify(&mut self, side: Side, modify: &QpModify) -> Outcome {
        Ok(self.device(side.end).modify_qp(side.qpn, modify)?)
    }

    /// RESET to RTS, towards `peer`.
    pub fn connect(&mut self, side: Side, peer: Side, params: Params) -> Outcome {
        for step in self.steps(side, peer, params) {
            self.modify(side, &step)?;
        }
        Ok(())
    }

    /// The transitions from RESET to RTS.
    pub fn steps(&mut self, side: Side, peer: Side, params: Params) -> [QpModify; 3] {
        let dgid = self.harness.node(peer.end).gid();
        let av = self.harness.node(side.end).path(dgid, side.qpn, peer.qpn);
        let (sq, rq) = match side.end {
            End::A => (PSN_A, PSN_B),
            End::B => (PSN_B, PSN_A),
        };
        [to_init(params), to_rtr(av, peer.qpn, rq, params), to_rts(sq, params)]
    }

    /// Two queue pairs, connected.
    pub fn pair(&mut self, params: Params) -> Outcome<(Side, Side)> {
        self.pair_of(params, params)
    }

    /// Two queue pairs, connected, each with parameters of its own.
    pub fn pair_of(&mut self, a: Params, b: Params) -> Outcome<(Side, Side)> {
        let (side_a, side_b) = (self.qp(End::A, a)?, self.qp(End::B, b)?);
        self.connect(side_a, side_b, a)?;
        self.connect(side_b, side_a, b)?;
        Ok((side_a, side_b))
    }

    /// An address handle from `side` to `peer`'s device, or to a group.
    pub fn ah(&mut self, side: Side, dgid: Gid, dest: Qpn) -> Outcome<Ah> {
        let av = self.harness.node(side.end).path(dgid, side.qpn, dest);
        let ah = self.device(side.end).create_ah(side.pd, &av)?;
        self.keep(side.end, Made::Ah(ah));
        Ok(ah)
    }

    /// Joins a group.
    pub fn join(&mut self, side: Side, group: Gid) -> Outcome {
        self.device(side.end).attach_mcast(side.qpn, group)?;
        self.keep(side.end, Made::Member(side.qpn, group));
        Ok(())
    }

    /// Leaves it.
    pub fn leave(&mut self, side: Side, group: Gid) -> Outcome {
        self.device(side.end).detach_mcast(side.qpn, group)?;
        self.forget(side.end, Made::Member(side.qpn, group));
        Ok(())
    }

    /// Registered memory in a side's domain with every right.
    pub fn buffer(&mut self, side: Side, bytes: usize) -> Outcome<Buffer<BlockOf<H>>> {
        self.buffer_in(side.end, side.pd, bytes, ALL)
    }

    /// Registered memory.
    pub fn buffer_in(
        &mut self,
        end: End,
        pd: PdId,
        bytes: usize,
        access: Access,
    ) -> Outcome<Buffer<BlockOf<H>>> {
        let block = self.harness.node(end).block(bytes.max(1));
        let keys = self.device(end).reg_mr(pd, block.memory(), access)?;
        self.keep(end, Made::Region(keys.lkey));
        Ok(Buffer { end, keys, block })
    }

    /// Deregisters, and says what came of it.
    pub fn deregister(&mut self, end: End, lkey: Lkey) -> Result<(), VerbsError> {
        let gone = self.device(end).dereg_mr(lkey);
        if gone.is_ok() {
            self.forget(end, Made::Region(lkey));
        }
        gone
    }

    /// Posts any send.
    pub fn try_send(&mut self, side: Side, wr: &SendWr<'_>) -> Result<(), PostError> {
        self.harness.node(side.end).queues().post_send(side.qpn, wr)
    }

    /// Posts a signalled send that must be taken.
    #[track_caller]
    pub fn send(&mut self, side: Side, wr_id: u64, op: SendOp, sg_list: &[Sge]) -> Outcome {
        let wr = SendWr { wr_id, op, sg_list, flags: SendFlags::SIGNALED, ..SendWr::default() };
        Ok(self.try_send(side, &wr)?)
    }

    /// Posts any receive.
    pub fn try_recv(&mut self, side: Side, wr_id: u64, sg_list: &[Sge]) -> Result<(), PostError> {
        self.harness.node(side.end).queues().post_recv(side.qpn, &RecvWr { wr_id, sg_list })
    }

    /// Posts a receive that must be taken.
    #[track_caller]
    pub fn recv(&mut self, side: Side, wr_id: u64, sg_list: &[Sge]) -> Outcome {
        Ok(self.try_recv(side, wr_id, sg_list)?)
    }

    /// Posts a receive to a shared queue.
    pub fn srq_recv(&mut self, end: End, srq: SrqId, wr_id: u64, sg_list: &[Sge]) -> Result<(), PostError> {
        self.harness.node(end).queues().post_srq_recv(srq, &RecvWr { wr_id, sg_list })
    }

    /// Completions that are there now, at most 64.
    #[track_caller]
    pub fn poll(&mut self, end: End, cq: CqId) -> Outcome<Vec<Wc>> {
        let mut out = [Wc::EMPTY; 64];
        let got = self.harness.node(end).queues().poll_cq(cq, &mut out)?;
        let found = out.get(..got).unwrap_or(&[]);
        for wc in found {
            if !self.statuses.contains(&wc.status) {
                self.statuses.push(wc.status);
            }
        }
        Ok(found.to_vec())
    }

    /// Waits until `done` gives something.
    #[track_caller]
    pub fn until<T>(
        &mut self,
        what: &str,
        mut done: impl FnMut(&mut Self) -> Outcome<Option<T>>,
    ) -> Outcome<T> {
        let end = self.harness.now() + PATIENCE;
        let late = Failure::new(format!("waited in vain for {what}"));
        loop {
            if let Some(value) = done(self)? {
                return Ok(value);
            }
            if self.harness.now() >= end {
                return Err(late);
            }
            self.harness.pause();
        }
    }

    /// Exactly `n` completions.
    #[track_caller]
    pub fn take(&mut self, end: End, cq: CqId, n: usize) -> Outcome<Vec<Wc>> {
        let mut all = Vec::new();
        let mut found = Vec::new();
        let waited = self.until(&format!("{n} completions of {end:?}"), |bench| {
            all.extend(bench.poll(end, cq)?);
            found.clone_from(&all);
            Ok((all.len() >= n).then_some(()))
        });
        waited.map_err(|Failure(why)| Failure(format!("{why}; there are {found:?}")))?;
        super::same("completions", all.len(), n)?;
        Ok(all)
    }

    /// The completion of one send.
    #[track_caller]
    pub fn sent(&mut self, side: Side) -> Outcome<Wc> {
        Ok(self.take(side.end, side.scq, 1)?.first().copied().unwrap_or(Wc::EMPTY))
    }

    /// The completion of one receive.
    #[track_caller]
    pub fn received(&mut self, side: Side) -> Outcome<Wc> {
        Ok(self.take(side.end, side.rcq, 1)?.first().copied().unwrap_or(Wc::EMPTY))
    }

    /// The completion of one send, which must have this identity and status.
    #[track_caller]
    pub fn sent_as(&mut self, side: Side, wr_id: u64, status: WcStatus) -> Outcome<Wc> {
        let wc = self.sent(side)?;
        super::same(
            "send completion",
            (wc.wr_id, wc.status, wc.qpn, wc.is_recv),
            (wr_id, status, side.qpn, false),
        )?;
        Ok(wc)
    }

    /// The completion of one receive, which must have this identity and status.
    #[track_caller]
    pub fn received_as(&mut self, side: Side, wr_id: u64, status: WcStatus) -> Outcome<Wc> {
        let wc = self.received(side)?;
        super::same(
            "receive completion",
            (wc.wr_id, wc.status, wc.qpn, wc.is_recv),
            (wr_id, status, side.qpn, true),
        )?;
        Ok(wc)
    }

    /// Nothing is to be polled now.
    #[track_caller]
    pub fn empty(&mut self, end: End, cq: CqId) -> Outcome {
        super::same("completions", self.poll(end, cq)?, Vec::new())
    }

    /// Waits for an asynchronous event; others are passed over.
    #[track_caller]
    pub fn event(&mut self, end: End, wanted: AsyncEvent) -> Outcome {
        let mut others = Vec::new();
        let waited = self.until(&format!("{wanted:?} of {end:?}"), |bench| {
            while let Some(event) = bench.harness.node(end).async_event() {
                if event == wanted {
                    return Ok(Some(()));
                }
                others.push(event);
            }
            Ok(None)
        });
        waited.map_err(|Failure(why)| Failure(format!("{why}; there were others")))
    }

    /// Events that are there now.
    pub fn events(&mut self, end: End) -> Vec<AsyncEvent> {
        core::iter::from_fn(|| self.harness.node(end).async_event()).collect()
    }

    /// Waits until a queue pair is in a state.
    #[track_caller]
    pub fn state(&mut self, side: Side, wanted: QpState) -> Outcome {
        self.until(&format!("{:?} of {:?} in {wanted:?}", side.qpn, side.end), |bench| {
            Ok((bench.device(side.end).query_qp(side.qpn)?.state == wanted).then_some(()))
        })
    }

    /// A WRITE from `from` arrives: both queue pairs work.
    #[track_caller]
    pub fn works(&mut self, from: Side, to: Side) -> Outcome {
        let (src, dst) = (self.buffer(from, 8)?, self.buffer(to, 8)?);
        src.put(0, &[0xa5; 8]);
        self.send(from, 0xface, dst.write_op(0), &[src.sge(0, 8)])?;
        self.sent_as(from, 0xface, WcStatus::Success)?;
        // On an unreliable connection it has only left.
        self.until("the WRITE to arrive", |_| Ok((dst.get(0, 8) == [0xa5; 8]).then_some(())))
    }
}

pub(super) fn init_attr(pd: PdId, send_cq: CqId, recv_cq: CqId, params: Params) -> QpInitAttr {
    let Params { qp_type, cap, sq_sig_all, srq, .. } = params;
    QpInitAttr { qp_type, pd, send_cq, recv_cq, cap, sq_sig_all, srq }
}

pub(super) fn to_init(params: Params) -> QpModify {
    let access = if params.qp_type == QpType::Ud { Access::empty() } else { params.access };
    QpModify::ToInit(InitAttrs { pkey: params.pkey, access, qkey: QKEY })
}

fn to_rtr(av: AddressVector, dest_qpn: Qpn, rq_psn: u32, params: Params) -> QpModify {
    QpModify::ToRtr(RtrAttrs {
        av,
        class: ClassId(0),
        path_mtu: params.mtu,
        dest_qpn,
        rq_psn: Psn::new(rq_psn),
        max_dest_rd_atomic: params.rd_atomic,
        min_rnr_timer: 1,
    })
}

fn to_rts(sq_psn: u32, params: Params) -> QpModify {
    QpModify::ToRts(RtsAttrs {
        sq_psn: Psn::new(sq_psn),
        timeout: params.timeout,
        retry_cnt: params.retry_cnt,
        rnr_retry: params.rnr_retry,
        max_rd_atomic: params.rd_atomic,
    })
}

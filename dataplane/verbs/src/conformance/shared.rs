//! Shared receive queues.

use alloc::string::ToString;
use alloc::vec::Vec;

use super::bench::{Bench, Side, init_attr};
use super::{End, Harness, Node, Outcome, Params, cases, holds, same};
use crate::error::VerbsErrorKind;
use crate::{
    AsyncEvent, Device, PdId, PostError, QpModify, QpState, SendOp, SrqId, SrqInitAttr, SrqModify, WcOpcode,
    WcStatus,
};

cases! {
    two_queue_pairs_share_receives [Srq];
    a_sender_waits_for_a_shared_receive [Srq];
    write_with_immediate_takes_a_shared_receive [Srq];
    the_limit_gives_one_event [Srq];
    a_shared_queue_has_room_for_what_was_asked [Srq];
    a_queue_pair_in_error_takes_no_more [Srq];
    a_shared_queue_in_use_is_busy [Srq];
    a_shared_queue_of_another_worker_is_named [Srq, TwoWorkers];
}

fn attr(pd: PdId, limit: u32) -> SrqInitAttr {
    SrqInitAttr { pd, max_wr: 16, max_sge: 2, limit }
}

/// B's end shares: two connected pairs whose responders take receives from one queue.
fn sharing<H: Harness>(bench: &mut Bench<'_, H>, limit: u32) -> Outcome<(SrqId, [(Side, Side); 2])> {
    let pd = bench.pd(End::B)?;
    let srq = bench.srq(End::B, &attr(pd, limit))?;
    let with_srq = Params { srq: Some(srq), ..Params::default() };
    let rcq = bench.cq(End::B, 64)?;
    let mut pair = || -> Outcome<(Side, Side)> {
        let (a, scq) = (bench.qp(End::A, Params::default())?, bench.cq(End::B, 64)?);
        let b = bench.qp_with(End::B, pd, scq, rcq, with_srq)?;
        bench.connect(a, b, Params::default())?;
        bench.connect(b, a, with_srq)?;
        Ok((a, b))
    };
    let pairs = [pair()?, pair()?];
    Ok((srq, pairs))
}

fn two_queue_pairs_share_receives<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (srq, pairs) = sharing(bench, 0)?;
    let [(a0, b0), (a1, _)] = pairs;
    let dst = bench.buffer(b0, 6000)?;
    let sources = [bench.buffer(a0, 3000)?, bench.buffer(a1, 3000)?];
    for id in 0..6usize {
        bench.srq_recv(End::B, srq, id as u64, &[dst.sge(id * 1000, 500), dst.sge(id * 1000 + 500, 500)])?;
    }
    same("posted", bench.device(End::B).query_srq(srq)?.posted, 6)?;
    for id in 0..6u64 {
        let which = (id % 2) as usize;
        let ((a, b), src) = (pairs[which], &sources[which]);
        src.fill(0, 900, id);
        bench.send(a, id, SendOp::Send, &[src.sge(0, 900)])?;
        bench.sent_as(a, id, WcStatus::Success)?;
        let wc = bench.received(b)?;
        same(
            "of the receive",
            (wc.status, wc.wr_id, wc.qpn, wc.byte_len),
            (WcStatus::Success, id, b.qpn, 900),
        )?;
        dst.check("the message", id as usize * 1000, 900, id)?;
    }
    same("posted", bench.device(End::B).query_srq(srq)?.posted, 0)?;
    // Its own queue is none.
    holds("a receive to the queue pair is refused", bench.try_recv(b0, 1, &[dst.sge(0, 8)]).is_err())?;
    same("told", bench.device(End::B).query_qp(b0.qpn)?.srq, Some(srq))
}

fn a_sender_waits_for_a_shared_receive<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (srq, [(a0, b0), (a1, b1)]) = sharing(bench, 0)?;
    let dst = bench.buffer(b0, 16)?;
    bench.send(a0, 1, SendOp::Send, &[])?;
    bench.send(a1, 2, SendOp::Send, &[])?;
    for _ in 0..10 {
        bench.harness.pause();
    }
    bench.empty(End::A, a0.scq)?;
    bench.empty(End::A, a1.scq)?;
    for id in 0..2 {
        bench.srq_recv(End::B, srq, id, &[dst.sge(0, 8)])?;
    }
    bench.sent_as(a0, 1, WcStatus::Success)?;
    bench.sent_as(a1, 2, WcStatus::Success)?;
    let mut qpns: Vec<_> = bench.take(End::B, b0.rcq, 2)?.iter().map(|wc| wc.qpn.get()).collect();
    let mut wanted = [b0.qpn.get(), b1.qpn.get()].to_vec();
    qpns.sort_unstable();
    wanted.sort_unstable();
    same("queue pairs", qpns, wanted)
}

fn write_with_immediate_takes_a_shared_receive<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (srq, [(a, b), _]) = sharing(bench, 0)?;
    let (src, dst) = (bench.buffer(a, 3000)?, bench.buffer(b, 3000)?);
    src.fill(0, 3000, 5);
    bench.srq_recv(End::B, srq, 9, &[])?;
    let imm = crate::Imm([1, 2, 3, 4]);
    let op = SendOp::WriteImm { remote_addr: dst.remote(0), rkey: dst.keys.rkey, imm };
    bench.send(a, 1, op, &[src.sge(0, 3000)])?;
    bench.sent_as(a, 1, WcStatus::Success)?;
    let wc = bench.received_as(b, 9, WcStatus::Success)?;
    same("of the receive", (wc.opcode, wc.byte_len, wc.imm), (WcOpcode::RecvRdmaWithImm, 3000, imm))?;
    dst.check("WRITE with immediate", 0, 3000, 5)
}

fn the_limit_gives_one_event<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (srq, [(a, b), _]) = sharing(bench, 0)?;
    let one = |bench: &mut Bench<'_, H>| -> Outcome {
        bench.send(a, 1, SendOp::Send, &[])?;
        bench.sent_as(a, 1, WcStatus::Success)?;
        bench.received(b).map(|_| ())
    };
    for id in 0..5 {
        bench.srq_recv(End::B, srq, id, &[])?;
    }
    bench.device(End::B).modify_srq(srq, &SrqModify::Limit(3))?;
    same("the limit", bench.device(End::B).query_srq(srq)?.limit, 3)?;
    // Four and three are left: not fewer than three.
    one(bench)?;
    one(bench)?;
    holds("no event yet", !bench.events(End::B).contains(&AsyncEvent::SrqLimitReached(srq)))?;
    one(bench)?;
    bench.event(End::B, AsyncEvent::SrqLimitReached(srq))?;
    same("disarmed", bench.device(End::B).query_srq(srq)?.limit, 0)?;
    one(bench)?;
    holds("one event only", !bench.events(End::B).contains(&AsyncEvent::SrqLimitReached(srq)))?;
    // Armed again, and reached again.
    bench.srq_recv(End::B, srq, 9, &[])?;
    bench.device(End::B).modify_srq(srq, &SrqModify::Limit(2))?;
    one(bench)?;
    bench.event(End::B, AsyncEvent::SrqLimitReached(srq))
}

fn a_shared_queue_has_room_for_what_was_asked<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let pd = bench.pd(End::B)?;
    let srq = bench.srq(End::B, &attr(pd, 0))?;
    let info = bench.device(End::B).query_srq(srq)?;
    same("told", (info.srq, info.pd, info.limit, info.posted), (srq, pd, 0, 0))?;
    holds("as much as asked", info.max_wr >= 16 && info.max_sge >= 2)?;
    for id in 0..u64::from(info.max_wr) {
        bench.srq_recv(End::B, srq, id, &[])?;
    }
    same("one more", bench.srq_recv(End::B, srq, 99, &[]), Err(PostError::Full))?;
    let device = bench.device(End::B);
    let kind = device.modify_srq(srq, &SrqModify::MaxWr(info.max_wr - 1)).err().map(|why| why.kind);
    holds("room for what is posted is not taken away", kind.is_some())?;
    let limits = device.query_device()?;
    for bad in [
        SrqInitAttr { max_wr: limits.max_srq_wr + 1, ..attr(pd, 0) },
        SrqInitAttr { max_wr: 0, ..attr(pd, 0) },
        SrqInitAttr { max_sge: limits.max_srq_sge + 1, ..attr(pd, 0) },
    ] {
        let worker = bench.harness.node(End::B).worker();
        let kind = bench.device(End::B).create_srq(worker, &bad).err().map(|why| why.kind);
        same("refusal", kind, Some(VerbsErrorKind::Invalid))?;
    }
    same("no such queue", bench.srq_recv(End::B, SrqId(0xff_ffff), 0, &[]), Err(PostError::NoSuchQueue))
}

fn a_queue_pair_in_error_takes_no_more<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (srq, [(_, b0), (a1, b1)]) = sharing(bench, 0)?;
    for id in 0..3 {
        bench.srq_recv(End::B, srq, id, &[])?;
    }
    bench.modify(b0, &QpModify::ToErr)?;
    bench.event(End::B, AsyncEvent::QpLastWqeReached(b0.qpn))?;
    // The receives are the other's still.
    bench.send(a1, 1, SendOp::Send, &[])?;
    bench.sent_as(a1, 1, WcStatus::Success)?;
    let wc = bench.received(b1)?;
    same("the only completion", (wc.wr_id, wc.status, wc.qpn), (0, WcStatus::Success, b1.qpn))?;
    same("posted", bench.device(End::B).query_srq(srq)?.posted, 2)?;
    bench.state(b1, QpState::Rts)
}

fn a_shared_queue_in_use_is_busy<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (srq, [(_, b0), (_, b1)]) = sharing(bench, 0)?;
    bench.srq_recv(End::B, srq, 1, &[])?;
    bench.destroy(b0)?;
    let kind = bench.device(End::B).destroy_srq(srq).err().map(|why| why.kind);
    same("refusal", kind, Some(VerbsErrorKind::Busy))?;
    bench.destroy(b1)?;
    // A queue of another protection domain is not for everyone.
    let (pd, cq) = (bench.pd(End::B)?, bench.cq(End::B, 16)?);
    let attr = init_attr(pd, cq, cq, Params { srq: Some(srq), ..Params::default() });
    let why = bench.device(End::B).create_qp(&attr).err();
    holds("another domain's is refused", why.is_some_and(|why| why.kind == VerbsErrorKind::Invalid))
}

fn a_shared_queue_of_another_worker_is_named<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let pd = bench.pd(End::B)?;
    let srq = bench.srq(End::B, &attr(pd, 0))?;
    let other = u8::from(bench.harness.node(End::B).worker() == 0);
    let cq = bench.device(End::B).create_cq(other, 16)?;
    let attr = init_attr(pd, cq, cq, Params { srq: Some(srq), ..Params::default() });
    let why = bench.device(End::B).create_qp(&attr).err();
    bench.device(End::B).destroy_cq(cq)?;
    let text = why.map_or("it was made".into(), |why| why.to_string());
    holds(&text, ["srq", "worker 0", "worker 1"].into_iter().all(|name| text.contains(name)))
}

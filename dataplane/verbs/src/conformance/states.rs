//! States: which transition is allowed, what may be posted where, what is discarded, drained and told.

use alloc::format;
use alloc::string::ToString;
use alloc::vec::Vec;

use super::bench::{Bench, Side, init_attr};
use super::{End, Harness, Node, Outcome, Params, cases, holds, same};
use crate::error::VerbsErrorKind;
use crate::{
    Access, AsyncEvent, Device, PostError, QpCap, QpChange, QpModify, QpState, QpType, Qpn, SendWr, WcStatus,
};

cases! {
    every_transition_is_allowed_or_refused [];
    queries_tell_what_was_set [];
    attributes_out_of_range_are_named [];
    posting_follows_the_state [];
    reset_discards_without_completions [];
    a_drained_queue_waits_and_goes_on [];
    attributes_change_in_their_states [];
    the_first_packet_is_told_of [];
    destruction_leaves_others_alone [];
    what_is_in_use_is_busy [];
    objects_that_do_not_exist_are_not_found [];
    sizes_beyond_the_limits_are_refused [];
    queues_of_two_workers_do_not_mix [TwoWorkers];
}

/// Where `step` leads from `from` on a reliable connection (IBTA 10.3.1), as libibverbs' table has it.
fn leads(from: QpState, step: &QpModify) -> Option<QpState> {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    match (from, step) {
        (Reset | Init, QpModify::ToInit(_)) => Some(Init),
        (Init, QpModify::ToRtr(_)) => Some(Rtr),
        (Rtr, QpModify::ToRts(_)) => Some(Rts),
        (Rts, QpModify::ToSqd) => Some(Sqd),
        (Sqd, QpModify::SqdToRts) => Some(Rts),
        (Init | Rts | Sqd, QpModify::Change(_)) => Some(from),
        (Init | Rtr | Rts | Sqd | Sqe | Err, QpModify::ToErr) => Some(Err),
        (_, QpModify::ToReset) => Some(Reset),
        _ => None,
    }
}

/// Brings a queue pair, in whatever state, to `state`.
fn bring<H: Harness>(bench: &mut Bench<'_, H>, side: Side, peer: Side, state: QpState) -> Outcome {
    let [init, rtr, rts] = bench.steps(side, peer, Params::default());
    let way: &[QpModify] = match state {
        QpState::Reset => &[],
        QpState::Init => &[init],
        QpState::Rtr => &[init, rtr],
        QpState::Rts | QpState::Sqe => &[init, rtr, rts],
        QpState::Sqd => &[init, rtr, rts, QpModify::ToSqd],
        QpState::Err => &[init, QpModify::ToErr],
    };
    bench.modify(side, &QpModify::ToReset)?;
    for step in way {
        bench.modify(side, step)?;
    }
    Ok(())
}

fn every_transition_is_allowed_or_refused<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = (bench.qp(End::A, Params::default())?, bench.qp(End::B, Params::default())?);
    let mut steps = bench.steps(a, b, Params::default()).to_vec();
    steps.extend([
        QpModify::ToSqd,
        QpModify::SqdToRts,
        QpModify::SqeToRts,
        QpModify::Change(QpChange::default()),
        QpModify::ToErr,
        QpModify::ToReset,
    ]);
    let states = QpState::ALL.into_iter().filter(|state| *state != QpState::Sqe);
    for (from, step) in states.flat_map(|from| steps.iter().map(move |step| (from, step))) {
        bring(bench, a, b, from)?;
        let wanted = leads(from, step);
        let made = bench.device(a.end).modify_qp(a.qpn, step);
        same(&format!("from {from:?} by {step:?}"), made.is_ok(), wanted.is_some())?;
        if let Err(why) = made {
            same("kind of refusal", why.kind, VerbsErrorKind::State)?;
        }
        let state = bench.device(a.end).query_qp(a.qpn)?.state;
        same(&format!("from {from:?} by {step:?}, state"), state, wanted.unwrap_or(from))?;
    }
    Ok(())
}

fn queries_tell_what_was_set<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let params = Params { timeout: 17, retry_cnt: 5, rnr_retry: 3, rd_atomic: 3, ..Params::default() };
    let (a, b) = (bench.qp(End::A, params)?, bench.qp(End::B, params)?);
    let info = bench.device(a.end).query_qp(a.qpn)?;
    same("when new", (info.state, info.init, info.rtr, info.rts), (QpState::Reset, None, None, None))?;
    let steps = bench.steps(a, b, params);
    bench.connect(a, b, params)?;
    let info = bench.device(a.end).query_qp(a.qpn)?;
    same("type and state", (info.qpn, info.qp_type, info.state), (a.qpn, QpType::Rc, QpState::Rts))?;
    same("objects", (info.pd, info.send_cq, info.recv_cq, info.srq), (a.pd, a.scq, a.rcq, None))?;
    let worker = bench.harness.node(a.end).worker();
    same("worker", info.worker, worker)?;
    let cap = params.cap;
    holds(
        "sizes are what was asked for, or more",
        info.cap.max_send_wr >= cap.max_send_wr
            && info.cap.max_recv_wr >= cap.max_recv_wr
            && info.cap.max_send_sge >= cap.max_send_sge
            && info.cap.max_recv_sge >= cap.max_recv_sge
            && info.cap.max_inline_data >= cap.max_inline_data,
    )?;
    if let [QpModify::ToInit(init), QpModify::ToRtr(rtr), QpModify::ToRts(rts)] = steps {
        same("attributes", (info.init, info.rtr, info.rts), (Some(init), Some(rtr), Some(rts)))?;
        same("PSNs", (info.sq_psn, info.rq_psn), (rts.sq_psn, rtr.rq_psn))?;
    }
    bench.modify(a, &QpModify::ToReset)?;
    let info = bench.device(a.end).query_qp(a.qpn)?;
    same("after RESET", (info.state, info.init, info.rtr, info.rts), (QpState::Reset, None, None, None))
}

fn attributes_out_of_range_are_named<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = (bench.qp(End::A, Params::default())?, bench.qp(End::B, Params::default())?);
    let [init, rtr, rts] = bench.steps(a, b, Params::default());
    bench.modify(a, &init)?;
    if let QpModify::ToRtr(good) = rtr {
        let strange =
            crate::Gid::from_ip("192.0.2.213".parse().unwrap_or(core::net::IpAddr::V4([0; 4].into())));
        let bad = [
            ("sgid", crate::RtrAttrs { av: crate::AddressVector { sgid: strange, ..good.av }, ..good }),
            ("dest_qp_num", crate::RtrAttrs { dest_qpn: Qpn::MULTICAST, ..good }),
            ("min_rnr_timer", crate::RtrAttrs { min_rnr_timer: 32, ..good }),
            ("max_dest_rd_atomic", crate::RtrAttrs { max_dest_rd_atomic: 255, ..good }),
        ];
        for (name, attrs) in bad {
            named(bench, a, name, &QpModify::ToRtr(attrs), QpState::Init)?;
        }
    }
    bench.modify(a, &rtr)?;
    if let QpModify::ToRts(good) = rts {
        let bad = [
            ("timeout", crate::RtsAttrs { timeout: 32, ..good }),
            ("retry_cnt", crate::RtsAttrs { retry_cnt: 8, ..good }),
            ("rnr_retry", crate::RtsAttrs { rnr_retry: 8, ..good }),
            ("max_rd_atomic", crate::RtsAttrs { max_rd_atomic: 255, ..good }),
        ];
        for (name, attrs) in bad {
            named(bench, a, name, &QpModify::ToRts(attrs), QpState::Rtr)?;
        }
    }
    Ok(())
}

/// `step` is refused with the name of the attribute, and changes nothing.
fn named<H: Harness>(
    bench: &mut Bench<'_, H>,
    side: Side,
    name: &str,
    step: &QpModify,
    stays: QpState,
) -> Outcome {
    let why = bench.device(side.end).modify_qp(side.qpn, step).err();
    let text = why.map_or("it was taken".into(), |why| why.to_string());
    holds(&format!("{name} is named: {text}"), text.contains(name))?;
    same("state", bench.device(side.end).query_qp(side.qpn)?.state, stays)
}

fn posting_follows_the_state<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = (bench.qp(End::A, Params::default())?, bench.qp(End::B, Params::default())?);
    let buffer = bench.buffer(a, 8)?;
    let sge = [buffer.sge(0, 8)];
    for state in [QpState::Reset, QpState::Init, QpState::Rtr] {
        bring(bench, a, b, state)?;
        let wr = SendWr { wr_id: 1, sg_list: &sge, ..SendWr::default() };
        same(&format!("a send in {state:?}"), bench.try_send(a, &wr), Err(PostError::BadState))?;
        let wanted = if state == QpState::Reset { Err(PostError::BadState) } else { Ok(()) };
        same(&format!("a receive in {state:?}"), bench.try_recv(a, 1, &sge), wanted)?;
    }
    bench.empty(a.end, a.rcq)
}

fn reset_discards_without_completions<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let buffer = bench.buffer(a, 8)?;
    for round in 0..3 {
        // No receive is posted at the peer: the sends stay.
        for id in 0..10 {
            bench.send(a, id, crate::SendOp::Send, &[buffer.sge(0, 8)])?;
            bench.recv(a, id, &[buffer.sge(0, 8)])?;
        }
        for side in [a, b] {
            bench.modify(side, &QpModify::ToReset)?;
        }
        bench.empty(a.end, a.scq)?;
        bench.empty(a.end, a.rcq)?;
        bench.connect(a, b, Params::default())?;
        bench.connect(b, a, Params::default())?;
        bench.works(a, b)?;
        bench.works(b, a).map_err(|why| super::Failure::new(format!("round {round}: {why}")))?;
    }
    Ok(())
}

fn a_drained_queue_waits_and_goes_on<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, 100_000)?, bench.buffer(b, 100_000)?);
    src.fill(0, 100_000, 1);
    bench.send(a, 1, dst.write_op(0), &[src.sge(0, 100_000)])?;
    bench.modify(a, &QpModify::ToSqd)?;
    bench.event(a.end, AsyncEvent::SqDrained(a.qpn))?;
    same("state", bench.device(a.end).query_qp(a.qpn)?.state, QpState::Sqd)?;
    // What was started is finished when the event comes; what was not may still wait.
    let before = bench.poll(a.end, a.scq)?.len();
    bench.send(a, 2, dst.write_op(0), &[src.sge(0, 8)])?;
    // The other direction goes on.
    bench.works(b, a)?;
    bench.empty(a.end, a.scq)?;
    bench.modify(a, &QpModify::SqdToRts)?;
    let done = bench.take(a.end, a.scq, 2 - before)?;
    holds("all succeed", done.iter().all(|wc| wc.status == WcStatus::Success))?;
    dst.check("the first WRITE", 0, 100_000, 1)
}

fn attributes_change_in_their_states<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let far = bench.buffer(b, 8)?;
    let near = bench.buffer(a, 8)?;
    // In RTS: the rights of the queue pair, while packets fly.
    let change = QpChange { access: Some(Access::REMOTE_READ), ..QpChange::default() };
    bench.modify(b, &QpModify::Change(change))?;
    bench.send(a, 1, far.read_op(0), &[near.sge(0, 8)])?;
    bench.sent_as(a, 1, WcStatus::Success)?;
    let change = QpChange { min_rnr_timer: Some(14), ..QpChange::default() };
    bench.modify(b, &QpModify::Change(change))?;
    same("rnr timer", bench.device(b.end).query_qp(b.qpn)?.rtr.map(|rtr| rtr.min_rnr_timer), Some(14))?;
    let timeout = QpChange { timeout: Some(19), ..QpChange::default() };
    named(bench, a, "timeout", &QpModify::Change(timeout), QpState::Rts)?;
    let qkey = QpChange { qkey: Some(crate::Qkey(5)), ..QpChange::default() };
    named(bench, a, "qkey", &QpModify::Change(qkey), QpState::Rts)?;
    // In SQD: what the requester goes by.
    bench.modify(a, &QpModify::ToSqd)?;
    bench.event(a.end, AsyncEvent::SqDrained(a.qpn))?;
    let change =
        QpChange { timeout: Some(19), retry_cnt: Some(6), rnr_retry: Some(5), ..QpChange::default() };
    bench.modify(a, &QpModify::Change(change))?;
    let rts = bench.device(a.end).query_qp(a.qpn)?.rts;
    same("told", rts.map(|rts| (rts.timeout, rts.retry_cnt, rts.rnr_retry)), Some((19, 6, 5)))?;
    bench.modify(a, &QpModify::SqdToRts)?;
    bench.send(a, 2, far.read_op(0), &[near.sge(0, 8)])?;
    bench.sent_as(a, 2, WcStatus::Success)?;
    // The right that was taken away is gone.
    bench.send(a, 3, far.write_op(0), &[near.sge(0, 8)])?;
    bench.sent_as(a, 3, WcStatus::RemInvReqErr).map(|_| ())
}

fn the_first_packet_is_told_of<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = (bench.qp(End::A, Params::default())?, bench.qp(End::B, Params::default())?);
    let (src, dst) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
    bench.connect(a, b, Params::default())?;
    let [init, rtr, rts] = bench.steps(b, a, Params::default());
    bench.modify(b, &init)?;
    bench.modify(b, &rtr)?;
    bench.send(a, 1, dst.write_op(0), &[src.sge(0, 8)])?;
    bench.sent_as(a, 1, WcStatus::Success)?;
    bench.event(b.end, AsyncEvent::CommEst(b.qpn))?;
    bench.modify(b, &rts)?;
    bench.works(b, a)
}

fn destruction_leaves_others_alone<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let near = bench.buffer(a, 8)?;
    // Another queue pair on the same completion queues.
    let other = bench.qp_with(End::A, a.pd, a.scq, a.rcq, Params::default())?;
    let peer = bench.qp(End::B, Params::default())?;
    bench.connect(other, peer, Params::default())?;
    bench.connect(peer, other, Params::default())?;
    for id in 0..10 {
        bench.send(other, id, crate::SendOp::Send, &[near.sge(0, 8)])?;
        bench.recv(other, id, &[near.sge(0, 8)])?;
    }
    bench.destroy(other)?;
    bench.works(a, b)?;
    bench.works(b, a)?;
    let wr = SendWr { sg_list: &[near.sge(0, 8)], ..SendWr::default() };
    same("a post to it", bench.try_send(other, &wr), Err(PostError::NoSuchQueue))?;
    // Its work freed what it held: the memory can go.
    let gone = bench.deregister(End::A, near.keys.lkey);
    holds(&format!("the region is free: {gone:?}"), gone.is_ok())
}

fn what_is_in_use_is_busy<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let a = bench.qp(End::A, Params::default())?;
    let device = bench.device(End::A);
    for refused in [device.destroy_cq(a.scq), device.destroy_cq(a.rcq), device.dealloc_pd(a.pd)] {
        same("refusal", refused.err().map(|why| why.kind), Some(VerbsErrorKind::Busy))?;
    }
    let pd = bench.pd(End::A)?;
    let region = bench.buffer_in(End::A, pd, 8, Access::LOCAL_WRITE)?;
    let refused = bench.device(End::A).dealloc_pd(pd);
    same("refusal", refused.err().map(|why| why.kind), Some(VerbsErrorKind::Busy))?;
    bench.deregister(End::A, region.keys.lkey)?;
    // Remote writing without local writing is no registration.
    let block = bench.harness.node(End::A).block(8);
    let refused = bench.device(End::A).reg_mr(pd, super::Block::memory(&block), Access::REMOTE_WRITE).err();
    same("refusal", refused.map(|why| why.kind), Some(VerbsErrorKind::Invalid))
}

fn objects_that_do_not_exist_are_not_found<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let a = bench.qp(End::A, Params::default())?;
    let buffer = bench.buffer(a, 8)?;
    let lkey = buffer.keys.lkey;
    bench.deregister(End::A, lkey)?;
    bench.destroy(a)?;
    let device = bench.device(End::A);
    let outcomes = [
        device.destroy_qp(a.qpn),
        device.modify_qp(a.qpn, &QpModify::ToErr),
        device.query_qp(a.qpn).map(|_| ()),
        device.dereg_mr(lkey),
        device.dealloc_pd(crate::PdId(0xfff_ffff)),
        device.destroy_cq(crate::CqId(0xff_ffff)),
    ];
    for outcome in outcomes {
        same("refusal", outcome.err().map(|why| why.kind), Some(VerbsErrorKind::NotFound))?;
    }
    let mut out = [crate::Wc::EMPTY; 1];
    let queues = bench.harness.node(End::A).queues();
    let polled = crate::Queues::poll_cq(queues, crate::CqId(0xff_ffff), &mut out);
    same("polling", polled, Err(PostError::NoSuchQueue))?;
    same("a receive", bench.try_recv(a, 1, &[]), Err(PostError::NoSuchQueue))
}

fn sizes_beyond_the_limits_are_refused<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let limits = bench.device(End::A).query_device()?;
    let (pd, cq) = (bench.pd(End::A)?, bench.cq(End::A, 16)?);
    let cap = Params::default().cap;
    let bad = [
        ("max_send_wr", QpCap { max_send_wr: limits.max_qp_wr + 1, ..cap }),
        ("max_recv_wr", QpCap { max_recv_wr: limits.max_qp_wr + 1, ..cap }),
        ("max_send_sge", QpCap { max_send_sge: limits.max_sge + 1, ..cap }),
        ("max_recv_sge", QpCap { max_recv_sge: limits.max_sge + 1, ..cap }),
        ("max_inline_data", QpCap { max_inline_data: limits.max_inline + 1, ..cap }),
    ];
    for (name, cap) in bad {
        let attr = init_attr(pd, cq, cq, Params { cap, ..Params::default() });
        let why = bench.device(End::A).create_qp(&attr).err();
        let text = why.map_or("it was made".into(), |why| why.to_string());
        holds(&format!("{name} is named: {text}"), text.contains(name))?;
    }
    let worker = bench.harness.node(End::A).worker();
    for cqe in [0, limits.max_cqe + 1] {
        let why = bench.device(End::A).create_cq(worker, cqe).err();
        same("refusal", why.map(|why| why.kind), Some(VerbsErrorKind::Invalid))?;
    }
    let why = bench.device(End::A).create_cq(limits.workers, 16).err();
    same("refusal", why.map(|why| why.kind), Some(VerbsErrorKind::Invalid))
}

fn queues_of_two_workers_do_not_mix<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let pd = bench.pd(End::A)?;
    let here = bench.cq(End::A, 16)?;
    let worker = bench.harness.node(End::A).worker();
    let other = u8::from(worker == 0);
    let there = bench.device(End::A).create_cq(other, 16)?;
    let attr = init_attr(pd, here, there, Params::default());
    let why = bench.device(End::A).create_qp(&attr).err();
    bench.device(End::A).destroy_cq(there)?;
    let text = why.map_or("it was made".into(), |why| why.to_string());
    let names: Vec<_> = ["send_cq", "recv_cq", "worker 0", "worker 1"]
        .into_iter()
        .filter(|name| !text.contains(name))
        .collect();
    same(&format!("missing in: {text}"), names, Vec::new())
}

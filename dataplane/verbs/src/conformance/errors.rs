//! What goes wrong between two queue pairs: the status at both ends, the events, the flush, and that nobody else suffers.

use alloc::vec::Vec;

use super::bench::{ALL, Bench, Side};
use super::{Deviation, End, Harness, Outcome, Params, cases, holds, same};
use crate::{
    Access, AsyncEvent, Device, Lkey, Pkey, PostError, QpModify, QpState, RemoteAddr, Rkey, SendOp, SendWr,
    Sge, Wc, WcStatus,
};

cases! {
    a_message_longer_than_its_receive [];
    a_remote_key_that_does_not_exist [];
    a_remote_range_that_leaves_the_region [];
    a_right_that_the_region_does_not_grant [];
    a_right_that_the_queue_pair_does_not_grant [];
    a_remote_key_of_another_domain [];
    a_remote_key_that_was_deregistered [];
    a_wrong_local_key [];
    a_region_that_posted_work_names [];
    a_peer_that_does_not_answer [];
    a_peer_that_never_has_a_receive [];
    a_peer_of_another_partition [];
    an_answer_that_does_not_fit_the_request [];
    work_around_a_failure_completes_once [];
    what_is_behind_a_failure_is_flushed_in_order [];
    an_unsignalled_send_that_fails_tells [];
    receives_are_flushed_in_order [];
    work_posted_in_error_is_flushed [];
    too_many_entries_are_refused [];
    failures_stay_with_their_queue_pair [];
}

/// `op` from `a` fails with `status`; `b` goes to error and tells `event`.
fn refused<H: Harness>(
    bench: &mut Bench<'_, H>,
    (a, b): (Side, Side),
    (op, sge): (SendOp, Sge),
    (status, event): (WcStatus, AsyncEvent),
) -> Outcome {
    bench.send(a, 77, op, &[sge])?;
    bench.sent_as(a, 77, status)?;
    bench.event(b.end, event)?;
    bench.state(a, QpState::Err)?;
    bench.state(b, QpState::Err)
}

fn a_message_longer_than_its_receive<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    for (room, size) in [(10, 11), (0, 1), (1024, 1025), (2000, 5000)] {
        let (a, b) = bench.pair(Params::default())?;
        let (src, dst) = (bench.buffer(a, 5000)?, bench.buffer(b, 5000)?);
        dst.put(0, &[0x5a; 5000]);
        bench.recv(b, 1, &[dst.sge(0, room)])?;
        let outcome = (WcStatus::RemInvReqErr, AsyncEvent::QpReqErr(b.qpn));
        refused(bench, (a, b), (SendOp::Send, src.sge(0, size)), outcome)?;
        bench.received_as(b, 1, WcStatus::LocLenErr)?;
        holds("nothing lies behind the room", dst.get(room, 5000 - room).iter().all(|byte| *byte == 0x5a))?;
    }
    Ok(())
}

fn a_remote_key_that_does_not_exist<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    for what in 0..2 {
        let (a, b) = bench.pair(Params::default())?;
        let (near, far) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
        let (remote_addr, rkey) = (far.remote(0), Rkey(far.keys.rkey.0 ^ 0x5555));
        let op =
            if what == 0 { SendOp::Write { remote_addr, rkey } } else { SendOp::Read { remote_addr, rkey } };
        let outcome = (WcStatus::RemAccessErr, AsyncEvent::QpAccessErr(b.qpn));
        refused(bench, (a, b), (op, near.sge(0, 8)), outcome)?;
    }
    Ok(())
}

fn a_remote_range_that_leaves_the_region<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    for offset in [-1i64, 1, 5000, i64::MIN] {
        for reads in [false, true] {
            let (a, b) = bench.pair(Params::default())?;
            let (near, far) = (bench.buffer(a, 3000)?, bench.buffer(b, 3000)?);
            far.fill(0, 3000, 1);
            near.fill(0, 3000, 2);
            let remote_addr = RemoteAddr(far.keys.iova.wrapping_add_signed(offset));
            let rkey = far.keys.rkey;
            let op =
                if reads { SendOp::Read { remote_addr, rkey } } else { SendOp::Write { remote_addr, rkey } };
            let outcome = (WcStatus::RemAccessErr, AsyncEvent::QpAccessErr(b.qpn));
            refused(bench, (a, b), (op, near.sge(0, 3000)), outcome)?;
            far.check("the region", 0, 3000, 1)?;
            near.check("the requester's memory", 0, 3000, 2)?;
        }
    }
    Ok(())
}

fn a_right_that_the_region_does_not_grant<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let cases = [(true, Access::LOCAL_WRITE | Access::REMOTE_WRITE), (false, Access::REMOTE_READ)];
    for (reads, access) in cases {
        let (a, b) = bench.pair(Params::default())?;
        let near = bench.buffer(a, 8)?;
        let far = bench.buffer_in(b.end, b.pd, 8, access)?;
        let op = if reads { far.read_op(0) } else { far.write_op(0) };
        let outcome = (WcStatus::RemAccessErr, AsyncEvent::QpAccessErr(b.qpn));
        refused(bench, (a, b), (op, near.sge(0, 8)), outcome)?;
    }
    Ok(())
}

fn a_right_that_the_queue_pair_does_not_grant<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    for (reads, access) in [(true, Access::REMOTE_WRITE), (false, Access::REMOTE_READ)] {
        let (a, b) = bench.pair_of(Params::default(), Params { access, ..Params::default() })?;
        let (near, far) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
        let op = if reads { far.read_op(0) } else { far.write_op(0) };
        let outcome = (WcStatus::RemInvReqErr, AsyncEvent::QpReqErr(b.qpn));
        refused(bench, (a, b), (op, near.sge(0, 8)), outcome)?;
    }
    Ok(())
}

fn a_remote_key_of_another_domain<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let near = bench.buffer(a, 8)?;
    let pd = bench.pd(b.end)?;
    let far = bench.buffer_in(b.end, pd, 8, ALL)?;
    let outcome = (WcStatus::RemAccessErr, AsyncEvent::QpAccessErr(b.qpn));
    refused(bench, (a, b), (far.write_op(0), near.sge(0, 8)), outcome)
}

fn a_remote_key_that_was_deregistered<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (near, far) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
    bench.send(a, 1, far.write_op(0), &[near.sge(0, 8)])?;
    bench.sent_as(a, 1, WcStatus::Success)?;
    bench.deregister(b.end, far.keys.lkey)?;
    let outcome = (WcStatus::RemAccessErr, AsyncEvent::QpAccessErr(b.qpn));
    refused(bench, (a, b), (far.write_op(0), near.sge(0, 8)), outcome)
}

fn a_wrong_local_key<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    for what in 0..5 {
        let (a, b) = bench.pair(Params::default())?;
        let (near, far) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
        let other_pd = bench.pd(a.end)?;
        let foreign = bench.buffer_in(a.end, other_pd, 8, ALL)?;
        let read_only = bench.buffer_in(a.end, a.pd, 8, Access::REMOTE_READ)?;
        let good = near.sge(0, 8);
        let (op, sge) = match what {
            0 => (far.write_op(0), Sge { lkey: Lkey(good.lkey.0 ^ 0x33), ..good }),
            1 => (far.write_op(0), Sge { length: 9, ..good }),
            2 => (far.write_op(0), Sge { addr: good.addr - 1, ..good }),
            3 => (far.write_op(0), foreign.sge(0, 8)),
            _ => (far.read_op(0), read_only.sge(0, 8)),
        };
        let wr = SendWr { wr_id: 9, op, sg_list: &[sge], ..SendWr::default() };
        let posted = bench.try_send(a, &wr);
        bench.deviation(Deviation::KeysCheckedAtPost, posted == Err(PostError::BadKey))?;
        if posted.is_ok() {
            bench.sent_as(a, 9, WcStatus::LocProtErr)?;
            bench.state(a, QpState::Err)?;
        } else {
            same("the refusal", posted, Err(PostError::BadKey))?;
            bench.works(a, b)?;
        }
    }
    Ok(())
}

fn a_region_that_posted_work_names<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
    bench.recv(b, 1, &[dst.sge(0, 8)])?;
    let gone = bench.deregister(b.end, dst.keys.lkey);
    let busy = gone.as_ref().is_err_and(|why| why.kind == crate::error::VerbsErrorKind::Busy);
    bench.deviation(Deviation::DeregisterBusyByWork, busy)?;
    bench.send(a, 2, SendOp::Send, &[src.sge(0, 8)])?;
    if busy {
        bench.sent_as(a, 2, WcStatus::Success)?;
        bench.received_as(b, 1, WcStatus::Success)?;
        return Ok(bench.deregister(b.end, dst.keys.lkey)?);
    }
    gone?;
    bench.sent_as(a, 2, WcStatus::RemOpErr)?;
    let wc = bench.received(b)?;
    let allowed = [WcStatus::LocProtErr, WcStatus::LocAccessErr, WcStatus::LocQpOpErr];
    holds("the receive fails", wc.wr_id == 1 && allowed.contains(&wc.status))
}

fn a_peer_that_does_not_answer<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair_of(Params::impatient(), Params::default())?;
    let (src, dst) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
    bench.works(a, b)?;
    bench.modify(b, &QpModify::ToReset)?;
    bench.send(a, 1, dst.write_op(0), &[src.sge(0, 8)])?;
    bench.sent_as(a, 1, WcStatus::RetryExcErr)?;
    bench.state(a, QpState::Err)?;
    // Published with the completion, or never.
    let told = bench.events(a.end).contains(&AsyncEvent::QpFatal(a.qpn));
    bench.deviation(Deviation::FatalEventWithCompletion, told)
}

fn a_peer_that_never_has_a_receive<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    for rnr_retry in [0, 2] {
        let (a, b) = bench.pair_of(Params { rnr_retry, ..Params::default() }, Params::default())?;
        let src = bench.buffer(a, 8)?;
        bench.send(a, 1, SendOp::Send, &[src.sge(0, 8)])?;
        bench.sent_as(a, 1, WcStatus::RnrRetryExcErr)?;
        bench.state(a, QpState::Err)?;
        // The responder is not at fault.
        same("its state", bench.device(b.end).query_qp(b.qpn)?.state, QpState::Rts)?;
    }
    Ok(())
}

fn a_peer_of_another_partition<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let with = |pkey| Params { pkey: Pkey(pkey), ..Params::impatient() };
    // Another one; and two limited members of the same.
    for (near, far) in [(0xffff, 0x8001), (0x7fff, 0x7fff)] {
        let (a, b) = bench.pair_of(with(near), with(far))?;
        let (src, dst) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
        src.fill(0, 8, 1);
        bench.send(a, 1, dst.write_op(0), &[src.sge(0, 8)])?;
        bench.sent_as(a, 1, WcStatus::RetryExcErr)?;
        same("untouched", dst.get(0, 8), alloc::vec![0; 8])?;
        bench.state(b, QpState::Rts)?;
    }
    // A limited member and a full one hear each other.
    let patient = |pkey| Params { pkey: Pkey(pkey), ..Params::default() };
    let (a, b) = bench.pair_of(patient(0x7fff), patient(0xffff))?;
    bench.works(a, b)?;
    bench.works(b, a)
}

/// A peer that answers a READ to a queue pair which waits for something else. Made of honest parts: the answer is that of
/// B's queue pair `c`, which believes that A's queue pair asked, while `d` did.
fn an_answer_that_does_not_fit_the_request<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    for (asks, status) in [(false, WcStatus::BadRespErr), (true, WcStatus::LocLenErr)] {
        let (a, silent) = (bench.qp(End::A, Params::default())?, bench.qp(End::B, Params::default())?);
        let (c, d) = (bench.qp(End::B, Params::default())?, bench.qp(End::A, Params::default())?);
        for (from, to) in [(a, silent), (c, a), (d, c)] {
            bench.connect(from, to, Params::default())?;
        }
        let (near, far, other) = (bench.buffer(a, 100)?, bench.buffer(c, 100)?, bench.buffer(d, 100)?);
        near.put(0, &[0x5a; 100]);
        // Both are the first of their queue pairs, and have the same PSN.
        let op = if asks { far.read_op(0) } else { SendOp::Send };
        bench.send(a, 1, op, &[near.sge(0, 8)])?;
        bench.send(d, 2, far.read_op(0), &[other.sge(0, 100)])?;
        bench.sent_as(a, 1, status)?;
        bench.state(a, QpState::Err)?;
        same("untouched", near.get(0, 100), alloc::vec![0x5a; 100])?;
    }
    Ok(())
}

/// QPCQ-3: 8 sends and 8 receives are outstanding when the first send fails, 4 sends are posted after the first error. Each
/// completes once: the real error, then the flush in order.
fn work_around_a_failure_completes_once<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    for dies in [true, false] {
        // Only a peer that is dead is given up soon.
        let own = if dies { Params::impatient() } else { Params::default() };
        let (a, b) = bench.pair_of(own, Params::default())?;
        let (src, dst) = (bench.buffer(a, 100)?, bench.buffer(b, 100)?);
        let (good, bad) = (dst.write_op(0), Rkey(dst.keys.rkey.0 ^ 0x700));
        let first = if dies { good } else { SendOp::Write { remote_addr: dst.remote(0), rkey: bad } };
        if dies {
            bench.modify(b, &QpModify::ToReset)?;
        }
        for id in 0..8 {
            bench.recv(a, 100 + id, &[src.sge(0, 100)])?;
        }
        for id in 0..8 {
            bench.send(a, id, if id == 0 { first } else { good }, &[src.sge(0, 100)])?;
        }
        let mut sends = bench.until("the first error", |bench| {
            let done = bench.poll(a.end, a.scq)?;
            Ok((!done.is_empty()).then_some(done))
        })?;
        for id in 8..12 {
            bench.send(a, id, good, &[src.sge(0, 100)])?;
        }
        sends.extend(bench.take(a.end, a.scq, 12 - sends.len())?);
        let real = if dies { WcStatus::RetryExcErr } else { WcStatus::RemAccessErr };
        let status = |id| if id == 0 { real } else { WcStatus::WrFlushErr };
        same("sends", ids(&sends), (0..12).map(|id| (id, status(id))).collect())?;
        let recvs = bench.take(a.end, a.rcq, 8)?;
        same("receives", ids(&recvs), (100..108).map(|id| (id, WcStatus::WrFlushErr)).collect())?;
        bench.empty(a.end, a.scq)?;
        bench.empty(a.end, a.rcq)?;
    }
    Ok(())
}

fn ids(done: &[Wc]) -> Vec<(u64, WcStatus)> {
    done.iter().map(|wc| (wc.wr_id, wc.status)).collect()
}

fn what_is_behind_a_failure_is_flushed_in_order<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, 3000)?, bench.buffer(b, 3000)?);
    let sge = [src.sge(0, 3000)];
    let bad = SendOp::Write { remote_addr: dst.remote(0), rkey: Rkey(dst.keys.rkey.0 ^ 0x100) };
    bench.send(a, 0, dst.write_op(0), &sge)?;
    bench.send(a, 1, dst.read_op(0), &sge)?;
    bench.send(a, 2, bad, &sge)?;
    let mut wanted = [(0, WcStatus::Success), (1, WcStatus::Success), (2, WcStatus::RemAccessErr)].to_vec();
    for wr_id in 3..10 {
        // Unsignalled ones are flushed with a completion too.
        bench.try_send(a, &SendWr { wr_id, op: dst.write_op(0), sg_list: &sge, ..SendWr::default() })?;
        wanted.push((wr_id, WcStatus::WrFlushErr));
    }
    let done = bench.take(a.end, a.scq, 10)?;
    same("completions", ids(&done), wanted)
}

fn an_unsignalled_send_that_fails_tells<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
    let op = SendOp::Write { remote_addr: dst.remote(0), rkey: Rkey(dst.keys.rkey.0 ^ 1) };
    bench.try_send(a, &SendWr { wr_id: 4, op, sg_list: &[src.sge(0, 8)], ..SendWr::default() })?;
    bench.sent_as(a, 4, WcStatus::RemAccessErr).map(|_| ())
}

fn receives_are_flushed_in_order<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (_, b) = bench.pair(Params::default())?;
    let dst = bench.buffer(b, 8)?;
    for wr_id in 0..10 {
        bench.recv(b, wr_id, &[dst.sge(0, 8)])?;
    }
    bench.modify(b, &QpModify::ToErr)?;
    let done = bench.take(b.end, b.rcq, 10)?;
    same("completions", ids(&done), (0..10).map(|id| (id, WcStatus::WrFlushErr)).collect())?;
    holds("they are receives", done.iter().all(|wc| wc.is_recv && wc.qpn == b.qpn))
}

fn work_posted_in_error_is_flushed<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
    bench.modify(a, &QpModify::ToErr)?;
    // However often: nothing is left behind.
    for round in 0..100 {
        bench.send(a, round, dst.write_op(0), &[src.sge(0, 8)])?;
        bench.recv(a, round, &[src.sge(0, 8)])?;
        bench.sent_as(a, round, WcStatus::WrFlushErr)?;
        bench.received_as(a, round, WcStatus::WrFlushErr)?;
    }
    Ok(())
}

fn too_many_entries_are_refused<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, 64)?, bench.buffer(b, 64)?);
    let cap = bench.device(a.end).query_qp(a.qpn)?.cap;
    let sends: Vec<Sge> = (0..=cap.max_send_sge).map(|_| src.sge(0, 1)).collect();
    let wr = SendWr { op: dst.write_op(0), sg_list: &sends, ..SendWr::default() };
    same("a send of too many", bench.try_send(a, &wr), Err(PostError::TooManySge))?;
    let recvs: Vec<Sge> = (0..=cap.max_recv_sge).map(|_| src.sge(0, 1)).collect();
    same("a receive of too many", bench.try_recv(a, 1, &recvs), Err(PostError::TooManySge))?;
    bench.works(a, b)
}

fn failures_stay_with_their_queue_pair<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (good_a, good_b) = bench.pair(Params::default())?;
    let (a, b) = bench.pair(Params::default())?;
    let (near, far) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
    let op = SendOp::Write { remote_addr: far.remote(4), rkey: far.keys.rkey };
    let outcome = (WcStatus::RemAccessErr, AsyncEvent::QpAccessErr(b.qpn));
    refused(bench, (a, b), (op, near.sge(0, 8)), outcome)?;
    bench.works(good_a, good_b)?;
    bench.works(good_b, good_a)?;
    // The two that failed are as new after RESET.
    for side in [a, b] {
        bench.modify(side, &QpModify::ToReset)?;
        bench.poll(side.end, side.scq)?;
    }
    bench.connect(a, b, Params::default())?;
    bench.connect(b, a, Params::default())?;
    bench.works(a, b)?;
    holds("no completion of B's is left", bench.poll(End::B, b.scq)?.is_empty())
}

//! Queues that are full, completions that nobody polls, and events for those who sleep.

use alloc::format;
use alloc::vec::Vec;
use core::time::Duration;

use super::bench::{Bench, Side};
use super::{Deviation, End, Harness, Node, Outcome, PATIENCE, Params, cases, holds, same};
use crate::error::VerbsErrorKind;
use crate::{AsyncEvent, CqId, Device, PostError, QpState, Queues, SendFlags, SendOp, SendWr, WcStatus};

cases! {
    a_full_send_queue_says_so [];
    a_full_receive_queue_says_so [];
    a_send_queue_full_of_unsignalled_work [];
    sends_never_overflow_their_completion_queue [];
    a_shared_completion_queue_holds_posts_back [];
    receives_overflow_it_with_an_event [];
    solicited_is_told_in_the_completion [];
    an_event_comes_once_for_each_request [Channels];
    completions_that_are_there_give_no_event [Channels];
    only_solicited_or_failed_completions_wake [Channels];
    any_outdoes_solicited [Channels];
    events_are_acknowledged_before_the_end [Channels];
}

fn a_full_send_queue_says_so<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let buffer = bench.buffer(a, 8)?;
    let dst = bench.buffer(b, 8)?;
    let depth = bench.device(a.end).query_qp(a.qpn)?.cap.max_send_wr;
    // The peer has no receive: nothing completes.
    for id in 0..u64::from(depth) {
        bench.send(a, id, SendOp::Send, &[buffer.sge(0, 8)])?;
    }
    let sge = [buffer.sge(0, 8)];
    let more = SendWr { wr_id: 999, sg_list: &sge, ..SendWr::default() };
    same("one more", bench.try_send(a, &more), Err(PostError::Full))?;
    for id in 0..u64::from(depth) {
        let posted = bench.try_recv(b, id, &[dst.sge(0, 8)]);
        if posted == Err(PostError::Full) {
            break;
        }
        posted?;
    }
    let done = bench.take(a.end, a.scq, depth as usize)?;
    holds("all succeed", done.iter().all(|wc| wc.status == WcStatus::Success))?;
    bench.recv(b, 999, &[dst.sge(0, 8)])?;
    let wr = SendWr { flags: SendFlags::SIGNALED, ..more };
    bench.try_send(a, &wr)?;
    bench.sent_as(a, 999, WcStatus::Success).map(|_| ())
}

fn a_full_receive_queue_says_so<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
    let depth = bench.device(b.end).query_qp(b.qpn)?.cap.max_recv_wr;
    for id in 0..u64::from(depth) {
        bench.recv(b, id, &[dst.sge(0, 8)])?;
    }
    same("one more", bench.try_recv(b, 999, &[]), Err(PostError::Full))?;
    bench.send(a, 1, SendOp::Send, &[src.sge(0, 8)])?;
    bench.sent_as(a, 1, WcStatus::Success)?;
    bench.received_as(b, 0, WcStatus::Success)?;
    bench.recv(b, 999, &[dst.sge(0, 8)])
}

fn sends_never_overflow_their_completion_queue<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let params = Params { cqe: 4, ..Params::default() };
    let (a, b) = bench.pair_of(params, Params::default())?;
    let (src, dst) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
    let sge = [src.sge(0, 8)];
    let wr = SendWr { op: dst.write_op(0), sg_list: &sge, flags: SendFlags::SIGNALED, ..SendWr::default() };
    let mut posted = 0;
    // Nothing is polled meanwhile. A provider may have rounded the four up.
    while posted < 32 && bench.try_send(a, &wr).is_ok() {
        posted += 1;
    }
    let refused = bench.try_send(a, &wr);
    bench.deviation(Deviation::EntryReservedAtPost, posted < 32)?;
    if posted == 32 {
        return Ok(());
    }
    holds("at least what was asked for", posted >= 4)?;
    same("one more", refused, Err(PostError::Full))?;
    let done = bench.take(a.end, a.scq, posted)?;
    holds("all succeed", done.iter().all(|wc| wc.status == WcStatus::Success))?;
    bench.works(a, b)?;
    same("events", bench.events(a.end).contains(&AsyncEvent::CqErr(a.scq)), false)
}

fn a_send_queue_full_of_unsignalled_work<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
    let depth = bench.device(a.end).query_qp(a.qpn)?.cap.max_send_wr;
    src.fill(0, 8, 3);
    let sge = [src.sge(0, 8)];
    let quiet = SendWr { op: dst.write_op(0), sg_list: &sge, ..SendWr::default() };
    // The first ones may be done, and have given their places back, before the last one is posted.
    for _ in 0..depth {
        bench.try_send(a, &quiet)?;
    }
    bench.until("the data", |_| Ok((dst.get(0, 8) == src.get(0, 8)).then_some(())))?;
    let wr = SendWr { wr_id: 7, flags: SendFlags::SIGNALED, ..quiet };
    let mut posted = Err(PostError::Full);
    for _ in 0..1000 {
        posted = bench.try_send(a, &wr);
        if posted != Err(PostError::Full) {
            break;
        }
        bench.harness.pause();
    }
    bench.deviation(Deviation::UnsignalledGiveBack, posted.is_ok())?;
    if posted.is_ok() {
        bench.sent_as(a, 7, WcStatus::Success)?;
    }
    bench.empty(a.end, a.scq)
}

/// QPCQ-1: 4 queue pairs share a completion queue of 16 entries, each has 16 signalled sends, and nobody polls. The
/// seventeenth post is refused; every one that was taken completes once, and after that all goes on.
fn a_shared_completion_queue_holds_posts_back<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let scq = bench.cq(End::A, 16)?;
    let (pd, params) = (bench.pd(End::A)?, Params::default());
    let mut pairs = Vec::new();
    for _ in 0..4 {
        let rcq = bench.cq(End::A, 16)?;
        let (a, b) = (bench.qp_with(End::A, pd, scq, rcq, params)?, bench.qp(End::B, params)?);
        bench.connect(a, b, params)?;
        bench.connect(b, a, params)?;
        pairs.push((a, bench.buffer(a, 8)?, bench.buffer(b, 8)?));
    }
    let post = |bench: &mut Bench<'_, H>, turn: usize| {
        let (a, src, dst) = &pairs[turn % 4];
        let (wr_id, flags) = (turn as u64, SendFlags::SIGNALED);
        let wr = SendWr { wr_id, op: dst.write_op(0), sg_list: &[src.sge(0, 8)], flags, ..SendWr::default() };
        bench.try_send(*a, &wr)
    };
    for round in 0..3 {
        let mut taken = Vec::new();
        for turn in 0..64 {
            match post(bench, turn) {
                Ok(()) => taken.push(turn as u64),
                refused => same("a refusal", refused, Err(PostError::Full))?,
            }
        }
        // A provider may have rounded the 16 up.
        holds(&format!("{} were taken", taken.len()), taken.len() >= 16)?;
        bench.deviation(Deviation::EntryReservedAtPost, taken.len() < 64)?;
        let done = bench.take(End::A, scq, taken.len())?;
        let whole = done.iter().all(|wc| wc.status == WcStatus::Success);
        holds(&format!("round {round}: all succeed"), whole)?;
        // Each once; in order for each queue pair.
        let mut found: Vec<u64> = done.iter().map(|wc| wc.wr_id).collect();
        found.sort_unstable();
        same("what was taken is what completed", found, taken)?;
        bench.empty(End::A, scq)?;
    }
    same("no event of the queue", bench.events(End::A).contains(&AsyncEvent::CqErr(scq)), false)
}

fn receives_overflow_it_with_an_event<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair_of(Params::default(), Params { cqe: 4, ..Params::default() })?;
    let (src, dst) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
    for id in 0..32 {
        bench.recv(b, id, &[dst.sge(0, 8)])?;
    }
    let sge = [src.sge(0, 8)];
    for wr_id in 0..32 {
        bench.try_send(a, &SendWr { wr_id, sg_list: &sge, ..SendWr::default() })?;
    }
    bench.event(b.end, AsyncEvent::CqErr(b.rcq))?;
    bench.state(b, QpState::Err)?;
    // What was there before is intact.
    let done = bench.poll(b.end, b.rcq)?;
    holds("some were kept", done.len() >= 4)?;
    let whole = done.iter().zip(0u64..).all(|(wc, id)| wc.wr_id == id && wc.status == WcStatus::Success);
    holds(&format!("in order and whole: {done:?}"), whole)
}

fn solicited_is_told_in_the_completion<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, 3000)?, bench.buffer(b, 3000)?);
    for (flags, len, solicited) in [
        (SendFlags::SOLICITED, 10, true),
        (SendFlags::empty(), 10, false),
        (SendFlags::SOLICITED, 3000, true),
        (SendFlags::empty(), 3000, false),
    ] {
        bench.recv(b, 1, &[dst.sge(0, 3000)])?;
        bench.try_send(a, &SendWr { flags, sg_list: &[src.sge(0, len)], ..SendWr::default() })?;
        let wc = bench.received_as(b, 1, WcStatus::Success)?;
        same("solicited", wc.solicited, solicited)?;
    }
    Ok(())
}

/// A connected pair whose B receives with a channel.
fn listening<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome<(Side, Side, crate::ChannelId)> {
    let a = bench.qp(End::A, Params::default())?;
    let (rcq, channel) = bench.cq_on(End::B, 64)?;
    let (pd, scq) = (bench.pd(End::B)?, bench.cq(End::B, 64)?);
    let b = bench.qp_with(End::B, pd, scq, rcq, Params::default())?;
    bench.connect(a, b, Params::default())?;
    bench.connect(b, a, Params::default())?;
    Ok((a, b, channel))
}

fn ask<H: Harness>(bench: &mut Bench<'_, H>, cq: CqId, solicited_only: bool) -> Outcome {
    Ok(bench.harness.node(End::B).queues().req_notify(cq, solicited_only)?)
}

/// Sends an empty message and waits until it is received.
fn message<H: Harness>(bench: &mut Bench<'_, H>, a: Side, b: Side, flags: SendFlags) -> Outcome {
    bench.recv(b, 1, &[])?;
    bench.try_send(a, &SendWr { flags: flags | SendFlags::SIGNALED, ..SendWr::default() })?;
    bench.sent_as(a, 0, WcStatus::Success)?;
    bench.received_as(b, 1, WcStatus::Success).map(|_| ())
}

fn next<H: Harness>(
    bench: &mut Bench<'_, H>,
    channel: crate::ChannelId,
    wait: Duration,
) -> Outcome<Option<CqId>> {
    let cq = bench.device(End::B).get_cq_event(channel, wait)?;
    if let Some(cq) = cq {
        bench.device(End::B).ack_cq_events(cq, 1)?;
    }
    Ok(cq)
}

fn an_event_comes_once_for_each_request<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b, channel) = listening(bench)?;
    message(bench, a, b, SendFlags::empty())?;
    same("without asking", next(bench, channel, Duration::ZERO)?, None)?;
    for _ in 0..3 {
        ask(bench, b.rcq, false)?;
        ask(bench, b.rcq, false)?;
        message(bench, a, b, SendFlags::empty())?;
        message(bench, a, b, SendFlags::empty())?;
        same("after asking", next(bench, channel, PATIENCE)?, Some(b.rcq))?;
        same("a second one", next(bench, channel, Duration::ZERO)?, None)?;
    }
    Ok(())
}

fn completions_that_are_there_give_no_event<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b, channel) = listening(bench)?;
    bench.recv(b, 1, &[])?;
    bench.send(a, 2, SendOp::Send, &[])?;
    bench.sent_as(a, 2, WcStatus::Success)?;
    // Acknowledged, so received: the completion is there, or comes without anything new to notice.
    bench.works(a, b)?;
    ask(bench, b.rcq, false)?;
    same("for an old one", next(bench, channel, Duration::ZERO)?, None)?;
    bench.received_as(b, 1, WcStatus::Success)?;
    message(bench, a, b, SendFlags::empty())?;
    same("for a new one", next(bench, channel, PATIENCE)?, Some(b.rcq))
}

fn only_solicited_or_failed_completions_wake<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b, channel) = listening(bench)?;
    ask(bench, b.rcq, true)?;
    message(bench, a, b, SendFlags::empty())?;
    same("unsolicited", next(bench, channel, Duration::ZERO)?, None)?;
    message(bench, a, b, SendFlags::SOLICITED)?;
    same("solicited", next(bench, channel, PATIENCE)?, Some(b.rcq))?;
    ask(bench, b.rcq, true)?;
    bench.recv(b, 5, &[])?;
    bench.modify(b, &crate::QpModify::ToErr)?;
    same("a failure", next(bench, channel, PATIENCE)?, Some(b.rcq))?;
    bench.received_as(b, 5, WcStatus::WrFlushErr).map(|_| ())
}

fn any_outdoes_solicited<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b, channel) = listening(bench)?;
    for order in [[true, false], [false, true]] {
        for solicited_only in order {
            ask(bench, b.rcq, solicited_only)?;
        }
        message(bench, a, b, SendFlags::empty())?;
        same("unsolicited", next(bench, channel, PATIENCE)?, Some(b.rcq))?;
    }
    Ok(())
}

fn events_are_acknowledged_before_the_end<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b, channel) = listening(bench)?;
    ask(bench, b.rcq, false)?;
    message(bench, a, b, SendFlags::empty())?;
    let device = bench.device(End::B);
    same("the event", device.get_cq_event(channel, PATIENCE)?, Some(b.rcq))?;
    same("too many", device.ack_cq_events(b.rcq, 2).err().map(|e| e.kind), Some(VerbsErrorKind::Invalid))?;
    same(
        "the channel",
        device.destroy_comp_channel(channel).err().map(|e| e.kind),
        Some(VerbsErrorKind::Busy),
    )?;
    bench.destroy(b)?;
    let device = bench.device(End::B);
    same("the queue", device.destroy_cq(b.rcq).err().map(|e| e.kind), Some(VerbsErrorKind::Busy))?;
    Ok(device.ack_cq_events(b.rcq, 1)?)
}

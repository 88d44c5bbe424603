//! Atomics: results, once and in order, and what may not be done.

use alloc::format;

use super::bench::{ALL, Bench};
use super::{Block, Buffer, Harness, Outcome, Params, cases, holds, same};
use crate::{Access, AsyncEvent, PostError, QpState, RemoteAddr, SendOp, SendWr, WcOpcode, WcStatus};

cases! {
    fetch_and_add_adds_and_tells [Atomics];
    compare_and_swap_swaps_what_is_equal [Atomics];
    many_atomics_each_count_once [Atomics];
    atomics_and_reads_share_their_limit [Atomics];
    an_atomic_needs_alignment [Atomics];
    an_atomic_needs_the_right [Atomics];
    an_atomic_needs_eight_bytes [Atomics];
}

/// Whether the device has atomics at all.
pub(super) fn there<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome<bool> {
    let (a, _) = bench.pair(Params::default())?;
    let near = bench.buffer(a, 8)?;
    let op = SendOp::FetchAdd { remote_addr: RemoteAddr(0), rkey: crate::Rkey(1), add: 1 };
    let wr = SendWr { op, sg_list: &[near.sge(0, 8)], ..SendWr::default() };
    Ok(bench.try_send(a, &wr) != Err(PostError::BadOp))
}

fn add_op<B: Block>(to: &Buffer<B>, at: usize, add: u64) -> SendOp {
    SendOp::FetchAdd { remote_addr: to.remote(at), rkey: to.keys.rkey, add }
}

fn fetch_and_add_adds_and_tells<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (near, far) = (bench.buffer(a, 16)?, bench.buffer(b, 32)?);
    let mut value: u64 = u64::MAX - 5;
    far.put(8, &value.to_ne_bytes());
    for add in [0, 1, 4, 1, u64::MAX, 1 << 63] {
        bench.send(a, add, add_op(&far, 8, add), &[near.sge(8, 8)])?;
        let wc = bench.sent_as(a, add, WcStatus::Success)?;
        same("of the atomic", (wc.opcode, wc.byte_len), (WcOpcode::FetchAdd, 8))?;
        same("what it was", near.number(8), value)?;
        value = value.wrapping_add(add);
        same("what it is", far.number(8), value)?;
    }
    same("the numbers beside", (far.number(0), far.number(16)), (0, 0))
}

fn compare_and_swap_swaps_what_is_equal<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (near, far) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
    let mut value: u64 = 0x0102_0304_0506_0708;
    far.put(0, &value.to_ne_bytes());
    for (compare, swap) in
        [(value, 5), (value, 6), (5, u64::MAX), (u64::MAX, u64::MAX), (0, 1), (u64::MAX, 0)]
    {
        let op = SendOp::CmpSwap { remote_addr: far.remote(0), rkey: far.keys.rkey, compare, swap };
        bench.send(a, 1, op, &[near.sge(0, 8)])?;
        let wc = bench.sent_as(a, 1, WcStatus::Success)?;
        same("of the atomic", (wc.opcode, wc.byte_len), (WcOpcode::CompSwap, 8))?;
        same("what it was", near.number(0), value)?;
        value = if value == compare { swap } else { value };
        same("what it is", far.number(0), value)?;
    }
    Ok(())
}

fn many_atomics_each_count_once<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (a2, b2) = bench.pair(Params::default())?;
    let far = bench.buffer(b, 8)?;
    let second = bench.buffer(b2, 8)?;
    let (near, near2) = (bench.buffer(a, 256)?, bench.buffer(a2, 256)?);
    for round in 0..5u64 {
        for i in 0..20usize {
            bench.send(a, i as u64, add_op(&far, 0, 1), &[near.sge(i * 8, 8)])?;
            bench.send(a2, i as u64, add_op(&second, 0, 3), &[near2.sge(i * 8, 8)])?;
        }
        for (side, near, step) in [(a, &near, 1), (a2, &near2, 3)] {
            let done = bench.take(side.end, side.scq, 20)?;
            holds("all succeed", done.iter().all(|wc| wc.status == WcStatus::Success))?;
            for i in 0..20 {
                let wanted = (round * 20 + i as u64) * step;
                same(&format!("result {i} of round {round}"), near.number(i * 8), wanted)?;
            }
        }
    }
    same("the sums", (far.number(0), second.number(0)), (100, 300))
}

fn atomics_and_reads_share_their_limit<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    // One at a time, both ways: they wait for each other and none is refused.
    let params = Params { rd_atomic: 1, ..Params::default() };
    let (a, b) = bench.pair(params)?;
    let (near, far) = (bench.buffer(a, 4000)?, bench.buffer(b, 4000)?);
    for id in 0..30u64 {
        let op = if id % 2 == 0 { add_op(&far, 0, 1) } else { far.read_op(0) };
        let len = if id % 2 == 0 { 8 } else { 3000 };
        bench.send(a, id, op, &[near.sge(0, len)])?;
    }
    let done = bench.take(a.end, a.scq, 30)?;
    for (wc, id) in done.iter().zip(0..) {
        same("in order", (wc.wr_id, wc.status), (id, WcStatus::Success))?;
    }
    same("the sum", far.number(0), 15)
}

fn an_atomic_needs_alignment<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    for at in [1, 4, 7] {
        let (a, b) = bench.pair(Params::default())?;
        let (near, far) = (bench.buffer(a, 8)?, bench.buffer(b, 32)?);
        bench.send(a, 1, add_op(&far, at, 1), &[near.sge(0, 8)])?;
        bench.sent_as(a, 1, WcStatus::RemInvReqErr)?;
        bench.event(b.end, AsyncEvent::QpReqErr(b.qpn))?;
        same("untouched", far.get(0, 32), alloc::vec![0; 32])?;
    }
    Ok(())
}

fn an_atomic_needs_the_right<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let without = ALL.difference(Access::REMOTE_ATOMIC);
    let (a, b) = bench.pair(Params::default())?;
    let near = bench.buffer(a, 8)?;
    let far = bench.buffer_in(b.end, b.pd, 8, without)?;
    bench.send(a, 1, add_op(&far, 0, 1), &[near.sge(0, 8)])?;
    bench.sent_as(a, 1, WcStatus::RemAccessErr)?;
    bench.event(b.end, AsyncEvent::QpAccessErr(b.qpn))?;
    let (a, b) = bench.pair_of(Params::default(), Params { access: without, ..Params::default() })?;
    let (near, far) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
    bench.send(a, 1, add_op(&far, 0, 1), &[near.sge(0, 8)])?;
    bench.sent_as(a, 1, WcStatus::RemInvReqErr)?;
    bench.state(b, QpState::Err)?;
    same("untouched", far.number(0), 0)
}

fn an_atomic_needs_eight_bytes<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (near, far) = (bench.buffer(a, 16)?, bench.buffer(b, 8)?);
    for len in [0, 7, 9] {
        let wr = SendWr { op: add_op(&far, 0, 1), sg_list: &[near.sge(0, len)], ..SendWr::default() };
        holds(&format!("a list of {len} is refused"), bench.try_send(a, &wr).is_err())?;
    }
    // Of two pieces, though.
    bench.send(a, 1, add_op(&far, 0, 1), &[near.sge(0, 3), near.sge(3, 5)])?;
    bench.sent_as(a, 1, WcStatus::Success)?;
    same("untouched but once", far.number(0), 1)
}

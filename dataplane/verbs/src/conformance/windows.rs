//! Type 2 memory windows: bound and ended by work requests, and by the peer.

use alloc::format;

use super::bench::{ALL, Bench, Side};
use super::{Block, Buffer, Deviation, End, Failure, Harness, Node, Outcome, Params, cases, holds, same};
use crate::error::VerbsErrorKind;
use crate::{
    Access, AsyncEvent, PostError, QpModify, QpState, Rkey, SendOp, SendWr, WcFlags, WcOpcode, WcStatus,
};

cases! {
    a_window_grants_until_it_is_invalidated [Windows];
    a_window_grants_its_range_and_rights_only [Windows];
    a_window_belongs_to_its_queue_pair [Windows];
    binds_that_are_refused [Windows];
    invalidations_that_are_refused [Windows];
    a_peer_ends_a_window_with_its_message [Windows];
    a_peer_may_not_end_what_is_no_window [Windows];
    a_region_with_a_window_is_in_use [Windows];
    a_window_that_is_freed_or_reset_ends [Windows];
    local_operations_keep_their_order [Windows];
}

/// Whether the device binds windows at all.
pub(super) fn there<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome<bool> {
    let (a, _) = bench.pair(Params::default())?;
    let op = SendOp::LocalInv { rkey: Rkey(0x1234) };
    Ok(bench.try_send(a, &SendWr { op, ..SendWr::default() }) != Err(PostError::BadOp))
}

/// `ibv_inc_rkey`.
const fn next_key(rkey: Rkey) -> Rkey {
    Rkey((rkey.0 & !0xff) | (rkey.0.wrapping_add(1) & 0xff))
}

/// A region that windows may be bound to.
#[allow(clippy::type_complexity, reason = "the harness's own block")]
fn region<H: Harness>(
    bench: &mut Bench<'_, H>,
    side: Side,
    bytes: usize,
) -> Outcome<Buffer<<H::Node as Node>::Block>> {
    bench.buffer_in(side.end, side.pd, bytes, ALL | Access::MW_BIND)
}

fn bind_op<B: Block>(rkey: Rkey, to: &Buffer<B>, at: u64, len: u64, access: Access) -> SendOp {
    SendOp::BindMw { rkey, mr: to.keys.lkey, addr: to.keys.iova + at, len, access }
}

/// Binds a new window of `side` to a part of `to`.
fn bound<H: Harness, B: Block>(
    bench: &mut Bench<'_, H>,
    side: Side,
    to: &Buffer<B>,
    (at, len): (u64, u64),
) -> Outcome<Rkey> {
    let rkey = next_key(bench.window(side)?);
    bench.send(side, 50, bind_op(rkey, to, at, len, Access::REMOTE_WRITE | Access::REMOTE_READ), &[])?;
    let wc = bench.sent_as(side, 50, WcStatus::Success)?;
    same("opcode", wc.opcode, WcOpcode::BindMw)?;
    Ok(rkey)
}

/// A WRITE of 8 bytes by `a` under `rkey` has this outcome.
fn write<H: Harness, B: Block>(
    bench: &mut Bench<'_, H>,
    a: Side,
    (rkey, to, at): (Rkey, &Buffer<B>, usize),
    status: WcStatus,
) -> Outcome {
    let near = bench.buffer(a, 8)?;
    near.fill(0, 8, 77);
    bench.send(a, 60, SendOp::Write { remote_addr: to.remote(at), rkey }, &[near.sge(0, 8)])?;
    bench.sent_as(a, 60, status)?;
    if status == WcStatus::Success { to.check("written under the window", at, 8, 77) } else { Ok(()) }
}

fn a_window_grants_until_it_is_invalidated<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let far = region(bench, b, 256)?;
    let mut rkey = bound(bench, b, &far, (64, 64))?;
    // Bound again and again, each time under a new key.
    for round in 0..300 {
        if round % 60 == 0 {
            write(bench, a, (rkey, &far, 64), WcStatus::Success)?;
        }
        bench.send(b, 1, SendOp::LocalInv { rkey }, &[])?;
        let wc = bench.sent_as(b, 1, WcStatus::Success)?;
        same("opcode", wc.opcode, WcOpcode::LocalInv)?;
        rkey = next_key(rkey);
        bench.send(b, 2, bind_op(rkey, &far, 64, 64, Access::REMOTE_WRITE), &[])?;
        bench.sent_as(b, 2, WcStatus::Success)?;
    }
    write(bench, a, (rkey, &far, 120), WcStatus::Success)?;
    bench.send(b, 3, SendOp::LocalInv { rkey }, &[])?;
    bench.sent_as(b, 3, WcStatus::Success)?;
    write(bench, a, (rkey, &far, 64), WcStatus::RemAccessErr)?;
    bench.event(b.end, AsyncEvent::QpAccessErr(b.qpn))
}

fn a_window_grants_its_range_and_rights_only<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    for (at, reads) in [(63, false), (121, false), (64, true)] {
        let (a, b) = bench.pair(Params::default())?;
        let (near, far) = (bench.buffer(a, 8)?, region(bench, b, 256)?);
        let rkey = next_key(bench.window(b)?);
        bench.send(b, 1, bind_op(rkey, &far, 64, 64, Access::REMOTE_WRITE), &[])?;
        bench.sent_as(b, 1, WcStatus::Success)?;
        let remote_addr = far.remote(at);
        let op = if reads { SendOp::Read { remote_addr, rkey } } else { SendOp::Write { remote_addr, rkey } };
        bench.send(a, 2, op, &[near.sge(0, 8)])?;
        bench.sent_as(a, 2, WcStatus::RemAccessErr)?;
        same("untouched", far.get(0, 256), alloc::vec![0; 256])?;
    }
    Ok(())
}

fn a_window_belongs_to_its_queue_pair<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let far = region(bench, b, 64)?;
    let rkey = bound(bench, b, &far, (0, 64))?;
    // Another connection into the same protection domain.
    let other_a = bench.qp(End::A, Params::default())?;
    let other_b = bench.qp_in(End::B, b.pd, Params::default())?;
    bench.connect(other_a, other_b, Params::default())?;
    bench.connect(other_b, other_a, Params::default())?;
    write(bench, other_a, (rkey, &far, 0), WcStatus::RemAccessErr)?;
    write(bench, a, (rkey, &far, 0), WcStatus::Success)
}

fn binds_that_are_refused<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    for what in 0..7 {
        let (a, b) = bench.pair(Params::default())?;
        let (far, plain) = (region(bench, b, 64)?, bench.buffer(b, 64)?);
        let first = bench.window(b)?;
        let good = next_key(first);
        let access = Access::REMOTE_WRITE;
        let other = bench.pd(b.end)?;
        let foreign = bench.buffer_in(b.end, other, 64, ALL | Access::MW_BIND)?;
        let op = match what {
            0 => bind_op(first, &far, 0, 64, access),
            1 => bind_op(good, &plain, 0, 64, access),
            2 => bind_op(good, &far, 1, 64, access),
            3 => bind_op(good, &far, 0, 0, access),
            4 => bind_op(good, &foreign, 0, 64, access),
            5 => bind_op(Rkey(good.0 ^ 0xff00), &far, 0, 64, access),
            _ => {
                // Bound already.
                bench.send(b, 1, bind_op(good, &far, 0, 64, access), &[])?;
                bench.sent_as(b, 1, WcStatus::Success)?;
                bind_op(next_key(good), &far, 0, 64, access)
            }
        };
        bench.send(b, 2, op, &[])?;
        let wc = bench.sent(b)?;
        same(&format!("bind {what}"), (wc.wr_id, wc.status), (2, WcStatus::MwBindErr))?;
        bench.state(b, QpState::Err)?;
        let _ = a;
    }
    Ok(())
}

fn invalidations_that_are_refused<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    for what in 0..3 {
        let (_, b) = bench.pair(Params::default())?;
        let far = region(bench, b, 64)?;
        let rkey = match what {
            // Never bound.
            0 => next_key(bench.window(b)?),
            // A region's.
            1 => far.keys.rkey,
            // An older key of a window.
            _ => {
                let rkey = bound(bench, b, &far, (0, 64))?;
                Rkey(rkey.0 - 1)
            }
        };
        bench.send(b, 2, SendOp::LocalInv { rkey }, &[])?;
        bench.sent_as(b, 2, WcStatus::LocQpOpErr)?;
        bench.state(b, QpState::Err)?;
    }
    Ok(())
}

fn a_peer_ends_a_window_with_its_message<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    for size in [0, 10, 2500] {
        let (a, b) = bench.pair(Params::default())?;
        let (src, dst, far) = (bench.buffer(a, 3000)?, bench.buffer(b, 3000)?, region(bench, b, 64)?);
        let rkey = bound(bench, b, &far, (0, 64))?;
        write(bench, a, (rkey, &far, 0), WcStatus::Success)?;
        src.fill(0, size, 3);
        bench.recv(b, 1, &[dst.sge(0, 3000)])?;
        bench.send(a, 2, SendOp::SendInv { rkey }, &[src.sge(0, size)])?;
        let wc = bench.sent_as(a, 2, WcStatus::Success)?;
        same("opcode", wc.opcode, WcOpcode::Send)?;
        let wc = bench.received_as(b, 1, WcStatus::Success)?;
        same("what ended", (wc.flags, wc.invalidated), (WcFlags::WITH_INV, rkey))?;
        same("of the receive", (wc.opcode, wc.byte_len as usize), (WcOpcode::Recv, size))?;
        dst.check("the message", 0, size, 3)?;
        write(bench, a, (rkey, &far, 0), WcStatus::RemAccessErr)?;
    }
    Ok(())
}

fn a_peer_may_not_end_what_is_no_window<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    for what in 0..2 {
        let (a, b) = bench.pair_of(Params::impatient(), Params::default())?;
        let far = region(bench, b, 64)?;
        let rkey = if what == 0 { far.keys.rkey } else { next_key(bench.window(b)?) };
        bench.recv(b, 1, &[])?;
        bench.send(a, 2, SendOp::SendInv { rkey }, &[])?;
        let wc = bench.received(b)?;
        holds("the receive fails", wc.wr_id == 1 && wc.status != WcStatus::Success)?;
        // Without a NAK the requester finds out by itself.
        let wc = bench.sent(a)?;
        let allowed =
            [WcStatus::RemAccessErr, WcStatus::RemInvReqErr, WcStatus::RemOpErr, WcStatus::RetryExcErr];
        holds(&format!("the send fails: {:?}", wc.status), wc.wr_id == 2 && allowed.contains(&wc.status))?;
        bench.state(b, QpState::Err)?;
    }
    Ok(())
}

fn a_region_with_a_window_is_in_use<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (_, b) = bench.pair(Params::default())?;
    let far = region(bench, b, 64)?;
    let rkey = bound(bench, b, &far, (0, 64))?;
    let gone = bench.deregister(b.end, far.keys.lkey);
    let busy = gone.as_ref().is_err_and(|why| why.kind == VerbsErrorKind::Busy);
    bench.deviation(Deviation::DeregisterBusyByWindow, busy)?;
    if !busy {
        return gone.map_err(Failure::from);
    }
    bench.send(b, 1, SendOp::LocalInv { rkey }, &[])?;
    bench.sent_as(b, 1, WcStatus::Success)?;
    Ok(bench.deregister(b.end, far.keys.lkey)?)
}

fn a_window_that_is_freed_or_reset_ends<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    for resets in [false, true] {
        let (a, b) = bench.pair(Params::default())?;
        let far = region(bench, b, 64)?;
        let rkey = bound(bench, b, &far, (0, 64))?;
        if resets {
            for side in [a, b] {
                bench.modify(side, &QpModify::ToReset)?;
            }
            bench.connect(a, b, Params::default())?;
            bench.connect(b, a, Params::default())?;
        } else {
            bench.free_window(b.end, rkey)?;
        }
        write(bench, a, (rkey, &far, 0), WcStatus::RemAccessErr)?;
        let gone = bench.deregister(b.end, far.keys.lkey);
        holds(&format!("the region is free: {gone:?}"), gone.is_ok())?;
    }
    // The other end of a queue pair that is destroyed.
    let (_, b) = bench.pair(Params::default())?;
    let far = region(bench, b, 64)?;
    bound(bench, b, &far, (0, 64))?;
    bench.destroy(b)?;
    Ok(bench.deregister(b.end, far.keys.lkey)?)
}

fn local_operations_keep_their_order<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (near, far, own) = (bench.buffer(a, 3000)?, bench.buffer(b, 3000)?, region(bench, a, 64)?);
    far.fill(0, 3000, 9);
    let rkey = next_key(bench.window(a)?);
    bench.send(a, 0, far.read_op(0), &[near.sge(0, 3000)])?;
    bench.send(a, 1, bind_op(rkey, &own, 0, 64, Access::REMOTE_WRITE), &[])?;
    bench.send(a, 2, far.read_op(0), &[near.sge(0, 3000)])?;
    bench.send(a, 3, SendOp::LocalInv { rkey }, &[])?;
    bench.send(a, 4, far.write_op(0), &[near.sge(0, 3000)])?;
    let done = bench.take(a.end, a.scq, 5)?;
    for (wc, id) in done.iter().zip(0..) {
        same("in order", (wc.wr_id, wc.status), (id, WcStatus::Success))?;
    }
    // The scatter list of a local operation is empty.
    let sge = [near.sge(0, 8)];
    let wr = SendWr { op: SendOp::LocalInv { rkey }, sg_list: &sge, ..SendWr::default() };
    holds("one with data is refused", bench.try_send(a, &wr).is_err())?;
    bench.works(a, b)
}

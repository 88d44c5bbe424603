//! Unreliable connections.

use super::bench::Bench;
use super::{End, Harness, Outcome, Params, cases, holds, same};
use crate::{
    Device, Imm, PostError, QpModify, QpState, QpType, SendFlags, SendOp, SendWr, WcFlags, WcOpcode, WcStatus,
};

cases! {
    unreliable_sends_arrive [Uc];
    unreliable_writes_arrive [Uc];
    unreliable_connections_do_not_read [Uc];
    an_unreliable_sender_does_not_care [Uc];
    an_unreliable_message_without_receive_is_dropped [Uc];
    unreliable_queues_drain_and_flush [Uc];
    an_unreliable_send_queue_stops_and_goes_on [Uc, Windows];
}

fn unreliable_sends_arrive<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::uc())?;
    let (src, dst) = (bench.buffer(a, 6000)?, bench.buffer(b, 6000)?);
    for (id, size) in (0..).zip([0, 1, 1023, 1024, 1025, 5000]) {
        src.fill(0, size, id);
        let imm = Imm([9, 8, 7, id as u8]);
        let with_imm = id % 2 == 1;
        let op = if with_imm { SendOp::SendImm(imm) } else { SendOp::Send };
        bench.recv(b, 100 + id, &[dst.sge(0, 6000)])?;
        bench.send(a, id, op, &[src.sge(0, size)])?;
        bench.sent_as(a, id, WcStatus::Success)?;
        let wc = bench.received_as(b, 100 + id, WcStatus::Success)?;
        same("bytes", wc.byte_len as usize, size)?;
        let wanted = if with_imm { (WcFlags::WITH_IMM, imm) } else { (WcFlags::empty(), wc.imm) };
        same("immediate", (wc.flags, wc.imm), wanted)?;
        dst.check("unreliable SEND", 0, size, id)?;
    }
    Ok(())
}

fn unreliable_writes_arrive<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::uc())?;
    let (src, dst) = (bench.buffer(a, 6000)?, bench.buffer(b, 6000)?);
    for (id, size) in (0..).zip([1, 1024, 1025, 5000]) {
        src.fill(0, size, id);
        bench.recv(b, 100 + id, &[])?;
        let imm = Imm([1, 1, 1, id as u8]);
        bench.send(a, id, dst.write_op(0), &[src.sge(0, size)])?;
        bench.sent_as(a, id, WcStatus::Success)?;
        // The immediate data comes behind the WRITE.
        let op = SendOp::WriteImm { remote_addr: dst.remote(0), rkey: dst.keys.rkey, imm };
        bench.send(a, id, op, &[])?;
        bench.sent_as(a, id, WcStatus::Success)?;
        let wc = bench.received_as(b, 100 + id, WcStatus::Success)?;
        same("of the receive", (wc.opcode, wc.imm), (WcOpcode::RecvRdmaWithImm, imm))?;
        dst.check("unreliable WRITE", 0, size, id)?;
    }
    Ok(())
}

fn unreliable_connections_do_not_read<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::uc())?;
    let (near, far) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
    let (remote_addr, rkey) = (far.remote(0), far.keys.rkey);
    for op in [
        far.read_op(0),
        SendOp::FetchAdd { remote_addr, rkey, add: 1 },
        SendOp::CmpSwap { remote_addr, rkey, compare: 0, swap: 1 },
        SendOp::SendInv { rkey },
    ] {
        let wr = SendWr { op, sg_list: &[near.sge(0, 8)], ..SendWr::default() };
        same("the post", bench.try_send(a, &wr), Err(PostError::BadOp))?;
    }
    bench.works(a, b)
}

fn an_unreliable_sender_does_not_care<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::uc())?;
    let (src, dst) = (bench.buffer(a, 3000)?, bench.buffer(b, 3000)?);
    // A wrong key, and a peer that is not there any more: success all the same.
    let op = SendOp::Write { remote_addr: dst.remote(0), rkey: crate::Rkey(dst.keys.rkey.0 ^ 2) };
    bench.send(a, 1, op, &[src.sge(0, 3000)])?;
    bench.sent_as(a, 1, WcStatus::Success)?;
    bench.modify(b, &QpModify::ToReset)?;
    bench.send(a, 2, dst.write_op(0), &[src.sge(0, 3000)])?;
    bench.sent_as(a, 2, WcStatus::Success)?;
    same("untouched", dst.get(0, 3000), alloc::vec![0; 3000])?;
    bench.state(a, QpState::Rts)
}

fn an_unreliable_message_without_receive_is_dropped<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::uc())?;
    let (src, dst, flag) = (bench.buffer(a, 3000)?, bench.buffer(b, 3000)?, bench.buffer(b, 8)?);
    src.fill(0, 3000, 1);
    bench.send(a, 1, SendOp::Send, &[src.sge(0, 3000)])?;
    bench.sent_as(a, 1, WcStatus::Success)?;
    // A WRITE behind it shows that it has come and gone.
    bench.send(a, 2, flag.write_op(0), &[src.sge(0, 8)])?;
    bench.sent_as(a, 2, WcStatus::Success)?;
    bench.until("the WRITE behind", |_| Ok((flag.get(0, 8) == src.get(0, 8)).then_some(())))?;
    bench.recv(b, 3, &[dst.sge(0, 3000)])?;
    src.fill(0, 3000, 2);
    bench.send(a, 4, SendOp::Send, &[src.sge(0, 2000)])?;
    bench.sent_as(a, 4, WcStatus::Success)?;
    let wc = bench.received_as(b, 3, WcStatus::Success)?;
    same("bytes", wc.byte_len, 2000)?;
    dst.check("the message after", 0, 2000, 2)
}

fn unreliable_queues_drain_and_flush<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::uc())?;
    let (src, dst) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
    bench.modify(a, &QpModify::ToSqd)?;
    bench.event(End::A, crate::AsyncEvent::SqDrained(a.qpn))?;
    bench.send(a, 1, dst.write_op(0), &[src.sge(0, 8)])?;
    bench.empty(End::A, a.scq)?;
    bench.modify(a, &QpModify::SqdToRts)?;
    bench.sent_as(a, 1, WcStatus::Success)?;
    bench.recv(a, 2, &[src.sge(0, 8)])?;
    bench.modify(a, &QpModify::ToErr)?;
    bench.received_as(a, 2, WcStatus::WrFlushErr)?;
    let wr = SendWr { wr_id: 3, flags: SendFlags::SIGNALED, ..SendWr::default() };
    bench.try_send(a, &wr)?;
    bench.sent_as(a, 3, WcStatus::WrFlushErr)?;
    let qp_type = bench.device(End::A).query_qp(a.qpn)?.qp_type;
    holds("it is what it was made as", qp_type == QpType::Uc)
}

/// SQE: a send that fails stops the send queue and flushes what is behind it; the receive side goes on, and so does the
/// send queue when it is asked to.
fn an_unreliable_send_queue_stops_and_goes_on<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::uc())?;
    let (near, far) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
    bench.recv(a, 50, &[near.sge(0, 8)])?;
    // A key that no window has.
    let rkey = crate::Rkey(near.keys.rkey.0 ^ 0x300);
    bench.send(a, 1, SendOp::LocalInv { rkey }, &[])?;
    bench.send(a, 2, far.write_op(0), &[near.sge(0, 8)])?;
    bench.state(a, QpState::Sqe)?;
    bench.send(a, 3, SendOp::Send, &[])?;
    let done = bench.take(a.end, a.scq, 3)?;
    for (wc, wanted) in
        done.iter().zip([(1, WcStatus::LocQpOpErr), (2, WcStatus::WrFlushErr), (3, WcStatus::WrFlushErr)])
    {
        same("a send", (wc.wr_id, wc.status), wanted)?;
    }
    far.fill(0, 8, 4);
    bench.send(b, 60, SendOp::Send, &[far.sge(0, 8)])?;
    bench.received_as(a, 50, WcStatus::Success)?;
    near.check("what came meanwhile", 0, 8, 4)?;
    holds("SQD is no way out", bench.device(a.end).modify_qp(a.qpn, &QpModify::ToSqd).is_err())?;
    bench.modify(a, &QpModify::SqeToRts)?;
    bench.works(a, b)
}

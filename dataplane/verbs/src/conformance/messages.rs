//! What arrives, and how it is reported, when nothing is wrong: every operation of a reliable connection.

use alloc::format;
use alloc::vec::Vec;

use super::bench::Bench;
use super::{Harness, Outcome, Params, cases, holds, same};
use crate::{Device, Imm, PostError, SendFlags, SendOp, SendWr, WcFlags, WcOpcode, WcStatus};

cases! {
    send_of_every_size [];
    send_with_immediate [];
    write_of_every_size [];
    write_with_immediate_takes_a_receive [];
    read_of_every_size [];
    scatter_and_gather [];
    inline_data_is_copied_at_the_post [];
    unsignalled_sends_complete_silently [];
    sq_sig_all_signals_everything [];
    completions_come_in_order_of_the_posts [];
    receives_are_filled_in_order [];
    a_fenced_send_carries_what_was_read [];
    empty_messages_need_no_key [];
    a_sender_waits_for_a_receive [];
    both_directions_at_once [];
    a_long_message_arrives_whole [];
}

const IMM: Imm = Imm([0xde, 0xad, 0xbe, 0xef]);

/// Sizes around the borders of packets of 1024 bytes.
const SIZES: [usize; 11] = [0, 1, 3, 4, 1023, 1024, 1025, 2047, 2048, 2049, 5000];

fn send_of_every_size<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, 6000)?, bench.buffer(b, 6000)?);
    for (i, size) in SIZES.into_iter().enumerate() {
        let id = i as u64;
        src.fill(0, size, id);
        bench.recv(b, 100 + id, &[dst.sge(0, 6000)])?;
        bench.send(a, id, SendOp::Send, &[src.sge(0, size)])?;
        let wc = bench.sent_as(a, id, WcStatus::Success)?;
        same("opcode", wc.opcode, WcOpcode::Send)?;
        let wc = bench.received_as(b, 100 + id, WcStatus::Success)?;
        same("of the receive", (wc.opcode, wc.byte_len as usize), (WcOpcode::Recv, size))?;
        holds("a message without immediate data or key says so", wc.flags.is_empty())?;
        holds("not solicited", !wc.solicited)?;
        dst.check(&format!("SEND of {size}"), 0, size, id)?;
    }
    Ok(())
}

fn send_with_immediate<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, 3000)?, bench.buffer(b, 3000)?);
    for size in [0, 10, 2500] {
        src.fill(0, size, 7);
        bench.recv(b, 1, &[dst.sge(0, 3000)])?;
        bench.send(a, 2, SendOp::SendImm(IMM), &[src.sge(0, size)])?;
        bench.sent_as(a, 2, WcStatus::Success)?;
        let wc = bench.received_as(b, 1, WcStatus::Success)?;
        same("of the receive", (wc.opcode, wc.byte_len as usize), (WcOpcode::Recv, size))?;
        same("immediate", (wc.flags, wc.imm), (WcFlags::WITH_IMM, IMM))?;
        dst.check("SEND with immediate", 0, size, 7)?;
    }
    Ok(())
}

fn write_of_every_size<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, 6000)?, bench.buffer(b, 6002)?);
    for (i, size) in SIZES.into_iter().enumerate() {
        let id = i as u64;
        src.fill(0, size, id);
        dst.put(0, &[0x5a; 6002]);
        bench.send(a, id, dst.write_op(1), &[src.sge(0, size)])?;
        let wc = bench.sent_as(a, id, WcStatus::Success)?;
        same("opcode", wc.opcode, WcOpcode::RdmaWrite)?;
        dst.check(&format!("WRITE of {size}"), 1, size, id)?;
        same("the bytes around", (dst.get(0, 1), dst.get(size + 1, 1)), ([0x5a].into(), [0x5a].into()))?;
    }
    bench.empty(b.end, b.rcq)
}

fn write_with_immediate_takes_a_receive<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, 3000)?, bench.buffer(b, 3000)?);
    let unused = bench.buffer(b, 16)?;
    unused.fill(0, 16, 99);
    for size in [0, 10, 2500] {
        src.fill(0, size, 3);
        bench.recv(b, 1, &[unused.sge(0, 16)])?;
        let op = SendOp::WriteImm { remote_addr: dst.remote(0), rkey: dst.keys.rkey, imm: IMM };
        bench.send(a, 2, op, &[src.sge(0, size)])?;
        let wc = bench.sent_as(a, 2, WcStatus::Success)?;
        same("opcode", wc.opcode, WcOpcode::RdmaWrite)?;
        let wc = bench.received_as(b, 1, WcStatus::Success)?;
        same("of the receive", (wc.opcode, wc.byte_len as usize), (WcOpcode::RecvRdmaWithImm, size))?;
        same("immediate", (wc.flags, wc.imm), (WcFlags::WITH_IMM, IMM))?;
        dst.check("WRITE with immediate", 0, size, 3)?;
        unused.check("the receive's own buffer", 0, 16, 99)?;
    }
    // A receive without room is as good: nothing is put there.
    bench.recv(b, 5, &[])?;
    let op = SendOp::WriteImm { remote_addr: dst.remote(0), rkey: dst.keys.rkey, imm: IMM };
    bench.send(a, 6, op, &[src.sge(0, 100)])?;
    bench.sent_as(a, 6, WcStatus::Success)?;
    bench.received_as(b, 5, WcStatus::Success).map(|_| ())
}

fn read_of_every_size<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (dst, src) = (bench.buffer(a, 6002)?, bench.buffer(b, 6000)?);
    for (i, size) in SIZES.into_iter().enumerate() {
        let id = i as u64;
        src.fill(0, size, id);
        dst.put(0, &[0x5a; 6002]);
        bench.send(a, id, src.read_op(0), &[dst.sge(1, size)])?;
        let wc = bench.sent_as(a, id, WcStatus::Success)?;
        same("of the READ", (wc.opcode, wc.byte_len as usize), (WcOpcode::RdmaRead, size))?;
        dst.check(&format!("READ of {size}"), 1, size, id)?;
        same("the bytes around", (dst.get(0, 1), dst.get(size + 1, 1)), ([0x5a].into(), [0x5a].into()))?;
    }
    bench.empty(b.end, b.rcq)
}

fn scatter_and_gather<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, 4000)?, bench.buffer(b, 4000)?);
    src.fill(0, 3000, 1);
    dst.put(0, &[0; 4000]);
    let gather = [src.sge(0, 7), src.sge(7, 0), src.sge(7, 1500), src.sge(1507, 1493)];
    // Not in the order of their addresses, and more room than the message needs.
    let scatter = [dst.sge(2000, 1000), dst.sge(0, 1), dst.sge(1, 1500), dst.sge(1501, 499)];
    let place = |bytes: &[u8]| -> Vec<u8> {
        let mut all = bytes.get(2000..3000).unwrap_or(&[]).to_vec();
        all.extend_from_slice(bytes.get(..2000).unwrap_or(&[]));
        all
    };
    bench.recv(b, 1, &scatter)?;
    bench.send(a, 2, SendOp::Send, &gather)?;
    bench.sent_as(a, 2, WcStatus::Success)?;
    bench.received_as(b, 1, WcStatus::Success)?;
    holds("SEND gathers and scatters", place(&dst.get(0, 3000)) == src.get(0, 3000))?;
    bench.send(a, 3, dst.write_op(500), &gather)?;
    bench.sent_as(a, 3, WcStatus::Success)?;
    dst.check("WRITE gathers", 500, 3000, 1)?;
    dst.fill(0, 3000, 2);
    let scatter = [src.sge(2000, 1000), src.sge(0, 1), src.sge(1, 1500), src.sge(1501, 499)];
    bench.send(a, 4, dst.read_op(0), &scatter)?;
    bench.sent_as(a, 4, WcStatus::Success)?;
    holds("READ scatters", place(&src.get(0, 3000)) == dst.get(0, 3000))
}

fn inline_data_is_copied_at_the_post<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let dst = bench.buffer(b, 64)?;
    let flags = SendFlags::SIGNALED | SendFlags::INLINE;
    for len in [0, 1, 64] {
        let mut bytes = super::parts::pattern(len, 5);
        bench.recv(b, 1, &[dst.sge(0, 64)])?;
        let wr = SendWr { wr_id: 2, inline: &bytes, flags, ..SendWr::default() };
        bench.try_send(a, &wr)?;
        bytes.fill(0xff);
        bench.sent_as(a, 2, WcStatus::Success)?;
        let wc = bench.received_as(b, 1, WcStatus::Success)?;
        same("bytes", wc.byte_len as usize, len)?;
        dst.check("inline SEND", 0, len, 5)?;
    }
    let bytes = super::parts::pattern(40, 6);
    let wr = SendWr { wr_id: 3, op: dst.write_op(8), inline: &bytes, flags, ..SendWr::default() };
    bench.try_send(a, &wr)?;
    bench.sent_as(a, 3, WcStatus::Success)?;
    dst.check("inline WRITE", 8, 40, 6)?;
    // The queue pair may have been given more than was asked for.
    let most = bench.device(a.end).query_qp(a.qpn)?.cap.max_inline_data as usize;
    let long = super::parts::pattern(most + 1, 0);
    let wr = SendWr { wr_id: 4, inline: &long, flags, ..SendWr::default() };
    same("more than max_inline_data", bench.try_send(a, &wr), Err(PostError::TooLong))?;
    bench.works(a, b)
}

fn unsignalled_sends_complete_silently<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, 64)?, bench.buffer(b, 64)?);
    let depth = u64::from(bench.device(a.end).query_qp(a.qpn)?.cap.max_send_wr);
    // Several times as many as the queue holds: slots come free with the signalled ones.
    for round in 0..4u64 {
        let sge = [src.sge(0, 64)];
        let quiet = SendWr { wr_id: 1, op: dst.write_op(0), sg_list: &sge, ..SendWr::default() };
        for _ in 0..depth - 1 {
            bench.try_send(a, &quiet)?;
        }
        bench.send(a, 100 + round, dst.write_op(0), &sge)?;
        bench.sent_as(a, 100 + round, WcStatus::Success)?;
    }
    bench.empty(a.end, a.scq)
}

fn sq_sig_all_signals_everything<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let params = Params { sq_sig_all: true, ..Params::default() };
    let (a, b) = bench.pair(params)?;
    let (src, dst) = (bench.buffer(a, 64)?, bench.buffer(b, 64)?);
    holds("query_qp tells", bench.device(a.end).query_qp(a.qpn)?.sq_sig_all)?;
    let sge = [src.sge(0, 64)];
    for wr_id in 0..3 {
        bench.try_send(a, &SendWr { wr_id, op: dst.write_op(0), sg_list: &sge, ..SendWr::default() })?;
    }
    let ids: Vec<u64> = bench.take(a.end, a.scq, 3)?.iter().map(|wc| wc.wr_id).collect();
    same("identities", ids, [0, 1, 2].into())
}

fn completions_come_in_order_of_the_posts<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, 4000)?, bench.buffer(b, 4000)?);
    let mut opcodes = Vec::new();
    for id in 0..8 {
        bench.recv(b, id, &[dst.sge(0, 4000)])?;
    }
    for id in 0..24u64 {
        // READs take longer than what follows them, and may not be overtaken in the queue.
        let (op, opcode, len) = match id % 3 {
            0 => (dst.read_op(0), WcOpcode::RdmaRead, 3000),
            1 => (SendOp::Send, WcOpcode::Send, 10),
            _ => (dst.write_op(0), WcOpcode::RdmaWrite, 1),
        };
        bench.send(a, id, op, &[src.sge(0, len)])?;
        opcodes.push((id, opcode));
    }
    let done = bench.take(a.end, a.scq, 24)?;
    holds("all succeed", done.iter().all(|wc| wc.status == WcStatus::Success))?;
    same("order", done.iter().map(|wc| (wc.wr_id, wc.opcode)).collect::<Vec<_>>(), opcodes)?;
    let done = bench.take(b.end, b.rcq, 8)?;
    same("order of receives", done.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), (0..8).collect())
}

fn receives_are_filled_in_order<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, 1000)?, bench.buffer(b, 1000)?);
    src.fill(0, 1000, 4);
    for id in 0..10usize {
        bench.recv(b, id as u64, &[dst.sge(id * 100, 100)])?;
    }
    for id in 0..10usize {
        bench.send(a, id as u64, SendOp::Send, &[src.sge(id * 100, 100)])?;
    }
    bench.take(a.end, a.scq, 10)?;
    let done = bench.take(b.end, b.rcq, 10)?;
    same("order", done.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), (0..10).collect())?;
    dst.check("each message in its buffer", 0, 1000, 4)
}

fn a_fenced_send_carries_what_was_read<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (near, far) = (bench.buffer(a, 8000)?, bench.buffer(b, 20_000)?);
    for round in 0..5 {
        far.fill(0, 8000, round);
        near.put(0, &[0; 8000]);
        bench.send(a, 1, far.read_op(0), &[near.sge(0, 8000)])?;
        let sge = [near.sge(0, 8000)];
        let flags = SendFlags::SIGNALED | SendFlags::FENCE;
        let wr = SendWr { wr_id: 2, op: far.write_op(10_000), sg_list: &sge, flags, ..SendWr::default() };
        bench.try_send(a, &wr)?;
        let done = bench.take(a.end, a.scq, 2)?;
        holds("both succeed", done.iter().all(|wc| wc.status == WcStatus::Success))?;
        far.check("what came back", 10_000, 8000, round)?;
    }
    Ok(())
}

fn empty_messages_need_no_key<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (remote_addr, rkey) = (crate::RemoteAddr(0xdead_0000), crate::Rkey(0x1234_5678));
    let nothing = crate::Sge { addr: 1, length: 0, lkey: crate::Lkey(0x777) };
    bench.recv(b, 1, &[nothing])?;
    bench.recv(b, 2, &[])?;
    bench.send(a, 1, SendOp::Send, &[nothing])?;
    bench.send(a, 2, SendOp::Send, &[])?;
    bench.send(a, 3, SendOp::Write { remote_addr, rkey }, &[])?;
    bench.send(a, 4, SendOp::Read { remote_addr, rkey }, &[nothing])?;
    let done = bench.take(a.end, a.scq, 4)?;
    holds("all succeed", done.iter().all(|wc| wc.status == WcStatus::Success))?;
    let done = bench.take(b.end, b.rcq, 2)?;
    holds("both receives are empty", done.iter().all(|wc| wc.status == WcStatus::Success && wc.byte_len == 0))
}

fn a_sender_waits_for_a_receive<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, 100)?, bench.buffer(b, 100)?);
    src.fill(0, 100, 8);
    bench.send(a, 1, SendOp::Send, &[src.sge(0, 100)])?;
    // It has left, and was refused for now, when a WRITE that was posted after it has not arrived either.
    for _ in 0..20 {
        bench.harness.pause();
    }
    bench.empty(a.end, a.scq)?;
    bench.recv(b, 2, &[dst.sge(0, 100)])?;
    bench.sent_as(a, 1, WcStatus::Success)?;
    bench.received_as(b, 2, WcStatus::Success)?;
    dst.check("the message that waited", 0, 100, 8)
}

fn both_directions_at_once<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b) = bench.pair(Params::default())?;
    let (buf_a, buf_b) = (bench.buffer(a, 40_000)?, bench.buffer(b, 40_000)?);
    for (side, near, far, seed) in [(a, &buf_a, &buf_b, 1), (b, &buf_b, &buf_a, 2)] {
        near.fill(0, 10_000, seed);
        far.fill(20_000, 10_000, seed + 10);
        bench.send(side, 1, far.write_op(10_000), &[near.sge(0, 10_000)])?;
        bench.send(side, 2, far.read_op(20_000), &[near.sge(30_000, 10_000)])?;
    }
    for (side, near, far, seed) in [(a, &buf_a, &buf_b, 1), (b, &buf_b, &buf_a, 2)] {
        let done = bench.take(side.end, side.scq, 2)?;
        holds("both succeed", done.iter().all(|wc| wc.status == WcStatus::Success))?;
        far.check("written", 10_000, 10_000, seed)?;
        near.check("read", 30_000, 10_000, seed + 10)?;
    }
    Ok(())
}

fn a_long_message_arrives_whole<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    const LEN: usize = 1 << 20;
    let (a, b) = bench.pair(Params::default())?;
    let (src, dst) = (bench.buffer(a, LEN)?, bench.buffer(b, LEN)?);
    src.fill(0, LEN, 1);
    bench.recv(b, 1, &[dst.sge(0, LEN)])?;
    bench.send(a, 2, SendOp::Send, &[src.sge(0, LEN)])?;
    bench.sent_as(a, 2, WcStatus::Success)?;
    let wc = bench.received_as(b, 1, WcStatus::Success)?;
    same("bytes", wc.byte_len as usize, LEN)?;
    dst.check("SEND of 1 MiB", 0, LEN, 1)?;
    dst.fill(0, LEN, 2);
    bench.send(a, 3, dst.read_op(0), &[src.sge(0, LEN)])?;
    bench.sent_as(a, 3, WcStatus::Success)?;
    src.check("READ of 1 MiB", 0, LEN, 2)
}

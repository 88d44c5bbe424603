//! Datagrams: address handles, queue keys, the GRH area, groups.

use alloc::format;
use alloc::vec;

use super::bench::{Bench, QKEY, Side};
use super::{Deviation, End, Failure, Harness, Node, Outcome, Params, cases, holds, same};
use crate::{
    Ah, Device, Gid, Imm, PathMtu, PostError, Qkey, QpChange, QpModify, QpState, Qpn, SendFlags, SendOp,
    SendWr, Sge, UdDest, WcFlags, WcOpcode, WcStatus,
};

cases! {
    datagrams_arrive_behind_the_grh_area [Ud];
    datagrams_carry_immediate_data [Ud];
    the_grh_area_tells_both_addresses [Ud];
    one_queue_pair_reaches_several [Ud];
    a_wrong_queue_key_is_dropped [Ud];
    the_own_queue_key_is_taken_where_asked [Ud];
    a_datagram_is_one_packet [Ud];
    a_datagram_without_receive_is_dropped [Ud];
    a_datagram_too_long_for_its_receive [Ud];
    datagrams_only_send [Ud];
    a_datagram_needs_an_address_handle [Ud];
    a_group_reaches_every_member [Ud, Multicast];
}

/// Bytes of the GRH area.
const GRH: usize = 40;

/// A queue pair ready to send and to receive.
fn endpoint<H: Harness>(bench: &mut Bench<'_, H>, end: End) -> Outcome<Side> {
    let side = bench.qp(end, Params::ud())?;
    // Towards itself: a datagram's way is its own.
    for step in bench.steps(side, Side { end: end.peer(), ..side }, Params::ud()) {
        bench.modify(side, &step)?;
    }
    Ok(side)
}

/// A on one end, B on the other, and the way from A to B.
fn endpoints<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome<(Side, Side, UdDest)> {
    let (a, b) = (endpoint(bench, End::A)?, endpoint(bench, End::B)?);
    let dest = towards(bench, a, b)?;
    Ok((a, b, dest))
}

fn towards<H: Harness>(bench: &mut Bench<'_, H>, from: Side, to: Side) -> Outcome<UdDest> {
    let dgid = bench.harness.node(to.end).gid();
    let ah = bench.ah(from, dgid, to.qpn)?;
    Ok(UdDest { ah, remote_qpn: to.qpn, remote_qkey: QKEY })
}

/// Sends a datagram that must be taken and leave.
#[track_caller]
fn datagram<H: Harness>(
    bench: &mut Bench<'_, H>,
    from: Side,
    dest: &UdDest,
    (wr_id, op, sge): (u64, SendOp, Sge),
) -> Outcome {
    let flags = SendFlags::SIGNALED;
    bench
        .try_send(from, &SendWr { wr_id, op, sg_list: &[sge], flags, ud: Some(dest), ..SendWr::default() })?;
    let wc = bench.sent_as(from, wr_id, WcStatus::Success)?;
    same("opcode", wc.opcode, WcOpcode::Send)
}

fn datagrams_arrive_behind_the_grh_area<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b, dest) = endpoints(bench)?;
    let (src, dst) = (bench.buffer(a, 2000)?, bench.buffer(b, 2000)?);
    for (id, size) in (0..).zip([0, 1, 3, 500, 1024]) {
        src.fill(0, size, id);
        // In two pieces, so that the area does not end where one does.
        bench.recv(b, id, &[dst.sge(0, 50), dst.sge(50, 1950)])?;
        datagram(bench, a, &dest, (100 + id, SendOp::Send, src.sge(0, size)))?;
        let wc = bench.received_as(b, id, WcStatus::Success)?;
        same("of the receive", (wc.opcode, wc.byte_len as usize), (WcOpcode::Recv, size + GRH))?;
        same("the sender", wc.src_qpn, a.qpn)?;
        same("flags", wc.flags, WcFlags::GRH)?;
        dst.check(&format!("datagram of {size}"), GRH, size, id)?;
    }
    Ok(())
}

fn datagrams_carry_immediate_data<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b, dest) = endpoints(bench)?;
    let (src, dst) = (bench.buffer(a, 100)?, bench.buffer(b, 200)?);
    let imm = Imm([4, 3, 2, 1]);
    bench.recv(b, 1, &[dst.sge(0, 200)])?;
    datagram(bench, a, &dest, (2, SendOp::SendImm(imm), src.sge(0, 100)))?;
    let wc = bench.received_as(b, 1, WcStatus::Success)?;
    same("immediate", (wc.flags, wc.imm), (WcFlags::GRH | WcFlags::WITH_IMM, imm))?;
    // Inline, as small messages are sent.
    let bytes = super::parts::pattern(30, 6);
    bench.recv(b, 3, &[dst.sge(0, 200)])?;
    let flags = SendFlags::INLINE | SendFlags::SOLICITED;
    bench.try_send(a, &SendWr { inline: &bytes, flags, ud: Some(&dest), ..SendWr::default() })?;
    let wc = bench.received_as(b, 3, WcStatus::Success)?;
    same("solicited", (wc.solicited, wc.byte_len), (true, 70))?;
    dst.check("inline datagram", GRH, 30, 6)
}

fn the_grh_area_tells_both_addresses<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b, dest) = endpoints(bench)?;
    let (src, dst) = (bench.buffer(a, 8)?, bench.buffer(b, 100)?);
    bench.recv(b, 1, &[dst.sge(0, 100)])?;
    datagram(bench, a, &dest, (2, SendOp::Send, src.sge(0, 8)))?;
    bench.received_as(b, 1, WcStatus::Success)?;
    let area = dst.get(0, GRH);
    let (from, to) = (bench.harness.node(End::A).gid(), bench.harness.node(End::B).gid());
    match (from.ipv4(), to.ipv4()) {
        (Some(from), Some(to)) => {
            // The IPv4 header lies in the second half.
            same("version and length", area.get(20).copied(), Some(0x45))?;
            same("protocol", area.get(29).copied(), Some(17))?;
            same("source", area.get(32..36), Some(&from.octets()[..]))?;
            same("destination", area.get(36..40), Some(&to.octets()[..]))
        }
        _ => {
            same("version", area.first().map(|byte| byte >> 4), Some(6))?;
            same("next header", area.get(6).copied(), Some(17))?;
            same("source", area.get(8..24), Some(&from.0[..]))?;
            same("destination", area.get(24..40), Some(&to.0[..]))
        }
    }
}

fn one_queue_pair_reaches_several<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b, dest) = endpoints(bench)?;
    let other = endpoint(bench, End::B)?;
    let to_other = UdDest { remote_qpn: other.qpn, ..dest };
    let (src, dst, dst_other) = (bench.buffer(a, 8)?, bench.buffer(b, 100)?, bench.buffer(other, 100)?);
    for round in 0..10 {
        bench.recv(b, round, &[dst.sge(0, 100)])?;
        bench.recv(other, round, &[dst_other.sge(0, 100)])?;
        src.fill(0, 8, round);
        datagram(bench, a, &dest, (1, SendOp::Send, src.sge(0, 8)))?;
        datagram(bench, a, &to_other, (2, SendOp::Send, src.sge(0, 8)))?;
        for (side, dst) in [(b, &dst), (other, &dst_other)] {
            bench.received_as(side, round, WcStatus::Success)?;
            dst.check("datagram", GRH, 8, round)?;
        }
    }
    // And the answer, by what the datagram told.
    let back = towards(bench, b, a)?;
    let near = bench.buffer(a, 100)?;
    bench.recv(a, 3, &[near.sge(0, 100)])?;
    dst.fill(0, 8, 70);
    datagram(bench, b, &back, (4, SendOp::Send, dst.sge(0, 8)))?;
    let wc = bench.received_as(a, 3, WcStatus::Success)?;
    same("the sender", wc.src_qpn, b.qpn)?;
    near.check("the answer", GRH, 8, 70)
}

fn a_wrong_queue_key_is_dropped<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b, dest) = endpoints(bench)?;
    let (src, dst) = (bench.buffer(a, 8)?, bench.buffer(b, 100)?);
    bench.recv(b, 1, &[dst.sge(0, 100)])?;
    let wrong = UdDest { remote_qkey: Qkey(QKEY.0 ^ 1), ..dest };
    src.fill(0, 8, 1);
    datagram(bench, a, &wrong, (2, SendOp::Send, src.sge(0, 8)))?;
    src.fill(0, 8, 2);
    datagram(bench, a, &dest, (3, SendOp::Send, src.sge(0, 8)))?;
    bench.received_as(b, 1, WcStatus::Success)?;
    dst.check("the one with the right key", GRH, 8, 2)?;
    // A queue pair's key can be changed while it works.
    let change = QpChange { qkey: Some(Qkey(QKEY.0 ^ 1)), ..QpChange::default() };
    bench.modify(b, &QpModify::Change(change))?;
    bench.recv(b, 4, &[dst.sge(0, 100)])?;
    datagram(bench, a, &dest, (5, SendOp::Send, src.sge(0, 8)))?;
    src.fill(0, 8, 3);
    datagram(bench, a, &wrong, (6, SendOp::Send, src.sge(0, 8)))?;
    bench.received_as(b, 4, WcStatus::Success)?;
    dst.check("the one with the new key", GRH, 8, 3)
}

fn the_own_queue_key_is_taken_where_asked<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b, dest) = endpoints(bench)?;
    let (src, dst) = (bench.buffer(a, 8)?, bench.buffer(b, 100)?);
    bench.recv(b, 1, &[dst.sge(0, 100)])?;
    let own = UdDest { remote_qkey: Qkey(0x8000_0001), ..dest };
    datagram(bench, a, &own, (2, SendOp::Send, src.sge(0, 8)))?;
    bench.received_as(b, 1, WcStatus::Success).map(|_| ())
}

fn a_datagram_is_one_packet<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b, dest) = endpoints(bench)?;
    let largest = PathMtu::Mtu4096.bytes() as usize;
    let (src, dst) = (bench.buffer(a, largest + 1)?, bench.buffer(b, 5000)?);
    let wr = SendWr { sg_list: &[src.sge(0, largest + 1)], ud: Some(&dest), ..SendWr::default() };
    if bench.try_send(a, &wr).is_ok() {
        // Then the completion tells, and the send queue stops.
        let wc = bench.sent(a)?;
        same("status", wc.status, WcStatus::LocLenErr)?;
        bench.state(a, QpState::Sqe)?;
        bench.modify(a, &QpModify::SqeToRts)?;
    }
    bench.recv(b, 1, &[dst.sge(0, 5000)])?;
    datagram(bench, a, &dest, (2, SendOp::Send, src.sge(0, 8)))?;
    bench.received_as(b, 1, WcStatus::Success).map(|_| ())
}

fn a_datagram_without_receive_is_dropped<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b, dest) = endpoints(bench)?;
    let marker = endpoint(bench, End::B)?;
    let to_marker = UdDest { remote_qpn: marker.qpn, ..dest };
    let (src, dst, flag) = (bench.buffer(a, 8)?, bench.buffer(b, 100)?, bench.buffer(marker, 100)?);
    bench.recv(marker, 9, &[flag.sge(0, 100)])?;
    src.fill(0, 8, 1);
    datagram(bench, a, &dest, (1, SendOp::Send, src.sge(0, 8)))?;
    // Another queue pair's datagram behind it shows that it has come and gone.
    datagram(bench, a, &to_marker, (2, SendOp::Send, src.sge(0, 8)))?;
    bench.received_as(marker, 9, WcStatus::Success)?;
    bench.recv(b, 3, &[dst.sge(0, 100)])?;
    src.fill(0, 8, 2);
    datagram(bench, a, &dest, (4, SendOp::Send, src.sge(0, 8)))?;
    bench.received_as(b, 3, WcStatus::Success)?;
    dst.check("the one that found a receive", GRH, 8, 2)
}

fn a_datagram_too_long_for_its_receive<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b, dest) = endpoints(bench)?;
    let (src, dst) = (bench.buffer(a, 100)?, bench.buffer(b, 200)?);
    dst.put(0, &[0x5a; 200]);
    // The area counts too.
    bench.recv(b, 1, &[dst.sge(0, GRH + 99)])?;
    datagram(bench, a, &dest, (2, SendOp::Send, src.sge(0, 100)))?;
    src.fill(0, 50, 4);
    datagram(bench, a, &dest, (3, SendOp::Send, src.sge(0, 50)))?;
    // Dropped with the receive kept, or the receive fails.
    let wc = bench.received(b)?;
    if wc.status == WcStatus::Success {
        same("bytes", wc.byte_len as usize, GRH + 50)?;
        dst.check("the one that fits", GRH, 50, 4)?;
    } else {
        same("status", (wc.wr_id, wc.status), (1, WcStatus::LocLenErr))?;
    }
    holds("nothing lies behind the room", dst.get(GRH + 99, 61).iter().all(|byte| *byte == 0x5a))
}

fn datagrams_only_send<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b, dest) = endpoints(bench)?;
    let (near, far) = (bench.buffer(a, 8)?, bench.buffer(b, 8)?);
    let (remote_addr, rkey) = (far.remote(0), far.keys.rkey);
    for op in [
        far.write_op(0),
        far.read_op(0),
        SendOp::FetchAdd { remote_addr, rkey, add: 1 },
        SendOp::SendInv { rkey },
        SendOp::LocalInv { rkey },
    ] {
        let wr = SendWr { op, sg_list: &[near.sge(0, 8)], ud: Some(&dest), ..SendWr::default() };
        same("the post", bench.try_send(a, &wr), Err(PostError::BadOp))?;
    }
    Ok(())
}

fn a_datagram_needs_an_address_handle<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let (a, b, dest) = endpoints(bench)?;
    let src = bench.buffer(a, 8)?;
    let sge = [src.sge(0, 8)];
    same(
        "without",
        bench.try_send(a, &SendWr { sg_list: &sge, ..SendWr::default() }),
        Err(PostError::BadAh),
    )?;
    let pd = bench.pd(a.end)?;
    let dgid = bench.harness.node(End::B).gid();
    let foreign: Ah = bench.ah(Side { pd, ..a }, dgid, b.qpn)?;
    let foreign = UdDest { ah: foreign, ..dest };
    let wr = SendWr { sg_list: &sge, ud: Some(&foreign), ..SendWr::default() };
    same("another domain's", bench.try_send(a, &wr), Err(PostError::BadAh))
}

fn a_group_reaches_every_member<H: Harness>(bench: &mut Bench<'_, H>) -> Outcome {
    let group = match bench.harness.node(End::A).gid().is_ipv4() {
        true => Gid::from_ip([239, 77, 1, 2].into()),
        false => Gid::from_ip([0xff0e, 0, 0, 0, 0, 0, 0x77, 0x12].into()),
    };
    let (a, b, _) = endpoints(bench)?;
    let (second, outsider) = (endpoint(bench, End::B)?, endpoint(bench, End::B)?);
    let own = endpoint(bench, End::A)?;
    for member in [b, second, own] {
        bench.join(member, group)?;
    }
    let refused = bench.device(End::B).destroy_qp(b.qpn);
    holds("a member is in use", refused.is_err())?;
    let ah = bench.ah(a, group, Qpn::MULTICAST)?;
    let dest = UdDest { ah, remote_qpn: Qpn::MULTICAST, remote_qkey: QKEY };
    let src = bench.buffer(a, 64)?;
    let sides = [b, second, outsider, own];
    let mut buffers = vec![];
    for side in sides {
        let buffer = bench.buffer(side, 200)?;
        bench.recv(side, 1, &[buffer.sge(0, 200)])?;
        buffers.push(buffer);
    }
    src.fill(0, 64, 9);
    datagram(bench, a, &dest, (1, SendOp::Send, src.sge(0, 64)))?;
    for (side, buffer) in sides.iter().zip(&buffers).take(2) {
        let wc = bench.received_as(*side, 1, WcStatus::Success)?;
        same("of the receive", (wc.src_qpn, wc.byte_len as usize), (a.qpn, GRH + 64))?;
        buffer.check("the copy", GRH, 64, 9)?;
    }
    bench.empty(End::B, outsider.rcq)?;
    let looped = !bench.poll(End::A, own.rcq)?.is_empty();
    bench.deviation(Deviation::NoMulticastLoopback, !looped)?;
    // No longer a member: the next one goes to the other only.
    bench.leave(b, group)?;
    bench.recv(b, 2, &[])?;
    let buffer = buffers.get(1).ok_or_else(|| Failure::new("no buffer"))?;
    bench.recv(second, 3, &[buffer.sge(0, 200)])?;
    datagram(bench, a, &dest, (2, SendOp::Send, src.sge(0, 64)))?;
    bench.received_as(second, 3, WcStatus::Success)?;
    bench.empty(End::B, b.rcq)
}

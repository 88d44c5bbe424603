//! Reliable connections between two engines: data, sizes around the MTU's borders, many queue pairs, forwarding.

use ferroce_verbs::{Device, Imm, PathMtu, QpState, SendFlags, SendOp, WcFlags, WcOpcode, WcStatus};

use crate::harness::{Link, Pair, Post, Side, pattern};

const RECV_ID: u64 = 1 << 32;

fn sizes(mtu: usize) -> Vec<usize> {
    let mut all = vec![0, 1, 2, 3, 4, 5, 63];
    for n in [1, 2, 5] {
        all.extend([n * mtu - 1, n * mtu, n * mtu + 1]);
    }
    all
}

/// Every operation from `from` to `to`, every size, data compared byte by byte.
fn every_operation(pair: &Pair, from: Side, to: Side, mtu: PathMtu) {
    let mtu = mtu.bytes() as usize;
    let len = 6 * mtu;
    let (src, dst) = (pair.a.buffer(len), pair.b.buffer(len));
    let imm = Imm([1, 2, 3, 4]);
    for (i, size) in sizes(mtu).into_iter().enumerate() {
        let (remote_addr, rkey) = (dst.remote(0), dst.keys.rkey);
        let ops = [
            (SendOp::Send, WcOpcode::Send, true),
            (SendOp::SendImm(imm), WcOpcode::Send, true),
            (SendOp::Write { remote_addr, rkey }, WcOpcode::RdmaWrite, false),
            (SendOp::WriteImm { remote_addr, rkey, imm }, WcOpcode::RdmaWrite, true),
            (SendOp::Read { remote_addr, rkey }, WcOpcode::RdmaRead, false),
        ];
        for (k, (op, opcode, receives)) in ops.into_iter().enumerate() {
            let seed = (i * 10 + k) as u64;
            let reads = matches!(op, SendOp::Read { .. });
            let (full, empty) = if reads { (&dst, &src) } else { (&src, &dst) };
            full.pattern(size, seed);
            empty.block.fill(0x5a);
            if receives {
                pair.b.post_recv(to.worker, to.qpn, RECV_ID + seed, dst.sge(0, len)).expect("a receive");
            }
            pair.a.post_send(from.worker, from.qpn, Post::new(seed, op, src.sge(0, size))).expect("a send");
            let wc = pair.a.completions(from.worker, from.cq, 1)[0];
            assert_eq!(
                (wc.wr_id, wc.status, wc.opcode),
                (seed, WcStatus::Success, opcode),
                "{op:?} of {size}"
            );
            assert_eq!(wc.qpn, from.qpn);
            if receives {
                let wc = pair.b.completions(to.worker, to.cq, 1)[0];
                assert_eq!((wc.wr_id, wc.status), (RECV_ID + seed, WcStatus::Success), "{op:?} of {size}");
                assert_eq!(wc.byte_len as usize, size);
                let has_imm = !matches!(op, SendOp::Send);
                assert_eq!(wc.flags.contains(WcFlags::WITH_IMM), has_imm);
                assert!(!has_imm || wc.imm == imm);
            }
            assert!(empty.read(size) == pattern(size, seed), "{op:?} of {size} bytes: data differ");
            let beyond = empty.read(len);
            assert!(beyond[size..].iter().all(|b| *b == 0x5a), "{op:?} of {size} bytes wrote beyond its end");
        }
    }
}

#[test]
fn every_operation_at_every_border() {
    for workers in [1, 2] {
        let pair = Pair::start(workers);
        for mtu in [PathMtu::Mtu256, PathMtu::Mtu1024, PathMtu::Mtu4096] {
            let last = workers as u8 - 1;
            let (a, b) = pair.connected((last, last), Link { mtu, ..Link::default() });
            every_operation(&pair, a, b, mtu);
        }
        for node in [&pair.a, &pair.b] {
            let stats = node.engine.stats();
            assert_eq!(stats.drops(), 0, "{stats:?}");
            assert_eq!(stats.counter("forwards_out"), 0);
        }
        pair.stop();
    }
}

#[test]
fn frames_for_another_worker_are_forwarded_and_counted() {
    let pair = Pair::start(2);
    // Worker 0's frames arrive on the peer's queue 0, but the queue pair lives on worker 1.
    let (a, b) = pair.connected((0, 1), Link::default());
    every_operation(&pair, a, b, PathMtu::Mtu1024);
    for node in [&pair.a, &pair.b] {
        let stats = node.engine.stats();
        assert_eq!(stats.drops(), 0, "{stats:?}");
        let (out, into) = (stats.counter("forwards_out"), stats.counter("forwards_in"));
        assert!(out > 0);
        assert_eq!(out, into, "{stats:?}");
    }
    let b_stats = pair.b.engine.stats();
    assert_eq!(b_stats.workers[0].counter("forwards_out"), b_stats.workers[0].counter("rx_frames"));
    assert_eq!(b_stats.workers[1].counter("rx_frames"), 0);
    pair.stop();
}

#[test]
fn sixty_four_queue_pairs() {
    for workers in [1u8, 2] {
        let pair = Pair::start(workers as usize);
        let sides: Vec<_> = (0..64)
            .map(|i| {
                pair.connected(
                    (i % workers, (i / 2) % workers),
                    Link { mtu: PathMtu::Mtu256, ..Link::default() },
                )
            })
            .collect();
        let buffers: Vec<_> = sides.iter().map(|_| (pair.a.buffer(1000), pair.b.buffer(1000))).collect();
        for (i, ((a, _), (src, dst))) in sides.iter().zip(&buffers).enumerate() {
            src.pattern(1000, i as u64);
            for n in 0..8u64 {
                let op = SendOp::Write { remote_addr: dst.remote(0), rkey: dst.keys.rkey };
                let mut send = Post::new(n, op, src.sge(0, 1000));
                // Only the last is signalled.
                send.flags = if n == 7 { SendFlags::SIGNALED } else { SendFlags::empty() };
                pair.a.post_send(a.worker, a.qpn, send).expect("room");
            }
        }
        for (i, ((a, _), (_, dst))) in sides.iter().zip(&buffers).enumerate() {
            let wc = pair.a.completions(a.worker, a.cq, 1)[0];
            assert_eq!((wc.status, wc.wr_id, wc.qpn), (WcStatus::Success, 7, a.qpn));
            assert!(dst.read(1000) == pattern(1000, i as u64), "queue pair {i}: data differ");
        }
        let numbers: std::collections::HashSet<_> = sides.iter().map(|(a, _)| a.qpn).collect();
        assert_eq!(numbers.len(), 64);
        assert_eq!(pair.a.device.query_qp(sides[5].0.qpn).expect("it exists").state, QpState::Rts);
        pair.stop();
    }
}

#[test]
fn traffic_both_ways_at_once_over_one_connection() {
    for workers in [1u8, 2] {
        let pair = Pair::start(workers as usize);
        let (a, b) = pair.connected((0, workers - 1), Link::default());
        let len = 20_000;
        let buffers = [(pair.a.buffer(len), pair.a.buffer(len)), (pair.b.buffer(len), pair.b.buffer(len))];
        for round in 0..20u64 {
            buffers[0].0.pattern(len, round);
            buffers[1].0.pattern(len, round + 1000);
            pair.a.post_recv(a.worker, a.qpn, 1, buffers[0].1.sge(0, len)).expect("a receive");
            pair.b.post_recv(b.worker, b.qpn, 1, buffers[1].1.sge(0, len)).expect("a receive");
            pair.a
                .post_send(a.worker, a.qpn, Post::new(2, SendOp::Send, buffers[0].0.sge(0, len)))
                .expect("a send");
            pair.b
                .post_send(b.worker, b.qpn, Post::new(2, SendOp::Send, buffers[1].0.sge(0, len)))
                .expect("a send");
            for (node, side) in [(&pair.a, a), (&pair.b, b)] {
                assert!(
                    node.completions(side.worker, side.cq, 2).iter().all(|wc| wc.status == WcStatus::Success)
                );
            }
            assert!(buffers[1].1.read(len) == pattern(len, round));
            assert!(buffers[0].1.read(len) == pattern(len, round + 1000));
        }
        pair.stop();
    }
}

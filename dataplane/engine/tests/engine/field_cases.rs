//! Faults that users of such software met, as scenarios over two engines. Their numbers are those of the list of cases.

use std::collections::HashSet;

use ferroce_verbs::{Device, QpModify, Rkey, SendOp, WcStatus};

use crate::harness::{ALL, Link, Pair, Post, pattern};

/// WIRE-3: lengths that need padding arrive with exactly their bytes, there and back, and no frame has a wrong ICRC.
#[test]
fn wire_3_lengths_that_need_padding() {
    for workers in [1u8, 2] {
        let pair = Pair::start(workers as usize);
        let (a, b) = pair.connected((0, workers - 1), Link::default());
        let buffers = [pair.a.buffer(2048), pair.b.buffer(2048)];
        for (i, len) in [0usize, 1, 2, 3, 5, 1021, 1023, 1025].into_iter().enumerate() {
            for (from, to, src, dst, near, far) in [
                (&pair.a, &pair.b, &buffers[0], &buffers[1], a, b),
                (&pair.b, &pair.a, &buffers[1], &buffers[0], b, a),
            ] {
                for write in [false, true] {
                    let seed = (i * 2 + usize::from(write)) as u64;
                    src.pattern(len, seed);
                    dst.block.fill(0x5a);
                    let (remote_addr, rkey) = (dst.remote(0), dst.keys.rkey);
                    let imm = ferroce_verbs::Imm([seed as u8; 4]);
                    // With immediate data, so that the receiver tells the length of a WRITE too.
                    let op = if write { SendOp::WriteImm { remote_addr, rkey, imm } } else { SendOp::Send };
                    to.post_recv(far.worker, far.qpn, seed, dst.sge(0, 2048)).expect("room");
                    from.post_send(near.worker, near.qpn, Post::new(seed, op, src.sge(0, len)))
                        .expect("room");
                    let sent = from.completions(near.worker, near.cq, 1)[0];
                    assert_eq!((sent.wr_id, sent.status), (seed, WcStatus::Success));
                    let wc = to.completions(far.worker, far.cq, 1)[0];
                    assert_eq!((wc.wr_id, wc.status, wc.byte_len as usize), (seed, WcStatus::Success, len));
                    let got = dst.read(2048);
                    assert!(got[..len] == pattern(len, seed)[..], "{len} bytes: data differ");
                    assert!(got[len..].iter().all(|byte| *byte == 0x5a), "{len} bytes: pad was written");
                }
            }
        }
        for node in [&pair.a, &pair.b] {
            let stats = node.engine.stats();
            assert_eq!((stats.drop("bad_icrc"), stats.drops()), (0, 0), "{stats:?}");
        }
        pair.stop();
    }
}

/// MR-3: a hundred times at one address: map, register, let the peer read, deregister. The peer gets this round's bytes,
/// no key comes back, and the key of the round before opens nothing.
#[test]
fn mr_3_the_same_address_again() {
    for workers in [1u8, 2] {
        let pair = Pair::start(workers as usize);
        let (reader, owner) = pair.connected((0, workers - 1), Link::default());
        let (stale_reader, stale_owner) = pair.connected((0, workers - 1), Link::default());
        let near = pair.a.buffer(4096);
        let (mut keys, mut bases, mut last) = (HashSet::new(), HashSet::new(), None::<Rkey>);
        for round in 1..=100u8 {
            let block = std::sync::Arc::new(pair.b.arena.alloc(4096, 4096).expect("room"));
            bases.insert(block.base());
            block.fill(round);
            let mr = pair.b.device.reg_mr(pair.b.pd, block, ALL).expect("a region");
            assert!(keys.insert(mr.rkey), "round {round}: a key came back");
            let remote_addr = ferroce_verbs::RemoteAddr(mr.iova);
            let read = |rkey| Post::new(round.into(), SendOp::Read { remote_addr, rkey }, near.sge(0, 4096));
            near.block.fill(0);
            pair.a.post_send(reader.worker, reader.qpn, read(mr.rkey)).expect("room");
            let wc = pair.a.completions(reader.worker, reader.cq, 1)[0];
            assert_eq!((wc.wr_id, wc.status), (round.into(), WcStatus::Success));
            assert!(near.read(4096).iter().all(|byte| *byte == round), "round {round}: old contents");
            if let Some(last) = last.replace(mr.rkey) {
                near.block.fill(0);
                pair.a.post_send(stale_reader.worker, stale_reader.qpn, read(last)).expect("room");
                let wc = pair.a.completions(stale_reader.worker, stale_reader.cq, 1)[0];
                assert_eq!(wc.status, WcStatus::RemAccessErr, "round {round}: last round's key");
                assert!(near.read(4096).iter().all(|byte| *byte == 0));
                // The refusal ended the connection; the two queue pairs get another.
                for (node, side, peer, psn) in [
                    (&pair.a, stale_reader, (pair.b.gid, stale_owner.qpn), (7, 9)),
                    (&pair.b, stale_owner, (pair.a.gid, stale_reader.qpn), (9, 7)),
                ] {
                    node.device.modify_qp(side.qpn, &QpModify::ToReset).expect("always");
                    node.connect(side.qpn, peer.0, peer.1, psn, Link::default());
                }
            }
            pair.b.device.dereg_mr(mr.lkey).expect("nothing uses it");
        }
        assert_eq!(bases.len(), 1, "every round has the same address");
        let _ = owner;
        pair.stop();
    }
}

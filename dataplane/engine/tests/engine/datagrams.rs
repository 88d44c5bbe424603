//! Datagrams and shared receive queues between engines: groups over several workers, what is dropped and counted, and
//! application threads.

use std::time::Duration;

use ferroce_verbs::{
    Device, Gid, Psn, Qkey, QpInitAttr, QpModify, QpType, Qpn, Queues, RecvWr, RtrAttrs, SendFlags, SendOp,
    SendWr, SrqInitAttr, UdDest, Wc, WcFlags, WcStatus,
};

use crate::harness::{Link, Node, PATIENCE, Pair, ip, pattern, to_init, to_rtr, to_rts, until};

const QKEY: Qkey = Qkey(7);
const GRH: usize = 40;

/// A datagram queue pair that is ready, on `worker`, and its completion queue.
fn endpoint(node: &Node, worker: u8) -> (Qpn, ferroce_verbs::CqId) {
    let cq = node.cq(worker, 64);
    let attr = QpInitAttr { qp_type: QpType::Ud, ..node.init_attr(cq) };
    let qpn = node.device.create_qp(&attr).expect("datagrams");
    ready(node, qpn);
    (qpn, cq)
}

fn ready(node: &Node, qpn: Qpn) {
    let QpModify::ToInit(init) = to_init() else { unreachable!() };
    node.device
        .modify_qp(qpn, &QpModify::ToInit(ferroce_verbs::InitAttrs { qkey: QKEY, ..init }))
        .expect("to init");
    // The path of a datagram queue pair is not looked at.
    let av = node.path_to(Gid::from_ip(ip("239.0.0.1")), qpn, qpn);
    let QpModify::ToRtr(rtr) = to_rtr(av, qpn, 0, Link::default()) else { unreachable!() };
    let rtr = RtrAttrs { rq_psn: Psn::new(0), ..rtr };
    node.device.modify_qp(qpn, &QpModify::ToRtr(rtr)).expect("to rtr");
    node.device.modify_qp(qpn, &to_rts(5, Link::default())).expect("to rts");
}

fn dest(node: &Node, qpn: Qpn, to: Gid, remote_qpn: Qpn) -> UdDest {
    let ah = node.device.create_ah(node.pd, &node.path_to(to, qpn, remote_qpn)).expect("a path");
    UdDest { ah, remote_qpn, remote_qkey: QKEY }
}

fn send(node: &Node, worker: u8, qpn: Qpn, dest: UdDest, sge: ferroce_verbs::Sge) {
    node.on(worker, move |core| {
        let wr = SendWr {
            wr_id: 9,
            sg_list: &[sge],
            flags: SendFlags::SIGNALED,
            ud: Some(&dest),
            ..SendWr::default()
        };
        core.post_send(qpn, &wr)
    })
    .expect("room");
}

fn drops(node: &Node, reason: &str) -> u64 {
    node.engine.stats().drop(reason)
}

#[test]
fn a_group_reaches_members_on_every_worker() {
    for workers in [1u8, 2] {
        let pair = Pair::start(workers as usize);
        let group = Gid::from_ip(ip("239.1.2.3"));
        let (qpn, cq) = endpoint(&pair.a, 0);
        let to_group = dest(&pair.a, qpn, group, Qpn::MULTICAST);
        let src = pair.a.buffer(3000);
        // Two members on each worker, so that what is forwarded reaches both.
        let members: Vec<_> = (0..workers)
            .flat_map(|worker| [worker, worker])
            .map(|worker| {
                let (qpn, cq) = endpoint(&pair.b, worker);
                pair.b.device.attach_mcast(qpn, group).expect("room");
                (worker, qpn, cq, pair.b.buffer(2000))
            })
            .collect();
        for round in 0..20 {
            for (worker, qpn, _, buffer) in &members {
                pair.b.post_recv(*worker, *qpn, round, buffer.sge(0, 2000)).expect("room");
            }
            src.pattern(900, round);
            send(&pair.a, 0, qpn, to_group, src.sge(0, 900));
            assert_eq!(pair.a.completions(0, cq, 1)[0].status, WcStatus::Success);
            for (worker, member, cq, buffer) in &members {
                let wc = pair.b.completions(*worker, *cq, 1)[0];
                assert_eq!(
                    (wc.wr_id, wc.status, wc.qpn, wc.src_qpn),
                    (round, WcStatus::Success, *member, qpn)
                );
                assert_eq!((wc.byte_len as usize, wc.flags), (900 + GRH, WcFlags::GRH));
                assert!(buffer.read(900 + GRH)[GRH..] == pattern(900, round));
            }
        }
        // A group that nobody is in.
        let nobody = Gid::from_ip(ip("239.1.2.4"));
        let to_nobody = dest(&pair.a, qpn, nobody, Qpn::MULTICAST);
        send(&pair.a, 0, qpn, to_nobody, src.sge(0, 8));
        until("the drop", || (drops(&pair.b, "unknown_group") == 1).then_some(()));
        pair.stop();
    }
}

#[test]
fn datagrams_that_are_not_for_us_are_dropped_and_counted() {
    for workers in [1u8, 2] {
        let pair = Pair::start(workers as usize);
        let (qpn, _) = endpoint(&pair.a, 0);
        let (peer, cq) = endpoint(&pair.b, workers - 1);
        let (src, dst) = (pair.a.buffer(8), pair.b.buffer(100));
        let good = dest(&pair.a, qpn, pair.b.gid, peer);
        // Another address behind the same Ethernet address.
        let mut av = good.ah.av;
        av.dgid = Gid::from_ip(ip("10.77.0.99"));
        let ah = pair.a.device.create_ah(pair.a.pd, &av).expect("a path");
        let stray = UdDest { ah, ..good };
        let wrong_key = UdDest { remote_qkey: Qkey(8), ..good };
        pair.b.post_recv(workers - 1, peer, 1, dst.sge(0, 100)).expect("room");
        for dest in [stray, wrong_key, good, good] {
            send(&pair.a, 0, qpn, dest, src.sge(0, 8));
        }
        assert_eq!(pair.b.completions(workers - 1, cq, 1)[0].status, WcStatus::Success);
        until("the drops", || {
            let counted = ["wrong_address", "wrong_qkey", "not_ready"].map(|reason| drops(&pair.b, reason));
            (counted == [1, 1, 1]).then_some(())
        });
        pair.stop();
    }
}

#[test]
fn application_threads_share_receives_and_send_datagrams() {
    for workers in [1u8, 2] {
        let pair = Pair::start(workers as usize);
        let worker = workers - 1;
        let (qpn, cq) = endpoint(&pair.a, 0);
        let device = &pair.b.device;
        let attr = SrqInitAttr { pd: pair.b.pd, max_wr: 16, max_sge: 1, limit: 0 };
        let srq = device.create_srq(worker, &attr).expect("a shared receive queue");
        let cq_b = pair.b.cq(worker, 64);
        let members = [0, 1].map(|_| {
            let attr = QpInitAttr { qp_type: QpType::Ud, srq: Some(srq), ..pair.b.init_attr(cq_b) };
            let qpn = device.create_qp(&attr).expect("datagrams");
            ready(&pair.b, qpn);
            qpn
        });
        let mut app_a = pair.a.device.attach(&[qpn], &[cq]).expect("nobody has them");
        let mut app_b = device.attach(&members, &[cq_b]).expect("nobody has them");
        let (src, dst) = (pair.a.buffer(8), pair.b.buffer(100));
        for round in 0..10u64 {
            let to = members[round as usize % 2];
            app_b.post_srq_recv(srq, &RecvWr { wr_id: round, sg_list: &[dst.sge(0, 100)] }).expect("room");
            // The receive is at the worker before the datagram can be.
            until("the receive", || (device.query_srq(srq).expect("it exists").posted == 1).then_some(()));
            src.pattern(8, round);
            let dest = dest(&pair.a, qpn, pair.b.gid, to);
            let sge = [src.sge(0, 8)];
            let wr = SendWr { op: SendOp::Send, sg_list: &sge, ud: Some(&dest), ..SendWr::default() };
            app_a.post_send(qpn, &wr).expect("room");
            let wc = next(&mut app_b, cq_b);
            assert_eq!((wc.wr_id, wc.status, wc.qpn), (round, WcStatus::Success, to));
            assert!(dst.read(GRH + 8)[GRH..] == pattern(8, round));
        }
        // What only the worker can refuse.
        let bad = ferroce_verbs::Sge { length: 101, ..dst.sge(0, 100) };
        app_b.post_srq_recv(srq, &RecvWr { wr_id: 77, sg_list: &[bad] }).expect("the ring has room");
        let wc = next(&mut app_b, cq_b);
        assert_eq!((wc.wr_id, wc.status, wc.is_recv), (77, WcStatus::LocProtErr, true));
        drop((app_a, app_b));
        pair.stop();
    }
}

fn next(app: &mut ferroce_engine::AppQueues, cq: ferroce_verbs::CqId) -> Wc {
    assert!(app.wait(PATIENCE.min(Duration::from_secs(20))), "no completion");
    let mut out = [Wc::EMPTY; 1];
    assert_eq!(app.poll_cq(cq, &mut out), Ok(1));
    out[0]
}

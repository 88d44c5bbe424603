//! Application threads: posting and polling from outside the workers.

use std::time::{Duration, Instant};

use ferroce_engine::{AppQueues, REFUSED};
use ferroce_verbs::error::VerbsErrorKind;
use ferroce_verbs::{
    CqId, Device, PostError, QpModify, Queues, RecvWr, SendFlags, SendOp, SendWr, Wc, WcOpcode, WcStatus,
};

use crate::harness::{Link, PATIENCE, Pair, pattern, to_init, until};

/// Sleeps for completions, as an application does that does not want to spin.
fn take(queues: &mut AppQueues, cq: CqId, n: usize) -> Vec<Wc> {
    let (mut all, end) = (Vec::new(), Instant::now() + PATIENCE);
    while all.len() < n {
        assert!(Instant::now() < end, "{} of {n} completions", all.len());
        queues.wait(Duration::from_millis(100));
        let mut out = [Wc::EMPTY; 16];
        let got = queues.poll_cq(cq, &mut out).expect("it is attached");
        all.extend_from_slice(&out[..got]);
    }
    all
}

#[test]
fn two_application_threads_exchange_messages() {
    for workers in [1u8, 2] {
        let pair = Pair::start(workers as usize);
        let (a, b) = pair.connected((0, workers - 1), Link::default());
        let (buf_a, buf_b) = (pair.a.buffer(5000), pair.b.buffer(5000));
        let mut app_a = pair.a.device.attach(&[a.qpn], &[a.cq]).expect("nobody has them");
        let mut app_b = pair.b.device.attach(&[b.qpn], &[b.cq]).expect("nobody has them");
        assert_eq!((app_a.worker(), app_b.worker()), (0, workers - 1));
        let sge_b = buf_b.sge(0, 5000);
        app_b.post_recv(b.qpn, &RecvWr { wr_id: 0, sg_list: &[sge_b] }).expect("room");
        let echo = std::thread::spawn(move || {
            for round in 0..50u64 {
                let wc = take(&mut app_b, b.cq, 1)[0];
                assert_eq!((wc.wr_id, wc.status, wc.opcode), (round, WcStatus::Success, WcOpcode::Recv));
                let next = RecvWr { wr_id: round + 1, sg_list: &[sge_b] };
                let (flags, sg_list) =
                    (SendFlags::SIGNALED, [ferroce_verbs::Sge { length: wc.byte_len, ..sge_b }]);
                let send =
                    SendWr { wr_id: 1000, op: SendOp::Send, sg_list: &sg_list, inline: &[], flags, ud: None };
                app_b.post_send(b.qpn, &send).expect("room");
                assert_eq!(take(&mut app_b, b.cq, 1)[0].wr_id, 1000);
                app_b.post_recv(b.qpn, &next).expect("room");
            }
        });
        for round in 0..50u64 {
            let len = 1 + (round as usize * 97) % 4000;
            buf_a.pattern(len, round);
            let sge = [buf_a.sge(0, len)];
            app_a.post_recv(a.qpn, &RecvWr { wr_id: 7, sg_list: &[buf_a.sge(0, 5000)] }).expect("room");
            let send = SendWr {
                wr_id: 8,
                op: SendOp::Send,
                sg_list: &sge,
                inline: &[],
                flags: SendFlags::SIGNALED,
                ud: None,
            };
            app_a.post_send(a.qpn, &send).expect("room");
            let wcs = take(&mut app_a, a.cq, 2);
            assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success), "{wcs:?}");
            assert!(buf_a.read(len) == pattern(len, round));
        }
        echo.join().expect("the echo runs to its end");
        drop(app_a);
        pair.stop();
    }
}

#[test]
fn what_only_the_worker_can_refuse_comes_back_as_a_completion() {
    for workers in [1u8, 2] {
        let pair = Pair::start(workers as usize);
        let worker = workers - 1;
        let cq = pair.a.cq(worker, 16);
        let (qpn, buffer) = (pair.a.qp(cq), pair.a.buffer(64));
        let mut app = pair.a.device.attach(&[qpn], &[cq]).expect("nobody has them");
        let sge = [buffer.sge(0, 64)];
        let send = SendWr {
            wr_id: 5,
            op: SendOp::Send,
            sg_list: &sge,
            inline: &[],
            flags: SendFlags::SIGNALED,
            ud: None,
        };
        // In RESET nothing may be posted.
        app.post_send(qpn, &send).expect("the ring has room");
        let wc = take(&mut app, cq, 1)[0];
        assert_eq!((wc.wr_id, wc.status, wc.qpn, wc.vendor_err), (5, WcStatus::LocQpOpErr, qpn, REFUSED + 2));
        // What the handle itself can see is refused at once.
        let many = [sge[0]; 5];
        assert_eq!(app.post_send(qpn, &SendWr { sg_list: &many, ..send }), Err(PostError::TooManySge));
        let long = [0; 65];
        let inline = SendWr { inline: &long, flags: SendFlags::INLINE, ..send };
        assert_eq!(app.post_send(qpn, &inline), Err(PostError::TooLong));
        assert_eq!(app.post_send(ferroce_verbs::Qpn::new(9), &send), Err(PostError::NoSuchQueue));
        // In error, work is flushed.
        pair.a.device.modify_qp(qpn, &to_init()).expect("to init");
        pair.a.device.modify_qp(qpn, &QpModify::ToErr).expect("to err");
        app.post_recv(qpn, &RecvWr { wr_id: 6, sg_list: &sge }).expect("the ring has room");
        let wc = take(&mut app, cq, 1)[0];
        assert_eq!((wc.wr_id, wc.status), (6, WcStatus::WrFlushErr));
        // A second owner is refused, until the first is gone.
        let busy = pair.a.device.attach(&[qpn], &[cq]).err().map(|e| e.kind);
        assert_eq!(busy, Some(VerbsErrorKind::Busy));
        drop(app);
        pair.a.device.attach(&[qpn], &[cq]).expect("free again");
        pair.stop();
    }
}

#[test]
fn a_full_receive_queue_holds_back_only_itself() {
    let pair = Pair::start(1);
    let (a, b) = pair.connected((0, 0), Link::default());
    let (buf_a, buf_b) = (pair.a.buffer(64), pair.b.buffer(64));
    let mut app = pair.a.device.attach(&[a.qpn], &[a.cq]).expect("nobody has them");
    let recv = RecvWr { wr_id: 1, sg_list: &[buf_a.sge(0, 64)] };
    // The queue pair takes 64, the ring as many more.
    until("both to be full", || {
        let mut full = 0;
        while app.post_recv(a.qpn, &recv).is_ok() {}
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(1));
            full += usize::from(app.post_recv(a.qpn, &recv) == Err(PostError::Full));
        }
        (full == 20).then_some(())
    });
    let sge = [buf_a.sge(0, 8)];
    let write = SendOp::Write { remote_addr: buf_b.remote(0), rkey: buf_b.keys.rkey };
    let send =
        SendWr { wr_id: 2, op: write, sg_list: &sge, inline: &[], flags: SendFlags::SIGNALED, ud: None };
    app.post_send(a.qpn, &send).expect("sends have a ring of their own");
    assert_eq!(take(&mut app, a.cq, 1)[0].status, WcStatus::Success);
    let _ = b;
    drop(app);
    pair.stop();
}

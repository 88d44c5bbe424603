//! Happy paths between two queue pairs.

mod support;

use ferroce_mem::Access;
use ferroce_transport::{Completion, Notice, QpCounter};
use ferroce_verbs::{PostError, QpModify, QpState, SendFlags, SendOp, WcFlags, WcOpcode, WcStatus};
use ferroce_wire::{Imm, PathMtu, RemoteAddr};
use support::*;

const OK: WcStatus = WcStatus::Success;

#[test]
fn every_operation_at_every_mtu_and_edge_length() {
    for mtu in PathMtu::ALL {
        let p = mtu.bytes() as usize;
        for len in [0, 1, 2, 3, 5, p - 1, p, p + 1, 2 * p, 2 * p + 3, 7 * p + 1] {
            let mut pair = Pair::new(Setup { mtu, ..Setup::default() });
            let data = pattern(len, len);
            pair.a.buf.write(100, &data);
            pair.b.buf.write(300_000, &data);
            // SEND, SEND with immediate.
            pair.b.recv(200_000, 8 * p);
            pair.b.recv(240_000, 8 * p);
            pair.a.send(SendOp::Send, 100, len);
            pair.a.send(SendOp::SendImm(Imm([1, 2, 3, 4])), 100, len);
            // WRITE, WRITE with immediate.
            pair.b.recv(0, 0);
            let (write, write_imm) = (pair.write_to_b(400_000), pair.write_imm_to_b(450_000, [5, 6, 7, 8]));
            pair.a.send(write, 100, len);
            pair.a.send(write_imm, 100, len);
            // READ.
            let read = pair.read_from_b(300_000);
            pair.a.send(read, 500_000, len);
            pair.run();
            let context = format!("mtu {p} len {len}");
            assert_eq!(pair.a.done(), (1..=5).map(|id| (id, OK)).collect::<Vec<_>>(), "{context}");
            let got = std::mem::take(&mut pair.b.wcs);
            assert_eq!(got.len(), 3, "{context}");
            assert!(got.iter().all(|wc| wc.status == OK && wc.byte_len as usize == len && wc.is_recv));
            assert_eq!(got[0].opcode, WcOpcode::Recv);
            assert_eq!(got[0].flags, WcFlags::empty());
            assert_eq!((got[1].opcode, got[1].imm), (WcOpcode::Recv, Imm([1, 2, 3, 4])));
            assert_eq!((got[2].opcode, got[2].imm), (WcOpcode::RecvRdmaWithImm, Imm([5, 6, 7, 8])));
            assert_eq!(got[2].flags, WcFlags::WITH_IMM);
            for offset in [200_000, 240_000, 400_000, 450_000] {
                assert!(pair.b.buf.read(offset, len) == data, "{context} at {offset}");
                assert_eq!(pair.b.buf.read(offset + len, 1), [0], "{context}: nothing beyond");
            }
            assert!(pair.a.buf.read(500_000, len) == data, "{context} read");
            assert!(pair.a.drops.is_empty() && pair.b.drops.is_empty(), "{context}");
            assert_eq!(pair.a.count(QpCounter::Retransmits), 0);
        }
    }
}

#[test]
fn scatter_gather_of_odd_pieces() {
    let mut pair = Pair::new(Setup { mtu: PathMtu::Mtu256, ..Setup::default() });
    let data = pattern(9, 1500);
    pair.a.buf.write(0, &data[..700]);
    pair.a.buf.write(5000, &data[700..701]);
    pair.a.buf.write(9000, &data[701..]);
    let gather = [pair.a.sge(0, 700), pair.a.sge(5000, 1), pair.a.sge(0, 0), pair.a.sge(9000, 799)];
    let scatter = [pair.b.sge(10, 3), pair.b.sge(1000, 513), pair.b.sge(3000, 0), pair.b.sge(4000, 2000)];
    pair.b.try_recv(&scatter).expect("posts");
    pair.a.post(SendOp::Send, &gather, SendFlags::SIGNALED).expect("posts");
    let write = pair.write_to_b(20_000);
    pair.a.post(write, &gather, SendFlags::SIGNALED).expect("posts");
    let read = pair.read_from_b(20_000);
    let into = [pair.a.sge(30_000, 255), pair.a.sge(40_000, 2), pair.a.sge(50_000, 1243)];
    pair.a.post(read, &into, SendFlags::SIGNALED | SendFlags::FENCE).expect("posts");
    pair.run();
    assert_eq!(pair.a.done(), [(1, OK), (2, OK), (3, OK)]);
    let b = [pair.b.buf.read(10, 3), pair.b.buf.read(1000, 513), pair.b.buf.read(4000, 984)].concat();
    assert!(b == data);
    assert!(pair.b.buf.read(20_000, 1500) == data);
    let a =
        [pair.a.buf.read(30_000, 255), pair.a.buf.read(40_000, 2), pair.a.buf.read(50_000, 1243)].concat();
    assert!(a == data);
}

#[test]
fn psns_wrap() {
    let mut pair = Pair::new(Setup { sq_psn: 0xff_fffe, rq_psn: 0xff_ffff, ..Setup::default() });
    let data = pattern(1, 5000);
    pair.a.buf.write(0, &data);
    pair.b.recv(10_000, 6000);
    pair.a.send(SendOp::Send, 0, 5000);
    let read = pair.read_from_b(10_000);
    let id = pair.a.send(read, 20_000, 5000);
    pair.b.buf.write(50_000, &data);
    pair.a.recv(60_000, 5000);
    pair.b.send(SendOp::Send, 50_000, 5000);
    pair.run();
    assert!(pair.a.done().contains(&(id, OK)));
    assert!(pair.a.buf.read(60_000, 5000) == data);
    assert_eq!(pair.a.qp.info().sq_psn.get(), 8, "0xfffffe + 5 + 5");
    assert_eq!(pair.a.qp.info().una_psn.get(), 8);
    assert_eq!(pair.b.qp.info().rq_psn.get(), 8);
}

#[test]
fn long_messages_ask_for_acks_and_fill_the_window() {
    let mut pair = Pair::new(Setup { mtu: PathMtu::Mtu256, ..Setup::default() });
    let data = pattern(3, 1000 * 256);
    pair.a.buf.write(0, &data);
    let write = pair.write_to_b(300_000);
    pair.a.send(write, 0, data.len());
    pair.pump();
    assert_eq!(pair.logged("A WRITE"), 256, "the window bounds what leaves without an answer");
    assert_eq!(pair.logged("ackreq"), 4, "every 64 packets one asks");
    pair.run();
    assert_eq!(pair.a.done(), [(1, OK)]);
    assert!(pair.b.buf.read(300_000, data.len()) == data);
    assert_eq!(pair.a.count(QpCounter::Retransmits), 0);
}

#[test]
fn acks_coalesce() {
    let mut pair = Pair::new(Setup::default());
    for i in 0..32 {
        let write = pair.write_to_b(i * 10);
        pair.a.send(write, 0, 10);
    }
    pair.run();
    assert_eq!(pair.a.done().len(), 32);
    assert_eq!(pair.logged("B ACK"), 1, "32 messages in one burst, one ACK\n{}", pair.tail());
}

#[test]
fn unsignalled_sends_retire_and_free_their_slots() {
    let mut setup = Setup::default();
    setup.cap.max_send_wr = 4;
    let mut pair = Pair::new(setup);
    for _ in 0..4 {
        let (op, sge) = (pair.write_to_b(0), pair.a.sge(0, 8));
        pair.a.post(op, &[sge], SendFlags::empty()).expect("posts");
    }
    let (op, sge) = (pair.write_to_b(0), pair.a.sge(0, 8));
    assert_eq!(pair.a.qp.send_queue_free(), 0);
    assert_eq!(pair.a.post(op, &[sge], SendFlags::empty()), Err(PostError::Full));
    pair.run();
    assert_eq!((pair.a.wcs.len(), pair.a.retired), (0, 4));
    assert_eq!(pair.a.qp.send_queue_free(), 4);
    pair.a.post(op, &[sge], SendFlags::SIGNALED).expect("posts");
    pair.run();
    assert_eq!(pair.a.wcs.len(), 1);
}

#[test]
fn sq_sig_all_signals_everything() {
    let mut pair = Pair::new(Setup { sq_sig_all: true, ..Setup::default() });
    let (op, sge) = (pair.write_to_b(0), pair.a.sge(0, 8));
    pair.a.post(op, &[sge], SendFlags::empty()).expect("posts");
    pair.run();
    assert_eq!(pair.a.done(), [(1, OK)]);
}

#[test]
fn inline_data_is_copied_at_post() {
    let mut pair = Pair::new(Setup { mtu: PathMtu::Mtu256, ..Setup::default() });
    pair.b.recv(0, 256);
    let data = pattern(5, 256);
    pair.a.post_inline(SendOp::Send, &data).expect("posts");
    let write = pair.write_to_b(1000);
    pair.a.post_inline(write, b"hello").expect("posts");
    pair.a.post_inline(write, b"").expect("posts");
    pair.run();
    assert_eq!(pair.a.done().len(), 3);
    assert!(pair.b.buf.read(0, 256) == data);
    assert_eq!(pair.b.buf.read(1000, 6), b"hello\0");
    let read = pair.read_from_b(0);
    assert_eq!(pair.a.post_inline(read, b"x"), Err(PostError::BadOp));
    assert_eq!(pair.a.post_inline(SendOp::Send, &[0; 257]), Err(PostError::TooLong));
}

#[test]
fn solicited_only_where_asked_for_and_possible() {
    let mut pair = Pair::new(Setup::default());
    for _ in 0..3 {
        pair.b.recv(0, 4096);
    }
    let flags = SendFlags::SIGNALED | SendFlags::SOLICITED;
    let sge = pair.a.sge(0, 2000);
    let (write, imm) = (pair.write_to_b(0), pair.write_imm_to_b(0, [0; 4]));
    for (op, flags) in
        [(SendOp::Send, SendFlags::SIGNALED), (SendOp::Send, flags), (write, flags), (imm, flags)]
    {
        pair.a.post(op, &[sge], flags).expect("posts");
    }
    pair.run();
    assert_eq!(pair.b.wcs.iter().map(|wc| wc.solicited).collect::<Vec<_>>(), [false, true, true]);
    assert_eq!(pair.logged(" se"), 2, "{}", pair.tail());
}

#[test]
fn reads_stall_at_the_limit_and_writes_may_pass_them_but_complete_in_order() {
    let mut pair = Pair::new(Setup { max_rd_atomic: 2, ..Setup::default() });
    for i in 0..5 {
        let read = pair.read_from_b(i * 10_000);
        pair.a.send(read, i * 10_000, 3000);
    }
    let write = pair.write_to_b(900_000);
    pair.a.send(write, 0, 10);
    pair.pump();
    assert_eq!(pair.logged("A READ_REQUEST"), 2);
    pair.run();
    assert_eq!(pair.a.done(), (1..=6).map(|id| (id, OK)).collect::<Vec<_>>());
    assert_eq!(pair.logged("A READ_REQUEST"), 5, "none twice");
}

#[test]
fn fence_waits_for_reads() {
    let mut pair = Pair::new(Setup::default());
    let read = pair.read_from_b(0);
    pair.a.send(read, 0, 100);
    let (write, sge) = (pair.write_to_b(1000), pair.a.sge(0, 100));
    pair.a.post(write, &[sge], SendFlags::SIGNALED | SendFlags::FENCE).expect("posts");
    pair.pump();
    assert_eq!(pair.log, ["A READ_REQUEST psn=100 va=+0 dma=100 ackreq"]);
    pair.b.buf.write(0, &pattern(2, 100));
    pair.run();
    assert_eq!(pair.a.done(), [(1, OK), (2, OK)]);
    assert!(pair.b.buf.read(1000, 100) == pattern(2, 100), "the write carries what the read brought");
}

#[test]
fn a_long_read_by_the_peer_does_not_hold_up_requests() {
    let mut pair = Pair::new(Setup { mtu: PathMtu::Mtu256, ..Setup::default() });
    let read = pair.read_from_b(0);
    pair.a.send(read, 500_000, 256 * 200);
    pair.b.room = 10;
    pair.run_for(10 * pair.delay_ns);
    assert_eq!(pair.logged("B READ_RESP"), 10, "the wire is full");
    let write = SendOp::Write { remote_addr: RemoteAddr(IOVA), rkey: pair.a.mr.rkey };
    for _ in 0..4 {
        pair.b.send(write, 0, 8);
    }
    pair.b.room = 8;
    pair.pump();
    assert_eq!(pair.logged("B WRITE_ONLY"), 4, "they take turns\n{}", pair.tail());
    pair.b.room = usize::MAX;
    pair.run();
    assert_eq!(pair.a.done(), [(1, OK)]);
    assert_eq!(pair.b.done().len(), 4);
}

#[test]
fn response_psns_of_reads_do_not_fill_the_window_but_come_back_to_it() {
    let mut pair = Pair::new(Setup { mtu: PathMtu::Mtu256, ..Setup::default() });
    let (read, write) = (pair.read_from_b(0), pair.write_to_b(0));
    pair.a.send(read, 0, 256 * 1000);
    for _ in 0..2 {
        pair.a.send(write, 0, 256 * 200);
    }
    pair.pump();
    assert_eq!(pair.logged("A WRITE"), 256, "a READ of 1000 responses leaves the window to the WRITEs");
    pair.run();
    assert_eq!(pair.a.done(), [(1, OK), (2, OK), (3, OK)]);
    let before = pair.log.len();
    pair.a.send(write, 0, 256 * 400);
    pair.drop_if(|_, _, _| true);
    pair.pump();
    assert_eq!(pair.log.len() - before, 256, "the READ's PSNs are not counted twice");
}

#[test]
fn a_read_that_is_asked_for_again_does_not_widen_the_window() {
    let mut pair = Pair::new(Setup { mtu: PathMtu::Mtu256, timeout: 8, ..Setup::default() });
    let (read, write) = (pair.read_from_b(0), pair.write_to_b(100_000));
    pair.drop_if(|side, _, _| side == Side::B);
    pair.a.send(read, 0, 2560);
    pair.run_for(3 * (4096 << 8) + 10_000);
    assert_eq!(pair.logged("A READ_REQUEST"), 4);
    pair.a.send(write, 10_000, 300 * 256);
    pair.pump();
    assert_eq!(pair.logged("A WRITE"), 256, "the READ's responses do not fill the window, and count once");
}

#[test]
fn at_most_half_the_psns_are_outstanding() {
    let setup = Setup { mtu: PathMtu::Mtu256, ..Setup::default() };
    // Pages of it are never touched.
    let mut host = Host::with_bytes(A_QPN, &setup, 1 << 31);
    let now = ferroce_transport::Instant(0);
    host.qp.modify(now, &QpModify::ToInit(setup.init())).expect("INIT");
    host.qp.modify(now, &QpModify::ToRtr(setup.rtr(1, 2, B_QPN, 5))).expect("RTR");
    host.qp.modify(now, &QpModify::ToRts(setup.rts(5))).expect("RTS");
    let read = SendOp::Read { remote_addr: RemoteAddr(0), rkey: BAD_RKEY };
    host.send(read, 0, 1 << 31);
    host.send(read, 0, 1);
    host.send(SendOp::Send, 0, 1);
    assert!(host.transmit(now).1.is_some());
    assert!(host.transmit(now).1.is_none(), "2^23 PSNs are outstanding: nothing more may start");
    assert_eq!(host.qp.info().sq_psn.get(), 5 + (1 << 23));
}

#[test]
fn requests_do_not_share_their_place_in_a_list() {
    let mut pair = Pair::new(Setup::default());
    pair.b.buf.write(0, &pattern(6, 100));
    let (read, write) = (pair.read_from_b(0), pair.write_to_b(1000));
    // An empty entry first, then none: whoever kept the place of the first list would start behind the second.
    for op in [read, write] {
        let with_empty = [pair.a.sge(0, 0), pair.a.sge(0, 100)];
        pair.a.post(op, &with_empty, SendFlags::SIGNALED).expect("posts");
        pair.a.send(op, 0, 100);
    }
    pair.run();
    assert_eq!(pair.a.done(), [(1, OK), (2, OK), (3, OK), (4, OK)]);
}

#[test]
fn states_and_posting() {
    let setup = Setup::default();
    let mut host = Host::new(A_QPN, &setup);
    let now = ferroce_transport::Instant(0);
    let sge = host.sge(0, 8);
    assert_eq!(host.try_recv(&[sge]), Err(PostError::BadState));
    host.qp.modify(now, &QpModify::ToInit(setup.init())).expect("INIT");
    host.try_recv(&[sge]).expect("INIT takes receives");
    assert_eq!(host.post(SendOp::Send, &[sge], SendFlags::empty()), Err(PostError::BadState));
    host.qp.modify(now, &QpModify::ToRtr(setup.rtr(1, 2, B_QPN, 5))).expect("RTR");
    assert_eq!(host.post(SendOp::Send, &[sge], SendFlags::empty()), Err(PostError::BadState));
    assert!(host.qp.modify(now, &QpModify::ToSqd).is_err());
    host.qp.modify(now, &QpModify::ToRts(setup.rts(5))).expect("RTS");
    host.post(SendOp::Send, &[sge], SendFlags::empty()).expect("RTS takes sends");
    let five = [sge; 5];
    assert_eq!(host.post(SendOp::Send, &five, SendFlags::empty()), Err(PostError::TooManySge));
    assert_eq!(host.try_recv(&five), Err(PostError::TooManySge));
    let bad = ferroce_verbs::Sge { lkey: BAD_LKEY, ..sge };
    assert_eq!(host.post(SendOp::Send, &[bad], SendFlags::empty()), Err(PostError::BadKey));
    assert_eq!(host.try_recv(&[bad]), Err(PostError::BadKey));
    let beyond = host.sge(BUF - 7, 8);
    assert_eq!(host.post(SendOp::Send, &[beyond], SendFlags::empty()), Err(PostError::BadKey));
    let read_only = host.buf.register(&mut host.memory, PD, Access::empty(), 0, 64);
    let into = ferroce_verbs::Sge { lkey: read_only.lkey, ..sge };
    host.post(SendOp::Send, &[into], SendFlags::empty()).expect("sending needs no right");
    assert_eq!(host.try_recv(&[into]), Err(PostError::BadKey), "receiving needs LOCAL_WRITE");
    host.qp.modify(now, &QpModify::ToReset).expect("RESET");
    assert!(host.qp.poll_completion().is_none(), "RESET discards");
    assert_eq!(host.qp.state(), QpState::Reset);
    assert_eq!((host.qp.send_queue_free(), host.qp.recv_queue_free()), (64, 64));
}

#[test]
fn to_err_flushes_in_order_and_later_posts_too() {
    let mut pair = Pair::new(Setup::default());
    for i in 0..3 {
        pair.a.send(SendOp::Send, 0, 10 + i);
        pair.a.recv(0, 10);
    }
    pair.a.qp.modify(pair.now, &QpModify::ToErr).expect("ERR");
    pair.a.send(SendOp::Send, 0, 10);
    pair.a.recv(0, 10);
    pair.a.collect();
    let flushed = WcStatus::WrFlushErr;
    let done: Vec<_> = pair.a.wcs.iter().map(|wc| (wc.is_recv, wc.wr_id, wc.status)).collect();
    let want = [(false, 1), (false, 3), (false, 5), (false, 7), (true, 2), (true, 4), (true, 6), (true, 8)];
    assert_eq!(done, want.map(|(recv, id)| (recv, id, flushed)));
    pair.pump();
    assert!(pair.log.is_empty(), "nothing is sent in ERR");
    assert!(pair.a.notices.is_empty(), "asked for, so no news");
}

#[test]
fn sqd_finishes_what_was_started() {
    let mut pair = Pair::new(Setup::default());
    let read = pair.read_from_b(0);
    pair.a.send(read, 0, 3000);
    pair.pump();
    pair.a.qp.modify(pair.now, &QpModify::ToSqd).expect("SQD");
    let write = pair.write_to_b(0);
    pair.a.send(write, 0, 10);
    pair.run();
    assert_eq!(pair.a.done(), [(1, OK)]);
    assert_eq!(pair.a.notices, [Notice::Drained]);
    pair.a.qp.modify(pair.now, &QpModify::SqdToRts).expect("RTS");
    pair.run();
    assert_eq!(pair.a.done(), [(2, OK)]);
    pair.a.qp.modify(pair.now, &QpModify::ToSqd).expect("SQD");
    pair.a.collect();
    assert_eq!(pair.a.notices, [Notice::Drained, Notice::Drained], "at once when idle");
}

#[test]
fn comm_est_once_in_rtr() {
    let setup = Setup::default();
    let mut pair = Pair::new(setup);
    let qp = &mut pair.b.qp;
    qp.modify(pair.now, &QpModify::ToReset).expect("RESET");
    qp.modify(pair.now, &QpModify::ToInit(setup.init())).expect("INIT");
    qp.modify(pair.now, &QpModify::ToRtr(setup.rtr(2, 1, A_QPN, 100))).expect("RTR");
    let write = pair.write_to_b(0);
    pair.a.send(write, 0, 10);
    pair.a.send(write, 0, 10);
    pair.run();
    assert_eq!(pair.a.done(), [(1, OK), (2, OK)], "a responder in RTR answers");
    assert_eq!(pair.b.notices, [Notice::CommEst]);
}

#[test]
fn a_sink_without_room_changes_nothing() {
    let mut pair = Pair::new(Setup::default());
    let data = pattern(4, 5000);
    pair.a.buf.write(0, &data);
    let write = pair.write_to_b(0);
    pair.a.send(write, 0, 5000);
    for _ in 0..5 {
        pair.a.room = 0;
        assert_eq!(pair.a.transmit(pair.now).0, ferroce_transport::Transmit::NoRoom);
        pair.a.room = 1;
        pair.pump();
    }
    pair.a.room = usize::MAX;
    pair.run();
    assert_eq!(pair.a.done(), [(1, OK)]);
    assert!(pair.b.buf.read(0, 5000) == data);
    assert_eq!(pair.logged("A WRITE"), 5);
}

#[test]
fn completions_are_pulled_one_at_a_time() {
    let mut pair = Pair::new(Setup::default());
    let write = pair.write_to_b(0);
    pair.a.send(write, 0, 1);
    pair.run();
    assert_eq!(pair.a.wcs.len(), 1);
    assert!(!matches!(pair.a.qp.poll_completion(), Some(Completion::Wc(_))));
}

#[test]
fn going_back_into_an_earlier_list() {
    let mut pair = Pair::new(Setup { mtu: PathMtu::Mtu256, ..Setup::default() });
    pair.a.buf.write(0, &pattern(1, 600));
    let lists = [[pair.a.sge(0, 300), pair.a.sge(300, 300)], [pair.a.sge(0, 10), pair.a.sge(10, 590)]];
    for (i, list) in lists.iter().enumerate() {
        let write = pair.write_to_b(1000 * (i + 1));
        pair.a.post(write, list, SendFlags::SIGNALED).expect("posts");
    }
    // The last packet of the first is lost; the sink stops in the middle of the second.
    pair.drop_if(|_, _, number| number == 2);
    pair.a.room = 5;
    pair.run_for(10 * pair.delay_ns);
    pair.a.room = usize::MAX;
    pair.run();
    assert_eq!(pair.a.done(), [(1, OK), (2, OK)]);
    assert!(pair.b.buf.read(1000, 600) == pattern(1, 600) && pair.b.buf.read(2000, 600) == pattern(1, 600));
}

#[test]
fn moves_are_invisible() {
    moving(|| {
        every_operation_at_every_mtu_and_edge_length();
        scatter_gather_of_odd_pieces();
        psns_wrap();
        long_messages_ask_for_acks_and_fill_the_window();
        acks_coalesce();
        unsignalled_sends_retire_and_free_their_slots();
        sq_sig_all_signals_everything();
        inline_data_is_copied_at_post();
        solicited_only_where_asked_for_and_possible();
        reads_stall_at_the_limit_and_writes_may_pass_them_but_complete_in_order();
        fence_waits_for_reads();
        a_long_read_by_the_peer_does_not_hold_up_requests();
        response_psns_of_reads_do_not_fill_the_window_but_come_back_to_it();
        requests_do_not_share_their_place_in_a_list();
        states_and_posting();
        to_err_flushes_in_order_and_later_posts_too();
        sqd_finishes_what_was_started();
        comm_est_once_in_rtr();
        a_sink_without_room_changes_nothing();
        completions_are_pulled_one_at_a_time();
        going_back_into_an_earlier_list();
    });
}

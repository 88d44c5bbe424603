//! What differs between the services: UC loses whole messages, UD has its GRH area, shared queues serve many, credits
//! hold back.

mod support;

use ferroce_mem::{Access, Payload};
use ferroce_transport::{Completion, Instant, Notice, Qp, QpCounter, Srq, Transmit};
use ferroce_verbs::{
    QpModify, QpState, QpType, RecvWr, SendFlags, SendOp, SrqInitAttr, WcFlags, WcOpcode, WcStatus,
};
use ferroce_wire::icrc::check_frame;
use ferroce_wire::{Bth, DmaLen, Ext, Gid, Imm, Opcode, PathMtu, Psn, Qkey, Qpn, RemoteAddr, Reth, Syndrome};
use proptest::prelude::*;
use support::*;

const OK: WcStatus = WcStatus::Success;

fn uc() -> Setup {
    Setup { qp_type: QpType::Uc, mtu: PathMtu::Mtu256, ..Setup::default() }
}

fn ud() -> Setup {
    Setup { qp_type: QpType::Ud, ..Setup::default() }
}

#[test]
fn uc_carries_sends_and_writes_at_every_mtu_and_edge_length() {
    for mtu in PathMtu::ALL {
        let p = mtu.bytes() as usize;
        for len in [0, 1, 3, p - 1, p, p + 1, 3 * p, 3 * p + 2] {
            let mut pair = Pair::new(Setup { mtu, sq_psn: 0xff_fffe, ..uc() });
            pair.a.buf.write(0, &pattern(len, len));
            pair.b.recv(100_000, 4 * p);
            pair.b.recv(0, 0);
            let (write, imm) = (pair.write_to_b(200_000), pair.write_imm_to_b(300_000, [1; 4]));
            for op in [SendOp::SendImm(Imm([7; 4])), write, imm] {
                pair.a.send(op, 0, len);
            }
            pair.run();
            assert_eq!(pair.a.done(), [(1, OK), (2, OK), (3, OK)]);
            let got: Vec<_> = pair.b.wcs.iter().map(|wc| (wc.opcode, wc.byte_len, wc.imm.0[0])).collect();
            let want = [(WcOpcode::Recv, len as u32, 7), (WcOpcode::RecvRdmaWithImm, len as u32, 1)];
            assert_eq!(got, want, "mtu {p} len {len}");
            for offset in [100_000, 200_000, 300_000] {
                assert!(pair.b.buf.read(offset, len) == pattern(len, len), "mtu {p} len {len} at {offset}");
            }
            assert_eq!(pair.logged("B "), 0, "nothing is answered");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the wire does, each message that arrives is whole, and no receive is lost.
    #[test]
    fn uc_delivers_whole_messages_or_none(fates in prop::collection::vec(0u8..20, 400), psn in any::<u32>()) {
        let mut pair = Pair::new(Setup { sq_psn: psn & 0xff_ffff, ..uc() });
        let len = |i: usize| (i * 173) % 1500;
        for i in 0..30 {
            pair.a.buf.write(i * 2000, &pattern(i, len(i)));
            pair.b.recv(100_000 + i * 2000, 1500);
        }
        for i in 0..30 {
            pair.a.send(SendOp::SendImm(Imm([i as u8; 4])), i * 2000, len(i));
        }
        pair.filter = Box::new(move |_, _, n| match fates.get(n).copied().unwrap_or(9) {
            0 => Fate::Drop,
            1 => Fate::Twice,
            2 => Fate::Late(1),
            3 => Fate::Late(5_000),
            _ => Fate::Pass,
        });
        pair.run();
        prop_assert_eq!(pair.a.done(), (1..=30).map(|id| (id, OK)).collect::<Vec<_>>());
        prop_assert!(pair.b.wcs.len() >= 5, "hardly any: {}", pair.b.wcs.len());
        for (next, wc) in (1..).zip(&pair.b.wcs) {
            prop_assert_eq!((wc.wr_id, wc.status), (next, OK), "receives in order, none left out");
            let i = usize::from(wc.imm.0[0]);
            prop_assert_eq!(wc.byte_len as usize, len(i));
            let at = 100_000 + (next as usize - 1) * 2000;
            prop_assert!(pair.b.buf.read(at, len(i)) == pattern(i, len(i)), "message {} is whole", i);
        }
        prop_assert_eq!(pair.b.qp.state(), QpState::Rts);
    }
}

/// Sends one datagram from A to B and returns its frame.
fn datagram(pair: &mut Pair, len: usize) -> Vec<u8> {
    pair.a.send(SendOp::Send, 0, len);
    let frame = pair.a.transmit(pair.now).1.expect("a datagram");
    pair.b.receive(pair.now, &frame);
    pair.a.collect();
    frame
}

#[test]
fn ud_grh_area_is_the_header_that_was_on_the_wire() {
    let mut pair = Pair::new(ud());
    pair.a.buf.write(0, &pattern(1, 1024));
    for len in [0, 1, 7, 1024] {
        pair.b.buf.fill(0x55);
        pair.b.recv(1000, 1064);
        let frame = datagram(&mut pair, len);
        assert_eq!(pair.b.buf.read(1020, 20), frame[14..34], "the IPv4 header, checksum included");
        assert!(pair.b.buf.read(1040, len) == pattern(1, len));
        let wc = pair.b.wcs.pop().expect("received");
        assert_eq!((wc.byte_len as usize, wc.flags, wc.src_qpn), (40 + len, WcFlags::GRH, A_QPN));
    }
    let gid = |host: &str| Gid::from_ip(host.parse().expect("an address"));
    let dest = pair.a.dest.as_mut().expect("a way");
    (dest.ah.av.sgid, dest.ah.av.dgid) = (gid("fd00::1"), gid("fd00::2"));
    (dest.ah.av.traffic_class, dest.ah.av.flow_label) = (0xff, 0xf_ffff);
    for len in [0, 5, 1024] {
        pair.b.recv(1000, 1064);
        let frame = datagram(&mut pair, len);
        assert_eq!(pair.b.buf.read(1000, 40), frame[14..54], "the IPv6 header");
        assert!(pair.b.buf.read(1040, len) == pattern(1, len));
    }
}

#[test]
fn ud_scatters_over_odd_pieces() {
    let mut pair = Pair::new(ud());
    pair.a.buf.write(0, &pattern(3, 300));
    let list = [pair.b.sge(0, 39), pair.b.sge(1000, 2), pair.b.sge(2000, 0), pair.b.sge(3000, 400)];
    pair.b.try_recv(&list).expect("posts");
    datagram(&mut pair, 300);
    assert_eq!(pair.b.wcs.len(), 1);
    let got = [pair.b.buf.read(1001, 1), pair.b.buf.read(3000, 299)].concat();
    assert!(got == pattern(3, 300));
}

#[test]
fn a_sink_without_addresses_fails_datagrams() {
    struct Plain;
    impl ferroce_transport::FrameSink for Plain {
        fn begin(&mut self, _: &Bth, _: &Ext, _: usize) -> bool {
            panic!("nothing may be begun")
        }
        fn payload(&mut self, _: ferroce_mem::MrSlice<'_>) {}
        fn inline(&mut self, _: &[u8]) {}
    }
    let mut pair = Pair::new(ud());
    pair.a.send(SendOp::Send, 0, 8);
    let answer = pair.a.qp.poll_transmit(pair.now, &pair.a.memory, &mut Plain);
    assert_eq!(answer, Transmit::Idle);
    pair.a.collect();
    assert_eq!(pair.a.done(), [(1, WcStatus::LocQpOpErr)]);
    assert_eq!(pair.a.qp.state(), QpState::Sqe);
}

#[test]
fn datagrams_go_each_their_own_way() {
    let mut pair = Pair::new(ud());
    pair.a.room = 0;
    for (host, qpn) in [(2, 5), (3, 6), (2, 7)] {
        pair.a.dest = Some(dest(1, host, Qpn::new(qpn)));
        pair.a.send(SendOp::Send, 0, 8);
    }
    pair.a.room = 3;
    for (host, qpn) in [(2, 5), (3, 6), (2, 7)] {
        let frame = pair.a.transmit(pair.now).1.expect("a datagram");
        let packet = check_frame(&frame).expect("well-formed");
        assert_eq!(packet.headers.bth.dest_qpn, Qpn::new(qpn));
        assert_eq!(packet.headers.ip.dst_gid(), gid(host));
        assert_eq!(packet.headers.eth.dst.0[5], host);
    }
}

#[test]
fn queue_key_of_the_queue_pair_itself_for_privileged_requests() {
    let mut pair = Pair::new(Setup { qkey: Qkey(0x8001_0000), ..ud() });
    pair.b.recv(0, 100);
    pair.a.dest.as_mut().expect("a way").remote_qkey = Qkey(0xffff_ffff);
    datagram(&mut pair, 4);
    assert_eq!(pair.b.wcs.len(), 1, "{:?}", pair.b.drops);
}

/// Two queue pairs and their shared queue.
struct Shared {
    host: Host,
    other: Qp,
    srq: Srq,
    now: Instant,
}

impl Shared {
    fn new() -> Shared {
        let setup = Setup { srq: Some(4), mtu: PathMtu::Mtu256, ..Setup::default() };
        let mut host = Host::new(A_QPN, &setup);
        let mut other = Qp::new(Qpn::new(0x21), &setup.attr());
        let now = Instant(1);
        for qp in [&mut host.qp, &mut other] {
            qp.modify(now, &QpModify::ToInit(setup.init())).expect("INIT");
            qp.modify(now, &QpModify::ToRtr(setup.rtr(1, 2, B_QPN, 0))).expect("RTR");
        }
        let srq = Srq::new(SRQ, &SrqInitAttr { pd: PD, max_wr: 4, max_sge: 4, limit: 2 });
        Shared { host, other, srq, now }
    }

    fn post(&mut self, wr_id: u64, offset: usize) {
        let sges = [self.host.sge(offset, 600)];
        self.srq.post_recv(&RecvWr { wr_id, sg_list: &sges }, &self.host.memory).expect("posts");
    }

    /// A SEND packet to one of the two; (wr_id, status) of what it finished.
    fn packet(&mut self, first: bool, opcode: Opcode, psn: u32, len: usize) -> Vec<(u64, WcStatus)> {
        let bth = Bth::new(opcode, A_QPN, Psn::new(psn));
        let fill = if first { 0x11 } else { 0x22 };
        let frame = seal(&headers(&av(2, 1), bth, Ext::NONE), &vec![fill; len]);
        let packet = check_frame(&frame).expect("well-formed");
        let start = usize::from(packet.payload_offset);
        let payload = Payload::from_slice(&frame[start..start + len]);
        let qp = if first { &mut self.host.qp } else { &mut self.other };
        let _ = qp.handle_packet_srq(self.now, &packet, &payload, &self.host.memory, Some(&mut self.srq));
        std::iter::from_fn(|| qp.poll_completion())
            .map(|done| match done {
                Completion::Wc(wc) => (wc.wr_id, wc.status),
                Completion::Retired => panic!("no sends here"),
            })
            .collect()
    }
}

#[test]
fn a_shared_queue_serves_each_message_where_it_began() {
    let mut shared = Shared::new();
    for i in 0..4 {
        shared.post(i, 1000 * i as usize);
    }
    let (srq, memory) = (&mut shared.srq, &shared.host.memory);
    assert_eq!(
        srq.post_recv(&RecvWr { wr_id: 9, sg_list: &[] }, memory),
        Err(ferroce_verbs::PostError::Full)
    );
    assert!(shared.packet(true, Opcode::RcSendFirst, 0, 256).is_empty());
    assert!(shared.packet(false, Opcode::RcSendFirst, 0, 256).is_empty());
    assert!(!shared.srq.poll_limit());
    assert_eq!(shared.packet(true, Opcode::RcSendLast, 1, 8), [(0, OK)]);
    assert_eq!(shared.packet(true, Opcode::RcSendOnly, 2, 8), [(2, OK)]);
    assert!(shared.srq.poll_limit(), "one is left, the limit was two");
    assert!(!shared.srq.poll_limit(), "told once");
    assert_eq!(shared.srq.info().limit, 0, "disarmed");
    assert_eq!(shared.packet(false, Opcode::RcSendLast, 1, 8), [(1, OK)]);
    let buf = &shared.host.buf;
    assert_eq!([buf.read(0, 264), buf.read(1000, 264)], [vec![0x11; 264], vec![0x22; 264]]);
    // One of them fails: its own receive is flushed, the other goes on.
    assert!(shared.packet(false, Opcode::RcSendFirst, 2, 256).is_empty());
    shared.other.modify(shared.now, &QpModify::ToErr).expect("ERR");
    assert_eq!(shared.other.poll_notice(), Some(Notice::CommEst));
    assert!(shared.other.poll_notice().is_none(), "not before its last receive is reported");
    let Some(Completion::Wc(wc)) = shared.other.poll_completion() else { panic!("a flush") };
    assert_eq!((wc.wr_id, wc.status), (3, WcStatus::WrFlushErr));
    assert_eq!(shared.other.poll_notice(), Some(Notice::LastWqeReached));
    assert_eq!(shared.other.poll_notice(), None);
    shared.post(5, 0);
    assert_eq!(shared.packet(true, Opcode::RcSendOnly, 3, 8), [(5, OK)]);
    let info = shared.srq.info();
    assert_eq!((info.posted, info.max_wr), (0, 4));
}

#[test]
fn a_shared_queue_can_grow_and_not_lose() {
    let mut shared = Shared::new();
    for i in 0..3 {
        shared.post(i, 1000 * i as usize);
    }
    assert!(!shared.srq.resize(2), "three are posted");
    assert!(shared.srq.resize(100));
    for i in 3..50 {
        shared.post(i, 1000 * i as usize);
    }
    for i in 0..50 {
        assert_eq!(shared.packet(true, Opcode::RcSendOnly, i, 8), [(u64::from(i), OK)]);
    }
    shared.srq.clear(&shared.host.memory);
    shared.host.qp.release(&shared.host.memory);
    shared.host.memory.deregister(shared.host.mr.lkey).expect("nothing posted names it");
}

#[test]
fn a_shared_queue_that_is_dropped_holds_nothing() {
    let mut shared = Shared::new();
    shared.post(1, 0);
    assert!(shared.host.memory.deregister(shared.host.mr.lkey).is_err(), "busy");
    shared.srq.clear(&shared.host.memory);
    assert_eq!(shared.srq.info().posted, 0);
    shared.host.memory.deregister(shared.host.mr.lkey).expect("nothing posted names it");
}

/// A receiver that posts one receive at a time, late: how often the sender runs into "not ready".
fn rnr_naks(credits: bool) -> u64 {
    let mut pair = Pair::new(Setup::default());
    let count = 40;
    if !credits {
        // As a peer that tells nothing: the code of every ACK is replaced.
        pair.rewrite = Some(Box::new(|_, headers| {
            if let Some(aeth) = &mut headers.ext.aeth
                && let Syndrome::Ack { credits } = &mut aeth.syndrome
            {
                *credits = 31;
            }
        }));
    }
    pair.b.recv(0, 100);
    for _ in 0..count {
        pair.a.send(SendOp::Send, 0, 100);
    }
    for _ in 0..count {
        pair.run_for(5_000);
        pair.b.recv(0, 100);
    }
    pair.run();
    assert_eq!(pair.a.done(), (1..=count).map(|id| (id, OK)).collect::<Vec<_>>());
    assert_eq!(pair.b.wcs.len(), count as usize);
    pair.b.count(QpCounter::SendRnr)
}

#[test]
fn credits_hold_back_what_would_not_be_received() {
    let (with, without) = (rnr_naks(true), rnr_naks(false));
    assert!(with <= without, "{with} with credits, {without} without");
    // With room for all, credits never hold anything back.
    let mut pair = Pair::new(Setup::default());
    for _ in 0..60 {
        pair.b.recv(0, 100);
    }
    for _ in 0..60 {
        pair.a.send(SendOp::Send, 0, 100);
    }
    pair.pump();
    assert_eq!(pair.logged("A SEND"), 60, "no answer has come, so nothing is known");
    pair.run();
    assert_eq!(pair.b.count(QpCounter::SendRnr), 0);
}

#[test]
fn a_receive_that_is_finished_but_not_reported_is_no_credit_and_still_in_use() {
    let mut pair = Pair::new(Setup::default());
    pair.b.recv(0, 100);
    pair.a.send(SendOp::Send, 0, 8);
    let frame = pair.a.transmit(pair.now).1.expect("a SEND");
    pair.b.take_quietly(pair.now, &check_frame(&frame).expect("well-formed"), &frame);
    let frame = pair.b.transmit(pair.now).1.expect("an ACK");
    let aeth = check_frame(&frame).expect("well-formed").headers.ext.aeth.expect("an ACK");
    assert_eq!(aeth.syndrome, Syndrome::Ack { credits: 0 });
    pair.b.qp.release(&pair.b.memory);
    assert!(pair.b.memory.deregister(pair.b.mr.lkey).is_err(), "its completion was not read");
    pair.b.collect();
    pair.b.qp.release(&pair.b.memory);
    pair.b.memory.deregister(pair.b.mr.lkey).expect("nothing posted names it");
}

#[test]
fn what_sqe_stopped_is_flushed_even_if_nobody_looked_before_rts() {
    let mut pair = Pair::new(uc());
    pair.a.room = 0;
    for _ in 0..3 {
        pair.a.send(SendOp::Send, 0, 8);
    }
    let own = pair.a.buf.register(&mut pair.a.memory, PD, Access::empty(), 0, 64);
    pair.a.memory.revoke(pair.a.mr.lkey).expect("known");
    assert_eq!(pair.a.transmit(pair.now).0, Transmit::Idle);
    assert_eq!(pair.a.qp.state(), QpState::Sqe);
    pair.a.qp.modify(pair.now, &QpModify::SqeToRts).expect("RTS");
    pair.a.mr = own;
    pair.a.send(SendOp::Send, 0, 8);
    pair.a.room = 9;
    pair.run();
    let flushed = WcStatus::WrFlushErr;
    assert_eq!(pair.a.done(), [(1, WcStatus::LocProtErr), (2, flushed), (3, flushed), (4, OK)]);
    assert_eq!(pair.logged("A UC_SEND"), 1);
}

#[test]
fn every_rnr_timer_waits_as_long_as_the_table_says() {
    // Milliseconds, as the specification prints them; index 0 is the longest (WIRE-5).
    let table = "655.36 0.01 0.02 0.03 0.04 0.06 0.08 0.12 0.16 0.24 0.32 0.48 0.64 0.96 1.28 1.92 2.56 3.84 5.12 7.68 \
                 10.24 15.36 20.48 30.72 40.96 61.44 81.92 122.88 163.84 245.76 327.68 491.52";
    for (timer, ms) in (0..).zip(table.split_whitespace()) {
        let (whole, part) = ms.split_once('.').expect("a fraction");
        let us: u64 = whole.parse::<u64>().expect("ms") * 1000 + part.parse::<u64>().expect("us") * 10;
        let setup = Setup { min_rnr_timer: timer, ..Setup::default() };
        let mut pair = Pair::new(setup);
        let start = pair.now;
        pair.a.send(SendOp::Send, 0, 8);
        pair.run_for(2 * pair.delay_ns);
        pair.pump();
        let Transmit::Later(at) = pair.a.transmit(pair.now).0 else { panic!("timer {timer} waits") };
        assert_eq!(at.since(start), 2 * pair.delay_ns + us * 1000, "timer {timer}");
        pair.b.recv(0, 8);
        pair.run();
        assert_eq!(pair.a.done(), [(1, OK)]);
    }
}

#[test]
fn windows_belong_to_one_queue_pair() {
    let mut pair = Pair::new(Setup::default());
    // The other queue pair of the same host and domain may not use, nor end, the window.
    let rkey = pair.b.bind(0, 64, Access::REMOTE_WRITE, SendFlags::SIGNALED);
    pair.run();
    let mut other = Qp::new(Qpn::new(0x31), &Setup::default().attr());
    let now = pair.now;
    let setup = Setup::default();
    other.modify(now, &QpModify::ToInit(setup.init())).expect("INIT");
    other.modify(now, &QpModify::ToRtr(setup.rtr(2, 1, A_QPN, 0))).expect("RTR");
    other.modify(now, &QpModify::ToRts(setup.rts(0))).expect("RTS");
    let reth = Some(Reth { addr: RemoteAddr(IOVA), rkey, len: DmaLen(8) });
    let bth = Bth::new(Opcode::RcWriteOnly, Qpn::new(0x31), Psn::new(0));
    let frame = seal(&headers(&av(1, 2), bth, Ext { reth, ..Ext::NONE }), &[9; 8]);
    let packet = check_frame(&frame).expect("well-formed");
    let payload = Payload::from_slice(&[9; 8]);
    let refused = other.handle_packet(now, &packet, &payload, &pair.b.memory);
    assert_eq!(refused, Err(ferroce_transport::DropReason::Refused));
    assert_eq!(pair.b.buf.read(0, 8), [0; 8]);
    let write = SendOp::Write { remote_addr: RemoteAddr(IOVA), rkey };
    pair.a.buf.write(0, &[7; 8]);
    pair.a.send(write, 0, 8);
    pair.run();
    assert_eq!(pair.a.done(), [(1, OK)]);
    assert_eq!(pair.b.buf.read(0, 8), [7; 8]);
}

#[test]
fn moves_are_invisible() {
    moving(|| {
        uc_carries_sends_and_writes_at_every_mtu_and_edge_length();
        uc_delivers_whole_messages_or_none();
        ud_grh_area_is_the_header_that_was_on_the_wire();
        ud_scatters_over_odd_pieces();
        a_sink_without_addresses_fails_datagrams();
        datagrams_go_each_their_own_way();
        queue_key_of_the_queue_pair_itself_for_privileged_requests();
        a_receive_that_is_finished_but_not_reported_is_no_credit_and_still_in_use();
        what_sqe_stopped_is_flushed_even_if_nobody_looked_before_rts();
        every_rnr_timer_waits_as_long_as_the_table_says();
        credits_hold_back_what_would_not_be_received();
        windows_belong_to_one_queue_pair();
    });
}

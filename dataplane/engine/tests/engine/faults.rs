//! Frames that no decent peer sends, peers that do not answer, queues that are full, and a stop in the middle.

use std::time::Duration;

use ferroce_engine::{EngineEventKind, IcrcMode};
use ferroce_nic::Port;
use ferroce_verbs::{
    AddressVector, AsyncEvent, CqId, Device, Gid, MacAddr, PostError, Psn, QpModify, QpState, Qpn, SendOp,
    WcStatus,
};
use ferroce_wire::{Aeth, Bth, Eth, Ext, Headers, Ip, Opcode, Packet, Syndrome, emit, icrc};

use crate::harness::{
    Link, Node, Pair, Post, ShmPort, inject, next_frame, pattern, ports, to_init, to_rtr, to_rts, until,
};

const PEER_QPN: Qpn = Qpn::new(0x4242);
const PEER_PSN: u32 = 1000;
const OUR_PSN: u32 = 5000;

/// An engine whose peer is the test itself.
struct Lone {
    node: Node,
    peer: ShmPort,
    queues: Vec<<ShmPort as Port>::Queue>,
    peer_gid: Gid,
    cq: CqId,
    qpn: Qpn,
    worker: u8,
    av: AddressVector,
}

impl Lone {
    /// One connected queue pair on the last worker.
    fn start(workers: usize, link: Link) -> Lone {
        let (port, mut peer) = ports(workers as u16, 4500);
        let queues = peer.take_queues();
        let peer_gid = Gid::from_ip(peer.addresses()[0].0);
        let node = Node::start("lone", workers, port);
        until("the two ports to attach", || {
            peer.housekeep();
            peer.link_up().then_some(())
        });
        let worker = workers as u8 - 1;
        let cq = node.cq(worker, 64);
        let qpn = node.qp(cq);
        let av = node.path_to(peer_gid, qpn, PEER_QPN);
        node.device.modify_qp(qpn, &to_init()).expect("to init");
        node.device.modify_qp(qpn, &to_rtr(av, PEER_QPN, PEER_PSN, link)).expect("to rtr");
        node.device.modify_qp(qpn, &to_rts(OUR_PSN, link)).expect("to rts");
        Lone { node, peer, queues, peer_gid, cq, qpn, worker, av }
    }

    /// Headers of a frame from the peer to the queue pair.
    fn headers(&self, opcode: Opcode, psn: u32) -> Headers {
        let (std::net::IpAddr::V4(src), std::net::IpAddr::V4(dst)) =
            (self.peer_gid.to_ip(), self.node.gid.to_ip())
        else {
            panic!("the tests' addresses are IPv4");
        };
        Headers {
            eth: Eth { dst: self.av.smac, src: MacAddr(self.peer.caps().mac), vlan: None },
            ip: Ip::V4 { src, dst, tos: 0, ttl: 64, id: 0, frag: 0x4000 },
            udp_src: 0xc123,
            udp_checksum: 0,
            bth: Bth { ack_req: true, ..Bth::new(opcode, self.qpn, Psn::new(psn)) },
            ext: Ext::NONE,
        }
    }

    fn send_only(&self, psn: u32, payload: &[u8]) -> Vec<u8> {
        seal(&self.headers(Opcode::RcSendOnly, psn), payload)
    }

    /// A good SEND arrives, is placed and acknowledged: the queue pair lives.
    fn works(&mut self, psn: u32, seed: u64) {
        let buffer = self.node.buffer(100);
        self.node.post_recv(self.worker, self.qpn, seed, buffer.sge(0, 100)).expect("a receive");
        let frame = self.send_only(psn, &pattern(100, seed));
        inject(&mut self.queues[self.worker as usize], &frame);
        let wc = self.node.completions(self.worker, self.cq, 1)[0];
        assert_eq!((wc.status, wc.wr_id, wc.byte_len), (WcStatus::Success, seed, 100));
        assert!(buffer.read(100) == pattern(100, seed));
        let ack = self.next_packet();
        assert_eq!((ack.headers.bth.opcode, ack.headers.bth.psn), (Opcode::RcAck, Psn::new(psn)));
        assert!(matches!(ack.headers.ext.aeth, Some(Aeth { syndrome: Syndrome::Ack { .. }, .. })));
    }

    fn next_packet(&mut self) -> Packet {
        let frame = next_frame(&mut self.queues[self.worker as usize]);
        icrc::check_frame(&frame).expect("what we send parses and carries a right ICRC")
    }

    fn stop(self) {
        self.node.stop();
    }
}

fn seal(headers: &Headers, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; 9000];
    let len = emit::seal(headers, payload, &mut frame).expect("headers that go together");
    frame.truncate(len);
    frame
}

/// Puts a right ICRC on a frame that was changed after it was sealed, so that only the change is wrong.
fn reseal(frame: &mut [u8], headers: usize) {
    let at = frame.len() - 4;
    let icrc = icrc::Icrc::over_headers(&frame[..headers], 14).update(&frame[headers..at]);
    frame[at..].copy_from_slice(&icrc.to_wire());
}

/// BTH of an IPv4 frame without tag.
const BTH: usize = 14 + 20 + 8;

#[test]
fn broken_frames_are_counted_by_reason_and_hurt_nobody() {
    for workers in [1, 2] {
        let mut lone = Lone::start(workers, Link::default());
        lone.works(PEER_PSN, 1);
        let good = lone.send_only(PEER_PSN + 1, &pattern(64, 9));
        let mut cases: Vec<(&str, Vec<u8>)> = Vec::new();
        let mut wrong_icrc = good.clone();
        wrong_icrc[BTH + 12 + 5] ^= 1;
        cases.push(("bad_icrc", wrong_icrc));
        // Shorter than its headers; or its IP header promises more than there is.
        for (len, reason) in
            [(1, "truncated"), (13, "truncated"), (20, "truncated"), (BTH + 11, "bad_length")]
        {
            let mut short = good.clone();
            short.truncate(len);
            cases.push((reason, short));
        }
        let mut unknown = good.clone();
        unknown[BTH] = 0xff;
        reseal(&mut unknown, BTH + 12);
        cases.push(("unknown_opcode", unknown));
        let mut version = good.clone();
        version[BTH + 1] |= 1;
        reseal(&mut version, BTH + 12);
        cases.push(("bad_version", version));
        let mut stranger = good.clone();
        stranger[BTH + 5..BTH + 8].copy_from_slice(&[0xab, 0xcd, 0xef]);
        reseal(&mut stranger, BTH + 12);
        cases.push(("unknown_qp", stranger));
        let mut not_ip = good.clone();
        not_ip[12..14].copy_from_slice(&[0x08, 0x06]);
        cases.push(("not_ip", not_ip));
        let mut elsewhere = good.clone();
        elsewhere[14 + 20 + 2..14 + 20 + 4].copy_from_slice(&53u16.to_be_bytes());
        cases.push(("not_roce", elsewhere));
        for (_, frame) in &cases {
            inject(&mut lone.queues[lone.worker as usize], frame);
        }
        let expected = |reason: &str| cases.iter().filter(|(r, _)| *r == reason).count() as u64;
        until("all of them to be counted", || {
            (lone.node.engine.stats().drops() >= cases.len() as u64).then_some(())
        });
        let stats = lone.node.engine.stats();
        for name in stats.workers[0].drops.iter().map(|(name, _)| *name) {
            assert_eq!(stats.drop(name), expected(name), "{name}: {stats:?}");
        }
        // The queue pair expects the same PSN as before.
        lone.works(PEER_PSN + 1, 2);
        assert_eq!(lone.node.device.query_qp(lone.qpn).expect("it exists").state, QpState::Rts);
        lone.stop();
    }
}

#[test]
fn an_oversized_payload_is_counted() {
    for workers in [1, 2] {
        let mut lone = Lone::start(workers, Link::default());
        // 4100 bytes of payload: longer than any path MTU. Built by hand, since emit refuses.
        let mut frame = lone.send_only(PEER_PSN, &pattern(4096, 1));
        let grown = frame.len() + 4;
        frame.resize(grown, 0);
        for (at, add) in [(14 + 2, 4u16), (14 + 20 + 4, 4)] {
            let len = u16::from_be_bytes([frame[at], frame[at + 1]]) + add;
            frame[at..at + 2].copy_from_slice(&len.to_be_bytes());
        }
        let mut sum = 0u32;
        frame[14 + 10..14 + 12].fill(0);
        for pair in frame[14..34].chunks(2) {
            sum += u32::from(u16::from_be_bytes([pair[0], pair[1]]));
        }
        sum = (sum & 0xffff) + (sum >> 16);
        sum = (sum & 0xffff) + (sum >> 16);
        frame[14 + 10..14 + 12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
        reseal(&mut frame, BTH + 12);
        inject(&mut lone.queues[lone.worker as usize], &frame);
        until("it to be counted", || (lone.node.engine.stats().drop("oversized") == 1).then_some(()));
        lone.works(PEER_PSN, 2);
        lone.stop();
    }
}

#[test]
fn a_queue_pair_in_the_wrong_state_takes_neither_frames_nor_work() {
    for workers in [1, 2] {
        let mut lone = Lone::start(workers, Link::default());
        let buffer = lone.node.buffer(64);
        let fresh = lone.node.qp(lone.cq);
        let send = Post::new(1, SendOp::Send, buffer.sge(0, 64));
        assert_eq!(lone.node.post_send(lone.worker, fresh, send.clone()), Err(PostError::BadState));
        assert_eq!(lone.node.post_recv(lone.worker, fresh, 1, buffer.sge(0, 64)), Err(PostError::BadState));
        let mut headers = lone.headers(Opcode::RcSendOnly, PEER_PSN);
        headers.bth.dest_qpn = fresh;
        inject(&mut lone.queues[lone.worker as usize], &seal(&headers, &pattern(8, 1)));
        until("it to be counted", || (lone.node.engine.stats().drop("wrong_state") == 1).then_some(()));
        // In error, work is taken and flushed at once.
        lone.node.device.modify_qp(lone.qpn, &QpModify::ToErr).expect("to err");
        lone.node.post_send(lone.worker, lone.qpn, send).expect("libibverbs takes it in the error state");
        lone.node.post_recv(lone.worker, lone.qpn, 2, buffer.sge(0, 64)).expect("as above");
        let wcs = lone.node.completions(lone.worker, lone.cq, 2);
        assert!(wcs.iter().all(|wc| wc.status == WcStatus::WrFlushErr), "{wcs:?}");
        // A number that was given back finds nothing.
        lone.node.device.destroy_qp(lone.qpn).expect("it goes");
        let frame = lone.send_only(PEER_PSN, &pattern(8, 1));
        inject(&mut lone.queues[lone.worker as usize], &frame);
        until("it to be counted", || (lone.node.engine.stats().drop("unknown_qp") == 1).then_some(()));
        lone.stop();
    }
}

#[test]
fn sends_never_overflow_a_completion_queue_and_receives_end_in_an_event() {
    for workers in [1u8, 2] {
        let pair = Pair::start(workers as usize);
        let worker = workers - 1;
        let (cq_a, cq_b) = (pair.a.cq(worker, 3), pair.b.cq(worker, 2));
        let (qp_a, qp_b) = (pair.a.qp(cq_a), pair.b.qp(cq_b));
        pair.a.connect(qp_a, pair.b.gid, qp_b, (7, 9), Link::default());
        pair.b.connect(qp_b, pair.a.gid, qp_a, (9, 7), Link::default());
        let (src, dst) = (pair.a.buffer(64), pair.b.buffer(64));
        let send = |n| Post::new(n, SendOp::Send, src.sge(0, 16));
        for n in 0..3 {
            pair.b.post_recv(worker, qp_b, n, dst.sge(0, 64)).expect("a receive");
        }
        for n in 0..2 {
            pair.a.post_send(worker, qp_a, send(n)).expect("an entry is free");
        }
        assert_eq!(pair.a.completions(worker, cq_a, 2).len(), 2);
        // The peer's completion queue holds two, and nobody polls it.
        pair.a.post_send(worker, qp_a, send(2)).expect("an entry is free");
        let event =
            pair.b.event("the overflow", |e| matches!(e.kind, EngineEventKind::Async(AsyncEvent::CqErr(_))));
        assert_eq!(event.kind, EngineEventKind::Async(AsyncEvent::CqErr(cq_b)));
        assert_eq!(event.worker, Some(worker));
        let stats = pair.b.engine.stats();
        assert_eq!(stats.counter("cq_overflows"), 1);
        assert_eq!(stats.counter("completions_lost"), 1);
        assert_eq!(pair.b.device.query_qp(qp_b).expect("it exists").state, QpState::Err);
        // The two that fitted are there.
        assert_eq!(pair.b.completions(worker, cq_b, 2).len(), 2);
        // Queue full by sends: reserved at post.
        let full: Vec<_> = (10..14).map(|n| pair.a.post_send(worker, qp_a, send(n))).collect();
        assert!(full.contains(&Err(PostError::Full)), "{full:?}");
        pair.stop();
    }
}

#[test]
fn a_peer_that_stops_answering_is_named_with_the_last_psn() {
    for workers in [1, 2] {
        // 4.096 us x 2^8 is about 1 ms; three tries.
        let mut lone = Lone::start(workers, Link { timeout: 8, retry_cnt: 2, ..Link::default() });
        let buffer = lone.node.buffer(3000);
        let send = Post::new(77, SendOp::Send, buffer.sge(0, 3000));
        lone.node.post_send(lone.worker, lone.qpn, send).expect("a send");
        let wc = lone.node.completions(lone.worker, lone.cq, 1)[0];
        assert_eq!((wc.wr_id, wc.status), (77, WcStatus::RetryExcErr));
        let event = lone.node.event("the fault", |e| e.detail.is_some());
        let detail = event.detail.expect("a detail");
        assert_eq!(event.kind, EngineEventKind::Async(AsyncEvent::QpFatal(lone.qpn)));
        assert_eq!((detail.peer, detail.peer_qpn), (Some(lone.peer_gid), PEER_QPN));
        assert_eq!((detail.status, detail.nak), (WcStatus::RetryExcErr, None));
        // Three packets: the last PSN is OUR_PSN + 2.
        assert_eq!(detail.psn, Psn::new(OUR_PSN + 2));
        let text = event.to_string();
        assert!(text.contains(&lone.peer_gid.to_ip().to_string()) && text.contains("RetryExcErr"), "{text}");
        // Three packets, sent once and retried; every one of them right.
        let mut frames = 0;
        let sent = lone.node.engine.stats().counter("tx_frames");
        while frames < sent {
            let packet = lone.next_packet();
            assert_eq!(packet.headers.bth.dest_qpn, PEER_QPN);
            frames += 1;
        }
        assert!((3..=9).contains(&frames), "{frames}");
        lone.stop();
    }
}

#[test]
fn a_stop_under_traffic_is_clean() {
    for workers in [1u8, 2] {
        let pair = Pair::start(workers as usize);
        let sides: Vec<_> =
            (0..4).map(|i| pair.connected((i % workers, i % workers), Link::default())).collect();
        let (src, dst) = (pair.a.buffer(1 << 20), pair.b.buffer(1 << 20));
        for (a, _) in &sides {
            for n in 0..32 {
                let op = SendOp::Write { remote_addr: dst.remote(0), rkey: dst.keys.rkey };
                pair.a.post_send(a.worker, a.qpn, Post::new(n, op, src.sge(0, 1 << 20))).expect("room");
            }
        }
        until("traffic", || (pair.b.engine.stats().counter("rx_frames") > 100).then_some(()));
        let device = pair.b.device.clone();
        pair.b.stop();
        assert_eq!(
            device.alloc_pd().and_then(|pd| device.create_cq(0, 1).map(|_| pd)).err().map(|e| e.kind),
            Some(ferroce_verbs::error::VerbsErrorKind::Gone)
        );
        pair.a.stop();
    }
}

#[test]
fn without_icrc_frames_leave_unsummed_and_arrive_unchecked() {
    let (port, mut peer) = ports(1, 4500);
    let mut queues = peer.take_queues();
    let mut port = port;
    let mut cfg = crate::harness::config("diagnosis", 1, &port);
    cfg.icrc = IcrcMode::Off;
    let engine =
        ferroce_engine::Engine::<crate::harness::Jobs>::start(cfg, port.take_queues()).expect("it starts");
    assert_eq!(engine.stats().icrc, IcrcMode::Off);
    until("the ports to attach", || {
        port.housekeep();
        peer.housekeep();
        peer.link_up().then_some(())
    });
    let headers = Headers {
        eth: Eth { dst: MacAddr(port.caps().mac), src: MacAddr(peer.caps().mac), vlan: None },
        ip: Ip::V4 {
            src: [10, 77, 0, 2].into(),
            dst: [10, 77, 0, 1].into(),
            tos: 0,
            ttl: 64,
            id: 0,
            frag: 0x4000,
        },
        udp_src: 0xc000,
        udp_checksum: 0,
        bth: Bth::new(Opcode::RcSendOnly, Qpn::new(77), Psn::new(0)),
        ext: Ext::NONE,
    };
    let mut frame = seal(&headers, &[1, 2, 3]);
    *frame.last_mut().expect("bytes") ^= 0xff;
    inject(&mut queues[0], &frame);
    until("it to pass the check that is off", || (engine.stats().drop("unknown_qp") == 1).then_some(()));
    assert_eq!(engine.stats().drop("bad_icrc"), 0);
    engine.stop(Duration::from_secs(20)).expect("it stops");
}

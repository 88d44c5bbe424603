//! Completion channels, address handles, windows and multicast groups: made, in use, refused, gone.

use std::os::fd::AsFd;
use std::time::Duration;

use ferroce_engine::EngineEventKind;
use ferroce_verbs::error::VerbsErrorKind;
use ferroce_verbs::{AddressVector, Device, Gid, QpInitAttr, Queues, SendOp, VerbsError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::harness::{Link, PATIENCE, Pair, Post, ip};

fn refusal<T: std::fmt::Debug>(outcome: Result<T, VerbsError>) -> (VerbsErrorKind, String) {
    let why = outcome.expect_err("it must be refused");
    (why.kind, why.to_string())
}

fn readable(fd: &impl AsFd) -> bool {
    let mut polled = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).expect("our own descriptor") == 1
}

#[test]
fn a_thread_outside_the_workers_sleeps_on_a_channel() {
    for workers in [1u8, 2] {
        let pair = Pair::start(workers as usize);
        let device = &pair.a.device;
        let channel = device.create_comp_channel().expect("a descriptor");
        let worker = workers - 1;
        let cq = device.create_cq_on(worker, 16, channel).expect("a completion queue");
        let (qp, peer_cq) = (pair.a.qp(cq), pair.b.cq(0, 16));
        let peer = pair.b.qp(peer_cq);
        pair.a.connect(qp, pair.b.gid, peer, (1, 2), Link::default());
        pair.b.connect(peer, pair.a.gid, qp, (2, 1), Link::default());
        let (src, dst) = (pair.a.buffer(8), pair.b.buffer(8));
        let write = SendOp::Write { remote_addr: dst.remote(0), rkey: dst.keys.rkey };
        let fd = device.comp_channel_fd(channel).expect("a descriptor");
        // Not armed: no event.
        pair.a.post_send(worker, qp, Post::new(1, write, src.sge(0, 8))).expect("room");
        pair.a.completions(worker, cq, 1);
        assert!(!readable(&fd));
        assert_eq!(device.get_cq_event(channel, Duration::ZERO), Ok(None));
        for round in 1..=3 {
            pair.a.on(worker, move |core| core.req_notify(cq, false)).expect("it exists");
            pair.a.post_send(worker, qp, Post::new(2, write, src.sge(0, 8))).expect("room");
            assert_eq!(device.get_cq_event(channel, PATIENCE), Ok(Some(cq)), "round {round}");
            assert!(!readable(&fd), "good for one event");
            pair.a.completions(worker, cq, 1);
        }
        // The device's own events are not those of the channel.
        while let Some(event) = pair.a.engine.next_event() {
            assert_ne!(event.kind, EngineEventKind::Completion(cq));
        }
        device.destroy_qp(qp).expect("it exists");
        let (kind, text) = refusal(device.destroy_cq(cq));
        assert_eq!(kind, VerbsErrorKind::Busy);
        assert!(text.contains("3 are not"), "{text}");
        let (kind, text) = refusal(device.ack_cq_events(cq, 4));
        assert_eq!(kind, VerbsErrorKind::Invalid);
        assert!(text.contains("at most 3"), "{text}");
        device.ack_cq_events(cq, 3).expect("three were taken");
        assert_eq!(refusal(device.destroy_comp_channel(channel)).0, VerbsErrorKind::Busy);
        device.destroy_cq(cq).expect("not in use");
        device.destroy_comp_channel(channel).expect("not in use");
        assert_eq!(refusal(device.create_cq_on(worker, 16, channel)).0, VerbsErrorKind::NotFound);
        assert_eq!(refusal(device.get_cq_event(channel, Duration::ZERO)).0, VerbsErrorKind::NotFound);
        pair.stop();
    }
}

#[test]
fn address_handles_belong_to_a_domain_and_need_a_path_of_ours() {
    let pair = Pair::start(1);
    let device = &pair.a.device;
    let cq = pair.a.cq(0, 8);
    let qp = pair.a.qp(cq);
    let av = pair.a.path_to(pair.b.gid, qp, qp);
    let pd = device.alloc_pd().expect("a domain");
    let (one, two) = (device.create_ah(pd, &av).expect("a path"), device.create_ah(pd, &av).expect("a path"));
    assert_ne!(one.id, two.id);
    assert_eq!((one.pd, one.av), (pd, av));
    assert_eq!(refusal(device.dealloc_pd(pd)).0, VerbsErrorKind::Busy);
    device.destroy_ah(&one).expect("it exists");
    assert_eq!(refusal(device.destroy_ah(&one)).0, VerbsErrorKind::NotFound);
    device.destroy_ah(&two).expect("it exists");
    let elsewhere = AddressVector { sgid: Gid::from_ip(ip("10.9.9.9")), ..av };
    assert!(refusal(device.create_ah(pd, &elsewhere)).1.contains("ah_attr.sgid: asked 10.9.9.9"));
    let mixed = AddressVector { dgid: Gid::from_ip(ip("2001:db8::1")), ..av };
    assert_eq!(refusal(device.create_ah(pd, &mixed)).0, VerbsErrorKind::Invalid);
    device.dealloc_pd(pd).expect("nothing belongs to it");
    assert_eq!(refusal(device.create_ah(pd, &av)).0, VerbsErrorKind::NotFound);
    pair.stop();
}

#[test]
fn windows_live_on_their_worker_and_their_keys_are_nobody_elses() {
    let pair = Pair::start(2);
    let device = &pair.a.device;
    let pd = device.alloc_pd().expect("a domain");
    let mut keys = Vec::new();
    for worker in [0, 1, 0, 1] {
        let rkey = device.alloc_mw(worker, pd).expect("a window");
        assert_eq!(rkey.0 & 0xff, 0, "the lowest 8 bits are the user's");
        assert!(!keys.contains(&(worker, rkey)) && !keys.contains(&(1 - worker, rkey)));
        keys.push((worker, rkey));
    }
    for _ in 0..50 {
        let buffer = pair.a.buffer(8);
        assert!(keys.iter().all(|(_, rkey)| rkey.0 >> 8 != buffer.keys.rkey.0 >> 8));
    }
    assert_eq!(refusal(device.dealloc_pd(pd)).0, VerbsErrorKind::Busy);
    let (worker, rkey) = keys[0];
    assert_eq!(refusal(device.dealloc_mw(1 - worker, rkey)).0, VerbsErrorKind::NotFound);
    // Any key that it had names it.
    device.dealloc_mw(worker, ferroce_verbs::Rkey(rkey.0 | 0x77)).expect("it exists");
    assert_eq!(refusal(device.dealloc_mw(worker, rkey)).0, VerbsErrorKind::NotFound);
    for (worker, rkey) in &keys[1..] {
        device.dealloc_mw(*worker, *rkey).expect("it exists");
    }
    device.dealloc_pd(pd).expect("nothing belongs to it");
    assert_eq!(refusal(device.alloc_mw(2, pd)).0, VerbsErrorKind::Invalid);
    pair.stop();
}

#[test]
fn only_datagram_queue_pairs_join_groups() {
    let pair = Pair::start(2);
    let device = &pair.a.device;
    let group = Gid::from_ip(ip("239.7.7.7"));
    let cq = pair.a.cq(1, 8);
    let rc = pair.a.qp(cq);
    assert!(refusal(device.attach_mcast(rc, group)).1.contains("qp_type: asked Rc, allowed Ud"));
    assert!(refusal(device.attach_mcast(rc, pair.a.gid)).1.contains("gid: asked 10.77.0.1"));
    assert_eq!(refusal(device.detach_mcast(rc, group)).0, VerbsErrorKind::NotFound);
    let ud = QpInitAttr { qp_type: ferroce_verbs::QpType::Ud, ..pair.a.init_attr(cq) };
    let qpn = device.create_qp(&ud).expect("datagrams");
    device.attach_mcast(qpn, group).expect("room");
    device.attach_mcast(qpn, group).expect("as good as once");
    assert_eq!(device.multicast_groups(), [group]);
    assert_eq!(refusal(device.destroy_qp(qpn)).0, VerbsErrorKind::Busy);
    device.detach_mcast(qpn, group).expect("it is in it");
    assert_eq!(device.multicast_groups(), []);
    device.destroy_qp(qpn).expect("it is in no group");
    pair.stop();
}

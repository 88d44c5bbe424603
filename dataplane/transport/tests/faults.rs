//! Two queue pairs over a wire that loses, repeats, delays, and over memory whose keys go bad.

mod support;

use ferroce_mem::{Access, PdId};
use ferroce_transport::{DropReason, Instant, Notice, QpCounter};
use ferroce_verbs::{QpModify, QpState, SendFlags, SendOp, Sge, Wc, WcFlags, WcOpcode, WcStatus};
use ferroce_wire::{Bth, Ext, NakCode, Opcode, PathMtu, Pkey, Psn, RemoteAddr, Rkey};
use proptest::prelude::*;
use support::*;

const OK: WcStatus = WcStatus::Success;
/// Where the operands of atomics are.
const COUNTER: usize = 990_000;
const FLUSHED: WcStatus = WcStatus::WrFlushErr;

/// Mixed work in both directions; returns how to check it.
fn mixed_work(pair: &mut Pair) -> impl Fn(&Pair, &str) + use<> {
    let p = pair.a.qp.path_mtu().expect("RTR").bytes() as usize;
    let data = pattern(77, 4 * p);
    pair.a.buf.write(0, &data);
    pair.b.buf.write(0, &data);
    let all = [3 * p + 5, 2 * p, 4 * p, 1, p, 0];
    let base = |i: usize| 100_000 + i * 30_000;
    // Every request has another list of pieces, some empty, so that no place in one fits another.
    let pieces = |host: &Host, offset: usize, len: usize, salt: usize| {
        let first = (salt * 37) % (len + 1);
        let second = (salt * 101) % (len - first + 1);
        [
            host.sge(offset, first),
            host.sge(offset + first, second),
            host.sge(offset + first + second, len - first - second),
        ]
    };
    for (i, len) in all.iter().enumerate() {
        let list = pieces(&pair.b, base(i), 4 * p, i + 3);
        pair.b.try_recv(&list).expect("posts");
        pair.b.recv(0, 0);
        pair.b.recv(0, 0);
        // What B binds, A uses and ends.
        let rkey = pair.b.bind(base(i) + 10_000, 8, Access::REMOTE_WRITE, SendFlags::empty());
        let remote_addr = RemoteAddr(IOVA + base(i) as u64 + 10_000);
        let ops = [
            (SendOp::Send, 0, *len),
            (pair.read_from_b(0), base(i), *len),
            (pair.fetch_add_at_b(COUNTER, 7), base(i) + 20_000, 8),
            (pair.write_to_b(base(i) + 400_000), 0, *len),
            (SendOp::Write { remote_addr, rkey }, 0, 8),
            (pair.cmp_swap_at_b(COUNTER + 8, i as u64, i as u64 + 1), base(i) + 20_008, 8),
            (SendOp::SendInv { rkey }, 0, 0),
            (pair.write_imm_to_b(base(i) + 600_000, [i as u8; 4]), 0, *len),
        ];
        for (salt, (op, offset, len)) in ops.into_iter().enumerate() {
            let list = pieces(&pair.a, offset, len, i * 8 + salt);
            pair.a.post(op, &list, SendFlags::SIGNALED).expect("posts");
        }
    }
    let own = pair.b.bind(0, 8, Access::REMOTE_READ, SendFlags::SIGNALED);
    pair.b.post(SendOp::LocalInv { rkey: own }, &[], SendFlags::SIGNALED).expect("posts");
    let write_back = SendOp::Write { remote_addr: RemoteAddr(IOVA + 900_000), rkey: pair.a.mr.rkey };
    pair.b.send(write_back, 0, 3 * p);
    let read_back = SendOp::Read { remote_addr: RemoteAddr(IOVA), rkey: pair.a.mr.rkey };
    pair.b.send(read_back, 950_000, 3 * p);
    move |pair, context| {
        let a: Vec<_> = pair.a.wcs.iter().map(|wc| (wc.is_recv, wc.wr_id, wc.status)).collect();
        let want: Vec<_> = (1..=48).map(|id| (false, id, OK)).collect();
        assert_eq!(a, want, "{context}\n{}", pair.tail());
        let b = &pair.b.wcs;
        assert!(b.iter().all(|wc| wc.status == OK), "{context}\n{}", pair.tail());
        let received: Vec<_> = b.iter().filter(|wc| wc.is_recv).map(|wc| wc.byte_len as usize).collect();
        let lens: Vec<_> = all.iter().flat_map(|len| [*len, 0, *len]).collect();
        assert_eq!(received, lens, "{context}");
        assert_eq!(b.iter().filter(|wc| wc.flags.contains(WcFlags::WITH_INV)).count(), 6, "{context}");
        let sent: Vec<_> = b.iter().filter(|wc| !wc.is_recv).map(|wc| wc.opcode).collect();
        let local = [WcOpcode::BindMw, WcOpcode::LocalInv, WcOpcode::RdmaWrite, WcOpcode::RdmaRead];
        assert_eq!(sent, local, "{context}");
        assert_eq!(pair.b.buf.read_u64(COUNTER), 6 * 7, "{context}: each atomic once");
        assert_eq!(pair.b.buf.read_u64(COUNTER + 8), 6, "{context}: each atomic once");
        for (i, len) in all.iter().enumerate() {
            assert!(pair.a.buf.read(base(i), *len) == data[..*len], "{context}: READ {i}");
            assert_eq!(pair.a.buf.read_u64(base(i) + 20_000), 7 * i as u64, "{context}: what was there");
            assert_eq!(pair.a.buf.read_u64(base(i) + 20_008), i as u64, "{context}: what was there");
            assert!(pair.b.buf.read(base(i) + 10_000, 8) == data[..8], "{context}: by the window");
            for offset in [0, 400_000, 600_000] {
                assert!(
                    pair.b.buf.read(base(i) + offset, *len) == data[..*len],
                    "{context}: {i} at {offset}"
                );
            }
        }
        assert!(pair.a.buf.read(900_000, 3 * p) == data[..3 * p], "{context}");
        assert!(pair.b.buf.read(950_000, 3 * p) == data[..3 * p], "{context}");
        assert!(pair.a.notices.is_empty() && pair.b.notices.is_empty(), "{context}");
        assert_eq!(pair.a.qp.info().una_psn, pair.b.qp.info().rq_psn);
        assert_eq!(pair.b.qp.info().una_psn, pair.a.qp.info().rq_psn);
    }
}

fn small() -> Setup {
    Setup { mtu: PathMtu::Mtu256, max_rd_atomic: 3, max_dest_rd_atomic: 3, ..Setup::default() }
}

#[test]
fn any_single_loss_is_repaired() {
    let mut clean = Pair::new(small());
    let check = mixed_work(&mut clean);
    clean.run();
    check(&clean, "clean");
    let frames = clean.log.len();
    assert!(frames > 60, "{frames}");
    for lost in 0..frames {
        let mut pair = Pair::new(small());
        let check = mixed_work(&mut pair);
        pair.drop_if(move |_, _, number| number == lost);
        pair.run();
        check(&pair, &format!("lost frame {lost}"));
    }
}

#[test]
fn any_burst_loss_is_repaired() {
    for lost in (0..120).step_by(3) {
        for burst in [2, 5, 7] {
            let mut pair = Pair::new(small());
            let check = mixed_work(&mut pair);
            pair.drop_if(move |_, _, number| (lost..lost + burst).contains(&number));
            pair.run();
            check(&pair, &format!("lost frames {lost} + {burst}"));
        }
    }
}

#[test]
fn every_frame_twice_changes_nothing() {
    let mut pair = Pair::new(small());
    let check = mixed_work(&mut pair);
    pair.filter = Box::new(|_, _, _| Fate::Twice);
    pair.run();
    check(&pair, "twice");
    assert!(pair.b.count(QpCounter::DuplicateRequest) > 0);
}

#[test]
fn any_single_late_frame_is_repaired() {
    for late in 0..90 {
        for by in [500, 3_000, 200_000_000] {
            let mut pair = Pair::new(small());
            let check = mixed_work(&mut pair);
            pair.filter = Box::new(move |_, _, n| if n == late { Fate::Late(by) } else { Fate::Pass });
            pair.run();
            check(&pair, &format!("frame {late} late by {by}"));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Random loss, repetition and delay on every frame; PSNs anywhere.
    #[test]
    fn random_faults_are_repaired(
        fates in prop::collection::vec(0u8..40, 400),
        sq_psn in 0u32..1 << 24,
        rq_psn in 0xff_ff00u32..1 << 24,
        mtu in prop::sample::select(&PathMtu::ALL[..3]),
        rd in 1u8..5,
    ) {
        let setup = Setup { sq_psn, rq_psn, mtu, max_rd_atomic: rd, max_dest_rd_atomic: rd, ..Setup::default() };
        let mut pair = Pair::new(setup);
        let check = mixed_work(&mut pair);
        // Faults stop after a while, so everything must come to its end.
        pair.filter = Box::new(move |_, _, n| match fates.get(n) {
            Some(0..=1) => Fate::Drop,
            Some(2..=3) => Fate::Twice,
            Some(fate @ 4..=7) => Fate::Late(u64::from(*fate) * 700),
            Some(8) => Fate::Late(100_000_000),
            Some(_) | None => Fate::Pass,
        });
        pair.run();
        check(&pair, "random");
    }
}

/// WIRE-1, first half.
#[test]
fn wire_1_read_repeated_inside_a_write() {
    let mut pair = Pair::new(Setup::default());
    pair.b.buf.write(0, &pattern(1, 3072));
    pair.a.buf.write(50_000, &pattern(2, 4096));
    let (read, write) = (pair.read_from_b(0), pair.write_to_b(100_000));
    pair.a.send(read, 0, 3072);
    pair.a.send(write, 50_000, 4096);
    // The first response is lost, and so are the WRITE's packets after its FIRST, the first time.
    let mut seen = std::collections::HashSet::new();
    pair.drop_if(move |side, packet, _| {
        let first_time = seen.insert((side == Side::A, packet.headers.bth.psn.get()));
        let psn = packet.headers.bth.psn.get();
        first_time && (side == Side::B && psn == 100 || side == Side::A && psn > 103)
    });
    pair.run();
    assert_eq!(pair.a.done(), [(1, OK), (2, OK)], "{}", pair.tail());
    assert!(pair.a.buf.read(0, 3072) == pattern(1, 3072));
    assert!(pair.b.buf.read(100_000, 4096) == pattern(2, 4096));
    assert_eq!(pair.logged("NAK_INV"), 0);
}

/// WIRE-1, second half.
#[test]
fn wire_1_acks_of_duplicates_never_stand_for_read_data() {
    let mut pair = Pair::new(Setup::default());
    let (write, read) = (pair.write_to_b(0), pair.read_from_b(0));
    pair.a.send(write, 0, 4);
    pair.a.send(read, 0, 4);
    pair.drop_if(|side, _, number| side == Side::B && number < 4);
    pair.run();
    assert_eq!(pair.a.done(), [(1, OK), (2, OK)]);
    assert_eq!(pair.logged("B ACK psn=101"), 0, "{}", pair.tail());
    assert_eq!(pair.a.count(QpCounter::ImpliedNakSeqErr), 0);
}

/// What QPCQ-3 wants of A: 8 sends and 8 receives were outstanding when the first send failed with `status`, 4 sends were
/// posted after that. Twelve completions of sends, the real error and then the flush in order; 8 flushed receives.
fn all_is_told(pair: &mut Pair, status: WcStatus) {
    for _ in 0..4 {
        pair.a.send(SendOp::Send, 0, 100);
    }
    pair.run();
    let (recvs, sends): (Vec<&Wc>, Vec<&Wc>) = pair.a.wcs.iter().partition(|wc| wc.is_recv);
    let sends: Vec<_> = sends.iter().map(|wc| (wc.wr_id, wc.status)).collect();
    let mut want = vec![(1, status)];
    want.extend((2..=8).chain(17..=20).map(|id| (id, FLUSHED)));
    assert_eq!(sends, want, "{}", pair.tail());
    let recvs: Vec<_> = recvs.iter().map(|wc| (wc.wr_id, wc.status)).collect();
    assert_eq!(recvs, (9..=16).map(|id| (id, FLUSHED)).collect::<Vec<_>>());
    assert_eq!((pair.a.qp.send_queue_free(), pair.a.qp.recv_queue_free()), (64, 64));
}

/// QPCQ-3: the peer dies with work outstanding, and more is posted after the first error.
#[test]
fn qpcq_3_a_peer_that_dies() {
    let mut pair = Pair::new(Setup { timeout: 8, ..Setup::default() });
    for i in 0..8 {
        let sge = pair.a.sge(0, 100);
        // Unsignalled work completes too, when it fails.
        let flags = if i % 2 == 0 { SendFlags::SIGNALED } else { SendFlags::empty() };
        pair.a.post(SendOp::Send, &[sge], flags).expect("posts");
    }
    for _ in 0..8 {
        pair.a.recv(0, 100);
    }
    pair.drop_if(|_, _, _| true);
    let start = pair.now;
    pair.run();
    // retry_cnt 7: eight periods of 4.096 us * 2^8, and no more.
    assert_eq!(pair.now.since(start), 8 * (4096 << 8));
    all_is_told(&mut pair, WcStatus::RetryExcErr);
    let fatal = Notice::Fatal { status: WcStatus::RetryExcErr, psn: Psn::new(107), nak: None };
    assert_eq!(pair.a.notices, [fatal], "the last PSN that was sent");
}

/// QPCQ-3 where the first send names a key that went bad, and where the peer refuses it.
#[test]
fn qpcq_3_a_local_key_fault_and_a_refusal_by_the_peer() {
    for local in [true, false] {
        let mut pair = Pair::new(Setup::default());
        let extra = pair.a.buf.register(&mut pair.a.memory, PD, Access::LOCAL_WRITE, 5000, 100);
        let bad = Sge { addr: IOVA + 5000, length: 100, lkey: extra.lkey };
        let good = pair.a.sge(0, 100);
        let write = pair.write_to_b(0);
        let refused = SendOp::Write { remote_addr: RemoteAddr(IOVA), rkey: BAD_RKEY };
        let (first, sge) = if local { (write, bad) } else { (refused, good) };
        pair.a.post(first, &[sge], SendFlags::empty()).expect("posts");
        for _ in 0..7 {
            pair.a.post(write, &[good], SendFlags::SIGNALED).expect("posts");
        }
        for _ in 0..8 {
            pair.a.recv(0, 100);
        }
        if local {
            pair.a.memory.revoke(extra.lkey).expect("known");
        }
        pair.run();
        let status = if local { WcStatus::LocProtErr } else { WcStatus::RemAccessErr };
        all_is_told(&mut pair, status);
        let fatal = Notice::Fatal { status, psn: Psn::new(100), nak: None };
        assert_eq!(pair.a.notices, [fatal]);
    }
}

/// Work before a request whose key went bad succeeds.
#[test]
fn a_local_key_fault() {
    let mut pair = Pair::new(Setup::default());
    let extra = pair.a.buf.register(&mut pair.a.memory, PD, Access::LOCAL_WRITE, 5000, 100);
    let good = pair.a.sge(0, 100);
    let bad = Sge { addr: IOVA + 5000, length: 100, lkey: extra.lkey };
    let write = pair.write_to_b(0);
    for sge in [good, good, bad, good] {
        pair.a.post(write, &[sge], SendFlags::SIGNALED).expect("posts");
    }
    pair.a.recv(0, 10);
    pair.a.memory.revoke(extra.lkey).expect("known");
    pair.run();
    pair.a.send(write, 0, 4);
    pair.run();
    let done = pair.a.done();
    let want = [(1, OK), (2, OK), (3, WcStatus::LocProtErr), (4, FLUSHED), (5, FLUSHED), (6, FLUSHED)];
    assert_eq!(done, want, "earlier work succeeds, then the real error, then the flush");
    assert_eq!(pair.logged("psn=102"), 0, "nothing of the faulty request was sent");
}

/// A peer that ends a key which it may not (class J): no NAK says why, so the requester learns by its retries.
#[test]
fn a_key_that_may_not_be_ended_fails_both_sides() {
    let mut pair = Pair::new(Setup::default());
    pair.b.recv(0, 100);
    pair.b.recv(0, 100);
    pair.b.recv(0, 100);
    pair.a.send(SendOp::Send, 0, 10);
    pair.a.send(SendOp::SendInv { rkey: BAD_RKEY }, 0, 10);
    pair.a.send(SendOp::Send, 0, 10);
    pair.run();
    assert_eq!(pair.a.done(), [(1, OK), (2, WcStatus::RetryExcErr), (3, FLUSHED)], "{}", pair.tail());
    assert_eq!(pair.b.done(), [(1, OK), (2, WcStatus::RemInvReqErr), (3, FLUSHED)]);
    assert_eq!(pair.logged("NAK"), 0);
    let psn = Psn::new(101);
    assert_eq!(pair.b.notices, [Notice::Fatal { status: WcStatus::RemInvReqErr, psn, nak: None }]);
}

/// Statuses on both sides for every kind of refusal.
#[test]
fn refusals_are_told_on_both_sides() {
    type Case = (&'static str, fn(&mut Pair) -> SendOp, WcStatus, NakCode, Option<WcStatus>);
    fn write(pair: &Pair, rkey: Rkey) -> SendOp {
        let _ = pair;
        SendOp::Write { remote_addr: RemoteAddr(IOVA), rkey }
    }
    let access = (WcStatus::RemAccessErr, NakCode::RemoteAccess);
    let invalid = (WcStatus::RemInvReqErr, NakCode::InvalidRequest);
    let cases: Vec<Case> = vec![
        ("unknown key", |pair| write(pair, BAD_RKEY), access.0, access.1, None),
        (
            "other PD",
            |pair| {
                let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
                let mr = pair.b.buf.register(&mut pair.b.memory, PdId(1), all, 0, 4096);
                write(pair, mr.rkey)
            },
            access.0,
            access.1,
            None,
        ),
        (
            "no right",
            |pair| {
                let mr = pair.b.buf.register(&mut pair.b.memory, PD, Access::REMOTE_READ, 0, 4096);
                write(pair, mr.rkey)
            },
            access.0,
            access.1,
            None,
        ),
        (
            "beyond the end",
            |pair| {
                let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
                let mr = pair.b.buf.register(&mut pair.b.memory, PD, all, 0, 2000);
                write(pair, mr.rkey)
            },
            access.0,
            access.1,
            None,
        ),
        (
            "address wraps",
            |pair| SendOp::Write { remote_addr: RemoteAddr(u64::MAX - 10), rkey: pair.b.mr.rkey },
            access.0,
            access.1,
            None,
        ),
        (
            "READ of an unknown key",
            |_| SendOp::Read { remote_addr: RemoteAddr(IOVA), rkey: BAD_RKEY },
            access.0,
            access.1,
            None,
        ),
        (
            "atomic on an unknown key",
            |_| SendOp::FetchAdd { remote_addr: RemoteAddr(IOVA), rkey: BAD_RKEY, add: 1 },
            access.0,
            access.1,
            None,
        ),
        (
            "atomic without the right",
            |pair| {
                let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
                let rkey = pair.b.buf.register(&mut pair.b.memory, PD, all, 0, 4096).rkey;
                SendOp::CmpSwap { remote_addr: RemoteAddr(IOVA), rkey, compare: 0x5a, swap: 1 }
            },
            access.0,
            access.1,
            None,
        ),
        ("atomic beside a multiple of 8", |pair| pair.fetch_add_at_b(4, 1), invalid.0, invalid.1, None),
        (
            "by a window that was ended",
            |pair| {
                let rkey = pair.b.bind(0, 4096, Access::REMOTE_WRITE, SendFlags::empty());
                pair.b.post(SendOp::LocalInv { rkey }, &[], SendFlags::empty()).expect("posts");
                write(pair, rkey)
            },
            access.0,
            access.1,
            None,
        ),
        ("receive too small", |_| SendOp::Send, invalid.0, invalid.1, Some(WcStatus::LocLenErr)),
        (
            "receive with a bad key",
            |pair| {
                let lkey = pair.b.mr.lkey;
                pair.b.memory.revoke(lkey).expect("known");
                SendOp::SendImm(Default::default())
            },
            WcStatus::RemOpErr,
            NakCode::RemoteOperational,
            Some(WcStatus::LocProtErr),
        ),
    ];
    for (name, make, status, nak, recv) in cases {
        let mut pair = Pair::new(Setup::default());
        pair.b.buf.fill(0x5a);
        pair.b.recv(8192, 2000);
        pair.b.recv(8192, 2000);
        let op = make(&mut pair);
        let len = if matches!(op, SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. }) { 8 } else { 3000 };
        for (op, len) in [(pair.write_to_b(500_000), 0), (op, len), (SendOp::Send, 10)] {
            pair.a.send(op, 0, len);
        }
        pair.a.recv(0, 10);
        pair.run();
        assert_eq!(
            pair.a.done(),
            [(1, OK), (2, status), (3, FLUSHED), (4, FLUSHED)],
            "{name}\n{}",
            pair.tail()
        );
        let first = recv.unwrap_or(FLUSHED);
        let received: Vec<_> = pair.b.wcs.iter().filter(|wc| wc.is_recv).map(|wc| wc.status).collect();
        assert_eq!(received, [first, FLUSHED], "{name}");
        let Some(Notice::Fatal { status: at_b, nak: sent, .. }) = pair.b.notices.first().copied() else {
            panic!("{name}: no notice")
        };
        assert_eq!((sent, at_b), (Some(nak), recv.unwrap_or(WcStatus::FatalErr)), "{name}");
        assert!(state_is_err(&pair.a) && state_is_err(&pair.b), "{name}");
        if recv.is_none() {
            assert!(pair.b.buf.read(0, BUF).iter().all(|b| *b == 0x5a), "{name}: something was written");
        }
    }
}

#[test]
fn a_lost_nak_ends_in_exhausted_retries() {
    let mut pair = Pair::new(Setup { timeout: 8, retry_cnt: 2, ..Setup::default() });
    pair.a.send(SendOp::Write { remote_addr: RemoteAddr(IOVA), rkey: BAD_RKEY }, 0, 10);
    pair.drop_if(|side, _, _| side == Side::B);
    pair.run();
    assert_eq!(pair.a.done(), [(1, WcStatus::RetryExcErr)]);
    assert_eq!(pair.b.drops.last(), Some(&DropReason::WrongState), "a queue pair in error drops silently");
}

#[test]
fn receives_posted_late_cost_one_rnr_wait() {
    for (timer, wait_ns) in [(12, 640_000), (0, 655_360_000), (1, 10_000), (31, 491_520_000)] {
        let mut pair = Pair::new(Setup { min_rnr_timer: timer, timeout: 20, ..Setup::default() });
        pair.a.buf.write(0, &pattern(8, 3000));
        pair.a.send(SendOp::Send, 0, 3000);
        pair.a.send(SendOp::Send, 0, 10);
        let start = pair.now;
        pair.run_for(5_000);
        assert_eq!(pair.logged("RNR"), 1, "one NAK for the burst: {}", pair.tail());
        pair.b.recv(0, 4000);
        pair.b.recv(8000, 4000);
        pair.run();
        assert_eq!(pair.a.done(), [(1, OK), (2, OK)]);
        assert_eq!(pair.now.since(start), wait_ns + 4 * pair.delay_ns, "timer {timer}");
        assert!(pair.b.buf.read(0, 3000) == pattern(8, 3000));
        assert_eq!((pair.a.count(QpCounter::RnrNakRetryErr), pair.b.count(QpCounter::SendRnr)), (1, 1));
        assert_eq!(pair.a.count(QpCounter::LocalAckTimeoutErr), 0);
    }
}

/// WIRE-5: 64 receives for 256 sends in flight, posted again 32 at a time. Under timer code 12, which is what everything
/// here sets by default, nobody waits long; under code 0 one wait takes 655 ms.
#[test]
fn wire_5_a_burst_beyond_the_receives() {
    for (timer, wait_ns) in [(12, 640_000), (0, 655_360_000)] {
        let mut setup = Setup { min_rnr_timer: timer, timeout: 20, ..Setup::default() };
        (setup.cap.max_send_wr, setup.cap.max_recv_wr) = (256, 64);
        let mut pair = Pair::new(setup);
        for _ in 0..64 {
            pair.b.recv(0, 100);
        }
        let start = pair.now;
        for _ in 0..256 {
            pair.a.send(SendOp::Send, 0, 100);
        }
        let (mut latencies, mut used) = (Vec::new(), 0);
        while latencies.len() < 256 {
            assert!(pair.now.since(start) < 10_000_000_000, "{} of 256\n{}", latencies.len(), pair.tail());
            pair.run_for(10_000);
            assert!(pair.a.wcs.iter().chain(&pair.b.wcs).all(|wc| wc.status == OK));
            latencies.extend(pair.a.wcs.drain(..).map(|_| pair.now.since(start)));
            used += pair.b.wcs.drain(..).count();
            while used >= 32 {
                used -= 32;
                for _ in 0..32 {
                    pair.b.recv(0, 100);
                }
            }
        }
        let naks = pair.b.count(QpCounter::SendRnr);
        assert!(
            naks > 0 && pair.a.count(QpCounter::RnrNakRetryErr) == naks,
            "timer {timer}: {naks} RNR NAKs"
        );
        // In order of completion, so also of length: the 99th percentile.
        let p99 = latencies[253];
        if timer == 12 {
            assert!(p99 < 10_000_000, "{p99} ns, {naks} RNR NAKs");
        } else {
            assert!(p99 >= wait_ns, "{p99} ns, {naks} RNR NAKs");
        }
        // The counter times the wait: nothing else takes long here.
        let waits = naks * wait_ns;
        assert!(
            (waits..waits + 5_000_000).contains(&latencies[255]),
            "{} ns, {naks} RNR NAKs",
            latencies[255]
        );
    }
}

#[test]
fn rnr_retries_run_out() {
    let mut pair = Pair::new(Setup { rnr_retry: 3, min_rnr_timer: 1, ..Setup::default() });
    pair.a.send(SendOp::Send, 0, 10);
    pair.run();
    assert_eq!(pair.a.done(), [(1, WcStatus::RnrRetryExcErr)]);
    assert_eq!(pair.logged("RNR"), 4);
    assert_eq!(pair.b.qp.state(), QpState::Rts, "the responder is none the worse");
}

#[test]
fn a_peer_with_another_path_mtu_is_refused() {
    let other = Setup { mtu: PathMtu::Mtu512, ..Setup::default() };
    let mut pair = Pair::with(Setup::default(), other);
    let write = pair.write_to_b(0);
    pair.a.send(write, 0, 3000);
    pair.run();
    assert_eq!(pair.a.done(), [(1, WcStatus::RemInvReqErr)]);
    // And where the requester's is the smaller one.
    let mut pair = Pair::with(other, Setup::default());
    let write = pair.write_to_b(0);
    pair.a.send(write, 0, 3000);
    pair.run();
    assert_eq!(pair.a.done(), [(1, WcStatus::RemInvReqErr)]);
}

#[test]
fn foreign_partition_and_address_are_dropped() {
    let limited = Setup { pkey: Pkey(0x7fff), ..Setup::default() };
    let mut pair = Pair::with(limited, limited);
    pair.a.qp.modify(pair.now, &QpModify::ToErr).expect("ERR");
    let bth = Bth::new(Opcode::RcSendOnly, B_QPN, Psn::new(100));
    pair.inject(Side::A, Bth { pkey: Pkey(0x7fff), ..bth }, Ext::NONE, b"");
    pair.inject(Side::A, Bth { pkey: Pkey(0x8001), ..bth }, Ext::NONE, b"");
    assert_eq!(
        pair.b.drops,
        [DropReason::WrongPkey, DropReason::WrongPkey],
        "both limited; another partition"
    );
    pair.inject(Side::A, Bth { pkey: Pkey(0xffff), ..bth }, Ext::NONE, b"");
    assert_eq!(pair.b.drops.last(), Some(&DropReason::NotReady), "a full member of the same one passes");
    pair.inject(Side::B, bth, Ext::NONE, b"");
    assert_eq!(pair.a.drops, [DropReason::WrongState]);
}

#[test]
fn attributes_out_of_range_name_themselves() {
    use ferroce_transport::ModifyError;
    use ferroce_verbs::{RtrAttrs, RtsAttrs};
    let setup = Setup::default();
    let rtr = setup.rtr(1, 2, B_QPN, 0);
    let rts = setup.rts(0);
    let mut av6 = rtr.av;
    av6.dgid = ferroce_wire::Gid([0xfe; 16]);
    let now = Instant(0);
    let mut host = Host::new(A_QPN, &setup);
    host.qp.modify(now, &QpModify::ToInit(setup.init())).expect("INIT");
    let bad_rtr = [
        (RtrAttrs { av: av6, ..rtr }, "ah_attr.grh.dgid"),
        (RtrAttrs { min_rnr_timer: 32, ..rtr }, "min_rnr_timer"),
        (RtrAttrs { dest_qpn: ferroce_wire::Qpn::MULTICAST, ..rtr }, "dest_qp_num"),
    ];
    for (attrs, name) in bad_rtr {
        assert_eq!(host.qp.modify(now, &QpModify::ToRtr(attrs)), Err(ModifyError::BadAttr(name)));
        assert_eq!(host.qp.state(), QpState::Init, "nothing changed");
    }
    let many = RtrAttrs { max_dest_rd_atomic: 129, ..rtr };
    let refused = Err(ModifyError::TooManyRdAtomic { allowed: 128 });
    assert_eq!(host.qp.modify(now, &QpModify::ToRtr(many)), refused);
    host.qp.modify(now, &QpModify::ToRtr(rtr)).expect("RTR");
    let bad_rts = [
        (RtsAttrs { timeout: 32, ..rts }, "timeout"),
        (RtsAttrs { retry_cnt: 8, ..rts }, "retry_cnt"),
        (RtsAttrs { rnr_retry: 8, ..rts }, "rnr_retry"),
    ];
    for (attrs, name) in bad_rts {
        assert_eq!(host.qp.modify(now, &QpModify::ToRts(attrs)), Err(ModifyError::BadAttr(name)));
    }
    assert_eq!(host.qp.modify(now, &QpModify::ToSqd), Err(ModifyError::BadTransition { from: QpState::Rtr }));
}

#[test]
fn moves_are_invisible() {
    moving(|| {
        any_single_loss_is_repaired();
        any_burst_loss_is_repaired();
        every_frame_twice_changes_nothing();
        any_single_late_frame_is_repaired();
        random_faults_are_repaired();
        wire_1_read_repeated_inside_a_write();
        wire_1_acks_of_duplicates_never_stand_for_read_data();
        qpcq_3_a_peer_that_dies();
        qpcq_3_a_local_key_fault_and_a_refusal_by_the_peer();
        a_local_key_fault();
        refusals_are_told_on_both_sides();
        a_key_that_may_not_be_ended_fails_both_sides();
        a_lost_nak_ends_in_exhausted_retries();
        receives_posted_late_cost_one_rnr_wait();
        rnr_retries_run_out();
        a_peer_with_another_path_mtu_is_refused();
        foreign_partition_and_address_are_dropped();
        attributes_out_of_range_name_themselves();
    });
}

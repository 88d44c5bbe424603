//! Arbitrary packets into queue pairs in every state: no panic, nothing written outside what was granted, output
//! bounded, every posted request completed at most once and, in ERR, exactly once.

mod support;

use std::collections::HashMap;

use ferroce_mem::{Access, PdId};
use ferroce_transport::{Completion, Instant, Transmit};
use ferroce_verbs::{QpModify, QpState, SendFlags, SendOp, WcStatus};
use ferroce_wire::icrc::check_frame;
use ferroce_wire::{
    Aeth, AtomicEth, Bth, DmaLen, Ext, Imm, Msn, Opcode, PathMtu, Psn, RemoteAddr, Reth, Rkey, Syndrome,
};
use proptest::prelude::*;
use support::*;

/// What the peer, the application and the clock do.
#[derive(Clone, Debug)]
enum Step {
    /// A packet near the expected PSN or near what is outstanding.
    Packet {
        opcode: Opcode,
        psn: PsnChoice,
        len: u16,
        dma: u32,
        va: u32,
        key: u8,
        syndrome: u8,
        ack_req: bool,
    },
    Send {
        kind: u8,
        len: u16,
    },
    Recv {
        len: u16,
    },
    Tick {
        us: u32,
    },
    Room {
        frames: u8,
    },
    Deregister,
    Err,
}

#[derive(Clone, Copy, Debug)]
enum PsnChoice {
    Expected(i8),
    Outstanding(i8),
    Any(u32),
}

fn psn() -> impl Strategy<Value = PsnChoice> {
    prop_oneof![
        6 => (-3i8..4).prop_map(PsnChoice::Expected),
        4 => (-3i8..8).prop_map(PsnChoice::Outstanding),
        1 => any::<u32>().prop_map(PsnChoice::Any),
    ]
}

fn lens() -> impl Strategy<Value = u16> {
    prop_oneof![Just(256u16), 0u16..600, Just(0), Just(4096)]
}

fn step() -> impl Strategy<Value = Step> {
    let rc: Vec<Opcode> = Opcode::ALL.iter().copied().filter(|op| op.to_u8() < 0x20).collect();
    let opcode = prop_oneof![12 => prop::sample::select(rc), 1 => prop::sample::select(Opcode::ALL)];
    let dma = prop_oneof![4 => 0u32..1200, 1 => any::<u32>()];
    let va = prop_oneof![6 => 0u32..3000, 1 => any::<u32>()];
    let packet = (opcode, psn(), lens(), dma, va, 0u8..6, any::<u8>(), any::<bool>()).prop_map(
        |(opcode, psn, len, dma, va, key, syndrome, ack_req)| {
            // Most syndromes should be ACKs, or little would ever be outstanding.
            let syndrome = if syndrome > 0x70 { 0x1f } else { syndrome };
            Step::Packet { opcode, psn, len, dma, va, key, syndrome, ack_req }
        },
    );
    prop_oneof![
        30 => packet,
        6 => (0u8..6, 0u16..1500).prop_map(|(kind, len)| Step::Send { kind, len }),
        5 => (0u16..1500).prop_map(|len| Step::Recv { len }),
        4 => (0u32..200_000).prop_map(|us| Step::Tick { us }),
        3 => (0u8..4).prop_map(|frames| Step::Room { frames }),
        1 => Just(Step::Deregister),
        1 => Just(Step::Err),
    ]
}

/// One queue pair whose peer may write bytes 4096 .. 8192 only; receives lie at 16384 .. 20480.
struct Victim {
    host: Host,
    now: Instant,
    posted: HashMap<u64, bool>,
    finished: HashMap<u64, u32>,
    keys: [Rkey; 6],
    granted: ferroce_mem::MrInfo,
    deregistered: bool,
}

const BYTES: usize = 1 << 16;
const GRANTED: std::ops::Range<usize> = 4096..8192;
const RECEIVES: std::ops::Range<usize> = 16_384..20_480;
const READS: std::ops::Range<usize> = 32_768..36_864;
const SENDS: std::ops::Range<usize> = 49_152..53_248;

impl Victim {
    fn new(state: QpState) -> Victim {
        let setup = Setup { mtu: PathMtu::Mtu256, sq_psn: 0xff_fffd, rq_psn: 0xff_fffe, ..Setup::default() };
        let mut host = Host::with_bytes(A_QPN, &setup, BYTES);
        let now = Instant(1_000);
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        // The region that covers everything is for local use only: its remote key is not given to the peer.
        let mut reg =
            |pd, access| host.buf.register(&mut host.memory, pd, access, GRANTED.start, GRANTED.len());
        let granted = reg(PD, all);
        let other_pd = reg(PdId(9), all);
        let no_write = reg(PD, Access::REMOTE_READ);
        let keys = [granted.rkey, granted.rkey, granted.rkey, other_pd.rkey, no_write.rkey, BAD_RKEY];
        let path: &[QpModify] = &[
            QpModify::ToInit(setup.init()),
            QpModify::ToRtr(setup.rtr(1, 2, B_QPN, setup.rq_psn)),
            QpModify::ToRts(setup.rts(setup.sq_psn)),
            QpModify::ToSqd,
        ];
        let steps = match state {
            QpState::Reset => 0,
            QpState::Init => 1,
            QpState::Rtr => 2,
            QpState::Rts | QpState::Err | QpState::Sqe => 3,
            QpState::Sqd => 4,
        };
        for modify in &path[..steps] {
            host.qp.modify(now, modify).expect("walks the states");
        }
        if state == QpState::Err {
            host.qp.modify(now, &QpModify::ToErr).expect("ERR");
        }
        let (posted, finished) = (HashMap::new(), HashMap::new());
        Victim { host, now, posted, finished, keys, granted, deregistered: false }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Packet { .. } => self.packet(step),
            Step::Send { kind, len } => self.send(*kind, *len),
            Step::Recv { len } => {
                let sge = self.host.sge(RECEIVES.start, usize::from(*len));
                if let Ok(id) = self.host.try_recv(&[sge]) {
                    self.posted.insert(id, true);
                }
            }
            Step::Tick { us } => {
                self.now = self.now.after(u64::from(*us) * 1000);
                self.host.qp.handle_timeout(self.now);
            }
            Step::Room { frames } => self.host.room = usize::from(*frames),
            Step::Deregister if !self.deregistered => {
                self.deregistered = true;
                self.host.memory.deregister(self.granted.lkey).expect("known");
            }
            Step::Deregister => {}
            Step::Err => {
                let _ = self.host.qp.modify(self.now, &QpModify::ToErr);
            }
        }
        self.drain();
        if !matches!(step, Step::Room { .. }) {
            self.host.room = usize::MAX;
        }
    }

    fn send(&mut self, kind: u8, len: u16) {
        let remote_addr = RemoteAddr(IOVA);
        let rkey = Rkey(1);
        let (op, area) = match kind {
            0 | 1 => (SendOp::Send, SENDS),
            2 => (SendOp::Write { remote_addr, rkey }, SENDS),
            3 => (SendOp::WriteImm { remote_addr, rkey, imm: Imm([1; 4]) }, SENDS),
            _ => (SendOp::Read { remote_addr, rkey }, READS),
        };
        let sge = self.host.sge(area.start, usize::from(len));
        let flags = if kind == 1 { SendFlags::empty() } else { SendFlags::SIGNALED };
        if let Ok(id) = self.host.post(op, &[sge], flags) {
            self.posted.insert(id, flags.contains(SendFlags::SIGNALED));
        }
    }

    fn packet(&mut self, step: &Step) {
        let Step::Packet { opcode, psn, len, dma, va, key, syndrome, ack_req } = *step else { return };
        let info = self.host.qp.info();
        let near = |base: Psn, by: i8| Psn::new(base.get().wrapping_add_signed(i32::from(by)));
        let psn = match psn {
            PsnChoice::Expected(by) => near(info.rq_psn, by),
            PsnChoice::Outstanding(by) => near(info.una_psn, by),
            PsnChoice::Any(n) => Psn::new(n),
        };
        let table = opcode.info();
        let mut bth = Bth::new(opcode, A_QPN, psn);
        bth.ack_req = ack_req;
        let addr = RemoteAddr(IOVA + GRANTED.start as u64 + u64::from(va));
        let rkey = self.keys[usize::from(key)];
        let aeth = Aeth { syndrome: Syndrome::from_u8(syndrome), msn: Msn::new(7) };
        let ext = Ext {
            deth: table.deth.then_some(ferroce_wire::Deth {
                qkey: Default::default(),
                resv: 0,
                src_qpn: B_QPN,
            }),
            reth: table.reth.then_some(Reth { addr, rkey, len: DmaLen(dma) }),
            atomic: table.atomic.then_some(AtomicEth { addr, rkey, swap_or_add: 1, compare: 2 }),
            imm: table.imm.then_some(Imm([9; 4])),
            invalidate: table.inv.then_some(rkey),
            aeth: table.aeth.then_some(aeth),
            atomic_ack: table.atomic_ack.then_some(5),
            cnp: opcode == Opcode::Cnp,
        };
        let len = match table.payload {
            ferroce_wire::opcode::PayloadRule::None => 0,
            _ => usize::from(len),
        };
        let frame = seal(&headers(&av(2, 1), bth, ext), &vec![0xcc; len]);
        // The parser may refuse it, as it would for a real peer.
        if let Ok(packet) = check_frame(&frame) {
            self.host.take_quietly(self.now, &packet, &frame);
        }
    }

    fn drain(&mut self) {
        self.completions();
        // Output per step is bounded: the window, and the READs that the peer may have outstanding.
        let reads = 4 * (GRANTED.len() / 256 + 1);
        let bound = 256 + reads + 8;
        let mut sent = 0;
        loop {
            let (answer, frame) = self.host.transmit(self.now);
            if let Some(frame) = frame {
                check_frame(&frame).expect("well-formed");
                sent += 1;
                assert!(sent <= bound, "endless output");
                continue;
            }
            if let Transmit::Later(at) = answer {
                assert!(at > self.now, "a wait lies ahead");
            }
            break;
        }
        self.completions();
        while self.host.qp.poll_notice().is_some() {}
    }

    fn completions(&mut self) {
        while let Some(completion) = self.host.qp.poll_completion() {
            let Completion::Wc(wc) = completion else { continue };
            assert!(self.posted.contains_key(&wc.wr_id), "completes what was posted");
            let times = self.finished.entry(wc.wr_id).or_insert(0);
            *times += 1;
            assert_eq!(*times, 1, "once");
            assert!(wc.status != WcStatus::WrFlushErr || self.host.qp.state() == QpState::Err);
        }
    }

    fn finish(mut self) {
        // Memory: outside of what was granted, received into or read into, nothing changed.
        let bytes = self.host.buf.read(0, BYTES);
        for (offset, byte) in bytes.iter().enumerate() {
            let allowed = [GRANTED, RECEIVES, READS].iter().any(|range| range.contains(&offset));
            assert!(allowed || *byte == 0, "byte {offset:#x} was written");
        }
        // To ERR everything completes, exactly once.
        if self.host.qp.modify(self.now, &QpModify::ToErr).is_ok() {
            self.drain();
            for (id, signalled) in &self.posted {
                assert!(!signalled || self.finished.get(id) == Some(&1), "{id} never completed");
            }
            assert_eq!((self.host.qp.send_queue_free(), self.host.qp.recv_queue_free()), (64, 64));
            assert!(self.host.qp.poll_timeout().is_none());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_packets_do_no_harm(
        state in prop::sample::select(&QpState::ALL[..]),
        steps in prop::collection::vec(step(), 1..80),
    ) {
        // RC has no SQE: such a case starts in RTS, which is where most of the interesting state is.
        let mut victim = Victim::new(state);
        for step in &steps {
            victim.step(step);
        }
        victim.finish();
    }
}

/// The property above is worth something only if its packets get far: count what a fixed set of them reaches.
#[test]
fn arbitrary_packets_reach_the_depths() {
    use ferroce_transport::DropReason;
    use proptest::strategy::ValueTree;
    use proptest::test_runner::{Config, TestRunner};
    let mut runner = TestRunner::new_with_rng(
        Config::default(),
        proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha),
    );
    let mut drops: HashMap<DropReason, u32> = HashMap::new();
    let (mut successes, mut errors, mut receives) = (0, 0, 0);
    for _ in 0..300 {
        let steps = prop::collection::vec(step(), 80).new_tree(&mut runner).expect("a value").current();
        let mut victim = Victim::new(QpState::Rts);
        for step in &steps {
            victim.step(step);
            for reason in victim.host.drops.drain(..) {
                *drops.entry(reason).or_insert(0) += 1;
            }
            let info = victim.host.qp.info();
            successes += u32::from(info.una_psn != Psn::new(0xff_fffd));
            receives += u32::from(info.rq_psn != Psn::new(0xff_fffe));
            errors += u32::from(info.state == QpState::Err);
        }
    }
    let reasons = [
        DropReason::WrongService,
        DropReason::WrongState,
        DropReason::UnexpectedResponse,
        DropReason::OutOfSequence,
        DropReason::StaleDuplicate,
        DropReason::Duplicate,
        DropReason::Refused,
        DropReason::NotReady,
    ];
    for reason in reasons {
        assert!(drops.get(&reason).is_some_and(|n| *n > 10), "{reason:?} is hardly reached: {drops:?}");
    }
    assert!(successes > 300 && receives > 300 && errors > 300, "{successes} {receives} {errors}");
}

//! Arbitrary packets into queue pairs in every state: no panic, nothing written outside what was granted, output
//! bounded, every posted request completed at most once and, in ERR, exactly once.

mod support;

use std::collections::HashMap;

use ferroce_mem::{Access, PdId};
use ferroce_transport::{Completion, ImportError, Instant, Qp, Transmit};
use ferroce_verbs::{QpChange, QpModify, QpState, QpType, SendFlags, SendOp, WcStatus};
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
    /// A change of state or attributes, allowed or not.
    Modify(QpModify),
    /// The queue pair moves.
    Move,
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
    let opcode = prop::sample::select(Opcode::ALL);
    let dma = prop_oneof![4 => 0u32..1200, 1 => any::<u32>()];
    let va = prop_oneof![6 => 0u32..3000, 1 => any::<u32>()];
    let packet = (opcode, psn(), lens(), dma, va, 0u8..8, any::<u8>(), any::<bool>()).prop_map(
        |(opcode, psn, len, dma, va, key, syndrome, ack_req)| {
            // Most syndromes should be ACKs, or little would ever be outstanding.
            let syndrome = if syndrome > 0x70 { 0x1f } else { syndrome };
            Step::Packet { opcode, psn, len, dma, va, key, syndrome, ack_req }
        },
    );
    prop_oneof![
        30 => packet,
        8 => (0u8..14, 0u16..1500).prop_map(|(kind, len)| Step::Send { kind, len }),
        5 => (0u16..1500).prop_map(|len| Step::Recv { len }),
        4 => (0u32..200_000).prop_map(|us| Step::Tick { us }),
        3 => (0u8..4).prop_map(|frames| Step::Room { frames }),
        1 => Just(Step::Deregister),
        1 => Just(Step::Modify(QpModify::ToErr)),
        2 => modify().prop_map(Step::Modify),
        4 => Just(Step::Move),
    ]
}

fn modify() -> impl Strategy<Value = QpModify> {
    let change = (any::<bool>(), 0u8..6, 0u8..33, 0u8..9).prop_map(|(deny, rd, timer, count)| {
        QpModify::Change(QpChange {
            access: deny.then_some(Access::REMOTE_READ),
            max_dest_rd_atomic: Some(rd),
            max_rd_atomic: Some(rd),
            timeout: Some(timer),
            retry_cnt: Some(count),
            rnr_retry: Some(count),
            min_rnr_timer: Some(timer),
            ..QpChange::default()
        })
    });
    prop_oneof![
        3 => Just(QpModify::ToSqd),
        4 => Just(QpModify::SqdToRts),
        4 => Just(QpModify::SqeToRts),
        3 => change,
    ]
}

/// What kind of queue pair.
#[derive(Clone, Copy, Debug)]
struct Kind {
    qp_type: QpType,
    shared: bool,
}

const RC: Kind = Kind { qp_type: QpType::Rc, shared: false };

fn kind() -> impl Strategy<Value = Kind> {
    let qp_type = prop_oneof![4 => Just(QpType::Rc), 2 => Just(QpType::Uc), 1 => Just(QpType::Ud)];
    (qp_type, prop::bool::weighted(0.3)).prop_map(|(qp_type, shared)| Kind { qp_type, shared })
}

/// One queue pair whose peer may write bytes 4096 .. 8192 only; receives lie at 16384 .. 20480.
struct Victim {
    host: Host,
    now: Instant,
    posted: HashMap<u64, bool>,
    finished: HashMap<u64, u32>,
    keys: [Rkey; 8],
    windows: [Rkey; 2],
    kind: Kind,
    granted: ferroce_mem::MrInfo,
    deregistered: bool,
}

const BYTES: usize = 1 << 16;
const GRANTED: std::ops::Range<usize> = 4096..8192;
const RECEIVES: std::ops::Range<usize> = 16_384..20_480;
const READS: std::ops::Range<usize> = 32_768..36_864;
const SENDS: std::ops::Range<usize> = 49_152..53_248;

impl Victim {
    fn new(kind: Kind, state: QpState) -> Victim {
        let setup = Setup {
            mtu: PathMtu::Mtu256,
            sq_psn: 0xff_fffd,
            rq_psn: 0xff_fffe,
            qp_type: kind.qp_type,
            srq: kind.shared.then_some(64),
            ..Setup::default()
        };
        let mut host = Host::with_bytes(A_QPN, &setup, BYTES);
        let now = Instant(1_000);
        let all = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC
            | Access::MW_BIND;
        // The region that covers everything is for local use only: its remote key is not given to the peer.
        let mut reg =
            |pd, access| host.buf.register(&mut host.memory, pd, access, GRANTED.start, GRANTED.len());
        let granted = reg(PD, all);
        let other_pd = reg(PdId(9), all);
        let no_write = reg(PD, Access::REMOTE_READ);
        let windows = [(); 2].map(|()| Rkey(host.memory.alloc_window(PD).expect("a window").rkey.0 + 1));
        let keys = [
            granted.rkey,
            granted.rkey,
            granted.rkey,
            other_pd.rkey,
            no_write.rkey,
            BAD_RKEY,
            windows[0],
            windows[1],
        ];
        host.dest = Some(dest(1, 2, B_QPN));
        if let Some(srq) = &mut host.srq {
            srq.set_limit(3);
        }
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
        Victim { host, now, posted, finished, keys, windows, kind, granted, deregistered: false }
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
                // By force: windows may be bound.
                self.host.memory.revoke(self.granted.lkey).expect("known");
            }
            Step::Deregister => {}
            Step::Move => self.host.relocate(),
            Step::Modify(modify) => {
                let _ = self.host.qp.modify(self.now, modify);
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
            4 | 5 => (SendOp::Read { remote_addr, rkey }, READS),
            6 => (SendOp::FetchAdd { remote_addr, rkey, add: 1 }, READS),
            7 => (SendOp::CmpSwap { remote_addr, rkey, compare: 1, swap: 2 }, READS),
            8 => (SendOp::SendInv { rkey }, SENDS),
            9 | 10 => {
                let bind = SendOp::BindMw {
                    rkey: self.windows[usize::from(kind & 1)],
                    mr: self.granted.lkey,
                    addr: IOVA + GRANTED.start as u64,
                    len: GRANTED.len() as u64,
                    access: Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
                };
                (bind, SENDS)
            }
            11 => (SendOp::LocalInv { rkey: self.windows[usize::from(len & 1)] }, SENDS),
            // From memory whose key may go.
            _ => (SendOp::Send, GRANTED),
        };
        let len = match kind {
            6 | 7 => 8,
            9..=11 => 0,
            _ => len,
        };
        let mut sge = self.host.sge(area.start, usize::from(len));
        if area == GRANTED {
            sge.lkey = self.granted.lkey;
        }
        let sges = if len == 0 { &[][..] } else { &[sge] };
        let flags = if kind == 1 { SendFlags::empty() } else { SendFlags::SIGNALED };
        if let Ok(id) = self.host.post(op, sges, flags) {
            self.posted.insert(id, flags.contains(SendFlags::SIGNALED));
        }
    }

    fn packet(&mut self, step: &Step) {
        let Step::Packet { opcode, psn, len, dma, va, key, syndrome, ack_req } = *step else { return };
        // Most packets are of the queue pair's service.
        let opcode = match (self.kind.qp_type, opcode.to_u8()) {
            (QpType::Uc, byte @ 0..=0x0b) if len & 7 != 0 => Opcode::from_u8(byte | 0x20),
            (QpType::Rc, byte @ 0x20..=0x2b) if len & 7 != 0 => Opcode::from_u8(byte & 0x1f),
            (QpType::Ud, byte) if len & 7 != 0 => Opcode::from_u8(0x64 | byte & 1),
            _ => Some(opcode),
        }
        .expect("an opcode");
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
                qkey: if dma & 15 == 0 { Default::default() } else { QKEY },
                resv: 0,
                src_qpn: B_QPN,
            }),
            reth: table.reth.then_some(Reth { addr, rkey, len: DmaLen(dma) }),
            atomic: table.atomic.then_some(AtomicEth {
                addr: if dma & 7 == 0 { addr } else { RemoteAddr(addr.0 & !7) },
                rkey,
                swap_or_add: 1,
                compare: 2,
            }),
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
        let bound = 256 + reads + 64 * 6 + 8;
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
            let flushing = match self.kind.qp_type {
                QpType::Rc => self.host.qp.state() == QpState::Err,
                // What SQE leaves is flushed.
                QpType::Uc | QpType::Ud => !wc.is_recv || self.host.qp.state() == QpState::Err,
            };
            assert!(wc.status != WcStatus::WrFlushErr || flushing);
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
            let missing = self
                .posted
                .iter()
                .filter(|(id, signalled)| **signalled && !self.finished.contains_key(id))
                .count();
            // What is still in a shared queue is nobody's.
            let shared = self.host.srq.as_ref().map_or(0, |srq| srq.info().posted);
            assert_eq!(missing, shared as usize, "some never completed");
            let depth = if self.kind.shared { 8 } else { 64 };
            assert_eq!((self.host.qp.send_queue_free(), self.host.qp.recv_queue_free()), (64, depth));
            assert!(self.host.qp.poll_timeout().is_none());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_packets_do_no_harm(
        kind in kind(),
        state in prop::sample::select(&QpState::ALL[..]),
        steps in prop::collection::vec(step(), 1..80),
    ) {
        // SQE is reached by failing only: such a case starts in RTS, which is where most of the interesting state is.
        let mut victim = Victim::new(kind, state);
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
        let mut victim = Victim::new(RC, QpState::Rts);
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

/// How the bytes of an image are spoiled: (place, xor) and a length to cut or fill to.
#[derive(Clone, Debug)]
struct Spoil {
    flips: Vec<(prop::sample::Index, u8)>,
    /// Whole words become numbers at the edges of ranges.
    words: Vec<(prop::sample::Index, u32)>,
    len: Option<u16>,
}

fn spoil() -> impl Strategy<Value = Spoil> {
    let edges = prop::sample::select(vec![
        0,
        1,
        2,
        7,
        8,
        63,
        64,
        65,
        0x7f_ffff,
        0xff_fffd,
        0x100_0000,
        1 << 31,
        u32::MAX,
    ]);
    let flips = prop::collection::vec((any::<prop::sample::Index>(), 1u8..), 0..4);
    let words = prop::collection::vec((any::<prop::sample::Index>(), edges), 0..3);
    (flips, words, prop::option::weighted(0.1, any::<u16>())).prop_map(|(flips, words, len)| Spoil {
        flips,
        words,
        len,
    })
}

impl Spoil {
    fn apply(&self, image: &mut Vec<u8>) {
        for (at, by) in &self.flips {
            let at = at.index(image.len());
            image[at] ^= by;
        }
        for (at, word) in &self.words {
            let at = at.index(image.len() - 3);
            image[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        if let Some(len) = self.len {
            image.resize(usize::from(len) % (2 * image.len()), 0x5a);
        }
    }
}

/// Lets an imported queue pair do what it will, bounded; nothing may panic, and memory that is not granted stays as it
/// is. What it completes is its own matter.
fn drive(victim: &mut Victim, steps: &[Step]) {
    let Victim { host, now, .. } = victim;
    host.qp.hold_posted(&host.memory);
    // Times of the image may lie anywhere.
    for _ in 0..20 {
        let Some(at) = host.qp.poll_timeout() else { break };
        *now = (*now).max(at);
        host.qp.handle_timeout(*now);
        for _ in 0..50 {
            if host.transmit(*now).1.is_none() {
                break;
            }
        }
    }
    for step in steps {
        match step {
            Step::Packet { .. } => victim.packet(step),
            Step::Send { kind, len } => victim.send(*kind, *len),
            Step::Modify(modify) => {
                let _ = victim.host.qp.modify(victim.now, modify);
            }
            Step::Tick { us } => {
                victim.now = victim.now.after(u64::from(*us) * 1000);
                victim.host.qp.handle_timeout(victim.now);
            }
            Step::Move => victim.host.relocate(),
            Step::Recv { .. } | Step::Room { .. } | Step::Deregister => {}
        }
        for _ in 0..200 {
            let (answer, frame) = victim.host.transmit(victim.now);
            if frame.is_none() || answer != Transmit::Sent {
                break;
            }
        }
        for _ in 0..200 {
            if victim.host.qp.poll_completion().is_none() {
                break;
            }
        }
        while victim.host.qp.poll_notice().is_some() {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Images of queue pairs in the middle of their work, spoiled: refused, or a queue pair that does no harm.
    #[test]
    fn spoiled_images_do_no_harm(
        kind in kind(),
        before in prop::collection::vec(step(), 0..30),
        spoil in spoil(),
        after in prop::collection::vec(step(), 0..20),
    ) {
        let mut victim = Victim::new(kind, QpState::Rts);
        for step in &before {
            victim.step(step);
        }
        let mut image = Vec::new();
        victim.host.qp.export(&mut image);
        spoil.apply(&mut image);
        if let Ok(qp) = Qp::import(&image) {
            let mut again = Vec::new();
            qp.export(&mut again);
            prop_assert_eq!(&image, &again, "what is accepted is an image of itself");
            victim.host.qp.release_all(&victim.host.memory);
            victim.host.qp = qp;
            victim.kind.qp_type = victim.host.qp.info().qp_type;
            drive(&mut victim, &after);
        }
    }

    /// Any bytes.
    #[test]
    fn arbitrary_bytes_are_no_image(mut bytes in prop::collection::vec(any::<u8>(), 0..600), honest in any::<bool>()) {
        if honest {
            bytes.splice(0..0, *b"fQP\x01");
        }
        prop_assert!(Qp::import(&bytes).is_err());
    }
}

#[test]
fn images_are_refused_by_name() {
    let victim = Victim::new(RC, QpState::Rts);
    let mut image = Vec::new();
    victim.host.qp.export(&mut image);
    assert!(Qp::import(&image).is_ok());
    let with = |at: usize, byte: u8| {
        let mut spoiled = image.clone();
        spoiled[at] = byte;
        Qp::import(&spoiled).err()
    };
    assert_eq!(with(0, 0), Some(ImportError::NoImage));
    assert_eq!(with(3, 9), Some(ImportError::Version { found: 9, known: 1 }));
    assert_eq!(Qp::import(&[image.as_slice(), &[0]].concat()).err(), Some(ImportError::Trailing));
    for len in 0..image.len() {
        let cut = Qp::import(&image[..len]).err();
        assert!(matches!(cut, Some(ImportError::NoImage | ImportError::Truncated)), "{len}: {cut:?}");
    }
    // Behind magic, version and number: the type, then the protection domain and the completion queues, then the sizes.
    assert_eq!(with(8, 1), Some(ImportError::Invalid("qp_type")));
    assert_eq!(with(8 + 1 + 12 + 8 + 3, 0x7f), Some(ImportError::TooLarge("cap.max_sge")));
    assert_eq!(with(8 + 1 + 12 + 16 + 3, 0x7f), Some(ImportError::TooLarge("cap.max_inline_data")));
}

/// A queue pair in INIT without a shared receive queue has nothing to tell, whatever its image says.
#[test]
fn an_image_with_news_that_can_not_be_is_refused() {
    let setup = Setup::default();
    let mut qp = Qp::new(A_QPN, &setup.attr());
    qp.modify(Instant(0), &QpModify::ToInit(setup.init())).expect("INIT");
    let mut image = Vec::new();
    qp.export(&mut image);
    // Behind number, attributes, state, two empty queues and twelve counters; the machine follows.
    let notices = 8 + 35 + 1 + 11 + 2 + 24 + 96;
    assert_eq!(image[notices..notices + 5], [0; 5]);
    for at in [0, 1, 2, 4] {
        let mut spoiled = image.clone();
        spoiled[notices + at] = 1;
        assert_eq!(Qp::import(&spoiled).err(), Some(ImportError::Invalid("a notice")), "{at}");
    }
}

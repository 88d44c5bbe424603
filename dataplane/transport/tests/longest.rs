//! The longest messages, 2^31 bytes, and what is longer.
#![allow(unsafe_code)]

mod support;

use std::ptr::NonNull;

use ferroce_mem::{Access, MrInfo, MrInit, MrSlice, Payload};
use ferroce_transport::{FrameSink, Transmit};
use ferroce_verbs::{PostError, QpState, SendFlags, SendOp, Sge, WcOpcode, WcStatus};
use ferroce_wire::emit::pad_of;
use ferroce_wire::icrc::check_frame;
use ferroce_wire::{Bth, DmaLen, Ext, Opcode, PathMtu, Psn, Qpn, RemoteAddr, Reth, Syndrome};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use support::*;

const OK: WcStatus = WcStatus::Success;

/// Packets of a message of 2^31 bytes at a path MTU of 4096.
const PACKETS: u32 = 1 << 19;

/// A scatter list of 2^31 bytes over one MiB.
fn two_gib(host: &Host) -> Vec<Sge> {
    vec![host.sge(0, BUF); 2048]
}

fn long_setup() -> Setup {
    let mut setup = Setup { mtu: PathMtu::Mtu4096, ..Setup::default() };
    (setup.cap.max_send_sge, setup.cap.max_recv_sge) = (2049, 2048);
    setup
}

/// Takes packets and forgets them.
#[derive(Default)]
struct Count {
    bytes: u64,
    last: Option<(Bth, Ext)>,
}

impl FrameSink for Count {
    fn begin(&mut self, bth: &Bth, ext: &Ext, len: usize) -> bool {
        self.bytes += len as u64;
        self.last = Some((*bth, *ext));
        true
    }
    fn payload(&mut self, _: MrSlice<'_>) {}
    fn inline(&mut self, _: &[u8]) {}
}

#[test]
fn the_longest_message_is_sent() {
    let mut pair = Pair::new(long_setup());
    let list = two_gib(&pair.a);
    let longer = [list.clone(), vec![pair.a.sge(0, 1)]].concat();
    let refused = pair.a.post(SendOp::Send, &longer, SendFlags::SIGNALED);
    assert_eq!(refused, Err(PostError::TooLong));
    let write = pair.write_to_b(0);
    pair.a.post(write, &list, SendFlags::SIGNALED).expect("2^31 bytes");
    let mut count = Count::default();
    let mut sent = 0;
    while sent < PACKETS {
        match pair.a.qp.poll_transmit(pair.now, &pair.a.memory, &mut count) {
            Transmit::Sent => sent += 1,
            Transmit::Idle => {
                let ext = Ext {
                    aeth: Some(ferroce_wire::Aeth {
                        syndrome: Syndrome::ACK_NO_CREDITS,
                        msn: Default::default(),
                    }),
                    ..Ext::NONE
                };
                let psn = pair.a.qp.info().sq_psn.retreat(1);
                pair.inject(Side::B, Bth::new(Opcode::RcAck, A_QPN, psn), ext, &[]);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(count.bytes, 1 << 31);
    let (bth, _) = count.last.expect("packets");
    assert_eq!(bth.opcode, Opcode::RcWriteLast);
    let last = bth.psn;
    let ext = Ext {
        aeth: Some(ferroce_wire::Aeth { syndrome: Syndrome::ACK_NO_CREDITS, msn: Default::default() }),
        ..Ext::NONE
    };
    pair.inject(Side::B, Bth::new(Opcode::RcAck, A_QPN, last), ext, &[]);
    let done: Vec<_> = pair.a.wcs.iter().map(|wc| (wc.status, wc.byte_len)).collect();
    assert_eq!(done, [(OK, 1 << 31)]);
}

#[test]
fn the_longest_message_is_received() {
    let mut pair = Pair::new(long_setup());
    let list = two_gib(&pair.b);
    pair.b.try_recv(&list).expect("posts");
    // One frame in three kinds; only opcode and PSN change, and the ICRC is not looked at again here.
    let frame = seal(
        &headers(&av(1, 2), Bth::new(Opcode::RcSendFirst, B_QPN, Psn::new(0)), Ext::NONE),
        &pattern(2, 4096),
    );
    let mut packet = check_frame(&frame).expect("well-formed");
    for i in 0..PACKETS {
        packet.headers.bth.opcode = match i {
            0 => Opcode::RcSendFirst,
            i if i + 1 == PACKETS => Opcode::RcSendLast,
            _ => Opcode::RcSendMiddle,
        };
        packet.headers.bth.psn = Psn::new(100 + i);
        pair.b.take_quietly(pair.now, &packet, &frame);
    }
    pair.b.collect();
    assert!(pair.b.drops.is_empty(), "{:?}", pair.b.drops.first());
    let done: Vec<_> = pair.b.wcs.iter().map(|wc| (wc.status, wc.byte_len)).collect();
    assert_eq!(done, [(OK, 1 << 31)]);
    assert!(pair.b.buf.read(BUF - 4096, 4096) == pattern(2, 4096));
    // One byte more is refused by its RETH.
    let len = DmaLen((1 << 31) + 1);
    let reth = Some(Reth { addr: RemoteAddr(IOVA), rkey: pair.b.mr.rkey, len });
    let bth = Bth::new(Opcode::RcWriteFirst, B_QPN, pair.b.qp.info().rq_psn);
    pair.inject(Side::A, bth, Ext { reth, ..Ext::NONE }, &[0; 4096]);
    assert_eq!(pair.b.qp.state(), QpState::Err);
}

/// Bytes of the longest message.
const LONGEST: usize = 1 << 31;
/// Bytes of each piece of a [`Wide`].
const PIECE: usize = 1 << 21;

/// 2^31 bytes of addresses over three pieces of memory: one at each end, and one that stands for all between.
struct Wide(NonNull<u8>);

impl Wide {
    fn new() -> Wide {
        let fd = memfd_create("wide", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&fd, 3 * PIECE as u64).expect("room");
        let (prot, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: a new mapping at an address that the kernel chooses; then pieces of it are mapped over, which nobody
        // uses yet.
        let base = unsafe {
            let base =
                mmap_anonymous(std::ptr::null_mut(), LONGEST, prot, MapFlags::PRIVATE | MapFlags::NORESERVE)
                    .expect("addresses");
            let last = LONGEST / PIECE - 1;
            for at in 0..=last {
                let piece = if at == 0 {
                    0
                } else if at == last {
                    2
                } else {
                    1
                };
                let place = base.cast::<u8>().add(at * PIECE).cast();
                mmap(place, PIECE, prot, shared | MapFlags::FIXED, &fd, (piece * PIECE) as u64)
                    .expect("a piece");
            }
            base
        };
        Wide(NonNull::new(base.cast()).expect("not null"))
    }
    /// Registers all of it, where addresses of its own begin.
    fn register(&self, host: &mut Host) -> MrInfo {
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let init = MrInit { pd: PD, access, iova: WIDE, base: self.0, len: LONGEST as u64 };
        // SAFETY: the mapping outlives the host's table: it is declared before the pair of hosts and dropped after it.
        unsafe { host.memory.register(init) }.expect("registers")
    }
    fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= LONGEST);
        // SAFETY: inside the mapping, which nobody else accesses now.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.as_ptr().add(at), bytes.len()) }
    }
    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= LONGEST);
        let mut out = vec![0; len];
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(self.0.as_ptr().add(at), out.as_mut_ptr(), len) }
        out
    }
}

impl Drop for Wide {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and the tables that name it are not used any more.
        unsafe { munmap(self.0.as_ptr().cast(), LONGEST) }.expect("mapped");
    }
}

/// Where a [`Wide`] begins in its region's addresses.
const WIDE: u64 = 0x40_0000_0000;

/// Carries packets from one queue pair to the other without making frames of them.
struct Carrier {
    head: Option<(Bth, Ext)>,
    payload: Vec<u8>,
}

impl FrameSink for Carrier {
    fn begin(&mut self, bth: &Bth, ext: &Ext, _: usize) -> bool {
        self.head = Some((*bth, *ext));
        self.payload.clear();
        true
    }
    fn payload(&mut self, slice: MrSlice<'_>) {
        let at = self.payload.len();
        self.payload.resize(at + slice.len(), 0);
        assert_eq!(slice.copy_out(&mut self.payload[at..]), slice.len());
    }
    fn inline(&mut self, bytes: &[u8]) {
        self.payload.extend_from_slice(bytes);
    }
}

/// Lets both sides send until they are done; returns how many packets each sent.
fn carry_all(pair: &mut Pair) -> [u32; 2] {
    let any = |us, them, dest: Qpn| {
        let bth = Bth::new(Opcode::RcSendOnly, dest, Psn::new(0));
        check_frame(&seal(&headers(&av(us, them), bth, Ext::NONE), &[])).expect("well-formed")
    };
    let mut packets = [any(1, 2, B_QPN), any(2, 1, A_QPN)];
    let mut carrier = Carrier { head: None, payload: Vec::with_capacity(4096) };
    let (mut sent, now) = ([0; 2], pair.now);
    loop {
        let before = sent;
        for (side, packet) in packets.iter_mut().enumerate() {
            let (from, to) = if side == 0 { (&mut pair.a, &mut pair.b) } else { (&mut pair.b, &mut pair.a) };
            while from.qp.poll_transmit(now, &from.memory, &mut carrier) == Transmit::Sent {
                let (bth, ext) = carrier.head.take().expect("begun");
                (packet.headers.bth, packet.headers.ext) = (bth, ext);
                packet.payload_len = carrier.payload.len() as u16;
                packet.pad = pad_of(carrier.payload.len()) as u8;
                let payload = Payload::from_slice(&carrier.payload);
                assert_eq!(to.qp.handle_packet(now, packet, &payload, &to.memory), Ok(()));
                sent[side] += 1;
            }
        }
        if sent == before {
            return sent;
        }
    }
}

/// A WRITE and a READ of 2^31 bytes, whole: the bytes at both ends, those between, and the length in the completion.
#[test]
fn the_longest_write_and_the_longest_read_arrive() {
    let (near, far) = (Wide::new(), Wide::new());
    let mut pair = Pair::new(long_setup());
    let (at_a, at_b) = (near.register(&mut pair.a), far.register(&mut pair.b));
    let all = Sge { addr: WIDE, length: LONGEST as u32, lkey: at_a.lkey };
    let remote_addr = RemoteAddr(WIDE);
    let ends = [0, PIECE, LONGEST - 2 * PIECE, LONGEST - PIECE];
    let ops = [
        (SendOp::Write { remote_addr, rkey: at_b.rkey }, WcOpcode::RdmaWrite, &near, &far),
        (SendOp::Read { remote_addr, rkey: at_b.rkey }, WcOpcode::RdmaRead, &far, &near),
    ];
    for (round, (op, opcode, from, to)) in ops.into_iter().enumerate() {
        let piece =
            |at: usize| pattern(round * 10 + if at == 0 { 1 } else { 2 + usize::from(at == ends[3]) }, PIECE);
        for at in ends {
            from.write(at, &piece(at));
            to.write(at, &[0x5a; PIECE]);
        }
        // One byte more is refused, and nothing is sent.
        let longer = [all, Sge { length: 1, ..all }];
        assert_eq!(pair.a.post(op, &longer, SendFlags::SIGNALED), Err(PostError::TooLong));
        pair.a.post(op, &[all], SendFlags::SIGNALED).expect("2^31 bytes");
        let [requests, answers] = carry_all(&mut pair);
        match opcode {
            WcOpcode::RdmaRead => assert_eq!((requests, answers), (1, PACKETS)),
            _ => assert_eq!(requests, PACKETS),
        }
        pair.a.collect();
        let done: Vec<_> = pair.a.wcs.drain(..).map(|wc| (wc.status, wc.opcode, wc.byte_len)).collect();
        assert_eq!(done, [(OK, opcode, 1 << 31)]);
        for at in ends {
            assert!(to.read(at, PIECE) == piece(at), "{opcode:?}: the bytes at {at:#x}");
        }
    }
    assert_eq!(pair.a.qp.info().sq_psn, Psn::new(100 + 2 * PACKETS));
    assert_eq!((pair.a.qp.state(), pair.b.qp.state()), (QpState::Rts, QpState::Rts));
}

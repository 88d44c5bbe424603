//! Two real queue pairs over real memory, joined by real frames on a virtual clock.
#![allow(dead_code, unsafe_code)]

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::ptr::NonNull;

use ferroce_mem::{Access, Lkey, Memory, MrInfo, MrInit, MrSlice, Payload, PdId};
use ferroce_transport::{Completion, DropReason, FrameSink, Instant, Notice, Qp, QpCounter, Srq, Transmit};
use ferroce_verbs::{
    AddressVector, Ah, AhId, ClassId, CqId, InitAttrs, PostError, QpCap, QpInitAttr, QpModify, QpState,
    QpType, RecvWr, RtrAttrs, RtsAttrs, SendFlags, SendOp, SendWr, Sge, SrqId, SrqInitAttr, UdDest, Wc,
    WcStatus,
};
use ferroce_wire::icrc::check_frame;
use ferroce_wire::{
    Bth, Eth, Ext, Gid, Headers, Imm, Ip, MacAddr, NakCode, Opcode, Packet, PathMtu, Pkey, Psn, Qkey, Qpn,
    RemoteAddr, Rkey, Service, Syndrome, emit,
};

pub const PD: PdId = PdId(7);
pub const IOVA: u64 = 0x1_0000_0000;
pub const A_QPN: Qpn = Qpn::new(0x11);
pub const B_QPN: Qpn = Qpn::new(0x12);
pub const QKEY: Qkey = Qkey(0x1234_5678);
pub const SRQ: SrqId = SrqId(3);
pub const BUF: usize = 1 << 20;

/// How the two sides are set up. PSNs are those of A: `sq_psn` is what A sends first, `rq_psn` what it expects first.
#[derive(Clone, Copy)]
pub struct Setup {
    pub mtu: PathMtu,
    pub sq_psn: u32,
    pub rq_psn: u32,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub min_rnr_timer: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub cap: QpCap,
    pub sq_sig_all: bool,
    pub access: Access,
    pub pkey: Pkey,
    pub qp_type: QpType,
    pub qkey: Qkey,
    /// Receives come from a shared queue of this many.
    pub srq: Option<u32>,
}

impl Default for Setup {
    fn default() -> Self {
        Setup {
            mtu: PathMtu::Mtu1024,
            sq_psn: 100,
            rq_psn: 200,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            cap: QpCap {
                max_send_wr: 64,
                max_recv_wr: 64,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline_data: 256,
            },
            sq_sig_all: false,
            access: Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC,
            pkey: Pkey::DEFAULT,
            qp_type: QpType::Rc,
            qkey: QKEY,
            srq: None,
        }
    }
}

impl Setup {
    pub fn init(&self) -> InitAttrs {
        InitAttrs { pkey: self.pkey, access: self.access, qkey: self.qkey }
    }
    pub fn rtr(&self, us: u8, them: u8, dest: Qpn, rq_psn: u32) -> RtrAttrs {
        RtrAttrs {
            av: av(us, them),
            class: ClassId(0),
            path_mtu: self.mtu,
            dest_qpn: dest,
            rq_psn: Psn::new(rq_psn),
            max_dest_rd_atomic: self.max_dest_rd_atomic,
            min_rnr_timer: self.min_rnr_timer,
        }
    }
    pub fn rts(&self, sq_psn: u32) -> RtsAttrs {
        RtsAttrs {
            sq_psn: Psn::new(sq_psn),
            timeout: self.timeout,
            retry_cnt: self.retry_cnt,
            rnr_retry: self.rnr_retry,
            max_rd_atomic: self.max_rd_atomic,
        }
    }
    pub fn attr(&self) -> QpInitAttr {
        QpInitAttr {
            qp_type: self.qp_type,
            pd: PD,
            send_cq: CqId(0),
            recv_cq: CqId(0),
            cap: self.cap,
            sq_sig_all: self.sq_sig_all,
            srq: self.srq.map(|_| SRQ),
        }
    }
}

pub fn gid(host: u8) -> Gid {
    Gid::from_ip(IpAddr::V4(Ipv4Addr::new(10, 0, 0, host)))
}

pub fn av(us: u8, them: u8) -> AddressVector {
    AddressVector {
        sgid: gid(us),
        dgid: gid(them),
        smac: MacAddr([2, 0, 0, 0, 0, us]),
        dmac: MacAddr([2, 0, 0, 0, 0, them]),
        vlan: None,
        traffic_class: 0,
        flow_label: 0,
        hop_limit: 64,
        sl: 0,
        udp_src: 0xc000,
    }
}

/// A datagram's way from `us` to `qpn` of `them`.
pub fn dest(us: u8, them: u8, qpn: Qpn) -> UdDest {
    let ah = Ah { id: AhId(0), pd: PD, av: av(us, them) };
    UdDest { ah, remote_qpn: qpn, remote_qkey: QKEY }
}

/// Bytes that nobody moves, written by queue pairs through `Memory` only. Lives as long as its host, whose table is
/// not used after it.
pub struct Buffer {
    base: NonNull<u8>,
    len: usize,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated so in `new`, and nothing refers to it any more: the table goes with its host.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), Buffer::layout(self.len)) };
    }
}

impl Buffer {
    pub fn new(len: usize) -> Buffer {
        assert!(len > 0);
        // SAFETY: the size is not 0.
        let bytes = unsafe { std::alloc::alloc_zeroed(Buffer::layout(len)) };
        Buffer { base: NonNull::new(bytes).expect("memory"), len }
    }
    /// Aligned for atomics, and no more than what the allocator gives without touching the pages.
    fn layout(len: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(len, 16).expect("a layout")
    }
    pub fn read_u64(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(self.read(offset, 8).try_into().expect("8 bytes"))
    }
    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset + len <= self.len);
        // SAFETY: inside the buffer, as just checked.
        unsafe { self.base.as_ptr().add(offset) }
    }
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        // SAFETY: the range is inside, nobody else accesses it now, and no reference into it exists.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(offset, bytes.len()), bytes.len()) }
    }
    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(self.at(offset, len), out.as_mut_ptr(), len) }
        out
    }
    pub fn fill(&self, byte: u8) {
        self.write(0, &vec![byte; self.len]);
    }
    /// Registers a part of it.
    pub fn register(
        &self,
        memory: &mut Memory,
        pd: PdId,
        access: Access,
        offset: usize,
        len: usize,
    ) -> MrInfo {
        let base = NonNull::new(self.at(offset, len)).expect("inside the buffer");
        let init = MrInit { pd, access, iova: IOVA + offset as u64, base, len: len as u64 };
        // SAFETY: the buffer lives as long as the host, which is as long as anybody uses the table.
        unsafe { memory.register(init) }.expect("registers")
    }
}

/// A recognisable byte per offset.
pub fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(31) ^ (i >> 8).wrapping_mul(7) ^ seed.wrapping_mul(101)) as u8).collect()
}

thread_local! {
    static MOVING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Runs scenarios with queue pairs that move, by export and import, after everything that they do.
pub fn moving(scenarios: impl FnOnce()) {
    MOVING.set(true);
    scenarios();
    MOVING.set(false);
}

/// One side.
pub struct Host {
    pub qp: Qp,
    pub srq: Option<Srq>,
    /// Events of the shared receive queue.
    pub limits: usize,
    pub memory: Memory,
    pub buf: Buffer,
    pub mr: MrInfo,
    pub wcs: Vec<Wc>,
    pub retired: usize,
    pub notices: Vec<Notice>,
    pub drops: Vec<DropReason>,
    /// Frames that the sink still takes; endless unless set.
    pub room: usize,
    next_id: u64,
    /// Moves after everything that it does.
    pub moving: bool,
    /// Where datagrams go.
    pub dest: Option<UdDest>,
}

impl Host {
    pub fn new(qpn: Qpn, setup: &Setup) -> Host {
        Host::with_bytes(qpn, setup, BUF)
    }
    /// A host with a buffer of `bytes`.
    pub fn with_bytes(qpn: Qpn, setup: &Setup, bytes: usize) -> Host {
        let mut memory = Memory::new(64, 42);
        let buf = Buffer::new(bytes);
        let access = Access::LOCAL_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_WRITE
            | Access::REMOTE_ATOMIC
            | Access::MW_BIND;
        let mr = buf.register(&mut memory, PD, access, 0, bytes);
        Host {
            qp: Qp::new(qpn, &setup.attr()),
            srq: setup.srq.map(|max_wr| {
                let max_sge = setup.cap.max_recv_sge;
                Srq::new(SRQ, &SrqInitAttr { pd: PD, max_wr, max_sge, limit: 0 })
            }),
            limits: 0,
            memory,
            buf,
            mr,
            wcs: Vec::new(),
            retired: 0,
            notices: Vec::new(),
            drops: Vec::new(),
            room: usize::MAX,
            next_id: 1,
            moving: MOVING.get(),
            dest: None,
        }
    }
    pub fn sge(&self, offset: usize, len: usize) -> Sge {
        Sge { addr: IOVA + offset as u64, length: len as u32, lkey: self.mr.lkey }
    }
    /// Binds a new window to bytes of the buffer and returns its key.
    pub fn bind(&mut self, offset: usize, len: usize, access: Access, flags: SendFlags) -> Rkey {
        let rkey = Rkey(self.memory.alloc_window(PD).expect("a window").rkey.0 + 1);
        let (addr, len) = (IOVA + offset as u64, len as u64);
        self.post(SendOp::BindMw { rkey, mr: self.mr.lkey, addr, len, access }, &[], flags).expect("posts");
        rkey
    }
    pub fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id - 1
    }
    pub fn post(&mut self, op: SendOp, sges: &[Sge], flags: SendFlags) -> Result<u64, PostError> {
        let ud = self.dest.filter(|_| self.qp.service() == Service::Ud);
        let wr = SendWr { wr_id: self.next_id, op, sg_list: sges, inline: &[], flags, ud: ud.as_ref() };
        self.qp.post_send(&wr, &self.memory)?;
        self.settle();
        Ok(self.id())
    }
    pub fn post_inline(&mut self, op: SendOp, bytes: &[u8]) -> Result<u64, PostError> {
        let flags = SendFlags::SIGNALED | SendFlags::INLINE;
        let wr = SendWr { wr_id: self.next_id, op, sg_list: &[], inline: bytes, flags, ud: None };
        self.qp.post_send(&wr, &self.memory)?;
        self.settle();
        Ok(self.id())
    }
    /// Signalled, from `offset` of the buffer.
    pub fn send(&mut self, op: SendOp, offset: usize, len: usize) -> u64 {
        let sge = self.sge(offset, len);
        self.post(op, &[sge], SendFlags::SIGNALED).expect("posts")
    }
    pub fn recv(&mut self, offset: usize, len: usize) -> u64 {
        let sge = self.sge(offset, len);
        self.try_recv(&[sge]).expect("posts")
    }
    pub fn try_recv(&mut self, sges: &[Sge]) -> Result<u64, PostError> {
        let wr = RecvWr { wr_id: self.next_id, sg_list: sges };
        match &mut self.srq {
            Some(srq) => srq.post_recv(&wr, &self.memory)?,
            None => self.qp.post_recv(&wr, &self.memory)?,
        }
        self.settle();
        Ok(self.id())
    }
    /// Completions since the last call, as (wr_id, status).
    pub fn done(&mut self) -> Vec<(u64, WcStatus)> {
        std::mem::take(&mut self.wcs).iter().map(|wc| (wc.wr_id, wc.status)).collect()
    }
    pub fn count(&self, which: QpCounter) -> u64 {
        self.qp.counters().get(which)
    }
    /// Reads completions and notices.
    pub fn collect(&mut self) {
        while let Some(completion) = self.qp.poll_completion() {
            match completion {
                Completion::Wc(wc) => self.wcs.push(wc),
                Completion::Retired => self.retired += 1,
            }
        }
        while let Some(notice) = self.qp.poll_notice() {
            self.notices.push(notice);
        }
        self.settle();
    }
    /// The queue pair is exported, imported and exported again; its successor takes over.
    pub fn relocate(&mut self) {
        let mut image = Vec::new();
        self.qp.export(&mut image);
        let mut moved = Qp::import(&image).unwrap_or_else(|why| panic!("{why}\n{:?}", self.qp.info()));
        let mut again = Vec::new();
        moved.export(&mut again);
        assert!(image == again, "an image of an image is the image");
        self.qp.release_all(&self.memory);
        moved.hold_posted(&self.memory);
        self.qp = moved;
    }
    pub fn settle(&mut self) {
        if self.moving {
            self.relocate();
        }
    }
    pub fn timeout(&mut self, now: Instant) {
        self.qp.handle_timeout(now);
        self.settle();
    }
    /// One frame, if the queue pair has one.
    pub fn transmit(&mut self, now: Instant) -> (Transmit, Option<Vec<u8>>) {
        let sent = self.transmit_here(now);
        self.settle();
        sent
    }
    fn transmit_here(&mut self, now: Instant) -> (Transmit, Option<Vec<u8>>) {
        let Some(av) = self.qp.av().copied() else {
            let mut sink = Frame::new(av(0, 0), 0);
            return (self.qp.poll_transmit(now, &self.memory, &mut sink), None);
        };
        let mut sink = Frame::new(av, self.room);
        let answer = self.qp.poll_transmit(now, &self.memory, &mut sink);
        assert_eq!(answer == Transmit::Sent, sink.begun(), "Sent if and only if a packet was begun");
        if answer != Transmit::Sent {
            return (answer, None);
        }
        self.room = self.room.saturating_sub(1);
        (answer, Some(sink.seal()))
    }
    pub fn receive(&mut self, now: Instant, frame: &[u8]) {
        let packet = check_frame(frame).expect("what a queue pair sends is well-formed");
        self.take(now, &packet, frame);
    }
    pub fn take(&mut self, now: Instant, packet: &Packet, frame: &[u8]) {
        self.take_quietly(now, packet, frame);
        self.collect();
    }
    /// Without reading completions.
    pub fn take_quietly(&mut self, now: Instant, packet: &Packet, frame: &[u8]) {
        let start = usize::from(packet.payload_offset);
        let bytes = &frame[start..start + usize::from(packet.payload_len)];
        let payload = Payload::from_slice(bytes);
        let taken = self.qp.handle_packet_srq(now, packet, &payload, &self.memory, self.srq.as_mut());
        if let Err(reason) = taken {
            self.drops.push(reason);
        }
        self.settle();
        self.limits += self.srq.as_mut().map_or(0, |srq| usize::from(srq.poll_limit()));
    }
}

/// A sink that builds one real frame.
pub struct Frame {
    av: AddressVector,
    room: usize,
    head: Option<(Bth, Ext, usize)>,
    payload: Vec<u8>,
}

impl Frame {
    pub fn new(av: AddressVector, room: usize) -> Frame {
        Frame { av, room, head: None, payload: Vec::new() }
    }
    pub fn begun(&self) -> bool {
        self.head.is_some()
    }
    pub fn seal(self) -> Vec<u8> {
        let (bth, ext, len) = self.head.expect("begun");
        assert_eq!(self.payload.len(), len, "payload is as long as announced");
        seal(&headers(&self.av, bth, ext), &self.payload)
    }
}

impl FrameSink for Frame {
    fn address(&mut self, av: &AddressVector) -> bool {
        self.av = *av;
        true
    }
    fn begin(&mut self, bth: &Bth, ext: &Ext, payload_len: usize) -> bool {
        assert!(self.head.is_none(), "one packet per poll");
        if self.room == 0 {
            return false;
        }
        self.head = Some((*bth, *ext, payload_len));
        true
    }
    fn payload(&mut self, slice: MrSlice<'_>) {
        let start = self.payload.len();
        self.payload.resize(start + slice.len(), 0);
        assert_eq!(slice.copy_out(&mut self.payload[start..]), slice.len());
    }
    fn inline(&mut self, bytes: &[u8]) {
        self.payload.extend_from_slice(bytes);
    }
}

pub fn headers(av: &AddressVector, bth: Bth, ext: Ext) -> Headers {
    let ip = match (av.sgid.to_ip(), av.dgid.to_ip()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            Ip::V4 { src, dst, tos: av.traffic_class, ttl: av.hop_limit, id: 0, frag: 0x4000 }
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => Ip::V6 {
            src,
            dst,
            traffic_class: av.traffic_class,
            flow_label: av.flow_label,
            hop_limit: av.hop_limit,
        },
        _ => panic!("both of one family"),
    };
    Headers {
        eth: Eth { dst: av.dmac, src: av.smac, vlan: None },
        ip,
        udp_src: av.udp_src,
        udp_checksum: 0,
        bth,
        ext,
    }
}

pub fn seal(headers: &Headers, payload: &[u8]) -> Vec<u8> {
    let mut out = vec![0xa5; 5000];
    let len = emit::seal(headers, payload, &mut out).expect("emits");
    out.truncate(len);
    out
}

/// Which side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    A,
    B,
}

/// What becomes of a frame on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    Pass,
    Drop,
    Twice,
    /// Arrives this many ns later than the others.
    Late(u64),
}

/// Changes the headers of a frame that `Side` sent.
pub type Rewrite = Box<dyn FnMut(Side, &mut Headers)>;
pub type Filter = Box<dyn FnMut(Side, &Packet, usize) -> Fate>;

/// Two hosts and a wire with a delay.
pub struct Pair {
    pub now: Instant,
    pub a: Host,
    pub b: Host,
    pub delay_ns: u64,
    /// Frames on their way: arrival time, destination, bytes. Kept in order of arrival.
    flights: VecDeque<(u64, Side, Vec<u8>)>,
    /// Sees every frame that `Side` sent, with its number on the wire.
    pub filter: Filter,
    /// What the wire changes in a frame, with a right ICRC.
    pub rewrite: Option<Rewrite>,
    count: usize,
    /// Every frame that was sent, as text.
    pub log: Vec<String>,
    /// Ceiling on the frames of one run: a bound on livelock.
    pub limit: usize,
}

impl Pair {
    pub fn new(setup: Setup) -> Pair {
        Pair::with(setup, setup)
    }

    pub fn with(a_setup: Setup, b_setup: Setup) -> Pair {
        let mut pair = Pair {
            now: Instant(1_000_000),
            a: Host::new(A_QPN, &a_setup),
            b: Host::new(B_QPN, &b_setup),
            delay_ns: 1000,
            flights: VecDeque::new(),
            filter: Box::new(|_, _, _| Fate::Pass),
            rewrite: None,
            count: 0,
            log: Vec::new(),
            limit: 200_000,
        };
        let (sq, rq) = (a_setup.sq_psn, a_setup.rq_psn);
        for (host, setup, us, them, dest, sq, rq) in
            [(&mut pair.a, &a_setup, 1, 2, B_QPN, sq, rq), (&mut pair.b, &b_setup, 2, 1, A_QPN, rq, sq)]
        {
            host.dest = Some(crate::support::dest(us, them, dest));
            let qp = &mut host.qp;
            qp.modify(pair.now, &QpModify::ToInit(setup.init())).expect("INIT");
            qp.modify(pair.now, &QpModify::ToRtr(setup.rtr(us, them, dest, rq))).expect("RTR");
            qp.modify(pair.now, &QpModify::ToRts(setup.rts(sq))).expect("RTS");
        }
        pair
    }

    /// Filters by a predicate that sees what A sends and B sends; true drops.
    pub fn drop_if(&mut self, mut predicate: impl FnMut(Side, &Packet, usize) -> bool + 'static) {
        self.filter = Box::new(
            move |side, packet, number| {
                if predicate(side, packet, number) { Fate::Drop } else { Fate::Pass }
            },
        );
    }

    pub fn host(&mut self, side: Side) -> &mut Host {
        match side {
            Side::A => &mut self.a,
            Side::B => &mut self.b,
        }
    }

    /// Lets both sides send what they have now.
    pub fn pump(&mut self) {
        for side in [Side::A, Side::B] {
            self.host(side).collect();
            loop {
                let now = self.now;
                let (_, frame) = self.host(side).transmit(now);
                let Some(frame) = frame else { break };
                self.launch(side, frame);
            }
            self.host(side).collect();
        }
    }

    fn launch(&mut self, from: Side, mut frame: Vec<u8>) {
        if let Some(rewrite) = &mut self.rewrite {
            let packet = check_frame(&frame).expect("what a queue pair sends is well-formed");
            let mut headers = packet.headers;
            rewrite(from, &mut headers);
            let start = usize::from(packet.payload_offset);
            frame = seal(&headers, &frame[start..start + usize::from(packet.payload_len)]);
        }
        assert!(self.count < self.limit, "livelock: {} frames\n{}", self.count, self.tail());
        let packet = check_frame(&frame).expect("what a queue pair sends is well-formed");
        let fate = (self.filter)(from, &packet, self.count);
        self.count += 1;
        let mark = match fate {
            Fate::Pass => "",
            Fate::Drop => " (lost)",
            Fate::Twice => " (twice)",
            Fate::Late(_) => " (late)",
        };
        self.log.push(format!("{from:?} {}{mark}", describe(&packet)));
        let to = if from == Side::A { Side::B } else { Side::A };
        let at = self.now.0 + self.delay_ns;
        match fate {
            Fate::Drop => {}
            Fate::Pass => self.fly(at, to, frame),
            Fate::Twice => {
                self.fly(at, to, frame.clone());
                self.fly(at, to, frame);
            }
            Fate::Late(by) => self.fly(at + by, to, frame),
        }
    }

    fn fly(&mut self, at: u64, to: Side, frame: Vec<u8>) {
        let place = self.flights.partition_point(|(t, _, _)| *t <= at);
        self.flights.insert(place, (at, to, frame));
    }

    /// Last lines of the log.
    pub fn tail(&self) -> String {
        let from = self.log.len().saturating_sub(40);
        self.log[from..].join("\n")
    }

    /// Runs until nothing is in flight and no timer is armed, or until `until`.
    pub fn run_until(&mut self, until: Instant) {
        loop {
            self.pump();
            let arrival = self.flights.front().map(|f| f.0);
            let timer = [self.a.qp.poll_timeout(), self.b.qp.poll_timeout()].into_iter().flatten().min();
            let next = match (arrival, timer) {
                (Some(a), Some(t)) => a.min(t.0),
                (Some(a), None) => a,
                (None, Some(t)) => t.0,
                (None, None) => break,
            };
            if next > until.0 {
                self.now = until;
                break;
            }
            self.now = Instant(self.now.0.max(next));
            while let Some((_, to, frame)) = self.flights.pop_front_if(|f| f.0 <= next) {
                let now = self.now;
                self.host(to).receive(now, &frame);
            }
            let now = self.now;
            for side in [Side::A, Side::B] {
                self.host(side).timeout(now);
            }
        }
    }

    /// Runs until all is quiet; bounded by 10 hours of virtual time.
    pub fn run(&mut self) {
        let end = self.now.after(36_000_000_000_000);
        self.run_until(end);
        assert!(self.now < end, "did not come to rest\n{}", self.tail());
    }

    pub fn run_for(&mut self, ns: u64) {
        self.run_until(self.now.after(ns));
    }

    /// Sends a made-up packet from `side`'s address to the other side, now.
    pub fn inject(&mut self, from: Side, bth: Bth, ext: Ext, payload: &[u8]) {
        let av = if from == Side::A { av(1, 2) } else { av(2, 1) };
        let frame = seal(&headers(&av, bth, ext), payload);
        let to = if from == Side::A { Side::B } else { Side::A };
        let now = self.now;
        self.host(to).receive(now, &frame);
    }

    pub fn write_to_b(&self, offset: usize) -> SendOp {
        SendOp::Write { remote_addr: RemoteAddr(IOVA + offset as u64), rkey: self.b.mr.rkey }
    }
    pub fn write_imm_to_b(&self, offset: usize, imm: [u8; 4]) -> SendOp {
        SendOp::WriteImm {
            remote_addr: RemoteAddr(IOVA + offset as u64),
            rkey: self.b.mr.rkey,
            imm: Imm(imm),
        }
    }
    pub fn read_from_b(&self, offset: usize) -> SendOp {
        SendOp::Read { remote_addr: RemoteAddr(IOVA + offset as u64), rkey: self.b.mr.rkey }
    }
    pub fn fetch_add_at_b(&self, offset: usize, add: u64) -> SendOp {
        SendOp::FetchAdd { remote_addr: RemoteAddr(IOVA + offset as u64), rkey: self.b.mr.rkey, add }
    }
    pub fn cmp_swap_at_b(&self, offset: usize, compare: u64, swap: u64) -> SendOp {
        let remote_addr = RemoteAddr(IOVA + offset as u64);
        SendOp::CmpSwap { remote_addr, rkey: self.b.mr.rkey, compare, swap }
    }
    /// Lines of the log that contain `what`.
    pub fn logged(&self, what: &str) -> usize {
        self.log.iter().filter(|line| line.contains(what)).count()
    }
}

/// Name of an opcode in logs and scripts.
pub fn op_name(opcode: Opcode) -> &'static str {
    match opcode {
        Opcode::RcSendFirst => "SEND_FIRST",
        Opcode::RcSendMiddle => "SEND_MIDDLE",
        Opcode::RcSendLast => "SEND_LAST",
        Opcode::RcSendLastImm => "SEND_LAST_IMM",
        Opcode::RcSendOnly => "SEND_ONLY",
        Opcode::RcSendOnlyImm => "SEND_ONLY_IMM",
        Opcode::RcWriteFirst => "WRITE_FIRST",
        Opcode::RcWriteMiddle => "WRITE_MIDDLE",
        Opcode::RcWriteLast => "WRITE_LAST",
        Opcode::RcWriteLastImm => "WRITE_LAST_IMM",
        Opcode::RcWriteOnly => "WRITE_ONLY",
        Opcode::RcWriteOnlyImm => "WRITE_ONLY_IMM",
        Opcode::RcReadRequest => "READ_REQUEST",
        Opcode::RcReadResponseFirst => "READ_RESP_FIRST",
        Opcode::RcReadResponseMiddle => "READ_RESP_MIDDLE",
        Opcode::RcReadResponseLast => "READ_RESP_LAST",
        Opcode::RcReadResponseOnly => "READ_RESP_ONLY",
        Opcode::RcAck => "ACK",
        Opcode::RcAtomicAck => "ATOMIC_ACK",
        Opcode::RcCmpSwap => "CMP_SWAP",
        Opcode::RcFetchAdd => "FETCH_ADD",
        Opcode::RcSendLastInv => "SEND_LAST_INV",
        Opcode::RcSendOnlyInv => "SEND_ONLY_INV",
        Opcode::UcSendFirst => "UC_SEND_FIRST",
        Opcode::UcSendMiddle => "UC_SEND_MIDDLE",
        Opcode::UcSendLast => "UC_SEND_LAST",
        Opcode::UcSendLastImm => "UC_SEND_LAST_IMM",
        Opcode::UcSendOnly => "UC_SEND_ONLY",
        Opcode::UcSendOnlyImm => "UC_SEND_ONLY_IMM",
        Opcode::UcWriteFirst => "UC_WRITE_FIRST",
        Opcode::UcWriteMiddle => "UC_WRITE_MIDDLE",
        Opcode::UcWriteLast => "UC_WRITE_LAST",
        Opcode::UcWriteLastImm => "UC_WRITE_LAST_IMM",
        Opcode::UcWriteOnly => "UC_WRITE_ONLY",
        Opcode::UcWriteOnlyImm => "UC_WRITE_ONLY_IMM",
        Opcode::UdSendOnly => "UD_SEND_ONLY",
        Opcode::UdSendOnlyImm => "UD_SEND_ONLY_IMM",
        Opcode::Cnp => "CNP",
    }
}

/// A packet as one line.
pub fn describe(packet: &Packet) -> String {
    let bth = &packet.headers.bth;
    let ext = &packet.headers.ext;
    let name = match ext.aeth.filter(|_| bth.opcode == Opcode::RcAck).map(|aeth| aeth.syndrome) {
        Some(Syndrome::RnrNak { .. }) => "RNR",
        Some(Syndrome::Nak(NakCode::SequenceError)) => "NAK_SEQ",
        Some(Syndrome::Nak(NakCode::InvalidRequest)) => "NAK_INV_REQ",
        Some(Syndrome::Nak(NakCode::RemoteAccess)) => "NAK_ACCESS",
        Some(Syndrome::Nak(NakCode::RemoteOperational)) => "NAK_REM_OP",
        Some(Syndrome::Nak(_)) => "NAK_OTHER",
        Some(Syndrome::Reserved(_)) => "ACK_RESERVED",
        Some(Syndrome::Ack { .. }) | None => op_name(bth.opcode),
    };
    let mut line = format!("{name} psn={}", bth.psn.get());
    if packet.payload_len > 0 {
        line += &format!(" len={}", packet.payload_len);
    }
    if packet.pad > 0 {
        line += &format!(" pad={}", packet.pad);
    }
    if let Some(reth) = ext.reth {
        line += &format!(" va=+{} dma={}", reth.addr.0.wrapping_sub(IOVA), reth.len.0);
    }
    if let Some(eth) = ext.atomic {
        line += &format!(" va=+{}", eth.addr.0.wrapping_sub(IOVA));
        line += &match bth.opcode {
            Opcode::RcCmpSwap => format!(" compare={} swap={}", eth.compare, eth.swap_or_add),
            _ => format!(" add={}", eth.swap_or_add),
        };
    }
    if let Some(was) = ext.atomic_ack {
        line += &format!(" was={was}");
    }
    if let Some(deth) = ext.deth {
        let (to, src) = (bth.dest_qpn.get(), deth.src_qpn.get());
        line += &format!(" to={to:#x} qkey={:#x} src={src:#x}", deth.qkey.0);
    }
    if let Some(imm) = ext.imm {
        line += &format!(" imm={:02x}{:02x}{:02x}{:02x}", imm.0[0], imm.0[1], imm.0[2], imm.0[3]);
    }
    if let Some(aeth) = ext.aeth {
        if let Syndrome::RnrNak { timer } = aeth.syndrome {
            line += &format!(" timer={timer}");
        }
        line += &format!(" msn={}", aeth.msn.get());
    }
    if bth.ack_req {
        line += " ackreq";
    }
    if bth.solicited {
        line += " se";
    }
    line
}

pub const BAD_RKEY: Rkey = Rkey(0x6666_6666);
pub const BAD_LKEY: Lkey = Lkey(0x6666_6666);

pub fn state_is_err(host: &Host) -> bool {
    host.qp.state() == QpState::Err
}

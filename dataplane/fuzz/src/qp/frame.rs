//! Frames: the sink that a queue pair sends into, and frames that a peer could have made, right ones and wrong ones.

use std::net::IpAddr;

use ferroce_mem::MrSlice;
use ferroce_transport::FrameSink;
use ferroce_verbs::{AddressVector, QpInfo, QpType};
use ferroce_wire::{
    Aeth, AtomicEth, Bth, Deth, DmaLen, Eth, Ext, Headers, Imm, Ip, MacAddr, Msn, Op, Opcode, Part, PathMtu,
    Pkey, Psn, Qkey, Qpn, RemoteAddr, Reth, Rkey, Service, Syndrome, emit, opcode::PayloadRule, packet,
};

use super::host::Host;
use super::input::Input;
use super::setup::{QKEY, av};

/// Builds one real frame.
pub struct Frame {
    av: AddressVector,
    room: bool,
    way: bool,
    head: Option<(Bth, Ext, usize)>,
    payload: Vec<u8>,
}

impl Frame {
    /// For a queue pair with the path `av`; with room for a packet or none, with a way for datagrams or none.
    pub fn new(av: AddressVector, room: bool, way: bool) -> Frame {
        Frame { av, room, way, head: None, payload: Vec::new() }
    }
    /// A packet was begun.
    pub fn begun(&self) -> bool {
        self.head.is_some()
    }
    /// The frame.
    pub fn seal(self) -> Vec<u8> {
        let (bth, ext, len) = self.head.expect("begun");
        assert_eq!(self.payload.len(), len, "payload is as long as announced");
        seal(&headers(&self.av, bth, ext), &self.payload).expect("what a queue pair sends can be emitted")
    }
}

impl FrameSink for Frame {
    fn address(&mut self, av: &AddressVector) -> bool {
        assert!(self.head.is_none(), "told before the packet is begun");
        self.av = *av;
        self.way && usable(av)
    }
    fn begin(&mut self, bth: &Bth, ext: &Ext, payload_len: usize) -> bool {
        assert!(self.head.is_none(), "one packet per poll");
        if !self.room {
            return false;
        }
        self.head = Some((*bth, *ext, payload_len));
        true
    }
    fn payload(&mut self, slice: MrSlice<'_>) {
        assert!(self.head.is_some(), "begun before its payload");
        let start = self.payload.len();
        self.payload.resize(start + slice.len(), 0);
        assert_eq!(slice.copy_out(&mut self.payload[start..]), slice.len());
    }
    fn inline(&mut self, bytes: &[u8]) {
        assert!(self.head.is_some(), "begun before its payload");
        self.payload.extend_from_slice(bytes);
    }
}

fn headers(av: &AddressVector, bth: Bth, ext: Ext) -> Headers {
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
        mixed => panic!("a path between families: {mixed:?}"),
    };
    let eth = Eth { dst: av.dmac, src: av.smac, vlan: av.vlan };
    Headers { eth, ip, udp_src: av.udp_src, udp_checksum: 0, bth, ext }
}

/// Whether frames can go this way: only an image of unknown origin has addresses that no device has.
pub fn usable(av: &AddressVector) -> bool {
    let ext = Ext { imm: Some(Imm::default()), ..Ext::NONE };
    let bth = Bth::new(Opcode::RcSendOnlyImm, Qpn::new(2), Psn::new(0));
    seal(&headers(av, bth, ext), &[]).is_some_and(|frame| packet::parse(&frame, frame.len()).is_ok())
}

/// The frame, if such headers can be.
pub fn seal(headers: &Headers, payload: &[u8]) -> Option<Vec<u8>> {
    let mut out = vec![0xa5; emit::header_bytes(headers) + payload.len() + 8];
    let len = emit::seal(headers, payload, &mut out).ok()?;
    out.truncate(len);
    Some(out)
}

/// What may be wrong with a crafted frame, a bit each; zeros give one that fits.
mod odd {
    pub const PSN: u8 = 1;
    pub const PATH: u8 = 2;
    pub const EXT: u8 = 4;
    pub const LENGTH: u8 = 8;
    pub const SERVICE: u8 = 16;
    pub const BITS: u8 = 32;
}

/// A frame to `host` as its peer could have sent it.
pub fn craft(host: &Host, input: &mut Input<'_>) -> Option<Vec<u8>> {
    let wrong = input.u8();
    let info = host.qp.info();
    let service = if wrong & odd::SERVICE != 0 {
        input.pick(&[Service::Rc, Service::Uc, Service::Ud, Service::Cnp])
    } else {
        host.qp.service()
    };
    let opcodes: Vec<Opcode> = Opcode::ALL.iter().copied().filter(|o| o.service() == service).collect();
    let opcode = input.pick(&opcodes);
    let mtu = info.rtr.map_or(PathMtu::Mtu256, |rtr| rtr.path_mtu);
    let psn = psn(host, &info, opcode, wrong, input);
    let payload = payload_len(host, opcode, psn, mtu, wrong, input);
    let mut bth = Bth::new(opcode, info.qpn, psn);
    let bits = input.u8();
    bth.ack_req = bits & 1 == 0;
    bth.solicited = bits & 2 != 0;
    bth.pkey = info.init.map_or(Pkey::DEFAULT, |init| Pkey(init.pkey.0 | 0x8000));
    if wrong & odd::BITS != 0 {
        bth.pkey = Pkey(input.u16());
        bth.resv8a = input.u8();
        bth.dest_qpn = Qpn::new(input.u32());
        bth.mig_req = bits & 4 != 0;
    }
    let ext = ext(host, opcode, payload, mtu, wrong, input);
    // A queue pair for datagrams has no path of its own.
    let own = info.rtr.filter(|_| info.qp_type != QpType::Ud);
    let mut path = own.map_or(av(false, 1, 2), |rtr| rtr.av);
    if service == Service::Ud {
        path = av(bits & 8 != 0, 1, 2);
        if bits & 16 != 0 {
            path.sgid = av(bits & 8 != 0, 1, 0xff).dgid;
        }
    }
    if wrong & odd::PATH != 0 {
        path = av(input.flag(), input.u8(), input.u8());
    }
    let theirs = AddressVector { sgid: path.dgid, dgid: path.sgid, smac: path.dmac, dmac: path.smac, ..path };
    let seed = input.u8();
    let bytes: Vec<u8> = (0..payload).map(|at| (at as u8) ^ seed).collect();
    let mut headers = headers(&theirs, bth, ext);
    if bits & 32 != 0 {
        headers.udp_src = input.u16();
        headers.eth.src = MacAddr([2, 0, 0, 0, 0, input.u8()]);
    }
    seal(&headers, &bytes)
}

/// A frame of others as one of the peer's: its addresses, and by choice its PSN and keys.
pub fn adopt(host: &Host, frame: &[u8], shape: u8) -> Option<Vec<u8>> {
    let packet = packet::parse(frame, frame.len()).ok()?;
    let info = host.qp.info();
    let mut headers = packet.headers;
    if let Some(rtr) = info.rtr.filter(|_| host.qp.service() != Service::Ud) {
        let theirs = AddressVector { sgid: rtr.av.dgid, dgid: rtr.av.sgid, ..rtr.av };
        headers.ip = self::headers(&theirs, headers.bth, headers.ext).ip;
    }
    let response = headers.bth.opcode.is_response();
    if shape & 2 == 0 {
        headers.bth.psn = if response { info.una_psn } else { info.rq_psn };
    }
    let (plan, region) = &host.regions[usize::from(shape >> 2 & 7) % host.regions.len()];
    let rkey = region.map_or(Rkey(0), |region| region.rkey);
    if let Some(reth) = &mut headers.ext.reth {
        (reth.addr, reth.rkey) = (RemoteAddr(plan.iova), rkey);
    }
    if let Some(atomic) = &mut headers.ext.atomic {
        (atomic.addr, atomic.rkey) = (RemoteAddr(plan.iova), rkey);
    }
    if let Some(deth) = &mut headers.ext.deth {
        deth.qkey = info.init.map_or(QKEY, |init| init.qkey);
    }
    let start = usize::from(packet.payload_offset);
    let mut payload = frame.get(start..start + usize::from(packet.payload_len))?.to_vec();
    if shape & 0x20 == 0 && headers.bth.opcode.info().payload == PayloadRule::Full {
        payload.resize(info.rtr.map_or(PathMtu::Mtu256, |rtr| rtr.path_mtu).bytes() as usize, 0x77);
    }
    seal(&headers, &payload)
}

fn psn(host: &Host, info: &QpInfo, opcode: Opcode, wrong: u8, input: &mut Input<'_>) -> Psn {
    if wrong & odd::PSN == 0 {
        return if opcode.is_response() {
            // Of the oldest that is outstanding, or of one after it.
            let ahead = u32::from(input.u8());
            info.una_psn.advance(if ahead < 0x80 { 0 } else { ahead & 7 })
        } else {
            info.rq_psn
        };
    }
    let by = u32::from(input.u8()).wrapping_sub(0x80);
    match input.below(5) {
        0 => info.rq_psn.advance(by),
        1 => info.una_psn.advance(by),
        2 => info.sq_psn.advance(by),
        3 => host.model.last_taken.unwrap_or(info.rq_psn),
        _ => Psn::new(input.u32()),
    }
}

fn payload_len(
    host: &Host,
    opcode: Opcode,
    psn: Psn,
    mtu: PathMtu,
    wrong: u8,
    input: &mut Input<'_>,
) -> usize {
    let full = mtu.bytes() as usize;
    if wrong & odd::LENGTH != 0 {
        return match input.below(4) {
            0 => 0,
            1 => full + 1,
            2 => full.saturating_sub(1),
            _ => usize::from(input.u16()) % 4097,
        };
    }
    match (opcode.op(), opcode.part()) {
        (Op::ReadResponse, _) => host.model.read_due(psn).unwrap_or(full),
        (Op::Send | Op::Write, Part::First | Part::Middle) => full,
        (Op::Send | Op::Write, Part::Last) => 1 + usize::from(input.u16()) % full,
        (Op::Send | Op::Write, Part::Only) => usize::from(input.u16()) % (full + 1),
        _ => 0,
    }
}

fn ext(host: &Host, opcode: Opcode, payload: usize, mtu: PathMtu, wrong: u8, input: &mut Input<'_>) -> Ext {
    let info = opcode.info();
    let wild = wrong & odd::EXT != 0;
    let mut ext = Ext::NONE;
    ext.deth = info.deth.then(|| {
        let qkey = if wild { Qkey(input.u32()) } else { host.qp.info().init.map_or(QKEY, |init| init.qkey) };
        Deth { qkey, resv: 0, src_qpn: Qpn::new(u32::from(input.u8())) }
    });
    ext.reth = info.reth.then(|| {
        let len = match (opcode.op(), opcode.part()) {
            (Op::Write, Part::Only) => payload,
            (Op::Write, _) => payload + 1 + usize::from(input.u16()) % (3 * mtu.bytes() as usize),
            _ => usize::from(input.u16()) % 0x1900,
        };
        let (addr, rkey) = target(host, wild, input);
        let len = if wild && input.flag() { input.u32() } else { len as u32 };
        Reth { addr, rkey, len: DmaLen(len) }
    });
    ext.atomic = info.atomic.then(|| {
        let (addr, rkey) = target(host, wild, input);
        let addr = if wild { addr } else { RemoteAddr(addr.0 & !7) };
        AtomicEth { addr, rkey, swap_or_add: input.u64(), compare: u64::from(input.u8()) }
    });
    ext.imm = info.imm.then(|| Imm([input.u8(), 1, 2, 3]));
    ext.invalidate = info.inv.then(|| target(host, wild, input).1);
    ext.aeth = info.aeth.then(|| {
        let byte = input.u8();
        let acks = matches!(opcode.op(), Op::ReadResponse | Op::AtomicAck) && !wild;
        Aeth { syndrome: Syndrome::from_u8(if acks { byte & 31 } else { byte }), msn: Msn::new(byte.into()) }
    });
    ext.atomic_ack = info.atomic_ack.then(|| input.u64());
    ext.cnp = info.service == Service::Cnp;
    ext
}

/// An address and a key that a peer might use: of a region or of a window.
pub fn target(host: &Host, wild: bool, input: &mut Input<'_>) -> (RemoteAddr, Rkey) {
    let which = input.u8();
    let at = u64::from(input.u16());
    let windows = host.memory.list_windows(0, 16).0;
    if which & 0x80 != 0 && !windows.is_empty() {
        let window = windows[usize::from(which & 0x7f) % windows.len()];
        let (addr, len) = window.bound.map_or((0, 1), |bound| (bound.addr, bound.len));
        let addr = addr.wrapping_add(if wild { at } else { at % len });
        let key = if wild { window.rkey.0 ^ u32::from(input.u8()) } else { window.rkey.0 };
        return (RemoteAddr(addr), Rkey(key));
    }
    let (plan, info) = &host.regions[usize::from(which) % host.regions.len()];
    let rkey = info.map_or(Rkey(0), |info| info.rkey);
    if wild {
        let rkey = if input.flag() { Rkey(input.u32()) } else { rkey };
        return (RemoteAddr(plan.iova.wrapping_add(at).wrapping_sub(0x100)), rkey);
    }
    (RemoteAddr(plan.iova + at % plan.len as u64), rkey)
}

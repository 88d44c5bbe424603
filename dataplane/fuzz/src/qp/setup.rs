//! How a queue pair is made and brought up, and every transition, from a fuzzer's bytes. Owns nothing.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ferroce_mem::Access;
use ferroce_verbs::{
    AddressVector, Ah, AhId, ClassId, CqId, InitAttrs, QpCap, QpChange, QpInitAttr, QpModify, QpType,
    RtrAttrs, RtsAttrs, SrqId, UdDest,
};
use ferroce_wire::{Gid, MacAddr, PathMtu, Pkey, Psn, Qkey, Qpn, VlanTag};

use super::buffer::PD;
use super::input::Input;

/// Queue key of the queue pairs.
pub const QKEY: Qkey = Qkey(0x1234_5678);
/// The shared receive queue.
pub const SRQ: SrqId = SrqId(3);

/// What a queue pair is made with, and how it is brought up.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Its number and its peer's.
    pub qpn: Qpn,
    /// The peer's.
    pub dest: Qpn,
    /// As made.
    pub attr: QpInitAttr,
    /// Receives of the shared queue.
    pub srq_wr: u32,
    /// RESET -> INIT.
    pub init: InitAttrs,
    /// INIT -> RTR.
    pub rtr: RtrAttrs,
    /// RTR -> RTS.
    pub rts: RtsAttrs,
}

impl Setup {
    /// From a few bytes; zeros give something that works.
    pub fn new(qp_type: QpType, input: &mut Input<'_>) -> Setup {
        let flags = input.u8();
        let cap = QpCap {
            max_send_wr: 8 + u32::from(input.u8() % 9),
            max_recv_wr: 4 + u32::from(flags >> 6),
            max_send_sge: 1 + u32::from(flags >> 4 & 3),
            max_recv_sge: 3,
            max_inline_data: 48,
        };
        let attr = QpInitAttr {
            qp_type,
            pd: PD,
            send_cq: CqId(0),
            recv_cq: CqId(0),
            cap,
            sq_sig_all: flags & 1 != 0,
            srq: (flags & 2 != 0).then_some(SRQ),
        };
        let access = if input.flag() { Access::from_bits_truncate(input.u32()) } else { Access::all() };
        let init = InitAttrs { pkey: Pkey::DEFAULT, access, qkey: QKEY };
        let mut setup = Setup {
            qpn: Qpn::new(0x11),
            dest: Qpn::new(0x12),
            attr,
            srq_wr: 8,
            init,
            rtr: rtr(input, flags & 4 != 0),
            rts: rts(input),
        };
        setup.rtr.dest_qpn = setup.dest;
        setup
    }

    /// Of its peer.
    pub fn mirrored(&self) -> Setup {
        let mut other = *self;
        (other.qpn, other.dest) = (self.dest, self.qpn);
        other.rtr.dest_qpn = self.qpn;
        other.rtr.rq_psn = self.rts.sq_psn;
        other.rts.sq_psn = self.rtr.rq_psn;
        let av = self.rtr.av;
        other.rtr.av = AddressVector { sgid: av.dgid, dgid: av.sgid, smac: av.dmac, dmac: av.smac, ..av };
        other
    }
}

/// An address of host `host`; 0xff is a multicast group.
fn gid(v6: bool, host: u8) -> Gid {
    Gid::from_ip(match (v6, host) {
        (false, 0xff) => IpAddr::V4(Ipv4Addr::new(239, 1, 2, 3)),
        (false, _) => IpAddr::V4(Ipv4Addr::new(10, 0, 0, host)),
        (true, 0xff) => IpAddr::V6(Ipv6Addr::new(0xff0e, 0, 0, 0, 0, 0, 0, 9)),
        (true, _) => IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, u16::from(host))),
    })
}

/// A path from `us` to `them`.
pub fn av(v6: bool, us: u8, them: u8) -> AddressVector {
    let mac = |host| MacAddr([2, 0, 0, 0, 0, host]);
    let dgid = gid(v6, them);
    AddressVector {
        sgid: gid(v6, us),
        dgid,
        smac: mac(us),
        dmac: dgid.multicast_mac().unwrap_or(mac(them)),
        vlan: None,
        traffic_class: 0,
        flow_label: 0,
        hop_limit: 64,
        sl: 0,
        udp_src: 0xc000,
    }
}

/// Where a datagram goes; now and then nowhere that is allowed.
pub fn dest(input: &mut Input<'_>) -> UdDest {
    let shape = input.u8();
    let mut ah = Ah { id: AhId(0), pd: PD, av: av(shape & 1 != 0, 1, if shape & 2 != 0 { 0xff } else { 2 }) };
    ah.av.vlan = (shape & 4 != 0).then_some(VlanTag { pcp: 3, dei: false, vid: 5 });
    match shape >> 4 {
        1 => ah.pd.0 += 1,
        2 => ah.av.flow_label = input.u32(),
        3 => ah.av.dgid = gid(shape & 1 == 0, 2),
        4 => ah.av.sl = input.u8(),
        _ => {}
    }
    let remote_qpn = if shape & 8 != 0 { Qpn::MULTICAST } else { Qpn::new(0x12 ^ u32::from(input.u8())) };
    UdDest { ah, remote_qpn, remote_qkey: Qkey(QKEY.0 | u32::from(input.u8()) << 24) }
}

/// A PSN, often near the wrap.
fn psn(input: &mut Input<'_>) -> Psn {
    match input.u8() {
        near @ 0..=0xbf => Psn::new(u32::from(near).wrapping_sub(0x60)),
        _ => Psn::new(input.u32()),
    }
}

fn rtr(input: &mut Input<'_>, v6: bool) -> RtrAttrs {
    RtrAttrs {
        av: av(v6, 1, 2),
        class: ClassId(0),
        path_mtu: PathMtu::ALL[usize::from(input.u8() / 48) % 5],
        dest_qpn: Qpn::new(0x12),
        rq_psn: psn(input),
        max_dest_rd_atomic: input.pick(&[4, 1, 2, 0, 16, 3, 128, 5]),
        min_rnr_timer: input.u8() & 31,
    }
}

fn rts(input: &mut Input<'_>) -> RtsAttrs {
    RtsAttrs {
        sq_psn: psn(input),
        timeout: input.pick(&[14, 1, 31, 0, 8, 17, 4, 2]),
        retry_cnt: 7 - (input.u8() & 7),
        rnr_retry: 7 - (input.u8() & 7),
        max_rd_atomic: input.pick(&[4, 1, 2, 0, 16, 3, 128, 5]),
    }
}

/// Any transition; attributes sometimes out of their range.
pub fn modify(setup: &Setup, input: &mut Input<'_>) -> QpModify {
    match input.below(16) {
        0 => QpModify::ToErr,
        1 => QpModify::ToReset,
        2 => QpModify::ToInit(setup.init),
        3 => QpModify::ToRtr(setup.rtr),
        4 | 5 => QpModify::ToRts(setup.rts),
        6 | 7 => QpModify::ToSqd,
        8 | 9 => QpModify::SqdToRts,
        10 | 11 => QpModify::SqeToRts,
        12 => {
            let (pkey, access) = (Pkey(input.u16()), Access::from_bits_truncate(input.u32()));
            QpModify::ToInit(InitAttrs { pkey, access, qkey: Qkey(input.u32()) })
        }
        13 => {
            let mut rtr = rtr(input, false);
            let shape = input.u8();
            if shape & 1 != 0 {
                rtr.av.flow_label = input.u32();
            }
            if shape & 2 != 0 {
                rtr.dest_qpn = Qpn::new(input.u32());
            }
            if shape & 4 != 0 {
                rtr.min_rnr_timer = input.u8();
            }
            QpModify::ToRtr(rtr)
        }
        14 => QpModify::ToRts(RtsAttrs { timeout: input.u8(), retry_cnt: input.u8() & 15, ..rts(input) }),
        _ => QpModify::Change(change(input)),
    }
}

fn change(input: &mut Input<'_>) -> QpChange {
    // Mostly one of them: one that is not allowed spoils the rest.
    let shape = input.u8();
    let which = if shape < 0xe0 { 1 << (shape % 10) } else { input.u16() };
    let mut bit = 0;
    let mut on = || {
        bit += 1;
        which >> (bit - 1) & 1 != 0
    };
    QpChange {
        pkey: on().then(|| Pkey(0x7fff | input.u16())),
        access: on().then(|| Access::from_bits_truncate(input.u32())),
        qkey: on().then(|| Qkey(input.u32())),
        av: on().then(|| av(input.flag(), 1, 2)),
        timeout: on().then(|| input.u8() & 31),
        retry_cnt: on().then(|| input.u8() & 7),
        rnr_retry: on().then(|| input.u8() & 7),
        max_rd_atomic: on().then(|| input.u8() >> 1),
        max_dest_rd_atomic: on().then(|| input.u8() >> 1 & 15),
        min_rnr_timer: on().then(|| input.u8() & 31),
    }
}

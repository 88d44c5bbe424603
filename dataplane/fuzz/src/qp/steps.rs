//! One step of a run: what a program, a peer, a clock or control may do next, chosen by a fuzzer's bytes.

use ferroce_mem::Access;
use ferroce_transport::Transmit;
use ferroce_verbs::{QpState, QpType, SendFlags, SendOp, Sge};
use ferroce_wire::{Imm, Rkey};

use super::buffer::PD;
use super::frame::{adopt, craft, target};
use super::host::{Host, Post};
use super::input::Input;
use super::setup::{dest, modify};
use crate::frames;

/// Steps of one run, at most.
pub const MOST: usize = 160;

/// Brings a queue pair to a state of the fuzzer's choice. SQE needs a send that fails.
pub fn bring_up(host: &mut Host, input: &mut Input<'_>) {
    let state = match input.below(16) {
        0 => QpState::Reset,
        1 => QpState::Init,
        2 => QpState::Rtr,
        3 => QpState::Sqd,
        4 => QpState::Sqe,
        5 => QpState::Err,
        _ => QpState::Rts,
    };
    host.bring_up(state);
    if state == QpState::Sqe && host.setup.attr.qp_type != QpType::Rc {
        let datagram = host.setup.attr.qp_type == QpType::Ud;
        let op = if datagram { SendOp::Send } else { SendOp::LocalInv { rkey: Rkey(1) } };
        let dest = Some(dest(&mut Input::new(&[])));
        host.post_send(&Post { op, sges: &[], inline: &[], flags: SendFlags::empty(), dest }).expect("posts");
        assert_eq!(host.transmit(true, false).0, Transmit::Idle);
        assert_eq!(host.qp.state(), QpState::Sqe);
    }
}

/// An entry; zeros give one of the region with all rights.
fn sge(host: &Host, input: &mut Input<'_>) -> Sge {
    let shape = input.u8();
    let at = u64::from(input.u16());
    let (plan, info) = &host.regions[usize::from(shape & 7) % host.regions.len()];
    let mtu = host.setup.rtr.path_mtu.bytes();
    let length = match shape >> 4 {
        0..=3 => u32::from(input.u8()),
        4 | 5 => 8,
        6 => mtu,
        7 => mtu + 1,
        8 => 2 * mtu,
        9 => 0,
        10..=14 => u32::from(input.u16()) % (plan.len as u32 + 1),
        _ => input.u32(),
    };
    let lkey = info.map(|info| info.lkey).unwrap_or_default();
    if shape & 8 != 0 && shape >> 4 == 15 {
        return Sge { addr: plan.iova.wrapping_add(at), length, lkey };
    }
    let room = plan.len as u64 - u64::from(length).min(plan.len as u64);
    Sge { addr: plan.iova + at % (room + 1), length, lkey }
}

/// A send of any operation.
pub fn post_send(host: &mut Host, input: &mut Input<'_>) {
    let kind = input.below(16);
    let flags = input.u8();
    let mut send_flags = SendFlags::from_bits_truncate(u32::from(flags & 7));
    send_flags.set(SendFlags::INLINE, flags & 0x18 == 0x18);
    let wild = flags & 0xe0 == 0xe0;
    let (remote_addr, rkey) = target(host, wild, input);
    let op = match kind {
        0 | 1 => SendOp::Send,
        2 => SendOp::SendImm(Imm([1, 2, 3, input.u8()])),
        3 => SendOp::SendInv { rkey },
        4 | 5 => SendOp::Write { remote_addr, rkey },
        6 => SendOp::WriteImm { remote_addr, rkey, imm: Imm([4, 5, 6, input.u8()]) },
        7..=9 => SendOp::Read { remote_addr, rkey },
        10 => SendOp::CmpSwap { remote_addr, rkey, compare: u64::from(input.u8()), swap: input.u64() },
        11 | 12 => SendOp::FetchAdd { remote_addr, rkey, add: input.u64() },
        13 | 14 => bind(host, wild, input),
        _ => SendOp::LocalInv { rkey },
    };
    let mut sges = Vec::new();
    match &op {
        SendOp::CmpSwap { .. } | SendOp::FetchAdd { .. } if !wild => {
            let mut one = sge(host, input);
            one.length = 8;
            one.addr = one.addr.saturating_sub(8);
            sges.push(one);
        }
        SendOp::BindMw { .. } | SendOp::LocalInv { .. } if !wild => {}
        _ if send_flags.contains(SendFlags::INLINE) => {}
        _ => {
            let count = 1 + usize::from(flags >> 5 & 3);
            sges.extend((0..count).map(|_| sge(host, input)));
        }
    }
    let bytes = [0x5a; 49];
    let inline = if send_flags.contains(SendFlags::INLINE) { &bytes[..input.below(50)] } else { &[] };
    let dest = (host.setup.attr.qp_type == QpType::Ud && !wild).then(|| dest(input));
    let _ = host.post_send(&Post { op, sges: &sges, inline, flags: send_flags, dest });
}

fn bind(host: &Host, wild: bool, input: &mut Input<'_>) -> SendOp {
    let windows = host.memory.list_windows(0, 16).0;
    let last = windows.get(input.below(windows.len().max(1))).map_or(Rkey(0), |window| window.rkey);
    let bump = if wild { input.u8() } else { 1 };
    let rkey = Rkey(last.0 & !0xff | (last.0.wrapping_add(u32::from(bump)) & 0xff));
    let (plan, info) = &host.regions[[0, 6, 0, 5, 0, 6, 3, 1][input.below(8)]];
    let at = u64::from(input.u16()) % plan.len as u64;
    let len = 1 + u64::from(input.u16()) % (plan.len as u64 - at);
    let access = if wild {
        Access::from_bits_truncate(input.u32())
    } else {
        Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC
    };
    let mr = info.map(|info| info.lkey).unwrap_or_default();
    SendOp::BindMw { rkey, mr, addr: plan.iova + at, len, access }
}

/// A receive.
pub fn post_recv(host: &mut Host, input: &mut Input<'_>) {
    let count = [1, 1, 2, 3, 1, 0, 1, 4][input.below(8)];
    let mut sges: Vec<Sge> = (0..count).map(|_| sge(host, input)).collect();
    // Mostly with room.
    if let Some(first) = sges.first_mut().filter(|_| count == 1) {
        let (plan, _) = &host.regions[0];
        if first.addr >= plan.iova && first.addr < plan.iova + 0x800 {
            first.length = first.length.max(0x1000);
        }
    }
    let _ = host.post_recv(&sges);
}

/// A receive with much room; false if there is no place for it.
pub fn post_recv_simple(host: &mut Host) -> bool {
    let (plan, info) = &host.regions[0];
    let lkey = info.map(|info| info.lkey).unwrap_or_default();
    let sge = Sge { addr: plan.iova, length: plan.len as u32, lkey };
    host.post_recv(&[sge; 3]).is_ok()
}

/// Any frame at all, its lengths, checksum and ICRC put right; by choice made one of the peer's to this queue pair.
fn raw(host: &Host, input: &mut Input<'_>) -> Vec<u8> {
    let shape = input.u8();
    let len = usize::from(input.u16()) % 4300;
    let mut frame = input.bytes(len).to_vec();
    frames::repair(&mut frame);
    if shape & 1 == 0 { adopt(host, &frame, shape).unwrap_or(frame) } else { frame }
}

/// Time, long or short, or until the timer.
pub fn wait(host: &mut Host, input: &mut Input<'_>) {
    let shape = input.u8();
    let ns = match host.qp.poll_timeout() {
        Some(at) if shape < 0xc0 => at.since(host.now),
        _ => 1 << (shape & 31),
    };
    host.wait(ns);
}

fn tables(host: &mut Host, input: &mut Input<'_>) {
    let shape = input.u8();
    match shape >> 5 {
        0..=3 => host.toggle_region(usize::from(shape & 7), shape & 16 != 0),
        4 => {
            let _ = host.memory.alloc_window(PD);
        }
        5 => {
            let windows = host.memory.list_windows(0, 16).0;
            if let Some(window) = windows.get(usize::from(shape & 7)) {
                host.memory.dealloc_window(window.rkey).expect("a window");
            }
        }
        6 => {
            if let Some(srq) = &mut host.srq {
                srq.set_limit(u32::from(shape & 7));
            }
        }
        _ => {
            let posted = host.model.srq.len() as u32;
            if let Some(srq) = &mut host.srq {
                let size = u32::from(shape & 15);
                assert_eq!(srq.resize(size), size >= posted, "{posted} posted, {size} asked for");
                assert_eq!(srq.info().posted, posted);
            }
        }
    }
}

/// The last frames that arrived.
#[derive(Default)]
pub struct Past {
    frames: [Vec<u8>; 4],
    next: usize,
}

impl Past {
    fn push(&mut self, frame: Vec<u8>) {
        self.frames[self.next % 4] = frame;
        self.next += 1;
    }
}

/// One step of a queue pair whose peer is the fuzzer.
pub fn step(host: &mut Host, past: &mut Past, input: &mut Input<'_>) {
    match input.below(24) {
        0..=5 => {
            if let Some(frame) = craft(host, input) {
                host.deliver(&frame, input.below(8) * 40);
                past.push(frame);
            }
        }
        6 => {
            let frame = raw(host, input);
            host.deliver(&frame, 0);
            past.push(frame);
        }
        7 | 20 => host.deliver(&past.frames[input.below(4)], 0),
        8..=10 => post_send(host, input),
        11 | 12 => post_recv(host, input),
        13 | 14 => transmit(host, input),
        15 => {
            host.complete(input.below(16));
        }
        16 => wait(host, input),
        17 | 21 | 22 => {
            let modify = modify(&host.setup, input);
            host.modify(&modify);
        }
        18 | 23 => tables(host, input),
        _ => host.relocate(),
    }
}

fn transmit(host: &mut Host, input: &mut Input<'_>) {
    let shape = input.u8();
    let (room, way) = (shape & 0xc0 != 0xc0, shape & 0xc0 != 0x80);
    // Often only one or two, so that something is under way.
    let most = if shape & 0x20 != 0 { shape & 3 } else { shape & 0x1f };
    for _ in 0..=most {
        if host.transmit(room, way).0 != Transmit::Sent {
            break;
        }
    }
}

/// Steps until the bytes end, then everything is read and ended.
pub fn run(mut host: Host, input: &mut Input<'_>) {
    let mut past = Past::default();
    for _ in 0..MOST {
        if input.is_empty() {
            break;
        }
        step(&mut host, &mut past, input);
    }
    host.finish();
}

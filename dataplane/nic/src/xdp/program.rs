//! The XDP program, assembled here from a handful of instruction forms.
//!
//! It sends to the AF_XDP socket of the receive queue: UDP to port 4791 of one of our addresses (IPv4 without options
//! and not a fragment, or IPv6 without extension headers; untagged or with one VLAN tag), and MAC control frames
//! (EtherType 0x8808: pause, PFC). Everything else stays with the kernel. Invariant: it passes whatever it does not
//! understand, and never drops. The UDP checksum is not looked at: a frame from the same host may carry an unfinished
//! one. Called at set-up; runs in the kernel.

use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

/// UDP port of RoCEv2.
const ROCE_PORT: u16 = 4791;
/// EtherType of MAC control frames.
const MAC_CONTROL: u16 = 0x8808;

/// One 8-byte instruction of eBPF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Instruction {
    opcode: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

/// A register; `R10` is the frame pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub(super) enum Reg {
    R0 = 0,
    R1 = 1,
    R2 = 2,
    R3 = 3,
    R4 = 4,
    R5 = 5,
    R6 = 6,
    R7 = 7,
    R8 = 8,
    R10 = 10,
}

/// Width of a load or store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Width {
    /// 4 bytes.
    Word = 0x00,
    /// 2 bytes.
    Half = 0x08,
    /// 1 byte.
    Byte = 0x10,
    /// 8 bytes.
    Double = 0x18,
}

/// Condition of a jump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum When {
    /// Equal.
    Equal = 0x10,
    /// Unsigned greater.
    Above = 0x20,
    /// Not equal.
    NotEqual = 0x50,
}

/// A place in the program that jumps name before it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Label(usize);

/// Builds a program; jumps go to labels, which [`Assembler::finish`] turns into offsets.
#[derive(Default)]
pub(super) struct Assembler {
    code: Vec<Instruction>,
    labels: Vec<Option<usize>>,
    jumps: Vec<(usize, Label)>,
}

impl Assembler {
    fn push(&mut self, opcode: u8, dst: Reg, src: u8, offset: i16, immediate: i32) {
        self.code.push(Instruction { opcode, registers: dst as u8 | src << 4, offset, immediate });
    }

    /// A label that is bound later.
    pub fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    /// Binds `label` to the next instruction.
    pub fn bind(&mut self, label: Label) {
        assert!(self.labels[label.0].is_none(), "a label is bound once");
        self.labels[label.0] = Some(self.code.len());
    }

    /// `dst = value`
    pub fn set(&mut self, dst: Reg, value: i32) {
        self.push(0xb7, dst, 0, 0, value);
    }

    /// `dst = src`
    pub fn copy(&mut self, dst: Reg, src: Reg) {
        self.push(0xbf, dst, src as u8, 0, 0);
    }

    /// `dst += value`
    pub fn add(&mut self, dst: Reg, value: i32) {
        self.push(0x07, dst, 0, 0, value);
    }

    /// `dst &= value`
    pub fn and(&mut self, dst: Reg, value: i32) {
        self.push(0x57, dst, 0, 0, value);
    }

    /// `dst <<= bits`
    pub fn shift_left(&mut self, dst: Reg, bits: i32) {
        self.push(0x67, dst, 0, 0, bits);
    }

    /// `dst = *(width *)(src + offset)`
    pub fn load(&mut self, width: Width, dst: Reg, src: Reg, offset: i16) {
        self.push(0x61 | width as u8, dst, src as u8, offset, 0);
    }

    /// `*(width *)(dst + offset) = src`
    pub fn store(&mut self, width: Width, dst: Reg, offset: i16, src: Reg) {
        self.push(0x63 | width as u8, dst, src as u8, offset, 0);
    }

    /// `*(width *)(dst + offset) = value`
    pub fn store_value(&mut self, width: Width, dst: Reg, offset: i16, value: i32) {
        self.push(0x62 | width as u8, dst, 0, offset, value);
    }

    /// `*(u64 *)(dst + offset) += src`, atomically.
    pub fn atomic_add(&mut self, dst: Reg, offset: i16, src: Reg) {
        self.push(0xc3 | Width::Double as u8, dst, src as u8, offset, 0);
    }

    /// `dst = map`: the kernel replaces the descriptor by the map's address.
    pub fn map(&mut self, dst: Reg, map: BorrowedFd<'_>) {
        const PSEUDO_MAP_FD: u8 = 1;
        self.push(0x18, dst, PSEUDO_MAP_FD, 0, map.as_raw_fd());
        self.push(0x00, Reg::R0, 0, 0, 0);
    }

    /// Calls helper number `helper`.
    pub fn call(&mut self, helper: i32) {
        self.push(0x85, Reg::R0, 0, 0, helper);
    }

    /// Goes to `label`.
    pub fn jump(&mut self, label: Label) {
        self.jumps.push((self.code.len(), label));
        self.push(0x05, Reg::R0, 0, 0, 0);
    }

    /// Goes to `label` when `left` and `value` compare so.
    pub fn jump_value(&mut self, when: When, left: Reg, value: i32, label: Label) {
        self.jumps.push((self.code.len(), label));
        self.push(0x05 | when as u8, left, 0, 0, value);
    }

    /// Goes to `label` when `left` and `right` compare so.
    pub fn jump_reg(&mut self, when: When, left: Reg, right: Reg, label: Label) {
        self.jumps.push((self.code.len(), label));
        self.push(0x0d | when as u8, left, right as u8, 0, 0);
    }

    /// Returns from the program with R0.
    pub fn exit(&mut self) {
        self.push(0x95, Reg::R0, 0, 0, 0);
    }

    /// The program, with all jumps resolved. Panics if a label was never bound, which no input can cause.
    pub fn finish(mut self) -> Vec<Instruction> {
        for (at, label) in self.jumps {
            let target = self.labels[label.0].expect("every label that is used is bound");
            let distance = target as isize - at as isize - 1;
            self.code[at].offset = i16::try_from(distance).expect("the program is short");
        }
        self.code
    }
}

/// Helper number: look up an entry of a map.
const MAP_LOOKUP: i32 = 1;
/// Helper number: redirect to an entry of a map.
const REDIRECT_MAP: i32 = 51;
/// Answer of an XDP program: leave the frame to the kernel.
pub(super) const XDP_PASS: i32 = 2;
/// Answer of an XDP program: the frame goes elsewhere.
pub(super) const XDP_REDIRECT: i32 = 4;

/// Offset of the receive queue's number in the context.
const RX_QUEUE_INDEX: i16 = 16;
/// Offset from the frame pointer of the 16-byte address key.
const KEY: i16 = -16;

/// Counters per receive queue: a cache line each, so that queues on several cores do not get in each other's way.
/// Queues beyond [`COUNTED_QUEUES`] share them.
pub(super) const COUNTERS: u32 = COUNTED_QUEUES * LINE;
/// A power of two.
pub(super) const COUNTED_QUEUES: u32 = 64;
/// Counters of 8 bytes in a cache line.
pub(super) const LINE: u32 = 8;
/// Place in a line: frames of ours on a queue without a socket.
pub(super) const UNOWNED: u32 = 0;
/// Place in a line: frames that are not ours, and stay with the kernel.
pub(super) const NOT_OURS: u32 = 1;

/// The program. `sockets` is an XSKMAP by receive queue, `addresses` a hash with keys of [`address_key`], `counters` an
/// array of [`COUNTERS`] counters.
pub(super) fn assemble(
    sockets: BorrowedFd<'_>,
    addresses: BorrowedFd<'_>,
    counters: BorrowedFd<'_>,
) -> Vec<Instruction> {
    use Reg::*;
    let mut a = Assembler::default();
    let (pass, lookup, redirect) = (a.label(), a.label(), a.label());
    let (network, ipv4, ipv6) = (a.label(), a.label(), a.label());

    // R6: context, R7: where the next header starts, R3: end of the frame.
    a.copy(R6, R1);
    a.load(Width::Word, R7, R6, 0);
    a.load(Width::Word, R3, R6, 4);
    need(&mut a, 14, pass);
    a.load(Width::Half, R5, R7, 12);
    a.jump_value(When::Equal, R5, network_order(MAC_CONTROL), redirect);
    a.jump_value(When::NotEqual, R5, network_order(0x8100), network);
    need(&mut a, 18, pass);
    a.load(Width::Half, R5, R7, 16);
    a.add(R7, 4);

    a.bind(network);
    a.add(R7, 14);
    a.jump_value(When::Equal, R5, network_order(0x0800), ipv4);
    a.jump_value(When::Equal, R5, network_order(0x86dd), ipv6);
    a.jump(pass);

    a.bind(ipv4);
    ipv4_headers(&mut a, lookup, pass);
    a.bind(ipv6);
    ipv6_headers(&mut a, pass);

    a.bind(lookup);
    a.map(R1, addresses);
    a.copy(R2, R10);
    a.add(R2, i32::from(KEY));
    a.call(MAP_LOOKUP);
    a.jump_value(When::Equal, R0, 0, pass);

    a.bind(redirect);
    to_socket(&mut a, sockets, counters);

    a.bind(pass);
    count(&mut a, counters, NOT_OURS);
    a.set(R0, XDP_PASS);
    a.exit();
    a.finish()
}

/// Passes the frame unless `bytes` bytes follow R7. Changes R4.
fn need(a: &mut Assembler, bytes: i32, pass: Label) {
    a.copy(Reg::R4, Reg::R7);
    a.add(Reg::R4, bytes);
    a.jump_reg(When::Above, Reg::R4, Reg::R3, pass);
}

/// IPv4 at R7: no options, not a fragment, UDP to our port; the key becomes the mapped destination address.
fn ipv4_headers(a: &mut Assembler, lookup: Label, pass: Label) {
    use Reg::*;
    need(a, 28, pass);
    a.load(Width::Byte, R0, R7, 0);
    a.jump_value(When::NotEqual, R0, 0x45, pass);
    a.load(Width::Byte, R0, R7, 9);
    a.jump_value(When::NotEqual, R0, 17, pass);
    // "More fragments" and the offset; "don't fragment" may be set.
    a.load(Width::Half, R0, R7, 6);
    a.and(R0, network_order(0x3fff));
    a.jump_value(When::NotEqual, R0, 0, pass);
    a.load(Width::Half, R0, R7, 22);
    a.jump_value(When::NotEqual, R0, network_order(ROCE_PORT), pass);
    a.store_value(Width::Double, R10, KEY, 0);
    a.store_value(Width::Word, R10, KEY + 8, i32::from_ne_bytes([0, 0, 0xff, 0xff]));
    a.load(Width::Word, R0, R7, 16);
    a.store(Width::Word, R10, KEY + 12, R0);
    a.jump(lookup);
}

/// IPv6 at R7: UDP to our port follows directly; the key becomes the destination address.
fn ipv6_headers(a: &mut Assembler, pass: Label) {
    use Reg::*;
    need(a, 48, pass);
    a.load(Width::Byte, R0, R7, 0);
    a.and(R0, 0xf0);
    a.jump_value(When::NotEqual, R0, 0x60, pass);
    a.load(Width::Byte, R0, R7, 6);
    a.jump_value(When::NotEqual, R0, 17, pass);
    a.load(Width::Half, R0, R7, 42);
    a.jump_value(When::NotEqual, R0, network_order(ROCE_PORT), pass);
    for part in [0i16, 4, 8, 12] {
        a.load(Width::Word, R0, R7, 24 + part);
        a.store(Width::Word, R10, KEY + part, R0);
    }
}

/// Sends the frame to the socket of its queue; without one it is counted and stays with the kernel.
fn to_socket(a: &mut Assembler, sockets: BorrowedFd<'_>, counters: BorrowedFd<'_>) {
    use Reg::*;
    let out = a.label();
    a.map(R1, sockets);
    a.load(Width::Word, R2, R6, RX_QUEUE_INDEX);
    a.set(R3, XDP_PASS);
    a.call(REDIRECT_MAP);
    a.copy(R8, R0);
    a.jump_value(When::Equal, R8, XDP_REDIRECT, out);
    count(a, counters, UNOWNED);
    a.bind(out);
    a.copy(R0, R8);
    a.exit();
}

/// Adds 1 to a counter of the frame's queue. Keeps R6 to R8.
fn count(a: &mut Assembler, counters: BorrowedFd<'_>, place: u32) {
    use Reg::*;
    const COUNTER_KEY: i16 = -24;
    let none = a.label();
    a.load(Width::Word, R1, R6, RX_QUEUE_INDEX);
    a.and(R1, COUNTED_QUEUES.cast_signed() - 1);
    a.shift_left(R1, LINE.ilog2().cast_signed());
    a.add(R1, place.cast_signed());
    a.store(Width::Word, R10, COUNTER_KEY, R1);
    a.map(R1, counters);
    a.copy(R2, R10);
    a.add(R2, i32::from(COUNTER_KEY));
    a.call(MAP_LOOKUP);
    a.jump_value(When::Equal, R0, 0, none);
    a.set(R1, 1);
    a.atomic_add(R0, 0, R1);
    a.bind(none);
}

/// A 16-bit number as a load of network bytes yields it.
fn network_order(value: u16) -> i32 {
    i32::from(value.to_be())
}

/// The key of an address in the address map: IPv4 as IPv4-mapped IPv6.
pub(super) fn address_key(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

#[cfg(test)]
mod tests;

//! Base transport header and extension headers as values (IBTA 9.2, 9.3; roce-wire 2).

use crate::ids::{DmaLen, Imm, Msn, Pkey, Psn, Qkey, Qpn, RemoteAddr, Rkey};
use crate::opcode::Opcode;

/// Base transport header, 12 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bth {
    /// What the packet is.
    pub opcode: Opcode,
    /// Solicited event.
    pub solicited: bool,
    /// Migration request; we send 1.
    pub mig_req: bool,
    /// Partition key.
    pub pkey: Pkey,
    /// Byte 4 as received (FECN, BECN, reserved); masked in the ICRC. We send 0, and 0x40 (BECN) in a CNP.
    pub resv8a: u8,
    /// Destination queue pair.
    pub dest_qpn: Qpn,
    /// The responder shall acknowledge.
    pub ack_req: bool,
    /// The seven reserved bits beside AckReq, as received; we send 0.
    pub resv7: u8,
    /// Packet sequence number.
    pub psn: Psn,
}

impl Bth {
    /// A header with everything at what we send by default.
    pub const fn new(opcode: Opcode, dest_qpn: Qpn, psn: Psn) -> Self {
        Bth {
            opcode,
            solicited: false,
            mig_req: true,
            pkey: Pkey::DEFAULT,
            resv8a: 0,
            dest_qpn,
            ack_req: false,
            resv7: 0,
            psn,
        }
    }
    /// Backward congestion notification bit.
    pub const fn becn(&self) -> bool {
        self.resv8a & 0x40 != 0
    }
}

/// RDMA extended transport header: where a WRITE goes or a READ comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reth {
    /// First byte in the responder's address space.
    pub addr: RemoteAddr,
    /// Key of the region or window.
    pub rkey: Rkey,
    /// Bytes of the whole message.
    pub len: DmaLen,
}

/// Operands of an atomic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AtomicEth {
    /// 8-byte aligned address.
    pub addr: RemoteAddr,
    /// Key.
    pub rkey: Rkey,
    /// Swap value, or what fetch-and-add adds.
    pub swap_or_add: u64,
    /// Compare value; 0 for fetch-and-add.
    pub compare: u64,
}

/// Datagram header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deth {
    /// Queue key.
    pub qkey: Qkey,
    /// Reserved byte 4 as received; we send 0.
    pub resv: u8,
    /// Sender's queue pair.
    pub src_qpn: Qpn,
}

/// Acknowledge header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Aeth {
    /// ACK, RNR NAK or NAK.
    pub syndrome: Syndrome,
    /// Messages completed at the responder.
    pub msn: Msn,
}

/// AETH syndrome byte (IBTA 9.7.5.1; roce-wire 2.3). Every byte is one of these: the mapping is total both ways.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Syndrome {
    /// 0x00 ..= 0x1f: ACK with a credit code; 0x1f is "no credit information".
    Ack {
        /// 0 ..= 31.
        credits: u8,
    },
    /// 0x20 ..= 0x3f: receiver not ready.
    RnrNak {
        /// Timer index, 0 ..= 31; 0 is 655.36 ms.
        timer: u8,
    },
    /// 0x60 ..= 0x7f: NAK.
    Nak(NakCode),
    /// 0x40 ..= 0x5f and 0x80 ..= 0xff: reserved.
    Reserved(u8),
}

/// NAK codes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NakCode {
    /// 0: PSN sequence error.
    SequenceError,
    /// 1: invalid request.
    InvalidRequest,
    /// 2: remote access error.
    RemoteAccess,
    /// 3: remote operational error.
    RemoteOperational,
    /// 4: invalid RD request.
    InvalidRdRequest,
    /// 5 ..= 31, reserved.
    Reserved(u8),
}

/// The extension headers of one packet: at most one of each kind, in the order that the opcode fixes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ext {
    /// Datagram header.
    pub deth: Option<Deth>,
    /// RDMA header.
    pub reth: Option<Reth>,
    /// Atomic operands.
    pub atomic: Option<AtomicEth>,
    /// Immediate data.
    pub imm: Option<Imm>,
    /// Key to invalidate (IETH).
    pub invalidate: Option<Rkey>,
    /// Acknowledge header.
    pub aeth: Option<Aeth>,
    /// Original remote value of an atomic.
    pub atomic_ack: Option<u64>,
    /// The sixteen reserved bytes of a CNP are zero; nothing is kept of them.
    pub cnp: bool,
}

impl Ext {
    /// No extension header.
    pub const NONE: Ext =
        Ext { deth: None, reth: None, atomic: None, imm: None, invalidate: None, aeth: None, atomic_ack: None, cnp: false };
}

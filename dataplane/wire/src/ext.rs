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
    /// Header of a congestion notification to `dest_qpn` (roce-wire 10.2): BECN set, migration bit and PSN 0. Goes
    /// with [`Ext::CNP`].
    pub const fn cnp(dest_qpn: Qpn) -> Self {
        let mut bth = Bth::new(Opcode::Cnp, dest_qpn, Psn::new(0));
        bth.mig_req = false;
        bth.resv8a = Bth::BECN;
        bth
    }
    /// Backward congestion notification, in [`Bth::resv8a`].
    pub const BECN: u8 = 0x40;
    /// Forward congestion notification, in [`Bth::resv8a`].
    pub const FECN: u8 = 0x80;
    /// Backward congestion notification bit.
    pub const fn becn(&self) -> bool {
        self.resv8a & Self::BECN != 0
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

impl Syndrome {
    /// ACK without credit information, what a responder with a shared receive queue sends.
    pub const ACK_NO_CREDITS: Syndrome = Syndrome::Ack { credits: CREDITS_INVALID };

    /// From the byte on the wire. Total.
    #[inline]
    pub const fn from_u8(byte: u8) -> Self {
        let low = byte & 0x1f;
        match byte >> 5 {
            0 => Syndrome::Ack { credits: low },
            1 => Syndrome::RnrNak { timer: low },
            3 => Syndrome::Nak(NakCode::from_u8(low)),
            _ => Syndrome::Reserved(byte),
        }
    }

    /// The byte on the wire. Total: credits, timers and codes are cut to their five bits. `from_u8(b).to_u8() == b`
    /// for every byte.
    #[inline]
    pub const fn to_u8(self) -> u8 {
        match self {
            Syndrome::Ack { credits } => credits & 0x1f,
            Syndrome::RnrNak { timer } => 0x20 | (timer & 0x1f),
            Syndrome::Nak(code) => 0x60 | (code.to_u8() & 0x1f),
            Syndrome::Reserved(byte) => byte,
        }
    }
}

/// Credit code of an ACK that tells nothing about credits.
pub const CREDITS_INVALID: u8 = 31;

/// Credit code (the index, 0 ..= 30) to number of receives posted (IBTA table 46; roce-wire 2.3).
pub const CREDITS: [u16; 31] = [
    0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
    4096, 6144, 8192, 12288, 16384, 24576, 32768,
];

/// Number of receives that a credit code stands for; `None` for [`CREDITS_INVALID`] and above.
pub fn credits_of_code(code: u8) -> Option<u16> {
    CREDITS.get(usize::from(code)).copied()
}

/// Largest credit code that promises no more than `receives`.
pub fn code_of_credits(receives: u32) -> u8 {
    let above = CREDITS.partition_point(|credits| u32::from(*credits) <= receives);
    // 1 ..= 31: the first entry is 0.
    u8::try_from(above).unwrap_or(CREDITS_INVALID).saturating_sub(1)
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

impl NakCode {
    /// From the low five bits of a NAK syndrome; higher bits are ignored. Total.
    #[inline]
    pub const fn from_u8(code: u8) -> Self {
        match code & 0x1f {
            0 => NakCode::SequenceError,
            1 => NakCode::InvalidRequest,
            2 => NakCode::RemoteAccess,
            3 => NakCode::RemoteOperational,
            4 => NakCode::InvalidRdRequest,
            other => NakCode::Reserved(other),
        }
    }
    /// The code, 0 ..= 31.
    #[inline]
    pub const fn to_u8(self) -> u8 {
        match self {
            NakCode::SequenceError => 0,
            NakCode::InvalidRequest => 1,
            NakCode::RemoteAccess => 2,
            NakCode::RemoteOperational => 3,
            NakCode::InvalidRdRequest => 4,
            NakCode::Reserved(other) => other & 0x1f,
        }
    }
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
    pub const NONE: Ext = Ext {
        deth: None,
        reth: None,
        atomic: None,
        imm: None,
        invalidate: None,
        aeth: None,
        atomic_ack: None,
        cnp: false,
    };
    /// The sixteen reserved bytes of a congestion notification.
    pub const CNP: Ext = Ext { cnp: true, ..Ext::NONE };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_syndrome_byte_survives_the_round_trip() {
        for byte in 0..=u8::MAX {
            let syndrome = Syndrome::from_u8(byte);
            assert_eq!(syndrome.to_u8(), byte);
            let kind = match byte {
                0x00..=0x1f => matches!(syndrome, Syndrome::Ack { .. }),
                0x20..=0x3f => matches!(syndrome, Syndrome::RnrNak { .. }),
                0x60..=0x7f => matches!(syndrome, Syndrome::Nak(_)),
                _ => matches!(syndrome, Syndrome::Reserved(_)),
            };
            assert!(kind, "{byte:#04x} became {syndrome:?}");
        }
    }

    #[test]
    fn nak_codes_are_those_of_the_wire() {
        assert_eq!(Syndrome::Nak(NakCode::SequenceError).to_u8(), 0x60);
        assert_eq!(Syndrome::Nak(NakCode::InvalidRequest).to_u8(), 0x61);
        assert_eq!(Syndrome::Nak(NakCode::RemoteAccess).to_u8(), 0x62);
        assert_eq!(Syndrome::Nak(NakCode::RemoteOperational).to_u8(), 0x63);
        assert_eq!(Syndrome::Nak(NakCode::InvalidRdRequest).to_u8(), 0x64);
        assert_eq!(Syndrome::ACK_NO_CREDITS.to_u8(), 0x1f);
    }

    #[test]
    fn credit_codes_never_promise_more_than_there_is() {
        for receives in (0..=40_000).chain([u32::MAX]) {
            let code = code_of_credits(receives);
            assert!(code < CREDITS_INVALID);
            assert!(u32::from(CREDITS[usize::from(code)]) <= receives);
            if let Some(next) = credits_of_code(code + 1) {
                assert!(u32::from(next) > receives);
            }
        }
        assert_eq!(credits_of_code(CREDITS_INVALID), None);
        assert_eq!(credits_of_code(30), Some(32768));
    }
}

//! One line per packet, for traces, the simulator and tests.

use core::fmt;

use crate::ext::{Ext, Syndrome};
use crate::flow::{Headers, Ip};
use crate::packet::Packet;

impl fmt::Display for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} payload {} pad {}", self.headers, self.payload_len, self.pad)
    }
}

impl fmt::Display for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(tag) = self.eth.vlan {
            write!(f, "vlan {} pcp {} ", tag.vid, tag.pcp)?;
        }
        match self.ip {
            Ip::V4 { src, dst, .. } => write!(f, "{src}:{} > {dst}", self.udp_src)?,
            Ip::V6 { src, dst, .. } => write!(f, "[{src}]:{} > [{dst}]", self.udp_src)?,
        }
        write!(f, " {:?} {:?} {:?}", self.bth.opcode, self.bth.dest_qpn, self.bth.psn)?;
        let flags = [
            (self.bth.ack_req, " ackreq"),
            (self.bth.solicited, " solicited"),
            (self.bth.becn(), " becn"),
            (self.ip.ecn() == crate::flow::Ecn::Ce, " ce"),
        ];
        for (_, name) in flags.iter().filter(|(set, _)| *set) {
            f.write_str(name)?;
        }
        fmt::Display::fmt(&self.ext, f)
    }
}

/// Each header that is there, with a blank before it.
impl fmt::Display for Ext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(deth) = self.deth {
            write!(f, " from {:?} qkey {:#010x}", deth.src_qpn, deth.qkey.0)?;
        }
        if let Some(reth) = self.reth {
            write!(f, " at {:#x} {:?} len {}", reth.addr.0, reth.rkey, reth.len.0)?;
        }
        if let Some(atomic) = self.atomic {
            write!(f, " at {:#x} {:?}", atomic.addr.0, atomic.rkey)?;
            write!(f, " swap/add {:#x} compare {:#x}", atomic.swap_or_add, atomic.compare)?;
        }
        if let Some(imm) = self.imm {
            write!(f, " imm {:#010x}", u32::from_be_bytes(imm.0))?;
        }
        if let Some(rkey) = self.invalidate {
            write!(f, " invalidate {rkey:?}")?;
        }
        if let Some(aeth) = self.aeth {
            write!(f, " {} msn {}", aeth.syndrome, aeth.msn.get())?;
        }
        if let Some(original) = self.atomic_ack {
            write!(f, " original {original:#x}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Syndrome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Syndrome::Ack { credits: crate::ext::CREDITS_INVALID } => f.write_str("ack"),
            Syndrome::Ack { credits } => write!(f, "ack credit-code {credits}"),
            Syndrome::RnrNak { timer } => write!(f, "rnr-nak timer {timer}"),
            Syndrome::Nak(code) => write!(f, "nak {code:?}"),
            Syndrome::Reserved(byte) => write!(f, "reserved syndrome {byte:#04x}"),
        }
    }
}

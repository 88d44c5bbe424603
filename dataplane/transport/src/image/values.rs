//! Numbers and names of the image.

use alloc::vec::Vec;

use ferroce_mem::{Access, Lkey, PdId};
use ferroce_verbs::{AhId, ClassId, CqId, QpState, QpType, SendFlags, SendOp, Sge, SrqId, WcStatus};
use ferroce_wire::{
    Gid, Imm, MacAddr, Msn, NakCode, PathMtu, Pkey, Psn, Qkey, Qpn, RemoteAddr, Rkey, Syndrome, VlanTag,
};

use super::{Image, ImportError, Reader, ensure, image_of};
use crate::counters::{QP_COUNTERS, QpCounters};
use crate::time::Instant;

macro_rules! number {
    ($($type:ty),*) => {$(
        impl Image for $type {
            fn save(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn load(from: &mut Reader<'_>) -> Result<Self, ImportError> {
                let bytes = from.bytes(size_of::<$type>())?;
                Ok(<$type>::from_le_bytes(bytes.try_into().map_err(|_| ImportError::Truncated)?))
            }
        }
    )*};
}
number!(u8, u16, u32, u64);

/// A wrapper that takes every number.
macro_rules! wrapper {
    ($($type:ident($inner:ty)),*) => {$(
        impl Image for $type {
            fn save(&self, out: &mut Vec<u8>) {
                self.0.save(out);
            }
            fn load(from: &mut Reader<'_>) -> Result<Self, ImportError> {
                Ok($type(<$inner>::load(from)?))
            }
        }
    )*};
}
wrapper!(
    Lkey(u32),
    PdId(u32),
    CqId(u32),
    SrqId(u32),
    AhId(u64),
    ClassId(u8),
    Pkey(u16),
    Qkey(u32),
    Rkey(u32),
    RemoteAddr(u64),
    Instant(u64),
    Gid([u8; 16]),
    MacAddr([u8; 6]),
    Imm([u8; 4]),
    QpCounters([u64; QP_COUNTERS])
);

/// A number of 24 bits.
macro_rules! circular {
    ($($type:ident),*) => {$(
        impl Image for $type {
            fn save(&self, out: &mut Vec<u8>) {
                self.get().save(out);
            }
            fn load(from: &mut Reader<'_>) -> Result<Self, ImportError> {
                let number = u32::load(from)?;
                ensure(number < 1 << 24, stringify!($type))?;
                Ok($type::new(number))
            }
        }
    )*};
}
circular!(Psn, Msn, Qpn);

impl<T: Image + Copy + Default, const N: usize> Image for [T; N] {
    fn save(&self, out: &mut Vec<u8>) {
        for value in self {
            value.save(out);
        }
    }
    fn load(from: &mut Reader<'_>) -> Result<Self, ImportError> {
        let mut all = [T::default(); N];
        for value in &mut all {
            *value = T::load(from)?;
        }
        Ok(all)
    }
}

impl Image for bool {
    fn save(&self, out: &mut Vec<u8>) {
        u8::from(*self).save(out);
    }
    fn load(from: &mut Reader<'_>) -> Result<Self, ImportError> {
        match u8::load(from)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(ImportError::Invalid("a flag")),
        }
    }
}

impl<T: Image> Image for Option<T> {
    fn save(&self, out: &mut Vec<u8>) {
        self.is_some().save(out);
        if let Some(value) = self {
            value.save(out);
        }
    }
    fn load(from: &mut Reader<'_>) -> Result<Self, ImportError> {
        Ok(if bool::load(from)? { Some(T::load(from)?) } else { None })
    }
}

impl<A: Image, B: Image> Image for (A, B) {
    fn save(&self, out: &mut Vec<u8>) {
        self.0.save(out);
        self.1.save(out);
    }
    fn load(from: &mut Reader<'_>) -> Result<Self, ImportError> {
        Ok((A::load(from)?, B::load(from)?))
    }
}

/// An enum without fields, by a list of all its values and a number for each.
macro_rules! named {
    ($type:ident, $what:literal, [$($value:ident = $number:literal),* $(,)?]) => {
        impl Image for $type {
            fn save(&self, out: &mut Vec<u8>) {
                let number: u8 = match self { $($type::$value => $number,)* };
                number.save(out);
            }
            fn load(from: &mut Reader<'_>) -> Result<Self, ImportError> {
                match u8::load(from)? {
                    $($number => Ok($type::$value),)*
                    _ => Err(ImportError::Invalid($what)),
                }
            }
        }
    };
}
named!(QpType, "qp_type", [Rc = 2, Uc = 3, Ud = 4]);
named!(QpState, "qp_state", [Reset = 0, Init = 1, Rtr = 2, Rts = 3, Sqd = 4, Sqe = 5, Err = 6]);
named!(PathMtu, "path_mtu", [Mtu256 = 1, Mtu512 = 2, Mtu1024 = 3, Mtu2048 = 4, Mtu4096 = 5]);
named!(
    WcStatus,
    "status",
    [
        Success = 0,
        LocLenErr = 1,
        LocQpOpErr = 2,
        LocProtErr = 4,
        WrFlushErr = 5,
        MwBindErr = 6,
        BadRespErr = 7,
        LocAccessErr = 8,
        RemInvReqErr = 9,
        RemAccessErr = 10,
        RemOpErr = 11,
        RetryExcErr = 12,
        RnrRetryExcErr = 13,
        RemAbortErr = 16,
        FatalErr = 19,
        GeneralErr = 21,
    ]
);

/// A set of flags that takes no unknown ones.
macro_rules! flags {
    ($($type:ident),*) => {$(
        impl Image for $type {
            fn save(&self, out: &mut Vec<u8>) {
                self.bits().save(out);
            }
            fn load(from: &mut Reader<'_>) -> Result<Self, ImportError> {
                $type::from_bits(u32::load(from)?).ok_or(ImportError::Invalid(stringify!($type)))
            }
        }
    )*};
}
flags!(Access, SendFlags);

image_of!(VlanTag { pcp, dei, vid });
image_of!(Sge { addr, length, lkey });

impl Image for Syndrome {
    fn save(&self, out: &mut Vec<u8>) {
        self.to_u8().save(out);
    }
    fn load(from: &mut Reader<'_>) -> Result<Self, ImportError> {
        u8::load(from).map(Syndrome::from_u8)
    }
}

impl Image for NakCode {
    fn save(&self, out: &mut Vec<u8>) {
        Syndrome::Nak(*self).save(out);
    }
    fn load(from: &mut Reader<'_>) -> Result<Self, ImportError> {
        match Syndrome::load(from)? {
            Syndrome::Nak(code) => Ok(code),
            Syndrome::Ack { .. } | Syndrome::RnrNak { .. } | Syndrome::Reserved(_) => {
                Err(ImportError::Invalid("a NAK code"))
            }
        }
    }
}

impl Image for SendOp {
    fn save(&self, out: &mut Vec<u8>) {
        match *self {
            SendOp::Send => 0u8.save(out),
            SendOp::SendImm(imm) => (1u8, imm).save(out),
            SendOp::Write { remote_addr, rkey } => (2u8, (remote_addr, rkey)).save(out),
            SendOp::WriteImm { remote_addr, rkey, imm } => (3u8, (remote_addr, (rkey, imm))).save(out),
            SendOp::Read { remote_addr, rkey } => (4u8, (remote_addr, rkey)).save(out),
            SendOp::SendInv { rkey } => (5u8, rkey).save(out),
            SendOp::CmpSwap { remote_addr, rkey, compare, swap } => {
                (6u8, ((remote_addr, rkey), (compare, swap))).save(out);
            }
            SendOp::FetchAdd { remote_addr, rkey, add } => (7u8, ((remote_addr, rkey), add)).save(out),
            SendOp::BindMw { rkey, mr, addr, len, access } => {
                (8u8, ((rkey, mr), ((addr, len), access))).save(out);
            }
            SendOp::LocalInv { rkey } => (9u8, rkey).save(out),
        }
    }
    fn load(from: &mut Reader<'_>) -> Result<Self, ImportError> {
        Ok(match u8::load(from)? {
            0 => SendOp::Send,
            1 => SendOp::SendImm(Image::load(from)?),
            2 => SendOp::Write { remote_addr: Image::load(from)?, rkey: Image::load(from)? },
            3 => SendOp::WriteImm {
                remote_addr: Image::load(from)?,
                rkey: Image::load(from)?,
                imm: Image::load(from)?,
            },
            4 => SendOp::Read { remote_addr: Image::load(from)?, rkey: Image::load(from)? },
            5 => SendOp::SendInv { rkey: Image::load(from)? },
            6 => SendOp::CmpSwap {
                remote_addr: Image::load(from)?,
                rkey: Image::load(from)?,
                compare: Image::load(from)?,
                swap: Image::load(from)?,
            },
            7 => SendOp::FetchAdd {
                remote_addr: Image::load(from)?,
                rkey: Image::load(from)?,
                add: Image::load(from)?,
            },
            8 => SendOp::BindMw {
                rkey: Image::load(from)?,
                mr: Image::load(from)?,
                addr: Image::load(from)?,
                len: Image::load(from)?,
                access: Image::load(from)?,
            },
            9 => SendOp::LocalInv { rkey: Image::load(from)? },
            _ => return Err(ImportError::Invalid("opcode")),
        })
    }
}

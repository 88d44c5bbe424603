//! One table: opcode byte -> service, operation, part, extension headers, payload rule (roce-wire 3).
//!
//! After [`Opcode::from_u8`] nobody sees a raw opcode.

/// Transport service of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Congestion notification packet.
    Cnp,
}

/// Operation of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Op {
    /// SEND, with or without immediate or invalidate.
    Send,
    /// RDMA WRITE, with or without immediate.
    Write,
    /// RDMA READ request.
    ReadRequest,
    /// RDMA READ response.
    ReadResponse,
    /// Acknowledge (ACK and all NAKs).
    Ack,
    /// Atomic acknowledge.
    AtomicAck,
    /// Compare and swap.
    CmpSwap,
    /// Fetch and add.
    FetchAdd,
    /// Congestion notification.
    Cnp,
}

/// Place of a packet in its message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Part {
    /// First of several.
    First,
    /// Neither first nor last.
    Middle,
    /// Last of several.
    Last,
    /// The whole message.
    Only,
}

/// Which payload lengths an opcode allows, P being the path MTU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PayloadRule {
    /// No payload.
    None,
    /// Exactly P.
    Full,
    /// 1 ..= P.
    OneToMtu,
    /// 0 ..= P.
    ZeroToMtu,
}

/// What the table says of an opcode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpcodeInfo {
    /// Service.
    pub service: Service,
    /// Operation.
    pub op: Op,
    /// Part.
    pub part: Part,
    /// Carries DETH.
    pub deth: bool,
    /// Carries RETH.
    pub reth: bool,
    /// Carries AtomicETH.
    pub atomic: bool,
    /// Carries immediate data.
    pub imm: bool,
    /// Carries IETH.
    pub inv: bool,
    /// Carries AETH.
    pub aeth: bool,
    /// Carries AtomicAckETH.
    pub atomic_ack: bool,
    /// Payload lengths allowed.
    pub payload: PayloadRule,
    /// Bytes of the extension headers, worked out when the table is compiled.
    ext_bytes: u8,
}

impl OpcodeInfo {
    /// Bytes of the extension headers.
    #[inline]
    pub const fn ext_bytes(&self) -> usize {
        self.ext_bytes as usize
    }

    /// Runs at compile time only, where an overflow would be an error.
    #[allow(clippy::arithmetic_side_effects)]
    const fn sum_of_headers(&self) -> u8 {
        8 * self.deth as u8
            + 16 * self.reth as u8
            + 28 * self.atomic as u8
            + 4 * self.imm as u8
            + 4 * self.inv as u8
            + 4 * self.aeth as u8
            + 8 * self.atomic_ack as u8
            + 16 * matches!(self.service, Service::Cnp) as u8
    }
}

macro_rules! opcodes {
    ($($(#[$doc:meta])* $name:ident = $byte:literal: $service:ident $op:ident $part:ident $payload:ident [$($ext:ident)*];)*) => {
        /// Every opcode that we know. The discriminant is the byte on the wire.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
        #[repr(u8)]
        pub enum Opcode { $($(#[$doc])* $name = $byte,)* }

        impl Opcode {
            /// All of them, in the order of their bytes.
            pub const ALL: &'static [Opcode] = &[$(Opcode::$name,)*];

            /// From the byte on the wire; `None` for an unknown or reserved one.
            #[inline]
            pub const fn from_u8(byte: u8) -> Option<Opcode> {
                match byte { $($byte => Some(Opcode::$name),)* _ => None }
            }

            /// The table's row.
            #[inline]
            pub const fn info(self) -> OpcodeInfo {
                match self { $(Opcode::$name => const {
                    #[allow(unused_mut)]
                    let mut i = OpcodeInfo {
                        service: Service::$service, op: Op::$op, part: Part::$part,
                        deth: false, reth: false, atomic: false, imm: false, inv: false, aeth: false,
                        atomic_ack: false, payload: PayloadRule::$payload, ext_bytes: 0,
                    };
                    $(i.$ext = true;)*
                    i.ext_bytes = i.sum_of_headers();
                    i
                })* }
            }
        }
    };
}

opcodes! {
    /// RC SEND first.
    RcSendFirst = 0x00: Rc Send First Full [];
    /// RC SEND middle.
    RcSendMiddle = 0x01: Rc Send Middle Full [];
    /// RC SEND last.
    RcSendLast = 0x02: Rc Send Last OneToMtu [];
    /// RC SEND last with immediate.
    RcSendLastImm = 0x03: Rc Send Last OneToMtu [imm];
    /// RC SEND only.
    RcSendOnly = 0x04: Rc Send Only ZeroToMtu [];
    /// RC SEND only with immediate.
    RcSendOnlyImm = 0x05: Rc Send Only ZeroToMtu [imm];
    /// RC WRITE first.
    RcWriteFirst = 0x06: Rc Write First Full [reth];
    /// RC WRITE middle.
    RcWriteMiddle = 0x07: Rc Write Middle Full [];
    /// RC WRITE last.
    RcWriteLast = 0x08: Rc Write Last OneToMtu [];
    /// RC WRITE last with immediate.
    RcWriteLastImm = 0x09: Rc Write Last OneToMtu [imm];
    /// RC WRITE only.
    RcWriteOnly = 0x0a: Rc Write Only ZeroToMtu [reth];
    /// RC WRITE only with immediate.
    RcWriteOnlyImm = 0x0b: Rc Write Only ZeroToMtu [reth imm];
    /// RC READ request.
    RcReadRequest = 0x0c: Rc ReadRequest Only None [reth];
    /// RC READ response first.
    RcReadResponseFirst = 0x0d: Rc ReadResponse First Full [aeth];
    /// RC READ response middle.
    RcReadResponseMiddle = 0x0e: Rc ReadResponse Middle Full [];
    /// RC READ response last.
    RcReadResponseLast = 0x0f: Rc ReadResponse Last OneToMtu [aeth];
    /// RC READ response only.
    RcReadResponseOnly = 0x10: Rc ReadResponse Only ZeroToMtu [aeth];
    /// RC acknowledge.
    RcAck = 0x11: Rc Ack Only None [aeth];
    /// RC atomic acknowledge.
    RcAtomicAck = 0x12: Rc AtomicAck Only None [aeth atomic_ack];
    /// RC compare and swap.
    RcCmpSwap = 0x13: Rc CmpSwap Only None [atomic];
    /// RC fetch and add.
    RcFetchAdd = 0x14: Rc FetchAdd Only None [atomic];
    /// RC SEND last with invalidate.
    RcSendLastInv = 0x16: Rc Send Last OneToMtu [inv];
    /// RC SEND only with invalidate.
    RcSendOnlyInv = 0x17: Rc Send Only ZeroToMtu [inv];
    /// UC SEND first.
    UcSendFirst = 0x20: Uc Send First Full [];
    /// UC SEND middle.
    UcSendMiddle = 0x21: Uc Send Middle Full [];
    /// UC SEND last.
    UcSendLast = 0x22: Uc Send Last OneToMtu [];
    /// UC SEND last with immediate.
    UcSendLastImm = 0x23: Uc Send Last OneToMtu [imm];
    /// UC SEND only.
    UcSendOnly = 0x24: Uc Send Only ZeroToMtu [];
    /// UC SEND only with immediate.
    UcSendOnlyImm = 0x25: Uc Send Only ZeroToMtu [imm];
    /// UC WRITE first.
    UcWriteFirst = 0x26: Uc Write First Full [reth];
    /// UC WRITE middle.
    UcWriteMiddle = 0x27: Uc Write Middle Full [];
    /// UC WRITE last.
    UcWriteLast = 0x28: Uc Write Last OneToMtu [];
    /// UC WRITE last with immediate.
    UcWriteLastImm = 0x29: Uc Write Last OneToMtu [imm];
    /// UC WRITE only.
    UcWriteOnly = 0x2a: Uc Write Only ZeroToMtu [reth];
    /// UC WRITE only with immediate.
    UcWriteOnlyImm = 0x2b: Uc Write Only ZeroToMtu [reth imm];
    /// UD SEND only.
    UdSendOnly = 0x64: Ud Send Only ZeroToMtu [deth];
    /// UD SEND only with immediate.
    UdSendOnlyImm = 0x65: Ud Send Only ZeroToMtu [deth imm];
    /// Congestion notification packet.
    Cnp = 0x81: Cnp Cnp Only None [];
}

impl Opcode {
    /// The byte on the wire.
    #[inline]
    pub const fn to_u8(self) -> u8 {
        self as u8
    }
    /// Transport service.
    #[inline]
    pub const fn service(self) -> Service {
        self.info().service
    }
    /// Operation.
    #[inline]
    pub const fn op(self) -> Op {
        self.info().op
    }
    /// Part of the message.
    #[inline]
    pub const fn part(self) -> Part {
        self.info().part
    }
    /// True for what a responder sends: READ responses, ACKs, atomic ACKs.
    #[inline]
    pub const fn is_response(self) -> bool {
        matches!(self.op(), Op::ReadResponse | Op::Ack | Op::AtomicAck)
    }
}

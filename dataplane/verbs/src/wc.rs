//! Work completions.

use ferroce_wire::{Imm, Qpn, Rkey};

/// Status of a completion, with libibverbs' numbers (`ibv_wc_status`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum WcStatus {
    /// Done.
    Success = 0,
    /// Local buffers do not fit the message.
    LocLenErr = 1,
    /// Internal QP error.
    LocQpOpErr = 2,
    /// Local key, bounds or protection domain wrong.
    LocProtErr = 4,
    /// The QP went to error before this was done.
    WrFlushErr = 5,
    /// Window bind refused.
    MwBindErr = 6,
    /// Malformed or unexpected response.
    BadRespErr = 7,
    /// Local protection error while receiving.
    LocAccessErr = 8,
    /// The peer answered NAK invalid request.
    RemInvReqErr = 9,
    /// The peer answered NAK remote access error.
    RemAccessErr = 10,
    /// The peer answered NAK remote operational error.
    RemOpErr = 11,
    /// Transport retries exhausted.
    RetryExcErr = 12,
    /// Receiver-not-ready retries exhausted.
    RnrRetryExcErr = 13,
    /// The responder aborted the operation.
    RemAbortErr = 16,
    /// Unrecoverable.
    FatalErr = 19,
    /// Other.
    GeneralErr = 21,
}

impl WcStatus {
    /// All of them. What libibverbs has beside these belongs to reliable datagrams, management and tag matching.
    pub const ALL: [WcStatus; 16] = [
        WcStatus::Success,
        WcStatus::LocLenErr,
        WcStatus::LocQpOpErr,
        WcStatus::LocProtErr,
        WcStatus::WrFlushErr,
        WcStatus::MwBindErr,
        WcStatus::BadRespErr,
        WcStatus::LocAccessErr,
        WcStatus::RemInvReqErr,
        WcStatus::RemAccessErr,
        WcStatus::RemOpErr,
        WcStatus::RetryExcErr,
        WcStatus::RnrRetryExcErr,
        WcStatus::RemAbortErr,
        WcStatus::FatalErr,
        WcStatus::GeneralErr,
    ];
}

/// Opcode of a completion, with libibverbs' numbers (`ibv_wc_opcode`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum WcOpcode {
    /// SEND done.
    Send = 0,
    /// RDMA WRITE done.
    RdmaWrite = 1,
    /// RDMA READ done.
    RdmaRead = 2,
    /// Compare and swap done.
    CompSwap = 3,
    /// Fetch and add done.
    FetchAdd = 4,
    /// Window bound.
    BindMw = 5,
    /// Local invalidate done.
    LocalInv = 6,
    /// SEND received.
    Recv = 128,
    /// WRITE with immediate received.
    RecvRdmaWithImm = 129,
}

bitflags::bitflags! {
    /// Flags of a completion, with libibverbs' numbers (`ibv_wc_flags`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct WcFlags: u32 {
        /// The first 40 bytes of the buffer are the GRH area.
        const GRH = 1;
        /// `imm` is valid.
        const WITH_IMM = 2;
        /// `invalidated` is valid.
        const WITH_INV = 8;
    }
}

/// A work completion. With a status other than success only `wr_id`, `status`, `qpn` and `vendor_err` are valid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wc {
    /// From the work request.
    pub wr_id: u64,
    /// What became of it.
    pub status: WcStatus,
    /// What it was.
    pub opcode: WcOpcode,
    /// Bytes received, read, or 8 for an atomic.
    pub byte_len: u32,
    /// Immediate data when flagged.
    pub imm: Imm,
    /// Key invalidated by the peer when flagged.
    pub invalidated: Rkey,
    /// The local queue pair.
    pub qpn: Qpn,
    /// The sender's queue pair (UD).
    pub src_qpn: Qpn,
    /// Flags.
    pub flags: WcFlags,
    /// Detail of an error: our own code, 0 if none.
    pub vendor_err: u32,
    /// True when the completion belongs to the receive queue.
    pub is_recv: bool,
    /// True when the peer asked for a solicited event, or the status is an error.
    pub solicited: bool,
}

impl Wc {
    /// A completion that says nothing: what empty slots and callers' arrays hold. Its status is no success.
    pub const EMPTY: Wc = Wc {
        wr_id: 0,
        status: WcStatus::GeneralErr,
        opcode: WcOpcode::Send,
        byte_len: 0,
        imm: Imm([0; 4]),
        invalidated: Rkey(0),
        qpn: Qpn::new(0),
        src_qpn: Qpn::new(0),
        flags: WcFlags::empty(),
        vendor_err: 0,
        is_recv: false,
        solicited: false,
    };
}

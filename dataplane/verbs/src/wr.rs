//! Work requests.

use ferroce_mem::Lkey;
use ferroce_wire::{Imm, RemoteAddr, Rkey};

/// Scatter/gather entry: `length` bytes at `addr` (the region's own address space) under `lkey`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sge {
    /// First byte, in the region's address space (its `iova`).
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// Key of the region.
    pub lkey: Lkey,
}

bitflags::bitflags! {
    /// Flags of a send work request, with libibverbs' numbers (`ibv_send_flags`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
    pub struct SendFlags: u32 {
        /// Do not start before all earlier READs and atomics are complete.
        const FENCE = 1;
        /// Produce a completion on success.
        const SIGNALED = 2;
        /// Ask for a solicited event at the peer.
        const SOLICITED = 4;
        /// Copy the data at post; keys of the entries are not used.
        const INLINE = 8;
    }
}

/// Operation of a send work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SendOp {
    /// SEND.
    Send,
    /// SEND with immediate data.
    SendImm(Imm),
    /// RDMA WRITE.
    Write {
        /// Where to, in the peer's address space.
        remote_addr: RemoteAddr,
        /// The peer's key.
        rkey: Rkey,
    },
    /// RDMA WRITE with immediate data: consumes a receive at the peer.
    WriteImm {
        /// Where to, in the peer's address space.
        remote_addr: RemoteAddr,
        /// The peer's key.
        rkey: Rkey,
        /// Delivered to the peer.
        imm: Imm,
    },
    /// RDMA READ into the scatter list.
    Read {
        /// Where from, in the peer's address space.
        remote_addr: RemoteAddr,
        /// The peer's key.
        rkey: Rkey,
    },
}

/// A send work request.
#[derive(Clone, Copy, Debug)]
pub struct SendWr<'a> {
    /// Opaque, returned in the completion.
    pub wr_id: u64,
    /// What to do.
    pub op: SendOp,
    /// Local memory. Empty when `inline` is used.
    pub sg_list: &'a [Sge],
    /// Data copied at post when [`SendFlags::INLINE`] is set; at most the QP's `max_inline_data` bytes.
    pub inline: &'a [u8],
    /// Flags.
    pub flags: SendFlags,
}

/// A receive work request.
#[derive(Clone, Copy, Debug)]
pub struct RecvWr<'a> {
    /// Opaque, returned in the completion.
    pub wr_id: u64,
    /// Where received data goes, in order.
    pub sg_list: &'a [Sge],
}

//! Work requests.

use ferroce_mem::{Access, Lkey};
use ferroce_wire::{Imm, Qkey, Qpn, RemoteAddr, Rkey};

use crate::attr::Ah;

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
    /// SEND that also ends a window of the peer, which learns of it with the message (RC).
    SendInv {
        /// Key of the peer's window.
        rkey: Rkey,
    },
    /// Compare and swap of the 8 bytes at `remote_addr`, taken as a number in the peer's byte order; what they were
    /// goes to the scatter list in ours (RC). The list has 8 bytes.
    CmpSwap {
        /// Where, in the peer's address space; a multiple of 8.
        remote_addr: RemoteAddr,
        /// The peer's key.
        rkey: Rkey,
        /// Compared with what is there.
        compare: u64,
        /// Written if they are equal.
        swap: u64,
    },
    /// Fetch and add, wrapping; otherwise as [`SendOp::CmpSwap`] (RC).
    FetchAdd {
        /// Where, in the peer's address space; a multiple of 8.
        remote_addr: RemoteAddr,
        /// The peer's key.
        rkey: Rkey,
        /// Added to what is there.
        add: u64,
    },
    /// Binds a type 2 window (RC, UC). A local operation: nothing travels, the scatter list is empty.
    BindMw {
        /// The key that the window gets: the upper 24 bits name the window, the lowest 8 are chosen by the caller and
        /// differ from those of its last key (`ibv_inc_rkey`).
        rkey: Rkey,
        /// The region. Registered with [`Access::MW_BIND`].
        mr: Lkey,
        /// First byte, in the region's address space.
        addr: u64,
        /// Bytes, at least 1.
        len: u64,
        /// Remote rights of the window.
        access: Access,
    },
    /// Ends a window of this queue pair (RC, UC). A local operation that waits until all earlier requests are complete.
    LocalInv {
        /// The window's key.
        rkey: Rkey,
    },
}

/// Where a datagram goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UdDest {
    /// The way there.
    pub ah: Ah,
    /// The peer's queue pair, or [`Qpn::MULTICAST`].
    pub remote_qpn: Qpn,
    /// The queue key that the packet carries; if bit 31 is set the sending queue pair's own is taken instead.
    pub remote_qkey: Qkey,
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
    /// Where to: needed by a UD queue pair, not looked at by others.
    pub ud: Option<&'a UdDest>,
}

impl Default for SendWr<'_> {
    /// An empty, unsignalled SEND: a base for `..`.
    fn default() -> Self {
        SendWr { wr_id: 0, op: SendOp::Send, sg_list: &[], inline: &[], flags: SendFlags::empty(), ud: None }
    }
}

/// A receive work request.
#[derive(Clone, Copy, Debug)]
pub struct RecvWr<'a> {
    /// Opaque, returned in the completion.
    pub wr_id: u64,
    /// Where received data goes, in order.
    pub sg_list: &'a [Sge],
}

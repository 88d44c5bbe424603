//! Work as it was posted: what the checker remembers of each request, and how it reads real memory.
//!
//! Data only. Made by [`crate::workload`] and [`crate::run`], held by [`crate::checker`].

use std::rc::Rc;

use ferroce_verbs::{Gid, Qpn, Rkey};

/// How the checker reads real memory.
pub trait Bytes {
    /// `len` bytes at `offset` of an endpoint's region.
    fn read(&self, endpoint: usize, offset: usize, len: usize) -> Vec<u8>;
    /// True if this key of an endpoint's window opens anything.
    fn is_bound(&self, endpoint: usize, rkey: Rkey) -> bool;
}

/// Operation of a send.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpKind {
    /// SEND, with or without immediate.
    Send,
    /// RDMA WRITE, with or without immediate.
    Write,
    /// RDMA READ.
    Read,
    /// Compare and swap.
    CmpSwap,
    /// Fetch and add.
    FetchAdd,
    /// Bind of a window: nothing travels.
    BindMw,
    /// End of a window of one's own: nothing travels.
    LocalInv,
}

impl OpKind {
    /// Works on a cell of the peer's memory.
    pub const fn is_atomic(self) -> bool {
        matches!(self, OpKind::CmpSwap | OpKind::FetchAdd)
    }
    /// Touches the slot of the peer that the request owns.
    pub const fn has_remote_slot(self) -> bool {
        matches!(self, OpKind::Write | OpKind::Read)
    }
}

/// Operands of an atomic.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Operands {
    /// Compared with the cell (compare and swap).
    pub compare: u64,
    /// Written, or added.
    pub value: u64,
}

/// Offset and length in a region.
pub type Piece = (usize, usize);

/// A send as it was posted.
#[derive(Clone, Debug)]
pub struct SendRecord {
    /// From the work request.
    pub wr_id: u64,
    /// What.
    pub kind: OpKind,
    /// Immediate data.
    pub imm: Option<[u8; 4]>,
    /// A success gives a completion.
    pub signaled: bool,
    /// The peer's receive is to be solicited.
    pub solicited: bool,
    /// The bytes that move, in either direction.
    pub data: Rc<[u8]>,
    /// Local pieces (empty when posted inline).
    pub local: Vec<Piece>,
    /// Offset in the peer's region, for WRITE, READ and atomics.
    pub remote: usize,
    /// Window key: the peer's that a SEND ends or a WRITE goes through, or one's own to bind or end.
    pub window: Option<Rkey>,
    /// Of an atomic.
    pub operands: Operands,
    /// The peer must not take it: its queue key is wrong (UD).
    pub unwelcome: bool,
    /// Goes to a group, and not to the peer (UD).
    pub group: Option<ToGroup>,
}

/// Where a datagram to a group goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ToGroup {
    /// Number of the group.
    pub group: usize,
    /// The sender's address.
    pub sgid: Gid,
    /// The sender.
    pub from: Qpn,
}

impl SendRecord {
    /// Consumes a receive at the peer.
    pub fn consumes(&self) -> bool {
        self.kind == OpKind::Send || (self.kind == OpKind::Write && self.imm.is_some())
    }
}

/// What a direction promises.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Everything arrives, once and in order.
    Reliable,
    /// Messages arrive whole or not at all (UC). A packet that the wire doubles or holds back is by specification a
    /// message again; without such packets the order is kept, and nothing comes twice.
    Whole {
        /// The wire neither doubles nor holds back.
        ordered: bool,
    },
    /// Datagrams arrive whole or not at all, behind 40 bytes with their IP header (UD).
    Datagrams {
        /// The wire does not double.
        once: bool,
        /// Addresses: source, destination.
        gids: [Gid; 2],
        /// The sender.
        from: Qpn,
    },
}

/// Bytes before the payload of a datagram.
pub(crate) const GRH: usize = 40;

/// A receive as it was posted.
#[derive(Clone, Debug)]
pub struct RecvRecord {
    /// From the work request.
    pub wr_id: u64,
    /// Where data goes.
    pub pieces: Vec<Piece>,
}

//! Parameters of queue pairs, and registered memory.

use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use super::bench::ALL;
use super::{End, Failure, Outcome};
use crate::{Access, MrKeys, PathMtu, Pkey, QpCap, QpType, RemoteAddr, SendOp, Sge, SrqId};

/// How queue pairs are made and connected.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// Type.
    pub qp_type: QpType,
    /// Path MTU.
    pub mtu: PathMtu,
    /// Partition.
    pub pkey: Pkey,
    /// Remote rights of the queue pair.
    pub access: Access,
    /// ACK timeout.
    pub timeout: u8,
    /// Transport retries.
    pub retry_cnt: u8,
    /// RNR retries.
    pub rnr_retry: u8,
    /// READs and atomics at once, both ways.
    pub rd_atomic: u8,
    /// Sizes.
    pub cap: QpCap,
    /// Every send gives a completion.
    pub sq_sig_all: bool,
    /// Entries of each completion queue.
    pub cqe: u32,
    /// Receives come from here.
    pub srq: Option<SrqId>,
}

impl Default for Params {
    fn default() -> Self {
        let cap =
            QpCap { max_send_wr: 32, max_recv_wr: 32, max_send_sge: 4, max_recv_sge: 4, max_inline_data: 64 };
        Params {
            qp_type: QpType::Rc,
            mtu: PathMtu::Mtu1024,
            pkey: Pkey::DEFAULT,
            access: ALL,
            // About a second: a loaded machine takes a core away for longer than a tight timeout.
            timeout: 18,
            retry_cnt: 7,
            rnr_retry: 7,
            rd_atomic: 4,
            cap,
            sq_sig_all: false,
            cqe: 128,
            srq: None,
        }
    }
}

impl Params {
    /// Unreliable connections.
    pub fn uc() -> Params {
        Params { qp_type: QpType::Uc, ..Params::default() }
    }
    /// Datagrams.
    pub fn ud() -> Params {
        Params { qp_type: QpType::Ud, ..Params::default() }
    }
    /// A peer that does not answer is given up soon.
    pub fn impatient() -> Params {
        Params { timeout: 8, retry_cnt: 1, ..Params::default() }
    }
}

/// Registered memory.
pub struct Buffer<B> {
    /// Whose it is.
    pub end: End,
    /// Its keys.
    pub keys: MrKeys,
    pub(super) block: B,
}

impl<B: super::Block> Buffer<B> {
    /// `length` bytes from `at` on, for a scatter list.
    pub fn sge(&self, at: usize, length: usize) -> Sge {
        Sge { addr: self.keys.iova + at as u64, length: length as u32, lkey: self.keys.lkey }
    }
    /// The address for peers.
    pub fn remote(&self, at: usize) -> RemoteAddr {
        RemoteAddr(self.keys.iova + at as u64)
    }
    /// WRITE to `at`.
    pub fn write_op(&self, at: usize) -> SendOp {
        SendOp::Write { remote_addr: self.remote(at), rkey: self.keys.rkey }
    }
    /// READ from `at`.
    pub fn read_op(&self, at: usize) -> SendOp {
        SendOp::Read { remote_addr: self.remote(at), rkey: self.keys.rkey }
    }
    /// Writes bytes.
    pub fn put(&self, at: usize, bytes: &[u8]) {
        self.block.write(at, bytes);
    }
    /// Fills with a pattern of `seed`.
    pub fn fill(&self, at: usize, len: usize, seed: u64) {
        self.block.write(at, &pattern(len, seed));
    }
    /// Reads bytes.
    pub fn get(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.block.read(at, &mut bytes);
        bytes
    }
    /// A number in the machine's byte order.
    pub fn number(&self, at: usize) -> u64 {
        let mut bytes = [0; 8];
        self.block.read(at, &mut bytes);
        u64::from_ne_bytes(bytes)
    }
    /// Fails unless the pattern of `seed` is there.
    #[track_caller]
    pub fn check(&self, what: &str, at: usize, len: usize, seed: u64) -> Outcome {
        let (found, wanted) = (self.get(at, len), pattern(len, seed));
        match found.iter().zip(&wanted).position(|(f, w)| f != w) {
            None => Ok(()),
            Some(byte) => Err(Failure::new(format!(
                "{what}: byte {byte} of {len} is {:#04x}, not {:#04x}",
                found[byte], wanted[byte]
            ))),
        }
    }
}

/// Bytes that differ by place and by seed.
pub(super) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64)
        .map(|i| (i.wrapping_mul(31).wrapping_add(seed.wrapping_mul(101)) ^ (i >> 8)) as u8)
        .collect()
}

//! Registered memory with guards around each region, and what of it changed.
//!
//! Owns the bytes. Invariant: they stay where they are as long as the key table that names them, which the same
//! [`super::host::Host`] owns; queue pairs write them through `Memory` only, and no reference into them is ever made.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use ferroce_mem::{Access, Memory, MrInfo, MrInit, PdId};

/// Protection domain of the queue pairs.
pub const PD: PdId = PdId(7);
/// Bytes of a buffer.
pub const BYTES: usize = 0x5c00;

/// A region's place in the buffer and in its own address space, and its rights.
#[derive(Clone, Copy)]
pub struct Plan {
    /// Offset.
    pub offset: usize,
    /// Bytes.
    pub len: usize,
    /// First address.
    pub iova: u64,
    /// Rights.
    pub access: Access,
    /// Protection domain.
    pub pd: PdId,
}

const LOCAL: Access = Access::LOCAL_WRITE;
const ALL: Access = Access::all();

const fn plan(offset: usize, len: usize, iova: u64, access: Access, pd: PdId) -> Plan {
    Plan { offset, len, iova, access, pd }
}

/// Everything that is registered at the start; guards lie between.
pub const PLANS: [Plan; 7] = [
    plan(0x100, 0x1800, 0x10_0000, ALL, PD),
    plan(0x2000, 0x800, 0x20_0000, LOCAL, PD),
    plan(0x2900, 0x800, 0x30_0000, Access::REMOTE_READ, PD),
    // Its end is the end of the address space.
    plan(0x3200, 0x800, u64::MAX - 0x800, LOCAL.union(Access::REMOTE_WRITE), PD),
    plan(0x3b00, 0x800, 0x50_0000, ALL, PdId(8)),
    // Addresses that are multiples of 8 lie at others here.
    plan(0x4404, 0x7f5, 0x60_0000, ALL, PD),
    plan(0x5000, 0x800, 0x70_0000, LOCAL.union(Access::MW_BIND), PD),
];

/// What is there at first.
static PATTERN: [u8; BYTES] = {
    let mut bytes = [0; BYTES];
    let mut at = 0;
    while at < BYTES {
        bytes[at] = (at ^ (at >> 8).wrapping_mul(31)) as u8;
        at += 1;
    }
    bytes
};

/// The bytes.
pub struct Buffer {
    base: NonNull<u8>,
}

impl Buffer {
    const LAYOUT: Layout = match Layout::from_size_align(BYTES, 64) {
        Ok(layout) => layout,
        Err(_) => panic!("a layout"),
    };

    /// With a recognisable byte at each offset.
    pub fn new() -> Buffer {
        // SAFETY: the size is not 0.
        let base = NonNull::new(unsafe { alloc_zeroed(Buffer::LAYOUT) }).expect("memory");
        // SAFETY: as many bytes were just allocated, and nobody else knows of them.
        unsafe { std::ptr::copy_nonoverlapping(PATTERN.as_ptr(), base.as_ptr(), BYTES) };
        Buffer { base }
    }

    /// What is there now.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = vec![0; BYTES];
        // SAFETY: all of it is initialised, and nobody writes it meanwhile: everything runs on one thread.
        unsafe { std::ptr::copy_nonoverlapping(self.base.as_ptr(), out.as_mut_ptr(), BYTES) };
        out
    }

    /// True if it is all as in `bytes`.
    pub fn is(&self, bytes: &[u8]) -> bool {
        assert_eq!(bytes.len(), BYTES);
        // SAFETY: as in `to_vec`; the reference ends with the comparison.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), BYTES) == bytes }
    }

    /// Registers what is planned.
    pub fn register(&self, memory: &mut Memory, plan: &Plan) -> MrInfo {
        assert!(plan.offset + plan.len <= BYTES);
        // SAFETY: inside the buffer, as just checked.
        let base = unsafe { self.base.add(plan.offset) };
        let init = MrInit { pd: plan.pd, access: plan.access, iova: plan.iova, base, len: plan.len as u64 };
        // SAFETY: the host drops its table and its buffer together and uses neither afterwards.
        unsafe { memory.register(init) }.expect("registers")
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated so in `new`; the table that names it is not used any more.
        unsafe { dealloc(self.base.as_ptr(), Buffer::LAYOUT) };
    }
}

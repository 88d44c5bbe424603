//! [`Payload`]: the bytes of a received packet, wherever they lie.

use core::marker::PhantomData;
use core::ptr::NonNull;

/// At most this many pieces make up one payload (head remainder, then segments).
pub const MAX_PIECES: usize = 4;

/// A source for copy and CRC only: the pieces may be memory that the sender can still write (`shm`).
#[derive(Clone, Copy, Debug)]
pub struct Payload<'f> {
    pub(crate) pieces: [(NonNull<u8>, u32); MAX_PIECES],
    pub(crate) count: u8,
    pub(crate) len: u32,
    pub(crate) frame: PhantomData<&'f u8>,
}

impl<'f> Payload<'f> {
    /// No bytes.
    pub const EMPTY: Payload<'static> =
        Payload { pieces: [(NonNull::dangling(), 0); MAX_PIECES], count: 0, len: 0, frame: PhantomData };
    /// Bytes.
    pub const fn len(&self) -> usize {
        self.len as usize
    }
    /// True when there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
    // Owner of this crate:
    //   from_slice(&'f [u8]) -> Payload<'f>                     private bytes
    //   unsafe push_raw(&mut self, NonNull<u8>, len) -> bool    a piece that lives for 'f
    //   crc(&self, seed: u32) -> u32                            CRC-32 continued from a finalised CRC
    //   copy_to(&self, &mut [u8])                               private copy, for UD heads, MADs, tests
    //   slice(&self, offset, len) -> Option<Payload<'f>>
}

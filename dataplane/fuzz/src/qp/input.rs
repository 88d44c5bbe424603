//! [`Input`]: what a fuzzer gives, as a source of choices. Owns nothing; runs dry, and gives zeros then.

/// The bytes that are left.
pub struct Input<'a> {
    rest: &'a [u8],
}

impl<'a> Input<'a> {
    /// Over `data`.
    pub fn new(data: &'a [u8]) -> Self {
        Input { rest: data }
    }
    /// No bytes are left.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
    /// The next `len` bytes, or as many as are left.
    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (bytes, rest) = self.rest.split_at(len.min(self.rest.len()));
        self.rest = rest;
        bytes
    }
    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let bytes = self.bytes(N);
        out[..bytes.len()].copy_from_slice(bytes);
        out
    }
    /// A byte.
    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }
    /// A number of 16 bits.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }
    /// A number of 32 bits.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }
    /// A number of 64 bits.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }
    /// Yes or no.
    pub fn flag(&mut self) -> bool {
        self.u8() & 1 == 1
    }
    /// Below `end`, which is 1 ..= 256.
    pub fn below(&mut self, end: usize) -> usize {
        usize::from(self.u8()) % end
    }
    /// One of `choices`.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

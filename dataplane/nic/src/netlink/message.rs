//! Netlink messages: building requests, walking answers.
//!
//! Owns the byte layout of headers and attributes (4-byte alignment, host byte order) and nothing else. Invariant:
//! every length that an answer contains is checked before use; a malformed rest ends the walk. Called by the sibling
//! modules; never opens a socket.

/// Bytes of `struct nlmsghdr`.
pub(super) const HEADER_BYTES: usize = 16;

/// Flag: this is a request.
pub(super) const NLM_F_REQUEST: u16 = 0x01;
/// Flag: answer with an acknowledgement.
pub(super) const NLM_F_ACK: u16 = 0x04;
/// Flag of an answer: the dump was interrupted by a change and may be inconsistent.
pub(super) const NLM_F_DUMP_INTR: u16 = 0x10;
/// Flag: replace an existing object.
pub(super) const NLM_F_REPLACE: u16 = 0x100;
/// Flags: everything of that kind.
pub(super) const NLM_F_DUMP: u16 = 0x300;
/// Flag: create the object if it is not there.
pub(super) const NLM_F_CREATE: u16 = 0x400;
/// Message type: error or acknowledgement.
pub(super) const NLMSG_ERROR: u16 = 2;
/// Message type: end of a dump.
pub(super) const NLMSG_DONE: u16 = 3;

/// A request being built.
pub(super) struct Request {
    bytes: Vec<u8>,
}

impl Request {
    /// A request of type `kind` whose fixed part is `fixed`.
    pub fn new(kind: u16, flags: u16, fixed: &[u8]) -> Self {
        let mut bytes = Vec::with_capacity(128);
        bytes.extend_from_slice(&0u32.to_ne_bytes());
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(&(flags | NLM_F_REQUEST).to_ne_bytes());
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(fixed);
        let mut request = Request { bytes };
        request.pad();
        request
    }

    /// Appends an attribute.
    pub fn attr(mut self, kind: u16, value: &[u8]) -> Self {
        let len = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
        self.bytes.extend_from_slice(&len.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.pad();
        self
    }

    /// The finished message with sequence number `seq`.
    pub fn finish(mut self, seq: u32) -> Vec<u8> {
        let len = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        self.bytes[0..4].copy_from_slice(&len.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&seq.to_ne_bytes());
        self.bytes
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// One message of an answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message<'b> {
    /// Type.
    pub kind: u16,
    /// Flags.
    pub flags: u16,
    /// Sequence number of the request that it answers.
    pub seq: u32,
    /// What follows the header.
    pub body: &'b [u8],
}

/// The messages in one datagram; a malformed rest ends the walk.
pub(super) fn messages(mut rest: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let len = read_u32(rest, 0)? as usize;
        if len < HEADER_BYTES || len > rest.len() {
            return None;
        }
        let (message, _) = rest.split_at_checked(len)?;
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some(Message {
            kind: read_u16(message, 4)?,
            flags: read_u16(message, 6)?,
            seq: read_u32(message, 8)?,
            body: message.get(HEADER_BYTES..)?,
        })
    })
}

/// The attributes that follow the first `skip` bytes of `body`; a malformed rest ends the walk. The two flag bits of
/// the type (nested, byte order) are cleared.
pub(super) fn attributes(body: &[u8], skip: usize) -> impl Iterator<Item = (u16, &[u8])> {
    let mut rest = body.get(skip.next_multiple_of(4)..).unwrap_or_default();
    std::iter::from_fn(move || {
        let len = read_u16(rest, 0)? as usize;
        let kind = read_u16(rest, 2)? & 0x3fff;
        let value = rest.get(4..len)?;
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// A 16-bit number in host order.
pub(super) fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

/// A 32-bit number in host order.
pub(super) fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_request_reads_back() {
        let bytes = Request::new(18, NLM_F_DUMP, &[7; 5]).attr(3, b"eth0\0").attr(9, &[]).finish(77);
        let message = messages(&bytes).next().unwrap();
        assert_eq!((message.kind, message.flags, message.seq), (18, NLM_F_DUMP | NLM_F_REQUEST, 77));
        let found: Vec<_> = attributes(message.body, 5).collect();
        assert_eq!(found, vec![(3, &b"eth0\0"[..]), (9, &[][..])]);
        assert_eq!(messages(&bytes).count(), 1);
    }

    #[test]
    fn a_length_beyond_the_end_ends_the_walk() {
        let mut bytes = Request::new(18, 0, &[]).attr(3, b"eth0\0").finish(1);
        bytes[0] = 200;
        assert_eq!(messages(&bytes).count(), 0);
        bytes[0] = 3;
        assert_eq!(messages(&bytes).count(), 0);
        assert_eq!(attributes(&[3, 0, 1, 0, 9], 0).count(), 0);
    }

    proptest! {
        #[test]
        fn no_bytes_panic_the_walk(bytes in proptest::collection::vec(any::<u8>(), 0..256), skip in 0usize..40) {
            for message in messages(&bytes) {
                for (_, value) in attributes(message.body, skip) {
                    prop_assert!(value.len() <= bytes.len());
                }
            }
        }
    }
}

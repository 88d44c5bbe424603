//! What the two sides of a link tell each other before they share memory.
//!
//! Owns the layout of the three messages and the rules for what fits together. Invariant: decoding is total; magic and
//! version come first in every version, so that different versions can name each other. Called by the rendezvous.
//! Never touches a socket.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::ring::Geometry;
use crate::port::PortError;

/// First bytes of every message.
const MAGIC: [u8; 8] = *b"FERRSHM\0";
/// Version of messages and rings.
pub(crate) const VERSION: u16 = 1;
/// Most addresses a side may have.
pub(crate) const MAX_ADDRESSES: usize = 32;
/// Longest message.
pub(crate) const MAX_BYTES: usize = 1024;
/// Longest text of a refusal.
const MAX_TEXT: usize = 512;

const KIND_HELLO: u8 = 1;
const KIND_REFUSE: u8 = 2;
const KIND_READY: u8 = 3;

/// One side of a link.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Hello {
    pub mac: [u8; 6],
    pub mtu: u32,
    pub geometry: Geometry,
    /// Its workers may sleep, so flushes must look for that.
    pub sleeps: bool,
    pub addresses: Vec<(IpAddr, u8)>,
}

/// A message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Message {
    Hello(Hello),
    /// Why the sender wants no link with the receiver.
    Refuse(String),
    /// The receiver's memory is mapped and in use.
    Ready,
}

/// Why bytes are no message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BadMessage {
    /// Whoever sent them speaks something else.
    NotOurs,
    /// Another version of ours.
    Version(u16),
    /// Ours, but cut short or with impossible values.
    Malformed,
}

impl Message {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(VERSION.to_le_bytes());
        match self {
            Message::Hello(hello) => {
                out.push(KIND_HELLO);
                hello.encode(&mut out);
            }
            Message::Refuse(text) => {
                out.push(KIND_REFUSE);
                let mut end = text.len().min(MAX_TEXT);
                while !text.is_char_boundary(end) {
                    end -= 1;
                }
                out.extend(text.bytes().take(end));
            }
            Message::Ready => out.push(KIND_READY),
        }
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<Message, BadMessage> {
        let mut input = Reader(bytes);
        if input.array() != Some(MAGIC) {
            return Err(BadMessage::NotOurs);
        }
        let version = input.array().map(u16::from_le_bytes).ok_or(BadMessage::Malformed)?;
        if version != VERSION {
            return Err(BadMessage::Version(version));
        }
        let message = match input.byte() {
            Some(KIND_HELLO) => Hello::decode(&mut input).map(Message::Hello),
            Some(KIND_REFUSE) => Some(Message::Refuse(String::from_utf8_lossy(input.rest()).into_owned())),
            Some(KIND_READY) => Some(Message::Ready),
            _ => None,
        };
        match message {
            Some(message) if input.0.is_empty() => Ok(message),
            _ => Err(BadMessage::Malformed),
        }
    }
}

impl Hello {
    fn encode(&self, out: &mut Vec<u8>) {
        out.push(u8::from(self.sleeps));
        out.extend(self.mac);
        out.extend(self.mtu.to_le_bytes());
        out.extend(self.geometry.queues.to_le_bytes());
        out.extend(self.geometry.ring_bytes.to_le_bytes());
        out.push(self.addresses.len().min(MAX_ADDRESSES) as u8);
        for (ip, prefix) in self.addresses.iter().take(MAX_ADDRESSES) {
            match ip {
                IpAddr::V4(v4) => {
                    out.push(4);
                    out.extend(v4.octets());
                }
                IpAddr::V6(v6) => {
                    out.push(6);
                    out.extend(v6.octets());
                }
            }
            out.push(*prefix);
        }
    }

    fn decode(input: &mut Reader<'_>) -> Option<Hello> {
        let sleeps = match input.byte()? {
            0 => false,
            1 => true,
            _ => return None,
        };
        let mac = input.array()?;
        let mtu = u32::from_le_bytes(input.array()?);
        let queues = u16::from_le_bytes(input.array()?);
        let ring_bytes = u32::from_le_bytes(input.array()?);
        let count = usize::from(input.byte()?);
        if count > MAX_ADDRESSES {
            return None;
        }
        let mut addresses = Vec::with_capacity(count);
        for _ in 0..count {
            let (ip, longest): (IpAddr, u8) = match input.byte()? {
                4 => (Ipv4Addr::from(input.array::<4>()?).into(), 32),
                6 => (Ipv6Addr::from(input.array::<16>()?).into(), 128),
                _ => return None,
            };
            let prefix = input.byte().filter(|&prefix| prefix <= longest)?;
            addresses.push((ip, prefix));
        }
        Some(Hello { mac, mtu, geometry: Geometry { queues, ring_bytes }, sleeps, addresses })
    }

    /// Checks what both sides must agree on. The error is in the words of `self`'s side; `peer` names the other one.
    pub fn check(&self, theirs: &Hello, peer: &str) -> Result<(), PortError> {
        let refuse = |attribute: &str, ours: String, theirs: String, hint: &str| {
            Err(PortError {
                attribute: attribute.into(),
                asked: format!("{ours} here"),
                allowed: format!("{theirs} at {peer}"),
                hint: hint.into(),
            })
        };
        if self.geometry.queues != theirs.geometry.queues {
            let (ours, theirs) = (self.geometry.queues.to_string(), theirs.geometry.queues.to_string());
            return refuse("queues", ours, theirs, "give both sides of a shm link as many workers");
        }
        if self.mtu != theirs.mtu {
            let hint = "set the same mtu on both sides of a shm link";
            return refuse("mtu", self.mtu.to_string(), theirs.mtu.to_string(), hint);
        }
        if self.mac == theirs.mac {
            let mac = mac_text(self.mac);
            return refuse("mac", mac, "the same".into(), "leave mac out, or give each side one of its own");
        }
        let shared =
            self.addresses.iter().find(|(ip, _)| theirs.addresses.iter().any(|(other, _)| other == ip));
        if let Some((ip, _)) = shared {
            let hint = "give each side of a shm link its own addresses";
            return refuse("addresses", ip.to_string(), "the same".into(), hint);
        }
        Ok(())
    }
}

/// An Ethernet address as people write it.
pub(crate) fn mac_text(mac: [u8; 6]) -> String {
    let parts: Vec<String> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
    parts.join(":")
}

/// What is left to decode.
struct Reader<'b>(&'b [u8]);

impl<'b> Reader<'b> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }
    fn byte(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }
    fn rest(&mut self) -> &'b [u8] {
        std::mem::take(&mut self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(crate) fn hello() -> Hello {
        Hello {
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 9000,
            geometry: Geometry { queues: 2, ring_bytes: 1 << 20 },
            sleeps: true,
            addresses: vec![("10.0.0.1".parse().unwrap(), 24), ("fd00::1".parse().unwrap(), 64)],
        }
    }

    #[test]
    fn messages_come_back_as_they_were() {
        for message in [Message::Hello(hello()), Message::Refuse("no".into()), Message::Ready] {
            let bytes = message.encode();
            assert!(bytes.len() <= MAX_BYTES);
            assert_eq!(Message::decode(&bytes), Ok(message));
            for len in 0..bytes.len() {
                assert!(Message::decode(&bytes[..len]).is_err() || bytes[10] == KIND_REFUSE, "{len}");
            }
        }
        let most = Hello { addresses: vec![("fd00::1".parse().unwrap(), 64); 100], ..hello() };
        let bytes = Message::Hello(most).encode();
        assert!(bytes.len() <= MAX_BYTES, "{}", bytes.len());
        assert!(
            matches!(Message::decode(&bytes), Ok(Message::Hello(h)) if h.addresses.len() == MAX_ADDRESSES)
        );
        let long = Message::Refuse("ß".repeat(1000)).encode();
        assert!(long.len() <= MAX_BYTES && Message::decode(&long).is_ok());
    }

    #[test]
    fn strangers_and_other_versions_are_told_apart() {
        assert_eq!(Message::decode(b"GET / HTTP/1.1\r\n"), Err(BadMessage::NotOurs));
        assert_eq!(Message::decode(b""), Err(BadMessage::NotOurs));
        let mut other = Message::Ready.encode();
        other[8] = 7;
        assert_eq!(Message::decode(&other), Err(BadMessage::Version(7)));
        let mut extra = Message::Ready.encode();
        extra.push(0);
        assert_eq!(Message::decode(&extra), Err(BadMessage::Malformed));
    }

    #[test]
    fn each_disagreement_is_named_with_both_values() {
        let theirs =
            Hello { mac: [2, 0, 0, 0, 0, 2], addresses: vec![("10.0.0.2".parse().unwrap(), 24)], ..hello() };
        assert_eq!(hello().check(&theirs, "pid 7"), Ok(()));
        let text = |ours: Hello| ours.check(&theirs, "pid 7").expect_err("must be refused").to_string();
        let queues = Hello { geometry: Geometry { queues: 4, ..hello().geometry }, ..hello() };
        assert!(text(queues).starts_with("queues: asked 4 here, allowed 2 at pid 7"));
        assert!(
            text(Hello { mtu: 1500, ..hello() }).starts_with("mtu: asked 1500 here, allowed 9000 at pid 7")
        );
        assert!(text(Hello { mac: theirs.mac, ..hello() }).starts_with("mac: asked 02:00:00:00:00:02 here"));
        let twin = Hello { addresses: vec![("10.0.0.2".parse().unwrap(), 16)], ..hello() };
        assert!(text(twin).starts_with("addresses: asked 10.0.0.2 here"));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn no_bytes_panic_the_decoder(tail in proptest::collection::vec(any::<u8>(), 0..200), ours: bool) {
            let bytes = if ours { [&MAGIC[..], &VERSION.to_le_bytes(), &[KIND_HELLO], &tail].concat() } else { tail };
            if let Ok(message) = Message::decode(&bytes) {
                prop_assert_eq!(Message::decode(&message.encode()), Ok(message));
            }
        }
    }
}

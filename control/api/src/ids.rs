//! Text and JSON forms of wire numbers, for `#[serde(with = "ids::…")]`, and the small types of the API itself.
//!
//! GIDs are IPv6 text (`::ffff:192.0.2.1`), Ethernet addresses `aa:bb:…`, queue pair numbers, PSNs and keys plain
//! numbers; 24-bit numbers that do not fit are refused.

use core::fmt;
use std::net::Ipv6Addr;

use ferroce_wire::{Gid, MacAddr, Qpn};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Longest owner blob of a queue pair in bytes.
pub const MAX_OWNER_BYTES: usize = 512;

macro_rules! number_form {
    ($(#[$doc:meta])* $module:ident, $type:ident, $max:expr) => {
        $(#[$doc])*
        pub mod $module {
            use ferroce_wire::$type;
            use serde::{Deserialize, Deserializer, Serializer, de};
            /// Writes the number.
            pub fn serialize<S: Serializer>(value: &$type, s: S) -> Result<S::Ok, S::Error> {
                s.serialize_u32(value.get())
            }
            /// Reads the number; refuses one that does not fit.
            pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<$type, D::Error> {
                let value = u32::deserialize(d)?;
                if value > $max {
                    return Err(de::Error::custom(format_args!("{value} does not fit, at most {}", $max)));
                }
                Ok($type::new(value))
            }
        }
    };
}

number_form!(
    /// A queue pair number, 24 bits.
    qpn, Qpn, 0x00ff_ffffu32
);
number_form!(
    /// A packet sequence number, 24 bits.
    psn, Psn, 0x00ff_ffffu32
);

/// A remote key as a number.
pub mod rkey {
    use ferroce_wire::Rkey;
    use serde::{Deserialize, Deserializer, Serializer};
    /// Writes the number.
    pub fn serialize<S: Serializer>(value: &Rkey, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u32(value.0)
    }
    /// Reads the number.
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Rkey, D::Error> {
        Ok(Rkey(u32::deserialize(d)?))
    }
}

/// A path MTU in bytes: 256, 512, 1024, 2048 or 4096.
pub mod path_mtu {
    use ferroce_wire::PathMtu;
    use serde::{Deserialize, Deserializer, Serializer, de};
    /// Writes bytes.
    pub fn serialize<S: Serializer>(value: &PathMtu, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u32(value.bytes())
    }
    /// Reads bytes; refuses all but the five.
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<PathMtu, D::Error> {
        let bytes = u32::deserialize(d)?;
        PathMtu::from_bytes(bytes).ok_or_else(|| {
            de::Error::custom(format_args!("path_mtu {bytes} is none of 256, 512, 1024, 2048, 4096"))
        })
    }
}

/// A GID as IPv6 text.
pub mod gid {
    use super::*;
    /// Writes the text.
    pub fn serialize<S: Serializer>(value: &Gid, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(value)
    }
    /// Reads IPv6 text.
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Gid, D::Error> {
        let text = String::deserialize(d)?;
        parse_gid(&text)
            .ok_or_else(|| de::Error::custom(format_args!("`{text}` is not a GID (IPv6 text or IPv4)")))
    }
}

/// A GID as IPv6 text, or nothing.
pub mod opt_gid {
    use super::*;
    /// Writes the text or null.
    pub fn serialize<S: Serializer>(value: &Option<Gid>, s: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(gid) => s.collect_str(gid),
            None => s.serialize_none(),
        }
    }
    /// Reads IPv6 text or null.
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Gid>, D::Error> {
        match Option::<String>::deserialize(d)? {
            None => Ok(None),
            Some(text) => parse_gid(&text)
                .map(Some)
                .ok_or_else(|| de::Error::custom(format_args!("`{text}` is not a GID (IPv6 text or IPv4)"))),
        }
    }
}

/// A GID from IPv6 text or a plain IPv4 address.
pub fn parse_gid(text: &str) -> Option<Gid> {
    text.parse().ok().map(Gid::from_ip).or_else(|| text.parse::<Ipv6Addr>().ok().map(|a| Gid(a.octets())))
}

/// An Ethernet address as `aa:bb:cc:dd:ee:ff`.
pub mod mac {
    use super::*;
    /// Writes the text.
    pub fn serialize<S: Serializer>(value: &MacAddr, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(value)
    }
    /// Reads the text.
    pub fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<MacAddr, D::Error> {
        let text = String::deserialize(d)?;
        parse_mac(&text).ok_or_else(|| {
            de::Error::custom(format_args!("`{text}` is not an Ethernet address aa:bb:cc:dd:ee:ff"))
        })
    }
}

/// An Ethernet address from `aa:bb:cc:dd:ee:ff`.
pub fn parse_mac(text: &str) -> Option<MacAddr> {
    let mut out = [0u8; 6];
    let mut parts = text.split(':');
    for byte in &mut out {
        let part = parts.next()?;
        if part.is_empty() || part.len() > 2 || !part.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(MacAddr(out))
}

/// Opaque bytes that control attaches to a queue pair and gets back in listings: at most [`MAX_OWNER_BYTES`]. In JSON
/// a string of hex digits.
#[derive(Clone, PartialEq, Eq, Default, Hash)]
pub struct Owner(Vec<u8>);

impl Owner {
    /// Takes the bytes; `None` when there are more than [`MAX_OWNER_BYTES`].
    pub fn new(bytes: impl Into<Vec<u8>>) -> Option<Self> {
        let bytes = bytes.into();
        (bytes.len() <= MAX_OWNER_BYTES).then_some(Owner(bytes))
    }
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "owner({} bytes)", self.0.len())
    }
}

impl Serialize for Owner {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        use fmt::Write as _;
        let mut text = String::with_capacity(self.0.len() * 2);
        for byte in &self.0 {
            // Writing to a String cannot fail.
            let _ = write!(text, "{byte:02x}");
        }
        s.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for Owner {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        if text.len() > MAX_OWNER_BYTES * 2 {
            return Err(de::Error::custom(format_args!(
                "owner: {} bytes asked, at most {MAX_OWNER_BYTES} allowed",
                text.len() / 2
            )));
        }
        decode_hex(&text)
            .map(Owner)
            .ok_or_else(|| de::Error::custom("owner: not an even number of hex digits"))
    }
}

fn decode_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    let nibble = |b: u8| char::from(b).to_digit(16).and_then(|v| u8::try_from(v).ok());
    digits
        .chunks_exact(2)
        .map(|pair| match pair {
            [high, low] => Some(nibble(*high)? << 4 | nibble(*low)?),
            _ => None,
        })
        .collect()
}

/// The number of a queue pair as people write it: `0x00012`.
pub fn qpn_text(qpn: Qpn) -> String {
    format!("{:#08x}", qpn.get())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_round_trips_and_is_bounded() {
        let owner = Owner::new(vec![0, 1, 0xfe, 0xff]).unwrap();
        let text = serde_json::to_string(&owner).unwrap();
        assert_eq!(text, "\"0001feff\"");
        assert_eq!(serde_json::from_str::<Owner>(&text).unwrap(), owner);
        assert!(Owner::new(vec![0; MAX_OWNER_BYTES]).is_some());
        assert!(Owner::new(vec![0; MAX_OWNER_BYTES + 1]).is_none());
        let long = format!("\"{}\"", "00".repeat(MAX_OWNER_BYTES + 1));
        assert!(serde_json::from_str::<Owner>(&long).is_err());
        for bad in ["\"0\"", "\"zz\"", "\"é0\"", "\"+1\""] {
            assert!(serde_json::from_str::<Owner>(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn macs_and_gids() {
        assert_eq!(parse_mac("02:00:00:00:00:0a"), Some(MacAddr([2, 0, 0, 0, 0, 10])));
        for bad in ["", "02:00", "02:00:00:00:00:00:00", "02:00:00:00:00:0g", "+2:00:00:00:00:00", "::::::"] {
            assert_eq!(parse_mac(bad), None, "{bad}");
        }
        let mapped = parse_gid("192.0.2.1").unwrap();
        assert_eq!(mapped.to_string(), "::ffff:192.0.2.1");
        assert_eq!(parse_gid("::ffff:192.0.2.1"), Some(mapped));
        assert_eq!(parse_gid("nonsense"), None);
    }
}

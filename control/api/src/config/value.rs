//! Values of a configuration file. Each exists only if it is legal.

use core::fmt;
use std::net::IpAddr;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer};

/// Name of a device or link: 1 to 32 of `A-Z a-z 0-9 - _ .`, not beginning with `.` or `-`: safe as a file name.
#[derive(Clone, PartialEq, Eq, Debug, Hash, Deserialize)]
#[serde(try_from = "String")]
pub struct DevName(String);

impl DevName {
    /// Checks a name.
    pub fn new(text: &str) -> Result<Self, String> {
        let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        if text.is_empty() || text.len() > 32 || !text.bytes().all(legal) || text.starts_with(['.', '-']) {
            return Err(format!(
                "asked `{text}`, allowed 1 to 32 of A-Z a-z 0-9 - _ . beginning with none of - and ."
            ));
        }
        Ok(DevName(text.to_owned()))
    }
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for DevName {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        Self::new(&text)
    }
}

impl fmt::Display for DevName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Name of a network interface: 1 to 15 bytes without `/` and white space, as Linux says.
#[derive(Clone, PartialEq, Eq, Debug, Hash, Deserialize)]
#[serde(try_from = "String")]
pub struct InterfaceName(String);

impl InterfaceName {
    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for InterfaceName {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let bad = |c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control();
        if text.is_empty() || text.len() > 15 || text == "." || text == ".." || text.contains(bad) {
            return Err(format!("asked `{text}`, allowed a Linux interface name of 1 to 15 bytes"));
        }
        Ok(InterfaceName(text))
    }
}

/// Address with a prefix length: `192.0.2.1/24`. Unicast and specified.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Deserialize)]
#[serde(try_from = "String")]
pub struct NetAddress {
    ip: IpAddr,
    prefix: u8,
}

impl NetAddress {
    /// The address.
    pub const fn ip(self) -> IpAddr {
        self.ip
    }
    /// Bits of the network.
    pub const fn prefix(self) -> u8 {
        self.prefix
    }
}

impl TryFrom<String> for NetAddress {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let wrong = || format!("asked `{text}`, allowed ADDRESS/PREFIX such as 192.0.2.1/24 or fd00::1/64");
        let (ip, prefix) = text.split_once('/').ok_or_else(wrong)?;
        let ip: IpAddr = ip.parse().map_err(|_| wrong())?;
        let prefix: u8 = prefix.parse().map_err(|_| wrong())?;
        let most = if ip.is_ipv4() { 32 } else { 128 };
        if prefix == 0 || prefix > most {
            return Err(format!("asked prefix /{prefix}, allowed /1 to /{most}"));
        }
        let mapped = matches!(ip, IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some());
        if ip.is_unspecified() || ip.is_multicast() || mapped {
            return Err(format!("asked `{ip}`, allowed a unicast address (IPv4 without ::ffff:)"));
        }
        Ok(NetAddress { ip, prefix })
    }
}

impl fmt::Display for NetAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix)
    }
}

/// Number from 0 to 1.
#[derive(Clone, Copy, PartialEq, Debug, Default, Deserialize)]
#[serde(try_from = "f64")]
pub struct Probability(f64);

impl Probability {
    /// The number.
    pub const fn get(self) -> f64 {
        self.0
    }
}

impl TryFrom<f64> for Probability {
    type Error = String;
    fn try_from(value: f64) -> Result<Self, String> {
        if !(0.0..=1.0).contains(&value) {
            return Err(format!("asked {value}, allowed 0.0 to 1.0"));
        }
        Ok(Probability(value))
    }
}

/// Which pages the arena asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
pub enum PagePolicy {
    /// The best there is: 2 MiB hugepages, transparent hugepages, normal pages; a fallback is stated.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    /// 2 MiB hugepages, or refuse to start.
    #[serde(rename = "2M")]
    Huge2M,
    /// 1 GiB hugepages, or refuse to start.
    #[serde(rename = "1G")]
    Huge1G,
    /// Transparent hugepages, or refuse to start.
    #[serde(rename = "thp")]
    Thp,
    /// Normal pages.
    #[serde(rename = "normal")]
    Normal,
}

/// Core of a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CoreChoice {
    /// One of the allowed set, core 0 last.
    #[default]
    Auto,
    /// This one.
    Core(u32),
    /// None: the scheduler decides. For machines with fewer cores than workers.
    Unpinned,
}

impl<'de> Deserialize<'de> for CoreChoice {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Core;
        impl Visitor<'_> for Core {
            type Value = CoreChoice;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"auto\", \"none\" or the number of a core")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<CoreChoice, E> {
                match text {
                    "auto" => Ok(CoreChoice::Auto),
                    "none" => Ok(CoreChoice::Unpinned),
                    other => Err(E::custom(format_args!(
                        "asked `{other}`, allowed \"auto\", \"none\" or a number"
                    ))),
                }
            }
            fn visit_i64<E: de::Error>(self, value: i64) -> Result<CoreChoice, E> {
                match u32::try_from(value) {
                    Ok(core) if core < 4096 => Ok(CoreChoice::Core(core)),
                    _ => Err(E::custom(format_args!("asked core {value}, allowed 0 to 4095"))),
                }
            }
        }
        d.deserialize_any(Core)
    }
}

/// What a worker does without work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IdlePolicy {
    /// Spins this many passes, then sleeps on the port's descriptors.
    Adaptive {
        /// Idle passes before it sleeps.
        spin_passes: u32,
    },
    /// Never sleeps.
    Spin,
}

/// Where the XDP program runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum XdpMode {
    /// In the driver if it can, else in the stack (a stated fallback).
    #[default]
    Auto,
    /// In the driver, or fail.
    Native,
    /// In the stack.
    Generic,
}

/// Whether frames are copied between the driver and our memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ZeroCopy {
    /// Zero-copy if the driver can, else copies (a stated fallback).
    #[default]
    Auto,
    /// Zero-copy, or fail.
    On,
    /// Copies.
    Off,
}

/// Frames that a fault touches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultDirection {
    /// Those that we send and those that we receive.
    #[default]
    Both,
    /// Those that we send.
    Tx,
    /// Those that we receive.
    Rx,
}

/// Whether received ICRCs are checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IcrcSetting {
    /// Checked.
    #[default]
    On,
    /// Diagnosis mode: not checked. Every output shows it.
    Off,
}

/// A number of bytes: `67108864` or `"64M"` (K, M, G, T are powers of 1024).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ByteSize(pub u64);

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Size;
        impl Visitor<'_> for Size {
            type Value = ByteSize;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes, or text such as \"64M\"")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<ByteSize, E> {
                parse_size(text).map(ByteSize).ok_or_else(|| {
                    E::custom(format_args!(
                        "asked `{text}`, allowed a number with K, M, G or T (powers of 1024)"
                    ))
                })
            }
            fn visit_i64<E: de::Error>(self, value: i64) -> Result<ByteSize, E> {
                u64::try_from(value)
                    .map(ByteSize)
                    .map_err(|_| E::custom(format_args!("asked {value}, allowed 0 and up")))
            }
        }
        d.deserialize_any(Size)
    }
}

/// A size in the text form of [`ByteSize`].
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, shift) = match text.chars().last()? {
        'K' => (text.strip_suffix('K')?, 10),
        'M' => (text.strip_suffix('M')?, 20),
        'G' => (text.strip_suffix('G')?, 30),
        'T' => (text.strip_suffix('T')?, 40),
        _ => (text, 0u32),
    };
    let number: u64 = digits.parse().ok()?;
    number.checked_mul(1u64.checked_shl(shift)?)
}

//! The messages of perftest's TCP handshake as bytes (perftest 4.5; it calls its conversation 6.06).
//!
//! Owns: lengths, text forms and bounds of each message. Pure: no socket, no clock. The order of the messages is
//! [`super::script`]'s matter, the waiting [`super::session`]'s. Everything here may come from anybody who can reach
//! the port, so each field is checked, and a wrong one is named with what is allowed.
//!
//! | message | bytes | form |
//! |---|---|---|
//! | version | 16 | decimal text, NUL; what follows the NUL is ignored by perftest |
//! | cycle buffer, cache line | 4 | big-endian number |
//! | path MTU | 2 | digit 1 to 5, NUL |
//! | queue pair | 108 | hexadecimal fields, a colon after each, NUL |
//! | report | 5 times 8 | big-endian: two integers, three doubles; each is a message of its own |
//! | end | 5 | `done`, NUL |

use std::fmt;
use std::net::IpAddr;

use ferroce_wire::{Gid, PathMtu, Psn, Qpn, RemoteAddr, Rkey};

/// Bytes of a version.
pub const VERSION_BYTES: usize = 16;
/// Bytes of a queue pair's line.
pub const KEYS_BYTES: usize = 108;
/// What both sides send last; perftest never reads it.
pub const DONE: &[u8; 5] = b"done\0";
/// The version of the conversation that we speak.
const OUR_VERSION: &[u8] = b"6.06";
/// perftest's own limit: older ones have another conversation.
const OLDEST_HUNDREDTHS: u32 = 570;
/// What marks a version of ours, after the NUL of the text. Followed by one byte, the version of our own conversation.
const MARK: &[u8] = b"ferroce";
/// Least and largest cycle buffer, which is the peer's page size.
const CYCLE_BYTES: (u32, u32) = (4096, 1 << 20);
/// Least and largest cache line.
const LINE_BYTES: (u32, u32) = (16, 1024);
/// Largest message that a report may tell of.
const LARGEST: u64 = 1 << 30;

/// A field that is not as it should be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refused {
    /// Which.
    pub field: &'static str,
    /// What came.
    pub got: String,
    /// What is allowed.
    pub allowed: &'static str,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: got {}, allowed {}", self.field, self.got, self.allowed)
    }
}

fn refused(field: &'static str, got: impl Into<String>, allowed: &'static str) -> Refused {
    Refused { field, got: got.into(), allowed }
}

/// Bytes for a message to people.
fn shown(bytes: &[u8]) -> String {
    let text: String = bytes.iter().take(40).map(|&b| std::ascii::escape_default(b).to_string()).collect();
    if bytes.len() > 40 { format!("\"{text}\"...") } else { format!("\"{text}\"") }
}

/// The first message of both sides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Version {
    /// 606 for 6.06.
    pub hundredths: u32,
    /// The version of our own conversation, where the sender is one of ours and offers it.
    pub mark: Option<u8>,
}

impl Version {
    /// Ours, with or without the mark.
    pub fn ours(mark: Option<u8>) -> Self {
        Version { hundredths: 606, mark }
    }

    /// The message. The text is always our version.
    pub fn encode(self) -> [u8; VERSION_BYTES] {
        let mut bytes = [0; VERSION_BYTES];
        bytes[..OUR_VERSION.len()].copy_from_slice(OUR_VERSION);
        if let Some(number) = self.mark {
            let at = OUR_VERSION.len() + 1;
            bytes[at..at + MARK.len()].copy_from_slice(MARK);
            bytes[at + MARK.len()] = number;
        }
        bytes
    }

    /// From a message.
    ///
    /// # Errors
    /// Not a version, or one from before 5.70.
    pub fn decode(bytes: &[u8; VERSION_BYTES]) -> Result<Self, Refused> {
        const ALLOWED: &str = "a version such as 6.06, 5.70 or later, and a NUL";
        let wrong = || refused("version", shown(bytes), ALLOWED);
        let end = bytes.iter().position(|&b| b == 0).ok_or_else(wrong)?;
        let (text, rest) = bytes.split_at(end);
        let text = std::str::from_utf8(text).map_err(|_| wrong())?;
        let (major, minor) = text.split_once('.').ok_or_else(wrong)?;
        let is_number =
            |t: &str, most: usize| (1..=most).contains(&t.len()) && t.bytes().all(|b| b.is_ascii_digit());
        if !is_number(major, 4) || !is_number(minor, 2) {
            return Err(wrong());
        }
        let major: u32 = major.parse().map_err(|_| wrong())?;
        // 6.1 is 6.10, as the original's conversion to a number has it.
        let tenth = if minor.len() == 1 { 10 } else { 1 };
        let hundredths = major * 100 + minor.parse::<u32>().map_err(|_| wrong())? * tenth;
        if hundredths < OLDEST_HUNDREDTHS {
            return Err(wrong());
        }
        let mark = rest.get(1..).and_then(|r| r.strip_prefix(MARK)).and_then(|r| r.first().copied());
        Ok(Version { hundredths, mark: mark.filter(|&number| number > 0) })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:02}", self.hundredths / 100, self.hundredths % 100)
    }
}

/// The cycle buffer's size in bytes: a power of two.
///
/// # Errors
/// Out of bounds.
pub fn cycle_buffer(bytes: [u8; 4]) -> Result<u32, Refused> {
    power_of_two(bytes, CYCLE_BYTES, "cycle buffer", "a power of two, 4096 to 1048576")
}

/// The cache line's size in bytes: a power of two.
///
/// # Errors
/// Out of bounds.
pub fn cache_line(bytes: [u8; 4]) -> Result<u32, Refused> {
    power_of_two(bytes, LINE_BYTES, "cache line", "a power of two, 16 to 1024")
}

fn power_of_two(
    bytes: [u8; 4],
    (least, most): (u32, u32),
    field: &'static str,
    allowed: &'static str,
) -> Result<u32, Refused> {
    let value = u32::from_be_bytes(bytes);
    if value.is_power_of_two() && (least..=most).contains(&value) {
        Ok(value)
    } else {
        Err(refused(field, value.to_string(), allowed))
    }
}

/// The message of a path MTU.
pub fn encode_mtu(mtu: PathMtu) -> [u8; 2] {
    [b'0' + mtu_number(mtu), 0]
}

fn mtu_number(mtu: PathMtu) -> u8 {
    match mtu.bytes() {
        256 => 1,
        512 => 2,
        1024 => 3,
        2048 => 4,
        _ => 5,
    }
}

/// From a path MTU's message.
///
/// # Errors
/// Not a digit of 1 to 5 and a NUL.
pub fn decode_mtu(bytes: [u8; 2]) -> Result<PathMtu, Refused> {
    let mtu = match bytes {
        [digit @ b'1'..=b'5', 0] => PathMtu::from_bytes(128 << (digit - b'0')),
        _ => None,
    };
    mtu.ok_or_else(|| refused("path MTU", shown(&bytes), "1 (256 bytes) to 5 (4096 bytes), and a NUL"))
}

/// One side's queue pair and memory. Sent several times, also as a mere signal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Keys {
    /// Local identifier: 0 on Ethernet.
    pub lid: u16,
    /// READs and atomics outstanding; 1 for the other tests.
    pub out_reads: u8,
    /// Queue pair.
    pub qpn: Qpn,
    /// First PSN that it sends.
    pub psn: Psn,
    /// Key of the memory that the peer may reach.
    pub rkey: Rkey,
    /// Its first byte.
    pub addr: RemoteAddr,
    /// Address.
    pub gid: Gid,
    /// Shared receive queue: 0, used by XRC and DC alone.
    pub srqn: u32,
}

impl Keys {
    /// The message.
    pub fn encode(&self) -> [u8; KEYS_BYTES] {
        let mut text = format!(
            "{:04x}:{:04x}:{:06x}:{:06x}:{:08x}:{:016x}:",
            self.lid,
            self.out_reads,
            self.qpn.get(),
            self.psn.get(),
            self.rkey.0,
            self.addr.0
        );
        for byte in self.gid.0 {
            text.push_str(&format!("{byte:02x}:"));
        }
        text.push_str(&format!("{:08x}:", self.srqn));
        let mut bytes = [0; KEYS_BYTES];
        bytes[..KEYS_BYTES - 1].copy_from_slice(text.as_bytes());
        bytes
    }

    /// From a message.
    ///
    /// # Errors
    /// Names the first field that is not as it should be.
    pub fn decode(bytes: &[u8; KEYS_BYTES]) -> Result<Self, Refused> {
        let mut rest = Fields { bytes };
        let keys = Keys {
            lid: rest.number("LID", 4)? as u16,
            out_reads: match rest.number("outstanding reads", 4)? {
                reads @ 1..=255 => reads as u8,
                other => {
                    return Err(refused("outstanding reads (-o)", other.to_string(), "1 to 255"));
                }
            },
            qpn: match rest.number("QPN", 6)? as u32 {
                qpn @ 2..=0xff_fffe => Qpn::new(qpn),
                other => {
                    return Err(refused("QPN", format!("{other:#08x}"), "0x000002 to 0xfffffe"));
                }
            },
            psn: Psn::new(rest.number("PSN", 6)? as u32),
            rkey: Rkey(rest.number("rkey", 8)? as u32),
            addr: RemoteAddr(rest.number("address", 16)?),
            gid: Gid(rest.gid()?),
            srqn: rest.number("SRQ number", 8)? as u32,
        };
        if rest.bytes != [0] {
            return Err(refused("end of the line", shown(rest.bytes), "a NUL"));
        }
        let is_ours = match keys.gid.to_ip() {
            IpAddr::V4(v4) => !v4.is_unspecified() && !v4.is_broadcast(),
            IpAddr::V6(v6) => !v6.is_unspecified(),
        };
        if !is_ours || keys.gid.is_multicast() {
            let allowed = "the address of one RoCEv2 interface (choose another GID with -x)";
            return Err(refused("GID", keys.gid.to_string(), allowed));
        }
        Ok(keys)
    }
}

/// What is left of a line.
struct Fields<'b> {
    bytes: &'b [u8],
}

impl<'b> Fields<'b> {
    fn field(&mut self, name: &'static str, digits: usize) -> Result<&'b str, Refused> {
        let wrong = |b: &[u8]| refused(name, shown(&b[..b.len().min(20)]), "hexadecimal digits and a colon");
        let Some((field, rest)) = self.bytes.split_at_checked(digits) else {
            return Err(wrong(self.bytes));
        };
        let Some((b':', rest)) = rest.split_first() else { return Err(wrong(self.bytes)) };
        if !field.iter().all(u8::is_ascii_hexdigit) {
            return Err(wrong(self.bytes));
        }
        let text = std::str::from_utf8(field).map_err(|_| wrong(self.bytes))?;
        self.bytes = rest;
        Ok(text)
    }

    /// At most 16 digits, so that it fits.
    fn number(&mut self, name: &'static str, digits: usize) -> Result<u64, Refused> {
        let text = self.field(name, digits)?;
        u64::from_str_radix(text, 16).map_err(|_| refused(name, text, "hexadecimal digits"))
    }

    fn gid(&mut self) -> Result<[u8; 16], Refused> {
        let mut gid = [0; 16];
        for byte in &mut gid {
            *byte = self.number("GID", 2)? as u8;
        }
        Ok(gid)
    }
}

/// What a side measured, told to the other. Rates are per second.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Report {
    /// Bytes of a message.
    pub size: u64,
    /// Messages, all queue pairs together.
    pub iters: u64,
    /// Best bandwidth, in the unit that the sender prints.
    pub peak: f64,
    /// Average bandwidth, in the same unit.
    pub average: f64,
    /// Millions of messages a second.
    pub mpps: f64,
}

impl Report {
    /// The five messages.
    pub fn encode(&self) -> [[u8; 8]; 5] {
        [
            self.size.to_be_bytes(),
            self.iters.to_be_bytes(),
            self.peak.to_bits().to_be_bytes(),
            self.average.to_bits().to_be_bytes(),
            self.mpps.to_bits().to_be_bytes(),
        ]
    }

    /// From the five messages.
    ///
    /// # Errors
    /// A size above 1 GiB, a number of messages above 2^62, a rate that is negative or no number.
    pub fn decode(bytes: [[u8; 8]; 5]) -> Result<Self, Refused> {
        let [size, iters, peak, average, mpps] = bytes.map(u64::from_be_bytes);
        if size > LARGEST {
            return Err(refused("size in the report", size.to_string(), "0 to 1073741824 bytes"));
        }
        if iters >= 1 << 62 {
            return Err(refused("iterations in the report", iters.to_string(), "below 2^62"));
        }
        let rate = |bits: u64, field| {
            let value = f64::from_bits(bits);
            // A test without a peak may have divided by 0.
            if value.is_nan() || value >= 0.0 {
                Ok(if value.is_finite() { value } else { 0.0 })
            } else {
                Err(refused(field, value.to_string(), "0 or more"))
            }
        };
        Ok(Report {
            size,
            iters,
            peak: rate(peak, "peak bandwidth in the report")?,
            average: rate(average, "bandwidth in the report")?,
            mpps: rate(mpps, "message rate in the report")?,
        })
    }
}

/// Who calls, by the first byte of what it says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Caller {
    /// A version: perftest, or one of ours with its mark.
    Version,
    /// A line of JSON: one of ours that was told not to try perftest.
    Json,
}

impl Caller {
    /// `None` for a stranger.
    pub fn of(first: u8) -> Option<Self> {
        match first {
            b'{' => Some(Caller::Json),
            b'0'..=b'9' => Some(Caller::Version),
            _ => None,
        }
    }
}

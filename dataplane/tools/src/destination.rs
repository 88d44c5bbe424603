//! The handshake of `ibv_rc_pingpong`: each side tells the other its queue pair in 52 bytes of text.
//!
//! The client sends its line, the server answers with its own, the client confirms with `done` and a NUL. A line is
//! `LID:QPN:PSN:GID` in hexadecimal digits (4, 6, 6 and 32 of them) and a NUL.

use std::time::Duration;

use ferroce_wire::{Gid, Psn, Qpn};

use crate::fail::{Fail, Outcome};
use crate::net::{Peer, excerpt};

/// Bytes of a line, NUL included.
pub const LINE_BYTES: usize = 52;
/// What the client confirms with.
pub const DONE: &[u8; 5] = b"done\0";

/// One side's queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Destination {
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Queue pair number.
    pub qpn: Qpn,
    /// First PSN that it sends.
    pub psn: Psn,
    /// Address.
    pub gid: Gid,
}

impl Destination {
    /// The line.
    pub fn encode(&self) -> [u8; LINE_BYTES] {
        let mut text = format!("{:04x}:{:06x}:{:06x}:", self.lid, self.qpn.get(), self.psn.get());
        for byte in self.gid.0 {
            text.push_str(&format!("{byte:02x}"));
        }
        let mut line = [0; LINE_BYTES];
        line[..LINE_BYTES - 1].copy_from_slice(text.as_bytes());
        line
    }

    /// From a line.
    pub fn decode(line: &[u8; LINE_BYTES]) -> Outcome<Self> {
        let bad =
            |what: &str| Fail::failed(format!("not a line of ibv_rc_pingpong ({what}): {}", excerpt(line)));
        let [text @ .., end] = line;
        if *end != 0 {
            return Err(bad("no NUL at its end"));
        }
        let text = std::str::from_utf8(text).map_err(|_| bad("not text"))?;
        let mut fields = text.split(':');
        let mut field = |name: &str, digits: usize| match fields.next() {
            Some(f) if f.len() == digits && f.bytes().all(|b| b.is_ascii_hexdigit()) => Ok(f),
            _ => Err(bad(&format!("{name} is not {digits} hexadecimal digits"))),
        };
        let number = |digits: &str| u32::from_str_radix(digits, 16).map_err(|_| bad("a number is too large"));
        let lid = u16::try_from(number(field("LID", 4)?)?).map_err(|_| bad("the LID is too large"))?;
        let qpn = Qpn::new(number(field("QPN", 6)?)?);
        let psn = Psn::new(number(field("PSN", 6)?)?);
        let digits = field("GID", 32)?;
        let mut gid = [0; 16];
        for (byte, pair) in gid.iter_mut().zip(digits.as_bytes().chunks(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| bad("not text"))?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| bad("GID"))?;
        }
        Ok(Destination { lid, qpn, psn, gid: Gid(gid) })
    }

    /// The line that the original prints for it; `side` is `local` or `remote`.
    pub fn describe(&self, side: &str) -> String {
        let label = format!("{side} address:");
        format!(
            "  {label:<15} LID {:#06x}, QPN {:#08x}, PSN {:#08x}, GID {}",
            self.lid,
            self.qpn.get(),
            self.psn.get(),
            self.gid
        )
    }
}

/// The client's part up to the peer's line. [`confirm`] follows.
pub fn ask(peer: &mut Peer, own: &Destination, limit: Duration) -> Outcome<Destination> {
    peer.send(&own.encode())?;
    let mut line = [0; LINE_BYTES];
    peer.receive_exact(&mut line, limit, "its address")?;
    Destination::decode(&line)
}

/// The client's last word.
pub fn confirm(peer: &mut Peer) -> Outcome<()> {
    peer.send(DONE)
}

/// The server's first part: the client's line.
pub fn hear(peer: &mut Peer, limit: Duration) -> Outcome<Destination> {
    let mut line = [0; LINE_BYTES];
    peer.receive_exact(&mut line, limit, "its address")?;
    Destination::decode(&line)
}

/// The server's second part: its own line, and the client's confirmation.
pub fn answer(peer: &mut Peer, own: &Destination, limit: Duration) -> Outcome<()> {
    peer.send(&own.encode())?;
    confirmed(peer, limit)
}

/// Waits for the client's confirmation.
pub fn confirmed(peer: &mut Peer, limit: Duration) -> Outcome<()> {
    let mut done = [0; DONE.len()];
    peer.receive_exact(&mut done, limit, "its confirmation")?;
    if done != *DONE {
        return Err(Fail::failed(format!(
            "peer {} confirmed with {} instead of \"done\"",
            peer.name(),
            excerpt(&done)
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &[u8; LINE_BYTES] = b"0000:000011:94fb34:00000000000000000000ffff0a090001\0";

    fn sample() -> Destination {
        Destination {
            lid: 0,
            qpn: Qpn::new(0x11),
            psn: Psn::new(0x94_fb34),
            gid: Gid::from_ip("10.9.0.1".parse().unwrap()),
        }
    }

    #[test]
    fn both_ways_against_the_text() {
        assert_eq!(&sample().encode(), LINE);
        assert_eq!(Destination::decode(LINE), Ok(sample()));
        let v6 = Destination {
            lid: 0xffff,
            qpn: Qpn::new(0xff_ffff),
            psn: Psn::new(0),
            gid: Gid::from_ip("fe80::5054:ff:fe00:66".parse().unwrap()),
        };
        let text = b"ffff:ffffff:000000:fe80000000000000505400fffe000066\0";
        assert_eq!(&v6.encode(), text);
        assert_eq!(Destination::decode(text), Ok(v6));
        let upper = b"FFFF:FFFFFF:000000:FE80000000000000505400FFFE000066\0";
        assert_eq!(Destination::decode(upper), Ok(v6));
    }

    #[test]
    fn the_printed_lines() {
        assert_eq!(
            sample().describe("local"),
            "  local address:  LID 0x0000, QPN 0x000011, PSN 0x94fb34, GID ::ffff:10.9.0.1"
        );
        assert_eq!(
            sample().describe("remote"),
            "  remote address: LID 0x0000, QPN 0x000011, PSN 0x94fb34, GID ::ffff:10.9.0.1"
        );
    }

    #[test]
    fn wrong_lines_are_refused_and_shown() {
        let refused = |text: &[u8; LINE_BYTES]| Destination::decode(text).unwrap_err().to_string();
        assert!(refused(b"GET / HTTP/1.1 and so on, not what we wait for here.").contains("NUL"));
        assert!(refused(b"000g:000011:94fb34:00000000000000000000ffff0a090001\0").contains("LID"));
        assert!(refused(b"0000:00001:194fb34:00000000000000000000ffff0a090001\0").contains("QPN"));
        assert!(refused(b"0000:000011:94fb3:400000000000000000000ffff0a090001\0").contains("PSN"));
        assert!(refused(b"0000:000011:94fb34:00000000000000000000ffff0a09000 \0").contains("GID"));
        assert!(refused(b"0000:000011:+4fb34:00000000000000000000ffff0a090001\0").contains("PSN"));
        assert!(refused(&[0xff; LINE_BYTES]).contains("NUL"));
        let mut binary = [0x80; LINE_BYTES];
        binary[LINE_BYTES - 1] = 0;
        assert!(refused(&binary).contains("not text"));
        assert!(refused(&[0; LINE_BYTES]).contains("LID"));
    }
}

//! How long the frames of a port may be.
//!
//! A frame of up to [`FRAME_BYTES`] fits one chunk, as every kernel and driver has it. An interface with a larger MTU
//! gets frames over several chunks (multi-buffer AF_XDP, Linux 6.6), up to [`MAX_JUMBO_MTU`]. Owns the choice, which is
//! fixed when the port is opened, and the words for what an interface's MTU has beyond it. Never asks the kernel.

use super::umem::{CHUNK_BYTES, FRAME_BYTES, KERNEL_HEADROOM, MAX_PARTS};
use crate::netlink::Link;
use crate::port::Fallback;

/// Bytes of an Ethernet header.
pub(super) const ETHERNET_BYTES: u32 = 14;
/// Bytes of one VLAN tag, which a frame may carry on top of the MTU.
const VLAN_BYTES: u32 = 4;
const LINK_BYTES: u32 = ETHERNET_BYTES + VLAN_BYTES;

/// Largest MTU whose frames fit one chunk.
pub const MAX_MTU: u32 = FRAME_BYTES - LINK_BYTES;
/// Largest MTU whose frames fit the chunks that a frame may have.
pub const MAX_JUMBO_MTU: u32 = MAX_PARTS * FRAME_BYTES - LINK_BYTES;

/// The room for a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Room {
    /// Chunks of a frame to send; more than 1: frames over several chunks are sent and received.
    pub parts: u32,
    /// What the kernel answered, if it has no frames over several chunks.
    refused: Option<String>,
}

impl Room {
    /// As an interface of this MTU wants it.
    pub fn for_mtu(mtu: u32) -> Self {
        // Between the two limits a frame fits one chunk on the way out, but not on the way in.
        let parts = match mtu {
            0..=MAX_MTU => 1,
            _ => (mtu.min(MAX_JUMBO_MTU) + LINK_BYTES).div_ceil(CHUNK_BYTES).max(2),
        };
        Room { parts, refused: None }
    }

    /// One chunk, because the kernel refused more.
    pub fn single(refused: String) -> Self {
        Room { parts: 1, refused: Some(refused) }
    }

    /// Largest MTU.
    pub fn max_mtu(&self) -> u32 {
        match self.parts {
            0 | 1 => MAX_MTU,
            // Sending has all of a chunk; receiving has less, but as many chunks as a frame may have.
            parts => MAX_JUMBO_MTU.min(parts * CHUNK_BYTES - LINK_BYTES),
        }
    }

    /// What is lost of the MTU that the interface has now.
    pub fn fallback(&self, link: &Link) -> Option<Fallback> {
        let max = self.max_mtu();
        if link.mtu <= max {
            return None;
        }
        let chunk = format!("{CHUNK_BYTES} bytes, of which the kernel keeps {KERNEL_HEADROOM}");
        let (reason, again) = match (&self.refused, self.parts) {
            (Some(refused), _) => (format!("a frame has to fit one chunk of {chunk}: {refused}"), ""),
            (None, MAX_PARTS) => (format!("a frame has at most {MAX_PARTS} chunks of {chunk}"), ""),
            (None, _) => ("the MTU was raised after the port was opened".to_string(), "start again, or "),
        };
        let path_mtu = [4096, 2048].into_iter().find(|path_mtu| path_mtu + 96 <= max).unwrap_or(1024);
        Some(Fallback {
            wanted: format!("MTU {} of {}", link.mtu, link.name),
            got: format!("MTU {max}"),
            reason,
            hint: format!(
                "path MTU up to {path_mtu} works; {again}give the interface an MTU of at most {max}, so that nobody \
                 sends longer frames"
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_room_follows_the_mtu() {
        for (mtu, parts, max) in [
            (1500, 1, 3822),
            (3822, 1, 3822),
            (3823, 2, 8174),
            (4200, 2, 8174),
            (8174, 2, 8174),
            (8175, 3, 11502),
            (9000, 3, 11502),
            (65535, 3, 11502),
        ] {
            let room = Room::for_mtu(mtu);
            assert_eq!((room.parts, room.max_mtu()), (parts, max), "MTU {mtu}");
        }
        assert_eq!(Room::single("no".into()).max_mtu(), MAX_MTU);
    }
}

//! What a perf test does, and what it needs.

use core::fmt;

/// Operation under test.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum PerfOp {
    /// SEND.
    Send,
    /// RDMA WRITE.
    Write,
    /// RDMA READ.
    Read,
}

impl PerfOp {
    /// `send`, `write` or `read`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            PerfOp::Send => "send",
            PerfOp::Write => "write",
            PerfOp::Read => "read",
        }
    }
}

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum PerfMode {
    /// One message at a time: round trips.
    Lat,
    /// A full window: bandwidth and message rate.
    Bw,
}

impl PerfMode {
    /// `lat` or `bw`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            PerfMode::Lat => "lat",
            PerfMode::Bw => "bw",
        }
    }
}

/// Side of a test. The client starts and measures.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Role {
    /// Starts the messages.
    Client,
    /// Answers, receives, or lets it happen.
    Server,
}

/// One test. Both sides need the same, but for the role.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PerfSpec {
    /// Operation.
    pub op: PerfOp,
    /// Latency or bandwidth.
    pub mode: PerfMode,
    /// Side.
    pub role: Role,
    /// Bytes of a message.
    pub size: u32,
    /// Messages measured; ignored with a duration.
    pub iters: u64,
    /// Messages before the measurement.
    pub warmup: u64,
    /// Measure for so many ns instead of a count.
    pub duration_ns: Option<u64>,
    /// Send work requests outstanding at once.
    pub tx_depth: u32,
    /// Receives kept posted (SEND).
    pub rx_depth: u32,
    /// One completion asked for in so many messages.
    pub cq_mod: u32,
    /// Messages of at most so many bytes are posted inline (SEND, WRITE).
    pub inline_bytes: u32,
    /// Seed of the data.
    pub seed: u64,
    /// Every message differs from the one before and is compared where it arrives. Slower: for tests.
    pub check_data: bool,
    /// The service fails when nothing happens for so many ns; 0 waits for ever. A passive server is exempt.
    pub progress_deadline_ns: u64,
}

/// With `check_data` each message outstanding has a buffer of its own; their sum is limited to this, and the depths
/// with it.
const CHECKED_BYTES: u64 = 4 << 20;

impl PerfSpec {
    /// Largest message: 1 GiB.
    pub const LARGEST: u32 = 1 << 30;
    /// Deepest queue.
    pub const DEEPEST: u32 = 1 << 16;

    /// A test with perftest's defaults: latency 1000 messages at depth 1, bandwidth 1000 (write: 5000) at depth 128;
    /// 512 receives; moderation 100, and 1 above 8192 bytes; progress deadline 30 s.
    #[must_use]
    pub const fn new(op: PerfOp, mode: PerfMode, role: Role, size: u32) -> Self {
        let (iters, tx_depth) = match (mode, op) {
            (PerfMode::Lat, _) => (1000, 1),
            (PerfMode::Bw, PerfOp::Write) => (5000, 128),
            (PerfMode::Bw, _) => (1000, 128),
        };
        PerfSpec {
            op,
            mode,
            role,
            size,
            iters,
            warmup: 0,
            duration_ns: None,
            tx_depth,
            rx_depth: 512,
            cq_mod: if size > 8192 { 1 } else { 100 },
            inline_bytes: 0,
            seed: 1,
            check_data: false,
            progress_deadline_ns: 30_000_000_000,
        }
    }

    /// Checks every value.
    ///
    /// # Errors
    /// Names the first one that is out of range.
    pub fn check(&self) -> Result<(), SpecError> {
        let refuse = |attribute, asked, allowed| Err(SpecError { attribute, asked, allowed });
        if self.size > Self::LARGEST {
            return refuse("size", self.size.into(), "0 to 1073741824 bytes");
        }
        if self.size == 0 && self.op == PerfOp::Write && self.mode == PerfMode::Lat {
            return refuse("size", 0, "1 byte or more: write latency watches the last byte of a message");
        }
        if self.iters == 0 && self.duration_ns.is_none() {
            return refuse("iters", 0, "1 or more");
        }
        if self.duration_ns == Some(0) {
            return refuse("duration", 0, "more than 0");
        }
        if self.iters.checked_add(self.warmup).is_none_or(|total| total >= 1 << 62) {
            return refuse("iters", self.iters, "iterations and warm-up below 2^62 together");
        }
        for (attribute, depth) in [("tx_depth", self.tx_depth), ("rx_depth", self.rx_depth)] {
            if depth == 0 || depth > Self::DEEPEST {
                return refuse(attribute, depth.into(), "1 to 65536");
            }
        }
        if self.cq_mod == 0 {
            return refuse("cq_mod", 0, "1 or more");
        }
        Ok(())
    }

    /// Send work requests that the queue pair must hold.
    ///
    /// A latency test needs two: the answer may come before the acknowledgement of the message that it answers.
    #[must_use]
    pub fn send_queue_depth(&self) -> u32 {
        let depth = match (self.mode, self.op) {
            (PerfMode::Bw, _) | (PerfMode::Lat, PerfOp::Read) => self.tx_depth,
            (PerfMode::Lat, _) => self.tx_depth.max(2),
        };
        self.checked_depth(depth)
    }

    /// Receives that the queue pair must hold; 1 where none are needed.
    #[must_use]
    pub fn recv_queue_depth(&self) -> u32 {
        if self.op == PerfOp::Send { self.checked_depth(self.rx_depth) } else { 1 }
    }

    /// Bytes of memory that each side prepares.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        let layout = self.layout();
        (layout.send_slots + layout.recv_slots) * layout.stride
    }

    /// One completion in so many messages, in force: never more than the window, so that a full one always contains a
    /// message that completes.
    #[must_use]
    pub fn signal_every(&self) -> u32 {
        self.cq_mod.min(self.send_queue_depth()).min(self.tx_depth)
    }

    /// True if messages are posted inline.
    #[must_use]
    pub fn is_inline(&self) -> bool {
        self.op != PerfOp::Read && self.inline_bytes > 0 && self.size <= self.inline_bytes
    }

    /// True for a server that only lets the client read or write.
    #[must_use]
    pub fn is_passive(&self) -> bool {
        self.role == Role::Server
            && match (self.op, self.mode) {
                (PerfOp::Read, _) | (PerfOp::Write, PerfMode::Bw) => true,
                (PerfOp::Send, _) | (PerfOp::Write, PerfMode::Lat) => false,
            }
    }

    fn checked_depth(&self, depth: u32) -> u32 {
        if !self.check_data {
            return depth;
        }
        let fit = (CHECKED_BYTES / self.stride()).max(1);
        depth.min(u32::try_from(fit).unwrap_or(u32::MAX)).max(depth.min(2))
    }

    fn stride(&self) -> u64 {
        u64::from(self.size).next_multiple_of(64).max(64)
    }

    pub(super) fn layout(&self) -> Layout {
        let (window, receives) = (u64::from(self.send_queue_depth()), u64::from(self.recv_queue_depth()));
        let (send_slots, recv_slots) = match (self.check_data, self.op, self.mode) {
            (false, ..) => (1, 1),
            (true, PerfOp::Send, _) => (window, receives),
            (true, PerfOp::Write, PerfMode::Lat) => (window, 1),
            (true, PerfOp::Write | PerfOp::Read, _) => (window, window),
        };
        Layout { stride: self.stride(), send_slots, recv_slots }
    }

    /// Seed of what this side sends or lets read.
    pub(super) fn own_seed(&self) -> u64 {
        match self.role {
            Role::Client => self.seed,
            Role::Server => !self.seed,
        }
    }

    /// Seed of what the peer sends or lets read.
    pub(super) fn peer_seed(&self) -> u64 {
        !self.own_seed()
    }
}

/// Where messages lie in a prepared block; the same on both sides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Layout {
    /// From one slot to the next.
    pub stride: u64,
    /// Slots of what is sent or read by the peer, first in the block.
    pub send_slots: u64,
    /// Slots of what is received, written by the peer or read from it.
    pub recv_slots: u64,
}

impl Layout {
    /// Offset of the slot of send number `message`.
    pub fn send_offset(&self, message: u64) -> u64 {
        message % self.send_slots * self.stride
    }
    /// Offset of the slot of receive number `message`.
    pub fn recv_offset(&self, message: u64) -> u64 {
        (self.send_slots + message % self.recv_slots) * self.stride
    }
}

/// A refused value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SpecError {
    /// Which.
    pub attribute: &'static str,
    /// What was asked.
    pub asked: u64,
    /// What is allowed.
    pub allowed: &'static str,
}

impl fmt::Display for SpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: asked {}, allowed {}", self.attribute, self.asked, self.allowed)
    }
}

impl std::error::Error for SpecError {}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(op: PerfOp, mode: PerfMode) -> PerfSpec {
        PerfSpec::new(op, mode, Role::Client, 64)
    }

    #[test]
    fn defaults_are_perftests() {
        let write = spec(PerfOp::Write, PerfMode::Bw);
        assert_eq!((write.iters, write.tx_depth, write.rx_depth, write.cq_mod), (5000, 128, 512, 100));
        assert_eq!(spec(PerfOp::Send, PerfMode::Lat).tx_depth, 1);
        assert_eq!(PerfSpec::new(PerfOp::Send, PerfMode::Bw, Role::Client, 65536).cq_mod, 1);
    }

    #[test]
    fn bad_values_are_named() {
        let good = spec(PerfOp::Write, PerfMode::Lat);
        assert_eq!(good.check(), Ok(()));
        let bad = |change: fn(&mut PerfSpec)| {
            let mut spec = good;
            change(&mut spec);
            spec.check().unwrap_err().attribute
        };
        assert_eq!(bad(|s| s.size = 0), "size");
        assert_eq!(bad(|s| s.size = PerfSpec::LARGEST + 1), "size");
        assert_eq!(bad(|s| s.iters = 0), "iters");
        assert_eq!(bad(|s| s.warmup = u64::MAX), "iters");
        assert_eq!(bad(|s| s.tx_depth = 0), "tx_depth");
        assert_eq!(bad(|s| s.rx_depth = PerfSpec::DEEPEST + 1), "rx_depth");
        assert_eq!(bad(|s| s.cq_mod = 0), "cq_mod");
        assert_eq!(bad(|s| s.duration_ns = Some(0)), "duration");
    }

    #[test]
    fn a_full_window_always_contains_a_signalled_message() {
        for tx_depth in [1, 2, 12, 83, 128] {
            for cq_mod in [1, 7, 100, 1000] {
                for check_data in [false, true] {
                    for size in [1, 4096, 1 << 20] {
                        let spec = PerfSpec {
                            tx_depth,
                            cq_mod,
                            check_data,
                            size,
                            ..spec(PerfOp::Send, PerfMode::Bw)
                        };
                        assert!(spec.signal_every() <= spec.send_queue_depth());
                        assert!(spec.signal_every() >= 1);
                    }
                }
            }
        }
    }

    #[test]
    fn both_sides_agree_on_the_layout() {
        for op in [PerfOp::Send, PerfOp::Write, PerfOp::Read] {
            let client = PerfSpec { check_data: true, ..spec(op, PerfMode::Bw) };
            let server = PerfSpec { role: Role::Server, ..client };
            assert_eq!(client.layout(), server.layout());
            assert_eq!(client.own_seed(), server.peer_seed());
            assert_ne!(client.own_seed(), server.own_seed());
        }
    }

    #[test]
    fn checked_memory_is_bounded() {
        let spec = PerfSpec { check_data: true, size: 1 << 20, ..spec(PerfOp::Send, PerfMode::Bw) };
        assert!(spec.memory_bytes() <= 2 * CHECKED_BYTES, "{}", spec.memory_bytes());
    }
}

//! What a perf test does, and what it needs.

use core::fmt;

use ferroce_verbs::QpType;

use super::layout::{self, Layout, PerfLayout};

/// Operation under test.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum PerfOp {
    /// SEND.
    Send,
    /// RDMA WRITE.
    Write,
    /// RDMA READ.
    Read,
    /// Fetch and add of 1.
    FetchAdd,
    /// Compare and swap.
    CmpSwap,
}

impl PerfOp {
    /// All of them.
    pub const ALL: [PerfOp; 5] =
        [PerfOp::Send, PerfOp::Write, PerfOp::Read, PerfOp::FetchAdd, PerfOp::CmpSwap];

    /// `send`, `write`, `read`, or `atomic` for both atomics: the first word of a test.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            PerfOp::Send => "send",
            PerfOp::Write => "write",
            PerfOp::Read => "read",
            PerfOp::FetchAdd | PerfOp::CmpSwap => "atomic",
        }
    }

    /// True for both atomics.
    #[must_use]
    pub const fn is_atomic(self) -> bool {
        matches!(self, PerfOp::FetchAdd | PerfOp::CmpSwap)
    }

    /// Connections that have it.
    #[must_use]
    pub const fn connections(self) -> &'static [QpType] {
        match self {
            PerfOp::Send => &[QpType::Rc, QpType::Uc, QpType::Ud],
            PerfOp::Write => &[QpType::Rc, QpType::Uc],
            PerfOp::Read | PerfOp::FetchAdd | PerfOp::CmpSwap => &[QpType::Rc],
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

/// A cap of the message rate, over all queue pairs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct PerfRate {
    /// Messages per second, at least 1.
    pub msgs_per_s: u64,
    /// Messages posted at once; the gaps between bursts make the rate.
    pub burst: u32,
}

impl PerfRate {
    /// From the start of one burst to the start of the next, in ns.
    #[must_use]
    pub fn gap_ns(self) -> u64 {
        let gap = u128::from(self.burst) * 1_000_000_000 / u128::from(self.msgs_per_s.max(1));
        u64::try_from(gap).unwrap_or(u64::MAX)
    }
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
    /// Type of the queue pairs: see [`PerfOp::connections`].
    pub connection: QpType,
    /// Queue pairs. A bandwidth test fills the window of one after the other; a latency test takes them in turns.
    pub qps: u32,
    /// Where messages lie.
    pub layout: PerfLayout,
    /// Bytes of a message; 8 for atomics.
    pub size: u32,
    /// Largest message that the memory is laid out for: that of a sweep over the same memory, `size` for a single test.
    pub largest: u32,
    /// Both sides send, write, read or change (bandwidth).
    pub bidirectional: bool,
    /// Messages measured on each queue pair; ignored with a duration.
    pub iters: u64,
    /// Messages before the measurement, on each queue pair. They are done before it starts.
    pub warmup: u64,
    /// Go on for so many ns, then stop posting, instead of a count. A server, too, measures that long from its first
    /// message on; it ends by [`crate::Handle::stop`].
    pub duration_ns: Option<u64>,
    /// With a duration: ns at its beginning and at its end that are not measured. With 0 all messages count, also those
    /// that complete after the time.
    pub margin_ns: u64,
    /// Send work requests outstanding at once, per queue pair.
    pub tx_depth: u32,
    /// Receives kept posted per queue pair (SEND).
    pub rx_depth: u32,
    /// One completion asked for in so many messages.
    pub cq_mod: u32,
    /// Messages posted together (bandwidth).
    pub post_list: u32,
    /// Messages of at most so many bytes are posted inline (SEND, WRITE).
    pub inline_bytes: u32,
    /// Poll only after an event: the service arms its completion queues and looks again when the host, who waits for the
    /// events of their channel, calls [`crate::Handle::notify`].
    pub events: bool,
    /// Cap of the message rate. Of a latency test without `open_loop`, the next message waits for it.
    pub rate: Option<PerfRate>,
    /// Latency at the fixed rate of `rate`: message `i` is meant to start `i` gaps after the first, whatever became of
    /// those before it, and is measured from that moment. What waits for a slow one is counted, not omitted. Up to
    /// `tx_depth` messages are unanswered at once; one for WRITE, whose answer is a byte.
    pub open_loop: bool,
    /// Latency: so many samples are kept in their order, besides the histogram.
    pub keep_samples: u32,
    /// Seed of the data.
    pub seed: u64,
    /// Compare data where it arrives, as far as the layout allows. Slower: for tests.
    pub check_data: bool,
    /// The service fails when nothing happens for so many ns; 0 waits for ever. A passive server is exempt. The receiver
    /// of a bandwidth test over UC or UD ends then, and reports what is missing.
    pub progress_deadline_ns: u64,
}

/// With `check_data` each message outstanding has a buffer of its own; their sum is limited to this, and the depths
/// with it.
const CHECKED_BYTES: u64 = 4 << 20;

impl PerfSpec {
    /// Largest message: 1 GiB.
    pub const LARGEST: u32 = 1 << 30;
    /// Largest datagram.
    pub const LARGEST_UD: u32 = 4096;
    /// Deepest queue.
    pub const DEEPEST: u32 = 1 << 16;
    /// Most queue pairs.
    pub const MOST_QPS: u32 = 4096;
    /// Most messages of one queue pair, warm-up included.
    pub const MOST_MESSAGES: u64 = 1 << 48;

    /// A test with perftest's defaults: RC, one queue pair, latency 1000 messages at depth 1, bandwidth 1000 (write: 5000)
    /// at depth 128; 512 receives; moderation 100, and 1 above 8192 bytes; our layout; progress deadline 30 s.
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
            connection: QpType::Rc,
            qps: 1,
            layout: PerfLayout::Ours,
            size,
            largest: size,
            bidirectional: false,
            iters,
            warmup: 0,
            duration_ns: None,
            margin_ns: 0,
            tx_depth,
            rx_depth: 512,
            cq_mod: if size > 8192 { 1 } else { 100 },
            post_list: 1,
            inline_bytes: 0,
            events: false,
            rate: None,
            open_loop: false,
            keep_samples: 0,
            seed: 1,
            check_data: false,
            progress_deadline_ns: 30_000_000_000,
        }
    }

    /// Send work requests that each queue pair must hold.
    ///
    /// A latency test needs two: the answer may come before the acknowledgement of the message that it answers.
    #[must_use]
    pub fn send_queue_depth(&self) -> u32 {
        let depth = match (self.mode, self.op) {
            (PerfMode::Lat, PerfOp::Send | PerfOp::Write) => self.tx_depth.max(2),
            (PerfMode::Bw | PerfMode::Lat, _) => self.tx_depth,
        };
        self.checked_depth(depth)
    }

    /// Receives that each queue pair must hold; 1 where none are needed.
    #[must_use]
    pub fn recv_queue_depth(&self) -> u32 {
        if self.op == PerfOp::Send { self.checked_depth(self.rx_depth) } else { 1 }
    }

    /// Entries of the completion queue of all sends. A smaller one only slows down.
    #[must_use]
    pub fn send_cq_depth(&self) -> u32 {
        self.send_queue_depth().saturating_mul(self.qps)
    }

    /// Entries of the completion queue of all receives. A smaller one may overflow. If both are one queue, it has the sum.
    #[must_use]
    pub fn recv_cq_depth(&self) -> u32 {
        self.recv_queue_depth().saturating_mul(self.qps)
    }

    /// Bytes of memory that each side prepares.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.layout().bytes
    }

    /// Offset in the memory of what the peer is told of queue pair `qp`: it writes, reads and changes from there on.
    #[must_use]
    pub fn announced_offset(&self, qp: u32) -> u64 {
        self.layout().told(qp as usize)
    }

    /// One completion in so many messages, in force: never more than the window, so that a full one always contains a
    /// message that completes; with lists, a divisor of them.
    #[must_use]
    pub fn signal_every(&self) -> u32 {
        let every = self.cq_mod.min(self.send_queue_depth()).min(self.tx_depth);
        let list = self.list();
        if list > 1 && !list.is_multiple_of(every) { list } else { every }
    }

    /// Messages posted together, in force: never more than the window.
    pub(super) fn list(&self) -> u32 {
        self.post_list.min(self.send_queue_depth())
    }

    /// True if messages are posted inline.
    #[must_use]
    pub fn is_inline(&self) -> bool {
        matches!(self.op, PerfOp::Send | PerfOp::Write)
            && self.inline_bytes > 0
            && self.size <= self.inline_bytes
    }

    /// True for a server that only lets the client read, write or change. It ends by [`crate::Handle::stop`].
    #[must_use]
    pub fn is_passive(&self) -> bool {
        self.role == Role::Server && !self.requests() && self.op != PerfOp::Send
    }

    /// True if this side posts messages: requests, or answers of a latency test.
    #[must_use]
    pub fn requests(&self) -> bool {
        match (self.role, self.mode) {
            (Role::Client, _) => true,
            (Role::Server, PerfMode::Bw) => self.bidirectional,
            (Role::Server, PerfMode::Lat) => matches!(self.op, PerfOp::Send | PerfOp::Write),
        }
    }

    /// True if this side receives messages by posted receives.
    #[must_use]
    pub fn receives(&self) -> bool {
        self.op == PerfOp::Send
            && (self.role == Role::Server || self.mode == PerfMode::Lat || self.bidirectional)
    }

    /// Bytes of each receive: over UD the GRH comes first.
    #[must_use]
    pub fn recv_bytes(&self) -> u32 {
        // LARGEST_UD and the GRH fit.
        self.size.saturating_add(layout::header(self) as u32)
    }

    /// True if messages may be lost for good.
    #[must_use]
    pub fn may_lose(&self) -> bool {
        self.connection != QpType::Rc
    }

    fn checked_depth(&self, depth: u32) -> u32 {
        if !self.check_data || self.layout == PerfLayout::Perftest {
            return depth;
        }
        let fit = (CHECKED_BYTES / (self.slot_bytes() * u64::from(self.qps.max(1)))).max(1);
        depth.min(u32::try_from(fit).unwrap_or(u32::MAX)).max(depth.min(2))
    }

    /// From one slot of our layout to the next: those of the largest message, so that a sweep keeps its places.
    pub(super) fn slot_bytes(&self) -> u64 {
        (u64::from(self.largest) + layout::header(self)).next_multiple_of(64).max(64)
    }

    pub(super) fn layout(&self) -> Layout {
        Layout::of(self)
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
        for op in PerfOp::ALL {
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

//! Counters of a queue pair: one table; printers walk it.

/// What is counted. Names follow rxe's and mlx5's `hw_counters` where one exists.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
pub enum QpCounter {
    /// Packets handed to the sink.
    SentPkts,
    /// Packets taken.
    RcvdPkts,
    /// Duplicate requests seen.
    DuplicateRequest,
    /// Requests ahead of the expected PSN.
    OutOfSequence,
    /// NAK sequence errors received.
    PacketSeqErr,
    /// READ or atomic implied lost by a later ACK.
    ImpliedNakSeqErr,
    /// ACK timeouts.
    LocalAckTimeoutErr,
    /// RNR NAKs received.
    RnrNakRetryErr,
    /// RNR NAKs sent.
    SendRnr,
    /// Packets sent again.
    Retransmits,
    /// Payload bytes sent, retransmissions included.
    SentBytes,
    /// Payload bytes placed.
    RcvdBytes,
}

/// Number of counters.
pub const QP_COUNTERS: usize = QpCounter::RcvdBytes as usize + 1;

/// The counters of one queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QpCounters(pub [u64; QP_COUNTERS]);

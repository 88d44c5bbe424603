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

impl QpCounter {
    /// All of them, in the order of their slots.
    pub const ALL: [QpCounter; QP_COUNTERS] = [
        QpCounter::SentPkts,
        QpCounter::RcvdPkts,
        QpCounter::DuplicateRequest,
        QpCounter::OutOfSequence,
        QpCounter::PacketSeqErr,
        QpCounter::ImpliedNakSeqErr,
        QpCounter::LocalAckTimeoutErr,
        QpCounter::RnrNakRetryErr,
        QpCounter::SendRnr,
        QpCounter::Retransmits,
        QpCounter::SentBytes,
        QpCounter::RcvdBytes,
    ];

    /// Its name in listings.
    pub const fn name(self) -> &'static str {
        match self {
            QpCounter::SentPkts => "sent_pkts",
            QpCounter::RcvdPkts => "rcvd_pkts",
            QpCounter::DuplicateRequest => "duplicate_request",
            QpCounter::OutOfSequence => "out_of_sequence",
            QpCounter::PacketSeqErr => "packet_seq_err",
            QpCounter::ImpliedNakSeqErr => "implied_nak_seq_err",
            QpCounter::LocalAckTimeoutErr => "local_ack_timeout_err",
            QpCounter::RnrNakRetryErr => "rnr_nak_retry_err",
            QpCounter::SendRnr => "send_rnr",
            QpCounter::Retransmits => "retransmits",
            QpCounter::SentBytes => "sent_bytes",
            QpCounter::RcvdBytes => "rcvd_bytes",
        }
    }
}

/// The counters of one queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QpCounters(pub [u64; QP_COUNTERS]);

impl QpCounters {
    /// One of them.
    #[inline]
    pub fn get(&self, which: QpCounter) -> u64 {
        self.0.get(which as usize).copied().unwrap_or(0)
    }

    /// Adds `by`, wrapping.
    #[inline]
    pub(crate) fn add(&mut self, which: QpCounter, by: u64) {
        if let Some(slot) = self.0.get_mut(which as usize) {
            *slot = slot.wrapping_add(by);
        }
    }
}

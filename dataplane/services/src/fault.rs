//! Why a service gave up.

use core::fmt;

use ferroce_verbs::{PostError, Qpn, WcStatus};

/// What went wrong, with the numbers needed to act on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A work request completed with an error.
    Completion {
        /// Status of the completion.
        status: WcStatus,
        /// The work request.
        wr_id: u64,
        /// The implementation's own code.
        vendor_err: u32,
    },
    /// A work request was refused for another reason than back-pressure.
    Post(PostError),
    /// A completion queue could not be polled.
    Poll(PostError),
    /// A received message is not as long as agreed: the two sides were given different sizes.
    Length {
        /// Message number, from 0.
        message: u64,
        /// Bytes agreed.
        expected: u32,
        /// Bytes received.
        got: u32,
    },
    /// A byte differs from what the peer should have sent.
    Data {
        /// Message number, from 0.
        message: u64,
        /// Offset in the message.
        offset: u64,
        /// The byte expected.
        expected: u8,
        /// The byte found.
        got: u8,
    },
    /// An atomic returned, or left behind, another value than those before it allow.
    Atomic {
        /// Message number, from 0.
        message: u64,
        /// The value expected.
        expected: u64,
        /// The value found.
        got: u64,
    },
    /// Two fetch and adds on one counter returned the same value.
    AtomicAgain {
        /// Message number of the second, from 0.
        message: u64,
        /// The value.
        got: u64,
    },
    /// A message differs from the one before it from the same place, which the peer's program never changes.
    Changed {
        /// Message number, from 0.
        message: u64,
    },
    /// Memory that no message goes to was changed.
    Outside {
        /// Offset in the memory.
        offset: u64,
        /// The byte expected.
        expected: u8,
        /// The byte found.
        got: u8,
    },
    /// A message of a latency test was not answered in time, over a transport that repeats nothing.
    Unanswered {
        /// Message number, from 0.
        message: u64,
        /// How long nothing happened, in ns.
        waited_ns: u64,
    },
    /// A completion for something that was never posted.
    UnexpectedCompletion {
        /// Its work request.
        wr_id: u64,
    },
    /// Nothing happened for the progress deadline.
    Stalled {
        /// How long nothing happened, in ns.
        waited_ns: u64,
    },
    /// The service's memory could not be accessed (out of the block's bounds).
    Memory,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Fault::Completion { status, wr_id, vendor_err } => {
                write!(f, "work request {wr_id:#x} completed with {status:?} ({})", status as u8)?;
                if vendor_err != 0 {
                    write!(f, ", detail {vendor_err:#x}")?;
                }
                Ok(())
            }
            Fault::Post(error) => write!(f, "a work request was refused: {error:?}"),
            Fault::Poll(error) => write!(f, "a completion queue could not be polled: {error:?}"),
            Fault::Length { message, expected, got } => {
                write!(
                    f,
                    "message {message} has {got} bytes instead of {expected}: give both sides the same size"
                )
            }
            Fault::Data { message, offset, expected, got } => write!(
                f,
                "message {message} is wrong at offset {offset}: expected {expected:#04x}, found {got:#04x}"
            ),
            Fault::Atomic { message, expected, got } => {
                write!(
                    f,
                    "the counter is wrong after atomic {message}: expected {expected:#x}, found {got:#x}"
                )
            }
            Fault::AtomicAgain { message, got } => {
                write!(f, "atomic {message} returned {got:#x}, as one before it did")
            }
            Fault::Changed { message } => {
                write!(f, "message {message} differs from the one before it from the same place")
            }
            Fault::Outside { offset, expected, got } => write!(
                f,
                "memory at offset {offset}, to which no message goes, was changed: expected {expected:#04x}, \
                 found {got:#04x}"
            ),
            Fault::Unanswered { message, waited_ns } => write!(
                f,
                "message {message} was not answered for {} ms: it or its answer was lost, and UC and UD repeat \
                 nothing",
                waited_ns / 1_000_000
            ),
            Fault::UnexpectedCompletion { wr_id } => {
                write!(f, "completion of {wr_id:#x}, which was never posted")
            }
            Fault::Stalled { waited_ns } => {
                write!(f, "nothing happened for {} ms", waited_ns / 1_000_000)
            }
            Fault::Memory => write!(f, "the service's memory block is too small"),
        }
    }
}

/// A failed service. The host adds what it knows of the peer and the PSNs (`query_qp`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ServiceError {
    /// What went wrong.
    pub fault: Fault,
    /// The local queue pair.
    pub qpn: Qpn,
    /// Messages done before, warm-up included.
    pub done: u64,
}

impl ServiceError {
    /// Status of the completion that failed, if it was one.
    #[must_use]
    pub fn status(&self) -> Option<WcStatus> {
        match self.fault {
            Fault::Completion { status, .. } => Some(status),
            _ => None,
        }
    }
    /// The work request that failed, if it was one.
    #[must_use]
    pub fn wr_id(&self) -> Option<u64> {
        match self.fault {
            Fault::Completion { wr_id, .. } | Fault::UnexpectedCompletion { wr_id } => Some(wr_id),
            _ => None,
        }
    }
}

impl fmt::Display for ServiceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QP {:#08x} after {} messages: {}", self.qpn.get(), self.done, self.fault)
    }
}

impl std::error::Error for ServiceError {}

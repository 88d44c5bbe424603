//! Errors of the two traits.

use alloc::string::String;

/// Why a work request was not taken. `Full` is the normal back-pressure answer, not a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PostError {
    /// The queue, or the completion queue that the request would need an entry of, has no room now.
    Full,
    /// No such queue pair or completion queue on this worker.
    NoSuchQueue,
    /// The queue pair's state does not allow posting.
    BadState,
    /// More scatter/gather entries than the queue pair was made with.
    TooManySge,
    /// Longer than 2^31 bytes, or inline data longer than `max_inline_data`.
    TooLong,
    /// A local key, its bounds or its rights are wrong.
    BadKey,
    /// The operation is not one that this type of queue pair has.
    BadOp,
    /// The scatter list of an atomic is not 8 bytes, or that of a local operation is not empty.
    BadLength,
    /// A datagram without address handle, or with one of another protection domain.
    BadAh,
}

/// A refused control operation: names the attribute, what was asked, what is allowed and how to change it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VerbsError {
    /// What kind of refusal.
    pub kind: VerbsErrorKind,
    /// Attribute or object, in libibverbs' words (`path_mtu`, `cqe`, `qp_state`).
    pub attribute: String,
    /// What was asked for.
    pub asked: String,
    /// What is allowed.
    pub allowed: String,
    /// How to change it; empty when there is no way.
    pub hint: String,
}

impl VerbsError {
    /// What a device answers that does not have the operation `what` (`create_srq`).
    pub fn unsupported(what: &str) -> VerbsError {
        VerbsError {
            kind: VerbsErrorKind::Unsupported,
            attribute: String::from(what),
            asked: String::from("the operation"),
            allowed: String::from("nothing: this device does not have it"),
            hint: String::new(),
        }
    }
}

/// Kinds of refusal; errno in brackets where libibverbs would answer one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum VerbsErrorKind {
    /// Bad attribute or value (EINVAL).
    Invalid,
    /// No such object (ENOENT).
    NotFound,
    /// In use (EBUSY).
    Busy,
    /// A limit is reached (ENOMEM).
    Exhausted,
    /// This implementation or port cannot do it (EOPNOTSUPP).
    Unsupported,
    /// Wrong state for the operation (EINVAL).
    State,
    /// The worker did not answer within the deadline (ETIMEDOUT).
    Timeout,
    /// The device is gone (ENODEV).
    Gone,
}

impl core::fmt::Display for VerbsError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}: asked {}, allowed {}", self.attribute, self.asked, self.allowed)?;
        if !self.hint.is_empty() {
            write!(f, "; {}", self.hint)?;
        }
        Ok(())
    }
}

impl core::error::Error for VerbsError {}

//! Unreliable connection and unreliable datagrams: every packet leaves once, nothing is answered.
//!
//! Called by [`crate::Qp`] only. What is sent is finished when its last packet was handed over. A send that fails stops
//! the send queue (SQE) and leaves the receive side as it is. `sender` is common to both services, `uc` and `ud` take
//! packets, `grh` is the area before a datagram.

mod grh;
mod image;
mod sender;
mod uc;
mod ud;

pub(crate) use sender::Sender;
pub(crate) use uc::UcReceiver;
pub(crate) use ud::UdReceiver;

/// Unreliable connection.
pub(crate) struct Uc {
    pub(crate) sender: Sender,
    pub(crate) receiver: UcReceiver,
}

/// Unreliable datagrams.
pub(crate) struct Ud {
    pub(crate) sender: Sender,
    pub(crate) receiver: UdReceiver,
}

//! A packet on its way through a queue pair: what every step of the responder needs of it.

use ferroce_mem::{Memory, Payload};
use ferroce_wire::Packet;

use crate::srq::Srq;

/// A packet that passed the checks of [`crate::Qp`], its payload, the memory that it may touch, and where receives come
/// from if the queue pair has none of its own.
pub(crate) struct Arrival<'a> {
    pub(crate) packet: &'a Packet,
    pub(crate) payload: &'a Payload<'a>,
    pub(crate) memory: &'a Memory,
    pub(crate) srq: Option<&'a mut Srq>,
}

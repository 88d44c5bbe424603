//! Where `Qp::poll_transmit` puts a packet: the engine's frame, or the simulator's.

use ferroce_mem::MrSlice;
use ferroce_verbs::AddressVector;
use ferroce_wire::{Bth, Ext};

use crate::time::Instant;

/// Takes one packet. Calls come in this order: `begin`, then `payload` and `inline` any number of times (together
/// exactly `payload_len` bytes), then the poll returns [`Transmit::Sent`]. If `begin` answers `false` there is no room:
/// the queue pair changes nothing and returns [`Transmit::NoRoom`].
pub trait FrameSink {
    /// Starts a packet of `payload_len` bytes; the address part is the queue pair's
    /// [`ferroce_verbs::AddressVector`].
    fn begin(&mut self, bth: &Bth, ext: &Ext, payload_len: usize) -> bool;
    /// Where the packet that `begin` starts next goes, for a datagram, whose way is its own and not the queue pair's;
    /// called before `begin`. False if this sink has no way of sending there: the datagram fails. A sink that knows the
    /// way of its queue pair only keeps this body.
    fn address(&mut self, av: &AddressVector) -> bool {
        let _ = av;
        false
    }
    /// Payload from registered memory. Copied at once: the memory may change afterwards.
    fn payload(&mut self, slice: MrSlice<'_>);
    /// Payload posted inline.
    fn inline(&mut self, bytes: &[u8]);
}

/// What a call of `poll_transmit` did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Transmit {
    /// One packet went to the sink; ask again.
    Sent,
    /// Nothing to send now.
    Idle,
    /// Something to send, not before this time (pacing, RNR wait).
    Later(Instant),
    /// The sink had no room; ask again next pass.
    NoRoom,
}

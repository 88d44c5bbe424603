//! Frames between workers: a frame that landed on another worker's queue than its queue pair's is handed over as a
//! private copy.
//!
//! Owns, for every ordered pair of workers, a fixed set of buffers that travel there full and come back empty through two
//! single-producer rings. Invariant: a buffer is owned by exactly one side or ring. A full ring loses the frame, which is
//! counted; the transport recovers. Never allocates after the start.

use std::sync::Arc;

use ferroce_mem::Payload;
use ferroce_wire::Packet;

use crate::idle::Doorbell;

/// Longest payload of a packet.
const PAYLOAD_BYTES: usize = 4096;
/// Buffers of one ordered pair of workers, as long as there are few workers.
const BUFFERS: usize = 128;
/// Buffers that all senders to one worker have together, at most: 2 MiB.
const BUFFERS_PER_WORKER: usize = 512;

/// A frame on its way: parsed, its ICRC found right, its payload copied.
pub(crate) struct Carried {
    pub packet: Packet,
    len: usize,
    bytes: [u8; PAYLOAD_BYTES],
}

impl Carried {
    /// The payload.
    pub fn payload(&self) -> Payload<'_> {
        Payload::from_slice(self.bytes.get(..self.len).unwrap_or(&[]))
    }
}

/// The sender's side towards one worker.
pub(crate) struct Outlet {
    full: rtrb::Producer<Box<Carried>>,
    free: rtrb::Consumer<Box<Carried>>,
    bell: Arc<Doorbell>,
    rung: bool,
}

/// The receiver's side from one worker.
pub(crate) struct Inlet {
    full: rtrb::Consumer<Box<Carried>>,
    free: rtrb::Producer<Box<Carried>>,
}

/// All of one worker.
#[derive(Default)]
pub(crate) struct Forward {
    outlets: Vec<Option<Outlet>>,
    inlets: Vec<Inlet>,
    /// The inlet that is served first in the next pass, so that none starves.
    next: usize,
}

/// The forwarding sides of all workers.
pub(crate) fn mesh(bells: &[Arc<Doorbell>], empty: &Packet) -> Vec<Forward> {
    let n = bells.len();
    let buffers = BUFFERS.min(BUFFERS_PER_WORKER / n.max(1)).max(8);
    let mut all: Vec<Forward> = (0..n).map(|_| Forward::default()).collect();
    for from in 0..n {
        for (to, bell) in bells.iter().enumerate() {
            if from == to {
                all[from].outlets.push(None);
                continue;
            }
            let (full_in, full_out) = rtrb::RingBuffer::new(buffers);
            let (mut free_in, free_out) = rtrb::RingBuffer::new(buffers);
            for _ in 0..buffers {
                // The ring has room for all of them.
                let _ = free_in.push(Box::new(Carried { packet: *empty, len: 0, bytes: [0; PAYLOAD_BYTES] }));
            }
            all[from].outlets.push(Some(Outlet {
                full: full_in,
                free: free_out,
                bell: bell.clone(),
                rung: true,
            }));
            all[to].inlets.push(Inlet { full: full_out, free: free_in });
        }
    }
    all
}

impl Forward {
    /// Hands a packet to `worker`. False if there is no room; nothing happened then.
    pub fn push(&mut self, worker: u8, packet: &Packet, payload: &Payload<'_>) -> bool {
        let Some(Some(outlet)) = self.outlets.get_mut(worker as usize) else { return false };
        if payload.len() > PAYLOAD_BYTES {
            return false;
        }
        let Ok(mut carried) = outlet.free.pop() else { return false };
        carried.packet = *packet;
        carried.len = payload.copy_to(&mut carried.bytes[..]).min(payload.len());
        // As many places as buffers: there is always room.
        let pushed = outlet.full.push(carried).is_ok();
        outlet.rung = false;
        pushed
    }

    /// Takes at most `budget` packets from other workers.
    pub fn drain<F: FnMut(&Carried)>(&mut self, budget: usize, mut f: F) -> usize {
        let mut taken = 0;
        // Always a place in the list: see below.
        let (before, from) = self.inlets.split_at_mut(self.next);
        self.next = if from.len() > 1 { self.next + 1 } else { 0 };
        for inlet in from.iter_mut().chain(before) {
            while taken < budget {
                let Ok(carried) = inlet.full.pop() else { break };
                f(&carried);
                let _ = inlet.free.push(carried);
                taken += 1;
            }
        }
        taken
    }

    /// True if a packet waits.
    pub fn is_waiting(&self) -> bool {
        self.inlets.iter().any(|inlet| !inlet.full.is_empty())
    }

    /// Wakes the workers that were given packets in this pass.
    pub fn flush(&mut self) {
        for outlet in self.outlets.iter_mut().flatten().filter(|o| !o.rung) {
            outlet.rung = true;
            outlet.bell.ring();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Two workers that both fill a third one's budget share it.
    #[test]
    fn no_sender_starves_another() {
        let bells: Vec<_> = (0..3).map(|_| Arc::new(Doorbell::new().expect("an eventfd"))).collect();
        let mut mesh = mesh(&bells, &crate::engine::empty_packet());
        let (mut passes, mut taken) = (0, [0u32; 2]);
        while passes < 100 {
            for from in [0, 1] {
                let mark = [from as u8];
                let packet = crate::engine::empty_packet();
                while mesh.get_mut(from).is_some_and(|f| f.push(2, &packet, &Payload::from_slice(&mark))) {}
            }
            let drained = mesh.get_mut(2).map(|f| {
                f.drain(32, |carried| {
                    let mut mark = [0u8];
                    carried.payload().copy_to(&mut mark);
                    taken[mark[0] as usize] += 1;
                })
            });
            assert_eq!(drained, Some(32));
            passes += 1;
        }
        assert_eq!(taken, [1600, 1600]);
    }
}

//! The transmit path: whose turn it is, and one packet from its queue pair straight into the port's buffer.
//!
//! The sink writes headers, payload, pad and ICRC once, in order; what the CRC covers is what was really written, so
//! registered memory that changes meanwhile never makes a wrong ICRC.

use ferroce_mem::MrSlice;
use ferroce_mem::copy::Target;
use ferroce_nic::PortQueue;
use ferroce_transport::{FrameSink, Instant, Transmit};
use ferroce_verbs::AddressVector;
use ferroce_wire::icrc::Icrc;
use ferroce_wire::{Bth, Ext, Headers, ICRC_BYTES, MAX_HEAD_BYTES, Psn, emit};

use crate::config::IcrcMode;
use crate::core::{WorkerCore, parked_node};
use crate::demux::PathHeaders;
use crate::event::MtuFault;
use crate::stats::{Counter, WorkerBlock};

/// Frames of one pass.
pub(crate) const TX_BUDGET: usize = 64;
const ETHERNET_BYTES: usize = 14;

impl WorkerCore {
    /// Lets the schedule's queue pairs send; returns the frames that went to the port.
    pub(crate) fn transmit<Q: PortQueue>(&mut self, queue: &mut Q) -> usize {
        let mut frames = 0;
        while frames < TX_BUDGET {
            let Some(index) = self.sched.next() else { break };
            match self.send_one(index, queue) {
                (Transmit::Sent, bytes) => {
                    frames += 1;
                    self.sched.sent(index, bytes);
                }
                (Transmit::Idle, _) => self.sched.remove(index),
                (Transmit::Later(at), _) => self.park(index, at),
                (Transmit::NoRoom, _) => {
                    self.block.add(Counter::TxNoRoom, 1);
                    break;
                }
            }
            // Local faults at transmit complete work requests, and a packet sent starts the ACK timer.
            self.collect(index);
        }
        frames
    }

    fn park(&mut self, index: u32, at: Instant) {
        self.sched.remove(index);
        self.wheel.arm(parked_node(index), at);
    }

    /// One packet of one queue pair; with the bytes of its frame.
    fn send_one<Q: PortQueue>(&mut self, index: u32, queue: &mut Q) -> (Transmit, usize) {
        let Some(slot) = self.qps.get_mut(index) else { return (Transmit::Idle, 0) };
        let mut sink = Sink {
            queue: Some(&mut *queue),
            target: None,
            path: slot.path,
            block: &self.block,
            mtu: self.netdev.info.mtu as usize,
            oversize: None,
            offset: 0,
            pad: 0,
            crc: 0,
        };
        let outcome = slot.qp.poll_transmit(self.now, &self.memory, &mut sink);
        let oversize = sink.oversize;
        let bytes = sink.finish(self.icrc);
        if let Some((psn, is_response)) = oversize {
            slot.mtu_fault = slot
                .qp
                .path_mtu()
                .map(|path_mtu| MtuFault::Interface { path_mtu, netdev_mtu: self.netdev.info.mtu });
            // Now, and not after all retries: the interface will not carry it again either.
            slot.qp.cannot_carry(psn, is_response);
        }
        if outcome == Transmit::Sent && bytes != 0 {
            queue.tx_commit(bytes);
            self.block.add(Counter::TxFrames, 1);
            self.block.add(Counter::TxBytes, bytes as u64);
        }
        (outcome, bytes)
    }
}

/// Builds one frame in the port's buffer.
struct Sink<'q, Q> {
    /// Moves into `target` when a frame is reserved.
    queue: Option<&'q mut Q>,
    target: Option<Target<'q>>,
    /// The queue pair's, or the datagram's.
    path: Option<PathHeaders>,
    block: &'q WorkerBlock,
    mtu: usize,
    /// The packet was longer than the interface carries: its PSN, and whether it is a response.
    oversize: Option<(Psn, bool)>,
    offset: usize,
    pad: usize,
    crc: u32,
}

impl<Q: PortQueue> Sink<'_, Q> {
    /// Pad and ICRC; returns the length of the frame, 0 if there is none.
    fn finish(self, icrc: IcrcMode) -> usize {
        let Some(mut target) = self.target else { return 0 };
        let pad = [0u8; 3];
        let crc = target.write_crc(self.offset, pad.get(..self.pad).unwrap_or(&[]), self.crc);
        let wire = match icrc {
            IcrcMode::On => Icrc(crc).to_wire(),
            IcrcMode::Off => [0; ICRC_BYTES],
        };
        target.write(self.offset + self.pad, &wire);
        self.offset + self.pad + ICRC_BYTES
    }

    /// The packet counts as sent and goes nowhere: no other queue pair waits behind it. What is too long ends its queue pair
    /// at once; else the peer's silence does, in bounded time.
    #[cold]
    fn discard(&self, counter: Counter) -> bool {
        self.block.add(counter, 1);
        true
    }
}

impl<Q: PortQueue> FrameSink for Sink<'_, Q> {
    fn begin(&mut self, bth: &Bth, ext: &Ext, payload_len: usize) -> bool {
        let Some(path) = self.path else { return self.discard(Counter::TxUnsendable) };
        let headers = Headers {
            eth: path.eth,
            ip: path.ip,
            udp_src: path.udp_src,
            udp_checksum: 0,
            bth: *bth,
            ext: *ext,
        };
        let mut head = [0u8; MAX_HEAD_BYTES];
        let Ok(head_len) = emit::emit(&headers, payload_len, &mut head) else {
            return self.discard(Counter::TxUnsendable);
        };
        let pad = emit::pad_of(payload_len);
        let frame_len = head_len + payload_len + pad + ICRC_BYTES;
        // The bound that the port goes by too: it would answer "no room" for ever.
        if frame_len > self.mtu + ETHERNET_BYTES {
            self.oversize = Some((bth.psn, bth.opcode.is_response()));
            return self.discard(Counter::TxOversize);
        }
        let Some(frame) = self.queue.take().and_then(|queue| queue.tx_reserve(frame_len)) else {
            return false;
        };
        let mut target = frame.buf;
        let head = head.get(..head_len).unwrap_or(&[]);
        target.write(0, head);
        self.crc = Icrc::over_headers(head, emit::ip_offset(&headers)).0;
        (self.offset, self.pad, self.target) = (head_len, pad, Some(target));
        true
    }

    fn address(&mut self, av: &AddressVector) -> bool {
        self.path = PathHeaders::new(av);
        self.path.is_some()
    }

    fn payload(&mut self, slice: MrSlice<'_>) {
        if let Some(target) = &mut self.target {
            self.crc = target.write_slice_crc(self.offset, slice, self.crc);
            self.offset += slice.len();
        }
    }

    fn inline(&mut self, bytes: &[u8]) {
        if let Some(target) = &mut self.target {
            self.crc = target.write_crc(self.offset, bytes, self.crc);
            self.offset += bytes.len();
        }
    }
}

//! [`Model`]: what an observer of a queue pair knows of it, and what may therefore happen next.
//!
//! Owns the posted work in order, and what was sent under which PSN. Knows nothing of the queue pair's insides. After an
//! image of unknown origin was imported it knows only how much is posted.

use std::collections::{HashMap, VecDeque};

use ferroce_transport::Completion;
use ferroce_verbs::{QpInfo, QpState, Sge, Wc, WcOpcode, WcStatus};
use ferroce_wire::{Op, Packet, PathMtu, Psn, Reth, Service};

/// A send that was accepted and not completed. `None`: not known.
#[derive(Clone, Debug, Default)]
pub struct Send {
    /// Work request.
    pub id: Option<u64>,
    /// Gets a completion when it succeeds.
    pub signaled: Option<bool>,
    /// Message bytes.
    pub len: Option<u32>,
    /// READ or atomic: its entries are written.
    pub fetches: bool,
    /// Entries.
    pub sges: Vec<Sge>,
}

/// A receive that was accepted and not completed. `None`: not known.
#[derive(Clone, Debug, Default)]
pub struct Recv {
    /// Work request.
    pub id: Option<u64>,
    /// Bytes of room.
    pub room: Option<u64>,
    /// Entries.
    pub sges: Vec<Sge>,
}

/// A READ that was sent.
#[derive(Clone, Copy, Debug)]
struct Read {
    first: Psn,
    packets: u32,
    reth: Reth,
    mtu: PathMtu,
}

/// What is known.
#[derive(Clone, Debug, Default)]
pub struct Model {
    /// In the order of their posts.
    pub sends: VecDeque<Send>,
    /// In the order of their posts, or of their taking from the shared queue.
    pub recvs: VecDeque<Recv>,
    /// In the shared queue.
    pub srq: VecDeque<Recv>,
    /// Came by an image of unknown origin.
    pub imported: bool,
    /// The next new PSN, from RTS on.
    next: Option<Psn>,
    /// First sending of each request packet.
    sent: HashMap<u32, Packet>,
    /// READ requests, newest last.
    reads: Vec<Read>,
    /// PSN of the last request that was taken.
    pub last_taken: Option<Psn>,
    /// Went to ERR by itself, and how often that was told.
    pub broke: bool,
    told: u32,
    /// Since it came to SQD, that it is drained was told.
    pub drained: bool,
    /// Its ACK timeout was never infinite.
    pub timed: bool,
}

/// `psn` lies this far after `base`, going round.
fn distance(psn: Psn, base: Psn) -> u32 {
    psn.get().wrapping_sub(base.get()) & 0xff_ffff
}

fn packets(len: u32, mtu: PathMtu) -> u32 {
    len.div_ceil(mtu.bytes()).max(1)
}

impl Model {
    /// RESET: everything is forgotten, but what the shared queue holds.
    pub fn reset(&mut self) {
        *self = Model { srq: std::mem::take(&mut self.srq), ..Model::default() };
    }

    /// Sends begin at `psn`.
    pub fn start(&mut self, psn: Psn, timeout: u8) {
        self.next = Some(psn);
        self.timed = timeout != 0;
        self.sent.clear();
        self.reads.clear();
    }

    /// An image was imported: so many sends and receives are posted.
    pub fn adopt(&mut self, info: &QpInfo, sends: u32, recvs: u32) {
        let srq = std::mem::take(&mut self.srq);
        *self = Model {
            sends: vec![Send { fetches: true, ..Send::default() }; sends as usize].into(),
            recvs: vec![Recv::default(); recvs as usize].into(),
            srq,
            imported: true,
            next: info.rts.is_some().then_some(info.sq_psn),
            ..Model::default()
        };
    }

    /// The newest READ that has `psn` among its responses.
    fn read_at(&self, psn: Psn) -> Option<&Read> {
        self.reads.iter().rev().find(|read| distance(psn, read.first) < read.packets)
    }

    /// Payload bytes of the response with this PSN to a READ of ours, if there is one.
    pub fn read_due(&self, psn: Psn) -> Option<usize> {
        let read = self.read_at(psn)?;
        let bytes = read.mtu.bytes();
        let left = read.reth.len.0.saturating_sub(distance(psn, read.first) * bytes);
        Some(left.min(bytes) as usize)
    }

    /// A frame left while the queue pair was as in `before`.
    pub fn on_sent(&mut self, before: &QpInfo, service: Service, packet: &Packet) {
        let state = before.state;
        let opcode = packet.headers.bth.opcode;
        assert_eq!(opcode.service(), service, "sent {opcode:?}");
        let mtu = before.rtr.expect("a path").path_mtu;
        let bytes = u32::from(packet.payload_len);
        assert!(bytes <= mtu.bytes(), "{bytes} bytes sent at path MTU {}", mtu.bytes());
        if opcode.is_response() {
            let may = matches!(state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Err);
            assert!(may, "an answer sent in {state:?}");
            return;
        }
        assert!(matches!(state, QpState::Rts | QpState::Sqd), "a request sent in {state:?}");
        let psn = packet.headers.bth.psn;
        let next = self.next.expect("sends began");
        if service != Service::Rc {
            assert_eq!(psn, next, "each PSN once, in order");
            self.next = Some(psn.advance(1));
            return;
        }
        let spans = match packet.headers.ext.reth {
            Some(reth) if opcode.op() == Op::ReadRequest => packets(reth.len.0, mtu),
            _ => 1,
        };
        if psn == next {
            self.next = Some(psn.advance(spans));
            self.sent.insert(psn.get(), *packet);
            if let (Some(reth), Op::ReadRequest) = (packet.headers.ext.reth, opcode.op()) {
                self.reads.push(Read { first: psn, packets: spans, reth, mtu });
            }
            return;
        }
        let (at, out) = (distance(psn, before.una_psn), distance(next, before.una_psn));
        assert!(at < out, "{psn:?} sent, {:?} .. {next:?} is outstanding", before.una_psn);
        self.check_again(psn, mtu, packet);
    }

    /// Sent again: as it was the first time, or the rest of a READ.
    fn check_again(&self, psn: Psn, mtu: PathMtu, packet: &Packet) {
        let headers = &packet.headers;
        if headers.bth.opcode.op() == Op::ReadRequest {
            let Some(Read { first, reth: was, .. }) = self.read_at(psn) else {
                assert!(self.imported, "a READ again that was never sent: {packet}");
                return;
            };
            let (now, offset) = (headers.ext.reth.expect("RETH"), distance(psn, *first) * mtu.bytes());
            assert_eq!(now.addr, was.addr.advance(offset.into()), "a READ resumed elsewhere");
            assert_eq!((now.len.0, now.rkey), (was.len.0 - offset, was.rkey), "a READ resumed otherwise");
            return;
        }
        let Some(was) = self.sent.get(&psn.get()) else {
            assert!(self.imported, "{packet} again, which was never sent");
            return;
        };
        let same = (was.headers.bth.opcode, was.headers.ext, was.payload_len);
        assert_eq!((headers.bth.opcode, headers.ext, packet.payload_len), same, "sent again otherwise");
    }

    /// What the queue pair says of itself agrees with what was seen.
    pub fn agrees(&self, info: &QpInfo, sends: u32) {
        assert_eq!(sends as usize, self.sends.len(), "sends posted and not completed");
        if let (Some(next), true) = (self.next, info.state != QpState::Reset) {
            assert_eq!(info.sq_psn, next, "the next new PSN");
        }
    }

    /// A completion was read in `state`.
    pub fn on_completion(&mut self, completion: &Completion) {
        let wc = match completion {
            Completion::Retired => {
                let send = self.sends.pop_front().expect("retired, and nothing was posted");
                assert_ne!(send.signaled, Some(true), "retired, although signalled");
                return;
            }
            Completion::Wc(wc) => wc,
        };
        if wc.is_recv { self.on_recv(wc) } else { self.on_send(wc) }
    }

    fn on_send(&mut self, wc: &Wc) {
        let send = self.sends.pop_front().expect("completed, and nothing was posted");
        assert!(send.id.is_none_or(|id| id == wc.wr_id), "{wc:?}, {send:?} was next");
        if wc.status == WcStatus::Success {
            assert_ne!(send.signaled, Some(false), "a completion, although unsignalled");
            assert!(send.len.is_none_or(|len| len == wc.byte_len), "{wc:?} of {send:?}");
        }
    }

    fn on_recv(&mut self, wc: &Wc) {
        let recv = self.recvs.pop_front().expect("received, and nothing was posted");
        assert!(recv.id.is_none_or(|id| id == wc.wr_id), "{wc:?}, {recv:?} was next");
        if wc.status == WcStatus::Success && wc.opcode == WcOpcode::Recv {
            let room = recv.room.unwrap_or(u64::MAX);
            assert!(u64::from(wc.byte_len) <= room || self.imported, "{wc:?} in {recv:?}");
        }
    }

    /// The queue pair said that it broke.
    pub fn on_fatal(&mut self) {
        self.told += 1;
        assert!(self.broke || self.imported, "fatal, and it did not go to ERR by itself");
        assert!(self.told == 1, "told twice");
    }

    /// At the end, in ERR, with everything read.
    pub fn finished(&self) {
        assert!(self.sends.is_empty(), "never completed: {:?}", self.sends);
        assert!(self.recvs.is_empty(), "never completed: {:?}", self.recvs);
        assert!(self.told == 1 || !self.broke, "broke, and did not say so");
    }

    /// Entries of posted work under `lkey`.
    pub fn holds(&self, lkey: ferroce_mem::Lkey) -> u32 {
        let sends = self.sends.iter().flat_map(|send| &send.sges);
        let recvs = self.recvs.iter().chain(&self.srq).flat_map(|recv| &recv.sges);
        sends.chain(recvs).filter(|sge| sge.length > 0 && sge.lkey == lkey).count() as u32
    }
}

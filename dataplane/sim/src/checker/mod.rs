//! What must hold, whatever the wires did.
//!
//! Owns a model of each direction of each connection (what was posted, in order) and of every byte of registered
//! memory. It is told of each post and each completion, and reads the real memory through [`Bytes`]. It knows neither
//! the transport nor how the work was chosen. Checked are: bytes equal at both ends, in place no later than the
//! completion that tells of them; completions in order of each queue and exactly once; status, opcode, length and
//! immediate right; a receive completes no later than the send that filled it; no byte outside a target changes.

mod atomics;
mod keys;
mod shared;
mod unreliable;
mod wc;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::rc::Rc;

use ferroce_transport::Completion;
use ferroce_verbs::{Rkey, Wc, WcStatus};

use atomics::Step;
use keys::Sealed;
use shared::Shared;
use unreliable::Inbox;
use wc::{check_recv_wc, check_send_wc};

pub use crate::record::{Bytes, Mode, OpKind, Operands, Piece, RecvRecord, SendRecord};
use crate::world::QpRef;

/// What kind of promise was broken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ViolationKind {
    /// Received or read bytes are not those sent.
    BytesDiffer,
    /// Memory outside all targets changed.
    StrayWrite,
    /// A completion is not that of the oldest request.
    OutOfOrder,
    /// A completion came for nothing, or a request never completed.
    NotOnce,
    /// Not the status that the run must give.
    WrongStatus,
    /// Opcode, length, immediate or flags of a completion are wrong.
    WrongCompletion,
    /// A notice that nothing explains, or the wrong one.
    WrongNotice,
    /// No progress, or no rest.
    Stuck,
    /// A frame that was sent right was refused.
    FrameRefused,
    /// A damaged frame was taken.
    DamageAccepted,
    /// A frame was sent wrong.
    BadFrame,
    /// A post was refused that should have been taken.
    PostRefused,
    /// The results of the atomics on a cell are not those of executing each once and in order.
    AtomicNotOnce,
    /// A message of an unreliable service arrived that nobody sent, or not as it was sent.
    NotWhole,
    /// The image of a queue pair was refused.
    ImageRefused,
    /// A window is open that must be closed, or the other way round.
    WrongWindow,
    /// Retries were not as many as agreed upon.
    WrongRetries,
    /// Something was sent, or finished, from a send queue that was drained.
    NotDrained,
    /// A message of an unreliable service did not arrive although the wires lose nothing.
    NotServed,
    /// A key opened after it was gone.
    KeyOutlived,
}

/// A broken promise.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// What kind.
    pub kind: ViolationKind,
    /// What happened.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.what)
    }
}

fn broken<T>(kind: ViolationKind, what: String) -> Result<T, Violation> {
    Err(Violation { kind, what })
}

/// A finished request, handed back to whoever owns its memory.
#[derive(Clone, Debug)]
pub enum Finished {
    /// A send of the flow with this index.
    Send(usize, SendRecord, WcStatus),
    /// A receive of the flow with this index.
    Recv(usize, RecvRecord, WcStatus),
}

/// One direction of a connection: sends of `from`, receives of `to`.
struct Flow {
    mode: Mode,
    from: QpRef,
    to: QpRef,
    sends: VecDeque<SendRecord>,
    /// Sends finished so far, which is the number of the first in `sends`.
    done: u64,
    posted: u64,
    /// Consuming sends among the finished ones.
    consumed: u64,
    /// What the receiver has not seen yet, by number.
    arriving: VecDeque<(u64, SendRecord)>,
    recvs: VecDeque<RecvRecord>,
    /// Receives completed with success.
    arrived: u64,
    /// Statuses with which the first send may fail.
    may_fail: Vec<WcStatus>,
    failed: bool,
    may_flush: bool,
}

/// The model.
pub struct Checker {
    flows: Vec<Flow>,
    /// What each endpoint's memory must hold.
    shadow: Vec<Vec<u8>>,
    /// Targets of failed requests: may hold anything.
    unknown: Vec<(usize, Piece)>,
    /// Atomics that were done, by endpoint and offset of their cell.
    cells: BTreeMap<(usize, usize), Vec<Step>>,
    /// WRITEs that may be in place, in part or not: endpoint, offset, bytes.
    perhaps: Vec<(usize, usize, Rc<[u8]>)>,
    /// Messages received on unreliable directions.
    pub unreliable: u64,
    /// Cells at which an atomic failed: nobody knows whether it was executed.
    spoilt: BTreeSet<(usize, usize)>,
    /// Shared receive queues, by endpoint.
    shared: BTreeMap<usize, Shared>,
    /// What members of groups have not got yet.
    inboxes: Vec<Inbox>,
    /// Datagrams to groups received.
    pub multicast: u64,
    /// The key that was taken away.
    gone: Option<Rkey>,
    /// Targets of WRITEs that were not finished when their key was taken away, as they were then.
    sealed: Vec<Sealed>,
}

impl Checker {
    /// A model of endpoints whose memory holds `memory` now.
    pub fn new(memory: Vec<Vec<u8>>) -> Self {
        Checker {
            flows: Vec::new(),
            shadow: memory,
            unknown: Vec::new(),
            cells: BTreeMap::new(),
            perhaps: Vec::new(),
            unreliable: 0,
            spoilt: BTreeSet::new(),
            shared: BTreeMap::new(),
            inboxes: Vec::new(),
            multicast: 0,
            gone: None,
            sealed: Vec::new(),
        }
    }

    /// Adds a direction; returns its index. Each connection has two.
    pub fn add_flow(&mut self, from: QpRef, to: QpRef, mode: Mode) -> usize {
        self.flows.push(Flow {
            mode,
            from,
            to,
            sends: VecDeque::new(),
            done: 0,
            posted: 0,
            consumed: 0,
            arriving: VecDeque::new(),
            recvs: VecDeque::new(),
            arrived: 0,
            may_fail: Vec::new(),
            failed: false,
            may_flush: false,
        });
        self.flows.len() - 1
    }

    /// The program wrote these bytes itself.
    pub fn wrote(&mut self, endpoint: usize, offset: usize, bytes: &[u8]) {
        self.shadow[endpoint][offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    /// A send was posted.
    pub fn posted_send(&mut self, bytes: &impl Bytes, flow: usize, record: SendRecord) {
        self.seal(bytes, flow, &record);
        if let Some(group) = record.group {
            self.posted_to_group(self.flows[flow].from, group, &record);
        }
        let flow = &mut self.flows[flow];
        if record.group.is_none() {
            flow.arriving.push_back((flow.posted, record.clone()));
        }
        flow.sends.push_back(record);
        flow.posted += 1;
    }

    /// A receive was posted.
    pub fn posted_recv(&mut self, flow: usize, record: RecvRecord) {
        self.flows[flow].recvs.push_back(record);
    }

    /// From now on the oldest send of this direction may fail with `status`, and everything behind it is flushed.
    pub fn may_fail(&mut self, flow: usize, status: WcStatus) {
        self.flows[flow].may_fail.push(status);
    }

    /// From now on receives of this direction may be flushed.
    pub fn may_flush(&mut self, flow: usize) {
        self.flows[flow].may_flush = true;
    }

    /// Sends of a direction that are not finished.
    pub fn sends_open(&self, flow: usize) -> usize {
        self.flows[flow].sends.len()
    }
    /// Receives of a direction that are not finished.
    pub fn recvs_open(&self, flow: usize) -> usize {
        self.flows[flow].recvs.len()
    }
    /// True once a send of the direction failed.
    pub fn has_failed(&self, flow: usize) -> bool {
        self.flows[flow].failed
    }

    /// A queue pair reported a completion.
    pub fn completed(
        &mut self,
        bytes: &impl Bytes,
        at: QpRef,
        completion: &Completion,
    ) -> Result<Finished, Violation> {
        match completion {
            Completion::Retired => self.send_done(bytes, at, None),
            Completion::Wc(wc) if wc.is_recv => self.recv_done(bytes, at, wc),
            Completion::Wc(wc) => self.send_done(bytes, at, Some(wc)),
        }
    }

    fn send_done(&mut self, bytes: &impl Bytes, at: QpRef, wc: Option<&Wc>) -> Result<Finished, Violation> {
        let index = self.flows.iter().position(|flow| flow.from == at).unwrap_or(usize::MAX);
        let Some(flow) = self.flows.get_mut(index) else {
            return broken(ViolationKind::NotOnce, format!("{at:?} has no sends"));
        };
        let status = wc.map_or(WcStatus::Success, |wc| wc.status);
        let Some(record) = flow.sends.pop_front() else {
            return broken(
                ViolationKind::NotOnce,
                format!("{at:?}: a completion, but nothing is posted: {wc:?}"),
            );
        };
        flow.done += 1;
        check_send_wc(at, &record, wc)?;
        if status != WcStatus::Success {
            check_failure(at, flow, status)?;
            if status == WcStatus::RemAccessErr && (self.gone.is_none() || record.window != self.gone) {
                let what = format!("{at:?}: wr_id {}: {status:?}, its key opens", record.wr_id);
                return broken(ViolationKind::WrongStatus, what);
            }
            self.forget_target(index, &record);
            return Ok(Finished::Send(index, record, status));
        }
        if flow.failed {
            return broken(
                ViolationKind::WrongStatus,
                format!("{at:?}: wr_id {} succeeds after a failure", record.wr_id),
            );
        }
        if record.consumes() && flow.mode == Mode::Reliable {
            flow.consumed += 1;
            if flow.arrived < flow.consumed {
                let what =
                    format!("{at:?}: wr_id {} is done, but the peer has not received it", record.wr_id);
                return broken(ViolationKind::NotOnce, what);
            }
        }
        let (from, to) = (flow.from.endpoint, flow.to.endpoint);
        match record.kind {
            OpKind::Send => {}
            OpKind::Write if flow.mode != Mode::Reliable => {
                self.perhaps.push((to, record.remote, record.data.clone()));
            }
            OpKind::Write => {
                self.settle(bytes, to, &[(record.remote, record.data.len())], &record)?;
                self.unseal(bytes, &record)?;
            }
            OpKind::Read => self.settle(bytes, from, &record.local, &record)?,
            OpKind::CmpSwap | OpKind::FetchAdd => self.note_atomic(bytes, index, &record),
            OpKind::BindMw | OpKind::LocalInv => {
                let bound = record.window.is_some_and(|rkey| bytes.is_bound(from, rkey));
                if bound != (record.kind == OpKind::BindMw) {
                    let what = format!("{at:?}: {:?} is done, the key opens: {bound}", record.kind);
                    return broken(ViolationKind::WrongWindow, what);
                }
            }
        }
        Ok(Finished::Send(index, record, status))
    }

    fn recv_done(&mut self, bytes: &impl Bytes, at: QpRef, wc: &Wc) -> Result<Finished, Violation> {
        let index = self.flows.iter().position(|flow| flow.to == at).unwrap_or(usize::MAX);
        let Some(flow) = self.flows.get_mut(index) else {
            return broken(ViolationKind::NotOnce, format!("{at:?} has no receives"));
        };
        let Some(recv) = flow.recvs.pop_front() else {
            return broken(
                ViolationKind::NotOnce,
                format!("{at:?}: a receive completion for none posted: {wc:?}"),
            );
        };
        if wc.wr_id != recv.wr_id {
            let what = format!("{at:?}: receive {} completed, the oldest is {}", wc.wr_id, recv.wr_id);
            return broken(ViolationKind::OutOfOrder, what);
        }
        if wc.status != WcStatus::Success {
            if wc.status != WcStatus::WrFlushErr || !flow.may_flush {
                return broken(
                    ViolationKind::WrongStatus,
                    format!("{at:?}: receive {} {:?}", wc.wr_id, wc.status),
                );
            }
            // A message may have been half in.
            let to = flow.to.endpoint;
            self.unknown.extend(recv.pieces.iter().map(|piece| (to, *piece)));
            return Ok(Finished::Recv(index, recv, wc.status));
        }
        if flow.mode != Mode::Reliable {
            self.unreliable_arrival(bytes, index, &recv, wc)?;
            return Ok(Finished::Recv(index, recv, wc.status));
        }
        let record = self.next_arrival(bytes, index, at)?;
        check_recv_wc(at, &record, wc)?;
        let to = at.endpoint;
        let target = match record.kind {
            OpKind::Send => take(&recv.pieces, record.data.len()),
            _ => vec![(record.remote, record.data.len())],
        };
        // The key stays closed: its owner binds again only once the sender knows.
        if record.kind == OpKind::Send && record.window.is_some_and(|rkey| bytes.is_bound(to, rkey)) {
            let what = format!("{at:?}: wr_id {} was received, its key still opens", record.wr_id);
            return broken(ViolationKind::WrongWindow, what);
        }
        self.settle(bytes, to, &target, &record)?;
        self.flows[index].arrived += 1;
        Ok(Finished::Recv(index, recv, wc.status))
    }

    /// The next send that consumes a receive. WRITEs posted before it must be in place by now.
    fn next_arrival(&mut self, bytes: &impl Bytes, index: usize, at: QpRef) -> Result<SendRecord, Violation> {
        loop {
            let flow = &mut self.flows[index];
            let Some((number, record)) = flow.arriving.pop_front() else {
                return broken(ViolationKind::NotOnce, format!("{at:?}: received what nobody sent"));
            };
            if record.consumes() {
                return Ok(record);
            }
            // Once the sender knows that it is done, its target may be in use for something else.
            if record.kind == OpKind::Write && number >= flow.done {
                self.settle(bytes, at.endpoint, &[(record.remote, record.data.len())], &record)?;
            }
        }
    }

    /// The target must hold the data, and does so from now on.
    fn settle(
        &mut self,
        bytes: &impl Bytes,
        endpoint: usize,
        target: &[Piece],
        record: &SendRecord,
    ) -> Result<(), Violation> {
        let mut done = 0;
        for (offset, len) in target {
            let expected = &record.data[done..done + len];
            let found = bytes.read(endpoint, *offset, *len);
            if let Some(at) = (0..*len).find(|at| found[*at] != expected[*at]) {
                let what = format!(
                    "endpoint {endpoint}, {:?} wr_id {} of {} bytes: byte {} at offset {:#x} is {:#04x}, must be {:#04x}",
                    record.kind,
                    record.wr_id,
                    record.data.len(),
                    done + at,
                    offset + at,
                    found[at],
                    expected[at]
                );
                return broken(ViolationKind::BytesDiffer, what);
            }
            self.shadow[endpoint][*offset..offset + len].copy_from_slice(expected);
            done += len;
        }
        if done == record.data.len() {
            return Ok(());
        }
        let what = format!("wr_id {}: target of {done} bytes for {}", record.wr_id, record.data.len());
        broken(ViolationKind::WrongCompletion, what)
    }

    fn forget_target(&mut self, index: usize, record: &SendRecord) {
        let flow = &self.flows[index];
        match record.kind {
            OpKind::Send => {}
            OpKind::Write => self.unknown.push((flow.to.endpoint, (record.remote, record.data.len()))),
            OpKind::Read => {
                let from = flow.from.endpoint;
                self.unknown.extend(record.local.iter().map(|piece| (from, *piece)));
            }
            OpKind::CmpSwap | OpKind::FetchAdd => {
                let (from, to) = (flow.from.endpoint, flow.to.endpoint);
                self.unknown.extend(record.local.iter().map(|piece| (from, *piece)));
                self.spoilt.insert((to, record.remote));
            }
            OpKind::BindMw | OpKind::LocalInv => {}
        }
    }

    /// At the end: nothing is open, and every byte of memory is what it must be.
    pub fn finish(&mut self, bytes: &impl Bytes) -> Result<(), Violation> {
        for flow in &self.flows {
            if !flow.sends.is_empty() || !flow.recvs.is_empty() {
                let (sends, recvs) = (flow.sends.len(), flow.recvs.len());
                let what = format!(
                    "{:?} to {:?}: {sends} sends and {recvs} receives never completed",
                    flow.from, flow.to
                );
                return broken(ViolationKind::NotOnce, what);
            }
        }
        self.finish_cells(bytes)?;
        self.finish_sealed(bytes)?;
        for (endpoint, shadow) in self.shadow.iter_mut().enumerate() {
            let real = bytes.read(endpoint, 0, shadow.len());
            for (_, offset, data) in self.perhaps.iter().filter(|(of, _, _)| *of == endpoint) {
                for (at, byte) in data.iter().enumerate().filter(|(at, byte)| real[offset + at] == **byte) {
                    shadow[offset + at] = *byte;
                }
            }
            for (_, (offset, len)) in self.unknown.iter().filter(|(of, _)| *of == endpoint) {
                shadow[*offset..offset + len].copy_from_slice(&real[*offset..offset + len]);
            }
            if let Some(at) = (0..real.len()).find(|at| real[*at] != shadow[*at]) {
                let what = format!(
                    "endpoint {endpoint}: byte {at:#x} is {:#04x}, must be {:#04x}",
                    real[at], shadow[at]
                );
                return broken(ViolationKind::StrayWrite, what);
            }
        }
        Ok(())
    }
}

/// The first `len` bytes of a scatter list.
fn take(pieces: &[Piece], len: usize) -> Vec<Piece> {
    let mut left = len;
    let mut taken = Vec::new();
    for (offset, size) in pieces {
        let part = left.min(*size);
        taken.push((*offset, part));
        left -= part;
    }
    taken
}

fn check_failure(at: QpRef, flow: &mut Flow, status: WcStatus) -> Result<(), Violation> {
    let flushed = [WcStatus::WrFlushErr];
    let allowed = if flow.failed { &flushed[..] } else { &flow.may_fail };
    if !allowed.contains(&status) {
        return broken(ViolationKind::WrongStatus, format!("{at:?}: {status:?}, allowed {allowed:?}"));
    }
    flow.failed = true;
    Ok(())
}

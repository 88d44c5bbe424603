//! The suite that all implementations of verbs pass, on two engines that `shm` joins, with one and with two workers.
//!
//! Each call of [`Queues`] is carried to the worker that owns the queues and its answer back, so what the suite sees is
//! what a service on that worker sees.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ferroce_engine::{EngineEventKind, PathRequest, SoftDevice, WorkerCore, address_vector};
use ferroce_mem::os::Block;
use ferroce_verbs::conformance::{self, Deviation, End, Harness, Need};
use ferroce_verbs::{
    AddressVector, AsyncEvent, CqId, Gid, PostError, QpHandle, Qpn, Queues, RecvWr, SendWr, SrqId, Wc,
    WcStatus,
};

use crate::harness::{IP_A, IP_B, Node, PATIENCE, Pair, Remote};

/// A worker's queues from outside.
struct Carried(Remote);

impl Queues for Carried {
    fn post_send(&mut self, qp: QpHandle, wr: &SendWr<'_>) -> Result<(), PostError> {
        let (wr_id, op, flags, ud) = (wr.wr_id, wr.op, wr.flags, wr.ud.copied());
        let (sges, inline) = (wr.sg_list.to_vec(), wr.inline.to_vec());
        self.0.run(move |core: &mut WorkerCore| {
            let wr = SendWr { wr_id, op, sg_list: &sges, inline: &inline, flags, ud: ud.as_ref() };
            core.post_send(qp, &wr)
        })
    }
    fn post_recv(&mut self, qp: QpHandle, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let (wr_id, sges) = (wr.wr_id, wr.sg_list.to_vec());
        self.0.run(move |core| core.post_recv(qp, &RecvWr { wr_id, sg_list: &sges }))
    }
    fn post_srq_recv(&mut self, srq: SrqId, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let (wr_id, sges) = (wr.wr_id, wr.sg_list.to_vec());
        self.0.run(move |core| core.post_srq_recv(srq, &RecvWr { wr_id, sg_list: &sges }))
    }
    fn poll_cq(&mut self, cq: CqId, out: &mut [Wc]) -> Result<usize, PostError> {
        let room = out.len();
        let got = self.0.run(move |core| {
            let mut batch = vec![Wc::EMPTY; room];
            core.poll_cq(cq, &mut batch).map(|got| {
                batch.truncate(got);
                batch
            })
        })?;
        out.iter_mut().zip(&got).for_each(|(to, from)| *to = *from);
        Ok(got.len())
    }
    fn req_notify(&mut self, cq: CqId, solicited_only: bool) -> Result<(), PostError> {
        self.0.run(move |core| core.req_notify(cq, solicited_only))
    }
}

struct Memory(Arc<Block>);

impl conformance::Block for Memory {
    type Memory = Arc<Block>;
    fn memory(&self) -> Arc<Block> {
        self.0.clone()
    }
    fn write(&self, at: usize, bytes: &[u8]) {
        self.0.write(at, bytes);
    }
    fn read(&self, at: usize, bytes: &mut [u8]) {
        self.0.read(at, bytes);
    }
}

struct SoftNode {
    node: Node,
    queues: Carried,
    worker: u8,
}

impl SoftNode {
    fn new(node: Node, worker: u8) -> Self {
        SoftNode { queues: Carried(node.remote(worker)), node, worker }
    }
}

impl conformance::Node for SoftNode {
    type Device = SoftDevice;
    type Queues = Carried;
    type Block = Memory;

    fn device(&self) -> &SoftDevice {
        &self.node.device
    }
    fn queues(&mut self) -> &mut Carried {
        &mut self.queues
    }
    fn worker(&self) -> u8 {
        self.worker
    }
    fn gid(&self) -> Gid {
        self.node.gid
    }
    fn block(&mut self, bytes: usize) -> Memory {
        let block = self.node.arena.alloc(bytes, 64).expect("room in the arena");
        block.fill(0);
        Memory(Arc::new(block))
    }
    fn path(&mut self, dgid: Gid, qpn: Qpn, dest: Qpn) -> AddressVector {
        let mut port = self.node.port.lock().expect("no panic");
        let request = PathRequest::new(self.node.gid, dgid, qpn, dest);
        address_vector(&mut *port, &request, Instant::now() + PATIENCE).expect("the peer resolves")
    }
    fn async_event(&mut self) -> Option<AsyncEvent> {
        loop {
            if let EngineEventKind::Async(event) = self.node.engine.next_event()?.kind {
                return Some(event);
            }
        }
    }
}

struct Soft {
    workers: usize,
    a: SoftNode,
    b: SoftNode,
    start: Instant,
}

impl Soft {
    /// A's queues are on the first worker, B's on the last, so that with two workers every frame is forwarded.
    fn start(workers: usize, addresses: [(&str, u8); 2]) -> Soft {
        let Pair { a, b } = Pair::start_at(workers, addresses);
        let last = workers as u8 - 1;
        let (a, b) = (SoftNode::new(a, 0), SoftNode::new(b, last));
        Soft { workers, a, b, start: Instant::now() }
    }
    fn stop(self) {
        Pair { a: self.a.node, b: self.b.node }.stop();
    }
}

impl Harness for Soft {
    type Node = SoftNode;

    fn name(&self) -> String {
        let family = if self.a.node.gid.is_ipv4() { "IPv4" } else { "IPv6" };
        format!("the software device over shm and {family}, workers: {}", self.workers)
    }
    fn node(&mut self, end: End) -> &mut SoftNode {
        match end {
            End::A => &mut self.a,
            End::B => &mut self.b,
        }
    }
    fn now(&self) -> Duration {
        self.start.elapsed()
    }
    fn pause(&mut self) {
        std::thread::sleep(Duration::from_micros(200));
    }
    fn lacks(&self, need: Need) -> Option<String> {
        (need == Need::TwoWorkers && self.workers < 2).then(|| "there is one".into())
    }
    fn deviates(&self, deviation: Deviation) -> Option<&'static str> {
        match deviation {
            Deviation::KeysCheckedAtPost => {
                Some("a bad key is a fault of the program; the peer never sees it")
            }
            Deviation::EntryReservedAtPost => Some("an overflow by sends would be lost completions"),
            Deviation::DeregisterBusyByWork => Some("a peer's message would find no memory"),
            Deviation::DeregisterBusyByWindow => Some("a window would outlive its memory"),
            Deviation::FatalEventWithCompletion => Some("control hears of peer and PSN without polling"),
            Deviation::NoMulticastLoopback => Some("what a port sends does not come back to it"),
            Deviation::UnsignalledGiveBack => Some("the queue pair knows without a completion"),
        }
    }
    fn never(&self, status: WcStatus) -> Option<&'static str> {
        match status {
            WcStatus::Success
            | WcStatus::LocLenErr
            | WcStatus::LocQpOpErr
            | WcStatus::WrFlushErr
            | WcStatus::MwBindErr
            | WcStatus::BadRespErr
            | WcStatus::RemInvReqErr
            | WcStatus::RemAccessErr
            | WcStatus::RetryExcErr
            | WcStatus::RnrRetryExcErr => None,
            WcStatus::LocProtErr => Some(
                "a wrong local key is refused at the post, and a region does not go while posted work names it; only \
                 application threads, whose posts are looked at later, get it",
            ),
            WcStatus::RemOpErr => {
                Some("no receive goes bad while it is posted, so no responder here says so")
            }
            WcStatus::LocAccessErr => Some("where a receive's buffer is at fault the status is LOC_PROT_ERR"),
            WcStatus::RemAbortErr => Some("no answer on the wire of RoCE says that the responder aborted"),
            WcStatus::FatalErr => {
                Some("it is for events; an answer that does not fit is BAD_RESP_ERR, as in hardware")
            }
            WcStatus::GeneralErr => Some("each cause has a status of its own"),
        }
    }
    fn other_deviations(&self) -> Vec<(&'static str, &'static str)> {
        let mut all = vec![
            ("a CQ, its SRQs and its QPs live on one worker", "no lock is taken on the data path"),
            ("an address handle that is destroyed can still be posted", "it carries its path with it"),
            ("no event is SRQ_ERR, PATH_MIG or DEVICE_FATAL", "no such fault exists in software"),
        ];
        all.extend_from_slice(ferroce_mem::window::DEVIATIONS);
        all
    }
}

const V4: [(&str, u8); 2] = [(IP_A, 24), (IP_B, 24)];

fn conforms(workers: usize, addresses: [(&str, u8); 2]) {
    let mut soft = Soft::start(workers, addresses);
    let report = conformance::run(&mut soft);
    println!("{report}");
    assert!(report.failed.is_empty(), "{report}");
    soft.stop();
}

#[test]
fn the_software_device_conforms_with_one_worker() {
    conforms(1, V4);
}

#[test]
fn the_software_device_conforms_with_two_workers() {
    conforms(2, V4);
}

#[test]
fn the_software_device_conforms_over_ipv6() {
    conforms(2, [("fd00:77::1", 64), ("fd00:77::2", 64)]);
}

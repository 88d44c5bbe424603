//! Tests over our own data plane: queue pairs, their connections, and the service that measures on them.
//!
//! One [`Rdma`] for a run; [`Rdma::open`] to [`Rdma::close`] for each set of queue pairs, which may serve several sizes.
//! Called from the tool's main thread; what a worker does meanwhile is in the service.

use std::net::IpAddr;

use ferroce_engine::ServiceId;
use ferroce_services::{
    PerfEndpoints, PerfHandle, PerfMemory, PerfMode, PerfOp, PerfQp, PerfReport, PerfService, PerfSpec, State,
};
use ferroce_verbs::{Access, Ah, Device, Gid, PathMtu, Psn, Qkey, QpType, Qpn, RemoteAddr, Rkey, UdDest};

use super::events::Watcher;
use super::plan::Item;
use super::talk::{QpEnd, RdmaEnd};
use crate::connect::{self, Connection};
use crate::fail::{Fail, Outcome};
use crate::plane::{Plane, QpSet, SetSizes, random_psn};

/// The queue key of perftest.
const QKEY: Qkey = Qkey(0x1111_1111);
/// How long the worker may take to post the first receives.
const READY_LIMIT: std::time::Duration = std::time::Duration::from_secs(5);

/// RDMA tests of one run.
pub struct Rdma {
    plane: Plane,
    gid: Gid,
    test: Option<Open>,
}

/// Queue pairs that were made.
struct Open {
    item: Item,
    set: QpSet,
    memory: PerfMemory,
    mtu: PathMtu,
    own: RdmaEnd,
    link: Option<Link>,
    running: Option<Running>,
}

/// Queue pairs that are connected.
struct Link {
    connections: Vec<Connection>,
    ways: Vec<Ah>,
    qps: Vec<PerfQp>,
    remote: RdmaEnd,
    mtu: PathMtu,
    reads: u8,
}

/// A service at work on them.
struct Running {
    id: ServiceId,
    handle: PerfHandle,
    /// Held for its thread.
    _watcher: Option<Watcher>,
}

/// What a test is connected to, for printing.
#[derive(Clone)]
pub struct Ends {
    /// Our side.
    pub own: RdmaEnd,
    /// The peer's side.
    pub remote: RdmaEnd,
    /// Path MTU in force, bytes.
    pub mtu: u32,
    /// READs and atomics outstanding, in force.
    pub reads: u8,
}

/// How READs outstanding are agreed on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadsRule {
    /// Both sides take the smaller number.
    Smaller,
    /// The peer has as many outstanding as it says, whatever we say.
    TheirsStand,
}

impl Rdma {
    /// Uses `plane`; `like` is an address of the family to prefer.
    pub fn new(plane: Plane, gid_index: Option<usize>, like: IpAddr) -> Result<Rdma, (Fail, Box<Plane>)> {
        match plane.gid(gid_index, Some(like)) {
            Ok(gid) => Ok(Rdma { plane, gid, test: None }),
            Err(error) => Err((error, Box::new(plane))),
        }
    }

    /// The data plane.
    pub fn plane(&self) -> &Plane {
        &self.plane
    }

    /// Gives the data plane back.
    pub fn into_plane(self) -> Plane {
        self.plane
    }

    /// Makes the queue pairs and prepares their memory.
    pub fn open(&mut self, item: &Item) -> Outcome<RdmaEnd> {
        let spec = &item.spec;
        let mtu = self.plane.path_mtu(item.path.mtu)?;
        let reads = self.reads(item)?;
        check_datagram(spec, mtu, "the path MTU")?;
        let device = self.plane.device().query_device().map_err(|e| Fail::failed(e.to_string()))?;
        let set = self.plane.make_set(SetSizes {
            qp_type: spec.connection,
            qps: spec.qps,
            sends: spec.send_queue_depth(),
            receives: spec.recv_queue_depth(),
            // A queue of completions that is full holds sends back; one of receives must take them all.
            send_cqe: spec.send_cq_depth().min(device.max_cqe),
            recv_cqe: spec.recv_cq_depth(),
            inline: if matches!(spec.op, PerfOp::Send | PerfOp::Write) {
                spec.inline_bytes.min(spec.largest)
            } else {
                0
            },
            bytes: spec.memory_bytes(),
            events: spec.events,
        })?;
        let memory =
            PerfMemory::prepare(spec, set.memory.clone()).map_err(|e| Fail::failed(e.to_string()))?;
        let end = |(index, qpn): (u32, &Qpn)| {
            Ok(QpEnd {
                qpn: qpn.get(),
                psn: random_psn()?.get(),
                rkey: set.keys.rkey.0,
                addr: set.keys.iova + spec.announced_offset(index),
            })
        };
        let qps = (0..).zip(&set.qpns).map(end).collect::<Outcome<Vec<QpEnd>>>()?;
        let own = RdmaEnd { qps, gid: self.gid.to_string(), mtu: mtu.bytes(), reads };
        let item = item.clone();
        self.test = Some(Open { item, set, memory, mtu, own: own.clone(), link: None, running: None });
        Ok(own)
    }

    fn reads(&self, item: &Item) -> Outcome<u8> {
        let device = self.plane.device().query_device().map_err(|e| Fail::failed(e.to_string()))?;
        let limit = device.max_qp_rd_atom.min(device.max_qp_init_rd_atom);
        let asked = item.path.reads.unwrap_or(limit);
        if asked == 0 || asked > limit {
            return Err(Fail::usage(format!("outs: asked {asked}, allowed 1 to {limit}")));
        }
        Ok(asked)
    }

    /// Brings the queue pairs up, towards those of the peer.
    pub fn connect(&mut self, remote: &RdmaEnd, rule: ReadsRule) -> Outcome<()> {
        let gid = self.gid;
        let open = self.test.as_mut().ok_or_else(not_opened)?;
        let connections = agree(open, remote, gid, rule)?;
        self.plane.wait_for_link()?;
        let (mut ways, mut qps) = (Vec::new(), Vec::new());
        for (connection, end) in connections.iter().zip(&remote.qps) {
            let av = connect::connect_as(&self.plane, connection, QKEY)?;
            let datagram = match open.item.spec.connection {
                QpType::Ud => {
                    let ah = self.plane.device().create_ah(open.set.pd, &av);
                    let ah = ah.map_err(|e| Fail::failed(format!("address handle: {e}")))?;
                    ways.push(ah);
                    Some(UdDest { ah, remote_qpn: connection.remote_qpn, remote_qkey: QKEY })
                }
                QpType::Rc | QpType::Uc => None,
            };
            qps.push(PerfQp {
                qpn: connection.qpn,
                remote_addr: RemoteAddr(end.addr),
                remote_rkey: Rkey(end.rkey),
                datagram,
            });
        }
        let (mtu, reads) = connections.first().map_or((open.mtu, open.own.reads), |c| (c.mtu, c.reads));
        open.link = Some(Link { connections, ways, qps, remote: remote.clone(), mtu, reads });
        Ok(())
    }

    /// Prepares the memory for another size; nothing may run.
    pub fn refill(&mut self, spec: &PerfSpec) -> Outcome<()> {
        let open = self.test.as_mut().ok_or_else(not_opened)?;
        open.memory.refill(spec).map_err(|e| Fail::failed(e.to_string()))
    }

    /// Starts the service; comes back when its receives are posted.
    pub fn start(&mut self, spec: PerfSpec) -> Outcome<()> {
        let open = self.test.as_mut().ok_or_else(not_opened)?;
        let link = open.link.as_ref().ok_or_else(not_opened)?;
        let ends = PerfEndpoints {
            qps: link.qps.clone(),
            send_cq: open.set.send_cq,
            recv_cq: open.set.recv_cq,
            local: open.memory.clone(),
            local_lkey: open.set.keys.lkey,
            local_iova: open.set.keys.iova,
        };
        let (service, handle) = PerfService::new(spec, ends).map_err(|e| Fail::failed(e.to_string()))?;
        let watcher = match open.set.channel {
            Some(channel) => Some(Watcher::start(self.plane.device().clone(), channel, handle.clone())?),
            None => None,
        };
        let id = self.plane.add_service(service)?;
        if spec.receives() {
            wait_ready(&handle)?;
        }
        open.running = Some(Running { id, handle, _watcher: watcher });
        Ok(())
    }

    /// Both ends, once connected.
    pub fn ends(&self) -> Option<Ends> {
        let open = self.test.as_ref()?;
        let link = open.link.as_ref()?;
        Some(Ends {
            own: open.own.clone(),
            remote: link.remote.clone(),
            mtu: link.mtu.bytes(),
            reads: link.reads,
        })
    }

    /// The result, if there is one by now.
    pub fn poll(&mut self) -> Option<Outcome<PerfReport>> {
        let open = self.test.as_ref()?;
        let running = open.running.as_ref()?;
        match running.handle.state() {
            State::Running { .. } => None,
            State::Done(report) => Some(Ok(report.clone())),
            State::Failed(error) => {
                let link = open.link.as_ref()?;
                let of_it = |c: &&Connection| c.qpn == error.qpn;
                let connection = link.connections.iter().find(of_it).or(link.connections.first())?;
                Some(Err(Fail::failed(connect::explain(&self.plane, connection, error))))
            }
        }
    }

    /// Messages done so far, warm-up included.
    pub fn done(&self) -> u64 {
        match self.test.as_ref().and_then(|t| t.running.as_ref()).map(|r| r.handle.state()) {
            Some(State::Running { done }) => done,
            Some(State::Done(report)) => report.messages,
            _ => 0,
        }
    }

    /// Frames received by the port: a sign of life.
    pub fn frames(&self) -> u64 {
        let is_received = |(name, _): &&(&str, u64)| *name == "rx_good_packets";
        self.plane.port_counters().iter().find(is_received).map_or(0, |(_, count)| *count)
    }

    /// The peer's queue pair and where ours stands, for a failure that the queue pair does not know of.
    pub fn position(&self) -> Option<String> {
        let connection = self.test.as_ref()?.link.as_ref()?.connections.first()?;
        let peer = format!("peer {} QP {:#08x}", connection.remote_gid, connection.remote_qpn.get());
        Some(format!("{peer}{}", connect::position(&self.plane, connection)))
    }

    /// Asks the service to end.
    pub fn ask_stop(&mut self) {
        if let Some(running) = self.test.as_ref().and_then(|t| t.running.as_ref()) {
            running.handle.stop();
        }
    }

    /// Takes the service off the worker; the queue pairs stay.
    pub fn finish(&mut self) -> Outcome<()> {
        match self.test.as_mut().and_then(|t| t.running.take()) {
            Some(running) => self.plane.remove_service(running.id),
            None => Ok(()),
        }
    }

    /// Frees what the test had.
    pub fn close(&mut self) -> Outcome<()> {
        self.finish()?;
        let Some(open) = self.test.take() else { return Ok(()) };
        for ah in open.link.iter().flat_map(|link| &link.ways) {
            let told = |e| Fail::failed(format!("address handle: {e}"));
            self.plane.device().destroy_ah(ah).map_err(told)?;
        }
        self.plane.destroy_set(&open.set)
    }
}

fn not_opened() -> Fail {
    Fail::failed("the test was not opened")
}

fn check_datagram(spec: &PerfSpec, mtu: PathMtu, what: &str) -> Outcome<()> {
    if spec.connection == QpType::Ud && spec.largest > mtu.bytes() {
        let (asked, allowed) = (spec.largest, mtu.bytes());
        return Err(Fail::usage(format!("size: asked {asked}, allowed 0 to {allowed} over UD ({what})")));
    }
    Ok(())
}

/// What both sides agree on, for each pair of queue pairs.
fn agree(open: &Open, remote: &RdmaEnd, gid: Gid, rule: ReadsRule) -> Outcome<Vec<Connection>> {
    let bad = |what: &str, value: &str| Fail::failed(format!("the peer's {what} is {value}"));
    let ip: IpAddr = remote.gid.parse().map_err(|_| bad("GID", &remote.gid))?;
    let theirs = PathMtu::from_bytes(remote.mtu).ok_or_else(|| bad("path MTU", &remote.mtu.to_string()))?;
    let (spec, path) = (&open.item.spec, &open.item.path);
    if remote.qps.len() != open.set.qpns.len() {
        let (have, ours) = (remote.qps.len(), open.set.qpns.len());
        return Err(Fail::failed(format!(
            "the peer has {have} queue pairs, this side {ours}: give both the same -q"
        )));
    }
    let mtu = theirs.min(open.mtu);
    check_datagram(spec, mtu, "the path MTU of both sides")?;
    let smaller = open.own.reads.min(remote.reads).max(1);
    let reads_matter = spec.op.is_atomic() || spec.op == PerfOp::Read;
    let serves = match rule {
        ReadsRule::TheirsStand if reads_matter && is_asked(spec) => {
            if remote.reads > open.own.reads {
                return Err(Fail::failed(format!(
                    "the peer has {} READs outstanding, we serve {}: give the peer -o {}, or this side more",
                    remote.reads, open.own.reads, open.own.reads
                )));
            }
            remote.reads.max(1)
        }
        ReadsRule::Smaller | ReadsRule::TheirsStand => smaller,
    };
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    let pairs = open.set.qpns.iter().zip(&open.own.qps).zip(&remote.qps);
    Ok(pairs
        .map(|((&qpn, own), end)| Connection {
            qpn,
            psn: Psn::new(own.psn),
            gid,
            remote_qpn: Qpn::new(end.qpn),
            remote_psn: Psn::new(end.psn),
            remote_gid: Gid::from_ip(ip),
            mtu,
            marks: path.marks,
            timeout: path.timeout,
            retries: path.retries,
            reads: smaller,
            serves,
            access,
        })
        .collect())
}

/// Whether the peer's READs or atomics arrive at our side.
fn is_asked(spec: &PerfSpec) -> bool {
    spec.is_passive() || (spec.bidirectional && spec.mode == PerfMode::Bw)
}

/// Waits until the first receives are posted: a peer over UC or UD says everything once.
fn wait_ready(handle: &PerfHandle) -> Outcome<()> {
    let deadline = std::time::Instant::now() + READY_LIMIT;
    while !handle.is_ready() && handle.state().is_running() {
        if std::time::Instant::now() >= deadline {
            return Err(Fail::failed("the worker posted no receive within 5 s"));
        }
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
    Ok(())
}

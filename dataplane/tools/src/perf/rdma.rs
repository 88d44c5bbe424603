//! One test over our own data plane.

use std::net::IpAddr;

use ferroce_engine::ServiceId;
use ferroce_services::{
    PerfEndpoints, PerfHandle, PerfMemory, PerfQp, PerfReport, PerfService, PerfSpec, State,
};
use ferroce_verbs::{Device, Gid, PathMtu, Psn, Qpn, RemoteAddr, Rkey};

use super::PerfArgs;
use super::talk::{Endpoint, RdmaEnd};
use crate::connect::{self, Connection, Marks};
use crate::fail::{Fail, Outcome};
use crate::plane::{Pair, PairSizes, Plane, random_psn};

/// RDMA tests of one session.
pub struct Rdma {
    plane: Plane,
    gid: Gid,
    mtu: PathMtu,
    reads: u8,
    marks: Marks,
    timeout: u8,
    retries: u8,
    test: Option<Open>,
}

struct Open {
    spec: PerfSpec,
    pair: Pair,
    memory: Option<PerfMemory>,
    own: RdmaEnd,
    running: Option<(ServiceId, PerfHandle, Connection)>,
}

/// What a running test is connected to, for printing.
pub struct Ends {
    /// Our side.
    pub own: RdmaEnd,
    /// The peer's side.
    pub remote: RdmaEnd,
    /// Path MTU in force, bytes.
    pub mtu: u32,
}

impl Rdma {
    /// Uses `plane` as `args` say; `like` is an address of the family to prefer.
    pub fn new(plane: Plane, args: &PerfArgs, like: IpAddr) -> Outcome<Rdma> {
        let gid = plane.gid(args.gid_index, Some(like))?;
        let mtu = plane.path_mtu(args.mtu)?;
        let device = plane.device().query_device().map_err(|e| Fail::failed(e.to_string()))?;
        let limit = device.max_qp_rd_atom.min(device.max_qp_init_rd_atom);
        let reads = args.outs.unwrap_or(limit);
        if reads > limit {
            return Err(Fail::usage(format!("outs: asked {reads}, allowed 1 to {limit}")));
        }
        let marks = Marks {
            sl: args.sl,
            traffic_class: args.tos,
            flow_label: args.flow_label,
            hop_limit: Some(args.hop_limit),
        };
        Ok(Rdma {
            plane,
            gid,
            mtu,
            reads,
            marks,
            timeout: args.qp_timeout,
            retries: args.retry_count,
            test: None,
        })
    }

    /// The data plane.
    pub fn plane(&self) -> &Plane {
        &self.plane
    }

    /// Gives the data plane back.
    pub fn into_plane(self) -> Plane {
        self.plane
    }

    /// Makes the queue pair and prepares its memory.
    pub fn open(&mut self, spec: PerfSpec) -> Outcome<Endpoint> {
        let sizes = PairSizes {
            sends: spec.send_queue_depth(),
            receives: spec.recv_queue_depth(),
            inline: if spec.is_inline() { spec.size } else { 0 },
            bytes: spec.memory_bytes(),
        };
        let pair = self.plane.make_pair(sizes)?;
        let memory =
            PerfMemory::prepare(&spec, pair.memory.clone()).map_err(|e| Fail::failed(e.to_string()))?;
        let own = RdmaEnd {
            qpn: pair.qpn.get(),
            psn: random_psn()?.get(),
            gid: self.gid.to_string(),
            rkey: pair.keys.rkey.0,
            addr: pair.keys.iova,
            mtu: self.mtu.bytes(),
            reads: self.reads,
        };
        self.test = Some(Open { spec, pair, memory: Some(memory), own: own.clone(), running: None });
        Ok(Endpoint::Rdma(own))
    }

    /// What both sides agree on.
    fn agree(&self, own: &RdmaEnd, remote: &RdmaEnd) -> Outcome<Connection> {
        let bad = |what: &str, value: &str| Fail::failed(format!("the peer's {what} is {value}"));
        let ip: IpAddr = remote.gid.parse().map_err(|_| bad("GID", &remote.gid))?;
        let theirs =
            PathMtu::from_bytes(remote.mtu).ok_or_else(|| bad("path MTU", &remote.mtu.to_string()))?;
        Ok(Connection {
            qpn: Qpn::new(own.qpn),
            psn: Psn::new(own.psn),
            gid: self.gid,
            remote_qpn: Qpn::new(remote.qpn),
            remote_psn: Psn::new(remote.psn),
            remote_gid: Gid::from_ip(ip),
            mtu: theirs.min(self.mtu),
            marks: self.marks,
            timeout: self.timeout,
            retries: self.retries,
            reads: self.reads.min(remote.reads).max(1),
        })
    }

    /// Connects to the peer's queue pair and starts the service.
    pub fn start(&mut self, remote: &RdmaEnd) -> Outcome<()> {
        let Some(open) = &self.test else { return Err(Fail::failed("the test was not opened")) };
        let connection = self.agree(&open.own, remote)?;
        self.plane.wait_for_link()?;
        connect::connect(&self.plane, &connection)?;
        let Some(open) = &mut self.test else { return Err(Fail::failed("the test was not opened")) };
        let Some(local) = open.memory.take() else { return Err(Fail::failed("the test was started twice")) };
        let ends = PerfEndpoints {
            qps: vec![PerfQp {
                qpn: open.pair.qpn,
                remote_addr: RemoteAddr(remote.addr),
                remote_rkey: Rkey(remote.rkey),
                datagram: None,
            }],
            send_cq: open.pair.send_cq,
            recv_cq: open.pair.recv_cq,
            local,
            local_lkey: open.pair.keys.lkey,
            local_iova: open.pair.keys.iova,
        };
        let (service, handle) = PerfService::new(open.spec, ends).map_err(|e| Fail::failed(e.to_string()))?;
        let id = self.plane.add_service(service)?;
        open.running = Some((id, handle, connection));
        Ok(())
    }

    /// Both ends of the running test.
    pub fn ends(&self, remote: &RdmaEnd) -> Option<Ends> {
        let open = self.test.as_ref()?;
        let (_, _, connection) = open.running.as_ref()?;
        Some(Ends { own: open.own.clone(), remote: remote.clone(), mtu: connection.mtu.bytes() })
    }

    /// The result, if there is one by now.
    pub fn poll(&mut self) -> Option<Outcome<PerfReport>> {
        let (_, handle, connection) = self.test.as_ref()?.running.as_ref()?;
        match handle.state() {
            State::Running { .. } => None,
            State::Done(report) => Some(Ok(report.clone())),
            State::Failed(error) => Some(Err(Fail::failed(connect::explain(&self.plane, connection, error)))),
        }
    }

    /// The peer's queue pair and where ours stands, for a failure that the queue pair does not know of.
    pub fn position(&self) -> Option<String> {
        let (_, _, connection) = self.test.as_ref()?.running.as_ref()?;
        let peer = format!("peer {} QP {:#08x}", connection.remote_gid, connection.remote_qpn.get());
        Some(format!("{peer}{}", connect::position(&self.plane, connection)))
    }

    /// Asks the service to end.
    pub fn ask_stop(&mut self) {
        if let Some((_, handle, _)) = self.test.as_ref().and_then(|t| t.running.as_ref()) {
            handle.stop();
        }
    }

    /// Frees what the test had.
    pub fn close(&mut self) -> Outcome<()> {
        let Some(open) = self.test.take() else { return Ok(()) };
        if let Some((id, ..)) = open.running {
            self.plane.remove_service(id)?;
        }
        self.plane.destroy_pair(&open.pair)
    }
}

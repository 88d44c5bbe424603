//! `pingpong`: the exchange of `ibv_rc_pingpong`, `ibv_uc_pingpong`, `ibv_ud_pingpong` and `ibv_srq_pingpong`, with them
//! or with another one of ours.
//!
//! Same letters, defaults, handshake and lines. What is more: the data of every message is compared with `-c`, the client
//! says whole round trips, every wait ends, and a failure names the peer and the last PSN.

use std::time::{Duration, Instant};

use ferroce_services::{PingPongEndpoints, PingPongReport, PingPongService, PingPongSpec, Role, State};
use ferroce_verbs::{Access, Ah, Device, PathMtu, Qkey, QpType, UdDest};
use serde::Serialize;

use crate::connect::{self, Connection, Marks};
use crate::destination::{self, Destination};
use crate::fail::{Fail, Outcome};
use crate::json::{self, PlaneJson, RttJson};
use crate::net::{self, Look, Peer, STEP_LIMIT};
use crate::pingpong_srq;
use crate::plane::{Pair, PairSizes, Plane, PlaneArgs, random_psn};
use crate::values;
use crate::watch::Pace;

/// The queue key of `ibv_ud_pingpong`.
const QKEY: Qkey = Qkey(0x1111_1111);
/// How long the worker may take to post the first receives.
const READY_LIMIT: Duration = Duration::from_secs(5);
/// What `ibv_rc_pingpong` uses: 67 ms and 7 retries.
const TIMEOUT: u8 = 14;
const RETRIES: u8 = 7;
/// How long a finished client stays to acknowledge what the peer may repeat: more than four timeouts.
const LINGER: Duration = Duration::from_millis(300);

/// Transport service.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Kind {
    /// Reliable connection, as ibv_rc_pingpong
    Rc,
    /// Unreliable connection, as ibv_uc_pingpong
    Uc,
    /// Unreliable datagram, as ibv_ud_pingpong
    Ud,
    /// Reliable connections that share receives, as ibv_srq_pingpong
    Srq,
}

impl Kind {
    fn qp_type(self) -> QpType {
        match self {
            Kind::Rc | Kind::Srq => QpType::Rc,
            Kind::Uc => QpType::Uc,
            Kind::Ud => QpType::Ud,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Rc => "rc",
            Kind::Uc => "uc",
            Kind::Ud => "ud",
            Kind::Srq => "srq",
        }
    }
}

/// Exchange messages with ibv_{rc,uc,ud,srq}_pingpong or another ferroce
///
/// Without HOST it waits for a client.
#[derive(Clone, Debug, clap::Args)]
#[command(next_line_help = true)]
pub struct PingPongArgs {
    /// Server to connect to; without it, be the server
    pub host: Option<String>,
    /// TCP port of the handshake
    #[arg(short = 'p', long, value_name = "PORT", default_value_t = 18515)]
    pub port: u16,
    /// Transport service
    #[arg(long = "type", value_enum, value_name = "TYPE", default_value = "rc")]
    pub kind: Kind,
    /// Bytes of a message (K, M, G) [4096; ud 2048]
    #[arg(short = 's', long, value_name = "SIZE", value_parser = values::size)]
    pub size: Option<u32>,
    /// Path MTU: 256, 512, 1024, 2048, 4096 [1024; ud: the port's]
    #[arg(short = 'm', long, value_name = "BYTES", value_parser = values::mtu)]
    pub mtu: Option<PathMtu>,
    /// Queue pairs of srq
    #[arg(short = 'q', long, value_name = "COUNT", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=60))]
    pub num_qp: u32,
    /// Receives posted at a time [1000; srq 500]
    #[arg(short = 'r', long, value_name = "DEPTH")]
    pub rx_depth: Option<u32>,
    /// Messages each way
    #[arg(short = 'n', long, value_name = "ITERS", default_value_t = 1000)]
    pub iters: u64,
    /// Service level
    #[arg(short = 'l', long, value_name = "SL", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=7))]
    pub sl: u8,
    /// Sleep while waiting: the same as --idle adaptive
    #[arg(short = 'e', long)]
    pub events: bool,
    /// Index into our GIDs [first routable one of the peer's family]
    #[arg(short = 'g', long, value_name = "INDEX")]
    pub gid_idx: Option<usize>,
    /// Compare the data of every message
    #[arg(short = 'c', long)]
    pub chk: bool,
    /// Seconds to wait for the peer [server 60, 0 is for ever; client 2]
    #[arg(long, value_name = "SECONDS", value_parser = values::seconds)]
    pub wait: Option<Duration>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
    /// Print counters of port and engine at the end
    #[arg(long)]
    pub stats: bool,
    /// The data plane.
    #[command(flatten)]
    pub plane: PlaneArgs,
}

#[derive(Serialize)]
struct SideJson {
    qpn: u32,
    psn: u32,
    gid: String,
}

impl From<&Destination> for SideJson {
    fn from(d: &Destination) -> Self {
        SideJson { qpn: d.qpn.get(), psn: d.psn.get(), gid: d.gid.to_string() }
    }
}

#[derive(Serialize)]
struct ReportJson {
    tool: &'static str,
    version: &'static str,
    transport: &'static str,
    r#type: &'static str,
    role: &'static str,
    size_bytes: u32,
    path_mtu: u32,
    iterations: u64,
    bytes: u64,
    elapsed_ns: u64,
    mbit_per_s: f64,
    usec_per_iter: f64,
    #[serde(flatten)]
    rtt: RttJson,
    data_checked: u64,
    last_acknowledged: bool,
    local: SideJson,
    remote: SideJson,
    #[serde(flatten)]
    plane: PlaneJson,
}

/// Runs the tool.
pub fn run(args: &PingPongArgs) -> Outcome<()> {
    let role = if args.host.is_some() { Role::Client } else { Role::Server };
    let spec = PingPongSpec {
        role,
        qp_type: args.kind.qp_type(),
        size: args.size.unwrap_or(if args.kind == Kind::Ud { 2048 } else { 4096 }),
        iters: args.iters,
        rx_depth: args.rx_depth.unwrap_or(if args.kind == Kind::Srq { 500 } else { 1000 }),
        check_data: args.chk,
        progress_deadline_ns: 30_000_000_000,
    };
    spec.check().map_err(|e| Fail::usage(e.to_string()))?;
    if args.events && args.plane.idle == crate::plane::Idle::Spin {
        return Err(Fail::usage("-e sleeps while waiting: it does not go with --idle spin"));
    }
    // Listen first: a client that comes while the data plane starts is not refused.
    let listener = match role {
        Role::Server => Some(net::listen(args.port)?),
        Role::Client => None,
    };
    let mut plane = Plane::open(&args.plane, role)?;
    let mtu = plane.path_mtu(args.mtu.or((args.kind != Kind::Ud).then_some(PathMtu::Mtu1024)))?;
    if args.kind == Kind::Ud && spec.size > mtu.bytes() {
        let (asked, allowed) = (spec.size, mtu.bytes());
        return Err(Fail::usage(format!(
            "size: asked {asked}, allowed 0 to {allowed} over UD (the path MTU)"
        )));
    }
    if args.kind == Kind::Srq {
        return pingpong_srq::run(args, spec, plane, mtu, listener.as_ref());
    }
    let sizes = PairSizes { sends: 1, receives: spec.rx_depth, inline: 0, bytes: spec.memory_bytes() };
    let pair = plane.make_pair_of(args.kind.qp_type(), sizes)?;
    let mut session = Session { args, spec, plane: &plane, pair: &pair, mtu, ah: None };
    let (report, own, remote) = match (&listener, &args.host) {
        (Some(listener), _) => session.serve(listener)?,
        (None, Some(host)) => session.ask(host)?,
        (None, None) => return Err(Fail::usage("a client needs HOST")),
    };
    let ah = session.ah;
    tell(args, &plane, mtu, &report, (&own, &remote));
    if let Some(ah) = ah {
        plane.device().destroy_ah(&ah).map_err(|e| Fail::failed(format!("address handle: {e}")))?;
    }
    plane.destroy_pair(&pair)?;
    plane.stop()
}

/// Waits until the first receives are posted: a client of UC or UD says everything once.
pub(crate) fn wait_ready(handle: &ferroce_services::PingPongHandle) -> Outcome<()> {
    let deadline = Instant::now() + READY_LIMIT;
    while !handle.is_ready() && handle.state().is_running() {
        if Instant::now() >= deadline {
            return Err(Fail::failed("the worker posted no receive within 5 s"));
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    Ok(())
}

/// Both ends of a connection as the original makes it.
pub(crate) fn connection(
    args: &PingPongArgs,
    mtu: PathMtu,
    own: &Destination,
    remote: &Destination,
) -> Connection {
    Connection {
        qpn: own.qpn,
        psn: own.psn,
        gid: own.gid,
        remote_qpn: remote.qpn,
        remote_psn: remote.psn,
        remote_gid: remote.gid,
        mtu,
        marks: Marks { sl: args.sl, ..Marks::default() },
        timeout: TIMEOUT,
        retries: RETRIES,
        reads: 1,
        serves: 1,
        access: Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ,
    }
}

/// Waits until the exchange has ended.
pub(crate) fn watch(
    plane: &Plane,
    handle: &ferroce_services::PingPongHandle,
    connection: &Connection,
    peer: &Peer,
) -> Outcome<PingPongReport> {
    let mut pace = Pace::new();
    loop {
        match handle.state() {
            State::Running { .. } => pace.sleep(),
            State::Done(report) => return Ok(*report),
            State::Failed(error) => {
                let text = connect::explain(plane, connection, error);
                return Err(Fail::failed(format!("{text} (TCP peer {})", peer.name())));
            }
        }
    }
}

/// A finished client stays until the peer has what it may repeat.
pub(crate) fn linger(peer: &mut Peer) {
    let foreign = peer.look() == Look::Closed;
    if foreign {
        std::thread::sleep(LINGER);
    } else {
        peer.wait_for_close(Duration::from_secs(5));
    }
}

struct Session<'s> {
    args: &'s PingPongArgs,
    spec: PingPongSpec,
    plane: &'s Plane,
    pair: &'s Pair,
    mtu: PathMtu,
    /// Way of the datagrams, once connected.
    ah: Option<Ah>,
}

type Done = (PingPongReport, Destination, Destination);

impl Session<'_> {
    fn own(&self, like: Option<std::net::IpAddr>) -> Outcome<Destination> {
        let own = Destination {
            lid: 0,
            qpn: self.pair.qpn,
            psn: random_psn()?,
            gid: self.plane.gid(self.args.gid_idx, like)?,
        };
        if !self.args.json {
            crate::out::say!("{}", own.describe("local"));
        }
        Ok(own)
    }

    fn connect(&mut self, own: &Destination, remote: &Destination) -> Outcome<Connection> {
        if !self.args.json {
            crate::out::say!("{}", remote.describe("remote"));
        }
        let connection = connection(self.args, self.mtu, own, remote);
        self.plane.wait_for_link()?;
        let av = connect::connect_as(self.plane, &connection, QKEY)?;
        if self.args.kind == Kind::Ud {
            let ah = self.plane.device().create_ah(self.pair.pd, &av);
            self.ah = Some(ah.map_err(|e| Fail::failed(format!("address handle: {e}")))?);
        }
        // Now the port is joined to its peer and knows all its fallbacks.
        if !self.args.json {
            self.plane.fallbacks().iter().for_each(|f| eprintln!("{}", json::fallback_line(f)));
        }
        Ok(connection)
    }

    fn service(
        &self,
        connection: &Connection,
    ) -> Outcome<(ferroce_engine::ServiceId, ferroce_services::PingPongHandle)> {
        let ends = PingPongEndpoints {
            qpn: self.pair.qpn,
            send_cq: self.pair.send_cq,
            recv_cq: self.pair.recv_cq,
            local: self.pair.memory.clone(),
            local_lkey: self.pair.keys.lkey,
            local_iova: self.pair.keys.iova,
            ud: self.ah.map(|ah| UdDest { ah, remote_qpn: connection.remote_qpn, remote_qkey: QKEY }),
        };
        let (service, handle) =
            PingPongService::new(self.spec, ends).map_err(|e| Fail::failed(e.to_string()))?;
        let id = self.plane.add_service(service)?;
        wait_ready(&handle)?;
        Ok((id, handle))
    }

    fn serve(&mut self, listener: &std::net::TcpListener) -> Outcome<Done> {
        let wait = self.args.wait.unwrap_or(Duration::from_secs(60));
        // Printed before the client comes, as the original does: a script may wait for it.
        let mut own = self.own(None)?;
        let mut peer = Peer::new(net::accept(listener, (!wait.is_zero()).then_some(wait))?)?;
        let remote = destination::hear(&mut peer, STEP_LIMIT)?;
        if own.gid.is_ipv4() != remote.gid.is_ipv4() && self.args.gid_idx.is_none() {
            own = self.own(Some(remote.gid.to_ip()))?;
        }
        let connection = self.connect(&own, &remote)?;
        let (id, handle) = self.service(&connection)?;
        destination::answer(&mut peer, &own, STEP_LIMIT)?;
        let report = watch(self.plane, &handle, &connection, &peer)?;
        self.plane.remove_service(id)?;
        // Our client waits for this; the original has closed its end long ago.
        drop(peer);
        Ok((report, own, remote))
    }

    fn ask(&mut self, host: &str) -> Outcome<Done> {
        let wait = self.args.wait.unwrap_or(Duration::from_secs(2));
        let mut peer = Peer::new(net::connect(host, self.args.port, wait)?)?;
        let own = self.own(Some(peer.remote_ip()?))?;
        let remote = destination::ask(&mut peer, &own, STEP_LIMIT)?;
        let connection = self.connect(&own, &remote)?;
        destination::confirm(&mut peer)?;
        let (id, handle) = self.service(&connection)?;
        let report = watch(self.plane, &handle, &connection, &peer)?;
        // The server's last message is here, but our acknowledgement may be lost: be there if it is repeated.
        linger(&mut peer);
        self.plane.remove_service(id)?;
        Ok((report, own, remote))
    }
}

/// The report, as text or JSON; the destinations are those of the first queue pair.
pub(crate) fn tell(
    args: &PingPongArgs,
    plane: &Plane,
    mtu: PathMtu,
    report: &PingPongReport,
    (own, remote): (&Destination, &Destination),
) {
    let usec = report.elapsed_ns as f64 / 1e3;
    let mbit_per_s = if usec > 0.0 { report.bytes as f64 * 8.0 / usec } else { 0.0 };
    let usec_per_iter = usec / report.spec.iters as f64;
    if args.json {
        json::print(&ReportJson {
            tool: "pingpong",
            version: env!("CARGO_PKG_VERSION"),
            transport: "rdma",
            r#type: args.kind.name(),
            role: if report.spec.role == Role::Client { "client" } else { "server" },
            size_bytes: report.spec.size,
            path_mtu: mtu.bytes(),
            iterations: report.messages,
            bytes: report.bytes,
            elapsed_ns: report.elapsed_ns,
            mbit_per_s,
            usec_per_iter,
            rtt: report.rtt.into(),
            data_checked: report.checked,
            last_acknowledged: report.last_acknowledged,
            local: own.into(),
            remote: remote.into(),
            plane: PlaneJson::of(plane),
        });
    } else {
        let seconds = usec / 1e6;
        crate::out::say!("{} bytes in {seconds:.2} seconds = {mbit_per_s:.2} Mbit/sec", report.bytes);
        crate::out::say!("{} iters in {seconds:.2} seconds = {usec_per_iter:.2} usec/iter", report.messages);
        if report.checked > 0 {
            eprintln!("data of {} messages compared: all right", report.checked);
        }
        if !report.last_acknowledged {
            eprintln!("the last message was not acknowledged: the peer may have left as soon as it had it");
        }
    }
    if args.stats && !args.json {
        json::print_counters(plane);
    }
}

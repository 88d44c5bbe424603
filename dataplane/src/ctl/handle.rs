//! One command: device call, table entry, answer.
//!
//! Called by the server for each command of a batch. Invariant: a refused command changed nothing; a command whose
//! answer has no room in the reply is refused before it does anything.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ferroce_api::appliance::{
    Command, CqHandle, GidEntry, ListKind, Lkey, MAX_PAGE, PathQuery, PdHandle, QpEntry, QpSpec, Response,
};
use ferroce_api::{ApiError, Code};
use ferroce_engine::path::{PathRequest, address_vector};
use ferroce_verbs::{CqId, Device, Gid, PdId, Qpn, VerbsError};

use super::{ControlCounters, convert};
use crate::node::Node;
use crate::objects::{Cq, Mr, PageLimits, Qp};
use crate::{perf, status};

/// The only port.
pub const PORT: u8 = 1;
/// How long a path may take to resolve.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(1);
/// A page is not begun with less room: the largest entry fits.
const LEAST_PAGE_BYTES: usize = 4096;
/// First byte of a region in its own address space: regions count from 0, so addresses tell nothing about the process.
const ALIGN: usize = 4096;

/// What a command may know of the server.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    /// Connections.
    pub clients: usize,
    /// Counters.
    pub counters: ControlCounters,
}

/// Carries out a command; its answer takes at most `room` bytes.
pub fn execute(
    node: &mut Node,
    command: Command,
    room: usize,
    context: &Context,
) -> Result<Response, ApiError> {
    let reads_only = command.reads_only();
    let response = dispatch(node, command, room, context).map_err(convert::bounded)?;
    // Commands that change something have small answers, for which the server keeps room.
    if reads_only {
        let size = serde_json::to_vec(&response).map_or(usize::MAX, |text| text.len() + 16);
        if size > room {
            return Err(no_room(room));
        }
    }
    Ok(response)
}

fn no_room(room: usize) -> ApiError {
    ApiError::new(
        Code::TooBig,
        "reply",
        "another answer",
        format!("{room} bytes in what is left of the message"),
    )
    .hint("ask in a request of its own")
}

fn dispatch(node: &mut Node, command: Command, room: usize, context: &Context) -> Result<Response, ApiError> {
    let device = node.device();
    match command {
        Command::QueryDevice => Ok(Response::Device(convert::device(&done(device.query_device())?))),
        Command::QueryPort => Ok(Response::Port(convert::port(&done(device.query_port(PORT))?))),
        Command::ListGids => {
            let gids = done(device.query_gids(PORT))?;
            Ok(Response::Gids((0..).zip(gids).map(|(index, gid)| GidEntry { index, gid }).collect()))
        }
        Command::AllocPd { cookie } => alloc_pd(node, cookie),
        Command::DeallocPd { pd } => {
            done(device.dealloc_pd(PdId(pd.0)))?;
            node.objects.pds.remove(&pd);
            Ok(Response::Done)
        }
        Command::AllocMr { pd, bytes, access, cookie } => alloc_mr(node, pd, bytes, access, cookie),
        Command::DeregMr { lkey } => dereg_mr(node, lkey),
        Command::CreateCq { worker, cqe, cookie } => {
            let cq = CqHandle(done(device.create_cq(worker, cqe))?.0);
            node.objects.cqs.insert(cq, Cq { worker, cqe, cookie });
            Ok(Response::Cq { cq })
        }
        Command::DestroyCq { cq } => {
            done(device.destroy_cq(CqId(cq.0)))?;
            node.objects.cqs.remove(&cq);
            Ok(Response::Done)
        }
        Command::CreateQp(spec) => create_qp(node, *spec),
        Command::ModifyQp { qpn, modify } => {
            known_qp(node, qpn)?;
            done(device.modify_qp(qpn, &convert::modify(qpn, &modify)?))?;
            Ok(Response::Done)
        }
        Command::QueryQp { qpn } => query_qp(node, qpn).map(|entry| Response::QpInfo(Box::new(entry))),
        Command::DestroyQp { qpn } => destroy_qp(node, qpn),
        Command::List { kind, cursor, limit, cookie } => {
            let page = PageLimits { cursor, entries: entries(limit)?, bytes: room, cookie };
            list(node, kind, page)
        }
        Command::ResolvePath(query) => resolve(node, &query),
        Command::PerfStart(spec) => node.start_test(&spec).map(|id| Response::PerfStarted { id }),
        Command::PerfStatus { id } => {
            node.tests.status(id, &device).map(|report| Response::Perf(Box::new(report)))
        }
        Command::PerfStop { id } => node.stop_test(id).map(|report| Response::Perf(Box::new(report))),
        Command::PerfStopOn { lkey } => node.stop_tests_on(lkey).map(|()| Response::Done),
        Command::Status => Ok(Response::Status(Box::new(status::status(node, context)))),
        Command::Stats => Ok(Response::Stats(Box::new(status::stats(node, context)))),
        Command::Subscribe | Command::Shutdown { .. } => {
            // The server's own matter; it never asks here.
            Err(ApiError::new(Code::Internal, "command", "", "not one of the node's"))
        }
    }
}

fn done<T>(result: Result<T, VerbsError>) -> Result<T, ApiError> {
    result.map_err(convert::error)
}

fn alloc_pd(node: &mut Node, cookie: u64) -> Result<Response, ApiError> {
    let most = node.limits.max_pd;
    if node.objects.pds.len() >= most as usize {
        let error = ApiError::new(Code::Exhausted, "pd", "one more", format!("at most {most}"));
        return Err(error.hint("free what is not needed, or raise limits.max_pd"));
    }
    let pd = PdHandle(done(node.device().alloc_pd())?.0);
    node.objects.pds.insert(pd, cookie);
    Ok(Response::Pd { pd })
}

fn alloc_mr(
    node: &mut Node,
    pd: PdHandle,
    bytes: u64,
    access: ferroce_api::appliance::Access,
    cookie: u64,
) -> Result<Response, ApiError> {
    if !node.objects.pds.contains_key(&pd) {
        return Err(missing("pd", &format!("{:#x}", pd.0)));
    }
    let size = usize::try_from(bytes).ok().filter(|bytes| *bytes > 0);
    let Some(size) = size else {
        return Err(ApiError::new(Code::Invalid, "bytes", bytes.to_string(), "1 and up"));
    };
    let block = node.arena.alloc(size, ALIGN).map_err(|error| {
        ApiError::new(Code::Exhausted, error.attribute, error.asked, error.allowed)
            .hint("deregister regions, or raise memory.bytes in the configuration")
    })?;
    let block = Arc::new(block);
    let keys = done(node.device().reg_mr(PdId(pd.0), block.clone(), convert::access(access)))?;
    let lkey = Lkey(keys.lkey.0);
    let mr = Mr { rkey: keys.rkey, pd, iova: keys.iova, access, cookie, block };
    node.objects.mrs.insert(lkey, mr);
    Ok(Response::Mr { lkey, rkey: keys.rkey, iova: keys.iova, bytes: keys.len })
}

fn dereg_mr(node: &mut Node, lkey: Lkey) -> Result<Response, ApiError> {
    let shown = format!("{:#010x}", lkey.0);
    if !node.objects.mrs.contains_key(&lkey) {
        return Err(missing("lkey", &shown));
    }
    if let Some(id) = node.tests.user_of_mr(lkey) {
        return Err(perf::busy("lkey", &shown, id));
    }
    done(node.device().dereg_mr(ferroce_verbs::Lkey(lkey.0)))?;
    node.objects.mrs.remove(&lkey);
    Ok(Response::Done)
}

fn create_qp(node: &mut Node, spec: QpSpec) -> Result<Response, ApiError> {
    let qpn = done(node.device().create_qp(&convert::qp_init(&spec)))?;
    // Both completion queues are on the queue pair's worker, or the device had refused.
    let worker = node.objects.cqs.get(&spec.send_cq).map_or(0, |cq| cq.worker);
    let QpSpec { pd, send_cq, recv_cq, owner, cookie, .. } = spec;
    node.objects.qps.insert(qpn, Qp { pd, send_cq, recv_cq, owner, cookie });
    Ok(Response::Qp { qpn, worker })
}

fn known_qp(node: &Node, qpn: Qpn) -> Result<&Qp, ApiError> {
    node.objects.qps.get(&qpn).ok_or_else(|| missing("qpn", &ferroce_api::ids::qpn_text(qpn)))
}

fn query_qp(node: &Node, qpn: Qpn) -> Result<QpEntry, ApiError> {
    let qp = known_qp(node, qpn)?;
    let info = done(node.device().query_qp(qpn))?;
    Ok(convert::qp_entry(&info, qp.owner.clone(), qp.cookie))
}

fn destroy_qp(node: &mut Node, qpn: Qpn) -> Result<Response, ApiError> {
    known_qp(node, qpn)?;
    if let Some(id) = node.tests.user_of_qp(qpn) {
        return Err(perf::busy("qpn", &ferroce_api::ids::qpn_text(qpn), id));
    }
    done(node.device().destroy_qp(qpn))?;
    node.objects.qps.remove(&qpn);
    Ok(Response::Done)
}

fn entries(limit: u32) -> Result<usize, ApiError> {
    if limit > MAX_PAGE {
        return Err(ApiError::new(Code::Invalid, "limit", limit.to_string(), format!("0 to {MAX_PAGE}")));
    }
    Ok(if limit == 0 { MAX_PAGE } else { limit } as usize)
}

fn list(node: &Node, kind: ListKind, limits: PageLimits) -> Result<Response, ApiError> {
    if limits.bytes < LEAST_PAGE_BYTES {
        return Err(no_room(limits.bytes));
    }
    match kind {
        ListKind::Pd => Ok(Response::Pds(node.objects.list_pds(limits))),
        ListKind::Mr => Ok(Response::Mrs(node.objects.list_mrs(limits))),
        ListKind::Cq => Ok(Response::Cqs(node.objects.list_cqs(limits))),
        ListKind::Qp => {
            let mut failed = None;
            let page = node.objects.list_qps(limits, |qpn, qp| {
                if failed.is_some() {
                    return None;
                }
                match node.device().query_qp(qpn) {
                    Ok(info) => Some(convert::qp_entry(&info, qp.owner.clone(), qp.cookie)),
                    Err(error) => {
                        // A worker that does not answer once is not asked another 255 times.
                        failed = Some(convert::error(error));
                        None
                    }
                }
            });
            failed.map_or(Ok(Response::Qps(page)), Err)
        }
    }
}

fn resolve(node: &mut Node, query: &PathQuery) -> Result<Response, ApiError> {
    let gids = done(node.device().query_gids(PORT))?;
    let sgid = match query.sgid {
        Some(sgid) if gids.contains(&sgid) => sgid,
        Some(sgid) => {
            let have: Vec<String> = gids.iter().map(|gid| gid.to_ip().to_string()).collect();
            let allowed = format!("an address of this device ({})", have.join(", "));
            return Err(ApiError::new(Code::Invalid, "sgid", sgid.to_ip().to_string(), allowed));
        }
        None => node.source_for(query.dgid, &gids).ok_or_else(|| no_source(query.dgid))?,
    };
    // The port is worked out from the queue pairs' numbers when one takes the path.
    let mut request = PathRequest::new(sgid, query.dgid, Qpn::new(0), Qpn::new(0));
    request.traffic_class = query.traffic_class;
    let vector =
        address_vector(&mut node.port, &request, Instant::now() + RESOLVE_TIMEOUT).map_err(|error| {
            ApiError::new(Code::NotFound, error.attribute, error.asked, error.allowed).hint(error.hint)
        })?;
    let mut vector = convert::vector_back(&vector);
    vector.udp_src = 0;
    Ok(Response::Path(vector))
}

fn no_source(dgid: Gid) -> ApiError {
    let family = if dgid.is_ipv4() { "IPv4" } else { "IPv6" };
    ApiError::new(
        Code::NotFound,
        "dgid",
        dgid.to_ip().to_string(),
        format!("a device with an {family} address"),
    )
    .hint(format!("give the port an {family} address"))
}

fn missing(attribute: &str, asked: &str) -> ApiError {
    ApiError::new(Code::NotFound, attribute, asked, "one that exists").hint("list what there is")
}

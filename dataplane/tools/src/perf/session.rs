//! One meeting with a peer: who it is, then a session of ours or of perftest's.
//!
//! The data plane is opened by the caller and goes through: each meeting borrows it, so that a server of many clients and
//! a batch keep it.

use std::time::Duration;

use ferroce_services::Role;
use ferroce_verbs::QpType;

use super::backend::{Backend, open_plane};
use super::options::{PeerKind, PerfArgs, Test, Transport};
use super::own::{self, Session};
use super::perftest::meet::{self, Met};
use super::perftest::session::{self as foreign, Ground};
use super::plan::{self, Ask, Item};
use super::rdma::Rdma;
use super::report::Teller;
use super::talk::{self, Hello, Message};
use crate::fail::{Fail, Outcome};
use crate::net::{self, Peer, STEP_LIMIT};
use crate::plane::Plane;

/// A client's run of one test, of `-a` or of a sweep.
pub fn client<'a>(
    args: &'a PerfArgs,
    test: Test,
    host: &str,
    plane: &mut Option<Plane>,
    teller: &mut Teller<'a>,
) -> Outcome<()> {
    let wait = args.peer.wait.unwrap_or(Duration::from_secs(2));
    // What is wrong in any case is told before anybody is asked.
    plan::items(args, test, Role::Client, None)?;
    if plane.is_none() {
        *plane = open_plane(args, args.transport(), Role::Client)?;
    }
    let mut peer = Peer::new(net::connect(host, args.peer.port, wait)?)?;
    let is_kernel = args.transport() != Transport::Rdma;
    let kind = if is_kernel { PeerKind::Ferroce } else { args.peer.peer_kind };
    match meet::call(&mut peer, kind)? {
        Met::Perftest(_) => with_perftest(args, test, Role::Client, &mut peer, plane, teller),
        Met::Ferroce => {
            let items = own_items(args, test, plane.as_ref())?;
            talk::ask(&mut peer, &own::hello(args.transport().name(), &items), STEP_LIMIT)?;
            run_own(args, args.transport(), Role::Client, &mut peer, plane, &items, teller)
        }
    }
}

fn own_items(args: &PerfArgs, test: Test, plane: Option<&Plane>) -> Outcome<Vec<Item>> {
    let carries = match plane {
        // Only datagrams have sizes that depend on it; where the port cannot say, the test does.
        Some(plane) if args.load.connection == Some(QpType::Ud) => Some(plane.path_mtu(args.path.mtu)?),
        _ => None,
    };
    let mut items = plan::items(args, test, Role::Client, carries)?;
    // Two of ours make queue pairs for each size.
    items.iter_mut().for_each(|item| item.spec.largest = item.spec.size);
    Ok(items)
}

/// A server's one meeting. `test` is what it was told, if anything.
pub fn server<'a>(
    args: &'a PerfArgs,
    test: Option<Test>,
    peer: &mut Peer,
    plane: &mut Option<Plane>,
    teller: &mut Teller<'a>,
) -> Outcome<()> {
    match (meet::answer(peer, args.peer.peer_kind)?, test) {
        (Met::Perftest(_), Some(test)) if args.transport() == Transport::Rdma => {
            with_perftest(args, test, Role::Server, peer, plane, teller)
        }
        (Met::Perftest(_), None) => Err(Fail::failed(format!(
            "client {} is a program of perftest, which does not say which test it runs: start the server of the \
             same test, as in `ferroce perf send-lat`",
            peer.name()
        ))),
        (Met::Perftest(_), Some(_)) => Err(Fail::failed(format!(
            "client {} is a program of perftest, which needs --transport rdma",
            peer.name()
        ))),
        (Met::Ferroce, test) => serve_own(args, test, peer, plane, teller),
    }
}

fn serve_own<'a>(
    args: &'a PerfArgs,
    test: Option<Test>,
    peer: &mut Peer,
    plane: &mut Option<Plane>,
    teller: &mut Teller<'a>,
) -> Outcome<()> {
    let heard = talk::hear(peer, STEP_LIMIT).and_then(|hello| {
        let sizes = told_sizes(args, test)?;
        match own::disagreement(args, test.map(|t| t.to_string()), sizes, &hello) {
            None => Ok(hello),
            Some(text) => Err(Fail::failed(text)),
        }
    });
    let understood = heard.and_then(|hello| {
        let asked = |ask: &Ask| ask.item(Role::Server);
        let items = hello.tests.iter().map(asked).collect::<Outcome<Vec<Item>>>()?;
        Ok((hello, items))
    });
    let answered = talk::answer(peer, understood.as_ref().err().map(ToString::to_string));
    let (hello, mut items) = understood.map_err(|e| Fail::failed(format!("client {}: {e}", peer.name())))?;
    answered?;
    let transport = transport_of(&hello);
    items.iter_mut().for_each(|item| overrule(args, item));
    run_own(args, transport, Role::Server, peer, plane, &items, teller)
}

/// Sizes that the server was told.
fn told_sizes(args: &PerfArgs, test: Option<Test>) -> Outcome<Option<Vec<u32>>> {
    let load = &args.load;
    let told = load.size.is_some() || load.all || load.sweep.is_some();
    match (told, test) {
        (true, Some(test)) => {
            let items = plan::items(args, test, Role::Server, None)?;
            Ok(Some(items.iter().map(|item| item.spec.size).collect()))
        }
        (true, None) => Ok(load.size.map(|size| vec![size])),
        (false, _) => Ok(None),
    }
}

/// What concerns our own side alone and was told explicitly.
fn overrule(args: &PerfArgs, item: &mut Item) {
    let path = &args.path;
    item.path.mtu = path.mtu.or(item.path.mtu);
    item.path.reads = path.outs.or(item.path.reads);
    item.path.marks.sl = path.sl.unwrap_or(item.path.marks.sl);
    item.path.marks.traffic_class = path.tos.unwrap_or(item.path.marks.traffic_class);
    item.path.marks.flow_label = path.flow_label.unwrap_or(item.path.marks.flow_label);
    item.path.marks.hop_limit = path.hop_limit.or(item.path.marks.hop_limit);
    item.path.timeout = path.qp_timeout.unwrap_or(item.path.timeout);
    item.path.retries = path.retry_count.unwrap_or(item.path.retries);
}

fn transport_of(hello: &Hello) -> Transport {
    match hello.transport.as_str() {
        "tcp" => Transport::Tcp,
        "udp" => Transport::Udp,
        _ => Transport::Rdma,
    }
}

fn run_own<'a>(
    args: &'a PerfArgs,
    transport: Transport,
    role: Role,
    peer: &mut Peer,
    plane: &mut Option<Plane>,
    items: &[Item],
    teller: &mut Teller<'a>,
) -> Outcome<()> {
    let made = match (plane.is_none(), transport) {
        (true, Transport::Rdma) => open_plane(args, transport, role).map(|opened| *plane = opened),
        _ => Ok(()),
    };
    let made = made.and_then(|()| Backend::make(args, transport, role, plane, peer));
    let mut backend = match made {
        Ok(backend) => backend,
        Err(error) => {
            // The peer waits for an endpoint. If it is gone as well, our own reason is the one that counts.
            let _ = talk::say(peer, &Message::Failed { error: error.to_string() });
            return Err(error);
        }
    };
    let outcome = Session { args, role, peer, backend: &mut backend, teller }.run(items);
    if let Some(back) = backend.into_plane() {
        *plane = Some(back);
    }
    outcome
}

fn with_perftest<'a>(
    args: &'a PerfArgs,
    test: Test,
    role: Role,
    peer: &mut Peer,
    plane: &mut Option<Plane>,
    teller: &mut Teller<'a>,
) -> Outcome<()> {
    let like = peer.remote_ip()?;
    let taken = plane.take().ok_or_else(|| Fail::failed("no data plane was opened"))?;
    let mut rdma = match Rdma::new(taken, args.path.gid_index, like) {
        Ok(rdma) => rdma,
        Err((error, back)) => {
            *plane = Some(*back);
            return Err(error);
        }
    };
    let outcome = foreign::run(Ground { args, test, role, peer, rdma: &mut rdma, teller });
    *plane = Some(rdma.into_plane());
    outcome
}

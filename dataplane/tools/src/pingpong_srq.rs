//! The queue pairs of `pingpong --type srq`: several that share one queue of receives, and their handshake.
//!
//! Called by `pingpong` only. The handshake of `ibv_srq_pingpong` is that of the others with 256 lines each way, however
//! many queue pairs there are: the rest are zeros. Never touches a frame.

use std::net::{IpAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use ferroce_mem::os::Block;
use ferroce_services::pingpong::MOST_QUEUE_PAIRS;
use ferroce_services::{
    PingPongHandle, PingPongReport, PingPongSpec, SharedEndpoints, SharedPingPongService,
};
use ferroce_verbs::{
    Access, CqId, Device, Gid, MrKeys, PathMtu, PdId, Psn, QpCap, QpInitAttr, QpType, Qpn, SrqId,
    SrqInitAttr, VerbsError,
};

use crate::connect;
use crate::destination::{self, Destination, LINE_BYTES};
use crate::fail::{Fail, Outcome};
use crate::net::{self, Peer, STEP_LIMIT};
use crate::pingpong::{self, PingPongArgs};
use crate::plane::{Plane, random_psn};

/// How long a finished side stays to acknowledge what is under way; less than a timeout, as the peer may be gone.
const SETTLE: Duration = Duration::from_millis(30);

/// What was done, between which first queue pairs.
type Done = (PingPongReport, Destination, Destination);

/// Queue pairs with what they share, made and destroyed together.
struct Sharing {
    pd: PdId,
    send_cq: CqId,
    recv_cq: CqId,
    srq: SrqId,
    memory: Arc<Block>,
    keys: MrKeys,
    /// The queue pairs.
    pub qpns: Vec<Qpn>,
}

fn verbs(what: &str) -> impl Fn(VerbsError) -> Fail + '_ {
    move |error| Fail::failed(format!("{what}: {error}"))
}

impl Sharing {
    /// Makes `count` queue pairs in RESET.
    pub fn make(plane: &mut Plane, spec: &PingPongSpec, count: u32) -> Outcome<Sharing> {
        let memory = plane.block(SharedPingPongService::memory_bytes(spec))?;
        let device = plane.device();
        let pd = device.alloc_pd().map_err(verbs("protection domain"))?;
        let keys = device.reg_mr(pd, Arc::clone(&memory), Access::LOCAL_WRITE).map_err(verbs("memory"))?;
        let send_cq = device.create_cq(0, count).map_err(verbs("completion queue"))?;
        let recv_cq = device.create_cq(0, spec.rx_depth).map_err(verbs("completion queue"))?;
        let attr = SrqInitAttr { pd, max_wr: spec.rx_depth, max_sge: 1, limit: 0 };
        let srq = device.create_srq(0, &attr).map_err(verbs("shared receive queue"))?;
        let cap = QpCap { max_send_wr: 1, max_recv_wr: 0, max_recv_sge: 0, ..QpCap::default() };
        let attr =
            QpInitAttr { qp_type: QpType::Rc, pd, send_cq, recv_cq, cap, sq_sig_all: false, srq: Some(srq) };
        let make = |_| device.create_qp(&attr).map_err(verbs("queue pair"));
        let qpns = (0..count).map(make).collect::<Outcome<Vec<_>>>()?;
        Ok(Sharing { pd, send_cq, recv_cq, srq, memory, keys, qpns })
    }

    /// What the service needs.
    pub fn endpoints(&self) -> SharedEndpoints {
        SharedEndpoints {
            qpns: self.qpns.clone(),
            srq: self.srq,
            send_cq: self.send_cq,
            recv_cq: self.recv_cq,
            local: Arc::clone(&self.memory),
            local_lkey: self.keys.lkey,
            local_iova: self.keys.iova,
        }
    }

    /// Our lines.
    pub fn destinations(&self, gid: Gid) -> Outcome<Vec<Destination>> {
        self.qpns.iter().map(|&qpn| Ok(Destination { lid: 0, qpn, psn: random_psn()?, gid })).collect()
    }

    /// Destroys all.
    pub fn destroy(&self, plane: &Plane) -> Outcome<()> {
        let device = plane.device();
        self.qpns.iter().try_for_each(|&qpn| device.destroy_qp(qpn)).map_err(verbs("queue pair"))?;
        device.destroy_srq(self.srq).map_err(verbs("shared receive queue"))?;
        device.destroy_cq(self.send_cq).map_err(verbs("completion queue"))?;
        device.destroy_cq(self.recv_cq).map_err(verbs("completion queue"))?;
        device.dereg_mr(self.keys.lkey).map_err(verbs("memory"))?;
        device.dealloc_pd(self.pd).map_err(verbs("protection domain"))
    }
}

/// Runs the exchange on an opened data plane.
pub fn run(
    args: &PingPongArgs,
    spec: PingPongSpec,
    mut plane: Plane,
    mtu: PathMtu,
    listener: Option<&TcpListener>,
) -> Outcome<()> {
    if spec.rx_depth < args.num_qp {
        return Err(Fail::usage(format!(
            "-r: asked {}, allowed {} or more: one receive for each queue pair (-q)",
            spec.rx_depth, args.num_qp
        )));
    }
    let sharing = Sharing::make(&mut plane, &spec, args.num_qp)?;
    let session = Session { args, spec, plane: &plane, sharing: &sharing, mtu };
    let (report, own, remote) = match (listener, &args.host) {
        (Some(listener), _) => session.serve(listener)?,
        (None, Some(host)) => session.ask(host)?,
        (None, None) => return Err(Fail::usage("a client needs HOST")),
    };
    // The counters are those of the whole exchange: what is under way when it ends is answered or gone.
    sharing.destroy(&plane)?;
    pingpong::tell(args, &plane, mtu, &report, (&own, &remote));
    plane.stop()
}

struct Session<'s> {
    args: &'s PingPongArgs,
    spec: PingPongSpec,
    plane: &'s Plane,
    sharing: &'s Sharing,
    mtu: PathMtu,
}

impl Session<'_> {
    fn show(&self, destinations: &[Destination], side: &str) {
        if !self.args.json {
            destinations.iter().for_each(|d| crate::out::say!("{}", d.describe(side)));
        }
    }

    fn own(&self, like: Option<IpAddr>) -> Outcome<Vec<Destination>> {
        let own = self.sharing.destinations(self.plane.gid(self.args.gid_idx, like)?)?;
        self.show(&own, "local");
        Ok(own)
    }

    /// Connects all and puts the service on the worker.
    fn start(
        &self,
        own: &[Destination],
        remote: &[Destination],
    ) -> Outcome<(ferroce_engine::ServiceId, PingPongHandle)> {
        self.show(remote, "remote");
        self.plane.wait_for_link()?;
        for (own, remote) in own.iter().zip(remote) {
            connect::connect(self.plane, &pingpong::connection(self.args, self.mtu, own, remote))?;
        }
        let made = SharedPingPongService::new(self.spec, self.sharing.endpoints());
        let (service, handle) = made.map_err(|e| Fail::failed(e.to_string()))?;
        let id = self.plane.add_service(service)?;
        pingpong::wait_ready(&handle)?;
        Ok((id, handle))
    }

    fn finish(
        &self,
        handle: &PingPongHandle,
        peer: &Peer,
        own: Vec<Destination>,
        remote: Vec<Destination>,
    ) -> Outcome<Done> {
        let (Some(&own), Some(&remote)) = (own.first(), remote.first()) else {
            return Err(Fail::failed("no queue pair"));
        };
        let connection = pingpong::connection(self.args, self.mtu, &own, &remote);
        let report = pingpong::watch(self.plane, handle, &connection, peer)?;
        std::thread::sleep(SETTLE);
        Ok((report, own, remote))
    }

    fn serve(&self, listener: &TcpListener) -> Outcome<Done> {
        let wait = self.args.wait.unwrap_or(Duration::from_secs(60));
        let mut own = self.own(None)?;
        let mut peer = Peer::new(net::accept(listener, (!wait.is_zero()).then_some(wait))?)?;
        let remote = hear(&mut peer, own.len(), STEP_LIMIT)?;
        let other = |o: &Destination, r: &Destination| o.gid.is_ipv4() != r.gid.is_ipv4();
        if self.args.gid_idx.is_none() && own.iter().zip(&remote).any(|(o, r)| other(o, r)) {
            own = self.own(remote.first().map(|r| r.gid.to_ip()))?;
        }
        let (id, handle) = self.start(&own, &remote)?;
        answer(&mut peer, &own, STEP_LIMIT)?;
        let done = self.finish(&handle, &peer, own, remote)?;
        // Our client may wait for acknowledgements still; the original has closed its end long ago.
        peer.wait_for_close(Duration::from_secs(5));
        self.plane.remove_service(id)?;
        Ok(done)
    }

    fn ask(&self, host: &str) -> Outcome<Done> {
        let wait = self.args.wait.unwrap_or(Duration::from_secs(2));
        let mut peer = Peer::new(net::connect(host, self.args.port, wait)?)?;
        let own = self.own(Some(peer.remote_ip()?))?;
        let remote = ask(&mut peer, &own, STEP_LIMIT)?;
        // The service sends at once: the server is ready, it answered.
        destination::confirm(&mut peer)?;
        let (id, handle) = self.start(&own, &remote)?;
        let done = self.finish(&handle, &peer, own, remote)?;
        self.plane.remove_service(id)?;
        Ok(done)
    }
}

/// All lines of one side in the original's form.
fn encode(own: &[Destination]) -> Vec<u8> {
    let nothing = Destination { lid: 0, qpn: Qpn::new(0), psn: Psn::new(0), gid: Gid([0; 16]) };
    let lines = own.iter().chain(std::iter::repeat(&nothing)).take(MOST_QUEUE_PAIRS);
    lines.flat_map(Destination::encode).collect()
}

/// Reads the peer's lines, and keeps those of `count` queue pairs: as many as we have.
fn hear(peer: &mut Peer, count: usize, limit: Duration) -> Outcome<Vec<Destination>> {
    let mut all = Vec::with_capacity(MOST_QUEUE_PAIRS);
    for _ in 0..MOST_QUEUE_PAIRS {
        let mut line = [0; LINE_BYTES];
        peer.receive_exact(&mut line, limit, "its addresses")?;
        all.push(Destination::decode(&line)?);
    }
    let theirs = all.iter().take_while(|d| d.qpn != Qpn::new(0)).count();
    if theirs != count {
        let name = peer.name();
        return Err(Fail::failed(format!(
            "peer {name} has {theirs} queue pairs, we have {count}: give both the same -q"
        )));
    }
    all.truncate(count);
    Ok(all)
}

/// The client's part up to the peer's lines. [`destination::confirm`] follows.
fn ask(peer: &mut Peer, own: &[Destination], limit: Duration) -> Outcome<Vec<Destination>> {
    peer.send(&encode(own))?;
    hear(peer, own.len(), limit)
}

/// The server's second part: its own lines, and the client's confirmation.
fn answer(peer: &mut Peer, own: &[Destination], limit: Duration) -> Outcome<()> {
    peer.send(&encode(own))?;
    destination::confirmed(peer, limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_all_queue_pairs_and_zeros() {
        let gid = Gid::from_ip("10.9.0.1".parse().unwrap());
        let one = Destination { lid: 0, qpn: Qpn::new(0x11), psn: Psn::new(5), gid };
        let text = encode(&[one, one]);
        assert_eq!(text.len(), 256 * 52);
        assert_eq!(&text[52..104], one.encode());
        assert_eq!(&text[104..156], b"0000:000000:000000:00000000000000000000000000000000\0");
        assert_eq!(&text[255 * 52..], &text[104..156]);
    }
}

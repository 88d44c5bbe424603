//! Peers that speak the protocol and then misbehave.

use std::os::fd::AsFd;
use std::os::fd::BorrowedFd;

use ferroce_mem::os::{PageKind, Region};
use rustix::fs::{MemfdFlags, SealFlags};

use super::super::hello::{MAX_BYTES, Message};
use super::super::ring::Geometry;
use super::super::sys::{Doorbell, Received};
use super::*;
use crate::port::PortQueue;

const GEOMETRY: Geometry = Geometry { queues: 1, ring_bytes: 1 << 20 };

/// A port on one end of a socket pair; the test is the peer on the other.
struct Rig {
    port: ShmPort,
    queue: ShmQueue,
    socket: OwnedFd,
    bell: Doorbell,
}

fn rig(listens: bool) -> Rig {
    let mut port = ShmPort::new(&ShmConfig::new("test"), false).expect("good values");
    let (ours, socket) = sys::pair().expect("sockets");
    port.connection = Some(Connection::new(ours, listens, Instant::now()));
    let queue = port.take_queues().remove(0);
    Rig { port, queue, socket, bell: Doorbell::new().expect("sockets") }
}

fn hello() -> Hello {
    Hello { mac: [2, 9, 9, 9, 9, 9], mtu: 9000, geometry: GEOMETRY, sleeps: true, addresses: Vec::new() }
}

impl Rig {
    fn say(&mut self, message: &Message, fds: &[BorrowedFd<'_>]) {
        sys::send(&self.socket, &message.encode(), fds).expect("sent");
        self.port.housekeep();
    }
    fn hear(&self) -> (Message, Vec<OwnedFd>) {
        let mut buffer = [0; MAX_BYTES];
        match sys::receive(&self.socket, &mut buffer) {
            Received::Message(len, fds) => (Message::decode(&buffer[..len]).expect("one of ours"), fds),
            _ => panic!("the port said nothing"),
        }
    }
    /// Joins a port that listens; the memory it passed.
    fn join(&mut self) -> Arc<Region> {
        let bell = Doorbell::new().expect("sockets");
        self.say(&Message::Hello(hello()), &[bell.ringer()]);
        let (_, mut fds) = self.hear();
        let memory = fds.remove(0);
        let len = rustix::fs::fstat(&memory).expect("a memfd").st_size as u64;
        self.say(&Message::Ready, &[]);
        assert!(self.port.link_up(), "{:?}", self.port.problem);
        self.queue.rx_burst(1, |_| ());
        Arc::new(Region::from_fd(memory, len).expect("sealed"))
    }
    /// Offers memory to a port that connects.
    fn offer(&mut self, hello: &Hello, memory: impl AsFd) {
        self.port.housekeep();
        assert!(matches!(self.hear().0, Message::Hello(_)));
        let bell = self.bell.ringer().try_clone_to_owned().expect("dup");
        self.say(&Message::Hello(hello.clone()), &[memory.as_fd(), bell.as_fd()]);
    }
    fn counter(&self, name: &str) -> u64 {
        self.port.counters().into_iter().find(|(known, _)| *known == name).expect("a counter").1
    }
    fn refusal(&self) -> String {
        assert!(!self.port.link_up());
        self.port.problem.as_ref().expect("refused").to_string()
    }
}

#[test]
fn nonsense_in_a_ring_takes_the_link_down_and_is_counted() {
    let mut rig = rig(true);
    let region = rig.join();
    // A record of another lap, written by the code of an honest peer to the wrong place.
    let mut tx = Producer::new(&region, GEOMETRY, 0, Direction::FromConnector, false).expect("fits");
    let mut send = |len: usize| {
        assert!(tx.reserve(len).expect("no fault").is_some() && tx.commit(len));
        tx.flush();
    };
    send(60);
    assert_eq!(rig.queue.rx_burst(9, |_| ()), 1);
    send(60_000);
    assert_eq!(rig.queue.rx_burst(9, |_| ()), 0, "longer than the mtu allows");
    assert!(rig.port.link_up(), "until housekeeping sees it");
    rig.port.housekeep();
    assert_eq!(rig.counter("rx_ring_bad_lengths"), 1);
    assert!(rig.refusal().contains("wrote nonsense into a ring"));
    // The queue goes on as without a peer.
    assert_eq!(rig.queue.rx_burst(9, |_| ()), 0);
    assert!(crate::conformance::commit(&mut rig.queue, &[0; 60]));
    assert_eq!(rig.counter("tx_no_peer_dropped"), 1);
    assert!(matches!(sys::receive(&rig.socket, &mut [0; 64]), Received::Closed), "the peer is told");
}

#[test]
fn a_consumer_that_claims_more_than_there_is_takes_the_link_down() {
    let mut rig = rig(true);
    let region = rig.join();
    let arena = ferroce_mem::os::Arena::from_region(region);
    let all = arena.alloc(arena.len(), 64).expect("all of it");
    // The first word of the ring that the port writes is the consumer's position.
    all.store_u64(0, 1 << 40);
    while crate::conformance::commit(&mut rig.queue, &[0; 9000]) {
        assert_eq!(rig.counter("tx_no_peer_dropped"), 0);
    }
    rig.queue.tx_flush();
    rig.port.housekeep();
    assert_eq!(rig.counter("tx_ring_bad_positions"), 1);
    assert!(!rig.port.link_up());
}

#[test]
fn talking_on_a_joined_link_ends_it() {
    let mut rig = rig(true);
    rig.join();
    rig.say(&Message::Ready, &[]);
    assert!(!rig.port.link_up());
}

#[test]
fn memory_that_could_hurt_is_not_mapped() {
    let right = Region::new(GEOMETRY.bytes() as u64, PageKind::Normal, None).expect("pages");
    let refusal = |hello: &Hello, fd: BorrowedFd<'_>| {
        let mut rig = rig(false);
        rig.offer(hello, fd);
        rig.refusal()
    };
    let unsealed = rustix::fs::memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).expect("a memfd");
    rustix::fs::ftruncate(&unsealed, right.len() as u64).expect("ftruncate");
    let text = refusal(&hello(), unsealed.as_fd());
    assert!(text.contains("the peer's memory") && text.contains("seals"), "{text}");
    rustix::fs::fcntl_add_seals(&unsealed, SealFlags::GROW).expect("seals");
    assert!(refusal(&hello(), unsealed.as_fd()).contains("seals"), "it could still shrink");
    let short = Region::new(4096, PageKind::Normal, None).expect("a page");
    assert!(refusal(&hello(), short.fd()).contains("4096 bytes where the rings need"));
    let (reader, _writer) = std::io::pipe().expect("a pipe");
    assert!(refusal(&hello(), reader.as_fd()).contains("0 bytes where"));
    for ring_bytes in [0, 1, 4096, (1 << 20) + 64, 1 << 31] {
        let odd = Hello { geometry: Geometry { ring_bytes, ..GEOMETRY }, ..hello() };
        let text = refusal(&odd, right.fd());
        assert!(text.starts_with(&format!("ring_bytes: asked {ring_bytes}")), "{text}");
    }
    let mut rig = rig(false);
    rig.offer(&hello(), right.fd());
    assert!(rig.port.link_up(), "the right one is taken");
}

#[test]
fn a_hello_without_descriptors_is_refused() {
    for listens in [true, false] {
        let mut rig = rig(listens);
        rig.port.housekeep();
        rig.say(&Message::Hello(hello()), &[]);
        assert!(rig.refusal().contains("passed 0 descriptors"), "{}", rig.refusal());
    }
}

#[test]
fn a_doorbell_that_is_none_is_counted_and_harmless() {
    let mut rig = rig(true);
    let (_reader, writer) = std::io::pipe().expect("a pipe");
    rig.say(&Message::Hello(hello()), &[writer.as_fd()]);
    let (_, mut fds) = rig.hear();
    rig.say(&Message::Ready, &[]);
    rig.queue.rx_burst(1, |_| ());
    let memory = fds.remove(0);
    let len = rustix::fs::fstat(&memory).expect("a memfd").st_size as u64;
    let region = Arc::new(Region::from_fd(memory, len).expect("sealed"));
    let rx = Consumer::new(&region, GEOMETRY, 0, Direction::FromListener, 9014).expect("fits");
    assert!(rx.arm());
    assert!(crate::conformance::commit(&mut rig.queue, &[0; 60]));
    rig.queue.tx_flush();
    assert_eq!((rig.counter("tx_wakeup_errors"), rig.counter("tx_good_packets")), (1, 1));
}

//! The tests over loopback, UDP also through a relay that loses, doubles and swaps datagrams.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::*;

const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn spec(op: PerfOp, mode: PerfMode, size: u32, iters: u64) -> PerfSpec {
    let spec = PerfSpec::new(op, mode, Role::Client, size);
    PerfSpec { iters, warmup: 3, tx_depth: 5, cq_mod: 3, check_data: true, ..spec }
}

fn wait(test: &mut SockTest) -> Result<PerfReport, SockError> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(result) = test.poll() {
            return result;
        }
        assert!(Instant::now() < deadline, "no result within 60 s");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs a test over loopback; the ports that each side is told go through `via`.
fn run_via(
    kernel: Kernel,
    client: PerfSpec,
    via: impl Fn(u16, u16) -> (u16, u16),
) -> (PerfReport, PerfReport) {
    let server = PerfSpec { role: Role::Server, ..client };
    let (mut a, client_port, client_end) = SockTest::open(kernel, client, LOCAL, None).unwrap();
    let (mut b, server_port, server_end) = SockTest::open(kernel, server, LOCAL, None).unwrap();
    let (to_client, to_server) = via(client_port, server_port);
    b.start(SocketAddr::new(LOCAL, to_client), client_end).unwrap();
    a.start(SocketAddr::new(LOCAL, to_server), server_end).unwrap();
    let reports = (wait(&mut a).unwrap(), wait(&mut b).unwrap());
    a.stop();
    b.stop();
    reports
}

fn run(kernel: Kernel, client: PerfSpec) -> (PerfReport, PerfReport) {
    run_via(kernel, client, |client, server| (client, server))
}

#[test]
fn every_test_ends_with_the_exact_count_and_right_data() {
    for kernel in [Kernel::Tcp, Kernel::Udp] {
        for op in [PerfOp::Send, PerfOp::Write, PerfOp::Read] {
            for mode in [PerfMode::Lat, PerfMode::Bw] {
                for (size, iters) in [(1, 7), (8, 50), (4095, 20), (200_000, 9)] {
                    let (client, server) = run(kernel, spec(op, mode, size, iters));
                    assert_eq!(client.messages, iters, "{kernel:?} {op:?} {mode:?} {size}");
                    assert_eq!(server.messages, iters, "{kernel:?} {op:?} {mode:?} {size}");
                    assert_eq!(client.rtt.map(|r| r.samples), (mode == PerfMode::Lat).then_some(iters));
                    assert!(client.gbytes_per_s > 0.0);
                }
            }
        }
    }
}

#[test]
fn a_duration_ends_both_sides() {
    for kernel in [Kernel::Tcp, Kernel::Udp] {
        for (op, mode) in [(PerfOp::Send, PerfMode::Lat), (PerfOp::Write, PerfMode::Bw)] {
            let spec = PerfSpec { duration_ns: Some(20_000_000), ..spec(op, mode, 64, 0) };
            let (client, server) = run(kernel, spec);
            assert!(client.messages > 0);
            assert_eq!(client.messages, server.messages);
            assert!(client.elapsed_ns >= 20_000_000);
        }
    }
}

/// A relay between two UDP ports: what it loses, doubles and holds back follows from a counter.
struct Relay {
    ports: (u16, u16),
    stop: Arc<AtomicBool>,
    lost: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    fn new(client: u16, server: u16) -> Self {
        let (near_client, near_server) = (socket(), socket());
        let ports = (near_client.local_addr().unwrap().port(), near_server.local_addr().unwrap().port());
        // What the client sends to `near_server`'s port comes out of `near_client`'s, and the other way round.
        near_server.connect((LOCAL, client)).unwrap();
        near_client.connect((LOCAL, server)).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let lost = Arc::new(AtomicU64::new(0));
        let (flag, count) = (Arc::clone(&stop), Arc::clone(&lost));
        let thread = std::thread::spawn(move || relay(&near_server, &near_client, &flag, &count));
        Relay { ports, stop, lost, thread: Some(thread) }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn socket() -> UdpSocket {
    let socket = UdpSocket::bind((LOCAL, 0)).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket
}

fn relay(a: &UdpSocket, b: &UdpSocket, stop: &AtomicBool, lost: &AtomicU64) {
    let mut buffer = vec![0; 65_536];
    let mut held: [Option<Vec<u8>>; 2] = [None, None];
    // Not a plain counter: a test that repeats with the same period would lose the same datagram for ever.
    let mut random = 88_172_645_463_325_252u64;
    while !stop.load(Ordering::Relaxed) {
        let mut idle = true;
        for (index, (from, to)) in [(a, b), (b, a)].into_iter().enumerate() {
            let Ok(len) = from.recv(&mut buffer) else { continue };
            idle = false;
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            match random % 23 {
                0 | 1 => {
                    lost.fetch_add(1, Ordering::Relaxed);
                }
                2 => {
                    let _ = to.send(&buffer[..len]);
                    let _ = to.send(&buffer[..len]);
                }
                3 => held[index] = Some(buffer[..len].to_vec()),
                _ => {
                    let _ = to.send(&buffer[..len]);
                    if let Some(late) = held[index].take() {
                        let _ = to.send(&late);
                    }
                }
            }
        }
        if idle {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

#[test]
fn udp_survives_loss_doubling_and_disorder() {
    for op in [PerfOp::Send, PerfOp::Write, PerfOp::Read] {
        for mode in [PerfMode::Lat, PerfMode::Bw] {
            for check_data in [true, false] {
                let spec = PerfSpec { check_data, ..spec(op, mode, 150_000, 12) };
                let relay = std::cell::OnceCell::new();
                let (client, server) = run_via(Kernel::Udp, spec, |client, server| {
                    let made = relay.get_or_init(|| Relay::new(client, server));
                    // The client talks to the relay's first port, the server to its second one.
                    (made.ports.0, made.ports.1)
                });
                assert_eq!((client.messages, server.messages), (12, 12), "{op:?} {mode:?}");
                assert!(
                    relay.get().unwrap().lost.load(Ordering::Relaxed) > 0,
                    "{op:?} {mode:?}: nothing was lost"
                );
            }
        }
    }
}

#[test]
fn a_silent_peer_is_given_up() {
    let silent = socket();
    let spec = PerfSpec { progress_deadline_ns: 50_000_000, ..spec(PerfOp::Send, PerfMode::Lat, 64, 5) };
    let (mut test, _, end) = SockTest::open(Kernel::Udp, spec, LOCAL, None).unwrap();
    test.start(silent.local_addr().unwrap(), end).unwrap();
    assert!(matches!(wait(&mut test), Err(SockError::Silent(_))));
}

#[test]
fn a_tcp_peer_that_leaves_is_told() {
    let listener = TcpListener::bind((LOCAL, 0)).unwrap();
    let (mut test, ..) =
        SockTest::open(Kernel::Tcp, spec(PerfOp::Send, PerfMode::Lat, 64, 5), LOCAL, None).unwrap();
    test.start(listener.local_addr().unwrap(), None).unwrap();
    drop(listener.accept().unwrap());
    let error = wait(&mut test).unwrap_err();
    assert!(matches!(error, SockError::Ended { done: 0 }), "{error}");
}

#[test]
fn wrong_data_is_found() {
    let client = spec(PerfOp::Send, PerfMode::Lat, 64, 5);
    let server = PerfSpec { role: Role::Server, seed: client.seed + 1, ..client };
    let (mut a, ..) = SockTest::open(Kernel::Tcp, client, LOCAL, None).unwrap();
    let (mut b, port, _) = SockTest::open(Kernel::Tcp, server, LOCAL, None).unwrap();
    b.start(SocketAddr::new(LOCAL, 1), None).unwrap();
    a.start(SocketAddr::new(LOCAL, port), None).unwrap();
    assert!(matches!(wait(&mut b), Err(SockError::Data(Fault::Data { message: 0, offset: 0, .. }))));
}

#[test]
fn an_empty_message_is_refused() {
    let refused = SockTest::open(Kernel::Tcp, spec(PerfOp::Send, PerfMode::Bw, 0, 1), LOCAL, None);
    assert_eq!(refused.err().map(|e| e.status()), Some(2));
}

//! The program in the kernel's own test run, on frames built byte by byte. Needs root; says so where it lacks.

use super::*;
use crate::xdp::bpf::{Map, MapKind, Program};
use std::os::fd::{AsFd, OwnedFd};

/// The loaded program, with a socket on queue 0 (the queue of a test run) if asked for.
struct Bench {
    program: Program,
    counters: Map,
    _maps: [Map; 2],
    _socket: Option<OwnedFd>,
}

const OURS_V4: &str = "10.1.2.3";
const OURS_V6: &str = "fd00::7";

impl Bench {
    /// `None`, with the reason on stderr, where the kernel does not let us.
    fn new(with_socket: bool) -> Option<Bench> {
        let sockets = match Map::new(MapKind::Xsk, "t_xsks", 4, 4, 4) {
            Ok(map) => map,
            Err(errno) => {
                eprintln!("skipped: BPF maps need CAP_BPF and CAP_NET_ADMIN ({errno})");
                return None;
            }
        };
        let addresses = Map::new(MapKind::Hash, "t_addrs", 16, 1, 8).unwrap();
        let counters = Map::new(MapKind::Array, "t_counters", 4, 8, COUNTERS).unwrap();
        for ip in [OURS_V4, OURS_V6] {
            addresses.update(&address_key(ip.parse().unwrap()), &[1]).unwrap();
        }
        let code = assemble(sockets.fd(), addresses.fd(), counters.fd());
        let program = Program::load("ferroce_test", &code, false)
            .unwrap_or_else(|(errno, log)| panic!("{errno}\n{log}"));
        let socket = with_socket.then(|| {
            use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
            let fd = socket_with(AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC, None).unwrap();
            sockets.update(&0u32.to_ne_bytes(), &fd.as_fd().as_raw_fd().to_ne_bytes()).unwrap();
            fd
        });
        Some(Bench { program, counters, _maps: [sockets, addresses], _socket: socket })
    }

    #[track_caller]
    fn expect(&self, what: &str, frame: &[u8], answer: i32) {
        assert_eq!(self.program.test_run(frame).unwrap(), answer.cast_unsigned(), "{what}");
    }

    fn unowned(&self) -> u64 {
        self.counters.lookup_u64(&UNOWNED.to_ne_bytes()).unwrap()
    }

    fn not_ours(&self) -> u64 {
        self.counters.lookup_u64(&NOT_OURS.to_ne_bytes()).unwrap()
    }
}

fn ethernet(tags: &[u16], kind: u16, body: &[u8]) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    for tag in tags {
        frame.extend_from_slice(&tag.to_be_bytes());
        frame.extend_from_slice(&[0x60, 0x05]);
    }
    frame.extend_from_slice(&kind.to_be_bytes());
    frame.extend_from_slice(body);
    frame
}

fn udp(port: u16) -> Vec<u8> {
    let mut udp = vec![0xc0, 0x00];
    udp.extend_from_slice(&port.to_be_bytes());
    udp.extend_from_slice(&[0, 24, 0xde, 0xad]);
    udp.extend_from_slice(&[0x55; 16]);
    udp
}

fn ipv4(dst: &str, port: u16) -> Vec<u8> {
    let body = udp(port);
    let mut ip = vec![0x45, 0x02, 0, (20 + body.len()) as u8, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 1, 2, 4];
    ip.extend_from_slice(&dst.parse::<std::net::Ipv4Addr>().unwrap().octets());
    ip.extend_from_slice(&body);
    ip
}

fn ipv6(dst: &str, port: u16) -> Vec<u8> {
    let body = udp(port);
    let mut ip = vec![0x60, 0, 0, 0, 0, body.len() as u8, 17, 64];
    ip.extend_from_slice(&"fd00::8".parse::<std::net::Ipv6Addr>().unwrap().octets());
    ip.extend_from_slice(&dst.parse::<std::net::Ipv6Addr>().unwrap().octets());
    ip.extend_from_slice(&body);
    ip
}

#[test]
fn roce_for_us_and_mac_control_are_taken() {
    let Some(bench) = Bench::new(true) else { return };
    bench.expect("IPv4", &ethernet(&[], 0x0800, &ipv4(OURS_V4, 4791)), XDP_REDIRECT);
    bench.expect("IPv6", &ethernet(&[], 0x86dd, &ipv6(OURS_V6, 4791)), XDP_REDIRECT);
    bench.expect("IPv4, tagged", &ethernet(&[0x8100], 0x0800, &ipv4(OURS_V4, 4791)), XDP_REDIRECT);
    bench.expect("IPv6, tagged", &ethernet(&[0x8100], 0x86dd, &ipv6(OURS_V6, 4791)), XDP_REDIRECT);
    bench.expect("pause", &ethernet(&[], 0x8808, &[0; 46]), XDP_REDIRECT);
    let mut wide_class = ethernet(&[], 0x86dd, &ipv6(OURS_V6, 4791));
    wide_class[14] = 0x6b;
    bench.expect("IPv6 with a traffic class", &wide_class, XDP_REDIRECT);
    assert_eq!(bench.unowned(), 0);
}

#[test]
fn everything_else_stays_with_the_kernel() {
    let Some(bench) = Bench::new(true) else { return };
    assert_eq!(bench.not_ours(), 0);
    bench.expect("ARP", &ethernet(&[], 0x0806, &[0; 28]), XDP_PASS);
    assert_eq!((bench.not_ours(), bench.unowned()), (1, 0));
    let v4 = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = ethernet(&[], 0x0800, &ipv4(OURS_V4, 4791));
        change(&mut frame);
        frame
    };
    bench.expect("other IPv4 address", &ethernet(&[], 0x0800, &ipv4("10.1.2.9", 4791)), XDP_PASS);
    bench.expect("other IPv6 address", &ethernet(&[], 0x86dd, &ipv6("fd00::9", 4791)), XDP_PASS);
    bench.expect("other port", &ethernet(&[], 0x0800, &ipv4(OURS_V4, 4790)), XDP_PASS);
    bench.expect("other port, IPv6", &ethernet(&[], 0x86dd, &ipv6(OURS_V6, 53)), XDP_PASS);
    bench.expect("two tags", &ethernet(&[0x8100, 0x8100], 0x0800, &ipv4(OURS_V4, 4791)), XDP_PASS);
    bench.expect("ARP", &ethernet(&[], 0x0806, &[0; 46]), XDP_PASS);
    bench.expect("options", &v4(&|f| f[14] = 0x46), XDP_PASS);
    bench.expect("version", &v4(&|f| f[14] = 0x55), XDP_PASS);
    bench.expect("more fragments", &v4(&|f| f[20] = 0x20), XDP_PASS);
    bench.expect("fragment offset", &v4(&|f| f[21] = 1), XDP_PASS);
    bench.expect("TCP", &v4(&|f| f[23] = 6), XDP_PASS);
    let mut routing = ethernet(&[], 0x86dd, &ipv6(OURS_V6, 4791));
    routing[20] = 43;
    bench.expect("IPv6 extension header", &routing, XDP_PASS);
    assert_eq!(bench.unowned(), 0);
}

#[test]
fn cut_frames_pass_at_every_length() {
    let Some(bench) = Bench::new(true) else { return };
    let whole = ethernet(&[0x8100], 0x86dd, &ipv6(OURS_V6, 4791));
    for len in 14..14 + 4 + 48 {
        bench.expect(&format!("cut to {len}"), &whole[..len], XDP_PASS);
    }
    bench.expect("just long enough", &whole[..14 + 4 + 48], XDP_REDIRECT);
}

#[test]
fn a_queue_without_a_socket_is_counted_and_passes() {
    let Some(bench) = Bench::new(false) else { return };
    bench.expect("no socket", &ethernet(&[], 0x0800, &ipv4(OURS_V4, 4791)), XDP_PASS);
    bench.expect("no socket, IPv6", &ethernet(&[], 0x86dd, &ipv6(OURS_V6, 4791)), XDP_PASS);
    bench.expect("not ours", &ethernet(&[], 0x0806, &[0; 46]), XDP_PASS);
    assert_eq!(bench.unowned(), 2);
}

#[test]
fn the_program_is_short() {
    // The kernel allows far more; this notices code that grows by accident.
    let Some(bench) = Bench::new(false) else { return };
    let code = assemble(bench._maps[0].fd(), bench._maps[1].fd(), bench.counters.fd());
    assert!(code.len() < 100, "{} instructions", code.len());
}

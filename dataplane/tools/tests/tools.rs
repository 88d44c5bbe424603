//! The tools as people run them: two processes, joined by shared memory or by the loopback interface.

mod common;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;

use common::{Place, connect, frames_agree, number, parse, text};

#[test]
fn pingpong_with_checked_data() {
    let sizes = [1, 1023, 4096, 65536].map(|size| (size, 1024));
    let mtus = [256, 512, 2048, 4096].map(|mtu| (65536, mtu));
    for (size, mtu) in sizes.into_iter().chain(mtus) {
        for gid in [0, 1] {
            let words = format!("-c -n 100 -s {size} -m {mtu} -g {gid}");
            let (client, server) = Place::new().json("pingpong", &words);
            for side in [&client, &server] {
                assert_eq!(side["data_checked"], 100, "{words}");
                assert_eq!(side["iterations"], 100);
                assert_eq!(side["bytes"], 200 * size);
                assert_eq!(side["path_mtu"], mtu);
            }
            assert_eq!(client["rtt_samples"], 100);
            assert_eq!(client["remote"], server["local"]);
            frames_agree(&client, &server);
        }
    }
}

/// UC and UD, sleeping while they wait.
#[test]
fn pingpong_over_the_unreliable_services() {
    let uc = [1, 1023, 4096, 65536].map(|size| ("uc", size, "-m 1024"));
    let ud = [0, 1, 1023, 2048].map(|size| ("ud", size, ""));
    for (kind, size, more) in uc.into_iter().chain(ud) {
        for gid in [0, 1] {
            let words = format!("--type {kind} -c -e -n 100 -s {size} -g {gid} {more}");
            let (client, server) = Place::new().json("pingpong", &words);
            for side in [&client, &server] {
                assert_eq!(side["type"], kind);
                assert_eq!(side["data_checked"], 100, "{words}");
                assert_eq!(side["bytes"], 200 * size);
            }
            assert_eq!(client["remote"], server["local"]);
            frames_agree(&client, &server);
            // No acknowledgements: as many packets as the messages have.
            let packets = if kind == "uc" { (size as u64).div_ceil(1024).max(1) } else { 1 };
            assert_eq!(client["port"]["tx_good_packets"], 100 * packets, "{words}");
        }
    }
}

/// Several queue pairs, one shared receive queue. The counts are those of all together, and the last ones end where they
/// stand: at least as many as asked for.
#[test]
fn pingpong_over_a_shared_receive_queue() {
    for words in ["-q 1 -s 1", "-q 4 -s 1023 -r 4", "-q 16 -s 4096", "-q 16 -s 65536 -r 40 -m 4096"] {
        let words = format!("--type srq -c -e -n 200 {words}");
        let (client, server) = Place::new().json("pingpong", &words);
        for side in [&client, &server] {
            assert_eq!(side["type"], "srq");
            assert!(number(side, "data_checked") >= 200.0, "{words}");
            assert!(number(side, "data_checked") < 200.0 + 16.0 * 2.0, "{words}");
            assert_eq!(side["data_checked"], side["iterations"]);
        }
        assert_eq!(client["remote"], server["local"]);
    }
    let place = Place::new();
    let server = place.spawn("pingpong", "--type srq -q 2");
    let client = place.spawn("pingpong", "--type srq -q 3 127.0.0.1");
    for output in [server.end(), client.end()] {
        assert!(!output.status.success());
    }
}

/// A client without -c does as the original: it brings back what the server answered, and the server compares that.
#[test]
fn pingpong_with_an_unchecked_client_is_checked_by_the_server() {
    for words in ["--type uc -n 100 -s 5000", "--type ud -n 100 -s 1000"] {
        let place = Place::new();
        let server = place.spawn("pingpong", &format!("{words} --json -c"));
        let client = place.spawn("pingpong", &format!("{words} --json 127.0.0.1"));
        assert_eq!(parse(&client.end(), words)["data_checked"], 0);
        assert_eq!(parse(&server.end(), words)["data_checked"], 100);
    }
}

#[test]
fn pingpong_survives_loss_both_ways() {
    for (size, mtu) in [(1, 1024), (1023, 256), (4096, 1024), (65536, 1024), (65536, 4096)] {
        let place = Place::new();
        let words = format!("-c -n 300 -s {size} -m {mtu} --json");
        let faults = "--fault loss=0.01,duplicate=0.01,reorder=0.01,seed=7";
        let server = place.spawn("pingpong", &words);
        let client = place.spawn("pingpong", &format!("{words} {faults} 127.0.0.1"));
        let (client, server) = (parse(&client.end(), &words), parse(&server.end(), &words));
        assert_eq!(
            (client["data_checked"].as_u64(), server["data_checked"].as_u64()),
            (Some(300), Some(300))
        );
        let count = |name: &str| client["port"][name].as_u64().unwrap();
        assert!(count("fault_tx_lost") + count("fault_rx_lost") > 0, "nothing was lost: {client}");
        assert!(client["dev_mode"].as_str().unwrap().contains("with faults"));
        // What was lost on the way out was not sent: the counts of both ports still agree.
        frames_agree(&client, &server);
    }
}

#[test]
fn perf_survives_loss_both_ways() {
    for test in ["send-lat", "send-bw", "write-lat", "write-bw", "read-lat", "read-bw"] {
        let place = Place::new();
        let words = "-s 5000 -m 1024 -n 300 -t 16 --data_validation --json";
        let server = place.spawn(&format!("perf {test}"), words);
        let faults = "--fault loss=0.01,seed=3";
        let client = place.spawn(&format!("perf {test}"), &format!("{words} {faults} 127.0.0.1"));
        let (client, server) = (parse(&client.end(), test), parse(&server.end(), test));
        assert_eq!(client["iterations"], 300, "{test}");
        assert!(server["data_checked"].as_bool().unwrap());
        let count = |name: &str| client["port"][name].as_u64().unwrap();
        assert!(count("fault_tx_lost") + count("fault_rx_lost") > 0, "{test}: nothing was lost");
    }
}

#[test]
fn a_capture_holds_every_frame() {
    let place = Place::new();
    let file = place.link.with_extension("pcap");
    let server = place.spawn("pingpong", "-n 20 --json");
    let client = place.spawn("pingpong", &format!("-n 20 --json --capture {} 127.0.0.1", file.display()));
    let (client, _) = (parse(&client.end(), "capture"), parse(&server.end(), "capture"));
    let bytes = std::fs::read(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert_eq!(bytes[..4], 0xa1b2_3c4d_u32.to_le_bytes());
    let (mut at, mut frames) = (24, 0);
    while at + 16 <= bytes.len() {
        let len = u32::from_le_bytes(bytes[at + 8..at + 12].try_into().unwrap()) as usize;
        at += 16 + len;
        frames += 1;
    }
    assert_eq!(at, bytes.len(), "the last record is cut");
    let port = &client["port"];
    assert_eq!(frames, port["tx_good_packets"].as_u64().unwrap() + port["rx_good_packets"].as_u64().unwrap());
}

#[test]
fn pingpong_prints_the_originals_lines() {
    let (client, server) = Place::new().both("pingpong", "-n 50 -s 64");
    for output in [&client, &server] {
        assert!(output.status.success(), "{}", text(output));
        let lines: Vec<String> =
            String::from_utf8_lossy(&output.stdout).lines().map(str::to_string).collect();
        assert_eq!(lines.len(), 4, "{lines:?}");
        assert!(lines[0].starts_with("  local address:  LID 0x0000, QPN 0x"), "{lines:?}");
        assert!(lines[1].starts_with("  remote address: LID 0x0000, QPN 0x"), "{lines:?}");
        assert!(lines[0].contains(", GID ::ffff:10.99.0."), "{lines:?}");
        assert!(lines[2].starts_with("6400 bytes in ") && lines[2].ends_with(" Mbit/sec"), "{lines:?}");
        assert!(lines[3].starts_with("50 iters in ") && lines[3].ends_with(" usec/iter"), "{lines:?}");
    }
}

#[test]
fn perf_over_every_transport() {
    for transport in ["rdma", "tcp", "udp"] {
        for op in ["send", "write", "read"] {
            let place = Place::new();
            let words = format!("--transport {transport} -s 1000 -n 200 --warmup 10 --data_validation");
            let (lat, served) = place.json(&format!("perf {op}-lat"), &words);
            let case = format!("{transport} {op}: {lat}");
            assert_eq!(
                (lat["transport"].as_str(), lat["op"].as_str()),
                (Some(transport), Some(op)),
                "{case}"
            );
            assert_eq!(
                (lat["size_bytes"].as_u64(), lat["iterations"].as_u64()),
                (Some(1000), Some(200)),
                "{case}"
            );
            let (p50, p99, p999) =
                (number(&lat, "rtt_ns_p50"), number(&lat, "rtt_ns_p99"), number(&lat, "rtt_ns_p999"));
            assert!(0.0 < p50 && p50 <= p99 && p99 <= p999, "{case}");
            assert!(number(&lat, "gbytes_per_s") > 0.0, "{case}");
            for key in ["core", "idle", "fallbacks", "role"] {
                assert!(lat.get(key).is_some(), "{key}: {case}");
            }
            assert_eq!(served["role"], "server");
            let (bw, served) = place.json(&format!("perf {op}_bw"), &words);
            assert_eq!(bw["iterations"], 200);
            assert!(number(&bw, "gbytes_per_s") > 0.0);
            assert!(bw["rtt_ns_p50"].is_null());
            if transport == "rdma" {
                frames_agree(&bw, &served);
            }
        }
    }
}

#[test]
fn perf_prints_perftests_columns() {
    let (client, server) = Place::new().both("perf write-lat", "-s 64 -n 100");
    let shown = text(&client);
    assert!(client.status.success() && server.status.success(), "{shown}{}", text(&server));
    let stdout = String::from_utf8_lossy(&client.stdout);
    let lines: Vec<&str> = stdout.lines().collect();
    assert!(lines[1].trim() == "RDMA_Write Latency Test", "{shown}");
    let heads = lines.iter().position(|l| l.starts_with(" #bytes #iterations    t_min[usec]")).expect(&shown);
    let fields: Vec<&str> = lines[heads + 1].split_whitespace().collect();
    assert_eq!((fields.len(), fields[0], fields[1]), (9, "64", "100"), "{shown}");
    assert!(stdout.contains("Latency         : half the round trip"), "{shown}");
    assert!(stdout.contains(" Link type       : Ethernet"), "{shown}");
    assert!(String::from_utf8_lossy(&server.stdout).contains("* Waiting for client to connect... *"));

    let (client, _) = Place::new().both("perf send-bw", "-a -n 20");
    let stdout = String::from_utf8_lossy(&client.stdout).into_owned();
    assert!(stdout.contains("BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]"), "{}", text(&client));
    let rows = stdout.lines().filter(|l| l.split_whitespace().nth(1) == Some("20")).count();
    assert_eq!(rows, 23, "{stdout}");

    let (client, _) = Place::new().both("perf send-lat", "-D 0.1 --transport tcp");
    let stdout = String::from_utf8_lossy(&client.stdout).into_owned();
    assert!(
        stdout.contains(" #bytes        #iterations       t_avg[usec]    tps average"),
        "{}",
        text(&client)
    );
}

#[test]
fn nobody_listens() {
    let place = Place::new();
    for tool in ["pingpong", "perf send-lat", "perf send-lat --transport tcp"] {
        let output = place.spawn(tool, "--wait 0 127.0.0.1").end();
        assert_eq!(output.status.code(), Some(1));
        assert!(
            text(&output).contains(&format!("127.0.0.1:{} does not listen", place.port)),
            "{}",
            text(&output)
        );
    }
}

#[test]
fn no_client_comes() {
    let output = Place::new().spawn("pingpong", "--wait 0.05").end();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("no client came within 0.05 s"), "{}", text(&output));
}

#[test]
fn wrong_values_end_with_status_2() {
    for (tool, words, told) in [
        ("pingpong", "-m 2048 --netdev-mtu 1500", "largest 1024"),
        ("perf send-lat", "--transport rdma --gid 1", "unexpected argument"),
        ("pingpong", "-m 1500", "256, 512, 1024, 2048 and 4096"),
        ("pingpong", "--type ud -m 1024 -s 1025", "size: asked 1025, allowed 0 to 1024"),
        ("pingpong", "--type xrc", "rc, uc, ud"),
        ("pingpong", "-n 0", "iters: asked 0"),
        ("pingpong", "-l 9", "0..=7"),
        ("pingpong", "-d mlx5_0", "xdp:INTERFACE"),
        ("pingpong", "-e --idle spin", "does not go with"),
        ("pingpong", "-g 7", "gid index: asked 7"),
        ("perf write-lat", "-s 0", "size: asked 0"),
        ("perf send-lat", "-q 5000", "qps: asked 5000, allowed 1 to 4096"),
        ("perf swap-lat", "", "send-lat, send-bw"),
        ("perf", "", "which test? Allowed are send-lat"),
        ("perf send-lat", "-c XRC", "XRC is not there: allowed are RC, UC and UD"),
        ("perf read-bw", "-c UC", "allowed RC for read"),
        ("perf write-lat", "-c UD", "allowed RC or UC for write"),
        ("perf send-lat", "-R", "-R, --rdma_cm: comes with the connection manager"),
        ("perf send-lat", "--mcg 3", "-g, --mcg: comes with multicast"),
        ("perf atomic-lat", "-s 16", "size: asked 16, allowed 8 bytes for atomics"),
        ("perf atomic-bw", "-a", "cannot be changed"),
        ("perf send-lat", "-b", "bidirectional"),
        ("perf send-lat", "-l 2", "post_list"),
        ("perf send-bw", "-l 3 -n 10", "a multiple of post_list 3"),
        ("perf send-bw", "--rate_limit 0", "not a number above 0"),
        ("perf send-bw", "--burst_size 4", "need --rate_limit"),
        ("perf send-bw", "--open-loop --rate_limit 5", "open_loop"),
        ("perf send-bw", "-D 4 -f 2", "margin"),
        ("perf send-bw", "-e --idle spin", "does not go with --idle spin"),
        ("perf send-bw", "--cpu_util", "needs -D"),
        ("perf send-bw", "--sweep size:1:8:3", "VAR:FIRST:LAST:STEP"),
        ("perf send-bw", "--sweep colour:1:8:*2", "allowed are size"),
        ("perf send-bw", "--sweep outs:1:512:*2", "outs: asked 256, allowed 1 to 128"),
        ("perf write-bw", "-q 4 --transport tcp", "qp: asked 4, allowed 1 over kernel sockets"),
        ("perf atomic-bw", "--transport udp", "over kernel sockets"),
        ("perf serve", "somewhere", "takes no HOST"),
        ("pingpong", "--core 4095", "core: asked 4095"),
        ("pingpong", "--fault loss=2", "loss"),
        ("pingpong", "--fault luck=1", "luck"),
    ] {
        let output = Place::new().spawn(tool, words).end();
        assert_eq!(output.status.code(), Some(2), "{tool} {words}: {}", text(&output));
        assert!(text(&output).contains(told), "{tool} {words}: {}", text(&output));
    }
}

#[test]
fn two_sides_that_disagree_are_both_told() {
    let place = Place::new();
    let server = place.spawn("perf send-lat", "-s 64 -n 10");
    let client = place.spawn("perf send-lat", "-s 128 -n 10 127.0.0.1").end();
    let server = server.end();
    for output in [&client, &server] {
        assert_eq!(output.status.code(), Some(1));
        assert!(
            text(output).contains("size: the server was told [64], the client [128]"),
            "{}",
            text(output)
        );
    }
    let place = Place::new();
    let server = place.spawn("perf send-lat", "");
    let client = place.spawn("perf write-bw", "127.0.0.1").end();
    assert!(
        text(&client).contains("test: the server was told \"send-lat\", the client \"write-bw\""),
        "{}",
        text(&client)
    );
    assert_eq!(server.end().status.code(), Some(1));
}

#[test]
fn a_client_that_cannot_go_on_tells_the_server_why() {
    let place = Place::new();
    let server = place.spawn("perf send-lat", "");
    let client = place.spawn("perf send-lat", "-m 4096 --netdev-mtu 1500 127.0.0.1").end();
    assert_eq!(client.status.code(), Some(2), "{}", text(&client));
    let server = server.end();
    assert_eq!(server.status.code(), Some(1));
    for output in [&client, &server] {
        assert!(
            text(output).contains("path MTU: asked 4096") && text(output).contains("largest 1024"),
            "{}",
            text(output)
        );
    }
}

#[test]
fn a_reader_that_leaves_is_no_panic() {
    let place = Place::new();
    let mut server = place.spawn("pingpong", "-n 10");
    drop(server.0.as_mut().unwrap().stdout.take());
    let output = server.end();
    assert_eq!(output.status.code(), Some(1));
    assert!(!text(&output).contains("panicked"), "{}", text(&output));
}

#[test]
fn strangers_are_named() {
    for (tool, said, told) in [
        (
            "pingpong",
            &b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n\r\n\r\n"[..],
            "not a line of ibv_rc_pingpong",
        ),
        ("pingpong", b"0000:000011:", "after 12 of 52 bytes"),
        ("perf send-lat", b"0000:000011:94fb34:\n", "speaks neither ferroce perf nor perftest"),
        ("perf send-lat", b"GET / HTTP/1.1\r\n", "speaks neither ferroce perf nor perftest: it sent \"GET /"),
        ("perf send-lat", b"5.60\0\0\0\0\0\0\0\0\0\0\0\0", "5.70 or later"),
        ("perf send-lat", b"{\"ferro\":7}\n", "does not speak ferroce perf"),
        (
            "perf send-lat",
            b"{\"ferroce_perf\":7,\"version\":\"8.0\"}\n",
            "speaks version 7 of ferroce perf (program \"8.0\")",
        ),
        ("perf send-lat", b"{\"ferroce_perf\":2,\"version\":\"8.0\"}\n", "bad hello"),
    ] {
        let place = Place::new();
        let server = place.spawn(tool, "");
        let mut stream = connect(place.port);
        stream.write_all(said).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let output = server.end();
        assert_eq!(output.status.code(), Some(1), "{}", text(&output));
        assert!(text(&output).contains(told), "{tool}: {}", text(&output));
    }
    // A client whose server is of another version.
    let place = Place::new();
    let listener = TcpListener::bind(("127.0.0.1", place.port)).unwrap();
    let client = place.spawn("perf send-lat", "127.0.0.1");
    let (mut stream, _) = listener.accept().unwrap();
    let _ = stream.read(&mut [0; 4096]).unwrap();
    stream.write_all(b"{\"ferroce_perf\":3,\"version\":\"0.9\",\"error\":\"no\"}\n").unwrap();
    let output = client.end();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("speaks version 3"), "{}", text(&output));
}

#[test]
fn a_peer_that_dies_is_told_in_bounded_time() {
    for (transport, killed, told) in [
        ("rdma", "server", &["closed the connection during the test", "PSN"][..]),
        ("rdma", "client", &["closed the connection during the test", "PSN"]),
        ("tcp", "server", &["127.0.0.1"]),
        ("udp", "client", &["closed the connection during the test"]),
    ] {
        let place = Place::new();
        let words = format!("-s 64 -D 30 --transport {transport}");
        let mut server = place.spawn("perf send-lat", &words);
        let mut client = place.spawn("perf send-lat", &format!("{words} 127.0.0.1"));
        // Long enough to be in the middle of it on any machine; too short a time only changes what dies.
        std::thread::sleep(Duration::from_millis(1500));
        let output = if killed == "server" {
            server.kill();
            client.end()
        } else {
            client.kill();
            server.end()
        };
        assert_eq!(output.status.code(), Some(1), "{}", text(&output));
        for word in told {
            assert!(text(&output).contains(word), "{transport} {killed}: {}", text(&output));
        }
    }
}

#[test]
fn a_pingpong_server_that_dies_is_told_with_peer_and_psn() {
    let place = Place::new();
    let mut server = place.spawn("pingpong", "-n 1000000000");
    let client = place.spawn("pingpong", "-n 1000000000 127.0.0.1");
    std::thread::sleep(Duration::from_millis(1500));
    server.kill();
    let output = client.end();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let shown = text(&output);
    assert!(shown.contains("peer ::ffff:10.99.0.1 QP 0x") && shown.contains("last PSN sent 0x"), "{shown}");
}

#[test]
fn help_fits_80_columns() {
    for tool in ["", "pingpong", "perf"] {
        for help in ["-h", "--help"] {
            let mut command = Command::new(env!("CARGO_BIN_EXE_ferroce-tools"));
            let output = command.args(tool.split_whitespace()).arg(help).output().unwrap();
            assert!(output.status.success());
            for line in String::from_utf8_lossy(&output.stdout).lines() {
                assert!(line.chars().count() <= 80, "{tool}: {line:?}");
            }
        }
    }
}

//! `perf` as people run it, between two processes of ours joined by shared memory: every test, connection and shape of
//! report, and what goes wrong.

mod common;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::Output;

use common::{Place, connect, number, parse, text};
use serde_json::Value;

const TESTS: [&str; 8] =
    ["send-lat", "send-bw", "write-lat", "write-bw", "read-lat", "read-bw", "atomic-lat", "atomic-bw"];

/// Connections that a test has.
fn connections(test: &str) -> &'static [&'static str] {
    match test {
        "send-lat" | "send-bw" => &["RC", "UC", "UD"],
        "write-lat" | "write-bw" => &["RC", "UC"],
        _ => &["RC"],
    }
}

fn size(test: &str, connection: &str) -> u64 {
    match (test, connection) {
        ("atomic-lat" | "atomic-bw", _) => 8,
        (_, "UD") => 1000,
        _ => 5000,
    }
}

fn check_rtt(lat: &Value, case: &str) {
    let (p50, p99, p999) = (number(lat, "rtt_ns_p50"), number(lat, "rtt_ns_p99"), number(lat, "rtt_ns_p999"));
    assert!(0.0 < p50 && p50 <= p99 && p99 <= p999, "{case}");
    let buckets = lat["rtt_ns_histogram"].as_array().unwrap();
    let counted: u64 = buckets.iter().map(|b| b[1].as_u64().unwrap()).sum();
    assert_eq!(Some(counted), lat["rtt_samples"].as_u64(), "{case}");
}

/// Every test over every connection that has it; the server takes everything from the client but the test.
#[test]
fn every_test_over_every_connection() {
    for test in TESTS {
        for connection in connections(test) {
            let place = Place::new();
            let size = size(test, connection);
            let words = format!("-s {size} -n 150 -c {connection} --data_validation --json");
            let server = place.spawn(&format!("perf {test}"), "--json");
            let client = place.spawn(&format!("perf {test}"), &format!("{words} 127.0.0.1"));
            let case = format!("{test} {connection}");
            let (client, server) = (parse(&client.end(), &case), parse(&server.end(), &case));
            for (side, role) in [(&client, "client"), (&server, "server")] {
                assert_eq!(side["role"], role, "{case}");
                assert_eq!(side["connection"], *connection, "{case}");
                assert_eq!(side["data_checked"], true, "{case}");
                assert_eq!(side["size_bytes"], size, "{case}");
                assert_eq!(side["schema"], 2, "{case}");
                assert_eq!(side["peer_kind"], "ferroce", "{case}");
                assert_eq!(side["lost"], 0, "{case}");
            }
            assert_eq!(client["iterations"], 150, "{case}");
            assert_eq!(client["remote"], server["local"], "{case}");
            assert_eq!(client["host"]["kernel"], server["host"]["kernel"], "{case}");
            assert!(client["host"]["command_line"].as_array().unwrap().len() > 5, "{case}");
            if test.ends_with("lat") {
                check_rtt(&client, &case);
            } else {
                assert!(number(&client, "gbytes_per_s") > 0.0, "{case}");
            }
        }
    }
}

#[test]
fn several_queue_pairs_both_directions_lists_and_events() {
    for (test, words, messages) in [
        ("send-bw", "-q 8 -s 3000", 8 * 200),
        ("write-bw", "-q 8 -s 3000 -c UC", 8 * 200),
        ("read-bw", "-q 3 -s 70000 -m 1024", 3 * 200),
        ("atomic-bw", "-q 4 -A CMP_AND_SWAP", 4 * 200),
        ("send-bw", "-b -s 3000", 200),
        ("write-bw", "-b -q 2 -s 100", 400),
        ("read-bw", "-b -s 3000", 200),
        ("atomic-bw", "-b", 200),
        ("write-bw", "-l 10 -s 64", 200),
        ("send-bw", "-l 4 -Q 4 -s 64", 200),
        ("send-lat", "-e -s 64", 200),
        ("send-bw", "-e -s 64", 200),
        ("read-lat", "-e", 200),
        ("write-bw", "-e -s 3000", 200),
        ("send-lat", "-I 64 -s 64", 200),
        ("write-lat", "-S 3 -T 32 -o 4 -u 17", 200),
    ] {
        let (client, server) = Place::new().json(&format!("perf {test}"), &format!("-n 200 {words}"));
        let case = format!("{test} {words}");
        assert_eq!(client["iterations"], messages, "{case}: {client}");
        if words.contains("-b") {
            assert!(client["peer_measured"]["msgs_per_s"].as_f64().unwrap() > 0.0, "{case}: {client}");
            assert_eq!(server["bidirectional"], true, "{case}");
        }
        if let Some(qps) = words.strip_prefix("-q ").and_then(|w| w.split(' ').next()) {
            assert_eq!(client["local"]["qps"].as_array().unwrap().len().to_string(), qps, "{case}");
        }
    }
}

#[test]
fn time_rate_and_open_loop() {
    let (client, _) = Place::new().json("perf send-bw", "-s 1000 -D 1.5 -f 0.25");
    assert_eq!(client["margin_ns"], 250_000_000);
    let measured = number(&client, "elapsed_ns");
    assert!((0.9e9..1.2e9).contains(&measured), "{client}");
    let (client, _) =
        Place::new().json("perf write-bw", "-s 1000 -n 600 --rate_limit 1000 --rate_units p --burst_size 10");
    assert!(number(&client, "msgs_per_s") < 1100.0, "{client}");
    let open = "-s 64 -n 300 --rate_limit 2000 --rate_units p --open-loop";
    let (client, _) = Place::new().json("perf send-lat", open);
    assert_eq!(client["open_loop"], true);
    check_rtt(&client, open);
}

fn lines(output: &Output) -> Vec<String> {
    assert!(output.status.success(), "{}", text(output));
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_string).collect()
}

#[test]
fn both_directions_are_told_together_and_apart() {
    let (client, server) = Place::new().both("perf write-bw", "-b --report-both -s 1000 -n 100");
    for output in [&client, &server] {
        let lines = lines(output);
        assert!(lines.iter().any(|l| l.trim() == "RDMA_Write Bidirectional BW Test"), "{lines:?}");
        let row = |after: &str| {
            let at = lines.iter().position(|l| l.trim() == after).unwrap();
            let row = lines[at..].iter().find(|l| l.starts_with(" 1000 ")).unwrap();
            row.split_whitespace().nth(4).unwrap().parse::<f64>().unwrap()
        };
        let both = lines.iter().find(|l| l.starts_with(" 1000 ")).unwrap();
        let both: f64 = both.split_whitespace().nth(4).unwrap().parse().unwrap();
        let sum = row("Local results:") + row("Remote results:");
        assert!((both - sum).abs() < 1e-4 * both.max(1.0), "{both} {sum}: {lines:?}");
    }
}

#[test]
fn lists_percentiles_and_single_numbers() {
    let out = |words: &str| lines(&Place::new().both("perf send-lat", words).0);
    let histogram = out("-s 64 -n 50 -H");
    let at = histogram.iter().position(|l| l == "#, usec").unwrap();
    let values: Vec<f64> = histogram[at + 1..at + 51]
        .iter()
        .enumerate()
        .map(|(i, l)| l.strip_prefix(&format!("{}, ", i + 1)).unwrap().parse().unwrap())
        .collect();
    assert!(values.is_sorted(), "{values:?}");
    let heads = |l: &&String| l.starts_with(" #bytes #iterations    t_min[usec]");
    assert_eq!(histogram.iter().filter(heads).count(), 2, "before and after");
    let unsorted = out("-n 50 -U");
    let at = unsorted.iter().position(|l| l == "#, usec").unwrap();
    assert!(unsorted[at + 1].starts_with("1, ") && unsorted[at + 50].starts_with("50, "), "{unsorted:?}");
    assert!(unsorted[at + 51].starts_with("-----"), "{unsorted:?}");
    let cycles = out("-n 50 -C");
    assert!(cycles.iter().any(|l| l.contains("t_min[cycles]")), "{cycles:?}");
    let percentiles = out("-n 50 --percentiles");
    assert!(percentiles.iter().any(|l| l.starts_with(" percentiles[usec]:")), "{percentiles:?}");
    assert!(
        percentiles.iter().filter(|l| l.contains("99.99%") || l.contains("CPU:")).count() == 2,
        "{percentiles:?}"
    );
    let busy = out("-D 1 --cpu_util");
    let at = busy.iter().position(|l| l.ends_with("tps average    CPU_Util[%]")).unwrap();
    assert_eq!(busy[at + 1].split_whitespace().count(), 5, "{busy:?}");
    let only = out("-n 50 --output=latency");
    assert_eq!(only.len(), 1, "{only:?}");
    assert!(only[0].parse::<f64>().unwrap() > 0.0);
    let (client, _) = Place::new().both("perf write-bw", "-n 50 --output=message_rate");
    assert!(lines(&client)[0].parse::<f64>().unwrap() > 0.0);
}

#[test]
fn sweeps_and_csv() {
    let place = Place::new();
    let server = place.spawn("perf write-bw", "");
    let client = place.spawn("perf write-bw", "-n 100 --csv --sweep size:64:4K:*4 127.0.0.1").end();
    assert!(server.end().status.success());
    let lines = lines(&client);
    assert_eq!(lines.len(), 5, "{lines:?}");
    let heads: Vec<&str> = lines[0].split(',').collect();
    for (line, size) in lines[1..].iter().zip([64, 256, 1024, 4096]) {
        let fields: Vec<&str> = line.split(',').collect();
        assert_eq!(fields.len(), heads.len(), "{line}");
        let of = |name: &str| fields[heads.iter().position(|h| *h == name).unwrap()];
        assert_eq!(
            (of("test"), of("size_bytes"), of("iterations")),
            ("write-bw", size.to_string().as_str(), "100")
        );
        assert!(of("gbytes_per_s").parse::<f64>().unwrap() > 0.0);
    }
    let place = Place::new();
    let server = place.spawn("perf send-bw", "");
    let client = place.spawn("perf send-bw", "-n 100 -s 64 --sweep qp:1:3:+1 127.0.0.1").end();
    assert!(server.end().status.success());
    let shown = text(&client);
    assert!(shown.contains("\n qp=1\n 64 ") && shown.contains("\n qp=3\n 64 "), "{shown}");
}

/// A server of any test takes everything from its clients; a batch has a line per test.
#[test]
fn a_batch_against_a_server_without_options() {
    let place = Place::new();
    let file = place.link.with_extension("batch");
    std::fs::write(
        &file,
        "# all of it\nsend-lat -s 64\nwrite_bw -q 2\natomic-lat\nread-bw -c RC -s 70000\nsend-bw -c UD\n",
    )
    .unwrap();
    let server = place.spawn("perf serve", "--clients 5");
    let words = format!("--batch {} -n 60 --json 127.0.0.1", file.display());
    let client = place.spawn("perf", &words).end();
    let rows: Vec<Value> = lines(&client).iter().map(|l| serde_json::from_str(l).unwrap()).collect();
    let tests: Vec<String> = rows
        .iter()
        .map(|r| format!("{}-{}", r["op"].as_str().unwrap(), r["mode"].as_str().unwrap()))
        .collect();
    assert_eq!(tests, ["send-lat", "write-bw", "atomic-lat", "read-bw", "send-bw"]);
    assert_eq!((rows[1]["iterations"].as_u64(), rows[4]["connection"].as_str()), (Some(120), Some("UD")));
    let served = server.end();
    assert!(served.status.success(), "{}", text(&served));

    // It stops at the first failure, or goes on.
    std::fs::write(
        &file,
        "send-lat -n 10\nsend-lat -n 10 --limit_bw 1\nwrite-bw -n 10 -y 1000000\nread-lat -n 10\n",
    )
    .unwrap();
    for (more, clients, ran) in [("", 3, 3), ("--keep-going", 4, 4)] {
        let server = place.spawn("perf serve", &format!("--clients {clients}"));
        let words = format!("--batch {} {more} --csv 127.0.0.1", file.display());
        let client = place.spawn("perf", &words).end();
        assert_eq!(client.status.code(), Some(1), "{}", text(&client));
        let shown = text(&client);
        assert!(shown.contains(":3: 65536 bytes: message rate"), "{shown}");
        assert_eq!(shown.lines().filter(|l| l.contains(",rdma,RC,")).count(), ran, "{shown}");
        assert!(server.end().status.success());
    }
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn perftests_json_is_json() {
    let place = Place::new();
    let file = place.link.with_extension("json");
    let server = place.spawn("perf read-bw", "");
    let words = format!("-n 100 -s 4096 --out_json --out_json_file {} 127.0.0.1", file.display());
    assert!(place.spawn("perf read-bw", &words).end().status.success());
    assert!(server.end().status.success());
    let value: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(value["test_info"]["test"], "RDMA_Read_BW_Test");
    assert_eq!(value["test_info"]["Number_of_qps"], 1);
    assert_eq!(
        (value["results"]["MsgSize"].as_u64(), value["results"]["n_iterations"].as_u64()),
        (Some(4096), Some(100))
    );
    for key in ["BW_peak", "BW_average", "MsgRate"] {
        assert!(value["results"][key].as_f64().is_some(), "{key}: {value}");
    }
    std::fs::remove_file(&file).unwrap();
}

#[test]
fn a_floor_that_is_not_reached_fails() {
    let place = Place::new();
    let server = place.spawn("perf write-bw", "");
    let client = place.spawn("perf write-bw", "-n 50 -s 64 -w 1000000000 127.0.0.1").end();
    assert_eq!(client.status.code(), Some(1));
    assert!(text(&client).contains("is below --limit_bw 1000000000"), "{}", text(&client));
    assert!(server.end().status.success());
}

#[test]
fn what_the_server_was_told_must_agree() {
    for (test, told, asked, words) in [
        ("send-bw", "-q 2", "-q 3", "qp: the server was told 2, the client 3"),
        ("send-bw", "-c UC", "", "connection: the server was told \"UC\", the client \"RC\""),
        ("write-bw", "-b", "", "bidirectional: the server was told true, the client false"),
        ("write-bw", "-n 7", "-n 8", "iters: the server was told 7, the client 8"),
        ("read-bw", "--transport tcp", "", "transport: the server was told \"tcp\", the client \"rdma\""),
    ] {
        let place = Place::new();
        let server = place.spawn(&format!("perf {test}"), told);
        let client = place.spawn(&format!("perf {test}"), &format!("{asked} 127.0.0.1")).end();
        for output in [client, server.end()] {
            assert_eq!(output.status.code(), Some(1), "{}", text(&output));
            assert!(text(&output).contains(words), "{words}: {}", text(&output));
        }
    }
}

#[test]
fn who_the_peer_is_can_be_forced() {
    let place = Place::new();
    let server = place.spawn("perf send-lat", "--peer perftest");
    let client = place.spawn("perf send-lat", "--peer ferroce 127.0.0.1").end();
    assert_eq!(client.status.code(), Some(1));
    let told = "is a program of perftest, but this side was told --peer ferroce";
    assert!(text(&client).contains(told), "{}", text(&client));
    assert_eq!(server.end().status.code(), Some(1));
}

/// Two of ours can also speak perftest's conversation, which is how its session is tested without it.
#[test]
fn two_of_ours_over_perftests_conversation() {
    for (test, words) in [
        ("send-lat", "-s 64"),
        ("send-lat", "-c UD -s 1000"),
        ("send-lat", "-c UC -s 5000"),
        ("write-lat", "-s 5000"),
        ("write-lat", "-c UC"),
        ("read-lat", ""),
        ("atomic-lat", ""),
        ("send-bw", "-s 5000"),
        ("send-bw", "-s 64 -q 8"),
        ("send-bw", "-b -s 5000"),
        ("send-bw", "-c UD"),
        ("write-bw", "-s 5000"),
        ("write-bw", "-q 2 -s 64"),
        ("write-bw", "-b -s 5000"),
        ("read-bw", "-s 5000"),
        ("read-bw", "-b -s 5000"),
        ("atomic-bw", "-A CMP_AND_SWAP"),
        ("atomic-bw", "-q 2"),
        ("send-lat", "-D 1"),
        ("write-bw", "-D 1"),
        ("send-bw", "-D 1 -s 5000"),
    ] {
        let iters = if words.contains("-D") { "" } else { "-n 100" };
        let words = format!("{words} {iters} --peer perftest --json");
        let place = Place::new();
        let server = place.spawn(&format!("perf {test}"), &words);
        let client = place.spawn(&format!("perf {test}"), &format!("{words} 127.0.0.1"));
        let (client, server) = (client.end(), server.end());
        assert!(server.status.success(), "{test} {words}: {}", text(&server));
        // A side that only served has a row too, in latency tests as well.
        assert_eq!(parse(&server, &format!("server of {test} {words}"))["role"], "server");
        let row = parse(&client, &format!("{test} {words}"));
        assert_eq!(row["peer_kind"], "perftest", "{test} {words}");
        assert!(row["iterations"].as_u64().unwrap() > 0, "{test} {words}: {row}");
        if test.ends_with("lat") {
            check_rtt(&row, test);
        }
    }
}

#[test]
fn all_sizes_over_perftests_conversation() {
    for (test, words, rows) in
        [("write-lat", "", 23), ("send-bw", "", 23), ("send-lat", "-c UD -m 1024", 10), ("read-bw", "-b", 23)]
    {
        let place = Place::new();
        let words = format!("-a -n 4 {words} --peer perftest --csv");
        let server = place.spawn(&format!("perf {test}"), &words);
        let client = place.spawn(&format!("perf {test}"), &format!("{words} 127.0.0.1")).end();
        let server = server.end();
        assert!(server.status.success(), "{test}: {}", text(&server));
        assert_eq!(lines(&client).len(), rows + 1, "{test}: {}", text(&client));
    }
}

/// Options that differ are named as far as the handshake shows them; in any case both say what they run.
#[test]
fn perftests_options_that_differ_are_named() {
    for (test, told, asked, words) in [
        ("write-bw", "-q 1", "-q 2", "told of another queue pair"),
        ("write-bw", "-q 2", "-q 1", "it has 1 queue pairs, this side was told -q 2"),
        ("send-bw", "-c UD -s 4000", "-c UD -s 4000 -m 1024", "size: asked 4000, allowed 0 to 1024"),
    ] {
        let place = Place::new();
        let server = place.spawn(&format!("perf {test}"), &format!("{told} -n 10 --peer perftest"));
        let client =
            place.spawn(&format!("perf {test}"), &format!("{asked} -n 10 --peer perftest 127.0.0.1")).end();
        let server = server.end();
        assert!(!client.status.success() && !server.status.success(), "{}{}", text(&client), text(&server));
        let shown = format!("{}{}", text(&client), text(&server));
        assert!(shown.contains(words), "{words}: {shown}");
    }
}

/// A peer that says too little, or nonsense, at each step of perftest's handshake.
#[test]
fn a_bad_perftest_peer_is_named_with_the_step() {
    const VERSION: &[u8] = b"6.06\0\0\0\0\0\0\0\0\0\0\0\0";
    const MACHINE: &[u8] = b"\0\0\x10\0\0\0\0\x40";
    const KEYS: &[u8] = b"0000:0001:000011:4a488e:000002aa:0000555f11fde000:00:00:00:00:00:00:00:00:00:00:ff:ff:0a:4d:00:01:00000000:\0";
    let joined = |parts: &[&[u8]]| parts.concat();
    let broken = {
        let mut keys = KEYS.to_vec();
        keys[10..16].copy_from_slice(b"000001");
        keys
    };
    for (said, told) in [
        (joined(&[&VERSION[..7]]), "after 7 of 16 bytes of its version"),
        (joined(&[VERSION]), "after 0 of 4 bytes of its page size"),
        (joined(&[VERSION, b"\0\0\x10\x01"]), "cycle buffer: got 4097, allowed a power of two"),
        (joined(&[VERSION, MACHINE]), "of its path MTU"),
        (joined(&[VERSION, MACHINE, b"9\0"]), "path MTU: got \"9\\x00\", allowed 1 (256 bytes) to 5"),
        (joined(&[VERSION, MACHINE, b"5\0", &KEYS[..50]]), "after 50 of 108 bytes of its queue pair 0"),
        (joined(&[VERSION, MACHINE, b"5\0", &broken]), "QPN: got 0x000001, allowed 0x000002 to 0xfffffe"),
    ] {
        let place = Place::new();
        let server = place.spawn("perf send-lat", "-n 10");
        let mut stream = connect(place.port);
        stream.write_all(&said).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let output = server.end();
        assert_eq!(output.status.code(), Some(1), "{}", text(&output));
        assert!(text(&output).contains(told), "{told}: {}", text(&output));
    }
    // As a client, of a server that goes away.
    let place = Place::new();
    let listener = TcpListener::bind(("127.0.0.1", place.port)).unwrap();
    let client = place.spawn("perf write-bw", "-n 10 127.0.0.1");
    let (mut stream, _) = listener.accept().unwrap();
    stream.read_exact(&mut [0; 16]).unwrap();
    stream.write_all(VERSION).unwrap();
    stream.read_exact(&mut [0; 4]).unwrap();
    drop(stream);
    let output = client.end();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output).contains("of its page size"), "{}", text(&output));
}

/// A peer that stays and says nothing: the step is named when its time is over.
#[test]
fn a_silent_peer_is_named_in_bounded_time() {
    const VERSION: &[u8] = b"6.06\0\0\0\0\0\0\0\0\0\0\0\0";
    let places = [Place::new(), Place::new(), Place::new()];
    let servers: Vec<_> = places[..2].iter().map(|place| place.spawn("perf send-lat", "-n 10")).collect();
    let mut streams: Vec<_> = places[..2].iter().map(|place| connect(place.port)).collect();
    streams[1].write_all(VERSION).unwrap();
    let listener = TcpListener::bind(("127.0.0.1", places[2].port)).unwrap();
    let client = places[2].spawn("perf send-lat", "-n 10 127.0.0.1");
    let (_held, _) = listener.accept().unwrap();
    let outputs: Vec<Output> = servers.into_iter().map(common::Run::end).chain([client.end()]).collect();
    let told = [
        "did not send its first message in time",
        "did not send its page size in time",
        "did not send its version in time",
    ];
    for (output, told) in outputs.iter().zip(told) {
        assert_eq!(output.status.code(), Some(1));
        assert!(text(output).contains(told), "{told}: {}", text(output));
    }
}

/// Goes on until somebody interrupts it, and tells a row every so many seconds.
#[test]
fn an_endless_run_tells_rows() {
    let place = Place::new();
    let _server = place.spawn("perf write-bw", "");
    let mut client = place.spawn("perf write-bw", "--run_infinitely -D 0.5 -s 64 127.0.0.1");
    let mut out = client.0.as_mut().unwrap().stdout.take().unwrap();
    let (mut shown, mut chunk) = (String::new(), [0; 4096]);
    let rows = |shown: &str| shown.lines().filter(|l| l.starts_with(" 64 ")).count();
    while rows(&shown) < 3 {
        let count = out.read(&mut chunk).unwrap();
        assert!(count > 0, "it ended: {shown}");
        shown.push_str(&String::from_utf8_lossy(&chunk[..count]));
    }
    client.kill();
}

#[test]
fn a_program_of_perftest_is_not_served_without_a_test() {
    let place = Place::new();
    let server = place.spawn("perf serve", "--clients 1");
    let mut stream = connect(place.port);
    stream.write_all(b"6.06\0\0\0\0\0\0\0\0\0\0\0\0").unwrap();
    stream.read_exact(&mut [0; 16]).unwrap();
    let output = server.end();
    assert!(text(&output).contains("does not say which test it runs"), "{}", text(&output));
}

/// Progress goes to standard error, and only when asked for where that is no terminal.
#[test]
fn progress_is_told_on_request() {
    for (words, expected) in [("--progress", true), ("", false)] {
        let place = Place::new();
        let server = place.spawn("perf send-lat", "-D 4");
        let client = place.spawn("perf send-lat", &format!("-D 4 {words} 127.0.0.1")).end();
        let said = String::from_utf8_lossy(&client.stderr).into_owned();
        assert_eq!(
            said.contains("send-lat, 2 bytes: 2 of 4 s") || said.contains(": 3 of 4 s"),
            expected,
            "{said}"
        );
        assert!(server.end().status.success());
    }
}

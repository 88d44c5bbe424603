//! Clients that talk nonsense, too much, or nothing at all: cut off with a reason, while others are served.

mod common;

use std::time::{Duration, Instant};

use common::*;
use ferroce_api::Code;
use ferroce_api::appliance::*;

#[test]
fn nonsense_is_answered_and_harms_nobody() {
    let pair = Pair::start("");
    let mut good = pair.a.connect();
    let socket = &pair.a.socket;

    let mut client = Client::raw(socket);
    client.send(&FromClient::Hello(Hello { version: VERSION + 8, ..Hello::new(Role::Control, "future") }));
    let error = client.bye();
    let (ours, theirs) = (format!("{VERSION} by the appliance"), format!("{} by the client", VERSION + 8));
    assert_eq!(error.code, Code::Version);
    assert!(error.to_string().contains(&ours) && error.to_string().contains(&theirs), "{error}");

    let garbage: &[&[u8]] =
        &[b"\0", b"\xff\xfe\xfd", b"GET / HTTP/1.1\r\n\r\n", b"{}", b"[[[[[[[[", b"\"hello\"", b"null"];
    for bytes in garbage {
        // Before a hello, and after one.
        let mut client = Client::raw(socket);
        client.send_bytes(bytes);
        assert_eq!(client.bye().code, Code::Malformed, "{bytes:?}");
        let mut client = pair.a.connect();
        client.send_bytes(bytes);
        assert_eq!(client.bye().code, Code::Malformed, "{bytes:?}");
    }

    let mut client = Client::raw(socket);
    client.send(&FromClient::Request(Request { id: 1, batch: vec![Command::Status] }));
    assert!(client.bye().to_string().contains("a hello first"));
    let mut client = pair.a.connect();
    client.send(&FromClient::Hello(Hello::new(Role::Control, "again")));
    assert!(client.bye().to_string().contains("second hello"));

    let mut client = pair.a.connect();
    client.send_bytes(&vec![b' '; MAX_MESSAGE_BYTES + 1]);
    let error = client.bye();
    assert_eq!(error.code, Code::TooBig);
    assert!(error.to_string().contains(&(MAX_MESSAGE_BYTES + 1).to_string()), "{error}");
    let mut client = pair.a.connect();
    client.send_bytes(
        &serde_json::to_vec(&FromClient::Request(Request { id: 1, batch: vec![Command::Status; 65] }))
            .unwrap(),
    );
    assert_eq!(client.bye().attribute, "batch");

    // An empty batch is no crime.
    assert!(good.batch(vec![]).is_empty());
    let Response::Stats(stats) = good.one(Command::Stats) else { panic!() };
    let cut = stats.control.iter().find(|c| c.name == "control_cut_off").unwrap().value;
    assert_eq!(cut, 19, "{stats:?}");
    assert_eq!(good.status().clients, 1);
}

#[test]
fn there_is_room_for_so_many_clients() {
    let pair = Pair::start("[limits]\nmax_clients = 3\n");
    let mut clients: Vec<Client> = (0..3).map(|_| pair.a.connect()).collect();
    let mut fourth = Client::raw(&pair.a.socket);
    let error = fourth.bye();
    assert_eq!((error.code, error.attribute.as_str()), (Code::Exhausted, "clients"));
    assert!(error.to_string().contains("limits.max_clients"), "{error}");
    assert_eq!(clients[0].status().clients, 3);
    clients.pop();
    let until = Instant::now() + PATIENCE;
    while clients[0].status().clients == 3 {
        assert!(Instant::now() < until);
    }
    pair.a.connect();
}

/// A client that sends and never reads is served once and then waits; others do not notice; in the end it is cut off.
/// One that says nothing is cut off too.
#[test]
fn slow_and_silent_clients_are_cut_off() {
    let pair = Pair::start("");
    let mut good = pair.a.connect();
    let mut slow = pair.a.connect();
    let silent = Client::raw(&pair.a.socket);
    // Enough answers to fill the socket: its queue takes a handful of messages.
    let batch = vec![Command::Status; 16];
    let sender = std::thread::spawn(move || {
        for id in 0..10_000 {
            let bytes = encode(&FromClient::Request(Request { id, batch: batch.clone() })).unwrap();
            // Blocks when the appliance reads no more; fails when it has cut us off.
            if !slow.try_send_bytes(&bytes) {
                return slow;
            }
        }
        panic!("10,000 unread answers were taken");
    });
    let until = Instant::now() + Duration::from_secs(40);
    loop {
        let asked = Instant::now();
        let status = good.status();
        assert!(asked.elapsed() < Duration::from_secs(5), "others wait");
        if status.clients == 1 {
            break;
        }
        assert!(Instant::now() < until, "they stay connected:\n{}", pair.a.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(sender.join().expect("cut off"));
    drop(silent);
    assert!(
        pair.a.log().contains("no message taken") && pair.a.log().contains("no hello yet"),
        "{}",
        pair.a.log()
    );
}

/// A reader of the log that dies does not take the appliance with it.
#[test]
fn a_closed_log_harms_nobody() {
    let mut pair = Pair::start("");
    let mut a = pair.a.connect();
    pair.a.stop_reading_the_log();
    for _ in 0..5 {
        drop(pair.a.connect());
        let mut client = Client::raw(&pair.a.socket);
        client.send_bytes(b"nonsense");
        assert_eq!(client.bye().code, Code::Malformed);
    }
    assert_eq!(a.status().clients, 1);
    pair.a.signal(rustix::process::Signal::TERM);
    assert!(pair.a.wait().success());
}

/// SCALE-3: without descriptors for another connection those that are there are served, and later ones again.
#[test]
fn running_out_of_descriptors_is_survived() {
    let (files, run) = (Folder::new(), Folder::new());
    let enter = ["sh", "-c", "ulimit -n 40; exec \"$0\" \"$@\""].map(str::to_owned);
    let text = config("fe0", ADDRESS_A, "[limits]\nmax_clients = 200\n");
    let daemon = Daemon::start_inside(&enter, &files, &run.0, "fe0", &text);
    let mut good = daemon.connect();
    // More than it can take, fewer than would fill its queue of connections beside that.
    let crowd: Vec<Client> = (0..40).map(|_| Client::raw(&daemon.socket)).collect();
    let until = Instant::now() + PATIENCE;
    while !daemon.log().contains("no connection can be accepted now") {
        assert!(good.status().clients > 1);
        assert!(Instant::now() < until, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    good.status();
    drop(crowd);
    let mut late = daemon.connect();
    let until = Instant::now() + PATIENCE;
    while late.status().clients != 2 {
        assert!(Instant::now() < until);
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Batches of one client do not starve another's.
#[test]
fn batches_take_turns() {
    let pair = Pair::start("");
    let mut busy = pair.a.connect();
    let sender = std::thread::spawn(move || {
        for _ in 0..50 {
            busy.batch(vec![Command::Status; 40]);
        }
    });
    let mut other = pair.a.connect();
    let mut worst = Duration::ZERO;
    for _ in 0..20 {
        let asked = Instant::now();
        other.one(Command::QueryPort);
        worst = worst.max(asked.elapsed());
    }
    sender.join().expect("served");
    // A bound on turns, not a measurement: a starved client would wait for all fifty batches.
    assert!(worst < Duration::from_secs(2), "{worst:?}");
}

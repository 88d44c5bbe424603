//! The link to an appliance against everything that may sit at the other end of its socket.

mod common;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::{Folder, Rpc, ctld_ready, until};
use ferroce_api::appliance::{VERSION, encode};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType};
use serde_json::{Value, json};

/// A SEQPACKET listener that does with each connection what it is told, in a thread of its own.
fn listen(path: PathBuf, serve: impl Fn(OwnedFd) + Send + 'static) {
    let fd = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("socket");
    rustix::net::bind(&fd, &SocketAddrUnix::new(&path).expect("path")).expect("bind");
    rustix::net::listen(&fd, 8).expect("listen");
    std::thread::spawn(move || {
        while let Ok(connection) = rustix::net::accept(&fd) {
            serve(connection);
        }
    });
}

fn receive(fd: &OwnedFd) -> Vec<u8> {
    let mut buf = vec![0u8; 256 * 1024];
    let n = rustix::net::recv(fd, &mut buf[..], RecvFlags::empty()).map_or(0, |(n, _)| n);
    buf.truncate(n);
    buf
}

fn send(fd: &OwnedFd, value: &Value) {
    let _ = rustix::net::send(fd, &encode(value).expect("short"), SendFlags::NOSIGNAL);
}

fn hello(version: u32, dev: &str) -> Value {
    json!({"hello": {"version": version, "program": "9", "dev": dev, "pid": 1, "instance": 1, "workers": 1,
                     "max_message_bytes": 65536}})
}

/// What control says of `fe0`, and how long that took.
fn said(dir: &Path, method: &str, params: Value) -> (String, Duration) {
    let begin = Instant::now();
    let answer = Rpc::open(&dir.join("ctl.sock")).ask(method, params);
    let error = match &answer["error"] {
        Value::Null => answer["result"]["devs"][0]["error"].to_string(),
        error => error.to_string(),
    };
    (error, begin.elapsed())
}

fn case(serve: impl Fn(OwnedFd) + Send + 'static, parts: &[&str]) {
    let dir = Folder::new("link");
    listen(dir.path().join("fe0.sock"), serve);
    let mut process = ctld_ready(dir.path(), &["--appliance", "fe0"]);
    let (error, took) = said(dir.path(), "dev_list", json!({}));
    for part in parts {
        assert!(error.contains(part), "{error} lacks {part}");
    }
    assert!(error.contains("appliance fe0"), "{error}");
    assert!(took < Duration::from_secs(15), "bounded");
    assert!(process.running());
    assert!(process.terminate().success(), "and it still stops cleanly");
}

#[test]
fn another_version_is_named_with_both_numbers_and_which_to_upgrade() {
    let newer = VERSION + 1;
    case(
        move |fd| {
            receive(&fd);
            send(&fd, &hello(newer, "fe0"));
            receive(&fd);
        },
        &[&format!("protocol {newer}"), &format!("speaks {VERSION}"), "upgrade ferroce-ctld"],
    );
    // An appliance that refuses us says so itself.
    case(
        |fd| {
            receive(&fd);
            let error = ferroce_api::appliance::version_error(VERSION);
            send(&fd, &json!({"bye": {"error": error}}));
        },
        &["protocol version", "by the appliance"],
    );
}

#[test]
fn garbage_silence_and_a_wrong_name_are_told_apart() {
    case(
        |fd| {
            receive(&fd);
            let _ = rustix::net::send(&fd, b"SSH-2.0-OpenSSH\r\n", SendFlags::NOSIGNAL);
        },
        &["malformed"],
    );
    case(
        |fd| {
            receive(&fd);
            send(&fd, &hello(VERSION, "other"));
            receive(&fd);
        },
        &["calls itself other"],
    );
    case(drop, &["gone"]);
    // It takes our hello and never answers: its descriptor stays open.
    case(
        |fd| {
            receive(&fd);
            std::mem::forget(fd);
        },
        &["no hello within 2000 ms"],
    );
}

#[test]
fn a_socket_of_another_kind_is_no_appliance() {
    let dir = Folder::new("link");
    let _stream = std::os::unix::net::UnixListener::bind(dir.path().join("fe0.sock")).expect("bind");
    let _process = ctld_ready(dir.path(), &["--appliance", "fe0"]);
    let (error, _) = said(dir.path(), "dev_list", json!({}));
    assert!(error.contains("another program listens there"), "{error}");
}

#[test]
fn an_appliance_that_stops_answering_is_named_at_the_deadline() {
    let dir = Folder::new("link");
    listen(dir.path().join("fe0.sock"), |fd| {
        receive(&fd);
        send(&fd, &hello(VERSION, "fe0"));
        std::thread::spawn(move || while !receive(&fd).is_empty() {});
    });
    let _process = ctld_ready(dir.path(), &["--appliance", "fe0"]);
    let (error, took) = said(dir.path(), "pd_create", json!({"dev": "fe0"}));
    assert!(error.contains("appliance fe0") && error.contains("no answer within 5000 ms"), "{error}");
    assert!(took < Duration::from_secs(15), "bounded");
}

#[test]
fn a_connection_that_breaks_is_made_again() {
    let dir = Folder::new("link");
    listen(dir.path().join("fe0.sock"), |fd| {
        receive(&fd);
        send(&fd, &hello(VERSION, "fe0"));
        // Reads the first request and ends.
        receive(&fd);
    });
    let _process = ctld_ready(dir.path(), &["--appliance", "fe0"]);
    until("three connections", || {
        said(dir.path(), "dev_list", json!({}));
        let counters = Rpc::open(&dir.path().join("ctl.sock")).call("status", json!({}))["counters"].clone();
        let list = counters.as_array().expect("a list").clone();
        let connects = list.iter().find(|c| c["name"] == "fe0.connects").expect("counted").clone();
        (connects["value"].as_u64()? >= 3).then_some(())
    });
}

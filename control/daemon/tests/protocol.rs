//! The RPC sockets against everything that a client can do to them, with no appliance in sight.

mod common;

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use common::{Folder, Rpc, ctld, ctld_ready, log_dir, until};
use rustix::process::Signal;
use serde_json::{Value, json};

fn code(error: &Value) -> i64 {
    error["code"].as_i64().expect("a code")
}

#[test]
fn methods_versions_batches_and_notifications() {
    let dir = Folder::new("rpc");
    let process = ctld_ready(dir.path(), &[]);
    let mut rpc = Rpc::open(&dir.path().join("ctl.sock"));
    let methods = rpc.call("rpc_get_methods", json!({}));
    let methods: Vec<&str> = methods.as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    for name in ["rpc_get_methods", "ferroce_get_version", "status", "connect", "perf_run", "qp_modify"] {
        assert!(methods.contains(&name), "{name}");
    }
    let version = rpc.call("ferroce_get_version", Value::Null);
    assert_eq!(version["pid"], process.pid());
    assert_eq!(version["protocol"], ferroce_api::appliance::VERSION);

    rpc.send(br#" [{"jsonrpc":"2.0","id":"a","method":"dev_list"},7,{"jsonrpc":"2.0","method":"dev_list"},"#);
    rpc.send(br#"{"jsonrpc":"2.0","id":2,"method":"nope"}] {"jsonrpc":"2.0","id":3,"method":"dev_list"}"#);
    let batch = rpc.line().expect("the batch");
    let batch = batch.as_array().expect("an array");
    assert_eq!(batch.len(), 3, "a notification is not answered: {batch:?}");
    assert_eq!(batch[0]["id"], "a");
    assert_eq!(batch[0]["result"]["devs"], json!([]));
    assert_eq!((code(&batch[1]["error"]), &batch[1]["id"]), (-32600, &Value::Null));
    assert_eq!(code(&batch[2]["error"]), -32601);
    assert_eq!(rpc.line().expect("back to back")["id"], 3);

    rpc.send(br#"[{"jsonrpc":"2.0","method":"dev_list"}]"#);
    assert_eq!(rpc.call("dev_list", json!({}))["devs"], json!([]), "a batch of notifications has no answer");
}

#[test]
fn bad_requests_are_refused_and_the_connection_lives_on() {
    let dir = Folder::new("rpc");
    let _process = ctld_ready(dir.path(), &[]);
    let mut rpc = Rpc::open(&dir.path().join("ctl.sock"));
    for (request, wanted) in [
        (r#"{"jsonrpc":"1.0","id":1,"method":"dev_list"}"#, -32600),
        (r#"{"id":1,"method":"dev_list"}"#, -32600),
        (r#"{"jsonrpc":"2.0","id":1}"#, -32600),
        (r#"{"jsonrpc":"2.0","id":1,"method":5}"#, -32600),
        (r#"{"jsonrpc":"2.0","id":1,"method":"dev_list","extra":1}"#, -32600),
        (r#"[]"#, -32600),
        (r#"{"jsonrpc":"2.0","id":1,"method":"no_such"}"#, -32601),
        (r#"{"jsonrpc":"2.0","id":1,"method":"status","params":[1]}"#, -32602),
        (r#"{"jsonrpc":"2.0","id":1,"method":"status","params":{"device":"x"}}"#, -32602),
        (r#"{"jsonrpc":"2.0","id":1,"method":"dev_list","params":{"x":1}}"#, -32602),
        (r#"{"jsonrpc":"2.0","id":1,"method":"status","params":{"dev":"x"}}"#, -2),
        (r#"{"jsonrpc":"2.0","id":1,"method":"connect","params":{"dev":"x","peer":"x"}}"#, -22),
        (r#"{"jsonrpc":"2.0","id":1,"method":"qp_query","params":{"dev":"x","qpn":16777216}}"#, -32602),
    ] {
        rpc.send(request.as_bytes());
        let answer = rpc.line().expect("an answer");
        assert_eq!(code(&answer["error"]), wanted, "{request}: {answer}");
    }
    let many = vec![json!({"jsonrpc": "2.0", "id": 1, "method": "dev_list"}); 65];
    rpc.send(Value::from(many).to_string().as_bytes());
    assert_eq!(code(&rpc.line().expect("an answer")["error"]), -32600, "too many in one batch");
    let error = rpc.refused("status", json!({"dev": "x"}));
    assert_eq!(error["data"]["attribute"], "dev");
    assert_eq!(error["data"]["asked"], "x");
    assert!(error["data"]["allowed"].as_str().is_some_and(|t| t.contains("no appliance")), "{error}");
    assert!(error["data"]["hint"].as_str().is_some_and(|t| t.contains("--appliance")), "{error}");
}

#[test]
fn other_protocols_garbage_and_floods_are_cut_off_without_harm() {
    let dir = Folder::new("rpc");
    let mut process = ctld_ready(dir.path(), &[]);
    let socket = dir.path().join("ctl.sock");
    let cut = |bytes: &[u8], wanted: i64, part: &str| {
        let mut rpc = Rpc::open(&socket);
        // The process may close before it has read everything.
        let _ = rpc.try_send(bytes);
        let answer = rpc.line().expect("a reason");
        assert_eq!(code(&answer["error"]), wanted, "{answer}");
        let text = answer["error"]["message"].as_str().expect("a text").to_owned();
        assert!(text.contains(part), "{text}");
        assert_eq!(rpc.line(), None, "cut off");
    };
    cut(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", -32700, "not our protocol");
    cut(&[0, 1, 2, 3, 255], -32700, "not our protocol");
    cut(br#"{"jsonrpc" "2.0"}"#, -32700, "not JSON");
    cut(b"{\"a\":\"\xff\xfe\"}", -32700, "not JSON");
    let deep = "[".repeat(5000) + &"]".repeat(5000);
    cut(deep.as_bytes(), -32700, "not JSON");
    let mut flood = br#"{"jsonrpc":"2.0","id":1,"method":""#.to_vec();
    flood.resize(ferroce_api::rpc::MAX_REQUEST_BYTES + 2, b'x');
    cut(&flood, -90, "at most 1048576 bytes");
    assert!(process.running());
    assert_eq!(Rpc::open(&socket).call("dev_list", json!({}))["devs"], json!([]));
}

#[test]
fn a_client_that_dies_in_the_middle_and_one_that_never_finishes_harm_nobody() {
    let dir = Folder::new("rpc");
    let _process = ctld_ready(dir.path(), &[]);
    let socket = dir.path().join("ctl.sock");
    let mut half = Rpc::open(&socket);
    half.send(br#"{"jsonrpc":"2.0","#);
    let mut slow = Rpc::open(&socket);
    slow.send(b"{");
    drop(half);
    let mut rpc = Rpc::open(&socket);
    assert_eq!(rpc.call("dev_list", json!({}))["devs"], json!([]), "others are served meanwhile");
    let answer = slow.line().expect("a reason");
    assert_eq!(code(&answer["error"]), -110, "{answer}");
    assert_eq!(slow.line(), None, "cut off");
    let counters = rpc.call("status", json!({}))["counters"].clone();
    let cut =
        counters.as_array().expect("a list").iter().find(|c| c["name"] == "clients_cut").expect("counted");
    assert_eq!(cut["value"], 1);
}

#[test]
fn the_reading_socket_refuses_every_change() {
    let dir = Folder::new("rpc");
    let _process = ctld_ready(dir.path(), &["--appliance", "fe0"]);
    let mut rpc = Rpc::open(&dir.path().join("ro.sock"));
    let listed = rpc.call("rpc_get_methods", json!({}));
    let listed: Vec<&str> = listed.as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    for method in ferroce_api::rpc::CHANGES {
        assert!(!listed.contains(&method), "{method} is offered");
        assert_eq!(code(&rpc.refused(method, json!({"anything": 1}))), -13, "{method}");
    }
    // An appliance that is away is named in every reading answer, and stops none.
    let list = rpc.call("dev_list", json!({}));
    assert_eq!(list["devs"][0]["connected"], false);
    let text = rpc.refused("qp_query", json!({"dev": "fe0", "qpn": 5}))["message"].to_string();
    assert!(text.contains("appliance fe0") && text.contains("fe0.sock"), "{text}");
}

#[test]
fn more_clients_than_allowed_are_told_so() {
    let dir = Folder::new("rpc");
    let _process = ctld_ready(dir.path(), &[]);
    let socket = dir.path().join("ctl.sock");
    let mut all: Vec<Rpc> = (0..64).map(|_| Rpc::open(&socket)).collect();
    for rpc in &mut all {
        rpc.call("dev_list", json!({}));
    }
    let answer = Rpc::open(&socket).line().expect("a reason");
    assert_eq!(code(&answer["error"]), -16, "{answer}");
    drop(all);
    until("room after the others have left", || {
        let mut rpc = Rpc::open(&socket);
        let _ = rpc.try_send(br#"{"jsonrpc":"2.0","id":1,"method":"dev_list"}"#);
        rpc.line().filter(|answer| answer["error"].is_null())
    });
    Rpc::open(&dir.path().join("ro.sock")).call("dev_list", json!({}));
}

#[test]
fn sockets_have_their_modes_and_a_clean_stop_leaves_nothing() {
    for signal in [Signal::TERM, Signal::INT] {
        let dir = Folder::new("rpc");
        let mut process = ctld_ready(dir.path(), &[]);
        assert_eq!(dir.names(), ["ctl.sock", "ro.sock"]);
        for name in dir.names() {
            let mode = std::fs::metadata(dir.path().join(name)).expect("socket").permissions().mode();
            assert_eq!(mode & 0o777, 0o660);
        }
        // A client that stays connected, and one in the middle of a request, do not hold up the end.
        let mut idle = Rpc::open(&dir.path().join("ctl.sock"));
        idle.call("dev_list", json!({}));
        process.signal(signal);
        assert!(process.wait().success(), "{}", process.log());
        assert_eq!(dir.names(), Vec::<String>::new());
        assert_eq!(idle.line(), None);
    }
}

#[test]
fn a_crash_leaves_sockets_that_the_next_start_replaces_and_a_second_one_is_refused() {
    let dir = Folder::new("rpc");
    let mut first = ctld_ready(dir.path(), &[]);
    first.signal(Signal::KILL);
    first.wait();
    assert_eq!(dir.names(), ["ctl.sock", "ro.sock"], "left behind");
    let mut second = ctld_ready(dir.path(), &[]);
    let mut third = ctld(dir.path(), &[]);
    assert_eq!(third.wait().code(), Some(1));
    let log = third.log();
    assert!(log.contains(&format!("pid {}", second.pid())), "the live one is named: {log}");
    assert!(second.running());
    Rpc::open(&dir.path().join("ctl.sock")).call("dev_list", json!({}));
    assert!(second.terminate().success());
}

#[test]
fn a_bad_configuration_is_refused_before_anything_is_made() {
    let dir = Folder::new("rpc");
    let file = dir.path().join("ctld.toml");
    std::fs::write(&file, "[control]\nrun_dirr = \"/tmp\"\n").expect("file");
    let mut process = ctld(&dir.path().join("run"), &["--config", file.to_str().expect("utf-8")]);
    assert_eq!(process.wait().code(), Some(1));
    assert!(process.log().contains("run_dirr"), "{}", process.log());
    assert!(!dir.path().join("run").exists());
    let mut process = ctld(&dir.path().join("run"), &["--appliance", "a", "--appliance", "a"]);
    assert_eq!(process.wait().code(), Some(1));
    let long = dir.path().join("x".repeat(120));
    let mut process = ctld(&long, &[]);
    assert_eq!(process.wait().code(), Some(1));
    assert!(process.log().contains("allowed 107"), "{}", process.log());
    std::fs::remove_dir_all(log_dir(&long)).expect("clean");
}

#[test]
fn an_answer_that_nobody_reads_ends_the_connection() {
    let dir = Folder::new("rpc");
    let _process = ctld_ready(dir.path(), &[]);
    let socket = dir.path().join("ctl.sock");
    let mut stream = std::os::unix::net::UnixStream::connect(&socket).expect("connect");
    stream.set_write_timeout(Some(Duration::from_secs(30))).expect("timeout");
    // Requests without end, answers never read: the buffers fill, then the process gives up on this client.
    let line = br#"{"jsonrpc":"2.0","id":1,"method":"rpc_get_methods"}"#.repeat(64);
    let begin = std::time::Instant::now();
    let end = loop {
        match std::io::Write::write_all(&mut stream, &line) {
            Ok(()) => assert!(begin.elapsed() < Duration::from_secs(60), "never cut off"),
            Err(e) => break e.kind(),
        }
    };
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
    assert!(matches!(end, BrokenPipe | ConnectionReset), "{end}");
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    Rpc::open(&socket).call("dev_list", json!({}));
}

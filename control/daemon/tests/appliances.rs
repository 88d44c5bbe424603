//! The control process with two real appliances joined by shared memory.

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::{Folder, Process, Rpc, ctld_ready, log_dir, program, until};
use rustix::process::Signal;
use serde_json::{Value, json};

struct Pair {
    fe0: Process,
    fe1: Process,
    control: Option<Process>,
    dir: Folder,
}

/// Two appliances and a control process. `extra` goes into the file of `fe1`, `workers` into both.
fn pair(extra: &str, mtu: u32) -> Pair {
    let dir = Folder::new("pair");
    let start = |name: &str, address: &str, extra: &str| {
        let text = format!(
            "[appliance]\nname = \"{name}\"\n[memory]\nbytes = \"16M\"\npages = \"normal\"\n[port]\nkind = \"shm\"\nlink = \"l\"\n\
             addresses = [\"{address}\"]\nmtu = {mtu}\n[[worker]]\ncore = \"none\"\n{extra}"
        );
        let logs = log_dir(dir.path());
        let file = logs.join(format!("{name}.toml"));
        std::fs::write(&file, text).expect("config");
        let args =
            ["--config", file.to_str().expect("utf-8"), "--run-dir", dir.path().to_str().expect("utf-8")];
        Process::start(name, &program("ferroced"), &args, &logs)
    };
    let fe0 = start("fe0", "192.0.2.1/24", "");
    let fe1 = start("fe1", "192.0.2.2/24", extra);
    let control = control(dir.path());
    let mut pair = Pair { fe0, fe1, control: Some(control), dir };
    pair.wait_active();
    pair
}

fn control(dir: &Path) -> Process {
    ctld_ready(dir, &["--appliance", "fe0", "--appliance", "fe1"])
}

impl Pair {
    fn rpc(&self) -> Rpc {
        Rpc::open(&self.dir.path().join("ctl.sock"))
    }
    fn wait_active(&mut self) {
        let mut rpc = self.rpc();
        until("both ports to be active", || {
            assert!(self.fe0.running(), "fe0 ended:\n{}", self.fe0.log());
            assert!(self.fe1.running(), "fe1 ended:\n{}", self.fe1.log());
            let status = rpc.call("status", json!({}));
            let up = |i: usize| status["devs"][i]["status"]["ports"][0]["link_up"] == true;
            (up(0) && up(1)).then_some(())
        });
    }
    /// Objects of both devices: pd, mr, cq, qp each.
    fn counts(&self) -> Vec<u64> {
        let status = self.rpc().call("status", json!({}));
        let mut counts = Vec::new();
        for dev in status["devs"].as_array().expect("devices") {
            for name in ["pd", "mr", "cq", "qp"] {
                let objects = dev["status"]["objects"].as_array().expect("objects");
                let count = objects.iter().find(|c| c["name"] == name).expect("counted");
                counts.push(count["value"].as_u64().expect("a number"));
            }
        }
        counts
    }
}

fn text(error: &Value) -> &str {
    error["message"].as_str().expect("a message")
}

fn qps(rpc: &mut Rpc, dev: &str) -> Vec<Value> {
    let listing = rpc.call("resource_show", json!({"dev": dev, "kind": "qp"}));
    listing["devs"][0]["qp"].as_array().cloned().unwrap_or_default()
}

fn measure(op: &str, kind: &str, size: u64, iterations: u64) -> Value {
    json!({"client": "fe0", "server": "fe1", "op": op, "kind": kind, "size_bytes": size, "iterations": iterations,
           "warmup": 10, "check_data": true, "deadline_ms": 60_000})
}

#[test]
fn connect_makes_a_pair_and_disconnect_takes_it_away() {
    let pair = pair("", 9000);
    let mut rpc = pair.rpc();
    let made = rpc.call("connect", json!({"dev": "fe0", "peer": "fe1", "mr_bytes": 8192}));
    assert_eq!(made["path_mtu"], 4096);
    let (ours, theirs) = (qps(&mut rpc, "fe0"), qps(&mut rpc, "fe1"));
    assert_eq!((ours.len(), theirs.len()), (1, 1));
    for (own, peer) in [(&ours[0], &theirs[0]), (&theirs[0], &ours[0])] {
        assert_eq!(own["state"], "RTS");
        assert_eq!(own["rtr"]["dest_qpn"], peer["qpn"]);
        assert_eq!(own["rq_psn"], peer["sq_psn"]);
        assert_eq!(own["cookie"], made["cookie"]);
        assert_eq!(own["rtr"]["av"]["dgid"], peer["rtr"]["av"]["sgid"]);
    }
    assert_ne!(ours[0]["sq_psn"], theirs[0]["sq_psn"], "start PSNs are drawn, not fixed");
    assert_eq!(pair.counts(), [1; 8]);
    let second = rpc.call("connect", json!({"dev": "fe1", "peer": "fe0"}));
    assert_ne!(second["cookie"], made["cookie"]);
    let gone = rpc.call("disconnect", json!({"dev": "fe1", "qpn": made["remote"]["qpn"]}));
    assert_eq!(gone["destroyed"], 8);
    assert_eq!(pair.counts(), [1, 0, 1, 1, 1, 0, 1, 1], "the other connection stays");
    assert_eq!(rpc.refused("disconnect", json!({"dev": "fe1", "qpn": made["remote"]["qpn"]}))["code"], -2);
    rpc.call("disconnect", json!({"dev": "fe0", "qpn": second["remote"]["qpn"]}));
    assert_eq!(pair.counts(), [0; 8]);
}

#[test]
fn a_refused_step_undoes_all_and_is_named_with_its_appliance() {
    let pair = pair("[limits]\nmax_qp = 1\n", 1500);
    let mut rpc = pair.rpc();
    rpc.call("connect", json!({"dev": "fe0", "peer": "fe1"}));
    let before = pair.counts();
    let error = rpc.refused("connect", json!({"dev": "fe0", "peer": "fe1", "mr_bytes": 4096}));
    assert!(text(&error).starts_with("connect: create qp on fe1: "), "{error}");
    assert_eq!(error["data"]["code"], "exhausted", "{error}");
    assert_eq!(pair.counts(), before, "nothing is left on either side");

    let error = rpc.refused("connect", json!({"dev": "fe0", "peer": "fe1", "path_mtu": 4096}));
    assert!(text(&error).contains("largest 1024"), "{error}");
    let error = rpc.refused("connect", json!({"dev": "fe0", "peer": "fe1", "dgid": "198.51.100.1"}));
    assert!(text(&error).contains("resolve path on fe0"), "{error}");
    let error = rpc.refused("connect", json!({"dev": "fe0", "peer": "fe1", "worker": 9}));
    assert!(text(&error).contains("create cq on fe0"), "{error}");
    let error = rpc.refused("connect", json!({"dev": "fe0", "peer": "fe1", "mr_bytes": 1u64 << 40}));
    assert!(text(&error).contains("create mr on fe0"), "{error}");
    assert_eq!(pair.counts(), before);
}

#[test]
fn measurements_of_every_kind_check_their_data_and_leave_nothing() {
    let pair = pair("", 9000);
    let mut rpc = pair.rpc();
    for (op, kind, size) in [
        ("send", "lat", 64),
        ("write", "lat", 4096),
        ("read", "lat", 9000),
        ("send", "bw", 4096),
        ("write", "bw", 65_536),
        ("read", "bw", 1),
    ] {
        let mut params = measure(op, kind, size, 200);
        params["depth"] = json!(16);
        let result = rpc.call("perf_run", params);
        assert_eq!(result["iterations"], 200, "{op} {kind}: {result}");
        match kind {
            "lat" => {
                assert_eq!(result["rtt"]["samples"], 200);
                assert!(result["rtt"]["p50_ns"].as_u64().is_some_and(|ns| ns > 0), "{result}");
            }
            _ => assert!(result["gbytes_per_s"].as_f64().is_some_and(|r| r > 0.0), "{result}"),
        }
        assert_eq!(pair.counts(), [0; 8], "{op} {kind}");
    }
    let error = rpc.refused("perf_run", measure("write", "lat", 0, 10));
    assert!(text(&error).starts_with("perf_run: "), "{error}");
    let error = rpc.refused("perf_run", measure("send", "lat", 64, 0));
    assert_eq!(error["data"]["attribute"], "iterations");
    assert_eq!(pair.counts(), [0; 8]);
}

#[test]
fn the_appliances_outlive_control_and_a_new_one_knows_the_connections() {
    let mut pair = pair("", 9000);
    let made = pair.rpc().call("connect", json!({"dev": "fe0", "peer": "fe1"}));
    let mut old = pair.control.take().expect("control");
    old.signal(Signal::KILL);
    old.wait();
    pair.control = Some(control(pair.dir.path()));
    pair.wait_active();
    let mut rpc = pair.rpc();
    let listed = qps(&mut rpc, "fe0");
    assert_eq!(listed.len(), 1);
    let owner = listed[0]["owner"].as_str().expect("hex");
    let bytes: Vec<u8> =
        (0..owner.len()).step_by(2).map(|i| u8::from_str_radix(&owner[i..i + 2], 16).expect("hex")).collect();
    let blob: Value = serde_json::from_slice(&bytes).expect("our blob");
    assert_eq!(
        (&blob["peer"], &blob["verb"], &blob["comm"]),
        (&json!("fe1"), &json!("connect"), &json!("ferroce-ctld"))
    );
    assert_eq!(listed[0]["cookie"], made["cookie"]);

    // They still carry data, and can still be taken down from either side.
    let mut params = measure("write", "bw", 4096, 500);
    params["qpn"] = made["local"]["qpn"].clone();
    params["depth"] = json!(16);
    assert_eq!(rpc.call("perf_run", params.clone())["iterations"], 500);
    assert_eq!(pair.counts(), [1, 0, 1, 1, 1, 0, 1, 1], "the pair stays, its regions go");
    rpc.call("disconnect", json!({"dev": "fe1", "qpn": made["remote"]["qpn"]}));
    assert_eq!(pair.counts(), [0; 8]);
    assert_eq!(rpc.refused("perf_run", params)["code"], -2, "the pair is gone");
}

#[test]
fn an_appliance_that_dies_in_a_measurement_is_named_and_the_other_side_is_cleaned() {
    let pair = pair("", 9000);
    let mut rpc = pair.rpc();
    let params = measure("send", "lat", 64, 2_000_000_000);
    let request = json!({"jsonrpc": "2.0", "id": 99, "method": "perf_run", "params": params});
    rpc.send(request.to_string().as_bytes());
    until("the measurement to run", || {
        let status = pair.rpc().call("status", json!({"dev": "fe1"}));
        (status["devs"][0]["status"]["perf_running"] == 1).then_some(())
    });
    pair.fe1.signal(Signal::KILL);
    let begin = Instant::now();
    let answer = rpc.line().expect("an answer");
    assert!(begin.elapsed() < Duration::from_secs(20), "bounded");
    let error = text(&answer["error"]);
    assert!(error.contains("fe1"), "{answer}");
    let list = pair.rpc().call("dev_list", json!({}));
    assert_eq!((&list["devs"][0]["connected"], &list["devs"][1]["connected"]), (&json!(true), &json!(false)));
    assert_eq!(
        pair.rpc().call("resource_show", json!({"dev": "fe0", "kind": "pd"}))["devs"][0].get("pd"),
        None
    );
    assert_eq!(qps(&mut pair.rpc(), "fe0").len(), 0);
}

#[test]
fn a_stop_in_a_measurement_is_prompt_and_leaves_nothing_in_the_appliances() {
    let mut pair = pair("", 9000);
    let mut rpc = pair.rpc();
    let request = json!({"jsonrpc": "2.0", "id": 1, "method": "perf_run", "params": measure("send", "bw", 4096, 2_000_000_000)});
    rpc.send(request.to_string().as_bytes());
    until("the measurement to run", || {
        let status = pair.rpc().call("status", json!({"dev": "fe1"}));
        (status["devs"][0]["status"]["perf_running"] == 1).then_some(())
    });
    // Its client goes away first: the measurement is not its hostage.
    drop(rpc);
    let mut old = pair.control.take().expect("control");
    let begin = Instant::now();
    assert!(old.terminate().success());
    assert!(begin.elapsed() < Duration::from_secs(12), "bounded");
    pair.control = Some(control(pair.dir.path()));
    pair.wait_active();
    assert_eq!(pair.counts(), [0; 8]);
}

fn start_long(pair: &Pair, op: &str) -> Rpc {
    let mut rpc = pair.rpc();
    let request = json!({"jsonrpc": "2.0", "id": 1, "method": "perf_run", "params": measure(op, "bw", 4096, 2_000_000_000)});
    rpc.send(request.to_string().as_bytes());
    until("the measurement to run", || {
        let status = pair.rpc().call("status", json!({"dev": "fe0"}));
        (status["devs"][0]["status"]["perf_running"] == 1).then_some(())
    });
    rpc
}

/// A measurement ends with its call; a control process that was killed could not see to it, so the next one does. What
/// is connected for its own sake stays.
#[test]
fn the_measurement_of_a_killed_control_process_is_taken_away_by_the_next() {
    let mut pair = pair("", 9000);
    let kept = pair.rpc().call("connect", json!({"dev": "fe0", "peer": "fe1", "mr_bytes": 4096}));
    // A server of writes is passive: it would never end by itself.
    let _waits = start_long(&pair, "write");
    let mut old = pair.control.take().expect("control");
    old.signal(Signal::KILL);
    old.wait();
    pair.control = Some(control(pair.dir.path()));
    pair.wait_active();
    until("what was left to be gone", || (pair.counts() == [1; 8]).then_some(()));
    let left = qps(&mut pair.rpc(), "fe0");
    assert_eq!(left[0]["qpn"], kept["local"]["qpn"], "{left:?}");
    let status = pair.rpc().call("status", json!({}));
    assert!((0..2).all(|i| status["devs"][i]["status"]["perf_running"] == 0), "{status}");
    pair.rpc().call("perf_run", measure("write", "lat", 64, 100));
}

/// An appliance that stands still while a measurement is undone is cleaned when it goes on.
#[test]
fn what_could_not_be_undone_is_taken_away_when_the_appliance_answers_again() {
    let pair = pair("", 9000);
    let mut rpc = start_long(&pair, "write");
    pair.fe1.signal(Signal::STOP);
    let answer = rpc.line().expect("an answer");
    pair.fe1.signal(Signal::CONT);
    assert!(text(&answer["error"]).contains("left behind"), "{answer}");
    until("what was left to be gone", || (pair.counts() == [0; 8]).then_some(()));
}

#[test]
fn a_measurement_ends_when_its_caller_goes() {
    let pair = pair("", 9000);
    drop(start_long(&pair, "send"));
    until("nothing to be left", || (pair.counts() == [0; 8]).then_some(()));
}

/// The error of a measurement names the peer and the last PSN.
#[test]
fn a_peer_that_stops_answering_is_named_with_the_last_psn() {
    let pair = pair("[port.fault]\nseed = 1\nloss = 1.0\n", 9000);
    let error = pair.rpc().refused("perf_run", measure("send", "lat", 64, 10));
    let said = text(&error);
    for part in ["RetryExcErr", "peer 192.0.2.2 qpn 0x", "last PSN sent 0x", "oldest not acknowledged 0x"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_eq!(pair.counts(), [0; 8]);
}

#[test]
fn a_deadline_ends_a_measurement_and_says_how_far_it_came() {
    let pair = pair("", 9000);
    let mut params = measure("send", "lat", 64, 2_000_000_000);
    params["deadline_ms"] = json!(300);
    let error = pair.rpc().refused("perf_run", params);
    assert_eq!(error["code"], -110, "{error}");
    assert!(text(&error).contains("of 2000000010 messages"), "{error}");
    assert_eq!(pair.counts(), [0; 8]);
}

#[test]
fn single_objects_are_made_used_and_destroyed_by_hand() {
    let pair = pair("", 1500);
    let mut rpc = pair.rpc();
    let mut ends = Vec::new();
    for dev in ["fe0", "fe1"] {
        let pd = rpc.call("pd_create", json!({"dev": dev}))["pd"].clone();
        let cq = rpc.call("cq_create", json!({"dev": dev, "cqe": 64}))["cq"].clone();
        let mr = rpc
            .call("mr_create", json!({"dev": dev, "pd": pd, "bytes": 4096, "access": {"local_write": true}}));
        let qp = rpc
            .call("qp_create", json!({"dev": dev, "qp_type": "RC", "pd": pd, "send_cq": cq, "recv_cq": cq}));
        ends.push((pd, cq, mr["lkey"].clone(), qp["qpn"].clone()));
    }
    for (dev, own, peer, address) in [("fe0", 0, 1, "192.0.2.2"), ("fe1", 1, 0, "192.0.2.1")] {
        let qpn = &ends[own].3;
        let modify = |rpc: &mut Rpc, modify: Value| {
            rpc.call("qp_modify", json!({"dev": dev, "qpn": qpn, "modify": modify}))["state"].clone()
        };
        let early = rpc.refused("qp_modify", json!({"dev": dev, "qpn": qpn, "modify": "sqd"}));
        assert_eq!(early["code"], -1, "wrong state: {early}");
        let init = json!({"init": {"pkey": 65535, "access": {"remote_write": true}, "qkey": 0}});
        assert_eq!(modify(&mut rpc, init), "INIT");
        let av = rpc.call("path_resolve", json!({"dev": dev, "path": {"dgid": address}}));
        let rtr = json!({"rtr": {"av": av, "class": 0, "path_mtu": 1024, "dest_qpn": ends[peer].3, "rq_psn": 7,
            "max_dest_rd_atomic": 1, "min_rnr_timer": 12}});
        assert_eq!(modify(&mut rpc, rtr), "RTR");
        let rts =
            json!({"rts": {"sq_psn": 7, "timeout": 14, "retry_cnt": 7, "rnr_retry": 6, "max_rd_atomic": 1}});
        assert_eq!(modify(&mut rpc, rts), "RTS");
    }
    let error = rpc.refused("pd_destroy", json!({"dev": "fe0", "pd": ends[0].0}));
    assert_eq!(error["data"]["code"], "busy", "{error}");
    let error = rpc.refused("cq_destroy", json!({"dev": "fe0", "cq": ends[0].1}));
    assert_eq!(error["data"]["code"], "busy", "{error}");
    let error = rpc.refused("disconnect", json!({"dev": "fe0", "qpn": ends[0].3}));
    assert!(text(&error).contains("qp destroy"), "not one that connect made: {error}");
    for (dev, (pd, cq, lkey, qpn)) in ["fe0", "fe1"].into_iter().zip(&ends) {
        rpc.call("qp_destroy", json!({"dev": dev, "qpn": qpn}));
        rpc.call("cq_destroy", json!({"dev": dev, "cq": cq}));
        rpc.call("mr_destroy", json!({"dev": dev, "lkey": lkey}));
        rpc.call("pd_destroy", json!({"dev": dev, "pd": pd}));
        assert_eq!(rpc.refused("pd_destroy", json!({"dev": dev, "pd": pd}))["data"]["code"], "not_found");
    }
    assert_eq!(pair.counts(), [0; 8]);
}

#[test]
fn long_listings_come_in_pages_and_keys_only_on_the_control_socket() {
    let pair = pair("[limits]\nmax_pd = 2000\n", 1500);
    let mut rpc = pair.rpc();
    let one = json!({"jsonrpc": "2.0", "id": 1, "method": "pd_create", "params": {"dev": "fe1"}});
    for _ in 0..22 {
        rpc.send(Value::from(vec![one.clone(); 50]).to_string().as_bytes());
        let answers = rpc.line().expect("answers");
        assert!(answers.as_array().is_some_and(|a| a.iter().all(|a| a["error"].is_null())), "{answers}");
    }
    let mut seen = std::collections::BTreeSet::new();
    let mut pages = 0;
    let mut cursor = Value::Null;
    loop {
        let mut params = json!({"kind": "pd"});
        if !cursor.is_null() {
            params["cursor"] = cursor;
        }
        let mut page = rpc.call("resource_show", params);
        pages += 1;
        for dev in page["devs"].as_array().expect("devices") {
            for entry in dev.get("pd").and_then(Value::as_array).into_iter().flatten() {
                assert!(seen.insert(entry["pd"].as_u64().expect("a handle")), "twice: {entry}");
            }
        }
        cursor = page["next"].take();
        if cursor.is_null() {
            break;
        }
    }
    assert_eq!(seen.len(), 1100);
    assert!(pages > 1, "the cursor was used");

    let pd = seen.first().expect("one");
    rpc.call("mr_create", json!({"dev": "fe1", "pd": pd, "bytes": 4096}));
    let shown = |rpc: &mut Rpc| {
        rpc.call("resource_show", json!({"dev": "fe1", "kind": "mr"}))["devs"][0]["mr"][0].clone()
    };
    assert_ne!(shown(&mut rpc)["rkey"], 0);
    let mut reading = Rpc::open(&pair.dir.path().join("ro.sock"));
    let hidden = shown(&mut reading);
    assert_eq!((&hidden["rkey"], &hidden["lkey"], &hidden["iova"]), (&json!(0), &json!(0), &json!(0)));
    assert_eq!(hidden["bytes"], 4096);
}

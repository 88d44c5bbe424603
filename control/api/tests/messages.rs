//! Every message goes through JSON and back unchanged, unknown keys and messages that are too long are refused.

use ferroce_api::appliance::*;
use ferroce_api::ids::{MAX_OWNER_BYTES, Owner};
use ferroce_api::{ApiError, Code, rpc};
use ferroce_wire::{Gid, MacAddr, PathMtu, Psn, Qpn, Rkey};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

fn gid(text: &str) -> Gid {
    ferroce_api::ids::parse_gid(text).unwrap()
}

fn vector() -> AddressVector {
    AddressVector {
        sgid: gid("192.0.2.1"),
        dgid: gid("fd00::2"),
        smac: MacAddr([2, 0, 0, 0, 0, 1]),
        dmac: MacAddr([2, 0, 0, 0, 0, 2]),
        vlan: Some(Vlan { pcp: 3, dei: true, vid: 4095 }),
        traffic_class: 106,
        flow_label: 0xfffff,
        hop_limit: 64,
        sl: 7,
        udp_src: 0xffff,
    }
}

fn rtr() -> RtrSpec {
    RtrSpec {
        av: vector(),
        class: 1,
        path_mtu: PathMtu::Mtu4096,
        dest_qpn: Qpn::new(0xff_ffff),
        rq_psn: Psn::new(0xff_ffff),
        max_dest_rd_atomic: 128,
        min_rnr_timer: 31,
    }
}

fn init() -> InitSpec {
    InitSpec { pkey: 0xffff, access: Access::ALL_RW, qkey: u32::MAX }
}

fn rts() -> RtsSpec {
    RtsSpec { sq_psn: Psn::new(0xff_ffff), timeout: 31, retry_cnt: 7, rnr_retry: 7, max_rd_atomic: 128 }
}

fn qp_spec(owner_bytes: usize) -> QpSpec {
    QpSpec {
        qp_type: QpType::Rc,
        pd: PdHandle(u32::MAX),
        send_cq: CqHandle(u32::MAX),
        recv_cq: CqHandle(u32::MAX),
        cap: QpCap {
            max_send_wr: u32::MAX,
            max_recv_wr: u32::MAX,
            max_send_sge: u32::MAX,
            max_recv_sge: u32::MAX,
            max_inline_data: u32::MAX,
        },
        sq_sig_all: false,
        owner: Owner::new(vec![0xa5; owner_bytes]).unwrap(),
        cookie: u64::MAX,
    }
}

fn qp_entry(owner_bytes: usize) -> QpEntry {
    let spec = qp_spec(owner_bytes);
    QpEntry {
        qpn: Qpn::new(0xff_ffff),
        qp_type: spec.qp_type,
        state: QpState::Reset,
        pd: spec.pd,
        send_cq: spec.send_cq,
        recv_cq: spec.recv_cq,
        cap: spec.cap,
        sq_sig_all: false,
        init: Some(init()),
        rtr: Some(rtr()),
        rts: Some(rts()),
        sq_psn: Psn::new(0xff_ffff),
        rq_psn: Psn::new(0xff_ffff),
        una_psn: Psn::new(0xff_ffff),
        worker: 255,
        owner: spec.owner,
        cookie: u64::MAX,
    }
}

fn perf_spec() -> PerfSpec {
    PerfSpec {
        remote: Some(RemoteBuffer { addr: u64::MAX, rkey: Rkey(u32::MAX), bytes: 1 << 40 }),
        iterations: u64::MAX,
        warmup: 10,
        duration_ms: Some(5),
        check_data: true,
        inline_bytes: 64,
        deadline_ms: 600_000,
        ..PerfSpec::new(PerfOp::Write, PerfKind::Bw, PerfRole::Client, Qpn::new(17), Lkey(9), 64)
    }
}

fn commands() -> Vec<Command> {
    let qpn = Qpn::new(0x12_3456);
    let mut out = vec![
        Command::QueryDevice,
        Command::QueryPort,
        Command::ListGids,
        Command::AllocPd { cookie: u64::MAX },
        Command::DeallocPd { pd: PdHandle(1) },
        Command::AllocMr { pd: PdHandle(1), bytes: u64::MAX, access: Access::ALL_RW, cookie: 1 },
        Command::DeregMr { lkey: Lkey(3) },
        Command::CreateCq { worker: 1, cqe: 4096, cookie: 5 },
        Command::DestroyCq { cq: CqHandle(0x0100_0001) },
        Command::CreateQp(Box::new(qp_spec(MAX_OWNER_BYTES))),
        Command::QueryQp { qpn },
        Command::DestroyQp { qpn },
        Command::ResolvePath(PathQuery { dgid: gid("192.0.2.2"), sgid: None, traffic_class: 0 }),
        Command::ResolvePath(PathQuery {
            dgid: gid("fd00::2"),
            sgid: Some(gid("fd00::1")),
            traffic_class: 255,
        }),
        Command::PerfStart(Box::new(perf_spec())),
        Command::PerfStart(Box::new(PerfSpec { remote: None, role: PerfRole::Server, ..perf_spec() })),
        Command::PerfStatus { id: PerfId(1) },
        Command::PerfStop { id: PerfId(u64::MAX) },
        Command::PerfStopOn { lkey: Lkey(u32::MAX) },
        Command::Status,
        Command::Stats,
        Command::Subscribe,
        Command::Shutdown { deadline_ms: 60_000 },
    ];
    for kind in [ListKind::Pd, ListKind::Mr, ListKind::Cq, ListKind::Qp] {
        out.push(Command::List { kind, cursor: u64::MAX, limit: MAX_PAGE, cookie: None });
    }
    for modify in [
        Modify::Init(init()),
        Modify::Rtr(rtr()),
        Modify::Rts(rts()),
        Modify::Sqd,
        Modify::SqdToRts,
        Modify::Err,
        Modify::Reset,
    ] {
        out.push(Command::ModifyQp { qpn, modify });
    }
    out
}

fn counter() -> Counter {
    Counter { name: "rx_good_packets".into(), value: u64::MAX }
}

fn fallback() -> Fallback {
    Fallback { wanted: "2M".into(), got: "normal".into(), reason: "none free".into(), hint: "reserve".into() }
}

fn status() -> Status {
    Status {
        dev: "f0".into(),
        program: "0.1.0".into(),
        pid: 1,
        instance: u64::MAX,
        uptime_ms: 5,
        node_guid: 7,
        icrc: IcrcMode::Off,
        ports: vec![PortStatus {
            port: 1,
            kind: "shm".into(),
            attached_to: "lab".into(),
            mode: "shared memory".into(),
            link_up: true,
            problem: Some("the peer is gone".into()),
            mac: MacAddr([2, 0, 0, 0, 0, 1]),
            mtu: 4352,
            queues: 1,
            rx_queues_owned: 4,
            rx_queues_present: 4,
            caps: vec!["can_sleep".into()],
            addresses: vec!["192.0.2.1/24".into()],
            fallbacks: vec![fallback()],
            counters: vec![counter()],
        }],
        memory: MemoryStatus {
            bytes: 1,
            used_bytes: 0,
            pages: "4 KiB pages".into(),
            fallback: Some(fallback()),
        },
        workers: vec![WorkerStatus {
            worker: 0,
            core: Some(1),
            idle: "adaptive".into(),
            passes: 1,
            busy_ns: 3,
            idle_ns: 4,
            sleeps: 5,
            stalls: 7,
            forwards: 6,
        }],
        fallbacks: vec![fallback()],
        drops: vec![counter()],
        objects: vec![counter()],
        perf_running: 1,
        clients: 2,
    }
}

fn responses() -> Vec<Response> {
    let percentiles = Percentiles { samples: 3, mean_ns: 1.5, stdev_ns: 0.25, ..Percentiles::default() };
    let report = PerfReport {
        id: PerfId(1),
        state: PerfState::Failed,
        error: Some(ApiError::new(Code::Timeout, "a", "b", "c").hint("d")),
        iterations: 1,
        bytes: 2,
        elapsed_ns: 3,
        rtt: Some(percentiles),
        gbytes_per_s: 0.5,
        peak_gbytes_per_s: Some(0.75),
        msgs_per_s: 1e6,
    };
    let device = DeviceInfo {
        node_guid: u64::MAX,
        workers: 2,
        max_qp: 1,
        max_qp_wr: 2,
        max_sge: 3,
        max_inline: 4,
        max_cq: 5,
        max_cqe: 6,
        max_mr: 7,
        max_mr_size: u64::MAX,
        max_pd: 8,
        max_qp_rd_atom: 128,
        max_qp_init_rd_atom: 128,
    };
    let port = PortInfo {
        active: true,
        max_mtu: PathMtu::Mtu4096,
        active_mtu: PathMtu::Mtu256,
        netdev_mtu: 352,
        mac: MacAddr([2, 0, 0, 0, 0, 1]),
        gid_tbl_len: 2,
    };
    let mr = MrEntry {
        lkey: Lkey(1),
        rkey: Rkey(2),
        pd: PdHandle(3),
        iova: u64::MAX,
        bytes: 4,
        access: Access::from_bits(31),
        cookie: 5,
    };
    vec![
        Response::Done,
        Response::Device(device),
        Response::Port(port),
        Response::Gids(vec![GidEntry { index: 0, gid: gid("192.0.2.1") }]),
        Response::Pd { pd: PdHandle(1) },
        Response::Mr { lkey: Lkey(1), rkey: Rkey(2), iova: 3, bytes: 4 },
        Response::Cq { cq: CqHandle(1) },
        Response::Qp { qpn: Qpn::new(17), worker: 1 },
        Response::QpInfo(Box::new(qp_entry(3))),
        Response::QpInfo(Box::new(QpEntry { init: None, rtr: None, rts: None, ..qp_entry(0) })),
        Response::Pds(Page {
            entries: vec![PdEntry { pd: PdHandle(1), users: 2, cookie: 3 }],
            next: Some(u64::MAX),
        }),
        Response::Mrs(Page { entries: vec![mr], next: None }),
        Response::Cqs(Page {
            entries: vec![CqEntry { cq: CqHandle(1), worker: 0, cqe: 2, users: 3, cookie: 4 }],
            next: None,
        }),
        Response::Qps(Page { entries: vec![qp_entry(MAX_OWNER_BYTES)], next: Some(1) }),
        Response::Path(AddressVector { vlan: None, ..vector() }),
        Response::PerfStarted { id: PerfId(3) },
        Response::Perf(Box::new(report)),
        Response::Status(Box::new(status())),
        Response::Stats(Box::new(Stats {
            transport: vec![counter()],
            drops: vec![counter()],
            port: vec![],
            control: vec![counter()],
        })),
    ]
}

fn events() -> Vec<EventBody> {
    let (qpn, cookie) = (Qpn::new(9), u64::MAX);
    vec![
        EventBody::QpFatal { qpn, cookie, detail: "LocLenErr, path MTU 4096".into() },
        EventBody::QpReqErr { qpn, cookie, detail: String::new() },
        EventBody::QpAccessErr { qpn, cookie, detail: String::new() },
        EventBody::PortMtu { port: 1, mtu: 1500, qps_too_long: 2 },
        EventBody::CommEst { qpn, cookie },
        EventBody::SqDrained { qpn, cookie },
        EventBody::CqErr { cq: CqHandle(1) },
        EventBody::PortActive { port: 1 },
        EventBody::PortErr { port: 1 },
        EventBody::GidAdded { gid: gid("fd00::1") },
        EventBody::GidRemoved { gid: gid("fd00::1") },
        EventBody::PerfEnded { id: PerfId(1) },
        EventBody::Stopping,
        EventBody::Lost { count: 3 },
    ]
}

fn client_messages() -> Vec<FromClient> {
    let mut out = vec![FromClient::Hello(Hello::new(Role::Control, "ctld"))];
    out.extend(commands().into_iter().map(|c| FromClient::Request(Request { id: u64::MAX, batch: vec![c] })));
    out.push(FromClient::Request(Request { id: 0, batch: commands() }));
    out
}

fn appliance_messages() -> Vec<FromAppliance> {
    let hello = HelloReply {
        version: VERSION,
        program: "0.1.0".into(),
        dev: "f0".into(),
        pid: 3,
        instance: u64::MAX,
        workers: 2,
        max_message_bytes: 131_072,
    };
    let error = ApiError::new(Code::Invalid, "path_mtu", "4096", "at most 1024").hint("raise the MTU");
    let mut out = vec![FromAppliance::Hello(hello), FromAppliance::Bye(Bye { error: error.clone() })];
    let one = |o: Outcome| FromAppliance::Reply(Reply { id: 1, results: vec![o] });
    out.extend(responses().into_iter().map(|r| one(Outcome::Ok(r))));
    out.push(one(Outcome::Err(error)));
    out.extend(events().into_iter().map(|event| FromAppliance::Event(Event { seq: 1, event })));
    out
}

#[test]
fn all_messages_round_trip() {
    for message in client_messages() {
        let bytes = encode(&message).unwrap();
        assert_eq!(decode_client(&bytes).unwrap(), message, "{}", String::from_utf8_lossy(&bytes));
    }
    for message in appliance_messages() {
        let bytes = encode(&message).unwrap();
        assert_eq!(decode::<FromAppliance>(&bytes).unwrap(), message, "{}", String::from_utf8_lossy(&bytes));
    }
}

/// All JSON pointers to objects inside a value.
fn objects(value: &Value, at: String, out: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            out.push(at.clone());
            for (key, value) in map {
                objects(value, format!("{at}/{key}"), out);
            }
        }
        Value::Array(items) => {
            for (i, value) in items.iter().enumerate() {
                objects(value, format!("{at}/{i}"), out);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Plants an unknown key in every object of the message, one at a time, and demands a refusal that names it.
fn refuses_unknown_keys<T: DeserializeOwned>(message: &impl serde::Serialize) {
    let value = serde_json::to_value(message).unwrap();
    let mut places = Vec::new();
    objects(&value, String::new(), &mut places);
    for place in places {
        // The two hellos and the bye tolerate them by design, see the module's documentation.
        if place.starts_with("/hello") || place == "/bye" {
            continue;
        }
        let mut changed = value.clone();
        changed.pointer_mut(&place).unwrap().as_object_mut().unwrap().insert("surprise".into(), json!(1));
        let bytes = serde_json::to_vec(&changed).unwrap();
        match decode::<T>(&bytes) {
            Ok(_) => panic!("taken with an unknown key at {place}: {changed}"),
            Err(error) => assert_eq!(error.code, Code::Malformed),
        }
    }
}

#[test]
fn unknown_keys_are_refused_everywhere() {
    for message in client_messages() {
        refuses_unknown_keys::<FromClient>(&message);
    }
    for message in appliance_messages() {
        refuses_unknown_keys::<FromAppliance>(&message);
    }
}

#[test]
fn hellos_of_other_versions_can_be_read() {
    let future = br#"{"hello":{"version":9,"role":"control","name":"x","colour":"blue"}}"#;
    let FromClient::Hello(hello) = decode_client(future).unwrap() else { panic!("not a hello") };
    assert_eq!(hello.version, 9);
    let error = version_error(9);
    assert_eq!(error.code, Code::Version);
    let text = error.to_string();
    assert!(text.contains("9 by the client") && text.contains("1 by the appliance"), "{text}");
    assert!(text.contains("upgrade the appliance"), "{text}");
    assert!(version_error(0).to_string().contains("upgrade the client"));
}

/// The largest batch of the largest command and the largest batch of answers within the reserve fit.
#[test]
fn the_largest_batch_fits_and_a_larger_one_is_refused() {
    let largest = Command::CreateQp(Box::new(qp_spec(MAX_OWNER_BYTES)));
    let batch = vec![largest; MAX_BATCH];
    let bytes = encode(&FromClient::Request(Request { id: u64::MAX, batch: batch.clone() })).unwrap();
    assert!(decode_client(&bytes).is_ok());

    let over = Request { id: 1, batch: vec![Command::Status; MAX_BATCH + 1] };
    let error = decode_client(&serde_json::to_vec(&FromClient::Request(over)).unwrap()).unwrap_err();
    assert_eq!((error.code, error.attribute.as_str()), (Code::TooBig, "batch"));

    let small = [
        Response::Done,
        responses().swap_remove(1),
        responses().swap_remove(2),
        Response::Mr { lkey: Lkey(u32::MAX), rkey: Rkey(u32::MAX), iova: u64::MAX, bytes: u64::MAX },
        Response::Qp { qpn: Qpn::new(0xff_ffff), worker: 255 },
        Response::Path(vector()),
    ];
    for response in small {
        let bytes = serde_json::to_vec(&Outcome::Ok(response)).unwrap().len();
        assert!(bytes < RESULT_RESERVE_BYTES, "{bytes}");
    }
    const { assert!(MAX_BATCH * RESULT_RESERVE_BYTES < MAX_MESSAGE_BYTES) };
}

#[test]
fn messages_over_the_limit_are_refused_both_ways() {
    let entries = vec![qp_entry(MAX_OWNER_BYTES); MAX_PAGE as usize];
    let page = Outcome::Ok(Response::Qps(Page { entries, next: None }));
    let error = encode(&FromAppliance::Reply(Reply { id: 1, results: vec![page] })).unwrap_err();
    assert_eq!(error.code, Code::TooBig);

    let mut long = br#"{"hello":{"version":1,"role":"control","name":""#.to_vec();
    long.resize(MAX_MESSAGE_BYTES + 1, b'x');
    assert_eq!(decode_client(&long).unwrap_err().code, Code::TooBig);
}

#[test]
fn numbers_that_do_not_fit_are_refused() {
    let cases = [
        r#"{"request":{"id":1,"batch":[{"query_qp":{"qpn":16777216}}]}}"#,
        r#"{"request":{"id":1,"batch":[{"query_qp":{"qpn":-1}}]}}"#,
        r#"{"request":{"id":1,"batch":[{"resolve_path":{"dgid":"nonsense"}}]}}"#,
        r#"{"request":{"id":1,"batch":[{"dealloc_pd":{"pd":4294967296}}]}}"#,
        r#"{"request":{"id":1,"batch":[{"dealloc_pd":{}}]}}"#,
        r#"{"request":{"id":1,"batch":["format_disk"]}}"#,
        r#"{"request":{"id":1}}"#,
        r#"{"goodbye":{}}"#,
        "",
        "null",
        "[",
        "\u{0}",
    ];
    for text in cases {
        let error = decode_client(text.as_bytes()).expect_err(text);
        assert_eq!(error.code, Code::Malformed, "{text}");
    }
    let deep = "[".repeat(100_000);
    assert_eq!(decode_client(deep.as_bytes()).unwrap_err().code, Code::Malformed);
}

/// The fuzzer's seeds are real messages, so that it starts behind the first checks.
#[test]
fn seeds_of_the_fuzzer_are_taken() {
    let folder =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../dataplane/fuzz/corpus/ctl_request");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        match path.file_name().and_then(|name| name.to_str()) {
            Some("hello" | "objects" | "connect" | "rest") => {
                let message =
                    decode_client(&bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                assert_eq!(decode_client(&encode(&message).unwrap()).unwrap(), message);
            }
            Some("reply" | "event" | "float") => {
                let message: FromAppliance =
                    decode(&bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                assert_eq!(decode::<FromAppliance>(&encode(&message).unwrap()).unwrap(), message);
            }
            // What a fuzzer found once: it only must not panic.
            _ => {
                let _ = (decode_client(&bytes), decode::<FromAppliance>(&bytes));
            }
        }
        seen += 1;
    }
    assert!(seen >= 6, "{seen}");
}

/// A short specification is enough: the rest has perftest's defaults.
#[test]
fn perf_specs_have_defaults() {
    let text = r#"{"op":"send","kind":"bw","role":"server","qpn":3,"lkey":4,"size_bytes":4096}"#;
    let spec: PerfSpec = serde_json::from_str(text).unwrap();
    let new = PerfSpec::new(PerfOp::Send, PerfKind::Bw, PerfRole::Server, Qpn::new(3), Lkey(4), 4096);
    assert_eq!(spec, PerfSpec { depth: new.depth, ..new.clone() });
    assert_eq!((new.depth, new.rx_depth, new.cq_mod), (128, 512, 100));
    assert_eq!(PerfSpec { kind: PerfKind::Lat, ..new.clone() }.region_bytes(), 8192);
    assert_eq!(PerfSpec { size_bytes: 1, ..new }.region_bytes(), 128);
}

#[test]
fn rpc_round_trips() {
    let request = rpc::Request {
        jsonrpc: rpc::Version::V2,
        method: rpc::RESOURCE_SHOW.into(),
        params: serde_json::to_value(rpc::ResourceParams { dev: None, kind: ListKind::Qp, cursor: None })
            .unwrap(),
        id: Some(rpc::Id::Number(1)),
    };
    let text = serde_json::to_string(&request).unwrap();
    assert_eq!(text, r#"{"jsonrpc":"2.0","method":"resource_show","params":{"kind":"qp"},"id":1}"#);
    assert_eq!(serde_json::from_str::<rpc::Request>(&text).unwrap(), request);
    for bad in [
        r#"{"jsonrpc":"1.0","method":"status"}"#,
        r#"{"method":"status"}"#,
        r#"{"jsonrpc":"2.0","method":"status","surprise":1}"#,
    ] {
        assert!(serde_json::from_str::<rpc::Request>(bad).is_err(), "{bad}");
    }

    let error = ApiError::new(Code::Busy, "pd", "0x1", "no users").hint("destroy 2 regions first");
    let response = rpc::Response::new(Some(rpc::Id::Text("a".into())), Err(error.clone().into()));
    let back: rpc::Response = serde_json::from_str(&serde_json::to_string(&response).unwrap()).unwrap();
    assert_eq!(back, response);
    let refused = back.into_result().unwrap_err();
    assert_eq!((refused.code, ApiError::from(refused)), (-16, error));

    let done = rpc::Response::new(None, Ok(Value::Null));
    let text = serde_json::to_string(&done).unwrap();
    assert!(serde_json::from_str::<rpc::Response>(&text).unwrap().into_result().is_ok());

    let params: rpc::PerfRunParams = serde_json::from_value(json!({
        "client": "f0", "server": "f1", "op": "write", "kind": "lat", "size_bytes": 64, "iterations": 10
    }))
    .unwrap();
    assert_eq!((params.depth, params.deadline_ms, params.warmup, params.path_mtu), (64, 60_000, 0, None));
}

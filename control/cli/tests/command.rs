//! The command as scripts see it: exit statuses, messages, JSON; against real processes.

use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::Value;

const WAIT: Duration = Duration::from_secs(20);

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ferroce-cli-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("scratch folder");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A program of the workspace beside the one under test.
fn program(name: &str) -> PathBuf {
    static BUILT: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let path = Path::new(env!("CARGO_BIN_EXE_ferroce")).with_file_name(name);
    let mut built = BUILT.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if !built.iter().any(|b| b == name) {
        let mut command = Command::new(env!("CARGO"));
        command
            .args(["build", "--quiet", "--workspace", "--bin", name])
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        if path.parent().is_some_and(|dir| dir.ends_with("release")) {
            command.arg("--release");
        }
        assert!(command.status().expect("cargo").success(), "cargo build --bin {name}");
        built.push(name.to_owned());
    }
    path
}

fn start(name: &str, args: &[&str], log: &Path) -> Process {
    let log = fs::OpenOptions::new().create(true).append(true).open(log).expect("log");
    let child =
        Command::new(program(name)).args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();
    Process(child.expect(name))
}

fn until(what: &str, mut ready: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !ready() {
        assert!(begin.elapsed() < WAIT, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn ferroce(dir: &Path, args: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferroce"));
    command.arg("--run-dir").arg(dir).args(args.split_whitespace()).output().expect("the command")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs it, wants success, gives standard output.
fn ok(dir: &Path, args: &str) -> String {
    let output = ferroce(dir, args);
    assert_eq!(output.status.code(), Some(0), "{args}: {}", text(&output.stderr));
    text(&output.stdout)
}

fn json(dir: &Path, args: &str) -> Value {
    serde_json::from_str(&ok(dir, args)).expect(args)
}

/// Runs it, wants this status and these words on standard error.
fn fails(dir: &Path, args: &str, status: i32, part: &str) {
    let output = ferroce(dir, args);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{args}: {error}");
    assert!(error.contains(part), "{args}: {error} lacks {part}");
}

#[test]
fn without_a_control_process_it_says_where_it_looked() {
    let dir = Folder::new("none");
    let socket = dir.0.join("ctl.sock");
    let looked = format!("ferroce-ctld is not running (looked at {})", socket.display());
    for verb in ["status", "dev", "link", "res", "qp", "connect a b", "measure a b", "rpc status"] {
        fails(&dir.0, verb, 3, &looked);
    }
    // What a crash leaves behind is the same.
    drop(UnixListener::bind(&socket).expect("socket"));
    fails(&dir.0, "status", 3, &looked);
    assert!(ok(&dir.0, "version").starts_with("ferroce version "), "its own version needs nobody");
    fs::remove_file(&socket).expect("clean");
    fs::create_dir(&socket).expect("a folder");
    fails(&dir.0, "status", 3, &looked);
}

#[test]
fn a_run_folder_too_long_for_a_socket_says_so() {
    let dir = format!("/tmp/{}", "x".repeat(200));
    let output = ferroce(Path::new(&dir), "status");
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("allowed at most 107 bytes") && error.contains("--run-dir"), "{error}");
}

#[test]
fn wrong_usage_is_status_2() {
    let dir = Folder::new("usage");
    for (args, part) in [
        ("", "Usage"),
        ("nonsense", "unrecognized"),
        ("measure a", "PEER"),
        ("qp show state", "a value is missing"),
        ("qp show nokey 1", "no such key"),
        ("res show cm_id x", "allowed a device"),
        ("connect a b --dgid here", "--dgid"),
        ("rpc status {", "not JSON"),
    ] {
        fails(&dir.0, args, 2, part);
    }
}

#[test]
fn something_else_on_the_socket_is_status_4() {
    for (name, answer) in [
        ("ssh", &b"SSH-2.0-OpenSSH_9.2\r\n"[..]),
        ("rpc", br#"{"jsonrpc":"2.0","error":{"code":-32601,"message":"Method not found"},"id":1}"#),
        ("new", br#"{"jsonrpc":"2.0","result":{"version":"9","protocol":99,"pid":5},"id":1}"#),
    ] {
        let dir = Folder::new(name);
        let listener = UnixListener::bind(dir.0.join("ctl.sock")).expect("socket");
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("accept");
            let mut buf = [0; 4096];
            let _ = std::io::Read::read(&mut stream, &mut buf);
            let _ = std::io::Write::write_all(&mut stream, answer);
            let _ = std::io::Write::write_all(&mut stream, b"\n");
        });
        let part = if name == "new" { "upgrade ferroce" } else { "is not a ferroce-ctld" };
        fails(&dir.0, "status", 4, part);
        server.join().expect("server");
    }
}

#[test]
fn a_control_process_that_does_not_answer_is_named_in_time() {
    let dir = Folder::new("mute");
    let _listener = UnixListener::bind(dir.0.join("ctl.sock")).expect("socket");
    let begin = Instant::now();
    fails(&dir.0, "status --timeout 1", 1, "did not answer in time");
    assert!(begin.elapsed() < WAIT, "bounded");
}

#[test]
fn completions_and_man_pages_are_made() {
    let dir = Folder::new("made");
    for shell in ["bash", "zsh", "fish"] {
        assert!(ok(&dir.0, &format!("completions {shell}")).contains("ferroce"), "{shell}");
    }
    ok(&dir.0, &format!("man {}", dir.0.join("man").display()));
    let page = fs::read_to_string(dir.0.join("man/ferroce.1")).expect("a page");
    assert!(page.contains(".TH") && page.contains("measure"));
    assert!(dir.0.join("man/ferroce-measure.1").exists());
}

#[test]
fn all_verbs_over_two_appliances() {
    let dir = Folder::new("pair");
    let run = dir.0.to_str().expect("utf-8");
    let mut processes = Vec::new();
    for (name, address) in [("fe0", "192.0.2.1/24"), ("fe1", "192.0.2.2/24")] {
        let file = dir.0.join(format!("{name}.toml"));
        let config = format!(
            "[appliance]\nname = \"{name}\"\n[memory]\nbytes = \"16M\"\npages = \"normal\"\n[[worker]]\ncore = \"none\"\n\
             [port]\nkind = \"shm\"\nlink = \"l\"\naddresses = [\"{address}\"]\n"
        );
        fs::write(&file, config).expect("config");
        let args = ["--config", file.to_str().expect("utf-8"), "--run-dir", run];
        processes.push(start("ferroced", &args, &dir.0.join("log")));
    }
    let args = ["--run-dir", run, "--appliance", "fe0", "--appliance", "fe1"];
    processes.push(start("ferroce-ctld", &args, &dir.0.join("log")));
    until("the control process", || UnixStream::connect(dir.0.join("ctl.sock")).is_ok());
    until("both ports", || {
        let output = ferroce(&dir.0, "-j link show");
        let up = |rows: &Value| {
            rows.as_array().is_some_and(|r| r.len() == 2 && r.iter().all(|r| r["state"] == "ACTIVE"))
        };
        serde_json::from_slice(&output.stdout).is_ok_and(|rows: Value| up(&rows))
    });
    looking(&dir.0);
    objects(&dir.0);
    connecting(&dir.0);
    // An appliance that is away: the others are shown, it is named, and the status says so.
    drop(processes.remove(1));
    let output = ferroce(&dir.0, "-j dev");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("appliance fe1"), "{}", text(&output.stderr));
    let rows: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(rows.as_array().map(Vec::len), Some(2));
    assert!(ok(&dir.0, "status fe0").contains("fe0: ferroced"));
    fails(&dir.0, "qp show dev fe1", 1, "ferroced is not running");
}

fn looking(dir: &Path) {
    assert_eq!(json(dir, "-j dev show fe1")[0]["ifindex"], 1);
    fails(dir, "dev show fe7", 1, "allowed fe0, fe1");
    fails(dir, "status fe7", 1, "allowed fe0, fe1");
    let status = ok(dir, "status");
    assert!(status.contains("fe0: ferroced") && status.contains("fe1: ferroced"), "{status}");
    assert_eq!(json(dir, "status -j")["control"]["protocol"], 1);
    assert_eq!(json(dir, "-j link show fe0/1")[0]["netdev"], "l");
    assert_eq!(json(dir, "-j link show fe0/2"), Value::Array(vec![]));
    assert!(ok(dir, "res").starts_with("0: fe0: pd 0 cq 0 qp 0 mr 0\n"));
    assert!(json(dir, "-j stat show link fe0/1")[0]["rx_frames"].is_u64());
    assert_eq!(json(dir, "-j version")[1]["program"], "ferroce-ctld");
    assert!(json(dir, "rpc rpc_get_methods").as_array().is_some_and(|m| m.len() > 15));
    let output = ferroce(dir, r#"rpc status {"dev":"fe7"}"#);
    assert_eq!(output.status.code(), Some(1));
    let error: Value = serde_json::from_slice(&output.stdout).expect("the error as JSON");
    assert_eq!((&error["code"], &error["data"]["attribute"]), (&(-2).into(), &"dev".into()));
}

fn objects(dir: &Path) {
    let pdn = json(dir, "-j pd create fe0")[0]["pdn"].clone();
    let cqn = json(dir, "-j cq create fe0 --cqe 32")[0]["cqn"].clone();
    let mr = json(dir, &format!("-j mr create fe0 --pdn {pdn} --size 4K --access local-write,remote-read"))
        [0]
    .clone();
    assert_eq!(mr["mrlen"], 4096);
    let qp = json(dir, &format!("-j qp create fe0 --pdn {pdn} --cqn {cqn}"))[0].clone();
    let lqpn = &qp["lqpn"];
    fails(dir, &format!("qp modify fe0 {lqpn} rtr"), 2, "--dgid");
    fails(dir, &format!("qp modify fe0 {lqpn} rts --sq-psn 1"), 1, "state");
    assert_eq!(json(dir, &format!("-j qp modify fe0 {lqpn} init"))[0]["state"], "INIT");
    let rtr = format!("-j qp modify fe0 {lqpn} RTR --dgid 192.0.2.2 --rqpn 0x17 --rq-psn 5");
    assert_eq!(json(dir, &rtr)[0]["rqpn"], 0x17);
    assert_eq!(json(dir, &format!("-j qp modify fe0 {lqpn} rts --sq-psn 9"))[0]["sq-psn"], 9);
    assert_eq!(json(dir, "-j qp show link fe0/1 state RTS,SQD").as_array().map(Vec::len), Some(1));
    assert_eq!(json(dir, "-j res show qp state INIT"), Value::Array(vec![]));
    assert_eq!(json(dir, &format!("-j mr show pdn {pdn}"))[0]["lkey"], mr["lkey"]);
    fails(dir, &format!("pd destroy fe0 {pdn}"), 1, "pd");
    for args in [
        format!("qp destroy fe0 {lqpn}"),
        format!("cq destroy fe0 {cqn}"),
        format!("mr destroy fe0 {}", mr["lkey"]),
        format!("pd destroy fe0 {pdn}"),
    ] {
        assert_eq!(ok(dir, &args), "");
    }
    assert!(ok(dir, "res show fe0").contains("pd 0 cq 0 qp 0 mr 0"));
}

fn connecting(dir: &Path) {
    let made = json(dir, "-j connect fe0 fe1 --size 8K");
    assert_eq!(made[0]["lqpn"], made[1]["rqpn"]);
    assert_eq!(made[0]["mrlen"], 8192);
    fails(dir, "connect fe0 fe0", 1, "another device");
    let lat = json(
        dir,
        &format!("-j measure fe0 fe1 --op write --size 64,4K --iters 50 --lqpn {}", made[0]["lqpn"]),
    );
    assert_eq!((&lat[0]["size_bytes"], &lat[1]["size_bytes"]), (&64.into(), &4096.into()));
    assert!(lat[0]["rtt_ns_p999"].as_u64() >= lat[0]["rtt_ns_p50"].as_u64());
    let bw = ok(dir, "measure fe0 fe1 --op read --mode bw --size 4K --iters 100 --depth 16 --check");
    assert!(bw.contains("BW average[GB/sec]") && bw.contains(" 4096 "), "{bw}");
    assert_eq!(json(dir, &format!("-j disconnect fe1 {}", made[1]["lqpn"]))[0]["destroyed"], 8);
    assert_eq!(json(dir, "-j qp"), Value::Array(vec![]));
}

//! The tools on interfaces, in network namespaces of the tests' own: what they state, and whom they need to be. Needs
//! root; says so where it lacks.

mod common;
#[allow(dead_code)]
#[path = "../../nic/tests/xdp/netns.rs"]
mod netns;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{LIMIT, Run, parse, text};
use netns::{Pair, VETH};

/// What the xdp port needs, and nothing else.
const NEEDED: [&str; 3] = ["net_raw", "bpf", "net_admin"];

/// A tool in a namespace, not started.
fn tool(wire: &Pair, side: usize, prefix: &[&str], program: &Path, words: &str) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", wire.name(side)]).args(prefix).arg(program);
    let (verb, words) = words.split_once(" -").map_or((words, String::new()), |(v, w)| (v, format!("-{w}")));
    command.args(verb.split_whitespace()).args(["-d", &format!("xdp:{VETH}"), "-p", "18000", "--wait", "20"]);
    command.args(words.split_whitespace());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn ours() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_ferroce-tools"))
}

/// Until its own addresses are known to be unique, an interface asks nobody for a neighbour.
fn settled(queues: u32, mtu: u32) -> Option<Pair> {
    let wire = Pair::new(queues, mtu)?;
    let until = Instant::now() + LIMIT;
    while (0..2).any(|side| !wire.ip(side, &["-6", "addr", "show", "dev", VETH, "tentative"]).is_empty()) {
        assert!(Instant::now() < until, "addresses stay tentative");
        std::thread::sleep(Duration::from_millis(50));
    }
    Some(wire)
}

/// A server and a client in their namespaces; their JSON. A user's limit on locked memory counts for all its processes
/// together: the client is another user.
fn both(wire: &Pair, prefix: &[&str], program: &Path, words: &str) -> (serde_json::Value, serde_json::Value) {
    let server = Run(Some(tool(wire, 0, prefix, program, words).spawn().unwrap()));
    let prefix: Vec<String> = prefix.iter().map(|word| word.replace("id=65534", "id=65533")).collect();
    let prefix: Vec<&str> = prefix.iter().map(String::as_str).collect();
    let client = tool(wire, 1, &prefix, program, &format!("{words} 10.77.0.1")).spawn().unwrap();
    let (client, server) = (Run(Some(client)).end(), server.end());
    assert!(client.status.success(), "{words}: {}{}", text(&client), text(&server));
    (parse(&client, words), parse(&server, words))
}

/// WRITEs from the second namespace to the first, data compared; JSON of client and server. The long timeout is for
/// machines that are busy with other things.
fn measured(
    wire: &Pair,
    prefix: &[&str],
    program: &Path,
    words: &str,
) -> (serde_json::Value, serde_json::Value) {
    let words = format!("perf write-bw -n 50 -u 18 --data_validation --pages normal --json {words}");
    let (client, server) = both(wire, prefix, program, &words);
    assert_eq!((&client["data_checked"], &client["iterations"]), (&true.into(), &50.into()), "{client}");
    (client, server)
}

/// NIC-1: `auto` takes copy mode where the driver has nothing better and says why, `on` fails with that reason, `off`
/// is not worth a word; every report carries the mode.
#[test]
fn zero_copy_is_chosen_demanded_or_refused_and_reports_say_which() {
    let Some(wire) = settled(2, 1500) else { return };
    let reasons = |report: &serde_json::Value| report["fallbacks"].to_string();
    let (client, server) = measured(&wire, &[], &ours(), "-s 1000");
    for side in [client, server] {
        assert_eq!(side["dev_mode"], "native, copy, 2 of 2 receive queues, MTU 1500");
        assert!(reasons(&side).contains("copy: driver has no zero-copy"), "{side}");
    }
    let (client, _) = measured(&wire, &[], &ours(), "-s 1000 --zero-copy off");
    assert!(!reasons(&client).contains("zero-copy"), "{client}");
    let refused = tool(&wire, 0, &[], &ours(), "pingpong --zero-copy on").output().unwrap();
    assert_eq!(refused.status.code(), Some(1), "{}", text(&refused));
    assert!(text(&refused).contains("driver has no zero-copy"), "{}", text(&refused));
    let (client, _) = measured(&wire, &[], &ours(), "-s 1000 --xdp-mode generic");
    assert!(client["dev_mode"].as_str().unwrap().starts_with("generic, copy"), "{client}");
}

/// Path MTU 4096, by wish and by itself, where the interface carries it; refused with the largest where it does not.
#[test]
fn the_path_mtu_follows_the_interface() {
    let Some(wire) = settled(1, 4200) else { return };
    let (client, _) = measured(&wire, &[], &ours(), "-s 65536 -m 4096");
    assert_eq!(client["path_mtu"], 4096);
    wire.ip(0, &["link", "set", VETH, "mtu", "1500"]);
    let refused = tool(&wire, 0, &[], &ours(), "pingpong -m 4096 --pages normal").output().unwrap();
    assert!(!refused.status.success() && text(&refused).contains("largest 1024"), "{}", text(&refused));
    // MTU-1: the tools tell each other what their interfaces carry, and take the smaller one.
    for bigger in [0, 1] {
        wire.ip(bigger, &["link", "set", VETH, "mtu", "4200"]);
        wire.ip(1 - bigger, &["link", "set", VETH, "mtu", "1500"]);
        for op in ["write-bw", "read-bw"] {
            let words = format!("perf {op} -n 50 -u 18 -s 65536 --pages normal --json");
            let (client, server) = both(&wire, &[], &ours(), &words);
            assert_eq!((&client["path_mtu"], &server["path_mtu"]), (&1024.into(), &1024.into()), "{words}");
        }
    }
}

/// A copy of the program that everybody may run, removed at the end.
struct Copy(PathBuf);

impl Copy {
    fn new() -> Copy {
        let folder = std::env::temp_dir().join(format!("ferroce-xdp-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("ferroce-tools");
        std::fs::copy(ours(), &path).unwrap();
        for path in [&folder, &path] {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            std::fs::set_permissions(path, mode).unwrap();
        }
        Copy(path)
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.0.parent().unwrap());
    }
}

/// An ordinary user with exactly the three capabilities runs the tools; without one of them the error names it and the
/// command that gives it.
#[test]
fn an_ordinary_user_needs_three_capabilities() {
    let Some(wire) = settled(1, 1500) else { return };
    let copy = Copy::new();
    let with = |names: &[&str]| {
        let list: Vec<String> = names.iter().map(|name| format!("+{name}")).collect();
        let list = format!("-all,{}", list.join(","));
        [format!("--inh-caps={list}"), format!("--ambient-caps={list}")]
    };
    let user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let capabilities = with(&NEEDED);
    let mut prefix = user.to_vec();
    prefix.extend(capabilities.iter().map(String::as_str));
    let (client, _) = measured(&wire, &prefix, &copy.0, "-s 3000");
    assert!(client["dev_mode"].as_str().unwrap().starts_with("native, copy"), "{client}");

    for missing in NEEDED {
        let rest: Vec<&str> = NEEDED.into_iter().filter(|name| *name != missing).collect();
        let capabilities = with(&rest);
        let mut prefix = user.to_vec();
        prefix.extend(capabilities.iter().map(String::as_str));
        let refused = tool(&wire, 0, &prefix, &copy.0, "pingpong --pages normal").output().unwrap();
        let error = text(&refused);
        assert_eq!(refused.status.code(), Some(1), "{error}");
        assert!(error.contains(&format!("missing CAP_{}", missing.to_uppercase())), "{error}");
        let command = format!("setcap cap_net_raw,cap_bpf,cap_net_admin+ep {}", copy.0.display());
        assert!(error.contains(&command), "{error}");
    }
}

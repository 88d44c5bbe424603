//! A port that pins memory asks for leave before anything else. Needs root for a namespace; says so where it lacks.

#[allow(dead_code)]
#[path = "../../nic/tests/xdp/netns.rs"]
mod netns;

use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Longest that one run may take.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs a tool in the namespace with at most 64 KiB of locked memory and without the capability that lifts the limit.
fn tool(wire: &netns::Pair, words: &str) -> Output {
    let limited = "ulimit -l 64 && exec \"$0\" \"$@\"";
    let mut command = Command::new("ip");
    command.args(["netns", "exec", wire.name(0), "setpriv", "--bounding-set=-ipc_lock", "sh", "-c", limited]);
    command.arg(env!("CARGO_BIN_EXE_ferroce-tools")).args(words.split_whitespace());
    let (out, err) = (std::process::Stdio::piped(), std::process::Stdio::piped());
    let mut child = command.stdout(out).stderr(err).spawn().expect("it starts");
    let deadline = Instant::now() + LIMIT;
    while child.try_wait().expect("a child of ours").is_none() {
        if Instant::now() >= deadline {
            let _ = child.kill();
            panic!("still running after {LIMIT:?}: {words}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().expect("its output")
}

/// MR-1 of the field cases, for a tool with a data plane inside.
#[test]
fn mr_1_a_limit_on_locked_memory_is_told_before_the_interface_is_touched() {
    let Some(wire) = netns::Pair::new(1, 1500) else { return };
    for words in ["pingpong -d xdp:veth0 --wait 0.1", "perf send-lat -d xdp:veth0 --wait 0.1"] {
        let output = tool(&wire, words);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{words}: {error}");
        for told in ["memlock", "64 KiB (RLIMIT_MEMLOCK)", "uses 0 bytes", "ulimit -l ", "LimitMEMLOCK="] {
            assert!(error.contains(told), "{told} is missing in: {error}");
        }
        assert!(!wire.ip(0, &["-d", "link", "show", "dev", netns::VETH]).contains("xdp"), "{words}");
    }
    // Shared memory pins nothing: the same limit is no obstacle, and the tool gets as far as waiting for a client.
    let link = std::env::temp_dir().join(format!("ferroce-memlock-{}.link", std::process::id()));
    let output = tool(&wire, &format!("pingpong -d shm:{} --wait 0.1", link.display()));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("no client came within 0.1 s"), "{error}");
    for file in [link.clone(), link.with_extension("link.lock")] {
        let _ = std::fs::remove_file(file);
    }
}

//! What the process tests share: a place of their own, processes that end, and their output.
#![allow(dead_code)]

use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Longest that one run may take.
pub const LIMIT: Duration = Duration::from_secs(60);

/// A link, a TCP port and a place for files of its own.
pub struct Place {
    pub link: PathBuf,
    pub port: u16,
}

impl Place {
    pub fn new() -> Place {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let link =
            std::env::temp_dir().join(format!("ferroce-tools-test-{}-{number}.link", std::process::id()));
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Place { link, port }
    }

    pub fn command(&self, tool: &str, words: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferroce-tools"));
        command.args(tool.split_whitespace());
        command.args([
            "-d",
            &format!("shm:{}", self.link.display()),
            "-p",
            &self.port.to_string(),
            "--wait",
            "20",
        ]);
        if tool.starts_with("perf") {
            // A second: a busy machine may keep a worker from running for longer than the usual 67 ms.
            command.args(["-u", "18"]);
        }
        command.args(words.split_whitespace());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub fn spawn(&self, tool: &str, words: &str) -> Run {
        Run(Some(self.command(tool, words).spawn().unwrap()))
    }

    /// A server and a client with the same words.
    pub fn both(&self, tool: &str, words: &str) -> (Output, Output) {
        let server = self.spawn(tool, words);
        let client = self.spawn(tool, &format!("{words} 127.0.0.1"));
        (client.end(), server.end())
    }

    /// JSON of client and server.
    pub fn json(&self, tool: &str, words: &str) -> (Value, Value) {
        let (client, server) = self.both(tool, &format!("{words} --json"));
        (parse(&client, words), parse(&server, words))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.link);
        let _ = std::fs::remove_file(self.link.with_extension("link.lock"));
    }
}

/// A process that does not outlive its test.
pub struct Run(pub Option<Child>);

impl Run {
    pub fn end(mut self) -> Output {
        let mut child = self.0.take().unwrap();
        let deadline = Instant::now() + LIMIT;
        while child.try_wait().unwrap().is_none() {
            if Instant::now() >= deadline {
                let _ = child.kill();
                panic!("still running after {LIMIT:?}: {}", text(&child.wait_with_output().unwrap()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        child.wait_with_output().unwrap()
    }

    pub fn kill(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.kill();
    }
}

pub fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

pub fn parse(output: &Output, words: &str) -> Value {
    assert!(output.status.success(), "{words}: {}", text(output));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{words}: {e}: {}", text(output)))
}

pub fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("{key} is {}", value[key]))
}

/// What one side's port sent is what the other one received: the tool's own counts are right.
pub fn frames_agree(a: &Value, b: &Value) {
    let count = |v: &Value, name: &str| v["port"][name].as_u64().unwrap();
    assert_eq!(count(a, "tx_good_packets"), count(b, "rx_good_packets"));
    assert_eq!(count(b, "tx_good_packets"), count(a, "rx_good_packets"));
}

/// Connects to a server of ours as soon as it listens.
pub fn connect(port: u16) -> TcpStream {
    let deadline = Instant::now() + LIMIT;
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

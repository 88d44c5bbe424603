//! Processes of a test: started in a folder of their own, ended and swept away whatever happens.
#![allow(dead_code)] // Each test binary uses its own part.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Every wait of a test ends after this, and says for what it waited.
pub const WAIT: Duration = Duration::from_secs(20);

/// A folder that goes away with the test.
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(name: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("ferroce-{name}-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).expect("scratch folder");
        Folder(path)
    }
    pub fn path(&self) -> &Path {
        &self.0
    }
    pub fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(&self.0)
            .expect("scratch folder")
            .map(|e| e.expect("entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
        let _ = fs::remove_dir_all(self.0.with_extension("logs"));
    }
}

/// A child that does not outlive the test. Its standard error goes to a file, shown when something fails.
pub struct Process {
    child: Child,
    name: String,
    log: PathBuf,
}

impl Process {
    pub fn start(name: &str, program: &Path, args: &[&str], log_dir: &Path) -> Self {
        let log = log_dir.join(format!("{name}.log"));
        let file = fs::OpenOptions::new().create(true).append(true).open(&log).expect("log file");
        let child = Command::new(program)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()
            .unwrap_or_else(|e| panic!("{}: {e}", program.display()));
        Process { child, name: name.to_owned(), log }
    }
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }
    pub fn running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process(pid, signal);
    }
    /// Waits for the end; gives the exit status.
    pub fn wait(&mut self) -> std::process::ExitStatus {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("wait") {
                return status;
            }
            assert!(begin.elapsed() < WAIT, "{} does not end; its log:\n{}", self.name, self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    pub fn terminate(&mut self) -> std::process::ExitStatus {
        self.signal(rustix::process::Signal::TERM);
        self.wait()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("---- log of {}\n{}", self.name, self.log());
        }
    }
}

/// Waits until `ready` gives something, or panics with `what`.
pub fn until<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(begin.elapsed() < WAIT, "waited {} s in vain for {what}", WAIT.as_secs());
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The control process under test.
pub fn ctld(run_dir: &Path, extra: &[&str]) -> Process {
    let dir = run_dir.to_str().expect("utf-8");
    let mut args = vec!["--run-dir", dir, "--log", "debug"];
    args.extend(extra);
    let log_dir = log_dir(run_dir);
    Process::start("ferroce-ctld", Path::new(env!("CARGO_BIN_EXE_ferroce-ctld")), &args, &log_dir)
}

/// Logs lie beside the run folder, so that what is left in it can be counted.
pub fn log_dir(run_dir: &Path) -> PathBuf {
    let dir = run_dir.with_extension("logs");
    fs::create_dir_all(&dir).expect("log folder");
    dir
}

/// Starts control and waits until it answers.
pub fn ctld_ready(run_dir: &Path, extra: &[&str]) -> Process {
    let mut process = ctld(run_dir, extra);
    let socket = run_dir.join("ro.sock");
    until("ferroce-ctld to listen", || {
        assert!(process.running(), "ferroce-ctld ended:\n{}", process.log());
        UnixStream::connect(&socket).ok()
    });
    process
}

/// A program of the workspace, built as this test was.
pub fn program(name: &str) -> PathBuf {
    static BUILT: OnceLock<std::sync::Mutex<Vec<String>>> = OnceLock::new();
    let own = Path::new(env!("CARGO_BIN_EXE_ferroce-ctld"));
    let path = own.with_file_name(name);
    let built = BUILT.get_or_init(Default::default);
    let mut built = built.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if built.iter().any(|b| b == name) {
        return path;
    }
    // The whole workspace is selected so that features are those of a test run of the whole workspace: selecting one
    // package would build its dependencies anew, there and back again.
    let mut command = Command::new(env!("CARGO"));
    command.args(["build", "--quiet", "--workspace", "--bin", name]).current_dir(env!("CARGO_MANIFEST_DIR"));
    if own.parent().is_some_and(|dir| dir.ends_with("release")) {
        command.arg("--release");
    }
    // Target folder and flags come with the environment that cargo gave this test.
    let status = command.status().expect("cargo");
    assert!(status.success(), "cargo build --bin {name} failed");
    built.push(name.to_owned());
    path
}

/// One JSON-RPC connection.
pub struct Rpc {
    stream: UnixStream,
    kept: Vec<u8>,
    next: i64,
}

impl Rpc {
    pub fn open(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap_or_else(|e| panic!("{}: {e}", socket.display()));
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("timeout");
        stream.set_write_timeout(Some(WAIT)).expect("timeout");
        Rpc { stream, kept: Vec::new(), next: 0 }
    }
    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("send");
    }
    pub fn try_send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes)
    }
    /// The next line, or `None` at the end.
    pub fn line(&mut self) -> Option<Value> {
        let mut buf = [0; 65536];
        loop {
            if let Some(end) = self.kept.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = self.kept.drain(..=end).collect();
                return Some(serde_json::from_slice(&line).expect("JSON"));
            }
            match self.stream.read(&mut buf) {
                Ok(0) => return None,
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Ok(n) => self.kept.extend_from_slice(&buf[..n]),
                Err(e) => panic!("no answer: {e}"),
            }
        }
    }
    pub fn ask(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let request = json!({"jsonrpc": "2.0", "id": self.next, "method": method, "params": params});
        self.send(request.to_string().as_bytes());
        let answer = self.line().expect("an answer");
        assert_eq!(answer["id"], self.next, "{answer}");
        answer
    }
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        let mut answer = self.ask(method, params);
        assert!(answer["error"].is_null(), "{method}: {answer}");
        answer["result"].take()
    }
    pub fn refused(&mut self, method: &str, params: Value) -> Value {
        let mut answer = self.ask(method, params);
        assert!(answer["result"].is_null(), "{method}: {answer}");
        answer["error"].take()
    }
}

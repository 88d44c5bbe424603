//! Real `ferroced` processes in a folder of their own, and a client of their sockets. Every wait is bounded.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ferroce_api::ApiError;
use ferroce_api::appliance::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, Signal};

/// Longest wait for anything.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A folder that is removed with its contents.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Folder {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("ferroced-test-{}-{number}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).expect("a folder");
        Folder(path)
    }
    /// Names of what lies in it.
    pub fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).expect("the folder");
        let mut names: Vec<_> =
            entries.map(|e| e.expect("entry").file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).expect("writable");
        path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A minimal configuration joined by the link `lab`, and what a test adds.
pub fn config(name: &str, address: &str, more: &str) -> String {
    format!(
        "[appliance]\nname = \"{name}\"\n[memory]\nbytes = \"16M\"\npages = \"normal\"\n[[worker]]\ncore = \"none\"\n\
         spin_passes = 100\n[port]\nkind = \"shm\"\nlink = \"lab\"\naddresses = [\"{address}/24\"]\n{more}"
    )
}

/// A running appliance. Killed when dropped.
pub struct Daemon {
    child: Child,
    pub socket: PathBuf,
    log: Arc<Mutex<String>>,
    deaf: Arc<AtomicBool>,
}

pub fn command(config: &Path, run_dir: &Path) -> Process {
    let mut process = Process::new(env!("CARGO_BIN_EXE_ferroced"));
    process.arg("--config").arg(config).arg("--run-dir").arg(run_dir);
    process
}

impl Daemon {
    /// Starts one and waits until it is ready.
    pub fn start(config_folder: &Folder, run_dir: &Path, name: &str, text: &str) -> Daemon {
        Daemon::start_inside(&[], config_folder, run_dir, name, text)
    }
    /// The same with a command in front that enters a namespace.
    pub fn start_inside(
        enter: &[String],
        config_folder: &Folder,
        run_dir: &Path,
        name: &str,
        text: &str,
    ) -> Daemon {
        let file = config_folder.write(&format!("{name}.toml"), text);
        let mut process = match enter.split_first() {
            None => Process::new(env!("CARGO_BIN_EXE_ferroced")),
            Some((program, arguments)) => {
                let mut process = Process::new(program);
                process.args(arguments).arg(env!("CARGO_BIN_EXE_ferroced"));
                process
            }
        };
        let mut child = process
            .arg("--config")
            .arg(&file)
            .arg("--run-dir")
            .arg(run_dir)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("ferroced starts");
        let log = Arc::new(Mutex::new(String::new()));
        let stderr = child.stderr.take().expect("piped");
        let sink = log.clone();
        let deaf = Arc::new(AtomicBool::new(false));
        let stop_reading = deaf.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                sink.lock().unwrap().push_str(&(line + "\n"));
                if stop_reading.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        let mut daemon = Daemon { child, socket: run_dir.join(format!("{name}.sock")), log, deaf };
        let until = Instant::now() + PATIENCE;
        while !daemon.log().contains("ready") {
            if let Some(status) = daemon.child.try_wait().expect("wait") {
                std::thread::sleep(Duration::from_millis(100));
                panic!("{name} ended with {status} instead of being ready:\n{}", daemon.log());
            }
            assert!(Instant::now() < until, "{name} is not ready:\n{}", daemon.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        daemon
    }
    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }
    /// Closes our end of its log after the next line.
    pub fn stop_reading_the_log(&self) {
        self.deaf.store(true, Ordering::Relaxed);
    }
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().try_into().unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).expect("signal");
    }
    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("wait") {
                return status;
            }
            assert!(Instant::now() < until, "it does not end:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    pub fn kill(&mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
    }
    pub fn connect(&self) -> Client {
        Client::connect(&self.socket, Role::Control)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- log of {}\n{}", self.socket.display(), self.log());
        }
    }
}

/// Runs an appliance that is expected to give up by itself.
pub fn refused(config: &Path, run_dir: &Path) -> String {
    let output = finish(&mut command(config, run_dir));
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stderr).expect("text");
    text.lines()
        .find(|line| line.starts_with("ferroced: "))
        .unwrap_or_else(|| panic!("no error line in {text}"))
        .to_owned()
}

/// Runs a process to its end.
pub fn finish(process: &mut Process) -> Output {
    let mut child = process.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("starts");
    let until = Instant::now() + PATIENCE;
    while child.try_wait().expect("wait").is_none() {
        if Instant::now() >= until {
            let _ = child.kill();
            let mut text = String::new();
            let _ = child.stderr.take().map(|mut e| e.read_to_string(&mut text));
            panic!("it does not end: {text}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().expect("output")
}

/// A client of the control socket.
pub struct Client {
    fd: OwnedFd,
    next: u64,
    pub hello: Option<HelloReply>,
    pub events: Vec<Event>,
}

impl Client {
    /// A connection without a hello.
    pub fn raw(socket: &Path) -> Client {
        let fd =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        rustix::net::connect(&fd, &SocketAddrUnix::new(socket).unwrap()).expect("connect");
        rustix::net::sockopt::set_socket_send_buffer_size(&fd, 1 << 20).unwrap();
        Client { fd, next: 1, hello: None, events: Vec::new() }
    }
    pub fn connect(socket: &Path, role: Role) -> Client {
        let mut client = Client::raw(socket);
        client.send(&FromClient::Hello(Hello::new(role, "test")));
        match client.receive() {
            Some(FromAppliance::Hello(hello)) => client.hello = Some(hello),
            other => panic!("no hello: {other:?}"),
        }
        client
    }
    pub fn send(&mut self, message: &FromClient) {
        self.send_bytes(&encode(message).expect("encodes"));
    }
    pub fn send_bytes(&mut self, bytes: &[u8]) {
        rustix::net::send(&self.fd, bytes, SendFlags::NOSIGNAL).expect("send");
    }
    /// False when the appliance has closed.
    pub fn try_send_bytes(&mut self, bytes: &[u8]) -> bool {
        rustix::net::send(&self.fd, bytes, SendFlags::NOSIGNAL).is_ok()
    }
    /// True when a message, or the end, is there within the time.
    pub fn readable(&self, within: Duration) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.fd.as_fd(), PollFlags::IN)];
        let timeout = Timespec { tv_sec: within.as_secs() as i64, tv_nsec: within.subsec_nanos().into() };
        poll(&mut fds, Some(&timeout)).expect("poll") > 0
    }
    /// The next message; `None` when the appliance closed.
    pub fn receive(&mut self) -> Option<FromAppliance> {
        assert!(self.readable(PATIENCE), "no answer in time");
        let mut buffer = vec![0; MAX_MESSAGE_BYTES];
        match rustix::net::recv(&self.fd, &mut buffer[..], RecvFlags::empty()) {
            Ok((0, _)) => None,
            Ok((length, _)) => Some(decode(&buffer[..length]).expect("decodes")),
            Err(error) => panic!("recv: {error}"),
        }
    }
    /// The error of the last message before the appliance closed.
    pub fn bye(&mut self) -> ApiError {
        loop {
            match self.receive() {
                Some(FromAppliance::Bye(bye)) => {
                    assert!(self.receive().is_none(), "the connection is closed");
                    return bye.error;
                }
                Some(_) => {}
                None => panic!("closed without a reason"),
            }
        }
    }
    pub fn batch(&mut self, batch: Vec<Command>) -> Vec<Result<Response, ApiError>> {
        let (id, count) = (self.next, batch.len());
        self.next += 1;
        self.send(&FromClient::Request(Request { id, batch }));
        loop {
            match self.receive() {
                Some(FromAppliance::Reply(reply)) => {
                    assert_eq!((reply.id, reply.results.len()), (id, count));
                    return reply.results.into_iter().map(Outcome::into_result).collect();
                }
                Some(FromAppliance::Event(event)) => self.events.push(event),
                other => panic!("no reply: {other:?}"),
            }
        }
    }
    pub fn try_one(&mut self, command: Command) -> Result<Response, ApiError> {
        self.batch(vec![command]).remove(0)
    }
    pub fn one(&mut self, command: Command) -> Response {
        let shown = format!("{command:?}");
        self.try_one(command).unwrap_or_else(|error| panic!("{shown}: {error}"))
    }
    pub fn refuse(&mut self, command: Command) -> ApiError {
        let shown = format!("{command:?}");
        match self.try_one(command) {
            Err(error) => error,
            Ok(response) => panic!("{shown} was done: {response:?}"),
        }
    }
    pub fn status(&mut self) -> Status {
        match self.one(Command::Status) {
            Response::Status(status) => *status,
            other => panic!("{other:?}"),
        }
    }
    /// Waits for an event.
    pub fn event(&mut self, wanted: impl Fn(&EventBody) -> bool) -> EventBody {
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.events.iter().position(|event| wanted(&event.event)) {
                return self.events.remove(at).event;
            }
            assert!(Instant::now() < until, "no such event among {:?}", self.events);
            match self.receive() {
                Some(FromAppliance::Event(event)) => self.events.push(event),
                other => panic!("no event: {other:?}"),
            }
        }
    }
    /// Waits until the link is up.
    pub fn await_link(&mut self) {
        let until = Instant::now() + PATIENCE;
        while !matches!(self.one(Command::QueryPort), Response::Port(port) if port.active) {
            assert!(Instant::now() < until, "the link stays down");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// A queue pair with all that belongs to it, made through a client.
#[derive(Clone, Debug)]
pub struct Endpoint {
    pub pd: PdHandle,
    pub cq: CqHandle,
    pub lkey: Lkey,
    pub remote: RemoteBuffer,
    pub qpn: ferroce_wire::Qpn,
}

pub const REGION_BYTES: u64 = 1 << 20;

pub fn qp_spec(pd: PdHandle, cq: CqHandle, owner: &[u8], cookie: u64) -> QpSpec {
    QpSpec {
        qp_type: QpType::Rc,
        pd,
        send_cq: cq,
        recv_cq: cq,
        cap: QpCap { max_send_wr: 512, max_recv_wr: 512, ..QpCap::default() },
        sq_sig_all: false,
        owner: ferroce_api::ids::Owner::new(owner).expect("short enough"),
        cookie,
    }
}

impl Endpoint {
    pub fn new(client: &mut Client) -> Endpoint {
        let Response::Pd { pd } = client.one(Command::AllocPd { cookie: 11 }) else { panic!() };
        let alloc = Command::AllocMr { pd, bytes: REGION_BYTES, access: Access::ALL_RW, cookie: 22 };
        let create = Command::CreateCq { worker: 0, cqe: 2048, cookie: 33 };
        let mut made = client.batch(vec![alloc, create]).into_iter().map(|r| r.expect("made"));
        let Some(Response::Mr { lkey, rkey, iova, bytes }) = made.next() else { panic!() };
        let Some(Response::Cq { cq }) = made.next() else { panic!() };
        let create = Command::CreateQp(Box::new(qp_spec(pd, cq, b"owner of it", 44)));
        let Response::Qp { qpn, worker: 0 } = client.one(create) else { panic!() };
        Endpoint { pd, cq, lkey, remote: RemoteBuffer { addr: iova, rkey, bytes }, qpn }
    }

    /// RESET to RTS towards a peer.
    pub fn connect(
        &self,
        client: &mut Client,
        peer: &Endpoint,
        peer_address: &str,
        path_mtu: ferroce_wire::PathMtu,
    ) {
        let dgid = ferroce_api::ids::parse_gid(peer_address).unwrap();
        let query = PathQuery { dgid, sgid: None, traffic_class: 0 };
        let Response::Path(av) = client.one(Command::ResolvePath(query)) else { panic!() };
        let psn = ferroce_wire::Psn::new;
        let qpn = self.qpn;
        let steps = [
            Modify::Init(InitSpec { pkey: 0xffff, access: Access::ALL_RW, qkey: 0 }),
            Modify::Rtr(RtrSpec {
                av,
                class: 0,
                path_mtu,
                dest_qpn: peer.qpn,
                rq_psn: psn(peer.qpn.get()),
                max_dest_rd_atomic: 16,
                min_rnr_timer: 12,
            }),
            Modify::Rts(RtsSpec {
                sq_psn: psn(qpn.get()),
                timeout: 14,
                retry_cnt: 7,
                rnr_retry: 7,
                max_rd_atomic: 16,
            }),
        ];
        let batch = steps.map(|modify| Command::ModifyQp { qpn, modify }).to_vec();
        for result in client.batch(batch) {
            assert_eq!(result.expect("modified"), Response::Done);
        }
    }

    /// Takes everything down again, the user before the used.
    pub fn destroy(&self, client: &mut Client) {
        let batch = vec![
            Command::DestroyQp { qpn: self.qpn },
            Command::DestroyCq { cq: self.cq },
            Command::DeregMr { lkey: self.lkey },
            Command::DeallocPd { pd: self.pd },
        ];
        for result in client.batch(batch) {
            assert_eq!(result.expect("destroyed"), Response::Done);
        }
    }
}

/// Two joined appliances.
pub struct Pair {
    pub a: Daemon,
    pub b: Daemon,
    pub run: Folder,
    pub files: Folder,
}

pub const ADDRESS_A: &str = "192.0.2.1";
pub const ADDRESS_B: &str = "192.0.2.2";

impl Pair {
    pub fn start(more: &str) -> Pair {
        let (files, run) = (Folder::new(), Folder::new());
        let a = Daemon::start(&files, &run.0, "fe0", &config("fe0", ADDRESS_A, more));
        let b = Daemon::start(&files, &run.0, "fe1", &config("fe1", ADDRESS_B, more));
        Pair { a, b, run, files }
    }
}

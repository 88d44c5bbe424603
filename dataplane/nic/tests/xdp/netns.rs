//! Two network namespaces joined by a veth pair, made for one test and removed with it, also when it fails.

use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

/// Interface name in both namespaces.
pub const VETH: &str = "veth0";

/// The pair. Side 0 has 10.77.0.1 and fd77::1, side 1 has 10.77.0.2 and fd77::2.
pub struct Pair {
    names: [String; 2],
}

static NEXT: AtomicU32 = AtomicU32::new(0);

impl Pair {
    /// Makes it; `None`, with the reason on stderr, where this process may not.
    pub fn new(queues: u32, mtu: u32) -> Option<Pair> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: network namespaces and AF_XDP need root");
            return None;
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let base = format!("frc-{}-{number}", std::process::id());
        let pair = Pair { names: [format!("{base}a"), format!("{base}b")] };
        for name in &pair.names {
            ip(&["netns", "add", name]);
        }
        let queues = queues.to_string();
        let [a, b] = &pair.names;
        ip(&[
            "-n",
            a,
            "link",
            "add",
            VETH,
            "numtxqueues",
            &queues,
            "numrxqueues",
            &queues,
            "type",
            "veth",
            "peer",
            "name",
            VETH,
            "netns",
            b,
            "numtxqueues",
            &queues,
            "numrxqueues",
            &queues,
        ]);
        for (side, name) in pair.names.iter().enumerate() {
            let host = side + 1;
            ip(&["-n", name, "link", "set", "lo", "up"]);
            ip(&["-n", name, "link", "set", VETH, "mtu", &mtu.to_string(), "up"]);
            ip(&["-n", name, "addr", "add", &format!("10.77.0.{host}/24"), "dev", VETH]);
            ip(&["-n", name, "addr", "add", &format!("fd77::{host}/64"), "dev", VETH, "nodad"]);
        }
        Some(pair)
    }

    /// Name of a side's namespace.
    pub fn name(&self, side: usize) -> &str {
        &self.names[side]
    }

    /// Runs `f` on a thread of its own inside a side's namespace.
    pub fn inside<T: Send>(&self, side: usize, f: impl FnOnce() -> T + Send) -> T {
        let path = format!("/run/netns/{}", self.names[side]);
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                let file = std::fs::File::open(&path).unwrap();
                let kind = rustix::thread::LinkNameSpaceType::Network;
                rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&file), Some(kind))
                    .unwrap();
                f()
            });
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// `ip ARGS` inside a side's namespace.
    pub fn ip(&self, side: usize, args: &[&str]) -> String {
        let mut all = vec!["-n", self.name(side)];
        all.extend_from_slice(args);
        ip(&all)
    }

    /// A command inside a side's namespace, not yet started.
    pub fn command(&self, side: usize, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", self.name(side), program]);
        command
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for name in &self.names {
            // Failure is no news here: the namespace may never have been made.
            let _ = Command::new("ip").args(["netns", "del", name]).output();
        }
    }
}

#[track_caller]
fn ip(args: &[&str]) -> String {
    checked(Command::new("ip").args(args).output().expect("iproute2 is installed"), args)
}

#[track_caller]
fn checked(output: Output, args: &[&str]) -> String {
    assert!(output.status.success(), "ip {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

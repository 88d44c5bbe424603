//! `ferroce-ctld`: one control process for any number of appliances.
//!
//! Owns the RPC sockets in its run folder. The invariant: after a clean stop nothing of it is left there, and the
//! appliances run on. Single-threaded; it never touches a payload byte.
#![forbid(unsafe_code)]

mod config;
mod control;
mod dp_link;
mod handlers;
mod janitor;
mod server;
mod socket;
mod splitter;

use std::process::ExitCode;
use std::rc::Rc;

use anyhow::Context;
use clap::Parser;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::LocalSet;

use config::{Args, Config};
use control::Control;
use dp_link::Link;
use socket::{Admission, BoundSocket};

fn main() -> ExitCode {
    let args = Args::parse();
    match start(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ferroce-ctld: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn start(args: &Args) -> anyhow::Result<()> {
    let config = Config::load(args)?;
    if args.check {
        println!("run_dir {}", config.run_dir.display());
        for appliance in &config.appliances {
            println!("appliance {} socket {}", appliance.name, appliance.socket.display());
        }
        return Ok(());
    }
    let filter =
        tracing_subscriber::EnvFilter::try_new(&args.log).with_context(|| format!("--log {}", args.log))?;
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false).init();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("runtime")?;
    LocalSet::new().block_on(&runtime, run(config))
}

async fn run(config: Config) -> anyhow::Result<()> {
    // Signals first: one that comes during start-up must not leave sockets behind.
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
    socket::ensure_run_dir(&config.run_dir)?;
    let (full, full_guard, full_admission) = open(&config, "ctl.sock", "ferroce")?;
    let (reading, reading_guard, reading_admission) = open(&config, "ro.sock", "ferroce-ro")?;
    let (stop, stopping) = watch::channel(false);
    let mut links = Vec::new();
    for appliance in &config.appliances {
        let (link, keeper) = Link::new(&appliance.name, appliance.socket.clone());
        tokio::task::spawn_local(keeper);
        links.push(link);
    }
    let control = Rc::new(Control::new(links, stopping));
    for link in control.links() {
        tokio::task::spawn_local(janitor::run(control.clone(), link.clone()));
    }
    let both = async {
        tokio::join!(
            server::serve(full, full_admission, true, control.clone()),
            server::serve(reading, reading_admission, false, control.clone()),
        )
    };
    tracing::info!(run_dir = %config.run_dir.display(), appliances = config.appliances.len(), "ready");
    tokio::pin!(both);
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        _ = &mut both => {}
    }
    tracing::info!("stopping; a second signal ends at once");
    let _ = stop.send(true);
    tokio::select! {
        _ = &mut both => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    drop((full_guard, reading_guard));
    Ok(())
}

fn open(config: &Config, file: &str, group: &str) -> anyhow::Result<(UnixListener, BoundSocket, Admission)> {
    let gid = socket::group_id(group);
    if gid.is_none() {
        tracing::info!(file, group, "no such group: only root and our own user may use this socket");
    }
    let (listener, guard) = socket::bind(&config.run_dir.join(file), gid)?;
    listener.set_nonblocking(true).context("socket")?;
    let listener = UnixListener::from_std(listener).context("socket")?;
    let own_uid = rustix::process::geteuid().as_raw();
    Ok((listener, guard, Admission { own_uid, gid }))
}

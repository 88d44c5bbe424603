//! `ferroced`, the appliance: a user-space RoCEv2 data plane on pinned workers, set up over a control socket.
//!
//! Owns the order of start and stop: read the configuration, take the name (lock and socket), assemble ports, memory
//! and workers, serve control until a signal or a request, stop the workers within a bound, give everything back.
//! Everything that can fail says what, where and how to change it, and exits with 1; wrong usage exits with 2.
#![forbid(unsafe_code)]

mod assemble;
mod ctl;
mod node;
mod objects;
mod perf;
mod status;

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Parser;
use ferroce_api::config::{ApplianceConfig, DevName};
use signal_hook::consts::{SIGINT, SIGTERM};

use ctl::socket::Claim;
use ctl::{Server, Stop};

/// How long the workers may take to stop after a signal.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// The ferroce appliance: carries RoCEv2 in user space.
///
/// Runs until SIGTERM or SIGINT; a second one ends it at once.
#[derive(Parser)]
#[command(name = "ferroced", version, max_term_width = 80)]
struct Args {
    /// Configuration (TOML); see configs/xdp.toml for every key
    #[arg(short, long, value_name = "FILE")]
    config: PathBuf,
    /// Folder of sockets and links [default: the file's run_dir, else /run/ferroce]
    #[arg(long, value_name = "DIR")]
    run_dir: Option<PathBuf>,
    /// Name of the device [default: the file's name]
    #[arg(long, value_name = "NAME", value_parser = DevName::new)]
    name: Option<DevName>,
    /// Log filter, for instance debug or ferroced=trace
    #[arg(long, value_name = "FILTER", default_value = "info")]
    log: String,
    /// Check the configuration and exit
    #[arg(long)]
    check: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let filter = match tracing_subscriber::EnvFilter::builder().parse(&args.log) {
        Ok(filter) => filter,
        Err(error) => {
            eprintln!("ferroced: --log {}: {error}", args.log);
            return ExitCode::from(2);
        }
    };
    // A reader of the log that goes away must not take the data plane with it.
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false)
        .log_internal_errors(false)
        .init();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ferroced: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let started = Instant::now();
    let config = load(args)?;
    if args.check {
        println!("{}: configuration is right", args.config.display());
        return Ok(());
    }
    let signals = catch_signals().context("signals")?;
    let claim = Claim::new(&config.run_dir, config.name.as_str())?;
    let mut node = assemble::assemble(&config, started)?;
    tracing::info!(dev = node.name(), socket = %claim.path().display(), "ready");
    let stop = Server::new(&claim, config.limits.max_clients as usize).run(&mut node, signals.as_fd())?;
    let deadline = match stop {
        Stop::Signal => STOP_DEADLINE,
        Stop::Asked(deadline) => deadline,
    };
    tracing::info!(?stop, "stopping");
    let stopped = node.stop(deadline);
    // The name goes last: who finds it free finds the ports free too.
    drop(claim);
    stopped.context("stop")?;
    tracing::info!("stopped");
    Ok(())
}

fn load(args: &Args) -> Result<ApplianceConfig> {
    let mut config = ApplianceConfig::load(&args.config)?;
    if let Some(name) = &args.name {
        anyhow::ensure!(
            !["ctl", "ro"].contains(&name.as_str()),
            "--name {name}: names a socket of the control process; choose another"
        );
        config.name = name.clone();
    }
    if let Some(run_dir) = &args.run_dir {
        config.run_dir = absolute(run_dir)?;
    }
    Ok(config)
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("--run-dir {}", path.display()))
}

/// A descriptor that becomes readable at the first SIGTERM or SIGINT. The second one ends the process at once, with the
/// files of this run left for the next start to clear.
fn catch_signals() -> std::io::Result<UnixStream> {
    let (read, write) = UnixStream::pair()?;
    let second = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        // In this order: the first signal passes the shutdown, then arms it.
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, second.clone())?;
        signal_hook::flag::register(signal, second.clone())?;
        signal_hook::low_level::pipe::register(signal, write.try_clone()?)?;
    }
    Ok(read)
}

//! `ferroce-tools`: stand-alone tools with a data plane inside.
//!
//! `pingpong` exchanges messages with `ibv_rc_pingpong`; `perf` measures with another one of ours or with perftest's
//! programs, over RDMA, or over kernel sockets.
//! Exit status: 0 done, 1 asked and refused or failed, 2 wrong usage.
#![forbid(unsafe_code)]

mod connect;
mod destination;
mod fail;
mod json;
mod net;
mod out;
mod perf;
mod pingpong;
mod pingpong_srq;
mod plane;
mod sock;
mod values;
mod watch;

use std::process::ExitCode;

use clap::Parser;

/// Stand-alone RDMA tools that carry a data plane inside
#[derive(Parser)]
// A later option wins over an earlier one, as with getopt. Help has its texts on lines of their own, so that it fits 80
// columns without knowing the terminal.
#[command(name = "ferroce-tools", version, propagate_version = true, args_override_self = true)]
#[command(next_line_help = true)]
struct Cli {
    #[command(subcommand)]
    tool: Tool,
}

#[derive(clap::Subcommand)]
enum Tool {
    /// Exchange messages with ibv_rc_pingpong or another ferroce
    Pingpong(Box<pingpong::PingPongArgs>),
    /// Measure latency and bandwidth, with another ferroce or with perftest
    Perf(Box<perf::PerfArgs>),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let (name, outcome) = match &cli.tool {
        Tool::Pingpong(args) => ("pingpong", pingpong::run(args)),
        Tool::Perf(args) => ("perf", perf::run(args)),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(fail) => {
            eprintln!("ferroce-tools {name}: {fail}");
            ExitCode::from(fail.status())
        }
    }
}

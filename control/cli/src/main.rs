//! `ferroce`: what a person or a script types.
//!
//! Owns nothing: no state, no data plane. It asks the control process over its socket, prints the answer and ends. The
//! grammar of listings and their JSON keys are those of iproute2's `rdma`. Exit status: 0 done, 1 refused or failed,
//! 2 wrong usage, 3 ferroce-ctld is not running, 4 what answers speaks another protocol.
#![forbid(unsafe_code)]

mod args;
mod client;
mod fail;
mod number;
mod print;
mod report;
mod row;
mod verbs;
mod words;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Verb};
use fail::Fail;
use print::Printer;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Ok(code) => code,
        Err(fail) => {
            eprintln!("ferroce: {fail}");
            ExitCode::from(fail.exit_code())
        }
    }
}

fn run(cli: Cli) -> Result<ExitCode, Fail> {
    let Cli { global, verb } = cli;
    let printer = Printer::new(&global);
    match verb {
        Verb::Status { dev } => verbs::status::show(&global, &printer, dev),
        Verb::Dev { verb } => verbs::dev::dev(&global, &printer, verb),
        Verb::Link { verb } => verbs::dev::link(&global, &printer, verb),
        Verb::Resource { verb } => verbs::resource::resource(&global, &printer, verb),
        Verb::Pd { verb } => verbs::object::pd(&global, &printer, verb),
        Verb::Mr { verb } => verbs::object::mr(&global, &printer, verb),
        Verb::Cq { verb } => verbs::object::cq(&global, &printer, verb),
        Verb::Qp { verb } => verbs::qp::qp(&global, &printer, verb),
        Verb::Connect(args) => verbs::connect::connect(&global, &printer, args),
        Verb::Disconnect { dev, lqpn } => verbs::connect::disconnect(&global, &printer, dev, lqpn),
        Verb::Measure(args) => verbs::measure::measure(&global, &printer, &args),
        Verb::Statistic { verb } => verbs::dev::statistic(&global, &printer, verb),
        Verb::Rpc { method, params } => verbs::meta::rpc(&global, &printer, &method, params.as_deref()),
        Verb::Version => verbs::meta::version(&global, &printer),
        Verb::Completions { shell } => verbs::meta::completions(shell),
        Verb::Man { dir } => verbs::meta::man(&dir),
        Verb::Pingpong { args } => verbs::tools::exec("pingpong", &global, &args),
        Verb::Perf { args } => verbs::tools::exec("perf", &global, &args),
        Verb::DemoReport { dir } => report::report(&global, &dir),
    }
}

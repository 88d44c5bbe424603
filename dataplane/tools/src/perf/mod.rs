//! `perf`: latency and bandwidth of SEND, WRITE, READ and atomics in perftest's form, with another one of ours or with
//! perftest's own programs; the same over kernel TCP and UDP.
//!
//! | part | owns |
//! |---|---|
//! | [`options`], [`sweep`], [`batch`] | the command line |
//! | [`plan`] | tests from options; a test as it travels |
//! | [`session`] | one meeting: who the peer is, and the session that follows |
//! | [`own`], [`talk`] | the conversation between two of ours: lines of JSON |
//! | [`perftest`] | the conversation with perftest |
//! | [`backend`], [`rdma`], [`events`], [`wait`] | running a test |
//! | [`report`] | what is printed |
//!
//! Between two of ours the client decides the test; what the server was told explicitly must agree.

mod backend;
mod batch;
mod events;
mod options;
mod own;
mod perftest;
mod plan;
mod rdma;
mod report;
mod session;
mod sweep;
mod talk;
mod wait;

use std::time::Duration;

use ferroce_services::Role;

use crate::fail::{Fail, Outcome};
use crate::json;
use crate::net::{self, Peer};
use crate::plane::Plane;
pub use options::PerfArgs;
use options::{Job, Test};
use report::Teller;

/// Runs the tool.
pub fn run(args: &PerfArgs) -> Outcome<()> {
    let job = args.job()?;
    args.check()?;
    let mut plane = None;
    let outcome = match &job {
        Job::Server(test) => one_client(args, *test, &mut plane),
        Job::Serve => any_clients(args, &mut plane),
        Job::Client(test, host) => client(args, *test, host, &mut plane),
        Job::Batch(file, host) => all_lines(args, file, host, &mut plane),
    };
    let Some(mut plane) = plane else { return outcome };
    if outcome.is_ok() && args.report.stats && !args.report.json {
        json::print_counters(&plane);
    }
    let stopped = plane.stop();
    outcome.and(stopped)
}

fn client(args: &PerfArgs, test: Test, host: &str, plane: &mut Option<Plane>) -> Outcome<()> {
    let mut teller = Teller::new(args);
    session::client(args, test, host, plane, &mut teller)?;
    teller.end()
}

fn listen(args: &PerfArgs, plane: &mut Option<Plane>) -> Outcome<std::net::TcpListener> {
    // Listen first: a client that comes while the data plane starts is not refused.
    let listener = net::listen(args.peer.port)?;
    *plane = backend::open_plane(args, args.transport(), Role::Server)?;
    Ok(listener)
}

fn one_client(args: &PerfArgs, test: Test, plane: &mut Option<Plane>) -> Outcome<()> {
    // What is wrong in any case is told before a client comes.
    plan::items(args, test, Role::Server, None)?;
    let wait = args.peer.wait.unwrap_or(Duration::from_secs(60));
    let listener = listen(args, plane)?;
    let mut teller = Teller::new(args);
    teller.waiting();
    let mut peer = Peer::new(net::accept(&listener, (!wait.is_zero()).then_some(wait))?)?;
    drop(listener);
    session::server(args, Some(test), &mut peer, plane, &mut teller)?;
    teller.end()
}

/// One client after the other, whatever becomes of each.
fn any_clients(args: &PerfArgs, plane: &mut Option<Plane>) -> Outcome<()> {
    let wait = args.peer.wait.filter(|wait| !wait.is_zero());
    let listener = net::listen(args.peer.port)?;
    let mut teller = Teller::new(args);
    teller.waiting();
    let mut served = 0;
    while args.peer.clients.is_none_or(|most| served < most) {
        let mut peer = Peer::new(net::accept(&listener, wait)?)?;
        served += 1;
        let outcome = session::server(args, None, &mut peer, plane, &mut teller).and_then(|()| teller.end());
        if let Err(error) = outcome {
            eprintln!("ferroce-tools perf: {error}");
        }
        // The other end of a link of two processes is gone with its client.
        if let Some(mut old) = plane.take_if(|plane| !plane.outlives_peers()) {
            old.stop()?;
        }
    }
    Ok(())
}

/// The lines of a batch, one after the other; stops at the first that fails unless told otherwise.
fn all_lines(args: &PerfArgs, file: &std::path::Path, host: &str, plane: &mut Option<Plane>) -> Outcome<()> {
    let words = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
    let lines = batch::read(file, &batch::general_words(words, host))?;
    let mut failed = 0;
    for line in &lines {
        if !args.is_quiet() {
            crate::out::say!("{}", line.text);
        }
        let outcome = client(&line.args, line.test, host, plane);
        // Each line may name a port of its own.
        if let Some(mut old) = plane.take() {
            old.stop()?;
        }
        match outcome {
            Ok(()) => {}
            Err(error) if args.peer.keep_going => {
                eprintln!("ferroce-tools perf: {}:{}: {error}", file.display(), line.number);
                failed += 1;
            }
            Err(error) => return Err(Fail::failed(format!("{}:{}: {error}", file.display(), line.number))),
        }
    }
    match failed {
        0 => Ok(()),
        _ => Err(Fail::failed(format!("{failed} of {} tests failed", lines.len()))),
    }
}

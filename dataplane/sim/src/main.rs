//! `ferroce-sim`: runs of the real transport under seeded faults.

use std::ops::Range;
use std::process::ExitCode;

use clap::Parser;
use ferroce_sim::{Plan, Planted, Report, batch, run_plan};

/// Runs the real transport on a virtual clock under seeded faults and checks every promise it makes.
///
/// A run is decided by its seed and by `--messages`; runs go on all cores at once. The lowest seed that breaks a promise
/// is printed with its last packets and the command that repeats it, and the exit status is 1.
#[derive(Parser)]
#[command(name = "ferroce-sim", version)]
struct Args {
    /// Number of runs; 100 unless given.
    #[arg(long, value_name = "N", conflicts_with = "seed")]
    seeds: Option<u64>,
    /// Seed of the first run.
    #[arg(long, default_value_t = 1, value_name = "S", conflicts_with = "seed")]
    start: u64,
    /// Just this run.
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// At least so many messages (work requests) in each run that ends by itself: not by a peer that falls silent, by a key
    /// that is taken away, or by the only connection giving up after its last retry.
    #[arg(long, default_value_t = 1000, value_name = "N")]
    messages: u32,
    /// Print the plan and every packet to stderr.
    #[arg(long, short)]
    verbose: bool,
    /// Plant each known fault and print the lowest seed at which the checker that is meant for it finds it; exit status 1
    /// if one is not found within `--seeds` (1000 unless given).
    #[arg(long, conflicts_with = "seed")]
    plants: bool,
    /// Plant this fault, by the name that `--plants` prints.
    #[arg(long, value_name = "NAME", value_parser = plant_of, conflicts_with = "plants")]
    plant: Option<Planted>,
    /// Go on after a run that failed.
    #[arg(long)]
    keep_going: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let count = args.seeds.unwrap_or(if args.plants { 1000 } else { 100 });
    let seeds = match args.seed {
        Some(seed) => seed..seed.saturating_add(1),
        None => args.start..args.start.saturating_add(count),
    };
    // Packets of two runs at once would be told apart by nobody.
    let threads = if args.verbose { 1 } else { batch::threads() };
    if args.plants {
        return plants(&seeds, args.messages, threads);
    }
    let mut total = Total::default();
    let run = |seed| {
        let plan = Plan::from_seed(seed).with_messages(args.messages);
        if args.verbose {
            eprintln!("{plan:#?}");
        }
        run_plan(&plan, args.plant, args.verbose)
    };
    batch::in_order(seeds, threads, run, |_, result| {
        match result {
            Ok(report) => total.add(&report),
            Err(failure) => {
                eprintln!("{failure}");
                total.failed += 1;
            }
        }
        total.failed == 0 || args.keep_going
    });
    println!("{total}");
    if total.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn plant_of(name: &str) -> Result<Planted, String> {
    let names = || Planted::ALL.map(|planted| format!("{planted:?}")).join(", ");
    Planted::ALL
        .into_iter()
        .find(|planted| format!("{planted:?}") == name)
        .ok_or_else(|| format!("not one of {}", names()))
}

/// Finds each planted fault.
fn plants(seeds: &Range<u64>, messages: u32, threads: usize) -> ExitCode {
    let mut missed = 0;
    for planted in Planted::ALL {
        let name = format!("{planted:?}");
        let mut found = None;
        let run = |seed| run_plan(&Plan::from_seed(seed).with_messages(messages), Some(planted), false);
        batch::in_order(seeds.clone(), threads, run, |seed, result| {
            let kind = result.err().map(|failure| failure.violation.kind);
            found = kind.filter(|kind| planted.meant().contains(kind)).map(|kind| (seed, kind));
            found.is_none()
        });
        match found {
            Some((seed, kind)) => println!("{name:<20} seed {seed:<4} {kind:?}"),
            None => {
                println!("{name:<20} not found in {} seeds", seeds.end - seeds.start);
                missed += 1;
            }
        }
    }
    println!("{} of {} planted faults found", Planted::ALL.len() - missed, Planted::ALL.len());
    if missed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[derive(Default)]
struct Total {
    runs: u64,
    failed: u64,
    ops: u64,
    bytes: u64,
    virtual_ns: u64,
    most_steps: u64,
    frames: u64,
    lost: u64,
    doubled: u64,
    late: u64,
    damaged: u64,
    retransmits: u64,
    timeouts: u64,
    rnr: u64,
    exhausted: u64,
}

impl Total {
    fn add(&mut self, report: &Report) {
        self.runs += 1;
        self.ops += report.ops;
        self.bytes += report.bytes;
        self.virtual_ns += report.virtual_ns;
        self.most_steps = self.most_steps.max(report.steps);
        self.frames += report.stats.links.frames;
        self.lost += report.stats.links.lost;
        self.doubled += report.stats.links.doubled;
        self.late += report.stats.links.late;
        self.damaged += report.stats.links.damaged;
        self.retransmits += report.stats.retransmits;
        self.timeouts += report.stats.timeouts;
        self.rnr += report.stats.rnr;
        self.exhausted += report.exhausted;
    }
}

impl std::fmt::Display for Total {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} runs right, {} wrong; {} work requests, {} bytes, {} frames in {:.3} s of virtual time, at most {} events a run\n\
             wires: {} lost, {} doubled, {} late, {} damaged; transport: {} packets sent again, {} timeouts, {} RNR NAKs, {} out of retries",
            self.runs,
            self.failed,
            self.ops,
            self.bytes,
            self.frames,
            self.virtual_ns as f64 / 1e9,
            self.most_steps,
            self.lost,
            self.doubled,
            self.late,
            self.damaged,
            self.retransmits,
            self.timeouts,
            self.rnr,
            self.exhausted
        )
    }
}

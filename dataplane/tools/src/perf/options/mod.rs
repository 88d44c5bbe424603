//! Options of `perf`: perftest's letters and defaults, and some of qperf's comforts.
//!
//! Owns the command line and what clap cannot check. What a run makes of it is [`super::plan`]'s matter.

mod refused;
mod words;

use std::path::PathBuf;
use std::time::Duration;

use ferroce_services::PerfOp;
use ferroce_verbs::{PathMtu, QpType};

use super::sweep::Sweep;
use crate::fail::{Fail, Outcome};
use crate::plane::PlaneArgs;
use crate::values;
use refused::RefusedArgs;
pub use words::{Only, PeerKind, RateUnit, TESTS, Test, Transport, atomic_name, connection_name};

/// Measure latency and bandwidth, with another ferroce or with perftest
///
/// Without HOST it waits for a client, which may be another ferroce or perftest's program of the same test. Latency
/// is half the round trip for send and write and the whole trip for read and atomic; JSON has whole round trips.
#[derive(Clone, Debug, clap::Args)]
#[command(next_line_help = true, disable_version_flag = true)]
#[command(override_usage = "\n  \
    ferroce perf TEST [OPTIONS]              server\n  \
    ferroce perf TEST [OPTIONS] HOST         client\n  \
    ferroce perf serve [OPTIONS]             server of any test, for ferroces\n  \
    ferroce perf --batch FILE [OPTIONS] HOST client of `ferroce perf serve`")]
#[command(after_help = "TEST: send-lat, send-bw, write-lat, write-bw, read-lat, read-bw, atomic-lat,\n\
    atomic-bw. Between two ferroces the client decides; options given to the server\n\
    must agree. A perftest program wants the same options on both sides.\n\
    Sizes take K, M, G (1024) and k, m, g (1000). Defaults are perftest's: -s 65536\n\
    for bw, 2 for lat, 8 for atomics; -n 1000 (write-bw 5000); -t 128 (lat 1);\n\
    -r 512; -Q 100, 1 above 8192 bytes.")]
pub struct PerfArgs {
    /// Test, and the server to connect to
    #[arg(value_name = "TEST [HOST]", num_args = 0..=2, hide = true)]
    pub words: Vec<String>,
    /// The test itself.
    #[command(flatten)]
    pub load: LoadArgs,
    /// Pace.
    #[command(flatten)]
    pub pace: PaceArgs,
    /// Queue pairs and their path.
    #[command(flatten)]
    pub path: PathArgs,
    /// What is told.
    #[command(flatten)]
    pub report: ReportArgs,
    /// The other side.
    #[command(flatten)]
    pub peer: PeerArgs,
    /// The data plane.
    #[command(flatten)]
    pub plane: PlaneArgs,
    /// Known and refused.
    #[command(flatten)]
    pub refused: RefusedArgs,
}

/// What is sent, how often, how deep.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Test", next_line_help = true)]
pub struct LoadArgs {
    /// What carries the test: rdma, tcp, udp (the kernel's, to compare with)
    #[arg(long, value_enum, hide_possible_values = true, value_name = "WHAT")]
    pub transport: Option<Transport>,
    /// Connection: RC, UC (send, write), UD (send) [RC]
    #[arg(short = 'c', long, value_name = "TYPE", value_parser = words::connection)]
    pub connection: Option<QpType>,
    /// Bytes of a message
    #[arg(short = 's', long, value_name = "SIZE", value_parser = values::size)]
    pub size: Option<u32>,
    /// Sizes from 2 to 8388608 bytes, doubling (UD: up to the MTU)
    #[arg(short = 'a', long, conflicts_with = "size")]
    pub all: bool,
    /// Messages measured, per queue pair
    #[arg(short = 'n', long, value_name = "ITERS")]
    pub iters: Option<u64>,
    /// Measure for so many seconds instead of a count
    #[arg(short = 'D', long, value_name = "SECONDS", value_parser = values::seconds, conflicts_with = "iters")]
    pub duration: Option<Duration>,
    /// With -D: seconds at both ends not measured [a quarter, whole seconds]
    #[arg(short = 'f', long, value_name = "SECONDS", value_parser = values::seconds, requires = "duration")]
    pub margin: Option<Duration>,
    /// Go on until interrupted, with a line every -D seconds [5] (bw)
    #[arg(long = "run_infinitely", alias = "run-infinitely")]
    pub run_infinitely: bool,
    /// Messages before the measurement, per queue pair [0]
    #[arg(long, value_name = "ITERS")]
    pub warmup: Option<u64>,
    /// Both sides send (bw)
    #[arg(short = 'b', long)]
    pub bidirectional: bool,
    /// Send work requests outstanding, per queue pair
    #[arg(short = 't', long = "tx-depth", value_name = "DEPTH")]
    pub tx_depth: Option<u32>,
    /// Receives posted, per queue pair
    #[arg(short = 'r', long = "rx-depth", value_name = "DEPTH")]
    pub rx_depth: Option<u32>,
    /// One completion in so many messages
    #[arg(short = 'Q', long = "cq-mod", value_name = "COUNT")]
    pub cq_mod: Option<u32>,
    /// Messages posted together (bw) [1]
    #[arg(short = 'l', long = "post_list", alias = "post-list", value_name = "COUNT")]
    pub post_list: Option<u32>,
    /// Messages up to so many bytes are posted inline [0]
    #[arg(short = 'I', long = "inline_size", alias = "inline-size", value_name = "BYTES")]
    pub inline_size: Option<u32>,
    /// Sleep on completion events instead of polling
    #[arg(short = 'e', long)]
    pub events: bool,
    /// FETCH_AND_ADD or CMP_AND_SWAP [FETCH_AND_ADD]
    #[arg(short = 'A', long = "atomic_type", alias = "atomic-type", value_name = "TYPE", value_parser = words::atomic)]
    pub atomic: Option<PerfOp>,
    /// Compare the data of every message; slower
    #[arg(long = "data_validation", alias = "data-validation", alias = "check")]
    pub check: bool,
    /// Seed of the data [1]
    #[arg(long, value_name = "SEED")]
    pub seed: Option<u64>,
    /// A test per value.
    #[arg(
        long,
        help = "A test per value: VAR:FIRST:LAST:STEP, such as size:1:64K:*2 or\nqp:1:8:+1. VAR: \
                size, iters, qp, tx-depth, rx-depth, cq-mod,\npost_list, inline_size, rate_limit, outs, mtu",
        value_name = "SPEC", value_parser = Sweep::parse, conflicts_with = "all")]
    pub sweep: Option<Sweep>,
}

/// How fast.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Pace", next_line_help = true)]
pub struct PaceArgs {
    /// Cap of the rate
    #[arg(long = "rate_limit", alias = "rate-limit", value_name = "RATE", value_parser = words::positive)]
    pub limit: Option<f64>,
    /// Unit of the cap: M (MiB/sec), g (Gb/sec), p (messages/sec) [g]
    #[arg(long = "rate_units", alias = "rate-units", value_name = "UNIT", value_parser = words::rate_unit)]
    pub units: Option<RateUnit>,
    /// Messages sent at once under a cap [tx-depth; lat 1]
    #[arg(long = "burst_size", alias = "burst-size", value_name = "COUNT")]
    pub burst: Option<u32>,
    /// Accepted: SW
    #[arg(long = "rate_limit_type", value_name = "TYPE", value_parser = words::rate_type, hide = true)]
    pub limit_type: Option<()>,
    /// Latency free of coordinated omission.
    #[arg(
        long = "open-loop",
        alias = "open_loop",
        requires = "limit",
        help = "Latency at the rate of --rate_limit, measured from when each message\n\
                was due: what waits for a slow one is not omitted"
    )]
    pub open_loop: bool,
}

/// Queue pairs and the way between them.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Queue pairs and path", next_line_help = true)]
pub struct PathArgs {
    /// Queue pairs [1]
    #[arg(short = 'q', long = "qp", value_name = "COUNT")]
    pub qps: Option<u32>,
    /// Path MTU: 256, 512, 1024, 2048, 4096 [largest that both sides carry]
    #[arg(short = 'm', long, value_name = "BYTES", value_parser = values::mtu)]
    pub mtu: Option<PathMtu>,
    /// Index into our GIDs
    #[arg(short = 'x', long = "gid-index", value_name = "INDEX")]
    pub gid_index: Option<usize>,
    /// ACK timeout: 4.096 us x 2^N [14]
    #[arg(short = 'u', long = "qp-timeout", value_name = "N", value_parser = clap::value_parser!(u8).range(0..=31))]
    pub qp_timeout: Option<u8>,
    /// Transport retries [7]
    #[arg(long = "retry_count", alias = "retry-count", value_name = "N", value_parser = clap::value_parser!(u8).range(0..=7))]
    pub retry_count: Option<u8>,
    /// READs and atomics outstanding [the device's limit]
    #[arg(short = 'o', long = "outs", value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=128))]
    pub outs: Option<u8>,
    /// Service level [0]
    #[arg(short = 'S', long, value_name = "SL", value_parser = clap::value_parser!(u8).range(0..=7))]
    pub sl: Option<u8>,
    /// Traffic class (DSCP x 4 + ECN) [0]
    #[arg(short = 'T', long = "tos", alias = "tclass", value_name = "TOS")]
    pub tos: Option<u8>,
    /// Flow label [0]
    #[arg(long = "flow_label", alias = "flow-label", value_name = "LABEL", value_parser = clap::value_parser!(u32).range(0..=0xf_ffff))]
    pub flow_label: Option<u32>,
    /// Hop limit [64]
    #[arg(short = 'L', long = "hop_limit", alias = "hop-limit", value_name = "HOPS")]
    pub hop_limit: Option<u8>,
}

/// What is told, and how.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Report", next_line_help = true)]
pub struct ReportArgs {
    /// Our own JSON: one object per test, a line each, instead of text
    #[arg(long)]
    pub json: bool,
    /// Comma-separated values with a head, instead of text
    #[arg(long, conflicts_with = "json")]
    pub csv: bool,
    /// Also perftest's JSON, to perftest_out.json
    #[arg(long = "out_json", alias = "out-json")]
    pub out_json: bool,
    /// Its file
    #[arg(long = "out_json_file", alias = "out-json-file", value_name = "FILE", requires = "out_json")]
    pub out_json_file: Option<PathBuf>,
    /// Print one number alone: bandwidth, message_rate or latency
    #[arg(long, value_name = "WHAT", value_parser = words::only)]
    pub output: Option<Only>,
    /// Bandwidth in Gb/sec
    #[arg(long = "report_gbits", alias = "report-gbits")]
    pub gbits: bool,
    /// With -b: the two directions apart, too
    #[arg(long = "report-both", alias = "report_both", requires = "bidirectional")]
    pub both: bool,
    /// No peak bandwidth
    #[arg(short = 'N', long = "noPeak")]
    pub no_peak: bool,
    /// Print the distribution of latencies, shortest first
    #[arg(short = 'H', long = "report-histogram")]
    pub histogram: bool,
    /// Print all latencies in order (the first 4 million)
    #[arg(short = 'U', long = "report-unsorted")]
    pub unsorted: bool,
    /// Latencies in cycles of the CPU clock
    #[arg(short = 'C', long = "report-cycles")]
    pub cycles: bool,
    /// One more column: CPU in use, of all cores (with -D)
    #[arg(long = "cpu_util", alias = "cpu-util")]
    pub cpu_util: bool,
    /// Percentiles and CPU of the run, on lines of their own
    #[arg(long)]
    pub percentiles: bool,
    /// Fail below this average bandwidth, in the unit of the report
    #[arg(short = 'w', long = "limit_bw", alias = "limit-bw", value_name = "BW", value_parser = words::positive)]
    pub limit_bw: Option<f64>,
    /// Fail below so many million messages a second
    #[arg(short = 'y', long = "limit_msgrate", alias = "limit-msgrate", value_name = "MPPS", value_parser = words::positive)]
    pub limit_msgrate: Option<f64>,
    /// Print counters of port and engine at the end
    #[arg(long)]
    pub stats: bool,
    /// Tell of progress also where standard error is no terminal
    #[arg(long)]
    pub progress: bool,
    /// Version of the program
    #[arg(short = 'V', long = "version", action = clap::ArgAction::Version)]
    pub version: Option<bool>,
    /// Accepted and ignored: there is no cpufreq warning
    #[arg(short = 'F', long = "CPU-freq")]
    pub cpu_freq: bool,
}

/// The other side and how to meet it.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Peer", next_line_help = true)]
pub struct PeerArgs {
    /// TCP port of the set-up
    #[arg(short = 'p', long, value_name = "PORT", default_value_t = 18515)]
    pub port: u16,
    /// Who the peer is: auto, perftest, ferroce
    #[arg(long = "peer", value_enum, hide_possible_values = true, value_name = "WHO", default_value_t = PeerKind::Auto)]
    pub peer_kind: PeerKind,
    /// Seconds to wait for the peer [server 60, 0 is for ever; client 2]
    #[arg(long, value_name = "SECONDS", value_parser = values::seconds)]
    pub wait: Option<Duration>,
    /// Tests from a file: a line each, with its options
    #[arg(long, value_name = "FILE", conflicts_with = "sweep")]
    pub batch: Option<PathBuf>,
    /// With --batch: go on after a test that failed
    #[arg(long = "keep-going", requires = "batch")]
    pub keep_going: bool,
    /// With serve: end after so many clients
    #[arg(long, value_name = "COUNT")]
    pub clients: Option<u64>,
}

/// What the words of the command line ask for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Job {
    /// Wait for a client of this test.
    Server(Test),
    /// Wait for clients of any test.
    Serve,
    /// Run this test with a server.
    Client(Test, String),
    /// Run the tests of the file with a server.
    Batch(PathBuf, String),
}

impl PerfArgs {
    /// What is to be done.
    pub fn job(&self) -> Outcome<Job> {
        let words: Vec<&str> = self.words.iter().map(String::as_str).collect();
        let no_test = |word: &str| Fail::usage(format!("{word:?} is not a test: allowed are {TESTS}, serve"));
        if let Some(file) = &self.peer.batch {
            return match words[..] {
                [host] => Ok(Job::Batch(file.clone(), host.into())),
                [] => Err(Fail::usage("--batch needs the HOST where `ferroce perf serve` runs")),
                _ => Err(Fail::usage("--batch takes the tests from its file: give HOST alone")),
            };
        }
        match words[..] {
            [] => Err(Fail::usage(format!("which test? Allowed are {TESTS}, serve (see --help)"))),
            ["serve"] => Ok(Job::Serve),
            ["serve", host] => {
                Err(Fail::usage(format!("serve waits for clients: it takes no HOST ({host})")))
            }
            [test] => Test::from_text(test).map(Job::Server).ok_or_else(|| no_test(test)),
            [test, host, ..] => {
                Test::from_text(test).map(|t| Job::Client(t, host.into())).ok_or_else(|| no_test(test))
            }
        }
    }

    /// The transport.
    pub fn transport(&self) -> Transport {
        self.load.transport.unwrap_or(Transport::Rdma)
    }

    /// True where standard output is for programs: no header, no words.
    pub fn is_quiet(&self) -> bool {
        self.report.json || self.report.csv || self.report.output.is_some()
    }

    /// What clap cannot check, before anything is opened.
    pub fn check(&self) -> Outcome<()> {
        self.refused.check()?;
        let wrong = |text: &str| Err(Fail::usage(text));
        if self.load.events && self.plane.idle == crate::plane::Idle::Spin {
            return wrong("-e sleeps while waiting: it does not go with --idle spin");
        }
        if self.load.events && self.load.duration.is_some() && self.peer.peer_kind == PeerKind::Perftest {
            return wrong("-e does not go with -D: perftest has no such test");
        }
        if self.load.run_infinitely && (self.load.iters.is_some() || self.load.all) {
            return wrong("--run_infinitely does not go with -n or -a");
        }
        if self.load.duration.is_some() && self.load.all {
            return wrong("-D does not go with -a: use --sweep size:2:8M:*2");
        }
        if self.report.cpu_util && self.load.duration.is_none() {
            return wrong("--cpu_util needs -D, as perftest does");
        }
        Ok(())
    }
}

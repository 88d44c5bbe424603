//! The command line. Objects, verbs and their arguments; no meaning.
//!
//! Owns the words. Objects and verbs may be shortened as long as they stay unambiguous, as with iproute2; the verb that
//! is left out is `show`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

use crate::number;

const AFTER: &str = "\
Objects and verbs may be shortened: `ferroce res sh qp` is `ferroce resource
show qp`; without a verb it is show.

Exit status: 0 done, 1 refused or failed, 2 wrong usage, 3 ferroce-ctld is not
running, 4 what answers speaks another protocol.";

/// Looks at and changes ferroce appliances, through the control process.
#[derive(Parser, Debug)]
#[command(name = "ferroce", version, max_term_width = 80, infer_subcommands = true, after_help = AFTER)]
#[command(disable_help_subcommand = true, propagate_version = false)]
pub struct Cli {
    /// Options of all verbs.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// Options of all verbs.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Common options")]
pub struct Global {
    /// Print JSON: the form that scripts may rely on
    #[arg(short, long, global = true)]
    pub json: bool,
    /// Print JSON indented
    #[arg(short, long, global = true)]
    pub pretty: bool,
    /// Print more of each object
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub details: u8,
    /// Folder of the control process's sockets
    #[arg(long, global = true, value_name = "DIR", default_value = "/run/ferroce")]
    pub run_dir: PathBuf,
    /// Socket of the control process [default: ctl.sock in that folder, or
    /// ro.sock where the user may only read]
    #[arg(short, long, global = true, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Give up when no answer comes for so many seconds
    #[arg(long, global = true, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=86400))]
    pub timeout: u32,
}

/// What to do.
#[derive(Subcommand, Debug)]
pub enum Verb {
    /// Control process and appliances at one glance, with every fallback in use
    Status {
        /// Only this device
        dev: Option<String>,
    },
    /// Devices: one for each appliance
    Dev {
        /// What to do
        #[command(subcommand)]
        verb: Option<DevVerb>,
    },
    /// Ports of the devices
    Link {
        /// What to do
        #[command(subcommand)]
        verb: Option<LinkVerb>,
    },
    /// Objects of the devices
    Resource {
        /// What to do
        #[command(subcommand)]
        verb: Option<ResourceVerb>,
    },
    /// Queue pairs
    Qp {
        /// What to do
        #[command(subcommand)]
        verb: Option<QpVerb>,
    },
    /// Completion queues
    Cq {
        /// What to do
        #[command(subcommand)]
        verb: Option<CqVerb>,
    },
    /// Memory regions
    Mr {
        /// What to do
        #[command(subcommand)]
        verb: Option<MrVerb>,
    },
    /// Protection domains
    Pd {
        /// What to do
        #[command(subcommand)]
        verb: Option<PdVerb>,
    },
    /// Make and connect a pair of reliable queue pairs between two devices
    Connect(ConnectArgs),
    /// Destroy a pair that connect made, on both devices
    Disconnect {
        /// Device
        dev: String,
        /// Its queue pair
        #[arg(value_parser = number::id24)]
        lqpn: u32,
    },
    /// Measure latency or bandwidth between two devices
    Measure(MeasureArgs),
    /// Counters of the devices
    #[command(visible_alias = "stat")]
    Statistic {
        /// What to do
        #[command(subcommand)]
        verb: Option<StatisticVerb>,
    },
    /// Call a method of the control process
    Rpc {
        /// Its name; rpc_get_methods lists them all
        method: String,
        /// Its params: a JSON object
        params: Option<String>,
    },
    /// Versions of this command and of the control process
    Version,
    /// Print completions for a shell
    Completions {
        /// Shell
        shell: Shell,
    },
    /// Write the man pages into a folder
    Man {
        /// Folder
        dir: PathBuf,
    },
    /// Exchange messages with ibv_rc_pingpong (ferroce-tools)
    #[command(disable_help_flag = true)]
    Pingpong {
        /// Handed over
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Measure, with another ferroce or with perftest, over RDMA or kernel sockets (ferroce-tools)
    #[command(disable_help_flag = true)]
    Perf {
        /// Handed over
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Puts the measurements that scripts/demo collected into one table
    #[command(hide = true)]
    DemoReport {
        /// Folder with the measurements
        dir: PathBuf,
    },
}

/// Verbs of `dev`.
#[derive(Subcommand, Debug)]
#[command(infer_subcommands = true, disable_help_subcommand = true)]
pub enum DevVerb {
    /// List devices
    #[command(alias = "list")]
    Show {
        /// Only this one
        dev: Option<String>,
    },
}

/// Verbs of `link`.
#[derive(Subcommand, Debug)]
#[command(infer_subcommands = true, disable_help_subcommand = true)]
pub enum LinkVerb {
    /// List ports
    #[command(alias = "list")]
    Show {
        /// Only this one: DEV/PORT, or all of DEV
        link: Option<String>,
    },
}

/// Verbs of `statistic`.
#[derive(Subcommand, Debug)]
#[command(infer_subcommands = true, disable_help_subcommand = true)]
pub enum StatisticVerb {
    /// List counters
    #[command(alias = "list")]
    Show {
        /// Only these: link DEV/PORT, or dev DEV
        #[arg(value_name = "SELECTOR")]
        words: Vec<String>,
    },
}

/// Verbs of `resource`.
#[derive(Subcommand, Debug)]
#[command(infer_subcommands = true, disable_help_subcommand = true)]
pub enum ResourceVerb {
    /// Count objects, or list those of one kind
    ///
    /// [DEV], or a kind (qp, cq, mr, pd), then a selector (link DEV/PORT or
    /// dev DEV), then filters: a key of the listing and a value each, such as
    /// state RTS, lqpn 5 or lqpn 1-9,12.
    #[command(alias = "list")]
    Show {
        /// [DEV] or KIND [link DEV/PORT | dev DEV] [KEY VALUE]...
        #[arg(value_name = "WORDS")]
        words: Vec<String>,
    },
}

/// Selector and filters of a listing.
#[derive(Args, Debug, Default)]
pub struct Filter {
    /// [link DEV/PORT | dev DEV] [KEY VALUE]...
    #[arg(value_name = "WORDS")]
    pub words: Vec<String>,
}

/// Verbs of `pd`.
#[derive(Subcommand, Debug)]
#[command(infer_subcommands = true, disable_help_subcommand = true)]
pub enum PdVerb {
    /// List protection domains
    #[command(alias = "list")]
    Show(Filter),
    /// Make one
    Create {
        /// Device
        dev: String,
    },
    /// Destroy one
    #[command(alias = "delete")]
    Destroy {
        /// Device
        dev: String,
        /// Which
        #[arg(value_parser = number::id)]
        pdn: u32,
    },
}

/// A right of a memory region.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// The owner may receive into it
    LocalWrite,
    /// A peer may WRITE
    RemoteWrite,
    /// A peer may READ
    RemoteRead,
    /// A peer may do atomics
    RemoteAtomic,
}

/// Verbs of `mr`.
#[derive(Subcommand, Debug)]
#[command(infer_subcommands = true, disable_help_subcommand = true)]
pub enum MrVerb {
    /// List memory regions
    #[command(alias = "list")]
    Show(Filter),
    /// Take memory of the appliance and register it
    Create {
        /// Device
        dev: String,
        /// Protection domain
        #[arg(long, value_parser = number::id)]
        pdn: u32,
        /// Bytes, with K M G
        #[arg(long, value_parser = number::size)]
        size: u64,
        /// Rights beyond local reading
        #[arg(long, value_delimiter = ',', default_value = "local-write")]
        access: Vec<Right>,
    },
    /// End a registration
    #[command(alias = "delete")]
    Destroy {
        /// Device
        dev: String,
        /// Its local key
        #[arg(value_parser = number::id)]
        lkey: u32,
    },
}

/// Verbs of `cq`.
#[derive(Subcommand, Debug)]
#[command(infer_subcommands = true, disable_help_subcommand = true)]
pub enum CqVerb {
    /// List completion queues
    #[command(alias = "list")]
    Show(Filter),
    /// Make one
    Create {
        /// Device
        dev: String,
        /// Entries at least
        #[arg(long, default_value_t = 256)]
        cqe: u32,
        /// Worker that it lives on
        #[arg(long, default_value_t = 0)]
        worker: u8,
    },
    /// Destroy one
    #[command(alias = "delete")]
    Destroy {
        /// Device
        dev: String,
        /// Which
        #[arg(value_parser = number::id)]
        cqn: u32,
    },
}

/// Type of a queue pair.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpTypeArg {
    /// Reliable connection
    Rc,
    /// Unreliable connection
    Uc,
    /// Unreliable datagram
    Ud,
}

/// Verbs of `qp`.
#[derive(Subcommand, Debug)]
#[command(infer_subcommands = true, disable_help_subcommand = true)]
pub enum QpVerb {
    /// List queue pairs
    #[command(alias = "list")]
    Show(Filter),
    /// Make one, in RESET
    Create {
        /// Device
        dev: String,
        /// Type
        #[arg(long, value_enum, default_value = "rc")]
        r#type: QpTypeArg,
        /// Protection domain
        #[arg(long, value_parser = number::id)]
        pdn: u32,
        /// Completion queue of sends, and of receives unless --recv-cqn
        #[arg(long, value_parser = number::id)]
        cqn: u32,
        /// Completion queue of receives
        #[arg(long, value_parser = number::id)]
        recv_cqn: Option<u32>,
        /// Work requests of each queue
        #[arg(long, default_value_t = 128)]
        max_wr: u32,
    },
    /// Bring one into another state
    Modify(Box<ModifyArgs>),
    /// Destroy one
    #[command(alias = "delete")]
    Destroy {
        /// Device
        dev: String,
        /// Which
        #[arg(value_parser = number::id24)]
        lqpn: u32,
    },
}

/// State to bring a queue pair into.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateArg {
    /// From any state
    Reset,
    /// From RESET
    Init,
    /// From INIT: needs --dgid, --rqpn and --rq-psn
    Rtr,
    /// From RTR: needs --sq-psn; or from SQD
    Rts,
    /// From RTS
    Sqd,
    /// From any state but RESET
    Err,
}

/// Arguments of `qp modify`.
#[derive(Args, Debug)]
pub struct ModifyArgs {
    /// Device
    pub dev: String,
    /// Which
    #[arg(value_parser = number::id24)]
    pub lqpn: u32,
    /// Into which state
    #[arg(value_enum, ignore_case = true)]
    pub state: StateArg,
    /// Address of the peer (to RTR)
    #[arg(long)]
    pub dgid: Option<String>,
    /// Address of ours [default: chosen by the route]
    #[arg(long)]
    pub sgid: Option<String>,
    /// The peer's queue pair (to RTR)
    #[arg(long, value_parser = number::id24)]
    pub rqpn: Option<u32>,
    /// First PSN that we expect (to RTR)
    #[arg(long, value_parser = number::id24)]
    pub rq_psn: Option<u32>,
    /// First PSN that we send (to RTS)
    #[arg(long, value_parser = number::id24)]
    pub sq_psn: Option<u32>,
    /// Payload bytes of a full packet (to RTR)
    #[arg(long, default_value_t = 1024)]
    pub path_mtu: u32,
    /// DSCP x 4 + ECN (to RTR)
    #[arg(long, default_value_t = 0)]
    pub traffic_class: u8,
    /// ACK timeout, 4.096 us x 2^N (to RTS)
    #[arg(long, default_value_t = 14)]
    pub timeout_exponent: u8,
    /// Transport retries (to RTS)
    #[arg(long, default_value_t = 7)]
    pub retry_cnt: u8,
    /// RNR retries; 7 is for ever (to RTS)
    #[arg(long, default_value_t = 6)]
    pub rnr_retry: u8,
    /// READs outstanding, ours and the peer's
    #[arg(long, default_value_t = 16)]
    pub rd_atomic: u8,
}

/// Arguments of `connect`.
#[derive(Args, Debug)]
pub struct ConnectArgs {
    /// One device
    pub dev: String,
    /// The other one
    pub peer: String,
    /// Also make a memory region of so many bytes on both sides
    #[arg(long, value_parser = number::size, default_value = "0")]
    pub size: u64,
    /// Work requests of each queue
    #[arg(long, default_value_t = 128)]
    pub max_wr: u32,
    /// Payload bytes of a full packet [default: the largest of both ports]
    #[arg(long)]
    pub path_mtu: Option<u32>,
    /// Address of DEV [default: chosen by the route]
    #[arg(long)]
    pub sgid: Option<String>,
    /// Address of PEER [default: the first that DEV has a route to]
    #[arg(long)]
    pub dgid: Option<String>,
    /// DSCP x 4 + ECN
    #[arg(long, default_value_t = 0)]
    pub traffic_class: u8,
    /// Worker on both sides [default: the next in turn]
    #[arg(long)]
    pub worker: Option<u8>,
    /// ACK timeout, 4.096 us x 2^N: 14 is 67 ms. On a host that may keep a
    /// worker from running for long, take more
    #[arg(long, default_value_t = 14)]
    pub timeout_exponent: u8,
    /// Transport retries
    #[arg(long, default_value_t = 7)]
    pub retry_cnt: u8,
    /// RNR retries; 7 is for ever
    #[arg(long, default_value_t = 6)]
    pub rnr_retry: u8,
}

/// What moves the data.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpArg {
    /// SEND
    Send,
    /// RDMA WRITE
    Write,
    /// RDMA READ
    Read,
}

/// What is measured.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModeArg {
    /// Whole round trips, one at a time
    Lat,
    /// Bandwidth
    Bw,
}

/// Arguments of `measure`.
#[derive(Args, Debug)]
pub struct MeasureArgs {
    /// Device that measures
    pub dev: String,
    /// Device that answers
    pub peer: String,
    /// What moves the data
    #[arg(long, value_enum, default_value = "send")]
    pub op: OpArg,
    /// What is measured
    #[arg(long, value_enum, default_value = "lat")]
    pub mode: ModeArg,
    /// Bytes of a message, with K M G; several separated by commas
    #[arg(long, value_parser = number::message_size, value_delimiter = ',', default_value = "64")]
    pub size: Vec<u32>,
    /// Messages measured
    #[arg(long, default_value_t = 1000)]
    pub iters: u64,
    /// Messages before those, not measured
    #[arg(long, default_value_t = 100)]
    pub warmup: u64,
    /// Messages outstanding (bw)
    #[arg(long, default_value_t = 128)]
    pub depth: u32,
    /// Payload bytes of a full packet [default: the largest of both ports]
    #[arg(long)]
    pub path_mtu: Option<u32>,
    /// Post messages of at most so many bytes inline
    #[arg(long, default_value_t = 0)]
    pub inline_size: u32,
    /// Compare all data where it arrives; slower
    #[arg(long)]
    pub check: bool,
    /// Use this connected queue pair of DEV instead of a new pair
    #[arg(long, value_parser = number::id24)]
    pub lqpn: Option<u32>,
    /// Worker on both sides [default: the next in turn]
    #[arg(long)]
    pub worker: Option<u8>,
    /// ACK timeout of a new pair, 4.096 us x 2^N: 17 is 0.54 s
    #[arg(long, default_value_t = 17)]
    pub timeout_exponent: u8,
    /// Fail when it takes longer, seconds
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=600))]
    pub deadline: u32,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split_whitespace())
    }

    #[test]
    fn the_grammar_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn objects_and_verbs_may_be_shortened_and_show_left_out() {
        for line in [
            "ferroce resource show qp state RTS",
            "ferroce res s qp state RTS",
            "ferroce -j re sh qp state RTS",
        ] {
            match parse(line).expect(line).verb {
                Verb::Resource { verb: Some(ResourceVerb::Show { words }) } => {
                    assert_eq!(words, ["qp", "state", "RTS"], "{line}");
                }
                other => panic!("{line}: {other:?}"),
            }
        }
        assert!(matches!(parse("ferroce dev").expect("show").verb, Verb::Dev { verb: None }));
        assert!(matches!(
            parse("ferroce stat").expect("an exact alias").verb,
            Verb::Statistic { verb: None }
        ));
        assert!(matches!(parse("ferroce status").expect("exact").verb, Verb::Status { dev: None }));
        assert!(parse("ferroce p").is_err(), "pd, pingpong, perf");
        assert!(parse("ferroce nonsense").is_err());
    }

    #[test]
    fn options_may_stand_anywhere() {
        let cli = parse("ferroce res show qp link fe0/1 state RTS -jpd --run-dir /x").expect("anywhere");
        assert!(cli.global.json && cli.global.pretty && cli.global.details == 1);
        assert_eq!(cli.global.run_dir, PathBuf::from("/x"));
    }

    #[test]
    fn handed_over_verbs_keep_their_options() {
        match parse("ferroce perf send-lat -d X --help").expect("handed over").verb {
            Verb::Perf { args } => assert_eq!(args, ["send-lat", "-d", "X", "--help"]),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn values_are_checked() {
        for bad in [
            "ferroce measure a b --size 4x",
            "ferroce measure a b --op push",
            "ferroce measure a b --deadline 0",
            "ferroce qp destroy a 0x1000000",
            "ferroce qp modify a 1 nowhere",
            "ferroce status --timeout 0",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        match parse("ferroce measure a b --size 64,4K,1m").expect("sizes").verb {
            Verb::Measure(args) => assert_eq!(args.size, [64, 4096, 1_000_000]),
            other => panic!("{other:?}"),
        }
    }

    /// Width of every help page, for terminals of 80 columns.
    #[test]
    fn help_fits_80_columns() {
        fn walk(command: &mut clap::Command, path: &str, wide: &mut Vec<String>) {
            for text in [command.render_help(), command.render_long_help()] {
                let lines = text.to_string();
                wide.extend(lines.lines().filter(|l| l.chars().count() > 80).map(|l| format!("{path}: {l}")));
            }
            for sub in command.get_subcommands_mut() {
                let path = format!("{path} {}", sub.get_name());
                walk(sub, &path, wide);
            }
        }
        let mut command = Cli::command().term_width(80);
        command.build();
        let mut wide = Vec::new();
        walk(&mut command, "ferroce", &mut wide);
        assert!(wide.is_empty(), "{}", wide.join("\n"));
    }
}

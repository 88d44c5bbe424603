//! Options of `perf`: perftest's letters and defaults.

use std::time::Duration;

use ferroce_services::{PerfMode, PerfOp, PerfSpec, Role};
use ferroce_verbs::PathMtu;

use crate::fail::{Fail, Outcome};
use crate::plane::PlaneArgs;
use crate::values;

/// What carries the test.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Transport {
    /// Our own RDMA data plane.
    Rdma,
    /// Kernel TCP.
    Tcp,
    /// Kernel UDP with a window on top.
    Udp,
}

impl Transport {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Rdma => "rdma",
            Transport::Tcp => "tcp",
            Transport::Udp => "udp",
        }
    }
}

/// Which test.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Test {
    /// Operation.
    pub op: PerfOp,
    /// Latency or bandwidth.
    pub mode: PerfMode,
}

impl Test {
    /// `send-lat` and so on.
    pub fn name(self) -> String {
        format!("{}-{}", self.op.name(), self.mode.name())
    }
}

/// `send-lat`, `send_lat`.
pub fn test(text: &str) -> Result<Test, String> {
    let allowed = "send-lat, send-bw, write-lat, write-bw, read-lat, read-bw";
    let wrong = || format!("{text:?} is not a test: allowed are {allowed}");
    let (op, mode) = text.split_once(['-', '_']).ok_or_else(wrong)?;
    let op = match op {
        "send" => PerfOp::Send,
        "write" => PerfOp::Write,
        "read" => PerfOp::Read,
        _ => return Err(wrong()),
    };
    match mode {
        "lat" => Ok(Test { op, mode: PerfMode::Lat }),
        "bw" => Ok(Test { op, mode: PerfMode::Bw }),
        _ => Err(wrong()),
    }
}

/// The connection types there are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OnlyRc;

fn connection(text: &str) -> Result<OnlyRc, String> {
    match text {
        "RC" => Ok(OnlyRc),
        "UC" | "UD" | "XRC" | "DC" | "SRD" | "RawEth" => {
            Err(format!("{text} is not there yet: allowed is RC"))
        }
        _ => Err("allowed is RC".into()),
    }
}

/// Measure latency and bandwidth between two ferroce processes
///
/// Without HOST it waits for a client. Latency is half the round trip for send and write and the whole trip for
/// read; JSON has whole round trips for all.
#[derive(Clone, Debug, clap::Args)]
#[command(next_line_help = true)]
#[command(after_help = "The client decides; options given to the server must agree with the client's.\n\
    Sizes take K, M and G. Defaults as perftest's: -s 65536 for bw and 2 for lat;\n\
    -n 1000 (write-bw 5000); -t 128 (lat 1); -r 512; -Q 100, 1 above 8192 bytes.")]
pub struct PerfArgs {
    /// send-lat, send-bw, write-lat, write-bw, read-lat, read-bw
    #[arg(value_name = "TEST", value_parser = test)]
    pub test: Test,
    /// Server to connect to; without it, be the server
    pub host: Option<String>,
    /// What carries the test
    #[arg(long, value_enum)]
    pub transport: Option<Transport>,
    /// TCP port of the set-up
    #[arg(short = 'p', long, value_name = "PORT", default_value_t = 18515)]
    pub port: u16,
    /// Bytes of a message
    #[arg(short = 's', long, value_name = "SIZE", value_parser = values::size)]
    pub size: Option<u32>,
    /// Sizes from 2 to 8388608 bytes, doubling
    #[arg(short = 'a', long, conflicts_with = "size")]
    pub all: bool,
    /// Messages measured
    #[arg(short = 'n', long, value_name = "ITERS")]
    pub iters: Option<u64>,
    /// Measure for so many seconds instead of a count
    #[arg(short = 'D', long, value_name = "SECONDS", value_parser = values::seconds, conflicts_with = "iters")]
    pub duration: Option<Duration>,
    /// Messages before the measurement [0]
    #[arg(long, value_name = "ITERS")]
    pub warmup: Option<u64>,
    /// Queue pairs: 1
    #[arg(short = 'q', long = "qp", value_name = "COUNT", default_value_t = 1)]
    pub qps: u32,
    /// Connection: RC
    #[arg(short = 'c', long, value_name = "TYPE", default_value = "RC", value_parser = connection)]
    pub connection: OnlyRc,
    /// Send work requests outstanding
    #[arg(short = 't', long, value_name = "DEPTH")]
    pub tx_depth: Option<u32>,
    /// Receives posted
    #[arg(short = 'r', long, value_name = "DEPTH")]
    pub rx_depth: Option<u32>,
    /// One completion in so many messages
    #[arg(short = 'Q', long, value_name = "COUNT")]
    pub cq_mod: Option<u32>,
    /// Messages up to so many bytes are posted inline [0]
    #[arg(short = 'I', long = "inline_size", alias = "inline-size", value_name = "BYTES")]
    pub inline_size: Option<u32>,
    /// Path MTU: 256, 512, 1024, 2048, 4096 [largest that both sides carry]
    #[arg(short = 'm', long, value_name = "BYTES", value_parser = values::mtu)]
    pub mtu: Option<PathMtu>,
    /// Index into our GIDs
    #[arg(short = 'x', long = "gid-index", value_name = "INDEX")]
    pub gid_index: Option<usize>,
    /// ACK timeout: 4.096 us x 2^N
    #[arg(short = 'u', long = "qp-timeout", value_name = "N", default_value_t = 14, value_parser = clap::value_parser!(u8).range(0..=31))]
    pub qp_timeout: u8,
    /// Transport retries
    #[arg(long = "retry_count", alias = "retry-count", value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u8).range(0..=7))]
    pub retry_count: u8,
    /// Service level
    #[arg(short = 'S', long, value_name = "SL", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=7))]
    pub sl: u8,
    /// Traffic class (DSCP x 4 + ECN)
    #[arg(short = 'T', long = "tos", alias = "tclass", value_name = "TOS", default_value_t = 0)]
    pub tos: u8,
    /// Flow label
    #[arg(long = "flow_label", alias = "flow-label", value_name = "LABEL", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=0xf_ffff))]
    pub flow_label: u32,
    /// Hop limit
    #[arg(short = 'L', long = "hop_limit", alias = "hop-limit", value_name = "HOPS", default_value_t = 64)]
    pub hop_limit: u8,
    /// READs outstanding [the device's limit]
    #[arg(short = 'o', long = "outs", value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=128))]
    pub outs: Option<u8>,
    /// Compare the data of every message; slower
    #[arg(long = "data_validation", alias = "data-validation", alias = "check")]
    pub check: bool,
    /// Seed of the data [1]
    #[arg(long, value_name = "SEED")]
    pub seed: Option<u64>,
    /// No peak bandwidth
    #[arg(short = 'N', long = "noPeak")]
    pub no_peak: bool,
    /// Bandwidth in Gb/sec
    #[arg(long = "report_gbits", alias = "report-gbits")]
    pub report_gbits: bool,
    /// Accepted and ignored: there is no cpufreq warning
    #[arg(short = 'F', long = "CPU-freq")]
    pub cpu_freq: bool,
    /// Seconds to wait for the peer [server 60, 0 is for ever; client 2]
    #[arg(long, value_name = "SECONDS", value_parser = values::seconds)]
    pub wait: Option<Duration>,
    /// Print one JSON object per size, a line each, instead of text
    #[arg(long)]
    pub json: bool,
    /// Print counters of port and engine at the end
    #[arg(long)]
    pub stats: bool,
    /// The data plane.
    #[command(flatten)]
    pub plane: PlaneArgs,
}

/// The largest size of `-a`.
const LARGEST_OF_ALL: u32 = 1 << 23;

impl PerfArgs {
    /// What clap cannot check.
    pub fn check(&self) -> Outcome<()> {
        if self.qps != 1 {
            return Err(Fail::usage(format!("qp: asked {}, allowed 1", self.qps)));
        }
        for size in self.sizes() {
            self.spec(Role::Client, size).check().map_err(|e| Fail::usage(e.to_string()))?;
            if size == 0 && self.transport() != Transport::Rdma {
                return Err(Fail::usage("size: asked 0, allowed 1 or more over kernel sockets"));
            }
        }
        Ok(())
    }

    /// The transport.
    pub fn transport(&self) -> Transport {
        self.transport.unwrap_or(Transport::Rdma)
    }

    /// The sizes, in order.
    pub fn sizes(&self) -> Vec<u32> {
        if self.all {
            return std::iter::successors(Some(2u32), |s| Some(s * 2))
                .take_while(|&s| s <= LARGEST_OF_ALL)
                .collect();
        }
        vec![self.size.unwrap_or(if self.test.mode == PerfMode::Lat { 2 } else { 65536 })]
    }

    /// The test of one size as these options say.
    pub fn spec(&self, role: Role, size: u32) -> PerfSpec {
        let base = PerfSpec::new(self.test.op, self.test.mode, role, size);
        // perftest's rule: big messages complete one by one, unless asked otherwise or in a sweep.
        let cq_mod = self.cq_mod.unwrap_or(if self.all { 100 } else { base.cq_mod });
        PerfSpec {
            iters: self.iters.unwrap_or(base.iters),
            warmup: self.warmup.unwrap_or(0),
            duration_ns: self.duration.map(|d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)),
            tx_depth: self.tx_depth.unwrap_or(base.tx_depth),
            rx_depth: self.rx_depth.unwrap_or(base.rx_depth),
            cq_mod,
            inline_bytes: self.inline_size.unwrap_or(0),
            seed: self.seed.unwrap_or(base.seed),
            check_data: self.check,
            ..base
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: PerfArgs,
    }

    fn parse(text: &str) -> Result<PerfArgs, String> {
        let words = std::iter::once("perf").chain(text.split_whitespace());
        Line::try_parse_from(words).map(|l| l.args).map_err(|e| e.to_string())
    }

    #[test]
    fn tests_in_both_spellings() {
        for (text, op, mode) in [
            ("send-lat", PerfOp::Send, PerfMode::Lat),
            ("send_lat", PerfOp::Send, PerfMode::Lat),
            ("write_bw", PerfOp::Write, PerfMode::Bw),
            ("read-bw", PerfOp::Read, PerfMode::Bw),
        ] {
            assert_eq!(test(text), Ok(Test { op, mode }));
        }
        for bad in ["", "send", "sendlat", "atomic-lat", "send-latency"] {
            assert!(test(bad).unwrap_err().contains("read-bw"), "{bad}");
        }
    }

    #[test]
    fn perftests_letters_and_defaults() {
        let args =
            parse("write-bw -d xdp:eth0 -x 1 -s 4096 -n 300 -t 64 -r 32 -Q 7 -I 64 -m 1024 -u 15 -F host")
                .unwrap();
        args.check().unwrap();
        let spec = args.spec(Role::Client, 4096);
        assert_eq!(
            (spec.iters, spec.tx_depth, spec.rx_depth, spec.cq_mod, spec.inline_bytes),
            (300, 64, 32, 7, 64)
        );
        assert_eq!((args.qp_timeout, args.host.as_deref()), (15, Some("host")));
        let plain = parse("send-bw").unwrap();
        assert_eq!(plain.sizes(), [65536]);
        assert_eq!(parse("send-lat").unwrap().sizes(), [2]);
        let all = parse("send-bw -a").unwrap();
        assert_eq!((all.sizes().len(), all.sizes()[0], all.sizes()[22]), (23, 2, 1 << 23));
        assert_eq!(all.spec(Role::Client, 1 << 20).cq_mod, 100);
    }

    #[test]
    fn bad_values_are_refused() {
        for (line, words) in [
            ("send-lat -s 2G", "1073741824"),
            ("send-lat -m 1500", "256, 512"),
            ("send-lat -c UD", "not there yet"),
            ("send-lat -u 32", "0..=31"),
            ("send-lat -D 1 -n 5", "cannot be used with"),
            ("send-lat -a -s 5", "cannot be used with"),
            ("send-lat --transport sctp", "possible values"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(words), "{line}: {error}");
        }
        for line in [
            "send-lat -q 4",
            "send-lat -n 0",
            "write-lat -s 0",
            "send-lat -t 0",
            "send-lat -s 0 --transport tcp",
        ] {
            assert_eq!(parse(line).unwrap().check().unwrap_err().status(), 2, "{line}");
        }
    }
}

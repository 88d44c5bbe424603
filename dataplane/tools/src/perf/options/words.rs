//! Words of `perf`'s options: from text to values. Nothing here knows of the options as a whole.

use std::fmt;

use ferroce_services::{PerfMode, PerfOp};
use ferroce_verbs::QpType;

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

/// Which conversation the set-up is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum PeerKind {
    /// Found out from the peer's first message.
    Auto,
    /// A program of perftest.
    Perftest,
    /// Another ferroce.
    Ferroce,
}

/// Which test. For atomics the operation is fetch-and-add until an option says otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Test {
    /// Operation.
    pub op: PerfOp,
    /// Latency or bandwidth.
    pub mode: PerfMode,
}

/// All tests, for messages.
pub const TESTS: &str = "send-lat, send-bw, write-lat, write-bw, read-lat, read-bw, atomic-lat, atomic-bw";

impl Test {
    /// From `send-lat`, `send_lat`, `ib_send_lat`, or qperf's `rc_lat`-like names without a connection.
    pub fn from_text(text: &str) -> Option<Test> {
        let text = text.strip_prefix("ib_").unwrap_or(text);
        let (op, mode) = text.split_once(['-', '_'])?;
        let op = match op {
            "send" => PerfOp::Send,
            "write" => PerfOp::Write,
            "read" => PerfOp::Read,
            "atomic" => PerfOp::FetchAdd,
            _ => return None,
        };
        match mode {
            "lat" => Some(Test { op, mode: PerfMode::Lat }),
            "bw" => Some(Test { op, mode: PerfMode::Bw }),
            _ => None,
        }
    }
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.op.name(), self.mode.name())
    }
}

/// A connection's name on the command line.
pub fn connection_name(connection: QpType) -> &'static str {
    match connection {
        QpType::Rc => "RC",
        QpType::Uc => "UC",
        QpType::Ud => "UD",
    }
}

/// A connection type.
pub fn connection(text: &str) -> Result<QpType, String> {
    match text {
        "RC" | "rc" => Ok(QpType::Rc),
        "UC" | "uc" => Ok(QpType::Uc),
        "UD" | "ud" => Ok(QpType::Ud),
        "XRC" | "DC" | "SRD" | "RawEth" => Err(format!("{text} is not there: allowed are RC, UC and UD")),
        _ => Err("allowed are RC, UC and UD".into()),
    }
}

/// An atomic operation.
pub fn atomic(text: &str) -> Result<PerfOp, String> {
    match text {
        "FETCH_AND_ADD" => Ok(PerfOp::FetchAdd),
        "CMP_AND_SWAP" => Ok(PerfOp::CmpSwap),
        _ => Err("allowed are FETCH_AND_ADD and CMP_AND_SWAP".into()),
    }
}

/// perftest's name of an atomic.
pub fn atomic_name(op: PerfOp) -> &'static str {
    if op == PerfOp::CmpSwap { "CMP_AND_SWAP" } else { "FETCH_AND_ADD" }
}

/// Unit of `--rate_limit`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RateUnit {
    /// 2^20 bytes a second.
    Mebibytes,
    /// 10^9 bits a second.
    Gigabits,
    /// Messages a second.
    Messages,
}

/// perftest's letters.
pub fn rate_unit(text: &str) -> Result<RateUnit, String> {
    match text {
        "M" => Ok(RateUnit::Mebibytes),
        "g" => Ok(RateUnit::Gigabits),
        "p" => Ok(RateUnit::Messages),
        _ => Err("allowed are M (MiB/sec), g (Gb/sec) and p (messages/sec)".into()),
    }
}

/// Who paces: only software here.
pub fn rate_type(text: &str) -> Result<(), String> {
    match text {
        "SW" => Ok(()),
        "HW" | "PP" => Err(format!("{text} needs an RNIC that paces: allowed is SW")),
        _ => Err("allowed is SW".into()),
    }
}

/// The one number that a run prints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Only {
    /// Average bandwidth.
    Bandwidth,
    /// Millions of messages a second.
    MessageRate,
    /// Average latency.
    Latency,
}

/// perftest's words.
pub fn only(text: &str) -> Result<Only, String> {
    match text {
        "bandwidth" => Ok(Only::Bandwidth),
        "message_rate" => Ok(Only::MessageRate),
        "latency" => Ok(Only::Latency),
        _ => Err("allowed are bandwidth, message_rate and latency".into()),
    }
}

/// A positive number with a fraction.
pub fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value.is_finite() && value > 0.0 => Ok(value),
        _ => Err(format!("{text:?} is not a number above 0")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_in_all_spellings() {
        for (text, op, mode) in [
            ("send-lat", PerfOp::Send, PerfMode::Lat),
            ("send_lat", PerfOp::Send, PerfMode::Lat),
            ("ib_write_bw", PerfOp::Write, PerfMode::Bw),
            ("read-bw", PerfOp::Read, PerfMode::Bw),
            ("atomic_lat", PerfOp::FetchAdd, PerfMode::Lat),
        ] {
            assert_eq!(Test::from_text(text), Some(Test { op, mode }));
        }
        for bad in ["", "send", "sendlat", "swap-lat", "send-latency", "ib_"] {
            assert_eq!(Test::from_text(bad), None, "{bad}");
        }
    }

    #[test]
    fn what_is_not_there_is_named() {
        assert!(connection("XRC").unwrap_err().contains("XRC is not there"));
        assert!(connection("rd").unwrap_err().contains("RC, UC and UD"));
        assert!(rate_type("HW").unwrap_err().contains("allowed is SW"));
        assert!(positive("0").is_err() && positive("NaN").is_err() && positive("2.5") == Ok(2.5));
    }
}

//! What two `perf` processes say to each other: one JSON object per line, over TCP.
//!
//! The version comes first in the hello of both sides and is looked at before anything else, so that different versions
//! can name each other.

use std::time::Duration;

use ferroce_services::PerfReport;
use serde::{Deserialize, Serialize};

use super::plan::Ask;
use crate::fail::{Fail, Outcome};
use crate::net::{Peer, excerpt};

/// Version of this conversation.
pub const VERSION: u64 = 2;
/// Longest line.
const LONGEST: usize = 64 * 1024;

/// Most tests of one session.
pub const MOST_TESTS: usize = 256;

/// What the client wants; a server's explicit options must agree.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// Version of the conversation.
    pub ferroce_perf: u64,
    /// Version of the program.
    pub version: String,
    /// `rdma`, `tcp` or `udp`.
    pub transport: String,
    /// One after the other.
    pub tests: Vec<Ask>,
}

/// The server's answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HelloAnswer {
    /// Version of the conversation.
    pub ferroce_perf: u64,
    /// Version of the program.
    pub version: String,
    /// Why not.
    pub error: Option<String>,
}

/// One side of a test.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Endpoint {
    /// Queue pairs.
    Rdma(RdmaEnd),
    /// A TCP port to connect to; 0 on the client.
    Tcp {
        /// Port.
        port: u16,
    },
    /// A UDP socket.
    Udp {
        /// Port.
        port: u16,
        /// Marks its datagrams.
        cookie: u32,
        /// Bytes that may be under way to it.
        window_bytes: u32,
    },
}

/// Queue pairs and their memory.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RdmaEnd {
    /// The queue pairs, in order.
    pub qps: Vec<QpEnd>,
    /// Address, as an IPv6 address.
    pub gid: String,
    /// Largest path MTU in bytes.
    pub mtu: u32,
    /// READs and atomics outstanding.
    pub reads: u8,
}

/// One queue pair and its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct QpEnd {
    /// Queue pair number.
    pub qpn: u32,
    /// First PSN.
    pub psn: u32,
    /// Key of the memory.
    pub rkey: u32,
    /// Its first byte.
    pub addr: u64,
}

/// What a side measured.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Measured {
    /// Messages.
    pub messages: u64,
    /// In that time.
    pub elapsed_ns: u64,
    /// 10^9 bytes per second.
    pub gbytes_per_s: f64,
    /// Best window.
    pub gbytes_per_s_peak: Option<f64>,
    /// Messages per second.
    pub msgs_per_s: f64,
}

impl Measured {
    /// Of a report.
    pub fn of(report: &PerfReport) -> Self {
        Measured {
            messages: report.messages,
            elapsed_ns: report.elapsed_ns,
            gbytes_per_s: report.gbytes_per_s,
            gbytes_per_s_peak: report.peak_gbytes_per_s,
            msgs_per_s: report.msgs_per_s,
        }
    }
}

/// Everything after the hellos.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Message {
    /// One side of the next test.
    Endpoint {
        /// Its place in the hello's list, to be sure.
        test: usize,
        /// The side.
        endpoint: Endpoint,
    },
    /// The server is connected and serves.
    Ready,
    /// This side has finished the test.
    Finished {
        /// What it measured, if it measures.
        measured: Option<Measured>,
    },
    /// This side gives up.
    Failed {
        /// Why.
        error: String,
    },
}

fn send(peer: &mut Peer, value: &impl Serialize) -> Outcome<()> {
    let mut line = serde_json::to_vec(value).map_err(|e| Fail::failed(format!("JSON: {e}")))?;
    line.push(b'\n');
    peer.send(&line)
}

/// A hello's line, after a look at its version.
fn versioned<T: for<'d> Deserialize<'d>>(name: &str, line: &[u8]) -> Outcome<T> {
    let strange =
        || Fail::failed(format!("peer {name} does not speak ferroce perf: it sent {}", excerpt(line)));
    let value: serde_json::Value = serde_json::from_slice(line).map_err(|_| strange())?;
    let version = value.get("ferroce_perf").and_then(serde_json::Value::as_u64).ok_or_else(strange)?;
    if version != VERSION {
        let program = value.get("version").and_then(serde_json::Value::as_str).unwrap_or("unknown");
        return Err(Fail::failed(format!(
            "peer {name} speaks version {version} of ferroce perf (program {}), this side version {VERSION} (program {}): \
             use the same program on both sides",
            excerpt(program.as_bytes()),
            env!("CARGO_PKG_VERSION")
        )));
    }
    serde_json::from_value(value).map_err(|e| Fail::failed(format!("peer {name}: bad hello: {e}")))
}

/// The client's hello and the server's answer to it.
pub fn ask(peer: &mut Peer, hello: &Hello, limit: Duration) -> Outcome<()> {
    send(peer, hello)?;
    let line = peer.receive_line(LONGEST, limit, "its hello")?;
    let answer: HelloAnswer = versioned(peer.name(), &line)?;
    match answer.error {
        None => Ok(()),
        Some(error) => Err(Fail::failed(format!("peer {} refuses: {error}", peer.name()))),
    }
}

/// The client's hello. The server answers with [`answer`], also if this fails.
pub fn hear(peer: &mut Peer, limit: Duration) -> Outcome<Hello> {
    let line = peer.receive_line(LONGEST, limit, "its hello")?;
    versioned(peer.name(), &line)
}

/// The server's answer.
pub fn answer(peer: &mut Peer, error: Option<String>) -> Outcome<()> {
    send(peer, &HelloAnswer { ferroce_perf: VERSION, version: env!("CARGO_PKG_VERSION").into(), error })
}

/// Says something.
pub fn say(peer: &mut Peer, message: &Message) -> Outcome<()> {
    send(peer, message)
}

/// Hears the next thing; a failure of the peer is one of ours.
pub fn listen(peer: &mut Peer, limit: Duration, what: &str) -> Outcome<Message> {
    let line = peer.receive_line(LONGEST, limit, what)?;
    match serde_json::from_slice(&line) {
        Ok(Message::Failed { error }) => Err(Fail::failed(format!("peer {} failed: {error}", peer.name()))),
        Ok(message) => Ok(message),
        Err(error) => Err(Fail::failed(format!(
            "peer {}: instead of {what}: {} ({error})",
            peer.name(),
            excerpt(&line)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_these_texts() {
        let qp = QpEnd { qpn: 17, psn: 5, rkey: 9, addr: 4096 };
        let rdma = RdmaEnd { qps: vec![qp], gid: "::ffff:10.9.0.1".into(), mtu: 1024, reads: 16 };
        for (message, text) in [
            (Message::Ready, r#"{"type":"ready"}"#),
            (Message::Finished { measured: None }, r#"{"type":"finished","measured":null}"#),
            (Message::Failed { error: "no".into() }, r#"{"type":"failed","error":"no"}"#),
            (
                Message::Endpoint { test: 0, endpoint: Endpoint::Tcp { port: 7 } },
                r#"{"type":"endpoint","test":0,"endpoint":{"tcp":{"port":7}}}"#,
            ),
            (
                Message::Endpoint { test: 2, endpoint: Endpoint::Rdma(rdma) },
                r#"{"type":"endpoint","test":2,"endpoint":{"rdma":{"qps":[{"qpn":17,"psn":5,"rkey":9,"addr":4096}],"gid":"::ffff:10.9.0.1","mtu":1024,"reads":16}}}"#,
            ),
        ] {
            assert_eq!(serde_json::to_string(&message).unwrap(), text);
            assert_eq!(serde_json::from_str::<Message>(text).unwrap(), message);
        }
    }

    #[test]
    fn other_versions_and_other_programs_are_named() {
        let refused = |line: &[u8]| versioned::<Hello>("10.0.0.1:5", line).unwrap_err().to_string();
        let other = refused(br#"{"ferroce_perf":3,"version":"9.9","new":true}"#);
        assert!(
            other.contains("version 3") && other.contains("9.9") && other.contains("version 2"),
            "{other}"
        );
        for strange in [
            &b"GET / HTTP/1.1"[..],
            b"0000:000011:94fb34:",
            b"[]",
            b"{}",
            br#"{"ferroce_perf":"2"}"#,
            b"\xff\0",
        ] {
            assert!(refused(strange).contains("does not speak ferroce perf"), "{strange:?}");
        }
        assert!(refused(br#"{"ferroce_perf":2}"#).contains("bad hello"));
    }
}

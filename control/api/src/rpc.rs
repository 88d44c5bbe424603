//! JSON-RPC 2.0 between the command line and the control process, over a Unix stream socket.
//!
//! Objects back to back, as SPDK's sockets have it; a request may be at most [`MAX_REQUEST_BYTES`] long. Error codes
//! are JSON-RPC's own, -1 for a wrong state, else a negative errno; `data` carries the [`ApiError`]. Results only grow:
//! a reader ignores keys that it does not know; params refuse them.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::appliance::{
    Counter, CqEntry, ListKind, MrEntry, PdEntry, Percentiles, PerfKind, PerfOp, QpEntry, Status,
};
use crate::error::{ApiError, Code};

mod calls;

pub use calls::*;

/// Longest request or response in bytes.
pub const MAX_REQUEST_BYTES: usize = 1024 * 1024;

/// `rpc_get_methods`: names of all methods. Params: none. Result: [`Vec<String>`].
pub const GET_METHODS: &str = "rpc_get_methods";
/// `ferroce_get_version`. Params: none. Result: [`VersionResult`].
pub const GET_VERSION: &str = "ferroce_get_version";
/// `status`. Params: [`DevParams`]. Result: [`StatusResult`].
pub const STATUS: &str = "status";
/// `dev_list`. Params: none. Result: [`DevListResult`].
pub const DEV_LIST: &str = "dev_list";
/// `resource_show`. Params: [`ResourceParams`]. Result: [`ResourceResult`].
pub const RESOURCE_SHOW: &str = "resource_show";
/// `perf_run`. Params: [`PerfRunParams`]. Result: [`PerfRunResult`].
pub const PERF_RUN: &str = "perf_run";

/// Error codes of JSON-RPC itself.
pub mod code {
    /// Not JSON.
    pub const PARSE: i32 = -32700;
    /// Not a request.
    pub const INVALID_REQUEST: i32 = -32600;
    /// No such method.
    pub const METHOD_NOT_FOUND: i32 = -32601;
    /// Bad params.
    pub const INVALID_PARAMS: i32 = -32602;
    /// A fault of our own.
    pub const INTERNAL: i32 = -32603;
}

/// Number or text that ties a response to its request.
#[derive(Clone, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Id {
    /// A number.
    Number(i64),
    /// A text.
    Text(String),
}

/// The text `2.0`; anything else is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Version {
    /// JSON-RPC 2.0.
    #[default]
    #[serde(rename = "2.0")]
    V2,
}

/// A request. Without `id` it is a notification: done, not answered.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// `2.0`.
    pub jsonrpc: Version,
    /// What to do.
    pub method: String,
    /// With what: an object, by name.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub params: Value,
    /// Comes back in the response.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<Id>,
}

/// A refusal.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RpcError {
    /// See [`code`] and [`Code::rpc_code`].
    pub code: i32,
    /// One line for people.
    pub message: String,
    /// The same in parts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Box<ApiError>>,
}

impl From<ApiError> for RpcError {
    fn from(error: ApiError) -> Self {
        RpcError { code: error.code.rpc_code(), message: error.to_string(), data: Some(Box::new(error)) }
    }
}

impl From<RpcError> for ApiError {
    fn from(error: RpcError) -> Self {
        match error.data {
            Some(data) => *data,
            None => ApiError::new(Code::Internal, "control", "", error.message),
        }
    }
}

/// A response: exactly one of `result` and `error`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Response {
    /// `2.0`.
    pub jsonrpc: Version,
    /// Of a request that was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Value>,
    /// Of one that was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<RpcError>,
    /// Of the request; null when it could not be read.
    pub id: Option<Id>,
}

impl Response {
    /// A response.
    pub fn new(id: Option<Id>, outcome: Result<Value, RpcError>) -> Self {
        let (result, error) = match outcome {
            Ok(value) => (Some(value), None),
            Err(error) => (None, Some(error)),
        };
        Response { jsonrpc: Version::V2, result, error, id }
    }
    /// As a `Result`; a response with neither is an internal error.
    pub fn into_result(self) -> Result<Value, RpcError> {
        match (self.result, self.error) {
            (_, Some(error)) => Err(error),
            (Some(value), None) => Ok(value),
            (None, None) => Ok(Value::Null),
        }
    }
}

/// Versions of the control process and of what it speaks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct VersionResult {
    /// Program version, as SPDK spells it: a text.
    pub version: String,
    /// Of the appliance protocol.
    pub protocol: u32,
    /// Process.
    pub pid: u32,
}

/// Selects one device, or all.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DevParams {
    /// Name of the device; none: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dev: Option<String>,
}

/// A device that control knows.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DevEntry {
    /// Index, as iproute2's `rdma` counts.
    pub ifindex: u32,
    /// Name.
    pub ifname: String,
    /// Socket of its appliance.
    pub socket: String,
    /// True while the appliance answers.
    pub connected: bool,
    /// Why it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ApiError>,
    /// Process of the appliance, while connected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// EUI-64 as `rdma` prints it: `0200:00ff:fe00:0001`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_guid: Option<String>,
}

/// All devices.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DevListResult {
    /// The devices.
    pub devs: Vec<DevEntry>,
}

/// One device's status, or why there is none.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DevStatus {
    /// Name.
    pub dev: String,
    /// What the appliance says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<Box<Status>>,
    /// Why it says nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ApiError>,
}

/// Status of control and of its devices.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StatusResult {
    /// Control's own versions.
    pub control: VersionResult,
    /// Devices.
    pub devs: Vec<DevStatus>,
    /// Control's own counters.
    #[serde(default)]
    pub counters: Vec<Counter>,
}

/// Objects to list.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResourceParams {
    /// Name of the device; none: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dev: Option<String>,
    /// Of what.
    pub kind: ListKind,
    /// From [`ResourceResult::next`] of the last page; none: from the beginning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<ResourceCursor>,
}

/// Where the next page of a listing begins.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResourceCursor {
    /// Device.
    pub dev: String,
    /// Cursor within it.
    pub cursor: u64,
}

/// Objects of one device. Only the asked kind is filled.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct DevResources {
    /// Index, as in [`DevEntry`].
    pub ifindex: u32,
    /// Name of the device.
    pub dev: String,
    /// Protection domains.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pd: Vec<PdEntry>,
    /// Regions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mr: Vec<MrEntry>,
    /// Completion queues.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cq: Vec<CqEntry>,
    /// Queue pairs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub qp: Vec<QpEntry>,
    /// Why nothing could be listed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<ApiError>,
}

/// Objects by device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ResourceResult {
    /// Devices.
    pub devs: Vec<DevResources>,
    /// Where the next page begins; none: this was the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<ResourceCursor>,
}

/// A performance test between two appliances: control makes and connects the queue pairs, runs it, and takes
/// everything down again.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PerfRunParams {
    /// Device that measures.
    pub client: String,
    /// Device that answers.
    pub server: String,
    /// What moves the data.
    pub op: PerfOp,
    /// What is measured.
    pub kind: PerfKind,
    /// Bytes of a message.
    pub size_bytes: u32,
    /// Messages.
    pub iterations: u64,
    /// Messages before those, not measured.
    #[serde(default)]
    pub warmup: u64,
    /// Requests outstanding in a bandwidth test.
    #[serde(default = "default_depth")]
    pub depth: u32,
    /// Payload bytes of a full packet; none: the largest of both ports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_mtu: Option<u32>,
    /// Fails after this time, at most 600 000.
    #[serde(default = "default_deadline_ms")]
    pub deadline_ms: u32,
    /// Every message differs from the one before and is compared where it arrives. Slower.
    #[serde(default)]
    pub check_data: bool,
    /// Messages of at most so many bytes are posted inline (send, write).
    #[serde(default)]
    pub inline_bytes: u32,
    /// ACK timeout of the pair that is made: 4.096 us x 2^timeout, 1 ..= 31. Longer than a connection's default, as a
    /// measurement ends by its deadline anyway, and a worker that is kept from running is slow, not dead.
    #[serde(default = "default_perf_timeout")]
    pub timeout: u8,
    /// A queue pair of `client` that is connected to one of `server`, to use instead of a new pair.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qpn: Option<u32>,
    /// Worker on both sides; none: the next in turn on each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<u8>,
}

fn default_perf_timeout() -> u8 {
    17
}

fn default_depth() -> u32 {
    64
}

fn default_deadline_ms() -> u32 {
    60_000
}

/// What was measured.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct PerfRunResult {
    /// As asked.
    pub op: PerfOp,
    /// As asked.
    pub kind: PerfKind,
    /// As asked.
    pub size_bytes: u32,
    /// Messages measured.
    pub iterations: u64,
    /// Whole round trips (latency tests).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt: Option<Percentiles>,
    /// Payload, 10^9 bytes a second.
    pub gbytes_per_s: f64,
    /// Messages a second.
    pub msgs_per_s: f64,
    /// Path MTU in force, bytes.
    pub path_mtu: u32,
}

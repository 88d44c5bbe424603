//! Messages between an appliance (`ferroced`) and its clients over a Unix SEQPACKET socket.
//!
//! One message is one packet: JSON, at most [`MAX_MESSAGE_BYTES`] bytes. A client connects and sends
//! [`FromClient::Hello`]; the appliance answers [`FromAppliance::Hello`], or [`FromAppliance::Bye`] with an error that
//! names both versions, and closes. Then the client sends [`Request`]s: a batch of at most [`MAX_BATCH`] commands,
//! done in order; each has its own result in the [`Reply`], and a refused command does not stop the ones after it.
//! Listings are paged: ask with the cursor of the last page until none comes back. A page ends early when the message
//! is full, and a command whose answer has no room left in its reply is refused with [`crate::Code::TooBig`] without
//! having been done, so a message always fits. After [`Command::Subscribe`] events arrive between replies, numbered
//! without gaps; an event [`EventBody::Lost`] says that the client was too slow and how many it missed.
//!
//! JSON forms: enums are `{"variant": {…}}`, unknown keys are refused. Only the two hello messages and [`Bye`] ignore
//! unknown keys, so that every future version can still refuse an old one in words.

use serde::{Deserialize, Serialize};

use crate::error::{ApiError, Code};

mod command;
mod object;
mod perf;
mod status;

pub use command::{
    Access, AddressVector, Command, InitSpec, ListKind, Modify, PathQuery, QpCap, QpSpec, QpType, Response,
    RtrSpec, RtsSpec, Vlan,
};
pub use object::{
    CqEntry, CqHandle, DeviceInfo, GidEntry, Lkey, MrEntry, Page, PdEntry, PdHandle, PortInfo, QpEntry,
    QpState,
};
pub use perf::{
    Percentiles, PerfId, PerfKind, PerfOp, PerfReport, PerfRole, PerfSpec, PerfState, RemoteBuffer,
};
pub use status::{
    Counter, Event, EventBody, Fallback, IcrcMode, MemoryStatus, PortStatus, Stats, Status, WorkerStatus,
};

/// Version of this protocol. Both sides must have the same one.
pub const VERSION: u32 = 1;

/// Longest message in bytes, both ways. Fits the kernel's default socket buffer with room to spare.
pub const MAX_MESSAGE_BYTES: usize = 128 * 1024;

/// Most commands of one request.
pub const MAX_BATCH: usize = 64;

/// Largest `limit` of a listing; 0 asks for this.
pub const MAX_PAGE: u32 = 256;

/// Room in a reply that one small answer may take; listings get what is left when as much is kept for each later
/// command.
pub const RESULT_RESERVE_BYTES: usize = 1536;

/// What a client wants to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The control process: everything.
    Control,
    /// A program or tool with objects of its own: everything but `Shutdown`.
    Client,
    /// Reads only.
    Observer,
}

/// First message of a client. Ignores unknown keys.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`] of the client.
    pub version: u32,
    /// What it wants to be.
    pub role: Role,
    /// Its name, for logs: at most 64 bytes are kept.
    #[serde(default)]
    pub name: String,
}

impl Hello {
    /// A hello of this version.
    pub fn new(role: Role, name: impl Into<String>) -> Self {
        Hello { version: VERSION, role, name: name.into() }
    }
}

/// The appliance's answer. Ignores unknown keys.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct HelloReply {
    /// [`VERSION`] of the appliance.
    pub version: u32,
    /// Version of the program.
    pub program: String,
    /// Name of the device.
    pub dev: String,
    /// Process of the appliance.
    pub pid: u32,
    /// Random number of this run of the appliance: another one means that all objects of before are gone.
    pub instance: u64,
    /// Workers.
    pub workers: u8,
    /// Longest message it takes.
    pub max_message_bytes: u32,
}

/// The appliance ends the connection, and says why. Ignores unknown keys.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Bye {
    /// Why.
    pub error: ApiError,
}

/// The refusal of a client with another protocol version: names both.
pub fn version_error(client: u32) -> ApiError {
    let (older, what) = if client < VERSION { (client, "the client") } else { (VERSION, "the appliance") };
    ApiError::new(
        Code::Version,
        "protocol version",
        format!("{client} by the client"),
        format!("{VERSION} by the appliance"),
    )
    .hint(format!("upgrade {what}: {older} is the older one"))
}

/// A batch of commands.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Chosen by the client, comes back in the reply.
    pub id: u64,
    /// At most [`MAX_BATCH`] commands, done in order.
    pub batch: Vec<Command>,
}

/// The answers of a batch, as many and in the same order.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reply {
    /// Of the request.
    pub id: u64,
    /// One for each command.
    pub results: Vec<Outcome>,
}

/// Result of one command: `{"ok": …}` or `{"err": …}`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Outcome {
    /// Done.
    Ok(Response),
    /// Refused.
    Err(ApiError),
}

impl Outcome {
    /// As a `Result`.
    pub fn into_result(self) -> Result<Response, ApiError> {
        match self {
            Outcome::Ok(response) => Ok(response),
            Outcome::Err(error) => Err(error),
        }
    }
}

impl From<Result<Response, ApiError>> for Outcome {
    fn from(result: Result<Response, ApiError>) -> Self {
        match result {
            Ok(response) => Outcome::Ok(response),
            Err(error) => Outcome::Err(error),
        }
    }
}

/// A message of a client.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FromClient {
    /// The first one.
    Hello(Hello),
    /// All others.
    Request(Request),
}

/// A message of the appliance.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FromAppliance {
    /// Answer to a hello of the same version.
    Hello(HelloReply),
    /// Answer to a request.
    Reply(Reply),
    /// An event, after a subscription.
    Event(Event),
    /// The last message: the appliance closes.
    Bye(Bye),
}

/// Makes the bytes of a message. Refuses one that is too long with [`Code::TooBig`].
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, ApiError> {
    let bytes = serde_json::to_vec(message)
        .map_err(|e| ApiError::new(Code::Internal, "message", "", format!("does not encode: {e}")))?;
    if bytes.len() > MAX_MESSAGE_BYTES {
        return Err(too_big(bytes.len()));
    }
    Ok(bytes)
}

/// Reads a message. Refuses one that is too long with [`Code::TooBig`], one that makes no sense with
/// [`Code::Malformed`].
pub fn decode<'de, T: Deserialize<'de>>(bytes: &'de [u8]) -> Result<T, ApiError> {
    if bytes.len() > MAX_MESSAGE_BYTES {
        return Err(too_big(bytes.len()));
    }
    serde_json::from_slice(bytes).map_err(|e| ApiError::new(Code::Malformed, "message", "", e.to_string()))
}

/// Reads a client's request and checks the size of its batch.
pub fn decode_client(bytes: &[u8]) -> Result<FromClient, ApiError> {
    let message: FromClient = decode(bytes)?;
    if let FromClient::Request(request) = &message
        && request.batch.len() > MAX_BATCH
    {
        return Err(ApiError::new(
            Code::TooBig,
            "batch",
            format!("{} commands", request.batch.len()),
            format!("at most {MAX_BATCH}"),
        )
        .hint("send several requests"));
    }
    Ok(message)
}

fn too_big(bytes: usize) -> ApiError {
    ApiError::new(
        Code::TooBig,
        "message",
        format!("{bytes} bytes"),
        format!("at most {MAX_MESSAGE_BYTES} bytes"),
    )
    .hint("send smaller batches or ask for smaller pages")
}

//! The appliance's configuration file: TOML, unknown keys refused, parsed into types that are valid by construction.
//!
//! Owns the text form only: nothing is opened, looked up or allocated here. An error names file, line and key, what was
//! asked and what is allowed. There are no environment variables and no defaults outside this module. Every shipped
//! file under `configs/` begins with a line that names the program that reads it ([`APPLIANCE_MARK`]).

use core::fmt;
use std::path::{Path, PathBuf};

use toml::Spanned;

use crate::error::{ApiError, Code};

mod raw;
mod value;

pub use value::{
    CoreChoice, DevName, FaultDirection, IcrcSetting, IdlePolicy, InterfaceName, NetAddress, PagePolicy,
    Probability, XdpMode, ZeroCopy,
};

/// First words of a configuration file for the appliance.
pub const APPLIANCE_MARK: &str = "# ferroced";

/// Where sockets and links live when neither file nor command line says so.
pub const DEFAULT_RUN_DIR: &str = "/run/ferroce";

/// Smallest and largest arena in bytes.
pub const MEMORY_BYTES: (u64, u64) = (2 << 20, 1 << 40);

/// Arena when the file does not say: DESIGN 4, at most 64 MiB by default.
pub const DEFAULT_MEMORY_BYTES: u64 = 64 << 20;

/// Most workers: the number travels in 8 bits of a queue handle, and QPNs keep 5 bits for it.
pub const MAX_WORKERS: usize = 32;

/// Why a file was refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConfigError {
    /// The file, as named by the caller.
    pub file: String,
    /// Line, from 1; 0 when it concerns the whole file.
    pub line: usize,
    /// Key with its section (`port.mtu`), as far as known.
    pub key: String,
    /// What was asked, what is allowed, how to change it.
    pub message: String,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        if !self.key.is_empty() {
            write!(f, ": {}", self.key)?;
        }
        write!(f, ": {}", self.message)
    }
}

impl std::error::Error for ConfigError {}

impl From<ConfigError> for ApiError {
    fn from(error: ConfigError) -> Self {
        let place = if error.line > 0 { format!("{}:{}", error.file, error.line) } else { error.file };
        ApiError::new(Code::Invalid, format!("{place}: {}", error.key), "", error.message)
    }
}

/// The whole file.
#[derive(Clone, PartialEq, Debug)]
pub struct ApplianceConfig {
    /// Name of the device: 1 to 32 letters, digits, `-`, `_`, `.`; names the socket too.
    pub name: DevName,
    /// Folder of sockets and links.
    pub run_dir: PathBuf,
    /// EUI-64 of the node; none: from the Ethernet address.
    pub node_guid: Option<u64>,
    /// Arena.
    pub memory: MemoryConfig,
    /// At least one.
    pub workers: Vec<WorkerConfig>,
    /// The port.
    pub port: PortConfig,
    /// Limits.
    pub limits: LimitsConfig,
    /// Diagnosis.
    pub icrc: IcrcSetting,
}

/// `[memory]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryConfig {
    /// Bytes of the arena, within [`MEMORY_BYTES`].
    pub bytes: u64,
    /// Which pages.
    pub pages: PagePolicy,
}

/// `[[worker]]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WorkerConfig {
    /// Where it is pinned.
    pub core: CoreChoice,
    /// What it does without work.
    pub idle: IdlePolicy,
}

/// `[port]`.
#[derive(Clone, PartialEq, Debug)]
pub struct PortConfig {
    /// Which wire.
    pub wire: WireConfig,
    /// Addresses with prefix lengths. `shm`: at least one. `xdp`: empty means those of the interface, else a selection
    /// of them.
    pub addresses: Vec<NetAddress>,
    /// MTU of a `shm` link in bytes, 352 ..= 65 520, the same on both sides; none: 9000. `xdp` has the interface's.
    pub mtu: Option<u32>,
    /// Seeded faults around the port.
    pub fault: Option<FaultConfig>,
    /// Capture of all frames around the port.
    pub capture: Option<PathBuf>,
}

/// The wire of a port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum WireConfig {
    /// Shared memory between two appliances of one host.
    Shm {
        /// Name of the link: both sides give the same one (and the same run-dir).
        link: DevName,
        /// Ethernet address; none: made from the first address.
        mac: Option<[u8; 6]>,
    },
    /// AF_XDP on a network interface.
    Xdp {
        /// The interface.
        interface: InterfaceName,
        /// Where the program runs.
        mode: XdpMode,
        /// Whether frames are copied.
        zero_copy: ZeroCopy,
        /// Receive queues that the interface must have; none: however many.
        queues: Option<u16>,
    },
}

/// `[port.fault]`: what a port does to frames on purpose, the same for the same seed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct FaultConfig {
    /// Seed.
    pub seed: u64,
    /// Which frames.
    pub direction: FaultDirection,
    /// Share of frames lost.
    pub loss: Probability,
    /// Share of frames that come twice.
    pub duplicate: Probability,
    /// Share of frames that are overtaken by later ones.
    pub reorder: Probability,
    /// Share of frames with a flipped bit.
    pub corrupt: Probability,
    /// Share of frames marked congestion experienced.
    pub mark_ce: Probability,
    /// Share of frames that are delayed.
    pub delay: Probability,
    /// How long these are delayed, at most, in microseconds.
    pub delay_us: u32,
}

/// `[limits]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LimitsConfig {
    /// Queue pairs of the device.
    pub max_qp: u32,
    /// Completion queues of the device.
    pub max_cq: u32,
    /// Memory regions.
    pub max_mr: u32,
    /// Protection domains.
    pub max_pd: u32,
    /// Clients of the control socket at once.
    pub max_clients: u32,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        LimitsConfig { max_qp: 1024, max_cq: 1024, max_mr: 1024, max_pd: 1024, max_clients: 16 }
    }
}

impl ApplianceConfig {
    /// Reads and checks a file.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let file = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|e| ConfigError {
            file: file.clone(),
            line: 0,
            key: String::new(),
            message: format!("cannot be read: {e}"),
        })?;
        Self::parse(&file, &text)
    }

    /// Checks the text of a file; `file` is only for messages.
    pub fn parse(file: &str, text: &str) -> Result<Self, ConfigError> {
        let source = Source { file, text };
        let raw: raw::File = toml::from_str(text).map_err(|e| source.toml_error(&e))?;
        raw.check(&source)
    }
}

/// A text with its name, for messages. Also for other programs' files: [`Source::parse`].
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// Name of the file, for messages.
    pub file: &'a str,
    /// Its text.
    pub text: &'a str,
}

impl Source<'_> {
    /// Parses any TOML type; the error names line and key.
    pub fn parse<T: serde::de::DeserializeOwned>(&self) -> Result<T, ConfigError> {
        toml::from_str(self.text).map_err(|e| self.toml_error(&e))
    }

    /// An error at a value.
    pub fn error_at<T>(&self, value: &Spanned<T>, key: &str, message: impl Into<String>) -> ConfigError {
        ConfigError {
            file: self.file.to_owned(),
            line: self.line_of(value.span().start),
            key: key.to_owned(),
            message: message.into(),
        }
    }

    /// An error about the file as a whole: something is missing.
    pub fn error(&self, key: &str, message: impl Into<String>) -> ConfigError {
        ConfigError { file: self.file.to_owned(), line: 0, key: key.to_owned(), message: message.into() }
    }

    fn line_of(&self, offset: usize) -> usize {
        self.text.as_bytes().iter().take(offset).filter(|b| **b == b'\n').count() + 1
    }

    fn toml_error(&self, error: &toml::de::Error) -> ConfigError {
        let message = error.message().trim().replace('\n', "; ");
        match error.span() {
            Some(span) => {
                let line = self.line_of(span.start);
                ConfigError { file: self.file.to_owned(), line, key: self.key_at(line), message }
            }
            None => ConfigError { file: self.file.to_owned(), line: 0, key: String::new(), message },
        }
    }

    /// The key of a line with the section above it, from the text: for messages only.
    fn key_at(&self, line: usize) -> String {
        let mut section = "";
        let mut key = "";
        for text in self.text.lines().take(line) {
            let text = text.trim();
            key = "";
            if text.starts_with('[') {
                let end = text.find(']').unwrap_or(text.len());
                section = text.get(..end).unwrap_or("").trim_start_matches('[').trim();
            } else if let Some((before, _)) = text.split_once('=') {
                key = before.trim();
            }
        }
        match (section.is_empty(), key.is_empty()) {
            (true, _) => key.to_owned(),
            (false, true) => section.to_owned(),
            (false, false) => format!("{section}.{key}"),
        }
    }
}

#[cfg(test)]
mod tests;

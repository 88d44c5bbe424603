//! Why a command did not end well, and with which exit status.
//!
//! Owns the table of exit statuses; scripts rely on it, so a status never changes its meaning.

use core::fmt;

use ferroce_api::rpc::RpcError;

/// Why, by exit status.
#[derive(Debug)]
pub enum Fail {
    /// Asked, and refused or failed: 1.
    Refused(String),
    /// The same, with what control answered: 1.
    Rpc(Box<RpcError>),
    /// Wrong usage that clap can't see: 2.
    Usage(String),
    /// No control process: 3.
    NotRunning(String),
    /// What answers is not a control process of our protocol: 4.
    Protocol(String),
}

impl Fail {
    /// The process's exit status.
    pub fn exit_code(&self) -> u8 {
        match self {
            Fail::Refused(_) | Fail::Rpc(_) => 1,
            Fail::Usage(_) => 2,
            Fail::NotRunning(_) => 3,
            Fail::Protocol(_) => 4,
        }
    }
}

impl fmt::Display for Fail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fail::Refused(text) | Fail::Usage(text) | Fail::NotRunning(text) | Fail::Protocol(text) => {
                f.write_str(text)
            }
            Fail::Rpc(error) => f.write_str(&error.message),
        }
    }
}

impl From<std::io::Error> for Fail {
    fn from(error: std::io::Error) -> Self {
        Fail::Refused(error.to_string())
    }
}

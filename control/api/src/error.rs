//! The one error of both sockets: names the attribute, what was asked, what is allowed and how to change it.

use core::fmt;

use serde::{Deserialize, Serialize};

/// Kind of a refusal: what a program decides on. Texts are for people.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// Bad attribute or value (EINVAL).
    Invalid,
    /// No such object (ENOENT).
    NotFound,
    /// In use (EBUSY).
    Busy,
    /// A limit is reached (ENOMEM).
    Exhausted,
    /// This appliance or port cannot do it (EOPNOTSUPP).
    Unsupported,
    /// Wrong state for the operation (JSON-RPC -1, as SPDK answers).
    State,
    /// No answer within the deadline (ETIMEDOUT).
    Timeout,
    /// The appliance, or the connection to it, is gone (ENODEV).
    Gone,
    /// The peer's rights do not allow it (EACCES).
    Denied,
    /// The two sides speak different protocol versions (EPROTO).
    Version,
    /// A message that could not be decoded (EBADMSG).
    Malformed,
    /// A message over the limit, or a reply for which the rest of the message has no room (EMSGSIZE).
    TooBig,
    /// A fault of our own (JSON-RPC -32603).
    Internal,
}

impl Code {
    /// The JSON-RPC error code: -1 for a wrong state, -32603 for an internal fault, else a negative errno.
    pub const fn rpc_code(self) -> i32 {
        match self {
            Code::Invalid => -22,
            Code::NotFound => -2,
            Code::Busy => -16,
            Code::Exhausted => -12,
            Code::Unsupported => -95,
            Code::State => -1,
            Code::Timeout => -110,
            Code::Gone => -19,
            Code::Denied => -13,
            Code::Version => -71,
            Code::Malformed => -74,
            Code::TooBig => -90,
            Code::Internal => -32603,
        }
    }
}

/// A refused operation. `Display` makes one line for people.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApiError {
    /// Kind of refusal.
    pub code: Code,
    /// Attribute or object, in libibverbs' words (`path_mtu`, `cqe`, `qp_state`).
    pub attribute: String,
    /// What was asked for; empty where nothing was.
    pub asked: String,
    /// What is allowed, or what was found.
    pub allowed: String,
    /// How to change it; empty when there is no way.
    pub hint: String,
}

impl ApiError {
    /// An error without a hint.
    pub fn new(
        code: Code,
        attribute: impl Into<String>,
        asked: impl Into<String>,
        allowed: impl Into<String>,
    ) -> Self {
        ApiError {
            code,
            attribute: attribute.into(),
            asked: asked.into(),
            allowed: allowed.into(),
            hint: String::new(),
        }
    }
    /// The same error with a way out.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.attribute)?;
        if !self.asked.is_empty() {
            write!(f, ": asked {}", self.asked)?;
        }
        if !self.allowed.is_empty() {
            let separator = if self.asked.is_empty() { ": " } else { ", allowed " };
            write!(f, "{separator}{}", self.allowed)?;
        }
        if !self.hint.is_empty() {
            write!(f, "; {}", self.hint)?;
        }
        Ok(())
    }
}

impl std::error::Error for ApiError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_names_all_four_parts() {
        let error = ApiError::new(Code::Invalid, "path_mtu", "4096", "at most 1024")
            .hint("raise the interface's MTU to 4192");
        assert_eq!(
            error.to_string(),
            "path_mtu: asked 4096, allowed at most 1024; raise the interface's MTU to 4192"
        );
        let found = ApiError::new(Code::NotFound, "socket", "", "nobody listens");
        assert_eq!(found.to_string(), "socket: nobody listens");
        assert_eq!(ApiError::new(Code::NotFound, "qpn", "0x12", "").to_string(), "qpn: asked 0x12");
    }

    #[test]
    fn rpc_codes_are_distinct() {
        let all = [
            Code::Invalid,
            Code::NotFound,
            Code::Busy,
            Code::Exhausted,
            Code::Unsupported,
            Code::State,
            Code::Timeout,
            Code::Gone,
            Code::Denied,
            Code::Version,
            Code::Malformed,
            Code::TooBig,
            Code::Internal,
        ];
        let codes: std::collections::HashSet<i32> = all.iter().map(|c| c.rpc_code()).collect();
        assert_eq!(codes.len(), all.len());
    }
}

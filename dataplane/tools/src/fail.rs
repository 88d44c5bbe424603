//! How a tool fails: exit status 1 for what was asked and went wrong, 2 for a wrong question.

use std::fmt;

/// A failure with its exit status.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fail {
    /// Wrong usage: a value that is not allowed, options that do not fit together.
    Usage(String),
    /// Asked and refused, or failed.
    Failed(String),
}

/// Result of most things here.
pub type Outcome<T> = Result<T, Fail>;

impl Fail {
    /// What was asked and went wrong.
    pub fn failed(text: impl Into<String>) -> Self {
        Fail::Failed(text.into())
    }
    /// A wrong question.
    pub fn usage(text: impl Into<String>) -> Self {
        Fail::Usage(text.into())
    }
    /// The exit status.
    pub fn status(&self) -> u8 {
        match self {
            Fail::Usage(_) => 2,
            Fail::Failed(_) => 1,
        }
    }
}

impl fmt::Display for Fail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fail::Usage(text) | Fail::Failed(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Fail {}

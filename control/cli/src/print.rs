//! Printing: text for people, or JSON for scripts, of the same rows.
//!
//! Owns the choice between the two. A reader that closes the pipe is no error.

use std::io::{self, ErrorKind, Write};

use serde::Serialize;

use crate::args::Global;
use crate::fail::Fail;
use crate::row::Row;

/// Prints as the options say.
pub struct Printer {
    /// JSON instead of text.
    pub json: bool,
    /// More of each object.
    pub details: bool,
    pretty: bool,
}

impl Printer {
    /// From the options.
    pub fn new(global: &Global) -> Self {
        Printer { json: global.json || global.pretty, details: global.details > 0, pretty: global.pretty }
    }

    /// A listing.
    ///
    /// # Errors
    /// The output can't be written.
    pub fn rows(&self, rows: &[Row]) -> Result<(), Fail> {
        if self.json {
            return self.value(&rows);
        }
        let mut out = String::new();
        for row in rows {
            out.push_str(&row.text(self.details));
            out.push('\n');
        }
        self.text(&out)
    }

    /// A value as JSON.
    ///
    /// # Errors
    /// The output can't be written.
    pub fn value(&self, value: &impl Serialize) -> Result<(), Fail> {
        let text =
            if self.pretty { serde_json::to_string_pretty(value) } else { serde_json::to_string(value) };
        let mut text = text.map_err(|e| Fail::Refused(format!("output: {e}")))?;
        text.push('\n');
        self.text(&text)
    }

    /// Text as it is.
    ///
    /// # Errors
    /// The output can't be written.
    pub fn text(&self, text: &str) -> Result<(), Fail> {
        let mut out = io::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(Fail::Refused(format!("output: {e}"))),
            _ => Ok(()),
        }
    }
}

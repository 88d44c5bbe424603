//! Standard output: a reader that has left (`| head`) ends the tool with its output, not with a panic.

use std::fmt::Arguments;
use std::io::Write;

/// Prints a line; ends the process with status 1 if nobody reads it.
pub fn line(text: Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    if writeln!(out, "{text}").and_then(|()| out.flush()).is_err() {
        std::process::exit(1);
    }
}

/// `println!` by way of [`line`].
macro_rules! say {
    ($($text:tt)*) => {
        $crate::out::line(format_args!($($text)*))
    };
}
pub(crate) use say;

//! The verbs: a file for each group. Each asks control, makes rows of the answer, prints them.

pub mod connect;
pub mod dev;
pub mod measure;
pub mod meta;
pub mod object;
pub mod qp;
pub mod resource;
pub mod status;
pub mod tools;

use std::process::ExitCode;

use ferroce_api::ApiError;

/// Ends a listing: 1 when a device could not be asked, which each has been named for on standard error.
fn ending(away: &[(String, ApiError)]) -> ExitCode {
    for (_, error) in away {
        eprintln!("ferroce: {error}");
    }
    if away.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

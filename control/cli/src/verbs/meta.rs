//! `rpc`, `version`, `completions` and `man`: about the command and the control process themselves.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;
use ferroce_api::appliance;
use serde_json::Value;

use crate::args::{Cli, Global};
use crate::client::Client;
use crate::fail::Fail;
use crate::print::Printer;
use crate::row::Row;

/// `rpc METHOD [JSON]`: the result, or the error on standard output and status 1.
pub fn rpc(global: &Global, printer: &Printer, method: &str, params: Option<&str>) -> Result<ExitCode, Fail> {
    let params: Value = match params {
        None => Value::Object(serde_json::Map::new()),
        Some(text) => {
            serde_json::from_str(text).map_err(|e| Fail::Usage(format!("rpc: params are not JSON: {e}")))?
        }
    };
    // Which methods only read is control's business; it refuses the others on the read-only socket.
    match Client::open_reading(global)?.call_value(method, &params) {
        Ok(result) => {
            printer.value(&result)?;
            Ok(ExitCode::SUCCESS)
        }
        Err(Fail::Rpc(error)) => {
            printer.value(&error)?;
            Ok(ExitCode::FAILURE)
        }
        Err(other) => Err(other),
    }
}

/// `version`: this command's always, the control process's where one runs.
pub fn version(global: &Global, printer: &Printer) -> Result<ExitCode, Fail> {
    let own = Row::new("ferroce")
        .json("program", "ferroce")
        .cell("version", env!("CARGO_PKG_VERSION"))
        .cell("protocol", appliance::VERSION);
    let mut rows = vec![own];
    let asked = Client::open_reading(global);
    if let Ok(client) = &asked {
        let theirs = client.version();
        rows.push(
            Row::new("ferroce-ctld")
                .json("program", "ferroce-ctld")
                .cell("version", theirs.version.as_str())
                .cell("protocol", theirs.protocol)
                .cell("pid", theirs.pid),
        );
    }
    printer.rows(&rows)?;
    match asked {
        Ok(_) | Err(Fail::NotRunning(_)) => Ok(ExitCode::SUCCESS),
        Err(fail) => Err(fail),
    }
}

/// `completions SHELL`.
pub fn completions(shell: Shell) -> Result<ExitCode, Fail> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "ferroce", &mut text);
    std::io::Write::write_all(&mut std::io::stdout(), &text)?;
    Ok(ExitCode::SUCCESS)
}

/// `man DIR`: a page for the command and one for each verb.
pub fn man(dir: &Path) -> Result<ExitCode, Fail> {
    fs::create_dir_all(dir).map_err(|e| Fail::Refused(format!("{}: {e}", dir.display())))?;
    clap_mangen::generate_to(Cli::command(), dir)
        .map_err(|e| Fail::Refused(format!("{}: {e}", dir.display())))?;
    Ok(ExitCode::SUCCESS)
}

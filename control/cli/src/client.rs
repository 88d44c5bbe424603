//! One conversation with the control process: connect, agree on the version, ask, answer.
//!
//! Owns the socket. The invariants: nothing is asked before the versions are known to fit; every wait has a deadline;
//! an answer of more than the protocol's limit is refused. Called by the verbs.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ferroce_api::appliance;
use ferroce_api::rpc::{self, Id, MAX_REQUEST_BYTES, Request, Response, Version, VersionResult};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::args::Global;
use crate::fail::Fail;

/// A connection whose versions fit.
pub struct Client {
    stream: UnixStream,
    path: PathBuf,
    kept: Vec<u8>,
    next_id: i64,
    version: VersionResult,
}

impl Client {
    /// Connects for verbs that change something: the control socket only.
    ///
    /// # Errors
    /// Not running, not allowed, or another protocol.
    pub fn open(global: &Global) -> Result<Self, Fail> {
        Self::connect(global, false)
    }

    /// Connects for verbs that only read: where the control socket may not be opened, the read-only one is taken.
    ///
    /// # Errors
    /// As [`Client::open`].
    pub fn open_reading(global: &Global) -> Result<Self, Fail> {
        Self::connect(global, true)
    }

    fn connect(global: &Global, reads_only: bool) -> Result<Self, Fail> {
        let path = global.socket.clone().unwrap_or_else(|| global.run_dir.join("ctl.sock"));
        let (stream, path) = match UnixStream::connect(&path) {
            Err(e) if e.kind() == ErrorKind::PermissionDenied && reads_only && global.socket.is_none() => {
                let reading = global.run_dir.join("ro.sock");
                (UnixStream::connect(&reading), reading)
            }
            other => (other, path),
        };
        let stream = stream.map_err(|e| connect_error(&path, &e))?;
        let wait = Some(Duration::from_secs(global.timeout.into()));
        stream.set_read_timeout(wait)?;
        stream.set_write_timeout(wait)?;
        let version = VersionResult { version: String::new(), protocol: 0, pid: 0 };
        let mut client = Client { stream, path, kept: Vec::new(), next_id: 0, version };
        client.version = client.agree()?;
        Ok(client)
    }

    /// Versions of the control process.
    pub fn version(&self) -> &VersionResult {
        &self.version
    }

    /// Waits longer for answers from now on: the verb itself takes `extra`.
    ///
    /// # Errors
    /// The socket refuses.
    pub fn allow(&self, global: &Global, extra: Duration) -> Result<(), Fail> {
        Ok(self.stream.set_read_timeout(Some(Duration::from_secs(global.timeout.into()) + extra))?)
    }

    fn agree(&mut self) -> Result<VersionResult, Fail> {
        let response = self.exchange(rpc::GET_VERSION, Value::Null)?;
        let value = response.into_result().map_err(|error| match error.data {
            Some(_) => Fail::Rpc(Box::new(error)),
            None => {
                Fail::Protocol(format!("{} is not a ferroce-ctld: {}", self.path.display(), error.message))
            }
        })?;
        let version: VersionResult = serde_json::from_value(value)
            .map_err(|e| Fail::Protocol(format!("{} is not a ferroce-ctld: {e}", self.path.display())))?;
        check_version(&version)?;
        Ok(version)
    }

    /// Calls a method.
    ///
    /// # Errors
    /// Refused, no answer in time, or an answer that makes no sense.
    pub fn call<T: DeserializeOwned>(&mut self, method: &str, params: &impl Serialize) -> Result<T, Fail> {
        let value = self.call_value(method, params)?;
        serde_json::from_value(value).map_err(|e| Fail::Protocol(format!("{method}: unexpected answer: {e}")))
    }

    /// Calls a method; the result as it is.
    ///
    /// # Errors
    /// As [`Client::call`].
    pub fn call_value(&mut self, method: &str, params: &impl Serialize) -> Result<Value, Fail> {
        let params = serde_json::to_value(params).map_err(|e| Fail::Refused(format!("{method}: {e}")))?;
        self.exchange(method, params)?.into_result().map_err(|error| Fail::Rpc(Box::new(error)))
    }

    fn exchange(&mut self, method: &str, params: Value) -> Result<Response, Fail> {
        self.next_id += 1;
        let id = Some(Id::Number(self.next_id));
        let request = Request { jsonrpc: Version::V2, method: method.to_owned(), params, id: id.clone() };
        let mut text = serde_json::to_vec(&request).map_err(|e| Fail::Refused(e.to_string()))?;
        if text.len() > MAX_REQUEST_BYTES {
            let asked = text.len();
            return Err(Fail::Refused(format!(
                "{method}: {asked} bytes asked, at most {MAX_REQUEST_BYTES} allowed"
            )));
        }
        text.push(b'\n');
        // A server that cuts us off may have said why before: read that first.
        let sent = self.stream.write_all(&text);
        let line = match (self.line(), sent) {
            (Ok(line), _) => line,
            (Err(_), Err(e)) => return Err(self.broken(method, &e)),
            (Err(fail), Ok(())) => return Err(fail),
        };
        let response: Response = serde_json::from_slice(&line)
            .map_err(|e| Fail::Protocol(format!("{} is not a ferroce-ctld: {e}", self.path.display())))?;
        if response.id.is_some() && response.id != id {
            return Err(Fail::Protocol(format!("{method}: an answer to another request")));
        }
        Ok(response)
    }

    /// One line: control ends every answer with a line feed.
    fn line(&mut self) -> Result<Vec<u8>, Fail> {
        let mut buf = [0u8; 16 * 1024];
        loop {
            if let Some(end) = self.kept.iter().position(|b| *b == b'\n') {
                let rest = self.kept.split_off(end + 1);
                return Ok(std::mem::replace(&mut self.kept, rest));
            }
            if self.kept.len() > MAX_REQUEST_BYTES {
                return Err(Fail::Protocol(format!("an answer of more than {MAX_REQUEST_BYTES} bytes")));
            }
            match self.stream.read(&mut buf) {
                Ok(0) if self.kept.is_empty() => {
                    return Err(Fail::Refused(format!(
                        "ferroce-ctld closed the connection (at {}): it stopped, see its log",
                        self.path.display()
                    )));
                }
                Ok(0) => return Ok(std::mem::take(&mut self.kept)),
                Ok(n) => self.kept.extend_from_slice(buf.get(..n).unwrap_or_default()),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(self.broken("answer", &e)),
            }
        }
    }

    fn broken(&self, what: &str, error: &std::io::Error) -> Fail {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Fail::Refused(format!(
                "{what}: ferroce-ctld (pid {}, at {}) did not answer in time; --timeout allows more",
                self.version.pid,
                self.path.display()
            )),
            _ => Fail::Refused(format!("{what}: {}: {error}", self.path.display())),
        }
    }
}

fn check_version(version: &VersionResult) -> Result<(), Fail> {
    let ours = appliance::VERSION;
    if version.protocol == ours {
        return Ok(());
    }
    let older = if version.protocol < ours { "ferroce-ctld" } else { "ferroce" };
    Err(Fail::Protocol(format!(
        "ferroce {} speaks protocol {ours}, ferroce-ctld {} (pid {}) speaks {}; upgrade {older}",
        env!("CARGO_PKG_VERSION"),
        version.version,
        version.pid,
        version.protocol
    )))
}

fn connect_error(path: &Path, error: &std::io::Error) -> Fail {
    let at = path.display();
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => Fail::NotRunning(format!(
            "ferroce-ctld is not running (looked at {at}); start it, or name its folder with --run-dir"
        )),
        ErrorKind::PermissionDenied => Fail::Refused(format!(
            "{at}: permission denied; join the group ferroce (or ferroce-ro for reading), or use --run-dir"
        )),
        // What the standard library says of a path that does not fit a socket's address.
        ErrorKind::InvalidInput => Fail::Refused(format!(
            "socket path: asked {at} ({} bytes), allowed at most 107 bytes; choose a shorter --run-dir or --socket",
            path.as_os_str().len()
        )),
        _ => Fail::Refused(format!("{at}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_named_and_which_to_upgrade() {
        let at = |protocol| VersionResult { version: "9.9".into(), protocol, pid: 7 };
        assert!(check_version(&at(appliance::VERSION)).is_ok());
        let newer = check_version(&at(appliance::VERSION + 1)).expect_err("newer");
        assert_eq!(newer.exit_code(), 4);
        assert!(newer.to_string().ends_with("upgrade ferroce"), "{newer}");
        let older = check_version(&at(appliance::VERSION - 1)).expect_err("older");
        assert!(older.to_string().ends_with("upgrade ferroce-ctld"), "{older}");
        assert!(older.to_string().contains("9.9") && older.to_string().contains("pid 7"), "{older}");
    }
}

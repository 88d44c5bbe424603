//! Configuration of the control process: a TOML file, the command line on top of it.
//!
//! Owns the parsed values, valid by construction. The invariant: unknown keys are refused, appliance names are unique
//! and short enough to name a socket. Called once at start; it opens nothing but the file itself.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::Parser;
use serde::Deserialize;

/// Where the sockets live when nobody says otherwise.
pub const DEFAULT_RUN_DIR: &str = "/run/ferroce";
/// Longest appliance name in bytes.
pub const MAX_NAME_BYTES: usize = 32;
/// Appliances of one control process.
pub const MAX_APPLIANCES: usize = 64;

/// Control process of ferroce: sets up queue pairs in running appliances and answers the ferroce command.
///
/// The appliances run on when this process stops or restarts.
#[derive(Parser, Debug)]
#[command(name = "ferroce-ctld", version, max_term_width = 80)]
pub struct Args {
    /// Configuration file (TOML); see configs/ctld.toml for all keys
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Folder for the sockets ctl.sock and ro.sock, and where the sockets of appliances are looked for
    /// [default: /run/ferroce]
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// An appliance to control; without =PATH its socket is DIR/NAME.sock. May be repeated
    #[arg(long, value_name = "NAME[=PATH]")]
    pub appliance: Vec<String>,
    /// Log filter, for instance debug or ferroce_ctld=trace
    #[arg(long, value_name = "FILTER", default_value = "info")]
    pub log: String,
    /// Check the configuration, print it as understood, and exit
    #[arg(long)]
    pub check: bool,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    control: ControlSection,
    #[serde(default)]
    appliance: Vec<ApplianceSection>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct ControlSection {
    run_dir: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ApplianceSection {
    name: String,
    socket: Option<PathBuf>,
}

/// One appliance to control.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ApplianceConfig {
    /// Its `dev` name.
    pub name: String,
    /// Its socket.
    pub socket: PathBuf,
}

/// What the process runs with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Folder of the sockets.
    pub run_dir: PathBuf,
    /// The appliances, in the order of the file, then of the command line.
    pub appliances: Vec<ApplianceConfig>,
}

impl Config {
    /// Reads the file that `args` names and puts the command line on top.
    ///
    /// # Errors
    /// The file can't be read or parsed, or a value is not allowed; the text names the key.
    pub fn load(args: &Args) -> anyhow::Result<Self> {
        let file = match &args.config {
            Some(path) => {
                let text = fs::read_to_string(path).with_context(|| format!("config {}", path.display()))?;
                parse(&text).with_context(|| format!("config {}", path.display()))?
            }
            None => File::default(),
        };
        Self::build(file, args.run_dir.as_deref(), &args.appliance)
    }

    fn build(file: File, run_dir: Option<&Path>, flags: &[String]) -> anyhow::Result<Self> {
        let run_dir = run_dir
            .map(Path::to_owned)
            .or(file.control.run_dir)
            .unwrap_or_else(|| PathBuf::from(DEFAULT_RUN_DIR));
        let mut appliances = Vec::new();
        for section in file.appliance {
            appliances.push(appliance(section.name, section.socket, &run_dir)?);
        }
        for flag in flags {
            let (name, socket) = match flag.split_once('=') {
                Some((name, path)) => (name, Some(PathBuf::from(path))),
                None => (flag.as_str(), None),
            };
            appliances.push(appliance(name.to_owned(), socket, &run_dir)?);
        }
        ensure!(
            appliances.len() <= MAX_APPLIANCES,
            "appliance: asked {}, allowed {MAX_APPLIANCES}; run a second ferroce-ctld with its own --run-dir",
            appliances.len()
        );
        let mut seen = BTreeSet::new();
        for appliance in &appliances {
            ensure!(seen.insert(&appliance.name), "appliance.name: {} is given twice", appliance.name);
        }
        Ok(Config { run_dir, appliances })
    }
}

fn parse(text: &str) -> anyhow::Result<File> {
    Ok(toml::from_str(text)?)
}

fn appliance(name: String, socket: Option<PathBuf>, run_dir: &Path) -> anyhow::Result<ApplianceConfig> {
    check_name(&name)?;
    let socket = match socket {
        Some(path) if path.is_absolute() => path,
        Some(path) if path.as_os_str().is_empty() => bail!("appliance.socket: empty path for {name}"),
        // Relative to the run folder, so that a file can be moved with its folder.
        Some(path) => run_dir.join(path),
        None => run_dir.join(format!("{name}.sock")),
    };
    Ok(ApplianceConfig { name, socket })
}

fn check_name(name: &str) -> anyhow::Result<()> {
    let ok = !name.is_empty()
        && name.len() <= MAX_NAME_BYTES
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'))
        && !name.starts_with(['.', '-']);
    ensure!(
        ok,
        "appliance.name: asked {name:?}, allowed 1 to {MAX_NAME_BYTES} letters, digits, '_', '-' and '.', not \
         beginning with '.' or '-'"
    );
    ensure!(
        name != "ctl" && name != "ro",
        "appliance.name: {name} is taken by the control process's own socket {name}.sock"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(text: &str, run_dir: Option<&str>, flags: &[&str]) -> anyhow::Result<Config> {
        let flags: Vec<String> = flags.iter().map(|s| (*s).to_owned()).collect();
        Config::build(parse(text)?, run_dir.map(Path::new), &flags)
    }

    #[test]
    fn defaults_file_and_flags() {
        let config = build("", None, &[]).expect("empty is fine");
        assert_eq!((config.run_dir, config.appliances.len()), (PathBuf::from(DEFAULT_RUN_DIR), 0));
        let text = "[control]\nrun_dir = \"/a\"\n[[appliance]]\nname = \"x\"\n[[appliance]]\nname = \"y\"\n\
                    socket = \"sub/y.sock\"\n";
        let config = build(text, None, &["z", "w=/else/w.sock"]).expect("fine");
        let sockets: Vec<_> = config.appliances.iter().map(|a| a.socket.display().to_string()).collect();
        assert_eq!(sockets, ["/a/x.sock", "/a/sub/y.sock", "/a/z.sock", "/else/w.sock"]);
        let config = build(text, Some("/b"), &[]).expect("fine");
        assert_eq!(config.appliances[0].socket, PathBuf::from("/b/x.sock"), "the command line wins");
    }

    #[test]
    fn every_bad_value_is_named() {
        let refused = |text: &str, flags: &[&str], part: &str| {
            let error = format!("{:#}", build(text, None, flags).expect_err("refused"));
            assert!(error.contains(part), "{error:?} lacks {part:?}");
        };
        refused("[control]\nrundir = \"/a\"\n", &[], "rundir");
        refused("[contrl]\n", &[], "contrl");
        refused("[[appliance]]\nname = \"a\"\nport = 1\n", &[], "port");
        refused("[[appliance]]\nsocket = \"a\"\n", &[], "name");
        refused("[[appliance]]\nname = \"a\"\n", &["a"], "given twice");
        refused("", &["a/b"], "a/b");
        refused("", &["-a"], "-a");
        refused("", &["ctl"], "ctl.sock");
        refused("", &["a="], "empty path");
        refused("", &[&"n".repeat(33)], "1 to 32");
        let many: Vec<String> = (0..65).map(|i| format!("a{i}")).collect();
        refused("", &many.iter().map(String::as_str).collect::<Vec<_>>(), "allowed 64");
    }

    #[test]
    fn the_example_files_load() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
        let mut found = 0;
        for entry in fs::read_dir(&folder).expect("configs/") {
            let path = entry.expect("entry").path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with("ctld") && name.ends_with(".toml") {
                let text = fs::read_to_string(&path).expect("readable");
                Config::build(parse(&text).expect(&name), None, &[]).expect(&name);
                found += 1;
            }
        }
        assert!(found > 0, "no ctld*.toml in {}", folder.display());
    }
}

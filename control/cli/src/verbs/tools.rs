//! Verbs that `ferroce-tools` does: it becomes this process, so that signals and exit status are its own.
//!
//! The invariant: this command links no data plane; what carries one is a program of its own.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use crate::args::Global;
use crate::fail::Fail;

const PROGRAM: &str = "ferroce-tools";

/// Becomes `ferroce-tools VERB ARGS`. Returns only when that fails.
pub fn exec(verb: &str, global: &Global, args: &[String]) -> Result<ExitCode, Fail> {
    let own = std::env::current_exe().ok();
    let path = std::env::var_os("PATH");
    let Some(program) = find(own.as_deref().and_then(Path::parent), path) else {
        return Err(Fail::Refused(format!(
            "{verb} is done by {PROGRAM}, which is neither beside {} nor on the PATH; install it, or build it with \
             cargo build -p {PROGRAM}",
            own.unwrap_or_default().display()
        )));
    };
    let mut command = Command::new(&program);
    command.arg(verb).args(args);
    // Given before the verb it is ours to hand on.
    if global.json && !args.iter().any(|arg| arg == "--json") {
        command.arg("--json");
    }
    let error = command.exec();
    Err(Fail::Refused(format!("{}: {error}", program.display())))
}

fn find(beside: Option<&Path>, path: Option<OsString>) -> Option<PathBuf> {
    let folders = beside.map(Path::to_owned).into_iter();
    let listed: Vec<PathBuf> = path.map(|path| std::env::split_paths(&path).collect()).unwrap_or_default();
    folders.chain(listed).map(|folder| folder.join(PROGRAM)).find(|program| program.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beside_comes_before_the_path() {
        let dir = std::env::temp_dir().join(format!("ferroce-cli-{}", std::process::id()));
        for sub in ["a", "b"] {
            std::fs::create_dir_all(dir.join(sub)).expect("folder");
            std::fs::write(dir.join(sub).join(PROGRAM), "").expect("file");
        }
        let path = Some(OsString::from(dir.join("b")));
        assert_eq!(find(Some(&dir.join("a")), path.clone()), Some(dir.join("a").join(PROGRAM)));
        assert_eq!(find(Some(&dir.join("none")), path), Some(dir.join("b").join(PROGRAM)));
        assert_eq!(find(None, None), None);
        std::fs::remove_dir_all(dir).expect("clean");
    }
}

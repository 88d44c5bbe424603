//! `--batch`: tests from a file, a line each, against one `ferroce perf serve`.
//!
//! A line has a test and its options, as on the command line; what the command line itself has holds for every line that
//! does not say otherwise. `#` starts a comment.

use std::path::Path;

use clap::{Args, Command, FromArgMatches};

use super::options::{Job, PerfArgs, Test};
use crate::fail::{Fail, Outcome};

/// One line.
pub struct Line {
    /// Its number, from 1.
    pub number: usize,
    /// Its words.
    pub text: String,
    /// The test.
    pub test: Test,
    /// All options.
    pub args: PerfArgs,
}

/// Reads the file; `general` are the words of the command line that hold for all lines.
///
/// # Errors
/// Names the first line that is wrong.
pub fn read(path: &Path, general: &[String]) -> Outcome<Vec<Line>> {
    let text = std::fs::read_to_string(path);
    let text = text.map_err(|e| Fail::usage(format!("{}: {e}", path.display())))?;
    let lines = parse(&text, general).map_err(|e| Fail::usage(format!("{}: {e}", path.display())))?;
    if lines.is_empty() {
        return Err(Fail::usage(format!("{}: no test in it", path.display())));
    }
    Ok(lines)
}

fn parse(text: &str, general: &[String]) -> Result<Vec<Line>, String> {
    let mut lines = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        let words = line.split('#').next().unwrap_or("").trim();
        if words.is_empty() {
            continue;
        }
        let at = |e: String| format!("line {number}: {e}");
        let own = words.split_whitespace().map(str::to_string);
        // A later option wins.
        let all = std::iter::once("perf".to_string()).chain(general.iter().cloned()).chain(own);
        let args = options(all).map_err(at)?;
        args.check().map_err(|e| at(e.to_string()))?;
        match args.job().map_err(|e| at(e.to_string()))? {
            Job::Server(test) => lines.push(Line { number, text: words.into(), test, args }),
            _ => return Err(at("give a test and its options; HOST stands on the command line".into())),
        }
    }
    Ok(lines)
}

/// Options from words; the first one is the program's name.
fn options(words: impl Iterator<Item = String>) -> Result<PerfArgs, String> {
    let command = PerfArgs::augment_args(
        Command::new("perf").version(env!("CARGO_PKG_VERSION")).args_override_self(true),
    );
    let matches = command.try_get_matches_from(words).map_err(|e| first_line(&e.to_string()))?;
    PerfArgs::from_arg_matches(&matches).map_err(|e| first_line(&e.to_string()))
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or("").trim_start_matches("error: ").to_string()
}

/// The words of the command line that hold for every line: all but the verb, the host, the file and the switch.
pub fn general_words(all: impl Iterator<Item = String>, host: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut all = all.skip_while(|word| word != "perf").skip(1).peekable();
    while let Some(word) = all.next() {
        match word.as_str() {
            "--batch" => {
                all.next();
            }
            "--keep-going" => {}
            _ if word.starts_with("--batch=") || word == host => {}
            _ => words.push(word),
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_string).collect()
    }

    #[test]
    fn lines_take_the_general_words_and_overrule_them() {
        let text = "# all of it\nsend-lat -s 64  # small\n\n  write_bw -n 7\n";
        let lines = parse(text, &words("-n 100 -p 1234")).unwrap();
        assert_eq!(lines.iter().map(|l| l.number).collect::<Vec<_>>(), [2, 4]);
        assert_eq!(lines[0].test.to_string(), "send-lat");
        assert_eq!((lines[0].args.load.size, lines[0].args.load.iters), (Some(64), Some(100)));
        assert_eq!((lines[1].args.load.iters, lines[1].args.peer.port), (Some(7), 1234));
    }

    #[test]
    fn the_wrong_line_is_named() {
        for (text, told) in [
            ("send-lat\nsend-late", "line 2: \"send-late\" is not a test"),
            ("send-lat -s", "line 1: a value is required"),
            ("send-lat somewhere", "line 1: give a test"),
            ("serve", "line 1: give a test"),
            ("send-lat -R", "line 1: -R, --rdma_cm: comes with the connection manager"),
            ("--batch x", "line 1:"),
        ] {
            let error = parse(text, &[]).err().unwrap();
            assert!(error.contains(told), "{text}: {error}");
        }
    }

    #[test]
    fn the_file_and_the_host_are_not_for_the_lines() {
        let all = words("ferroce-tools perf --batch f -p 7 --keep-going 10.0.0.1 --json");
        assert_eq!(general_words(all.into_iter(), "10.0.0.1"), ["-p", "7", "--json"]);
    }
}

//! Packet scripts: `tests/scripts/*.txt` hold what goes in and what must come out, one behaviour per file.
//!
//! After a wanted change: `cargo test -p ferroce-transport --test scripts -- --ignored rewrite`, then read the
//! difference.

#[path = "support/script.rs"]
mod script;
mod support;

use std::fs;
use std::path::PathBuf;

fn files() -> Vec<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/scripts");
    let mut files: Vec<_> = fs::read_dir(folder)
        .expect("the folder is there")
        .map(|entry| entry.expect("readable").path())
        .filter(|path| path.extension().is_some_and(|ext| ext == "txt"))
        .collect();
    files.sort();
    files
}

#[test]
fn every_script_plays_as_written() {
    let files = files();
    assert!(files.len() >= 20, "scripts are missing: {}", files.len());
    let mut wrong = Vec::new();
    for path in files {
        let text = fs::read_to_string(&path).expect("readable");
        let played = script::run(&text);
        if played != text {
            let line = text.lines().zip(played.lines()).position(|(a, b)| a != b).unwrap_or(0);
            wrong.push(format!(
                "{} differs from line {} on; it now plays as\n{played}",
                path.display(),
                line + 1
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_script_plays_the_same_on_queue_pairs_that_move() {
    for path in files() {
        let text = fs::read_to_string(&path).expect("readable");
        support::moving(|| {
            let played = script::run(&text);
            assert!(played == text, "{} now plays as\n{played}", path.display());
        });
    }
}

/// The table of rules names scripts and tests that exist, and every script.
#[test]
fn every_script_shows_a_rule() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let read = |path: PathBuf| fs::read_to_string(path).expect("readable");
    let mut code = read(folder.join("src/qp/state.rs"));
    for name in ["faults", "longest", "pair", "services"] {
        code += &read(folder.join(format!("tests/{name}.rs")));
    }
    let table = include_str!("rules.txt");
    let rules = table.split("\n\n").nth(1).expect("lines behind the heading");
    let mut named = std::collections::HashSet::new();
    for line in rules.lines() {
        let (rule, tests) = line.rsplit_once(": ").unwrap_or_else(|| panic!("no tests in {line:?}"));
        for test in tests.split_whitespace() {
            match test.strip_prefix("rust:") {
                Some(test) => assert!(code.contains(&format!("fn {test}()")), "{rule}: no test {test}"),
                None => _ = named.insert(test.to_string()),
            }
        }
    }
    let stem = |path: PathBuf| path.file_stem().expect("a name").to_string_lossy().into_owned();
    let there: std::collections::HashSet<_> = files().into_iter().map(stem).collect();
    let differ: Vec<_> = named.symmetric_difference(&there).collect();
    assert!(
        differ.is_empty(),
        "in tests/rules.txt or in tests/scripts, but not in both: {differ:?}; give a new script a line of the table"
    );
}

#[test]
#[ignore = "rewrites the scripts with what happens now"]
fn rewrite() {
    for path in files() {
        let text = fs::read_to_string(&path).expect("readable");
        fs::write(&path, script::run(&text)).expect("writable");
    }
}

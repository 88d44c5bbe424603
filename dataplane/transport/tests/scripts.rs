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

#[test]
#[ignore = "rewrites the scripts with what happens now"]
fn rewrite() {
    for path in files() {
        let text = fs::read_to_string(&path).expect("readable");
        fs::write(&path, script::run(&text)).expect("writable");
    }
}

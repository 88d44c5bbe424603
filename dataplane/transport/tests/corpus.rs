//! The kept corpus of the fuzz targets that drive queue pairs, replayed: what a fuzzer once found interesting is tried
//! on every run.

#[path = "../../fuzz/src/frames.rs"]
#[allow(dead_code)]
mod frames;
#[path = "../../fuzz/src/qp/mod.rs"]
#[allow(dead_code)]
mod qp;

use std::fs;
use std::path::PathBuf;

/// Plays every input of a target.
fn replay(target: &str, play: fn(&[u8])) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let mut inputs = 0;
    for entry in fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
        let path = entry.expect("readable").path();
        println!("{}", path.display());
        play(&fs::read(&path).expect("readable"));
        inputs += 1;
    }
    assert!(inputs >= 20, "{inputs} inputs kept for {target}");
}

#[test]
fn reliable_connections() {
    replay("qp_rc", qp::rc);
}

#[test]
fn datagrams() {
    replay("qp_datagram", qp::datagram);
}

#[test]
fn images() {
    replay("qp_image", qp::image);
}

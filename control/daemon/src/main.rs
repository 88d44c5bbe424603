//! `ferroce-ctld`.

fn main() {}

//! `ferroce-sim`.

fn main() {}

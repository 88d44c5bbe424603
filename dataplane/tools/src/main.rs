//! `ferroce-tools`.

fn main() {}

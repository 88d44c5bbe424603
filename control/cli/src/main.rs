//! `ferroce`.

fn main() {}

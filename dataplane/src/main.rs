//! `ferroced`.

fn main() {}

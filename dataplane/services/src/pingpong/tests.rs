//! Specifications and data of the exchange; the exchange itself is tested over two engines.

use super::data::{self, Filling};
use super::*;
use ferroce_mem::os::{Arena, ArenaConfig, PagePolicy};

fn block(bytes: usize) -> Block {
    let config = ArenaConfig { bytes: 2 << 20, pages: PagePolicy::Normal, numa_node: None };
    let (arena, _) = Arena::new(config).unwrap();
    arena.alloc(bytes, 64).unwrap()
}

#[test]
fn defaults_are_the_originals() {
    let spec = PingPongSpec::new(Role::Client);
    assert_eq!((spec.size, spec.iters, spec.rx_depth), (4096, 1000, 1000));
    assert_eq!(spec.check(), Ok(()));
    assert_eq!(PingPongSpec { iters: 0, ..spec }.check().unwrap_err().attribute, "iters");
    assert_eq!(PingPongSpec { rx_depth: 0, ..spec }.check().unwrap_err().attribute, "rx_depth");
    assert_eq!(PingPongSpec { size: u32::MAX, ..spec }.check().unwrap_err().attribute, "size");
}

#[test]
fn page_starts_are_zero_in_both_fillings() {
    for filling in [Filling::Classic, Filling::Pattern] {
        let bytes = data::sample(10_000, filling, 5);
        assert_eq!((bytes[0], bytes[4096], bytes[8192]), (0, 0, 0));
    }
    assert_eq!(data::sample(4, Filling::Classic, 0), [0, 0x7b, 0x7b, 0x7b]);
}

#[test]
fn the_originals_client_is_recognised() {
    let block = block(16384);
    block.write(0, &data::sample(10_000, Filling::Classic, 0));
    assert_eq!(data::recognise(&block, 0, 10_000), Ok(Filling::Classic));
    assert_eq!(data::check(&block, 0, 10_000, Filling::Classic, 77), Ok(()));
    data::fill(&block, 0, 10_000, 0).unwrap();
    assert_eq!(data::recognise(&block, 0, 10_000), Ok(Filling::Pattern));
    assert_eq!(data::check(&block, 0, 10_000, Filling::Pattern, 0), Ok(()));
}

#[test]
fn wrong_data_is_found_and_named() {
    let block = block(16384);
    data::fill(&block, 0, 10_000, 3).unwrap();
    block.write(8192, &[9]);
    let fault = data::check(&block, 0, 10_000, Filling::Pattern, 3).unwrap_err();
    assert_eq!(fault, Fault::Data { message: 3, offset: 8192, expected: 0, got: 9 });
    // A message of the round before is not this one.
    data::fill(&block, 0, 10_000, 2).unwrap();
    assert!(data::check(&block, 0, 10_000, Filling::Pattern, 3).is_err());
    // A client without -c leaves its page starts alone.
    data::fill_classic(&block, 0, 10_000).unwrap();
    assert!(data::check(&block, 0, 10_000, Filling::Classic, 0).is_err());
}

#[test]
fn one_byte_that_never_arrived_is_seen() {
    let block = block(64);
    data::fill(&block, 0, 1, 0).unwrap();
    assert_eq!(data::check(&block, 0, 1, Filling::Pattern, 9), Ok(()));
    data::spoil(&block, 0, 1).unwrap();
    assert!(data::check(&block, 0, 1, Filling::Pattern, 9).is_err());
}

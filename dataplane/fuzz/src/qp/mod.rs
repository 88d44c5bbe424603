//! Queue pairs under whatever a peer, a program, control and the clock can do: the targets `qp_rc`, `qp_datagram` and
//! `qp_image`.
//!
//! The real `Qp` over the real key table. `host` is one queue pair with all its checks, `model` what an observer knows,
//! `steps` what may happen, `pair` two of them and a wire, `image` images
//! that were changed, `frame` what a peer may send, `setup` attributes, `buffer` the memory. The bytes decide
//! everything. `cargo test -p ferroce-transport` replays the kept corpus.
//!
//! What is checked, besides that nothing panics: bytes change only where a posted receive, a READ, or a right granted
//! to the peer allows it, and no more of them than the packet brought; each accepted work request completes once at
//! most and in order, and once exactly when the queue pair goes to ERR; a receive is never longer than its buffer;
//! what is sent parses with a right ICRC, within the path MTU, in a state that allows it, new requests in PSN order and
//! repeated ones as they were; who waits has a timer; held keys are those of posted work; polls end; a move by export
//! and import changes nothing.

pub mod buffer;
pub mod frame;
pub mod host;
pub mod image;
pub mod input;
pub mod model;
pub mod pair;
pub mod setup;
pub mod steps;

use ferroce_verbs::QpType;

use host::Host;
use input::Input;
use setup::Setup;

/// A reliable connection against a peer that is the fuzzer, or two of them and a bad wire, by the first byte.
pub fn rc(data: &[u8]) {
    let mut input = Input::new(data);
    let two = input.u8() & 3 == 3;
    let setup = Setup::new(QpType::Rc, &mut input);
    if two { pair::run(setup, &mut input) } else { one(setup, &mut input) }
}

/// UC, or UD, by the first byte.
pub fn datagram(data: &[u8]) {
    let mut input = Input::new(data);
    let qp_type = if input.flag() { QpType::Uc } else { QpType::Ud };
    let setup = Setup::new(qp_type, &mut input);
    one(setup, &mut input);
}

fn one(setup: Setup, input: &mut Input<'_>) {
    let mut host = Host::new(setup);
    steps::bring_up(&mut host, input);
    steps::run(host, input);
}

/// Images of queue pairs.
pub fn image(data: &[u8]) {
    image::run(data);
}

//! PERF-3: odd combinations of queue pairs, depths, counts, lists and moderation end with exactly what was asked, or are
//! refused at once.

use ferroce_services::{PerfMode, PerfOp, PerfSpec, Role};
use ferroce_verbs::QpType;

#[allow(dead_code)]
mod world;

use world::World;

/// Shape of a test besides its operation.
#[derive(Clone, Copy, Debug)]
struct Shape {
    qps: u32,
    tx_depth: u32,
    iters: u64,
    post_list: u32,
    cq_mod: u32,
    bidirectional: bool,
}

fn shapes(counts: &[u64]) -> Vec<Shape> {
    let mut all = Vec::new();
    for qps in [1, 3, 5] {
        for tx_depth in [1, 12, 83] {
            for &iters in counts {
                for post_list in [1, 8] {
                    for cq_mod in [1, 7, 100] {
                        for bidirectional in [false, true] {
                            all.push(Shape { qps, tx_depth, iters, post_list, cq_mod, bidirectional });
                        }
                    }
                }
            }
        }
    }
    all
}

fn spec_of(op: PerfOp, mode: PerfMode, size: u32, shape: Shape) -> PerfSpec {
    let Shape { qps, tx_depth, iters, post_list, cq_mod, bidirectional } = shape;
    PerfSpec {
        connection: QpType::Rc,
        qps,
        tx_depth,
        rx_depth: 41,
        iters,
        post_list,
        cq_mod,
        bidirectional,
        progress_deadline_ns: 60_000_000_000,
        ..PerfSpec::new(op, mode, Role::Client, size)
    }
}

/// Runs it if it is allowed; false if it is refused.
fn ends_exactly(world: &World, spec: PerfSpec) -> bool {
    let case = format!("{spec:?}");
    if let Err(refused) = spec.check() {
        assert!(!refused.allowed.is_empty(), "{case}: {refused}");
        return false;
    }
    let (client, server) = world.perf(0, spec);
    let all = spec.iters * u64::from(spec.qps);
    assert_eq!(client.messages, all, "{case}");
    assert!(client.is_clean() && !client.stopped, "{case}");
    if spec.bidirectional || spec.op == PerfOp::Send {
        assert_eq!(server.messages, all, "{case}");
    }
    true
}

#[test]
fn bandwidth_of_every_shape_ends_with_the_exact_count() {
    let world = World::new(1);
    let (mut ran, mut refused) = (0, 0);
    for op in PerfOp::ALL {
        for shape in shapes(&[1, 7]) {
            let size = if op.is_atomic() { 8 } else { 3 };
            if ends_exactly(&world, spec_of(op, PerfMode::Bw, size, shape)) {
                ran += 1;
            } else {
                // A list longer than the queue is the one thing that cannot be.
                assert!(shape.post_list > shape.tx_depth, "{op:?} {shape:?}");
                refused += 1;
            }
        }
    }
    assert!(ran > 800 && refused > 0, "{ran} ran, {refused} were refused");
}

#[test]
fn ten_thousand_messages_end_with_the_exact_count() {
    let world = World::new(1);
    for op in PerfOp::ALL {
        for (qps, tx_depth, post_list, cq_mod, bidirectional) in
            [(5, 12, 1, 7, false), (3, 83, 8, 100, true), (1, 12, 8, 7, true)]
        {
            let shape = Shape { qps, tx_depth, iters: 10_000, post_list, cq_mod, bidirectional };
            assert!(ends_exactly(&world, spec_of(op, PerfMode::Bw, 8, shape)), "{op:?} {shape:?} is refused");
        }
    }
}

#[test]
fn odd_sizes_end_with_the_exact_count() {
    let world = World::new(1);
    for op in [PerfOp::Send, PerfOp::Write, PerfOp::Read] {
        for mode in [PerfMode::Lat, PerfMode::Bw] {
            for size in [0, 1, 3, 4095, (8 << 20) + 1] {
                let tx_depth = if mode == PerfMode::Lat { 1 } else { 3 };
                let shape =
                    Shape { qps: 1, tx_depth, iters: 3, post_list: 1, cq_mod: 7, bidirectional: false };
                let ran = ends_exactly(&world, spec_of(op, mode, size, shape));
                // The one that watches the last byte needs one.
                let has_no_byte = size == 0 && op == PerfOp::Write && mode == PerfMode::Lat;
                assert_eq!(ran, !has_no_byte, "{op:?} {mode:?} {size}");
            }
        }
    }
}

//! Nothing on the device depends on how many regions there are: ten thousand at once, each used by a peer and dropped.
//!
//! Ratios within one run: the smallest time of a hundred operations, with a hundred regions and with between five and
//! ten thousand of them. What the key table itself does without a scan is shown in its own crate; here are the device's
//! records and the workers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ferroce_mem::os::Block;
use ferroce_verbs::error::VerbsErrorKind;
use ferroce_verbs::{Device, MrKeys, Queues, RemoteAddr, SendFlags, SendOp, WcStatus};

use crate::harness::{ALL, Link, Node, Pair, Post, Side, config, ports};

const FEW: usize = 100;
const MANY: usize = 10_000;
/// WRITEs posted at once.
const BATCH: usize = 25;
/// A scan of all of them in each operation would show as far more.
const RATIO: f64 = 3.0;

fn pair(workers: usize) -> Pair {
    let (a, b) = ports(workers as u16, 4500);
    let large = |name: &str, port| {
        let cfg = config(name, workers, &port);
        Node::start_with(ferroce_engine::EngineConfig { max_mr: MANY as u32 + 2, ..cfg }, port)
    };
    Pair { a: large("a", a), b: large("b", b) }
}

/// The smallest time of `FEW` operations in a row out of `count`, looking only at the half where most regions exist.
fn each<T>(
    items: impl IntoIterator<Item = T>,
    crowded: impl Fn(usize) -> bool,
    mut one: impl FnMut(Vec<T>),
) -> Duration {
    let (mut best, mut done, mut items) = (Duration::MAX, 0, items.into_iter());
    loop {
        let part: Vec<T> = items.by_ref().take(FEW).collect();
        if part.is_empty() {
            return best;
        }
        let start = Instant::now();
        one(part);
        if crowded(done) {
            best = best.min(start.elapsed());
        }
        done += FEW;
    }
}

/// Times of `FEW` regions each: registering, a WRITE by the peer into each, deregistering.
fn round(pair: &Pair, a: Side, source: &crate::harness::Buffer, count: usize) -> [Duration; 3] {
    let (arena, device) = (&pair.b.arena, &pair.b.device);
    let blocks: Vec<_> = (0..count).map(|_| Arc::new(arena.alloc(64, 64).expect("room"))).collect();
    let mut regions: Vec<(Arc<Block>, MrKeys)> = Vec::with_capacity(count);
    let registered = each(
        blocks,
        |done| done + FEW >= count / 2,
        |blocks| {
            for block in blocks {
                let keys = device.reg_mr(pair.b.pd, block.clone(), ALL).expect("room");
                regions.push((block, keys));
            }
        },
    );
    let used = each(
        &regions,
        |_| true,
        |part| {
            for batch in part.chunks(BATCH) {
                write_each(pair, a, source, batch);
            }
        },
    );
    let wanted = source.read(64);
    for (block, _) in &regions {
        assert!(block.to_vec() == wanted, "each got its bytes");
    }
    let mut keys: Vec<MrKeys> = regions.iter().map(|(_, keys)| *keys).collect();
    // Not in the order they came in.
    keys.sort_unstable_by_key(|keys| keys.lkey.0);
    let dropped = each(
        keys,
        |done| done <= count / 2,
        |keys| {
            keys.iter().for_each(|keys| device.dereg_mr(keys.lkey).expect("nothing uses it"));
        },
    );
    [registered, used, dropped]
}

/// A WRITE into each region; only the last is signalled.
fn write_each(pair: &Pair, a: Side, source: &crate::harness::Buffer, regions: &[&(Arc<Block>, MrKeys)]) {
    let posts: Vec<Post> = regions
        .iter()
        .enumerate()
        .map(|(i, (_, keys))| {
            let op = SendOp::Write { remote_addr: RemoteAddr(keys.iova), rkey: keys.rkey };
            let mut post = Post::new(i as u64, op, source.sge(0, 64));
            post.flags.set(SendFlags::SIGNALED, i + 1 == regions.len());
            post
        })
        .collect();
    pair.a.on(a.worker, move |core| {
        posts.iter().for_each(|post| core.post_send(a.qpn, &post.wr()).expect("room"));
    });
    assert_eq!(pair.a.completions(a.worker, a.cq, 1)[0].status, WcStatus::Success);
}

#[test]
fn ten_thousand_regions_are_registered_used_and_dropped_at_the_price_of_a_hundred() {
    for workers in [1u8, 2] {
        let pair = pair(workers as usize);
        let (a, b) = pair.connected((0, workers - 1), Link::default());
        let source = pair.a.buffer(64);
        source.pattern(64, 5);
        let best = |count: usize, rounds: usize| {
            (0..rounds)
                .map(|_| round(&pair, a, &source, count))
                .reduce(|x, y| [0, 1, 2].map(|i| x[i].min(y[i])))
        };
        let (few, many) = (best(FEW, 30).expect("rounds"), best(MANY, 1).expect("rounds"));
        for (what, (few, many)) in ["registered", "used", "dropped"].iter().zip(few.iter().zip(&many)) {
            let ratio = many.as_nanos() as f64 / few.as_nanos().max(1) as f64;
            println!(
                "workers {workers}, {what}: {few:?} with {FEW} regions, {many:?} with {MANY}: {ratio:.2}"
            );
            assert!(ratio < RATIO, "{what}: {few:?} with {FEW} regions, but {many:?} with {MANY}");
        }
        // Among ten thousand, the one in use is busy, whoever uses it, and the others go.
        let device = &pair.b.device;
        let all: Vec<_> = (0..MANY).map(|_| pair.b.buffer(64)).collect();
        pair.b.post_recv(b.worker, b.qpn, 1, all[777].sge(0, 64)).expect("room");
        let why = device.dereg_mr(all[777].lkey()).expect_err("a receive names it");
        assert_eq!(why.kind, VerbsErrorKind::Busy);
        assert!(why.allowed.contains("1 entries of posted work"), "{why}");
        let more = Arc::new(pair.b.arena.alloc(64, 64).expect("room"));
        let more = [0; 3].map(|_| device.reg_mr(pair.b.pd, more.clone(), ALL));
        assert_eq!(more[2].as_ref().err().map(|why| why.kind), Some(VerbsErrorKind::Exhausted), "{more:?}");
        pair.a.post_send(a.worker, a.qpn, Post::new(2, SendOp::Send, source.sge(0, 64))).expect("room");
        assert_eq!(pair.b.completions(b.worker, b.cq, 1)[0].status, WcStatus::Success);
        for buffer in &all {
            device.dereg_mr(buffer.lkey()).expect("nothing uses it any more");
        }
        pair.stop();
    }
}

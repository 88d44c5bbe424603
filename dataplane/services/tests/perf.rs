//! Perf tests of every operation, connection and number of queue pairs, between two of ours.

use std::time::Duration;

use ferroce_nic::wrap::{FaultConfig, Rates};
use ferroce_services::{
    Fault, PerfLayout, PerfMemory, PerfMode, PerfOp, PerfRate, PerfReport, PerfService, PerfSpec, Role, State,
};
use ferroce_verbs::{Device, QpType, WcStatus};

#[allow(dead_code)]
mod world;

use world::calls::Calls;
use world::{World, endpoints, wait};

const MODES: [PerfMode; 2] = [PerfMode::Lat, PerfMode::Bw];

/// A checked test.
fn checked(op: PerfOp, mode: PerfMode, connection: QpType, size: u32) -> PerfSpec {
    let size = if op.is_atomic() { 8 } else { size };
    PerfSpec {
        connection,
        check_data: true,
        // A round trip costs two threads their sleep.
        iters: if mode == PerfMode::Bw { 120 } else { 24 },
        tx_depth: if mode == PerfMode::Bw { 16 } else { 1 },
        rx_depth: 64,
        cq_mod: 5,
        progress_deadline_ns: 10_000_000_000,
        ..PerfSpec::new(op, mode, Role::Client, size)
    }
}

fn every_test(mut each: impl FnMut(PerfSpec)) {
    for op in PerfOp::ALL {
        for &connection in op.connections() {
            for mode in MODES {
                each(checked(op, mode, connection, 1000));
            }
        }
    }
}

/// Where messages may be lost for want of room the rate of these tests is capped, and all receives are there at once.
fn gentle(spec: PerfSpec) -> PerfSpec {
    let rx_depth = if spec.may_lose() { 256 } else { spec.rx_depth };
    let rate =
        (spec.may_lose() && spec.mode == PerfMode::Bw).then_some(PerfRate { msgs_per_s: 100_000, burst: 8 });
    PerfSpec { rate, rx_depth, ..spec }
}

fn assert_whole(spec: &PerfSpec, client: &PerfReport, server: &PerfReport, case: &str) {
    let all = spec.iters * u64::from(spec.qps);
    assert_eq!(client.messages, all, "{case}");
    assert_eq!(client.rtt.map(|r| r.samples), (spec.mode == PerfMode::Lat).then_some(all), "{case}");
    assert!(client.is_clean() && !client.stopped, "{case}: {client:?}");
    let counts = spec.op == PerfOp::Send || spec.op == PerfOp::Write && spec.mode == PerfMode::Lat;
    assert_eq!(server.messages, if counts { all } else { 0 }, "{case}");
    assert_eq!((client.lost, server.lost), (0, 0), "{case}");
}

#[test]
fn every_operation_connection_and_number_of_queue_pairs() {
    let world = World::new(1);
    every_test(|spec| {
        for qps in [1, 8] {
            for (size, warmup) in [(1000, 7), (3, 0)] {
                let base = gentle(PerfSpec { qps, warmup, ..spec });
                let size = if spec.op.is_atomic() { 8 } else { size };
                let spec = PerfSpec { size, largest: size, ..base };
                let case = format!("{:?} {:?} {:?} {qps} of {size}", spec.op, spec.connection, spec.mode);
                let (client, server) = world.perf(0, spec);
                assert_whole(&spec, &client, &server, &case);
            }
        }
    });
}

#[test]
fn long_messages_over_several_packets_inline_and_lists() {
    let world = World::new(1);
    for (op, connection) in [
        (PerfOp::Send, QpType::Rc),
        (PerfOp::Send, QpType::Uc),
        (PerfOp::Write, QpType::Rc),
        (PerfOp::Write, QpType::Uc),
        (PerfOp::Read, QpType::Rc),
    ] {
        for (size, inline_bytes, post_list) in [(5_001, 0, 4), (100, 128, 1), (100, 128, 16), (0, 0, 5)] {
            let spec =
                PerfSpec { inline_bytes, post_list, qps: 3, ..checked(op, PerfMode::Bw, connection, size) };
            let spec = gentle(spec);
            let case = format!("{op:?} {connection:?} {size} inline {inline_bytes} lists of {post_list}");
            let (client, server) = world.perf(0, spec);
            assert_whole(&spec, &client, &server, &case);
        }
    }
}

#[test]
fn moderation_and_lists_of_every_ratio_end() {
    let world = World::new(1);
    for (tx_depth, cq_mod, post_list, iters, warmup) in [
        (1, 1, 1, 7, 0),
        (16, 16, 16, 16, 0),
        (16, 100, 16, 33, 5),
        (16, 4, 8, 100, 1),
        (16, 3, 8, 50, 3),
        (17, 17, 5, 101, 0),
        (64, 7, 1, 200, 13),
    ] {
        let base = checked(PerfOp::Write, PerfMode::Bw, QpType::Rc, 64);
        let spec = PerfSpec { tx_depth, cq_mod, post_list, iters, warmup, qps: 2, ..base };
        let (client, server) = world.perf(0, spec);
        assert_whole(&spec, &client, &server, &format!("{tx_depth} {cq_mod} {post_list} {iters}"));
    }
}

#[test]
fn both_directions_at_once() {
    let world = World::new(1);
    every_test(|spec| {
        if spec.mode == PerfMode::Lat {
            return;
        }
        for qps in [1, 4] {
            let spec = gentle(PerfSpec { qps, bidirectional: true, warmup: 3, ..spec });
            let case = format!("{:?} {:?} {qps}", spec.op, spec.connection);
            let (client, server) = world.perf(0, spec);
            let all = spec.iters * u64::from(qps);
            for report in [&client, &server] {
                assert_eq!(report.messages, all, "{case}");
                let received = if spec.op == PerfOp::Send { all } else { 0 };
                assert_eq!((report.received, report.lost), (received, 0), "{case}");
                assert!(report.is_clean(), "{case}");
            }
        }
    });
}

#[test]
fn polling_by_events() {
    let world = World::new(1);
    every_test(|spec| {
        if spec.op == PerfOp::Write && spec.mode == PerfMode::Lat {
            return;
        }
        let spec = gentle(PerfSpec { events: true, ..spec });
        let (client, server) = world.perf(0, spec);
        assert_whole(
            &spec,
            &client,
            &server,
            &format!("{:?} {:?} {:?}", spec.op, spec.connection, spec.mode),
        );
    });
}

/// A test makes two system calls on its worker, whatever it measures: it reads the thread's clock where the measurement
/// starts and where it ends. That nothing is allocated every test here holds.
#[test]
fn two_system_calls_in_a_whole_test() {
    every_test(|spec| {
        for layout in [PerfLayout::Ours, PerfLayout::Perftest] {
            // A filter stays with its thread: a world for each.
            let world = World::new(1);
            let bidirectional = spec.mode == PerfMode::Bw && layout == PerfLayout::Perftest;
            let qps = if spec.mode == PerfMode::Bw { 3 } else { 1 };
            let client = gentle(PerfSpec { layout, bidirectional, qps, ..spec });
            let server = PerfSpec { role: Role::Server, ..client };
            let mut pair = world.pair(0, &client, &server);
            let calls = [std::sync::Arc::<Calls>::default(), std::sync::Arc::default()];
            pair.calls = Some(calls.clone());
            let (asked, served) = pair.run(client, server);
            let case = format!("{:?} {:?} {:?} {layout:?}", spec.op, spec.connection, spec.mode);
            asked.expect(&case);
            served.expect(&case);
            assert_eq!(calls[0].made(), (2, 0, 0), "{case}: client");
            let measures = if server.is_passive() { 0 } else { 2 };
            assert_eq!(calls[1].made(), (measures, 0, 0), "{case}: server");
            pair.close();
        }
    });
}

/// Nobody tells of events: nothing may be polled.
#[test]
fn without_events_nothing_is_polled() {
    let world = World::new(1);
    let client = PerfSpec { events: true, ..checked(PerfOp::Read, PerfMode::Lat, QpType::Rc, 64) };
    let server = PerfSpec { role: Role::Server, ..client };
    let pair = world.pair(0, &client, &server);
    let memory = PerfMemory::prepare(&client, pair.a.block.clone()).unwrap();
    let (service, handle) = PerfService::new(client, endpoints(&client, &pair.a, &pair.b, memory)).unwrap();
    let id = world.client.add(0, service);
    let (device, channel) = (&world.client.device, pair.a.channel.unwrap());
    let done = || match handle.state() {
        State::Running { done } => done,
        _ => panic!("it ended"),
    };
    for _ in 0..4 {
        // A completion is there, and its event; while nobody tells of it nothing goes on.
        let cq = device.get_cq_event(channel, world::LIMIT).unwrap().expect("an event");
        device.ack_cq_events(cq, 1).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        let seen = done();
        std::thread::sleep(Duration::from_millis(10));
        assert_eq!(done(), seen);
        handle.notify();
    }
    handle.stop();
    let report = wait(&handle).unwrap();
    assert!(report.stopped);
    world.client.remove(id);
    while let Some(cq) = device.get_cq_event(channel, Duration::from_millis(50)).unwrap() {
        device.ack_cq_events(cq, 1).unwrap();
    }
    pair.close();
}

#[test]
fn a_capped_rate_is_kept() {
    let world = World::new(1);
    for (op, qps, burst, rate) in
        [(PerfOp::Write, 1, 1, 20_000), (PerfOp::Send, 4, 16, 40_000), (PerfOp::FetchAdd, 2, 5, 10_000)]
    {
        let spec = PerfSpec {
            qps,
            iters: 2_000 / u64::from(qps),
            rate: Some(PerfRate { msgs_per_s: rate, burst }),
            ..checked(op, PerfMode::Bw, QpType::Rc, 64)
        };
        let (client, server) = world.perf(0, spec);
        assert_whole(&spec, &client, &server, "capped");
        let ratio = client.msgs_per_s / rate as f64;
        // Never above, but for the first burst; how far below depends on what else the machine does.
        assert!(ratio < 1.05, "{op:?}: {ratio} of the rate");
        let least = (spec.iters * u64::from(qps) - 2 * u64::from(burst)) as f64 / rate as f64 * 1e9;
        assert!(client.elapsed_ns as f64 >= least, "{op:?}: {} ns", client.elapsed_ns);
    }
}

#[test]
fn an_open_loop_sees_what_waits() {
    let world = World::new(1);
    for op in PerfOp::ALL {
        for qps in [1, 8] {
            let spec = PerfSpec {
                open_loop: true,
                iters: 160 / u64::from(qps),
                tx_depth: 8,
                warmup: 2,
                qps,
                rate: Some(PerfRate { msgs_per_s: 10_000, burst: 1 }),
                ..checked(op, PerfMode::Lat, QpType::Rc, 64)
            };
            let (client, server) = world.perf(0, spec);
            assert_whole(&spec, &client, &server, &format!("{op:?} {qps}"));
        }
    }
}

/// A rate that nobody can keep: each message waits longer than the one before, and the samples say so; a closed loop would
/// not notice.
#[test]
fn coordinated_omission_is_not_omitted() {
    let world = World::new(1);
    let spec = PerfSpec {
        iters: 500,
        rate: Some(PerfRate { msgs_per_s: 1_000_000_000, burst: 1 }),
        ..checked(PerfOp::Read, PerfMode::Lat, QpType::Rc, 64)
    };
    let (open, _) = world.perf(0, PerfSpec { open_loop: true, ..spec });
    let rtt = open.rtt.unwrap();
    // All were meant to start at the beginning: the longest waited for the whole test, the median for half of it.
    let whole = open.elapsed_ns as f64;
    assert!(rtt.max_ns as f64 > 0.8 * whole, "{rtt:?} in {whole} ns");
    assert!(rtt.p50_ns as f64 > 0.1 * whole, "{rtt:?} in {whole} ns");
    let (closed, _) = world.perf(0, spec);
    let rtt = closed.rtt.unwrap();
    assert!((rtt.p50_ns as f64) < 0.1 * closed.elapsed_ns as f64, "{rtt:?}");
}

#[test]
fn a_sweep_on_the_same_queue_pairs_and_memory() {
    let world = World::new(1);
    every_test(|spec| {
        if spec.op.is_atomic() {
            return;
        }
        for layout in [PerfLayout::Ours, PerfLayout::Perftest] {
            let qps = if layout == PerfLayout::Ours || spec.mode == PerfMode::Bw { 2 } else { 1 };
            // The path MTU is 1024 here.
            let largest = if spec.connection == QpType::Ud { 1024 } else { 4096 };
            let sizes = [2, 8, 64, 512, largest];
            let first = PerfSpec { layout, qps, largest, ..gentle(spec) };
            let client = PerfSpec { size: 2, ..first };
            let server = PerfSpec { role: Role::Server, ..client };
            let pair = world.pair(0, &client, &server);
            let memory = |spec: &PerfSpec, block: &std::sync::Arc<_>| {
                PerfMemory::prepare(spec, std::sync::Arc::clone(block)).unwrap()
            };
            let (a, b) = (memory(&client, &pair.a.block), memory(&server, &pair.b.block));
            for size in sizes {
                let client = PerfSpec { size, ..client };
                let server = PerfSpec { size, ..server };
                a.refill(&client).unwrap();
                b.refill(&server).unwrap();
                let (asked, served) = pair.run_on(
                    client,
                    endpoints(&client, &pair.a, &pair.b, a.clone()),
                    server,
                    endpoints(&server, &pair.b, &pair.a, b.clone()),
                );
                let case = format!("{:?} {:?} {:?} {layout:?} {size}", spec.op, spec.connection, spec.mode);
                let (asked, served) = (asked.expect(&case), served.expect(&case));
                assert_whole(&client, &asked, &served, &case);
                assert!(served.is_clean() || served.stopped, "{case}");
            }
            pair.close();
        }
    });
}

#[test]
fn perftests_layout_in_every_test() {
    let world = World::new(1);
    every_test(|spec| {
        for (qps, size) in [(1, 3), (1, 1025), (1, 9001), (8, 600)] {
            let size = if spec.op.is_atomic() { 8 } else { size };
            let fits = spec.connection != QpType::Ud || size <= 1024;
            if !fits || (spec.mode == PerfMode::Lat && qps > 1) {
                continue;
            }
            for bidirectional in [false, spec.mode == PerfMode::Bw] {
                let spec = gentle(PerfSpec {
                    layout: PerfLayout::Perftest,
                    qps,
                    size,
                    largest: size,
                    bidirectional,
                    iters: if spec.mode == PerfMode::Bw { 200 } else { 24 },
                    tx_depth: if spec.mode == PerfMode::Bw { 40 } else { 1 },
                    ..spec
                });
                let case = format!(
                    "{:?} {:?} {:?} {qps} of {size}, both {bidirectional}",
                    spec.op, spec.connection, spec.mode
                );
                let (client, server) = world.perf_results(0, spec, spec);
                let (client, server) = (client.expect(&case), server.expect(&case));
                assert_eq!(client.messages, spec.iters * u64::from(qps), "{case}");
                if bidirectional {
                    assert_eq!(server.messages, spec.iters * u64::from(qps), "{case}");
                }
            }
        }
    });
}

/// Where no message goes nothing may change, in perftest's layout: a byte that does is found on each side.
#[test]
fn a_write_beside_the_messages_is_found() {
    let world = World::new(1);
    for (op, mode) in
        [(PerfOp::Write, PerfMode::Bw), (PerfOp::Read, PerfMode::Bw), (PerfOp::Send, PerfMode::Lat)]
    {
        let base = checked(op, mode, QpType::Rc, 100);
        let client = PerfSpec { layout: PerfLayout::Perftest, ..base };
        let server = PerfSpec { role: Role::Server, ..client };
        let pair = world.pair(0, &client, &server);
        let memory = PerfMemory::prepare(&client, pair.a.block.clone()).unwrap();
        let ends = endpoints(&client, &pair.a, &pair.b, memory);
        // Behind the first message of the half that the peer was told of.
        let at = client.announced_offset(0) as usize + 101;
        let mut byte = [0];
        pair.a.block.read(at, &mut byte);
        pair.a.block.write(at, &[!byte[0]]);
        let memory = PerfMemory::prepare(&server, pair.b.block.clone()).unwrap();
        let (asked, served) = pair.run_on(client, ends, server, endpoints(&server, &pair.b, &pair.a, memory));
        let error = asked.unwrap_err();
        assert!(matches!(error.fault, Fault::Outside { offset, .. } if offset == at as u64), "{error}");
        served.unwrap();
        pair.close();
    }
}

#[test]
fn a_margin_is_left_out_and_both_sides_measure() {
    let world = World::new(1);
    for (op, mode) in [
        (PerfOp::Send, PerfMode::Bw),
        (PerfOp::Write, PerfMode::Lat),
        (PerfOp::Send, PerfMode::Lat),
        (PerfOp::CmpSwap, PerfMode::Bw),
    ] {
        let spec = PerfSpec {
            duration_ns: Some(60_000_000),
            margin_ns: 15_000_000,
            ..checked(op, mode, QpType::Rc, 64)
        };
        let (client, server) = world.perf(0, spec);
        assert!(client.messages > 0, "{op:?} {mode:?}");
        // The passes that saw the margins may be late, by more than one on a busy machine.
        assert!((20_000_000..3_000_000_000).contains(&client.elapsed_ns), "{} ns", client.elapsed_ns);
        assert!(server.stopped, "{op:?} {mode:?}");
        if mode == PerfMode::Lat {
            assert!(client.rtt.unwrap().samples <= client.messages + 1);
        }
    }
}

#[test]
fn both_directions_for_a_duration() {
    let world = World::new(1);
    for op in PerfOp::ALL {
        let spec = PerfSpec {
            duration_ns: Some(20_000_000),
            bidirectional: true,
            qps: 2,
            ..checked(op, PerfMode::Bw, QpType::Rc, 64)
        };
        let (client, server) = world.perf(0, spec);
        assert!(client.messages > 0 && server.messages > 0, "{op:?}");
        if op == PerfOp::Send {
            assert!(client.received > 0 && server.received > 0, "{op:?}");
        }
    }
}

/// A peer whose time is over takes nothing any more: what is under way is not waited for, and is no failure.
#[test]
fn a_peer_that_ends_first_is_no_failure() {
    let world = World::new(1);
    for mode in MODES {
        let client = PerfSpec {
            duration_ns: Some(80_000_000),
            margin_ns: 10_000_000,
            rx_depth: 4,
            ..checked(PerfOp::Send, mode, QpType::Rc, 64)
        };
        let server = PerfSpec { role: Role::Server, ..client };
        let pair = world.pair(0, &client, &server);
        let memory = PerfMemory::prepare(&server, pair.b.block.clone()).unwrap();
        let ends = endpoints(&server, &pair.b, &pair.a, memory);
        let (service, serving) = PerfService::new(server, ends).unwrap();
        let b_id = world.server.add(0, service);
        let memory = PerfMemory::prepare(&client, pair.a.block.clone()).unwrap();
        let ends = endpoints(&client, &pair.a, &pair.b, memory);
        let (service, asking) = PerfService::new(client, ends).unwrap();
        let a_id = world.client.add(0, service);
        std::thread::sleep(Duration::from_millis(20));
        serving.stop();
        wait(&serving).unwrap();
        let report = wait(&asking).unwrap();
        assert!(!report.stopped && !report.is_clean(), "{mode:?}: {report:?}");
        world.client.remove(a_id);
        world.server.remove(b_id);
        pair.close();
    }
}

fn lossy() -> World {
    let rates = Rates { loss: 0.05, ..Rates::default() };
    World::with_faults(1, Some(FaultConfig { seed: 3, rx: rates, tx: rates }))
}

/// UC and UD lose messages: bandwidth ends all the same, says what is missing, and what came is right.
#[test]
fn lost_messages_are_counted() {
    let world = lossy();
    for (op, connection) in
        [(PerfOp::Send, QpType::Uc), (PerfOp::Send, QpType::Ud), (PerfOp::Write, QpType::Uc)]
    {
        for (qps, size) in [(1, 1000), (8, 1000), (1, 8)] {
            for bidirectional in [false, true] {
                let base = checked(op, PerfMode::Bw, connection, size);
                // The client of both directions waits for what is lost: its deadline ends the test.
                let spec = gentle(PerfSpec {
                    iters: 400,
                    qps,
                    bidirectional,
                    progress_deadline_ns: 100_000_000,
                    ..base
                });
                let case = format!("{op:?} {connection:?} {qps} of {size}, both {bidirectional}");
                let (client, server) = world.perf_results(0, spec, spec);
                let (client, server) = (client.expect(&case), server.expect(&case));
                let all = 400 * u64::from(qps);
                assert_eq!(client.messages, all, "{case}");
                if op == PerfOp::Send {
                    assert!(server.lost > 0 && server.lost < all / 2, "{case}: {}", server.lost);
                    assert_eq!(server.received + server.lost, all, "{case}");
                    assert!(server.receives_left > 0 && !server.is_clean(), "{case}");
                }
                if bidirectional && op == PerfOp::Send {
                    assert!(client.lost > 0, "{case}");
                    assert_eq!(client.received + client.lost, all, "{case}");
                }
            }
        }
    }
}

#[test]
fn a_lost_message_ends_a_latency_test_by_name() {
    let world = lossy();
    for (op, connection) in
        [(PerfOp::Send, QpType::Uc), (PerfOp::Send, QpType::Ud), (PerfOp::Write, QpType::Uc)]
    {
        let spec = PerfSpec {
            iters: 10_000,
            progress_deadline_ns: 50_000_000,
            ..checked(op, PerfMode::Lat, connection, 64)
        };
        let (client, _) = world.perf_results(0, spec, spec);
        let error = client.unwrap_err();
        let named = matches!(error.fault, Fault::Unanswered { message, .. } if message == error.done);
        assert!(named, "{op:?} {connection:?}: {error}");
        assert!(error.to_string().contains(&format!("message {} was not answered", error.done)), "{error}");
    }
}

/// RC repeats: nothing is missing, whatever the operation, though the wire loses.
#[test]
fn a_reliable_connection_loses_nothing() {
    let world = lossy();
    for op in PerfOp::ALL {
        for mode in MODES {
            let spec = PerfSpec { qps: 2, iters: 20, ..checked(op, mode, QpType::Rc, 2_000) };
            let (client, server) = world.perf(0, spec);
            assert_whole(&spec, &client, &server, &format!("{op:?} {mode:?}"));
        }
    }
}

/// Somebody else changes the counter: both sides see it.
#[test]
fn a_wrong_counter_is_found() {
    let world = World::new(1);
    for op in [PerfOp::FetchAdd, PerfOp::CmpSwap] {
        let client = checked(op, PerfMode::Bw, QpType::Rc, 8);
        let server = PerfSpec { role: Role::Server, ..client };
        let pair = world.pair(0, &client, &server);
        let ends = |spec: &PerfSpec, own: &world::End, peer: &world::End| {
            let memory = PerfMemory::prepare(spec, own.block.clone()).unwrap();
            endpoints(spec, own, peer, memory)
        };
        let (a, b) = (ends(&client, &pair.a, &pair.b), ends(&server, &pair.b, &pair.a));
        pair.b.block.write(0, &1u64.to_ne_bytes());
        let (asked, served) = pair.run_on(client, a, server, b);
        for fault in [asked.unwrap_err().fault, served.unwrap_err().fault] {
            assert!(matches!(fault, Fault::Atomic { .. }), "{op:?}: {fault}");
        }
        pair.close();
    }
}

#[test]
fn a_key_that_does_not_fit_names_the_queue_pair() {
    let world = World::new(1);
    let client = PerfSpec { qps: 3, ..checked(PerfOp::Write, PerfMode::Bw, QpType::Rc, 64) };
    let server = PerfSpec { role: Role::Server, ..client };
    let pair = world.pair(0, &client, &server);
    let memory = PerfMemory::prepare(&client, pair.a.block.clone()).unwrap();
    let mut ends = endpoints(&client, &pair.a, &pair.b, memory);
    ends.qps[1].remote_rkey = ferroce_verbs::Rkey(0);
    let memory = PerfMemory::prepare(&server, pair.b.block.clone()).unwrap();
    // Compared is not what was never written.
    let server = PerfSpec { check_data: false, ..server };
    let (asked, _) = pair.run_on(client, ends, server, endpoints(&server, &pair.b, &pair.a, memory));
    let error = asked.unwrap_err();
    assert_eq!((error.status(), error.qpn), (Some(WcStatus::RemAccessErr), pair.a.qpns[1]), "{error}");
    pair.close();
}

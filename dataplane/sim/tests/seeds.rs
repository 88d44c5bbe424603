//! The transport under faults, and the checkers under planted ones.

use std::process::Command;

use ferroce_sim::checker::OpKind;
use ferroce_sim::link::{Cable, Faults};
use ferroce_sim::plan::Connection;
use ferroce_sim::{Plan, Planted, Report, Scenario, ViolationKind, run, run_plan};
use ferroce_verbs::QpType;

/// Seeds of one `cargo test`; `ferroce-sim --seeds N` runs as many as one likes.
const SEEDS: u64 = 120;

#[test]
fn every_promise_holds_for_many_seeds() {
    let reports: Vec<Report> =
        (1..=SEEDS).map(|seed| run(seed, false).unwrap_or_else(|failure| panic!("{failure}"))).collect();
    // The runs are worth nothing unless the faults came about.
    let sum = |of: fn(&Report) -> u64| reports.iter().map(of).sum::<u64>();
    for (what, count, least) in [
        ("work requests", sum(|r| r.ops), 10_000),
        ("SENDs", sum(|r| r.kinds[OpKind::Send as usize]), 1000),
        ("WRITEs", sum(|r| r.kinds[OpKind::Write as usize]), 1000),
        ("READs", sum(|r| r.kinds[OpKind::Read as usize]), 1000),
        ("compare and swaps", sum(|r| r.kinds[OpKind::CmpSwap as usize]), 1000),
        ("fetch and adds", sum(|r| r.kinds[OpKind::FetchAdd as usize]), 1000),
        ("windows bound", sum(|r| r.kinds[OpKind::BindMw as usize]), 500),
        ("windows ended here", sum(|r| r.kinds[OpKind::LocalInv as usize]), 50),
        ("messages of UC and UD", sum(|r| r.unreliable), 3000),
        ("frames lost", sum(|r| r.stats.links.lost), 1000),
        ("frames doubled", sum(|r| r.stats.links.doubled), 1000),
        ("frames late", sum(|r| r.stats.links.late), 1000),
        ("frames damaged", sum(|r| r.stats.links.damaged), 1000),
        ("timeouts", sum(|r| r.stats.timeouts), 100),
        ("RNR NAKs", sum(|r| r.stats.rnr), 1000),
        ("duplicates", sum(|r| r.stats.duplicates), 1000),
        ("READs answered again", sum(|r| r.stats.replayed[0]), 300),
        ("compare and swaps answered again", sum(|r| r.stats.replayed[1]), 50),
        ("fetch and adds answered again", sum(|r| r.stats.replayed[2]), 50),
        ("receives of shared queues", sum(|r| r.stats.taken), 3000),
        ("limit events", sum(|r| r.stats.limits), 150),
        ("datagrams that members of groups got", sum(|r| r.multicast), 500),
        ("messages behind a fence that needed it", sum(|r| r.fenced), 300),
        ("drains", sum(|r| r.drained), 200),
        ("messages after the faults", sum(|r| r.probes), 200),
        ("requests out of sequence", sum(|r| r.stats.out_of_sequence), 1000),
        ("wrong ICRCs", sum(|r| r.stats.refused[ferroce_wire::ParseError::BadIcrc.index()]), 500),
    ] {
        assert!(count >= least, "only {count} {what} in {SEEDS} runs");
    }
    let runs = |with: fn(&Report) -> bool| reports.iter().filter(|report| with(report)).count();
    for (what, count, least) in [
        ("a tenth of all frames lost", runs(|r| r.stats.links.lost * 10 > r.stats.links.frames), 10),
        ("a key taken away in use", runs(|r| r.key_taken), 10),
        ("nothing lost", runs(|r| r.stats.links.lost == 0), 3),
    ] {
        assert!(count >= least, "only {count} of {SEEDS} runs with {what}");
    }
}

#[test]
fn a_seed_decides_everything() {
    for seed in [3, 7, 20] {
        let first = run(seed, false).unwrap_or_else(|failure| panic!("{failure}"));
        let second = run(seed, false).unwrap_or_else(|failure| panic!("{failure}"));
        assert_eq!(first, second);
        assert_ne!(first.digest, run(seed + 1, false).unwrap_or_else(|failure| panic!("{failure}")).digest);
    }
}

#[test]
fn plans_cover_what_they_should() {
    let plans: Vec<Plan> = (1..=SEEDS).map(Plan::from_seed).collect();
    let any = |holds: &dyn Fn(&Connection) -> bool| {
        plans.iter().flat_map(|p| &p.connections).filter(|c| holds(c)).count()
    };
    for mtu in ferroce_wire::PathMtu::ALL {
        assert!(any(&|c| c.mtu == mtu) > 5, "{mtu:?}");
    }
    assert!(any(&|c| c.v6) > 5 && any(&|c| !c.v6) > 5);
    assert!(any(&|c| c.vlan.is_some()) > 5 && any(&|c| c.vlan.is_none()) > 5);
    assert!(any(&|c| c.psns[0].get() > 0xff_ff00) > 20, "start near the wrap");
    assert!(any(&|c| c.send_wr == 1) > 5 && any(&|c| c.recv_wr == 1) > 5 && any(&|c| c.rd_atomic == 1) > 5);
    assert!(any(&|c| c.max_len % 2 == 1) > 5);
    assert!(plans.iter().filter(|p| p.scenario == Scenario::SilentPeer).count() > 5);
    assert!(plans.iter().filter(|p| p.scenario == Scenario::KeyTaken).count() > 5);
    for service in [QpType::Rc, QpType::Uc, QpType::Ud] {
        assert!(
            any(&|c| c.service == service && c.shared != [false; 2]) > 5,
            "{service:?} on a shared queue"
        );
    }
    let crowded = |p: &&Plan| p.groups.iter().any(|group| group.members.len() > 2);
    assert!(plans.iter().filter(crowded).count() > 5, "groups with several members");
    assert!(plans.iter().filter(|p| p.endpoints == 3).count() > 5);
    assert!(plans.iter().filter(|p| p.connections.len() > 2).count() > 5);
}

/// A world without any fault: what is planted is then the only reason for a violation.
fn clean(seed: u64) -> Plan {
    let mut plan = Plan::from_seed(seed * 8);
    assert_eq!(plan.scenario, Scenario::Faulty);
    plan.faults.fill(Faults::default());
    plan.blackouts.clear();
    plan.cable = Cable { delay_ns: 1000, ps_per_byte: 80 };
    for connection in &mut plan.connections {
        connection.slow_ns = 0;
        connection.send_wr = 16;
        connection.recv_wr = 16;
        connection.sig_all = true;
    }
    plan
}

fn found(plan: &Plan, planted: Planted) -> Option<ViolationKind> {
    run_plan(plan, Some(planted), false).err().map(|failure| {
        let text = failure.to_string();
        assert!(text.contains(&format!("ferroce-sim --seed {} --verbose", plan.seed)), "{text}");
        failure.violation.kind
    })
}

#[test]
fn a_world_without_faults_sends_nothing_twice() {
    for seed in 1..=10 {
        let report = run_plan(&clean(seed), None, false).unwrap_or_else(|failure| panic!("{failure}"));
        assert_eq!((report.stats.links.lost, report.stats.timeouts), (0, 0), "seed {seed}");
        // Receivers that begin with an empty queue are not ready; everything sent again must come from that.
        assert!(report.stats.rnr > 0 || report.stats.retransmits == 0, "seed {seed}: {:?}", report.stats);
    }
}

/// Worse wires than any seed makes: connections give up, with the right statuses, and the others go on.
#[test]
fn retries_run_out_where_almost_half_is_lost() {
    let mut exhausted = 0;
    for seed in (1..=16).filter(|seed| seed % 8 != 7) {
        let mut plan = Plan::from_seed(seed).with_messages(400);
        plan.faults.iter_mut().for_each(|faults| faults.loss_ppm = 450_000);
        exhausted += run_plan(&plan, None, false).unwrap_or_else(|failure| panic!("{failure}")).exhausted;
    }
    assert!(exhausted >= 5, "only {exhausted}");
}

/// Each checker finds the fault that it is there for: none of them is blind.
#[test]
fn planted_faults_are_found() {
    use ViolationKind::*;
    for seed in 1..=5 {
        let plan = clean(seed);
        for (planted, kinds) in [
            (Planted::FlipPayload, &[BytesDiffer, NotWhole][..]),
            (Planted::LoseCompletion, &[OutOfOrder, NotOnce]),
            (Planted::DoubleCompletion, &[OutOfOrder, NotOnce]),
            (Planted::SwapCompletions, &[OutOfOrder, NotOnce, BytesDiffer, WrongCompletion]),
            (Planted::StrayWrite, &[StrayWrite]),
        ] {
            let kind = found(&plan, planted);
            assert!(kind.is_some_and(|kind| kinds.contains(&kind)), "seed {seed}, {planted:?}: {kind:?}");
        }
        let mut dirty = plan.clone();
        dirty.faults.fill(Faults { corrupt_ppm: 20_000, ..Faults::default() });
        assert_eq!(found(&dirty, Planted::SkipIcrc), Some(DamageAccepted), "seed {seed}");
        dirty.faults.fill(Faults { loss_ppm: 100_000, ..Faults::default() });
        assert_eq!(found(&dirty, Planted::LoseTimers), Some(Stuck), "seed {seed}");
    }
}

/// The list of `ferroce-sim --plants`: each is found by an ordinary seed and by the checker meant for it, and its failure says how to repeat it.
#[test]
fn every_plant_is_found_by_a_seed() {
    for planted in Planted::ALL {
        let first = (1..=200).find_map(|seed| {
            let failure = run_plan(&Plan::from_seed(seed), Some(planted), false).err()?;
            planted.meant().contains(&failure.violation.kind).then_some(failure)
        });
        let failure = first.unwrap_or_else(|| panic!("{planted:?} was not found"));
        let text = failure.to_string();
        let command =
            format!("ferroce-sim --seed {} --verbose --plant {planted:?} --messages 0", failure.plan.seed);
        assert!(text.contains(&command), "{text}");
    }
}

/// What a failed run tells one to type fails again, at the same time and for the same reason.
#[test]
fn the_command_that_is_printed_repeats_the_failure() {
    let sim = |args: &[&str]| {
        let out =
            Command::new(env!("CARGO_BIN_EXE_ferroce-sim")).args(args).output().expect("built for this test");
        (out.status.code(), String::from_utf8(out.stderr).expect("text"))
    };
    let line = |text: &str, start: &str| text.lines().find(|line| line.starts_with(start)).map(str::to_owned);
    for args in [
        // Found at once, and only after some seeds; with messages as they are unless given, and others.
        &["--plant", "WriteOff"][..],
        &["--plant", "QkeyIgnored", "--messages", "0"],
        &["--plant", "ReplayLost", "--messages", "300"],
    ] {
        let (status, text) = sim(args);
        assert_eq!(status, Some(1), "{args:?}: {text}");
        let command = line(&text, "repeat with: ferroce-sim ").expect("a command");
        let typed: Vec<&str> = command.split(' ').skip(3).collect();
        let (status, again) = sim(&typed);
        assert_eq!(status, Some(1), "{command}");
        assert_eq!(line(&text, "seed "), line(&again, "seed "), "{command}");
        assert!(line(&text, "seed ").is_some(), "{text}");
    }
}

/// A queue pair that is another one after each thing that happens to it sends the same packets at the same times.
#[test]
fn moving_by_the_image_is_invisible() {
    for seed in 1..=16 {
        let mut plan = Plan::from_seed(seed);
        plan.moves_ppm = 0;
        let still = run_plan(&plan, None, false).unwrap_or_else(|failure| panic!("{failure}"));
        plan.moves_ppm = 1_000_000;
        let moving = run_plan(&plan, None, false).unwrap_or_else(|failure| panic!("{failure}"));
        assert!(moving.moved >= 20 && still.moved == 0, "{} moves", moving.moved);
        assert_eq!(Report { moved: 0, ..moving }, still);
    }
}

//! Tests of `plan`: perftest's defaults, dependencies between options, and what travels.

use clap::Parser;
use ferroce_services::{PerfMode, PerfOp, PerfSpec, Role};
use ferroce_verbs::{PathMtu, QpType};

use super::*;
use crate::perf::options::Job;

#[derive(Parser)]
#[command(version, args_override_self = true)]
struct Line {
    #[command(flatten)]
    args: PerfArgs,
}

fn parse(text: &str) -> PerfArgs {
    let words = std::iter::once("perf").chain(text.split_whitespace());
    Line::try_parse_from(words).map(|l| l.args).unwrap_or_else(|e| panic!("{text}: {e}"))
}

fn all(text: &str) -> Outcome<Vec<Item>> {
    let args = parse(text);
    args.check()?;
    match args.job()? {
        Job::Server(test) | Job::Client(test, _) => items(&args, test, Role::Client, None),
        other => panic!("{other:?}"),
    }
}

fn one(text: &str) -> PerfSpec {
    let list = all(text).unwrap_or_else(|e| panic!("{text}: {e}"));
    assert_eq!(list.len(), 1, "{text}");
    list[0].spec
}

#[test]
fn defaults_are_perftests() {
    for (text, size, iters, tx_depth, rx_depth, cq_mod) in [
        ("send-lat", 2, 1000, 1, 512, 1),
        ("send-bw", 65536, 1000, 128, 512, 1),
        ("write-bw", 65536, 5000, 128, 512, 1),
        ("write-bw -s 4096", 4096, 5000, 128, 512, 100),
        ("read-bw -s 8192", 8192, 1000, 128, 512, 100),
        ("read-lat", 2, 1000, 1, 512, 1),
        ("atomic-bw", 8, 1000, 128, 512, 100),
        ("atomic-lat", 8, 1000, 1, 512, 1),
        // No deeper than there are messages.
        ("send-bw -n 10 -s 64", 64, 10, 10, 10, 10),
        // Where nothing is repeated, all receives are posted at once.
        ("send-bw -c UC -n 2000", 65536, 2000, 128, 2000, 1),
        ("send-bw -c UD -n 50000", 4096, 50000, 128, 16000, 100),
        ("send-bw -c UD -n 50000 -r 100", 4096, 50000, 128, 100, 100),
        ("send-bw -l 4", 65536, 1000, 128, 512, 4),
        ("send-bw -e", 65536, 1000, 128, 512, 100),
    ] {
        let spec = one(text);
        let got = (spec.size, spec.iters, spec.tx_depth, spec.rx_depth, spec.cq_mod);
        assert_eq!(got, (size, iters, tx_depth, rx_depth, cq_mod), "{text}");
    }
}

#[test]
fn perftests_letters() {
    let text = "write-bw -d xdp:eth0 -x 1 -s 4096 -n 300 -t 64 -r 32 -Q 7 -I 64 -m 1024 -u 15 -F -q 3 -b -l 2 -T 8 -S 3 -L 9 host";
    let args = parse(text);
    let list = all(text).unwrap();
    let (spec, path) = (list[0].spec, &list[0].path);
    assert_eq!((spec.iters, spec.tx_depth, spec.rx_depth, spec.cq_mod), (300, 64, 32, 7));
    assert_eq!((spec.inline_bytes, spec.qps, spec.bidirectional, spec.post_list), (64, 3, true, 2));
    assert_eq!((path.timeout, path.retries, path.mtu), (15, 7, Some(PathMtu::Mtu1024)));
    assert_eq!((path.marks.traffic_class, path.marks.sl, path.marks.hop_limit), (8, 3, Some(9)));
    assert!(matches!(args.job(), Ok(Job::Client(_, host)) if host == "host"));
    assert_eq!(one("atomic-lat -A CMP_AND_SWAP").op, PerfOp::CmpSwap);
    assert_eq!(one("send-lat -c UD").connection, QpType::Ud);
}

#[test]
fn sizes_of_all_and_of_sweeps() {
    let sizes = |text: &str| all(text).unwrap().iter().map(|i| i.spec.size).collect::<Vec<u32>>();
    let all_sizes = sizes("send-bw -a");
    assert_eq!((all_sizes.len(), all_sizes[0], all_sizes[22]), (23, 2, 1 << 23));
    assert_eq!(sizes("send-lat -a -c UD -m 1024").last(), Some(&1024));
    // perftest keeps the moderation over a sweep of sizes, also for big messages.
    assert!(all("send-bw -a").unwrap().iter().all(|i| i.spec.cq_mod == 100));
    assert_eq!(sizes("write-lat --sweep size:1:64K:*2").len(), 17);
    let depths = all("write-bw -s 64 --sweep tx-depth:1:4:+1").unwrap();
    assert_eq!(depths.iter().map(|i| i.spec.tx_depth).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert_eq!(depths[3].label.as_deref(), Some("tx-depth=4"));
    let mtus = all("send-bw --sweep mtu:256:4096:*2").unwrap();
    assert_eq!(mtus[4].path.mtu, Some(PathMtu::Mtu4096));
}

#[test]
fn times_and_rates() {
    let spec = one("send-bw -D 8");
    assert_eq!((spec.duration_ns, spec.margin_ns), (Some(8_000_000_000), 2_000_000_000));
    assert_eq!(one("send-bw -D 1.5").margin_ns, 0);
    assert_eq!(one("send-bw -D 8 -f 0.5").margin_ns, 500_000_000);
    let rate = |text: &str| one(text).rate.map(|r| (r.msgs_per_s, r.burst));
    assert_eq!(rate("send-bw -s 1000 --rate_limit 8"), Some((1_000_000, 128)));
    assert_eq!(rate("send-bw -s 1M --rate_limit 100 --rate_units M --burst_size 4"), Some((100, 4)));
    assert_eq!(rate("send-lat --rate_limit 5000 --rate_units p --open-loop"), Some((5000, 1)));
    assert!(one("send-lat --rate_limit 5000 --rate_units p --open-loop").open_loop);
    assert!(
        all("send-bw -s 1M --rate_limit 0.000001").unwrap_err().to_string().contains("allowed 1 to 10^12")
    );
    assert!(all("write-bw --run_infinitely").unwrap()[0].is_endless());
    assert_eq!(all("write-lat --run_infinitely").unwrap_err().status(), 2);
}

#[test]
fn a_test_survives_the_journey() {
    for text in [
        "send-lat",
        "write-bw -c UC -q 8 -b -l 4 -n 400 -m 512 -o 4 -T 3",
        "send-bw -c UD -s 100 -D 3 -e",
        "atomic-bw -A CMP_AND_SWAP --seed 7 --data_validation",
        "read-lat --rate_limit 100 --rate_units p --open-loop",
    ] {
        let item = all(text).unwrap().swap_remove(0);
        let json = serde_json::to_string(&item.ask()).unwrap();
        let ask: Ask = serde_json::from_str(&json).unwrap();
        let there = ask.item(Role::Server).unwrap();
        assert_eq!(there.spec, PerfSpec { role: Role::Server, ..item.spec }, "{text}");
        assert_eq!(there.path, item.path, "{text}");
    }
}

#[test]
fn what_travels_is_checked() {
    let good = all("send-bw").unwrap()[0].ask();
    let refused = |change: fn(&mut Ask)| {
        let mut ask = good.clone();
        change(&mut ask);
        ask.item(Role::Server).unwrap_err().to_string()
    };
    assert!(refused(|a| a.test = "run".into()).contains("test \"run\""));
    assert!(refused(|a| a.connection = "XRC".into()).contains("connection \"XRC\""));
    assert!(refused(|a| a.qps = 1 << 20).contains("qps"));
    assert!(refused(|a| a.size = u32::MAX).contains("size"));
    assert!(refused(|a| a.tx_depth = 0).contains("tx_depth"));
    assert!(refused(|a| a.mtu = Some(1500)).contains("path MTU"));
    assert!(refused(|a| a.retries = 8).contains("retries: asked 8"));
    assert!(refused(|a| a.flow_label = 1 << 20).contains("flow label"));
    assert!(refused(|a| a.iters = u64::MAX).contains("iters"));
    let spec = PerfSpec::new(PerfOp::Send, PerfMode::Bw, Role::Server, 65536);
    assert_eq!(good.item(Role::Server).unwrap().spec.mode, spec.mode);
}

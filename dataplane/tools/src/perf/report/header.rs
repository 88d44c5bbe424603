//! The header for people: perftest's lines, then what else is in force here.

use std::fmt::Write;

use ferroce_services::{PerfMode, PerfOp, Role};
use ferroce_verbs::QpType;

use super::{Facts, RULE, units};
use crate::perf::options::{Transport, atomic_name, connection_name};
use crate::perf::talk::{QpEnd, RdmaEnd};

/// A test's title.
fn title(facts: &Facts<'_>) -> String {
    let spec = &facts.item.spec;
    let operation = match (spec.op, facts.transport()) {
        (PerfOp::Send, _) => "Send",
        (PerfOp::Write, Transport::Rdma) => "RDMA_Write",
        (PerfOp::Read, Transport::Rdma) => "RDMA_Read",
        (PerfOp::Write, _) => "Write",
        (PerfOp::Read, _) => "Read",
        (PerfOp::FetchAdd | PerfOp::CmpSwap, _) => "Atomic",
    };
    let mut words: Vec<&str> = match facts.transport() {
        Transport::Rdma => vec![operation],
        Transport::Tcp => vec!["TCP", operation],
        Transport::Udp => vec!["UDP", operation],
    };
    if spec.op.is_atomic() {
        words.push(atomic_name(spec.op));
    }
    if spec.mode == PerfMode::Bw {
        words.extend(spec.bidirectional.then_some("Bidirectional"));
        words.extend((spec.post_list > 1).then_some("Post List"));
    }
    words.push(if spec.mode == PerfMode::Lat { "Latency" } else { "BW" });
    format!("                    {} Test", words.join(" "))
}

fn pair(left: (&str, &str), right: (&str, &str)) -> String {
    format!(" {:<16}: {}\t\t{:<15}: {}", left.0, left.1, right.0, right.1)
}

fn single(name: &str, value: impl std::fmt::Display) -> String {
    format!(" {name:<16}: {value}")
}

/// GID bytes in decimal, as perftest prints them.
fn decimal_gid(gid: &str) -> String {
    match gid.parse::<std::net::Ipv6Addr>() {
        Ok(v6) => v6.octets().map(|b| format!("{b:02}")).join(":"),
        Err(_) => gid.to_string(),
    }
}

fn side(name: &str, end: &RdmaEnd, qp: &QpEnd, op: PerfOp) -> String {
    let mut text = format!(" {name} address: LID 0000 QPN {:#06x} PSN {:#06x}", qp.qpn, qp.psn);
    if op == PerfOp::Read {
        let _ = write!(text, " OUT {:#04x}", end.reads);
    }
    if matches!(op, PerfOp::Read | PerfOp::Write) {
        let _ = write!(text, " RKey {:#08x} VAddr {:#016x}", qp.rkey, qp.addr);
    }
    format!("{text}\n GID: {}", decimal_gid(&end.gid))
}

/// Text from the first rule to the one before the column heads.
pub fn text(facts: &Facts<'_>) -> String {
    let mut lines = vec![RULE.to_string(), title(facts)];
    match facts.plane {
        Some(_) => rdma_lines(facts, &mut lines),
        None => {
            let core = core_text(facts.core);
            lines.push(pair(("Transport type", facts.transport().name()), ("Core", &core)));
            lines.push(pair(("Peer", facts.peer), ("TX depth", &facts.item.spec.tx_depth.to_string())));
        }
    }
    if facts.item.spec.mode == PerfMode::Lat {
        let half = units::is_halved(facts.item.spec.op);
        lines.push(single("Latency", if half { "half the round trip" } else { "the whole round trip" }));
    }
    lines.push(RULE.to_string());
    if let Some(ends) = &facts.ends {
        let op = facts.item.spec.op;
        lines.extend(ends.own.qps.iter().map(|qp| side("local", &ends.own, qp, op)));
        lines.extend(ends.remote.qps.iter().map(|qp| side("remote", &ends.remote, qp, op)));
        // A side without rows has one rule, at its end.
        lines.extend(facts.measures().then(|| RULE.to_string()));
    }
    lines.join("\n")
}

/// perftest's lines in its order, then ours.
fn rdma_lines(facts: &Facts<'_>, lines: &mut Vec<String>) {
    let (Some(plane), spec) = (facts.plane, &facts.item.spec) else { return };
    let sends = facts.role == Role::Client || spec.bidirectional;
    if spec.events {
        lines.push(format!(" Test with events. Using {}", plane.dev()));
    }
    lines.push(pair(("Dual-port", "OFF"), ("Device", plane.dev())));
    lines.push(pair(("Number of qps", &spec.qps.to_string()), ("Transport type", "IB")));
    lines.push(pair(("Connection type", connection_name(spec.connection)), ("Using SRQ", "OFF")));
    lines.push(single("PCIe relax order", "OFF"));
    lines.push(single("ibv_wr* API", "OFF"));
    if sends {
        lines.push(single("TX depth", spec.tx_depth));
    }
    if spec.post_list > 1 {
        lines.push(single("Post List", spec.post_list));
    }
    if spec.op == PerfOp::Send && (facts.role == Role::Server || spec.bidirectional) {
        lines.push(single("RX depth", spec.rx_depth));
    }
    if spec.mode == PerfMode::Bw {
        lines.push(single("CQ Moderation", spec.signal_every()));
    }
    if let Some(ends) = &facts.ends {
        lines.push(single("Mtu", format_args!("{}[B]", ends.mtu)));
    }
    lines.push(single("Link type", "Ethernet"));
    let own = facts.ends.as_ref().and_then(|ends| plane.index_of(&ends.own.gid));
    if let Some(index) = facts.args.path.gid_index.or(own) {
        lines.push(single("GID index", index));
    }
    match (spec.op, &facts.ends) {
        (PerfOp::Send | PerfOp::Write, _) => {
            lines.push(single("Max inline data", format_args!("{}[B]", spec.inline_bytes)));
        }
        (_, Some(ends)) => lines.push(single("Outstand reads", ends.reads)),
        (_, None) => {}
    }
    lines.push(" rdma_cm QPs\t : OFF".into());
    lines.push(single("Data ex. method", "Ethernet"));
    in_force(facts, lines);
}

/// What perftest has no line for.
fn in_force(facts: &Facts<'_>, lines: &mut Vec<String>) {
    let (Some(plane), spec) = (facts.plane, &facts.item.spec) else { return };
    lines.push(single("Handshake", &facts.kind));
    lines.push(single("Port", plane.mode()));
    for fallback in plane.fallbacks() {
        lines.push(single("Fallback", format_args!("{} instead of {}", fallback.got, fallback.wanted)));
    }
    lines.extend(plane.faults().map(|faults| single("Faults", faults)));
    lines.push(pair(("Idle policy", plane.idle().name()), ("Core", &core_text(facts.core))));
    if let Some(rate) = spec.rate {
        let open = if spec.open_loop { ", open loop" } else { "" };
        lines.push(single(
            "Rate",
            format_args!("{} messages/sec, {} at once{open}", rate.msgs_per_s, rate.burst),
        ));
    }
    if spec.check_data {
        lines.push(single("Data", "every message compared"));
    }
    if spec.connection != QpType::Rc {
        lines.push(single("Lost messages", "not repeated, told below"));
    }
}

fn core_text(core: Option<usize>) -> String {
    core.map_or("not pinned".into(), |c| c.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_are_decimal() {
        assert_eq!(decimal_gid("::ffff:10.9.0.1"), "00:00:00:00:00:00:00:00:00:00:255:255:10:09:00:01");
    }

    /// As recorded from the original.
    #[test]
    fn addresses_as_the_original_prints_them() {
        let qp = QpEnd { qpn: 0x11, psn: 0x94_fb34, rkey: 0x288, addr: 0x5588_02ac_7000 };
        let end = RdmaEnd { qps: vec![qp], gid: "::ffff:10.9.0.1".into(), mtu: 1024, reads: 128 };
        let text = side("local", &end, &qp, PerfOp::Write);
        let line = " local address: LID 0000 QPN 0x0011 PSN 0x94fb34 RKey 0x000288 VAddr 0x00558802ac7000\n";
        assert!(text.starts_with(line), "{text}");
        assert!(side("local", &end, &qp, PerfOp::Read).contains("PSN 0x94fb34 OUT 0x80 RKey"));
        assert!(!side("local", &end, &qp, PerfOp::Send).contains("RKey"));
        assert!(!side("local", &end, &qp, PerfOp::FetchAdd).contains("RKey"));
        let short = QpEnd { psn: 0xb_91ee, ..qp };
        assert!(side("remote", &end, &short, PerfOp::Send).contains("PSN 0xb91ee\n"));
        assert_eq!(
            pair(("Dual-port", "OFF"), ("Device", "rxe0")),
            " Dual-port       : OFF\t\tDevice         : rxe0"
        );
    }
}

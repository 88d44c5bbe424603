//! Which perf tests there are: every value of a specification and what goes with what.

use ferroce_verbs::QpType;

use super::layout::PerfLayout;
use super::spec::{PerfMode, PerfOp, PerfSpec, SpecError};

type Checked = Result<(), SpecError>;

fn refuse(attribute: &'static str, asked: u64, allowed: &'static str) -> Checked {
    Err(SpecError { attribute, asked, allowed })
}

impl PerfSpec {
    /// Checks every value.
    ///
    /// # Errors
    /// Names the first one that is out of range.
    pub fn check(&self) -> Checked {
        self.check_connection()?;
        self.check_size()?;
        self.check_counts()?;
        self.check_depths()?;
        self.check_pace()?;
        self.check_layout()
    }

    fn check_connection(&self) -> Checked {
        if !self.op.connections().contains(&self.connection) {
            let allowed = match self.op {
                PerfOp::Send => "RC, UC or UD for send",
                PerfOp::Write => "RC or UC for write",
                PerfOp::Read => "RC for read",
                PerfOp::FetchAdd | PerfOp::CmpSwap => "RC for atomics",
            };
            return refuse("connection", self.connection as u64, allowed);
        }
        if self.qps == 0 || self.qps > Self::MOST_QPS {
            return refuse("qps", self.qps.into(), "1 to 4096");
        }
        if self.bidirectional && self.mode == PerfMode::Lat {
            return refuse("bidirectional", 1, "no: a latency test goes to and fro already");
        }
        if self.events && self.op == PerfOp::Write && self.mode == PerfMode::Lat {
            return refuse("events", 1, "no: write latency watches memory, which gives no event");
        }
        Ok(())
    }

    fn check_size(&self) -> Checked {
        let size = u64::from(self.size);
        if self.op.is_atomic() && self.size != 8 {
            return refuse("size", size, "8 bytes for atomics");
        }
        if self.connection == QpType::Ud && self.largest > Self::LARGEST_UD {
            return refuse("size", self.largest.into(), "0 to 4096 bytes over UD: one datagram");
        }
        if self.largest > Self::LARGEST {
            return refuse("size", self.largest.into(), "0 to 1073741824 bytes");
        }
        if self.size > self.largest {
            return refuse("size", size, "at most `largest`, which the memory is laid out for");
        }
        if self.size == 0 && self.op == PerfOp::Write && self.mode == PerfMode::Lat {
            return refuse("size", 0, "1 byte or more: write latency watches the last byte of a message");
        }
        Ok(())
    }

    fn check_counts(&self) -> Checked {
        if self.iters == 0 && self.duration_ns.is_none() {
            return refuse("iters", 0, "1 or more");
        }
        if self.duration_ns == Some(0) {
            return refuse("duration", 0, "more than 0");
        }
        let margin = self.margin_ns;
        if margin > 0 && self.duration_ns.is_none_or(|duration| duration / 2 <= margin) {
            return refuse("margin", margin, "less than half of the duration");
        }
        if self.iters.checked_add(self.warmup).is_none_or(|total| total >= Self::MOST_MESSAGES) {
            return refuse("iters", self.iters, "iterations and warm-up below 2^48 together");
        }
        Ok(())
    }

    fn check_depths(&self) -> Checked {
        for (attribute, depth) in [("tx_depth", self.tx_depth), ("rx_depth", self.rx_depth)] {
            if depth == 0 || depth > Self::DEEPEST {
                return refuse(attribute, depth.into(), "1 to 65536");
            }
        }
        if self.cq_mod == 0 {
            return refuse("cq_mod", 0, "1 or more");
        }
        if self.post_list == 0 || self.post_list > self.tx_depth {
            return refuse("post_list", self.post_list.into(), "1 to tx_depth");
        }
        if self.post_list > 1 && self.mode == PerfMode::Lat {
            return refuse("post_list", self.post_list.into(), "1 for latency");
        }
        Ok(())
    }

    fn check_pace(&self) -> Checked {
        match self.rate {
            Some(rate) if rate.msgs_per_s == 0 => refuse("rate", 0, "1 message per second or more"),
            Some(rate) if rate.burst == 0 => refuse("burst", 0, "1 or more"),
            Some(rate) if rate.burst > 1 && self.mode == PerfMode::Lat => {
                refuse("burst", rate.burst.into(), "1 for latency")
            }
            None if self.open_loop => refuse("open_loop", 1, "with a rate"),
            _ if self.open_loop && self.mode == PerfMode::Bw => refuse("open_loop", 1, "for latency"),
            _ => Ok(()),
        }
    }

    fn check_layout(&self) -> Checked {
        if self.layout == PerfLayout::Ours {
            return Ok(());
        }
        let counted = self.op == PerfOp::Send || (self.op == PerfOp::Write && self.mode == PerfMode::Lat);
        if counted && self.warmup > 0 {
            return refuse("warmup", self.warmup, "0: perftest's programs count every message of this test");
        }
        if self.mode == PerfMode::Lat && self.qps > 1 {
            return refuse("qps", self.qps.into(), "1: perftest's latency tests use one");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::{PerfRate, Role};

    #[test]
    fn what_does_not_go_together_is_named() {
        let bw = PerfSpec::new(PerfOp::Send, PerfMode::Bw, Role::Client, 64);
        let lat = PerfSpec::new(PerfOp::Write, PerfMode::Lat, Role::Client, 64);
        let perftest = PerfSpec { layout: PerfLayout::Perftest, ..lat };
        let rate = |msgs_per_s, burst| Some(PerfRate { msgs_per_s, burst });
        for (attribute, spec) in [
            ("connection", PerfSpec { connection: QpType::Ud, ..lat }),
            ("qps", PerfSpec { qps: 0, ..bw }),
            ("qps", PerfSpec { qps: 4097, ..bw }),
            ("qps", PerfSpec { qps: 2, ..perftest }),
            ("warmup", PerfSpec { warmup: 1, ..perftest }),
            ("bidirectional", PerfSpec { bidirectional: true, ..lat }),
            ("events", PerfSpec { events: true, ..lat }),
            ("size", PerfSpec { op: PerfOp::CmpSwap, ..bw }),
            ("size", PerfSpec { connection: QpType::Ud, largest: 4097, ..bw }),
            ("size", PerfSpec { largest: 63, ..bw }),
            ("margin", PerfSpec { margin_ns: 5, ..bw }),
            ("margin", PerfSpec { margin_ns: 5, duration_ns: Some(10), ..bw }),
            ("post_list", PerfSpec { post_list: 0, ..bw }),
            ("post_list", PerfSpec { post_list: 129, ..bw }),
            ("rate", PerfSpec { rate: rate(0, 1), ..bw }),
            ("burst", PerfSpec { rate: rate(1, 0), ..bw }),
            ("burst", PerfSpec { rate: rate(1, 2), ..lat }),
            ("open_loop", PerfSpec { open_loop: true, ..lat }),
            ("open_loop", PerfSpec { open_loop: true, rate: rate(1, 1), ..bw }),
        ] {
            assert_eq!(spec.check().map_err(|e| e.attribute), Err(attribute), "{spec:?}");
        }
        for spec in [
            bw,
            lat,
            perftest,
            PerfSpec { open_loop: true, rate: rate(1, 1), ..lat },
            PerfSpec { margin_ns: 4, duration_ns: Some(10), ..bw },
            PerfSpec { connection: QpType::Ud, qps: 4096, post_list: 128, bidirectional: true, ..bw },
        ] {
            assert_eq!(spec.check(), Ok(()));
        }
    }
}

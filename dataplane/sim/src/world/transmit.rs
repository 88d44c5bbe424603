//! A queue pair sends: its packets become frames and go to the wire that leads to their address.
//!
//! Part of [`super::World`].

use ferroce_transport::Transmit;
use ferroce_verbs::QpModify;
use ferroce_wire::{Bth, Icrc, Packet, Part, Service, check_frame, emit};

use super::{Event, QpRef, World};
use crate::checker::{Violation, ViolationKind};
use crate::link::Fate;
use crate::plants::Planted;
use crate::sink::Sink;
use crate::trace::{Line, What};

impl World {
    pub(super) fn transmit(&mut self, at: QpRef) {
        let now = self.now();
        let mut budget = self.rng.range(1, 12);
        let resume = loop {
            if budget == 0 {
                break Some(now);
            }
            budget -= 1;
            let refuse = self.rng.chance(30_000);
            let owner = &mut self.endpoints[at.endpoint];
            let slot = &mut owner.qps[at.index];
            let mtu = slot.qp.path_mtu().map_or(0, |mtu| mtu.bytes());
            let twist = self.planted.map(|planted| (planted, mtu, std::mem::take(&mut slot.memo)));
            let mut sink = Sink { av: slot.qp.av().copied(), refuse, twist, ..Sink::default() };
            // The plant of a requester that does not wait: it is a timer's length ahead.
            let when = match (self.planted, slot.quiet) {
                (Some(Planted::RnrWaitSkipped), Some((until, _))) => now.max(until),
                _ => now,
            };
            // The plant of a send queue that goes on while it is drained.
            let again = self.planted == Some(Planted::DrainIgnored)
                && slot.drain.is_some_and(|drain| drain.told)
                && slot.qp.modify(now, &QpModify::SqdToRts).is_ok();
            let done = slot.qp.poll_transmit(when, owner.regions.memory(), &mut sink);
            if again {
                // Refused if it is in error meanwhile, which is as good.
                let _ = slot.qp.modify(now, &QpModify::ToSqd);
            }
            if let Some((_, _, memo)) = sink.twist.take() {
                slot.memo = memo;
            }
            match done {
                Transmit::Sent if sink.silent => {}
                Transmit::Sent => self.launch(at, sink),
                Transmit::Idle => break None,
                Transmit::Later(when) if when <= now => {
                    self.violate(
                        ViolationKind::Stuck,
                        format!("{at:?} asks to send later, at a time that is past"),
                    );
                    break None;
                }
                Transmit::Later(when) => break Some(when),
                Transmit::NoRoom if refuse => break Some(now),
                Transmit::NoRoom => {
                    self.violate(ViolationKind::Stuck, format!("{at:?} found no room where there was some"));
                    break None;
                }
            }
        };
        if let Some(when) = resume {
            self.poll_soon(at.endpoint, when);
        }
    }

    /// Checks what the sink got, puts the ICRC to it, and gives it to the wires.
    fn launch(&mut self, at: QpRef, sink: Sink) {
        match self.sealed(at, sink) {
            Ok((packet, frame)) => {
                self.acknowledge_early(at, &packet.headers);
                if let Err(violation) = self.check_sent(at, &packet) {
                    self.violation.get_or_insert(violation);
                    return;
                }
                self.fly(at, &packet, frame);
            }
            Err(what) => self.violate(ViolationKind::BadFrame, what),
        }
    }

    /// The whole frame, and the packet that it is.
    fn sealed(&self, at: QpRef, mut sink: Sink) -> Result<(Packet, Vec<u8>), String> {
        let Some((headers, payload_len)) = sink.headers else {
            return Err(format!("{at:?} sent without a begin that was accepted"));
        };
        if sink.filled != payload_len {
            return Err(format!("{at:?} gave {} of {payload_len} payload bytes", sink.filled));
        }
        let offset = emit::header_bytes(&headers);
        let (head, body) = sink.frame.split_at(offset);
        let icrc = Icrc::over_headers(head, emit::ip_offset(&headers)).update(body).to_wire();
        sink.frame.extend(icrc);
        let packet = check_frame(&sink.frame)
            .map_err(|error| format!("{at:?} sent a frame that is wrong: {error}: {headers}"))?;
        let mtu = self.qp(at).path_mtu().map_or(0, |mtu| mtu.bytes());
        if u32::from(packet.payload_len) > mtu {
            return Err(format!("more than the path MTU of {mtu}: {packet}"));
        }
        Ok((packet, sink.frame))
    }

    /// Whether a queue pair might send this now.
    fn check_sent(&mut self, at: QpRef, packet: &Packet) -> Result<(), Violation> {
        let bth = &packet.headers.bth;
        if bth.opcode.is_response() {
            return Ok(());
        }
        let wrong = |kind, what| Err(Violation { kind, what });
        let slot = &mut self.endpoints[at.endpoint].qps[at.index];
        let (psn, info) = (bth.psn, slot.qp.info());
        // A queue pair that went back may stop short of where it was, for want of credits.
        if slot.last_sent.is_none_or(|last| psn.offset_from(last) > 0) {
            slot.last_sent = Some(psn);
        }
        if let Some(drain) = slot.drain {
            let starts = !matches!(bth.opcode.part(), Part::Middle | Part::Last);
            if drain.told || starts && psn.offset_from(drain.next) >= 0 {
                return wrong(ViolationKind::NotDrained, format!("{at:?} is in SQD and sent {packet}"));
            }
        }
        let una = info.una_psn;
        if psn != una || bth.opcode.service() != Service::Rc {
            return Ok(());
        }
        if slot.quiet.is_some_and(|(until, psn)| psn == una && self.clock.now() < until) {
            return wrong(ViolationKind::BadFrame, format!("sent before the RNR time was over: {packet}"));
        }
        let tries = slot.tries.at(una);
        tries.sent += 1;
        let most = 1 + info.rts.map_or(0, |rts| u32::from(rts.retry_cnt)) + tries.busy;
        if tries.sent > most {
            let what = format!("sent {} times, {most} allowed: {packet}", tries.sent);
            return wrong(ViolationKind::WrongRetries, what);
        }
        Ok(())
    }

    /// To the endpoint that has the address, or to each other one that has members of the group.
    fn fly(&mut self, at: QpRef, packet: &Packet, frame: Vec<u8>) {
        let gid = packet.headers.ip.dst_gid();
        let group = self.groups.iter().find(|group| group.0 == gid);
        let there = |endpoint: &usize| match group {
            Some((_, members)) => {
                *endpoint != at.endpoint && members.iter().any(|member| member.endpoint == *endpoint)
            }
            None => self.endpoints[*endpoint].gids.contains(&gid),
        };
        let targets: Vec<usize> = (0..self.endpoints.len()).filter(there).collect();
        if targets.is_empty() {
            let what = format!("{at:?} sent to nobody: {packet}");
            self.violate(ViolationKind::BadFrame, what);
        }
        for to in targets {
            self.fly_to(at, to, packet, frame.clone());
        }
    }

    fn fly_to(&mut self, at: QpRef, to: usize, packet: &Packet, frame: Vec<u8>) {
        let now = self.now();
        let count = self.endpoints.len();
        let mut arrivals = std::mem::take(&mut self.scratch);
        let fate: Fate = self.links[at.endpoint * count + to].submit(now, frame, &mut arrivals);
        self.trace.add(now, at.endpoint, Line::Packet(*packet, What::Sent(fate)));
        self.note_loss(at, to, &packet.headers.bth, fate);
        for (when, frame) in arrivals.drain(..) {
            self.clock.at(when, Event::Arrive(to, frame));
        }
        self.scratch = arrivals;
    }

    /// Books a packet that did not arrive as it should to the queue pair whose request it is, or answers.
    fn note_loss(&mut self, at: QpRef, to: usize, bth: &Bth, fate: Fate) {
        if bth.opcode.service() != Service::Rc || matches!(fate, Fate::Sent | Fate::Doubled) {
            return;
        }
        let requester = if bth.opcode.is_response() {
            match self.endpoints[to].by_qpn.get(&bth.dest_qpn.get()) {
                Some(&index) => QpRef { endpoint: to, index },
                None => return,
            }
        } else {
            at
        };
        let slot = &mut self.endpoints[requester.endpoint].qps[requester.index];
        let una = slot.qp.info().una_psn;
        slot.tries.at(una).lost += 1;
    }
}

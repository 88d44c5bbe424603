//! A queue pair sends: its packets become frames and go to the wire that leads to their address.
//!
//! Part of [`super::World`].

use ferroce_transport::Transmit;
use ferroce_wire::{Bth, Icrc, Service, check_frame, emit};

use super::{Event, QpRef, World};
use crate::checker::ViolationKind;
use crate::link::Fate;
use crate::plants::Planted;
use crate::sink::Sink;
use crate::trace::{Line, What};

impl World {
    pub(super) fn transmit(&mut self, at: QpRef) {
        let now = self.now();
        let mut budget = self.rng.range(1, 12);
        let again = loop {
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
            let done = slot.qp.poll_transmit(when, owner.regions.memory(), &mut sink);
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
        if let Some(when) = again {
            self.poll_soon(at.endpoint, when);
        }
    }

    /// Puts pad and ICRC to what the sink got, and gives it to the wire.
    fn launch(&mut self, at: QpRef, mut sink: Sink) {
        let now = self.now();
        let Some((headers, payload_len)) = sink.headers else {
            self.violate(ViolationKind::BadFrame, format!("{at:?} sent without a begin that was accepted"));
            return;
        };
        if sink.filled != payload_len {
            let got = sink.filled;
            self.violate(
                ViolationKind::BadFrame,
                format!("{at:?} gave {got} of {payload_len} payload bytes"),
            );
            return;
        }
        let offset = emit::header_bytes(&headers);
        let (head, body) = sink.frame.split_at(offset);
        let icrc = Icrc::over_headers(head, emit::ip_offset(&headers)).update(body).to_wire();
        sink.frame.extend(icrc);
        let packet = match check_frame(&sink.frame) {
            Ok(packet) => packet,
            Err(error) => {
                self.violate(
                    ViolationKind::BadFrame,
                    format!("{at:?} sent a frame that is wrong: {error}: {headers}"),
                );
                return;
            }
        };
        self.acknowledge_early(at, &headers);
        let slot = &mut self.endpoints[at.endpoint].qps[at.index];
        let mtu = slot.qp.path_mtu().map_or(0, |mtu| mtu.bytes());
        let mut hasty = false;
        if !headers.bth.opcode.is_response() {
            // A queue pair that went back may stop short of where it was, for want of credits.
            let psn = headers.bth.psn;
            if slot.last_sent.is_none_or(|last| psn.offset_from(last) > 0) {
                slot.last_sent = Some(psn);
            }
            let info = slot.qp.info();
            let una = info.una_psn;
            if psn == una && headers.bth.opcode.service() == Service::Rc {
                let tries = slot.tries.at(una);
                tries.sent += 1;
                let most = 1 + info.rts.map_or(0, |rts| u32::from(rts.retry_cnt)) + tries.busy;
                if tries.sent > most {
                    let what = format!("sent {} times, {most} allowed: {packet}", tries.sent);
                    self.violate(ViolationKind::WrongRetries, what);
                    return;
                }
            }
            hasty = slot.quiet.is_some_and(|(until, psn)| psn == una && now < until);
        }
        if hasty {
            self.violate(ViolationKind::BadFrame, format!("sent before the RNR time was over: {packet}"));
            return;
        }
        if u32::from(packet.payload_len) > mtu {
            self.violate(ViolationKind::BadFrame, format!("more than the path MTU of {mtu}: {packet}"));
            return;
        }
        let Some(to) = self.endpoints.iter().position(|e| e.gids.contains(&headers.ip.dst_gid())) else {
            self.violate(ViolationKind::BadFrame, format!("to nobody: {packet}"));
            return;
        };
        let count = self.endpoints.len();
        let mut arrivals = std::mem::take(&mut self.scratch);
        let fate: Fate = self.links[at.endpoint * count + to].submit(now, sink.frame, &mut arrivals);
        self.trace.add(now, at.endpoint, Line::Packet(packet, What::Sent(fate)));
        self.note_loss(at, to, &headers.bth, fate);
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

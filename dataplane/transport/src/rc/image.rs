//! The reliable connection in the image of a queue pair ([`crate::image`]).

use alloc::vec::Vec;

use ferroce_verbs::RtsAttrs;
use ferroce_wire::{DmaLen, Op, Psn, Syndrome};

use crate::image::{Image, ImportError, Reader, ensure, image_of, mtu_of};
use crate::inbound::{Inbound, Open};
use crate::qp::{Base, MAX_RD_ATOMIC};
use crate::segment::{self, PSN_WINDOW, distance};
use crate::time::ack_timeout_ns;
use crate::wq::{Kind, SgeCursor};

use super::Rc;
use super::replay::{AtomicOp, Resources, Slot, Work};
use super::requester::Requester;
use super::responder::{Nak, Responder};

impl Rc {
    pub(crate) fn save(&self, out: &mut Vec<u8>) {
        let Rc { requester, responder, requests_first } = self;
        save_requester(requester, out);
        save_responder(responder, out);
        requests_first.save(out);
    }

    pub(crate) fn load(base: &Base, from: &mut Reader<'_>) -> Result<Rc, ImportError> {
        let requester = load_requester(base, from)?;
        let responder = load_responder(base, from)?;
        Ok(Rc { requester, responder, requests_first: Image::load(from)? })
    }
}

fn save_requester(requester: &Requester, out: &mut Vec<u8>) {
    // What follows from the attributes, and places in scatter lists, are made anew.
    let Requester {
        mtu: _,
        rts: _,
        timeout_ns: _,
        una,
        next,
        last_sent,
        cursor,
        cursor_packet,
        cursor_psn,
        fresh,
        asked,
        since_ask,
        queries_out,
        query_psns,
        receives_started,
        receives_done,
        credit,
        retries_left,
        rnr_left,
        went_back_at,
        rnr_until,
        deadline,
        gather: _,
        scatter: _,
    } = requester;
    (*una, *next, *last_sent).save(out);
    (*cursor, *cursor_packet, *cursor_psn).save(out);
    (*fresh, *asked, *since_ask).save(out);
    (*queries_out, *query_psns).save(out);
    (*receives_started, *receives_done, *credit).save(out);
    (*retries_left, *rnr_left).save(out);
    (*went_back_at, *rnr_until, *deadline).save(out);
}

fn load_requester(base: &Base, from: &mut Reader<'_>) -> Result<Requester, ImportError> {
    let rts: RtsAttrs = base.rts.unwrap_or(Requester::default().rts);
    let (una, next, last_sent) = Image::load(from)?;
    let (cursor, cursor_packet, cursor_psn) = Image::load(from)?;
    let (fresh, asked, since_ask) = Image::load(from)?;
    let (queries_out, query_psns) = Image::load(from)?;
    let (receives_started, receives_done, credit) = Image::load(from)?;
    let (retries_left, rnr_left) = Image::load(from)?;
    let (went_back_at, rnr_until, deadline) = Image::load(from)?;
    let requester = Requester {
        mtu: mtu_of(base),
        rts,
        timeout_ns: ack_timeout_ns(rts.timeout),
        una,
        next,
        last_sent,
        cursor,
        cursor_packet,
        cursor_psn,
        fresh,
        asked,
        since_ask,
        queries_out,
        query_psns,
        receives_started,
        receives_done,
        credit,
        retries_left,
        rnr_left,
        went_back_at,
        rnr_until,
        deadline,
        gather: SgeCursor::default(),
        scatter: SgeCursor::default(),
    };
    ensure(retries_left <= rts.retry_cnt && rnr_left <= rts.rnr_retry, "a retry counter")?;
    ensure(queries_out <= u32::from(MAX_RD_ATOMIC) && query_psns <= PSN_WINDOW, "READs outstanding")?;
    if base.rts.is_some() && may_send(base) {
        check_requester(base, &requester)?;
    }
    Ok(requester)
}

/// In error the send queue is flushed and the requester never asked again.
fn may_send(base: &Base) -> bool {
    crate::qp::state::may_request(base.state)
}

/// The invariants of [`Requester`]: the PSNs of what was started follow one another, and `una` and the cursor lie there.
fn check_requester(base: &Base, requester: &Requester) -> Result<(), ImportError> {
    let queue = &base.sq.queue;
    let started = requester.fresh.wrapping_sub(queue.done);
    ensure(started <= queue.unfinished(), "the first request never started")?;
    let ahead = requester.cursor.wrapping_sub(queue.done);
    ensure(ahead <= started, "the cursor")?;
    let outstanding = distance(requester.next, requester.una);
    ensure(requester.deadline.is_none() || requester.asked != requester.una, "the ACK timer")?;
    ensure(outstanding <= PSN_WINDOW, "PSNs outstanding")?;
    ensure(distance(requester.asked, requester.una) <= outstanding, "what was asked for")?;
    ensure(distance(requester.cursor_psn, requester.una) <= outstanding, "the cursor")?;
    if started == 0 {
        ensure(requester.una == requester.next, "the oldest PSN")?;
    }
    let mut psn = requester.una;
    for at in 0..started {
        let index = queue.done.wrapping_add(at);
        let Some(entry) = queue.get(index) else { return Err(ImportError::Invalid("a request")) };
        let packets = match entry.kind() {
            Kind::Data | Kind::Read => segment::packets(entry.len, requester.mtu),
            Kind::Atomic => 1,
            Kind::Local => 0,
        };
        ensure(entry.packets == packets, "a request's PSNs")?;
        if at == 0 {
            // The oldest may be answered in part; it is no local operation, which would be finished.
            ensure(distance(requester.una, entry.first) < packets, "the oldest PSN")?;
        } else {
            ensure(entry.first == psn, "a request's PSNs")?;
        }
        if requester.cursor == index {
            check_cursor(requester, entry.first, packets)?;
        }
        psn = entry.first.advance(packets);
        let newest = at.wrapping_add(1) == started;
        // Only the newest may be sent in part, and only data is.
        if !newest || entry.kind() != Kind::Data {
            ensure(distance(psn, requester.una) <= outstanding, "a request's PSNs")?;
        }
        if newest {
            let sent = distance(requester.next, entry.first);
            let in_part = entry.kind() == Kind::Data && (1..packets).contains(&sent);
            ensure(sent == packets || in_part, "the next PSN")?;
        }
    }
    if ahead == started {
        ensure(requester.cursor_packet == 0 && requester.cursor_psn == requester.next, "the cursor")?;
    }
    Ok(())
}

fn check_cursor(requester: &Requester, first: Psn, packets: u32) -> Result<(), ImportError> {
    let inside = requester.cursor_packet < packets.max(1);
    ensure(inside && requester.cursor_psn == first.advance(requester.cursor_packet), "the cursor")
}

image_of!(Nak { psn, syndrome });

fn save_responder(responder: &Responder, out: &mut Vec<u8>) {
    let Responder {
        min_rnr_timer: _,
        expected,
        msn,
        inbound,
        nak_given,
        after_read,
        ack_due,
        duplicate_ack,
        nak,
        resources,
        closing,
    } = responder;
    (*expected, *msn, *after_read).save(out);
    inbound.save(out);
    (*nak_given, *ack_due, *closing).save(out);
    duplicate_ack.save(out);
    nak.save(out);
    save_resources(resources, out);
}

fn load_responder(base: &Base, from: &mut Reader<'_>) -> Result<Responder, ImportError> {
    let (expected, msn, after_read) = Image::load(from)?;
    let inbound = Inbound::load(base, from)?;
    let (nak_given, ack_due, closing) = Image::load(from)?;
    let duplicate_ack = Image::load(from)?;
    let nak: Option<Nak> = Image::load(from)?;
    ensure(
        nak.is_none_or(|nak| matches!(nak.syndrome, Syndrome::Nak(_) | Syndrome::RnrNak { .. })),
        "a NAK",
    )?;
    Ok(Responder {
        min_rnr_timer: base.rtr.map_or(0, |rtr| rtr.min_rnr_timer),
        expected,
        msn,
        inbound,
        nak_given,
        after_read,
        ack_due,
        duplicate_ack,
        nak,
        resources: load_resources(base, from)?,
        closing,
    })
}

impl Inbound {
    pub(crate) fn save(&self, out: &mut Vec<u8>) {
        let Inbound { mtu: _, open } = self;
        let open = open.map(|open| {
            let Open { op, received, cursor: _, addr, rkey, left } = open;
            ((op == Op::Write, received), (addr, rkey, left))
        });
        open.save(out);
    }

    pub(crate) fn load(base: &Base, from: &mut Reader<'_>) -> Result<Inbound, ImportError> {
        let open: Option<((bool, u32), _)> = Image::load(from)?;
        let open = open.map(|((write, received), (addr, rkey, left))| Open {
            op: if write { Op::Write } else { Op::Send },
            received,
            cursor: SgeCursor::default(),
            addr,
            rkey,
            left,
        });
        if let Some(open) = &open {
            ensure(open.received <= DmaLen::MAX.0 && open.left <= DmaLen::MAX.0, "the message in progress")?;
            let send = open.op == Op::Send && crate::qp::state::may_receive(base.state);
            let fits = base.rq.current().is_some_and(|entry| open.received <= entry.room);
            ensure(!send || fits, "the message in progress")?;
        }
        Ok(Inbound { mtu: mtu_of(base), open })
    }
}

impl Image for AtomicOp {
    fn save(&self, out: &mut Vec<u8>) {
        match *self {
            AtomicOp::CmpSwap { compare, swap } => (0u8, compare, swap).save(out),
            AtomicOp::FetchAdd { add } => (1u8, add).save(out),
        }
    }
    fn load(from: &mut Reader<'_>) -> Result<Self, ImportError> {
        match u8::load(from)? {
            0 => Ok(AtomicOp::CmpSwap { compare: Image::load(from)?, swap: Image::load(from)? }),
            1 => Ok(AtomicOp::FetchAdd { add: Image::load(from)? }),
            _ => Err(ImportError::Invalid("an atomic")),
        }
    }
}

impl Image for Work {
    fn save(&self, out: &mut Vec<u8>) {
        match *self {
            Work::Read { addr, rkey, len } => (0u8, (addr, rkey, len)).save(out),
            Work::Atomic { addr, rkey, op, result } => (1u8, (addr, rkey), (op, result)).save(out),
        }
    }
    fn load(from: &mut Reader<'_>) -> Result<Self, ImportError> {
        match u8::load(from)? {
            0 => {
                let (addr, rkey, len) = Image::load(from)?;
                Ok(Work::Read { addr, rkey, len })
            }
            1 => {
                let ((addr, rkey), (op, result)) = Image::load(from)?;
                Ok(Work::Atomic { addr, rkey, op, result })
            }
            _ => Err(ImportError::Invalid("a READ or atomic")),
        }
    }
}

image_of!(Slot { first, packets, work, start, next, end, stop, queued });

/// The slots that are held, oldest first, and what of them is to be answered again, as places from the newest back.
fn save_resources(resources: &Resources, out: &mut Vec<u8>) {
    let Resources { slots: _, repeats: _, repeat_head, repeat_tail, limit: _, held, emit, tail } = resources;
    (*held, *emit, *tail).save(out);
    for back in (1..=*held).rev() {
        if let Some(slot) = resources.slot(tail.wrapping_sub(back)) {
            slot.save(out);
        }
    }
    let again = (0..repeat_tail.wrapping_sub(*repeat_head)).filter_map(|at| {
        let index = resources.repeat_at(repeat_head.wrapping_add(at))?;
        Some(tail.wrapping_sub(index)).filter(|back| back <= held)
    });
    (again.clone().fold(0u32, |count, _| count.wrapping_add(1))).save(out);
    again.for_each(|back| back.save(out));
}

fn load_resources(base: &Base, from: &mut Reader<'_>) -> Result<Resources, ImportError> {
    let limit = base.rtr.map_or(0, |rtr| rtr.max_dest_rd_atomic);
    let (held, emit, tail): (u32, u32, u32) = Image::load(from)?;
    ensure(held <= u32::from(MAX_RD_ATOMIC) && tail.wrapping_sub(emit) <= held, "responder resources")?;
    // More than `limit` may be held: it was lowered when more were owed, and those stay until new ones come.
    let mut resources = Resources::moved(limit, held, emit, tail);
    for back in (1..=held).rev() {
        let slot = Slot::load(from)?;
        let (len, packets) = match slot.work {
            Work::Read { len, .. } => (len, segment::packets(len, mtu_of(base))),
            Work::Atomic { .. } => (0, 1),
        };
        let owed = back <= resources.owed();
        let stops = slot.stop <= len && slot.end == segment::packets(slot.stop, mtu_of(base));
        let ordered = slot.start <= slot.next && slot.next <= slot.end && slot.end <= packets && stops;
        let pending = !(owed || slot.queued) || slot.next < slot.end;
        let long = matches!(slot.work, Work::Read { len, .. } if len > DmaLen::MAX.0);
        let executed = matches!(slot.work, Work::Read { .. } | Work::Atomic { result: Some(_), .. });
        ensure(slot.packets == packets && ordered && pending && !long, "responder resources")?;
        ensure((executed || owed) && !(owed && slot.queued), "responder resources")?;
        resources.put(tail.wrapping_sub(back), slot);
    }
    let again = u32::load(from)?;
    ensure(again <= held, "responder resources")?;
    for _ in 0..again {
        let back = u32::load(from)?;
        ensure(resources.owed() < back && back <= held, "responder resources")?;
        ensure(resources.ask_again(tail.wrapping_sub(back)), "responder resources")?;
    }
    let queued = (1..=held)
        .filter(|back| resources.slot(tail.wrapping_sub(*back)).is_some_and(|slot| slot.queued))
        .fold(0u32, |count, _| count.wrapping_add(1));
    ensure(queued == again, "responder resources")?;
    Ok(resources)
}

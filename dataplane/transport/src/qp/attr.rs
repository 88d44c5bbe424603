//! Attributes of a transition: every field that the type of the queue pair uses within its range, or refused by its
//! libibverbs name.

use ferroce_verbs::{AddressVector, QpChange, QpModify, QpState, QpType, RtrAttrs, RtsAttrs};
use ferroce_wire::{Pkey, Qpn};

use super::{Base, MAX_RD_ATOMIC, ModifyError};

/// Checks the attributes that ride on a transition.
pub(crate) fn check(base: &Base, modify: &QpModify) -> Result<(), ModifyError> {
    let qp_type = base.attr.qp_type;
    match modify {
        QpModify::ToInit(init) => check_pkey(init.pkey),
        QpModify::ToRtr(rtr) => check_rtr(qp_type, rtr),
        QpModify::ToRts(rts) => check_rts(qp_type, rts),
        QpModify::Change(change) => {
            ensure_optional(base, change)?;
            check_change(change)
        }
        QpModify::ToSqd | QpModify::SqdToRts | QpModify::SqeToRts | QpModify::ToErr | QpModify::ToReset => {
            Ok(())
        }
    }
}

/// A partition whose low 15 bits are 0 matches nothing.
fn check_pkey(pkey: Pkey) -> Result<(), ModifyError> {
    ensure(pkey.0 & 0x7fff != 0, "pkey_index")
}

fn check_rtr(qp_type: QpType, rtr: &RtrAttrs) -> Result<(), ModifyError> {
    if qp_type == QpType::Ud {
        return Ok(());
    }
    check_av(&rtr.av)?;
    ensure(rtr.dest_qpn.get() > 1 && rtr.dest_qpn != Qpn::MULTICAST, "dest_qp_num")?;
    if qp_type == QpType::Uc {
        return Ok(());
    }
    ensure(rtr.min_rnr_timer <= 31, "min_rnr_timer")?;
    rd_atomic(rtr.max_dest_rd_atomic)
}

fn check_rts(qp_type: QpType, rts: &RtsAttrs) -> Result<(), ModifyError> {
    if qp_type != QpType::Rc {
        return Ok(());
    }
    ensure(rts.timeout <= 31, "timeout")?;
    ensure(rts.retry_cnt <= 7, "retry_cnt")?;
    ensure(rts.rnr_retry <= 7, "rnr_retry")?;
    rd_atomic(rts.max_rd_atomic)
}

/// Whether a vector can be the path of a queue pair or of an address handle.
pub(crate) fn check_av(av: &AddressVector) -> Result<(), ModifyError> {
    ensure(av.sgid.is_ipv4() == av.dgid.is_ipv4(), "ah_attr.grh.dgid")?;
    ensure(av.flow_label < 1 << 20, "ah_attr.grh.flow_label")?;
    ensure(av.sl <= 7, "ah_attr.sl")?;
    ensure(av.vlan.is_none_or(|tag| tag.vid <= 4095 && tag.pcp <= 7), "ah_attr.vlan")
}

/// The table of optional attributes (roce-wire 7.1; [`QpChange`]).
fn ensure_optional(base: &Base, change: &QpChange) -> Result<(), ModifyError> {
    let (rc, connected, ud) = match base.attr.qp_type {
        QpType::Rc => (true, true, false),
        QpType::Uc => (false, true, false),
        QpType::Ud => (false, false, true),
    };
    let (init, rts, sqd) = match base.state {
        QpState::Init => (true, false, false),
        QpState::Rts => (false, true, false),
        QpState::Sqd => (false, false, true),
        QpState::Reset | QpState::Rtr | QpState::Sqe | QpState::Err => (false, false, false),
    };
    ensure(change.pkey.is_none() || init || sqd, "pkey_index")?;
    ensure(change.access.is_none() || connected, "qp_access_flags")?;
    ensure(change.qkey.is_none() || ud, "qkey")?;
    ensure(change.av.is_none() || connected && sqd, "ah_attr")?;
    ensure(change.min_rnr_timer.is_none() || rc && (rts || sqd), "min_rnr_timer")?;
    ensure(change.timeout.is_none() || rc && sqd, "timeout")?;
    ensure(change.retry_cnt.is_none() || rc && sqd, "retry_cnt")?;
    ensure(change.rnr_retry.is_none() || rc && sqd, "rnr_retry")?;
    ensure(change.max_rd_atomic.is_none() || rc && sqd, "max_rd_atomic")?;
    ensure(change.max_dest_rd_atomic.is_none() || rc && sqd, "max_dest_rd_atomic")
}

fn check_change(change: &QpChange) -> Result<(), ModifyError> {
    change.pkey.map_or(Ok(()), check_pkey)?;
    change.av.as_ref().map_or(Ok(()), check_av)?;
    ensure(change.min_rnr_timer.is_none_or(|timer| timer <= 31), "min_rnr_timer")?;
    ensure(change.timeout.is_none_or(|timeout| timeout <= 31), "timeout")?;
    ensure(change.retry_cnt.is_none_or(|count| count <= 7), "retry_cnt")?;
    ensure(change.rnr_retry.is_none_or(|count| count <= 7), "rnr_retry")?;
    change.max_rd_atomic.map_or(Ok(()), rd_atomic)?;
    change.max_dest_rd_atomic.map_or(Ok(()), rd_atomic)
}

fn rd_atomic(asked: u8) -> Result<(), ModifyError> {
    if asked <= MAX_RD_ATOMIC { Ok(()) } else { Err(ModifyError::TooManyRdAtomic { allowed: MAX_RD_ATOMIC }) }
}

fn ensure(holds: bool, attribute: &'static str) -> Result<(), ModifyError> {
    if holds { Ok(()) } else { Err(ModifyError::BadAttr(attribute)) }
}

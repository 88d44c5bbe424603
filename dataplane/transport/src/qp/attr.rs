//! Attributes of a transition: every field within its range, or refused by its libibverbs name.

use ferroce_verbs::{AddressVector, QpModify, RtrAttrs, RtsAttrs};

use super::{MAX_RD_ATOMIC, ModifyError};

/// Checks the attributes that ride on a transition.
pub(crate) fn check(modify: &QpModify) -> Result<(), ModifyError> {
    match modify {
        QpModify::ToInit(init) => {
            // A partition whose low 15 bits are 0 matches nothing.
            ensure(init.pkey.0 & 0x7fff != 0, "pkey_index")
        }
        QpModify::ToRtr(rtr) => check_rtr(rtr),
        QpModify::ToRts(rts) => check_rts(rts),
        QpModify::ToSqd | QpModify::SqdToRts | QpModify::ToErr | QpModify::ToReset => Ok(()),
    }
}

fn check_rtr(rtr: &RtrAttrs) -> Result<(), ModifyError> {
    check_av(&rtr.av)?;
    ensure(rtr.dest_qpn.get() > 1 && rtr.dest_qpn != ferroce_wire::Qpn::MULTICAST, "dest_qp_num")?;
    ensure(rtr.min_rnr_timer <= 31, "min_rnr_timer")?;
    rd_atomic(rtr.max_dest_rd_atomic)
}

fn check_rts(rts: &RtsAttrs) -> Result<(), ModifyError> {
    ensure(rts.timeout <= 31, "timeout")?;
    ensure(rts.retry_cnt <= 7, "retry_cnt")?;
    ensure(rts.rnr_retry <= 7, "rnr_retry")?;
    rd_atomic(rts.max_rd_atomic)
}

fn check_av(av: &AddressVector) -> Result<(), ModifyError> {
    ensure(av.sgid.is_ipv4() == av.dgid.is_ipv4(), "ah_attr.grh.dgid")?;
    ensure(av.flow_label < 1 << 20, "ah_attr.grh.flow_label")?;
    ensure(av.sl <= 7, "ah_attr.sl")?;
    ensure(av.vlan.is_none_or(|tag| tag.vid <= 4095 && tag.pcp <= 7), "ah_attr.vlan")
}

fn rd_atomic(asked: u8) -> Result<(), ModifyError> {
    if asked <= MAX_RD_ATOMIC { Ok(()) } else { Err(ModifyError::TooManyRdAtomic { allowed: MAX_RD_ATOMIC }) }
}

fn ensure(holds: bool, attribute: &'static str) -> Result<(), ModifyError> {
    if holds { Ok(()) } else { Err(ModifyError::BadAttr(attribute)) }
}

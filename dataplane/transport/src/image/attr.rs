//! Attributes in the image, and which of them a state has.

use ferroce_verbs::{
    AddressVector, Ah, InitAttrs, QpCap, QpInitAttr, QpModify, QpState, QpType, RtrAttrs, RtsAttrs, UdDest,
};

use super::{ImportError, ensure, image_of};
use crate::qp::Base;
use crate::qp::attr::check as check_modify;

image_of!(QpCap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data });
image_of!(QpInitAttr { qp_type, pd, send_cq, recv_cq, cap, sq_sig_all, srq });
image_of!(AddressVector { sgid, dgid, smac, dmac, vlan, traffic_class, flow_label, hop_limit, sl, udp_src });
image_of!(Ah { id, pd, av });
image_of!(UdDest { ah, remote_qpn, remote_qkey });
image_of!(InitAttrs { pkey, access, qkey });
image_of!(RtrAttrs { av, class, path_mtu, dest_qpn, rq_psn, max_dest_rd_atomic, min_rnr_timer });
image_of!(RtsAttrs { sq_psn, timeout, retry_cnt, rnr_retry, max_rd_atomic });

/// Every attribute that the state needs, in its range, and none that it can't have.
pub(super) fn check(base: &Base) -> Result<(), ImportError> {
    let have = (base.init.is_some(), base.rtr.is_some(), base.rts.is_some());
    let right = match base.state {
        QpState::Reset => have == (false, false, false),
        QpState::Init => have == (true, false, false),
        QpState::Rtr => have == (true, true, false),
        QpState::Rts | QpState::Sqd => have == (true, true, true),
        QpState::Sqe => have == (true, true, true) && base.attr.qp_type != QpType::Rc,
        QpState::Err => {
            matches!(have, (true, false, false) | (true, true, false) | (true, true, true))
        }
    };
    ensure(right, "qp_state")?;
    let modifies =
        [base.init.map(QpModify::ToInit), base.rtr.map(QpModify::ToRtr), base.rts.map(QpModify::ToRts)];
    for modify in modifies.iter().flatten() {
        check_modify(base, modify).map_err(|_| ImportError::Invalid("attributes"))?;
    }
    Ok(())
}

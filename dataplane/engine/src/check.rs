//! Checks of what control asks for, before a worker sees it: every refusal names the attribute, what was asked, what is
//! allowed and how to change it.

use ferroce_transport::ModifyError;
use ferroce_verbs::{
    AddressVector, DeviceAttr, PathMtu, QpCap, QpInitAttr, QpModify, QpState, QpType, RtrAttrs, RtsAttrs,
    SrqInitAttr, VerbsError, error::VerbsErrorKind,
};

use crate::device::Netdev;
use crate::sched::MAX_CLASSES;

/// Builds a refusal.
pub(crate) fn refuse(
    kind: VerbsErrorKind,
    attribute: &str,
    asked: impl ToString,
    allowed: impl ToString,
    hint: &str,
) -> VerbsError {
    VerbsError {
        kind,
        attribute: attribute.into(),
        asked: asked.to_string(),
        allowed: allowed.to_string(),
        hint: hint.into(),
    }
}

fn range(attribute: &str, asked: u64, low: u64, high: u64) -> Result<(), VerbsError> {
    if (low..=high).contains(&asked) {
        return Ok(());
    }
    Err(refuse(VerbsErrorKind::Invalid, attribute, asked, format!("{low} to {high}"), ""))
}

/// Attributes of a new queue pair, apart from the objects that it names.
pub(crate) fn qp_init(attr: &QpInitAttr, limits: &DeviceAttr) -> Result<(), VerbsError> {
    let QpCap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data } = attr.cap;
    range("cap.max_send_wr", max_send_wr.into(), 0, limits.max_qp_wr.into())?;
    range("cap.max_recv_wr", max_recv_wr.into(), 0, limits.max_qp_wr.into())?;
    range("cap.max_send_sge", max_send_sge.into(), 0, limits.max_sge.into())?;
    range("cap.max_recv_sge", max_recv_sge.into(), 0, limits.max_sge.into())?;
    range("cap.max_inline_data", max_inline_data.into(), 0, limits.max_inline.into())
}

/// Attributes of a shared receive queue.
pub(crate) fn srq(attr: &SrqInitAttr, limits: &DeviceAttr) -> Result<(), VerbsError> {
    range("max_wr", attr.max_wr.into(), 1, limits.max_srq_wr.into())?;
    range("max_sge", attr.max_sge.into(), 0, limits.max_srq_sge.into())?;
    range("srq_limit", attr.limit.into(), 0, attr.max_wr.into())
}

/// Attributes of a transition.
pub(crate) fn modify(modify: &QpModify, qp_type: QpType, netdev: &Netdev) -> Result<(), VerbsError> {
    match modify {
        QpModify::ToRtr(rtr) => to_rtr(rtr, qp_type, netdev),
        QpModify::ToRts(rts) if qp_type == QpType::Rc => to_rts(rts),
        QpModify::Change(change) => change.av.as_ref().map_or(Ok(()), |av| path(av, netdev)),
        QpModify::ToRts(_)
        | QpModify::ToInit(_)
        | QpModify::ToSqd
        | QpModify::SqdToRts
        | QpModify::SqeToRts
        | QpModify::ToErr
        | QpModify::ToReset => Ok(()),
    }
}

fn to_rtr(rtr: &RtrAttrs, qp_type: QpType, netdev: &Netdev) -> Result<(), VerbsError> {
    path_mtu(rtr.path_mtu, netdev.info.mtu)?;
    range("class", rtr.class.0.into(), 0, MAX_CLASSES as u64 - 1)?;
    if qp_type == QpType::Ud {
        // Each datagram has a path of its own.
        return Ok(());
    }
    path(&rtr.av, netdev)?;
    range("dest_qp_num", rtr.dest_qpn.get().into(), 2, 0xff_fffe)?;
    if qp_type == QpType::Uc {
        return Ok(());
    }
    range("min_rnr_timer", rtr.min_rnr_timer.into(), 0, 31)
}

/// The path of a queue pair or of an address handle.
pub(crate) fn path(av: &AddressVector, netdev: &Netdev) -> Result<(), VerbsError> {
    if !netdev.gids.contains(&av.sgid) {
        let have: Vec<String> = netdev.gids.iter().map(|g| g.to_ip().to_string()).collect();
        return Err(refuse(
            VerbsErrorKind::Invalid,
            "ah_attr.sgid",
            av.sgid.to_ip(),
            format!("an address of this device ({})", have.join(", ")),
            "",
        ));
    }
    if av.sgid.is_ipv4() != av.dgid.is_ipv4() {
        return Err(refuse(
            VerbsErrorKind::Invalid,
            "ah_attr.dgid",
            av.dgid.to_ip(),
            format!("an address of the family of {}", av.sgid.to_ip()),
            "choose another source address",
        ));
    }
    range("ah_attr.flow_label", av.flow_label.into(), 0, 0xf_ffff)?;
    range("ah_attr.sl", av.sl.into(), 0, 7)?;
    range("ah_attr.hop_limit", av.hop_limit.into(), 1, 255)?;
    if let Some(tag) = av.vlan {
        range("ah_attr.vlan.pcp", tag.pcp.into(), 0, 7)?;
        range("ah_attr.vlan.vid", tag.vid.into(), 0, 4094)?;
    }
    Ok(())
}

fn to_rts(rts: &RtsAttrs) -> Result<(), VerbsError> {
    range("timeout", rts.timeout.into(), 0, 31)?;
    range("retry_cnt", rts.retry_cnt.into(), 0, 7)?;
    range("rnr_retry", rts.rnr_retry.into(), 0, 7)
}

fn path_mtu(asked: PathMtu, netdev_mtu: u32) -> Result<(), VerbsError> {
    match PathMtu::largest_for_netdev(netdev_mtu) {
        Some(largest) if asked <= largest => Ok(()),
        Some(largest) => Err(refuse(
            VerbsErrorKind::Invalid,
            "path_mtu",
            asked.bytes(),
            format!("largest {}", largest.bytes()),
            &format!(
                "or raise the MTU of the interface from {netdev_mtu} to at least {}",
                asked.bytes() + 96
            ),
        )),
        None => Err(refuse(
            VerbsErrorKind::Invalid,
            "path_mtu",
            asked.bytes(),
            format!("none: the interface's MTU is {netdev_mtu}"),
            "raise the MTU of the interface to at least 352",
        )),
    }
}

/// A transition that the queue pair itself refused.
pub(crate) fn modify_refused(asked: &QpModify, why: ModifyError) -> VerbsError {
    match why {
        ModifyError::BadTransition { from } => refuse(
            VerbsErrorKind::State,
            "qp_state",
            format!("{} from {from:?}", target(asked)),
            transitions(from),
            "",
        ),
        ModifyError::TooManyRdAtomic { allowed } => {
            let (attribute, n) = match asked {
                QpModify::ToRtr(rtr) => ("max_dest_rd_atomic", rtr.max_dest_rd_atomic),
                QpModify::ToRts(rts) => ("max_rd_atomic", rts.max_rd_atomic),
                _ => ("max_rd_atomic", 0),
            };
            refuse(VerbsErrorKind::Invalid, attribute, n, format!("0 to {allowed}"), "")
        }
        ModifyError::BadAttr(name) => {
            refuse(VerbsErrorKind::Invalid, name, target(asked), "a value within its range", "")
        }
    }
}

fn target(modify: &QpModify) -> &'static str {
    match modify {
        QpModify::ToInit(_) => "to Init",
        QpModify::ToRtr(_) => "to Rtr",
        QpModify::ToRts(_) | QpModify::SqdToRts | QpModify::SqeToRts => "to Rts",
        QpModify::Change(_) => "a change of attributes",
        QpModify::ToSqd => "to Sqd",
        QpModify::ToErr => "to Err",
        QpModify::ToReset => "to Reset",
    }
}

fn transitions(from: QpState) -> &'static str {
    match from {
        QpState::Reset => "to Init or Reset",
        QpState::Init => "to Rtr, Err or Reset",
        QpState::Rtr => "to Rts, Err or Reset",
        QpState::Rts => "to Sqd, Err or Reset",
        QpState::Sqd => "to Rts, Err or Reset",
        QpState::Sqe => "to Rts, Err or Reset",
        QpState::Err => "to Reset",
    }
}

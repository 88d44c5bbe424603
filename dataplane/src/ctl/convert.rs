//! Between the API's types and those of verbs: one function a type, nothing decided here but what a type cannot hold.

use ferroce_api::appliance as api;
use ferroce_api::{ApiError, Code};
use ferroce_engine::path::udp_source_port;
use ferroce_verbs as verbs;
use ferroce_verbs::error::VerbsErrorKind;
use ferroce_verbs::{Pkey, Qkey, VlanTag};

/// A refusal of the device.
pub fn error(error: verbs::VerbsError) -> ApiError {
    let code = match error.kind {
        VerbsErrorKind::Invalid => Code::Invalid,
        VerbsErrorKind::NotFound => Code::NotFound,
        VerbsErrorKind::Busy => Code::Busy,
        VerbsErrorKind::Exhausted => Code::Exhausted,
        VerbsErrorKind::Unsupported => Code::Unsupported,
        VerbsErrorKind::State => Code::State,
        VerbsErrorKind::Timeout => Code::Timeout,
        VerbsErrorKind::Gone => Code::Gone,
    };
    ApiError::new(code, error.attribute, error.asked, error.allowed).hint(error.hint)
}

/// Longest text of an error in an answer, in bytes: four of them stay within the reserve of a reply.
const MAX_TEXT_BYTES: usize = 250;

/// Cuts the texts of an error to what an answer may hold.
pub fn bounded(mut error: ApiError) -> ApiError {
    for text in [&mut error.attribute, &mut error.asked, &mut error.allowed, &mut error.hint] {
        if text.len() > MAX_TEXT_BYTES {
            let end = (0..=MAX_TEXT_BYTES).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
            text.truncate(end);
        }
    }
    error
}

/// Rights.
pub fn access(access: api::Access) -> verbs::Access {
    verbs::Access::from_bits_truncate(access.bits())
}

/// Rights.
pub fn access_back(access: verbs::Access) -> api::Access {
    api::Access::from_bits(access.bits())
}

/// Type of a queue pair.
pub fn qp_type(qp_type: api::QpType) -> verbs::QpType {
    match qp_type {
        api::QpType::Rc => verbs::QpType::Rc,
        api::QpType::Uc => verbs::QpType::Uc,
        api::QpType::Ud => verbs::QpType::Ud,
    }
}

/// Type of a queue pair.
pub fn qp_type_back(qp_type: verbs::QpType) -> api::QpType {
    match qp_type {
        verbs::QpType::Rc => api::QpType::Rc,
        verbs::QpType::Uc => api::QpType::Uc,
        verbs::QpType::Ud => api::QpType::Ud,
    }
}

/// State of a queue pair.
pub fn state(state: verbs::QpState) -> api::QpState {
    match state {
        verbs::QpState::Reset => api::QpState::Reset,
        verbs::QpState::Init => api::QpState::Init,
        verbs::QpState::Rtr => api::QpState::Rtr,
        verbs::QpState::Rts => api::QpState::Rts,
        verbs::QpState::Sqd => api::QpState::Sqd,
        verbs::QpState::Sqe => api::QpState::Sqe,
        verbs::QpState::Err => api::QpState::Err,
    }
}

fn cap(cap: api::QpCap) -> verbs::QpCap {
    verbs::QpCap {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
    }
}

fn cap_back(cap: verbs::QpCap) -> api::QpCap {
    api::QpCap {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
    }
}

/// What a queue pair is made with.
pub fn qp_init(spec: &api::QpSpec) -> verbs::QpInitAttr {
    verbs::QpInitAttr {
        qp_type: qp_type(spec.qp_type),
        pd: verbs::PdId(spec.pd.0),
        send_cq: verbs::CqId(spec.send_cq.0),
        recv_cq: verbs::CqId(spec.recv_cq.0),
        cap: cap(spec.cap),
        sq_sig_all: spec.sq_sig_all,
        srq: None,
    }
}

/// A transition. `qpn` is the queue pair's own number: with the peer's it makes the UDP source port if none is given.
///
/// # Errors
/// A VLAN tag that no header can hold.
pub fn modify(qpn: verbs::Qpn, modify: &api::Modify) -> Result<verbs::QpModify, ApiError> {
    Ok(match modify {
        api::Modify::Init(spec) => verbs::QpModify::ToInit(verbs::InitAttrs {
            pkey: Pkey(spec.pkey),
            access: access(spec.access),
            qkey: Qkey(spec.qkey),
        }),
        api::Modify::Rtr(spec) => verbs::QpModify::ToRtr(verbs::RtrAttrs {
            av: vector(qpn, spec.dest_qpn, &spec.av)?,
            class: verbs::ClassId(spec.class),
            path_mtu: spec.path_mtu,
            dest_qpn: spec.dest_qpn,
            rq_psn: spec.rq_psn,
            max_dest_rd_atomic: spec.max_dest_rd_atomic,
            min_rnr_timer: spec.min_rnr_timer,
        }),
        api::Modify::Rts(spec) => verbs::QpModify::ToRts(verbs::RtsAttrs {
            sq_psn: spec.sq_psn,
            timeout: spec.timeout,
            retry_cnt: spec.retry_cnt,
            rnr_retry: spec.rnr_retry,
            max_rd_atomic: spec.max_rd_atomic,
        }),
        api::Modify::Sqd => verbs::QpModify::ToSqd,
        api::Modify::SqdToRts => verbs::QpModify::SqdToRts,
        api::Modify::Err => verbs::QpModify::ToErr,
        api::Modify::Reset => verbs::QpModify::ToReset,
    })
}

fn vector(
    qpn: verbs::Qpn,
    dest: verbs::Qpn,
    av: &api::AddressVector,
) -> Result<verbs::AddressVector, ApiError> {
    if let Some(tag) = av.vlan
        && (tag.pcp > 7 || tag.vid > 4095)
    {
        let asked = format!("pcp {}, vid {}", tag.pcp, tag.vid);
        return Err(ApiError::new(Code::Invalid, "vlan", asked, "pcp 0 to 7, vid 0 to 4095"));
    }
    Ok(verbs::AddressVector {
        sgid: av.sgid,
        dgid: av.dgid,
        smac: av.smac,
        dmac: av.dmac,
        vlan: av.vlan.map(|tag| VlanTag { pcp: tag.pcp, dei: tag.dei, vid: tag.vid }),
        traffic_class: av.traffic_class,
        flow_label: av.flow_label,
        hop_limit: av.hop_limit,
        sl: av.sl,
        udp_src: if av.udp_src == 0 { udp_source_port(av.flow_label, qpn, dest) } else { av.udp_src },
    })
}

/// A path's vector back; the port stays open until a queue pair takes it.
pub fn vector_back(av: &verbs::AddressVector) -> api::AddressVector {
    api::AddressVector {
        sgid: av.sgid,
        dgid: av.dgid,
        smac: av.smac,
        dmac: av.dmac,
        vlan: av.vlan.map(|tag| api::Vlan { pcp: tag.pcp, dei: tag.dei, vid: tag.vid }),
        traffic_class: av.traffic_class,
        flow_label: av.flow_label,
        hop_limit: av.hop_limit,
        sl: av.sl,
        udp_src: av.udp_src,
    }
}

/// Limits of the device.
pub fn device(attr: &verbs::DeviceAttr) -> api::DeviceInfo {
    api::DeviceInfo {
        node_guid: attr.node_guid,
        workers: attr.workers,
        max_qp: attr.max_qp,
        max_qp_wr: attr.max_qp_wr,
        max_sge: attr.max_sge,
        max_inline: attr.max_inline,
        max_cq: attr.max_cq,
        max_cqe: attr.max_cqe,
        max_mr: attr.max_mr,
        max_mr_size: attr.max_mr_size,
        max_pd: attr.max_pd,
        max_qp_rd_atom: attr.max_qp_rd_atom,
        max_qp_init_rd_atom: attr.max_qp_init_rd_atom,
    }
}

/// State of the port.
pub fn port(attr: &verbs::PortAttr) -> api::PortInfo {
    api::PortInfo {
        active: attr.active,
        max_mtu: attr.max_mtu,
        active_mtu: attr.active_mtu,
        netdev_mtu: attr.netdev_mtu,
        mac: attr.mac,
        gid_tbl_len: attr.gid_tbl_len,
    }
}

/// A queue pair, with what control gave for it.
pub fn qp_entry(info: &verbs::QpInfo, owner: ferroce_api::ids::Owner, cookie: u64) -> api::QpEntry {
    api::QpEntry {
        qpn: info.qpn,
        qp_type: qp_type_back(info.qp_type),
        state: state(info.state),
        pd: api::PdHandle(info.pd.0),
        send_cq: api::CqHandle(info.send_cq.0),
        recv_cq: api::CqHandle(info.recv_cq.0),
        cap: cap_back(info.cap),
        sq_sig_all: info.sq_sig_all,
        init: info.init.map(|init| api::InitSpec {
            pkey: init.pkey.0,
            access: access_back(init.access),
            qkey: init.qkey.0,
        }),
        rtr: info.rtr.map(|rtr| api::RtrSpec {
            av: vector_back(&rtr.av),
            class: rtr.class.0,
            path_mtu: rtr.path_mtu,
            dest_qpn: rtr.dest_qpn,
            rq_psn: rtr.rq_psn,
            max_dest_rd_atomic: rtr.max_dest_rd_atomic,
            min_rnr_timer: rtr.min_rnr_timer,
        }),
        rts: info.rts.map(|rts| api::RtsSpec {
            sq_psn: rts.sq_psn,
            timeout: rts.timeout,
            retry_cnt: rts.retry_cnt,
            rnr_retry: rts.rnr_retry,
            max_rd_atomic: rts.max_rd_atomic,
        }),
        sq_psn: info.sq_psn,
        rq_psn: info.rq_psn,
        una_psn: info.una_psn,
        worker: info.worker,
        owner,
        cookie,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_bounded() {
        let long = "é".repeat(1000);
        let error = bounded(ApiError::new(Code::Invalid, &long, &long, &long).hint(&long));
        assert!(serde_json::to_vec(&error).unwrap().len() < api::RESULT_RESERVE_BYTES);
        let short = ApiError::new(Code::Invalid, "a", "b", "c");
        assert_eq!(bounded(short.clone()), short);
    }

    #[test]
    fn rights_keep_libibverbs_bits() {
        for bits in 0..32 {
            let rights = api::Access::from_bits(bits);
            assert_eq!(access(rights).bits(), bits);
            assert_eq!(access_back(access(rights)), rights);
        }
    }
}

//! Methods that make, connect, change and destroy objects in appliances, and the counters.
//!
//! Owns their names, params and results. Every name in [`CHANGES`] is refused on the read-only socket.

use ferroce_wire::{Gid, PathMtu, Psn, Qpn, Rkey};
use serde::{Deserialize, Serialize};

use crate::appliance::{
    Access, AddressVector, CqHandle, Lkey, Modify, PathQuery, PdHandle, QpCap, QpEntry, QpType, Stats,
};
use crate::error::ApiError;
use crate::ids::{self, Owner};

/// `statistic`. Params: [`super::DevParams`]. Result: [`StatisticResult`].
pub const STATISTIC: &str = "statistic";
/// `qp_query`. Params: [`QpParams`]. Result: [`QpEntry`].
pub const QP_QUERY: &str = "qp_query";
/// `path_resolve`. Params: [`PathResolveParams`]. Result: [`AddressVector`].
pub const PATH_RESOLVE: &str = "path_resolve";
/// `connect`. Params: [`ConnectParams`]. Result: [`ConnectResult`].
pub const CONNECT: &str = "connect";
/// `disconnect`: undoes a `connect` on both devices. Params: [`QpParams`] of either side. Result: [`DisconnectResult`].
pub const DISCONNECT: &str = "disconnect";
/// `pd_create`. Params: [`PdCreateParams`]. Result: [`PdResult`].
pub const PD_CREATE: &str = "pd_create";
/// `pd_destroy`. Params: [`PdParams`]. Result: `true`.
pub const PD_DESTROY: &str = "pd_destroy";
/// `mr_create`. Params: [`MrCreateParams`]. Result: [`MrResult`].
pub const MR_CREATE: &str = "mr_create";
/// `mr_destroy`. Params: [`MrParams`]. Result: `true`.
pub const MR_DESTROY: &str = "mr_destroy";
/// `cq_create`. Params: [`CqCreateParams`]. Result: [`CqResult`].
pub const CQ_CREATE: &str = "cq_create";
/// `cq_destroy`. Params: [`CqParams`]. Result: `true`.
pub const CQ_DESTROY: &str = "cq_destroy";
/// `qp_create`. Params: [`QpCreateParams`]. Result: [`QpResult`].
pub const QP_CREATE: &str = "qp_create";
/// `qp_modify`. Params: [`QpModifyParams`]. Result: [`QpEntry`] after it.
pub const QP_MODIFY: &str = "qp_modify";
/// `qp_destroy`. Params: [`QpParams`]. Result: `true`.
pub const QP_DESTROY: &str = "qp_destroy";

/// All methods that change something; the read-only socket refuses them.
pub const CHANGES: [&str; 12] = [
    super::PERF_RUN,
    CONNECT,
    DISCONNECT,
    PD_CREATE,
    PD_DESTROY,
    MR_CREATE,
    MR_DESTROY,
    CQ_CREATE,
    CQ_DESTROY,
    QP_CREATE,
    QP_MODIFY,
    QP_DESTROY,
];

/// All methods that only read.
pub const READS: [&str; 8] = [
    super::GET_METHODS,
    super::GET_VERSION,
    super::STATUS,
    super::DEV_LIST,
    super::RESOURCE_SHOW,
    STATISTIC,
    QP_QUERY,
    PATH_RESOLVE,
];

/// What control writes into the owner blob of a queue pair, as JSON: how a restarted control knows its own.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct OwnerBlob {
    /// Program that made it.
    pub comm: String,
    /// Verb that made it: `connect`, `perf_run`, `qp_create`.
    pub verb: String,
    /// The other device, of a connection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// User on whose behalf.
    pub uid: u32,
}

impl OwnerBlob {
    /// The blob's bytes; `None` when it is too long.
    pub fn encode(&self) -> Option<Owner> {
        Owner::new(serde_json::to_vec(self).ok()?)
    }
    /// From a listing; `None` when somebody else wrote the blob.
    pub fn decode(owner: &Owner) -> Option<Self> {
        serde_json::from_slice(owner.bytes()).ok()
    }
}

/// A path to resolve.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PathResolveParams {
    /// Device that the path begins at.
    pub dev: String,
    /// Where to.
    pub path: PathQuery,
}

/// What [`PATH_RESOLVE`] answers.
pub type PathResolveResult = AddressVector;

/// Counters of one device, or why there are none.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DevStatistic {
    /// Index, as in [`super::DevEntry`].
    pub ifindex: u32,
    /// Name.
    pub dev: String,
    /// Counters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stats: Option<Box<Stats>>,
    /// Why there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<ApiError>,
}

/// Counters by device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StatisticResult {
    /// Devices.
    pub devs: Vec<DevStatistic>,
}

/// A reliable connection between two devices, all or nothing.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConnectParams {
    /// One device.
    pub dev: String,
    /// The other one.
    pub peer: String,
    /// Bytes of a memory region made on both sides, readable and writable by the peer; 0: none.
    #[serde(default)]
    pub mr_bytes: u64,
    /// Work requests of each queue.
    #[serde(default = "default_wr")]
    pub max_wr: u32,
    /// Payload bytes of a full packet; none: the largest that both ports carry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_mtu: Option<u32>,
    /// Address of `dev` to use; none: chosen by the route.
    #[serde(default, with = "ids::opt_gid", skip_serializing_if = "Option::is_none")]
    pub sgid: Option<Gid>,
    /// Address of `peer` to use; none: the first that `dev` has a route to.
    #[serde(default, with = "ids::opt_gid", skip_serializing_if = "Option::is_none")]
    pub dgid: Option<Gid>,
    /// DSCP x 4 + ECN.
    #[serde(default)]
    pub traffic_class: u8,
    /// Worker on both sides; none: the next in turn on each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<u8>,
    /// ACK timeout: 4.096 us x 2^timeout, 1 ..= 31.
    #[serde(default = "default_timeout")]
    pub timeout: u8,
    /// Transport retries, 0 ..= 7.
    #[serde(default = "default_retry")]
    pub retry_cnt: u8,
    /// RNR retries, 0 ..= 7; 7 is for ever.
    #[serde(default = "default_rnr_retry")]
    pub rnr_retry: u8,
}

fn default_wr() -> u32 {
    128
}
fn default_timeout() -> u8 {
    14
}
fn default_retry() -> u8 {
    7
}
fn default_rnr_retry() -> u8 {
    // 7 would wait for ever for a receive that is never posted.
    6
}

impl ConnectParams {
    /// The defaults, between two devices.
    pub fn new(dev: impl Into<String>, peer: impl Into<String>) -> Self {
        ConnectParams {
            dev: dev.into(),
            peer: peer.into(),
            mr_bytes: 0,
            max_wr: default_wr(),
            path_mtu: None,
            sgid: None,
            dgid: None,
            traffic_class: 0,
            worker: None,
            timeout: default_timeout(),
            retry_cnt: default_retry(),
            rnr_retry: default_rnr_retry(),
        }
    }
}

/// A new region.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct MrResult {
    /// For the owner's scatter lists.
    pub lkey: Lkey,
    /// For peers.
    #[serde(with = "ids::rkey")]
    pub rkey: Rkey,
    /// First byte in the region's address space.
    pub iova: u64,
    /// Bytes.
    pub bytes: u64,
}

/// One side of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct EndPoint {
    /// Queue pair.
    #[serde(with = "ids::qpn")]
    pub qpn: Qpn,
    /// First PSN that it sends.
    #[serde(with = "ids::psn")]
    pub psn: Psn,
    /// Address.
    #[serde(with = "ids::gid")]
    pub gid: Gid,
    /// Where it lives.
    pub worker: u8,
    /// Protection domain made for it.
    pub pd: PdHandle,
    /// Completion queue made for it, for sends and receives.
    pub cq: CqHandle,
    /// Region made for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mr: Option<MrResult>,
}

/// A connection: both queue pairs are in RTS.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ConnectResult {
    /// As asked.
    pub dev: String,
    /// As asked.
    pub peer: String,
    /// Payload bytes of a full packet: the smaller of both sides.
    #[serde(with = "ids::path_mtu")]
    pub path_mtu: PathMtu,
    /// Cookie of everything that was made, on both sides.
    pub cookie: u64,
    /// On `dev`.
    pub local: EndPoint,
    /// On `peer`.
    pub remote: EndPoint,
}

/// What `disconnect` destroyed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DisconnectResult {
    /// Objects destroyed, on both sides together.
    pub destroyed: u64,
}

/// A queue pair of a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QpParams {
    /// Device.
    pub dev: String,
    /// Queue pair.
    #[serde(with = "ids::qpn")]
    pub qpn: Qpn,
}

/// A protection domain to make.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PdCreateParams {
    /// Device.
    pub dev: String,
}

/// A new protection domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PdResult {
    /// Its handle.
    pub pd: PdHandle,
}

/// A protection domain of a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PdParams {
    /// Device.
    pub dev: String,
    /// Which.
    pub pd: PdHandle,
}

/// A region to make.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MrCreateParams {
    /// Device.
    pub dev: String,
    /// Its protection domain.
    pub pd: PdHandle,
    /// Bytes, 1 and up.
    pub bytes: u64,
    /// Rights.
    #[serde(default)]
    pub access: Access,
}

/// A region of a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MrParams {
    /// Device.
    pub dev: String,
    /// Which.
    pub lkey: Lkey,
}

/// A completion queue to make.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CqCreateParams {
    /// Device.
    pub dev: String,
    /// On which worker.
    #[serde(default)]
    pub worker: u8,
    /// Entries at least.
    pub cqe: u32,
}

/// A new completion queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CqResult {
    /// Its handle.
    pub cq: CqHandle,
}

/// A completion queue of a device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CqParams {
    /// Device.
    pub dev: String,
    /// Which.
    pub cq: CqHandle,
}

/// A queue pair to make, in RESET.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QpCreateParams {
    /// Device.
    pub dev: String,
    /// Type.
    pub qp_type: QpType,
    /// Protection domain.
    pub pd: PdHandle,
    /// Where completions of sends go.
    pub send_cq: CqHandle,
    /// Where completions of receives go.
    pub recv_cq: CqHandle,
    /// Sizes.
    #[serde(default)]
    pub cap: QpCap,
    /// Every send produces a completion.
    #[serde(default)]
    pub sq_sig_all: bool,
}

/// A new queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct QpResult {
    /// Its number.
    #[serde(with = "ids::qpn")]
    pub qpn: Qpn,
    /// Where it lives.
    pub worker: u8,
}

/// A transition of a queue pair.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QpModifyParams {
    /// Device.
    pub dev: String,
    /// Queue pair.
    #[serde(with = "ids::qpn")]
    pub qpn: Qpn,
    /// The transition with its attributes.
    pub modify: Modify,
}

/// What [`QP_QUERY`] and [`QP_MODIFY`] answer.
pub type QpQueryResult = QpEntry;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_blob_round_trips_and_foreign_bytes_are_no_blob() {
        let blob = OwnerBlob {
            comm: "ferroce-ctld".into(),
            verb: "connect".into(),
            peer: Some("fe1".into()),
            uid: 1000,
        };
        let owner = blob.encode().expect("short");
        assert_eq!(OwnerBlob::decode(&owner), Some(blob.clone()));
        assert_eq!(OwnerBlob::decode(&Owner::new(vec![1, 2, 3]).expect("short")), None);
        assert!(OwnerBlob { comm: "x".repeat(600), ..blob }.encode().is_none(), "too long for a blob");
    }

    #[test]
    fn params_refuse_unknown_keys_and_fill_defaults() {
        let params: ConnectParams = serde_json::from_str(r#"{"dev":"a","peer":"b"}"#).expect("defaults");
        assert_eq!(params, ConnectParams::new("a", "b"));
        assert!(serde_json::from_str::<ConnectParams>(r#"{"dev":"a","peer":"b","mtu":1}"#).is_err());
        assert!(serde_json::from_str::<QpParams>(r#"{"dev":"a","qpn":16777216}"#).is_err(), "24 bits");
    }

    #[test]
    fn no_method_is_named_twice() {
        let mut all: Vec<&str> = CHANGES.iter().chain(&READS).copied().collect();
        all.sort_unstable();
        let before = all.len();
        all.dedup();
        assert_eq!(all.len(), before);
    }
}

//! Attributes of devices, ports, queue pairs and completion queues.

use ferroce_mem::{Access, PdId};
use ferroce_wire::{Gid, MacAddr, PathMtu, Pkey, Psn, Qkey, Qpn, VlanTag};

/// Queue pair type.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum QpType {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
}

/// Queue pair state, with libibverbs' numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum QpState {
    /// Just made, or reset.
    Reset = 0,
    /// Receives may be posted.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send.
    Rts = 3,
    /// Send queue drained or draining.
    Sqd = 4,
    /// Send queue error (UC, UD).
    Sqe = 5,
    /// Error: everything flushes.
    Err = 6,
}

impl QpState {
    /// All of them, in the order of their numbers.
    pub const ALL: [QpState; 7] =
        [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd, QpState::Sqe, QpState::Err];
}

/// Completion queue handle: worker in the high byte, index below. Made by [`crate::Device::create_cq`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct CqId(pub u32);

/// Queue pair handle as used for posting: the queue pair number itself.
pub type QpHandle = Qpn;

/// Sizes of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpCap {
    /// Send work requests outstanding.
    pub max_send_wr: u32,
    /// Receive work requests outstanding.
    pub max_recv_wr: u32,
    /// Scatter/gather entries of a send.
    pub max_send_sge: u32,
    /// Scatter/gather entries of a receive.
    pub max_recv_sge: u32,
    /// Bytes that may be posted inline.
    pub max_inline_data: u32,
}

impl Default for QpCap {
    fn default() -> Self {
        QpCap { max_send_wr: 128, max_recv_wr: 128, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 }
    }
}

/// What a queue pair is made with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpInitAttr {
    /// Type.
    pub qp_type: QpType,
    /// Protection domain.
    pub pd: PdId,
    /// Where completions of sends go.
    pub send_cq: CqId,
    /// Where completions of receives go.
    pub recv_cq: CqId,
    /// Sizes.
    pub cap: QpCap,
    /// Every send produces a completion.
    pub sq_sig_all: bool,
    /// Take receives from here and have no receive queue; same worker and protection domain.
    pub srq: Option<SrqId>,
}

/// Shared receive queue handle: worker in the high byte, index below. Made by [`crate::Device::create_srq`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct SrqId(pub u32);

/// What a shared receive queue is made with (`ibv_srq_init_attr`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SrqInitAttr {
    /// Protection domain.
    pub pd: PdId,
    /// Receives outstanding.
    pub max_wr: u32,
    /// Scatter/gather entries of a receive.
    pub max_sge: u32,
    /// One [`AsyncEvent::SrqLimitReached`] when fewer receives than this are left; 0 is disarmed.
    pub limit: u32,
}

/// Change of a shared receive queue (`ibv_modify_srq`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SrqModify {
    /// Arms the event for the next time that fewer receives than this are left; 0 disarms it.
    Limit(u32),
    /// Makes room for this many receives, never fewer than are posted.
    MaxWr(u32),
}

/// What [`crate::Device::query_srq`] tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SrqInfo {
    /// The queue.
    pub srq: SrqId,
    /// Protection domain.
    pub pd: PdId,
    /// Receives outstanding, at most.
    pub max_wr: u32,
    /// Scatter/gather entries of a receive.
    pub max_sge: u32,
    /// The limit; 0 when disarmed, as it is after its event.
    pub limit: u32,
    /// Receives posted and not taken by a message.
    pub posted: u32,
}

/// Completion channel handle. Made by [`crate::Device::create_comp_channel`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct ChannelId(pub u32);

/// Number of an address handle in its device; 0 where the device needs none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct AhId(pub u64);

/// Address handle (`ibv_ah`): a resolved path, made once by [`crate::Device::create_ah`] and used by any number of
/// posts. It carries what it stands for, so that the software device looks nothing up when a datagram is posted, and
/// what is posted keeps its own copy; hardware goes by `id`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ah {
    /// Its number.
    pub id: AhId,
    /// Protection domain: that of the queue pairs that may use it.
    pub pd: PdId,
    /// The path.
    pub av: AddressVector,
}

/// Full address vector of a path: every header field of it that is not worked out per packet. Resolved (MACs
/// included) before it is handed to a queue pair: no worker resolves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AddressVector {
    /// Our address.
    pub sgid: Gid,
    /// The peer's address. Same family as `sgid`.
    pub dgid: Gid,
    /// Our Ethernet address.
    pub smac: MacAddr,
    /// The next hop's Ethernet address.
    pub dmac: MacAddr,
    /// 802.1Q tag, if the path wants one.
    pub vlan: Option<VlanTag>,
    /// DSCP x 4 + ECN.
    pub traffic_class: u8,
    /// IPv6 flow label, 20 bits.
    pub flow_label: u32,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// Service level, 0 ..= 7.
    pub sl: u8,
    /// UDP source port, 0xc000 ..= 0xffff.
    pub udp_src: u16,
}

/// Traffic class of a queue pair: index into the appliance's table of classes; 0 is the default class.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub struct ClassId(pub u8);

/// Attributes of RESET -> INIT.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InitAttrs {
    /// Partition key.
    pub pkey: Pkey,
    /// Remote rights of the queue pair itself.
    pub access: Access,
    /// Queue key (UD).
    pub qkey: Qkey,
}

/// Attributes of INIT -> RTR. UC has no use for `max_dest_rd_atomic` and `min_rnr_timer`; UD uses the class, and
/// `path_mtu` as the longest datagram. What is not used is not looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RtrAttrs {
    /// Path.
    pub av: AddressVector,
    /// Class.
    pub class: ClassId,
    /// Payload bytes of a full packet.
    pub path_mtu: PathMtu,
    /// The peer's queue pair.
    pub dest_qpn: Qpn,
    /// First PSN that we expect.
    pub rq_psn: Psn,
    /// READs and atomics of the peer that we serve at once, 0 ..= 128.
    pub max_dest_rd_atomic: u8,
    /// RNR timer index that we ask for, 0 ..= 31. 0 is 655.36 ms; the field's usual choice is 12 (0.64 ms).
    pub min_rnr_timer: u8,
}

/// Attributes of RTR -> RTS. UC and UD use `sq_psn` only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RtsAttrs {
    /// First PSN that we send.
    pub sq_psn: Psn,
    /// ACK timeout: 4.096 us x 2^timeout, 0 ..= 31; 0 is infinite.
    pub timeout: u8,
    /// Transport retries, 0 ..= 7.
    pub retry_cnt: u8,
    /// RNR retries, 0 ..= 7; 7 is for ever.
    pub rnr_retry: u8,
    /// READs and atomics of ours outstanding at once, 0 ..= 128.
    pub max_rd_atomic: u8,
}

/// A transition, with the attributes that it needs: a required one can't be missing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QpModify {
    /// RESET -> INIT.
    ToInit(InitAttrs),
    /// INIT -> RTR.
    ToRtr(RtrAttrs),
    /// RTR -> RTS.
    ToRts(RtsAttrs),
    /// RTS -> SQD. When nothing that was started is unfinished, [`AsyncEvent::SqDrained`] says so (always:
    /// libibverbs asks for it by `en_sqd_async_notify`).
    ToSqd,
    /// SQD -> RTS.
    SqdToRts,
    /// SQE -> RTS (UC, UD).
    SqeToRts,
    /// Changes attributes, not the state: INIT, RTS and SQD each allow some (see [`QpChange`]).
    Change(QpChange),
    /// Any state but RESET -> ERR.
    ToErr,
    /// Any state -> RESET.
    ToReset,
}

/// Optional attributes that change while the state stays, as Linux has it; any other is refused by name. Whoever wants
/// one of them with a transition makes two calls.
///
/// | state | RC | UC | UD |
/// |---|---|---|---|
/// | INIT | `pkey` `access` | `pkey` `access` | `pkey` `qkey` |
/// | RTS | `access` `min_rnr_timer` | `access` | `qkey` |
/// | SQD | all but `qkey` | `pkey` `access` `av` | `pkey` `qkey` |
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QpChange {
    /// Partition key.
    pub pkey: Option<Pkey>,
    /// Remote rights of the queue pair itself.
    pub access: Option<Access>,
    /// Queue key.
    pub qkey: Option<Qkey>,
    /// Path.
    pub av: Option<AddressVector>,
    /// ACK timeout.
    pub timeout: Option<u8>,
    /// Transport retries.
    pub retry_cnt: Option<u8>,
    /// RNR retries.
    pub rnr_retry: Option<u8>,
    /// READs and atomics of ours outstanding at once.
    pub max_rd_atomic: Option<u8>,
    /// READs and atomics of the peer that we serve at once.
    pub max_dest_rd_atomic: Option<u8>,
    /// RNR timer index that we ask for.
    pub min_rnr_timer: Option<u8>,
}

/// What [`crate::Device::query_qp`] tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpInfo {
    /// The queue pair.
    pub qpn: Qpn,
    /// Type.
    pub qp_type: QpType,
    /// State.
    pub state: QpState,
    /// Protection domain.
    pub pd: PdId,
    /// Completion queues.
    pub send_cq: CqId,
    /// Completion queues.
    pub recv_cq: CqId,
    /// Sizes in force.
    pub cap: QpCap,
    /// Every send produces a completion.
    pub sq_sig_all: bool,
    /// Where its receives come from, if it has no queue of its own.
    pub srq: Option<SrqId>,
    /// Attributes of the last transitions, as far as made.
    pub init: Option<InitAttrs>,
    /// Attributes of the last transitions, as far as made.
    pub rtr: Option<RtrAttrs>,
    /// Attributes of the last transitions, as far as made.
    pub rts: Option<RtsAttrs>,
    /// Next PSN to send.
    pub sq_psn: Psn,
    /// Next PSN expected.
    pub rq_psn: Psn,
    /// Oldest PSN not acknowledged.
    pub una_psn: Psn,
    /// The worker that owns it.
    pub worker: u8,
}

/// Limits of a device (`ibv_query_device`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceAttr {
    /// EUI-64 of the node, stable over restarts.
    pub node_guid: u64,
    /// Workers.
    pub workers: u8,
    /// Queue pairs.
    pub max_qp: u32,
    /// Work requests of one queue.
    pub max_qp_wr: u32,
    /// Scatter/gather entries.
    pub max_sge: u32,
    /// Inline bytes.
    pub max_inline: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Entries of one.
    pub max_cqe: u32,
    /// Memory regions.
    pub max_mr: u32,
    /// Bytes of one.
    pub max_mr_size: u64,
    /// Protection domains.
    pub max_pd: u32,
    /// READs and atomics served at once by one queue pair.
    pub max_qp_rd_atom: u8,
    /// READs and atomics outstanding of one queue pair.
    pub max_qp_init_rd_atom: u8,
    /// Shared receive queues; 0 where there are none.
    pub max_srq: u32,
    /// Receives of one.
    pub max_srq_wr: u32,
    /// Scatter/gather entries of a receive of one.
    pub max_srq_sge: u32,
    /// Address handles; 0 where there are none.
    pub max_ah: u32,
    /// Memory windows (type 2); 0 where there are none.
    pub max_mw: u32,
    /// Multicast groups; 0 where there are none.
    pub max_mcast_grp: u32,
    /// Queue pairs of one group.
    pub max_mcast_qp_attach: u32,
}

/// State of a port (`ibv_query_port`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PortAttr {
    /// Link is up.
    pub active: bool,
    /// Largest path MTU of the device.
    pub max_mtu: PathMtu,
    /// Largest path MTU that the interface carries now.
    pub active_mtu: PathMtu,
    /// MTU of the interface in bytes.
    pub netdev_mtu: u32,
    /// Ethernet address.
    pub mac: MacAddr,
    /// Number of GIDs.
    pub gid_tbl_len: u32,
}

/// Event that needs no work request (`ibv_async_event`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AsyncEvent {
    /// A queue pair went to error because of a transport fault of its own.
    QpFatal(Qpn),
    /// A request was refused with NAK invalid request and the queue pair went to error.
    QpReqErr(Qpn),
    /// A request was refused with NAK remote access error and the queue pair went to error.
    QpAccessErr(Qpn),
    /// First packet arrived in RTR.
    CommEst(Qpn),
    /// The send queue is drained.
    SqDrained(Qpn),
    /// A completion queue overflowed.
    CqErr(CqId),
    /// The port came up.
    PortActive,
    /// The port went down.
    PortErr,
    /// An address came or went.
    GidChange,
    /// A shared receive queue is broken.
    SrqErr(SrqId),
    /// Fewer receives are left than the limit says; the limit is disarmed.
    SrqLimitReached(SrqId),
    /// A queue pair in error takes no more receives from its shared receive queue.
    QpLastWqeReached(Qpn),
    /// The device is gone.
    DeviceFatal,
}

//! Several queue pairs with what they share: protection domain, two completion queues, one registered block.

use std::sync::Arc;

use ferroce_mem::os::Block;
use ferroce_verbs::{Access, ChannelId, CqId, Device, MrKeys, PdId, QpCap, QpInitAttr, QpType, Qpn};

use super::{Plane, verbs};
use crate::fail::Outcome;

/// Made and destroyed together.
pub struct QpSet {
    /// Protection domain.
    pub pd: PdId,
    /// Completions of all sends.
    pub send_cq: CqId,
    /// Completions of all receives.
    pub recv_cq: CqId,
    /// The queue pairs, in order.
    pub qpns: Vec<Qpn>,
    /// Memory and its keys.
    pub memory: Arc<Block>,
    /// As above.
    pub keys: MrKeys,
    /// Where completion events arrive, if they were asked for.
    pub channel: Option<ChannelId>,
}

/// Sizes of a [`QpSet`].
#[derive(Clone, Copy, Debug)]
pub struct SetSizes {
    /// Type.
    pub qp_type: QpType,
    /// Queue pairs.
    pub qps: u32,
    /// Send work requests outstanding, per queue pair.
    pub sends: u32,
    /// Receives outstanding, per queue pair.
    pub receives: u32,
    /// Entries of the completion queues.
    pub send_cqe: u32,
    /// As above.
    pub recv_cqe: u32,
    /// Inline bytes.
    pub inline: u32,
    /// Memory.
    pub bytes: u64,
    /// With a completion channel.
    pub events: bool,
}

impl Plane {
    /// Makes queue pairs in RESET. What was made before a failure is freed with the data plane.
    pub fn make_set(&mut self, sizes: SetSizes) -> Outcome<QpSet> {
        let memory = self.block(sizes.bytes)?;
        let device = self.device();
        let pd = device.alloc_pd().map_err(verbs("protection domain"))?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let keys = device.reg_mr(pd, Arc::clone(&memory), access).map_err(verbs("memory"))?;
        let channel = match sizes.events {
            true => Some(device.create_comp_channel().map_err(verbs("completion channel"))?),
            false => None,
        };
        let make_cq = |cqe| match channel {
            Some(channel) => device.create_cq_on(0, cqe, channel),
            None => device.create_cq(0, cqe),
        };
        let send_cq = make_cq(sizes.send_cqe).map_err(verbs("completion queue of sends"))?;
        let recv_cq = make_cq(sizes.recv_cqe).map_err(verbs("completion queue of receives"))?;
        let cap = QpCap {
            max_send_wr: sizes.sends,
            max_recv_wr: sizes.receives,
            max_inline_data: sizes.inline,
            ..QpCap::default()
        };
        let attr =
            QpInitAttr { qp_type: sizes.qp_type, pd, send_cq, recv_cq, cap, sq_sig_all: false, srq: None };
        let qpns = (0..sizes.qps)
            .map(|_| device.create_qp(&attr).map_err(verbs("queue pair")))
            .collect::<Outcome<Vec<Qpn>>>()?;
        Ok(QpSet { pd, send_cq, recv_cq, qpns, memory, keys, channel })
    }

    /// Destroys them. Nobody waits for events of the set any more.
    pub fn destroy_set(&self, set: &QpSet) -> Outcome<()> {
        let device = self.device();
        for &qpn in &set.qpns {
            device.destroy_qp(qpn).map_err(verbs("queue pair"))?;
        }
        device.destroy_cq(set.send_cq).map_err(verbs("completion queue"))?;
        device.destroy_cq(set.recv_cq).map_err(verbs("completion queue"))?;
        if let Some(channel) = set.channel {
            device.destroy_comp_channel(channel).map_err(verbs("completion channel"))?;
        }
        device.dereg_mr(set.keys.lkey).map_err(verbs("memory"))?;
        device.dealloc_pd(set.pd).map_err(verbs("protection domain"))
    }
}

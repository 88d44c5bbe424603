//! Taking completions from one or two queues.

use ferroce_verbs::{CqId, Imm, Qpn, Queues, Rkey, Wc, WcFlags, WcOpcode, WcStatus};

use crate::fault::Fault;

/// Completions taken at a time.
pub(crate) const BATCH: usize = 32;

/// Marks the work request ids of receives: flags of a failed completion are not valid, its id is.
pub(crate) const RECV_MARK: u64 = 1 << 63;

/// A completion with nothing in it.
pub(crate) const NO_WC: Wc = Wc {
    wr_id: 0,
    status: WcStatus::Success,
    opcode: WcOpcode::Send,
    byte_len: 0,
    imm: Imm([0; 4]),
    invalidated: Rkey(0),
    qpn: Qpn::new(0),
    src_qpn: Qpn::new(0),
    flags: WcFlags::empty(),
    vendor_err: 0,
    is_recv: false,
    solicited: false,
};

/// The queues to poll: receives first, so that a receive is seen before the send that answers it; one queue once.
pub(crate) fn both(send_cq: CqId, recv_cq: CqId) -> impl Iterator<Item = CqId> {
    [Some(recv_cq), (send_cq != recv_cq).then_some(send_cq)].into_iter().flatten()
}

/// Polls `cq` once and returns what came.
pub(crate) fn poll<'b, Q: Queues>(queues: &mut Q, cq: CqId, batch: &'b mut [Wc]) -> Result<&'b [Wc], Fault> {
    let count = queues.poll_cq(cq, batch).map_err(Fault::Poll)?;
    Ok(batch.get(..count).unwrap_or(&*batch))
}

/// The fault of a failed completion; `None` if it succeeded.
pub(crate) fn fault_of(wc: &Wc) -> Option<Fault> {
    (wc.status != WcStatus::Success).then_some(Fault::Completion {
        status: wc.status,
        wr_id: wc.wr_id,
        vendor_err: wc.vendor_err,
    })
}

/// The more telling of two faults: a flush is only the echo of another one.
pub(crate) fn worse(first: Option<Fault>, second: Option<Fault>) -> Option<Fault> {
    match (first, second) {
        (Some(Fault::Completion { status: WcStatus::WrFlushErr, .. }), Some(other)) => Some(other),
        (Some(first), _) => Some(first),
        (None, second) => second,
    }
}

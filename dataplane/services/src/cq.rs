//! Taking completions from one or two queues.

use ferroce_verbs::{CqId, Queues, Wc, WcStatus};

use crate::fault::Fault;

/// Completions taken at a time.
pub(crate) const BATCH: usize = 32;

/// Marks the work request ids of receives: flags of a failed completion are not valid, its id is.
pub(crate) const RECV_MARK: u64 = 1 << 63;

/// The queues to poll: receives first, so that a receive is seen before the send that answers it; one queue once.
pub(crate) fn both(send_cq: CqId, recv_cq: CqId) -> impl Iterator<Item = CqId> {
    [Some(recv_cq), (send_cq != recv_cq).then_some(send_cq)].into_iter().flatten()
}

/// Takes what both queues have, once each, and hands it to `each` until something failed; returns how many came. The
/// rest is still looked at for the more telling fault.
pub(crate) fn drain<Q: Queues>(
    queues: &mut Q,
    (send_cq, recv_cq): (CqId, CqId),
    batch: &mut [Wc],
    mut each: impl FnMut(&Wc) -> Result<(), Fault>,
) -> Result<usize, Fault> {
    let (mut fault, mut work) = (None, 0);
    for cq in both(send_cq, recv_cq) {
        for wc in poll(queues, cq, batch)? {
            work += 1;
            fault = worse(fault, fault_of(wc));
            if fault.is_none() {
                each(wc)?;
            }
        }
    }
    fault.map_or(Ok(work), Err)
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

//! Attaching application threads: the control side of [`crate::app`].
//!
//! Owns no state; records are [`crate::control`]'s. Invariant: an attached queue has one handle. Called by control threads.

use ferroce_verbs::error::VerbsErrorKind;
use ferroce_verbs::{CqId, Device, QpInfo, Qpn, VerbsError};

use crate::app::{self, APP_INLINE, AppQueues};
use crate::check::refuse;
use crate::command::{Answer, Command};
use crate::core::MAX_APPS;
use crate::device::{SoftDevice, lock, not_found};

impl SoftDevice {
    /// Attaches an application's thread to queue pairs and to the completion queues that it will poll, all of one worker.
    /// Completions of an attached queue go to this handle alone. Dropping the handle detaches.
    pub fn attach(&self, qps: &[Qpn], cqs: &[CqId]) -> Result<AppQueues, VerbsError> {
        let mut infos = Vec::with_capacity(qps.len());
        for qpn in qps {
            infos.push(self.query_qp(*qpn)?);
        }
        let first =
            *cqs.first().ok_or_else(|| refuse(VerbsErrorKind::Invalid, "cqs", "none", "at least one", ""))?;
        let worker = self.cq_worker(first)?;
        for cq in cqs {
            let other = self.cq_worker(*cq)?;
            if other != worker {
                return Err(refuse(
                    VerbsErrorKind::Invalid,
                    "cqs",
                    format!(
                        "cq {:#010x} on worker {worker} and cq {:#010x} on worker {other}",
                        first.0, cq.0
                    ),
                    "all on one worker",
                    "attach one handle per worker",
                ));
            }
        }
        for info in &infos {
            for cq in [info.send_cq, info.recv_cq] {
                if !cqs.contains(&cq) {
                    let asked = format!("{:?} without its cq {:#010x}", info.qpn, cq.0);
                    return Err(refuse(
                        VerbsErrorKind::Invalid,
                        "cqs",
                        asked,
                        "both queues of each queue pair",
                        "",
                    ));
                }
            }
            if info.cap.max_inline_data as usize > APP_INLINE {
                let allowed = format!("0 to {APP_INLINE}");
                let hint = "create the queue pair with less";
                return Err(refuse(
                    VerbsErrorKind::Invalid,
                    "cap.max_inline_data",
                    info.cap.max_inline_data,
                    allowed,
                    hint,
                ));
            }
        }
        self.attach_checked(worker, &infos, cqs)
    }

    fn attach_checked(&self, worker: u8, infos: &[QpInfo], cqs: &[CqId]) -> Result<AppQueues, VerbsError> {
        let seat = self.shared.workers.get(worker as usize).ok_or_else(|| not_found("worker", worker))?;
        let id = lock(&self.shared.control).attach(worker, infos.iter().map(|info| info.qpn), cqs)?;
        let made = app::pair(self.clone(), (worker, seat.bell.clone()), id, infos, cqs);
        let (port, queues) = made.map_err(|e| {
            lock(&self.shared.control).detach(id);
            refuse(
                VerbsErrorKind::Exhausted,
                "eventfd",
                "one more",
                e,
                "raise the limit of open files (ulimit -n)",
            )
        })?;
        // From here on dropping `queues` undoes it all.
        match self.shared.ask(worker, Command::Attach(port))? {
            Answer::Done => Ok(queues),
            _ => Err(refuse(
                VerbsErrorKind::Exhausted,
                "attach",
                format!("one more on worker {worker}"),
                format!("at most {MAX_APPS}"),
                "drop a handle, or use another worker",
            )),
        }
    }

    /// Ends an attachment. A worker that hangs keeps serving its own side of the rings, which nobody reads any more.
    pub(crate) fn detach(&self, worker: u8, id: u32) {
        if self.shared.ask(worker, Command::Detach { id }).is_ok() {
            lock(&self.shared.control).detach(id);
        }
    }
}

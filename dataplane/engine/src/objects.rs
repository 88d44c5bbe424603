//! Address handles, memory windows, and the end of a registration: the control side of them.
//!
//! Owns no state of its own; the records are [`crate::control`]'s. Invariant: a window's key is chosen by the device's own
//! key table and taken over by one worker's, as a region's is by all of them, so no key is ever given out twice. Called
//! by [`crate::device`].

use ferroce_mem::{DeregisterError, Lkey};
use ferroce_verbs::error::VerbsErrorKind;
use ferroce_verbs::{AddressVector, Ah, AhId, PdId, Rkey, VerbsError};

use crate::check::{self, refuse};
use crate::command::{Answer, Command};
use crate::control::{Control, exhausted};
use crate::device::{SoftDevice, lock, not_found};

/// Address handles of a device.
pub(crate) const MAX_AH: u32 = 1 << 16;
/// Bits of a window's key that name the window.
const WINDOW_BITS: u32 = 8;

/// A window.
pub(crate) struct MwRecord {
    worker: u8,
    pd: PdId,
}

impl Control {
    fn new_ah(&mut self, pd: PdId) -> Result<AhId, VerbsError> {
        if self.ahs.len() >= MAX_AH as usize {
            return Err(exhausted("ah", MAX_AH));
        }
        self.use_pd(pd)?;
        self.next_ah += 1;
        self.ahs.insert(AhId(self.next_ah), pd);
        Ok(AhId(self.next_ah))
    }

    fn ah_gone(&mut self, ah: AhId) -> Result<(), VerbsError> {
        let pd = self.ahs.remove(&ah).ok_or_else(|| not_found("ah", ah.0))?;
        self.leave_pd(pd);
        Ok(())
    }

    fn new_window(&mut self, worker: u8, pd: PdId) -> Result<Rkey, VerbsError> {
        self.use_pd(pd)?;
        let Ok(window) = self.keys.alloc_window(pd) else {
            self.leave_pd(pd);
            return Err(exhausted("mw", self.keys.window_capacity()));
        };
        self.mws.insert(window.rkey.0 >> WINDOW_BITS, MwRecord { worker, pd });
        Ok(window.rkey)
    }

    fn window_gone(&mut self, rkey: Rkey) {
        if let Some(record) = self.mws.remove(&(rkey.0 >> WINDOW_BITS)) {
            self.leave_pd(record.pd);
            // The device's own table knows every window that it chose a key for.
            let _ = self.keys.dealloc_window(rkey);
        }
    }
}

impl SoftDevice {
    pub(crate) fn new_ah(&self, pd: PdId, av: &AddressVector) -> Result<Ah, VerbsError> {
        check::path(av, &self.shared.snapshot())?;
        let id = lock(&self.shared.control).new_ah(pd)?;
        Ok(Ah { id, pd, av: *av })
    }

    pub(crate) fn drop_ah(&self, ah: &Ah) -> Result<(), VerbsError> {
        lock(&self.shared.control).ah_gone(ah.id)
    }

    pub(crate) fn new_window(&self, worker: u8, pd: PdId) -> Result<Rkey, VerbsError> {
        self.worker_exists(worker)?;
        let mut control = lock(&self.shared.control);
        let rkey = control.new_window(worker, pd)?;
        let told = match self.shared.ask(worker, Command::AllocMw { rkey, pd }) {
            Ok(Answer::Done) => return Ok(rkey),
            Ok(_) => Err(not_found("worker", worker)),
            Err(why) => Err(why),
        };
        // A worker that hangs may still make it; then its key stays taken for good.
        if self.shared.ask(worker, Command::DeallocMw(rkey)).is_ok() {
            control.window_gone(rkey);
        }
        told
    }

    pub(crate) fn drop_window(&self, worker: u8, rkey: Rkey) -> Result<(), VerbsError> {
        let mut control = lock(&self.shared.control);
        let unknown = || not_found("rkey", format!("a window of {rkey:?} on worker {worker}"));
        let record = control.mws.get(&(rkey.0 >> WINDOW_BITS)).ok_or_else(unknown)?;
        if record.worker != worker {
            return Err(unknown());
        }
        self.shared.tell(worker, Command::DeallocMw(rkey), "rkey")?;
        control.window_gone(rkey);
        Ok(())
    }

    /// Ends a registration: first every worker agrees, then every worker forgets, so that one that is busy leaves the key
    /// as it was everywhere.
    pub(crate) fn drop_mr(&self, lkey: Lkey) -> Result<(), VerbsError> {
        let mut control = lock(&self.shared.control);
        control.mr(lkey)?;
        let workers = self.shared.workers.len() as u8;
        for worker in 0..workers {
            let refused = match self.shared.ask(worker, Command::CloseMr(lkey)) {
                // A worker that does not know the key is as good: the last attempt got so far.
                Ok(Answer::Done | Answer::NotFound) => continue,
                Ok(Answer::Busy(why)) => busy(worker, lkey, why),
                Ok(_) => not_found("worker", worker),
                Err(why) => why,
            };
            for closed in 0..=worker {
                // One that gives no answer keeps the region closed: the next attempt to deregister goes on from there.
                let _ = self.shared.ask(closed, Command::ReopenMr(lkey));
            }
            return Err(refused);
        }
        self.forget_mr(lkey, workers)?;
        control.deregistered(lkey);
        Ok(())
    }
}

fn busy(worker: u8, lkey: Lkey, why: DeregisterError) -> VerbsError {
    let (windows, posted) = match why {
        DeregisterError::Busy { windows, posted } => (windows, posted),
        DeregisterError::Unknown => (0, 0),
    };
    refuse(
        VerbsErrorKind::Busy,
        "lkey",
        format!("to deregister {lkey:?}"),
        format!(
            "when nothing uses it; worker {worker} has {windows} windows bound to it and {posted} entries of posted work \
             that name it"
        ),
        "invalidate the windows, and wait for the work or move its queue pair to error",
    )
}

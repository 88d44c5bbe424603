//! A window that its owner ends under the feet of WRITEs: from then on its key opens nothing.
//!
//! Owns what the targets of those WRITEs held at that moment. Called by [`super`] and [`crate::run`].

use ferroce_verbs::Rkey;

use super::{Bytes, Checker, OpKind, SendRecord, Violation, ViolationKind, broken};

/// The target of a WRITE whose key is gone.
pub(super) struct Sealed {
    wr_id: u64,
    endpoint: usize,
    offset: usize,
    bytes: Vec<u8>,
}

impl Checker {
    /// The owner of a window knows that its key is ended.
    pub fn key_gone(&mut self, bytes: &impl Bytes, rkey: Rkey) {
        self.gone = Some(rkey);
        for flow in 0..self.flows.len() {
            for record in self.flows[flow].sends.clone() {
                self.seal(bytes, flow, &record);
            }
        }
    }

    /// From now on nothing may reach the target of this request, if its key is gone.
    pub(super) fn seal(&mut self, bytes: &impl Bytes, flow: usize, record: &SendRecord) {
        if record.kind == OpKind::Write && self.gone.is_some() && record.window == self.gone {
            let endpoint = self.flows[flow].to.endpoint;
            let (wr_id, offset) = (record.wr_id, record.remote);
            let bytes = bytes.read(endpoint, offset, record.data.len());
            self.sealed.push(Sealed { wr_id, endpoint, offset, bytes });
        }
    }

    /// A WRITE is done. If its key is gone, it was in place by then.
    pub(super) fn unseal(&mut self, bytes: &impl Bytes, record: &SendRecord) -> Result<(), Violation> {
        let Some(place) = self.sealed.iter().position(|sealed| sealed.wr_id == record.wr_id) else {
            return Ok(());
        };
        let sealed = self.sealed.remove(place);
        sealed.check(bytes)
    }

    /// At the end.
    pub(super) fn finish_sealed(&mut self, bytes: &impl Bytes) -> Result<(), Violation> {
        self.sealed.iter().try_for_each(|sealed| sealed.check(bytes))
    }
}

impl Sealed {
    fn check(&self, bytes: &impl Bytes) -> Result<(), Violation> {
        let found = bytes.read(self.endpoint, self.offset, self.bytes.len());
        match (0..found.len()).find(|at| found[*at] != self.bytes[*at]) {
            Some(at) => broken(
                ViolationKind::KeyOutlived,
                format!(
                    "wr_id {}: byte {at} at offset {:#x} of endpoint {} was written through a key that was gone",
                    self.wr_id,
                    self.offset + at,
                    self.endpoint
                ),
            ),
            None => Ok(()),
        }
    }
}

//! [`ShmQueue`]: one worker's pair of rings, and the mailbox by which it gets new ones.
//!
//! Invariant: a queue owns its ends alone; the port hands new ones over by a mailbox of one place, and gets the old
//! ones back to unmap them. Called by a worker for each pass. Never waits.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crossbeam_queue::ArrayQueue;
use ferroce_mem::copy::Target;

use super::ring::{Consumer, Head, Producer, RingFault};
use super::sys::{self, Doorbell};
use crate::frame::{RxFrame, TxFrame};
use crate::port::PortQueue;

/// The rings of one queue towards one peer.
pub(crate) struct Ends {
    pub rx: Consumer,
    pub tx: Producer,
    /// By which the peer's worker is woken.
    pub ringer: OwnedFd,
}

/// Counters of a queue, written by its worker alone.
#[derive(Default, Debug)]
#[repr(align(128))]
pub(crate) struct Counters {
    pub rx_packets: AtomicU64,
    pub rx_bytes: AtomicU64,
    pub tx_packets: AtomicU64,
    pub tx_bytes: AtomicU64,
    /// Longer than the MTU allows, or committed with a wrong length.
    pub tx_errors: AtomicU64,
    /// Committed while no peer was attached.
    pub tx_no_peer: AtomicU64,
    /// Reservations that found no room.
    pub tx_full: AtomicU64,
    /// Doorbells rung.
    pub tx_wakeups: AtomicU64,
    /// Doorbells that could not be rung.
    pub tx_wakeup_errors: AtomicU64,
}

/// Adds without a locked instruction: there is one writer.
#[inline]
fn add(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
}

/// New ends, or none: the link is down.
struct Mail {
    /// Number of this mail.
    epoch: u32,
    ends: Option<Box<Ends>>,
}

/// What port and queue share.
pub(crate) struct Shared {
    /// Counts the mails; the queue looks at its mailbox when it changes. Hardly ever written, hence cached.
    epoch: AtomicU32,
    /// The newest mail: it replaces one that was not taken.
    mail: ArrayQueue<Mail>,
    /// Ends to be unmapped by the port.
    retired: ArrayQueue<Box<Ends>>,
    /// The fault that ended the ends of an epoch: `epoch << 8 | fault`, 0 for none.
    fault: AtomicU64,
    /// Readable when the worker should wake.
    pub doorbell: Doorbell,
    pub counters: Counters,
}

impl Shared {
    pub fn new() -> Result<Shared, rustix::io::Errno> {
        Ok(Shared {
            epoch: AtomicU32::new(0),
            mail: ArrayQueue::new(1),
            retired: ArrayQueue::new(4),
            fault: AtomicU64::new(0),
            doorbell: Doorbell::new()?,
            counters: Counters::default(),
        })
    }

    /// Gives the queue new ends, or none, and wakes it. Called by the port.
    pub fn deliver(&self, ends: Option<Box<Ends>>) {
        // The port is the only one that counts.
        let epoch = self.epoch.load(Ordering::Relaxed).wrapping_add(1);
        // What the worker never saw is dropped here.
        drop(self.mail.force_push(Mail { epoch, ends }));
        self.epoch.store(epoch, Ordering::Release);
        sys::ring(self.doorbell.ringer());
        self.reap();
    }

    /// Unmaps what the queue gave back. Called by the port.
    pub fn reap(&self) {
        while self.retired.pop().is_some() {}
    }

    /// The fault that the queue met with the ends it was last given.
    pub fn fault(&self) -> Option<u8> {
        let fault = self.fault.load(Ordering::Acquire);
        let current = u64::from(self.epoch.load(Ordering::Relaxed)) == fault >> 8;
        (current && fault & 0xff != 0).then_some(fault as u8)
    }
}

/// One worker's queue of a `shm` port.
pub struct ShmQueue {
    ends: Option<Box<Ends>>,
    epoch: u32,
    max_frame: usize,
    /// Met while reserving; acted on in the next flush.
    tx_fault: Option<RingFault>,
    /// Committed since the last flush.
    tx_packets: u64,
    tx_bytes: u64,
    can_sleep: bool,
    shared: Arc<Shared>,
    head: Head,
    /// Where frames go that nobody will get.
    scratch: Box<[u8]>,
    /// Bytes reserved in `scratch`.
    scratch_len: usize,
}

impl ShmQueue {
    pub(crate) fn new(shared: Arc<Shared>, max_frame: usize, can_sleep: bool) -> ShmQueue {
        ShmQueue {
            ends: None,
            epoch: 0,
            max_frame,
            tx_fault: None,
            tx_packets: 0,
            tx_bytes: 0,
            can_sleep,
            shared,
            head: Head::new(),
            scratch: vec![0; max_frame].into_boxed_slice(),
            scratch_len: 0,
        }
    }

    /// A mail is waiting. Cheap: the number lies in a cache line that hardly ever changes.
    #[inline]
    fn has_mail(&self) -> bool {
        self.shared.epoch.load(Ordering::Relaxed) != self.epoch
    }

    /// Takes new ends, or learns that there are none.
    #[cold]
    fn take_mail(&mut self) {
        self.epoch = self.shared.epoch.load(Ordering::Acquire);
        if let Some(mail) = self.shared.mail.pop() {
            self.retire();
            // A fault is reported with the number of the mail that brought the ends.
            (self.epoch, self.ends) = (mail.epoch, mail.ends);
        }
    }

    /// Lets go of the ends, and of what was committed to them.
    fn retire(&mut self) {
        add(&self.shared.counters.tx_no_peer, std::mem::take(&mut self.tx_packets));
        (self.tx_bytes, self.tx_fault) = (0, None);
        if let Some(ends) = self.ends.take() {
            // If housekeeping stands still, the oldest is unmapped here.
            drop(self.shared.retired.force_push(ends));
        }
    }

    /// The peer broke the rules: nothing more is done with its rings; the port closes the link.
    #[cold]
    fn fail(&mut self, fault: RingFault) {
        self.shared.fault.store(u64::from(self.epoch) << 8 | fault as u64, Ordering::Release);
        self.retire();
    }
}

impl PortQueue for ShmQueue {
    #[inline]
    fn rx_burst<F: FnMut(RxFrame<'_>)>(&mut self, max: usize, f: F) -> usize {
        if self.has_mail() {
            self.take_mail();
        }
        let Some(ends) = self.ends.as_deref_mut() else { return 0 };
        let burst = ends.rx.burst(max, &mut self.head, f);
        if burst.frames > 0 {
            add(&self.shared.counters.rx_packets, burst.frames as u64);
            add(&self.shared.counters.rx_bytes, burst.bytes);
        }
        if let Some(fault) = burst.fault {
            self.fail(fault);
        }
        burst.frames
    }

    #[inline]
    fn tx_reserve(&mut self, len: usize) -> Option<TxFrame<'_>> {
        if len == 0 || len > self.max_frame {
            add(&self.shared.counters.tx_errors, 1);
            return None;
        }
        if self.has_mail() {
            self.take_mail();
        }
        let Some(ends) = self.ends.as_deref_mut() else {
            self.scratch_len = len;
            return self.scratch.get_mut(..len).map(|room| TxFrame { buf: Target::from_slice(room) });
        };
        match ends.tx.reserve(len) {
            Ok(Some(buf)) => return Some(TxFrame { buf }),
            Ok(None) => add(&self.shared.counters.tx_full, 1),
            Err(fault) => self.tx_fault = Some(fault),
        }
        None
    }

    #[inline]
    fn tx_commit(&mut self, len: usize) {
        let Some(ends) = self.ends.as_deref_mut() else {
            // Reserved before the link went down, or while it was.
            let lost = 0 < len && len <= std::mem::take(&mut self.scratch_len);
            let counters = &self.shared.counters;
            add(if lost { &counters.tx_no_peer } else { &counters.tx_errors }, 1);
            return;
        };
        if ends.tx.commit(len) {
            self.tx_packets += 1;
            self.tx_bytes += len as u64;
        } else {
            add(&self.shared.counters.tx_errors, 1);
        }
    }

    #[inline]
    fn tx_flush(&mut self) {
        if let Some(fault) = self.tx_fault {
            self.fail(fault);
        }
        if self.tx_packets == 0 {
            return;
        }
        let counters = &self.shared.counters;
        if let Some(ends) = self.ends.as_deref_mut()
            && ends.tx.flush()
        {
            let rung = sys::ring(&ends.ringer);
            add(if rung { &counters.tx_wakeups } else { &counters.tx_wakeup_errors }, 1);
        }
        add(&counters.tx_packets, std::mem::take(&mut self.tx_packets));
        add(&counters.tx_bytes, std::mem::take(&mut self.tx_bytes));
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        if self.can_sleep { vec![self.shared.doorbell.listener()] } else { Vec::new() }
    }

    fn arm_wakeup(&mut self) -> bool {
        // A mail that comes after this look also rings the doorbell.
        if !self.can_sleep || self.shared.epoch.load(Ordering::Acquire) != self.epoch {
            return false;
        }
        self.ends.as_deref().is_none_or(|ends| ends.rx.arm())
    }

    fn disarm_wakeup(&mut self) {
        if let Some(ends) = self.ends.as_deref() {
            ends.rx.disarm();
        }
        self.shared.doorbell.quiet();
    }
}

//! Completion channels: how a thread outside the workers sleeps until a completion queue has news.
//!
//! Owns a [`Channel`]'s queue of news and its eventfd, and each completion queue's [`CqEvents`]. Invariant: the eventfd
//! counts exactly the events that were not taken, so that it is readable while there is one, for `poll` and `epoll` too;
//! a completion queue stands in the channel's queue once, however many of its events wait, so the queue never overflows.
//! The worker publishes in its stages (one system call for each event that somebody asked for by `req_notify`, none
//! otherwise); control threads take.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use ferroce_verbs::error::VerbsErrorKind;
use ferroce_verbs::{ChannelId, CqId, VerbsError};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::check::refuse;
use crate::control::Control;
use crate::device::{SoftDevice, lock, not_found};

/// Completion channels of a device.
pub(crate) const MAX_CHANNELS: usize = 1024;

/// Events of one completion queue: shared by its worker and its channel.
#[derive(Debug)]
pub(crate) struct CqEvents {
    id: CqId,
    channel: Arc<Channel>,
    /// Published and not taken.
    pending: AtomicU32,
    /// The completion queue is destroyed: what is pending is nobody's.
    gone: AtomicBool,
}

/// One completion channel.
#[derive(Debug)]
pub(crate) struct Channel {
    news: ArrayQueue<Arc<CqEvents>>,
    /// Counts down by one for each read.
    event: OwnedFd,
    /// Those who take do so one after the other. Never held while sleeping.
    taking: Mutex<()>,
}

impl CqEvents {
    /// Events of the queue `id` that go to `channel`.
    pub fn new(id: CqId, channel: Arc<Channel>) -> Arc<Self> {
        Arc::new(CqEvents { id, channel, pending: AtomicU32::new(0), gone: AtomicBool::new(false) })
    }

    /// Adds one event. The worker only.
    pub fn publish(self: &Arc<Self>) {
        if self.pending.fetch_add(1, Ordering::AcqRel) == 0 {
            // There are as many places as a device has completion queues.
            let _ = self.channel.news.push(self.clone());
        }
        // The counter of a semaphore of 2^64 does not fill up.
        let _ = rustix::io::write(&self.channel.event, &1u64.to_ne_bytes());
    }

    /// The queue is destroyed: its events are not given out any more.
    pub fn retire(&self) {
        self.gone.store(true, Ordering::Release);
    }
}

impl Channel {
    fn new(max_cq: u32) -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK | EventfdFlags::SEMAPHORE;
        let event = eventfd(0, flags)?;
        Ok(Channel { news: ArrayQueue::new(max_cq.max(1) as usize), event, taking: Mutex::new(()) })
    }

    /// Takes one event without waiting. `Some(None)`: there was one, of a queue that is gone.
    fn take(&self) -> Option<Option<CqId>> {
        let _taking = lock(&self.taking);
        let mut one = [0u8; 8];
        rustix::io::read(&self.event, &mut one).ok()?;
        let Some(events) = self.news.pop() else { return Some(None) };
        if events.pending.fetch_sub(1, Ordering::AcqRel) > 1 {
            let _ = self.news.push(events.clone());
        }
        Some((!events.gone.load(Ordering::Acquire)).then_some(events.id))
    }

    /// Takes one event, waiting at most `timeout`.
    fn wait(&self, timeout: Duration) -> Option<CqId> {
        let until = Instant::now() + timeout;
        loop {
            match self.take() {
                Some(Some(cq)) => return Some(cq),
                Some(None) => continue,
                None => {}
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let left = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            };
            // An interrupted sleep is a short one: the loop looks again.
            let _ = poll(&mut [PollFd::new(&self.event, PollFlags::IN)], Some(&left));
        }
    }
}

/// A channel and the number of completion queues that use it.
struct ChannelRecord {
    channel: Arc<Channel>,
    users: u32,
}

/// A device's channels.
#[derive(Default)]
pub(crate) struct Channels {
    all: HashMap<ChannelId, ChannelRecord>,
    next: u32,
}

impl Channels {
    fn get(&mut self, channel: ChannelId) -> Result<&mut ChannelRecord, VerbsError> {
        self.all.get_mut(&channel).ok_or_else(|| not_found("comp_channel", channel.0))
    }

    /// One more completion queue uses `channel`.
    pub fn join(&mut self, channel: ChannelId, cq: CqId) -> Result<Arc<CqEvents>, VerbsError> {
        let record = self.get(channel)?;
        record.users += 1;
        Ok(CqEvents::new(cq, record.channel.clone()))
    }

    /// One fewer does.
    pub fn leave(&mut self, channel: ChannelId) {
        if let Some(record) = self.all.get_mut(&channel) {
            record.users = record.users.saturating_sub(1);
        }
    }
}

impl Control {
    fn channel(&mut self, channel: ChannelId) -> Result<Arc<Channel>, VerbsError> {
        self.channels.get(channel).map(|record| record.channel.clone())
    }
}

impl SoftDevice {
    pub(crate) fn new_channel(&self) -> Result<ChannelId, VerbsError> {
        let max_cq = self.shared.limits.max_cq;
        let channels = &mut lock(&self.shared.control).channels;
        if channels.all.len() >= MAX_CHANNELS {
            let hint = "destroy one that is not needed";
            let allowed = format!("at most {MAX_CHANNELS}");
            return Err(refuse(VerbsErrorKind::Exhausted, "comp_channel", "one more", allowed, hint));
        }
        let channel = Channel::new(max_cq).map_err(|e| {
            let hint = "raise the limit of open files (ulimit -n)";
            refuse(VerbsErrorKind::Exhausted, "eventfd", "one more", e, hint)
        })?;
        channels.next = channels.next.wrapping_add(1);
        while channels.all.contains_key(&ChannelId(channels.next)) {
            channels.next = channels.next.wrapping_add(1);
        }
        let id = ChannelId(channels.next);
        channels.all.insert(id, ChannelRecord { channel: Arc::new(channel), users: 0 });
        Ok(id)
    }

    pub(crate) fn drop_channel(&self, channel: ChannelId) -> Result<(), VerbsError> {
        let channels = &mut lock(&self.shared.control).channels;
        let users = channels.get(channel)?.users;
        if users != 0 {
            return Err(refuse(
                VerbsErrorKind::Busy,
                "comp_channel",
                format!("to destroy channel {}", channel.0),
                format!("when no completion queue uses it; {users} do"),
                "destroy those first",
            ));
        }
        channels.all.remove(&channel);
        Ok(())
    }

    pub(crate) fn wait_channel(
        &self,
        channel: ChannelId,
        timeout: Duration,
    ) -> Result<Option<CqId>, VerbsError> {
        let events = lock(&self.shared.control).channel(channel)?;
        // Records are not locked while waiting.
        let Some(cq) = events.wait(timeout) else { return Ok(None) };
        if let Some(record) = lock(&self.shared.control).cqs.get_mut(&cq) {
            record.unacked += 1;
        }
        Ok(Some(cq))
    }

    pub(crate) fn ack_events(&self, cq: CqId, events: u32) -> Result<(), VerbsError> {
        let mut control = lock(&self.shared.control);
        control.cq(cq)?;
        let Some(record) = control.cqs.get_mut(&cq) else { return Ok(()) };
        let Some(left) = record.unacked.checked_sub(events) else {
            let allowed = format!("at most {}, as many as were taken", record.unacked);
            return Err(refuse(VerbsErrorKind::Invalid, "nevents", events, allowed, ""));
        };
        record.unacked = left;
        Ok(())
    }

    /// A descriptor of one's own that is readable while a channel has an event that
    /// [`ferroce_verbs::Device::get_cq_event`] would give: for `poll` and `epoll` beside others. Reading it takes events
    /// away: leave that to `get_cq_event`.
    ///
    /// # Errors
    /// No such channel, or no descriptor left.
    pub fn comp_channel_fd(&self, channel: ChannelId) -> Result<OwnedFd, VerbsError> {
        let channel = lock(&self.shared.control).channel(channel)?;
        channel.event.try_clone().map_err(|e| {
            let hint = "raise the limit of open files (ulimit -n)";
            refuse(VerbsErrorKind::Exhausted, "comp_channel", "a descriptor", e, hint)
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_event_is_taken_once_and_the_descriptor_tells() {
        let channel = Arc::new(Channel::new(4).expect("an eventfd"));
        let readable = || {
            let mut polled = [PollFd::new(&channel.event, PollFlags::IN)];
            poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).expect("our own descriptor") == 1
        };
        let (a, b) = (CqEvents::new(CqId(1), channel.clone()), CqEvents::new(CqId(2), channel.clone()));
        assert!(!readable());
        for events in [&a, &a, &b, &a] {
            events.publish();
        }
        assert!(readable());
        let mut got: Vec<u32> = std::iter::from_fn(|| channel.wait(Duration::ZERO)).map(|cq| cq.0).collect();
        got.sort_unstable();
        assert_eq!(got, [1, 1, 1, 2]);
        assert!(!readable());
        b.publish();
        b.retire();
        a.publish();
        assert_eq!(channel.wait(Duration::from_secs(20)), Some(CqId(1)), "b's event is nobody's");
        assert_eq!(channel.wait(Duration::ZERO), None);
    }

    #[test]
    fn takers_and_a_publisher_lose_nothing() {
        const EACH: usize = 2000;
        let channel = Arc::new(Channel::new(2).expect("an eventfd"));
        let events = [1, 2].map(|id| CqEvents::new(CqId(id), channel.clone()));
        let takers: Vec<_> = (0..2)
            .map(|_| {
                let channel = channel.clone();
                std::thread::spawn(move || {
                    let mut taken = [0usize; 3];
                    // An event of queue 0 ends a taker.
                    loop {
                        match channel.wait(Duration::from_secs(20)).expect("an event").0 {
                            0 => return taken,
                            id => taken[id as usize] += 1,
                        }
                    }
                })
            })
            .collect();
        for _ in 0..EACH {
            events.iter().for_each(CqEvents::publish);
        }
        // The ends wait behind nothing: the queue has two places, so they come when the takers are through.
        let until = Instant::now() + Duration::from_secs(20);
        while events.iter().any(|e| e.pending.load(Ordering::Acquire) != 0) {
            assert!(Instant::now() < until, "not all were taken");
            std::thread::sleep(Duration::from_millis(1));
        }
        let end = CqEvents::new(CqId(0), channel.clone());
        end.publish();
        end.publish();
        let taken = takers.into_iter().map(|t| t.join().expect("no panic"));
        let sums = taken.fold([0; 3], |sum, t| [0, sum[1] + t[1], sum[2] + t[2]]);
        assert_eq!(sums, [0, EACH, EACH]);
    }
}

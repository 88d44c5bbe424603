//! Completion events (`-e`): a thread that sleeps on the completion channel and tells the service of each event.
//!
//! It owns nothing but its stop flag; the channel belongs to the queue pairs' set. Ends with its [`Watcher`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use ferroce_engine::SoftDevice;
use ferroce_services::PerfHandle;
use ferroce_verbs::{ChannelId, Device};

use crate::fail::{Fail, Outcome};

/// How long one sleep lasts at most; bounds how long the end takes.
const SLEEP: Duration = Duration::from_millis(50);

/// The thread.
pub struct Watcher {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Starts it.
    pub fn start(device: SoftDevice, channel: ChannelId, handle: PerfHandle) -> Outcome<Watcher> {
        let stop = Arc::new(AtomicBool::new(false));
        let asked = stop.clone();
        let watch = move || {
            while !asked.load(Ordering::Relaxed) {
                match device.get_cq_event(channel, SLEEP) {
                    Ok(Some(cq)) => {
                        // A queue that is gone has nothing to acknowledge.
                        let _ = device.ack_cq_events(cq, 1);
                        handle.notify();
                    }
                    Ok(None) => {}
                    // The channel is gone: so is the test.
                    Err(_) => return,
                }
            }
        };
        let thread = std::thread::Builder::new().name("ferroce/events".into()).spawn(watch);
        let thread = thread.map_err(|e| Fail::failed(format!("thread for events: {e}")))?;
        Ok(Watcher { stop, thread: Some(thread) })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It does not panic, and if it did, the test has its result already.
            let _ = thread.join();
        }
    }
}

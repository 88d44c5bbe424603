//! What a service and its host share: progress, a stop flag and the outcome.
//!
//! The worker's side stores two relaxed words and, once, the outcome; it never waits for a reader.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::fault::ServiceError;

struct Shared<R> {
    done: AtomicU64,
    ready: AtomicBool,
    stop: AtomicBool,
    events: AtomicU64,
    outcome: OnceLock<Result<R, ServiceError>>,
}

/// State of a service as its host sees it.
#[derive(Debug)]
pub enum State<'h, R> {
    /// Still at work.
    Running {
        /// Messages done so far, warm-up included.
        done: u64,
    },
    /// Ended as asked.
    Done(&'h R),
    /// Gave up.
    Failed(&'h ServiceError),
}

impl<R> State<'_, R> {
    /// True while the service is at work.
    #[must_use]
    pub fn is_running(&self) -> bool {
        matches!(self, State::Running { .. })
    }
}

/// The host's side. Cheap to clone; any thread may hold one.
pub struct Handle<R>(Arc<Shared<R>>);

impl<R> Clone for Handle<R> {
    fn clone(&self) -> Self {
        Handle(Arc::clone(&self.0))
    }
}

impl<R> Handle<R> {
    /// How the service stands.
    #[must_use]
    pub fn state(&self) -> State<'_, R> {
        match self.0.outcome.get() {
            None => State::Running { done: self.0.done.load(Ordering::Relaxed) },
            Some(Ok(report)) => State::Done(report),
            Some(Err(error)) => State::Failed(error),
        }
    }

    /// Whether the service has posted its first receives: from then on nothing that the peer sends is lost for want of
    /// one. Only the exchange says so, for the transports that repeat nothing.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.0.ready.load(Ordering::Acquire)
    }

    /// Tells a service that polls by events that a completion queue of its had one. The host gets it from the queues'
    /// channel (`get_cq_event`), acknowledges it, calls this, and wakes the worker if that may sleep.
    pub fn notify(&self) {
        self.0.events.fetch_add(1, Ordering::Release);
    }

    /// Asks the service to end at its next poll, with what it has done so far. What it still has in flight stays
    /// with the queue pair.
    pub fn stop(&self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

/// The worker's side.
pub(crate) struct Progress<R>(Arc<Shared<R>>);

impl<R> Progress<R> {
    pub(crate) fn new() -> (Self, Handle<R>) {
        let shared = Arc::new(Shared {
            done: AtomicU64::new(0),
            ready: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            events: AtomicU64::new(0),
            outcome: OnceLock::new(),
        });
        (Progress(Arc::clone(&shared)), Handle(shared))
    }
    pub(crate) fn set_done(&self, done: u64) {
        self.0.done.store(done, Ordering::Relaxed);
    }
    pub(crate) fn set_ready(&self) {
        self.0.ready.store(true, Ordering::Release);
    }
    /// Events told so far.
    pub(crate) fn events(&self) -> u64 {
        self.0.events.load(Ordering::Acquire)
    }
    pub(crate) fn stop_asked(&self) -> bool {
        self.0.stop.load(Ordering::Relaxed)
    }
    pub(crate) fn finish(&self, outcome: Result<R, ServiceError>) {
        // The worker is the only writer, so this neither waits nor fails; a second outcome is ignored.
        let _ = self.0.outcome.set(outcome);
    }
    pub(crate) fn finished(&self) -> bool {
        self.0.outcome.get().is_some()
    }
}

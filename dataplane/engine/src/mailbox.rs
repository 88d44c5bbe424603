//! Control to worker: bounded queues of commands, each with a reply slot and a deadline.
//!
//! Owns the hand-over. Invariant: a command is carried out at most once, and either its caller sees the answer or, after
//! [`DEADLINE`], it is withdrawn and never carried out; only one that the worker has already begun can do neither, and
//! then the caller is told that the worker hangs. The unsafe calls register memory: its block is held by the device's
//! record until every worker has answered the deregistration, and workers hold the device. Called by control threads
//! ([`Mailbox::call`]) and, in its mailbox stage, by the worker ([`Mailbox::take`]), which never waits here.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use ferroce_mem::memory::RegisterError;
use ferroce_mem::os::Block;
use ferroce_mem::{Memory, MrInfo, MrInit};

use crate::idle::Doorbell;

/// How long control waits for a worker.
pub const DEADLINE: Duration = Duration::from_secs(2);
/// Commands that may wait for one worker.
const DEPTH: usize = 64;

const PENDING: u8 = 0;
const TAKEN: u8 = 1;
const WITHDRAWN: u8 = 2;
const DONE: u8 = 3;

/// A registration on its way to a worker's key table.
#[derive(Clone)]
pub(crate) struct Registration {
    /// Keys and range, chosen by the device's own table.
    pub info: MrInfo,
    /// The memory.
    pub block: Arc<Block>,
}

impl Registration {
    /// Lets the device's own table choose the keys of `block`.
    pub fn choose(keys: &mut Memory, init: MrInit, block: &Arc<Block>) -> Result<MrInfo, RegisterError> {
        if init.base != block.base() || init.len > block.len() as u64 {
            return Err(RegisterError::BadRange);
        }
        // SAFETY: the range is the block's own (checked above). The device's record, made beside this call under the same
        // lock, holds the block for as long as the table holds the key.
        unsafe { keys.register(init) }
    }

    /// Enters it into `memory`.
    pub fn apply(&self, memory: &mut Memory) -> Result<(), RegisterError> {
        if self.info.len > self.block.len() as u64 {
            return Err(RegisterError::BadRange);
        }
        // SAFETY: the block maps at least `info.len` bytes (checked above). The device's record holds an `Arc` of it from
        // before this call until all workers have answered the deregistration of `info.lkey`; the worker that owns
        // `memory` holds an `Arc` of the device, hence of the record.
        unsafe { memory.replicate(&self.info, self.block.base()) }
    }
}

/// Where the answer to one command goes.
pub(crate) struct Reply<A> {
    state: AtomicU8,
    answer: ArrayQueue<A>,
    waiter: Thread,
}

impl<A> Reply<A> {
    fn new() -> Arc<Self> {
        Arc::new(Reply {
            state: AtomicU8::new(PENDING),
            answer: ArrayQueue::new(1),
            waiter: std::thread::current(),
        })
    }

    /// The worker begins; false if the caller has withdrawn the command.
    fn begin(&self) -> bool {
        self.state.compare_exchange(PENDING, TAKEN, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The worker is done.
    pub fn answer(&self, answer: A) {
        // The slot is empty: a command is taken once.
        let _ = self.answer.push(answer);
        self.state.store(DONE, Ordering::Release);
        self.waiter.unpark();
    }
}

struct Envelope<C, A> {
    command: C,
    reply: Arc<Reply<A>>,
}

/// Why a command got no answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CallError {
    /// The queue of commands is full and stayed so, or the worker did not take the command: withdrawn.
    Withdrawn,
    /// The worker took the command and did not finish it.
    Hung,
    /// The worker has stopped.
    Gone,
}

/// Commands for one worker.
pub(crate) struct Mailbox<C, A> {
    queue: ArrayQueue<Envelope<C, A>>,
    closed: AtomicBool,
}

impl<C, A> Mailbox<C, A> {
    pub fn new() -> Self {
        Mailbox { queue: ArrayQueue::new(DEPTH), closed: AtomicBool::new(false) }
    }

    /// True if a command waits. The worker's look before it sleeps.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The worker takes its next command; those withdrawn meanwhile are skipped.
    #[inline]
    pub fn take(&self) -> Option<(C, Arc<Reply<A>>)> {
        while let Some(Envelope { command, reply }) = self.queue.pop() {
            if reply.begin() {
                return Some((command, reply));
            }
        }
        None
    }

    /// The worker stops: callers are told at once.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        while let Some(Envelope { reply, .. }) = self.queue.pop() {
            reply.waiter.unpark();
        }
    }

    fn send(&self, bell: &Doorbell, command: C, until: Instant) -> Result<Arc<Reply<A>>, CallError> {
        let reply = Reply::new();
        let mut envelope = Envelope { command, reply: reply.clone() };
        loop {
            if self.closed.load(Ordering::Acquire) {
                return Err(CallError::Gone);
            }
            match self.queue.push(envelope) {
                Ok(()) => break,
                Err(back) if Instant::now() < until => envelope = back,
                Err(_) => return Err(CallError::Withdrawn),
            }
            bell.ring();
            std::thread::park_timeout(Duration::from_millis(1));
        }
        bell.ring();
        Ok(reply)
    }

    /// Gives the worker a command and waits for the answer, at most twice `deadline`.
    pub fn call(&self, bell: &Doorbell, command: C, deadline: Duration) -> Result<A, CallError> {
        let mut until = Instant::now() + deadline;
        let reply = self.send(bell, command, until)?;
        let mut begun = false;
        loop {
            match reply.state.load(Ordering::Acquire) {
                DONE => return reply.answer.pop().ok_or(CallError::Hung),
                _ if self.closed.load(Ordering::Acquire) => {
                    // The worker may have answered between the two looks.
                    return reply.answer.pop().ok_or(CallError::Gone);
                }
                _ => {}
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let withdraw =
                    reply.state.compare_exchange(PENDING, WITHDRAWN, Ordering::AcqRel, Ordering::Acquire);
                match withdraw {
                    Ok(_) => return Err(CallError::Withdrawn),
                    Err(TAKEN) if begun => return Err(CallError::Hung),
                    Err(_) => {
                        // Begun in the last moment: it gets a deadline of its own.
                        begun = true;
                        until = Instant::now() + deadline;
                    }
                }
                continue;
            }
            std::thread::park_timeout(left.min(Duration::from_millis(50)));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    type Box2 = Mailbox<u32, u32>;

    fn bell() -> Arc<Doorbell> {
        Arc::new(Doorbell::new().expect("an eventfd"))
    }

    #[test]
    fn a_command_is_answered_once() {
        let (mailbox, bell) = (Arc::new(Box2::new()), bell());
        let worker = {
            let mailbox = mailbox.clone();
            std::thread::spawn(move || {
                let mut done = 0;
                while done < 100 {
                    if let Some((command, reply)) = mailbox.take() {
                        reply.answer(command * 2);
                        done += 1;
                    }
                    std::thread::yield_now();
                }
            })
        };
        for i in 0..100 {
            assert_eq!(mailbox.call(&bell, i, Duration::from_secs(20)), Ok(i * 2));
        }
        worker.join().expect("no panic");
    }

    #[test]
    fn a_command_that_nobody_takes_is_withdrawn_for_good() {
        let (mailbox, bell) = (Box2::new(), bell());
        assert_eq!(mailbox.call(&bell, 1, Duration::from_millis(5)), Err(CallError::Withdrawn));
        assert!(mailbox.take().is_none(), "it must not be carried out later");
    }

    #[test]
    fn a_worker_that_hangs_in_a_command_is_named_and_one_that_stopped_is_gone() {
        let (mailbox, bell) = (Arc::new(Box2::new()), bell());
        let taker = {
            let mailbox = mailbox.clone();
            std::thread::spawn(move || {
                let taken = loop {
                    if let Some(taken) = mailbox.take() {
                        break taken;
                    }
                    std::thread::yield_now();
                };
                std::thread::park_timeout(Duration::from_secs(60));
                drop(taken);
            })
        };
        assert_eq!(mailbox.call(&bell, 1, Duration::from_millis(200)), Err(CallError::Hung));
        taker.thread().unpark();
        taker.join().expect("no panic");
        mailbox.close();
        assert_eq!(mailbox.call(&bell, 1, Duration::from_secs(20)), Err(CallError::Gone));
    }

    #[test]
    fn a_full_mailbox_is_waited_for_until_the_deadline() {
        let (mailbox, bell) = (Box2::new(), bell());
        for i in 0..DEPTH as u32 {
            mailbox.send(&bell, i, Instant::now()).expect("room");
        }
        assert_eq!(mailbox.call(&bell, 99, Duration::from_millis(5)), Err(CallError::Withdrawn));
        assert_eq!(mailbox.take().map(|(c, _)| c), Some(0));
    }
}

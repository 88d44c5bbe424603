//! Services on a worker: a fixed set of places, polled in every pass.
//!
//! Owns the services of one worker. Invariant: a service that is finished or removed goes back to control and is dropped
//! there, never on the worker. Called by the worker's mailbox and services stages.

use std::sync::Arc;

use ferroce_verbs::Service;

use crate::core::WorkerCore;
use crate::mailbox::Mailbox;

/// Services of one worker.
pub const MAX_SERVICES: usize = 64;

/// Handle of a service: worker in the high byte, a serial number below.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct ServiceId(pub u32);

impl ServiceId {
    /// The worker it lives on.
    pub const fn worker(self) -> u8 {
        (self.0 >> 24) as u8
    }
}

/// What control asks.
pub(crate) enum ServiceCommand<S> {
    Add(ServiceId, S),
    Remove(ServiceId),
}

/// What the worker answers.
pub(crate) enum ServiceAnswer<S> {
    Added,
    /// No place; the service comes back.
    Full(S),
    Removed(S),
    NotFound,
}

pub(crate) type ServiceBox<S> = Mailbox<ServiceCommand<S>, ServiceAnswer<S>>;

/// The services of one worker.
pub(crate) struct ServiceSet<S> {
    places: Vec<(ServiceId, S)>,
    mailbox: Arc<ServiceBox<S>>,
}

impl<S: Service<WorkerCore>> ServiceSet<S> {
    pub fn new(mailbox: Arc<ServiceBox<S>>) -> Self {
        ServiceSet { places: Vec::with_capacity(MAX_SERVICES), mailbox }
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    pub fn command_waits(&self) -> bool {
        !self.mailbox.is_empty()
    }

    /// Carries out at most `budget` commands.
    #[inline]
    pub fn commands(&mut self, core: &mut WorkerCore, budget: usize) -> usize {
        let mut done = 0;
        while done < budget {
            let Some((command, reply)) = self.mailbox.take() else { break };
            core.block.add(crate::stats::Counter::Commands, 1);
            reply.answer(match command {
                ServiceCommand::Add(_, service) if self.places.len() == MAX_SERVICES => {
                    ServiceAnswer::Full(service)
                }
                ServiceCommand::Add(id, service) => {
                    self.places.push((id, service));
                    ServiceAnswer::Added
                }
                ServiceCommand::Remove(id) => match self.places.iter().position(|(at, _)| *at == id) {
                    Some(at) => ServiceAnswer::Removed(self.places.swap_remove(at).1),
                    None => ServiceAnswer::NotFound,
                },
            });
            done += 1;
        }
        done
    }

    /// Polls every service that has not finished. A finished one keeps its place, and its results, until control removes
    /// it.
    #[inline]
    pub fn poll(&mut self, core: &mut WorkerCore) -> usize {
        let now_ns = core.now.0;
        let mut work = 0;
        for (_, service) in &mut self.places {
            if !service.finished() {
                work += service.poll(core, now_ns);
            }
        }
        work
    }
}

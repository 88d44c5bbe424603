//! Services on verbs: what lives on a worker and uses queue pairs.
//!
//! Owns the state of each service and nothing below it: queue pairs, completion queues and registered memory are made
//! by the host (a tool or the daemon) and lent by number and by [`ferroce_mem::os::Block`]. Invariant: after
//! construction a service allocates nothing, takes no lock and makes no system call until it has finished; every
//! service ends by itself, by [`Handle::stop`] or by its progress deadline. Called by a worker once per pass through
//! [`ferroce_verbs::Service`]; watched from any thread through a [`Handle`]. Never names an implementation of verbs:
//! everything here is generic over [`ferroce_verbs::Queues`].
#![forbid(unsafe_code)]

pub mod clock;
pub mod fault;
pub mod handle;
pub mod latency;
pub mod pattern;
pub mod perf;
pub mod pingpong;
pub mod rate;

mod area;
mod cq;

pub use fault::{Fault, ServiceError};
pub use handle::{Handle, State};
pub use latency::{LatencyRecorder, LatencySummary};
pub use perf::{
    PerfEndpoints, PerfError, PerfHandle, PerfLayout, PerfMemory, PerfMode, PerfOp, PerfQp, PerfRate,
    PerfReport, PerfService, PerfSpec, PerfState, PerfTotals, Role, SpecError,
};
pub use pingpong::{PingPongEndpoints, PingPongHandle, PingPongReport, PingPongService, PingPongSpec};
pub use pingpong::{SharedEndpoints, SharedPingPongService};

use ferroce_verbs::{Queues, Service};

/// Every service in one type, so that a worker holds them without `dyn`.
pub enum AnyService {
    /// Latency and bandwidth in perftest's sense.
    Perf(Box<PerfService>),
    /// The exchange of `ibv_rc_pingpong`.
    PingPong(Box<PingPongService>),
    /// The exchange of `ibv_srq_pingpong`.
    SharedPingPong(Box<SharedPingPongService>),
}

impl From<PerfService> for AnyService {
    fn from(service: PerfService) -> Self {
        AnyService::Perf(Box::new(service))
    }
}

impl From<PingPongService> for AnyService {
    fn from(service: PingPongService) -> Self {
        AnyService::PingPong(Box::new(service))
    }
}

impl From<SharedPingPongService> for AnyService {
    fn from(service: SharedPingPongService) -> Self {
        AnyService::SharedPingPong(Box::new(service))
    }
}

impl<Q: Queues> Service<Q> for AnyService {
    fn poll(&mut self, queues: &mut Q, now_ns: u64) -> usize {
        match self {
            AnyService::Perf(service) => service.poll(queues, now_ns),
            AnyService::PingPong(service) => service.poll(queues, now_ns),
            AnyService::SharedPingPong(service) => service.poll(queues, now_ns),
        }
    }

    fn finished(&self) -> bool {
        match self {
            AnyService::Perf(service) => <PerfService as Service<Q>>::finished(service),
            AnyService::PingPong(service) => <PingPongService as Service<Q>>::finished(service),
            AnyService::SharedPingPong(service) => <SharedPingPongService as Service<Q>>::finished(service),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_send<T: Send>() {}
    fn is_shared<T: Send + Sync>() {}

    #[test]
    fn services_move_to_a_worker_and_handles_anywhere() {
        is_send::<AnyService>();
        is_shared::<PerfHandle>();
        is_shared::<PingPongHandle>();
    }
}

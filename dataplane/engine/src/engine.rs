//! [`Engine`]: starts the workers, hands out the device, stops the workers.
//!
//! Owns the worker threads. Invariant: every thread it started has ended when [`Engine::stop`] answers `Ok`, and a thread
//! that does not end is named. Called by the daemon and by tools. Never opens a port: it is given queues.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;
use ferroce_nic::PortQueue;
use ferroce_verbs::{Gid, Qpn, Service, VerbsError, error::VerbsErrorKind};
use ferroce_wire::{Bth, Eth, Ext, Headers, Ip, MacAddr, Opcode, Packet, Psn};

use crate::check::refuse;
use crate::clock::Clock;
use crate::command::CommandBox;
use crate::config::{EngineConfig, EngineError, NetdevInfo};
use crate::control::Control;
use crate::core::{CoreInit, WorkerCore};
use crate::device::{Netdev, Seat, Shared, SoftDevice, limits, not_found};
use crate::event::EngineEvent;
use crate::forward::{self, Forward};
use crate::idle::Doorbell;
use crate::mailbox::DEADLINE;
use crate::number::QpnLayout;
use crate::pin;
use crate::services::{ServiceAnswer, ServiceBox, ServiceCommand, ServiceId, ServiceSet};
use crate::stall::Watchdog;
use crate::stats::{EngineStats, WorkerBlock};
use crate::worker::Worker;

/// Events that may wait for control.
const EVENTS: usize = 1024;
/// How long workers may take to start.
const START_DEADLINE: Duration = Duration::from_secs(10);
/// How long an engine that is dropped without [`Engine::stop`] waits for its workers.
const DROP_DEADLINE: Duration = Duration::from_secs(5);

/// A running engine whose workers carry services of type `S`.
pub struct Engine<S> {
    shared: Arc<Shared>,
    services: Vec<Arc<ServiceBox<S>>>,
    threads: Vec<Option<JoinHandle<()>>>,
    next_service: Mutex<u32>,
}

/// What a worker's thread takes with it.
struct Launch<Q, S> {
    id: u8,
    queue: Q,
    init: CoreInit,
    forward: Forward,
    services: Arc<ServiceBox<S>>,
    shared: Arc<Shared>,
    clock: Clock,
    idle: crate::config::IdlePolicy,
}

fn secret() -> Result<u64, EngineError> {
    ferroce_mem::os::random_secret()
        .map_err(|e| EngineError::Os { what: "getrandom", source: std::io::Error::other(e.to_string()) })
}

impl<S: Service<WorkerCore> + Send + 'static> Engine<S> {
    /// Starts one worker per queue.
    ///
    /// # Errors
    /// A value out of its range, a core that can't be pinned, a thread or descriptor that the system refuses, a worker
    /// that does not come up. Nothing runs then.
    pub fn start<Q: PortQueue + Send + 'static>(
        cfg: EngineConfig,
        queues: Vec<Q>,
    ) -> Result<Engine<S>, EngineError> {
        cfg.check(queues.len())?;
        let count = cfg.workers.len();
        let (numbers, keys) = (secret()?, secret()?);
        let layout = QpnLayout::new(numbers, count, cfg.max_qp);
        let clock = Clock::calibrate();
        let events = Arc::new(ArrayQueue::new(EVENTS));
        let netdev = Arc::new(Netdev { info: cfg.netdev, gids: cfg.gids.clone() });
        let mut seats = Vec::with_capacity(count);
        for worker in &cfg.workers {
            let bell = Doorbell::new().map_err(|source| EngineError::Os { what: "eventfd", source })?;
            seats.push(Seat {
                commands: CommandBox::new(),
                bell: Arc::new(bell),
                block: Arc::new(WorkerBlock::default()),
                core: worker.core,
                exited: AtomicBool::new(false),
            });
        }
        let bells: Vec<_> = seats.iter().map(|seat| seat.bell.clone()).collect();
        let blocks: Vec<_> = seats.iter().map(|seat| seat.block.clone()).collect();
        let shared = Arc::new(Shared {
            name: cfg.name.clone(),
            icrc: cfg.icrc,
            clock: clock.name(),
            limits: limits(cfg.node_guid, count as u8, cfg.max_qp, cfg.max_cq, cfg.max_mr),
            workers: seats,
            events: events.clone(),
            stop: AtomicBool::new(false),
            netdev: Mutex::new(netdev.clone()),
            control: Mutex::new(Control::new(
                layout,
                count as u8,
                (cfg.max_qp, cfg.max_cq, cfg.max_mr),
                keys,
            )),
        });
        let mut engine = Engine {
            shared: shared.clone(),
            services: (0..count).map(|_| Arc::new(ServiceBox::new())).collect(),
            threads: Vec::with_capacity(count),
            next_service: Mutex::new(0),
        };
        let (up, started) = mpsc::channel();
        let mesh = forward::mesh(&bells, &empty_packet());
        for (i, ((queue, forward), block)) in queues.into_iter().zip(mesh).zip(blocks).enumerate() {
            let init = CoreInit {
                id: i as u8,
                workers: count as u8,
                layout,
                max_qp: cfg.max_qp,
                max_cq: cfg.max_cq,
                max_mr: cfg.max_mr,
                secret: keys,
                icrc: cfg.icrc,
                netdev: netdev.clone(),
                events: events.clone(),
                block,
            };
            let services = engine.services[i].clone();
            let idle = cfg.workers[i].idle;
            let launch =
                Launch { id: i as u8, queue, init, forward, services, shared: shared.clone(), clock, idle };
            let (up, core) = (up.clone(), cfg.workers[i].core);
            let thread = std::thread::Builder::new()
                .name(format!("{}/w{i}", cfg.name))
                .spawn(move || run_worker(launch, core, &up))
                .map_err(|source| EngineError::Os { what: "thread", source })?;
            engine.threads.push(Some(thread));
        }
        engine.await_start(&started, count)?;
        Ok(engine)
    }

    fn await_start(
        &self,
        started: &mpsc::Receiver<(u8, Result<(), EngineError>)>,
        count: usize,
    ) -> Result<(), EngineError> {
        let until = Instant::now() + START_DEADLINE;
        let mut up = vec![false; count];
        for _ in 0..count {
            match started.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok((worker, outcome)) => {
                    outcome?;
                    up[worker as usize] = true;
                }
                Err(_) => {
                    let worker = up.iter().position(|u| !u).unwrap_or(0) as u8;
                    return Err(EngineError::Hung {
                        worker,
                        action: "start",
                        stage: self.stage_of(worker),
                        deadline: START_DEADLINE,
                    });
                }
            }
        }
        Ok(())
    }

    fn stage_of(&self, worker: u8) -> &'static str {
        self.shared.workers.get(worker as usize).map_or("outside", |seat| seat.block.stage().name())
    }

    /// The device: verbs' control side.
    pub fn device(&self) -> SoftDevice {
        SoftDevice { shared: self.shared.clone() }
    }

    /// Puts a service on a worker; it is polled from the next pass on.
    pub fn add_service(&self, worker: u8, service: S) -> Result<ServiceId, VerbsError> {
        let mailbox = self.services.get(worker as usize).ok_or_else(|| not_found("worker", worker))?;
        let id = {
            let mut next = crate::device::lock(&self.next_service);
            *next = next.wrapping_add(1) & 0xff_ffff;
            ServiceId((u32::from(worker) << 24) | *next)
        };
        match self.ask(worker, mailbox, ServiceCommand::Add(id, service))? {
            ServiceAnswer::Added => Ok(id),
            ServiceAnswer::Full(_) | ServiceAnswer::Removed(_) | ServiceAnswer::NotFound => Err(refuse(
                VerbsErrorKind::Exhausted,
                "service",
                format!("one more on worker {worker}"),
                format!("at most {}", crate::services::MAX_SERVICES),
                "remove finished services, or use another worker",
            )),
        }
    }

    /// Takes a service off its worker and returns it, finished or not.
    pub fn remove_service(&self, id: ServiceId) -> Result<S, VerbsError> {
        let worker = id.worker();
        let mailbox = self.services.get(worker as usize).ok_or_else(|| not_found("service", id.0))?;
        match self.ask(worker, mailbox, ServiceCommand::Remove(id))? {
            ServiceAnswer::Removed(service) => Ok(service),
            ServiceAnswer::Added | ServiceAnswer::Full(_) | ServiceAnswer::NotFound => {
                Err(not_found("service", format!("{:#010x}", id.0)))
            }
        }
    }

    fn ask(
        &self,
        worker: u8,
        mailbox: &ServiceBox<S>,
        command: ServiceCommand<S>,
    ) -> Result<ServiceAnswer<S>, VerbsError> {
        let seat = self.shared.workers.get(worker as usize).ok_or_else(|| not_found("worker", worker))?;
        mailbox.call(&seat.bell, command, DEADLINE).map_err(|why| self.shared.no_answer(worker, why))
    }

    /// Counters of all workers.
    pub fn stats(&self) -> EngineStats {
        self.shared.stats()
    }

    /// Takes the oldest event.
    pub fn next_event(&self) -> Option<EngineEvent> {
        self.shared.events.pop()
    }

    /// Housekeeping's news of the network device; see [`SoftDevice::set_netdev`].
    pub fn set_netdev(&self, info: NetdevInfo, gids: Vec<Gid>) -> Result<(), VerbsError> {
        self.device().set_netdev(info, gids)
    }

    /// Stops all workers, under whatever traffic. Queue pairs are not closed first: their peers see silence.
    ///
    /// # Errors
    /// [`EngineError::Hung`] or [`EngineError::Panicked`], which names the worker and the stage it was last seen in.
    pub fn stop(mut self, deadline: Duration) -> Result<(), EngineError> {
        self.halt(deadline)
    }
}

impl<S> Engine<S> {
    fn halt(&mut self, deadline: Duration) -> Result<(), EngineError> {
        self.shared.stop.store(true, Ordering::SeqCst);
        for seat in &self.shared.workers {
            seat.bell.ring();
        }
        let until = Instant::now() + deadline;
        let mut outcome = Ok(());
        for (i, place) in self.threads.iter_mut().enumerate() {
            let Some(thread) = place.take() else { continue };
            let Some(seat) = self.shared.workers.get(i) else { continue };
            while !thread.is_finished() && Instant::now() < until {
                seat.bell.ring();
                std::thread::sleep(Duration::from_micros(500));
            }
            let (worker, stage) = (i as u8, seat.block.stage().name());
            if !thread.is_finished() {
                // The thread is left behind: it still owns its queue, and memory that it can reach stays.
                outcome = Err(EngineError::Hung { worker, action: "stop", stage, deadline });
            } else if thread.join().is_err() {
                outcome = Err(EngineError::Panicked { worker, stage });
            }
        }
        outcome
    }
}

impl<S> Drop for Engine<S> {
    fn drop(&mut self) {
        // Stopped already, in the usual case. Nobody is left to tell of a worker that hangs.
        let _ = self.halt(DROP_DEADLINE);
    }
}

/// Closes a worker's mailboxes whatever way its thread ends, so that no caller waits for it.
struct Leave<S> {
    id: u8,
    shared: Arc<Shared>,
    services: Arc<ServiceBox<S>>,
}

impl<S> Drop for Leave<S> {
    fn drop(&mut self) {
        self.services.close();
        if let Some(seat) = self.shared.workers.get(self.id as usize) {
            seat.commands.close();
            seat.exited.store(true, Ordering::Release);
        }
    }
}

fn run_worker<Q: PortQueue, S: Service<WorkerCore>>(
    launch: Launch<Q, S>,
    core: Option<usize>,
    up: &mpsc::Sender<(u8, Result<(), EngineError>)>,
) {
    let Launch { id, queue, init, forward, services, shared, clock, idle } = launch;
    let _leave = Leave { id, shared: shared.clone(), services: services.clone() };
    if let Some(core) = core
        && let Err(reason) = pin::pin_to(core)
    {
        let _ = up.send((id, Err(EngineError::Pin { worker: id, core, reason })));
        return;
    }
    // Made here, after the pin: the first touch puts the tables on this core's memory node.
    let mut worker = Worker {
        core: WorkerCore::new(init, clock.now()),
        queue,
        services: ServiceSet::new(services),
        forward,
        shared,
        idle,
        watchdog: Watchdog::new(clock),
        idle_passes: 0,
        worked: true,
    };
    // The starter may have given up; the stop flag tells the loop then.
    let _ = up.send((id, Ok(())));
    worker.run();
}

/// A packet that says nothing, for buffers that are not in use.
pub(crate) fn empty_packet() -> Packet {
    let any = std::net::Ipv4Addr::UNSPECIFIED;
    Packet {
        headers: Headers {
            eth: Eth { dst: MacAddr([0; 6]), src: MacAddr([0; 6]), vlan: None },
            ip: Ip::V4 { src: any, dst: any, tos: 0, ttl: 0, id: 0, frag: 0 },
            udp_src: 0,
            udp_checksum: 0,
            bth: Bth::new(Opcode::RcAck, Qpn::new(0), Psn::new(0)),
            ext: Ext::NONE,
        },
        ip_offset: 0,
        payload_offset: 0,
        payload_len: 0,
        pad: 0,
    }
}

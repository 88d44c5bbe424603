//! The poll loop and the software implementation of verbs.
//!
//! Owns workers, queue pairs, completion queues, timers and mailboxes. Invariant: everything on the data path
//! belongs to one worker and is lent as `&mut`. Called by the daemon and by tools. Never opens a port, never
//! resolves an address, never names a backend or a service.
#![deny(unsafe_code)]

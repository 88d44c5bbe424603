//! Takes away what nobody owns any more: one task for each appliance.
//!
//! Owns nothing. The invariant: what ends with its call is gone from an appliance soon after the call's control process
//! died, or after the appliance answers again; connections are never touched. Asks an appliance only after it was
//! connected anew, or while something is known to be left on it.

use std::rc::Rc;
use std::time::Duration;

use tokio::time::sleep;

use crate::control::Control;
use crate::dp_link::Link;
use crate::handlers::ledger::{sweep, sweep_stale};

const EVERY: Duration = Duration::from_secs(1);

/// Looks after the appliance of `link` until the process stops.
pub async fn run(control: Rc<Control>, link: Link) {
    let mut cleaned = 0;
    loop {
        tokio::select! {
            () = sleep(EVERY) => {}
            () = control.stopping() => return,
        }
        if link.hello().is_none() {
            continue;
        }
        let connects = link.counters().connects;
        if connects != cleaned {
            match sweep_stale(&link, &control).await {
                Ok(count) => {
                    cleaned = connects;
                    told(&link, count, "an earlier control process");
                }
                Err(error) => {
                    tracing::debug!(dev = link.name(), %error, "cannot look for what is left; tried again")
                }
            }
        }
        let left: Vec<u64> = {
            let all = control.left_behind.borrow();
            all.iter().filter(|(dev, _)| dev == link.name()).map(|(_, cookie)| *cookie).collect()
        };
        for cookie in left {
            match sweep(&link, cookie).await {
                Ok(count) => {
                    control.left_behind.borrow_mut().remove(&(link.name().to_owned(), cookie));
                    told(&link, count, "an operation that could not be undone");
                }
                Err(error) => {
                    tracing::debug!(dev = link.name(), cookie, %error, "cannot clean up; tried again")
                }
            }
        }
    }
}

fn told(link: &Link, objects: u64, of: &str) {
    if objects != 0 {
        tracing::info!(dev = link.name(), objects, of, "took away what was left");
    }
}

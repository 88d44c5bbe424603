//! What binds a thread to its core.
//!
//! Invariant: the list of cores is the mask of the process's main thread, read from `/proc`, never that of a calling
//! thread that may be pinned already; a pin counts only when the mask that the kernel reports holds that core alone.
//! Called when workers start; never moves a thread later.

use rustix::thread::{CpuSet, sched_getaffinity};

/// Cores that this process may use, ascending: the mask of its main thread.
pub fn allowed_cores() -> Vec<usize> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", std::process::id())).unwrap_or_default();
    let list =
        status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).unwrap_or("").trim().to_owned();
    let cores = parse_list(&list);
    if !cores.is_empty() {
        return cores;
    }
    // No /proc: what core_affinity sees of the calling thread is the next best answer.
    core_affinity::get_core_ids().unwrap_or_default().into_iter().map(|c| c.id).collect()
}

/// Picks `n` cores of the allowed ones, core 0 last, because interrupts and housekeeping tend to run there. `None` for a
/// worker that gets no core of its own.
pub fn auto_cores(n: usize) -> Vec<Option<usize>> {
    let mut cores = allowed_cores();
    cores.sort_by_key(|c| (*c == 0, *c));
    (0..n).map(|i| cores.get(i).copied()).collect()
}

/// Pins the calling thread to `core` and reads the mask back.
pub fn pin_to(core: usize) -> Result<(), String> {
    let allowed = allowed_cores();
    if !allowed.contains(&core) {
        return Err(format!("not one of the cores allowed to this process ({allowed:?})"));
    }
    if core >= CpuSet::MAX_CPU {
        return Err(format!("above the largest core number {}", CpuSet::MAX_CPU - 1));
    }
    if !core_affinity::set_for_current(core_affinity::CoreId { id: core }) {
        return Err("the kernel refused".into());
    }
    let mask = sched_getaffinity(None).map_err(|e| format!("the mask can't be read back: {e}"))?;
    if mask.count() != 1 || !mask.is_set(core) {
        return Err(format!("the mask holds {} cores after the pin", mask.count()));
    }
    Ok(())
}

fn parse_list(list: &str) -> Vec<usize> {
    let mut cores = Vec::new();
    for part in list.split(',').filter(|p| !p.is_empty()) {
        let (a, b) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(a), Ok(b)) = (a.trim().parse::<usize>(), b.trim().parse::<usize>()) {
            cores.extend((a..=b).take(4096));
        }
    }
    cores
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_parse() {
        assert_eq!(parse_list("0-3,8,10-11"), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(parse_list("5"), [5]);
        assert_eq!(parse_list(""), Vec::<usize>::new());
    }

    #[test]
    fn core_0_comes_last_and_a_pinned_caller_sees_all_cores() {
        let all = allowed_cores();
        let after_pin = std::thread::spawn(move || {
            pin_to(all[0]).expect("an allowed core can be pinned to");
            (all, allowed_cores(), auto_cores(64))
        });
        let (all, seen, auto) = after_pin.join().expect("no panic");
        assert_eq!(all, seen);
        assert_eq!(auto.len(), 64);
        if all.contains(&0) {
            assert_eq!(auto[all.len() - 1], Some(0));
        }
        assert!(auto[all.len().min(64)..].iter().all(Option::is_none));
    }

    #[test]
    fn a_core_that_is_not_allowed_is_refused() {
        let foreign = (0..5000).find(|c| !allowed_cores().contains(c)).expect("no machine has 5000 cores");
        let error =
            std::thread::spawn(move || pin_to(foreign)).join().expect("no panic").expect_err("not allowed");
        assert!(error.contains("not one of the cores"), "{error}");
    }
}

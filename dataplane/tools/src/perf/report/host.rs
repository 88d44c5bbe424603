//! The fingerprint of the host: what a number must be read with.

use std::fs;

use serde::Serialize;

/// What the machine is. Unknown values are left out.
#[derive(Clone, Serialize, Debug)]
pub struct Host {
    cpu_model: Option<String>,
    cpu_mhz: Option<f64>,
    architecture: &'static str,
    cores_online: Option<usize>,
    cores_allowed: usize,
    kernel: Option<String>,
    clock_source: Option<String>,
    page_bytes: usize,
    program: &'static str,
    program_version: &'static str,
    command_line: Vec<String>,
}

impl Host {
    /// Reads it.
    pub fn read() -> Host {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        Host {
            cpu_model: field(&info, "model name").map(str::to_string),
            cpu_mhz: cpu_mhz(&info),
            architecture: std::env::consts::ARCH,
            cores_online: line("/sys/devices/system/cpu/online").map(|list| cores_of(&list)),
            cores_allowed: ferroce_engine::pin::allowed_cores().len(),
            kernel: line("/proc/sys/kernel/osrelease"),
            clock_source: line("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
            page_bytes: rustix::param::page_size(),
            program: env!("CARGO_PKG_NAME"),
            program_version: env!("CARGO_PKG_VERSION"),
            command_line: std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect(),
        }
    }

    /// Cycles of the CPU clock in a second, as the kernel tells it.
    pub fn hz(&self) -> Option<f64> {
        self.cpu_mhz.map(|mhz| mhz * 1e6)
    }
}

fn line(path: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().next().map(|line| line.trim().to_string()).filter(|line| !line.is_empty())
}

fn field<'t>(info: &'t str, name: &str) -> Option<&'t str> {
    let of_it = |line: &'t str| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim())
    };
    info.lines().find_map(of_it)
}

fn cpu_mhz(info: &str) -> Option<f64> {
    field(info, "cpu MHz")?.parse().ok().filter(|mhz: &f64| mhz.is_finite() && *mhz > 0.0)
}

/// Cores of a list such as `0-3,8`.
fn cores_of(list: &str) -> usize {
    let of_part = |part: &str| match part.split_once('-') {
        Some((first, last)) => {
            let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
            Some(last.checked_sub(first)? + 1)
        }
        None => part.parse::<usize>().ok().map(|_| 1),
    };
    list.split(',').filter_map(of_part).sum()
}

/// Time that all cores were busy and idle, in the kernel's ticks: perftest's measure of CPU use.
#[derive(Clone, Copy, Debug)]
pub struct Busy {
    user: u64,
    idle: u64,
}

impl Busy {
    /// Reads it; `None` where there is no /proc/stat.
    pub fn read() -> Option<Busy> {
        Busy::of(&fs::read_to_string("/proc/stat").ok()?)
    }

    fn of(stat: &str) -> Option<Busy> {
        let mut fields = stat.lines().next()?.split_whitespace();
        if fields.next() != Some("cpu") {
            return None;
        }
        let numbers: Vec<u64> = fields.map_while(|f| f.parse().ok()).collect();
        let [user, _nice, _system, idle, ..] = numbers[..] else { return None };
        Some(Busy { user, idle })
    }

    /// Percent of all cores' time that programs ran since `before`.
    pub fn percent_since(self, before: Busy) -> f64 {
        let (user, idle) = (self.user.saturating_sub(before.user), self.idle.saturating_sub(before.idle));
        match user.saturating_add(idle) {
            0 => 0.0,
            all => user as f64 / all as f64 * 100.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_the_kernel() {
        let info =
            "processor\t: 0\nmodel name\t: Some CPU @ 2.10GHz\ncpu MHz\t\t: 2100.000\n\nprocessor\t: 1\n";
        assert_eq!(field(info, "model name"), Some("Some CPU @ 2.10GHz"));
        assert_eq!(cpu_mhz(info), Some(2100.0));
        assert_eq!(cpu_mhz("cpu MHz : none"), None);
        assert_eq!([cores_of("0"), cores_of("0-3"), cores_of("0-1,4-7,9"), cores_of("3-1")], [1, 4, 7, 0]);
    }

    #[test]
    fn busy_is_perftests() {
        let before = Busy::of("cpu  100 5 30 800 1 2 3\ncpu0 1 2 3 4\n").unwrap();
        let after = Busy::of("cpu  150 5 30 950 1 2 3\n").unwrap();
        assert!((after.percent_since(before) - 25.0).abs() < 1e-9);
        assert!(before.percent_since(before).abs() < 1e-9);
        assert!(Busy::of("intr 1 2").is_none());
    }

    #[test]
    fn this_host_has_a_kernel_and_a_command_line() {
        let host = Host::read();
        assert!(host.kernel.is_some() && !host.command_line.is_empty() && host.cores_allowed > 0);
    }
}

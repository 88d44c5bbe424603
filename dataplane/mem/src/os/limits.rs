//! Limits that the machine puts on this process: locked memory, and a control group's hugepages.
//!
//! Owns reading and wording them. Called at set-up, when a limit is about to matter or has been met. Never changes one.

use std::path::{Path, PathBuf};

use rustix::process::{Resource, getrlimit};

use super::pages::{ArenaError, PageKind, human};

/// `CAP_IPC_LOCK` (`linux/capability.h`): with it the limit on locked memory does not apply.
const CAP_IPC_LOCK: u32 = 14;

/// Says at start whether `bytes` can be pinned, before a device is touched. For ports that pin memory (a UMEM, an RNIC's
/// regions); memory that is only mapped needs no such leave. Pages that the user's other processes pinned count for the
/// kernel too and cannot be seen here, so a pin may still be refused later.
///
/// # Errors
/// [`ArenaError`] `memlock`, naming the limit, its value, what is in use of it and what was wanted.
pub fn require_memlock(bytes: u64) -> Result<(), ArenaError> {
    let Some(limit) = getrlimit(Resource::Memlock).current else { return Ok(()) };
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim();
    let capable = u64::from_str_radix(field("CapEff:"), 16).is_ok_and(|caps| caps >> CAP_IPC_LOCK & 1 == 1);
    let kib = |name: &str| field(name).trim_end_matches(" kB").parse::<u64>().unwrap_or(0);
    let used = kib("VmLck:").saturating_add(kib("VmPin:")).saturating_mul(1024);
    let total = used.saturating_add(bytes);
    if capable || total <= limit {
        return Ok(());
    }
    Err(ArenaError::new(
        "memlock",
        format!("{} to be pinned", human(bytes)),
        format!("{} (RLIMIT_MEMLOCK), of which this process uses {}", human(limit), human(used)),
        format!(
            "raise it to at least {} bytes (ulimit -l {}, LimitMEMLOCK= of the unit, docker --ulimit memlock=), or give \
             CAP_IPC_LOCK",
            total,
            total.div_ceil(1024)
        ),
    ))
}

/// The tightest limit of this process's control groups on pages of this kind: bytes, and the file that holds it. `None`
/// if there is none or it cannot be seen.
pub(super) fn hugetlb_limit(kind: PageKind) -> Option<(u64, PathBuf)> {
    let size = match kind {
        PageKind::Huge2M => "2MB",
        PageKind::Huge1G => "1GB",
        PageKind::Thp | PageKind::Normal => return None,
    };
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    tightest(&folders(&mounts, &groups), size)
}

/// Folders of the groups of this process that may limit hugepages, each as (mount point, folder).
fn folders(mounts: &str, groups: &str) -> Vec<(PathBuf, PathBuf)> {
    let mut found = Vec::new();
    for mount in mounts.lines() {
        let Some((left, right)) = mount.split_once(" - ") else { continue };
        let (left, right): (Vec<&str>, Vec<&str>) = (left.split(' ').collect(), right.split(' ').collect());
        let (&[_, _, _, root, point, ..], &[fs, _, options, ..]) = (&left[..], &right[..]) else { continue };
        let has = |list: &str, word: &str| list.split(',').any(|w| w == word);
        let path = groups.lines().find_map(|group| {
            let mut parts = group.splitn(3, ':');
            let (id, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            let ours = match fs {
                "cgroup2" => id == "0" && controllers.is_empty(),
                "cgroup" => has(options, "hugetlb") && has(controllers, "hugetlb"),
                _ => false,
            };
            ours.then_some(path)
        });
        if let Some(path) = path {
            // A container may see only a part of the tree; then the mount itself is the nearest known ancestor.
            let inside = Path::new(path).strip_prefix(root).unwrap_or(Path::new(""));
            found.push((PathBuf::from(point), Path::new(point).join(inside)));
        }
    }
    found
}

/// The smallest limit in these folders and those above them, up to the mount point.
fn tightest(folders: &[(PathBuf, PathBuf)], size: &str) -> Option<(u64, PathBuf)> {
    let names = ["max", "limit_in_bytes", "rsvd.max", "rsvd.limit_in_bytes"];
    let mut files = Vec::new();
    for (point, folder) in folders {
        for folder in folder.ancestors().take_while(|folder| folder.starts_with(point)) {
            files.extend(names.map(|name| folder.join(format!("hugetlb.{size}.{name}"))));
        }
    }
    let read = |file: PathBuf| {
        let bytes = std::fs::read_to_string(&file).ok()?.trim().parse::<u64>().ok()?;
        // "max" is no number; the older interface writes the largest page-aligned one instead.
        (bytes < 1 << 62).then_some((bytes, file))
    };
    files.into_iter().filter_map(read).min_by_key(|(bytes, _)| *bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_in_either_hierarchy_and_through_a_container() {
        let v1 = "11 32 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                  12 32 0:30 / /mnt/huge rw,relatime shared:5 - cgroup none rw,hugetlb\n";
        let groups = "10:hugetlb:/a/b\n4:memory:/other\n0::/\n";
        assert_eq!(folders(v1, groups), [("/mnt/huge".into(), "/mnt/huge/a/b".into())]);
        let v2 = "30 25 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";
        let slice = "0::/system.slice/ferroced.service\n";
        let unit = "/sys/fs/cgroup/system.slice/ferroced.service";
        assert_eq!(folders(v2, slice), [("/sys/fs/cgroup".into(), unit.into())]);
        let part = "30 25 0:26 /docker/1 /sys/fs/cgroup ro - cgroup2 cgroup2 ro\n";
        let inside = |path: &str| folders(part, &format!("0::{path}\n"))[0].1.clone();
        assert_eq!(inside("/docker/1/x"), Path::new("/sys/fs/cgroup/x"));
        assert_eq!(inside("/docker/2"), Path::new("/sys/fs/cgroup"));
        assert_eq!(folders("nonsense\n - \n1 2 3 - cgroup2\n", "0:\n"), []);
    }

    #[test]
    fn the_tightest_limit_on_the_way_up_counts() {
        let top = std::env::temp_dir().join(format!("ferroce-limits-{}", std::process::id()));
        let deep = top.join("a/b");
        std::fs::create_dir_all(&deep).expect("a folder");
        let put = |at: &Path, name: &str, text: &str| std::fs::write(at.join(name), text).expect("written");
        put(&deep, "hugetlb.2MB.max", "max\n");
        put(&deep, "hugetlb.2MB.rsvd.limit_in_bytes", "9223372036854771712\n");
        let folders = [(top.clone(), deep.clone())];
        let none = tightest(&folders, "2MB");
        put(&top, "hugetlb.2MB.max", "4194304\n");
        put(&top.join("a"), "hugetlb.2MB.max", "33554432\n");
        let some = tightest(&folders, "2MB");
        let other = tightest(&folders, "1GB");
        std::fs::remove_dir_all(&top).expect("removed");
        assert_eq!((none, other), (None, None));
        assert_eq!(some, Some((4_194_304, top.join("hugetlb.2MB.max"))));
    }
}

//! Memory under the machine's limits: control groups, hugepage pools and mounts, locked memory.
//!
//! What needs root works in mount namespaces and groups of its own and restores the pools, also on failure; where the
//! machine does not allow it, the test prints why and ends. A test that must live in other surroundings starts this
//! program again for one of the `child_` tests, which do nothing when run by hand.
#![cfg(not(miri))]
#![allow(unsafe_code)]

use std::collections::HashSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ferroce_mem::os::{
    Arena, ArenaConfig, ArenaError, ArenaReport, PageKind, PagePolicy, Regions, require_memlock,
};
use ferroce_mem::{Access, DeregisterError, KeyFault, PdId};
use ferroce_wire::{DmaLen, RemoteAddr, Rkey};

const MIB: u64 = 1 << 20;
const POOL_2M: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
const POOL_1G: &str = "/sys/kernel/mm/hugepages/hugepages-1048576kB";
/// How long a test waits for another one that uses the pool, and for a child.
const PATIENCE: Duration = Duration::from_secs(60);

fn arena(bytes: u64, pages: PagePolicy) -> Result<(Arena, ArenaReport), ArenaError> {
    Arena::new(ArenaConfig { bytes, pages, numa_node: None })
}

/// What a child is asked, and says: one line each. A child whose parent says nothing was started by hand.
fn order() -> Option<String> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).ok()?;
    let order = line.trim().to_string();
    if order.is_empty() {
        println!("nothing to do: this is part of another test");
    }
    (!order.is_empty()).then_some(order)
}

/// Runs a `child_` test; `prepare` may move the process about before it gets its order. Answers come by lines that begin
/// with "> ".
fn child(
    test: &str,
    order: &str,
    adapt: impl FnOnce(&mut Command),
    prepare: impl FnOnce(u32),
) -> Vec<String> {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--ignored", "--exact", "--nocapture", "--test-threads=1", test]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    adapt(&mut command);
    let mut child = command.spawn().expect("started");
    prepare(child.id());
    let mut stdin = child.stdin.take().expect("piped");
    writeln!(stdin, "{order}").expect("it reads");
    drop(stdin);
    let out = BufReader::new(child.stdout.take().expect("piped"));
    let reader = std::thread::spawn(move || out.lines().map_while(Result::ok).collect::<Vec<_>>());
    let until = Instant::now() + PATIENCE;
    let status = loop {
        match child.try_wait().expect("a child of ours") {
            Some(status) => break status,
            None if Instant::now() > until => {
                child.kill().expect("a child of ours");
                panic!("{test} took more than {PATIENCE:?} for {order:?}");
            }
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let lines = reader.join().expect("read");
    assert!(status.success(), "{test} ended with {status} for {order:?}, no signal was due: {lines:#?}");
    lines.iter().filter_map(|line| line.split_once("> ").map(|(_, said)| said.to_string())).collect()
}

/// MR-3 of the field cases, as far as the key table goes.
#[test]
fn the_same_address_mapped_again_shows_this_rounds_bytes_under_this_rounds_key() {
    let read = |regions: &Regions, rkey: Rkey| {
        let slice =
            regions.memory().check_remote(PdId(1), rkey, RemoteAddr(0x7000), DmaLen(64), Access::REMOTE_READ);
        slice.map(|slice| {
            let mut got = [0u8; 64];
            assert_eq!(slice.copy_out(&mut got), 64);
            got
        })
    };
    let access = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let _pool = Pool::with_free(POOL_2M, 2).inspect_err(|why| println!("with the pages there are: {why}"));
    let (kept, _) = arena(2 * MIB, PagePolicy::Auto).expect("memory");
    for remap in [false, true] {
        let mut regions = Regions::new(4, 0x5eed);
        let (mut keys, mut bases, mut last) = (HashSet::new(), HashSet::new(), None);
        for round in 1..=100u8 {
            let fresh = remap.then(|| arena(2 * MIB, PagePolicy::Auto).expect("memory").0);
            let block = fresh.as_ref().unwrap_or(&kept).alloc(4096, 4096).expect("room");
            bases.insert(block.base());
            assert_eq!(block.to_vec(), [0; 4096], "round {round}: bytes of the round before");
            block.fill(round);
            let mr = regions.register(block, PdId(1), access, 0x7000).expect("a free entry");
            assert!(keys.insert(mr.rkey), "round {round}: a key came back");
            assert_eq!(read(&regions, mr.rkey), Ok([round; 64]));
            if let Some(last) = last.replace(mr.rkey) {
                assert_eq!(read(&regions, last), Err(KeyFault::Unknown), "round {round}: last round's key");
            }
            let block = regions.deregister(mr.lkey).expect("registered");
            assert_eq!(read(&regions, mr.rkey), Err(KeyFault::Unknown));
            assert_eq!(regions.deregister(mr.lkey).err(), Some(DeregisterError::Unknown));
            drop(block);
        }
        // The kernel maps at a place of its choice, nearly always the one just left.
        assert!(
            if remap { bases.len() < 50 } else { bases.len() == 1 },
            "{} places in 100 rounds",
            bases.len()
        );
    }
}

/// MR-1 of the field cases. Memory that is only mapped is under no limit of locked memory; a port that pins asks first.
#[test]
fn a_small_limit_on_locked_memory_is_named_with_both_numbers() {
    let said = child(
        "child_with_little_locked_memory",
        "go",
        |command| {
            let limit = libc::rlimit { rlim_cur: 64 << 10, rlim_max: 64 << 10 };
            // SAFETY: two system calls between fork and exec, with arguments of the closure's own.
            unsafe {
                command.pre_exec(move || {
                    libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit);
                    // Without CAP_IPC_LOCK after the exec, even for root; others have no such capability to lose.
                    libc::prctl(libc::PR_CAPBSET_DROP, 14);
                    Ok(())
                })
            };
        },
        |_| (),
    );
    assert_eq!(
        said,
        [
            "32 KiB: fine",
            "1 MiB: memlock: asked 1 MiB to be pinned, allowed 64 KiB (RLIMIT_MEMLOCK), of which this process uses 0 \
             bytes; raise it to at least 1048576 bytes (ulimit -l 1024, LimitMEMLOCK= of the unit, docker --ulimit \
             memlock=), or give CAP_IPC_LOCK",
            "32 KiB again: fine",
            "512 MiB: memlock",
            "1 MiB registered without pinning: fine",
        ]
    );
    // An arena's own limit is told in the same way, and nothing leaks by the refusal.
    let (small, _) = arena(64 << 10, PagePolicy::Normal).expect("64 KiB");
    let free = small.free_bytes();
    assert!(small.alloc(32 << 10, 64).is_ok());
    let error = small.alloc(1 << 20, 64).expect_err("more than there is").to_string();
    assert!(error.contains("asked 1 MiB, allowed 64 KiB"), "{error}");
    assert!(small.alloc(32 << 10, 64).is_ok());
    assert_eq!(small.free_bytes(), free);
}

#[test]
#[ignore = "part of a_small_limit_on_locked_memory_is_named_with_both_numbers"]
fn child_with_little_locked_memory() {
    if order().is_none() {
        return;
    }
    let fine = |bytes| require_memlock(bytes).map_or_else(|error| error.to_string(), |()| "fine".into());
    println!("\n> 32 KiB: {}", fine(32 << 10));
    println!("> 1 MiB: {}", fine(MIB));
    println!("> 32 KiB again: {}", fine(32 << 10));
    println!(
        "> 512 MiB: {}",
        require_memlock(512 * MIB).map_or_else(|error| error.attribute, |()| "fine".into())
    );
    let registered = arena(MIB, PagePolicy::Normal).is_ok_and(|(arena, _)| {
        let block = arena.alloc(MIB as usize, 64).expect("all of it");
        Regions::new(1, 1).register(block, PdId(1), Access::LOCAL_WRITE, 0).is_ok()
    });
    println!("> 1 MiB registered without pinning: {}", if registered { "fine" } else { "refused" });
}

/// Undoes a change of the machine when it is dropped, and also when this program dies before.
struct Undo(Child);

impl Undo {
    /// `script` gets `args` as `$1` and so on.
    fn new(script: &str, args: &[&str]) -> Undo {
        let script = format!("trap '' INT TERM HUP; cat > /dev/null; {script}");
        let mut command = Command::new("sh");
        command.args(["-c", &script, "sh"]).args(args).stdin(Stdio::piped()).stdout(Stdio::null());
        Undo(command.spawn().expect("a shell"))
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        match self.0.wait() {
            Ok(status) if status.success() => {}
            other => eprintln!("a change of the machine was not undone: {other:?}"),
        }
    }
}

/// A hugepage pool changed for a test; nobody else's test changes it meanwhile.
struct Pool {
    _undo: Undo,
    _lock: fs::File,
}

impl Pool {
    /// `free` free pages, or why not.
    fn with_free(pool: &str, free: u64) -> Result<Pool, String> {
        let file = Path::new(pool).join("nr_hugepages");
        let lock = fs::File::open(&file).map_err(|e| format!("{}: {e}", file.display()))?;
        let until = Instant::now() + PATIENCE;
        while rustix::fs::flock(lock.as_fd(), rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
            if Instant::now() > until {
                return Err(format!("another test holds {}", file.display()));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let number = |name: &str| -> Option<u64> {
            fs::read_to_string(Path::new(pool).join(name)).ok()?.trim().parse().ok()
        };
        let now_free = || Some(number("free_hugepages")?.saturating_sub(number("resv_hugepages")?));
        let (Some(before), Some(have)) = (number("nr_hugepages"), now_free()) else {
            return Err(format!("{pool} cannot be read"));
        };
        let undo = Undo::new("echo \"$1\" > \"$2\"", &[&before.to_string(), &file.to_string_lossy()]);
        let changed = Pool { _undo: undo, _lock: lock };
        let wanted = (before + free).saturating_sub(have);
        fs::write(&file, wanted.to_string()).map_err(|e| format!("{}: {e}", file.display()))?;
        match now_free() {
            Some(now) if now == free => Ok(changed),
            now => Err(format!("{pool} gave {now:?} free pages of {free}")),
        }
    }
}

/// Runs `body` on a thread with a mount namespace of its own, from which nothing gets out; or says why not.
fn own_mounts(body: impl FnOnce() -> Result<(), String> + Send) {
    let outcome = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: affects this thread only, which ends with the closure.
            if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
                return Err(format!("unshare: {}", std::io::Error::last_os_error()));
            }
            mount(None, Path::new("/"), libc::MS_REC | libc::MS_PRIVATE, None)?;
            body()
        });
        thread.join()
    });
    match outcome {
        Ok(Ok(())) => {}
        Ok(Err(why)) => println!("skipped: {why}"),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Mounts a file system of type `kind` (`None`: changes a mount), or says why not.
fn mount(kind: Option<&str>, at: &Path, flags: libc::c_ulong, options: Option<&str>) -> Result<(), String> {
    use std::ffi::CString;
    let text = |text: &str| CString::new(text).expect("no zero in it");
    let (kind, at_text) = (kind.map(text), text(at.to_str().expect("UTF-8")));
    let options = options.map(text);
    let pointer = |text: &Option<CString>| text.as_ref().map_or(std::ptr::null(), |text| text.as_ptr());
    // SAFETY: strings that live until the call returns, or null where mount(2) allows it.
    let done = unsafe {
        libc::mount(c"none".as_ptr(), at_text.as_ptr(), pointer(&kind), flags, pointer(&options).cast())
    };
    if done == 0 {
        return Ok(());
    }
    Err(format!("mount of {kind:?} at {}: {}", at.display(), std::io::Error::last_os_error()))
}

fn unmount(at: &Path) -> Result<(), String> {
    let text = std::ffi::CString::new(at.to_str().expect("UTF-8")).expect("no zero in it");
    // SAFETY: a string that lives until the call returns.
    match unsafe { libc::umount2(text.as_ptr(), libc::MNT_DETACH) } {
        0 => Ok(()),
        _ => Err(format!("umount of {}: {}", at.display(), std::io::Error::last_os_error())),
    }
}

/// A folder for a mount point, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("ferroce-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).expect("a folder");
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // The mount on it belongs to this thread's namespace; the folder itself to all.
        let _ = unmount(&self.0);
        let _ = fs::remove_dir(&self.0);
    }
}

/// A control group with limits on 2 MiB pages, removed at the end.
struct Group {
    folder: PathBuf,
    /// Names of the limits: on pages touched, on pages promised.
    limits: [&'static str; 2],
    _undo: Undo,
}

impl Group {
    /// In the unified hierarchy, else in the older one, mounted at `mount_at`.
    fn new(mount_at: &Path) -> Result<Group, String> {
        let unified = Path::new("/sys/fs/cgroup");
        let controllers = fs::read_to_string(unified.join("cgroup.subtree_control")).unwrap_or_default();
        let (top, limits) = if controllers.split_whitespace().any(|word| word == "hugetlb") {
            (unified, ["hugetlb.2MB.max", "hugetlb.2MB.rsvd.max"])
        } else {
            mount(Some("cgroup"), mount_at, 0, Some("hugetlb"))?;
            (mount_at, ["hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.rsvd.limit_in_bytes"])
        };
        let folder = top.join(format!("ferroce-test-{}", std::process::id()));
        fs::create_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        // Its last process has ended by then, but the kernel may still be tidying up.
        let script = "for i in 1 2 3 4 5 6 7 8 9; do rmdir \"$1\" && exit 0; sleep 1; done; exit 1";
        let undo = Undo::new(script, &[&folder.to_string_lossy()]);
        let group = Group { folder, limits, _undo: undo };
        group.limit(0, u64::MAX >> 1)?;
        Ok(group)
    }

    fn limit(&self, at: usize, bytes: u64) -> Result<(), String> {
        let file = self.folder.join(self.limits[at]);
        let text = if bytes > 1 << 62 && self.limits[at].ends_with("max") {
            "max".into()
        } else {
            bytes.to_string()
        };
        fs::write(&file, text).map_err(|e| format!("{}: {e}", file.display()))
    }
}

/// START-1 of the field cases: the pool has the pages, the control group does not let us have them.
#[test]
fn a_control_groups_limit_on_hugepages_is_an_error_that_names_it_and_never_a_signal() {
    own_mounts(|| {
        let pool = Pool::with_free(POOL_2M, 80)?;
        let folder = Folder::new("hugetlb");
        let group = Group::new(&folder.0)?;
        for (at, limit) in [(0, 0), (0, 32 * MIB), (1, 0), (1, 32 * MIB)] {
            group.limit(1 - at, u64::MAX >> 1)?;
            group.limit(at, limit)?;
            let said = child(
                "child_asks_for_128_mib",
                "go",
                |_| (),
                |pid| fs::write(group.folder.join("cgroup.procs"), pid.to_string()).expect("moved"),
            );
            let [explicit, auto, small] = &said[..] else { panic!("the child said {said:#?}") };
            let value = if limit == 0 { "0 bytes" } else { "32 MiB" };
            let file = group.folder.join(group.limits[at]);
            for words in [
                "64 2 MiB hugepages (128 MiB)".into(),
                format!("allowed {value} by the control group's limit {}", file.display()),
                " are free on the machine".into(),
                "raise that limit".into(),
            ] {
                assert!(
                    explicit.starts_with("refused: pages: asked ") && explicit.contains(&words),
                    "{explicit}"
                );
                assert!(auto.contains(&words), "{auto}");
            }
            assert!(
                auto.starts_with("got 128 MiB of ") && !auto.starts_with("got 128 MiB of 2 MiB"),
                "{auto}"
            );
            let got = if limit == 0 { "refused" } else { "got 2 MiB of 2 MiB hugepages" };
            assert!(small.starts_with(got), "within the limit of {value}: {small}");
        }
        // Nothing was left behind: all pages are free again, or soon, should another program try some just now.
        let free = || fs::read_to_string(Path::new(POOL_2M).join("free_hugepages")).unwrap_or_default();
        let until = Instant::now() + PATIENCE;
        while free().trim() != "80" {
            assert!(Instant::now() < until, "{} of 80 pages are free again", free().trim());
            std::thread::sleep(Duration::from_millis(20));
        }
        drop((group, folder, pool));
        Ok(())
    });
}

#[test]
#[ignore = "part of a_control_groups_limit_on_hugepages_is_an_error_that_names_it_and_never_a_signal"]
fn child_asks_for_128_mib() {
    if order().is_none() {
        return;
    }
    println!();
    for (bytes, pages) in [(128, PagePolicy::Huge2M), (128, PagePolicy::Auto), (2, PagePolicy::Huge2M)] {
        match arena(bytes * MIB, pages) {
            Ok((_, report)) => println!("> got {report}"),
            Err(error) => println!("> refused: {error}"),
        }
    }
}

/// Makes this thread, and no other, one of another user; root stays the saved user, hence can come back.
fn set_user(user: libc::uid_t) {
    // SAFETY: the system call itself changes the ids of the calling thread only.
    let done = unsafe { libc::syscall(libc::SYS_setresuid, user, user, -1) };
    assert_eq!(done, 0, "setresuid: {}", std::io::Error::last_os_error());
}

/// START-3 of the field cases: pages but no mount; a mount that is another user's; only 1 GiB pages; none.
#[test]
fn hugepages_are_found_without_a_mount_and_beside_anothers() {
    own_mounts(|| {
        let pool = Pool::with_free(POOL_2M, 8)?;
        let mounts = fs::read_to_string("/proc/self/mounts").map_err(|e| e.to_string())?;
        for mount in mounts.lines().filter(|mount| mount.split(' ').nth(2) == Some("hugetlbfs")) {
            let at = mount.split(' ').nth(1).unwrap_or_default();
            unmount(Path::new(at))?;
        }
        let explicit = || {
            arena(4 * MIB, PagePolicy::Huge2M).map(|(arena, report)| {
                arena.alloc(4 * MIB as usize, 2 << 20).expect("all of it").write(0, &[1; 4096]);
                (report.page_kind, report.fallback)
            })
        };
        assert_eq!(explicit(), Ok((PageKind::Huge2M, None)), "no mount");
        let folder = Folder::new("hugetlbfs");
        mount(Some("hugetlbfs"), &folder.0, 0, Some("uid=65533,gid=65533,mode=0700"))?;
        set_user(65534);
        let (theirs, got) = (fs::read_dir(&folder.0).map(|_| ()), explicit());
        set_user(0);
        assert!(theirs.is_err(), "the mount is another user's");
        assert_eq!(got, Ok((PageKind::Huge2M, None)), "another user's mount, no privilege");
        drop((folder, pool));
        Ok(())
    });
}

#[test]
fn without_hugepages_it_starts_and_says_what_it_took_or_fails_and_names_the_fix() {
    own_mounts(|| {
        let pool = Pool::with_free(POOL_2M, 0)?;
        let error = arena(4 * MIB, PagePolicy::Huge2M).expect_err("none are free");
        assert!(error.allowed.starts_with("0 free") && error.hint.contains("vm.nr_hugepages=2"), "{error}");
        let (_, report) = arena(4 * MIB, PagePolicy::Auto).expect("other pages");
        assert!(matches!(report.page_kind, PageKind::Thp | PageKind::Normal), "{report}");
        let reason = report.fallback.clone().expect("it is a fallback");
        assert!(reason.contains("asked 2 2 MiB hugepages (4 MiB), allowed 0 free"), "{reason}");
        assert!(reason.contains("vm.nr_hugepages=2"), "{reason}");
        assert_eq!(reason.lines().count(), 1);
        assert!(report.to_string().contains(&reason), "the status shows it: {report}");

        // Only 1 GiB pages: named for what is at least as large; smaller arenas say what they took instead.
        let giant = Pool::with_free(POOL_1G, 1)?;
        let (_, report) = arena(4 * MIB, PagePolicy::Auto).expect("other pages");
        assert!(matches!(report.page_kind, PageKind::Thp | PageKind::Normal), "{report}");
        assert!(report.fallback.is_some_and(|reason| reason.contains("vm.nr_hugepages=2")));
        let (arena, report) = arena(1 << 30, PagePolicy::Auto).expect("the 1 GiB page");
        assert_eq!((report.page_kind, report.bytes, arena.len()), (PageKind::Huge1G, 1 << 30, 1 << 30));
        assert!(report.fallback.is_some_and(|reason| reason.contains("asked 512 2 MiB hugepages (1 GiB)")));
        drop((arena, giant, pool));
        Ok(())
    });
}

#[test]
fn normal_pages_by_wish_are_no_fallback_and_say_that_figures_do_not_count() {
    let (_, report) = arena(MIB, PagePolicy::Normal).expect("1 MiB");
    assert_eq!(report.to_string(), "1 MiB of normal pages (as asked; performance figures do not count)");
}

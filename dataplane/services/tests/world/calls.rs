//! Which system calls a service makes: a seccomp filter on its worker reports every one, and those made while the service
//! is polled are counted.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use super::{LIMIT, until};

/// Shared by a service's wrapper on its worker and the test.
#[derive(Default)]
pub struct Calls {
    /// The filter's descriptor plus one.
    listener: AtomicI32,
    /// The service is being polled.
    inside: AtomicBool,
    made: AtomicU64,
    clocks: AtomicU64,
    last: AtomicI32,
}

impl Calls {
    /// Calls made inside: those that read the thread's clock, all others, and the number of the last other one.
    pub fn made(&self) -> (u64, u64, i32) {
        let get = |count: &AtomicU64| count.load(Ordering::SeqCst);
        (get(&self.clocks), get(&self.made), self.last.load(Ordering::SeqCst))
    }

    /// On the worker: counts what `poll` calls. From the first time on the thread waits for [`Calls::answer`].
    pub fn watch<T>(&self, poll: impl FnOnce() -> T) -> T {
        if self.listener.load(Ordering::Relaxed) == 0 {
            let fd = report_system_calls();
            self.listener.store(fd + 1, Ordering::SeqCst);
            assert!(fd >= 0, "seccomp with a listener is refused");
        }
        self.inside.store(true, Ordering::SeqCst);
        let result = poll();
        self.inside.store(false, Ordering::SeqCst);
        result
    }

    /// In the test: lets the worker's calls go on, until its thread ends.
    pub fn answer(self: &Arc<Self>) {
        until(|| self.listener.load(Ordering::SeqCst) > 0);
        // SAFETY: the worker made this descriptor and gave it away.
        let listener = unsafe { OwnedFd::from_raw_fd(self.listener.load(Ordering::SeqCst) - 1) };
        let calls = Arc::clone(self);
        std::thread::spawn(move || {
            while let Some((number, first)) = let_go_on(&listener, || calls.inside.load(Ordering::SeqCst)) {
                let Some(clock) = first else { continue };
                if number == libc::SYS_clock_gettime && clock == libc::CLOCK_THREAD_CPUTIME_ID as u64 {
                    calls.clocks.fetch_add(1, Ordering::SeqCst);
                } else {
                    calls.made.fetch_add(1, Ordering::SeqCst);
                    calls.last.store(number as i32, Ordering::SeqCst);
                }
            }
        });
    }
}

/// `struct seccomp_notif` and `struct seccomp_notif_resp` of the kernel's interface.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Notification {
    id: u64,
    pid: u32,
    flags: u32,
    nr: i32,
    arch: u32,
    instruction_pointer: u64,
    args: [u64; 6],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Response {
    id: u64,
    val: i64,
    error: i32,
    flags: u32,
}

const SECCOMP_SET_MODE_FILTER: libc::c_ulong = 1;
const SECCOMP_FILTER_FLAG_NEW_LISTENER: libc::c_ulong = 1 << 3;
const SECCOMP_RET_USER_NOTIF: u32 = 0x7fc0_0000;
const SECCOMP_USER_NOTIF_FLAG_CONTINUE: u32 = 1;
const SECCOMP_IOCTL_NOTIF_RECV: libc::c_ulong = 0xc050_2100;
const SECCOMP_IOCTL_NOTIF_SEND: libc::c_ulong = 0xc018_2101;

/// From now on every system call of the calling thread waits for an answer through the returned descriptor.
fn report_system_calls() -> i32 {
    let mut ret = libc::sock_filter {
        code: (libc::BPF_RET | libc::BPF_K) as u16,
        jt: 0,
        jf: 0,
        k: SECCOMP_RET_USER_NOTIF,
    };
    let program = libc::sock_fprog { len: 1, filter: &mut ret };
    // SAFETY: plain system calls; the program outlives them. The last one is not reported: the filter acts from the next
    // system call on.
    unsafe {
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 {
            return -1;
        }
        libc::syscall(libc::SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program)
            as i32
    }
}

/// Waits for the next call and lets it go on: its number and, if it counts, its first argument. `None` when the thread is
/// gone.
fn let_go_on(listener: &OwnedFd, counts: impl Fn() -> bool) -> Option<(i64, Option<u64>)> {
    let mut poll = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one descriptor that lives for the call.
    let ready = unsafe { libc::poll(&mut poll, 1, LIMIT.as_millis() as i32) };
    if ready <= 0 || poll.revents & libc::POLLIN == 0 {
        return None;
    }
    let mut notification = Notification::default();
    // SAFETY: the structure has the kernel's layout and size (the ioctl's number holds it), and is zeroed.
    if unsafe { libc::ioctl(listener.as_raw_fd(), SECCOMP_IOCTL_NOTIF_RECV, &mut notification) } != 0 {
        return Some((0, None));
    }
    let first = counts().then_some(notification.args[0]);
    let mut response =
        Response { id: notification.id, flags: SECCOMP_USER_NOTIF_FLAG_CONTINUE, ..Response::default() };
    // SAFETY: as above.
    unsafe { libc::ioctl(listener.as_raw_fd(), SECCOMP_IOCTL_NOTIF_SEND, &mut response) };
    Some((notification.nr.into(), first))
}

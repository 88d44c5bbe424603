//! What the worker threads allocate, and which system calls they make.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use crate::PATIENCE;

/// Counts what the worker threads allocate and free.
struct Counting;

pub static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Set on the worker threads.
    pub static WATCHED: Cell<bool> = const { Cell::new(false) };
}

fn note() {
    if WATCHED.get() {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        note();
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        note();
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

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
pub fn report_system_calls() -> i32 {
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

/// Lets every reported system call go on, and counts it; the number of the last one is kept.
#[derive(Default)]
pub struct Calls {
    pub count: AtomicU64,
    pub last: AtomicI32,
}

pub fn answer_calls(listener: OwnedFd, calls: &Calls) {
    loop {
        let mut poll = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one descriptor that lives for the call.
        let ready = unsafe { libc::poll(&mut poll, 1, PATIENCE.as_millis() as i32) };
        if ready <= 0 || poll.revents & libc::POLLIN == 0 {
            // The filtered thread has ended.
            return;
        }
        let mut notification = Notification::default();
        // SAFETY: the structure has the kernel's layout and size (the ioctl's number holds it), and is zeroed.
        if unsafe { libc::ioctl(listener.as_raw_fd(), SECCOMP_IOCTL_NOTIF_RECV, &mut notification) } != 0 {
            continue;
        }
        calls.last.store(notification.nr, Ordering::Relaxed);
        calls.count.fetch_add(1, Ordering::Relaxed);
        let mut response =
            Response { id: notification.id, flags: SECCOMP_USER_NOTIF_FLAG_CONTINUE, ..Response::default() };
        // SAFETY: as above.
        unsafe { libc::ioctl(listener.as_raw_fd(), SECCOMP_IOCTL_NOTIF_SEND, &mut response) };
    }
}

//! [`Table`]: a process-private array in hugepages, for what can be rebuilt and need not be shared (timer wheels,
//! descriptor pools).
//!
//! Invariant: `base` points to `len` initialised values until the table is dropped. Made at set-up; used as a slice.
//! Never shared with another process: for that there are regions.
#![allow(unsafe_code)]

use std::alloc::{self, Layout};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::mm::Advice;

use super::pages::{ArenaError, human};

/// Below this size a hugepage would be mostly empty.
const SMALLEST_HUGE: usize = 256 << 10;

/// Where the values lie.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Home {
    Huge,
    Heap,
    Nowhere,
}

/// An array of fixed length in hugepages if there are any (`hugepage-rs`), else in normal memory.
pub struct Table<T> {
    base: NonNull<T>,
    len: usize,
    layout: Layout,
    home: Home,
}

// SAFETY: the table owns its values.
unsafe impl<T: Send> Send for Table<T> {}
// SAFETY: as a slice of them.
unsafe impl<T: Sync> Sync for Table<T> {}

impl<T> Table<T> {
    /// `len` values, value `i` made by `make(i)` in its place.
    ///
    /// # Errors
    /// [`ArenaError`] if there is no memory.
    pub fn new(len: usize, mut make: impl FnMut(usize) -> T) -> Result<Self, ArenaError> {
        let no_memory = || {
            let bytes = human((len as u64).saturating_mul(size_of::<T>() as u64));
            ArenaError::new("table", bytes, "less", "free memory")
        };
        let layout = Layout::array::<T>(len).map_err(|_| no_memory())?;
        let (base, home) = match layout.size() {
            0 => (NonNull::dangling(), Home::Nowhere),
            _ => match huge(layout) {
                Some(base) => (base.cast(), Home::Huge),
                None => {
                    // SAFETY: the size is not 0.
                    let base = unsafe { alloc::alloc(layout) };
                    (NonNull::new(base.cast()).ok_or_else(no_memory)?, Home::Heap)
                }
            },
        };
        // Dropped with as many values as are made, should `make` panic.
        let mut table = Table { base, len: 0, layout, home };
        for index in 0..len {
            // SAFETY: `index < len`, the length of the layout; the place holds no value yet.
            unsafe { base.add(index).write(make(index)) };
            table.len = index + 1;
        }
        Ok(table)
    }

    /// True if it got hugepages.
    pub fn is_huge(&self) -> bool {
        self.home == Home::Huge
    }
}

/// Hugepages for `layout`, all of them touched; `None` if there are none or it is too small for them.
fn huge(layout: Layout) -> Option<NonNull<u8>> {
    // Parsing the size fails (with a panic inside the crate) on kernels built without hugetlb.
    if layout.size() < SMALLEST_HUGE || super::PageKind::Huge2M.free_in_pool()? == 0 {
        return None;
    }
    // SAFETY: the size is not 0.
    let base = NonNull::new(unsafe { hugepage_rs::alloc(layout) })?;
    // SAFETY: the mapping is ours and at least as long; a control group's limit shows here and not as a signal.
    let touched =
        unsafe { rustix::mm::madvise(base.as_ptr().cast(), layout.size(), Advice::LinuxPopulateWrite) };
    if touched.is_err() {
        // SAFETY: allocated above with this layout.
        unsafe { hugepage_rs::dealloc(base.as_ptr(), layout) };
        return None;
    }
    Some(base)
}

impl<T> Deref for Table<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `len` initialised values (module invariant).
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Table<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl<T: fmt::Debug> fmt::Debug for Table<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<T> Drop for Table<T> {
    fn drop(&mut self) {
        let base = self.base.as_ptr();
        // SAFETY: the values are initialised and dropped once; the memory came from where `home` says.
        unsafe {
            std::ptr::drop_in_place(std::ptr::slice_from_raw_parts_mut(base, self.len));
            match self.home {
                Home::Huge => hugepage_rs::dealloc(base.cast(), self.layout),
                Home::Heap => alloc::dealloc(base.cast(), self.layout),
                Home::Nowhere => {}
            }
        }
    }
}

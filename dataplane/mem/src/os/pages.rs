//! Kinds of pages, what may be asked for, and what the machine offers.
//!
//! Owns the words in which a missing page is explained. Called by [`super::Region`] and [`super::Arena`]. Never maps.

use std::fmt;

/// Pages a mapping really has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum PageKind {
    /// 2 MiB pages of the hugetlb pool.
    Huge2M,
    /// 1 GiB pages of the hugetlb pool.
    Huge1G,
    /// Normal pages that the kernel joined to 2 MiB.
    Thp,
    /// 4 KiB pages.
    Normal,
}

impl PageKind {
    /// Bytes of a page: the unit of a region's length and the largest alignment in it.
    pub const fn bytes(self) -> usize {
        match self {
            PageKind::Huge2M | PageKind::Thp => 2 << 20,
            PageKind::Huge1G => 1 << 30,
            PageKind::Normal => 4096,
        }
    }

    /// Where hugetlb pages of this size are counted.
    const fn pool(self) -> Option<&'static str> {
        match self {
            PageKind::Huge2M => Some("/sys/kernel/mm/hugepages/hugepages-2048kB"),
            PageKind::Huge1G => Some("/sys/kernel/mm/hugepages/hugepages-1048576kB"),
            PageKind::Thp | PageKind::Normal => None,
        }
    }

    /// Free pages of the pool less those promised to others; `None` if the kernel has no such pool.
    pub(super) fn free_in_pool(self) -> Option<u64> {
        let pool = self.pool()?;
        let number = |name: &str| -> Option<u64> {
            std::fs::read_to_string(format!("{pool}/{name}")).ok()?.trim().parse().ok()
        };
        Some(number("free_hugepages")?.saturating_sub(number("resv_hugepages").unwrap_or(0)))
    }

    /// How to get `pages` pages of this kind.
    pub(super) fn hint(self, pages: u64) -> String {
        match self {
            PageKind::Huge2M => format!("sysctl vm.nr_hugepages={pages} (or more, if others use them too)"),
            PageKind::Huge1G => format!(
                "echo {pages} > /sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages, or boot with \
                 hugepagesz=1G hugepages={pages}"
            ),
            PageKind::Thp => "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled".into(),
            PageKind::Normal => "free memory or raise the memory limit of the control group".into(),
        }
    }
}

impl fmt::Display for PageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PageKind::Huge2M => "2 MiB hugepages",
            PageKind::Huge1G => "1 GiB hugepages",
            PageKind::Thp => "transparent hugepages",
            PageKind::Normal => "normal pages",
        })
    }
}

/// Pages that are asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
pub enum PagePolicy {
    /// The best there are: hugetlb, else transparent hugepages, else normal pages; the report says what and why.
    #[default]
    Auto,
    /// 2 MiB hugetlb pages or an error.
    Huge2M,
    /// 1 GiB hugetlb pages or an error.
    Huge1G,
    /// Transparent hugepages or an error.
    Thp,
    /// Normal pages (`no-huge-pages`): for tests; performance figures do not count.
    Normal,
}

impl PagePolicy {
    /// The only kind that satisfies it; `None` for [`PagePolicy::Auto`].
    pub const fn kind(self) -> Option<PageKind> {
        match self {
            PagePolicy::Auto => None,
            PagePolicy::Huge2M => Some(PageKind::Huge2M),
            PagePolicy::Huge1G => Some(PageKind::Huge1G),
            PagePolicy::Thp => Some(PageKind::Thp),
            PagePolicy::Normal => Some(PageKind::Normal),
        }
    }
}

/// Why memory could not be had: names the attribute, what was asked, what is allowed and how to change it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{attribute}: asked {asked}, allowed {allowed}{}{hint}", if hint.is_empty() { "" } else { "; " })]
pub struct ArenaError {
    /// Attribute or object: `pages`, `bytes`, `numa_node`, `alignment`, `region`.
    pub attribute: String,
    /// What was asked for.
    pub asked: String,
    /// What is allowed, or what was found.
    pub allowed: String,
    /// How to change it.
    pub hint: String,
}

impl ArenaError {
    pub(super) fn new(
        attribute: &str,
        asked: impl fmt::Display,
        allowed: impl fmt::Display,
        hint: impl fmt::Display,
    ) -> Self {
        ArenaError {
            attribute: attribute.into(),
            asked: asked.to_string(),
            allowed: allowed.to_string(),
            hint: hint.to_string(),
        }
    }
}

/// Bytes in the unit that people say them in.
pub(super) fn human(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 30 && b % (1 << 30) == 0 => format!("{} GiB", b >> 30),
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{} MiB", b >> 20),
        b if b >= 1 << 10 && b % (1 << 10) == 0 => format!("{} KiB", b >> 10),
        b => format!("{b} bytes"),
    }
}

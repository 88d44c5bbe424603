//! The objects that control made: what listings show beside what the device knows.
//!
//! Owns cookies, owner blobs, sizes as asked for, the memory of regions, and who uses what. Invariant: an entry
//! exists exactly while the device's object does: it is added after the device made it and removed after the device
//! destroyed it. Used by the command handlers on the housekeeping thread; never talks to the device.

use std::collections::BTreeMap;
use std::sync::Arc;

use ferroce_api::appliance::{Access, Counter, CqEntry, CqHandle, Lkey, MrEntry, Page, PdEntry, PdHandle};
use ferroce_api::ids::Owner;
use ferroce_mem::os::Block;
use ferroce_verbs::{Qpn, Rkey};
use serde::Serialize;

/// A region.
pub struct Mr {
    /// Key for peers.
    pub rkey: Rkey,
    /// Protection domain.
    pub pd: PdHandle,
    /// First byte in the region's address space.
    pub iova: u64,
    /// Rights.
    pub access: Access,
    /// As given.
    pub cookie: u64,
    /// The memory.
    pub block: Arc<Block>,
}

/// A completion queue.
pub struct Cq {
    /// Where it lives.
    pub worker: u8,
    /// Entries as asked for.
    pub cqe: u32,
    /// As given.
    pub cookie: u64,
}

/// A queue pair.
pub struct Qp {
    /// Protection domain.
    pub pd: PdHandle,
    /// Where completions of sends go.
    pub send_cq: CqHandle,
    /// Where completions of receives go.
    pub recv_cq: CqHandle,
    /// As given.
    pub owner: Owner,
    /// As given.
    pub cookie: u64,
}

/// All of them, by number.
#[derive(Default)]
pub struct Objects {
    /// Protection domains: their cookies.
    pub pds: BTreeMap<PdHandle, u64>,
    /// Regions.
    pub mrs: BTreeMap<Lkey, Mr>,
    /// Completion queues.
    pub cqs: BTreeMap<CqHandle, Cq>,
    /// Queue pairs.
    pub qps: BTreeMap<Qpn, Qp>,
}

/// How much of a listing is wanted.
#[derive(Clone, Copy, Debug)]
pub struct PageLimits {
    /// First number, as the last page said.
    pub cursor: u64,
    /// Entries at most.
    pub entries: usize,
    /// Bytes of JSON at most.
    pub bytes: usize,
    /// Only what carries this cookie.
    pub cookie: Option<u64>,
}

impl PageLimits {
    fn wants(&self, cookie: u64) -> bool {
        self.cookie.is_none_or(|wanted| wanted == cookie)
    }
}

/// Bytes of JSON around the entries of a page.
const PAGE_BYTES: usize = 96;

impl Objects {
    /// A page of protection domains.
    pub fn list_pds(&self, limits: PageLimits) -> Page<PdEntry> {
        let range = self.pds.range(PdHandle(first(limits.cursor))..);
        page(
            limits,
            range,
            |(pd, _)| u64::from(pd.0),
            |(pd, cookie)| {
                if !limits.wants(*cookie) {
                    return None;
                }
                let regions = self.mrs.values().filter(|mr| mr.pd == *pd).count();
                let queues = self.qps.values().filter(|qp| qp.pd == *pd).count();
                Some(PdEntry { pd: *pd, users: saturating(regions + queues), cookie: *cookie })
            },
        )
    }

    /// A page of regions.
    pub fn list_mrs(&self, limits: PageLimits) -> Page<MrEntry> {
        let range = self.mrs.range(Lkey(first(limits.cursor))..);
        page(
            limits,
            range,
            |(lkey, _)| u64::from(lkey.0),
            |(lkey, mr)| {
                limits.wants(mr.cookie).then(|| MrEntry {
                    lkey: *lkey,
                    rkey: mr.rkey,
                    pd: mr.pd,
                    iova: mr.iova,
                    bytes: mr.block.len() as u64,
                    access: mr.access,
                    cookie: mr.cookie,
                })
            },
        )
    }

    /// A page of completion queues.
    pub fn list_cqs(&self, limits: PageLimits) -> Page<CqEntry> {
        let range = self.cqs.range(CqHandle(first(limits.cursor))..);
        page(
            limits,
            range,
            |(cq, _)| u64::from(cq.0),
            |(cq, entry)| {
                if !limits.wants(entry.cookie) {
                    return None;
                }
                let users = self
                    .qps
                    .values()
                    .map(|qp| usize::from(qp.send_cq == *cq) + usize::from(qp.recv_cq == *cq));
                Some(CqEntry {
                    cq: *cq,
                    worker: entry.worker,
                    cqe: entry.cqe,
                    users: saturating(users.sum()),
                    cookie: entry.cookie,
                })
            },
        )
    }

    /// A page of queue pairs; `describe` asks the device for each. One that is gone is left out.
    pub fn list_qps<T: Serialize>(
        &self,
        limits: PageLimits,
        mut describe: impl FnMut(Qpn, &Qp) -> Option<T>,
    ) -> Page<T> {
        let cursor = u32::try_from(limits.cursor).unwrap_or(u32::MAX);
        // Numbers have 24 bits: anything above names no queue pair.
        let range = (cursor <= 0x00ff_ffff).then(|| self.qps.range(Qpn::new(cursor)..));
        let range = range.into_iter().flatten();
        page(
            limits,
            range,
            |(qpn, _)| u64::from(qpn.get()),
            |(qpn, qp)| limits.wants(qp.cookie).then(|| describe(*qpn, qp)).flatten(),
        )
    }

    /// How many there are of each kind.
    pub fn counts(&self) -> Vec<Counter> {
        [("pd", self.pds.len()), ("mr", self.mrs.len()), ("cq", self.cqs.len()), ("qp", self.qps.len())]
            .map(|(name, count)| Counter { name: name.to_owned(), value: count as u64 })
            .to_vec()
    }
}

fn first(cursor: u64) -> u32 {
    u32::try_from(cursor).unwrap_or(u32::MAX)
}

fn saturating(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Takes entries until one of the limits is met. The page after it begins at the first entry that was not taken.
fn page<I: Iterator, T: Serialize>(
    limits: PageLimits,
    items: I,
    number: impl Fn(&I::Item) -> u64,
    mut describe: impl FnMut(I::Item) -> Option<T>,
) -> Page<T> {
    let mut out = Page { entries: Vec::new(), next: None };
    let mut bytes = PAGE_BYTES;
    for item in items {
        let at = number(&item);
        if at < limits.cursor {
            continue;
        }
        if out.entries.len() >= limits.entries {
            out.next = Some(at);
            break;
        }
        let Some(entry) = describe(item) else { continue };
        let size = serde_json::to_vec(&entry).map_or(0, |text| text.len()) + 1;
        if bytes + size > limits.bytes {
            out.next = Some(at);
            break;
        }
        bytes += size;
        out.entries.push(entry);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(count: u32) -> Objects {
        let mut objects = Objects::default();
        objects.pds.extend((0..count).map(|n| (PdHandle(n * 3), u64::from(n))));
        objects
    }

    #[test]
    fn pages_cover_everything_once() {
        let objects = numbers(100);
        for (entries, bytes) in [(1, 100_000), (7, 100_000), (1000, 400), (1000, 100_000)] {
            let mut seen = Vec::new();
            let mut cursor = 0;
            loop {
                let page = objects.list_pds(PageLimits { cursor, entries, bytes, cookie: None });
                assert!(page.entries.len() <= entries);
                assert!(serde_json::to_vec(&page).unwrap().len() <= bytes);
                seen.extend(page.entries.iter().map(|pd| pd.pd.0));
                match page.next {
                    Some(next) => assert!(next > cursor, "a page must move on"),
                    None => break,
                }
                cursor = page.next.unwrap();
            }
            assert_eq!(seen, (0..100).map(|n| n * 3).collect::<Vec<_>>());
        }
    }

    /// What carries other cookies is neither described (which asks a worker) nor does it take room in a page.
    #[test]
    fn a_cookie_finds_its_own_alone() {
        let limits = PageLimits { cursor: 0, entries: 2, bytes: 400, cookie: Some(77) };
        let page = numbers(100).list_pds(limits);
        assert_eq!(page.entries.iter().map(|pd| pd.pd.0).collect::<Vec<_>>(), [77 * 3]);
        assert_eq!(page.next, None);
        let mut objects = Objects::default();
        for n in 0..100 {
            let (pd, cq) = (PdHandle(0), CqHandle(0));
            let qp = Qp { pd, send_cq: cq, recv_cq: cq, owner: Owner::default(), cookie: n };
            objects.qps.insert(Qpn::new(n as u32), qp);
        }
        let mut asked = Vec::new();
        let page = objects.list_qps(limits, |qpn, _| {
            asked.push(qpn.get());
            Some(qpn.get())
        });
        assert_eq!((asked, page.entries), (vec![77], vec![77]));
    }

    #[test]
    fn cursors_from_nowhere_are_harmless() {
        let objects = numbers(3);
        for cursor in [7, u64::from(u32::MAX), u64::from(u32::MAX) + 1, u64::MAX] {
            let page = objects.list_pds(PageLimits { cursor, entries: 10, bytes: 10_000, cookie: None });
            assert_eq!((page.entries.len(), page.next), (0, None), "{cursor}");
            let page: Page<u8> = objects
                .list_qps(PageLimits { cursor, entries: 10, bytes: 10_000, cookie: None }, |_, _| Some(1));
            assert!(page.entries.is_empty());
        }
        assert_eq!(
            objects
                .list_pds(PageLimits { cursor: 1, entries: 10, bytes: 10_000, cookie: None })
                .entries
                .len(),
            2
        );
    }
}

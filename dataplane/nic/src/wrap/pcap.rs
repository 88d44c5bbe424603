//! [`Pcap`]: writes all frames of a port to a capture file, with times in nanoseconds.
//!
//! Owns a byte ring per queue and the file. Invariant: a worker only copies into its ring, which holds whole records;
//! a frame that finds no room is not captured, which is counted, and passes all the same. The file is written by the
//! housekeeping thread. Called by a worker ([`Pcap`]) and by housekeeping ([`CaptureFile`]). Never looks inside a
//! frame.

use std::fs::File;
use std::io::Write;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use ferroce_mem::copy::Target;
use rtrb::{Consumer, Producer, RingBuffer};

use crate::frame::{RxFrame, TxFrame};
use crate::port::{PortError, PortQueue};

/// Bytes of each queue's ring.
const RING_BYTES: usize = 4 << 20;
/// Bytes ahead of each frame: seconds, nanoseconds, length here, length on the wire.
const RECORD_HEAD: usize = 16;
/// File header: nanosecond magic, version 2.4, no zone, snap length, Ethernet.
const FILE_HEAD: [u8; 24] =
    [0x4d, 0x3c, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 1, 0, 0, 0];

/// Frames of one queue.
#[derive(Default, Debug)]
pub(crate) struct Captured {
    pub frames: AtomicU64,
    /// Passed without being captured: the ring was full.
    pub missed: AtomicU64,
}

/// The worker's end.
struct Tap {
    ring: Producer<u8>,
    /// Where a record is put together; its frame begins at [`RECORD_HEAD`].
    record: Box<[u8]>,
    captured: Arc<Captured>,
}

impl Tap {
    fn room(&mut self, len: usize) -> Option<&mut [u8]> {
        self.record.get_mut(RECORD_HEAD..)?.get_mut(..len)
    }

    /// Appends the first `len` bytes in `room` to the ring.
    fn keep(&mut self, len: usize, now: Time) {
        let lens = (len as u32).to_le_bytes();
        let head = [now.seconds.to_le_bytes(), now.nanos.to_le_bytes(), lens, lens];
        for (place, value) in self.record.chunks_exact_mut(4).zip(head) {
            place.copy_from_slice(&value);
        }
        let record = self.record.get(..RECORD_HEAD + len).unwrap_or_default();
        let kept = !record.is_empty() && self.ring.push_entire_slice(record).is_ok();
        let counter = if kept { &self.captured.frames } else { &self.captured.missed };
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
}

/// Time of day.
#[derive(Clone, Copy)]
struct Time {
    seconds: u32,
    nanos: u32,
}

impl Time {
    /// Read without a system call.
    fn now() -> Time {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // The format ends in 2106.
        Time { seconds: since.as_secs() as u32, nanos: since.subsec_nanos() }
    }
}

/// A queue whose frames are captured.
pub struct Pcap<Q> {
    inner: Q,
    tap: Option<Tap>,
    /// Bytes reserved in the tap's record for a frame to send.
    writing: usize,
}

impl<Q: PortQueue> Pcap<Q> {
    /// Wraps a queue without capturing.
    pub(crate) fn off(inner: Q) -> Pcap<Q> {
        Pcap { inner, tap: None, writing: 0 }
    }

    /// Wraps a queue whose frames are at most `longest` bytes; they go to `file`.
    pub(crate) fn new(inner: Q, longest: usize, file: &mut CaptureFile) -> Pcap<Q> {
        let (producer, consumer) = RingBuffer::new(RING_BYTES);
        let captured = Arc::new(Captured::default());
        file.lanes.push(Lane { ring: consumer, captured: captured.clone() });
        let record = vec![0; RECORD_HEAD + longest].into_boxed_slice();
        Pcap { inner, tap: Some(Tap { ring: producer, record, captured }), writing: 0 }
    }
}

impl<Q: PortQueue> PortQueue for Pcap<Q> {
    #[inline]
    fn rx_burst<F: FnMut(RxFrame<'_>)>(&mut self, max: usize, mut f: F) -> usize {
        let Some(tap) = &mut self.tap else { return self.inner.rx_burst(max, f) };
        // A frame that was being written in the record is lost to whoever receives before committing.
        self.writing = 0;
        let mut time = None;
        self.inner.rx_burst(max, |frame| {
            let now = *time.get_or_insert_with(Time::now);
            let len = frame.len();
            if let Some(room) = tap.room(len) {
                let (head, rest) = room.split_at_mut(frame.head.len());
                head.copy_from_slice(frame.head);
                frame.rest.copy_to(rest);
                tap.keep(len, now);
            }
            f(frame);
        })
    }

    #[inline]
    fn tx_reserve(&mut self, len: usize) -> Option<TxFrame<'_>> {
        let Some(tap) = &mut self.tap else { return self.inner.tx_reserve(len) };
        // The port's own buffer can't be read back, so the frame is written here and copied when it is committed. Room
        // that there is now there is then: nothing else is reserved in between.
        self.inner.tx_reserve(len)?;
        let room = tap.room(len)?;
        self.writing = len;
        Some(TxFrame { buf: Target::from_slice(room) })
    }

    #[inline]
    fn tx_commit(&mut self, len: usize) {
        let Some(tap) = &mut self.tap else { return self.inner.tx_commit(len) };
        let reserved = std::mem::take(&mut self.writing);
        if 0 < len
            && len <= reserved
            && let Some(mut frame) = self.inner.tx_reserve(reserved)
            && let Some(bytes) = tap.record.get(RECORD_HEAD..RECORD_HEAD + len)
        {
            frame.buf.write(0, bytes);
            tap.keep(len, Time::now());
        }
        // A wrong length is refused and counted there.
        self.inner.tx_commit(len);
    }

    #[inline]
    fn tx_flush(&mut self) {
        self.inner.tx_flush();
    }

    fn wait_fds(&self) -> Vec<BorrowedFd<'_>> {
        self.inner.wait_fds()
    }

    fn arm_wakeup(&mut self) -> bool {
        self.inner.arm_wakeup()
    }

    fn disarm_wakeup(&mut self) {
        self.inner.disarm_wakeup();
    }
}

/// The file's end of one queue.
struct Lane {
    ring: Consumer<u8>,
    captured: Arc<Captured>,
}

/// A capture file and the rings that feed it.
pub(crate) struct CaptureFile {
    path: PathBuf,
    file: File,
    lanes: Vec<Lane>,
    /// Records of one round and where they lie: kept, to be used again.
    bytes: Vec<u8>,
    order: Vec<(u64, std::ops::Range<usize>)>,
    /// Why nothing more is written.
    broken: Option<PortError>,
}

impl CaptureFile {
    /// Makes the file, readable by its owner only, in place of an older one.
    pub fn create(path: &Path) -> Result<CaptureFile, PortError> {
        let mut options = File::options();
        options.write(true).create(true).truncate(true).mode(0o600);
        let made = options.open(path).and_then(|mut file| file.write_all(&FILE_HEAD).map(|()| file));
        let file = made.map_err(|error| refuse(path, error))?;
        let (bytes, order) = (Vec::new(), Vec::new());
        Ok(CaptureFile { path: path.into(), file, lanes: Vec::new(), bytes, order, broken: None })
    }

    /// Writes what the workers captured, in order of time. Called by housekeeping.
    pub fn drain(&mut self) {
        self.bytes.clear();
        self.order.clear();
        for lane in &mut self.lanes {
            let start = self.bytes.len();
            let waiting = lane.ring.slots();
            if let Ok(chunk) = lane.ring.read_chunk(waiting) {
                let (first, second) = chunk.as_slices();
                self.bytes.extend_from_slice(first);
                self.bytes.extend_from_slice(second);
                chunk.commit_all();
            }
            // Workers push whole records, so that is what lies here.
            let mut at = start;
            while let Some((time, len)) = self.bytes.get(at..).and_then(record_at) {
                self.order.push((time, at..at + len));
                at += len;
            }
            debug_assert_eq!(at, self.bytes.len(), "a part of a record in the ring");
        }
        if self.broken.is_some() || self.order.is_empty() {
            return;
        }
        // Stable: records of one queue stay in order.
        self.order.sort_by_key(|(time, _)| *time);
        let mut out = Vec::with_capacity(self.bytes.len());
        for (_, range) in &self.order {
            out.extend_from_slice(self.bytes.get(range.clone()).unwrap_or_default());
        }
        if let Err(error) = self.file.write_all(&out) {
            self.broken = Some(refuse(&self.path, error));
        }
    }

    /// Why the capture ended early, for example a full disk.
    pub fn problem(&self) -> Option<&PortError> {
        self.broken.as_ref()
    }

    /// Captured and missed frames.
    pub fn counts(&self) -> (u64, u64) {
        let sum = |counter: fn(&Captured) -> &AtomicU64| {
            self.lanes.iter().map(|lane| counter(&lane.captured).load(Ordering::Relaxed)).sum()
        };
        (sum(|captured| &captured.frames), sum(|captured| &captured.missed))
    }
}

impl Drop for CaptureFile {
    fn drop(&mut self) {
        self.drain();
    }
}

fn refuse(path: &Path, error: std::io::Error) -> PortError {
    PortError {
        attribute: "pcap".into(),
        asked: path.display().to_string(),
        allowed: error.to_string(),
        hint: "name a file in a writable folder with room".into(),
    }
}

/// Time and length of the record that begins here, if there is a whole one.
fn record_at(bytes: &[u8]) -> Option<(u64, usize)> {
    let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let (seconds, nanos, len) = (word(0)?, word(4)?, word(8)? as usize);
    let whole = RECORD_HEAD + len;
    (bytes.len() >= whole).then_some((u64::from(seconds) << 32 | u64::from(nanos), whole))
}

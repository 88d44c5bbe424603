//! The image of a queue pair: everything that it is, as bytes, for a move to another worker, a live restart or a
//! stand-by.
//!
//! Owns the format: magic and version, then the fields of each part in a fixed order, little-endian. Strict: a value
//! that the queue pair itself could never have is refused, whatever the bytes are, so that what is imported keeps every
//! invariant. A field that is added to a part does not compile until it is in the image (destructuring on the way out,
//! literals on the way in). Places in scatter lists are found anew. Times are of the caller's clock, which both ends of
//! a move must share.

mod attr;
mod queues;
mod values;

use alloc::vec::Vec;

use crate::notice::Notices;
use crate::qp::{Base, Machine, Qp};
use crate::rc::Rc;
use crate::unreliable::{Sender, Uc, UcReceiver, Ud, UdReceiver};
use ferroce_verbs::{PathMtu, QpInitAttr, QpState, QpType};
use ferroce_wire::{Qpn, Service};

pub(crate) use queues::{load_recv_queue, load_send_queue, save_recv_queue, save_send_queue};

/// What every image starts with; the last byte is the version.
const MAGIC: [u8; 3] = *b"fQP";
const VERSION: u8 = 1;

/// Scatter/gather entries that the queues of an imported queue pair may have in all, and inline bytes.
const MAX_SGES: u64 = 1 << 22;
const MAX_INLINE: u64 = 1 << 26;

/// Why bytes are not the image of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ImportError {
    /// The bytes don't start as an image does.
    NoImage,
    /// The image is of another version.
    Version {
        /// Its version.
        found: u8,
        /// Ours.
        known: u8,
    },
    /// The image ends early.
    Truncated,
    /// Bytes follow the image.
    Trailing,
    /// A part has a value that it can't have.
    Invalid(&'static str),
    /// A queue would need more memory than an import may ask for.
    TooLarge(&'static str),
}

impl core::fmt::Display for ImportError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            ImportError::NoImage => f.write_str("these bytes are not the image of a queue pair"),
            ImportError::Version { found, known } => {
                write!(f, "the image has version {found}; this program knows {known}")
            }
            ImportError::Truncated => f.write_str("the image ends early"),
            ImportError::Trailing => f.write_str("bytes follow the image"),
            ImportError::Invalid(what) => write!(f, "{what}: a value that no queue pair has"),
            ImportError::TooLarge(what) => write!(f, "{what}: more than an import may ask for"),
        }
    }
}

impl core::error::Error for ImportError {}

/// Takes bytes off an image.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn bytes(&mut self, len: usize) -> Result<&'a [u8], ImportError> {
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or(ImportError::Truncated)?;
        self.rest = rest;
        Ok(bytes)
    }
}

/// A value of an image.
pub(crate) trait Image: Sized {
    fn save(&self, out: &mut Vec<u8>);
    fn load(from: &mut Reader<'_>) -> Result<Self, ImportError>;
}

/// A struct all of whose fields are values of the image.
macro_rules! image_of {
    ($type:ty { $($field:ident),* $(,)? }) => {
        impl $crate::image::Image for $type {
            fn save(&self, out: &mut alloc::vec::Vec<u8>) {
                let Self { $($field),* } = self;
                $($crate::image::Image::save($field, out);)*
            }
            fn load(from: &mut $crate::image::Reader<'_>) -> Result<Self, $crate::image::ImportError> {
                Ok(Self { $($field: $crate::image::Image::load(from)?),* })
            }
        }
    };
}
pub(crate) use image_of;

/// `Ok` if it holds.
pub(crate) fn ensure(holds: bool, what: &'static str) -> Result<(), ImportError> {
    if holds { Ok(()) } else { Err(ImportError::Invalid(what)) }
}

/// Appends the image of `qp`.
pub(crate) fn export(qp: &Qp, out: &mut Vec<u8>) {
    out.extend_from_slice(&MAGIC);
    VERSION.save(out);
    let Qp { base, machine } = qp;
    let Base { qpn, attr, state, init, rtr, rts, sq, rq, counters, notices, comm_est } = base;
    qpn.save(out);
    attr.save(out);
    state.save(out);
    init.save(out);
    rtr.save(out);
    rts.save(out);
    save_send_queue(sq, out);
    save_recv_queue(rq, out);
    counters.save(out);
    notices.save(out);
    comm_est.save(out);
    match machine {
        Machine::Rc(rc) => rc.save(out),
        Machine::Uc(Uc { sender, receiver }) => {
            sender.save(out);
            receiver.save(out);
        }
        Machine::Ud(Ud { sender, receiver: UdReceiver { mtu: _ } }) => sender.save(out),
    }
}

/// The queue pair of an image.
pub(crate) fn import(image: &[u8]) -> Result<Qp, ImportError> {
    let mut from = Reader { rest: image };
    if from.bytes(MAGIC.len()).ok() != Some(&MAGIC) {
        return Err(ImportError::NoImage);
    }
    match u8::load(&mut from)? {
        VERSION => {}
        found => return Err(ImportError::Version { found, known: VERSION }),
    }
    let base = load_base(&mut from)?;
    let machine = match base.attr.qp_type {
        QpType::Rc => Machine::Rc(Rc::load(&base, &mut from)?),
        QpType::Uc => {
            let sender = Sender::load(Service::Uc, &base, &mut from)?;
            Machine::Uc(Uc { sender, receiver: UcReceiver::load(&base, &mut from)? })
        }
        QpType::Ud => {
            let sender = Sender::load(Service::Ud, &base, &mut from)?;
            Machine::Ud(Ud { sender, receiver: UdReceiver { mtu: mtu_of(&base) } })
        }
    };
    if !from.rest.is_empty() {
        return Err(ImportError::Trailing);
    }
    Ok(Qp { base, machine })
}

/// The path MTU that the parts of a queue pair work with.
pub(crate) fn mtu_of(base: &Base) -> PathMtu {
    base.rtr.map_or(PathMtu::Mtu256, |rtr| rtr.path_mtu)
}

fn load_base(from: &mut Reader<'_>) -> Result<Base, ImportError> {
    let (qpn, attr) = <(Qpn, QpInitAttr)>::load(from)?;
    check_sizes(&attr)?;
    let mut base = Base::new(qpn, &attr);
    ensure(base.attr == attr, "cap")?;
    base.state = Image::load(from)?;
    base.init = Image::load(from)?;
    base.rtr = Image::load(from)?;
    base.rts = Image::load(from)?;
    attr::check(&base)?;
    load_send_queue(&mut base, from)?;
    load_recv_queue(&mut base, from)?;
    base.counters = Image::load(from)?;
    base.notices = Notices::load(from)?;
    base.comm_est = Image::load(from)?;
    check_notices(&base)?;
    if matches!(base.state, QpState::Reset) {
        ensure(base.sq.queue.len() == 0 && base.rq.queue.len() == 0, "qp_state")?;
    }
    Ok(base)
}

/// Nothing waits to be told that could not have happened.
fn check_notices(base: &Base) -> Result<(), ImportError> {
    let Notices { comm_est, drained, last_wqe, fatal } = &base.notices;
    let failed = base.state == QpState::Err;
    let last_wqe_right = !last_wqe || failed && base.attr.srq.is_some();
    let comm_est_right = (!comm_est || base.comm_est) && (!base.comm_est || base.rtr.is_some());
    ensure(last_wqe_right && comm_est_right, "a notice")?;
    ensure((fatal.is_none() || failed) && (!drained || base.rts.is_some()), "a notice")
}

/// Bounds what an image can make us allocate.
fn check_sizes(attr: &QpInitAttr) -> Result<(), ImportError> {
    let cap = &attr.cap;
    let entries =
        |wr: u32, each: u32| u64::from(wr.max(8).next_power_of_two()).saturating_mul(u64::from(each));
    ensure(cap.max_send_wr <= crate::qp::MAX_WR && cap.max_recv_wr <= crate::qp::MAX_WR, "cap.max_wr")?;
    let sges =
        entries(cap.max_send_wr, cap.max_send_sge).saturating_add(entries(cap.max_recv_wr, cap.max_recv_sge));
    if sges > MAX_SGES {
        return Err(ImportError::TooLarge("cap.max_sge"));
    }
    if entries(cap.max_send_wr, cap.max_inline_data) > MAX_INLINE {
        return Err(ImportError::TooLarge("cap.max_inline_data"));
    }
    Ok(())
}

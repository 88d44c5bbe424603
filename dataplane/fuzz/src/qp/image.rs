//! Images of queue pairs: any bytes, and real images that were changed.
//!
//! What is accepted must be an image of itself and live on as any queue pair does.

use ferroce_transport::Qp;
use ferroce_verbs::{QpCap, QpInitAttr, QpType, SrqInitAttr};
use ferroce_wire::Qpn;

use super::frame::usable;
use super::host::Host;
use super::input::Input;
use super::setup::{SRQ, Setup};
use super::steps;

/// Queues of more bytes than this are made and dropped, and nothing more.
const MOST_BYTES: u64 = 1 << 21;

/// Any bytes, or a real image after some steps and some changes; then steps.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let mode = input.u8();
    let qp_type = [QpType::Rc, QpType::Rc, QpType::Uc, QpType::Ud][usize::from(mode >> 4 & 3)];
    let mut host = Host::new(Setup::new(qp_type, &mut input));
    let mut image = Vec::new();
    if mode & 15 == 15 {
        let len = input.u16().into();
        image.extend_from_slice(input.bytes(len));
    } else {
        steps::bring_up(&mut host, &mut input);
        let (count, mut past) = (input.below(24), steps::Past::default());
        for _ in 0..count {
            steps::step(&mut host, &mut past, &mut input);
        }
        host.qp.export(&mut image);
        for _ in 0..input.below(8) {
            change(&mut image, &mut input);
        }
    }
    let Ok(qp) = Qp::import(&image) else { return };
    let mut again = Vec::new();
    qp.export(&mut again);
    assert!(image == again, "an accepted image is the image of what it makes");
    let cap = qp.info().cap;
    let bytes = |wr: u32, each: u64| u64::from(wr) * each;
    let sends = bytes(cap.max_send_wr, 16 * u64::from(cap.max_send_sge) + u64::from(cap.max_inline_data));
    if sends + bytes(cap.max_recv_wr, 16 * u64::from(cap.max_recv_sge)) > MOST_BYTES {
        return;
    }
    if qp.info().qp_type != QpType::Ud && qp.av().is_some_and(|av| !usable(av)) {
        return;
    }
    host.adopt(qp);
    steps::run(host, &mut input);
}

/// Changes a few bytes of an image.
fn change(image: &mut Vec<u8>, input: &mut Input<'_>) {
    let at = usize::from(input.u16()) % image.len().max(1);
    match input.below(8) {
        0..=2 => image[at] ^= input.u8(),
        3..=5 => {
            let by = u32::from(input.u8()).wrapping_sub(0x80);
            if let Some(place) = image.get_mut(at..at + 4) {
                let was = u32::from_le_bytes([place[0], place[1], place[2], place[3]]);
                place.copy_from_slice(&was.wrapping_add(by).to_le_bytes());
            }
        }
        6 => {
            let end = (at + input.below(16)).min(image.len());
            image.drain(at..end);
        }
        _ => {
            let len = input.below(16);
            image.splice(at..at, input.bytes(len).iter().copied());
        }
    }
}

impl Host {
    /// A queue pair of unknown origin takes the place of ours.
    fn adopt(&mut self, qp: Qp) {
        self.replace(qp);
        let info = self.qp.info();
        self.setup.attr = QpInitAttr {
            qp_type: info.qp_type,
            pd: info.pd,
            send_cq: info.send_cq,
            recv_cq: info.recv_cq,
            cap: info.cap,
            sq_sig_all: info.sq_sig_all,
            srq: info.srq,
        };
        if info.srq.is_none() {
            if let Some(srq) = &mut self.srq {
                srq.clear(&self.memory);
            }
            self.model.srq.clear();
            self.srq = None;
        } else if self.srq.is_none() {
            let max_sge = 3.min(info.cap.max_recv_sge);
            let (max_wr, pd) = (self.setup.srq_wr, info.pd);
            self.srq = Some(ferroce_transport::Srq::new(SRQ, &SrqInitAttr { pd, max_wr, max_sge, limit: 0 }));
        }
        // As many as a queue pair takes from a shared queue, or its own.
        let room = if info.srq.is_some() {
            let attr = QpInitAttr { cap: QpCap::default(), ..self.setup.attr };
            Qp::new(Qpn::new(1), &attr).recv_queue_free()
        } else {
            info.cap.max_recv_wr
        };
        let sends = info.cap.max_send_wr - self.qp.send_queue_free();
        self.model.adopt(&info, sends, room - self.qp.recv_queue_free());
        self.counted = false;
    }
}

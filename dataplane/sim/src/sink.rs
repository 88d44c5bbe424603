//! Builds the frame of a packet, as the engine does: headers by `wire`, payload out of registered memory.

use crate::plants::{self, Memo, Planted};
use ferroce_mem::MrSlice;
use ferroce_transport::FrameSink;
use ferroce_verbs::AddressVector;
use ferroce_wire::{Bth, Eth, Ext, Headers, Ip, emit};

/// Builds one frame.
#[derive(Default)]
pub(crate) struct Sink {
    /// The queue pair's path.
    pub(crate) av: Option<AddressVector>,
    /// Says that there is no room.
    pub(crate) refuse: bool,
    /// Headers, payload and pad, without ICRC.
    pub(crate) frame: Vec<u8>,
    /// Headers and payload length, once a packet was begun and could be emitted.
    pub(crate) headers: Option<(Headers, usize)>,
    /// A planted fault, the path MTU, and what it remembers of the queue pair.
    pub(crate) twist: Option<(Planted, u32, Memo)>,
    /// The packet must not leave.
    pub(crate) silent: bool,
    /// Payload bytes given.
    pub(crate) filled: usize,
}

impl FrameSink for Sink {
    fn address(&mut self, av: &AddressVector) -> bool {
        self.av = Some(*av);
        true
    }
    fn begin(&mut self, bth: &Bth, ext: &Ext, payload_len: usize) -> bool {
        let (Some(av), false) = (self.av, self.refuse) else { return false };
        let (mut bth, mut ext) = (*bth, *ext);
        if let Some((planted, mtu, memo)) = &mut self.twist {
            self.silent = plants::silences(*planted, memo, &bth);
            plants::outgoing(*planted, memo, *mtu, &mut bth, &mut ext);
        }
        let headers = headers_of(&av, &bth, &ext);
        let offset = emit::header_bytes(&headers);
        // Pad bytes stay zero; payload is written over the 0xa5.
        self.frame = vec![0xa5; offset + payload_len];
        match emit::emit(&headers, payload_len, &mut self.frame) {
            Ok(_) => {
                self.frame.resize(offset + payload_len + emit::pad_of(payload_len), 0);
                self.headers = Some((headers, payload_len));
            }
            // Seen by `launch`, which finds no headers.
            Err(_) => self.headers = None,
        }
        true
    }
    fn payload(&mut self, slice: MrSlice<'_>) {
        let at = self.place();
        if let Some(room) = self.frame.get_mut(at..) {
            slice.copy_out(room);
        }
        self.filled += slice.len();
    }
    fn inline(&mut self, bytes: &[u8]) {
        let at = self.place();
        if let Some(room) = self.frame.get_mut(at..at + bytes.len()) {
            room.copy_from_slice(bytes);
        }
        self.filled += bytes.len();
    }
}

impl Sink {
    fn place(&self) -> usize {
        self.headers.map_or(usize::MAX / 2, |(headers, _)| emit::header_bytes(&headers) + self.filled)
    }
}

fn headers_of(av: &AddressVector, bth: &Bth, ext: &Ext) -> Headers {
    let ip = match (av.sgid.to_ip(), av.dgid.to_ip()) {
        (std::net::IpAddr::V4(src), std::net::IpAddr::V4(dst)) => {
            Ip::V4 { src, dst, tos: av.traffic_class, ttl: av.hop_limit, id: 0, frag: 0x4000 }
        }
        _ => Ip::V6 {
            src: av.sgid.0.into(),
            dst: av.dgid.0.into(),
            traffic_class: av.traffic_class,
            flow_label: av.flow_label,
            hop_limit: av.hop_limit,
        },
    };
    Headers {
        eth: Eth { dst: av.dmac, src: av.smac, vlan: av.vlan },
        ip,
        udp_src: av.udp_src,
        udp_checksum: 0,
        bth: *bth,
        ext: *ext,
    }
}

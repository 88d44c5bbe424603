//! Packet scripts: one queue pair, packets and work typed in, packets and completions printed.
//!
//! A line that starts in column 0 is a command; the lines indented under it are what the queue pair did. Empty lines
//! and lines with `#` are kept. Commands:
//!
//! ```text
//! qp [type=uc|ud mtu= sq_psn= rq_psn= timeout= retry= rnr_retry= rnr_timer= rd= dest_rd= state=rtr|init access=none
//!     depth= srq= limit= qkey= credits] (`credits` prints the codes of ACKs)
//! post send|send_imm|send_inv|write|write_imm|read LEN [va= key= imm= fence unsignaled se inline lkey=]
//! post cmp_swap|fetch_add LEN [va= key= compare= swap= add=] | bind LEN [va= key= lkey= rights=rwa] | local_inv 0 [key=]
//! post recv LEN [lkey=] (to the shared receive queue, if there is one)
//! post ... [to= qkey= ah=none|otherpd|mixed v6] (UD)
//! rx NAME psn= [len= extra= va= dma= key= imm= timer= credits= msn= pad= from= pkey= compare= swap= add= was= ackreq se]
//! rx ... [qkey= src= v6 group] (UD) [aeth=rnr|nak|reserved] (READ responses and results of atomics)
//! tick 10ms | modify err|sqd|rts|reset|sqe_rts | dereg NAME | busy NAME | room N | peek OFFSET LEN | fill BYTE | show | limit N
//! turns N (the next command lets the queue pair send so often only, as a worker with a budget does)
//! change [access= pkey= qkey= timeout= retry= rnr_retry= rd= dest_rd= rnr_timer= av]
//! ```
//!
//! Remote keys by name: `main` (all rights), `noread`, `nowrite`, `otherpd`, `short` (100 bytes), `bad`, and the windows
//! `win` and `win2` (their keys after the first bind), `otherwin` (of another protection domain). A packet's
//! payload bytes all equal the low byte of its PSN.

use ferroce_mem::{Access, Lkey, MrInfo, PdId};
use ferroce_transport::{Completion, Instant, Notice, Transmit};
use ferroce_verbs::{QpChange, QpModify, QpType, SendFlags, SendOp, SendWr, Sge, WcFlags, WcStatus};
use ferroce_wire::icrc::check_frame;
use ferroce_wire::{
    Aeth, AtomicEth, Bth, Deth, DmaLen, Ext, Gid, Imm, Msn, NakCode, Opcode, PathMtu, Pkey, Psn, Qkey, Qpn,
    RemoteAddr, Reth, Rkey, Syndrome,
};

use crate::support::{
    A_QPN, B_QPN, BAD_LKEY, BAD_RKEY, Host, IOVA, PD, QKEY, Setup, av, describe, dest, headers, op_name, seal,
};

/// Runs a script and returns it with what happened filled in.
pub fn run(text: &str) -> String {
    let mut world: Option<World> = None;
    let mut out = String::new();
    for line in text.lines().filter(|line| !line.starts_with("    ")) {
        out.push_str(line);
        out.push('\n');
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let words = Words::new(line);
        if words.verb() == "qp" {
            world = Some(World::new(&words));
            continue;
        }
        let world = world.as_mut().expect("a script starts with qp");
        world.command(&words);
        for line in world.out.drain(..) {
            out.push_str("    ");
            out.push_str(&line);
            out.push('\n');
        }
    }
    out
}

struct Words<'a>(Vec<&'a str>);

impl<'a> Words<'a> {
    fn new(line: &'a str) -> Self {
        Words(line.split_whitespace().collect())
    }
    fn verb(&self) -> &'a str {
        self.0[0]
    }
    fn at(&self, index: usize) -> &'a str {
        self.0.get(index).unwrap_or_else(|| panic!("word {index} missing in {:?}", self.0))
    }
    fn has(&self, flag: &str) -> bool {
        self.0.contains(&flag)
    }
    fn text(&self, key: &str) -> Option<&'a str> {
        self.0.iter().find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
    }
    fn number(&self, key: &str) -> Option<u32> {
        let value = self.text(key)?;
        Some(value.parse().unwrap_or_else(|_| panic!("{key}={value}")))
    }
    fn big(&self, key: &str) -> u64 {
        self.text(key).map_or(0, |value| value.parse().unwrap_or_else(|_| panic!("{key}={value}")))
    }
    fn byte(&self, key: &str) -> Option<u8> {
        self.number(key).map(|n| u8::try_from(n).expect("fits a byte"))
    }
}

struct World {
    host: Host,
    keys: Vec<(&'static str, MrInfo)>,
    windows: Vec<(&'static str, Rkey)>,
    credits: bool,
    /// Packets that may still be asked for, in the next command and in this one.
    next_turns: Option<u32>,
    turns: Option<u32>,
    start: Instant,
    now: Instant,
    out: Vec<String>,
}

impl World {
    fn new(words: &Words<'_>) -> World {
        let d = Setup::default();
        let mut setup = Setup {
            mtu: words.number("mtu").map_or(d.mtu, |m| PathMtu::from_bytes(m).expect("a path MTU")),
            sq_psn: words.number("sq_psn").unwrap_or(d.sq_psn),
            rq_psn: words.number("rq_psn").unwrap_or(d.rq_psn),
            timeout: words.byte("timeout").unwrap_or(d.timeout),
            retry_cnt: words.byte("retry").unwrap_or(d.retry_cnt),
            rnr_retry: words.byte("rnr_retry").unwrap_or(d.rnr_retry),
            min_rnr_timer: words.byte("rnr_timer").unwrap_or(d.min_rnr_timer),
            max_rd_atomic: words.byte("rd").unwrap_or(d.max_rd_atomic),
            max_dest_rd_atomic: words.byte("dest_rd").unwrap_or(d.max_dest_rd_atomic),
            ..d
        };
        if words.text("access") == Some("none") {
            setup.access = Access::empty();
        }
        setup.qp_type = match words.text("type") {
            None | Some("rc") => QpType::Rc,
            Some("uc") => QpType::Uc,
            Some("ud") => QpType::Ud,
            Some(other) => panic!("type {other}"),
        };
        setup.srq = words.number("srq");
        setup.qkey = words.number("qkey").map_or(QKEY, Qkey);
        if let Some(depth) = words.number("depth") {
            setup.cap.max_send_wr = depth;
            setup.cap.max_recv_wr = depth;
        }
        let mut host = Host::new(A_QPN, &setup);
        let now = Instant(1_000_000);
        host.qp.modify(now, &QpModify::ToInit(setup.init())).expect("INIT");
        host.dest = Some(dest(1, 2, B_QPN));
        if let (Some(srq), Some(limit)) = (&mut host.srq, words.number("limit")) {
            srq.set_limit(limit);
        }
        if words.text("state") != Some("init") {
            host.qp.modify(now, &QpModify::ToRtr(setup.rtr(1, 2, B_QPN, setup.rq_psn))).expect("RTR");
        }
        if words.text("state").is_none() {
            host.qp.modify(now, &QpModify::ToRts(setup.rts(setup.sq_psn))).expect("RTS");
        }
        let (write, read) = (Access::LOCAL_WRITE | Access::REMOTE_WRITE, Access::REMOTE_READ);
        let mut register = |pd, access, len| host.buf.register(&mut host.memory, pd, access, 0, len);
        let mut keys = vec![
            ("noread", register(PD, write, 1 << 16)),
            ("nowrite", register(PD, read, 1 << 16)),
            ("otherpd", register(PdId(99), write | read, 1 << 16)),
            ("short", register(PD, write | read | Access::REMOTE_ATOMIC, 100)),
        ];
        keys.push(("main", host.mr));
        let mut window = |pd| Rkey(host.memory.alloc_window(pd).expect("a window").rkey.0 + 1);
        let windows = vec![("win", window(PD)), ("win2", window(PD)), ("otherwin", window(PdId(99)))];
        World {
            host,
            keys,
            windows,
            credits: words.has("credits"),
            next_turns: None,
            turns: None,
            start: now,
            now,
            out: Vec::new(),
        }
    }

    fn info(&self, name: &str) -> Option<MrInfo> {
        self.keys.iter().find(|(n, _)| *n == name).map(|(_, info)| *info)
    }
    fn rkey(&self, words: &Words<'_>) -> Rkey {
        match words.text("key") {
            None => self.host.mr.rkey,
            Some("bad") => BAD_RKEY,
            Some(name) if name.contains("win") => {
                self.windows.iter().find(|(n, _)| *n == name).unwrap_or_else(|| panic!("window {name}")).1
            }
            Some(name) => self.info(name).unwrap_or_else(|| panic!("key {name}")).rkey,
        }
    }
    fn lkey(&self, words: &Words<'_>) -> Lkey {
        match words.text("lkey") {
            None => self.host.mr.lkey,
            Some("bad") => BAD_LKEY,
            Some(name) => self.info(name).unwrap_or_else(|| panic!("key {name}")).lkey,
        }
    }

    fn command(&mut self, words: &Words<'_>) {
        self.host.settle();
        if words.verb() == "turns" {
            self.next_turns = Some(words.at(1).parse().expect("a number"));
            return;
        }
        self.turns = self.next_turns.take();
        match words.verb() {
            "post" => self.post(words),
            "rx" => self.rx(words),
            "tick" => return self.tick(parse_time(words.at(1))),
            "modify" => self.modify(words.at(1)),
            "room" => self.host.room = words.at(1).parse().expect("a number"),
            "fill" => self.host.buf.fill(words.at(1).parse().expect("a byte")),
            "peek" => self.peek(words),
            "busy" => {
                let lkey = self.info(words.at(1)).expect("a key").lkey;
                self.host.qp.release(&self.host.memory);
                let busy = self.host.memory.close(lkey).err();
                self.host.memory.reopen(lkey);
                self.out.push(busy.map_or("idle".into(), |why| format!("{why:?}")));
            }
            "show" => self.show(),
            "change" => self.change(words),
            "limit" => {
                let limit = words.at(1).parse().expect("a number");
                self.host.srq.as_mut().expect("a shared receive queue").set_limit(limit);
            }
            "dereg" => {
                let lkey = self.info(words.at(1)).expect("a key").lkey;
                self.host.memory.revoke(lkey).expect("registered");
            }
            other => panic!("no command {other}"),
        }
        self.drain();
    }

    fn post(&mut self, words: &Words<'_>) {
        let length: u32 = words.at(2).parse().expect("a length");
        let sge = Sge { addr: IOVA, length, lkey: self.lkey(words) };
        let local = matches!(words.at(1), "bind" | "local_inv");
        let sges = [sge];
        let sges = if local && !words.has("list") { &[] } else { &sges[..] };
        if words.at(1) == "recv" {
            if let Err(error) = self.host.try_recv(sges) {
                self.out.push(format!("refused {error:?}"));
            }
            return;
        }
        let remote_addr = RemoteAddr(IOVA + u64::from(words.number("va").unwrap_or(0)));
        let rkey = self.rkey(words);
        let imm = imm(words);
        let op = match words.at(1) {
            "send" => SendOp::Send,
            "send_imm" => SendOp::SendImm(imm),
            "write" => SendOp::Write { remote_addr, rkey },
            "write_imm" => SendOp::WriteImm { remote_addr, rkey, imm },
            "read" => SendOp::Read { remote_addr, rkey },
            "send_inv" => SendOp::SendInv { rkey },
            "cmp_swap" => {
                SendOp::CmpSwap { remote_addr, rkey, compare: words.big("compare"), swap: words.big("swap") }
            }
            "fetch_add" => SendOp::FetchAdd { remote_addr, rkey, add: words.big("add") },
            "bind" => SendOp::BindMw {
                rkey,
                mr: sge.lkey,
                addr: remote_addr.0,
                len: length.into(),
                access: rights(words.text("rights").unwrap_or("rwa")),
            },
            "local_inv" => SendOp::LocalInv { rkey },
            other => panic!("no operation {other}"),
        };
        let mut flags = SendFlags::SIGNALED;
        flags.set(SendFlags::SIGNALED, !words.has("unsignaled"));
        flags.set(SendFlags::FENCE, words.has("fence"));
        flags.set(SendFlags::SOLICITED, words.has("se"));
        flags.set(SendFlags::INLINE, words.has("inline"));
        let mut ud = self.host.dest.filter(|_| words.text("ah") != Some("none"));
        if let Some(dest) = &mut ud {
            dest.remote_qpn = words.number("to").map_or(dest.remote_qpn, Qpn::new);
            dest.remote_qkey = words.number("qkey").map_or(dest.remote_qkey, Qkey);
            match words.text("ah") {
                Some("otherpd") => dest.ah.pd = PdId(99),
                Some("mixed") => dest.ah.av.sgid = v6(1),
                _ => {}
            }
            if words.has("v6") {
                (dest.ah.av.sgid, dest.ah.av.dgid) = (v6(1), v6(2));
            }
        }
        let bytes = vec![0xee; length as usize];
        let inline = words.has("inline");
        let wr = SendWr {
            wr_id: self.host.id(),
            op,
            sg_list: if inline { &[] } else { sges },
            inline: if inline { &bytes } else { &[] },
            flags,
            ud: ud.as_ref(),
        };
        if let Err(error) = self.host.qp.post_send(&wr, &self.host.memory) {
            self.out.push(format!("refused {error:?}"));
        }
    }

    fn rx(&mut self, words: &Words<'_>) {
        let (opcode, syndrome) = parse_name(words.at(1), words);
        let psn = words.number("psn").expect("psn=");
        let mut bth = Bth::new(opcode, A_QPN, Psn::new(psn));
        bth.ack_req = words.has("ackreq");
        bth.solicited = words.has("se");
        if let Some(pkey) = words.number("pkey") {
            bth.pkey = Pkey(pkey as u16);
        }
        let info = opcode.info();
        let len = words.number("len").unwrap_or(0);
        let mut ext = Ext::NONE;
        if info.reth {
            let addr = RemoteAddr(IOVA + u64::from(words.number("va").unwrap_or(0)));
            let dma = DmaLen(words.number("dma").unwrap_or(len));
            ext.reth = Some(Reth { addr, rkey: self.rkey(words), len: dma });
        }
        if info.imm {
            ext.imm = Some(imm(words));
        }
        if info.inv {
            ext.invalidate = Some(self.rkey(words));
        }
        if info.aeth {
            let syndrome = match words.text("aeth") {
                None => syndrome,
                Some("rnr") => Syndrome::RnrNak { timer: 1 },
                Some("nak") => Syndrome::Nak(NakCode::RemoteAccess),
                Some("reserved") => Syndrome::Reserved(0x40),
                Some(other) => panic!("no AETH {other}"),
            };
            ext.aeth = Some(Aeth { syndrome, msn: Msn::new(words.number("msn").unwrap_or(0)) });
        }
        if info.atomic_ack {
            ext.atomic_ack = Some(words.big("was"));
        }
        if info.atomic {
            let operand = if opcode == Opcode::RcCmpSwap { "swap" } else { "add" };
            ext.atomic = Some(AtomicEth {
                addr: RemoteAddr(IOVA + u64::from(words.number("va").unwrap_or(0))),
                rkey: self.rkey(words),
                swap_or_add: words.big(operand),
                compare: words.big("compare"),
            });
        }
        if info.deth {
            let qkey = words.number("qkey").map_or(QKEY, Qkey);
            let src_qpn = words.number("src").map_or(B_QPN, Qpn::new);
            ext.deth = Some(Deth { qkey, resv: 0, src_qpn });
        }
        let mut from = av(2, 1);
        if words.has("v6") {
            (from.sgid, from.dgid) = (v6(2), v6(1));
            (from.traffic_class, from.flow_label) = (0x6a, 0x12345);
        }
        if words.has("group") {
            from.dgid = Gid::from_ip("239.1.2.3".parse().expect("an address"));
            bth.dest_qpn = Qpn::MULTICAST;
        }
        if let Some(host) = words.byte("from") {
            from.sgid = crate::support::gid(host);
        }
        let frame = seal(&headers(&from, bth, ext), &vec![psn as u8; len as usize]);
        let mut packet = check_frame(&frame).expect("a frame");
        if let Some(pad) = words.byte("pad") {
            packet.pad = pad;
        }
        // Bytes that no decent peer puts there; the frame has its ICRC in their place.
        if let Some(extra) = words.byte("extra") {
            assert!(len == 0 && extra <= 4);
            packet.payload_len = extra.into();
        }
        let before = self.host.drops.len();
        self.host.take_quietly(self.now, &packet, &frame);
        for reason in &self.host.drops[before..] {
            self.out.push(format!("drop {reason:?}"));
        }
    }

    fn modify(&mut self, to: &str) {
        let modify = match to {
            "err" => QpModify::ToErr,
            "sqd" => QpModify::ToSqd,
            "rts" => QpModify::SqdToRts,
            "sqe_rts" => QpModify::SqeToRts,
            "reset" => QpModify::ToReset,
            other => panic!("no state {other}"),
        };
        if let Err(error) = self.host.qp.modify(self.now, &modify) {
            self.out.push(format!("refused {error:?}"));
        }
    }

    fn change(&mut self, words: &Words<'_>) {
        let change = QpChange {
            pkey: words.number("pkey").map(|pkey| Pkey(pkey as u16)),
            access: words.text("access").map(rights),
            qkey: words.number("qkey").map(Qkey),
            av: words.has("av").then(|| av(1, 3)),
            timeout: words.byte("timeout"),
            retry_cnt: words.byte("retry"),
            rnr_retry: words.byte("rnr_retry"),
            max_rd_atomic: words.byte("rd"),
            max_dest_rd_atomic: words.byte("dest_rd"),
            min_rnr_timer: words.byte("rnr_timer"),
        };
        if let Err(error) = self.host.qp.modify(self.now, &QpModify::Change(change)) {
            self.out.push(format!("refused {error:?}"));
        }
    }

    fn tick(&mut self, ns: u64) {
        let end = self.now.after(ns);
        // Bounded: a timer that does not move on is a fault.
        for _ in 0..1000 {
            match self.host.qp.poll_timeout() {
                Some(at) if at <= end => {
                    self.now = self.now.max(at);
                    self.out.push(format!("timer at {}", millis(self.now.since(self.start))));
                    self.host.timeout(self.now);
                    self.drain();
                }
                Some(_) | None => {
                    self.now = end;
                    self.drain();
                    return;
                }
            }
        }
        panic!("the timer fires without end");
    }

    fn peek(&mut self, words: &Words<'_>) {
        let offset = words.at(1).parse().expect("an offset");
        let len = words.at(2).parse().expect("a length");
        let bytes = self.host.buf.read(offset, len);
        self.out.push(bytes.iter().map(|b| format!("{b}")).collect::<Vec<_>>().join(" "));
    }

    fn show(&mut self) {
        let info = self.host.qp.info();
        self.out.push(format!(
            "{:?} next={} una={} expected={}",
            info.state,
            info.sq_psn.get(),
            info.una_psn.get(),
            info.rq_psn.get()
        ));
    }

    /// Prints completions, notices and packets until the queue pair is quiet.
    fn drain(&mut self) {
        self.reports();
        loop {
            if let Some(left) = &mut self.turns {
                let Some(less) = left.checked_sub(1) else { break };
                *left = less;
            }
            let (answer, frame) = self.host.transmit(self.now);
            if let Some(frame) = frame {
                let packet = check_frame(&frame).expect("well-formed");
                let mut line = format!("tx {}", describe(&packet));
                let syndrome = packet.headers.ext.aeth.map(|aeth| aeth.syndrome);
                if let (true, Some(Syndrome::Ack { credits })) = (self.credits, syndrome) {
                    line += &format!(" credits={credits}");
                }
                self.out.push(line);
                continue;
            }
            match answer {
                Transmit::Later(at) => {
                    self.out.push(format!("waits until {}", millis(at.since(self.start))));
                }
                Transmit::NoRoom => self.out.push("no room".into()),
                Transmit::Sent | Transmit::Idle => {}
            }
            break;
        }
        self.reports();
    }

    fn reports(&mut self) {
        self.host.settle();
        for _ in 0..std::mem::take(&mut self.host.limits) {
            self.out.push("srq_limit".into());
        }
        while let Some(completion) = self.host.qp.poll_completion() {
            self.out.push(match completion {
                Completion::Retired => "retired".into(),
                Completion::Wc(wc) => {
                    let kind = if wc.is_recv { "recv" } else { "send" };
                    let mut line = format!("wc {} {kind} {:?}", wc.wr_id, wc.status);
                    if wc.status == WcStatus::Success {
                        line += &format!(" {:?} bytes={}", wc.opcode, wc.byte_len);
                        if wc.is_recv && wc.solicited {
                            line += " se";
                        }
                        if wc.flags.contains(WcFlags::WITH_IMM) {
                            let [a, b, c, d] = wc.imm.0;
                            line += &format!(" imm={a:02x}{b:02x}{c:02x}{d:02x}");
                        }
                        if wc.flags.contains(WcFlags::WITH_INV) {
                            line += " inv";
                        }
                        if wc.flags.contains(WcFlags::GRH) {
                            line += &format!(" grh src={:#x}", wc.src_qpn.get());
                        }
                    }
                    line
                }
            });
        }
        while let Some(notice) = self.host.qp.poll_notice() {
            self.out.push(match notice {
                Notice::Fatal { status, psn, nak } => match nak {
                    Some(nak) => format!("fatal {status:?} psn={} nak={nak:?}", psn.get()),
                    None => format!("fatal {status:?} psn={}", psn.get()),
                },
                Notice::CommEst => "comm_est".into(),
                Notice::LastWqeReached => "last_wqe".into(),
                Notice::Drained => "drained".into(),
            });
        }
    }
}

fn v6(host: u8) -> Gid {
    Gid::from_ip(format!("fd00::{host}").parse().expect("an address"))
}

fn rights(letters: &str) -> Access {
    letters.chars().fold(Access::empty(), |all, letter| {
        all | match letter {
            'r' => Access::REMOTE_READ,
            'w' => Access::REMOTE_WRITE,
            'a' => Access::REMOTE_ATOMIC,
            'l' => Access::LOCAL_WRITE,
            '-' => Access::empty(),
            other => panic!("no right {other}"),
        }
    })
}

fn imm(words: &Words<'_>) -> Imm {
    Imm(words.number("imm").unwrap_or(0).to_be_bytes())
}

fn parse_name(name: &str, words: &Words<'_>) -> (Opcode, Syndrome) {
    let syndrome = match name {
        "RNR" => Some(Syndrome::RnrNak { timer: words.byte("timer").unwrap_or(12) }),
        "NAK_SEQ" => Some(Syndrome::Nak(NakCode::SequenceError)),
        "NAK_INV_REQ" => Some(Syndrome::Nak(NakCode::InvalidRequest)),
        "NAK_ACCESS" => Some(Syndrome::Nak(NakCode::RemoteAccess)),
        "NAK_REM_OP" => Some(Syndrome::Nak(NakCode::RemoteOperational)),
        "NAK_RD" => Some(Syndrome::Nak(NakCode::InvalidRdRequest)),
        "NAK_OTHER" => Some(Syndrome::Nak(NakCode::Reserved(9))),
        "ACK_RESERVED" => Some(Syndrome::Reserved(0x40)),
        _ => None,
    };
    if let Some(syndrome) = syndrome {
        return (Opcode::RcAck, syndrome);
    }
    let opcode = *Opcode::ALL
        .iter()
        .find(|opcode| op_name(**opcode) == name)
        .unwrap_or_else(|| panic!("no packet {name}"));
    (opcode, Syndrome::Ack { credits: words.byte("credits").unwrap_or(31) })
}

fn parse_time(text: &str) -> u64 {
    let digits = text.trim_end_matches(|c: char| c.is_alphabetic());
    let number: u64 = digits.parse().expect("a time");
    match &text[digits.len()..] {
        "us" => number * 1000,
        "ms" => number * 1_000_000,
        "s" => number * 1_000_000_000,
        other => panic!("no unit {other}"),
    }
}

fn millis(ns: u64) -> String {
    format!("{}.{:03}ms", ns / 1_000_000, ns / 1000 % 1000)
}

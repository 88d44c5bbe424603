//! The codec and the scripts against conversations that were recorded between two original programs.

use ferroce_services::{PerfMode, PerfOp, Role};

use super::codec::*;
use super::script::{Shape, Step};

/// One message of a recording: sent by the client or by the server.
type Message = (bool, Vec<u8>);

macro_rules! recordings {
    ($($name:literal),*) => {
        [$(($name, include_str!(concat!("../../../testdata/perftest/", $name, ".txt")))),*]
    };
}

fn recorded() -> Vec<(&'static str, Vec<Message>)> {
    let texts = recordings![
        "send_lat",
        "write_lat",
        "read_lat",
        "atomic_lat",
        "send_bw",
        "write_bw",
        "read_bw",
        "atomic_bw",
        "send_lat_ud",
        "send_lat_uc",
        "write_bw_q",
        "write_bw_b",
        "send_bw_b",
        "send_bw_a"
    ];
    texts.into_iter().map(|(name, text)| (name, messages(text))).collect()
}

fn messages(text: &str) -> Vec<Message> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let message = |line: &str| {
        let (who, hex) = line.split_once(' ').unwrap();
        let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        (who == ">", (0..hex.len()).step_by(2).map(byte).collect())
    };
    lines.map(message).collect()
}

/// What a message is, by its length, decoded and encoded again.
fn read_and_write(bytes: &[u8]) -> (&'static str, Vec<u8>) {
    match bytes.len() {
        VERSION_BYTES => {
            let version = Version::decode(bytes.try_into().unwrap()).unwrap();
            assert_eq!((version.hundredths, version.mark), (606, None));
            ("version", version.encode().to_vec())
        }
        4 => {
            let number: [u8; 4] = bytes.try_into().unwrap();
            let value = cycle_buffer(number).or_else(|_| cache_line(number)).unwrap();
            ("machine", value.to_be_bytes().to_vec())
        }
        2 => ("mtu", encode_mtu(decode_mtu(bytes.try_into().unwrap()).unwrap()).to_vec()),
        KEYS_BYTES => ("keys", Keys::decode(bytes.try_into().unwrap()).unwrap().encode().to_vec()),
        8 => ("report", bytes.to_vec()),
        5 => {
            assert_eq!(bytes, DONE);
            ("done", bytes.to_vec())
        }
        other => panic!("a message of {other} bytes"),
    }
}

#[test]
fn every_recorded_message_is_understood_and_made_again_as_it_was() {
    for (name, messages) in recorded() {
        for (_, bytes) in messages {
            let (kind, again) = read_and_write(&bytes);
            assert_eq!(again, bytes, "{name}: {kind}");
        }
    }
}

fn shape(name: &str, role: Role) -> Shape {
    let (op, rest) = name.split_once('_').unwrap();
    let op = match op {
        "send" => PerfOp::Send,
        "write" => PerfOp::Write,
        "read" => PerfOp::Read,
        _ => PerfOp::FetchAdd,
    };
    let mut words = rest.split('_');
    let mode = if words.next() == Some("lat") { PerfMode::Lat } else { PerfMode::Bw };
    let variant = words.next().unwrap_or("");
    Shape {
        op,
        mode,
        role,
        bidirectional: variant == "b",
        timed: false,
        all: variant == "a",
        qps: if variant == "q" { 2 } else { 1 },
        sizes: if variant == "a" { 23 } else { 1 },
    }
}

/// Messages of one side that a script makes, by kind; `None` for a queue pair's line of any index.
fn of_script(script: &[Step]) -> Vec<(&'static str, Option<usize>)> {
    let mut kinds = vec![("version", None), ("machine", None), ("machine", None), ("mtu", None)];
    for step in script {
        match step {
            Step::Introduce(index) | Step::Again(index) => kinds.push(("keys", Some(*index))),
            Step::Report => kinds.extend([("report", None); 5]),
            Step::Done => kinds.push(("done", None)),
            Step::Connect | Step::Prepare(_) | Step::Run(_) | Step::Serve | Step::Leave => {}
        }
    }
    kinds
}

#[test]
fn scripts_are_the_recorded_conversations_in_both_roles() {
    for (name, messages) in recorded() {
        for (role, is_client) in [(Role::Client, true), (Role::Server, false)] {
            let script = shape(name, role).script();
            let expected = of_script(&script);
            let sent: Vec<&Vec<u8>> =
                messages.iter().filter(|(c, _)| *c == is_client).map(|(_, b)| b).collect();
            // The recording of a sweep was cut after some sizes, and recordings are the client's: it does not read the
            // server's last word.
            let is_cut = name == "send_bw_a";
            let unread = usize::from(!is_client && expected.last() == Some(&("done", None)));
            assert!(
                is_cut || sent.len() == expected.len() - unread,
                "{name} {role:?}: {} of {}",
                sent.len(),
                expected.len()
            );
            let mut lines: Vec<Vec<u8>> = Vec::new();
            for (bytes, (kind, index)) in sent.iter().zip(&expected) {
                assert_eq!(read_and_write(bytes).0, *kind, "{name} {role:?}");
                let Some(index) = index else { continue };
                match lines.get(*index) {
                    Some(before) => {
                        assert_eq!(before, *bytes, "{name}: the line of queue pair {index} changed")
                    }
                    None => lines.push(bytes.to_vec()),
                }
            }
        }
    }
}

#[test]
fn each_side_runs_or_serves_every_size() {
    for (name, _) in recorded() {
        for role in [Role::Client, Role::Server] {
            let shape = shape(name, role);
            let script = shape.script();
            let runs = script.iter().filter(|s| matches!(s, Step::Run(_))).count();
            let serves = script.iter().filter(|s| matches!(s, Step::Serve)).count();
            let expected = if shape.is_passive() { (0, 1) } else { (shape.sizes, 0) };
            assert_eq!((runs, serves), expected, "{name} {role:?}");
            let prepared = |size: usize| script.iter().position(|s| *s == Step::Prepare(size));
            for (at, step) in script.iter().enumerate() {
                if let Step::Run(size) = step {
                    assert!(prepared(*size).unwrap() < at, "{name}");
                }
            }
        }
    }
}

#[test]
fn versions_and_marks() {
    let plain = Version::decode(b"6.06\0\0\0\0\0\0\0\0\0\0\0\0").unwrap();
    assert_eq!((plain.hundredths, plain.mark, plain.to_string().as_str()), (606, None, "6.06"));
    let marked = Version::ours(Some(2));
    // A program of perftest reads the number alone: what it sees is unchanged.
    assert_eq!(&marked.encode()[..5], b"6.06\0");
    assert_eq!(Version::decode(&marked.encode()), Ok(marked));
    assert_eq!(Version::decode(b"6.24\0garbage\0\0\0\0").unwrap().mark, None);
    assert_eq!(Version::decode(b"6.1\0\0\0\0\0\0\0\0\0\0\0\0\0").unwrap().hundredths, 610);
    for bad in [
        &[0; 16],
        b"5.69\0\0\0\0\0\0\0\0\0\0\0\0",
        b"6\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
        b"6.06ferroce\x02\0\0\0\0"[..16].try_into().unwrap(),
        b"-6.06\0\0\0\0\0\0\0\0\0\0\0",
        b"6.+6\0\0\0\0\0\0\0\0\0\0\0\0",
        b"99999.06\0\0\0\0\0\0\0\0",
        b"6.06666666666666",
        &[0xff; 16],
    ] {
        let refused = Version::decode(bad).unwrap_err();
        assert_eq!(refused.field, "version", "{bad:?}");
    }
}

#[test]
fn small_messages_and_their_bounds() {
    assert_eq!(cycle_buffer([0, 0, 0x10, 0]), Ok(4096));
    assert_eq!(cycle_buffer([0, 1, 0, 0]), Ok(65536));
    for bad in [[0; 4], [0, 0, 0x10, 1], [0, 0, 8, 0], [0xff; 4], [0, 0x20, 0, 0]] {
        assert_eq!(cycle_buffer(bad).unwrap_err().field, "cycle buffer");
    }
    assert_eq!(cache_line([0, 0, 0, 128]), Ok(128));
    for bad in [[0; 4], [0, 0, 0, 65], [0x80, 0, 0, 0]] {
        assert_eq!(cache_line(bad).unwrap_err().field, "cache line");
    }
    let bytes: Vec<u32> = (1..=5).map(|n| decode_mtu([b'0' + n, 0]).unwrap().bytes()).collect();
    assert_eq!(bytes, [256, 512, 1024, 2048, 4096]);
    for bad in [[b'0', 0], [b'6', 0], [b'5', b'5'], [5, 0], [0xff; 2]] {
        assert!(decode_mtu(bad).unwrap_err().to_string().contains("1 (256 bytes) to 5 (4096 bytes)"));
    }
}

/// A line with one part replaced.
fn line(at: usize, part: &[u8]) -> [u8; KEYS_BYTES] {
    let messages = recorded().swap_remove(0).1;
    let mut bytes: [u8; KEYS_BYTES] =
        messages.iter().find(|(_, b)| b.len() == KEYS_BYTES).unwrap().1.clone().try_into().unwrap();
    bytes[at..at + part.len()].copy_from_slice(part);
    bytes
}

#[test]
fn every_field_of_a_line_is_checked() {
    assert!(Keys::decode(&line(0, b"")).is_ok());
    for (at, part, field) in [
        (0, &b"00g0"[..], "LID"),
        (5, b"0000", "outstanding reads (-o)"),
        (5, b"0100", "outstanding reads (-o)"),
        (10, b"000000", "QPN"),
        (10, b"000001", "QPN"),
        (10, b"ffffff", "QPN"),
        (17, b"+00001", "PSN"),
        (24, b"0000000:", "rkey"),
        (33, b"00000000 0000000", "address"),
        (50, b"ff:02", "GID"),
        (50, b"00:00:00:00:00:00:00:00:00:00:00:00:00:00:00:00", "GID"),
        (80, b"ff:ff:e0:00:00:01", "GID"),
        (98, b"0000000g", "SRQ number"),
        (107, b":", "end of the line"),
    ] {
        let refused = Keys::decode(&line(at, part)).unwrap_err();
        assert_eq!(refused.field, field, "{at}: {refused}");
    }
    assert_eq!(Keys::decode(&[0; KEYS_BYTES]).unwrap_err().field, "LID");
}

#[test]
fn reports_are_bounded() {
    let recorded = recorded().into_iter().find(|(name, _)| *name == "write_bw_b").unwrap().1;
    let values: Vec<[u8; 8]> =
        recorded.iter().filter(|(c, b)| *c && b.len() == 8).map(|(_, b)| b[..].try_into().unwrap()).collect();
    let values: [[u8; 8]; 5] = values.try_into().unwrap();
    let report = Report::decode(values).unwrap();
    assert_eq!((report.size, report.iters), (4096, 200));
    assert!(report.peak >= report.average && report.average > 0.0 && report.mpps > 0.0);
    assert_eq!(report.encode(), values);
    let with = |at: usize, value: u64| {
        let mut values = values;
        values[at] = value.to_be_bytes();
        Report::decode(values)
    };
    assert!(with(0, (1 << 30) + 1).unwrap_err().to_string().contains("1073741824"));
    assert_eq!(with(1, u64::MAX).unwrap_err().field, "iterations in the report");
    assert_eq!(with(3, (-1.0f64).to_bits()).unwrap_err().field, "bandwidth in the report");
    assert!(with(2, f64::NAN.to_bits()).unwrap().peak.abs() < 1e-9);
}

#[test]
fn callers_by_their_first_byte() {
    assert_eq!(Caller::of(b'6'), Some(Caller::Version));
    assert_eq!(Caller::of(b'{'), Some(Caller::Json));
    for stranger in [b'G', 0, 0x16, 0xff] {
        assert_eq!(Caller::of(stranger), None);
    }
}

/// The fuzz target's corpus: recorded messages and what the fuzzer found.
#[test]
fn the_kept_corpus_is_read_without_a_panic() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/perftest_handshake");
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        files += 1;
        let _ = bytes.first_chunk().map(Version::decode);
        let _ = bytes.first_chunk().map(Keys::decode);
        let _ = bytes.first_chunk().map(|b| (cycle_buffer(*b), cache_line(*b)));
        let _ = bytes.first_chunk().map(|b| decode_mtu(*b));
        let _ = bytes.as_chunks::<8>().0.first_chunk().map(|v| Report::decode(*v));
    }
    assert!(files >= 12, "{files} files in {folder}");
}

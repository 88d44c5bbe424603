//! The opcode table, written out for all 256 bytes and compared with a file that a reviewer reads.

use std::fmt::Write;

use ferroce_wire::Opcode;

fn render() -> String {
    let mut text = String::from(
        "# byte: opcode: service operation part payload-rule [extension headers] = their bytes\n",
    );
    let mut unknown_since = None;
    for byte in 0..=256u16 {
        let opcode = u8::try_from(byte).ok().and_then(Opcode::from_u8);
        match (opcode, unknown_since) {
            (None, None) if byte < 256 => unknown_since = Some(byte),
            (Some(_), Some(since)) => {
                writeln!(text, "{since:#04x}..={:#04x}: unknown", byte - 1).unwrap();
                unknown_since = None;
            }
            (None, Some(since)) if byte == 256 => writeln!(text, "{since:#04x}..=0xff: unknown").unwrap(),
            _ => {}
        }
        let Some(opcode) = opcode else { continue };
        assert_eq!(u16::from(opcode.to_u8()), byte);
        let info = opcode.info();
        let headers = [
            (info.deth, "deth"),
            (info.reth, "reth"),
            (info.atomic, "atomic"),
            (info.imm, "imm"),
            (info.inv, "ieth"),
            (info.aeth, "aeth"),
            (info.atomic_ack, "atomicack"),
        ];
        let headers: Vec<_> = headers.iter().filter(|(there, _)| *there).map(|(_, name)| *name).collect();
        writeln!(
            text,
            "{byte:#04x}: {opcode:?}: {:?} {:?} {:?} {:?} [{}] = {}",
            info.service,
            info.op,
            info.part,
            info.payload,
            headers.join(" "),
            info.ext_bytes()
        )
        .unwrap();
    }
    text
}

#[test]
fn every_byte_is_decided() {
    let rendered = render();
    let kept = include_str!("../testdata/opcodes.txt");
    if rendered != kept {
        let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("opcodes.txt");
        std::fs::write(&path, rendered).unwrap();
        panic!("the table changed: compare testdata/opcodes.txt with {}", path.display());
    }
}

#[test]
fn responses_are_what_a_responder_sends() {
    let responses: Vec<u8> = Opcode::ALL.iter().filter(|o| o.is_response()).map(|o| o.to_u8()).collect();
    assert_eq!(responses, [0x0d, 0x0e, 0x0f, 0x10, 0x11, 0x12]);
}

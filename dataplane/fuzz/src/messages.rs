//! What other processes and the kernel say, by the first byte: a peer's message of a `shm` link, netlink answers, texts of
//! control's socket, and configuration files.

use ferroce_api::config::ApplianceConfig;
use ferroce_api::rpc::{Request, Response};

#[path = "../../../control/daemon/src/splitter.rs"]
mod splitter;

/// Longest text that the cutter keeps here.
const LIMIT: usize = 512;

/// Any bytes as a message of one kind.
pub fn any(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    match kind % 4 {
        0 => assert!(ferroce_nic::shm::try_message(bytes), "a message does not come back as it was"),
        1 => assert!(ferroce_nic::netlink::try_answer(bytes) <= 5 * bytes.len() / 16),
        2 => texts(bytes),
        _ => {
            let text = String::from_utf8_lossy(bytes);
            if let Err(error) = ApplianceConfig::parse("fuzz.toml", &text) {
                assert!(!error.to_string().is_empty());
                assert!(error.line <= text.lines().count() + 1, "{error}");
            }
        }
    }
}

/// Cut all at once or in pieces, a stream has the same texts; each is a request or a response that comes back as it
/// was, or is refused.
fn texts(bytes: &[u8]) {
    let (whole, step) = (cut(bytes, bytes.len().max(1)), 1 + bytes.first().map_or(0, |b| usize::from(b % 7)));
    assert_eq!(cut(bytes, step), whole, "cut in pieces of {step}");
    for text in whole.0 {
        assert!(text.len() <= LIMIT && (text.starts_with(b"{") || text.starts_with(b"[")));
        if let Ok(request) = serde_json::from_slice::<Request>(&text) {
            let again = serde_json::to_vec(&request).expect("a request");
            assert_eq!(serde_json::from_slice::<Request>(&again).expect("our own request"), request);
        }
        if let Ok(response) = serde_json::from_slice::<Response>(&text) {
            let again = serde_json::to_vec(&response).expect("a response");
            let _ = serde_json::from_slice::<Response>(&again).expect("our own response").into_result();
        }
    }
}

/// The texts in a stream that comes in pieces of `step` bytes, and how it ended.
fn cut(bytes: &[u8], step: usize) -> (Vec<Vec<u8>>, Option<splitter::SplitError>) {
    let (mut cutter, mut texts) = (splitter::Splitter::new(LIMIT), Vec::new());
    for piece in bytes.chunks(step) {
        cutter.push(piece);
        loop {
            match cutter.next_text() {
                Ok(Some(text)) => texts.push(text.to_vec()),
                Ok(None) => break,
                Err(error) => return (texts, Some(error)),
            }
        }
    }
    let _ = cutter.mid_text();
    (texts, None)
}

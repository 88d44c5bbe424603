//! Cuts a byte stream into JSON texts that follow one another with nothing, or white space, between them.
//!
//! Owns the bytes not yet cut. The invariant: never more than `limit` bytes are kept, and each byte is looked at once,
//! so a client that sends one byte at a time costs no more than one that sends a whole text. Called by the server for
//! each client connection; it never parses what is inside a text, which is serde's work.

/// Why a stream can't be cut further. The connection is of no use afterwards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SplitError {
    /// A text begins with something other than `{` or `[`: not our protocol.
    NotJson {
        /// The first byte that does not fit.
        byte: u8,
    },
    /// A text is longer than the limit.
    TooLong {
        /// Bytes allowed.
        limit: usize,
    },
}

/// The cutter. Feed it with [`Splitter::push`], then take texts with [`Splitter::next_text`] until `None`.
pub struct Splitter {
    buf: Vec<u8>,
    limit: usize,
    /// First byte of the text being looked at.
    start: usize,
    /// Next byte to look at.
    at: usize,
    depth: u32,
    in_string: bool,
    escaped: bool,
}

impl Splitter {
    /// A cutter that keeps at most `limit` bytes of one text.
    pub fn new(limit: usize) -> Self {
        Splitter { buf: Vec::new(), limit, start: 0, at: 0, depth: 0, in_string: false, escaped: false }
    }

    /// Adds bytes of the stream.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.buf.drain(..self.start);
            self.at = self.at.saturating_sub(self.start);
            self.start = 0;
        }
        self.buf.extend_from_slice(bytes);
    }

    /// True when bytes of an unfinished text are held.
    pub fn mid_text(&self) -> bool {
        self.depth > 0
    }

    /// The next whole text.
    ///
    /// # Errors
    /// The stream is not ours, or a text is too long; see [`SplitError`].
    pub fn next_text(&mut self) -> Result<Option<&[u8]>, SplitError> {
        while let Some(&byte) = self.buf.get(self.at) {
            self.at += 1;
            if self.depth == 0 {
                match byte {
                    b' ' | b'\t' | b'\r' | b'\n' => self.start = self.at,
                    b'{' | b'[' => self.depth = 1,
                    _ => return Err(SplitError::NotJson { byte }),
                }
                continue;
            }
            if self.in_string {
                match byte {
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
            } else {
                match byte {
                    b'"' => self.in_string = true,
                    b'{' | b'[' => self.depth += 1,
                    b'}' | b']' => self.depth -= 1,
                    _ => {}
                }
            }
            if self.at - self.start > self.limit {
                return Err(SplitError::TooLong { limit: self.limit });
            }
            if self.depth == 0 {
                let text = self.start..self.at;
                self.start = self.at;
                return Ok(self.buf.get(text));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(splitter: &mut Splitter) -> Vec<String> {
        let mut out = Vec::new();
        while let Some(text) = splitter.next_text().expect("ours") {
            out.push(String::from_utf8_lossy(text).into_owned());
        }
        out
    }

    #[test]
    fn cuts_back_to_back_texts_at_every_split_point() {
        let stream = br#"{"a":"}]\"{"}[1,{"b":[]}] {"c":{}}"#;
        for cut in 0..stream.len() {
            let mut splitter = Splitter::new(64);
            splitter.push(&stream[..cut]);
            let mut got = texts(&mut splitter);
            splitter.push(&stream[cut..]);
            got.extend(texts(&mut splitter));
            assert_eq!(got, [r#"{"a":"}]\"{"}"#, r#"[1,{"b":[]}]"#, r#"{"c":{}}"#], "cut at {cut}");
            assert!(!splitter.mid_text());
        }
    }

    #[test]
    fn one_byte_at_a_time_is_the_same() {
        let mut splitter = Splitter::new(64);
        let mut got = Vec::new();
        for byte in br#"{"a":1}{"b":2}"# {
            splitter.push(&[*byte]);
            got.extend(texts(&mut splitter));
        }
        assert_eq!(got, [r#"{"a":1}"#, r#"{"b":2}"#]);
    }

    #[test]
    fn a_text_of_the_limit_passes_and_one_more_byte_does_not() {
        let mut splitter = Splitter::new(8);
        splitter.push(br#"{"a":12}"#);
        assert!(splitter.next_text().expect("fits").is_some());
        let mut splitter = Splitter::new(8);
        splitter.push(br#"{"a":123}"#);
        assert_eq!(splitter.next_text(), Err(SplitError::TooLong { limit: 8 }));
    }

    #[test]
    fn another_protocol_is_told_apart() {
        let mut splitter = Splitter::new(64);
        splitter.push(b"GET / HTTP/1.1\r\n");
        assert_eq!(splitter.next_text(), Err(SplitError::NotJson { byte: b'G' }));
        let mut splitter = Splitter::new(64);
        splitter.push(b"]");
        assert_eq!(splitter.next_text(), Err(SplitError::NotJson { byte: b']' }));
    }
}

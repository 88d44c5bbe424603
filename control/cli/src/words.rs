//! The words of iproute2's grammar: a selector, then filters.
//!
//! Owns their parsing. A filter names a key of the listing; a value may be a list, and for numbers ranges.

use serde_json::Value;

use crate::fail::Fail;
use crate::number;
use crate::row::Row;

/// Which device, which port.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Selector {
    /// Device; none: all.
    pub dev: Option<String>,
    /// Port; none: all.
    pub port: Option<u32>,
}

impl Selector {
    /// From `DEV` or `DEV/PORT`; an empty port, as in `DEV/`, is all of them.
    ///
    /// # Errors
    /// It is neither.
    pub fn parse(text: &str) -> Result<Self, Fail> {
        let (dev, port) = match text.split_once('/') {
            None => (text, None),
            Some((dev, "" | "-")) => (dev, None),
            Some((dev, port)) => {
                let port = port
                    .parse()
                    .map_err(|_| Fail::Usage(format!("link {text}: the port is not a number")))?;
                (dev, Some(port))
            }
        };
        if dev.is_empty() {
            return Err(Fail::Usage(format!("link {text}: DEV/PORT wanted")));
        }
        Ok(Selector { dev: Some(dev.to_owned()), port })
    }

    /// True when a row of this port is wanted. Every device has one port, number 1.
    pub fn wants_port(&self, port: u32) -> bool {
        self.port.is_none_or(|wanted| wanted == port)
    }
}

/// One filter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Filter {
    key: &'static str,
    value: String,
}

/// Splits `[link DEV/PORT | dev DEV] [KEY VALUE]...`; keys may be shortened.
///
/// # Errors
/// A key that the listing has not, or a key without value.
pub fn parse(words: &[String], keys: &[&'static str]) -> Result<(Selector, Vec<Filter>), Fail> {
    let mut selector = Selector::default();
    let mut filters = Vec::new();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        let Some(value) = words.next() else {
            return Err(Fail::Usage(format!("{word}: a value is missing")));
        };
        match word.as_str() {
            "link" => selector = Selector::parse(value)?,
            "dev" => selector = Selector { dev: Some(value.clone()), port: None },
            word => filters.push(Filter { key: key(word, keys)?, value: value.clone() }),
        }
    }
    Ok((selector, filters))
}

fn key(word: &str, keys: &[&'static str]) -> Result<&'static str, Fail> {
    if let Some(exact) = keys.iter().find(|key| **key == word) {
        return Ok(exact);
    }
    let mut fitting = keys.iter().filter(|key| key.starts_with(word));
    match (fitting.next(), fitting.next()) {
        (Some(key), None) => Ok(key),
        (Some(_), Some(_)) => Err(Fail::Usage(format!("{word}: fits several of {}", keys.join(", ")))),
        (None, _) => {
            Err(Fail::Usage(format!("{word}: no such key; link, dev, or one of {}", keys.join(", "))))
        }
    }
}

impl Filter {
    /// True when the row has what is asked for.
    ///
    /// # Errors
    /// The value is not of the key's kind.
    pub fn matches(&self, row: &Row) -> Result<bool, Fail> {
        match row.get(self.key) {
            None => Ok(false),
            Some(Value::Number(number)) => {
                let have = number.as_u64().unwrap_or(u64::MAX);
                let mut any = false;
                for part in self.value.split(',') {
                    let (low, high) = part.split_once('-').unwrap_or((part, part));
                    let bound = |text: &str| {
                        number::id(text).map_err(|e| Fail::Usage(format!("{} {}: {e}", self.key, self.value)))
                    };
                    any |= (u64::from(bound(low)?)..=u64::from(bound(high)?)).contains(&have);
                }
                Ok(any)
            }
            Some(Value::String(have)) => {
                Ok(self.value.split(',').any(|part| part.eq_ignore_ascii_case(have)))
            }
            Some(_) => Ok(false),
        }
    }
}

/// The rows that all filters want.
///
/// # Errors
/// As [`Filter::matches`].
pub fn apply(rows: Vec<Row>, filters: &[Filter]) -> Result<Vec<Row>, Fail> {
    let mut kept = Vec::new();
    for row in rows {
        let mut wanted = true;
        for filter in filters {
            wanted &= filter.matches(&row)?;
        }
        if wanted {
            kept.push(row);
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: [&str; 4] = ["lqpn", "state", "rq-psn", "rqpn"];

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(str::to_owned).collect()
    }

    fn rows() -> Vec<Row> {
        (1..=5)
            .map(|n| Row::new("x").cell("lqpn", n).cell("state", if n % 2 == 0 { "RTS" } else { "INIT" }))
            .collect()
    }

    fn kept(line: &str) -> Vec<u64> {
        let (_, filters) = parse(&words(line), &KEYS).expect(line);
        let rows = apply(rows(), &filters).expect(line);
        rows.iter().filter_map(|row| row.get("lqpn")?.as_u64()).collect()
    }

    #[test]
    fn selectors() {
        let (selector, filters) = parse(&words("link fe0/1 state RTS"), &KEYS).expect("fine");
        assert_eq!(selector, Selector { dev: Some("fe0".into()), port: Some(1) });
        assert_eq!(filters.len(), 1);
        let (selector, _) = parse(&words("dev fe0"), &KEYS).expect("fine");
        assert_eq!(selector, Selector { dev: Some("fe0".into()), port: None });
        assert!(Selector::parse("fe0/x").is_err());
        assert!(Selector::parse("/1").is_err());
    }

    #[test]
    fn filters_take_lists_ranges_and_any_case() {
        assert_eq!(kept("lqpn 2-4"), [2, 3, 4]);
        assert_eq!(kept("lqpn 1,0x4-5"), [1, 4, 5]);
        assert_eq!(kept("state rts"), [2, 4]);
        assert_eq!(kept("state RTS,INIT lqpn 1-2"), [1, 2]);
        assert!(kept("rqpn 1").is_empty(), "a key that the rows have not");
    }

    #[test]
    fn bad_words_are_wrong_usage() {
        for bad in ["state", "nokey 1", "rq 1", "lqpn 1 state"] {
            assert_eq!(parse(&words(bad), &KEYS).expect_err(bad).exit_code(), 2, "{bad}");
        }
        assert!(parse(&words("sta RTS"), &KEYS).is_ok(), "shortened");
        let (_, filters) = parse(&words("lqpn five"), &KEYS).expect("parses");
        assert_eq!(apply(rows(), &filters).expect_err("no number").exit_code(), 2);
    }
}

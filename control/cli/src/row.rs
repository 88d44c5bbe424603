//! One row of a listing: the same cells make the text line and the JSON object.
//!
//! Owns the order of the cells, which is that of iproute2's `rdma` in both forms.

use std::fmt::Write as _;

use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::Value;

/// Where a cell appears.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum In {
    /// Text and JSON.
    Both,
    /// JSON only: the text has it in the head of the line.
    Json,
    /// Text with `-d`, and JSON.
    Details,
}

/// A row.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Row {
    head: String,
    cells: Vec<(String, Value, In)>,
}

impl Row {
    /// A row whose text begins with `head`.
    pub fn new(head: impl Into<String>) -> Self {
        Row { head: head.into(), cells: Vec::new() }
    }
    /// A cell of both forms.
    #[must_use]
    pub fn cell(mut self, key: impl Into<String>, value: impl Into<Value>) -> Self {
        self.cells.push((key.into(), value.into(), In::Both));
        self
    }
    /// A cell of both forms, left out where there is no value.
    #[must_use]
    pub fn maybe(self, key: &str, value: Option<impl Into<Value>>) -> Self {
        match value {
            Some(value) => self.cell(key, value),
            None => self,
        }
    }
    /// A cell that the text has in its head.
    #[must_use]
    pub fn json(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.cells.push((key.to_owned(), value.into(), In::Json));
        self
    }
    /// A cell that the text shows with `-d`.
    #[must_use]
    pub fn detail(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.cells.push((key.to_owned(), value.into(), In::Details));
        self
    }
    /// A detail, left out where there is no value.
    #[must_use]
    pub fn maybe_detail(self, key: &str, value: Option<impl Into<Value>>) -> Self {
        match value {
            Some(value) => self.detail(key, value),
            None => self,
        }
    }
    /// The value of a cell.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.cells.iter().find(|(k, ..)| k == key).map(|(_, value, _)| value)
    }
    /// The text line, without its end.
    pub fn text(&self, details: bool) -> String {
        let mut out = self.head.clone();
        for (key, value, place) in &self.cells {
            let shown = match place {
                In::Both => true,
                In::Json => false,
                In::Details => details,
            };
            if shown {
                // Writing to a String can't fail.
                let _ = write!(out, " {key} {}", plain(key, value));
            }
        }
        out
    }
}

/// Keys whose numbers people read in hexadecimal.
const HEX: [&str; 3] = ["rkey", "lkey", "iova"];

fn plain(key: &str, value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(n) => match n.as_u64() {
            Some(n) if HEX.contains(&key) => format!("{n:#x}"),
            _ => n.to_string(),
        },
        Value::Array(list) => {
            let items: Vec<String> = list.iter().map(|v| plain(key, v)).collect();
            format!("<{}>", items.join(", "))
        }
        other => other.to_string(),
    }
}

impl Serialize for Row {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.cells.len()))?;
        for (key, value, _) in &self.cells {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_json_come_from_the_same_cells_in_the_same_order() {
        let row = Row::new("link fe0/1")
            .json("ifname", "fe0")
            .json("port", 1)
            .cell("zeta", "first")
            .cell("rkey", 0x16bc)
            .maybe("absent", None::<u32>)
            .detail("caps", vec!["a", "b"]);
        assert_eq!(row.text(false), "link fe0/1 zeta first rkey 0x16bc");
        assert_eq!(row.text(true), "link fe0/1 zeta first rkey 0x16bc caps <a, b>");
        let json = serde_json::to_string(&row).expect("encodes");
        assert_eq!(json, r#"{"ifname":"fe0","port":1,"zeta":"first","rkey":5820,"caps":["a","b"]}"#);
    }
}

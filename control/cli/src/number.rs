//! Numbers as people type them: sizes with units, and decimal or hexadecimal identifiers.
//!
//! Owns nothing. Sizes are qperf's: capital letters are powers of 1024, small ones of 1000.

/// Bytes: `64`, `4K` or `4kib` (1024), `4k` or `4kb` (1000), up to `G`.
///
/// # Errors
/// Names what is allowed.
pub fn size(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let factor: u64 = match unit {
        "" => 1,
        "K" | "kib" | "KiB" => 1 << 10,
        "M" | "mib" | "MiB" => 1 << 20,
        "G" | "gib" | "GiB" => 1 << 30,
        "k" | "kb" => 1000,
        "m" | "mb" => 1_000_000,
        "g" | "gb" => 1_000_000_000,
        _ => return Err(SIZE_HELP.to_owned()),
    };
    digits.parse::<u64>().ok().and_then(|n| n.checked_mul(factor)).ok_or_else(|| SIZE_HELP.to_owned())
}

const SIZE_HELP: &str = "allowed: bytes, with K M G (1024) or k m g (1000)";

/// A message size: at most 2^32 - 1 bytes.
///
/// # Errors
/// As [`size`].
pub fn message_size(text: &str) -> Result<u32, String> {
    u32::try_from(size(text)?).map_err(|_| "allowed: less than 4G".to_owned())
}

/// An identifier: decimal, or hexadecimal after `0x`.
///
/// # Errors
/// Names what is allowed.
pub fn id(text: &str) -> Result<u32, String> {
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hex) if !hex.starts_with('+') => u32::from_str_radix(hex, 16).ok(),
        Some(_) => None,
        None if text.starts_with('+') => None,
        None => text.parse().ok(),
    }
    .ok_or_else(|| "allowed: a number, decimal or 0x and hexadecimal, below 2^32".to_owned())
}

/// A queue pair or packet sequence number: an [`id`] of 24 bits.
///
/// # Errors
/// Names what is allowed.
pub fn id24(text: &str) -> Result<u32, String> {
    match id(text)? {
        n if n < 1 << 24 => Ok(n),
        n => Err(format!("{n} does not fit 24 bits")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_as_qperf_has_them() {
        assert_eq!(size("64"), Ok(64));
        assert_eq!(size("4K"), Ok(4096));
        assert_eq!(size("4k"), Ok(4000));
        assert_eq!(size("1MiB"), Ok(1 << 20));
        for bad in ["", "K", "-1", "4x", "+4", "4 K", "99999999999999999999", "18446744073709551615G"] {
            assert!(size(bad).is_err(), "{bad}");
        }
        assert!(message_size("4G").is_err());
    }

    #[test]
    fn identifiers_in_two_bases() {
        assert_eq!(id("17"), Ok(17));
        assert_eq!(id("0x11"), Ok(17));
        for bad in ["", "0x", "0x+1", "+1", "-1", "11h", "4294967296"] {
            assert!(id(bad).is_err(), "{bad}");
        }
        assert!(id24("0xffffff").is_ok());
        assert!(id24("0x1000000").is_err());
    }
}

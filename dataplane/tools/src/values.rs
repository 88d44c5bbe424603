//! Parsers of option values.

use std::time::Duration;

/// A byte count as qperf has it: digits, and K, M, G or kib, mib, gib (powers of 1024), or k, m, g or kb, mb, gb (powers
/// of 1000).
pub fn bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a number of bytes, such as 4096, 64K (65536) or 64k (64000)");
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
        _ => return Err(wrong()),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(factor).ok_or_else(|| format!("{text:?} is too large"))
}

/// A message size in bytes, at most 1 GiB.
pub fn size(text: &str) -> Result<u32, String> {
    match u32::try_from(bytes(text)?) {
        Ok(size) if size <= 1 << 30 => Ok(size),
        _ => Err("the largest message is 1073741824 bytes (1G)".into()),
    }
}

/// Seconds with a fraction.
pub fn seconds(text: &str) -> Result<Duration, String> {
    text.parse::<f64>()
        .ok()
        .and_then(|s| Duration::try_from_secs_f64(s).ok())
        .filter(|d| d.as_secs() < 1 << 32)
        .ok_or_else(|| format!("{text:?} is not a number of seconds, such as 2 or 0.5"))
}

/// A path MTU in bytes.
pub fn mtu(text: &str) -> Result<ferroce_wire::PathMtu, String> {
    text.parse()
        .ok()
        .and_then(ferroce_wire::PathMtu::from_bytes)
        .ok_or_else(|| format!("{text:?} is not a path MTU: allowed are 256, 512, 1024, 2048 and 4096"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!(size("0"), Ok(0));
        assert_eq!(size("64K"), Ok(65536));
        assert_eq!(size("8M"), Ok(8 << 20));
        assert_eq!(size("8m"), Ok(8_000_000));
        assert_eq!(size("2kb"), Ok(2000));
        assert_eq!(size("1G"), Ok(1 << 30));
        for bad in ["", "K", "-1", "1.5", "2G", "64KB", "99999999999999999999", "17179869184G", "\u{e4}"] {
            assert!(size(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn times_and_mtus() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["", "-1", "NaN", "inf", "1e300", "two"] {
            assert!(seconds(bad).is_err(), "{bad:?}");
        }
        assert_eq!(mtu("1024").map(|m| m.bytes()), Ok(1024));
        assert!(mtu("1500").unwrap_err().contains("256, 512, 1024, 2048 and 4096"));
    }
}

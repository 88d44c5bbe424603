//! The text of `--fault`: what the wire does to frames on purpose.

use std::time::Duration;

use ferroce_nic::wrap::{FaultConfig, Rates};

/// Parses a comma-separated list of `name=value`; `rx.` or `tx.` before a name limits it to one direction.
pub fn parse(text: &str) -> Result<FaultConfig, String> {
    let mut config = FaultConfig { seed: 1, ..FaultConfig::default() };
    for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
        let (name, value) = item.split_once('=').ok_or_else(|| format!("{item:?} is not name=value"))?;
        let (rx, tx, name) = match name.split_once('.') {
            Some(("rx", name)) => (true, false, name),
            Some(("tx", name)) => (false, true, name),
            _ => (true, true, name),
        };
        if name == "seed" {
            config.seed = value.parse().map_err(|_| format!("seed: {value:?} is not a number"))?;
            continue;
        }
        for (wanted, rates) in [(rx, &mut config.rx), (tx, &mut config.tx)] {
            if wanted {
                set(rates, name, value)?;
            }
        }
    }
    config.check().map_err(|e| e.to_string())?;
    Ok(config)
}

fn set(rates: &mut Rates, name: &str, value: &str) -> Result<(), String> {
    if name == "delay_time" {
        rates.delay_time = time(value)?;
        return Ok(());
    }
    let rate = match name {
        "loss" => &mut rates.loss,
        "duplicate" => &mut rates.duplicate,
        "reorder" => &mut rates.reorder,
        "corrupt" => &mut rates.corrupt,
        "ce_mark" => &mut rates.ce_mark,
        "delay" => &mut rates.delay,
        _ => {
            return Err(format!(
                "{name:?} is not a fault: allowed are loss, duplicate, reorder, corrupt, ce_mark, delay, delay_time \
                 and seed"
            ));
        }
    };
    *rate = value.parse().map_err(|_| format!("{name}: {value:?} is not a share from 0 to 1"))?;
    Ok(())
}

fn time(text: &str) -> Result<Duration, String> {
    let wrong = || format!("delay_time: {text:?} is not a time, such as 500us or 2ms");
    let (digits, factor) = match (text.strip_suffix("us"), text.strip_suffix("ms")) {
        (Some(digits), _) => (digits, 1_000),
        (None, Some(digits)) => (digits, 1_000_000),
        (None, None) => return Err(wrong()),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(factor).map(Duration::from_nanos).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_directions_or_one() {
        let config = parse("loss=0.01, rx.duplicate=0.5,tx.delay=1,tx.delay_time=500us,seed=7").unwrap();
        assert_eq!(config.seed, 7);
        assert_eq!((config.rx.loss, config.tx.loss), (0.01, 0.01));
        assert_eq!((config.rx.duplicate, config.tx.duplicate), (0.5, 0.0));
        assert_eq!((config.tx.delay, config.tx.delay_time), (1.0, Duration::from_micros(500)));
        assert_eq!(parse("").unwrap(), FaultConfig { seed: 1, ..FaultConfig::default() });
    }

    #[test]
    fn wrong_texts_are_named() {
        for (text, told) in [
            ("loss", "not name=value"),
            ("loss=x", "share from 0 to 1"),
            ("loss=2", "fault.rx.loss"),
            ("loss=-0.1", "fault.rx.loss"),
            ("loss=NaN", "fault.rx.loss"),
            ("luck=1", "not a fault"),
            ("ab.loss=1", "not a fault"),
            ("seed=-1", "seed"),
            ("delay_time=5", "500us"),
            ("delay_time=5s", "500us"),
            ("delay_time=99999999999999999999ms", "500us"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(told), "{text}: {error}");
        }
    }
}

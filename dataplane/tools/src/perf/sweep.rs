//! `--sweep`: one test per value of one option, as qperf's `-oo` has it.

use super::options::PerfArgs;
use crate::values;

/// Most values of a sweep.
const MOST_VALUES: usize = 256;

/// What varies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Variable {
    /// `-s`.
    Size,
    /// `-n`.
    Iters,
    /// `-q`.
    Qps,
    /// `-t`.
    TxDepth,
    /// `-r`.
    RxDepth,
    /// `-Q`.
    CqMod,
    /// `-l`.
    PostList,
    /// `-I`.
    Inline,
    /// `--rate_limit`.
    RateLimit,
    /// `-o`.
    Reads,
    /// `-m`.
    Mtu,
}

/// All variables and their names, which are the long options'.
const VARIABLES: [(&str, Variable); 11] = [
    ("size", Variable::Size),
    ("iters", Variable::Iters),
    ("qp", Variable::Qps),
    ("tx-depth", Variable::TxDepth),
    ("rx-depth", Variable::RxDepth),
    ("cq-mod", Variable::CqMod),
    ("post_list", Variable::PostList),
    ("inline_size", Variable::Inline),
    ("rate_limit", Variable::RateLimit),
    ("outs", Variable::Reads),
    ("mtu", Variable::Mtu),
];

/// A variable and its values.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sweep {
    /// Which.
    pub variable: Variable,
    /// In order.
    pub values: Vec<u64>,
}

impl Sweep {
    /// From `VAR:FIRST:LAST:STEP`.
    pub fn parse(text: &str) -> Result<Sweep, String> {
        let form = || format!("{text:?} is not VAR:FIRST:LAST:STEP, such as size:1:64K:*2 or qp:1:8:+1");
        let parts: Vec<&str> = text.split(':').collect();
        let [name, first, last, step] = parts[..] else { return Err(form()) };
        let found = VARIABLES.iter().find(|(n, _)| *n == name || n.replace(['-', '_'], "") == name);
        let Some(&(_, variable)) = found else {
            let names: Vec<&str> = VARIABLES.iter().map(|(n, _)| *n).collect();
            return Err(format!("{name:?} cannot be swept: allowed are {}", names.join(", ")));
        };
        let (first, last) = (values::bytes(first)?, values::bytes(last)?);
        let (sign, by) =
            step.split_at_checked(1).filter(|(sign, _)| ["*", "+"].contains(sign)).ok_or_else(form)?;
        let by = values::bytes(by)?;
        let next = |value: u64| match sign {
            "*" if by >= 2 && value > 0 => Ok(value.checked_mul(by)),
            "+" if by >= 1 => Ok(value.checked_add(by)),
            "*" => Err("a sweep by * needs a FIRST above 0 and a factor of 2 or more".to_string()),
            "+" => Err("a sweep by + needs a step of 1 or more".into()),
            _ => Err(form()),
        };
        let mut list = Vec::new();
        let mut value = first;
        while value <= last {
            if list.len() == MOST_VALUES {
                return Err(format!("more than {MOST_VALUES} values: take a larger step"));
            }
            list.push(value);
            match next(value)? {
                Some(following) => value = following,
                None => break,
            }
        }
        if list.is_empty() {
            return Err(format!("FIRST {first} is above LAST {last}"));
        }
        Ok(Sweep { variable, values: list })
    }

    /// The variable's name.
    pub fn name(&self) -> &'static str {
        VARIABLES.iter().find(|(_, v)| *v == self.variable).map_or("", |(name, _)| name)
    }

    /// The options with one value put in.
    ///
    /// # Errors
    /// The value does not fit the option.
    pub fn apply(&self, args: &PerfArgs, value: u64) -> Result<PerfArgs, String> {
        let mut args = args.clone();
        let number = || u32::try_from(value).map_err(|_| format!("{}: {value} is too large", self.name()));
        match self.variable {
            Variable::Size => args.load.size = Some(values::size(&value.to_string())?),
            Variable::Iters => args.load.iters = Some(value),
            Variable::Qps => args.path.qps = Some(number()?),
            Variable::TxDepth => args.load.tx_depth = Some(number()?),
            Variable::RxDepth => args.load.rx_depth = Some(number()?),
            Variable::CqMod => args.load.cq_mod = Some(number()?),
            Variable::PostList => args.load.post_list = Some(number()?),
            Variable::Inline => args.load.inline_size = Some(number()?),
            Variable::RateLimit => args.pace.limit = Some(value as f64),
            Variable::Reads => match u8::try_from(value) {
                Ok(reads @ 1..=128) => args.path.outs = Some(reads),
                _ => return Err(format!("outs: asked {value}, allowed 1 to 128")),
            },
            Variable::Mtu => args.path.mtu = Some(values::mtu(&value.to_string())?),
        }
        Ok(args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_as_qperf_makes_them() {
        let sweep = |text: &str| Sweep::parse(text).unwrap();
        assert_eq!(sweep("size:1:64K:*2").values.len(), 17);
        assert_eq!(sweep("size:1:64K:*2").values[16], 65536);
        assert_eq!(sweep("qp:1:8:+1").values, [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(sweep("tx-depth:3:10:+4").values, [3, 7]);
        assert_eq!(sweep("txdepth:1:1:*2").variable, Variable::TxDepth);
        assert_eq!(
            sweep("iters:10:10000000000000:*1000").values,
            [10, 10_000, 10_000_000, 10_000_000_000, 10_000_000_000_000]
        );
        assert_eq!(sweep("size:0:2:+1").values, [0, 1, 2]);
    }

    #[test]
    fn bad_sweeps_are_named() {
        for (text, told) in [
            ("", "VAR:FIRST:LAST:STEP"),
            ("size:1:2", "VAR:FIRST:LAST:STEP"),
            ("sizes:1:2:*2", "allowed are size"),
            ("size:1:2:2", "VAR:FIRST:LAST:STEP"),
            ("size:1:2:", "VAR:FIRST:LAST:STEP"),
            ("size:0:8:*2", "FIRST above 0"),
            ("size:1:8:*1", "factor of 2"),
            ("size:1:8:+0", "step of 1"),
            ("size:9:8:+1", "above LAST"),
            ("size:1:1000000:+1", "more than 256"),
            ("size:x:8:+1", "number of bytes"),
        ] {
            let error = Sweep::parse(text).unwrap_err();
            assert!(error.contains(told), "{text}: {error}");
        }
    }
}

//! Which packet may follow which in the request stream of one queue pair.

use ferroce_wire::{Op, Part};

/// Why a packet can't come here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SequenceFault {
    /// Middle or last without a first.
    MissingFirst,
    /// A new message inside another.
    MissingLast,
    /// The message continues with another operation.
    OperationChanged,
}

/// Whether a packet of `op` and `part` may come while the message `open` is in progress.
#[inline]
pub(crate) fn follows(open: Option<Op>, op: Op, part: Part) -> Result<(), SequenceFault> {
    match (open, part) {
        (None, Part::First | Part::Only) => Ok(()),
        (None, Part::Middle | Part::Last) => Err(SequenceFault::MissingFirst),
        (Some(_), Part::First | Part::Only) => Err(SequenceFault::MissingLast),
        (Some(current), Part::Middle | Part::Last) if current == op => Ok(()),
        (Some(_), Part::Middle | Part::Last) => Err(SequenceFault::OperationChanged),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case() {
        use SequenceFault::*;
        assert_eq!(follows(None, Op::Send, Part::First), Ok(()));
        assert_eq!(follows(None, Op::ReadRequest, Part::Only), Ok(()));
        assert_eq!(follows(None, Op::Send, Part::Middle), Err(MissingFirst));
        assert_eq!(follows(None, Op::Write, Part::Last), Err(MissingFirst));
        assert_eq!(follows(Some(Op::Send), Op::Send, Part::Middle), Ok(()));
        assert_eq!(follows(Some(Op::Write), Op::Write, Part::Last), Ok(()));
        assert_eq!(follows(Some(Op::Send), Op::Write, Part::Last), Err(OperationChanged));
        assert_eq!(follows(Some(Op::Write), Op::Send, Part::Middle), Err(OperationChanged));
        assert_eq!(follows(Some(Op::Write), Op::Write, Part::First), Err(MissingLast));
        assert_eq!(follows(Some(Op::Write), Op::ReadRequest, Part::Only), Err(MissingLast));
    }
}

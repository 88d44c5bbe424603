//! Queue pair states as a written-out table (IBTA 10.3.1; roce-wire 7.1). A pair that is not in it is refused.

use ferroce_verbs::{QpModify, QpState};

/// What may be asked of a queue pair's state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum QpEvent {
    /// [`QpModify::ToInit`].
    ToInit,
    /// [`QpModify::ToRtr`].
    ToRtr,
    /// [`QpModify::ToRts`].
    ToRts,
    /// [`QpModify::ToSqd`].
    ToSqd,
    /// [`QpModify::SqdToRts`].
    SqdToRts,
    /// [`QpModify::SqeToRts`].
    SqeToRts,
    /// [`QpModify::Change`].
    Change,
    /// [`QpModify::ToErr`].
    ToErr,
    /// [`QpModify::ToReset`].
    ToReset,
}

impl QpEvent {
    /// All of them.
    pub const ALL: [QpEvent; 9] = [
        QpEvent::ToInit,
        QpEvent::ToRtr,
        QpEvent::ToRts,
        QpEvent::ToSqd,
        QpEvent::SqdToRts,
        QpEvent::SqeToRts,
        QpEvent::Change,
        QpEvent::ToErr,
        QpEvent::ToReset,
    ];

    /// The event of a transition.
    pub const fn of(modify: &QpModify) -> QpEvent {
        match modify {
            QpModify::ToInit(_) => QpEvent::ToInit,
            QpModify::ToRtr(_) => QpEvent::ToRtr,
            QpModify::ToRts(_) => QpEvent::ToRts,
            QpModify::ToSqd => QpEvent::ToSqd,
            QpModify::SqdToRts => QpEvent::SqdToRts,
            QpModify::SqeToRts => QpEvent::SqeToRts,
            QpModify::Change(_) => QpEvent::Change,
            QpModify::ToErr => QpEvent::ToErr,
            QpModify::ToReset => QpEvent::ToReset,
        }
    }
}

/// Transitions. SQE is for UC and UD only.
pub const QP_TABLE: &[(QpState, QpEvent, QpState)] = {
    use QpEvent::*;
    use QpState::*;
    &[
        (Reset, ToInit, Init),
        (Init, ToInit, Init),
        (Init, ToRtr, Rtr),
        (Rtr, ToRts, Rts),
        (Rts, ToSqd, Sqd),
        (Sqd, SqdToRts, Rts),
        (Sqe, SqeToRts, Rts),
        (Init, Change, Init),
        (Rts, Change, Rts),
        (Sqd, Change, Sqd),
        (Init, ToErr, Err),
        (Rtr, ToErr, Err),
        (Rts, ToErr, Err),
        (Sqd, ToErr, Err),
        (Sqe, ToErr, Err),
        (Err, ToErr, Err),
        (Reset, ToReset, Reset),
        (Init, ToReset, Reset),
        (Rtr, ToReset, Reset),
        (Rts, ToReset, Reset),
        (Sqd, ToReset, Reset),
        (Sqe, ToReset, Reset),
        (Err, ToReset, Reset),
    ]
};

/// Where `event` leads from `from`; `None` where it is refused. (A reliable connection is never in SQE.)
pub fn step(from: QpState, event: QpEvent) -> Option<QpState> {
    QP_TABLE.iter().find(|(state, on, _)| *state == from && *on == event).map(|(_, _, to)| *to)
}

/// Receives may be posted.
#[inline]
pub(crate) const fn may_post_recv(state: QpState) -> bool {
    match state {
        QpState::Reset => false,
        QpState::Init | QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe | QpState::Err => true,
    }
}

/// Sends may be posted (in SQD they wait, in SQE and ERR they are flushed).
#[inline]
pub(crate) const fn may_post_send(state: QpState) -> bool {
    match state {
        QpState::Reset | QpState::Init | QpState::Rtr => false,
        QpState::Rts | QpState::Sqd | QpState::Sqe | QpState::Err => true,
    }
}

/// Packets are taken.
#[inline]
pub(crate) const fn may_receive(state: QpState) -> bool {
    match state {
        QpState::Reset | QpState::Init | QpState::Err => false,
        QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe => true,
    }
}

/// Requests that were started are sent, answered and timed.
#[inline]
pub(crate) const fn may_request(state: QpState) -> bool {
    match state {
        QpState::Rts | QpState::Sqd => true,
        QpState::Reset | QpState::Init | QpState::Rtr | QpState::Sqe | QpState::Err => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;
    use alloc::string::String;

    /// Every pair of state and event, so that a change of the table shows up in review.
    fn render() -> String {
        let mut out = String::new();
        for from in QpState::ALL {
            for event in QpEvent::ALL {
                let to = step(from, event).map_or_else(|| "refused".into(), |to| format!("{to:?}"));
                out.push_str(&format!("{:<6} {:<9} {to}\n", format!("{from:?}"), format!("{event:?}")));
            }
        }
        for state in QpState::ALL {
            out.push_str(&format!(
                "{:<6} post_recv {} post_send {} receive {} request {}\n",
                format!("{state:?}"),
                may_post_recv(state),
                may_post_send(state),
                may_receive(state),
                may_request(state)
            ));
        }
        out
    }

    #[test]
    fn every_pair_is_decided() {
        let rendered = render();
        assert_eq!(rendered, include_str!("qp_table.txt"), "rendered table:\n{rendered}");
    }

    #[test]
    fn no_pair_twice() {
        for (i, (from, event, _)) in QP_TABLE.iter().enumerate() {
            assert!(!QP_TABLE[..i].iter().any(|(f, e, _)| f == from && e == event), "{from:?} {event:?}");
        }
    }
}

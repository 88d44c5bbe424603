//! The queue pairs of a test: what each has posted and seen, and who may post next.
//!
//! Invariants, per lane and for the sums: `completed <= posted <= end`, `received <= recv_posted`. A lane stands in the
//! queue of those that may post at most once, and leaves it when it has no room or nothing to post; a completion, a
//! message or a new end brings it back. Lanes are served as perftest does it: the window of one is filled before the next
//! one's turn.

/// Bits of a work request id that number the messages of a lane.
const MESSAGE_BITS: u32 = 48;

/// Work request id of a message; also its number in the data pattern.
pub(super) const fn wr_id(lane: usize, message: u64) -> u64 {
    ((lane as u64) << MESSAGE_BITS) | message
}

/// Lane and message of a work request id.
pub(super) const fn split(wr_id: u64) -> (usize, u64) {
    ((wr_id >> MESSAGE_BITS) as usize, wr_id & ((1 << MESSAGE_BITS) - 1))
}

/// One queue pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lane {
    /// Sends posted.
    pub posted: u64,
    /// Sends known to be complete.
    pub completed: u64,
    /// No more sends than this for now.
    pub end: u64,
    /// Where the phase began: lists and moderation count from there.
    pub phase_from: u64,
    /// Receives posted.
    pub recv_posted: u64,
    /// Messages received; of write latency, seen in memory.
    pub received: u64,
    /// The last send asked for a completion.
    pub tail_signalled: bool,
    queued: bool,
}

/// All of them.
pub(super) struct Lanes {
    all: Box<[Lane]>,
    ring: Box<[u32]>,
    head: usize,
    len: usize,
    /// Sums.
    pub posted: u64,
    pub completed: u64,
    pub recv_posted: u64,
    pub received: u64,
}

impl Lanes {
    /// `count` lanes, at least one, that may post up to `end` each.
    pub fn new(count: u32, end: u64) -> Lanes {
        let lane = Lane {
            posted: 0,
            completed: 0,
            end,
            phase_from: 0,
            recv_posted: 0,
            received: 0,
            tail_signalled: true,
            queued: false,
        };
        let count = count.max(1);
        let mut lanes = Lanes {
            all: vec![lane; count as usize].into_boxed_slice(),
            ring: vec![0; count as usize].into_boxed_slice(),
            head: 0,
            len: 0,
            posted: 0,
            completed: 0,
            recv_posted: 0,
            received: 0,
        };
        (0..count as usize).for_each(|lane| lanes.offer(lane));
        lanes
    }

    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// A lane that a work request id names, if there is such a one.
    pub fn get(&self, lane: usize) -> Option<&Lane> {
        self.all.get(lane)
    }

    /// A lane that is known to exist.
    pub fn lane(&self, lane: usize) -> &Lane {
        &self.all[lane]
    }

    /// The lane may post: it joins the end of the queue, unless it stands there.
    pub fn offer(&mut self, lane: usize) {
        let entry = &mut self.all[lane];
        if entry.queued {
            return;
        }
        entry.queued = true;
        let at = (self.head + self.len) % self.ring.len();
        self.ring[at] = lane as u32;
        self.len += 1;
    }

    /// Whose turn it is.
    pub fn front(&self) -> Option<usize> {
        (self.len > 0).then(|| self.ring[self.head] as usize)
    }

    /// The first in the queue leaves it.
    pub fn pop(&mut self) {
        if let Some(lane) = self.front() {
            self.all[lane].queued = false;
            self.head = (self.head + 1) % self.ring.len();
            self.len -= 1;
        }
    }

    pub fn count_posted(&mut self, lane: usize, signalled: bool) {
        let entry = &mut self.all[lane];
        entry.posted += 1;
        entry.tail_signalled = signalled;
        self.posted += 1;
    }

    /// All messages of a lane before `to` are complete.
    pub fn count_completed(&mut self, lane: usize, to: u64) {
        let entry = &mut self.all[lane];
        self.completed += to - entry.completed;
        entry.completed = to;
    }

    pub fn count_recv_posted(&mut self, lane: usize) {
        self.all[lane].recv_posted += 1;
        self.recv_posted += 1;
    }

    pub fn count_received(&mut self, lane: usize) {
        self.all[lane].received += 1;
        self.received += 1;
    }

    /// A new phase: all may post up to `end`.
    pub fn set_end(&mut self, end: u64) {
        for lane in 0..self.all.len() {
            self.all[lane].end = end;
            self.all[lane].phase_from = self.all[lane].posted;
            self.offer(lane);
        }
    }

    /// Nothing new: a lane whose last send asked for no completion posts one more that does. Returns how many sends there
    /// will have been.
    pub fn close(&mut self) -> u64 {
        let mut goal = 0;
        for lane in 0..self.all.len() {
            let entry = &mut self.all[lane];
            entry.end = entry.posted + u64::from(!entry.tail_signalled);
            goal += entry.end;
            self.offer(lane);
        }
        goal
    }

    /// The first lane that waits for a completion, for an error's sake.
    pub fn waiting(&self) -> Option<usize> {
        self.all.iter().position(|lane| lane.completed < lane.posted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_carry_lane_and_message() {
        for (lane, message) in [(0, 0), (0, (1 << 48) - 1), (4095, 0), (7, 123_456)] {
            assert_eq!(split(wr_id(lane, message)), (lane, message));
            assert_eq!(wr_id(lane, message) >> 63, 0, "the mark of receives stays free");
        }
    }

    #[test]
    fn a_lane_stands_in_the_queue_once_and_turns_come_round() {
        let mut lanes = Lanes::new(3, 5);
        for lane in [0, 1, 2] {
            lanes.offer(lane);
            assert_eq!(lanes.front(), Some(lane));
            lanes.pop();
        }
        assert_eq!(lanes.front(), None);
        lanes.offer(2);
        lanes.offer(2);
        lanes.offer(0);
        assert_eq!(lanes.front(), Some(2));
        lanes.pop();
        assert_eq!(lanes.front(), Some(0));
        lanes.pop();
        assert_eq!(lanes.front(), None);
    }

    #[test]
    fn closing_asks_for_a_last_completion_where_one_is_missing() {
        let mut lanes = Lanes::new(2, u64::MAX);
        lanes.count_posted(0, true);
        lanes.count_posted(1, true);
        lanes.count_posted(1, false);
        assert_eq!(lanes.close(), 4);
        assert_eq!((lanes.lane(0).end, lanes.lane(1).end), (1, 3));
    }
}

//! The order of a conversation with perftest, per test: what is exchanged when, and where the test runs in between.
//!
//! Pure. An exchange is always: the client sends, the server answers. The version, two sizes of the machine and the
//! path MTU come before every script. The tests hold this against conversations recorded between two originals.

use ferroce_services::{PerfMode, PerfOp, Role};

/// What decides the order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Operation.
    pub op: PerfOp,
    /// Latency or bandwidth.
    pub mode: PerfMode,
    /// Our side.
    pub role: Role,
    /// Both sides send.
    pub bidirectional: bool,
    /// By time instead of a count.
    pub timed: bool,
    /// A run per size of `-a`.
    pub all: bool,
    /// Queue pairs.
    pub qps: usize,
    /// Sizes.
    pub sizes: usize,
}

/// One step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// First exchange of a queue pair, by index: what it says is to be believed.
    Introduce(usize),
    /// The same line again, as a signal.
    Again(usize),
    /// Bring the queue pairs up.
    Connect,
    /// Be ready for the size of this index: receives posted, memory prepared.
    Prepare(usize),
    /// Start and finish the test of this size.
    Run(usize),
    /// Let the peer do its tests, until it says something.
    Serve,
    /// Exchange reports.
    Report,
    /// Tell `done`.
    Done,
    /// The other side just goes away: wait for that.
    Leave,
}

impl Shape {
    /// True where our side only lets the peer read and write.
    pub fn is_passive(&self) -> bool {
        self.role == Role::Server
            && match (self.op, self.mode) {
                (PerfOp::Send, _) | (PerfOp::Write, PerfMode::Lat) => false,
                (_, PerfMode::Lat) => true,
                (_, PerfMode::Bw) => !self.bidirectional,
            }
    }

    /// All steps in order.
    pub fn script(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.mode == PerfMode::Lat && self.op != PerfOp::Send {
            steps.push(Step::Introduce(0));
        }
        steps.extend((0..self.qps).map(Step::Introduce));
        steps.push(Step::Connect);
        if self.op == PerfOp::Send {
            steps.push(Step::Again(0));
        }
        steps.extend((0..self.qps).map(Step::Again));
        if self.op == PerfOp::Send {
            self.sends(&mut steps);
            return steps;
        }
        // Memory is prepared before the other side may write.
        steps.push(Step::Prepare(0));
        steps.push(Step::Again(0));
        match (self.op, self.mode) {
            (PerfOp::Write, PerfMode::Lat) => {
                for size in 0..self.sizes {
                    steps.extend([Step::Prepare(size), Step::Run(size)]);
                }
                steps.push(Step::Leave);
            }
            (_, PerfMode::Lat) => {
                self.own_runs(&mut steps);
                steps.extend([Step::Again(0), Step::Done]);
            }
            (_, PerfMode::Bw) if self.bidirectional => {
                for size in 0..self.sizes {
                    steps.extend([Step::Prepare(size), Step::Again(0), Step::Run(size)]);
                    if self.all {
                        steps.push(Step::Again(0));
                    }
                    steps.push(Step::Report);
                }
                steps.extend([Step::Again(0), Step::Done]);
            }
            (_, PerfMode::Bw) => {
                self.own_runs(&mut steps);
                steps.extend([Step::Again(0), Step::Report, Step::Again(0), Step::Done]);
            }
        }
        steps
    }

    /// Runs of the side that measures, or the other side's patience.
    fn own_runs(&self, steps: &mut Vec<Step>) {
        if self.is_passive() {
            steps.push(Step::Serve);
        } else {
            for size in 0..self.sizes {
                steps.extend([Step::Prepare(size), Step::Run(size)]);
            }
        }
    }

    fn sends(&self, steps: &mut Vec<Step>) {
        for size in 0..self.sizes {
            steps.extend([Step::Prepare(size), Step::Again(0), Step::Run(size)]);
            if self.bidirectional && !self.timed {
                steps.push(Step::Report);
            }
            if self.all && self.mode == PerfMode::Bw {
                steps.push(Step::Again(0));
            }
        }
        steps.extend([Step::Again(0), Step::Done]);
    }
}

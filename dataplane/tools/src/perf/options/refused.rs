//! Options of perftest's that are known and refused, each with the reason: a script that carries over learns at once what
//! is missing, instead of "unexpected argument".

use crate::fail::{Fail, Outcome};

const CM: &str = "comes with the connection manager";
const MULTICAST: &str = "comes with multicast";
const SRQ: &str = "comes with shared receive queues in perf";
const DEVICE: &str = "needs an RNIC";

/// What is understood only to be refused.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct RefusedArgs {
    #[arg(short = 'R', long = "rdma_cm", hide = true)]
    rdma_cm: bool,
    #[arg(short = 'z', long = "comm_rdma_cm", alias = "com_rdma_cm", hide = true)]
    comm_rdma_cm: bool,
    #[arg(short = 'g', long = "mcg", hide = true, value_name = "N")]
    mcg: Option<String>,
    #[arg(short = 'M', long = "MGID", hide = true, value_name = "MGID")]
    mgid: Option<String>,
    #[arg(long = "use-srq", alias = "use_srq", hide = true)]
    use_srq: bool,
    #[arg(short = 'X', long = "vector", hide = true, value_name = "N")]
    vector: Option<String>,
    #[arg(short = 'O', long = "dualport", hide = true)]
    dual_port: bool,
    #[arg(short = 'W', long = "report-counters", hide = true, value_name = "LIST")]
    counters: Option<String>,
    #[arg(long = "dlid", hide = true, value_name = "LID")]
    dlid: Option<String>,
    #[arg(long = "reversed", hide = true)]
    reversed: bool,
    #[arg(long = "odp", hide = true)]
    odp: bool,
    #[arg(long = "recv_post_list", hide = true, value_name = "N")]
    recv_post_list: Option<u32>,
    #[arg(long = "mr_per_qp", hide = true)]
    mr_per_qp: bool,
    #[arg(long = "use_cuda", hide = true, value_name = "DEVICE", num_args = 0..=1, require_equals = true)]
    use_cuda: Option<Option<String>>,
    #[arg(long = "latency_gap", hide = true, value_name = "USEC")]
    latency_gap: Option<String>,
}

impl RefusedArgs {
    /// Refuses the first one given.
    pub fn check(&self) -> Outcome<()> {
        let given = [
            (self.rdma_cm, "-R, --rdma_cm", CM),
            (self.comm_rdma_cm, "-z, --comm_rdma_cm", CM),
            (self.mcg.is_some(), "-g, --mcg", MULTICAST),
            (self.mgid.is_some(), "-M, --MGID", MULTICAST),
            (self.use_srq, "--use-srq", SRQ),
            (self.vector.is_some(), "-X, --vector", "one worker has one completion vector"),
            (self.dual_port, "-O, --dualport", "a data plane has one port"),
            (self.counters.is_some(), "-W, --report-counters", "use --stats, which prints all of them"),
            (self.dlid.is_some(), "--dlid", "Ethernet has no LIDs"),
            (self.reversed, "--reversed", "start the client on the other side instead"),
            (self.odp, "--odp", DEVICE),
            (
                self.recv_post_list.is_some_and(|n| n != 1),
                "--recv_post_list",
                "receives are posted one by one",
            ),
            (self.mr_per_qp, "--mr_per_qp", "all queue pairs of a test share one region"),
            (self.use_cuda.is_some(), "--use_cuda", DEVICE),
            (self.latency_gap.is_some(), "--latency_gap", "use --rate_limit with --rate_units=p"),
        ];
        match given.iter().find(|(is_given, ..)| *is_given) {
            Some((_, option, reason)) => Err(Fail::usage(format!("{option}: {reason}"))),
            None => Ok(()),
        }
    }
}

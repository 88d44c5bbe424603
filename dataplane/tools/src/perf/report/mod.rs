//! What `perf` prints: perftest's header and rows for people; JSON, CSV or one number for programs.
//!
//! Owns [`Teller`], which is told what happens, in order, and prints. Nothing here measures or waits.

mod csv;
mod header;
mod host;
mod original_json;
mod progress;
mod row_json;
mod rows;
pub mod units;

use std::path::Path;
use std::time::{Duration, Instant};

use ferroce_services::{PerfLayout, PerfMode, PerfReport, Role};
use serde_json::{Map, Value};

use super::backend::Backend;
use super::options::{PerfArgs, Test, Transport};
use super::plan::Item;
use super::rdma::{Ends, Rdma};
use super::talk::Measured;
use crate::fail::{Fail, Outcome};
use crate::json;
use crate::out::say;
use crate::plane::Plane;
use host::{Busy, Host};
use progress::Progress;
use rows::Scale;
use units::Sum;

/// perftest's rule.
const RULE: &str = "---------------------------------------------------------------------------------------";

/// What is known besides the result.
pub struct Facts<'f> {
    /// Options.
    pub args: &'f PerfArgs,
    /// The test.
    pub item: &'f Item,
    /// Side.
    pub role: Role,
    /// The peer's TCP address.
    pub peer: &'f str,
    /// Who the peer is: `ferroce`, `perftest`.
    pub kind: String,
    /// The data plane, with RDMA.
    pub plane: Option<&'f Plane>,
    /// Core of the worker or of the socket's thread.
    pub core: Option<usize>,
    /// Queue pairs, with RDMA.
    pub ends: Option<Ends>,
    transport: Transport,
}

impl<'f> Facts<'f> {
    /// Of a test between two of ours.
    pub fn of(args: &'f PerfArgs, item: &'f Item, role: Role, peer: &'f str, backend: &'f Backend) -> Self {
        let (kind, transport) = ("ferroce".into(), backend.transport());
        let (plane, core, ends) = (backend.plane(), backend.core(), backend.ends());
        Facts { args, item, role, peer, kind, plane, core, ends, transport }
    }

    /// Of a test with a program of perftest.
    pub fn of_rdma(args: &'f PerfArgs, item: &'f Item, role: Role, peer: &'f str, rdma: &'f Rdma) -> Self {
        let plane = rdma.plane();
        let (kind, transport) = ("perftest".into(), Transport::Rdma);
        Facts {
            args,
            item,
            role,
            peer,
            kind,
            plane: Some(plane),
            core: plane.core(),
            ends: rdma.ends(),
            transport,
        }
    }

    /// What carries the test.
    pub fn transport(&self) -> Transport {
        self.transport
    }

    /// True if this side has rows to tell: a server of a latency test only where both sides measure.
    fn measures(&self) -> bool {
        let spec = &self.item.spec;
        let both = spec.layout == PerfLayout::Perftest && spec.requests();
        self.role == Role::Client || spec.mode == PerfMode::Bw || both
    }
}

/// What a test found.
pub struct Finding {
    /// Our side.
    pub report: PerfReport,
    /// What the other side told.
    pub theirs: Option<Measured>,
}

/// Prints.
pub struct Teller<'a> {
    args: &'a PerfArgs,
    host: Host,
    progress: Progress,
    busy: Option<Busy>,
    /// The test whose header was printed.
    titled: Option<(Test, ferroce_verbs::QpType)>,
    has_csv_head: bool,
    results: Vec<Value>,
    info: Option<Map<String, Value>>,
    below: Vec<String>,
    /// Of a test without end: when the last row was told, and the messages done by then.
    lap: (Instant, u64),
}

/// Between two rows of a test without end.
const LAP: Duration = Duration::from_secs(5);

impl<'a> Teller<'a> {
    /// For a run.
    pub fn new(args: &'a PerfArgs) -> Self {
        Teller {
            args,
            host: Host::read(),
            progress: Progress::new(args.report.progress),
            busy: None,
            titled: None,
            has_csv_head: false,
            results: Vec::new(),
            info: None,
            below: Vec::new(),
            lap: (Instant::now(), 0),
        }
    }

    /// A server is ready for a client.
    pub fn waiting(&self) {
        if !self.args.is_quiet() {
            let stars = "************************************";
            say!("\n{stars}\n* Waiting for client to connect... *\n{stars}");
        }
    }

    /// A test begins.
    pub fn begin(&mut self, _item: &Item) {
        self.progress.begin();
        self.lap = (Instant::now(), 0);
        self.busy = Busy::read();
    }

    fn scale(&self, item: &Item) -> Scale {
        let hz = if self.args.report.cycles { self.host.hz() } else { None };
        Scale::of(&item.spec, hz)
    }

    /// The queue pairs are connected: prints the header of a test that is another than the last.
    pub fn header(&mut self, facts: &Facts<'_>) {
        let test = (facts.item.test(), facts.item.spec.connection);
        if self.args.is_quiet() || self.titled == Some(test) {
            return;
        }
        if self.titled.is_some() {
            say!("{RULE}");
        }
        self.titled = Some(test);
        if let Some(plane) = facts.plane {
            plane.fallbacks().iter().for_each(|f| eprintln!("{}", json::fallback_line(f)));
        }
        say!("{}", header::text(facts));
        if facts.measures() {
            say!("{}", rows::heads(&facts.item.spec, self.args, self.scale(facts.item)));
        }
    }

    /// How far the running test is.
    pub fn progress(&mut self, item: &Item, done: u64) {
        if item.is_endless() {
            self.lap(item, done);
        } else {
            self.progress.tell(item, done);
        }
    }

    /// Rows of a test without end: each of the time since the last one.
    fn lap(&mut self, item: &Item, done: u64) {
        let (since, before) = self.lap;
        let ran = since.elapsed();
        if ran < self.args.load.duration.unwrap_or(LAP) {
            return;
        }
        self.lap = (Instant::now(), done);
        let messages = done.saturating_sub(before);
        let msgs_per_s = messages as f64 / ran.as_secs_f64();
        let gbytes_per_s = msgs_per_s * f64::from(item.spec.size) / 1e9;
        let sum = Sum { messages, gbytes_per_s, peak: None, msgs_per_s };
        if !self.args.is_quiet() {
            say!("{}", rows::one_direction(&item.spec, &sum, self.args));
        }
    }

    /// A test is over.
    pub fn result(&mut self, finding: &Finding, facts: &Facts<'_>) -> Outcome<()> {
        self.progress.clear();
        let busy = self.busy.zip(Busy::read()).map(|(before, now)| now.percent_since(before));
        let percent = if self.args.report.cpu_util { busy } else { None };
        self.judge(finding, facts);
        if self.args.report.out_json
            && let Some(result) = original_json::result(finding, facts, percent)
        {
            self.info.get_or_insert_with(|| original_json::info(facts));
            self.results.push(result);
        }
        let scale = self.scale(facts.item);
        if self.args.report.json {
            json::print(&row_json::Row::of(finding, facts, &self.host));
        } else if self.args.report.csv {
            if !std::mem::replace(&mut self.has_csv_head, true) {
                say!("{}", csv::HEAD);
            }
            say!("{}", csv::line(finding, facts));
        } else if let Some(what) = self.args.report.output {
            if let Some(number) = rows::only(finding, facts, what, scale) {
                say!("{number}");
            }
        } else {
            self.text(finding, facts, scale, percent);
        }
        Ok(())
    }

    fn text(&self, finding: &Finding, facts: &Facts<'_>, scale: Scale, percent: Option<f64>) {
        let report = &self.args.report;
        let unsorted = if report.unsorted { rows::unsorted(finding, scale) } else { None };
        let histogram = if report.histogram { rows::histogram(finding, scale) } else { None };
        for list in unsorted.iter().chain(&histogram) {
            say!("{list}");
        }
        if unsorted.is_some() || histogram.is_some() {
            say!("{RULE}\n{}", rows::heads(&facts.item.spec, self.args, scale));
        }
        let Some(row) = rows::row(finding, facts, scale, percent) else { return };
        if let Some(label) = &facts.item.label {
            say!(" {label}");
        }
        say!("{row}");
        if finding.report.lost > 0 {
            let lost = finding.report.lost;
            say!(
                " {lost} messages were lost: {} repeats none",
                super::options::connection_name(facts.item.spec.connection)
            );
        }
        if report.percentiles {
            say!("{}", rows::percentiles(finding, scale, self.host.hz()));
        }
        if report.both
            && let Some(theirs) = &finding.theirs
        {
            self.both(finding, theirs, facts, scale);
        }
    }

    /// The two directions apart, in perftest's words.
    fn both(&self, finding: &Finding, theirs: &Measured, facts: &Facts<'_>, scale: Scale) {
        let spec = &facts.item.spec;
        let heads = rows::heads(spec, self.args, scale);
        let own = Sum::of(&finding.report, None, spec);
        let remote = Sum {
            messages: theirs.messages,
            gbytes_per_s: theirs.gbytes_per_s,
            peak: theirs.gbytes_per_s_peak,
            msgs_per_s: theirs.msgs_per_s,
        };
        for (name, sum) in [("Local", own), ("Remote", remote)] {
            let row = rows::one_direction(spec, &sum, self.args);
            say!("{RULE}\n\n {name} results: \n{RULE}\n{heads}\n{row}");
        }
    }

    /// Notes what is below a floor that was asked for.
    fn judge(&mut self, finding: &Finding, facts: &Facts<'_>) {
        let spec = &facts.item.spec;
        if spec.mode == PerfMode::Lat || (spec.is_passive() && finding.theirs.is_none()) {
            return;
        }
        let report = &self.args.report;
        let sum = Sum::of(&finding.report, finding.theirs.as_ref(), spec);
        let (bandwidth, rate) = (units::bandwidth(sum.gbytes_per_s, report.gbits), sum.msgs_per_s / 1e6);
        let size = spec.size;
        if let Some(floor) = report.limit_bw.filter(|floor| bandwidth < *floor) {
            let unit = units::bandwidth_unit(report.gbits);
            self.below
                .push(format!("{size} bytes: bandwidth {bandwidth:.2} {unit} is below --limit_bw {floor}"));
        }
        if let Some(floor) = report.limit_msgrate.filter(|floor| rate < *floor) {
            self.below
                .push(format!("{size} bytes: message rate {rate:.6} Mpps is below --limit_msgrate {floor}"));
        }
    }

    /// The run is over: closes the table, writes files, and fails if something was below a floor.
    pub fn end(&mut self) -> Outcome<()> {
        self.progress.clear();
        if self.titled.take().is_some() {
            say!("{RULE}");
        }
        if let Some(info) = self.info.take() {
            let path = self.args.report.out_json_file.as_deref();
            let path = path.unwrap_or(Path::new(original_json::DEFAULT_FILE));
            original_json::write(path, info, std::mem::take(&mut self.results))?;
        }
        match std::mem::take(&mut self.below) {
            below if below.is_empty() => Ok(()),
            below => Err(Fail::failed(below.join("; "))),
        }
    }
}

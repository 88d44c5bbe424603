//! `status`, `dev_list` and `statistic`: what control and its appliances say of themselves.
//!
//! Owns nothing. One appliance that is away does not keep the others from being shown: it is listed with its error.

use ferroce_api::ApiError;
use ferroce_api::appliance::{Command, Response};
use ferroce_api::rpc::{
    DevEntry, DevListResult, DevParams, DevStatistic, DevStatus, StatisticResult, StatusResult,
};

use crate::control::Control;
use crate::dp_link::Link;

pub(super) async fn status(control: &Control, params: DevParams) -> Result<StatusResult, ApiError> {
    let mut devs = Vec::new();
    for link in control.select(params.dev.as_deref())? {
        let (status, error) = match link.one(Command::Status).await {
            Ok(Response::Status(status)) => (Some(status), None),
            Ok(other) => (None, Some(link.unexpected(&other))),
            Err(error) => (None, Some(error)),
        };
        devs.push(DevStatus { dev: link.name().to_owned(), status, error });
    }
    Ok(StatusResult { control: control.version(), devs, counters: control.counter_list() })
}

pub(super) async fn statistic(control: &Control, params: DevParams) -> Result<StatisticResult, ApiError> {
    let mut devs = Vec::new();
    for link in control.select(params.dev.as_deref())? {
        let (stats, error) = match link.one(Command::Stats).await {
            Ok(Response::Stats(stats)) => (Some(stats), None),
            Ok(other) => (None, Some(link.unexpected(&other))),
            Err(error) => (None, Some(error)),
        };
        devs.push(DevStatistic { ifindex: control.index(link), dev: link.name().to_owned(), stats, error });
    }
    Ok(StatisticResult { devs })
}

pub(super) async fn list(control: &Control) -> DevListResult {
    let mut devs = Vec::new();
    for link in control.links() {
        devs.push(entry(control.index(link), link).await);
    }
    DevListResult { devs }
}

async fn entry(ifindex: u32, link: &Link) -> DevEntry {
    // Asking also reconnects, so an appliance that just came up is seen.
    let (node_guid, error) = match link.one(Command::QueryDevice).await {
        Ok(Response::Device(device)) => (Some(guid(device.node_guid)), None),
        Ok(other) => (None, Some(link.unexpected(&other))),
        Err(error) => (None, Some(error)),
    };
    DevEntry {
        ifindex,
        ifname: link.name().to_owned(),
        socket: link.socket().display().to_string(),
        connected: error.is_none(),
        pid: link.hello().map(|hello| hello.pid),
        node_guid,
        error,
    }
}

/// As `rdma` prints it: `0200:00ff:fe00:0001`.
fn guid(guid: u64) -> String {
    let [a, b, c, d, e, f, g, h] = guid.to_be_bytes();
    format!("{a:02x}{b:02x}:{c:02x}{d:02x}:{e:02x}{f:02x}:{g:02x}{h:02x}")
}

#[cfg(test)]
mod tests {
    #[test]
    fn guids_look_as_rdma_prints_them() {
        assert_eq!(super::guid(0x5054_00ff_fe00_0066), "5054:00ff:fe00:0066");
    }
}

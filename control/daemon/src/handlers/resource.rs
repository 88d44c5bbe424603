//! `resource_show`: listings of protection domains, regions, completion queues and queue pairs.
//!
//! Owns nothing. The invariant: one answer stays well under the limit of a response; the rest follows by cursor. Keys
//! and addresses of regions are shown on the control socket only, as the kernel shows them to privileged users only.

use ferroce_api::ApiError;
use ferroce_api::appliance::{Command, ListKind, Lkey, MrEntry, Page, Response};
use ferroce_api::rpc::{DevResources, ResourceCursor, ResourceParams, ResourceResult};
use ferroce_wire::Rkey;

use crate::control::{Caller, Control};
use crate::dp_link::Link;

/// Pages of one appliance message each; four stay under half of the response limit.
const PAGES_PER_ANSWER: usize = 4;

pub(super) async fn show(
    control: &Control,
    caller: &Caller,
    params: ResourceParams,
) -> Result<ResourceResult, ApiError> {
    let mut links = control.select(params.dev.as_deref())?;
    let mut cursor = 0;
    if let Some(from) = &params.cursor {
        let first = control.link(&from.dev)?.name();
        links = links.into_iter().skip_while(|link| link.name() != first).collect();
        cursor = from.cursor;
    }
    let mut devs = Vec::new();
    let mut pages = 0;
    for link in links {
        let mut resources = DevResources {
            ifindex: control.index(link),
            dev: link.name().to_owned(),
            ..DevResources::default()
        };
        loop {
            if pages == PAGES_PER_ANSWER {
                devs.push(resources);
                let next = Some(ResourceCursor { dev: link.name().to_owned(), cursor });
                return Ok(ResourceResult { devs, next });
            }
            pages += 1;
            match page(link, params.kind, cursor, caller.writable, &mut resources).await {
                Ok(Some(next)) => cursor = next,
                Ok(None) => break,
                // One device that is away is listed with its error; asked for by name it is the answer.
                Err(error) if params.dev.is_some() => return Err(error),
                Err(error) => {
                    resources.error = Some(error);
                    break;
                }
            }
        }
        cursor = 0;
        devs.push(resources);
    }
    Ok(ResourceResult { devs, next: None })
}

async fn page(
    link: &Link,
    kind: ListKind,
    cursor: u64,
    keys: bool,
    into: &mut DevResources,
) -> Result<Option<u64>, ApiError> {
    match link.one(Command::List { kind, cursor, limit: 0, cookie: None }).await? {
        Response::Pds(page) => Ok(add(page, &mut into.pd)),
        Response::Mrs(mut page) => {
            if !keys {
                page.entries.iter_mut().for_each(hide);
            }
            Ok(add(page, &mut into.mr))
        }
        Response::Cqs(page) => Ok(add(page, &mut into.cq)),
        Response::Qps(page) => Ok(add(page, &mut into.qp)),
        other => Err(link.unexpected(&other)),
    }
}

fn add<T>(page: Page<T>, into: &mut Vec<T>) -> Option<u64> {
    into.extend(page.entries);
    page.next
}

fn hide(entry: &mut MrEntry) {
    entry.lkey = Lkey(0);
    entry.rkey = Rkey(0);
    entry.iova = 0;
}

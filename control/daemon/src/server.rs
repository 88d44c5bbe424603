//! JSON-RPC 2.0 over Unix stream sockets: the control socket and the read-only one.
//!
//! Owns the listeners and a task for each client. The invariants: a client can keep at most [`MAX_REQUEST_BYTES`] of
//! memory and one running request; a client that neither finishes its request nor reads its answer is cut off; a
//! request that was begun runs to its end, so nothing stays half done when its client goes away. What a method does is
//! in [`crate::handlers`].

use std::rc::Rc;
use std::time::Duration;

use ferroce_api::rpc::{self, MAX_REQUEST_BYTES, Request, Response, RpcError};
use ferroce_api::{ApiError, Code};
use rustix::event::{PollFd, PollFlags, Timespec};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::control::{Caller, Control, count};
use crate::handlers;
use crate::socket::Admission;
use crate::splitter::{SplitError, Splitter};

/// Clients of one socket at once.
pub const MAX_CLIENTS: usize = 64;
/// Requests of one batch.
pub const MAX_BATCH: usize = 64;
/// A begun request must be complete within this time.
const REQUEST_DEADLINE: Duration = Duration::from_secs(10);
/// How often a client that waits for an answer is looked at: it may have gone.
const GONE_LOOK: Duration = Duration::from_millis(250);
/// An answer must be taken within this time.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);
/// Running requests get this long to finish or to undo themselves at the end.
const DRAIN_DEADLINE: Duration = Duration::from_secs(12);

/// Serves one socket until the process is asked to end, then lets running requests finish.
pub async fn serve(listener: UnixListener, admission: Admission, writable: bool, control: Rc<Control>) {
    let mut clients = JoinSet::new();
    loop {
        tokio::select! {
            () = control.stopping() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => admit(stream, &admission, writable, &control, &mut clients),
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    // Out of descriptors, most likely: wait instead of spinning.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
            Some(_) = clients.join_next() => {}
        }
    }
    drop(listener);
    if timeout(DRAIN_DEADLINE, async { while clients.join_next().await.is_some() {} }).await.is_err() {
        tracing::warn!(left = clients.len(), "requests still running at the end are abandoned");
    }
}

fn admit(
    stream: UnixStream,
    admission: &Admission,
    writable: bool,
    control: &Rc<Control>,
    clients: &mut JoinSet<()>,
) {
    let refusal = match stream.peer_cred() {
        Err(error) => {
            Some(ApiError::new(Code::Denied, "peer", "", format!("its credentials are unknown: {error}")))
        }
        Ok(peer) if !admission.allows(peer.uid(), peer.gid(), peer.pid()) => Some(
            ApiError::new(
                Code::Denied,
                "peer",
                format!("uid {}", peer.uid()),
                "root, our own user, or the socket's group",
            )
            .hint("join the group ferroce, or ferroce-ro for reading"),
        ),
        Ok(_) if clients.len() >= MAX_CLIENTS => Some(
            ApiError::new(Code::Busy, "clients", "one more", format!("{MAX_CLIENTS} at once"))
                .hint("try again later"),
        ),
        Ok(peer) => {
            count(&control.counters.clients);
            let gone = Rc::default();
            let caller = Caller { uid: peer.uid(), pid: peer.pid(), writable, gone };
            let client = Client { stream, caller, control: control.clone() };
            clients.spawn_local(client.run());
            return;
        }
    };
    count(&control.counters.clients_refused);
    if let Some(error) = refusal {
        tracing::warn!(%error, "client refused");
        let text = encode(&Response::new(None, Err(error.into())));
        // Best effort: a fresh socket's buffer takes one line without waiting.
        let _ = stream.try_write(&text);
    }
}

/// Why a client's connection ends.
enum End {
    Closed,
    Cut(RpcError),
}

struct Client {
    stream: UnixStream,
    caller: Caller,
    control: Rc<Control>,
}

impl Client {
    async fn run(mut self) {
        if let End::Cut(error) = self.talk().await {
            count(&self.control.counters.clients_cut);
            tracing::info!(
                pid = self.caller.pid,
                uid = self.caller.uid,
                error = error.message,
                "client cut off"
            );
            let text = encode(&Response::new(None, Err(error)));
            // Best effort: one that does not read must not hold the task for another deadline.
            let _ = self.stream.try_write(&text);
        }
    }

    async fn talk(&mut self) -> End {
        let mut splitter = Splitter::new(MAX_REQUEST_BYTES);
        let mut buf = vec![0u8; 16 * 1024];
        loop {
            loop {
                let answer = match splitter.next_text() {
                    Ok(None) => break,
                    Ok(Some(text)) => match serde_json::from_slice::<Value>(text) {
                        Ok(value) => self.answer(value).await,
                        Err(e) => return End::Cut(plain(rpc::code::PARSE, format!("not JSON: {e}"))),
                    },
                    Err(error) => return End::Cut(split_error(error)),
                };
                if let Some(text) = answer
                    && let Err(end) = self.write(&text).await
                {
                    return end;
                }
            }
            if self.control.is_stopping() {
                return End::Closed;
            }
            let read = self.stream.read(&mut buf);
            let got = if splitter.mid_text() {
                match timeout(REQUEST_DEADLINE, read).await {
                    Ok(got) => got,
                    Err(_) => {
                        return End::Cut(too_slow("a begun request was not finished", REQUEST_DEADLINE));
                    }
                }
            } else {
                tokio::select! {
                    () = self.control.stopping() => return End::Closed,
                    got = read => got,
                }
            };
            match got {
                Ok(0) | Err(_) => return End::Closed,
                Ok(n) => splitter.push(buf.get(..n).unwrap_or_default()),
            }
        }
    }

    /// Does one text; meanwhile looks whether the client is still there.
    async fn answer(&self, value: Value) -> Option<Vec<u8>> {
        let answer = answer(&self.control, &self.caller, value);
        tokio::pin!(answer);
        loop {
            tokio::select! {
                answer = &mut answer => return answer,
                () = tokio::time::sleep(GONE_LOOK) => self.caller.gone.set(hung_up(&self.stream)),
            }
        }
    }

    async fn write(&mut self, text: &[u8]) -> Result<(), End> {
        match timeout(ANSWER_DEADLINE, self.stream.write_all(text)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(End::Closed),
            Err(_) => Err(End::Cut(too_slow("an answer was not read", ANSWER_DEADLINE))),
        }
    }
}

/// True when the other side has closed the connection, or ended; not when it only sends no more.
fn hung_up(stream: &UnixStream) -> bool {
    let mut polled = [PollFd::new(stream, PollFlags::empty())];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // What cannot be found out is no reason to give up on somebody.
    matches!(rustix::event::poll(&mut polled, Some(&now)), Ok(1..))
        && polled.iter().any(|fd| fd.revents().contains(PollFlags::HUP))
}

fn too_slow(what: &str, limit: Duration) -> RpcError {
    ApiError::new(Code::Timeout, "client", "", format!("{what} within {} s", limit.as_secs())).into()
}

fn split_error(error: SplitError) -> RpcError {
    match error {
        SplitError::NotJson { byte } => plain(
            rpc::code::PARSE,
            format!(
                "not our protocol: got byte {byte:#04x} where a JSON object begins; this socket speaks JSON-RPC 2.0 \
                 (ferroce-ctld {})",
                env!("CARGO_PKG_VERSION")
            ),
        ),
        SplitError::TooLong { limit } => {
            ApiError::new(Code::TooBig, "request", "", format!("at most {limit} bytes")).into()
        }
    }
}

fn plain(code: i32, message: String) -> RpcError {
    RpcError { code, message, data: None }
}

/// Does one text: a request, or a batch of them. `None` when nothing is to be answered.
async fn answer(control: &Control, caller: &Caller, value: Value) -> Option<Vec<u8>> {
    let Value::Array(batch) = value else {
        return one(control, caller, value).await.map(|response| encode(&response));
    };
    if batch.is_empty() || batch.len() > MAX_BATCH {
        let text = format!("a batch of {} requests, allowed 1 to {MAX_BATCH}", batch.len());
        count(&control.counters.requests_refused);
        return Some(encode(&Response::new(None, Err(plain(rpc::code::INVALID_REQUEST, text)))));
    }
    let mut out = vec![b'['];
    for value in batch {
        let Some(response) = one(control, caller, value).await else { continue };
        let mut text = encode(&response);
        if out.len() + text.len() > MAX_REQUEST_BYTES {
            text = encode(&Response::new(response.id, Err(too_big(out.len() + text.len()))));
        }
        if out.len() > 1 {
            out.push(b',');
        }
        out.extend_from_slice(text.trim_ascii_end());
    }
    if out.len() == 1 {
        return None;
    }
    out.extend_from_slice(b"]\n");
    Some(out)
}

async fn one(control: &Control, caller: &Caller, value: Value) -> Option<Response> {
    let id = value.get("id").cloned();
    let request: Request = match serde_json::from_value(value) {
        Ok(request) => request,
        Err(e) => {
            count(&control.counters.requests_refused);
            let id = id.and_then(|id| serde_json::from_value(id).ok());
            let text = format!("not a JSON-RPC 2.0 request: {e}");
            return Some(Response::new(id, Err(plain(rpc::code::INVALID_REQUEST, text))));
        }
    };
    let Request { method, params, id, .. } = request;
    let outcome = handlers::call(control, caller, &method, params).await;
    match &outcome {
        Ok(_) => count(&control.counters.requests_done),
        Err(error) => {
            count(&control.counters.requests_refused);
            tracing::info!(method, pid = caller.pid, uid = caller.uid, error = error.message, "refused");
        }
    }
    id.map(|id| Response::new(Some(id), outcome))
}

/// One line. A response over the limit becomes a refusal that says so.
fn encode(response: &Response) -> Vec<u8> {
    let text = |response: &Response| {
        let mut out = serde_json::to_vec(response).unwrap_or_else(|_| {
            br#"{"jsonrpc":"2.0","error":{"code":-32603,"message":"response does not encode"},"id":null}"#
                .to_vec()
        });
        out.push(b'\n');
        out
    };
    let out = text(response);
    if out.len() <= MAX_REQUEST_BYTES {
        return out;
    }
    text(&Response::new(response.id.clone(), Err(too_big(out.len()))))
}

fn too_big(bytes: usize) -> RpcError {
    ApiError::new(
        Code::TooBig,
        "response",
        format!("{bytes} bytes"),
        format!("at most {MAX_REQUEST_BYTES} bytes"),
    )
    .hint("name one dev")
    .into()
}

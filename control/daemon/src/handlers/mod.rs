//! The methods of the RPC sockets: one place that knows every name, and a file for each group of verbs.
//!
//! Owns nothing. The invariants: a method that changes something is refused on the read-only socket before anything
//! else is looked at; params with unknown keys are refused; every call to an appliance has a deadline.

mod connect;
mod dev;
pub(crate) mod ledger;
mod object;
mod perf;
mod resource;

use ferroce_api::rpc::{self, RpcError};
use ferroce_api::{ApiError, Code};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::control::{Caller, Control};

/// Does `method`.
///
/// # Errors
/// With JSON-RPC's codes, -1 or a negative errno; see [`rpc`].
pub async fn call(
    control: &Control,
    caller: &Caller,
    method: &str,
    params: Value,
) -> Result<Value, RpcError> {
    if rpc::CHANGES.contains(&method) {
        if !caller.writable {
            return Err(ApiError::new(
                Code::Denied,
                "method",
                method,
                "methods that only read, on this socket",
            )
            .hint("use ctl.sock, which needs the group ferroce")
            .into());
        }
        if control.is_stopping() {
            return Err(ApiError::new(
                Code::State,
                "method",
                method,
                "none: the control process is stopping",
            )
            .into());
        }
        tracing::info!(method, uid = caller.uid, pid = caller.pid, %params, "change");
    }
    match method {
        rpc::GET_METHODS => {
            none(params)?;
            let mut names: Vec<&str> = rpc::READS.to_vec();
            if caller.writable {
                names.extend(rpc::CHANGES);
            }
            names.sort_unstable();
            value(names)
        }
        rpc::GET_VERSION => {
            none(params)?;
            value(control.version())
        }
        rpc::STATUS => value(dev::status(control, parse(params)?).await?),
        rpc::DEV_LIST => {
            none(params)?;
            value(dev::list(control).await)
        }
        rpc::STATISTIC => value(dev::statistic(control, parse(params)?).await?),
        rpc::RESOURCE_SHOW => value(resource::show(control, caller, parse(params)?).await?),
        rpc::PATH_RESOLVE => value(object::path_resolve(control, parse(params)?).await?),
        rpc::QP_QUERY => value(object::qp_query(control, &parse(params)?).await?),
        rpc::QP_CREATE => value(object::qp_create(control, caller, parse(params)?).await?),
        rpc::QP_MODIFY => value(object::qp_modify(control, parse(params)?).await?),
        rpc::QP_DESTROY => value(object::qp_destroy(control, &parse(params)?).await?),
        rpc::PD_CREATE => value(object::pd_create(control, &parse(params)?).await?),
        rpc::PD_DESTROY => value(object::pd_destroy(control, &parse(params)?).await?),
        rpc::MR_CREATE => value(object::mr_create(control, &parse(params)?).await?),
        rpc::MR_DESTROY => value(object::mr_destroy(control, &parse(params)?).await?),
        rpc::CQ_CREATE => value(object::cq_create(control, &parse(params)?).await?),
        rpc::CQ_DESTROY => value(object::cq_destroy(control, &parse(params)?).await?),
        rpc::CONNECT => value(connect::connect(control, caller, parse(params)?).await?),
        rpc::DISCONNECT => value(connect::disconnect(control, &parse(params)?).await?),
        rpc::PERF_RUN => value(perf::run(control, caller, parse(params)?).await?),
        _ => Err(RpcError {
            code: rpc::code::METHOD_NOT_FOUND,
            message: format!("no method {method}; {} lists them", rpc::GET_METHODS),
            data: None,
        }),
    }
}

fn bad_params(message: String) -> RpcError {
    RpcError { code: rpc::code::INVALID_PARAMS, message, data: None }
}

fn parse<T: DeserializeOwned>(params: Value) -> Result<T, RpcError> {
    let params = match params {
        Value::Null => Value::Object(serde_json::Map::new()),
        Value::Object(_) => params,
        _ => return Err(bad_params("params: an object, by name".to_owned())),
    };
    serde_json::from_value(params).map_err(|e| bad_params(format!("params: {e}")))
}

fn none(params: Value) -> Result<(), RpcError> {
    match params {
        Value::Null => Ok(()),
        Value::Object(map) if map.is_empty() => Ok(()),
        _ => Err(bad_params("params: this method takes none".to_owned())),
    }
}

fn value<T: Serialize>(result: T) -> Result<Value, RpcError> {
    serde_json::to_value(result).map_err(|e| RpcError {
        code: rpc::code::INTERNAL,
        message: format!("the result does not encode: {e}"),
        data: None,
    })
}

//! `qp`: list, create, modify, destroy.

use std::process::ExitCode;

use ferroce_api::appliance::{
    Access, AddressVector, CqHandle, InitSpec, ListKind, Modify, PathQuery, PdHandle, QpCap, QpEntry,
    QpState, QpType, RtrSpec, RtsSpec,
};
use ferroce_api::ids::parse_gid;
use ferroce_api::rpc::{self, PathResolveParams, QpCreateParams, QpModifyParams, QpParams, QpResult};
use ferroce_wire::{Gid, PathMtu, Psn, Qpn};

use super::object::{done, head};
use super::resource::{list, qp_cells};
use crate::args::{Filter, Global, ModifyArgs, QpTypeArg, QpVerb, StateArg};
use crate::client::Client;
use crate::fail::Fail;
use crate::print::Printer;
use crate::row::Row;

/// 0.64 ms: what the field uses.
const MIN_RNR_TIMER: u8 = 12;

/// `qp …`.
pub fn qp(global: &Global, printer: &Printer, verb: Option<QpVerb>) -> Result<ExitCode, Fail> {
    match verb.unwrap_or(QpVerb::Show(Filter::default())) {
        QpVerb::Show(filter) => list(global, printer, ListKind::Qp, &filter.words),
        QpVerb::Create { dev, r#type, pdn, cqn, recv_cqn, max_wr } => {
            let params = QpCreateParams {
                dev: dev.clone(),
                qp_type: match r#type {
                    QpTypeArg::Rc => QpType::Rc,
                    QpTypeArg::Uc => QpType::Uc,
                    QpTypeArg::Ud => QpType::Ud,
                },
                pd: PdHandle(pdn),
                send_cq: CqHandle(cqn),
                recv_cq: CqHandle(recv_cqn.unwrap_or(cqn)),
                cap: QpCap { max_send_wr: max_wr, max_recv_wr: max_wr, ..QpCap::default() },
                sq_sig_all: false,
            };
            let made: QpResult = Client::open(global)?.call(rpc::QP_CREATE, &params)?;
            printer.rows(&[head(&dev).cell("lqpn", made.qpn.get()).cell("worker", made.worker)])?;
            Ok(ExitCode::SUCCESS)
        }
        QpVerb::Modify(args) => modify(global, printer, &args),
        QpVerb::Destroy { dev, lqpn } => {
            done(global, rpc::QP_DESTROY, &QpParams { dev, qpn: Qpn::new(lqpn) })
        }
    }
}

fn modify(global: &Global, printer: &Printer, args: &ModifyArgs) -> Result<ExitCode, Fail> {
    let mut client = Client::open(global)?;
    let modify = transition(&mut client, args)?;
    let params = QpModifyParams { dev: args.dev.clone(), qpn: Qpn::new(args.lqpn), modify };
    let entry: QpEntry = client.call(rpc::QP_MODIFY, &params)?;
    let row = Row::new(format!("link {}/1", args.dev)).json("ifname", args.dev.as_str()).json("port", 1);
    printer.rows(&[qp_cells(row, &entry)])?;
    Ok(ExitCode::SUCCESS)
}

fn transition(client: &mut Client, args: &ModifyArgs) -> Result<Modify, Fail> {
    let missing = |what: &str| Fail::Usage(format!("qp modify: {what} is needed for this state"));
    Ok(match args.state {
        StateArg::Reset => Modify::Reset,
        StateArg::Err => Modify::Err,
        StateArg::Sqd => Modify::Sqd,
        StateArg::Init => {
            let access = Access { remote_write: true, remote_read: true, ..Access::default() };
            Modify::Init(InitSpec { pkey: 0xffff, access, qkey: 0 })
        }
        StateArg::Rtr => {
            let dgid = gid("--dgid", args.dgid.as_ref())?.ok_or_else(|| missing("--dgid"))?;
            let path = PathQuery {
                dgid,
                sgid: gid("--sgid", args.sgid.as_ref())?,
                traffic_class: args.traffic_class,
            };
            let dest_qpn = Qpn::new(args.rqpn.ok_or_else(|| missing("--rqpn"))?);
            let rq_psn = Psn::new(args.rq_psn.ok_or_else(|| missing("--rq-psn"))?);
            let path_mtu = PathMtu::from_bytes(args.path_mtu).ok_or_else(|| {
                Fail::Usage(format!(
                    "--path-mtu: asked {}, allowed 256, 512, 1024, 2048, 4096",
                    args.path_mtu
                ))
            })?;
            let av: AddressVector =
                client.call(rpc::PATH_RESOLVE, &PathResolveParams { dev: args.dev.clone(), path })?;
            Modify::Rtr(RtrSpec {
                av,
                class: 0,
                path_mtu,
                dest_qpn,
                rq_psn,
                max_dest_rd_atomic: args.rd_atomic,
                min_rnr_timer: MIN_RNR_TIMER,
            })
        }
        StateArg::Rts => {
            let params = QpParams { dev: args.dev.clone(), qpn: Qpn::new(args.lqpn) };
            let now: QpEntry = client.call(rpc::QP_QUERY, &params)?;
            if now.state == QpState::Sqd {
                return Ok(Modify::SqdToRts);
            }
            Modify::Rts(RtsSpec {
                sq_psn: Psn::new(args.sq_psn.ok_or_else(|| missing("--sq-psn"))?),
                timeout: args.timeout_exponent,
                retry_cnt: args.retry_cnt,
                rnr_retry: args.rnr_retry,
                max_rd_atomic: args.rd_atomic,
            })
        }
    })
}

/// An address as a GID.
pub(super) fn gid(option: &str, text: Option<&String>) -> Result<Option<Gid>, Fail> {
    text.map(|text| {
        parse_gid(text)
            .ok_or_else(|| Fail::Usage(format!("{option}: asked {text}, allowed an IPv4 or IPv6 address")))
    })
    .transpose()
}

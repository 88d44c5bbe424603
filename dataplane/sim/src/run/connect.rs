//! Makes what a plan asks for: connections, shared receive queues, groups.

use ferroce_mem::Access;
use ferroce_verbs::{
    ClassId, CqId, InitAttrs, Pkey, QpCap, QpInitAttr, QpModify, QpType, RtrAttrs, RtsAttrs, SrqId,
    SrqInitAttr,
};

use crate::checker::{Checker, Mode};
use crate::plan::{Connection, Plan};
use crate::workload::QKEY;
use crate::world::{QpRef, World};

/// Makes everything, and the model of it. Two directions for each connection, in order.
pub(super) fn connect_all(
    plan: &Plan,
    world: &mut World,
    checker: &mut Checker,
) -> anyhow::Result<Vec<[QpRef; 2]>> {
    for (endpoint, queue) in plan.shared.iter().enumerate() {
        if let Some(queue) = queue {
            let (max_wr, max_sge, limit) = (queue.max_wr, queue.sges, queue.limit);
            world.add_srq(endpoint, &SrqInitAttr { pd: World::PD, max_wr, max_sge, limit });
            checker.add_shared(endpoint, limit);
        }
    }
    let mut qps = Vec::new();
    for connection in &plan.connections {
        let ends = connect(world, connection)?;
        for (from, to) in [(0, 1), (1, 0)] {
            let mode = mode_of(plan, world, connection, from);
            checker.add_flow(ends[from], ends[to], mode);
        }
        qps.push(ends);
    }
    for (number, group) in plan.groups.iter().enumerate() {
        let members: Vec<QpRef> =
            group.members.iter().map(|(connection, end)| qps[*connection][*end]).collect();
        for at in &members {
            let once = |from: usize| plan.faults[from * plan.endpoints + at.endpoint].duplicate_ppm == 0;
            checker.add_member(number, group.gid, *at, (0..plan.endpoints).map(once).collect());
        }
        world.add_group(group.gid, members);
    }
    Ok(qps)
}

/// What the direction from this end of a connection promises.
fn mode_of(plan: &Plan, world: &World, connection: &Connection, from: usize) -> Mode {
    let [a, b] = [connection.ends[from], connection.ends[1 - from]];
    let faults = plan.faults[a * plan.endpoints + b];
    match connection.service {
        QpType::Rc => Mode::Reliable,
        QpType::Uc => Mode::Whole { ordered: faults.duplicate_ppm == 0 && faults.reorder_ppm == 0 },
        QpType::Ud => {
            let path = world.path(a, b, connection.v6);
            let (gids, from) = ([path.sgid, path.dgid], connection.qpns[from]);
            Mode::Datagrams { once: faults.duplicate_ppm == 0, gids, from }
        }
    }
}

/// Makes a connection's two queue pairs and brings them to RTS.
fn connect(world: &mut World, connection: &Connection) -> anyhow::Result<[QpRef; 2]> {
    let attr = |end: usize| QpInitAttr {
        qp_type: connection.service,
        pd: World::PD,
        send_cq: CqId(0),
        recv_cq: CqId(1),
        cap: QpCap {
            max_send_wr: connection.send_wr,
            max_recv_wr: connection.recv_wr,
            max_send_sge: connection.sges,
            // As many as those of the shared queue have.
            max_recv_sge: connection.sges.max(if connection.shared[end] { 4 } else { 0 }),
            max_inline_data: connection.inline,
        },
        sq_sig_all: connection.sig_all,
        srq: connection.shared[end].then_some(SrqId(connection.ends[end] as u32)),
    };
    let [a, b] = [0, 1].map(|end| world.add_qp(connection.ends[end], connection.qpns[end], &attr(end)));
    for (at, end) in [(a, 0), (b, 1)] {
        let peer = 1 - end;
        let mut av = world.path(connection.ends[end], connection.ends[peer], connection.v6);
        av.vlan = connection.vlan;
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        world.modify(at, &QpModify::ToInit(InitAttrs { pkey: Pkey::DEFAULT, access, qkey: QKEY }))?;
        world.modify(
            at,
            &QpModify::ToRtr(RtrAttrs {
                av,
                class: ClassId(0),
                path_mtu: connection.mtu,
                dest_qpn: connection.qpns[peer],
                rq_psn: connection.psns[peer],
                max_dest_rd_atomic: connection.dest_rd_atomic,
                min_rnr_timer: connection.rnr_timer,
            }),
        )?;
        world.modify(
            at,
            &QpModify::ToRts(RtsAttrs {
                sq_psn: connection.psns[end],
                timeout: connection.timeout,
                retry_cnt: connection.retry_cnt,
                rnr_retry: 7,
                max_rd_atomic: connection.rd_atomic,
            }),
        )?;
    }
    Ok([a, b])
}

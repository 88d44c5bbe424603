"""Cells of `ibv_{rc,uc,ud,srq}_pingpong -e`: both roles, both families, sizes, path MTUs, and loss on our side of RC."""
import collections
import itertools
import json

from bench import Exchange, Failed
from matrix import KERNELS
from wire import GUEST, HOST, TAP

LIMIT = 60          # for either side of a cell
ITERATIONS = {1: 200, 1023: 200, 2048: 200, 4096: 100, 65536: 25}
QUEUE_PAIRS = 16    # of an exchange over a shared receive queue

PingpongCell = collections.namedtuple("PingpongCell", "name kind role kernel family mtu size loss quick")


def shapes():
    """Kind, family, path MTU, size and percent lost, each of them for both roles."""
    for loss, family, mtu, size in itertools.product((0, 1), ("v4", "v6"), (1024, 4096), (1, 1023, 4096, 65536)):
        yield "rc", family, mtu, size, loss
    # Nothing is repeated over UC and UD, so nothing is lost on purpose. A datagram is one packet, and the original has
    # no option for the path MTU there.
    for kind, sizes in (("uc", ((1024, 1), (2048, 1023), (1024, 4096), (4096, 65536))),
                        ("ud", ((4096, 1), (4096, 1023), (4096, 4096))),
                        ("srq", ((1024, 1), (2048, 1023), (1024, 4096)))):
        for family, (mtu, size) in itertools.product(("v4", "v6"), sizes):
            yield kind, family, mtu, size, 0


QUICK = {("rc", "client", "v4", 1024, 1023, 0), ("rc", "server", "v6", 4096, 4096, 0), ("rc", "client", "v6", 1024, 65536, 0),
         ("rc", "server", "v4", 4096, 65536, 0), ("rc", "client", "v4", 4096, 65536, 1), ("rc", "server", "v6", 1024, 4096, 1),
         ("uc", "client", "v4", 1024, 4096, 0), ("uc", "server", "v6", 4096, 65536, 0), ("ud", "client", "v6", 4096, 1023, 0),
         ("ud", "server", "v4", 4096, 4096, 0), ("srq", "client", "v6", 1024, 4096, 0), ("srq", "server", "v4", 2048, 1023, 0)}


def pingpong_cells():
    """Role is ours: our client talks to a server in the guest, our server is called by a client in the guest.

    The two roles of a shape are on different kernels, and the next shape has them the other way round.
    """
    for number, (kind, family, mtu, size, loss) in enumerate(shapes()):
        for turn, role in enumerate(("client", "server")):
            kernel = KERNELS[(number + turn) % 2]
            name = f"ibv_{kind}_pingpong-{role}-k{kernel}-{family}-m{mtu}-s{size}" + (f"-loss{loss}" if loss else "")
            yield PingpongCell(name, kind, role, kernel, family, mtu, size, loss, (kind, role, family, mtu, size, loss) in QUICK)


def run_pingpong(bench, cell):
    """Runs one cell; returns what it counted, or raises Failed."""
    port = bench.next_port()
    # The others know no -c, and UD no -m.
    own = {"rc": f"-m {cell.mtu} -c", "uc": f"-m {cell.mtu}", "ud": "", "srq": f"-m {cell.mtu} -q {QUEUE_PAIRS}"}[cell.kind]
    program = f"ibv_{cell.kind}_pingpong"
    theirs = f"{program} -d rxe0 -g {bench.gid[cell.family]} -p {port} -s {cell.size} -n {ITERATIONS[cell.size]} -e {own}"
    ours = [bench.tool, "pingpong", "--type", cell.kind, "-d", f"xdp:{TAP}", "-p", str(port), "-s", str(cell.size), "-m",
            str(cell.mtu), "-n", str(ITERATIONS[cell.size]), "-g", bench.own_gid[cell.family], "-c", "-e", "--json"]
    if cell.kind == "srq":
        ours += ["-q", str(QUEUE_PAIRS)]
    if cell.loss:
        ours += ["--fault", f"loss={cell.loss / 100},seed={port}"]
    # The server of ibv_rc_pingpong listens on IPv4 alone; the GIDs decide what the frames are.
    server = GUEST["v4"] if cell.role == "client" else HOST[cell.family]
    outcome = bench.run(Exchange(program, theirs, ours, cell.role, server, port, LIMIT))
    return judge(bench, cell, outcome)


def judge(bench, cell, outcome):
    """The verdict of a cell of which both ends were content."""
    result = json.loads(outcome.ours)
    sent = result["port"]["tx_good_packets"]
    # Over a shared receive queue the count is that of all queue pairs, and each has a message under way at its end.
    spare = 2 * QUEUE_PAIRS if cell.kind == "srq" else 0
    if not 0 <= result["data_checked"] - ITERATIONS[cell.size] <= spare:
        raise Failed(f"ferroce compared the data of {result['data_checked']} messages, not of {ITERATIONS[cell.size]}")
    # The last message of our server may be repeated after the client has its data and is gone, its queue pair with it.
    # The guest's queue pairs of an SRQ go one after the other, each with at most one message each way under way: ours,
    # or our acknowledgement of its last one, may find none.
    found = bench.frames_counted(
        sent, outcome, late=0 if result["last_acknowledged"] else None,
        spare=QUEUE_PAIRS * (1 + -(-cell.size // cell.mtu)) if cell.kind == "srq" else 0)
    found.update(usec_per_iter=round(result["usec_per_iter"], 1), engine=result["engine"], dev_mode=result["dev_mode"])
    if cell.loss:
        lost = {way: result["port"].get(f"fault_{way}_lost") for way in ("tx", "rx")}
        found["frames_lost_on_purpose"] = lost
        # Of 500 frames each way none lost: once in 20000 runs.
        if None in lost.values() or (sent > 500 and not sum(lost.values())):
            raise Failed(f"the loss is not at work: {lost}")
    return found

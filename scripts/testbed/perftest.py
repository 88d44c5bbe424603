"""Cells of perftest: unmodified ib_{send,write,read,atomic}_{lat,bw} in the guest against `ferroce perf` here."""
import json
import re

from bench import Exchange, Failed
from matrix import perf_cells
from wire import GUEST, HOST, TAP

LIMIT = 120             # for either side of a cell
MESSAGES = {2: 200, 8: 200, 65536: 40}  # of a queue pair, where not at defaults
UNRELIABLE_PACKETS_PER_S = 2000         # what an emulated guest surely takes: nothing repeats what it drops
UNRELIABLE_MESSAGES = 300               # at defaults, for the same reason
ACK_TIMEOUT = 18        # 4.096 us x 2^18, a second: an emulated guest may be still for longer than the default of 67 ms
DEFAULTS = {"lat": (2, 1000), "bw": (65536, 1000), "write_bw": (65536, 5000), "atomic": (8, 1000)}

__all__ = ["perf_cells", "run_perf"]


def shape(cell):
    """Size and messages of a queue pair that the cell asks for, and whether they must be given as options."""
    verb, mode = cell.test.split("_")
    size, messages = DEFAULTS.get(cell.test) or DEFAULTS.get(verb) or DEFAULTS[mode]
    capped = cell.connection != "RC" and mode == "bw"
    if cell.size is not None:
        return cell.size, MESSAGES.get(cell.size, 200), capped
    if cell.connection == "UD" and mode == "bw":
        size = 4096  # perftest: the path MTU, and the wire carries the largest
    return size, UNRELIABLE_MESSAGES if capped else messages, capped


def run_perf(bench, cell):
    """Runs one cell; returns what it counted, or raises Failed."""
    port = bench.next_port()
    size, messages, capped = shape(cell)
    given = ["-c", cell.connection, "-p", str(port), "-u", str(ACK_TIMEOUT)]
    if cell.size is not None:
        given += ["-s", str(size)] if not cell.test.startswith("atomic") else []
        given += ["-n", str(messages)]
        given += ["-m", str(cell.mtu)]
        given += ["-q", str(cell.qps)] if cell.test.endswith("_bw") else []
    elif capped:
        given += ["-n", str(messages)]
    if cell.test.startswith("atomic"):
        given = given[2:]  # RC alone, and -c is unknown to it
    sender = []
    if capped:
        packets = -(-size // (cell.mtu or 1024))
        rate = max(UNRELIABLE_PACKETS_PER_S // packets, 10)
        sender = [f"--rate_limit={rate}", "--rate_units=p", "--burst_size=1", "--rate_limit_type=SW"]
    program = f"ib_{cell.test}"
    theirs = [program, "-d", "rxe0", "-x", str(bench.gid[cell.family]), "-F", *given] + sender * (cell.role == "server")
    ours = [bench.tool, "perf", cell.test.replace("_", "-"), "-d", f"xdp:{TAP}", "-x", bench.own_gid[cell.family], "--json",
            "--data_validation", *given] + sender * (cell.role == "client")
    dropped = bench.wire.dropped()
    outcome = bench.run(Exchange(program, " ".join(theirs), ours, cell.role, (GUEST if cell.role == "client" else HOST)["v4"],
                                 port, LIMIT))
    return judge(bench, cell, outcome, bench.wire.dropped() - dropped)


def judge(bench, cell, outcome, dropped):
    """The verdict of a cell of which both ends were content."""
    size, messages, _ = shape(cell)
    total = messages * (cell.qps or 1)
    if not outcome.ours.strip():
        raise Failed("ferroce ended well and printed nothing")
    result = json.loads(outcome.ours.splitlines()[-1])
    if (result["size_bytes"], result["connection"], result["qps"]) != (size, cell.connection, cell.qps or 1):
        raise Failed(f"ferroce ran {result['qps']} QPs of {result['connection']} at {result['size_bytes']} bytes")
    if cell.mtu and cell.connection != "UD" and result["path_mtu"] != cell.mtu:
        raise Failed(f"path MTU {result['path_mtu']}, not {cell.mtu}")
    passive = cell.role == "server" and result["iterations"] == 0
    if not passive and result["iterations"] != total:
        raise Failed(f"ferroce counts {result['iterations']} messages, not {total}")
    if cell.role == "server":  # the client prints
        # Where it could not measure the guest's clock it prints "inf".
        row = re.search(rf"^\s*{size}\s+(\d+)\s+(?:[\d.]+|inf)", outcome.theirs, re.MULTILINE)
        if not row or int(row[1]) != total:
            raise Failed(f"ib_{cell.test} did not print a row of {total} messages:\n{outcome.theirs}")
    found = bench.frames_counted(result["port"]["tx_good_packets"], outcome, dropped=dropped, late=2 * (cell.qps or 1))
    found.update(messages=total, engine=result["engine"], dev_mode=result["dev_mode"])
    return found

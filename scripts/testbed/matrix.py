"""The cells of perftest's matrix: each row once at perftest's defaults, and a cover of all pairs of the rest.

A row is a test and a connection type that it allows. Nothing here runs anything, and the same cells come every time.
"""
import collections
import itertools

ROWS = (("send_lat", "RC"), ("send_lat", "UC"), ("send_lat", "UD"), ("send_bw", "RC"), ("send_bw", "UC"), ("send_bw", "UD"),
        ("write_lat", "RC"), ("write_lat", "UC"), ("write_bw", "RC"), ("write_bw", "UC"),
        ("read_lat", "RC"), ("read_bw", "RC"), ("atomic_lat", "RC"), ("atomic_bw", "RC"))
ROLES = ("client", "server")
KERNELS = ("6.12", "6.1")
FAMILIES = ("v4", "v6")
MTUS = (256, 512, 1024, 2048, 4096)
SIZES = (2, 1025, 65536)
PADDED = (1, 2, 3, 5, 1021, 1023, 1025)  # WIRE-3 of the field cases: lengths that need padding

# `size`, `mtu` and `qps` are None where the program's own default is to be used.
PerfCell = collections.namedtuple("PerfCell", "name test connection role kernel family mtu size qps quick")


def sizes(test, connection, mtu):
    """Sizes that a row is run with."""
    if test.startswith("atomic"):
        return (8,)
    if connection == "UD":  # one packet a message
        return tuple(size for size in SIZES if size < mtu) + (mtu,)
    return SIZES


def queue_pairs(test):
    """perftest 4.5 allows several only for bandwidth."""
    return (1, 8) if test.endswith("_bw") else (1,)


def combinations():
    """All that is allowed, as tuples of (factor, value) pairs."""
    for (test, connection), role, kernel, family, mtu in itertools.product(ROWS, ROLES, KERNELS, FAMILIES, MTUS):
        for size, qps in itertools.product(sizes(test, connection, mtu), queue_pairs(test)):
            yield (("row", (test, connection)), ("role", role), ("kernel", kernel), ("family", family), ("mtu", mtu),
                   ("size", "mtu" if connection == "UD" and size == mtu else size), ("qps", qps))


def pairwise():
    """A greedy cover: every pair of values of two factors that is allowed at all is in one of the combinations."""
    candidates = [(combo, frozenset(itertools.combinations(combo, 2))) for combo in combinations()]
    open_pairs = frozenset().union(*(pairs for _, pairs in candidates))
    used = collections.Counter()
    while open_pairs:
        # Of those that cover as much, the value that was used least: both kernels get about the same work.
        combo, pairs = max(candidates, key=lambda candidate: (len(candidate[1] & open_pairs), -sum(map(used.__getitem__, candidate[0]))))
        open_pairs -= pairs
        used.update(combo)
        yield dict(combo)


def named(test, connection, role, kernel, family, mtu=None, size=None, qps=None, quick=False):
    """A cell with its name."""
    parts = ["ib_" + test, connection.lower(), role, "k" + kernel, family]
    parts += [f"m{mtu}"] * (mtu is not None) + [f"s{size}"] * (size is not None) + [f"q{qps}"] * (qps is not None)
    parts += ["defaults"] if (mtu, size, qps) == (None, None, None) else []
    return PerfCell("-".join(parts), test, connection, role, kernel, family, mtu, size, qps, quick)


def perf_cells():
    """The rows at defaults (each role on one kernel, the other role on the other; all four over the families), then
    the cover, then the lengths that need padding. The quick ones are the rows at defaults once each, the roles in
    turn."""
    for number, (test, connection) in enumerate(ROWS):
        for role, kernel in itertools.product(ROLES, KERNELS):
            quick = kernel == KERNELS[0] and role == ROLES[number % 2]
            yield named(test, connection, role, kernel, "v4", quick=quick)
    for combo in pairwise():
        test, connection = combo["row"]
        size = combo["mtu"] if combo["size"] == "mtu" else combo["size"]
        yield named(test, connection, combo["role"], combo["kernel"], combo["family"], combo["mtu"], size, combo["qps"])
    # WIRE-3: SEND and WRITE of lengths that need padding, there and back.
    for number, (test, size) in enumerate(itertools.product(("send_lat", "write_lat"), PADDED)):
        for turn, role in enumerate(ROLES):
            yield named(test, "RC", role, KERNELS[(number + turn) % 2], "v4", 1024, size)

"""One exchange between a program in a guest and ours on the wire, and the three counts of frames that must agree.

Who calls: `pingpong.py` and `perftest.py`, which know the programs, their options and what they should have printed.
"""
import collections
import re
import signal
import subprocess
import time

from frames import icrc_is_right, roce
from guest import GuestError, counters
from wire import GUEST, HOST, TAP, listens

GUEST_GID = {"v4": "0000:0000:0000:0000:0000:ffff:0a4d:0001", "v6": "fd77:0000:0000:0000:0000:0000:0000:0001"}
SETTLE_LIMIT = 5   # for frames in flight

# `theirs` is a command of the guest without its host, `ours` one of ours without; `role` is ours. The client's side is
# given `server` as its host.
Exchange = collections.namedtuple("Exchange", "program theirs ours role server port limit")
# What both printed, and rxe's counters around it.
Outcome = collections.namedtuple("Outcome", "ours theirs before after")


class Failed(Exception):
    """A cell's verdict, in words."""


def tail(text, lines=6):
    """The last lines of an output, indented."""
    return "\n".join("    " + line for line in text.strip().splitlines()[-lines:])


class Bench:
    """One guest on one wire."""

    def __init__(self, wire, guest, capture, tool):
        self.wire, self.guest, self.capture, self.tool = wire, guest, capture, tool
        self.port = 18600
        self.frames = 0
        script = "cd /sys/class/infiniband/rxe0/ports/1/gids; for i in {0..15}; do echo $i $(cat $i); done"
        _, output = guest.run(script, 10, "GIDs of rxe0")
        by_gid = {gid: index for index, gid in (line.split() for line in output.splitlines() if len(line.split()) == 2)}
        missing = [gid for gid in GUEST_GID.values() if gid not in by_gid]
        if missing:
            raise GuestError(f"rxe0 has no GID {missing}: it has\n{output}")
        self.gid = {family: by_gid[gid] for family, gid in GUEST_GID.items()}
        self.own_gid = self._own_gids()

    def _own_gids(self):
        """Index of our GID of each family, from the list that a wrong index is answered with."""
        command = [self.tool, "pingpong", "-d", f"xdp:{TAP}", "-p", str(self.port), "-g", "999"]
        output, error = self.wire.start(command).communicate(timeout=30)
        listed = {ip: index for index, ip in re.findall(r"(\d+): ([0-9a-f:.]+)", error)}
        own = {family: listed.get(ip) or listed.get("::ffff:" + ip) for family, ip in HOST.items()}
        if None in own.values():
            raise GuestError(f"ferroce does not list {HOST} among its GIDs:\n{tail(error or output)}")
        return own

    def next_port(self):
        """A TCP port that no cell had yet."""
        self.port += 1
        return self.port

    def run(self, exchange):
        """Runs it; both sides must end with status 0 within the limit."""
        for _ in self.capture.new():
            pass  # what is between the cells
        return self._we_call(exchange) if exchange.role == "client" else self._guest_calls(exchange)

    def _we_call(self, exchange):
        program, port = exchange.program, exchange.port
        start = f"""
        rm -f /tmp/status
        ({exchange.theirs} >/tmp/server 2>&1; echo $? >/tmp/status) &
        for i in {{1..100}}; do ss -Hltn sport = :{port} | grep -q . && break; [[ -e /tmp/status ]] && break; sleep 0.1; done
        counters; ss -Hltn sport = :{port} | grep -q . || {{ cat /tmp/server; exit 1; }}"""
        status, output = self.guest.run(start, 20, f"start of {program} as the server")
        before, output = counters(output)
        if status:
            raise Failed(f"{program} in the guest did not listen:\n{tail(output)}")
        ours, error = self._finish(self.wire.start([*exchange.ours, exchange.server]), exchange.limit)
        # Where our side failed, the server would wait for ever.
        finish = f"""
        for i in {{1..{10 if error else 100}}}; do [[ -e /tmp/status ]] && break; sleep 0.1; done
        [[ -e /tmp/status ]] || {{ echo "still running: killed"; pkill {program[:15]}; sleep 0.5; }}
        cat /tmp/server; exit $(cat /tmp/status || echo 124)"""
        status, theirs = self.guest.run(finish, 20, f"end of {program} as the server")
        self._both_well(exchange, error, status, theirs)
        return Outcome(ours, theirs, before, self._settled())

    def _guest_calls(self, exchange):
        process = self.wire.start(exchange.ours)
        deadline = time.monotonic() + 20
        while not listens(process, exchange.port):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                output, error = process.communicate()
                raise Failed(f"ferroce did not listen on port {exchange.port}:\n{tail(error or output)}")
            time.sleep(0.05)
        before = self._counters()
        command = f"{exchange.theirs} {exchange.server}"
        status, theirs = self.guest.run(command, exchange.limit, f"{exchange.program} as the client")
        ours, error = self._finish(process, 10 if status else exchange.limit)
        self._both_well(exchange, error, status, theirs)
        return Outcome(ours, theirs, before, self._settled())

    @staticmethod
    def _finish(process, limit):
        """Our side's output; the second is a reason where it failed."""
        try:
            output, error = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                output, error = process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                output, error = process.communicate()
            return output, f"ferroce did not end within {limit} s:\n{tail(error or output)}"
        if process.returncode:
            return output, f"ferroce: status {process.returncode}:\n{tail(error or output)}"
        return output, None

    def _both_well(self, exchange, error, status, theirs):
        reasons = [error] if error else []
        # ibv_*_pingpong says so on stdout and still exits 0.
        if "invalid data" in theirs:
            reasons.append(f"{exchange.program} found wrong data:\n{tail(theirs)}")
        if status:
            killed = " (killed: it ran too long)" if status == 124 else ""
            reasons.append(f"{exchange.program}: status {status}{killed}:\n{tail(theirs)}")
        if reasons:
            counts = self._counters()
            wrong = {k: v for k, v in counts.items() if v and ("err" in k or "seq" in k or "dup" in k)}
            reasons.append(f"    theirs: {exchange.theirs}\n    ours: {' '.join(exchange.ours)}")
            raise Failed("\n".join(reasons) + f"\n    rxe0 since its start: {wrong}")

    def _counters(self):
        return counters(self.guest.run("counters", 10, "counters of rxe0")[1])[0]

    def _settled(self):
        """Counters of rxe0 when they have stopped moving."""
        deadline = time.monotonic() + SETTLE_LIMIT
        last = self._counters()
        while time.monotonic() < deadline:
            time.sleep(0.1)
            now = self._counters()
            if now == last:
                return now
            last = now
        raise Failed(f"rxe0 still receives {SETTLE_LIMIT} s after both ends finished")

    def frames_counted(self, sent, outcome, dropped=0, late=0, spare=0):
        """Our own count of what we sent, QEMU's capture of the wire and rxe's count of what passed its checks agree.

        `dropped` of ours had no room in the tap's queue. Frames after the guest's last one, at most `late` (None: any
        number), and `spare` others may have met a queue pair that was gone, of which rxe counts nothing. Returns the counts.
        """
        ours, last_of_guest = [], 0.0
        for when, frame in self.capture.new():
            if roce(frame) is None:
                continue
            if frame[6:12] == self.wire.mac:
                ours.append((when, frame))
            else:
                last_of_guest = when
        self.frames += len(ours)
        wrong = sum(not icrc_is_right(frame) for _, frame in ours)
        counted = outcome.after["rcvd_pkts"] - outcome.before["rcvd_pkts"]
        found = {"frames_sent": sent, "frames_on_the_wire": len(ours), "frames_received_by_rxe": counted}
        if dropped:
            found["frames_dropped_by_the_tap"] = dropped
        if wrong:
            raise Failed(f"{wrong} of {len(ours)} frames on the wire have a wrong ICRC")
        if sent != len(ours) + dropped:
            raise Failed(f"ferroce counts {sent} frames sent, {len(ours)} were on the wire and {dropped} dropped by the tap")
        after_last = sum(when > last_of_guest for when, _ in ours)
        unanswered = after_last if late is None else min(late, after_last)
        if unanswered:
            found["unanswered_at_the_end"] = unanswered
        if not len(ours) - unanswered - spare <= counted <= len(ours):
            raise Failed(f"{len(ours)} frames were on the wire, rxe counts {counted}: it dropped {len(ours) - counted}")
        return found

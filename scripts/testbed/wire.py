"""The wire between our side and a guest: a network namespace of the run's own with a tap in it."""
import json
import os
import subprocess
import sys

TAP, MTU = "tap0", 4200
HOST = {"v4": "10.77.0.2", "v6": "fd77::2"}
GUEST = {"v4": "10.77.0.1", "v6": "fd77::1"}
PREFIX = "ferroce-wire-"


def remove_left_over():
    """Removes the namespaces of runs that were killed outright."""
    for old in os.listdir("/run/netns") if os.path.isdir("/run/netns") else ():
        owner = old.removeprefix(PREFIX).split("-")[0]
        if old.startswith(PREFIX) and not os.path.exists(f"/proc/{owner}"):
            subprocess.run(["ip", "netns", "del", old], check=False, capture_output=True)


class Wire:
    """The network namespace with the tap. Use as a context manager: it is gone after the block."""

    def __init__(self, suffix):
        self.name = f"{PREFIX}{os.getpid()}-{suffix}"

    def __enter__(self):
        self._ip("netns", "add", self.name)
        try:
            self._ip("-n", self.name, "link", "set", "lo", "up")
            self._ip("-n", self.name, "tuntap", "add", TAP, "mode", "tap")
            self._ip("-n", self.name, "link", "set", TAP, "mtu", str(MTU), "up")
            self._ip("-n", self.name, "addr", "add", HOST["v4"] + "/24", "dev", TAP)
            self._ip("-n", self.name, "addr", "add", HOST["v6"] + "/64", "dev", TAP, "nodad")
            self.mac = bytes.fromhex(self._tap()["address"].replace(":", ""))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)

    def _tap(self):
        return json.loads(self._ip("-n", self.name, "-j", "-s", "link", "show", TAP))[0]

    def dropped(self):
        """Frames of ours that the tap's queue had no room for, since it is there."""
        return self._tap()["stats64"]["tx"]["dropped"]

    @staticmethod
    def _ip(*args):
        done = subprocess.run(["ip", *args], check=False, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"interop: ip {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout

    def start(self, command):
        """Starts a command in the namespace."""
        return subprocess.Popen(["ip", "netns", "exec", self.name, *command], stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")


def listens(process, port):
    """Whether a TCP socket listens on `port` in the namespace of a process."""
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/{process.pid}/net/{table}") as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        if any(row[3] == "0A" and int(row[1].rsplit(":", 1)[1], 16) == port for row in rows):
            return True
    return False

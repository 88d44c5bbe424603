"""A guest of `peer-vm` that runs commands for us, one after the other, over a TCP connection on the test network.

The guest's side is a few lines of shell that connect back to us. Every wait has a deadline and says what it waited for.
"""
import base64
import collections
import contextlib
import ctypes
import os
import re
import socket
import subprocess
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
CONTROL_PORT = 7711

AGENT = """\
rxe_up {guest}
counters() {{ for f in /sys/class/infiniband/rxe0/ports/1/hw_counters/*; do echo "counter ${{f##*/}} $(<$f)"; done; }}
export -f counters
exec 3<>/dev/tcp/{host}/{port} || {{ echo "agent: no connection to {host}:{port}"; exit 1; }}
echo "hello $(uname -r)" >&3
while read -r -u 3 limit script; do
  timeout -k 2 "$limit" bash -c "$(base64 -d <<<"$script")" </dev/null >/tmp/out 2>&1 3>&-
  echo "$? $(base64 -w 0 /tmp/out)" >&3
done
"""


class GuestError(Exception):
    """The guest died, hangs, or never came up."""


@contextlib.contextmanager
def in_netns(name):
    """This thread is in network namespace `name` for the length of the block."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_net = 0x40000000

    def enter(fd):
        if libc.setns(fd, new_net) != 0:
            raise OSError(ctypes.get_errno(), f"setns({name})")

    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{name}") as there:
        enter(there.fileno())
        try:
            yield
        finally:
            enter(home.fileno())


class Guest:
    """A booted guest. Use as a context manager: it is gone after the block, whatever happened."""

    def __init__(self, netns, tap, mtu, kernel, capture, host, guest, limit):
        self.folder = tempfile.TemporaryDirectory(prefix="ferroce-guest-")
        self.serial = collections.deque(maxlen=60)
        self.buffer = b""
        script = os.path.join(self.folder.name, "agent.sh")
        with open(script, "w") as file:
            file.write(AGENT.format(guest=" ".join(guest), host=host, port=CONTROL_PORT))
        with in_netns(netns):
            self.listener = socket.create_server((host, CONTROL_PORT))
        self.vm = subprocess.Popen(
            [os.path.join(HERE, "peer-vm"), "--netns", netns, "--tap", tap, "--mtu", str(mtu), "--kernel", kernel,
             "--capture", capture, "--timeout", str(limit), script],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        self.reader = threading.Thread(target=self._read_serial, daemon=True)
        self.reader.start()
        self.link = None
        self.release = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for closing in (self.link, self.listener):
            if closing:
                closing.close()
        if self.vm.poll() is None:
            self.vm.terminate()
        try:
            self.vm.wait(15)
        except subprocess.TimeoutExpired:
            self.vm.kill()
            self.vm.wait()
        self.reader.join(5)
        self.folder.cleanup()

    def _read_serial(self):
        for line in self.vm.stdout:
            self.serial.append(line.rstrip())

    def console(self):
        """The last lines of its console."""
        return "\n".join(list(self.serial)[-15:])

    def _died(self, what):
        return GuestError(f"the guest died ({what}; peer-vm: status {self.vm.returncode}); its console:\n{self.console()}")

    def wait_up(self, limit):
        """Waits until the guest is up; returns its kernel's release."""
        deadline = time.monotonic() + limit
        self.listener.settimeout(0.5)
        while True:
            try:
                self.link, _ = self.listener.accept()
                break
            except TimeoutError:
                if self.vm.poll() is not None:
                    raise self._died("while booting") from None
                if time.monotonic() > deadline:
                    raise GuestError(f"the guest did not come up within {limit} s; its console:\n{self.console()}") from None
        self.release = self._line("hello", 10).split(" ", 1)[1]
        return self.release

    def _line(self, what, limit):
        deadline = time.monotonic() + limit
        self.link.settimeout(0.5)
        while b"\n" not in self.buffer:
            try:
                data = self.link.recv(65536)
            except TimeoutError:
                if self.vm.poll() is not None:
                    raise self._died(what) from None
                if time.monotonic() > deadline:
                    raise GuestError(f"the guest did not answer within {limit} s: {what}") from None
                continue
            except OSError as error:
                raise GuestError(f"connection to the guest: {error}: {what}") from None
            if not data:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.vm.wait(5)
                raise self._died(what)
            self.buffer += data
        line, self.buffer = self.buffer.split(b"\n", 1)
        return line.decode()

    def run(self, script, limit, what):
        """Runs a shell script of at most `limit` seconds; returns its status (124: killed) and output."""
        encoded = base64.b64encode(script.encode()).decode()
        try:
            self.link.sendall(f"{limit} {encoded}\n".encode())
        except OSError as error:
            raise GuestError(f"connection to the guest: {error}: {what}") from None
        status, _, output = self._line(what, limit + 15).partition(" ")
        return int(status), base64.b64decode(output).decode(errors="replace")


def counters(output):
    """The counters in the output of a script that called `counters`, and the rest of the output."""
    found, rest = {}, []
    for line in output.splitlines():
        match = re.fullmatch(r"counter (\w+) (-?\d+)", line)
        if match:
            found[match[1]] = int(match[2])
        else:
            rest.append(line)
    return found, "\n".join(rest)

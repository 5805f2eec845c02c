"""A server as a child process of its owner: started, awaited, stopped, and gone when its owner is gone.

Facts that shaped it:

- PR_SET_PDEATHSIG fires when the *thread* that forked the child ends, not when its process does: a server is
  started from the main thread. Systems other than Linux have no such signal; there `atexit` is all.
- A change of credentials clears that signal (prctl(2)): it is set last, in the child, when root is left.
- Ctrl-C reaches every process of the terminal's foreground group: a server has a session of its own, so that
  it is there until its owner has ended its work with it.
- While a server is down, an outgoing connection may be given its port if that is in the ephemeral range, and
  a client that keeps reconnecting may even reach itself: ports are taken from below that range.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self

LOOPBACK = "127.0.0.1"
PORTS = range(20_000, 32_000)

_LINUX = sys.platform == "linux"
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: the child between fork and exec should load nothing
_PR_SET_PDEATHSIG = 1
_CLONE_NEWUSER = 0x1000_0000


class MissingServer(Exception):
    """The machine has no binary of this server; the text says where it was looked for."""


class ServerFailed(Exception):
    """The server did not come up; the text ends with the end of its log."""


class Server:
    """One server on one port of the loopback interface, with its files in one temporary folder.

    `start()` and `stop()` may take turns: port and data stay. `close()` stops it and removes the folder; so
    does the end of a `with` block or of the process that made it.
    """

    program: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    refuses_root: ClassVar[bool] = False
    start_timeout: ClassVar[float] = 30.0
    stop_timeout: ClassVar[float] = 30.0

    def __init__(self, port: int | None = None) -> None:
        self.port = port or free_port()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.program}-"))
        self.log = self.folder / f"{self.program}.log"
        self._identity = _identity() if self.refuses_root else {}
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        if "user" in self._identity:
            shutil.chown(self.folder, self._identity["user"])
        atexit.register(self.close)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} port={self.port} {'running' if self.running else 'stopped'}>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process to signal: the postmaster, the broker."""
        if self._process is None:
            raise RuntimeError(f"{self!r} was never started")
        return self._process.pid

    def start(self) -> None:
        """Start it and return when it serves."""
        if self.running:
            raise RuntimeError(f"{self!r} is running already")
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(f"{self!r} dies with the thread that starts it: use the main thread")
        self._prepare()
        self._process = self._spawn(self._command())
        try:
            self._await_ready(self._process)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop it if it runs; its data and its port are kept for the next start."""
        self._end(self.stop_signal)

    def close(self) -> None:
        """Stop it and remove its folder."""
        if os.getpid() != self._owner:
            return  # a forked child inherits this object and the exit handler, but not the server
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.close)

    def _prepare(self) -> None:
        """Write what the server reads when it starts."""

    def _command(self) -> Sequence[str | Path]:
        raise NotImplementedError

    def _environment(self) -> Mapping[str, str]:
        return {}

    def _is_ready(self) -> bool:
        raise NotImplementedError

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.start_timeout
        while not self._is_ready():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailed(f"{self.program} on port {self.port} did not come up:\n{self._log_tail()}")
            time.sleep(0.01)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            end(self._process, how, self.stop_timeout)

    def _spawn(self, command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [os.fspath(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, **self._environment()},
                start_new_session=True,
                preexec_fn=functools.partial(self._in_child, os.getpid()),
                **self._identity,
            )

    def _in_child(self, parent: int) -> None:
        if self.refuses_root:
            _leave_root()
        if _LINUX:
            _LIBC.prctl(_PR_SET_PDEATHSIG, self.stop_signal, 0, 0, 0)
            if os.getppid() != parent:  # it died before the line above: nobody is left to send the signal
                os._exit(1)

    def _run(self, command: Sequence[str | Path]) -> None:
        """Run a helper of the server (a set-up, a control command) to its end."""
        helper = self._spawn(command)
        try:
            status = helper.wait(self.start_timeout)
        finally:
            end(helper, signal.SIGTERM, self.stop_timeout)
        if status != 0:
            raise ServerFailed(f"{Path(command[0]).name} ended with status {status}:\n{self._log_tail()}")

    def _log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


def free_port() -> int:
    """Return a port that nobody listens on, below the range of outgoing connections."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
            return port
    raise ServerFailed(f"no free port between {PORTS.start} and {PORTS.stop}")


def end(process: subprocess.Popen[bytes], how: signal.Signals, timeout: float) -> None:
    """Signal the process and wait for its end; after the timeout kill it and its group."""
    if process.poll() is not None:
        return
    process.send_signal(how)
    process.send_signal(signal.SIGCONT)  # one that was frozen on purpose must wake up to hear it
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(port: int, question: bytes = b"", prefix: bytes = b"") -> bool:
    """Tell whether the port accepts a connection and, if asked, begins its answer with the prefix."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1) as connection:
            connection.sendall(question)
            return not prefix or connection.recv(len(prefix)) == prefix
    except OSError:
        return False


def _identity() -> dict[str, Any]:
    """Return what Popen needs for a server that refuses root: nothing where a user namespace is to be had."""
    if os.geteuid() != 0 or _may_unshare():
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


@functools.cache
def _may_unshare() -> bool:
    try:
        return subprocess.run(["true"], check=False, preexec_fn=_leave_root).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def _leave_root() -> None:
    """Enter a user namespace in which this process is the overflow user, while its files stay its own."""
    if os.geteuid() == 0 and _LIBC.unshare(_CLONE_NEWUSER) != 0:
        raise OSError(ctypes.get_errno(), "unshare")

"""Celery's processes: executed, or forked from one that has loaded Celery, which takes a tenth of the time.

Each is a process, a session and a process group of its own, as if ``python -m celery`` had been called, and
dies with the tests. The green pools must be executed: they patch what the other has loaded already.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]

#: What a worker or a beat would load.
LOADED = (
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.bin.beat",
    "celery.bin.worker",
    "celery.concurrency.prefork",
    "celery.concurrency.solo",
    "celery.concurrency.thread",
    "celery.worker.consumer",
    "celery.worker.strategy",
    "celery_pglock.beat",
    "celery_pglock.cli",
    "kombu.transport.redis",
)

#: Loaded here: a child between fork and exec should load nothing.
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def execute(
    arguments: list[str], folder: Path, log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Run ``python -m celery`` with these arguments."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "celery", *arguments],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )


def die_with_parent() -> Callable[[], None]:
    """Return what a child does before it becomes another program, so that it never outlives pytest."""
    parent = os.getpid()

    def in_child() -> None:
        if sys.platform == "linux":
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

    return in_child


class Child:
    """One of them, with what is used of `subprocess.Popen`."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask(poll=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(["celery"], timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, signum: int) -> None:
        # A process that has ended keeps its id until it was polled.
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process that forks them, on first use."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asking = threading.Lock()

    def start(self, arguments: list[str], folder: Path, log: Path, environment: Mapping[str, str]) -> Child:
        """Fork a process that runs ``celery`` with these arguments."""
        order = {"argv": arguments, "folder": str(folder), "log": str(log), "environment": dict(environment)}
        return Child(self, self.ask(start=order))

    def ask(self, **question: Any) -> Any:
        with self._asking:
            if self._process is None:
                self._open()
            self._lines.write(json.dumps(question) + "\n")
            self._lines.flush()
            return json.loads(self._lines.readline())

    def _open(self) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            # Not from the checkout, whose package would be in front of the installed one.
            cwd=TESTS,
            pass_fds=[theirs.fileno()],
            preexec_fn=die_with_parent(),
        )
        theirs.close()
        self._lines = ours.makefile("rw")
        ours.close()
        atexit.register(self._close)

    def _close(self) -> None:
        assert self._process is not None
        self._lines.close()
        self._process.wait()


NURSERY = Nursery()


# In the process that forks.


def serve(lines: Any) -> dict[str, Any]:
    """Answer questions. Returns in the forked children alone, each with its order."""
    for line in lines:
        question = json.loads(line)
        if "start" in question:
            answer: Any = os.fork()
            if answer == 0:
                return question["start"]
        else:
            pid, status = os.waitpid(question["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        lines.write(json.dumps(answer) + "\n")
        lines.flush()
    os._exit(0)


def become(order: dict[str, Any], die: Any) -> None:
    """Let a forked child be what it was ordered."""
    die()
    os.setsid()
    os.chdir(order["folder"])
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for stream, name in ((1, "stdout"), (2, "stderr")):
        opened = os.fdopen(stream, "w", buffering=1, closefd=False)
        setattr(sys, name, opened)
        setattr(sys, f"__{name}__", opened)
    os.environ.clear()
    os.environ.update(order["environment"])
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable(2)
    sys.argv = ["celery", *order["argv"]]


def main() -> None:
    for name in LOADED:
        importlib.import_module(name)
    from celery.__main__ import main as run_celery

    die = die_with_parent()
    to_parent = int(sys.argv[1])
    order = serve(socket.socket(fileno=to_parent).makefile("rw"))
    os.dup2(os.open(os.devnull, os.O_RDWR), to_parent)
    become(order, die)
    run_celery()


if __name__ == "__main__":
    main()

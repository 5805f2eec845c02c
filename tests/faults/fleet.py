"""Real workers for tests: started, awaited, killed, and gone at the end whatever happens.

    def test_something(fleet):
        worker = fleet.worker("prefork", concurrency=2)
        result = fleet.send("skip", "a", gate="g")       # the tasks are in faults/shop.py
        run = fleet.running("a")                         # waits until the body runs
        os.kill(run.pid, signal.SIGKILL)                 # or worker.kill(), worker.stop()
        fleet.open("g")                                  # lets bodies that wait at this gate end
        assert not fleet.history.overlaps()

A worker is ``celery -A faults.shop worker``, run from the test's own folder so that the installed package is
tested, see `nursery`. Its log is `Worker.log`, and part of every failed wait's message. The test itself needs
no lock: it publishes by name, as a producer does that knows no tasks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import redis
from celery import Celery
from celery.canvas import Signature
from celery.result import AsyncResult
from kombu import pools

from .history import History, Run
from .nursery import NURSERY, TESTS, execute

T = TypeVar("T")

#: Pools that need nothing patched before Celery is loaded.
FORKED = ("prefork", "threads", "solo")

#: What every worker is started with unless a test says otherwise.
CONF = {
    "task_default_queue": "shop",
    "worker_prefetch_multiplier": 1,
    "broker_connection_retry_on_startup": True,
    "broker_transport_options": {"visibility_timeout": 3600},
    # A message that is not acknowledged when its worker's child dies is delivered again.
    "task_reject_on_worker_lost": True,
    "result_expires": 600,
}


def wait_for(condition: Callable[[], T], what: str | Callable[[], str], timeout: float = 20.0) -> T:
    """Return the first true value of the condition; fail after the timeout and tell what did not come."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what() if callable(what) else what}")
        time.sleep(0.005)
    return value


def alive(pid: int) -> bool:
    """Tell whether a process runs. A zombie does not: its connections are closed."""
    return status_of(pid) not in ("", "Z", "X")


def status_of(pid: int) -> str:
    """The kernel's letter for what a process does, nothing where there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return status.rpartition(")")[2].split()[0]


class Worker:
    """One worker: its main process, the children of that, and its log."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        folder: Path,
        environment: Mapping[str, str],
        *,
        forked: bool = True,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.log.touch()
        start = NURSERY.start if forked else execute
        self._process = start(arguments, folder, self.log, environment)
        self.pid = self._process.pid

    def __repr__(self) -> str:
        return f"<Worker {self.name} pid={self.pid}>"

    def wait_ready(self, timeout: float = 30.0) -> None:
        def ready() -> bool:
            code = self._process.poll()
            assert code is None, f"{self!r} ended with {code} at its start:\n{self.text()[-4000:]}"
            return " ready.\n" in self.text()

        wait_for(ready, lambda: f"{self!r} ready:\n{self.text()[-4000:]}", timeout)

    def wait_ended(self, timeout: float = 20.0) -> int:
        """Return the exit code of a worker that ends by itself."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._show_stacks()
            raise AssertionError(f"{self!r} did not end within {timeout} s:\n{self.text()[-9000:]}") from None

    def _show_stacks(self) -> None:
        """Let its processes write to the log where they hang, one after the other, and end."""
        children = self.children()
        # It would go on when a child ends that it waits for.
        self.signal(signal.SIGSTOP)
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
            wait_for(lambda pid=pid: not alive(pid), f"the end of {pid}, a child of {self!r}")  # type: ignore[misc]
        self.signal(signal.SIGABRT)
        self.signal(signal.SIGCONT)
        self._process.wait()

    def text(self) -> str:
        """What it logged so far."""
        return self.log.read_text(errors="replace")

    def children(self) -> list[int]:
        """The processes that it forked and that run: the bodies' processes in prefork."""
        try:
            tasks = Path(f"/proc/{self.pid}/task").iterdir()
            pids = [pid for task in tasks for pid in (task / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            return []
        return [int(pid) for pid in pids if alive(int(pid))]

    def signal(self, signum: int) -> None:
        """Signal the main process."""
        self._process.send_signal(signum)

    def stop(self, timeout: float = 20.0) -> int:
        """Warm shutdown: let the bodies end. Returns the exit code."""
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait_ended(timeout)

    def kill(self) -> None:
        """SIGKILL the main process; its children die with it. Returns when all are gone."""
        children = self.children()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        wait_for(lambda: not any(map(alive, children)), f"the end of the children of {self!r}")

    def close(self) -> None:
        """Leave no process behind: neither the worker nor what bodies started in its session."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class Fleet:
    """Workers on one broker and one database, and the producer that feeds them.

    ``conf``: settings of every worker and of the producer. The result backend is Redis too.
    """

    def __init__(self, folder: Path, broker: str, backend: str, dsn: str | None, **conf: Any) -> None:
        self.folder = folder
        self.dsn = dsn
        self.history = History(folder / "history")
        self.workers: list[Worker] = []
        self.conf = {
            **CONF,
            "broker_url": broker,
            "result_backend": backend,
            "pglock_database_url": dsn,
            **conf,
        }
        (folder / "gates").mkdir(exist_ok=True)
        self.app = Celery("producer")
        # The producer waits for results at the real backend, however slowly workers store.
        self.app.conf.update({**self.conf, "result_backend": backend})

    def worker(
        self,
        pool: str = "prefork",
        concurrency: int = 2,
        *options: str,
        app: str = "faults.shop",
        env: Mapping[str, str] | None = None,
        ready: bool = True,
        **conf: Any,
    ) -> Worker:
        """Start a worker and wait until it is ready, unless told not to. ``conf`` is added to the fleet's.

        With an environment of its own it is a new Python: some of it is read when Celery is loaded.
        """
        name = f"w{len(self.workers) + 1}"
        arguments = [
            *("-A", app, "worker", "-P", pool, "-c", str(concurrency), "-n", f"{name}@fleet", "-l", "INFO"),
            *("--without-gossip", "--without-mingle", *options),
        ]
        settings = {name: value for name, value in {**self.conf, **conf}.items() if value is not None}
        environment = {
            # What a test's environment says about locks must not decide what is tested.
            **{key: value for key, value in os.environ.items() if not key.startswith("CELERY_")},
            "PYTHONPATH": str(TESTS),
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            "C_FORCE_ROOT": "1",  # or Celery refuses pickle where tests run as root
            "FLEET_FOLDER": str(self.folder),
            "FLEET_CONF": json.dumps(settings),
            "FLEET_DSN": self.dsn or "",
            **(env or {}),
        }
        forked = pool in FORKED and not env
        worker = Worker(name, arguments, self.folder, environment, forked=forked)
        self.workers.append(worker)
        if ready:
            worker.wait_ready()
        return worker

    def signature(self, task: str, *args: Any, immutable: bool = False, **kwargs: Any) -> Signature:
        """A signature of one of the shop's tasks; ``immutable`` as in ``task.si()``."""
        return self.app.signature(task, args, kwargs, immutable=immutable)

    def send(self, task: str, *args: Any, **kwargs: Any) -> AsyncResult[Any]:
        """Publish a message, as ``task.delay()`` does."""
        return self.signature(task, *args, **kwargs).apply_async()

    def redeliver(self) -> None:
        """Let Redis deliver again what was not acknowledged within the visibility timeout.

        Kombu's own code, which a worker runs now and then: up to kombu 5.6 every 100 s.
        """
        with self.app.connection_for_write() as connection:
            connection.default_channel.qos.restore_visible(interval=1)

    def results(self, ids: list[str]) -> dict[str, dict[str, Any]]:
        """What is stored about these tasks by now, asked at once."""
        backend = self.app.backend
        stored = backend.client.mget([backend.get_key_for_task(id) for id in ids])
        return {id: json.loads(value) for id, value in zip(ids, stored, strict=True) if value}

    def drained(self) -> bool:
        """Whether no message is left: in the queue, unacknowledged, or waiting for its time."""
        return self._messages() == 0 == self._messages(after=0.05)

    def _messages(self, after: float = 0.0) -> int:
        # Twice: a message that a worker is just taking is nowhere for a moment.
        time.sleep(after)
        with redis.Redis.from_url(self.conf["broker_url"]) as client, client.pipeline() as both:
            return sum(both.llen(self.conf["task_default_queue"]).hlen("unacked").execute())

    def open(self, gate: str) -> None:
        """Let all bodies end that wait at a gate."""
        (self.folder / "gates" / gate).touch()

    def wait(self, condition: Callable[[], T], what: str, timeout: float = 20.0) -> T:
        """`wait_for`, with the end of every worker's log in the message."""

        def told() -> str:
            logs = [f"--- {worker.name} ---\n{worker.text()[-3000:]}" for worker in self.workers]
            return "\n".join([what, *logs])

        return wait_for(condition, told, timeout)

    def running(self, name: str, timeout: float = 20.0, after: float = 0.0) -> Run:
        """Wait until a body with this name runs (started later than ``after``), and return it."""

        def found() -> Run | None:
            runs = self.history.runs(name)
            return next(
                (run for run in runs if run.ended is None and run.started > after and alive(run.pid)), None
            )

        run = self.wait(found, f"a body named {name!r}", timeout)
        assert run is not None
        return run

    def logged(self, text: str, times: int = 1, timeout: float = 20.0) -> None:
        """Wait until the workers together have logged a text so many times."""
        self.wait(
            lambda: sum(worker.text().count(text) for worker in self.workers) >= times,
            f"{text!r} logged {times} times",
            timeout,
        )

    def close(self) -> None:
        """End every process and every connection."""
        for worker in self.workers:
            worker.close()
        backend = self.app.backend
        if hasattr(backend, "result_consumer"):
            # Results that outlive the fleet, in a traceback say, would ask for it when they go.
            backend.remove_pending_result = lambda result: result
            backend.result_consumer.stop()
            backend.client.connection_pool.disconnect()
        # Kombu's pools are global, and a closed one would meet the next fleet at this address.
        connection = self.app.connection_for_write()
        for group in (pools.producers, pools.connections):
            if connection in group:
                group[connection].force_close_all()
                del group[connection]
        self.app.close()


def flush(url: str) -> None:
    """Empty one Redis database."""
    with redis.Redis.from_url(url) as client:
        client.flushdb()

"""The stage: a PostgreSQL, a Redis and the workers, and what a scene does with them.

Nothing of it outlives the demo: servers and workers die with the process that started them, and a signal is
heard between two steps only, since an exception in the middle of a start could leave half a server behind.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
import redis

from localservers import PostgreSQL, Redis
from localservers.process import Server

from . import records
from .history import History, Run
from .progress import Progress
from .records import Record

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# The package's sessions say in their application_name whose they are: "pglock <worker> <process id>".
SESSIONS = "SELECT application_name FROM pg_stat_activity WHERE application_name LIKE 'pglock %@%'"
BEATS = "SELECT application_name FROM pg_stat_activity WHERE application_name LIKE 'pglock %'"
LOCKS_OF_A_PROCESS = """
    SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE locktype = 'advisory' AND granted AND application_name LIKE 'pglock %%@%% ' || %s
"""


class Interrupted(Exception):
    """Somebody wants the demo to end. Holds the signal's number."""


class StageFailed(Exception):
    """The play can't go on; the text says why."""


class TookTooLong(StageFailed):
    """What a scene waited for did not come."""


class Worker(Server):
    """A prefork worker with two processes, in a process group of its own."""

    program = "worker"
    stop_timeout = 10.0

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def kill(self) -> None:
        """SIGKILL the main process and its children at once, as the loss of a machine would."""
        os.killpg(self.pid, signal.SIGKILL)

    def log_tail(self) -> str:
        return self._log_tail()

    def _command(self) -> Sequence[str | Path]:
        worker = [sys.executable, "-m", "celery", "-A", "example_project.pipeline", "worker", "-c", "2"]
        # Without what lets workers know of each other: they start a second sooner.
        return [*worker, "-n", f"{self.name}@demo", "-l", "INFO", "--without-mingle", "--without-gossip"]

    def _environment(self) -> Mapping[str, str]:
        # It runs in a folder of its own, where a relative path leads nowhere, and leaves its files there.
        return {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.folder)}

    def _is_ready(self) -> bool:
        return True  # the stage starts all of them, and then waits for all


class Beat(Worker):
    """A beat, of which there is another."""

    def _command(self) -> Sequence[str | Path]:
        beat = [sys.executable, "-m", "celery", "-A", "example_project.pipeline", "beat", "-S", "pglock"]
        return [*beat, "-s", self.folder / "schedule", "--pidfile="]


class Listener(threading.Thread):
    """Takes what the beats send from the broker, and writes it down."""

    def __init__(self, broker: str, names: Mapping[int, str]) -> None:
        super().__init__(daemon=True)
        self._broker = redis.Redis.from_url(broker)
        self._names = names
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: object, trace: TracebackType | None) -> None:
        self._stopped.set()
        self.join()
        self._broker.close()

    def run(self) -> None:
        while not self._stopped.is_set():
            got = self._broker.brpop(["schedule"], timeout=0.2)
            if got is not None:
                self._write(json.loads(got[1])["headers"])

    def _write(self, headers: Mapping[str, Any]) -> None:
        slot = headers["pglock_slot"]
        # Celery says which process a message is from: "gen<process id>@<host>".
        pid = int(headers["origin"].partition("@")[0].removeprefix("gen"))
        records.write(Record("slot", slot["entry"], id=slot["due"], worker=self._names[pid]))


class Stage:
    """Everything that runs, as a context manager; and the view from outside."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.workers: dict[str, Worker] = {}
        self.beats: dict[str, Beat] = {}
        self._names: dict[int, str] = {}
        #: The most sessions that were seen at a time, by the process that had them.
        self.sessions: Counter[int] = Counter()
        #: Seconds from the kill until PostgreSQL saw no lock of the dead process any more.
        self.freed_after: float | None = None
        self._exit = ExitStack()
        self._signal: int | None = None
        self._looked_at = 0.0

    # Opening and closing.

    def __enter__(self) -> Self:
        for signum in SIGNALS:
            signal.signal(signum, self._hear)
        try:
            self._open()
        except BaseException:
            self._close(in_good_order=False)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: object, trace: TracebackType | None) -> None:
        self._close(in_good_order=kind is None)

    def _open(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="demo-"))
        self._exit.callback(shutil.rmtree, folder, ignore_errors=True)
        self.progress.status("starting PostgreSQL and Redis")
        postgres = self._exit.enter_context(PostgreSQL())
        queue = self._exit.enter_context(Redis())
        self.check()
        os.environ |= {
            "DATABASE_URL": postgres.url(),
            "REDIS_URL": queue.url(),
            records.FILE: str(folder / "records.jsonl"),
        }
        self._reader = records.Reader(folder / "records.jsonl")
        self._exit.callback(self._reader.close)
        self._exit.enter_context(Listener(queue.url(), self._names))
        self._observer = psycopg.connect(postgres.url(application_name="observer"), autocommit=True)
        self._exit.callback(self._observer.close)
        self.progress.say(f"PostgreSQL on port {postgres.port}, Redis on port {queue.port}")

    def _close(self, *, in_good_order: bool) -> None:
        self.progress.status("")
        for worker in (*self.workers.values(), *self.beats.values()):
            if worker.running and in_good_order:
                os.kill(worker.pid, signal.SIGTERM)  # all at once: each takes a second
            elif worker.running:
                worker.kill()
        self._exit.close()

    def _hear(self, signum: int, _frame: object) -> None:
        self._signal = signum

    def check(self) -> None:
        """Raise what ends the play before its end."""
        if self._signal is not None:
            raise Interrupted(self._signal)
        for worker in (*self.workers.values(), *self.beats.values()):
            if not worker.running:
                raise StageFailed(f"{worker.name} ended by itself:\n{worker.log_tail()}")

    # What a scene does.

    @property
    def history(self) -> History:
        return History(self._reader.read())

    def start_workers(self, *names: str) -> None:
        for name in names:
            self.workers[name] = self._exit.enter_context(Worker(name))
            self.check()

    def start_beats(self, *names: str) -> None:
        for name in names:
            self.beats[name] = self._exit.enter_context(Beat(name))
            self._names[self.beats[name].pid] = name
            self.check()

    def await_beats(self) -> None:
        """Wait until one leads and the others follow it. Without locks all of them send."""

        def all_there() -> bool:
            names = [name for (name,) in self._observer.execute(BEATS)]
            connected = {int(name.rpartition(" ")[2]) for name in names}
            return connected >= self._names.keys() or len(self.history.beats) == len(self.beats)

        self.wait(all_there, "the beats to start", 60)

    def kill_beat(self, name: str) -> None:
        beat = self.beats.pop(name)
        at = time.monotonic()
        beat.kill()
        records.write(Record("kill", worker=name, at=at))
        beat.stop()

    def await_workers(self) -> None:
        def all_ready() -> bool:
            return self.workers.keys() <= {record.worker for record in self.history.of("ready")}

        self.wait(all_ready, "the workers to start", 60)

    def send(self, task: str, tenant: str, seconds: float) -> None:
        """Publish a message."""
        from . import pipeline  # late: it reads the addresses that the stage has set

        message = getattr(pipeline, task).delay(tenant, round(seconds, 2))
        records.write(Record("sent", tenant, task, message.id))

    def kill(self, victim: Run) -> None:
        """End the worker of a run by SIGKILL, and see when the locks of the run's process are free."""
        worker = self.workers.pop(victim.worker)
        locked = self.locks_held_by(victim.pid)
        at = time.monotonic()
        worker.kill()
        if locked:
            self._await_release(victim.pid, at)
        records.write(Record("kill", worker=victim.worker, at=at))
        # Redis hands a message to a connection that nobody reads any more, as long as it is open.
        worker.stop()

    def _await_release(self, pid: int, since: float) -> None:
        """Ask back to back, until PostgreSQL sees no lock of a dead process any more."""
        while self.locks_held_by(pid):
            self.check()
        self.freed_after = time.monotonic() - since

    def locks_held_by(self, pid: int) -> int:
        """How many advisory locks PostgreSQL sees with the sessions of a process."""
        row = self._observer.execute(LOCKS_OF_A_PROCESS, [str(pid)]).fetchone()
        return row[0] if row else 0

    def pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= until, "time to pass", seconds + 60)

    def wait(self, look: Callable[[], T | None], what: str, timeout: float) -> T:
        """Return what a look finds, as soon as it finds something, with an eye on everything else."""
        deadline = time.monotonic() + timeout
        while not (found := look()):
            if time.monotonic() > deadline:
                raise TookTooLong(f"waited {timeout:.0f} s in vain for {what}")
            self.check()
            self._look_around()
            time.sleep(0.02)
        return found

    def _look_around(self) -> None:
        """Count the sessions and show the progress, four times a second."""
        if time.monotonic() - self._looked_at < 0.25:
            return
        self._looked_at = time.monotonic()
        names = [name for (name,) in self._observer.execute(SESSIONS)]
        self.sessions |= Counter(int(name.rpartition(" ")[2]) for name in names)
        self.progress.show(self.history)

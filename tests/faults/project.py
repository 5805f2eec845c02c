"""A project put together from recipes: its worker, its shell, and what is seen of it from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
from celery import uuid
from celery.beat import Scheduler
from celery.result import AsyncResult

from celery_pglock import is_skipped
from localservers import PostgreSQL, Redis

from .fleet import Fleet, wait_for
from .judge import HOLDERS, SESSIONS, TAKE
from .nursery import TESTS, die_with_parent

WAITING = """
    SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

HOLDERS_OF_A_PAIR = """
    SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND objsubid = 2 AND classid = %s AND objid = %s
"""

HELD_UP = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE 'UPDATE%'
"""


class Project:
    """Files in a folder, that a worker and a shell find, and a database; the recipes name it ``shop``.

    The recipes name servers as a project would. What they are at in a test is said by the environment:
    Celery's own variables stand above what an app names, and libpq's fill in what a URL leaves out.
    """

    def __init__(self, folder: Path, server: PostgreSQL, redis: Redis, dbname: str = "shop") -> None:
        broker, backend = redis.url(0), redis.url(1)
        self.fleet = Fleet(folder, broker, backend, server.url(dbname), task_default_queue="celery")
        self.observer = psycopg.connect(server.url(dbname), autocommit=True, application_name="observer")
        self.environment = {
            "CELERY_BROKER_URL": broker,
            "CELERY_RESULT_BACKEND": backend,
            "CELERY_PGLOCK_DATABASE_URL": f"postgresql:///{dbname}",
            "PGHOST": "127.0.0.1",
            "PGPORT": str(server.port),
            "PGUSER": "postgres",
            "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: dict[int, Path] = {}
        self._sent: list[AsyncResult[Any]] = []
        self._waited = 0

    @property
    def folder(self) -> Path:
        return self.fleet.folder

    def write(self, file: str, text: str) -> None:
        path = self.folder / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def start_worker(self, app: str) -> None:
        """Start a worker of many threads, so that whatever may run at once does."""
        self.fleet.worker("threads", 24, app=app, env=self.environment).wait_ready(60)

    def close(self) -> None:
        self.fleet.close()
        self.observer.close()

    # What its users do.

    def send(self, task: str, *args: Any, at_once: bool = False, **kwargs: Any) -> AsyncResult[Any]:
        """Publish a message; ``at_once``: the dots of its body are over as soon as they are reached."""
        id = uuid()
        if at_once:
            self.fleet.open(id)
        self._waited = self.waiting()
        self._sent.append(self.fleet.signature(task, *args, **kwargs).apply_async(task_id=id))
        return self._sent[-1]

    def send_entry(self, schedule: Mapping[str, Any], name: str) -> AsyncResult[Any]:
        """Publish an entry of a beat's schedule, by beat's own code."""
        scheduler = Scheduler(self.fleet.app, schedule={}, lazy=True)
        scheduler.update_from_dict({name: schedule[name]})
        self._waited = self.waiting()
        self._sent.append(scheduler.apply_async(scheduler.schedule[name], advance=False))
        return self._sent[-1]

    def finish(self, *results: AsyncResult[Any]) -> None:
        """Let the dots of these be over."""
        for result in results:
            self.fleet.open(result.id)

    def shell(
        self, line: str, folder: str = ".", environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Hand a line to a shell, as a user would."""
        (self.folder / folder).mkdir(exist_ok=True)
        log = self.folder / f"shell{len(self._logs)}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                line,
                shell=True,
                cwd=self.folder / folder,
                env={
                    **os.environ,
                    **self.environment,
                    "PYTHONPATH": f"{self.folder / folder}:{self.folder}:{TESTS}",
                    "PYTHONUNBUFFERED": "1",
                    "FLEET_FOLDER": str(self.folder),
                    "FLEET_CONF": "{}",
                    **(environment or {}),
                },
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        self._logs[process.pid] = log
        self._processes.append(process)
        return process

    def said(self, shell: subprocess.Popen[bytes]) -> str:
        """What a line printed."""
        return self._logs[shell.pid].read_text()

    @contextmanager
    def tidied(self) -> Iterator[None]:
        """Leave neither a body nor a process of a test behind."""
        try:
            yield
        finally:
            for process in self._processes:
                kill(process)
            self.finish(*self._sent)
            sent, self._processes, self._sent = self._sent, [], []
            # What tries again would for a minute, and be in the way of the next test.
            self.fleet.app.control.revoke([result.id for result in sent if not result.ready()])
            self.fleet.wait(lambda: all(result.ready() for result in sent), "the end of all that was sent")

    # What is seen from outside.

    def fate(
        self, result: AsyncResult[Any], began: Callable[[], object] | None = None, timeout: float = 20
    ) -> str:
        """Tell what becomes of the message that was sent last."""

        def seen() -> str | None:
            if began() if began is not None else self.fleet.history.runs(task_id=result.id):
                return "runs"
            state = result.state
            if state == "SUCCESS":
                return "is skipped" if is_skipped(result.result) else "is done"
            if state in ("FAILURE", "RETRY"):
                return {"FAILURE": "fails", "RETRY": "tries again"}[state]
            return "waits" if self.waiting() > self._waited else None

        return self.fleet.wait(seen, f"the fate of {result.id}", timeout) or ""

    def wait_done(self, *results: AsyncResult[Any], timeout: float = 20) -> list[Any]:
        """Wait until they have succeeded, and return what they returned."""
        wait_for(
            lambda: all(result.state in ("SUCCESS", "FAILURE") for result in results),
            lambda: f"success of all, but {[result.state for result in results]}",
            timeout,
        )
        assert [result.state for result in results] == ["SUCCESS"] * len(results)
        return [result.result for result in results]

    def waiting(self) -> int:
        """How many wait in PostgreSQL's queues."""
        return self.observer.execute(WAITING).fetchone()[0]

    def holders(self, name: str) -> list[int]:
        return [pid for (pid,) in self.observer.execute(HOLDERS, [name])]

    def holders_of_pair(self, subsystem: int, entity: int) -> list[int]:
        return [pid for (pid,) in self.observer.execute(HOLDERS_OF_A_PAIR, [subsystem, entity])]

    def groups_with_a_session(self) -> set[int]:
        """The process groups, and so the shells, whose processes have a session."""
        groups = set()
        for (name,) in self.observer.execute(SESSIONS).fetchall():
            with suppress(ProcessLookupError):
                groups.add(os.getpgid(int(name.split()[-1])))
        return groups

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Hold a name in a session of the test's own."""
        self.observer.execute(TAKE, [name])
        try:
            yield
        finally:
            self.observer.execute("SELECT pg_advisory_unlock_all()")


@contextmanager
def database(server: PostgreSQL) -> Iterator[None]:
    """The database that the recipes name."""
    server.execute("CREATE DATABASE shop")
    try:
        yield
    finally:
        server.execute("DROP DATABASE shop WITH (FORCE)")


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a shell and all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def books(project: Project, task: str, account: str, table: str, column: str) -> None:
    """Hold the first one up in its body, by a lock on the account's row."""
    with psycopg.connect(project.observer.info.dsn, application_name="auditor") as auditor:
        auditor.execute(f"SELECT FROM {table} WHERE {column} = %s FOR UPDATE", [account])
        first = project.send(task, account, 5)
        held_up = "it is held up"
        wait_for(lambda: project.observer.execute(HELD_UP).fetchone()[0] or first.ready(), held_up)
        assert len(project.holders(f"celery:{task}:account:{account}")) == 1
        second = project.send(task, account, 7)
        assert project.fate(second) == "waits"
    project.wait_done(first, second)
    balance = f"SELECT balance FROM {table} WHERE {column} = %s"
    assert project.observer.execute(balance, [account]).fetchone() == (12,)
    failing = project.send(task, account, 1000)
    wait_for(lambda: failing.state == "FAILURE", "the check of the table")
    assert project.observer.execute(balance, [account]).fetchone() == (12,)
    assert project.holders(f"celery:{task}:account:{account}") == []

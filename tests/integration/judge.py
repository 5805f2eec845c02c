"""The judge of the integration tests: a session of its own that reads what the server knows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg

from celery_pglock import LockId


def eventually(condition: Callable[[], Any], reason: str, within: float = 10.0) -> Any:
    """Wait until a condition holds, and return its value."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, f"after {within} s: {reason}"
        time.sleep(0.005)
    return value


class Judge:
    """Reads what the server knows of the locks and sessions in the test's database."""

    def __init__(self, observer: psycopg.Connection) -> None:
        self.observer = observer
        # Asked once: a full lock table has no room for a look into a shared catalog.
        (self.database,) = observer.execute(
            "SELECT oid FROM pg_database WHERE datname = current_database()"
        ).fetchone()

    def locks(self) -> list[tuple[LockId, int]]:
        """Every advisory lock with its holder's process id."""
        rows = self.observer.execute(
            "SELECT classid::bigint, objid::bigint, objsubid, pid FROM pg_locks WHERE locktype = 'advisory'"
            " AND granted AND database = %s ORDER BY 1, 2, 3",
            [self.database],
        )
        return [(self.id(*row), pid) for *row, pid in rows]

    def id(self, classid: int, objid: int, objsubid: int) -> LockId:
        """PostgreSQL shows unsigned halves."""
        if objsubid == 2:
            return LockId(*(half - (half >> 31 << 32) for half in (classid, objid)))
        key = classid << 32 | objid
        return LockId(key - (key >> 63 << 64))

    def held(self) -> set[LockId]:
        return {id for id, _ in self.locks()}

    def holder(self, id: LockId) -> int:
        """The one process that holds an id."""
        (pid,) = [pid for each, pid in self.locks() if each == id]
        return pid

    def sessions(self) -> list[int]:
        """The package's own sessions."""
        rows = self.observer.execute(
            "SELECT pid FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'pglock %'"
        )
        return [pid for (pid,) in rows]

    def end(self, pid: int) -> None:
        """End a session from outside, and return when it is gone."""
        self.observer.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])

    def take(self, id: LockId) -> bool:
        """Hold an id outside of the process."""
        arguments = ", ".join(str(key) for key in id)
        (answer,) = self.observer.execute(f"SELECT pg_try_advisory_lock({arguments})").fetchone()
        return answer

    def give_back(self) -> None:
        self.observer.execute("SELECT pg_advisory_unlock_all()")

    def sees_nothing_left(self) -> None:
        """Fail if a lock or a session is left; the next test finds nothing of it."""
        self.give_back()
        try:
            eventually(lambda: not self.locks(), "a lock is left behind", within=2)
            eventually(lambda: not self.sessions(), "a session is left behind", within=2)
        finally:
            for pid in self.sessions():
                self.end(pid)

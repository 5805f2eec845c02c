"""The tasks whose locks get lost: ``celery -A faults.bodies worker``, beside those of `faults.shop`.

A body is stopped under its lock in many ways, so there is one for each thing that a body may be doing. With
`FLEET_NETNS` in its environment the worker moves into a network namespace before it connects to anything.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psycopg

from celery_pglock import AdvisoryLockedTask, Hold, lock_lost

from .shop import LATE, app, history, work

__all__ = ["app"]


def move_to_network_of(pid: int) -> None:
    """Move this process, which must have one thread yet, into the network namespace of another."""
    libc = ctypes.CDLL(None, use_errno=True)
    kinds = {"net": 0x4000_0000} if os.geteuid() == 0 else {"user": 0x1000_0000, "net": 0x4000_0000}
    for kind, flag in kinds.items():
        file = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        try:
            if libc.setns(file, flag) != 0:
                raise OSError(ctypes.get_errno(), f"setns into the {kind} namespace of {pid}")
        finally:
            os.close(file)


if "FLEET_NETNS" in os.environ:
    move_to_network_of(int(os.environ["FLEET_NETNS"]))

Alive = Callable[[], None]


@lock_lost.connect
def on_lost(lock: Hold, held: float, **_: Any) -> None:
    history.note("lost", name=lock.name, held=held)


def sleep(task: Any, seconds: float, alive: Alive) -> None:
    time.sleep(seconds)


def steps(task: Any, seconds: float, alive: Alive) -> None:
    """Work in short steps, each with a sign of life."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.01)
        alive()


def sql(task: Any, seconds: float, alive: Alive) -> None:
    with psycopg.connect(os.environ["FLEET_DSN"], application_name="body") as connection:
        history.note("sql", name=connection.info.backend_pid)
        connection.execute("SELECT pg_sleep(%s)", [seconds])


def statement(task: Any, seconds: float, alive: Alive) -> None:
    """Work in the transaction that holds the lock."""
    task.lock.connection.execute("SELECT pg_sleep(%s)", [seconds])


def child(task: Any, seconds: float, alive: Alive) -> None:
    subprocess.run([sys.executable, "-c", f"import time; time.sleep({seconds})"], check=True)


def swallow(task: Any, seconds: float, alive: Alive) -> None:
    """Go on whatever error comes."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            time.sleep(0.02)
            raise ConnectionError("again")
        except Exception:  # noqa: BLE001, PERF203 - what this body is about
            continue


def stubborn(task: Any, seconds: float, alive: Alive) -> None:
    """Go on whatever comes, twice."""
    for last in (False, False, True):
        try:
            steps(task, seconds, alive)
        except BaseException:  # noqa: PERF203
            history.note("thrown", name=task.lock.name)
            if last:
                raise
        else:
            return


def check(task: Any, seconds: float, alive: Alive) -> None:
    """Ask the lock between two steps, as a body does that can't be interrupted."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.01)
        task.lock.check()


def until_lost(task: Any, seconds: float, alive: Alive) -> None:
    """Work until the lock is lost, and a little longer."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not task.lock.lost:
        time.sleep(0.01)
        alive()
    history.note("told", name=task.lock.name, lost=task.lock.lost)
    steps(task, 0.3, alive)


def retried(task: Any, seconds: float, alive: Alive) -> None:
    """Have a successor in any case, and go on."""
    if not task.request.retries:
        task.retry(countdown=0, throw=False)
        steps(task, seconds, alive)


BODIES = {
    body.__name__: body
    for body in (sleep, steps, sql, statement, child, swallow, stubborn, check, until_lost, retried)
}


def losing(name: str, policy: str, **options: Any) -> None:
    """Make a task that is told what its body does."""
    options = {"lock_name": "shop", "lock_key": "<name>", "lock_retry_backoff": 1, **options}

    @app.task(base=AdvisoryLockedTask, name=name, bind=True, lock_on_lost=policy, **options)
    def body(self: Any, name: str, how: str = "steps", seconds: float = 60.0) -> str:
        # Published again it has seen enough.
        if (self.request.headers or {}).get("pglock", {}).get("failures"):
            how, seconds = "steps", 0.0
        with history.body(name, self.request.id, self.name) as alive:
            BODIES[how](self, seconds, alive)
        return "done"


for policy in ("abort", "retry", "continue"):
    losing(f"lost_{policy}", policy)
losing("lost_in_transaction", "abort", lock_scope="transaction")
losing("late_lost_retry", "retry", lock_on_conflict="retry", lock_retry_backoff_max=2, **LATE)


# Bodies with a token.


@app.task(base=AdvisoryLockedTask, name="fenced", bind=True, lock_name="shop", lock_key="<name>")
def fenced(self: Any, name: str) -> None:
    with history.body(name, self.request.id, self.name):
        token = self.lock.fencing_token()
        assert token == self.lock.fencing_token()
        history.note("token", token=token)


@app.task(
    base=AdvisoryLockedTask,
    name="writes",
    bind=True,
    lock_name="shop",
    lock_key="<name>",
    lock_on_lost="continue",
)
def writes(self: Any, name: str, value: str, guard: str, gate: str | None = None) -> int:
    """Write a value when the gate opens, and return how many rows took it."""
    token = self.lock.fencing_token()
    if gate:
        work(self, name, gate=gate)
    with psycopg.connect(os.environ["FLEET_DSN"]) as connection:
        row = {"token": token, "value": value, "name": name}
        statement = f"UPDATE ledger SET token = %(token)s, value = %(value)s WHERE name = %(name)s {guard}"
        return connection.execute(statement.encode(), row).rowcount


@app.task(base=AdvisoryLockedTask, name="shows_limits", bind=True, lock_name="shop", lock_key="<name>")
def shows_limits(self: Any, name: str, seconds: float) -> list[str]:
    """Work, and tell what limits a connection of the body's own has."""
    work(self, name, seconds)
    with psycopg.connect(os.environ["FLEET_DSN"]) as connection:
        limits = ("statement_timeout", "lock_timeout", "idle_session_timeout")
        return [connection.execute(f"SHOW {limit}".encode()).fetchone()[0] for limit in limits]  # type: ignore[index]

"""The uses of the lock, each as a task that a project would write. They are played by the tests.

- try and skip: `pipeline.train`, and `pipeline.publish`, which tries again
- block and wait: `onboard`
- leader election: `scan`, where a timer rings; `orchestrate`, for a loop of its own
- rate limiting: `call_partner`
- migration guard: `migrate`; `deploy`, for code that is no task
- readers and a writer: `serve` and `reload_configuration`
- a lock that ends with the transaction it guards: `book`
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from celery import Celery

from celery_pglock import AdvisoryLockedTask, Leader, advisory_lock

app = Celery("recipes")


@app.task(base=AdvisoryLockedTask, lock_key="tenant:<tenant_id>", lock_on_conflict="wait", lock_max_wait=60)
def onboard(tenant_id: str, journal: str, seconds: float = 0.0) -> None:
    """Onboarding is serial: callers queue, and take turns in the order in which they came."""
    with noted(journal, f"onboard {tenant_id}"):
        time.sleep(seconds)


@app.task(base=AdvisoryLockedTask, lock_key=[])
def scan(journal: str, seconds: float = 0.0) -> None:
    """Look for work that is due. Every replica has a timer that sends it; the one with the lock leads."""
    with noted(journal, "scan"):
        time.sleep(seconds)


@app.task(
    base=AdvisoryLockedTask,
    lock_key=[],
    lock_limit=3,
    lock_min_hold=1,
    lock_on_conflict="retry",
    lock_retry_backoff=1,
    lock_retry_backoff_max=1,
)
def call_partner(order_id: int, journal: str) -> None:
    """A partner's API allows three calls in any second."""
    with noted(journal, f"call {order_id}"):
        pass


@app.task(
    base=AdvisoryLockedTask, lock_name="migrate", lock_key=[], lock_on_conflict="wait", lock_max_wait=600
)
def migrate(command: list[str]) -> int:
    """Migrations of several deploys run one after the other, those of `celery pglock run migrate` too."""
    return subprocess.run(command, check=False).returncode


@app.task(
    base=AdvisoryLockedTask,
    lock_name="configuration",
    lock_key=[],
    lock_mode="shared",
    lock_on_conflict="retry",
    lock_retry_backoff=1,
    lock_retry_backoff_max=1,
)
def serve(request_id: int, journal: str, seconds: float = 0.0) -> None:
    """Requests read the configuration, any number of them at once."""
    with noted(journal, f"serve {request_id}"):
        time.sleep(seconds)


@app.task(base=AdvisoryLockedTask, lock_name="configuration", lock_key=[], lock_on_conflict="wait")
def reload_configuration(journal: str, seconds: float = 0.0) -> None:
    """Nobody reads the configuration while it is replaced."""
    with noted(journal, "reload"):
        time.sleep(seconds)


@app.task(
    bind=True,
    base=AdvisoryLockedTask,
    lock_key="account:<account>",
    lock_scope="transaction",
    lock_on_conflict="wait",
)
def book(self: AdvisoryLockedTask, account: str, amount: int) -> None:
    """The booking and its lock live and end in one transaction."""
    assert self.lock is not None
    self.lock.connection.execute(
        "UPDATE account SET balance = balance + %s WHERE name = %s", (amount, account)
    )


# Where there is no task.


def deploy(command: list[str]) -> int:
    """Run a command where no task and no `celery pglock run migrate` migrates meanwhile."""
    with advisory_lock("migrate", wait=600, app=app):
        return subprocess.run(command, check=False).returncode


def orchestrate(scan: Callable[[], object], seconds: float, every: float = 0.1) -> None:
    """Several replicas run this loop; the one that leads does the work."""
    until = time.monotonic() + seconds
    with Leader("orchestrator", poll=0.2, app=app) as leader:
        while time.monotonic() < until:
            if leader.is_leader:
                scan()
            time.sleep(every)


@contextmanager
def noted(journal: str, what: str) -> Iterator[None]:
    """Note the beginning and the end, each in one write, so that lines of several processes do not mix."""
    note(journal, f"begin {what}")
    try:
        yield
    finally:
        note(journal, f"end {what}")


def note(journal: str, line: str) -> None:
    with Path(journal).open("a", encoding="utf-8") as file:
        file.write(f"{time.monotonic():.6f} {line}\n")

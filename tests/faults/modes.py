"""The tasks of every way to hold a lock: ``celery -A faults.modes worker``, beside those of `faults.shop`."""

from __future__ import annotations

import time
from typing import Any

from celery import signals

from celery_pglock import AdvisoryLockedTask, advisory_lock

from .shop import LATE, app, locked
from .work import FOLDER, history

__all__ = ["app"]

locked("wait", lock_on_conflict="wait", lock_max_wait=30)
locked("wait_in_transaction", lock_on_conflict="wait", lock_max_wait=30, lock_scope="transaction")
locked("wait_briefly", lock_on_conflict="wait", lock_max_wait=1)
locked("one_waits", lock_on_conflict="wait", lock_max_wait=30, lock_max_waiters=1)
locked("read", lock_mode="shared", lock_on_conflict="retry", lock_retry_backoff_max=1)
locked("three", lock_name="three", lock_limit=3, lock_on_conflict="retry", lock_retry_backoff_max=1)
TEN = {"lock_key": [], "lock_limit": 10, "lock_on_conflict": "retry", "lock_retry_backoff_max": 1}
locked("ten", lock_name="ten", **TEN)
locked("rate", lock_name="rate", lock_min_hold=0.5, **TEN)
locked("kept", lock_name="kept", lock_min_hold=30)
locked("late_in_transaction", lock_scope="transaction", **LATE)


@signals.task_prerun.connect
def on_prerun(task_id: str, task: Any, **_: Any) -> None:
    """Tell when an execution came to its lock: before that it has not been granted."""
    if task.name in ("ten", "rate"):
        history.note("asked", id=task_id)


@app.task(base=AdvisoryLockedTask, name="kept_retries", bind=True, lock_key="<name>", lock_min_hold=30)
def kept_retries(self: Any, name: str, times: int = 2) -> int:
    with history.body(name, self.request.id, self.name):
        if self.request.retries < times:
            raise self.retry(countdown=0, max_retries=times)
        return self.request.retries


@app.task(base=AdvisoryLockedTask, name="crosses", bind=True, lock_name="shop", lock_key="<name>")
def crosses(self: Any, name: str, other: str, wait: float) -> str:
    """Hold one name and wait for another, as soon as somebody else holds that."""
    with history.body(name, self.request.id, self.name):
        deadline = time.monotonic() + 20
        (FOLDER / f"{name} is held").touch()
        while not (FOLDER / f"{other} is held").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        with advisory_lock(f"shop:{other}", wait):
            return "both"


@app.task(
    base=AdvisoryLockedTask,
    name="fails_at_its_commit",
    bind=True,
    lock_name="shop",
    lock_key="<name>",
    lock_scope="transaction",
    lock_on_lost="retry",
)
def fails_at_its_commit(self: Any, name: str) -> None:
    """Break a constraint that is checked at the end."""
    with history.body(name, self.request.id, self.name):
        for _ in range(2):
            self.lock.connection.execute("INSERT INTO once VALUES (1)")

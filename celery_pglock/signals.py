"""What the package tells: Celery signals, sent in the process that runs the body, with the task as sender.

Receivers get ``lock``, the `~celery_pglock.locks.hold.Hold` in question, and what is named below; seconds
are floats. An exception in a receiver is logged by Celery and changes nothing.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import Task
from celery.utils.dispatch import Signal

__all__ = ["lock_acquired", "lock_conflict", "lock_lost", "lock_released", "send_event", "send_events"]

#: The lock is held, and the body is about to run. ``waited``: seconds since the first conflict of this
#: execution, or since the question where there was none.
lock_acquired = Signal(name="lock_acquired", providing_args=["lock", "waited"])

#: Somebody else holds the name. ``conflict``: a `~celery_pglock.Conflict`; ``decision``: ``"skip"``,
#: ``"retry"`` or ``"raise"``.
lock_conflict = Signal(name="lock_conflict", providing_args=["lock", "conflict", "decision"])

#: The body is done and the name is free. ``waited`` as above; ``held``: seconds between grant and release.
lock_released = Signal(name="lock_released", providing_args=["lock", "waited", "held"])

#: The lock was gone before it was released. ``held``: seconds between the grant and the notice.
lock_lost = Signal(name="lock_lost", providing_args=["lock", "held"])


logger = logging.getLogger(__name__)

_events_wanted = False


def send_events(wanted: bool) -> None:
    """Say whether this process sends monitoring events (``celery worker -E``)."""
    global _events_wanted
    _events_wanted = wanted


def send_event(task: Task[..., Any], kind: str, **fields: Any) -> None:
    """Send a monitoring event about the running task, as Flower and ``celery events`` show them."""
    if not (_events_wanted and task.send_events):
        return
    try:
        task.send_event(kind, retry=False, **fields)
    except Exception as exc:  # noqa: BLE001 - nobody's work may depend on a monitor
        logger.warning("event %r was not sent: %s", kind, exc)

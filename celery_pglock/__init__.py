"""Celery tasks that never run twice at a time: each execution under a PostgreSQL advisory lock."""

from __future__ import annotations

from .advisory import Leader, advisory_lock
from .conflict import Conflict, is_skipped
from .locks.errors import (
    LockDeadlock,
    LockError,
    LockKeyError,
    LockLost,
    LockNotAcquired,
    LockSetupError,
    LockUnavailable,
)
from .locks.hold import Hold, current_lock
from .locks.keys import LockId
from .options import entry_options
from .signals import lock_acquired, lock_conflict, lock_lost, lock_released
from .task import AdvisoryLockedTask

__all__ = [
    "AdvisoryLockedTask",
    "Conflict",
    "Hold",
    "Leader",
    "LockDeadlock",
    "LockError",
    "LockId",
    "LockKeyError",
    "LockLost",
    "LockNotAcquired",
    "LockSetupError",
    "LockUnavailable",
    "advisory_lock",
    "current_lock",
    "entry_options",
    "is_skipped",
    "lock_acquired",
    "lock_conflict",
    "lock_lost",
    "lock_released",
]

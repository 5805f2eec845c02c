"""The lock as a context manager, for code that is no task."""

from __future__ import annotations

import time
from types import TracebackType

from .errors import LockNotAcquired, LockUnavailable
from .hold import Hold, covering, enter, leave
from .interrupt import Interrupt, LockInterrupt
from .keeper import Keeper, keeper_for
from .requests import Acquire, Answer
from .settings import Settings
from .transaction import Transaction

__all__ = ["AdvisoryLock"]

#: Seconds between two tries where PostgreSQL has no queue to stand in: for one of N slots.
TRY_EVERY = 0.1


class AdvisoryLock:
    """Holds a lock for the length of a block. Used once. Without settings locks are disabled."""

    # Of the class, so that `__del__` finds it in what was interrupted while it was made.
    _scope: Keeper | Transaction | None = None

    def __init__(
        self, settings: Settings | None, hold: Hold, *, wait: float | None, in_transaction: bool, abort: bool
    ) -> None:
        self._settings = settings
        self._hold = hold
        self._wait = wait
        self._in_transaction = in_transaction
        self._abort = abort
        self._interrupt: Interrupt | None = None
        self._used = False

    def __repr__(self) -> str:
        return f"<AdvisoryLock {self._hold!r}>"

    def __enter__(self) -> Hold:
        """Acquire. Raises `LockNotAcquired`, `LockUnavailable` or `LockSetupError`."""
        if self._used:
            raise TypeError(f"{self!r} was used before: an advisory lock is for one block")
        self._used = True
        outer = covering(self._hold)
        if outer is not None:
            return outer
        try:
            # Inside: an interrupt right behind it would leave it to all that runs here later.
            enter(self._hold)
            if self._settings is not None:
                self._acquire(self._settings)
            if self._abort and self._scope is not None:
                self._interrupt = self._scope.interrupt_for(self._hold)
                self._interrupt.__enter__()
        except BaseException:
            self._leave(success=False)
            raise
        return self._hold

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release. Raises `LockLost` if the lock was lost and the block has no error of its own."""
        try:
            self._leave(success=error is None)
        except LockInterrupt:
            # It came before it could be disarmed.
            self._leave(success=False)
        self._hold.check_after(None if isinstance(error, LockInterrupt) else error)

    def __del__(self) -> None:
        # An interrupt at the door of `__exit__` comes before anything there can be done about it.
        # One that was released does next to nothing here, since what is raised in here is lost.
        if self._scope is not None:
            self._leave(success=False)

    def _leave(self, *, success: bool) -> None:
        if self._interrupt is not None:
            self._interrupt.disarm()
        leave(self._hold)
        if self._scope is None:
            return
        try:
            self._scope.release(self._hold, success=success)
        except BaseException:
            self._scope.release_soon(self._hold)
            raise
        self._scope = None

    def _acquire(self, settings: Settings) -> None:
        since = time.monotonic()
        scope = Transaction(settings) if self._in_transaction else keeper_for(settings)
        self._scope = scope
        asked = scope.acquire(self._hold)
        if asked.answer is Answer.CONFLICT and self._wait != 0:
            asked = self._wait_for(scope, since)
        if asked.answer is Answer.CONFLICT:
            raise LockNotAcquired(self._hold.label, 0.0 if self._wait == 0 else time.monotonic() - since)
        if asked.answer is not Answer.GRANTED:
            raise asked.error or LockUnavailable("no answer")

    def _wait_for(self, scope: Keeper | Transaction, since: float) -> Acquire:
        if self._hold.limit == 1:
            self._scope = scope.waiter()
            return self._scope.wait(self._hold, self._wait)
        while True:
            asked = scope.acquire(self._hold)
            waited = time.monotonic() - since
            if asked.answer is not Answer.CONFLICT or (self._wait is not None and waited >= self._wait):
                return asked
            time.sleep(TRY_EVERY)

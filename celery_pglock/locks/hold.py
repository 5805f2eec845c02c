"""One acquisition of one lock: its states and its loss.

A hold is used once::

    NEW ──▶ HELD ──▶ RELEASED
              └────▶ LOST

It does not know PostgreSQL: the session that granted it moves it from state to state, and so do the watch
that sees the session end and the keeper that lets it linger. Whoever runs under it only reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from enum import Enum
from typing import Any

from .errors import LockDeadlock, LockLost
from .keys import LockId
from .settings import Settings

__all__ = ["Hold", "covering", "current_lock", "enter", "leave"]


class Hold:
    """One acquisition. ``name`` and ``id`` say what is locked; ``lost`` and `check` whether it still is."""

    class Status(Enum):
        NEW = "new"
        HELD = "held"
        RELEASED = "released"
        LOST = "lost"

    #: Whether it was the code under it that gave the lock away: run again it would do so again.
    lost_by_body = False
    #: What the code under it ends with where it met the loss before anybody told it.
    _signs_of_loss: tuple[type[BaseException], ...] = ()

    def __init__(
        self,
        id: LockId,
        name: str | None = None,
        *,
        label: str | None = None,
        shared: bool = False,
        limit: int = 1,
        min_hold: float = 0.0,
        settings: Settings | None = None,
    ) -> None:
        self.id = id
        #: Of the database that it lives in.
        self._settings = settings
        self.shared = shared
        #: How many may hold it at once, each in a slot of its own.
        self.limit = limit
        self.slot = 0
        #: What it occupies in PostgreSQL: the id, or the one beside it that belongs to its slot.
        self.occupied = id
        #: Seconds from the grant that it stays taken at least.
        self.min_hold = min_hold
        #: The text behind the id; `None` where an id was given as it is.
        self.name = name
        #: What logs, markers and errors call the lock: a name that holds all arguments stays out of them.
        self.label = label or name or repr(id)
        self._status = self.Status.NEW
        self._loss = ""
        self._connection: Any = None
        self._token: int | None = None
        self._token_source: Callable[[], int] | None = None
        self._asked_at = self._held_since = self._released_at = time.monotonic()

    def __repr__(self) -> str:
        return f"<Hold {self.label!r} [{self._status.value}]>"

    @property
    def status(self) -> Status:
        return self._status

    def is_about_the_same_as(self, other: Hold) -> bool:
        """Whether both lock one id of one database: in another database it is another lock."""
        if self.id != other.id:
            return False
        mine, its = self._settings, other._settings
        if mine is None or its is None:
            return mine is its
        return mine.same_database(its)

    @property
    def is_for_work(self) -> bool:
        """Whether somebody is to work under it: the package's own marks belong to no database of his."""
        return self._settings is not None

    @property
    def lost(self) -> bool:
        """Whether the lock is gone although nobody released it."""
        return self._status is self.Status.LOST

    def check(self) -> None:
        """Raise `LockLost` if the lock is gone. Asks nobody: it tells what is known by now."""
        if self.lost:
            raise self.loss()

    def check_after(self, error: BaseException | None) -> None:
        """Raise `LockLost` if the lock is gone, and the code under it ended without an error of its own."""
        if error is None or isinstance(error, self._signs_of_loss):
            self.check()

    def loss(self) -> LockLost:
        """The error that tells how it was lost."""
        return LockLost(self.label, self._loss)

    @property
    def connection(self) -> Any:
        """The connection whose transaction holds the lock, for the body to use.

        Raises `LockLost`, and `TypeError` where there is none.
        """
        self.check()
        if self._connection is None or self._status is not self.Status.HELD:
            raise TypeError(
                f'{self!r} lives in no open transaction: set lock_scope="transaction" where it was acquired,'
                " which may be around what asks here. There is none where locks are disabled"
            )
        return self._connection

    def fencing_token(self) -> int:
        """Return a number that is greater than that of every earlier holder of this name.

        Hand it to what the body writes to, and let that refuse a lower one than it has seen: then a holder
        that was stopped too late can't overwrite its successor. It is a transaction id of PostgreSQL
        (``pg_current_xact_id``), taken on the first call and the same for the life of the hold. It is
        as durable as a commit: it grows over a crash of the server, and over a failover to a standby that
        commits wait for. Raises `LockLost`, and `LockUnavailable` if PostgreSQL can't be asked.
        """
        if self._token is None:
            self.check()
            if self._token_source is None or self._status is not self.Status.HELD:
                raise TypeError(
                    f"{self!r} is not held: a fencing token belongs to a holder, and none is drawn where"
                    " locks are disabled"
                )
            token = self._token_source()
            # Only a number drawn before the end of the hold is below those of the next holder.
            self.check()
            self._token = token
        return self._token

    @property
    def seconds_waited(self) -> float:
        """Seconds from the question to the grant."""
        return self._held_since - self._asked_at

    @property
    def seconds_held(self) -> float:
        """Seconds since the grant, or from the grant to the end."""
        end = time.monotonic() if self._status is self.Status.HELD else self._released_at
        return end - self._held_since

    # The session's side: only the granting session calls what follows.

    def _granted(self, slot: int) -> None:
        if slot:
            self.slot, self.occupied = slot, self.id.beside(slot)
        self._held_since = time.monotonic()
        self._status = self.Status.HELD

    def _released(self) -> None:
        if self._status is self.Status.HELD:
            self._released_at = time.monotonic()
            self._status = self.Status.RELEASED

    def _lost(self, reason: str, *, by_body: bool = False) -> None:
        if self._status is not self.Status.HELD:
            return
        self._released_at = time.monotonic()
        self._loss = reason
        if by_body:
            self.lost_by_body = True
        self._status = self.Status.LOST


_context: ContextVar[tuple[Hold, ...]] = ContextVar("celery_pglock_holds", default=())


def enter(hold: Hold) -> None:
    """Let the running code work under a hold."""
    _context.set((*_context.get(), hold))


def leave(hold: Hold, *, with_inner: bool = False) -> None:
    """Take back `enter`, if asked to for all that was entered since as well."""
    holds = _context.get()
    if hold in holds:
        place = holds.index(hold)
        _context.set(holds[:place] if with_inner else holds[:place] + holds[place + 1 :])


def covering(hold: Hold) -> Hold | None:
    """Return the hold that the running code works under and that makes another one needless.

    Raises `LockDeadlock` for one that would wait for the code's own.
    """
    for outer in _context.get():
        if outer.is_about_the_same_as(hold) and outer.status is outer.Status.HELD:
            if outer.shared and not hold.shared:
                raise LockDeadlock(
                    f"an exclusive lock {hold.label!r} inside of its own shared one would wait for itself"
                )
            return outer
    return None


def current_lock() -> Hold | None:
    """Return the innermost hold that the running code works under, `None` where there is none."""
    holds = _context.get()
    return holds[-1] if holds else None

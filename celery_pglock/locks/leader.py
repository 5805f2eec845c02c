"""One leader among many processes, for loops that must run once.

A follower asks for the lock at every poll; who gets it leads until the lock is lost or it stops::

    FOLLOWER ──granted──▶ LEADER ──lost──▶ FOLLOWER
                             └──stop()──▶ (handed over at once)

Guaranteed: two never hold the lock at once, and a leader learns of its loss within the bounds of `watch`.
Not guaranteed: that what it does at that very moment is undone. A unit of work asks ``is_leader`` before it
begins, and takes a fencing token if it must not come late.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING

from .errors import LockError
from .hold import Hold
from .keeper import Keeper
from .requests import Answer, Statement
from .settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Candidate", "Leader"]

logger = logging.getLogger(__name__)

#: Seconds between two looks at whether leadership is lost or to be given up.
LOOK_EVERY = 0.05

#: What a leader tells last.
RESIGNED = "resigned"

#: Seconds between two warnings that PostgreSQL can't be asked.
WARN_EVERY = 60.0


class Candidate:
    """Campaigns for one lock on a session of its own. Whoever uses it says when."""

    def __init__(self, settings: Settings | None, hold: Callable[[], Hold], *, pings: bool = True) -> None:
        """``hold`` makes one for each term. Without settings locks are disabled, and everybody leads.

        With ``pings`` False a leader that does not `confirm` within ``freeze_timeout`` leads no longer.
        """
        self._keeper = Keeper(settings, shared=False, pings=pings) if settings is not None else None
        self._new_hold = hold
        #: Where leaders `tell`, if anybody listens.
        self._channel: str | None = None
        #: Whether somebody has just resigned.
        self._is_vacant = False
        self.term: Hold | None = None
        #: Who leads instead, in words, and the last statement of his session.
        self.rival: str | None = None
        self.rival_says: str | None = None
        self._warned_at: float | None = None

    @property
    def is_real(self) -> bool:
        """Whether there is a lock at all, or locks are disabled."""
        return self._keeper is not None

    @property
    def leads(self) -> bool:
        """Whether the lock is held, as far as is known."""
        return self.term is not None and self.term.status is self.term.Status.HELD

    def campaign(self) -> bool:
        """Ask for the lock once."""
        hold = self._new_hold()
        if self._keeper is None:
            hold._granted(slot=0)
            self.term = hold
            return True
        asked, holder, statement = self._keeper.campaign(hold)
        self._is_vacant = False
        if asked.answer is Answer.GRANTED:
            self.term = hold
        else:
            self.rival, self.rival_says = holder.holder, statement.statement
        if asked.error is not None:
            self.warn(asked.error)
        return self.leads

    def look(self) -> None:
        """See who leads, and do not ask for the lock."""
        if self._keeper is not None:
            holder, statement = self._keeper.look(self._new_hold().id)
            self._is_vacant = False
            self.rival, self.rival_says = holder.holder, statement.statement
            if statement.error is not None:
                self.warn(statement.error)

    def confirm(self, note: str) -> bool:
        """Ask PostgreSQL whether the session of the lock is alive, and tell whether it still leads.

        It is asked by a note: the last one is to be read at any time.
        """
        return self.tell(note)

    def listen(self, told: Callable[[str], object]) -> None:
        """Hand on what leaders `tell` the others, from the next session on."""
        if self._keeper is not None:
            self._channel = "pglock:" + ":".join(map(str, self._new_hold().id))
            self._keeper.listen(self._channel, lambda note: self._hear(note, told))

    @property
    def listens(self) -> bool:
        """Whether all that was told since the last question was heard, or locks are disabled."""
        return self._keeper is None or self._keeper.is_open

    def _hear(self, note: str, told: Callable[[str], object]) -> None:
        if note == RESIGNED:
            self._is_vacant = True
        else:
            told(note)

    def rest(self, seconds: float, *, patiently: bool = False) -> float:
        """Listen until the next poll, or until a leader resigns unless ``patiently``.

        Returns the seconds left to sleep.
        """
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._is_vacant and not patiently:
                # News once: a server that goes away now must not be asked again and again.
                self._is_vacant = False
                return 0.0
            if self._keeper is None or not self._keeper.hear(left):
                return left
        return 0.0

    def tell(self, note: str) -> bool:
        """Tell the others how far this leader has come, and whether it still leads.

        All that listen have it when this returns, whatever becomes of this process; who comes later finds it
        as `rival_says` until the next statement.
        """
        if self.leads:
            self._notify(note)
        return self.leads

    def _notify(self, note: str) -> None:
        if self._channel is None:
            return
        escaped = note.replace("'", "''")
        told = Statement(f"NOTIFY \"{self._channel}\", '{escaped}'")
        self.run(told)
        if told.error is not None:
            logger.warning("what this leader has done could not be told: %s", told.error)

    def run(self, statement: Statement) -> None:
        """Run a statement on the session of the lock. Who leads after it succeeded, did so meanwhile."""
        if self._keeper is not None:
            self._keeper.run(statement)

    def interruptible(self) -> AbstractContextManager[None]:
        """What a piece of work runs in that is stopped by `LockLost` if the lock is lost meanwhile."""
        if self._keeper is None or self.term is None:
            return nullcontext()
        return self._keeper.interrupt_for(self.term)

    def resign(self) -> None:
        """Give the lock back, so that another can lead at once."""
        term, self.term = self.term, None
        if term is None or self._keeper is None:
            return
        self._keeper.release_kept(term)

    def close(self) -> None:
        """Resign for good, and wake the others."""
        term = self.term
        self.resign()
        # Not when it resigns since it can't work: where nobody can, they would wake each other in turns.
        if term is not None and term.status is term.Status.RELEASED:
            self._notify(RESIGNED)
        if self._keeper is not None:
            self._keeper.retire()

    def warn(self, error: LockError) -> None:
        """Log why nobody can lead, once and then at most once a minute."""
        if self._warned_at is None or time.monotonic() - self._warned_at >= WARN_EVERY:
            self._warned_at = time.monotonic()
            logger.warning("nobody is asked to lead: %s", error)


class Leader:
    """Campaigns in the background, again and again, from `start` to `stop`."""

    def __init__(
        self,
        settings: Settings | None,
        hold: Callable[[], Hold],
        *,
        poll: float,
        on_gain: Callable[[], object] | None = None,
        on_loss: Callable[[], object] | None = None,
    ) -> None:
        self._candidate = Candidate(settings, hold)
        self._poll = poll
        self._on_gain = on_gain
        self._on_loss = on_loss
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Leader [{'leads' if self.is_leader else 'follows'}]>"

    @property
    def is_leader(self) -> bool:
        """Whether this process leads, as far as is known by now. Not any more once it is told to stop."""
        return self._candidate.leads and not self._stopped.is_set()

    def start(self) -> None:
        """Begin to campaign. Raises `TypeError` on a second start."""
        if self._thread is not None:
            raise TypeError(f"{self!r} was started before")
        self._thread = threading.Thread(target=self._serve, name="pglock-leader", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Hand over at once and campaign no more. Does nothing the second time."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _serve(self) -> None:
        try:
            while not self._stopped.is_set():
                if self._candidate.campaign():
                    self._lead()
                else:
                    self._stopped.wait(self._poll)
        finally:
            self._candidate.close()

    def _lead(self) -> None:
        logger.info("this process leads")
        call(self._on_gain)
        while self._candidate.leads and not self._stopped.is_set():
            self._stopped.wait(LOOK_EVERY)
        if not self._candidate.leads:
            logger.warning("this process leads no longer: its lock was lost")
        # Called before the lock is given back: what it stops has stopped when another leads.
        call(self._on_loss)
        self._candidate.resign()


def call(callback: Callable[[], object] | None) -> None:
    """Call a callback; its errors are its own, and must not end the campaign."""
    if callback is None:
        return
    try:
        callback()
    except Exception:
        logger.exception("a callback of the leader failed")

"""One who wants to lead: a lock that is campaigned for, and what leaders tell those who follow.

A leader tells by NOTIFY: what PostgreSQL has acknowledged there reaches all that listen, before any of them
gets the lock. Who comes later finds the leader's last statement in ``pg_stat_activity``.
"""

from __future__ import annotations

import _thread
import logging
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from .errors import LockError
from .hold import Hold
from .holders import Holder
from .keeper import Keeper
from .keys import LockId
from .native import native_poll
from .process import signals_put_off
from .requests import Acquire, Answer, FindHolder, Release, Request, Statement
from .server import SessionBroken
from .session import Session
from .settings import Settings

__all__ = ["WARN_EVERY", "Candidate"]

logger = logging.getLogger(__name__)

#: What a leader tells last.
RESIGNED = "resigned"

#: Seconds for which a statement keeps a process from ending.
ENDS_WITHIN = 1.0

#: Seconds between two warnings that PostgreSQL can't be asked.
WARN_EVERY = 60.0


class Candidate:
    """Campaigns for one lock on a session of its own. Whoever uses it says when."""

    def __init__(self, settings: Settings | None, hold: Callable[[], Hold], *, pings: bool = True) -> None:
        """``hold`` makes one for each term. Without settings locks are disabled, and everybody leads.

        With ``pings`` False a leader that does not `confirm` within ``freeze_timeout`` leads no longer, but
        for what it does while `kept_for`.
        """
        self._keeper = ListeningKeeper(settings, pings=pings) if settings is not None else None
        self._new_hold = hold
        #: Where leaders `tell`, if anybody listens.
        self._channel: str | None = None
        #: Whether somebody has just resigned.
        self._is_vacant = False
        self.term: Hold | None = None
        #: Who leads instead, as far as was seen last.
        self.rival: Holder | None = None
        self._warned_at: float | None = None
        #: The last statement that told something.
        self._told = "SELECT true"

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
        # Before: who resigns while this is asked is heard with its answer, which may be a refusal still.
        self._is_vacant = False
        asked, found = self._keeper.campaign(hold)
        if asked.answer is Answer.GRANTED:
            self.term = hold
            self._is_vacant = False
        else:
            self.rival = found.holder
        if asked.error is not None:
            self.warn(asked.error)
        return self.leads

    def look(self) -> None:
        """See who leads, and do not ask for the lock."""
        if self._keeper is not None:
            self._is_vacant = False
            found = self._keeper.look(self._new_hold().id)
            self.rival = found.holder
            if found.error is not None:
                self.warn(found.error)

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
        in what its `rival` says until the next statement.
        """
        if self.leads:
            self._notify(note)
        return self.leads

    def tell_late(self, note: str) -> None:
        """Tell the others how far one has come who leads no longer.

        They hear it if they listen by now, before or after one of them gets the lock.
        """
        self._notify(note)

    def _notify(self, note: str) -> None:
        if self._channel is None:
            return
        escaped = note.replace("'", "''")
        self._told = f"NOTIFY \"{self._channel}\", '{escaped}'"
        told = Statement(self._told)
        self.run(told)
        if told.error is not None:
            logger.warning("what this leader has done could not be told: %s", told.error)

    def run(self, statement: Statement) -> None:
        """Run a statement on the session of the lock. Who leads after it succeeded, did so meanwhile."""
        if self._keeper is not None:
            self._keeper.run(statement)

    def interruptible(self, grace: float) -> AbstractContextManager[None]:
        """What a piece of work runs in that is stopped by `LockLost` if the lock is lost meanwhile.

        What ends within ``grace`` seconds of its beginning is not stopped. Nothing begins without the lock.
        """
        if self._keeper is None or self.term is None:
            return nullcontext()
        return self._keeper.interrupt_for(self.term, grace=grace)

    @contextmanager
    def kept_for(self, seconds: float) -> Iterator[None]:
        """Keep the lock while something runs that does not `confirm` it, for so long at most.

        For who has no ``pings`` otherwise. What it told last is told again, since who has just come reads the
        last statement and no other.
        """
        if self._keeper is not None:
            self._keeper.tell_for(seconds, self._told)
        try:
            yield
        finally:
            if self._keeper is not None:
                self._keeper.tell_for(0.0, self._told)

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
            logger.warning("this process can't lead: %s", error)


class ListeningKeeper(Keeper):
    """The keeper of one asker alone, who hears what is told on a channel of the database."""

    def __init__(self, settings: Settings, *, pings: bool) -> None:
        super().__init__(settings, shared=False, pings=pings)
        self._listens: tuple[str, Callable[[str], object]] | None = None

    def release_kept(self, hold: Hold) -> None:
        """Release a hold and keep the session for the next one."""
        if hold.status is hold.Status.HELD:
            self._ask(Release(hold))

    def tell_for(self, seconds: float, text: str) -> None:
        """Let a statement be the sign of life for the server for so long, and then give none."""
        self._liveness.ping_for(seconds, lambda: Statement(text))

    def listen(self, channel: str, told: Callable[[str], object]) -> None:
        """Hand on what is told on a channel of the database, with each answer and in `hear`.

        What is told while there is no session is missed.
        """
        self._listens = channel, told

    @property
    def is_open(self) -> bool:
        """Whether there is a session."""
        return self._session is not None

    def hear(self, seconds: float) -> bool:
        """Wait until something is told, for so long at most. False where there is no session to hear it."""
        session = self._session
        if session is None:
            return False
        # First without a poll: what came close behind the last answer lies in the driver's buffer already.
        if not self._take_in(session) and self._session is session:
            poll = native_poll()
            poll.register(session.socket, select.POLLIN)
            if poll.poll(seconds * 1000):
                self._take_in(session)
        return self._session is session

    def _take_in(self, session: Session) -> bool:
        """Take in what was told, and tell whether anything was. Drops a session that is broken."""
        with self._statement:
            try:
                return self._session is session and session.hear()
            except SessionBroken as exc:
                self._drop_session(str(exc))
                return False

    def campaign(self, hold: Hold) -> tuple[Acquire, FindHolder]:
        """Try to acquire a hold, and ask with the same statement who has it."""
        asked = Acquire(hold), FindHolder(hold.id)
        self._answer(asked)
        return asked

    def look(self, id: LockId) -> FindHolder:
        """Ask who holds an id."""
        asked = FindHolder(id)
        self._answer([asked])
        return asked

    def _answer(self, requests: Sequence[Request]) -> None:
        session, answered = self._session, threading.Event()
        if session is None or session.given_up_at is not None:
            # To connect may take its time, and there is nothing to resign.
            super()._answer(requests)
            return

        def end_soon() -> None:
            if not answered.wait(ENDS_WITHIN):
                session.cut()

        # Interrupted inside a statement it would lose its session, and nobody be told that it resigned.
        with signals_put_off(lambda: _thread.start_new_thread(end_soon, ())):
            try:
                super()._answer(requests)
            finally:
                answered.set()

    def _new_session(self) -> Session:
        session = super()._new_session()
        try:
            if self._listens is not None:
                session.listen(*self._listens)
        except LockError as exc:
            self._drop_session(str(exc))
            raise
        return session

    @property
    def _asks_anew(self) -> bool:
        # Who listens has missed what was told meanwhile, and decides anew.
        return self._listens is None

"""Notices that a session is no good although its connection stands: a silent network, a replaced server.

The end of a connection shows by itself, see `watch`. For these two somebody has to ask, now and then: the
session itself, or the server about it where it can't be asked, since it stands in the queue for a lock.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from .outlook import outlook_for
from .requests import Ping, Request
from .session import Session
from .settings import Settings

__all__ = ["Liveness"]

#: Seconds between two glances at whether a look at where the URL leads has come back.
GLANCE_EVERY = 0.1


class Liveness:
    """Asks one session after the other, and gives up what is no good: its holds count as lost then."""

    def __init__(
        self, settings: Settings, post: Callable[[Request], threading.Lock], *, pings: bool = True
    ) -> None:
        """``post`` leaves a request to who talks to the session, see `Owner.post`.

        Without ``pings`` it asks for no sign of life, unless told to, and only sees that others wait for an
        answer.
        """
        self._settings = settings
        self._post = post
        #: What a sign of life is asked for by, and up to when.
        self._question: Callable[[], Request] = Ping
        self._ping_until = math.inf if pings else -math.inf
        #: Whether the sign of life that was asked for last has come: a second question would come no further.
        self._asked: threading.Lock | None = None
        #: When it had a glance at a session in the queue last.
        self._glanced_at = -math.inf

    def look_at(self, session: Session) -> list[float]:
        """Do what is due for a session, and return the seconds until more may be."""
        return self._keep_alive(session) + self._locate(session) + self._see_in_queue(session)

    def ask(self) -> None:
        """Ask for a sign of life, unless one is asked for already."""
        if self._asked is None or not self._asked.locked():
            self._asked = self._post(self._question())

    def ping_for(self, seconds: float, question: Callable[[], Request]) -> None:
        """Ask for signs of life by this question for so long, and then no more."""
        self._question = question
        self._ping_until = time.monotonic() + seconds

    def disown(self) -> None:
        """Begin anew in a forked child, where nobody answers what was asked."""
        self._asked = None

    def _keep_alive(self, session: Session) -> list[float]:
        """Ask a session for a sign of life where its silence would mean something.

        The server ends it after ``freeze_timeout`` without a question; on a network its silence is a loss.
        """
        bounds = [self._settings.freeze_timeout] if self._settings.freeze_timeout is not None else []
        if session.remote:
            self._look_for_silence(session)
            bounds += [self._settings.loss_timeout] if session.holds_something else []
        is_quiet = bounds and session.quiet_for > min(bounds) / 3 and not session.silent_for
        if is_quiet and time.monotonic() < self._ping_until:
            self.ask()
        pauses = [bound / 12 for bound in bounds]
        return [*pauses, self._settings.loss_timeout / 3] if session.remote else pauses

    def _look_for_silence(self, session: Session) -> None:
        """Give a session up when no answer comes.

        A third of the bound passes until the question, one until it counts as unanswered and the bodies
        are stopped, and one until the connection is cut, which may free the name at once.
        """
        third = self._settings.loss_timeout / 3
        if session.given_up_at is not None:
            if time.monotonic() - session.given_up_at > third:
                session.cut()
        elif session.silent_for > third and not session.has_an_answer():
            session.fell_silent = True
            session.give_up(f"PostgreSQL did not answer for {2 * third:.1f} s")

    def _locate(self, session: Session) -> list[float]:
        """See now and then whether the URL still leads to the server of a session that is in use.

        A server that was replaced may go on to answer, with locks that nobody else asks for.
        """
        pause = self._settings.locate_every
        if pause is None or session.given_up_at is not None:
            return []
        if session.server is None:
            return [pause]
        outlook = outlook_for(self._settings)
        seen = outlook.seen
        if seen.at > session.located_at:
            session.located_at = seen.at
            if seen.server not in (None, session.server):
                session.give_up("pglock_database_url leads to another server by now")
                session.cut()
                return []
        left = session.located_at + pause - time.monotonic()
        if left > 0:
            return [left]
        # One that lies idle is replaced before it is asked again.
        if not session.used_since_located:
            return [pause]
        outlook.look()
        return [GLANCE_EVERY]

    def _see_in_queue(self, session: Session) -> list[float]:
        """Give a session up that waits for a lock, and that nobody can see waiting.

        A proxy answers keepalives for a server that is gone, and would let it wait for ever, with all locks
        that it holds. So looks begin when a pause is over in which nobody saw it, and have the whole bound to
        find it: a new connection may take longer than an answer. Behind a pooler that has no connection left
        nobody could look.
        """
        bound = self._settings.loss_timeout
        looks_aside = session.remote and not self._settings.session_pooler and session.given_up_at is None
        if not looks_aside or not session.unseen_for:
            return []
        third, pause = bound / 3, bound / 3 if session.carries_work else 3 * bound
        outlook, now = outlook_for(session.settings_there), time.monotonic()
        if not outlook.seen.misses(session.pid, session.server):
            session.seen_in_queue(outlook.seen.at)
        if min(now - self._glanced_at, session.unseen_for) > 2 * third:
            # It was this process that stood still: who was frozen can't say whether anybody was there.
            session.seen_in_queue(now)
        self._glanced_at = now
        if session.unseen_for > pause + bound and not session.has_an_answer():
            session.fell_silent = True
            session.give_up(
                f"PostgreSQL did not say for {session.unseen_for:.1f} s that it waits in the queue"
            )
        elif session.unseen_for > pause and now - outlook.seen.at > third / 3:
            outlook.look()
            return [GLANCE_EVERY]
        return [third / 4]

"""A connection of its own for one transaction at a time, and the watch on it. One is kept warm.

A question is answered in a bounded time, or the connection is cut: behind a pooler without a free server
connection, and on a network that fell silent, nobody else would end the wait.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack, suppress

import psycopg

from .errors import LockUnavailable
from .hold import Hold
from .interrupt import INTERRUPT_EVERY, Interrupt
from .process import application_name
from .server import Connection, connect, cut, disown, is_broken, query, reason_of
from .settings import Settings
from .watch import Watch

__all__ = ["RESET", "Line", "ask_once", "close_warm", "disown_all", "keep_warm", "warm_line"]

#: What a body's own settings left behind on the warm connection is not the next one's.
RESET = "RESET SESSION AUTHORIZATION; RESET ALL"


class Line:
    """A connection and the watch on it. One is kept warm for the next transaction."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.connection = connect(settings, application_name(), Connection)
        self.connected_at = time.monotonic()
        #: Whether a body has had the connection, and whether it leads to one session of the server.
        self.was_lent = self.is_direct = False
        #: When the question is to be answered that is not answered yet, while there is one of ours.
        self.answer_due: float | None = None
        self.hold: Hold | None = None
        #: Whether the connection has ended, seen by the watch, and whether that was its own doing.
        self.ended = self.was_cut = False
        self.running: set[Interrupt] = set()
        self.watch = Watch(self._on_end, self._on_pause)
        try:
            self.watch.look_at(self.connection.fileno(), self)
            _lines.add(self)
        except BaseException:
            # Interrupted: the watch would keep it open for ever.
            self.close()
            raise

    @property
    def may_lead_elsewhere(self) -> bool:
        """Whether it is so old that its URL may lead to another server by now."""
        timeout = self.settings.failover_timeout
        return timeout is not None and time.monotonic() - self.connected_at > timeout

    def ask(self, *statements: str, waits: float | None = 0.0) -> list[list[bytes | None]]:
        """Send statements together and return the rows of the last, in a bounded time.

        ``waits``: the seconds that the server may wait before it answers; None, for ever, has no bound.
        """
        self.answer_due = None if waits is None else time.monotonic() + waits + self.settings.loss_timeout
        self.watch.wake()
        try:
            return query(self.connection, "; ".join(statements))
        finally:
            self.answer_due = None

    def is_gone_by(self, exc: BaseException) -> bool:
        """Whether an error tells that the connection has ended, and not what the body left on it.

        A statement of an interrupted body may be under way still: that fails ours, and is no loss.
        """
        return isinstance(exc, psycopg.Error) and (
            self.ended
            or self.connection.closed
            or (exc.sqlstate is not None and is_broken(self.connection, exc))
        )

    def why_broken(self, exc: psycopg.Error) -> str:
        """Tell what broke the connection: of a cut the driver knows no more than that it ended."""
        if not self.was_cut:
            return reason_of(exc)
        return (
            f"no answer for {self.settings.loss_timeout:g} s: a network that fell silent, or a pooler without"
            " a free server connection, which each running body of transaction scope needs"
        )

    def close(self) -> None:
        """Close the connection: the transaction is rolled back, and its lock free.

        Released and not lost, since it is our own doing; and before the watch sees the end.
        """
        if self.hold is not None:
            self.hold._released()
        _lines.discard(self)
        self.watch.stop()
        self.connection.close()

    def disown(self) -> None:
        """Give the connection up in a forked child, where nothing is held."""
        disown(self.connection)
        if self.hold is not None:
            self.hold._lost("its process was forked")
        self.watch.disown()

    def _on_end(self, _: object) -> None:
        self.ended = True
        if self.hold is not None:
            self.hold._lost("PostgreSQL ended its session")

    def _on_pause(self) -> float | None:
        pauses = []
        due = self.answer_due
        if due is not None:
            left = due - time.monotonic()
            if left <= 0:
                self.was_cut = True
                cut(self.connection)
            pauses.append(max(left, INTERRUPT_EVERY))
        for interrupt in list(self.running):
            if interrupt.due:
                interrupt.stop()
                pauses.append(INTERRUPT_EVERY)
        return min(pauses, default=None)


# Lines of this process.

_lines: set[Line] = set()
_warm: deque[Line] = deque()


def warm_line(settings: Settings) -> Line | None:
    """The line that is kept warm, if it is one to this database."""
    while _warm:
        with suppress(IndexError):
            line = _warm.pop()
            ended = line.ended or line.connection.closed
            if line.settings == settings and not ended and not line.may_lead_elsewhere:
                return line
            line.close()
    return None


def keep_warm(line: Line) -> None:
    """Keep a line warm, unless there is one."""
    line.hold = None
    # They belong to the body that had the connection.
    line.connection.pgconn.notice_handler = line.connection.pgconn.notify_handler = None
    if _warm:
        line.close()
    else:
        _warm.append(line)


def close_warm() -> None:
    """Close what nobody uses."""
    while _warm:
        with suppress(IndexError):
            _warm.pop().close()


def disown_all() -> None:
    """Give up what a forked child has inherited."""
    lines = list(_lines)
    _lines.clear()
    _warm.clear()
    with ExitStack() as all_of_them:
        for line in lines:
            all_of_them.callback(line.disown)


def ask_once(settings: Settings, question: str) -> bytes | None:
    """Ask for one value, in no transaction. Raises `LockUnavailable` and `LockSetupError`."""
    warm = warm_line(settings)
    line = warm or Line(settings)
    try:
        answer = line.ask(RESET, question)[0][0]
    except psycopg.Error as exc:
        # A warm one may have ended while nobody used it: that costs nothing. On a silent network a second
        # try would be as long.
        again = warm is not None and line.is_gone_by(exc) and not line.was_cut
        line.close()
        if again:
            return ask_once(settings, question)
        raise LockUnavailable(reason_of(exc)) from exc
    except BaseException:
        line.close()
        raise
    keep_warm(line)
    return answer

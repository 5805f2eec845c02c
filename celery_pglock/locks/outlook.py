"""What a new connection shows of a server that no session can be asked about.

Where its URL leads by now, and whose sessions stand in the queue for a lock: these answer nothing.
"""

from __future__ import annotations

import _thread
import math
import os
import threading
import time
from dataclasses import dataclass

import psycopg

from .errors import LockError
from .line import Line
from .server import WHO_AM_I
from .settings import Settings
from .sql import QUEUED

__all__ = ["Outlook", "Sight", "outlook_for"]


@dataclass(frozen=True)
class Sight:
    """What was seen from a new connection that was opened at a moment."""

    at: float = -math.inf
    #: The primary that it reached, None where nobody can tell.
    server: bytes | None = None
    #: The processes of that server that wait for an advisory lock: none where it was silent. None where it
    #: could not be asked for another reason: a server that is full is alive.
    queued: frozenset[int] | None = frozenset()

    def misses(self, pid: int | None, server: bytes | None) -> bool:
        """Whether a process of a server does not wait there. Who could not look misses nobody."""
        return self.queued is not None and (server != self.server or pid not in self.queued)


class Outlook:
    """Where a URL leads, seen from a new connection: one for all sessions of the process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        #: What was seen last.
        self.seen = Sight()
        #: Held by the thread that looks.
        self._looking = threading.Lock()

    def look(self) -> None:
        """Look aside, since to connect may take its time, and not while somebody does."""
        if not self._looking.locked():
            try:
                _thread.start_new_thread(self._look, ())
            except RuntimeError:
                # No thread is to be had: that is no word on the server.
                self.seen = Sight(time.monotonic(), queued=None)

    def _look(self) -> None:
        # Two may have been started.
        if not self._looking.acquire(blocking=False):
            return
        sight = Sight(time.monotonic(), queued=None)
        try:
            sight = seen_from_outside(self._settings)
        except OSError:
            # No descriptor is to be had.
            pass
        finally:
            self.seen = sight
            self._looking.release()


_outlooks: dict[Settings, Outlook] = {}
# In a forked child nobody looks, whoever did so in its parent.
os.register_at_fork(after_in_child=_outlooks.clear)


def outlook_for(settings: Settings) -> Outlook:
    return _outlooks.get(settings) or _outlooks.setdefault(settings, Outlook(settings))


def seen_from_outside(settings: Settings) -> Sight:
    """Look from a new connection where the URL leads, and who waits for a lock there.

    A server that is full, or a standby that may become the primary yet, tells nothing.
    """
    began = time.monotonic()
    try:
        line = Line(settings)
    except LockError as exc:
        silent = isinstance(exc.__cause__, psycopg.errors.ConnectionTimeout)
        return Sight(began, queued=frozenset() if silent else None)
    try:
        [[_, in_recovery, server]] = line.ask(WHO_AM_I)
        [[queued]] = line.ask(QUEUED)
    except psycopg.Error:
        return Sight(began, queued=frozenset() if line.was_cut else None)
    finally:
        line.close()
    if in_recovery != b"f":
        return Sight(began, queued=None)
    return Sight(began, server, frozenset(map(int, (queued or b"").split())))

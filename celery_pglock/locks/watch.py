"""Notices that a session is gone.

It sleeps in ``poll()`` on the session's socket, for the end of the connection alone. That needs no traffic,
and does not race with the statements of others: data that arrives wakes nobody here. A network that falls
silent shows no end: for that the keeper asks the server now and then, in the pauses that it sets itself.
"""

from __future__ import annotations

import _thread
import logging
import os
import select
import threading
from collections.abc import Callable
from functools import partial

from .native import native_caller, native_poll

__all__ = ["Watch"]

logger = logging.getLogger(__name__)

#: Linux tells the peer's goodbye by POLLRDHUP alone. Elsewhere it is readable as an end of file only, which
#: data looks like too: there the pauses have to do, and the end shows at the next statement.
GOODBYE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR

#: Seconds to sleep at most: the system's own bound is 24 days.
LONGEST = 3600.0


class Watch:
    """One thread (a greenlet, where `threading` is monkey-patched) that watches one socket at a time."""

    def __init__(self, on_end: Callable[[object], None], on_pause: Callable[[], float | None]) -> None:
        """``on_end`` is told whose connection ended.

        ``on_pause`` is called whenever the watch wakes, and returns the seconds until it wants to be
        called again, or None.
        """
        self._on_end = on_end
        self._on_pause = on_pause
        # Replaced as a whole, since a new socket may have the number of the one before.
        self._target: tuple[int, object] | None = None
        #: A pipe to wake it by, while it may sleep: its end to read and its end to write.
        self._pipe: tuple[int, int] | None = None
        self._opening = threading.Lock()
        self._stopped = False
        #: Held by the thread that serves.
        self._serving = threading.Lock()

    def look_at(self, socket: int, whose: object) -> None:
        """Watch this socket from now on, and no other."""
        self._target = (socket, whose)
        with self._opening:
            self._pipe = self._pipe or os.pipe()
        if not self._serving.locked():
            _thread.start_new_thread(self._serve, ())
        self.wake()

    def look_away(self) -> None:
        """Watch no socket: before it is closed, and its number somebody else's."""
        self._target = None
        self.wake()

    def wake(self) -> None:
        """Call ``on_pause`` now."""
        with self._opening:
            if self._pipe is not None:
                os.write(self._pipe[1], b".")

    def stop(self) -> None:
        """Watch no longer. May be told again, where an interrupt came in between."""
        self._stopped = True
        if self._serving.locked():
            self.wake()
        else:
            self._close()

    def disown(self) -> None:
        """Begin anew in a forked child: no thread watches there, and locks may never be free."""
        self._close_pipe()
        Watch.__init__(self, self._on_end, self._on_pause)

    def _close(self) -> None:
        with self._opening:
            self._close_pipe()

    def _close_pipe(self) -> None:
        pipe, self._pipe = self._pipe, None
        for end in pipe or ():
            os.close(end)

    def _serve(self) -> None:
        # Two may have been started, and a pipe has one reader.
        if self._serving.acquire(blocking=False):
            try:
                self._watch()
            finally:
                self._serving.release()

    def _watch(self) -> None:
        native_call, give_back = native_caller()
        while not self._stopped:
            pause = self._pause()
            target = self._target
            ended = native_call(partial(self._sleep, target, pause))
            if ended and target is not None and target is self._target:
                self._target = None
                self._on_end(target[1])
        self._close()
        give_back()

    def _pause(self) -> float | None:
        try:
            return self._on_pause()
        except Exception:
            # Without a watch no loss is noticed any more.
            logger.exception("the watch goes on")
            return 1.0

    def _sleep(self, target: tuple[int, object] | None, pause: float | None) -> bool:
        """Sleep until the connection ends (True), the pause is over, or somebody wakes us."""
        assert self._pipe is not None
        woken, _ = self._pipe
        poll = native_poll()
        poll.register(woken, select.POLLIN)
        if target is not None:
            poll.register(target[0], GOODBYE)
        events = dict(poll.poll(None if pause is None else int(min(pause, LONGEST) * 1000) + 1))
        if woken in events:
            os.read(woken, 4096)
        return target is not None and bool(events.get(target[0]))

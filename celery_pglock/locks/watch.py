"""Notices that a session is gone.

It sleeps in ``poll()`` on the session's socket, for the end of the connection alone. That needs no traffic,
and does not race with the statements of others: data that arrives wakes nobody here. A network that falls
silent shows no end: for that the keeper asks the server now and then, in the pauses that it sets itself.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from .interrupt import native_call, native_poll

__all__ = ["Watch"]

logger = logging.getLogger(__name__)

#: Linux tells the peer's goodbye by POLLRDHUP alone. Elsewhere it is readable as an end of file only, which
#: data looks like too: there the pauses have to do, and the end shows at the next statement.
GOODBYE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR


class Watch:
    """One thread (a greenlet, where `threading` is monkey-patched) that watches one socket at a time."""

    def __init__(self, on_end: Callable[[int], None], on_pause: Callable[[], float | None]) -> None:
        """``on_end`` is told the socket whose connection ended.

        ``on_pause`` is called whenever the watch wakes, and returns the seconds until it wants to be
        called again, or None.
        """
        self._on_end = on_end
        self._on_pause = on_pause
        self._socket: int | None = None
        self._woken, self._wake = os.pipe()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def look_at(self, socket: int | None) -> None:
        """Watch this socket from now on, and no other."""
        self._socket = socket
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._serve, name="pglock-watch", daemon=True)
            self._thread.start()
        self.wake()

    def wake(self) -> None:
        """Call ``on_pause`` now."""
        with suppress(OSError):  # it was stopped
            os.write(self._wake, b".")

    def stop(self) -> None:
        """Watch no longer."""
        if self._stopped:
            return
        self._stopped = True
        if self._thread is None:
            self.close()
        else:
            self.wake()

    def close(self) -> None:
        """Give the pipe back, where no thread waits on it: in a forked child."""
        os.close(self._woken)
        os.close(self._wake)

    def _serve(self) -> None:
        while not self._stopped:
            pause = self._pause()
            socket = self._socket
            ended = native_call(partial(self._sleep, socket, pause))
            if ended and socket is not None and socket == self._socket:
                self._socket = None
                self._on_end(socket)
        self.close()

    def _pause(self) -> float | None:
        try:
            return self._on_pause()
        except Exception:
            # Without a watch no loss is noticed any more.
            logger.exception("the watch goes on")
            return 1.0

    def _sleep(self, socket: int | None, pause: float | None) -> bool:
        """Sleep until the connection ends (True), the pause is over, or somebody wakes us."""
        poll = native_poll()
        poll.register(self._woken, select.POLLIN)
        if socket is not None:
            poll.register(socket, GOODBYE)
        events = dict(poll.poll(None if pause is None else int(pause * 1000) + 1))
        if self._woken in events:
            os.read(self._woken, 4096)
        return socket is not None and bool(events.get(socket))

"""The one thread or greenlet that talks to a shared session.

An asker may be interrupted at every bytecode. What it shares with the owner is therefore made of single
steps in C, a deque and bare locks: an exception inside a `threading.Condition` leaves it locked for ever, one
inside of ``Thread.is_alive()`` has a thread that runs pass for dead.
"""

from __future__ import annotations

import _thread
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from .requests import Acquire, Release, Request

__all__ = ["Owner"]

logger = logging.getLogger(__name__)


class Owner:
    """Hands requests to ``answer``, all that are pending at once, and wakes who asked."""

    def __init__(self, answer: Callable[[Sequence[Request]], None]) -> None:
        self._answer = answer
        self._pending: deque[tuple[Request, threading.Lock]] = deque()
        self._asleep = threading.Lock()
        #: Held by the thread that serves.
        self._serving = threading.Lock()
        self._stopped = False
        #: That thread, as `threading.get_ident` calls it.
        self.ident: int | None = None

    def ask(self, request: Request) -> None:
        """Wait for the answer. An asker that is interrupted gets nothing, and leaves nothing behind."""
        try:
            self.post(request).acquire()
        except BaseException:
            if isinstance(request, Acquire):
                for hold in (request.hold, request.identity):
                    if hold is not None:
                        self.post(Release(hold))
            raise

    def post(self, request: Request) -> threading.Lock:
        """Leave a request to the owner. The lock can be acquired when it is answered."""
        answered = threading.Lock()
        answered.acquire()
        self._pending.append((request, answered))
        self._wake()
        if not self._serving.locked():
            _thread.start_new_thread(self._serve, ())
        return answered

    def disown(self) -> None:
        """Begin anew in a forked child, where no thread answers."""
        Owner.__init__(self, self._answer)

    def stop(self, finish: Callable[[], None]) -> None:
        """Answer what is pending, then finish, and serve no more."""
        self._stopped = True
        self._wake()
        if self.ident != threading.get_ident() and self._serving.acquire(timeout=5.0):
            self._serving.release()
        finish()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # it is awake
            self._asleep.release()

    def _serve(self) -> None:
        # Several askers may have started one. Requests keep their order: a release must not overtake the
        # question that it takes back.
        while self._serving.acquire(blocking=False):
            self.ident = threading.get_ident()
            try:
                self._answer_until_stopped()
            finally:
                self.ident = None
                self._serving.release()
            if not self._pending:
                break

    def _answer_until_stopped(self) -> None:
        while not self._stopped or self._pending:
            # Bounded, since an asker may be interrupted between its question and its wake-up call.
            self._asleep.acquire(timeout=1.0)
            try:
                self._answer_all()
            except Exception:
                # Without an owner whoever asks waits for ever.
                logger.exception("the owner goes on")

    def _answer_all(self) -> None:
        batch = []
        while self._pending:
            batch.append(self._pending.popleft())
        if not batch:
            return
        try:
            self._answer([request for request, _ in batch])
        finally:
            for _, answered in batch:
                answered.release()

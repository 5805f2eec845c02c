"""The one thread or greenlet that talks to a shared session.

An asker may be interrupted at every bytecode. What it shares with the owner is therefore made of single
steps in C, a deque and bare locks: an exception inside a `threading.Condition` leaves it locked for ever.
"""

from __future__ import annotations

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
        # Entered twice by one thread where garbage is collected while it starts us: see `Keeper._ask`.
        self._starting = threading.RLock()
        self._serving = threading.Lock()
        self._stopped = False
        self._thread: threading.Thread | None = None

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
        with self._starting:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name="pglock-owner", daemon=True)
                self._thread.start()
        return answered

    @property
    def ident(self) -> int | None:
        """The thread that answers, as `threading.get_ident` calls it."""
        return None if self._thread is None else self._thread.ident

    def stop(self, finish: Callable[[], None]) -> None:
        """Answer what is pending, then finish, and serve no more."""
        self._stopped = True
        thread = self._thread
        if thread is None or not thread.is_alive():
            finish()
            return
        self._wake()
        if thread is not threading.current_thread():
            thread.join(timeout=5.0)
        finish()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # it is awake
            self._asleep.release()

    def _serve(self) -> None:
        while not self._stopped or self._pending:
            # Bounded, since an asker may be interrupted between its question and its wake-up call.
            self._asleep.acquire(timeout=1.0)
            # An asker interrupted while it started us may have led to a second owner. Requests keep their
            # order: a release must not overtake the question that it takes back.
            with self._serving:
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

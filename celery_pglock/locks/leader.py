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
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from .candidate import Candidate
from .hold import Hold
from .settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Leader"]

logger = logging.getLogger(__name__)

#: Seconds between two looks at whether leadership is lost or to be given up.
LOOK_EVERY = 0.05


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

"""Stops a body whose lock is gone: by a signal, in a greenlet, in a thread.

Facts that shaped it:

- A body may swallow every `Exception`, and one raised inside a ``__del__`` is lost. So what stops it is a
  `BaseException`, and it is thrown again and again until the body ends.
- It must not outlive the body: what it meets there is Celery's own code, and on threads and green pools a
  `BaseException` that escapes from a task loses the message. So it is thrown only while armed, turned into
  `LockLost` before it leaves, and disarming starts anew when it is interrupted itself.
- A signal reaches what sleeps or waits in a system call. Only the main thread gets one. An exception that
  is set on another thread waits for its next bytecode.
- SIGUSR2 ends a process that has no handler for it. Ours is installed by a body that finds another one, and
  stays: a signal may be on its way still when the body is over.
"""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, ClassVar

from .hold import Hold
from .native import is_patched_by

__all__ = ["INTERRUPT_EVERY", "Interrupt", "LockInterrupt"]

SIGNAL = signal.SIGUSR2

#: Seconds between two tries to stop a body.
INTERRUPT_EVERY = 0.25


class LockInterrupt(BaseException):
    """Thrown into a body whose lock is gone. Let it pass: it ends as `LockLost`."""


class Interrupt:
    """Arms the running code for as long as the block lasts: when its hold is lost it can be stopped.

    While armed it is a member of ``register``, where the watch finds it. Its first ``grace`` seconds it is
    left alone, whatever is lost: what ends in them ends as if nothing had happened. They count from its
    beginning, since a loss may be found late: who was frozen meanwhile has had them.
    """

    def __init__(self, hold: Hold, register: set[Interrupt], *, grace: float = 0.0) -> None:
        self.hold = hold
        self._register = register
        self._grace = grace
        self._armed = False
        self._armed_at = 0.0
        #: When it is to be stopped next, once its loss was found.
        self._stop_at: float | None = None
        self._thrown = False
        self._guard = threading.Lock()
        self._throw, self._recall = way_into_this_code()

    def __enter__(self) -> None:
        self._armed_at = time.monotonic()
        self._register.add(self)
        self._armed = True
        # A loss before this moment has woken the watch already, which found nobody to stop.
        if self.hold.lost:
            self.disarm()
            self.hold.check()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        interrupted = self.disarm()
        if interrupted or (kind is not None and issubclass(kind, LockInterrupt)):
            self.hold.check()

    def disarm(self) -> bool:
        """Let nothing be thrown from now on. Tell whether something was on its way."""
        interrupted = False
        while self._armed or interrupted:
            try:
                self._register.discard(self)
                with self._guard:
                    self._armed = False
                    # Not what others may have sent: only what was thrown.
                    if self._thrown:
                        self._recall()
            except LockInterrupt:  # noqa: PERF203 - thrown into this very loop
                interrupted = True
            else:
                break
        return interrupted

    def stop(self) -> None:
        """Throw `LockInterrupt` into the code, if it still runs and its lock is lost.

        Not before its grace is over, and not again before it had time to tidy up.
        """
        with self._guard:
            if not self.due:
                return
            now = time.monotonic()
            if self._stop_at is None:
                self._stop_at = max(now, self._armed_at + self._grace)
            if now >= self._stop_at:
                self._stop_at = now + INTERRUPT_EVERY
                self._thrown = True
                self._throw(self)

    @property
    def due(self) -> bool:
        """Whether the code still runs although its lock is lost."""
        return self._armed and self.hold.lost


Throw = Callable[[Interrupt], None]
Recall = Callable[[], None]


def nothing() -> None:
    """Recall nothing: the way has no exception that could be under way."""


def way_into_this_code() -> tuple[Throw, Recall]:
    """How to stop what calls this, and how to recall an exception that has not arrived yet."""
    if is_patched_by("gevent"):
        return way_into_gevent(), nothing
    if is_patched_by("eventlet"):
        return way_into_eventlet(), nothing
    if threading.current_thread() is threading.main_thread():
        take_signal_over()
        return wake_main_thread, nothing
    return way_into_thread(threading.get_ident())


# The main thread: a signal.


class Handler:
    """Handles the signal: raises in a body that is to stop, and leaves all else to who was there before.

    One for each time that the signal is taken over: who chains to one of ours never comes back to himself.
    """

    #: Whom the next signal is for.
    stopped: ClassVar[list[Interrupt]] = []

    def __init__(self, previous: Any) -> None:
        self._previous = previous

    def __call__(self, number: int, frame: FrameType | None) -> None:
        stopped, Handler.stopped = Handler.stopped, []
        if any(interrupt.due for interrupt in stopped):
            raise LockInterrupt
        if not stopped and callable(self._previous):
            self._previous(number, frame)


def take_signal_over() -> None:
    """Handle the signal from now on, whoever took it since the last body.

    Not before a body runs: billiard resets signals at the start of a child. What was not set by Python
    (`faulthandler.register`) can't be seen: before the first body it is replaced, and one that comes later
    without ``chain=True`` keeps bodies from being stopped.
    """
    current = signal.getsignal(SIGNAL)
    if not isinstance(current, Handler):
        signal.signal(SIGNAL, Handler(current))


def wake_main_thread(interrupt: Interrupt) -> None:
    """Send the signal to the main thread, wherever it waits."""
    Handler.stopped.append(interrupt)
    signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)


# Another thread: an exception at its next bytecode.


def way_into_thread(ident: int) -> tuple[Throw, Recall]:
    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def throw(_: Interrupt | None = None) -> None:
        set_exception(ctypes.c_ulong(ident), ctypes.py_object(LockInterrupt))

    def recall() -> None:
        # One under way is replaced by one that arrives here. Were it taken back, CPython 3.11 would look for
        # it for ever, and not get past the first line of a function that somebody traces.
        with suppress(LockInterrupt):
            throw()
            while True:
                pass

    return throw, recall


# Greenlets: an exception at the next switch, thrown by the hub, which looks once more whether it is due.


def way_into_gevent() -> Throw:
    import gevent  # noqa: TID251 - only where it runs already

    greenlet = gevent.getcurrent()
    hub = gevent.get_hub()

    def throw(interrupt: Interrupt) -> None:
        hub.loop.run_callback(lambda: greenlet.throw(LockInterrupt) if interrupt.due else None)

    return throw


def way_into_eventlet() -> Throw:
    import eventlet.hubs  # noqa: TID251 - only where it runs already
    import greenlet

    current = greenlet.getcurrent()

    def throw(interrupt: Interrupt) -> None:
        hub = eventlet.hubs.get_hub()
        hub.schedule_call_global(0, lambda: current.throw(LockInterrupt) if interrupt.due else None)

    return throw

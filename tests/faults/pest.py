"""Interrupts inside acquire and release, in a worker's own process: ``celery -A faults.pest worker``.

They come the way they come in each pool: a signal to the main thread (prefork, solo), `gevent.Timeout`, an
exception set on a thread. Each is drawn at random over the time that a question takes, and is an error of
the task like any other when it arrives: what is at work outside of the question belongs to Celery.
"""

from __future__ import annotations

import ctypes
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from celery.exceptions import SoftTimeLimitExceeded

from celery_pglock import Hold
from celery_pglock.locks.keeper import Keeper

from .bodies import app
from .shop import history

__all__ = ["app"]

#: Seconds: about what a question takes.
REACH = 0.0015

#: How many questions are left alone, of ten.
SPARED = 3


class Pest(SoftTimeLimitExceeded):
    """What arrives."""


def call_with_signal(call: Callable[[], Any]) -> Any:
    """Let a signal arrive on the main thread."""
    if signal.getsignal(signal.SIGALRM) is not on_alarm:
        signal.signal(signal.SIGALRM, on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, REACH))
        return call()
    finally:
        disarm(lambda: signal.setitimer(signal.ITIMER_REAL, 0))


def on_alarm(*_: Any) -> None:
    raise Pest


def disarm(how: Callable[[], Any]) -> None:
    """Start anew when what is called off arrives on the way."""
    arrived = None
    while True:
        try:
            how()
            break
        except Pest as pest:
            arrived = pest
    if arrived is not None:
        raise arrived


def call_with_timeout(call: Callable[[], Any]) -> Any:
    """Let `gevent.Timeout` arrive at a switch."""
    import gevent

    with gevent.Timeout(random.uniform(1e-5, 2 * REACH), Pest()):
        return call()


class Thrower:
    """Sets exceptions on threads, as long as they are armed."""

    def __init__(self) -> None:
        self._armed: dict[int, float] = {}
        self._guard = threading.Lock()
        threading.Thread(target=self._serve, daemon=True).start()

    def call(self, call: Callable[[], Any]) -> Any:
        ident = threading.get_ident()
        try:
            self._armed[ident] = time.monotonic() + random.uniform(0, 4 * REACH)
            return call()
        finally:
            disarm(lambda: self._disarm(ident))

    def _disarm(self, ident: int) -> None:
        with self._guard:
            self._armed.pop(ident, None)
            set_exception(ident, None)

    def _serve(self) -> None:
        while True:
            time.sleep(REACH / 4)
            for ident, due in list(self._armed.items()):
                with self._guard:
                    if time.monotonic() >= due and self._armed.pop(ident, None) is not None:
                        set_exception(ident, Pest)


def set_exception(ident: int, exception: type[Exception] | None) -> None:
    """Let an exception arrive at a thread's next bytecode, or recall it."""
    pointer = None if exception is None else ctypes.py_object(exception)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), pointer)


def way() -> Callable[[Callable[[], Any]], Any]:
    """How an interrupt comes in this process."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        return call_with_timeout
    if threading.current_thread() is threading.main_thread():
        return call_with_signal
    return thrower().call


_thrower: list[Thrower] = []
_making = threading.Lock()


def thrower() -> Thrower:
    with _making:
        if not _thrower:
            _thrower.append(Thrower())
    return _thrower[0]


def pestered(method: Callable[..., Any]) -> Callable[..., Any]:
    """Interrupt most questions about the names that begin with "p"."""

    def ask(keeper: Keeper, hold: Hold, *args: Any, **options: Any) -> Any:
        question = partial(method, keeper, hold, *args, **options)
        if not (hold.name or "").startswith("celery:shop:p") or random.randrange(10) < SPARED:
            return question()
        try:
            return way()(question)
        except Pest:
            history.note("pest", question=method.__name__)
            raise

    return ask


Keeper.acquire = pestered(Keeper.acquire)  # type: ignore[method-assign]
Keeper.release = pestered(Keeper.release)  # type: ignore[method-assign]

"""What a process is called, whether it runs more than one body at a time, and what ends it."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = [
    "application_name",
    "name_this_process",
    "serve_one_at_a_time",
    "serves_one_at_a_time",
    "signals_put_off",
]

_name = socket.gethostname()
_one_at_a_time = False


def name_this_process(name: str) -> None:
    """Say what ``pg_stat_activity.application_name`` shows, together with the process id."""
    global _name
    _name = name


def application_name() -> str:
    # PostgreSQL cuts it at 63 bytes: the process id must not be what is lost. What is not ASCII it shows as a
    # question mark or, since 16, as four characters for each byte.
    pid = str(os.getpid())
    name = _name.encode("ascii", "replace").decode()
    return f"pglock {name[: 55 - len(pid)]} {pid}"


def serve_one_at_a_time() -> None:
    """Let whoever asks talk to the session himself: in a process that runs one body at a time."""
    global _one_at_a_time
    _one_at_a_time = True


def serves_one_at_a_time() -> bool:
    return _one_at_a_time


@contextmanager
def signals_put_off(told: Callable[[], object] = bool) -> Iterator[None]:
    """Put off what ends a process until a piece of work of its main thread is done. ``told`` hears of it."""
    came: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    ours = [signum for signum, handler in handlers.items() if callable(handler)]

    def put_off(signum: int, _: object) -> None:
        came.append(signum)
        told()

    try:
        for signum in ours:
            signal.signal(signum, put_off)
        yield
    finally:
        for signum in ours:
            signal.signal(signum, handlers[signum])
        if came:
            signal.raise_signal(came[0])

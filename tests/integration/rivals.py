"""Others who want the same lock: threads, forked processes, and what the server knows of those who wait."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

from celery_pglock import LockId
from integration.judge import Judge, eventually

T = TypeVar("T")

WAITING = """
    SELECT classid::bigint, objid::bigint, objsubid, pid FROM pg_locks
    WHERE locktype = 'advisory' AND NOT granted AND database = %s ORDER BY waitstart
"""


def waiting(judge: Judge, id: LockId | None = None) -> list[int]:
    """The server processes that wait for a lock, or for one id, the first of them first."""
    rows = judge.observer.execute(WAITING, [judge.database]).fetchall()
    return [pid for *row, pid in rows if id is None or judge.id(*row) == id]


def wait_until_waiting(judge: Judge, number: int, id: LockId | None = None) -> list[int]:
    eventually(lambda: len(waiting(judge, id)) == number, f"there are no {number} waiters")
    return waiting(judge, id)


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Run a function in a thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as exc:  # noqa: BLE001 - told by the future
            future.set_exception(exc)

    threading.Thread(target=run, daemon=True).start()
    return future


class Stopped(BaseException):
    """What interrupts a test's own code."""


class interrupted_after:  # noqa: N801 - reads as a context manager does
    """Interrupt the block, in the main thread, as a soft time limit does; it must not end by itself.

    A class, since contextlib's generator of Python 3.13 keeps what it swallows in a cycle, and with the
    traceback the locks of the interrupted block.
    """

    def __init__(self, seconds: float, *, again: float = 0.2) -> None:
        self.seconds, self.again = seconds, again

    def __enter__(self) -> None:
        self.previous = signal.signal(signal.SIGALRM, self.stop)
        self.told, sys.unraisablehook = sys.unraisablehook, self.tell
        # Once more where the first one was lost: Python drops what is raised inside of a `__del__`.
        signal.setitimer(signal.ITIMER_REAL, self.seconds, self.again)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.previous)
        sys.unraisablehook = self.told
        assert kind is not None, "it ended before it was interrupted: nothing was tested"
        return kind is Stopped

    def stop(self, number: int, frame: FrameType | None) -> None:
        raise Stopped

    def tell(self, unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is not Stopped:
            self.told(unraisable)


def forked(function: Callable[[], Any]) -> int:
    """Run a function in a forked child and return the child's id; its status is 0 if all went well."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        function()
        status = 0
    except BaseException:  # noqa: BLE001 - shown by the child, told by its status
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def descriptors() -> set[str]:
    """The descriptors that this process has open."""
    return {f"{fd.name} {fd.readlink()}" for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}

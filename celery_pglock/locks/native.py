"""Calls that block a thread of the operating system, where ``threading`` makes greenlets of one hub.

Whether a library has patched it is asked without importing that library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["is_patched_by", "native_caller", "native_poll"]


def is_patched_by(library: str) -> bool:
    """Whether ``threading`` makes greenlets of this library, in place of threads."""
    if library == "gevent":
        monkey = sys.modules.get("gevent.monkey")
        return monkey is not None and monkey.is_module_patched("threading")
    patcher = sys.modules.get("eventlet.patcher")
    return patcher is not None and patcher.is_monkey_patched("thread")


def native_caller() -> tuple[Callable[[Callable[[], Any]], Any], Callable[[], Any]]:
    """A way to call what blocks a thread of the operating system for long, without blocking a hub.

    The second function gives back what the first one needs.
    """
    if is_patched_by("gevent"):
        from gevent.threadpool import ThreadPool  # noqa: TID251 - only where it runs already

        # One of its own: the hub's has few threads, which resolve names for all.
        pool = ThreadPool(1)
        return pool.apply, pool.kill
    if is_patched_by("eventlet"):
        import eventlet.tpool  # noqa: TID251 - only where it runs already

        return eventlet.tpool.execute, lambda: None
    return lambda function: function(), lambda: None


def native_poll() -> Any:
    """A poll object of the operating system. The patched ones miss the end of a connection."""
    if is_patched_by("gevent"):
        import gevent.monkey  # noqa: TID251 - only where it runs already

        return gevent.monkey.get_original("select", "poll")()
    if is_patched_by("eventlet"):
        import eventlet.patcher  # noqa: TID251 - only where it runs already

        return eventlet.patcher.original("select").poll()
    import select

    return select.poll()

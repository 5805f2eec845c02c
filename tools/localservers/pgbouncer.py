"""A PgBouncer in front of a PostgreSQL server of this package; it comes from the system's packages only."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from .postgres import PostgreSQL
from .process import LOOPBACK, MissingServer, Server, answers


class PgBouncer(Server):
    """A pooler for all databases of the server; further settings are those of its `[pgbouncer]` section."""

    program = "pgbouncer"
    refuses_root = True

    def __init__(
        self,
        postgres: PostgreSQL,
        pool_mode: str = "transaction",
        default_pool_size: int = 20,
        port: int | None = None,
        **settings: object,
    ) -> None:
        self.binary = find_binary()
        super().__init__(port)
        self.postgres = postgres
        self.settings = {
            "pool_mode": pool_mode,
            "default_pool_size": default_pool_size,
            "listen_addr": LOOPBACK,
            "listen_port": self.port,
            "unix_socket_dir": self.folder,
            "auth_type": "any",  # whoever asks is let in, to the console too
            **settings,
        }

    def url(self, dbname: str = "postgres") -> str:
        """Return the URL of a database behind the pooler; `pgbouncer` is its own console."""
        return f"postgresql://postgres@{LOOPBACK}:{self.port}/{dbname}"

    @property
    def _file(self) -> Path:
        return self.folder / "pgbouncer.ini"

    def _prepare(self) -> None:
        settings = [f"{name} = {value}\n" for name, value in self.settings.items()]
        databases = f"[databases]\n* = host={LOOPBACK} port={self.postgres.port} user=postgres\n"
        self._file.write_text(databases + "[pgbouncer]\n" + "".join(settings))

    def _command(self) -> Sequence[str | Path]:
        return [self.binary, self._file]

    def _is_ready(self) -> bool:
        return answers(self.port)


def find_binary() -> Path:
    """Return the pooler's file; raise MissingServer where there is none."""
    # Debian keeps it where the PATH of a plain user does not look.
    for path in (None, "/usr/sbin"):
        if found := shutil.which("pgbouncer", path=path):
            return Path(found)
    raise MissingServer("no PgBouncer: install pgbouncer from the system's packages")

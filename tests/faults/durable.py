"""A Redis whose messages outlive a restart, and which a Unix socket reaches where no network does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from localservers import Redis


class DurableRedis(Redis):
    """It writes each change down before it answers."""

    def socket_url(self, db: int = 0) -> str:
        return f"redis+socket://{self.folder / 'socket'}?virtual_host={db}"

    def _command(self) -> Sequence[str | Path]:
        kept = ["--appendonly", "yes", "--appendfsync", "always", "--dir", self.folder]
        command = list(super()._command())
        # What its parent says last is what counts.
        command[command.index("--appendonly") : command.index("--appendonly") + 2] = kept
        return [*command, "--unixsocket", self.folder / "socket"]

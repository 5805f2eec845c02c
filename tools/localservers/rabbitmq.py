"""A RabbitMQ broker with a name server (epmd) of its own; it comes from the system's packages only."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from .process import LOOPBACK, MissingServer, Server, answers, end, free_port


class RabbitMQ(Server):
    """A broker without plugins, with the user guest; about ten seconds until it serves."""

    program = "rabbitmq"
    start_timeout = 120.0

    def __init__(self, port: int | None = None) -> None:
        self.scripts, self.epmd = find_scripts()
        super().__init__(port)
        self._epmd_port = free_port()
        self._distribution_port = free_port()
        self._epmd: subprocess.Popen[bytes] | None = None

    def url(self) -> str:
        return f"amqp://guest:guest@{LOOPBACK}:{self.port}//"

    def stop(self) -> None:
        super().stop()
        if self._epmd is not None:
            end(self._epmd, signal.SIGTERM, self.stop_timeout)

    def close_all_connections(self, reason: str) -> None:
        """Close the connection of every client from the broker's side."""
        self._run([self.scripts / "rabbitmqctl", "close_all_connections", reason])

    def _prepare(self) -> None:
        (self.folder / "enabled_plugins").write_text("[].\n")
        (self.folder / "rabbitmq.conf").write_text(f"listeners.tcp.1 = {LOOPBACK}:{self.port}\n")
        # The broker would start one by itself, as a daemon that outlives everybody.
        self._epmd = self._spawn([self.epmd, "-address", LOOPBACK])

    def _command(self) -> Sequence[str | Path]:
        return [self.scripts / "rabbitmq-server"]

    def _environment(self) -> Mapping[str, str]:
        return {
            "HOME": str(self.folder),  # of the cookie that the broker and its control command share
            "ERL_EPMD_PORT": str(self._epmd_port),
            "RABBITMQ_NODENAME": f"pglock{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "rabbitmq-env.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.folder / "logs"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(self.folder / "generated"),
            # Makes the script become the broker instead of waiting for it, so that signals reach the broker.
            "RABBITMQ_ALLOW_INPUT": "1",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-noinput",
        }

    def _is_ready(self) -> bool:
        return answers(self.port, b"AMQP\x00\x00\x09\x01", b"\x01")


def find_scripts() -> tuple[Path, Path]:
    """Return the folder of the broker's scripts and the file of epmd; raise MissingServer without them."""
    # Debian's /usr/sbin/rabbitmq-server turns into the user rabbitmq; these scripts run as whoever calls.
    debian = Path("/usr/lib/rabbitmq/bin")
    on_path = shutil.which("rabbitmq-server")
    scripts = debian if debian.exists() else Path(on_path).resolve().parent if on_path else None
    epmd = shutil.which("epmd")
    if scripts is None or epmd is None:
        raise MissingServer("no RabbitMQ: install rabbitmq-server from the system's packages")
    return scripts, Path(epmd)

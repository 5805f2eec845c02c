"""Network namespaces with real links between them, which can be cut without either end hearing of it.

A namespace lives as long as a `cat` that waits in it for the end of its input, so nothing is left behind
whatever becomes of the test. Root makes them directly; everybody else inside a user namespace, where the
kernel allows that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from localservers import MissingServer, PostgreSQL

#: The environment's word for the process whose network namespace a worker moves into.
NETNS = "FLEET_NETNS"

ROOT = os.geteuid() == 0


class Namespace:
    """One network namespace. Raises `MissingServer` where the machine allows none."""

    def __init__(self, beside: Namespace | None = None) -> None:
        """Make one; without root it has to lie ``beside`` the first, under the same user namespace."""
        for program in ("ip", "iptables", "unshare", "nsenter", "setpriv"):
            if shutil.which(program) is None and not Path("/usr/sbin", program).exists():
                raise MissingServer(f"no network namespaces: {program} is missing (iproute2, iptables)")
        user = [] if ROOT or beside else ["--user", "--map-root-user"]
        inside = [] if ROOT or beside is None else beside.prefix
        self._pin = subprocess.Popen(
            [*inside, "unshare", *user, "--net", "sh", "-c", "echo here; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._pin.stdout is not None
        if self._pin.stdout.readline() != b"here\n":
            _, reason = self._pin.communicate()
            raise MissingServer(f"no network namespaces: {reason.decode().strip()}")
        self.pid = self._pin.pid
        self.run("ip", "link", "set", "lo", "up")

    @property
    def prefix(self) -> list[str]:
        """What a command begins with that runs inside."""
        user = [] if ROOT else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self.pid), "--net", *user]

    def run(self, *command: str) -> None:
        # A plain user has neither the folder on his path nor the right to the lock of everybody's iptables.
        env = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
        if not ROOT:
            env["XTABLES_LOCKFILE"] = str(Path(tempfile.gettempdir(), f"xtables-{os.geteuid()}.lock"))
        done = subprocess.run([*self.prefix, *command], capture_output=True, text=True, check=False, env=env)
        if done.returncode:
            raise MissingServer(f"no network namespaces: {' '.join(command)}: {done.stderr.strip()}")

    def close(self) -> None:
        self._pin.communicate()


class Link:
    """A cable between a server's namespace and a client's of its own."""

    def __init__(self, server: Namespace, number: int) -> None:
        self._server, self.client = server, Namespace(server)
        self._device = f"link{number}"
        self.server_address, self.client_address = f"10.83.{number}.1", f"10.83.{number}.2"
        peer = ["peer", "name", "eth0", "netns", str(self.client.pid)]
        server.run("ip", "link", "add", self._device, "type", "veth", *peer)
        server.run("ip", "addr", "add", f"{self.server_address}/24", "dev", self._device)
        server.run("ip", "link", "set", self._device, "up")
        self.client.run("ip", "addr", "add", f"{self.client_address}/24", "dev", "eth0")
        self.client.run("ip", "link", "set", "eth0", "up")

    def cut(self, how: str) -> None:
        """Let packets vanish: a wrong hardware address on both sides, or dropped ones at the client's."""
        if how == "both, neighbours":
            self._neighbours("replace", "lladdr", "02:00:00:00:00:99", "nud", "permanent")
        else:
            for chain in CUTS[how]:
                self.client.run("iptables", "-w", "-I", chain, "-i" if chain == "INPUT" else "-o", "eth0",
                                "-j", "DROP")  # fmt: skip

    def heal(self, how: str) -> None:
        """Take `cut` back."""
        if how == "both, neighbours":
            self._neighbours("del")
        else:
            for chain in CUTS[how]:
                self.client.run("iptables", "-w", "-F", chain)

    def _neighbours(self, verb: str, *options: str) -> None:
        self._server.run("ip", "neigh", verb, self.client_address, *options[:2], "dev", self._device,
                         *options[2:])  # fmt: skip
        self.client.run("ip", "neigh", verb, self.server_address, *options[:2], "dev", "eth0", *options[2:])


CUTS: dict[str, Sequence[str]] = {
    "both, neighbours": (),
    "both, dropped": ("INPUT", "OUTPUT"),
    "to the server": ("OUTPUT",),
    "to the client": ("INPUT",),
}


class FarPostgreSQL(PostgreSQL):
    """A server inside a namespace. Its Unix socket is reached from everywhere: files are not divided."""

    def __init__(self, namespace: Namespace) -> None:
        super().__init__({"listen_addresses": "*"})
        if "user" in self._identity:
            raise MissingServer("no user namespaces, which a server that refuses root needs here")
        self._inside = namespace
        self._is_prepared = False

    def _prepare(self) -> None:
        super()._prepare()
        self._is_prepared = True

    def _command(self) -> Sequence[str | Path]:
        # Outside of it, it would be root to the server. Its death signal does not outlive that step.
        own_user = ["unshare", "--user", "setpriv", "--pdeathsig", "INT"]
        return [*self._inside.prefix, *own_user, *super()._command()]

    def _in_child(self, parent: int) -> None:
        # The server leaves root by its command: from a user namespace made here it could not enter another.
        if not self._is_prepared:
            super()._in_child(parent)


@contextmanager
def links(count: int) -> Iterator[tuple[Namespace, list[Link]]]:
    """A server's namespace and the links of so many clients."""
    server = Namespace()
    made: list[Link] = []
    try:
        for number in range(1, count + 1):
            made.append(Link(server, number))  # noqa: PERF401 - those that were made are unmade
        yield server, made
    finally:
        for link in made:
            link.client.close()
        server.close()

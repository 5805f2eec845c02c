"""The servers of the test suite keep their own promises: above all, that nothing outlives its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psycopg
import pytest

import localservers
from localservers import PgBouncer, PostgreSQL, Redis

OWNER = """
import time
from localservers import {name}
server = {name}()
server.start()
print(server.pid, server.folder, flush=True)
time.sleep(60)
"""


def owner_of(name: str) -> tuple[subprocess.Popen[str], int, Path]:
    """Start a process that owns a server; return it with the server's process id and folder."""
    environment = {**os.environ, "PYTHONPATH": str(Path(localservers.__file__).parent.parent)}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(name=name)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert owner.stdout is not None
    pid, folder = owner.stdout.readline().split(maxsplit=1)
    return owner, int(pid), Path(folder.strip())


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def await_end(pid: int) -> None:
    deadline = time.monotonic() + 10
    while not is_gone(pid):
        assert time.monotonic() < deadline, f"process {pid} outlives its owner"
        time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
@pytest.mark.parametrize("name", ["PostgreSQL", "Redis"])
def test_a_server_dies_with_its_killed_owner(name: str) -> None:
    owner, pid, folder = owner_of(name)
    with owner:
        owner.kill()
    await_end(pid)
    subprocess.run(["rm", "-r", folder], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_leaves_the_server_to_its_owner_who_leaves_nothing() -> None:
    owner, pid, folder = owner_of("Redis")
    with owner:
        assert os.getpgid(pid) != os.getpgid(owner.pid)
        os.killpg(owner.pid, signal.SIGINT)
    await_end(pid)
    assert not folder.exists()


def test_a_server_can_not_be_started_by_a_thread_that_may_end_before_it() -> None:
    server = Redis()
    errors: list[BaseException] = []

    def start() -> None:
        try:
            server.start()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    server.close()
    assert "main thread" in str(errors)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_data_and_port_outlive_a_restart(
    own_postgres: PostgreSQL, mode: localservers.postgres.StopMode
) -> None:
    url = own_postgres.url()
    own_postgres.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    own_postgres.restart(mode)
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT answer FROM kept").fetchall() == [(42,)]


def test_a_frozen_server_is_stopped_all_the_same(own_postgres: PostgreSQL) -> None:
    os.kill(own_postgres.pid, signal.SIGSTOP)
    own_postgres.stop()
    assert not own_postgres.running


def test_a_standby_follows_and_takes_over(own_postgres: PostgreSQL) -> None:
    with own_postgres.standby() as standby:
        assert standby.execute("SELECT pg_is_in_recovery()") == [(True,)]
        own_postgres.stop("immediate")
        standby.promote()
        assert standby.execute("SELECT pg_is_in_recovery()") == [(False,)]


def test_the_pooler_reaches_the_database_of_a_test(pgbouncer: PgBouncer, dbname: str) -> None:
    with psycopg.connect(pgbouncer.url(dbname)) as connection:
        assert connection.execute("SELECT current_database()").fetchall() == [(dbname,)]


def test_the_file_named_by_the_environment_must_be_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PGLOCK_POSTGRES_BIN", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="PGLOCK_POSTGRES_BIN"):
        PostgreSQL()

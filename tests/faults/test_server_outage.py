"""PostgreSQL is not named, not there, or there again: nothing runs unlocked, and nothing is lost."""

from __future__ import annotations

import contextlib

import psycopg
import pytest

from faults.conftest import FleetMaker
from faults.fleet import Fleet, wait_for
from localservers import PostgreSQL

WAITING = "tasks wait until it can be"


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_worker_without_a_database_does_not_start(make_fleet: FleetMaker, pool: str) -> None:
    """Two workers in two databases would not exclude each other: the worker ends and tells why."""
    worker = make_fleet(dsn=None).worker(pool, 1, ready=False)
    assert worker.wait_ended() != 0
    assert "pglock_database_url" in worker.text()
    assert "CELERY_PGLOCK_DATABASE_URL" in worker.text()


def test_worker_takes_the_database_from_the_environment(make_fleet: FleetMaker, dsn: str) -> None:
    """``CELERY_PGLOCK_DATABASE_URL`` serves where no setting names a database."""
    fleet = make_fleet(dsn=None)
    fleet.worker("solo", env={"CELERY_PGLOCK_DATABASE_URL": dsn})
    assert fleet.send("raises", "a").get(timeout=10) == "a"


@pytest.fixture
def outage_fleet(make_fleet: FleetMaker, own_postgres: PostgreSQL) -> Fleet:
    return make_fleet(dsn=own_postgres.url())


@pytest.mark.parametrize("task", ["skip", "late_retry"])
def test_tasks_wait_for_a_server_that_is_down_at_the_start(
    outage_fleet: Fleet, own_postgres: PostgreSQL, task: str
) -> None:
    """Workers start, no body runs, and all run when the server is up: "could not ask" is no conflict."""
    fleet = outage_fleet
    own_postgres.stop()
    fleet.worker("prefork", 2)
    fleet.worker("threads", 2)
    names = [f"name {number}" for number in range(10)]
    results = [fleet.send(task, name) for name in names]
    # Each is received a second time: each was tried, and put off.
    fleet.wait(lambda: len(fleet.history.events("received")) >= 20, "ten messages that came back")
    assert not fleet.history.runs()
    fleet.logged(WAITING)
    own_postgres.start()
    assert [result.get(timeout=60) for result in results] == names
    assert len(fleet.history.runs()) == 10


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_tasks_wait_for_a_server_that_goes_down(
    outage_fleet: Fleet, own_postgres: PostgreSQL, mode: str
) -> None:
    """The same for a server that stops or crashes between two tasks: one warning, no traceback."""
    fleet = outage_fleet
    worker = fleet.worker("prefork", 2)
    assert fleet.send("skip", "before").get(timeout=10) == "before"
    own_postgres.stop(mode)
    names = [f"name {number}" for number in range(20)]
    results = [fleet.send("skip", name) for name in names]
    fleet.wait(lambda: len(fleet.history.events("received")) >= 41, "twenty messages that came back")
    assert len(fleet.history.runs()) == 1
    assert "Traceback" not in worker.text()
    own_postgres.start()
    assert [result.get(timeout=60) for result in results] == names
    assert len(fleet.history.runs()) == 21


@pytest.mark.smoke
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_server_restart_between_two_tasks_costs_nothing(
    outage_fleet: Fleet, own_postgres: PostgreSQL, pool: str
) -> None:
    """The stale session is replaced before anything counts as a failure: no retry, no warning."""
    fleet = outage_fleet
    fleet.worker(pool, 2)
    for turn in range(3):
        names = [f"{turn} {number}" for number in range(4)]
        results = [fleet.send("raises", name) for name in names]
        assert [result.get(timeout=10) for result in results] == names
        own_postgres.restart("immediate" if turn else "fast")
    assert len(fleet.history.events("received")) == 12, "a message came back"


def test_database_that_is_full_puts_tasks_off(make_fleet: FleetMaker, own_postgres: PostgreSQL) -> None:
    """No connection to be had (53300): tasks wait, and run when there is one."""
    own_postgres.stop()
    own_postgres.config |= {
        "max_connections": "5",
        "superuser_reserved_connections": "0",
        "max_wal_senders": "0",
    }
    own_postgres.start()
    fleet = make_fleet(dsn=own_postgres.url())
    fleet.worker("prefork", 1)
    with contextlib.ExitStack() as hogs:
        for _ in range(5):
            hogs.enter_context(psycopg.connect(own_postgres.url()))
        result = fleet.send("skip", "a")
        fleet.logged(WAITING)
        assert not fleet.history.runs()
    assert result.get(timeout=30) == "a"
    wait_for(lambda: len(fleet.history.runs()) == 1, "one body")

"""Every pool: bodies of one process exclude each other, on one connection, and never block each other."""

from __future__ import annotations

import os

import psycopg
import pytest

from faults.conftest import FleetMaker
from faults.fleet import Fleet
from faults.judge import holders, sessions, wait_no_locks
from faults.proxy import Proxy
from localservers import PostgreSQL

EVENTLET = {"PSYCOPG_WAIT_FUNC": "wait_selector"}


def rush(fleet: Fleet, pool: str) -> None:
    """Let thirty messages of three names meet in one process."""
    fleet.worker(pool, 10)
    results = [fleet.send("skip", f"name {number % 3}", 0.05) for number in range(30)]
    for result in results:
        result.get(timeout=20)


@pytest.mark.smoke
@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_bodies_of_one_process_exclude_each_other(fleet: Fleet, pool: str) -> None:
    """Two threads or greenlets share a session, which would grant a lock twice: they are told apart."""
    rush(fleet, pool)
    runs = fleet.history.runs()
    assert len({run.pid for run in runs}) == 1
    assert len({run.thread for run in runs}) > 1, "one body at a time anyway: nothing was tested"
    assert not fleet.history.overlaps()


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_bodies_of_one_process_overlap_without_locks(make_fleet: FleetMaker, pool: str) -> None:
    """The control."""
    fleet = make_fleet(pglock_enabled=False)
    rush(fleet, pool)
    assert len(fleet.history.runs()) == 30
    assert fleet.history.overlaps()


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_thirty_names_are_held_on_one_connection(
    fleet: Fleet, observer: psycopg.Connection, pool: str
) -> None:
    """One session of a process carries all it holds, whatever its concurrency."""
    worker = fleet.worker(pool, 30)
    names = [f"name {number}" for number in range(30)]
    results = [fleet.send("skip", name, gate="end") for name in names]
    for name in names:
        fleet.running(name)
    assert sessions(observer) == [worker.pid]
    backends = {pid for name in names for pid in holders(observer, name)}
    assert len(backends) == 1
    assert all(holders(observer, name) for name in names)
    fleet.open("end")
    assert [result.get(timeout=20) for result in results] == names
    wait_no_locks(observer)


def test_prefork_has_one_session_for_each_child(fleet: Fleet, observer: psycopg.Connection) -> None:
    """A child opens its session with its first locked task; the main process has none."""
    worker = fleet.worker("prefork", 3)
    assert sessions(observer) == []
    names = ["a", "b", "c"]
    for name in names:
        fleet.send("skip", name, gate="end")
    children = {fleet.running(name).pid for name in names}
    assert sorted(sessions(observer)) == sorted(children)
    assert worker.pid not in children
    fleet.open("end")


def test_solo_has_one_session(fleet: Fleet, observer: psycopg.Connection) -> None:
    """The one process of solo runs the bodies itself."""
    worker = fleet.worker("solo")
    assert fleet.send("skip", "a").get(timeout=10) == "a"
    assert sessions(observer) == [worker.pid]


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_fifty_tries_at_a_far_server_take_one_round_trip(
    make_fleet: FleetMaker, postgres: PostgreSQL, dbname: str, pool: str
) -> None:
    """At 100 ms latency fifty tasks that come together are under their locks well within two seconds.

    One after the other they would take five.
    """
    with Proxy(postgres.port) as proxy:
        proxy.delay(0.05)
        far = make_fleet(dsn=f"postgresql://postgres@127.0.0.1:{proxy.port}/{dbname}")
        far.worker(pool, 50)
        far.send("skip", "the first, which connects").get(timeout=20)
        for number in range(50):
            far.send("skip", f"name {number}", gate="end")
        far.wait(lambda: len(far.history.runs()) == 51, "fifty bodies")
        received = [event["at"] for event in far.history.events("received")][1]
        started = max(run.started for run in far.history.runs())
        far.open("end")
        far.wait(far.drained, "an empty queue")
        far.close()
    assert started - received < 2.0
    assert not far.history.overlaps()


def test_eventlet_works_with_psycopgs_python_wait(fleet: Fleet) -> None:
    """With ``PSYCOPG_WAIT_FUNC=wait_selector`` greenlets of eventlet exclude each other too."""
    fleet.worker("eventlet", 10, env=EVENTLET)
    results = [fleet.send("skip", f"name {number % 3}", 0.05) for number in range(30)]
    for result in results:
        result.get(timeout=20)
    assert len({run.thread for run in fleet.history.runs()}) > 1
    assert not fleet.history.overlaps()


def test_eventlet_without_it_does_not_start(fleet: Fleet) -> None:
    """Psycopg's compiled wait would block the whole worker: it says what to set, and ends."""
    assert "PSYCOPG_WAIT_FUNC" not in os.environ
    worker = fleet.worker("eventlet", 10, ready=False)
    assert worker.wait_ended() != 0
    assert "PSYCOPG_WAIT_FUNC=wait_selector" in worker.text()

"""An interrupt in the middle of acquire or release, in real workers: no lock leaks, and no other is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator

import psycopg
import pytest

from celery_pglock import is_skipped
from faults.conftest import FleetMaker
from faults.fleet import Fleet
from faults.judge import holders, locks, wait_no_locks
from faults.pools import MixedFleet, mixed_fleet
from localservers import PostgreSQL

#: Messages for each pool, and the bodies' names.
MESSAGES = 300
SIZES = {"prefork": 2, "threads": 4, "gevent": 8, "solo": 1}


@pytest.fixture(scope="module")
def mixed(postgres: PostgreSQL, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MixedFleet]:
    folder = tmp_path_factory.mktemp("pest")
    with mixed_fleet(folder, postgres, SIZES, app="faults.pest") as mixed:
        yield mixed


@pytest.mark.parametrize("pool", SIZES)
def test_interrupted_question_leaks_no_lock(mixed: MixedFleet, pool: str) -> None:
    """Hundreds of times in each pool; beside it another body of the same process keeps its lock."""
    before = len(mixed.fleet.history.events("pest"))
    steady = None
    if pool != "solo":
        steady = mixed.send(pool, "lost_abort", f"steady {pool}", "steps", 60.0)
        mixed.fleet.running(f"steady {pool}")
        (backend,) = holders(mixed.observer, f"steady {pool}")
    names = [f"p {pool} {number}" for number in range(3)]
    sent = [mixed.send(pool, "skip", random.choice(names)) for _ in range(MESSAGES)]
    ids = [result.id for result in sent]
    mixed.fleet.wait(lambda: len(mixed.fleet.results(ids)) == MESSAGES, f"{pool}: all results", 60)
    outcomes: Counter[str] = Counter()
    for stored in mixed.fleet.results(ids).values():
        result = stored["result"]
        if stored["status"] == "SUCCESS":
            assert result in names or is_skipped(result)
            outcomes["skipped" if is_skipped(result) else "done"] += 1
        else:
            # Psycopg takes what arrives while it reads its timeout for a bad value. The task is sent again.
            swallowed = "connect_timeout" in str(result["exc_message"])
            assert result["exc_type"] == "Pest" or swallowed, result
            outcomes["swallowed" if swallowed else "interrupted"] += 1
    pests = Counter(event["question"] for event in mixed.fleet.history.events("pest")[before:])
    print(f"{pool:8} {dict(outcomes)}, interrupts that arrived: {dict(pests)}")
    # They come at random: so many at least that something was tested.
    assert min(pests["acquire"], pests["release"]) >= MESSAGES // 100
    kept = 0 if steady is None else 2  # its name and its identity
    mixed.fleet.wait(lambda: locks(mixed.observer) == kept, f"{pool}: only the steady body's locks", 3)
    if steady is not None:
        assert holders(mixed.observer, f"steady {pool}") == [backend], "an interrupt cost another its lock"
        os.kill(mixed.fleet.running(f"steady {pool}").pid, 0)
        mixed.observer.execute("SELECT pg_terminate_backend(%s)", [backend])
        steady.get(timeout=10, propagate=False)
    assert not mixed.fleet.history.overlaps()
    wait_no_locks(mixed.observer)


def test_signals_to_children_at_random_moments_leak_no_lock(
    make_fleet: FleetMaker, observer: psycopg.Connection
) -> None:
    """Soft limits, SIGTERM, SIGINT and revoked tasks: what was sent is done, and nothing is held."""
    fleet = make_fleet()
    worker = fleet.worker("prefork", 3)
    names = [f"n{number}" for number in range(5)]
    sent = [fleet.send("late_retry", random.choice(names)) for _ in range(150)]
    ids = [result.id for result in sent]
    struck: Counter[str] = Counter()
    revoked: set[str] = set()
    until = time.monotonic() + 6.0
    while time.monotonic() < until and len(done(fleet, ids)) < len(ids):
        time.sleep(random.uniform(0.0, 0.1))
        how = random.choice(("SIGUSR1", "SIGUSR1", "SIGTERM", "SIGINT", "revoke"))
        children = worker.children()
        if how == "revoke":
            running = [id for id in ids if id not in done(fleet, ids)]
            if running:
                revoked.add(running[0])
                fleet.app.control.revoke(running[0], terminate=True)
        elif children:
            os.kill(random.choice(children), getattr(signal, how))
        struck[how] += 1
    fleet.wait(lambda: len(done(fleet, ids)) == len(ids), "all results", 60)
    print(f"{dict(struck)}, {Counter(stored['status'] for stored in fleet.results(ids).values())}")
    assert not fleet.history.overlaps()
    wait_no_locks(observer)
    for name in names:
        assert fleet.send("raises", name).get(timeout=20) == name


def done(fleet: Fleet, ids: list[str]) -> set[str]:
    stored = fleet.results(ids)
    return {id for id, each in stored.items() if each["status"] in ("SUCCESS", "FAILURE", "REVOKED")}


@pytest.mark.parametrize("signals", [["SIGTERM"], ["SIGINT", "SIGINT"]])
def test_signals_to_a_solo_worker_leak_no_lock(
    make_fleet: FleetMaker, observer: psycopg.Connection, signals: list[str]
) -> None:
    """Its one thread is stopped wherever it is; nothing is held by what is left, and the names are free."""
    fleet = make_fleet()
    for _ in range(2):
        worker = fleet.worker("solo")
        for number in range(60):
            fleet.send("late_retry", f"n{number % 5}")
        started = len(fleet.history.runs())
        fleet.wait(lambda started=started: len(fleet.history.runs()) > started, "a body")
        time.sleep(random.uniform(0.0, 0.2))
        for name in signals:
            worker.signal(getattr(signal, name))
            time.sleep(random.uniform(0.0, 0.02))
        worker.wait_ended()
        wait_no_locks(observer)
    assert not fleet.history.overlaps()

"""A lock that is lost is noticed, and what ran under it is stopped, by losses that really happen."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest
from celery.result import AsyncResult

from celery_pglock import LockLost
from faults.conftest import FleetMaker
from faults.fleet import Fleet, Worker
from faults.history import Run
from faults.judge import holders, wait_no_locks
from localservers import PostgreSQL

POOLS = {"prefork": 4, "gevent": 4, "threads": 4, "solo": 1}

#: What a body may be doing, where it can be stopped.
KINDS = {
    "prefork": ("sleep", "sql", "child", "swallow", "stubborn", "check"),
    "solo": ("sleep", "sql", "child", "swallow", "stubborn", "check"),
    "gevent": ("sleep", "sql", "child", "swallow", "stubborn", "check"),
    "threads": ("steps", "swallow", "stubborn", "check"),
}

#: Seconds: the promise, and what a busy machine may add to the median of a few.
NOTICED, ROOM = 0.1, 0.15


def start_pools(fleet: Fleet) -> dict[str, Worker]:
    """One worker of each pool, each with a queue of its own."""
    workers = {
        pool: fleet.worker(pool, concurrency, "-Q", pool, app="faults.bodies", ready=False)
        for pool, concurrency in POOLS.items()
    }
    for worker in workers.values():
        worker.wait_ready(60)
    return workers


def lose(observer: psycopg.Connection, name: str) -> None:
    """End the session that holds a name."""
    (backend,) = holders(observer, name)
    observer.execute("SELECT pg_terminate_backend(%s)", [backend])


def batches(kinds: tuple[str, ...], size: int) -> Iterator[tuple[str, ...]]:
    for first in range(0, len(kinds), size):
        yield kinds[first : first + size]


@pytest.mark.parametrize("pool", POOLS)
def test_body_is_stopped_when_its_lock_is_lost(fleet: Fleet, observer: psycopg.Connection, pool: str) -> None:
    """Whatever it is doing: the task fails with LockLost, once said, and the worker goes on."""
    worker = fleet.worker(pool, POOLS[pool], app="faults.bodies")
    kinds = KINDS[pool]
    for batch in batches(kinds, POOLS[pool]):
        results = [fleet.send("lost_abort", kind, kind) for kind in batch]
        for kind in batch:
            fleet.running(kind)
        struck = time.monotonic()
        for kind in batch:
            # The holds of one process go together.
            if holders(observer, kind):
                lose(observer, kind)
        for kind, result in zip(batch, results, strict=True):
            error = result.get(timeout=10, propagate=False)
            assert isinstance(error, LockLost), f"{kind}: {error!r}"
            (run,) = fleet.history.runs(kind)
            assert run.ended is not None
            print(f"{pool:8} {kind:9} stopped after {1000 * (run.ended - struck):6.1f} ms")
            assert run.ended - struck < (2.0 if kind == "stubborn" else 1.0)
    for kind in kinds:
        assert fleet.send("raises", kind).get(timeout=10) == kind
    assert worker.text().count("was lost after") == len(kinds)
    assert sorted(event["name"] for event in fleet.history.events("lost")) == sorted(
        f"celery:shop:{kind}" for kind in kinds
    )
    assert not fleet.history.overlaps()
    wait_no_locks(observer)


@pytest.mark.parametrize("pool", POOLS)
def test_body_has_time_to_tidy_up(fleet: Fleet, observer: psycopg.Connection, pool: str) -> None:
    """It is interrupted again and again, but four times a second at most."""
    fleet.worker(pool, POOLS[pool], app="faults.bodies")
    result = fleet.send("lost_abort", "a", "stubborn")
    fleet.running("a")
    lose(observer, "a")
    assert isinstance(result.get(timeout=10, propagate=False), LockLost)
    thrown = [event["at"] for event in fleet.history.events("thrown")]
    assert len(thrown) == 3
    assert min(later - earlier for earlier, later in itertools.pairwise(thrown)) > 0.2


@pytest.mark.parametrize("pool", POOLS)
def test_body_that_wants_to_is_published_again(fleet: Fleet, observer: psycopg.Connection, pool: str) -> None:
    """``lock_on_lost="retry"``: it is stopped, and the same task runs once more."""
    worker = fleet.worker(pool, POOLS[pool], app="faults.bodies")
    result = fleet.send("lost_retry", "a")
    fleet.running("a")
    lose(observer, "a")
    assert result.get(timeout=10) == "done"
    first, second = fleet.history.runs("a", task_id=result.id)
    assert first.ended is not None
    assert first.ended < second.started
    assert worker.text().count("was lost after") == 1
    assert len(fleet.history.events("lost")) == 1


@pytest.mark.parametrize("pool", POOLS)
def test_body_that_wants_to_goes_on(fleet: Fleet, observer: psycopg.Connection, pool: str) -> None:
    """``lock_on_lost="continue"``, the control of the interrupt: the body is told, and its result stays."""
    worker = fleet.worker(pool, POOLS[pool], app="faults.bodies")
    result = fleet.send("lost_continue", "a", "until_lost")
    fleet.running("a")
    lose(observer, "a")
    assert result.get(timeout=10) == "done"
    assert [event["lost"] for event in fleet.history.events("told")] == [True]
    assert worker.text().count("was lost after") == 1
    assert len(fleet.history.events("lost")) == 1


def test_end_of_another_session_stops_nobody(fleet: Fleet, observer: psycopg.Connection) -> None:
    """Of two bodies in two processes only the one stops whose lock is gone."""
    fleet.worker("prefork", 2, app="faults.bodies")
    lost, kept = fleet.send("lost_abort", "a"), fleet.send("lost_abort", "b", "steps", 3.0)
    fleet.running("a")
    fleet.running("b")
    lose(observer, "a")
    assert isinstance(lost.get(timeout=10, propagate=False), LockLost)
    assert kept.get(timeout=10) == "done"


Strike = Callable[[PostgreSQL], float]


def terminate(server: PostgreSQL) -> float:
    """End the sessions and nothing else."""
    at = time.monotonic()
    server.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'pglock %'"
    )
    return at


def restart(server: PostgreSQL) -> float:
    at = time.monotonic()
    server.restart("fast")
    return at


def crash(server: PostgreSQL) -> float:
    at = time.monotonic()
    server.restart("immediate")
    return at


def ended(fleet: Fleet, names: list[str]) -> list[Run]:
    runs = [run for run in fleet.history.runs() if run.name in names]
    return runs if len(runs) == len(names) and all(run.ended for run in runs) else []


@pytest.mark.parametrize("strike", [terminate, restart, crash])
def test_loss_is_noticed_within_a_tenth_of_a_second(
    make_fleet: FleetMaker, own_postgres: PostgreSQL, strike: Strike
) -> None:
    """The end of the server's side of the connection, in all pools at once, three times."""
    fleet = make_fleet(dsn=own_postgres.url())
    workers = start_pools(fleet)
    noticed: dict[str, list[float]] = {pool: [] for pool in POOLS}
    for round_ in range(3):
        names = {f"{pool} {round_} {number}": pool for pool, size in POOLS.items() for number in range(size)}
        sent: list[AsyncResult[object]] = [
            fleet.signature("lost_abort", name).apply_async(queue=pool) for name, pool in names.items()
        ]
        for name in names:
            fleet.running(name)
        at = strike(own_postgres)
        for run in fleet.wait(lambda names=names: ended(fleet, list(names)), "the end of all bodies", 10):
            assert run.ended is not None
            noticed[names[run.name]].append(run.ended - at)
        for result in sent:
            assert isinstance(result.get(timeout=10, propagate=False), LockLost)
    for pool, seconds in noticed.items():
        figures = f"median {1000 * statistics.median(seconds):5.1f} ms, longest {1000 * max(seconds):5.1f} ms"
        print(f"{strike.__name__:9} {pool:8} noticed after: {figures}")
    for pool, seconds in noticed.items():
        assert statistics.median(seconds) < NOTICED + ROOM, f"{strike.__name__}, {pool}: {sorted(seconds)}"
    for pool in workers:
        assert fleet.signature("lost_abort", "next", "steps", 0.0).apply_async(queue=pool).get(timeout=20)

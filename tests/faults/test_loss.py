"""A lock that is lost is noticed, and what ran under it is stopped, by losses that really happen."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest

from celery_pglock import LockLost
from faults.fleet import Fleet
from faults.history import Run
from faults.judge import holders, take, wait_no_locks, waiting
from faults.pools import POOLS, MixedFleet, mixed_fleet
from localservers import PostgreSQL

#: What a body may be doing, where it can be stopped.
EVERYTHING = ("sleep", "sql", "child", "swallow", "stubborn", "check")
KINDS = {
    "prefork": EVERYTHING,
    "gevent": EVERYTHING,
    "threads": ("steps", "swallow", "stubborn", "check"),
    "solo": EVERYTHING,
}

#: Seconds: the promise, and what a busy machine may add to the median of a few.
NOTICED, ROOM = 0.1, 0.15


@pytest.fixture(scope="module")
def mixed(postgres: PostgreSQL, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MixedFleet]:
    with mixed_fleet(tmp_path_factory.mktemp("loss"), postgres) as mixed:
        yield mixed


def lose(observer: psycopg.Connection, *names: str) -> None:
    """End the sessions that hold these names. The holds of one process go together."""
    backends = {backend for name in names for backend in holders(observer, name)}
    assert backends, f"nobody holds {names}"
    for backend in backends:
        observer.execute("SELECT pg_terminate_backend(%s)", [backend])


def batches(kinds: tuple[str, ...], size: int) -> Iterator[tuple[str, ...]]:
    for first in range(0, len(kinds), size):
        yield kinds[first : first + size]


def told(mixed: MixedFleet, pool: str, name: str) -> tuple[int, int]:
    """How often the loss of a name was logged, and how often it was signalled."""
    lock = f"celery:shop:{name}"
    logged = mixed.workers[pool].text().count(f"lock {lock!r} was lost after")
    return logged, sum(event["name"] == lock for event in mixed.fleet.history.events("lost"))


@pytest.mark.parametrize("pool", POOLS)
def test_body_is_stopped_when_its_lock_is_lost(mixed: MixedFleet, pool: str) -> None:
    """Whatever it is doing: the task fails with LockLost, once said, and the worker goes on."""
    names = {f"{pool} {kind}": kind for kind in KINDS[pool]}
    for batch in batches(tuple(names), POOLS[pool]):
        results = [mixed.send(pool, "lost_abort", name, names[name]) for name in batch]
        for name in batch:
            mixed.fleet.running(name)
        struck = time.monotonic()
        lose(mixed.observer, *batch)
        for name, result in zip(batch, results, strict=True):
            error = result.get(timeout=10, propagate=False)
            assert isinstance(error, LockLost), f"{name}: {error!r}"
            (run,) = mixed.fleet.history.runs(name)
            assert run.ended is not None
            print(f"{name:18} stopped after {1000 * (run.ended - struck):6.1f} ms")
            assert run.ended - struck < (2.0 if names[name] == "stubborn" else 1.0)
    for name in names:
        assert mixed.send(pool, "raises", name).get(timeout=10) == name
        assert told(mixed, pool, name) == (1, 1)
    assert not mixed.fleet.history.overlaps()
    wait_no_locks(mixed.observer)


@pytest.mark.parametrize("pool", POOLS)
def test_body_in_a_transaction_ends_with_the_loss(mixed: MixedFleet, pool: str) -> None:
    """Inside of a statement the driver's error may come first: it is the loss all the same."""
    names = {f"{pool} {how} {number}": how for how in ("statement", "check") for number in range(4)}
    for batch in batches(tuple(names), POOLS[pool]):
        results = [mixed.send(pool, "lost_in_transaction", name, names[name]) for name in batch]
        for name in batch:
            mixed.fleet.running(name)
        time.sleep(0.1)  # into the statement
        lose(mixed.observer, *batch)
        for name, result in zip(batch, results, strict=True):
            error = result.get(timeout=10, propagate=False)
            assert isinstance(error, LockLost), f"{name}: {error!r}"
            assert told(mixed, pool, name) == (1, 1)
    wait_no_locks(mixed.observer)


@pytest.mark.parametrize("pool", POOLS)
def test_body_has_time_to_tidy_up(mixed: MixedFleet, pool: str) -> None:
    """It is interrupted again and again, but four times a second at most."""
    name = f"{pool} tidies up"
    result = mixed.send(pool, "lost_abort", name, "stubborn")
    mixed.fleet.running(name)
    lose(mixed.observer, name)
    assert isinstance(result.get(timeout=10, propagate=False), LockLost)
    events = mixed.fleet.history.events("thrown")
    thrown = [event["at"] for event in events if event["name"] == f"celery:shop:{name}"]
    assert len(thrown) == 3
    assert min(later - earlier for earlier, later in itertools.pairwise(thrown)) > 0.2


@pytest.mark.parametrize("pool", POOLS)
def test_body_that_wants_to_is_published_again(mixed: MixedFleet, pool: str) -> None:
    """``lock_on_lost="retry"``: it is stopped, and the same task runs once more."""
    name = f"{pool} again"
    result = mixed.send(pool, "lost_retry", name)
    mixed.fleet.running(name)
    lose(mixed.observer, name)
    # The copy is published into the default queue, as a retry is that names none.
    assert result.get(timeout=10) == "done"
    first, second = mixed.fleet.history.runs(name, task_id=result.id)
    assert first.ended is not None
    assert first.ended < second.started
    assert told(mixed, pool, name) == (1, 1)


def test_body_with_a_successor_has_no_second_one(mixed: MixedFleet) -> None:
    """What it has published in its own place is what runs after the loss."""
    name = "a successor"
    result = mixed.send("prefork", "lost_retry", name, "retried")
    mixed.fleet.running(name)
    lose(mixed.observer, name)
    mixed.fleet.wait(lambda: len(mixed.fleet.history.runs(name)) > 1, "its successor")
    # A second one would wait for its time in a worker.
    mixed.fleet.wait(mixed.fleet.drained, "no message left")
    assert len(mixed.fleet.history.runs(name, task_id=result.id)) == 2


def test_copy_is_no_second_delivery_of_what_still_ends(mixed: MixedFleet) -> None:
    """It may arrive before the end of the execution that published it is told to everybody."""
    name = "unhurried"
    take(mixed.observer, name)
    result = mixed.send("threads", "unhurried", name)
    # What it waits on is another session than the one that has its identity.
    mixed.fleet.wait(lambda: waiting(mixed.observer), "the queue")
    mixed.observer.execute("SELECT pg_advisory_unlock_all()")
    first = mixed.fleet.running(name)
    lose(mixed.observer, name)
    mixed.fleet.wait(lambda: mixed.fleet.history.events("on_retry"), "the end of the first")
    second = mixed.fleet.running(name, after=first.started)
    assert second.ended is None
    mixed.fleet.open("end")
    assert result.get(timeout=20) == "done"


@pytest.mark.parametrize("pool", POOLS)
def test_body_that_wants_to_goes_on(mixed: MixedFleet, pool: str) -> None:
    """``lock_on_lost="continue"``, the control of the interrupt: the body is told, and its result stays."""
    name = f"{pool} goes on"
    result = mixed.send(pool, "lost_continue", name, "until_lost")
    mixed.fleet.running(name)
    lose(mixed.observer, name)
    assert result.get(timeout=10) == "done"
    (event,) = [
        event for event in mixed.fleet.history.events("told") if event["name"] == f"celery:shop:{name}"
    ]
    assert event["lost"]
    assert told(mixed, pool, name) == (1, 1)


def test_end_of_another_session_stops_nobody(mixed: MixedFleet) -> None:
    """Of two bodies in two processes only the one stops whose lock is gone."""
    lost = mixed.send("prefork", "lost_abort", "mine")
    kept = mixed.send("prefork", "lost_abort", "another's", "steps", 2.0)
    mixed.fleet.running("mine")
    mixed.fleet.running("another's")
    lose(mixed.observer, "mine")
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


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[PostgreSQL, MixedFleet]]:
    """A fleet whose server may be struck."""
    with PostgreSQL() as server, mixed_fleet(tmp_path_factory.mktemp("mortal"), server) as mixed:
        yield server, mixed


@pytest.mark.parametrize("strike", [terminate, restart, crash])
def test_loss_is_noticed_within_a_tenth_of_a_second(
    mortal: tuple[PostgreSQL, MixedFleet], strike: Strike
) -> None:
    """The end of the server's side of the connection, in all pools at once, three times."""
    server, mixed = mortal
    noticed: dict[str, list[float]] = {pool: [] for pool in POOLS}
    for round_ in range(3):
        names = {
            f"{strike.__name__} {pool} {round_} {number}": pool
            for pool, size in POOLS.items()
            for number in range(size)
        }
        sent = [mixed.send(pool, "lost_abort", name) for name, pool in names.items()]
        for name in names:
            mixed.fleet.running(name)
        at = strike(server)
        runs = mixed.fleet.wait(
            lambda names=names: ended(mixed.fleet, list(names)), "the end of all bodies", 10
        )
        for run in runs:
            assert run.ended is not None
            noticed[names[run.name]].append(run.ended - at)
        for result in sent:
            assert isinstance(result.get(timeout=10, propagate=False), LockLost)
    for pool, seconds in noticed.items():
        figures = f"median {1000 * statistics.median(seconds):5.1f} ms, longest {1000 * max(seconds):5.1f} ms"
        print(f"{strike.__name__:9} {pool:8} noticed after: {figures}")
    for pool, seconds in noticed.items():
        assert statistics.median(seconds) < NOTICED + ROOM, f"{strike.__name__}, {pool}: {sorted(seconds)}"
    for pool in POOLS:
        assert mixed.send(pool, "lost_abort", f"next {pool}", "steps", 0.0).get(timeout=20) == "done"

"""Silence that no keepalive reveals: a proxy that stops to forward, and a process that is frozen."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from celery_pglock import LockLost
from faults.judge import holders, wait_free, wait_no_locks
from faults.pools import MixedFleet, mixed_fleet
from faults.proxy import Proxy
from localservers import PostgreSQL

POOLS = {"prefork": 2, "threads": 2, "gevent": 50, "solo": 1}

#: The least that the package accepts, in seconds.
LOSS_TIMEOUT = 3.0

#: What a busy machine may add.
ROOM = 0.5


@pytest.fixture(scope="module")
def proxy(postgres: PostgreSQL) -> Iterator[Proxy]:
    with Proxy(postgres.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def mixed(
    proxy: Proxy, postgres: PostgreSQL, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MixedFleet]:
    """A fleet that reaches the server through the proxy alone."""
    folder = tmp_path_factory.mktemp("proxy")
    with mixed_fleet(folder, postgres, POOLS, port=proxy.port, pglock_loss_timeout=LOSS_TIMEOUT) as mixed:
        yield mixed


@pytest.fixture(autouse=True)
def _flowing(proxy: Proxy) -> Iterator[None]:
    yield
    proxy.delay(0.0)
    proxy.resume()


def test_holder_notices_a_proxy_that_stops_to_forward(mixed: MixedFleet, proxy: Proxy) -> None:
    """In every pool the body is stopped, while the server still keeps its name."""
    results = {pool: mixed.send(pool, "lost_abort", pool) for pool in POOLS}
    for pool in POOLS:
        mixed.fleet.running(pool)
    at = time.monotonic()
    proxy.stall()
    for pool, result in results.items():
        assert isinstance(result.get(timeout=10, propagate=False), LockLost)
        (run,) = mixed.fleet.history.runs(pool)
        assert run.ended is not None
        print(f"{pool:8} noticed after {run.ended - at:.2f} s of {LOSS_TIMEOUT:g} s")
        assert run.ended - at < LOSS_TIMEOUT + ROOM
        assert holders(mixed.observer, pool), "its name was free before the proxy went on"
    proxy.resume()
    wait_no_locks(mixed.observer, 5.0)
    for pool in POOLS:
        assert mixed.send(pool, "raises", pool).get(timeout=20) == pool


def test_holder_keeps_its_name_through_a_short_stall(mixed: MixedFleet, proxy: Proxy) -> None:
    """The control: less than the silence that counts stops nobody."""
    results = {pool: mixed.send(pool, "lost_abort", f"{pool} stays", "steps", 3.0) for pool in POOLS}
    for pool in POOLS:
        mixed.fleet.running(f"{pool} stays")
    for _ in range(2):
        proxy.stall()
        time.sleep(LOSS_TIMEOUT / 6)
        proxy.resume()
        time.sleep(0.5)
        assert all(holders(mixed.observer, f"{pool} stays") for pool in POOLS)
    for result in results.values():
        assert result.get(timeout=10) == "done"


def test_question_without_an_answer_is_bounded(mixed: MixedFleet, proxy: Proxy) -> None:
    """An acquire that meets the silence is no conflict: it is asked again, and runs when it is over."""
    for pool in POOLS:
        assert mixed.send(pool, "raises", f"{pool} before").get(timeout=10)
    proxy.stall()
    at = time.monotonic()
    results = {pool: mixed.send(pool, "raises", f"{pool} asks") for pool in POOLS}
    took = {}
    for pool, result in results.items():
        mixed.fleet.wait(lambda result=result: result.state == "RETRY", f"{pool}: no answer", 20)
        took[pool] = time.monotonic() - at
        print(f"{pool:8} an acquire was given up after {took[pool]:.2f} s")
    proxy.resume()
    for pool, result in results.items():
        assert result.get(timeout=20) == f"{pool} asks"
        assert " is held by " not in mixed.workers[pool].text()
    wait_no_locks(mixed.observer, 5.0)
    assert max(took.values()) < LOSS_TIMEOUT + ROOM


def test_release_without_an_answer_is_bounded(mixed: MixedFleet, proxy: Proxy) -> None:
    """Nobody knows whether the name was still held at the end of the body: the lock counts as lost."""
    results = {pool: mixed.send(pool, "skip", f"{pool} ends", gate="end") for pool in POOLS}
    for pool in POOLS:
        mixed.fleet.running(f"{pool} ends")
    proxy.stall()
    at = time.monotonic()
    mixed.fleet.open("end")
    for pool, result in results.items():
        error = result.get(timeout=4 * LOSS_TIMEOUT, propagate=False)
        print(f"{pool:8} a release was given up after {time.monotonic() - at:.2f} s")
        assert isinstance(error, LockLost)
        assert time.monotonic() - at < LOSS_TIMEOUT + ROOM
    proxy.resume()
    for pool in POOLS:
        wait_free(mixed.observer, f"{pool} ends", 5.0)
        assert mixed.send(pool, "raises", f"{pool} ends").get(timeout=20)


def test_many_questions_over_a_slow_link_go_together(mixed: MixedFleet, proxy: Proxy) -> None:
    """Fifty greenlets that ask at a distance of 200 ms wait for a few round trips, not for fifty."""
    mixed.send("gevent", "skip", "first").get(timeout=10)
    proxy.delay(0.1)
    at = time.monotonic()
    names = [f"n{number}" for number in range(50)]
    results = [mixed.send("gevent", "raises", name) for name in names]
    assert [result.get(timeout=20) for result in results] == names
    took = max(run.started for run in mixed.fleet.history.runs() if run.name in names) - at
    print(f"50 acquires at 200 ms took {took:.2f} s")
    assert took < 2.5
    wait_no_locks(mixed.observer)


def test_frozen_holder_keeps_its_name(mixed: MixedFleet) -> None:
    """Its kernel still answers for it, and nothing is lost when it wakes."""
    result = mixed.send("prefork", "lost_abort", "frozen", "steps", 5.0)
    holder = mixed.fleet.running("frozen")
    os.kill(holder.pid, signal.SIGSTOP)
    try:
        until = time.monotonic() + 1.5 * LOSS_TIMEOUT
        while time.monotonic() < until:
            assert holders(mixed.observer, "frozen")
            time.sleep(0.05)
    finally:
        os.kill(holder.pid, signal.SIGCONT)
    assert result.get(timeout=20) == "done"


@pytest.fixture(scope="module")
def short_tempered(postgres: PostgreSQL, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MixedFleet]:
    """A fleet whose frozen workers lose their locks."""
    folder, sizes = tmp_path_factory.mktemp("frozen"), {"prefork": 1, "threads": 1, "gevent": 1}
    with mixed_fleet(folder, postgres, sizes, pglock_freeze_timeout=3.0) as mixed:
        yield mixed


def test_frozen_holder_loses_its_name_where_that_is_wanted(short_tempered: MixedFleet) -> None:
    """``pglock_freeze_timeout``: the server ends its session, and its body learns of it as it wakes."""
    mixed = short_tempered
    results = {pool: mixed.send(pool, "lost_abort", pool) for pool in mixed.sizes}
    frozen = {pool: mixed.fleet.running(pool).pid for pool in mixed.sizes}
    # What is awake keeps it.
    until = time.monotonic() + 4.0
    while time.monotonic() < until:
        assert all(holders(mixed.observer, pool) for pool in mixed.sizes)
        time.sleep(0.05)
    at = time.monotonic()
    for pid in frozen.values():
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_no_locks(mixed.observer, 3.0 + ROOM)
        print(f"all free {time.monotonic() - at:.2f} s after they were frozen")
    finally:
        woken = time.monotonic()
        for pid in frozen.values():
            os.kill(pid, signal.SIGCONT)
    for pool, result in results.items():
        assert isinstance(result.get(timeout=10, propagate=False), LockLost)
        (run,) = mixed.fleet.history.runs(pool)
        assert run.ended is not None
        print(f"{pool:8} stopped {1000 * (run.ended - woken):.0f} ms after it woke")
        assert run.ended - woken < ROOM

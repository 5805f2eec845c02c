"""Readers run together, a writer runs alone, and a stream of readers starves no writer."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from celery import Celery

from celery_pglock import AdvisoryLockedTask, LockId, LockNotAcquired, advisory_lock
from celery_pglock.locks.hold import Hold
from celery_pglock.locks.keeper import Keeper
from celery_pglock.locks.requests import Answer
from integration.judge import Judge, eventually
from integration.rivals import in_thread, wait_until_waiting

ID = LockId(41)

NewKeeper = Callable[..., Keeper]

pytestmark = pytest.mark.usefixtures("way")


def granted(keeper: Keeper, *, shared: bool = True) -> Hold | None:
    hold = Hold(ID, shared=shared)
    answer = keeper.acquire(hold).answer
    assert answer in (Answer.GRANTED, Answer.CONFLICT)
    return hold if answer is Answer.GRANTED else None


def test_another_thread_may_look_at_the_readers_who_come_and_go(
    new_keeper: NewKeeper,
) -> None:
    """Who gives a session up does: a loss that stopped halfway would leave readers that count as holding."""
    keeper, stopped = new_keeper(), threading.Event()

    def come_and_go() -> None:
        while not stopped.is_set():
            keeper.release(granted(keeper))

    keeper.release(granted(keeper))
    interval = sys.getswitchinterval()
    readers = [threading.Thread(target=come_and_go) for _ in range(2)]
    try:
        sys.setswitchinterval(1e-6)
        for reader in readers:
            reader.start()
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            assert keeper._session.idle in {True, False}
    finally:
        sys.setswitchinterval(interval)
        stopped.set()
        for reader in readers:
            reader.join()


@pytest.mark.parametrize("processes", [1, 3])
def test_readers_share_and_a_writer_does_not(new_keeper: NewKeeper, judge: Judge, processes: int) -> None:
    """In one session, where locks stack, and in several; the name is free with the last reader."""
    keepers = [new_keeper() for _ in range(processes)]
    readers = [(keepers[n % processes], granted(keepers[n % processes])) for n in range(6)]
    assert all(hold for _, hold in readers)
    random.shuffle(readers)
    while readers:
        for keeper in keepers:
            assert granted(keeper, shared=False) is None
        assert judge.held() == {ID}
        keeper, hold = readers.pop()
        keeper.release(hold)
        assert hold.status is Hold.Status.RELEASED
    assert judge.held() == set()
    for keeper in keepers:
        writer = granted(keeper, shared=False)
        assert writer is not None
        for other in keepers:
            assert granted(other) is None
            assert granted(other, shared=False) is None
        keeper.release(writer)
    assert judge.held() == set()


def test_a_reader_that_is_released_twice_costs_no_other(keeper: Keeper, judge: Judge) -> None:
    """Each counts once."""
    first, second = granted(keeper), granted(keeper)
    keeper.release(first)
    keeper.release(first)
    keeper.release_soon(first)
    time.sleep(0.3)
    assert judge.held() == {ID}
    assert granted(keeper, shared=False) is None
    keeper.release(second)
    assert judge.held() == set()


def test_readers_and_writers_in_one_batch(keeper: Keeper, judge: Judge, way: str) -> None:
    """Many that ask and release at the same moment: never a reader beside a writer."""
    inside = {"readers": 0, "writers": 0}
    guard, wrong = threading.Lock(), []
    entries: list[bool] = []
    until = time.monotonic() + 1.5

    def press(shared: bool) -> None:
        kind = "readers" if shared else "writers"
        while time.monotonic() < until:
            hold = granted(keeper, shared=shared)
            if hold is None:
                time.sleep(random.uniform(0, 0.001))
                continue
            with guard:
                inside[kind] += 1
                if inside["writers"] > 1 or (inside["writers"] and inside["readers"]):
                    wrong.append(dict(inside))
                entries.append(shared)
            time.sleep(random.uniform(0, 0.0005))
            with guard:
                inside[kind] -= 1
            if random.random() < 0.5:
                keeper.release(hold)
            else:
                keeper.release_soon(hold)

    for future in [in_thread(lambda shared=n % 3 > 0: press(shared)) for n in range(9)]:
        future.result(timeout=30)
    assert wrong == []
    assert {True, False} == set(entries)
    eventually(lambda: not judge.held(), "a lock is left", within=2)


def stream(dsn: str, stop: threading.Event, started: list[float]) -> None:
    """Read again and again, so that there is never a moment without a reader."""
    while not stop.is_set():
        with suppress(LockNotAcquired), advisory_lock(ID, mode="shared", database_url=dsn):
            started.append(time.monotonic())
            time.sleep(0.05)
        time.sleep(0.001)


def test_a_stream_of_readers_starves_no_writer_that_waits(dsn: str, judge: Judge, way: str) -> None:
    """Readers of one process share its session, which has the lock already: none gets past the writer."""
    stop, started = threading.Event(), []
    readers = [in_thread(lambda: stream(dsn, stop, started)) for _ in range(1)]
    for _ in range(5):
        time.sleep(0.01)
        readers.append(in_thread(lambda: stream(dsn, stop, started)))
    try:
        eventually(lambda: len(started) > 20, "readers")

        def write() -> float:
            since = time.monotonic()
            with advisory_lock(ID, 10, database_url=dsn):
                inside = time.monotonic()
                time.sleep(0.1)
                assert not [each for each in started if each > inside], "a reader beside the writer"
            return inside - since

        if way == "owner":
            assert in_thread(write).result(timeout=20) < 1
        else:
            # There one process waits on its one session: the writer is another process.
            judge.observer.execute("SET lock_timeout = '5s'")
            since = time.monotonic()
            judge.observer.execute("SELECT pg_advisory_lock(41)")
            assert time.monotonic() - since < 1
            judge.give_back()
            judge.observer.execute("RESET lock_timeout")
    finally:
        stop.set()
        for reader in readers:
            reader.result(timeout=20)


def test_a_stream_of_readers_starves_a_writer_that_only_tries(dsn: str, judge: Judge) -> None:
    """The control: this stream has no gap."""
    stop, started = threading.Event(), []
    readers = []
    for _ in range(6):
        readers.append(in_thread(lambda: stream(dsn, stop, started)))
        time.sleep(0.01)
    try:
        eventually(lambda: len(started) > 20, "readers")
        for _ in range(30):
            assert not judge.take(ID)
            time.sleep(0.02)
    finally:
        stop.set()
        for reader in readers:
            reader.result(timeout=20)


def test_a_reader_that_waits_comes_behind_a_writer_that_waits(
    new_keeper: NewKeeper, judge: Judge, dsn: str, way: str
) -> None:
    """First come, first served, for both."""
    reader = new_keeper()
    hold = granted(reader)
    order: list[str] = []

    def wait(keeper: Keeper, name: str, shared: bool) -> None:
        waited = Hold(ID, shared=shared)
        holder = keeper.waiter()
        asked = holder.wait(waited, 20)
        assert asked.answer is Answer.GRANTED
        order.append(name)
        holder.release(waited)

    keepers = new_keeper(), new_keeper()
    writer = in_thread(lambda: wait(keepers[0], "writer", shared=False))
    wait_until_waiting(judge, 1)
    late = in_thread(lambda: wait(keepers[1], "reader", shared=True))
    wait_until_waiting(judge, 2)
    reader.release(hold)
    writer.result(timeout=20)
    late.result(timeout=20)
    assert order == ["writer", "reader"]


def test_tasks_share_and_exclude_under_one_name(app: Celery, judge: Judge) -> None:
    """Two tasks of one name, one that reads and one that writes."""
    options: dict[str, Any] = {"base": AdvisoryLockedTask, "shared": False, "lock_name": "n", "lock_key": []}

    @app.task(name="read", lock_mode="shared", **options)
    def read() -> str:
        return "read"

    @app.task(name="write", lock_on_conflict="raise", **options)
    def write() -> str:
        return "written"

    app.finalize()
    with advisory_lock("n", mode="shared", app=app):
        assert in_thread(read.apply).result(timeout=20).result == "read"
        assert isinstance(in_thread(write.apply).result(timeout=20).result, LockNotAcquired)
    assert write.apply().result == "written"
    with advisory_lock("n", app=app):
        assert in_thread(read.apply).result(timeout=20).result["pglock"] == "skipped"

"""Whatever ends a worker, its names are free within a second, its work is done, and no two bodies overlap."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import celery
import psycopg
import pytest
from celery.result import AsyncResult

from faults.durable import DurableRedis
from faults.fleet import Fleet, Worker, alive
from faults.history import Run
from faults.judge import holders, sessions, wait_free, wait_no_locks
from localservers import PostgreSQL

POOLS = ("prefork", "threads", "gevent")


@dataclass
class Scene:
    """A worker with a body under way in late acknowledgment."""

    fleet: Fleet
    worker: Worker
    holder: Run
    result: AsyncResult[str]


Ending = Callable[[Scene], None]


class Ward:
    """A fleet whose broker survives a restart, and a worker that takes over a queue when it is told to."""

    def __init__(self, fleet: Fleet, redis: DurableRedis, observer: psycopg.Connection) -> None:
        self.fleet, self.redis, self.observer = fleet, redis, observer
        # What was not acknowledged can be delivered again at once.
        fleet.app.conf.broker_transport_options = {"visibility_timeout": 0.01}
        self.rescuer = fleet.worker("prefork", 2, "-Q", "rescue")

    def rescue(self, queue: str, runs: int) -> None:
        """Let the rescuer serve a queue, and wait until bodies have run so often in all."""
        replies = self.fleet.app.control.add_consumer(
            queue, destination=[f"{self.rescuer.name}@fleet"], reply=True, timeout=10
        )
        assert replies
        deadline = time.monotonic() + 15
        while len(self.fleet.history.runs(queue)) < runs:
            assert time.monotonic() < deadline, f"{self.rescuer.text()[-3000:]}"
            self.fleet.redeliver()
            time.sleep(0.1)


@pytest.fixture(scope="module")
def ward(postgres: PostgreSQL, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ward]:
    dbname = f"test_{uuid.uuid4().hex[:12]}"
    postgres.execute(f"CREATE DATABASE {dbname}")
    dsn = postgres.url(dbname)
    with DurableRedis() as redis, psycopg.connect(dsn, autocommit=True) as observer:
        fleet = Fleet(tmp_path_factory.mktemp("ward"), redis.url(0), redis.url(1), dsn)
        try:
            yield Ward(fleet, redis, observer)
        finally:
            fleet.close()
    postgres.execute(f"DROP DATABASE {dbname} WITH (FORCE)")


def kill_child(scene: Scene) -> None:
    """As the kernel does that has no memory left."""
    os.kill(scene.holder.pid, signal.SIGKILL)


def kill_main(scene: Scene) -> None:
    """Leave the children alone, which live on for a moment."""
    os.kill(scene.worker.pid, signal.SIGKILL)


def cold(scene: Scene) -> None:
    """SIGQUIT: the bodies are not waited for."""
    scene.worker.signal(signal.SIGQUIT)


def ctrl_c_twice(scene: Scene) -> None:
    scene.worker.signal(signal.SIGINT)
    scene.fleet.wait(lambda: "Warm shutdown" in scene.worker.text(), "the answer to Ctrl-C")
    scene.worker.signal(signal.SIGINT)


def terminate_child(scene: Scene) -> None:
    os.kill(scene.holder.pid, signal.SIGTERM)


CASES = [
    ("prefork", kill_child),
    ("prefork", kill_main),
    ("prefork", cold),
    ("prefork", ctrl_c_twice),
    ("prefork", terminate_child),
    ("threads", kill_main),
    ("gevent", kill_main),
]


@pytest.mark.parametrize(("pool", "end"), CASES)
def test_work_goes_on_after_an_ending(ward: Ward, pool: str, end: Ending) -> None:
    """The name is free within a second of the holder's end, and its message runs again elsewhere."""
    queue = name = f"{pool} {end.__name__}"
    scene = begin(ward, pool, queue)
    (backend,) = holders(ward.observer, name)
    end(scene)
    until_freed(ward, scene.holder, backend, queue)
    ward.rescue(queue, runs=2)
    ward.fleet.open(name)
    assert scene.result.get(timeout=20) == name
    assert not ward.fleet.history.overlaps()
    wait_no_locks(ward.observer, 5.0)


@pytest.mark.parametrize("pool", ["gevent", "solo"])
def test_cold_shutdown_frees_the_name(ward: Ward, pool: str) -> None:
    """Without processes to end, Celery itself loses the message here: the name is free all the same."""
    queue = name = f"{pool} cold"
    scene = begin(ward, pool, queue)
    (backend,) = holders(ward.observer, name)
    cold(scene)
    until_freed(ward, scene.holder, backend, queue)
    scene.worker.wait_ended()
    wait_no_locks(ward.observer)


def begin(ward: Ward, pool: str, queue: str) -> Scene:
    """Let a new worker of its own run a body, in late acknowledgment."""
    worker = ward.fleet.worker(pool, 2, "-Q", queue)
    result = ward.fleet.signature("late_retry", queue, gate=queue).apply_async(queue=queue)
    return Scene(ward.fleet, worker, ward.fleet.running(queue), result)


def until_freed(ward: Ward, holder: Run, backend: int, what: str) -> None:
    """Wait for the end of a body; one second later its session holds nothing."""
    ward.fleet.wait(
        lambda: not alive(holder.pid) or any(run.ended for run in ward.fleet.history.runs(what)), "the end"
    )
    ended = time.monotonic()
    statement = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND pid = %s"
    while ward.observer.execute(statement, [backend]).fetchone():
        assert time.monotonic() < ended + 1.0, "the name is held one second after its holder's end"
        time.sleep(0.005)
    print(f"{what:24} free {1000 * (time.monotonic() - ended):3.0f} ms after the end")


@pytest.mark.parametrize("pool", POOLS)
def test_warm_shutdown_ends_the_body_under_its_lock(
    fleet: Fleet, observer: psycopg.Connection, pool: str
) -> None:
    """SIGTERM: the body ends, holds its name until then, and leaves no session behind."""
    worker = fleet.worker(pool, 2)
    result = fleet.send("late_skip", "a", gate="end")
    fleet.running("a")
    worker.signal(signal.SIGTERM)
    fleet.wait(lambda: "shutdown" in worker.text().lower(), "the shutdown")
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        assert holders(observer, "a")
        time.sleep(0.02)
    fleet.open("end")
    assert worker.wait_ended() == 0
    wait_no_locks(observer)
    fleet.wait(lambda: not sessions(observer), "the end of all sessions", 1.0)
    assert result.get(timeout=5) == "a"


@pytest.mark.skipif(celery.VERSION < (5, 5), reason="Celery has a soft shutdown since 5.5")
def test_soft_shutdown_frees_the_name_with_the_end_of_the_body(ward: Ward) -> None:
    """SIGQUIT with ``worker_soft_shutdown_timeout``: the body has some seconds, and is cut off then."""
    queue = name = "soft shutdown"
    worker = ward.fleet.worker("prefork", 1, "-Q", queue, worker_soft_shutdown_timeout=1.0)
    result = ward.fleet.signature("late_retry", name, gate=name).apply_async(queue=queue)
    holder = ward.fleet.running(name)
    worker.signal(signal.SIGQUIT)
    until = time.monotonic() + 0.8
    while time.monotonic() < until:
        assert holders(ward.observer, name)
        time.sleep(0.02)
    worker.wait_ended()
    assert not alive(holder.pid)
    wait_free(ward.observer, name)
    ward.rescue(queue, runs=2)
    ward.fleet.open(name)
    assert result.get(timeout=20) == name
    assert not ward.fleet.history.overlaps()


def test_recycled_children_leave_nothing_behind(fleet: Fleet, observer: psycopg.Connection) -> None:
    """``worker_max_tasks_per_child``: thirty tasks, and a new child for each second of them."""
    fleet.worker("prefork", 2, worker_max_tasks_per_child=2)
    results = [fleet.send("late_retry", f"n{number % 10}") for number in range(30)]
    most = 0
    while not all(result.ready() for result in results):
        most = max(most, len(sessions(observer)))
        time.sleep(0.02)
    assert [result.get(timeout=10) for result in results] == [f"n{number % 10}" for number in range(30)]
    assert len({run.pid for run in fleet.history.runs()}) >= 12
    assert most <= 3, f"{most} sessions of two children"
    assert not fleet.history.overlaps()
    wait_no_locks(observer)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_restart_of_the_broker_costs_no_lock(ward: Ward, pool: str) -> None:
    """The body goes on and keeps its name; its message, delivered a second time, waits for it."""
    name = f"{pool} without broker"
    scene = begin(ward, pool, name)
    ward.redis.stop()
    assert holders(ward.observer, name)
    ward.redis.start()
    ward.fleet.redeliver()
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        assert holders(ward.observer, name)
        time.sleep(0.05)
    ward.fleet.open(name)
    assert scene.result.get(timeout=20) == name
    assert not ward.fleet.history.overlaps()
    wait_no_locks(ward.observer, 10.0)

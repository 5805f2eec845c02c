"""When sessions open and close: on first use, in the process that runs bodies, and politely."""

from __future__ import annotations

import os
import signal
import time

import celery
import psycopg
import pytest

from faults.fleet import Fleet, wait_for
from faults.judge import holders, sessions, take, wait_free, wait_no_locks
from localservers import PostgreSQL

#: What PostgreSQL logs of clients that do not behave.
RUDE = (
    "unexpected EOF",
    "Connection reset",
    "could not receive",
    "connection to client lost",
    "ERROR:",
    "FATAL:",
)

SOFT_SHUTDOWN = tuple(map(int, celery.__version__.split(".")[:2])) >= (5, 5)


@pytest.fixture
def server_log(postgres: PostgreSQL):
    """A function that returns what the server logged since the test began."""
    began = len(postgres.log.read_bytes())
    return lambda: postgres.log.read_bytes()[began:].decode(errors="replace")


def rude_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if any(word in line for word in RUDE)]


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_sessions_open_on_first_use_and_close_with_a_warm_shutdown(
    fleet: Fleet, observer: psycopg.Connection, server_log, pool: str
) -> None:
    """An idle worker has no session, one that stops leaves none, and the server has nothing to say of it.

    A body that runs meanwhile ends under its lock.
    """
    worker = fleet.worker(pool, 2)
    assert sessions(observer) == []
    assert fleet.send("skip", "before").get(timeout=10) == "before"
    assert len(sessions(observer)) == 1
    fleet.send("skip", "a", gate="end")
    fleet.running("a")
    worker.signal(signal.SIGTERM)
    fleet.logged("Warm shutdown")
    assert holders(observer, "a")
    fleet.open("end")
    assert worker.wait_ended() == 0
    wait_for(lambda: sessions(observer) == [], "no session left", 2)
    assert [run.ended is not None for run in fleet.history.runs("a")] == [True]
    assert not rude_lines(server_log())


@pytest.mark.parametrize("pool", ["prefork", "gevent", "solo"])
def test_cold_shutdown_frees_the_name(fleet: Fleet, observer: psycopg.Connection, pool: str) -> None:
    """A cold shutdown stops the body: the name is free within a second of the end of the worker."""
    worker = fleet.worker(pool, 2)
    fleet.send("skip", "a", gate="end")
    fleet.running("a")
    worker.signal(signal.SIGQUIT)
    if pool == "solo":
        # Solo ends with its body.
        fleet.open("end")
    worker.wait_ended()
    wait_free(observer, "a")
    wait_for(lambda: sessions(observer) == [], "no session left", 2)


@pytest.mark.skipif(not SOFT_SHUTDOWN, reason="soft shutdown came with Celery 5.5")
def test_soft_shutdown_gives_a_late_task_to_the_next_worker(
    fleet: Fleet, observer: psycopg.Connection
) -> None:
    """After the soft shutdown's time the body is stopped, and its message runs elsewhere, not beside it."""
    worker = fleet.worker("prefork", 1, env={"REMAP_SIGTERM": "SIGQUIT"}, worker_soft_shutdown_timeout=1)
    result = fleet.send("late_retry", "a", gate="end")
    first = fleet.running("a")
    fleet.worker("threads", 2)
    worker.signal(signal.SIGTERM)
    worker.wait_ended()
    fleet.running("a", after=first.started)
    fleet.open("end")
    assert result.get(timeout=20) == "a"
    assert not fleet.history.overlaps()
    wait_no_locks(observer)


def test_recycled_children_close_their_sessions(
    fleet: Fleet, observer: psycopg.Connection, server_log
) -> None:
    """With one task for each child there are never more sessions than children, and nothing in the log.

    Conflicts are answers and no errors: they leave nothing in the server's log either.
    """
    fleet.worker("prefork", 2, worker_max_tasks_per_child=1)
    take(observer, "held")
    results = [fleet.send("skip", "held" if number % 2 else f"name {number}") for number in range(30)]
    most = 0

    def done() -> bool:
        nonlocal most
        most = max(most, len(sessions(observer)))
        return all(result.ready() for result in results)

    fleet.wait(done, "thirty tasks", timeout=60)
    # Children that are on their way out, and those in their places.
    assert most <= 4
    fleet.workers[0].stop()
    wait_for(lambda: sessions(observer) == [], "no session left", 2)
    assert len({run.pid for run in fleet.history.runs()}) == 15
    assert not rude_lines(server_log())


def test_session_opened_before_the_fork_is_not_used_by_children(
    fleet: Fleet, observer: psycopg.Connection
) -> None:
    """An import or a start-up hook that takes a lock in the main process leaves a session behind there."""
    worker = fleet.worker("prefork", 4, app="faults.early")
    (early,) = fleet.history.runs("before the fork")
    assert early.pid == worker.pid
    for _ in range(4):
        fleet.send("skip", "a", gate="end")
    for name in ("b", "c"):
        fleet.send("skip", name, gate="end")
    children = {fleet.running(name).pid for name in ("a", "b", "c")}
    assert len(fleet.history.runs("a")) == 1
    assert children <= set(sessions(observer))
    backends = [holders(observer, name) for name in ("a", "b", "c")]
    assert len({pid for pids in backends for pid in pids}) == 3
    # A child that dies leaves the others' sessions alone.
    victim = fleet.running("c").pid
    os.kill(victim, signal.SIGKILL)
    wait_free(observer, "c")
    assert holders(observer, "a") == backends[0]
    assert holders(observer, "b") == backends[1]
    fleet.open("end")
    wait_no_locks(observer)


def test_task_class_of_the_app_keeps_its_context_and_gets_the_lock(
    fleet: Fleet, observer: psycopg.Connection
) -> None:
    """Flask's usual ``task_cls``: the body sees the application's context, under the lock."""
    fleet.worker("prefork", 2, app="faults.wrapped")
    result = fleet.send("in_context", "a", gate="end")
    fleet.running("a")
    assert holders(observer, "a")
    assert fleet.send("in_context", "a").get(timeout=10)["pglock"] == "skipped"
    fleet.open("end")
    assert result.get(timeout=10) is True
    assert fleet.send("unlocked").get(timeout=10) is True


def test_name_is_free_before_the_result_is_told(fleet: Fleet, observer: psycopg.Connection) -> None:
    """Who waits for a result finds the name free: a hundred tasks, each sent when the last one is done."""
    fleet.worker("prefork", 2)
    began = time.monotonic()
    for _ in range(100):
        assert fleet.send("skip", "a").get(timeout=10) == "a", (
            f"skipped after {time.monotonic() - began:.1f} s"
        )

"""A lock is free the moment its holder is gone, however it went."""

from __future__ import annotations

import os
import signal
import time

import psycopg
import pytest

from faults.fleet import Fleet, alive, wait_for
from faults.judge import holders, take, wait_free, wait_no_locks

TIMES = 50


@pytest.mark.smoke
def test_name_of_a_killed_holder_is_taken_by_the_next_within_a_second(
    fleet: Fleet, observer: psycopg.Connection
) -> None:
    """Fifty times in a row: SIGKILL to the process that runs the body, and the next message runs."""
    fleet.worker("prefork", concurrency=4)
    fleet.send("skip", "a", gate="never")
    holder = fleet.running("a")
    took = []
    for _ in range(TIMES):
        assert holders(observer, "a"), "the body runs without its lock"
        killed = time.monotonic()
        os.kill(holder.pid, signal.SIGKILL)
        wait_free(observer, "a")
        fleet.send("skip", "a", gate="never")
        holder = fleet.running("a", after=killed)
        took.append(holder.started - killed)
    assert max(took) < 1.0, f"seconds from the kill to the next body: {sorted(took)[-5:]}"
    assert len(fleet.history.runs("a")) == TIMES + 1
    assert not fleet.history.overlaps()


def test_name_of_a_living_holder_is_not_taken(fleet: Fleet) -> None:
    """The control of the kill: with the holder left alone the next message is skipped."""
    fleet.worker("prefork", concurrency=4)
    fleet.send("skip", "a", gate="end")
    fleet.running("a")
    assert fleet.send("skip", "a").get(timeout=10)["pglock"] == "skipped"
    assert len(fleet.history.runs("a")) == 1
    fleet.open("end")


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_killed_worker_frees_its_names(fleet: Fleet, observer: psycopg.Connection, pool: str) -> None:
    """SIGKILL to a whole worker frees all it held, and another worker goes on within a second."""
    holder = fleet.worker(pool, 1)
    fleet.send("skip", "a", gate="never")
    fleet.running("a")
    fleet.worker("solo")
    killed = time.monotonic()
    holder.kill()
    wait_free(observer, "a")
    fleet.send("skip", "a", gate="end")
    assert fleet.running("a", after=killed).started - killed < 1.0
    fleet.open("end")


@pytest.mark.parametrize("how", ["fork", "multiprocessing", "subprocess"])
def test_child_of_a_killed_body_does_not_keep_its_name(
    fleet: Fleet, observer: psycopg.Connection, how: str
) -> None:
    """A process that the body started inherits its descriptors, and lives on when the holder is killed."""
    fleet.worker("prefork", 1)
    fleet.send("has_child", "a", how, gate="never")
    holder = fleet.running("a")
    (child,) = [event["child"] for event in fleet.history.events("child")]
    assert holders(observer, "a")
    os.kill(holder.pid, signal.SIGKILL)
    try:
        wait_free(observer, "a")
        assert alive(child), "the child was gone too: nothing was tested"
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("how", ["fork", "multiprocessing", "subprocess"])
def test_child_of_a_body_leaves_the_lock_alone(fleet: Fleet, observer: psycopg.Connection, how: str) -> None:
    """The start and the end of a child neither free the lock nor break the session."""
    fleet.worker("prefork", 1)
    result = fleet.send("has_child", "a", how, gate="end")
    fleet.running("a")
    (backend,) = holders(observer, "a")
    (child,) = [event["child"] for event in fleet.history.events("child")]
    os.kill(child, signal.SIGKILL if how == "fork" else signal.SIGTERM)
    wait_for(lambda: not alive(child), "the end of the child")
    assert holders(observer, "a") == [backend]
    fleet.open("end")
    result.get(timeout=10)
    wait_no_locks(observer)
    assert fleet.send("skip", "a").get(timeout=10) == "a"


def test_forked_child_opens_a_session_of_its_own(fleet: Fleet, observer: psycopg.Connection) -> None:
    """A locked task that is applied in a forked child of a body leaves the parent's session as it is."""
    fleet.worker("prefork", 1)
    result = fleet.send("calls_in_child", "a", gate="end")
    holder = fleet.running("a")
    (run,) = fleet.history.runs("a's child")
    assert run.pid != holder.pid
    assert holders(observer, "a")
    fleet.open("end")
    result.get(timeout=10)
    wait_no_locks(observer)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "solo"])
def test_name_is_free_after_a_body_that_ends_badly(
    fleet: Fleet, observer: psycopg.Connection, pool: str
) -> None:
    """An error, `Ignore` and `Reject` release like a return does."""
    fleet.worker(pool, 4)
    for how in ("error", "ignore", "reject", "recursion"):
        fleet.send("ends", how, how)
        fleet.wait(lambda how=how: [run for run in fleet.history.runs(how) if run.ended], "the body's end")
        wait_free(observer, how)
        assert fleet.send("raises", how).get(timeout=10) == how
    wait_no_locks(observer)
    assert len(fleet.history.runs()) == 8


def test_name_is_free_after_a_body_that_ends_its_process(fleet: Fleet, observer: psycopg.Connection) -> None:
    """What ends a prefork child frees the name, with or without a word."""
    fleet.worker("prefork", 1)
    for how in ("system exit", "keyboard interrupt", "os._exit"):
        fleet.send("ends", how, how)
        fleet.wait(lambda how=how: fleet.history.runs(how), "the body")
        wait_no_locks(observer)
        assert fleet.send("raises", how).get(timeout=20) == how


def test_soft_time_limit_frees_the_name(fleet: Fleet, observer: psycopg.Connection) -> None:
    """A body that is stopped by its soft time limit may tidy up, and releases when it is done."""
    fleet.worker("prefork", 1)
    result = fleet.signature("soft_limited", "a").apply_async(soft_time_limit=1)
    assert result.get(timeout=10) == "stopped in time"
    wait_no_locks(observer)
    assert fleet.send("raises", "a").get(timeout=10) == "a"


def test_soft_time_limit_in_a_wait_inside_leaves_the_body_its_lock(
    fleet: Fleet, observer: psycopg.Connection
) -> None:
    """The wait for another lock ends, and nobody runs beside the body that tidies up."""
    fleet.worker("prefork", 1)
    take(observer, "other")
    result = fleet.signature("waits_inside", "a", "other").apply_async(soft_time_limit=1)
    wait_for(lambda: holders(observer, "a"), "the body", 20)
    before = holders(observer, "a")
    fleet.running("a")
    assert holders(observer, "a") == before
    assert result.get(timeout=10) == "tidied up"
    assert holders(observer, "other") == [observer.info.backend_pid]
    observer.execute("SELECT pg_advisory_unlock_all()")
    wait_no_locks(observer)


def test_hard_time_limit_frees_the_name(fleet: Fleet, observer: psycopg.Connection) -> None:
    """The process that is killed by the hard time limit takes its lock with it."""
    fleet.worker("prefork", 1)
    fleet.signature("skip", "a", gate="never").apply_async(time_limit=1)
    holder = fleet.running("a")
    fleet.wait(lambda: not alive(holder.pid), "the end of the holder")
    wait_free(observer, "a")
    assert fleet.send("raises", "a").get(timeout=20) == "a"
    wait_no_locks(observer)


@pytest.mark.parametrize("signum", ["SIGTERM", "SIGKILL"])
def test_revoked_body_frees_the_name(fleet: Fleet, observer: psycopg.Connection, signum: str) -> None:
    """``revoke(terminate=True)`` ends the holder, whether the body sees the signal or not."""
    fleet.worker("prefork", 1)
    result = fleet.send("skip", "a", gate="never")
    holder = fleet.running("a")
    result.revoke(terminate=True, signal=signum)
    fleet.wait(lambda: not holders(observer, "a") or not alive(holder.pid), "the end of the holder")
    wait_free(observer, "a")
    assert fleet.send("raises", "a").get(timeout=20) == "a"
    wait_no_locks(observer)

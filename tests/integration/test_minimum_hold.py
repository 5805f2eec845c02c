"""A name stays taken for its minimum hold, by the process that held it, and no longer."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_pglock import AdvisoryLockedTask, LockId, advisory_lock, is_skipped
from celery_pglock.locks.hold import Hold
from celery_pglock.locks.keeper import Keeper, close_all
from celery_pglock.locks.requests import Answer
from integration.judge import Judge, eventually
from integration.rivals import in_thread, interrupted_after

ID, OTHER = LockId(31), LockId(32)

NewKeeper = Callable[..., Keeper]

pytestmark = pytest.mark.usefixtures("way")


def granted(keeper: Keeper, id: LockId = ID, **options: Any) -> Hold | None:
    hold = Hold(id, **options)
    return hold if keeper.acquire(hold).answer is Answer.GRANTED else None


def test_a_name_stays_taken_after_the_body(new_keeper: NewKeeper, judge: Judge) -> None:
    """For the process itself and for others, until the time from the grant is over."""
    first, second = new_keeper(), new_keeper()
    hold = granted(first, min_hold=0.5)
    granted_at = time.monotonic()
    first.release(hold)
    assert hold.status is Hold.Status.RELEASED
    assert not hold.lost
    assert time.monotonic() - granted_at < 0.3, "the release waited for the time"
    while time.monotonic() - granted_at < 0.45:
        assert granted(first) is None
        assert granted(second) is None
        time.sleep(0.02)
    eventually(lambda: not judge.held(), "it stays taken", within=0.5)
    second.release(granted(second))


def test_a_body_that_takes_longer_is_not_kept(new_keeper: NewKeeper, judge: Judge) -> None:
    """The time counts from the grant."""
    keeper = new_keeper()
    hold = granted(keeper, min_hold=0.2)
    time.sleep(0.25)
    keeper.release(hold)
    assert judge.held() == set()


def test_a_release_without_a_minimum_hold_is_at_once(new_keeper: NewKeeper, judge: Judge) -> None:
    """The control."""
    keeper = new_keeper()
    keeper.release(granted(keeper))
    assert judge.held() == set()


def test_the_process_works_on_meanwhile(new_keeper: NewKeeper, judge: Judge) -> None:
    """Other names come and go on the same session, and that costs the kept one nothing."""
    keeper = new_keeper()
    keeper.release(granted(keeper, min_hold=0.6))
    pid = judge.holder(ID)
    since = time.monotonic()
    while time.monotonic() - since < 0.4:
        keeper.release(granted(keeper, OTHER))
        assert judge.holder(ID) == pid
    assert len(judge.sessions()) == 1
    eventually(lambda: not judge.held(), "it stays taken", within=1)


def test_the_end_of_the_process_frees_it(new_keeper: NewKeeper, judge: Judge) -> None:
    """Nobody is left to count the time."""
    keeper = new_keeper()
    keeper.release(granted(keeper, min_hold=60))
    assert judge.held() == {ID}
    keeper.close()
    eventually(lambda: not judge.held(), "it stays taken", within=1)


def test_many_are_freed_in_time(new_keeper: NewKeeper, judge: Judge) -> None:
    """Whatever is released at the moment in which others are due: none is forgotten."""
    keeper = new_keeper()
    interval, stop_at = sys.getswitchinterval(), time.monotonic() + 3

    def work(number: int) -> None:
        n = 0
        while time.monotonic() < stop_at:
            n += 1
            hold = granted(keeper, LockId(number, n), min_hold=0.003)
            keeper.release(hold)

    sys.setswitchinterval(1e-6)
    try:
        for future in [in_thread(lambda number=number: work(number)) for number in range(4)]:
            future.result(timeout=30)
    finally:
        sys.setswitchinterval(interval)
    eventually(lambda: not judge.held(), f"forgotten: {len(judge.held())}", within=2)


def test_an_interrupted_wait_does_not_free_it_early(dsn: str, judge: Judge) -> None:
    """It is the process that has to end for that, and not one of its tasks."""
    judge.take(ID)
    with advisory_lock(OTHER, min_hold=1.5, database_url=dsn):
        pass
    until = time.monotonic() + 1.2
    with interrupted_after(0.3), advisory_lock(ID, 20, database_url=dsn):
        pass
    while time.monotonic() < until:
        assert OTHER in judge.held(), "the name is free too early"
        time.sleep(0.02)
    judge.give_back()
    eventually(lambda: not judge.held(), "it stays taken", within=2)


# With N at once: so many starts in any window.


def starts_of(keepers: list[Keeper], limit: int, window: float, seconds: float) -> list[float]:
    """Let each keeper start as often as it is let in, and return when that was."""
    starts: list[float] = []
    until = time.monotonic() + seconds

    def press(keeper: Keeper) -> None:
        while time.monotonic() < until:
            hold = granted(keeper, limit=limit, min_hold=window)
            if hold is None:
                time.sleep(0.001)
                continue
            # What lies between the grant and here is not the lock's to know.
            starts.append(time.monotonic() - hold.seconds_held)
            time.sleep(0.002)
            keeper.release(hold)

    for future in [in_thread(lambda keeper=keeper: press(keeper)) for keeper in keepers for _ in range(2)]:
        future.result(timeout=30)
    return sorted(starts)


def most_in_a_window(starts: list[float], window: float) -> int:
    return max(sum(1 for each in starts if start <= each < start + window) for start in starts)


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_than_n_start_in_any_window(new_keeper: NewKeeper, judge: Judge, limit: int) -> None:
    """A sliding window over the history of a burst, in three processes, and not much less than that."""
    window = 0.25
    starts = starts_of([new_keeper() for _ in range(3)], limit, window, seconds=2)
    assert most_in_a_window(starts, window - 0.005) == limit
    assert len(starts) >= limit * 5, f"{len(starts)} starts in 2 s"
    eventually(lambda: not judge.held(), "it stays taken", within=1)


def test_more_than_n_start_in_a_window_without_it(new_keeper: NewKeeper) -> None:
    """The control: N at once is no rate."""
    starts = starts_of([new_keeper() for _ in range(3)], 3, 0.0, seconds=0.5)
    assert most_in_a_window(starts, 0.25) > 3


# A task.


def test_a_late_duplicate_is_skipped(app: Celery, judge: Judge) -> None:
    """Which comes when the first is done already; a failed body is kept too."""

    @app.task(base=AdvisoryLockedTask, name="f", shared=False, lock_key="<x>", lock_min_hold=0.4)
    def f(x):
        if x == "bad":
            raise ValueError
        return x

    for x in ("good", "bad"):
        f.delay(x)
        assert is_skipped(f.delay(x).result)
    assert f.delay("other").result == "other"
    eventually(lambda: not judge.held(), "it stays taken", within=2)
    assert f.delay("good").result == "good"
    eventually(lambda: not judge.held(), "it stays taken", within=2)


def test_a_kept_block_is_kept_by_its_process(dsn: str, judge: Judge) -> None:
    """`advisory_lock` has it too, with a wait of its own before it."""
    judge.take(ID)
    inside = threading.Event()

    def wait() -> None:
        with advisory_lock(ID, 20, min_hold=0.6, database_url=dsn):
            inside.set()

    future = in_thread(wait)
    time.sleep(0.1)
    judge.give_back()
    future.result(timeout=20)
    assert inside.is_set()
    assert judge.held() == {ID}
    eventually(lambda: not judge.held(), "it stays taken", within=2)
    close_all()
    eventually(lambda: not judge.sessions(), "a session is left", within=2)

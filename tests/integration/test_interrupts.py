"""An interrupt at any moment leaks no lock and takes none from anybody else.

Thousands of exceptions are raised at random moments inside acquire and release, the way a soft time limit
(a signal) and a lost lock on threads (an asynchronous exception) come. After each the server is asked.
"""

from __future__ import annotations

import ctypes
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from celery_pglock import AdvisoryLockedTask, LockId
from celery_pglock.locks import keeper as keeper_module
from celery_pglock.locks.hold import Hold
from celery_pglock.locks.keeper import Keeper
from celery_pglock.locks.session import Answer
from integration.judge import Judge, eventually

ID, EXECUTION, STEADY, PROBE = LockId(1), LockId(2), LockId(3), LockId(4)
SECONDS = 3.0


class Interrupted(BaseException):
    """Swallowed by nobody."""


def work(keeper: Keeper, hold: Hold, identity: Hold) -> None:
    """What a task does with its lock."""
    with keeper.under(hold):
        keeper.acquire(hold, identity)


def settle(keeper: Keeper, hold: Hold, identity: Hold) -> None:
    """What Celery's `task_postrun` does, whatever became of the task."""
    keeper.release_soon(hold)
    keeper.release_soon(identity)


def is_clean(keeper: Keeper, judge: Judge, *, besides: frozenset[LockId] = frozenset()) -> bool:
    """Whether nothing is held but what is meant to be: a statement of ours lets owed unlocks ride along."""
    probe = Hold(PROBE)
    assert keeper.acquire(probe).answer is Answer.GRANTED
    keeper.release(probe)
    return judge.held() == besides


class Alarm:
    """Raises an error in the main thread after a random time, and once only."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.armed = False
        self.count = 0

    def __call__(self, *_: object) -> None:
        if self.armed:
            self.armed = False
            self.count += 1
            raise self.error

    def during(self, function: Callable[[], Any], within: float) -> None:
        """Call a function and interrupt it at a random moment of its usual time."""
        try:
            self.armed = True
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, within))
            function()
            self.armed = False
        except BaseException:
            # Whoever met the interrupt may have wrapped it; what was raised without one is an error.
            if self.armed:
                raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.fixture(params=[SoftTimeLimitExceeded, Interrupted])
def alarm(request: pytest.FixtureRequest) -> Iterator[Alarm]:
    """Borrow the timer of pytest-timeout."""
    alarm = Alarm(request.param)
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    previous = signal.signal(signal.SIGALRM, alarm)
    yield alarm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)
    signal.setitimer(signal.ITIMER_REAL, left)


def usual_time(function: Callable[[], Any]) -> float:
    """Seconds that a call takes when it is not the first, and a bit more."""
    times = []
    for _ in range(20):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return 1.2 * sorted(times)[10]


def test_a_signal_in_acquire_or_release_leaks_no_lock(
    keeper: Keeper, judge: Judge, alarm: Alarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefork and solo: where the session is in doubt it is closed, which frees all."""
    monkeypatch.setattr(keeper_module, "_one_at_a_time", True)

    def whole() -> None:
        hold, identity = Hold(ID), Hold(EXECUTION)
        work(keeper, hold, identity)
        settle(keeper, hold, identity)

    within = usual_time(whole)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        hold, identity = Hold(ID), Hold(EXECUTION)
        alarm.during(lambda: work(keeper, hold, identity), within)  # noqa: B023 - called at once
        settle(keeper, hold, identity)
        assert is_clean(keeper, judge), f"a lock leaked at the {alarm.count}th interrupt"
    assert alarm.count > 200


def test_a_signal_in_a_task_without_a_message_leaks_no_lock(
    app: Celery, judge: Judge, alarm: Alarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager tasks and the items of `map` have no `task_postrun` of their own that would settle for them."""
    monkeypatch.setattr(keeper_module, "_one_at_a_time", True)

    @app.task(base=AdvisoryLockedTask, lock_key=lambda: ID, shared=False, throws=(SoftTimeLimitExceeded,))
    def task() -> None: ...

    within = usual_time(task.apply)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        alarm.during(task.apply, within)
        assert not judge.held(), f"a lock leaked at the {alarm.count}th interrupt"
    assert alarm.count > 200


class Worker(threading.Thread):
    """Works under one name again and again, and is interrupted at any moment of it."""

    def __init__(self, keeper: Keeper, id: LockId, identity: LockId) -> None:
        super().__init__(daemon=True)
        self.keeper, self.lock_id, self.identity_id = keeper, id, identity
        self.armed = self.stopped = False
        self.guard = threading.Lock()
        self.runs = self.interrupts = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.stopped:
                self.once()
        except BaseException as error:  # noqa: BLE001 - raised by the test
            self.error = error

    def once(self) -> None:
        hold, identity = Hold(self.lock_id), Hold(self.identity_id)
        try:
            self.armed = True
            work(self.keeper, hold, identity)
        except Interrupted:
            self.interrupts += 1
        finally:
            self.disarm()
        settle(self.keeper, hold, identity)
        self.runs += 1

    def disarm(self) -> None:
        while True:
            try:
                with self.guard:
                    self.armed = False
                    set_async_exception(self, None)
                break
            except Interrupted:
                self.interrupts += 1

    def interrupt(self) -> None:
        with self.guard:
            if self.armed:
                set_async_exception(self, Interrupted)


def set_async_exception(thread: threading.Thread, error: type[BaseException] | None) -> None:
    argument = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), argument)


def stacks() -> str:
    """Where each thread stands, for the one who has to find out why."""
    frames = sys._current_frames()
    found = [
        (each.name, traceback.format_stack(frames[each.ident or 0])[-4:]) for each in threading.enumerate()
    ]
    return "\n".join(f"{name}\n{''.join(stack)}" for name, stack in found)


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Let threads take turns at any bytecode."""
    previous = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(previous)


def test_an_interrupted_thread_leaks_no_lock_and_costs_no_other_its_own(
    keeper: Keeper, judge: Judge, quick_switches: None
) -> None:
    """Threads and green pools: the owner finishes each statement, and gives back what nobody waits for."""
    steady = Hold(STEADY)
    assert keeper.acquire(steady).answer is Answer.GRANTED
    pid = judge.holder(STEADY)
    workers = [Worker(keeper, LockId(10 + n), LockId(20 + n)) for n in range(3)]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + 2 * SECONDS
    while time.monotonic() < deadline:
        time.sleep(random.uniform(0, 4e-4))
        random.choice(workers).interrupt()
    for worker in workers:
        worker.stopped = True
    for worker in workers:
        worker.join(5)
        assert not worker.is_alive(), f"a thread waits for ever:\n{stacks()}"
        assert worker.error is None
    eventually(
        lambda: is_clean(keeper, judge, besides=frozenset([STEADY])),
        "a lock leaked at an interrupt",
        within=2,
    )
    assert judge.holder(STEADY) == pid
    assert not steady.lost
    keeper.release(steady)
    assert sum(worker.interrupts for worker in workers) > 500

"""An interrupt at any moment leaks no lock and takes none from anybody else.

Thousands of exceptions are raised at random moments inside acquire and release, the way a soft time limit
(a signal) and a lost lock on threads (an asynchronous exception) come. After each the server is asked.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import gc
import linecache
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from kombu.utils.uuid import uuid

import celery_pglock
from celery_pglock import AdvisoryLockedTask, LockId, current_lock
from celery_pglock.config import settings_of
from celery_pglock.execution import kept_back_by, settle
from celery_pglock.locks import process
from celery_pglock.locks.hold import Hold
from celery_pglock.locks.keeper import Keeper, keeper_for
from celery_pglock.locks.line import close_warm
from celery_pglock.locks.session import Answer
from integration.judge import Judge, eventually

T = TypeVar("T")

ID, STEADY, PROBE = LockId(1), LockId(2), LockId(3)
SECONDS = 2.0

#: Random moments at which a test interrupts.
INTERRUPTS = 200

# An interrupt that arrives inside a `__del__` is lost, and one inside `connect` leaves its socket to the
# garbage collector: what is left on the server is judged by the server.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Interrupted(BaseException):
    """Swallowed by nobody."""


def execution(task: Any, call: Callable[[], Any], *, is_eager: bool = False) -> None:
    """What a worker does with a message: the call, and behind it Celery's `task_postrun`."""
    id = uuid()
    task.push_request(id=id, called_directly=False, is_eager=is_eager, delivery_info={})
    try:
        call()
    finally:
        settle(id)
        task.pop_request()


def is_clean(keeper: Keeper, judge: Judge, *, besides: frozenset[LockId] = frozenset()) -> bool:
    """Whether nothing is held but what is meant to be: a statement of ours lets owed unlocks ride along."""
    probe = Hold(PROBE)
    assert keeper.acquire(probe).answer is Answer.GRANTED
    keeper.release(probe)
    deadline = time.monotonic() + 1
    # A backend whose connection was closed takes a moment to go.
    while judge.held() != besides:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


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


@pytest.fixture
def make(app: Celery) -> Callable[[LockId], Any]:
    """Make a task that locks an id."""

    def make(id: LockId) -> Any:
        def body() -> None: ...

        options = {"base": AdvisoryLockedTask, "name": f"task {id}", "lock_key": lambda: id}
        return app.task(**options, shared=False)(body)

    return make


@pytest.fixture
def keeper(app: Celery) -> Keeper:
    """The keeper of the app's tasks."""
    return keeper_for(settings_of(app))


def is_seam(frame: FrameType) -> bool:
    """A tracer may raise between a block and the enter or exit of its `with`. No interrupt comes there."""
    source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return source.lstrip().startswith(("with ", "try:"))


class Tracer:
    """Interrupts the code that it traces at the n-th line or call inside the package."""

    files = (str(Path(celery_pglock.__file__).parent), threading.__file__, contextlib.__file__)

    def __init__(self, n: int) -> None:
        self.left = n
        self.place = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.files):
            return None
        if event == "call" or (event == "line" and not is_seam(frame)):
            self.left -= 1
        if self.left == 0:
            self.left -= 1
            self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({event})"
            raise Interrupted
        return self

    def during(self, function: Callable[[], Any]) -> None:
        """Call a function and interrupt it once."""
        previous = sys.gettrace()
        sys.settrace(self)
        try:
            function()
        except Interrupted:
            pass
        finally:
            sys.settrace(previous)


def at_any_line(interrupt: Callable[[Tracer], T]) -> Iterator[tuple[str, T]]:
    """Interrupt at one place after the other, until there is none left, and tell it with what came of it."""
    for n in range(1, 1000):
        tracer = Tracer(n)
        outcome = contextvars.copy_context().run(interrupt, tracer)
        if not tracer.place:
            assert n > 50
            return
        yield tracer.place, outcome
    raise AssertionError("no end of places")


@pytest.mark.parametrize("is_eager", [False, True], ids=["message", "eager"])
def test_an_interrupt_at_any_line_leaves_nothing_behind(
    make: Callable[[LockId], Any], keeper: Keeper, judge: Judge, way: str, is_eager: bool
) -> None:
    """At each function and each of its lines: no lock is left, and the next execution has one again."""
    task, held = make(ID), []
    task.run = lambda: held.append(judge.held())
    execution(task, task, is_eager=is_eager)

    def interrupt(tracer: Tracer) -> bool:
        execution(task, lambda: tracer.during(task), is_eager=is_eager)
        clean = is_clean(keeper, judge) and current_lock() is None
        execution(task, task, is_eager=is_eager)
        return clean and ID in held[-1] and is_clean(keeper, judge)

    left = []
    for place, nothing_left in at_any_line(interrupt):
        if not nothing_left:
            left.append(place)
            for pid in judge.sessions():
                judge.end(pid)
    assert not left, "\n".join(left)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_interrupt_at_any_line_of_a_transaction_leaves_no_session(app: Celery, judge: Judge) -> None:
    """Also while its connection opens. Until the watch knows it, it is left to the garbage collector."""

    @app.task(base=AdvisoryLockedTask, name="f", lock_key=lambda: ID, lock_scope="transaction", shared=False)
    def f() -> None: ...

    def interrupt(tracer: Tracer) -> list[int]:
        close_warm()
        execution(f, lambda: tracer.during(f))
        close_warm()
        gc.collect()
        deadline = time.monotonic() + 1
        while (sessions := judge.sessions()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return sessions

    left = []
    for place, sessions in at_any_line(interrupt):
        if sessions:
            left.append(place)
            for pid in sessions:
                judge.end(pid)
    assert not left, "\n".join(left)


def test_an_interrupt_at_any_line_loses_nothing_that_was_kept_back(
    make: Callable[[LockId], Any], keeper: Keeper, judge: Judge, way: str
) -> None:
    """What a body publishes in its own place is published once, but for an interrupt of the publishing."""
    task, kept, published = make(ID), [], []

    def body() -> None:
        number = len(kept)
        kept_back_by(task.request).keep_back(lambda: published.append(number))
        kept.append(number)

    task.run = body

    def interrupt(tracer: Tracer) -> bool:
        # Not while a session opens.
        execution(task, task)
        execution(task, lambda: tracer.during(task))
        return published == kept

    lost = []
    for place, nothing_lost in at_any_line(interrupt):
        if not nothing_lost:
            lost.append(place)
            published[:] = kept
    assert not lost, "\n".join(lost)
    # The owner gives the last identity back in its own time; until then no session is closed.
    eventually(lambda: not judge.held(), "an identity is left", within=2)


def test_a_signal_in_a_task_leaks_no_lock(
    make: Callable[[LockId], Any], keeper: Keeper, judge: Judge, alarm: Alarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefork and solo: where the session is in doubt it is closed, which frees all."""
    monkeypatch.setattr(process, "_one_at_a_time", True)
    task = make(ID)
    within = usual_time(lambda: execution(task, task))
    deadline = time.monotonic() + 60
    while alarm.count < INTERRUPTS:
        execution(task, lambda: alarm.during(task, within))
        assert is_clean(keeper, judge), f"a lock leaked at the {alarm.count}th interrupt"
        assert time.monotonic() < deadline, f"only {alarm.count} interrupts came"


def test_a_signal_in_a_task_without_a_message_leaks_no_lock(
    make: Callable[[LockId], Any], judge: Judge, alarm: Alarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager tasks and the items of `map` have nothing that `task_postrun` would settle for them."""
    monkeypatch.setattr(process, "_one_at_a_time", True)
    task = make(ID)
    within = usual_time(lambda: execution(task, task, is_eager=True))
    deadline = time.monotonic() + 60
    while alarm.count < INTERRUPTS:
        execution(task, lambda: alarm.during(task, within), is_eager=True)
        eventually(lambda: not judge.held(), f"a lock leaked at the {alarm.count}th interrupt", within=1)
        assert time.monotonic() < deadline, f"only {alarm.count} interrupts came"


class Worker(threading.Thread):
    """Works under one name again and again, and is interrupted at any moment of it."""

    def __init__(self, task: Any) -> None:
        super().__init__(daemon=True)
        self.task = task
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
        execution(self.task, self.call)
        self.runs += 1

    def call(self) -> None:
        try:
            self.armed = True
            self.task()
            self.disarm()
        except Interrupted:
            self.interrupts += 1

    def disarm(self) -> None:
        with self.guard:
            self.armed = False
            # Taken back, CPython 3.11 would look for it for ever, and no traced function would ever begin.
            with contextlib.suppress(Interrupted):
                set_async_exception(self, Interrupted)
                while True:
                    pass

    def interrupt(self) -> None:
        """Once for each call: nothing is on its way when the call has met it."""
        with self.guard:
            if self.armed:
                self.armed = False
                set_async_exception(self, Interrupted)


def set_async_exception(thread: threading.Thread, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error))


TRACED = """
import faulthandler, sys, threading
from celery_pglock import LockId, LockLost
from celery_pglock.locks.hold import Hold
from celery_pglock.locks.interrupt import Interrupt

def body():
    hold = Hold(LockId(1))
    hold._granted(0)
    interrupt = Interrupt(hold, set())
    try:
        with interrupt:
            hold._lost("it was")
            interrupt.stop()
    except LockLost:
        print("lost")

thread = threading.Thread(target=body)
thread.start()
thread.join()
faulthandler.dump_traceback_later(5, exit=True)
sys.settrace(lambda *_: None)
(lambda: print("traced"))()
"""


def test_a_loss_on_a_thread_leaves_the_process_traceable() -> None:
    """Where CPython 3.11 looks for an exception that was taken back, a debugger's trace never ends."""
    ended = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, check=False)
    assert ended.stdout.split() == ["lost", "traced"], ended.stderr


def stacks() -> str:
    """Where each thread stands, for the one who has to find out why."""
    frames = sys._current_frames()
    found = [
        (each.name, traceback.format_stack(frames[each.ident])[-6:])
        for each in threading.enumerate()
        if each.ident in frames
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
    make: Callable[[LockId], Any], keeper: Keeper, judge: Judge, quick_switches: None
) -> None:
    """Threads and green pools: the owner finishes each statement, and gives back what nobody waits for."""
    steady = Hold(STEADY)
    assert keeper.acquire(steady).answer is Answer.GRANTED
    pid = judge.holder(STEADY)
    workers = [Worker(make(LockId(10 + n))) for n in range(3)]
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
    eventually(lambda: is_clean(keeper, judge, besides=frozenset([STEADY])), "a lock leaked", within=2)
    assert judge.holder(STEADY) == pid
    assert not steady.lost
    keeper.release(steady)
    assert sum(worker.interrupts for worker in workers) > 500

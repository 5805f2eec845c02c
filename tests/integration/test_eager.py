"""Locked tasks that run eagerly, on a real server: what the caller sees of each outcome."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery, Task, chain, chord, group
from celery.exceptions import Ignore, ImproperlyConfigured, Reject, TaskRevokedError

from celery_pglock import (
    AdvisoryLockedTask,
    Conflict,
    LockId,
    LockKeyError,
    LockLost,
    LockNotAcquired,
    current_lock,
    is_skipped,
    lock_acquired,
)
from celery_pglock.locks.keys import id_of
from integration.judge import Judge, eventually

pytestmark = pytest.mark.usefixtures("way")

ONE = id_of("celery:f:1")


class Ran(list[Any]):
    """The arguments of each run of a body."""


@pytest.fixture
def ran() -> Ran:
    return Ran()


@pytest.fixture
def make(app: Celery, ran: Ran) -> Callable[..., Any]:
    """Make a locked task `f` of one argument that notes its runs."""

    def make(name: str = "f", **options: Any) -> Any:
        def body(x):
            ran.append(x)
            return x * 10

        options = {"base": AdvisoryLockedTask, "lock_key": "<x>", "shared": False, **options}
        return app.task(name=name, **options)(body)

    return make


@pytest.fixture
def f(make: Callable[..., Any]) -> Any:
    return make()


@pytest.fixture
def fed(app: Celery) -> Any:
    """A plain task that notes what it is fed."""

    @app.task(name="fed", shared=False)
    def fed(value):
        fed.with_.append(value)
        return value

    fed.with_ = []
    return fed


@pytest.fixture
def taken(judge: Judge) -> None:
    """The name of `f(1)` is held by another program."""
    assert judge.take(ONE)


# The body and its lock.


def test_a_body_runs_under_its_lock(app: Celery, judge: Judge) -> None:
    """The name is held while the body runs, and free when it is done."""
    seen: list[Any] = []

    @app.task(bind=True, base=AdvisoryLockedTask, name="f", lock_key="<x>", shared=False)
    def f(self, x):
        seen.extend([judge.held(), self.lock, current_lock(), self.lock.name, self.lock.id])

    assert f.delay(1).successful()
    held, lock, current, name, id = seen
    assert held == {ONE} == {id}
    assert lock is current
    assert name == "celery:f:1"
    assert judge.held() == set()
    assert current_lock() is None


def test_a_free_name_is_acquired_whatever_else_is_held(f: Any, ran: Ran, taken: None) -> None:
    """Other arguments, another name."""
    assert f.delay(2).get() == 20
    assert ran == [2]


@pytest.mark.parametrize("error", [ValueError, Ignore, Reject, SystemExit, KeyboardInterrupt])
def test_the_name_is_free_however_the_body_ends(app: Celery, judge: Judge, error: Any) -> None:
    """In every outcome; and the body's own error comes through."""

    @app.task(base=AdvisoryLockedTask, name="f", shared=False, throws=(ValueError,))
    def f():
        assert judge.held()
        raise error

    if issubclass(error, Exception):
        assert f.apply().state in ("FAILURE", "IGNORED", "REJECTED")
    else:
        with pytest.raises(error):
            f.apply()
    assert judge.held() == set()


def test_a_body_that_retries_never_meets_its_own_lock(app: Celery, judge: Judge) -> None:
    """Eagerly a retry runs inside the body: two of them, and the third run succeeds."""

    @app.task(bind=True, base=AdvisoryLockedTask, name="f", lock_key=[], shared=False)
    def f(self):
        if self.request.retries < 2:
            raise self.retry(countdown=0)
        return self.request.retries

    assert f.delay().get() == 2
    assert judge.held() == set()


def test_a_body_that_changes_its_arguments_is_released_all_the_same(app: Celery, judge: Judge) -> None:
    """The name is made once, before the body."""

    @app.task(base=AdvisoryLockedTask, name="f", shared=False)
    def f(rows):
        rows.append(1)

    f.apply(([],)).get()
    assert judge.held() == set()


def test_an_argument_without_a_name_fails_the_task(f: Any, ran: Ran) -> None:
    """`LockKeyError`, and the body does not run."""
    result = f.apply((object(),))
    assert isinstance(result.result, LockKeyError)
    assert not ran


def test_a_direct_call_is_a_function_call(f: Any, ran: Ran, judge: Judge, taken: None) -> None:
    """It asks nobody, also while the name is held; so does `run`."""
    assert f(1) == f.run(1) == 10
    assert ran == [1, 1]
    assert judge.sessions() == []


def test_two_tasks_with_one_lock_name_exclude_each_other(
    make: Callable[..., Any], ran: Ran, judge: Judge
) -> None:
    """The name is all that counts."""
    f, g = make("f", lock_name="shared"), make("g", lock_name="shared")
    judge.take(id_of("celery:shared:1"))
    assert is_skipped(f.delay(1).get())
    assert is_skipped(g.delay(1).get())
    assert not ran


def test_the_namespace_parts_two_apps(app: Celery, f: Any, ran: Ran, taken: None) -> None:
    """The same task and arguments under another `pglock_namespace` are another name."""
    app.conf.pglock_namespace = "other"
    assert f.delay(1).get() == 10


def test_an_id_of_its_own_is_used_as_it_is(make: Callable[..., Any], judge: Judge) -> None:
    """Other programs and other tasks that use the same `LockId` exclude each other."""
    f = make(lock_key=lambda x: LockId(7, x))
    judge.take(LockId(7, 1))
    assert is_skipped(f.delay(1).get())
    assert f.delay(2).get() == 20


@pytest.mark.parametrize("locked", [True, False])
def test_bodies_of_one_name_never_run_together(app: Celery, locked: bool) -> None:
    """Eight threads of one process; the same without the lock collides."""
    inside, collisions, runs = [], [], []

    @app.task(base=AdvisoryLockedTask, name="f", lock_key=[], lock_enabled=locked, shared=False)
    def f():
        inside.append(1)
        time.sleep(0.01)
        collisions.extend(inside[1:])
        runs.append(1)
        inside.pop()

    assert f.name == "f"  # Celery makes the task here, and not in eight threads at once
    start = threading.Barrier(8)

    def call() -> None:
        start.wait(10)
        for _ in range(10):
            f.apply()

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs
    assert bool(collisions) is not locked


def test_a_thread_of_a_body_does_not_work_under_its_hold(app: Celery, ran: Ran) -> None:
    """`current_lock()` belongs to the code that runs under it."""

    @app.task(base=AdvisoryLockedTask, name="f", shared=False)
    def f():
        thread = threading.Thread(target=lambda: ran.append(current_lock()))
        thread.start()
        thread.join()
        return current_lock() is not None

    assert f.delay().get() is True
    assert ran == [None]


# Skipped.


def test_a_conflict_is_skipped_with_a_marker(f: Any, ran: Ran, taken: None) -> None:
    """The result is plain JSON, a success, and tells itself from any other result."""
    result = f.delay(1)
    marker = result.get(timeout=1)
    assert result.state == "SUCCESS"
    assert is_skipped(marker)
    assert is_skipped(json.loads(json.dumps(marker)))
    assert "celery:f:1" in json.dumps(marker)
    assert not ran


@pytest.mark.parametrize("result", [None, 0, {}, {"pglock": "x"}, "skipped", ["pglock"], {"lock": "x"}])
def test_other_results_are_no_marker(result: Any) -> None:
    """Whatever a task returns of its own."""
    assert not is_skipped(result)


def test_a_marker_of_all_arguments_shows_none_of_them(make: Callable[..., Any], judge: Judge) -> None:
    """With ``lock_key=None`` the name holds all arguments: the marker has the lock's name and id."""
    f = make(lock_key=None)
    id = id_of("celery:f:x=hunter2")
    judge.take(id)
    marker = f.delay("hunter2").get()
    assert "hunter2" not in json.dumps(marker)
    assert "celery:f" in marker["lock"]
    assert str(id[0]) in marker["lock"]


def test_a_marker_names_the_holder(f: Any, judge: Judge, taken: None) -> None:
    """So that somebody can ask there."""
    assert "observer" in f.delay(1).get()["holder"]


@pytest.mark.parametrize("value", [None, 0, "skipped", {"status": "busy"}])
def test_a_skip_result_of_the_users_own_is_returned(
    make: Callable[..., Any], ran: Ran, taken: None, value: Any
) -> None:
    """None and 0 are results like any other."""
    result = make(lock_skip_result=value).delay(1)
    assert (result.state, result.get()) == ("SUCCESS", value)
    assert not ran


def test_a_marker_is_never_fed_to_the_next_of_a_chain(f: Any, fed: Any, ran: Ran, taken: None) -> None:
    """The chain ends at the skipped task, and its caller is told so."""
    with pytest.raises(TaskRevokedError, match="skipped"):
        chain(f.si(1), fed.s()).apply_async().get(timeout=1)
    assert not ran
    assert not fed.with_


@pytest.mark.parametrize("how", ["apply", "apply_async"])
def test_a_marker_is_never_fed_in_the_middle_of_a_chain(f: Any, fed: Any, taken: None, how: str) -> None:
    """What ran before the skipped task did run, what comes behind does not."""
    with pytest.raises(TaskRevokedError):
        getattr(chain(fed.s(1), f.s(), fed.s()), how)().get(timeout=1)
    assert fed.with_ == [1]


def test_the_last_of_a_chain_returns_its_marker(f: Any, fed: Any, taken: None) -> None:
    """Nothing follows: a skip is what it always is."""
    assert is_skipped(chain(fed.s(1), f.s()).apply_async().get(timeout=1))


def test_a_chain_inside_a_body_is_told_from_the_chain_outside(
    app: Celery, f: Any, fed: Any, taken: None
) -> None:
    """A task that is applied by the body of a chain's task is no part of that chain."""

    @app.task(name="outer", shared=False)
    def outer():
        return is_skipped(f.apply((1,)).get(disable_sync_subtasks=False))

    assert chain(outer.s(), fed.s()).apply_async().get() is True
    assert fed.with_ == [True]


@pytest.mark.parametrize("shape", ["task", "chain"])
def test_a_marker_of_a_replacement_is_never_fed_to_what_follows(
    app: Celery, f: Any, fed: Any, taken: None, shape: str
) -> None:
    """Who was replaced has the chain of its replacement behind it."""

    @app.task(bind=True, name="replaced", shared=False)
    def replaced(self, x):
        return self.replace(f.s(x) if shape == "task" else chain(fed.s(x), f.s()))

    with pytest.raises(TaskRevokedError):
        chain(replaced.s(1), fed.s()).apply_async().get(timeout=1)
    assert fed.with_ == ([] if shape == "task" else [1])


def test_a_group_that_replaces_hands_its_markers_on(app: Celery, f: Any, fed: Any, taken: None) -> None:
    """In a list, as every group does."""

    @app.task(bind=True, name="replaced", shared=False)
    def replaced(self):
        return self.replace(group(f.si(1), f.si(2)))

    chain(replaced.s(), fed.s()).apply_async().get(timeout=1)
    ((marker, result),) = fed.with_
    assert is_skipped(marker)
    assert result == 20


def test_the_last_of_a_chain_may_be_replaced(app: Celery, f: Any, fed: Any, taken: None) -> None:
    """Nothing follows the replacement either."""

    @app.task(bind=True, name="replaced", shared=False)
    def replaced(self, x):
        return self.replace(f.s(x))

    assert is_skipped(chain(fed.s(1), replaced.s()).apply_async().get(timeout=1))


def test_a_marker_is_never_fed_to_a_link(f: Any, fed: Any, taken: None) -> None:
    """A callback that expects a result gets none."""
    result = f.apply_async((1,), link=fed.s())
    assert isinstance(result.result, TaskRevokedError)
    assert not fed.with_


@pytest.mark.parametrize("value", [None, 7])
def test_a_chain_goes_on_with_a_skip_result_of_the_users_own(
    make: Callable[..., Any], fed: Any, ran: Ran, taken: None, value: Any
) -> None:
    """`lock_skip_result` means "go on with this"."""
    assert chain(make(lock_skip_result=value).si(1), fed.s()).apply_async().get() == value
    assert fed.with_ == [value]
    assert not ran


def test_a_group_ends_with_the_marker_in_its_place(f: Any, taken: None) -> None:
    """The others have their results."""
    marker, result = group(f.si(1), f.si(2)).apply_async().get(timeout=1)
    assert is_skipped(marker)
    assert result == 20


def test_the_body_of_a_chord_gets_the_marker_in_its_list(f: Any, fed: Any, taken: None) -> None:
    """Never pending."""
    chord([f.si(1), f.si(2)])(fed.s()).get(timeout=1)
    ((marker, result),) = fed.with_
    assert is_skipped(marker)
    assert result == 20


# Failed.


@pytest.mark.parametrize("policy", ["retry", "raise", lambda _: "retry", lambda _: "raise"])
def test_an_eager_conflict_that_is_not_skipped_is_raised_at_once(
    make: Callable[..., Any], ran: Ran, taken: None, policy: Any
) -> None:
    """There is no queue to wait in, and nobody sleeps."""
    started_at = time.monotonic()
    result = make(lock_on_conflict=policy).delay(1)
    assert isinstance(result.result, LockNotAcquired)
    assert "celery:f:1" in str(result.result)
    assert time.monotonic() - started_at < 1
    assert not ran


def test_a_policy_decides_by_the_conflict(make: Callable[..., Any], taken: None) -> None:
    """It is handed what is known of the conflict."""
    conflicts = []
    f = make(lock_on_conflict=lambda conflict: conflicts.append(conflict) or "skip")
    result = f.delay(1)
    assert is_skipped(result.get())
    (conflict,) = conflicts
    assert isinstance(conflict, Conflict)
    assert (conflict.lock, conflict.id) == ("celery:f:1", ONE)
    assert (conflict.task_name, conflict.task_id) == ("f", result.id)
    assert conflict.conflicts == 1
    assert conflict.waited >= 0
    assert "observer" in conflict.holder


@pytest.mark.parametrize("decision", [None, "ignore", True, 5])
def test_a_policy_that_decides_nothing_is_an_error(
    make: Callable[..., Any], ran: Ran, taken: None, decision: Any
) -> None:
    """The error names the task, the option and what it may return; the body does not run."""
    error = make(lock_on_conflict=lambda _: decision).delay(1).result
    assert isinstance(error, ImproperlyConfigured)
    for part in ("'f'", "lock_on_conflict", repr(decision), "'skip', 'retry'"):
        assert part in str(error)
    assert not ran


# One inside another.


def test_a_nested_execution_runs_under_the_hold_outside(app: Celery, judge: Judge) -> None:
    """It neither skips itself nor releases what is not its own."""
    seen: list[Any] = []

    @app.task(base=AdvisoryLockedTask, name="f", lock_key=[], shared=False)
    def f(depth):
        seen.append(depth)
        if depth:
            inner = f.apply((depth - 1,)).get(disable_sync_subtasks=False)
            assert not is_skipped(inner)
            assert judge.held() == {id_of("celery:f")}
        return depth

    assert f.delay(2).get() == 2
    assert seen == [2, 1, 0]
    assert judge.held() == set()


def test_a_nested_execution_of_another_task_with_that_name_runs_under_it_too(
    app: Celery, make: Callable[..., Any], ran: Ran
) -> None:
    """The name counts, not the task."""
    g = make("g", lock_name="shared", lock_key=[])

    @app.task(base=AdvisoryLockedTask, lock_name="shared", lock_key=[], shared=False)
    def f():
        return g.apply((1,)).get(disable_sync_subtasks=False)

    assert f.delay().get() == 10


def test_a_nested_execution_of_another_name_takes_its_own_lock(app: Celery, judge: Judge) -> None:
    """And gives it back alone."""
    seen = []

    @app.task(base=AdvisoryLockedTask, name="f", lock_key="<x>", shared=False)
    def f(x):
        if x == 2:
            f.apply((1,))
            seen.append(judge.held())
        else:
            seen.append(judge.held())

    f.delay(2)
    two = id_of("celery:f:2")
    assert seen == [{ONE, two}, {two}]


def test_a_body_that_calls_its_task_calls_a_function(app: Celery, judge: Judge, taken: None) -> None:
    """Recursion takes no lock, also where the request says that the task was not called directly."""

    @app.task(base=AdvisoryLockedTask, name="f", lock_key="<x>", shared=False)
    def f(x):
        return f(x - 1) + 1 if x else judge.held()

    @app.task(base=AdvisoryLockedTask, name="g", lock_key="<x>", shared=False)
    def g(x):
        return g(x - 1) + 1 if x else 0

    assert g.delay(3).get() == 3
    assert f.run(0) == {ONE}


def test_a_nested_body_that_calls_its_task_calls_a_function(app: Celery, judge: Judge) -> None:
    """The same in an execution that runs under the hold of another."""

    @app.task(base=AdvisoryLockedTask, name="f", lock_key="<x>", shared=False)
    def f(x, nested=False, called=False):
        if called:
            return "called"
        if nested:
            return f(1, called=True)
        return f.apply((x,), {"nested": True}).get(disable_sync_subtasks=False)

    judge.take(ONE)
    assert f.delay(5).get() == "called"


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_body_that_calls_itself_again_and_again_has_one_lock(
    app: Celery, judge: Judge, wrapped: bool
) -> None:
    """However deep: Celery hands each call another copy of the request."""

    class Wrapping(Task):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    class Locked(AdvisoryLockedTask, *([Wrapping] if wrapped else [])): ...

    @app.task(base=Locked, name="f", lock_key="<n>", shared=False)
    def f(n):
        assert len(judge.held()) == 1
        return n * f(n - 1) if n else 1

    assert f.delay(5).get() == 120


def test_what_an_eager_body_is_replaced_with_has_its_own_lock(
    app: Celery, make: Callable[..., Any], ran: Ran, taken: None
) -> None:
    """It has the id of the task that it replaces, and runs inside of that one's body."""
    f = make()

    @app.task(base=AdvisoryLockedTask, name="g", shared=False, bind=True)
    def g(self):
        return self.replace(f.s(1))

    assert is_skipped(g.apply().result)
    assert ran == []


def test_a_plain_task_inside_a_locked_one_stays_plain(app: Celery, fed: Any, judge: Judge) -> None:
    """The lock wraps one body."""

    @app.task(base=AdvisoryLockedTask, name="f", lock_key=[], shared=False)
    def f():
        return fed.apply((5,)).get(disable_sync_subtasks=False)

    assert f.delay().get() == 5
    assert current_lock() is None


# Items of other tasks.


def test_items_of_a_map_have_their_own_locks(f: Any, ran: Ran, taken: None) -> None:
    """A conflict puts the marker in the item's place."""
    marker, result = f.map([1, 2]).apply().get()
    assert is_skipped(marker)
    assert result == 20
    assert ran == [2]


def test_items_of_a_starmap_have_their_own_locks(f: Any, ran: Ran, taken: None) -> None:
    """The same with argument lists."""
    marker, result = f.starmap([(1,), (2,)]).apply().get()
    assert is_skipped(marker)
    assert result == 20


def test_items_of_chunks_have_their_own_locks(f: Any, ran: Ran, taken: None) -> None:
    """Each chunk is a starmap."""
    (marker, two), (three,) = f.chunks([(1,), (2,), (3,)], 2).group().apply().get()
    assert is_skipped(marker)
    assert (two, three) == (20, 30)


def test_an_item_is_locked_while_its_body_runs(app: Celery, judge: Judge) -> None:
    """One after the other."""

    @app.task(base=AdvisoryLockedTask, name="f", lock_key="<x>", shared=False)
    def f(x):
        return judge.held() == {id_of(f"celery:f:{x}")}

    assert f.map([1, 2]).apply().get() == [True, True]


@pytest.mark.parametrize("policy", ["retry", "raise"])
def test_an_item_that_can_not_be_skipped_raises(make: Callable[..., Any], taken: None, policy: str) -> None:
    """An item has no message that could be published again."""
    result = make(lock_on_conflict=policy).map([2, 1]).apply()
    assert isinstance(result.result, LockNotAcquired)


# Wrappers.


def test_a_wrapper_behind_the_lock_runs_under_it(app: Celery, judge: Judge, ran: Ran) -> None:
    """Flask's app context is entered with the lock held, and left before it is given back."""
    seen: list[Any] = []

    class ContextTask(Task):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(judge.held())
            try:
                return super().__call__(*args, **kwargs)
            finally:
                seen.append(judge.held())

    base = type("Both", (AdvisoryLockedTask, ContextTask), {"abstract": True})

    @app.task(base=base, bind=True, name="f", lock_key="<x>", shared=False)
    def f(self, x):
        return self.lock.name

    assert f.delay(1).get() == "celery:f:1"
    assert seen == [{ONE}, {ONE}]
    judge.take(ONE)
    assert is_skipped(f.delay(1).get())
    assert seen == [{ONE}, {ONE}]


# Lost.


def work_while(event: Callable[[], None]) -> None:
    """Work for up to ten seconds while something happens beside it."""
    thread = threading.Thread(target=event)
    thread.start()
    try:
        for _ in range(1000):
            time.sleep(0.01)
    finally:
        thread.join()


@pytest.mark.parametrize("policy", ["abort", "retry"])
def test_a_body_is_stopped_when_its_lock_is_lost(app: Celery, judge: Judge, policy: str) -> None:
    """Eagerly "retry" has no queue: the caller gets `LockLost` either way."""

    @app.task(base=AdvisoryLockedTask, name="f", lock_key="<x>", lock_on_lost=policy, shared=False)
    def f(x):
        work_while(lambda: judge.end(judge.holder(ONE)))

    started_at = time.monotonic()
    assert isinstance(f.delay(1).result, LockLost)
    assert time.monotonic() - started_at < 3


def test_a_body_may_go_on_without_its_lock(app: Celery, judge: Judge) -> None:
    """``lock_on_lost="continue"``: it is told, by ``self.lock.lost`` and by `check`."""

    @app.task(
        bind=True, base=AdvisoryLockedTask, name="f", lock_key="<x>", lock_on_lost="continue", shared=False
    )
    def f(self, x):
        judge.end(judge.holder(ONE))
        eventually(lambda: self.lock.lost, "the loss was not noticed", within=1)
        with pytest.raises(LockLost):
            self.lock.check()
        return "done"

    assert f.delay(1).get() == "done"


def test_no_body_begins_under_a_lost_lock(make: Callable[..., Any], ran: Ran, judge: Judge) -> None:
    """Also where a running one would go on."""
    f = make(lock_on_lost="continue")

    def lose(lock: Any, **_: Any) -> None:
        judge.end(judge.holder(ONE))
        eventually(lambda: lock.lost, "the loss was not noticed", within=1)

    lock_acquired.connect(lose)
    try:
        assert isinstance(f.apply((1,)).result, LockLost)
    finally:
        lock_acquired.disconnect(lose)
    assert ran == []


def test_nothing_runs_under_a_hold_that_is_lost(app: Celery, judge: Judge) -> None:
    """A nested execution would run unlocked: it raises instead, or takes a lock of its own."""
    seen: list[Any] = []

    @app.task(base=AdvisoryLockedTask, name="f", lock_key=[], lock_on_lost="continue", shared=False)
    def f(nested=False):
        if nested:
            seen.append(judge.held())
            return
        judge.end(judge.holder(id_of("celery:f")))
        eventually(lambda: current_lock().lost, "the loss was not noticed", within=1)
        f.apply((True,))

    f.delay()
    assert seen in ([], [{id_of("celery:f")}])

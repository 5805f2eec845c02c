"""STARTED, the state that ``track_started`` asks for: it tells of a body, and of nothing before it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer

from celery_pglock import AdvisoryLockedTask, LockId
from integration.judge import Judge, eventually
from integration.rivals import in_thread, wait_until_waiting

ID = LockId(7001)

#: What bodies saw stored about themselves.
Seen = list[tuple[str, Any]]


@pytest.fixture
def app(app: Celery, judge: Judge) -> Iterator[Celery]:
    app.conf.update(task_track_started=True, task_always_eager=False, task_store_eager_result=False)
    yield app
    # An identity is let go some time after its result is stored.
    eventually(lambda: not judge.held(), "a lock is left", within=2)


@pytest.fixture
def stored(app: Celery, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The states that were stored, in order."""
    stored: list[str] = []
    # Each thread has a backend of its own.
    backend = type(app.backend)
    store = backend.store_result

    def store_result(self: Any, id: str, result: Any, state: str, *args: Any, **options: Any) -> Any:
        stored.append(state)
        return store(self, id, result, state, *args, **options)

    monkeypatch.setattr(backend, "store_result", store_result)
    return stored


@pytest.fixture
def seen() -> Seen:
    return []


def locked(app: Celery, seen: Seen, base: type = AdvisoryLockedTask, **options: Any) -> Any:
    """A task that looks up its own state."""

    @app.task(bind=True, base=base, name="f", shared=False, **{"lock_key": lambda *_: ID, **options})
    def f(self: Any, *_: Any) -> None:
        meta = app.backend.get_task_meta(self.request.id)
        seen.append((meta["status"], meta["result"]))

    app.finalize()
    return app.tasks["f"]


def delivered(task: Any, *args: Any, **request: Any) -> str:
    """Do what a worker does with a message."""
    id = uuid.uuid4().hex
    request = {
        "id": id,
        "task": task.name,
        "called_directly": False,
        "headers": {},
        "delivery_info": {},
        **request,
    }
    build_tracer(task.name, task, app=task.app)(id, args, {}, request)
    return id


@pytest.mark.parametrize("enabled", [True, False], ids=["locks", "no locks"])
@pytest.mark.parametrize("scope", ["session", "transaction"])
def test_running_body_is_started(app: Celery, seen: Seen, enabled: bool, scope: str) -> None:
    """With what Celery's own tracer stores: where it runs."""
    app.conf.pglock_enabled = enabled
    delivered(locked(app, seen, lock_scope=scope), hostname="w1@host")
    assert seen == [("STARTED", {"pid": os.getpid(), "hostname": "w1@host"})]


def test_waiting_task_is_not_started(app: Celery, seen: Seen, stored: list[str], judge: Judge) -> None:
    f = locked(app, seen, lock_on_conflict="wait", lock_max_wait=20)
    judge.take(ID)
    future = in_thread(lambda: delivered(f))
    wait_until_waiting(judge, 1)
    assert stored == []
    judge.give_back()
    future.result(timeout=20)
    assert [state for state, _ in seen] == ["STARTED"]
    assert stored == ["STARTED", "SUCCESS"]


@pytest.mark.parametrize(
    ("options", "request_options"),
    [({"ignore_result": True}, {}), ({}, {"ignore_result": True}), ({"track_started": False}, {})],
    ids=["ignored", "ignored by the caller", "not asked for"],
)
def test_state_that_nobody_asked_for_is_not_stored(
    app: Celery, seen: Seen, options: dict[str, Any], request_options: dict[str, Any]
) -> None:
    delivered(locked(app, seen, **options), **request_options)
    assert [state for state, _ in seen] == ["PENDING"]


def test_eager_execution_and_items_are_not_started(app: Celery, stored: list[str]) -> None:
    """They have no message, and no state of their own."""
    ran = []

    @app.task(base=AdvisoryLockedTask, name="g", shared=False)
    def g(x: int) -> None:
        ran.append(x)

    g.apply((1,))
    g.map([2, 3]).apply()
    delivered(app.tasks["celery.map"], g.s(), [4, 5])
    assert ran == [1, 2, 3, 4, 5]
    # The message's own.
    assert stored == ["STARTED", "SUCCESS"]


# What is asked for is known whichever way it was said.


def asks(task: Any, seen: Seen) -> bool:
    seen.clear()
    delivered(task)
    return seen[0][0] == "STARTED"


def test_annotation_is_heard(app: Celery, seen: Seen) -> None:
    app.conf.update(task_track_started=False, task_annotations={"f": {"track_started": True}})
    assert asks(locked(app, seen), seen)


def test_task_that_is_bound_again_still_asks(app: Celery, seen: Seen) -> None:
    f = locked(app, seen)
    type(f).bind(app)
    assert asks(f, seen)


@pytest.mark.parametrize("own", [None, True, False])
@pytest.mark.parametrize("parents", [True, False])
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "abstract"])
def test_derived_task_has_its_own_word_or_its_parents(
    app: Celery, seen: Seen, own: bool | None, parents: bool, bound: bool
) -> None:
    app.conf.task_track_started = False
    parent = type("Parent", (AdvisoryLockedTask,), {
        "name": "parent", "abstract": not bound, "track_started": parents, "lock_key": [],
        "run": print,
    })  # fmt: skip
    if bound:
        app.register_task(parent())
    options = {} if own is None else {"track_started": own}
    f = locked(app, seen, base=parent, **options)
    assert asks(f, seen) is (parents if own is None else own)


@pytest.mark.parametrize("options", [{}, {"lock_key": None}], ids=["locked", "without a lock"])
def test_tasks_of_a_task_cls_are_started(dsn: str, judge: Judge, seen: Seen, options: dict[str, Any]) -> None:
    app = Celery("s", backend="cache+memory://", task_cls=AdvisoryLockedTask, set_as_current=False)
    app.conf.update(pglock_database_url=dsn, task_track_started=True)
    assert asks(locked(app, seen, base=app.Task, **options), seen)
    eventually(lambda: not judge.held(), "a lock is left", within=2)
    app.close()

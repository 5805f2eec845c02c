"""Signals and log lines: what an execution tells, how loud, and what it keeps to itself."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from celery.signals import before_task_publish

from celery_pglock import (
    AdvisoryLockedTask,
    Conflict,
    Hold,
    is_skipped,
    lock_acquired,
    lock_conflict,
    lock_lost,
    lock_released,
)
from celery_pglock.execution import settle
from celery_pglock.locks.keys import id_of
from integration.judge import Judge, eventually

SIGNALS = {
    "acquired": lock_acquired,
    "conflict": lock_conflict,
    "released": lock_released,
    "lost": lock_lost,
}

Heard = list[tuple[str, Any, dict[str, Any]]]


@pytest.fixture
def heard() -> Iterator[Heard]:
    """Every signal, in order."""
    heard: Heard = []
    receivers = []
    for name, signal in SIGNALS.items():

        def receive(sender: Any, name: str = name, **fields: Any) -> None:
            fields.pop("signal")
            heard.append((name, sender, fields))

        signal.connect(receive, weak=False)
        receivers.append((signal, receive))
    yield heard
    for signal, receive in receivers:
        signal.disconnect(receive)


@pytest.fixture
def f(app: Celery) -> Any:
    @app.task(base=AdvisoryLockedTask, name="f", lock_key="t:<x>", shared=False)
    def f(x): ...

    return f


def names(heard: Heard) -> list[str]:
    return [name for name, _, _ in heard]


def test_a_run_tells_that_it_acquired_and_released(f: Any, heard: Heard) -> None:
    """With the task as sender, the hold, and seconds as floats."""
    f.delay(1)
    assert names(heard) == ["acquired", "released"]
    assert all(sender.name == "f" for _, sender, _ in heard)
    (_, _, acquired), (_, _, released) = heard
    assert isinstance(acquired["lock"], Hold)
    assert acquired["lock"] is released["lock"]
    assert acquired["lock"].name == "celery:f:t:1"
    assert 0 <= acquired["waited"] < 5
    assert 0 < released["held"] < 5
    assert released["waited"] == acquired["waited"]


def test_the_lock_is_held_when_it_is_told_and_free_when_that_is_told(f: Any, judge: Judge) -> None:
    """Receivers can rely on what they hear."""
    seen = []

    def look(**_: Any) -> None:
        seen.append(judge.held())

    for signal in (lock_acquired, lock_released):
        signal.connect(look)
    f.delay(1)
    for signal in (lock_acquired, lock_released):
        signal.disconnect(look)
    assert seen == [{id_of("celery:f:t:1")}, set()]


@pytest.mark.parametrize("decision", ["skip", "raise"])
def test_a_conflict_is_told_with_its_decision(app: Celery, judge: Judge, heard: Heard, decision: str) -> None:
    """And nothing else is: the lock was neither acquired nor released."""

    @app.task(base=AdvisoryLockedTask, name="f", lock_key=[], lock_on_conflict=decision, shared=False)
    def f(): ...

    judge.take(id_of("celery:f"))
    f.delay()
    assert names(heard) == ["conflict"]
    (_, sender, fields) = heard[0]
    assert sender.name == "f"
    assert fields["decision"] == decision
    assert isinstance(fields["conflict"], Conflict)
    assert isinstance(fields["lock"], Hold)


def test_a_failed_body_tells_that_its_lock_was_released(app: Celery, heard: Heard) -> None:
    """Seconds of failures count too."""

    @app.task(base=AdvisoryLockedTask, name="f", shared=False)
    def f():
        raise ValueError

    f.delay()
    assert names(heard) == ["acquired", "released"]


def test_a_lost_lock_is_told_as_lost_and_not_as_released(
    app: Celery, judge: Judge, heard: Heard, caplog: pytest.LogCaptureFixture
) -> None:
    """By a signal and a WARNING."""

    @app.task(
        base=AdvisoryLockedTask, bind=True, name="f", lock_key=[], lock_on_lost="continue", shared=False
    )
    def f(self):
        judge.end(judge.holder(id_of("celery:f")))
        eventually(lambda: self.lock.lost, "the loss was not noticed", within=1)

    f.delay()
    assert names(heard) == ["acquired", "lost"]
    assert heard[1][2]["held"] >= 0
    (warning,) = [record for record in lines(caplog) if record.levelno >= logging.WARNING]
    assert warning.levelno == logging.WARNING
    assert "'celery:f' was lost" in warning.getMessage()


def test_a_body_that_did_not_begin_runs_again(app: Celery, judge: Judge, heard: Heard) -> None:
    """Nothing was done under a lock that was lost before it, so nothing has failed."""
    published, ran = [], []

    def publish(headers: dict[str, Any], **_: Any) -> None:
        published.append(headers)

    def lose(lock: Hold, **_: Any) -> None:
        judge.end(judge.holder(lock.id))
        eventually(lambda: lock.lost, "the loss was not noticed", within=1)

    @app.task(base=AdvisoryLockedTask, name="f", lock_key=[], shared=False)
    def task():
        ran.append(1)

    app.conf.task_always_eager = False
    before_task_publish.connect(publish)
    lock_acquired.connect(lose)
    try:
        request = {"id": "one", "task": "f", "retries": 0, "called_directly": False, "headers": {}}
        outcome = build_tracer("f", task, app=app)("one", (), {}, {**request, "delivery_info": {}})
    finally:
        lock_acquired.disconnect(lose)
        before_task_publish.disconnect(publish)
    assert outcome.info.state == "RETRY"
    assert [headers["pglock"]["failures"] for headers in published] == [1]
    assert not ran
    settle("one")


def test_an_error_in_a_receiver_changes_nothing(f: Any, judge: Judge) -> None:
    """Nobody's work depends on who listens."""

    def fail(**_: Any) -> None:
        raise ValueError("a receiver's own")

    for signal in SIGNALS.values():
        signal.connect(fail)
    try:
        assert f.delay(1).successful()
        judge.take(id_of("celery:f:t:1"))
        assert is_skipped(f.delay(1).get())
    finally:
        for signal in SIGNALS.values():
            signal.disconnect(fail)


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name.startswith("celery_pglock")]


def test_a_run_is_told_at_debug(f: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Acquired and released: two lines that a worker's usual level leaves out."""
    with caplog.at_level(logging.DEBUG, "celery_pglock"):
        task_id = f.delay(1).id
    first, second = lines(caplog)
    assert "lock 'celery:f:t:1' acquired" in first.getMessage()
    assert "lock 'celery:f:t:1' released" in second.getMessage()
    for record in (first, second):
        assert record.levelno == logging.DEBUG
        assert (record.task_name, record.task_id) == ("f", task_id)
        assert (record.lock, record.lock_id) == ("celery:f:t:1", id_of("celery:f:t:1"))


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_conflict_is_one_info_line(
    app: Celery, judge: Judge, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    """With its decision, its holder and the holder's age, and no traceback: nothing for an error tracker."""

    @app.task(base=AdvisoryLockedTask, name="f", lock_key="<x>", lock_on_conflict=policy, shared=False)
    def f(x): ...

    began = time.monotonic()
    judge.take(id_of("celery:f:1"))
    time.sleep(0.6)
    with caplog.at_level(logging.DEBUG, "celery_pglock"):
        f.delay(1)
    (record,) = lines(caplog)
    assert record.levelno == logging.INFO
    assert record.exc_info is None
    assert 0.6 <= record.held_for <= time.monotonic() - began
    told = re.search(
        r"lock 'celery:f:1' is held by observer \(.*\) for (\d+) s or longer: ", record.getMessage()
    )
    assert told is not None
    assert int(told[1]) == int(record.held_for)
    assert {"skip": "skipped", "raise": "failing"}[policy] in record.getMessage()


def test_a_skip_is_told_by_nobody_else(f: Any, judge: Judge, caplog: pytest.LogCaptureFixture) -> None:
    """No line of Celery's about it is worse than INFO."""
    judge.take(id_of("celery:f:t:1"))
    with caplog.at_level(logging.DEBUG):
        f.delay(1)
    worse = [record for record in caplog.records if record.levelno > logging.INFO or record.exc_info]
    assert not [(record.name, record.getMessage(), record.exc_text) for record in worse]


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_no_line_shows_the_arguments_of_a_lock_on_all_of_them(
    app: Celery, judge: Judge, caplog: pytest.LogCaptureFixture, taken: bool, policy: str
) -> None:
    """With ``lock_key=None`` the name holds them: lines and errors have the lock's name and id."""

    @app.task(base=AdvisoryLockedTask, name="f", lock_on_conflict=policy, shared=False)
    def f(card): ...

    id = id_of("celery:f:card=hunter2")
    if taken:
        judge.take(id)
    with caplog.at_level(logging.DEBUG, "celery_pglock"):
        result = f.delay("hunter2")
    assert lines(caplog)
    for record in lines(caplog):
        assert "hunter2" not in record.getMessage() + repr(vars(record))
        assert str(id[0]) in record.getMessage()
    assert "hunter2" not in repr(result.result) + str(result.result)

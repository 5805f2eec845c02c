"""An entry of a schedule may ask for a conflict policy of its own."""

from __future__ import annotations

import pytest
from celery import Celery, Task
from celery.exceptions import ImproperlyConfigured

from celery_pglock import AdvisoryLockedTask, LockNotAcquired, entry_options, is_skipped
from celery_pglock.locks.keys import id_of
from integration.judge import Judge


@pytest.fixture
def report(app: Celery) -> Task:
    @app.task(base=AdvisoryLockedTask, name="report", lock_key=[], shared=False)
    def report() -> str:
        return "done"

    return report


def test_the_entry_s_policy_is_the_message_s_alone(report: Task, judge: Judge) -> None:
    judge.take(id_of("celery:report"))
    assert is_skipped(report.apply().get())
    with pytest.raises(LockNotAcquired):
        report.apply(**entry_options(on_conflict="raise")).get()
    assert is_skipped(report.apply().get())


def test_an_entry_may_wait_as_long_as_a_task_that_waits(report: Task, judge: Judge) -> None:
    asked = report._lock_options.asked_by("report", entry_options(on_conflict="wait")["headers"])
    assert (asked.on_conflict, asked.max_wait) == ("wait", 60)
    assert report._lock_options.max_wait == 3600


def test_the_task_s_own_time_to_wait_stays(app: Celery) -> None:
    @app.task(base=AdvisoryLockedTask, lock_key=[], lock_max_wait=7, shared=False)
    def report() -> None: ...

    headers = entry_options(on_conflict="wait")["headers"]
    assert report._lock_options.asked_by("report", headers).max_wait == 7


def test_what_does_not_go_together_is_refused(app: Celery) -> None:
    @app.task(base=AdvisoryLockedTask, name="limited", lock_key=[], lock_limit=2, shared=False)
    def limited() -> None: ...

    with pytest.raises(ImproperlyConfigured, match=r"limited.*'wait'.*no queue"):
        limited.apply(**entry_options(on_conflict="wait"), throw=True)
    with pytest.raises(ValueError, match="'never'"):
        entry_options(on_conflict="never")


def test_other_options_and_headers_are_kept() -> None:
    options = entry_options(on_conflict="retry", expires=30, headers={"tenant": 42})
    assert options == {"expires": 30, "headers": {"tenant": 42, "pglock_on_conflict": "retry"}}

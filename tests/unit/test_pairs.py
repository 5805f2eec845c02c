"""Which options go together, and what the user is told who wrote what does not."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from celery_pglock import AdvisoryLockedTask, advisory_lock

SHARED = {"lock_mode": "shared"}
LIMITED = {"lock_limit": 3}
KEPT = {"lock_min_hold": 5}
IN_TRANSACTION = {"lock_scope": "transaction"}
WAITS = {"lock_on_conflict": "wait"}


@pytest.fixture
def app() -> Celery:
    return Celery("shop", broker="memory://", set_as_current=False)


def nothing(): ...


def bound(app: Celery, name: str = "shop.train", **options: Any) -> Any:
    """Bind a task with options, as the end of an app's start does."""

    def train(tenant_id): ...

    task = app.task(base=AdvisoryLockedTask, name=name, shared=False, **options)(train)
    app.finalize()
    return app.tasks[task.name]


@pytest.mark.parametrize("policy", ["skip", "retry", "raise", "wait"])
@pytest.mark.parametrize(
    "options",
    [{}, SHARED, LIMITED, KEPT, IN_TRANSACTION, SHARED | IN_TRANSACTION, LIMITED | KEPT],
    ids=lambda options: "+".join(options) or "exclusive",
)
def test_what_makes_sense_is_accepted(app: Celery, options: dict[str, Any], policy: str) -> None:
    """Every policy with every way to hold, but for a queue of N at once."""
    options = options | {"lock_on_conflict": policy}
    if policy == "wait" and "lock_limit" in options:
        with pytest.raises(ImproperlyConfigured, match="no queue"):
            bound(app, **options)
        return
    assert bound(app, **options)._lock_options is not None


@pytest.mark.parametrize(
    ("options", "named", "advice"),
    [
        (LIMITED | WAITS, "lock_limit", 'lock_on_conflict="retry"'),
        (LIMITED | SHARED, "lock_limit", 'lock_mode="exclusive"'),
        (LIMITED | IN_TRANSACTION, "lock_limit", 'lock_scope="session"'),
        (KEPT | SHARED, "lock_min_hold", 'lock_mode="exclusive"'),
        (KEPT | IN_TRANSACTION, "lock_min_hold", 'lock_scope="session"'),
        ({"lock_min_hold": timedelta(seconds=1)} | SHARED, "lock_min_hold", 'lock_mode="exclusive"'),
        ({"lock_on_lost": "continue"} | IN_TRANSACTION, "lock_on_lost", '"abort"'),
        ({"lock_max_waiters": 1}, "lock_max_waiters", 'lock_on_conflict="wait"'),
        ({"lock_max_waiters": 1, "lock_on_conflict": "retry"}, "lock_max_waiters", 'lock_on_conflict="wait"'),
        ({"lock_max_waiters": 1} | WAITS | IN_TRANSACTION, "lock_max_waiters", 'lock_scope="session"'),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_what_makes_no_sense_is_refused_with_the_reason(
    app: Celery, options: dict[str, Any], named: str, advice: str
) -> None:
    """The refusal names the task, the option and what to write instead."""
    with pytest.raises(ImproperlyConfigured) as refusal:
        bound(app, **options)
    for text in ("'shop.train'", f"{named}: ", advice):
        assert text in str(refusal.value)


def test_each_half_of_a_refused_pair_is_accepted_alone(app: Celery) -> None:
    """The control: it is the pair that makes no sense."""
    halves = [LIMITED, WAITS, SHARED, IN_TRANSACTION, KEPT, WAITS | {"lock_max_waiters": 1}]
    for number, half in enumerate(halves):
        assert bound(app, f"task{number}", **half)._lock_options is not None


@pytest.mark.parametrize(
    "harmless",
    [{"lock_limit": 1}, {"lock_min_hold": 0}, {"lock_min_hold": timedelta(0)}, {"lock_max_waiters": None}],
    ids=str,
)
def test_a_default_that_is_written_out_is_no_pair(app: Celery, harmless: dict[str, Any]) -> None:
    """What asks for nothing goes with everything."""
    bound(app, **{**SHARED, **IN_TRANSACTION, **harmless})


def test_a_pair_that_comes_from_a_base_class_is_refused(app: Celery) -> None:
    """Options are inherited, one from here and one from there."""

    class Readers(AdvisoryLockedTask):
        abstract = True
        lock_mode = "shared"

    app.task(base=Readers, name="f", shared=False, lock_limit=2)(nothing)
    with pytest.raises(ImproperlyConfigured, match="lock_limit"):
        app.finalize()


def test_a_task_that_runs_unlocked_may_say_what_it_likes(app: Celery) -> None:
    """`lock_enabled=False` is a way to try something out."""
    assert bound(app, lock_enabled=False, **SHARED, **LIMITED)._lock_options is None


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("lock_mode", "share", "'exclusive', 'shared'"),
        ("lock_mode", None, "not None"),
        ("lock_scope", "xact", "'session', 'transaction'"),
        ("lock_limit", 0, "a whole number >= 1, not 0"),
        ("lock_limit", -1, "not -1"),
        ("lock_limit", 2.0, "not 2.0"),
        ("lock_limit", "2", "lock_limit"),
        ("lock_limit", True, "not True"),
        ("lock_limit", None, "lock_limit"),
        ("lock_min_hold", -1, "seconds >= 0"),
        ("lock_min_hold", "5", "not '5'"),
        ("lock_min_hold", float("inf"), "not inf"),
        ("lock_min_hold", float("nan"), "not nan"),
        ("lock_max_waiters", 0, "a whole number >= 1, not 0"),
        ("lock_max_waiters", 1.5, "not 1.5"),
    ],
)
def test_a_value_that_is_none_is_refused(app: Celery, option: str, value: Any, says: str) -> None:
    """Told with the option's name and what it may be."""
    options = {option: value} | (WAITS if option == "lock_max_waiters" else {})
    with pytest.raises(ImproperlyConfigured) as refusal:
        bound(app, **options)
    assert option in str(refusal.value)
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"lock_on_conflict": "retry"}, 3600.0),
        (WAITS, 60.0),
        ({"lock_on_conflict": lambda _: "retry"}, 3600.0),
        (WAITS | {"lock_max_wait": 5}, 5.0),
        (WAITS | {"lock_max_wait": 0}, 0.0),
        (WAITS | {"lock_max_wait": timedelta(minutes=2)}, 120.0),
        (WAITS | {"lock_max_wait": None}, None),
        ({"lock_on_conflict": "retry", "lock_max_wait": None}, None),
        ({"lock_on_conflict": "retry", "lock_max_wait": 0}, 0.0),
    ],
)
def test_how_long_a_conflict_may_last(app: Celery, options: dict[str, Any], seconds: float | None) -> None:
    """An hour of retries, a minute in the queue, or what the task says; None is for ever and 0 not at all."""
    assert bound(app, **options)._lock_options.max_wait == seconds


@pytest.mark.parametrize(("value", "seconds"), [(timedelta(minutes=1), 60.0), (0.5, 0.5), (3, 3.0)])
def test_a_minimum_hold_is_seconds_or_a_timedelta(app: Celery, value: Any, seconds: float) -> None:
    assert bound(app, lock_min_hold=value)._lock_options.min_hold == seconds


def test_a_name_has_one_limit(app: Celery) -> None:
    """Two tasks that share a name and differ in it would each count for themselves."""
    app.task(base=AdvisoryLockedTask, name="one", shared=False, lock_name="n", lock_limit=2)(nothing)
    app.task(base=AdvisoryLockedTask, name="two", shared=False, lock_name="n", lock_limit=3)(nothing)
    with pytest.raises(ImproperlyConfigured, match="a name has one limit") as refusal:
        app.finalize()
    for text in ("'one'", "'two'", "'n'", "2", "3"):
        assert text in str(refusal.value)


def test_one_limit_of_a_name_meets_the_default(app: Celery) -> None:
    """Also where one of the two does not mention it."""
    app.task(base=AdvisoryLockedTask, name="one", shared=False, lock_name="n")(nothing)
    app.task(base=AdvisoryLockedTask, name="two", shared=False, lock_name="n", lock_limit=3)(nothing)
    with pytest.raises(ImproperlyConfigured, match="a name has one limit"):
        app.finalize()


def test_tasks_of_one_name_and_one_limit_go_together(app: Celery) -> None:
    """The control, and two names may differ."""
    for name, options in {
        "one": {"lock_name": "n", "lock_limit": 2},
        "two": {"lock_name": "n", "lock_limit": 2, "lock_min_hold": 3},
        "three": {"lock_limit": 3},
    }.items():
        bound(app, name, **options)


def test_modes_and_scopes_meet_under_one_name(app: Celery) -> None:
    """Readers and writers, sessions and transactions: that is what a common name is for."""
    for number, options in enumerate([{}, SHARED, IN_TRANSACTION, SHARED | IN_TRANSACTION, KEPT]):
        bound(app, f"task{number}", lock_name="n", **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "read"}, "mode: "),
        ({"scope": "xact"}, "scope: "),
        ({"limit": 0}, "limit: "),
        ({"limit": True}, "limit: "),
        ({"limit": "2"}, "limit: "),
        ({"limit": 2, "mode": "shared"}, 'mode="exclusive"'),
        ({"limit": 2, "scope": "transaction"}, 'scope="session"'),
        ({"min_hold": 5, "mode": "shared"}, 'mode="exclusive"'),
        ({"min_hold": timedelta(seconds=5), "scope": "transaction"}, 'scope="session"'),
        ({"wait": "60"}, "wait: "),
        ({"wait": -1}, "wait: "),
        ({"wait": True}, "wait: "),
        ({"wait": float("nan")}, "wait: "),
        ({"wait": float("inf")}, "wait: "),
        ({"min_hold": -1}, "min_hold: "),
        ({"min_hold": "5"}, "min_hold: "),
        ({"min_hold": float("inf")}, "min_hold: "),
    ],
    ids=str,
)
def test_what_a_block_can_not_ask_for_is_refused_at_once(options: dict[str, Any], says: str) -> None:
    """Before anything is asked of a server, with the argument's name."""
    with pytest.raises((TypeError, ValueError)) as refusal:
        advisory_lock("deploy", database_url="postgresql://nowhere.invalid/", **options)
    assert says in str(refusal.value)


@pytest.mark.parametrize("name", ["", None, 5, b"deploy", ("deploy",)], ids=repr)
def test_a_name_is_a_text_or_an_id(name: Any) -> None:
    """A number alone could mean either, and an empty text the namespace."""
    with pytest.raises(TypeError, match="a text or a LockId"):
        advisory_lock(name, database_url="postgresql://nowhere.invalid/")

"""What a task's ``lock_*`` options may be, and what the user is told who wrote something else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery, Task
from celery.exceptions import ImproperlyConfigured

from celery_pglock import AdvisoryLockedTask


@pytest.fixture
def app() -> Celery:
    return Celery("shop", broker="memory://", set_as_current=False)


def bound(app: Celery, body: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Bind a task `shop.train` with options, as the end of an app's start does."""

    def train(tenant_id, full=False): ...

    options = {"base": AdvisoryLockedTask, "name": "shop.train", "shared": False, **options}
    task = app.task(**options)(body or train)
    app.finalize()
    return app.tasks[task.name]


def add_one(x):
    return x + 1


def nothing(): ...


def name_of(task: Any, *args: Any, **kwargs: Any) -> Any:
    return task._lock_options.named("celery", args, kwargs)


def is_locked(task: Any) -> bool:
    return task._lock_options is not None


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("lock_keys", "x", "did you mean lock_key?"),
        ("lock_on_conflicts", "skip", "did you mean lock_on_conflict?"),
        ("lock_retry_back_off", 2, "did you mean lock_retry_backoff?"),
        ("lock_isolation_of_rows", 1, "the options are lock_"),
        ("lock_key", "tenant:{tenant_id}", "write <tenant_id>"),
        ("lock_key", "tenant:<tenant>", "it takes tenant_id, full"),
        ("lock_key", ["tenant"], "it takes tenant_id, full"),
        ("lock_key", "", "write [] for the lock's name alone"),
        ("lock_key", 5, "a template, a list of argument names, a callable or None, not 5"),
        ("lock_key", b"tenant", "a template, a list of argument names, a callable or None"),
        ("lock_name", "", "a text, not ''"),
        ("lock_name", 5, "a text, not 5"),
        ("lock_enabled", 1, "True or False, not 1"),
        ("lock_enabled", "no", "True or False, not 'no'"),
        ("lock_on_conflict", "ignore", "'skip', 'retry'"),
        ("lock_on_conflict", None, "or a callable, not None"),
        ("lock_on_conflict", True, "or a callable, not True"),
        ("lock_on_conflict", ["skip"], "or a callable, not ['skip']"),
        ("lock_max_wait", -1, "seconds >= 0"),
        ("lock_max_wait", "60", "not '60'"),
        ("lock_max_wait", True, "not True"),
        ("lock_max_wait", float("nan"), "not nan"),
        ("lock_max_wait", float("inf"), "None for ever"),
        ("lock_max_wait", timedelta(seconds=-1), "seconds >= 0"),
        ("lock_retry_backoff", 0, "whole seconds >= 1"),
        ("lock_retry_backoff", 1.5, "not 1.5"),
        ("lock_retry_backoff", "2", "not '2'"),
        ("lock_retry_backoff", None, "not None"),
        ("lock_retry_backoff", float("nan"), "not nan"),
        ("lock_retry_backoff", float("inf"), "not inf"),
        ("lock_retry_backoff", timedelta(milliseconds=500), "whole seconds >= 1"),
        ("lock_retry_backoff_max", 0, "whole seconds >= 1"),
        ("lock_retry_jitter", 1, "True or False, not 1"),
        ("lock_retry_jitter", None, "True or False, not None"),
    ],
)
def test_a_bad_option_is_refused_when_the_task_is_bound(
    app: Celery, option: str, value: Any, says: str
) -> None:
    """The refusal names the task, the option and what to write instead."""
    with pytest.raises(ImproperlyConfigured) as refusal:
        bound(app, **{option: value})
    text = str(refusal.value)
    assert "'shop.train'" in text
    assert option in text
    assert says in text


@pytest.mark.parametrize(
    ("option", "value", "field", "read"),
    [
        ("lock_max_wait", 0, "max_wait", 0.0),
        ("lock_max_wait", None, "max_wait", None),
        ("lock_max_wait", timedelta(minutes=2), "max_wait", 120.0),
        ("lock_retry_backoff", 3.0, "backoff", 3),
        ("lock_retry_backoff_max", timedelta(minutes=5), "backoff_max", 300),
        ("lock_retry_jitter", False, "jitter", False),
        ("lock_skip_result", None, "skip_result", None),
        ("lock_name", None, "lock_name", "shop.train"),
        ("lock_name", "imports", "lock_name", "imports"),
    ],
)
def test_options_are_read_as_they_are_meant(
    app: Celery, option: str, value: Any, field: str, read: Any
) -> None:
    """0 is no "unset", None is for ever, a timedelta is as good as seconds."""
    assert getattr(bound(app, **{option: value})._lock_options, field) == read


def test_the_defaults_are_the_documented_ones(app: Celery) -> None:
    """All arguments, the task's own name, skip; an hour, 2 to 60 s, with jitter."""
    task = bound(app)
    options = task._lock_options
    assert name_of(task, 42) == "celery:shop.train:tenant_id=42,full=False"
    assert (options.on_conflict, options.max_wait) == ("skip", 3600.0)
    assert (options.backoff, options.backoff_max, options.jitter) == (2, 60, True)


# Where options may come from.


def test_annotations_set_options(app: Celery) -> None:
    """`task_annotations` is Celery's way to set options for tasks of others."""
    app.conf.task_annotations = {"shop.train": {"lock_key": "t:<tenant_id>", "lock_on_conflict": "retry"}}
    task = bound(app)
    assert name_of(task, 42) == "celery:shop.train:t:42"
    assert task._lock_options.on_conflict == "retry"


def test_annotations_are_checked_too(app: Celery) -> None:
    """A slip in `task_annotations` is no silence."""
    app.conf.task_annotations = {"shop.train": {"lock_keys": "t:<tenant_id>"}}
    with pytest.raises(ImproperlyConfigured, match="did you mean lock_key"):
        bound(app)


def test_an_app_wide_class_locks_only_the_tasks_that_ask_for_it() -> None:
    """With `Celery(task_cls=AdvisoryLockedTask)` a task without a ``lock_*`` option stays as it is."""
    app = Celery("shop", task_cls=AdvisoryLockedTask, set_as_current=False)
    plain = app.task(name="plain", shared=False)(nothing)
    keyed = app.task(name="keyed", lock_key=[], shared=False)(nothing)
    enabled = app.task(name="enabled", lock_enabled=True, shared=False)(nothing)
    disabled = app.task(name="disabled", lock_enabled=False, shared=False)(nothing)
    explicit = app.task(name="explicit", base=AdvisoryLockedTask, shared=False)(nothing)
    app.finalize()
    locked = [task.name for task in (plain, keyed, enabled, disabled, explicit) if is_locked(task)]
    assert locked == ["keyed", "enabled", "explicit"]
    assert not any(is_locked(app.tasks[name]) for name in app.tasks if name.startswith("celery."))


def test_an_app_wide_class_with_a_policy_of_its_own_hands_it_on() -> None:
    """Options of the app's class are defaults of its tasks, and lock none of them by themselves."""

    class House(AdvisoryLockedTask):
        abstract = True
        lock_on_conflict = "retry"

    app = Celery("shop", task_cls=House, set_as_current=False)
    plain = app.task(name="plain", shared=False)(nothing)
    keyed = app.task(name="keyed", lock_key=[], shared=False)(nothing)
    app.finalize()
    assert not is_locked(plain)
    assert keyed._lock_options.on_conflict == "retry"


def test_annotations_lock_a_task_of_an_app_wide_class() -> None:
    """An option from `task_annotations` asks for the lock as well as one of the decorator."""
    app = Celery("shop", task_cls=AdvisoryLockedTask, set_as_current=False)
    app.conf.task_annotations = {"other": {"lock_key": []}}
    task = app.task(name="other", shared=False)(nothing)
    app.finalize()
    assert name_of(task) == "celery:other"


def test_annotations_of_all_tasks_lock_none_of_celerys_own() -> None:
    """A locked ``celery.chord_unlock`` would fail, and hang each chord of a database backend."""
    app = Celery("celery", task_cls=AdvisoryLockedTask, set_as_current=False)
    app.conf.task_annotations = {"*": {"lock_on_conflict": "retry"}}
    app.task(name="celery.mine", shared=False)(nothing)
    app.finalize()
    assert "celery.chord_unlock" in app.tasks
    assert [name for name in app.tasks if is_locked(app.tasks[name])] == ["celery.mine"]


def test_a_disabled_task_runs_unlocked(app: Celery) -> None:
    """``lock_enabled=False`` is all it takes."""
    assert not is_locked(bound(app, lock_enabled=False))


# What kinds of bodies there are.


def test_a_bound_body_is_keyed_by_its_own_arguments(app: Celery) -> None:
    """With ``bind=True`` self is no argument of the call."""

    def body(self, tenant_id): ...

    assert name_of(bound(app, body, bind=True), 42) == "celery:shop.train:tenant_id=42"


def test_a_class_based_task_is_keyed_by_the_arguments_of_run(app: Celery) -> None:
    """`run` is the body."""

    class Train(AdvisoryLockedTask):
        name = "shop.train"
        lock_key = "t:<tenant_id>"

        def run(self, tenant_id): ...

    assert name_of(app.register_task(Train()), tenant_id=42) == "celery:shop.train:t:42"


class KeyOfTenant:
    def __call__(self, tenant_id: int, full: bool = False) -> str:
        return f"t{tenant_id}"


@pytest.mark.parametrize(
    "lock_key",
    [
        lambda tenant_id: f"t{tenant_id}",
        staticmethod(lambda tenant_id: f"t{tenant_id}"),
        functools.partial("t{0}".format),
        KeyOfTenant(),
        KeyOfTenant().__call__,
    ],
    ids=["lambda", "staticmethod", "partial", "object", "method"],
)
@pytest.mark.parametrize("by_class", [False, True])
def test_a_callable_gets_the_arguments_of_the_task_and_no_self(
    app: Celery, lock_key: Any, by_class: bool
) -> None:
    """A function that is an attribute of a class would bind self when read from an instance."""
    if by_class:
        base = type("Base", (AdvisoryLockedTask,), {"lock_key": lock_key, "abstract": True})
        task = bound(app, base=base)
    else:
        task = bound(app, lock_key=lock_key)
    assert name_of(task, 42) == "celery:shop.train:t42"


def test_a_policy_that_is_a_function_of_a_class_gets_the_conflict_alone(app: Celery) -> None:
    """The same holds for ``lock_on_conflict``."""

    class Base(AdvisoryLockedTask):
        abstract = True

        def lock_on_conflict(conflict):  # noqa: N805
            return conflict

    assert bound(app, base=Base)._lock_options.on_conflict("the conflict") == "the conflict"


def test_a_body_with_kwargs_takes_any_argument_name(app: Celery) -> None:
    """Only the call can tell what a ``**kwargs`` body gets."""

    def body(**kwargs): ...

    assert name_of(bound(app, body, lock_key="<user>"), user=3) == "celery:shop.train:3"


def test_two_tasks_share_a_lock_by_its_name_only(app: Celery) -> None:
    """The same ``lock_key`` alone does not make two tasks exclude each other."""
    a, b = (bound(app, name=name, lock_key="<tenant_id>") for name in ("a", "b"))
    c, d = (bound(app, name=name, lock_key="<tenant_id>", lock_name="shared") for name in ("c", "d"))
    assert name_of(a, 1) != name_of(b, 1)
    assert name_of(c, 1) == name_of(d, 1) == "celery:shared:1"


# Other classes that wrap `__call__`.


class ContextTask(Task):
    """What Flask's documentation shows."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return "context", super().__call__(*args, **kwargs)


def test_a_wrapper_behind_the_lock_is_kept(app: Celery) -> None:
    """``class T(AdvisoryLockedTask, ContextTask)`` has both."""
    base = type("Both", (AdvisoryLockedTask, ContextTask), {"abstract": True})
    task = bound(app, add_one, base=base)
    assert is_locked(task)
    assert task(5) == ("context", 6)


@pytest.mark.parametrize("lock_enabled", [True, False])
def test_a_wrapper_in_front_of_the_lock_is_kept_or_refused(app: Celery, lock_enabled: bool) -> None:
    """``class T(ContextTask, AdvisoryLockedTask)``: never silently unlocked, nor without its context."""
    base = type("Both", (ContextTask, AdvisoryLockedTask), {"abstract": True})
    refusal = ""
    try:
        task = bound(app, add_one, base=base, lock_enabled=lock_enabled)
    except ImproperlyConfigured as error:
        refusal = str(error)
    if refusal:
        assert "ContextTask" in refusal
        assert "class LockedTask(AdvisoryLockedTask, ThatClass)" in refusal
    else:
        assert task(5) == ("context", 6)


def test_a_wrapper_of_the_task_itself_is_kept_or_refused(app: Celery) -> None:
    """A `__call__` that a locked class defines itself stands in front of the lock."""

    class Own(AdvisoryLockedTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

    with pytest.raises(ImproperlyConfigured, match="Own"):
        bound(app, base=Own)


def test_a_base_that_leaves_out_the_wrapper_of_the_app_is_refused() -> None:
    """Flask's pattern sets `app.Task`; ``base=AdvisoryLockedTask`` would lose the app context in silence."""
    app = Celery("shop", task_cls=ContextTask, set_as_current=False)
    with pytest.raises(ImproperlyConfigured, match=r"class LockedTask\(AdvisoryLockedTask, ContextTask\)"):
        bound(app)


def test_a_base_with_the_wrapper_of_the_app_is_accepted() -> None:
    """The way out that the refusal names works."""
    app = Celery("shop", task_cls=ContextTask, set_as_current=False)
    base = type("Both", (AdvisoryLockedTask, ContextTask), {"abstract": True})
    assert bound(app, add_one, base=base)(5) == ("context", 6)


def test_an_app_wide_lock_with_a_wrapper_behind_it_is_accepted() -> None:
    """``task_cls`` may be both at once."""
    both = type("Both", (AdvisoryLockedTask, ContextTask), {"abstract": True})
    app = Celery("shop", task_cls=both, set_as_current=False)
    task = app.task(name="shop.train", lock_key=[], shared=False)(add_one)
    app.finalize()
    assert is_locked(task)
    assert task(5) == ("context", 6)


def test_a_direct_call_needs_no_database(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """``train(42)`` is a plain function call, as everywhere in Celery."""
    monkeypatch.delenv("CELERY_PGLOCK_DATABASE_URL", raising=False)
    task = bound(app, add_one)
    assert task(1) == task.run(1) == 2


def test_publishing_needs_no_database(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """A producer asks nobody for a lock, and knows no database."""
    monkeypatch.delenv("CELERY_PGLOCK_DATABASE_URL", raising=False)
    task = bound(app)
    assert task.delay(1).id

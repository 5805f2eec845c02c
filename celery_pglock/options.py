"""The ``lock_*`` options of a task, checked when the task is bound."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from celery import Task
from celery.exceptions import ImproperlyConfigured

from .durations import seconds_of
from .locks import keys
from .locks.errors import LockKeyError
from .spelling import advice_for

__all__ = ["DECISIONS", "UNSET", "LockOptions", "entry_options", "lock_options_of"]

#: What a callable policy may decide, when the name was asked for and refused already.
DECISIONS = ("skip", "retry", "raise")
POLICIES = (*DECISIONS, "wait")
MODES = ("exclusive", "shared")
SCOPES = ("session", "transaction")

#: Seconds that a conflict may last in all, where the task does not say.
MAX_WAIT = {"wait": 60.0}
MAX_WAIT_OF_RETRIES = 3600.0

#: The header by which a message asks for another conflict policy than its task's.
ON_CONFLICT_HEADER = "pglock_on_conflict"

LOSS_POLICIES = ("abort", "retry", "continue")

#: Stands for what is not set, where None means something.
UNSET = object()


@dataclass(frozen=True)
class LockOptions:
    """What one task asks of its lock."""

    key: keys.Key
    lock_name: str
    #: The name holds all arguments, which must not end up in logs.
    private: bool
    on_conflict: str | Callable[..., str]
    max_wait: float | None
    backoff: int
    backoff_max: int
    jitter: bool
    skip_result: Any
    on_lost: str
    shared: bool
    limit: int
    min_hold: float
    max_waiters: int | None
    in_transaction: bool
    #: Whether ``max_wait`` is the task's own, or the policy's default.
    max_wait_is_set: bool = True

    def asked_by(self, task_name: str | None, headers: Mapping[str, Any] | None) -> LockOptions:
        """The options of a message, which may ask for another policy. See `entry_options`.

        Raises `ImproperlyConfigured` for a policy that does not go with the task's other options.
        """
        policy = headers.get(ON_CONFLICT_HEADER) if headers else None
        if policy is None or policy == self.on_conflict:
            return self
        if policy not in POLICIES or (policy == "wait" and self.limit > 1):
            raise ImproperlyConfigured(
                f"task {task_name!r}: its message asks for the conflict policy {policy!r}, and"
                f" {'there is no queue for N at once' if policy in POLICIES else 'there is none such'}"
            )
        max_wait = self.max_wait if self.max_wait_is_set else MAX_WAIT.get(policy, MAX_WAIT_OF_RETRIES)
        return replace(self, on_conflict=policy, max_wait=max_wait)

    def named(self, namespace: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> keys.LockId | str:
        """Return the name of one call, or the id that its ``lock_key`` names. Raises `LockKeyError`."""
        rendered = self.key.render(args, kwargs)
        if isinstance(rendered, keys.LockId):
            return rendered
        return keys.full_name(namespace, self.lock_name, rendered)


def lock_options_of(
    task: type[Task[..., Any]], declared_by: type, unlocked_base: type | None
) -> LockOptions | None:
    """Check and compile the options of a task class, `None` if it runs unlocked.

    With an ``unlocked_base`` only tasks that set an option below it are locked, and none of Celery's own.
    Raises `ImproperlyConfigured`.
    """
    known = sorted(name for name in vars(declared_by) if name.startswith("lock_"))
    for name in sorted(set(options_given(task, declared_by)).difference(known)):
        advice = advice_for(name, known, "options")
        raise ImproperlyConfigured(f"task {task.name!r}: there is no option {name}: {advice}")
    if unlocked_base is not None and (is_celerys_own(task) or not any(options_given(task, unlocked_base))):
        return None
    option = Option(task)
    if not option.flag("lock_enabled"):
        return None
    refuse_pairs(option)
    return LockOptions(
        key=option.key("lock_key"),
        lock_name=option.text("lock_name", task.name),
        private=option.value("lock_key") is None,
        on_conflict=option.policy("lock_on_conflict"),
        max_wait=option.max_wait("lock_max_wait"),
        backoff=option.whole_seconds("lock_retry_backoff"),
        backoff_max=option.whole_seconds("lock_retry_backoff_max"),
        jitter=option.flag("lock_retry_jitter"),
        skip_result=option.value("lock_skip_result"),
        on_lost=option.choice("lock_on_lost", LOSS_POLICIES),
        shared=option.choice("lock_mode", MODES) == "shared",
        limit=option.count("lock_limit"),
        min_hold=option.bounded_seconds("lock_min_hold"),
        max_waiters=option.count_or_none("lock_max_waiters"),
        in_transaction=option.choice("lock_scope", SCOPES) == "transaction",
        max_wait_is_set=option.value("lock_max_wait") is not UNSET,
    )


def is_celerys_own(task: type[Task[..., Any]]) -> bool:
    """Whether Celery defines it: chord_unlock, map, backend_cleanup. An annotation of "*" is not about those.

    Told by its module, since the tasks of an app that is called "celery" may have such names too.
    """
    return task.__module__.startswith("celery.")


def entry_options(*, on_conflict: str, **options: Any) -> dict[str, Any]:
    """Return the ``options`` of a beat entry (or of ``apply_async``) with a conflict policy of its own.

    ``"options": entry_options(on_conflict="retry", expires=300)`` leaves the task and its other callers as
    they are. Raises `ValueError` for a policy that does not exist.
    """
    if on_conflict not in POLICIES:
        raise ValueError(f"on_conflict: one of {', '.join(map(repr, POLICIES))}, not {on_conflict!r}")
    headers = {**(options.get("headers") or {}), ON_CONFLICT_HEADER: on_conflict}
    return {**options, "headers": headers}


def refuse_pairs(option: Option) -> None:
    """Refuse options that make no sense together."""
    waits = option.value("lock_on_conflict") == "wait"
    shared = option.value("lock_mode") == "shared"
    limited = option.value("lock_limit") != 1
    in_transaction = option.value("lock_scope") == "transaction"
    if limited and waits:
        raise option.refuse("lock_limit", 'there is no queue for N at once: use lock_on_conflict="retry"')
    if limited and in_transaction:
        raise option.refuse("lock_limit", 'a transaction takes no slots: use lock_scope="session"')
    if in_transaction and option.value("lock_min_hold"):
        raise option.refuse("lock_min_hold", 'the lock ends with its transaction: use lock_scope="session"')
    if in_transaction and option.value("lock_on_lost") == "continue":
        raise option.refuse("lock_on_lost", 'a lost transaction has written nothing: use "abort" or "retry"')
    if in_transaction and option.value("lock_max_waiters") is not None:
        raise option.refuse("lock_max_waiters", 'places are kept by sessions: use lock_scope="session"')
    if limited and shared:
        raise option.refuse("lock_limit", 'readers are not counted: use lock_mode="exclusive"')
    if shared and option.value("lock_min_hold"):
        raise option.refuse("lock_min_hold", 'readers do not keep each other away: use lock_mode="exclusive"')
    if option.value("lock_max_waiters") is not None and not waits:
        raise option.refuse("lock_max_waiters", 'nobody waits but with lock_on_conflict="wait"')


def options_given(task: type[Task[..., Any]], base: type) -> Iterator[str]:
    """The ``lock_*`` names that a task and the classes between it and ``base`` set."""
    for cls in task.__mro__:
        if cls is base:
            return
        yield from (name for name in vars(cls) if name.startswith("lock_"))


class Option:
    """Reads the options of one task class; every refusal names the task, the option and what to write."""

    def __init__(self, task: type[Task[..., Any]]) -> None:
        self.task = task

    def value(self, name: str) -> Any:
        # Read statically: a function that is read from the class or an instance would bind to it.
        value = inspect.getattr_static(self.task, name)
        return value.__func__ if isinstance(value, staticmethod) else value

    def refuse(self, name: str, expected: str) -> ImproperlyConfigured:
        return ImproperlyConfigured(f"task {self.task.name!r}: {name}: {expected}")

    def key(self, name: str) -> keys.Key:
        try:
            return keys.key_of(self.value(name), body_signature(self.task))
        except (LockKeyError, TypeError) as exc:
            raise self.refuse(name, str(exc)) from exc

    def text(self, name: str, default: str) -> str:
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, str) or not value:
            raise self.refuse(name, f"a text, not {value!r}")
        return value

    def flag(self, name: str) -> bool:
        value = self.value(name)
        if not isinstance(value, bool):
            raise self.refuse(name, f"True or False, not {value!r}")
        return value

    def policy(self, name: str) -> str | Callable[..., str]:
        value = self.value(name)
        if callable(value):
            policy: Callable[..., str] = value
            return policy
        return self.choice(name, POLICIES, " or a callable")

    def choice(self, name: str, choices: Sequence[str], further: str = "") -> str:
        value = self.value(name)
        if value not in choices:
            raise self.refuse(name, f"one of {', '.join(map(repr, choices))}{further}, not {value!r}")
        return str(value)

    def seconds(self, name: str) -> float | None:
        value = self.value(name)
        try:
            return None if value is None else seconds_of(value)
        except (TypeError, ValueError):
            raise self.refuse(name, f"seconds >= 0, a timedelta, or None for ever, not {value!r}") from None

    def bounded_seconds(self, name: str) -> float:
        value = self.seconds(name)
        if value is None:
            raise self.refuse(name, "seconds >= 0 or a timedelta, not None")
        return value

    def max_wait(self, name: str) -> float | None:
        if self.value(name) is not UNSET:
            return self.seconds(name)
        return MAX_WAIT.get(str(self.value("lock_on_conflict")), MAX_WAIT_OF_RETRIES)

    def count(self, name: str) -> int:
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(name, f"a whole number >= 1, not {value!r}")
        return value

    def count_or_none(self, name: str) -> int | None:
        return None if self.value(name) is None else self.count(name)

    def whole_seconds(self, name: str) -> int:
        value = self.value(name)
        if isinstance(value, timedelta):
            value = value.total_seconds()
        if not isinstance(value, (int, float)) or not 1 <= value < math.inf or value != int(value):
            raise self.refuse(name, f"whole seconds >= 1 (brokers count in seconds), not {value!r}")
        return int(value)


def body_signature(task: type[Task[..., Any]]) -> inspect.Signature:
    """The signature of a task's body as its callers see it, without ``self``."""
    run = inspect.getattr_static(task, "run")
    if isinstance(run, (staticmethod, classmethod)):
        return inspect.signature(run.__get__(None, task))
    signature = inspect.signature(run)
    return signature.replace(parameters=list(signature.parameters.values())[1:])

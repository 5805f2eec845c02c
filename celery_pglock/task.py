"""The task class: the way of one execution, from its arguments to the release of its lock."""

from __future__ import annotations

import os
import socket
from typing import Any, ClassVar

from celery import Celery, Task, states
from celery.app.task import Context
from celery.canvas import Signature
from celery.exceptions import Ignore, ImproperlyConfigured

from . import conflict, hooks
from .config import settings_of
from .delivery import ignores_result
from .execution import Execution, hold_for, is_under_way, kept_back_by, unlocked
from .locks.hold import Hold, current_lock
from .locks.interrupt import LockInterrupt
from .locks.requests import Answer
from .options import UNSET, LockOptions, lock_options_of

__all__ = ["AdvisoryLockedTask"]

#: Celery's tasks that call another task once for each of their items.
MAPPING_TASKS = ("celery.map", "celery.starmap")


class AdvisoryLockedTask(Task):  # type: ignore[type-arg]
    """A task whose body never runs twice at a time under one name.

    The lock wraps the body and nothing else: it is acquired before the body, and released before anything
    that follows the body is published. A direct call is a plain function call.
    """

    abstract = True

    #: What is locked: a template such as ``"tenant:<tenant_id>"``, a list of argument names, or a callable
    #: with the task's own arguments that returns text, a number or a `LockId`. None: all arguments.
    #: []: the name alone.
    lock_key: Any = None
    #: Tasks that share it exclude each other. None: the task's own name.
    lock_name: str | None = None
    #: False: this task runs unlocked.
    lock_enabled: bool = True
    #: "skip", "retry", "raise", "wait" for a turn in PostgreSQL's queue, or a callable that is handed a
    #: `Conflict` and returns one of the first three.
    lock_on_conflict: Any = "skip"
    #: Seconds (or a timedelta) that a conflict may last in all before `LockNotAcquired`; None: for ever.
    #: Unset: 3600, and 60 for "wait".
    lock_max_wait: Any = UNSET
    #: With "wait": so many wait for a name at most, and who comes later is skipped. None: no limit.
    lock_max_waiters: int | None = None
    #: "exclusive", or "shared": readers run together, an exclusive one runs alone.
    lock_mode: str = "exclusive"
    #: "session", or "transaction": the lock lives in an open transaction, ``self.lock.connection``, that is
    #: committed with success and rolled back with every other end. Works behind a transaction pooler.
    lock_scope: str = "session"
    #: So many may hold the name at once.
    lock_limit: int = 1
    #: Seconds (or a timedelta) that the name stays taken from the grant, even if the body is done.
    lock_min_hold: Any = 0
    #: Whole seconds before the first retry after a conflict, doubled with each further one.
    lock_retry_backoff: Any = 2
    #: Whole seconds that are never exceeded between two tries.
    lock_retry_backoff_max: Any = 60
    #: Draw the seconds at random between 1 and the backoff.
    lock_retry_jitter: bool = True
    #: What a skipped execution returns. Unset: a marker, see `is_skipped`.
    lock_skip_result: Any = UNSET
    #: When the lock is lost: "abort" interrupts the body, and the task fails with `LockLost`; "retry"
    #: interrupts it and publishes it again; "continue" lets it go on.
    lock_on_lost: str = "abort"

    _lock_options: ClassVar[LockOptions | None] = None
    _wraps_a_call: ClassVar[bool] = False
    _stores_started: ClassVar[bool] = False

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Check the ``lock_*`` options. Raises `ImproperlyConfigured`."""
        super().on_bound(app)
        refuse_lost_wrappers(cls, app)
        cls._wraps_a_call = next_call(cls) is not Task.__call__
        # As Celery(task_cls=...) it is the base of every task, and locks those that ask for it.
        by_choice = issubclass(app.Task, AdvisoryLockedTask) and issubclass(cls, app.Task)
        cls._lock_options = lock_options_of(cls, AdvisoryLockedTask, app.Task if by_choice else None)
        if cls._lock_options is not None:
            refuse_other_limit(cls, cls._lock_options, app)
            take_over_track_started(cls)
            hooks.install(app)

    @property
    def lock(self) -> Hold | None:
        """The hold that the running body works under; None outside of one."""
        return current_lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body under its lock, or end without it. Source of the rule: celery/app/trace.py."""
        request = self.request
        if not is_execution(self, request):
            return super().__call__(*args, **kwargs)
        options = self._lock_options
        if options is None:
            return self._body(request, *args, **kwargs)
        settings = settings_of(self.app)
        if settings is None:
            with unlocked(options):
                return self._body(request, *args, **kwargs)
        hold = hold_for(options, settings, args, kwargs)
        execution = Execution(self, request, options, settings, hold)
        if execution.has_the_hold_already:
            with execution.under_way():
                return self._body(request, *args, **kwargs)
        try:
            with execution:
                asked = execution.acquire()
                if asked.answer is Answer.GRANTED:
                    with execution.interruptible():
                        execution.began = True
                        return self._body(request, *args, **kwargs)
        except (Exception, LockInterrupt) as raised:
            error = execution.ending(raised)
            if execution.runs_again_after(error):
                conflict.run_again(execution, error)
            if error is not raised:
                raise error from None
            raise
        finally:
            execution.clean_up()
        return conflict.resolve(execution, asked)

    def _body(self, request: Context, /, *args: Any, **kwargs: Any) -> Any:
        """Call what lies under the lock: a further class that wraps ``__call__``, or the body itself."""
        if self._stores_started:
            store_started(self, request)
        if self._wraps_a_call or request.called_directly:
            return super().__call__(*args, **kwargs)
        # Celery's own __call__ pushes a second request, up to 5.4 a blank one: that is for direct calls.
        return self.run(*args, **kwargs)

    def signature_from_request(self, request: Context | None = None, *args: Any, **kwargs: Any) -> Signature:
        """Build what ``retry()`` publishes: inside a locked body it waits until the name is free."""
        signature = super().signature_from_request(request, *args, **kwargs)
        execution = kept_back_by(self.request)
        if execution is not None:
            execution.keep_back_retry(signature)
        return signature

    def on_replace(self, sig: Signature) -> Any:
        """Publish what ``replace()`` was given, when the name is free."""
        execution = kept_back_by(self.request)
        if execution is None:
            return super().on_replace(sig)
        execution.keep_back(sig.delay)
        raise Ignore("Replaced by new task")


def is_execution(task: Task[..., Any], request: Context) -> bool:
    """Tell a worker's or ``apply()``'s execution from a function call."""
    if not request.called_directly:
        return not is_under_way(request)
    caller = task.app.current_task
    return caller is not None and caller.name in MAPPING_TASKS


def take_over_track_started(cls: type[AdvisoryLockedTask]) -> None:
    """Keep Celery's tracer from storing STARTED: it does so before a second delivery is known for one.

    What the first stored, or its body, would be written over.
    """
    if "_stores_started" in vars(cls):
        return  # It is bound again, and its own value is gone.
    # One that derives from a bound task inherits False, and what was meant by it.
    meant = cls.track_started or cls._stores_started
    cls._stores_started = bool(vars(cls).get("track_started", meant))
    cls.track_started = False


def store_started(task: AdvisoryLockedTask, request: Context) -> None:
    """Do what ``track_started`` asks for, when the body begins. Source of the call: celery/app/trace.py."""
    if request.called_directly or request.is_eager or ignores_result(task, request):
        return
    about = {"pid": os.getpid(), "hostname": request.hostname or socket.gethostname()}
    task.backend.store_result(request.id or "", about, states.STARTED, request=request)


def next_call(cls: type) -> Any:
    """The ``__call__`` that `AdvisoryLockedTask` stands in front of."""
    mro = cls.__mro__
    behind = mro[mro.index(AdvisoryLockedTask) + 1 :]
    return next(vars(base)["__call__"] for base in behind if "__call__" in vars(base))


def refuse_lost_wrappers(cls: type[Task[..., Any]], app: Celery) -> None:
    """Refuse a task that would run without its lock, or without what another class wraps round its calls."""
    mro = cls.__mro__
    for base in mro[: mro.index(AdvisoryLockedTask)]:
        if "__call__" in vars(base):
            raise ImproperlyConfigured(
                f"task {cls.name!r}: {base.__name__} defines __call__ in front of AdvisoryLockedTask, and"
                " could run the body without its lock: put it into a class that derives from celery.Task,"
                " and behind the lock: class LockedTask(AdvisoryLockedTask, ThatClass)"
            )
    for base in app.Task.__mro__:
        if "__call__" in vars(base) and not issubclass(Task, base) and base not in mro:
            raise ImproperlyConfigured(
                f"task {cls.name!r}: base= leaves out the app's task_cls {base.__name__}, which wraps"
                f" __call__: use both: class LockedTask(AdvisoryLockedTask, {base.__name__})"
            )


def refuse_other_limit(cls: type[Task[..., Any]], options: LockOptions, app: Celery) -> None:
    """Refuse tasks that share a name and differ in how many may hold it: each would count for itself."""
    for other in app._tasks.values():  # type: ignore[attr-defined]
        others = getattr(other, "_lock_options", None)
        if others is not None and others.lock_name == options.lock_name and others.limit != options.limit:
            raise ImproperlyConfigured(
                f"task {cls.name!r}: lock_limit: {options.limit}, while task {other.name!r} of lock_name"
                f" {options.lock_name!r} has {others.limit}: a name has one limit"
            )
